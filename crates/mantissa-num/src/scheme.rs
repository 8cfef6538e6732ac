//! `Scheme`: what a user names - a [`Format`], how a writer chooses its codes, and when scales are taken.

use crate::format::{Affine, Blocks, Code, Format, Offset, ScaleTree, Sense, Table};
use crate::round::Rounding;

/// How a writer picks a block's scale and codes, where public implementations differ. `golden/README.md` of the reference
/// data lists the formulas; [`blockwise`](crate::blockwise) implements them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Rule {
    /// `scale = amax / max_element`: scaled floats and code books.
    Amax,
    /// Shared exponent `floor(log2 amax) - emax` (OCP Microscaling v1.0, section 6.3).
    Floor,
    /// The floor exponent plus one unless amax is a power of two.
    Ceil,
    /// amax rounded to the element's mantissa before the floor.
    Even,
    /// `2^ceil(log2(amax / max_element))`, exact (what `cvt.rp` to UE8M0 and Transformer Engine compute).
    Rceil,
    /// [`Rule::Rceil`] as torchao computes it eagerly: f32 logarithm, and no scaling at all where the code is 0.
    TorchaoRceil,
    /// compressed-tensors.
    Ct,
    /// Transformer Engine.
    Te,
    /// Symmetric integers over the whole code range: `scale = amax / ((2^b - 1) / 2)`.
    Full,
    /// Symmetric integers without the most negative code: `scale = max(amax, 1e-5) / (2^(b-1) - 1)`.
    Restricted,
    /// torchao: multiplies by the reciprocal of the scale, and adds the zero point after rounding.
    Torchao,
    /// torchao's `SYMMETRIC_NO_CLIPPING_ERR`: `scale = max(min / qmin, max / qmax)`.
    NoClippingErr,
}

impl Rule {
    /// Every rule with its name in the grammar. [`Rule::Amax`] has no text: it is the only rule where it applies.
    pub const NAMES: [(Rule, &'static str); 11] = [
        (Rule::Floor, "floor"),
        (Rule::Ceil, "ceil"),
        (Rule::Even, "even"),
        (Rule::Rceil, "rceil"),
        (Rule::TorchaoRceil, "torchao-rceil"),
        (Rule::Ct, "ct"),
        (Rule::Te, "te"),
        (Rule::Full, "full"),
        (Rule::Restricted, "restricted"),
        (Rule::Torchao, "torchao"),
        (Rule::NoClippingErr, "no-clipping-err"),
    ];

    /// Name in the grammar.
    pub fn name(self) -> Option<&'static str> {
        Self::NAMES.iter().find(|(rule, _)| *rule == self).map(|(_, name)| *name)
    }
}

/// What a writer decides and a reader never needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Encoder {
    /// How scales and codes are chosen.
    pub rule: Rule,
    /// How values become codes.
    pub rounding: Rounding,
}

/// When a scale is taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Source {
    /// Beforehand, from calibration; stored with the model.
    Static,
    /// From the tensor being quantized.
    #[default]
    Dynamic,
}

/// What a row is called where a scale belongs to each: no effect on bits, but `int8-channel` is a weight's and
/// `int8-token` an activation's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum RowName {
    /// An output channel of a weight.
    #[default]
    Channel,
    /// A token of an activation.
    Token,
    /// A head's vector in a KV cache.
    Head,
}

/// A way of storing a tensor, as a user names it. Parses from and prints to text: see [`grammar`](crate::grammar).
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Scheme {
    /// What a reader needs.
    pub format: Format,
    /// What the writer decides.
    pub encoder: Encoder,
    /// When scales are taken.
    pub source: Source,
    /// What a row is called.
    pub row: RowName,
}

impl Scheme {
    /// `format` written by `rule`, nearest-even, dynamic.
    pub fn new(format: Format, rule: Rule) -> Self {
        let encoder = Encoder { rule, rounding: Rounding::NearestEven };
        Scheme { format, encoder, source: Source::Dynamic, row: RowName::Channel }
    }

    /// A plain cast.
    pub fn plain(code: Code) -> Self {
        Self::new(Format::plain(code), Rule::Amax)
    }

