//! Layer-by-layer calibration. The hidden states of all calibration windows go through the model one layer at a time,
//! and only that layer is in memory. For each input of its linear layers the Hessian `H = XᵀX / t` is collected.
//!
//! The caller does the following for each layer:
//! 1. [`Calibration::next_layer`] loads the layer.
//! 2. [`Calibration::statistics`] collects the Hessians of some inputs.
//! 3. The caller quantizes the weights and puts them in place with [`CalibratedLayer::replace`].
//! 4. [`Calibration::advance`] runs the windows through the quantized layer. The next layer then sees the states of the
//!    quantized model.
//!
//! All inputs of a layer can be requested at once, which takes one pass. If they are requested one after another,
//! earlier weights are already quantized: GPTQ's `true_sequential`, with one Hessian in memory and less error. A pass
//! stops at the last input requested. With [`Calibration::keeping`] it also starts where the previous pass of the layer
//! stopped. Only gate and up are then computed twice, because the MLP's inner activation, by far the widest, is not
//! kept.
//!
//! Windows run on several threads. Tokens are summed in blocks of fixed size, and windows are added in order, so
//! Hessians have the same bits for any number of threads.

mod drift;
mod layer;
mod pass;
mod sample;
mod set;
mod shared;
mod states;
pub(crate) mod windows;
mod worker;

use std::collections::BTreeMap;

use mantissa_model::flow::MIN_ROWS;
use mantissa_model::{
    Buffers, Carried, Layer, LinearInput, LinearKind, LoadError, ModelConfig, Products, WeightSource,
    load_embedding,
};

pub use crate::error::CalibrateError;
pub use layer::CalibratedLayer;
use layer::Kept;
pub(crate) use sample::Sample;
pub(crate) use set::check_tick;
pub use set::{CalibrationSet, Limits, Tick};
use shared::Sharing;
pub(crate) use states::IN_MEMORY;
pub use states::States;
use worker::Worker;

use crate::gptq::Hessian;

/// Hidden states of the calibration windows between two layers.
pub struct Calibration<'a> {
    source: &'a dyn WeightSource,
    config: &'a ModelConfig,
    /// States of each window before layer `next`, `[tokens, hidden]`.
    states: States,
    /// What layers read besides the states, by window.
    carried: Vec<Carried>,
    next: usize,
    /// Tokens of the longest window.
    longest: usize,
    threads: usize,
    /// Bytes of states that are kept in memory.
    in_memory: u64,
    /// True if the windows also go through the last layer.
    to_the_end: bool,
    /// True if the states inside a layer are kept for its next pass.
    keeps: bool,
    kept: Option<Kept>,
    /// Matmul operand dtype.
    products: Products,
    /// True if experts see every token.
    all_experts: bool,
    /// Workers that divide the passes.
    sharing: Option<Sharing>,
}

/// Sums of squares over the tokens of an input.
#[derive(Clone, Debug, PartialEq)]
pub struct Squares {
    /// Sum of the squares of each column.
    pub sums: Vec<f64>,
    /// Number of tokens; for an expert, of those that it sees.
    pub tokens: u64,
}

impl<'a> Calibration<'a> {
    /// Embeds `windows`, each a separate sequence.
    ///
    /// # Errors
    /// [`CalibrateError`] if there are no tokens, a window is empty, a token is outside the vocabulary, a window is
    /// longer than the model's context, or memory is short.
    pub fn begin(
        source: &'a dyn WeightSource,
        config: &'a ModelConfig,
        windows: &[Vec<u32>],
        limits: impl Into<Limits>,
    ) -> Result<Self, CalibrateError> {
        let Limits { threads, states: in_memory, all_experts } = limits.into();
        let longest = windows.iter().map(Vec::len).max().unwrap_or(0);
        if longest == 0 {
            return Err(CalibrateError::Empty);
        }
        // States, statistics and learned rounding need at least one row per window.
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
        let mut states = States::of_lens(lens, in_memory)?;
        let mut carried = Vec::with_capacity(windows.len());
        for (window, tokens) in windows.iter().enumerate() {
            let mut embedded = vec![0.0; tokens.len() * config.hidden_size];
            embedding
                .embed(tokens, &[tokens.len()], 0, &mut embedded)
                .map_err(|error| CalibrateError::Forward { window, error })?;
            states.put(window, &embedded)?;
            carried.push(Carried::new(&embedding, tokens, &embedded));
        }
        let (to_the_end, keeps, kept, products) = (false, false, None, Products::F32);
        Ok(Calibration {
            source,
            config,
            states,
            carried,
            next: 0,
            longest,
            threads,
            in_memory,
            to_the_end,
            keeps,
            kept,
            products,
            all_experts,
            sharing: None,
        })
    }

