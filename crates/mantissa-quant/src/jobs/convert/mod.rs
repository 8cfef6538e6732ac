//! A change of container: the codes and scales of a quantized model, stored as another convention has them.
//!
//! Each weight is recoded into the first format that the container holds without loss ([`recode`]); what cannot be is refused
//! with the reason, before anything is written. The writing is the pipeline's. Before the output is put in place every layer
//! is read back from it and compared with the source: bit for bit, but for a global scale that the containers store as each
//! other's reciprocal, which may differ by one unit in the last place ([`prove`]). With a scheme to requantize to, weights are
//! decoded and rounded to nearest instead, and the error that this adds is reported.

mod around;
mod dense;
mod proof;
mod recode;
pub(crate) mod rewritten;

use std::collections::{BTreeMap, BTreeSet};

use mantissa_model::graph::EMBEDDING;
use mantissa_model::{LinearInfo, LinearKind, ModelConfig};
use mantissa_num::{Code, Scheme, minifloat};
use mantissa_store::convention::{
    Container, Experts, LayerKind, LinearPlan, LinearWeight, ModelFiles, Weight, gpt_oss, gptq as gptq_files,
    levels,
};
use mantissa_store::gguf::Storage;
use mantissa_store::{Dtype, TensorMeta};

use crate::cache_scales;
use crate::config::model_config;
use crate::error::{QuantError, Refused, Result};
use crate::error_stats::ErrorStats;
use crate::gguf;
use crate::input_scales::Observer;
use crate::plan::{Check, Job, Options, Plan, PlannedLinear};
use crate::rtn;
use crate::stacks::{self, stack_of};
use crate::verify::load::loadable;
use mantissa_methods::Solved;

use super::tensors::{EXPERTS_APART, output_of_linears};
use crate::gguf::layout::Layout;
use crate::values::{values_of, weight_of};
use around::group_order;
use rewritten::Dense;

pub(crate) use proof::prove;

/// Changes that a conversion may make beside the format.
#[derive(Clone, Copy, Debug, Default)]
pub struct Changes<'a> {
    /// Weights are decoded and rounded to nearest under this scheme.
    pub requantize: Option<&'a Scheme>,
    /// Inputs are no longer quantized at run time.
    pub drop_inputs: bool,
}

impl Plan {
    /// Decides how `source` is stored in `container`: without loss, or, with a scheme, rounded to nearest under it. Every
    /// weight is read for that.
    ///
    /// # Errors
    /// [`QuantError::NotLossless`] with the layers that the container cannot hold as they are and the reasons;
    /// [`QuantError::NothingToConvert`]; a source that could not be run, with what it lacks; what cannot be read.
    pub fn conversion(
        source: &ModelFiles,
        container: Container,
        changes: Changes<'_>,
        options: Options,
    ) -> Result<Self> {
        let Changes { requantize, drop_inputs } = changes;
        let config = model_config(source)?;
        if source.convention_name() == container.name() && requantize.is_none() {
            return Err(QuantError::NothingToConvert {
                path: source.dir().into(),
                container: container.name(),
            });
        }
        if container.facts().experts == Experts::Stacked {
            stacks::require(&config)?;
        }
        // What the source lacks, the output would lack.
        loadable(source)?;
        let dtype = model_dtype(source);
        let Decided { linears, inputs, by_group, rotations, mut refused } =
            Decided::new(source, &config, container, changes, dtype)?;
        refused.whole.extend(of_the_whole(&inputs, requantize));
        let kv = cache_quantization(source, &config, container, requantize, &mut refused)?;
        if refused.is_empty() && linears.iter().all(|linear| linear.scheme.is_none()) {
            refused.whole.push("no layer is quantized, which mantissa quantize does".to_owned());
        }
        if !refused.is_empty() {
            let total = converted(source, &config, container).len();
            return Err(
                QuantError::not_lossless(container, total, &refused).of_requantization(requantize.is_some())
            );
        }
        let activations = inputs.into_iter().next().flatten().filter(|_| requantize.is_none());
        let table = Scheme::plain(match dtype {
            Dtype::BF16 => Code::Float(minifloat::BF16),
            Dtype::F16 => Code::Float(minifloat::F16),
            _ => Code::F32,
        });
        let job = match requantize {
            Some(scheme) => Job::Requantize { scheme: scheme.clone(), table },
            None => Job::Convert { drops_inputs: drop_inputs, table },
        };
        let kept = Kept { activations, kv, by_group, rotations };
        finish(source, config, job, container, linears, options, kept)
    }
}

