//! Calibration, one layer in memory: the hidden states of all windows go through the model layer by layer, and for each layer
//! the second moments `H = XᵀX / t` of what its linear layers read are collected.
//!
//! For each layer ([`Calibration::next_layer`]) the caller asks for statistics of what some linear layers read
//! ([`Calibration::statistics`]), quantizes them and puts the new weights in place ([`CalibratedLayer::replace`]), and at last
//! the windows go through the layer as it has become ([`Calibration::advance`]), so that the next layer sees what it will see in
//! the quantized model. Asking once for all four inputs takes one pass; asking for one after another, with the weights before
//! it already replaced, is what GPTQ's authors call `true_sequential`: one Hessian in memory, less error. A pass goes no
//! further than what it is asked for depends on, and with [`Calibration::keeping`] begins where the last one of the layer ended,
//! so that of all products only gate and up are made twice: the inner activation, the widest by far, is not kept.
//!
//! Windows run on several threads, a fixed number of tokens is summed at a time, and windows are added in their order:
//! Hessians have the same bits on any number of threads.

mod beside;
pub(crate) mod error;
mod pass;
mod sample;
mod states;
pub(crate) mod windows;
mod worker;

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use mantissa_eval::Sequence;
use mantissa_model::flow::MIN_ROWS;
use mantissa_model::{
    Buffers, InputQuantizer, Layer, Linear, LinearInput, LinearKind, LoadError, ModelConfig, Place, Products,
    WeightSource, load_embedding,
};
use mantissa_num::stored::Map;
use mantissa_store::convention::{LinearWeight, Weight};

pub use error::CalibrateError;
use pass::Kept;
pub(crate) use sample::Sample;
pub(crate) use states::IN_MEMORY;
pub use states::States;
use worker::Worker;

use crate::gptq::Hessian;
use crate::quality::TokenSet;

/// Asked between two steps of long work whether to go on.
pub type Tick<'a> = dyn FnMut() -> ControlFlow<()> + 'a;

/// Token windows to calibrate on, each a sequence by itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CalibrationSet {
    /// Name that the user gave: a file, and a key.
    pub name: String,
    /// Token ids.
    pub windows: Vec<Vec<u32>>,
}

impl CalibrationSet {
    /// Tokens of all windows.
    pub fn tokens(&self) -> usize {
        self.windows.iter().map(Vec::len).sum()
    }

    /// Name, hash and size.
    pub(crate) fn identity(&self) -> TokenSet {
        let sequence = |tokens: &Vec<u32>| Sequence { tokens: tokens.clone(), from: 1 };
        TokenSet::new(&self.name, &self.windows.iter().map(sequence).collect::<Vec<_>>())
    }

    /// Tokens of the longest window.
    pub fn longest(&self) -> usize {
        self.windows.iter().map(Vec::len).max().unwrap_or(0)
    }
}

/// Hidden states on their way through a model.
pub struct Calibration<'a> {
    source: &'a dyn WeightSource,
    config: &'a ModelConfig,
    /// `[tokens, hidden]` of each window, before layer `next`.
    states: States,
    next: usize,
    /// Tokens of the longest window.
    longest: usize,
    threads: usize,
    /// True if the states behind the last layer are wanted too.
    to_the_end: bool,
    /// True if the windows are kept inside a layer for its next pass.
    keeps: bool,
    kept: Option<Kept>,
    /// Matmul operand dtype.
    products: Products,
}

/// Sums over the tokens of an input.
#[derive(Clone, Debug, PartialEq)]
pub struct Squares {
    /// Sum of the squares of each column.
    pub sums: Vec<f64>,
    /// Number of tokens; for an expert those routed to it.
    pub tokens: u64,
}

/// A layer on its way from the source to the output.
#[derive(Debug)]
pub struct CalibratedLayer {
    index: usize,
    layer: Layer,
    /// Quantizers of the inputs of linear layers whose weights are replaced.
    quantizers: BTreeMap<LinearInput, InputQuantizer>,
    /// Number of replacements of weights before the heads, and of the one behind them.
    replaced: [u32; 2],
}

