//! `diagnose` on models with planted defects: each is found and named, and the finding's command removes it; sound
//! models have no finding.

use std::fs;
use std::path::{Path, PathBuf};

use mantissa_store::{Dtype, SafeTensors};
use serde_json::Value;
use tempfile::TempDir;

use crate::lint::rewrite;
use crate::support::{
    command, left_to_nightly, mantissa, root, sampled, shared, stderr, strict_json, succeed, text,
    tiny_models, whole, write,
};

/// A short part of the built-in stories: 21 windows of 64 tokens.
const STORIES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../mantissa-jobs/demo/text/stories.txt");

fn stories() -> Vec<&'static str> {
    vec!["--text", STORIES, "--context", "64", "--limit", "1323"]
}

/// Runs `diagnose`; returns the report. The exit code is 1 if something is found.
fn diagnose(model: &str, arguments: &[&str]) -> Value {
    let output = mantissa(&[&["diagnose", model, "--json", "--quiet"], arguments].concat());
    let report =
        strict_json::parse(&output.stdout).unwrap_or_else(|_| panic!("{model}: {}", stderr(&output)));
    let found = !report["findings"].as_array().unwrap().is_empty();
    assert_eq!(output.status.code(), Some(i32::from(found)), "{model}: {}", stderr(&output));
    report
}

/// Random weights predict no text as well as the frequencies of its tokens do.
#[test]
fn a_model_that_predicts_nothing_is_not_called_sound() {
    let tiny = root().join("tests/data/tiny/llama2-gqa-tied");
    let said = mantissa(&[&["diagnose", text(&tiny)], &stories()[..]].concat());
    let said = String::from_utf8_lossy(&said.stdout).split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(said.contains("worse than that of the token frequencies of this text"), "{said}");
    let demo = mantissa(&[&["diagnose", "demo"], &stories()[..]].concat());
    assert!(!String::from_utf8_lossy(&demo.stdout).contains("token frequencies"));
}

/// Returns the finding of this examination, if there is one.
fn finding<'a>(report: &'a Value, examination: &str) -> Option<&'a Value> {
    report["findings"].as_array().unwrap().iter().find(|finding| finding["examination"] == examination)
}

fn named<'a>(report: &'a Value, examination: &str) -> &'a Value {
    finding(report, examination).unwrap_or_else(|| panic!("{examination}: {:#}", report["findings"]))
}

/// Fails if a sound model has a finding.
fn sound(model: &str, arguments: &[&str]) -> Value {
    let report = diagnose(model, arguments);
    assert_eq!(report["findings"], serde_json::json!([]), "{model} {arguments:?}");
    report
}

/// Runs the command of a finding, which must succeed; returns its output folder.
fn apply(finding: &Value) -> PathBuf {
    let line = finding["command"].as_str().unwrap();
    let words: Vec<&str> = line.split(' ').skip(1).collect();
    let output = command().args(&words).arg("--quiet").output().unwrap();
    assert!(output.status.success(), "{line}: {}", stderr(&output));
    let out = words.iter().position(|word| *word == "--out").unwrap();
    PathBuf::from(words[out + 1])
}

/// Runs the command of a finding that measures or checks, which must do its work: a check may find something.
fn runs(finding: &Value) {
    let line = finding["command"].as_str().unwrap();
    // Only the reader knows the source of the quantized model.
    let words = line.split(' ').skip(1).map(|word| if word == "SOURCE" { "demo" } else { word });
    let words: Vec<&str> = words.collect();
    let output = command().args(&words).arg("--quiet").output().unwrap();
    let found = line.starts_with("mantissa doctor ") && output.status.code() == Some(1);
    assert!(output.status.success() || found, "{line}: {}", stderr(&output));
}

/// Copies the embedded model, in bf16.
fn demo(dir: &Path) -> PathBuf {
    let out = dir.join("model");
    fs::create_dir(&out).unwrap();
    for entry in fs::read_dir(root().join("crates/mantissa-jobs/demo/model")).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, out.join(path.file_name().unwrap())).unwrap();
    }
    out
}

