//! Time per part of a training step.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Part of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum StepPart {
    /// Embedding lookup and its gradient.
    Embedding,
    /// RMSNorm, in the forward and recomputed in the backward.
    Norm,
    /// Rounding of shared operands.
    Rounding,
    /// `Y = X Wᵀ` of the linear layers.
    Fprop,
    /// RoPE and causal attention.
    Attention,
    /// SiLU(gate) times up.
    Gate,
    /// The three matmuls of the head.
    Head,
    /// Softmax cross-entropy and its gradient.
    CrossEntropy,
    /// `dX = dY W` of the linear layers.
    Dgrad,
    /// `dW = dYᵀ X` of the linear layers.
    Wgrad,
    /// Backward of RoPE and attention.
    AttentionBackward,
    /// Backward of SiLU(gate) times up.
    GateBackward,
    /// Backward of the norms.
    NormBackward,
    /// Copies and zeroing of the residual stream.
    Copies,
    /// Gradient norm and parameter update.
    Optimizer,
}

impl StepPart {
    /// Every part, in step order.
    pub const ALL: [StepPart; 15] = [
        StepPart::Embedding,
        StepPart::Norm,
        StepPart::Rounding,
        StepPart::Fprop,
        StepPart::Attention,
        StepPart::Gate,
        StepPart::Head,
        StepPart::CrossEntropy,
        StepPart::Dgrad,
        StepPart::Wgrad,
        StepPart::AttentionBackward,
        StepPart::GateBackward,
        StepPart::NormBackward,
        StepPart::Copies,
        StepPart::Optimizer,
    ];
}

/// Time per part, measured on the thread that runs the step. A CPU-time clock gives meaningful results with
/// one thread only.
#[derive(Debug, Default)]
pub struct Profile {
    clock: Option<fn() -> Duration>,
    nanos: [AtomicU64; StepPart::ALL.len()],
}

impl Profile {
    /// Starts a profile with `clock`, which is read before and after every part.
    pub fn new(clock: fn() -> Duration) -> Self {
        Profile { clock: Some(clock), ..Self::default() }
    }

    /// Returns the time of a part.
    pub fn get(&self, part: StepPart) -> Duration {
        Duration::from_nanos(self.nanos[part as usize].load(Ordering::Relaxed))
    }

    /// Sets all times to zero.
    pub fn reset(&self) {
        self.nanos.iter().for_each(|nanos| nanos.store(0, Ordering::Relaxed));
    }

    /// Runs `f` and adds its time to `part`.
    pub(crate) fn time<T>(&self, part: StepPart, f: impl FnOnce() -> T) -> T {
        let Some(clock) = self.clock else { return f() };
        let start = clock();
        let result = f();
        self.add(part, clock().saturating_sub(start));
        result
    }

    /// Runs `f` and adds its time to `part`, minus the time added to `inner` meanwhile.
    pub(crate) fn time_without<T>(&self, part: StepPart, inner: &[StepPart], f: impl FnOnce() -> T) -> T {
        let Some(clock) = self.clock else { return f() };
        let sum = || inner.iter().map(|&part| self.get(part)).sum::<Duration>();
        let (start, before) = (clock(), sum());
        let result = f();
        self.add(part, clock().saturating_sub(start).saturating_sub(sum().saturating_sub(before)));
        result
    }

    fn add(&self, part: StepPart, time: Duration) {
        let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.nanos[part as usize].fetch_add(nanos, Ordering::Relaxed);
    }
}
