//! Memory of a run as a sum of named buffers: predicted before the run starts, and held to `--memory`.
//!
//! A run holds one layer at a time. Its peak is at the layer with the largest buffers, while it is quantized or
//! read back for verification. Small models also have their logits compared at the end, which needs the whole model in
//! f32. An evaluation holds source and output together. Sizes follow from shapes and formats; the allocator's overhead
//! was measured (`bench/memory.py` compares the sum with the kernel's account).

mod adapt;
mod solving;
mod stage;

use mantissa_methods::method::{Extent, Fisher, Phase, Work};
use mantissa_methods::transform::Change;
use mantissa_model::{Buffers, KvCache, LinearInfo, LinearInput, ModelConfig, StoredAs, Tokenizer};
use mantissa_num::Scheme;
use mantissa_store::convention::{ModelFiles, StackForm};
use mantissa_store::gguf::Value;
use mantissa_train::LayerTrainer;

use solving::Solving;
pub use stage::Stage;
use stage::{Sizes, factors, from_heap, kept, states, transposed, with_holes, with_holes_of_calibration};

use crate::calibrate::{Calibration, CalibrationSet};
use crate::e2e;
use crate::error_gate::ErrorGate;
use crate::gptq::Hessian;
use crate::importance;
use crate::input_scales;
use crate::measure::figures::Evaluation;
use crate::measure::tasks::TaskRuns;
use crate::plan::Layout;
use crate::plan::{Plan, Use, spec_bytes};
use crate::rtn;
use crate::sequential::{
    BATCH_TOKENS, learning_options, learning_options_of, metrics_buffers, metrics_bytes, needs_drift,
    outputs_bytes,
};
use crate::spin;
use crate::transform;
use crate::verify::logits::MAX_LOGIT_PARAMETERS;
use crate::verify::memory::logits_buffers;

/// Code, tables, arguments and the larger of the buffers for copying, hashing and comparing files; measured. The thread
/// that hashes the source has a buffer of its own.
const BASE: u64 = 1_250_000 + (300 << 10);

/// Names, shapes and journal lines per tensor of source or output.
const PER_TENSOR: u64 = 1 << 10;

/// Copies of a GGUF file's metadata in memory at once: of the plan, of the writer, and of the readers of the output.
const COPIES_OF_METADATA: u64 = 3;

/// Share of a calibration's heap blocks that is still held when all of them are freed; measured.
const LEFT_BY_CALIBRATION: f64 = 0.25;

/// Returns the size of the problem of a layer, for its method.
pub(crate) fn extent<'a>(plan: &Plan, info: &LinearInfo, scheme: &'a Scheme) -> Extent<'a> {
    Sizes::of(plan, info, scheme).extent(plan, info, scheme)
}

/// Returns the stage with the highest peak of anonymous memory; `verified` is true if the output is read back.
pub fn peak_stage(plan: &Plan, verified: bool) -> Stage {
    let mut stages = vec![reading_tokenizer(plan)];
    stages.extend(before_layers(plan));
    stages.extend(of_layers(plan, verified));
    stages.extend(of_tables(plan, verified));
    if verified && plan.config.parameters() <= MAX_LOGIT_PARAMETERS {
        // The heap keeps part of the calibration's blocks while logits are compared.
        let left = stages.iter().filter(|_| plan.text_for(Use::Solve).is_some()).map(from_heap).max();
        let mut logits = comparing_logits(plan);
        let left = left.map(|bytes| (bytes as f64 * LEFT_BY_CALIBRATION) as u64);
        logits.buffers.extend(left.map(|bytes| ("heap left by the calibration", bytes)));
        stages.push(logits);
    }
    if let (Some(options), Some(set)) = (plan.job.tuning(), plan.text_for(Use::Tune)) {
        let set = e2e::windows(plan, set);
        stages.push(with_holes_of_calibration(
            "train scales and norms".to_owned(),
            e2e::buffers(plan, &set, options),
        ));
    }
    stages.extend(plan.evaluation.as_ref().map(|evaluation| evaluating(plan, evaluation)));
    stages.extend(plan.tasks.as_ref().map(|tasks| running_tasks(plan, tasks)));
    let mut peak = stages
        .into_iter()
        .max_by_key(Stage::bytes)
        .unwrap_or(Stage { name: String::new(), buffers: Vec::new() });
    let tensors = (plan.specs.len() + plan.linears.len() + plan.copied.len()) as u64;
    if plan.dequantizing > 0 {
        peak.buffers.push(("dequantized source tensors", plan.dequantizing));
    }
    let metadata = metadata_bytes(plan);
    if metadata > 0 {
        peak.buffers.push(("metadata of the GGUF file", COPIES_OF_METADATA * metadata));
    }
    peak.buffers.push(("base", BASE + tensors * PER_TENSOR));
    peak
}

