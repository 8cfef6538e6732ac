//! What a quantization will do, decided before any work: schemes of all layers, tensors of the output, memory.

pub(crate) mod calibration;
mod job;
mod output;
mod report;
mod texts;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use mantissa_methods::method::Fisher;
use mantissa_model::graph::{EMBEDDING, HEAD};
use mantissa_model::{KvPolicy, LinearInfo, ModelConfig, Products, StoredAs};
use mantissa_num::{Blocks, Rounding, Scheme};
use mantissa_store::convention::{Container, Experts, LinearPlan, ModelFiles, Support, native};
use mantissa_store::{DEFAULT_SHARD_BYTES, TensorMeta, TensorSpec};
use mantissa_train::LayerTrainer;

use crate::cache_scales;
use crate::calibrate::CalibrationSet;
use crate::config::model_config;
use crate::convert::Dense;
use crate::coverage::report::Coverage;
use crate::error::{QuantError, Refused, Result};
use crate::gguf;
use crate::importance::Importance;
use crate::input_scales::Observer;
use crate::memory;
use crate::quality::figures::Evaluation;
use crate::recipe::{Part, Recipe};
use crate::rotate;
use crate::stacks;
use crate::verify::loadable;

pub use job::Job;
pub(crate) use texts::Use;

/// How a run is to be done; nothing here changes what a scheme means.
#[derive(Clone, Debug)]
pub struct Options {
    /// Threads.
    pub threads: usize,
    /// Container, instead of the recipe's.
    pub container: Option<Container>,
    /// Largest weight file of a folder.
    pub max_shard_bytes: u64,
    /// Most bytes of tensors in a GGUF file; `None` for one file, whatever its size.
    pub max_gguf_bytes: Option<u64>,
    /// How values become codes.
    pub rounding: Rounding,
    /// What a method that needs it calibrates on, and what importance is found on.
    pub calibration: Option<CalibrationSet>,
    /// Windows of the calibration that methods do not see: what they make of a layer is held against rounding to nearest on them.
    pub held_out: Vec<Vec<u32>>,
    /// What the factors of products are rounded to while windows go through the model to be solved on.
    pub products: Products,
    /// What searched blocks are weighed by.
    pub importance: Option<Importance>,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            threads: mantissa_kernels::available_threads(),
            container: None,
            max_shard_bytes: DEFAULT_SHARD_BYTES,
            max_gguf_bytes: None,
            rounding: Rounding::NearestEven,
            calibration: None,
            held_out: Vec::new(),
            products: Products::F32,
            importance: None,
        }
    }
}

/// A linear layer and what becomes of it.
#[derive(Clone, Debug)]
pub struct PlannedLinear {
    /// The layer.
    pub info: LinearInfo,
    /// Its scheme, as it will be stored; `None` leaves it as it is.
    pub scheme: Option<Scheme>,
}

/// Check of a finished output before it is put in place.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Check {
    /// Opens it as every command does.
    #[default]
    Load,
    /// Verifies it with the independent reader as well, against the dense model at this path where one is given.
    Verify(Option<PathBuf>),
}

impl Options {
    /// Whether searched blocks will be weighed by importance.
    pub(crate) fn has_importance(&self) -> bool {
        self.importance.is_some() || self.calibration.is_some()
    }
}

/// Everything that a run will do.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Work that makes the stored weights.
    pub job: Job,
    /// Scheme of linear weights to which no exception applies.
    pub weights: Scheme,
    /// Scheme of the inputs of linear layers at run time.
    pub activations: Option<Scheme>,
    /// Scheme of keys and values in the cache.
    pub kv: Option<Scheme>,
    /// Policy of keys and values stored under levels of the calibration text.
    pub kv_levels: Option<KvPolicy>,
    /// The container.
    pub container: Container,
    /// The model.
    pub config: ModelConfig,
    /// Its linear layers, in the order of the forward pass.
    pub linears: Vec<PlannedLinear>,
    /// Tensors of the output, in order.
    pub specs: Vec<TensorSpec>,
    /// Tensors taken over as they are.
    pub copied: Vec<TensorMeta>,
    /// What the user should know.
    pub notes: Vec<String>,
    /// Why layers are not stored as the recipe asks, by module.
    pub fallbacks: BTreeMap<String, String>,
    /// What the output is evaluated on before it is put in place.
    pub evaluation: Option<Evaluation>,
    /// Check of the finished output before it is put in place.
    pub check: Check,
    /// What the calibration shows of the model, where that was found.
    pub coverage: Option<Coverage>,
    pub(crate) options: Options,
    /// Uses of the calibration text, whether there is one or not.
    pub(crate) uses: Vec<Use>,
    /// Observer of inputs whose scales are stored.
    pub(crate) observer: Observer,
    /// True if groups of some layer may be of columns that are not adjacent.
    pub(crate) by_group: bool,
    /// Modules whose inputs are rotated as the model runs, and the orders of the matrices.
    pub(crate) rotations: Vec<(String, usize)>,
    /// The head that the output has and the source has not, and the embedding that it begins as.
    pub(crate) untied: Option<(String, String)>,
    /// Unquantized tensors that are not copied byte by byte.
    pub(crate) dense: Vec<Dense>,
    /// The rest of a GGUF file; `None` for a folder.
    pub(crate) gguf: Option<gguf::Layout>,
}

