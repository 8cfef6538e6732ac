//! Tensor names of Hugging Face and GGUF (`gguf-py`'s `TENSOR_NAMES` and `TensorNameMap`), for the supported
//! architectures.

use std::borrow::Cow;

use super::Architecture;

const TOP: [(&str, &str); 22] = [
    ("model.embed_tokens", "token_embd"),
    ("model.norm", "output_norm"),
    ("lm_head", "output"),
    ("model.final_layernorm", "output_norm"),
    ("gpt_neox.embed_in", "token_embd"),
    ("gpt_neox.final_layer_norm", "output_norm"),
    ("embed_out", "output"),
    ("transformer.wte", "token_embd"),
    ("transformer.wpe", "position_embd"),
    ("transformer.ln_f", "output_norm"),
    ("wte", "token_embd"),
    ("wpe", "position_embd"),
    ("ln_f", "output_norm"),
    ("model.embed_tokens_per_layer", "per_layer_token_embd"),
    ("model.per_layer_model_projection", "per_layer_model_proj"),
    ("model.per_layer_projection_norm", "per_layer_proj_norm"),
    ("model.embedding_norm", "token_embd_norm"),
    ("backbone.embeddings", "token_embd"),
    ("backbone.norm_f", "output_norm"),
    ("embed", "token_embd"),
    ("norm", "output_norm"),
    ("head", "output"),
];

/// Tensors outside the layers that are not a module's weight or bias.
const TOP_VECTORS: [(&str, &str); 6] = [
    ("model.hc_head.hc_fn", "output_hc_fn.weight"),
    ("model.hc_head.hc_base", "output_hc_base.weight"),
    ("model.hc_head.hc_scale", "output_hc_scale.weight"),
    ("hc_head_fn", "output_hc_fn.weight"),
    ("hc_head_base", "output_hc_base.weight"),
    ("hc_head_scale", "output_hc_scale.weight"),
];

/// Prefixes of the names of a layer's tensors.
const LAYERS: [&str; 6] =
    ["model.layers.", "gpt_neox.layers.", "transformer.h.", "h.", "backbone.layers.", "layers."];

/// Tensors of a layer that are not a module's weight or bias.
const VECTORS: [(&str, &str); 33] = [
    ("self_attn.sinks", "attn_sinks.weight"),
    ("mlp.gate.e_score_correction_bias", "exp_probs_b.bias"),
    ("mlp.e_score_correction_bias", "exp_probs_b.bias"),
    ("mlp.moe_statics.e_score_correction_bias", "exp_probs_b.bias"),
    ("block_sparse_moe.e_score_correction_bias", "exp_probs_b.bias"),
    ("layer_scalar", "layer_output_scale.weight"),
    ("router.scale", "ffn_gate_inp.scale"),
    ("router.per_expert_scale", "ffn_down_exps.scale"),
    ("feed_forward.expert_bias", "exp_probs_b.bias"),
    ("altup.correct_output_scale", "altup_correct_scale.weight"),
    ("linear_attn.A_log", "ssm_a"),
    ("linear_attn.dt_bias", "ssm_dt.bias"),
    ("mamba.A_log", "ssm_a"),
    ("mamba.D", "ssm_d"),
    ("mamba.dt_bias", "ssm_dt.bias"),
    ("mixer.gate.e_score_correction_bias", "exp_probs_b.bias"),
    ("attn.attn_sink", "attn_sinks.weight"),
    ("attn.compressor.ape", "attn_compressor_ape.weight"),
    ("attn.indexer.compressor.ape", "indexer_compressor_ape.weight"),
    ("ffn.gate.bias", "exp_probs_b.bias"),
    ("ffn.gate.tid2eid", "ffn_gate_tid2eid.weight"),
    ("hc_attn_fn", "hc_attn_fn.weight"),
    ("hc_attn_base", "hc_attn_base.weight"),
    ("hc_attn_scale", "hc_attn_scale.weight"),
    ("hc_ffn_fn", "hc_ffn_fn.weight"),
    ("hc_ffn_base", "hc_ffn_base.weight"),
    ("hc_ffn_scale", "hc_ffn_scale.weight"),
    ("mixer.A_log", "ssm_a"),
    ("self_attn.A_log", "ssm_a"),
    ("self_attn.dt_bias", "ssm_dt.bias"),
    ("block_sparse_moe.gate.e_score_correction_bias", "exp_probs_b.bias"),
    ("mixer.D", "ssm_d"),
    ("mixer.dt_bias", "ssm_dt.bias"),
];