/// Properties of the source that the output keeps.
struct Kept {
    /// Scheme of inputs.
    activations: Option<Scheme>,
    /// Scheme of keys and values.
    kv: Option<Scheme>,
    /// True if groups of some layer are not of neighbouring columns.
    by_group: bool,
    /// Modules whose inputs are rotated as the model runs, and the orders of the matrices.
    rotations: Vec<(String, usize)>,
}

/// Decisions about the layers of a model.
#[derive(Default)]
struct Decided {
    linears: Vec<PlannedLinear>,
    /// Input scheme of each layer that is stored again.
    inputs: Vec<Option<Scheme>>,
    /// True if groups of some layer are not of neighbouring columns.
    by_group: bool,
    /// Modules whose inputs are rotated as the model runs, and the orders of the matrices.
    rotations: Vec<(String, usize)>,
    /// Refused parts, with the reasons.
    refused: Refused,
}

impl Decided {
    fn new(
        source: &ModelFiles,
        config: &ModelConfig,
        container: Container,
        changes: Changes<'_>,
        dtype: Dtype,
    ) -> Result<Self> {
        let Changes { requantize, drop_inputs } = changes;
        let mut all = Decided::default();
        for info in converted(source, config, container) {
            let mut weight = weight_of(source, &info)?;
            weight.input = weight.input.filter(|_| !drop_inputs);
            if let Some(why) = keeps_dense(&info, container) {
                match requantize.is_none() && (is_quantized(&weight) || !weight.transforms.is_empty()) {
                    true => all.refused.layers.push(format!("{}: {why}", info.module)),
                    false => all.linears.push(PlannedLinear { info, scheme: None }),
                }
                continue;
            }
            match decide(&info, &weight, container, requantize, dtype) {
                Ok(scheme) => {
                    if requantize.is_none() {
                        all.by_group |= group_order(&weight.transforms).is_some();
                        let rotated = around::rotation(&weight.transforms);
                        all.rotations.extend(rotated.map(|order| (info.module.clone(), order)));
                    }
                    if scheme.is_some() {
                        all.inputs.push(weight.input.map(|input| input.scheme));
                    }
                    all.linears.push(PlannedLinear { info, scheme });
                }
                Err(why) => {
                    // Containers name the layer themselves where it is its shape that does not fit.
                    let name = format!("{}: ", info.module);
                    all.refused.layers.push(format!("{name}{}", why.strip_prefix(&name).unwrap_or(&why)));
                }
            }
        }
        Ok(all)
    }
}

/// Scheme of keys and values in the new format. Requantizing leaves out what the format cannot hold; a conversion
/// refuses.
fn cache_quantization(
    source: &ModelFiles,
    config: &ModelConfig,
    container: Container,
    requantize: Option<&Scheme>,
    refused: &mut Refused,
) -> Result<Option<Scheme>> {
    if let Some(policy) = source.kv_policy().filter(|_| requantize.is_none()) {
        refused
            .whole
            .push(format!("KV cache: the levels of {policy} have a place in the native container alone"));
    }
    let kv = match cache_scales::of_source(source, config)? {
        Ok(kv) => kv,
        Err(why) => {
            refused.whole.push(why);
            None
        }
    };
    Ok(match kv.map(|kv| container.check_kv(&kv).map(|()| kv)) {
        Some(Err(error)) if requantize.is_none() => {
            refused.whole.push(format!("KV cache: {error}"));
            None
        }
        kv => kv.and_then(std::result::Result::ok),
    })
}

