//! Reasons of a recommendation in words, and what would change it. Every figure is computed.

use super::offload::fastest_split;
use super::row::{Load, Row, SMALL_MODEL, WORTH, fastest, kv_second};
use super::sharing;
use super::words::{gb, rate};
use crate::figures::MODELS;
use crate::hardware::Device;
use crate::memory::{concurrency, longest_context};
use crate::precision::{Kv, Precision};
use crate::roofline::{Bound, Setup};
use crate::shape::{ModelShape, billions};

/// Returns the reasons of a choice.
pub(super) fn reasons(
    shape: &ModelShape,
    device: &Device,
    load: &Load,
    rows: &[Row],
    chosen: Option<&Row>,
    max_kl: f64,
) -> Vec<String> {
    let memory = load.memory.unwrap_or_else(|| device.available());
    let Some(row) = chosen else {
        let why = nothing(memory, load, rows, max_kl);
        return std::iter::once(why).chain(beyond_context(shape, load)).collect();
    };
    let mut reasons = vec![format!(
        "fits: {} of {} usable{}: weights {}, {} KV cache {} for {} × {} tokens, activations {}",
        gb(row.bytes.total()),
        gb(memory),
        if load.devices > 1 { " on each device" } else { "" },
        gb(row.bytes.weights()),
        row.kv.name,
        gb(row.bytes.kv),
        load.batch,
        load.context,
        gb(row.bytes.activations)
    )];
    reasons.extend(beyond_context(shape, load));
    reasons.extend(sharing::copies(shape, row, load));
    let plain = rows.iter().find(|other| other.precision.is_dense());
    if let Some(plain) = plain.filter(|plain| !plain.fits) {
        reasons.push(format!("BF16 needs {} and does not fit", gb(plain.bytes.total())));
    }
    reasons.push(bound(row, load));
    if let Some(plain) = plain.filter(|plain| plain.precision != row.precision) {
        reasons.push(format!(
            "a request of {} + {} tokens takes {:.2} of the time of BF16 (predicted)",
            load.prefill,
            load.decode,
            row.seconds / plain.seconds
        ));
    } else if row.precision.is_dense() {
        reasons.push("no other precision that fits is faster by a tenth, and none is as exact".to_owned());
    }
    reasons.push(quality(row, max_kl));
    if row.outliers {
        reasons.push("int8 inputs: models of this size have outlier channels, ours have not; measure yours, and smooth it (w8a8-smooth)".to_owned());
    }
    if shape.parameters() < SMALL_MODEL && max_kl.is_finite() {
        reasons.push(format!(
            "{} parameters are few: small models lose more at the same bits, so only losses up to {max_kl} nats/token count",
            billions(shape.parameters())
        ));
    }
    reasons
}

/// Says that the load is longer than the context of the model whose shape is assumed.
fn beyond_context(shape: &ModelShape, load: &Load) -> Option<String> {
    let assumed = shape.assumed.as_ref().filter(|_| load.context > shape.context)?;
    Some(format!(
        "context: the model of the assumed {assumed} ends at {} tokens; {} are planned for one of this shape that has them (plan your model's folder or config.json)",
        shape.context, load.context
    ))
}

/// Says what decoding waits for.
fn bound(row: &Row, load: &Load) -> String {
    let why = match row.decode.bound {
        Bound::Weights => "reading weights: fewer bits are faster",
        Bound::Cache => "reading keys and values: a smaller KV cache is faster, smaller weights hardly",
        Bound::Compute => "operations: only formats that the device multiplies in fewer bits are faster",
        Bound::Link => "sums over devices: fewer devices, or sums in fewer bits, are faster",
    };
    format!("decoding at batch {} waits for {why}", load.batch)
}

/// States the measured loss.
fn quality(row: &Row, max_kl: f64) -> String {
    if row.precision.is_dense() {
        return "no loss: the weights are those of the model".to_owned();
    }
    let measured = MODELS.iter().zip(row.precision.kl).filter_map(|(model, kl)| {
        let at_most = if row.precision.is_bounded(Some(model)) { "at most " } else { "" };
        Some(format!("{at_most}{:.5} on {model}", kl?))
    });
    let limit = match max_kl.is_finite() {
        true => format!("limit {max_kl} (--max-kl)"),
        false => "not limited, as --bits asks for the width".to_owned(),
    };
    format!(
        "KL {} nats/token, measured on our models, not on yours; {limit}",
        measured.collect::<Vec<_>>().join(", ")
    )
}

/// Says why there is no choice: what the smallest precision within the limit of the loss needs, and the smallest at all.
fn nothing(memory: f64, load: &Load, rows: &[Row], max_kl: f64) -> String {
    let Some(row) = smallest(rows, max_kl) else {
        return format!("no precision within {max_kl} nats/token runs here{}", beyond(memory, rows, None));
    };
    let [within, of_these] = match max_kl.is_finite() {
        true => [format!(" within {max_kl} nats/token"), " of these".to_owned()],
        false => [String::new(), String::new()],
    };
    format!(
        "nothing{within} fits {}: the smallest{of_these}, {}, needs {}{}, {} of it for the KV cache of {} × {} tokens in {}{}",
        gb(memory),
        row.precision.name,
        gb(row.least.bytes.total()),
        if load.devices > 1 { " on each device" } else { "" },
        gb(row.least.bytes.kv),
        load.batch,
        load.context,
        row.least.kv.name,
        beyond(memory, rows, Some(row))
    )
}

