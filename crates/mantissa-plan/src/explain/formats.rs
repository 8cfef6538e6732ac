//! Topics about number formats.

use mantissa_num::{minifloat, parse_weight};

use super::measures::{MEASURED_ON, accumulator_bias, accumulator_error, sqnr, update_limits};
use super::topic::{Deployment, Topic};
use crate::hardware::Unit;
use crate::memory::linear_bytes;
use crate::precision::{PRECISIONS, Precision, format_of};
use crate::recommend::gb;

/// Formats that are compared in answers.
const COMPARED: [(&str, &str); 8] = [
    ("int8-channel", "INT8 per channel"),
    ("fp8-e4m3-channel", "FP8 E4M3 per channel"),
    ("int4-channel", "INT4 per channel"),
    ("int4-g128", "INT4 in groups of 128"),
    ("nf4", "NF4 in blocks of 64"),
    ("mxfp4", "MXFP4"),
    ("nvfp4", "NVFP4"),
    ("int3-g128", "INT3 in groups of 128"),
];

/// Formats a ratio in dB.
fn db(scheme: &str, outlier: Option<f32>) -> String {
    sqnr(scheme, outlier).map_or_else(|| "-".to_owned(), |db| format!("{db:.1} dB"))
}

fn bits(scheme: &str) -> f64 {
    format_of(scheme).bits_per_weight(4096, 4096)
}

fn granularity(deployment: &Deployment<'_>) -> Vec<String> {
    let of = |scheme| {
        let (plain, outlier) = (db(scheme, None), db(scheme, Some(50.0)));
        format!(
            "{:.3} bits, {plain} on normal numbers, {outlier} with one value of 50 σ in each row",
            bits(scheme)
        )
    };
    let width = deployment.shape.hidden;
    vec![
        format!("per tensor: one scale for all. INT8: {}", of("int8-tensor")),
        format!(
            "per channel: a scale for each output row, {:.4} bits more for rows of {width}; free in a matrix product. INT8: {}",
            16.0 / width as f64,
            of("int8-channel")
        ),
        format!("per group: a scale for so many values of a row. INT4 in groups of 128: {}", of("int4-g128")),
        format!("INT4 in groups of 32: {}", of("int4-g32")),
        format!(
            "INT4 per channel: {}: at 4 bits and less, only blocks keep the noise down",
            of("int4-channel")
        ),
        MEASURED_ON.to_owned(),
    ]
}

fn interchangeable(deployment: &Deployment<'_>) -> Vec<String> {
    let row = |(scheme, name): (&str, &str)| {
        let unit = parse_weight(scheme).ok().map(|scheme| deployment.device.execute(&scheme.format, None));
        let unit = unit.map_or_else(|| "-".to_owned(), |execution| execution.unit.to_string());
        format!(
            "{name}: {:.3} bits, {}, {} with an outlier of 50 σ; weights alone are multiplied in {unit} here",
            bits(scheme),
            db(scheme, None),
            db(scheme, Some(50.0))
        )
    };
    let mut lines = vec![format!("signal to noise, bits with scales; {MEASURED_ON}:")];
    lines.extend(COMPARED.map(row));
    lines
}

fn fp8_or_int8(deployment: &Deployment<'_>) -> Vec<String> {
    let device = deployment.device;
    let rate =
        |unit| device.rate(unit).map_or_else(|| "none".to_owned(), |rate| format!("{:.0} T/s", rate / 1e12));
    let choice = match (device.rate(Unit::Fp8), device.rate(Unit::Int8)) {
        (Some(fp8), Some(int8)) if int8 > 1.5 * fp8 => "INT8 is faster here; FP8 needs no smoothing",
        (Some(fp8), Some(int8)) if fp8 > 1.5 * int8 => "FP8 is faster here",
        (Some(_), Some(_)) => {
            "equally fast here: FP8 for models with outliers, INT8 for the smaller noise without"
        }
        (Some(_), None) => "only FP8 has instructions here",
        (None, Some(_)) => "only INT8 has instructions here",
        (None, None) => "neither has instructions here: both save memory only",
    };
    vec![
        format!("{}: FP8 {}, INT8 {}: {choice}", device.title, rate(Unit::Fp8), rate(Unit::Int8)),
        format!(
            "without outliers INT8 per token has {}, E4M3 {}",
            db("int8-channel", None),
            db("fp8-e4m3-channel", None)
        ),
        format!(
            "with one value of 50 σ in each row INT8 has {}, E4M3 {}: a float's steps grow with the value, so that one large value costs the others nothing",
            db("int8-channel", Some(50.0)),
            db("fp8-e4m3-channel", Some(50.0))
        ),
        format!(
            "ranges say nothing, since scales move them: E4M3's largest over its smallest normal value is {}, INT8's 127",
            minifloat::E4M3.max() / minifloat::E4M3.min_normal()
        ),
        measured(["W8A8 INT8", "W8A8 FP8"]),
    ]
}

