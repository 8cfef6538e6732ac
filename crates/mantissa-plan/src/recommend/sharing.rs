//! Effects of several devices: copies of the KV cache, other ways of sharing, and how many devices are enough.

use super::row::{Load, Row};
use super::words::{gb, rate};
use crate::hardware::Device;
use crate::memory::inference;
use crate::parallel::{PARALLELS, Parallel, Split};
use crate::roofline::Setup;
use crate::shape::ModelShape;

/// Returns how often the devices hold the cache of a sequence together, over one device that holds it alone.
fn copies_of(shape: &ModelShape, row: &Row, load: &Load) -> f64 {
    let split = load.split();
    let whole = row.kv.bytes_on_device(shape, load.context, Split::ONE);
    if whole == 0.0 || split.by != Parallel::Tensor {
        return 1.0;
    }
    split.n() * row.kv.bytes_on_device(shape, load.context, split) / whole
}

/// Says that devices hold keys and values more than once.
pub(super) fn copies(shape: &ModelShape, row: &Row, load: &Load) -> Option<String> {
    let copies = copies_of(shape, row, load);
    let why = match shape.caches.iter().any(|cache| cache.shared > 0) {
        true => "latents are needed by every head, and so by every device".to_owned(),
        false => {
            format!("{} key/value heads are fewer than they divide, or do not divide evenly", shape.kv_heads)
        }
    };
    (copies > 1.01)
        .then(|| format!("the {} devices hold {copies:.1} copies of the KV cache: {why}", load.devices))
}

/// Names the other ways of sharing, with their bytes on each device and their speed, where keys and values are held more
/// than once, or nothing fits.
pub(super) fn others(
    shape: &ModelShape,
    device: &Device,
    load: &Load,
    row: &Row,
    memory: f64,
) -> Vec<String> {
    if load.devices < 2 || (row.fits && copies_of(shape, row, load) < 1.01) {
        return Vec::new();
    }
    let ways = PARALLELS.into_iter().filter(|by| *by != load.parallel && by.suits(shape));
    let line = |by: Parallel| {
        let split = Split { by, ..load.split() };
        let bytes = inference(shape, &row.precision, &row.kv, load.context, load.batch, split);
        let (precision, kv, reduce_bits) = (&row.precision, &row.kv, load.reduce_bits);
        let speed =
            Setup { shape, precision, kv, device, split, reduce_bits }.decode(load.batch, load.depth());
        format!(
            "--parallel {}: {} on each device ({} weights, {} KV cache in {}), which {}; decoding {} tok/s, now {}",
            by.name(),
            gb(bytes.total()),
            gb(bytes.weights()),
            gb(bytes.kv),
            row.kv.name,
            if bytes.total() <= memory { "fits" } else { "does not fit" },
            rate(speed.tokens_per_s[1]),
            rate(row.decode.tokens_per_s[1])
        )
    };
    ways.map(line).collect()
}

/// Names the number of devices that hold a precision.
pub(super) fn devices(shape: &ModelShape, load: &Load, row: &Row, memory: f64) -> Option<String> {
    let holds = |devices: u64| {
        let split = Split { devices, by: load.parallel };
        inference(shape, &row.precision, &row.kv, load.context, load.batch, split).total() <= memory
    };
    let n = (1..=12).map(|power| 1u64 << power).find(|n| *n > load.devices && holds(*n))?;
    Some(format!("devices: {n} of them hold {} (--devices {n})", row.precision.name))
}
