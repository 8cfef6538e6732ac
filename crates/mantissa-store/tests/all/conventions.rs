//! Modules packed by a script (`tests/data/make_conventions.py`), with their weights, which each reader must return.
use std::path::{Path, PathBuf};

use mantissa_num::minifloat::F16;
use mantissa_store::convention::{LinearWeight, ModelFiles, Weight, exl2};
use mantissa_store::{Error, ErrorClass};

const MODULE: &str = "model.layers.0.mlp.up_proj";

fn data() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/conventions")
}

/// Rows and columns of the weight, from the file's metadata.
fn shape(files: &ModelFiles) -> (usize, usize) {
    let (file, _) = files.checkpoint().locate("expected").unwrap();
    let text = file.metadata().get("shape").unwrap();
    let (rows, cols) = text.strip_prefix('[').unwrap().strip_suffix(']').unwrap().split_once(", ").unwrap();
    (rows.parse().unwrap(), cols.parse().unwrap())
}

fn open(dir: &Path) -> Result<(ModelFiles, LinearWeight), Error> {
    let files = ModelFiles::open(dir)?;
    let (rows, cols) = shape(&files);
    let linear = files.linear(MODULE, rows, cols, false)?;
    Ok((files, linear))
}

/// Weight that the layer multiplies with.
fn values(linear: &LinearWeight) -> Vec<f32> {
    let mut w = match &linear.weight {
        Weight::Quantized(q) => q.dequantize().unwrap(),
        Weight::F32(w) => w.clone(),
        Weight::F16(w) => w.iter().map(|&v| F16.decode(v.into())).collect(),
        _ => panic!("another storage"),
    };
    linear.transforms.check(linear.rows, linear.cols).unwrap();
    linear.transforms.fold(&mut w, linear.rows, linear.cols);
    w
}

#[test]
fn every_layout_decodes_to_its_expected_weight() {
    let mut seen = 0;
    for entry in std::fs::read_dir(data()).unwrap() {
        let dir = entry.unwrap().path();
        let name = dir.file_name().unwrap().to_str().unwrap().to_owned();
        let (files, linear) = open(&dir).unwrap_or_else(|e| panic!("{name}: {e}"));
        let w = values(&linear);
        let rows = files.checkpoint().read("expected_rows").unwrap();
        let rows = rows.as_chunks::<4>().0.iter().map(|b| i32::from_le_bytes(*b) as usize);
        let expected = files.checkpoint().read_f32("expected").unwrap();
        let largest = expected.iter().fold(0f32, |a, v| a.max(v.abs()));
        for (row, expected) in rows.zip(expected.chunks_exact(linear.cols)) {
            for (col, (found, expected)) in w[row * linear.cols..].iter().zip(expected).enumerate() {
                // Two rotations in f32 and products with a float zero point add small errors; everything else is
                // exact up to one rounding.
                let inexact = name.starts_with("exl3") || name.starts_with("hqq");
                let allowed = if inexact { 2e-6 * largest } else { 1e-7 * largest };
                assert!((found - expected).abs() <= allowed, "{name} [{row}, {col}]: {found} for {expected}");
            }
        }
        assert_eq!(
            files.notes().len(),
            usize::from(name.contains("labelled")),
            "{name}: {:?}",
            files.notes()
        );
        assert!(name.starts_with(files.convention_name()), "{name}");
        seen += 1;
    }
    assert_eq!(seen, 33);
}

/// A copy of a folder whose weight file can be damaged.
struct Copy {
    dir: tempfile::TempDir,
    good: Vec<u8>,
}

impl Copy {
    fn of(name: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let from = data().join(name);
        for entry in std::fs::read_dir(&from).unwrap().map(Result::unwrap) {
            if entry.path().extension().is_some_and(|extension| extension == "json") {
                std::fs::copy(entry.path(), dir.path().join(entry.file_name())).unwrap();
            }
        }
        let good = std::fs::read(from.join("model.safetensors")).unwrap();
        Copy { dir, good }
    }

