//! Quantized weights that contradict their config, hold non-finite values, or would be decoded differently elsewhere;
//! each beside a counterpart that is accepted.
use std::path::Path;

use mantissa_store::convention::{Container, LinearWeight, ModelFiles, Weight, native};
use mantissa_store::{Dtype, Error, ErrorClass, SafetensorsWriter, TensorSpec};
use serde_json::{Value, json};

const MODULE: &str = "model.layers.0.mlp.up_proj";
/// Not square, and with a number of groups that no axis has, so that no transposed shape is accepted by chance.
const ROWS: usize = 8;
const COLS: usize = 64;

type Tensor = (&'static str, Dtype, Vec<usize>, Vec<u8>);

fn f32s(n: usize, x: f32) -> Vec<u8> {
    std::iter::repeat_n(x.to_le_bytes(), n).flatten().collect()
}

/// Writes the tensors of one module under `MODULE.` and a config with these weight arguments, and reads the module.
fn read(weights: Value, tensors: &[Tensor]) -> Result<Weight, Error> {
    let dir = tempfile::tempdir().unwrap();
    let config = json!({"quantization_config": {
        "quant_method": "compressed-tensors", "format": "mixed-precision", "ignore": [],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}
    }});
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    write(dir.path(), tensors);
    let files = ModelFiles::open(dir.path()).unwrap();
    files.linear(MODULE, ROWS, COLS, false).map(|linear| linear.weight)
}

fn write(dir: &Path, tensors: &[Tensor]) {
    let name = |suffix: &str| format!("{MODULE}.{suffix}");
    let specs = tensors.iter().map(|t| TensorSpec::new(name(t.0), t.1, t.2.clone())).collect();
    let path = dir.join("model.safetensors");
    let mut writer = SafetensorsWriter::create(&path, specs, Default::default()).unwrap();
    tensors.iter().for_each(|t| writer.write(&name(t.0), &t.3).unwrap());
    writer.finish().unwrap();
}

fn refused(weights: Value, tensors: &[Tensor], suffix: &str, says: &str) {
    let error = read(weights, tensors).expect_err(says);
    let text = error.to_string();
    assert_eq!((error.class(), text.lines().count()), (ErrorClass::Input, 1), "{text}");
    assert!(text.contains(&format!("{MODULE}.{suffix}")) && text.contains(says), "{suffix} {says}: {text}");
    assert!(text.contains("expected ") && text.contains(", got "), "{text}");
}

