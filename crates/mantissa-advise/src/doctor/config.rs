//! Config fields that differ from the source: faults outside the weights.

use mantissa_model::{Layer, ModelConfig};

use super::Fault;
use super::pair::{Comparing, Layers, beyond};
use crate::error::AdviseError;
use crate::run::{States, through};
use crate::values::relative_error;

/// Config field that changes what a layer computes.
struct Field {
    /// Keys in `config.json`.
    name: &'static str,
    /// Copies the field from the second config to the first.
    take: fn(&mut ModelConfig, &ModelConfig),
}

const FIELDS: [Field; 9] = [
    Field {
        name: "rope_theta, rope_scaling, partial_rotary_factor",
        take: |c, from| {
            c.rope = from.rope.clone();
            c.local_rope = from.local_rope.clone();
            c.rotary_dim = from.rotary_dim;
        },
    },
    Field { name: "rms_norm_eps", take: |c, from| c.rms_norm_eps = from.rms_norm_eps },
    Field { name: "hidden_act", take: |c, from| c.hidden_act = from.hidden_act },
    Field {
        name: "num_attention_heads, num_key_value_heads, head_dim",
        take: |c, from| {
            c.num_attention_heads = from.num_attention_heads;
            c.num_key_value_heads = from.num_key_value_heads;
            c.head_dim = from.head_dim;
            c.rotary_dim = from.rotary_dim;
            c.attention_scale = from.attention_scale;
        },
    },
    Field { name: "the attention scale", take: |c, from| c.attention_scale = from.attention_scale },
    Field { name: "attn_logit_softcapping", take: |c, from| c.attention_softcap = from.attention_softcap },
    Field { name: "sliding_window, layer_types", take: |c, from| c.windows = from.windows.clone() },
    Field { name: "clip_qkv", take: |c, from| c.clip_qkv = from.clip_qkv },
    Field {
        name: "model_type: norm type and placement",
        take: |c, from| {
            c.norm = from.norm;
            c.norm_places = from.norm_places;
            c.head_norms = from.head_norms;
        },
    },
];

/// Finds the config field which, copied from the source, makes layer `number` compute what the source
/// computes.
///
/// # Errors
/// A layer cannot be run.
pub(super) fn differing_field(
    of: &Comparing<'_>,
    number: usize,
    layers: &Layers,
    states: &States,
) -> Result<Option<Fault>, AdviseError> {
    let run = |layer: &Layer, config: &ModelConfig| -> Result<Vec<f32>, AdviseError> {
        let out = through(layer, config, states, of.threads)?;
        Ok(out.iter().flatten().zip(states.iter().flatten()).map(|(y, x)| y - x).collect())
    };
    let right = run(&layers.reference, of.theirs)?;
    let expected = relative_error(&run(&layers.rounded, of.theirs)?, &right);
    for field in &FIELDS {
        let mut config = of.config.clone();
        (field.take)(&mut config, of.theirs);
        if config == *of.config {
            continue;
        }
        // Another norm placement may need tensors that do not exist; such a field is skipped.
        let Ok(layer) = Layer::load(of.files, &config, number) else { continue };
        if !beyond(relative_error(&run(&layer, &config)?, &right), expected) {
            let cause = "the config differs from the source; with the source's value the layer computes the right result";
            let fix = "copy the field from the source's config.json";
            return Ok(Some(Fault::unknown(format!("config.json: {}", field.name), Vec::new(), cause, fix)));
        }
    }
    Ok(None)
}
