//! The output head alone against everything else: it maps to every logit directly, so that an error in it has no layer
//! behind it, and engines often leave it in 16 bits.

use super::examination::{Examination, Examined};
use super::finding::{Finding, Location};
use crate::error::Result;
use crate::subject::is_plain;

/// Smallest KL of the head alone that is a finding, nats/token: in the embedded model int8 costs .0001, int4-g32 .02
/// and int2-g32 .56 (measured 2026-11-26).
const KL: f64 = 0.02;

/// Least ratio of the head's KL to the KL of all layers together.
const TIMES: f64 = 2.0;

/// Finds a head that costs more than all layers.
pub(super) struct Head;

impl Examination for Head {
    fn name(&self) -> &'static str {
        "head-precision"
    }

    fn question(&self) -> &'static str {
        "Does the quantized head cost less than the layers?"
    }

    fn lacks(&self, of: &Examined<'_>) -> Option<&'static str> {
        if of.compared.is_none() {
            return Some("no --reference");
        }
        is_plain(of.request.files, &head(of)).then_some("the head is not quantized")
    }

    fn findings(&self, of: &Examined<'_>) -> Result<Vec<Finding>> {
        let Some(compared) = &of.compared else { return Ok(Vec::new()) };
        let (kl, kl_head, layers) = (compared.kl, compared.kl_head, compared.kl_layers);
        // In a rotated model head and layers of the source do not fit: either alone costs more than both.
        let fit = kl_head < 3.0 * kl;
        if !fit || kl_head < KL || kl_head < TIMES * layers {
            return Ok(Vec::new());
        }
        let names = &of.request.names;
        let measured =
            || format!("mantissa fit {} --budget 4.5bpw --out {}-fitted", names.source, names.stem);
        Ok(vec![Finding {
            examination: self.name(),
            place: Location { part: head(of), ..Location::default() },
            found: format!(
                "the head alone costs KL {kl_head:.4} nats/token, all layers together {layers:.4}, both {kl:.4}"
            ),
            figures: [("kl", kl), ("kl_head", kl_head), ("kl_layers", layers)].into(),
            remedy: "leave the head in 16 bits, or give it 8".to_owned(),
            command: names.again.clone().unwrap_or_else(measured),
        }])
    }
}

/// Returns the module of the head, or of the embedding that is tied to it.
fn head(of: &Examined<'_>) -> String {
    match of.config.tie_word_embeddings {
        true => of.config.embedding_module(),
        false => of.config.head_module().to_owned(),
    }
}
