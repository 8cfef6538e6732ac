//! Learning rate schedules.

use std::f64::consts::PI;

/// Shape of the learning rate after warm-up.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Decay {
    /// Constant at the peak.
    Constant,
    /// Cosine decay to `min_ratio` of the peak at the last step (Loshchilov & Hutter 2017, "SGDR", arXiv
    /// 1608.03983, without restarts).
    Cosine {
        /// Final rate as a share of the peak.
        min_ratio: f64,
    },
    /// Constant, then linear decay to `min_ratio` of the peak in the last `decay_steps`: warmup-stable-decay
    /// (Hu et al. 2024, "MiniCPM", arXiv 2404.06395, section 4).
    Stable {
        /// Number of decay steps.
        decay_steps: u64,
        /// Final rate as a share of the peak.
        min_ratio: f64,
    },
    /// Linear decay to `min_ratio` of the peak at the last step.
    Linear {
        /// Final rate as a share of the peak.
        min_ratio: f64,
    },
}

/// Learning rate schedule.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Schedule {
    /// Peak learning rate.
    pub peak: f64,
    /// Steps of linear warm-up; the step after them has the peak rate.
    pub warmup_steps: u64,
    /// Total number of steps.
    pub total_steps: u64,
    /// Shape after the warm-up.
    pub decay: Decay,
}

impl Schedule {
    /// Returns the rate of step `step`, from 0. Step `total_steps - 1` has the final rate; later steps keep
    /// it.
    pub fn rate(&self, step: u64) -> f64 {
        if step < self.warmup_steps {
            return self.peak * (step + 1) as f64 / (self.warmup_steps + 1) as f64;
        }
        let last = self.total_steps.saturating_sub(1).max(self.warmup_steps);
        let step = step.min(last);
        // Progress from 0 at the end of warm-up to 1 at the last step.
        let share = |from: u64| {
            if last > from { step.saturating_sub(from) as f64 / (last - from) as f64 } else { 1.0 }
        };
        let factor = match self.decay {
            Decay::Constant => 1.0,
            Decay::Linear { min_ratio } => 1.0 - (1.0 - min_ratio) * share(self.warmup_steps),
            Decay::Cosine { min_ratio } => {
                let cosine = 0.5 * (1.0 + (PI * share(self.warmup_steps)).cos());
                min_ratio + (1.0 - min_ratio) * cosine
            }
            Decay::Stable { decay_steps, min_ratio } => {
                let from = last.saturating_sub(decay_steps).max(self.warmup_steps);
                if step <= from && decay_steps < last { 1.0 } else { 1.0 - (1.0 - min_ratio) * share(from) }
            }
        };
        self.peak * factor
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rates(decay: Decay, warmup_steps: u64, total_steps: u64) -> Vec<f64> {
        let schedule = Schedule { peak: 8.0, warmup_steps, total_steps, decay };
        (0..total_steps + 1).map(|step| schedule.rate(step)).collect()
    }

    #[test]
    fn rates_of_every_kind() {
        assert_eq!(rates(Decay::Constant, 3, 5), [2.0, 4.0, 6.0, 8.0, 8.0, 8.0]);
        assert_eq!(rates(Decay::Linear { min_ratio: 0.0 }, 1, 6), [4.0, 8.0, 6.0, 4.0, 2.0, 0.0, 0.0]);
        let cosine = rates(Decay::Cosine { min_ratio: 0.25 }, 0, 5);
        assert_eq!((cosine[0], cosine[2], cosine[4], cosine[5]), (8.0, 5.0, 2.0, 2.0));
        let stable = Decay::Stable { decay_steps: 2, min_ratio: 0.0 };
        assert_eq!(rates(stable, 1, 6), [4.0, 8.0, 8.0, 8.0, 4.0, 0.0, 0.0]);
    }

    #[test]
    fn short_runs_have_rates_too() {
        for decay in [
            Decay::Constant,
            Decay::Linear { min_ratio: 0.1 },
            Decay::Cosine { min_ratio: 0.1 },
            Decay::Stable { decay_steps: 5, min_ratio: 0.1 },
        ] {
            for (warmup, total) in [(0, 0), (0, 1), (1, 1), (5, 2), (2, 3)] {
                let all = rates(decay, warmup, total);
                assert!(
                    all.iter().all(|rate| (0.0..=8.0).contains(rate)),
                    "{decay:?} {warmup} {total}: {all:?}"
                );
            }
        }
    }
}
