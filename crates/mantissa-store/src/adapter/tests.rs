use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::*;
use crate::convention::Weight;
use crate::{Error, Output};

/// Adapters that peft wrote (`tests/data/make_peft.py`).
fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/peft").join(name)
}

fn read(dir: &Path) -> crate::Result<Adapter> {
    AdapterFiles::open(dir)?.load()
}

fn module(rows: usize, cols: usize, rank: usize, seed: f32) -> AdapterModule {
    let wave =
        |n: usize, phase: f32| (0..n).map(|i| (i as f32 * 0.7 + phase + seed).sin()).collect::<Vec<_>>();
    AdapterModule {
        rows,
        cols,
        rank,
        alpha: 6.0,
        rank_stabilized: false,
        a: wave(rank * cols, 0.0),
        b: wave(rows * rank, 1.0),
        magnitude: None,
    }
}

#[test]
fn adapters_of_peft_are_read_and_written_back_to_the_same_tensors() {
    for name in ["lora", "dora", "patterns", "dora-bias", "fused", "conv1d", "saved"] {
        let adapter = read(&data(name)).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("out");
        adapter.write(&Output::new(&out)).unwrap();
        assert_eq!(read(&out).unwrap().modules, adapter.modules, "{name}");
        assert_eq!(read(&out).unwrap().replaced, adapter.replaced, "{name}");
        // Same tensors under the same names, but for the wrapper's name of a base weight.
        let (ours, theirs) = (
            crate::SafeTensors::open(&out.join(WEIGHTS_NAME)).unwrap(),
            crate::SafeTensors::open(&data(name).join(WEIGHTS_NAME)).unwrap(),
        );
        for meta in theirs.tensors() {
            let ours_meta = ours.get(&meta.name.replace(".base_layer.", ".")).unwrap();
            assert_eq!((&ours_meta.shape, ours_meta.dtype), (&meta.shape, meta.dtype));
            assert_eq!(ours.read(ours_meta).unwrap(), theirs.read(meta).unwrap());
        }
        assert_eq!(ours.tensors().len(), theirs.tensors().len());
    }
}

#[test]
fn ranks_and_scales_follow_the_patterns() {
    let adapter = read(&data("patterns")).unwrap();
    let of = |name: &str| {
        let module = &adapter.modules[name];
        (module.rank, module.alpha, module.scale())
    };
    assert_eq!(of("model.layers.0.self_attn.q_proj"), (4, 6.0, 3.0));
    assert_eq!(of("model.layers.1.self_attn.q_proj"), (3, 6.0, (6.0 / 3f64.sqrt()) as f32));
    assert_eq!(of("model.layers.0.mlp.down_proj"), (2, 6.0, (6.0 / 2f64.sqrt()) as f32));
    assert_eq!(of("model.layers.1.self_attn.v_proj"), (4, 9.0, 4.5));
    assert_eq!(of("lm_head"), (4, 6.0, 3.0));
}

#[test]
fn what_is_written_names_every_rank_and_scale() {
    let mut adapter =
        Adapter { settings: AdapterSettings { dropout: 0.05, ..Default::default() }, ..Default::default() };
    adapter.modules.insert("model.layers.0.q_proj".into(), module(4, 6, 2, 0.0));
    adapter.modules.insert("model.layers.1.q_proj".into(), module(4, 6, 2, 1.0));
    adapter
        .modules
        .insert("model.layers.11.q_proj".into(), AdapterModule { alpha: 2.5, ..module(4, 6, 3, 2.0) });
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    adapter.write(&Output::new(&out)).unwrap();
    let config: Value = serde_json::from_slice(&std::fs::read(out.join(CONFIG_NAME)).unwrap()).unwrap();
    assert_eq!((&config["r"], &config["lora_alpha"]), (&json!(2), &json!(6)));
    assert_eq!(config["rank_pattern"], json!({"model.layers.11.q_proj": 3}));
    assert_eq!(config["alpha_pattern"], json!({"model.layers.11.q_proj": 2.5}));
    let again = read(&out).unwrap();
    assert_eq!(again.modules, adapter.modules);
    assert_eq!(again.settings.dropout, 0.05);

    adapter.modules.insert("other".into(), AdapterModule { rank_stabilized: true, ..module(4, 6, 2, 0.0) });
    assert!(adapter.write(&Output::new(dir.path().join("mixed"))).is_err());
    adapter.modules.insert("other".into(), AdapterModule { rows: 5, ..module(4, 6, 2, 0.0) });
    assert!(adapter.write(&Output::new(dir.path().join("misfit"))).is_err());
    assert!(!dir.path().join("misfit").exists());
}

