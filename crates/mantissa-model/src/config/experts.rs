//! Mixtures of experts: their number, their layers, and the routing of tokens.

use mantissa_store::convention::StackForm;
use serde_json::Value;

use crate::fields::{ConfigError, Fields, MAX_LAYERS, MAX_WIDTH};
use crate::mixer::halves::{Block, blocks};
use crate::sizes::LimitedSwiglu;
use mantissa_arch::features::{DenseMlp, Scores};
use mantissa_arch::rules::{ExpertLayers, ExpertRules, GroupRules, SharedRules};

/// Largest number of experts of a layer.
const MAX_EXPERTS: u64 = 4096;

/// Experts of a model (Shazeer et al. 2017, "Outrageously Large Neural Networks", sec. 2).
#[derive(Clone, Debug, PartialEq)]
pub struct Experts {
    /// Number of experts.
    pub count: u16,
    /// Experts per token.
    pub per_token: usize,
    /// Inner width of an expert.
    pub width: usize,
    /// True for layers with experts; the others have a dense MLP.
    pub layers: Vec<bool>,
    /// Routing of tokens.
    pub routing: Routing,
    /// Experts that every token passes through.
    pub shared: Option<SharedExperts>,
    /// Clamped SwiGLU (gpt-oss).
    pub limited: Option<LimitedSwiglu>,
    /// True if experts, shared ones too, have a gate; false if they are `down(act(up(x)))`.
    pub gated: bool,
    /// Width of the latent that routed experts read and write; `None` if they read the states (Nemotron 3 Super).
    pub latent: Option<usize>,
    /// Dense MLP beside the experts.
    pub dense: DenseMlp,
    /// True if a token is multiplied by an expert's weight before it enters it, not after (Llama 4).
    pub scales_input: bool,
    /// True for layers whose experts are chosen by the token, in a table (Roller et al. 2021, "Hash Layers for Large
    /// Sparse Models"); the router's scores weight them.
    pub hashed: Vec<bool>,
    /// Form of the tensors that hold all experts of a layer; `None` if the checkpoint has one tensor for each.
    pub fused: Option<StackForm>,
    /// Factor of the load-balancing loss in training (`router_aux_loss_coef`), if the config has it.
    pub balance_loss: Option<f32>,
}

/// Experts that every token passes through, as one MLP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedExperts {
    /// Inner width of all.
    pub width: usize,
    /// True if their result is weighted by the sigmoid of a projection to one number.
    pub gated: bool,
    /// True if the results of routed and shared experts are averaged, not added (Command A+).
    pub averaged: bool,
}

/// Choice and weights of a token's experts, from the router's logits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Routing {
    /// Scores made of the logits.
    pub scores: Scores,
    /// True if a token's weights are normalized to add up to 1.
    pub normalize: bool,
    /// Factor of all weights.
    pub scale: f32,
    /// Choice among the best groups only (DeepSeek-V2, sec. 2.2.2).
    pub groups: Option<Groups>,
    /// True if a correction is added to the scores for the choice, not for the weights (DeepSeek-V3, eq. 16).
    pub correction: bool,
    /// True if the router has a bias.
    pub bias: bool,
}

/// Groups of consecutive experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Groups {
    /// Number of groups.
    pub count: usize,
    /// Groups that a token may choose from.
    pub chosen: usize,
    /// True if a group is ranked by its best two experts together, else by its best one.
    pub best_two: bool,
}

/// True if the model may have experts: one alone is a dense MLP where layers with experts are periodic, and a model made
/// of blocks may have none of experts.
pub(super) fn present(fields: Fields<'_>, rules: &ExpertRules) -> Result<bool, ConfigError> {
    match rules.layers {
        ExpertLayers::Period => Ok(fields.optional_size(rules.count, 1..=MAX_EXPERTS)? != Some(1)),
        ExpertLayers::Blocks => Ok(blocks(fields)?.contains(&Block::Experts)),
        _ if rules.optional => Ok(fields.size(rules.count, 0..=MAX_EXPERTS)? > 0),
        _ => Ok(true),
    }
}

