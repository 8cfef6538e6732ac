//! The ways in which readers and writers of a checkpoint disagree, each as a change that undoes it.

use mantissa_model::{LinearInfo, LinearKind, ModelConfig};
use mantissa_num::format::{Affine, Format, Offset};
use mantissa_num::pack::transpose;
use mantissa_num::{Blocks, Code, Codes, Quantized};
use mantissa_store::convention::gguf::{to_gguf_order, to_hf_order};
use mantissa_store::convention::{LinearWeight, ModelFiles, Weight};
use serde::Serialize;

use crate::error::AdviseError;
use crate::observe::rotated_heads;
use crate::values::values;

/// A disagreement, and its undoing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Alternative {
    /// Zero points one higher.
    ZeroPointUp,
    /// Zero points one lower.
    ZeroPointDown,
    /// The two codes of a byte in the other order.
    NibbleOrder,
    /// Codes that are stored in neighbouring pairs, read as the halves of a block.
    HalfSplit,
    /// Codes that are stored as the halves of a block, read in neighbouring pairs.
    Adjacent,
    /// Rows of q and k in heads whose halves are interleaved, put apart.
    RowsApart,
    /// The same, interleaved.
    RowsInterleaved,
    /// The scale of the whole tensor as its reciprocal.
    GlobalReciprocal,
    /// The scale of the whole tensor of the layer that it is joined with (gate and up).
    GlobalSwapped,
    /// Block scales as their reciprocals.
    ScaleReciprocal,
    /// Block scales that were written column by column.
    ScalesTransposed,
    /// gate and up in each other's place.
    GateUpSwapped,
    /// Norms that are stored less one.
    NormPlusOne,
    /// Norms that are stored plus one.
    NormMinusOne,
    /// A beginning-of-sequence token where there is none, or none where there is one.
    OtherBos,
}

/// What is known of an alternative.
pub struct Entry {
    /// It.
    pub alternative: Alternative,
    /// Its name in tables.
    pub name: &'static str,
    /// What has gone wrong where it repairs the model.
    pub cause: &'static str,
    /// What helps.
    pub cure: &'static str,
}

/// Every alternative, in the order in which they are tried.
pub const ALTERNATIVES: [Entry; 15] = [
    Entry {
        alternative: Alternative::ZeroPointUp,
        name: "zero points + 1",
        cause: "zero points stored less one, as GPTQ v1 has them, under a label that says otherwise",
        cure: "set checkpoint_format to \"gptq\"",
    },
    Entry {
        alternative: Alternative::ZeroPointDown,
        name: "zero points - 1",
        cause: "zero points stored as they are, as GPTQ v2 has them, under a label that says otherwise",
        cure: "set checkpoint_format to \"gptq_v2\"",
    },
    Entry {
        alternative: Alternative::NibbleOrder,
        name: "nibbles swapped",
        cause: "the two codes of a byte are packed high nibble first where the convention has low first, or the other way",
        cure: "pack the codes again in the convention's order",
    },
    Entry {
        alternative: Alternative::HalfSplit,
        name: "pairs as halves",
        cause: "codes packed in neighbouring pairs were written where a block's halves share bytes",
        cure: "pack the codes again in the convention's order",
    },
    Entry {
        alternative: Alternative::Adjacent,
        name: "halves as pairs",
        cause: "codes whose bytes hold the halves of a block, as GGUF has them, were written as neighbouring pairs",
        cure: "pack the codes again in the convention's order",
    },
    Entry {
        alternative: Alternative::RowsApart,
        name: "q and k rows apart",
        cause: "rows of q and k are interleaved, as GGUF's llama has them, in a file that should have Hugging Face's order",
        cure: "convert again with the permutation undone",
    },
    Entry {
        alternative: Alternative::RowsInterleaved,
        name: "q and k rows interleaved",
        cause: "a GGUF file of the llama architecture was written without the permutation of q and k",
        cure: "convert again with the permutation of the architecture",
    },
    Entry {
        alternative: Alternative::GlobalReciprocal,
        name: "1 / global scale",
        cause: "the global scale is stored as a multiplier where the convention has the divisor, or the other way",
        cure: "store the reciprocal",
    },
    Entry {
        alternative: Alternative::GlobalSwapped,
        name: "global scales of gate and up swapped",
        cause: "the global scales of gate and up stand in each other's place",
        cure: "swap them",
    },
    Entry {
        alternative: Alternative::ScaleReciprocal,
        name: "1 / block scales",
        cause: "block scales are stored as reciprocals (a name ending in _inv does not mean that they are)",
        cure: "store the multipliers",
    },
    Entry {
        alternative: Alternative::ScalesTransposed,
        name: "block scales transposed",
        cause: "block scales were written group by group instead of row by row",
        cure: "transpose them",
    },
    Entry {
        alternative: Alternative::GateUpSwapped,
        name: "gate and up swapped",
        cause: "gate and up stand in each other's place, as where a fused weight was cut in the wrong order",
        cure: "swap the two tensors",
    },
    Entry {
        alternative: Alternative::NormPlusOne,
        name: "norms + 1",
        cause: "norms are stored less one (Gemma's way) for an architecture that multiplies with them as they are",
        cure: "add 1 to every norm",
    },
    Entry {
        alternative: Alternative::NormMinusOne,
        name: "norms - 1",
        cause: "norms are stored plus one for an architecture that adds 1 itself",
        cure: "subtract 1 from every norm",
    },
    Entry {
        alternative: Alternative::OtherBos,
        name: "the other BOS",
        cause: "the tokenizer puts a beginning-of-sequence token where the model was trained without, or leaves it out",
        cure: "set add_bos_token in tokenizer_config.json (tokenizer.ggml.add_bos_token in GGUF)",
    },
];

