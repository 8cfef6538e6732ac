//! Integer round-to-nearest against the output of compressed-tensors, bit for bit, at every available level.
//!
//! A subset of the golden file is committed; the whole file is compared too if it exists beside the repository.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use mantissa_kernels::{Isa, Kernels};
use std::path::Path;
use std::rc::Rc;

/// Safetensors file with tensors found by scanning the header text, which is enough for a trusted file.
struct Golden {
    header: String,
    data: Vec<u8>,
}

impl Golden {
    /// The committed subset and, if it exists beside the repository, the whole file.
    fn open() -> Vec<Self> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let whole = root.join("../shared/golden/int_affine.safetensors");
        let subset = Self::read(&root.join("tests/data/golden/int_affine.safetensors")).unwrap();
        [Some(subset), Self::read(&whole)].into_iter().flatten().collect()
    }

    fn read(path: &Path) -> Option<Self> {
        let bytes = std::fs::read(path).ok()?;
        let (len, rest) = bytes.split_first_chunk::<8>()?;
        let (header, data) = rest.split_at(u64::from_le_bytes(*len) as usize);
        Some(Self { header: String::from_utf8(header.to_vec()).unwrap(), data: data.to_vec() })
    }

    fn bytes(&self, name: &str) -> Option<&[u8]> {
        let entry = &self.header[self.header.find(&format!("\"{name}\":"))?..];
        let offsets = entry.split_once("\"data_offsets\":[")?.1.split_once(']')?.0;
        let (start, end) = offsets.split_once(',')?;
        Some(&self.data[start.trim().parse().unwrap()..end.trim().parse().unwrap()])
    }

    fn f32s(&self, name: &str) -> Option<Vec<f32>> {
        Some(self.bytes(name)?.as_chunks::<4>().0.iter().map(|&b| f32::from_le_bytes(b)).collect())
    }

    fn i8s(&self, name: &str) -> Option<Vec<i8>> {
        Some(self.bytes(name)?.iter().map(|&b| b as i8).collect())
    }
}

#[test]
fn agrees_with_compressed_tensors() {
    for (golden, kernels) in cases() {
        let mut compared = 0;
        for tensor in ["gaussian", "student_t3", "outlier_channels", "skewed_positive", "dyadic"] {
            let Some(x) = golden.f32s(&format!("{tensor}.x")) else { continue };
            for bits in [4, 8] {
                // Every row is 128 long, so that groups never cross rows in the flat view.
                for (strategy, group) in
                    [("tensor", x.len()), ("channel", 128), ("group32", 32), ("group64", 64)]
                {
                    let name =
                        |kind: &str, rest: &str| format!("{tensor}.int{bits}_{kind}_{strategy}.{rest}");
                    compared += symmetric(&golden, &kernels, &x, group, bits, |rest| name("sym", rest));
                    compared += asymmetric(&golden, &kernels, &x, group, bits, |rest| name("asym", rest));
                }
            }
        }
        assert!(compared >= 24, "only {compared} entries of the golden file were found");
    }
}

/// Every file at every available level.
fn cases() -> impl Iterator<Item = (Rc<Golden>, Kernels)> {
    let files: Vec<_> = Golden::open().into_iter().map(Rc::new).collect();
    Isa::available().flat_map(move |isa| {
        let kernels = move |golden: &Rc<Golden>| (golden.clone(), Kernels::new(isa).unwrap());
        files.iter().map(kernels).collect::<Vec<_>>()
    })
}

fn symmetric(
    golden: &Golden,
    kernels: &Kernels,
    x: &[f32],
    group: usize,
    bits: u32,
    name: impl Fn(&str) -> String,
) -> usize {
    let Some(expected) = golden.f32s(&name("compressed_tensors.scale")) else { return 0 };
    let (qmax, mut scales, mut codes) =
        ((1_i32 << (bits - 1)) - 1, vec![0.0; expected.len()], vec![0; x.len()]);
    let scale_div = ((1_i32 << bits) - 1) as f32 / 2.0;
    kernels
        .quant_int_sym(x, group, (-qmax - 1) as i8, qmax as i8, scale_div, &mut scales, &mut codes)
        .unwrap();
    assert_eq!(scales, expected, "{}", name("scale"));
    assert_eq!(codes, golden.i8s(&name("compressed_tensors.codes_i8")).unwrap(), "{}", name("codes"));
    packed(golden, kernels, &codes, bits, &name);
    let dequant = golden.f32s(&name("compressed_tensors.dequant")).unwrap();
    let lut: [f32; 256] = std::array::from_fn(|code| f32::from(code as u8 as i8));
    let mut out = vec![0.0; x.len()];
    let bytes: Vec<u8> = codes.iter().map(|&c| c as u8).collect();
    kernels.dequant_lut8(&bytes, &lut, &scales, group, &mut out);
    assert_eq!(out, dequant, "{}", name("dequant"));
    1
}