/// Modules of a layer and their names in GGUF. If two modules share a name, the first is Llama's.
const LAYER: [(&str, &str); 156] = [
    ("input_layernorm", "attn_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    ("pre_feedforward_layernorm", "ffn_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm"),
    ("self_attn.qkv_proj", "attn_qkv"),
    ("mlp.gate_up_proj", "ffn_up"),
    ("self_attn.dense", "attn_output"),
    ("mlp.fc1", "ffn_up"),
    ("mlp.fc2", "ffn_down"),
    ("attention.query_key_value", "attn_qkv"),
    ("attention.dense", "attn_output"),
    ("mlp.dense_h_to_4h", "ffn_up"),
    ("mlp.dense_4h_to_h", "ffn_down"),
    ("mlp.gate", "ffn_gate_inp"),
    ("block_sparse_moe.gate", "ffn_gate_inp"),
    ("mlp.shared_expert_gate", "ffn_gate_inp_shexp"),
    ("mlp.shared_expert.gate_proj", "ffn_gate_shexp"),
    ("mlp.shared_expert.up_proj", "ffn_up_shexp"),
    ("mlp.shared_expert.down_proj", "ffn_down_shexp"),
    ("self_attn.attn_sub_norm", "attn_sub_norm"),
    ("mlp.ffn_sub_norm", "ffn_sub_norm"),
    ("ln_1", "attn_norm"),
    ("ln_2", "ffn_norm"),
    ("attn.c_attn", "attn_qkv"),
    ("attn.c_proj", "attn_output"),
    ("mlp.c_fc", "ffn_up"),
    ("mlp.c_proj", "ffn_down"),
    ("self_attn.q_a_proj", "attn_q_a"),
    ("self_attn.q_b_proj", "attn_q_b"),
    ("self_attn.kv_a_proj_with_mqa", "attn_kv_a_mqa"),
    ("self_attn.kv_b_proj", "attn_kv_b"),
    ("self_attn.q_a_layernorm", "attn_q_a_norm"),
    ("self_attn.kv_a_layernorm", "attn_kv_a_norm"),
    ("self_attn.indexer.wq_b", "indexer.attn_q_b"),
    ("self_attn.indexer.wk", "indexer.attn_k"),
    ("self_attn.indexer.k_norm", "indexer.k_norm"),
    ("self_attn.indexer.weights_proj", "indexer.proj"),
    ("mlp.shared_experts.gate_proj", "ffn_gate_shexp"),
    ("mlp.shared_experts.up_proj", "ffn_up_shexp"),
    ("mlp.shared_experts.down_proj", "ffn_down_shexp"),
    ("mlp.router", "ffn_gate_inp"),
    ("post_self_attn_layernorm", "post_attention_norm"),
    ("post_mlp_layernorm", "post_ffw_norm"),
    ("feed_forward.gate_proj", "ffn_gate"),
    ("feed_forward.up_proj", "ffn_up"),
    ("feed_forward.down_proj", "ffn_down"),
    ("feed_forward.router", "ffn_gate_inp"),
    ("feed_forward.shared_expert.gate_proj", "ffn_gate_shexp"),
    ("feed_forward.shared_expert.up_proj", "ffn_up_shexp"),
    ("feed_forward.shared_expert.down_proj", "ffn_down_shexp"),
    ("router.proj", "ffn_gate_inp"),
    ("pre_feedforward_layernorm_2", "pre_ffw_norm_2"),
    ("post_feedforward_layernorm_1", "post_ffw_norm_1"),
    ("post_feedforward_layernorm_2", "post_ffw_norm_2"),
    ("per_layer_input_gate", "inp_gate"),
    ("per_layer_projection", "proj"),
    ("post_per_layer_input_norm", "post_norm"),
    ("altup.modality_router", "altup_router"),
    ("altup.router_norm", "altup_router_norm"),
    ("altup.prediction_coefs", "altup_predict_coef"),
    ("altup.correction_coefs", "altup_correct_coef"),
    ("laurel.linear_left", "laurel_l"),
    ("laurel.linear_right", "laurel_r"),
    ("laurel.post_laurel_norm", "laurel_post_norm"),
    ("operator_norm", "attn_norm"),
    ("ffn_norm", "ffn_norm"),
    ("self_attn.q_layernorm", "attn_q_norm"),
    ("self_attn.k_layernorm", "attn_k_norm"),
    ("self_attn.out_proj", "attn_output"),
    ("feed_forward.w1", "ffn_gate"),
    ("feed_forward.w3", "ffn_up"),
    ("feed_forward.w2", "ffn_down"),
    ("feed_forward.gate", "ffn_gate_inp"),
    ("conv.in_proj", "shortconv.in_proj"),
    ("conv.conv", "shortconv.conv"),
    ("conv.out_proj", "shortconv.out_proj"),
    ("pre_ff_layernorm", "ffn_norm"),
    ("block_sparse_moe.router.layer", "ffn_gate_inp"),
    ("shared_mlp.input_linear", "ffn_up"),
    ("shared_mlp.output_linear", "ffn_down"),
    ("mamba.in_proj", "ssm_in"),
    ("mamba.conv1d", "ssm_conv1d"),
    ("mamba.x_proj", "ssm_x"),
    ("mamba.dt_proj", "ssm_dt"),
    ("mamba.dt_layernorm", "ssm_dt_norm"),
    ("mamba.b_layernorm", "ssm_b_norm"),
    ("mamba.c_layernorm", "ssm_c_norm"),
    ("mamba.norm", "ssm_norm"),
    ("mamba.out_proj", "ssm_out"),
    ("norm", "attn_norm"),
    ("mixer.in_proj", "ssm_in"),
    ("mixer.conv1d", "ssm_conv1d"),
    ("mixer.norm", "ssm_norm"),
    ("mixer.out_proj", "ssm_out"),
    ("mixer.q_proj", "attn_q"),
    ("mixer.k_proj", "attn_k"),
    ("mixer.v_proj", "attn_v"),
    ("mixer.o_proj", "attn_output"),
    ("mixer.up_proj", "ffn_up"),
    ("mixer.down_proj", "ffn_down"),
    ("mixer.gate", "ffn_gate_inp"),
    ("mixer.shared_experts.up_proj", "ffn_up_shexp"),
    ("mixer.shared_experts.down_proj", "ffn_down_shexp"),
    ("mixer.fc1_latent_proj", "ffn_latent_down"),
    ("mixer.fc2_latent_proj", "ffn_latent_up"),
    ("self_attn.q_conv1d", "ssm_conv1d_q"),
    ("self_attn.k_conv1d", "ssm_conv1d_k"),
    ("self_attn.v_conv1d", "ssm_conv1d_v"),
    ("self_attn.f_a_proj", "ssm_f_a"),
    ("self_attn.f_b_proj", "ssm_f_b"),
    ("self_attn.b_proj", "ssm_beta"),
    ("self_attn.g_a_proj", "ssm_g_a"),
    ("self_attn.g_b_proj", "ssm_g_b"),
    ("self_attn.o_norm", "ssm_norm"),
    ("block_sparse_moe.shared_experts.gate_proj", "ffn_gate_shexp"),
    ("block_sparse_moe.shared_experts.up_proj", "ffn_up_shexp"),
    ("block_sparse_moe.shared_experts.down_proj", "ffn_down_shexp"),
    ("attn_norm", "attn_norm"),
    ("attn.wq_a", "attn_q_a"),
    ("attn.wq_b", "attn_q_b"),
    ("attn.q_norm", "attn_q_a_norm"),
    ("attn.wkv", "attn_kv"),
    ("attn.norm", "attn_kv_a_norm"),
    ("attn.kv_norm", "attn_kv_a_norm"),
    ("attn.wo_a", "attn_output_a"),
    ("attn.wo_b", "attn_output_b"),
    ("attn.compressor.wkv", "attn_compressor_kv"),
    ("attn.compressor.wgate", "attn_compressor_gate"),
    ("attn.compressor.norm", "attn_compressor_norm"),
    ("attn.indexer.wq_b", "indexer.attn_q_b"),
    ("attn.indexer.weights_proj", "indexer.proj"),
    ("attn.indexer.compressor.wkv", "indexer_compressor_kv"),
    ("attn.indexer.compressor.wgate", "indexer_compressor_gate"),
    ("attn.indexer.compressor.norm", "indexer_compressor_norm"),
    ("ffn.gate", "ffn_gate_inp"),
    ("ffn.shared_experts.w1", "ffn_gate_shexp"),
    ("ffn.shared_experts.w3", "ffn_up_shexp"),
    ("ffn.shared_experts.w2", "ffn_down_shexp"),
    ("linear_attn.in_proj_qkvz", "ssm_in"),
    ("linear_attn.in_proj_qkv", "attn_qkv"),
    ("linear_attn.in_proj_z", "attn_gate"),
    ("linear_attn.in_proj_ba", "ssm_ba"),
    ("linear_attn.in_proj_b", "ssm_beta"),
    ("linear_attn.in_proj_a", "ssm_alpha"),
    ("linear_attn.conv1d", "ssm_conv1d"),
    ("linear_attn.norm", "ssm_norm"),
    ("linear_attn.out_proj", "ssm_out"),
];

/// Modules of a layer that hold experts, before `experts`.
const MIXTURES: [&str; 6] = ["mlp.", "block_sparse_moe.", "feed_forward.", "mixer.", "ffn.", ""];

/// Projections to parallel streams of states and back, before their numbers: one tensor in GGUF has all of them.
const STREAMS: [(&str, &str); 2] = [
    ("model.altup_projections.", "altup_proj.weight"),
    ("model.altup_unembed_projections.", "altup_unembd_proj.weight"),
];

/// Name of the norm that follows the attention (Gemma 2 and 3, OLMo 2, EXAONE 4.0) or is called so (gpt-oss, Seed-OSS).
const AFTER_ATTENTION: (&str, &str) = ("post_attention_layernorm", "post_attention_norm");

/// An expert's weight is part of the stacked tensor.
const EXPERT: [(&str, &str); 6] = [
    ("gate_proj", "ffn_gate_exps"),
    ("up_proj", "ffn_up_exps"),
    ("down_proj", "ffn_down_exps"),
    ("w1", "ffn_gate_exps"),
    ("w3", "ffn_up_exps"),
    ("w2", "ffn_down_exps"),
];

/// Place of a Hugging Face tensor in a GGUF file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The GGUF tensor.
    pub tensor: String,
    /// Index along the outermost dimension, for experts stacked as `[experts, rows, cols]`, and projections of streams.
    pub expert: Option<usize>,
    /// 0 for the gate and 1 for the up-projection of an expert, in a tensor that has them one after the other,
    /// `[experts, 2 · rows, cols]`.
    pub half: Option<usize>,
}

