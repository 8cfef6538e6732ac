//! A model's `config.json`, checked: what is in a [`ModelConfig`] can be built and allocated for.
//!
//! Field names and defaults are those of transformers 5.23. Fields that do not change the computation are
//! ignored.

mod attention;
mod experts;
mod family;
mod fields;
mod rope;

use std::fmt;
use std::path::Path;

use serde_json::Value;

use attention::Heads;
pub use attention::Latent;
pub use experts::{Experts, Groups, LimitedSwiglu, Routing, Scores, SharedExperts};
pub use family::ModelType;
pub use fields::ConfigError;
use fields::Fields;

use crate::rope::{Rope, RopeScaling, yarn_mscale};

/// Widest layer that is accepted; keeps every product of two sizes far from overflow.
const MAX_WIDTH: u64 = 1 << 24;
const MAX_LAYERS: u64 = 10_000;
const MAX_POSITIONS: u64 = 1 << 31;

/// The activation of the MLP's gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Activation {
    /// `x · sigmoid(x)`.
    Silu,
    /// `max(x, 0)²`.
    Relu2,
    /// GELU with the tanh approximation.
    GeluTanh,
    /// GELU with the error function.
    Gelu,
}

impl fmt::Display for Activation {
    /// The name in a config.json.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Activation::Silu => "silu",
            Activation::Relu2 => "relu2",
            Activation::GeluTanh => "gelu_pytorch_tanh",
            Activation::Gelu => "gelu",
        })
    }
}

/// What the norms of an architecture compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NormForm {
    /// RMSNorm with a weight.
    Rms,
    /// RMSNorm with 1 plus a weight (Gemma).
    RmsPlusOne,
    /// LayerNorm with a weight and a bias.
    Layer,
    /// LayerNorm without parameters (OLMo).
    LayerPlain,
}

/// Where a layer's norms stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NormPlaces {
    /// Before attention and MLP.
    Before,
    /// After attention and MLP, before their results are added (OLMo 2).
    After,
    /// Before and after (Gemma 2 and 3).
    Both,
    /// Before both, which read the same states and are added to them together (GPT-NeoX).
    Parallel,
    /// The same with one norm for both (Phi).
    ParallelShared,
}

/// Norms of queries and keys before they are rotated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HeadNorms {
    /// None.
    Absent,
    /// Of each head by itself.
    Each,
    /// Of all heads together (OLMo 2).
    Whole,
}

/// How the projections to queries, keys and values are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum QkvForm {
    /// One by one.
    Separate,
    /// As one: all queries, all keys, all values.
    Joined,
    /// As one, head by head: its query, its key, its value.
    ByHead,
}

/// What an MLP is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MlpForm {
    /// `down(act(gate(x)) · up(x))`.
    Gated,
    /// The same with gate and up stored as one.
    GatedJoined,
    /// `down(act(up(x)))`.
    Plain,
}

/// Which linear layers have a bias.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Biases {
    /// q, k and v.
    pub qkv: bool,
    /// The attention's output.
    pub output: bool,
    /// gate, up and down.
    pub mlp: bool,
    /// Those of the experts.
    pub experts: bool,
}

