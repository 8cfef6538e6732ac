//! How well a model predicts a text, and when one reading of it is better than another beyond doubt.
//!
//! Losses are compared at the temperature that suits each reading best. Noise in the weights flattens predictions, and on text that
//! a model does not know that alone lowers the loss: a comparison at temperature 1 would call sound models faulty.

use mantissa_eval::Sequence;
use mantissa_eval::stats::{Sum, estimate};
use mantissa_model::ModelConfig;
use serde::Serialize;

use crate::error::AdviseError;
use crate::run::{Ends, States, each};

/// Factors of the logits, the reciprocals of temperatures.
const SHARPNESS: [f64; 6] = [1.0, 0.75, 0.5, 0.3, 0.15, 0.05];

/// Predicted tokens that make one unit of the statistic. Neighbours depend on each other; units this long hardly do.
const SEGMENT: usize = 32;

/// Units below which nothing is decided.
pub(super) const LEAST_UNITS: usize = 8;

/// What a repair must lower the loss by, nats.
const LEAST: f64 = 0.1;

/// The same in standard errors of the difference: of alternatives on the whole model, of which there are a dozen, and on its parts,
/// of which there are hundreds.
pub(super) const WHOLE_ERRORS: f64 = 5.0;
pub(super) const PART_ERRORS: f64 = 6.0;

/// Standard errors by which it must raise the share of tokens that are predicted first.
const HITS_ERRORS: f64 = 2.0;

/// Sums over one unit.
#[derive(Clone, Copy, Debug, Default)]
struct Segment {
    count: u64,
    nll: [f64; SHARPNESS.len()],
    hits: u64,
}

/// Losses on a text.
#[derive(Clone, Debug)]
pub(super) struct Score {
    segments: Vec<Segment>,
}

impl Score {
    /// Of the states that the last layer left; `None` where they are no numbers.
    pub(super) fn of(
        ends: &Ends,
        windows: &[Sequence],
        states: &States,
        threads: usize,
    ) -> Result<Option<Self>, AdviseError> {
        let scored = each(windows.len(), threads, |i| {
            let Sequence { tokens, from } = &windows[i];
            let first = (*from).max(1);
            let mut segments = vec![Segment::default(); tokens.len().saturating_sub(first).div_ceil(SEGMENT)];
            ends.logits(&states[i], |row, logits| {
                if (first..tokens.len()).contains(&(row + 1)) {
                    segments[(row + 1 - first) / SEGMENT].add(logits, tokens[row + 1] as usize);
                }
            })?;
            Ok(segments)
        })?;
        let segments: Vec<Segment> = scored.into_iter().flatten().collect();
        let finite = segments.iter().all(|segment| segment.nll.iter().all(|nll| nll.is_finite()));
        Ok(finite.then_some(Score { segments }))
    }

    pub(super) fn tokens(&self) -> u64 {
        self.segments.iter().map(|segment| segment.count).sum()
    }

    pub(super) fn units(&self) -> usize {
        self.segments.len()
    }

    /// That of its first units.
    pub(super) fn first(&self, units: usize) -> Score {
        Score { segments: self.segments.iter().take(units).copied().collect() }
    }

    fn mean(&self, sharpness: usize) -> f64 {
        self.segments.iter().map(|segment| segment.nll[sharpness]).sum::<f64>() / self.tokens() as f64
    }

    /// Mean loss as the model is, nats.
    pub(super) fn nll(&self) -> f64 {
        self.mean(0)
    }

    /// Which temperature gives the least loss.
    fn best(&self) -> usize {
        let all = 0..SHARPNESS.len();
        all.min_by(|&a, &b| self.mean(a).total_cmp(&self.mean(b))).unwrap_or(0)
    }

    /// Mean loss at its best temperature, nats.
    pub(super) fn calibrated(&self) -> f64 {
        self.mean(self.best())
    }

    /// Share of tokens that were the most likely ones.
    pub(super) fn hits(&self) -> f64 {
        self.segments.iter().map(|segment| segment.hits).sum::<u64>() as f64 / self.tokens() as f64
    }

