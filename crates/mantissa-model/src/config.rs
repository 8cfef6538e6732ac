//! A model's checked `config.json`: a [`ModelConfig`] can be built and allocated for.
//!
//! Field names and defaults are those of transformers 5.23. Fields that do not change the computation are ignored.

mod attention;
mod by_layer;
#[cfg(test)]
mod examples;
mod experts;
mod indexer;
mod layers;
mod multipliers;
mod rope;
mod scales;

use std::path::Path;

use mantissa_kernels::kernels;
use mantissa_store::json::with_spelled_floats;
use mantissa_store::regular;
use serde_json::Value;

pub use by_layer::{GlobalHeads, HyperStreams, LayerFeatures, LayerHeads, LayerInputs, Streams};
#[cfg(test)]
pub(crate) use examples::{KEY_NORMS, QUERY_BIASES, example};
pub use experts::{Experts, Groups, Routing, SharedExperts};
pub use indexer::Indexer;
pub use mantissa_arch::features::{
    Biases, DenseMlp, HeadNorms, MlpForm, NormForm, NormPlaces, QkvForm, Scores,
};
pub use mantissa_kernels::{Activation, ActivationParameter};
pub use multipliers::Multipliers;

pub use crate::fields::ConfigError;
pub use crate::mixer::{
    ChannelDelta, CompressedAttention, CompressedIndex, Compression, GatedDelta, Mixing, Recurrent,
    ResultNorm, SelectiveScan, ShortConvolution, StateSpace,
};
pub use crate::sizes::{Latent, LimitedSwiglu, QueryGrowth};

use crate::fields::{Fields, MAX_LAYERS, MAX_POSITIONS, MAX_WIDTH};
use crate::mixer::Rules;
use crate::mixer::entries;
use crate::mixer::halves::{Halves, all_attend};
use crate::mixer::rules::Around;
use crate::rope::Rope;
use attention::Heads;
use mantissa_arch::Architecture;
use mantissa_arch::attention::AttentionRules;
use mantissa_arch::rules::{Eps, FeedForward};
use mantissa_arch::wrapper::{TEXT_CONFIG, TextPlace, Wrapper};
use scales::{Scales, softcap};

