//! Observers: choose the magnitude of an input that the largest code represents.

use std::collections::BTreeMap;

use mantissa_model::{LinearInput, LinearKind};
use mantissa_num::{Given, Scheme, StaticScale};

use super::{affine, scale};
use crate::calibrate::{CalibrateError, CalibratedLayer, Calibration, Sample, Tick};

/// Rule for the magnitude that the largest code represents.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Observer {
    /// Amax ("max" calibration of ModelOpt, llm-compressor's static minmax observer).
    #[default]
    Max,
    /// Percentile of the magnitudes of up to 2048 tokens.
    Percentile(Percentile),
    /// The ratio 1, 0.975, …, 0.3 of the amax with the least squared error of these values.
    Mse,
    /// Threshold of least KL divergence between these magnitudes and their clipped and rounded values, on a histogram
    /// of 2048 bins (Migacz 2017, "8-bit Inference with TensorRT", GTC, slides 20 to 38).
    Kl,
    /// Larger end of a moving average of minimum and maximum over windows, with weight 0.01 (Jacob et al. 2018, arXiv
    /// 1712.05877, section 3.1; PyTorch's constant).
    MovingAverage,
}

/// Percentile in millionths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Percentile(u32);

impl Percentile {
    /// Returns a percentile from 50 to 100; `None` outside.
    pub fn of_percent(percent: f64) -> Option<Self> {
        (50.0..=100.0).contains(&percent).then(|| Percentile((percent * 1e4).round() as u32))
    }

    /// Returns the percentile in percent.
    pub fn percent(self) -> f64 {
        f64::from(self.0) / 1e4
    }

    /// Returns the percentile as a fraction of 1.
    fn part(self) -> f64 {
        f64::from(self.0) / 1e6
    }
}

impl Default for Percentile {
    /// 99.99 %.
    fn default() -> Self {
        Percentile(999_900)
    }
}

/// Observers by name.
pub const OBSERVERS: [(&str, Observer); 5] = [
    ("max", Observer::Max),
    ("percentile", Observer::Percentile(Percentile(999_900))),
    ("mse", Observer::Mse),
    ("kl", Observer::Kl),
    ("moving-average", Observer::MovingAverage),
];

/// Number of tokens that sampling observers keep.
pub(crate) const TOKENS: usize = 2048;

/// Number of ratios that [`Observer::Mse`] tries, 1/40 apart.
const RATIOS: u8 = 29;

/// Bins of the histogram of [`Observer::Kl`].
const BINS: usize = 2048;

/// Smallest number of bins that [`Observer::Kl`] keeps.
const FIRST: usize = 128;
/// Bins between thresholds that [`Observer::Kl`] tries.
const STEP: usize = 8;

/// Weight of a new window in [`Observer::MovingAverage`].
const AVERAGING: f32 = 0.01;

impl Observer {
    /// True if it keeps sampled tokens.
    pub(crate) fn samples(self) -> bool {
        matches!(self, Observer::Percentile(_) | Observer::Mse | Observer::Kl)
    }

