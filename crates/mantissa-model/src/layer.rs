//! One decoder layer with its weights, as evaluation holds them; [`crate::flow`] defines what it computes.

use std::collections::BTreeMap;
use std::ops::Range;

use mantissa_kernels::kernels;
use mantissa_num::Source;
use mantissa_num::pack::transpose;
use mantissa_store::convention::{LinearWeight, Weight};

use crate::buffers::Buffers;
use crate::cache::Past;
use crate::config::{HeadNorms, Latent, ModelConfig};
use crate::error::{ForwardError, LoadError};
use crate::flow::{self, CachedAttention, LayerFlow, MIN_ROWS, Operators, Sequences};
use crate::graph::{LinearInfo, LinearInput, LinearKind, NormKind, SideInfo, SideKind, StoredAs, VectorKind};
use crate::kv::policy::KvPolicy;
use crate::kv::quantizer::KvQuantizer;
use crate::kv::stored;
use crate::linear::{Linear, LinearMatmul, forward_fused};
use crate::norm::Norm;
use crate::operands::OperandRounding;
use crate::products::Products;
use crate::source::WeightSource;

/// Rows of an input that a column of a small projection is computed of at a time.
const ROWS_OF_SIDE: usize = 64;

/// Callback for the inputs of linear layers: the kind of input, and its values `[tokens, width]`, without padding and
/// before run-time quantization. Tokens come in order; those of a long pass may come in several calls. An expert
/// receives the tokens routed to it.
pub type Observer<'a> = dyn FnMut(LinearInput, &[f32]) + 'a;

/// Points at which states may pause in a layer, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    /// Before the layer.
    Input,
    /// The heads are joined; the output projection has not run.
    Heads,
    /// The attention's result is added; the MLP has not run.
    Middle,
    /// After the layer.
    End,
}

impl Place {
    /// [Turn](LinearInput::turn) of the inputs that are read next from here.
    pub const fn turn(self) -> u8 {
        match self {
            Place::Input => LinearInput::Qkv.turn(),
            Place::Heads => LinearInput::O.turn(),
            Place::Middle | Place::End => LinearInput::GateUp.turn(),
        }
    }
}

/// Part of a layer that a pass runs.
#[derive(Debug)]
pub struct Passage<'a> {
    /// Point that the states have reached.
    pub from: Place,
    /// Input to stop at: products of this input and of later ones are not computed. `None` runs to the end.
    pub to: Option<LinearInput>,
    /// Joined heads `[tokens, query width]`, or the result of a recurrent mixer: read from [`Place::Heads`] on, and written if the pass ends there.
    pub heads: &'a mut Vec<f32>,
}

/// A decoder layer.
#[derive(Clone, Debug)]
pub struct Layer {
    linears: BTreeMap<LinearKind, Linear>,
    norms: Vec<(NormKind, Norm)>,
    sides: Vec<(SideKind, Linear)>,
    vectors: Vec<(VectorKind, Vec<f32>)>,
    flow: LayerFlow,
}

/// Parts of a [`Layer`], for owners that store its linear layers in another way.
#[derive(Clone, Debug)]
pub struct LayerParts<T = Linear> {
    /// Linear layers.
    pub linears: BTreeMap<LinearKind, T>,
    /// Norms.
    pub norms: Vec<(NormKind, Norm)>,
    /// Routers and gates of experts.
    pub sides: Vec<(SideKind, Linear)>,
    /// Vectors.
    pub vectors: Vec<(VectorKind, Vec<f32>)>,
    /// Computation of the layer, on one thread.
    pub flow: LayerFlow,
}

