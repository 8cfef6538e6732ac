//! Rotary position embedding (Su et al. 2021, "RoFormer"): inverse frequencies, their scaling for long contexts, and
//! tables.
//!
//! Frequencies follow transformers 5.23 (`modeling_rope_utils.py`) operation by operation in f32:
//! `theta^(2i/head_dim)` with the exponent divided in f32, its reciprocal, then the variant's own steps; the
//! boundaries of YaRN are f64, as in transformers. Powers, sines and cosines are evaluated in f64 and rounded to f32,
//! which makes them correctly rounded where torch is within one unit in the last place. The angle is `position ·
//! inv_freq`, one f32 product; cosines and sines are then multiplied by the attention factor.
//!
//! Tables: `cos` and `sin` `[positions, head_dim / 2]`, for the half-split layout.

use std::f64::consts::PI;

/// Rotary parameters: base and scaling.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Base of the geometric series of wavelengths.
    pub theta: f64,
    /// Scaling of the series for long contexts.
    pub scaling: RopeScaling,
}

/// Variants of `rope_type`.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum RopeScaling {
    /// No scaling.
    Default,
    /// All frequencies divided by `factor` (Chen et al. 2023, "Position Interpolation").
    Linear {
        /// Ratio of the long to the trained context.
        factor: f64,
    },
    /// Long wavelengths divided by `factor`, short ones kept, those between blended (Llama 3.1).
    Llama3 {
        /// Divisor of the low frequencies.
        factor: f64,
        /// Wavelengths above `original_context / low_freq_factor` are divided.
        low_freq_factor: f64,
        /// Wavelengths below `original_context / high_freq_factor` are kept.
        high_freq_factor: f64,
        /// Context of the first training.
        original_context: usize,
    },
    /// Only the first pairs are rotated, with the frequencies that they have in the whole head (Gemma 4).
    Proportional {
        /// Rotated pairs.
        rotated: usize,
        /// Divisor of the frequencies.
        factor: f64,
    },
    /// Every frequency divided by its own factor (GGUF's `rope_freqs`, which stores Llama 3.1's scaling).
    Factors(Vec<f32>),
    /// Frequencies divided by searched factors, different ones beyond the original context (Ding et al. 2024,
    /// "LongRoPE").
    Long(LongRope),
    /// NTK-by-parts interpolation with a factor on the attention scores (Peng et al. 2023, "YaRN").
    Yarn(Yarn),
}

/// Parameters of [`RopeScaling::Yarn`], defaults filled in.
#[derive(Clone, Debug, PartialEq)]
pub struct Yarn {
    /// Divisor of the interpolated frequencies.
    pub factor: f64,
    /// Rotations over the original context above which a dimension is kept.
    pub beta_fast: f64,
    /// Rotations below which it is interpolated.
    pub beta_slow: f64,
    /// True if the ramp's ends are rounded outwards to whole dimensions.
    pub truncate: bool,
    /// Context of the first training.
    pub original_context: usize,
    /// Factor of cosines and sines.
    pub attention_factor: f64,
    /// DeepSeek's parameter for the factor of attention scores; 0 if absent.
    pub mscale_all_dim: f64,
}

/// Parameters of [`RopeScaling::Long`].
#[derive(Clone, Debug, PartialEq)]
pub struct LongRope {
    /// Divisors if no sequence is longer than the original context.
    pub short: Vec<f32>,
    /// Divisors if sequences may be longer.
    pub long: Vec<f32>,
    /// Context of the first training.
    pub original_context: usize,
    /// Factor of cosines and sines.
    pub attention_factor: f64,
}

/// Computes YaRN's `0.1 · mscale · ln(factor) + 1` (eq. 22 of the paper with `mscale` 1); 1 without scaling.
pub fn yarn_mscale(factor: f64, mscale: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 }
}

impl Rope {
    /// Inverse frequencies in radians per position, `[head_dim / 2]`, for sequences within the original context.
    pub fn inverse_frequencies(&self, head_dim: usize) -> Vec<f32> {
        self.frequencies(head_dim, 0)
    }