    /// Runs the windows of `calibration` through `layer` and returns the magnitude of each input of its linear layers
    /// `kinds`. `scheme` returns the scheme of an input. With `through` the windows advance to the next layer.
    ///
    /// # Errors
    /// Errors of [`Calibration`].
    pub(crate) fn magnitudes<'s>(
        self,
        calibration: &mut Calibration<'_>,
        layer: &CalibratedLayer,
        (kinds, through): (impl IntoIterator<Item = LinearKind>, bool),
        scheme: impl Fn(LinearInput) -> Option<&'s Scheme>,
        tick: &mut Tick<'_>,
    ) -> Result<BTreeMap<LinearInput, f32>, CalibrateError> {
        match self {
            Observer::Max => calibration.peaks(layer, kinds, through, tick),
            Observer::MovingAverage => {
                let ranges =
                    calibration.fold(layer, kinds, through, tick, (|_| Range::default(), Range::follow))?;
                Ok(ranges.into_iter().map(|(input, range)| (input, range.magnitude())).collect())
            }
            _ => {
                let samples = calibration.samples(layer, kinds, TOKENS, through, tick)?;
                let magnitude = |(input, sample): (LinearInput, Sample)| {
                    let peak = sample.peaks.iter().fold(0f32, |all, peak| all.max(*peak));
                    let of = scheme(input).map(|scheme| self.of(scheme, &sample.x, sample.peaks.len(), peak));
                    (input, of.unwrap_or(peak))
                };
                Ok(samples.into_iter().map(magnitude).collect())
            }
        }
    }

    /// Runs the windows of `calibration` through `layer` as [`magnitudes`](Self::magnitudes), and returns the least and the
    /// greatest value of each input that codes of the asymmetric `scheme` represent. [`Observer::Kl`] chooses a
    /// magnitude only, and counts as [`Observer::Max`].
    ///
    /// # Errors
    /// Errors of [`Calibration`].
    pub(crate) fn ends(
        self,
        calibration: &mut Calibration<'_>,
        layer: &CalibratedLayer,
        (kinds, through): (impl IntoIterator<Item = LinearKind>, bool),
        scheme: &Scheme,
        tick: &mut Tick<'_>,
    ) -> Result<BTreeMap<LinearInput, [f32; 2]>, CalibrateError> {
        if matches!(self, Observer::Percentile(_) | Observer::Mse) {
            let samples = calibration.samples(layer, kinds, TOKENS, through, tick)?;
            let ends = |(input, sample): (LinearInput, Sample)| {
                (input, self.ends_of(scheme, &sample.x, sample.peaks.len()))
            };
            return Ok(samples.into_iter().map(ends).collect());
        }
        let weight = if self == Observer::MovingAverage { Some(AVERAGING) } else { None };
        let follow = move |range: &mut Range, x: &[f32]| range.follow_by(x, weight);
        let ranges = calibration.fold(layer, kinds, through, tick, (|_| Range::default(), follow))?;
        Ok(ranges.into_iter().map(|(input, range)| (input, range.0.unwrap_or_default())).collect())
    }

    /// Returns the ends of the values `x` (`[_, cols]`) that the codes of an asymmetric scheme represent.
    fn ends_of(self, scheme: &Scheme, x: &[f32], cols: usize) -> [f32; 2] {
        let mut range = Range::default();
        range.follow_by(x, None);
        let whole = range.0.unwrap_or_default();
        match self {
            Observer::Percentile(share) => {
                let mut sorted = x.to_vec();
                sorted.sort_unstable_by(f32::total_cmp);
                // The share that is left out, half of it at each end.
                let cut = ((1.0 - share.part()) / 2.0 * sorted.len() as f64) as usize;
                let ends = (sorted.get(cut), sorted.get(sorted.len().saturating_sub(1 + cut)));
                if let (Some(low), Some(high)) = ends { [*low, *high] } else { whole }
            }
            Observer::Mse => {
                let error = |ends: [f32; 2]| {
                    let mut values = x.to_vec();
                    let StaticScale { scale, zero } = affine(scheme, ends);
                    let given = Given { outer: Some(scale), zero, ..Given::default() };
                    let done =
                        mantissa_num::fake_quantize(scheme, &mut values, x.len() / cols.max(1), cols, given);
                    let squares = values.iter().zip(x).map(|(q, v)| f64::from(q - v).powi(2)).sum();
                    done.map_or(f64::INFINITY, |()| squares)
                };
                let tried = (0..RATIOS).map(|i| whole.map(|end| end * (1.0 - f32::from(i) / 40.0)));
                let best = tried.map(|ends| (ends, error(ends))).min_by(|a, b| a.1.total_cmp(&b.1));
                best.map_or(whole, |(ends, _)| ends)
            }
            _ => whole,
        }
    }

    /// Returns the magnitude that the largest code of `scheme` represents, for inputs `x` (`[_, cols]`) with amax
    /// `peak`.
    fn of(self, scheme: &Scheme, x: &[f32], cols: usize, peak: f32) -> f32 {
        match self {
            Observer::Max | Observer::MovingAverage => peak,
            Observer::Percentile(share) => percentile(x, share.part()).unwrap_or(peak),
            Observer::Mse => {
                let ratios = (0..RATIOS).map(|i| peak * (1.0 - f32::from(i) / 40.0));
                let error = |amax: f32| {
                    let mut values = x.to_vec();
                    let done = round(scheme, amax, &mut values, cols);
                    let squares = values.iter().zip(x).map(|(q, v)| f64::from(q - v).powi(2)).sum();
                    done.map_or(f64::INFINITY, |()| squares)
                };
                let best = ratios.map(|amax| (amax, error(amax))).min_by(|a, b| a.1.total_cmp(&b.1));
                best.map_or(peak, |(amax, _)| amax)
            }
            Observer::Kl => Histogram::new(x, peak).threshold(scheme),
        }
    }
}

/// Quantizes and dequantizes `values` (`[_, cols]`) with the largest code at `amax`.
fn round(
    scheme: &Scheme,
    amax: f32,
    values: &mut [f32],
    cols: usize,
) -> Result<(), mantissa_num::TensorError> {
    let given = Given { outer: Some(scale(scheme, amax)), ..Given::default() };
    mantissa_num::fake_quantize(scheme, values, values.len() / cols.max(1), cols, given)
}

