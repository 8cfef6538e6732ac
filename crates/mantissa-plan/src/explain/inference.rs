//! Topics about running quantized models.

use super::topic::{Deployment, Topic};
use crate::figures::{PAGE, experiment, losses};
use crate::memory::{capacity, concurrency, inference, linear_bytes, longest_context};
use crate::parallel::{PARALLELS, Parallel, Split};
use crate::precision::{KVS, Kv, PRECISIONS, Precision};
use crate::recommend::{Row, answer, gb, rate};
use crate::roofline::{Bound, Setup, decode_intensity, speculation};

/// Finds a precision of the table; BF16 if there is none of the name, which a test excludes.
pub(super) fn precision(name: &str) -> Precision {
    Precision::named(name).unwrap_or(PRECISIONS[0])
}

/// Formats the middle of a predicted rate with its interval.
fn speed(rates: [f64; 3]) -> String {
    format!("{} tok/s (predicted {}–{})", rate(rates[1]), rate(rates[0]), rate(rates[2]))
}

fn weight_only(deployment: &Deployment<'_>) -> Vec<String> {
    let (four, half, kv) = (precision("W4A16 INT4"), precision("BF16"), KVS[0]);
    let (four, half) = (deployment.setup(&four, &kv), deployment.setup(&half, &kv));
    let depth = deployment.load.depth();
    let gain = |batch| four.decode(batch, depth).tokens_per_s[1] / half.decode(batch, depth).tokens_per_s[1];
    let prompts = four.prefill(deployment.load.prefill).tokens_per_s[1]
        / half.prefill(deployment.load.prefill).tokens_per_s[1];
    let unit = half.execution().unit;
    let ridge = deployment.device.ridge(unit).unwrap_or(0.0);
    let crossover = match four.crossover(half.precision, depth, 1.1) {
        Some(1) => "it gains less than a tenth at any batch".to_owned(),
        Some(batch) => format!("from batch {batch} on it gains less than a tenth"),
        None => "it gains more than a tenth up to batch 4096".to_owned(),
    };
    vec![
        format!(
            "a step reads {} in BF16, {} in W4A16 INT4, and does as many operations in both: weights are decoded and multiplied in {unit}",
            gb(half.decode(1, depth).bytes),
            gb(four.decode(1, depth).bytes)
        ),
        format!(
            "one sequence does {:.0} operation for each byte of bf16 weights, {:.0} of 4-bit weights; {} can do {ridge:.0}: it waits for memory",
            decode_intensity(16.0),
            decode_intensity(4.0),
            deployment.device.title
        ),
        format!(
            "W4A16 over BF16 with {depth} tokens in each sequence: {:.2} times at batch 1, {:.2} at 16, {:.2} at 256; {crossover}",
            gain(1),
            gain(16),
            gain(256)
        ),
        format!(
            "a prompt of {} tokens: {prompts:.2} times: operations bind, and they are the same",
            deployment.load.prefill
        ),
    ]
}

fn not_faster(deployment: &Deployment<'_>) -> Vec<String> {
    let found = answer(deployment.shape, deployment.device, deployment.load);
    let plain = found.rows.iter().find(|row| row.precision.is_dense());
    let Some(plain) = plain else { return Vec::new() };
    let line = |row: &Row| {
        let fallback = row.execution.fallback.as_ref().map_or_else(String::new, |why| format!("; {why}"));
        format!(
            "{}: {:.2} of the bytes, decoding {:.2} times, prompts {:.2} times as fast in {}{fallback}",
            row.precision.name,
            row.bytes.weights() / plain.bytes.weights(),
            row.decode.tokens_per_s[1] / plain.decode.tokens_per_s[1],
            row.prefill.tokens_per_s[1] / plain.prefill.tokens_per_s[1],
            row.execution.unit
        )
    };
    let names = ["W8A16 INT8", "W8A8 INT8", "W8A8 FP8", "W4A16 INT4", "W4A16 NVFP4", "W4A4 NVFP4"];
    let rows = names.iter().filter_map(|name| found.rows.iter().find(|row| row.precision.name == *name));
    let mut lines = vec![format!(
        "a format is faster if a kernel uses it, the device has the instruction, and the load waits for what it saves; on {}, against BF16 at batch {}:",
        deployment.device.title, deployment.load.batch
    )];
    lines.extend(rows.map(line));
    lines
}

