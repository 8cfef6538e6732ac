//! Kinds of linear layers, norms, small projections and vectors in a decoder layer, and the inputs of linear layers.

/// Linear layer of a decoder layer, or a matrix outside the layers.
/// `ModelConfig::layer_linears` and `ModelConfig::tables` of `mantissa-model` list those of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum LinearKind {
    /// Queries.
    Q,
    /// Keys.
    K,
    /// Values.
    V,
    /// Output projection of the attention.
    O,
    /// Gate of the MLP.
    Gate,
    /// Second input projection of the MLP, or the only one without a gate.
    Up,
    /// Output projection of the MLP.
    Down,
    /// Queries, keys and values, joined.
    Qkv,
    /// Gate and up, joined.
    GateUp,
    /// Hidden states to the latent of the queries (MLA).
    QA,
    /// Latent of the queries to queries (MLA).
    QB,
    /// Hidden states to the latent of keys and values, and to the rotated part of the keys (MLA); or to one head that is
    /// both (DeepSeek-V4).
    KvA,
    /// Latent of keys and values to the unrotated part of the keys, and to values (MLA).
    KvB,
    /// Gate of an expert.
    ExpertGate(u16),
    /// Up of an expert.
    ExpertUp(u16),
    /// Down of an expert.
    ExpertDown(u16),
    /// Gate of the shared experts.
    SharedGate,
    /// Up of the shared experts.
    SharedUp,
    /// Down of the shared experts.
    SharedDown,
    /// Hidden states after the MLP to the gate of the layer's own input (Gemma 4).
    InputGate,
    /// Gated input of the layer to the hidden states (Gemma 4).
    InputProjection,
    /// Input projection of a recurrent mixer.
    MixIn,
    /// Gate of a recurrent mixer's result, if it is not part of the input projection.
    MixGate,
    /// Queries of a recurrent mixer, if they are projected apart.
    MixQ,
    /// Keys of a recurrent mixer.
    MixK,
    /// Values of a recurrent mixer.
    MixV,
    /// Output projection of a recurrent mixer.
    MixOut,
    /// Token embedding.
    Embedding,
    /// Output head.
    Head,
}

/// Half of a decoder layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Half {
    /// Attention or a recurrent mixer.
    Mixing,
    /// MLP or experts.
    Mlp,
}

/// Linear layers that read the same input, which serving engines fuse into one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
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
    /// Input projection and gate of a recurrent mixer.
    MixIn,
    /// Queries, keys and values of a recurrent mixer.
    MixQkv,
}

/// Input of linear layers in a decoder layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum LinearInput {
    /// Normed states that queries, keys and values are projected from.
    Qkv,
    /// Joined heads.
    O,
    /// Result of a recurrent mixer.
    Mixed,
    /// Normed states that gate and up read.
    GateUp,
    /// Inner activation of the MLP.
    Down,
    /// Normed latent of the queries (MLA).
    QLatent,
    /// Normed latent of keys and values (MLA).
    KvLatent,
    /// Normed states of the tokens routed to an expert.
    Expert(u16),
    /// Inner activation of an expert.
    ExpertDown(u16),
    /// Inner activation of the shared experts.
    SharedDown,
    /// Hidden states after the MLP.
    States,
    /// Gated input of the layer.
    Gated,
    /// Outside the decoder layers: tokens for the embedding, normed last states for the head.
    Outside,
}

/// Norm of a decoder layer.
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
    /// Over each head of the values, without weights (Gemma 4).
    Value,
    /// Over the projected input of the layer before it is added (Gemma 4).
    AfterInput,
    /// Before the router, if it reads the states by a norm of its own (Gemma 4).
    Router,
    /// Before experts beside a dense MLP (Gemma 4).
    Experts,
    /// Over the result of a dense MLP beside experts (Gemma 4).
    AfterDense,
    /// Over the result of experts beside a dense MLP (Gemma 4).
    AfterExperts,
    /// Before the router of parallel streams (Gemma 3n).
    Modalities,
    /// Over the result of the low-rank path beside attention (Gemma 3n).
    AfterLaurel,
}

