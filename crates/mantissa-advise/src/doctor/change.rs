//! Applies an alternative to stored weights.

use mantissa_model::{LinearInfo, LinearKind, ModelConfig};
use mantissa_num::format::{Affine, Format, Offset};
use mantissa_num::pack::transpose;
use mantissa_num::{Blocks, Code, CodecId, Codes, Quantized};
use mantissa_store::convention::gguf::{to_gguf_order, to_hf_order};
use mantissa_store::convention::{LinearWeight, Weight};

use super::Alternative;
use crate::error::Result;
use crate::observe::rotated_heads;
use crate::values::values;

/// Linear layers of one decoder layer as stored, in forward order.
pub(super) type LayerWeights = Vec<(LinearInfo, LinearWeight)>;

impl Alternative {
    /// Applies this alternative to layer `at` of `stored`; `None` if nothing changes. A weight that cannot be
    /// changed in packed form is decoded to f32.
    ///
    /// # Errors
    /// The parts of the weight do not fit together.
    pub(super) fn linear(
        self,
        config: &ModelConfig,
        stored: &LayerWeights,
        at: usize,
    ) -> Result<Option<LinearWeight>> {
        let (info, weight) = &stored[at];
        match self {
            Alternative::RowsApart | Alternative::RowsInterleaved => self.rows(config, info, weight),
            Alternative::GateUpSwapped => Ok(partner(stored, info.kind).cloned()),
            Alternative::GlobalSwapped => Ok(partner(stored, info.kind).and_then(|p| swap_outer(weight, p))),
            Alternative::InputReciprocal => Ok(invert_input(weight)),
            _ => Ok(match &weight.weight {
                Weight::Quantized(q) => self.codes(q).map(|q| with(weight, Weight::Quantized(q))),
                _ => None,
            }),
        }
    }

    /// Reorders the rows of q and k.
    fn rows(
        self,
        config: &ModelConfig,
        info: &LinearInfo,
        weight: &LinearWeight,
    ) -> Result<Option<LinearWeight>> {
        let Some(heads) = rotated_heads(info, config).filter(|_| config.rotary_dim > 0) else {
            return Ok(None);
        };
        let order = |rows: &[f32], row| match self {
            Alternative::RowsApart => to_hf_order(rows, row, heads),
            _ => to_gguf_order(rows, row, heads),
        };
        let mut plain = weight.clone();
        let bias = plain.bias.take().map(|bias| order(&bias, 1));
        let input = plain.input.take().filter(|_| weight.transforms.is_empty());
        let changed = Weight::F32(order(&values(&info.module, plain)?, info.cols));
        let (rows, cols, transforms) = (info.rows, info.cols, Default::default());
        Ok(Some(LinearWeight { rows, cols, weight: changed, bias, input, transforms }))
    }

    /// Applies this alternative to codes and scales; `None` if it does not concern them.
    pub(super) fn codes(self, q: &Quantized) -> Option<Quantized> {
        let mut q = match (self, &q.format) {
            (Alternative::NibbleOrder | Alternative::HalfSplit, Format::Codec(id)) => {
                return self.fields(q, *id);
            }
            (_, Format::Codec(_)) => return None,
            _ => q.clone(),
        };
        match self {
            Alternative::ZeroPointUp => shift_zero(q, 1),
            Alternative::ZeroPointDown => shift_zero(q, -1),
            Alternative::NibbleOrder => permute_codes(q, |i, _| i ^ 1),
            // Element `2j` is stored at position `j`, `2j + 1` at `j + half`.
            Alternative::HalfSplit => {
                permute_codes(q, |i, half| if i < half { 2 * i } else { 2 * (i - half) + 1 })
            }
            Alternative::Adjacent => permute_codes(q, |i, half| i / 2 + i % 2 * half),
            Alternative::GlobalReciprocal => {
                q.set_outer(Some(reciprocal(q.outer()?)?));
                Some(q)
            }
            Alternative::ScaleReciprocal => scales_inverted(q),
            Alternative::ScalesTransposed => scales_transposed(q),
            _ => None,
        }
    }