fn kernels(deployment: &Deployment<'_>) -> Vec<String> {
    let found = answer(deployment.shape, deployment.device, deployment.load);
    let line = |row: &Row| {
        let engines =
            if row.loads.engines.is_empty() { "no engine".to_owned() } else { row.loads.engines.join(", ") };
        let refusal = row.refusal().map_or_else(String::new, |why| format!("; {why}"));
        format!("{}: {engines}{refusal}", row.precision.name)
    };
    let mut lines = vec![format!(
        "{} multiplies {}",
        deployment.device.title,
        deployment
            .device
            .rates
            .iter()
            .map(|(unit, rate)| format!("{unit} at {:.1} T/s", rate / 1e12))
            .collect::<Vec<_>>()
            .join(", ")
    )];
    lines.extend(found.rows.iter().map(line));
    lines
}

fn latency(deployment: &Deployment<'_>) -> Vec<String> {
    let of = |name: &str, batch: u64| {
        let (p, kv) = (precision(name), KVS[0]);
        let found = deployment.setup(&p, &kv).decode(batch, deployment.load.depth());
        format!("{name} {}, waits for {}", speed(found.tokens_per_s), found.bound.words())
    };
    let bytes = |name: &str| gb(linear_bytes(deployment.shape, &precision(name)));
    vec![
        format!(
            "memory: linear layers take {} in BF16, {} in W8A8, {} in W4A16",
            bytes("BF16"),
            bytes("W8A8 FP8"),
            bytes("W4A16 INT4")
        ),
        format!("batch 1: {}; {}", of("BF16", 1), of("W4A16 INT4", 1)),
        format!("batch 256: {}; {}", of("BF16", 256), of("W4A16 INT4", 256)),
        "latency follows what a step waits for: bytes while memory binds, operations after that".to_owned(),
    ]
}

fn kv_cache(deployment: &Deployment<'_>) -> Vec<String> {
    let half = precision("BF16");
    let memory = deployment.load.memory.unwrap_or_else(|| deployment.device.available());
    let depth = deployment.load.depth();
    let share = |kv: &Kv, batch: u64| {
        let setup = deployment.setup(&half, kv);
        batch as f64 * setup.cache_reads(depth) / setup.decode(batch, depth).bytes
    };
    let line = |kv: &Kv| {
        let setup = deployment.setup(&half, kv);
        format!(
            "{}: {} per token, {} for {} × {} tokens; {:.0} % of a step's reads at batch 1, {:.0} % at {}; decoding {} tok/s; {} sequences fit; KL {} on babyllama-105",
            kv.name,
            per_token(kv.bytes_per_token(deployment.shape)),
            gb(deployment.load.batch as f64
                * kv.bytes_of_sequence(deployment.shape, deployment.load.context)),
            deployment.load.batch,
            deployment.load.context,
            100.0 * share(kv, 1),
            100.0 * share(kv, deployment.load.batch.max(16)),
            deployment.load.batch.max(16),
            rate(setup.decode(deployment.load.batch.max(16), depth).tokens_per_s[1]),
            concurrency(
                deployment.shape,
                &half,
                kv,
                deployment.load.context,
                memory,
                deployment.load.split()
            ),
            kv.kl.map_or_else(|| "not measured".to_owned(), |kl| format!("{kl}"))
        )
    };
    let mut lines = vec!["a decoding step reads every key and value again; a prompt writes each once, so its time does not change:".to_owned()];
    lines.extend(KVS.iter().map(line));
    lines
}

