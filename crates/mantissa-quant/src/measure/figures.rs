//! Quality loss of an artifact on a text, measured against its source.

use std::ops::ControlFlow;

use mantissa_eval::stats::note;
use mantissa_eval::verdict::Verdict;
use mantissa_eval::{Comparison, Sequence, check_sequences, compare, evaluate_while};
use mantissa_kernels::kernels;
use mantissa_model::{Decoder, LoadError, ModelConfig, SourceView, WeightSource};
use mantissa_store::Dtype;
use mantissa_store::convention::{KvLevels, KvQuant, LinearWeight, ModelFiles, Stack, Weight};

use crate::error::Result;
use crate::quality::{Figures, TokenSet};

/// Evaluation text for an output, and the limit of its quality loss.
#[derive(Clone, Debug)]
pub struct Evaluation {
    /// Description of the windows in reports.
    pub text: TokenSet,
    /// Windows.
    pub sequences: Vec<Sequence>,
    /// Maximum KL divergence in nats per token for the output to be put in place.
    pub max_kl: Option<f64>,
    /// Bytes of the source's tensors.
    pub(crate) source_bytes: u64,
    /// True if the noise floor needs a run of its own.
    pub(crate) floor_runs: bool,
}

impl Evaluation {
    /// Creates an evaluation on `sequences`, called `name` in reports.
    ///
    /// # Errors
    /// [`mantissa_eval::EvalError`] for windows that `source` cannot run.
    pub fn new(
        source: &ModelFiles,
        name: &str,
        sequences: Vec<Sequence>,
        max_kl: Option<f64>,
    ) -> Result<Self> {
        let config = mantissa_model::load_config(source)?;
        check_sequences(&config, &sequences)?;
        let text = TokenSet::new(name, &sequences);
        let (source_bytes, floor_runs) = (source.checkpoint().total_bytes(), !is_bf16(source, &config));
        Ok(Evaluation { text, sequences, max_kl, source_bytes, floor_runs })
    }

    /// Returns the total of its progress: the number of tokens that [`Figures::measure`] runs.
    pub fn work(&self) -> u64 {
        self.text.tokens * if self.floor_runs { 2 } else { 1 }
    }
}

/// A figure and the tolerance of a second measurement.
pub(crate) struct Bounded {
    pub(crate) name: &'static str,
    pub(crate) value: f64,
    pub(crate) within: f64,
}

impl Figures {
    /// Measures the model in `artifact` against `source` on `sequences`. The result does not depend on `threads`.
    /// `progress` gets the tokens run out of [`Evaluation::work`]; `Break` interrupts the evaluation.
    ///
    /// # Errors
    /// Errors of loading and running the models; [`crate::QuantError::Interrupted`].
    pub fn measure(
        artifact: &ModelFiles,
        source: &ModelFiles,
        text: &TokenSet,
        sequences: &[Sequence],
        threads: usize,
        progress: &(dyn Fn(u64) -> ControlFlow<()> + Sync),
    ) -> Result<Self> {
        let reference = Decoder::load(source)?;
        let against = |model: &dyn WeightSource, before: u64| {
            let decoder = Decoder::load(model)?;
            let told = |done| progress(before + done);
            Ok::<_, crate::QuantError>(compare(&decoder, &reference, sequences, threads, &told)?)
        };
        let (own, c) = against(artifact, 0)?;
        let floor = if is_bf16(source, reference.config()) {
            None
        } else {
            Some(against(&InBf16(source), text.tokens)?.1)
        };
        Ok(Figures {
            text: text.clone(),
            predicted: own.tokens,
            nll: own.nll,
            nll_se: own.nll_se,
            ppl: own.ppl,
            // Rounding of sums may make the KL of a model against itself slightly negative.
            kl: c.kl.max(0.0),
            kl_se: c.kl_se,
            kl_p99: c.kl_p99,
            verdict: Some(verdict((c.kl, c.kl_se), floor.as_ref())),
            kl_percentiles: c.kl_percentiles,
            kl_by_context: c.kl_by_context,
            top1: c.top1,
            top1_se: c.top1_se,
            delta_nll: c.delta_nll,
            delta_nll_se: c.delta_nll_se,
            noise_floor_kl: floor.as_ref().map_or(0.0, |f| f.kl.max(0.0)),
            noise_floor_kl_se: floor.as_ref().map_or(0.0, |f| f.kl_se),
            kl_without_tables: None,
            note: note(text.windows),
        })
    }

    /// Measures the figures that need no source again: loss, its standard error, and perplexity.
    ///
    /// # Errors
    /// Errors of [`Self::measure`].
    pub(crate) fn loss_again(
        &self,
        artifact: &ModelFiles,
        sequences: &[Sequence],
        threads: usize,
        progress: &(dyn Fn(u64) -> ControlFlow<()> + Sync),
    ) -> Result<Self> {
        let own =
            evaluate_while((&Decoder::load(artifact)?).into(), None, sequences, threads, None, progress)?;
        Ok(Figures { nll: own.nll, nll_se: own.nll_se, ppl: own.ppl, predicted: own.tokens, ..self.clone() })
    }

