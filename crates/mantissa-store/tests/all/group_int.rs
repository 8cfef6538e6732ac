//! GPTQ, AutoRound and AWQ: outputs read back, layouts match the published descriptions, and damage is refused.
#[path = "../common/one_module.rs"]
mod one_module;

use std::path::Path;

use mantissa_num::stored::Map;
use mantissa_num::{Code, Codes, Quantized, Scheme, minifloat};
use mantissa_store::ErrorClass;
use mantissa_store::convention::{
    Container, LinearPlan, ModelFiles, ModelPlan, PlannedLayer, SideTensors, awq, gptq,
};
use one_module::{COLS, MODULE, Model, ROWS, artifacts, quantized, survive_damage, values, weight};
use serde_json::{Value, json};

fn scheme(text: &str) -> Scheme {
    let mut scheme: Scheme = text.parse().unwrap();
    scheme.format = scheme.format.with_scale_code(Code::Float(minifloat::F16));
    scheme
}

fn plan(scheme: &Scheme) -> LinearPlan<'_> {
    LinearPlan::new(MODULE, scheme, None, (ROWS, COLS))
}

impl Model {
    fn written(container: Container, scheme: &Scheme, q: &Quantized, g_idx: Option<&[u32]>) -> Self {
        let plan = plan(scheme);
        let bytes = match g_idx {
            Some(g_idx) => container.tensors(&plan, q, SideTensors::Groups(g_idx)).unwrap(),
            None => container.tensors(&plan, q, SideTensors::Nothing).unwrap(),
        };
        let specs = container.specs(&plan).unwrap();
        assert!(specs.iter().zip(&bytes).all(|(spec, (name, _))| spec.name == *name));
        let layer = PlannedLayer { module: MODULE, scheme, rows: ROWS, cols: COLS };
        let by_group = g_idx.is_some();
        let model = ModelPlan { by_group, damp: Some(0.01), ..ModelPlan::new(vec![layer], scheme) };
        let config = container.quantization_config(&model).unwrap();
        let tensors = specs.into_iter().zip(bytes).map(|(spec, (_, bytes))| (spec, bytes)).collect();
        Model { config, tensors }
    }

    /// Words of a tensor.
    fn words(&self, suffix: &str) -> Vec<u32> {
        let name = format!("{MODULE}.{suffix}");
        let (_, bytes) = self.tensors.iter().find(|(spec, _)| spec.name == name).unwrap();
        bytes.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect()
    }
}

#[test]
fn outputs_read_back_bit_for_bit() {
    for text in ["int2-g32", "int3-g32", "int4-g32", "int8-g48", "int4-channel", "int3-channel-asym"] {
        for text in [text.to_owned(), text.replace("-asym", "") + "-asym"] {
            let scheme = scheme(&text);
            let q = weight(&scheme);
            let mut containers = vec![gptq::CONTAINER];
            if text.starts_with("int4") {
                containers.push(awq::CONTAINER);
            }
            for container in containers {
                let model = Model::written(container, &scheme, &q, None);
                let (linear, notes) = model.read_with_notes().unwrap();
                assert_eq!(quantized(&linear), &q, "{text} {container:?}");
                assert!(linear.transforms.is_empty() && notes.is_empty(), "{text}: {notes:?}");
            }
        }
    }
}

#[test]
fn gptq_words_match_the_description() {
    let scheme = scheme("int4-g32");
    let q = weight(&scheme);
    let model = Model::written(gptq::CONTAINER, &scheme, &q, None);
    // qweight[r, n] holds the codes of rows 8r to 8r + 7 of Wᵀ, bits 4j: unsigned, the middle is 8.
    let Codes::U8(codes) = &q.codes else { panic!() };
    for (at, word) in model.words("qweight").into_iter().enumerate() {
        let (r, n) = (at / ROWS, at % ROWS);
        let code = |j: usize| (i32::from(codes[n * COLS + 8 * r + j] as i8) + 8) as u32;
        let expected = (0..8).fold(0, |word, j| word | code(j) << (4 * j));
        assert_eq!(word, expected, "{r} {n}");
    }
    assert!(model.words("qzeros").iter().all(|&word| word == 0x7777_7777));
    assert_eq!(model.words("g_idx")[30..34], [0, 0, 1, 1]);
    assert_eq!(model.config["checkpoint_format"], "gptq");
}

