//! The choice of a precision for a model, a device and a load, with its reasons and what would change it.

mod choice;
mod loads;
mod offload;
mod reasons;
mod row;
mod sharing;
mod train;
mod words;

use serde::Serialize;

use crate::contract::Engine;
use crate::hardware::Device;
use crate::precision::{CANDIDATES, Precision};
use crate::shape::ModelShape;
use row::{choose, row, shown};

pub use choice::{Entry, best};
pub use loads::{Loads, Refusal, loads};
pub use offload::Offload;
pub use row::{Load, MAX_KL, Row, SMALL_MODEL, USUAL_CONTEXT, answer_of, prompt_of};
pub use train::{TrainAnswer, TrainRow, train};
pub use words::{gb, rate};

/// Limit for small models: indistinguishable on our models.
const SMALL_MODEL_KL: f64 = 0.0035;

/// Recommended precisions with reasons.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Recommendation {
    /// Precision for the whole load; `None` if none fits.
    pub precision: Option<&'static str>,
    /// Recipe of it.
    pub recipe: Option<&'static str>,
    /// Checkpoint format of it.
    pub format: Option<&'static str>,
    /// Nominal bits per weight of it.
    pub bits: Option<u32>,
    /// Storage of keys and values.
    pub kv: Option<&'static str>,
    /// Precision whose split with the host decodes fastest, where nothing fits the GPU alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub split: Option<&'static str>,
    /// Best precision for prompts alone: the choice, unless another is faster.
    pub prefill: Option<&'static str>,
    /// Best precision for decoding alone, likewise.
    pub decode: Option<&'static str>,
    /// Reasons.
    pub reasons: Vec<String>,
    /// What would change it.
    pub changes: Vec<String>,
}

/// Answer: candidates and the choice.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Answer {
    /// Candidates, from many bits to few.
    pub rows: Vec<Row>,
    /// Choice.
    pub recommendation: Recommendation,
}

impl Answer {
    /// Returns the row of the choice.
    pub fn chosen(&self) -> Option<&Row> {
        let name = self.recommendation.precision?;
        self.rows.iter().find(|row| row.precision.name == name)
    }

    /// Returns the row whose split with the host is named, with the split.
    pub fn split(&self) -> Option<(&Row, Offload)> {
        let name = self.recommendation.split?;
        let row = self.rows.iter().find(|row| row.precision.name == name)?;
        Some((row, row.offload?))
    }

    /// Fewest bytes that any row that runs takes on a device, with its smallest KV cache.
    pub fn least_bytes(&self) -> Option<f64> {
        let runs = self.rows.iter().filter(|row| row.refusal().is_none());
        runs.map(|row| row.least.bytes.total()).reduce(f64::min)
    }
}

/// What a choice is restricted to.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Wish {
    /// Engine that is to run it; any of the device if `None`.
    pub engine: Option<&'static Engine>,
    /// Nominal bits per weight. The loss is not limited then.
    pub bits: Option<u32>,
}

impl Wish {
    /// Returns the limit of the measured loss, nats/token: `max_kl`, or less for a small model.
    pub fn limit(&self, shape: &ModelShape, max_kl: f64) -> f64 {
        match (self.bits, shape.parameters() < SMALL_MODEL) {
            (Some(_), _) => f64::INFINITY,
            (None, true) => max_kl.min(SMALL_MODEL_KL),
            (None, false) => max_kl,
        }
    }
}

/// Evaluates every candidate of a wish, and the unquantized model.
pub fn evaluate(shape: &ModelShape, device: &Device, load: &Load, wish: &Wish) -> Vec<Row> {
    let asked = |row: &&Precision| row.is_dense() || wish.bits.is_none_or(|bits| bits == row.nominal);
    let rows = CANDIDATES.iter().filter(asked);
    rows.map(|precision| row(shape, device, load, wish.engine, precision)).collect()
}

/// Evaluates every precision and chooses.
pub fn answer(shape: &ModelShape, device: &Device, load: &Load) -> Answer {
    answer_to(shape, device, load, &Wish::default())
}

