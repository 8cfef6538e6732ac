//! A precision on a device under a load, and the choice among several.

use serde::Serialize;

use super::choice::{Entry, best};
use super::loads::{Loads, Refusal, loads};
use super::offload::{Offload, offload};
use crate::contract::Engine;
use crate::hardware::{Device, Execution, Host, Maker};
use crate::memory::{Inference, inference};
use crate::parallel::{Parallel, Split};
use crate::precision::{KVS, Kv, Precision, Suits};
use crate::roofline::{Setup, Speed};
use crate::shape::ModelShape;

/// Load that is planned for.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Load {
    /// Tokens that each sequence may hold.
    pub context: u64,
    /// Sequences at once.
    pub batch: u64,
    /// Tokens of a prompt.
    pub prefill: u64,
    /// Tokens of an answer.
    pub decode: u64,
    /// Devices that share the model.
    pub devices: u64,
    /// How they share it.
    pub parallel: Parallel,
    /// Bits of the values that devices exchange.
    pub reduce_bits: f64,
    /// Storage of keys and values; chosen if `None`.
    pub kv: Option<Kv>,
    /// Largest KL in nats/token, measured on our models, of a precision that is recommended.
    pub max_kl: f64,
    /// Bytes that the model may use in place of the device's.
    pub memory: Option<f64>,
    /// Processor and memory beside a GPU.
    pub host: Host,
}

/// Tokens of context that are planned for where none is asked for.
pub const USUAL_CONTEXT: u64 = 4096;

impl Load {
    /// Returns the load that is planned for where nothing is asked for: one sequence, three quarters of it a prompt.
    pub fn usual(shape: &ModelShape, devices: u64, parallel: Parallel) -> Self {
        Self::of_context(USUAL_CONTEXT.min(shape.context), devices, parallel)
    }

    /// Returns the load of one sequence of so many tokens, of which three quarters are a prompt and the rest, up to 1024, an
    /// answer.
    pub fn of_context(context: u64, devices: u64, parallel: Parallel) -> Self {
        let prefill = prompt_of(context);
        Load {
            context,
            batch: 1,
            prefill,
            decode: answer_of(context, prefill),
            devices,
            parallel,
            reduce_bits: 16.0,
            kv: None,
            max_kl: MAX_KL,
            memory: None,
            host: Host::default(),
        }
    }

    /// Tokens that a sequence holds in the middle of its answer, at which decoding is predicted.
    pub fn depth(&self) -> u64 {
        (self.prefill + self.decode / 2).min(self.context)
    }

    /// Returns the longest context that is planned for: the model's, or that of the load where a longer one is asked for of an
    /// assumed shape.
    pub fn longest(&self, shape: &ModelShape) -> u64 {
        shape.context.max(self.context)
    }

    /// Devices that share the model, and how.
    pub fn split(&self) -> Split {
        Split { devices: self.devices, by: self.parallel }
    }
}

/// Tokens of a prompt where only the context is given: three quarters of it.
pub fn prompt_of(context: u64) -> u64 {
    (context * 3 / 4).max(1)
}

/// Tokens of an answer where only context and prompt are given: the rest, at most 1024.
pub fn answer_of(context: u64, prompt: u64) -> u64 {
    context.saturating_sub(prompt).clamp(1, 1024)
}

/// Default of [`Load::max_kl`]: "small" on our models, with a margin for other models.
pub const MAX_KL: f64 = 0.02;

/// Number of parameters below which a loss that shows is not recommended: small models lose more, and take little
/// memory anyway.
pub const SMALL_MODEL: u64 = 1_000_000_000;

/// Least gain in time for which a quantized precision is recommended over BF16 that fits.
pub(super) const WORTH: f64 = 1.1;

/// Bytes with the smallest KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Least {
    /// Storage of keys and values.
    pub kv: Kv,
    /// Bytes on each device.
    pub bytes: Inference,
}

