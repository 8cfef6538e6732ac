//! Optimizers against recorded steps of transformers, PyTorch, torchao and the papers' formulas; memory of every state.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::path::{Path, PathBuf};

use mantissa_kernels::kernels;
use mantissa_model::ModelConfig;
use mantissa_store::SafeTensors;

use super::adamw::AdamWMethod;
use super::moments::Moment;

use super::*;
use crate::Options;
use crate::blockwise::BLOCK;
use crate::config::Optimizer as Settings;
use crate::policy::Master;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn f32s(file: &SafeTensors, name: &str) -> Vec<f32> {
    file.read_f32(file.get(name).unwrap()).unwrap()
}

fn settings(text: &str) -> Settings {
    mantissa_options::from_toml(text).unwrap()
}

/// A model with a tall, a wide and a square weight and norms.
fn config(size: usize) -> ModelConfig {
    let config = serde_json::json!({
        "model_type": "llama", "hidden_size": size, "intermediate_size": size, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": size, "vocab_size": 16,
        "max_position_embeddings": 8, "rms_norm_eps": 1e-5, "tie_word_embeddings": true
    });
    ModelConfig::from_json(&config, "config").unwrap()
}

/// Name of the tensor of a recorded run.
fn tensor(name: &str) -> &'static str {
    match name {
        "tall" => "model.layers.0.self_attn.q_proj.weight",
        "wide" => "model.layers.0.self_attn.o_proj.weight",
        "square" => "model.layers.0.self_attn.k_proj.weight",
        _ => "model.layers.0.input_layernorm.weight",
    }
}

/// Returns the weights of a tensor after every step of the recorded gradients.
fn weights(file: &SafeTensors, name: &str, toml: &str) -> Vec<f32> {
    let of = |what: &str| f32s(file, &format!("{name}.{what}"));
    weights_from((8, name), &of("p0"), &of("grads"), toml)
}

/// Returns the weights of a tensor of a model of this size after every step.
fn weights_from((size, name): (usize, &str), start: &[f32], grads: &[f32], toml: &str) -> Vec<f32> {
    let (config, settings) = (config(size), settings(toml));
    let mut params = Parameters::random(&config, 0.02, 1).unwrap();
    let range = params.table().by_name(tensor(name)).unwrap().range.clone();
    params.set(range.start, start);
    let options = Options { max_tokens: 8, max_len: 8, threads: 2, policy: Policy::fp32() };
    let mut optimizer = Optimizer::new(&params, &Policy::fp32(), &settings.recipe()).unwrap();
    optimizer.decays.fill(true);
    let mut model = TrainModel::new(config, params, options).unwrap();
    let mut all = Vec::new();
    for grads in grads.chunks(range.len()) {
        model.zero_gradients();
        model.grads.add(range.clone(), |to| to.copy_from_slice(grads));
        optimizer.step(&mut model, settings.common.lr, 1.0).unwrap();
        all.extend_from_slice(&model.params.values()[range.clone()]);
    }
    all
}

/// Returns the values of `step` of `tests/data/make_public_optimizers.py`.
fn formula(n: usize, step: u64, factor: f32) -> Vec<f32> {
    let mut state = 12345 + 1000 * step;
    let next = |_| {
        state = (state * 1_664_525 + 1_013_904_223) % (1 << 32);
        factor * ((state >> 12) % 2048) as f32 / 1024.0 - factor
    };
    (0..n).map(next).collect()
}