/// States the measured losses of precisions.
pub(super) fn measured<const N: usize>(names: [&str; N]) -> String {
    let of = |name: &str| {
        let kl = Precision::named(name).and_then(|p| p.measured_kl());
        kl.map_or_else(|| format!("{name}: not measured"), |kl| format!("{name} {kl:.4}"))
    };
    format!("KL on our models, nats/token: {}", names.map(of).join(", "))
}

fn nf4(deployment: &Deployment<'_>) -> Vec<String> {
    let bytes = |name: &str| Precision::named(name).map_or(0.0, |p| linear_bytes(deployment.shape, &p));
    vec![
        "NF4's 16 levels are quantiles of a normal distribution, INT4's are equally spaced".to_owned(),
        format!("on normal numbers NF4 in blocks of 64 has {}, INT4 in groups of 64 {}, of 128 {}", db("nf4", None), db("int4-g64", None), db("int4-g128", None)),
        format!("linear layers of {}: NF4 {}, INT4 with zero points {}", deployment.shape.name, gb(bytes("W4A16 NF4")), gb(bytes("W4A16 INT4"))),
        measured(["W4A16 NF4", "W4A16 INT4"]),
        "no unit multiplies NF4: it is decoded to 16 bits first. It is for storage, as in QLoRA, not for speed".to_owned(),
    ]
}

fn blocks(deployment: &Deployment<'_>) -> Vec<String> {
    let native = |scheme: &str| {
        let format = parse_weight(scheme).ok().map(|scheme| scheme.format);
        let execution = format.map(|format| deployment.device.execute(&format, Some(&format)));
        match execution {
            Some(execution) => {
                execution.fallback.unwrap_or_else(|| format!("multiplied in {}", execution.unit))
            }
            None => "-".to_owned(),
        }
    };
    vec![
        format!(
            "MX: 32 elements share a power of two (E8M0), {:.2} bits; NVFP4: 16 share an E4M3 scale, and a tensor an f32 one, {:.2} bits",
            bits("mxfp4"),
            bits("nvfp4")
        ),
        format!(
            "on normal numbers MXFP4 has {}, NVFP4 {}, NVFP4 with Four Over Six {}",
            db("mxfp4", None),
            db("nvfp4", None),
            db("nvfp4:4over6", None)
        ),
        format!(
            "with an outlier of 50 σ in each row MXFP4 has {}, NVFP4 {}: a block keeps the damage to itself",
            db("mxfp4", Some(50.0)),
            db("nvfp4", Some(50.0))
        ),
        format!("MXFP4 weights and inputs on {}: {}", deployment.device.title, native("mxfp4")),
        format!("NVFP4 weights and inputs on {}: {}", deployment.device.title, native("nvfp4")),
        measured(["W4A16 NVFP4", "W4A4 NVFP4", "W4A16 MXFP4"]),
    ]
}

