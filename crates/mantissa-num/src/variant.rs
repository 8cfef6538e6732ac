//! Named variants of a scheme: the meaning of `:NAME` in the [grammar](crate::grammar).
//!
//! A producer's name may determine how its files decode (the global scale of NVFP4), how codes are chosen, or both. A
//! [`Variant`] names both parts; the format keeps the first and the encoder rule the second.

use crate::format::{Affine, Blocks, Code, Format, Offset, Sense, Table};
use crate::minifloat::{E2M1, E4M3};
use crate::scheme::{FOUR_OVER_SIX_SCALE, Rule, Scheme};

/// Name after the colon: a producer's storage and its choice of scales and codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Variant {
    /// Name in the grammar.
    pub name: &'static str,
    /// Encoder rule.
    pub rule: Rule,
    /// Formula of the scale `s` of a block, in words where they are shorter. `b` are the bits of an integer; the range is that of
    /// the block: its `min`, `max` and largest magnitude `amax`.
    pub formula: &'static str,
    stored: Part,
}

/// Part of the format that a variant determines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    /// Nothing.
    Any,
    /// Offset of asymmetric integers.
    Offset(Offset),
    /// Scales of tiles: E8M0 or a wider code.
    PowersOfTwo(bool),
    /// NVFP4: meaning of the global scale, and true if a scale covers 16 × 16 elements.
    Nvfp4(Option<Sense>, bool),
}

const fn variant(name: &'static str, rule: Rule, formula: &'static str) -> Variant {
    Variant { name, rule, formula, stored: Part::Any }
}

const fn offset(name: &'static str, rule: Rule, formula: &'static str, offset: Offset) -> Variant {
    Variant { stored: Part::Offset(offset), ..variant(name, rule, formula) }
}

const fn tiles(name: &'static str, rule: Rule, formula: &'static str, powers_of_two: bool) -> Variant {
    Variant { stored: Part::PowersOfTwo(powers_of_two), ..variant(name, rule, formula) }
}

const fn nvfp4(
    name: &'static str,
    rule: Rule,
    formula: &'static str,
    global: Option<Sense>,
    tiles: bool,
) -> Variant {
    Variant { stored: Part::Nvfp4(global, tiles), ..variant(name, rule, formula) }
}

const PLAIN: [Variant; 1] = [variant("amax", Rule::Amax, "s = amax / largest element")];

const SYMMETRIC: [Variant; 4] = [
    variant("full", Rule::Full, "s = amax / ((2^b - 1) / 2), codes from -2^(b-1) to 2^(b-1) - 1"),
    variant(
        "restricted",
        Rule::Restricted,
        "s = amax / (2^(b-1) - 1), codes up to 2^(b-1) - 1 of both signs",
    ),
    variant("torchao", Rule::Torchao, "s = amax / ((2^b - 1) / 2), and x is multiplied by 1 / s"),
    variant(
        "no-clipping-err",
        Rule::NoClippingErr,
        "s = the larger of min / -2^(b-1) and max / (2^(b-1) - 1), and x is multiplied by 1 / s",
    ),
];

const ASYMMETRIC: [Variant; 3] = [
    offset(
        "ct",
        Rule::Ct,
        "s = (max - min) / (2^b - 1) of the range with 0, z = round(-2^(b-1) - min / s), added before rounding",
        Offset::Zero,
    ),
    offset(
        "torchao",
        Rule::Torchao,
        "s = (max - min) / (2^b - 1) of the range with 0, z = -2^(b-1) - round(min / s), added after rounding",
        Offset::Zero,
    ),
    offset(
        "minmax",
        Rule::MinMax,
        "s = (max - min) / (2^b - 1), and min is stored in place of a zero point",
        Offset::Bias,
    ),
];

const TERNARY: [Variant; 2] =
    [variant("absmean", Rule::AbsMean, "s = mean magnitude"), variant("amax", Rule::Amax, "s = amax")];

const TILES: [Variant; 5] = [
    tiles("amax", Rule::Amax, "s = amax / largest element", false),
    tiles(
        "floor1e-4",
        Rule::Floor1e4,
        "s = max(amax, 1e-4) / largest element, and x is multiplied by 1 / s",
        false,
    ),
    tiles(
        "floor1e-12",
        Rule::Floor1e12,
        "1 / s = largest element / max(amax, 1e-12), by which x is multiplied",
        false,
    ),
    tiles("deepseek-v3", Rule::DeepSeekV3, "s = max(amax, 1e-4) / largest element", false),
    tiles("ue8m0", Rule::Floor1e4, "s = 2^ceil(log2(max(amax, 1e-4) / largest element))", true),
];

const MICROSCALED: [Variant; 7] = [
    variant(
        "floor",
        Rule::Floor,
        "s = 2^(floor(log2 amax) - e), e the exponent of the largest element; values beyond it are clipped",
    ),
    variant("ceil", Rule::Ceil, "s = 2^(ceil(log2 amax) - e), e the exponent of the largest element"),
    variant("even", Rule::Even, "as floor, of amax plus half a unit of an element's last mantissa bit"),
    variant("rceil", Rule::Rceil, "s = 2^ceil(log2(amax / largest element)): nothing is clipped"),
    variant("torchao-rceil", Rule::TorchaoRceil, "as rceil, with the logarithm rounded to f32"),
    variant("ct", Rule::Ct, "as even, with 3 mantissa bits for elements of 6 bits and 1 for others"),
    variant(
        "deepgemm",
        Rule::DeepGemm,
        "s = 2^ceil(log2(max(amax, 1e-4) / largest element)), halves rounded toward 0",
    ),
];