/// Copies the DoRA adapter with `field` set to `value`, and returns the error of reading it.
fn refused(field: &str, value: Value) -> String {
    let dir = tempfile::tempdir().unwrap();
    let mut config: Value =
        serde_json::from_slice(&std::fs::read(data("dora").join(CONFIG_NAME)).unwrap()).unwrap();
    config[field] = value;
    std::fs::write(dir.path().join(CONFIG_NAME), config.to_string()).unwrap();
    std::fs::copy(data("dora").join(WEIGHTS_NAME), dir.path().join(WEIGHTS_NAME)).unwrap();
    let error = read(dir.path()).expect_err(field).to_string();
    assert!(!error.contains('\n'), "{error}");
    error
}

#[test]
fn settings_that_change_the_result_are_refused_by_name() {
    for (field, value) in [
        ("peft_type", json!("IA3")),
        ("peft_type", json!(null)),
        ("use_qalora", json!(true)),
        ("lora_bias", json!(true)),
        ("layer_replication", json!([[0, 2], [1, 3]])),
        ("target_parameters", json!(["mlp.experts.down_proj"])),
        ("trainable_token_indices", json!([1, 2])),
        ("alora_invocation_tokens", json!([5])),
        ("arrow_config", json!({"top_k": 2})),
        ("a_feature_of_tomorrow", json!("on")),
        ("init_lora_weights", json!("pissa_niter_16")),
        ("init_lora_weights", json!("olora")),
        ("init_lora_weights", json!(7)),
    ] {
        let error = refused(field, value);
        assert!(error.contains(&format!("{field}: expected")) && error.contains("fix: "), "{error}");
    }
}

#[test]
fn values_that_cannot_be_are_refused_with_the_field() {
    for (field, value, expected) in [
        ("r", json!(0), "expected a rank from 1 to 65536, got 0"),
        ("r", json!(-4), "got -4"),
        ("r", json!(1e30), "a rank from 1"),
        ("r", json!("8"), "got \"8\""),
        ("r", json!(5), "shape: expected [5, inputs]"),
        ("lora_alpha", json!("x"), "a finite number"),
        ("lora_alpha", json!(1e300), "a finite number"),
        ("use_dora", json!("yes"), "true or false"),
        ("use_dora", json!(false), "true where there are magnitudes"),
        ("use_rslora", json!(1), "true or false"),
        ("rank_pattern", json!([1]), "an object"),
        ("rank_pattern", json!({"q_proj": 0}), "rank_pattern[\"q_proj\"]: expected a rank"),
        ("rank_pattern", json!({"(?=q)": 2}), "without look-around"),
        ("rank_pattern", json!({"(": 2}), "without look-around"),
        ("alpha_pattern", json!({"(a{1000}){1000}": 2}), "without look-around"),
        ("alpha_pattern", json!({"q_proj": null}), "alpha_pattern[\"q_proj\"]: expected a finite number"),
        ("target_modules", json!(["nothing"]), "target_modules: expected a name that selects"),
        ("target_modules", json!([3]), "a list of module names"),
        ("modules_to_save", json!({"a": 1}), "a list of module names"),
    ] {
        let error = refused(field, value);
        assert!(error.contains(expected), "{error}");
    }
}

/// Writes tensors of one module beside the settings of the DoRA adapter, and returns the error of reading them.
fn refused_tensors(tensors: &[(&str, &[usize])]) -> String {
    let dir = tempfile::tempdir().unwrap();
    std::fs::copy(data("dora").join(CONFIG_NAME), dir.path().join(CONFIG_NAME)).unwrap();
    let specs = tensors
        .iter()
        .map(|(name, shape)| crate::TensorSpec::new(*name, crate::Dtype::F32, *shape))
        .collect();
    let mut writer =
        crate::SafetensorsWriter::create(&dir.path().join(WEIGHTS_NAME), specs, BTreeMap::new()).unwrap();
    for (name, shape) in tensors {
        writer.write(name, &vec![0; 4 * shape.iter().product::<usize>()]).unwrap();
    }
    writer.finish().unwrap();
    read(dir.path()).expect_err("tensors").to_string()
}

