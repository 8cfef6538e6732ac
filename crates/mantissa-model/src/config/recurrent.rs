//! Recurrent mixers of a configuration, and the halves of each layer.

use serde_json::Value;

use super::attention::Heads;
use super::compressed;
use super::fields::{ConfigError, Fields, MAX_LAYERS, MAX_WIDTH};
use crate::architecture::Architecture;
use crate::architecture::rules::RecurrentRules;
use crate::mixer::{
    ChannelDelta, GatedDelta, Mixing, Recurrent, ResultNorm, SelectiveScan, ShortConvolution, StateSpace,
};

/// Longest convolution, in tokens.
const MAX_KERNEL: u64 = 256;

/// Constant factors of attention, mixer and MLP (Falcon-H1, from its maximal update parametrization).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Multipliers {
    /// Factor of the attention scores, which [`attention_scale`](super::ModelConfig::attention_scale) includes.
    pub scores: f32,
    /// Factor of the joined heads.
    pub attended: f32,
    /// Factor of the mixer's result.
    pub mixed: f32,
    /// Factor of the MLP's gate before its activation.
    pub gate: f32,
    /// Factor of the MLP's inner activation.
    pub inner: f32,
}

impl Multipliers {
    /// Parses the factors. Those of inputs apply to the results: no projection has a bias.
    pub(super) fn parse(fields: Fields<'_>) -> Result<Self, ConfigError> {
        let factor = |field| Ok(fields.optional_number(field)?.unwrap_or(1.0) as f32);
        let input = factor("attention_in_multiplier")?;
        let [gate, inner] = list(fields, "mlp_multipliers")?;
        Ok(Multipliers {
            scores: input * input * factor("key_multiplier")?,
            attended: input * factor("attention_out_multiplier")?,
            mixed: factor("ssm_out_multiplier")?,
            gate,
            inner,
        })
    }
}

/// Parses a list of factors; 1 without the field.
fn list<const N: usize>(fields: Fields<'_>, field: &str) -> Result<[f32; N], ConfigError> {
    let Some(value) = fields.get(field) else { return Ok([1.0; N]) };
    let numbers = value.as_array().and_then(|list| {
        let numbers: Option<Vec<f32>> = list.iter().map(|x| x.as_f64().map(|x| x as f32)).collect();
        numbers?.try_into().ok()
    });
    numbers.ok_or_else(|| fields.error(field, format!("{N} numbers")))
}

/// Mixer of a model, and the halves of each of its layers.
pub(super) struct Mixers {
    pub(super) recurrent: Option<Recurrent>,
    pub(super) mixing: Vec<Mixing>,
    pub(super) has_mlp: Vec<bool>,
}

/// Parses the number of layers: `num_hidden_layers`, or the length of the list of blocks.
pub(super) fn layers(fields: Fields<'_>, architecture: &Architecture) -> Result<usize, ConfigError> {
    match architecture.recurrent {
        Some(RecurrentRules::StateSpace { blocks: true }) => Ok(blocks(fields)?.len()),
        _ => fields.size("num_hidden_layers", 1..=MAX_LAYERS),
    }
}