const FP4: [Variant; 2] = [
    variant("amax", Rule::Amax, "s = amax / 6"),
    variant("deepgemm", Rule::DeepGemm, "s = max(amax, 1e-4) / 6, halves rounded toward 0"),
];

const NVFP4: [Variant; 6] = [
    nvfp4(
        "ct",
        Rule::Ct,
        "s = E4M3(g amax / 6) / g, g = 2688 / amax of the tensor, stored as a divisor",
        Some(Sense::Divisor),
        false,
    ),
    nvfp4(
        "te",
        Rule::Te,
        "s = E4M3(g amax / 6) / g, g = 2688 / amax of the tensor, whose amax is stored",
        Some(Sense::Amax { full_scale: 6 * 448 }),
        false,
    ),
    nvfp4(
        "torchao",
        Rule::Torchao,
        "s = E4M3(amax / 6 / g) g, the block's factor at least 2^-6, g = amax of the tensor / 2688",
        Some(Sense::Multiplier),
        false,
    ),
    nvfp4(
        "torchao-1level",
        Rule::Torchao,
        "s = E4M3(amax / 6), at least 2^-6, without a scale of the tensor",
        None,
        false,
    ),
    nvfp4(
        "te-2d",
        Rule::Te,
        "as te, with one scale for 16 × 16 elements",
        Some(Sense::Amax { full_scale: 6 * 448 }),
        true,
    ),
    nvfp4(
        "4over6",
        Rule::FourOverSix,
        "as te with 1536 for 2688; of the scales that take amax to 6 and to 4 the one with the smaller squared error",
        Some(Sense::Amax { full_scale: FOUR_OVER_SIX_SCALE }),
        false,
    ),
];

const STATE_MAPS: [Variant; 2] = [
    variant("nearest", Rule::Nearest, "s = amax, and the nearest level of x / s"),
    variant("cpu", Rule::Cpu, "s = amax, and the level that bitsandbytes' table finds for x / s"),
];

impl Variant {
    /// True if this variant's producer stores `format`.
    pub fn stores(&self, format: &Format) -> bool {
        let mut own = format.clone();
        self.write(&mut own);
        own == *format
    }

    /// Converts a format of the family to the one that the variant stores.
    fn write(&self, format: &mut Format) {
        match (self.stored, &mut *format) {
            // A variant fixes the kind of offset, not its dtype.
            (Part::Offset(Offset::Bias), Format::Affine(affine)) if affine.offset.is_bias() => {}
            (Part::Offset(offset), Format::Affine(affine)) => affine.offset = offset,
            (Part::PowersOfTwo(wanted), Format::Affine(Affine { scale: Some(scale), .. })) => match wanted {
                true => scale.code = Code::E8m0,
                false if scale.code == Code::E8m0 => scale.code = Code::F32,
                false => {}
            },
            (Part::Nvfp4(global, tiles), _) => {
                *format = Scheme::nvfp4(global).format;
                if let (true, Format::Affine(affine)) = (tiles, format) {
                    affine.blocks = Blocks::Tile { rows: 16, cols: 16 };
                }
            }
            _ => {}
        }
    }
}

impl Scheme {
    /// Variants of this scheme's family, the default first; only `:amax` if there is no choice.
    pub fn variants(&self) -> &'static [Variant] {
        match &self.format {
            Format::Affine(affine) => affine_variants(affine),
            Format::Table(Table { book, .. }) if book.is_state_map() => &STATE_MAPS,
            Format::Table(_) | Format::Codec(_) | Format::Trellis(_) => &PLAIN,
        }
    }

    /// Variant of this scheme, by its format and rule. `None` if no name describes both.
    pub fn variant(&self) -> Option<&'static Variant> {
        let rule = self.encoder.rule;
        self.variants().iter().find(|variant| variant.rule == rule && variant.stores(&self.format))
    }

    /// The same scheme in variant `name`; `None` if the family has no such variant.
    pub fn with_variant(mut self, name: &str) -> Option<Self> {
        let variant = self.variants().iter().find(|variant| variant.name == name)?;
        self.encoder.rule = variant.rule;
        variant.write(&mut self.format);
        Some(self)
    }
}

/// True for E2M1 elements under E4M3 scales, with any levels above.
pub(crate) fn is_nvfp4(affine: &Affine) -> bool {
    let scale = affine.scale.as_ref().map(|scale| scale.code);
    affine.code == Code::Float(E2M1) && scale == Some(Code::Float(E4M3))
}

fn affine_variants(affine: &Affine) -> &'static [Variant] {
    let Some(scale) = &affine.scale else { return &PLAIN };
    if is_nvfp4(affine) {
        return &NVFP4;
    }
    match (affine.code, affine.offset, scale.code, affine.blocks) {
        (Code::Int(_), Offset::None, ..) => &SYMMETRIC,
        (Code::Int(_), ..) => &ASYMMETRIC,
        (Code::Ternary, ..) => &TERNARY,
        (_, _, _, Blocks::Tile { .. }) => &TILES,
        (Code::Float(E2M1), _, Code::E8m0, _) => &MICROSCALED,
        // `:deepgemm` applies only to FP4.
        (_, _, Code::E8m0, _) => &MICROSCALED[..6],
        (Code::Float(E2M1), ..) => &FP4,
        _ => &PLAIN,
    }
}
