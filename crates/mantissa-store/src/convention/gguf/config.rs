//! Converts the metadata of a GGUF file to the `config.json` that it was made from.

use serde_json::{Map, Value as Json, json};

use crate::end_tokens::EndTokens;
use crate::error::Result;
use crate::gguf::{Gguf, Metadata, Value};
use mantissa_arch::gguf::{Architecture, RowOrder, Yarn};

/// Tensor of frequency divisors (Llama 3's scaling).
pub const ROPE_FACTORS: &str = "rope_freqs.weight";

/// Tensors of LongRoPE's divisors: for contexts longer than the original one, and for others.
pub const LONG_ROPE: [&str; 2] = ["rope_factors_long.weight", "rope_factors_short.weight"];

/// Model description from the metadata.
pub(super) struct Parsed {
    /// `None` if the file names no architecture.
    pub config: Option<Json>,
    /// The architecture, if it is known.
    pub architecture: Option<&'static Architecture>,
    pub order: RowOrder,
    /// Groups of a recurrent mixer; 1 without.
    pub groups: usize,
    pub notes: Vec<String>,
}

/// # Errors
/// [`crate::Error::Field`] names a key with a wrong type or an unsupported value.
pub(super) fn parse(gguf: &Gguf) -> Result<Parsed> {
    let none = |config| Parsed {
        config,
        architecture: None,
        order: RowOrder::default(),
        groups: 1,
        notes: Vec::new(),
    };
    let Some(name) = gguf.metadata().text("general.architecture")? else { return Ok(none(None)) };
    let experts = gguf.metadata().uint(&format!("{name}.expert_count"))?.is_some_and(|count| count > 0);
    match Architecture::parse(name, experts) {
        Some(architecture) => Reader { gguf, architecture, metadata: gguf.metadata() }.parse(),
        // Lets the builder of a model report the supported architectures.
        None => Ok(none(Some(json!({ "model_type": name })))),
    }
}

/// Reader of the metadata of a known architecture.
pub(super) struct Reader<'a> {
    pub(super) gguf: &'a Gguf,
    pub(super) architecture: &'static Architecture,
    pub(super) metadata: &'a Metadata,
}