/// Formats the bytes of a token.
fn per_token(bytes: f64) -> String {
    if bytes < 1e4 { format!("{bytes:.0} bytes") } else { format!("{:.0} kB", bytes / 1e3) }
}

fn int4_kv(deployment: &Deployment<'_>) -> Vec<String> {
    let memory = deployment.load.memory.unwrap_or_else(|| deployment.device.available());
    let four = precision("W4A16 INT4");
    let of = |name: &str| Kv::named(name).unwrap_or(KVS[0]);
    let line = |kv: Kv| {
        format!(
            "{}: {}, beside W4A16 INT4 weights; KL {} on babyllama-105",
            kv.name,
            capacity(
                concurrency(
                    deployment.shape,
                    &four,
                    &kv,
                    deployment.load.context,
                    memory,
                    deployment.load.split()
                ),
                deployment.load.context,
                longest_context(deployment.shape, &four, &kv, memory, deployment.load.split()),
            ),
            kv.kl.unwrap_or(0.0)
        )
    };
    vec![
        "where the cache does not fit otherwise, and long contexts are not read back exactly: with scales per token and head".to_owned(),
        line(of("int8")),
        line(of("int4")),
        format!(
            "keys suffer first: keys alone in int4 cost KL {}, values alone {} ({})",
            experiment("keys-int4").figure(),
            experiment("values-int4").figure(),
            experiment("keys-int4").source()
        ),
    ]
}

fn long_context(deployment: &Deployment<'_>) -> Vec<String> {
    let (four, half) = (precision("W4A16 INT4"), precision("BF16"));
    let at = |depth: u64| {
        let kv = KVS[0];
        let (quantized, plain) = (deployment.setup(&four, &kv), deployment.setup(&half, &kv));
        let found = quantized.decode(1, depth);
        let gain = found.tokens_per_s[1] / plain.decode(1, depth).tokens_per_s[1];
        format!(
            "{depth} tokens: {:.0} % of a step's reads are keys and values; W4A16 gains {gain:.2} times",
            100.0 * quantized.cache_reads(depth) / found.bytes
        )
    };
    let longest = deployment.shape.context.clamp(2048, 131_072);
    vec![
        at(1024),
        at(longest / 4),
        at(longest),
        "quality at 4096 tokens says nothing about 128k: errors of keys and values act on every token that reads them; measure at your length".to_owned(),
    ]
}

fn decide(deployment: &Deployment<'_>) -> Vec<String> {
    let found = answer(deployment.shape, deployment.device, deployment.load);
    let choice = &found.recommendation;
    let mut lines = vec![match choice.precision {
        Some(name) => format!("{name} with keys and values in {}", choice.kv.unwrap_or("f16")),
        None => "nothing fits".to_owned(),
    }];
    lines.extend(choice.reasons.iter().cloned());
    lines.extend(choice.changes.iter().map(|change| format!("would change it: {change}")));
    lines.push("then measure on texts and tasks like yours; if the loss is too large, give bits back in this order: KV cache, inputs, weights".to_owned());
    lines
}

fn methods(deployment: &Deployment<'_>) -> Vec<String> {
    let bytes = |name: &str| gb(linear_bytes(deployment.shape, &precision(name)));
    let native = deployment
        .device
        .execute(&precision("W8A8 FP8").weight_format(), precision("W8A8 FP8").input_format().as_ref());
    let native = native.fallback.unwrap_or_else(|| format!("multiplied in {}", native.unit));
    vec![
        format!(
            "FP8 W8A8 saves operations too, where the device has them; here: {native}. Linear layers {}",
            bytes("W8A8 FP8")
        ),
        format!(
            "AWQ and GPTQ are methods for the same 4-bit format, {}: AWQ scales salient channels, GPTQ corrects errors by the Hessian of the inputs",
            bytes("W4A16 INT4")
        ),
        format!(
            "KL on ref-32m ({PAGE}): {}",
            losses(
                "ref-32m",
                ["gptaq-int4-g128-asym", "gptq-int4-g128-asym", "awq-int4-g128-asym", "rtn-int4-g128-asym"]
            )
        ),
        format!(
            "for this load: {}",
            answer(deployment.shape, deployment.device, deployment.load)
                .recommendation
                .precision
                .unwrap_or("nothing fits")
        ),
    ]
}