/// Tensors of the gates and of the up-projections of all experts, and of both.
const HALVES: [&str; 2] = ["ffn_gate_exps.weight", "ffn_up_exps.weight"];
const JOINED: &str = "ffn_gate_up_exps.weight";

impl Place {
    /// Place of a whole tensor.
    fn whole(tensor: String) -> Self {
        Place { tensor, expert: None, half: None }
    }

    /// Index of the matrix, and matrices of each expert.
    pub fn matrix(&self) -> (usize, usize) {
        let halves = self.halves();
        (self.expert.unwrap_or(0) * halves + self.half.unwrap_or(0), halves)
    }

    /// Matrices of each expert in the tensor.
    pub fn halves(&self) -> usize {
        if self.half.is_some() { 2 } else { 1 }
    }

    /// The same in a file that joins gate and up, if this one does not, or else the other way around.
    pub fn other_form(&self) -> Option<Self> {
        let Place { tensor, expert, half } = self;
        if let Some(half) = half {
            let own = tensor.replace(JOINED, HALVES.get(*half)?);
            return Some(Place { tensor: own, expert: *expert, half: None });
        }
        let half = HALVES.iter().position(|name| tensor.ends_with(name))?;
        Some(Place { tensor: tensor.replace(HALVES[half], JOINED), expert: *expert, half: Some(half) })
    }
}

