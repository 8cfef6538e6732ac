//! Widely repeated statements that are wrong, with what is right. Figures are computed, so that a test can hold them.

use mantissa_num::{minifloat, parse_weight};

use super::measures::{accumulator_error, compensation_error, sqnr, update_limits};
use crate::hardware::{Device, Unit};
use crate::precision::Kv;
use crate::roofline::decode_intensity;
use crate::shape::ModelShape;
use crate::training::{Recompute, TrainingRecipe, gpt_layer_activations};

/// Figure of a correction.
#[derive(Clone, Debug, PartialEq)]
pub struct Figure {
    /// What it is.
    pub what: &'static str,
    /// Computed value.
    pub found: f64,
    /// Published or measured value.
    pub right: f64,
    /// Allowed relative deviation; absolute where `right` is 0.
    pub within: f64,
}

/// Statement that is wrong.
#[derive(Clone, Copy, Debug)]
pub struct Correction {
    /// Number.
    pub id: u32,
    /// Statement.
    pub said: &'static str,
    /// What is right.
    pub right: &'static str,
    /// Source.
    pub source: &'static str,
    /// Computes its figures.
    pub figures: fn() -> Vec<Figure>,
}

/// Returns the correction of this number.
pub(super) fn by_id(id: u32) -> Option<&'static Correction> {
    CORRECTIONS.iter().find(|correction| correction.id == id)
}

fn figure(what: &'static str, found: f64, right: f64, within: f64) -> Figure {
    Figure { what, found, right, within }
}

/// Rate of a unit in TFLOP/s; 0 if the device has none.
fn tera(device: &str, unit: Unit) -> f64 {
    Device::named(device).ok().and_then(|device| device.rate(unit)).unwrap_or(0.0) / 1e12
}

fn ridge(device: &str, unit: Unit) -> f64 {
    Device::named(device).ok().and_then(|device| device.ridge(unit)).unwrap_or(0.0)
}

fn bits(scheme: &str) -> f64 {
    parse_weight(scheme).map_or(0.0, |scheme| scheme.format.bits_per_weight(4096, 4096))
}

fn db(scheme: &str) -> f64 {
    sqnr(scheme, None).unwrap_or(0.0)
}

fn per_parameter(recipe: &str) -> f64 {
    TrainingRecipe::named(recipe).map_or(0.0, |recipe| recipe.total())
}

fn none() -> Vec<Figure> {
    Vec::new()
}

/// Distinct values of a float.
fn values(float: minifloat::MiniFloat) -> f64 {
    let mut values: Vec<f32> =
        (0..1 << float.bits()).map(|code| float.decode(code)).filter(|x| x.is_finite()).collect();
    values.sort_by(f32::total_cmp);
    values.dedup_by(|a, b| a == b);
    values.len() as f64
}

/// Bytes of Llama 3 70B's KV cache at 8192 tokens and batch 32, in GB.
fn llama_kv() -> f64 {
    let bytes = ModelShape::named("Llama-3.1-70B").ok().zip(Kv::named("f16").ok());
    bytes.map_or(0.0, |(shape, kv)| 32.0 * kv.bytes_of_sequence(&shape, 8192) / 1e9)
}

