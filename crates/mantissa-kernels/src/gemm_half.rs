//! Matrix products of bf16 and f16 operands into f32.
//!
//! Operands are row-major matrices of the bits (`u16`), as stored in a file or in memory; sums are f32. Names as in
//! [`crate::gemm`]. A forward pass is `nt` (`Y = X Wᵀ`), its backward passes are `nn` (`dX = dY W`) and `tn` (`dW =
//! dYᵀ X`). One thread: callers split rows, or columns. Both operands are packed at any size, which pays off from
//! some tens of rows on.

use crate::{Kernels, MatMut, MatRef, Operand};

impl Kernels {
    /// `C[t, n] = A[t, k] Bᵀ`, `B[n, k]`, of bf16 bits with f32 sums; added to C if `accumulate`.
    ///
    /// For every 32 elements along k there are two chains of fused multiply-adds that start at 0, one of the even and
    /// one of the odd elements; their sum is added to C, block by block. That is the order of `TDPBF16PS` at level
    /// amx, and every other level does the same. So bits are the same at every level and on every processor. An
    /// element depends only on its row of A, its column of B and its old value. Callers may split rows and columns
    /// anywhere, and k at multiples of 32.
    ///
    /// There are two exceptions. If [`Self::bf16_dot`] is true at level avx512 (`VDPBF16PS`), every block of 512
    /// along k is one chain that starts at 0 and takes the products pair by pair, the odd element before the even
    /// one, and k may be split at multiples of 512. If it is true at any level, a subnormal operand or sum counts as
    /// zero.
    ///
    /// The error is, to first order, at most `(min(k, 512) + ceil(k / 32)) 2^-24 (|A| |Bᵀ| + |C|)`. Each subnormal
    /// that counts as zero adds at most 2^-126 times the other operand, or 2^-126. (The orders are Intel's
    /// definitions of those instructions; a processor that rounds less stays within the error.)
    ///
    /// A NaN, an infinity times 0, or infinities of both signs in an element's sum make it NaN. A thread keeps up to
    /// 2.5 MiB for packed operands.
    ///
    /// # Panics
    /// If the shapes do not agree.
    pub fn gemm_bf16_nt(&self, a: MatRef<'_, u16>, b: MatRef<'_, u16>, c: MatMut<'_>, accumulate: bool) {
        self.gemm_bf16(Operand::Rows(a), Operand::Rows(b), c, accumulate);
    }

    /// `C[t, n] = A[t, k] B`, `B[k, n]`; as [`Self::gemm_bf16_nt`].
    ///
    /// # Panics
    /// If the shapes do not agree.
    pub fn gemm_bf16_nn(&self, a: MatRef<'_, u16>, b: MatRef<'_, u16>, c: MatMut<'_>, accumulate: bool) {
        self.gemm_bf16(Operand::Rows(a), Operand::Columns(b), c, accumulate);
    }

    /// `C[m, n] = Aᵀ B`, `A[k, m]`, `B[k, n]`; as [`Self::gemm_bf16_nt`].
    ///
    /// # Panics
    /// If the shapes do not agree.
    pub fn gemm_bf16_tn(&self, a: MatRef<'_, u16>, b: MatRef<'_, u16>, c: MatMut<'_>, accumulate: bool) {
        self.gemm_bf16(Operand::Columns(a), Operand::Columns(b), c, accumulate);
    }

    /// [`Self::gemm_bf16_nt`] of f16 bits, which are widened to f32 while packed and added in the order of
    /// [`Self::gemm_nt`] for many rows. Subnormals count, and the bits are the same at every level.
    ///
    /// # Panics
    /// If the shapes do not agree.
    pub fn gemm_f16_nt(&self, a: MatRef<'_, u16>, b: MatRef<'_, u16>, c: MatMut<'_>, accumulate: bool) {
        self.gemm_f16(Operand::Rows(a), Operand::Rows(b), c, accumulate);
    }

    /// [`Self::gemm_bf16_nn`] of f16 bits, as [`Self::gemm_f16_nt`].
    ///
    /// # Panics
    /// If the shapes do not agree.
    pub fn gemm_f16_nn(&self, a: MatRef<'_, u16>, b: MatRef<'_, u16>, c: MatMut<'_>, accumulate: bool) {
        self.gemm_f16(Operand::Rows(a), Operand::Columns(b), c, accumulate);
    }

    /// [`Self::gemm_bf16_tn`] of f16 bits, as [`Self::gemm_f16_nt`].
    ///
    /// # Panics
    /// If the shapes do not agree.
    pub fn gemm_f16_tn(&self, a: MatRef<'_, u16>, b: MatRef<'_, u16>, c: MatMut<'_>, accumulate: bool) {
        self.gemm_f16(Operand::Columns(a), Operand::Columns(b), c, accumulate);
    }
}
