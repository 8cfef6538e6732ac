//! Loss scaling for fp16 (Micikevicius et al. 2018, "Mixed Precision Training", arXiv 1710.03740, section
//! 3.2): the loss is multiplied by a scale so that small gradients do not underflow, and gradients are
//! divided by it. If a gradient overflows, the step is skipped and the scale lowered. Two update rules,
//! bit-exact: `torch.amp.GradScaler` and Megatron-LM's `DynamicGradScaler`.

use std::cmp::Ordering;

use serde::{Deserialize, Serialize};

/// Event of the loss scale at the end of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ScaleEvent {
    /// A gradient overflowed: the step was skipped and the scale lowered.
    Lowered,
    /// A gradient overflowed: the step was skipped; the scale stays, within Megatron-LM's hysteresis.
    Overflow,
    /// The scale grew after steps without an overflow.
    Raised,
}

/// Rule for growing and shrinking the scale.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ScalingRule {
    /// `torch.amp.GradScaler`: backs off at every overflow, grows after `interval` steps without one, and
    /// never grows past the largest f32.
    PyTorch,
    /// Megatron-LM: backs off only after `hysteresis` overflows since the last growth, and not below
    /// `min_scale`.
    Megatron {
        /// Overflows until the scale backs off; 1 backs off at the first.
        hysteresis: u32,
        /// Minimum scale.
        min_scale: f32,
    },
}

/// Constants of loss scaling.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScalingOptions {
    /// Update rule.
    pub rule: ScalingRule,
    /// Initial scale.
    pub initial: f32,
    /// Growth factor.
    pub growth: f32,
    /// Backoff factor after an overflow.
    pub backoff: f32,
    /// Steps without an overflow before the scale grows.
    pub interval: u32,
}

impl ScalingOptions {
    /// PyTorch's defaults: 2^16, doubled after 2000 good steps, halved at each overflow.
    pub const PYTORCH: Self = ScalingOptions {
        rule: ScalingRule::PyTorch,
        initial: 65_536.0,
        growth: 2.0,
        backoff: 0.5,
        interval: 2000,
    };

    /// Megatron-LM's defaults: 2^32, doubled after 1000 good steps, halved from the second overflow after a
    /// growth on, at least 1.
    pub const MEGATRON: Self = ScalingOptions {
        rule: ScalingRule::Megatron { hysteresis: 2, min_scale: 1.0 },
        initial: 4_294_967_296.0,
        growth: 2.0,
        backoff: 0.5,
        interval: 1000,
    };
}

/// Options with their names.
pub const SCALING_OPTIONS: [(&str, ScalingOptions); 2] =
    [("pytorch", ScalingOptions::PYTORCH), ("megatron", ScalingOptions::MEGATRON)];

/// Dynamic loss scale; its [`state`](Self::state) goes into checkpoints.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossScaler {
    options: ScalingOptions,
    scale: f32,
    /// Steps since the last change or overflow.
    growth_tracker: u32,
    /// Overflows left until the scale backs off (Megatron).
    hysteresis_tracker: i64,
}

impl LossScaler {
    /// Starts at the initial scale.
    pub fn new(options: ScalingOptions) -> Self {
        let hysteresis_tracker = match options.rule {
            ScalingRule::PyTorch => 0,
            ScalingRule::Megatron { hysteresis, .. } => i64::from(hysteresis),
        };
        LossScaler { options, scale: options.initial, growth_tracker: 0, hysteresis_tracker }
    }

    /// Restores a scaler from its [`state`](Self::state).
    pub fn resume(
        options: ScalingOptions,
        (scale, growth_tracker, hysteresis_tracker): (f32, u32, i64),
    ) -> Self {
        LossScaler { options, scale, growth_tracker, hysteresis_tracker }
    }

    /// Returns scale, growth tracker and hysteresis tracker.
    pub fn state(&self) -> (f32, u32, i64) {
        (self.scale, self.growth_tracker, self.hysteresis_tracker)
    }

    /// Returns the factor of the loss.
    pub fn scale(&self) -> f32 {
        self.scale
    }

    /// True if the scale cannot back off further, so that skipping more steps is useless.
    pub fn at_floor(&self) -> bool {
        let floor = match self.options.rule {
            ScalingRule::PyTorch => f32::MIN_POSITIVE,
            ScalingRule::Megatron { min_scale, .. } => min_scale,
        };
        self.scale <= floor
    }

