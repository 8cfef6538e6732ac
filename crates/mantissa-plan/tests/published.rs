//! Published totals of memory. Formula rows are exact, measured totals within 5 %.
#![allow(clippy::unwrap_used)]

use mantissa_plan::hardware::{Device, Unit};
use mantissa_plan::shape::ModelShape;
use mantissa_plan::training::{
    RECIPES, Recompute, Run, Trained, TrainingRecipe, Zero, activations, frozen_bytes, gpt_layer_activations,
    layer_activations, logit_bytes, training,
};

const LLAMA_2_7B: f64 = 6_738_415_616.0;
const GIB: f64 = (1u64 << 30) as f64;

fn recipe(name: &str) -> TrainingRecipe {
    TrainingRecipe::named(name).unwrap()
}

fn shape(name: &str) -> ModelShape {
    ModelShape::named(name).unwrap()
}

#[test]
fn bytes_per_parameter() {
    for (name, total) in [
        ("fp32", 16.0),
        ("bf16", 16.0),
        ("bf16-fp32-grads", 18.0),
        ("fp16", 20.0),
        ("bf16-no-master", 12.0),
        ("bf16-pure", 8.0),
        ("bf16-adam8", 6.03125),
        ("bf16-adam8-master", 10.03125),
        ("bf16-adam4", 5.0625),
        ("bf16-remainder", 16.0),
        ("fp8-te", 20.0),
        ("fp8-primary", 18.0),
        ("deepseek-v3", 13.0),
        ("ms-amp-o3", 7.0),
        ("int8-sr", 5.03125),
        ("bf16-lion", 12.0),
        ("bf16-lion8", 9.015625),
        ("bf16-adafactor", 8.0),
    ] {
        assert_eq!(recipe(name).total(), total, "{name}");
    }
    assert!(RECIPES.iter().all(|recipe| recipe.source.len() > 5 && recipe.total() > 4.0));
}

#[test]
fn seven_billion_parameters() {
    for (name, gb, gib) in [
        ("fp32", 107.8, Some(100.4)),
        ("bf16-fp32-grads", 121.3, None),
        ("fp16", 134.8, None),
        ("bf16-no-master", 80.9, None),
        ("bf16-pure", 53.9, Some(50.2)),
        ("bf16-adam8", 40.6, Some(37.85)),
        ("bf16-adam8-master", 67.6, None),
        ("bf16-adam4", 34.1, Some(31.77)),
    ] {
        let bytes = recipe(name).total() * LLAMA_2_7B;
        assert!((bytes / 1e9 - gb).abs() < 0.05, "{name}: {bytes:e}");
        assert!(gib.is_none_or(|gib: f64| (bytes / GIB - gib).abs() < 0.06), "{name}: {bytes:e}");
    }
}

/// ZeRO (arXiv 1910.02054, figure 1): 7.5 B parameters on 64 devices: 120, 31.4, 16.6 and 1.9 GB.
#[test]
fn zero_stages() {
    let of = |zero| 7.5 * recipe("bf16").bytes_per_parameter(zero, 64);
    assert_eq!(of(Zero::None), 120.0);
    assert_eq!(of(Zero::One), 31.40625);
    assert_eq!(of(Zero::Two), 16.640625);
    assert_eq!(of(Zero::Three), 1.875);
    assert_eq!(Zero::stage(2), Some(Zero::Two));
    assert_eq!(Zero::stage(4), None);
}

/// Megatron-LM dist_optimizer.md: 4 + 16/d, 6 + 12/d, 8 + 8/d.
#[test]
fn distributed_optimizer() {
    for d in [1u64, 2, 8, 64] {
        let of = |name| recipe(name).bytes_per_parameter(Zero::One, d);
        let d = d as f64;
        assert_eq!(of("fp16"), 4.0 + 16.0 / d);
        assert_eq!(of("bf16-fp32-grads"), 6.0 + 12.0 / d);
        assert_eq!(of("fp32"), 8.0 + 8.0 / d);
    }
}

