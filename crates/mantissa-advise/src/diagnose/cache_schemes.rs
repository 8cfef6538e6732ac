//! Schemes of the KV cache, each on the whole model: KL on the text against a cache in f32, by position, and retrieval of
//! a fact from earlier in the prompt, which a cache spoils before the mean loss shows it.

use std::ops::ControlFlow;

use mantissa_eval::Evaluated;
use mantissa_eval::stats::Estimate;
use mantissa_eval::tasks::{Answer, Encoded, Item, encode, longest, run, summary};
use mantissa_model::{Bos, Decoder};

use super::examination::{Examination, Examined};
use super::finding::{Finding, Location};
use super::measurements::CacheScheme;
use crate::error::Result;
use crate::sensitivity::cache_scheme;

/// KL that a cache may cost, nats/token: the bound at which quantized weights are usually accepted.
const KL: f64 = 0.05;

/// Loss of retrieval that is a finding, in paired standard errors.
const ERRORS: f64 = 2.0;

/// Measures the schemes of the request on the model of `of`.
///
/// # Errors
/// A scheme that the heads of the model cannot be stored in.
pub(super) fn schemes(of: &Examined<'_>) -> Result<Vec<CacheScheme>> {
    if of.request.kv.is_empty() {
        return Ok(Vec::new());
    }
    let files = mantissa_model::CacheInF32(of.request.files);
    let (plain, mut other) = (Decoder::load(&files)?, Decoder::load(&files)?);
    let items = retrieval(of);
    let right = answers(of, &plain, &items)?;
    let mut all = Vec::new();
    for policy in of.request.kv {
        let Estimate { mean: kl, se: kl_se } =
            cache_scheme((&mut other, &plain), policy, &of.trials.windows, of.request.threads)?;
        let answers = answers(of, &other, &items)?;
        let given: Vec<Item> = items.iter().map(|(item, _)| (*item).clone()).collect();
        let score = (!given.is_empty()).then(|| summary(&given, &answers, Some(&right)).score);
        let paired = score.as_ref().and_then(|score| score.reference.clone());
        all.push(CacheScheme {
            kv: policy.to_string(),
            bytes_per_token: other.kv_bytes_per_token(),
            kl,
            kl_se,
            retrieved: score.as_ref().map(|score| score.accuracy),
            retrieved_in_f32: paired.as_ref().map(|paired| paired.accuracy),
            delta: paired.map(|paired| [paired.delta_accuracy, paired.delta_accuracy_se.unwrap_or(f64::NAN)]),
        });
    }
    Ok(all)
}

/// Returns the items of the retrieval task that fit the model's context.
fn retrieval<'a>(of: &Examined<'a>) -> Vec<(&'a Item, Encoded)> {
    let Some(tokenizer) = of.request.tokenizer else { return Vec::new() };
    let items = of.request.retrieval.iter();
    let encoded = items.filter_map(|item| Some((item, encode(item, None, tokenizer, Bos::Auto).ok()?)));
    encoded.filter(|(_, encoded)| longest([encoded]).1 <= of.config.max_position_embeddings).collect()
}

fn answers(of: &Examined<'_>, decoder: &Decoder, items: &[(&Item, Encoded)]) -> Result<Vec<Answer>> {
    let Some(tokenizer) = of.request.tokenizer.filter(|_| !items.is_empty()) else { return Ok(Vec::new()) };
    let items: Vec<(&Item, &Encoded)> = items.iter().map(|(item, encoded)| (*item, encoded)).collect();
    let go = |_: u64| -> ControlFlow<()> { ControlFlow::Continue(()) };
    Ok(run(Evaluated::from(decoder), &items, tokenizer, of.request.threads, &go)?)
}

/// Finds schemes of the cache that cost too much.
pub(super) struct Schemes;

impl Examination for Schemes {
    fn name(&self) -> &'static str {
        "cache-schemes"
    }

    fn question(&self) -> &'static str {
        "Do the schemes of --kv keep predictions and retrieval?"
    }

    fn lacks(&self, of: &Examined<'_>) -> Option<&'static str> {
        of.cache_schemes.is_empty().then_some("no --kv")
    }

    fn findings(&self, of: &Examined<'_>) -> Result<Vec<Finding>> {
        let names = &of.request.names;
        let lost = |scheme: &CacheScheme| {
            scheme.delta.is_some_and(|[delta, se]| delta < -ERRORS * se && delta < 0.0)
        };
        // The narrowest that does.
        let sound = of.cache_schemes.iter().filter(|scheme| scheme.kl <= KL && !lost(scheme));
        let better = sound.min_by(|a, b| a.bytes_per_token.total_cmp(&b.bytes_per_token));
        let better = better.map_or("f32", |scheme| scheme.kv.as_str());
        let bad =
            of.cache_schemes.iter().filter(|scheme| scheme.kl.is_nan() || scheme.kl > KL || lost(scheme));
        let finding = |scheme: &CacheScheme| {
            let retrieval = match (scheme.retrieved, scheme.retrieved_in_f32, scheme.delta) {
                (Some(now), Some(before), Some([_, se])) => format!(
                    "; {:.0} % of the facts are retrieved, {:.0} % with f32 (± {:.0})",
                    100.0 * now,
                    100.0 * before,
                    100.0 * se
                ),
                _ => String::new(),
            };
            Finding {
                examination: self.name(),
                place: Location { part: format!("KV cache in {}", scheme.kv), ..Location::default() },
                found: format!("KL {} against f32{retrieval}", of.shown(scheme.kl, scheme.kl_se)),
                figures: [
                    ("kl", scheme.kl),
                    ("kl_se", scheme.kl_se),
                    ("bytes_per_token", scheme.bytes_per_token),
                ]
                .into(),
                remedy: format!("use {better}"),
                command: format!("mantissa eval {} {} --kv {better}", names.model, names.text),
            }
        };
        Ok(bad.map(finding).collect())
    }
}
