//! ModelOpt, bitsandbytes, DeepSeek's FP8 and the rarer layouts of compressed-tensors: modules packed by a script
//! (`tests/data/make_float_conventions.py`) decode to their expected weights and are written back to the same bytes;
//! damage is refused.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../common/one_module.rs"]
mod one_module;
mod refused;

use std::path::{Path, PathBuf};

use mantissa_num::{Scheme, StaticScale, parse_activation};
use mantissa_store::convention::{
    Container, LinearPlan, ModelFiles, ModelPlan, PlannedLayer, SideTensors, Stack, StackForm, Weight,
    bitsandbytes, compressed_tensors, exl2, fp8, gpt_oss, mlx, modelopt, onnx,
};
use mantissa_store::{Dtype, ErrorClass, TensorSpec};
use one_module::{COLS, MODULE, Model, ROWS, artifacts, quantized, survive_damage, values, weight};
use serde_json::{Value, json};

impl Model {
    fn of(dir: &Path) -> (Self, [String; 2]) {
        let files = ModelFiles::open(dir).unwrap();
        let config = files.config().unwrap()["quantization_config"].clone();
        let checkpoint = files.checkpoint();
        let tensor = |meta: &mantissa_store::TensorMeta| {
            (
                TensorSpec::new(&meta.name, meta.dtype, meta.shape.clone()),
                checkpoint.read(&meta.name).unwrap(),
            )
        };
        let (file, _) = checkpoint.locate("expected").unwrap();
        let text = ["container", "input"].map(|key| file.metadata()[key].clone());
        (Model { config, tensors: checkpoint.tensors().map(tensor).collect() }, text)
    }

    /// The error of reading it, one line that names a tensor or a key.
    fn refused(&self, what: &str) -> String {
        let Err(error) = self.read() else { panic!("{what}: it was read") };
        let text = error.to_string();
        assert_eq!((error.class(), text.lines().count()), (ErrorClass::Input, 1), "{what}: {text}");
        assert!(text.contains("expected ") && text.contains(", got "), "{what}: {text}");
        text
    }
}

fn folders() -> Vec<(String, PathBuf)> {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/float_conventions");
    let mut all: Vec<_> = std::fs::read_dir(data)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .map(|path| (path.file_name().unwrap().to_str().unwrap().to_owned(), path))
        .collect();
    all.sort();
    all
}

fn folder(name: &str) -> Model {
    let (_, path) = folders().into_iter().find(|(found, _)| found == name).expect(name);
    Model::of(&path).0
}

fn container(name: &str) -> Option<Container> {
    Container::named(name)
}

#[test]
fn every_layout_decodes_to_its_expected_weight() {
    let all = folders();
    assert_eq!(all.len(), 24);
    for (name, dir) in all {
        let files = ModelFiles::open(&dir).unwrap_or_else(|e| panic!("{name}: {e}"));
        let linear = files.linear(MODULE, ROWS, COLS, false).unwrap_or_else(|e| panic!("{name}: {e}"));
        let (_, [_, input]) = Model::of(&dir);
        let found = linear.input.as_ref().map_or(String::new(), |input| input.scheme.to_string());
        assert_eq!(found, input, "{name}");
        let w = values(&linear);
        if !name.starts_with("ct-") && !name.starts_with("mlx-") {
            assert_eq!(files.coded_shape(MODULE), Some((ROWS, COLS)), "{name}");
        }
        let rows = files.checkpoint().read("expected_rows").unwrap();
        let rows = rows.as_chunks::<4>().0.iter().map(|b| i32::from_le_bytes(*b) as usize);
        let expected = files.checkpoint().read_f32("expected").unwrap();
        let largest = expected.iter().fold(0f32, |a, v| a.max(v.abs()));
        for (row, expected) in rows.zip(expected.chunks_exact(COLS)) {
            for (col, (found, expected)) in w[row * COLS..].iter().zip(expected).enumerate() {
                // A few roundings of f32: of the scale, the product, and in one layout of a rotation.
                assert!(
                    (found - expected).abs() <= 4e-7 * largest,
                    "{name} [{row}, {col}]: {found} for {expected}"
                );
            }
        }
    }
}

