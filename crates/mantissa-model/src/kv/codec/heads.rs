//! Rows of one head, as elements with one scale: what attention over a packed cache reads without this codec.

use mantissa_num::blockwise::Range;
use mantissa_num::minifloat::{BF16, E4M3, F16};
use mantissa_num::{Affine, Blocks, Code, Format, Offset, TensorError, check_finite};

use super::{Fast, RowCodec};

/// Storage of a head's vector that needs no other data than its elements, a scale and a zero point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadElement {
    /// f32, unscaled.
    F32,
    /// f16, unscaled.
    F16,
    /// bfloat16, unscaled.
    Bf16,
    /// FP8 E4M3 times a scale.
    E4m3,
    /// `code * scale`, codes of 8 bits.
    Int8,
    /// `(code - zero) * scale`, codes of 4 bits.
    Int4,
}

/// Encoded vector of a head: scale and zero point.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HeadScale {
    /// Scale, 1 for unscaled elements.
    pub scale: f32,
    /// Zero point in the signed domain of the codes.
    pub zero: i8,
}

impl RowCodec {
    /// Element of a head of `head_dim`; `None` if rows are not heads or need more than elements, scale and zero point.
    pub(crate) fn head_element(&self, head_dim: usize) -> Option<HeadElement> {
        let Format::Affine(Affine { code, blocks, scale, offset }) = &self.scheme.format else { return None };
        let scaled = match scale {
            None => {
                return match *code {
                    Code::F32 => Some(HeadElement::F32),
                    Code::Float(float) if float == F16 => Some(HeadElement::F16),
                    Code::Float(float) if float == BF16 => Some(HeadElement::Bf16),
                    _ => None,
                };
            }
            Some(_) => self.cols == head_dim && *blocks == Blocks::Row && !self.scheme.has_outer_scale(),
        };
        match (*code, offset) {
            _ if !scaled => None,
            (Code::Int(8), Offset::None) => Some(HeadElement::Int8),
            (Code::Int(4), Offset::None | Offset::Zero) => Some(HeadElement::Int4),
            (Code::Float(float), Offset::None) if float == E4M3 => Some(HeadElement::E4m3),
            _ => None,
        }
    }

    /// Encodes the vector of head `head` with the values of [`encode`](Self::encode): integer codes to `codes`, other
    /// elements, before scaling, to `elements`.
    ///
    /// # Errors
    /// [`TensorError`] for values without a code.
    pub(crate) fn encode_head(
        &self,
        head: usize,
        x: &[f32],
        codes: &mut [i8],
        elements: &mut [f32],
    ) -> Result<HeadScale, TensorError> {
        check_finite(x)?;
        let format = &self.scheme.format;
        if format.scale().is_none() {
            elements.copy_from_slice(x);
            return Ok(HeadScale { scale: 1.0, zero: 0 });
        }
        let block = match self.stored.is_empty() {
            true => self.scheme.block(Range::of(x), false, None),
            false => self.scheme.block_with_scale(self.stored[head % self.stored.len()]),
        };
        let scale = format.decoder(block.scale, 0, None).value(1.0);
        let integers = matches!(format, Format::Affine(Affine { code: Code::Int(_), .. }));
        let element = match &self.fast {
            // Near the limit of f32 the reference has steps of its own.
            _ if scale > 1e35 => None,
            Fast::Stored(element) => Some(*element),
            Fast::Rows(quantizer) => quantizer.element(),
            Fast::Reference => None,
        };
        match (element, integers) {
            (Some(element), true) => {
                codes.iter_mut().zip(x).for_each(|(code, x)| *code = element.round(*x / scale) as i8);
            }
            (Some(element), false) => {
                elements.iter_mut().zip(x).for_each(|(e, x)| *e = element.round(*x / scale));
            }
            (None, true) => {
                codes.iter_mut().zip(x).for_each(|(code, x)| *code = self.scheme.encode(*x, &block, 0) as i8);
            }
            (None, false) => {
                let value = |x| format.element(self.scheme.encode(x, &block, 0));
                elements.iter_mut().zip(x).for_each(|(e, x)| *e = value(*x));
            }
        }
        Ok(HeadScale { scale, zero: block.zero as i8 })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use mantissa_num::parse_activation;

    use super::*;

    /// Elements, scale and zero point give the values that the bytes of the codec decode to.
    #[test]
    fn heads_have_the_values_of_the_codec() {
        let schemes = [
            ("int8-head", HeadElement::Int8),
            ("int8-head:restricted", HeadElement::Int8),
            ("int4-head", HeadElement::Int4),
            ("int4-head-asym", HeadElement::Int4),
            ("fp8-e4m3-head", HeadElement::E4m3),
            ("bf16", HeadElement::Bf16),
            ("f16", HeadElement::F16),
        ];
        let d = 32;
        for (text, expected) in schemes {
            let codec = RowCodec::new(&parse_activation(text).unwrap(), d).unwrap();
            assert_eq!(codec.head_element(d), Some(expected), "{text}");
            for seed in 0..40 {
                let x: Vec<f32> =
                    (0..d).map(|i| ((i * 7 + seed * 13) as f32 * 0.37).sin() * 3.0 + 0.5).collect();
                let (mut bytes, mut decoded) = (vec![0; codec.row_bytes()], vec![0.0; d]);
                codec.encode(0, &x, &mut bytes).unwrap();
                codec.decode(0, &bytes, &mut decoded);
                let (mut codes, mut elements) = (vec![0; d], vec![0.0; d]);
                let HeadScale { scale, zero } = codec.encode_head(0, &x, &mut codes, &mut elements).unwrap();
                let values: Vec<f32> = match expected {
                    HeadElement::Int8 | HeadElement::Int4 => {
                        codes.iter().map(|&c| (f32::from(c) - f32::from(zero)) * scale).collect()
                    }
                    HeadElement::E4m3 => elements.iter().map(|e| e * scale).collect(),
                    // Rounded where they are stored.
                    _ => continue,
                };
                assert_eq!(values, decoded, "{text}");
            }
        }
        for text in ["int8-head-asym", "int8-token", "int8-g16", "int4-head-asym:minmax", "nvfp4"] {
            let codec = RowCodec::new(&parse_activation(text).unwrap(), d * 2).unwrap();
            assert_eq!(codec.head_element(d), None, "{text}");
        }
    }
}
