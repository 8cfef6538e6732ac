//! Levels of a KV cache in the native format: what is written reads back, and damage is refused by name.
use mantissa_store::convention::{KeyLevels, KvLevels, ModelFiles};
use mantissa_store::{Dtype, Error, ErrorClass, SafetensorsWriter, TensorSpec};
use serde_json::{Value, json};

const MODULE: &str = "model.layers.0.self_attn";
const WIDTH: usize = 6;

fn levels() -> KvLevels {
    let middles = (0..WIDTH).map(|c| c as f32 - 2.5).collect();
    let halves = (0..WIDTH).map(|c| c as f32 * 0.5).collect();
    let keys = Some(KeyLevels { levels: vec![-1.0, -0.25, 0.0, 0.75], middles, halves });
    KvLevels { policy: "keys=nuq2,values=nuq1".to_owned(), keys, values: Some(vec![-0.5, 0.5]) }
}

fn read(config: &Value, tensors: &[(TensorSpec, Vec<u8>)]) -> Result<Option<KvLevels>, Error> {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    std::fs::write(dir.join("config.json"), json!({"quantization_config": config}).to_string()).unwrap();
    let specs = tensors.iter().map(|(spec, _)| spec.clone()).collect();
    let mut writer =
        SafetensorsWriter::create(&dir.join("model.safetensors"), specs, Default::default()).unwrap();
    tensors.iter().for_each(|(spec, bytes)| writer.write(&spec.name, bytes).unwrap());
    writer.finish().unwrap();
    ModelFiles::open(dir)?.kv_levels(MODULE, WIDTH)
}

fn config() -> Value {
    json!({"quant_method": "mantissa", "kv_levels": levels().policy})
}

#[test]
fn levels_round_trip() {
    let all = levels();
    assert_eq!(read(&config(), &all.tensors(MODULE)).unwrap(), Some(all.clone()));
    let values = KvLevels { keys: None, ..all.clone() };
    assert_eq!(read(&config(), &values.tensors(MODULE)).unwrap(), Some(values));
    let silent = json!({"quant_method": "mantissa"});
    assert_eq!(read(&silent, &all.tensors(MODULE)).unwrap(), None);
}

#[test]
fn levels_that_do_not_fit_are_refused_by_name() {
    let f32s = |values: &[f32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
    type Change<'a> = &'a dyn Fn(&mut TensorSpec, &mut Vec<u8>);
    let count = |n: usize| {
        move |spec: &mut TensorSpec, bytes: &mut Vec<u8>| {
            spec.shape = vec![n];
            bytes.resize(4 * n, 0);
        }
    };
    let values =
        |values: &'static [f32]| move |_: &mut TensorSpec, bytes: &mut Vec<u8>| *bytes = f32s(values);
    let narrow = |spec: &mut TensorSpec, bytes: &mut Vec<u8>| {
        spec.dtype = Dtype::F16;
        bytes.truncate(bytes.len() / 2);
    };
    let square = |spec: &mut TensorSpec, _: &mut Vec<u8>| spec.shape = vec![2, 2];
    let turned = |spec: &mut TensorSpec, _: &mut Vec<u8>| spec.shape.reverse();
    let negative = |_: &mut TensorSpec, bytes: &mut Vec<u8>| {
        let at = bytes.len() - 4;
        bytes[at..].copy_from_slice(&(-1f32).to_le_bytes());
    };
    for (suffix, change, says) in [
        ("k_levels", &count(3) as Change<'_>, "power of two"),
        ("k_levels", &count(1), "power of two"),
        ("k_levels", &count(512), "up to 256"),
        ("k_levels", &count(0), "power of two"),
        ("k_levels", &square, "power of two"),
        ("k_levels", &values(&[-1.0, 0.5, 0.25, 1.0]), "ascend"),
        ("k_levels", &values(&[-1.0, f32::NAN, 0.25, 1.0]), "non-finite"),
        ("k_levels", &narrow, "F32"),
        ("k_ranges", &turned, "shape"),
        ("k_ranges", &negative, "below 0"),
        ("v_levels", &values(&[0.0, f32::INFINITY]), "non-finite"),
        ("v_levels", &values(&[0.5, -0.5]), "ascend"),
    ] {
        let mut tensors = levels().tensors(MODULE);
        let (spec, bytes) =
            tensors.iter_mut().find(|(spec, _)| spec.name.ends_with(suffix)).expect("a tensor of this name");
        change(spec, bytes);
        let error = read(&config(), &tensors).expect_err(suffix);
        let text = error.to_string();
        assert_eq!((error.class(), text.lines().count()), (ErrorClass::Input, 1), "{text}");
        assert!(text.contains(&format!("{MODULE}.{suffix}")) && text.contains(says), "{suffix}: {text}");
    }
    let mut tensors = levels().tensors(MODULE);
    tensors.remove(1);
    assert!(read(&config(), &tensors).unwrap_err().to_string().contains("k_ranges"));
    let tensors = levels().tensors(MODULE);
    for (config, says) in [
        (json!({"quant_method": "mantissa", "kv_levels": 4}), "a policy as text"),
        (json!({"quant_method": "mantissa", "kv_levels": "nuq2", "kv_cache": "int8-head"}), "one of them"),
    ] {
        let text = read(&config, &tensors).unwrap_err().to_string();
        assert!(text.contains("quantization_config.kv_levels") && text.contains(says), "{text}");
    }
}
