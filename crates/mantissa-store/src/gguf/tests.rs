//! GGUF files as byte literals: one per fault, with accepted counterparts.

use std::path::Path;

use super::*;
use crate::error::Error;
use crate::error::gguf_fault::TensorFault;

/// File assembled by hand, so that each part can be wrong on its own.
#[derive(Clone)]
struct File {
    head: Vec<u8>,
    pairs: Vec<Vec<u8>>,
    infos: Vec<Vec<u8>>,
    data: usize,
}

impl File {
    fn new() -> Self {
        File { head: b"GGUF\x03\0\0\0".to_vec(), pairs: Vec::new(), infos: Vec::new(), data: 128 }
    }

    fn pair(mut self, key: &str, ty: u32, value: &[u8]) -> Self {
        self.pairs.push([&string(key)[..], &ty.to_le_bytes(), value].concat());
        self
    }

    fn tensor(mut self, name: &str, dims: &[u64], ty: u32, offset: u64) -> Self {
        let mut info = string(name);
        info.extend((dims.len() as u32).to_le_bytes());
        dims.iter().for_each(|dim| info.extend(dim.to_le_bytes()));
        info.extend(ty.to_le_bytes());
        info.extend(offset.to_le_bytes());
        self.infos.push(info);
        self
    }

    fn bytes(&self) -> Vec<u8> {
        self.bytes_counted(self.infos.len() as u64, self.pairs.len() as u64)
    }

    fn bytes_counted(&self, tensors: u64, pairs: u64) -> Vec<u8> {
        let mut out = self.head.clone();
        out.extend(tensors.to_le_bytes());
        out.extend(pairs.to_le_bytes());
        self.pairs.iter().chain(&self.infos).for_each(|part| out.extend(part));
        out.resize(out.len().next_multiple_of(32) + self.data, 0);
        out
    }

    fn parse(&self) -> Result<GgufHeader> {
        parse(&self.bytes())
    }

    fn fault(&self) -> GgufFault {
        fault(&self.bytes())
    }

    fn tensor_fault(&self) -> TensorFault {
        match self.fault() {
            GgufFault::Tensor { fault, .. } => fault,
            other => panic!("{other}"),
        }
    }
}

fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}

fn parse(bytes: &[u8]) -> Result<GgufHeader> {
    GgufHeader::parse(Path::new("m.gguf"), bytes)
}

fn fault(bytes: &[u8]) -> GgufFault {
    match parse(bytes) {
        Err(Error::Gguf { fault, .. }) => *fault,
        other => panic!("{other:?}"),
    }
}

const F32: u32 = 0;
const Q4_0: u32 = 2;

#[test]
fn a_small_file_is_read() {
    let array =
        [&5u32.to_le_bytes()[..], &2u64.to_le_bytes(), &1i32.to_le_bytes(), &(-1i32).to_le_bytes()].concat();
    let file = File::new().pair("general.architecture", 8, &string("llama")).pair("a", 9, &array).tensor(
        "t",
        &[32, 1],
        F32,
        0,
    );
    let header = file.parse().unwrap();
    assert_eq!((header.version, header.alignment), (3, 32));
    assert_eq!(header.metadata.text("general.architecture").unwrap(), Some("llama"));
    let expected = Value::Array(ValueType::I32, vec![Value::I32(1), Value::I32(-1)]);
    assert_eq!(header.metadata.get("a"), Some(&expected));
    let tensor = header.get("t").unwrap();
    assert_eq!((&tensor.shape[..], tensor.len, tensor.offset % 32), (&[1, 32][..], 128, 0));
    assert_eq!(header.tensors.len(), 1);
}

#[test]
fn magic_and_version_have_their_own_errors() {
    let with = |head: &[u8]| File { head: head.to_vec(), ..File::new() };
    assert_eq!(with(b"GGUX\x03\0\0\0").fault(), GgufFault::Magic { found: *b"GGUX" });
    assert_eq!(with(b"FUGG\x03\0\0\0").fault(), GgufFault::SwappedMagic);
    assert_eq!(with(b"GGUF\0\0\0\x03").fault(), GgufFault::BigEndian { version: 3 });
    assert_eq!(with(b"GGUF\0\0\0\0").fault(), GgufFault::VersionZero);
    assert_eq!(with(b"GGUF\x01\0\0\0").fault(), GgufFault::VersionOne);
    assert_eq!(with(b"GGUF\x04\0\0\0").fault(), GgufFault::FutureVersion { found: 4 });
    assert_eq!(with(b"GGUF\x02\0\0\0").parse().unwrap().version, 2);
}

