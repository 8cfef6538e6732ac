//! Calibration, one layer in memory: the hidden states of all windows go through the model layer by layer, and for each layer
//! the second moments `H = XᵀX / t` of what its linear layers read are collected.
//!
//! For each layer ([`Calibration::next_layer`]) the caller asks for statistics of what some linear layers read
//! ([`Calibration::statistics`]), quantizes them and puts the new weights in place ([`CalibratedLayer::replace`]), and at last
//! the windows go through the layer as it has become ([`Calibration::advance`]), so that the next layer sees what it will see in
//! the quantized model. Asking once for all four inputs takes one pass; asking for one after another, with the weights before
//! it already replaced, is what GPTQ's authors call `true_sequential`: nearly four passes, one Hessian in memory, less error.
//!
//! Windows run on several threads, a fixed number of tokens is summed at a time, and windows are added in their order:
//! Hessians have the same bits on any number of threads.

mod states;

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use mantissa_eval::Sequence;
use mantissa_kernels::for_each;
use mantissa_model::{
    Buffers, ForwardError, Layer, Linear, LinearInput, LinearKind, LoadError, ModelConfig, Observer,
    WeightSource, load_embedding,
};
use mantissa_num::stored::Map;
use mantissa_store::ErrorClass;
use mantissa_store::convention::{LinearWeight, Weight};

pub(crate) use states::IN_MEMORY;
pub use states::States;

use crate::gptq::{GptqError, Hessian};
use crate::quality::TokenSet;

/// Why a calibration stopped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CalibrateError {
    /// There is nothing to calibrate with.
    #[error("calibration: found no tokens, allowed at least one window of one token")]
    Empty,
    /// A weight, the memory or the context.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// A forward pass.
    #[error("calibration window {window}: {error}")]
    Forward {
        /// Index of the window.
        window: usize,
        /// What is wrong.
        error: ForwardError,
    },
    /// Memory for statistics.
    #[error(transparent)]
    Statistics(#[from] GptqError),
    /// Hidden states that are kept in a file.
    #[error(transparent)]
    States(#[from] mantissa_store::Error),
    /// The caller ended the run.
    #[error("found a request to stop, allowed to run to the end")]
    Interrupted,
}

impl CalibrateError {
    /// Whether the input or the environment is at fault.
    pub fn class(&self) -> ErrorClass {
        match self {
            CalibrateError::Load(error) => error.class(),
            CalibrateError::States(error) => error.class(),
            CalibrateError::Interrupted | CalibrateError::Statistics(GptqError::Memory { .. }) => {
                ErrorClass::Environment
            }
            _ => ErrorClass::Input,
        }
    }
}

/// Asked between two steps of long work whether to go on.
pub type Tick<'a> = dyn FnMut() -> ControlFlow<()> + 'a;

/// Token windows to calibrate on, each a sequence by itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CalibrationSet {
    /// What the user calls it: a file, and a key.
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
    /// One per thread.
    workers: Vec<Worker>,
    threads: usize,
    /// Whether the states behind the last layer are wanted too.
    to_the_end: bool,
}

/// What is summed over the tokens of an input.
#[derive(Clone, Debug, PartialEq)]
pub struct Squares {
    /// Of the squares of each column.
    pub sums: Vec<f64>,
    /// How many tokens there were: of an expert those that were routed to it.
    pub tokens: u64,
}

/// A layer on its way from the source to the output.
#[derive(Debug)]
pub struct CalibratedLayer {
    index: usize,
    layer: Layer,
}

/// What one window at a time needs.
struct Worker {
    buffers: Buffers,
    states: Vec<f32>,
    /// What the linear layers read, in the order of the inputs asked for.
    seen: Vec<Vec<f32>>,
    result: Result<(), Failed>,
}

/// What failed on a window.
enum Failed {
    Read(mantissa_store::Error),
    Forward(ForwardError),
}