/// The layers that a conversion is about: those that the source holds one by one, and experts that it holds stacked in MXFP4; for
/// containers that say of every layer how it is stored, all.
fn converted(source: &ModelFiles, config: &ModelConfig, container: Container) -> Vec<LinearInfo> {
    match container.facts().experts {
        Experts::OwnNames | Experts::Stacked => config.decoder_linears().collect(),
        Experts::OneByOne | Experts::AsInSource => {
            let in_mxfp4 = |info: &LinearInfo| {
                stack_of(info).is_some_and(|stack| source.has(&gpt_oss::names(&stack.tensor)[0]))
            };
            config.decoder_linears().filter(|info| info.is_by_rows(source) || in_mxfp4(info)).collect()
        }
    }
}

/// Reason why a format keeps a layer unquantized, whatever the others are.
fn keeps_dense(info: &LinearInfo, container: Container) -> Option<&'static str> {
    let kind = LayerKind { latent_kv: info.kind == LinearKind::KvB, expert: stack_of(info).is_some() };
    container.keeps_dense(kind)
}

fn is_quantized(weight: &LinearWeight) -> bool {
    matches!(weight.weight, Weight::Quantized(_))
}

/// The scheme under which the container holds a layer as it is; `None` leaves it dense.
fn decide(
    info: &LinearInfo,
    weight: &LinearWeight,
    container: Container,
    requantize: Option<&Scheme>,
    dtype: Dtype,
) -> std::result::Result<Option<Scheme>, String> {
    if let Some(scheme) = requantize {
        let scheme = container.as_stored(scheme.clone(), dtype);
        let plan = LinearPlan::new(&info.module, &scheme, None, (info.rows, info.cols));
        return container.specs(&plan).map(|_| Some(scheme)).map_err(|error| error.why);
    }
    if !around::keeps(container, &weight.transforms) {
        let why = "a permutation, rotation, diagonal or extra part stands around its codes, which";
        return Err(format!("{why} {} does not keep", container.name()));
    }
    let input = weight.input.as_ref();
    if let Some(outer) = input.and_then(|input| input.outer).filter(|_| !container.facts().input_scales) {
        return Err(format!("its input has a stored scale ({outer:e}), which is not carried over"));
    }
    let plain = |code| Ok(container.facts().one_file.then(|| Scheme::plain(code)));
    match &weight.weight {
        Weight::F32(_) => plain(Code::F32),
        Weight::Bf16(_) => plain(Code::Float(minifloat::BF16)),
        Weight::F16(_) => plain(Code::Float(minifloat::F16)),
        Weight::Quantized(q) => {
            let input = input.map(|input| &input.scheme);
            let only = container.scale_code(dtype);
            recode::target(q, container, &info.module, input, only).map(|(scheme, _)| Some(scheme))
        }
    }
}

/// Returns the reason that the model as a whole cannot be converted.
fn of_the_whole(inputs: &[Option<Scheme>], requantize: Option<&Scheme>) -> Option<String> {
    let differ = requantize.is_none() && inputs.windows(2).any(|pair| pair[0] != pair[1]);
    differ.then(|| "inputs: layers whose inputs are quantized in different ways".to_owned())
}

/// The dtype of the model: what its config says, or that of its embedding.
fn model_dtype(source: &ModelFiles) -> Dtype {
    let field = |name| source.config()?.get(name)?.as_str();
    match field("dtype").or_else(|| field("torch_dtype")) {
        Some("bfloat16") => Dtype::BF16,
        Some("float16") => Dtype::F16,
        Some("float32") => Dtype::F32,
        // In GGUF the type of the embedding is all that says it.
        _ if source.gguf().is_some() => {
            let table = source.gguf().and_then(|model| model.tensor(&format!("{EMBEDDING}.weight")));
            match table.map(|table| table.ty.storage) {
                Some(Storage::Plain(dtype)) => dtype,
                _ => Dtype::F16,
            }
        }
        _ => source.checkpoint().get(&format!("{EMBEDDING}.weight")).map_or(Dtype::F32, |meta| meta.dtype),
    }
}