/// Names the smallest precision of any loss where it is not the smallest within the limit.
fn beyond(memory: f64, rows: &[Row], within: Option<&Row>) -> String {
    let runs = rows.iter().filter(|row| row.refusal().is_none());
    let least = runs.min_by(|a, b| a.least.bytes.total().total_cmp(&b.least.bytes.total()));
    let Some(row) = least.filter(|row| within.is_none_or(|known| known.precision != row.precision)) else {
        return String::new();
    };
    let loss = match row.precision.measured_kl() {
        Some(kl) => format!("KL {kl:.4} nats/token"),
        None => "a loss that was not measured".to_owned(),
    };
    let fits = match row.least.bytes.total() <= memory {
        true => format!(" and fits: --bits {} lifts the limit", row.precision.nominal),
        false => String::new(),
    };
    format!(
        "; the smallest at all, {}, needs {} at {loss}{fits}",
        row.precision.name,
        gb(row.least.bytes.total())
    )
}

/// Returns what would change the choice.
pub(super) fn changes(
    shape: &ModelShape,
    device: &Device,
    load: &Load,
    rows: &[Row],
    chosen: Option<&Row>,
    max_kl: f64,
) -> Vec<String> {
    let memory = load.memory.unwrap_or_else(|| device.available());
    let mut changes = Vec::new();
    let Some(row) = chosen else {
        changes.extend(offloads(load, rows, max_kl));
        if let Some(least) = smallest(rows, max_kl) {
            changes.extend(sharing::devices(shape, load, least, memory));
            changes.extend(sharing::others(shape, device, load, least, memory));
        }
        changes.extend(short(shape, load, rows, memory));
        return changes;
    };
    let setup = Setup {
        shape,
        precision: &row.precision,
        kv: &row.kv,
        device,
        split: load.split(),
        reduce_bits: load.reduce_bits,
    };
    changes.extend(batch(&setup, load, rows, memory));
    changes.extend(context(shape, load, row, memory));
    changes.extend(sharing::others(shape, device, load, row, memory));
    changes.extend(phases(rows, max_kl, row));
    changes.extend(faster(rows, row, max_kl));
    changes.extend(exact(rows, row, memory));
    changes
}

/// Names the fastest split with the host, which llama.cpp makes of what does not fit.
fn offloads(load: &Load, rows: &[Row], max_kl: f64) -> Option<String> {
    let (row, split) = fastest_split(rows, max_kl)?;
    Some(format!(
        "offload: llama.cpp runs {} with {} of {} layers on the GPU (-ngl {}): {} there, {} on the host, {}–{} tok/s at {:.0} GB/s of the host",
        row.precision.name,
        split.gpu_layers,
        split.layers,
        split.gpu_layers,
        gb(split.gpu_bytes),
        gb(split.host_bytes),
        rate(split.tokens_per_s[0]),
        rate(split.tokens_per_s[2]),
        load.host.bandwidth / 1e9
    ))
}

/// Largest batch that [`Setup::crossover`] tries.
const MOST_BATCH: u64 = 4096;

/// Names the batch from which on the weights' bits no longer count, or that the memory ends before.
fn batch(setup: &Setup<'_>, load: &Load, rows: &[Row], memory: f64) -> Option<String> {
    let four = Precision::named("W4A16 INT4");
    let low = [Some(setup.precision), four.as_ref()]
        .into_iter()
        .flatten()
        .find(|p| !p.is_dense() && p.inputs.is_none())?;
    let plain: &Precision = &rows.iter().find(|row| row.precision.is_dense())?.precision;
    let depth = load.depth();
    let setup = Setup { precision: low, ..*setup };
    let held = concurrency(setup.shape, low, setup.kv, load.context, memory, load.split());
    // What does not fit at all is named elsewhere.
    if held == 0 {
        return None;
    }
    let crossover = setup.crossover(plain, depth, WORTH);
    Some(match crossover {
        found if found.unwrap_or(MOST_BATCH) > held => {
            let tokens = load.context;
            let sequences = if held == 1 { "sequence" } else { "sequences" };
            format!(
                "batch: the memory ends at {held} {sequences} of {tokens} tokens; {} decodes faster than BF16 up to there",
                low.name
            )
        }
        Some(1) => format!("{} is not faster than BF16 at any batch with {depth} tokens each", low.name),
        Some(batch) => format!(
            "batch: from {batch} sequences of {depth} tokens on, {} decodes less than 1.1 times as fast as BF16 and only saves memory",
            low.name
        ),
        None => format!(
            "batch: up to {MOST_BATCH} sequences of {depth} tokens, {} decodes faster than BF16",
            low.name
        ),
    })
}

