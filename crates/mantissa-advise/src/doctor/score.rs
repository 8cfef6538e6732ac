//! Loss of a model on a text, and the test that decides whether one reading of a checkpoint is better than
//! another.
//!
//! Losses are compared at each reading's best temperature. Noise in the weights flattens predictions, which
//! alone lowers the loss on text that a model does not know: at temperature 1, sound models would be called
//! faulty.

use mantissa_eval::Sequence;
use mantissa_eval::stats::{Sum, estimate};
use mantissa_kernels::kernels;
use mantissa_model::ModelConfig;
use serde::Serialize;

use crate::error::AdviseError;
use crate::run::{Ends, States, each};

/// Inverse temperatures, which multiply the logits.
const SHARPNESS: [f64; 6] = [1.0, 0.75, 0.5, 0.3, 0.15, 0.05];

/// Predicted tokens per unit of the statistic. Adjacent tokens are correlated; units of this length hardly
/// are.
const SEGMENT: usize = 32;

/// Minimum number of units for a decision.
pub(crate) const LEAST_UNITS: usize = 8;

/// Minimum loss improvement of a repair, nats.
const LEAST: f64 = 0.1;

/// Minimum loss improvement in standard errors: for the dozen alternatives on the whole model, and for the
/// hundreds on its parts.
pub(crate) const WHOLE_ERRORS: f64 = 5.0;
pub(crate) const PART_ERRORS: f64 = 6.0;

/// Minimum improvement of top-1 accuracy in standard errors.
const HITS_ERRORS: f64 = 2.0;

/// Sums over one unit.
#[derive(Clone, Copy, Debug, Default)]
struct Segment {
    count: u64,
    nll: [f64; SHARPNESS.len()],
    hits: u64,
}

/// Loss on a text.
#[derive(Clone, Debug)]
pub(crate) struct Score {
    segments: Vec<Segment>,
}

impl Score {
    /// Scores the hidden states after the last layer; `None` if they are not finite.
    pub(crate) fn of(
        ends: &Ends,
        windows: &[Sequence],
        states: &States,
        threads: usize,
    ) -> Result<Option<Self>, AdviseError> {
        let scored = each(windows.len(), threads, |i| {
            let Sequence { tokens, from } = &windows[i];
            let first = (*from).max(1);
            let mut segments = vec![Segment::default(); tokens.len().saturating_sub(first).div_ceil(SEGMENT)];
            let mut scaled = Vec::new();
            ends.logits(&states[i], |row, logits| {
                if (first..tokens.len()).contains(&(row + 1)) {
                    let segment = &mut segments[(row + 1 - first) / SEGMENT];
                    segment.add(logits, tokens[row + 1] as usize, &mut scaled);
                }
            })?;
            Ok(segments)
        })?;
        let segments: Vec<Segment> = scored.into_iter().flatten().collect();
        let finite = segments.iter().all(|segment| segment.nll.iter().all(|nll| nll.is_finite()));
        Ok(finite.then_some(Score { segments }))
    }

    pub(crate) fn tokens(&self) -> u64 {
        self.segments.iter().map(|segment| segment.count).sum()
    }

    pub(crate) fn units(&self) -> usize {
        self.segments.len()
    }

    /// Returns the score of the first `units` units.
    pub(crate) fn first(&self, units: usize) -> Score {
        Score { segments: self.segments.iter().take(units).copied().collect() }
    }

    fn mean(&self, sharpness: usize) -> f64 {
        self.segments.iter().map(|segment| segment.nll[sharpness]).sum::<f64>() / self.tokens() as f64
    }

    /// Mean NLL at temperature 1, nats/token.
    pub(crate) fn nll(&self) -> f64 {
        self.mean(0)
    }

    /// Returns the index of the temperature with the lowest loss.
    fn best(&self) -> usize {
        let all = 0..SHARPNESS.len();
        all.min_by(|&a, &b| self.mean(a).total_cmp(&self.mean(b))).unwrap_or(0)
    }

    /// Mean NLL at the best temperature, nats/token.
    pub(crate) fn calibrated(&self) -> f64 {
        self.mean(self.best())
    }

    /// Share of tokens that were the argmax.
    pub(crate) fn hits(&self) -> f64 {
        self.segments.iter().map(|segment| segment.hits).sum::<u64>() as f64 / self.tokens() as f64
    }

    /// Returns the paired gain of `other` over this score on the same tokens.
    pub(crate) fn gain(&self, other: &Score) -> Gain {
        let (own, others) = (self.best(), other.best());
        let pairs = || self.segments.iter().zip(&other.segments);
        let sum = |count, sum| Sum { count, sum, squares: 0.0 };
        let losses: Vec<_> = pairs().map(|(a, b)| sum(a.count, b.nll[others] - a.nll[own])).collect();
        let hits: Vec<_> = pairs().map(|(a, b)| sum(a.count, b.hits as f64 - a.hits as f64)).collect();
        let (loss, hits) = (estimate(&losses), estimate(&hits));
        Gain { delta: loss.mean, se: loss.se, hits: hits.mean, hits_se: hits.se, units: losses.len() }
    }
}

impl Segment {
    /// Adds a token; `scaled` is a buffer.
    fn add(&mut self, logits: &[f32], target: usize, scaled: &mut Vec<f32>) {
        self.count += 1;
        let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        // Ties go to the lowest index: a model whose logits are all equal predicts nothing.
        if logits.iter().position(|&x| x == most) == Some(target) {
            self.hits += 1;
        }
        let target = f64::from(logits.get(target).copied().unwrap_or(f32::NAN) - most);
        for (nll, sharpness) in self.nll.iter_mut().zip(SHARPNESS) {
            let scale = sharpness as f32;
            scaled.clear();
            scaled.extend(logits.iter().map(|x| (x - most) * scale));
            // The largest is 0.
            *nll += kernels().log_softmax_stats(scaled).ln_sum - sharpness * target;
        }
    }
}

