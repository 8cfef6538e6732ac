//! Corruptions of GGUF: metadata, tensors and bytes of one file.

use std::path::Path;

use mantissa_num::round::random_u32;
use mantissa_store::gguf::{GgmlType, Gguf, GgufTensorSpec, GgufWriter, Value};

use crate::Expect;

pub struct Case {
    pub what: String,
    pub bytes: Vec<u8>,
    pub expect: Expect,
}

/// Parts of a file, possibly inconsistent.
#[derive(Clone)]
struct Parts {
    metadata: Vec<(String, Value)>,
    tensors: Vec<(GgufTensorSpec, Vec<u8>)>,
}

impl Parts {
    fn read(path: &Path) -> Self {
        let file = Gguf::open(path).unwrap();
        let metadata = file.metadata().iter().map(|(key, value)| (key.to_owned(), value.clone())).collect();
        let tensor = |t: &mantissa_store::gguf::GgufTensor| {
            (GgufTensorSpec::new(&t.name, t.ty, t.shape.clone()), file.read(t).unwrap())
        };
        Parts { metadata, tensors: file.tensors().iter().map(tensor).collect() }
    }

    /// Returns the file, if its tensors have a defined size.
    fn bytes(&self, path: &Path) -> Option<Vec<u8>> {
        let _ = std::fs::remove_file(path);
        let specs: Vec<_> = self.tensors.iter().map(|(spec, _)| spec.clone()).collect();
        let mut writer = GgufWriter::create(path, &self.metadata, &specs).ok()?;
        for (spec, bytes) in &self.tensors {
            let len = spec.byte_len()? as usize;
            let bytes: Vec<u8> = bytes.iter().copied().cycle().take(len).collect();
            writer.write(&spec.name, &bytes).ok()?;
        }
        writer.finish().ok()?;
        std::fs::read(path).ok()
    }
}

/// Keys that a model needs.
const REQUIRED: [&str; 5] = [
    "general.architecture",
    ".block_count",
    ".embedding_length",
    ".feed_forward_length",
    ".attention.head_count",
];

/// Returns all corruptions of a small model; `path` is used to write them.
pub fn cases(path: &Path) -> Vec<Case> {
    let seed = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds/gguf/model.gguf");
    let good = std::fs::read(&seed).unwrap();
    let parts = Parts::read(&seed);
    let mut all = Vec::new();
    let mut push = |what: String, expect, parts: &Parts| {
        all.extend(parts.bytes(path).map(|bytes| Case { what, bytes, expect }));
    };
    for (i, (key, value)) in parts.metadata.iter().enumerate() {
        let required = REQUIRED.iter().any(|suffix| key.ends_with(suffix));
        let expect = if required { Expect::Error } else { Expect::Either };
        let mut without = parts.clone();
        without.metadata.remove(i);
        push(format!("{key}: missing"), expect, &without);
        for odd in [
            Value::String("x".to_owned()),
            Value::U32(0),
            Value::I32(-1),
            Value::U64(1 << 40),
            Value::F32(f32::NAN),
        ] {
            let mut changed = parts.clone();
            // Any name is valid, so another architecture's name is refused only by its tensors.
            let same = value.value_type() == odd.value_type() && key != "general.architecture";
            changed.metadata[i].1 = odd.clone();
            let zero = matches!(odd, Value::U32(0));
            push(format!("{key} = {odd:?}"), if same && !zero { Expect::Either } else { expect }, &changed);
        }
    }
    for (i, (spec, _)) in parts.tensors.iter().enumerate() {
        let mut changed = parts.clone();
        changed.tensors.remove(i);
        push(format!("{}: missing", spec.name), Expect::Error, &changed);
        let mut changed = parts.clone();
        changed.tensors[i].0.name += "s";
        push(format!("{}: renamed", spec.name), Expect::Error, &changed);
        for shape in [
            vec![0; spec.shape.len()],
            [&[1], &spec.shape[..]].concat(),
            spec.shape.iter().map(|n| 2 * n).collect(),
        ] {
            let mut changed = parts.clone();
            changed.tensors[i].0.shape = shape.clone();
            push(format!("{}: shape {shape:?}", spec.name), Expect::Error, &changed);
        }
        for ty in [
            GgmlType::F16,
            GgmlType::BF16,
            GgmlType::Q8_0,
            GgmlType::Q4_0,
            GgmlType::IQ2_XXS,
            GgmlType::MXFP4,
        ] {
            let mut changed = parts.clone();
            changed.tensors[i].0.ty = ty;
            push(format!("{}: as {}", spec.name, ty.name), Expect::NotNumbers, &changed);
        }
        for (what, byte) in [("ones", 0xff), ("NaN of f16", 0x7e), ("zeros", 0)] {
            let mut changed = parts.clone();
            changed.tensors[i].1.fill(byte);
            push(format!("{}: {what}", spec.name), Expect::NotNumbers, &changed);
        }
    }
    let cut = |len: usize| Case {
        what: format!("file of {len} bytes"),
        bytes: good[..len].to_vec(),
        expect: Expect::Error,
    };
    all.extend((0..40).map(|i| cut(i * good.len() / 40)));
    all.extend((0..300).map(|seed| {
        let mut bytes = good.clone();
        for i in 0..1 + random_u32(seed, 0) % 3 {
            let at = random_u32(seed, 1 + 2 * u64::from(i)) as usize % bytes.len();
            bytes[at] ^= 1 << (random_u32(seed, 2 + 2 * u64::from(i)) % 8);
        }
        Case { what: format!("bits flipped, seed {seed}"), bytes, expect: Expect::NotNumbers }
    }));
    all
}