fn quantized(dir: &Path, arguments: &[&str]) -> PathBuf {
    let out = dir.join("q");
    succeed(&[&["quantize", "demo", "--out", text(&out), "--quiet"], arguments].concat());
    out
}

fn configure(model: &Path, change: impl Fn(&mut serde_json::Map<String, Value>)) {
    let path = model.join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    change(config.as_object_mut().unwrap());
    fs::write(&path, config.to_string()).unwrap();
}

/// Changes the values of a bf16 tensor: `change` gets the index and the value.
fn change_bf16(bytes: &mut [u8], change: impl Fn(usize, f32) -> f32) {
    for (i, word) in bytes.chunks_exact_mut(2).enumerate() {
        let value = f32::from_bits(u32::from(u16::from_le_bytes([word[0], word[1]])) << 16);
        word.copy_from_slice(&((change(i, value).to_bits() >> 16) as u16).to_le_bytes());
    }
}

/// Width, inner width and layers of the embedded model.
const WIDTH: usize = 128;
const INNER: usize = 384;

/// Makes channel `c` of the states 0 except for tokens of `marked`, where the embedding has 4, and neuron `j` of layer
/// `layer` fire there alone.
fn firing(model: &Path, (layer, c, j): (usize, usize, usize), marked: impl Fn(usize) -> bool) {
    let mlp = format!("layers.{layer}.mlp.");
    rewrite(&model.join("model.safetensors"), |name, bytes| {
        if name.ends_with("embed_tokens.weight") {
            let mark = |i: usize| if marked(i / WIDTH) { 4.0 } else { 0.0 };
            change_bf16(bytes, |i, x| if i % WIDTH == c { mark(i) } else { x });
        } else if name.ends_with("o_proj.weight") {
            change_bf16(bytes, |i, x| if i / WIDTH == c { 0.0 } else { x });
        } else if name.ends_with("down_proj.weight") {
            let neuron = name.contains(&mlp);
            change_bf16(bytes, |i, x| match (i / INNER == c, neuron && i % INNER == j) {
                (true, _) => 0.0,
                (_, true) => 1.0 / 16384.0,
                _ => x,
            });
        } else if name.contains(&mlp) && (name.contains("gate_proj") || name.contains("up_proj")) {
            let of_neuron = |i: usize| if i % WIDTH == c { 8.0 } else { 0.0 };
            change_bf16(bytes, |i, x| if i / WIDTH == j { of_neuron(i) } else { x });
        }
    });
}

/// A channel of a norm times 64, and the columns that read it divided by 64: the same function, with an outlier.
#[test]
fn an_outlier_channel_is_found_and_rotated_away() {
    if left_to_nightly() {
        return;
    }
    let temp = TempDir::new().unwrap();
    let model = demo(temp.path());
    rewrite(&model.join("model.safetensors"), |name, bytes| {
        if name.ends_with("layers.2.post_attention_layernorm.weight") {
            change_bf16(bytes, |i, x| if i == 9 { 64.0 * x } else { x });
        } else if name.contains("layers.2.mlp.gate_proj") || name.contains("layers.2.mlp.up_proj") {
            change_bf16(bytes, |i, x| if i % WIDTH == 9 { x / 64.0 } else { x });
        }
    });
    let report = diagnose(text(&model), &stories());
    let found = named(&report, "outlier-channels");
    let place = &found["place"];
    assert_eq!((&place["layer"], &place["channel"]), (&2.into(), &9.into()), "{found}");
    assert!(place["part"].as_str().unwrap().contains("layers.2.mlp.gate_proj"), "{found}");
    assert_eq!(report["findings"].as_array().unwrap().len(), 1, "{report}");
    sound(text(&apply(found)), &stories());
}