/// Paired comparison of a changed model with the unchanged one on the same tokens.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Gain {
    /// Loss minus the loss of the unchanged model, each at its best temperature, nats/token.
    pub delta: f64,
    /// Paired standard error of `delta`.
    pub se: f64,
    /// Top-1 accuracy minus the accuracy of the unchanged model.
    pub hits: f64,
    /// Paired standard error of `hits`.
    pub hits_se: f64,
    /// Number of units of the statistic.
    pub units: usize,
}

impl Gain {
    /// True if the change improves loss and top-1 accuracy, the loss by more than `errors` standard errors.
    pub(crate) fn is_decisive(&self, errors: f64) -> bool {
        self.units >= LEAST_UNITS
            && self.delta < -LEAST
            && self.delta < -errors * self.se
            && self.hits > HITS_ERRORS * self.hits_se
    }

    /// True if the loss falls by more than `errors` standard errors, by however little.
    pub(crate) fn is_less(&self, errors: f64) -> bool {
        self.units >= LEAST_UNITS && self.delta < -errors * self.se && self.delta < 0.0
    }

    /// True if the changed part beats a zeroed one. In a model that is broken elsewhere, any change to a
    /// disturbing part improves the loss.
    pub(crate) fn beats_silence(&self) -> bool {
        self.delta < -LEAST / 2.0 && self.delta < -PART_ERRORS / 2.0 * self.se
    }

    /// True if the change deserves a trial on more text.
    pub(crate) fn is_promising(&self) -> bool {
        self.delta < -LEAST / 2.0
    }
}

/// Returns the entropy of the predicted tokens of `windows`, nats: the NLL of a unigram model fitted to this
/// very text. On a short text this is a strict bound.
pub(crate) fn entropy(windows: &[Sequence]) -> f64 {
    let mut counts = std::collections::BTreeMap::<u32, u64>::new();
    for Sequence { tokens, from } in windows {
        tokens.iter().skip((*from).max(1)).for_each(|&token| *counts.entry(token).or_default() += 1);
    }
    let total = counts.values().sum::<u64>() as f64;
    counts.values().map(|&n| n as f64 / total).map(|p| -p * p.ln()).sum()
}

/// Positions after the start of a window that the BOS trial ignores: without a first token they have no
/// context.
const SETTLING: usize = 8;

/// Returns `windows` with a `bos` token and without, both predicting the same tokens, and whether the input
/// had it.
pub(crate) fn with_and_without(
    windows: &[Sequence],
    bos: u32,
    config: &ModelConfig,
) -> (Vec<Sequence>, Vec<Sequence>, bool) {
    let has = windows.iter().all(|window| window.tokens.first() == Some(&bos));
    let (mut with, mut without) = (Vec::new(), Vec::new());
    for window in windows {
        let text = if has { &window.tokens[1..] } else { &window.tokens[..] };
        let text = &text[..text.len().min(config.max_position_embeddings.saturating_sub(1))];
        if text.len() > SETTLING + 1 {
            with.push(Sequence { tokens: [&[bos], text].concat(), from: SETTLING + 1 });
            without.push(Sequence { tokens: text.to_vec(), from: SETTLING });
        }
    }
    (with, without, has)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn score(of: impl Fn(usize) -> ([f64; 6], u64)) -> Score {
        let segment = |i| {
            let (nll, hits) = of(i);
            Segment { count: 32, nll: nll.map(|x| 32.0 * x), hits }
        };
        Score { segments: (0..8).map(segment).collect() }
    }

    #[test]
    fn a_flatter_model_has_no_gain() {
        // An over-confident model improves at temperature 1 by flattening alone; the best-temperature loss
        // must not change.
        let sharp = score(|i| ([5.0 + 0.1 * i as f64, 4.0, 3.5, 3.2, 3.3, 3.4], 8));
        let flat = score(|i| ([3.5 + 0.01 * i as f64, 3.3, 3.2, 3.3, 3.4, 3.4], 8));
        let gain = sharp.gain(&flat);
        assert!(gain.delta.abs() < 1e-9 && !gain.is_decisive(WHOLE_ERRORS), "{gain:?}");
        let right = score(|i| ([2.0 + 0.1 * i as f64, 2.2, 2.4, 2.6, 2.8, 3.0], 16));
        assert!(sharp.gain(&right).is_decisive(WHOLE_ERRORS));
        assert!(!right.gain(&sharp).is_decisive(WHOLE_ERRORS));
        // Better on average, but not beyond chance.
        let mixed = score(|i| ([if i == 0 { -20.0 } else { 3.3 }, 3.4, 3.4, 3.4, 3.4, 3.4], 16));
        assert!(!sharp.gain(&mixed).is_decisive(WHOLE_ERRORS));
    }

    #[test]
    fn temperatures_scale_the_logits() {
        let mut segment = Segment::default();
        segment.add(&[1.0, 3.0], 0, &mut Vec::new());
        let expected = (1.0 + 2f64.exp()).ln();
        assert!((segment.nll[0] - expected).abs() < 1e-6);
        let expected = (1.0 + 1f64.exp()).ln();
        assert!((segment.nll[2] - expected).abs() < 1e-6);
        assert_eq!((segment.count, segment.hits), (1, 0));
    }

    #[test]
    fn the_entropy_of_a_text_follows_its_token_frequencies() {
        let windows = [Sequence { tokens: vec![9, 0, 1, 0, 1], from: 1 }];
        assert!((entropy(&windows) - 2f64.ln()).abs() < 1e-12);
    }
}
