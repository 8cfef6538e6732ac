//! The flow of a decoder layer, written once for evaluation, calibration, generation and training:
//! `x += attention(norm(x))`, `x += mlp(norm(x))`, on `residual` `[rows, hidden]`. Architectures differ in where the norms
//! stand, in how projections are stored and in what the MLP is; the config says it, and no layer knows its model's name.
//!
//! What depends on how weights are held (norms and linear layers) is asked of [`Operators`]; where activations
//! go is said by [`Activations`]. Everything else, rotary positions, attention, the gate, and the order of all
//! of it, is here, so that a model has the same bits wherever its pass was run.

use std::ops::Range;

use mantissa_kernels::{CausalAttention, kernels};

use crate::cache::Past;
use crate::config::{
    Activation, HeadNorms, Latent, LimitedSwiglu, MlpForm, ModelConfig, NormPlaces, QkvForm, Routing,
};
use crate::error::ForwardError;
use crate::graph::{LinearInput, LinearKind};
use crate::kv::KvQuantizer;
use crate::operands::OperandRounding;

/// Least number of rows of a whole-sequence pass: shorter ones are padded. Products of up to 64 rows may be
/// summed in another order, and a sequence is to have the same bits alone and in a batch.
pub const MIN_ROWS: usize = 65;

/// Packed sequences: `lens[i]` tokens each, one after another, all beginning at position `start`.
#[derive(Clone, Copy, Debug)]
pub struct Sequences<'a> {
    /// Number of tokens of each.
    pub lens: &'a [usize],
    /// Position of the first token of each.
    pub start: usize,
    /// Rows of the activations, at least the sum of `lens`; what is beyond is padding.
    pub rows: usize,
}

impl<'a> Sequences<'a> {
    /// Whole sequences, padded to [`MIN_ROWS`].
    pub fn whole(lens: &'a [usize]) -> Self {
        Sequences { lens, start: 0, rows: lens.iter().sum::<usize>().max(MIN_ROWS) }
    }

    /// Rows that are no padding.
    pub fn tokens(&self) -> usize {
        self.lens.iter().sum()
    }
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

/// One linear layer's share of [`Operators::linears`].
#[derive(Debug)]
pub struct Job<'a> {
    /// Which one.
    pub kind: LinearKind,
    /// Its result, `[rows, out]`.
    pub out: &'a mut [f32],
    /// Whether to add to `out` instead of overwriting it.
    pub accumulate: bool,
}

/// What the flow of one layer asks of whoever holds its weights.
pub trait Operators {
    /// Normalizes each vector of `x` into `out`.
    fn norm(&mut self, kind: NormKind, x: &[f32], out: &mut [f32]);

    /// Runs linear layers, biases included, that all read `x` `[rows, in]`, of which the first `tokens` rows
    /// are no padding.
    ///
    /// # Errors
    /// [`ForwardError::Input`].
    fn linears(
        &mut self,
        input: LinearInput,
        x: &[f32],
        tokens: usize,
        jobs: &mut [Job<'_>],
    ) -> Result<(), ForwardError>;

    /// `out = x Wᵀ + b` of a layer beside the experts; nothing where models with experts are refused.
    fn side(&mut self, _: SideKind, _x: &[f32], _out: &mut [f32]) {}

    /// Brings inputs of a linear layer, `x` `[t, in]`, to what `weight` `[out, in]`, which is written, is to be multiplied by:
    /// `x Wᵀ` is then the layer's result without its bias.
    ///
    /// # Errors
    /// [`ForwardError::Input`]; [`ForwardError::OtherModel`] of who has no cache.
    fn apart(&mut self, _: LinearKind, _x: &mut [f32], _weight: &mut [f32]) -> Result<(), ForwardError> {
        Err(ForwardError::OtherModel { what: "KV cache" })
    }

    /// A vector, where the layer has it.
    fn vector(&self, _: VectorKind) -> Option<&[f32]> {
        None
    }
}

/// Where a layer's pass puts its activations. Slices may be longer than the pass needs.
#[derive(Debug)]
pub struct Activations<'a> {
    /// The residual stream, `[rows, hidden]`: read and added to.
    pub residual: &'a mut [f32],
    /// Its normalized copy, `[rows, hidden]`.
    pub normed: &'a mut [f32],
    /// Queries, rotated, `[rows, query width]`.
    pub q: &'a mut [f32],
    /// Keys, rotated, `[rows, key width]`.
    pub k: &'a mut [f32],
    /// Values, `[rows, key width]`.
    pub v: &'a mut [f32],
    /// The joined heads, `[rows, query width]`.
    pub attended: &'a mut [f32],
    /// Log-sum-exp of the scores, `[tokens, heads]`, where a backward pass is to follow.
    pub lse: Option<&'a mut [f32]>,
    /// The MLP's two inner projections, `[rows, intermediate]` or as [`MlpRows`] says.
    pub gate: &'a mut [f32],
    /// See `gate`.
    pub up: &'a mut [f32],
    /// Their product, `[most rows of a part, intermediate]`.
    pub inner: &'a mut [f32],
    /// How the MLP goes through the rows.
    pub mlp: MlpRows,
    /// Scores of a block of queries for each of `threads`: [`CausalAttention::scratch_len`] times their number.
    pub scores: &'a mut [f32],
    /// `[positions, head_dim / 2]`.
    pub cos: &'a [f32],
    /// `[positions, head_dim / 2]`.
    pub sin: &'a [f32],
    /// What only some architectures need; empty for the others.
    pub extra: Extra<'a>,
}