    /// Reads with `bytes` in place of the file; the error, if there is one, is the file's.
    fn read(&self, bytes: &[u8], rows: usize, cols: usize) -> Option<String> {
        std::fs::write(self.dir.path().join("model.safetensors"), bytes).unwrap();
        let read = ModelFiles::open(self.dir.path()).and_then(|f| f.linear(MODULE, rows, cols, false));
        match read {
            Ok(linear) => {
                values(&linear);
                None
            }
            Err(error) => {
                let text = error.to_string();
                assert_eq!((error.class(), text.lines().count()), (ErrorClass::Input, 1), "{text}");
                Some(text)
            }
        }
    }

    /// File with `from` in its header replaced by `to` of the same length.
    fn header(&self, from: &str, to: &str) -> Vec<u8> {
        assert_eq!(from.len(), to.len());
        let at = self.good.windows(from.len()).position(|w| w == from.as_bytes()).expect(from);
        let mut bytes = self.good.clone();
        bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
        bytes
    }

    /// File with bytes of a tensor replaced.
    fn tensor(&self, suffix: &str, at: usize, bytes: &[u8]) -> Vec<u8> {
        let files = ModelFiles::open(&self.dir.path().join("good")).unwrap();
        let (_, meta) = files.checkpoint().locate(&format!("{MODULE}.{suffix}")).unwrap();
        let start = usize::try_from(meta.offset).unwrap() + at;
        let mut out = self.good.clone();
        out[start..start + bytes.len()].copy_from_slice(bytes);
        out
    }

    fn keep_good(self) -> Self {
        let good = self.dir.path().join("good");
        std::fs::create_dir(&good).unwrap();
        for entry in std::fs::read_dir(self.dir.path()).unwrap().map(Result::unwrap) {
            if entry.path().is_file() {
                std::fs::copy(entry.path(), good.join(entry.file_name())).unwrap();
            }
        }
        std::fs::write(good.join("model.safetensors"), &self.good).unwrap();
        self
    }
}

#[test]
fn broken_exl2_is_refused_by_name() {
    let copy = Copy::of("exl2").keep_good();
    assert_eq!(copy.read(&copy.good, 62, 240), None);
    let words = |values: &[i16]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
    for (suffix, at, bytes) in [
        ("q_groups", 0, words(&[7])),
        ("q_groups", 0, words(&[0])),
        ("q_groups", 0, words(&[-8])),
        ("q_groups", 2, words(&[1])),
        ("q_groups", 6, words(&[0])),
        ("q_groups", 6, words(&[1000])),
        ("q_groups", 6, words(&[-1])),
        ("q_groups", 4, words(&[2])),
        ("q_groups", 20, words(&[8])),
        ("q_invperm", 0, (-1i32).to_le_bytes().to_vec()),
        ("q_invperm", 0, 240i32.to_le_bytes().to_vec()),
        ("q_invperm", 0, vec![0; 8]),
        ("q_scale_max", 2, vec![0x00, 0x7c]),
        ("q_scale_max", 4, vec![0x00, 0x7e]),
    ] {
        let text = copy.read(&copy.tensor(suffix, at, &bytes), 62, 240).expect(suffix);
        assert!(text.contains(suffix), "{suffix} {at} {bytes:?}: {text}");
    }
    for (from, to) in [
        ("q_weight", "q_wEight"),
        ("q_scale\"", "q_scAle\""),
        ("q_scale_max", "q_scale_mAx"),
        ("q_groups", "q_grOups"),
        ("[33,64]", "[64,33]"),
        ("[6,8]", "[8,6]"),
        ("\"F16\",\"shape\":[6]", "\"I16\",\"shape\":[6]"),
        ("\"I16\",\"shape\":[12]", "\"F16\",\"shape\":[12]"),
        ("\"I32\",\"shape\":[240]", "\"F32\",\"shape\":[240]"),
    ] {
        assert!(copy.read(&copy.header(from, to), 62, 240).is_some(), "{from}");
    }
    for (rows, cols) in [(64, 208), (62, 272), (94, 240), (30, 240), (62, 32), (1, 1), (62, 239), (62, 241)] {
        assert!(copy.read(&copy.good, rows, cols).is_some(), "{rows} {cols}");
    }
}