impl<'a> Calibration<'a> {
    /// Embeds `windows`, each a sequence by itself.
    ///
    /// # Errors
    /// [`CalibrateError`] where there are no tokens, one is not in the vocabulary, a window is longer than the model's context
    /// or there is not enough memory.
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
        let threads = threads.clamp(1, windows.len());
        let workers = (0..threads).map(|_| Worker::new(config, longest)).collect::<Result<_, _>>()?;
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
        Ok(Calibration { source, config, states, next: 0, workers, threads, to_the_end: false })
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
        let bytes = (4 * set.tokens() as u64).saturating_mul(config.hidden_size as u64);
        if bytes > IN_MEMORY { 0 } else { bytes }
    }

    /// Bytes that stay in memory from the first layer to the last: states, and what each thread works in.
    pub fn held_bytes(config: &ModelConfig, set: &CalibrationSet, threads: usize) -> u64 {
        let (longest, threads) = (set.longest(), threads.clamp(1, set.windows.len().max(1)) as u64);
        // A window, and its bytes where it is in a file.
        let window = 8 * (longest * config.hidden_size) as u64;
        let worker = Buffers::bytes_needed(config, longest, longest).saturating_add(window);
        Self::state_bytes(config, set).saturating_add(worker.saturating_mul(threads))
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
        let layer = Layer::load(self.source, self.config, self.next)?;
        Ok(Some(CalibratedLayer { index: self.next, layer }))
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
        let threads = self.threads;
        self.observe(layer, inputs, tick, |i, x| hessians[i].add(x, threads))?;
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
        tick: &mut Tick<'_>,
    ) -> Result<BTreeMap<LinearInput, Squares>, CalibrateError> {
        let none = |width| Squares { sums: vec![0.0; width], tokens: 0 };
        self.fold(layer, kinds, tick, none, |Squares { sums, tokens }, x| {
            for row in x.chunks_exact(sums.len().max(1)) {
                sums.iter_mut().zip(row).for_each(|(sum, v)| *sum += f64::from(*v) * f64::from(*v));
                *tokens += 1;
            }
        })
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
        tick: &mut Tick<'_>,
    ) -> Result<BTreeMap<LinearInput, f32>, CalibrateError> {
        self.fold(
            layer,
            kinds,
            tick,
            |_| 0f32,
            |peak, x| {
                *peak = x.iter().fold(*peak, |peak, v| peak.max(v.abs()));
            },
        )
    }

    /// Runs the windows through `layer`, as it now is, and adds what its linear layers `kinds` read, window after window in their order,
    /// to what `begin` makes for the width of each input. `tick` is asked as in [`statistics`](Self::statistics).
    ///
    /// # Errors
    /// [`CalibrateError`].
    pub(crate) fn fold<T>(
        &mut self,
        layer: &CalibratedLayer,
        kinds: impl IntoIterator<Item = LinearKind>,
        tick: &mut Tick<'_>,
        begin: impl Fn(usize) -> T,
        add: impl FnMut(&mut T, &[f32]),
    ) -> Result<BTreeMap<LinearInput, T>, CalibrateError> {
        self.folded(layer, kinds, tick, false, (begin, add))
    }

    /// [`fold`](Self::fold) and [`advance`](Self::advance) in one pass, through the last layer too.
    ///
    /// # Errors
    /// [`CalibrateError`].
    pub(crate) fn fold_through<T>(
        &mut self,
        layer: &CalibratedLayer,
        kinds: impl IntoIterator<Item = LinearKind>,
        tick: &mut Tick<'_>,
        begin: impl Fn(usize) -> T,
        add: impl FnMut(&mut T, &[f32]),
    ) -> Result<BTreeMap<LinearInput, T>, CalibrateError> {
        self.next = layer.index + 1;
        self.folded(layer, kinds, tick, true, (begin, add))
    }

    fn folded<T>(
        &mut self,
        layer: &CalibratedLayer,
        kinds: impl IntoIterator<Item = LinearKind>,
        tick: &mut Tick<'_>,
        through: bool,
        (begin, mut add): (impl Fn(usize) -> T, impl FnMut(&mut T, &[f32])),
    ) -> Result<BTreeMap<LinearInput, T>, CalibrateError> {
        let inputs = distinct(kinds);
        let mut all: Vec<T> = inputs.iter().map(|&input| begin(self.config.input_width(input))).collect();
        self.pass(layer, &inputs, tick, through, |i, x| add(&mut all[i], x))?;
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
        tick: &mut Tick<'_>,
    ) -> Result<BTreeMap<LinearInput, Sample>, CalibrateError> {
        let tokens = self.states.total() / self.config.hidden_size;
        let every = tokens.div_ceil(most.max(1)).max(1);
        self.fold(layer, kinds, tick, Sample::new, |sample, x| sample.add(x, every))
    }

    /// Runs the windows through `layer`, as it now is, and hands what its linear layers read to `take`, window after window
    /// in their order: the place of the input among `inputs`, and its values `[tokens, width]`. `tick` is asked after every
    /// window of each thread.
    fn observe(
        &mut self,
        layer: &CalibratedLayer,
        inputs: &[LinearInput],
        tick: &mut Tick<'_>,
        take: impl FnMut(usize, &[f32]),
    ) -> Result<(), CalibrateError> {
        self.pass(layer, inputs, tick, false, take)
    }

    /// The same; `through` says that the windows are then at the next layer.
    fn pass(
        &mut self,
        layer: &CalibratedLayer,
        inputs: &[LinearInput],
        tick: &mut Tick<'_>,
        through: bool,
        mut take: impl FnMut(usize, &[f32]),
    ) -> Result<(), CalibrateError> {
        let (config, threads, count) = (self.config, self.threads, self.states.len());
        for first in (0..count).step_by(threads) {
            let windows = first..count.min(first + threads);
            let states = &self.states;
            let work = windows.clone().zip(&mut self.workers);
            for_each(threads, work, |(window, worker)| {
                worker.observe(&layer.layer, config, states, window, inputs);
            });
            for (window, worker) in windows.zip(&mut self.workers) {
                worker.take_result(window)?;
                worker.seen.iter().enumerate().for_each(|(input, x)| take(input, x));
                if through {
                    self.states.put(window, &worker.states)?;
                }
            }
            go_on(tick)?;
        }
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
        self.run_through(layer, tick, |_, _| {})
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
        self.run_through(layer, tick, |buffers, tokens| {
            let (keys, values) = buffers.keys_and_values(tokens);
            for (peaks, x) in peaks.iter_mut().zip([keys, values]) {
                for (i, head) in x.chunks_exact(width).enumerate() {
                    let peak = &mut peaks[i % heads];
                    *peak = head.iter().fold(*peak, |peak, v| peak.max(v.abs()));
                }
            }
        })?;
        Ok(peaks)
    }

    /// Takes the windows through `layer` and gives `ran` what each of them left behind, and its tokens.
    fn run_through(
        &mut self,
        layer: &CalibratedLayer,
        tick: &mut Tick<'_>,
        mut ran: impl FnMut(&Buffers, usize),
    ) -> Result<(), CalibrateError> {
        self.next = layer.index + 1;
        let (config, threads, count) = (self.config, self.threads, self.states.len());
        for first in (0..count).step_by(threads) {
            let windows = first..count.min(first + threads);
            let (states, work) = (&self.states, windows.clone().zip(&mut self.workers));
            for_each(threads, work, |(window, worker)| {
                worker.run(&layer.layer, config, states, window, None);
            });
            for (window, worker) in windows.zip(&mut self.workers) {
                worker.take_result(window)?;
                ran(&worker.buffers, worker.states.len() / config.hidden_size);
                self.states.put(window, &worker.states)?;
            }
            go_on(tick)?;
        }
        Ok(())
    }
}

