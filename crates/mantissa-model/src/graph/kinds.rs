//! The linear layers of a decoder layer and what they read.

/// The linear layers of a decoder layer. A model has some of them: [`crate::ModelConfig::layer_linears`] says which.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum LinearKind {
    /// Queries.
    Q,
    /// Keys.
    K,
    /// Values.
    V,
    /// The attention's output.
    O,
    /// Gate of the MLP.
    Gate,
    /// The MLP's other input projection, or the only one where there is no gate.
    Up,
    /// The MLP's output.
    Down,
    /// Queries, keys and values, stored as one.
    Qkv,
    /// Gate and up, stored as one.
    GateUp,
    /// Hidden states to the latent that queries are made of (MLA).
    QA,
    /// That latent to queries.
    QB,
    /// Hidden states to the latent that keys and values are made of, and to the rotated part of the keys (MLA).
    KvA,
    /// That latent to the other part of the keys, and to values.
    KvB,
    /// Gate of an expert.
    ExpertGate(u16),
    /// Up of an expert.
    ExpertUp(u16),
    /// Down of an expert.
    ExpertDown(u16),
    /// Gate of the experts that every token goes through.
    SharedGate,
    /// Their up.
    SharedUp,
    /// Their down.
    SharedDown,
}

/// Linear layers that read the same input, which serving engines fuse into one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum FusedGroup {
    /// Queries, keys and values.
    Qkv,
    /// Gate and up.
    GateUp,
    /// The two latents of MLA.
    Latents,
    /// Gate and up of an expert.
    Expert(u16),
    /// Gate and up of the shared experts.
    SharedGateUp,
}

/// What the linear layers of a decoder layer read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum LinearInput {
    /// The normed states that queries, keys and values are made of.
    Qkv,
    /// The joined heads.
    O,
    /// The normed states that gate and up read.
    GateUp,
    /// The inner activation of the MLP.
    Down,
    /// The normed latent of the queries (MLA).
    QLatent,
    /// The normed latent of keys and values (MLA).
    KvLatent,
    /// The normed states of the tokens that are routed to an expert.
    Expert(u16),
    /// An expert's inner activation.
    ExpertDown(u16),
    /// The inner activation of the shared experts.
    SharedDown,
}

/// The norms of a decoder layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NormKind {
    /// Before the attention.
    Input,
    /// Over each head of the queries, or over all.
    Query,
    /// Over each head of the keys, or over all.
    Key,
    /// Over the joined heads before the output projection.
    AttentionSub,
    /// Before the MLP.
    Post,
    /// Over the inner activation before the down projection.
    MlpSub,
    /// Over the attention's result before it is added.
    AfterAttention,
    /// Over the MLP's result before it is added.
    AfterMlp,
    /// Over the latent of the queries (MLA).
    QLatent,
    /// Over the latent of keys and values (MLA).
    KvLatent,
}

/// The small linear layers beside experts, which are not quantized.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SideKind {
    /// States to a logit for each expert.
    Router,
    /// States to the gate of the shared experts.
    SharedGate,
}

/// Vectors beside a layer's linear layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum VectorKind {
    /// The attention's sinks, one for each query head.
    Sinks,
    /// What is added to the scores of the experts to choose by.
    Correction,
}

impl LinearInput {
    /// Those of a plain layer (separate projections, one MLP), in the order of the forward pass.
    pub const PLAIN: [LinearInput; 4] =
        [LinearInput::Qkv, LinearInput::O, LinearInput::GateUp, LinearInput::Down];

    /// Its place in [`PLAIN`](Self::PLAIN); past the end for the others.
    pub fn index(self) -> usize {
        Self::PLAIN.iter().position(|input| *input == self).unwrap_or(Self::PLAIN.len())
    }

    /// Its turn in a pass: what it is made of has an earlier one, and inputs of one turn are not made of each other.
    pub const fn turn(self) -> u8 {
        match self {
            LinearInput::Qkv => 0,
            LinearInput::QLatent | LinearInput::KvLatent => 1,
            LinearInput::O => 2,
            LinearInput::GateUp | LinearInput::Expert(_) => 3,
            LinearInput::Down | LinearInput::ExpertDown(_) | LinearInput::SharedDown => 4,
        }
    }

    /// The linears that may read it; of a model, those that it has.
    pub fn readers(self) -> impl Iterator<Item = LinearKind> {
        let readers: &[LinearKind] = match self {
            LinearInput::Qkv => &[
                LinearKind::Q,
                LinearKind::K,
                LinearKind::V,
                LinearKind::Qkv,
                LinearKind::QA,
                LinearKind::KvA,
            ],
            LinearInput::O => &[LinearKind::O],
            LinearInput::GateUp => &[
                LinearKind::Gate,
                LinearKind::Up,
                LinearKind::GateUp,
                LinearKind::SharedGate,
                LinearKind::SharedUp,
            ],
            LinearInput::Down => &[LinearKind::Down],
            LinearInput::QLatent => &[LinearKind::QB],
            LinearInput::KvLatent => &[LinearKind::KvB],
            LinearInput::Expert(e) => &[LinearKind::ExpertGate(e), LinearKind::ExpertUp(e)],
            LinearInput::ExpertDown(e) => &[LinearKind::ExpertDown(e)],
            LinearInput::SharedDown => &[LinearKind::SharedDown],
        };
        let readers: Vec<LinearKind> = readers.to_vec();
        readers.into_iter()
    }
}

impl LinearKind {
    /// Those of a plain layer (separate projections, one MLP), in the order of the forward pass.
    pub const PLAIN: [LinearKind; 7] = [
        LinearKind::Q,
        LinearKind::K,
        LinearKind::V,
        LinearKind::O,
        LinearKind::Gate,
        LinearKind::Up,
        LinearKind::Down,
    ];

    /// Its place in [`PLAIN`](Self::PLAIN); past the end for the others.
    pub fn index(self) -> usize {
        Self::PLAIN.iter().position(|kind| *kind == self).unwrap_or(Self::PLAIN.len())
    }

    /// The linears it is fused with, itself included.
    pub const fn fused(self) -> Option<FusedGroup> {
        match self {
            LinearKind::Q | LinearKind::K | LinearKind::V => Some(FusedGroup::Qkv),
            LinearKind::Gate | LinearKind::Up => Some(FusedGroup::GateUp),
            LinearKind::QA | LinearKind::KvA => Some(FusedGroup::Latents),
            LinearKind::ExpertGate(e) | LinearKind::ExpertUp(e) => Some(FusedGroup::Expert(e)),
            LinearKind::SharedGate | LinearKind::SharedUp => Some(FusedGroup::SharedGateUp),
            _ => None,
        }
    }

    /// What it reads.
    pub const fn input(self) -> LinearInput {
        match self {
            LinearKind::Q
            | LinearKind::K
            | LinearKind::V
            | LinearKind::Qkv
            | LinearKind::QA
            | LinearKind::KvA => LinearInput::Qkv,
            LinearKind::O => LinearInput::O,
            LinearKind::Gate
            | LinearKind::Up
            | LinearKind::GateUp
            | LinearKind::SharedGate
            | LinearKind::SharedUp => LinearInput::GateUp,
            LinearKind::Down => LinearInput::Down,
            LinearKind::QB => LinearInput::QLatent,
            LinearKind::KvB => LinearInput::KvLatent,
            LinearKind::ExpertGate(e) | LinearKind::ExpertUp(e) => LinearInput::Expert(e),
            LinearKind::ExpertDown(e) => LinearInput::ExpertDown(e),
            LinearKind::SharedDown => LinearInput::SharedDown,
        }
    }
}
