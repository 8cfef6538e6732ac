//! Matrix products of bf16 and f16 operands into f32.
//!
//! Operands are row-major matrices of the bits (`u16`), as they lie in a file or in memory; sums are f32. Names
//! as in [`crate::gemm`]. A forward pass is `nt` (`Y = X Wᵀ`), its backward passes are `nn` (`dX = dY W`) and
//! `tn` (`dW = dYᵀ X`). One thread: callers split rows, or columns. Both operands are packed whatever their
//! size, which pays from some tens of rows on.

use crate::{Kernels, MatMut, MatRef, Operand};

impl Kernels {
    /// `C[t, n] = A[t, k] Bᵀ`, `B[n, k]`, of bf16 bits with f32 sums; added to C if `accumulate`.
    ///
    /// For every 32 elements along k there are two chains of fused multiply-adds that begin at 0, of the even and of the odd
    /// elements; their sum is added to C, 32 elements after 32. That is what `TDPBF16PS` does with tiles at level amx, and
    /// every other level does the same, so that bits are the same at every level and on every processor. An element depends
    /// on its row of A, its column of B and its old value alone: callers may split rows and columns as they like, and k at
    /// multiples of 32.
    ///
    /// There are two exceptions. Where [`Self::bf16_dot`] says at level avx512 that `VDPBF16PS` is used, every block of 512
    /// along k is one chain that begins at 0 and takes the products pair by pair, the odd element before the even one, and
    /// k may be split at multiples of 512. And where it says so at any level, a subnormal operand or sum counts as zero.
    ///
    /// The error is, to first order, at most `(min(k, 512) + ceil(k / 32)) 2^-24 (|A| |Bᵀ| + |C|)`; a subnormal that counts as zero
    /// adds at most 2^-126 times the other operand, or 2^-126, for each. (The orders are Intel's definitions of those
    /// instructions; a processor that rounds less stays within the error.)
    ///
    /// A NaN, an infinity times 0, or infinities of both signs in an element's sum make it NaN. A thread keeps
    /// up to 2.5 MiB for packed operands.
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

    /// [`Self::gemm_bf16_nt`] of f16 bits, widened to f32 while they are packed and then added as [`Self::gemm_nt`] adds many
    /// rows: subnormals count, and the bits are the same at every level.
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
