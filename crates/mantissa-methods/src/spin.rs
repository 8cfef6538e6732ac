//! SpinQuant (arXiv 2405.16406) as a transform of recipes. The pipeline learns the rotations and folds them into the model.

use crate::options::{Key, OptionError, Options, Setting, TableSpec, name_of, shortest};
use crate::rotate::{ONLINE, RESIDUAL, RotateOptions, SEED, VALUES};
use crate::transform::{Change, Transform};

/// Options of learned rotations.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SpinOptions {
    /// Rotations, and seed of the initial signs.
    pub rotate: RotateOptions,
    /// Number of steps.
    pub iterations: usize,
    /// Root mean square of the rotation angles of the first step, in radians; decays linearly to 0.
    pub rate: f32,
    /// Tokens of a step: whole windows, at least one.
    pub batch_tokens: usize,
    /// Gradient of a step; `None` chooses by the scheme: ranges for per-token scales, ranges and errors for weights
    /// with per-channel scales, errors for groups.
    pub gradient: Option<Gradient>,
}

/// Gradient of the loss with respect to a rotation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gradient {
    /// Through the rounding errors, as published: rounding passes gradients unchanged and ranges are constant
    /// (straight-through estimator).
    StraightThrough,
    /// Through the ranges of blocks, which determine the size of the errors.
    Ranges,
    /// Sum of both.
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
            help: "gradient of a step: both, ranges, straight-through; the default depends on the scheme",
        },
    ],
};

/// SpinQuant: learned rotations, starting from QuaRot's.
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

    fn fold_only(&mut self) {
        self.options.rotate.online = false;
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
