//! Formats of the gradients that ranks exchange, in blocks along rows of [`ROW`] values.
//!
//! - `f32`: unquantized.
//! - A scheme such as `int8-g256`, `fp8-e4m3-g256`, `int4-g64`: quantized by the same code as weights (ZeRO++, Wang et al.
//!   2023, arXiv 2306.10209, section 3.3: gradients in blocks).
//! - `SCHEME+hadamard`: after a normalized Hadamard rotation of every row, which spreads outliers over its block
//!   (SDP4Bit, Jia et al. 2024, arXiv 2410.15526, section 3.2).
//! - `sign`: signs, times the mean magnitude of the row (Karimireddy et al. 2019, "Error Feedback Fixes SignSGD", arXiv
//!   1901.09847, section 3).
//!
//! A piece with a value that is not finite is sent as a mark, and decodes to NaN.

use std::fmt;

use mantissa_kernels::kernels;
use mantissa_num::pack::Packing;
use mantissa_num::{Blocks, Code, Codes, Format, Given, Quantized, Rule, ScaleFloor, Scheme, quantize};

/// Values of a row. Pieces of a parameter that are exchanged begin at multiples of it.
pub(crate) const ROW: usize = 256;

/// Marks of a piece.
const FINITE: u8 = 0;
const NOT_FINITE: u8 = 1;

/// Suffix of a scheme that is applied after a rotation.
const ROTATED: &str = "+hadamard";

/// Format of exchanged gradients.
#[derive(Clone, Debug, PartialEq)]
pub struct MessageFormat {
    text: String,
    coding: Coding,
}

#[derive(Clone, Debug, PartialEq)]
enum Coding {
    Plain,
    Scheme { scheme: Box<Scheme>, rotated: bool },
    Sign,
}

impl Default for MessageFormat {
    fn default() -> Self {
        MessageFormat { text: "f32".to_owned(), coding: Coding::Plain }
    }
}

impl fmt::Display for MessageFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl MessageFormat {
    /// Accepted texts, for messages.
    pub const ALLOWED: &str = "f32, sign, or a scheme with groups of at most 256 values, such as int8-g256, fp8-e4m3-g256, int4-g64+hadamard";

    /// Reads a format; `None` unless it is one of [`ALLOWED`](Self::ALLOWED).
    pub fn parse(text: &str) -> Option<Self> {
        let coding = match text {
            "f32" => Coding::Plain,
            "sign" => Coding::Sign,
            _ => {
                let (scheme, rotated) = match text.strip_suffix(ROTATED) {
                    Some(scheme) => (scheme, true),
                    None => (text, false),
                };
                let mut scheme = Box::new(scheme.parse::<Scheme>().ok().filter(is_local)?);
                if scheme.encoder.rule == Rule::Restricted {
                    scheme.encoder.floor = ScaleFloor::Training;
                }
                Coding::Scheme { scheme, rotated }
            }
        };
        Some(MessageFormat { text: text.to_owned(), coding })
    }

    /// True if values are sent unquantized.
    pub fn is_plain(&self) -> bool {
        self.coding == Coding::Plain
    }

    /// Bytes of a message of `n` values.
    pub fn bytes(&self, n: usize) -> u64 {
        let rows = n.div_ceil(ROW);
        match &self.coding {
            Coding::Plain => 4 * n as u64,
            Coding::Sign => 1 + rows as u64 * (ROW / 8 + 4) as u64,
            Coding::Scheme { scheme, .. } => 1 + scheme.format.total_bits(rows, ROW).div_ceil(8),
        }
    }

    /// Appends `values` to a message, and replaces them by what a reader of the message decodes. True if all are finite.
    pub(crate) fn write(&self, values: &mut [f32], out: &mut Vec<u8>) -> bool {
        if self.is_plain() {
            values.iter().for_each(|value| out.extend_from_slice(&value.to_le_bytes()));
            return values.iter().all(|value| value.is_finite());
        }
        let begin = out.len();
        out.push(FINITE);
        let written = values.iter().all(|value| value.is_finite()) && self.encode(values, out);
        let mut read = &out[begin..];
        let back = if written { self.read(&mut read, values) } else { None };
        if back.is_none() {
            out.truncate(begin);
            out.push(NOT_FINITE);
            values.fill(f32::NAN);
        }
        back.is_some()
    }

