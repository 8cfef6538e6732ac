//! Conversion: stores the codes and scales of a quantized model in another format.
//!
//! Each weight is recoded to the first format that the container holds without loss ([`recode`]). Layers without such a
//! format are refused with the reason before anything is written. Before the output is put in place, every layer is
//! read back and compared with the source ([`prove`]). It must be equal bit for bit. Only a global scale that one
//! format stores as the reciprocal may differ by one unit in the last place. With a scheme to requantize to, weights
//! are decoded and quantized by RTN instead, and the added error is reported.

mod dense;
mod proof;
mod recode;

mod tables;
mod transforms;

use std::collections::{BTreeMap, BTreeSet};

use mantissa_model::{LinearInfo, LinearKind, ModelConfig, Tokenizer, load_config};
use mantissa_num::stored::Transforms;
use mantissa_num::{Code, Scheme, minifloat};
use mantissa_store::convention::gguf::{Architecture, Moved};
use mantissa_store::convention::{
    ActivationQuant, Container, Experts, LayerKind, LinearPlan, LinearWeight, ModelFiles, Weight,
    gguf as gguf_files, gpt_oss, gptq as gptq_files, levels,
};
use mantissa_store::gguf::Storage;
use mantissa_store::{Dtype, TensorMeta};

use crate::cache_scales;
use crate::dense_source::dequantizing_bytes;
use crate::error::{QuantError, Refused, Result};
use crate::error_stats::ErrorStats;
use crate::gguf;
use crate::load::loadable;
use crate::plan::alternative;
use crate::plan::{Dense, Layout, Options, Plan, PlannedLinear, WeightJob};
use crate::range;
use crate::row_order::order_of;
use crate::rtn;
use crate::sidecars::note_on_tokenizer;
use crate::stacks::{self, only_fused, stack_of};
use crate::unused;
use mantissa_methods::Solved;

use crate::tensors::{EXPERTS_APART, output_of_linears, output_specs};

use crate::values::{values_of, weight_of};

use transforms::group_order;

pub(crate) use proof::prove;

/// Changes of a conversion besides the format.
#[derive(Clone, Copy, Debug, Default)]
pub struct Changes<'a> {
    /// Scheme to decode and quantize weights to by RTN.
    pub requantize: Option<&'a Scheme>,
    /// True if inputs are no longer quantized at run time.
    pub drop_inputs: bool,
}