/// Groups of every width, with reordered columns: the same tensors, except for the padding of scales.
#[test]
fn exl2_is_written_back_identically() {
    let dir = data().join("exl2");
    let (files, linear) = open(&dir).unwrap();
    let tensors = exl2::CONTAINER.store(MODULE, &linear).unwrap();
    for (spec, bytes) in &tensors {
        let meta = files.checkpoint().get(&spec.name).unwrap();
        assert_eq!((meta.dtype, &meta.shape), (spec.dtype, &spec.shape), "{}", spec.name);
        let theirs = files.checkpoint().read(&spec.name).unwrap();
        // 62 rows: the last two fields of each eighth word are padding.
        let padded = |at: usize| spec.name.ends_with("q_scale") && at % 32 == 31;
        let same = bytes.iter().zip(&theirs).enumerate().all(|(at, (a, b))| padded(at) || a == b);
        assert!(same && bytes.len() == theirs.len(), "{}", spec.name);
    }
    assert_eq!(tensors.len(), 5);
}

#[test]
fn broken_exl3_is_refused_by_name() {
    let copy = Copy::of("exl3-mcg").keep_good();
    assert_eq!(copy.read(&copy.good, 128, 256), None);
    for (suffix, at, bytes) in [
        ("suh", 0, vec![0x00, 0x7c]),
        ("suh", 510, vec![0x01, 0xfe]),
        ("svh", 0, vec![0x00, 0xfc]),
        ("svh", 254, vec![0x00, 0x7e]),
        ("mcg", 0, vec![0]),
        ("mcg", 3, vec![0]),
    ] {
        let text = copy.read(&copy.tensor(suffix, at, &bytes), 128, 256).expect(suffix);
        assert!(text.contains(suffix), "{suffix}: {text}");
    }
    for (from, to) in [
        ("suh\"", "sUh\""),
        ("svh\"", "sVh\""),
        ("[16,8,48]", "[8,16,48]"),
        ("[16,8,48]", "[48,8,16]"),
        ("[16,8,48]", "[16,48,8]"),
        ("\"I16\"", "\"F16\""),
        ("\"F16\",\"shape\":[256]", "\"I16\",\"shape\":[256]"),
        ("\"F16\",\"shape\":[128]", "\"I16\",\"shape\":[128]"),
        ("trellis", "trEllis"),
    ] {
        assert!(copy.read(&copy.header(from, to), 128, 256).is_some(), "{from}");
    }
    for (rows, cols) in
        [(256, 128), (128, 128), (128, 384), (120, 256), (128, 250), (1, 1), (64, 512), (16, 16), (384, 256)]
    {
        assert!(copy.read(&copy.good, rows, cols).is_some(), "{rows} {cols}");
    }
}

#[test]
fn broken_hqq_is_refused_by_name() {
    let copy = Copy::of("hqq-int3").keep_good();
    assert_eq!(copy.read(&copy.good, 32, 96), None);
    let i32s = |value: i32| value.to_le_bytes().to_vec();
    for (suffix, at, bytes) in [
        ("nbits", 0, i32s(4)),
        ("nbits", 0, i32s(-3)),
        ("axis", 0, i32s(2)),
        ("axis", 0, i32s(-1)),
        ("axis", 0, i32s(0)),
        ("group_size", 0, i32s(0)),
        ("group_size", 0, i32s(-32)),
        ("group_size", 0, i32s(31)),
        ("group_size", 0, i32s(64)),
        ("shape", 0, vec![33]),
        ("shape", 7, vec![0x80]),
        ("packing", 0, b"5".to_vec()),
        ("packing", 0, b"4bit_u8".to_vec()),
        ("packing", 1, vec![0xff]),
        ("quant_zero", 0, vec![1]),
        ("quant_scale", 0, vec![1]),
        ("view_as_float", 0, vec![1]),
        ("scale", 0, f32::NAN.to_le_bytes().to_vec()),
        ("scale", 8, f32::INFINITY.to_le_bytes().to_vec()),
        ("scale", 4, f32::MAX.to_le_bytes().to_vec()),
        ("zero", 0, f32::NAN.to_le_bytes().to_vec()),
    ] {
        assert!(copy.read(&copy.tensor(suffix, at, &bytes), 32, 96).is_some(), "{suffix} {at} {bytes:?}");
    }
    for (from, to) in [
        ("up_proj.scale\"", "up_proj.sCale\""),
        ("up_proj.zero\"", "up_proj.zEro\""),
        ("nbits", "nBits"),
        ("packing", "pAcking"),
        ("[10,32]", "[32,10]"),
        ("[10,32]", "[20,16]"),
        ("\"I32\",\"shape\":[10,32]", "\"F32\",\"shape\":[10,32]"),
        ("\"F32\",\"shape\":[96,1]", "\"I32\",\"shape\":[96,1]"),
    ] {
        assert!(copy.read(&copy.header(from, to), 32, 96).is_some(), "{from}");
    }
    for (rows, cols) in [(96, 32), (32, 95), (31, 96), (64, 96), (1, 1), (32, 192)] {
        assert!(copy.read(&copy.good, rows, cols).is_some(), "{rows} {cols}");
    }
}