#[test]
fn columns_are_sorted_by_group() {
    for text in ["int4-g32", "int3-g32-asym"] {
        let scheme = scheme(text);
        let q = weight(&scheme);
        let g_idx: Vec<u32> = (0..COLS as u32).map(|k| k * 7 % 3).collect();
        let (linear, _) =
            Model::written(gptq::CONTAINER, &scheme, &q, Some(&g_idx)).read_with_notes().unwrap();
        let Some(Map::Perm(order)) = linear.transforms.before.first() else { panic!("no permutation") };
        assert_eq!(order[..3], [0, 3, 6]);
        // w[n, k] by the groups that g_idx names.
        let found = values(&linear);
        for row in 0..ROWS {
            for (k, &group) in g_idx.iter().enumerate() {
                let block = row * 3 + group as usize;
                let zero = q.zeros().get(block).copied().unwrap_or(0);
                let decoder = q.format.decoder(q.scales.get(block), zero, None);
                let expected = decoder.value(q.format.element(q.codes.get(row * COLS + k)));
                assert_eq!(found[row * COLS + k], expected, "{text} [{row}, {k}]");
            }
        }
    }
    let scheme = scheme("int4-g32");
    let fault = awq::CONTAINER
        .tensors(&plan(&scheme), &weight(&scheme), SideTensors::Groups(&[0; COLS]))
        .unwrap_err();
    assert!(fault.to_string().contains("g_idx"), "{fault}");
}

#[test]
fn a_mislabelled_version_is_decided_from_the_data() {
    for (text, label) in [("int4-g32", "gptq_v2"), ("int3-g32", "gptq_v2"), ("int4-g32-asym", "gptq")] {
        let scheme = scheme(text);
        let q = weight(&scheme);
        let mut model = Model::written(gptq::CONTAINER, &scheme, &q, None);
        model.config["checkpoint_format"] = json!(label);
        let (linear, notes) = model.read_with_notes().unwrap();
        assert_eq!(quantized(&linear), &q, "{text} as {label}");
        assert!(notes[0].contains("off by one") && notes[0].contains(label), "{notes:?}");
    }
}

#[test]
fn a_zero_point_of_0_survives_v1() {
    // GPTQModel's conversion of v2: whole words minus one in each field, so a 0 borrows from its neighbour.
    let scheme = scheme("int4-g32-asym");
    let mut q = weight(&scheme);
    q.scales.offsets.zeros_mut().iter_mut().step_by(5).for_each(|zero| *zero = -8);
    let mut model = Model::written(gptq::CONTAINER, &scheme, &q, None);
    let words = model.words("qzeros").into_iter().map(|word| word.wrapping_sub(0x1111_1111));
    model.tensor("qzeros").1 = words.flat_map(u32::to_le_bytes).collect();
    model.config["checkpoint_format"] = json!("gptq");
    let (linear, _) = model.read_with_notes().unwrap();
    assert_eq!(quantized(&linear).zeros(), q.zeros());
}

