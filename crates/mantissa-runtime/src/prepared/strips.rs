//! Products with stored codes: strips of rows are dequantized to f32 and multiplied, on several threads.

use mantissa_kernels::{MatMut, MatRef, for_each_with, kernels};
use mantissa_model::Linear;

/// Rows of a strip.
const STRIP: usize = 64;

/// Computes `out = x Wᵀ`, or adds it to `out`; `x` `[tokens, cols]`, `out` `[tokens, rows]`. A token has the same bits
/// in every call.
pub(super) fn multiply(linear: &Linear, x: &[f32], out: &mut [f32], accumulate: bool, threads: usize) {
    let (rows, cols) = (linear.rows(), linear.cols());
    let tokens = x.len() / cols;
    // Strip by strip, so that every thread has a slice of its own.
    let mut products = vec![0.0; tokens * rows];
    let strips = products.chunks_mut(STRIP * tokens).enumerate();
    for_each_with(threads, Vec::new, strips, |weight: &mut Vec<f32>, (i, product)| {
        let here = product.len() / tokens;
        weight.resize(STRIP * cols, 0.0);
        for (r, out) in weight.chunks_exact_mut(cols).take(here).enumerate() {
            linear.row(i * STRIP + r, out);
        }
        let b = MatRef::new(&weight[..here * cols], here, cols);
        for (x, product) in x.chunks_exact(cols).zip(product.chunks_exact_mut(here)) {
            kernels().gemm_nt(MatRef::new(x, 1, cols), b, MatMut::new(product, 1, here), false);
        }
    });
    for (i, product) in products.chunks(STRIP * tokens).enumerate() {
        let here = product.len() / tokens;
        for (out, product) in out.chunks_exact_mut(rows).zip(product.chunks_exact(here)) {
            let out = &mut out[i * STRIP..][..here];
            match accumulate {
                true => kernels().axpy(1.0, product, out),
                false => out.copy_from_slice(product),
            }
        }
    }
}
