//! Combinations of weights and inputs that engines dispatch on.

use std::fmt;

use mantissa_num::format::{Affine, Format};
use mantissa_num::{Blocks, Code, minifloat};

use super::subject::{FormatClass, Input, Stored};

/// Layout of a weight's scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scales {
    /// One scale.
    Tensor,
    /// One scale per output row.
    Row,
    /// One scale per group of columns of a row.
    Group,
    /// One scale per tile.
    Tile,
    /// Anything else.
    Other,
}

/// Quantization of a layer's input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Inputs {
    /// Unquantized.
    None,
    /// 8-bit integers with one scale per token, computed at run time.
    Int8Token,
    /// 8-bit integers with a stored scale.
    Int8Static,
    /// FP8 with one scale per token, computed at run time.
    Fp8Token,
    /// FP8 with one scale, computed at run time.
    Fp8Dynamic,
    /// FP8 with a stored scale.
    Fp8Static,
    /// FP8 with one scale per 128 values.
    Fp8Group,
    /// NVFP4.
    Nvfp4,
    /// MXFP4, MXFP6 or MXFP8.
    Mx,
    /// Anything else.
    Other,
}

/// Combination that an engine accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Accepted {
    /// Kind of weights.
    pub weights: FormatClass,
    /// Layouts of their scales; any if empty.
    pub scales: &'static [Scales],
    /// Quantization of the inputs; any if empty.
    pub inputs: &'static [Inputs],
}

impl Accepted {
    /// Returns a combination.
    pub const fn new(weights: FormatClass, scales: &'static [Scales], inputs: &'static [Inputs]) -> Self {
        Accepted { weights, scales, inputs }
    }

    /// True if `stored` is of this combination.
    pub fn takes(&self, stored: &Stored) -> bool {
        self.weights == stored.kind()
            && (self.scales.is_empty() || self.scales.contains(&stored.scales()))
            && (self.inputs.is_empty() || self.inputs.contains(&stored.inputs()))
    }
}

impl Stored {
    /// Returns the layout of the scales.
    pub fn scales(&self) -> Scales {
        match self.format.blocks() {
            Blocks::Tensor => Scales::Tensor,
            Blocks::Row => Scales::Row,
            Blocks::Group(_) => Scales::Group,
            Blocks::Tile { .. } => Scales::Tile,
            _ => Scales::Other,
        }
    }

    /// Returns the quantization of the input.
    pub fn inputs(&self) -> Inputs {
        self.input.as_ref().map_or(Inputs::None, Input::kind)
    }

    /// Returns weights, scales and inputs in words: `int4 in groups of 128, int8 inputs per token`.
    pub fn words(&self) -> String {
        let weights = match self.integers() {
            Some((bits, false)) => format!("int{bits}"),
            Some((bits, true)) => format!("int{bits} with zero points"),
            None => match self.format.codec() {
                Some(codec) => codec.name.to_owned(),
                None => self.kind().name().to_owned(),
            },
        };
        let fixed = matches!(
            self.kind(),
            FormatClass::Nvfp4
                | FormatClass::Mxfp4
                | FormatClass::Mxfp8
                | FormatClass::Blocks
                | FormatClass::Book
        );
        let blocks = match self.format.blocks() {
            _ if fixed => String::new(),
            Blocks::Tensor => " with one scale".to_owned(),
            Blocks::Row => " with one scale per row".to_owned(),
            Blocks::Group(g) | Blocks::Flat(g) => format!(" in groups of {g}"),
            Blocks::Tile { rows, cols } => format!(" in tiles of {rows} × {cols}"),
            _ => " with scales of another kind".to_owned(),
        };
        format!("{weights}{blocks}, {}", self.inputs())
    }
}

impl Input {
    /// Returns the kind of this quantization.
    pub fn kind(&self) -> Inputs {
        let Format::Affine(Affine { code, blocks, scale, .. }) = &self.format else { return Inputs::Other };
        let power = scale.as_ref().is_some_and(|scale| scale.code == Code::E8m0);
        match (code, blocks, self.is_static) {
            (Code::Int(8), Blocks::Row, false) => Inputs::Int8Token,
            (Code::Int(8), Blocks::Tensor, true) => Inputs::Int8Static,
            (Code::Float(_), Blocks::Group(32), _) if power => Inputs::Mx,
            (Code::Float(minifloat::E4M3), Blocks::Row, false) => Inputs::Fp8Token,
            (Code::Float(minifloat::E4M3), Blocks::Tensor, true) => Inputs::Fp8Static,
            (Code::Float(minifloat::E4M3), Blocks::Tensor, false) => Inputs::Fp8Dynamic,
            (Code::Float(minifloat::E4M3), Blocks::Group(128), _) => Inputs::Fp8Group,
            (Code::Float(minifloat::E2M1), Blocks::Group(16), _) => Inputs::Nvfp4,
            _ => Inputs::Other,
        }
    }
}

impl fmt::Display for Inputs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Inputs::None => "unquantized inputs",
            Inputs::Int8Token => "int8 inputs per token",
            Inputs::Int8Static => "int8 inputs with a stored scale",
            Inputs::Fp8Token => "FP8 inputs per token",
            Inputs::Fp8Dynamic => "FP8 inputs with one scale",
            Inputs::Fp8Static => "FP8 inputs with a stored scale",
            Inputs::Fp8Group => "FP8 inputs in groups of 128",
            Inputs::Nvfp4 => "NVFP4 inputs",
            Inputs::Mx => "MX inputs",
            Inputs::Other => "inputs of another kind",
        })
    }
}
