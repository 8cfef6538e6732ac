//! SpQR (Dettmers, Svirschevski, Egiazarian, Kuznedelev, Frantar, Ashkboos, Borzunov, Hoefler & Alistarh 2023, "SpQR: A
//! Sparse-Quantized Representation for Near-Lossless LLM Weight Compression", arXiv 2306.03078).
//!
//! Few weights cost most of what a quantization costs: they widen the range of their group, or fall far from its grid where the input is
//! sensitive. A share of them stands beside the codes, in f16 with its column ([`mantissa_num::stored::Extra::Sparse`]); the groups'
//! scales are of the others, and [`gptq`](mod@crate::gptq) goes through the columns as ever, these weights erring by the rounding of f16.
//!
//! Unlike the published code: as many weights of a layer as the share says, not those above a threshold, so that the size is known
//! before the work; the range of a group is searched, as it is for GPTQ; columns by decreasing diagonal of the Hessian; what is stored beside the codes is what a
//! weight has over its code, so that decoders add it; and scales are f16, not quantized again to 3 bits in groups of 16: a scale here
//! has its own code and one above it for a block, and no offset of a block of scales (DESIGN's `ScaleTree`).

use mantissa_num::minifloat::F16;
use mantissa_num::stored::Extra;
use mantissa_num::{Code, Quantized, Scheme, TensorError};

use crate::gptq::{as_f16, largest, sparse};

/// The largest share of outliers: from there on f16 with columns takes more than 8 bits a weight.
pub const MOST_OUTLIERS: f64 = 0.2;

/// How SpQR works, beside [`GptqOptions`](crate::gptq::GptqOptions).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SpqrOptions {
    /// Share of a layer's weights that stand beside the codes, up to [`MOST_OUTLIERS`].
    pub outliers: f64,
}

impl Default for SpqrOptions {
    /// About what the paper keeps.
    fn default() -> Self {
        SpqrOptions { outliers: 0.01 }
    }
}

impl SpqrOptions {
    /// Outliers of a weight `[rows, cols]`.
    pub fn count(self, rows: usize, cols: usize) -> usize {
        (self.outliers.clamp(0.0, MOST_OUTLIERS) * rows as f64 * cols as f64).round() as usize
    }
}

/// The scheme with scales of 16 bits, where they would be f32 and nothing stands above them.
pub fn with_f16_scales(mut scheme: Scheme) -> Scheme {
    if scheme.format.scale().is_some_and(|scale| scale.code == Code::F32 && scale.outer.is_none()) {
        scheme.format = scheme.format.with_scale_code(Code::Float(F16));
    }
    scheme
}

/// The `count` weights of `w` that rounding to nearest leaves furthest from themselves, to stand beside the codes `q`: what is stored of a
/// layer that is rounded to nearest after all.
///
/// # Errors
/// [`TensorError`] where the parts of `q` do not fit.
pub fn furthest(w: &[f32], q: &Quantized, count: usize) -> Result<Extra, TensorError> {
    let mut errors = q.dequantize()?;
    errors.iter_mut().zip(w).for_each(|(q, w)| *q = w - *q);
    let far: Vec<f32> = errors.iter().map(|error| error.abs()).collect();
    let kept = largest(&far, count);
    let values = errors.iter().zip(&kept).filter(|(_, kept)| **kept).map(|(error, _)| as_f16(*error));
    Ok(sparse(&kept, q.cols, values.collect()))
}