/// Scratch of architectures whose layers are not plain.
#[derive(Debug, Default)]
pub struct Extra<'a> {
    /// Projections stored as one, latents, or a result to be normed before it is added: `[rows, widest of them]`.
    pub wide: &'a mut [f32],
    /// A router's logits, `[rows of a part, experts]`.
    pub logits: &'a mut [f32],
    /// What an expert reads, `[rows of a part, hidden]`.
    pub gathered: &'a mut [f32],
    /// What it gives, `[rows of a part, hidden]`.
    pub result: &'a mut [f32],
    /// The weighted sum of all, `[rows of a part, hidden]`.
    pub sum: &'a mut [f32],
    /// Which tokens go to which experts.
    pub choices: Option<&'a mut Vec<Choice>>,
}

/// A token's way through an expert.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choice {
    /// The expert.
    pub expert: u16,
    /// Row of the token within its part.
    pub row: u32,
    /// Weight of the expert's result.
    pub weight: f32,
}

/// The MLP takes the rows in parts: its inner activations are by far the widest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MlpRows {
    /// Most rows of a part.
    pub most: usize,
    /// Whether `gate` and `up` keep all rows, for a backward pass, or those of one part.
    pub keep: bool,
}

/// A layer's architecture as far as its flow needs it.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerFlow {
    pub(crate) attention: CausalAttention,
    pub(crate) hidden: usize,
    pub(crate) intermediate: usize,
    pub(crate) activation: Activation,
    pub(crate) head_norms: HeadNorms,
    pub(crate) sub_norms: bool,
    pub(crate) threads: usize,
    /// How keys and values enter the cache; whole sequences see them so too.
    pub(crate) kv: Option<KvQuantizer>,
    /// What attention's operands are rounded to.
    pub(crate) operands: Option<OperandRounding>,
    pub(crate) places: NormPlaces,
    pub(crate) qkv: QkvForm,
    pub(crate) mlp: MlpForm,
    pub(crate) softcap: Option<f32>,
    pub(crate) clip: Option<f32>,
    pub(crate) latent: Option<Latent>,
    /// Half the width that is rotated of a head.
    pub(crate) half: usize,
    /// Whether the layer has rotary parameters of its own.
    pub(crate) local: bool,
    pub(crate) experts: Option<ExpertFlow>,
}

/// The experts of a layer as far as its flow needs them.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ExpertFlow {
    pub(crate) count: usize,
    pub(crate) per_token: usize,
    pub(crate) width: usize,
    pub(crate) routing: Routing,
    /// Width of the shared experts, and whether they have a gate.
    pub(crate) shared: Option<(usize, bool)>,
    pub(crate) limited: Option<LimitedSwiglu>,
}

impl LayerFlow {
    /// The flow of layer `layer`, on up to `threads` threads. Their number changes no bit of the result.
    pub fn new(config: &ModelConfig, layer: usize, threads: usize) -> Self {
        LayerFlow {
            attention: attention_shape(config, config.windows[layer]),
            hidden: config.hidden_size,
            intermediate: config.intermediate_size,
            activation: config.hidden_act,
            head_norms: config.head_norms,
            sub_norms: config.has_sub_norms(),
            threads: threads.max(1),
            places: config.norm_places,
            qkv: config.qkv,
            mlp: config.mlp,
            softcap: config.attention_softcap,
            clip: config.clip_qkv,
            latent: config.latent,
            half: config.rotary_dim / 2,
            local: config.local_rope.is_some() && config.windows[layer].is_some(),
            experts: config.experts.as_ref().filter(|experts| experts.layers[layer]).map(|experts| {
                ExpertFlow {
                    count: experts.count.into(),
                    per_token: experts.per_token,
                    width: experts.width,
                    routing: experts.routing,
                    shared: experts.shared.map(|shared| (shared.width, shared.gated)),
                    limited: experts.limited,
                }
            }),
            kv: None,
            operands: None,
        }
    }

    /// Whether attention and MLP read the same states and are added together.
    pub(crate) fn parallel(&self) -> bool {
        matches!(self.places, NormPlaces::Parallel | NormPlaces::ParallelShared)
    }

    /// Whether results are normed before they are added.
    pub(crate) fn norms_results(&self) -> bool {
        matches!(self.places, NormPlaces::After | NormPlaces::Both)
    }

    /// The states that attention or MLP read, in `normed`.
    fn enter(&self, operators: &mut impl Operators, kind: NormKind, len: usize, a: &mut Activations<'_>) {
        match self.places {
            NormPlaces::After => a.normed[..len].copy_from_slice(&a.residual[..len]),
            _ => operators.norm(kind, &a.residual[..len], &mut a.normed[..len]),
        }
    }

