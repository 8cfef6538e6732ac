//! First halves of decoder layers: attention, a recurrent mixer, both or neither.

use crate::config::{Latent, Mixing, ModelConfig, QkvForm, Recurrent};
use crate::mixer::MixerLinear;
use mantissa_arch::kinds::LinearKind;

impl ModelConfig {
    /// Lists the linear layers of the first half of a decoder layer.
    pub(super) fn mixing_kinds(&self, layer: usize) -> Vec<LinearKind> {
        use LinearKind as L;
        let of_mixer = self.recurrent_in(layer).map(|recurrent| recurrent.mixer().linears());
        let mut of_mixer = of_mixer.into_iter().flatten().flatten().map(|linear| linear.kind);
        if !self.attends(layer) {
            return of_mixer.collect();
        }
        let mut kinds = match (self.latent, self.qkv) {
            (Some(Latent { q_rank: Some(_), .. }), _) => vec![L::QA, L::KvA, L::QB, L::KvB],
            (Some(_), _) => vec![L::Q, L::KvA, L::KvB],
            (None, QkvForm::Separate) if !self.has_own_kv(layer) => vec![L::Q],
            (None, QkvForm::Separate) if self.keys_are_values(layer) => vec![L::Q, L::K],
            (None, QkvForm::Separate) => vec![L::Q, L::K, L::V],
            (None, _) => vec![L::Qkv],
        };
        kinds.extend(of_mixer.by_ref().take_while(|kind| *kind != L::MixOut));
        kinds.push(L::O);
        kinds.extend(self.recurrent_in(layer).map(|_| L::MixOut));
        kinds
    }

    /// Linear layer of this kind of the mixer, if it has one.
    pub(crate) fn mixer_linear(&self, kind: LinearKind) -> Option<MixerLinear> {
        let linears = self.recurrent.as_ref().map(|recurrent| recurrent.mixer().linears());
        linears.into_iter().flatten().flatten().find(|linear| linear.kind == kind)
    }

    /// Width of the input of the output projection of a layer's first half: joined heads, or the mixer's result.
    pub fn joined_width(&self, layer: usize) -> usize {
        let heads = self.heads(layer);
        let queries = heads.query * heads.dim;
        match self.mixing[layer] {
            Mixing::Attention => queries,
            Mixing::Recurrent => self.recurrent.as_ref().map_or(0, Recurrent::width),
            Mixing::Both => queries + self.recurrent.as_ref().map_or(0, Recurrent::width),
            Mixing::None => 0,
        }
    }
}
