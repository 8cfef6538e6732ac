//! Every kernel: its signature, its contract, and its implementation at each level.

use mantissa_num::CodecId;

use crate::activation::Activation;
use crate::generic;
use crate::isa::Isa;
use crate::simd::Portable;
#[cfg(target_arch = "x86_64")]
use crate::simd::x86;
use crate::{
    AdamDirection, AdamWStep, BlockwiseAdamW, CodeTable, Codes, ElementGrid, ErrorSums, IntGrid, LogSumExp,
    MatMut, MinifloatLayout, NonFinite, Operand, Step, TrellisValues,
};

declare_kernels! {
    levels {
        SCALAR = Scalar in scalar uses (Portable, Portable) with {
            encode_blocks: generic::encode_blocks_scalar,
        };
        #[cfg(target_arch = "x86_64")]
        AVX2 = Avx2 in avx2 uses (x86::Avx2, x86::Avx2::new()) features "avx2,fma" with {
            dequant_lut4: crate::x86::dequant_lut4_avx2,
            gemm_codes: crate::codes_x86::avx2,
        };
        #[cfg(target_arch = "x86_64")]
        AVX512 = Avx512 in avx512 uses (x86::Avx512, x86::Avx512::new())
            features "avx2,fma,avx512f,avx512bw,avx512vl,avx512dq" with {
            dequant_lut4: crate::x86::dequant_lut4_avx512,
            gemm_codes: crate::codes_x86::avx512,
        };
        #[cfg(target_arch = "aarch64")]
        NEON = Neon in neon uses (crate::simd::neon::Neon, crate::simd::neon::Neon::new()) features "neon";
    }
    kernels {
        /// `sum a[i] * b[i]`, in 16 lanes. Panics if the lengths differ.
        fn dot[simd](a: &[f32], b: &[f32]) -> f32;

        /// `y[i] += alpha * x[i]`. Panics if the lengths differ.
        fn axpy(alpha: f32, x: &[f32], y: &mut [f32]);

        /// `y[i] = c - alpha * x[i]` for the `c` in `y[i]`, rounded once. Panics if the lengths differ.
        fn sub_axpy_f64(alpha: f64, x: &[f64], y: &mut [f64]);

        /// `C[m, n] -= A[m, p] B[p, n]` for `shape` = (m, n, p) and row-major operands with row strides. Every
        /// element is one chain of fused multiply-adds that starts at its old value and takes the products in the
        /// order of `p`, so a product split into pieces has the bits of the whole. Panics if a slice is too short.
        fn gemm_sub_f64[simd](
            shape: (usize, usize, usize),
            a: &[f64],
            lda: usize,
            b: &[f64],
            ldb: usize,
            c: &mut [f64],
            ldc: usize,
        );

        /// Adds rows `48 band..` (at most 48) of `XᵀX` to `h`, which begins at the first of them and has rows of `k`;
        /// columns before `48 band` are unchanged. `packed` holds `tokens` rows of 48 columns of X for every panel of
        /// 48 columns, the last padded with zeros. Used by [`Self::accumulate_xtx`].
        fn xtx_band[simd](packed: &[f32], tokens: usize, k: usize, band: usize, h: &mut [f32]);

        /// `sum x[i]` in f64, in 16 lanes.
        fn sum_f64[simd](x: &[f32]) -> f64;

        /// `sum x[i]^2` in f64, in 16 lanes.
        fn sum_squares_f64[simd](x: &[f32]) -> f64;

        /// Largest |x|: NaN if any element is NaN, else infinity if any is infinite, 0 if `x` is empty. The result is
        /// finite exactly if all of `x` is.
        fn amax[simd](x: &[f32]) -> f32;

        /// (smallest, largest) of `x`: both NaN if any element is NaN, (infinity, -infinity) if `x` is empty.
        fn min_max[simd](x: &[f32]) -> (f32, f32);

        /// Index of the largest element, the lowest one for ties; NaN never wins. `None` if `x` is empty or all NaN.
        fn argmax[simd](x: &[f32]) -> Option<usize>;

        /// Replaces each `x[i]` by `e^x[i]`, within 1 ulp.
        fn exp_inplace(x: &mut [f32]);

        /// Replaces each `x[i]`, at least 0, by `x[i]^exponent` computed in f64 (for `|exponent| <= 8` within 2^-40 before it is
        /// rounded to f32); NaN for NaN and below 0.
        fn pow_inplace(x: &mut [f32], exponent: f32);

        /// Softmax of one row in place.
        fn softmax[simd](row: &mut [f32]);

        /// Replaces each `x[i]` by `exp(scale * x[i] - max)`, where `max` is the largest `scale * x[i]`, and returns
        /// the sum of the results: softmax without its division.
        fn softmax_numerators[simd](row: &mut [f32], scale: f32) -> f32;

        /// [`Self::softmax_numerators`] that also returns the maximum: (sum, max). The logarithm of the sum of all
        /// `exp(scale * x[i])` is `max + ln(sum)`.
        fn softmax_numerators_max[simd](row: &mut [f32], scale: f32) -> (f32, f32);

        /// Backward of one row of attention: `scores` become the weights `p = exp(scale * s - lse)`. `grads`, the
        /// gradient of those weights, becomes that of the scores, `scale * p * (dp - delta)`, where `delta` is the
        /// sum of all `p * dp`. Panics if the lengths differ.
        fn softmax_backward(scores: &mut [f32], grads: &mut [f32], scale: f32, lse: f32, delta: f32);

        /// [`Self::softmax_backward`] of scores that the forward capped: the weights are `p = exp(c - lse)` with `c = cap *
        /// tanh(scale * s / cap)`, the gradient of the scores `scale * (1 - (c / cap)^2) * p * (dp - delta)`. Panics if
        /// the lengths differ.
        fn softmax_backward_capped(
            scores: &mut [f32],
            grads: &mut [f32],
            scale: f32,
            cap: f32,
            lse: f32,
            delta: f32,
        );

        /// Softmax cross-entropy of one row of logits: returns the negative log-likelihood of `target` in
        /// nats (absolute error about 1e-7, the rounding of f32 terms; they are summed in f64) and replaces the logits
        /// by `scale` times its gradient, `scale * (softmax(row) - onehot(target))`. Panics if there is no
        /// logit `target`.
        fn cross_entropy_backward[simd](row: &mut [f32], target: usize, scale: f32) -> f64;

        /// Statistics that turn logits into log-probabilities: f32 logits, sum in f64, absolute error of
        /// [`LogSumExp::nll`] below 1e-12.
        fn log_softmax_stats[simd](row: &[f32]) -> LogSumExp;

        /// RMSNorm of every row of `x[t, d]` into `out[t, d]`, `d = weight.len()`: `weight * (x /
        /// sqrt(mean(x^2) + eps))`. Panics if the lengths do not agree.
        fn rms_norm[simd](x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]);

        /// LayerNorm (Ba et al. 2016) of every row of `x[t, d]` into `out[t, d]`, `d = weight.len()`: `weight * (x -
        /// mean(x)) / sqrt(var(x) + eps) + bias`. Panics if the lengths do not agree.
        fn layer_norm[simd](x: &[f32], weight: &[f32], bias: &[f32], eps: f32, out: &mut [f32]);

        /// Backward of [`Self::rms_norm`] for the output's gradient `dy[t, d]`: adds the gradients of `x` to
        /// `dx[t, d]` and of `weight` to `dweight[d]`, row after row. Panics if the lengths do not agree.
        fn rms_norm_backward[simd](
            x: &[f32],
            weight: &[f32],
            eps: f32,
            dy: &[f32],
            dx: &mut [f32],
            dweight: &mut [f32],
        );

        /// Backward of [`Self::layer_norm`]: as [`Self::rms_norm_backward`], and adds the gradient of the bias to
        /// `dbias[d]`. Panics if the lengths do not agree.
        fn layer_norm_backward[simd](
            x: &[f32],
            weight: &[f32],
            eps: f32,
            dy: &[f32],
            dx: &mut [f32],
            dweight: &mut [f32],
            dbias: &mut [f32],
        );

        /// Rotates, in place, every head of `x[t, heads * head_dim]` by the tables `cos[t, half]` and `sin[t, half]`:
        /// element `i` of the first `half` with element `i` of the second (half-split, NEOX). `half` is `cos.len() /
        /// t`, usually `head_dim / 2`; with fewer angles the rest of each head is unchanged (partial rotary). Panics
        /// if the lengths do not agree.
        fn rope_rotate(x: &mut [f32], heads: usize, head_dim: usize, cos: &[f32], sin: &[f32]);

        /// Backward of [`Self::rope_rotate`], in place on the gradient: the transposed rotation. Shapes and panics as
        /// there.
        fn rope_rotate_back(x: &mut [f32], heads: usize, head_dim: usize, cos: &[f32], sin: &[f32]);

        /// One token of the gated delta rule (Yang et al. 2024, arXiv 2412.06464, eq. 10) for one head: the `state`
        /// `S[keys, values]` becomes `decay S + k delta`, where `delta = beta (v - k decay S)`, and `out = q S`. `qkv`
        /// are query `[keys]`, key `[keys]` and value `[values]`; `delta` is scratch `[values]`. Panics if the lengths
        /// do not agree.
        fn delta_rule_step(
            state: &mut [f32],
            qkv: [&[f32]; 3],
            decay: f32,
            beta: f32,
            delta: &mut [f32],
            out: &mut [f32],
        );

        /// One token of a selective state space (Dao & Gu 2024, arXiv 2405.21060, eq. 1) for one head: the `state`
        /// `S[n, width]` becomes `decay S + b x`, and `out = c S`. `bc` are `b[n]` and `c[n]`, `x[width]` the input
        /// times the step. Panics if the lengths do not agree.
        fn state_space_step(state: &mut [f32], bc: [&[f32]; 2], x: &[f32], decay: f32, out: &mut [f32]);

        /// `y[i] += a[i] * b[i]`. Panics if the lengths differ.
        fn mul_add(a: &[f32], b: &[f32], y: &mut [f32]);

        /// `x = x * sigmoid(x)`, in place.
        fn silu_inplace(x: &mut [f32]);

        /// `x = x * sigmoid(gate)`, in place. Panics if the lengths differ.
        fn sigmoid_mul(gate: &[f32], x: &mut [f32]);

        /// SwiGLU: `out = gate * sigmoid(gate) * up`. Panics if the lengths differ.
        fn silu_mul(gate: &[f32], up: &[f32], out: &mut [f32]);

        /// Backward of [`Self::silu_mul`] without further memory: `gate` and `up` become their gradients. `out`,
        /// which holds the gradient of the output, becomes the output again (with the bits of the forward), for the
        /// weight gradient of the layer that reads it. Panics if the lengths differ.
        fn silu_mul_backward(gate: &mut [f32], up: &mut [f32], out: &mut [f32]);

        /// `out = act(gate) * up`, with the numbers that the activation's parameters have. Panics if the lengths differ.
        fn act_mul(activation: Activation, numbers: [f32; 4], gate: &[f32], up: &[f32], out: &mut [f32]);

        /// Backward of [`Self::act_mul`]: arguments and panics as in [`Self::silu_mul_backward`].
        fn act_mul_backward(
            activation: Activation,
            numbers: [f32; 4],
            gate: &mut [f32],
            up: &mut [f32],
            out: &mut [f32],
        );

        /// Adds to `sums` the gradients of the learned numbers of [`Self::act_mul`] with `up` of 1, where `grads` are those of its
        /// output. Panics if the lengths differ.
        fn act_sums(
            activation: Activation,
            numbers: [f32; 4],
            gate: &[f32],
            grads: &[f32],
            sums: &mut [f64; 4],
        );

        /// `out = (clamp(up, -limit, limit) + offset) * g * sigmoid(alpha * g)` with `g = min(gate, limit)` and the numbers
        /// `[alpha, limit, offset]`: the activation of gpt-oss. Panics if the lengths differ.
        fn limited_swiglu_mul(numbers: [f32; 3], gate: &[f32], up: &[f32], out: &mut [f32]);

        /// `x = cap * tanh(scale * x / cap)`, in place.
        fn softcap(x: &mut [f32], scale: f32, cap: f32);

        /// Backward of [`Self::softcap`]: multiplies `grads` by its slope at the values whose results are `y`. Panics if
        /// the lengths differ.
        fn softcap_backward(y: &[f32], scale: f32, cap: f32, grads: &mut [f32]);

        /// One AdamW update of `param` by `grad * grad_scale` with the moments `m` and `v`: see
        /// [`AdamWStep`]. Panics if the lengths differ.
        fn adamw(step: &AdamWStep, param: &mut [f32], grad: &[f32], m: &mut [f32], v: &mut [f32]);

        /// Updates the moments `m` and `v` of Adam with the gradients `grad`, which become the direction of the step: see
        /// [`AdamDirection`]. Panics if the lengths differ.
        fn adam_direction(rule: &AdamDirection, grad: &mut [f32], m: &mut [f32], v: &mut [f32]);

        /// One AdamW update of a block of at most [`STATE_BLOCK`](crate::STATE_BLOCK) parameters, whose moments are
        /// 8-bit codes relative to an absmax each: see [`BlockwiseAdamW`]. The moments are updated with fused
        /// multiply-adds. A non-finite gradient sets the moments of its element to 0 and leaves the parameter
        /// unchanged. Panics if the lengths differ or exceed the block.
        fn adamw_blockwise(
            step: &BlockwiseAdamW,
            param: &mut [f32],
            grad: &[f32],
            codes: [&mut [u8]; 2],
            absmax: [&mut f32; 2],
        );

        /// `codes[i]`: the table's code of `values[i] / scale`. Panics if the lengths differ.
        fn table_codes(table: &CodeTable, values: &[f32], scale: f32, codes: &mut [u8]);

        /// bf16 bits to f32, exact. Panics if the lengths differ.
        fn bf16_to_f32(bits: &[u16], out: &mut [f32]);

        /// f16 bits to f32, exact. Panics if the lengths differ.
        fn f16_to_f32(bits: &[u16], out: &mut [f32]);

        /// Little-endian bf16 bytes to f32, exact. Panics unless there are two bytes per value.
        fn bf16_le_to_f32(bytes: &[u8], out: &mut [f32]);

        /// Little-endian f16 bytes to f32, exact. Panics unless there are two bytes per value.
        fn f16_le_to_f32(bytes: &[u8], out: &mut [f32]);

        /// f32 to bf16 bits, nearest-even, NaN quiet. Panics if the lengths differ.
        fn f32_to_bf16(x: &[f32], bits: &mut [u16]);

        /// [`Self::f32_to_bf16`], but 0 for magnitudes below 2^-50. Then no product of two such factors and no sum of
        /// products is subnormal. So [`Self::gemm_bf16_nt`] and its siblings have the same bits on every processor,
        /// unless [`Self::bf16_dot`] uses another order.
        fn f32_to_bf16_factors(x: &[f32], bits: &mut [u16]);

        /// f32 to f16 bits, nearest-even, NaN quiet, overflow to infinity. Panics if the lengths differ.
        fn f32_to_f16(x: &[f32], bits: &mut [u16]);

        /// f32 to little-endian bf16 bytes, as [`Self::f32_to_bf16`].
        fn f32_to_bf16_le(x: &[f32], bytes: &mut [u8]);

        /// f32 to little-endian f16 bytes, as [`Self::f32_to_f16`].
        fn f32_to_f16_le(x: &[f32], bytes: &mut [u8]);

        /// `out[i] = B[i, :] . x` for the row-major `B[out.len(), x.len()]` with row stride `ldb`, plus
        /// `out[i]` if `accumulate`. Each row has the bits of [`Self::dot`]. Panics if `b` is too short.
        fn gemv[simd](b: &[f32], ldb: usize, x: &[f32], out: &mut [f32], accumulate: bool);

        /// `C[t, n] = A[t, k] Bᵀ` for `shape` = (t, n, k) and row-major operands with row strides, added to C if
        /// `accumulate`. Without packing and with the bits of [`Self::dot`] for every element, for few rows.
        /// [`Self::gemm_nt`] chooses. Panics if a slice is too short.
        fn gemm_nt_small[simd](
            shape: (usize, usize, usize),
            a: &[f32],
            lda: usize,
            b: &[f32],
            ldb: usize,
            c: &mut [f32],
            ldc: usize,
            accumulate: bool,
        );

        /// Product of f32 into `c`, added to it if `accumulate`: rows of C are the lines of `a`, columns those of
        /// `b`. Used by [`Self::gemm_nt`] and its siblings, which document the result. Panics if the shapes do not
        /// agree.
        fn gemm_f32[simd](a: Operand<'_, f32>, b: Operand<'_, f32>, c: MatMut<'_>, accumulate: bool);

        /// Product of bf16 bits into the f32 `c`, added to it if `accumulate`: rows of C are the lines of `a`,
        /// columns those of `b`. Used by [`Self::gemm_bf16_nt`] and its siblings, which document the result. Panics
        /// if the shapes do not agree.
        fn gemm_bf16[simd](a: Operand<'_, u16>, b: Operand<'_, u16>, c: MatMut<'_>, accumulate: bool);

        /// [`Self::gemm_bf16`] of f16 bits, used by [`Self::gemm_f16_nt`] and its siblings.
        fn gemm_f16[simd](a: Operand<'_, u16>, b: Operand<'_, u16>, c: MatMut<'_>, accumulate: bool);

        /// `C[m, n] = A Bᵀ` of signed 8-bit codes with their scales and factors, added to C if `accumulate`. Sums of
        /// codes under one pair of scales are integers, exact up to 2^16 codes (longer lines are cut there), and
        /// rounded once to f32; with one unit an element is `sum · (f a[i]) · b[j]`, with several the sum is a chain of
        /// fused multiply-adds of the units in order, each times `a[i, u] · b[j, u]`. The bits are the same at every
        /// level. A thread keeps up to 3 MiB for packed operands. Panics if shapes, scales or units do not agree.
        fn gemm_codes[simd](a: Codes<'_>, b: Codes<'_>, c: MatMut<'_>, accumulate: bool);

        /// `out[i] = sum_p x[p] B[p, i]` in the order of `p`, for the row-major `B[x.len(), out.len()]` with
        /// row stride `ldb`, plus `out[i]` if `accumulate`. Panics if `b` is too short.
        fn gevm(x: &[f32], b: &[f32], ldb: usize, out: &mut [f32], accumulate: bool);

        /// `out[i] = lut[code i] * scales[i / group]` for one row of 4-bit codes packed two per byte, the
        /// first in the low nibble. Panics unless there are `out.len()` codes (rounded up to a byte) and
        /// `ceil(out.len() / group)` scales.
        fn dequant_lut4(codes: &[u8], lut: &[f32; 16], scales: &[f32], group: usize, out: &mut [f32]);

        /// `out[i] = lut[codes[i]] * scales[i / group]` for one row of byte codes. Panics if the lengths do
        /// not agree.
        fn dequant_lut8(codes: &[u8], lut: &[f32; 256], scales: &[f32], group: usize, out: &mut [f32]);

        /// `out[i] = (code i - zeros[i / group]) * scales[i / group]`, packing and panics as
        /// [`Self::dequant_lut4`]. The difference is exact for integer zeros.
        fn dequant_int4_zero(codes: &[u8], zeros: &[f32], scales: &[f32], group: usize, out: &mut [f32]);

        /// `out[i] = (codes[i] - zeros[i / group]) * scales[i / group]` for one row of byte codes. Panics if
        /// the lengths do not agree.
        fn dequant_int8_zero(codes: &[u8], zeros: &[f32], scales: &[f32], group: usize, out: &mut [f32]);

        /// [`Self::dequant_int8_zero`] of two's complement codes.
        fn dequant_i8_zero(codes: &[u8], zeros: &[f32], scales: &[f32], group: usize, out: &mut [f32]);

        /// `out[g]` is [`Self::amax`] of group `g` of `x`. Panics unless there are `ceil(x.len() / group)`
        /// results.
        fn group_amax[simd](x: &[f32], group: usize, out: &mut [f32]);

        /// (`low[g]`, `high[g]`) is [`Self::min_max`] of group `g` of `x`. Panics unless there are
        /// `ceil(x.len() / group)` of both.
        fn group_min_max[simd](x: &[f32], group: usize, low: &mut [f32], high: &mut [f32]);

        /// Sums of the squared error and the squared value, and the largest error, of `y` against `x`. Panics if the
        /// lengths differ.
        fn error_sums[simd](x: &[f32], y: &[f32]) -> ErrorSums;

        /// `codes[i]`: the minifloat nearest to `x[i]` under its group's step, ties to even, saturating; NaN
        /// becomes the largest code of its sign. Steps must be positive. Panics unless there are
        /// `x.len()` codes and `ceil(x.len() / group)` steps, and for a layout out of its ranges.
        fn minifloat_codes(
            x: &[f32],
            group: usize,
            steps: &[Step],
            layout: &MinifloatLayout,
            codes: &mut [u8],
        );

        /// `codes[i] = order[n]`, where `n` is the number of ascending `midpoints` strictly below `x[i]` under its
        /// group's step, clamped to [-1, 1]. Panics unless there are `x.len()` codes and `ceil(x.len() / group)`
        /// steps.
        fn book_codes(
            x: &[f32],
            group: usize,
            steps: &[Step],
            midpoints: &[f32; 15],
            order: &[u8; 16],
            codes: &mut [u8],
        );

        /// `codes[i] = RNE(clamp(v + zeros[g], low, high))` in two's complement, where `v` is `x[i]` under the step
        /// of its group `g`; or `clamp(RNE(v) + zeros[g], low, high)`, depending on the grid. Zeros are integers. A
        /// NaN element gets an unspecified code. Panics unless there are `x.len()` codes and `ceil(x.len() / group)`
        /// steps and zeros, and `low <= high`.
        fn int_codes(
            x: &[f32],
            group: usize,
            steps: &[Step],
            zeros: &[f32],
            grid: IntGrid,
            codes: &mut [u8],
        );

        /// Replaces each `x[i]` by `scales[g]` times the element of `grid` to which it rounds under the step of its
        /// group `g`, saturating: the nearest, ties to even, or with one `random` word per value one of its two
        /// neighbours, the upper one if the word is below 2^32 times the distance from the lower. NaN stays NaN.
        /// Panics unless there are `ceil(x.len() / group)` steps and scales, and no words or one per value.
        fn round_blocks(
            x: &mut [f32],
            group: usize,
            steps: &[Step],
            scales: &[f32],
            grid: ElementGrid,
            random: &[u32],
        );

        /// Writes the integer elements to which [`Self::round_blocks`] rounds `x`; `grid` is one of integers within
        /// -128 to 127. NaN gets an unspecified code. Panics as there, and unless there is a code per value.
        fn round_codes(
            x: &[f32],
            group: usize,
            steps: &[Step],
            grid: ElementGrid,
            random: &[u32],
            codes: &mut [i8],
        );

        /// Columns `first..first + n` of the row-major `x[rows, cols]` as rows: `out[j, i] = x[i, first + j]`, where `n`
        /// is `out.len() / rows`. Panics if a slice is too short or rows do not divide `out`.
        fn transpose_columns(x: &[f32], cols: usize, first: usize, rows: usize, out: &mut [f32]);

        /// Rotates every whole run of `order` values in place, `x · diag(signs) · Hᵀ` with the bits of
        /// [`mantissa_num::Hadamard::forward`]. No signs are all 1. Panics unless `order` is a power of two from 16 on,
        /// and there are as many signs or none.
        fn hadamard(x: &mut [f32], order: usize, signs: &[f32]);

        /// `out[i]` is [`random_u32`](mantissa_num::round::random_u32) of `seed` and index `first + i`.
        fn random_words(seed: u64, first: u64, out: &mut [u32]);

        /// Symmetric round-to-nearest of one row: per group `scale = amax / scale_div` (0 becomes the f32
        /// epsilon), `code = RNE(clamp(x / scale, qmin, qmax))`. `scale_div` is `(2^b - 1) / 2` for
        /// compressed-tensors, `2^(b-1) - 1` for the restricted range. A scale so large that `qmin` would
        /// decode to infinity is lowered.
        ///
        /// Panics unless `codes.len() == x.len()`, there are `ceil(x.len() / group)` scales, `qmin < 0`,
        /// `qmin < qmax` and `scale_div > 0`.
        ///
        /// # Errors
        /// [`NonFinite`] for the first group with a NaN or an infinity; earlier groups are done.
        fn quant_int_sym[simd](
            x: &[f32],
            group: usize,
            qmin: i8,
            qmax: i8,
            scale_div: f32,
            scales: &mut [f32],
            codes: &mut [i8],
        ) -> Result<(), NonFinite>;

        /// Codes of [`Self::quant_int_sym`] for given scales (clipped, rounded to bf16, shared …). A NaN element gets
        /// an unspecified code. Panics as there.
        fn int_codes_sym(x: &[f32], group: usize, qmin: i8, qmax: i8, scales: &[f32], codes: &mut [i8]);

        /// Asymmetric round-to-nearest of one row in the signed domain `qmin = -2^(bits-1)`,
        /// `qmax = 2^(bits-1) - 1`: per group, min and max extended to include 0,
        /// `scale = (max - min) / (2^bits - 1)` (0 becomes the f32 epsilon),
        /// `zero = RNE(clamp(qmin - min / scale, qmin, qmax))`,
        /// `code = RNE(clamp(x / scale + zero, qmin, qmax))`. A group of zeros has zero point and codes 0. A
        /// scale so large that a code would decode to infinity is lowered.
        ///
        /// Panics unless `codes.len() == x.len()`, there are `ceil(x.len() / group)` scales and zeros, and
        /// `bits` is 1 to 8.
        ///
        /// # Errors
        /// [`NonFinite`] for the first group with a NaN or an infinity; earlier groups are done.
        fn quant_int_asym[simd](
            x: &[f32],
            group: usize,
            bits: u32,
            scales: &mut [f32],
            zeros: &mut [i8],
            codes: &mut [i8],
        ) -> Result<(), NonFinite>;

        /// [`Codec::encode`](mantissa_num::codec::Codec::encode) of whole blocks of `codec`, the same bytes at every
        /// level: by its formula, or by the search for the least error under `importance`, one weight per column of
        /// whole rows. Panics unless `x` and `blocks` hold equally many whole blocks, and rows whole blocks.
        fn encode_blocks[simd](
            codec: CodecId,
            x: &[f32],
            importance: Option<&[f32]>,
            blocks: &mut [u8],
        );

        /// [`Codec::decode`](mantissa_num::codec::Codec::decode) of whole blocks of `codec`, the same values at every
        /// level. Panics unless `blocks` and `out` hold equally many whole blocks.
        fn decode_blocks(codec: CodecId, blocks: &[u8], out: &mut [f32]);

        /// One step of a trellis search. Writes to `next` the least cost of each group of states after it, from
        /// `costs`, those before it, and the squared distance of a state's value from `target`. Writes to `from` the
        /// back-pointers of [`TrellisValues::state`]. `scratch` is left undefined. Panics unless all have the length
        /// [`TrellisValues::groups`].
        fn trellis_step(
            values: &TrellisValues,
            target: f32,
            costs: &[f32],
            scratch: &mut [f32],
            next: &mut [f32],
            from: &mut [u8],
        );

        /// [`Self::error_sums`] of `x` and the output of [`Self::decode_blocks`] for `blocks`, bit for bit. Panics as
        /// there.
        fn block_error_sums[simd](codec: CodecId, blocks: &[u8], x: &[f32]) -> ErrorSums;

        /// Packs `codes[i] + offset` as a little-endian stream of `bits` (1 to 8) each; bytes of `out` beyond
        /// the stream become 0. Panics if `out` is too short or a sum does not fit `bits`.
        fn pack_codes_le(codes: &[i8], offset: u8, bits: u32, out: &mut [u8]);

        /// Unpacks `codes.len()` unsigned codes of `bits` (1 to 8) each from a little-endian stream. Panics
        /// if `packed` is too short.
        fn unpack_codes_le(packed: &[u8], bits: u32, codes: &mut [u8]);
    }
}