/// Parses the mixer, and the halves of each of `layers` layers.
pub(super) fn parse(
    fields: Fields<'_>,
    architecture: &Architecture,
    layers: usize,
    heads: &Heads,
    eps: f32,
) -> Result<Mixers, ConfigError> {
    let hidden = heads.hidden_size;
    let (recurrent, mixing) = match architecture.recurrent {
        None => (None, vec![Mixing::Attention; layers]),
        Some(RecurrentRules::GatedDelta { joined }) => {
            let mixer = gated_delta(fields, hidden, eps, joined)?;
            let mixing = by_layer_type(fields, "linear_attention", layers, || {
                let limits = 1..=u64::from(u32::MAX);
                let interval = fields.optional_size("full_attention_interval", limits)?.unwrap_or(4);
                Ok((1..=layers).map(|layer| !layer.is_multiple_of(interval)).collect())
            })?;
            (Some(Recurrent::GatedDelta(mixer)), mixing)
        }
        Some(RecurrentRules::ChannelDelta) => {
            let nested = fields.object("linear_attn_config")?;
            let mixer = Recurrent::ChannelDelta(channel_delta(fields, nested, hidden, eps)?);
            let mixing = by_layer_type(fields, "linear_attention", layers, || match nested {
                Some(nested) => {
                    let recurrent = nested.tokens("kda_layers")?;
                    Ok((1..=layers).map(|layer| recurrent.iter().any(|at| *at as usize == layer)).collect())
                }
                None => Ok((0..layers).map(|layer| layer == 0 || !layer.is_multiple_of(4)).collect()),
            })?;
            (Some(mixer), mixing)
        }
        Some(RecurrentRules::ShortConvolution) => {
            let kernel = fields.optional_size("conv_L_cache", 1..=MAX_KERNEL)?.unwrap_or(3);
            let mixer = ShortConvolution { hidden, kernel, bias: fields.flag("conv_bias", false)? };
            let mixing = by_layer_type(fields, "conv", layers, || {
                let Some(_) = fields.get("full_attn_idxs") else { return Ok(vec![false; layers]) };
                let attend = fields.tokens("full_attn_idxs")?;
                Ok((0..layers).map(|layer| !attend.iter().any(|at| *at as usize == layer)).collect())
            })?;
            (Some(Recurrent::ShortConvolution(mixer)), mixing)
        }
        Some(RecurrentRules::SelectiveScan) => {
            let limits = 1..=u64::from(u32::MAX);
            let period = fields.optional_size("attn_layer_period", limits)?.unwrap_or(8);
            let offset = fields.optional_size("attn_layer_offset", 0..=period as u64 - 1)?.unwrap_or(4);
            let of = |layer| if layer % period == offset { Mixing::Attention } else { Mixing::Recurrent };
            let mixer = selective_scan(fields, hidden, eps)?;
            (Some(Recurrent::SelectiveScan(mixer)), (0..layers).map(of).collect())
        }
        Some(RecurrentRules::Compressed) => {
            let mixer = compressed::mixer(fields, hidden, heads.query, heads.dim, eps)?;
            (Some(Recurrent::CompressedAttention(mixer)), vec![Mixing::Recurrent; layers])
        }
        Some(RecurrentRules::Parallel) => {
            (Some(Recurrent::StateSpace(parallel(fields, hidden, eps)?)), vec![Mixing::Both; layers])
        }
        Some(RecurrentRules::StateSpace { blocks }) => {
            let mixer = Recurrent::StateSpace(state_space(fields, hidden, eps, blocks)?);
            if blocks {
                let mixing: Vec<_> = self::blocks(fields)?.into_iter().map(Block::mixing).collect();
                let has_mlp = mixing.iter().map(|mixing| *mixing == Mixing::None).collect();
                return Ok(Mixers { recurrent: Some(mixer), mixing, has_mlp });
            }
            (Some(mixer), by_layer_type(fields, "linear_attention", layers, || Ok(vec![true; layers]))?)
        }
    };
    Ok(Mixers { recurrent, has_mlp: vec![true; mixing.len()], mixing })
}

fn gated_delta(fields: Fields<'_>, hidden: usize, eps: f32, joined: bool) -> Result<GatedDelta, ConfigError> {
    let size = |field, default| Ok(fields.optional_size(field, 1..=MAX_WIDTH)?.unwrap_or(default));
    let mixer = GatedDelta {
        hidden,
        key_heads: size("linear_num_key_heads", 16)?,
        value_heads: size("linear_num_value_heads", 32)?,
        key_dim: size("linear_key_head_dim", 128)?,
        value_dim: size("linear_value_head_dim", 128)?,
        kernel: fields.optional_size("linear_conv_kernel_dim", 1..=MAX_KERNEL)?.unwrap_or(4),
        eps,
        joined,
    };
    if !mixer.value_heads.is_multiple_of(mixer.key_heads) {
        let allowed = format!("a multiple of linear_num_key_heads, which is {}", mixer.key_heads);
        return Err(fields.error("linear_num_value_heads", allowed));
    }
    check_width(fields, "linear_key_head_dim", mixer.key_heads, mixer.key_dim)?;
    check_width(fields, "linear_value_head_dim", mixer.value_heads, mixer.value_dim)?;
    check_width(fields, "linear_value_head_dim", mixer.key_dim, mixer.value_dim)?;
    // The convolution has the activation of the MLP, the gate of the result always SiLU.
    silu(fields, "hidden_act")?;
    Ok(mixer)
}

/// Kimi delta attention, by the fields of transformers or by `nested`, those of the published checkpoints.
fn channel_delta(
    fields: Fields<'_>,
    nested: Option<Fields<'_>>,
    hidden: usize,
    eps: f32,
) -> Result<ChannelDelta, ConfigError> {
    let size = |own: &str, inner: &str, most, default| match nested {
        Some(nested) => Ok(nested.optional_size(inner, 1..=most)?.unwrap_or(default)),
        None => Ok(fields.optional_size(own, 1..=most)?.unwrap_or(default)),
    };
    let mixer = ChannelDelta {
        hidden,
        heads: size("linear_num_heads", "num_heads", MAX_WIDTH, 32)?,
        head_dim: size("linear_head_dim", "head_dim", MAX_WIDTH, 128)?,
        kernel: size("linear_conv_kernel_dim", "short_conv_kernel_size", MAX_KERNEL, 4)?,
        eps,
    };
    check_width(fields, "linear_num_heads", mixer.head_dim, mixer.heads)?;
    check_width(fields, "linear_head_dim", mixer.head_dim, mixer.head_dim)?;
    silu(fields, "hidden_act")?;
    Ok(mixer)
}