/// Twelve steps of lion-pytorch, torch.optim.Muon and Adafactor, and pytorch-optimizer's SOAP in f32. torch names the
/// scales of Muon otherwise than this crate.
#[test]
fn steps_match_public_implementations() {
    let text = std::fs::read_to_string(root().join("tests/data/train/public_optimizers.json")).unwrap();
    let record: serde_json::Value = serde_json::from_str(&text).unwrap();
    let muon = "kind = \"muon\"\nlr = 2e-2\nweight_decay = 0.1\nscale = ";
    let soap = "kind = \"soap\"\nlr = 1e-2\n";
    let rows = [
        ("lion", "kind = \"lion\"\nlr = 1e-3\nweight_decay = 0.1".to_owned(), 1e-6),
        ("muon_original", format!("{muon}\"jordan\""), 1e-5),
        ("muon_match_rms_adamw", format!("{muon}\"rms\""), 1e-5),
        ("muon_spectral_unclamped", format!("{muon}\"spectral\""), 1e-5),
        ("muon_no_nesterov", format!("{muon}\"jordan\"\nnesterov = false"), 1e-5),
        ("adafactor", "kind = \"adafactor\"\nlr = 1e-2\nweight_decay = 0".to_owned(), 1e-6),
        ("soap_3", format!("{soap}weight_decay = 0.1\nfrequency = 3"), 1e-5),
        ("soap_1", format!("{soap}beta1 = 0.9\nbeta2 = 0.99\nweight_decay = 0\nfrequency = 1"), 1e-5),
    ];
    assert_eq!(record["runs"].as_object().unwrap().len(), rows.len());
    for (label, toml, tolerance) in rows {
        for (name, steps) in record["runs"][label].as_object().unwrap() {
            let n = if name == "square" { 16 } else { 32 };
            let grads: Vec<f32> =
                (1..=12).flat_map(|step| formula(n, step, 0.5f32.powi(step as i32 / 3))).collect();
            let found =
                weights_from((4, name), &formula(n, 0, 0.25), &grads, &format!("{toml}\nmax_norm = 0"));
            for (step, expected) in steps.as_object().unwrap() {
                let expected = expected.as_array().unwrap().iter().map(|x| x.as_f64().unwrap() as f32);
                let found = &found[(step.parse::<usize>().unwrap() - 1) * n..][..n];
                assert_eq!(expected.len(), n);
                let worst = found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                println!("{label} {name} step {step}: {worst:e}");
                assert!(worst <= tolerance, "{label} {name} step {step}: {worst:e}");
            }
        }
    }
}

/// Six steps on a tall, a wide and a square matrix and a vector (`tests/data/make_optimizers.py`).
#[test]
fn steps_match_the_reference() {
    let file = SafeTensors::open(&root().join("tests/data/train/optimizers.safetensors")).unwrap();
    let plain = "max_norm = 0\n";
    let adafactor = "kind = \"adafactor\"\n";
    let muon = "kind = \"muon\"\nlr = 2e-2\nweight_decay = 0.1\n";
    let all = ["tall", "wide", "square", "vector"];
    let rows: [(&str, &[&str], String, f32); 8] = [
        (
            "adafactor_fixed",
            &all,
            format!("{adafactor}lr = 1e-2\nscale_parameter = false\nweight_decay = 0.1"),
            2e-6,
        ),
        (
            "adafactor_momentum",
            &all,
            format!("{adafactor}lr = 3e-2\nbeta1 = 0.9\nclip_threshold = 0.5\nweight_decay = 0"),
            2e-6,
        ),
        (
            "adafactor_relative",
            &all,
            format!("{adafactor}lr = 1\nrelative_step = true\nweight_decay = 0"),
            2e-6,
        ),
        (
            "adafactor_warmup",
            &all,
            format!("{adafactor}lr = 1\nrelative_step = true\nwarmup_init = true\nweight_decay = 0"),
            2e-6,
        ),
        ("lion", &all, "kind = \"lion\"\nlr = 1e-3\nweight_decay = 0.1".to_owned(), 2e-6),
        ("muon_jordan", &all[..3], format!("{muon}scale = \"jordan\""), 1e-5),
        ("muon_rms_plain", &all[..3], format!("{muon}nesterov = false"), 1e-5),
        (
            "soap",
            &all[2..3],
            "kind = \"soap\"\nlr = 1e-2\nbeta2 = 0.9\nfrequency = 2\nweight_decay = 0.1".to_owned(),
            1e-4,
        ),
    ];
    for (label, names, toml, tolerance) in rows {
        for name in names {
            let found = weights(&file, name, &format!("{toml}\n{plain}"));
            let expected = f32s(&file, &format!("{name}.{label}"));
            let worst = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            println!("{label} {name}: {worst:e}");
            assert!(found.len() == expected.len() && worst <= tolerance, "{label} {name}: {worst:e}");
        }
    }
    // PyTorch iterates in bf16, so only the direction agrees.
    for name in &all[..3] {
        let found = weights(&file, name, &format!("{muon}scale = \"jordan\"\n{plain}"));
        let (start, expected) =
            (f32s(&file, &format!("{name}.p0")), f32s(&file, &format!("{name}.muon_torch")));
        let last = found.len() - start.len();
        let (mut error, mut moved) = (0.0, 0.0);
        for ((a, b), p) in found[last..].iter().zip(&expected[last..]).zip(&start) {
            (error, moved) = (error + (a - b).powi(2), moved + (b - p).powi(2));
        }
        assert!((error / moved).sqrt() < 0.03, "{name}: {}", (error / moved).sqrt());
    }
}

