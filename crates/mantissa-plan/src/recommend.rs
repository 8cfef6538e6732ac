//! The choice of a precision for a model, a device and a load, with its reasons and what would change it.

mod loads;
mod reasons;
mod row;
mod sharing;
mod train;
mod words;

use serde::Serialize;

use crate::hardware::Device;
use crate::precision::PRECISIONS;
use crate::shape::ModelShape;
use row::{choose, fastest, row};

pub use loads::{Loads, loads};
pub use row::{Load, MAX_KL, Row, SMALL_MODEL};
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

/// Evaluates every precision and chooses.
pub fn answer(shape: &ModelShape, device: &Device, load: &Load) -> Answer {
    let candidates = PRECISIONS.iter().filter(|precision| precision.is_offered_on(device.maker));
    let rows: Vec<Row> = candidates.map(|precision| row(shape, device, load, precision)).collect();
    let max_kl = match shape.parameters() < SMALL_MODEL {
        true => load.max_kl.min(SMALL_MODEL_KL),
        false => load.max_kl,
    };
    let chosen = choose(&rows, max_kl, |row| row.seconds);
    let phase = |cost: fn(&Row) -> f64| fastest(&rows, max_kl, cost).map(|row| row.precision.name);
    let recommendation = Recommendation {
        precision: chosen.map(|row| row.precision.name),
        recipe: chosen.and_then(|row| row.precision.recipe),
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
