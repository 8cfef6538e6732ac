//! Mixtures of experts: how many there are, in which layers, and how tokens are routed to them.

use super::fields::{ConfigError, Fields};
use super::{MAX_WIDTH, ModelType};

/// Most experts of a layer.
const MAX_EXPERTS: u64 = 4096;

/// The experts of a model (Shazeer et al. 2017, "Outrageously Large Neural Networks", sec. 2).
#[derive(Clone, Debug, PartialEq)]
pub struct Experts {
    /// How many there are.
    pub count: u16,
    /// How many a token goes through.
    pub per_token: usize,
    /// Inner width of one.
    pub width: usize,
    /// Which layers have them; the others have an ordinary MLP.
    pub layers: Vec<bool>,
    /// How tokens are routed.
    pub routing: Routing,
    /// What every token goes through beside them.
    pub shared: Option<SharedExperts>,
    /// Limits inside the activation (gpt-oss).
    pub limited: Option<LimitedSwiglu>,
}

/// Experts that every token goes through, as one MLP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedExperts {
    /// Inner width of all.
    pub width: usize,
    /// Whether their result is weighted by the sigmoid of a projection to one number.
    pub gated: bool,
}

/// `(up + 1) · gate · sigmoid(alpha · gate)` with `gate` at most `limit` and `up` within `±limit`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LimitedSwiglu {
    /// Factor in the sigmoid.
    pub alpha: f32,
    /// Limit of both.
    pub limit: f32,
}

/// From a router's logits to experts and weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Routing {
    /// What becomes of the logits.
    pub scores: Scores,
    /// Whether the weights of a token are made to add up to 1.
    pub normalize: bool,
    /// Factor of all weights.
    pub scale: f32,
    /// Choice among the best groups only (DeepSeek-V2, sec. 2.2.2).
    pub groups: Option<Groups>,
    /// Whether a vector is added to the scores to choose by, and not to weigh by (DeepSeek-V3, eq. 16).
    pub correction: bool,
    /// Whether the router has a bias.
    pub bias: bool,
}

/// What becomes of a router's logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scores {
    /// Softmax over all experts.
    Softmax,
    /// Sigmoid of each.
    Sigmoid,
    /// Softmax over those chosen.
    SoftmaxOfChosen,
}

/// Groups of neighbouring experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Groups {
    /// How many there are.
    pub count: usize,
    /// How many a token may choose from.
    pub chosen: usize,
    /// Whether a group is as good as its best two experts together, or as its best.
    pub best_two: bool,
}

/// The experts of a model that has any.
pub(super) fn parse(
    fields: Fields<'_>,
    model_type: ModelType,
    layers: usize,
) -> Result<Option<Experts>, ConfigError> {
    let (count, width) = match model_type {
        ModelType::Mixtral | ModelType::GptOss => ("num_local_experts", "intermediate_size"),
        // transformers 5 writes the second name.
        ModelType::Qwen2Moe | ModelType::Qwen3Moe if fields.get("num_experts").is_none() => {
            ("num_local_experts", "moe_intermediate_size")
        }
        ModelType::Qwen2Moe | ModelType::Qwen3Moe => ("num_experts", "moe_intermediate_size"),
        ModelType::DeepseekV2 | ModelType::DeepseekV3 => ("n_routed_experts", "moe_intermediate_size"),
        _ => return Ok(None),
    };
    let field = count;
    let count = fields.size(field, 1..=MAX_EXPERTS)?;
    let width = fields.size(width, 1..=MAX_WIDTH)?;
    let per_token = fields.size("num_experts_per_tok", 1..=count as u64)?;
    let routing = routing(fields, model_type, count, per_token)?;
    let shared = shared(fields, model_type, width)?;
    let limited = match model_type {
        ModelType::GptOss => Some(LimitedSwiglu {
            alpha: fields.optional_positive("swiglu_alpha")?.unwrap_or(1.702) as f32,
            limit: fields.optional_positive("swiglu_limit")?.unwrap_or(7.0) as f32,
        }),
        _ => None,
    };
    let layers = expert_layers(fields, model_type, layers)?;
    // `count` is at most MAX_EXPERTS.
    let count = u16::try_from(count).map_err(|_| fields.error(field, "fewer experts"))?;
    Ok(Some(Experts { count, per_token, width, layers, routing, shared, limited }))
}

