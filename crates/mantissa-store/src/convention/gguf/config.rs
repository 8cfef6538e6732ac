//! The metadata of a GGUF file as the `config.json` that it was made from.

use serde_json::{Map, Value as Json, json};

use super::{Architecture, RowOrder};
use crate::error::Result;
use crate::gguf::{Gguf, Metadata, Value};

/// What the metadata say.
pub(super) struct Parsed {
    /// `None` where the file names no architecture.
    pub config: Option<Json>,
    pub order: RowOrder,
    pub notes: Vec<String>,
}

/// Keys that would change the computation in a way that is not known here, with the values under which they do not.
const UNSUPPORTED: [(&str, &[f64]); 10] = [
    ("expert_count", &[0.0]),
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

/// # Errors
/// [`crate::Error::Field`] names a key that is of the wrong type, or asks for what is not understood.
pub(super) fn parse(gguf: &Gguf) -> Result<Parsed> {
    let none = |config| Parsed { config, order: RowOrder::default(), notes: Vec::new() };
    let Some(name) = gguf.metadata().text("general.architecture")? else { return Ok(none(None)) };
    match Architecture::parse(name) {
        Some(architecture) => Reader { gguf, architecture, metadata: gguf.metadata() }.parse(),
        // Whoever builds a model from it is told which there are.
        None => Ok(none(Some(json!({ "model_type": name })))),
    }
}

struct Reader<'a> {
    gguf: &'a Gguf,
    architecture: Architecture,
    metadata: &'a Metadata,
}