/// A neuron that fires at BOS alone.
#[test]
fn a_spiking_bos_is_found_and_contained() {
    if left_to_nightly() {
        return;
    }
    let temp = TempDir::new().unwrap();
    let model = demo(temp.path());
    firing(&model, (1, 7, 11), |token| token == 0);
    let arguments = [&stories()[..], &["--bos", "always"]].concat();
    let report = diagnose(text(&model), &arguments);
    let found = named(&report, "token-spikes");
    let place = &found["place"];
    let token = &place["token"];
    assert_eq!((&place["layer"], &place["channel"]), (&1.into(), &11.into()), "{found}");
    assert_eq!((&token["id"], &token["position"]), (&0.into(), &0.into()), "{found}");
    assert!(found["found"].as_str().unwrap().starts_with("BOS"), "{found}");
    sound(text(&apply(found)), &arguments);
}

/// Codes of one weight overwritten, with and without the source.
#[test]
fn a_damaged_layer_is_found_and_made_again() {
    let temp = TempDir::new().unwrap();
    let out = quantized(temp.path(), &["--recipe", "rtn-int4-g32"]);
    rewrite(&out.join("model.safetensors"), |name, bytes| {
        if name.contains("layers.2.mlp.down_proj") && name.ends_with("weight_packed") {
            bytes.iter_mut().enumerate().for_each(|(i, b)| *b = b.wrapping_mul(7) ^ (i * 37) as u8);
        }
    });
    let alone = diagnose(text(&out), &few_stories());
    let place = &named(&alone, "damaged-layer")["place"];
    assert_eq!((&place["layer"], &place["part"]), (&2.into(), &"mlp".into()), "{alone}");
    let arguments = [&few_stories()[..], &["--reference", "demo"]].concat();
    let report = diagnose(text(&out), &arguments);
    let found = named(&report, "stored-as-read");
    assert_eq!(found["place"]["part"], "model.layers.2.mlp.down_proj.weight");
    assert!(finding(&report, "sensitivity").is_some(), "{report}");
    sound(text(&apply(found)), &arguments);
}

/// Ranges from a text of another language: its tokens drive a neuron that stories never use.
#[test]
fn ranges_of_another_language_are_found_and_calibrated_again() {
    if left_to_nightly() {
        return;
    }
    let temp = TempDir::new().unwrap();
    let model = demo(temp.path());
    let marked = 1500..2048;
    firing(&model, (1, 7, 11), |token| marked.contains(&token));
    let tokens = |name: &str, ids: std::ops::Range<u64>| {
        let path = temp.path().join(name);
        let id = |seed: u64, i: u64| {
            ids.start + u64::from(mantissa_num::round::random_u32(seed, i)) % (ids.end - ids.start)
        };
        let windows: Vec<Vec<u64>> = (0..12).map(|seed| (0..64).map(|i| id(seed, i)).collect()).collect();
        fs::write(&path, serde_json::json!(windows).to_string()).unwrap();
        text(&path).to_owned()
    };
    let (other, own) = (tokens("other.json", 1500..2048), tokens("own.json", 100..1000));
    // Before quantization, with both texts.
    let report = diagnose(text(&model), &["--tokens", &own, "--calibration-tokens", &other]);
    let found = named(&report, "calibration-text");
    assert_eq!(found["place"]["layer"], 1, "{found}");
    sound(text(&model), &["--tokens", &own, "--calibration-tokens", &own]);
    // After it.
    let out = temp.path().join("q");
    let quantize = ["quantize", text(&model), "--recipe", "w8a8-static", "--calibration-tokens", &other];
    succeed(&[&quantize[..], &["--out", text(&out), "--quiet"]].concat());
    let report = diagnose(text(&out), &["--tokens", &own]);
    let found = named(&report, "input-ranges");
    assert_eq!(found["place"]["layer"], 1, "{found}");
    assert!(found["place"]["part"].as_str().unwrap().contains("down_proj"), "{found}");
    assert!(found["figures"]["range_ratio"].as_f64().unwrap() < 0.1, "{found}");
    sound(text(&apply(found)), &["--tokens", &own]);
}

