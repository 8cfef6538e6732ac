//! Models of an evaluation: loaded for either engine, with or without a reference.

use mantissa_eval::Evaluated;
use mantissa_model::{Decoder, KvPolicy};
use mantissa_runtime::FastModel;
use mantissa_store::convention::ModelFiles;

use super::value::Evaluate;
use crate::adapt;
use crate::adapter;
use crate::error::{BadInput, Result};
use crate::host::Host;
use crate::loaded::{LoadedModel, ModelUse};
use crate::model::open;
use crate::names::Engine;

/// Model that is evaluated, and the one that it is compared with.
pub(super) struct Models {
    model: Subject,
    /// Model to compare with.
    pub(super) reference: Option<LoadedModel>,
    /// Number of threads that memory allows.
    pub(super) threads: usize,
}

/// Model to evaluate, by engine.
enum Subject {
    Reference(Box<LoadedModel>),
    Fast(Box<(FastModel, ModelFiles)>),
}

impl Models {
    /// Loads the models of `job` for the work that `used` describes.
    pub(super) fn load(job: &Evaluate, used: ModelUse<'_>, host: &Host) -> Result<Self> {
        let files = open(&job.model, host)?;
        let reference = job.reference.as_ref().map(|path| open(path, host)).transpose()?;
        let both: Vec<&ModelFiles> = std::iter::once(&files).chain(&reference).collect();
        let needs = |threads| Ok::<_, crate::JobError>(ModelUse { threads, ..used }.needed(&both)?.1);
        let threads = adapt::fit_threads(used.threads, host, needs)?;
        let used = ModelUse { threads, ..used };
        if job.engine == Engine::Fast {
            check_fast(job)?;
            used.require(&both, host)?;
            // Windows run side by side, each on one thread.
            let mut fast = adapter::fast(&files, used.adapter, 1)?;
            if let Some(policy) = used.kv {
                fast.set_kv(policy)?;
            }
            let reference = reference.map(LoadedModel::new).transpose()?;
            return Ok(Models { model: Subject::Fast(Box::new((fast, files))), reference, threads });
        }
        let (mut model, reference) = used.load(files, reference, host)?;
        simulate(job, &mut model.decoder)?;
        Ok(Models { model: Subject::Reference(Box::new(model)), reference, threads })
    }

    /// Returns the files of the evaluated model.
    pub(super) fn files(&self) -> &ModelFiles {
        match &self.model {
            Subject::Reference(model) => &model.files,
            Subject::Fast(fast) => &fast.1,
        }
    }

    /// Returns the evaluated model.
    pub(super) fn evaluated(&self) -> Evaluated<'_> {
        match &self.model {
            Subject::Reference(model) => Evaluated::Reference(&model.decoder),
            Subject::Fast(fast) => Evaluated::Fast(&fast.0),
        }
    }

    /// Returns the evaluated model on the reference engine; `None` on the other.
    pub(super) fn decoder(&self) -> Option<&Decoder> {
        match &self.model {
            Subject::Reference(model) => Some(&model.decoder),
            Subject::Fast(_) => None,
        }
    }

    /// Returns the bytes of a token in the cache.
    pub(super) fn kv_bytes_per_token(&self) -> f64 {
        match &self.model {
            Subject::Reference(model) => model.decoder.kv_bytes_per_token(),
            Subject::Fast(fast) => fast.0.kv_bytes_per_token(),
        }
    }

    /// Returns the KV cache policy given, or that of the model.
    pub(super) fn kv_name(&self, given: Option<&KvPolicy>) -> Option<String> {
        given.map(KvPolicy::to_string).or_else(|| self.files().kv_policy().map(str::to_owned))
    }

    /// Notes that the reference is quantized itself, and returns its format.
    pub(super) fn quantized_reference(&self, host: &Host) -> Option<&'static str> {
        let files = self.reference.as_ref().map(|model| &model.files).filter(|files| files.is_quantized())?;
        let format = files.convention_name();
        host.note(&format!(
            "the reference is itself quantized ({format}): the comparison leaves out what its quantization lost"
        ));
        Some(format)
    }
}

/// Refuses what only the reference engine simulates.
fn check_fast(job: &Evaluate) -> Result<()> {
    let simulated = [
        (job.attention_operands.is_some(), "--attention-operands"),
        (job.accumulator.is_some(), "--accumulator"),
        (job.logits.is_some(), "--logits"),
    ];
    match simulated.iter().find(|(given, _)| *given) {
        Some((_, option)) => {
            Err(BadInput::new(*option, "--engine fast", "--engine reference with it").into())
        }
        None => Ok(()),
    }
}

/// Sets the simulated arithmetic.
fn simulate(job: &Evaluate, decoder: &mut Decoder) -> Result<()> {
    if let Some(operands) = &job.attention_operands {
        decoder.set_attention_operands(&operands.0)?;
    }
    match &job.accumulator {
        Some(accumulator) if decoder.set_accumulator(accumulator.0) == 0 => {
            let allowed =
                "a model with FP8 weights and activations, such as those of quantize --recipe fp8-dynamic";
            Err(BadInput::new("--accumulator", "a model without FP8 matmuls", allowed).into())
        }
        _ => Ok(()),
    }
}

/// True if `found` exceeds the bound or is not a number.
pub(super) fn exceeds(found: f64, allowed: f64) -> bool {
    found.is_nan() || found > allowed
}
