//! The choice of a precision for a model, a device and a load, with its reasons and what would change it.

mod choice;
mod loads;
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
use row::{choose, fastest, row, shown};

pub use choice::{Entry, best};
pub use loads::{Loads, loads};
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
    /// Fastest precision for prompts alone.
    pub prefill: Option<&'static str>,
    /// Fastest precision for decoding alone.
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
    let rows = shown(evaluate(shape, device, load, wish));
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
    let phase = |cost: fn(&Row) -> f64| fastest(choices, max_kl, cost).map(|row| row.precision.name);
    let recommendation = Recommendation {
        precision: chosen.map(|row| row.precision.name),
        recipe: chosen.and_then(|row| row.precision.recipe),
        format: chosen.filter(|row| !row.precision.is_dense()).map(|row| row.precision.convention),
        bits: chosen.map(|row| row.precision.nominal),
        kv: chosen.map(|row| row.kv.name),
        prefill: phase(|row| 1.0 / row.prefill.tokens_per_s[1]),
        decode: phase(|row| 1.0 / row.decode.tokens_per_s[1]),
        reasons: reasons::reasons(shape, device, load, &rows, chosen, max_kl),
        changes: reasons::changes(shape, device, load, &rows, chosen, max_kl),
    };
    Answer { rows, recommendation }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
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

    #[test]
    fn nothing_fits_is_said() {
        let found = recommended("405B", "t4", load());
        assert_eq!(found.recommendation.precision, None);
        assert!(found.recommendation.changes.iter().any(|line| line.contains("devices")));
    }
}
