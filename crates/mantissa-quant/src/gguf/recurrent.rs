//! Recurrent mixers in GGUF: their keys, and what llama.cpp does not compute of them.
//!
//! Keys and limits are those of llama.cpp's loaders and graphs (`src/models/`, one file for each architecture, and
//! `mamba-base.cpp`).

use mantissa_model::ModelConfig;
use mantissa_model::config::{Mixing, Multipliers, Recurrent};
use mantissa_model::mixer::ResultNorm;
use mantissa_store::convention::gguf::{Architecture, Recurrence, Unrotated};
use mantissa_store::gguf::{Value, ValueType};

use super::architecture::Keys;
use super::limits::Limits;
use crate::error::Result;

/// Least time step of Nemotron-H that llama.cpp, which has no limit, is close enough to.
const LEAST_STEP: f32 = 0.001;

/// Epsilon of the norms of queries and keys in gated DeltaNet.
const DELTA_EPS: f32 = 1e-6;

/// Lists the keys of the mixers and of the layers that have them.
pub(super) fn put_recurrence(keys: &mut Keys, row: &Architecture, config: &ModelConfig) {
    let Some(recurrent) = &config.recurrent else { return };
    match recurrent {
        Recurrent::GatedDelta(mixer) => {
            keys.put_number("ssm.conv_kernel", mixer.kernel);
            keys.put_number("ssm.state_size", mixer.key_dim);
            keys.put_number("ssm.group_count", mixer.key_heads);
            keys.put_number("ssm.time_step_rank", mixer.value_heads);
            keys.put_number("ssm.inner_size", mixer.value_heads * mixer.value_dim);
            put_delta_layers(keys, config);
        }
        Recurrent::ChannelDelta(mixer) => {
            keys.put_number("ssm.conv_kernel", mixer.kernel);
            keys.put_number("kda.head_dim", mixer.head_dim);
        }
        Recurrent::ShortConvolution(mixer) => keys.put_number("shortconv.l_cache", mixer.kernel),
        Recurrent::SelectiveScan(mixer) => {
            keys.put_number("ssm.conv_kernel", mixer.kernel);
            keys.put_number("ssm.state_size", mixer.state);
            keys.put_number("ssm.inner_size", mixer.inner);
            keys.put_number("ssm.time_step_rank", mixer.rank);
        }
        Recurrent::StateSpace(mixer) => {
            keys.put_number("ssm.conv_kernel", mixer.kernel);
            keys.put_number("ssm.state_size", mixer.state);
            keys.put_number("ssm.group_count", mixer.groups);
            keys.put_number("ssm.inner_size", mixer.heads * mixer.head_dim);
            keys.put_number("ssm.time_step_rank", mixer.heads);
        }
        _ => {}
    }
    if !matches!(
        row.recurrence,
        Recurrence::GatedDelta { .. } | Recurrence::Parallel | Recurrence::Compressed
    ) {
        // llama.cpp counts one head of keys and values in latent attention.
        let own = if config.latent.is_some() { 1 } else { config.num_key_value_heads };
        let heads = |mixing: &Mixing| if mixing.attends() { own } else { 0 };
        keys.put_numbers("attention.head_count_kv", config.mixing.iter().map(heads));
    }
    if row.recurrence == (Recurrence::StateSpace { blocks: true }) {
        let mlp = config.experts.as_ref().map_or(config.intermediate_size, |experts| experts.width);
        let width = |has: &bool| if *has { mlp } else { 0 };
        keys.put_numbers("feed_forward_length", config.has_mlp.iter().map(width));
    }
    if row.both_epsilons {
        keys.put("attention.layer_norm_epsilon", Value::F32(config.rms_norm_eps));
    }
    if row.unrotated == Unrotated::Switched {
        let rotated = config.rotated_layers.first().copied().unwrap_or(true);
        keys.put("rope.scaling.finetuned", Value::Bool(rotated));
    }
    if row.sections {
        // Coordinates of positions are equal in text; a third of the pairs each, as in the published models.
        let pairs = config.rotary_dim / 2;
        let sections = [pairs.div_ceil(3), (pairs + 1) / 3, pairs / 3, 0];
        let numbers = sections.map(|n| Value::I32(i32::try_from(n).unwrap_or(i32::MAX)));
        keys.put("rope.dimension_sections", Value::Array(ValueType::I32, numbers.to_vec()));
    }
}

/// Puts the period of the layers with attention, or a flag for each layer if there is none.
fn put_delta_layers(keys: &mut Keys, config: &ModelConfig) {
    let recurs = |layer: usize| config.mixing[layer - 1].recurs();
    let layers = config.num_hidden_layers;
    let fits = |interval: &usize| (1..=layers).all(|layer| recurs(layer) != layer.is_multiple_of(*interval));
    match (1..=layers + 1).find(fits) {
        Some(interval) => keys.put_number("full_attention_interval", interval),
        None => {
            let flags = (1..=layers).map(|layer| Value::Bool(recurs(layer)));
            keys.put("attention.recurrent_layers", Value::Array(ValueType::Bool, flags.collect()));
        }
    }
}

