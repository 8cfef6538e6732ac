//! Tensor types of GGUF: ggml's numbering (`ggml.h`), sizes and how to decode each.

use mantissa_num::CodecId;
use mantissa_num::codec::Codec;

use crate::dtype::Dtype;

/// Tensor type defined by ggml, without removed types and types that only forks have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GgmlType {
    /// Number in the file.
    pub id: u32,
    /// ggml's name.
    pub name: &'static str,
    /// Meaning of its bytes.
    pub storage: Storage,
}

/// Meaning of the bytes of a tensor type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Storage {
    /// One number after another.
    Plain(Dtype),
    /// Blocks that this crate decodes.
    Blocks(CodecId),
}

macro_rules! types {
    ($($id:literal $constant:ident $name:literal $storage:expr;)*) => {
        impl GgmlType {
            $(
                #[doc = concat!("ggml's ", $name, ", number ", stringify!($id), ".")]
                pub const $constant: Self = Self { id: $id, name: $name, storage: $storage };
            )*

            /// Every type, by number.
            pub const ALL: &'static [Self] = &[$(Self::$constant),*];
        }
    };
}

types! {
    0 F32 "F32" Storage::Plain(Dtype::F32);
    1 F16 "F16" Storage::Plain(Dtype::F16);
    2 Q4_0 "Q4_0" Storage::Blocks(CodecId::Q4_0);
    3 Q4_1 "Q4_1" Storage::Blocks(CodecId::Q4_1);
    6 Q5_0 "Q5_0" Storage::Blocks(CodecId::Q5_0);
    7 Q5_1 "Q5_1" Storage::Blocks(CodecId::Q5_1);
    8 Q8_0 "Q8_0" Storage::Blocks(CodecId::Q8_0);
    9 Q8_1 "Q8_1" Storage::Blocks(CodecId::Q8_1);
    10 Q2_K "Q2_K" Storage::Blocks(CodecId::Q2K);
    11 Q3_K "Q3_K" Storage::Blocks(CodecId::Q3K);
    12 Q4_K "Q4_K" Storage::Blocks(CodecId::Q4K);
    13 Q5_K "Q5_K" Storage::Blocks(CodecId::Q5K);
    14 Q6_K "Q6_K" Storage::Blocks(CodecId::Q6K);
    15 Q8_K "Q8_K" Storage::Blocks(CodecId::Q8K);
    16 IQ2_XXS "IQ2_XXS" Storage::Blocks(CodecId::Iq2Xxs);
    17 IQ2_XS "IQ2_XS" Storage::Blocks(CodecId::Iq2Xs);
    18 IQ3_XXS "IQ3_XXS" Storage::Blocks(CodecId::Iq3Xxs);
    19 IQ1_S "IQ1_S" Storage::Blocks(CodecId::Iq1S);
    20 IQ4_NL "IQ4_NL" Storage::Blocks(CodecId::Iq4Nl);
    21 IQ3_S "IQ3_S" Storage::Blocks(CodecId::Iq3S);
    22 IQ2_S "IQ2_S" Storage::Blocks(CodecId::Iq2S);
    23 IQ4_XS "IQ4_XS" Storage::Blocks(CodecId::Iq4Xs);
    24 I8 "I8" Storage::Plain(Dtype::I8);
    25 I16 "I16" Storage::Plain(Dtype::I16);
    26 I32 "I32" Storage::Plain(Dtype::I32);
    27 I64 "I64" Storage::Plain(Dtype::I64);
    28 F64 "F64" Storage::Plain(Dtype::F64);
    29 IQ1_M "IQ1_M" Storage::Blocks(CodecId::Iq1M);
    30 BF16 "BF16" Storage::Plain(Dtype::BF16);
    34 TQ1_0 "TQ1_0" Storage::Blocks(CodecId::Tq1_0);
    35 TQ2_0 "TQ2_0" Storage::Blocks(CodecId::Tq2_0);
    39 MXFP4 "MXFP4" Storage::Blocks(CodecId::Mxfp4);
    40 NVFP4 "NVFP4" Storage::Blocks(CodecId::Nvfp4);
    41 Q1_0 "Q1_0" Storage::Blocks(CodecId::Q1_0);
    42 Q2_0 "Q2_0" Storage::Blocks(CodecId::Q2_0);
}

impl GgmlType {
    /// Type with this number.
    pub fn from_id(id: u32) -> Option<Self> {
        Self::ALL.iter().copied().find(|ty| ty.id == id)
    }

    /// The type that stores blocks of `codec`.
    pub fn of_codec(codec: CodecId) -> Option<Self> {
        Self::ALL.iter().copied().find(|ty| ty.storage == Storage::Blocks(codec))
    }

    /// Elements and bytes of a block; one element of a plain type.
    pub fn block(self) -> (usize, usize) {
        match self.storage {
            Storage::Plain(dtype) => (1, (dtype.bits() / 8) as usize),
            Storage::Blocks(id) => (id.codec().elements, id.codec().bytes),
        }
    }

    /// The codec of a block type.
    pub fn codec(self) -> Option<&'static Codec> {
        match self.storage {
            Storage::Blocks(id) => Some(id.codec()),
            _ => None,
        }
    }

    /// Bytes of a row of `cols` elements; `None` if blocks do not divide it, or on overflow.
    pub fn row_bytes(self, cols: usize) -> Option<usize> {
        let (elements, bytes) = self.block();
        if cols.is_multiple_of(elements) { (cols / elements).checked_mul(bytes) } else { None }
    }

    /// llama.cpp's number for a file with mostly this type (`llama_ftype`, another numbering).
    pub fn file_type(self) -> Option<u32> {
        let (_, number) = FILE_TYPES.into_iter().find(|(ty, _)| *ty == self)?;
        Some(number)
    }
}

/// The part of `llama_ftype` that is written.
const FILE_TYPES: [(GgmlType, u32); 12] = [
    (GgmlType::F32, 0),
    (GgmlType::F16, 1),
    (GgmlType::Q4_0, 2),
    (GgmlType::Q4_1, 3),
    (GgmlType::Q8_0, 7),
    (GgmlType::Q5_0, 8),
    (GgmlType::Q5_1, 9),
    (GgmlType::BF16, 32),
    (GgmlType::TQ1_0, 36),
    (GgmlType::TQ2_0, 37),
    (GgmlType::MXFP4, 38),
    (GgmlType::NVFP4, 39),
];