/// The plan of what was decided.
fn finish(
    source: &ModelFiles,
    config: ModelConfig,
    job: Job,
    container: Container,
    linears: Vec<PlannedLinear>,
    options: Options,
    Kept { activations, kv, by_group, rotations }: Kept,
) -> Result<Plan> {
    if container.facts().experts == Experts::Stacked {
        stacks::require_whole(&linears)?;
    }
    let quantized = output_of_linears(&job, activations.as_ref(), container, &linears, by_group)?;
    let mut notes = source.notes();
    let (copied, dense) = match source.gguf() {
        Some(_) => (Vec::new(), dense::of_gguf(source, &config, container, &linears, &mut notes)?),
        None => {
            let left_out = kv.is_none();
            let dense = match container.facts().experts {
                Experts::Stacked => dense::decoded(source, &config, &linears)?,
                _ => Vec::new(),
            };
            (copied(source, &linears, &dense, left_out, &mut notes), dense)
        }
    };
    let apart = |linear: &PlannedLinear| stack_of(&linear.info).is_some() && !linear.info.is_by_rows(source);
    if matches!(container.facts().experts, Experts::OneByOne | Experts::AsInSource)
        && linears.iter().any(apart)
    {
        notes.push(EXPERTS_APART.to_owned());
    }
    let first = linears.iter().find_map(|linear| linear.scheme.clone());
    let weights = first.unwrap_or_else(|| job.table().cloned().unwrap_or(Scheme::plain(Code::F32)));
    let gguf = match container.facts().one_file {
        true => Some(Layout::new(source, &job, &weights, &config, &linears, &options)?),
        false => None,
    };
    let specs = match &gguf {
        Some(layout) => {
            notes.extend(layout.notes.iter().cloned());
            layout.specs()
        }
        None => {
            let copied =
                copied.iter().map(|m| mantissa_store::TensorSpec::new(&m.name, m.dtype, m.shape.clone()));
            let cached = kv.iter().flat_map(|kv| cache_scales::specs(&config, container, kv));
            copied.chain(dense.iter().map(Dense::spec)).chain(quantized).chain(cached).collect()
        }
    };
    let plan = Plan {
        job,
        weights,
        activations,
        kv,
        kv_levels: None,
        container,
        config,
        linears,
        specs,
        copied,
        notes,
        fallbacks: Default::default(),
        evaluation: None,
        check: Check::default(),
        coverage: None,
        options,
        uses: Vec::new(),
        observer: Observer::default(),
        by_group,
        rotations,
        untied: None,
        dense,
        gguf,
    };
    // What only the layers together cannot be stored as.
    plan.output_config(source)?;
    Ok(plan)
}

/// Tensors that are taken over byte by byte: all but those of the quantized layers and of what is `dense`, their biases excepted.
/// Scales of the KV cache are the container's, or, where it has no place for them, are told as `left_out`.
fn copied(
    source: &ModelFiles,
    linears: &[PlannedLinear],
    dense: &[Dense],
    left_out: bool,
    notes: &mut Vec<String>,
) -> Vec<TensorMeta> {
    let quantized = linears.iter().filter(|l| l.scheme.is_some()).map(|l| l.info.module.as_str());
    let stored: BTreeSet<&str> = quantized.chain(dense.iter().filter_map(Dense::module)).collect();
    let stacks = whole_stacks(linears);
    // The parts of a weight may have dots in their names (`weight.absmax`).
    let of_layer = |name: &str| {
        let dots = name.match_indices('.').map(|(at, _)| &name[..at]);
        // The bias of the layer stays; `weight.bias` is a part of the weight.
        dots.into_iter().any(|module| stored.contains(module) && name[module.len()..] != *".bias")
    };
    const SCALES: [&str; 3] = ["k_scale", "v_scale", "q_scale"];
    let cache = |name: &str| {
        let last = name.rsplit('.').next().unwrap_or_default();
        SCALES.contains(&last) || levels::SUFFIXES.contains(&last)
    };
    let mut copied: Vec<_> = Vec::new();
    let mut scales = 0;
    for meta in source.checkpoint().tensors() {
        if of_layer(&meta.name) || stacks.contains(&meta.name) {
            continue;
        }
        if cache(&meta.name) {
            scales += 1;
        } else {
            copied.push(meta.clone());
        }
    }
    if left_out && scales > 0 {
        notes.push(format!("{scales} scales or levels of the KV cache are left out"));
    }
    copied.sort_by(|a: &TensorMeta, b| a.name.cmp(&b.name));
    copied
}