impl<'a> Calibration<'a> {
    /// Embeds `windows`, each a sequence by itself.
    ///
    /// # Errors
    /// [`CalibrateError`] where there are no tokens, a window has none, one is not in the vocabulary, a window is longer than the
    /// model's context or there is not enough memory.
    pub fn begin(
        source: &'a dyn WeightSource,
        config: &'a ModelConfig,
        windows: &[Vec<u32>],
        threads: usize,
    ) -> Result<Self, CalibrateError> {
        let longest = windows.iter().map(Vec::len).max().unwrap_or(0);
        if longest == 0 {
            return Err(CalibrateError::Empty);
        }
        // States, statistics and learned rounding take every window to have rows.
        if let Some(window) = windows.iter().position(Vec::is_empty) {
            return Err(CalibrateError::EmptyWindow { window });
        }
        let allowed = config.max_position_embeddings;
        if longest > allowed {
            return Err(LoadError::Context { needed: longest, allowed }.into());
        }
        let threads = threads.clamp(1, windows.len());
        let embedding = load_embedding(source, config)?;
        let lens = windows.iter().map(|tokens| tokens.len() * config.hidden_size);
        let mut states = States::of_lens(lens, IN_MEMORY)?;
        for (window, tokens) in windows.iter().enumerate() {
            let mut embedded = vec![0.0; tokens.len() * config.hidden_size];
            embedding
                .embed(tokens, &[tokens.len()], 0, &mut embedded)
                .map_err(|error| CalibrateError::Forward { window, error })?;
            states.put(window, &embedded)?;
        }
        let (to_the_end, keeps, kept, products) = (false, false, None, Products::F32);
        Ok(Calibration {
            source,
            config,
            states,
            next: 0,
            longest,
            threads,
            to_the_end,
            keeps,
            kept,
            products,
        })
    }

    /// The same, which keeps the windows inside a layer, as far as a pass has taken them, for those that ask for later inputs: every
    /// product is then made once, but for gate and up, and as many states again are held as `state_bytes` says of those before
    /// the layer.
    #[must_use]
    pub fn keeping(self) -> Self {
        Calibration { keeps: true, ..self }
    }

    /// The same, with the factors of the linear layers' products and of the Hessians rounded as `products` says.
    #[must_use]
    pub fn in_products(self, products: Products) -> Self {
        Calibration { products, ..self }
    }

    /// The same windows once more, where they now are, to go another way.
    ///
    /// # Errors
    /// The temporary folder has no room for their states, or these cannot be read back.
    pub(crate) fn twin(&self) -> Result<Self, CalibrateError> {
        Ok(Calibration { states: self.states.copy(IN_MEMORY)?, kept: None, ..*self })
    }

    /// The same, to be taken through the last layer as well.
    #[must_use]
    pub fn to_the_end(self) -> Self {
        Calibration { to_the_end: true, ..self }
    }

    /// Hidden states of each window, `[tokens, hidden]`, as the next layer reads them.
    pub fn states(&self) -> &States {
        &self.states
    }

    /// The same, at the end.
    pub fn into_states(self) -> States {
        self.states
    }

    /// The layer that [`next_layer`](Self::next_layer) gives.
    pub fn next_index(&self) -> usize {
        self.next
    }

    /// Bytes of the states of `set` that are in memory: none where they are in a file.
    pub(crate) fn state_bytes(config: &ModelConfig, set: &CalibrationSet) -> u64 {
        Self::bytes_of_width(set, config.hidden_size)
    }

    /// The same of the windows inside a layer, where they are [kept](Self::keeping).
    pub(crate) fn kept_bytes(config: &ModelConfig, set: &CalibrationSet) -> u64 {
        let (heads, hidden) = (config.num_attention_heads * config.head_dim, config.hidden_size);
        let of_heads = if heads == hidden { 0 } else { Self::bytes_of_width(set, heads) };
        of_heads.saturating_add(Self::bytes_of_width(set, hidden))
    }

    fn bytes_of_width(set: &CalibrationSet, width: usize) -> u64 {
        let bytes = (4 * set.tokens() as u64).saturating_mul(width as u64);
        if bytes > IN_MEMORY { 0 } else { bytes }
    }