impl Plan {
    /// Plans the conversion of `source` to `container`: without loss, or by RTN to the scheme of `changes`. Reads every
    /// weight to decide.
    ///
    /// # Errors
    /// [`QuantError::NotLossless`] with the layers that the container cannot hold and the reasons;
    /// [`QuantError::NothingToConvert`]; an incomplete source, with what is missing; a file that cannot be read.
    pub fn conversion(
        source: &ModelFiles,
        container: Container,
        changes: Changes<'_>,
        options: Options,
    ) -> Result<Self> {
        let Changes { requantize, drop_inputs } = changes;
        let config = load_config(source)?;
        if source.convention_name() == container.name() && requantize.is_none() {
            return Err(QuantError::NothingToConvert {
                path: source.dir().into(),
                container: container.name(),
            });
        }
        if container.facts().experts == Experts::Stacked {
            stacks::require(&config)?;
        }
        // An incomplete source would give an incomplete output.
        loadable(source)?;
        let dtype = model_dtype(source, &config);
        let Decisions { linears, inputs, by_group, rotations, mut refused } =
            Decisions::new(source, &config, container, changes, dtype)?;
        let other = requantize.is_none().then(|| alternative::scheme(source, &config, container, dtype));
        let other = other.flatten();
        let before = refused.whole.len();
        let tables =
            tables::planned(source, &config, container, requantize, dtype, &mut refused, other.as_deref())?;
        let refuses_tables = refused.whole.len() > before;
        let kv = cache_quantization(source, &config, container, requantize, &mut refused)?;
        if refused.is_empty() && linears.iter().all(|linear| linear.scheme.is_none()) {
            let scheme = alternative::scheme(source, &config, container, dtype);
            let (model, format) = (source.dir().display(), container.name());
            let fix = scheme.map(|scheme| {
                format!("; fix: mantissa quantize {model} --recipe rtn-{scheme} --format {format}")
            });
            refused.whole.push(format!("no layer is quantized{}", fix.unwrap_or_default()));
            return Err(QuantError::not_lossless(container, linears.len(), &refused));
        }
        if !refused.is_empty() {
            let total = layers_to_convert(source, &config, container).len();
            let error = QuantError::not_lossless(container, total, &refused);
            return Err(match requantize {
                Some(_) => error.of_requantization(true),
                // The reason of a table has its own fix.
                None if refuses_tables => error,
                None => error.with_scheme(other),
            });
        }
        // The first layer's inputs stand for the model's; layers with others are listed.
        let inputs = if requantize.is_none() { inputs } else { Vec::new() };
        let activations = inputs.first().and_then(|(_, input)| input.clone());
        let inputs = inputs.into_iter().filter(|(_, input)| *input != activations).collect();
        let table = Scheme::plain(match dtype {
            Dtype::BF16 => Code::Float(minifloat::BF16),
            Dtype::F16 => Code::Float(minifloat::F16),
            _ => Code::F32,
        });
        let job = match requantize {
            Some(scheme) => WeightJob::Requantize { scheme: scheme.clone(), table },
            None => WeightJob::Convert { drops_inputs: drop_inputs, table },
        };
        let inherited = Inherited { activations, inputs, kv, by_group, rotations };
        finish(source, config, job, container, (linears, tables), options, inherited)
    }
}

/// Properties that the output inherits from the source.
struct Inherited {
    /// Scheme of inputs.
    activations: Option<Scheme>,
    /// Schemes of inputs that differ from it, by module.
    inputs: BTreeMap<String, Option<Scheme>>,
    /// Scheme of keys and values.
    kv: Option<Scheme>,
    /// True if groups of some layer have columns that are not adjacent.
    by_group: bool,
    /// Modules with rotated inputs, and the orders of the matrices.
    rotations: Vec<(String, usize)>,
}

/// Decisions about the layers of a model.
#[derive(Default)]
struct Decisions {
    linears: Vec<PlannedLinear>,
    /// Module and input scheme of each quantized layer of the output.
    inputs: Vec<(String, Option<Scheme>)>,
    /// True if groups of some layer have columns that are not adjacent.
    by_group: bool,
    /// Modules with rotated inputs, and the orders of the matrices.
    rotations: Vec<(String, usize)>,
    /// Refused parts with reasons.
    refused: Refused,
}

impl Decisions {
    fn new(
        source: &ModelFiles,
        config: &ModelConfig,
        container: Container,
        changes: Changes<'_>,
        dtype: Dtype,
    ) -> Result<Self> {
        let Changes { requantize, drop_inputs } = changes;
        let row = Architecture::of_model_type(config.architecture.name, config.experts.is_some());
        let columns = row.filter(|_| container.is_one_file()).map(|row| order_of(row, config));
        let mut all = Decisions::default();
        for info in layers_to_convert(source, config, container) {
            let moves = columns.and_then(|order| order.columns(&format!("{}.weight", info.module)));
            let mut weight = unblocked(source, &info)?;
            weight.input = weight.input.filter(|_| !drop_inputs);
            if let Some(why) = keeps_dense(&info, container) {
                match requantize.is_none() && (is_quantized(&weight) || !weight.transforms.is_empty()) {
                    true => all.refused.layers.push((info.module.clone(), why.to_owned())),
                    false => all.linears.push(PlannedLinear { info, scheme: None }),
                }
                continue;
            }
            let decided = decide(&info, &weight, container, requantize, dtype);
            match decided.and_then(|scheme| movable(scheme, moves, info.cols, requantize.is_none())) {
                Ok(scheme) => {
                    if requantize.is_none() {
                        all.by_group |= group_order(&weight.transforms).is_some();
                        let rotated = transforms::rotation(&weight.transforms);
                        all.rotations.extend(rotated.map(|order| (info.module.clone(), order)));
                    }
                    if scheme.is_some() {
                        all.inputs.push((info.module.clone(), weight.input.map(|input| input.scheme)));
                    }
                    all.linears.push(PlannedLinear { info, scheme });
                }
                Err(why) => {
                    // Some reasons already start with the module.
                    let name = format!("{}: ", info.module);
                    let why = why.strip_prefix(&name).unwrap_or(&why).to_owned();
                    all.refused.layers.push((info.module.clone(), why));
                }
            }
        }
        Ok(all)
    }
}

