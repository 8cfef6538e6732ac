//! Computation of a decoder layer, written once for evaluation, calibration, generation and training: `x +=
//! attention(norm(x))`, `x += mlp(norm(x))`, on `residual` `[rows, hidden]`. Architectures differ in the places of
//! norms, in the storage of projections and in the structure of the MLP. The config states these; no layer depends on
//! its model's name.
//!
//! [`Operators`] provides everything that depends on how weights are stored (norms and linear layers),
//! [`Activations`] the buffers. Everything else (RoPE, attention, the gate, and the order of operations) is here, so
//! a model has the same bits in every kind of pass.

pub(crate) mod operators;

pub use mantissa_kernels::parts;
use mantissa_kernels::{CausalAttention, kernels};

use crate::config::{
    Activation, DenseMlp, HeadNorms, Latent, LimitedSwiglu, MlpForm, ModelConfig, Multipliers, NormPlaces,
    QkvForm, QueryGrowth, Routing, SharedExperts, Streams,
};
use crate::error::ForwardError;
use crate::graph::kinds::{HyperSite, NormKind, VectorKind};
use crate::hyper::HyperFlow;
use crate::kv::quantizer::KvQuantizer;
use crate::mixer::{MixRows, Mixing, Recurrent};
use crate::operands::OperandRounding;

pub use self::operators::{
    Activations, CachedAttention, Choice, ExtraScratch, Group, IndexRows, Job, LatentTokens, MIN_ROWS,
    MlpRows, Operators, Sequences,
};
pub use crate::experts::{route_backward, sigmoid};
pub use crate::indexer::IndexerFlow;
pub use crate::latent::AbsorbedHeads;
use crate::streams::StreamFlow;

/// Features of a layer that its computation depends on.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerFlow {
    /// Index of the layer.
    pub(crate) index: usize,
    pub(crate) attention: CausalAttention,
    pub(crate) hidden: usize,
    pub(crate) intermediate: usize,
    pub(crate) activation: Activation,
    pub(crate) head_norms: HeadNorms,
    pub(crate) sub_norms: bool,
    pub(crate) threads: usize,
    /// Quantization of keys and values as they enter the cache; whole sequences see the same values.
    pub(crate) kv: Option<KvQuantizer>,
    /// Rounding of attention's operands.
    pub(crate) operands: Option<OperandRounding>,
    pub(crate) places: NormPlaces,
    pub(crate) qkv: QkvForm,
    pub(crate) mlp: MlpForm,
    pub(crate) softcap: Option<f32>,
    pub(crate) clip: Option<f32>,
    /// True if the layer projects its own keys and values; false if it reads those of an earlier one.
    pub(crate) own_kv: bool,
    /// True if the keys, before their norm, are the values too.
    pub(crate) keys_are_values: bool,
    /// True if each head of the values is normed.
    pub(crate) value_norm: bool,
    /// Width of the layer's own input.
    pub(crate) input: Option<usize>,
    /// True if the states are multiplied by a number after the layer.
    pub(crate) scales: bool,
    /// Parallel streams of states, of which the layer computes the first.
    pub(crate) streams: Option<StreamFlow>,
    /// Parallel streams of states, which each half of the layer joins and mixes.
    pub(crate) hyper: Option<HyperFlow>,
    /// Standard deviations above its mean at which the gate of a token is cut off.
    pub(crate) cutoff: Option<f32>,
    /// Factor of the queries by position.
    pub(crate) growth: Option<QueryGrowth>,
    pub(crate) latent: Option<Latent>,
    pub(crate) indexer: Option<IndexerFlow>,
    /// True if the joined heads are gated.
    pub(crate) gated: bool,
    /// Factors of attention, mixer and MLP.
    pub(crate) multipliers: Option<Multipliers>,
    /// First half of the layer.
    pub(crate) mixing: Mixing,
    /// Recurrent mixer of the layer's tokens, if that is its first half.
    pub(crate) recurrent: Option<Recurrent>,
    /// True if the layer has a second half.
    pub(crate) has_mlp: bool,
    /// Half the rotated width of a head; 0 if the layer has no RoPE.
    pub(crate) half: usize,
    /// True if the rotated pairs are adjacent in what the projections return.
    pub(crate) interleaved: bool,
    /// True if the layer has its own rotary parameters.
    pub(crate) local: bool,
    pub(crate) experts: Option<ExpertFlow>,
}