impl Plan {
    /// Decides what `recipe` does to `source`.
    ///
    /// # Errors
    /// [`QuantError::AlreadyQuantized`]; [`QuantError::NoCalibration`], [`QuantError::Calibrate`] and
    /// [`QuantError::Method`] where the method or what it is to calibrate on does not fit; [`QuantError::NotStorable`] with the layers that the container cannot hold;
    /// [`QuantError::NothingToDo`]; a source that could not be run, with the tensor or the file that it lacks.
    pub fn new(source: &ModelFiles, recipe: Recipe, options: Options) -> Result<Self> {
        if source.is_quantized() || source.gguf().is_some() {
            let (path, convention) = (source.dir().to_owned(), source.convention_name());
            return Err(QuantError::AlreadyQuantized { path, convention });
        }
        let config = model_config(source)?;
        let container = options.container.unwrap_or_else(|| recipe.container());
        let mut linears: Vec<_> = config
            .decoder_linears()
            .map(|info| planned(source, &recipe, &config, container, &options, info))
            .collect::<Result<_>>()?;
        if container.facts().experts == Experts::Stacked {
            stacks::require(&config)?;
            stacks::keep_others(&mut linears)?;
        }
        if linears.iter().all(|linear| linear.scheme.is_none()) {
            return Err(QuantError::NothingToDo { recipe: recipe.name });
        }
        let fallbacks =
            if container.facts().one_file { gguf::fall_back(&config, &mut linears) } else { Vec::new() };
        let job = Job::Quantize(Box::new(recipe.clone()));
        let input = recipe.activations.as_ref();
        let quantized = output_of_linears(&job, input, container, &linears, recipe.method.follows_order())?;
        let asked = calibration::Asked {
            source,
            recipe: &recipe,
            container,
            config: &config,
            linears: &linears,
            options: &options,
        };
        let calibrating = asked.notes()?;
        let cached = cache_scales::planned(source, &recipe, container, &config, &options)?;
        let copied = copied_tensors(source, &linears);
        let mut notes = notes(source, &recipe, container, &config, &copied);
        notes.extend(fallbacks.iter().map(|(module, why)| format!("{module}: {why}")));
        notes.extend(calibrating);
        if let Support::OnRequest(note) = container.facts().group_order
            && recipe.method.follows_order()
        {
            notes.push(note.to_owned());
        }
        let fallbacks = fallbacks.into_iter().collect();
        let gguf = match container.facts().one_file {
            true => Some(gguf::Layout::new(source, &job, &recipe.weights, &config, &linears, &options)?),
            false => None,
        };
        let mut specs: Vec<_> = match &gguf {
            Some(layout) => {
                notes.extend(layout.notes.iter().cloned());
                layout.specs()
            }
            None => {
                let copied = copied.iter().map(|m| TensorSpec::new(&m.name, m.dtype, m.shape.clone()));
                copied.chain(quantized).chain(cached).collect()
            }
        };
        let rotation = recipe.transform.as_ref().and_then(|transform| transform.rotation());
        let untied = rotation.filter(|options| rotate::unties(&config, *options));
        let untied = untied.map(|_| [config.head_module().to_owned(), config.embedding_module()]);
        let untied =
            untied.map(|[head, embedding]| (format!("{head}.weight"), format!("{embedding}.weight")));
        if let Some((head, embedding)) = &untied
            && let Some(meta) = source.checkpoint().get(embedding)
            && !source.has(head)
        {
            specs.push(TensorSpec::new(head, meta.dtype, meta.shape.clone()));
        }
        let rotated = rotation.map(|options| rotate::rotated_inputs(&config, options));
        let rotated = rotated.into_iter().flatten().map(|(info, matrix)| (info.module, matrix.order()));
        let plan = Plan {
            uses: Use::all(&recipe, container, &linears, &options),
            by_group: recipe.method.follows_order(),
            rotations: rotated.collect(),
            untied,
            dense: Vec::new(),
            observer: recipe.observer,
            weights: recipe.weights,
            activations: recipe.activations,
            kv: recipe.kv,
            kv_levels: recipe.kv_levels,
            job,
            container,
            config,
            linears,
            specs,
            copied,
            notes,
            fallbacks,
            evaluation: None,
            check: Check::default(),
            coverage: None,
            options,
            gguf,
        };
        // What only the layers together cannot be stored as.
        plan.output_config(source)?;
        // What the source lacks, the output would lack.
        loadable(source)?;
        Ok(plan)
    }