    /// Reads as many values as `values` has from the beginning of `message`; `None` if it is too short or damaged.
    pub(crate) fn read(&self, message: &mut &[u8], values: &mut [f32]) -> Option<()> {
        let mut take = |len: usize| {
            let (taken, rest) = message.split_at_checked(len)?;
            *message = rest;
            Some(taken)
        };
        if self.is_plain() {
            let bytes = take(4 * values.len())?.as_chunks::<4>().0;
            values.iter_mut().zip(bytes).for_each(|(value, bytes)| *value = f32::from_le_bytes(*bytes));
            return Some(());
        }
        match *take(1)?.first()? {
            FINITE => self.decode(take(self.bytes(values.len()) as usize - 1)?, values),
            NOT_FINITE => {
                values.fill(f32::NAN);
                Some(())
            }
            _ => None,
        }
    }

    /// Appends the codes of finite values; false if a scale would not be finite.
    fn encode(&self, values: &[f32], out: &mut Vec<u8>) -> bool {
        let rows = values.len().div_ceil(ROW);
        let mut padded = values.to_vec();
        padded.resize(rows * ROW, 0.0);
        match &self.coding {
            Coding::Plain => true,
            Coding::Sign => {
                for (row, own) in padded.chunks_exact(ROW).zip(values.chunks(ROW)) {
                    let sum: f64 = own.iter().map(|value| f64::from(value.abs())).sum();
                    out.extend_from_slice(&((sum / own.len() as f64) as f32).to_le_bytes());
                    out.extend(row.chunks_exact(8).map(|eight| {
                        eight
                            .iter()
                            .rev()
                            .fold(0u8, |bits, value| bits << 1 | u8::from(value.is_sign_negative()))
                    }));
                }
                true
            }
            Coding::Scheme { scheme, rotated } => {
                if *rotated {
                    kernels().hadamard(&mut padded, ROW, &[]);
                }
                let packing = Packing::rows(scheme.format.code_bits());
                if let Some(group) = plain_integers(scheme) {
                    let (codes, scales) = integers(&padded, group, scheme.format.code_bits());
                    out.extend(packing.pack(&codes, ROW));
                    out.extend(scales.iter().flat_map(|scale| scale.to_le_bytes()));
                    return true;
                }
                let Ok(found) = quantize(scheme, &padded, rows, ROW, Given::default()) else { return false };
                out.extend(match &found.codes {
                    Codes::U8(codes) => packing.pack(codes, ROW),
                    codes => codes.to_le_bytes(),
                });
                out.extend(found.scales.to_le_bytes());
                true
            }
        }
    }

    fn decode(&self, bytes: &[u8], values: &mut [f32]) -> Option<()> {
        let rows = values.len().div_ceil(ROW);
        match &self.coding {
            Coding::Plain => None,
            Coding::Sign => {
                for (values, row) in values.chunks_mut(ROW).zip(bytes.chunks_exact(ROW / 8 + 4)) {
                    let (mean, signs) = row.split_first_chunk::<4>()?;
                    let mean = f32::from_le_bytes(*mean);
                    for (i, value) in values.iter_mut().enumerate() {
                        *value = if signs[i / 8] >> (i % 8) & 1 == 1 { -mean } else { mean };
                    }
                }
                Some(())
            }
            Coding::Scheme { scheme, rotated } => {
                let mut all = match plain_integers(scheme) {
                    Some(group) => decoded_integers(bytes, rows, group, scheme.format.code_bits())?,
                    None => decoded(scheme, bytes, rows)?,
                };
                if *rotated {
                    // The normalized rotation is its own inverse.
                    kernels().hadamard(&mut all, ROW, &[]);
                }
                values.copy_from_slice(&all[..values.len()]);
                Some(())
            }
        }
    }
}

/// Returns the group of integers that the kernel encodes: symmetric, of at most 8 bits, with f32 scales of the default rule.
fn plain_integers(scheme: &Scheme) -> Option<usize> {
    let Format::Affine(affine) = &scheme.format else { return None };
    let is_plain = matches!(affine.code, Code::Int(2..=8))
        && scheme.encoder.rule == Rule::Full
        && affine.scale.as_ref().is_some_and(|tree| tree.code == Code::F32);
    match affine.blocks {
        Blocks::Group(len) if is_plain => Some(len as usize),
        Blocks::Row if is_plain => Some(ROW),
        _ => None,
    }
}

