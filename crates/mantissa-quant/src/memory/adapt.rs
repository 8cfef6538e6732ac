//! Measures that lower the peak memory of a plan without changing its output.

use crate::calibrate::Limits;
use crate::plan::Plan;

impl Plan {
    /// Lowers the predicted peak until `fits` accepts it, in this order: calibration states go to a temporary file; the
    /// number of threads is halved down to one. A measure that does not lower the peak is left out. Returns the plan with
    /// the measures taken, in words; the peak may still not fit. `verified` is true if the output is read back.
    #[must_use]
    pub fn within_memory(mut self, verified: bool, fits: impl Fn(u64) -> bool) -> (Self, Vec<String>) {
        let full = self.limits();
        let mut peak = self.peak_bytes(verified);
        let mut taken = full;
        for Limits { threads, states, .. } in full.smaller() {
            if fits(peak) {
                break;
            }
            // States stay in memory if a file does not help, whatever the number of threads.
            let states = if threads == taken.threads { states } else { taken.states };
            (self.options.threads, self.options.states_in_memory) = (threads, states);
            let lower = self.peak_bytes(verified);
            if lower < peak {
                (peak, taken) = (lower, Limits { threads, states, ..full });
            } else {
                (self.options.threads, self.options.states_in_memory) = (taken.threads, taken.states);
            }
        }
        (self, taken.given_up(full))
    }
}
