//! Values beyond the range of FP16, or none at all.
//!
//! An FP16 engine keeps states and inputs in FP16, whose largest value is 65504: a state beyond it becomes infinite,
//! and everything after it NaN. BF16 has the range of f32. Known of T5, Gemma 3 and others with massive activations
//! (Sun et al. 2024, arXiv:2402.17762).

use super::activations::Peak;
use super::examination::{Examination, Examined};
use super::finding::{Finding, Location};
use crate::error::Result;

/// Largest value of FP16.
const LARGEST: f32 = 65504.0;

/// Finds states and inputs that FP16 cannot hold, in a model that is stored in FP16, and values that are not finite.
pub(super) struct Overflow;

impl Examination for Overflow {
    fn name(&self) -> &'static str {
        "fp16-overflow"
    }

    fn question(&self) -> &'static str {
        "Do states and inputs stay finite in the model's dtype?"
    }

    fn lacks(&self, _: &Examined<'_>) -> Option<&'static str> {
        None
    }

    fn findings(&self, of: &Examined<'_>) -> Result<Vec<Finding>> {
        let states = |layer: Option<usize>, peak: &Peak| (layer, "residual stream".to_owned(), *peak);
        let mut places = vec![states(None, &of.seen.embedded)];
        for layer in &of.seen.layers {
            for input in &layer.inputs {
                let part = format!("input of {}", input.modules.first().map_or("", String::as_str));
                let at = input.token.unwrap_or_default();
                let peak = Peak { amax: input.amax, channel: input.channel, ..at };
                places.push((Some(layer.layer), part, peak));
            }
            places.push(states(Some(layer.layer), &layer.states));
        }
        // A model in another dtype is sound: its engine holds these values.
        let half = is_half(of.request.files);
        let bad = |peak: &Peak| !peak.amax.is_finite() || (half && peak.amax > LARGEST);
        let Some((layer, part, peak)) = places.iter().find(|(.., peak)| bad(peak)) else {
            return Ok(Vec::new());
        };
        let token = of.token(peak.window, peak.position);
        let at = token.as_ref().map_or_else(String::new, |token| format!(", {}", token.described()));
        let later = places.iter().filter(|(.., peak)| bad(peak)).count() - 1;
        let names = &of.request.names;
        let found = match peak.amax.is_finite() {
            true => format!(
                "{} in channel {}{at}; FP16 ends at {LARGEST}, and the model is stored in FP16; {later} later places",
                peak.amax, peak.channel
            ),
            false => format!("a value that is not finite in channel {}{at}", peak.channel),
        };
        let place = Location { layer: *layer, part: part.clone(), channel: Some(peak.channel), token };
        Ok(vec![Finding {
            examination: self.name(),
            place,
            found,
            figures: [("amax", f64::from(peak.amax)), ("limit", f64::from(LARGEST))].into(),
            remedy: "store and serve the model in BF16, which has the range of f32".to_owned(),
            command: format!("mantissa quantize {} --recipe bf16 --out {}-bf16", names.model, names.stem),
        }])
    }
}

/// True if the config states FP16, or, without a dtype, if norms or embeddings are stored in it.
fn is_half(files: &mantissa_store::convention::ModelFiles) -> bool {
    let stated = files.config().and_then(|config| {
        let dtype = config.get("dtype").or_else(|| config.get("torch_dtype"))?;
        dtype.as_str().map(|dtype| dtype == "float16")
    });
    stated.unwrap_or_else(|| {
        let dtypes = files.checkpoint().tensors().map(|meta| meta.dtype);
        let (mut half, mut other) = (0, 0);
        for dtype in dtypes {
            match dtype {
                mantissa_store::Dtype::F16 => half += 1,
                mantissa_store::Dtype::BF16 => other += 1,
                _ => {}
            }
        }
        half > 0 && other == 0
    })
}