/// A decoder's architecture. All sizes are at least 1 and multiply without overflow.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// The architecture.
    pub model_type: ModelType,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Number of layers.
    pub num_hidden_layers: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key and value heads; they divide the query heads.
    pub num_key_value_heads: usize,
    /// Width of a head; even where it is rotated. With [`Latent`] attention the wider of keys and values.
    pub head_dim: usize,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Longest context.
    pub max_position_embeddings: usize,
    /// Added to the mean square, or to the variance, in every norm.
    pub rms_norm_eps: f32,
    /// What the norms compute.
    pub norm: NormForm,
    /// Where they stand.
    pub norm_places: NormPlaces,
    /// Norms of queries and keys.
    pub head_norms: HeadNorms,
    /// Whether the head is the embedding.
    pub tie_word_embeddings: bool,
    /// Activation of the gate.
    pub hidden_act: Activation,
    /// Which linears have a bias.
    pub biases: Biases,
    /// For each layer, how many keys a query sees, itself included; `None` for all before it.
    pub windows: Vec<Option<usize>>,
    /// Rotary embedding.
    pub rope: Rope,
    /// That of layers with a window, where it is another one (Gemma 3).
    pub local_rope: Option<Rope>,
    /// Width of the part of a head that is rotated, even; 0 where positions are learned.
    pub rotary_dim: usize,
    /// Whether a learned vector for each position is added to the embedding.
    pub learned_positions: bool,
    /// Factor of the embedding.
    pub embedding_scale: Option<f32>,
    /// How q, k and v are stored.
    pub qkv: QkvForm,
    /// What the MLP is made of.
    pub mlp: MlpForm,
    /// Factor of the attention's scores.
    pub attention_scale: f32,
    /// Limit of the attention's scores, `cap · tanh(score / cap)`.
    pub attention_softcap: Option<f32>,
    /// The same of the logits.
    pub logit_softcap: Option<f32>,
    /// Limit of the magnitude of q, k and v.
    pub clip_qkv: Option<f32>,
    /// Whether each head has a sink: a score without a value (Xiao et al. 2023, "Attention Sinks").
    pub sinks: bool,
    /// Latent attention.
    pub latent: Option<Latent>,
    /// Mixture of experts.
    pub experts: Option<Experts>,
    /// Whether the head has a bias.
    pub head_bias: bool,
    /// Whether a GPT-2 checkpoint lacks the prefix `transformer.` of its names, which no config says.
    pub bare_names: bool,
    /// Begins a document.
    pub bos_token_id: Option<u32>,
    /// Any of these ends one.
    pub eos_token_ids: Vec<u32>,
}

impl ModelConfig {
    /// Reads and checks the contents of `config.json`. `file` is the name that errors give.
    ///
    /// # Errors
    /// [`ConfigError`] for the first field that is missing, of the wrong type, out of range, inconsistent or
    /// not supported.
    pub fn from_json(value: &Value, file: &str) -> Result<Self, ConfigError> {
        let fields = Fields::root(file, value)?;
        let model_type = ModelType::parse(fields)?;
        let fields = fields.named(model_type.aliases());
        for &(flag, fixed) in model_type.fixed_flags() {
            if fields.flag(flag, fixed)? != fixed {
                return Err(fields.error(flag, format!("{fixed} in {}", model_type.name())));
            }
        }
        let num_hidden_layers = fields.size("num_hidden_layers", 1..=MAX_LAYERS)?;
        let max_position_embeddings = fields.size("max_position_embeddings", 1..=MAX_POSITIONS)?;
        let latent = Latent::parse(fields, model_type)?;
        let heads = Heads::parse(fields, model_type, latent)?;
        let rotated = latent.map_or(heads.dim, |latent| latent.rotated);
        let rope = rope::parse(fields, model_type, max_position_embeddings, rotated)?;
        let experts = experts::parse(fields, model_type, num_hidden_layers)?;
        let intermediate_size = match model_type {
            ModelType::Gpt2 if fields.get("intermediate_size").is_none() => 4 * heads.hidden_size,
            _ => fields.size("intermediate_size", 1..=MAX_WIDTH)?,
        };
        Ok(ModelConfig {
            model_type,
            hidden_size: heads.hidden_size,
            intermediate_size,
            num_hidden_layers,
            num_attention_heads: heads.query,
            num_key_value_heads: heads.key_value,
            head_dim: heads.dim,
            vocab_size: fields.size("vocab_size", 1..=u64::from(u32::MAX))?,
            max_position_embeddings,
            rms_norm_eps: parse_eps(fields, model_type)?,
            norm: norm_form(model_type),
            norm_places: norm_places(fields, model_type)?,
            head_norms: head_norms(model_type),
            tie_word_embeddings: fields.flag("tie_word_embeddings", ties_by_default(model_type))?,
            hidden_act: parse_activation(fields, model_type)?,
            biases: parse_biases(fields, model_type)?,
            windows: attention::windows(fields, model_type, num_hidden_layers)?,
            attention_scale: attention_scale(fields, model_type, &heads, latent, &rope.global.scaling)?,
            attention_softcap: softcap(fields, model_type, "attn_logit_softcapping", 50.0)?,
            logit_softcap: softcap(fields, model_type, "final_logit_softcapping", 30.0)?,
            clip_qkv: match model_type {
                ModelType::Olmo => fields.optional_positive("clip_qkv")?.map(|clip| clip as f32),
                _ => None,
            },
            rotary_dim: if model_type == ModelType::Gpt2 { 0 } else { rope.rotated },
            rope: rope.global,
            local_rope: rope.local,
            learned_positions: model_type == ModelType::Gpt2,
            embedding_scale: model_type.is_gemma().then_some((heads.hidden_size as f32).sqrt()),
            qkv: match model_type {
                ModelType::Phi3 | ModelType::Gpt2 => QkvForm::Joined,
                ModelType::GptNeox => QkvForm::ByHead,
                _ => QkvForm::Separate,
            },
            mlp: match model_type {
                ModelType::Phi3 => MlpForm::GatedJoined,
                ModelType::Phi | ModelType::Gpt2 | ModelType::GptNeox => MlpForm::Plain,
                _ => MlpForm::Gated,
            },
            sinks: model_type == ModelType::GptOss,
            latent,
            experts,
            head_bias: model_type == ModelType::Phi,
            bare_names: false,
            bos_token_id: fields.token("bos_token_id")?,
            eos_token_ids: fields.tokens("eos_token_id")?,
        })
    }