/// Names the number of sequences and the length that fit, under each KV scheme.
fn context(shape: &ModelShape, load: &Load, row: &Row, memory: f64) -> Vec<String> {
    let mut lines = Vec::new();
    let of = |kv: &Kv| {
        let sequences = concurrency(shape, &row.precision, kv, load.context, memory, load.split());
        (sequences, longest_context(shape, &row.precision, kv, load.longest(shape), memory, load.split()))
    };
    let mut kvs = vec![crate::precision::KVS[0]];
    kvs.extend(if row.kv.name == "f16" { kv_second(row) } else { Some(row.kv) });
    let texts = kvs.iter().map(|kv| {
        let (sequences, longest) = of(kv);
        let fits = crate::memory::capacity(sequences, load.context, longest);
        format!("in {}: {fits}", kv.name)
    });
    let texts = texts.collect::<Vec<_>>().join("; ");
    lines.push(format!("context: beside {} weights fit, with keys and values {texts}", row.precision.name));
    lines
}

/// Gain from which on a precision counts as faster than the choice in one phase.
const FASTER: f64 = 1.02;

/// Returns the best row for one phase alone, by its speed: the choice, unless another is faster.
pub(super) fn best_in_phase<'a>(
    rows: &'a [Row],
    max_kl: f64,
    chosen: Option<&'a Row>,
    speed: fn(&Row) -> f64,
) -> Option<&'a Row> {
    let best = fastest(rows, max_kl, |row| 1.0 / speed(row))?;
    Some(chosen.filter(|chosen| speed(best) <= FASTER * speed(chosen)).unwrap_or(best))
}

/// Tokens per second of prompts.
pub(super) fn prompts(row: &Row) -> f64 {
    row.prefill.tokens_per_s[1]
}

/// Tokens per second of decoding.
pub(super) fn decoding(row: &Row) -> f64 {
    row.decode.tokens_per_s[1]
}

/// Says that prompts or decoding alone favour another precision.
fn phases(rows: &[Row], max_kl: f64, chosen: &Row) -> Option<String> {
    let faster = |what: &str, speed: fn(&Row) -> f64| {
        let best = best_in_phase(rows, max_kl, Some(chosen), speed)?;
        let gain = speed(best) / speed(chosen);
        let (name, now) = (best.precision.name, chosen.precision.name);
        (best.precision != chosen.precision)
            .then(|| format!("for {what} alone {name} ({gain:.2} times as fast as {now})"))
    };
    let found: Vec<String> =
        [faster("prompts", prompts), faster("decoding", decoding)].into_iter().flatten().collect();
    (!found.is_empty()).then(|| format!("phases: {}", found.join(", ")))
}

/// Names a faster precision beyond the limit of the loss.
fn faster(rows: &[Row], chosen: &Row, max_kl: f64) -> Option<String> {
    let beyond = |row: &&Row| {
        row.fits && row.refusal().is_none() && row.precision.measured_kl().is_some_and(|kl| kl > max_kl)
    };
    let best = rows.iter().filter(beyond).min_by(|a, b| a.seconds.total_cmp(&b.seconds))?;
    let gain = chosen.seconds / best.seconds;
    (gain > WORTH).then(|| {
        format!(
            "quality: {} would be {gain:.2} times as fast; its KL on our models is {:.4} nats/token",
            best.precision.name,
            best.precision.measured_kl().unwrap_or(f64::NAN)
        )
    })
}

/// Names the memory at which BF16 fits.
fn exact(rows: &[Row], chosen: &Row, memory: f64) -> Option<String> {
    let plain = rows.iter().find(|row| row.precision.is_dense())?;
    (!chosen.precision.is_dense() && !plain.fits).then(|| {
        format!(
            "memory: BF16 fits from {} on ({} more)",
            gb(plain.bytes.total()),
            gb(plain.bytes.total() - memory)
        )
    })
}

/// Returns the precision with the fewest bytes among those that run and lose no more than the limit.
fn smallest(rows: &[Row], max_kl: f64) -> Option<&Row> {
    let runs = |row: &&Row| row.refusal().is_none();
    let within = |row: &&Row| row.precision.measured_kl().is_some_and(|kl| kl <= max_kl);
    let least = |row: &Row| row.least.bytes.total();
    rows.iter().filter(runs).filter(within).min_by(|a, b| least(a).total_cmp(&least(b)))
}

/// Names a precision that fits with a short context.
fn short(shape: &ModelShape, load: &Load, rows: &[Row], memory: f64) -> Option<String> {
    let runs = rows.iter().filter(|row| row.refusal().is_none());
    let with = runs.filter_map(|row| {
        let longest =
            longest_context(shape, &row.precision, &row.kv, load.longest(shape), memory, load.split());
        (longest >= 256).then_some((row, longest))
    });
    let (row, longest) = with.max_by(|a, b| a.1.cmp(&b.1))?;
    Some(format!("context: {} fits with up to {longest} tokens in one sequence", row.precision.name))
}
