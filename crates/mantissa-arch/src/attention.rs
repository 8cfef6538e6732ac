//! Features of attention that few architectures have.

/// Features of attention beyond heads, positions and norms of heads. Steps to add one: ARCHITECTURE.md, "To add something".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionRules {
    /// True if each head of the values is normed, without weights.
    pub value_norm: bool,
    /// True if `clip_qkv` limits q, k and v.
    pub clips_qkv: bool,
    /// True if heads have attention sinks.
    pub sinks: bool,
    /// True if the joined heads are gated, by the second half of each head's query projection.
    pub gated: bool,
}

impl AttentionRules {
    /// None of them.
    pub const PLAIN: Self =
        AttentionRules { value_norm: false, clips_qkv: false, sinks: false, gated: false };

    /// Names the first of them that training has no backward for.
    pub const fn untrained(&self) -> Option<&'static str> {
        match self {
            AttentionRules { value_norm: true, .. } => Some("norms of the values"),
            AttentionRules { gated: true, .. } => Some("gated attention"),
            _ => None,
        }
    }
}