#[test]
fn broken_quanto_is_refused_by_name() {
    let copy = Copy::of("quanto-qint4-g128").keep_good();
    assert_eq!(copy.read(&copy.good, 16, 256), None);
    for (suffix, bytes) in [
        ("weight._scale", f32::NAN),
        ("weight._scale", f32::NEG_INFINITY),
        ("weight._shift", f32::NAN),
        ("weight._shift", f32::INFINITY),
    ] {
        let text = copy.read(&copy.tensor(suffix, 4, &bytes.to_le_bytes()), 16, 256).expect(suffix);
        assert!(text.contains(suffix), "{suffix}: {text}");
    }
    for (from, to) in [
        ("weight._scale\"", "weight._sCale\""),
        ("weight._shift\"", "weight._sHift\""),
        ("weight._data._data", "weight._data._dAta"),
        ("\"U8\",\"shape\":[16,128]", "\"I8\",\"shape\":[16,128]"),
        ("[16,128]", "[128,16]"),
        ("\"F32\",\"shape\":[32,1]", "\"I32\",\"shape\":[32,1]"),
        ("[32,1]", "[1,32]"),
    ] {
        assert!(copy.read(&copy.header(from, to), 16, 256).is_some(), "{from}");
    }
    for (rows, cols) in [(256, 16), (16, 128), (32, 256), (1, 1), (0, 256), (16, 255)] {
        assert!(copy.read(&copy.good, rows, cols).is_some(), "{rows} {cols}");
    }
    let map = copy.dir.path().join("quanto_qmap.json");
    for (text, says) in [
        ("[]", "expected an object"),
        ("{", "quanto_qmap.json"),
        (r#"{"model.layers.0.mlp.up_proj": {"weights": "qint5"}}"#, "got qint5"),
        (r#"{"model.layers.0.mlp.up_proj": {"weights": "qint2"}}"#, "_data._data"),
        (r#"{"model.layers.0.mlp.up_proj": {"weights": "qint8"}}"#, "weight._data"),
        ("{}", "up_proj.weight"),
    ] {
        std::fs::write(&map, text).unwrap();
        let error = copy.read(&copy.good, 16, 256).expect(text);
        assert!(error.contains(says), "{text}: {error}");
    }
    // A request to quantize inputs is not applied, and reported.
    let text = r#"{"model.layers.0.mlp.up_proj": {"weights": "qint4", "activations": "qint8"}}"#;
    std::fs::write(&map, text).unwrap();
    let files = ModelFiles::open(copy.dir.path()).unwrap();
    assert_eq!((files.convention_name(), files.notes().len()), ("quanto", 1));
}

#[test]
fn seeded_damage_never_panics() {
    for (n, (name, rows, cols)) in [
        ("exl2", 62, 240),
        ("exl3-mul1", 128, 256),
        ("gptq-planar-int7", 32, 96),
        ("awq", 32, 96),
        ("hqq-int4", 32, 96),
        ("hqq-int3-axis0", 32, 96),
        ("quanto-qint4-g128", 16, 256),
        ("quanto-qfloat8", 32, 96),
    ]
    .into_iter()
    .enumerate()
    {
        let copy = Copy::of(name);
        for seed in 0..60u64 {
            let random = |i: u64| mantissa_num::round::random_u32(seed + 1000 * n as u64, i) as usize;
            let mut bytes = copy.good.clone();
            match seed % 3 {
                0 => bytes.truncate(random(0) % copy.good.len()),
                1 => bytes[random(1) % 600] = random(2) as u8,
                _ => (0..4).for_each(|i| bytes[random(2 * i) % copy.good.len()] ^= random(2 * i + 1) as u8),
            }
            copy.read(&bytes, rows, cols);
        }
    }
}
