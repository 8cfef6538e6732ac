//! Bytes of a model in inference. [`training`](crate::training) has the bytes of training.

use serde::Serialize;

use crate::parallel::{Parallel, Split};
use crate::precision::{Kv, Precision};
use crate::shape::{CacheLayers, ModelPart, ModelShape};

/// Tokens of a prompt that an engine computes at once (vLLM: `max_num_batched_tokens`).
pub const CHUNK: u64 = 2048;

/// Bytes of inference by purpose.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Inference {
    /// Linear layers of the decoder, scales included.
    pub linears: f64,
    /// Embedding, head, norms, biases and routers.
    pub tables: f64,
    /// KV caches and recurrent states.
    pub kv: f64,
    /// Activations of a chunk of a prompt, and logits.
    pub activations: f64,
}

impl Inference {
    /// Bytes of the weights.
    pub fn weights(&self) -> f64 {
        self.linears + self.tables
    }

    /// Bytes of all.
    pub fn total(&self) -> f64 {
        self.weights() + self.kv + self.activations
    }
}

/// Bytes of the linear layers.
pub fn linear_bytes(shape: &ModelShape, precision: &Precision) -> f64 {
    let of = |m: &crate::shape::Matrices| m.count as f64 * precision.matrix_bytes(shape, m);
    shape.matrices.iter().map(of).sum()
}

/// Bytes of the head, which every token reads.
pub fn head_bytes(shape: &ModelShape, precision: &Precision) -> f64 {
    precision.table_bytes(1, shape.vocab * shape.hidden, shape.hidden)
}

/// Bytes of embedding, head and what is never quantized on a device. A tied table is stored once, as the head.
pub fn table_bytes(shape: &ModelShape, precision: &Precision, split: Split) -> f64 {
    let which = usize::from(shape.tied);
    let embedding = precision.table_bytes(which, shape.embedding, shape.hidden);
    let head = if shape.tied { 0.0 } else { head_bytes(shape, precision) };
    let (biases, others) = (shape.expert_biases, shape.others.saturating_sub(shape.expert_biases));
    split.tables(shape, [embedding, head, 2.0 * others as f64])
        + 2.0 * biases as f64 * split.part(shape, ModelPart::Experts)
}

/// Bytes of activations and logits on a device with `batch` sequences of `context` tokens.
pub fn activation_bytes(shape: &ModelShape, context: u64, batch: u64, split: Split) -> f64 {
    let own = split.sequences(batch);
    let chunk = CHUNK.min(context.saturating_mul(own)) as f64;
    // Residual stream, its normed copy, q, k, v, attended values, latents; gate, up and their product: 2 bytes each. Tensor
    // parallelism divides what follows a matrix, not the stream.
    let width = |c: &CacheLayers| {
        let c = split.cache(c);
        c.expanded.map_or(c.queries + c.keys + c.values + c.attended, |wide| {
            2 * (wide.queries + wide.values) + c.keys
        })
    };
    let widest = shape.caches.iter().map(width).max().unwrap_or(0);
    let inner =
        if split.by == Parallel::Tensor { shape.inner as f64 / split.n() } else { shape.inner as f64 };
    let token_bytes = 2.0 * (2.0 * shape.hidden as f64 + 3.0 * inner) + 2.0 * widest as f64;
    let rows = if split.by == Parallel::Expert { own } else { batch.max(1) };
    chunk * token_bytes + 4.0 * shape.vocab as f64 * rows as f64
}

/// Bytes of inference with `batch` sequences of `context` tokens, on the fullest device.
pub fn inference(
    shape: &ModelShape,
    precision: &Precision,
    kv: &Kv,
    context: u64,
    batch: u64,
    split: Split,
) -> Inference {
    let linears = |m: &crate::shape::Matrices| {
        split.weights(shape, m) * m.count as f64 * precision.matrix_bytes(shape, m)
    };
    Inference {
        linears: shape.matrices.iter().map(linears).sum(),
        tables: table_bytes(shape, precision, split),
        kv: split.sequences(batch) as f64 * kv.bytes_on_device(shape, context, split),
        activations: activation_bytes(shape, context, batch, split),
    }
}

/// Most sequences that [`concurrency`] reports.
const MOST_SEQUENCES: u64 = 1 << 40;