/// Memory of reading the tokenizers of source and output, one at a time.
fn reading_tokenizer(plan: &Plan) -> Stage {
    Stage { name: "read the tokenizer".to_owned(), buffers: vec![("tokenizer", plan.tokenizer)] }
}

/// Returns the least peak of a plan of `source`, which reads its tokenizer before the rest of the plan is known.
pub fn tokenizer_peak(source: &ModelFiles) -> u64 {
    BASE.saturating_add(Tokenizer::bytes_to_load(source.dir()))
}

/// Bytes of the metadata that a GGUF file gets, which hold its tokenizer.
fn metadata_bytes(plan: &Plan) -> u64 {
    let pairs = plan.gguf.iter().flat_map(|layout| &layout.metadata);
    pairs.map(|(key, value)| key.len() as u64 + held_by(value)).sum()
}

/// Bytes of a value and of what it points to, as the allocator rounds them.
fn held_by(value: &Value) -> u64 {
    let own = size_of::<Value>() as u64;
    match value {
        Value::String(text) => own + (text.len() as u64 + 8).next_multiple_of(16).max(32),
        Value::Array(_, values) => own + values.iter().map(held_by).sum::<u64>(),
        _ => own,
    }
}

/// Stages before the first layer is quantized: passes over calibration texts, and the split of fused tensors.
fn before_layers(plan: &Plan) -> Vec<Stage> {
    let mut stages: Vec<_> =
        plan.solving_text().map(|set| embedding_windows(plan, set)).into_iter().collect();
    if let Some(set) = plan.text_for(Use::Importance) {
        stages.extend(collecting(plan, set, "compute the importance matrix", None));
    }
    if let Some(set) = plan.text_for(Use::Inputs).filter(|_| plan.text_for(Use::Solve).is_none()) {
        let sampled = || ("sampled tokens of each input", 2 * sample_bytes(plan, set, input_scales::TOKENS));
        stages.extend(collecting(plan, set, "calibrate input scales", plan.observer.samples().then(sampled)));
    }
    if let Some(set) = plan.text_for(Use::Transform) {
        stages.extend([embedding_windows(plan, set), transforming(plan, set)]);
    }
    if let Some(set) = plan.text_for(Use::Solve) {
        stages.extend(informing(plan, set));
    }
    stages.extend(plan.gguf.as_ref().map(Layout::largest_joined).filter(|&n| n > 0).map(splitting));
    if let Some(set) = plan.text_for(Use::Cache) {
        let levels = || ("keys, values, weights and indices", level_bytes(&plan.config, set));
        stages.extend(collecting(plan, set, "calibrate the KV cache", plan.kv_levels.is_some().then(levels)));
    }
    stages
}

