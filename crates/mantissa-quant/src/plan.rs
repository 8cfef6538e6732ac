//! Plan of a job, made before any work: schemes of all layers and tensors of the output.

pub(crate) mod alternative;
mod gguf;
mod job;
mod linear;
mod methods;
mod mixed;
mod options;
mod output;
mod report;
mod rewritten;
mod table;
mod uses;

use std::collections::BTreeMap;

use mantissa_methods::method::Fisher;
use mantissa_model::{KvPolicy, LinearInfo, LinearInput, ModelConfig};
use mantissa_num::Scheme;
use mantissa_ranks::Team;
use mantissa_store::convention::gguf::Moved;
use mantissa_store::convention::{Container, LinearPlan, native};
use mantissa_store::{TensorMeta, TensorSpec};
use mantissa_train::LayerTrainer;

use crate::calibrate::{CalibrationSet, Limits};
use crate::error::{QuantError, Refused};
use crate::input_scales::Observer;
use crate::measure::figures::Evaluation;
use crate::measure::tasks::TaskRuns;
use crate::quality::{Coverage, Recorded};
use crate::recipe;

pub(crate) use gguf::{Cast, JoinedCast, Layout};
pub use job::WeightJob;
pub(crate) use job::rounds_each;
pub use linear::PlannedLinear;
pub(crate) use linear::{is_table, layer_plan, scheme_of, spec_bytes, table_plan, work_of};
pub use methods::MethodShare;
pub(crate) use mixed::{MethodId, Methods};
pub use options::{Check, Options};
pub(crate) use rewritten::Dense;
pub use table::TableSize;
pub(crate) use uses::{Use, is_judged, uses_importance};

/// Method in reports of weights whose scales were learned in training: their errors have no bound by RTN.
const LEARNED: &str = "lsq";

/// Complete plan of a run.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Work that produces the stored weights.
    pub job: WeightJob,
    /// Scheme of linear weights without an exception.
    pub weights: Scheme,
    /// Scheme of the inputs of linear layers.
    pub activations: Option<Scheme>,
    /// Schemes of inputs that differ from `activations`, by module; `None` leaves that input unquantized.
    pub(crate) inputs: BTreeMap<String, Option<Scheme>>,
    /// Methods that differ from the recipe's, by module.
    pub(crate) methods: Methods,
    /// Scheme of the KV cache.
    pub kv: Option<Scheme>,
    /// KV cache policy with calibrated, stored levels.
    pub kv_levels: Option<KvPolicy>,
    /// Container.
    pub container: Container,
    /// Configuration of the model.
    pub config: ModelConfig,
    /// Linear layers in the order of the forward pass.
    pub linears: Vec<PlannedLinear>,
    /// Embedding and head of a folder, if they are quantized.
    pub tables: Vec<PlannedLinear>,
    /// Output tensors, in order.
    pub specs: Vec<TensorSpec>,
    /// Tensors copied from the source.
    pub copied: Vec<TensorMeta>,
    /// Notes for the user.
    pub notes: Vec<String>,
    /// Reasons why layers are not stored as the recipe asks, by module.
    pub fallbacks: BTreeMap<String, String>,
    /// Evaluation of the output before it is put in place.
    pub(crate) evaluation: Option<Evaluation>,
    /// Tasks that run on the output before it is put in place.
    pub(crate) tasks: Option<TaskRuns>,
    /// Check of the finished output before it is put in place.
    pub(crate) check: Check,
    /// Coverage of the calibration, if measured.
    pub(crate) coverage: Option<Coverage>,
    pub(crate) options: Options,
    /// Uses of the calibration text, whether or not one is given.
    pub(crate) uses: Vec<Use>,
    /// Observer for stored input scales.
    pub(crate) observer: Observer,
    /// True if groups of some layer may have columns that are not adjacent.
    pub(crate) by_group: bool,
    /// Modules with rotated inputs, and the orders of the matrices.
    pub(crate) rotations: Vec<(String, usize)>,
    /// Head that the output adds, and the embedding that it starts as, if a rotation unties them.
    pub(crate) untied: Option<(String, String)>,
    /// Dense tensors that are not copied byte by byte.
    pub(crate) dense: Vec<Dense>,
    /// Layout of a GGUF file; `None` for a folder.
    pub(crate) gguf: Option<Layout>,
    /// Linear modules that the text model does not use.
    pub(crate) unused: Vec<String>,
    /// Bytes that reading a quantized source dequantized takes; 0 for a dense one.
    pub(crate) dequantizing: u64,
    /// Bytes that reading the tokenizers of source and output takes.
    pub(crate) tokenizer: u64,
}