fn bad_int4(deployment: &Deployment<'_>) -> Vec<String> {
    let (four, eight, half, kv) = (precision("W4A16 INT4"), precision("W8A8 FP8"), precision("BF16"), KVS[0]);
    let many = 256;
    let of = |p: &Precision| deployment.setup(p, &kv).decode(many, deployment.load.depth()).tokens_per_s[1];
    let saved = linear_bytes(deployment.shape, &half) - linear_bytes(deployment.shape, &four);
    let small = if deployment.shape.parameters() < crate::recommend::SMALL_MODEL {
        "which is little"
    } else {
        "which counts"
    };
    vec![
        format!(
            "large batches: at {many} sequences W4A16 decodes {:.2} times as fast as BF16, W8A8 {:.2} times",
            of(&four) / of(&half),
            of(&eight) / of(&half)
        ),
        format!(
            "small models: they lose more, and save less; {} saves {}, {small}",
            deployment.shape.name,
            gb(saved)
        ),
        format!(
            "a small loss is measured, not assumed ({PAGE}): {} nats/token on ref-32m, which was trained longer; {} on ref-8m",
            losses("ref-32m", ["gptq-int4-g128"]),
            losses("ref-8m", ["gptq-int4-g128"])
        ),
        format!(
            "inputs of 4 bits: KL {:.4} for W4A4 NVFP4 against {:.4} for W4A16",
            precision("W4A4 NVFP4").measured_kl().unwrap_or(0.0),
            precision("W4A16 NVFP4").measured_kl().unwrap_or(0.0)
        ),
        "training in INT4, and long contexts with keys in INT4, are not solved".to_owned(),
    ]
}

fn speculative(deployment: &Deployment<'_>) -> Vec<String> {
    let four = precision("W4A16 INT4");
    let setup = deployment.setup(&four, &KVS[0]);
    let verify = |n: u32| {
        let tokens = u64::from(n) + 1;
        let depth = deployment.load.depth();
        let one = 1.0 / setup.decode(1, depth).tokens_per_s[1];
        tokens as f64 / setup.verify(1, tokens, depth).tokens_per_s[1] / one
    };
    let line = |acceptance: f64, n: u32| {
        let gain = speculation(acceptance, n, 0.05) / verify(n);
        format!(
            "{n} drafted tokens, {:.0} % accepted: {gain:.2} times, a verifying step takes {:.2} of a plain one",
            100.0 * acceptance,
            verify(n)
        )
    };
    vec![
        "several tokens of a sequence are verified in one step, which reads the weights and the sequence's keys and values once; drafting costs a twentieth of a step each here".to_owned(),
        line(0.6, 3),
        line(0.8, 4),
        line(0.8, 8),
    ]
}

fn experts(deployment: &Deployment<'_>) -> Vec<String> {
    let half = precision("BF16");
    let setup = deployment.setup(&half, &KVS[0]);
    let read = |batch: u64| {
        let bytes = setup.decode(batch, 0).bytes;
        format!("batch {batch}: {}", gb(bytes))
    };
    let (all, active) = (deployment.shape.parameters() as f64, deployment.shape.active_parameters() as f64);
    if !deployment.shape.is_mixture() {
        return vec![
            format!(
                "{} has no experts: a token passes through all {:.1} B parameters, and a step of any batch reads {} in BF16",
                deployment.shape.name,
                all / 1e9,
                gb(setup.decode(1, 0).bytes)
            ),
            "for a mixture, operations follow the active parameters, memory all of them: --params 30B-A3B"
                .to_owned(),
        ];
    }
    vec![
        format!("memory holds all {:.1} B parameters, a token passes through {:.1} B", all / 1e9, active / 1e9),
        format!("weights read in a step, in BF16: {}", [1, 8, 64, 512].map(read).join(", ")),
        "operations follow the active parameters, memory the total, and reads lie between: every token of a batch calls other experts".to_owned(),
    ]
}