fn selective_scan(fields: Fields<'_>, hidden: usize, eps: f32) -> Result<SelectiveScan, ConfigError> {
    let rank = match fields.get("mamba_dt_rank") {
        Some(Value::String(text)) if text == "auto" => None,
        _ => fields.optional_size("mamba_dt_rank", 1..=MAX_WIDTH)?,
    };
    let mixer = SelectiveScan {
        hidden,
        inner: fields.optional_size("mamba_expand", 1..=64)?.unwrap_or(2) * hidden,
        state: fields.optional_size("mamba_d_state", 1..=MAX_WIDTH)?.unwrap_or(16),
        rank: rank.unwrap_or(hidden.div_ceil(16)),
        kernel: fields.optional_size("mamba_d_conv", 1..=MAX_KERNEL)?.unwrap_or(4),
        convolution_bias: fields.flag("mamba_conv_bias", true)?,
        bias: fields.flag("mamba_proj_bias", false)?,
        eps,
    };
    check_width(fields, "mamba_d_state", mixer.inner, mixer.state)?;
    check_width(fields, "mamba_expand", 1, mixer.inner)?;
    silu(fields, "hidden_act")?;
    Ok(mixer)
}

fn state_space(fields: Fields<'_>, hidden: usize, eps: f32, blocks: bool) -> Result<StateSpace, ConfigError> {
    let size = |field, default| Ok(fields.optional_size(field, 1..=MAX_WIDTH)?.unwrap_or(default));
    let heads = size("mamba_n_heads", 128)?;
    let (groups, state) = if blocks { (8, 128) } else { (1, 256) };
    let head_dim = match fields.get("mamba_d_head") {
        Some(Value::String(text)) if text == "auto" => None,
        _ => fields.optional_size("mamba_d_head", 1..=MAX_WIDTH)?.or(blocks.then_some(64)),
    };
    // Without blocks, the width follows from that of the model.
    let expanded = fields.optional_size("mamba_expand", 1..=64)?.unwrap_or(2) * hidden;
    let inner = fields.optional_size("mamba_d_ssm", 1..=MAX_WIDTH)?.unwrap_or(expanded);
    let head_dim = head_dim.unwrap_or(inner / heads);
    if head_dim == 0 || (!blocks && heads.saturating_mul(head_dim) != inner) {
        let allowed = format!("{inner} (mamba_d_ssm, or mamba_expand times hidden_size) / {heads} heads");
        return Err(fields.error("mamba_d_head", allowed));
    }
    let steps = match blocks {
        true => (fields.optional_number("time_step_min")?.unwrap_or(0.001) as f32, f32::INFINITY),
        false => step_limits(fields)?,
    };
    let mixer = StateSpace {
        hidden,
        heads,
        head_dim,
        groups: size("mamba_n_groups", groups)?,
        state: size("mamba_d_state", state)?,
        kernel: fields.optional_size("mamba_d_conv", 1..=MAX_KERNEL)?.unwrap_or(4),
        convolution_bias: fields.flag("mamba_conv_bias", true)?,
        bias: fields.flag("mamba_proj_bias", false)?,
        factors: None,
        norm: ResultNorm::AfterGate,
        steps,
        eps,
    };
    if !mixer.heads.is_multiple_of(mixer.groups) {
        return Err(fields.error("mamba_n_groups", format!("a divisor of the {heads} heads")));
    }
    check_width(fields, "mamba_d_head", mixer.heads, mixer.head_dim)?;
    check_width(fields, "mamba_d_state", mixer.groups.max(mixer.head_dim), mixer.state)?;
    // The convolution has the activation of the MLP, or one of its own.
    silu(fields, if blocks { "mamba_hidden_act" } else { "hidden_act" })?;
    Ok(mixer)
}

/// Mamba-2 of Falcon-H1: an optional norm, and factors of the projected values.
fn parallel(fields: Fields<'_>, hidden: usize, eps: f32) -> Result<StateSpace, ConfigError> {
    let mixer = state_space(fields, hidden, eps, false)?;
    let norm = match (fields.flag("mamba_rms_norm", false)?, fields.flag("mamba_norm_before_gate", true)?) {
        (false, _) => ResultNorm::None,
        (true, true) => ResultNorm::BeforeGate,
        (true, false) => ResultNorm::AfterGate,
    };
    let input = fields.optional_number("ssm_in_multiplier")?.unwrap_or(1.0) as f32;
    let factors = Some(list(fields, "ssm_multipliers")?.map(|factor: f32| factor * input));
    Ok(StateSpace { factors, norm, ..mixer })
}

