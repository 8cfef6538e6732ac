//! Round trips: our reader and the reference implementation read back what the writers were given.
use std::collections::{BTreeMap, HashMap};
use std::fs;

use mantissa_store::error::WriteFault;
use mantissa_store::{
    Checkpoint, Dtype, Error, FileDigest, SafeTensors, SafetensorsWriter, ShardPlan, ShardedWriter,
    TensorSpec,
};
use proptest::prelude::*;

/// A tensor and its bytes.
type Tensor = (TensorSpec, Vec<u8>);

fn tensors() -> impl Strategy<Value = Vec<Tensor>> {
    let dtype = prop::sample::select(Dtype::ALL.to_vec());
    let shape = prop::collection::vec(0_usize..5, 0..4);
    // Sub-byte dtypes need whole bytes: a last dimension of 4 gives them.
    let spec = (any::<String>(), dtype, shape).prop_map(|(name, dtype, mut shape)| {
        if dtype.bits() < 8 {
            shape.push(4);
        }
        TensorSpec { name, dtype, shape }
    });
    prop::collection::vec((spec, any::<u8>()), 0..8).prop_map(|specs| {
        let unique: BTreeMap<String, Tensor> = specs
            .into_iter()
            .filter(|(spec, _)| spec.name != "__metadata__")
            .map(|(spec, seed)| (spec.name.clone(), (bytes_of(&spec, seed), spec)))
            .map(|(name, (bytes, spec))| (name, (spec, bytes)))
            .collect();
        unique.into_values().collect()
    })
}

fn bytes_of(spec: &TensorSpec, seed: u8) -> Vec<u8> {
    let bits = spec.shape.iter().product::<usize>() * spec.dtype.bits() as usize;
    (0..bits / 8).map(|i| (i as u8).wrapping_mul(37).wrapping_add(seed)).collect()
}

fn write_one(path: &std::path::Path, tensors: &[Tensor], metadata: &BTreeMap<String, String>) -> FileDigest {
    let specs = tensors.iter().map(|(spec, _)| spec.clone()).collect();
    let mut writer = SafetensorsWriter::create(path, specs, metadata.clone()).unwrap();
    for (spec, bytes) in tensors.iter().rev() {
        writer.write(&spec.name, bytes).unwrap();
    }
    writer.finish().unwrap()
}

