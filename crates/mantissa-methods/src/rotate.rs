//! QuaRot (arXiv 2404.00456) as a transform of recipes. The pipeline folds the rotations into the model.

use serde::{Deserialize, Serialize};

use mantissa_options::{Flag, Named, NamedMut, Seed, options};

use crate::transform::{Change, Transform};

options! {
    /// Rotations of a model.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(deny_unknown_fields)]
    pub struct RotateOptions {
        /// Rotate the residual stream, if the architecture allows it.
        residual: bool = true, Flag;
        /// Rotate values within each head.
        values: bool = true, Flag;
        /// Rotate inputs of down projections at run time.
        online: bool = true, Flag;
        /// Seed of the random signs.
        seed: u64 = 0, Seed;
    }
}

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

    fn tables(&self) -> Vec<Named<'_>> {
        vec![(self.name(), &self.options)]
    }

    fn tables_mut(&mut self) -> Vec<NamedMut<'_>> {
        vec![(self.name(), &mut self.options)]
    }

    fn fold_only(&mut self) {
        self.options.online = false;
    }
}