/// Candidate precision for a question.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// Precision.
    pub precision: Precision,
    /// Storage of keys and values: the widest that fits.
    pub kv: Kv,
    /// True if it fits.
    pub fits: bool,
    /// Bytes on each device.
    pub bytes: Inference,
    /// Bytes with the smallest KV cache.
    pub least: Least,
    /// Split between GPU and host where it does not fit and llama.cpp loads it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub offload: Option<Offload>,
    /// Decoding in the middle of an answer.
    pub decode: Speed,
    /// Computation of a prompt.
    pub prefill: Speed,
    /// Predicted seconds of a request, from its prompt to its last token.
    pub seconds: f64,
    /// What multiplies it, and the fallback.
    pub execution: Execution,
    /// Engines that load it on the device, and why others do not.
    pub loads: Loads,
    /// True if the measured loss may understate this model's: int8 inputs of a model that is large enough for outlier
    /// channels, which our models do not have.
    pub outliers: bool,
    /// True if engines of the format are not built for so many sequences on a GPU: GGUF.
    pub few_sequences: bool,
    /// True if the GPU decodes the weights where others multiply their types.
    pub decoded: bool,
}

/// Sequences from which on GGUF on a GPU comes after other formats.
const MANY: u64 = 8;

/// Number of parameters from which on outlier channels appear in all layers (LLM.int8(), arXiv 2208.07339, section
/// 3.2).
const OUTLIERS_FROM: u64 = 6_000_000_000;

impl Row {
    /// Returns why this precision is not run as named: no kernel, or no engine; `None` if it is.
    pub fn refusal(&self) -> Option<String> {
        if let Some(fallback) = self.execution.fallback.as_ref().filter(|_| self.precision.inputs.is_some()) {
            return Some(fallback.clone());
        }
        let why = self.loads.refused.as_ref().or(self.loads.widened.as_ref());
        why.filter(|_| self.loads.engines.is_empty()).cloned()
    }

    /// Returns the kind of [`refusal`](Self::refusal).
    pub fn refusal_kind(&self) -> Option<Refusal> {
        self.refusal()?;
        let falls = self.execution.fallback.is_some() && self.precision.inputs.is_some();
        let of_engines = self.loads.refused.as_ref().and(self.loads.refusal);
        Some(if falls { Refusal::Kernel } else { of_engines.unwrap_or(Refusal::Format) })
    }

    /// Describes it for a choice by `seconds`.
    pub fn entry(&self, seconds: f64) -> Entry<'_> {
        Entry {
            precision: &self.precision,
            runs: self.fits && self.refusal().is_none(),
            seconds: Some(seconds),
            doubtful: self.outliers || self.few_sequences || self.decoded,
        }
    }
}

/// Lists the KV schemes that engines of this precision have on the device.
fn kv_choices(precision: &Precision, device: &Device, loads: &Loads, asked: Option<Kv>) -> Vec<Kv> {
    if let Some(kv) = asked {
        return vec![kv];
    }
    let integers = device.maker == Maker::Cpu || ["gguf", "mlx"].contains(&precision.convention);
    let has = |kv: &Kv| kv.name == "f16" || (integers != (kv.name == "fp8") && loads.stores(kv));
    KVS.into_iter().filter(has).collect()
}

/// Returns the KV scheme that halves an unquantized cache where this row runs: of those that its engines store, the one of
/// its own type first; `None` if they store neither.
pub(super) fn kv_second(row: &Row) -> Option<Kv> {
    let integers = row.precision.convention == "gguf" || row.execution.unit == crate::hardware::Unit::Int8;
    let both = if integers { [KVS[2], KVS[1]] } else { [KVS[1], KVS[2]] };
    both.into_iter().find(|kv| row.loads.stores(kv))
}

