//! Topics about training.

use mantissa_num::minifloat;

use super::measures::{immovable_from, update_limits};
use super::topic::{Deployment, Topic};
use crate::figures::experiment;
use crate::hardware::Unit;
use crate::recommend::{gb, train};
use crate::training::{Recompute, Run, TrainingRecipe, Zero};

/// Learning rate of the examples.
const RATE: f64 = 2e-5;

/// Bytes per parameter of a recipe.
fn bytes(name: &str) -> f64 {
    TrainingRecipe::named(name).map_or(0.0, |recipe| recipe.total())
}

/// Describes a recipe with its bytes for the model.
fn line(deployment: &Deployment<'_>, name: &str) -> String {
    let about = TrainingRecipe::named(name).map_or("", |recipe| recipe.about);
    format!(
        "{name}: {:.2} bytes per parameter, {} for {}: {about}",
        bytes(name),
        gb(bytes(name) * deployment.shape.parameters() as f64),
        deployment.shape.name
    )
}

fn mixed(deployment: &Deployment<'_>) -> Vec<String> {
    vec![
        "mixed precision multiplies in 16 bits and updates f32 master weights: the same parameter exists twice, no layer has a precision of its own".to_owned(),
        line(deployment, "bf16"),
        "quantized training also stores weights, gradients or moments in few bits:".to_owned(),
        line(deployment, "bf16-adam8-master"),
        line(deployment, "int8-sr"),
        line(deployment, "deepseek-v3"),
    ]
}

fn stochastic(_: &Deployment<'_>) -> Vec<String> {
    let [dropped, kept] = update_limits(minifloat::BF16).map(|limit| 100.0 * limit);
    vec![
        "a number between two representable ones is rounded up with the probability of its distance from the lower: the mean is exact".to_owned(),
        format!("rounding to nearest drops every update below {dropped:.3} % of a bf16 weight and keeps every one above {kept:.2} %; Adam's steps are about the learning rate, {RATE:e}: weights from {:.4} on never move", immovable_from(minifloat::BF16, RATE)),
        format!(
            "measured over 100 steps ({}): share of bf16 weights that change, to nearest {}, stochastically {}; gain of updates to nearest over that with a master copy {}; stochastically the gain differs from it by {} of it",
            experiment("updates-changed-nearest").source(),
            experiment("updates-changed-nearest").figure(),
            experiment("updates-changed-stochastic").figure(),
            experiment("updates-gain-nearest").figure(),
            experiment("updates-gain-stochastic").figure()
        ),
        "gradients: the error of a mean of 12 stochastic draws is that of one over √12, of nearest rounding it stays".to_owned(),
    ]
}

fn harder(deployment: &Deployment<'_>) -> Vec<String> {
    let range =
        |float: minifloat::MiniFloat| (f64::from(float.max()) / f64::from(float.min_subnormal())).log2();
    vec![
        format!(
            "gradients span more powers of two than formats have: E4M3 {:.0}, E5M2 {:.0}, f16 {:.0}, bf16 {:.0}",
            range(minifloat::E4M3),
            range(minifloat::E5M2),
            range(minifloat::F16),
            range(minifloat::BF16)
        ),
        format!(
            "updates are small: bf16 weights drop all below {:.3} % of themselves, and some up to {:.2} %",
            100.0 * update_limits(minifloat::BF16)[0],
            100.0 * update_limits(minifloat::BF16)[1]
        ),
        format!(
            "errors act over steps, not over {} layers alone, and distributions move, so that no calibration holds",
            deployment.shape.layers
        ),
        format!(
            "state: {} with an f32 master, against {} of bf16 weights in inference",
            gb(16.0 * deployment.shape.parameters() as f64),
            gb(2.0 * deployment.shape.parameters() as f64)
        ),
        "a failure costs the run: watch overflow, underflow and the signal-to-noise of each operand"
            .to_owned(),
    ]
}

