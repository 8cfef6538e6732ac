//! `Scheme`: the storage that a user names. It combines a [`Format`], the writer's choices, and the source of scales.

use crate::codebook::Book;
use crate::codec::CodecId;
use crate::format::{Affine, Blocks, Code, Format, Offset, ScaleTree, Sense, Table};
use crate::minifloat;
use crate::round::Rounding;

/// Rule by which a writer chooses a block's scale and codes, where implementations differ. `golden/README.md` of the
/// reference data lists the formulas; [`blockwise`](crate::blockwise) implements them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Rule {
    /// `scale = amax / max_element`: scaled floats, code books, ternary.
    Amax,
    /// Shared exponent `floor(log2 amax) - emax` (OCP Microscaling v1.0, section 6.3).
    Floor,
    /// The floor exponent plus one unless amax is a power of two.
    Ceil,
    /// amax rounded to the element's mantissa before the floor.
    Even,
    /// `2^ceil(log2(amax / max_element))`, exact (what `cvt.rp` to UE8M0 and Transformer Engine compute).
    Rceil,
    /// [`Rule::Rceil`] as torchao computes it eagerly: with an f32 logarithm, and without scaling if the code is 0.
    TorchaoRceil,
    /// compressed-tensors.
    Ct,
    /// Transformer Engine.
    Te,
    /// Symmetric integers over the whole code range: `scale = amax / ((2^b - 1) / 2)`.
    Full,
    /// [`Rule::Full`] over this many hundredths of the range, 1 to 99: `scale = p / 100 · amax / ((2^b - 1) / 2)`;
    /// values beyond take the outermost codes. For tokens this is QuaRot's `a_clip_ratio` (Ashkboos et al. 2024,
    /// arXiv 2404.00456, section 4.3).
    Clip(u8),
    /// Symmetric integers without the most negative code: `scale = max(amax, 1e-5) / (2^(b-1) - 1)`; for head vectors
    /// of a KV cache `max(amax / (2^(b-1) - 1), 1e-8)`.
    Restricted,
    /// torchao: multiplies by the reciprocal of the scale, and adds the zero point after rounding. NVFP4 without a
    /// global scale: `scale = clamp(amax / 6, 2^-6, 448)`.
    Torchao,
    /// torchao's `SYMMETRIC_NO_CLIPPING_ERR`: `scale = max(min / qmin, max / qmax)`.
    NoClippingErr,
    /// Asymmetric integers of a KV cache: `scale = max((max - min) / (2^b - 1), 1e-8)`, and the minimum itself is
    /// stored.
    MinMax,
    /// Four Over Six (Cook et al. 2026, arXiv 2512.02010) as in Transformer Engine: maps a block's amax to 4 or to 6,
    /// whichever has the smaller squared error; the tensor's amax maps to 6 · 256.
    FourOverSix,
    /// DeepGEMM tiles: `scale = max(amax, 1e-4) / max_element`, times the reciprocal; an E8M0 scale is rounded up.
    Floor1e4,
    /// torchao tiles: `1 / scale = max_element / max(amax, 1e-12)`.
    Floor1e12,
    /// DeepSeek-V3's own kernel: like [`Rule::Floor1e4`], but dividing.
    DeepSeekV3,
    /// DeepGEMM's FP4: `scale = max(amax, 1e-4) / 6` (a power of two, rounded up, under E8M0), and halves round toward zero.
    DeepGemm,
    /// Dynamic maps: the nearest level.
    Nearest,
    /// Dynamic maps: through bitsandbytes' table of 65 536 entries; an all-zero block is all code 0.
    Cpu,
    /// Ternary of BitNet b1.58 (Ma et al. 2024, arXiv 2402.17764, equation 1, with the floor of the published code):
    /// `scale = max(mean |x|, 1e-5)`, `code = RNE(clamp(x · (1 / scale), ±1))`.
    AbsMean,
}

/// Choices of a writer that a reader never needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Encoder {
    /// Choice of scales and codes.
    pub rule: Rule,
    /// Smallest scale of a block.
    pub floor: ScaleFloor,
    /// Rounding of values to codes.
    pub rounding: Rounding,
}

