//! Keys, or values, of one layer and sequence: sinks in f32, stored tokens in blocks, recent ones in f32, and those of
//! the running pass.

use std::ops::Range;

use mantissa_kernels::kernels;
use mantissa_kernels::paged::{TILE_TOKENS, Tile, TileFormat, TileRow};
use mantissa_model::kv::Side;
use mantissa_num::TensorError;

use super::plan::{Form, LayerPlan, SidePlan};

/// Tokens of a sequence by place.
#[derive(Clone, Debug, Default)]
pub(super) struct Held {
    /// First tokens (sinks), in f32.
    pub(super) first: Vec<f32>,
    /// Number of tokens in blocks.
    pub(super) stored: usize,
    /// Tokens after them, in f32.
    pub(super) recent: Vec<f32>,
}

/// Buffers for encoding and decoding, reused.
#[derive(Clone, Debug, Default)]
pub(super) struct Codes {
    codes: Vec<i8>,
    elements: Vec<f32>,
    bytes: Vec<u8>,
    chunk: Vec<f32>,
}

/// Blocks of a layer as a sequence sees them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Places<'a> {
    pub(super) blocks: &'a [u32],
    pub(super) block_bytes: usize,
    pub(super) block_tokens: usize,
}

impl Places<'_> {
    /// First byte of the block of stored token `index`, and the token's number within it.
    fn of(&self, index: usize) -> (usize, usize) {
        let block = self.blocks[index / self.block_tokens] as usize;
        (block * self.block_bytes, index % self.block_tokens)
    }

    /// First byte of the tile of head `head` that holds stored token `index`.
    fn tile(&self, side: &SidePlan, index: usize, head: usize) -> usize {
        let (base, token) = self.of(index);
        base + side.at + (token / TILE_TOKENS * side.heads + head) * side.head_stride
    }

    /// First byte of the chunk of a codec that begins with stored token `index`.
    fn chunk(&self, side: &SidePlan, codec: &Side, index: usize) -> usize {
        let (base, token) = self.of(index);
        base + side.at + token / codec.span().max(1) * codec.chunk_bytes()
    }
}

impl Held {
    /// Number of tokens.
    pub(super) fn len(&self, width: usize) -> usize {
        self.first.len() / width + self.stored + self.recent.len() / width
    }

    /// Appends `rows` `[tokens, width]`, and stores what leaves the window.
    pub(super) fn push(
        &mut self,
        plan: &LayerPlan,
        side: &SidePlan,
        data: &mut [u8],
        places: Places<'_>,
        rows: &[f32],
        codes: &mut Codes,
    ) -> Result<(), TensorError> {
        let width = side.width();
        let missing = plan.sinks.saturating_mul(width).saturating_sub(self.first.len()).min(rows.len());
        let (first, rows) = rows.split_at(missing);
        self.first.extend_from_slice(first);
        if let (Form::Tiles(format, codec), 0, true) = (&side.form, side.window, self.recent.is_empty()) {
            for row in rows.chunks_exact(width) {
                self.store_tile(side, *format, codec.as_ref(), data, places, row, codes)?;
            }
            return Ok(());
        }
        self.recent.extend_from_slice(rows);
        let span = side.form.span();
        let chunks = (self.recent.len() / width).saturating_sub(side.window) / span;
        let recent = std::mem::take(&mut self.recent);
        let mut result = Ok(());
        for chunk in recent.chunks_exact(span * width).take(chunks) {
            result = match &side.form {
                Form::Tiles(format, codec) => {
                    self.store_tile(side, *format, codec.as_ref(), data, places, chunk, codes)
                }
                Form::Packed(codec) => self.store_chunk(side, codec, data, places, chunk, codes),
            };
            if result.is_err() {
                break;
            }
        }
        self.recent = recent;
        self.recent.drain(..chunks * span * width);
        result
    }

