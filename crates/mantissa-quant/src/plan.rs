//! Plan of a job, decided before any work: schemes of all layers, tensors of the output, memory.

mod job;
mod output;
mod report;
pub(crate) mod texts;

use std::collections::BTreeMap;
use std::path::PathBuf;

use mantissa_methods::method::Fisher;
use mantissa_model::{KvPolicy, LinearInfo, ModelConfig, Products};
use mantissa_num::{Blocks, Rounding, Scheme};
use mantissa_store::convention::{Container, LinearPlan, native};
use mantissa_store::{DEFAULT_SHARD_BYTES, TensorMeta, TensorSpec};
use mantissa_train::LayerTrainer;

use crate::calibrate::CalibrationSet;
use crate::coverage::report::Coverage;
use crate::error::{QuantError, Refused};
use crate::gguf::layout::Layout;
use crate::importance::Importance;
use crate::input_scales::Observer;
use crate::jobs::convert::rewritten::Dense;
use crate::quality::figures::Evaluation;
use crate::recipe::{Part, Recipe};

pub use job::Job;
pub(crate) use texts::Use;

/// Options of a run; none changes the meaning of a scheme.
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
    /// Rounding of values to codes.
    pub rounding: Rounding,
    /// Calibration set, for methods and for importance.
    pub calibration: Option<CalibrationSet>,
    /// Windows of the calibration that methods do not see: what they make of a layer is held against rounding to nearest on them.
    pub held_out: Vec<Vec<u32>>,
    /// Matmul operand dtype of calibration.
    pub products: Products,
    /// Importance matrix for block types that search.
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
    /// True if searched blocks will be weighed by importance.
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
    /// Notes for the user.
    pub notes: Vec<String>,
    /// Why layers are not stored as the recipe asks, by module.
    pub fallbacks: BTreeMap<String, String>,
    /// Evaluation of the output before it is put in place.
    pub evaluation: Option<Evaluation>,
    /// Check of the finished output before it is put in place.
    pub check: Check,
    /// Coverage of the calibration, if it was measured.
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
    pub(crate) gguf: Option<Layout>,
}

impl Plan {
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
        texts::stores_cache_scales(self.kv.as_ref(), self.kv_levels.as_ref())
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

    pub(crate) fn linear_plan<'a>(&'a self, info: &'a LinearInfo, scheme: &'a Scheme) -> LinearPlan<'a> {
        layer_plan(&self.job, self.activations.as_ref(), info, scheme, self.by_group)
    }
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

/// Plans the storage of a layer. Groups of a whole row have no order.
pub(crate) fn layer_plan<'a>(
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

/// True if the output holds scales of inputs that calibration finds.
pub(crate) fn stores_input_scales(recipe: &Recipe, container: Container) -> bool {
    let plan = LinearPlan::new("", &recipe.weights, recipe.activations.as_ref(), (1, 1));
    container.facts().input_scales && plan.stores_input_scale()
}

/// Layers that the container cannot hold.
pub(crate) fn not_storable(container: Container, total: usize, faults: Vec<String>) -> QuantError {
    QuantError::not_storable(container, total, &Refused::layers(faults))
}

/// Refuses a model that the format cannot hold as a whole, or options that do not go together.
pub(crate) fn model_not_storable(container: Container, why: impl Into<String>) -> QuantError {
    QuantError::not_storable(container, 0, &Refused::whole(why))
}

/// Measure of a layer's work, in bytes read ([`Plan::work_bytes`]).
pub(crate) fn work_of(info: &LinearInfo) -> u64 {
    (info.rows * info.cols) as u64 * 2
}

/// Bytes of a tensor.
pub(crate) fn spec_bytes(spec: &TensorSpec) -> u64 {
    spec.shape.iter().map(|&n| n as u64).product::<u64>() * spec.dtype.bits() / 8
}
