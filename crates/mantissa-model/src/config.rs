//! A model's `config.json`, checked: what is in a [`ModelConfig`] can be built and allocated for.
//!
//! Field names and defaults are those of transformers 5.23. Fields that do not change the computation are
//! ignored.

mod fields;
mod rope;

use std::path::Path;

use serde_json::Value;

pub use fields::ConfigError;
use fields::Fields;

use crate::rope::Rope;

/// Widest layer that is accepted; keeps every product of two sizes far from overflow.
const MAX_WIDTH: u64 = 1 << 24;
const MAX_LAYERS: u64 = 10_000;
const MAX_POSITIONS: u64 = 1 << 31;

/// The architectures that are known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ModelType {
    /// Llama 1, 2 and 3.
    Llama,
    /// Mistral: a sliding window on every layer, unless it is null.
    Mistral,
    /// Qwen2 and Qwen2.5: biases on q, k and v.
    Qwen2,
    /// Qwen3: norms on the heads of q and k.
    Qwen3,
    /// BitNet b1.58: norms before the output and the down projection.
    Bitnet,
}

impl ModelType {
    /// Every type with its name in `config.json`.
    pub const NAMES: [(ModelType, &'static str); 5] = [
        (ModelType::Llama, "llama"),
        (ModelType::Mistral, "mistral"),
        (ModelType::Qwen2, "qwen2"),
        (ModelType::Qwen3, "qwen3"),
        (ModelType::Bitnet, "bitnet"),
    ];

    fn parse(fields: Fields<'_>) -> Result<Self, ConfigError> {
        let name = fields.text("model_type")?;
        let known = Self::NAMES.into_iter().find(|(_, known)| Some(*known) == name);
        known
            .map(|(model_type, _)| model_type)
            .ok_or_else(|| fields.error("model_type", Self::NAMES.map(|(_, name)| name).join(", ")))
    }

    fn default_theta(self) -> f64 {
        if self == ModelType::Bitnet { 500_000.0 } else { 10_000.0 }
    }
}

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
    /// Width of a head, even.
    pub head_dim: usize,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Longest context.
    pub max_position_embeddings: usize,
    /// Added to the mean square in every norm.
    pub rms_norm_eps: f32,
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
        let num_hidden_layers = fields.size("num_hidden_layers", 1..=MAX_LAYERS)?;
        let max_position_embeddings = fields.size("max_position_embeddings", 1..=MAX_POSITIONS)?;
        let heads = Heads::parse(fields, model_type)?;
        Ok(ModelConfig {
            model_type,
            hidden_size: heads.hidden_size,
            intermediate_size: fields.size("intermediate_size", 1..=MAX_WIDTH)?,
            num_hidden_layers,
            num_attention_heads: heads.query,
            num_key_value_heads: heads.key_value,
            head_dim: heads.dim,
            vocab_size: fields.size("vocab_size", 1..=u64::from(u32::MAX))?,
            max_position_embeddings,
            rms_norm_eps: parse_eps(fields)?,
            tie_word_embeddings: fields.flag("tie_word_embeddings", false)?,
            hidden_act: parse_activation(fields, model_type)?,
            biases: parse_biases(fields, model_type)?,
            windows: parse_windows(fields, model_type, num_hidden_layers)?,
            rope: rope::parse(fields, model_type.default_theta(), max_position_embeddings, heads.dim)?,
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

    /// Whether the heads of q and k are normalized before they are rotated.
    pub fn has_head_norms(&self) -> bool {
        self.model_type == ModelType::Qwen3
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

/// The sizes that depend on one another.
struct Heads {
    hidden_size: usize,
    query: usize,
    key_value: usize,
    dim: usize,
}

impl Heads {
    fn parse(fields: Fields<'_>, model_type: ModelType) -> Result<Self, ConfigError> {
        let hidden_size = fields.size("hidden_size", 1..=MAX_WIDTH)?;
        let query = fields.size("num_attention_heads", 1..=MAX_WIDTH)?;
        let key_value = fields.optional_size("num_key_value_heads", 1..=MAX_WIDTH)?.unwrap_or(query);
        if !query.is_multiple_of(key_value) {
            let allowed = format!("a divisor of num_attention_heads, which is {query}");
            return Err(fields.error("num_key_value_heads", allowed));
        }
        let dim = match fields.optional_size("head_dim", 1..=MAX_WIDTH)? {
            Some(dim) => dim,
            None if model_type == ModelType::Qwen3 && !fields.has("head_dim") => 128,
            None if hidden_size.is_multiple_of(query) => hidden_size / query,
            None => {
                let allowed =
                    format!("a divisor of hidden_size, which is {hidden_size}, where head_dim is absent");
                return Err(fields.error("num_attention_heads", allowed));
            }
        };
        let heads = Heads { hidden_size, query, key_value, dim };
        heads.check(fields, model_type).map(|()| heads)
    }

    fn check(&self, fields: Fields<'_>, model_type: ModelType) -> Result<(), ConfigError> {
        let found = self.dim.to_string();
        if !self.dim.is_multiple_of(2) {
            return Err(fields.error_found(
                "head_dim",
                found,
                "an even number: rotary embedding turns pairs",
            ));
        }
        let width = self.query * self.dim;
        if width as u64 > MAX_WIDTH {
            let allowed = format!("at most {MAX_WIDTH} times num_attention_heads, which is {}", self.query);
            return Err(fields.error_found("head_dim", found, allowed));
        }
        // transformers gives the norm over the joined heads the width of the residual stream.
        if model_type == ModelType::Bitnet && width != self.hidden_size {
            let allowed = format!("hidden_size / num_attention_heads, {} / {}", self.hidden_size, self.query);
            return Err(fields.error_found("head_dim", found, allowed));
        }
        Ok(())
    }
}

fn parse_eps(fields: Fields<'_>) -> Result<f32, ConfigError> {
    let eps = fields.positive("rms_norm_eps")? as f32;
    if eps > 0.0 { Ok(eps) } else { Err(fields.error("rms_norm_eps", "a number that is not 0 in float32")) }
}

fn parse_activation(fields: Fields<'_>, model_type: ModelType) -> Result<Activation, ConfigError> {
    match fields.text("hidden_act")? {
        None if model_type == ModelType::Bitnet => Ok(Activation::Relu2),
        None | Some("silu" | "swish") => Ok(Activation::Silu),
        Some("relu2") => Ok(Activation::Relu2),
        Some("gelu_pytorch_tanh" | "gelu_new") => Ok(Activation::GeluTanh),
        Some(_) => Err(fields.error("hidden_act", "silu, relu2, gelu_pytorch_tanh or gelu_new")),
    }
}

fn parse_biases(fields: Fields<'_>, model_type: ModelType) -> Result<Biases, ConfigError> {
    let attention = fields.flag("attention_bias", false)?;
    let mlp = fields.flag("mlp_bias", false)?;
    Ok(match model_type {
        ModelType::Mistral => Biases::default(),
        ModelType::Qwen2 => Biases { qkv: true, output: false, mlp: false },
        ModelType::Llama => Biases { qkv: attention, output: attention, mlp },
        ModelType::Qwen3 | ModelType::Bitnet => Biases { qkv: attention, output: attention, mlp: false },
    })
}

fn parse_windows(
    fields: Fields<'_>,
    model_type: ModelType,
    layers: usize,
) -> Result<Vec<Option<usize>>, ConfigError> {
    // The reference's default where the field is absent; null means no window.
    const DEFAULT_WINDOW: usize = 4096;
    let window = match fields.optional_size("sliding_window", 1..=MAX_POSITIONS)? {
        None if !fields.has("sliding_window") => Some(DEFAULT_WINDOW),
        window => window,
    };
    match model_type {
        ModelType::Llama | ModelType::Bitnet => Ok(vec![None; layers]),
        ModelType::Mistral => Ok(vec![window; layers]),
        ModelType::Qwen2 | ModelType::Qwen3 => {
            let used = fields.flag("use_sliding_window", false)?;
            qwen_windows(fields, window.filter(|_| used), layers)
        }
    }
}

/// Windows by `layer_types`, or else on the layers from `max_window_layers` on.
fn qwen_windows(
    fields: Fields<'_>,
    window: Option<usize>,
    layers: usize,
) -> Result<Vec<Option<usize>>, ConfigError> {
    let Some(value) = fields.get("layer_types") else {
        let first = fields.optional_size("max_window_layers", 0..=u64::from(u32::MAX))?.unwrap_or(28);
        return Ok((0..layers).map(|layer| window.filter(|_| layer >= first)).collect());
    };
    let wrong = || fields.error("layer_types", format!("{layers} of full_attention or sliding_attention"));
    let types = value.as_array().filter(|types| types.len() == layers).ok_or_else(wrong)?;
    let of =
        |layer_type: &Value| match layer_type.as_str() {
            Some("full_attention") => Ok(None),
            Some("sliding_attention") if window.is_none() => Err(fields
                .error("layer_types", "no sliding_attention without use_sliding_window and sliding_window")),
            Some("sliding_attention") => Ok(window),
            _ => Err(wrong()),
        };
    types.iter().map(of).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests;