/// Returns the scheme of keys and values in the new format. If the format cannot hold it, requantizing leaves it out
/// and a conversion is refused.
fn cache_quantization(
    source: &ModelFiles,
    config: &ModelConfig,
    container: Container,
    requantize: Option<&Scheme>,
    refused: &mut Refused,
) -> Result<Option<Scheme>> {
    if let Some(policy) = source.kv_policy().filter(|_| requantize.is_none()) {
        refused.whole.push(format!("KV cache: only the native format holds the levels of {policy}"));
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

/// Returns the layers to convert: those stored separately, and experts stacked in MXFP4. Formats that describe every
/// layer get all.
fn layers_to_convert(source: &ModelFiles, config: &ModelConfig, container: Container) -> Vec<LinearInfo> {
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

/// Returns the reason why a format always keeps a layer unquantized.
fn keeps_dense(info: &LinearInfo, container: Container) -> Option<&'static str> {
    let kind = LayerKind { latent_kv: info.kind == LinearKind::KvB, expert: stack_of(info).is_some() };
    container.keeps_dense(kind)
}

/// Reads the weight of a layer. One of a GGUF file whose blocks hold columns that belong apart is dequantized: no other
/// format has such blocks.
fn unblocked(source: &ModelFiles, info: &LinearInfo) -> Result<LinearWeight> {
    let weight = weight_of(source, info)?;
    if source.gguf().is_none() || group_order(&weight.transforms).is_none() {
        return Ok(weight);
    }
    let (rows, cols, input) = (weight.rows, weight.cols, weight.input.clone());
    let weight = Weight::F32(values_of(info, weight)?);
    Ok(LinearWeight { rows, cols, weight, bias: None, input, transforms: Transforms::default() })
}

/// Returns the scheme if columns that move do so as whole blocks of it, or if the weight is quantized again.
fn movable(
    scheme: Option<Scheme>,
    moves: Option<Moved>,
    cols: usize,
    keeps_codes: bool,
) -> std::result::Result<Option<Scheme>, String> {
    let block =
        scheme.as_ref().and_then(|scheme| gguf_files::block_type(&scheme.format)).map(|ty| ty.block().0);
    match (moves, block) {
        (Some(columns), Some(block)) if keeps_codes && !columns.moves_whole(cols, block) => {
            Err(format!("its columns have another order in GGUF, which blocks of {block} do not follow"))
        }
        _ => Ok(scheme),
    }
}

fn is_quantized(weight: &LinearWeight) -> bool {
    matches!(weight.weight, Weight::Quantized(_))
}

/// Returns the scheme under which the container holds a layer without loss; `None` leaves it dense.
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
    if !transforms::holds(container, &weight.transforms) {
        return Err(format!(
            "{} does not hold its permutation, rotation, diagonal or side tensors (outliers)",
            container.name()
        ));
    }
    let input = weight.input.as_ref();
    if let Some(outer) = input.and_then(|input| input.outer).filter(|_| !container.facts().input_scales) {
        return Err(format!("the format does not store its input scale ({outer:e})"));
    }
    let plain = |code| Ok(container.is_one_file().then(|| Scheme::plain(code)));
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

/// Returns the dtype of the model: from its config, or from its embedding.
fn model_dtype(source: &ModelFiles, config: &ModelConfig) -> Dtype {
    let field = |name| source.config()?.get(name)?.as_str();
    let embedding = format!("{}.weight", config.embedding_module());
    match field("dtype").or_else(|| field("torch_dtype")) {
        Some("bfloat16") => Dtype::BF16,
        Some("float16") => Dtype::F16,
        Some("float32") => Dtype::F32,
        // GGUF metadata have no dtype, so the embedding decides.
        _ if source.gguf().is_some() => {
            let table = source.gguf().and_then(|model| model.tensor(&embedding));
            match table.map(|table| table.ty.storage) {
                Some(Storage::Plain(dtype)) => dtype,
                _ => Dtype::F16,
            }
        }
        _ => source.checkpoint().get(&embedding).map_or(Dtype::F32, |meta| meta.dtype),
    }
}

/// Returns a note on experts that the source stacks and the output stores one by one.
fn note_on_experts(source: &ModelFiles, container: Container, linears: &[PlannedLinear]) -> Option<String> {
    let apart = |linear: &PlannedLinear| only_fused(&linear.info) && !linear.info.is_by_rows(source);
    let one_by_one = matches!(container.facts().experts, Experts::OneByOne | Experts::AsInSource);
    (one_by_one && linears.iter().any(apart)).then(|| EXPERTS_APART.to_owned())
}

/// Completes the plan of a conversion of linear layers, and of embedding and head as far as their codes are kept.
fn finish(
    source: &ModelFiles,
    config: ModelConfig,
    job: WeightJob,
    container: Container,
    (linears, tables): (Vec<PlannedLinear>, Vec<PlannedLinear>),
    options: Options,
    Inherited { activations, inputs, kv, by_group, rotations }: Inherited,
) -> Result<Plan> {
    if container.facts().experts == Experts::Stacked {
        stacks::require_whole(&linears)?;
    }
    let quantized = output_of_linears(
        &job,
        |info| inputs.get(&info.module).map_or(activations.as_ref(), Option::as_ref),
        container,
        &linears,
        by_group,
    )?;
    let mut notes = source.notes();
    let coded: Vec<PlannedLinear> = linears.iter().chain(&tables).cloned().collect();
    let dense = match (source.gguf(), container.facts().experts) {
        (Some(_), _) => dense::of_gguf(source, &config, container, &coded)?,
        (None, Experts::Stacked) => dense::decoded(source, &config, &linears)?,
        (None, _) => Vec::new(),
    };
    let copied = match source.gguf() {
        Some(_) => Vec::new(),
        None => copied(source, &coded, &dense, kv.is_none(), &mut notes),
    };
    notes.extend(note_on_experts(source, container, &linears));
    notes.extend(note_on_tokenizer(source, container));
    let first = linears.iter().find_map(|linear| linear.scheme.clone());
    let weights = first.unwrap_or_else(|| job.table().cloned().unwrap_or(Scheme::plain(Code::F32)));
    let layout = || Layout::new(source, &job, &weights, &config, &coded, &options);
    let gguf = container.is_one_file().then(layout).transpose()?;
    notes.extend(gguf.iter().flat_map(|layout| layout.notes.iter().cloned()));
    let cached = kv.iter().flat_map(|kv| cache_scales::specs(&config, container, kv));
    let of_tables = if gguf.is_none() { tables::specs(container, &tables) } else { Vec::new() };
    let own = dense.iter().map(Dense::spec).chain(quantized).chain(of_tables).chain(cached);
    let specs = output_specs(gguf.as_ref(), &copied, own);
    let modules = unused::tensors(source, &config).filter_map(unused::linear_module);
    let unused = modules.map(str::to_owned).collect();
    let plan = Plan {
        dequantizing: dequantizing_bytes(source),
        tokenizer: Tokenizer::bytes_to_load(source.dir()),
        activations,
        inputs,
        kv,
        specs,
        tables,
        copied,
        notes,
        by_group,
        rotations,
        dense,
        gguf,
        unused,
        ..Plan::begun(job, weights, container, config, linears, options)
    };
    // Some combinations of layers cannot be described although each layer can be stored.
    plan.output_config(source)?;
    Ok(plan)
}

/// Returns the tensors that are copied byte by byte: all but the tensors of quantized and `dense` layers, except their
/// biases. Scales of the KV cache are written by the container or, if it cannot hold them, noted as `left_out`.
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
    // Names of a weight's tensors may have more dots (`weight.absmax`).
    let of_layer = |name: &str| {
        let dots = name.match_indices('.').map(|(at, _)| &name[..at]);
        // The layer's bias is copied; `weight.bias` belongs to the weight.
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

/// Returns the source's possible names of stacked tensors whose layers are all quantized, dense or MXFP4.
fn whole_stacks(linears: &[PlannedLinear]) -> BTreeSet<String> {
    let mut missing: BTreeMap<&str, usize> = BTreeMap::new();
    for stack in linears.iter().filter(|l| l.scheme.is_some()).filter_map(|l| stack_of(&l.info)) {
        let left = missing.entry(&stack.tensor).or_insert(stack.experts * stack.turns);
        *left = left.saturating_sub(1);
    }
    let whole = missing.into_iter().filter(|(_, left)| *left == 0).map(|(tensor, _)| tensor);
    whole.flat_map(|tensor| std::iter::once(tensor.to_owned()).chain(gpt_oss::names(tensor))).collect()
}

/// Decodes a layer and quantizes it by RTN to `scheme`. `outer` is the tensor-wide scale that it shares with fused
/// layers.
pub(crate) fn requantized(
    plan: &Plan,
    source: &ModelFiles,
    info: &LinearInfo,
    scheme: &Scheme,
    outer: Option<f32>,
) -> Result<Solved> {
    let tensor = |error| QuantError::Tensor { path: source.dir().into(), tensor: info.module.clone(), error };
    let weight = weight_of(source, info)?;
    let mut values = values_of(info, weight)?;
    let (rows, cols) = (info.rows, info.cols);
    if let Some(columns) = plan.columns_of(info) {
        values = columns.columns_to_gguf(&values, cols);
    }
    if let Some(codec) = plan.blocks_of_ternary(scheme) {
        return gguf::quantize_ternary(codec, &values, rows, cols, plan.threads()).map_err(tensor);
    }
    let rounded = rtn::quantize(scheme, &values, rows, cols, outer, plan.threads()).and_then(|rounded| {
        range::check(scheme, &values[..], (rows, cols), &rounded.1, plan.threads())?;
        Ok(Solved::rounded(rounded))
    });
    rounded.map_err(tensor)
}

/// Recodes a layer to `scheme`, which holds its codes and scales without loss.
pub(crate) fn recoded(
    plan: &Plan,
    source: &ModelFiles,
    info: &LinearInfo,
    scheme: &Scheme,
    drops_inputs: bool,
) -> Result<Solved> {
    let weight = unblocked(source, info)?;
    let input_scale = weight.input.as_ref().and_then(ActivationQuant::stored).filter(|_| !drops_inputs);
    let quantized = match weight.weight {
        Weight::Quantized(q) => recode::recode(&q, &scheme.format),
        dense => dense::plain(dense, scheme, info.rows, info.cols),
    };
    let refuse = |why: String| {
        let refused = Refused::layers(vec![(info.module.clone(), why)]);
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

/// Returns the amax of a layer's weight, for a scale that fused layers share.
pub(crate) fn amax(source: &ModelFiles, info: &LinearInfo) -> Result<f32> {
    let weight = weight_of(source, info)?;
    Ok(values_of(info, weight)?.iter().fold(0f32, |amax, v| amax.max(v.abs())))
}
