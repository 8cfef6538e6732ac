//! Solutions of layers as bytes, which workers exchange. Equal solutions give equal bytes.
//!
//! The format is that of the plan, which every worker has. A method that changes it names the new one as the text of its
//! scheme; one that the grammar does not spell is not exchanged, and its layer is solved by each worker.

use mantissa_methods::error_gate::{Judgement, Output, Windows};
use mantissa_methods::{ErrorStats, Solved};
use mantissa_num::stored::Extra;
use mantissa_num::{Codes, Format, Offsets, Quantized, ScaleLevel, Scheme, StaticScale};

use mantissa_ranks::{Reader, Writer};

/// Deepest level of scales that is read: the global scale of NVFP4 is the second.
const MOST_LEVELS: usize = 4;

/// Writes the solutions of modules, each with its planned scheme; `None` if a format has no text of its own.
pub(crate) fn to_bytes<'a>(
    solutions: impl ExactSizeIterator<Item = (&'a str, &'a Scheme, &'a Solved)>,
) -> Option<Vec<u8>> {
    let mut out = Writer(Vec::new());
    out.len(solutions.len());
    for (module, scheme, solved) in solutions {
        out.text(module);
        out.text(&other_format(scheme, &solved.quantized.format)?);
        out.solved(solved);
    }
    Some(out.0)
}

/// Reads the solution of `module`, whose planned scheme and shape are given; `None` if the bytes are not what [`to_bytes`] wrote, or
/// have no such module.
pub(crate) fn from_bytes(
    bytes: &[u8],
    module: &str,
    (scheme, shape): (&Scheme, (usize, usize)),
) -> Option<Solved> {
    let mut from = Reader(bytes);
    let mut found = None;
    for _ in 0..from.len(1)? {
        let name = from.text()?;
        let format = match &*from.text()? {
            "" => scheme.format.clone(),
            text => text.parse::<Scheme>().ok()?.format,
        };
        let solved = from.solved(format)?;
        if name == module {
            found = Some(checked(solved, shape)?);
        }
    }
    found.filter(|_| from.0.is_empty())
}

/// Returns a solution whose parts fit each other and the shape `[rows, cols]`.
fn checked(solved: Solved, (rows, cols): (usize, usize)) -> Option<Solved> {
    if (solved.quantized.rows, solved.quantized.cols) != (rows, cols) {
        return None;
    }
    solved.quantized.check().ok()?;
    solved.outliers.iter().try_for_each(|extra| extra.check(rows, cols)).ok()?;
    if let Some(groups) = &solved.g_idx {
        let count = solved.quantized.format.blocks().count(rows, cols) / rows.max(1);
        let fits = groups.len() == cols && groups.iter().all(|group| (*group as usize) < count);
        return fits.then_some(solved);
    }
    Some(solved)
}

/// Returns the text of `format` if it is not the planned one, which has no text here.
fn other_format(scheme: &Scheme, format: &Format) -> Option<String> {
    if scheme.format == *format {
        return Some(String::new());
    }
    let text = Scheme { format: format.clone(), ..scheme.clone() }.to_string();
    text.parse::<Scheme>().is_ok_and(|parsed| parsed.format == *format).then_some(text)
}

/// Writes parts of a solution.
trait WriteSolved {
    fn solved(&mut self, solved: &Solved);
    fn codes(&mut self, codes: &Codes);
    fn small_codes(&mut self, codes: &[u8]);
    fn level(&mut self, level: &ScaleLevel);
    fn extra(&mut self, extra: &Extra);
}

impl WriteSolved for Writer {
    fn solved(&mut self, solved: &Solved) {
        // Every field is named, so that a new one is not forgotten.
        let Solved {
            quantized: Quantized { format: _, rows, cols, codes, scales },
            g_idx,
            outliers,
            input_scale,
            stats,
            fallback,
            output_error,
            judged,
            notes,
        } = solved;
        self.len(*rows);
        self.len(*cols);
        self.codes(codes);
        self.level(scales);
        self.option(g_idx.as_ref(), |out, groups| out.indices(groups));
        self.option(outliers.as_ref(), Self::extra);
        self.option(*input_scale, |out, StaticScale { scale, zero }| {
            out.floats(&[scale]);
            out.u64(i64::from(zero).cast_unsigned());
        });
        let (count, sums, max_error) = stats.parts();
        self.u64(count);
        sums.into_iter().for_each(|sum| self.f64(sum));
        self.floats(&[max_error]);
        self.option(fallback.as_ref(), |out, why| out.text(why));
        self.option(*output_error, Self::f64);
        self.option(*judged, |out, Judgement { of, windows, solved, nearest }| {
            out.byte(of_output(of));
            out.byte((windows == Windows::HeldOut).into());
            out.f64(solved);
            out.f64(nearest);
        });
        self.len(notes.len());
        notes.iter().for_each(|note| self.text(note));
    }

