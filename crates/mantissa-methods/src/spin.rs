//! SpinQuant (arXiv 2405.16406) as a transform of recipes. The pipeline learns the rotations and folds them into the model.

use crate::options::{Key, OptionError, Options, Setting, TableSpec, name_of, shortest};
use crate::rotate::{ONLINE, RESIDUAL, RotateOptions, SEED, VALUES};
use crate::transform::{Change, Transform};

/// Options of learned rotations.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SpinOptions {
    /// Rotations, and the signs that they begin with.
    pub rotate: RotateOptions,
    /// Number of steps.
    pub iterations: usize,
    /// Root mean square of the angles of the first step, in radians; the others shrink linearly to nothing.
    pub rate: f32,
    /// Tokens of a step: whole windows, one at least.
    pub batch_tokens: usize,
    /// Gradient that a step follows; `None` chooses by the scheme: ranges where a token has one scale, ranges and errors with weights
    /// that have one scale per channel, errors where a group has one.
    pub gradient: Option<Gradient>,
}

/// Gradient of the loss as a rotation turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gradient {
    /// By way of the rounding errors, as if they turned with the values: gradients pass the rounding as if it were none, and ranges are
    /// held (the straight-through estimator), as published.
    StraightThrough,
    /// By way of the ranges of blocks, on which the size of the errors depends.
    Ranges,
    /// The sum of the two.
    Both,
}

/// Gradients by name.
pub const GRADIENTS: [(&str, Gradient); 3] =
    [("both", Gradient::Both), ("ranges", Gradient::Ranges), ("straight-through", Gradient::StraightThrough)];

impl SpinOptions {
    /// The defaults.
    pub const DEFAULT: Self = SpinOptions {
        rotate: RotateOptions::DEFAULT,
        iterations: 100,
        rate: 0.03,
        batch_tokens: 2048,
        gradient: None,
    };
}

impl Default for SpinOptions {
    fn default() -> Self {
        Self::DEFAULT
    }
}

const TABLE: TableSpec = TableSpec {
    name: "spin",
    keys: &[
        RESIDUAL,
        VALUES,
        ONLINE,
        SEED,
        Key { name: "iterations", help: "number of steps" },
        Key { name: "rate", help: "root mean square of the angles of the first step, in radians" },
        Key { name: "batch_tokens", help: "tokens of a step" },
        Key {
            name: "gradient",
            help: "gradient of a step: both, ranges, straight-through; by default by the scheme",
        },
    ],
};

/// SpinQuant: QuaRot's rotations, learned.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Spin {
    /// Options.
    pub options: SpinOptions,
}

impl Transform for Spin {
    fn name(&self) -> &'static str {
        "spin"
    }

    fn change(&self) -> Change<'_> {
        Change::LearnedRotation(self.options)
    }

    fn tables(&self) -> &'static [TableSpec] {
        &[TABLE]
    }

    fn set(&mut self, _: &str, from: Options<'_>) -> Result<(), OptionError> {
        let options = &mut self.options;
        options.rotate.set(from)?;
        options.iterations = from.count("iterations", 1_000_000)?.unwrap_or(options.iterations);
        options.batch_tokens = from.count("batch_tokens", 1 << 24)?.unwrap_or(options.batch_tokens);
        options.rate = from.number("rate", 1.0)?.unwrap_or(options.rate);
        options.gradient = from.one_of("gradient", &GRADIENTS)?.or(options.gradient);
        Ok(())
    }

    fn settings(&self) -> Vec<Setting> {
        let SpinOptions { rotate, iterations, rate, batch_tokens, gradient } = self.options;
        let mut settings = rotate.settings(TABLE.name);
        settings.extend([
            Setting::new(TABLE.name, "iterations", iterations as i64),
            Setting::new(TABLE.name, "rate", shortest(rate)),
            Setting::new(TABLE.name, "batch_tokens", batch_tokens as i64),
        ]);
        let gradient = gradient.map(|gradient| name_of(&gradient, &GRADIENTS));
        settings.extend(gradient.map(|name| Setting::new(TABLE.name, "gradient", name)));
        settings
    }
}