#[test]
fn files_cut_anywhere_before_the_data_are_errors() {
    let file = File::new().pair("k", 8, &string("v")).tensor("t", &[32], F32, 0);
    let bytes = file.bytes();
    for end in 0..bytes.len() {
        assert!(matches!(parse(&bytes[..end]), Err(Error::Gguf { .. })), "cut at {end}");
    }
    assert!(parse(&bytes).is_ok());
    let truncated = |end: usize| matches!(fault(&bytes[..end]), GgufFault::Truncated { .. });
    assert!(truncated(0) && truncated(3) && truncated(7) && truncated(15));
    let last = fault(&bytes[..bytes.len() - 1]);
    assert!(matches!(last, GgufFault::Tensor { fault: TensorFault::PastEnd { .. }, .. }), "{last}");
}

#[test]
fn counts_are_checked_against_the_remaining_bytes() {
    let file = File::new().tensor("t", &[32], F32, 0);
    for count in [u64::MAX, 1 << 63, 1 << 32, 100] {
        let tensors = fault(&file.bytes_counted(count, 0));
        assert!(matches!(&tensors, GgufFault::Count { field, .. } if field == "tensor count"), "{tensors}");
        let pairs = fault(&file.bytes_counted(1, count));
        assert!(matches!(&pairs, GgufFault::Count { field, .. } if field == "key count"), "{pairs}");
    }
}

#[test]
fn lengths_are_checked_against_the_remaining_bytes() {
    for len in [1u64 << 63, u64::MAX, 1 << 40, 4096] {
        let key = File { pairs: vec![len.to_le_bytes().to_vec()], ..File::new() };
        assert!(matches!(key.fault(), GgufFault::Count { .. }));
        let value = File::new().pair("k", 8, &len.to_le_bytes());
        assert!(matches!(value.fault(), GgufFault::Count { .. }));
    }
    for ty in 0..13u32 {
        for len in [1u64 << 62, u64::MAX, 1 << 33] {
            let array = [&ty.to_le_bytes()[..], &len.to_le_bytes()].concat();
            let fault = File::new().pair("k", 9, &array).fault();
            assert!(matches!(fault, GgufFault::Count { .. }), "{ty} {len}: {fault}");
        }
    }
}

#[test]
fn nesting_is_limited_and_cheap() {
    let nested = |depth: usize| {
        let level = [&9u32.to_le_bytes()[..], &1u64.to_le_bytes()].concat();
        let inner = [&0u32.to_le_bytes()[..], &1u64.to_le_bytes(), &[7]].concat();
        File::new().pair("k", 9, &[level.repeat(depth - 1), inner].concat())
    };
    assert!(nested(MAX_ARRAY_DEPTH).parse().is_ok());
    for depth in [MAX_ARRAY_DEPTH + 1, 100_000] {
        assert_eq!(nested(depth).fault(), GgufFault::Depth { key: "k".into(), allowed: MAX_ARRAY_DEPTH });
    }
}

#[test]
fn many_empty_strings_are_charged() {
    let strings = |count: u64| {
        let array = [&8u32.to_le_bytes()[..], &count.to_le_bytes()].concat();
        File { data: count as usize * 8, ..File::new().pair("k", 9, &array) }
    };
    assert_eq!(
        strings(400_000).parse().unwrap().metadata.get("k").unwrap().as_array().unwrap().len(),
        400_000
    );
    // 2^24 values are 512 MiB before the strings in them are counted.
    assert!(matches!(strings(1 << 24).fault(), GgufFault::Budget { .. }));
}

#[test]
fn values_of_no_or_the_wrong_type_name_their_key() {
    assert_eq!(File::new().pair("k", 7, &[7]).fault(), GgufFault::Bool { key: "k".into(), found: 7 });
    for found in [13, 255, u32::MAX] {
        assert_eq!(
            File::new().pair("k", found, &[0; 8]).fault(),
            GgufFault::ValueType { key: "k".into(), found }
        );
        let array = [&found.to_le_bytes()[..], &1u64.to_le_bytes()].concat();
        assert_eq!(File::new().pair("k", 9, &array).fault(), GgufFault::ValueType { key: "k".into(), found });
    }
    let signed = File::new().pair("general.alignment", 5, &32i32.to_le_bytes()).fault();
    assert!(matches!(&signed, GgufFault::KeyType { key, .. } if key == "general.alignment"), "{signed}");
    let text = File::new().pair("tokenizer.ggml.token_type", 8, &string("normal")).fault();
    assert!(text.to_string().contains("token_type\": expected an array of i32, got a string"), "{text}");
    let floats = [&6u32.to_le_bytes()[..], &1u64.to_le_bytes(), &[0; 4]].concat();
    let floats = File::new().pair("tokenizer.ggml.tokens", 9, &floats).fault();
    assert!(floats.to_string().contains("an array of 1 f32"), "{floats}");
}