/// A pass over the windows of `set` that collects statistics, with the buffer `own` of its purpose.
fn collecting(plan: &Plan, set: &CalibrationSet, name: &str, own: Option<(&'static str, u64)>) -> [Stage; 2] {
    let mut buffers = importance::buffers(&plan.config, set, plan.limits());
    buffers.extend(own);
    [embedding_windows(plan, set), Stage { name: name.to_owned(), buffers }]
}

/// The search for a transform: rotations that are learned, or scales.
fn transforming(plan: &Plan, set: &CalibrationSet) -> Stage {
    match plan.job.transform().map(|transform| transform.change()) {
        Some(Change::LearnedRotation(options)) => {
            with_holes_of_calibration("learn rotations".to_owned(), spin::buffers(plan, set, options))
        }
        _ => searching(plan, set),
    }
}

/// The passes that find the Fisher information of the outputs of layers and of linear layers, as far as methods ask
/// for it.
fn informing(plan: &Plan, set: &CalibrationSet) -> Vec<Stage> {
    let stage = |buffers| with_holes_of_calibration("compute the Fisher information".to_owned(), buffers);
    let mut stages = Vec::new();
    if fisher(plan) {
        let options = learning_options(plan, set);
        stages.push(stage(metrics_buffers(&plan.config, set, &options, stored_table(plan))));
    }
    if plan.weighs_outputs() {
        let options = learning_options_of(plan, set, BATCH_TOKENS);
        let mut buffers = metrics_buffers(&plan.config, set, &options, stored_table(plan));
        let gradient = plan.quantized().map(|(info, _)| 4 * (info.rows * info.cols) as u64).max();
        buffers.retain(|(what, _)| *what != "metrics");
        // Output factors take the place of the metrics of layers' outputs.
        buffers.push(("output factors of the Fisher information", outputs_bytes(plan)));
        buffers.push(("gradient of a weight", gradient.unwrap_or(0)));
        stages.push(stage(buffers));
    }
    stages
}

/// The split of the largest tensor that GGUF stores as several, of `values` elements.
fn splitting(values: u64) -> Stage {
    let buffers = vec![
        ("values", 4 * values),
        ("values of the split tensors", 4 * values),
        ("packed tensors", 4 * values),
    ];
    Stage { name: "split fused tensors".to_owned(), buffers }
}

/// Stages of each quantized layer.
fn of_layers(plan: &Plan, verified: bool) -> Vec<Stage> {
    let mut stages = Vec::new();
    for (info, scheme) in plan.quantized() {
        match (plan.solving_text(), plan.work_on(info)) {
            (Some(set), Some(Work::Layer(_))) => stages.push(learning(plan, set, info, scheme)),
            (Some(set), Some(Work::Input(_))) => {
                stages.extend(Solving::of(plan, set, info, scheme).stages());
            }
            // A method that needs no text may still be compared with RTN on one.
            (Some(set), Some(Work::Weight(_))) => stages.extend(judged(plan, set, info, scheme)),
            (Some(set), Some(Work::Nearest)) => stages.push(placing(plan, set, info, scheme)),
            _ => stages.push(quantizing(plan, info, scheme)),
        }
        if verified {
            stages.push(verifying(plan, info, scheme));
        }
    }
    stages
}

/// Stages of embedding and head, if they are quantized.
fn of_tables(plan: &Plan, verified: bool) -> Vec<Stage> {
    let mut stages = Vec::new();
    for (info, scheme) in plan.quantized_tables() {
        let (sizes, weights) = (Sizes::of(plan, info, scheme), (info.rows * info.cols) as u64);
        // A rotation changes the table as a whole.
        let whole = plan.job.transform().is_some() || !rtn::in_panels(scheme);
        let buffers = vec![
            ("codes", sizes.codes),
            ("scales", sizes.scales),
            ("packed tensors", sizes.stored),
            ("transposed words", transposed(plan, &sizes)),
            ("values", if whole { 8 * weights } else { 0 }),
        ];
        stages.push(with_holes(plan, format!("quantize {}", info.module), buffers, sizes.panels));
        if verified {
            stages.push(verifying(plan, info, scheme));
        }
    }
    stages
}

impl Plan {
    /// Predicts the peak of anonymous memory; `verified` is true if the output is read back.
    pub fn peak_bytes(&self, verified: bool) -> u64 {
        peak_stage(self, verified).bytes()
    }
}

/// Memory of quantizing a layer without calibration.
fn quantizing(plan: &Plan, info: &LinearInfo, scheme: &Scheme) -> Stage {
    let sizes = Sizes::of(plan, info, scheme);
    if plan.streamed(info, scheme).is_some() {
        return with_holes(plan, format!("quantize {}", info.module), Vec::new(), sizes.panels);
    }
    let buffers = loaded(plan, info, scheme, &sizes);
    with_holes(plan, format!("quantize {}", info.module), buffers, sizes.panels)
}

/// Buffers of a weight that is quantized as a whole.
fn loaded(plan: &Plan, info: &LinearInfo, scheme: &Scheme, sizes: &Sizes) -> Vec<(&'static str, u64)> {
    let mut buffers =
        vec![("codes", sizes.codes), ("scales", sizes.scales), ("packed tensors", sizes.stored)];
    buffers.push(("transposed words", transposed(plan, sizes)));
    if info.stored != StoredAs::Rows {
        // The stored tensor and its rows in f32; an expert is read with those fused with it unless it is a block of rows.
        let values = (info.rows * info.cols) as u64;
        let turns = match &info.stored {
            StoredAs::Stacked(stack) if stack.form != StackForm::Rows => stack.turns as u64,
            _ => 1,
        };
        buffers.push(("weight as stored and in f32", 4 * (turns + 2) * values));
    }
    if plan.blocks_of_ternary(scheme).is_some() {
        buffers.push(("values, quotients and dequantized values", 12 * (info.rows * info.cols) as u64));
    }
    let searched = matches!(plan.work_on(info), Some(Work::Weight(_)));
    let whole = !rtn::in_panels(scheme) || plan.container.facts().square_scales || searched;
    if whole && scheme.format.codec().is_none() {
        // The source in f32, and one decoded row.
        buffers.push(("values", 4 * (info.rows * info.cols + info.cols) as u64));
    }
    if searched {
        buffers.extend(plan.buffers(info, Phase::Solve, &sizes.extent(plan, info, scheme)));
    }
    buffers
}

/// Memory of embedding the calibration windows.
fn embedding_windows(plan: &Plan, set: &CalibrationSet) -> Stage {
    let table = plan.config.vocab_size as u64 * plan.config.hidden_size as u64;
    let buffers = vec![
        ("states of the calibration", states(plan, set)),
        (
            "states of the original model",
            if needs_drift(plan) {
                Calibration::state_bytes(&plan.config, set, plan.limits().states)
            } else {
                0
            },
        ),
        ("embedding", 4 * table),
        ("embedding as stored", stored_table(plan)),
    ];
    Stage { name: "embed the calibration".to_owned(), buffers }
}

/// Returns the stored bytes of embedding or head.
fn stored_table(plan: &Plan) -> u64 {
    let table = plan.config.vocab_size as u64 * plan.config.hidden_size as u64;
    plan.copied.iter().filter(|meta| meta.numel() == table).map(|meta| meta.len).max().unwrap_or(0)
}

/// Bytes of up to `most` evenly spaced tokens of each input.
fn sample_bytes(plan: &Plan, set: &CalibrationSet, most: usize) -> u64 {
    let inputs = LinearInput::PLAIN.iter().chain(&[LinearInput::Mixed]);
    let widths: usize = inputs.map(|&input| plan.config.input_width(input)).sum();
    4 * set.tokens().min(most) as u64 * widths as u64
}

/// Memory of searching scales and clipping of a transform.
fn searching(plan: &Plan, set: &CalibrationSet) -> Stage {
    let mut buffers = importance::buffers(&plan.config, set, plan.limits());
    let largest = plan.quantized().map(|(info, _)| 4 * (info.rows * info.cols) as u64).max().unwrap_or(0);
    let groups = plan.quantized().map(|(info, scheme)| scheme.format.blocks().count(info.rows, info.cols));
    buffers.push(("sampled tokens of each input", sample_bytes(plan, set, transform::TOKENS)));
    buffers.push(("bf16 operands", factors(plan, set)));
    // Layers that read one input; and of one layer the scaled weight, codes and dequantized values.
    buffers.push(("weights in f32", 6 * largest));
    buffers.push(("clips", 17 * groups.sum::<usize>() as u64));
    Stage { name: "search scales and clipping".to_owned(), buffers }
}

/// Returns the bytes of calibrating levels: keys and values of a layer with a weight each, and again sorted with their
/// index.
pub fn level_bytes(config: &ModelConfig, set: &CalibrationSet) -> u64 {
    (24 * set.tokens() as u64).saturating_mul(config.key_value_width() as u64)
}

/// Bytes of comparing a solution with RTN: the RTN weight and the errors of both.
fn judging_bytes(info: &LinearInfo, sizes: &Sizes) -> u64 {
    sizes.codes + sizes.scales + ErrorGate::bytes_needed(info.rows, info.cols)
}

/// Memory of a layer that is solved without calibration and compared with RTN on a text.
fn judged(plan: &Plan, set: &CalibrationSet, info: &LinearInfo, scheme: &Scheme) -> [Stage; 2] {
    let statistics = Solving::of(plan, set, info, scheme).statistics();
    let mut solve = placing(plan, set, info, scheme);
    solve.buffers.extend([
        ("Hessian of the comparison with RTN", Hessian::bytes_needed(info.cols)),
        ("RTN weight and errors", judging_bytes(info, &Sizes::of(plan, info, scheme))),
    ]);
    [statistics, solve]
}

/// Memory of a layer that is quantized without calibration and put before calibrated ones.
fn placing(plan: &Plan, set: &CalibrationSet, info: &LinearInfo, scheme: &Scheme) -> Stage {
    let mut stage = quantizing(plan, info, scheme);
    stage.buffers.extend([
        ("states of the calibration", states(plan, set)),
        ("states inside the layer", kept(plan, set)),
        (
            "layer in f32",
            plan.config.layer_linears(info.layer).iter().map(|l| 4 * (l.rows * l.cols) as u64).sum(),
        ),
    ]);
    stage
}

/// Memory of learning the layer of `info`. Before and after, when the layer is not in training, less is needed.
fn learning(plan: &Plan, set: &CalibrationSet, info: &LinearInfo, scheme: &Scheme) -> Stage {
    let sizes = Sizes::of(plan, info, scheme);
    let extent = sizes.extent(plan, info, scheme);
    let options = learning_options(plan, set);
    let batch = 4 * options.max_tokens as u64 * plan.config.hidden_size as u64;
    let quantized = LinearInput::PLAIN.iter().filter(|_| plan.activations.is_some());
    let inputs =
        quantized.map(|&input| LayerTrainer::quantized_input_bytes(&plan.config, input, &options)).sum();
    let mut buffers = vec![
        ("states of the calibration, twice", 2 * states(plan, set)),
        ("layer in training and its activations", LayerTrainer::bytes_needed(&plan.config, &options)),
    ];
    // All weights of the layer, under the scheme of this one.
    for linear in plan.config.layer_linears(info.layer) {
        let extent = Extent { rows: linear.rows, cols: linear.cols, ..extent };
        for (name, bytes) in plan.buffers(info, Phase::Learn, &extent) {
            match buffers.iter_mut().find(|(known, _)| *known == name) {
                Some((_, all)) => *all += bytes,
                None => buffers.push((name, bytes)),
            }
        }
    }
    buffers.extend([
        ("RTN weight", sizes.codes + sizes.scales),
        ("quantized inputs", inputs),
        ("states and differences of a batch", 2 * batch),
        (
            "metrics and weighted differences",
            if fisher(plan) { metrics_bytes(&plan.config) + batch } else { 0 },
        ),
    ]);
    with_holes_of_calibration(format!("learn {}", info.module), buffers)
}

/// True if a method measures errors of layers' outputs by the Fisher information.
fn fisher(plan: &Plan) -> bool {
    plan.job.needs(|needs| matches!(needs.fisher, Some(Fisher::Layers { .. })))
}

/// Memory of verifying a layer.
fn verifying(plan: &Plan, info: &LinearInfo, scheme: &Scheme) -> Stage {
    let sizes = Sizes::of(plan, info, scheme);
    let weights = (info.rows * info.cols) as u64;
    // Trellis: values between the rotations in f16 and twice in f32, the resulting weight, and the source.
    let values = if scheme.format.trellis().is_some() { (2 + 2 * 4 + 4 + 4) * weights } else { 0 };
    let buffers = vec![
        ("values of both readers and the source", values),
        ("codes of the reader", sizes.codes),
        ("scales of the reader", sizes.scales),
        ("packed tensors of the independent reader", sizes.stored),
        ("transposed words", transposed(plan, &sizes)),
        ("scales of the independent reader", 4 * (sizes.blocks + sizes.zeros)),
    ];
    with_holes(plan, format!("verify {}", info.module), buffers, sizes.panels)
}

/// Memory of an evaluation: source and output, or source and its bf16 copy, run together on every thread.
fn evaluating(plan: &Plan, evaluation: &Evaluation) -> Stage {
    let Evaluation { sequences, source_bytes, floor_runs, .. } = evaluation;
    let config = &plan.config;
    let longest = sequences.iter().map(|s| s.tokens.len()).max().unwrap_or(0);
    let threads = plan.threads().clamp(1, sequences.len().max(1)) as u64;
    let pass = Buffers::bytes_needed(config, longest, longest).saturating_add(logits_of_pass(config));
    let in_bf16 = if *floor_runs { 2 * config.parameters() } else { 0 };
    // Ids, and the KL of each position with a sorted copy.
    let tokens = 12 * evaluation.text.tokens;
    let buffers = vec![
        ("weights of the source", *source_bytes),
        ("weights of the output", plan.output_bytes().max(in_bf16)),
        ("tensor being loaded", being_loaded(plan)),
        ("buffers and logits of all threads", pass.saturating_mul(2 * threads)),
        ("windows", tokens),
    ];
    Stage { name: "evaluate the output".to_owned(), buffers }
}

/// Logits that a pass of an evaluation holds, in bytes.
fn logits_of_pass(config: &ModelConfig) -> u64 {
    (mantissa_eval::ROWS * config.vocab_size) as u64 * 4
}

/// Bytes of the largest tensor of the output while it is loaded: as stored, and one byte per code if it is quantized.
fn being_loaded(plan: &Plan) -> u64 {
    let largest = plan.specs.iter().map(spec_bytes).max().unwrap_or(0);
    let linears = plan.linears.iter().map(|linear| &linear.info);
    let tables = plan.quantized_tables().map(|(info, _)| info);
    let widest = linears.chain(tables).map(|info| (info.rows * info.cols) as u64).max().unwrap_or(0);
    largest.saturating_add(widest)
}

/// Memory of tasks: source and output are loaded, one of them runs on every thread, with a cache for generated text.
fn running_tasks(plan: &Plan, tasks: &TaskRuns) -> Stage {
    let config = &plan.config;
    let (pass, sequence, items) = tasks.extent();
    let threads = plan.threads().clamp(1, items.max(1)) as u64;
    let each = Buffers::bytes_needed(config, pass, sequence)
        .saturating_add(logits_of_pass(config))
        .saturating_add(KvCache::bytes_needed(config, sequence));
    let buffers = vec![
        ("weights of the source", tasks.source_bytes),
        ("weights of the output", plan.output_bytes()),
        ("tensor being loaded", being_loaded(plan)),
        ("buffers, logits and caches of all threads", each.saturating_mul(threads)),
        ("tokenizer", tasks.tokenizer_bytes),
    ];
    Stage { name: "run the tasks".to_owned(), buffers }
}

/// Memory of comparing logits: the second of two models, decoded to f32. The first is smaller and freed before. An
/// unquantized table needs its stored bytes, its bytes as f32 and its values.
fn comparing_logits(plan: &Plan) -> Stage {
    Stage { name: "compare logits".to_owned(), buffers: logits_buffers(&plan.config, stored_table(plan)) }
}
