//! SpinQuant (arXiv 2405.16406) as a transform of recipes. The pipeline learns the rotations and folds them into the model.

use mantissa_options::{Count, Named, NamedMut, Number, OneOf, Unset, options};

use crate::method::{Arithmetic, Extent};
use crate::rotate::RotateOptions;
use crate::transform::{Change, Transform};

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
const GRADIENTS: [(&str, Gradient); 3] =
    [("both", Gradient::Both), ("ranges", Gradient::Ranges), ("straight-through", Gradient::StraightThrough)];

options! {
    /// Options of learned rotations.
    #[derive(Clone, Copy, Debug, PartialEq)]
    pub struct SpinOptions {
        ..rotate: RotateOptions, "Rotations, and seed of the initial signs.";
        /// Number of steps.
        iterations: usize = 100, Count(1_000_000);
        /// Root mean square of the rotation angles of the first step, in radians; decays linearly to 0.
        rate: f32 = 0.03, Number(1.0);
        /// Tokens of a step: whole windows, at least one.
        batch_tokens: usize = 2048, Count(1 << 24);
        /// Gradient of a step. The default depends on the scheme: ranges for per-token scales, both for weights with
        /// per-channel scales, straight-through for groups.
        gradient: Option<Gradient> = None, Unset(OneOf(&GRADIENTS));
    }
}

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

    fn tables(&self) -> Vec<Named<'_>> {
        vec![(self.name(), &self.options)]
    }

    fn tables_mut(&mut self) -> Vec<NamedMut<'_>> {
        vec![(self.name(), &mut self.options)]
    }

    fn arithmetic(&self, _: &Extent<'_>, _: usize) -> Arithmetic {
        let SpinOptions { iterations, batch_tokens, .. } = self.options;
        Arithmetic { training: (iterations, batch_tokens), ..Arithmetic::default() }
    }

    fn fold_only(&mut self) {
        self.options.rotate.online = false;
    }
}