/// torchao and torchtune, Llama-2-7B in bf16 on an A100: peaks of 51.6, 39.1 and 33.2 GiB.
#[test]
fn full_fine_tuning_of_llama_2_7b() {
    let model = shape("Llama-2-7B");
    // 2048 tokens with recomputed layers; what the state leaves of the peaks is 1.3 to 1.4 GiB.
    let run = Run { sequence: 2048, batch: 1, devices: 1, zero: Zero::None, recompute: Recompute::Layers };
    for (name, gib) in [("bf16-pure", 51.6), ("bf16-adam8", 39.1), ("bf16-adam4", 33.2)] {
        let total = training(&model, &recipe(name), Trained::All, &run).total() / GIB;
        assert!((total / gib - 1.0).abs() < 0.05, "{name}: {total} GiB, published {gib}");
    }
}

/// llmq, Qwen2.5-0.5B: moments and gradients in bf16 take 942 MiB each.
#[test]
fn moments_of_half_a_billion_parameters() {
    let bytes = 2.0 * shape("Qwen2.5-0.5B").parameters() as f64;
    assert_eq!((bytes / f64::from(1 << 20)).round(), 942.0);
}

/// QLoRA (arXiv 2305.14314): 65 B in 16 bits over 780 GB; with NF4, double quantization and adapters below 48 GB.
#[test]
fn qlora_of_65_billion_parameters() {
    assert_eq!(65e9 * recipe("bf16-no-master").total(), 780e9);
    let bits = |name: &str| name.parse::<mantissa_num::Scheme>().unwrap().format.bits_per_weight(8192, 8192);
    assert!((bits("nf4-dq") - 4.127).abs() < 1e-3, "{}", bits("nf4-dq"));
    assert!((bits("nf4") - bits("nf4-dq") - 0.373).abs() < 1e-3);
    // LLaMA-65B: 80 layers of 8192, 64 heads, 22016, 32000 tokens.
    let dims = mantissa_plan::shape::Dims {
        hidden: 8192,
        layers: 80,
        heads: 64,
        kv_heads: 64,
        head_dim: 128,
        ffn: 22_016,
        vocab: 32_000,
        context: 2048,
        tied: false,
        biases: mantissa_plan::shape::Biases::None,
        sinks: false,
        window: None,
        mixture: None,
        latent: None,
    };
    let model = ModelShape::of_dims("LLaMA-65B", &dims);
    assert!((model.parameters() as f64 / 65.29e9 - 1.0).abs() < 1e-3);
    let base = frozen_bytes(&model, "nf4-dq");
    assert!((base / (33.6e9 + 1.05e9) - 1.0).abs() < 0.01, "{base:e}");
    let run = Run { sequence: 512, batch: 1, devices: 1, zero: Zero::None, recompute: Recompute::Layers };
    // Rank 16 has .3 % of the parameters; the paper counts .2 % (section 2).
    let trained = Trained::Adapters { rank: 16, base: "nf4-dq" };
    let total = training(&model, &recipe("bf16"), trained, &run).total();
    assert!((35e9..48e9).contains(&total), "{total:e}");
}

/// DeepSeek-V3: 671 B × 13 bytes = 8.72 TB, 4.26 GB on each of 2048 devices.
#[test]
fn deepseek_v3() {
    let bytes = 671e9 * recipe("deepseek-v3").total();
    assert!((bytes / 8.72e12 - 1.0).abs() < 1e-3);
    let each = 671e9 * recipe("deepseek-v3").bytes_per_parameter(Zero::Three, 2048);
    assert!((each / 4.26e9 - 1.0).abs() < 1e-3);
}

/// torchao's offload of a ViT-g of 1.1 B parameters: 9.82, 5.24, 4.01 GB; moments (4 bytes) and then gradients (2) leave.
#[test]
fn offloaded_optimizer() {
    let parameters = 1.1e9;
    let moments = recipe("bf16-pure").moments * parameters;
    let gradients = recipe("bf16-pure").gradients * parameters;
    assert!((moments / (9.82e9 - 5.24e9) - 1.0).abs() < 0.05, "{moments:e}");
    assert!((gradients - 2.2e9).abs() < 1.0);
}

/// Korthikanti et al. 2022: 34 s b h, and 5 a s / h more with stored scores; 2 s b h with recomputed layers.
#[test]
fn activations_of_gpt() {
    // GPT-3: s = 2048, h = 12288, a = 96: 5 a s / h = 80.
    let of = |recompute| gpt_layer_activations(2048, 1, 12_288, 96, recompute) / (2048.0 * 12_288.0);
    assert_eq!(of(Recompute::Nothing), 114.0);
    assert_eq!((of(Recompute::Scores), of(Recompute::Layers)), (34.0, 2.0));
}

