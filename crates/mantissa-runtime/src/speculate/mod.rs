//! Speculative decoding: tokens are proposed, and one pass computes the model's own choice after each of them
//! (Leviathan et al. 2023, arXiv 2211.17192).
//!
//! Proposals come from the text so far (prompt lookup) or from a smaller model of the same vocabulary. At each place
//! the model's next token is drawn from its own distribution with the random number that belongs to the place, and
//! the proposal is accepted if it is that token. So the tokens are the same with and without speculation, sampled ones
//! too. For a proposal that is certain, as in prompt lookup, the acceptance rate is Leviathan's (algorithm 1).
//! A draft model draws with the same random number as the model ("drafter-invariant" decoding, Daliri et al. 2024,
//! arXiv 2408.07978, with inverse sampling as the coupling), which accepts somewhat less than the optimal coupling of
//! algorithm 1 if sampling is not greedy.

mod draft;
mod gain;
mod lookup;

pub(crate) use self::draft::{CHUNK, Draft};
pub(crate) use self::gain::{Costs, Origin, Trust};
pub(crate) use self::lookup::find;

/// Largest number of tokens proposed at once.
pub(crate) const MOST: usize = 8;

/// Largest number of sequences that generate with speculation; more of them fill a pass by themselves.
pub(crate) const SEQUENCES: usize = 4;

/// Source of proposed tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Speculation {
    /// No proposals.
    #[default]
    Off,
    /// Continuations of earlier places of the text that end in the same tokens, as long as they pay.
    Lookup,
}

/// Counts of proposed and accepted tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Proposals {
    /// Tokens proposed.
    pub proposed: u64,
    /// Tokens accepted.
    pub accepted: u64,
}