    /// Keeps the states inside a layer between its passes, in additional memory. Every product is then computed once,
    /// except gate and up.
    #[must_use]
    pub fn keeping(self) -> Self {
        Calibration { keeps: true, ..self }
    }

    /// Sets the dtype that matmul operands and inputs of the Hessians are rounded to.
    #[must_use]
    pub fn in_products(self, products: Products) -> Self {
        Calibration { products, ..self }
    }

    /// Copies the windows with their present states.
    ///
    /// # Errors
    /// The temporary folder has no room for the states, or they cannot be read back.
    pub(crate) fn twin(&self) -> Result<Self, CalibrateError> {
        let (states, carried) = (self.states.copy(self.in_memory)?, self.carried.clone());
        Ok(Calibration { states, carried, kept: None, sharing: None, ..*self })
    }

    /// Makes the windows go through the last layer as well.
    #[must_use]
    pub fn to_the_end(self) -> Self {
        Calibration { to_the_end: true, ..self }
    }

    /// Returns the states of each window, `[tokens, hidden]`: the input of the next layer.
    pub fn states(&self) -> &States {
        &self.states
    }

    /// Returns the states.
    pub fn into_states(self) -> States {
        self.states
    }

    /// Returns the index of the layer that [`next_layer`](Self::next_layer) loads.
    pub fn next_index(&self) -> usize {
        self.next
    }

    /// Returns the bytes of the states of `set` in memory; 0 if they are in a file because they exceed `in_memory`.
    pub(crate) fn state_bytes(config: &ModelConfig, set: &CalibrationSet, in_memory: u64) -> u64 {
        let carried =
            (set.tokens() as u64).saturating_mul(Carried::bytes_per_token(config, set.longest()) as u64);
        Self::bytes_of_width(set, config.hidden_size, in_memory).saturating_add(carried)
    }

    /// Returns the bytes of the states that [`keeping`](Self::keeping) adds.
    pub(crate) fn kept_bytes(config: &ModelConfig, set: &CalibrationSet, in_memory: u64) -> u64 {
        let (heads, hidden) = (widest(config), config.hidden_size);
        let head_bytes = if heads == hidden { 0 } else { Self::bytes_of_width(set, heads, in_memory) };
        head_bytes.saturating_add(Self::bytes_of_width(set, hidden, in_memory))
    }

    fn bytes_of_width(set: &CalibrationSet, width: usize, in_memory: u64) -> u64 {
        let bytes = (4 * set.tokens() as u64).saturating_mul(width as u64);
        if bytes > in_memory { 0 } else { bytes }
    }

    /// Returns the bytes of the threads' buffers while the windows go through a layer. Between passes, while weights
    /// are solved or learned, only the [states](Self::state_bytes) remain.
    pub(crate) fn pass_bytes(config: &ModelConfig, set: &CalibrationSet, threads: usize) -> u64 {
        let (longest, threads) = (set.longest(), threads.clamp(1, set.windows.len().max(1)) as u64);
        // Per thread: a window with its attention heads, as f32 and as bytes of a file, and the states after attention.
        let (heads, hidden) = (widest(config), config.hidden_size);
        let window = (8 * longest * (hidden + heads) + 4 * longest.max(MIN_ROWS) * hidden) as u64;
        let worker = Buffers::bytes_needed(config, longest, longest).saturating_add(window);
        worker.saturating_mul(threads)
    }

    /// Returns the peak bytes of a pass without the layer: states and buffers of the threads.
    pub fn held_bytes(config: &ModelConfig, set: &CalibrationSet, limits: impl Into<Limits>) -> u64 {
        let Limits { threads, states, .. } = limits.into();
        Self::state_bytes(config, set, states).saturating_add(Self::pass_bytes(config, set, threads))
    }