/// Windows of random tokens for the tiny models, whose weights are random.
fn random_tokens(dir: &Path) -> String {
    let path = dir.join("random.json");
    let window =
        |seed: u64| (0..24).map(|i| mantissa_num::round::random_u32(seed, i) % 30).collect::<Vec<_>>();
    fs::write(&path, serde_json::json!((0..16).map(window).collect::<Vec<_>>()).to_string()).unwrap();
    text(&path).to_owned()
}

/// A scale of the cache that is a sixteenth of what it was.
#[test]
fn drifted_cache_scales_are_found_and_calibrated_again() {
    if left_to_nightly() {
        return;
    }
    let temp = TempDir::new().unwrap();
    let recipe = "rtn-int8-channel+kv-fp8-e4m3-tensor@static";
    let calibration = ["--calibration", STORIES, "--length", "64"];
    let out = quantized(temp.path(), &[&["--recipe", recipe][..], &calibration].concat());
    sound(text(&out), &stories());
    rewrite(&out.join("model.safetensors"), |name, bytes| {
        if name.contains("layers.3.") && name.ends_with("k_scale") {
            match bytes.len() {
                2 => change_bf16(bytes, |_, x| x / 16.0),
                _ => bytes.chunks_exact_mut(4).for_each(|word| {
                    let scale = f32::from_le_bytes(word.try_into().unwrap());
                    word.copy_from_slice(&(scale / 16.0).to_le_bytes());
                }),
            }
        }
    });
    let report = diagnose(text(&out), &stories());
    let found = named(&report, "cache-scales");
    assert_eq!(found["place"]["layer"], 3, "{found}");
    assert!(found["place"]["part"].as_str().unwrap().starts_with("keys of"), "{found}");
    sound(text(&apply(found)), &stories());
}

/// A row of a down projection that drives the residual stream beyond FP16.
#[test]
fn a_residual_stream_beyond_fp16_is_found_where_it_starts() {
    if left_to_nightly() {
        return;
    }
    let temp = TempDir::new().unwrap();
    let model = demo(temp.path());
    rewrite(&model.join("model.safetensors"), |name, bytes| {
        if name.contains("layers.3.mlp.down_proj") {
            change_bf16(bytes, |i, x| if i / INNER == 5 { x * 1_048_576.0 } else { x });
        }
    });
    let in_bf16 = diagnose(text(&model), &stories());
    assert!(finding(&in_bf16, "fp16-overflow").is_none(), "bf16 holds the same values: {in_bf16}");
    configure(&model, |config| {
        config.insert("torch_dtype".to_owned(), "float16".into());
    });
    let report = diagnose(text(&model), &stories());
    let found = named(&report, "fp16-overflow");
    let place = &found["place"];
    let at = (&place["layer"], &place["part"], &place["channel"]);
    assert_eq!(at, (&3.into(), &"residual stream".into(), &5.into()), "{found}");
    let cured = diagnose(text(&apply(found)), &stories());
    assert!(finding(&cured, "fp16-overflow").is_none(), "{cured}");
}