impl<T> LayerParts<T> {
    /// Loads the parts of layer `layer`; `prepare` makes a linear layer from its stored weight, one at a time.
    ///
    /// # Errors
    /// As [`WeightSource`] and `prepare`.
    pub fn load(
        source: &dyn WeightSource,
        config: &ModelConfig,
        layer: usize,
        mut prepare: impl FnMut(&LinearInfo, LinearWeight) -> Result<T, LoadError>,
    ) -> Result<Self, LoadError> {
        let mut linears = BTreeMap::new();
        for info in config.layer_linears(layer) {
            linears.insert(info.kind, prepare(&info, linear_weight(source, &info)?)?);
        }
        let norm = |(kind, width)| {
            let norm = Norm::load(source, config, &config.norm_module(layer, kind), width)?;
            let latent = matches!(kind, NormKind::QLatent | NormKind::KvLatent);
            Ok((kind, if latent { norm.with_eps(Latent::EPS) } else { norm }))
        };
        let plain = [
            (NormKind::Value, config.attention.value_norm && config.has_own_kv(layer)),
            (NormKind::Query, config.head_norms == HeadNorms::Plain),
            (NormKind::Key, config.head_norms == HeadNorms::Plain),
        ];
        let plain = plain.into_iter().filter(|(_, has)| *has).map(|(kind, _)| {
            let weight = vec![1.0; config.heads(layer).dim];
            Ok((kind, Norm::rms(weight, config.rms_norm_eps)))
        });
        let side = |SideInfo { kind, rows, cols, bias }| {
            let module = config.side_module(layer, kind);
            let weight = source.linear(&module, rows, cols, bias)?;
            Ok((kind, Linear::new(&module, weight)?))
        };
        let vector = |(kind, shape): (VectorKind, Vec<usize>)| {
            let name = config.vector_name(layer, kind);
            if kind.is_integer() {
                return Ok((kind, token_experts(source, config, &name, &shape)?));
            }
            let values = source.tensor_f32(&name, &shape)?;
            // A depthwise convolution runs row by row.
            let by_rows = |shape: &[usize]| transpose(&values, shape[0], shape.iter().skip(1).product());
            Ok((kind, if kind.convolves() { by_rows(&shape) } else { values }))
        };
        let vectors: Vec<(VectorKind, Vec<f32>)> =
            config.vectors(layer).into_iter().map(vector).collect::<Result<_, LoadError>>()?;
        let router = vectors.iter().find(|(kind, _)| *kind == VectorKind::RouterScale).map(|(_, scales)| {
            let root = (config.hidden_size as f32).sqrt().recip();
            let weight = scales.iter().map(|scale| scale * root).collect();
            Ok((NormKind::Router, Norm::rms(weight, config.rms_norm_eps)))
        });
        let mut flow = LayerFlow::new(config, layer, 1);
        if config.attends(layer) {
            flow = flow.with_kv(cache_quantizer(source, config, layer)?);
        }
        Ok(LayerParts {
            linears,
            norms: config
                .norms(layer)
                .map(norm)
                .chain(plain)
                .chain(router)
                .collect::<Result<_, LoadError>>()?,
            sides: config.sides(layer).into_iter().map(side).collect::<Result<_, LoadError>>()?,
            vectors,
            flow,
        })
    }
}

impl Layer {
    /// Loads layer `layer` by itself, for work that holds one layer at a time.
    ///
    /// # Errors
    /// As [`WeightSource`].
    pub fn load(source: &dyn WeightSource, config: &ModelConfig, layer: usize) -> Result<Self, LoadError> {
        let prepare = |info: &LinearInfo, weight| Linear::new(&info.module, weight);
        let LayerParts { linears, norms, sides, vectors, flow } =
            LayerParts::load(source, config, layer, prepare)?;
        Ok(Layer { linears, norms, sides, vectors, flow })
    }

    /// Index of the layer.
    pub fn index(&self) -> usize {
        self.flow.index
    }

    /// Features of the layer.
    pub(crate) fn flow(&self) -> &LayerFlow {
        &self.flow
    }

    /// Quantizer of keys and values; `None` if they are cached in f32.
    pub(crate) fn kv(&self) -> Option<&KvQuantizer> {
        self.flow.attention().kv()
    }