#[test]
fn text_is_utf8_and_keys_have_names() {
    let bad = [&1u64.to_le_bytes()[..], &[0xff]].concat();
    assert!(matches!(File::new().pair("k", 8, &bad).fault(), GgufFault::NotUtf8 { .. }));
    assert_eq!(File::new().pair("", 0, &[1, 0, 0, 0, 0]).fault(), GgufFault::EmptyKey { index: 0 });
}

#[test]
fn alignment_is_a_power_of_two_up_to_64_kib() {
    let aligned =
        |n: u32| File { data: 1 << 17, ..File::new().pair("general.alignment", 4, &n.to_le_bytes()) };
    for found in [0, 13, 33, 1 << 17, 1 << 31, u32::MAX] {
        let expected = GgufFault::Alignment { found: found.into(), allowed: MAX_ALIGNMENT };
        assert_eq!(aligned(found).fault(), expected);
    }
    for n in [1, 32, 1 << 16] {
        let header = aligned(n).tensor("t", &[32], F32, 0).parse().unwrap();
        assert_eq!(header.get("t").unwrap().offset % u64::from(n), 0);
    }
}

#[test]
fn dimensions_and_their_products_are_checked() {
    let with = |dims: &[u64]| File::new().tensor("t", dims, F32, 0);
    for count in [0usize, 5, 6] {
        assert_eq!(with(&vec![1; count]).tensor_fault(), TensorFault::Dimensions { found: count as u32 });
    }
    let mut info = string("t");
    info.extend(u32::MAX.to_le_bytes());
    let many = File { infos: vec![[info, vec![0; 64]].concat()], ..File::new() };
    assert_eq!(many.tensor_fault(), TensorFault::Dimensions { found: u32::MAX });
    assert_eq!(with(&[1 << 63]).tensor_fault(), TensorFault::Dimension { found: 1 << 63 });
    for dims in [&[1 << 62, 2][..], &[1 << 32, 1 << 32], &[1 << 61, 1], &[1 << 62, 4, 0], &[3, 1 << 62, 1, 1]]
    {
        let fault = with(dims).tensor_fault();
        assert!(matches!(fault, TensorFault::Overflow { .. }), "{dims:?}: {fault}");
    }
    for dims in [&[0][..], &[32, 0], &[0, 7, 0, 2]] {
        let header = with(dims).parse().unwrap();
        assert_eq!((header.tensors[0].len, header.tensors[0].numel()), (0, 0));
    }
}

#[test]
fn types_and_rows_are_checked() {
    for found in [4, 5, 31, 36, 38, 43, 97, 1000, u32::MAX] {
        let fault = File::new().tensor("t", &[256], found, 0).tensor_fault();
        assert!(
            matches!(&fault, TensorFault::Type { allowed, .. } if allowed.contains("2 (Q4_0)")),
            "{fault}"
        );
    }
    let fault = File::new().tensor("t", &[33, 32], Q4_0, 0).tensor_fault();
    assert_eq!(fault, TensorFault::Row { found: 33, block: 32, ty: "Q4_0" });
    assert_eq!(File::new().tensor("t", &[64, 2], Q4_0, 0).parse().unwrap().tensors[0].len, 72);
}

#[test]
fn offsets_are_checked() {
    let at = |offset: u64| File::new().tensor("t", &[32], F32, offset);
    assert_eq!(at(8).tensor_fault(), TensorFault::Unaligned { found: 8, alignment: 32 });
    for offset in [32, 1 << 40, u64::MAX - 31] {
        assert!(matches!(at(offset).tensor_fault(), TensorFault::PastEnd { .. }), "{offset}");
    }
    let two = |second: u64| File { data: 512, ..at(0).tensor("u", &[32], F32, second) };
    assert!(two(128).parse().is_ok());
    for second in [0, 64, 96] {
        assert!(matches!(two(second).tensor_fault(), TensorFault::Overlap { end: 128, .. }), "{second}");
    }
    let empty = |offset: u64| at(0).tensor("u", &[0], F32, offset);
    assert!(empty(128).parse().is_ok() && empty(64).parse().is_ok());
    assert!(matches!(empty(u64::MAX - 31).tensor_fault(), TensorFault::PastEnd { .. }));
}