/// Features of the experts of a layer.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ExpertFlow {
    pub(crate) count: usize,
    pub(crate) per_token: usize,
    pub(crate) width: usize,
    pub(crate) routing: Routing,
    pub(crate) shared: Option<SharedExperts>,
    pub(crate) limited: Option<LimitedSwiglu>,
    /// True if experts and shared experts have a gate.
    pub(crate) gated: bool,
    /// Width of the latent that experts read and write.
    pub(crate) latent: Option<usize>,
    pub(crate) dense: DenseMlp,
    /// True if a token is multiplied by an expert's weight before it enters it, not after.
    pub(crate) scales_input: bool,
    /// True if every token runs through every expert, so that all experts see inputs. Results of experts that the router
    /// did not choose are left out.
    pub(crate) runs_all: bool,
}

impl LayerFlow {
    /// Creates the flow of layer `layer`, on up to `threads` threads, which change no bit of the result.
    pub fn new(config: &ModelConfig, layer: usize, threads: usize) -> Self {
        LayerFlow {
            index: layer,
            attention: config.attention_shape(layer),
            hidden: config.hidden_size,
            intermediate: config.ffn(layer),
            activation: config.hidden_act,
            head_norms: match config.head_norms {
                HeadNorms::Plain if !config.rotated_layers[layer] => HeadNorms::Absent,
                norms => norms,
            },
            sub_norms: config.has_sub_norms(),
            threads: threads.max(1),
            places: config.norm_places,
            qkv: config.qkv,
            mlp: config.mlp,
            softcap: config.attention_softcap,
            clip: config.clip_qkv,
            growth: config.query_growth.filter(|growth| !(growth.unrotated && config.rotated_layers[layer])),
            latent: config.latent,
            indexer: IndexerFlow::new(config, layer),
            own_kv: config.has_own_kv(layer),
            keys_are_values: config.keys_are_values(layer),
            value_norm: config.value_norm,
            input: config.by_layer.inputs.map(|inputs| inputs.width),
            scales: config.by_layer.scales,
            streams: config.by_layer.streams.map(|Streams { count, laurel, scales }| StreamFlow {
                count,
                laurel,
                scales,
                first: layer == 0,
                last: layer + 1 == config.num_hidden_layers,
            }),
            hyper: config.by_layer.hyper.map(|streams| HyperFlow {
                streams,
                norm_eps: config.rms_norm_eps,
                first: layer == 0,
                last: layer + 1 == config.num_hidden_layers,
            }),
            cutoff: config.by_layer.cutoffs.get(layer).copied().flatten(),
            half: if config.rotated_layers[layer] { config.rotary_dim_of(layer) / 2 } else { 0 },
            gated: config.gated_attention,
            multipliers: config.multipliers,
            mixing: config.mixing[layer],
            recurrent: config.recurrent_in(layer),
            has_mlp: config.has_mlp[layer],
            interleaved: config.rope_interleaved && config.rotated_layers[layer],
            local: config.local_rope.is_some() && config.windows[layer].is_some(),
            experts: config.experts.as_ref().filter(|experts| experts.layers[layer]).map(|experts| {
                ExpertFlow {
                    count: experts.count.into(),
                    per_token: experts.per_token,
                    width: experts.width,
                    routing: experts.routing,
                    shared: experts.shared,
                    limited: experts.limited,
                    gated: experts.gated,
                    latent: experts.latent,
                    dense: experts.dense,
                    scales_input: experts.scales_input,
                    runs_all: false,
                }
            }),
            kv: None,
            operands: None,
        }
    }

    /// True if attention and MLP run in parallel on the same states.
    pub(crate) fn parallel(&self) -> bool {
        matches!(self.places, NormPlaces::Parallel | NormPlaces::ParallelShared)
    }

    /// True if a pass may stop after the joined heads or the MLP's input, and go on from there. Not with streams that are
    /// mixed between the halves.
    pub(crate) fn pauses(&self) -> bool {
        !self.parallel() && self.mixing != Mixing::Both && self.hyper.is_none()
    }

    /// True if results are normed before they are added.
    pub(crate) fn norms_results(&self) -> bool {
        matches!(self.places, NormPlaces::After | NormPlaces::Both)
    }