    /// Bytes of what each thread works in while the windows go through a layer. Between two passes, when weights are solved or learned,
    /// only the [states](Self::state_bytes) are there.
    pub(crate) fn pass_bytes(config: &ModelConfig, set: &CalibrationSet, threads: usize) -> u64 {
        let (longest, threads) = (set.longest(), threads.clamp(1, set.windows.len().max(1)) as u64);
        // A window and its joined heads, and their bytes where they are in a file; and the states in the middle of a layer.
        let (heads, hidden) = (config.num_attention_heads * config.head_dim, config.hidden_size);
        let window = (8 * longest * (hidden + heads) + 4 * longest.max(MIN_ROWS) * hidden) as u64;
        let worker = Buffers::bytes_needed(config, longest, longest).saturating_add(window);
        worker.saturating_mul(threads)
    }

    /// Bytes that are held while the windows go through a layer, the layer aside: states, and what each thread works in.
    pub fn held_bytes(config: &ModelConfig, set: &CalibrationSet, threads: usize) -> u64 {
        Self::state_bytes(config, set).saturating_add(Self::pass_bytes(config, set, threads))
    }

    /// Bytes that statistics of one input take beside them: the Hessian, and of one window per thread its states and what
    /// linear layers read.
    pub fn statistics_bytes(
        config: &ModelConfig,
        set: &CalibrationSet,
        input: LinearInput,
        threads: usize,
    ) -> u64 {
        let (width, threads) = (config.input_width(input), threads.clamp(1, set.windows.len().max(1)) as u64);
        let window = 4 * (set.longest() as u64) * (width + config.hidden_size) as u64;
        Hessian::bytes_needed(width).saturating_add(window.saturating_mul(threads))
    }

    /// Loads the next layer; `None` after the last.
    ///
    /// # Errors
    /// [`CalibrateError::Load`].
    pub fn next_layer(&mut self) -> Result<Option<CalibratedLayer>, CalibrateError> {
        if self.next == self.config.num_hidden_layers {
            return Ok(None);
        }
        let mut layer = Layer::load(self.source, self.config, self.next)?;
        layer.set_products(self.products);
        Ok(Some(CalibratedLayer { index: self.next, layer, quantizers: BTreeMap::new(), replaced: [0; 2] }))
    }

    /// Runs the windows through `layer`, as it now is, and collects what its linear layers read: a Hessian for each of
    /// `inputs`, in their order. `tick` is asked after every window of each thread.
    ///
    /// # Errors
    /// [`CalibrateError`].
    pub fn statistics(
        &mut self,
        layer: &CalibratedLayer,
        inputs: &[LinearInput],
        tick: &mut Tick<'_>,
    ) -> Result<Vec<Hessian>, CalibrateError> {
        let new = inputs.iter().map(|&input| Hessian::new(self.config.input_width(input)));
        let mut hessians: Vec<Hessian> = new.collect::<Result<_, _>>()?;
        let (threads, products) = (self.threads, self.products);
        self.pass(layer, inputs, false, tick, |worker, _| {
            hessians.iter_mut().zip(&worker.seen).for_each(|(hessian, x)| add(hessian, products, x, threads));
        })?;
        Ok(hessians)
    }

    /// Runs the windows through `layer`, as it now is, and sums the squares of what its linear layers `kinds` read, column by
    /// column: the diagonals of [`statistics`](Self::statistics), at a fraction of its cost. `tick` is asked as there.
    ///
    /// # Errors
    /// [`CalibrateError`].
    pub fn squares(
        &mut self,
        layer: &CalibratedLayer,
        kinds: impl IntoIterator<Item = LinearKind>,
        through: bool,
        tick: &mut Tick<'_>,
    ) -> Result<BTreeMap<LinearInput, Squares>, CalibrateError> {
        let none = |width| Squares { sums: vec![0.0; width], tokens: 0 };
        let add = |Squares { sums, tokens }: &mut Squares, x: &[f32]| {
            for row in x.chunks_exact(sums.len().max(1)) {
                sums.iter_mut().zip(row).for_each(|(sum, v)| *sum += f64::from(*v) * f64::from(*v));
                *tokens += 1;
            }
        };
        self.fold(layer, kinds, through, tick, (none, add))
    }