/// Encodes finite rows of [`ROW`] values as integers of `bits` bits in groups; returns codes in two's complement, and scales.
fn integers(rows: &[f32], group: usize, bits: u32) -> (Vec<u8>, Vec<f32>) {
    let high = ((1i32 << (bits - 1)) - 1) as i8;
    let groups = ROW.div_ceil(group);
    let (mut codes, mut scales) = (vec![0i8; rows.len()], vec![0.0; rows.len() / ROW * groups]);
    let all = rows.chunks_exact(ROW).zip(codes.chunks_exact_mut(ROW)).zip(scales.chunks_exact_mut(groups));
    for ((row, codes), scales) in all {
        let range = ((1u32 << bits) - 1) as f32 / 2.0;
        // Finite by the contract.
        let _ = kernels().quant_int_sym(row, group, -high - 1, high, range, scales, codes);
    }
    let mask = ((1u16 << bits) - 1) as u8;
    (codes.into_iter().map(|code| code.cast_unsigned() & mask).collect(), scales)
}

/// Decodes rows that [`integers`] encoded.
fn decoded_integers(bytes: &[u8], rows: usize, group: usize, bits: u32) -> Option<Vec<f32>> {
    let packing = Packing::rows(bits);
    let (codes, scales) = bytes.split_at_checked(packing.total_bytes(rows, ROW))?;
    let codes = packing.unpack(codes, rows, ROW, true)?;
    let mut scales = scales.as_chunks::<4>().0.iter().map(|scale| f32::from_le_bytes(*scale));
    let mut all = Vec::with_capacity(codes.len());
    for group in codes.chunks_exact(ROW).flat_map(|row| row.chunks(group)) {
        let scale = scales.next()?;
        all.extend(group.iter().map(|code| f32::from(code.cast_signed()) * scale));
    }
    Some(all)
}

/// Decodes rows of any scheme.
fn decoded(scheme: &Scheme, bytes: &[u8], rows: usize) -> Option<Vec<f32>> {
    let mut found = Quantized::empty(scheme.format.clone(), rows, ROW);
    let packing = Packing::rows(scheme.format.code_bits());
    let unit = scheme.format.code_bits().div_ceil(8) as usize;
    let len = if unit == 1 { packing.total_bytes(rows, ROW) } else { rows * ROW * unit };
    let (codes, scales) = bytes.split_at_checked(len)?;
    match unit {
        1 => found.codes = Codes::U8(packing.unpack(codes, rows, ROW, is_signed(&scheme.format))?),
        _ => push(codes, unit, |code| found.codes.push(code)),
    }
    if let Some(tree) = scheme.format.scale() {
        push(scales, tree.code.bits().div_ceil(8) as usize, |code| found.scales.push(code));
    }
    found.dequantize().ok()
}

/// Passes little-endian codes of `unit` bytes to `take`.
fn push(bytes: &[u8], unit: usize, mut take: impl FnMut(u32)) {
    for code in bytes.chunks_exact(unit.max(1)) {
        let mut word = [0; 4];
        word[..unit].copy_from_slice(code);
        take(u32::from_le_bytes(word));
    }
}

/// True if codes are numbers with a sign.
fn is_signed(format: &Format) -> bool {
    matches!(format, Format::Affine(affine) if matches!(affine.code, Code::Int(_) | Code::Ternary))
}