/// Smallest scale of a block under [`Rule::Restricted`] and of floats under [`Rule::Amax`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ScaleFloor {
    /// The floor of the rule.
    #[default]
    Rule,
    /// 1e-8 for `:restricted` integers and 1e-12 for floats, as vLLM's kernels quantize head vectors of a KV cache.
    KvCache,
    /// No floor but an amax of 1e-12 for `:restricted` integers, as torchao quantizes the operands of INT8 training:
    /// gradients may be far below the floor of the rule.
    Training,
}

/// Time at which a scale is computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Source {
    /// In advance, by calibration; stored with the model.
    Static,
    /// From the tensor being quantized.
    #[default]
    Dynamic,
    /// From the largest amax of the last `len` steps (delayed scaling of Transformer Engine). The amax history is run
    /// state.
    Delayed {
        /// Length of the amax history, in steps.
        len: u32,
    },
}

/// Kind of row with its own scale: `int8-channel` is for weights, `int8-token` for activations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum RowKind {
    /// Output channels of a weight.
    #[default]
    Channel,
    /// Tokens of an activation.
    Token,
    /// Head vectors of a KV cache.
    Head,
}

/// Tensor amax over tensor scale under [`Rule::FourOverSix`]: 6 · 256.
pub(crate) const FOUR_OVER_SIX_SCALE: u32 = 6 * 256;

/// Storage of a tensor, as named by a user. Parses from and prints to text: see [`grammar`](crate::grammar).
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Scheme {
    /// Stored format, all that a reader needs.
    pub format: Format,
    /// Decisions of the writer.
    pub encoder: Encoder,
    /// Source of scales.
    pub source: Source,
    /// Kind of row that shares a scale, for blocks that are rows.
    pub row: RowKind,
}

impl Scheme {
    /// `format` written by `rule`, nearest-even, dynamic.
    pub fn new(format: Format, rule: Rule) -> Self {
        let encoder = Encoder { rule, floor: ScaleFloor::Rule, rounding: Rounding::NearestEven };
        Scheme { format, encoder, source: Source::Dynamic, row: RowKind::Channel }
    }

