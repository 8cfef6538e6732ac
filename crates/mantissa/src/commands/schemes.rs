//! `mantissa schemes`: lists number formats with their properties and hardware support, or shows one.

mod cache;
mod hardware;
mod one;

use std::collections::HashSet;
use std::io::{self, Write};

use anyhow::Result;
use mantissa_num::format::{Affine, Format, ScaleTree};
use mantissa_num::grammar::catalogue;
use mantissa_num::minifloat::TF32;
use mantissa_num::pack::sign_extend;
use mantissa_num::{Code, Scheme, e8m0};
use serde::Serialize;

use super::execute::Execute;
use crate::context::Context;
use crate::help::Group;
use crate::output::{Align, Table, number, paragraph};

/// Rows and columns of the weight for which bits per weight are given.
const SIDE: usize = 4096;

// The text is terminal help, not a page with links.
#[allow(rustdoc::broken_intra_doc_links)]
/// List number formats: bits, range, rules, hardware
///
/// A scheme is ELEMENT[-GRANULARITY][-sym|-asym][:RULE], or a named format. Ranges are those of the elements,
/// before scaling. Bits per weight count scales and zero points of a [4096, 4096] weight. Block types and
/// trellises have no codes of single elements. Schemes of the KV cache alone have a table of their own.
#[derive(clap::Args)]
#[command(after_help = "EXAMPLES
  mantissa schemes
  mantissa schemes int4-g128-asym
  mantissa schemes --json")]
pub struct Args {
    /// One scheme, such as int4-g128
    ///
    /// Shows how codes become values, the formula of each rule for scales, measured losses, and the programs that load weights
    /// in it.
    scheme: Option<String>,
}

#[derive(Serialize)]
struct Report {
    bits_per_weight_shape: [usize; 2],
    schemes: Vec<Row>,
    /// Schemes of the KV cache alone, and the usual ones of the grammar for it.
    kv_cache: Vec<cache::Row>,
}

/// Number format.
#[derive(Serialize)]
struct Row {
    name: String,
    /// Example scheme names of this family.
    examples: Vec<String>,
    /// Bits of an element's code; this and the following fields but `bits_per_weight` are `None` for block types and
    /// trellises, whose elements have no codes of their own.
    element_bits: Option<u32>,
    bits_per_weight: f64,
    /// Largest finite element.
    largest: Option<f64>,
    /// Smallest (most negative) finite element.
    lowest: Option<f64>,
    /// Smallest positive normal number; `None` if elements are not floats.
    smallest_normal: Option<f64>,
    /// Smallest positive subnormal number; `None` if elements are not floats.
    smallest_subnormal: Option<f64>,
    /// Smallest positive element of any kind.
    smallest_positive: Option<f64>,
    /// Number of distinct finite values of an element; the two zeros count once.
    levels: Option<u64>,
    /// Largest and smallest positive value with the largest and smallest power-of-two scale.
    range_with_scale: Option<[f64; 2]>,
    /// Rules, the default first; empty if there is no choice.
    rules: Vec<&'static str>,
    hardware: &'static str,
}

impl Execute for Args {
    const GROUP: Group = Group::Start;
    const CEILING: bool = false;

    /// # Errors
    /// A name that is no scheme; standard output cannot be written.
    fn run(&self, context: &Context) -> Result<()> {
        if let Some(name) = &self.scheme {
            return one::run(name, context);
        }
        let schemes = catalogue().into_iter().chain(trellises()).map(|scheme| row(&scheme)).collect();
        let report = Report { bits_per_weight_shape: [SIDE, SIDE], schemes, kv_cache: cache::rows() };
        context.report(&report, |out| {
            print(&report.schemes, out)?;
            cache::print(&report.kv_cache, out)
        })
    }
}

/// Trellises of whole bits, which QTIP solves for.
fn trellises() -> impl Iterator<Item = Scheme> {
    (1..=8).filter_map(|bits| format!("trellis{bits}").parse().ok())
}

fn row(scheme: &Scheme) -> Row {
    let values = Values::of(&scheme.format);
    let name = scheme.to_string();
    Row {
        examples: examples(scheme, &name),
        element_bits: Some(scheme.format.code_bits()).filter(|&bits| bits > 0),
        bits_per_weight: scheme.format.bits_per_weight(SIDE, SIDE),
        largest: values.largest,
        lowest: values.lowest,
        smallest_normal: values.smallest_normal,
        smallest_subnormal: values.smallest_normal.and(values.smallest_positive),
        smallest_positive: values.smallest_positive,
        levels: values.levels,
        range_with_scale: range_with_scale(scheme, &values),
        rules: scheme.variants().iter().map(|variant| variant.name).collect(),
        hardware: hardware::native(&scheme.format),
        name,
    }
}

/// Values that the elements of a format can take.
#[derive(Default)]
struct Values {
    largest: Option<f64>,
    lowest: Option<f64>,
    smallest_normal: Option<f64>,
    smallest_positive: Option<f64>,
    levels: Option<u64>,
}