impl Alternative {
    /// What is known of it.
    pub fn entry(self) -> &'static Entry {
        let found = ALTERNATIVES.iter().find(|entry| entry.alternative == self);
        found.unwrap_or(&ALTERNATIVES[0])
    }

    /// Whether it changes norms instead of linear layers, and by how much.
    pub(super) fn of_norms(self) -> Option<f32> {
        match self {
            Alternative::NormPlusOne => Some(1.0),
            Alternative::NormMinusOne => Some(-1.0),
            _ => None,
        }
    }

    /// The layer `info` of `files` under this alternative; `None` where it changes nothing there.
    ///
    /// # Errors
    /// What cannot be read.
    pub(super) fn linear(
        self,
        files: &ModelFiles,
        config: &ModelConfig,
        info: &LinearInfo,
    ) -> Result<Option<LinearWeight>, AdviseError> {
        let read = |info: &LinearInfo| files.linear(&info.module, info.rows, info.cols, info.bias);
        match self {
            Alternative::RowsApart | Alternative::RowsInterleaved => {
                let Some(heads) = rotated_heads(info, config) else { return Ok(None) };
                let mut weight = read(info)?;
                let bias = weight.bias.take();
                let values = values(&info.module, weight)?;
                let order = |rows: &[f32], row| match self {
                    Alternative::RowsApart => to_hf_order(rows, row, heads),
                    _ => to_gguf_order(rows, row, heads),
                };
                let changed = order(&values, info.cols);
                Ok(Some(LinearWeight {
                    rows: info.rows,
                    cols: info.cols,
                    weight: Weight::F32(changed),
                    bias: bias.map(|bias| order(&bias, 1)),
                    input: None,
                    transforms: Default::default(),
                }))
            }
            Alternative::GateUpSwapped | Alternative::GlobalSwapped => {
                let Some(partner) = partner(config, info) else { return Ok(None) };
                let other = read(&partner)?;
                if self == Alternative::GateUpSwapped {
                    return Ok(Some(other));
                }
                let mut weight = read(info)?;
                let (Weight::Quantized(q), Weight::Quantized(other)) = (&mut weight.weight, &other.weight)
                else {
                    return Ok(None);
                };
                let differ = q.outer.is_some() && other.outer.is_some() && q.outer != other.outer;
                q.outer = other.outer;
                Ok(differ.then_some(weight))
            }
            _ => {
                let mut weight = read(info)?;
                let Weight::Quantized(q) = weight.weight else { return Ok(None) };
                let Some(changed) = self.codes(q) else { return Ok(None) };
                weight.weight = Weight::Quantized(changed);
                Ok(Some(weight))
            }
        }
    }

    /// Codes and scales under this alternative; `None` where it says nothing about them.
    fn codes(self, mut q: Quantized) -> Option<Quantized> {
        match self {
            Alternative::ZeroPointUp => shift_zero(q, 1),
            Alternative::ZeroPointDown => shift_zero(q, -1),
            Alternative::NibbleOrder => permute_codes(q, |i, _| i ^ 1),
            // Element `2j` lies where `j` is expected, `2j + 1` where `j + half` is.
            Alternative::HalfSplit => {
                permute_codes(q, |i, half| if i < half { 2 * i } else { 2 * (i - half) + 1 })
            }
            Alternative::Adjacent => permute_codes(q, |i, half| i / 2 + i % 2 * half),
            Alternative::GlobalReciprocal => {
                q.outer = Some(1.0 / q.outer?);
                Some(q)
            }
            Alternative::ScaleReciprocal => {
                let scale = q.format.scale().filter(|scale| scale.outer.is_none())?.code;
                if !matches!(scale, Code::F32 | Code::Float(_)) || q.nested.is_some() {
                    return None;
                }
                let words = (0..q.scales.len()).map(|i| (1.0 / scale.decode(q.scales.get(i))).to_bits());
                q.scales = Codes::U32(words.collect());
                q.format = q.format.with_scale_code(Code::F32);
                Some(q)
            }
            Alternative::ScalesTransposed => {
                let grid = q.format.blocks().grid(q.rows, q.cols);
                let &[rows, groups] = grid.as_slice() else { return None };
                if rows < 2 || groups < 2 {
                    return None;
                }
                q.scales = match q.scales {
                    Codes::U8(scales) => Codes::U8(transpose(&scales, groups, rows)),
                    Codes::U16(scales) => Codes::U16(transpose(&scales, groups, rows)),
                    Codes::U32(scales) => Codes::U32(transpose(&scales, groups, rows)),
                    _ => return None,
                };
                Some(q)
            }
            _ => None,
        }
    }
}

