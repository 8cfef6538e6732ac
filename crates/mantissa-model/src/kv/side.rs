//! Keys, or values, of a layer: optionally rotated, split into rows, stored by [`Rows`].

use mantissa_num::pack::transpose;
use mantissa_num::{Hadamard, TensorError};

use super::codec::{HeadElement, HeadScale};
use super::rows::Rows;

/// Storage of the keys or the values of tokens, in chunks of `span` tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct Side {
    codec: Rows,
    /// Values per token.
    width: usize,
    /// Tokens per chunk: 1, or the group of a scheme whose rows are channels.
    span: usize,
    /// True if rows are channels over the tokens of a chunk.
    channels: bool,
    rotation: Option<Hadamard>,
}

impl Side {
    /// Creates storage token by token; a row of `codec` is a head's vector or all `width` values of a token.
    pub(crate) fn tokens(codec: impl Into<Rows>, width: usize, rotation: Option<Hadamard>) -> Self {
        Side { codec: codec.into(), width, span: 1, channels: false, rotation }
    }

    /// Creates storage by channels over as many tokens as `codec` has columns.
    pub(crate) fn channels(codec: impl Into<Rows>, width: usize, rotation: Option<Hadamard>) -> Self {
        let codec = codec.into();
        Side { width, span: codec.cols(), channels: true, rotation, codec }
    }

    /// Values per token.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Tokens that are stored together.
    pub fn span(&self) -> usize {
        self.span
    }

    /// Bytes of a chunk.
    pub fn chunk_bytes(&self) -> usize {
        self.span * self.width / self.codec.cols().max(1) * self.codec.row_bytes()
    }

    /// Appends the bytes of a chunk, `[span, width]`, to `out`.
    ///
    /// # Errors
    /// [`TensorError`] for values without a code.
    pub fn encode(&self, chunk: &[f32], out: &mut Vec<u8>) -> Result<(), TensorError> {
        let mut x = chunk.to_vec();
        if let Some(rotation) = &self.rotation {
            rotation.forward(&mut x);
        }
        if self.channels {
            x = transpose(&x, self.span, self.width);
        }
        let held = out.len();
        out.resize(held + self.chunk_bytes(), 0);
        let bytes = out[held..].chunks_exact_mut(self.codec.row_bytes().max(1));
        for (i, (row, bytes)) in x.chunks_exact(self.codec.cols().max(1)).zip(bytes).enumerate() {
            if let Err(error) = self.codec.encode(i, row, bytes) {
                out.truncate(held);
                return Err(error);
            }
        }
        Ok(())
    }

    /// Decodes whole chunks to `[tokens, width]`.
    pub fn decode(&self, bytes: &[u8], out: &mut [f32]) {
        let chunks = out.chunks_exact_mut((self.span * self.width).max(1));
        for (chunk, bytes) in chunks.zip(bytes.chunks_exact(self.chunk_bytes().max(1))) {
            let rows = chunk.chunks_exact_mut(self.codec.cols().max(1));
            let stored = bytes.chunks_exact(self.codec.row_bytes().max(1));
            rows.zip(stored).enumerate().for_each(|(i, (row, bytes))| self.codec.decode(i, bytes, row));
            if self.channels {
                chunk.copy_from_slice(&transpose(chunk, self.width, self.span));
            }
        }
        if let Some(rotation) = &self.rotation {
            rotation.transpose(out);
        }
    }

    /// Element of the heads of `head_dim`, if each is stored by itself as elements with at most one scale and one zero
    /// point, so that attention can read it without [`decode`](Self::decode).
    pub fn head_element(&self, head_dim: usize) -> Option<HeadElement> {
        match &self.codec {
            Rows::Grid(codec) if !self.channels && self.rotation.is_none() => codec.head_element(head_dim),
            _ => None,
        }
    }

    /// Encodes the vector of head `head` of a token with the values of [`encode`](Self::encode): integer codes to
    /// `codes`, other elements, before scaling, to `elements`. Only for storage with a
    /// [`head_element`](Self::head_element).
    ///
    /// # Errors
    /// [`TensorError`] for values without a code.
    pub fn encode_head(
        &self,
        head: usize,
        x: &[f32],
        codes: &mut [i8],
        elements: &mut [f32],
    ) -> Result<HeadScale, TensorError> {
        match &self.codec {
            Rows::Grid(codec) => codec.encode_head(head, x, codes, elements),
            Rows::Book(_) => Ok(HeadScale { scale: 0.0, zero: 0 }),
        }
    }

    /// Replaces the tokens of a sequence, `[tokens, width]`, by their stored values; the last chunk may be short.
    pub(crate) fn round_trip(&self, x: &mut [f32]) {
        let tokens = x.len() / self.width.max(1);
        if tokens == 0 {
            return;
        }
        if let Some(rotation) = &self.rotation {
            rotation.forward(x);
        }
        if self.channels {
            let mut by_channel = transpose(x, tokens, self.width);
            self.codec.round_trip(&mut by_channel, tokens);
            x.copy_from_slice(&transpose(&by_channel, self.width, tokens));
        } else {
            self.codec.round_trip(x, self.codec.cols());
        }
        if let Some(rotation) = &self.rotation {
            rotation.transpose(x);
        }
    }
}