/// A configuration that calls a quantized layer unquantized, or the reverse, is outweighed by the tensors.
#[test]
fn tensors_outweigh_what_mlx_lists() {
    let good = folder("mlx-affine4");
    let expected = values(&good.read().unwrap());
    let dense = weight(&"int8-channel".parse().unwrap()).dequantize().unwrap();
    for (stated, unlisted) in [
        (json!(false), Some(false)),
        (json!(true), None),
        (json!({"group_size": 32, "bits": 4}), None),
        (json!(null), None),
    ] {
        for name in [MODULE.to_owned(), format!("language_model.{MODULE}")] {
            let mut model = good.clone();
            model.config[&name] = stated.clone();
            let dir = tempfile::tempdir().unwrap();
            model.write(dir.path());
            let files = ModelFiles::open(dir.path()).unwrap();
            assert_eq!(files.unlisted(MODULE), unlisted, "{name} {stated}");
            assert_eq!(
                values(&files.linear(MODULE, ROWS, COLS, false).unwrap()),
                expected,
                "{name} {stated}"
            );
        }
    }
    for (stated, unlisted) in [(json!(false), None), (json!(true), Some(true)), (json!(null), None)] {
        let mut model = good.clone();
        model.config[MODULE] = stated.clone();
        let bytes = dense.iter().flat_map(|v| v.to_le_bytes()).collect();
        let name = format!("{MODULE}.weight");
        model.tensors = vec![(TensorSpec::new(name, Dtype::F32, vec![ROWS, COLS]), bytes)];
        let dir = tempfile::tempdir().unwrap();
        model.write(dir.path());
        let files = ModelFiles::open(dir.path()).unwrap();
        assert_eq!(files.unlisted(MODULE), unlisted, "{stated}");
        let read = files.linear(MODULE, ROWS, COLS, false).unwrap();
        assert!(matches!(read.weight, Weight::F32(_)), "{stated}");
    }
}

/// Equal, except for an amax of LLM.int8() if two neighbours give the same scale.
fn same_bytes(spec: &TensorSpec, ours: &[u8], theirs: &[u8]) -> bool {
    let scales = |bytes: &[u8]| -> Vec<f32> {
        bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b) / 127.0).collect()
    };
    ours == theirs || (spec.name.ends_with(".SCB") && scales(ours) == scales(theirs))
}

#[test]
fn checkpoints_are_written_back_to_the_same_bytes() {
    let mut seen = 0;
    for (name, dir) in folders() {
        let (model, [written_by, _]) = Model::of(&dir);
        let Some(container) = container(&written_by) else { continue };
        let stored = container.store(MODULE, &model.read().unwrap()).unwrap();
        assert_eq!(stored.len(), model.suffixes().len(), "{name}");
        for (spec, bytes) in stored {
            let (theirs, expected) = model.tensors.iter().find(|(other, _)| other.name == spec.name).unwrap();
            if spec.name.contains("quant_state") {
                // The text of the mean has a place of fixed length.
                let text = std::str::from_utf8(&bytes).unwrap();
                assert_eq!(text.trim_end().as_bytes(), expected, "{name} {}", spec.name);
                continue;
            }
            assert_eq!(&spec, theirs, "{name}");
            if spec.name.ends_with("nested_quant_map") {
                // numpy's levels; torch's are compared with the package's own file.
                continue;
            }
            assert!(same_bytes(&spec, &bytes, expected), "{name} {} has other bytes", spec.name);
        }
        seen += 1;
    }
    assert_eq!(seen, 18);
}