    /// Takes the token ids that `generation_config.json` gives; they are the ones that generation uses.
    ///
    /// # Errors
    /// [`ConfigError`] where they are no ids.
    pub fn apply_generation_config(&mut self, value: &Value, file: &str) -> Result<(), ConfigError> {
        let fields = Fields::root(file, value)?;
        self.bos_token_id = fields.token("bos_token_id")?.or(self.bos_token_id);
        let eos = fields.tokens("eos_token_id")?;
        if !eos.is_empty() {
            self.eos_token_ids = eos;
        }
        Ok(())
    }

    /// Width of the queries: heads times their width.
    pub fn query_width(&self) -> usize {
        self.num_attention_heads * self.head_dim
    }

    /// Width of the keys, and of the values.
    pub fn key_value_width(&self) -> usize {
        self.num_key_value_heads * self.head_dim
    }

    /// Width of what the output projection reads: the joined heads of the values.
    pub fn attended_width(&self) -> usize {
        self.num_attention_heads * self.latent.map_or(self.head_dim, |latent| latent.value)
    }

    /// Width of what makes the queries of latent attention; 0 elsewhere.
    pub(crate) fn latent_query_width(&self) -> usize {
        self.num_attention_heads * self.latent.map_or(0, |latent| latent.head())
    }

    /// Whether the heads of q and k are normalized before they are rotated.
    pub fn has_head_norms(&self) -> bool {
        self.head_norms != HeadNorms::Absent
    }

    /// Whether the inputs of the output and down projections are normalized.
    pub fn has_sub_norms(&self) -> bool {
        self.model_type == ModelType::Bitnet
    }
}