/// What is known of an input.
#[derive(Clone, Debug)]
pub(crate) struct Sample {
    /// Tokens seen.
    pub(crate) tokens: usize,
    /// Some of them, `[_, width]`.
    pub(crate) x: Vec<f32>,
    /// Sum of the magnitudes of each column.
    sums: Vec<f64>,
    /// Largest magnitude of each column.
    pub(crate) peaks: Vec<f32>,
}

impl Sample {
    fn new(width: usize) -> Self {
        Sample { tokens: 0, x: Vec::new(), sums: vec![0.0; width], peaks: vec![0.0; width] }
    }

    fn add(&mut self, x: &[f32], every: usize) {
        for row in x.chunks_exact(self.sums.len().max(1)) {
            if self.tokens.is_multiple_of(every) {
                self.x.extend_from_slice(row);
            }
            self.tokens += 1;
            for ((sum, peak), v) in self.sums.iter_mut().zip(&mut self.peaks).zip(row) {
                *sum += f64::from(v.abs());
                *peak = peak.max(v.abs());
            }
        }
    }

    /// Tokens of `x`.
    pub(crate) fn rows(&self) -> usize {
        self.x.len() / self.peaks.len().max(1)
    }

    /// Mean magnitude of each column.
    pub(crate) fn means(&self) -> Vec<f32> {
        self.sums.iter().map(|sum| (sum / self.tokens.max(1) as f64) as f32).collect()
    }
}