/// Gate and up of one layer swapped, with the source; of all layers, without.
#[test]
fn swapped_gate_and_up_are_found_and_made_again() {
    if left_to_nightly() {
        return;
    }
    let temp = TempDir::new().unwrap();
    let out = quantized(temp.path(), &["--recipe", "rtn-int8-channel"]);
    let swap = |layers: &str| {
        let file = SafeTensors::open(&out.join("model.safetensors")).unwrap();
        let read = |name: &str| file.read(file.get(name).unwrap()).unwrap();
        let all: std::collections::BTreeMap<String, Vec<u8>> =
            file.tensors().iter().map(|meta| (meta.name.clone(), read(&meta.name))).collect();
        rewrite(&out.join("model.safetensors"), |name, bytes| {
            if name.contains(layers) && name.contains(".mlp.gate_proj") {
                bytes.clone_from(&all[&name.replace("gate_proj", "up_proj")]);
            } else if name.contains(layers) && name.contains(".mlp.up_proj") {
                bytes.clone_from(&all[&name.replace("up_proj", "gate_proj")]);
            }
        });
    };
    swap("layers.1.");
    let arguments = [&stories()[..], &["--reference", "demo"]].concat();
    let report = diagnose(text(&out), &arguments);
    let found = named(&report, "stored-as-read");
    assert_eq!(found["place"]["part"], "model.layers.1.mlp.gate_proj.weight");
    assert!(found["found"].as_str().unwrap().contains("gate and up"), "{found}");
    sound(text(&apply(found)), &arguments);
    let alone = diagnose(text(&out), &stories());
    let found = named(&alone, "stored-as-read");
    assert_eq!(found["place"]["part"], "model.layers.1.mlp.gate_proj.weight", "{found}");
    swap("layers.");
    swap("layers.1.");
    let alone = diagnose(text(&out), &stories());
    let found = named(&alone, "stored-as-read");
    assert_eq!(found["place"]["part"], "model.layers.0.mlp.gate_proj.weight", "{found}");
}

/// A head of 2 bits on layers of 8.
#[test]
fn a_head_with_too_few_bits_is_found_and_left_out() {
    if left_to_nightly() {
        return;
    }
    let temp = TempDir::new().unwrap();
    let out = quantized(temp.path(), &["--recipe", "rtn-int8-channel", "--head", "int2-g32", "--untie"]);
    let arguments = [&stories()[..], &["--reference", "demo"]].concat();
    let report = diagnose(text(&out), &arguments);
    let found = named(&report, "head-precision");
    assert_eq!(found["place"]["part"], "lm_head", "{found}");
    let compared = &report["compared"];
    assert!(compared["kl_head"].as_f64() > compared["kl_layers"].as_f64(), "{compared}");
    sound(text(&apply(found)), &arguments);
}

/// Another base of the rotary embedding, with and without the source.
#[test]
fn another_rope_base_is_found_and_set_right() {
    if left_to_nightly() {
        return;
    }
    let temp = TempDir::new().unwrap();
    let out = quantized(temp.path(), &["--recipe", "rtn-int8-channel"]);
    configure(&out, |config| {
        config.insert("rope_theta".to_owned(), 100.0.into());
    });
    let alone = diagnose(text(&out), &stories());
    let found = named(&alone, "rope-base");
    assert_eq!(found["figures"]["better"], 10000.0, "{found}");
    runs(found);
    let arguments = [&stories()[..], &["--reference", "demo"]].concat();
    let report = diagnose(text(&out), &arguments);
    let found = named(&report, "stored-as-read");
    assert!(found["place"]["part"].as_str().unwrap().contains("rope_theta"), "{found}");
    sound(text(&apply(found)), &arguments);
}

