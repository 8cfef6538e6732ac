//! Adapters: steps that peft and PyTorch took (`tests/data/make_lora_gradients.py`), merging, and the frozen base.
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::common::{bits, data, sequences};
use mantissa_model::{Batch, Role};
use mantissa_store::SafeTensors;
use mantissa_store::convention::ModelFiles;
use mantissa_train::{
    AdamW, AdamWOptions, Init, Lora, MemoryPlan, MomentFormat, Options, ParamTable, Parameters, Policy,
    TrainModel, Tuning, next_token_targets,
};

const TOLERANCE: f32 = 1e-4;

/// As in the script.
const ADAMW: AdamWOptions = AdamWOptions {
    beta1: 0.9,
    beta2: 0.99,
    eps: 1e-3,
    weight_decay: 0.1,
    decay_vectors: true,
    max_norm: None,
    moments: MomentFormat::F32,
};

fn tiny(name: &str) -> PathBuf {
    data().join("tiny").join(name)
}

fn tuning(lora: Lora, base: Option<&str>) -> Tuning {
    Tuning { lora, base: base.map(|scheme| scheme.parse().unwrap()), train: Vec::new(), seed: 3 }
}

fn options(policy: &Policy, threads: usize) -> Options {
    Options { max_tokens: 1200, max_len: 32, threads, policy: policy.clone() }
}

fn model(dir: &Path, tuning: &Tuning, policy: &Policy, threads: usize) -> TrainModel {
    let files = ModelFiles::open(dir).unwrap();
    let config = mantissa_model::load_config(&files).unwrap();
    let params = Parameters::tuned(&files, &config, tuning, policy, threads).unwrap();
    TrainModel::new(config, params, options(policy, threads)).unwrap()
}

struct Case {
    tokens: Vec<u32>,
    lens: Vec<usize>,
    targets: Vec<u32>,
    scale: f32,
}

impl Case {
    fn new(dir: &Path) -> Self {
        let sequences = sequences(dir);
        let (tokens, lens) = (sequences.concat(), vec![sequences[0].len(); sequences.len()]);
        let targets = next_token_targets(&Batch { tokens: &tokens, lens: &lens });
        let scale = 1.0 / (tokens.len() - lens.len()) as f32;
        Case { tokens, lens, targets, scale }
    }

    fn batch(&self) -> Batch<'_> {
        Batch { tokens: &self.tokens, lens: &self.lens }
    }

    fn gradients(&self, model: &mut TrainModel) -> f64 {
        model.zero_gradients();
        model.forward_backward(&self.batch(), &self.targets, self.scale).unwrap().mean()
    }

    fn logits(&self, model: &mut TrainModel) -> Vec<f32> {
        let mut out = vec![0.0; self.tokens.len() * model.config().vocab_size];
        model.logits(&self.batch(), &mut out).unwrap();
        out
    }
}

/// Puts waves into B (0 at first) and changes A and the magnitudes, so that every gradient counts.
fn disturb(model: &mut TrainModel) {
    let table: ParamTable = model.parameters().table().clone();
    for param in table.iter() {
        let factor = if matches!(param.tensor.role, Role::Bias { .. }) { 0.02 } else { 0.1 };
        let before = model.parameters().values()[param.range.clone()].to_vec();
        let wave =
            before.iter().enumerate().map(|(i, v)| v + factor * ((i * 7 + param.range.start) as f32).sin());
        let values: Vec<f32> = wave.collect();
        model.parameters_mut().set(param.range.start, &values);
    }
}

fn recorded(case: &str) -> (Vec<f64>, BTreeMap<String, Vec<f32>>) {
    let file = SafeTensors::open(&data().join("lora").join(format!("{case}.safetensors"))).unwrap();
    let (mut loss, mut tensors) = (Vec::new(), BTreeMap::new());
    for tensor in file.tensors() {
        if tensor.name == "loss" {
            let bytes = file.read(tensor).unwrap();
            loss = bytes.as_chunks::<8>().0.iter().map(|b| f64::from_le_bytes(*b)).collect();
        } else {
            tensors.insert(tensor.name.clone(), file.read_f32(tensor).unwrap());
        }
    }
    (loss, tensors)
}

fn amax(x: &[f32]) -> f32 {
    x.iter().fold(0.0, |max, v| v.abs().max(max))
}

fn compare(what: &str, got: &[f32], expected: &[f32], least: f32) {
    assert_eq!(got.len(), expected.len(), "{what}");
    let error = got.iter().zip(expected).fold(0.0_f32, |max, (a, b)| max.max((a - b).abs()));
    let bound = TOLERANCE * amax(expected).max(least);
    assert!(error <= bound, "{what}: error {error:e}, allowed {bound:e}");
}