/// Reads a small JSON file of a model folder; `None` where there is no such file.
///
/// # Errors
/// [`ConfigError`] where it cannot be read, has more than 16 MB or is no JSON.
pub fn read_json(path: &Path) -> Result<Option<Value>, ConfigError> {
    const LIMIT: u64 = 16 << 20;
    let error = |found: String, allowed: &str| ConfigError {
        file: path.display().to_string(),
        field: "the file".into(),
        found,
        allowed: allowed.into(),
    };
    let size = match std::fs::metadata(path) {
        Ok(data) => data.len(),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(error(e.to_string(), "a readable file")),
    };
    if size > LIMIT {
        return Err(error(format!("{size} bytes"), "at most 16 MB"));
    }
    let bytes = std::fs::read(path).map_err(|e| error(e.to_string(), "a readable file"))?;
    serde_json::from_slice(&bytes).map(Some).map_err(|e| error(e.to_string(), "JSON"))
}

fn parse_eps(fields: Fields<'_>, model_type: ModelType) -> Result<f32, ConfigError> {
    // The reference's default where the field is absent, as in many configs of these types.
    let default = match model_type {
        ModelType::Olmo | ModelType::Gpt2 | ModelType::GptNeox | ModelType::Phi => Some(1e-5),
        ModelType::Gemma | ModelType::Gemma2 | ModelType::Gemma3 => Some(1e-6),
        _ => None,
    };
    let eps = match (model_type, default) {
        // Not configurable.
        (ModelType::Olmo, _) => 1e-5,
        (_, Some(default)) => fields.optional_positive("rms_norm_eps")?.unwrap_or(default) as f32,
        (_, None) => fields.positive("rms_norm_eps")? as f32,
    };
    if eps > 0.0 { Ok(eps) } else { Err(fields.error("rms_norm_eps", "a number that is not 0 in float32")) }
}

fn norm_form(model_type: ModelType) -> NormForm {
    match model_type {
        ModelType::Gemma | ModelType::Gemma2 | ModelType::Gemma3 => NormForm::RmsPlusOne,
        ModelType::Phi | ModelType::Gpt2 | ModelType::GptNeox => NormForm::Layer,
        ModelType::Olmo => NormForm::LayerPlain,
        _ => NormForm::Rms,
    }
}

fn norm_places(fields: Fields<'_>, model_type: ModelType) -> Result<NormPlaces, ConfigError> {
    Ok(match model_type {
        ModelType::Gemma2 | ModelType::Gemma3 => NormPlaces::Both,
        ModelType::Olmo2 => NormPlaces::After,
        ModelType::Phi => NormPlaces::ParallelShared,
        ModelType::GptNeox if fields.flag("use_parallel_residual", true)? => NormPlaces::Parallel,
        _ => NormPlaces::Before,
    })
}

fn head_norms(model_type: ModelType) -> HeadNorms {
    match model_type {
        ModelType::Qwen3 | ModelType::Qwen3Moe | ModelType::Gemma3 => HeadNorms::Each,
        ModelType::Olmo2 => HeadNorms::Whole,
        _ => HeadNorms::Absent,
    }
}

fn ties_by_default(model_type: ModelType) -> bool {
    model_type.is_gemma() || model_type == ModelType::Gpt2
}

fn parse_activation(fields: Fields<'_>, model_type: ModelType) -> Result<Activation, ConfigError> {
    let given = match (model_type, fields.text("hidden_act")?) {
        // The first Gemma's configs say gelu and mean this, whichever of the two fields they have.
        (ModelType::Gemma, Some("gelu") | None) => return Ok(Activation::GeluTanh),
        (_, given) => given,
    };
    match given {
        None if model_type == ModelType::Bitnet => Ok(Activation::Relu2),
        None if matches!(model_type, ModelType::GptNeox) => Ok(Activation::Gelu),
        None if matches!(model_type, ModelType::Gpt2 | ModelType::Phi) || model_type.is_gemma() => {
            Ok(Activation::GeluTanh)
        }
        None | Some("silu" | "swish") => Ok(Activation::Silu),
        Some("relu2") => Ok(Activation::Relu2),
        Some("gelu_pytorch_tanh" | "gelu_new") => Ok(Activation::GeluTanh),
        Some("gelu") => Ok(Activation::Gelu),
        Some(_) => Err(fields.error("hidden_act", "silu, relu2, gelu, gelu_pytorch_tanh or gelu_new")),
    }
}

