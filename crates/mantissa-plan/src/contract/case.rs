//! A configuration in a few words, as test data.

/// Configuration with the source that accepts or refuses it.
pub(super) struct Case {
    /// Checkpoint format.
    pub(super) format: &'static str,
    /// Scheme of the weights; empty for a dense model.
    pub(super) weights: &'static str,
    /// Scheme of the inputs; empty if unquantized.
    pub(super) inputs: &'static str,
    /// Words that change the model or the target: `tp=4`, `gpu=a100`, `act-order`, `cols=352`, `f16`, `mixed`,
    /// `unfused-scales`, `seen=NAME`.
    pub(super) options: &'static str,
    /// Rule that refuses it; empty if it loads.
    pub(super) rule: &'static str,
    /// File that says so, in the project or package at the version that the rules name.
    pub(super) source: &'static str,
}

impl Case {
    pub(super) const fn takes(
        format: &'static str,
        weights: &'static str,
        inputs: &'static str,
        source: &'static str,
    ) -> Self {
        Case { format, weights, inputs, options: "", rule: "", source }
    }

    pub(super) const fn refuses(
        format: &'static str,
        weights: &'static str,
        inputs: &'static str,
        rule: &'static str,
        source: &'static str,
    ) -> Self {
        Case { format, weights, inputs, options: "", rule, source }
    }

    pub(super) const fn with(self, options: &'static str) -> Self {
        Case { options, ..self }
    }
}