/// Artifacts written by the packages: every layer, tensor by tensor.
#[test]
fn artifacts_are_written_back_to_the_same_bytes() {
    let Some(artifacts) = artifacts() else { return };
    for (name, container) in [
        ("mo_FP8_DEFAULT_CFG", modelopt::CONTAINER),
        ("mo_INT4_AWQ_g32", modelopt::CONTAINER),
        ("bnb_fn_nf4", bitsandbytes::CONTAINER),
        ("bnb_fn_nf4_dq", bitsandbytes::CONTAINER),
        ("bnb_int8", bitsandbytes::CONTAINER),
    ] {
        let files = ModelFiles::open(&artifacts.join(name)).unwrap();
        let mut seen = 0;
        for module in
            ["self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"]
        {
            for layer in 0..4 {
                let module = format!("model.layers.{layer}.{module}");
                let shape = match module.rsplit('.').next().unwrap() {
                    "v_proj" => (64, 128),
                    "gate_proj" => (352, 128),
                    "down_proj" => (128, 352),
                    _ => (128, 128),
                };
                let linear = files.linear(&module, shape.0, shape.1, false).unwrap();
                for (spec, bytes) in container.store(&module, &linear).unwrap() {
                    let meta =
                        files.checkpoint().get(&spec.name).unwrap_or_else(|| panic!("{name}: {}", spec.name));
                    let theirs = files.checkpoint().read(&spec.name).unwrap();
                    seen += 1;
                    if spec.name.contains("quant_state") {
                        let text = std::str::from_utf8(&bytes).unwrap();
                        assert_eq!(text.trim_end().as_bytes(), theirs, "{name}: {}", spec.name);
                        continue;
                    }
                    assert_eq!((spec.dtype, &spec.shape), (meta.dtype, &meta.shape), "{name}: {}", spec.name);
                    assert!(same_bytes(&spec, &bytes, &theirs), "{name}: {} has other bytes", spec.name);
                }
            }
        }
        assert!(seen >= 40, "{name}: {seen}");
    }
}

