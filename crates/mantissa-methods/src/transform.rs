//! Interface of transforms: changes of the dense model before its weights are quantized that leave its outputs
//! unchanged.

use std::fmt::Debug;

use mantissa_options::{Named, NamedMut, OptionValue};

use crate::method::{Arithmetic, CalibrationGap, Extent};
use crate::rotate::RotateOptions;
use crate::spin::SpinOptions;

/// A transform with its options.
pub trait Transform: Debug + Send + Sync {
    /// Name in recipes and reports, for example `awq`.
    fn name(&self) -> &'static str;

    /// Change of the model.
    fn change(&self) -> Change<'_>;

    /// Options that recipe files set, by table.
    fn tables(&self) -> Vec<Named<'_>> {
        Vec::new()
    }

    /// Same options, to be set.
    fn tables_mut(&mut self) -> Vec<NamedMut<'_>> {
        Vec::new()
    }

    /// Returns all options as they are set.
    fn settings(&self) -> Vec<OptionValue> {
        mantissa_options::settings(&self.tables())
    }

    /// Leaves out the part that runs with the model, for methods that cannot run it; only changes of weights are left.
    fn fold_only(&mut self) {}

    /// True if the transform needs calibration text.
    fn needs_text(&self) -> bool {
        !matches!(self.change(), Change::Rotation(_))
    }

    /// Rotations, for transforms that rotate.
    fn rotation(&self) -> Option<RotateOptions> {
        match self.change() {
            Change::Scales(_) => None,
            Change::Rotation(options) => Some(options),
            Change::LearnedRotation(options) => Some(options.rotate),
        }
    }

    /// Arithmetic on one weight, to predict the time of a run. Scales are searched on `tokens` tokens.
    fn arithmetic(&self, extent: &Extent<'_>, tokens: usize) -> Arithmetic {
        let _ = (extent, tokens);
        Arithmetic::default()
    }

    /// Behaviour for a gap in the calibration, for the coverage report; `None` if the transform does not say.
    fn on_gap(&self, gap: CalibrationGap) -> Option<&'static str> {
        match self.change() {
            Change::Scales(_) => Some(match gap {
                CalibrationGap::Tokens => "its channels are not scaled",
                CalibrationGap::Few => "scales are searched on these tokens",
                CalibrationGap::AllChannels | CalibrationGap::Channels => {
                    "they are scaled as the smallest of the others"
                }
            }),
            _ => None,
        }
    }
}

/// Change that a transform makes.
#[derive(Clone, Copy)]
pub enum Change<'a> {
    /// Divides channels of activations by searched scales and multiplies the weight columns by them.
    Scales(&'a dyn ScaleChannels),
    /// Rotates activations by randomized Hadamard matrices.
    Rotation(RotateOptions),
    /// The same rotations, learned on text.
    LearnedRotation(SpinOptions),
}

/// Proposes scales for channels of an activation.
pub trait ScaleChannels {
    /// True if inputs of output and down projections are scaled too, which no norm precedes.
    fn scales_inner(&self) -> bool;

    /// Candidate scales; the one with the least error is chosen. If there are several, the first leaves all channels
    /// unchanged.
    fn candidates(&self, channels: &Channels<'_>) -> Vec<Vec<f32>>;

    /// True if groups of weights are clipped too, for weights quantized by RTN.
    fn clips(&self) -> bool {
        false
    }
}

/// Statistics of an activation's channels, all nonzero in the activation.
#[derive(Clone, Copy, Debug)]
pub struct Channels<'a> {
    /// Largest magnitude of each channel.
    pub peaks: &'a [f32],
    /// Mean magnitude of each channel.
    pub means: &'a [f32],
    /// Largest magnitude in the columns of the weights that read it.
    pub weights: &'a [f32],
}
