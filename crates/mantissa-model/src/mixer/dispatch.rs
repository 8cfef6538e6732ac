//! Mixer of each kind of recurrent layer.

use mantissa_store::convention::gguf::DeltaHeads;

use super::{GgufAround, Mixer, StateShape, StateSpace, Uncomputed};
use crate::config::Recurrent;

impl Recurrent {
    /// Returns the mixer.
    pub(crate) fn mixer(&self) -> &dyn Mixer {
        match self {
            Recurrent::GatedDelta(mixer) => mixer,
            Recurrent::ChannelDelta(mixer) => mixer,
            Recurrent::ShortConvolution(mixer) => mixer,
            Recurrent::StateSpace(mixer) => mixer,
            Recurrent::SelectiveScan(mixer) => mixer,
            Recurrent::CompressedAttention(mixer) => mixer,
        }
    }

    /// Size of the state of one sequence of up to `context` tokens in one layer.
    pub fn state(&self, context: usize) -> StateShape {
        self.mixer().state(context)
    }

    /// Width of the input of the output projection.
    pub fn width(&self) -> usize {
        self.mixer().width()
    }

    /// Keys of a GGUF file after the architecture's name, and their numbers.
    pub fn gguf_numbers(&self) -> Vec<(&'static str, usize)> {
        self.mixer().gguf_numbers()
    }

    /// Checks that llama.cpp computes the mixer.
    ///
    /// # Errors
    /// [`Uncomputed`] for the first value that it does not.
    pub fn check_gguf(&self, around: &GgufAround) -> Result<(), Uncomputed> {
        self.mixer().check_gguf(around)
    }

    /// What llama.cpp computes differently, in a model whose norms have `eps`.
    pub fn gguf_note(&self, eps: f32) -> Option<String> {
        self.mixer().gguf_note(eps)
    }

    /// Heads of gated DeltaNet, whose rows GGUF files may hold in another order.
    pub fn delta_heads(&self) -> Option<DeltaHeads> {
        self.mixer().delta_heads()
    }

    /// The mixer's Mamba-2, if it is that.
    pub fn state_space(&self) -> Option<&StateSpace> {
        self.mixer().state_space()
    }

    /// Name for messages.
    pub fn name(&self) -> &'static str {
        self.mixer().name()
    }
}