#[test]
fn auto_round_has_the_same_tensors_without_g_idx() {
    let scheme = scheme("int4-g32");
    let q = weight(&scheme);
    let mut model = Model::written(gptq::CONTAINER, &scheme, &q, None);
    model.tensors.retain(|(spec, _)| !spec.name.ends_with("g_idx"));
    for method in gptq::AUTO_ROUND {
        model.config = json!({"quant_method": method, "bits": 4, "group_size": 32, "data_type": "int", "sym": true,
            "packing_format": "auto_round:auto_gptq"});
        let (linear, notes) = model.read_with_notes().unwrap();
        assert_eq!((quantized(&linear), notes), (&q, vec![]));
    }
    // A layer with its own bits, by name.
    model.config["bits"] = json!(8);
    model.config["extra_config"] =
        json!({MODULE: {"bits": 4}, "lm_head": {"bits": 16, "data_type": "float"}});
    assert_eq!(quantized(&model.read_with_notes().unwrap().0), &q);

    let mut model = Model::written(awq::CONTAINER, &scheme, &q, None);
    model.config = json!({"quant_method": "auto-round", "bits": 4, "group_size": 32, "packing_format": "auto_round:auto_awq"});
    assert_eq!(quantized(&model.read_with_notes().unwrap().0), &q);
}

#[test]
fn layers_may_have_settings_of_their_own() {
    let (narrow, wide) = (scheme("int4-g32"), scheme("int8-channel"));
    let q = weight(&wide);
    let mut model = Model::written(gptq::CONTAINER, &wide, &q, None);
    let groups = [
        (narrow, None, vec!["model.layers.0.mlp.gate_proj".to_owned()]),
        (wide, None, vec![MODULE.to_owned()]),
    ];
    let kept = ["model.layers.0.mlp.down_proj".to_owned()];
    model.config = gptq::quantization_config(&groups, &kept, gptq::Settings::default()).unwrap();
    assert_eq!(quantized(&model.read_with_notes().unwrap().0), &q);
    let path = Path::new("config.json");
    let config = gptq::Config::parse(path, &model.config).unwrap();
    assert_eq!(config.layer(&kept[0]), None);
    assert_eq!(config.layer("model.layers.0.mlp.gate_proj").unwrap().bits, 4);
    // Zero points in some layers only would need both versions.
    let mixed = [groups[0].clone(), (scheme("int4-g32-asym"), None, vec!["m".to_owned()])];
    assert!(gptq::quantization_config(&mixed, &[], gptq::Settings::default()).is_err());
    assert!(awq::quantization_config(&groups, &[]).unwrap_err().to_string().contains("group size"));
}

#[test]
fn unsupported_schemes_are_refused() {
    let refused = |container: Container, text: &str, rows: usize, cols: usize| {
        let scheme: Scheme = text.parse().unwrap();
        let plan = LinearPlan::new(MODULE, &scheme, None, (rows, cols));
        container.specs(&plan).map_err(|e| e.to_string()).expect_err(text)
    };
    for (container, text, says) in [
        (gptq::CONTAINER, "int5-g32", "int2, int3, int4, int8"),
        (gptq::CONTAINER, "nf4", "in groups"),
        (gptq::CONTAINER, "int4-tensor", "by channel"),
        (gptq::CONTAINER, "int4-g36", "multiple of 36"),
        (awq::CONTAINER, "int8-g32", "int4"),
    ] {
        let text = refused(container, text, ROWS, COLS);
        assert!(text.contains(says), "{text}");
    }
    assert!(refused(gptq::CONTAINER, "int3-g16", 16, COLS).contains("32-bit words"));
    assert!(refused(awq::CONTAINER, "int4-g32", 12, COLS).contains("multiple of 8"));
    let (scheme, input): (Scheme, Scheme) = ("int4-g32".parse().unwrap(), "int8-token".parse().unwrap());
    let plan = LinearPlan { input: Some(&input), ..plan(&scheme) };
    assert!(gptq::CONTAINER.specs(&plan).unwrap_err().to_string().contains("activations"));
}

