//! Describes models for the serving contract.

use mantissa_model::{LinearInfo, LinearKind, ModelConfig, load_config};
use mantissa_num::stored::Map;
use mantissa_num::{Blocks, Scheme, Source};
use mantissa_plan::contract::{Input, Linear, Observation, Observed, Shape, Stored, Subject};
use mantissa_quant::verify::stored_by_module;
use mantissa_quant::{Plan, Recipe};
use mantissa_store::Dtype;
use mantissa_store::convention::{LinearWeight, ModelFiles, Weight};
use mantissa_store::gguf::Storage;
use serde_json::Value;

use crate::error::AdviseError;
use crate::observe;

/// Describes the model at `files`, reading every quantized weight, one at a time. With its source as
/// `reference`, more problems can be observed.
///
/// # Errors
/// Unreadable files or tensors.
pub fn of_artifact(files: &ModelFiles, reference: Option<&ModelFiles>) -> Result<Subject, AdviseError> {
    let config = load_config(files)?;
    let mut linears = Vec::new();
    for info in config.linears_by_rows(files) {
        let stored = if is_plain(files, &info.module) {
            None
        } else {
            stored(&files.linear(&info.module, info.rows, info.cols, false)?)
        };
        linears.push(Linear { module: info.module, rows: info.rows, cols: info.cols, stored });
    }
    let (examined, mut observations) = observe::examine(files, &config, reference)?;
    observations.extend(tables(files, &config)?);
    Ok(Subject {
        planned: false,
        convention: files.convention_name().to_owned(),
        dtype: dtype(files.config()),
        shape: shape(&config),
        linears,
        examined,
        observations,
    })
}

/// Predicts the peak memory of [`of_artifact`] in bytes, beyond the process: the largest weight as stored, or
/// in f32 with a reference.
///
/// # Errors
/// The configuration is invalid.
pub fn bytes_of_artifact(files: &ModelFiles, reference: Option<&ModelFiles>) -> Result<u64, AdviseError> {
    let config = load_config(files)?;
    // q or k rows as read, in the other order, in the source, and one of them as stored.
    let rotated = |info: &LinearInfo| crate::observe::rotated_heads(info, &config).is_some();
    let rows = config.linears().into_iter().filter(rotated).map(|info| (info.rows * info.cols) as u64).max();
    let compared = reference.filter(|_| files.gguf().is_some()).map_or(0, |_| 16 * rows.unwrap_or(0));
    let tokenizer = match files.gguf() {
        None => mantissa_model::Tokenizer::bytes_to_load(files.dir()),
        Some(_) => 0,
    };
    Ok(bytes_of_weight(files)?.max(compared).max(tokenizer))
}

/// Predicts the bytes of reading the quantized weights one at a time, beyond the process: the largest as
/// stored, its codes, its scales, and the names of all.
///
/// # Errors
/// The configuration is invalid.
pub fn bytes_of_weight(files: &ModelFiles) -> Result<u64, AdviseError> {
    let config = load_config(files)?;
    let tensors = files.checkpoint().tensors().count() as u64;
    let (by_module, mut read) = (stored_by_module(files), 0);
    let all = config.linears().into_iter().chain(config.tables());
    for info in all.filter(|info| !is_plain(files, &info.module)) {
        let weights = (info.rows * info.cols) as u64;
        // Some formats use other tensor names; they store at most two bytes per weight.
        let stored = by_module.get(info.module.as_str()).copied().unwrap_or(2 * weights);
        read = read.max(2 * stored + weights + weights / 2);
    }
    Ok(tensors * PER_TENSOR + read)
}

/// Bytes per tensor for name, shape and findings.
const PER_TENSOR: u64 = 2 << 10;

/// Describes the checkpoint that `plan` will make of `source`.
pub fn of_plan(plan: &Plan, source: &ModelFiles) -> Subject {
    Subject {
        planned: true,
        convention: plan.container.name().to_owned(),
        dtype: dtype(source.config()),
        shape: shape(&plan.config),
        linears: plan.linears.iter().map(|linear| planned(plan, linear)).collect(),
        examined: Vec::new(),
        observations: plan
            .quantized_tables()
            .flat_map(|(info, scheme)| table(info, &unread(scheme)))
            .collect(),
    }
}