    /// Reorders the 4-bit fields of GGUF blocks: swaps each byte's nibbles, or de-interleaves adjacent pairs.
    fn fields(self, q: &Quantized, id: CodecId) -> Option<Quantized> {
        let (fields, block) = (id.nibbles()?, id.codec().bytes);
        let Codes::Packed(bytes) = &q.codes else { return None };
        let mut bytes = bytes.clone();
        for block in bytes.chunks_exact_mut(block) {
            for run in block[fields.bytes.clone()].chunks_exact_mut(fields.run) {
                match self {
                    Alternative::NibbleOrder => run.iter_mut().for_each(|byte| *byte = byte.rotate_left(4)),
                    _ => put_apart(run),
                }
            }
        }
        Some(Quantized { codes: Codes::Packed(bytes), ..q.clone() })
    }
}

/// Repacks bytes of elements `2j` and `2j + 1` as bytes of elements `j` and `j + n`.
fn put_apart(run: &mut [u8]) {
    let elements: Vec<u8> = run.iter().flat_map(|byte| [byte & 15, byte >> 4]).collect();
    let (low, high) = elements.split_at(run.len());
    run.iter_mut().zip(low.iter().zip(high)).for_each(|(byte, (low, high))| *byte = low | high << 4);
}

fn with(of: &LinearWeight, weight: Weight) -> LinearWeight {
    let LinearWeight { rows, cols, bias, input, transforms, .. } = of;
    LinearWeight {
        rows: *rows,
        cols: *cols,
        weight,
        bias: bias.clone(),
        input: input.clone(),
        transforms: transforms.clone(),
    }
}

/// Returns up for gate, and gate for up.
fn partner(stored: &LayerWeights, kind: LinearKind) -> Option<&LinearWeight> {
    let pair = [LinearKind::Gate, LinearKind::Up];
    let own = pair.iter().position(|own| *own == kind)?;
    let kind = pair[1 - own];
    stored.iter().find(|(other, _)| other.kind == kind).map(|(_, weight)| weight)
}

fn swap_outer(weight: &LinearWeight, partner: &LinearWeight) -> Option<LinearWeight> {
    let (Weight::Quantized(own), Weight::Quantized(other)) = (&weight.weight, &partner.weight) else {
        return None;
    };
    let differ = own.outer().is_some() && other.outer().is_some() && own.outer() != other.outer();
    differ.then(|| {
        let mut own = own.clone();
        own.set_outer(other.outer());
        with(weight, Weight::Quantized(own))
    })
}

fn invert_input(weight: &LinearWeight) -> Option<LinearWeight> {
    let mut changed = weight.clone();
    let input = changed.input.as_mut()?;
    input.outer = Some(reciprocal(input.outer?)?);
    Some(changed)
}

/// Returns `1 / scale`; `None` if that is not finite or equals `scale`.
fn reciprocal(scale: f32) -> Option<f32> {
    Some(1.0 / scale).filter(|inverse| inverse.is_finite() && *inverse != scale)
}

fn scales_inverted(mut q: Quantized) -> Option<Quantized> {
    let scale = q.format.scale().filter(|scale| scale.outer.is_none())?.code;
    if !matches!(scale, Code::F32 | Code::Float(_)) || q.nested().is_some() || q.scales.is_empty() {
        return None;
    }
    let words = (0..q.scales.len()).map(|i| Some(reciprocal(scale.decode(q.scales.get(i)))?.to_bits()));
    q.scales.codes = Codes::U32(words.collect::<Option<_>>()?);
    q.format = q.format.with_scale_code(Code::F32);
    Some(q)
}