    /// Writes the input of attention or MLP into `normed`.
    fn enter(&self, operators: &mut impl Operators, kind: NormKind, len: usize, a: &mut Activations<'_>) {
        match self.places {
            NormPlaces::After => a.normed[..len].copy_from_slice(&a.residual[..len]),
            _ => operators.norm(kind, &a.residual[..len], &mut a.normed[..len]),
        }
    }

    /// Norms a result into `normed` and adds it to the residual stream, for some rows.
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

    /// Quantizes keys and values with `kv` before attention reads them, as they enter a cache.
    pub fn with_kv(self, kv: Option<KvQuantizer>) -> Self {
        LayerFlow { kv, ..self }
    }

    /// Runs on up to `threads` threads.
    pub fn on_threads(self, threads: usize) -> Self {
        LayerFlow { threads: threads.max(1), ..self }
    }

    /// Number of threads.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// True if the layer has its own rotary parameters: see [`Buffers::activations`](crate::Buffers::activations).
    pub fn has_local_rope(&self) -> bool {
        self.local
    }

    /// Half the rotated width of a head; 0 if the layer has no RoPE.
    pub fn half(&self) -> usize {
        self.half
    }

    /// True if the layer has attention, and so keys and values.
    pub fn attends(&self) -> bool {
        self.mixing.attends()
    }

    /// Width of the input of the output projection, before padding is dropped.
    pub(crate) fn joined_width(&self) -> usize {
        self.mixed_from() + self.recurrent.as_ref().map_or(0, Recurrent::width)
    }

    /// Width of the joined heads, which come before the mixer's result in `attended`.
    pub(crate) fn mixed_from(&self) -> usize {
        if self.attends() { self.widths().0 } else { 0 }
    }

    /// Soft cap of the scores.
    pub fn softcap(&self) -> Option<f32> {
        self.softcap
    }

    /// True if the layer projects its own keys and values; false if it reads those of an earlier one.
    pub fn has_own_kv(&self) -> bool {
        self.own_kv
    }

    /// True if queries and keys are rotated.
    pub fn rotates(&self) -> bool {
        self.half > 0
    }

    /// Quantizer of keys and values; `None` if they are cached in f32.
    pub fn kv(&self) -> Option<&KvQuantizer> {
        self.kv.as_ref()
    }

    /// Shape and mask of the attention.
    pub fn attention_shape(&self) -> &CausalAttention {
        &self.attention
    }

    /// Runs the first half: `residual += attention(norm(residual))`, or the recurrent mixer in place of attention.
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

    /// Runs [`attention`](Self::attention); with `past`, for sequences that continue cached tokens.
    ///
    /// # Errors
    /// As [`attention`](Self::attention), and those of `past`.
    pub fn attention_after(
        &self,
        operators: &mut impl Operators,
        seqs: &Sequences<'_>,
        past: Option<&mut dyn CachedAttention>,
        a: &mut Activations<'_>,
    ) -> Result<(), ForwardError> {
        self.heads(operators, seqs, past, a)?;
        self.output(operators, seqs, a)
    }

    /// Runs the first half up to the output projection: the joined heads or the mixer's result, in `attended`.
    pub(crate) fn heads(
        &self,
        operators: &mut impl Operators,
        seqs: &Sequences<'_>,
        past: Option<&mut dyn CachedAttention>,
        a: &mut Activations<'_>,
    ) -> Result<(), ForwardError> {
        if self.mixing == Mixing::None {
            return Ok(());
        }
        let latents = self.latent.is_some() && past.as_ref().is_some_and(|past| past.holds_latents());
        self.read(operators, seqs, latents, a)?;
        let mut past = past;
        if let Some(recurrent) = &self.recurrent {
            let states = match &mut past {
                Some(past) => Some(past.states()?),
                None => None,
            };
            let (scratch, out) = (&mut *a.extra.wide, &mut a.attended[seqs.rows * self.mixed_from()..]);
            let (threads, cos, sin) = (self.threads, a.cos, a.sin);
            let rows = MixRows { seqs, states, threads, scratch, out: &mut *out, cos, sin };
            recurrent.mixer().mix(operators, rows);
            let factor = self.multipliers.map(|multipliers| multipliers.mixed);
            scale(factor, &mut out[..seqs.rows * recurrent.width()]);
        }
        if !self.attends() {
            self.norm_for_mlp(operators, seqs, a);
            return Ok(());
        }
        self.norm_heads(operators, seqs.rows, a);
        self.grow_queries(seqs, a.q);
        match past {
            Some(past) if latents => self.attend_latents(operators, seqs, past, a)?,
            Some(past) => {
                past.attend(self, seqs, self.score_rules(operators.vector(VectorKind::Sinks)), a)?;
            }
            None => {
                self.choose_whole(seqs, &mut a.extra.index, a.cos, a.sin);
                self.attend(seqs, operators.vector(VectorKind::Sinks), a);
            }
        }
        self.gate_heads(seqs, a);
        let factor = self.multipliers.map(|multipliers| multipliers.attended);
        scale(factor, &mut a.attended[..seqs.rows * self.widths().0]);
        self.norm_for_mlp(operators, seqs, a);
        Ok(())
    }

