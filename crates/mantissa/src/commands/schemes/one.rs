//! One scheme: how codes become values, what shares a scale and how it is chosen, and who multiplies and loads it.

use std::io::{self, Write};

use anyhow::Result;
use mantissa_num::format::{Affine, Format};
use mantissa_num::{Blocks, Code, RowKind, Rule, Scheme};
use mantissa_plan::contract::Cell;
use mantissa_plan::explain::sqnr;
use mantissa_plan::figures::{FIGURES, Figure};
use mantissa_quant::Recipe;
use serde::Serialize;

use super::{Row, SIDE, cache, row};
use crate::commands::losses::{Measured, print_measured};
use crate::commands::recipes::readers;
use crate::context::Context;
use crate::output::{Align, Table, labelled, number};

/// Standard deviations of the outlier of the second figure of noise.
const OUTLIER: f32 = 50.0;

#[derive(Serialize)]
struct Report {
    bits_per_weight_shape: [usize; 2],
    /// Absent for policies of the KV cache alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    scheme: Option<Details>,
    /// Absent unless the cache takes it by this name.
    #[serde(skip_serializing_if = "Option::is_none")]
    kv_cache: Option<cache::Row>,
}

/// Scheme with its formulas and uses.
#[derive(Serialize)]
struct Details {
    #[serde(flatten)]
    row: Row,
    /// How a code becomes a value.
    value: String,
    /// What a scale is and what shares it; `None` without scales.
    scales: Option<String>,
    /// Rule that chooses them.
    rule: Option<Formula>,
    /// Every rule that may be named.
    rule_formulas: Vec<Formula>,
    /// Signal to noise on normal numbers; `None` for what needs a search.
    sqnr_db: Option<f64>,
    /// The same with one value of 50 σ in each row, without it.
    sqnr_with_outlier_db: Option<f64>,
    /// Recipe that stores weights so without a calibration; `None` if none does.
    recipe: Option<String>,
    /// Checkpoint format of it.
    format: Option<&'static str>,
    /// Programs that load it; ✓ if we loaded it.
    loads_in: Option<String>,
    /// The same with the evidence.
    readers: Vec<Cell>,
    /// Measured recipes with weights in this scheme and unquantized inputs.
    measured: Vec<Measured>,
}

/// Rule with its formula.
#[derive(Serialize)]
struct Formula {
    name: String,
    formula: String,
}

/// Prints one scheme.
///
/// # Errors
/// A name that is neither a scheme nor a policy of the KV cache; standard output cannot be written.
pub fn run(name: &str, context: &Context) -> Result<()> {
    let cached = cache::rows().into_iter().find(|row| row.name.eq_ignore_ascii_case(name));
    let scheme = match name.to_lowercase().parse::<Scheme>() {
        Ok(scheme) => Some(details(&scheme)),
        Err(_) if cached.is_some() => None,
        Err(error) => return Err(error.into()),
    };
    let report = Report { bits_per_weight_shape: [SIDE, SIDE], scheme, kv_cache: cached };
    context.report(&report, |out| {
        report.scheme.iter().try_for_each(|scheme| print(scheme, out))?;
        report.kv_cache.iter().try_for_each(|row| {
            let bits =
                format!("--kv {}: {:.3} bits per element, {}", row.name, row.bits_per_element, row.about);
            labelled(out, "KV cache", &bits)
        })
    })
}

fn details(scheme: &Scheme) -> Details {
    let mut row = row(scheme);
    // Of a family's examples those that its narrower forms have too.
    row.examples.retain(|text| text.parse::<Scheme>().is_ok());
    let format = &scheme.format;
    let scaled = format.scale().is_some();
    // Only QTIP finds the states of a trellis.
    let method = if format.trellis().is_some() { "qtip" } else { "rtn" };
    let name = format!("{method}-{scheme}");
    // Tokens and heads are rows of inputs and of the KV cache.
    let weight = scheme.row == RowKind::Channel;
    let recipe = weight.then(|| Recipe::load(&name).ok()).flatten().map(|recipe| (recipe, name));
    let container = recipe.as_ref().map(|(recipe, _)| recipe.container());
    let readers =
        recipe.as_ref().zip(container).map_or_else(Vec::new, |((recipe, _), format)| readers(recipe, format));
    let loads_in = readers.iter().map(Cell::marked).collect::<Vec<_>>().join(", ");
    let db = |outlier| sqnr(&scheme.to_string(), outlier).filter(|db| db.is_finite());
    Details {
        value: value(format),
        scales: scales(scheme),
        rule: scaled.then(|| rule(scheme)).flatten(),
        rule_formulas: if scaled { formulas(scheme) } else { Vec::new() },
        sqnr_db: db(None),
        sqnr_with_outlier_db: db(Some(OUTLIER)),
        format: container.map(|container| container.name()),
        loads_in: (!readers.is_empty()).then_some(loads_in),
        recipe: recipe.map(|(_, name)| name),
        readers,
        measured: measured(scheme),
        row,
    }
}

