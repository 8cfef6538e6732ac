//! A compiled grammar as a constraint of the runtime.

use std::fmt;

use llguidance::Matcher;
use mantissa_runtime::{Constraint, ConstraintError, TokenMask};

use super::limits::shorten;

/// State of a grammar in a sequence.
pub(super) struct GrammarConstraint {
    matcher: Matcher,
}

impl GrammarConstraint {
    pub(super) fn new(matcher: Matcher) -> Self {
        GrammarConstraint { matcher }
    }
}

impl fmt::Debug for GrammarConstraint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GrammarConstraint").finish_non_exhaustive()
    }
}

fn failed(error: impl fmt::Display) -> ConstraintError {
    ConstraintError(shorten(&error.to_string()))
}

impl Constraint for GrammarConstraint {
    fn allows(&mut self, token: u32) -> Result<bool, ConstraintError> {
        self.matcher.validate_tokens(&[token]).map(|count| count == 1).map_err(failed)
    }

    fn mask(&mut self, mask: &mut TokenMask) -> Result<(), ConstraintError> {
        let allowed = self.matcher.compute_mask().map_err(failed)?;
        mask.words_mut().iter_mut().zip(allowed.as_slice()).for_each(|(word, allowed)| *word = *allowed);
        Ok(())
    }

    fn may_end(&mut self) -> Result<bool, ConstraintError> {
        self.matcher.is_accepting().map_err(failed)
    }

    fn accept(&mut self, token: u32) -> Result<(), ConstraintError> {
        self.matcher.consume_token(token).map_err(failed)
    }

    fn is_complete(&mut self) -> Result<bool, ConstraintError> {
        match self.matcher.get_error() {
            Some(error) => Err(failed(error)),
            None => Ok(self.matcher.is_stopped()),
        }
    }

    fn boxed_clone(&self) -> Box<dyn Constraint> {
        Box::new(GrammarConstraint { matcher: self.matcher.deep_clone() })
    }
}
