//! Ways in which devices share a model: what each of them holds and computes.
//!
//! Weights are counted as divided evenly; engines also replicate small ones (down-projections of latents, projections of
//! replicated key/value heads, norms). Sources: Megatron-LM (arXiv 1909.08053, section 3) for tensors; vLLM
//! `ModelConfig.get_num_kv_heads` (at least one head on each device) and its MLA backends (every device holds the
//! latent); SGLang `--enable-dp-attention` and DeepSeek-V3 (arXiv 2412.19437, section 3.4) for attention by sequence.

use serde::Serialize;

use crate::shape::{CacheLayers, Expanded, Matrices, ModelPart, ModelShape};

/// Part of the work that each device takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Parallel {
    /// A part of every matrix and its heads of every sequence (tensor parallelism).
    #[default]
    Tensor,
    /// The attention of its own sequences, with all weights of the attention; a part of every other matrix.
    Data,
    /// Its own sequences, with all weights but the routed experts, of which it holds a part.
    Expert,
    /// A part of the layers, for every sequence.
    Pipeline,
}

/// Every way, as [`Parallel::named`] finds it.
pub const PARALLELS: [Parallel; 4] = [Parallel::Tensor, Parallel::Data, Parallel::Expert, Parallel::Pipeline];

/// A way of sharing that does not exist.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("--parallel: expected tensor, data, expert or pipeline, got \"{0}\"")]
pub struct ParallelError(String);

impl Parallel {
    /// Finds a way by its name or by what engines call it, in any case.
    ///
    /// # Errors
    /// [`ParallelError`].
    pub fn named(name: &str) -> Result<Self, ParallelError> {
        match name.to_lowercase().as_str() {
            "tensor" | "tp" => Ok(Parallel::Tensor),
            "data" | "dp" | "dp-attention" => Ok(Parallel::Data),
            "expert" | "ep" => Ok(Parallel::Expert),
            "pipeline" | "pp" => Ok(Parallel::Pipeline),
            _ => Err(ParallelError(name.to_owned())),
        }
    }

    /// Returns the name.
    pub fn name(self) -> &'static str {
        match self {
            Parallel::Tensor => "tensor",
            Parallel::Data => "data",
            Parallel::Expert => "expert",
            Parallel::Pipeline => "pipeline",
        }
    }

    /// True if each device computes the attention of its own sequences only.
    pub fn divides_sequences(self) -> bool {
        matches!(self, Parallel::Data | Parallel::Expert)
    }

    /// True if the way exists for a model: experts are divided where there are experts.
    pub fn suits(self, shape: &ModelShape) -> bool {
        self != Parallel::Expert || shape.experts > 0
    }
}

/// Devices that share a model, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Split {
    /// Devices.
    pub devices: u64,
    /// Part of the work that each takes.
    pub by: Parallel,
}

impl Split {
    /// One device, which holds all.
    pub const ONE: Split = Split { devices: 1, by: Parallel::Tensor };

    /// Number of devices.
    pub(crate) fn n(&self) -> f64 {
        self.devices.max(1) as f64
    }

    /// Sequences of `batch` whose keys and values one device holds, the most of any.
    pub fn sequences(&self, batch: u64) -> u64 {
        let batch = batch.max(1);
        if self.by.divides_sequences() { batch.div_ceil(self.devices.max(1)) } else { batch }
    }

    /// Share of the layers that one device computes, the most of any.
    pub fn layers(&self, shape: &ModelShape) -> f64 {
        match self.by {
            Parallel::Pipeline => whole_share(shape.layers, self.devices),
            _ => 1.0,
        }
    }

    /// Time of the fullest of the stages of a pipeline over that of the mean one, for which the others wait; 1 for other ways.
    pub(crate) fn waiting(&self, shape: &ModelShape) -> f64 {
        match self.by {
            Parallel::Pipeline => self.n() * self.layers(shape),
            _ => 1.0,
        }
    }

    /// Share of these matrices that one device holds, the most of any.
    pub fn weights(&self, shape: &ModelShape, matrices: &Matrices) -> f64 {
        self.part(shape, matrices.part)
    }

    /// Share of a part of the layers that one device holds, the most of any.
    pub(crate) fn part(&self, shape: &ModelShape, part: ModelPart) -> f64 {
        match self.by {
            Parallel::Tensor => 1.0 / self.n(),
            Parallel::Pipeline => self.layers(shape),
            Parallel::Data if is_attention(part) => 1.0,
            Parallel::Data => 1.0 / self.n(),
            Parallel::Expert if part == ModelPart::Experts => whole_share(shape.experts, self.devices),
            Parallel::Expert => 1.0,
        }
    }

    /// Bytes of embedding, head and the rest that one device holds, the most of any; `[embedding, head, rest]` are those
    /// of all, the head 0 if it is the embedding.
    pub(crate) fn tables(&self, shape: &ModelShape, [embedding, head, rest]: [f64; 3]) -> f64 {
        match self.by {
            Parallel::Tensor | Parallel::Data => (embedding + head + rest) / self.n(),
            Parallel::Expert => embedding + head + rest,
            Parallel::Pipeline if self.devices > 1 => {
                // The first device has the embedding, the last the head; a tied table is on both.
                embedding.max(head) + rest * self.layers(shape)
            }
            Parallel::Pipeline => embedding + head + rest,
        }
    }