    /// Stores one token in tiles.
    fn store_tile(
        &mut self,
        side: &SidePlan,
        format: TileFormat,
        codec: Option<&Side>,
        data: &mut [u8],
        places: Places<'_>,
        row: &[f32],
        codes: &mut Codes,
    ) -> Result<(), TensorError> {
        let d = side.head_dim;
        let Codes { codes, elements, .. } = codes;
        codes.resize(d, 0);
        elements.resize(d, 0.0);
        for (head, x) in row.chunks_exact(d).enumerate() {
            let at = places.tile(side, self.stored, head);
            let tile = &mut data[at..at + format.tile_bytes(d)];
            let scaled = match codec {
                Some(codec) => Some(codec.encode_head(head, x, codes, elements)?),
                None => None,
            };
            let row = match (format, scaled) {
                (TileFormat::Int8 | TileFormat::Int4, Some(scale)) => {
                    TileRow::Codes(codes, scale.scale, scale.zero)
                }
                (TileFormat::Fp8E4m3, Some(scale)) => TileRow::Fp8(elements, scale.scale),
                _ => TileRow::Floats(x),
            };
            let slot = self.stored % TILE_TOKENS;
            match side.is_key {
                true => format.write_key(tile, slot, row),
                false => format.write_value(tile, slot, row),
            }
        }
        self.stored += 1;
        Ok(())
    }

    /// Stores one chunk of a codec.
    fn store_chunk(
        &mut self,
        side: &SidePlan,
        codec: &Side,
        data: &mut [u8],
        places: Places<'_>,
        chunk: &[f32],
        codes: &mut Codes,
    ) -> Result<(), TensorError> {
        codes.bytes.clear();
        codec.encode(chunk, &mut codes.bytes)?;
        let at = places.chunk(side, codec, self.stored);
        data[at..at + codes.bytes.len()].copy_from_slice(&codes.bytes);
        self.stored += codec.span().max(1);
        Ok(())
    }

    /// Removes all tokens from `len` on. Stored tokens stay stored; a partly removed chunk is kept by its values.
    pub(super) fn truncate(
        &mut self,
        plan: &LayerPlan,
        side: &SidePlan,
        data: &[u8],
        blocks: &[u32],
        len: usize,
        block_tokens: usize,
    ) {
        let width = side.width();
        self.first.truncate(len.saturating_mul(width));
        let len = len.saturating_sub(plan.sinks);
        if len >= self.stored {
            return self.recent.truncate((len - self.stored) * width);
        }
        self.recent.clear();
        let span = side.form.span();
        let (whole, cut) = (len / span * span, len % span);
        if let (Form::Packed(codec), true) = (&side.form, cut > 0) {
            let places = Places { blocks, block_bytes: plan.block_bytes, block_tokens };
            let mut chunk = vec![0.0; span * width];
            codec.decode(&data[places.chunk(side, codec, whole)..][..codec.chunk_bytes()], &mut chunk);
            self.recent.extend_from_slice(&chunk[..cut * width]);
        }
        self.stored = whole;
    }
}

/// Keys or values as a pass reads them.
#[derive(Clone, Copy)]
pub(super) struct SideView<'a> {
    pub(super) plan: &'a LayerPlan,
    pub(super) side: &'a SidePlan,
    pub(super) data: &'a [u8],
    pub(super) places: Places<'a>,
    pub(super) held: &'a Held,
    /// Tokens of this pass that are not in `held`, `[tokens, width]`.
    pub(super) new: &'a [f32],
    /// Cosines and sines for keys that are stored before RoPE: tables and angles per position.
    pub(super) rope: Option<(&'a [f32], &'a [f32], usize)>,
}

impl<'a> SideView<'a> {
    /// Format of tiles that are read in place; f32 if none is.
    pub(super) fn format(&self) -> TileFormat {
        match &self.side.form {
            Form::Tiles(format, _) => *format,
            Form::Packed(_) => TileFormat::F32,
        }
    }