/// Codes, scales and parameters of torchao's AdamW with 8 bits, 4 bits and FP8 after 1 to 20 steps.
#[test]
fn low_bit_moments_match_torchao() {
    let committed = root().join("tests/data/golden/optimizer.safetensors");
    let whole = root().join("../shared/golden/optimizer.safetensors");
    for path in [Some(committed), whole.exists().then_some(whole)].into_iter().flatten() {
        let file = SafeTensors::open(&path).unwrap();
        let all =
            [("8bit", MomentFormat::Torchao8), ("4bit", MomentFormat::Torchao4), ("fp8", MomentFormat::Fp8)];
        all.into_iter().for_each(|(name, format)| like_torchao(&file, name, format));
    }
}

fn like_torchao(file: &SafeTensors, name: &str, format: MomentFormat) {
    let (mut p, grads) = (f32s(file, "p0"), f32s(file, "grads"));
    let (start, n) = (p.clone(), p.len());
    let moment = |what, second| Moment::stored_as((what, second), format, n, None).unwrap();
    let (mut m, mut v) = (moment("m", false), moment("v", true));
    let adamw = AdamWMethod { beta1: 0.9, beta2: 0.999, eps: 1e-8, moments: format };
    let recorded = |what: &str| format!("torchao_adamw{name}.{what}_at_steps_1_2_5_10_20");
    let mut checked = 0;
    for t in 1..=20u64 {
        let step = adamw.step(&Step { t, lr: 1e-3, weight_decay: 0.01, grad_scale: 1.0 });
        let (mut wide_m, mut wide_v) = (vec![0.0; n], vec![0.0; n]);
        m.read_all(1, &mut wide_m).unwrap();
        v.read_all(1, &mut wide_v).unwrap();
        let grads = &grads[(t as usize - 1) * n..][..n];
        kernels().adamw(&step, &mut p, grads, &mut wide_m, &mut wide_v);
        m.write_all(1, &wide_m).unwrap();
        v.write_all(1, &wide_v).unwrap();
        let Some(at) = [1, 2, 5, 10, 20].iter().position(|step| *step == t) else { continue };
        for (moment, what) in [(&m, "exp_avg"), (&v, "exp_avg_sq")] {
            let (Array::U8(codes), Some((_, Array::F32(scales)))) = (moment.array().1, moment.scale_array())
            else {
                panic!("{name}: no codes")
            };
            let expected = file.read(file.get(&recorded(&format!("{what}_codes"))).unwrap()).unwrap();
            let expected = &expected[at * codes.len()..][..codes.len()];
            let different = codes.iter().zip(expected).filter(|(a, b)| a != b).count();
            println!("{name} step {t} {what}: {different} of {} codes differ", codes.len());
            assert!(
                different * 1000 <= codes.len(),
                "{name} step {t} {what}: {different} of {n} codes differ"
            );
            let expected = f32s(file, &recorded(&format!("{what}_scale")));
            let expected = &expected[at * scales.len()..][..scales.len()];
            let worst = scales.iter().zip(expected).map(|(a, b)| ((a - b) / b).abs()).fold(0.0, f32::max);
            assert!(worst <= 1e-6, "{name} step {t} {what}: scales {worst:e}");
        }
        let expected = f32s(file, &recorded("params"));
        // torchao takes the bias corrections in f32, which is 1e-5 of an update at most. An FP8 second moment that
        // becomes 0 makes updates of half a unit.
        let near = |((a, b), start): ((&f32, &f32), &f32)| (a - b).abs() <= 1e-6 + 1e-5 * (a - start).abs();
        let pairs = p.iter().zip(&expected[at * n..]).zip(&start);
        assert!(pairs.into_iter().all(near), "{name} step {t}: parameters");
        checked += 1;
    }
    assert_eq!(checked, 5);
}