impl Reader<'_> {
    fn parse(&self) -> Result<Parsed> {
        self.refuse_unsupported()?;
        let heads = self.heads("attention.head_count")?;
        let kv_heads = if self.architecture.by_layer { None } else { self.heads("attention.head_count_kv")? };
        let kv_heads = kv_heads.or(heads);
        let hidden = self.uint("embedding_length")?;
        let head_dim = if self.architecture.latent { None } else { self.head_dim(hidden, heads)? };
        let mut config = Map::new();
        let mut put = |field: &str, value: Option<u64>| value.map(|v| config.insert(field.into(), json!(v)));
        put("hidden_size", hidden);
        if !self.architecture.by_layer {
            put("intermediate_size", self.feed_forward()?);
        }
        put("num_hidden_layers", self.layers()?);
        put("num_attention_heads", heads);
        put("num_key_value_heads", kv_heads);
        put("head_dim", head_dim);
        put("max_position_embeddings", self.uint("context_length")?);
        put("vocab_size", self.gguf.get("token_embd.weight").and_then(|t| Some(*t.shape.first()? as u64)));
        put("bos_token_id", self.metadata.uint("tokenizer.ggml.bos_token_id")?);
        match EndTokens::of_metadata(self.metadata)?.ids().as_slice() {
            [] => {}
            [id] => _ = config.insert("eos_token_id".into(), json!(id)),
            ids => _ = config.insert("eos_token_id".into(), json!(ids)),
        }
        config.insert("model_type".into(), json!(self.architecture.model_type()));
        config.insert("hidden_act".into(), json!("silu"));
        config.insert("tie_word_embeddings".into(), json!(self.gguf.get("output.weight").is_none()));
        if let Some(eps) = self.float(self.architecture.epsilon_key())? {
            config.insert("rms_norm_eps".into(), json!(eps));
        }
        self.put_biases(&mut config)?;
        config.insert("rope_theta".into(), json!(self.float("rope.freq_base")?.unwrap_or(10_000.0)));
        if let Some(scaling) = self.rope_scaling(self.rotated(head_dim)?)? {
            config.insert("rope_scaling".into(), scaling);
        }
        self.put_experts(&mut config)?;
        self.put_family(&mut config, head_dim)?;
        let order = match (heads, kv_heads) {
            (Some(q), Some(k)) => self.architecture.row_order(small(q), small(k)),
            _ => RowOrder::default(),
        };
        let order = RowOrder { delta: self.delta_heads()?, ..order };
        let architecture = Some(self.architecture);
        let groups = small(self.uint("ssm.group_count")?.unwrap_or(1));
        Ok(Parsed { config: Some(Json::Object(config)), architecture, order, groups, notes: self.notes()? })
    }

    pub(super) fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture.name)
    }

    pub(super) fn uint(&self, key: &str) -> Result<Option<u64>> {
        self.metadata.uint(&self.key(key))
    }

    pub(super) fn float(&self, key: &str) -> Result<Option<f64>> {
        self.metadata.float(&self.key(key))
    }

    /// Number of layers, without those that predict further tokens, which come last.
    pub(super) fn layers(&self) -> Result<Option<u64>> {
        let further = self.uint("nextn_predict_layers")?.unwrap_or(0);
        Ok(self.uint("block_count")?.map(|all| all.saturating_sub(further)))
    }

    /// True if a list of `found` elements is one for `layers` layers, perhaps with those that predict further tokens.
    pub(super) fn is_by_layer(&self, found: usize, layers: usize) -> Result<bool> {
        let further = small(self.uint("nextn_predict_layers")?.unwrap_or(0));
        Ok(found == layers || found == layers.saturating_add(further))
    }

    /// Number of heads: one for all layers, or a list of equal numbers.
    fn heads(&self, key: &str) -> Result<Option<u64>> {
        let key = self.key(key);
        let Some(Value::Array(_, values)) = self.metadata.get(&key) else { return self.metadata.uint(&key) };
        // Recurrent layers have no heads.
        let recurs = self.architecture.recurrence.is_some();
        let mut counts = values.iter().map(Value::as_u64).filter(|count| !recurs || *count != Some(0));
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
        let in_part = self.architecture.partial.is_some();
        for key in ["attention.value_length", "rope.dimension_count"] {
            let fits = |found: u64| found == dim || (in_part && key.starts_with("rope") && found < dim);
            if let Some(found) = self.uint(key)?.filter(|&found| !fits(found)) {
                let allowed = format!("{dim}, the width of a key's head");
                return Err(self.metadata.fault(&self.key(key), found.to_string(), allowed));
            }
        }
        Ok(Some(dim))
    }

    /// Width of the rotated part of a head.
    pub(super) fn rotated(&self, head_dim: Option<u64>) -> Result<Option<u64>> {
        Ok(self.uint("rope.dimension_count")?.or(head_dim))
    }

    /// Biases of one kind are present in all layers or in none.
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
        for bias in self.architecture.biases {
            config.insert(bias.field.into(), json!(all(bias.tensors)?));
        }
        Ok(())
    }

    fn rope_scaling(&self, rotated: Option<u64>) -> Result<Option<Json>> {
        if let Some(scaling) = self.long_rope(rotated)? {
            return Ok(Some(scaling));
        }
        if let Some(factors) = self.factors(ROPE_FACTORS, rotated)? {
            return Ok(Some(json!({ "rope_type": "factors", "factors": factors })));
        }
        let key = self.key("rope.scaling.type");
        // Older key for linear scaling, and the newer pair.
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
        const MULTIPLIER: &str = "rope.scaling.yarn_log_multiplier";
        if self.architecture.yarn == Yarn::Multiplier {
            // A tenth of the configs' value; llama.cpp otherwise scales scores and angles differently.
            let Some(tenth) = self.float(MULTIPLIER)?.filter(|&found| found != 0.0) else {
                return Err(self.metadata.fault(&self.key(MULTIPLIER), "none", "a number other than 0"));
            };
            let mscale = (tenth * 1e7).round() / 1e6;
            yarn.insert("mscale".into(), json!(mscale));
            yarn.insert("mscale_all_dim".into(), json!(mscale));
        } else if self.architecture.yarn == Yarn::Ratio {
            if let Some(all) = self.float(MULTIPLIER)?.filter(|&found| found != 0.0) {
                yarn.insert("mscale".into(), json!(1.0));
                yarn.insert("mscale_all_dim".into(), json!(all));
            }
            if let Some(rate) = self.float("attention.temperature_scale")? {
                yarn.insert("llama_4_scaling_beta".into(), json!(rate));
            }
        } else {
            self.refuse(MULTIPLIER)?;
        }
        if self.architecture.yarn == Yarn::Untruncated {
            yarn.insert("truncate".into(), json!(false));
        }
        self.refuse("rope.scaling.yarn_ext_factor")?;
        self.refuse("rope.scaling.yarn_attn_factor")?;
        Ok(Json::Object(yarn))
    }

    /// Refuses a key that would change the computation.
    fn refuse(&self, key: &str) -> Result<()> {
        match self.float(key)? {
            Some(found) => Err(self.metadata.fault(&self.key(key), found.to_string(), "no such key")),
            None => Ok(()),
        }
    }

    /// LongRoPE: one tensor of factors for contexts up to the original one, another beyond it.
    fn long_rope(&self, rotated: Option<u64>) -> Result<Option<Json>> {
        if !LONG_ROPE.iter().any(|name| self.gguf.get(name).is_some()) {
            return Ok(None);
        }
        let mut factors = Vec::new();
        for name in LONG_ROPE {
            let missing = || self.metadata.fault(name, "none", "a tensor beside the other set of factors");
            factors.push(self.factors(name, rotated)?.ok_or_else(missing)?);
        }
        let mut scaling = Map::new();
        scaling.insert("rope_type".into(), json!("longrope"));
        scaling.insert("long_factor".into(), json!(factors[0]));
        scaling.insert("short_factor".into(), json!(factors[1]));
        let factor = self.float("rope.scaling.attn_factor")?.unwrap_or(1.0);
        scaling.insert("attention_factor".into(), json!(factor));
        if let Some(context) = self.uint("rope.scaling.original_context_length")? {
            scaling.insert("original_max_position_embeddings".into(), json!(context));
        }
        Ok(Some(Json::Object(scaling)))
    }

    /// Tensor `name`: the divisor of each frequency.
    fn factors(&self, name: &str, rotated: Option<u64>) -> Result<Option<Vec<f32>>> {
        let Some(tensor) = self.gguf.get(name) else { return Ok(None) };
        let expected = rotated.unwrap_or(0) / 2;
        if tensor.ty != crate::gguf::GgmlType::F32 || tensor.shape != [usize::try_from(expected).unwrap_or(0)]
        {
            let found = format!("{} {:?}", tensor.ty.name, tensor.shape);
            return Err(self.metadata.fault(name, found, format!("F32 [{expected}]")));
        }
        let bytes = self.gguf.read(tensor)?;
        let factors: Vec<f32> = bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        match factors.iter().find(|f| !f.is_finite() || **f <= 0.0) {
            Some(bad) => Err(self.metadata.fault(name, bad.to_string(), "finite factors greater than 0")),
            None => Ok(Some(factors)),
        }
    }

    fn notes(&self) -> Result<Vec<String>> {
        let everywhere = self.architecture.recurrence.is_some_and(|mixers| mixers.attends);
        if everywhere || self.architecture.has_windows(small(self.layers()?.unwrap_or(0))) {
            return Ok(Vec::new());
        }
        let window = self.uint("attention.sliding_window")?.filter(|&n| n > 0);
        let window = window.filter(|&n| self.uint("context_length").is_ok_and(|c| c.is_none_or(|c| n < c)));
        let note = |n| format!("{}: {n} is ignored, as llama.cpp does", self.key("attention.sliding_window"));
        Ok(window.map(note).into_iter().collect())
    }
}

pub(super) fn small(n: u64) -> usize {
    usize::try_from(n).unwrap_or(usize::MAX)
}
