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

use mantissa_kernels::for_each;
use mantissa_model::{
    Buffers, ForwardError, Layer, Linear, LinearInput, LinearKind, LoadError, ModelConfig, WeightSource,
    embed, load_embedding,
};
use mantissa_store::convention::{LinearWeight, Weight};

use crate::gptq::{GptqError, Hessian};

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
            embed(&embedding, tokens, &mut embedded)
                .map_err(|error| CalibrateError::Forward { window, error })?;
            states.push(embedded);
        }
        Ok(Calibration { source, config, states, next: 0, workers, threads })
    }

    /// Bytes that the hidden states take, for all windows in f32.
    pub fn state_bytes(&self) -> u64 {
        self.states.iter().map(|states| 4 * states.len() as u64).sum()
    }

    /// Predicted peak of a calibration on `threads` threads beside the largest layer: states, Hessians, buffers, and what
    /// linear layers read of one window per thread.
    pub fn bytes_needed(config: &ModelConfig, lens: &[usize], threads: usize) -> u64 {
        let (tokens, longest) = (lens.iter().sum::<usize>() as u64, lens.iter().max().copied().unwrap_or(0));
        let widths = LinearInput::ALL.map(|input| width(config, input));
        let hessians: u64 = widths.iter().map(|&width| Hessian::bytes_needed(width)).sum();
        let seen = 4 * (longest as u64) * widths.iter().sum::<usize>() as u64;
        let worker = Buffers::bytes_needed(config, longest, longest).saturating_add(seen);
        (4 * tokens * config.hidden_size as u64)
            .saturating_add(hessians)
            .saturating_add(worker.saturating_mul(threads.clamp(1, lens.len().max(1)) as u64))
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
    /// `inputs`, in their order.
    ///
    /// # Errors
    /// [`CalibrateError`].
    pub fn statistics(
        &mut self,
        layer: &CalibratedLayer,
        inputs: &[LinearInput],
    ) -> Result<Vec<Hessian>, CalibrateError> {
        let new = inputs.iter().map(|&input| Hessian::new(width(self.config, input)));
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
        }
        Ok(hessians)
    }

    /// Takes the windows through `layer`, as it now is, to the next one.
    ///
    /// # Errors
    /// [`CalibrateError::Forward`].
    pub fn advance(&mut self, layer: &CalibratedLayer) -> Result<(), CalibrateError> {
        self.next = layer.index + 1;
        // Nothing reads what comes out of the last layer.
        if self.next == self.config.num_hidden_layers {
            return Ok(());
        }
        let (config, threads, mut first) = (self.config, self.threads, 0);
        for windows in self.states.chunks_mut(threads) {
            let count = windows.len();
            let work = windows.iter_mut().zip(&mut self.workers);
            for_each(threads, work, |(states, worker)| {
                let lens = [states.len() / config.hidden_size];
                worker.result = layer.layer.run(config, &lens, states, None, &mut worker.buffers);
            });
            for (i, worker) in self.workers[..count].iter_mut().enumerate() {
                worker.take_result(first + i)?;
            }
            first += count;
        }
        Ok(())
    }
}

impl CalibratedLayer {
    /// Index of the layer.
    pub fn index(&self) -> usize {
        self.index
    }

    /// One of the layer's linear layers.
    pub fn linear(&self, kind: LinearKind) -> &Linear {
        self.layer.linear(kind)
    }

    /// Puts `weight` (`[rows, cols]` of the linear layer `kind`) in place of the one that is there; its bias stays.
    ///
    /// # Errors
    /// [`LoadError::Weight`] where the weight does not have the shape.
    pub fn replace(&mut self, kind: LinearKind, weight: Weight) -> Result<(), LoadError> {
        let old = self.layer.linear(kind);
        let input = old.input().map(|input| input.quant().clone());
        let bias = old.bias().map(<[f32]>::to_vec);
        let weight = LinearWeight { rows: old.rows(), cols: old.cols(), weight, bias, input };
        *self.layer.linear_mut(kind) = Linear::new(old.module(), weight)?;
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

/// Width of what `input`'s readers read; every layer has the same.
fn width(config: &ModelConfig, input: LinearInput) -> usize {
    input.readers().next().map_or(0, |kind| config.linear(0, kind).cols)
}
