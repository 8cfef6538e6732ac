//! Counts of conversations: what was read, what of it trains, and what is cut or left out.

/// Counts of lines and tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Lines that are not blank.
    pub lines: usize,
    /// Lines of messages, which a chat template rendered.
    pub rendered: usize,
    /// Lines that lost the end of their answers, because it lies beyond the length.
    pub cut: usize,
    /// Lines left out, because every token that the loss counts lies beyond the length.
    pub too_long: usize,
    /// Lines left out, because they have no answer: the loss counts none of their tokens at any length.
    pub without_targets: usize,
    /// Tokens beyond the length up to the last that the loss counts, of lines that were cut or are too long.
    pub lost_tokens: u64,
    /// Those of them that the loss counts.
    pub lost_answer_tokens: u64,
    /// Targets that the loss counts.
    pub answer_tokens: u64,
    /// Lines in which the loss counts a token that ends an answer: without any, a model does not learn to stop.
    pub ended: usize,
    /// Inputs of the longest line before it was cut: the least length that loses nothing.
    pub longest: usize,
}

impl Counts {
    /// Number of lines left out.
    pub fn left_out(&self) -> usize {
        self.too_long + self.without_targets
    }

    /// Adds the counts of other lines.
    pub(super) fn add(&mut self, other: Counts) {
        self.lines += other.lines;
        self.rendered += other.rendered;
        self.cut += other.cut;
        self.too_long += other.too_long;
        self.without_targets += other.without_targets;
        self.lost_tokens += other.lost_tokens;
        self.lost_answer_tokens += other.lost_answer_tokens;
        self.answer_tokens += other.answer_tokens;
        self.ended += other.ended;
        self.longest = self.longest.max(other.longest);
    }
}

/// First lines of a kind, as `NAME.jsonl: line 3`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Places {
    /// Of the lines that were cut.
    pub cut: Option<String>,
    /// Of those left out as too long.
    pub too_long: Option<String>,
    /// Of those in which the loss counts no token.
    pub without_targets: Option<String>,
}

impl Places {
    /// Adds the places of lines that follow.
    pub(super) fn add(&mut self, other: Places) {
        self.cut = self.cut.take().or(other.cut);
        self.too_long = self.too_long.take().or(other.too_long);
        self.without_targets = self.without_targets.take().or(other.without_targets);
    }
}