/// A decoder's architecture. All sizes are at least 1 and multiply without overflow.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Architecture of the model.
    pub architecture: &'static Architecture,
    /// Multimodal model that the text model is part of.
    pub wrapper: Option<&'static Wrapper>,
    /// Place of the text model's tensors in it.
    pub place: Option<TextPlace>,
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
    /// Width of a head, even unless positions are learned. With [`Latent`] attention, the wider of keys and values.
    /// Layers may differ: [`heads`](Self::heads).
    pub head_dim: usize,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Longest context.
    pub max_position_embeddings: usize,
    /// Epsilon of the norms, added to the mean square or to the variance.
    pub rms_norm_eps: f32,
    /// Kind of the norms.
    pub norm: NormForm,
    /// Places of the norms.
    pub norm_places: NormPlaces,
    /// QK norms.
    pub head_norms: HeadNorms,
    /// True if the head is the embedding.
    pub tie_word_embeddings: bool,
    /// True if the configuration says so. The tensors may have a head of its own all the same.
    pub states_tied: bool,
    /// Activation function of the MLP.
    pub hidden_act: Activation,
    /// Linear layers with a bias.
    pub biases: Biases,
    /// Sliding window of each layer: the number of keys that a query attends to, itself included; `None` for all.
    pub windows: Vec<Option<usize>>,
    /// True for layers that rotate queries and keys; the others have no position embedding (NoPE).
    pub rotated_layers: Vec<bool>,
    /// Rotary embedding.
    pub rope: Rope,
    /// Rotary embedding of layers with a window, if it differs (Gemma 3).
    pub local_rope: Option<Rope>,
    /// Width of the rotated part of a head, even; 0 if positions are learned.
    pub rotary_dim: usize,
    /// True if the rotated pairs are adjacent in a head of the projections' outputs. Queries and keys are brought into
    /// the order of halves before QK norms, rotation and cache.
    pub rope_interleaved: bool,
    /// True if a learned vector for each position is added to the embedding.
    pub learned_positions: bool,
    /// Factor of the embedding, divided by [`residual_scale`](Self::residual_scale).
    pub embedding_scale: Option<f32>,
    /// Factor of what attention and MLP add to the residual stream (Granite). No layer multiplies by it: the whole
    /// stream is divided by it instead, which RMSNorm does not see with an epsilon divided by its square.
    /// [`embedding_scale`](Self::embedding_scale) and [`rms_norm_eps`](Self::rms_norm_eps) hold these quotients.
    pub residual_scale: f32,
    /// Factor of the logits, before their cap.
    pub logit_scale: Option<f32>,
    /// Storage of q, k and v.
    pub qkv: QkvForm,
    /// Structure of the MLP.
    pub mlp: MlpForm,
    /// Factor of the attention scores.
    pub attention_scale: f32,
    /// Features that distinguish the layers.
    pub by_layer: LayerFeatures,
    /// Factor of the queries that grows with the position.
    pub query_growth: Option<QueryGrowth>,
    /// Cap of the attention scores, `cap · tanh(score / cap)`.
    pub attention_softcap: Option<f32>,
    /// Cap of the logits.
    pub logit_softcap: Option<f32>,
    /// Clipping threshold of q, k and v.
    pub clip_qkv: Option<f32>,
    /// Latent attention.
    pub latent: Option<Latent>,
    /// Indexer that chooses the tokens that a query attends to.
    pub indexer: Option<Indexer>,
    /// Features of attention that few architectures have.
    pub attention: AttentionRules,
    /// Factors of attention, mixer and MLP.
    pub multipliers: Option<Multipliers>,
    /// Recurrent mixer of layers.
    pub recurrent: Option<Recurrent>,
    /// Token mixing of each layer: its first half.
    pub mixing: Vec<Mixing>,
    /// True for layers with an MLP or experts: a second half.
    pub has_mlp: Vec<bool>,
    /// Mixture of experts.
    pub experts: Option<Experts>,
    /// True if the head has a bias.
    pub head_bias: bool,
    /// True if names are those of the publisher where transformers writes others, which no config records: a GPT-2
    /// checkpoint lacks the prefix `transformer.`, one of DeepSeek-V4 `model.`.
    pub bare_names: bool,
    /// Token that begins a document.
    pub bos_token_id: Option<u32>,
    /// Tokens that end a document.
    pub eos_token_ids: Vec<u32>,
}

/// Returns the ids of `first` and those of `second` that it lacks.
fn union(mut first: Vec<u32>, second: Vec<u32>) -> Vec<u32> {
    let more: Vec<u32> = second.into_iter().filter(|id| !first.contains(id)).collect();
    first.extend(more);
    first
}