/// Says how a code becomes a value.
fn value(format: &Format) -> String {
    let tensor = format.scale().is_some_and(|scale| scale.tensor_wide().is_some());
    match format {
        Format::Codec(id) => {
            let codec = id.codec();
            format!(
                "blocks of {} values in {} bytes, decoded as ggml does (ggml-quants.c)",
                codec.elements, codec.bytes
            )
        }
        Format::Trellis(_) => {
            "states of a trellis of rotated weights, in tiles of 16 × 16 (QTIP); no code of one weight"
                .to_owned()
        }
        Format::Table(_) => "x' = level(q) s, s the largest magnitude of the block".to_owned(),
        Format::Affine(Affine { offset, code: Code::Int(bits), .. }) if offset.is_bias() => {
            format!("x' = (q + {}) s + min", 1u32 << (bits - 1))
        }
        Format::Affine(_) if format.has_zero() => "x' = (q - z) s, z the code of 0".to_owned(),
        Format::Affine(Affine { scale: None, .. }) => "the nearest value, ties to even".to_owned(),
        Format::Affine(Affine { code: Code::Int(_), .. }) => "x' = q s".to_owned(),
        Format::Affine(_) if tensor => "x' = element · s of its block · s of the tensor".to_owned(),
        _ => "x' = element · s".to_owned(),
    }
}

/// Says what a scale is, and what shares it.
fn scales(scheme: &Scheme) -> Option<String> {
    let tree = scheme.format.scale()?;
    let shared = match (scheme.format.blocks(), scheme.row) {
        (Blocks::Tensor, _) => "the tensor".to_owned(),
        (Blocks::Row, RowKind::Channel) => "each row of a weight (output channel)".to_owned(),
        (Blocks::Row, RowKind::Token) => "each token".to_owned(),
        (Blocks::Row, RowKind::Head) => "each head of each token".to_owned(),
        (Blocks::Group(size), _) => format!("each {size} values of a row"),
        (Blocks::Tile { rows, cols }, _) => format!("each tile of {rows} × {cols}"),
        (Blocks::Flat(size), _) => format!("each {size} values of the flattened tensor"),
        (blocks, _) => format!("{blocks:?}"),
    };
    let stored = match tree.code {
        Code::E8m0 => "a power of two".to_owned(),
        Code::Float(float) => float.name.to_owned(),
        Code::Book(_) => "an 8-bit level over the mean scale (double quantization)".to_owned(),
        _ => "f32 (16 bits in checkpoints of 16-bit models)".to_owned(),
    };
    let tensor = if tree.tensor_wide().is_some() { ", and an f32 one for the tensor" } else { "" };
    Some(format!("{stored} for {shared}{tensor}"))
}

/// Returns the rule of a scheme.
fn rule(scheme: &Scheme) -> Option<Formula> {
    if let Rule::Clip(hundredths) = scheme.encoder.rule {
        let formula = format!(
            "s = {} amax / ((2^b - 1) / 2); values beyond take the outermost codes",
            f64::from(hundredths) / 100.0
        );
        return Some(Formula { name: format!("clip{hundredths}"), formula });
    }
    let variant = scheme.variant()?;
    Some(Formula { name: variant.name.to_owned(), formula: variant.formula.to_owned() })
}

/// Lists the rules that may be named.
fn formulas(scheme: &Scheme) -> Vec<Formula> {
    let of = |variant: &mantissa_num::variant::Variant| Formula {
        name: variant.name.to_owned(),
        formula: variant.formula.to_owned(),
    };
    scheme.variants().iter().map(of).collect()
}

/// Finds the measured recipes that store weights so.
fn measured(scheme: &Scheme) -> Vec<Measured> {
    let stores = |figure: &&Figure| {
        Recipe::load(figure.recipe).is_ok_and(|recipe| {
            recipe.weights == *scheme && recipe.activations.is_none() && recipe.file_type.is_none()
        })
    };
    FIGURES.iter().filter(|figure| figure.format.is_none()).filter(stores).map(Measured::from).collect()
}