    /// Threads that a run may use.
    pub(crate) fn threads(&self) -> usize {
        self.options.threads
    }

    /// True if errors of the outputs of linear layers are weighed by the Fisher information, which takes a backward through the model.
    pub(crate) fn weighs_outputs(&self) -> bool {
        let asked = self.job.needs().fisher == Some(Fisher::Outputs);
        asked && LayerTrainer::check(&self.config).is_ok()
    }

    /// True if the output holds scales or levels of keys and values.
    pub(crate) fn stores_cache_scales(&self) -> bool {
        cache_scales::stores(self.kv.as_ref(), self.kv_levels.as_ref())
    }

    /// Scheme or policy of keys and values, as reports name it.
    pub(crate) fn cache(&self) -> Option<String> {
        let levels = self.kv_levels.as_ref().map(ToString::to_string);
        self.kv.as_ref().map(ToString::to_string).or(levels)
    }

    /// The layers that are quantized, with their schemes.
    pub fn quantized(&self) -> impl Iterator<Item = (&LinearInfo, &Scheme)> {
        self.linears.iter().filter_map(|linear| Some((&linear.info, linear.scheme.as_ref()?)))
    }

    /// Bits per weight of the quantized linear layers by their schemes: codes, scales and zero points, these as wide as codes.
    pub fn linear_bits_per_weight(&self) -> f64 {
        self.linear_bits() as f64 / self.linear_weights().max(1) as f64
    }

    /// Bits of the quantized linear layers: codes, scales, zero points and outliers.
    pub fn linear_bits(&self) -> u64 {
        self.quantized().map(|(info, scheme)| self.bits(info, scheme)).sum()
    }

    /// Bits of a layer.
    pub(crate) fn bits(&self, info: &LinearInfo, scheme: &Scheme) -> u64 {
        let (rows, cols) = (info.rows, info.cols);
        scheme.format.total_bits(rows, cols) + native::outlier_bits(rows, cols, self.job.outliers(rows, cols))
    }

    /// Bits per weight of the quantized linear layers as the container stores them: the bytes of all their tensors. Above
    /// [`linear_bits_per_weight`](Self::linear_bits_per_weight) where a container has wider zero points than codes, zero points of
    /// symmetric codes, the group of each column, or shapes.
    pub fn linear_stored_bits_per_weight(&self) -> f64 {
        let stored: u64 = self.quantized().map(|(info, scheme)| self.stored_bits(info, scheme)).sum();
        stored as f64 / self.linear_weights().max(1) as f64
    }

    /// Bits of all tensors of a layer in the container.
    pub(crate) fn stored_bits(&self, info: &LinearInfo, scheme: &Scheme) -> u64 {
        // Blocks are all that there is in GGUF, whatever tensor they are part of.
        if self.container.facts().one_file {
            return self.bits(info, scheme);
        }
        let specs = self.container.specs(&self.linear_plan(info, scheme));
        // A plan has none but layers that can be stored.
        specs.map_or_else(|_| self.bits(info, scheme), |specs| 8 * specs.iter().map(spec_bytes).sum::<u64>())
    }

