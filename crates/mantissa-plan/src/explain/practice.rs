//! Topics about quality in practice: what breaks, what stays in 16 bits, what to measure.

use super::formats::measured;
use super::inference::precision;
use super::measures::sqnr;
use super::topic::{Deployment, Topic};
use crate::figures::{PAGE, experiment, losses};
use crate::memory::{head_bytes, linear_bytes};
use crate::precision::PRECISIONS;
use crate::recommend::gb;
use crate::shape::ModelPart;

fn db(scheme: &str, outlier: f32) -> String {
    sqnr(scheme, Some(outlier)).map_or_else(|| "-".to_owned(), |db| format!("{db:.1}"))
}

fn smooth(deployment: &Deployment<'_>) -> Vec<String> {
    vec![
        "SmoothQuant divides each input channel by a factor and multiplies the weight's column by it: the product is the same, outliers move from inputs, which are hard to quantize, into weights, which are easy".to_owned(),
        format!("int8 inputs per token with one channel of 20 σ have {} dB, of 100 σ {} dB, without {:.1} dB", db("int8-channel", 20.0), db("int8-channel", 100.0), sqnr("int8-channel", None).unwrap_or(0.0)),
        format!("{} has {} inputs in a row: one outlier sets the step of all of them", deployment.shape.name, deployment.shape.hidden),
        format!("KL on ref-32m ({PAGE}), which has no outlier channels: {} nats/token", losses("ref-32m", ["w8a8", "w8a8-smooth"])),
    ]
}

fn inputs(deployment: &Deployment<'_>) -> Vec<String> {
    let of = |name: &str, scheme: &str| {
        format!(
            "{name}: {} dB without outliers, {} with 20 σ, {} with 100 σ in each row",
            sqnr(scheme, None).map_or_else(|| "-".to_owned(), |db| format!("{db:.1}")),
            db(scheme, 20.0),
            db(scheme, 100.0)
        )
    };
    vec![
        format!(
            "weights are fixed and regular; inputs of {} layers change with every token and have outlier channels in large models",
            deployment.shape.layers
        ),
        of("int8 per token", "int8-channel"),
        of("FP8 per token", "fp8-e4m3-channel"),
        of("int4 per token", "int4-channel"),
        of("NVFP4", "nvfp4"),
        measured(["W8A16 INT8", "W8A8 INT8", "W4A16 NVFP4", "W4A4 NVFP4"]),
    ]
}

fn softmax(deployment: &Deployment<'_>) -> Vec<String> {
    let tokens = deployment.load.context;
    let step = |levels: f64| format!("{:.2e}", 0.5 / levels);
    vec![
        format!("attention weights of {tokens} tokens sum to 1: on average {:.1e} each, the largest near 1", 1.0 / tokens as f64),
        format!("int8 in [0, 1] rounds everything below {} to 0, int4 below {}: what many tokens contribute together is lost with the tail", step(255.0), step(15.0)),
        format!(
            "measured ({}): attention weights in 8 bits cost KL {} nats/token, int8 and E4M3 alike, with or without outliers in keys and values; in int4 {}, about as much as int4 queries ({}). Longer contexts have a longer tail, and were not measured",
            experiment("attention-int8").source(),
            experiment("attention-int8").figure(),
            experiment("attention-int4").figure(),
            experiment("queries-int4").figure()
        ),
        "so 8 bits do little harm to attention weights, and 4 bits do; scores before the softmax are as sensitive as queries and keys. Kernels compute both in registers in bf16 or f32, where they cost no memory".to_owned(),
        format!("scores of a prompt of {tokens} tokens would be {} values a head", tokens * tokens),
    ]
}

