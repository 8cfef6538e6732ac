//! Constraints on the tokens of a sequence, such as a grammar.

use std::fmt;
use std::time::Duration;

/// Token that is offered to a constraint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Offer {
    /// A token of the text.
    Token(u32),
    /// A token that ends the sequence.
    End,
}

/// Answer of a constraint to a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The token may follow, and was taken.
    Taken {
        /// True if only an end may follow; the sequence ends then.
        complete: bool,
    },
    /// The token may not follow; those that may are in the mask.
    Refused {
        /// True if the sequence may end here.
        may_end: bool,
    },
    /// Not known yet: the same token is to be offered again later.
    Pending,
}

/// Limits the tokens of a sequence. The runtime offers it each token that it has drawn.
///
/// A constraint may take its time: a sequence whose constraint has not answered waits, and others go on.
///
/// End tokens are the runtime's matter: it offers them as [`Offer::End`], and allows them where a refusal says so.
pub trait Constraint: fmt::Debug + Send {
    /// Takes `offer` if it may follow; else adds all tokens that may follow to `mask`, which is empty.
    ///
    /// # Errors
    /// [`ConstraintError`], which ends the sequence.
    fn offer(&mut self, offer: Offer, mask: &mut TokenMask) -> Result<Verdict, ConstraintError>;

    /// Waits until the answer to the last offer is there, at most for `patience`. Returns false if it is not, at once if
    /// nobody works on it yet. Only called after [`Verdict::Pending`].
    fn wait(&mut self, patience: Duration) -> bool {
        let _ = patience;
        true
    }

    /// Returns a copy with the same state, without an offer.
    fn boxed_clone(&self) -> Box<dyn Constraint>;
}

impl Clone for Box<dyn Constraint> {
    fn clone(&self) -> Self {
        self.boxed_clone()
    }
}

/// Failure of a constraint.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("constraint: {0}")]
pub struct ConstraintError(pub String);

/// Set of tokens, a bit each: token `t` is bit `t % 32` of word `t / 32`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenMask {
    words: Vec<u32>,
}

impl TokenMask {
    /// Empties the set and makes room for tokens below `vocabulary`.
    pub fn reset(&mut self, vocabulary: usize) {
        self.words.clear();
        self.words.resize(vocabulary.div_ceil(32), 0);
    }

    /// Words of the set, the lowest tokens first.
    pub fn words_mut(&mut self) -> &mut [u32] {
        &mut self.words
    }

    /// Adds or removes a token; does nothing beyond the vocabulary.
    pub fn set(&mut self, token: u32, allowed: bool) {
        if let Some(word) = self.words.get_mut(token as usize / 32) {
            let bit = 1 << (token % 32);
            *word = if allowed { *word | bit } else { *word & !bit };
        }
    }

    /// True if the token is in the set.
    pub fn contains(&self, token: u32) -> bool {
        self.words.get(token as usize / 32).is_some_and(|word| word & (1 << (token % 32)) != 0)
    }

    /// Sets the logits of all other tokens to -inf. Returns false if no token with a finite logit is left.
    pub(super) fn apply(&self, logits: &mut [f32]) -> bool {
        let mut left = false;
        for (word, logits) in self.words.iter().zip(logits.chunks_mut(32)) {
            match *word {
                0 => logits.fill(f32::NEG_INFINITY),
                word => {
                    for (bit, logit) in logits.iter_mut().enumerate() {
                        match word >> bit & 1 {
                            0 => *logit = f32::NEG_INFINITY,
                            _ => left |= logit.is_finite(),
                        }
                    }
                }
            }
        }
        left
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_leave_the_tokens_of_the_set() {
        let mut mask = TokenMask::default();
        mask.reset(70);
        for token in [0, 33, 69, 500] {
            mask.set(token, true);
        }
        mask.set(33, false);
        let mut logits = vec![1.0; 70];
        assert!(mask.apply(&mut logits));
        let left: Vec<_> = (0u32..).zip(&logits).filter(|(_, x)| x.is_finite()).map(|(i, _)| i).collect();
        assert_eq!(left, [0, 69]);
        assert!(mask.contains(69) && !mask.contains(33) && !mask.contains(500));
        // Nothing is left of a token without a probability.
        let mut logits = vec![f32::NEG_INFINITY; 70];
        assert!(!mask.apply(&mut logits));
    }
}