    /// Returns every figure with the tolerance of a measurement on another processor. Earlier versions multiplied in an
    /// order that depended on the processor, which changed the last bits of logits. If that moves a quantized input
    /// across a rounding boundary, all later tokens change.
    pub(crate) fn bounded(&self, inputs_quantized: bool) -> [Bounded; 13] {
        let (loss, share, kl_error, least) =
            if inputs_quantized { (2e-3, 5e-3, 2e-2, 1e-5) } else { (1e-5, 1e-3, 1e-3, 1e-7) };
        let kl = |kl: f64| kl_error * kl.abs() + least;
        let se = |se: f64| 2e-2 * se.abs() + least;
        let figure = |name, value, within| Bounded { name, value, within };
        [
            figure("predicted", self.predicted as f64, 0.0),
            figure("nll", self.nll, loss),
            figure("nll_se", self.nll_se, se(self.nll_se)),
            figure("ppl", self.ppl, loss * self.ppl),
            figure("kl", self.kl, kl(self.kl)),
            figure("kl_se", self.kl_se, se(self.kl_se)),
            figure("kl_p99", self.kl_p99.into(), 10.0 * kl(self.kl_p99.into())),
            figure("top1", self.top1, share),
            figure("top1_se", self.top1_se, se(self.top1_se) + share / 10.0),
            figure("delta_nll", self.delta_nll, loss),
            figure("delta_nll_se", self.delta_nll_se, se(self.delta_nll_se)),
            figure("noise_floor_kl", self.noise_floor_kl, kl(self.noise_floor_kl)),
            figure("noise_floor_kl_se", self.noise_floor_kl_se, se(self.noise_floor_kl_se)),
        ]
    }
}

/// Judges a mean KL and its standard error against the noise floor.
fn verdict(kl: (f64, f64), floor: Option<&Comparison>) -> String {
    Verdict::new(kl, floor.map_or((0.0, 0.0), |floor| (floor.kl.max(0.0), floor.kl_se))).word().to_owned()
}

/// True if every tensor that the model uses is stored in bf16, so that rounding to bf16 changes nothing.
fn is_bf16(source: &ModelFiles, config: &ModelConfig) -> bool {
    let stored = |name: &str| source.checkpoint().get(name).is_none_or(|meta| meta.dtype == Dtype::BF16);
    config.tensors().iter().all(|tensor| stored(&tensor.name))
}

/// View of a dense model with its weights rounded to bf16.
struct InBf16<'a>(&'a ModelFiles);

fn to_bf16(values: &[f32]) -> Vec<u16> {
    let mut bits = vec![0; values.len()];
    kernels().f32_to_bf16(values, &mut bits);
    bits
}

fn round(values: &mut [f32]) {
    let bits = to_bf16(values);
    kernels().bf16_to_f32(&bits, values);
}

fn weight_in_bf16(weight: Weight) -> Weight {
    match weight {
        Weight::F32(values) => Weight::Bf16(to_bf16(&values)),
        Weight::F16(bits) => {
            let mut values = vec![0.0; bits.len()];
            kernels().f16_to_f32(&bits, &mut values);
            Weight::Bf16(to_bf16(&values))
        }
        other => other,
    }
}

impl SourceView for InBf16<'_> {
    fn base(&self) -> &dyn WeightSource {
        self.0
    }

    fn tensor_f32(&self, tensor: &str, shape: &[usize]) -> std::result::Result<Vec<f32>, LoadError> {
        let mut values = self.base().tensor_f32(tensor, shape)?;
        round(&mut values);
        Ok(values)
    }

    fn expert(&self, stack: &Stack, rows: usize, cols: usize) -> std::result::Result<Weight, LoadError> {
        Ok(weight_in_bf16(self.base().expert(stack, rows, cols)?))
    }

    fn linear(
        &self,
        module: &str,
        rows: usize,
        cols: usize,
        bias: bool,
    ) -> std::result::Result<LinearWeight, LoadError> {
        let mut linear = self.base().linear(module, rows, cols, bias)?;
        linear.weight = weight_in_bf16(linear.weight);
        if let Some(bias) = &mut linear.bias {
            round(bias);
        }
        Ok(linear)
    }

    fn kv_quant(&self, _: &str, _: usize) -> std::result::Result<Option<KvQuant>, LoadError> {
        Ok(None)
    }

    fn kv_levels(&self, _: &str, _: usize) -> std::result::Result<Option<KvLevels>, LoadError> {
        Ok(None)
    }
}
