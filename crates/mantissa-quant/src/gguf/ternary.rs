//! Lossless storage of BitNet's ternary weights.
//!
//! A ternary weight is -s, 0 or s, with one f32 `s` per matrix. TQ1_0, TQ2_0 and Q4_0 have f16 scales, which cannot
//! represent most `s`. So an f32 factor is stored beside the weight (`blk.N.attn_q.scale`, which llama.cpp reads for
//! this architecture). The blocks hold the weight divided by it: -1, 0 and 1 with a scale of 1. For a weight that is
//! not ternary the factor is the amax, and the blocks are the codec's.

use mantissa_model::ModelConfig;
use mantissa_num::{CodecId, Codes, Format, Quantized, Scheme, TensorError};
use mantissa_store::convention::gguf::has_factor;

use crate::error_stats::ErrorStats;
use crate::plan::{Plan, WeightJob};
use crate::rtn;
use mantissa_methods::Solved;

/// Block types that represent -1, 0 and 1 with a scale of 1.
const TERNARY: [CodecId; 3] = [CodecId::Tq1_0, CodecId::Tq2_0, CodecId::Q4_0];

/// f16 of 1.
const ONE: [u8; 2] = 0x3c00u16.to_le_bytes();

/// True if a layer under `scheme` has a factor beside it.
pub(super) fn factor_beside(config: &ModelConfig, job: &WeightJob, scheme: &Scheme) -> bool {
    has_factor(&scheme.format) || blocks_of_ternary(config, job, scheme).is_some()
}

/// Returns the block type if a layer is stored with a factor and ternary blocks.
fn blocks_of_ternary(config: &ModelConfig, job: &WeightJob, scheme: &Scheme) -> Option<CodecId> {
    let Format::Codec(codec) = scheme.format else { return None };
    let applies = config.architecture.ternary && job.rounds_to_nearest();
    (applies && TERNARY.contains(&codec)).then_some(codec)
}

impl Plan {
    /// Returns the block type of a layer stored with a factor and ternary blocks.
    pub(crate) fn blocks_of_ternary(&self, scheme: &Scheme) -> Option<CodecId> {
        self.gguf.as_ref()?;
        blocks_of_ternary(&self.config, &self.job, scheme)
    }
}

/// Returns the block type used instead of TQ1_0 and TQ2_0 if rows are not multiples of 256.
pub(super) fn smaller(config: &ModelConfig, wanted: CodecId) -> Option<CodecId> {
    let ternary = [CodecId::Tq1_0, CodecId::Tq2_0].contains(&wanted) && config.architecture.ternary;
    ternary.then_some(CodecId::Q4_0)
}

/// Quantizes a weight `[rows, cols]` to its amax and blocks of the quotients.
///
/// # Errors
/// A value is NaN.
pub(crate) fn quantize(
    codec: CodecId,
    w: &[f32],
    rows: usize,
    cols: usize,
    threads: usize,
) -> Result<Solved, TensorError> {
    let amax = w.iter().fold(0f32, |amax, v| amax.max(v.abs()));
    let factor = if amax > 0.0 { amax } else { 1.0 };
    let quotients: Vec<f32> = w.iter().map(|v| v / factor).collect();
    let trits = quotients.iter().all(|v| [-1.0, 0.0, 1.0].contains(v));
    let mut q = if trits && codec == CodecId::Q4_0 {
        let codes = Codes::Packed(quotients.chunks_exact(32).flat_map(q4_0_of_trits).collect());
        Quantized { codes, ..Quantized::empty(Format::Codec(codec), rows, cols) }
    } else {
        rtn::quantize(&Scheme::codec(codec), &quotients, rows, cols, None, threads)?.0
    };
    let decoded: Vec<f32> = q.dequantize()?.into_iter().map(|v| v * factor).collect();
    let stats = ErrorStats::of_rows(w, &decoded, cols);
    q.set_outer(Some(factor));
    Ok(Solved::rounded((q, stats)))
}

/// Returns a Q4_0 block with scale 1: `d | 16 bytes`. Byte `i` has element `i` in the low nibble and element `i + 16`
/// in the high one, each plus 8.
fn q4_0_of_trits(x: &[f32]) -> Vec<u8> {
    let code = |v: f32| (v + 8.0) as u8;
    let bytes = x[..16].iter().zip(&x[16..]).map(|(&low, &high)| code(low) | code(high) << 4);
    ONE.into_iter().chain(bytes).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn ternary_weights_are_lossless() {
        // Not representable in f16.
        let s = 0.123_456_79_f32;
        let w: Vec<f32> = (0..512).map(|i| s * (i % 3) as f32 - s).collect();
        for codec in TERNARY {
            let solved = quantize(codec, &w, 2, 256, 1).unwrap();
            assert_eq!(solved.quantized.outer(), Some(s));
            let mut blocks = solved.quantized;
            blocks.set_outer(None);
            let decoded = blocks.dequantize().unwrap();
            assert!(decoded.iter().zip(&w).all(|(v, w)| v * s == *w), "{codec:?}");
            assert_eq!(solved.stats.report().max_abs_error, 0.0);
        }
        assert_eq!(quantize(CodecId::Tq2_0, &[0.0; 256], 1, 256, 1).unwrap().quantized.outer(), Some(1.0));
        assert!(quantize(CodecId::Tq2_0, &[f32::NAN; 256], 1, 256, 1).is_err());
    }

    #[test]
    fn other_weights_use_the_codec() {
        let w: Vec<f32> = (0..256).map(|i| (i as f32 * 0.7).sin()).collect();
        for codec in TERNARY {
            let solved = quantize(codec, &w, 1, 256, 1).unwrap();
            let error = solved.stats.report().relative_error;
            assert!(error > 0.0 && error < 0.6, "{codec:?} {error}");
        }
    }
}