/// Prefixes of a text model's names within a multimodal model, and without one. A GGUF file holds the text model alone.
const TEXT: [(&str, &str); 3] = [
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
];

/// Name of a text model's tensor as if it were not part of a multimodal model.
pub fn text_name(hf: &str) -> Cow<'_, str> {
    let inner = TEXT.iter().find_map(|(prefix, plain)| Some((plain, hf.strip_prefix(prefix)?)));
    inner.map_or(Cow::Borrowed(hf), |(plain, rest)| Cow::Owned(format!("{plain}{rest}")))
}

impl Architecture {
    /// Place of the tensor with this Hugging Face name, `.weight` or `.bias` included.
    pub fn place(&self, hf: &str) -> Option<Place> {
        let hf = &*text_name(hf);
        let of_layer = LAYERS.iter().find_map(|prefix| hf.strip_prefix(prefix)).and_then(layer);
        if let Some(own) = of_layer.and_then(|(layer, tensor)| self.own_name(layer, tensor)) {
            return Some(Place::whole(own));
        }
        if let Some((module, part)) = split(hf)
            && self.post_attention_norm
            && module.ends_with(AFTER_ATTENTION.0)
        {
            let (layer, _) = layer(module.strip_prefix("model.layers.")?)?;
            return Some(Place::whole(format!("blk.{layer}.{}.{part}", AFTER_ATTENTION.1)));
        }
        let found = place(hf)?;
        let joined = found.other_form().filter(|_| self.joined_experts && found.expert.is_some());
        Some(joined.unwrap_or(found))
    }