fn cases() -> [(&'static str, &'static str, Lora); 2] {
    let names = |all: &[&str]| all.iter().map(|name| (*name).to_owned()).collect();
    let lora =
        Lora { rank: 4, alpha: 6.0, targets: names(&["q_proj", "v_proj", "down_proj"]), ..Lora::default() };
    let dora = Lora { rank: 2, alpha: 8.0, rslora: true, dora: true, ..Lora::default() };
    [("lora", "llama1-mha", lora), ("dora", "llama2-gqa-tied", dora)]
}

#[test]
fn steps_match_peft() {
    for (case, variant, lora) in cases() {
        let (loss, tensors) = recorded(case);
        let dir = tiny(variant);
        let mut model = model(&dir, &tuning(lora, None), &Policy::fp32(), 2);
        let table = model.parameters().table().clone();
        assert_eq!(tensors.keys().filter(|name| name.starts_with("init.")).count(), table.iter().count());
        for param in table.iter() {
            let values = &tensors[&format!("init.{}", param.tensor.name)];
            assert_eq!(values.len(), param.range.len(), "{}", param.tensor.name);
            model.parameters_mut().set(param.range.start, values);
        }
        let mut optimizer = AdamW::new(model.parameters(), &Policy::fp32(), ADAMW).unwrap();
        let text = Case::new(&dir);
        for (step, recorded) in loss.iter().enumerate() {
            let found = text.gradients(&mut model);
            assert!((found / recorded - 1.0).abs() < 1e-4, "{case} step {step}: {found} for {recorded}");
            if step == 0 {
                let grads = model.gradients().to_f32().to_vec();
                let of = |name: &str| &tensors[&format!("grad.{name}")];
                let greatest = table.iter().map(|p| amax(of(&p.tensor.name))).fold(0.0, f32::max);
                for param in table.iter() {
                    let name = &param.tensor.name;
                    compare(
                        &format!("{case} grad {name}"),
                        &grads[param.range.clone()],
                        of(name),
                        1e-3 * greatest,
                    );
                }
            }
            if step < 3 {
                optimizer.step(&mut model, 1e-2, 1.0).unwrap();
            }
        }
        let values = model.parameters().values().to_vec();
        for param in table.iter() {
            let name = &param.tensor.name;
            compare(
                &format!("{case} {name}"),
                &values[param.range.clone()],
                &tensors[&format!("after.{name}")],
                1e-2,
            );
        }
        let config = model.config().clone();
        for info in config.decoder_linears() {
            if let Some(expected) = tensors.get(&format!("merged.{}", info.module)) {
                compare(&info.module, &model.parameters().merged(&info), expected, 0.0);
            }
        }
    }
}

/// The merged weights compute what base and adapter compute, also over a quantized base.
#[test]
fn merged_weights_are_the_adapter_form() {
    let dir = tiny("llama2-gqa-tied");
    let text = Case::new(&dir);
    for (dora, base) in [(false, None), (true, None), (false, Some("nf4-dq")), (true, Some("int3-g32-asym"))]
    {
        let lora = Lora { rank: 3, dora, ..Lora::default() };
        let mut model = model(&dir, &tuning(lora, base), &Policy::fp32(), 1);
        disturb(&mut model);
        let adapted = text.logits(&mut model);
        let config = model.config().clone();
        let mut params = Parameters::random(&config, 0.0, 1).unwrap();
        let table = params.table().clone();
        for (tensor, values) in model.parameters().written_tensors(&config, true) {
            params.set(table.by_name(&tensor.name).unwrap().range.start, &values);
        }
        let mut merged = TrainModel::new(config, params, options(&Policy::fp32(), 1)).unwrap();
        let found = text.logits(&mut merged);
        let error = found.iter().zip(&adapted).fold(0.0_f32, |max, (a, b)| max.max((a - b).abs()));
        assert!(error < 2e-5 * amax(&adapted), "dora {dora}, base {base:?}: {error:e}");
        let plain = TrainModel::load(&ModelFiles::open(&dir).unwrap(), options(&Policy::fp32(), 1));
        let plain = text.logits(&mut plain.unwrap());
        let moved = found.iter().zip(&plain).fold(0.0_f32, |max, (a, b)| max.max((a - b).abs()));
        assert!(moved > 1e-2 * amax(&plain), "the adapter does something");
    }
}

