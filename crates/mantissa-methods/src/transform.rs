//! The interface of a transform: a change of the dense model before its weights are quantized, which leaves its outputs unchanged.

use std::fmt::Debug;

use crate::method::Lack;
use crate::options::{OptionError, Options, Setting, TableSpec};
use crate::rotate::RotateOptions;
use crate::spin::SpinOptions;

/// A transform with its options.
pub trait Transform: Debug + Send + Sync {
    /// Name in recipes and reports, for example `awq`.
    fn name(&self) -> &'static str;

    /// The change of the model.
    fn change(&self) -> Change<'_>;

    /// Tables of a recipe file that hold the transform's options.
    fn tables(&self) -> &'static [TableSpec] {
        &[]
    }

    /// Sets the options that `options`, the content of `table`, names. The caller has refused unknown keys.
    ///
    /// # Errors
    /// A value that is not allowed.
    fn set(&mut self, table: &str, options: Options<'_>) -> Result<(), OptionError> {
        let _ = (table, options);
        Ok(())
    }

    /// All options as they are set; [`set`](Self::set) reads them back.
    fn settings(&self) -> Vec<Setting> {
        Vec::new()
    }

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

    /// The transform's behaviour where the calibration lacks something, for the coverage report; `None` if it does not say.
    fn lacking(&self, lack: Lack) -> Option<&'static str> {
        match self.change() {
            Change::Scales(_) => Some(match lack {
                Lack::Tokens => "its channels are not scaled",
                Lack::Few => "scales are searched on these tokens",
                Lack::AllChannels | Lack::Channels => "they are scaled as the smallest of the others",
            }),
            _ => None,
        }
    }
}

/// The change that a transform makes.
#[derive(Clone, Copy)]
pub enum Change<'a> {
    /// Channels of activations are divided by scales that are searched on text, the columns of the weights multiplied with them.
    Scales(&'a dyn ScaleChannels),
    /// Activations are rotated by randomized Hadamard matrices.
    Rotation(RotateOptions),
    /// The same rotations, learned on text.
    LearnedRotation(SpinOptions),
}

/// Proposes scales for the channels of an activation.
pub trait ScaleChannels {
    /// True if channels are scaled that no norm gives: inputs of output and down projections.
    fn scales_inner(&self) -> bool;

    /// Scales to choose from, by the error that they leave. The first of several leaves all channels as they are.
    fn candidates(&self, channels: &Channels<'_>) -> Vec<Vec<f32>>;

    /// True if groups of weights are clipped as well, where weights are rounded to nearest.
    fn clips(&self) -> bool {
        false
    }
}

/// Statistics of the channels of an activation, none of them 0 in the activation.
#[derive(Clone, Copy, Debug)]
pub struct Channels<'a> {
    /// Largest magnitude of each channel.
    pub peaks: &'a [f32],
    /// Mean magnitude of each channel.
    pub means: &'a [f32],
    /// Largest magnitude in the columns of the weights that read it.
    pub weights: &'a [f32],
}