/// INT8 codes have the bits of a run that rounds f32 values to their grid after every step.
#[test]
fn int8_weights_have_the_bits_of_their_emulation() {
    let tokens: Vec<u32> = (0..40).map(|i| i * i % 16).collect();
    let batch = mantissa_model::Batch { tokens: &tokens, lens: &[8; 5] };
    let targets = crate::next_token_targets(&batch);
    let int8 = Policy::by_name("int8-sr", 9).unwrap();
    let narrow = Policy { master: Master::None, ..int8.clone() };
    let wide = Policy { master: int8.master, ..Policy::fp32() };
    for (kind, coded, plain) in [
        ("adamw", &int8, &narrow),
        ("adafactor", &int8, &narrow),
        ("muon", &int8, &narrow),
        ("adamw", &wide, &Policy::fp32()),
    ] {
        let config = config(24);
        let recipe = settings(&format!("kind = \"{kind}\"\nlr = 1e-2")).recipe();
        let make = |policy: &Policy, params: &Parameters, threads| {
            let options = Options { max_tokens: 40, max_len: 8, threads, policy: policy.clone() };
            let optimizer = Optimizer::new(params, policy, &recipe).unwrap();
            (TrainModel::new(config.clone(), params.clone(), options).unwrap(), optimizer)
        };
        let start = Parameters::random(&config, 0.1, 1).unwrap();
        let mut first = make(coded, &start, 2);
        let mut rounded = start.clone();
        rounded.set(0, &first.0.parameters().values());
        let mut second = make(plain, &rounded, 1);
        for step in 1..=5 {
            let run = |(model, optimizer): &mut (TrainModel, Optimizer)| {
                model.zero_gradients();
                let loss = model.forward_backward(&batch, &targets, 1.0 / 35.0).unwrap();
                optimizer.step(model, 1e-2, 1.0).unwrap();
                loss.nll.to_bits()
            };
            assert_eq!(run(&mut first), run(&mut second), "{kind} step {step}: loss");
            let mut values = second.0.parameters().values().into_owned();
            crate::weights::emulate(start.table(), &mut values, 9, step);
            second.0.parameters_mut().set(0, &values);
            let found = first.0.parameters().values();
            let same = found.iter().zip(&values).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(same, "{kind} step {step}: weights");
        }
        assert_ne!(*first.0.parameters().values(), *start.values());
    }
}

/// Every optimizer with every format takes the memory that was predicted, in memory and in a file.
#[test]
fn states_take_the_predicted_memory() {
    let config = config(72);
    let params = Parameters::random(&config, 0.02, 1).unwrap();
    for (kind, _) in optimizers() {
        for moments in ["f32", "bf16", "fp8", "8bit", "8bit:cpu", "8bit:torchao", "4bit", "dyn8-tensor"] {
            for paged in [false, true] {
                if paged && moments == "dyn8-tensor" {
                    continue;
                }
                let own = if kind == "adafactor" { "beta1 = 0.9\n" } else { "" };
                let text =
                    format!("kind = \"{kind}\"\nlr = 1\nmoments = \"{moments}\"\npaged = {paged}\n{own}");
                let recipe = settings(&text).recipe();
                for policy in [Policy::fp32(), Policy::bf16(), Policy::bf16_remainder()] {
                    let optimizer = Optimizer::new(&params, &policy, &recipe).unwrap();
                    let (mut memory, mut file) = (4 * optimizer.scratch.len() as u64, 0);
                    for (_, array) in optimizer.arrays(params.table()) {
                        match array {
                            Array::F32(x) => memory += 4 * x.len() as u64,
                            Array::Bf16(x) | Array::F16(x) | Array::U16(x) => memory += 2 * x.len() as u64,
                            Array::U8(x) => memory += x.len() as u64,
                            Array::I8(x) => memory += x.len() as u64,
                            Array::Paged(paged) => {
                                let bytes = paged.len() as u64 * paged.dtype().bits() / 8;
                                file += bytes.next_multiple_of(4096);
                            }
                        }
                    }
                    let predicted =
                        (recipe.bytes(params.table(), &policy), recipe.paged_bytes(params.table()));
                    assert_eq!(predicted, (memory, file), "{text}");
                    assert_eq!(file, optimizer.paged_bytes(), "{text}");
                    assert_eq!(file > 0, paged, "{text}");
                }
            }
        }
    }
}