/// A change of a config, and the text that its message must contain.
fn broken_configs(container: Container) -> Vec<(&'static str, Value, &'static str)> {
    let mut all = vec![
        ("bits", json!(5), "bits"),
        ("bits", json!("4"), "bits"),
        ("bits", json!(-4), "bits"),
        ("bits", json!(16), "bits"),
        ("group_size", json!(0), "group_size"),
        ("group_size", json!(-2), "group_size"),
        ("group_size", json!(4_294_967_296u64), "group_size"),
        ("group_size", json!("32"), "group_size"),
        ("group_size", json!(64), "scales"),
        ("group_size", json!(-1), "scales"),
        ("quant_method", json!("gptx"), "quant_method"),
    ];
    if container == awq::CONTAINER {
        all.extend([
            ("version", json!("gemv"), "version"),
            ("version", json!("gemv_fast"), "version"),
            ("format", json!("marlin"), "format"),
        ]);
    } else {
        all.extend([
            ("bits", json!(8), "qweight"),
            ("checkpoint_format", json!("marlin"), "checkpoint_format"),
            ("is_marlin_format", json!(true), "is_marlin_format"),
            ("pack_dtype", json!("int16"), "pack_dtype"),
            ("dynamic", json!([1]), "dynamic"),
            ("dynamic", json!({"+:(": {"bits": 8}}), "regular expression"),
            ("dynamic", json!({"+:.*": {"bits": 9}}), "dynamic.+:.*.bits"),
        ]);
    }
    all
}

#[test]
fn broken_configs_are_refused_by_their_key() {
    let scheme = scheme("int4-g32-asym");
    for container in [gptq::CONTAINER, awq::CONTAINER] {
        let good = Model::written(container, &scheme, &weight(&scheme), None);
        assert!(good.read_with_notes().is_ok());
        for (key, value, says) in broken_configs(container) {
            let mut model = good.clone();
            model.config[key] = value.clone();
            let error = model.read_with_notes().expect_err(key);
            let text = error.to_string();
            assert_eq!((error.class(), text.lines().count()), (ErrorClass::Input, 1), "{text}");
            assert!(text.contains(says) && text.contains(", got "), "{container:?} {key} {value}: {text}");
        }
    }
}

#[test]
fn broken_tensors_are_refused_by_name() {
    use mantissa_store::Dtype;
    let scheme = scheme("int4-g32-asym");
    for container in [gptq::CONTAINER, awq::CONTAINER] {
        let good = Model::written(container, &scheme, &weight(&scheme), None);
        let mut suffixes = vec!["qweight", "qzeros", "scales"];
        if container == gptq::CONTAINER {
            suffixes.push("g_idx");
        }
        let check = |change: &dyn Fn(&mut Model), suffix: &str, what: &str| {
            let mut model = good.clone();
            change(&mut model);
            let error = model.read_with_notes().expect_err(what);
            let text = error.to_string();
            assert_eq!((error.class(), text.lines().count()), (ErrorClass::Input, 1), "{text}");
            assert!(
                text.contains(suffix) && text.contains(", got "),
                "{container:?} {suffix} {what}: {text}"
            );
        };
        for suffix in suffixes.iter().copied() {
            let reshape = |shape: &'static [usize]| {
                move |model: &mut Model| {
                    let tensor = model.tensor(suffix);
                    let size = usize::try_from(tensor.0.dtype.bits() / 8).unwrap();
                    tensor.0.shape = shape.to_vec();
                    tensor.1.resize(shape.iter().product::<usize>() * size, 0);
                }
            };
            check(&reshape(&[]), suffix, "scalar");
            check(&reshape(&[0]), suffix, "empty");
            check(&reshape(&[3, 5]), suffix, "another shape");
            check(&reshape(&[1, 2, 3]), suffix, "three axes");
            let transposed = |model: &mut Model| model.tensor(suffix).0.shape.reverse();
            if suffix != "g_idx" {
                check(&transposed, suffix, "transposed");
            }
            for dtype in [Dtype::U8, Dtype::I64, Dtype::F8E4M3] {
                let flipped = move |model: &mut Model| {
                    let tensor = model.tensor(suffix);
                    let n: usize = tensor.0.shape.iter().product();
                    tensor.0.dtype = dtype;
                    tensor.1.resize(n * usize::try_from(dtype.bits() / 8).unwrap(), 0);
                };
                check(&flipped, suffix, "another dtype");
            }
            if suffix != "g_idx" {
                let missing = |model: &mut Model| {
                    model.tensors.retain(|(spec, _)| !spec.name.ends_with(suffix));
                };
                check(&missing, suffix, "missing");
            }
        }
        for bits in [0x7c00u16, 0xfc00, 0x7e00] {
            let poison = move |model: &mut Model| {
                model.tensor("scales").1[10..12].copy_from_slice(&bits.to_le_bytes());
            };
            check(&poison, "scales", "a scale that is no number");
        }
        if container == gptq::CONTAINER {
            for group in [-1i32, 3, i32::MAX, i32::MIN] {
                let wild = move |model: &mut Model| {
                    model.tensor("g_idx").1[..4].copy_from_slice(&group.to_le_bytes());
                };
                check(&wild, "g_idx", "a group that is not there");
            }
            let uneven =
                |model: &mut Model| model.tensor("g_idx").1[..4].copy_from_slice(&1i32.to_le_bytes());
            check(&uneven, "g_idx", "groups of other sizes");
            let one = |model: &mut Model| model.tensor("g_idx").1.fill(0);
            check(&one, "g_idx", "one group for all");
        }
    }
}