#[test]
fn quantized_weights_read_back_bit_for_bit() {
    for (container, scheme, input) in [
        (modelopt::CONTAINER, "int4-g32", ""),
        (modelopt::CONTAINER, "int4-g48:restricted", ""),
        (modelopt::CONTAINER, "nvfp4", ""),
        (modelopt::CONTAINER, "nvfp4", "nvfp4"),
        (modelopt::CONTAINER, "fp8-e4m3-tensor", "fp8-e4m3-tensor@static"),
        (compressed_tensors::CONTAINER, "fp8-e4m3-tensor", "fp8-e4m3-tensor@static"),
        (compressed_tensors::CONTAINER, "fp8-e4m3-channel", "fp8-e4m3-tensor@static"),
        (compressed_tensors::CONTAINER, "int8-channel", "int8-tensor@static"),
        (compressed_tensors::CONTAINER, "int8-channel", "int8-tensor-asym@static"),
        (compressed_tensors::CONTAINER, "mxfp6-e2m3:ct", ""),
        (compressed_tensors::CONTAINER, "mxfp6-e2m3:ct", "mxfp8-e4m3:ct"),
        (compressed_tensors::CONTAINER, "mxfp4:ct", "fp8-e4m3-g128"),
        (compressed_tensors::CONTAINER, "nvfp4", "nvfp4"),
        (modelopt::CONTAINER, "fp8-e4m3-channel", "fp8-e4m3-token"),
        (modelopt::CONTAINER, "mxfp8-e4m3", "mxfp8-e4m3:rceil"),
        (bitsandbytes::CONTAINER, "nf4", ""),
        (bitsandbytes::CONTAINER, "nf4-g128", ""),
        (bitsandbytes::CONTAINER, "nf4-dq", ""),
        (bitsandbytes::CONTAINER, "fp4-bnb-g32", ""),
        (bitsandbytes::CONTAINER, "int8-channel:restricted", "int8-token:restricted"),
        (onnx::CONTAINER, "int4-g32", ""),
        (onnx::CONTAINER, "int4-g48-asym", ""),
        (onnx::CONTAINER, "int4-channel-asym", ""),
        (onnx::CONTAINER, "int8-tensor", ""),
        (onnx::CONTAINER, "int8-g32-asym", ""),
        (onnx::CONTAINER, "fp8-e4m3-channel", ""),
        (onnx::CONTAINER, "fp8-e5m2-g32", ""),
        (mlx::CONTAINER, "int4-g32-asym:minmax", ""),
        (mlx::CONTAINER, "int3-g32-asym:minmax", ""),
        (mlx::CONTAINER, "mxfp4", ""),
        (mlx::CONTAINER, "mxfp8-e4m3", ""),
        (mlx::CONTAINER, "nvfp4:torchao-1level", ""),
        (fp8::CONTAINER, "fp8-e4m3-t16x32", "fp8-e4m3-g32"),
        (fp8::CONTAINER, "fp8-e4m3-t128x128", "fp8-e4m3-g128"),
        (fp8::CONTAINER, "fp8-e4m3-t16x40:ue8m0", "fp8-e4m3-t1x40:ue8m0"),
    ] {
        let text = scheme;
        let scheme = container.as_stored(text.parse().unwrap(), Dtype::F16);
        let input = Some(input).filter(|text| !text.is_empty()).map(|text| parse_activation(text).unwrap());
        let q = weight(&scheme);
        let plan = LinearPlan::new(MODULE, &scheme, input.as_ref(), (ROWS, COLS));
        let zero = if input.as_ref().is_some_and(|input| input.format.has_zero()) { -7 } else { 0 };
        let stored = plan.stores_input_scale().then_some(StaticScale { scale: 0.037, zero });
        if stored.is_some() {
            // The scale is calibrated; without it nothing can be written.
            assert!(
                container
                    .tensors(&plan, &q, SideTensors::Nothing)
                    .unwrap_err()
                    .to_string()
                    .contains("calibration"),
                "{text}"
            );
        }
        let plan = LinearPlan { input_scale: stored, ..plan };
        let specs = container.specs(&plan).unwrap_or_else(|e| panic!("{text}: {e}"));
        let bytes = container.tensors(&plan, &q, SideTensors::Nothing).unwrap();
        assert!(specs.iter().zip(&bytes).all(|(spec, (name, _))| spec.name == *name), "{text}");
        let layer = PlannedLayer { module: MODULE, scheme: &scheme, rows: ROWS, cols: COLS };
        let model = ModelPlan { input: input.as_ref(), ..ModelPlan::new(vec![layer], &scheme) };
        let config = container.quantization_config(&model).unwrap();
        let tensors = specs.into_iter().zip(bytes).map(|(spec, (_, bytes))| (spec, bytes)).collect();
        let linear = Model { config, tensors }.read().unwrap_or_else(|e| panic!("{text}: {e}"));
        assert!(quantized(&linear) == &q, "{text}");
        let outer = linear.input.as_ref().and_then(|input| input.outer);
        let apart = outer.zip(stored).map_or(0, |(a, b)| a.to_bits().abs_diff(b.scale.to_bits()));
        assert_eq!(linear.input.as_ref().map_or(0, |input| input.zero), zero, "{text}");
        assert!(outer.is_some() == stored.is_some() && apart <= 1, "{text}: {outer:?}");
        assert_eq!(linear.input.map(|input| input.scheme), input, "{text}");
    }
}

