//! Layers of a GGUF model that a GPU holds beside the host, as llama.cpp splits them with `-ngl`.
//!
//! llama.cpp, `llama_model::load_tensors`: of the layers and the output layer after them, the last `-ngl` are on the GPU, each with
//! its keys and values; the embedding is always on the host (`dev_input`). Buffers of a step are on the GPU.

use serde::Serialize;

use super::row::{Load, Row};
use crate::hardware::{Device, Host};
use crate::memory::{head_bytes, linear_bytes};
use crate::roofline::Setup;
use crate::shape::ModelShape;

/// Engine that splits layers so.
const ENGINE: &str = "llama.cpp";

/// Split of a model between a GPU and the host.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Offload {
    /// Value of `-ngl`: layers on the GPU, the output layer counted first.
    pub gpu_layers: u64,
    /// Layers of the model, with the output layer.
    pub layers: u64,
    /// Bytes on the GPU.
    pub gpu_bytes: f64,
    /// Bytes on the host.
    pub host_bytes: f64,
    /// True if the host is not known to have too little memory.
    pub fits: bool,
    /// Predicted tokens/s of decoding: low, middle, high.
    pub tokens_per_s: [f64; 3],
}

/// Splits a row that does not fit; `None` where llama.cpp does not load it, where the device shares its memory with the processor,
/// and for several devices.
///
/// Layers count as equal: where a file type gives some more bits, or a window shortens some caches, the mean stands for each.
pub(super) fn offload(
    shape: &ModelShape,
    device: &Device,
    load: &Load,
    row: &Row,
    memory: f64,
) -> Option<Offload> {
    let loaded = row.precision.convention == "gguf" && row.loads.engines.contains(&ENGINE);
    if row.fits || !loaded || device.maker.shares_memory() || load.devices != 1 || shape.layers == 0 {
        return None;
    }
    let (n, precision) = (shape.layers as f64, &row.precision);
    let head = head_bytes(shape, precision);
    let embedding = precision.table_bytes(usize::from(shape.tied), shape.embedding, shape.hidden);
    let layer = (linear_bytes(shape, precision) + 2.0 * shape.others as f64 + row.bytes.kv) / n;
    let spare = memory - row.bytes.activations - head;
    // The output layer comes first.
    let gpu_layers = if spare < 0.0 { 0 } else { 1 + ((spare / layer).floor().min(n) as u64) };
    let on_gpu = gpu_layers.saturating_sub(1) as f64;
    let (gpu_bytes, own_head) = match gpu_layers {
        // A head that is the embedding is not stored twice on the host.
        0 => (0.0, if shape.tied { 0.0 } else { head }),
        _ => (row.bytes.activations + head + on_gpu * layer, 0.0),
    };
    let host_bytes = embedding + own_head + (n - on_gpu) * layer;
    let setup =
        Setup { shape, precision, kv: &row.kv, device, split: load.split(), reduce_bits: load.reduce_bits };
    let reads = setup.reads(load.batch, load.depth());
    let (on, below) = match gpu_layers {
        0 => (0.0, reads.head + reads.layers),
        _ => (reads.head + on_gpu / n * reads.layers, (n - on_gpu) / n * reads.layers),
    };
    let Host { bandwidth, memory: most, .. } = load.host;
    let share = load.host.share();
    let seconds = [0, 1, 2].map(|which| {
        on / (device.bandwidth * device.shares.bandwidth[which]) + below / (bandwidth * share[which])
    });
    Some(Offload {
        gpu_layers,
        layers: shape.layers + 1,
        gpu_bytes,
        host_bytes,
        fits: most.is_none_or(|most| host_bytes <= most),
        tokens_per_s: seconds.map(|seconds| load.batch.max(1) as f64 / seconds),
    })
}

