//! What a config may say otherwise than the source's: a fault outside the weights.

use mantissa_model::{Layer, ModelConfig};

use super::Fault;
use super::compare::{Comparing, Layers, beyond};
use crate::error::AdviseError;
use crate::run::{States, through};
use crate::values::relative_error;

/// Fields of a config that a layer computes by.
struct Field {
    /// Names in `config.json`.
    name: &'static str,
    /// Takes it over.
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
    Field {
        name: "the scale of the attention's scores",
        take: |c, from| c.attention_scale = from.attention_scale,
    },
    Field { name: "attn_logit_softcapping", take: |c, from| c.attention_softcap = from.attention_softcap },
    Field { name: "sliding_window, layer_types", take: |c, from| c.windows = from.windows.clone() },
    Field { name: "clip_qkv", take: |c, from| c.clip_qkv = from.clip_qkv },
    Field {
        name: "model_type: the form and the places of norms",
        take: |c, from| {
            c.norm = from.norm;
            c.norm_places = from.norm_places;
            c.head_norms = from.head_norms;
        },
    },
];

/// The field of the config which, taken over from the source's, makes layer `number` compute what the source's does.
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
        // Other norms may need tensors that are not there.
        let Ok(layer) = Layer::load(of.files, &config, number) else { continue };
        if !beyond(relative_error(&run(&layer, &config)?, &right), expected) {
            let cause = "the config says otherwise than the source's, whose value makes the layer compute what the source does";
            let cure = "take the field over from the source's config.json";
            return Ok(Some(Fault::unknown(format!("config.json: {}", field.name), Vec::new(), cause, cure)));
        }
    }
    Ok(None)
}
