//! End-to-end training of a quantized model's scales, offsets and norms (E2E-QP of EfficientQAT: Chen et al. 2024,
//! arXiv:2407.11062, section 3.3) as the last step of recipes, after the method. The pipeline trains them.

use crate::options::{Key, OptionError, Options, Setting, TableSpec, name_of, shortest};

/// Name in recipes: `METHOD-SCHEME+e2e`.
pub const NAME: &str = "e2e";

/// Options of the training.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EndToEnd {
    /// Passes over the calibration windows.
    pub epochs: usize,
    /// First step of a scale, relative to the scale; decays to 0 along half a cosine.
    pub rate: f32,
    /// Tokens of a step: whole windows, at least one.
    pub batch_tokens: usize,
    /// Seed of the order of windows.
    pub seed: u64,
    /// Parameters that are trained with the scales.
    pub with: With,
}

/// Unquantized parameters that are trained with the scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum With {
    /// None.
    Nothing,
    /// Norm weights.
    Norms,
    /// Norm weights, and embedding and head where they are unquantized (QuIP#: Tseng et al. 2024, arXiv:2402.04396,
    /// section 5, trains the head).
    Tables,
}

/// Choices of `with` by name.
const WITH: [(&str, With); 3] =
    [("nothing", With::Nothing), ("norms", With::Norms), ("tables", With::Tables)];

impl EndToEnd {
    /// The defaults.
    pub const DEFAULT: Self =
        EndToEnd { epochs: 8, rate: 0.01, batch_tokens: 1024, seed: 0, with: With::Norms };

    /// Sets the options of the table `e2e`. The caller has refused unknown keys.
    ///
    /// # Errors
    /// A value that is not allowed.
    pub fn set(&mut self, from: Options<'_>) -> Result<(), OptionError> {
        self.epochs = from.count("epochs", 10_000)?.unwrap_or(self.epochs);
        self.rate = from.number("rate", 1.0)?.unwrap_or(self.rate);
        self.batch_tokens = from.count("batch_tokens", 1 << 24)?.unwrap_or(self.batch_tokens);
        self.seed = from.seed()?.unwrap_or(self.seed);
        self.with = from.one_of("with", &WITH)?.unwrap_or(self.with);
        Ok(())
    }

    /// All options as they are set; [`set`](Self::set) reads them back.
    pub fn settings(&self) -> Vec<Setting> {
        vec![
            Setting::new(TABLE.name, "epochs", self.epochs as i64),
            Setting::new(TABLE.name, "rate", shortest(self.rate)),
            Setting::new(TABLE.name, "batch_tokens", self.batch_tokens as i64),
            Setting::new(TABLE.name, "seed", self.seed as i64),
            Setting::new(TABLE.name, "with", name_of(&self.with, &WITH)),
        ]
    }
}

impl Default for EndToEnd {
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// Table of a recipe file.
pub const TABLE: TableSpec = TableSpec {
    name: NAME,
    keys: &[
        Key { name: "epochs", help: "passes over the calibration windows" },
        Key { name: "rate", help: "first step of a scale, relative to the scale" },
        Key { name: "batch_tokens", help: "tokens of a step" },
        Key { name: "seed", help: "seed of the order of windows" },
        Key {
            name: "with",
            help: "unquantized parameters that are trained too: nothing, norms, tables (norms, embedding and head)",
        },
    ],
};