fn scales_transposed(mut q: Quantized) -> Option<Quantized> {
    let grid = q.format.blocks().grid(q.rows, q.cols);
    let &[rows, groups] = grid.as_slice() else { return None };
    if rows < 2 || groups < 2 || q.scales.len() != rows * groups {
        return None;
    }
    q.scales.codes = match q.scales.codes {
        Codes::U8(scales) => Codes::U8(transpose(&scales, groups, rows)),
        Codes::U16(scales) => Codes::U16(transpose(&scales, groups, rows)),
        Codes::U32(scales) => Codes::U32(transpose(&scales, groups, rows)),
        _ => return None,
    };
    Some(q)
}

fn shift_zero(mut q: Quantized, by: i32) -> Option<Quantized> {
    let blocks = q.format.blocks().count(q.rows, q.cols);
    let Format::Affine(Affine { code: Code::Int(_), offset, scale: Some(_), .. }) = &mut q.format else {
        return None;
    };
    match offset {
        Offset::Zero => q.scales.offsets.zeros_mut().iter_mut().for_each(|zero| *zero += by),
        Offset::None => {
            *offset = Offset::Zero;
            q.scales.extend_zeros(vec![by; blocks]);
        }
        _ => return None,
    }
    Some(q)
}

/// Permutes 4-bit codes within blocks: element `i` comes from `from(i, block / 2)`.
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use mantissa_num::{Given, Scheme, quantize};

    use super::*;

    fn quantized(scheme: &str, rows: usize, cols: usize) -> Quantized {
        let scheme: Scheme = scheme.parse().unwrap();
        // Group sizes differ, so that no two arrangements of the scales are equal.
        let size = |i: usize| (1 << (i / 32 % 5)) as f32;
        let x: Vec<f32> = (0..rows * cols).map(|i| (i as f32 * 0.37).sin() * size(i)).collect();
        quantize(&scheme, &x, rows, cols, Given::default()).unwrap()
    }

    /// Applies every alternative to every kind of format: none panics, and each that applies changes the
    /// values.
    #[test]
    fn every_alternative_takes_every_format() {
        let mut applied = 0;
        for scheme in [
            "int4-g32",
            "int4-g32-asym",
            "int8-channel",
            "int3-g32",
            "nf4",
            "nf4-dq",
            "nvfp4",
            "mxfp4",
            "fp8-e4m3-tensor",
            "fp8-e4m3-t128x128",
            "q4_0",
            "q4_k",
            "q5_k",
            "q6_k",
            "q8_0",
            "iq4_nl",
            "iq4_xs",
            "gguf-mxfp4",
            "gguf-nvfp4",
            "q2_k",
            "q3_k",
            "tq1_0",
            "ternary-channel",
        ] {
            let q = quantized(scheme, 8, 256);
            for entry in &super::super::ALTERNATIVES {
                let Some(changed) = entry.alternative.codes(&q) else { continue };
                applied += 1;
                let (before, after) = (q.dequantize().unwrap(), changed.dequantize().unwrap());
                assert!(before != after, "{scheme}: {}", entry.name);
            }
        }
        assert!(applied > 50, "{applied}");
    }

    /// Swapping twice restores the input; packing in pairs and de-interleaving restores it too.
    #[test]
    fn orders_are_undone() {
        for scheme in ["int4-g32", "q4_0", "q4_k", "mxfp4"] {
            let q = quantized(scheme, 2, 256);
            let twice = Alternative::NibbleOrder.codes(&q).and_then(|q| Alternative::NibbleOrder.codes(&q));
            assert_eq!(twice.unwrap(), q, "{scheme}");
        }
        let q = quantized("int4-g32", 2, 256);
        let apart = Alternative::HalfSplit.codes(&q).and_then(|q| Alternative::Adjacent.codes(&q));
        assert_eq!(apart.unwrap(), q);
        let mut pairs: Vec<u8> = (0..16u8).map(|j| (2 * j % 16) | ((2 * j + 1) % 16) << 4).collect();
        put_apart(&mut pairs);
        assert_eq!(pairs, (0..16u8).map(|j| j | j << 4).collect::<Vec<_>>());
    }
}