impl Values {
    fn of(format: &Format) -> Self {
        match format {
            Format::Affine(Affine { code: Code::F64, .. }) => {
                Self::of_float(f64::MAX, f64::MIN_POSITIVE, f64::from_bits(1), 0x7ff0_0000_0000_0000)
            }
            Format::Affine(Affine { code: Code::F32, .. }) => {
                let [largest, normal, least] =
                    [f32::MAX, f32::MIN_POSITIVE, f32::from_bits(1)].map(f64::from);
                Self::of_float(largest, normal, least, 0x7f80_0000)
            }
            Format::Affine(Affine { code: Code::Tf32, .. }) => {
                let [largest, normal, least] =
                    [TF32.max(), TF32.min_normal(), TF32.min_subnormal()].map(f64::from);
                Self::of_float(largest, normal, least, u64::from(TF32.max_code()) + 1)
            }
            Format::Affine(_) | Format::Table(_) => Self::enumerated(format),
            _ => Self::default(),
        }
    }

    /// Describes a float with `magnitudes` finite codes per sign.
    fn of_float(largest: f64, normal: f64, least: f64, magnitudes: u64) -> Self {
        Values {
            largest: Some(largest),
            lowest: Some(-largest),
            smallest_normal: Some(normal),
            smallest_positive: Some(least),
            levels: Some(2 * magnitudes - 1),
        }
    }

    /// Describes a format of at most 16 bits by enumerating its codes.
    fn enumerated(format: &Format) -> Self {
        let bits = format.code_bits();
        // Integer codes are stored sign-extended.
        let signed = matches!(format, Format::Affine(Affine { code: Code::Int(_), .. }));
        let code = |c: u32| if signed { sign_extend(c as u8, bits).into() } else { c };
        // Ternary codes are -1, 0 and 1, the last two's complement: a fourth pattern of their two bits is not used.
        let codes: Vec<u32> = match format {
            Format::Affine(Affine { code: Code::Ternary, .. }) => vec![0xff, 0, 1],
            _ => (0..1u32 << bits).map(code).collect(),
        };
        let finite = || codes.iter().map(|&c| format.element(c)).filter(|v| v.is_finite());
        // Adding zero turns -0 into 0.
        let distinct: HashSet<u32> = finite().map(|v| (v + 0.0).to_bits()).collect();
        Values {
            largest: finite().reduce(f32::max).map(f64::from),
            lowest: finite().reduce(f32::min).map(f64::from),
            smallest_normal: match format {
                Format::Affine(Affine { code: Code::Float(float), .. }) => Some(float.min_normal().into()),
                _ => None,
            },
            smallest_positive: finite().filter(|&v| v > 0.0).reduce(f32::min).map(f64::from),
            levels: Some(distinct.len() as u64),
        }
    }
}

/// Returns the range of a block with an E8M0 scale: 2^-127 to 2^127 times the element's.
fn range_with_scale(scheme: &Scheme, values: &Values) -> Option<[f64; 2]> {
    let Some(ScaleTree { code: Code::E8m0, .. }) = scheme.format.scale() else { return None };
    let times = |element: f64, code: u8| element * f64::from(e8m0::decode(code));
    Some([times(values.largest?, 254), times(values.smallest_positive?, 0)])
}

/// Returns schemes of the same element with other granularities and another rule.
fn examples(scheme: &Scheme, name: &str) -> Vec<String> {
    let element = name.split("-g").next().unwrap_or(name);
    let mut texts = vec![name.to_owned()];
    match &scheme.format {
        Format::Table(table) if table.scale.nested().is_none() => texts.push(format!("{element}-g128")),
        Format::Affine(Affine { code: Code::Int(_), .. }) => {
            texts.extend(["channel", "g32-asym", "token@static"].map(|rest| format!("{element}-{rest}")));
        }
        Format::Affine(Affine { code: Code::Float(float), scale: None, .. }) if float.bits() <= 8 => {
            texts.extend(["tensor", "channel", "t128x128"].map(|rest| format!("{element}-{rest}")));
        }
        Format::Trellis(_) => texts.push(format!("{name}-channel")),
        _ => {}
    }
    let other = scheme.variants().get(1);
    texts.extend(other.map(|variant| format!("{name}:{}", variant.name)));
    texts
}

fn print(rows: &[Row], out: &mut dyn Write) -> io::Result<()> {
    print_formats(rows, out)?;
    print_scaled(rows, out)?;
    writeln!(out)?;
    let mut table = Table::new([("scheme", Align::Left), ("native matmul support", Align::Left)]);
    rows.iter().for_each(|row| table.row([row.name.clone(), row.hardware.into()]));
    table.write(out)?;
    writeln!(out)?;
    let mut table = Table::new([("scheme", Align::Left), ("examples", Align::Left)]);
    rows.iter()
        .filter(|row| row.examples.len() > 1)
        .for_each(|row| table.row([row.name.clone(), row.examples.join(" ")]));
    table.write(out)
}