    /// Sets the quantizer of keys and values, unless the layer has none.
    pub(crate) fn set_kv(&mut self, quantizer: Option<KvQuantizer>) {
        self.flow.attention.kv = quantizer.filter(|_| self.flow.attends());
    }

    /// Runs every token through every expert, so that an observer sees inputs of all. Results of experts that the
    /// router did not choose are left out.
    pub fn run_all_experts(&mut self) {
        if let Some(experts) = self.flow.experts.as_mut() {
            experts.runs_all = true;
        }
    }

    /// Rounds every step of its norms by `rounding`; `None` computes them in f32. Norms inside recurrent mixers and
    /// compressed attention are unchanged.
    pub fn set_norm_rounding(&mut self, rounding: Option<fn(f32) -> f32>) {
        self.norms.iter_mut().for_each(|(_, norm)| norm.set_rounding(rounding));
    }

    /// Rounds the operands of its attention.
    pub(crate) fn set_operands(&mut self, rounding: Option<OperandRounding>) {
        self.flow.attention.operands = rounding;
    }

    /// Sets the operand dtype of its linear layers. Routers and gates of experts are unchanged.
    pub fn set_products(&mut self, products: Products) {
        self.linears.values_mut().for_each(|linear| linear.set_products(products));
    }

    /// Returns a linear layer, if there is one of this kind.
    pub fn linear(&self, kind: LinearKind) -> Option<&Linear> {
        self.linears.get(&kind)
    }

    /// Returns a linear layer, to be replaced.
    pub fn linear_mut(&mut self, kind: LinearKind) -> Option<&mut Linear> {
        self.linears.get_mut(&kind)
    }

    /// Iterates over its linear layers, mutable.
    pub(crate) fn linears_mut(&mut self) -> impl Iterator<Item = &mut Linear> {
        self.linears.values_mut()
    }

    /// Iterates over its linear layers.
    pub fn linears(&self) -> impl Iterator<Item = (LinearKind, &Linear)> {
        self.linears.iter().map(|(kind, linear)| (*kind, linear))
    }

    /// Returns a norm, if there is one of this kind.
    pub fn norm(&self, kind: NormKind) -> Option<&Norm> {
        self.norms.iter().find(|(of, _)| *of == kind).map(|(_, norm)| norm)
    }

    /// Runs whole sequences through this layer alone; if layers read more than the states
    /// ([`ModelConfig::carries`]), [`Carried::enter`](crate::Carried::enter) comes before. `states` `[tokens, hidden]`, concatenated, `lens` tokens each.
    /// The result has the bits of [`Decoder::forward`](crate::Decoder::forward).
    ///
    /// # Errors
    /// As [`Decoder::forward`](crate::Decoder::forward). The states are unchanged then.
    pub fn run(
        &self,
        config: &ModelConfig,
        lens: &[usize],
        states: &mut [f32],
        observer: Option<&mut Observer<'_>>,
        b: &mut Buffers,
    ) -> Result<(), ForwardError> {
        let passage = Passage { from: Place::Input, to: None, heads: &mut Vec::new() };
        self.pass(config, lens, passage, states, observer, b).map(|_| ())
    }