/// Small linear layer next to the experts, never quantized.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SideKind {
    /// Router: hidden states to one logit per expert.
    Router,
    /// Gate of the shared experts.
    SharedGate,
    /// Rates at which a recurrent mixer writes and forgets, joined by key head.
    Rates,
    /// Rates at which a recurrent mixer writes.
    WriteRate,
    /// Rates at which a recurrent mixer forgets.
    DecayRate,
    /// Convolved inputs of a recurrent mixer to the latent of its steps and to the vectors that write and read its
    /// state.
    Selection,
    /// Latent of the steps of a recurrent mixer to the steps.
    Step,
    /// Latent of the rates at which a recurrent mixer forgets.
    DecayLatent,
    /// Rates at which a recurrent mixer forgets, from their latent.
    Decay,
    /// Latent of the gate of a recurrent mixer's result.
    GateLatent,
    /// Gate of a recurrent mixer's result, from its latent.
    Gate,
    /// Hidden states to the latent of the experts (Nemotron 3 Super).
    ToExperts,
    /// Weighted sum of the experts' results to the hidden states.
    FromExperts,
    /// Hidden states to the weights that mix parallel streams (Gemma 3n).
    Modalities,
    /// Those weights to the matrix that predicts the streams after a layer.
    Prediction,
    /// Those weights to the shares of the streams in what a layer changed.
    Correction,
    /// Normed states to the inside of the low-rank path beside attention.
    LaurelLeft,
    /// Inside of that path to the states.
    LaurelRight,
    /// Embedding to a parallel stream, counted from 1, before the first layer.
    EnterStream(u16),
    /// Parallel stream to the states after the last layer.
    LeaveStream(u16),
    /// Latent of the queries to the queries of an indexer.
    IndexQueries,
    /// Normed states to the keys of an indexer.
    IndexKeys,
    /// Normed states to the weights of an indexer's heads.
    IndexWeights,
    /// Normed states to what compressed entries are sums of (DeepSeek-V4).
    BlockValues,
    /// Normed states to the weights of those sums.
    BlockGate,
    /// Normed states to what compressed keys of an indexer are sums of.
    IndexBlockValues,
    /// Normed states to the weights of those sums.
    IndexBlockGate,
    /// Joined heads of each group to a part of the input of the output projection; rows of all groups.
    OutputGroups,
    /// Projection of the layer's normed input that only one kind of mixer has, by the mixer's name for it.
    Own(&'static str),
    /// Projection of a value inside a mixer that only one kind of mixer has, by the mixer's name for it.
    Inner(&'static str),
}

/// Small projection of a layer, which is never quantized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SideInfo {
    /// Kind.
    pub kind: SideKind,
    /// Output features.
    pub rows: usize,
    /// Input features.
    pub cols: usize,
    /// True if it has a bias.
    pub bias: bool,
}

/// Half of a layer whose input parallel streams are joined into, or the end of the decoder (DeepSeek-V4).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HyperSite {
    /// Attention.
    Attention,
    /// MLP.
    Mlp,
    /// Norm before the head.
    Head,
}

/// Vector that joins and mixes parallel streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HyperPart {
    /// Streams of a token to the weights, `[weights, streams · hidden]`.
    Weight,
    /// Numbers that are added to the weights.
    Base,
    /// Factors of the weights that join, spread and mix.
    Scale,
}