/// True if a scheme encodes every row of [`ROW`] values by itself, with codes of at most 16 bits, scales of one level and no
/// offsets.
fn is_local(scheme: &Scheme) -> bool {
    let format = &scheme.format;
    let own_rows = format.blocks().simplest(2, ROW).within_rows();
    let fits = !matches!(format.blocks(), Blocks::Group(len) if len as usize > ROW);
    let one_level = format.scale().is_some_and(|tree| tree.outer.is_none());
    let has_codes = (1..=16).contains(&format.code_bits());
    // A floor of the scale would make small gradients 0.
    let floored = scheme.encoder.rule == Rule::AbsMean;
    own_rows && fits && !floored && one_level && has_codes && !format.has_zero() && !format.has_bias()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn wave(n: usize) -> Vec<f32> {
        (0..n).map(|i| (i as f32 * 0.37).sin() * 10f32.powi(i as i32 % 7 - 6)).collect()
    }

    const FORMATS: [&str; 10] = [
        "ternary-g128:amax",
        "f32",
        "sign",
        "int8-g256",
        "int4-g64",
        "int4-g64+hadamard",
        "fp8-e4m3-g256",
        "int8-channel+hadamard",
        "mxfp4",
        "fp8-e5m2-g128",
    ];

    #[test]
    fn messages_are_read_as_the_sender_saw_them() {
        for text in FORMATS {
            let format = MessageFormat::parse(text).unwrap();
            assert_eq!(format.to_string(), text);
            for n in [1, 255, 256, 1000, 4096] {
                let mut message = vec![9];
                let (mut sent, mut received) = (wave(n), vec![f32::NAN; n]);
                assert!(format.write(&mut sent, &mut message), "{text}");
                assert_eq!(message.len() as u64, 1 + format.bytes(n), "{text} {n}");
                let mut rest = &message[1..];
                format.read(&mut rest, &mut received).unwrap();
                assert!(rest.is_empty() && received == sent, "{text} {n}");
                let mut short = &message[1..message.len() - 1];
                assert!(format.read(&mut short, &mut received).is_none(), "{text} {n}");
            }
        }
    }

    /// The kernel's codes are those of the specification, in every width, also where groups do not divide rows.
    #[test]
    fn integers_are_those_of_the_scheme() {
        for text in ["int8-g256", "int8-channel", "int7-g100", "int4-g64", "int3-g32", "int2-g16"] {
            let scheme: Scheme = text.parse().unwrap();
            let group = plain_integers(&scheme).unwrap();
            for factor in [1.0, 1e-9, 1e-30, 0.0] {
                let values: Vec<f32> = wave(1024).into_iter().map(|value| value * factor).collect();
                let (codes, scales) = integers(&values, group, scheme.format.code_bits());
                let found = quantize(&scheme, &values, 4, ROW, Given::default()).unwrap();
                let mask = ((1u16 << scheme.format.code_bits()) - 1) as u8;
                let expected: Vec<u8> = found.codes.to_le_bytes().iter().map(|code| code & mask).collect();
                assert!(codes == expected, "{text} {factor}");
                let scales: Vec<u8> = scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
                assert!(scales == found.scales.to_le_bytes(), "{text} {factor}");
                let packed = Packing::rows(scheme.format.code_bits()).pack(&codes, ROW);
                let back = decoded_integers(&[packed, scales].concat(), 4, group, scheme.format.code_bits());
                assert!(back.unwrap() == found.dequantize().unwrap(), "{text} {factor}");
            }
        }
    }

    /// Gradients are small: a scheme keeps as much of them as of larger ones.
    #[test]
    fn small_values_lose_no_more_than_large_ones() {
        for text in FORMATS.into_iter().chain(["int8-g256:restricted"]).filter(|text| !text.starts_with("mx"))
        {
            let error = |factor: f32| {
                let start: Vec<f32> = wave(512).into_iter().map(|value| value * factor).collect();
                let mut values = start.clone();
                MessageFormat::parse(text).unwrap().write(&mut values, &mut Vec::new());
                let squares: f64 = values.iter().zip(&start).map(|(a, b)| f64::from(a - b).powi(2)).sum();
                (squares / start.iter().map(|b| f64::from(*b).powi(2)).sum::<f64>()).sqrt()
            };
            assert!((error(1e-8) - error(1.0)).abs() < 1e-3, "{text}: {} {}", error(1e-8), error(1.0));
        }
    }

    #[test]
    fn fewer_bits_have_larger_errors() {
        let start = wave(4096);
        let error = |text: &str| {
            let mut values = start.clone();
            MessageFormat::parse(text).unwrap().write(&mut values, &mut Vec::new());
            let squares: f64 = values.iter().zip(&start).map(|(a, b)| f64::from(a - b).powi(2)).sum();
            (squares / start.iter().map(|b| f64::from(*b).powi(2)).sum::<f64>()).sqrt()
        };
        let found = ["f32", "int8-g256", "fp8-e4m3-g256", "int4-g64", "sign"].map(error);
        assert!(found[0] == 0.0 && found.is_sorted() && found[1] < 0.01 && found[2] < 0.04, "{found:?}");
    }

    #[test]
    fn values_that_are_not_finite_are_marked() {
        for text in FORMATS {
            let format = MessageFormat::parse(text).unwrap();
            for bad in [f32::NAN, f32::INFINITY] {
                let (mut values, mut message) = (wave(300), Vec::new());
                values[7] = bad;
                assert!(!format.write(&mut values, &mut message), "{text}");
                let mut read = vec![0.0; 300];
                format.read(&mut &message[..], &mut read).unwrap();
                assert!(!read[7].is_finite(), "{text}");
            }
        }
    }

    #[test]
    fn schemes_whose_rows_depend_on_others_are_refused() {
        for text in [
            "int8-tensor",
            "ternary-g128",
            "nvfp4",
            "int4-g64-asym",
            "q4_0",
            "int8-g512",
            "nf4-dq",
            "nf4-g96",
            "int9",
            "",
            "f32+hadamard",
        ] {
            assert!(MessageFormat::parse(text).is_none(), "{text}");
        }
    }
}
