//! Every kernel, written once. All functions are `#[inline(always)]` so that each level of [`crate::dispatch`]
//! compiles its own copy with its own registers; the rules that keep those copies bit-identical are at the top of
//! `lib.rs`. Results and contracts are documented on the [`crate::Kernels`] method of the same name.

mod activation;
mod blocks;
mod convert;
mod dequant;
mod encode;
mod error;
mod exp;
mod gemm_codes;
mod gemm_f64;
mod gemm_packed;
mod gemv;
mod grid;
mod hadamard;
mod norm;
mod optim;
mod pack;
mod quant;
mod recurrence;
mod reduce;
mod rope;
mod softmax;
mod state;
mod trellis;
mod xtx;

use crate::simd::LANES;
pub(crate) use activation::{
    act_mul, act_mul_backward, act_sums, limited_swiglu_mul, silu_mul, silu_mul_backward, softcap,
    softcap_backward,
};
pub(crate) use blocks::{block_error_sums, decode_blocks, encode_blocks, encode_blocks_scalar};
pub(crate) use convert::{
    bf16_le_to_f32, bf16_to_f32, f16_le_to_f32, f16_to_f32, f32_to_bf16, f32_to_bf16_factors, f32_to_bf16_le,
    f32_to_f16, f32_to_f16_le,
};
#[cfg(target_arch = "x86_64")]
pub(crate) use dequant::check4;
pub(crate) use dequant::{dequant_i8_zero, dequant_int4_zero, dequant_int8_zero, dequant_lut4, dequant_lut8};
pub use encode::{IntGrid, MinifloatLayout, Step};
pub(crate) use encode::{book_codes, int_codes, minifloat_codes};
pub use error::ErrorSums;
pub(crate) use error::{error_sums, group_amax, group_min_max};
pub(crate) use exp::{exp_inplace, pow_inplace};
pub use gemm_codes::Codes;
pub(crate) use gemm_codes::gemm_codes;
#[cfg(target_arch = "x86_64")]
pub(crate) use gemm_codes::{CodeDot, multiply as multiply_codes};
pub(crate) use gemm_f64::{gemm_sub_f64, sub_axpy_f64};
#[cfg(target_arch = "x86_64")]
pub(crate) use gemm_packed::DEPTH as GEMM_DEPTH;
pub use gemm_packed::Operand;
#[cfg(target_arch = "x86_64")]
pub(crate) use gemm_packed::{Panels, product, shape as gemm_shape};
pub(crate) use gemm_packed::{gemm_bf16, gemm_f16, gemm_f32};
pub(crate) use gemv::{gemm_nt_small, gemv, gevm};
pub use grid::ElementGrid;
pub(crate) use grid::{random_words, round_blocks, round_codes, transpose_columns};
pub(crate) use hadamard::hadamard;
pub(crate) use norm::{layer_norm, layer_norm_backward, rms_norm, rms_norm_backward};
pub use optim::{AdamDirection, AdamLength, AdamWStep};
pub(crate) use optim::{adam_direction, adamw};
pub(crate) use pack::{pack_codes_le, unpack_codes_le};
pub use quant::NonFinite;
pub(crate) use quant::{int_codes_sym, quant_int_asym, quant_int_sym};
pub(crate) use recurrence::{delta_rule_step, mul_add, sigmoid_mul, silu_inplace, state_space_step};
pub(crate) use reduce::{amax, argmax, axpy, dot, min_max, sum_f64, sum_squares_f64};
pub(crate) use rope::{rope_rotate, rope_rotate_back};
pub use softmax::LogSumExp;
pub(crate) use softmax::{
    cross_entropy_backward, ln, log_softmax_stats, softmax, softmax_backward, softmax_backward_capped,
    softmax_numerators, softmax_numerators_max,
};
pub use state::{BlockwiseAdamW, CodeTable, STATE_BLOCK};
pub(crate) use state::{adamw_blockwise, table_codes};
pub use trellis::TrellisValues;
pub(crate) use trellis::trellis_step;
pub(crate) use xtx::{PANEL as XTX_PANEL, xtx_band};

/// Last, short chunk of a row, padded with a value that changes no lane.
#[inline(always)]
fn padded(tail: &[f32], fill: f32) -> [f32; LANES] {
    let mut chunk = [fill; LANES];
    chunk[..tail.len()].copy_from_slice(tail);
    chunk
}

/// Combines the lanes in one fixed tree: lane `i` takes lane `i + 8`, then `i + 4`, `i + 2`, `i + 1`.
#[inline(always)]
fn tree<T: Copy>(lanes: [T; LANES], combine: impl Fn(T, T) -> T) -> T {
    let eight: [T; 8] = std::array::from_fn(|i| combine(lanes[i], lanes[i + 8]));
    let four: [T; 4] = std::array::from_fn(|i| combine(eight[i], eight[i + 4]));
    combine(combine(four[0], four[2]), combine(four[1], four[3]))
}

/// `x` clamped to `[low, high]`; NaN stays NaN. (`f32::clamp` panics on a NaN limit and compiles to more code.)
#[inline(always)]
fn clamp(x: f32, low: f32, high: f32) -> f32 {
    let x = if x < low { low } else { x };
    if x > high { high } else { x }
}

/// 1.5·2^23: adding it to `|x| <= 2^22` leaves the nearest integer (ties to even) in the low mantissa bits,
/// because at this magnitude an f32 step is 1. The only rounding that vectorizes on every level, the baseline
/// included.
const ROUND_MAGIC: f32 = 12_582_912.0;

/// Nearest integer to `x`, ties to even, for `|x| <= 2^22`; otherwise (NaN included) an unspecified integer.
#[inline(always)]
fn round_even_i32(x: f32) -> i32 {
    ((x + ROUND_MAGIC).to_bits() as i32).wrapping_sub(ROUND_MAGIC.to_bits() as i32)
}