fn high_precision(deployment: &Deployment<'_>) -> Vec<String> {
    let shape = deployment.shape;
    let all = shape.parameters() as f64;
    let share = |weights: u64| format!("{:.2} %", 100.0 * weights as f64 / all);
    let four = precision("W4A16 INT4");
    let quantized = linear_bytes(shape, &four);
    let rest = 2.0 * (shape.parameters() - shape.linear_weights()) as f64;
    vec![
        format!(
            "embedding: {} of the parameters, head: {}{}; both act on logits directly",
            share(shape.embedding),
            share(shape.head()),
            if shape.tied { " (tied)" } else { "" }
        ),
        format!("norms, biases and routers: {}; routers decide which experts run", share(shape.others)),
        "softmax, scores, residual stream and sums: bf16 or f32 values in passing, which take no memory"
            .to_owned(),
        "in training: master weights in f32, moments in f32 or 8-bit blocks; they keep small updates"
            .to_owned(),
        format!(
            "with 4-bit linear layers of {}, what stays in bf16 takes {}: {:.0} % of the file",
            gb(quantized),
            gb(rest),
            100.0 * rest / (rest + quantized)
        ),
    ]
}

fn head(deployment: &Deployment<'_>) -> Vec<String> {
    let shape = deployment.shape;
    let (half, six) = (precision("BF16"), precision("Q4_K_M"));
    let reads = |name: &str| {
        let p = precision(name);
        100.0 * head_bytes(shape, &p) / (head_bytes(shape, &p) + linear_bytes(shape, &p))
    };
    vec![
        format!("the head of {} × {} takes {} in bf16, {} in Q6_K as GGUF stores it", shape.vocab, shape.hidden, gb(head_bytes(shape, &half)), gb(head_bytes(shape, &six))),
        format!("it is {:.1} % of what a token reads in BF16, {:.1} % beside 4-bit linear layers", reads("BF16"), reads("W4A16 INT4")),
        "its errors go to the logits directly, without a norm after them: measure top-1 agreement, not perplexity alone".to_owned(),
    ]
}

fn breaks(deployment: &Deployment<'_>) -> Vec<String> {
    let layers = deployment.shape.layers as f64;
    vec![
        format!(
            "1. outlier channels in inputs: int8 per token falls from {:.1} to {} dB with one of 100 σ; smooth, rotate, or use FP8",
            sqnr("int8-channel", None).unwrap_or(0.0),
            db("int8-channel", 100.0)
        ),
        "2. single layers, often the first, the last and down projections: keep them wider (mantissa fit)"
            .to_owned(),
        format!(
            "3. keys in 4 bits at long contexts: every one of {} tokens reads them",
            deployment.load.context
        ),
        "4. calibration on another kind of text".to_owned(),
        format!(
            "5. depth: errors of .5 % in each of {layers:.0} layers make {:.1} % if they are uncorrelated, {:.0} % if they all point the same way",
            0.5 * layers.sqrt(),
            100.0 * (1.005f64.powf(layers) - 1.0)
        ),
        "in training: gradients that underflow; then stochastic rounding, blocks, or a wider format for them"
            .to_owned(),
    ]
}

fn calibration(deployment: &Deployment<'_>) -> Vec<String> {
    let widest = deployment.shape.matrices.iter().map(|m| m.cols).max().unwrap_or(1);
    let experts =
        deployment.shape.matrices.iter().find(|m| m.part == ModelPart::Experts && m.active < m.count);
    let seen = experts.map(|m| {
        let share = m.active as f64 / m.count as f64;
        format!("an expert sees {:.1} % of the tokens: {:.0} of 262,144", 100.0 * share, share * 262_144.0)
    });
    let mut lines = vec![
        format!("a Hessian of {widest} inputs needs more tokens than that to have full rank: 128 windows of 2048 tokens are 262,144"),
        "the text must be like what the model will read: channels and experts that it never reaches are quantized blindly, and are named by quantize".to_owned(),
        "inputs with dynamic scales need no calibration".to_owned(),
    ];
    lines.extend(seen);
    lines
}

fn benchmarks(_: &Deployment<'_>) -> Vec<String> {
    let moved = |kl: f64| 100.0 * (kl / 2.0).sqrt();
    let line = |p: &crate::precision::Precision| Some((p.name, p.measured_kl()?));
    let rows = PRECISIONS.iter().filter_map(line).filter(|(_, kl)| *kl > 0.0);
    let rows: Vec<_> = rows
        .map(|(name, kl)| {
            format!("{name}: KL {kl:.4}, at most {:.0} % of the next token's probability moves", moved(kl))
        })
        .collect();
    let mut lines = vec![
        "one score hides what breaks first: retrieval at length, rare languages, tool calls. The divergence from the source has no place to hide (Pinsker's bound):".to_owned(),
    ];
    lines.extend(rows);
    lines
}