    /// Weights of the quantized linear layers.
    pub fn linear_weights(&self) -> u64 {
        self.quantized().map(|(info, _)| (info.rows * info.cols) as u64).sum()
    }

    /// Bytes of all tensors of the output.
    pub fn output_bytes(&self) -> u64 {
        self.specs.iter().map(spec_bytes).sum()
    }

    /// Bytes of the source that a run reads, the measure of its progress.
    pub fn work_bytes(&self) -> u64 {
        self.quantized().map(|(info, _)| work_of(info)).sum::<u64>()
            + self.copied.iter().map(|m| m.len).sum::<u64>()
    }

    /// Predicted peak of anonymous memory; `verified` says that the output is read back. See [`crate::memory`].
    pub fn peak_bytes(&self, verified: bool) -> u64 {
        memory::peak_stage(self, verified).bytes()
    }

    pub(crate) fn linear_plan<'a>(&'a self, info: &'a LinearInfo, scheme: &'a Scheme) -> LinearPlan<'a> {
        layer_plan(&self.job, self.activations.as_ref(), info, scheme, self.by_group)
    }
}

fn planned(
    source: &ModelFiles,
    recipe: &Recipe,
    config: &ModelConfig,
    container: Container,
    options: &Options,
    info: LinearInfo,
) -> Result<PlannedLinear> {
    let (name, shape) = info.dense_tensor();
    let no_tensor =
        || mantissa_store::Error::NoTensor { path: source.dir().to_owned(), tensor: name.clone() };
    let meta = source.checkpoint().get(&name).ok_or_else(no_tensor)?;
    if meta.shape != shape {
        let what = (format!("shape {:?}", meta.shape), format!("{shape:?}"));
        return Err(mantissa_store::Error::field(
            source.dir(),
            &name,
            what.0,
            what.1,
            "config.json and weights differ",
        )
        .into());
    }
    let scheme = scheme_of(recipe, config, options, &info).map(|mut scheme| {
        scheme.encoder.rounding = options.rounding;
        recipe.method.stored_scheme(container.as_stored(scheme, meta.dtype))
    });
    Ok(PlannedLinear { info, scheme })
}

/// The scheme that a recipe has for a layer: a rule goes before a file type.
pub(crate) fn scheme_of(
    recipe: &Recipe,
    config: &ModelConfig,
    options: &Options,
    info: &LinearInfo,
) -> Option<Scheme> {
    let of_type = recipe.file_type.filter(|_| recipe.rule_of(&info.module).is_none()).map(|ty| {
        let part = Part::Linear { kind: info.kind, layer: info.layer };
        Scheme::codec(ty.choose(config, part, options.has_importance()))
    });
    of_type.or_else(|| recipe.weights_of(&info.module).cloned())
}

pub(crate) fn output_of_linears(
    job: &Job,
    input: Option<&Scheme>,
    container: Container,
    linears: &[PlannedLinear],
    by_group: bool,
) -> Result<Vec<TensorSpec>> {
    let (mut specs, mut faults) = (Vec::new(), Vec::new());
    for PlannedLinear { info, scheme } in linears {
        let Some(scheme) = scheme else { continue };
        match container.specs(&layer_plan(job, input, info, scheme, by_group)) {
            // A graph names the weights of a model as its dense checkpoint does.
            Ok(_) if container.facts().experts == Experts::AsInSource && stacks::stack_of(info).is_some() => {
                faults
                    .push(format!("{}: the source stores its experts stacked, as ONNX cannot", info.module));
            }
            Ok(all) => specs.extend(all),
            Err(fault) => faults.push(fault.to_string()),
        }
    }
    match faults.is_empty() {
        true if container.facts().experts == Experts::Stacked => Ok(stacks::specs(linears)),
        true => Ok(specs),
        false => Err(not_storable(container, linears.len(), faults)),
    }
}

/// What is to be stored of a layer. Groups of a whole row have no order.
fn layer_plan<'a>(
    job: &Job,
    input: Option<&'a Scheme>,
    info: &'a LinearInfo,
    scheme: &'a Scheme,
    by_group: bool,
) -> LinearPlan<'a> {
    let by_group = by_group && matches!(scheme.format.blocks(), Blocks::Group(_));
    let outliers = job.outliers(info.rows, info.cols);
    LinearPlan { by_group, outliers, ..LinearPlan::new(&info.module, scheme, input, (info.rows, info.cols)) }
}