    fn codes(&mut self, codes: &Codes) {
        match codes {
            Codes::U8(codes) => self.small_codes(codes),
            Codes::U16(codes) => {
                self.byte(1);
                self.numbers(codes.iter().map(|code| code.to_le_bytes()));
            }
            Codes::U32(codes) => {
                self.byte(2);
                self.indices(codes);
            }
            Codes::U64(codes) => {
                self.byte(3);
                self.numbers(codes.iter().map(|code| code.to_le_bytes()));
            }
            Codes::Packed(bytes) => {
                self.byte(4);
                self.bytes(bytes);
            }
        }
    }

    /// Writes codes of a byte each, two in a byte if all have four bits: sign-extended, or unsigned.
    fn small_codes(&mut self, codes: &[u8]) {
        let kind = if codes.iter().all(|code| from_nibble(*code & 15, SIGNED) == *code) {
            SIGNED
        } else if codes.iter().all(|code| *code < 16) {
            UNSIGNED
        } else {
            self.byte(0);
            return self.bytes(codes);
        };
        self.byte(kind);
        self.len(codes.len());
        let pair = |pair: &[u8]| (pair[0] & 15) | pair.get(1).map_or(0, |second| second << 4);
        self.0.extend(codes.chunks(2).map(pair));
    }

    fn level(&mut self, ScaleLevel { codes, offsets, outer }: &ScaleLevel) {
        self.codes(codes);
        match offsets {
            Offsets::None => self.byte(0),
            Offsets::Zero(zeros) => {
                self.byte(1);
                self.numbers(zeros.iter().map(|zero| zero.to_le_bytes()));
            }
            Offsets::Bias(biases) => {
                self.byte(2);
                self.floats(biases);
            }
            Offsets::Mean(mean) => {
                self.byte(3);
                self.floats(&[*mean]);
            }
        }
        self.option(outer.as_deref(), Self::level);
    }

    fn extra(&mut self, extra: &Extra) {
        match extra {
            Extra::Columns { index, values } => {
                self.byte(0);
                self.indices(index);
                self.floats(values);
            }
            Extra::LowRank { rank, down, up } => {
                self.byte(1);
                self.len(*rank);
                self.floats(down);
                self.floats(up);
            }
            Extra::Sparse { starts, index, values } => {
                self.byte(2);
                self.indices(starts);
                self.indices(index);
                self.floats(values);
            }
        }
    }
}

/// Kinds of codes that lie two in a byte, the first in the low half.
const SIGNED: u8 = 5;
const UNSIGNED: u8 = 6;

/// Returns the code of a half byte.
fn from_nibble(nibble: u8, kind: u8) -> u8 {
    if kind == SIGNED && nibble > 7 { nibble | 0xf0 } else { nibble }
}

fn of_output(of: Output) -> u8 {
    OUTPUTS.iter().position(|known| *known == of).unwrap_or(0) as u8
}

/// Outputs in the order of their bytes.
const OUTPUTS: [Output; 3] = [Output::Layer, Output::Input, Output::Block];

/// Reads parts of a solution; `None` if the bytes are not that.
trait ReadSolved {
    fn solved(&mut self, format: Format) -> Option<Solved>;
    fn codes(&mut self) -> Option<Codes>;
    fn level(&mut self, levels: usize) -> Option<ScaleLevel>;
    fn extra(&mut self) -> Option<Extra>;
}