fn int4(symmetric: bool) -> Value {
    json!({"num_bits": 4, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": 32})
}

fn packed() -> Tensor {
    ("weight_packed", Dtype::I32, vec![ROWS, COLS / 8], vec![0x88; ROWS * COLS / 2])
}

fn scales(shape: &[usize], x: f32) -> Tensor {
    ("weight_scale", Dtype::F32, shape.to_vec(), f32s(shape.iter().product(), x))
}

fn int8() -> Value {
    json!({"num_bits": 8, "type": "int", "symmetric": true, "strategy": "channel"})
}

fn bytes(dtype: Dtype, code: u8) -> Tensor {
    ("weight", dtype, vec![ROWS, COLS], vec![code; ROWS * COLS])
}

#[test]
fn scales_in_another_shape_are_refused() {
    assert!(read(int4(true), &[packed(), scales(&[ROWS, 2], 0.5)]).is_ok());
    for shape in [&[2, ROWS][..], &[2 * ROWS], &[ROWS, 2, 1], &[ROWS, 1], &[ROWS, 4]] {
        refused(int4(true), &[packed(), scales(shape, 0.5)], "weight_scale", "[8, 2]");
    }
    assert!(read(int8(), &[bytes(Dtype::I8, 3), scales(&[ROWS, 1], 0.5)]).is_ok());
    for shape in [&[1, ROWS][..], &[ROWS], &[1]] {
        refused(int8(), &[bytes(Dtype::I8, 3), scales(shape, 0.5)], "weight_scale", "[8, 1]");
    }
    let tensor = json!({"num_bits": 8, "type": "int", "symmetric": true, "strategy": "tensor"});
    for shape in [&[][..], &[1], &[1, 1]] {
        assert!(read(tensor.clone(), &[bytes(Dtype::I8, 3), scales(shape, 0.5)]).is_ok());
    }
    refused(tensor, &[bytes(Dtype::I8, 3), scales(&[ROWS, 1], 0.5)], "weight_scale", "[1]");
}

#[test]
fn zero_points_must_be_declared_and_in_range() {
    let zeros = |code: u8| ("weight_zero_point", Dtype::I8, vec![ROWS, 2], vec![code; 2 * ROWS]);
    let scale = || scales(&[ROWS, 2], 0.5);
    assert!(read(int4(true), &[packed(), scale(), zeros(0)]).is_ok(), "all 0 changes nothing");
    refused(int4(true), &[packed(), scale(), zeros(3)], "weight_zero_point", "symmetric");
    // In packed codes 0x8 means 0.
    let words = |byte: u8| ("weight_zero_point", Dtype::I32, vec![1, 2], vec![byte; 8]);
    assert!(read(int4(true), &[packed(), scale(), words(0x88)]).is_ok());
    refused(int4(true), &[packed(), scale(), words(0x89)], "weight_zero_point", "symmetric");

    assert!(read(int4(false), &[packed(), scale(), zeros(7)]).is_ok());
    assert!(read(int4(false), &[packed(), scale(), zeros(0xf8)]).is_ok());
    refused(int4(false), &[packed(), scale(), zeros(8)], "weight_zero_point", "-8 to 7");
    refused(int4(false), &[packed(), scale(), zeros(0x80)], "weight_zero_point", "-8 to 7");
    let transposed = ("weight_zero_point", Dtype::I8, vec![2, ROWS], vec![0; 2 * ROWS]);
    refused(int4(false), &[packed(), scale(), transposed], "weight_zero_point", "[8, 2]");
    let missing = read(int4(false), &[packed(), scale()]).unwrap_err();
    assert!(matches!(missing, Error::NoTensor { .. }), "{missing}");
}

#[test]
fn columns_in_another_order_are_refused() {
    let order = |of: &dyn Fn(i32) -> i32| {
        let groups = (0..COLS as i32).flat_map(|i| of(i).to_le_bytes()).collect();
        [packed(), scales(&[ROWS, 2], 0.5), ("weight_g_idx", Dtype::I32, vec![COLS], groups)]
    };
    assert!(read(int4(true), &order(&|i| i / 32)).is_ok());
    assert!(read(int4(true), &order(&|_| -1)).is_ok(), "never filled");
    refused(int4(true), &order(&|i| (i + 1) / 32 % 2), "weight_g_idx", "their own order");
}

#[test]
fn non_finite_values_are_refused_by_tensor_count_and_index() {
    let mut scale = scales(&[ROWS, 2], 0.5);
    scale.3[4 * 5..][..4].copy_from_slice(&f32::NAN.to_le_bytes());
    scale.3[4 * 9..][..4].copy_from_slice(&f32::INFINITY.to_le_bytes());
    refused(
        int4(true),
        &[packed(), scale],
        "weight_scale",
        "2 non-finite values, the first (NaN) at element 5",
    );
    // Finite, and beyond f32 times the lowest code.
    refused(int4(true), &[packed(), scales(&[ROWS, 2], 3e38)], "weight_scale", "finite f32");

    let fp8 = json!({"num_bits": 8, "type": "float", "symmetric": true, "strategy": "channel"});
    let mut weight = bytes(Dtype::F8E4M3, 0x38);
    assert!(read(fp8.clone(), &[weight.clone(), scales(&[ROWS, 1], 1.0)]).is_ok());
    (weight.3[77], weight.3[80]) = (0x7f, 0xff);
    refused(
        fp8,
        &[weight, scales(&[ROWS, 1], 1.0)],
        "weight",
        "2 non-finite values, the first (NaN) at element 77",
    );

    let mx = json!({"num_bits": 4, "type": "float", "symmetric": true, "strategy": "group", "group_size": 32,
        "scale_dtype": "torch.uint8"});
    let codes = || ("weight_packed", Dtype::U8, vec![ROWS, COLS / 2], vec![0x21; ROWS * COLS / 2]);
    let powers = |code: u8| ("weight_scale", Dtype::U8, vec![ROWS, 2], vec![code; 2 * ROWS]);
    assert!(read(mx.clone(), &[codes(), powers(127)]).is_ok());
    refused(mx, &[codes(), powers(255)], "weight_scale", "16 non-finite values");
}

#[test]
fn a_tensor_scale_must_leave_numbers() {
    let nv = json!({"num_bits": 4, "type": "float", "symmetric": true, "strategy": "tensor_group", "group_size": 16});
    let codes = || ("weight_packed", Dtype::U8, vec![ROWS, COLS / 2], vec![0x21; ROWS * COLS / 2]);
    let blocks = |code: u8| ("weight_scale", Dtype::F8E4M3, vec![ROWS, 4], vec![code; 4 * ROWS]);
    let global = |x: f32| ("weight_global_scale", Dtype::F32, vec![1], f32s(1, x));
    assert!(read(nv.clone(), &[codes(), blocks(0x38), global(2.0)]).is_ok());
    refused(nv.clone(), &[codes(), blocks(0x38), global(0.0)], "weight_scale", "finite f32");
    refused(nv.clone(), &[codes(), blocks(0x38), global(f32::NAN)], "weight_global_scale", "non-finite");
    refused(nv.clone(), &[codes(), blocks(0x7f), global(2.0)], "weight_scale", "non-finite");
    let two = ("weight_global_scale", Dtype::F32, vec![2], f32s(2, 1.0));
    refused(nv.clone(), &[codes(), blocks(0x38), two], "weight_global_scale", "one value");
    let none = ("weight_global_scale", Dtype::F32, vec![0], Vec::new());
    refused(nv, &[codes(), blocks(0x38), none], "weight_global_scale", "one value");
}

#[test]
fn dense_weights_are_numbers_in_every_dtype() {
    for (dtype, one, none) in [
        (Dtype::F32, f32s(1, 1.0), f32s(1, f32::NEG_INFINITY)),
        (Dtype::BF16, vec![0x80, 0x3f], vec![0x80, 0xff]),
        (Dtype::F16, vec![0x00, 0x3c], vec![0x00, 0xfc]),
        (Dtype::F64, 1f64.to_le_bytes().to_vec(), f64::NEG_INFINITY.to_le_bytes().to_vec()),
    ] {
        let mut data = one.repeat(ROWS * COLS);
        let load = |data: &[u8]| {
            let dir = tempfile::tempdir().unwrap();
            write(dir.path(), &[("weight", dtype, vec![ROWS, COLS], data.to_vec())]);
            let files = ModelFiles::open(dir.path()).unwrap();
            let linear = files.linear(MODULE, ROWS, COLS, false).map(|_| ());
            linear.and(files.tensor_f32(&format!("{MODULE}.weight"), &[ROWS, COLS]).map(|_| ()))
        };
        load(&data).unwrap();
        let size = one.len();
        data[500 * size..][..size].copy_from_slice(&none);
        let error = load(&data).unwrap_err();
        assert!(
            matches!(&error, Error::NonFinite { count: 1, index: 500, value, .. } if *value == f32::NEG_INFINITY)
        );
        assert!(error.to_string().contains("model.safetensors: tensor"), "{error}");
    }
}

/// The native format states zero points in 32 bits.
#[test]
fn native_zero_points_are_codes() {
    let read = |zero: i32| {
        let dir = tempfile::tempdir().unwrap();
        let config = json!({"quantization_config": {"quant_method": "mantissa", "format": "native"}});
        std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
        let n = format!("{MODULE}.weight");
        let spec = |suffix: &str, dtype, shape: &[usize]| {
            TensorSpec::new(format!("{n}.{suffix}"), dtype, shape.to_vec())
        };
        let specs = vec![
            spec("packed", Dtype::U8, &[ROWS * COLS / 2]),
            spec("scale", Dtype::F32, &[ROWS, 2]),
            spec("zero", Dtype::I32, &[ROWS, 2]),
        ];
        let metadata = [(n.clone(), format!("int4-g32-asym [{ROWS}, {COLS}]"))].into();
        let mut writer =
            SafetensorsWriter::create(&dir.path().join("model.safetensors"), specs, metadata).unwrap();
        writer.write(&format!("{n}.packed"), &[0; ROWS * COLS / 2]).unwrap();
        writer.write(&format!("{n}.scale"), &f32s(2 * ROWS, 0.5)).unwrap();
        let zeros: Vec<u8> = std::iter::repeat_n(zero.to_le_bytes(), 2 * ROWS).flatten().collect();
        writer.write(&format!("{n}.zero"), &zeros).unwrap();
        writer.finish().unwrap();
        ModelFiles::open(dir.path()).unwrap().linear(MODULE, ROWS, COLS, false)
    };
    assert!(read(-8).is_ok() && read(7).is_ok());
    for zero in [8, -9, i32::MAX, i32::MIN] {
        let text = read(zero).unwrap_err().to_string();
        assert!(
            text.contains(&format!("zero point {zero} at element 0")) && text.contains("-8 to 7"),
            "{text}"
        );
    }
}

/// A weight of the native format with scales of 16 bits and two outliers in each of its rows.
struct WithOutliers {
    counts: Vec<u16>,
    columns: Vec<u16>,
    value: u16,
    without: &'static str,
    config: Value,
}

impl Default for WithOutliers {
    fn default() -> Self {
        WithOutliers {
            counts: vec![2; ROWS],
            columns: (0..ROWS as u16).flat_map(|row| [row, 63]).collect(),
            // 1.5
            value: 0x3e00,
            without: "",
            config: json!({"quant_method": "mantissa", "format": "native"}),
        }
    }
}

impl WithOutliers {
    fn tensors(&self) -> Vec<(TensorSpec, Vec<u8>)> {
        let words = |words: &[u16]| words.iter().flat_map(|w| w.to_le_bytes()).collect::<Vec<u8>>();
        let count = self.columns.len();
        let all = [
            ("packed", Dtype::U8, vec![ROWS * COLS / 2], vec![0x99; ROWS * COLS / 2]),
            ("scale", Dtype::F16, vec![ROWS, 2], words(&[0x3800; 2 * ROWS])),
            ("zero", Dtype::I8, vec![ROWS, 2], vec![0xff; 2 * ROWS]),
            ("outlier_counts", Dtype::U16, vec![self.counts.len()], words(&self.counts)),
            ("outlier_columns", Dtype::U16, vec![count], words(&self.columns)),
            ("outlier_values", Dtype::F16, vec![count], words(&vec![self.value; count])),
        ];
        let named = all.into_iter().filter(|(suffix, ..)| *suffix != self.without);
        let spec = |(suffix, dtype, shape, bytes)| {
            (TensorSpec::new(format!("{MODULE}.weight.{suffix}"), dtype, shape), bytes)
        };
        named.map(spec).collect()
    }

    fn read(&self) -> Result<LinearWeight, Error> {
        let dir = tempfile::tempdir().unwrap();
        let config = json!({"quantization_config": self.config});
        std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
        let tensors = self.tensors();
        let metadata = [(format!("{MODULE}.weight"), format!("int4-g32-asym [{ROWS}, {COLS}]"))].into();
        let specs = tensors.iter().map(|(spec, _)| spec.clone()).collect();
        let path = dir.path().join("model.safetensors");
        let mut writer = SafetensorsWriter::create(&path, specs, metadata).unwrap();
        tensors.iter().for_each(|(spec, bytes)| writer.write(&spec.name, bytes).unwrap());
        writer.finish().unwrap();
        ModelFiles::open(dir.path()).unwrap().linear(MODULE, ROWS, COLS, false)
    }
}

#[test]
fn native_outliers_are_added_to_the_codes_and_stored_again() {
    let twin = WithOutliers::default();
    let layer = twin.read().unwrap();
    let Weight::Quantized(q) = &layer.weight else { panic!("no codes") };
    let mut values = q.dequantize().unwrap();
    layer.transforms.fold(&mut values, ROWS, COLS);
    for (row, values) in values.chunks_exact(COLS).enumerate() {
        for (column, value) in values.iter().enumerate() {
            // Code 9 means 1, the zero point is -1, the scale a half.
            let outlier = if column == row || column == 63 { 1.5 } else { 0.0 };
            assert_eq!(*value, 1.0 + outlier, "[{row}, {column}]");
        }
    }
    let stored = native::CONTAINER.store(MODULE, &layer).unwrap();
    assert_eq!(stored, twin.tensors());
    for container in Container::all() {
        assert_eq!(container.store(MODULE, &layer).is_ok(), container == native::CONTAINER, "{container:?}");
    }
}

#[test]
fn native_outliers_that_fit_no_weight_are_refused() {
    let good = WithOutliers::default;
    let mut past = good();
    past.columns[3] = COLS as u16;
    let mut back = good();
    back.columns.swap(4, 5);
    let mut twice = good();
    twice.columns[0] = 63;
    let rotated = json!({"quant_method": "mantissa", "format": "native", "input_rotations": {MODULE: 32}});
    for (damaged, says) in [
        (past, "columns below 64"),
        (back, "columns of row 2 that do not ascend"),
        (twice, "columns of row 0 that do not ascend"),
        (WithOutliers { counts: vec![1; ROWS], ..good() }, "sparse part"),
        (WithOutliers { counts: vec![u16::MAX; ROWS], ..good() }, "sparse part"),
        (WithOutliers { counts: vec![2; ROWS - 1], ..good() }, "outlier_counts"),
        // A NaN.
        (WithOutliers { value: 0x7e00, ..good() }, "outlier_values"),
        (WithOutliers { without: "outlier_counts", ..good() }, "outlier_counts"),
        (WithOutliers { without: "outlier_columns", ..good() }, "outlier_columns"),
        (WithOutliers { without: "outlier_values", ..good() }, "outlier_values"),
        (WithOutliers { config: rotated, ..good() }, "outliers and a rotation"),
    ] {
        let error = damaged.read().expect_err(says);
        let text = error.to_string();
        assert_eq!((error.class(), text.lines().count()), (ErrorClass::Input, 1), "{text}");
        assert!(text.contains(says) && text.contains(MODULE), "{says}: {text}");
    }
}