    /// Runs part of the layer, from the point of `states` to the input `to` or the end. Returns the point that states
    /// and heads have reached; a pass that continues from there gives the same bits as one from the beginning. If
    /// attention and MLP, or attention and a mixer, run in parallel, only a pass to the end advances.
    ///
    /// # Errors
    /// As [`run`](Self::run); [`ForwardError::Lengths`] if the numbers of heads and states differ. States and heads
    /// are unchanged then.
    ///
    /// # Panics
    /// If the input is read before the point of the states.
    pub fn pass(
        &self,
        config: &ModelConfig,
        lens: &[usize],
        passage: Passage<'_>,
        states: &mut [f32],
        observer: Option<&mut Observer<'_>>,
        b: &mut Buffers,
    ) -> Result<Place, ForwardError> {
        let (tokens, width) = (states.len() / config.hidden_size, self.flow.joined_width());
        let sum = lens.iter().fold(0usize, |sum, &len| sum.saturating_add(len));
        if sum != tokens || tokens * config.hidden_size != states.len() {
            return Err(ForwardError::Lengths { sum, tokens });
        }
        let Passage { from, to, heads } = passage;
        assert!(to.is_none_or(|to| to.turn() >= from.turn()), "layer: {to:?} is read before {from:?}");
        if from == Place::Heads && heads.len() != tokens * width {
            return Err(ForwardError::Lengths { sum: heads.len() / width.max(1), tokens });
        }
        b.check(config, tokens, lens.iter().max().copied().unwrap_or(0))?;
        let rows = tokens.max(MIN_ROWS);
        let (residual, padding) = b.residual[..rows * config.hidden_size].split_at_mut(states.len());
        residual.copy_from_slice(states);
        padding.fill(0.0);
        if from == Place::Heads {
            let (attended, padding) = b.attended[..rows * width].split_at_mut(heads.len());
            attended.copy_from_slice(heads);
            padding.fill(0.0);
        }
        let (came, middle) = self.part(&Sequences { lens, starts: &[], rows }, from, to, observer, b)?;
        match came {
            Place::Input => {}
            Place::Heads => {
                heads.clear();
                heads.extend_from_slice(&b.attended[..tokens * width]);
            }
            Place::Middle => states.copy_from_slice(&middle[..states.len()]),
            Place::End => states.copy_from_slice(&b.residual[..states.len()]),
        }
        Ok(came)
    }

    /// Runs `b.residual`, or `b.attended` from [`Place::Heads`], up to the products of `to`. Returns the point
    /// reached, and the states if that is [`Place::Middle`].
    fn part(
        &self,
        seqs: &Sequences<'_>,
        from: Place,
        to: Option<LinearInput>,
        observer: Option<&mut Observer<'_>>,
        b: &mut Buffers,
    ) -> Result<(Place, Vec<f32>), ForwardError> {
        let turn = to.map_or(u8::MAX, LinearInput::turn);
        let (mut a, quantized, panel) = b.activations(self.flow.local);
        let operators = &mut Evaluate { layer: self, observer, turn, quantized, panel };
        // The input of a parallel MLP is computed with the heads, so nothing can continue after them; nor after heads
        // beside a mixer's result.
        let place = |place| if self.flow.pauses() { place } else { Place::Input };
        if from == Place::Input {
            if turn < LinearInput::O.turn() {
                self.flow.run_read(operators, seqs, &mut a)?;
                return Ok((Place::Input, Vec::new()));
            }
            self.flow.run_heads(operators, seqs, None, &mut a)?;
        }
        // The other streams are predicted from those before the layer again.
        if from > Place::Input {
            self.flow.run_predict(operators, seqs, from == Place::Middle, &mut a)?;
        }
        if from < Place::Middle {
            self.flow.run_output(operators, seqs, &mut a)?;
        }
        if turn == LinearInput::O.turn() {
            return Ok((place(Place::Heads), Vec::new()));
        }
        // With products left out, the MLP does not leave complete states.
        let middle = to.map_or_else(Vec::new, |_| a.residual[..seqs.rows * self.flow.frame.hidden].to_vec());
        self.flow.run_mlp(operators, seqs, &mut a)?;
        Ok((if to.is_some() { place(Place::Middle) } else { Place::End }, middle))
    }

    /// Runs `b.residual` through the layer.
    ///
    /// # Errors
    /// [`ForwardError::Input`].
    pub(crate) fn forward(
        &self,
        seqs: &Sequences<'_>,
        mut past: Option<Past<'_>>,
        observer: Option<&mut Observer<'_>>,
        b: &mut Buffers,
    ) -> Result<(), ForwardError> {
        let past = past.as_mut().map(|past| past as &mut dyn CachedAttention);
        let (mut activations, quantized, panel) = b.activations(self.flow.local);
        let mut operators = Evaluate { layer: self, observer, turn: u8::MAX, quantized, panel };
        self.flow.run_attention_after(&mut operators, seqs, past, &mut activations)?;
        self.flow.run_mlp(&mut operators, seqs, &mut activations)
    }
}