    /// Number of devices that read the same weights of a part in a step.
    pub(crate) fn readers(&self, part: ModelPart) -> f64 {
        let replicated = match self.by {
            Parallel::Tensor | Parallel::Pipeline => false,
            Parallel::Data => is_attention(part),
            Parallel::Expert => part != ModelPart::Experts,
        };
        if replicated { self.n() } else { 1.0 }
    }

    /// Keys and values of these layers that one device holds for a sequence: with tensor parallelism its heads, at least
    /// one, and all that belongs to no head; else all.
    pub fn cache(&self, cache: &CacheLayers) -> CacheLayers {
        if self.by != Parallel::Tensor || self.devices < 2 {
            return cache.clone();
        }
        let n = usize::try_from(self.devices).unwrap_or(usize::MAX);
        let all = cache.heads.max(1);
        let heads = all.div_ceil(n);
        let part = |elements: usize| elements / all * heads;
        CacheLayers {
            heads,
            keys: cache.shared + part(cache.keys.saturating_sub(cache.shared)),
            values: part(cache.values),
            queries: cache.queries.div_ceil(n),
            attended: cache.attended.div_ceil(n),
            expanded: cache
                .expanded
                .map(|wide| Expanded { queries: wide.queries.div_ceil(n), values: wide.values.div_ceil(n) }),
            ..cache.clone()
        }
    }

    /// Share of a sequence's recurrent states that a device of those that compute it holds.
    pub fn state(&self, shape: &ModelShape) -> f64 {
        match self.by {
            Parallel::Tensor => whole_share(shape.state_parts.max(1) as u64, self.devices),
            Parallel::Pipeline => self.layers(shape),
            Parallel::Data | Parallel::Expert => 1.0,
        }
    }

    /// Number of devices that hold a part of one sequence.
    pub(crate) fn holders(&self) -> f64 {
        if self.by.divides_sequences() { 1.0 } else { self.n() }
    }
}

/// True if the part mixes tokens of a sequence.
fn is_attention(part: ModelPart) -> bool {
    matches!(part, ModelPart::Attention | ModelPart::Mixer)
}