/// Vector of a layer that is not part of a linear layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum VectorKind {
    /// Attention sinks, one per query head.
    Sinks,
    /// Correction that a router adds to its scores for the choice of experts.
    Correction,
    /// Factor of the states after the layer, one number.
    Scale,
    /// Weight of the norm before the router, before it is divided by the root of the width (Gemma 4).
    RouterScale,
    /// Factor of each expert (Gemma 4).
    ExpertScales,
    /// Factors of the states that the embeddings of layers are gated by (Gemma 3n).
    StreamScale,
    /// Weight of a causal convolution: `[channels, 1, kernel]` in a checkpoint, `[kernel, channels]` in a loaded layer.
    Convolution,
    /// Bias of a causal convolution, one per channel.
    ConvolutionBias,
    /// Weight of a causal convolution of queries alone, as [`Convolution`](Self::Convolution).
    QueryConvolution,
    /// Weight of a causal convolution of keys.
    KeyConvolution,
    /// Weight of a causal convolution of values.
    ValueConvolution,
    /// Bias of the step of a recurrent mixer, one per head or channel.
    StepBias,
    /// Logarithm of the decay of a recurrent mixer, one per head or value of its state.
    DecayLog,
    /// Factor of the input that a recurrent mixer adds to its result, one per head or channel.
    Skip,
    /// Weight of the norm of a recurrent mixer's result.
    MixNorm,
    /// Weight of the norm of the latent of a recurrent mixer's steps.
    StepNorm,
    /// Weight of the norm of the vector that writes a recurrent mixer's state.
    WriteNorm,
    /// Weight of the norm of the vector that reads a recurrent mixer's state.
    ReadNorm,
    /// Weight of the LayerNorm of an indexer's keys.
    IndexNorm,
    /// Bias of the LayerNorm of an indexer's keys.
    IndexNormBias,
    /// Weight of the norm of the latent of a mixer's queries.
    LatentNorm,
    /// Weight of the norm of a mixer's keys.
    KeyNorm,
    /// Numbers that are added to the weights of compressed entries, by place in a block.
    BlockBias,
    /// Weight of the norm of compressed entries.
    BlockNorm,
    /// Numbers that are added to the weights of compressed keys of an indexer, by place in a block.
    IndexBlockBias,
    /// Weight of the norm of compressed keys of an indexer.
    IndexBlockNorm,
    /// Experts of each token, `[vocabulary, experts per token]`, integers.
    TokenExperts,
    /// Parameter of the activation, by its name in `Activation::parameters` of `mantissa-kernels`.
    Activation(&'static str),
    /// Part of what joins and mixes parallel streams.
    Hyper(HyperSite, HyperPart),
    /// Vector that only one kind of mixer has, by the mixer's name for it.
    Own(&'static str),
}

impl VectorKind {
    /// True for integers; the others are floats.
    pub const fn is_integer(self) -> bool {
        matches!(self, VectorKind::TokenExperts)
    }

    /// True for the weight of a convolution, which is loaded row by row.
    pub const fn convolves(self) -> bool {
        matches!(
            self,
            VectorKind::Convolution
                | VectorKind::QueryConvolution
                | VectorKind::KeyConvolution
                | VectorKind::ValueConvolution
        )
    }
}

impl SideKind {
    /// Norm whose output it reads; `None` inside a mixer or a mixture.
    pub const fn reads(self) -> Option<NormKind> {
        match self {
            SideKind::Router | SideKind::SharedGate | SideKind::ToExperts => Some(NormKind::Post),
            SideKind::Rates
            | SideKind::WriteRate
            | SideKind::DecayRate
            | SideKind::DecayLatent
            | SideKind::GateLatent
            | SideKind::LaurelLeft
            | SideKind::IndexKeys
            | SideKind::IndexWeights
            | SideKind::BlockValues
            | SideKind::BlockGate
            | SideKind::IndexBlockValues
            | SideKind::IndexBlockGate
            | SideKind::Own(_) => Some(NormKind::Input),
            SideKind::IndexQueries => Some(NormKind::QLatent),
            _ => None,
        }
    }
}

impl LinearInput {
    /// Inputs of a plain layer (separate projections, one MLP), in the order of the forward pass.
    pub const PLAIN: [LinearInput; 4] =
        [LinearInput::Qkv, LinearInput::O, LinearInput::GateUp, LinearInput::Down];

    /// Index in [`PLAIN`](Self::PLAIN); its length for other inputs.
    pub fn index(self) -> usize {
        Self::PLAIN.iter().position(|input| *input == self).unwrap_or(Self::PLAIN.len())
    }

    /// Turn in a pass: an input depends only on inputs of earlier turns.
    pub const fn turn(self) -> u8 {
        match self {
            LinearInput::Qkv => 0,
            LinearInput::QLatent | LinearInput::KvLatent => 1,
            LinearInput::O | LinearInput::Mixed => 2,
            LinearInput::GateUp | LinearInput::Expert(_) => 3,
            LinearInput::Down | LinearInput::ExpertDown(_) | LinearInput::SharedDown => 4,
            LinearInput::States => 5,
            LinearInput::Gated => 6,
            LinearInput::Outside => 7,
        }
    }

    /// Iterates over the linear layers that may read this input; a model has some of them.
    pub fn readers(self) -> impl Iterator<Item = LinearKind> {
        use LinearKind as L;
        let readers: &[LinearKind] = match self {
            LinearInput::Qkv => {
                &[L::Q, L::K, L::V, L::Qkv, L::QA, L::KvA, L::MixIn, L::MixGate, L::MixQ, L::MixK, L::MixV]
            }
            LinearInput::O => &[L::O],
            LinearInput::Mixed => &[L::MixOut],
            LinearInput::GateUp => &[L::Gate, L::Up, L::GateUp, L::SharedGate, L::SharedUp],
            LinearInput::Down => &[L::Down],
            LinearInput::QLatent => &[L::QB],
            LinearInput::KvLatent => &[L::KvB],
            LinearInput::Expert(e) => &[L::ExpertGate(e), L::ExpertUp(e)],
            LinearInput::ExpertDown(e) => &[L::ExpertDown(e)],
            LinearInput::SharedDown => &[L::SharedDown],
            LinearInput::States => &[L::InputGate],
            LinearInput::Gated => &[L::InputProjection],
            LinearInput::Outside => &[],
        };
        let readers: Vec<LinearKind> = readers.to_vec();
        readers.into_iter()
    }
}

impl LinearKind {
    /// Linear layers of a plain layer (separate projections, one MLP), in the order of the forward pass.
    pub const PLAIN: [LinearKind; 7] = [
        LinearKind::Q,
        LinearKind::K,
        LinearKind::V,
        LinearKind::O,
        LinearKind::Gate,
        LinearKind::Up,
        LinearKind::Down,
    ];

    /// Index in [`PLAIN`](Self::PLAIN); its length for other linear layers.
    pub fn index(self) -> usize {
        Self::PLAIN.iter().position(|kind| *kind == self).unwrap_or(Self::PLAIN.len())
    }

    /// Half of the layer whose result it writes, which is added to the residual stream; `None` inside of a half.
    pub const fn writes(self) -> Option<Half> {
        match self {
            LinearKind::O | LinearKind::MixOut => Some(Half::Mixing),
            LinearKind::Down | LinearKind::ExpertDown(_) | LinearKind::SharedDown => Some(Half::Mlp),
            _ => None,
        }
    }

    /// Layer of a dense MLP in whose place it is; itself outside of experts.
    pub const fn dense(self) -> Self {
        match self {
            LinearKind::ExpertGate(_) | LinearKind::SharedGate => LinearKind::Gate,
            LinearKind::ExpertUp(_) | LinearKind::SharedUp | LinearKind::GateUp => LinearKind::Up,
            LinearKind::ExpertDown(_) | LinearKind::SharedDown => LinearKind::Down,
            kind => kind,
        }
    }

    /// Number of the routed expert that it belongs to.
    pub const fn expert(self) -> Option<u16> {
        match self {
            LinearKind::ExpertGate(e) | LinearKind::ExpertUp(e) | LinearKind::ExpertDown(e) => Some(e),
            _ => None,
        }
    }

    /// True for the embedding and the head, which stand outside of the layers.
    pub const fn is_table(self) -> bool {
        matches!(self, LinearKind::Embedding | LinearKind::Head)
    }

    /// True if it computes queries or keys, on whose product attention scores depend.
    pub const fn makes_scores(self) -> bool {
        matches!(self, LinearKind::Q | LinearKind::K | LinearKind::Qkv)
    }

    /// Place among the linear layers of its half that read one input: different for those that run together.
    pub const fn slot(self) -> usize {
        match self {
            LinearKind::Gate | LinearKind::K | LinearKind::ExpertGate(_) | LinearKind::SharedGate => 1,
            LinearKind::Up | LinearKind::V | LinearKind::ExpertUp(_) | LinearKind::SharedUp => 2,
            _ => 0,
        }
    }

    /// Group of linear layers that it is fused with, itself included.
    pub const fn fused(self) -> Option<FusedGroup> {
        match self {
            LinearKind::Q | LinearKind::K | LinearKind::V => Some(FusedGroup::Qkv),
            LinearKind::Gate | LinearKind::Up => Some(FusedGroup::GateUp),
            LinearKind::QA | LinearKind::KvA => Some(FusedGroup::Latents),
            LinearKind::ExpertGate(e) | LinearKind::ExpertUp(e) => Some(FusedGroup::Expert(e)),
            LinearKind::SharedGate | LinearKind::SharedUp => Some(FusedGroup::SharedGateUp),
            LinearKind::MixIn | LinearKind::MixGate => Some(FusedGroup::MixIn),
            LinearKind::MixQ | LinearKind::MixK | LinearKind::MixV => Some(FusedGroup::MixQkv),
            _ => None,
        }
    }

    /// Input of the linear layer.
    pub const fn input(self) -> LinearInput {
        match self {
            LinearKind::Q
            | LinearKind::K
            | LinearKind::V
            | LinearKind::Qkv
            | LinearKind::QA
            | LinearKind::KvA
            | LinearKind::MixIn
            | LinearKind::MixGate
            | LinearKind::MixQ
            | LinearKind::MixK
            | LinearKind::MixV => LinearInput::Qkv,
            LinearKind::O => LinearInput::O,
            LinearKind::MixOut => LinearInput::Mixed,
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
            LinearKind::InputGate => LinearInput::States,
            LinearKind::InputProjection => LinearInput::Gated,
            LinearKind::Embedding | LinearKind::Head => LinearInput::Outside,
        }
    }
}
