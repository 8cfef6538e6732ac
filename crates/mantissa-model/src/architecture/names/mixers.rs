//! Names of the parameters of recurrent mixers, and of what joins and mixes parallel streams.

use crate::graph::kinds::{HyperPart, HyperSite, SideKind, VectorKind};

/// Names of a recurrent mixer within a layer; its linear layers are among `Names::linears`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MixerNames {
    /// Small projections.
    pub(crate) sides: &'static [(SideKind, &'static str)],
    /// Vectors.
    pub(crate) vectors: &'static [(VectorKind, &'static str)],
}

impl MixerNames {
    /// No mixer.
    pub(crate) const NONE: Self = MixerNames { sides: &[], vectors: &[] };

    /// Names of Qwen's gated DeltaNet.
    pub(crate) const QWEN: Self = MixerNames {
        sides: &[
            (SideKind::Rates, "linear_attn.in_proj_ba"),
            (SideKind::WriteRate, "linear_attn.in_proj_b"),
            (SideKind::DecayRate, "linear_attn.in_proj_a"),
        ],
        vectors: &[
            (VectorKind::Convolution, "linear_attn.conv1d.weight"),
            (VectorKind::StepBias, "linear_attn.dt_bias"),
            (VectorKind::DecayLog, "linear_attn.A_log"),
            (VectorKind::MixNorm, "linear_attn.norm.weight"),
        ],
    };

    /// Names of Mamba-2 in Granite 4.
    pub(crate) const GRANITE: Self = MixerNames {
        sides: &[],
        vectors: &[
            (VectorKind::Convolution, "mamba.conv1d.weight"),
            (VectorKind::ConvolutionBias, "mamba.conv1d.bias"),
            (VectorKind::StepBias, "mamba.dt_bias"),
            (VectorKind::DecayLog, "mamba.A_log"),
            (VectorKind::Skip, "mamba.D"),
            (VectorKind::MixNorm, "mamba.norm.weight"),
        ],
    };

    /// Names of Mamba-2 in Nemotron-H.
    pub(crate) const NEMOTRON: Self = MixerNames {
        sides: &[],
        vectors: &[
            (VectorKind::Convolution, "mixer.conv1d.weight"),
            (VectorKind::ConvolutionBias, "mixer.conv1d.bias"),
            (VectorKind::StepBias, "mixer.dt_bias"),
            (VectorKind::DecayLog, "mixer.A_log"),
            (VectorKind::Skip, "mixer.D"),
            (VectorKind::MixNorm, "mixer.norm.weight"),
        ],
    };

    /// Names of Mamba in Jamba.
    pub(crate) const JAMBA: Self = MixerNames {
        sides: &[(SideKind::Selection, "mamba.x_proj"), (SideKind::Step, "mamba.dt_proj")],
        vectors: &[
            (VectorKind::Convolution, "mamba.conv1d.weight"),
            (VectorKind::ConvolutionBias, "mamba.conv1d.bias"),
            (VectorKind::DecayLog, "mamba.A_log"),
            (VectorKind::Skip, "mamba.D"),
            (VectorKind::StepNorm, "mamba.dt_layernorm.weight"),
            (VectorKind::WriteNorm, "mamba.b_layernorm.weight"),
            (VectorKind::ReadNorm, "mamba.c_layernorm.weight"),
        ],
    };

    /// Names of Kimi delta attention.
    pub(crate) const KIMI: Self = MixerNames {
        sides: &[
            (SideKind::WriteRate, "self_attn.b_proj"),
            (SideKind::DecayLatent, "self_attn.f_a_proj"),
            (SideKind::Decay, "self_attn.f_b_proj"),
            (SideKind::GateLatent, "self_attn.g_a_proj"),
            (SideKind::Gate, "self_attn.g_b_proj"),
        ],
        vectors: &[
            (VectorKind::QueryConvolution, "self_attn.q_conv1d.weight"),
            (VectorKind::KeyConvolution, "self_attn.k_conv1d.weight"),
            (VectorKind::ValueConvolution, "self_attn.v_conv1d.weight"),
            (VectorKind::StepBias, "self_attn.dt_bias"),
            (VectorKind::DecayLog, "self_attn.A_log"),
            (VectorKind::MixNorm, "self_attn.o_norm.weight"),
        ],
    };

    /// Names of LFM2's short convolution.
    pub(crate) const LFM2: Self = MixerNames {
        sides: &[],
        vectors: &[
            (VectorKind::Convolution, "conv.conv.weight"),
            (VectorKind::ConvolutionBias, "conv.conv.bias"),
        ],
    };