/// Number of sequences of `context` tokens whose KV caches fit beside the weights into `memory` bytes of each device.
pub fn concurrency(
    shape: &ModelShape,
    precision: &Precision,
    kv: &Kv,
    context: u64,
    memory: f64,
    split: Split,
) -> u64 {
    let fits = |batch: u64| inference(shape, precision, kv, context, batch, split).total() <= memory;
    if !fits(1) {
        return 0;
    }
    let (mut low, mut high) = (1, MOST_SEQUENCES);
    while low < high {
        let middle = low + (high - low).div_ceil(2);
        if fits(middle) { low = middle } else { high = middle - 1 }
    }
    low
}

/// Longest context of one sequence that fits beside the weights into `memory` bytes of each device, at most `most`.
pub fn longest_context(
    shape: &ModelShape,
    precision: &Precision,
    kv: &Kv,
    most: u64,
    memory: f64,
    split: Split,
) -> u64 {
    let fits = |context: u64| inference(shape, precision, kv, context, 1, split).total() <= memory;
    if !fits(1) {
        return 0;
    }
    let (mut low, mut high) = (1, most.max(1));
    while low < high {
        let middle = (low + high).div_ceil(2);
        if fits(middle) { low = middle } else { high = middle - 1 }
    }
    low
}

/// Says how many sequences of `context` tokens fit, and the longest one.
pub(crate) fn capacity(sequences: u64, context: u64, longest: u64) -> String {
    let many = match sequences {
        0 => format!("no sequence of {context} tokens"),
        1 => format!("one sequence of {context} tokens"),
        n => format!("{n} sequences of {context} tokens"),
    };
    match (sequences, longest) {
        (0, 0) => many,
        (0, _) => format!("{many}, one of {longest}"),
        // The limit is that of the model, not of the memory.
        (_, longest) if longest <= context => many,
        _ => format!("{many}, or one of {longest}"),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn capacities_are_sentences() {
        assert_eq!(capacity(0, 4096, 0), "no sequence of 4096 tokens");
        assert_eq!(capacity(0, 4096, 100), "no sequence of 4096 tokens, one of 100");
        assert_eq!(capacity(1, 4096, 5000), "one sequence of 4096 tokens, or one of 5000");
        assert_eq!(capacity(2, 8192, 8192), "2 sequences of 8192 tokens");
        assert_eq!(capacity(3, 4096, 9000), "3 sequences of 4096 tokens, or one of 9000");
    }

    fn family(name: &str) -> ModelShape {
        ModelShape::named(name).unwrap()
    }

    #[test]
    fn published_kv_sizes() {
        let f16 = Kv::named("f16").unwrap();
        // Llama 3 70B: 80 layers × 8 heads × 128 × 2 × 2 bytes.
        let shape = family("Llama-3.1-70B");
        assert_eq!(f16.bytes_per_token(&shape), 327_680.0);
        assert!((32.0 * f16.bytes_of_sequence(&shape, 8192) / 1e9 - 85.9).abs() < 0.05);
        // DeepSeek-V3: 61 layers × 576 × 2 bytes, 70 kB (2412.19437, and 2505.09343 table 1: 70.272 kB).
        assert_eq!(f16.bytes_per_token(&family("DeepSeek-V3")), 70_272.0);
        // Llama 3.1 405B: 516 kB, Qwen2.5 72B: 327 kB (2505.09343, table 1).
        assert_eq!(f16.bytes_per_token(&family("Llama-3.1-405B")), 516_096.0);
    }

    #[test]
    fn a_32b_model_fits_a_24_gb_gpu_in_four_bits_only_with_a_quantized_cache() {
        let shape = family("32B");
        let memory = crate::hardware::Device::named("rtx4090").unwrap().available();
        let total = |precision: &str, kv: &str| {
            let (precision, kv) = (Precision::named(precision).unwrap(), Kv::named(kv).unwrap());
            inference(&shape, &precision, &kv, 32_768, 1, Split::ONE).total()
        };
        assert!(total("BF16", "f16") > 65e9);
        assert!(total("W4A16 INT4", "f16") > memory && total("W4A16 INT4", "fp8") < memory);
    }

    #[test]
    fn more_memory_holds_more_sequences() {
        let (shape, kv) = (family("8B"), Kv::named("f16").unwrap());
        let of = |name: &str, memory| {
            concurrency(&shape, &Precision::named(name).unwrap(), &kv, 8192, memory, Split::ONE)
        };
        assert_eq!(of("BF16", 10e9), 0);
        assert!(of("W8A8 FP8", 80e9) > of("BF16", 80e9));
        let bf16 = Precision::named("BF16").unwrap();
        let longest = longest_context(&shape, &bf16, &kv, shape.context, 24e9, Split::ONE);
        assert!((20_000..60_000).contains(&longest), "{longest}");
    }
}