/// Parses the experts of a model with `layers` layers and states of width `hidden`.
pub(super) fn parse(
    fields: Fields<'_>,
    rules: &ExpertRules,
    layers: usize,
    hidden: usize,
) -> Result<Option<Experts>, ConfigError> {
    if let Some(flag) = rules.enabled
        && !fields.flag(flag, false)?
    {
        return Ok(None);
    }
    let field = match rules.count_alias {
        Some(alias) if fields.get(rules.count).is_none() => alias,
        _ => rules.count,
    };
    let count = fields.size(field, 1..=MAX_EXPERTS)?;
    let width = fields.size(rules.width, 1..=MAX_WIDTH)?;
    let per_token = fields.size("num_experts_per_tok", 1..=count as u64)?;
    let routing = routing(fields, rules, count, per_token)?;
    let shared = shared(fields, rules, width)?;
    // The latent takes the place of states in buffers.
    let latent = match rules.latent {
        Some(field) => fields.optional_size(field, 1..=hidden as u64)?,
        None => None,
    };
    let positive = |field, default| Ok(fields.optional_positive(field)?.unwrap_or(default) as f32);
    let limited = match rules.swiglu {
        Some([alpha, limit, offset]) => Some(LimitedSwiglu {
            alpha: positive("swiglu_alpha", alpha)?,
            limit: positive("swiglu_limit", limit)?,
            offset: offset as f32,
        }),
        None => None,
    };
    let hashed = hashed(fields, rules, layers)?;
    let layers = expert_layers(fields, rules.layers, layers)?;
    // `count` is at most MAX_EXPERTS.
    let count = u16::try_from(count).map_err(|_| fields.error(field, "fewer experts"))?;
    let balance_loss = fields.optional_number("router_aux_loss_coef")?.map(|factor| factor as f32);
    let fused = rules.published_fused.then_some(rules.fused);
    let ExpertRules { gated, dense, scales_input, .. } = *rules;
    Ok(Some(Experts {
        count,
        per_token,
        width,
        layers,
        routing,
        shared,
        limited,
        gated,
        latent,
        dense,
        scales_input,
        hashed,
        fused,
        balance_loss,
    }))
}

/// Parses which layers choose experts by the token: by `mlp_layer_types`, or else the first `num_hash_layers`.
fn hashed(fields: Fields<'_>, rules: &ExpertRules, layers: usize) -> Result<Vec<bool>, ConfigError> {
    let Some(default) = rules.hashed else { return Ok(vec![false; layers]) };
    let Some(value) = fields.get("mlp_layer_types") else {
        let first = fields.optional_size("num_hash_layers", 0..=MAX_LAYERS)?.unwrap_or(default);
        return Ok((0..layers).map(|layer| layer < first).collect());
    };
    let by_token = |value: &Value| match value.as_str() {
        Some("hash_moe") => Some(true),
        Some("moe") => Some(false),
        _ => None,
    };
    let listed = value.as_array().filter(|list| list.len() == layers);
    let flags = listed.and_then(|list| list.iter().map(by_token).collect());
    flags.ok_or_else(|| fields.error("mlp_layer_types", format!("{layers} of hash_moe or moe")))
}

fn expert_layers(fields: Fields<'_>, rule: ExpertLayers, layers: usize) -> Result<Vec<bool>, ConfigError> {
    match rule {
        ExpertLayers::All => Ok(vec![true; layers]),
        ExpertLayers::Sparse => {
            let step = fields.optional_size("decoder_sparse_step", 1..=u64::from(u32::MAX))?.unwrap_or(1);
            let dense = fields.tokens("mlp_only_layers")?;
            let is_dense = |layer: usize| dense.iter().any(|&dense| dense as usize == layer);
            Ok((0..layers).map(|layer| (layer + 1).is_multiple_of(step) && !is_dense(layer)).collect())
        }
        ExpertLayers::Interleaved => {
            if fields.get("moe_layers").is_some() {
                let listed = fields.tokens("moe_layers")?;
                return Ok((0..layers).map(|layer| listed.iter().any(|&l| l as usize == layer)).collect());
            }
            let limits = 1..=u64::from(u32::MAX);
            let step = fields.optional_size("interleave_moe_layer_step", limits)?.unwrap_or(1);
            Ok((0..layers).map(|layer| (layer + 1).is_multiple_of(step)).collect())
        }
        ExpertLayers::Range => {
            let limits = 0..=u64::from(u32::MAX);
            let step = fields.optional_size("moe_layer_interval", 1..=u64::from(u32::MAX))?.unwrap_or(1);
            let first = fields.optional_size("moe_layer_start_index", limits.clone())?.unwrap_or(1);
            let last = match fields.optional_number("moe_layer_end_index")? {
                None | Some(-1.0) => layers,
                Some(_) => fields.size("moe_layer_end_index", limits)?,
            };
            let has = |layer: usize| (layer + 1).is_multiple_of(step) && (first..=last).contains(&layer);
            Ok((0..layers).map(has).collect())
        }
        ExpertLayers::Listed(default) => match fields.get("mlp_layer_types") {
            None => expert_layers(fields, ExpertLayers::From(default), layers),
            Some(value) => {
                let sparse = |value: &Value| match value.as_str() {
                    Some("sparse") => Some(true),
                    Some("dense") => Some(false),
                    _ => None,
                };
                let listed = value.as_array().filter(|list| list.len() == layers);
                let flags = listed.and_then(|list| list.iter().map(sparse).collect());
                flags.ok_or_else(|| fields.error("mlp_layer_types", format!("{layers} of dense or sparse")))
            }
        },
        ExpertLayers::Blocks => Ok(blocks(fields)?.iter().map(|block| *block == Block::Experts).collect()),
        ExpertLayers::Period => {
            let limits = 1..=u64::from(u32::MAX);
            let period = fields.optional_size("expert_layer_period", limits)?.unwrap_or(2);
            let offset = fields.optional_size("expert_layer_offset", 0..=period as u64 - 1)?.unwrap_or(1);
            Ok((0..layers).map(|layer| layer % period == offset).collect())
        }
        ExpertLayers::From(default) => {
            if fields.optional_size("moe_layer_freq", 0..=u64::from(u32::MAX))?.is_some_and(|n| n != 1) {
                return Err(fields.error("moe_layer_freq", "1"));
            }
            let first = fields.optional_size("first_k_dense_replace", 0..=u64::from(u32::MAX))?;
            Ok((0..layers).map(|layer| layer >= first.unwrap_or(default)).collect())
        }
    }
}