    /// Names of DeepSeek-V4, as transformers writes them.
    pub(crate) const DEEPSEEK_V4: Self = MixerNames {
        sides: &[
            (SideKind::BlockValues, "attn.compressor.wkv"),
            (SideKind::BlockGate, "attn.compressor.wgate"),
            (SideKind::IndexBlockValues, "attn.indexer.compressor.wkv"),
            (SideKind::IndexBlockGate, "attn.indexer.compressor.wgate"),
            (SideKind::IndexQueries, "attn.indexer.wq_b"),
            (SideKind::IndexWeights, "attn.indexer.weights_proj"),
            (SideKind::OutputGroups, "attn.wo_a"),
        ],
        vectors: &[
            (VectorKind::Sinks, "attn.attn_sink"),
            (VectorKind::LatentNorm, "attn.q_norm.weight"),
            (VectorKind::KeyNorm, "attn.norm.weight"),
            (VectorKind::BlockBias, "attn.compressor.ape"),
            (VectorKind::BlockNorm, "attn.compressor.norm.weight"),
            (VectorKind::IndexBlockBias, "attn.indexer.compressor.ape"),
            (VectorKind::IndexBlockNorm, "attn.indexer.compressor.norm.weight"),
            (VectorKind::TokenExperts, "ffn.gate.tid2eid"),
            (VectorKind::Hyper(HyperSite::Attention, HyperPart::Weight), "hc_attn_fn"),
            (VectorKind::Hyper(HyperSite::Attention, HyperPart::Base), "hc_attn_base"),
            (VectorKind::Hyper(HyperSite::Attention, HyperPart::Scale), "hc_attn_scale"),
            (VectorKind::Hyper(HyperSite::Mlp, HyperPart::Weight), "hc_ffn_fn"),
            (VectorKind::Hyper(HyperSite::Mlp, HyperPart::Base), "hc_ffn_base"),
            (VectorKind::Hyper(HyperSite::Mlp, HyperPart::Scale), "hc_ffn_scale"),
            (VectorKind::Hyper(HyperSite::Head, HyperPart::Weight), "model.hc_head.hc_fn"),
            (VectorKind::Hyper(HyperSite::Head, HyperPart::Base), "model.hc_head.hc_base"),
            (VectorKind::Hyper(HyperSite::Head, HyperPart::Scale), "model.hc_head.hc_scale"),
        ],
    };

    /// Names of DeepSeek-V4, as published.
    pub(crate) const DEEPSEEK_V4_PUBLISHED: Self = MixerNames {
        vectors: &[
            (VectorKind::Sinks, "attn.attn_sink"),
            (VectorKind::LatentNorm, "attn.q_norm.weight"),
            (VectorKind::KeyNorm, "attn.kv_norm.weight"),
            (VectorKind::BlockBias, "attn.compressor.ape"),
            (VectorKind::BlockNorm, "attn.compressor.norm.weight"),
            (VectorKind::IndexBlockBias, "attn.indexer.compressor.ape"),
            (VectorKind::IndexBlockNorm, "attn.indexer.compressor.norm.weight"),
            (VectorKind::TokenExperts, "ffn.gate.tid2eid"),
            (VectorKind::Hyper(HyperSite::Attention, HyperPart::Weight), "hc_attn_fn"),
            (VectorKind::Hyper(HyperSite::Attention, HyperPart::Base), "hc_attn_base"),
            (VectorKind::Hyper(HyperSite::Attention, HyperPart::Scale), "hc_attn_scale"),
            (VectorKind::Hyper(HyperSite::Mlp, HyperPart::Weight), "hc_ffn_fn"),
            (VectorKind::Hyper(HyperSite::Mlp, HyperPart::Base), "hc_ffn_base"),
            (VectorKind::Hyper(HyperSite::Mlp, HyperPart::Scale), "hc_ffn_scale"),
            (VectorKind::Hyper(HyperSite::Head, HyperPart::Weight), "hc_head_fn"),
            (VectorKind::Hyper(HyperSite::Head, HyperPart::Base), "hc_head_base"),
            (VectorKind::Hyper(HyperSite::Head, HyperPart::Scale), "hc_head_scale"),
        ],
        ..Self::DEEPSEEK_V4
    };

    /// Name of a small projection.
    pub(crate) fn side(&self, kind: SideKind) -> &'static str {
        self.sides.iter().find(|(known, _)| *known == kind).map_or("", |(_, name)| name)
    }

    /// Name of a vector.
    pub(crate) fn vector(&self, kind: VectorKind) -> &'static str {
        self.vectors.iter().find(|(known, _)| *known == kind).map_or("", |(_, name)| name)
    }
}
