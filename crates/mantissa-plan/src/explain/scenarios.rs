//! The choice for typical uses: a device that is named, in place of the one at hand.

use super::value::{Args, Fault, Row, Subject, Value};
use crate::memory::inference;
use crate::parallel::{Parallel, Split};
use crate::precision::{KVS, PRECISIONS, Precision};
use crate::recommend::{Load, answer, train};
use crate::training::{Recompute, Run, Zero};

/// Choice for serving: device, tokens of each sequence, sequences.
pub(super) fn serving(subject: &Subject<'_>, args: &Args<'_>) -> Result<Vec<Row>, Fault> {
    let (shape, device) = (subject.deployment.shape, args.device(0)?);
    let (context, batch) = (args.count(1)?.min(shape.context), args.count(2)?);
    let Load { reduce_bits, max_kl, .. } = *subject.deployment.load;
    let load = Load { batch, reduce_bits, max_kl, ..Load::of_context(context, 1, Parallel::Tensor) };
    let found = answer(shape, &device, &load);
    let (choice, row) = (&found.recommendation, found.chosen());
    Ok(vec![vec![
        ("device", Value::text(&*device.title)),
        ("hardware", Value::text(&*device.name)),
        ("tokens", Value::Number(context as f64)),
        ("precision", Value::words(choice.precision)),
        ("kv", Value::words(choice.kv)),
        ("bytes", Value::number(row.map(|row| row.bytes.total()))),
        ("decode", Value::number(row.map(|row| row.decode.tokens_per_s[1]))),
        ("least", Value::number(found.least_bytes())),
        ("available", Value::Number(device.available())),
    ]])
}

/// Widest GGUF type with which a sequence of so many tokens (argument 1) fits into so many bytes (argument 0).
pub(super) fn fits_in(subject: &Subject<'_>, args: &Args<'_>) -> Result<Vec<Row>, Fault> {
    let shape = subject.deployment.shape;
    let (memory, context) = (args.number(0)?, args.count(1)?.min(shape.context));
    let bytes = |p: &Precision| inference(shape, p, &KVS[0], context, 1, Split::ONE).total();
    let types = || PRECISIONS.iter().filter(|p| p.convention == "gguf");
    let widest = types().find(|p| bytes(p) <= memory);
    Ok(vec![vec![
        ("tokens", Value::Number(context as f64)),
        ("precision", Value::words(widest.map(|p| p.name))),
        ("recipe", Value::words(widest.and_then(|p| p.recipe))),
        ("bytes", Value::number(widest.map(bytes))),
        ("least", Value::number(types().map(bytes).reduce(f64::min))),
    ]])
}

/// Choice for fine-tuning on one device that is named, with sequences of 2048 tokens.
pub(super) fn fine_tuning(subject: &Subject<'_>, args: &Args<'_>) -> Result<Vec<Row>, Fault> {
    let device = args.device(0)?;
    let run = Run { sequence: 2048, batch: 1, devices: 1, zero: Zero::None, recompute: Recompute::Layers };
    let found = train(subject.deployment.shape, &device, &run, 16, None, None);
    Ok(vec![vec![
        ("device", Value::text(&*device.title)),
        ("hardware", Value::text(&*device.name)),
        ("recipe", Value::words(found.recipe)),
        ("bytes", Value::number(found.chosen().map(|row| row.recomputed.total()))),
        ("least", Value::number(found.least_bytes())),
    ]])
}

/// Most devices that [`pretraining`] tries, as a power of two.
const MOST_DEVICES: u32 = 14;

/// Fewest devices of a name that hold training with an f32 master under ZeRO-3, with sequences of 4096 tokens.
pub(super) fn pretraining(subject: &Subject<'_>, args: &Args<'_>) -> Result<Vec<Row>, Fault> {
    let (shape, device) = (subject.deployment.shape, args.device(0)?);
    let sequence = shape.context.clamp(1, 4096);
    let of = |devices: u64| {
        let run = Run { sequence, batch: 1, devices, zero: Zero::Three, recompute: Recompute::Scores };
        let found = train(shape, &device, &run, 16, None, None);
        let bytes = found
            .rows
            .iter()
            .find(|row| row.name == "bf16" && row.fits)
            .map(|row| if row.needs_recompute { row.recomputed.total() } else { row.bytes.total() })?;
        Some((devices, bytes, found.tokens_per_s[1]))
    };
    let found = (0..=MOST_DEVICES).find_map(|power| of(1 << power));
    Ok(vec![vec![
        ("device", Value::text(&*device.title)),
        ("hardware", Value::text(&*device.name)),
        ("devices", Value::number(found.map(|(devices, ..)| devices as f64))),
        ("bytes", Value::number(found.map(|(_, bytes, _)| bytes))),
        ("rate", Value::number(found.map(|(.., rate)| rate))),
    ]])
}
