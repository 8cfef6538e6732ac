//! Speed of a model beside the limits of the machine, measured in turns so that both see the same conditions.
//!
//! Limits: a decode step reads every weight and every cached key and value once, so it cannot be faster than those
//! bytes over the read bandwidth. A prefill cannot be faster than its multiply-adds over the peak of the instruction
//! that most of them use.

use std::time::Instant;

use mantissa_kernels::{PeakLoop, ReadProbe, kernels};
use mantissa_model::{GenerateError, LoadError};

use crate::model::FastModel;
use crate::session::{EventKind, Request, Runtime, RuntimeOptions};

/// Work that is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Workload {
    /// Tokens of the prompt whose processing is measured.
    pub prompt: usize,
    /// Tokens that each sequence generates.
    pub generated: usize,
    /// Tokens that a sequence holds before it generates.
    pub depth: usize,
    /// Sequences that generate at once.
    pub batch: usize,
}

/// Seconds of one repetition.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Times {
    /// Time of the prompt, to its first token.
    pub prefill: f64,
    /// Time of the generated tokens after the first, of all sequences.
    pub decode: f64,
    /// Tokens generated in that time.
    pub decoded: usize,
}

/// Limits of the machine on the threads of a model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// Read bandwidth, bytes/s.
    pub read: f64,
    /// Peak of 8-bit products, operations/s; `None` if the level has no such instruction.
    pub int8: Option<f64>,
    /// Peak of bf16 products, operations/s.
    pub bf16: Option<f64>,
    /// Peak of f32 products, operations/s.
    pub f32: Option<f64>,
}

/// Measures the limits of the machine.
#[derive(Debug)]
pub struct Probe {
    memory: ReadProbe,
    threads: usize,
}

impl Probe {
    /// Prepares to measure on `threads` threads.
    ///
    /// # Errors
    /// [`LoadError::Memory`].
    pub fn new(threads: usize) -> Result<Self, LoadError> {
        let memory =
            ReadProbe::new().ok_or(LoadError::Memory { what: "memory to read", bytes: 256 << 20 })?;
        Ok(Probe { memory, threads })
    }

    /// Measures every limit once, in about a tenth of a second.
    pub fn run(&self) -> Limits {
        let rate = |work: &dyn Fn() -> f64| {
            let start = Instant::now();
            work() / start.elapsed().as_secs_f64()
        };
        let peak = |peak: Option<PeakLoop>| peak.map(|peak| rate(&|| peak.run(self.threads)));
        Limits {
            read: rate(&|| self.memory.run(self.threads)).max(rate(&|| self.memory.run(self.threads))),
            int8: peak(PeakLoop::int8(kernels())),
            bf16: peak(PeakLoop::bf16(kernels())),
            f32: peak(PeakLoop::f32(kernels())),
        }
    }
}

/// Runs `work` once.
///
/// # Errors
/// As [`Runtime::new`], [`Runtime::add`] and [`Runtime::step`].
pub fn run(model: &FastModel, work: Workload, seed: u64) -> Result<Times, GenerateError> {
    let mut draw = Draw { state: seed | 1, vocabulary: model.config().vocab_size as u64 };
    let prefill = match work.prompt {
        0 => 0.0,
        tokens => {
            let mut runtime = Runtime::new(model, RuntimeOptions::single(tokens + 1))?;
            runtime.add(draw.request(tokens, 1))?;
            let start = Instant::now();
            while !runtime.is_idle() {
                runtime.step()?;
            }
            start.elapsed().as_secs_f64()
        }
    };
    let (mut decode, mut decoded) = (0.0, 0);
    if work.generated > 0 {
        let depth = work.depth.max(1);
        let context = depth + work.generated + 1;
        let options = RuntimeOptions { kept: 0, ..RuntimeOptions::batch(work.batch.max(1), context) };
        let mut runtime = Runtime::new(model, options)?;
        for _ in 0..work.batch.max(1) {
            runtime.add(draw.request(depth, work.generated + 1))?;
        }
        while runtime.running() > 0 || runtime.waiting() > 0 {
            let all = runtime.waiting() == 0 && runtime.last_step_tokens() == runtime.running();
            let start = Instant::now();
            let events = runtime.step()?;
            let tokens = events.iter().filter(|event| matches!(event.kind, EventKind::Token { .. })).count();
            // Steps that also process a prompt do not count.
            if all {
                decode += start.elapsed().as_secs_f64();
                decoded += tokens;
            }
        }
    }
    Ok(Times { prefill, decode, decoded })
}

/// Bytes that a decode step of one sequence reads of the weights.
pub fn weight_bytes(model: &FastModel) -> u64 {
    model.linears().map(crate::prepared::PreparedLinear::bytes).sum()
}

/// Multiply-adds, times two, of a prompt of `tokens`: linear layers, attention, and the head for the last token.
pub fn operations(model: &FastModel, tokens: usize) -> f64 {
    let config = model.config();
    let linear = |layer: &crate::prepared::PreparedLinear| layer.rows() as f64 * layer.cols() as f64;
    let mut layers: Vec<f64> = model.linears().map(linear).collect();
    let head = layers.pop().unwrap_or(0.0);
    let tokens = tokens as f64;
    let attention = 2.0 * config.query_width() as f64 * tokens * (tokens + 1.0) / 2.0;
    2.0 * (layers.iter().sum::<f64>() * tokens + head + attention * config.attention_layers().count() as f64)
}

/// Draws prompts without a pattern, so that nothing is shared or guessed.
struct Draw {
    state: u64,
    vocabulary: u64,
}

impl Draw {
    fn request(&mut self, tokens: usize, new: usize) -> Request {
        let prompt = (0..tokens)
            .map(|_| {
                self.state = self
                    .state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407);
                ((self.state >> 33) % self.vocabulary.max(1)) as u32
            })
            .collect();
        Request { prompt, max_new_tokens: new, ignore_eos: true, ..Request::default() }
    }
}