/// Writes the embedded model as a mixture of five copies of each MLP, two for each token: the same function. Router rows
/// are `a`, `-a`, `b`, `-b` and a fifth.
fn mixture(out: &Path, fifth: impl Fn(usize) -> f32) {
    let source = root().join("crates/mantissa-jobs/demo/model");
    fs::create_dir(out).unwrap();
    for entry in fs::read_dir(&source).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, out.join(path.file_name().unwrap())).unwrap();
    }
    configure(out, |config| {
        config.insert("architectures".to_owned(), serde_json::json!(["MixtralForCausalLM"]));
        config.insert("model_type".to_owned(), "mixtral".into());
        config.insert("num_local_experts".to_owned(), 5.into());
        config.insert("num_experts_per_tok".to_owned(), 2.into());
        config.insert("sliding_window".to_owned(), Value::Null);
    });
    let file = SafeTensors::open(&source.join("model.safetensors")).unwrap();
    let mut tensors: Vec<(String, Dtype, Vec<usize>, Vec<u8>)> = Vec::new();
    for meta in file.tensors() {
        let (name, bytes) = (&meta.name, file.read(meta).unwrap());
        let parts = [("gate_proj", "w1"), ("down_proj", "w2"), ("up_proj", "w3")];
        let expert = |e: usize| {
            parts.iter().find_map(|(from, to)| {
                let (layer, _) = name.split_once(&format!("mlp.{from}"))?;
                Some(format!("{layer}block_sparse_moe.experts.{e}.{to}.weight"))
            })
        };
        match expert(0) {
            None => tensors.push((name.clone(), meta.dtype, meta.shape.clone(), bytes)),
            Some(_) => (0..5).filter_map(expert).for_each(|name| {
                tensors.push((name, meta.dtype, meta.shape.clone(), bytes.clone()));
            }),
        }
    }
    for layer in 0..5 {
        let of = |seed: u64, i: usize| {
            mantissa_num::round::random_u32(seed, i as u64) as f32 / u32::MAX as f32 - 0.5
        };
        let row = |row: usize, i: usize| match row {
            0 => of(2 * layer, i),
            1 => -of(2 * layer, i),
            2 => of(2 * layer + 1, i),
            3 => -of(2 * layer + 1, i),
            _ => fifth(i),
        };
        let values = (0..5).flat_map(|r| (0..WIDTH).map(move |i| (r, i)));
        let bytes =
            values.flat_map(|(r, i)| ((row(r, i).to_bits() >> 16) as u16).to_le_bytes()).collect::<Vec<u8>>();
        let name = format!("model.layers.{layer}.block_sparse_moe.gate.weight");
        tensors.push((name, Dtype::BF16, vec![5, WIDTH], bytes));
    }
    let tensors: Vec<(&str, Dtype, &[usize], Vec<u8>)> = tensors
        .iter()
        .map(|(name, dtype, shape, bytes)| (name.as_str(), *dtype, shape.as_slice(), bytes.clone()))
        .collect();
    fs::remove_file(out.join("model.safetensors")).unwrap();
    write(&out.join("model.safetensors"), &tensors);
}

/// A router row of zeros: two of the other logits are positive, so that this one is never among the two largest.
#[test]
fn an_expert_without_tokens_is_found_and_calibrated() {
    if left_to_nightly() {
        return;
    }
    let temp = TempDir::new().unwrap();
    let (even, planted) = (temp.path().join("even"), temp.path().join("planted"));
    mixture(&even, |i| mantissa_num::round::random_u32(99, i as u64) as f32 / u32::MAX as f32 - 0.5);
    let report = sound(text(&even), &stories());
    assert!(report["layers"][0]["routed"].as_array().unwrap().len() == 5, "{report}");
    mixture(&planted, |_| 0.0);
    let report = diagnose(text(&planted), &stories());
    let found = named(&report, "unseen-experts");
    let place = &found["place"];
    assert_eq!((&place["layer"], &place["part"]), (&0.into(), &"expert 4".into()), "{found}");
    assert_eq!(found["figures"]["unseen"], 5.0, "{found}");
    // Every expert has inputs then, though the router still sends it none.
    let quality = fs::read(apply(found).join("quality.json")).unwrap();
    let quality: Value = serde_json::from_slice(&quality).unwrap();
    assert_eq!(quality["route_all_experts"], true, "{quality}");
}

/// Schemes of the cache: 8 bits are sound, 2 bits are not, and the narrowest sound one is named.
#[test]
fn a_cache_with_too_few_bits_is_found() {
    if left_to_nightly() {
        return;
    }
    let kv = ["--kv", "int8-head", "--kv", "int2-head-asym"];
    let report = diagnose("demo", &[&few_stories()[..], &kv].concat());
    let found = named(&report, "cache-schemes");
    assert_eq!(found["place"]["part"], "KV cache in int2-head-asym", "{found}");
    assert!(found["command"].as_str().unwrap().ends_with("--kv int8-head"), "{found}");
    runs(found);
    assert_eq!(report["findings"].as_array().unwrap().len(), 1, "{report}");
    let tried = report["cache_schemes"].as_array().unwrap();
    assert!(tried[0]["kl"].as_f64() < tried[1]["kl"].as_f64() && tried[0]["retrieved"].is_f64(), "{report}");
}