/// Lists what llama.cpp computes differently from the mixers.
pub(super) fn notes(config: &ModelConfig) -> Vec<String> {
    match &config.recurrent {
        Some(Recurrent::StateSpace(mixer)) if mixer.steps.0 > 0.0 => {
            vec![format!("time_step_min: llama.cpp has no least step, the model {}", mixer.steps.0)]
        }
        Some(Recurrent::ChannelDelta(_)) if config.rms_norm_eps != DELTA_EPS => {
            let eps = config.rms_norm_eps;
            vec![format!(
                "rms_norm_eps: llama.cpp has {eps} for q and k of mixers too, the model {DELTA_EPS}"
            )]
        }
        _ => Vec::new(),
    }
}

impl Limits<'_> {
    /// Checks the mixers, and that factors are multiplied into the weights.
    pub(super) fn check_recurrence(&self) -> Result<()> {
        let none = Multipliers { scores: 1.0, attended: 1.0, mixed: 1.0, gate: 1.0, inner: 1.0 };
        if self.config.multipliers.is_some_and(|multipliers| multipliers != none) {
            let allowed =
                "1: llama.cpp has none; fix: `quantize --format gguf` alone multiplies them into the weights";
            return self.refuse("mlp_multipliers and others", "other numbers", allowed);
        }
        let (config, hidden) = (self.config, self.config.hidden_size);
        let double = |inner: usize| match inner == 2 * hidden {
            true => Ok(()),
            false => {
                let found = format!("a mixer of {inner}");
                self.refuse("mamba_expand", found, &format!("2, {} wide: llama.cpp requires it", 2 * hidden))
            }
        };
        let biases = |field: &str, convolution: &str, (bias, of_convolution): (bool, bool)| match (
            bias,
            of_convolution,
        ) {
            (true, _) => self.refuse(field, "true", "false: llama.cpp has no such biases"),
            (_, false) => self.refuse(convolution, "false", "true: llama.cpp requires the bias"),
            _ => Ok(()),
        };
        match &config.recurrent {
            Some(Recurrent::GatedDelta(mixer)) if mixer.key_dim != mixer.value_dim => {
                let allowed = format!("linear_key_head_dim, {}: llama.cpp has one width", mixer.key_dim);
                self.refuse("linear_value_head_dim", mixer.value_dim.to_string(), &allowed)
            }
            Some(Recurrent::GatedDelta(mixer)) if mixer.eps != DELTA_EPS => {
                let allowed = "1e-6, the epsilon of q and k in the mixer: llama.cpp has one for all";
                self.refuse("rms_norm_eps", mixer.eps.to_string(), allowed)
            }
            Some(Recurrent::ChannelDelta(mixer)) if mixer.heads != config.num_attention_heads => {
                let heads = config.num_attention_heads;
                let allowed = format!("{heads}, as num_attention_heads: llama.cpp requires it");
                self.refuse("linear_num_heads", mixer.heads.to_string(), &allowed)
            }
            Some(Recurrent::ChannelDelta(_)) => match config.latent.and_then(|latent| latent.q_rank) {
                Some(rank) => {
                    let allowed = "null: llama.cpp projects queries directly in this architecture";
                    self.refuse("q_lora_rank", rank.to_string(), allowed)
                }
                None => Ok(()),
            },
            Some(Recurrent::ShortConvolution(mixer)) if mixer.bias => {
                self.refuse("conv_bias", "true", "false: llama.cpp has no such biases")
            }
            Some(Recurrent::SelectiveScan(mixer)) => {
                double(mixer.inner)?;
                biases("mamba_proj_bias", "mamba_conv_bias", (mixer.bias, mixer.convolution_bias))
            }
            Some(Recurrent::StateSpace(mixer)) => {
                let blocks = self.row.recurrence == (Recurrence::StateSpace { blocks: true });
                if mixer.norm == ResultNorm::BeforeGate {
                    let allowed = "false: llama.cpp norms after the gate";
                    return self.refuse("mamba_norm_before_gate", "true", allowed);
                }
                if self.row.recurrence == (Recurrence::StateSpace { blocks: false }) {
                    double(mixer.heads * mixer.head_dim)?;
                }
                let ((least, most), allowed) = (mixer.steps, if blocks { LEAST_STEP } else { 0.0 });
                if most != f32::INFINITY || least > allowed {
                    let field = if blocks { "time_step_min" } else { "time_step_limit" };
                    let found = format!("{least} to {most}");
                    return self.refuse(field, found, "no limits: llama.cpp has none");
                }
                let fields = match blocks {
                    true => ["use_bias", "use_conv_bias"],
                    false => ["mamba_proj_bias", "mamba_conv_bias"],
                };
                biases(fields[0], fields[1], (mixer.bias, mixer.convolution_bias))
            }
            _ => Ok(()),
        }
    }
}