    /// Returns the additional bytes for statistics of one input: the Hessian, and for each thread the states and the
    /// input of one window.
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
        if self.all_experts {
            layer.run_all_experts();
        }
        Ok(Some(CalibratedLayer::new(self.next, layer)))
    }

    /// Runs the windows through `layer` with its present weights and returns the Hessian of each of `inputs`, in order.
    /// Calls `tick` after each batch of one window per thread.
    ///
    /// # Errors
    /// [`CalibrateError`].
    pub fn statistics(
        &mut self,
        layer: &CalibratedLayer,
        inputs: &[LinearInput],
        tick: &mut Tick<'_>,
    ) -> Result<Vec<Hessian>, CalibrateError> {
        if self.sharing.is_some() && !inputs.is_empty() {
            self.pass(layer, inputs, false, tick, |_, _| {})?;
            return self.shared_hessians(layer, inputs, tick);
        }
        let width = |input| self.config.layer_input_width(layer.index, input);
        let new = inputs.iter().map(|&input| Hessian::new(width(input)));
        let mut hessians: Vec<Hessian> = new.collect::<Result<_, _>>()?;
        let (threads, products) = (self.threads, self.products);
        self.pass(layer, inputs, false, tick, |worker, _| {
            hessians.iter_mut().zip(&worker.seen).for_each(|(hessian, x)| add(hessian, products, x, threads));
        })?;
        Ok(hessians)
    }

    /// Runs the windows through `layer` with its present weights and sums the squares of the inputs of its linear
    /// layers `kinds`, column by column. The sums are the diagonals of [`statistics`](Self::statistics), at a fraction
    /// of the cost. With `through` it also [advances](Self::advance).
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

    /// Runs the windows through `layer` with its present weights and returns the amax of each input of its linear
    /// layers `kinds`. With `through` it also [advances](Self::advance).
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

    /// Runs the windows through `layer` with its present weights and folds the inputs of its linear layers `kinds`,
    /// window by window in order. `begin` makes the initial value from an input's width. With `through` it also
    /// [advances](Self::advance).
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
        let width = |input| self.config.layer_input_width(layer.index, input);
        let mut all: Vec<T> = inputs.iter().map(|&input| begin(width(input))).collect();
        // No layer reads the states after the last one.
        let last = layer.index + 1 == self.config.num_hidden_layers && !self.to_the_end;
        self.pass(layer, &inputs, through && !last, tick, |worker, _| {
            all.iter_mut().zip(&worker.seen).for_each(|(one, x)| add(one, x));
        })?;
        if through {
            self.next = layer.index + 1;
        }
        Ok(inputs.into_iter().zip(all).collect())
    }

    /// Runs the windows through `layer` with its present weights and samples up to `most` tokens of the inputs of its
    /// linear layers `kinds`, evenly spaced. Means and peaks of the columns cover all tokens. With `through` it also
    /// [advances](Self::advance).
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

    /// Runs the windows through `layer` with its present weights, up to the last of `inputs` or, with `through`, to the
    /// next layer. `take` gets the worker and the number of tokens of each window, in order. `tick` is called after
    /// each batch of windows; if it interrupts the pass, the states are no longer valid.
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
        if self.sharing.is_some() {
            return self.shared_pass(layer, inputs, through, tick, &mut take);
        }
        let (mut running, mut workers) = (self.start(layer, inputs, through), self.workers()?);
        for windows in self.batches() {
            self.step(&mut running, &mut workers, windows, &mut take)?;
            check_tick(tick)?;
        }
        self.finish(running);
        Ok(())
    }

    /// Runs the windows through `layer` with its present weights to the next layer. `tick` is called after each batch
    /// of windows; if it interrupts the pass, the states are no longer valid.
    ///
    /// # Errors
    /// [`CalibrateError::Forward`], [`CalibrateError::Interrupted`].
    pub fn advance(&mut self, layer: &CalibratedLayer, tick: &mut Tick<'_>) -> Result<(), CalibrateError> {
        // No layer reads the states after the last one.
        if layer.index + 1 == self.config.num_hidden_layers && !self.to_the_end {
            self.next = layer.index + 1;
            return Ok(());
        }
        self.pass(layer, &[], true, tick, |_, _| {})
    }

    /// [Advances](Self::advance), also through the last layer, and returns the amax of the keys (after RoPE) and of the
    /// values of each key-value head.
    ///
    /// # Errors
    /// Errors of [`advance`](Self::advance).
    pub fn advance_with_cache_peaks(
        &mut self,
        layer: &CalibratedLayer,
        tick: &mut Tick<'_>,
    ) -> Result<[Vec<f32>; 2], CalibrateError> {
        let (config, index) = (self.config, layer.index);
        let heads = config.heads(index);
        let (heads, width) = (heads.key_value, heads.dim.max(1));
        let mut peaks = [(); 2].map(|()| vec![0f32; heads]);
        // Keys and values are computed only in a pass from the start of the layer.
        self.kept = None;
        self.pass(layer, &[], true, tick, |worker, tokens| {
            let (keys, values) = worker.buffers.keys_and_values(config, index, tokens);
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

/// Returns the width of the widest joined heads or mixer's result.
fn widest(config: &ModelConfig) -> usize {
    (0..config.num_hidden_layers).map(|layer| config.joined_width(layer)).max().unwrap_or(0)
}

/// Returns the distinct inputs of linear layers of `kinds`.
fn distinct(kinds: impl IntoIterator<Item = LinearKind>) -> Vec<LinearInput> {
    let mut inputs: Vec<_> = kinds.into_iter().map(LinearKind::input).collect();
    inputs.sort_unstable();
    inputs.dedup();
    inputs
}

/// Adds the inputs `x`, rounded to the dtype of matmul operands, to `hessian`.
fn add(hessian: &mut Hessian, products: Products, x: &[f32], threads: usize) {
    match products {
        Products::F32 => hessian.add(x, threads),
        Products::Bf16 => hessian.add_bf16(x, threads),
    }
}