fn shared(
    fields: Fields<'_>,
    rules: &ExpertRules,
    width: usize,
) -> Result<Option<SharedExperts>, ConfigError> {
    let averaged = match rules.mean {
        Some((field, name)) => fields.text(field)?.is_none_or(|stated| stated == name),
        None => false,
    };
    let plain = |width| Ok(Some(SharedExperts { width, gated: false, averaged }));
    match rules.shared {
        SharedRules::None => Ok(None),
        SharedRules::One => plain(width),
        SharedRules::Gated => {
            let width = fields.size("shared_expert_intermediate_size", 1..=MAX_WIDTH)?;
            Ok(Some(SharedExperts { width, gated: true, averaged }))
        }
        SharedRules::Stated { width, count } => {
            fields.optional_size(count, 1..=1)?;
            plain(fields.size(width, 1..=MAX_WIDTH)?)
        }
        SharedRules::Counted(field) => {
            // For 0 the reference makes an MLP of width 0; a checkpoint has no such tensors.
            let count = fields.optional_size(field, 0..=1024)?.unwrap_or(0);
            let total = count * width;
            if total as u64 > MAX_WIDTH {
                let allowed = format!("at most {MAX_WIDTH} / moe_intermediate_size");
                return Err(fields.error(field, allowed));
            }
            if count == 0 { Ok(None) } else { plain(total) }
        }
    }
}

fn routing(
    fields: Fields<'_>,
    rules: &ExpertRules,
    count: usize,
    per_token: usize,
) -> Result<Routing, ConfigError> {
    for &(field, allowed) in rules.only {
        match fields.text(field)? {
            Some(name) if !allowed.contains(&name) => return Err(fields.error(field, allowed.join(" or "))),
            _ => {}
        }
    }
    let groups = match rules.groups {
        Some(GroupRules { when: Some((field, value)), .. }) if fields.text(field)? != Some(value) => None,
        Some(GroupRules { best_two, .. }) => groups(fields, count, per_token, best_two)?,
        None => None,
    };
    let normalize = fields.resolve(rules.normalize)?;
    let scale = match rules.scale {
        Some(default) => fields.optional_number("routed_scaling_factor")?.unwrap_or(default) as f32,
        None => 1.0,
    };
    let ExpertRules { correction, bias, .. } = *rules;
    let scores = scores(fields, rules)?;
    let normalize = normalize && scores != Scores::SoftmaxOfChosen;
    Ok(Routing { scores, normalize, scale, groups, correction, bias })
}

/// Scores of the router: those that a field names, or those of the row.
fn scores(fields: Fields<'_>, rules: &ExpertRules) -> Result<Scores, ConfigError> {
    let Some((field, names)) = rules.scores_by else { return Ok(rules.scores) };
    let Some(stated) = fields.text(field)? else { return Ok(rules.scores) };
    let found = names.iter().find(|(name, _)| *name == stated).map(|(_, scores)| *scores);
    found.ok_or_else(|| {
        fields.error(field, names.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(" or "))
    })
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