/// Names that the source may have for stacked tensors of which every layer is quantized, dense or in MXFP4.
fn whole_stacks(linears: &[PlannedLinear]) -> BTreeSet<String> {
    let mut missing: BTreeMap<&str, usize> = BTreeMap::new();
    for stack in linears.iter().filter(|l| l.scheme.is_some()).filter_map(|l| stack_of(&l.info)) {
        let left = missing.entry(&stack.tensor).or_insert(stack.experts * stack.turns);
        *left = left.saturating_sub(1);
    }
    let whole = missing.into_iter().filter(|(_, left)| *left == 0).map(|(tensor, _)| tensor);
    whole.flat_map(|tensor| std::iter::once(tensor.to_owned()).chain(gpt_oss::names(tensor))).collect()
}

/// A layer decoded and rounded to nearest under `scheme`. `outer` is the tensor-wide scale that it shares with fused partners.
pub(crate) fn rounded(
    plan: &Plan,
    source: &ModelFiles,
    info: &LinearInfo,
    scheme: &Scheme,
    outer: Option<f32>,
) -> Result<Solved> {
    let tensor = |error| QuantError::Tensor { path: source.dir().into(), tensor: info.module.clone(), error };
    let weight = weight_of(source, info)?;
    let values = values_of(info, weight)?;
    let (rows, cols) = (info.rows, info.cols);
    if let Some(codec) = plan.blocks_of_ternary(scheme) {
        return gguf::quantize_ternary(codec, &values, rows, cols, plan.threads()).map_err(tensor);
    }
    let rounded = rtn::quantize(scheme, &values, rows, cols, outer, plan.threads());
    rounded.map(Solved::rounded).map_err(tensor)
}

/// A layer with its codes and scales in `scheme`, which holds them without loss.
pub(crate) fn layer(
    plan: &Plan,
    source: &ModelFiles,
    info: &LinearInfo,
    scheme: &Scheme,
    drops_inputs: bool,
) -> Result<Solved> {
    let weight = weight_of(source, info)?;
    let input_scale = weight.input.as_ref().and_then(|input| input.outer).filter(|_| !drops_inputs);
    let quantized = match weight.weight {
        Weight::Quantized(q) => recode::recode(&q, &scheme.format),
        dense => dense::plain(dense, scheme, info.rows, info.cols),
    };
    let refuse = |why| {
        let refused = Refused::layers(vec![format!("{}: {why}", info.module)]);
        QuantError::not_lossless(plan.container, plan.linears.len(), &refused)
    };
    let mut quantized = quantized.map_err(refuse)?;
    let mut g_idx = None;
    if let Some(order) = group_order(&weight.transforms) {
        let (own, groups) = gptq_files::in_own_order(&quantized, order);
        (quantized, g_idx) = (own, Some(groups));
    }
    Ok(Solved { g_idx, input_scale, ..Solved::rounded((quantized, ErrorStats::default())) })
}

/// The greatest magnitude of a layer's weight, for a scale that it shares with others.
pub(crate) fn amax(source: &ModelFiles, info: &LinearInfo) -> Result<f32> {
    let weight = weight_of(source, info)?;
    Ok(values_of(info, weight)?.iter().fold(0f32, |amax, v| amax.max(v.abs())))
}