/// Every correction.
pub const CORRECTIONS: &[Correction] = &[
    Correction {
        id: 1,
        said: "an H100 has 1979 TFLOP/s in bf16, and its ridge is at 590 operations a byte",
        right: "989 dense and 295; 1979 is bf16 with sparsity, or FP8 dense, whose ridge is at 591",
        source: "NVIDIA H100 datasheet",
        figures: || {
            vec![
                figure("bf16 TFLOP/s", tera("h100", Unit::Bf16), 989.4, 1e-3),
                figure("bf16 ridge", ridge("h100", Unit::Bf16), 295.0, 3e-3),
                figure("FP8 ridge", ridge("h100", Unit::Fp8), 591.0, 3e-3),
            ]
        },
    },
    Correction {
        id: 2,
        said: "decoding at batch 1 does 2 operations a byte",
        right: "2 for each weight: 1 a byte in bf16, 2 in 8 bits, 4 in 4 bits",
        source: "arithmetic",
        figures: || {
            vec![
                figure("in bf16", decode_intensity(16.0), 1.0, 0.0),
                figure("in 8 bits", decode_intensity(8.0), 2.0, 0.0),
                figure("in 4 bits", decode_intensity(4.0), 4.0, 0.0),
            ]
        },
    },
    Correction {
        id: 3,
        said: "a B200 has 20 PFLOP/s of dense FP4, and FP4 is twice as fast as FP8 everywhere",
        right: "9 (HGX) or 10 (GB200) dense, 18 and 20 with sparsity; twice FP8 on a B200, three times on a B300",
        source: "NVIDIA HGX B200 and B300 tables",
        figures: || {
            vec![
                figure("B200 PFLOP/s", tera("b200", Unit::Fp4) / 1e3, 9.0, 1e-9),
                figure("GB200 PFLOP/s", tera("gb200", Unit::Fp4) / 1e3, 10.0, 1e-9),
                figure("B200: FP4 over FP8", tera("b200", Unit::Fp4) / tera("b200", Unit::Fp8), 2.0, 1e-9),
                figure("B300: FP4 over FP8", tera("b300", Unit::Fp4) / tera("b300", Unit::Fp8), 3.0, 0.1),
            ]
        },
    },
    Correction {
        id: 4,
        said: "no A100 or H100 multiplies INT4 in its tensor cores",
        right: "an A100 does, 1248 TOP/s dense, as do Turing and Ada; an H100 and Blackwell do not",
        source: "NVIDIA GA100 whitepaper, table 3; PTX ISA mma .s4",
        figures: || {
            vec![
                figure("A100 TOP/s", tera("a100", Unit::Int4), 1248.0, 1e-9),
                figure("H100 TOP/s", tera("h100", Unit::Int4), 0.0, 0.0),
                figure("B200 TOP/s", tera("b200", Unit::Int4), 0.0, 0.0),
            ]
        },
    },
    Correction {
        id: 5,
        said: "FP8 needs a Hopper; a 4090 has none",
        right: "Ada (4090, L40S) multiplies FP8 too, and so does MI300X in the fnuz encodings; a 3090 does not",
        source: "PTX ISA mma .e4m3 (sm_89); CDNA 3 ISA",
        figures: || {
            vec![
                figure("4090 TFLOP/s", tera("rtx4090", Unit::Fp8), 330.3, 1e-3),
                figure("L40S TFLOP/s", tera("l40s", Unit::Fp8), 733.0, 1e-3),
                figure("MI300X TFLOP/s", tera("mi300x", Unit::Fp8), 2614.9, 1e-3),
                figure("3090 TFLOP/s", tera("rtx3090", Unit::Fp8), 0.0, 0.0),
            ]
        },
    },
    Correction {
        id: 6,
        said: "FP8 and INT8 are equally fast from Hopper on",
        right: "on a B300 INT8 is about 30 times slower, on RTX 4090 and 5090 twice as fast as FP8 with sums in f32",
        source: "NVIDIA HGX B300 table; Ada and RTX Blackwell whitepapers",
        figures: || {
            vec![
                figure("H100: FP8 over INT8", tera("h100", Unit::Fp8) / tera("h100", Unit::Int8), 1.0, 1e-9),
                figure("B300: FP8 over INT8", tera("b300", Unit::Fp8) / tera("b300", Unit::Int8), 30.0, 0.2),
                figure(
                    "4090: INT8 over FP8",
                    tera("rtx4090", Unit::Int8) / tera("rtx4090", Unit::Fp8),
                    2.0,
                    1e-3,
                ),
            ]
        },
    },
    Correction {
        id: 7,
        said: "each step down in precision doubles the rate, from FP64 at 34 TFLOP/s on",
        right: "on an H100, f32 to TF32 is 7.4 times, since f32 does not run in tensor cores; then it doubles",
        source: "NVIDIA H100 datasheet",
        figures: || {
            vec![
                figure("TF32 over f32", tera("h100", Unit::Tf32) / tera("h100", Unit::F32), 7.4, 0.01),
                figure("bf16 over TF32", tera("h100", Unit::Bf16) / tera("h100", Unit::Tf32), 2.0, 1e-3),
            ]
        },
    },
    Correction {
        id: 8,
        said: "groups of 32 with 8-bit scales cost a bit per weight",
        right: "8 / 32 = 0.25 bit",
        source: "OCP Microscaling Formats v1.0, section 5",
        figures: || vec![figure("bits", bits("mxfp4") - 4.0, 0.25, 1e-9)],
    },
    Correction {
        id: 9,
        said: "6e-5 is the smallest number of f16",
        right: "it is the smallest normal one, 6.10e-5; the smallest subnormal is 5.96e-8, and loss scales count on it",
        source: "IEEE 754-2019, binary16",
        figures: || {
            vec![
                figure("smallest normal", f64::from(minifloat::F16.min_normal()), 6.103_515_625e-5, 1e-9),
                figure("smallest", f64::from(minifloat::F16.min_subnormal()), 5.960_464_477_539e-8, 1e-9),
            ]
        },
    },
    Correction {
        id: 10,
        said: "NF4 is optimal for normal weights, with codes symmetric about 0",
        right: "16 codes with 0 among them, 7 below and 8 above; scaled by the block's maximum it is not optimal, but better than INT4",
        source: "QLoRA, arXiv 2305.14314, appendix E; Yoshida 2023, arXiv 2306.06965",
        figures: || {
            let codes = || (0..16).map(|code| f64::from(mantissa_num::codebook::Book::Nf4.level(code)));
            vec![
                figure("codes below 0", codes().filter(|x| *x < 0.0).count() as f64, 7.0, 0.0),
                figure("codes above 0", codes().filter(|x| *x > 0.0).count() as f64, 8.0, 0.0),
                figure("second largest", codes().filter(|x| *x < 0.99).fold(0.0, f64::max), 0.7230, 1e-3),
                figure("NF4, blocks of 64, dB", db("nf4"), 20.7, 0.02),
                figure("INT4, groups of 64, dB", db("int4-g64-sym:restricted"), 19.4, 0.02),
            ]
        },
    },
    Correction {
        id: 11,
        said: "on normal numbers INT8 has 48 dB and INT4 24 dB",
        right: "that is the rule for uniform numbers. Of normal numbers, with scales of the largest magnitude over 127 or 7: INT8 40 dB in a tensor of 32,768, about 38 in one of millions, 44 in groups of 128; INT4 18.6 in groups of 128",
        source: "measured",
        figures: || {
            vec![
                // 10 lg(12 (127 / 4.2)²): the largest of 32,768 normal numbers is about 4.2; of 16 million 5.4.
                figure("INT8, a tensor of 32,768, dB", db("int8-tensor-sym:restricted"), 40.4, 0.02),
                figure("INT8, groups of 128, dB", db("int8-g128-sym:restricted"), 43.8, 0.02),
                figure("INT8, groups of 32, dB", db("int8-g32-sym:restricted"), 45.4, 0.02),
                figure("INT4, groups of 128, dB", db("int4-g128-sym:restricted"), 18.6, 0.02),
                figure("INT4, groups of 32, dB", db("int4-g32-sym:restricted"), 20.3, 0.02),
                figure("MXFP4, dB", db("mxfp4"), 18.8, 0.02),
                figure("NVFP4, dB", db("nvfp4"), 20.4, 0.02),
                figure("NVFP4 with Four Over Six, dB", db("nvfp4:4over6"), 21.2, 0.02),
                figure("E4M3, dB", db("fp8-e4m3-channel"), 31.5, 0.02),
                figure("E5M2, dB", db("fp8-e5m2-channel"), 25.6, 0.02),
            ]
        },
    },
    Correction {
        id: 12,
        said: "FP8 beats INT8 because 448 is more than 127",
        right: "scales make ranges meaningless; what counts is the ratio of the largest to the smallest normal value. Normal numbers lose 7 to 14 dB less in INT8; outliers favour FP8. E2M1 has 15 values, not 16",
        source: "measured; OCP MX v1.0, table 5",
        figures: || {
            vec![
                figure(
                    "INT8 less E4M3, per channel, dB",
                    db("int8-channel:restricted") - db("fp8-e4m3-channel"),
                    10.5,
                    0.35,
                ),
                figure("values of E2M1", values(minifloat::E2M1), 15.0, 0.0),
                figure(
                    "range of E4M3",
                    f64::from(minifloat::E4M3.max() / minifloat::E4M3.min_normal()),
                    28_672.0,
                    1e-9,
                ),
            ]
        },
    },
    Correction {
        id: 13,
        said: "the MX specification prescribes stochastic rounding, for gradients and activations",
        right: "it does not mention it; NVIDIA's NVFP4 recipe rounds gradients stochastically and activations to nearest",
        source: "OCP MX v1.0; arXiv 2509.25149, section 4.3",
        figures: none,
    },
    Correction {
        id: 14,
        said: "gradients need E5M2",
        right: "with one scale per tensor; with blocks, tiles or rows DeepSeek-V3, Transformer Engine and torchao use E4M3 for gradients too",
        source: "arXiv 2412.19437, section 3.3.2; arXiv 2506.08027",
        figures: none,
    },
    Correction {
        id: 15,
        said: "MX scales are the floor of the exponent, in training too",
        right: "floor is OCP's choice for conversion; training rounds the scale up, so that the largest value is not clipped",
        source: "arXiv 2506.08027, section 3.2",
        figures: || {
            vec![figure(
                "dB that rounding up gains in MXFP8",
                db("mxfp8-e4m3:rceil") - db("mxfp8-e4m3:floor"),
                0.3,
                2.0,
            )]
        },
    },
    Correction {
        id: 16,
        said: "Quartet trains in INT4 with f16 activations and gradients",
        right: "MXFP4 for weights, activations and gradients in all three products, after a Hadamard transform of 32",
        source: "arXiv 2505.14669",
        figures: || vec![figure("bits of MXFP4", bits("mxfp4"), 4.25, 1e-9)],
    },
    Correction {
        id: 17,
        said: "mixed precision in bf16 takes 12 bytes per parameter, FP8 2 to 4, 4 bits 0.5 to 1",
        right: "16 to 18, with master weights; FP8 13 to 20; 4-bit recipes keep masters too, 11 and more",
        source: "ZeRO, arXiv 1910.02054; Megatron-LM; arXiv 2412.19437",
        figures: || {
            vec![
                figure("bf16", per_parameter("bf16"), 16.0, 0.0),
                figure("with f32 gradients", per_parameter("bf16-fp32-grads"), 18.0, 0.0),
                figure("FP8, DeepSeek-V3", per_parameter("deepseek-v3"), 13.0, 0.0),
                figure("FP8, Transformer Engine", per_parameter("fp8-te"), 20.0, 0.0),
                figure("Quartet", per_parameter("quartet"), 11.0625, 0.0),
            ]
        },
    },
    Correction {
        id: 18,
        said: "without master weights training diverges within tens of steps",
        right: "it stalls: updates below half of a weight's last digit are lost. With stochastic rounding it equals f32",
        source: "measured: docs/results/training.md",
        figures: || {
            let [dropped, kept] = update_limits(minifloat::BF16);
            vec![
                figure("relative change below which bf16 keeps none", dropped, 0.001_953_125, 1e-9),
                figure("above which it keeps all", kept, 0.003_906_25, 1e-9),
            ]
        },
    },
    Correction {
        id: 19,
        said: "delayed scaling avoids the synchronization of the amax",
        right: "it saves one of two reads of the tensor; the amax is still reduced over devices",
        source: "Transformer Engine documentation, DelayedScaling (reduce_amax)",
        figures: none,
    },
    Correction {
        id: 20,
        said: "DeepSeek-V3 promotes sums every 128 tiles",
        right: "every 128 elements, four instructions",
        source: "arXiv 2412.19437, section 3.3.2",
        figures: || {
            let [plain, promoted] = accumulator_error(4096);
            vec![
                figure("elements", mantissa_num::accumulate::HOPPER_PROMOTION as f64, 128.0, 0.0),
                figure(
                    "error of 4096 products that promotion takes away, share",
                    1.0 - promoted / plain,
                    0.95,
                    0.06,
                ),
            ]
        },
    },
    Correction {
        id: 21,
        said: "DeepSeek-V3 stores its weights in FP8 in training",
        right: "FP8 is the copy that is multiplied; master weights and gradients are f32, moments bf16",
        source: "arXiv 2412.19437, section 3.3",
        figures: || {
            let recipe = TrainingRecipe::named("deepseek-v3");
            let of = |get: fn(&TrainingRecipe) -> f64| recipe.as_ref().map_or(0.0, get);
            vec![
                figure("bytes of the master", of(|r| r.master), 4.0, 0.0),
                figure("of gradients", of(|r| r.gradients), 4.0, 0.0),
                figure("of moments", of(|r| r.moments), 4.0, 0.0),
            ]
        },
    },
    Correction {
        id: 22,
        said: "Adam takes four times the parameters, 840 GB for 70 B",
        right: "its two f32 moments take 8 bytes, 560 GB for 70 B; with an f32 master 12 bytes, 840 GB",
        source: "arithmetic",
        figures: || {
            let recipe = TrainingRecipe::named("bf16");
            let moments = recipe.as_ref().map_or(0.0, |r| r.moments);
            let master = recipe.as_ref().map_or(0.0, |r| r.master);
            vec![
                figure("moments of 70 B, GB", 70.0 * moments, 560.0, 0.0),
                figure("with master, GB", 70.0 * (moments + master), 840.0, 0.0),
            ]
        },
    },
    Correction {
        id: 23,
        said: "the residual stream is usually accumulated in f32",
        right: "bf16 is the default of Megatron-LM (fp32_residual_connection is off): 2 bytes a value",
        source: "Megatron-LM arguments; Korthikanti et al. 2022, arXiv 2205.05198, table 2",
        figures: || {
            // With full recomputation a layer stores nothing but the residual stream that enters it.
            let stored = gpt_layer_activations(2048, 4, 4096, 32, Recompute::Layers);
            vec![figure("bytes of a stored value of the stream", stored / (2048.0 * 4.0 * 4096.0), 2.0, 0.0)]
        },
    },
    Correction {
        id: 24,
        said: "errors of .5 % in each of 80 layers add up to 49 % if they are uncorrelated",
        right: "4.5 % if uncorrelated; 49 % if all point the same way",
        source: "arithmetic",
        figures: || {
            vec![
                figure("uncorrelated, %", 0.5 * 80f64.sqrt(), 4.5, 0.01),
                figure("coherent, %", 100.0 * (1.005f64.powi(80) - 1.0), 49.0, 0.01),
            ]
        },
    },
    Correction {
        id: 25,
        said: "the KV cache of Llama 3 70B takes 20 GB at 8192 tokens and batch 32",
        right: "85.9 GB: 80 layers × 8 heads × 128 × 2 × 2 bytes are 327,680 bytes per token",
        source: "arithmetic",
        figures: || vec![figure("GB", llama_kv(), 85.9, 1e-3)],
    },
    Correction {
        id: 26,
        said: "1 to 2 % of the hidden dimensions are outliers",
        right: "about 0.1 to 1 %: 7 of 4096 dimensions or fewer in LLM.int8()'s models",
        source: "LLM.int8(), arXiv 2208.07339, section 4",
        figures: || vec![figure("7 of 4096, %", 100.0 * 7.0 / 4096.0, 0.17, 0.02)],
    },
    Correction {
        id: 27,
        said: "quantization happens after training, and FP8 came with H200 and B200",
        right: "quantization-aware and low-precision training quantize during it; H100, L40S and 4090 have FP8 too",
        source: "PTX ISA mma .e4m3 (sm_89)",
        figures: || vec![figure("H100 FP8 TFLOP/s", tera("h100", Unit::Fp8), 1978.9, 1e-3)],
    },
    Correction {
        id: 28,
        said: "mixed precision is f16 products with f32 updates",
        right: "three things: f32 master weights, loss scaling, and f32 sums inside the products",
        source: "Micikevicius et al. 2018, arXiv 1710.03740",
        figures: none,
    },
    Correction {
        id: 29,
        said: "FP8 trains 1.3 to 1.7 times as fast",
        right: "end to end 1.04 to 1.25 times for 8 B (torchao); 1.41 to 1.69 times for the products alone",
        source: "torchao float8 README; Transformer Engine",
        figures: || {
            vec![figure(
                "bound for the products, H100",
                tera("h100", Unit::Fp8) / tera("h100", Unit::Bf16),
                2.0,
                1e-3,
            )]
        },
    },
    Correction {
        id: 30,
        said: "GPTQ uses the Cholesky factor of the Hessian as its inverse",
        right: "the upper Cholesky factor of the inverse of the damped Hessian",
        source: "GPTQ, arXiv 2210.17323, section 3.3",
        figures: || {
            let [right, wrong] = compensation_error();
            vec![
                figure("error of the update by the factor of the inverse", right, 0.0, 1e-9),
                figure("the same by the factor of the Hessian", wrong, 1.3, 0.05),
            ]
        },
    },
    Correction {
        id: 31,
        said: "NVFP4 training matches FP8",
        right: "on benchmarks; its loss stays up to 1.5 % behind, with about 16 % of the linear layers in bf16",
        source: "arXiv 2509.25149, section 5",
        figures: none,
    },
    Correction {
        id: 32,
        said: "FP8 doubles and FP4 quadruples throughput",
        right: "the products; a model gains 1.15 to 1.5 times with NVFP4 (torchtitan, CloverLM)",
        source: "torchtitan MXFP8 and NVFP4 reports",
        figures: || {
            vec![figure(
                "bound for the products, B200",
                tera("b200", Unit::Fp4) / tera("b200", Unit::Bf16),
                4.0,
                1e-3,
            )]
        },
    },
];