/// Groups of columns that are not adjacent, as in GPTQ's act-order.
#[test]
fn compressed_tensors_holds_the_group_of_each_column() {
    for text in ["int4-g32", "int3-g32-asym"] {
        let scheme: Scheme = text.parse().unwrap();
        let q = weight(&scheme);
        let plan = LinearPlan { by_group: true, ..LinearPlan::new(MODULE, &scheme, None, (ROWS, COLS)) };
        let g_idx: Vec<u32> = (0..COLS).map(|column| (column * 7 % COLS / 32) as u32).collect();
        let container = compressed_tensors::CONTAINER;
        let bytes = container.tensors(&plan, &q, SideTensors::Groups(&g_idx)).unwrap();
        let specs = container.specs(&plan).unwrap();
        let groups = [(scheme.clone(), None, vec![MODULE.to_owned()])];
        let config = compressed_tensors::quantization_config(&groups, &[], true).unwrap();
        assert_eq!(config["config_groups"]["group_0"]["weights"]["actorder"], "group");
        let tensors: Vec<_> = specs.into_iter().zip(bytes).map(|(spec, (_, bytes))| (spec, bytes)).collect();
        let linear = Model { config, tensors: tensors.clone() }.read().unwrap();
        let grid = COLS / 32;
        // Each code with the scale and zero point of its column's group.
        let expected = |row: usize, col: usize| {
            let block = row * grid + g_idx[col] as usize;
            let zero = q.zeros().get(block).copied().unwrap_or(0);
            let scale = q.format.scale().unwrap().code.decode(q.scales.get(block));
            (f32::from(q.codes.get(row * COLS + col) as u8 as i8) - zero as f32) * scale
        };
        for (i, value) in values(&linear).into_iter().enumerate() {
            assert_eq!(value, expected(i / COLS, i % COLS), "{text} {i}");
        }
        let again = container.store(MODULE, &linear).unwrap();
        assert!(
            again.iter().all(|tensor| tensors.contains(tensor)) && again.len() == tensors.len(),
            "{text}"
        );
    }
    let scheme: Scheme = "int4-channel".parse().unwrap();
    let plan = LinearPlan { by_group: true, ..LinearPlan::new(MODULE, &scheme, None, (ROWS, COLS)) };
    assert!(compressed_tensors::CONTAINER.specs(&plan).unwrap_err().to_string().contains("weight_g_idx"));
}

#[test]
fn columns_in_another_order_need_the_word_for_it() {
    let mut model = folder("ct-actorder");
    assert!(!model.read().unwrap().transforms.is_empty());
    model.config["config_groups"]["group_0"]["weights"]["actorder"] = json!("weight");
    assert!(model.refused("actorder").contains("weight_g_idx"));
    model.tensor("weight_g_idx").1.fill(0xff);
    assert!(model.read().unwrap().transforms.is_empty(), "never filled");
}

#[test]
fn caches_have_their_scales() {
    let attention = "model.layers.0.self_attn";
    let f32s = |values: &[f32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
    let files = |model: &Model| {
        let dir = tempfile::tempdir().unwrap();
        model.write(dir.path());
        let files = ModelFiles::open(dir.path()).unwrap();
        (dir, files)
    };
    let scheme = |kind: &str, strategy: &str| json!({"num_bits": 8, "type": kind, "symmetric": true, "strategy": strategy, "dynamic": false});
    let mut model = folder("ct-fp8-block");
    model.config["kv_cache_scheme"] = scheme("float", "tensor");
    let (_dir, opened) = files(&model);
    let quant = opened.kv_quant(attention, 4).unwrap().unwrap();
    assert_eq!((quant.scheme.to_string().as_str(), quant.k_scale), ("fp8-e4m3-tensor@static", vec![1.0]));

    model.config["kv_cache_scheme"] = scheme("int", "attn_head");
    let per_head = [0.5, 0.25, 0.125, 2.0];
    let spec =
        |name: &str, shape: &[usize]| TensorSpec::new(format!("{attention}.{name}"), Dtype::F32, shape);
    model.tensors.push((spec("k_scale", &[4, 1, 1]), f32s(&per_head)));
    model.tensors.push((spec("v_scale", &[1]), f32s(&[0.75])));
    let (_dir, opened) = files(&model);
    let quant = opened.kv_quant(attention, 4).unwrap().unwrap();
    assert_eq!(quant.scheme.to_string(), "int8-tensor@static");
    assert_eq!((quant.k_scale, quant.v_scale), (per_head.to_vec(), vec![0.75]));
    assert!(opened.notes().is_empty(), "{:?}", opened.notes());
    assert!(opened.kv_quant(attention, 2).unwrap_err().to_string().contains("k_scale"), "other heads");
    for bad in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        let mut model = model.clone();
        model.tensors.last_mut().unwrap().1 = f32s(&[bad]);
        let (_dir, opened) = files(&model);
        assert!(opened.kv_quant(attention, 4).unwrap_err().to_string().contains("v_scale"), "{bad}");
    }
    model.config["kv_cache_scheme"]["dynamic"] = json!(true);
    let (_dir, opened) = files(&model);
    assert_eq!((opened.kv_quant(attention, 4).unwrap(), opened.notes().len()), (None, 1));

    let mut model = folder("modelopt-fp8");
    model.config["kv_cache_scheme"] = json!({"num_bits": 8, "type": "float", "dynamic": false});
    model.tensors.push((spec("k_proj.k_scale", &[]), f32s(&[0.5])));
    let (_dir, opened) = files(&model);
    let quant = opened.kv_quant(attention, 4).unwrap().unwrap();
    assert_eq!((quant.k_scale, quant.v_scale), (vec![0.5], vec![1.0]));
    model.tensors.push((spec("k_proj.k_bias", &[]), f32s(&[0.5])));
    assert!(files(&model).1.kv_quant(attention, 4).unwrap_err().to_string().contains("k_bias"));
}

