//! QuaRot (arXiv 2404.00456) as a transform of recipes. The pipeline folds the rotations into the model.

use serde::{Deserialize, Serialize};

use crate::options::{Key, OptionError, Options, Setting, TableSpec};
use crate::transform::{Change, Transform};

/// Rotations of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RotateOptions {
    /// True if the residual stream is rotated.
    pub residual: bool,
    /// True if values are rotated within each head.
    pub values: bool,
    /// True if inputs of down projections are rotated at run time.
    pub online: bool,
    /// Seed of the random signs.
    pub seed: u64,
}

impl RotateOptions {
    /// The defaults.
    pub const DEFAULT: Self = RotateOptions { residual: true, values: true, online: true, seed: 0 };

    /// Sets the options that `options` names.
    ///
    /// # Errors
    /// A value that is not allowed.
    pub fn set(&mut self, options: Options<'_>) -> Result<(), OptionError> {
        self.residual = options.flag("residual")?.unwrap_or(self.residual);
        self.values = options.flag("values")?.unwrap_or(self.values);
        self.online = options.flag("online")?.unwrap_or(self.online);
        self.seed = options.seed()?.unwrap_or(self.seed);
        Ok(())
    }

    /// Options as set in `table`.
    pub fn settings(&self, table: &'static str) -> Vec<Setting> {
        vec![
            Setting::new(table, "residual", self.residual),
            Setting::new(table, "values", self.values),
            Setting::new(table, "online", self.online),
            Setting::new(table, "seed", self.seed as i64),
        ]
    }
}

impl Default for RotateOptions {
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// Key for rotating the residual stream, in every table that has it.
pub const RESIDUAL: Key =
    Key { name: "residual", help: "rotate the residual stream, if the architecture allows it" };
/// Rotation of values.
pub const VALUES: Key = Key { name: "values", help: "rotate values within each head" };
/// Rotation at run time.
pub const ONLINE: Key = Key { name: "online", help: "rotate inputs of down projections at run time" };
/// Seed of the signs.
pub const SEED: Key = Key { name: "seed", help: "seed of the random signs" };

const TABLE: TableSpec = TableSpec { name: "rotate", keys: &[RESIDUAL, VALUES, ONLINE, SEED] };

/// QuaRot: Hadamard rotations that spread outliers over all channels.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Rotate {
    /// Options.
    pub options: RotateOptions,
}

impl Transform for Rotate {
    fn name(&self) -> &'static str {
        "rotate"
    }

    fn change(&self) -> Change<'_> {
        Change::Rotation(self.options)
    }

    fn tables(&self) -> &'static [TableSpec] {
        &[TABLE]
    }

    fn set(&mut self, _: &str, options: Options<'_>) -> Result<(), OptionError> {
        self.options.set(options)
    }

    fn fold_only(&mut self) {
        self.options.online = false;
    }

    fn settings(&self) -> Vec<Setting> {
        self.options.settings(TABLE.name)
    }
}
