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

use std::ops::ControlFlow;

use mantissa_eval::Sequence;
use mantissa_kernels::for_each;
use mantissa_model::{
    Buffers, ForwardError, Layer, Linear, LinearInput, LinearKind, LoadError, ModelConfig, WeightSource,
    load_embedding,
};
use mantissa_store::ErrorClass;
use mantissa_store::convention::{LinearWeight, Weight};

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
    /// The caller ended the run.
    #[error("found a request to stop, allowed to run to the end")]
    Interrupted,
}

impl CalibrateError {
    /// Whether the input or the environment is at fault.
    pub fn class(&self) -> ErrorClass {
        match self {
            CalibrateError::Load(error) => error.class(),
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
    states: Vec<Vec<f32>>,
    next: usize,
    /// One per thread.
    workers: Vec<Worker>,
    threads: usize,
    /// Whether the states behind the last layer are wanted too.
    to_the_end: bool,
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
    /// What the linear layers read, in the order of the inputs asked for.
    seen: Vec<Vec<f32>>,
    result: Result<(), ForwardError>,
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
        let mut states = Vec::with_capacity(windows.len());
        for (window, tokens) in windows.iter().enumerate() {
            let mut embedded = vec![0.0; tokens.len() * config.hidden_size];
            embedding
                .embed(tokens, &[tokens.len()], 0, &mut embedded)
                .map_err(|error| CalibrateError::Forward { window, error })?;
            states.push(embedded);
        }
        Ok(Calibration { source, config, states, next: 0, workers, threads, to_the_end: false })
    }

    /// The same, to be taken through the last layer as well.
    #[must_use]
    pub fn to_the_end(self) -> Self {
        Calibration { to_the_end: true, ..self }
    }

    /// Hidden states of each window, `[tokens, hidden]`, as the next layer reads them.
    pub fn states(&self) -> &[Vec<f32>] {
        &self.states
    }

    /// The layer that [`next_layer`](Self::next_layer) gives.
    pub fn next_index(&self) -> usize {
        self.next
    }

    /// Bytes that the hidden states take, for all windows in f32.
    pub fn state_bytes(&self) -> u64 {
        self.states.iter().map(|states| 4 * states.len() as u64).sum()
    }

    /// Bytes that stay in memory from the first layer to the last: states, and what each thread works in.
    pub fn held_bytes(config: &ModelConfig, set: &CalibrationSet, threads: usize) -> u64 {
        let (longest, threads) = (set.longest(), threads.clamp(1, set.windows.len().max(1)) as u64);
        (4 * set.tokens() as u64)
            .saturating_mul(config.hidden_size as u64)
            .saturating_add(Buffers::bytes_needed(config, longest, longest).saturating_mul(threads))
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
        let (config, threads, mut first) = (self.config, self.threads, 0);
        for windows in self.states.chunks(threads) {
            let work = windows.iter().zip(&mut self.workers);
            for_each(threads, work, |(states, worker)| worker.observe(&layer.layer, config, states, inputs));
            for (i, worker) in self.workers[..windows.len()].iter_mut().enumerate() {
                worker.take_result(first + i)?;
                hessians.iter_mut().zip(&worker.seen).for_each(|(hessian, x)| hessian.add(x, threads));
            }
            first += windows.len();
            go_on(tick)?;
        }
        Ok(hessians)
    }

    /// Runs the windows through `layer`, as it now is, and sums the squares of what its linear layers read, column by
    /// column: the diagonals of [`statistics`](Self::statistics), at a fraction of its cost. `tick` is asked as there.
    ///
    /// # Errors
    /// [`CalibrateError`].
    pub fn squares(
        &mut self,
        layer: &CalibratedLayer,
        inputs: &[LinearInput],
        tick: &mut Tick<'_>,
    ) -> Result<Vec<Vec<f64>>, CalibrateError> {
        let mut sums: Vec<Vec<f64>> =
            inputs.iter().map(|&input| vec![0.0; self.config.input_width(input)]).collect();
        let (config, threads, mut first) = (self.config, self.threads, 0);
        for windows in self.states.chunks(threads) {
            let work = windows.iter().zip(&mut self.workers);
            for_each(threads, work, |(states, worker)| worker.observe(&layer.layer, config, states, inputs));
            for (i, worker) in self.workers[..windows.len()].iter_mut().enumerate() {
                worker.take_result(first + i)?;
                for (sums, x) in sums.iter_mut().zip(&worker.seen) {
                    for row in x.chunks_exact(sums.len()) {
                        sums.iter_mut().zip(row).for_each(|(sum, v)| *sum += f64::from(*v) * f64::from(*v));
                    }
                }
            }
            first += windows.len();
            go_on(tick)?;
        }
        Ok(sums)
    }

    /// Runs the windows through `layer`, as it now is, and finds the greatest magnitude of what its linear layers read, for each of
    /// `inputs`. `tick` is asked as in [`statistics`](Self::statistics).
    ///
    /// # Errors
    /// [`CalibrateError`].
    pub fn peaks(
        &mut self,
        layer: &CalibratedLayer,
        inputs: &[LinearInput],
        tick: &mut Tick<'_>,
    ) -> Result<Vec<f32>, CalibrateError> {
        let mut peaks = vec![0f32; inputs.len()];
        let (config, threads, mut first) = (self.config, self.threads, 0);
        for windows in self.states.chunks(threads) {
            let work = windows.iter().zip(&mut self.workers);
            for_each(threads, work, |(states, worker)| worker.observe(&layer.layer, config, states, inputs));
            for (i, worker) in self.workers[..windows.len()].iter_mut().enumerate() {
                worker.take_result(first + i)?;
                for (peak, x) in peaks.iter_mut().zip(&worker.seen) {
                    *peak = x.iter().fold(*peak, |peak, v| peak.max(v.abs()));
                }
            }
            first += windows.len();
            go_on(tick)?;
        }
        Ok(peaks)
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
        let (config, threads, mut first) = (self.config, self.threads, 0);
        for windows in self.states.chunks_mut(threads) {
            let tokens: Vec<_> = windows.iter().map(|states| states.len() / config.hidden_size).collect();
            let work = windows.iter_mut().zip(&tokens).zip(&mut self.workers);
            for_each(threads, work, |((states, &tokens), worker)| {
                worker.result = layer.layer.run(config, &[tokens], states, None, &mut worker.buffers);
            });
            for (i, (worker, &tokens)) in self.workers.iter_mut().zip(&tokens).enumerate() {
                worker.take_result(first + i)?;
                ran(&worker.buffers, tokens);
            }
            first += tokens.len();
            go_on(tick)?;
        }
        Ok(())
    }
}

fn go_on(tick: &mut Tick<'_>) -> Result<(), CalibrateError> {
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
        let transforms = Default::default();
        let weight = LinearWeight { rows: old.rows(), cols: old.cols(), weight, bias, input, transforms };
        *old = Linear::new(old.module(), weight)?;
        Ok(())
    }
}

impl Worker {
    fn new(config: &ModelConfig, longest: usize) -> Result<Self, LoadError> {
        Ok(Worker { buffers: Buffers::plan(config, longest, longest)?, seen: Vec::new(), result: Ok(()) })
    }

    fn observe(&mut self, layer: &Layer, config: &ModelConfig, states: &[f32], inputs: &[LinearInput]) {
        let mut states = states.to_vec();
        let lens = [states.len() / config.hidden_size];
        let seen = &mut self.seen;
        seen.resize(inputs.len(), Vec::new());
        seen.iter_mut().for_each(Vec::clear);
        let mut observer = |input: LinearInput, x: &[f32]| {
            let wanted = inputs.iter().zip(&mut *seen).filter(|(wanted, _)| **wanted == input);
            wanted.for_each(|(_, seen)| seen.extend_from_slice(x));
        };
        self.result = layer.run(config, &lens, &mut states, Some(&mut observer), &mut self.buffers);
    }

    fn take_result(&mut self, window: usize) -> Result<(), CalibrateError> {
        let result = std::mem::replace(&mut self.result, Ok(()));
        result.map_err(|error| CalibrateError::Forward { window, error })
    }
}