/// Describes the quantized embedding and head of a folder.
fn tables(files: &ModelFiles, config: &ModelConfig) -> Result<Vec<Observation>, AdviseError> {
    let mut found = Vec::new();
    // A missing head is observed by itself.
    let stored_at_all =
        |module: &str| files.checkpoint().tensors().any(|meta| meta.name.starts_with(&format!("{module}.")));
    let coded = |info: &&LinearInfo| !is_plain(files, &info.module) && stored_at_all(&info.module);
    for info in config.tables().iter().filter(|_| files.gguf().is_none()).filter(coded) {
        let linear = files.linear(&info.module, info.rows, info.cols, false)?;
        found.extend(stored(&linear).iter().flat_map(|stored| table(info, stored)));
        found.extend(unnamed(files, info));
    }
    Ok(found)
}

/// Describes a quantized embedding or head.
fn table(info: &LinearInfo, stored: &Stored) -> Vec<Observation> {
    let found = format!("{} of {} bits", stored.kind().name(), stored.format.code_bits());
    let observed = Observed::of_table(info.kind == LinearKind::Head, stored).into_iter();
    observed.map(|what| Observation { what, tensor: info.module.clone(), found: found.clone() }).collect()
}

/// Reports a quantized head that no target of compressed-tensors' config groups names: servers do not count it among
/// the class `Linear`.
fn unnamed(files: &ModelFiles, info: &LinearInfo) -> Option<Observation> {
    let groups = files.config()?.get("quantization_config")?.get("config_groups")?.as_object()?;
    let targets = groups.values().filter_map(|group| group.get("targets")?.as_array()).flatten();
    let targets: Vec<_> = targets.filter_map(Value::as_str).collect();
    let names =
        |target: &str| target == info.module || (target.starts_with("re:") && target.contains("lm_head"));
    let missing = info.kind == LinearKind::Head && !targets.iter().any(|target| names(target));
    missing.then(|| Observation {
        what: Observed::UnnamedHead,
        tensor: info.module.clone(),
        found: format!("targets {}", targets.join(", ")),
    })
}

/// Describes a weight of `scheme` without its values.
fn unread(scheme: &Scheme) -> Stored {
    Stored { format: scheme.format.clone(), outer: None, input: None, act_order: false, multiplied: false }
}

fn planned(plan: &Plan, linear: &mantissa_quant::PlannedLinear) -> Linear {
    let act_order = plan.job.recipe().is_some_and(Recipe::follows_order);
    let input = plan.input_of(&linear.info);
    let stored = |scheme: &mantissa_num::Scheme| Stored {
        format: scheme.format.clone(),
        outer: None,
        input: input.map(|scheme| Input {
            format: scheme.format.clone(),
            is_static: scheme.source == Source::Static,
            scale: None,
        }),
        act_order,
        multiplied: false,
    };
    // Float schemes without scales are stored dense.
    let scheme = linear.scheme.as_ref();
    let scheme = scheme.filter(|s| s.format.scale().is_some() || s.format.codec().is_some());
    let info = &linear.info;
    Linear { module: info.module.clone(), rows: info.rows, cols: info.cols, stored: scheme.map(stored) }
}

fn shape(config: &ModelConfig) -> Shape {
    Shape { heads: config.num_attention_heads, kv_heads: config.num_key_value_heads }
}

/// Returns the dtype of the config, under its new or old key.
fn dtype(config: Option<&Value>) -> Option<String> {
    let field = |name| config?.get(name)?.as_str().map(str::to_owned);
    field("dtype").or_else(|| field("torch_dtype"))
}

/// True if a weight is stored unquantized.
pub(crate) fn is_plain(files: &ModelFiles, module: &str) -> bool {
    let name = format!("{module}.weight");
    match files.gguf() {
        Some(model) => model.tensor(&name).is_some_and(|t| matches!(t.ty.storage, Storage::Plain(_))),
        None => files
            .checkpoint()
            .get(&name)
            .is_some_and(|meta| matches!(meta.dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16 | Dtype::F64)),
    }
}

fn stored(linear: &LinearWeight) -> Option<Stored> {
    let Weight::Quantized(q) = &linear.weight else { return None };
    // Fused layers must share the per-tensor scale, at whichever level it is stored.
    let single = || {
        let scale =
            q.format.scale().filter(|_| q.format.blocks() == Blocks::Tensor && !q.scales.is_empty())?;
        Some(scale.code.decode(q.scales.get(0)))
    };
    Some(Stored {
        format: q.format.clone(),
        outer: q.outer().or_else(single),
        input: linear.input.as_ref().map(|input| Input {
            format: input.scheme.format.clone(),
            is_static: input.scheme.source == Source::Static,
            scale: input.outer,
        }),
        act_order: linear.transforms.before.iter().any(|map| matches!(map, Map::Perm(_))),
        multiplied: linear.transforms.before.iter().any(|map| matches!(map, Map::Diag(_))),
    })
}
