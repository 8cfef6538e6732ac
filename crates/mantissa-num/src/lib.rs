//! Number formats as data: bits ↔ value, rounding, [`Scheme`]s, block and packing layouts.
//!
//! Pure: no I/O, no threads, no unsafe code. Every faster path of mantissa is tested against this specification.
//!
//! ```
//! use mantissa_num::{Given, Scheme, quantize};
//!
//! let scheme: Scheme = "int4-g32".parse()?;
//! let x: Vec<f32> = (0..64).map(|i| (i as f32 * 0.7).sin()).collect();
//! let stored = quantize(&scheme, &x, 2, 32, Given::default())?;
//! assert_eq!(stored.format.bits_per_weight(2, 32), 5.0);
//! let error = stored.dequantize()?.iter().zip(&x).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
//! assert!(error <= 0.5 / 7.5);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

// Layer: arithmetic and bit layouts.
pub mod accumulate;
mod codes;
pub mod e8m0;
mod error;
pub mod minifloat;
mod nearest;
pub mod pack;
mod pages;
pub mod round;
pub mod swizzle;

// Layer: codes of elements and of blocks.
pub mod codebook;
pub mod codec;
pub mod hadamard;
pub mod lanes;
pub mod lloyd;
pub mod stored;
pub mod trellis;

// Layer: schemes and their grammar.
pub mod format;
pub mod grammar;
mod level;
pub mod scheme;
pub mod variant;

// Layer: quantized tensors.
mod affine_blocks;
pub mod blockwise;
mod tensor;
mod unfold;

pub use accumulate::{Accumulator, AccumulatorError};
pub use codec::CodecId;
pub use codes::Codes;
pub use error::TensorError;
pub use format::{Affine, Blocks, Code, Format, Offset, ScaleTree, Sense, Table};
pub use grammar::{ParseError, parse_activation, parse_weight};
pub use hadamard::Hadamard;
pub use level::{Nested, Offsets, ScaleLevel};
pub use nearest::{listed, nearest, nearest_list};
pub use pages::page_command;
pub use round::Rounding;
pub use scheme::{Encoder, RowKind, Rule, ScaleFloor, Scheme, Source};
pub use tensor::{
    Given, Quantized, StaticScale, check_finite, code_unit, fake_quantize, quantize, quantize_with_scales,
};
