//! Quality of the results of a linear layer's three matmuls: signal-to-quantization-noise ratio against the same
//! product in f32 of operands that are not rounded.
//!
//! Only some rows of each result are computed again, so that a step with telemetry costs little more: rows of Y and dX
//! are tokens, rows of dW output features. Weights count as they are stored; rounding into a working copy is not an
//! error of the matmul.

use std::ops::Range;

use mantissa_kernels::{MatMut, MatRef, kernels};

use crate::form::{FormRef, product};
use crate::health::{Compared, Operator, Watch, vanishes};
use crate::linear::LinearOp;
use crate::policy::Gemm;
use crate::store::{Precision, StoreRef, round};

/// Blocks of rows that are compared, evenly spaced, and rows of each.
const BLOCKS: usize = 4;
const ROWS: usize = 4;

/// Operands of a matmul before rounding: X and W for fprop, dY and W for dgrad, dY and X for wgrad.
#[derive(Clone, Copy)]
pub(crate) struct Exact<'a> {
    pub(crate) gemm: Gemm,
    pub(crate) left: &'a [f32],
    pub(crate) right: StoreRef<'a>,
}

impl Watch {
    /// Compares some rows of a matmul's result with f32. `forms` are its quantized operands; without them the
    /// operands are rounded as the layer's dtypes say. Costs one comparison unless telemetry is on.
    pub(crate) fn gemm(
        &self,
        at: Operator,
        linear: &LinearOp,
        exact: Exact<'_>,
        forms: Option<[FormRef<'_>; 2]>,
    ) {
        if !matches!(self, Watch::Health(_)) {
            return;
        }
        let plain = linear.precisions(exact.gemm);
        if forms.is_none() && plain == (Precision::F32, Precision::F32) {
            return;
        }
        let found = exact.compare(linear, plain, forms);
        self.compared(at, exact.gemm, &found);
    }
}

impl Exact<'_> {
    fn compare(
        self,
        linear: &LinearOp,
        (to_left, to_right): (Precision, Precision),
        forms: Option<[FormRef<'_>; 2]>,
    ) -> Compared {
        let (rows, cols) = (linear.rows(), linear.cols());
        // Lines of the result, length of the contraction, width of the result.
        let (lines, k, width) = match self.gemm {
            Gemm::Fprop => (self.left.len() / cols.max(1), cols, rows),
            Gemm::Dgrad => (self.left.len() / rows.max(1), rows, cols),
            Gemm::Wgrad => (rows, self.left.len() / rows.max(1), cols),
        };
        let mut sums = Compared::default();
        if k == 0 || width == 0 {
            return sums;
        }
        sums.count(self.is_dead((to_left, to_right), forms));
        let right = self.right.widened();
        let rounded = forms.is_none().then(|| {
            let mut copy = right.to_vec();
            round(to_right, &mut copy);
            copy
        });
        for block in blocks(lines) {
            let left = self.lines(block.clone(), k, rows);
            let (mut exact, mut found) = (vec![0.0; block.len() * width], vec![0.0; block.len() * width]);
            self.multiply(&left, &right, k, &mut exact);
            match (forms, &rounded) {
                (Some([a, b]), _) => product(a.slice(block.clone()), b, &mut found, false),
                (None, rounded) => {
                    let mut left = left;
                    round(to_left, &mut left);
                    self.multiply(&left, rounded.as_deref().unwrap_or(&right), k, &mut found);
                }
            }
            sums.add(&exact, &found, block.len());
        }
        sums
    }

    /// True if an operand is 0 throughout: before rounding, or after it.
    fn is_dead(self, (to_left, to_right): (Precision, Precision), forms: Option<[FormRef<'_>; 2]>) -> bool {
        let left = StoreRef::F32(self.left);
        match forms {
            _ if left.is_zero() || self.right.is_zero() => true,
            Some(forms) => forms.into_iter().any(FormRef::is_zero),
            None => vanishes(to_left, self.left) || vanishes(to_right, &self.right.widened()),
        }
    }

    /// Returns lines of the left operand along the contraction axis; wgrad takes columns of dY.
    fn lines(self, block: Range<usize>, k: usize, rows: usize) -> Vec<f32> {
        match self.gemm {
            Gemm::Wgrad => {
                block.flat_map(|feature| self.left.iter().skip(feature).step_by(rows).copied()).collect()
            }
            _ => self.left[block.start * k..block.end * k].to_vec(),
        }
    }

    /// Computes lines of the product in f32.
    fn multiply(self, left: &[f32], right: &[f32], k: usize, out: &mut [f32]) {
        let m = left.len() / k;
        let n = out.len() / m.max(1);
        let (left, out) = (MatRef::new(left, m, k), MatMut::new(out, m, n));
        match self.gemm {
            Gemm::Fprop => kernels().gemm_nt(left, MatRef::new(right, n, k), out, false),
            _ => kernels().gemm_nn(left, MatRef::new(right, k, n), out, false),
        }
    }
}

/// Returns evenly spaced blocks of lines: all if there are few.
fn blocks(lines: usize) -> Vec<Range<usize>> {
    if lines <= BLOCKS * ROWS {
        return std::iter::once(0..lines).filter(|all| !all.is_empty()).collect();
    }
    (0..BLOCKS).map(|i| i * (lines - ROWS) / (BLOCKS - 1)).map(|first| first..first + ROWS).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use mantissa_model::LinearKind;
    use mantissa_num::round::random_u32;

    use super::*;
    use crate::policy::LinearPolicy;

    #[test]
    fn blocks_are_disjoint_and_span_all_lines() {
        assert_eq!((blocks(0), blocks(5)), (Vec::new(), std::iter::once(0..5).collect::<Vec<_>>()));
        for lines in [16, 17, 100, 4096] {
            let all = blocks(lines);
            assert!(all.windows(2).all(|pair| pair[0].end <= pair[1].start), "{lines}: {all:?}");
            assert_eq!((all[0].start, all[all.len() - 1].end), (0, lines));
        }
    }

    /// Results in bf16 have the noise of two roundings of 8 bits; all three matmuls are compared, on any shape.
    #[test]
    fn results_are_compared_with_f32() {
        let (rows, cols, tokens) = (40, 24, 90);
        let noise = |n: usize, seed: u64| -> Vec<f32> {
            (0..n as u64).map(|i| (f64::from(random_u32(seed, i)) / 4_294_967_296.0 - 0.5) as f32).collect()
        };
        let (w, x, dy) = (noise(rows * cols, 1), noise(tokens * cols, 2), noise(tokens * rows, 3));
        let at = Operator::Linear(0, LinearKind::Up);
        let all = |policy: &LinearPolicy| {
            let linear = LinearOp::new("m", (rows, cols), 0..rows * cols, None, policy).unwrap();
            let watch = Watch::health();
            for (gemm, left, right) in [(Gemm::Fprop, &x, &w), (Gemm::Dgrad, &dy, &w), (Gemm::Wgrad, &dy, &x)]
            {
                watch.gemm(at, &linear, Exact { gemm, left, right: StoreRef::F32(right) }, None);
            }
            watch.gemms(&crate::health::tests::config())
        };
        let found = all(&LinearPolicy::plain(Precision::Bf16));
        assert_eq!(
            found.iter().map(|gemm| gemm.gemm).collect::<Vec<_>>(),
            ["fprop y", "dgrad dx", "wgrad dw"]
        );
        for gemm in &found {
            let sqnr = gemm.sqnr_db.unwrap();
            assert!((45.0..65.0).contains(&sqnr) && gemm.rows == 16, "{gemm:?}");
        }
        assert!(all(&LinearPolicy::f32()).is_empty(), "f32 has no error");
    }
}