    /// Name of the tensor `tensor` of a layer, if it is one of [`own_names`](Self::own_names).
    fn own_name(&self, layer: usize, tensor: &str) -> Option<String> {
        self.own_names.iter().find_map(|(of, name)| match tensor.strip_prefix(of)? {
            "" => Some(format!("blk.{layer}.{name}")),
            part if [".weight", ".bias"].contains(&part) => Some(format!("blk.{layer}.{name}{part}")),
            _ => None,
        })
    }
}

/// Place of the tensor with this Hugging Face name. It is the same in every architecture for linear layers, embedding
/// and head; for norms see [`Architecture::place`].
pub fn place(hf: &str) -> Option<Place> {
    let hf = &*text_name(hf);
    if let Some(tensor) = stored_name(hf) {
        return Some(Place::whole(tensor));
    }
    let module = hf.strip_suffix(".weight")?;
    if let Some((number, stored)) =
        STREAMS.iter().find_map(|(prefix, stored)| Some((module.strip_prefix(prefix)?, stored)))
    {
        let stream: usize = number.parse().ok()?;
        let canonical = stream.to_string() == number;
        return canonical.then(|| Place { tensor: (*stored).to_owned(), expert: Some(stream), half: None });
    }
    let (layer, module) = layer(LAYERS.iter().find_map(|prefix| module.strip_prefix(prefix))?)?;
    let expert =
        MIXTURES.iter().find_map(|mixture| module.strip_prefix(mixture)?.strip_prefix("experts."))?;
    let (number, projection) = self::layer(expert)?;
    let (_, stored) = EXPERT.iter().find(|(name, _)| *name == projection)?;
    Some(Place { tensor: format!("blk.{layer}.{stored}.weight"), expert: Some(number), half: None })
}

/// GGUF name of a tensor with this Hugging Face name, `.weight` or `.bias` included, if GGUF stores it as a tensor by
/// itself.
pub fn stored_name(hf: &str) -> Option<String> {
    let hf = &*text_name(hf);
    if let Some((layer, vector)) = LAYERS.iter().find_map(|prefix| hf.strip_prefix(prefix)).and_then(layer)
        && let Some((_, stored)) = VECTORS.iter().find(|(name, _)| *name == vector)
    {
        return Some(format!("blk.{layer}.{stored}"));
    }
    if let Some((_, stored)) = TOP_VECTORS.iter().find(|(name, _)| *name == hf) {
        return Some((*stored).to_owned());
    }
    let (module, part) = split(hf)?;
    if let Some((_, stored)) = TOP.iter().find(|(name, _)| *name == module) {
        return Some(format!("{stored}.{part}"));
    }
    let module = LAYERS.iter().find_map(|prefix| module.strip_prefix(prefix))?;
    let (layer, module) = layer(module)?;
    let (_, stored) = LAYER.iter().find(|(name, _)| *name == module)?;
    Some(format!("blk.{layer}.{stored}.{part}"))
}

/// Name of a GGUF tensor in Llama's checkpoints, or in those of the only architecture that has it.
pub fn hf_name(stored: &str) -> Option<String> {
    let (module, part) = split(stored)?;
    if let Some((hf, _)) = TOP.iter().find(|(_, name)| *name == module) {
        return Some(format!("{hf}.{part}"));
    }
    let (layer, module) = layer(module.strip_prefix("blk.")?)?;
    let (hf, _) = LAYER.iter().find(|(_, name)| *name == module)?;
    Some(format!("model.layers.{layer}.{hf}.{part}"))
}

fn split(name: &str) -> Option<(&str, &str)> {
    name.rsplit_once('.').filter(|(_, part)| ["weight", "bias"].contains(part))
}

/// Layer number in canonical decimal form, and the rest.
pub fn layer(name: &str) -> Option<(usize, &str)> {
    let (number, rest) = name.split_once('.')?;
    let layer: usize = number.parse().ok()?;
    (layer.to_string() == number).then_some((layer, rest))
}
