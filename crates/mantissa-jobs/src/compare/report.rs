//! Result of a comparison, and what follows from it.

use std::path::PathBuf;

use mantissa_eval::verdict::Verdict;
use mantissa_eval::{Evaluation, WindowResult, kl_difference, stats};
use mantissa_quant::TokenSet;
use serde::Serialize;

/// Result of a comparison of candidates.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CompareReport {
    /// Model as named, which all candidates are compared with.
    pub model: PathBuf,
    /// Bits per weight of its linear layers.
    pub bits: Option<f64>,
    /// Bytes of its tensors.
    pub bytes: u64,
    /// Texts, with the figures of the model itself.
    pub texts: Vec<ComparedText>,
    /// Candidates in the order given.
    pub rows: Vec<CompareRow>,
    /// Differences between candidates, each pair once.
    pub pairs: Vec<ComparePair>,
    /// Number of standard errors beyond which a difference is taken for real: two-sided, 5 % over all pairs; absent if
    /// there is one window.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub critical: Option<f64>,
    /// Note on the errors, if they are no standard errors.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
    /// Number of threads.
    pub threads: usize,
    /// Seconds of all.
    pub seconds: f64,
}

/// Text of a comparison, with the figures of the reference on it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ComparedText {
    /// Name.
    pub text: String,
    /// Number of windows.
    pub windows: usize,
    /// Number of predicted tokens.
    pub tokens: u64,
    /// Mean negative log-likelihood, nats/token.
    pub nll: f64,
    /// Its standard error over windows.
    pub nll_se: f64,
    /// Perplexity.
    pub ppl: f64,
}

/// Candidate with its figures, or with the reason why it has none.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CompareRow {
    /// Recipe, or model as named.
    pub name: String,
    /// Output, if it is there after the command.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<PathBuf>,
    /// Checkpoint format.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub format: Option<&'static str>,
    /// Bits per weight of the linear layers as stored, scales and zero points included.
    pub bits: Option<f64>,
    /// Bytes of all tensors.
    pub bytes: Option<u64>,
    /// Mean of the KL on the texts, nats/token.
    pub kl: Option<f64>,
    /// Its standard error.
    pub kl_se: Option<f64>,
    /// Mean of the top-1 agreement on the texts.
    pub top1: Option<f64>,
    /// Seconds of quantization, verification and measurement.
    pub seconds: f64,
    /// Seconds of quantization and verification, for a recipe.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub quantize_seconds: Option<f64>,
    /// Engines that load it, by the rules of the serving contract.
    pub loads_in: Vec<&'static str>,
    /// Number of layers that fell back to another scheme or method.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fallbacks: Option<usize>,
    /// Text or windows that it was calibrated on, if its quality report names some.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub calibration: Option<TokenSet>,
    /// Quality loss in one word.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub verdict: Option<&'static str>,
    /// Figures on each text, in the order of the texts.
    pub texts: Vec<TextFigures>,
    /// Reason why there are no figures.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Sums of each window, for differences.
    #[serde(skip)]
    pub(super) windows: Vec<Vec<WindowResult>>,
}

/// Figures of a candidate on one text.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TextFigures {
    /// Name of the text.
    pub text: String,
    /// KL from the reference, nats/token.
    pub kl: f64,
    /// Its standard error over windows.
    pub kl_se: f64,
    /// Share of tokens where both models rank the same token first.
    pub top1: f64,
    /// Its standard error over windows.
    pub top1_se: f64,
    /// Perplexity.
    pub ppl: f64,
    /// NLL less the reference's, nats/token.
    pub delta_nll: f64,
    /// Its paired standard error over windows.
    pub delta_nll_se: f64,
}

/// Difference between two candidates.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ComparePair {
    /// Name of the first.
    pub a: String,
    /// Name of the second.
    pub b: String,
    /// KL of `a` less that of `b`, mean over the texts, nats/token.
    pub kl_difference: f64,
    /// Its standard error, paired over the same windows.
    pub kl_difference_se: f64,
    /// Name of the candidate with the smaller loss; `None` if the difference may be chance.
    pub better: Option<String>,
}

impl CompareRow {
    /// Makes the row of a candidate without figures, for the reason `error`.
    pub(super) fn failed(name: String, error: String, seconds: f64) -> Self {
        CompareRow {
            name,
            path: None,
            format: None,
            bits: None,
            bytes: None,
            kl: None,
            kl_se: None,
            top1: None,
            seconds,
            quantize_seconds: None,
            loads_in: Vec::new(),
            fallbacks: None,
            calibration: None,
            verdict: None,
            texts: Vec::new(),
            error: Some(error),
            windows: Vec::new(),
        }
    }

    /// Adds the figures of the evaluations on texts of these names.
    pub(super) fn measured<'a>(
        mut self,
        names: impl Iterator<Item = &'a String>,
        found: Vec<Evaluation>,
    ) -> Self {
        for (name, evaluation) in names.zip(&found) {
            let Some(c) = &evaluation.comparison else { continue };
            self.texts.push(TextFigures {
                text: name.clone(),
                kl: c.kl,
                kl_se: c.kl_se,
                top1: c.top1,
                top1_se: c.top1_se,
                ppl: evaluation.ppl,
                delta_nll: c.delta_nll,
                delta_nll_se: c.delta_nll_se,
            });
        }
        let (kl, kl_se) = mean(self.texts.iter().map(|text| (text.kl, text.kl_se)));
        self.kl = Some(kl);
        self.kl_se = Some(kl_se);
        self.top1 = Some(mean(self.texts.iter().map(|text| (text.top1, text.top1_se))).0);
        self.verdict = Some(Verdict::new((kl, kl_se), (0.0, 0.0)).word());
        self.windows = found.into_iter().map(|evaluation| evaluation.windows).collect();
        self.error = None;
        self
    }
}