/// Returns the row whose split decodes fastest, of those within a limit of the loss whose host has the memory.
pub(super) fn fastest_split(rows: &[Row], max_kl: f64) -> Option<(&Row, Offload)> {
    let within = |row: &&Row| row.precision.measured_kl().is_some_and(|kl| kl <= max_kl);
    let splits = rows.iter().filter(within).filter_map(|row| Some((row, row.offload?)));
    splits
        .filter(|(_, split)| split.fits && split.gpu_layers > 0)
        .max_by(|a, b| a.1.tokens_per_s[1].total_cmp(&b.1.tokens_per_s[1]))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::parallel::Parallel;
    use crate::recommend::{Answer, answer};

    fn planned(model: &str, device: &str, host: Host) -> Answer {
        let load = Load { host, ..Load::of_context(4096, 1, Parallel::Tensor) };
        answer(&ModelShape::named(model).unwrap(), &Device::named(device).unwrap(), &load)
    }

    fn split(model: &str, device: &str, name: &str) -> Option<Offload> {
        let found = planned(model, device, Host::default());
        found.rows.iter().find(|row| row.precision.name == name).unwrap().offload
    }

    /// Llama-3.1-70B in Q4_K_M on 24 GB: 80 layers of 855,638,016 weights; values and `down` of half of them in Q6_K. The
    /// head of 128,256 × 8192 in Q6_K is 862 MB, f16 keys and values of 4096 tokens 16.8 MB a layer.
    #[test]
    fn layers_fill_the_card_from_the_output_on() {
        let found = split("Llama-3.1-70B", "rtx4090", "Q4_K_M").unwrap();
        assert_eq!(found.layers, 81);
        let shape = ModelShape::named("Llama-3.1-70B").unwrap();
        let precision = crate::precision::Precision::named("Q4_K_M").unwrap();
        let layer = (linear_bytes(&shape, &precision) + 2.0 * shape.others as f64) / 80.0 + 4096.0 * 4096.0;
        let head = 128_256.0 * 8192.0 * 6.5625 / 8.0;
        let memory = Device::named("rtx4090").unwrap().available();
        assert!(found.gpu_bytes <= memory && found.gpu_bytes + layer > memory, "{found:?}");
        let n = (found.gpu_layers - 1) as f64;
        let embedding = 128_256.0 * 8192.0 * 4.5 / 8.0;
        assert!((found.host_bytes - embedding - (80.0 - n) * layer).abs() < 1e3, "{found:?}");
        // Most of the time is the host's: (80 - n) layers over 89.6 GB/s × .87.
        let weights = (80.0 - n) * linear_bytes(&shape, &precision) / 80.0;
        let host = weights / (89.6e9 * 0.87);
        let gpu = (n * linear_bytes(&shape, &precision) / 80.0 + head) / (1.008e12 * 0.7);
        let rate = 1.0 / (host + gpu);
        assert!((found.tokens_per_s[1] / rate - 1.0).abs() < 0.04, "{found:?} {rate}");
    }

    #[test]
    fn only_what_llama_cpp_loads_and_does_not_fit_is_split() {
        assert_eq!(split("Llama-3.1-70B", "rtx4090", "W4A16 INT4"), None);
        assert_eq!(split("Llama-3.1-8B", "rtx4090", "Q4_K_M"), None);
        // A Mac's GPU shares the memory with its processor.
        assert_eq!(split("Llama-3.1-70B", "m3", "Q4_K_M"), None);
        // Nothing but the head's own bytes fits nowhere: all on the host.
        let tiny = Device::from_figures("bandwidth=1TB/s,memory=1GB,bf16=1T").unwrap();
        let load = Load::of_context(4096, 1, Parallel::Tensor);
        let found = answer(&ModelShape::named("Llama-3.1-70B").unwrap(), &tiny, &load);
        let row = found.rows.iter().find(|row| row.precision.name == "Q4_K_M").unwrap();
        let found = row.offload.unwrap();
        assert_eq!((found.gpu_layers, found.gpu_bytes), (0, 0.0));
        assert!((found.host_bytes - row.bytes.weights() - row.bytes.kv).abs() < 1e3);
    }

    #[test]
    fn the_host_decides_what_is_offered() {
        let small = Host { memory: Some(8e9), ..Host::default() };
        let found = planned("Llama-3.1-70B", "rtx4090", small);
        assert!(
            found
                .rows
                .iter()
                .filter_map(|row| row.offload)
                .all(|split| !split.fits || split.host_bytes <= 8e9)
        );
        let rate = |bandwidth| {
            let host = Host { bandwidth, ..Host::default() };
            let found = planned("Llama-3.1-70B", "rtx4090", host);
            found.rows.iter().find_map(|row| row.offload).unwrap().tokens_per_s[1]
        };
        assert!(rate(200e9) > 1.8 * rate(100e9));
        let lines = planned("Llama-3.1-70B", "rtx4090", Host::default()).recommendation.changes.join("\n");
        assert!(lines.contains("-ngl") && lines.contains("of 81"), "{lines}");
    }
}