impl ModelConfig {
    /// Parses and checks the contents of `config.json`. `file` is the name that errors give.
    ///
    /// # Errors
    /// [`ConfigError`] for the first field that is missing, of the wrong type, out of range, inconsistent or
    /// not supported.
    pub fn from_json(value: &Value, file: &str) -> Result<Self, ConfigError> {
        let root = Fields::root(file, value)?;
        let Described { fields, architecture, wrapper } = describe(root)?;
        let fields = fields.named(architecture.aliases);
        check_flags(fields, architecture)?;
        let rules = mixer_rules(fields, architecture)?;
        let num_hidden_layers = match rules.as_ref().and_then(|rules| rules.layers) {
            Some(layers) => layers(fields)?,
            None => fields.size("num_hidden_layers", 1..=MAX_LAYERS)?,
        };
        let max_position_embeddings = fields.size("max_position_embeddings", 1..=MAX_POSITIONS)?;
        let latent = Latent::parse(fields, architecture)?;
        let heads = Heads::parse(fields, architecture, latent)?;
        let rotated = latent.map_or(heads.dim, |latent| latent.rotated);
        let experts = match &architecture.experts {
            Some(rules) if experts::present(fields, rules)? => {
                experts::parse(fields, rules, num_hidden_layers, heads.hidden_size)?
            }
            _ => None,
        };
        // Multimodal models of this kind are published with fused experts.
        let form = wrapper.and_then(|wrapper| wrapper.fused);
        let experts = experts.map(|experts| Experts { fused: form.or(experts.fused), ..experts });
        let caps = architecture.softcaps;
        let windows = attention::windows(fields, architecture, num_hidden_layers)?;
        let by_layer = LayerFeatures::parse(fields, architecture, &heads, &windows)?;
        let rotated = match architecture.rope.compressed_theta {
            Some(_) => entries::rotated(fields, heads.dim)?,
            None => rotated,
        };
        let widths = [rotated, by_layer.global_heads.map_or(rotated, |global| global.head_dim)];
        let rope = rope::parse(fields, &architecture.rope, max_position_embeddings, widths)?;
        let scales = Scales::parse(fields, architecture, heads.hidden_size)?;
        let eps = parse_eps(fields, architecture.eps)?;
        let multipliers = architecture.multipliers.then(|| Multipliers::parse(fields)).transpose()?;
        let around = Around { hidden: heads.hidden_size, heads: heads.query, head_dim: heads.dim, eps };
        let tied = parse_tied(root, fields, architecture, wrapper)?;
        let recurrent = rules.as_ref().map(|rules| (rules.mixer)(fields, &around)).transpose()?;
        let Halves { mixing, has_mlp } = match rules {
            Some(rules) => (rules.halves)(fields, num_hidden_layers)?,
            None => all_attend(num_hidden_layers),
        };
        Ok(ModelConfig {
            architecture,
            wrapper,
            place: wrapper.and_then(|wrapper| wrapper.places.first().copied()),
            hidden_size: heads.hidden_size,
            intermediate_size: parse_ffn(fields, architecture, heads.hidden_size)?,
            num_hidden_layers,
            num_attention_heads: heads.query,
            num_key_value_heads: heads.key_value,
            head_dim: heads.dim,
            vocab_size: fields.size("vocab_size", 1..=u64::from(u32::MAX))?,
            max_position_embeddings,
            rms_norm_eps: scales.eps(fields, eps)?,
            norm: parse_norm(fields, architecture),
            norm_places: parse_norm_places(fields, architecture)?,
            head_norms: parse_head_norms(fields, architecture)?,
            tie_word_embeddings: tied,
            states_tied: tied,
            hidden_act: parse_activation(fields, architecture)?,
            biases: parse_biases(fields, architecture)?,
            attention_scale: scales.scores(fields, architecture, &heads, latent, &rope.global.scaling)?
                * multipliers.map_or(1.0, |multipliers| multipliers.scores),
            by_layer,
            query_growth: QueryGrowth::parse(fields, architecture)?,
            attention_softcap: softcap(fields, "attn_logit_softcapping", caps.map(|caps| caps.attention))?,
            logit_softcap: softcap(fields, "final_logit_softcapping", caps.map(|caps| caps.logits))?,
            // Absent or null where values are not clipped.
            clip_qkv: softcap(fields, "clip_qkv", architecture.attention.clips_qkv.then_some(None))?,
            rotary_dim: if architecture.learned_positions { 0 } else { rope.rotated },
            rotated_layers: attention::rotated_layers(fields, architecture, &windows, experts.as_ref())?,
            windows,
            rope: rope.global,
            local_rope: rope.local,
            learned_positions: architecture.learned_positions,
            rope_interleaved: architecture.rope.interleaved,
            embedding_scale: scales.embedding,
            residual_scale: scales.residual,
            logit_scale: scales.logits,
            qkv: architecture.qkv,
            mlp: architecture.mlp,
            latent,
            indexer: Indexer::parse(fields, architecture, latent, num_hidden_layers)?,
            attention: architecture.attention,
            multipliers,
            recurrent,
            mixing,
            has_mlp,
            experts,
            head_bias: architecture.head_bias,
            bare_names: false,
            bos_token_id: fields.token("bos_token_id")?.or(root.token("bos_token_id")?),
            eos_token_ids: union(fields.tokens("eos_token_id")?, root.tokens("eos_token_id")?),
        })
    }

