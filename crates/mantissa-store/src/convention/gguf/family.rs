//! Features beyond a plain decoder: experts, windows, caps, partial rotation; and refused metadata.
//!
//! The fields are named as in transformers' configs; the rules that have no key are llama.cpp's (one loader for each architecture).

use serde_json::{Map, Value as Json, json};

use super::config::{LONG_ROPE, Reader, small};
use super::recurrent::to_json;
use crate::error::Result;
use crate::gguf::Value;
use mantissa_arch::gguf::{Experts, Indexers, LocalTheta, Unrotated, Windows};

/// Keys with an unsupported effect on the computation, with the values that have none.
const UNSUPPORTED: [(&str, &[f64]); 15] = [
    ("expert_count", &[0.0]),
    ("expert_group_count", &[0.0, 1.0]),
    ("expert_gating_func", &[0.0, 1.0]),
    ("expert_weights_scale", &[0.0, 1.0]),
    ("leading_dense_block_count", &[0.0]),
    ("attention.max_alibi_bias", &[0.0]),
    ("attention.clamp_kqv", &[0.0]),
    ("attention.scale", &[]),
    ("attention.temperature_scale", &[0.0]),
    ("embedding_scale", &[1.0]),
    ("residual_scale", &[1.0]),
    ("logit_scale", &[1.0]),
    ("attn_logit_softcapping", &[0.0]),
    ("final_logit_softcapping", &[0.0]),
    ("rope.scaling.attn_factor", &[1.0]),
];