fn accumulator(deployment: &Deployment<'_>) -> Vec<String> {
    let of = |what: &str, k: u64| {
        let summed = (k as usize).clamp(64, 1 << 15);
        let [plain, promoted] = accumulator_error(summed);
        let bias = accumulator_bias(summed);
        format!(
            "{what} ({k} products of positive numbers): relative error {plain:.5} in 14 bits, {promoted:.5} with promotion every 128; mean with its sign {bias:+.5}"
        )
    };
    let widest =
        deployment.shape.matrices.iter().map(|m| m.cols as u64).max().unwrap_or(deployment.shape.hidden);
    vec![
        "Hopper's tensor cores keep about 14 bits of a sum of FP8 products, so the error grows with its length (modelled, not compared with the hardware)".to_owned(),
        "it has one sign: lower bits are cut off, so every sum of products of one sign is too small, and no average over layers or steps removes it; products of both signs lose an eighth to a hundredth as much (docs/results/arithmetic.md)".to_owned(),
        of("sums over the hidden states", deployment.shape.hidden),
        of("the longest sums", widest),
        "sums of int8 products are exact in 32 bits up to 130,000 products".to_owned(),
    ]
}

fn half_formats(_: &Deployment<'_>) -> Vec<String> {
    let of = |float: minifloat::MiniFloat| {
        format!(
            "{}: {} exponent and {} mantissa bits, largest {:e}, smallest normal {:e}, subnormal {:e}, steps of {:e} of the value",
            float.name,
            float.exponent_bits,
            float.mantissa_bits,
            float.max(),
            float.min_normal(),
            float.min_subnormal(),
            2.0 * update_limits(float)[1]
        )
    };
    vec![
        of(minifloat::F16),
        of(minifloat::BF16),
        "equal size, different split: f16 overflows above 65504 and needs loss scaling; bf16 has the range of f32 and 8 times coarser steps".to_owned(),
    ]
}

fn candidates(deployment: &Deployment<'_>) -> Vec<String> {
    let row = |p: &Precision| {
        let bytes = linear_bytes(deployment.shape, p) / deployment.shape.linear_weights() as f64;
        let kl = p.measured_kl().map_or_else(|| "not measured".to_owned(), |kl| format!("{kl:.4}"));
        format!(
            "{}: {:.2} bits per weight of {}, KL {kl} nats/token on our models",
            p.name,
            8.0 * bytes,
            deployment.shape.name
        )
    };
    PRECISIONS.iter().map(row).collect()
}

/// Topics about formats.
pub(super) const TOPICS: &[Topic] = &[
    Topic {
        name: "scales",
        question: "What is the difference between scales per tensor, per channel and per group?",
        answer: granularity,
        measure: "mantissa schemes",
        corrections: &[8],
        answers: &["Q1", "14.11"],
    },
    Topic {
        name: "formats",
        question: "Are INT4, FP4, NF4, MXFP4 and NVFP4 interchangeable?",
        answer: interchangeable,
        measure: "mantissa eval quantized --text text.txt --reference MODEL",
        corrections: &[11],
        answers: &["14.1"],
    },
    Topic {
        name: "fp8-or-int8",
        question: "Why FP8 rather than INT8?",
        answer: fp8_or_int8,
        measure: "mantissa eval quantized --text text.txt --reference MODEL",
        corrections: &[5, 6, 12],
        answers: &["Q2"],
    },
    Topic {
        name: "nf4",
        question: "What is special about NF4 against INT4?",
        answer: nf4,
        measure: "mantissa quantize MODEL --recipe nf4 --dry-run",
        corrections: &[10],
        answers: &["Q5"],
    },
    Topic {
        name: "block-scales",
        question: "What are microscaling (MX) formats and NVFP4?",
        answer: blocks,
        measure: "mantissa quantize MODEL --recipe nvfp4 --dry-run",
        corrections: &[3, 15],
        answers: &["Q6"],
    },
    Topic {
        name: "accumulator",
        question: "Why does the precision of accumulators matter?",
        answer: accumulator,
        measure: "mantissa eval MODEL --text text.txt --help-all",
        corrections: &[20],
        answers: &["Q8", "14.5"],
    },
    Topic {
        name: "f16-or-bf16",
        question: "Are f16 and bf16 the same?",
        answer: half_formats,
        measure: "mantissa explain 0.1 --as f16,bf16",
        corrections: &[9],
        answers: &["lesson 2"],
    },
    Topic {
        name: "bits",
        question: "How many bits per weight does each precision take, and what does it lose?",
        answer: candidates,
        measure: "mantissa recipes",
        corrections: &[],
        answers: &[],
    },
];