/// Returns the mean of figures on independent texts, with its standard error.
fn mean(figures: impl Iterator<Item = (f64, f64)>) -> (f64, f64) {
    let (mut count, mut sum, mut squares) = (0.0, 0.0, 0.0);
    for (value, error) in figures {
        (count, sum, squares) = (count + 1.0, sum + value, squares + error * error);
    }
    (sum / count, squares.sqrt() / count)
}

/// Differences between all candidates with figures, and the number of standard errors that a real one has.
pub(super) fn pairs(rows: &[CompareRow]) -> (Vec<ComparePair>, Option<f64>) {
    let measured: Vec<&CompareRow> = rows.iter().filter(|row| row.error.is_none()).collect();
    let count = measured.len() * measured.len().saturating_sub(1) / 2;
    let freedom = |row: &&CompareRow| row.windows.iter().map(|windows| windows.len().saturating_sub(1)).sum();
    let critical = stats::critical(count, measured.first().map_or(0, freedom)).filter(|_| count > 0);
    let mut pairs = Vec::with_capacity(count);
    for (i, a) in measured.iter().enumerate() {
        pairs.extend(measured[i + 1..].iter().filter_map(|b| pair(a, b, critical)));
    }
    (pairs, critical)
}

fn pair(a: &CompareRow, b: &CompareRow, critical: Option<f64>) -> Option<ComparePair> {
    let on_text = |(a, b): (&Vec<WindowResult>, &Vec<WindowResult>)| kl_difference(a, b);
    let found = a.windows.iter().zip(&b.windows).map(on_text).collect::<Option<Vec<_>>>()?;
    let (difference, error) = mean(found.iter().map(|found| (found.mean, found.se)));
    let is_real = critical.is_some_and(|critical| difference.abs() > critical * error);
    let better = if difference < 0.0 { &a.name } else { &b.name };
    Some(ComparePair {
        a: a.name.clone(),
        b: b.name.clone(),
        kl_difference: difference,
        kl_difference_se: error,
        better: is_real.then(|| better.clone()),
    })
}

impl CompareReport {
    /// Returns the row with the smallest loss.
    pub fn best(&self) -> Option<&CompareRow> {
        let measured = self.rows.iter().filter(|row| row.kl.is_some_and(|kl| !kl.is_nan()));
        measured.min_by(|a, b| a.kl.unwrap_or(f64::NAN).total_cmp(&b.kl.unwrap_or(f64::NAN)))
    }

    /// Returns the difference of `name` from `other`, its KL less the other's, with its standard error, and true if it is no
    /// chance.
    pub fn difference(&self, name: &str, other: &str) -> Option<(f64, f64, bool)> {
        let of = |pair: &ComparePair, sign: f64| {
            (sign * pair.kl_difference, pair.kl_difference_se, pair.better.is_some())
        };
        self.pairs.iter().find_map(|pair| match (pair.a.as_str(), pair.b.as_str()) {
            (a, b) if (a, b) == (name, other) => Some(of(pair, 1.0)),
            (a, b) if (a, b) == (other, name) => Some(of(pair, -1.0)),
            _ => None,
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use mantissa_eval::stats::Sum;

    use super::*;

    /// A row whose windows have these KLs, one token each.
    fn row(name: &str, kls: &[f32]) -> CompareRow {
        let window = |kl: &f32| {
            let mut sum = Sum::default();
            sum.add(f64::from(*kl));
            WindowResult { kl: sum, kl_positions: vec![*kl], ..WindowResult::default() }
        };
        let windows: Vec<WindowResult> = kls.iter().map(window).collect();
        let kl = kls.iter().map(|kl| f64::from(*kl)).sum::<f64>() / kls.len() as f64;
        let failed = CompareRow::failed(name.into(), String::new(), 1.0);
        CompareRow { kl: Some(kl), error: None, windows: vec![windows], ..failed }
    }

    #[test]
    fn better_is_said_only_where_the_windows_agree() {
        // Differences between windows are large, but `b` loses .1 more in each.
        let a = row("a", &[0.1, 0.9, 0.5, 0.2, 0.7]);
        let b = row("b", &[0.21, 1.0, 0.59, 0.31, 0.79]);
        // As far from `a` on average, but not in each window.
        let c = row("c", &[0.9, 0.2, 0.7, 0.6, 0.5]);
        let broken = CompareRow::failed("d".into(), "no".into(), 0.0);
        let (pairs, critical) = pairs(&[a, b, broken, c]);
        let better: Vec<_> =
            pairs.iter().map(|pair| (pair.a.as_str(), pair.b.as_str(), pair.better.as_deref())).collect();
        assert_eq!(better, [("a", "b", Some("a")), ("a", "c", None), ("b", "c", None)]);
        assert!((pairs[0].kl_difference + 0.1).abs() < 1e-6 && pairs[0].kl_difference_se < 0.01);
        // Three pairs, four degrees of freedom: a two-sided 5/3 %.
        assert!(critical.is_some_and(|critical| (critical - 3.961).abs() < 1e-2), "{critical:?}");
    }

    #[test]
    fn one_window_decides_nothing() {
        let (pairs, critical) = pairs(&[row("a", &[0.1]), row("b", &[0.9])]);
        assert_eq!((pairs.len(), critical), (1, None));
        assert_eq!(pairs[0].better, None);
    }
}