/// Gradients agree with differences of the loss, over a quantized base and with dropout, whose mask repeats.
#[test]
fn gradients_match_differences_over_a_quantized_base() {
    let dir = tiny("llama2-gqa-tied");
    let text = Case::new(&dir);
    for (dora, dropout) in [(false, 0.0), (false, 0.3), (true, 0.0)] {
        let lora = Lora { rank: 2, dora, dropout, ..Lora::default() };
        let tuning = Tuning { train: vec!["norm".to_owned()], ..tuning(lora, Some("int4-g32")) };
        let mut model = model(&dir, &tuning, &Policy::fp32(), 2);
        disturb(&mut model);
        text.gradients(&mut model);
        let grads = model.gradients().to_f32().to_vec();
        let table = model.parameters().table().clone();
        for param in table.iter() {
            // DoRA's norms are constants of the gradient: only magnitudes have the loss's derivative.
            if dora && !param.tensor.name.ends_with("magnitude_vector") {
                continue;
            }
            // Along the gradient, the loss changes by its square.
            let values = model.parameters().values()[param.range.clone()].to_vec();
            let g = &grads[param.range.clone()];
            let square: f64 = g.iter().map(|g| f64::from(*g).powi(2)).sum();
            let step = (1e-3 / square.sqrt()) as f32;
            let mut at = |sign: f32| {
                let moved: Vec<f32> = values.iter().zip(g).map(|(v, g)| v + sign * step * g).collect();
                model.parameters_mut().set(param.range.start, &moved);
                text.gradients(&mut model)
            };
            let slope = (at(1.0) - at(-1.0)) / (2.0 * f64::from(step));
            model.parameters_mut().set(param.range.start, &values);
            assert!(
                (slope / square - 1.0).abs() < 2e-2,
                "{} (dora {dora}, dropout {dropout}): {slope} for {square}",
                param.tensor.name
            );
        }
    }
}

/// Steps change neither the base's bits nor anything with the number of threads, in every kind of policy.
#[test]
fn the_base_stays_and_threads_change_no_bit() {
    let dir = tiny("llama1-mha");
    let text = Case::new(&dir);
    for (policy, dora, dropout) in [
        ("fp32", true, 0.1),
        ("bf16", false, 0.1),
        ("bf16", true, 0.0),
        ("fp16", false, 0.0),
        ("int8-rowwise", true, 0.0),
    ] {
        let policy = Policy::by_name(policy, 1).unwrap();
        let tuning = tuning(Lora { rank: 4, dora, dropout, ..Lora::default() }, Some("nf4-dq"));
        let run = |threads| {
            let mut model = model(&dir, &tuning, &policy, threads);
            let before = model.parameters().hash_base();
            let mut optimizer = AdamW::new(model.parameters(), &policy, ADAMW).unwrap();
            let losses: Vec<u64> = (0..4)
                .map(|_| {
                    let loss = text.gradients(&mut model);
                    optimizer.step(&mut model, 1e-2, 1.0).unwrap();
                    loss.to_bits()
                })
                .collect();
            let loss = |i: usize| f64::from_bits(losses[i]);
            assert!(loss(3) < loss(0), "{}: {} after {}", policy.name, loss(3), loss(0));
            assert!(before.is_some() && model.parameters().hash_base() == before);
            (losses, bits(&model.parameters().values()))
        };
        assert!(run(1) == run(3), "{}", policy.name);
    }
}

/// QLoRA of the embedded model learns a text: the loss on its other half falls, and the base stays.
#[test]
fn qlora_of_the_embedded_model_learns_a_domain() {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../mantissa-jobs/demo");
    let files = ModelFiles::open(&demo.join("model")).unwrap();
    let tokenizer = mantissa_model::Tokenizer::load(&demo.join("model")).unwrap();
    let text = std::fs::read_to_string(demo.join("text/code.txt")).unwrap();
    let tokens = tokenizer.encode(&text, mantissa_model::Bos::Never).unwrap();
    const LENGTH: usize = 64;
    let windows: Vec<&[u32]> = tokens.chunks_exact(LENGTH).take(64).collect();
    let (held, train): (Vec<_>, Vec<_>) = windows.iter().enumerate().partition(|(i, _)| i % 2 == 1);
    let config = mantissa_model::load_config(&files).unwrap();
    let (policy, tuning) = (Policy::bf16(), tuning(Lora::default(), Some("nf4-dq")));
    let params = Parameters::tuned(&files, &config, &tuning, &policy, 2).unwrap();
    let adamw = AdamWOptions { weight_decay: 0.0, ..AdamWOptions::default() };
    let mut optimizer = AdamW::new(&params, &policy, adamw).unwrap();
    let options = Options { max_tokens: 32 * LENGTH, max_len: LENGTH, threads: 2, policy };
    let mut model = TrainModel::new(config, params, options).unwrap();
    let base = model.parameters().hash_base();
    let joined =
        |all: &[(usize, &&[u32])]| -> Vec<u32> { all.iter().flat_map(|(_, w)| w.iter().copied()).collect() };
    let loss = |model: &mut TrainModel, tokens: &[u32]| {
        let batch = Batch { tokens, lens: &vec![LENGTH; tokens.len() / LENGTH] };
        model.loss(&batch, &next_token_targets(&batch)).unwrap().mean()
    };
    let (held, train) = (joined(&held), joined(&train));
    let before = loss(&mut model, &held);
    for step in 0..24 {
        let tokens = &train[step % 4 * 8 * LENGTH..][..8 * LENGTH];
        let batch = Batch { tokens, lens: &[LENGTH; 8] };
        model.zero_gradients();
        let targets = next_token_targets(&batch);
        model.forward_backward(&batch, &targets, 1.0 / (8 * (LENGTH - 1)) as f32).unwrap();
        optimizer.step(&mut model, 2e-3, 1.0).unwrap();
    }
    let after = loss(&mut model, &held);
    assert!(after < before - 0.05, "{after} after {before}");
    assert_eq!(model.parameters().hash_base(), base);
}

