//! Features of single architectures: experts, sliding windows, caps, partial rotation; and refused metadata.
//!
//! The fields are those of transformers' configs. Rules without a key follow llama.cpp (`llama-model.cpp`, one loader
//! per architecture).

use serde_json::{Map, Value as Json, json};

use super::Architecture;
use super::config::{LONG_ROPE, Reader, small};
use crate::error::Result;
use crate::gguf::Value;

/// Keys with an unsupported effect on the computation, with the values that have none.
const UNSUPPORTED: [(&str, &[f64]); 14] = [
    ("expert_count", &[0.0]),
    ("expert_group_count", &[0.0, 1.0]),
    ("expert_gating_func", &[0.0, 1.0]),
    ("expert_weights_scale", &[0.0, 1.0]),
    ("leading_dense_block_count", &[0.0]),
    ("attention.max_alibi_bias", &[0.0]),
    ("attention.clamp_kqv", &[0.0]),
    ("attention.scale", &[]),
    ("embedding_scale", &[1.0]),
    ("residual_scale", &[1.0]),
    ("logit_scale", &[1.0]),
    ("attn_logit_softcapping", &[0.0]),
    ("final_logit_softcapping", &[0.0]),
    ("rope.scaling.attn_factor", &[1.0]),
];

impl Architecture {
    /// Keys of [`UNSUPPORTED`] that the file has.
    fn has_key(self, key: &str) -> bool {
        match key {
            "expert_count" => self.may_have_experts(),
            "attention.clamp_kqv" => self == Self::Olmo,
            "attn_logit_softcapping" => self == Self::Gemma2,
            "final_logit_softcapping" => matches!(self, Self::Gemma2 | Self::Gemma3),
            "expert_group_count"
            | "expert_gating_func"
            | "expert_weights_scale"
            | "leading_dense_block_count" => self == Self::Deepseek2,
            _ => false,
        }
    }

    fn may_have_experts(self) -> bool {
        matches!(self, Self::Llama | Self::Qwen2Moe | Self::Qwen3Moe | Self::Deepseek2 | Self::GptOss)
    }

    /// Default period of the sliding-window pattern, whose last layer has full attention; `None` if llama.cpp gives
    /// no layer a window.
    pub fn default_window_period(self) -> Option<u32> {
        match self {
            Self::Gemma2 | Self::GptOss => Some(2),
            Self::Gemma3 => Some(6),
            _ => None,
        }
    }

    /// Square of the divisor of attention scores: the head width. For the largest models of Gemma 2 and 3, which
    /// llama.cpp identifies by their number of layers, it is the residual width per head.
    pub fn query_scale(self, layers: u64, hidden: u64, heads: u64, head_dim: u64) -> u64 {
        let largest = match self {
            Self::Gemma2 => layers == 46,
            Self::Gemma3 => layers == 62,
            _ => false,
        };
        if largest { hidden.checked_div(heads).unwrap_or(head_dim) } else { head_dim }
    }
}