/// What layers of these `kinds` read, each input once.
fn distinct(kinds: impl IntoIterator<Item = LinearKind>) -> Vec<LinearInput> {
    let mut inputs: Vec<_> = kinds.into_iter().map(LinearKind::input).collect();
    inputs.sort_unstable();
    inputs.dedup();
    inputs
}

pub(crate) fn go_on(tick: &mut Tick<'_>) -> Result<(), CalibrateError> {
    if tick().is_continue() { Ok(()) } else { Err(CalibrateError::Interrupted) }
}

impl CalibratedLayer {
    /// Index of the layer.
    pub fn index(&self) -> usize {
        self.index
    }

    /// One of the layer's linear layers; `None` where it has no such.
    pub fn linear(&self, kind: LinearKind) -> Option<&Linear> {
        self.layer.linear(kind)
    }

    /// Puts `weight` (`[rows, cols]` of the linear layer `kind`) in place of the one that is there, with all that stands around its codes;
    /// its bias stays. A kind that the layer does not have is left out.
    ///
    /// # Errors
    /// [`LoadError::Weight`] where the weight does not have the shape.
    pub fn replace(&mut self, kind: LinearKind, weight: Weight) -> Result<(), LoadError> {
        let Some(old) = self.layer.linear_mut(kind) else { return Ok(()) };
        let input = old.input().map(|input| input.quant().clone());
        let bias = old.bias().map(<[f32]>::to_vec);
        // The input is rotated as before.
        let mut transforms = old.transforms().clone();
        transforms.before.retain(|map| matches!(map, Map::Hadamard(_)));
        transforms.after.clear();
        transforms.extras.clear();
        let weight = LinearWeight { rows: old.rows(), cols: old.cols(), weight, bias, input, transforms };
        *old = Linear::new(old.module(), weight)?;
        Ok(())
    }
}

impl Worker {
    fn new(config: &ModelConfig, longest: usize) -> Result<Self, LoadError> {
        let buffers = Buffers::plan(config, longest, longest)?;
        Ok(Worker { buffers, states: Vec::new(), seen: Vec::new(), result: Ok(()) })
    }

    /// Takes a window through `layer`.
    fn run(
        &mut self,
        layer: &Layer,
        config: &ModelConfig,
        states: &States,
        window: usize,
        observer: Option<&mut Observer<'_>>,
    ) {
        self.states.clear();
        self.result = states.append_to(window, &mut self.states).map_err(Failed::Read);
        if self.result.is_ok() {
            let lens = [self.states.len() / config.hidden_size];
            let run = layer.run(config, &lens, &mut self.states, observer, &mut self.buffers);
            self.result = run.map_err(Failed::Forward);
        }
    }

    fn observe(
        &mut self,
        layer: &Layer,
        config: &ModelConfig,
        states: &States,
        window: usize,
        inputs: &[LinearInput],
    ) {
        let mut seen = std::mem::take(&mut self.seen);
        seen.resize(inputs.len(), Vec::new());
        seen.iter_mut().for_each(Vec::clear);
        let mut observer = |input: LinearInput, x: &[f32]| {
            let wanted = inputs.iter().zip(&mut seen).filter(|(wanted, _)| **wanted == input);
            wanted.for_each(|(_, seen)| seen.extend_from_slice(x));
        };
        self.run(layer, config, states, window, Some(&mut observer));
        self.seen = seen;
        // As the weights see it: what stands around their codes comes first.
        for (input, x) in inputs.iter().zip(&mut self.seen) {
            let reader = input.readers().find_map(|kind| layer.linear(kind));
            let Some(reader) = reader else { continue };
            reader.transforms().before.iter().for_each(|map| map.apply(x, reader.cols()));
        }
    }

    fn take_result(&mut self, window: usize) -> Result<(), CalibrateError> {
        let result = std::mem::replace(&mut self.result, Ok(()));
        result.map_err(|failed| match failed {
            Failed::Read(error) => CalibrateError::States(error),
            Failed::Forward(error) => CalibrateError::Forward { window, error },
        })
    }
}