    /// Symmetric integers of 2 to 8 bits with an f32 scale per block.
    pub fn int_symmetric(bits: u32, blocks: Blocks) -> Self {
        Self::new(scaled(Code::Int(bits), blocks, ScaleTree::leaf(Code::F32), Offset::None), Rule::Full)
    }

    /// Asymmetric integers of 2 to 8 bits with an f32 scale and a zero point per block.
    pub fn int_asymmetric(bits: u32, blocks: Blocks) -> Self {
        Self::new(scaled(Code::Int(bits), blocks, ScaleTree::leaf(Code::F32), Offset::Zero), Rule::Ct)
    }

    /// Floating-point elements with an f32 scale per block.
    pub fn scaled_float(code: Code, blocks: Blocks) -> Self {
        Self::new(scaled(code, blocks, ScaleTree::leaf(Code::F32), Offset::None), Rule::Amax)
    }

    /// OCP Microscaling: groups of 32 with an E8M0 scale.
    pub fn mx(code: Code) -> Self {
        let format = scaled(code, Blocks::Group(32), ScaleTree::leaf(Code::E8m0), Offset::None);
        Self::new(format, Rule::Floor)
    }

    /// NVFP4: groups of 16 E2M1 elements, an E4M3 scale each, an f32 scale for the tensor. `rule` is [`Rule::Ct`] or
    /// [`Rule::Te`]; they store different global scales and so are different formats.
    pub fn nvfp4(rule: Rule) -> Self {
        let sense = if rule == Rule::Te { Sense::Amax { full_scale: 2688 } } else { Sense::Divisor };
        let global = ScaleTree { code: Code::F32, sense, outer: None };
        let scale = ScaleTree {
            code: Code::Float(crate::minifloat::E4M3),
            sense: Sense::Multiplier,
            outer: Some((Blocks::Tensor, Box::new(global))),
        };
        let element = Code::Float(crate::minifloat::E2M1);
        Self::new(scaled(element, Blocks::Group(16), scale, Offset::None), rule)
    }

    /// A code book over flat blocks with an f32 amax each, as bitsandbytes stores NF4.
    pub fn table(book: crate::codebook::Book, block: u32) -> Self {
        let format =
            Format::Table(Table { book, blocks: Blocks::Flat(block), scale: ScaleTree::leaf(Code::F32) });
        Self::new(format, Rule::Amax)
    }

    /// The rules that may be named for this scheme's family, the default first. [`Rule::Amax`] alone where nothing can
    /// be chosen.
    pub fn rules(&self) -> &'static [Rule] {
        match &self.format {
            Format::Affine(Affine { code: Code::Int(_), offset: Offset::Zero, .. }) => {
                &[Rule::Ct, Rule::Torchao]
            }
            Format::Affine(Affine { code: Code::Int(_), .. }) => {
                &[Rule::Full, Rule::Restricted, Rule::Torchao, Rule::NoClippingErr]
            }
            Format::Affine(Affine { scale: Some(ScaleTree { code: Code::E8m0, .. }), .. }) => {
                &[Rule::Floor, Rule::Ceil, Rule::Even, Rule::Rceil, Rule::TorchaoRceil, Rule::Ct]
            }
            Format::Affine(Affine { scale: Some(ScaleTree { outer: Some(_), .. }), .. }) => {
                &[Rule::Ct, Rule::Te]
            }
            _ => &[Rule::Amax],
        }
    }

    /// Whether NaN and infinities have a documented code. Plain casts keep them (or saturate). An E8M0 block with a NaN has
    /// the NaN scale; one with an infinity has the scale of 2^128, under which everything but the infinity vanishes.
    /// Everywhere else they are an error.
    pub fn accepts_non_finite(&self) -> bool {
        match self.format.scale() {
            None => true,
            Some(scale) => scale.code == Code::E8m0,
        }
    }

    /// Whether the format has a scale for the whole tensor above the block scales.
    pub fn has_outer_scale(&self) -> bool {
        self.format.scale().is_some_and(|scale| scale.outer.is_some())
    }
}

fn scaled(code: Code, blocks: Blocks, scale: ScaleTree, offset: Offset) -> Format {
    Format::Affine(Affine { code, blocks, scale: Some(scale), offset })
}