    /// Returns the same scheme with scales and biases in f16, if they are f32 without a level above.
    #[must_use]
    pub fn with_half_scales(self) -> Self {
        Scheme { format: self.format.with_half_scales(), ..self }
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

    /// NVFP4: groups of 16 E2M1 elements with an E4M3 scale each. `global` is the meaning of the global f32 scale,
    /// which differs between producers; `None` without one.
    pub fn nvfp4(global: Option<Sense>) -> Self {
        let rule = match global {
            Some(Sense::Amax { full_scale: FOUR_OVER_SIX_SCALE }) => Rule::FourOverSix,
            Some(Sense::Amax { .. }) => Rule::Te,
            Some(Sense::Multiplier) | None => Rule::Torchao,
            Some(Sense::Divisor | Sense::Residual) => Rule::Ct,
        };
        let e4m3 = Code::Float(minifloat::E4M3);
        let scale = global.map_or(ScaleTree::leaf(e4m3), |sense| {
            ScaleTree::below(e4m3, Blocks::Tensor, ScaleTree { code: Code::F32, sense, outer: None })
        });
        Self::new(scaled(Code::Float(minifloat::E2M1), Blocks::Group(16), scale, Offset::None), rule)
    }

    /// FP8 tiles with a power-of-two scale each (DeepGEMM's `ue8m0`).
    pub fn power_of_two_tiles(code: Code, blocks: Blocks) -> Self {
        Self::new(scaled(code, blocks, ScaleTree::leaf(Code::E8m0), Offset::None), Rule::Floor1e4)
    }

    /// Asymmetric integers with an f32 scale and the f32 minimum of each block: a KV cache.
    pub fn int_biased(bits: u32, blocks: Blocks) -> Self {
        Self::new(scaled(Code::Int(bits), blocks, ScaleTree::leaf(Code::F32), Offset::Bias), Rule::MinMax)
    }

    /// -1, 0 and 1 with an f32 scale per block.
    pub fn ternary(blocks: Blocks) -> Self {
        Self::new(scaled(Code::Ternary, blocks, ScaleTree::leaf(Code::F32), Offset::None), Rule::AbsMean)
    }

    /// A code book over flat blocks with an f32 amax each, as bitsandbytes stores NF4.
    pub fn table(book: Book, block: u32) -> Self {
        let format =
            Format::Table(Table { book, blocks: Blocks::Flat(block), scale: ScaleTree::leaf(Code::F32) });
        Self::new(format, if book.is_state_map() { Rule::Nearest } else { Rule::Amax })
    }

    /// Code book whose block scales are quantized themselves (bitsandbytes' `compress_statistics`): differences from
    /// the mean scale as signed dynamic 8-bit codes over flat blocks of 256 with an f32 amax each.
    pub fn double_quantized(book: Book, block: u32) -> Self {
        let nested = ScaleTree { code: Code::F32, sense: Sense::Residual, outer: None };
        let scale = ScaleTree::below(Code::Book(Book::Dyn8), Blocks::Flat(256), nested);
        Self::new(Format::Table(Table { book, blocks: Blocks::Flat(block), scale }), Rule::Amax)
    }

    /// A closed block format.
    pub fn codec(id: CodecId) -> Self {
        Self::new(Format::Codec(id), Rule::Amax)
    }

    /// Default scheme of `format`: the family's first [variant](Self::variants) that stores it.
    pub fn writing(format: Format) -> Self {
        let any = Self::new(format, Rule::Amax);
        let variants = any.variants();
        let variant = variants.iter().find(|variant| variant.stores(&any.format)).unwrap_or(&variants[0]);
        Scheme { encoder: Encoder { rule: variant.rule, ..any.encoder }, ..any }
    }

    /// The same scheme with rows of another kind. Head vectors take the [floor](ScaleFloor::KvCache) of a KV cache.
    pub fn with_rows(mut self, row: RowKind) -> Self {
        self.row = row;
        self.encoder.floor = if row == RowKind::Head { ScaleFloor::KvCache } else { ScaleFloor::Rule };
        self
    }

    /// True if a scale may cover a share of its range ([`Rule::Clip`]): symmetric integers with a scale per token.
    pub fn clips(&self) -> bool {
        let symmetric =
            matches!(&self.format, Format::Affine(Affine { code: Code::Int(_), offset: Offset::None, .. }));
        symmetric && self.row == RowKind::Token
    }

    /// The same scheme under [`Rule::Clip`]; `None` unless it [clips](Self::clips) and `hundredths` is 1 to 99.
    pub fn clipped(mut self, hundredths: u8) -> Option<Self> {
        self.encoder.rule = Rule::Clip(hundredths);
        (self.clips() && (1..100).contains(&hundredths)).then_some(self)
    }

    /// True if NaN and infinities have a documented code. Plain casts keep them (or saturate). An E8M0 block with a
    /// NaN has the NaN scale; one with an infinity has the scale of 2^128, at which everything except the infinity
    /// becomes 0. Otherwise they are an error.
    pub fn accepts_non_finite(&self) -> bool {
        match (&self.format, self.format.scale()) {
            (Format::Codec(_) | Format::Trellis(_), _) => false,
            (_, None) => true,
            (_, Some(scale)) => scale.code == Code::E8m0 && self.format.blocks() == Blocks::Group(32),
        }
    }

    /// True if the format has a global scale above the block scales.
    pub fn has_outer_scale(&self) -> bool {
        self.format.scale().is_some_and(|scale| scale.tensor_wide().is_some())
    }

    /// True if codes depend on values outside their block beyond the global scale, so that a tensor must be quantized
    /// whole: double quantization stores scales relative to their mean.
    pub fn needs_whole_tensor(&self) -> bool {
        self.format.scale().is_some_and(|scale| scale.nested().is_some())
    }
}

fn scaled(code: Code, blocks: Blocks, scale: ScaleTree, offset: Offset) -> Format {
    Format::Affine(Affine { code, blocks, scale: Some(scale), offset })
}