/// Whether the output holds scales of inputs that calibration finds.
fn stores_input_scales(recipe: &Recipe, container: Container) -> bool {
    let plan = LinearPlan::new("", &recipe.weights, recipe.activations.as_ref(), (1, 1));
    container.facts().input_scales && plan.stores_input_scale()
}

/// Layers that the container cannot hold.
pub(crate) fn not_storable(container: Container, total: usize, faults: Vec<String>) -> QuantError {
    QuantError::not_storable(container, total, &Refused::layers(faults))
}

/// What of the model as a whole the container cannot hold, or what does not go together.
pub(crate) fn model_not_storable(container: Container, why: impl Into<String>) -> QuantError {
    QuantError::not_storable(container, 0, &Refused::whole(why))
}

/// Every tensor of the source that is not the weight of a quantized layer, by name. Stacked experts are kept where one of them
/// stays as it is.
fn copied_tensors(source: &ModelFiles, linears: &[PlannedLinear]) -> Vec<TensorMeta> {
    let tensors = |quantized: bool| {
        let of_kind = linears.iter().filter(move |linear| linear.scheme.is_some() == quantized);
        of_kind.map(|linear| linear.info.dense_tensor().0).collect::<BTreeSet<String>>()
    };
    let quantized = &tensors(true) - &tensors(false);
    let mut copied: Vec<_> =
        source.checkpoint().tensors().filter(|meta| !quantized.contains(&meta.name)).cloned().collect();
    copied.sort_by(|a, b| a.name.cmp(&b.name));
    copied
}

fn notes(
    source: &ModelFiles,
    recipe: &Recipe,
    container: Container,
    config: &ModelConfig,
    copied: &[TensorMeta],
) -> Vec<String> {
    let mut notes = source.notes();
    notes.extend(source.checkpoint().warnings().iter().cloned());
    let known: std::collections::BTreeSet<String> = config.tensors().into_iter().map(|t| t.name).collect();
    let unknown: Vec<_> =
        copied.iter().filter(|m| !known.contains(&m.name)).map(|m| m.name.as_str()).collect();
    if let Some(first) = unknown.first() {
        let fate = if container.facts().one_file { "left out" } else { "copied" };
        notes.push(format!(
            "{} tensors that the architecture does not use are {fate}, the first is {first}",
            unknown.len()
        ));
    }
    notes.extend(of_other_orders(config, container));
    let mut modules: Vec<_> = config.decoder_linears().map(|l| l.module).collect();
    if container.facts().one_file {
        modules.extend([EMBEDDING, HEAD].map(str::to_owned));
    }
    for rule in &recipe.layers {
        for glob in rule.modules.iter().filter(|glob| !modules.iter().any(|m| glob.matches(m))) {
            notes.push(format!("recipe pattern {glob:?} matches no layer"));
        }
    }
    notes
}

/// What is said of a container that has no stacked experts.
pub(crate) const EXPERTS_APART: &str = "experts that the source stores stacked are stored one by one, which mantissa reads; other servers expect them stacked";

/// What the user should know of layers that no dense checkpoint stores as `[out, in]` by themselves.
fn of_other_orders(config: &ModelConfig, container: Container) -> Option<String> {
    // GGUF has one order for all models; the other has that of the source.
    let facts = container.facts();
    if matches!(facts.experts, Experts::OwnNames | Experts::Stacked) {
        return None;
    }
    let first = config.decoder_linears().find(|info| info.stored != StoredAs::Rows)?;
    match first.stored {
        StoredAs::Stacked(_) => Some(EXPERTS_APART.to_owned()),
        _ if facts.conv1d => None,
        _ => Some(format!(
            "the source stores its layers as Conv1D, [in, out]: mantissa reads them in {}, other readers only with --format gptq",
            container.name()
        )),
    }
}

/// Measure of a layer's work, in bytes read ([`Plan::work_bytes`]).
pub(crate) fn work_of(info: &LinearInfo) -> u64 {
    (info.rows * info.cols) as u64 * 2
}

/// Bytes of a tensor.
pub(crate) fn spec_bytes(spec: &TensorSpec) -> u64 {
    spec.shape.iter().map(|&n| n as u64).product::<u64>() * spec.dtype.bits() / 8
}