    /// The tile of head `head` that holds the tokens at `positions`, if it can be read as it is.
    pub(super) fn tile(&self, positions: &Range<usize>, head: usize) -> Option<Tile<'a>> {
        let Form::Tiles(format, _) = &self.side.form else { return None };
        let from = positions.start.checked_sub(self.plan.sinks)?;
        if self.rope.is_some() || positions.end - self.plan.sinks > self.held.stored {
            return None;
        }
        let at = self.places.tile(self.side, from, head);
        Some(Tile { format: *format, bytes: &self.data[at..at + format.tile_bytes(self.side.head_dim)] })
    }

    /// Reads the heads `heads` of the tokens at `positions` into `out` `[tokens, heads, head_dim]`.
    pub(super) fn read(
        &self,
        positions: Range<usize>,
        heads: Range<usize>,
        out: &mut [f32],
        codes: &mut Codes,
    ) {
        let (d, width) = (self.side.head_dim, self.side.width());
        let row = heads.len() * d;
        let columns = heads.start * d..heads.end * d;
        let first = self.held.first.len() / width;
        let stored = first + self.held.stored;
        let recent = stored + self.held.recent.len() / width;
        let copy = |from: &[f32], base: usize, range: Range<usize>, out: &mut [f32]| {
            for position in range {
                let from = &from[(position - base) * width..][..width];
                out[(position - positions.start) * row..][..row].copy_from_slice(&from[columns.clone()]);
            }
        };
        let within = |from: usize, to: usize| from.max(positions.start)..to.min(positions.end);
        copy(&self.held.first, 0, within(0, first), out);
        let range = within(first, stored);
        if !range.is_empty() {
            let at = (range.start - positions.start) * row;
            self.read_stored(range.start - first..range.end - first, heads, &mut out[at..], codes);
        }
        copy(&self.held.recent, stored, within(stored, recent), out);
        copy(self.new, recent, within(recent, usize::MAX), out);
        if let Some((cos, sin, half)) = self.rope {
            let angles = positions.start * half..positions.end * half;
            let x = &mut out[..positions.len() * row];
            if half > 0 && !x.is_empty() {
                kernels().rope_rotate(x, row / d, d, &cos[angles.clone()], &sin[angles]);
            }
        }
    }

    /// Reads stored tokens `range`.
    fn read_stored(&self, range: Range<usize>, heads: Range<usize>, out: &mut [f32], codes: &mut Codes) {
        let (d, row) = (self.side.head_dim, heads.len() * self.side.head_dim);
        match &self.side.form {
            Form::Tiles(format, _) => {
                let mut index = range.start;
                while index < range.end {
                    let end = (index / TILE_TOKENS + 1) * TILE_TOKENS;
                    let slots = index % TILE_TOKENS..index % TILE_TOKENS + end.min(range.end) - index;
                    for (i, head) in heads.clone().enumerate() {
                        let at = self.places.tile(self.side, index, head);
                        let tile = &self.data[at..at + format.tile_bytes(d)];
                        let out = &mut out[(index - range.start) * row + i * d..];
                        match self.side.is_key {
                            true => format.read_keys(tile, d, slots.clone(), out, row),
                            false => format.read_values(tile, d, slots.clone(), out, row),
                        }
                    }
                    index = end;
                }
            }
            Form::Packed(codec) => {
                let (span, width) = (codec.span().max(1), self.side.width());
                codes.chunk.resize(span * width, 0.0);
                let mut index = range.start;
                while index < range.end {
                    let chunk = index / span * span;
                    let bytes =
                        &self.data[self.places.chunk(self.side, codec, chunk)..][..codec.chunk_bytes()];
                    codec.decode(bytes, &mut codes.chunk);
                    let end = (chunk + span).min(range.end);
                    for token in index..end {
                        let from = &codes.chunk[(token - chunk) * width..][heads.start * d..heads.end * d];
                        out[(token - range.start) * row..][..row].copy_from_slice(from);
                    }
                    index = end;
                }
            }
        }
    }
}
