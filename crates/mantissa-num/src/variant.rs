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

const fn variant(name: &'static str, rule: Rule) -> Variant {
    Variant { name, rule, stored: Part::Any }
}

const fn offset(name: &'static str, rule: Rule, offset: Offset) -> Variant {
    Variant { name, rule, stored: Part::Offset(offset) }
}

const fn tiles(name: &'static str, rule: Rule, powers_of_two: bool) -> Variant {
    Variant { name, rule, stored: Part::PowersOfTwo(powers_of_two) }
}

const fn nvfp4(name: &'static str, rule: Rule, global: Option<Sense>, tiles: bool) -> Variant {
    Variant { name, rule, stored: Part::Nvfp4(global, tiles) }
}

const PLAIN: [Variant; 1] = [variant("amax", Rule::Amax)];

const SYMMETRIC: [Variant; 4] = [
    variant("full", Rule::Full),
    variant("restricted", Rule::Restricted),
    variant("torchao", Rule::Torchao),
    variant("no-clipping-err", Rule::NoClippingErr),
];

const ASYMMETRIC: [Variant; 3] = [
    offset("ct", Rule::Ct, Offset::Zero),
    offset("torchao", Rule::Torchao, Offset::Zero),
    offset("minmax", Rule::MinMax, Offset::Bias),
];

const TERNARY: [Variant; 2] = [variant("absmean", Rule::AbsMean), variant("amax", Rule::Amax)];

const TILES: [Variant; 5] = [
    tiles("amax", Rule::Amax, false),
    tiles("floor1e-4", Rule::Floor1e4, false),
    tiles("floor1e-12", Rule::Floor1e12, false),
    tiles("deepseek-v3", Rule::DeepSeekV3, false),
    tiles("ue8m0", Rule::Floor1e4, true),
];

const MICROSCALED: [Variant; 7] = [
    variant("floor", Rule::Floor),
    variant("ceil", Rule::Ceil),
    variant("even", Rule::Even),
    variant("rceil", Rule::Rceil),
    variant("torchao-rceil", Rule::TorchaoRceil),
    variant("ct", Rule::Ct),
    variant("deepgemm", Rule::DeepGemm),
];

const FP4: [Variant; 2] = [variant("amax", Rule::Amax), variant("deepgemm", Rule::DeepGemm)];

const NVFP4: [Variant; 6] = [
    nvfp4("ct", Rule::Ct, Some(Sense::Divisor), false),
    nvfp4("te", Rule::Te, Some(Sense::Amax { full_scale: 6 * 448 }), false),
    nvfp4("torchao", Rule::Torchao, Some(Sense::Multiplier), false),
    nvfp4("torchao-1level", Rule::Torchao, None, false),
    nvfp4("te-2d", Rule::Te, Some(Sense::Amax { full_scale: 6 * 448 }), true),
    nvfp4("4over6", Rule::FourOverSix, Some(Sense::Amax { full_scale: FOUR_OVER_SIX_SCALE }), false),
];

const STATE_MAPS: [Variant; 2] = [variant("nearest", Rule::Nearest), variant("cpu", Rule::Cpu)];

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