fn reference_dtype(dtype: Dtype) -> safetensors::Dtype {
    serde_json::from_value(dtype.name().into()).expect("the reference implementation knows every dtype")
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn one_file(tensors in tensors(), note in prop::option::of(any::<String>())) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.safetensors");
        let metadata: BTreeMap<String, String> = note.into_iter().map(|v| ("note".to_owned(), v)).collect();
        let digest = write_one(&path, &tensors, &metadata);
        let on_disk = fs::read(&path).unwrap();
        prop_assert_eq!(digest, FileDigest::of(&on_disk));

        let ours = SafeTensors::open(&path).unwrap();
        prop_assert_eq!(ours.metadata(), &metadata);
        prop_assert_eq!(ours.tensors().len(), tensors.len());
        for (spec, bytes) in &tensors {
            let meta = ours.get(&spec.name).unwrap();
            prop_assert_eq!((meta.dtype, &meta.shape), (spec.dtype, &spec.shape));
            prop_assert_eq!(&ours.read(meta).unwrap(), bytes);
        }
        prop_assert!(ours.tensors().windows(2).all(|w| w[0].offset + w[0].len == w[1].offset));

        // Byte for byte what the reference implementation writes.
        let views: Vec<_> = tensors
            .iter()
            .map(|(spec, bytes)| {
                let view = safetensors::tensor::TensorView::new(reference_dtype(spec.dtype), spec.shape.clone(), bytes);
                (spec.name.clone(), view.unwrap())
            })
            .collect();
        let metadata: HashMap<_, _> = metadata.into_iter().collect();
        let metadata = (!metadata.is_empty()).then_some(metadata);
        prop_assert_eq!(safetensors::serialize(views, metadata).unwrap(), on_disk);
    }

    #[test]
    fn several_files_in_pieces(tensors in tensors(), max in 1_u64..200, piece in 1_usize..50) {
        let dir = tempfile::tempdir().unwrap();
        let specs = tensors.iter().map(|(spec, _)| spec.clone()).collect();
        let plan = ShardPlan::new(specs, max).unwrap();
        let files = plan.shards().len();
        let mut writer = ShardedWriter::new(dir.path(), plan, BTreeMap::new());
        for (spec, bytes) in tensors.iter().rev() {
            for (i, part) in bytes.chunks(piece).enumerate() {
                writer.write_range(&spec.name, (i * piece) as u64, part).unwrap();
            }
        }
        let digests = writer.finish().unwrap();
        prop_assert_eq!(digests.len(), if files == 1 { 1 } else { files + 1 });
        for (name, digest) in &digests {
            prop_assert_eq!(*digest, FileDigest::of(&fs::read(dir.path().join(name)).unwrap()));
        }
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        prop_assert_eq!(checkpoint.warnings(), &[] as &[String]);
        prop_assert_eq!(checkpoint.files().count(), files);
        prop_assert_eq!(checkpoint.tensors().count(), tensors.len());
        for (spec, bytes) in &tensors {
            prop_assert_eq!(&checkpoint.read(&spec.name).unwrap(), bytes);
        }
    }

    /// Damage anywhere gives an error or a file whose tensors can all be read; never a panic.
    #[test]
    fn damaged_headers(tensors in tensors(), flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4)) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.safetensors");
        write_one(&path, &tensors, &BTreeMap::new());
        let mut bytes = fs::read(&path).unwrap();
        for (index, value) in flips {
            let at = index.index(bytes.len());
            bytes[at] = value;
        }
        fs::write(&path, &bytes).unwrap();
        if let Ok(opened) = SafeTensors::open(&path) {
            for meta in opened.tensors() {
                prop_assert_eq!(opened.read(meta).unwrap().len() as u64, meta.len);
            }
        }
    }
}

fn writer_of_two(dir: &std::path::Path) -> SafetensorsWriter {
    let specs = vec![TensorSpec::new("a", Dtype::U8, [4]), TensorSpec::new("b", Dtype::F32, [1])];
    SafetensorsWriter::create(&dir.join("m.safetensors"), specs, BTreeMap::new()).unwrap()
}

#[track_caller]
fn write_fault<T: std::fmt::Debug>(result: Result<T, Error>) -> WriteFault {
    match result.unwrap_err() {
        Error::Write { fault, .. } => fault,
        other => panic!("{other}"),
    }
}

#[test]
fn misuse_of_a_writer_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let mut writer = writer_of_two(dir.path());
    assert_eq!(write_fault(writer.write("c", &[])), WriteFault::Unknown);
    assert!(matches!(write_fault(writer.write("a", &[0; 3])), WriteFault::Length { .. }));
    assert!(matches!(write_fault(writer.write_range("a", 2, &[0; 3])), WriteFault::Length { .. }));
    assert!(matches!(write_fault(writer.write_range("a", u64::MAX, &[0; 3])), WriteFault::Length { .. }));
    writer.write_range("a", 1, &[7; 2]).unwrap();
    assert_eq!(write_fault(writer.write("a", &[0; 4])), WriteFault::Twice { offset: 1 });
    writer.write("b", &[0; 4]).unwrap();
    assert_eq!(writer.remaining(), 2);
    let error = writer.finish().unwrap_err();
    assert!(error.to_string().contains("tensor \"a\": expected 4 bytes written, got 2"), "{error}");
}