#[cfg(test)]
mod tests {
    use super::*;

    fn holds(id: u32) {
        let found = by_id(id).map(|correction| (correction.figures)());
        for Figure { what, found, right, within } in found.into_iter().flatten() {
            let deviation = if right == 0.0 { found.abs() } else { (found / right - 1.0).abs() };
            assert!(deviation <= within, "{id}: {what}: {found}, right is {right}");
        }
    }

    #[test]
    fn every_statement_is_corrected_with_a_source() {
        assert_eq!(CORRECTIONS.iter().map(|c| c.id).collect::<Vec<_>>(), (1..=32).collect::<Vec<_>>());
        assert!(CORRECTIONS.iter().all(|c| !c.said.is_empty() && !c.right.is_empty() && c.source.len() > 5));
    }

    macro_rules! right_values {
        ($($name:ident: $id:literal,)*) => {
            $(#[test]
            fn $name() {
                holds($id);
            })*
        };
    }

    // Those without figures are held by tests/cli/explain.rs of the binary: it prints the policies that they are about.
    right_values! {
        dense_rates_of_an_h100: 1,
        operations_for_each_byte: 2,
        dense_fp4_of_blackwell: 3,
        four_bit_integers_in_tensor_cores: 4,
        fp8_before_hopper: 5,
        fp8_and_int8_differ: 6,
        rates_do_not_double_at_each_step: 7,
        scales_of_groups_of_32: 8,
        smallest_numbers_of_f16: 9,
        codes_of_nf4: 10,
        noise_on_normal_numbers: 11,
        ranges_and_relative_precision: 12,
        scales_that_are_rounded_up: 15,
        quartet_is_mxfp4: 16,
        bytes_of_mixed_precision: 17,
        updates_that_bf16_loses: 18,
        promotion_of_sums: 20,
        masters_of_deepseek_v3: 21,
        moments_of_adam: 22,
        residual_stream_in_bf16: 23,
        errors_over_depth: 24,
        kv_cache_of_70b: 25,
        outlier_dimensions: 26,
        fp8_of_h100: 27,
        bound_of_fp8: 29,
        factor_of_gptq: 30,
        bound_of_fp4: 32,
    }
}