/// gate's up, and up's gate.
fn partner(config: &ModelConfig, info: &LinearInfo) -> Option<LinearInfo> {
    let kind = match info.kind {
        LinearKind::Gate => LinearKind::Up,
        LinearKind::Up => LinearKind::Gate,
        _ => return None,
    };
    config.linears().into_iter().find(|other| other.layer == info.layer && other.kind == kind)
}

fn shift_zero(mut q: Quantized, by: i32) -> Option<Quantized> {
    let blocks = q.format.blocks().count(q.rows, q.cols);
    let Format::Affine(Affine { code: Code::Int(_), offset, scale: Some(_), .. }) = &mut q.format else {
        return None;
    };
    match offset {
        Offset::Zero => q.zeros.iter_mut().for_each(|zero| *zero += by),
        Offset::None => {
            *offset = Offset::Zero;
            q.zeros = vec![by; blocks];
        }
        _ => return None,
    }
    Some(q)
}

/// 4-bit codes with element `i` of each block taken from `from(i, half the block)`.
fn permute_codes(mut q: Quantized, from: impl Fn(usize, usize) -> usize) -> Option<Quantized> {
    const ROW_BLOCK: usize = 32;
    if q.format.code_bits() != 4 {
        return None;
    }
    let block = match q.format.blocks() {
        Blocks::Group(group) => (group as usize).min(ROW_BLOCK),
        _ => ROW_BLOCK,
    };
    let Codes::U8(codes) = &q.codes else { return None };
    if !block.is_multiple_of(2) || !q.cols.is_multiple_of(block) {
        return None;
    }
    let moved = codes.chunks_exact(block).flat_map(|block| {
        let half = block.len() / 2;
        (0..block.len()).map(|i| block[from(i, half)]).collect::<Vec<_>>()
    });
    q.codes = Codes::U8(moved.collect());
    Some(q)
}