/// Parses `time_step_limit`: two numbers, the second of which may be infinite.
fn step_limits(fields: Fields<'_>) -> Result<(f32, f32), ConfigError> {
    let Some(value) = fields.get("time_step_limit") else { return Ok((0.0, f32::INFINITY)) };
    // Infinity is no number in JSON; transformers writes it as an object or a string.
    let limit = |value: &Value| match value {
        Value::Object(object) => object.get("__float__").and_then(Value::as_str)?.parse::<f32>().ok(),
        Value::String(text) => text.parse::<f32>().ok(),
        value => value.as_f64().map(|limit| limit as f32),
    };
    match value.as_array().map(Vec::as_slice) {
        Some([low, high]) => match (limit(low), limit(high)) {
            (Some(low), Some(high)) if low <= high => Ok((low, high)),
            _ => Err(fields.error("time_step_limit", "two numbers, the smaller first")),
        },
        _ => Err(fields.error("time_step_limit", "two numbers, the smaller first")),
    }
}

/// Refuses products of sizes that make a layer too wide.
fn check_width(fields: Fields<'_>, field: &str, count: usize, width: usize) -> Result<(), ConfigError> {
    match count as u64 * width as u64 <= MAX_WIDTH / 8 {
        true => Ok(()),
        false => Err(fields.error(field, format!("at most {} / {count}", MAX_WIDTH / 8))),
    }
}

/// Refuses other activations than SiLU.
fn silu(fields: Fields<'_>, field: &str) -> Result<(), ConfigError> {
    match fields.text(field)? {
        None | Some("silu" | "swish") => Ok(()),
        Some(_) => Err(fields.error(field, "silu in a model with recurrent layers")),
    }
}

/// Mixing by `layer_types`, in which `recurrent` or its older name names the layers of the mixer, or else by
/// `default`: true for them.
fn by_layer_type(
    fields: Fields<'_>,
    recurrent: &str,
    layers: usize,
    default: impl Fn() -> Result<Vec<bool>, ConfigError>,
) -> Result<Vec<Mixing>, ConfigError> {
    let of = |recurs: bool| if recurs { Mixing::Recurrent } else { Mixing::Attention };
    let Some(value) = fields.get("layer_types") else {
        return Ok(default()?.into_iter().map(of).collect());
    };
    let wrong = || fields.error("layer_types", format!("{layers} of full_attention or {recurrent}"));
    let types = value.as_array().filter(|types| types.len() == layers).ok_or_else(wrong)?;
    let parse = |layer_type: &Value| match layer_type.as_str() {
        Some("full_attention" | "attention") => Ok(Mixing::Attention),
        Some(name) if name == recurrent => Ok(Mixing::Recurrent),
        Some("mamba") if recurrent == "linear_attention" => Ok(Mixing::Recurrent),
        _ => Err(wrong()),
    };
    types.iter().map(parse).collect()
}

/// Kind of a layer in a model made of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Block {
    Recurrent,
    Attention,
    Mlp,
    Experts,
}

impl Block {
    fn mixing(self) -> Mixing {
        match self {
            Block::Recurrent => Mixing::Recurrent,
            Block::Attention => Mixing::Attention,
            Block::Mlp | Block::Experts => Mixing::None,
        }
    }
}

/// Parses the layers of a model made of blocks, by `layers_block_type` or `layer_types`, or else by
/// `hybrid_override_pattern` (`M` a mixer, `*` attention, `-` an MLP, `E` experts).
pub(super) fn blocks(fields: Fields<'_>) -> Result<Vec<Block>, ConfigError> {
    for field in ["layers_block_type", "layer_types"] {
        let Some(value) = fields.get(field) else { continue };
        let wrong = || fields.error(field, "a list of linear_attention, full_attention, mlp and moe");
        let parse = |block: &Value| match block.as_str() {
            Some("linear_attention" | "mamba") => Ok(Block::Recurrent),
            Some("full_attention" | "attention") => Ok(Block::Attention),
            Some("mlp") => Ok(Block::Mlp),
            Some("moe") => Ok(Block::Experts),
            _ => Err(wrong()),
        };
        let types = value.as_array().filter(|types| !types.is_empty() && types.len() as u64 <= MAX_LAYERS);
        return types.ok_or_else(wrong)?.iter().map(parse).collect();
    }
    let layers = fields.size("num_hidden_layers", 1..=MAX_LAYERS)?;
    let field = "hybrid_override_pattern";
    let wrong = || fields.error(field, format!("{layers} of M, *, - and E"));
    let parse = |block: char| match block {
        'M' => Ok(Block::Recurrent),
        '*' => Ok(Block::Attention),
        '-' => Ok(Block::Mlp),
        'E' => Ok(Block::Experts),
        _ => Err(wrong()),
    };
    let pattern = fields.text(field)?.filter(|text| text.chars().count() == layers).ok_or_else(wrong)?;
    pattern.chars().map(parse).collect()
}