fn print(scheme: &Details, out: &mut dyn Write) -> io::Result<()> {
    let row = &scheme.row;
    labelled(out, "scheme", &row.name)?;
    labelled(out, "value", &scheme.value)?;
    scheme.scales.iter().try_for_each(|scales| labelled(out, "scales", scales))?;
    if let Some(rule) = &scheme.rule {
        labelled(out, "rule", &format!("{}: {}", rule.name, rule.formula))?;
    }
    let element = row.element_bits.map_or_else(String::new, |bits| format!(", {bits} of the element"));
    labelled(out, "bits", &format!("{:.4} per weight of [{SIDE}, {SIDE}]{element}", row.bits_per_weight))?;
    if let Some(levels) = row.levels {
        let normal = row
            .smallest_normal
            .map_or_else(String::new, |least| format!(", smallest normal {}", number(Some(least), 4)));
        let range = format!(
            "elements from {} to {}, {levels} levels, smallest positive {}{normal}",
            number(row.lowest, 4),
            number(row.largest, 4),
            number(row.smallest_positive, 4)
        );
        labelled(out, "range", &range)?;
    }
    if let (Some(plain), Some(with)) = (scheme.sqnr_db, scheme.sqnr_with_outlier_db) {
        let noise = format!(
            "{plain:.1} dB on normal numbers, {with:.1} with one value of {OUTLIER:.0} σ in each row of 1024"
        );
        labelled(out, "noise", &noise)?;
    }
    labelled(out, "hardware", row.hardware)?;
    if let (Some(recipe), Some(loads)) = (&scheme.recipe, &scheme.loads_in) {
        let format = scheme.format.unwrap_or_default();
        labelled(out, "recipe", &format!("{recipe}, as {format}; loads in {loads}"))?;
    }
    if scheme.rule_formulas.len() > 1 {
        writeln!(
            out,
            "\nRules, the default first (b: bits; range of a block: min, max, largest magnitude amax):"
        )?;
        let mut table = Table::new([("rule", Align::Left), ("scale s", Align::Left)]);
        scheme.rule_formulas.iter().for_each(|rule| table.row([rule.name.clone(), rule.formula.clone()]));
        table.write(out)?;
    }
    print_measured(&scheme.measured, out)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn of(name: &str) -> Details {
        details(&name.parse().unwrap())
    }

    #[test]
    fn a_scheme_has_its_formulas_and_uses() {
        let found = of("int4-g128");
        assert_eq!(found.value, "x' = q s");
        assert!(found.scales.unwrap().ends_with("for each 128 values of a row"));
        let rule = found.rule.unwrap();
        assert!(rule.name == "full" && rule.formula.starts_with("s = amax / ((2^b - 1) / 2)"));
        assert_eq!(found.rule_formulas.len(), 4);
        assert_eq!(
            (found.recipe.as_deref(), found.format),
            (Some("rtn-int4-g128"), Some("compressed-tensors"))
        );
        assert!(found.loads_in.unwrap().contains("vLLM"));
        let measured = |recipe: &str| found.measured.iter().any(|row| row.recipe == recipe);
        assert!(measured("gptq-int4-g128") && measured("rtn-int4-g128") && !measured("gptq-int4-g32"));
        assert!(found.sqnr_db.unwrap() > found.sqnr_with_outlier_db.unwrap());
    }

    #[test]
    fn every_kind_of_scheme_is_described() {
        for (name, value, scales) in [
            ("int4-g128-asym", "(q - z) s", Some("each 128")),
            ("int8-g64-asym:minmax", "(q + 128) s + min", Some("each 64")),
            ("int4-token:clip90", "q s", Some("each token")),
            ("nvfp4", "s of the tensor", Some("f32 one for the tensor")),
            ("mxfp4", "element · s", Some("power of two")),
            ("fp8-e4m3-t128x128", "element · s", Some("128 × 128")),
            ("nf4-dq", "level(q) s", Some("double quantization")),
            ("q4_k", "256 values in 144 bytes", None),
            ("trellis2", "trellis", None),
            ("bf16", "nearest value", None),
            ("f64", "nearest value", None),
        ] {
            let found = of(name);
            assert!(found.value.contains(value), "{name}: {}", found.value);
            let stated = found.scales.as_deref();
            assert!(
                scales.map_or(stated.is_none(), |part| stated.unwrap().contains(part)),
                "{name}: {stated:?}"
            );
            assert!(found.row.examples.iter().all(|text| text.parse::<Scheme>().is_ok()), "{name}");
        }
        assert_eq!(of("int4-token:clip90").rule.unwrap().name, "clip90");
        assert_eq!((of("q4_k").format, of("int8-head").recipe), (Some("gguf"), None));
        assert_eq!(of("trellis2").recipe.as_deref(), Some("qtip-trellis2"));
    }
}
