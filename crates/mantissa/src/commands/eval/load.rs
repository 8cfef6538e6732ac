//! Models that `eval` measures: loaded for either engine, with or without a reference.

use std::path::Path;

use anyhow::Result;
use mantissa_eval::Evaluated;
use mantissa_jobs::adapt;
use mantissa_model::{Decoder, KvPolicy};
use mantissa_runtime::FastModel;
use mantissa_store::convention::ModelFiles;

use super::args::Args;
use crate::commands::loaded_models::{self, Model, Use};
use crate::commands::run::Engine;
use crate::commands::{adapter, model};
use crate::context::Context;
use crate::error::BadInput;

/// Model to evaluate.
pub(super) enum Loaded {
    Reference(Box<Model>),
    Fast(Box<(FastModel, ModelFiles)>),
}

impl Loaded {
    pub(super) fn files(&self) -> &ModelFiles {
        match self {
            Loaded::Reference(model) => &model.files,
            Loaded::Fast(fast) => &fast.1,
        }
    }

    pub(super) fn evaluated(&self) -> Evaluated<'_> {
        match self {
            Loaded::Reference(model) => Evaluated::Reference(&model.decoder),
            Loaded::Fast(fast) => Evaluated::Fast(&fast.0),
        }
    }

    pub(super) fn kv_bytes_per_token(&self) -> f64 {
        match self {
            Loaded::Reference(model) => model.decoder.kv_bytes_per_token(),
            Loaded::Fast(fast) => fast.0.kv_bytes_per_token(),
        }
    }
}

/// Loads the model and, if given, the reference, for the work that `used` describes. Returns the number of threads that
/// memory allows.
pub(super) fn load<'a>(
    args: &'a Args,
    mut used: Use<'a>,
    context: &Context,
) -> Result<(Loaded, Option<Model>, usize)> {
    used.kv = args.kv.as_ref();
    used.calibration = Some(&args.calibration);
    let both: Vec<&Path> = [Some(&args.model), args.reference.as_ref()]
        .into_iter()
        .flatten()
        .map(|model| model.location())
        .collect();
    let needs = |threads| loaded_models::bytes_of(&both, Use { threads, ..used });
    used.threads = adapt::fit_threads(used.threads, context, needs)?;
    if args.engine == Engine::Fast {
        return load_fast(args, &both, used, context);
    }
    let loaded = |mut model: Model| {
        simulate(args, &mut model.decoder)?;
        Ok::<_, anyhow::Error>(Loaded::Reference(Box::new(model)))
    };
    let Some(path) = &args.reference else {
        let [model] = loaded_models::load_all([&*args.model], used, context)?;
        return Ok((loaded(model)?, None, used.threads));
    };
    let [model, reference] = loaded_models::load_all([&*args.model, &**path], used, context)?;
    Ok((loaded(model)?, Some(reference), used.threads))
}

/// Loads the model for the fast engine; windows run side by side, each on one thread.
pub(super) fn load_fast(
    args: &Args,
    both: &[&Path],
    used: Use<'_>,
    context: &Context,
) -> Result<(Loaded, Option<Model>, usize)> {
    let simulated = [
        (args.attention_operands.is_some(), "--attention-operands"),
        (args.accumulator.is_some(), "--accumulator"),
        (args.logits.is_some(), "--logits"),
    ];
    if let Some((_, option)) = simulated.iter().find(|(given, _)| *given) {
        return Err(BadInput::new(*option, "--engine fast", "--engine reference with it").into());
    }
    loaded_models::require_memory(both, used, context)?;
    let files = model::open(&args.model, context)?;
    let mut fast = adapter::fast(&files, used.adapter, 1)?;
    if let Some(policy) = &args.kv {
        fast.set_kv(policy)?;
    }
    let reference = match &args.reference {
        None => None,
        Some(path) => {
            let files = model::open(path, context)?;
            Some(Model { decoder: Decoder::load(&files)?, files })
        }
    };
    Ok((Loaded::Fast(Box::new((fast, files))), reference, used.threads))
}

/// Sets the simulated arithmetic.
pub(super) fn simulate(args: &Args, decoder: &mut Decoder) -> Result<()> {
    if let Some(operands) = &args.attention_operands {
        decoder.set_attention_operands(operands)?;
    }
    match args.accumulator {
        Some(accumulator) if decoder.set_accumulator(accumulator) == 0 => {
            let allowed =
                "a model with FP8 weights and activations, such as those of quantize --recipe fp8-dynamic";
            Err(BadInput::new("--accumulator", "a model without FP8 matmuls", allowed).into())
        }
        _ => Ok(()),
    }
}

/// Returns the KV cache policy given, or that of the model.
pub(super) fn kv_name(args: &Args, model: &Loaded) -> Option<String> {
    let given = args.kv.as_ref().map(KvPolicy::to_string);
    given.or_else(|| model.files().kv_policy().map(str::to_owned))
}

/// Notes that the reference is quantized itself, and returns its format.
pub(super) fn quantized_reference(reference: Option<&Model>, context: &Context) -> Option<&'static str> {
    let format = reference.map(|model| &model.files).filter(|files| files.is_quantized())?.convention_name();
    context.note(&format!(
        "the reference is itself quantized ({format}): the comparison leaves out what its quantization lost"
    ));
    Some(format)
}

/// True if `found` exceeds the bound or is not a number.
pub(super) fn exceeds(found: f64, allowed: f64) -> bool {
    found.is_nan() || found > allowed
}