fn asymmetric(
    golden: &Golden,
    kernels: &Kernels,
    x: &[f32],
    group: usize,
    bits: u32,
    name: impl Fn(&str) -> String,
) -> usize {
    let Some(expected) = golden.f32s(&name("compressed_tensors.scale")) else { return 0 };
    let (mut scales, mut zeros) = (vec![0.0; expected.len()], vec![0; expected.len()]);
    let mut codes = vec![0; x.len()];
    kernels.quant_int_asym(x, group, bits, &mut scales, &mut zeros, &mut codes).unwrap();
    assert_eq!(scales, expected, "{}", name("scale"));
    assert_eq!(zeros, golden.i8s(&name("compressed_tensors.zero_point_i8")).unwrap(), "{}", name("zero"));
    assert_eq!(codes, golden.i8s(&name("compressed_tensors.codes_i8")).unwrap(), "{}", name("codes"));
    packed(golden, kernels, &codes, bits, &name);
    // Codes and zeros shifted to the unsigned domain of the packed file.
    let offset = 1_i16 << (bits - 1);
    let unsigned = |v: &i8| i16::from(*v) + offset;
    let bytes: Vec<u8> = codes.iter().map(|c| unsigned(c) as u8).collect();
    let zeros: Vec<f32> = zeros.iter().map(|z| f32::from(unsigned(z))).collect();
    let mut out = vec![0.0; x.len()];
    kernels.dequant_int8_zero(&bytes, &zeros, &scales, group, &mut out);
    assert_eq!(out, golden.f32s(&name("compressed_tensors.dequant")).unwrap(), "{}", name("dequant"));
    if bits == 4 {
        let nibbles: Vec<u8> = bytes.as_chunks::<2>().0.iter().map(|[low, high]| low | high << 4).collect();
        let mut from_nibbles = vec![0.0; x.len()];
        kernels.dequant_int4_zero(&nibbles, &zeros, &scales, group, &mut from_nibbles);
        assert_eq!(from_nibbles, out, "{}", name("dequant of nibbles"));
    }
    1
}

/// The packed words, if the file has them: rows of 128 four-bit codes fill whole words, so rows need no padding.
fn packed(golden: &Golden, kernels: &Kernels, codes: &[i8], bits: u32, name: impl Fn(&str) -> String) {
    if let Some(expected) = golden.bytes(&name("compressed_tensors.packed_i32")) {
        let mut out = vec![0; expected.len()];
        kernels.pack_codes_le(codes, 1 << (bits - 1), bits, &mut out);
        assert_eq!(out, expected, "{}", name("packed"));
    }
}

#[test]
fn packs_every_width_as_compressed_tensors() {
    for (golden, kernels) in cases() {
        for bits in 1..=8_u32 {
            let codes = golden.i8s(&format!("pack_int32.bits{bits}.codes_i8")).unwrap();
            let expected = golden.bytes(&format!("pack_int32.bits{bits}.packed_i32")).unwrap();
            let (rows, bytes) = shape(&golden, bits, codes.len(), expected.len());
            for (codes, expected) in codes.chunks(codes.len() / rows).zip(expected.chunks(bytes)) {
                let mut out = vec![0xff; bytes];
                kernels.pack_codes_le(codes, 1 << (bits - 1), bits, &mut out);
                assert_eq!(out, expected, "{bits} bits at {}", kernels.isa());
                let mut back = vec![0; codes.len()];
                kernels.unpack_codes_le(&out, bits, &mut back);
                let offset = 1_u8 << (bits - 1);
                assert!(back.iter().zip(codes).all(|(&b, &c)| b.wrapping_sub(offset) as i8 == c));
            }
        }
    }
}

/// Rows of the packing case, and the bytes of a packed row.
fn shape(golden: &Golden, bits: u32, codes: usize, bytes: usize) -> (usize, usize) {
    let name = format!("\"pack_int32.bits{bits}.codes_i8\":");
    let entry = &golden.header[golden.header.find(&name).unwrap()..];
    let shape = entry.split_once("\"shape\":[").unwrap().1.split_once(',').unwrap().0;
    let rows: usize = shape.trim().parse().unwrap();
    assert!(codes.is_multiple_of(rows) && bytes.is_multiple_of(rows));
    (rows, bytes / rows)
}