    /// Computes the inverse frequencies for sequences of up to `positions`. LongRoPE uses one of its two sets of
    /// factors for all sequences that are planned together, as in vLLM.
    fn frequencies(&self, head_dim: usize, positions: usize) -> Vec<f32> {
        let powers = (0..head_dim / 2).map(|i| {
            let exponent = (2 * i) as f32 / head_dim as f32;
            f64::from(self.theta as f32).powf(f64::from(exponent)) as f32
        });
        match &self.scaling {
            RopeScaling::Default => powers.map(|p| 1.0 / p).collect(),
            RopeScaling::Linear { factor } => powers.map(|p| 1.0 / p / *factor as f32).collect(),
            RopeScaling::Proportional { rotated, factor } => powers
                .enumerate()
                .map(|(i, p)| if i < *rotated { 1.0 / p / *factor as f32 } else { 0.0 })
                .collect(),
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
                let (low, high, context) = (*low_freq_factor, *high_freq_factor, *original_context as f64);
                powers.map(|p| llama3_frequency(1.0 / p, *factor as f32, low, high, context)).collect()
            }
            RopeScaling::Long(long) => {
                let factors = if positions > long.original_context { &long.long } else { &long.short };
                powers.zip(factors).map(|(p, f)| 1.0 / (f * p)).collect()
            }
            RopeScaling::Factors(factors) => powers.zip(factors).map(|(p, f)| 1.0 / p / f).collect(),
            RopeScaling::Yarn(yarn) => {
                let (low, high) = yarn.ramp(self.theta, head_dim);
                let ramp = (0..head_dim / 2)
                    .map(|i| ((i as f32 - low as f32) / (high - low) as f32).clamp(0.0, 1.0));
                powers.zip(ramp).map(|(power, ramp)| yarn.frequency(power, ramp)).collect()
            }
        }
    }

    /// Factor of cosines and sines.
    pub fn attention_factor(&self) -> f32 {
        match &self.scaling {
            RopeScaling::Yarn(yarn) => yarn.attention_factor as f32,
            RopeScaling::Long(long) => long.attention_factor as f32,
            _ => 1.0,
        }
    }

    /// Computes cosines and sines of `positions` positions from 0, each `[positions, head_dim / 2]`, into `cos` and
    /// `sin`.
    ///
    /// # Panics
    /// If a slice is shorter.
    pub fn fill_tables(&self, head_dim: usize, positions: usize, cos: &mut [f32], sin: &mut [f32]) {
        let frequencies = self.frequencies(head_dim, positions);
        let factor = self.attention_factor();
        for position in 0..positions {
            for (i, frequency) in frequencies.iter().enumerate() {
                let angle = f64::from(position as f32 * frequency);
                let at = position * frequencies.len() + i;
                cos[at] = angle.cos() as f32 * factor;
                sin[at] = angle.sin() as f32 * factor;
            }
        }
    }
}

fn llama3_frequency(frequency: f32, factor: f32, low: f64, high: f64, context: f64) -> f32 {
    let wavelength = (2.0 * PI) as f32 / frequency;
    if wavelength > (context / low) as f32 {
        return frequency / factor;
    }
    if wavelength < (context / high) as f32 {
        return frequency;
    }
    let smooth = (context as f32 / wavelength - low as f32) / (high - low) as f32;
    (1.0 - smooth) * frequency / factor + smooth * frequency
}

impl Yarn {
    /// First and last dimension of the ramp from kept to interpolated frequencies.
    fn ramp(&self, theta: f64, head_dim: usize) -> (f64, f64) {
        let dimension = |rotations: f64| {
            let context = self.original_context as f64;
            (head_dim as f64 * (context / (rotations * 2.0 * PI)).ln()) / (2.0 * theta.ln())
        };
        let (mut low, mut high) = (dimension(self.beta_fast), dimension(self.beta_slow));
        if self.truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        (low, high) = (low.max(0.0), high.min(head_dim as f64 - 1.0));
        // As in the reference: a step instead of a division by zero.
        (low, if low == high { high + 0.001 } else { high })
    }

    fn frequency(&self, power: f32, ramp: f32) -> f32 {
        let kept = 1.0 - ramp;
        1.0 / (self.factor as f32 * power) * (1.0 - kept) + 1.0 / power * kept
    }
}

/// Brings the values of each adjacent pair half of `to` apart: the first values of all pairs, then the second ones.
pub(crate) fn split_pairs(pairs: &[f32], to: &mut [f32]) {
    let (first, second) = to.split_at_mut(to.len() / 2);
    for ((pair, first), second) in pairs.chunks_exact(2).zip(first).zip(second) {
        (*first, *second) = (pair[0], pair[1]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_frequencies_are_a_geometric_series() {
        let rope = Rope { theta: 10000.0, scaling: RopeScaling::Default };
        let frequencies = rope.inverse_frequencies(8);
        assert_eq!(frequencies, [1.0, 0.1, 0.01, 0.001]);
        let (mut cos, mut sin) = ([0.0; 8], [0.0; 8]);
        rope.fill_tables(8, 2, &mut cos, &mut sin);
        assert_eq!((cos[0], sin[0], cos[4], sin[4]), (1.0, 0.0, 1.0_f64.cos() as f32, 1.0_f64.sin() as f32));
    }

    #[test]
    fn llama3_divides_only_the_long_wavelengths() {
        let scaling = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_context: 8192,
        };
        let plain = Rope { theta: 5e5, scaling: RopeScaling::Default }.inverse_frequencies(128);
        let scaled = Rope { theta: 5e5, scaling }.inverse_frequencies(128);
        assert_eq!(plain[0], scaled[0]);
        assert_eq!(plain[63] / 8.0, scaled[63]);
        assert!(plain.iter().zip(&scaled).any(|(p, s)| *s < *p && *s > p / 8.0), "a blended band");
    }

    #[test]
    fn yarn_keeps_fast_and_interpolates_slow_dimensions() {
        let yarn = Yarn {
            factor: 4.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            truncate: true,
            original_context: 4096,
            attention_factor: yarn_mscale(4.0, 1.0),
            mscale_all_dim: 0.0,
        };
        let plain = Rope { theta: 1e4, scaling: RopeScaling::Default }.inverse_frequencies(128);
        let rope = Rope { theta: 1e4, scaling: RopeScaling::Yarn(yarn) };
        let scaled = rope.inverse_frequencies(128);
        assert_eq!((plain[0], plain[63] / 4.0), (scaled[0], scaled[63]));
        assert!((rope.attention_factor() - 1.138_629_4).abs() < 1e-6);
    }
}