#[test]
fn activations_of_llama_3_8b() {
    let model = shape("Llama-3.1-8B");
    assert_eq!(layer_activations(&model), 139_264.0);
    let gb = |recompute| activations(&model, 8192, 1, recompute) / 1e9;
    assert!((gb(Recompute::Scores) - 36.5).abs() < 0.05);
    // 2.15 GB of inputs, and one layer of 1.14 GB that is recomputed.
    assert!((gb(Recompute::Layers) - 2.15 - 1.14).abs() < 0.02, "{}", gb(Recompute::Layers));
    assert!((logit_bytes(&model) * 8192.0 / 1e9 - 6.3).abs() < 0.01);
}

/// Queries of a width of their own, at 4096 tokens. DeepSeek-V3, a token and layer: 4 × 7168; queries and keys of 128 × 192,
/// values and attended values of 128 × 128; latents of 1536 and 576; 3 × 18,432 of 8 + 1 experts of 2048: 168,000 elements × 2
/// bytes × 61 × 4096 = 84.0 GB. Qwen3-30B-A3B: 4 × 2048; queries and attended values of 32 × 128, keys and values of 4 × 128;
/// 3 × 8 × 768: 35,840 × 2 × 48 × 4096 = 14.1 GB. Qwen2.5-0.5B: 14 × 64 is its hidden size.
#[test]
fn activations_of_wide_queries() {
    for (name, elements) in [
        ("DeepSeek-V3", 4 * 7168 + 2 * 128 * 192 + 2 * 128 * 128 + 1536 + 576 + 3 * 18_432),
        ("Qwen3-30B-A3B", 4 * 2048 + 2 * 32 * 128 + 2 * 4 * 128 + 3 * 8 * 768),
        ("Qwen2.5-0.5B", 6 * 896 + 2 * 2 * 64 + 3 * 4864),
        ("gpt-oss-20b", 4 * 2880 + 2 * 64 * 64 + 2 * 8 * 64 + 3 * 4 * 2880),
        ("Llama-3.1-405B", 6 * 16_384 + 2 * 8 * 128 + 3 * 53_248),
    ] {
        assert_eq!(layer_activations(&shape(name)), f64::from(2 * elements), "{name}");
    }
    let gb = |name: &str| activations(&shape(name), 4096, 1, Recompute::Scores) / 1e9;
    assert!((gb("DeepSeek-V3") - 83.95).abs() < 0.01, "{}", gb("DeepSeek-V3"));
    assert!((gb("Qwen3-30B-A3B") - 14.09).abs() < 0.01, "{}", gb("Qwen3-30B-A3B"));
}

#[test]
fn storage_bits() {
    let bits = |name: &str| mantissa_num::parse_weight(name).unwrap().format.bits_per_weight(4096, 4096);
    for (name, expected) in [
        ("mxfp4", 4.25),
        ("nvfp4", 4.5),
        ("mxfp6-e3m2", 6.25),
        ("mxfp8-e4m3", 8.25),
        ("fp8-e4m3-g128", 8.25),
        ("fp8-e4m3-t128x128", 8.002),
        ("int8-channel", 8.0 + 32.0 / 4096.0),
        ("nf4", 4.5),
    ] {
        assert!((bits(name) - expected).abs() < 1e-3, "{name}: {}", bits(name));
    }
}

/// training.md, "GPU table": the ridge points.
#[test]
fn ridge_points() {
    for (name, ridge) in [
        ("a100", 153.0),
        ("h100", 295.0),
        ("h200", 206.0),
        ("b200", 281.0),
        ("b300", 281.0),
        ("l40s", 419.0),
        ("rtx4090", 164.0),
        ("rtx5090", 117.0),
        ("mi300x", 247.0),
    ] {
        let found = Device::named(name).unwrap().ridge(Unit::Bf16).unwrap();
        assert_eq!(found.round(), ridge, "{name}");
    }
    assert_eq!(Device::named("h100").unwrap().ridge(Unit::Fp8).unwrap().round(), 591.0);
}