    /// What `other` gains over it on the same tokens.
    pub(super) fn gain(&self, other: &Score) -> Gain {
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
    fn add(&mut self, logits: &[f32], target: usize) {
        self.count += 1;
        let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        // The first of equals: a model whose logits are all alike predicts nothing.
        if logits.iter().position(|&x| x == most) == Some(target) {
            self.hits += 1;
        }
        let target = f64::from(logits.get(target).copied().unwrap_or(f32::NAN) - most);
        for (nll, sharpness) in self.nll.iter_mut().zip(SHARPNESS) {
            let scale = sharpness as f32;
            let sum: f64 = logits.iter().map(|x| f64::from(((x - most) * scale).exp())).sum();
            *nll += sum.ln() - sharpness * target;
        }
    }
}

/// One reading of a model against another on the same tokens.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Gain {
    /// Loss less that of the model as it is, each at its best temperature, nats.
    pub delta: f64,
    /// Its paired standard error.
    pub se: f64,
    /// Share of tokens predicted first, less that of the model as it is.
    pub hits: f64,
    /// Its paired standard error.
    pub hits_se: f64,
    /// Units of the statistic.
    pub units: usize,
}

impl Gain {
    /// Whether the other reading is better beyond doubt: by more than `errors` standard errors.
    pub(super) fn is_decisive(&self, errors: f64) -> bool {
        self.units >= LEAST_UNITS
            && self.delta < -LEAST
            && self.delta < -errors * self.se
            && self.hits > HITS_ERRORS * self.hits_se
    }

    /// Whether the other reading is better than doing without the part that it changes; of a part that only disturbs a model
    /// that is broken elsewhere, any change is an improvement.
    pub(super) fn beats_silence(&self) -> bool {
        self.delta < -LEAST / 2.0 && self.delta < -PART_ERRORS / 2.0 * self.se
    }

    /// Whether it is worth trying on more text.
    pub(super) fn is_promising(&self) -> bool {
        self.delta < -LEAST / 2.0
    }
}

/// Entropy of the predicted tokens of `windows`, nats: the loss of a model that knows how often each of them occurs in this very
/// text, and nothing else. On a short text that is a strict measure.
pub(super) fn entropy(windows: &[Sequence]) -> f64 {
    let mut counts = std::collections::BTreeMap::<u32, u64>::new();
    for Sequence { tokens, from } in windows {
        tokens.iter().skip((*from).max(1)).for_each(|&token| *counts.entry(token).or_default() += 1);
    }
    let total = counts.values().sum::<u64>() as f64;
    counts.values().map(|&n| n as f64 / total).map(|p| -p * p.ln()).sum()
}

/// Positions of a window that a missing or additional first token is not judged on: without it the first few are about something
/// else.
const SETTLING: usize = 8;

/// `windows` with the token `bos` before them and without it, the same tokens predicted; whether they have it.
pub(super) fn with_and_without(
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
    fn a_flatter_model_gains_nothing() {
        // Over-confident as it is; the same predictions, only flatter, are better at temperature 1 alone.
        let sharp = score(|i| ([5.0 + 0.1 * i as f64, 4.0, 3.5, 3.2, 3.3, 3.4], 8));
        let flat = score(|i| ([3.5 + 0.01 * i as f64, 3.3, 3.2, 3.3, 3.4, 3.4], 8));
        let gain = sharp.gain(&flat);
        assert!(gain.delta.abs() < 1e-9 && !gain.is_decisive(WHOLE_ERRORS), "{gain:?}");
        let right = score(|i| ([2.0 + 0.1 * i as f64, 2.2, 2.4, 2.6, 2.8, 3.0], 16));
        assert!(sharp.gain(&right).is_decisive(WHOLE_ERRORS));
        assert!(!right.gain(&sharp).is_decisive(WHOLE_ERRORS));
        // Better on average, and not by more than chance.
        let mixed = score(|i| ([if i == 0 { -20.0 } else { 3.3 }, 3.4, 3.4, 3.4, 3.4, 3.4], 16));
        assert!(!sharp.gain(&mixed).is_decisive(WHOLE_ERRORS));
    }

    #[test]
    fn temperatures_are_what_they_say() {
        let mut segment = Segment::default();
        segment.add(&[1.0, 3.0], 0);
        let expected = (1.0 + 2f64.exp()).ln();
        assert!((segment.nll[0] - expected).abs() < 1e-6);
        let expected = (1.0 + 1f64.exp()).ln();
        assert!((segment.nll[2] - expected).abs() < 1e-6);
        assert_eq!((segment.count, segment.hits), (1, 0));
    }

    #[test]
    fn the_entropy_of_a_text_is_that_of_its_tokens() {
        let windows = [Sequence { tokens: vec![9, 0, 1, 0, 1], from: 1 }];
        assert!((entropy(&windows) - 2f64.ln()).abs() < 1e-12);
    }
}