    /// Class in `architectures` of config.json: that of the multimodal model if it is one.
    pub fn class(&self) -> &'static str {
        self.wrapper.map_or(self.architecture.class, |wrapper| wrapper.class)
    }

    /// Returns the same model with the names and the fused experts of the checkpoint of `other`, a model of the same
    /// architecture.
    #[must_use]
    pub fn named_as(&self, other: &Self) -> Self {
        let ModelConfig { wrapper, place, bare_names, .. } = *other;
        let mut named = ModelConfig { wrapper, place, bare_names, ..self.clone() };
        if let (Some(ours), Some(theirs)) = (named.experts.as_mut(), other.experts.as_ref()) {
            ours.fused = theirs.fused;
        }
        named
    }

    /// Takes the token that begins a text from `generation_config.json`, which generation uses first.
    ///
    /// # Errors
    /// [`ConfigError`] for a value that is no token id.
    pub fn apply_generation_config(&mut self, value: &Value, file: &str) -> Result<(), ConfigError> {
        self.bos_token_id = Fields::root(file, value)?.token("bos_token_id")?.or(self.bos_token_id);
        Ok(())
    }

    /// Returns the end tokens that `generation_config.json` or `config.json` states, in the text model's part too.
    ///
    /// # Errors
    /// [`ConfigError`] for values that are not token ids.
    pub fn end_tokens(value: &Value, file: &str) -> Result<Vec<u32>, ConfigError> {
        let own = Fields::root(file, value)?.tokens("eos_token_id")?;
        match value.get(TEXT_CONFIG).filter(|text| text.is_object()) {
            Some(text) => Ok(union(own, Fields::root(file, text)?.tokens("eos_token_id")?)),
            None => Ok(own),
        }
    }

    /// Turns the head's outputs into logits: multiplies them by [`logit_scale`](Self::logit_scale) and caps them.
    pub fn finish_logits(&self, logits: &mut [f32]) {
        if let Some(scale) = self.logit_scale {
            logits.iter_mut().for_each(|x| *x *= scale);
        }
        if let Some(cap) = self.logit_softcap {
            kernels().softcap(logits, 1.0, cap);
        }
    }

    /// Width of the queries: heads times their width; of the widest layer.
    pub fn query_width(&self) -> usize {
        let global = self.by_layer.global_heads.map_or(0, |global| global.head_dim);
        self.num_attention_heads * self.head_dim.max(global)
    }

    /// Width of the keys, and of the values; of the widest layer.
    pub fn key_value_width(&self) -> usize {
        let global = self.by_layer.global_heads;
        let global = global.map_or(0, |global| global.num_key_value_heads * global.head_dim);
        global.max(self.num_key_value_heads * self.head_dim)
    }

    /// Width of the input of the output projection: the joined heads of the values. Layers may differ:
    /// [`heads`](Self::heads).
    pub fn attended_width(&self) -> usize {
        self.num_attention_heads * self.latent.map_or(self.head_dim, |latent| latent.value)
    }

    /// Width of the queries of latent attention before padding; 0 without latent attention.
    pub(crate) fn latent_query_width(&self) -> usize {
        self.num_attention_heads * self.latent.map_or(0, |latent| latent.head())
    }

    /// True if the model has QK norms.
    pub fn has_head_norms(&self) -> bool {
        self.head_norms.present()
    }

    /// True if the inputs of the output and down projections are normed.
    pub fn has_sub_norms(&self) -> bool {
        self.architecture.sub_norms
    }
}

/// Finds the rules of an architecture's mixer.
fn mixer_rules(fields: Fields<'_>, architecture: &Architecture) -> Result<Option<Rules>, ConfigError> {
    let Some(name) = architecture.recurrent else { return Ok(None) };
    let rules = Rules::find(name);
    Ok(Some(rules.ok_or_else(|| fields.error("model_type", "an architecture with a known mixer"))?))
}