    /// Runs the windows through `layer`, as it now is, and finds the greatest magnitude of what its linear layers `kinds` read.
    /// `tick` is asked as in [`statistics`](Self::statistics).
    ///
    /// # Errors
    /// [`CalibrateError`].
    pub fn peaks(
        &mut self,
        layer: &CalibratedLayer,
        kinds: impl IntoIterator<Item = LinearKind>,
        through: bool,
        tick: &mut Tick<'_>,
    ) -> Result<BTreeMap<LinearInput, f32>, CalibrateError> {
        let add = |peak: &mut f32, x: &[f32]| *peak = x.iter().fold(*peak, |peak, v| peak.max(v.abs()));
        self.fold(layer, kinds, through, tick, (|_| 0f32, add))
    }

    /// Runs the windows through `layer`, as it now is, and adds what its linear layers `kinds` read, window after window in their order,
    /// to what `begin` makes for the width of each input; with `through` it is an [`advance`](Self::advance) at once. `tick` is asked as in [`statistics`](Self::statistics).
    ///
    /// # Errors
    /// [`CalibrateError`].
    pub(crate) fn fold<T>(
        &mut self,
        layer: &CalibratedLayer,
        kinds: impl IntoIterator<Item = LinearKind>,
        through: bool,
        tick: &mut Tick<'_>,
        (begin, mut add): (impl Fn(usize) -> T, impl FnMut(&mut T, &[f32])),
    ) -> Result<BTreeMap<LinearInput, T>, CalibrateError> {
        let inputs = distinct(kinds);
        let mut all: Vec<T> = inputs.iter().map(|&input| begin(self.config.input_width(input))).collect();
        // Nothing reads what comes out of the last layer.
        let last = layer.index + 1 == self.config.num_hidden_layers && !self.to_the_end;
        self.pass(layer, &inputs, through && !last, tick, |worker, _| {
            all.iter_mut().zip(&worker.seen).for_each(|(one, x)| add(one, x));
        })?;
        if through {
            self.next = layer.index + 1;
        }
        Ok(inputs.into_iter().zip(all).collect())
    }

    /// Runs the windows through `layer`, as it now is, and keeps up to `most` tokens of what its linear layers `kinds` read, evenly
    /// taken, with what all tokens together say of its columns. `tick` is asked as in [`statistics`](Self::statistics).
    ///
    /// # Errors
    /// [`CalibrateError`].
    pub(crate) fn samples(
        &mut self,
        layer: &CalibratedLayer,
        kinds: impl IntoIterator<Item = LinearKind>,
        most: usize,
        through: bool,
        tick: &mut Tick<'_>,
    ) -> Result<BTreeMap<LinearInput, Sample>, CalibrateError> {
        let tokens = self.states.total() / self.config.hidden_size;
        let every = tokens.div_ceil(most.max(1)).max(1);
        self.fold(
            layer,
            kinds,
            through,
            tick,
            (Sample::new, |sample: &mut Sample, x: &[f32]| sample.add(x, every)),
        )
    }

    /// Runs the windows through `layer`, as it now is, as far as `inputs` depend on, or with `through` to the next layer; `take` has the worker
    /// of each window, in their order, and its tokens. `tick` is asked after every window of each thread; where it stops the run, the
    /// states are of no further use.
    fn pass(
        &mut self,
        layer: &CalibratedLayer,
        inputs: &[LinearInput],
        through: bool,
        tick: &mut Tick<'_>,
        mut take: impl FnMut(&Worker, usize),
    ) -> Result<(), CalibrateError> {
        if inputs.is_empty() && !through {
            return Ok(());
        }
        let (mut running, mut workers) = (self.start(layer, inputs, through), self.workers()?);
        for windows in self.batches() {
            self.step(&mut running, &mut workers, windows, &mut take)?;
            go_on(tick)?;
        }
        self.finish(running);
        Ok(())
    }

    /// Takes the windows through `layer`, as it now is, to the next one. `tick` is asked after every window of each thread;
    /// where it stops the run, the states are of no further use.
    ///
    /// # Errors
    /// [`CalibrateError::Forward`], [`CalibrateError::Interrupted`].
    pub fn advance(&mut self, layer: &CalibratedLayer, tick: &mut Tick<'_>) -> Result<(), CalibrateError> {
        // Nothing reads what comes out of the last layer.
        if layer.index + 1 == self.config.num_hidden_layers && !self.to_the_end {
            self.next = layer.index + 1;
            return Ok(());
        }
        self.pass(layer, &[], true, tick, |_, _| {})
    }

