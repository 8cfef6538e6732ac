//! The codec of each identifier, and its grid.

use super::{Codec, CodecId, fp4, grids, iq, iq4, k_quants, legacy, ternary};

impl CodecId {
    /// The codec itself.
    pub const fn codec(self) -> &'static Codec {
        match self {
            CodecId::Iq1M => &iq::IQ1_M,
            CodecId::Iq1S => &iq::IQ1_S,
            CodecId::Iq2S => &iq::IQ2_S,
            CodecId::Iq2Xs => &iq::IQ2_XS,
            CodecId::Iq2Xxs => &iq::IQ2_XXS,
            CodecId::Iq3S => &iq::IQ3_S,
            CodecId::Iq3Xxs => &iq::IQ3_XXS,
            CodecId::Iq4Nl => &iq4::IQ4_NL,
            CodecId::Iq4Xs => &iq4::IQ4_XS,
            CodecId::Mxfp4 => &fp4::MXFP4,
            CodecId::Nvfp4 => &fp4::NVFP4,
            CodecId::Q1_0 => &legacy::Q1_0,
            CodecId::Q2_0 => &legacy::Q2_0,
            CodecId::Q2K => &k_quants::Q2_K,
            CodecId::Q3K => &k_quants::Q3_K,
            CodecId::Q4_0 => &legacy::Q4_0,
            CodecId::Q4_1 => &legacy::Q4_1,
            CodecId::Q4K => &k_quants::Q4_K,
            CodecId::Q5_0 => &legacy::Q5_0,
            CodecId::Q5_1 => &legacy::Q5_1,
            CodecId::Q5K => &k_quants::Q5_K,
            CodecId::Q6K => &k_quants::Q6_K,
            CodecId::Q8_0 => &legacy::Q8_0,
            CodecId::Q8_1 => &legacy::Q8_1,
            CodecId::Q8K => &k_quants::Q8_K,
            CodecId::Tq1_0 => &ternary::TQ1_0,
            CodecId::Tq2_0 => &ternary::TQ2_0,
        }
    }

    /// Name in the Scheme grammar.
    pub const fn name(self) -> &'static str {
        self.codec().name
    }

    /// Grid of a lattice type (IQ1 to IQ3), data of the format. Each entry holds the level indices of a point's
    /// coordinates, the first in the low bits: two bits each, three in IQ3.
    pub const fn grid(self) -> Option<&'static [u16]> {
        match self {
            CodecId::Iq1S | CodecId::Iq1M => Some(&grids::IQ1),
            CodecId::Iq2Xxs => Some(&grids::IQ2_XXS),
            CodecId::Iq2Xs => Some(&grids::IQ2_XS),
            CodecId::Iq2S => Some(&grids::IQ2_S),
            CodecId::Iq3Xxs => Some(&grids::IQ3_XXS),
            CodecId::Iq3S => Some(&grids::IQ3_S),
            _ => None,
        }
    }
}