#[test]
fn seeded_damage_never_panics() {
    let scheme = scheme("int3-g32-asym");
    let four = self::scheme("int4-g32-asym");
    let models = [
        Model::written(gptq::CONTAINER, &scheme, &weight(&scheme), None),
        Model::written(awq::CONTAINER, &four, &weight(&four), None),
    ];
    for (m, model) in models.iter().enumerate() {
        let dir = tempfile::tempdir().unwrap();
        model.write(dir.path());
        survive_damage(dir.path(), m as u64, 200, |linear| {
            assert!(values(linear).iter().all(|v| v.is_finite()));
        });
    }
}

/// Checkpoints of the public packages, from the data beside the repository: their codes are written back to the same
/// bytes.
#[test]
fn codes_of_public_packages_are_written_back_identically() {
    let Some(artifacts) = artifacts() else { return };
    for (name, container) in [
        ("gptqm_w4_g32_sym_gar", gptq::CONTAINER),
        ("gptqm_w4_g32_sym_descact", gptq::CONTAINER),
        ("gptqm_w3_g32_sym_gar", gptq::CONTAINER),
        ("ar_w4_g32_sym", gptq::CONTAINER),
        ("autoawq_w4_g32_noclip", awq::CONTAINER),
    ] {
        let files = ModelFiles::open(&artifacts.join(name)).unwrap();
        let checkpoint = files.checkpoint();
        let modules: Vec<String> = checkpoint
            .tensors()
            .filter_map(|meta| Some(meta.name.strip_suffix(".qweight")?.to_owned()))
            .collect();
        assert_eq!(modules.len(), 35, "{name}");
        for module in &modules {
            let rows = checkpoint.get(&format!("{module}.scales")).unwrap().shape[1];
            let cols = if module.ends_with("down_proj") { 352 } else { 128 };
            let linear = files.linear(module, rows, cols, false).unwrap();
            let q = quantized(&linear);
            let scheme = Scheme::new(q.format.clone(), mantissa_num::Rule::Full);
            let plan = LinearPlan::new(module, &scheme, None, (rows, cols));
            let written = match linear.transforms.before.first() {
                Some(Map::Perm(order)) => {
                    let (q, g_idx) = gptq::in_own_order(q, order);
                    container.tensors(&plan, &q, SideTensors::Groups(&g_idx)).unwrap()
                }
                _ => container.tensors(&plan, q, SideTensors::Nothing).unwrap(),
            };
            for (tensor, bytes) in written {
                // AutoRound omits g_idx.
                if checkpoint.get(&tensor).is_some() || container == awq::CONTAINER {
                    assert!(checkpoint.read(&tensor).unwrap() == bytes, "{name}: {tensor}");
                } else {
                    assert!(name.starts_with("ar_") && tensor.ends_with("g_idx"), "{name}: {tensor}");
                }
            }
        }
    }
}
