//! Ablations of precision outside the weights: the residual stream and the norms in BF16 and FP16, and the softmax weights
//! of attention in 8 bits, each against f32, by KL on the text.

use mantissa_eval::evaluate;
use mantissa_eval::stats::{Sum, estimate};
use mantissa_model::{AttentionOperands, Decoder, Layer};
use mantissa_num::Rounding;
use mantissa_num::minifloat::{BF16, F16, MiniFloat, Overflow};

use super::examination::{Examination, Examined};
use super::finding::{Finding, Location};
use super::measurements::Ablation;
use crate::doctor::divergence;
use crate::error::Result;
use crate::run::{Ends, States, each, through};

/// KL that a residual stream in BF16 may cost, nats/token. Engines keep it in BF16 by default.
const KL: f64 = 0.02;

/// Formats of softmax weights that are tried, as kernels with 8-bit matmuls use them.
const SOFTMAX: [&str; 2] = ["p=fp8-e4m3", "p=int8"];

/// Name of the residual stream in reports.
const RESIDUAL: &str = "residual stream";

/// Rounding of a value.
type Round = fn(f32) -> f32;

/// Measures every ablation on the model of `of`; empty if its predictions are not finite.
///
/// # Errors
/// A model that cannot be loaded or run.
pub(super) fn ablations(of: &Examined<'_>) -> Result<Vec<Ablation>> {
    if of.trials.base.is_none() {
        return Ok(Vec::new());
    }
    let mut all = rounded_states(of)?;
    if of.config.attention_layers().next().is_some() && of.config.latent.is_none() {
        let files = of.request.files;
        let (plain, mut other) = (Decoder::load(files)?, Decoder::load(files)?);
        for text in SOFTMAX {
            let Ok(operands) = text.parse::<AttentionOperands>() else { continue };
            // Some kinds of attention have no such kernel.
            if other.set_attention_operands(&operands).is_err() {
                break;
            }
            let found = evaluate(&other, Some(&plain), &of.trials.windows, of.request.threads, &|_| {})?;
            let precision = text.trim_start_matches("p=");
            let kl = found.comparison.map(|comparison| comparison.kl).filter(|kl| kl.is_finite());
            all.push(Ablation { part: "softmax weights", precision, kl });
        }
    }
    Ok(all)
}

/// Runs of the model layer by layer beside f32: part, precision, rounding of the states after every layer, and of every
/// step of the norms.
const CHAINS: [(&str, &str, Option<Round>, Option<Round>); 4] = [
    (RESIDUAL, "bf16", Some(bf16), None),
    (RESIDUAL, "fp16", Some(fp16), None),
    ("norms", "bf16", None, Some(bf16)),
    ("norms", "fp16", None, Some(fp16)),
];

/// Measures the residual stream and the norms in BF16 and FP16.
fn rounded_states(of: &Examined<'_>) -> Result<Vec<Ablation>> {
    let (files, config, threads) = (of.request.files, &of.config, of.request.threads);
    let windows = &of.trials.windows;
    let mut ends = Ends::load(files, config)?;
    let mut exact = ends.embed(config, windows)?;
    let mut chains: Vec<States> = vec![exact.clone(); CHAINS.len()];
    for number in 0..config.num_hidden_layers {
        let mut layer = Layer::load(files, config, number)?;
        for (chain, (_, _, states, norms)) in chains.iter_mut().zip(CHAINS) {
            layer.set_norm_rounding(norms);
            let mut next = through(&layer, config, chain, threads)?;
            if let Some(round) = states {
                next.iter_mut().for_each(|state| state.map(round));
            }
            *chain = next;
        }
        layer.set_norm_rounding(None);
        exact = through(&layer, config, &exact, threads)?;
    }
    let mut all = Vec::with_capacity(CHAINS.len());
    let plain = Ends::load(files, config)?;
    for (chain, (part, precision, _, norms)) in chains.iter().zip(CHAINS) {
        ends.set_norm_rounding(norms);
        let sums = each(windows.len(), threads, |i| {
            let mut expected: Vec<Vec<f32>> = Vec::new();
            plain.logits(&exact[i], |_, logits| expected.push(logits.to_vec()))?;
            let mut sum = Sum::default();
            ends.logits(&chain[i], |row, logits| sum.add(divergence(&expected[row], logits)))?;
            Ok(sum)
        })?;
        let kl = Some(estimate(&sums).mean).filter(|kl| kl.is_finite());
        all.push(Ablation { part, precision, kl });
    }
    Ok(all)
}

/// Rounds to BF16, to nearest even.
fn bf16(x: f32) -> f32 {
    rounded(BF16, x)
}

/// Rounds to FP16, to nearest even; beyond its range to infinity.
fn fp16(x: f32) -> f32 {
    rounded(F16, x)
}

fn rounded(format: MiniFloat, x: f32) -> f32 {
    format.decode(format.encode(x, Overflow::Special, Rounding::NearestEven, 0))
}

/// Finds a residual stream that BF16 is too coarse for.
pub(super) struct Residual;

impl Examination for Residual {
    fn name(&self) -> &'static str {
        "residual-precision"
    }

    fn question(&self) -> &'static str {
        "Does a residual stream in BF16 hold what the layers add?"
    }

    fn lacks(&self, of: &Examined<'_>) -> Option<&'static str> {
        let quantized =
            of.seen.layers.iter().flat_map(|layer| &layer.inputs).any(|input| input.scheme.is_some());
        match (of.ablations.is_empty(), quantized) {
            (true, _) => Some("the loss on this text is not finite"),
            // A state that moves by one part in 256 moves codes of inputs, which costs far more than the rounding.
            (_, true) => Some("the model quantizes inputs of layers"),
            _ => None,
        }
    }

    fn findings(&self, of: &Examined<'_>) -> Result<Vec<Finding>> {
        let precision_trial = |precision: &str| {
            let found = of.ablations.iter().find(|a| a.part == RESIDUAL && a.precision == precision);
            found.map_or(f64::NAN, |found| found.kl.unwrap_or(f64::INFINITY))
        };
        let (bf16, fp16) = (precision_trial("bf16"), precision_trial("fp16"));
        // On text that the model does not know its predictions are nearly even, and any rounding moves them.
        if bf16 <= KL || !of.trials.knows() {
            return Ok(Vec::new());
        }
        let names = &of.request.names;
        Ok(vec![Finding {
            examination: self.name(),
            place: Location { part: RESIDUAL.to_owned(), ..Location::default() },
            found: format!(
                "rounded to BF16 after every layer it costs KL {bf16:.4} nats/token, to FP16 {fp16:.4}"
            ),
            figures: [("kl_bf16", bf16), ("kl_fp16", fp16)].into(),
            remedy: "keep the residual stream in f32, or in FP16 where it does not overflow".to_owned(),
            command: format!("mantissa diagnose {} {} --layers", names.model, names.text),
        }])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_round_as_ieee_does() {
        for (x, half, brain) in [
            (1.0, 1.0, 1.0),
            (0.1, 0.099_975_586, 0.100_097_656),
            (65519.0, 65504.0, 65536.0),
            (65520.0, f32::INFINITY, 65536.0),
            (6e-8, 5.960_464_5e-8, 6.007_03e-8),
            (2049.0, 2048.0, 2048.0),
            (-3.3, -3.300_781_25, -3.296_875),
        ] {
            assert_eq!(fp16(x), half, "{x}");
            assert!((bf16(x) - brain).abs() <= brain.abs() * 1e-3, "{x}: {}", bf16(x));
            assert_eq!(bf16(x).to_bits() & 0xffff, 0);
        }
    }
}
