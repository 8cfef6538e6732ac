//! Stops: a step asks its caller between two layers whether to go on.

use std::fmt;
use std::sync::Arc;

/// Question of a step to its caller; the answer true ends the step.
#[derive(Clone)]
pub struct Stop(Arc<dyn Fn() -> bool + Send + Sync>);

impl Stop {
    /// Makes the question from its answer.
    pub fn new(answer: impl Fn() -> bool + Send + Sync + 'static) -> Self {
        Stop(Arc::new(answer))
    }

    /// True if the step should end.
    pub(crate) fn is_wanted(&self) -> bool {
        (self.0)()
    }
}

impl fmt::Debug for Stop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Stop")
    }
}