/// Decoded values are near, and have the same codes again where the map holds both ends of its range: the signed
/// dynamic maps lack -1, and the CPU backend's table is coarse near 0.
#[test]
fn every_format_is_near_and_keeps_what_it_decodes() {
    let values: Vec<f32> = (0..5000).map(|i| (i as f32 * 0.7).sin() * 10f32.powi(i % 5 - 4)).collect();
    for (name, keeps, share) in [
        ("f32", [true, true], 1e-9),
        ("bf16", [true, true], 4e-3),
        ("fp8", [true, true], 0.04),
        ("8bit", [false, true], 8e-3),
        ("8bit:cpu", [false, false], 8e-3),
        ("8bit:torchao", [false, true], 8e-3),
        ("4bit", [false, true], 0.12),
    ] {
        for second in [false, true] {
            let values: Vec<f32> = values.iter().map(|v| if second { v.abs() } else { *v }).collect();
            let format = MomentFormat::parse(name).unwrap();
            let mut moment = Moment::new(("m", second), format, 5000, None).unwrap();
            let (mut once, mut twice) = (vec![0.0; 5000], vec![0.0; 5000]);
            moment.write_all(2, &values).unwrap();
            moment.read_all(2, &mut once).unwrap();
            moment.write_all(1, &once).unwrap();
            moment.read_all(1, &mut twice).unwrap();
            let close = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-6 * a.abs();
            assert!(!keeps[usize::from(second)] || once.iter().zip(&twice).all(close), "{name} {second}");
            for (block, decoded) in values.chunks(BLOCK).zip(once.chunks(BLOCK)) {
                let amax = block.iter().fold(0.0f32, |max, v| max.max(v.abs()));
                let worst = block.iter().zip(decoded).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(worst <= share * amax, "{name} {second}: {worst} of {amax}");
            }
        }
    }
}

/// A paged moment has the values of one in memory, in pieces as well as whole.
#[test]
fn paged_moments_have_the_same_values() {
    let n = PIECE + 4100;
    let values: Vec<f32> = (0..n).map(|i| (i as f32 * 0.7).sin()).collect();
    for name in ["f32", "bf16", "fp8", "8bit", "4bit"] {
        let dir = tempfile::tempdir().unwrap();
        let (format, mut pages) = (MomentFormat::parse(name).unwrap(), Unpaged::default());
        let mut memory = Moment::new(("m", false), format, n, None).unwrap();
        let mut paged = Moment::new(("m", false), format, n, Some(&mut pages)).unwrap();
        assert!(paged.read_all(1, &mut vec![0.0; n]).is_err(), "{name}: not open yet");
        pages.open(&dir.path().join("pages")).unwrap();
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "the file has no name");
        let (mut a, mut b) = (vec![1.0; n], vec![1.0; n]);
        memory.read_all(1, &mut a).unwrap();
        paged.read_all(2, &mut b).unwrap();
        assert!(a.iter().chain(&b).all(|v| *v == 0.0), "{name}: starts at 0");
        memory.write_all(1, &values).unwrap();
        paged.write_all(2, &values).unwrap();
        let mut buffer = PageBuffer::default();
        for (in_memory, in_file) in memory.pieces().iter_mut().zip(&mut paged.pieces()) {
            let mut other = PageBuffer::default();
            let (a, b) = (in_memory.open(&mut other).unwrap(), in_file.open(&mut buffer).unwrap());
            let (mut x, mut y) = ([0.0; BLOCK], [0.0; BLOCK]);
            a.read(3, &mut x);
            b.read(3, &mut y);
            assert_eq!(x, y, "{name}");
        }
        memory.read_all(1, &mut a).unwrap();
        paged.read_all(2, &mut b).unwrap();
        assert_eq!(a, b, "{name}");
    }
}

#[test]
fn the_norm_has_the_same_bits_at_every_thread_count() {
    let config = config(96);
    let table = ParamTable::new(&config);
    let values: Vec<f32> = (0..table.len()).map(|i| (i as f32 * 0.37).sin()).collect();
    let mut arena = Gradients::new(&table, crate::Precision::F32).unwrap();
    arena.add(0..table.len(), |to| to.copy_from_slice(&values));
    let one = norm(&arena, 1);
    let exact: f64 = values.iter().map(|&g| f64::from(g) * f64::from(g)).sum();
    assert!((one - exact.sqrt()).abs() < 1e-9);
    assert!([2, 3, 7].iter().all(|&threads| norm(&arena, threads).to_bits() == one.to_bits()));
}

#[test]
fn clipping_only_scales_down() {
    assert_eq!(clip_factor(0.5, 1.0), 1.0);
    assert!((clip_factor(4.0, 1.0) - 0.25).abs() < 1e-6);
    assert_eq!(clip_factor(0.0, 1.0), 1.0);
}