    /// Norms the states for an MLP that runs in parallel.
    fn norm_for_mlp(&self, operators: &mut impl Operators, seqs: &Sequences<'_>, a: &mut Activations<'_>) {
        if self.places == NormPlaces::Parallel {
            // The MLP reads these states before attention changes them.
            let len = seqs.rows * self.hidden;
            operators.norm(NormKind::Post, &a.residual[..len], &mut a.normed[..len]);
        }
    }

    /// Runs the first half up to queries, keys and values, before QK norms; for `cached` latents, up to the queries; for a
    /// recurrent mixer, up to its projections.
    pub(crate) fn read(
        &self,
        operators: &mut impl Operators,
        seqs: &Sequences<'_>,
        cached: bool,
        a: &mut Activations<'_>,
    ) -> Result<(), ForwardError> {
        if self.mixing == Mixing::None {
            return Ok(());
        }
        self.predict(operators, seqs.rows, false, a);
        self.join_into(&*operators, HyperSite::Attention, seqs.rows, a);
        self.enter(operators, NormKind::Input, seqs.rows * self.hidden, a);
        self.clear_joined(seqs.rows, a);
        if let Some(recurrent) = &self.recurrent {
            let x = &a.normed[..seqs.rows * self.hidden];
            recurrent.mixer().project(operators, x, (seqs.rows, seqs.tokens()), a.extra.wide)?;
        }
        if !self.attends() {
            return Ok(());
        }
        self.project(operators, seqs, cached, a)
    }

    /// Runs the second half: `residual += mlp(norm(residual))`.
    ///
    /// # Errors
    /// [`ForwardError::Input`].
    pub fn mlp(
        &self,
        operators: &mut impl Operators,
        seqs: &Sequences<'_>,
        a: &mut Activations<'_>,
    ) -> Result<(), ForwardError> {
        if !self.has_mlp {
            return Ok(());
        }
        let len = seqs.rows * self.hidden;
        self.join_into(&*operators, HyperSite::Mlp, seqs.rows, a);
        if !self.parallel() {
            self.enter(operators, NormKind::Post, len, a);
        }
        self.clear_joined(seqs.rows, a);
        let tokens = seqs.tokens();
        parts(seqs.rows, a.mlp.most).try_for_each(|part| {
            let real = part.end.min(tokens).saturating_sub(part.start);
            match &self.experts {
                None => self.mlp_part(operators, part.clone(), real, a)?,
                Some(experts) => {
                    if experts.dense != DenseMlp::None {
                        self.mlp_part(operators, part.clone(), real, a)?;
                    }
                    self.experts_part(experts, operators, part.clone(), real, a)?;
                }
            }
            self.correct(operators, part.clone(), a);
            if let Some(width) = self.input {
                self.add_input(width, operators, part.clone(), real, a)?;
            }
            self.join_streams(operators, part, a);
            Ok(())
        })?;
        self.mix_streams(&*operators, HyperSite::Mlp, seqs.rows, a);
        if let Some(&[scale]) = operators.vector(VectorKind::Scale).filter(|_| self.scales) {
            a.residual[..len].iter_mut().for_each(|x| *x *= scale);
        }
        Ok(())
    }
}

/// Multiplies `x` by a factor, if there is one.
pub(crate) fn scale(factor: Option<f32>, x: &mut [f32]) {
    if let Some(factor) = factor.filter(|factor| *factor != 1.0) {
        x.iter_mut().for_each(|x| *x *= factor);
    }
}