fn mistakes(deployment: &Deployment<'_>) -> Vec<String> {
    let of = |topic: &&'static Topic| {
        topic.answers.iter().find_map(|id| id.strip_prefix("14.")?.parse::<u32>().ok())
    };
    let mut all: Vec<_> = super::topics().filter_map(|topic| Some((of(&topic)?, topic))).collect();
    all.sort_by_key(|(id, _)| *id);
    // The first line that has a figure stands for the answer.
    let line = |(id, topic): &(u32, &'static Topic)| {
        let answer = (topic.answer)(deployment);
        let figure = answer.iter().find(|line| line.contains(|c: char| c.is_ascii_digit()));
        format!("{id}. {} ({}): {}", topic.question, topic.name, figure.map_or("", String::as_str))
    };
    all.iter().map(line).collect()
}

fn corrected(_: &Deployment<'_>) -> Vec<String> {
    let line = |c: &super::Correction| {
        let figures = (c.figures)();
        let figures: Vec<_> = figures.iter().map(|f| format!("{} {}", f.what, short(f.found))).collect();
        let computed =
            if figures.is_empty() { String::new() } else { format!("; computed: {}", figures.join(", ")) };
        format!("{}. not \"{}\", but {} ({}){computed}", c.id, c.said, c.right, c.source)
    };
    super::CORRECTIONS.iter().map(line).collect()
}

/// Formats a figure with four digits.
fn short(value: f64) -> String {
    match value.abs() {
        0.0 => "0".to_owned(),
        v if v < 1e-3 => format!("{value:.3e}"),
        v if v < 10.0 => format!("{value:.3}"),
        v if v < 1000.0 => format!("{value:.1}"),
        _ => format!("{value:.0}"),
    }
}

/// Topics about practice.
pub(super) const TOPICS: &[Topic] = &[
    Topic {
        name: "mistakes",
        question: "Which mistakes are common?",
        answer: mistakes,
        measure: "mantissa plan MODEL",
        corrections: &[],
        answers: &[],
    },
    Topic {
        name: "corrections",
        question: "What is widely repeated and wrong?",
        answer: corrected,
        measure: "mantissa schemes",
        corrections: &[],
        answers: &[],
    },
    Topic {
        name: "smoothquant",
        question: "What does SmoothQuant do?",
        answer: smooth,
        measure: "mantissa quantize MODEL --recipe w8a8-smooth --dry-run",
        corrections: &[26],
        answers: &["Q4"],
    },
    Topic {
        name: "inputs",
        question: "Why are inputs harder to quantize than weights?",
        answer: inputs,
        measure: "mantissa inspect MODEL --stats",
        corrections: &[],
        answers: &["14.3"],
    },
    Topic {
        name: "softmax",
        question: "What breaks if softmax or attention scores are quantized?",
        answer: softmax,
        measure: "mantissa eval MODEL --text text.txt --help-all",
        corrections: &[],
        answers: &["Q11"],
    },
    Topic {
        name: "high-precision",
        question: "What stays in higher precision, and why?",
        answer: high_precision,
        measure: "mantissa inspect MODEL --tensors",
        corrections: &[23],
        answers: &["13.5", "Q13"],
    },
    Topic {
        name: "head",
        question: "What does quantizing the head cost?",
        answer: head,
        measure: "mantissa eval quantized --text text.txt --reference MODEL",
        corrections: &[],
        answers: &["14.10"],
    },
    Topic {
        name: "breaks-first",
        question: "What usually breaks first?",
        answer: breaks,
        measure: "mantissa doctor MODEL",
        corrections: &[24],
        answers: &["13.8"],
    },
    Topic {
        name: "calibration",
        question: "How much calibration, and on what?",
        answer: calibration,
        measure: "mantissa quantize MODEL --recipe gptq-int4-g128 --calibration text.txt --dry-run",
        corrections: &[],
        answers: &["14.6"],
    },
    Topic {
        name: "one-benchmark",
        question: "Does one good benchmark make a quantized model safe?",
        answer: benchmarks,
        measure: "mantissa eval quantized --text text.txt --reference MODEL",
        corrections: &[],
        answers: &["14.7"],
    },
];
