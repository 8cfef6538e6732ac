//! Fast loops over slices, chosen at run time: the heavy operations of mantissa and all of its `unsafe` code.
//!
//! # How dispatch works
//!
//! Every kernel is written once, as plain Rust over slices, in the private module `generic`. A macro instantiates the
//! whole set once per instruction-set level ([`Isa`]) inside functions that enable that level's target features, so
//! that the compiler vectorizes the same arithmetic with wider registers. A [`Kernels`] value is the table of the
//! functions of one level. [`Kernels::new`] refuses a level that the processor lacks, which is the only condition for
//! calling through the table soundly. [`kernels`] resolves the best level once per process.
//! `MANTISSA_ISA=scalar|avx2|avx512|amx|neon` forces a level; a binary calls [`init`] first so that a bad value is an
//! error.
//!
//! # Identical bits at every level
//!
//! Every kernel of [`Kernels`] gives the same bits at every level, for any slice length and alignment. Reductions use
//! 16 lane accumulators (element `i` belongs to lane `i mod 16`) that are combined in one fixed tree. Nothing is
//! reassociated, and `exp` is our own polynomial. A multiply-add is fused either at every level (if a kernel's
//! documentation says so) or at none. A NaN result is NaN at every level, but its payload is unspecified (Rust leaves
//! it open). Converters preserve NaN payloads too.
//!
//! Exempt are the bf16 products ([`Kernels::gemm_bf16_nt`] and its siblings) if they use the processor's own dot
//! product ([`Kernels::bf16_dot`]): subnormals are flushed to zero, and at level amx the tiles round their sums in
//! another order. Products of f32 and f16 are not exempt.
//!
//! # Contracts
//!
//! Kernels are safe functions. Lengths are checked with real asserts that name the kernel. Values may be anything
//! (NaN and infinities included) and at worst cause NaN in the output.

// Layer: memory, threads and vector registers.
mod activation;
mod buffer;
mod element;
mod mat;
mod memory;
mod pages;
mod parallel;
mod pool;
mod simd;

// Layer: kernels and instruction-set levels.
#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod codes_x86;
mod generic;
mod isa;
#[cfg(target_arch = "x86_64")]
mod x86;

// Layer: choice of a level.
mod dispatch;

// Layer: products, attention, factorizations and optimizer state.
mod adam;
mod attention;
mod attention_backward;
mod cholesky;
mod gemm;
mod gemm_half;
pub mod packed;
pub mod paged;
mod trellis;
mod xtx;

// Layer: devices and their peaks.
pub mod device;
mod peaks;

pub use activation::{Activation, ActivationParameter};
pub use adam::Adam;
pub use attention::{CausalAttention, ScoreRules};
pub use attention_backward::{AttentionGrads, AttentionSaved};
pub use cholesky::NotPositiveDefinite;
pub use dispatch::{Kernels, init, kernels};
pub use element::Element;
pub use generic::{
    AdamDirection, AdamLength, AdamWStep, BlockwiseAdamW, CodeTable, Codes, ElementGrid, ErrorSums, IntGrid,
    LogSumExp, MinifloatLayout, NonFinite, Operand, STATE_BLOCK, Step, TrellisValues,
};
pub use isa::{Isa, IsaError};
pub use mat::{MatMut, MatRef};
pub use memory::give_back_memory;
pub use pages::release;
pub use parallel::{for_each, for_each_range, for_each_with, map_reduce_fixed, parts};
pub use peaks::{PeakLoop, ReadProbe};
pub use pool::{available_threads, renew as renew_threads};
pub use trellis::TrellisScratch;