fn print_formats(rows: &[Row], out: &mut dyn Write) -> io::Result<()> {
    let mut table = Table::new([
        ("scheme", Align::Left),
        ("element bits", Align::Right),
        ("bits/weight", Align::Right),
        ("largest", Align::Right),
        ("smallest normal", Align::Right),
        ("smallest subnormal", Align::Right),
        ("levels", Align::Right),
        ("rules", Align::Left),
    ])
    .optional(["levels", "smallest subnormal", "element bits", "smallest normal"]);
    for row in rows {
        table.row([
            row.name.clone(),
            row.element_bits.map_or_else(|| "-".into(), |bits| bits.to_string()),
            format!("{:.4}", row.bits_per_weight),
            number(row.largest, 4),
            number(row.smallest_normal, 4),
            number(row.smallest_subnormal, 4),
            row.levels.map_or_else(|| "-".into(), |n| n.to_string()),
            row.rules.join(" "),
        ]);
    }
    table.write(out)?;
    paragraph(
        out,
        2,
        "bits/weight of int8 to ternary: with f32 scales, as mantissa cast and KV caches store them; files of quantize hold 16-bit ones, so that recipes and fit count 1/8 less in groups of 128 (4.125 for int4-g128)",
    )
}

fn print_scaled(rows: &[Row], out: &mut dyn Write) -> io::Result<()> {
    writeln!(out, "\nRange of a block with its power-of-two scale (2^-127 to 2^127):")?;
    let mut table =
        Table::new([("scheme", Align::Left), ("largest", Align::Right), ("smallest positive", Align::Right)]);
    for row in rows {
        if let Some([largest, smallest]) = row.range_with_scale {
            table.row([row.name.clone(), number(Some(largest), 4), number(Some(smallest), 4)]);
        }
    }
    table.write(out)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn find(name: &str) -> Row {
        row(&name.parse().unwrap())
    }

    #[test]
    fn levels_and_limits_are_the_published_ones() {
        // Values from OCP FP8 1.0 table 1, OCP MX 1.0 tables 1 to 6, and IEEE 754 binary16.
        let cases = [
            ("fp8-e4m3", 448.0, Some(2f64.powi(-6)), Some(2f64.powi(-9)), 253),
            ("fp8-e5m2", 57344.0, Some(2f64.powi(-14)), Some(2f64.powi(-16)), 247),
            ("fp6-e3m2", 28.0, Some(0.25), Some(0.0625), 63),
            ("fp6-e2m3", 7.5, Some(1.0), Some(0.125), 63),
            ("mxfp4", 6.0, Some(1.0), Some(0.5), 15),
            ("nvfp4", 6.0, Some(1.0), Some(0.5), 15),
            ("f16", 65504.0, Some(2f64.powi(-14)), Some(2f64.powi(-24)), 63487),
            ("int4-g128", 7.0, None, None, 16),
            ("mxint8", 127.0 / 64.0, None, None, 256),
            ("nf4", 1.0, None, None, 16),
            ("fp4-bnb", 1.0, None, None, 15),
            ("ternary-g128", 1.0, None, None, 3),
        ];
        for (name, largest, normal, subnormal, levels) in cases {
            let row = find(name);
            assert_eq!(
                (row.largest, row.smallest_normal, row.smallest_subnormal),
                (Some(largest), normal, subnormal),
                "{name}"
            );
            assert_eq!(row.levels, Some(levels), "{name}");
        }
    }

    #[test]
    fn block_types_and_trellises_have_no_element_codes() {
        for (name, bits) in [("q4_k", 4.5), ("iq1_s", 1.5625), ("trellis2", 2.0)] {
            let row = find(name);
            assert_eq!((row.element_bits, row.largest, row.levels), (None, None, None), "{name}");
            assert!((row.bits_per_weight - bits).abs() < 0.02, "{name}: {}", row.bits_per_weight);
        }
        assert_eq!(find("ternary-g128").element_bits, Some(2));
        assert_eq!(trellises().count(), 8);
    }

    #[test]
    fn every_example_is_a_scheme() {
        for scheme in catalogue().into_iter().chain(trellises()) {
            for text in row(&scheme).examples {
                assert!(text.parse::<Scheme>().is_ok(), "{text}");
            }
        }
    }

    #[test]
    fn scales_are_counted_and_widen_the_range() {
        assert_eq!(find("mxfp4").bits_per_weight, 4.25);
        assert_eq!(find("nf4").bits_per_weight, 4.5);
        assert_eq!(find("int4-g128").bits_per_weight, 4.25);
        assert_eq!(find("mxfp4").range_with_scale, Some([6.0 * 2f64.powi(127), 2f64.powi(-128)]));
        assert_eq!(find("nvfp4").range_with_scale, None);
    }
}