/// LoftQ starts nearer to the source than quantization alone.
#[test]
fn loftq_starts_nearer() {
    let dir = tiny("llama1-mha");
    let files = ModelFiles::open(&dir).unwrap();
    let config = mantissa_model::load_config(&files).unwrap();
    let source = Parameters::load(&files, &config).unwrap();
    let error = |init| {
        let lora = Lora { rank: 4, init, ..Lora::default() };
        let params =
            Parameters::tuned(&files, &config, &tuning(lora, Some("int2-g32")), &Policy::fp32(), 2).unwrap();
        let square = |info| {
            let (found, exact) = (params.merged(&info), source.merged(&info));
            found.iter().zip(&exact).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>()
        };
        config.decoder_linears().map(square).sum::<f64>()
    };
    let (zero, one, five) =
        (error(Init::Zero), error(Init::LoftQ { steps: 1 }), error(Init::LoftQ { steps: 5 }));
    assert!(one < 0.8 * zero && five <= one, "{zero} {one} {five}");
}

/// The plan predicts the frozen weights and the buffers; a quantized checkpoint is taken as it is.
#[test]
fn memory_is_planned() {
    let dir = tiny("llama2-gqa-tied");
    let files = ModelFiles::open(&dir).unwrap();
    let config = mantissa_model::load_config(&files).unwrap();
    for (base, dora, dropout, policy) in [
        (None, false, 0.0, "fp32"),
        (Some("nf4-dq"), false, 0.1, "bf16"),
        (Some("int8-channel"), true, 0.0, "fp32"),
    ] {
        let policy = Policy::by_name(policy, 1).unwrap();
        let tuning = tuning(Lora { dora, dropout, ..Lora::default() }, base);
        let formats = tuning.formats(&files, &config).unwrap();
        let plan = MemoryPlan::tuned(&config, &options(&policy, 1), &tuning, &formats);
        let entry = |name: &str| plan.entries.iter().find(|(entry, _)| *entry == name).unwrap().1;
        let model = model(&dir, &tuning, &policy, 1);
        assert_eq!(entry("frozen weights"), model.parameters().frozen_bytes(), "{base:?}");
        assert_eq!(entry("adapters"), model.adapter_bytes(), "{base:?}");
        let trained = policy.weights.bytes() * model.parameters().table().len() as u64;
        assert_eq!(entry("parameters"), trained);
    }
}

#[test]
fn settings_at_fault_are_named() {
    let files = ModelFiles::open(&tiny("llama1-mha")).unwrap();
    let config = mantissa_model::load_config(&files).unwrap();
    let lora = Lora::default;
    let names = |name: &str| vec![name.to_owned()];
    for (tuning, part) in [
        (tuning(Lora { rank: 0, ..lora() }, None), "rank: expected 1 to 65536, got 0"),
        (tuning(Lora { alpha: 0.0, ..lora() }, None), "alpha"),
        (tuning(Lora { dropout: 1.0, ..lora() }, None), "dropout: expected 0 to below 1"),
        (
            tuning(Lora { targets: names("wq"), ..lora() }, None),
            "targets: expected names of this model's linear layers",
        ),
        (tuning(Lora { init: Init::LoftQ { steps: 5 }, ..lora() }, None), "base scheme such as nf4-dq"),
        (Tuning { train: names("q_proj"), ..tuning(lora(), None) }, "train: expected names"),
    ] {
        let error = tuning.check(&config).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
}
