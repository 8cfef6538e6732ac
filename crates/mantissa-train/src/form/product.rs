//! Products of two forms.

use mantissa_kernels::{Codes, MatMut, MatRef, kernels};
use mantissa_num::Accumulator;

use super::{Data, FormRef};
use crate::store::StoreRef;

thread_local! {
    /// Product before it is scaled and added.
    static PRODUCT: std::cell::RefCell<Vec<f32>> = const { std::cell::RefCell::new(Vec::new()) };
}

/// Rows of the product that are scaled and added at a time.
const ROWS: usize = 256;

/// Computes `out = A Bᵀ`, or `out += A Bᵀ` if `accumulate`, for forms `[m, k]` and `[n, k]` of one matmul.
pub(crate) fn product(a: FormRef<'_>, b: FormRef<'_>, out: &mut [f32], accumulate: bool) {
    let (m, n) = (a.lines(), b.lines());
    if let (Data::Codes(left), Data::Codes(right)) = (a.data, b.data) {
        let (left, right) = (codes(a, left, m), codes(b, right, n));
        return kernels().gemm_codes(left, right, MatMut::new(out, m, n), accumulate);
    }
    if a.accumulator != Accumulator::F32 {
        return emulated(a, b, out, accumulate);
    }
    let factor = a.factor * b.factor;
    let scales = factor != 1.0 || a.factors.is_some() || b.factors.is_some();
    if !(scales && accumulate) {
        gemm(a, b, out, accumulate);
        if scales {
            for (i, row) in out.chunks_exact_mut(n).enumerate() {
                let by = factor * a.factors.map_or(1.0, |factors| factors[i]);
                match b.factors {
                    Some(factors) => row.iter_mut().zip(factors).for_each(|(y, f)| *y = *y * by * f),
                    None => row.iter_mut().for_each(|y| *y *= by),
                }
            }
        }
        return;
    }
    let mut product = PRODUCT.take();
    let mut first = 0;
    for part in mantissa_model::flow::parts(m, ROWS) {
        let part_out = &mut out[part.start * n..part.end * n];
        product.resize(part_out.len(), 0.0);
        gemm(a.slice(part.clone()), b, &mut product, false);
        for (i, (row, from)) in part_out.chunks_exact_mut(n).zip(product.chunks_exact(n)).enumerate() {
            let by = factor * a.factors.map_or(1.0, |factors| factors[first + i]);
            match b.factors {
                Some(factors) => {
                    row.iter_mut().zip(from).zip(factors).for_each(|((y, x), f)| *y += x * by * f);
                }
                None => kernels().axpy(by, from, row),
            }
        }
        first += part.len();
    }
    PRODUCT.set(product);
}

fn gemm(a: FormRef<'_>, b: FormRef<'_>, out: &mut [f32], accumulate: bool) {
    let (m, n, k) = (a.lines(), b.lines(), a.k);
    let to = MatMut::new(out, m, n);
    let (Data::Values(a), Data::Values(b)) = (a.data, b.data) else { return };
    match (a, b) {
        (StoreRef::Bf16(a), StoreRef::Bf16(b)) => {
            kernels().gemm_bf16_nt(MatRef::new(a, m, k), MatRef::new(b, n, k), to, accumulate);
        }
        (StoreRef::F16(a), StoreRef::F16(b)) => {
            kernels().gemm_f16_nt(MatRef::new(a, m, k), MatRef::new(b, n, k), to, accumulate);
        }
        (a, b) => {
            let (a, b) = (a.widened(), b.widened());
            kernels().gemm_nt(MatRef::new(&a, m, k), MatRef::new(&b, n, k), to, accumulate);
        }
    }
}

/// Lines of codes as the kernel takes them.
fn codes<'a>(form: FormRef<'a>, codes: &'a [i8], lines: usize) -> Codes<'a> {
    let FormRef { k, scales, factor, factors, .. } = form;
    Codes { codes: MatRef::new(codes, lines, k), scales, factors, factor }
}

/// Computes the product element by element in the accumulator of the forms: the elements of each unit are summed there
/// and their sums, times the scales of both, in f32.
fn emulated(a: FormRef<'_>, b: FormRef<'_>, out: &mut [f32], accumulate: bool) {
    let (Data::Values(left), Data::Values(right)) = (a.data, b.data) else { return };
    let (left, right, n, k) = (left.widened(), right.widened(), b.lines(), a.k);
    if k == 0 || n == 0 {
        return out.fill(0.0);
    }
    let unit = a.scales.or(b.scales).map_or(k, |(unit, _)| unit);
    let units = k.div_ceil(unit.max(1));
    let scale =
        |form: &FormRef<'_>, line: usize, u: usize| form.scales.map_or(1.0, |(_, all)| all[line * units + u]);
    let factor = a.factor * b.factor;
    for (i, (x, out)) in left.chunks_exact(k).zip(out.chunks_exact_mut(n)).enumerate() {
        let row_factor = factor * a.factors.map_or(1.0, |factors| factors[i]);
        for (j, (y, out)) in right.chunks_exact(k).zip(out).enumerate() {
            let blocks = x.chunks(unit).zip(y.chunks(unit)).enumerate();
            let sum = blocks.fold(0f32, |sum, (u, (x, y))| {
                (scale(&a, i, u) * scale(&b, j, u)).mul_add(a.accumulator.dot(x, y), sum)
            });
            let value = sum * row_factor * b.factors.map_or(1.0, |factors| factors[j]);
            *out = if accumulate { *out + value } else { value };
        }
    }
}