impl ReadSolved for Reader<'_> {
    fn solved(&mut self, format: Format) -> Option<Solved> {
        let (rows, cols) = (usize::try_from(self.u64()?).ok()?, usize::try_from(self.u64()?).ok()?);
        let (codes, scales) = (self.codes()?, self.level(MOST_LEVELS)?);
        Some(Solved {
            quantized: Quantized { format, rows, cols, codes, scales },
            g_idx: self.option(Self::indices)?,
            outliers: self.option(Self::extra)?,
            input_scale: self.option(|from| {
                let (scale, zero) = (from.float()?, from.u64()?.cast_signed());
                Some(StaticScale { scale, zero: i32::try_from(zero).ok()? })
            })?,
            stats: {
                let (count, sums) = (self.u64()?, [self.f64()?, self.f64()?]);
                ErrorStats::from_parts(count, sums, self.float()?)
            },
            fallback: self.option(Self::text)?,
            output_error: self.option(Self::f64)?,
            judged: self.option(|from| {
                let of = *OUTPUTS.get(usize::from(from.byte()?))?;
                let windows = if from.byte()? == 0 { Windows::Calibration } else { Windows::HeldOut };
                Some(Judgement { of, windows, solved: from.f64()?, nearest: from.f64()? })
            })?,
            notes: (0..self.len(1)?).map(|_| self.text()).collect::<Option<_>>()?,
        })
    }

    fn codes(&mut self) -> Option<Codes> {
        Some(match self.byte()? {
            0 => Codes::U8(self.bytes()?),
            1 => Codes::U16(self.numbers(u16::from_le_bytes)?),
            2 => Codes::U32(self.indices()?),
            3 => Codes::U64(self.numbers(u64::from_le_bytes)?),
            4 => Codes::Packed(self.bytes()?),
            kind @ (SIGNED | UNSIGNED) => {
                let len = usize::try_from(self.u64()?).ok()?;
                let packed = self.take(len.div_ceil(2))?;
                let mut codes = Vec::with_capacity(len + 1);
                let halves = packed.iter().flat_map(|byte| [byte & 15, byte >> 4]);
                codes.extend(halves.map(|nibble| from_nibble(nibble, kind)));
                codes.truncate(len);
                Codes::U8(codes)
            }
            _ => return None,
        })
    }

    fn level(&mut self, levels: usize) -> Option<ScaleLevel> {
        if levels == 0 {
            return None;
        }
        let codes = self.codes()?;
        let offsets = match self.byte()? {
            0 => Offsets::None,
            1 => Offsets::Zero(self.numbers(i32::from_le_bytes)?),
            2 => Offsets::Bias(self.floats()?),
            3 => Offsets::Mean(self.float()?),
            _ => return None,
        };
        let outer = self.option(|from| from.level(levels - 1).map(Box::new))?;
        Some(ScaleLevel { codes, offsets, outer })
    }

    fn extra(&mut self) -> Option<Extra> {
        Some(match self.byte()? {
            0 => Extra::Columns { index: self.indices()?, values: self.floats()? },
            1 => {
                let rank = usize::try_from(self.u64()?).ok()?;
                Extra::LowRank { rank, down: self.floats()?, up: self.floats()? }
            }
            2 => Extra::Sparse { starts: self.indices()?, index: self.indices()?, values: self.floats()? },
            _ => return None,
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests {
    use mantissa_methods::rtn;

    use super::*;

    /// Schemes with each kind of codes, scales and offsets.
    const SCHEMES: [&str; 12] = [
        "int4-g32",
        "int4-g32-asym",
        "int8-channel",
        "nvfp4",
        "mxfp4",
        "mxfp8-e4m3",
        "nf4-g64",
        "nf4-dq",
        "q4_k",
        "iq4_xs",
        "int3-g64-asym",
        "fp8-e4m3-channel",
    ];

    const SHAPE: (usize, usize) = (4, 256);

    fn solved(scheme: &Scheme) -> Solved {
        let (rows, cols) = SHAPE;
        let w: Vec<f32> = (0..rows * cols).map(|i| ((i * 37 % 101) as f32 - 50.0) / 50.0).collect();
        let (quantized, _) = rtn::quantize(scheme, &w, rows, cols, None, 1).unwrap();
        let stats = ErrorStats::of(&w, &quantized);
        Solved {
            // Each column in the first group: every format has one.
            g_idx: Some(vec![0; cols]),
            outliers: Some(Extra::Sparse { starts: vec![0, 1, 1, 1, 1], index: vec![7], values: vec![-0.0] }),
            input_scale: Some(StaticScale { scale: 0.25, zero: -3 }),
            fallback: Some("a reason".to_owned()),
            output_error: Some(f64::from_bits(0x7ff8_0000_0000_0001)),
            judged: Some(Judgement {
                of: Output::Block,
                windows: Windows::HeldOut,
                solved: 1.5,
                nearest: f64::INFINITY,
            }),
            notes: vec![String::new(), "ü".to_owned()],
            ..Solved::rounded((quantized, stats))
        }
    }

    #[test]
    fn solutions_are_read_back_bit_for_bit() {
        for name in SCHEMES {
            let scheme: Scheme = name.parse().unwrap_or_else(|error| panic!("{name}: {error}"));
            let one = solved(&scheme);
            let two = Solved { g_idx: None, outliers: None, judged: None, output_error: None, ..one.clone() };
            let all = [("m.0", &scheme, &one), ("m.1", &scheme, &two)];
            let bytes = to_bytes(all.into_iter()).unwrap_or_else(|| panic!("{name}"));
            for (module, _, expected) in all {
                let found = from_bytes(&bytes, module, (&scheme, SHAPE)).unwrap();
                assert_eq!(found.quantized, expected.quantized, "{name}");
                assert_eq!(found.stats, expected.stats);
                assert_eq!(format!("{found:?}"), format!("{expected:?}"), "{name}");
                let again = to_bytes([(module, &scheme, &found)].into_iter()).unwrap();
                assert!(again == to_bytes([(module, &scheme, expected)].into_iter()).unwrap(), "{name}");
            }
            assert!(from_bytes(&bytes, "m.2", (&scheme, SHAPE)).is_none());
            // A format that is not the planned one goes by name.
            let planned: Scheme = "int5-channel".parse().unwrap();
            let bytes = to_bytes([("m", &planned, &one)].into_iter()).unwrap_or_else(|| panic!("{name}"));
            assert_eq!(
                from_bytes(&bytes, "m", (&planned, SHAPE)).unwrap().quantized,
                one.quantized,
                "{name}"
            );
        }
    }

    #[test]
    fn parts_that_do_not_fit_are_refused() {
        let scheme: Scheme = "int4-g32".parse().unwrap();
        let one = solved(&scheme);
        let bytes = |solved: &Solved| to_bytes([("m", &scheme, solved)].into_iter()).unwrap();
        let read = |solved: &Solved, shape| from_bytes(&bytes(solved), "m", (&scheme, shape)).is_some();
        assert!(read(&one, SHAPE) && !read(&one, (256, 4)) && !read(&one, (2, 512)));
        for g_idx in [vec![8; 256], vec![0; 255]] {
            assert!(!read(&Solved { g_idx: Some(g_idx), ..one.clone() }, SHAPE));
        }
        let outliers = Extra::Columns { index: vec![256], values: vec![0.0; 4] };
        assert!(!read(&Solved { outliers: Some(outliers), ..one.clone() }, SHAPE));
    }

    #[test]
    fn codes_of_four_bits_take_half_a_byte() {
        for codes in [vec![], vec![0xf8, 7, 0], vec![15, 0, 8, 1], vec![0x10, 3], vec![0xff, 8]] {
            let mut out = Writer(Vec::new());
            out.codes(&Codes::U8(codes.clone()));
            let halved =
                codes.iter().all(|code| *code < 16) || codes.iter().all(|code| !(8..0xf8).contains(code));
            assert_eq!(out.0.len(), 9 + if halved { codes.len().div_ceil(2) } else { codes.len() });
            assert_eq!(Reader(&out.0).codes(), Some(Codes::U8(codes)));
        }
    }

    #[test]
    fn damaged_bytes_are_refused_without_a_panic() {
        let scheme: Scheme = "nvfp4".parse().unwrap();
        let one = solved(&scheme);
        let bytes = to_bytes([("m", &scheme, &one)].into_iter()).unwrap();
        for cut in 0..bytes.len() {
            assert!(from_bytes(&bytes[..cut], "m", (&scheme, SHAPE)).is_none(), "{cut}");
        }
        assert!(from_bytes(&[&bytes[..], &[0]].concat(), "m", (&scheme, SHAPE)).is_none());
        for at in 0..bytes.len() {
            for flip in [1, 0x80, 0xff] {
                let mut other = bytes.clone();
                other[at] ^= flip;
                // What is read has parts of consistent lengths.
                from_bytes(&other, "m", (&scheme, SHAPE))
                    .into_iter()
                    .for_each(|solved| drop(solved.values()));
            }
        }
    }
}