/// Evaluates one precision.
pub(super) fn row(
    shape: &ModelShape,
    device: &Device,
    load: &Load,
    engine: Option<&'static Engine>,
    precision: &Precision,
) -> Row {
    let memory = load.memory.unwrap_or_else(|| device.available());
    let of = |kv: &Kv| inference(shape, precision, kv, load.context, load.batch, load.split());
    let loads = loads(shape, precision, device, load.split(), engine);
    let kvs = kv_choices(precision, device, &loads, load.kv);
    let fitting = kvs.iter().find(|kv| of(kv).total() <= memory);
    let kv = *fitting.or(kvs.first()).unwrap_or(&KVS[0]);
    let least = kvs.iter().min_by(|a, b| of(a).kv.total_cmp(&of(b).kv)).unwrap_or(&kv);
    let setup =
        Setup { shape, precision, kv: &kv, device, split: load.split(), reduce_bits: load.reduce_bits };
    let (decode, prefill) = (setup.decode(load.batch, load.depth()), setup.prefill(load.prefill.max(1)));
    let batch = load.batch.max(1) as f64;
    let seconds = load.prefill as f64 * batch / prefill.tokens_per_s[1]
        + load.decode as f64 * batch / decode.tokens_per_s[1];
    let row = Row {
        precision: *precision,
        kv,
        fits: fitting.is_some(),
        bytes: of(&kv),
        least: Least { kv: *least, bytes: of(least) },
        offload: None,
        decode,
        prefill,
        seconds,
        execution: setup.execution(),
        loads: loads.with_kv(&kv),
        outliers: precision.inputs == Some("int8-token") && shape.parameters() >= OUTLIERS_FROM,
        few_sequences: precision.convention == "gguf"
            && load.batch >= MANY
            && matches!(device.maker, Maker::Nvidia | Maker::Amd),
        decoded: device.maker == Maker::Nvidia && precision.suits(device.sm) == Suits::Decoded,
    };
    Row { offload: offload(shape, device, load, &row, memory), ..row }
}

/// Returns the best row, by `cost` in seconds. See [`best`].
pub(super) fn fastest(rows: &[Row], max_kl: f64, cost: impl Fn(&Row) -> f64) -> Option<&Row> {
    let entries: Vec<_> = rows.iter().map(|row| row.entry(cost(row))).collect();
    rows.get(best(&entries, max_kl)?)
}

/// Returns the choice for a load: the fastest, or BF16 where that fits and nothing is faster by a tenth.
pub(super) fn choose(rows: &[Row], max_kl: f64, cost: impl Fn(&Row) -> f64) -> Option<&Row> {
    let fast = fastest(rows, max_kl, &cost);
    let plain = rows.iter().find(|row| row.precision.is_dense() && row.fits && row.refusal().is_none());
    match (fast, plain) {
        (Some(fast), Some(plain)) if cost(plain) < WORTH * cost(fast) && plain.kv.name == "f16" => {
            Some(plain)
        }
        (fast, plain) => fast.or(plain),
    }
}

/// Returns one row for each name, in their order: the best variant by loss, or the first where none runs, unless it is hidden
/// then. Left out are spare rows beside others of their bits and format, and formats that users of the engine do not keep.
pub(super) fn shown(rows: Vec<Row>, engine: Option<&'static Engine>) -> Vec<Row> {
    let kept = |row: &&Row| engine.is_none_or(|engine| engine.is_usual_reader(row.precision.convention));
    let rows: Vec<Row> = rows.iter().filter(kept).cloned().collect();
    let same = |a: &Precision, b: &Precision| a.nominal == b.nominal && a.convention == b.convention;
    let replaced = |row: &Row| {
        let runs = |other: &&Row| {
            let doubtful = other.entry(other.seconds).doubtful;
            !other.precision.offered.spare && !doubtful && other.refusal().is_none()
        };
        row.precision.offered.spare
            && rows.iter().filter(runs).any(|other| same(&other.precision, &row.precision))
    };
    let mut names: Vec<&str> = rows.iter().map(|row| row.precision.name).collect();
    names.dedup();
    let chosen = |name: &&str| {
        let variants: Vec<&Row> =
            rows.iter().filter(|row| row.precision.name == *name && !replaced(row)).collect();
        let entries: Vec<Entry<'_>> = variants
            .iter()
            .map(|row| Entry { runs: row.refusal().is_none(), seconds: None, ..row.entry(0.0) })
            .collect();
        let runs = best(&entries, f64::INFINITY).or_else(|| entries.iter().position(|entry| entry.runs));
        match runs {
            Some(i) => variants.get(i).map(|row| (*row).clone()),
            None => variants.first().filter(|row| !row.precision.offered.hidden).map(|row| (*row).clone()),
        }
    };
    names.iter().filter_map(chosen).collect()
}