/// Share of `parts` indivisible parts that the fullest of `devices` devices holds.
fn whole_share(parts: u64, devices: u64) -> f64 {
    let parts = parts.max(1);
    parts.div_ceil(devices.max(1)) as f64 / parts as f64
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::memory::inference;
    use crate::precision::{Kv, Precision};

    fn kv_gb(model: &str, devices: u64, by: Parallel, batch: u64, context: u64) -> f64 {
        let (shape, kv) = (ModelShape::named(model).unwrap(), Kv::named("f16").unwrap());
        let precision = Precision::named("W8A8 FP8").unwrap();
        inference(&shape, &precision, &kv, context, batch, Split { devices, by }).kv / 1e9
    }

    /// DeepSeek-V3: 61 layers × (512 + 64) × 2 bytes = 70,272 bytes a token, which every device of a tensor-parallel
    /// group holds: × 64 × 32,768 = 147.4 GB. By sequence, 8 sequences each: 18.4 GB. By layers, 8 of 61 each: 19.3 GB.
    #[test]
    fn a_latent_cache_is_replicated() {
        let of = |by| kv_gb("DeepSeek-V3", 8, by, 64, 32_768);
        let all: f64 = 70_272.0 * 64.0 * 32_768.0 / 1e9;
        assert!((all - 147.37).abs() < 0.01);
        for (by, gb) in [
            (Parallel::Tensor, all),
            (Parallel::Data, all / 8.0),
            (Parallel::Expert, all / 8.0),
            (Parallel::Pipeline, all * 8.0 / 61.0),
        ] {
            assert!((of(by) / gb - 1.0).abs() < 1e-9, "{by:?}: {}", of(by));
        }
    }

    /// gpt-oss-20b: 24 layers of 32 experts with 2 × 2880 + 2880 biases; of 8 devices each has those of 4 experts.
    #[test]
    fn biases_of_experts_lie_with_them() {
        let shape = ModelShape::named("gpt-oss-20b").unwrap();
        let (precision, split) =
            (Precision::named("BF16").unwrap(), |devices| Split { devices, by: Parallel::Expert });
        let [one, eight] =
            [1, 8].map(|devices| crate::memory::table_bytes(&shape, &precision, split(devices)));
        assert_eq!(shape.expert_biases, 24 * 32 * 3 * 2880);
        assert_eq!(one - eight, 2.0 * (24 * 28 * 3 * 2880) as f64);
    }

    /// Heads on each of 1, 2, 4, 8, 16 devices: at least one, all heads together at least those of the model (vLLM,
    /// `get_num_kv_heads`: `max(1, total // tp)`; where it does not divide, the fullest device has one more).
    #[test]
    fn few_heads_are_replicated() {
        let on = |heads: usize, devices: u64| {
            let cache = CacheLayers {
                layers: 1,
                readers: 1,
                heads,
                shared: 0,
                keys: heads * 128,
                values: heads * 128,
                queries: 4096,
                attended: 4096,
                window: None,
                expanded: None,
                index: None,
            };
            let part = Split { devices, by: Parallel::Tensor }.cache(&cache);
            assert_eq!((part.keys, part.values), (part.heads * 128, part.heads * 128));
            part.heads
        };
        for (heads, held) in [
            (1, [1, 1, 1, 1, 1]),
            (2, [2, 1, 1, 1, 1]),
            (4, [4, 2, 1, 1, 1]),
            (8, [8, 4, 2, 1, 1]),
            (10, [10, 5, 3, 2, 1]),
        ] {
            assert_eq!([1, 2, 4, 8, 16].map(|devices| on(heads, devices)), held, "{heads}");
        }
        // Qwen3-30B-A3B: 4 heads on 8 devices: 48 layers × 2 × 128 × 2 bytes × 64 × 32,768 = 51.5 GB, twice an eighth.
        let kv = kv_gb("Qwen3-30B-A3B", 8, Parallel::Tensor, 64, 32_768);
        assert!((kv - 51.54).abs() < 0.01, "{kv}");
        // Llama 3.1 70B has 8 heads: an eighth each.
        let kv = kv_gb("Llama-3.1-70B", 8, Parallel::Tensor, 32, 8192);
        assert!((kv - 85.90 / 8.0).abs() < 0.01, "{kv}");
    }

    /// gpt-oss-20b: 12 layers of all tokens, 12 of 128; 8 heads on 16 devices are one each.
    #[test]
    fn windows_are_divided_as_their_heads_are() {
        let kv = kv_gb("gpt-oss-20b", 16, Parallel::Tensor, 1, 8192);
        assert!((kv - 12.0 * (8192.0 + 128.0) * 2.0 * 64.0 * 2.0 / 1e9).abs() < 1e-9, "{kv}");
    }

    /// States of 24 heads on 1, 4, 16, 64 devices: 24, 6, 2, 1 heads; what is not divided is held by all.
    #[test]
    fn states_are_divided_by_heads() {
        let mut shape = ModelShape::named("8B").unwrap();
        let share = |shape: &ModelShape, devices| Split { devices, by: Parallel::Tensor }.state(shape);
        shape.state_parts = 24;
        let shares = [1, 4, 16, 64].map(|devices| (24.0 * share(&shape, devices)).round());
        assert_eq!(shares, [24.0, 6.0, 2.0, 1.0]);
        shape.state_parts = 1;
        assert_eq!([1, 8].map(|devices| share(&shape, devices)), [1.0, 1.0]);
    }

    /// DeepSeek-V3 in FP8 on 8 devices: 671 GB of linear layers and 3.7 GB of tables, an eighth 84.2 GB. By sequence,
    /// the attention (11.4 B) is whole on each. By expert, all but the experts (17.5 B and the tables) is.
    #[test]
    fn weights_follow_the_split() {
        let (shape, kv) = (ModelShape::named("DeepSeek-V3").unwrap(), Kv::named("f16").unwrap());
        let precision = Precision::named("W8A8 FP8").unwrap();
        let of = |by| inference(&shape, &precision, &kv, 4096, 8, Split { devices: 8, by }).weights() / 1e9;
        let whole = inference(&shape, &precision, &kv, 4096, 8, Split::ONE).weights() / 1e9;
        let part = |part: ModelPart| -> f64 {
            let of = shape.matrices.iter().filter(|m| m.part == part);
            of.map(|m| m.weights() as f64).sum::<f64>() / 1e9
        };
        let (attention, experts) = (part(ModelPart::Attention), part(ModelPart::Experts));
        assert!((of(Parallel::Tensor) - whole / 8.0).abs() < 1e-9 && (whole / 8.0 - 84.1).abs() < 0.2);
        assert!(
            (of(Parallel::Data) - (whole + 7.0 * attention) / 8.0).abs() < 0.05,
            "{}",
            of(Parallel::Data)
        );
        let expected = whole - experts * 7.0 / 8.0;
        assert!((of(Parallel::Expert) - expected).abs() < 0.4, "{} {expected}", of(Parallel::Expert));
        assert!(of(Parallel::Pipeline) > whole / 8.0 && of(Parallel::Pipeline) < whole / 7.0);
    }

    #[test]
    fn ways_are_found_by_name() {
        for by in PARALLELS {
            assert_eq!(Parallel::named(by.name()), Ok(by));
        }
        assert_eq!(Parallel::named("TP"), Ok(Parallel::Tensor));
        assert!(Parallel::named("sequence").unwrap_err().to_string().contains("pipeline"));
        assert!(!Parallel::Expert.suits(&ModelShape::named("8B").unwrap()));
        assert!(Parallel::Expert.suits(&ModelShape::named("30B-A3B").unwrap()));
    }
}