/// Tensors that change the computation, by the end of their names.
const GUARDED: [&str; 6] = [
    "attn_qkv.weight",
    "ffn_gate_inp.weight",
    "ffn_gate_exps.weight",
    "ffn_gate_inp.bias",
    "exp_probs_b.bias",
    "attn_sinks.weight",
];

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
        for suffix in GUARDED {
            let tensor = self.gguf.tensors().iter().find(|tensor| tensor.name.ends_with(suffix));
            if let Some(tensor) = tensor.filter(|_| !self.architecture.has_tensor(suffix)) {
                let allowed = format!("none in the architecture {}", self.architecture.name);
                return Err(self.metadata.fault(&tensor.name, "this tensor", allowed));
            }
        }
        Ok(())
    }

    /// Experts of a mixture; in every layer, as in llama.cpp.
    pub(super) fn put_experts(&self, config: &mut Map<String, Json>) -> Result<()> {
        let form = self.architecture.experts;
        if form == Experts::None {
            return Ok(());
        }
        let Some(count) = self.uint("expert_count")?.filter(|&n| n > 0) else {
            return match form {
                Experts::Some { .. } | Experts::Beside { .. } => Ok(()),
                Experts::Periodic { count } => {
                    config.insert(count.into(), json!(1));
                    Ok(())
                }
                _ => Err(self.metadata.fault(&self.key("expert_count"), "none", "at least 1")),
            };
        };
        let Some(used) = self.uint("expert_used_count")? else {
            return Err(self.metadata.fault(&self.key("expert_used_count"), "none", format!("1 to {count}")));
        };
        config.insert("num_experts_per_tok".into(), json!(used));
        let own = self.expert_width("expert_feed_forward_length", "ffn_gate_exps", 1)?;
        match form {
            Experts::None => Ok(()),
            Experts::Some { model_type } => {
                config.insert("model_type".into(), json!(model_type));
                config.insert("num_local_experts".into(), json!(count));
                Ok(())
            }
            Experts::Routed { .. } => self.put_routed_experts(config, form, [count, used], own),
            Experts::Interleaved { count: field, width, dense } => {
                let step = self.uint("interleave_moe_layer_step")?.unwrap_or(1);
                config.insert("interleave_moe_layer_step".into(), json!(step));
                config.insert(field.into(), json!(count));
                if let Some(stated) = config.remove("intermediate_size") {
                    config.insert(dense.into(), stated);
                }
                own.map(|own| config.insert(width.into(), json!(own)));
                Ok(())
            }
            Experts::Periodic { count: field } => {
                config.insert(field.into(), json!(count));
                let layers = self.number_of_layers()?;
                let routed = |layer| self.gguf.get(&format!("blk.{layer}.ffn_gate_inp.weight")).is_some();
                let has: Vec<bool> = (0..layers).map(routed).collect();
                self.put_period(config, ["expert_layer_period", "expert_layer_offset"], &has)
            }
            Experts::Beside { enabled, count: field, used: used_field, width } => {
                config.remove("num_experts_per_tok");
                config.insert(enabled.into(), json!(true));
                config.insert(field.into(), json!(count));
                config.insert(used_field.into(), json!(used));
                own.map(|own| config.insert(width.into(), json!(own)));
                Ok(())
            }
            Experts::Hashed => self.put_hashed_experts(config, count, own),
            Experts::Averaged { .. } => self.put_averaged_experts(config, form, count, own),
            Experts::BesideShared { count: field, shared } => {
                config.insert(field.into(), json!(count));
                let width = self.uint("expert_shared_feed_forward_length")?;
                config.insert(shared.into(), json!(width));
                Ok(())
            }
            Experts::Blocks { shared, latent } => {
                self.put_grouped_experts(config, "", count, own)?;
                for field in ["first_k_dense_replace", "n_shared_experts"] {
                    config.remove(field);
                }
                config.insert(latent.into(), json!(self.uint("moe_latent_size")?.filter(|&n| n > 0)));
                let width = self.uint("expert_shared_feed_forward_length")?;
                config.insert(shared.into(), json!(width));
                Ok(())
            }
            Experts::Grouped { softmax } => self.put_grouped_experts(config, softmax, count, own),
            Experts::Every { count: count_field, width, normalized, shared } => {
                config.insert(count_field.into(), json!(count));
                own.map(|own| config.insert(width.into(), json!(own)));
                normalized.map(|flag| config.insert("norm_topk_prob".into(), json!(flag)));
                if let Some(field) = shared {
                    let width =
                        self.expert_width("expert_shared_feed_forward_length", "ffn_gate_shexp", 0)?;
                    config.insert(field.into(), json!(width));
                }
                Ok(())
            }
        }
    }

    /// Width that a key states, or else a dimension of the tensors: older files do not state it.
    fn expert_width(&self, key: &str, name: &str, dimension: usize) -> Result<Option<u64>> {
        let end = format!(".{name}.weight");
        let shape = self.gguf.tensors().iter().find(|tensor| tensor.name.ends_with(&end)).map(|t| &t.shape);
        let tensor_size = shape.and_then(|shape| shape.get(dimension)).map(|&n| n as u64);
        Ok(self.uint(key)?.filter(|&n| n > 0).or(tensor_size))
    }

    /// Experts of one kind of scores, after dense layers or in every layer.
    fn put_routed_experts(
        &self,
        config: &mut Map<String, Json>,
        form: Experts,
        [count, used]: [u64; 2],
        own: Option<u64>,
    ) -> Result<()> {
        let Experts::Routed {
            count: count_field,
            used: used_field,
            width,
            first,
            shared,
            sigmoid,
            scaled,
            ..
        } = form
        else {
            return Ok(());
        };
        config.remove("num_experts_per_tok");
        config.insert(used_field.into(), json!(used));
        config.insert(count_field.into(), json!(count));
        own.map(|own| config.insert(width.into(), json!(own)));
        if let Some(first) = first {
            let dense = self.uint("leading_dense_block_count")?.unwrap_or(0);
            config.insert(first.into(), json!(dense));
        }
        if let Some(shared) = shared {
            let stated = self.uint("expert_shared_count")?;
            config.insert(shared.into(), json!(stated.unwrap_or(0)));
        }
        // llama.cpp has the scores of the architecture where no key states them.
        let key = self.key("expert_gating_func");
        let expected = if sigmoid { 2 } else { 1 };
        if let Some(found) = self.metadata.uint(&key)?.filter(|&found| found != 0 && found != expected) {
            return Err(self.metadata.fault(&key, found.to_string(), expected.to_string()));
        }
        let key = self.key("interleave_moe_layer_step");
        if let Some(step) = self.metadata.uint(&key)?.filter(|&step| step != 1) {
            return Err(self.metadata.fault(&key, step.to_string(), "1"));
        }
        if scaled {
            let scale = self.float("expert_weights_scale")?.filter(|&scale| scale != 0.0).unwrap_or(1.0);
            config.insert("routed_scaling_factor".into(), json!(scale));
            let normalized = self.metadata.flag(&self.key("expert_weights_norm"))?.unwrap_or(false);
            config.insert("norm_topk_prob".into(), json!(normalized));
        }
        Ok(())
    }

    /// Experts that are averaged with shared ones.
    fn put_averaged_experts(
        &self,
        config: &mut Map<String, Json>,
        form: Experts,
        count: u64,
        own: Option<u64>,
    ) -> Result<()> {
        let Experts::Averaged { count: field, width, dense, first, shared, scores } = form else {
            return Ok(());
        };
        if let Some(stated) = config.remove("intermediate_size") {
            config.insert(dense.into(), stated);
        }
        config.insert(field.into(), json!(count));
        own.map(|own| config.insert(width.into(), json!(own)));
        for (field, key) in [(first, "leading_dense_block_count"), (shared, "expert_shared_count")] {
            config.insert(field.into(), json!(self.uint(key)?.unwrap_or(0)));
        }
        let normalized = self.metadata.flag(&self.key("expert_weights_norm"))?.unwrap_or(false);
        config.insert("norm_topk_prob".into(), json!(normalized));
        let key = self.key("expert_gating_func");
        let kind = match self.metadata.uint(&key)?.unwrap_or(0) {
            0 | 2 => "sigmoid",
            1 => "softmax",
            other => return Err(self.metadata.fault(&key, other.to_string(), "1 (softmax) or 2 (sigmoid)")),
        };
        config.insert(scores.into(), json!(kind));
        Ok(())
    }

    /// The experts of DeepSeek. Models with softmax scores have a `model_type` of their own.
    fn put_grouped_experts(
        &self,
        config: &mut Map<String, Json>,
        softmax: &str,
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
            0 | 1 if softmax.is_empty() => {
                let found = self.metadata.uint(&key)?.map_or("none".to_owned(), |found| found.to_string());
                return Err(self.metadata.fault(&key, found, "2 (sigmoid)"));
            }
            0 | 1 => {
                config.insert("model_type".into(), json!(softmax));
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

    /// Fields of features that not every architecture has.
    pub(super) fn put_family(&self, config: &mut Map<String, Json>, head_dim: Option<u64>) -> Result<()> {
        let row = self.architecture;
        for (from, to) in row.renamed {
            if let Some(value) = config.remove(*from) {
                config.insert((*to).into(), value);
            }
        }
        let stated = match row.other_activation {
            Some(_) => self.metadata.text(&self.key("hidden_activation"))?,
            None => None,
        };
        config.insert(row.activation_field.into(), json!(stated.unwrap_or(row.activation)));
        if row.parallel_key {
            let parallel = self.metadata.flag(&self.key("use_parallel_residual"))?;
            config.insert("use_parallel_residual".into(), json!(parallel.unwrap_or(true)));
        }
        if row.windows == Windows::Zero {
            config.insert("sliding_window".into(), Json::Null);
        }
        if let Some(field) = row.partial {
            self.put_partial(config, field, head_dim)?;
        }
        if let Some(eps) = row.fixed_epsilon {
            self.require_epsilon(eps)?;
        }
        if row.has_key("attention.clamp_kqv") {
            let clip = self.float("attention.clamp_kqv")?.filter(|&clip| clip > 0.0);
            config.insert("clip_qkv".into(), json!(clip));
        }
        if row.latent {
            self.put_latent(config)?;
        }
        for (key, field) in row.factors {
            if let Some(factor) = self.float(key)?.filter(|&factor| factor != 0.0) {
                config.insert((*field).into(), json!(factor));
            }
        }
        if let Some(field) = row.head_norms {
            config.insert(field.into(), json!(self.gguf.get("blk.0.attn_q_norm.weight").is_some()));
        }
        if let Unrotated::LastOf(period) = row.unrotated {
            config.insert("no_rope_layer_interval".into(), json!(period));
        }
        for (field, value) in row.fixed {
            config.insert((*field).into(), to_json(*value));
        }
        if let Some(experts) = row.unnormed_with {
            let normed = self.uint("expert_count")? != Some(experts.into());
            config.insert("use_qk_norm".into(), json!(normed));
        }
        if row.chunk.is_some()
            && let Some(window) = self.uint("attention.sliding_window")?
        {
            let key = self.key("attention.sliding_window");
            return Err(self.metadata.fault(&key, window.to_string(), "no such key: chunks are fixed"));
        }
        self.put_scores(config, head_dim)?;
        match row.windows {
            Windows::Periodic { period, .. } | Windows::Listed { period } => {
                self.put_windows(config, period)?;
            }
            _ => {}
        }
        if row.by_layer {
            self.put_by_layer(config)?;
        }
        self.put_streams(config)?;
        self.put_recurrence(config)
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
        self.put_indexer(config)
    }

    /// Sizes of an indexer, and the layers that have one.
    fn put_indexer(&self, config: &mut Map<String, Json>) -> Result<()> {
        if self.architecture.indexer == Indexers::None {
            return Ok(());
        }
        for (field, key) in
            [("index_n_heads", "head_count"), ("index_head_dim", "key_length"), ("index_topk", "top_k")]
        {
            let number = self.uint(&format!("attention.indexer.{key}"))?;
            number.map(|number| config.insert(field.into(), json!(number)));
        }
        if self.architecture.indexer != Indexers::Listed {
            return Ok(());
        }
        match self.metadata.get(&self.key("attention.indexer.types")) {
            Some(Value::Array(_, flags)) => {
                let own = |flag: &Value| {
                    let own = matches!(flag, Value::Bool(true)) || flag.as_u64().is_some_and(|n| n > 0);
                    if own { "full" } else { "shared" }
                };
                let types: Vec<_> = flags.iter().take(self.number_of_layers()?).map(own).collect();
                config.insert("indexer_types".into(), json!(types));
            }
            // Files from before that key: models with this context share in fours.
            _ if self.uint("context_length")?.is_some_and(|context| context >= 1 << 20) => {
                config.insert("index_topk_freq".into(), json!(4));
                config.insert("index_skip_topk_offset".into(), json!(3));
            }
            _ => {}
        }
        Ok(())
    }

    /// Caps and scale of the attention scores, and the rotary base of layers with a window.
    fn put_scores(&self, config: &mut Map<String, Json>, head_dim: Option<u64>) -> Result<()> {
        let row = self.architecture;
        let caps = ["attn_logit_softcapping", "final_logit_softcapping"];
        for cap in caps.into_iter().filter(|cap| row.has_key(cap)) {
            if let Some(limit) = self.float(cap)? {
                config.insert(cap.into(), json!(Some(limit).filter(|&limit| limit > 0.0)));
            }
        }
        if row.wide_scale.is_some() {
            let of = |field: &str| small(config.get(field).and_then(Json::as_u64).unwrap_or(0));
            let (layers, hidden) = (of("num_hidden_layers"), of("hidden_size"));
            let heads = of("num_attention_heads");
            let scale = row.query_scale(layers, hidden, heads, small(head_dim.unwrap_or(0)));
            config.insert("query_pre_attn_scalar".into(), json!(scale));
        }
        let local = self.float("rope.freq_base_swa")?;
        let local = match row.local_theta {
            LocalTheta::None => None,
            LocalTheta::Default(theta) => Some(local.unwrap_or(theta)),
            LocalTheta::Same => match local {
                None => Some(self.float("rope.freq_base")?.unwrap_or(10_000.0)),
                stated => stated,
            },
        };
        if let Some(local) = local {
            config.insert("rope_local_base_freq".into(), json!(local));
        }
        Ok(())
    }

    /// Sliding windows, and the layers that have them; `default` is their period where no key states it.
    fn put_windows(&self, config: &mut Map<String, Json>, default: u32) -> Result<()> {
        /// Maximum number of layers.
        const MOST: u64 = 10_000;
        let layers = config.get("num_hidden_layers").and_then(Json::as_u64).unwrap_or(0);
        if !self.architecture.has_windows(small(layers)) {
            config.insert("sliding_window".into(), Json::Null);
            return Ok(());
        }
        let window = self.uint("attention.sliding_window")?.filter(|&n| n > 0);
        config.insert("sliding_window".into(), json!(window));
        if let Some(model_type) = self.architecture.windowed.filter(|_| window.is_some()) {
            config.insert("model_type".into(), json!(model_type));
        }
        let key = self.key("attention.sliding_window_pattern");
        let windowed: Vec<bool> = match self.metadata.get(&key) {
            Some(Value::Array(_, flags)) if self.is_by_layer(flags.len(), small(layers))? => {
                flags.iter().take(small(layers)).map(|flag| matches!(flag, Value::Bool(true))).collect()
            }
            Some(Value::Array(_, flags)) => {
                return Err(self.metadata.fault(&key, format!("{} flags", flags.len()), layers.to_string()));
            }
            _ => {
                let period = self.metadata.uint(&key)?.unwrap_or(default.into());
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