impl Plan {
    /// Completes the plan with the work to record in `quality.json`.
    #[must_use]
    pub fn with_record(mut self, rebuild: Recorded) -> Self {
        self.options.rebuild = Some(rebuild);
        self
    }

    /// Completes the plan with an evaluation of the output before it is put in place.
    #[must_use]
    pub fn with_evaluation(self, evaluation: Option<Evaluation>) -> Self {
        Plan { evaluation, ..self }
    }

    /// Completes the plan with tasks that run on the output before it is put in place.
    #[must_use]
    pub fn with_tasks(self, tasks: Option<TaskRuns>) -> Self {
        Plan { tasks, ..self }
    }

    /// Completes the plan with a check of the finished output before it is put in place.
    #[must_use]
    pub fn with_check(self, check: Check) -> Self {
        Plan { check, ..self }
    }

    /// Completes the plan with the workers that solve its layers.
    #[must_use]
    pub fn with_team(self, team: Team) -> Self {
        Plan { options: Options { team, ..self.options }, ..self }
    }

    /// Number of units into which workers can divide the plan in any order; `None` if layers wait for each other, because
    /// they are calibrated behind quantized ones.
    pub fn units(&self) -> Option<usize> {
        self.solving_text().is_none().then(|| self.quantized().count())
    }

    /// Completes the plan with the coverage of its calibration, which the report then has.
    #[must_use]
    pub fn with_coverage(self, coverage: Option<Coverage>) -> Self {
        Plan { coverage, ..self }
    }

    /// Returns the evaluation of the output before it is put in place.
    pub fn evaluation(&self) -> Option<&Evaluation> {
        self.evaluation.as_ref()
    }

    /// Returns the tasks that run on the output before it is put in place.
    pub fn tasks(&self) -> Option<&TaskRuns> {
        self.tasks.as_ref()
    }

    /// Creates a plan that has no tensors, notes or uses yet.
    pub(crate) fn begun(
        job: WeightJob,
        weights: Scheme,
        container: Container,
        config: ModelConfig,
        linears: Vec<PlannedLinear>,
        options: Options,
    ) -> Self {
        Plan {
            job,
            weights,
            activations: None,
            inputs: BTreeMap::new(),
            methods: Methods::default(),
            kv: None,
            kv_levels: None,
            container,
            config,
            linears,
            tables: Vec::new(),
            specs: Vec::new(),
            copied: Vec::new(),
            notes: Vec::new(),
            fallbacks: BTreeMap::new(),
            evaluation: None,
            tasks: None,
            check: Check::default(),
            coverage: None,
            options,
            uses: Vec::new(),
            observer: Observer::default(),
            by_group: false,
            rotations: Vec::new(),
            untied: None,
            dense: Vec::new(),
            gguf: None,
            unused: Vec::new(),
            dequantizing: 0,
            tokenizer: 0,
        }
    }

    /// Returns the number of threads.
    pub(crate) fn threads(&self) -> usize {
        self.options.threads
    }

    /// Returns the limits of its calibration.
    pub(crate) fn limits(&self) -> Limits {
        let Options { threads, states_in_memory: states, route_all_experts: all_experts, .. } = self.options;
        Limits { threads, states, all_experts }
    }