#[test]
fn bad_specs_are_refused_before_a_file_exists() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.safetensors");
    let create = |specs| SafetensorsWriter::create(&path, specs, BTreeMap::new());
    let a = |dtype, shape: &[usize]| TensorSpec::new("a", dtype, shape);
    assert_eq!(write_fault(create(vec![a(Dtype::U8, &[1]), a(Dtype::F32, &[1])])), WriteFault::Duplicate);
    let reserved = TensorSpec::new("__metadata__", Dtype::U8, [1]);
    assert_eq!(write_fault(create(vec![reserved])), WriteFault::Reserved);
    assert!(matches!(write_fault(create(vec![a(Dtype::F4, &[3])])), WriteFault::Size { .. }));
    assert!(matches!(write_fault(create(vec![a(Dtype::U8, &[usize::MAX])])), WriteFault::Size { .. }));
    assert!(!path.exists());
    fs::write(&path, "precious").unwrap();
    let error = create(vec![]).unwrap_err();
    assert!(matches!(error, Error::Io { operation: "create", .. }), "{error}");
    assert_eq!(fs::read_to_string(&path).unwrap(), "precious");
}

#[test]
fn a_sharded_writer_names_missing_tensors() {
    let dir = tempfile::tempdir().unwrap();
    let specs = vec![TensorSpec::new("a", Dtype::U8, [4]), TensorSpec::new("b", Dtype::U8, [4])];
    let plan = ShardPlan::new(specs, 4).unwrap();
    let mut writer = ShardedWriter::new(dir.path(), plan, BTreeMap::new());
    writer.write("a", &[1; 4]).unwrap();
    assert_eq!(write_fault(writer.write("a", &[1; 4])), WriteFault::Twice { offset: 0 });
    assert_eq!(write_fault(writer.write("c", &[1; 4])), WriteFault::Unknown);
    assert_eq!(write_fault(writer.finish()), WriteFault::Incomplete { written: 0, size: 4 });
}

#[test]
fn floats_widen() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.safetensors");
    let values = [1.5_f32, -0.0, 65504.0, 2.0_f32.powi(-24), f32::INFINITY];
    let half: Vec<u8> = values.iter().flat_map(|&v| half::f16::from_f32(v).to_le_bytes()).collect();
    let brain: Vec<u8> = values.iter().flat_map(|&v| half::bf16::from_f32(v).to_le_bytes()).collect();
    // More than one panel, so that the seams are covered.
    let long: Vec<f32> = (0..150_001).map(|i| i as f32).collect();
    let long_bytes: Vec<u8> = long.iter().flat_map(|v| v.to_le_bytes()).collect();
    let double = [1.0_f64 + 2.0_f64.powi(-25), 1e300].map(f64::to_le_bytes).concat();
    let tensors = [
        (TensorSpec::new("f16", Dtype::F16, [5]), half),
        (TensorSpec::new("bf16", Dtype::BF16, [5]), brain),
        (TensorSpec::new("f32", Dtype::F32, [150_001]), long_bytes),
        (TensorSpec::new("f64", Dtype::F64, [2]), double),
        (TensorSpec::new("i8", Dtype::I8, [1]), vec![1]),
        (TensorSpec::new("empty", Dtype::BF16, [0, 7]), vec![]),
    ];
    write_one(&path, &tensors, &BTreeMap::new());
    let read = |name: &str| Checkpoint::open(&path).unwrap().read_f32(name);
    assert_eq!(read("f16").unwrap(), values);
    assert_eq!(read("bf16").unwrap(), values.map(|v| half::bf16::from_f32(v).to_f32()));
    assert_eq!(read("f32").unwrap(), long);
    assert_eq!(read("f64").unwrap(), [1.0, f32::INFINITY]);
    assert!(read("empty").unwrap().is_empty());
    let error = read("i8").unwrap_err();
    assert!(matches!(error, Error::NotFloat { dtype: Dtype::I8, .. }), "{error}");
    assert!(matches!(read("none").unwrap_err(), Error::NoTensor { .. }));
}