/// A bound that quantized inputs break, and weights alone keep.
#[test]
fn the_step_that_keeps_a_bound_is_found() {
    if left_to_nightly() {
        return;
    }
    let temp = TempDir::new().unwrap();
    let out = quantized(temp.path(), &["--recipe", "rtn-int8-channel+int4-token"]);
    let arguments = [&few_stories()[..], &["--reference", "demo", "--max-kl", "0.01"]].concat();
    let page = temp.path().join("d.html");
    let report = diagnose(text(&out), &[&arguments[..], &["--html", text(&page)]].concat());
    let found = named(&report, "bound");
    let html = fs::read_to_string(&page).unwrap();
    let parts = [
        "<h2>Findings</h2>",
        "bound: inputs",
        "KL of the same tokens by context",
        "Relaxation under the bound",
    ];
    for part in parts {
        assert!(html.contains(part), "{part}: {html}");
    }
    assert!(html.matches("<svg").count() >= 8 && !html.contains("://") && !html.contains("<script"));
    let contexts = report["compared"]["contexts"].as_array().unwrap();
    let tokens: Vec<_> = contexts.iter().map(|at| at["tokens"].as_u64().unwrap()).collect();
    assert_eq!(tokens, [8, 32], "{report}");
    assert_eq!(found["place"]["part"], "inputs", "{found}");
    assert_eq!(report["ladder"].as_array().unwrap().len(), 3, "{report}");
    let cured = apply(found);
    sound(text(&cured), &arguments);
    // Inputs in int4 make any rounding of the states dear; without them the model keeps its predictions.
    let report = diagnose(text(&cured), &few_stories());
    let residual = |report: &Value| report["ablations"][0]["kl"].as_f64().unwrap();
    assert!(residual(&report) < 0.02 && report["ablations"].as_array().unwrap().len() == 6, "{report}");
}

/// As [`stories`], with fewer windows.
fn few_stories() -> Vec<&'static str> {
    vec!["--text", STORIES, "--context", "64", "--limit", "504"]
}

/// Sound quantizations, beside their source.
#[test]
fn sound_quantizations_have_no_finding() {
    let recipes =
        ["rtn-int4-g32", "w8a8", "fp8-dynamic", "nvfp4", "mxfp4", "nf4", "rotate-w8a8", "rtn-int3-g32"];
    for recipe in sampled(recipes, 8) {
        let temp = TempDir::new().unwrap();
        let out = quantized(temp.path(), &["--recipe", recipe]);
        sound(text(&out), &[&few_stories()[..], &["--reference", "demo"]].concat());
    }
    for recipe in sampled(["w8a8-static", "w8a8-smooth", "gptq-int4-g32", "awq-int4-g32-asym"], 4) {
        let temp = TempDir::new().unwrap();
        let out =
            quantized(temp.path(), &["--recipe", recipe, "--calibration", "default", "--samples", "16"]);
        sound(text(&out), &[&few_stories()[..], &["--reference", "demo"]].concat());
    }
}

/// Every test model: the embedded one, those beside the checkout, and the tiny ones of every architecture.
#[test]
fn no_test_model_is_accused() {
    // Without arguments, an example of the help does the same.
    if whole() {
        sound("demo", &[]);
    }
    let report =
        sound("demo", &[&few_stories()[..], &["--calibration", "default", "--samples", "16"]].concat());
    assert!(report["layers"].as_array().unwrap().len() == 5, "{report}");
    let temp = TempDir::new().unwrap();
    let tokens = random_tokens(temp.path());
    for variant in sampled(tiny_models(), 12) {
        sound(text(&variant), &["--tokens", &tokens]);
    }
    let Some(models) = shared("models") else { return };
    for entry in sampled(fs::read_dir(models).unwrap(), 3) {
        let path = entry.unwrap().path();
        if path.join("config.json").is_file() {
            sound(text(&path), &few_stories());
        }
    }
}