    /// [`advance`](Self::advance), through the last layer too, which finds the greatest magnitude of the keys, after their
    /// rotation, and of the values of each key-value head.
    ///
    /// # Errors
    /// As [`advance`](Self::advance).
    pub fn advance_with_cache_peaks(
        &mut self,
        layer: &CalibratedLayer,
        tick: &mut Tick<'_>,
    ) -> Result<[Vec<f32>; 2], CalibrateError> {
        let (heads, width) = (self.config.num_key_value_heads, self.config.head_dim.max(1));
        let mut peaks = [(); 2].map(|()| vec![0f32; heads]);
        // Keys and values are made in a pass from the beginning.
        self.kept = None;
        self.pass(layer, &[], true, tick, |worker, tokens| {
            let (keys, values) = worker.buffers.keys_and_values(tokens);
            for (peaks, x) in peaks.iter_mut().zip([keys, values]) {
                for (i, head) in x.chunks_exact(width).enumerate() {
                    let peak = &mut peaks[i % heads];
                    *peak = head.iter().fold(*peak, |peak, v| peak.max(v.abs()));
                }
            }
        })?;
        Ok(peaks)
    }
}

/// Inputs of layers of these `kinds`, each once.
fn distinct(kinds: impl IntoIterator<Item = LinearKind>) -> Vec<LinearInput> {
    let mut inputs: Vec<_> = kinds.into_iter().map(LinearKind::input).collect();
    inputs.sort_unstable();
    inputs.dedup();
    inputs
}

/// Adds the inputs `x` of a layer, rounded as products are, to `hessian`.
fn add(hessian: &mut Hessian, products: Products, x: &[f32], threads: usize) {
    match products {
        Products::F32 => hessian.add(x, threads),
        Products::Bf16 => hessian.add_bf16(x, threads),
    }
}

pub(crate) fn go_on(tick: &mut Tick<'_>) -> Result<(), CalibrateError> {
    if tick().is_continue() { Ok(()) } else { Err(CalibrateError::Interrupted) }
}

impl CalibratedLayer {
    /// Index of the layer.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Number of replacements of weights that the windows at `place` depend on.
    fn revision(&self, place: Place) -> u32 {
        let [before_heads, output] = self.replaced;
        if place == Place::Heads { before_heads } else { before_heads + output }
    }

    /// One of the layer's linear layers; `None` where it has no such.
    pub fn linear(&self, kind: LinearKind) -> Option<&Linear> {
        self.layer.linear(kind)
    }

    /// Sets the quantizers of inputs at run time: those of linear layers whose weights are
    /// [replaced](Self::replace) from now on, and all of these in statistics.
    pub fn quantize_inputs(&mut self, quantizers: BTreeMap<LinearInput, InputQuantizer>) {
        self.quantizers = quantizers;
    }

    /// Puts `weight` (`[rows, cols]` of the linear layer `kind`) in place of the one that is there, with all that stands around its codes;
    /// its bias stays, and its input is quantized as [told](Self::quantize_inputs). A kind that the layer does not have is left out.
    ///
    /// # Errors
    /// [`LoadError::Weight`] where the weight does not have the shape.
    pub fn replace(&mut self, kind: LinearKind, weight: Weight) -> Result<(), LoadError> {
        let Some(old) = self.layer.linear_mut(kind) else { return Ok(()) };
        let quantizer = self.quantizers.get(&kind.input()).or(old.input());
        let input = quantizer.map(|input| input.quant().clone());
        let bias = old.bias().map(<[f32]>::to_vec);
        // The input is rotated as before.
        let mut transforms = old.transforms().clone();
        transforms.before.retain(|map| matches!(map, Map::Hadamard(_)));
        transforms.after.clear();
        transforms.extras.clear();
        let weight = LinearWeight { rows: old.rows(), cols: old.cols(), weight, bias, input, transforms };
        let products = old.products();
        *old = Linear::new(old.module(), weight)?;
        old.set_products(products);
        let turn = kind.input().turn();
        self.replaced[0] += u32::from(turn < LinearInput::O.turn());
        self.replaced[1] += u32::from(turn == LinearInput::O.turn());
        Ok(())
    }
}