impl Reader<'_> {
    fn parse(&self) -> Result<Parsed> {
        self.refuse_unsupported()?;
        let heads = self.heads("attention.head_count")?;
        let kv_heads = self.heads("attention.head_count_kv")?.or(heads);
        let hidden = self.uint("embedding_length")?;
        let head_dim = self.head_dim(hidden, heads)?;
        let mut config = Map::new();
        let mut put = |field: &str, value: Option<u64>| value.map(|v| config.insert(field.into(), json!(v)));
        put("hidden_size", hidden);
        put("intermediate_size", self.uint("feed_forward_length")?);
        put("num_hidden_layers", self.uint("block_count")?);
        put("num_attention_heads", heads);
        put("num_key_value_heads", kv_heads);
        put("head_dim", head_dim);
        put("max_position_embeddings", self.uint("context_length")?);
        put("vocab_size", self.gguf.get("token_embd.weight").and_then(|t| Some(*t.shape.first()? as u64)));
        put("bos_token_id", self.metadata.uint("tokenizer.ggml.bos_token_id")?);
        put("eos_token_id", self.metadata.uint("tokenizer.ggml.eos_token_id")?);
        config.insert("model_type".into(), json!(self.architecture.name()));
        config.insert("hidden_act".into(), json!("silu"));
        config.insert("tie_word_embeddings".into(), json!(self.gguf.get("output.weight").is_none()));
        if let Some(eps) = self.float("attention.layer_norm_rms_epsilon")? {
            config.insert("rms_norm_eps".into(), json!(eps));
        }
        self.put_biases(&mut config)?;
        config.insert("rope_theta".into(), json!(self.float("rope.freq_base")?.unwrap_or(10_000.0)));
        if let Some(scaling) = self.rope_scaling(head_dim)? {
            config.insert("rope_scaling".into(), scaling);
        }
        let interleaved = match (self.architecture, heads, kv_heads) {
            (Architecture::Llama, Some(q), Some(k)) => Some((small(q), small(k))),
            _ => None,
        };
        Ok(Parsed {
            config: Some(Json::Object(config)),
            order: RowOrder { interleaved },
            notes: self.notes()?,
        })
    }

    fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture.name())
    }

    fn uint(&self, key: &str) -> Result<Option<u64>> {
        self.metadata.uint(&self.key(key))
    }

    fn float(&self, key: &str) -> Result<Option<f64>> {
        self.metadata.float(&self.key(key))
    }

    fn refuse_unsupported(&self) -> Result<()> {
        for (name, harmless) in UNSUPPORTED {
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
        for suffix in ["attn_qkv.weight", "ffn_gate_inp.weight", "ffn_gate_exps.weight", "attn_sinks.weight"]
        {
            if let Some(tensor) = self.gguf.tensors().iter().find(|tensor| tensor.name.ends_with(suffix)) {
                return Err(self.metadata.fault(
                    &tensor.name,
                    "this tensor",
                    "a dense model with q, k and v apart",
                ));
            }
        }
        Ok(())
    }

    /// A number of heads: one for all layers, or a list of equal ones.
    fn heads(&self, key: &str) -> Result<Option<u64>> {
        let key = self.key(key);
        let Some(Value::Array(_, values)) = self.metadata.get(&key) else { return self.metadata.uint(&key) };
        let mut counts = values.iter().map(Value::as_u64);
        let first = counts.next().flatten();
        if first.is_none() || counts.any(|count| count != first) {
            return Err(self.metadata.fault(
                &key,
                "different numbers by layer",
                "the same number for every layer",
            ));
        }
        Ok(first)
    }

    /// Width of a head; keys, values and rotation must agree on it.
    fn head_dim(&self, hidden: Option<u64>, heads: Option<u64>) -> Result<Option<u64>> {
        let stated = self.uint("attention.key_length")?;
        let derived = || hidden.zip(heads).and_then(|(d, h)| d.checked_div(h));
        let Some(dim) = stated.or_else(derived) else { return Ok(None) };
        for key in ["attention.value_length", "rope.dimension_count"] {
            if let Some(found) = self.uint(key)?.filter(|&found| found != dim) {
                let allowed = format!("{dim}, the width of a key's head");
                return Err(self.metadata.fault(&self.key(key), found.to_string(), allowed));
            }
        }
        Ok(Some(dim))
    }

    /// Biases are there or not; those of one kind come together.
    fn put_biases(&self, config: &mut Map<String, Json>) -> Result<()> {
        let has = |name: &str| self.gguf.get(&format!("blk.0.{name}.bias")).is_some();
        let all = |names: &[&str]| match names.iter().filter(|name| has(name)).count() {
            0 => Ok(false),
            n if n == names.len() => Ok(true),
            _ => {
                let field = format!("blk.0.{}.bias", names.join("|"));
                Err(self.metadata.fault(&field, "only some of these", "all of them or none"))
            }
        };
        let attention = match self.architecture {
            Architecture::Qwen2 => all(&["attn_q", "attn_k", "attn_v"]),
            _ => all(&["attn_q", "attn_k", "attn_v", "attn_output"]),
        };
        config.insert("attention_bias".into(), json!(attention?));
        config.insert("mlp_bias".into(), json!(all(&["ffn_gate", "ffn_up", "ffn_down"])?));
        Ok(())
    }

    fn rope_scaling(&self, head_dim: Option<u64>) -> Result<Option<Json>> {
        if let Some(factors) = self.rope_factors(head_dim)? {
            return Ok(Some(json!({ "rope_type": "factors", "factors": factors })));
        }
        let key = self.key("rope.scaling.type");
        // An older key for linear scaling, and the newer pair.
        let factor = match self.float("rope.scaling.factor")? {
            Some(factor) => Some(factor),
            None => self.float("rope.scale_linear")?,
        };
        let kind = self.metadata.text(&key)?;
        let Some(factor) = factor.filter(|&f| f != 1.0 && f != 0.0) else {
            return match kind {
                None | Some("none" | "linear" | "yarn") => Ok(None),
                Some(other) => Err(self.metadata.fault(&key, format!("\"{other}\""), "none, linear or yarn")),
            };
        };
        match kind {
            Some("none") => Ok(None),
            None | Some("linear") => Ok(Some(json!({ "rope_type": "linear", "factor": factor }))),
            Some("yarn") => self.yarn(factor).map(Some),
            Some(other) => Err(self.metadata.fault(&key, format!("\"{other}\""), "none, linear or yarn")),
        }
    }

    fn yarn(&self, factor: f64) -> Result<Json> {
        let mut yarn = Map::new();
        yarn.insert("rope_type".into(), json!("yarn"));
        yarn.insert("factor".into(), json!(factor));
        if let Some(context) = self.uint("rope.scaling.original_context_length")? {
            yarn.insert("original_max_position_embeddings".into(), json!(context));
        }
        for (key, field) in [("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")] {
            if let Some(beta) = self.float(&format!("rope.scaling.{key}"))? {
                yarn.insert(field.into(), json!(beta));
            }
        }
        for key in [
            "rope.scaling.yarn_log_multiplier",
            "rope.scaling.yarn_ext_factor",
            "rope.scaling.yarn_attn_factor",
        ] {
            if let Some(found) = self.float(key)? {
                return Err(self.metadata.fault(&self.key(key), found.to_string(), "no such key"));
            }
        }
        Ok(Json::Object(yarn))
    }

    /// `rope_freqs.weight`: what each frequency is divided by (Llama 3's scaling).
    fn rope_factors(&self, head_dim: Option<u64>) -> Result<Option<Vec<f32>>> {
        const NAME: &str = "rope_freqs.weight";
        for name in ["rope_factors_long.weight", "rope_factors_short.weight"] {
            if self.gguf.get(name).is_some() {
                return Err(self.metadata.fault(
                    name,
                    "factors by context length",
                    "rope_freqs.weight or none",
                ));
            }
        }
        let Some(tensor) = self.gguf.get(NAME) else { return Ok(None) };
        let expected = head_dim.unwrap_or(0) / 2;
        if tensor.ty != crate::gguf::GgmlType::F32 || tensor.shape != [usize::try_from(expected).unwrap_or(0)]
        {
            let found = format!("{} {:?}", tensor.ty.name, tensor.shape);
            return Err(self.metadata.fault(NAME, found, format!("F32 [{expected}]")));
        }
        let bytes = self.gguf.read(tensor)?;
        let factors: Vec<f32> = bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        match factors.iter().find(|f| !f.is_finite() || **f <= 0.0) {
            Some(bad) => Err(self.metadata.fault(NAME, bad.to_string(), "finite factors greater than 0")),
            None => Ok(Some(factors)),
        }
    }

    fn notes(&self) -> Result<Vec<String>> {
        let window = self.uint("attention.sliding_window")?.filter(|&n| n > 0);
        let window = window.filter(|&n| self.uint("context_length").is_ok_and(|c| c.is_none_or(|c| n < c)));
        let note = |n| format!("{}: {n} is ignored, as llama.cpp does", self.key("attention.sliding_window"));
        Ok(window.map(note).into_iter().collect())
    }
}

fn small(n: u64) -> usize {
    usize::try_from(n).unwrap_or(usize::MAX)
}