#[test]
fn an_older_modelopt_checkpoint_has_only_its_own_file() {
    let dir = tempfile::tempdir().unwrap();
    let model = folder("modelopt-int4-awq");
    model.write(dir.path());
    std::fs::write(dir.path().join("config.json"), "{}").unwrap();
    let open = || ModelFiles::open(dir.path());
    assert_eq!(open().unwrap().convention_name(), "dense");
    let write = |quantization: Value| {
        let content = json!({"producer": {"name": "modelopt"}, "quantization": quantization}).to_string();
        std::fs::write(dir.path().join(modelopt::FILE_NAME), content).unwrap();
    };
    write(json!({"quant_algo": "W4A16_AWQ", "group_size": 32}));
    let linear = open().unwrap().linear(MODULE, ROWS, COLS, false).unwrap();
    assert_eq!(values(&linear), values(&model.read().unwrap()));
    write(json!({"quant_algo": "INT4"}));
    assert!(open().unwrap_err().to_string().contains(modelopt::FILE_NAME));
}

#[test]
fn experts_in_mxfp4_read_back_and_split() {
    let scheme: Scheme = "mxfp4".parse().unwrap();
    let q = weight(&scheme);
    let mut second = q.clone();
    let mantissa_num::Codes::U8(codes) = &mut second.codes else { panic!() };
    codes.reverse();
    let name = "model.layers.0.mlp.experts.gate_up_proj";
    let tensors = gpt_oss::tensors(name, &[q.clone(), second.clone()]).unwrap();
    assert_eq!(tensors[0].0.shape, [2, ROWS, COLS / 32, 16]);
    // The first of two codes is in the low nibble.
    assert_eq!(u32::from(tensors[0].1[0]), q.codes.get(0) | q.codes.get(1) << 4);
    let model = Model { config: json!({"quant_method": "mxfp4"}), tensors: tensors.to_vec() };
    let dir = tempfile::tempdir().unwrap();
    model.write(dir.path());
    let files = ModelFiles::open(dir.path()).unwrap();
    let stack = |experts, expert, turns, turn| Stack {
        tensor: name.to_owned(),
        form: StackForm::Interleaved,
        experts,
        expert,
        turns,
        turn,
    };
    for (i, expected) in [&q, &second].into_iter().enumerate() {
        assert_eq!(&gpt_oss::expert(&files, &stack(2, i, 1, 0), ROWS, COLS).unwrap(), expected);
        // Gate and up are interleaved.
        let w = expected.dequantize().unwrap();
        for turn in 0..2 {
            let half = gpt_oss::expert(&files, &stack(2, i, 2, turn), ROWS / 2, COLS).unwrap();
            let rows = w.chunks_exact(COLS).skip(turn).step_by(2).flatten().copied().collect::<Vec<_>>();
            assert_eq!(half.dequantize().unwrap(), rows);
        }
    }
    for (experts, rows, cols) in [(3, ROWS, COLS), (2, ROWS / 2, COLS), (2, ROWS, 64), (2, ROWS, 80)] {
        assert!(gpt_oss::expert(&files, &stack(experts, 0, 1, 0), rows, cols).is_err());
    }
    assert!(gpt_oss::tensors(name, &[weight(&"int4-g32".parse().unwrap())]).is_none());
}