/// Reads a small JSON file of a model folder; `None` if there is no such file.
///
/// # Errors
/// [`ConfigError`] if it cannot be read, is larger than 16 MB or not JSON.
pub fn read_json(path: &Path) -> Result<Option<Value>, ConfigError> {
    const LIMIT: u64 = 16 << 20;
    let read = regular::read_optional(path, LIMIT, "a JSON file");
    let Some(bytes) = read.map_err(|error| ConfigError::unreadable(path, &error))? else { return Ok(None) };
    let parsed = serde_json::from_slice(&with_spelled_floats(&bytes));
    parsed.map(Some).map_err(|error| ConfigError {
        file: path.display().to_string(),
        field: "the file".into(),
        found: error.to_string(),
        allowed: "JSON".into(),
    })
}

fn parse_head_norms(fields: Fields<'_>, architecture: &Architecture) -> Result<HeadNorms, ConfigError> {
    Ok(match fields.resolve(architecture.norms_heads)? {
        true => architecture.head_norms,
        false => HeadNorms::Absent,
    })
}

/// Text model that a config describes.
struct Described<'a> {
    fields: Fields<'a>,
    architecture: &'static Architecture,
    wrapper: Option<&'static Wrapper>,
}

fn describe(root: Fields<'_>) -> Result<Described<'_>, ConfigError> {
    let name = root.text("model_type")?;
    if let Some(wrapper) = name.and_then(Wrapper::find) {
        // Old configs have the text model's fields outside.
        let fields = root.object(TEXT_CONFIG)?.unwrap_or(root);
        let text = fields.text("model_type")?;
        let Some(architecture) = wrapper.text_model(text) else {
            let allowed = wrapper.nearest_text_model(text.unwrap_or_default());
            return Err(fields.error("model_type", allowed));
        };
        let fields = fields.or_defaults(wrapper.defaults);
        return Ok(Described { fields, architecture, wrapper: Some(wrapper) });
    }
    let known = name.and_then(Architecture::find);
    let architecture =
        known.ok_or_else(|| root.error("model_type", Architecture::nearest(name.unwrap_or("llama"))))?;
    Ok(Described { fields: root.or_defaults(architecture.defaults), architecture, wrapper: None })
}

/// True if the head is the embedding. In a multimodal model either config may say so.
fn parse_tied(
    root: Fields<'_>,
    fields: Fields<'_>,
    architecture: &Architecture,
    wrapper: Option<&Wrapper>,
) -> Result<bool, ConfigError> {
    let Some(wrapper) = wrapper else { return fields.flag("tie_word_embeddings", architecture.tied) };
    let inner = fields.flag("tie_word_embeddings", false)?;
    Ok(root.flag("tie_word_embeddings", wrapper.tied || inner)? || inner)
}

/// Refuses values of flags that are not supported.
fn check_flags(fields: Fields<'_>, architecture: &Architecture) -> Result<(), ConfigError> {
    for &(flag, fixed) in architecture.fixed_flags {
        if fields.flag(flag, fixed)? != fixed {
            return Err(fields.error(flag, format!("{fixed} in {}", architecture.name)));
        }
    }
    for &(field, allowed) in architecture.only {
        match fields.text(field)? {
            Some(name) if !allowed.contains(&name) => return Err(fields.error(field, allowed.join(" or "))),
            _ => {}
        }
    }
    for &(field, fixed) in architecture.fixed_counts {
        fields.size(field, fixed..=fixed)?;
    }
    Ok(())
}

fn parse_norm_places(fields: Fields<'_>, architecture: &Architecture) -> Result<NormPlaces, ConfigError> {
    Ok(match fields.resolve(architecture.parallel)? {
        true => NormPlaces::Parallel,
        false => architecture.norm_places,
    })
}

fn parse_ffn(fields: Fields<'_>, architecture: &Architecture, hidden: usize) -> Result<usize, ConfigError> {
    let stated = || fields.size(architecture.ffn, 1..=MAX_WIDTH);
    match architecture.feed_forward {
        FeedForward::Multiple(times) if fields.get(architecture.ffn).is_none() => Ok(times * hidden),
        FeedForward::Listed if fields.get(architecture.ffn).is_some_and(Value::is_array) => {
            let listed = fields.tokens(architecture.ffn)?;
            let one =
                listed.first().filter(|first| **first > 0 && listed.iter().all(|width| width == *first));
            let allowed = "an integer, or a list of the same integer for every layer";
            one.map(|one| *one as usize).ok_or_else(|| fields.error(architecture.ffn, allowed))
        }
        FeedForward::Or(other) if fields.get(architecture.ffn).is_none() => fields.size(other, 1..=MAX_WIDTH),
        FeedForward::Stated | FeedForward::Multiple(_) | FeedForward::Or(_) | FeedForward::Listed => stated(),
        // The older field takes precedence.
        FeedForward::Adjusted => {
            let width = fields.optional_size("block_ff_dim", 1..=MAX_WIDTH)?.map_or_else(stated, Ok)?;
            if !fields.flag("block_auto_adjust_ff_dim", true)? {
                return Ok(width);
            }
            let factor = fields.optional_positive("block_ffn_dim_multiplier")?.unwrap_or(1.0);
            let multiple = fields.optional_size("block_multiple_of", 1..=MAX_WIDTH)?.unwrap_or(256);
            let adjusted = ((2 * width / 3) as f64 * factor) as usize;
            let adjusted = adjusted.max(1).next_multiple_of(multiple);
            match adjusted as u64 <= MAX_WIDTH {
                true => Ok(adjusted),
                false => Err(fields.error("block_ffn_dim_multiplier", "a factor of a smaller width")),
            }
        }
    }
}

/// Kind of the norms.
fn parse_norm(fields: Fields<'_>, architecture: &Architecture) -> NormForm {
    match architecture.eps {
        Eps::OrLayer(_) if fields.get("rms_norm_eps").is_some() => NormForm::Rms,
        _ => architecture.norm,
    }
}

fn parse_eps(fields: Fields<'_>, rule: Eps) -> Result<f32, ConfigError> {
    let eps = match rule {
        Eps::Fixed(eps) => eps as f32,
        // The reference's default, for the many configs of these architectures without the field.
        Eps::Default(default) => fields.optional_positive("rms_norm_eps")?.unwrap_or(default) as f32,
        Eps::Required => fields.positive("rms_norm_eps")? as f32,
        Eps::OrLayer(default) => {
            let field = if fields.get("rms_norm_eps").is_some() { "rms_norm_eps" } else { "layer_norm_eps" };
            fields.optional_positive(field)?.unwrap_or(default) as f32
        }
    };
    if eps > 0.0 { Ok(eps) } else { Err(fields.error("rms_norm_eps", "a number that is not 0 in float32")) }
}

fn parse_activation(fields: Fields<'_>, architecture: &Architecture) -> Result<Activation, ConfigError> {
    let own = Activation::parse(architecture.activation);
    let stated = match fields.text("hidden_act")? {
        None => own,
        Some("gelu") if architecture.gelu_is_tanh => Some(Activation::GeluTanh),
        // Its parameters have names in some architectures alone.
        Some(name) => {
            Activation::parse(name).filter(|found| found.parameters().is_empty() || own == Some(*found))
        }
    };
    stated.ok_or_else(|| fields.error("hidden_act", "silu, relu2, gelu, gelu_pytorch_tanh or gelu_new"))
}

fn parse_biases(fields: Fields<'_>, architecture: &Architecture) -> Result<Biases, ConfigError> {
    let rules = &architecture.biases;
    Ok(Biases {
        qkv: fields.resolve(rules.qkv)?,
        output: fields.resolve(rules.output)?,
        mlp: fields.resolve(rules.mlp)?,
        experts: rules.experts,
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests;