fn qlora(deployment: &Deployment<'_>) -> Vec<String> {
    let run = Run { sequence: 2048, batch: 1, devices: 1, zero: Zero::None, recompute: Recompute::Layers };
    let found = train(deployment.shape, deployment.device, &run, 16, false, deployment.load.memory);
    let of =
        |name: &str| found.rows.iter().find(|row| row.name == name).map_or(0.0, |row| row.recomputed.total());
    vec![
        format!("QLoRA trains adapters on a frozen NF4 model: {} for 2048 tokens, LoRA on bf16 {}, all weights {}", gb(of("qlora")), gb(of("lora")), gb(of("bf16"))),
        format!("NF4 with double quantization takes {:.3} bits, 0.373 less than with f32 scales", mantissa_num::parse_weight("nf4-dq").map_or(0.0, |s| s.format.bits_per_weight(8192, 8192))),
        "it is a way to fine-tune. To serve the result, merge the adapter and quantize with a method of the engine: NF4 is decoded to 16 bits at every use".to_owned(),
    ]
}

fn order(_: &Deployment<'_>) -> Vec<String> {
    vec![
        "not the same: fine-tuning a quantized model corrects for its rounding, quantizing a fine-tuned one rounds what was tuned".to_owned(),
        format!(
            "measured in groups of 32 after 60 steps ({}): loss of INT3 fine-tuned, then rounded, and trained through the rounding (QAT): {}",
            experiment("tuned-int3").source(),
            experiment("tuned-int3").figure()
        ),
        format!(
            "so QAT recovers {} of what rounding loses in INT3, {} in INT2",
            experiment("recovered-int3").figure(),
            experiment("recovered-int2").figure()
        ),
        "choose by the deployment: QAT where 2 or 3 bits are needed, rounding afterwards where 4 are enough".to_owned(),
    ]
}

fn choose(deployment: &Deployment<'_>) -> Vec<String> {
    let run = Run {
        sequence: deployment.load.context.min(4096),
        batch: 1,
        devices: 1,
        zero: Zero::None,
        recompute: Recompute::Scores,
    };
    let found = train(deployment.shape, deployment.device, &run, 16, false, deployment.load.memory);
    let fp8 = match (deployment.device.rate(Unit::Fp8), deployment.device.rate(Unit::Bf16)) {
        (Some(fp8), Some(half)) => format!(
            "FP8 products bound the gain at {:.1} times here; whole models gain 1.04 to 1.25 times",
            fp8 / half
        ),
        _ => "no FP8 products here".to_owned(),
    };
    let mut lines = vec![format!(
        "{} for all weights of {} on {}",
        found.recipe.unwrap_or("nothing fits"),
        deployment.shape.name,
        deployment.device.title
    )];
    lines.extend(found.reasons);
    lines.extend(found.changes.into_iter().map(|change| format!("would change it: {change}")));
    lines.push(fp8);
    lines
}

/// Topics about training.
pub(super) const TOPICS: &[Topic] = &[
    Topic {
        name: "mixed-precision",
        question: "What is the difference between mixed precision and quantized training?",
        answer: mixed,
        measure: "mantissa train --show-policy bf16",
        corrections: &[17, 18, 21, 28],
        answers: &["Q12", "lesson 3"],
    },
    Topic {
        name: "stochastic-rounding",
        question: "What is stochastic rounding, and why does training use it?",
        answer: stochastic,
        measure: "mantissa train --show-policy bf16-pure-sr",
        corrections: &[13],
        answers: &["Q9", "14.12"],
    },
    Topic {
        name: "training-is-harder",
        question: "Why is quantized training harder than quantized inference?",
        answer: harder,
        measure: "mantissa train --show-policy fp8-blockwise",
        corrections: &[14, 19, 31],
        answers: &["13.4"],
    },
    Topic {
        name: "train",
        question: "Which recipe to train this model with?",
        answer: choose,
        measure: "mantissa plan MODEL --train",
        corrections: &[16, 29],
        answers: &[],
    },
    Topic {
        name: "qlora",
        question: "Is QLoRA a way to serve models?",
        answer: qlora,
        measure: "mantissa plan MODEL --train qlora",
        corrections: &[],
        answers: &["14.8"],
    },
    Topic {
        name: "tune-then-quantize",
        question: "Is quantizing and then fine-tuning the same as the other order?",
        answer: order,
        measure: "mantissa finetune MODEL --data data.jsonl --adapter qlora --dry-run --out tuned",
        corrections: &[],
        answers: &["lesson 1"],
    },
];