/// DeepSeek-V4's experts: two FP4 codes a byte under a scale per 32 columns, beside FP8 tiles.
#[test]
fn experts_in_fp4_are_read_and_written_beside_fp8() {
    let scheme: Scheme = "mxfp4".parse().unwrap();
    let input = parse_activation("fp8-e4m3-g128").unwrap();
    let expert = "model.layers.0.mlp.experts.3.up_proj";
    let q = weight(&scheme);
    let plan = LinearPlan::new(expert, &scheme, Some(&input), (ROWS, COLS));
    let specs = fp8::CONTAINER.specs(&plan).unwrap();
    let bytes = fp8::CONTAINER.tensors(&plan, &q, SideTensors::Nothing).unwrap();
    assert_eq!((specs[0].dtype, &specs[0].shape[..]), (Dtype::I8, &[ROWS, COLS / 2][..]));
    assert_eq!((specs[1].dtype, &specs[1].shape[..]), (Dtype::F8E8M0, &[ROWS, COLS.div_ceil(32)][..]));
    // Two values a byte, the first in the low bits.
    let value = |code: u8| {
        [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][usize::from(code & 7)]
            * if code & 8 > 0 { -1.0 } else { 1.0 }
    };
    let scale = 2f32.powi(i32::from(bytes[1].1[0]) - 127);
    let first = q.dequantize().unwrap();
    assert_eq!([value(bytes[0].1[0]) * scale, value(bytes[0].1[0] >> 4) * scale], first[..2]);
    let tiles: Scheme = "fp8-e4m3-t128x128".parse().unwrap();
    let layers = [("model.layers.0.mlp.up_proj", &tiles), (expert, &scheme)];
    let layers = layers.map(|(module, scheme)| PlannedLayer { module, scheme, rows: ROWS, cols: COLS });
    let model = ModelPlan { input: Some(&input), ..ModelPlan::new(layers.to_vec(), &tiles) };
    let config = fp8::CONTAINER.quantization_config(&model).unwrap();
    assert_eq!((&config["expert_dtype"], &config["weight_block_size"]), (&json!("fp4"), &json!([128, 128])));
    let named = |spec: TensorSpec| TensorSpec { name: spec.name.replace(expert, MODULE), ..spec };
    let tensors = specs.into_iter().map(named).zip(bytes).map(|(spec, (_, bytes))| (spec, bytes)).collect();
    let stored = Model { config, tensors };
    let linear = stored.read().unwrap();
    assert!(quantized(&linear) == &q && linear.input.unwrap().scheme == input);
    // Without expert_dtype bytes are no codes, and other layers may not be FP4.
    let mut plain = stored;
    plain.config["expert_dtype"] = json!("fp8");
    assert!(plain.refused("no expert_dtype").contains("weight"));
    let other = LinearPlan::new("model.layers.0.mlp.up_proj", &scheme, Some(&input), (ROWS, COLS));
    assert!(fp8::CONTAINER.specs(&other).unwrap_err().to_string().contains("only experts"));
    let unquantized = LinearPlan::new(expert, &scheme, None, (ROWS, COLS));
    assert!(fp8::CONTAINER.specs(&unquantized).unwrap_err().to_string().contains("+fp8-e4m3-g128"));
}
