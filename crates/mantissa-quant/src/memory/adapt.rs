//! Measures that lower the peak memory of a plan without changing its output.

use crate::calibrate::Limits;
use crate::plan::Plan;

impl Plan {
    /// Lowers the predicted peak until `fits` accepts it, in this order: calibration states go to a temporary file; the
    /// number of threads is halved down to one. A measure that does not lower the peak is left out. Returns the
    /// measures taken, in words; the peak may still not fit. `verified` is true if the output is read back.
    pub fn adapt_memory(&mut self, verified: bool, fits: impl Fn(u64) -> bool) -> Vec<String> {
        let threads = self.options.threads;
        let halves = std::iter::successors(Some(threads / 2), |n| Some(n / 2)).take_while(|n| *n > 0);
        let spilled = Limits { threads, states: 0 };
        let steps = std::iter::once(spilled).chain(halves.map(|threads| Limits { threads, states: 0 }));
        let mut peak = self.peak_bytes(verified);
        let mut taken = self.limits();
        for Limits { threads, states } in steps {
            if fits(peak) {
                break;
            }
            // States stay in memory if a file does not help, whatever the number of threads.
            let states = if threads == taken.threads { states } else { taken.states };
            (self.options.threads, self.options.states_in_memory) = (threads, states);
            let lower = self.peak_bytes(verified);
            if lower < peak {
                (peak, taken) = (lower, Limits { threads, states });
            } else {
                (self.options.threads, self.options.states_in_memory) = (taken.threads, taken.states);
            }
        }
        let on_disk = (taken.states == 0).then(|| "calibration states in a temporary file".to_owned());
        let fewer = (taken.threads < threads).then(|| format!("{} of {threads} threads", taken.threads));
        on_disk.into_iter().chain(fewer).collect()
    }
}