    /// Updates the scale after a step; `overflow` is true if the step was skipped. Returns what happened to it.
    pub fn update(&mut self, overflow: bool) -> Option<ScaleEvent> {
        let before = self.scale;
        self.change(overflow);
        match (overflow, self.scale.total_cmp(&before)) {
            (_, Ordering::Greater) => Some(ScaleEvent::Raised),
            (_, Ordering::Less) => Some(ScaleEvent::Lowered),
            (true, Ordering::Equal) => Some(ScaleEvent::Overflow),
            (false, Ordering::Equal) => None,
        }
    }

    fn change(&mut self, overflow: bool) {
        let ScalingOptions { rule, growth, backoff, interval, .. } = self.options;
        if overflow {
            self.growth_tracker = 0;
            match rule {
                ScalingRule::PyTorch => self.scale *= backoff,
                ScalingRule::Megatron { min_scale, .. } => {
                    self.hysteresis_tracker -= 1;
                    if self.hysteresis_tracker <= 0 {
                        self.scale = (self.scale * backoff).max(min_scale);
                    }
                }
            }
            return;
        }
        self.growth_tracker += 1;
        if self.growth_tracker < interval {
            return;
        }
        self.growth_tracker = 0;
        let grown = self.scale * growth;
        if grown.is_finite() {
            self.scale = grown;
        }
        if let ScalingRule::Megatron { hysteresis, .. } = rule {
            self.hysteresis_tracker = i64::from(hysteresis);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the scale before each of `steps` steps (from 1), of which those in `overflows` overflow.
    fn trace(options: ScalingOptions, steps: u32, overflows: &[u32]) -> Vec<f32> {
        let mut scaler = LossScaler::new(options);
        (1..=steps)
            .map(|step| {
                let scale = scaler.scale();
                scaler.update(overflows.contains(&step));
                scale
            })
            .collect()
    }

    /// Experiment E2b: overflows at steps 3, 4 and 10, growth after 4 good steps. Traces derived by hand from
    /// the two rules.
    #[test]
    fn traces_of_both_rules() {
        let options = ScalingOptions { initial: 1024.0, interval: 4, ..ScalingOptions::PYTORCH };
        let found = trace(options, 16, &[3, 4, 10]);
        // 3 and 4 halve; 5-8 are good: doubled before 9; 10 halves; 11-14 are good: doubled before 15.
        let expected = [
            1024.0, 1024.0, 1024.0, 512.0, 256.0, 256.0, 256.0, 256.0, 512.0, 512.0, 256.0, 256.0, 256.0,
            256.0, 512.0, 512.0,
        ];
        assert_eq!(found, expected);
        let options = ScalingOptions { initial: 1024.0, interval: 4, ..ScalingOptions::MEGATRON };
        let found = trace(options, 16, &[3, 4, 10]);
        // 3 is tolerated, 4 halves; 5-8 are good: doubled before 9 and the hysteresis refilled; 10 is
        // tolerated; 11-14 are good.
        let expected = [
            1024.0, 1024.0, 1024.0, 1024.0, 512.0, 512.0, 512.0, 512.0, 1024.0, 1024.0, 1024.0, 1024.0,
            1024.0, 1024.0, 2048.0, 2048.0,
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn without_hysteresis_left_every_overflow_backs_off() {
        let options = ScalingOptions { initial: 8.0, ..ScalingOptions::MEGATRON };
        // No growth refills the hysteresis, and the minimum holds.
        assert_eq!(trace(options, 7, &[1, 2, 3, 4, 5, 6]), [8.0, 8.0, 4.0, 2.0, 1.0, 1.0, 1.0]);
    }

    #[test]
    fn growth_past_the_largest_f32_is_left_out() {
        let options = ScalingOptions { initial: 2f32.powi(127), interval: 1, ..ScalingOptions::PYTORCH };
        assert_eq!(trace(options, 3, &[]), [2f32.powi(127); 3]);
        assert!(!LossScaler::new(options).at_floor());
    }

    #[test]
    fn a_restored_state_continues() {
        let options = ScalingOptions { initial: 64.0, interval: 3, ..ScalingOptions::MEGATRON };
        for cut in 0..12 {
            let overflow = |step: u32| step % 5 == 2;
            let mut whole = LossScaler::new(options);
            (0..12).for_each(|step| {
                let _ = whole.update(overflow(step));
            });
            let mut first = LossScaler::new(options);
            (0..cut).for_each(|step| {
                let _ = first.update(overflow(step));
            });
            let mut second = LossScaler::resume(options, first.state());
            (cut..12).for_each(|step| {
                let _ = second.update(overflow(step));
            });
            assert_eq!(second, whole);
        }
    }
}
