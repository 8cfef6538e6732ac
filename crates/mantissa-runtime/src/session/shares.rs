//! Shares of time by owner: the prompt of one owner does not hold up what others generate.
//!
//! A pass that computes a chunk of a prompt takes many times as long as one that only generates, and everybody in it waits.
//! So owners are queued fairly ([`Tags`]): a tag advances by the time that the owner's rows take, and a prompt waits as long
//! as its owner's tag is beyond the tag of another owner at work.

use crate::fair::Tags;

/// Part of the new time in the mean time of a pass that only generates.
const NEW: f64 = 0.1;

/// Who computes what in a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rows {
    pub(super) owner: u64,
    /// Each level of priority doubles the weight.
    pub(super) priority: i32,
    pub(super) tokens: usize,
    /// True for rows of a prompt.
    pub(super) prompt: bool,
}

/// Time that owners have had.
#[derive(Debug, Default)]
pub(super) struct Shares {
    tags: Tags<u64>,
    /// Mean time of passes that only generate, in seconds.
    generating: f64,
}

impl Shares {
    /// True if a prompt of `owner` waits for one of the other `owners` at work.
    pub(super) fn defers(&self, owner: u64, owners: &[u64]) -> bool {
        owners.iter().any(|other| *other != owner && self.tags.get(other) < self.tags.get(&owner))
    }

    /// Charges a pass of so many seconds. Rows that generate share the time of a pass without prompts, prompts the rest.
    pub(super) fn charge(&mut self, seconds: f64, rows: &[Rows]) {
        let sum = |prompt: bool| {
            rows.iter().filter(|row| row.prompt == prompt).map(|row| row.tokens).sum::<usize>()
        };
        let (generated, prompts) = (sum(false), sum(true));
        if prompts == 0 && generated > 0 {
            let mean = if self.generating > 0.0 { self.generating } else { seconds };
            self.generating = mean + NEW * (seconds - mean);
        }
        let generating = match (generated, prompts) {
            (0, _) => 0.0,
            (_, 0) => seconds,
            _ => self.generating.min(seconds),
        };
        let first = self.tags.least(rows.iter().map(|row| &row.owner));
        for row in rows {
            let (time, all) =
                if row.prompt { (seconds - generating, prompts) } else { (generating, generated) };
            let weight = f64::from(row.priority.clamp(0, 30)).exp2();
            self.tags.charge(row.owner, time * row.tokens as f64 / all.max(1) as f64 / weight);
        }
        self.tags.advance(first);
        self.tags.forget_past();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(owner: u64, tokens: usize, prompt: bool) -> Rows {
        Rows { owner, priority: 0, tokens, prompt }
    }

    /// One owner generates, another one always has prompts: each gets half of the time.
    #[test]
    fn prompts_and_generation_share_time() {
        let mut shares = Shares::default();
        let mut times = [0.0; 2];
        for _ in 0..2000 {
            let defers = shares.defers(2, &[1]);
            let mut pass = vec![rows(1, 1, false)];
            times[0] += 1.0;
            let mut seconds = 1.0;
            if !defers {
                pass.push(rows(2, 512, true));
                times[1] += 20.0;
                seconds += 20.0;
            }
            shares.charge(seconds, &pass);
        }
        let ratio = times[0] / times[1];
        assert!((0.9..1.2).contains(&ratio), "{times:?}");
        // An owner alone never waits for itself, and one that was idle gains nothing by it.
        assert!(!shares.defers(2, &[2]) && !shares.defers(2, &[]));
        assert!(!shares.defers(3, &[1]));
    }

    #[test]
    fn a_priority_doubles_the_share() {
        let mut shares = Shares::default();
        let mut prompts = 0;
        for _ in 0..3000 {
            let mut pass = vec![rows(1, 1, false)];
            if !shares.defers(2, &[1]) {
                pass.push(Rows { priority: 1, ..rows(2, 100, true) });
                prompts += 1;
            }
            shares.charge(if pass.len() == 2 { 11.0 } else { 1.0 }, &pass);
        }
        // 10 of 15 in time.
        assert!((560..640).contains(&prompts), "{prompts}");
    }
}
