//! Formats of the gradients that ranks exchange, in blocks along rows of [`ROW`] values.
//!
//! - `f32`: as they are.
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
use mantissa_num::{Blocks, Codes, Format, Given, Quantized, Scheme, quantize};

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
                let scheme = Box::new(scheme.parse::<Scheme>().ok().filter(is_local)?);
                Coding::Scheme { scheme, rotated }
            }
        };
        Some(MessageFormat { text: text.to_owned(), coding })
    }

    /// True if values are sent as they are.
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
                let Ok(found) = quantize(scheme, &padded, rows, ROW, Given::default()) else { return false };
                out.extend(match &found.codes {
                    Codes::U8(codes) => Packing::rows(scheme.format.code_bits()).pack(codes, ROW),
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
                let mut found = Quantized::empty(scheme.format.clone(), rows, ROW);
                let packing = Packing::rows(scheme.format.code_bits());
                let unit = scheme.format.code_bits().div_ceil(8) as usize;
                let len = if unit == 1 { packing.total_bytes(rows, ROW) } else { rows * ROW * unit };
                let (codes, scales) = bytes.split_at_checked(len)?;
                match unit {
                    1 => {
                        let signed = is_signed(&scheme.format);
                        found.codes = Codes::U8(packing.unpack(codes, rows, ROW, signed)?);
                    }
                    _ => push(codes, unit, |code| found.codes.push(code)),
                }
                if let Some(tree) = scheme.format.scale() {
                    push(scales, tree.code.bits().div_ceil(8) as usize, |code| found.scales.push(code));
                }
                let mut all = found.dequantize().ok()?;
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
    matches!(format, Format::Affine(affine) if matches!(affine.code, mantissa_num::Code::Int(_)))
}

/// True if a scheme encodes every row of [`ROW`] values by itself, with codes of at most 16 bits, scales of one level and no
/// offsets.
fn is_local(scheme: &Scheme) -> bool {
    let format = &scheme.format;
    let own_rows = format.blocks().count(2, ROW) == 2 * format.blocks().count(1, ROW);
    let fits = !matches!(format.blocks(), Blocks::Group(len) if len as usize > ROW);
    let one_level = format.scale().is_some_and(|tree| tree.outer.is_none());
    let has_codes = (1..=16).contains(&format.code_bits());
    own_rows && fits && one_level && has_codes && !format.has_zero() && !format.has_bias()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn wave(n: usize) -> Vec<f32> {
        (0..n).map(|i| (i as f32 * 0.37).sin() * 10f32.powi(i as i32 % 7 - 6)).collect()
    }

    const FORMATS: [&str; 9] = [
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
            "nvfp4",
            "int4-g64-asym",
            "q4_0",
            "int8-g512",
            "nf4-dq",
            "int9",
            "",
            "f32+hadamard",
        ] {
            assert!(MessageFormat::parse(text).is_none(), "{text}");
        }
    }
}
