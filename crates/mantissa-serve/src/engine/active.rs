//! A job at work.

use std::time::Instant;

use mantissa_runtime::{Detached, SequenceId};

use super::job::{Pending, Progress, Update};
use crate::metrics::EngineMetrics;

/// A job at work.
pub(super) struct Active {
    pub(super) id: SequenceId,
    pub(super) pending: Pending,
    pub(super) number: u64,
    pub(super) begun: Instant,
    /// Time of the first and the last token.
    pub(super) first: Option<Instant>,
    pub(super) last: Instant,
    /// Tokens of the prompt and generated ones of this run; the first ones of a job begun anew were reported before.
    pub(super) scored: usize,
    pub(super) made: usize,
    /// Tokens of the prompt that were not computed.
    pub(super) cached: usize,
    /// Tokens of the prompt that were reported as computed.
    pub(super) computed: Option<usize>,
    /// Generated tokens that were charged to the client.
    pub(super) charged: usize,
    /// The sequence, while it has no place.
    pub(super) detached: Option<Detached>,
}

impl Active {
    /// Reports that `processed` tokens of the prompt have been computed.
    pub(super) fn report_progress(&mut self, processed: usize) {
        let time_ms = u64::try_from(self.begun.elapsed().as_millis()).unwrap_or(u64::MAX);
        let total = self.pending.job.request.prompt.len();
        self.computed = Some(processed);
        self.pending.send(Update::Progress(Progress { total, cache: self.cached, processed, time_ms }));
    }

    /// Counts a token that was generated at time `now`.
    pub(super) fn take(&mut self, token: u32, now: Instant, metrics: &EngineMetrics) {
        let (since, histogram) = match self.first {
            None => (self.pending.arrived, &metrics.first_token_seconds),
            Some(_) => (self.last, &metrics.token_seconds),
        };
        histogram.observe(now.duration_since(since).as_secs_f64());
        self.first.get_or_insert(now);
        self.last = now;
        self.pending.reported.tokens.push(token);
        metrics.generated_tokens.inc();
    }
}