/// Moving average of minimum and maximum.
#[derive(Clone, Copy, Debug, Default)]
struct Range(Option<[f32; 2]>);

impl Range {
    /// Adds a window. The first sets both ends; one without values (of an expert) changes nothing.
    fn follow(&mut self, x: &[f32]) {
        self.follow_by(x, Some(AVERAGING));
    }

    /// Adds a window with this weight, or takes the union with it.
    fn follow_by(&mut self, x: &[f32], weight: Option<f32>) {
        let Some(first) = x.first() else { return };
        let ends = x.iter().fold([*first; 2], |[low, high], v| [low.min(*v), high.max(*v)]);
        let old = self.0.unwrap_or(ends);
        self.0 = Some(match weight {
            Some(weight) => [0, 1].map(|i| old[i] + weight * (ends[i] - old[i])),
            None => [old[0].min(ends[0]), old[1].max(ends[1])],
        });
    }

    fn magnitude(self) -> f32 {
        self.0.map_or(0.0, |[low, high]| low.abs().max(high.abs()))
    }
}

/// Histogram of magnitudes from 0 to the peak, in [`BINS`] bins of equal width.
struct Histogram {
    peak: f32,
    counts: Vec<f64>,
}

impl Histogram {
    fn new(x: &[f32], peak: f32) -> Self {
        let mut counts = vec![0.0; BINS];
        for v in x {
            let at = f64::from(v.abs()) / f64::from(peak) * BINS as f64;
            // NaN if the peak is 0; the cast then gives bin 0.
            counts[(at as usize).min(BINS - 1)] += 1.0;
        }
        // Zeros do not count: they are exact under every range. The first bin gets the count of the second.
        counts[0] = counts[1];
        Histogram { peak, counts }
    }

    /// Returns the middle of bin `bin`.
    fn middle(&self, bin: usize) -> f32 {
        self.peak * (bin as f32 + 0.5) / BINS as f32
    }

    /// Returns the end of the bins to keep: of [`FIRST`], [`FIRST`] + [`STEP`], … the one of least
    /// [`divergence`](Self::divergence).
    fn threshold(&self, scheme: &Scheme) -> f32 {
        let end = |bins: usize| self.peak * bins as f32 / BINS as f32;
        let tried = (FIRST..=BINS).step_by(STEP).map(|bins| (bins, self.divergence(scheme, bins, end(bins))));
        let best = tried.min_by(|a, b| a.1.total_cmp(&b.1)).filter(|best| best.1.is_finite());
        best.map_or(self.peak, |(bins, _)| end(bins))
    }

    /// Returns `Σ p ln(p / q)`. `p` is the first `bins` bins, with all counts beyond added to the last. `q` is the
    /// quantized histogram of these bins alone: the count of each code, spread evenly over its non-empty bins.
    fn divergence(&self, scheme: &Scheme, bins: usize, amax: f32) -> f64 {
        let (kept, beyond) = self.counts.split_at(bins);
        let mut values: Vec<f32> = (0..bins).map(|bin| self.middle(bin)).collect();
        if round(scheme, amax, &mut values, bins).is_err() {
            return f64::INFINITY;
        }
        let outliers: f64 = beyond.iter().sum();
        let (total, inside): (f64, f64) = (self.counts.iter().sum(), kept.iter().sum());
        let (mut divergence, mut at) = (0.0, 0);
        while at < bins {
            let code = values[at..].iter().take_while(|v| **v == values[at]).count();
            let counts = &kept[at..at + code];
            let occupied = counts.iter().filter(|n| **n > 0.0).count().max(1);
            let q = counts.iter().sum::<f64>() / occupied as f64 / inside;
            for (i, n) in counts.iter().enumerate() {
                let n = n + if at + i + 1 == bins { outliers } else { 0.0 };
                if n > 0.0 {
                    // A last bin that holds only outliers has q = 0: the divergence is infinite.
                    let q = if counts[i] > 0.0 { q } else { 0.0 };
                    divergence += n / total * (n / total / q).ln();
                }
            }
            at += code;
        }
        if divergence.is_nan() { f64::INFINITY } else { divergence }
    }
}