    /// True if output errors of linear layers are weighted by the Fisher information, which needs a backward pass
    /// through the model.
    pub(crate) fn weighs_outputs(&self) -> bool {
        let asked = self.job.needs(|needs| needs.fisher == Some(Fisher::Outputs));
        asked && LayerTrainer::check(&self.config).is_ok()
    }

    /// Returns the KV cache scheme or policy as reports name it.
    pub(crate) fn cache(&self) -> Option<String> {
        let levels = self.kv_levels.as_ref().map(ToString::to_string);
        self.kv.as_ref().map(ToString::to_string).or(levels)
    }

    /// Returns the scheme of a layer's input.
    pub fn input_of(&self, info: &LinearInfo) -> Option<&Scheme> {
        self.inputs.get(&info.module).map_or(self.activations.as_ref(), Option::as_ref)
    }

    /// Names the schemes of inputs, the most common first; `None` if no input is quantized.
    pub fn activation_names(&self) -> Option<String> {
        let mut names: Vec<String> = Vec::new();
        for scheme in self.activations.iter().chain(self.inputs.values().flatten()) {
            let name = scheme.to_string();
            if !names.contains(&name) {
                names.push(name);
            }
        }
        (!names.is_empty()).then(|| names.join(", "))
    }

    /// Returns the name of the method of a layer in its report.
    pub(crate) fn method_named(&self, info: &LinearInfo, scheme: &Scheme) -> &'static str {
        if self.options.scales.is_some() { LEARNED } else { self.job.method_of(&info.module, scheme) }
    }

    /// Returns the names of transform and method in reports.
    pub(crate) fn method_name(&self) -> String {
        if self.options.scales.is_some() { LEARNED.to_owned() } else { self.job.method_name() }
    }

    /// Iterates over the quantized layers with their schemes.
    pub fn quantized(&self) -> impl Iterator<Item = (&LinearInfo, &Scheme)> {
        self.linears.iter().filter_map(|linear| Some((&linear.info, linear.scheme.as_ref()?)))
    }

    /// Returns the bits per weight of the quantized layers by their schemes, including scales and zero points (as wide
    /// as codes).
    pub fn linear_bits_per_weight(&self) -> f64 {
        self.linear_bits() as f64 / self.linear_weights().max(1) as f64
    }

    /// Returns the bits of the quantized layers, including scales, zero points and outliers.
    pub fn linear_bits(&self) -> u64 {
        self.quantized().map(|(info, scheme)| self.bits(info, scheme)).sum()
    }

    /// Returns the bits of a quantized layer under `scheme`, including scales, zero points and outliers.
    pub fn bits(&self, info: &LinearInfo, scheme: &Scheme) -> u64 {
        let (rows, cols) = (info.rows, info.cols);
        scheme.format.total_bits(rows, cols) + native::outlier_bits(rows, cols, self.outliers(info))
    }

    /// Returns the bits per weight of the quantized layers as stored, with all their tensors. It is larger than
    /// [`linear_bits_per_weight`](Self::linear_bits_per_weight) if the format stores wider zero points, zero points of
    /// symmetric codes, group indices of columns, or shapes.
    pub fn linear_stored_bits_per_weight(&self) -> f64 {
        let stored: u64 = self.quantized().map(|(info, scheme)| self.stored_bits(info, scheme)).sum();
        stored as f64 / self.linear_weights().max(1) as f64
    }

    /// Returns the bits of all stored tensors of a layer.
    pub(crate) fn stored_bits(&self, info: &LinearInfo, scheme: &Scheme) -> u64 {
        // GGUF stores nothing but blocks.
        if self.container.is_one_file() {
            return self.bits(info, scheme);
        }
        let specs = self.container.specs(&self.linear_plan(info, scheme));
        // `specs` cannot fail: a plan has only layers that can be stored.
        specs.map_or_else(|_| self.bits(info, scheme), |specs| 8 * specs.iter().map(spec_bytes).sum::<u64>())
    }

    /// Returns the number of weights of the quantized layers.
    pub fn linear_weights(&self) -> u64 {
        self.quantized().map(|(info, _)| (info.rows * info.cols) as u64).sum()
    }

    /// Returns the bytes of all output tensors.
    pub fn output_bytes(&self) -> u64 {
        self.specs.iter().map(spec_bytes).sum()
    }

    /// Returns the bytes of the source that a run reads: the total of its progress.
    pub fn work_bytes(&self) -> u64 {
        self.quantized().chain(self.quantized_tables()).map(|(info, _)| work_of(info)).sum::<u64>()
            + self.copied.iter().map(|m| m.len).sum::<u64>()
    }

    pub(crate) fn linear_plan<'a>(&'a self, info: &'a LinearInfo, scheme: &'a Scheme) -> LinearPlan<'a> {
        match is_table(info) {
            true => table_plan(info, scheme),
            false => layer_plan(&self.job, self.input_of(info), info, scheme, self.by_group),
        }
    }

    /// True if the output stores scales or levels of keys and values.
    pub(crate) fn stores_cache_scales(&self) -> bool {
        recipe::methods::stores_cache_scales(self.kv.as_ref(), self.kv_levels.as_ref())
    }

    /// Returns the calibration text if it has this use.
    pub(crate) fn text_for(&self, of: Use) -> Option<&CalibrationSet> {
        self.options.calibration.as_ref().filter(|_| self.uses.contains(&of))
    }

    /// Returns the calibration text.
    pub fn calibration(&self) -> Option<&CalibrationSet> {
        self.options.calibration.as_ref()
    }

    /// True if the layers of the model run on the calibration text.
    pub fn runs_text(&self) -> bool {
        self.options.calibration.is_some() && !self.uses.is_empty()
    }

    /// Returns the calibration text if layers are solved on it or compared with RTN.
    pub(crate) fn solving_text(&self) -> Option<&CalibrationSet> {
        self.text_for(Use::Solve).or(self.text_for(Use::ErrorGate))
    }

    /// Returns the calibration text if weights depend on it.
    pub(crate) fn text(&self) -> Option<&CalibrationSet> {
        let set = self.options.calibration.as_ref();
        set.filter(|_| self.uses.iter().any(|of| *of != Use::Cache))
    }

    /// Returns the held-out windows, on which solutions are compared with RTN.
    pub(crate) fn held_out(&self) -> Option<CalibrationSet> {
        self.options.held_out_set()
    }

    /// Returns the order of a layer's columns in a GGUF file, if they move. The method then sees weight and inputs in that
    /// order, so that blocks hold columns that are stored together.
    pub(crate) fn columns_of(&self, info: &LinearInfo) -> Option<Moved> {
        self.gguf.as_ref()?.order.columns(&format!("{}.weight", info.module))
    }

    /// Returns the order of the columns of the weights that read `input` of layer `layer`, if they move.
    pub(crate) fn columns_of_input(&self, layer: usize, input: LinearInput) -> Option<Moved> {
        self.gguf.as_ref()?;
        let linears = self.config.layer_linears(layer);
        linears.iter().filter(|info| info.kind.input() == input).find_map(|info| self.columns_of(info))
    }
}

/// Returns the error of layers that the container cannot hold.
pub(crate) fn not_storable(container: Container, total: usize, faults: Vec<(String, String)>) -> QuantError {
    QuantError::not_storable(container, total, &Refused::layers(faults))
}

/// Returns the error of a model that the format cannot hold as a whole, or of options that exclude each other.
pub(crate) fn model_not_storable(container: Container, why: impl Into<String>) -> QuantError {
    QuantError::not_storable(container, 0, &Refused::whole(why))
}
