//! Number of tokens to propose: the one with the highest expected tokens per second, from the measured cost of
//! steps and the measured rate of acceptance.

use super::MOST;

/// Rows of a pass whose cost is measured.
const ROWS: usize = 64;
/// Weight of a new measurement.
const WEIGHT: f64 = 1.0 / 8.0;
/// Steps without a proposal after which one is tried although it should not pay.
const PROBE: u32 = 64;
/// Expected extra cost of a row that was never measured.
const ROW: f64 = 0.02;

/// Measured seconds of steps, by rows.
#[derive(Clone, Debug)]
pub(crate) struct Costs {
    seconds: [f64; ROWS],
    times: [u8; ROWS],
}

impl Default for Costs {
    fn default() -> Self {
        Costs { seconds: [0.0; ROWS], times: [0; ROWS] }
    }
}

impl Costs {
    /// Counts a step of `rows` rows that took `seconds`.
    pub(crate) fn record(&mut self, rows: usize, seconds: f64) {
        let (Some(held), Some(times)) = (self.seconds.get_mut(rows), self.times.get_mut(rows)) else {
            return;
        };
        *held = match *times {
            0 => seconds,
            // The first steps of a shape also fill caches and grow buffers.
            1..4 => held.min(seconds),
            _ => *held + (seconds - *held) * WEIGHT,
        };
        *times = times.saturating_add(1);
    }

    /// Expected seconds of a step of `rows` rows; `None` before the first measurement of fewer or as many.
    fn expected(&self, rows: usize) -> Option<f64> {
        let known = (0..=rows.min(ROWS - 1)).rev().find(|rows| self.times[*rows] > 0)?;
        Some(self.seconds[known] * (1.0 + ROW * (rows - known) as f64))
    }
}

/// Rates of acceptance of one sequence, by the length of the match that proposals come from.
#[derive(Clone, Debug)]
pub(crate) struct Trust {
    rates: [f64; 6],
    unused: u32,
}

impl Default for Trust {
    fn default() -> Self {
        Trust { rates: [0.2, 0.4, 0.6, 0.75, 0.9, 0.7], unused: 0 }
    }
}

/// Origin of proposals, for their rate: the length of a match, or a draft model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    Match(usize),
    Draft,
}

impl Origin {
    fn index(self) -> usize {
        match self {
            Origin::Match(0..=1) => 0,
            Origin::Match(2) => 1,
            Origin::Match(3) => 2,
            Origin::Match(4..=7) => 3,
            Origin::Match(_) => 4,
            Origin::Draft => 5,
        }
    }
}

impl Trust {
    /// Returns the number of tokens to propose, at most `most`, in a step that computes `rows` rows without them.
    /// `plain` are the costs of steps without proposals, `costs` of those with.
    pub(crate) fn proposals(
        &mut self,
        origin: Origin,
        rows: usize,
        most: usize,
        plain: &Costs,
        costs: &Costs,
    ) -> usize {
        let Some(alone) = plain.expected(rows) else { return 0 };
        let (rate, mut tokens, mut best) = (self.rates[origin.index()], 1.0, (1.0 / alone, 0));
        let mut chance = 1.0;
        for n in 1..=most.min(MOST) {
            chance *= rate;
            tokens += chance;
            let extra = alone * ROW * n as f64;
            let seconds = costs.expected(rows + n).map_or(alone + extra, |seconds| seconds.max(alone));
            if tokens / seconds > best.0 {
                best = (tokens / seconds, n);
            }
        }
        self.unused = if best.1 > 0 { 0 } else { self.unused + 1 };
        if self.unused >= PROBE && most > 0 {
            self.unused = 0;
            return most.min(2);
        }
        best.1
    }

    /// Counts a step that accepted `accepted` of `proposed` tokens.
    pub(crate) fn record(&mut self, origin: Origin, proposed: usize, accepted: usize) {
        let rate = &mut self.rates[origin.index()];
        (0..accepted).for_each(|_| *rate += (1.0 - *rate) * WEIGHT);
        if accepted < proposed {
            *rate -= *rate * WEIGHT;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Costs that grow by `slope` of the first for each further row.
    fn costs(slope: f64) -> Costs {
        let mut costs = Costs::default();
        (1..20).for_each(|rows| (0..20).for_each(|_| costs.record(rows, 1.0 + slope * (rows - 1) as f64)));
        costs
    }

    #[test]
    fn proposals_that_fail_stop_and_are_tried_again_now_and_then() {
        let (costs, mut trust) = (costs(0.1), Trust::default());
        let (mut proposed, steps) = (0, 2000);
        for _ in 0..steps {
            let n = trust.proposals(Origin::Match(2), 1, 8, &costs, &costs);
            trust.record(Origin::Match(2), n, 0);
            proposed += n;
        }
        assert!((20..120).contains(&proposed), "{proposed}");
    }

    #[test]
    fn proposals_that_hold_are_long() {
        let (costs, mut trust) = (costs(0.05), Trust::default());
        for _ in 0..20 {
            let n = trust.proposals(Origin::Match(9), 1, 8, &costs, &costs);
            assert!(n >= 4);
            trust.record(Origin::Match(9), n, n);
        }
        assert_eq!(trust.proposals(Origin::Match(9), 1, 8, &costs, &costs), 8);
    }

    #[test]
    fn rows_that_cost_as_much_as_steps_are_not_worth_it() {
        let (costs, mut trust) = (costs(1.0), Trust::default());
        assert_eq!(trust.proposals(Origin::Match(9), 1, 8, &costs, &costs), 0);
        assert_eq!(trust.proposals(Origin::Match(9), 1, 8, &Costs::default(), &costs), 0);
    }
}