fn tensor_parallel(deployment: &Deployment<'_>) -> Vec<String> {
    let half = precision("BF16");
    let kv = KVS[0];
    let of = |devices: u64, reduce_bits: f64| {
        let split = Split { devices, by: Parallel::Tensor };
        let setup = Setup { split, reduce_bits, ..deployment.setup(&half, &kv) };
        let one = setup.decode(1, deployment.load.depth());
        let prompt = setup.exchange_seconds(2048.0, 1.0);
        let bound = if one.bound == Bound::Link { ", waits for links" } else { "" };
        format!(
            "{devices} devices, sums in {reduce_bits:.0} bits: decoding {}{bound}; sums of a chunk of 2048 tokens {:.1} ms",
            speed(one.tokens_per_s),
            1e3 * prompt
        )
    };
    let link = deployment.device.link / 1e9;
    let held = |by: Parallel| {
        let (load, split) = (deployment.load, Split { devices: 8, by });
        let batch = load.batch.max(8);
        let bytes = inference(deployment.shape, &half, &kv, load.context, batch, split);
        let setup = Setup { split, ..deployment.setup(&half, &kv) };
        format!(
            "--parallel {} on 8 devices, {batch} × {} tokens: weights {} and KV cache {} on each, decoding {} tok/s",
            by.name(),
            load.context,
            gb(bytes.weights()),
            gb(bytes.kv),
            rate(setup.decode(batch, load.depth()).tokens_per_s[1])
        )
    };
    let ways = PARALLELS.into_iter().filter(|by| by.suits(deployment.shape));
    let mut lines = vec![
        format!(
            "two sums over devices in each of {} layers, over links of {link:.0} GB/s",
            deployment.shape.layers
        ),
        of(2, 16.0),
        of(8, 16.0),
        of(8, 8.0),
        "every device holds at least one key/value head, and all of a latent: with fewer heads than devices the cache is held more than once".to_owned(),
    ];
    lines.extend(ways.map(held));
    lines
}

fn memory(deployment: &Deployment<'_>) -> Vec<String> {
    let shape = deployment.shape;
    let parameters = shape.parameters() as f64;
    let kv = KVS[0];
    let line = |name: &str| {
        let p = precision(name);
        let load = deployment.load;
        let all = inference(shape, &p, &kv, load.context, load.batch, load.split());
        format!(
            "{name}: weights {} + KV {} + activations {} = {}",
            gb(all.weights()),
            gb(all.kv),
            gb(all.activations),
            gb(all.total())
        )
    };
    let cache = shape.caches.iter().map(|c| {
        let values = if c.values == 0 { "one latent of".to_owned() } else { "2 ×".to_owned() };
        format!("{} layers × {values} {} elements × 2 bytes", c.layers, c.keys)
    });
    vec![
        format!(
            "weights: {} parameters × 2 bytes = {} in bf16, × 4 = {} in f32",
            crate::shape::billions(shape.parameters()),
            gb(2.0 * parameters),
            gb(4.0 * parameters)
        ),
        format!(
            "KV cache of a token: {} = {}",
            cache.collect::<Vec<_>>().join(" + "),
            per_token(kv.bytes_per_token(shape))
        ),
        line("BF16"),
        line("W8A8 FP8"),
        line("W4A16 INT4"),
        format!(
            "training with an f32 master: 16 bytes × parameters = {}, and activations",
            gb(16.0 * parameters)
        ),
        format!(
            "{}: {} usable",
            deployment.device.title,
            gb(deployment.load.memory.unwrap_or_else(|| deployment.device.available()))
        ),
    ]
}