    /// Norms a result that lies in `normed` and adds it to the residual stream; both are some rows of theirs.
    pub(crate) fn add_normed(
        operators: &mut impl Operators,
        kind: NormKind,
        result: &[f32],
        normed: &mut [f32],
        residual: &mut [f32],
    ) {
        operators.norm(kind, result, normed);
        kernels().axpy(1.0, normed, residual);
    }

    /// The attention's shape and mask.
    pub fn attention_shape(&self) -> &CausalAttention {
        &self.attention
    }

    /// First half: `residual += attention(norm(residual))`.
    ///
    /// # Errors
    /// [`ForwardError::Input`].
    pub fn attention(
        &self,
        operators: &mut impl Operators,
        seqs: &Sequences<'_>,
        a: &mut Activations<'_>,
    ) -> Result<(), ForwardError> {
        self.attention_after(operators, seqs, None, a)
    }

    /// [`attention`](Self::attention), which with `past` has one sequence and continues what is cached.
    pub(crate) fn attention_after(
        &self,
        operators: &mut impl Operators,
        seqs: &Sequences<'_>,
        past: Option<Past<'_>>,
        a: &mut Activations<'_>,
    ) -> Result<(), ForwardError> {
        self.heads(operators, seqs, past, a)?;
        self.output(operators, seqs, a)
    }

    /// The first half up to the output projection: the joined heads, in `attended`.
    pub(crate) fn heads(
        &self,
        operators: &mut impl Operators,
        seqs: &Sequences<'_>,
        past: Option<Past<'_>>,
        a: &mut Activations<'_>,
    ) -> Result<(), ForwardError> {
        self.read(operators, seqs, past.is_some(), a)?;
        self.norm_heads(operators, seqs.rows, a);
        match past {
            Some(past) if self.latent.is_some() => self.attend_latents(operators, seqs, past, a)?,
            Some(past) => self.attend_cached(seqs, past, operators.vector(VectorKind::Sinks), a)?,
            None => self.attend(seqs, operators.vector(VectorKind::Sinks), a),
        }
        if self.places == NormPlaces::Parallel {
            // What the MLP is to read, before the attention changes it.
            let len = seqs.rows * self.hidden;
            operators.norm(NormKind::Post, &a.residual[..len], &mut a.normed[..len]);
        }
        Ok(())
    }

    /// The first half up to queries, keys and values, not yet normed; of latents, with `cached`, up to the queries.
    pub(crate) fn read(
        &self,
        operators: &mut impl Operators,
        seqs: &Sequences<'_>,
        cached: bool,
        a: &mut Activations<'_>,
    ) -> Result<(), ForwardError> {
        self.enter(operators, NormKind::Input, seqs.rows * self.hidden, a);
        self.project(operators, seqs, cached, a)
    }

    /// Second half: `residual += mlp(norm(residual))`.
    ///
    /// # Errors
    /// [`ForwardError::Input`].
    pub fn mlp(
        &self,
        operators: &mut impl Operators,
        seqs: &Sequences<'_>,
        a: &mut Activations<'_>,
    ) -> Result<(), ForwardError> {
        let len = seqs.rows * self.hidden;
        if !self.parallel() {
            self.enter(operators, NormKind::Post, len, a);
        }
        let tokens = seqs.tokens();
        parts(seqs.rows, a.mlp.most).try_for_each(|part| {
            let real = part.end.min(tokens).saturating_sub(part.start);
            match &self.experts {
                None => self.mlp_part(operators, part, real, a),
                Some(experts) => self.experts_part(experts, operators, part, real, a),
            }
        })
    }
}

/// The shape of a model's attention with `window`.
pub(crate) fn attention_shape(config: &ModelConfig, window: Option<usize>) -> CausalAttention {
    CausalAttention {
        heads: config.num_attention_heads,
        kv_heads: config.num_key_value_heads,
        head_dim: config.head_dim,
        scale: config.attention_scale,
        window,
    }
}

/// Cuts `rows` into nearly equal parts of at most `most`. The parts of a large pass are all large, so that none
/// is multiplied by the path for single rows.
pub fn parts(rows: usize, most: usize) -> impl Iterator<Item = Range<usize>> + Clone {
    let parts = rows.div_ceil(most.max(1));
    (0..parts).map(move |i| i * rows / parts..(i + 1) * rows / parts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_all_rows_and_are_never_tiny() {
        for rows in [1, 2, 3, 511, 512, 513, 1024, 1025, 1537, 100_000] {
            let cut: Vec<_> = parts(rows, 512).collect();
            assert_eq!(cut.iter().map(ExactSizeIterator::len).sum::<usize>(), rows);
            assert!(cut.windows(2).all(|w| w[0].end == w[1].start));
            assert!(cut.iter().all(|p| p.len() <= 512 && p.len() >= rows.min(256)));
        }
        assert_eq!(parts(0, 512).count(), 0);
    }
}