#[test]
fn names_and_keys_are_unique() {
    let fault = File::new().tensor("t", &[0], F32, 0).tensor("t", &[0], F32, 0).tensor_fault();
    assert_eq!(fault, TensorFault::Duplicate);
    let fault = File::new().pair("k", 0, &[1]).pair("k", 7, &[1]).fault();
    assert_eq!(fault, GgufFault::DuplicateKey { key: "k".into() });
}

#[test]
fn names_that_look_like_paths_are_opaque() {
    let header = File::new().tensor("../../etc/passwd\n", &[32], F32, 0).parse().unwrap();
    assert!(header.get("../../etc/passwd\n").is_some());
}

#[test]
fn a_file_and_its_bytes_parse_alike_across_windows() {
    let dir = tempfile::tempdir().unwrap();
    let mut file = File::new().tensor("t", &[32], F32, 0);
    for i in 0..9000 {
        file = file.pair(&format!("key.{i}"), 8, &string(&"x".repeat(i % 40)));
    }
    let long = "y".repeat(200_000);
    let file = file.pair("long", 8, &string(&long));
    let path = dir.path().join("m.gguf");
    std::fs::write(&path, file.bytes()).unwrap();
    let (opened, parsed) = (Gguf::open(&path).unwrap(), file.parse().unwrap());
    assert!(opened.metadata().iter().eq(parsed.metadata.iter()));
    assert_eq!(opened.tensors(), &parsed.tensors[..]);
    assert_eq!(opened.metadata().text("long").unwrap(), Some(&long[..]));
    assert_eq!(opened.read(&opened.tensors()[0]).unwrap(), [0; 128]);
}

#[test]
fn written_files_are_read_back() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    let values = [
        Value::U8(200),
        Value::I8(-3),
        Value::U16(60_000),
        Value::I16(-5),
        Value::U32(7),
        Value::I32(-7),
        Value::F32(1.5),
        Value::Bool(true),
        Value::String("é\n".into()),
        Value::strings(["a".to_owned(), String::new()]),
        Value::U64(u64::MAX),
        Value::I64(i64::MIN),
        Value::F64(0.1),
    ];
    let metadata: Vec<_> =
        values.into_iter().map(|value| (format!("k.{:?}", value.value_type()), value)).collect();
    let specs = [
        GgufTensorSpec::new("a", GgmlType::Q4_0, [3, 64]),
        GgufTensorSpec::new("b", GgmlType::F32, [5]),
        GgufTensorSpec::new("empty", GgmlType::F16, [0, 4]),
        GgufTensorSpec::new("c", GgmlType::BF16, [2, 3]),
    ];
    let mut writer = GgufWriter::create(&path, &metadata, &specs).unwrap();
    let bytes = |spec: &GgufTensorSpec, fill: u8| vec![fill; spec.byte_len().unwrap() as usize];
    for (i, spec) in specs.iter().enumerate().rev() {
        writer.write(&spec.name, &bytes(spec, i as u8 + 1)).unwrap();
    }
    writer.finish().unwrap();
    let read = Gguf::open(&path).unwrap();
    assert!(read.metadata().iter().eq(metadata.iter().map(|(key, value)| (key.as_str(), value))));
    for (i, (spec, tensor)) in specs.iter().zip(read.tensors()).enumerate() {
        assert_eq!((&spec.name, spec.ty, &spec.shape), (&tensor.name, tensor.ty, &tensor.shape));
        assert_eq!(read.read(tensor).unwrap(), bytes(spec, i as u8 + 1));
    }
}

#[test]
fn files_that_readers_refuse_are_not_written() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    let create = |names: [&str; 2], cols: usize, keys: [&str; 2]| {
        let specs = names.map(|name| GgufTensorSpec::new(name, GgmlType::Q8_0, [1, cols]));
        GgufWriter::create(&path, &keys.map(|key| (key.to_owned(), Value::U8(0))), &specs)
            .unwrap_err()
            .to_string()
    };
    assert!(create(["a", "a"], 32, ["k", "l"]).contains("expected a unique name"));
    assert!(create(["a", "b"], 32, ["k", "k"]).contains("expected a unique name"));
    assert!(create(["a", "b"], 33, ["k", "l"]).contains("multiple of 32"));
    assert!(create(["a", &"n".repeat(64)], 32, ["k", "l"]).contains("at most 63 bytes"));
    assert!(!path.exists());
}