#[test]
fn tensors_that_do_not_belong_are_refused_by_name() {
    let (a, b) = ("base_model.model.x.q_proj.lora_A.weight", "base_model.model.x.q_proj.lora_B.weight");
    let m = "base_model.model.x.q_proj.lora_magnitude_vector";
    for (tensors, expected) in [
        (vec![], "expected tensors such as"),
        (vec![(a, &[2, 4][..])], "q_proj.lora_B.weight"),
        (vec![(b, &[4, 2][..])], "q_proj.lora_A.weight"),
        (vec![(a, &[2, 4]), (b, &[4, 2])], "q_proj.lora_magnitude_vector"),
        (vec![(a, &[2, 4]), (b, &[4, 2]), (m, &[5])], "expected [4], the outputs of lora_B, got [5]"),
        (vec![(a, &[2, 4]), (b, &[4, 3]), (m, &[4])], "expected [outputs, 2]"),
        (vec![(a, &[2, 4, 1, 1]), (b, &[4, 2]), (m, &[4])], "expected [2, inputs]"),
        (vec![(a, &[2, 0]), (b, &[4, 2]), (m, &[4])], "expected [2, inputs]"),
        (vec![("model.x.lora_A.weight", &[2, 4])], "a name that begins with base_model.model."),
        (vec![("base_model.model.x.lora_embedding_A", &[2, 4])], "an adapter of an embedding"),
        (vec![("base_model.model.x.lora_A.default.weight", &[2, 4])], "an unknown part"),
        (vec![("base_model.model.x.lora_B.bias", &[4])], "an unknown part"),
        (vec![("base_model.model.x.hada_w1_a", &[4])], "an unknown part"),
    ] {
        let error = refused_tensors(&tensors);
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn folders_that_are_no_adapters_say_so() {
    let dir = tempfile::tempdir().unwrap();
    assert!(matches!(AdapterFiles::open(dir.path()), Err(Error::Missing { .. })));
    std::fs::copy(data("lora").join(CONFIG_NAME), dir.path().join(CONFIG_NAME)).unwrap();
    assert!(matches!(AdapterFiles::open(dir.path()), Err(Error::Missing { .. })));
    std::fs::write(dir.path().join("adapter_model.bin"), [0x80, 2]).unwrap();
    assert!(matches!(AdapterFiles::open(dir.path()), Err(Error::Foreign { .. })));
    for text in ["[]", "{\"peft_type\": \"LORA\", \"peft_type\": \"LORA\"}", "{", "\u{0}"] {
        std::fs::write(dir.path().join(CONFIG_NAME), text).unwrap();
        assert!(AdapterFiles::open(dir.path()).is_err(), "{text}");
    }
    std::fs::copy(data("lora").join(CONFIG_NAME), dir.path().join(CONFIG_NAME)).unwrap();
    let mut bytes = std::fs::read(data("lora").join(WEIGHTS_NAME)).unwrap();
    let last = bytes.len() - 4;
    bytes[last..].copy_from_slice(&f32::NAN.to_le_bytes());
    std::fs::write(dir.path().join(WEIGHTS_NAME), bytes).unwrap();
    assert!(matches!(read(dir.path()), Err(Error::NonFinite { .. })));
}

#[test]
fn merging_is_the_formula_in_f32_rounded_once() {
    let (rows, cols) = (5, 7);
    let base: Vec<f32> = (0..rows * cols).map(|i| (i as f32 * 1.3).cos()).collect();
    let magnitude: Vec<f32> = (0..rows).map(|i| 0.5 + i as f32).collect();
    for magnitude in [None, Some(magnitude)] {
        let adapter = AdapterModule { magnitude, ..module(rows, cols, 3, 0.4) };
        let mut merged = base.clone();
        adapter.merge(&mut merged).unwrap();
        for row in 0..rows {
            let delta = |col: usize| -> f64 {
                (0..3)
                    .map(|j| 2.0 * f64::from(adapter.b[row * 3 + j]) * f64::from(adapter.a[j * cols + col]))
                    .sum()
            };
            let sum: Vec<f64> = (0..cols).map(|col| f64::from(base[row * cols + col]) + delta(col)).collect();
            let norm = sum.iter().map(|w| w * w).sum::<f64>().sqrt();
            let factor = adapter.magnitude.as_ref().map_or(1.0, |m| f64::from(m[row]) / norm);
            for (col, expected) in sum.iter().enumerate() {
                assert!((f64::from(merged[row * cols + col]) - expected * factor).abs() < 1e-5);
            }
        }
        let bits: Vec<u16> = base.iter().map(|w| half::bf16::from_f32(*w).to_bits()).collect();
        let mut exact: Vec<f32> = bits.iter().map(|b| half::bf16::from_bits(*b).to_f32()).collect();
        adapter.merge(&mut exact).unwrap();
        let once = exact.iter().map(|w| half::bf16::from_f32(*w).to_bits()).collect();
        assert_eq!(adapter.merged(Weight::Bf16(bits)).unwrap(), Weight::Bf16(once));
    }
    let huge = AdapterModule { alpha: 1e6, ..module(rows, cols, 3, 0.4) };
    let half = base.iter().map(|w| half::f16::from_f32(*w).to_bits()).collect();
    assert!(matches!(huge.merged(Weight::F16(half)), Err(MergeError::NotFinite { dtype: "f16", .. })));
    assert!(matches!(huge.merged(Weight::F32(vec![0.0; 3])), Err(MergeError::Size { found: 3, .. })));
}

/// A row without a direction stays zero instead of becoming NaN.
#[test]
fn a_row_of_zeros_stays_zero_under_dora() {
    let mut adapter = AdapterModule { magnitude: Some(vec![0.0, 1.0]), ..module(2, 3, 1, 0.0) };
    adapter.b = vec![0.0; 2];
    let mut weight = vec![0.0, 0.0, 0.0, 3.0, 0.0, 4.0];
    adapter.merge(&mut weight).unwrap();
    assert_eq!(weight, [0.0, 0.0, 0.0, 0.6, 0.0, 0.8]);
}