/// Magnitude that the share `part` of the values stays below; `None` without values.
fn percentile(x: &[f32], part: f64) -> Option<f32> {
    let mut magnitudes: Vec<f32> = x.iter().map(|v| v.abs()).collect();
    let at = (magnitudes.len() as f64 * part) as usize;
    let at = at.min(magnitudes.len().checked_sub(1)?);
    Some(*magnitudes.select_nth_unstable_by(at, f32::total_cmp).1)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use mantissa_num::parse_activation;

    use super::*;

    #[test]
    fn observers_clip_outliers_and_nothing_else() {
        // A wave with one outlier in 40 000 values.
        let mut x: Vec<f32> = (0..40_000).map(|i| (i as f32 * 0.7).sin()).collect();
        x[17_003] = 9.0;
        for text in ["int8-tensor@static", "fp8-e4m3-tensor@static"] {
            let scheme = parse_activation(text).unwrap();
            let magnitude = |observer: Observer| observer.of(&scheme, &x, 100, 9.0);
            assert_eq!(magnitude(Observer::Max), 9.0);
            assert!((0.99..=1.0).contains(&magnitude(Observer::Percentile(Percentile::default()))), "{text}");
            let squares = |amax: f32| {
                let mut values = x.clone();
                round(&scheme, amax, &mut values, 100).unwrap();
                values.iter().zip(&x).map(|(q, v)| f64::from(q - v).powi(2)).sum::<f64>()
            };
            assert!(squares(magnitude(Observer::Mse)) <= squares(9.0), "{text}");
        }
        let int8 = parse_activation("int8-tensor@static").unwrap();
        assert!(Observer::Mse.of(&int8, &x, 100, 9.0) < 9.0);
        let percentile = Observer::Percentile(Percentile::default());
        assert_eq!(percentile.of(&int8, &[], 100, 3.0), 3.0);
    }

    #[test]
    fn a_percentile_is_the_one_given() {
        let int8 = parse_activation("int8-tensor@static").unwrap();
        let x: Vec<f32> = (0..1000).map(|i| if i % 2 == 0 { i as f32 } else { -(i as f32) }).collect();
        for (percent, expected) in [(50.0, 500.0), (90.0, 900.0), (99.9, 999.0), (100.0, 999.0)] {
            let share = Percentile::of_percent(percent).unwrap();
            assert_eq!(Observer::Percentile(share).of(&int8, &x, 10, 999.0), expected, "{percent}");
        }
        assert_eq!(Percentile::of_percent(99.99), Some(Percentile::default()));
        assert_eq!((Percentile::of_percent(49.9), Percentile::of_percent(f64::NAN)), (None, None));
    }

    /// Evenly distributed values are not clipped; the tails of a Gaussian are.
    #[test]
    fn kl_clips_tails_only() {
        let int8 = parse_activation("int8-tensor@static").unwrap();
        let even: Vec<f32> = (0..100_000).map(|i| (i as f32 + 0.5) / 100_000.0).collect();
        assert_eq!(Observer::Kl.of(&int8, &even, 100, 1.0), 1.0);
        // A Gaussian is clipped between three and five standard deviations, as known of entropy calibration.
        let normal: Vec<f32> = (0..200_000)
            .map(|i| {
                let word = |j: usize| {
                    f64::from(mantissa_num::round::random_u32(7, (2 * i + j) as u64)) / f64::from(u32::MAX)
                };
                let radius = (-2.0 * word(0).max(1e-12).ln()).sqrt();
                (radius * (std::f64::consts::TAU * word(1)).cos()) as f32
            })
            .collect();
        let peak = normal.iter().fold(0f32, |peak, v| peak.max(v.abs()));
        let found = Observer::Kl.of(&int8, &normal, 100, peak);
        assert!((3.0..=5.0).contains(&found), "{found}");
        // Ten outliers far away are cut and change little else.
        let mut far = normal.clone();
        far.extend((0..10).map(|i| 40.0 - i as f32));
        let found = Observer::Kl.of(&int8, &far, 10, 40.0);
        assert!((2.5..=6.0).contains(&found), "{found}");
        // Only zeros: no range, and no panic.
        assert_eq!(Observer::Kl.of(&int8, &[0.0; 8], 4, 0.0), 0.0);
    }

    #[test]
    fn the_moving_average_has_weight_one_hundredth() {
        let mut range = Range::default();
        range.follow(&[]);
        assert_eq!(range.magnitude(), 0.0);
        range.follow(&[1.0, -2.0]);
        range.follow(&[]);
        assert_eq!(range.magnitude(), 2.0);
        // -2 + 0.01 (-12 + 2), 1 + 0.01 (5 - 1).
        range.follow(&[5.0, -12.0, 0.0]);
        let [low, high] = range.0.unwrap();
        assert!((low + 2.1).abs() < 1e-6 && (high - 1.04).abs() < 1e-6);
        assert_eq!(range.magnitude(), -low);
    }
}