fn expert_layers(fields: Fields<'_>, model_type: ModelType, layers: usize) -> Result<Vec<bool>, ConfigError> {
    match model_type {
        ModelType::Qwen2Moe | ModelType::Qwen3Moe => {
            let step = fields.optional_size("decoder_sparse_step", 1..=u64::from(u32::MAX))?.unwrap_or(1);
            let dense = fields.tokens("mlp_only_layers")?;
            let is_dense = |layer: usize| dense.iter().any(|&dense| dense as usize == layer);
            Ok((0..layers).map(|layer| (layer + 1).is_multiple_of(step) && !is_dense(layer)).collect())
        }
        ModelType::DeepseekV2 | ModelType::DeepseekV3 => {
            if fields.optional_size("moe_layer_freq", 0..=u64::from(u32::MAX))?.is_some_and(|n| n != 1) {
                return Err(fields.error("moe_layer_freq", "1"));
            }
            let default = if model_type == ModelType::DeepseekV3 { 3 } else { 0 };
            let first = fields.optional_size("first_k_dense_replace", 0..=u64::from(u32::MAX))?;
            Ok((0..layers).map(|layer| layer >= first.unwrap_or(default)).collect())
        }
        _ => Ok(vec![true; layers]),
    }
}

fn shared(
    fields: Fields<'_>,
    model_type: ModelType,
    width: usize,
) -> Result<Option<SharedExperts>, ConfigError> {
    if model_type == ModelType::Qwen2Moe {
        let width = fields.size("shared_expert_intermediate_size", 1..=MAX_WIDTH)?;
        return Ok(Some(SharedExperts { width, gated: true }));
    }
    if !model_type.is_deepseek() {
        return Ok(None);
    }
    // The reference makes an MLP of width 0 of none; a checkpoint has no such tensors.
    let count = fields.optional_size("n_shared_experts", 0..=1024)?.unwrap_or(0);
    let total = count * width;
    if total as u64 > MAX_WIDTH {
        return Err(fields.error("n_shared_experts", format!("at most {MAX_WIDTH} / moe_intermediate_size")));
    }
    Ok((count > 0).then_some(SharedExperts { width: total, gated: false }))
}

fn routing(
    fields: Fields<'_>,
    model_type: ModelType,
    count: usize,
    per_token: usize,
) -> Result<Routing, ConfigError> {
    let plain = Routing {
        scores: Scores::Softmax,
        normalize: true,
        scale: 1.0,
        groups: None,
        correction: false,
        bias: false,
    };
    match model_type {
        ModelType::Qwen2Moe | ModelType::Qwen3Moe => {
            Ok(Routing { normalize: fields.flag("norm_topk_prob", false)?, ..plain })
        }
        ModelType::GptOss => {
            Ok(Routing { scores: Scores::SoftmaxOfChosen, normalize: false, bias: true, ..plain })
        }
        ModelType::DeepseekV2 => {
            only(fields, "scoring_func", &["softmax"])?;
            only(fields, "topk_method", &["greedy", "group_limited_greedy"])?;
            let limited = fields.text("topk_method")? == Some("group_limited_greedy");
            let groups = if limited { groups(fields, count, per_token, false)? } else { None };
            Ok(Routing { normalize: false, scale: scale(fields, 1.0)?, groups, ..plain })
        }
        ModelType::DeepseekV3 => {
            only(fields, "scoring_func", &["sigmoid"])?;
            only(fields, "topk_method", &["noaux_tc"])?;
            let groups = groups(fields, count, per_token, true)?;
            let normalize = fields.flag("norm_topk_prob", true)?;
            let (scores, scale) = (Scores::Sigmoid, scale(fields, 2.5)?);
            Ok(Routing { scores, normalize, scale, groups, correction: true, ..plain })
        }
        _ => Ok(plain),
    }
}

fn scale(fields: Fields<'_>, default: f64) -> Result<f32, ConfigError> {
    Ok(fields.optional_number("routed_scaling_factor")?.unwrap_or(default) as f32)
}

fn only(fields: Fields<'_>, field: &str, allowed: &[&str]) -> Result<(), ConfigError> {
    match fields.text(field)? {
        Some(name) if !allowed.contains(&name) => Err(fields.error(field, allowed.join(" or "))),
        _ => Ok(()),
    }
}

fn groups(
    fields: Fields<'_>,
    experts: usize,
    per_token: usize,
    best_two: bool,
) -> Result<Option<Groups>, ConfigError> {
    let count = fields.optional_size("n_group", 1..=experts as u64)?.unwrap_or(1);
    let chosen = fields.optional_size("topk_group", 1..=count as u64)?.unwrap_or(1);
    let each = experts / count;
    if !experts.is_multiple_of(count) || (best_two && each < 2) {
        return Err(
            fields.error("n_group", format!("a divisor of the number of experts, which is {experts}"))
        );
    }
    if chosen * each < per_token {
        let allowed = format!("groups of {each} with at least num_experts_per_tok, {per_token}, experts");
        return Err(fields.error("topk_group", allowed));
    }
    Ok((chosen < count).then_some(Groups { count, chosen, best_two }))
}
