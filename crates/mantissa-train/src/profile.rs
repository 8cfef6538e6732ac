//! Where a step's time goes.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The parts of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Part {
    /// Rows of the embedding, and the gradients added to them.
    Embedding,
    /// RMSNorm, forward and again in the backward.
    Norm,
    /// Rounding of the operands that several products read.
    Rounding,
    /// The linear layers' `Y = X Wᵀ`.
    Fprop,
    /// Rotation and causal attention.
    Attention,
    /// The MLP's gate.
    Gate,
    /// The head's three products.
    Head,
    /// Softmax cross-entropy and its gradient.
    CrossEntropy,
    /// The linear layers' `dX = dY W`.
    Dgrad,
    /// The linear layers' `dW = dYᵀ X`.
    Wgrad,
    /// Backward of rotation and attention.
    AttentionBackward,
    /// Backward of the gate.
    GateBackward,
    /// Backward of the norms.
    NormBackward,
    /// Copies of the residual stream, and zeros.
    Copies,
    /// Gradient norm and update.
    Optimizer,
}

impl Part {
    /// Every part, in the order of a step.
    pub const ALL: [Part; 15] = [
        Part::Embedding,
        Part::Norm,
        Part::Rounding,
        Part::Fprop,
        Part::Attention,
        Part::Gate,
        Part::Head,
        Part::CrossEntropy,
        Part::Dgrad,
        Part::Wgrad,
        Part::AttentionBackward,
        Part::GateBackward,
        Part::NormBackward,
        Part::Copies,
        Part::Optimizer,
    ];
}

/// Sums of time by part, as the thread that runs a step sees it: with a clock of CPU time they mean something for
/// one thread only.
#[derive(Debug, Default)]
pub struct Profile {
    clock: Option<fn() -> Duration>,
    nanos: [AtomicU64; Part::ALL.len()],
}

impl Profile {
    /// Sums by `clock`, which is read before and after every part.
    pub fn new(clock: fn() -> Duration) -> Self {
        Profile { clock: Some(clock), ..Self::default() }
    }

    /// What was summed for a part.
    pub fn get(&self, part: Part) -> Duration {
        Duration::from_nanos(self.nanos[part as usize].load(Ordering::Relaxed))
    }

    /// Sets all sums to zero.
    pub fn reset(&self) {
        self.nanos.iter().for_each(|nanos| nanos.store(0, Ordering::Relaxed));
    }

    /// Runs `f` and adds its time to `part`.
    pub(crate) fn time<T>(&self, part: Part, f: impl FnOnce() -> T) -> T {
        let Some(clock) = self.clock else { return f() };
        let start = clock();
        let result = f();
        self.add(part, clock().saturating_sub(start));
        result
    }

    /// Runs `f` and adds its time to `part`, less what was added to `inner` meanwhile.
    pub(crate) fn time_without<T>(&self, part: Part, inner: &[Part], f: impl FnOnce() -> T) -> T {
        let Some(clock) = self.clock else { return f() };
        let sum = || inner.iter().map(|&part| self.get(part)).sum::<Duration>();
        let (start, before) = (clock(), sum());
        let result = f();
        self.add(part, clock().saturating_sub(start).saturating_sub(sum().saturating_sub(before)));
        result
    }

    fn add(&self, part: Part, time: Duration) {
        let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.nanos[part as usize].fetch_add(nanos, Ordering::Relaxed);
    }
}