impl Reader<'_> {
    pub(super) fn refuse_unsupported(&self) -> Result<()> {
        let long_rope = LONG_ROPE.iter().any(|name| self.gguf.get(name).is_some());
        let known =
            |name: &str| self.architecture.has_key(name) || (long_rope && name == "rope.scaling.attn_factor");
        for (name, harmless) in UNSUPPORTED.into_iter().filter(|(name, _)| !known(name)) {
            let key = self.key(name);
            let Some(value) = self.metadata.get(&key) else { continue };
            let number = value.as_f64().or_else(|| value.as_u64().map(|n| n as f64));
            if number.is_none_or(|n| !harmless.contains(&n)) {
                let found = number.map_or_else(|| value.kind(), |n| n.to_string());
                let allowed =
                    harmless.first().map_or("no such key".to_owned(), |n| format!("{n}, or no such key"));
                return Err(self.metadata.fault(&key, found, allowed));
            }
        }
        let is = |known: &[Architecture]| known.contains(&self.architecture);
        let joined = is(&[Architecture::Phi3, Architecture::GptNeox, Architecture::Gpt2]);
        let experts = self.architecture.may_have_experts();
        for (suffix, known) in [
            ("attn_qkv.weight", joined),
            ("ffn_gate_inp.weight", experts),
            ("ffn_gate_exps.weight", experts),
            ("ffn_gate_inp.bias", is(&[Architecture::GptOss])),
            ("exp_probs_b.bias", is(&[Architecture::Deepseek2])),
            ("attn_sinks.weight", is(&[Architecture::GptOss])),
        ] {
            let tensor = self.gguf.tensors().iter().find(|tensor| tensor.name.ends_with(suffix));
            if let Some(tensor) = tensor.filter(|_| !known) {
                let allowed = format!("none in the architecture {}", self.architecture.name());
                return Err(self.metadata.fault(&tensor.name, "this tensor", allowed));
            }
        }
        Ok(())
    }

    /// Experts of a mixture; in every layer, as in llama.cpp.
    pub(super) fn put_experts(&self, config: &mut Map<String, Json>) -> Result<()> {
        let mixture = self.architecture != Architecture::Llama && self.architecture.may_have_experts();
        let count = self.uint("expert_count")?.filter(|&n| n > 0);
        let Some(count) = count.filter(|_| self.architecture.may_have_experts()) else {
            return match mixture {
                true => Err(self.metadata.fault(&self.key("expert_count"), "none", "at least 1")),
                false => Ok(()),
            };
        };
        let Some(used) = self.uint("expert_used_count")? else {
            return Err(self.metadata.fault(&self.key("expert_used_count"), "none", format!("1 to {count}")));
        };
        config.insert("num_experts_per_tok".into(), json!(used));
        if !mixture {
            config.insert("model_type".into(), json!("mixtral"));
            config.insert("num_local_experts".into(), json!(count));
            return Ok(());
        }
        // Older files do not state the widths; take them from the tensors.
        let width = |key: &str, name: &str, dimension: usize| -> Result<Option<u64>> {
            let shape = self.gguf.get(&format!("blk.0.{name}.weight")).map(|tensor| &tensor.shape);
            let of_tensor = shape.and_then(|shape| shape.get(dimension)).map(|&n| n as u64);
            Ok(self.uint(key)?.filter(|&n| n > 0).or(of_tensor))
        };
        let own = width("expert_feed_forward_length", "ffn_gate_exps", 1)?;
        match self.architecture {
            Architecture::GptOss => {
                config.insert("num_local_experts".into(), json!(count));
                if own.is_some() {
                    config.insert("intermediate_size".into(), json!(own));
                }
                return Ok(());
            }
            Architecture::Deepseek2 => return self.put_deepseek_experts(config, count, own),
            _ => {}
        }
        config.insert("num_experts".into(), json!(count));
        config.insert("moe_intermediate_size".into(), json!(own));
        config.insert("norm_topk_prob".into(), json!(self.architecture == Architecture::Qwen3Moe));
        if self.architecture == Architecture::Qwen2Moe {
            let shared = width("expert_shared_feed_forward_length", "ffn_gate_shexp", 0)?;
            config.insert("shared_expert_intermediate_size".into(), json!(shared));
        }
        Ok(())
    }

    /// Experts of DeepSeek: V3 with sigmoid scores, V2 with softmax.
    fn put_deepseek_experts(
        &self,
        config: &mut Map<String, Json>,
        count: u64,
        width: Option<u64>,
    ) -> Result<()> {
        config.insert("n_routed_experts".into(), json!(count));
        config.insert("moe_intermediate_size".into(), json!(width));
        config.insert("n_shared_experts".into(), json!(self.uint("expert_shared_count")?.unwrap_or(0)));
        let dense = self.uint("leading_dense_block_count")?.unwrap_or(0);
        config.insert("first_k_dense_replace".into(), json!(dense));
        let scale = self.float("expert_weights_scale")?.filter(|&scale| scale != 0.0).unwrap_or(1.0);
        config.insert("routed_scaling_factor".into(), json!(scale));
        let normalized = self.metadata.flag(&self.key("expert_weights_norm"))?.unwrap_or(false);
        config.insert("norm_topk_prob".into(), json!(normalized));
        let groups = self.uint("expert_group_count")?.filter(|&n| n > 1);
        let key = self.key("expert_gating_func");
        match self.metadata.uint(&key)?.unwrap_or(0) {
            0 | 1 if groups.is_some() => {
                let key = self.key("expert_group_count");
                let found = groups.unwrap_or(0).to_string();
                return Err(self.metadata.fault(&key, found, "1 with softmax scores, or no such key"));
            }
            0 | 1 => {
                config.insert("model_type".into(), json!("deepseek_v2"));
                config.insert("topk_method".into(), json!("greedy"));
            }
            2 => {
                config.insert("n_group".into(), json!(groups.unwrap_or(1)));
                let chosen = self.uint("expert_group_used_count")?.filter(|&n| n > 0).unwrap_or(1);
                config.insert("topk_group".into(), json!(chosen));
            }
            other => {
                return Err(self.metadata.fault(&key, other.to_string(), "1 (softmax) or 2 (sigmoid)"));
            }
        }
        Ok(())
    }

    /// Fields of single architectures.
    pub(super) fn put_family(&self, config: &mut Map<String, Json>, head_dim: Option<u64>) -> Result<()> {
        match self.architecture {
            Architecture::Gemma => {
                config.insert("hidden_act".into(), json!("gelu_pytorch_tanh"));
            }
            Architecture::Gemma2 | Architecture::Gemma3 => self.put_gemma(config, head_dim)?,
            Architecture::Phi2 => {
                rename(config, "rms_norm_eps", "layer_norm_eps");
                config.insert("hidden_act".into(), json!("gelu_new"));
                self.put_partial(config, "partial_rotary_factor", head_dim)?;
            }
            Architecture::Phi3 => {
                config.insert("sliding_window".into(), Json::Null);
                self.put_partial(config, "partial_rotary_factor", head_dim)?;
            }
            Architecture::Olmo => {
                self.require_epsilon(1e-5)?;
                let clip = self.float("attention.clamp_kqv")?.filter(|&clip| clip > 0.0);
                config.insert("clip_qkv".into(), json!(clip));
            }
            Architecture::GptNeox => self.put_gpt_neox(config, head_dim)?,
            Architecture::Bitnet => {
                // llama.cpp uses SiLU unless the file says otherwise.
                let stated = self.metadata.text(&self.key("hidden_activation"))?;
                config.insert("hidden_act".into(), json!(stated.unwrap_or("silu")));
            }
            Architecture::Gpt2 => put_gpt2(config),
            Architecture::Deepseek2 => self.put_latent(config)?,
            Architecture::GptOss => {
                let layers = config.get("num_hidden_layers").and_then(Json::as_u64).unwrap_or(0);
                self.put_windows(config, layers)?;
            }
            _ => {}
        }
        Ok(())
    }

    /// Fields of GPT-NeoX, whose names differ from those of Llama.
    fn put_gpt_neox(&self, config: &mut Map<String, Json>, head_dim: Option<u64>) -> Result<()> {
        rename(config, "rms_norm_eps", "layer_norm_eps");
        rename(config, "rope_theta", "rotary_emb_base");
        config.insert("hidden_act".into(), json!("gelu"));
        let biased = self.gguf.get("blk.0.attn_qkv.bias").is_some();
        config.insert("attention_bias".into(), json!(biased));
        let parallel = self.metadata.flag(&self.key("use_parallel_residual"))?;
        config.insert("use_parallel_residual".into(), json!(parallel.unwrap_or(true)));
        self.put_partial(config, "rotary_pct", head_dim)
    }

    /// Widths of latent attention. llama.cpp counts one key head, as wide as the latent and its rotated part; older
    /// files state the widths of a head.
    fn put_latent(&self, config: &mut Map<String, Json>) -> Result<()> {
        config.remove("num_key_value_heads");
        config.insert("rope_interleave".into(), json!(true));
        config.insert("q_lora_rank".into(), json!(self.uint("attention.q_lora_rank")?.filter(|&n| n > 0)));
        let rotated = self.uint("rope.dimension_count")?;
        let head = match self.uint("attention.key_length_mla")? {
            None => self.uint("attention.key_length")?,
            stated => stated,
        };
        let value = match self.uint("attention.value_length_mla")? {
            None => self.uint("attention.value_length")?,
            stated => stated,
        };
        let unrotated = head.zip(rotated).and_then(|(head, rotated)| head.checked_sub(rotated));
        for (field, width) in [
            ("kv_lora_rank", self.uint("attention.kv_lora_rank")?),
            ("qk_rope_head_dim", rotated),
            ("qk_nope_head_dim", unrotated),
            ("v_head_dim", value),
        ] {
            width.map(|width| config.insert(field.into(), json!(width)));
        }
        Ok(())
    }

    fn put_gemma(&self, config: &mut Map<String, Json>, head_dim: Option<u64>) -> Result<()> {
        config.insert("hidden_activation".into(), json!("gelu_pytorch_tanh"));
        let caps = ["attn_logit_softcapping", "final_logit_softcapping"];
        for cap in caps.into_iter().filter(|cap| self.architecture.has_key(cap)) {
            if let Some(limit) = self.float(cap)? {
                config.insert(cap.into(), json!(Some(limit).filter(|&limit| limit > 0.0)));
            }
        }
        let of = |field: &str| config.get(field).and_then(Json::as_u64).unwrap_or(0);
        let (layers, hidden, heads) = (of("num_hidden_layers"), of("hidden_size"), of("num_attention_heads"));
        let scale = self.architecture.query_scale(layers, hidden, heads, head_dim.unwrap_or(0));
        config.insert("query_pre_attn_scalar".into(), json!(scale));
        if self.architecture == Architecture::Gemma3 {
            let local = self.float("rope.freq_base_swa")?.unwrap_or(10_000.0);
            config.insert("rope_local_base_freq".into(), json!(local));
        }
        self.put_windows(config, layers)
    }

    /// Sliding windows, and the layers that have them.
    fn put_windows(&self, config: &mut Map<String, Json>, layers: u64) -> Result<()> {
        /// Maximum number of layers.
        const MOST: u64 = 10_000;
        let window = self.uint("attention.sliding_window")?.filter(|&n| n > 0);
        config.insert("sliding_window".into(), json!(window));
        let key = self.key("attention.sliding_window_pattern");
        let windowed: Vec<bool> = match self.metadata.get(&key) {
            Some(Value::Array(_, flags)) if flags.len() == small(layers) => {
                flags.iter().map(|flag| matches!(flag, Value::Bool(true))).collect()
            }
            Some(Value::Array(_, flags)) => {
                return Err(self.metadata.fault(&key, format!("{} flags", flags.len()), layers.to_string()));
            }
            _ => {
                let stated = self.metadata.uint(&key)?;
                let period = stated.unwrap_or(self.architecture.default_window_period().unwrap_or(1).into());
                // In llama.cpp a period of 0 gives every layer a window.
                (0..layers.min(MOST)).map(|layer| period == 0 || layer % period < period - 1).collect()
            }
        };
        let name = |windowed: bool| {
            if windowed && window.is_some() { "sliding_attention" } else { "full_attention" }
        };
        let types: Vec<_> = windowed.into_iter().map(name).collect();
        config.insert("layer_types".into(), json!(types));
        Ok(())
    }

    /// Share of a head that is rotated. As a float it must give the width again when multiplied and truncated.
    fn put_partial(&self, config: &mut Map<String, Json>, field: &str, head_dim: Option<u64>) -> Result<()> {
        let (Some(dim), Some(rotated)) = (head_dim, self.rotated(head_dim)?) else { return Ok(()) };
        let share = rotated as f64 / dim as f64;
        let exact = (dim as f64 * share) as u64 == rotated;
        config.insert(field.into(), json!(if exact { share } else { share.next_up() }));
        Ok(())
    }

    /// Epsilon that the architecture's configs do not state.
    fn require_epsilon(&self, fixed: f64) -> Result<()> {
        match self.float("attention.layer_norm_epsilon")? {
            Some(eps) if (eps - fixed).abs() > 1e-6 * fixed => {
                let key = self.key("attention.layer_norm_epsilon");
                Err(self.metadata.fault(&key, eps.to_string(), fixed.to_string()))
            }
            _ => Ok(()),
        }
    }
}

/// Renames a field, if it is set.
fn rename(config: &mut Map<String, Json>, from: &str, to: &str) {
    if let Some(value) = config.remove(from) {
        config.insert(to.into(), value);
    }
}

/// Fields of GPT-2, whose names differ from those of Llama.
fn put_gpt2(config: &mut Map<String, Json>) {
    for (from, to) in [
        ("hidden_size", "n_embd"),
        ("num_hidden_layers", "n_layer"),
        ("num_attention_heads", "n_head"),
        ("intermediate_size", "n_inner"),
        ("max_position_embeddings", "n_positions"),
        ("rms_norm_eps", "layer_norm_epsilon"),
    ] {
        rename(config, from, to);
    }
    config.insert("activation_function".into(), json!("gelu_new"));
}