/// Evaluates every precision of a wish and chooses.
pub fn answer_to(shape: &ModelShape, device: &Device, load: &Load, wish: &Wish) -> Answer {
    let rows = shown(evaluate(shape, device, load, wish), wish.engine);
    let max_kl = wish.limit(shape, load.max_kl);
    // Who names bits wants to quantize.
    let quantized: Vec<Row>;
    let choices = match wish.bits {
        Some(_) => {
            quantized = rows.iter().filter(|row| !row.precision.is_dense()).cloned().collect();
            &quantized
        }
        None => &rows,
    };
    let chosen = choose(choices, max_kl, |row| row.seconds);
    let phase = |speed: fn(&Row) -> f64| {
        reasons::best_in_phase(choices, max_kl, chosen, speed).map(|row| row.precision.name)
    };
    let split = offload::fastest_split(&rows, max_kl).filter(|_| chosen.is_none());
    let recommendation = Recommendation {
        precision: chosen.map(|row| row.precision.name),
        recipe: chosen.and_then(|row| row.precision.recipe),
        format: chosen.filter(|row| !row.precision.is_dense()).map(|row| row.precision.convention),
        bits: chosen.map(|row| row.precision.nominal),
        kv: chosen.map(|row| row.kv.name),
        split: split.map(|(row, _)| row.precision.name),
        prefill: phase(reasons::prompts),
        decode: phase(reasons::decoding),
        reasons: reasons::reasons(shape, device, load, &rows, chosen, max_kl),
        changes: reasons::changes(shape, device, load, &rows, chosen, max_kl),
    };
    Answer { rows, recommendation }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::hardware::Host;
    use crate::parallel::{PARALLELS, Parallel};

    fn load() -> Load {
        Load {
            context: 4096,
            batch: 1,
            prefill: 1024,
            decode: 512,
            devices: 1,
            parallel: Parallel::Tensor,
            reduce_bits: 16.0,
            kv: None,
            max_kl: MAX_KL,
            memory: None,
            host: Host::default(),
        }
    }

    fn recommended(model: &str, device: &str, load: Load) -> Answer {
        answer(&ModelShape::named(model).unwrap(), &Device::named(device).unwrap(), &load)
    }

    #[test]
    fn the_question_of_a_new_user_is_answered() {
        let found = recommended("32B", "4090", Load { context: 32_768, ..load() });
        let choice = found.recommendation;
        assert!(
            ["W4A16 INT4", "Q4_K_M", "IQ4_XS", "W4A16 NVFP4"].contains(&choice.precision.unwrap()),
            "{choice:?}"
        );
        assert_ne!(choice.kv, Some("f16"));
        assert!(!found.rows[0].fits && !choice.reasons.is_empty() && !choice.changes.is_empty());
    }

    #[test]
    fn load_and_hardware_change_the_choice() {
        let of = |model: &str, device: &str, load| {
            recommended(model, device, load).recommendation.precision.unwrap()
        };
        // Large batches on Hopper: FP8 products.
        assert_eq!(of("8B", "h100", Load { batch: 256, context: 1024, ..load() }), "W8A8 FP8");
        // No FP8 on Ampere.
        assert_eq!(of("8B", "a100", Load { batch: 256, context: 1024, ..load() }), "W8A8 INT8");
        // One user: few bytes.
        assert!(of("8B", "h100", load()).contains('4'));
        // A small model loses more than it saves in four bits.
        assert!(!of("0.5B", "4090", load()).contains('4'));
    }

    #[test]
    fn what_no_kernel_runs_is_refused_by_name() {
        let found = recommended("8B", "h100", load());
        let row = found.rows.iter().find(|row| row.precision.name == "W4A4 NVFP4").unwrap();
        assert!(row.refusal().unwrap().starts_with("runs as W4A16"));
        let found = recommended("8B", "a100", load());
        let row = found.rows.iter().find(|row| row.precision.name == "W8A8 FP8").unwrap();
        assert!(row.refusal().unwrap().starts_with("runs as W8A16"));
    }

    /// DeepSeek-V3 in FP8 on 8 H200 with 64 × 32,768 tokens: 84 GB of weights and 147 GB of latents on each; with
    /// attention by sequence 18.4 GB of latents (arXiv 2412.19437, section 3.4.2, serves it so).
    #[test]
    fn a_replicated_cache_is_said_with_ways_around_it() {
        let wide = Load {
            devices: 8,
            batch: 64,
            context: 32_768,
            prefill: 30_000,
            decode: 1024,
            kv: crate::precision::Kv::named("f16").ok(),
            ..load()
        };
        let found = recommended("DeepSeek-V3", "h200", wide);
        let row = found.rows.iter().find(|row| row.precision.name == "W8A8 FP8").unwrap();
        assert!(!row.fits && (row.bytes.kv / 1e9 - 147.37).abs() < 0.01, "{:?}", row.bytes);
        assert!((row.bytes.weights() / 1e9 - 84.1).abs() < 0.2, "{:?}", row.bytes);
        let lines = found.recommendation.changes.join("\n");
        assert!(lines.contains("--parallel data") && lines.contains("--parallel expert"), "{lines}");
        let by = |parallel| {
            let found = recommended("DeepSeek-V3", "h200", Load { parallel, ..wide });
            let row = found.rows.iter().find(|row| row.precision.name == "W8A8 FP8").unwrap().clone();
            (row.fits, row.decode.tokens_per_s[1])
        };
        assert!(by(Parallel::Data).0 && by(Parallel::Pipeline).0);
        // A step reads an eighth of the latents.
        assert!(by(Parallel::Data).1 > 1.2 * by(Parallel::Tensor).1, "{:?}", PARALLELS.map(by));
        // Nothing is replicated: nothing is said.
        let found = recommended("70B", "h100", Load { devices: 8, ..load() });
        let lines = found.recommendation.reasons.join("\n") + &found.recommendation.changes.join("\n");
        assert!(!lines.contains("copies") && !lines.contains("--parallel"), "{lines}");
    }

    /// Apple's GPUs run mlx-lm beside llama.cpp; other devices do not.
    #[test]
    fn apple_is_offered_mlx() {
        let found = recommended("8B", "m4-max", load());
        let row = found.rows.iter().find(|row| row.precision.name == "MLX 4-bit").unwrap();
        assert_eq!((row.refusal(), row.loads.engines.as_slice()), (None, ["mlx-lm"].as_slice()));
        // 4 bits and an f16 scale and bias for 64 weights.
        assert!(
            (row.bytes.linears * 8.0 / ModelShape::named("8B").unwrap().linear_weights() as f64 - 4.5).abs()
                < 1e-9
        );
        assert!(recommended("8B", "h100", load()).rows.iter().all(|row| row.precision.convention != "mlx"));
    }

    fn row_of(model: &str, device: &str, name: &str) -> Option<Row> {
        recommended(model, device, load()).rows.into_iter().find(|row| row.precision.name == name)
    }

    /// Low-bit inputs are offered only where an engine multiplies them natively: INT4 with FP8 on Hopper in vLLM, MX formats from
    /// Blackwell on, MXFP4 also on an MI355X, from AMD Quark.
    #[test]
    fn native_candidates_are_offered_where_they_run() {
        let low = ["W4A8 INT4-FP8", "W8A8 MXFP8", "W4A4 MXFP4"];
        for (device, offered) in [
            ("a100", [false; 3]),
            ("rtx4090", [false; 3]),
            ("h100", [true, false, false]),
            ("b200", [false, true, true]),
            ("mi300x", [false; 3]),
            ("mi355x", [false, false, true]),
            ("m4-max", [false; 3]),
        ] {
            let found = low.map(|name| row_of("8B", device, name));
            assert_eq!(found.each_ref().map(Option::is_some), offered, "{device}");
            for row in found.into_iter().flatten() {
                assert_eq!((row.refusal(), row.loads.engines.as_slice()), (None, ["vLLM"].as_slice()));
                assert_eq!(row.execution.fallback, None, "{device}");
                assert_eq!(
                    row.loads.elsewhere.map(|other| other.tool),
                    (device == "mi355x").then_some("AMD Quark")
                );
            }
        }
    }

    /// Qwen3-30B-A3B: 48 layers of 128 experts of 3 × 2048 × 768 in int4 with groups of 128 (4.15625 bits); attention
    /// (2 × 4096 + 2 × 512) × 2048 in bf16.
    #[test]
    fn experts_are_stored_apart() {
        let row = row_of("30B-A3B", "h100", "W4A16 INT4 experts").unwrap();
        let experts = (48_u64 * 128 * 3 * 2048 * 768) as f64 * 4.15625 / 8.0;
        let attention = (48_u64 * (2 * 4096 + 2 * 512) * 2048) as f64 * 2.0;
        assert!((row.bytes.linears / (experts + attention) - 1.0).abs() < 1e-6, "{:?}", row.bytes);
        assert!(row.loads.engines.contains(&"vLLM") && row.precision.measured_kl().is_some());
        assert!(row_of("8B", "h100", "W4A16 INT4 experts").is_none());
        // A token reads attention in 16 bits, so that it decodes slower than all layers in int4, and faster than bf16.
        let rate = |name: &str| row_of("30B-A3B", "h100", name).unwrap().decode.tokens_per_s[1];
        let apart = row.decode.tokens_per_s[1];
        assert!(rate("BF16") < apart && apart < rate("W4A16 INT4"), "{apart}");
    }

    /// Rows that groups of 128 do not divide get groups of 32; no engine is named whose users keep other formats.
    #[test]
    fn variants_follow_model_and_engine() {
        let shape = ModelShape::of_dims(
            "narrow",
            &crate::shape::Dims { hidden: 2080, ffn: 5600, ..crate::shape::FAMILIES[0].dims },
        );
        let device = Device::named("h100").unwrap();
        let of = |shape: &ModelShape, engine: &str, bits| {
            let engine = crate::contract::EngineTarget::parse(engine).unwrap().engine;
            let wish = Wish { engine: Some(engine), bits: Some(bits) };
            let found = answer_to(shape, &device, &load(), &wish).recommendation;
            (found.recipe.unwrap_or_default(), found.format.unwrap_or_default())
        };
        assert_eq!(of(&shape, "vllm", 4), ("gptaq-int4-g32-asym", "compressed-tensors"));
        let whole = ModelShape::named("8B").unwrap();
        assert_eq!(of(&whole, "vllm", 4), ("gptaq-int4-g128-asym", "compressed-tensors"));
        assert_eq!(of(&whole, "exllamav2", 4), ("gptq-int4-g128", "exl2"));
        assert_eq!(of(&whole, "llama.cpp", 5), ("q5_k_m", "gguf"));
        assert_eq!(of(&whole, "sglang", 3), ("", ""));
    }

    /// 73 sequences of 8192 tokens fit an H100 beside an 8 B model in int4; the batch from which on its bits no longer count,
    /// 114, does not.
    #[test]
    fn a_batch_beyond_the_memory_is_not_named() {
        let batch = |device: &str, context: u64| {
            let found = recommended("8B", device, Load { context, prefill: context / 2, ..load() });
            let changes = found.recommendation.changes;
            changes.into_iter().find(|line| line.contains("batch")).unwrap_or_default()
        };
        let line = batch("h100", 8192);
        assert!(line.starts_with("batch: the memory ends at ") && line.contains("8192 tokens"), "{line}");
        assert!(!line.contains("only saves memory"), "{line}");
        assert!(batch("rtx4060", 8192).contains("the memory ends at "), "{}", batch("rtx4060", 8192));
        let line = batch("h100", 256);
        assert!(line.contains("sequences of") && line.contains("only saves memory"), "{line}");
    }

    /// A phase names another precision than the choice only where that is faster.
    #[test]
    fn phases_name_what_is_faster() {
        for (model, device) in [("8B", "rtx4060"), ("8B", "h100"), ("32B", "rtx4090"), ("0.5B", "m4-max")] {
            let found = recommended(model, device, Load { context: 8192, ..load() });
            let choice = &found.recommendation;
            let chosen = found.chosen().unwrap();
            for (named, speed) in
                [(choice.prefill, reasons::prompts as fn(&Row) -> f64), (choice.decode, reasons::decoding)]
            {
                let row = found.rows.iter().find(|row| Some(row.precision.name) == named).unwrap();
                let other = row.precision.name != chosen.precision.name;
                assert!(!other || speed(row) > 1.02 * speed(chosen), "{model} on {device}: {named:?}");
            }
            assert!(!choice.changes.iter().any(|line| line.contains("as now")), "{:?}", choice.changes);
        }
    }

    #[test]
    fn nothing_fits_is_said() {
        let found = recommended("405B", "t4", load());
        assert_eq!(found.recommendation.precision, None);
        assert!(found.recommendation.changes.iter().any(|line| line.contains("devices")));
    }

    /// "The smallest" is within the limit of the loss; the smallest at all is named beside it, and how to take it where it fits.
    #[test]
    fn the_smallest_is_said_within_the_limit_and_at_all() {
        let reason =
            |model: &str, load: Load| recommended(model, "rtx4090", load).recommendation.reasons[0].clone();
        let found = reason("70B", load());
        assert!(found.starts_with("nothing within 0.02 nats/token fits "), "{found}");
        assert!(found.contains("the smallest of these, IQ4_XS, needs"), "{found}");
        assert!(found.contains("; the smallest at all, Q2_K, needs") && !found.contains("--bits"), "{found}");
        let found = reason("70B", Load { memory: Some(35e9), ..load() });
        assert!(found.ends_with("and fits: --bits 2 lifts the limit"), "{found}");
        // Without a limit there is one smallest.
        let found = reason("405B", Load { max_kl: f64::INFINITY, ..load() });
        assert!(found.starts_with("nothing fits ") && !found.contains("at all"), "{found}");
    }
}
