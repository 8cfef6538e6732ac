//! Decoding and encoding of many blocks, with hot codecs compiled for the caller's instruction set.

use super::{Codec, CodecId, Encode, amax, k_quants, legacy, search, sixteen};
use crate::error::TensorError;
use crate::lanes::{Lanes, Portable};
use crate::minifloat::F16;

impl Codec {
    /// Decodes all whole blocks that both slices hold.
    #[inline(always)]
    pub fn decode(&self, blocks: &[u8], out: &mut [f32]) {
        // Call hot decoders by name: code behind a pointer is not compiled for the caller's instruction set.
        match self.id {
            CodecId::Q4_0 => self.decode_by(legacy::decode_q4_0, blocks, out),
            CodecId::Q8_0 => self.decode_by(legacy::decode_q8_0, blocks, out),
            CodecId::Q4K => self.decode_by(k_quants::decode_q4_k, blocks, out),
            CodecId::Q6K => self.decode_by(k_quants::decode_q6_k, blocks, out),
            _ => self.decode_by(self.decode, blocks, out),
        }
    }

    #[inline(always)]
    fn decode_by(&self, decode: impl Fn(&[u8], &mut [f32]), blocks: &[u8], out: &mut [f32]) {
        for (block, out) in blocks.chunks_exact(self.bytes).zip(out.chunks_exact_mut(self.elements)) {
            decode(block, out);
        }
    }

    /// Encodes one block of finite values. A scale beyond f16 is stored as infinity, as in the reference. Such a
    /// block decodes to infinities and NaN; it needs magnitudes beyond 65504 times the largest code, and
    /// [`quantize`](crate::quantize) refuses it.
    ///
    /// # Panics
    /// A slice is shorter than a block.
    pub fn encode_block(&self, x: &[f32], block: &mut [u8]) {
        self.encode(&x[..self.elements], None, &mut block[..self.bytes]);
    }

    /// Encodes all whole blocks that both slices hold. `importance` has one finite, non-negative weight per column of
    /// whole rows, by which a search weights squared errors; formulas [ignore](Self::takes_importance) it.
    pub fn encode(&self, x: &[f32], importance: Option<&[f32]>, blocks: &mut [u8]) {
        encode_with(Portable, self, x, importance, blocks);
    }

    /// Refuses blocks that decode to infinity. A scale never exceeds the values of its block, so most blocks pass
    /// without decoding.
    ///
    /// # Errors
    /// [`TensorError::ScaleOverflow`].
    pub fn check_scales(&self, x: &[f32], blocks: &[u8]) -> Result<(), TensorError> {
        let mut values = vec![0.0; self.elements];
        let mut count = 0;
        let mut first = None;
        for (i, (x, block)) in x.chunks_exact(self.elements).zip(blocks.chunks_exact(self.bytes)).enumerate()
        {
            let amax = amax(x);
            if amax <= F16.max() {
                continue;
            }
            self.decode_block(block, &mut values);
            if values.iter().any(|v| !v.is_finite()) {
                count += 1;
                first = first.or(Some((i * self.elements, amax)));
            }
        }
        match first {
            None => Ok(()),
            Some((index, amax)) => Err(TensorError::ScaleOverflow { count, index, amax, codec: self.name }),
        }
    }
}

/// Like [`Codec::encode`], using the lanes `l`, which give the same bytes.
#[inline(always)]
pub fn encode_with<L: Lanes>(l: L, codec: &Codec, x: &[f32], importance: Option<&[f32]>, blocks: &mut [u8]) {
    let n = codec.elements;
    let (x, blocks) = match importance.filter(|_| codec.takes_importance()) {
        None => sixteen::encode(l, codec.id, x, blocks),
        Some(_) => (x, blocks),
    };
    let mut weights = importance.map(|all| all.chunks_exact(n).cycle());
    for (x, block) in x.chunks_exact(n).zip(blocks.chunks_exact_mut(codec.bytes)) {
        let weights = weights.as_mut().and_then(Iterator::next);
        match (codec.encode, weights) {
            (Encode::Search, _) => search::encode_block(l, codec.id, x, weights, block),
            // The formula handles larger values.
            (Encode::Weighed(_), Some(_)) if amax(x) <= F16.max() => {
                search::encode_block(l, codec.id, x, weights, block);
            }
            // Call by name: code behind a pointer is not compiled for the level of `l`.
            (Encode::Formula(_) | Encode::Weighed(_), _) if codec.id == CodecId::Q4_0 => {
                legacy::encode_q4_0(x, block);
            }
            (Encode::Formula(_), _) if codec.id == CodecId::Q8_0 => legacy::encode_q8_0(x, block),
            (Encode::Formula(encode) | Encode::Weighed(encode), _) => encode(x, block),
        }
    }
}