/// Operators of a layer with constant weights: each linear layer reads its own storage.
struct Evaluate<'a, 'o> {
    layer: &'a Layer,
    observer: Option<&'a mut Observer<'o>>,
    /// Products of inputs of this turn and later ones are not computed.
    turn: u8,
    quantized: &'a mut [f32],
    panel: &'a mut [f32],
}

impl Operators for Evaluate<'_, '_> {
    fn norm(&mut self, kind: NormKind, x: &[f32], out: &mut [f32]) {
        match self.layer.norm(kind) {
            Some(norm) => norm.forward(x, out),
            // The flow asks only for norms in the config, and those were loaded.
            None => out.copy_from_slice(x),
        }
    }

    fn linears(
        &mut self,
        input: LinearInput,
        x: &[f32],
        tokens: usize,
        jobs: &mut [flow::MatmulJob<'_>],
    ) -> Result<(), ForwardError> {
        // The flow asks only for layers in the config, and those were loaded.
        let first = jobs.first().and_then(|job| self.layer.linear(job.kind));
        // Attention beside a mixer reads the same input, which is observed once.
        let again =
            self.layer.flow.attends() && jobs.first().is_some_and(|job| job.kind == LinearKind::MixIn);
        let first = first.filter(|_| !again);
        if let (Some(observe), Some(linear)) = (self.observer.as_mut(), first) {
            observe(input, &x[..tokens * linear.cols()]);
        }
        if input.turn() >= self.turn {
            return Ok(());
        }
        let jobs = jobs.iter_mut().filter_map(|job| {
            let linear = self.layer.linear(job.kind)?;
            Some(LinearMatmul { linear, out: &mut *job.out, accumulate: job.accumulate })
        });
        forward_fused(jobs, x, self.quantized, self.panel)
    }

    fn side(&mut self, kind: SideKind, x: &[f32], out: &mut [f32]) {
        if let Some((_, linear)) = self.layer.sides.iter().find(|(of, _)| *of == kind) {
            // One output: the summation order of so narrow a product would depend on the number of rows.
            if linear.rows() == 1 && linear.bias().is_none() {
                let weight = &mut self.panel[..linear.cols()];
                linear.row(0, weight);
                kernels().gemv(x, weight.len(), weight, out, false);
            } else {
                linear.forward(x, out, false, self.panel);
            }
        }
    }

    fn side_rows(&mut self, kind: SideKind, rows: Range<usize>, x: &[f32], out: &mut [f32]) {
        if let Some((_, linear)) = self.layer.sides.iter().find(|(of, _)| *of == kind) {
            let (weight, column) = self.panel.split_at_mut(linear.cols());
            let (tokens, count) = (x.len() / linear.cols(), rows.len());
            // Column by column, so that the summation order does not depend on the number of tokens.
            for (i, row) in rows.enumerate() {
                linear.row(row, weight);
                for (tokens, x) in
                    (0..tokens).step_by(ROWS_OF_SIDE).zip(x.chunks(ROWS_OF_SIDE * weight.len()))
                {
                    let column = &mut column[..x.len() / weight.len()];
                    kernels().gemv(x, weight.len(), weight, column, false);
                    let out = out[tokens * count..].iter_mut().skip(i).step_by(count);
                    out.zip(&*column).for_each(|(out, x)| *out = *x);
                }
            }
        }
    }

    fn apart(&mut self, kind: LinearKind, x: &mut [f32], weight: &mut [f32]) -> Result<(), ForwardError> {
        match self.layer.linear(kind) {
            Some(linear) => linear.apart(x, weight),
            None => Err(ForwardError::OtherModel { what: "KV cache" }),
        }
    }

    fn vector(&self, kind: VectorKind) -> Option<&[f32]> {
        self.layer.vectors.iter().find(|(of, _)| *of == kind).map(|(_, values)| values.as_slice())
    }
}

/// Reads the experts of each token, as numbers, and checks that the layer has them.
fn token_experts(
    source: &dyn WeightSource,
    config: &ModelConfig,
    name: &str,
    shape: &[usize],
) -> Result<Vec<f32>, LoadError> {
    let count = config.experts.as_ref().map_or(0, |experts| experts.count);
    let experts = source.integers(name, shape)?;
    match experts.iter().find(|expert| **expert >= u32::from(count)) {
        None => Ok(experts.into_iter().map(|expert| expert as f32).collect()),
        Some(found) => Err(LoadError::Integer {
            location: source.location(),
            tensor: name.to_owned(),
            found: found.to_string(),
            below: count.into(),
        }),
    }
}

/// Builds the checkpoint's quantizer of keys and values; calibrated levels take precedence over a scheme.
fn cache_quantizer(
    source: &dyn WeightSource,
    config: &ModelConfig,
    layer: usize,
) -> Result<Option<KvQuantizer>, LoadError> {
    let layer = config.kv_layer(layer);
    let config = &*config.of_layer(layer);
    let (module, heads) = (config.attention_module(layer), config.num_key_value_heads);
    let by_scheme = match source.kv_quant(&module, heads)? {
        None => None,
        Some(quant) if quant.scheme.source == Source::Dynamic => {
            Some(KvPolicy::of(&quant.scheme).quantizer(config)?)
        }
        Some(quant) if config.latent.is_some() && quant.scheme.source == Source::Static => {
            let (scheme, given) = (quant.scheme.to_string(), "latent attention".to_owned());
            let allowed = "an unquantized cache, or other attention";
            return Err(LoadError::InputScheme { module, scheme, given, allowed });
        }
        Some(quant) => Some(KvQuantizer::stored(&module, &quant, heads, config.head_dim)?),
    };
    Ok(stored::of_layer(source, config, layer)?.or(by_scheme))
}

/// Reads a linear layer `[rows, cols]` with its bias, in any storage of `source`.
///
/// # Errors
/// As [`WeightSource`].
pub fn linear_weight(source: &dyn WeightSource, info: &LinearInfo) -> Result<LinearWeight, LoadError> {
    let LinearInfo { ref module, rows, cols, bias, ref stored, .. } = *info;
    let by_rows = info.is_by_rows(source);
    let weight = match stored {
        StoredAs::Stacked(stack) => {
            let bias = match bias {
                // Biases stay stacked.
                true => {
                    let shape = [stack.experts, stack.turns * rows];
                    let values = source.tensor_f32(&format!("{}_bias", stack.tensor), &shape)?;
                    Some(stack.part_of(&values, rows, 1))
                }
                false => None,
            };
            let weight = match by_rows {
                true => source.linear(module, rows, cols, false)?,
                false => dense(source.expert(stack, rows, cols)?, rows, cols),
            };
            LinearWeight { bias, ..weight }
        }
        StoredAs::Columns if !by_rows => {
            let values = source.tensor_f32(&format!("{module}.weight"), &[cols, rows])?;
            let bias = match bias {
                true => Some(source.tensor_f32(&format!("{module}.bias"), &[rows])?),
                false => None,
            };
            LinearWeight { bias, ..dense(Weight::F32(transpose(&values, cols, rows)), rows, cols) }
        }
        _ => source.linear(module, rows, cols, bias)?,
    };
    source.adapt(module, weight)
}

fn dense(weight: Weight, rows: usize, cols: usize) -> LinearWeight {
    LinearWeight { rows, cols, weight, bias: None, input: None, transforms: Default::default() }
}
