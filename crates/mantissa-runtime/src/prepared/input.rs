//! Quantization of a prepared layer's input.

use mantissa_kernels::packed::Grid;
use mantissa_model::InputQuantizer;
use mantissa_num::{Affine, Blocks, Code, Format, Offset, Rule, Source, minifloat};

/// Codes of the largest element of a block of E2M1 values: every element is then a whole number of steps, whichever
/// value is the largest (120 is a multiple of 12, 8, 6, 4, 3, 2 and 1, the doubled magnitudes).
const E2M1_STEPS: f32 = 120.0;

/// Form in which a layer reads its input.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Input {
    /// Quantization that the checkpoint states.
    pub(super) quantizer: Option<InputQuantizer>,
    /// Grid of 8-bit activations.
    pub(super) grid: Grid,
    /// True if the grid gives the codes and scales of the quantizer, which then need not run.
    pub(super) direct: bool,
    /// Added to quantized inputs before they become codes: scale times zero point of a static asymmetric quantizer, whose codes
    /// alone fit 8 bits. The product with it is taken from the bias.
    pub(super) shift: f32,
}

impl Input {
    pub(super) fn new(quantizer: Option<InputQuantizer>) -> Self {
        if let Some((grid, shift)) = quantizer.as_ref().and_then(shifted) {
            return Input { quantizer, grid, direct: false, shift };
        }
        let (grid, direct) = quantizer.as_ref().and_then(grid).unwrap_or((Grid::BLOCKS, false));
        Input { quantizer, grid, direct, shift: 0.0 }
    }

    /// Least magnitude of values that stay unquantized.
    pub(super) fn keep_above(&self) -> Option<f32> {
        self.quantizer.as_ref()?.quant().keep_above
    }
}

/// Returns the grid of a static quantizer with a zero point, `scale · (code - zero)`, and `scale · zero`: inputs that are quantized
/// and shifted by it are on the grid.
fn shifted(quantizer: &InputQuantizer) -> Option<(Grid, f32)> {
    let quant = quantizer.quant();
    let Format::Affine(Affine {
        code: Code::Int(8),
        blocks: Blocks::Tensor,
        scale: Some(_),
        offset: Offset::Zero,
    }) = &quant.scheme.format
    else {
        return None;
    };
    let scale =
        quant.outer.filter(|_| quant.scheme.source == Source::Static && quant.keep_above.is_none())?;
    let grid = Grid { group: usize::MAX, steps: 127.5, range: (-128.0, 127.0), fixed: Some(scale) };
    Some((grid, scale * quant.zero as f32))
}

/// Returns the grid that represents quantized inputs exactly, and true if it quantizes them too.
fn grid(quantizer: &InputQuantizer) -> Option<(Grid, bool)> {
    let quant = quantizer.quant();
    let Format::Affine(Affine { code, blocks, scale: Some(_), offset: Offset::None }) = &quant.scheme.format
    else {
        return None;
    };
    let group = match blocks {
        Blocks::Row | Blocks::Tensor => usize::MAX,
        Blocks::Group(g) if *g == 16 || g.is_multiple_of(32) => *g as usize,
        _ => return None,
    };
    match *code {
        Code::Int(bits) => {
            let high = ((1i32 << (bits - 1)) - 1) as f32;
            let (steps, low) = match quant.scheme.encoder.rule {
                Rule::Full => (high + 0.5, -high - 1.0),
                Rule::Restricted => (high, -high),
                _ => return None,
            };
            let fixed = match (quant.outer, quant.scheme.source) {
                (None, Source::Dynamic) => None,
                (Some(scale), _) if !quant.scheme.has_outer_scale() => Some(scale),
                _ => return None,
            };
            Some((Grid { group, steps, range: (low, high), fixed }, true))
        }
        Code::Float(minifloat::E2M1) if group != usize::MAX => {
            Some((Grid { group, steps: E2M1_STEPS, range: (-E2M1_STEPS, E2M1_STEPS), fixed: None }, false))
        }
        _ => None,
    }
}