/// Topics about inference.
pub(super) const TOPICS: &[Topic] = &[
    Topic {
        name: "memory",
        question: "What does this model take, worked out?",
        answer: memory,
        measure: "mantissa quantize MODEL --recipe w4a16 --dry-run",
        corrections: &[22, 25],
        answers: &[],
    },
    Topic {
        name: "decide",
        question: "Which precision for this model, hardware and load?",
        answer: decide,
        measure: "mantissa eval quantized --text text.txt --reference MODEL",
        corrections: &[1, 32],
        answers: &["15.4", "Q15"],
    },
    Topic {
        name: "awq-gptq-fp8",
        question: "Why choose AWQ, GPTQ or FP8?",
        answer: methods,
        measure: "mantissa quantize MODEL --recipe awq-int4-g128-asym --text text.txt",
        corrections: &[30],
        answers: &["13.1"],
    },
    Topic {
        name: "bad-int4",
        question: "When is INT4 a bad idea?",
        answer: bad_int4,
        measure: "mantissa eval quantized --text text.txt --reference MODEL",
        corrections: &[4],
        answers: &["13.2", "lesson 4"],
    },
    Topic {
        name: "w4a16",
        question: "Why is W4A16 good for decoding and not for prompts?",
        answer: weight_only,
        measure: "mantissa bench MODEL --batch 1,4,16",
        corrections: &[2],
        answers: &["Q3"],
    },
    Topic {
        name: "latency",
        question: "Why does quantization save memory but not always time?",
        answer: latency,
        measure: "mantissa bench MODEL --batch 1,16,64",
        corrections: &[],
        answers: &["13.3"],
    },
    Topic {
        name: "not-faster",
        question: "Why is a quantized model not always a fast one?",
        answer: not_faster,
        measure: "mantissa bench MODEL --explain",
        corrections: &[7],
        answers: &["Q10", "14.2"],
    },
    Topic {
        name: "kernels",
        question: "How do hardware and kernels decide?",
        answer: kernels,
        measure: "mantissa lint MODEL --for vllm:gpu=h100",
        corrections: &[27],
        answers: &["13.7", "14.4"],
    },
    Topic {
        name: "kv-cache",
        question: "When does quantizing the KV cache help?",
        answer: kv_cache,
        measure: "mantissa bench MODEL --depth 0,4096 --kv f16 --kv int8 --kv int4",
        corrections: &[],
        answers: &["13.6", "Q7"],
    },
    Topic {
        name: "int4-kv",
        question: "When to store keys and values in INT4?",
        answer: int4_kv,
        measure: "mantissa eval MODEL --text text.txt --kv int4",
        corrections: &[],
        answers: &["Q14"],
    },
    Topic {
        name: "long-context",
        question: "What changes at long contexts?",
        answer: long_context,
        measure: "mantissa eval MODEL --text text.txt --kv int8 --context 8192",
        corrections: &[],
        answers: &["14.9"],
    },
    Topic {
        name: "speculation",
        question: "What does speculative decoding gain?",
        answer: speculative,
        measure: "mantissa run MODEL -p \"Once upon a time\" --speculate",
        corrections: &[],
        answers: &[],
    },
    Topic {
        name: "experts",
        question: "What do active and total parameters of a mixture decide?",
        answer: experts,
        measure: "mantissa inspect MODEL",
        corrections: &[],
        answers: &[],
    },
    Topic {
        name: "tensor-parallel",
        question: "What do several devices cost?",
        answer: tensor_parallel,
        measure: "mantissa lint MODEL --for vllm:tp=8",
        corrections: &[],
        answers: &[],
    },
];