fn parse_biases(fields: Fields<'_>, model_type: ModelType) -> Result<Biases, ConfigError> {
    let attention = fields.flag("attention_bias", false)?;
    let mlp = fields.flag("mlp_bias", false)?;
    let none = Biases::default();
    let both = Biases { qkv: attention, output: attention, ..none };
    Ok(match model_type {
        ModelType::Mistral | ModelType::Mixtral | ModelType::Phi3 => none,
        ModelType::Qwen2 => Biases { qkv: true, ..none },
        ModelType::Qwen2Moe => Biases { qkv: fields.flag("qkv_bias", true)?, ..none },
        ModelType::Llama => Biases { mlp, ..both },
        ModelType::DeepseekV2 => Biases { mlp, ..both },
        ModelType::Gpt2 | ModelType::Phi => Biases { qkv: true, output: true, mlp: true, experts: false },
        ModelType::GptNeox => {
            let attention = fields.flag("attention_bias", true)?;
            Biases { qkv: attention, output: attention, mlp: true, experts: false }
        }
        ModelType::GptOss => {
            let attention = fields.flag("attention_bias", true)?;
            Biases { qkv: attention, output: attention, mlp: false, experts: true }
        }
        _ => both,
    })
}

fn attention_scale(
    fields: Fields<'_>,
    model_type: ModelType,
    heads: &Heads,
    latent: Option<Latent>,
    scaling: &RopeScaling,
) -> Result<f32, ConfigError> {
    let width = match model_type {
        ModelType::Gemma2 | ModelType::Gemma3 => {
            fields.optional_positive("query_pre_attn_scalar")?.unwrap_or(256.0)
        }
        _ => latent.map_or(heads.dim, |latent| latent.head()) as f64,
    };
    // DeepSeek's own reading of YaRN, beside the factor of cosines and sines.
    let mscale = match scaling {
        RopeScaling::Yarn(yarn) if latent.is_some() && yarn.mscale_all_dim != 0.0 => {
            yarn_mscale(yarn.factor, yarn.mscale_all_dim)
        }
        _ => 1.0,
    };
    Ok((width.powf(-0.5) * mscale * mscale) as f32)
}

/// A cap that Gemma 2 has unless it is null, and Gemma 3 where it is given.
fn softcap(
    fields: Fields<'_>,
    model_type: ModelType,
    field: &str,
    default: f64,
) -> Result<Option<f32>, ConfigError> {
    let given = match model_type {
        ModelType::Gemma2 if !fields.has(field) => Some(default),
        ModelType::Gemma2 | ModelType::Gemma3 => fields.optional_positive(field)?,
        _ => None,
    };
    Ok(given.map(|cap| cap as f32))
}

/// A small config of each type, for the tests of this crate.
#[cfg(test)]
pub(crate) fn example(model_type: &str) -> Value {
    let mut config = serde_json::json!({
        "model_type": model_type, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 100,
        "max_position_embeddings": 32, "rms_norm_eps": 1e-5, "tie_word_embeddings": false, "sliding_window": 8
    });
    let more = match model_type {
        "gpt2" => serde_json::json!({"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32}),
        "mixtral" => serde_json::json!({"num_local_experts": 3, "num_experts_per_tok": 2}),
        "qwen2_moe" | "qwen3_moe" => serde_json::json!({
            "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [0],
            "shared_expert_intermediate_size": 40
        }),
        "deepseek_v2" | "deepseek_v3" => serde_json::json!({
            "q_lora_rank": 20, "kv_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 8,
            "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1,
            "moe_intermediate_size": 24
        }),
        "gpt_oss" => serde_json::json!({
            "num_local_experts": 3, "num_experts_per_tok": 2, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}
        }),
        _ => serde_json::json!({}),
    };
    if let (Value::Object(config), Value::Object(more)) = (&mut config, more) {
        config.extend(more);
    }
    config
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests;
