//! Bytes of a tile: the keys or the values of 64 tokens of one key/value head.
//!
//! Keys run along tokens, so that scores need no horizontal sum: element `(dim, token)` of a float format is number
//! `dim * 64 + token`; codes of four dims of a token are adjacent, `[dims / 4][64][4]`. Values run along dims, so that
//! weighted sums fill registers: `[64][dims]` for floats, tokens in pairs `[32][dims][2]` for `Int8`, in eights for
//! `Int4`. Scales and zero points of the 64 tokens follow the codes. Dims are padded to a multiple of 16.

use super::simd::LANES;
use crate::kernels;

/// Tokens of a tile.
pub const TILE_TOKENS: usize = 64;

/// Storage of the keys or the values of a head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TileFormat {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// FP8 E4M3 with one f32 scale per token.
    Fp8E4m3,
    /// 8-bit codes with one f32 scale per token: `code * scale`.
    Int8,
    /// 4-bit codes with one f32 scale and one zero point per token: `(code - zero) * scale`.
    Int4,
}

/// Keys or values of 64 tokens of a head.
#[derive(Clone, Copy, Debug)]
pub struct Tile<'a> {
    /// Storage.
    pub format: TileFormat,
    /// At least [`TileFormat::tile_bytes`] bytes.
    pub bytes: &'a [u8],
}

/// Elements of one token and head to be stored.
#[derive(Clone, Copy, Debug)]
pub enum TileRow<'a> {
    /// Values, for [`TileFormat::F32`], [`TileFormat::F16`] and [`TileFormat::Bf16`], which round to nearest even.
    Floats(&'a [f32]),
    /// Elements of FP8 E4M3 before scaling, exactly representable, and their scale.
    Fp8(&'a [f32], f32),
    /// Signed codes, their scale and zero point: -128 to 127 for [`TileFormat::Int8`] (zero point 0), -8 to 7 for
    /// [`TileFormat::Int4`].
    Codes(&'a [i8], f32, i8),
}

/// `head_dim` padded to whole registers.
pub(super) const fn padded(head_dim: usize) -> usize {
    head_dim.next_multiple_of(LANES)
}

impl TileFormat {
    /// Bytes of a tile of keys, and equally of values, for heads of `head_dim`: a multiple of 64.
    pub const fn tile_bytes(self, head_dim: usize) -> usize {
        let per_element = TILE_TOKENS * padded(head_dim);
        match self {
            TileFormat::F32 => 4 * per_element,
            TileFormat::F16 | TileFormat::Bf16 => 2 * per_element,
            TileFormat::Fp8E4m3 | TileFormat::Int8 => per_element + 4 * TILE_TOKENS,
            TileFormat::Int4 => per_element / 2 + 5 * TILE_TOKENS,
        }
    }

    /// Bytes of elements or codes; scales follow them, then zero points.
    pub(super) const fn code_bytes(self, dims: usize) -> usize {
        match self {
            TileFormat::F32 => 4 * TILE_TOKENS * dims,
            TileFormat::F16 | TileFormat::Bf16 => 2 * TILE_TOKENS * dims,
            TileFormat::Fp8E4m3 | TileFormat::Int8 => TILE_TOKENS * dims,
            TileFormat::Int4 => TILE_TOKENS * dims / 2,
        }
    }

    /// Stores the key of token `slot` of a tile.
    ///
    /// # Panics
    /// If the tile is too short, `slot` is not below 64, or the row is not of this format.
    pub fn write_key(self, tile: &mut [u8], slot: usize, row: TileRow<'_>) {
        self.write(tile, slot, row, true);
    }

    /// Stores the value of token `slot` of a tile.
    ///
    /// # Panics
    /// As [`write_key`](Self::write_key).
    pub fn write_value(self, tile: &mut [u8], slot: usize, row: TileRow<'_>) {
        self.write(tile, slot, row, false);
    }

    fn write(self, tile: &mut [u8], slot: usize, row: TileRow<'_>, key: bool) {
        assert!(slot < TILE_TOKENS, "paged: token {slot} of a tile of {TILE_TOKENS}");
        let len = match row {
            TileRow::Floats(x) | TileRow::Fp8(x, _) => x.len(),
            TileRow::Codes(codes, ..) => codes.len(),
        };
        let dims = padded(len);
        let fits = matches!(
            (self, row),
            (TileFormat::F32 | TileFormat::F16 | TileFormat::Bf16, TileRow::Floats(_))
                | (TileFormat::Fp8E4m3, TileRow::Fp8(..))
                | (TileFormat::Int8 | TileFormat::Int4, TileRow::Codes(..))
        );
        assert!(fits, "paged: a row of another format than {self:?}");
        assert!(tile.len() >= self.tile_bytes(len), "paged: a tile of {} bytes is too short", tile.len());
        let (codes, sides) = tile.split_at_mut(self.code_bytes(dims));
        let at = |dim: usize| if key { dim * TILE_TOKENS + slot } else { slot * dims + dim };
        match (self, row) {
            (TileFormat::F32, TileRow::Floats(x)) => {
                x.iter().enumerate().for_each(|(i, x)| put(codes, at(i), x.to_le_bytes()));
            }
            (TileFormat::F16 | TileFormat::Bf16, TileRow::Floats(x)) => {
                for (block, x) in x.chunks(LANES).enumerate() {
                    let mut bits = [0; LANES];
                    match self {
                        TileFormat::F16 => kernels().f32_to_f16(x, &mut bits[..x.len()]),
                        _ => kernels().f32_to_bf16(x, &mut bits[..x.len()]),
                    }
                    let bits = bits[..x.len()].iter().enumerate();
                    bits.for_each(|(i, bits)| put(codes, at(block * LANES + i), bits.to_le_bytes()));
                }
            }
            (TileFormat::Fp8E4m3, TileRow::Fp8(x, scale)) => {
                x.iter().enumerate().for_each(|(i, x)| codes[at(i)] = e4m3_bits(*x));
                put(sides, slot, scale.to_le_bytes());
            }
            (TileFormat::Int8, TileRow::Codes(x, scale, _)) => {
                for (i, code) in x.iter().enumerate() {
                    match key {
                        true => codes[byte_of_key(i, slot)] = (*code as u8) ^ 0x80,
                        false => codes[byte_of_value(i, slot, dims)] = *code as u8,
                    }
                }
                put(sides, slot, scale.to_le_bytes());
            }
            (TileFormat::Int4, TileRow::Codes(x, scale, zero)) => {
                let nibble = |code: i8| (code as u8).wrapping_add(8) & 15;
                for (i, code) in x.iter().enumerate() {
                    let (byte, high) = nibble_at(i, slot, dims, key);
                    let (keep, shift) = if high { (0x0f, 4) } else { (0xf0, 0) };
                    codes[byte] = codes[byte] & keep | nibble(*code) << shift;
                }
                put(sides, slot, scale.to_le_bytes());
                sides[4 * TILE_TOKENS + slot] = nibble(zero);
            }
            _ => {}
        }
    }

    /// Decodes tokens `slots` of a tile of keys to `out` `[slots, head_dim]` with rows of `stride`.
    ///
    /// # Panics
    /// If a slice is too short, or `slots` exceeds 64.
    pub fn read_keys(
        self,
        tile: &[u8],
        head_dim: usize,
        slots: std::ops::Range<usize>,
        out: &mut [f32],
        stride: usize,
    ) {
        self.read(tile, head_dim, slots, out, stride, true);
    }

    /// Decodes tokens `slots` of a tile of values, as [`read_keys`](Self::read_keys).
    ///
    /// # Panics
    /// As there.
    pub fn read_values(
        self,
        tile: &[u8],
        head_dim: usize,
        slots: std::ops::Range<usize>,
        out: &mut [f32],
        stride: usize,
    ) {
        self.read(tile, head_dim, slots, out, stride, false);
    }

    fn read(
        self,
        tile: &[u8],
        head_dim: usize,
        slots: std::ops::Range<usize>,
        out: &mut [f32],
        stride: usize,
        key: bool,
    ) {
        assert!(slots.end <= TILE_TOKENS, "paged: tokens {slots:?} of a tile of {TILE_TOKENS}");
        let dims = padded(head_dim);
        let (codes, sides) = tile.split_at(self.code_bytes(dims));
        for (row, slot) in slots.enumerate() {
            let out = &mut out[row * stride..][..head_dim];
            let at = |dim: usize| if key { dim * TILE_TOKENS + slot } else { slot * dims + dim };
            let u16_at = |i: usize| u16::from_le_bytes(get(codes, at(i)));
            match self {
                TileFormat::F32 => {
                    out.iter_mut().enumerate().for_each(|(i, x)| *x = f32::from_le_bytes(get(codes, at(i))));
                }
                // The elements of a value follow each other.
                TileFormat::F16 if !key => kernels().f16_le_to_f32(&codes[2 * at(0)..][..2 * head_dim], out),
                TileFormat::Bf16 if !key => {
                    kernels().bf16_le_to_f32(&codes[2 * at(0)..][..2 * head_dim], out);
                }
                TileFormat::F16 => {
                    for (block, out) in out.chunks_mut(LANES).enumerate() {
                        let mut bits = [0; LANES];
                        bits[..out.len()]
                            .iter_mut()
                            .enumerate()
                            .for_each(|(i, b)| *b = u16_at(block * LANES + i));
                        kernels().f16_to_f32(&bits[..out.len()], out);
                    }
                }
                TileFormat::Bf16 => {
                    let value = |i| f32::from_bits(u32::from(u16_at(i)) << 16);
                    out.iter_mut().enumerate().for_each(|(i, x)| *x = value(i));
                }
                TileFormat::Fp8E4m3 => {
                    let scale = f32::from_le_bytes(get(sides, slot));
                    out.iter_mut().enumerate().for_each(|(i, x)| *x = e4m3_value(codes[at(i)]) * scale);
                }
                TileFormat::Int8 => {
                    let scale = f32::from_le_bytes(get(sides, slot));
                    for (i, x) in out.iter_mut().enumerate() {
                        let code = match key {
                            true => codes[byte_of_key(i, slot)] ^ 0x80,
                            false => codes[byte_of_value(i, slot, dims)],
                        };
                        *x = f32::from(code as i8) * scale;
                    }
                }
                TileFormat::Int4 => {
                    let scale = f32::from_le_bytes(get(sides, slot));
                    let zero = f32::from(sides[4 * TILE_TOKENS + slot]);
                    for (i, x) in out.iter_mut().enumerate() {
                        let (byte, high) = nibble_at(i, slot, dims, key);
                        *x = (f32::from(codes[byte] >> (4 * u8::from(high)) & 15) - zero) * scale;
                    }
                }
            }
        }
    }
}

fn byte_of_key(dim: usize, slot: usize) -> usize {
    (dim / 4 * TILE_TOKENS + slot) * 4 + dim % 4
}

fn byte_of_value(dim: usize, slot: usize, dims: usize) -> usize {
    (slot / 2 * dims + dim) * 2 + slot % 2
}

/// Byte of a 4-bit code, and true if it is the high half. Keys: dims `8 g..8 g + 4` in low halves, the next four in
/// high ones. Values: token `2 n + h` of eight is nibble `n` of the 16-bit word `h` of its dim.
fn nibble_at(dim: usize, slot: usize, dims: usize, key: bool) -> (usize, bool) {
    if key {
        return ((dim / 8 * TILE_TOKENS + slot) * 4 + dim % 4, dim % 8 >= 4);
    }
    let (eight, token) = (slot / 8, slot % 8);
    let word = (eight * dims + dim) * 2 + token % 2;
    (2 * word + token / 4, token / 2 % 2 == 1)
}

fn put<const N: usize>(bytes: &mut [u8], i: usize, value: [u8; N]) {
    bytes[N * i..N * i + N].copy_from_slice(&value);
}

fn get<const N: usize>(bytes: &[u8], i: usize) -> [u8; N] {
    std::array::from_fn(|j| bytes[N * i + j])
}

/// Code of an element of E4M3.
fn e4m3_bits(x: f32) -> u8 {
    let sign = ((x.to_bits() >> 24) & 0x80) as u8;
    let x = x.abs();
    if x < 2f32.powi(-6) {
        return sign | (x * 512.0) as u8;
    }
    let bits = x.to_bits() >> 20;
    sign | (bits - (120 << 3)).min(0x7e) as u8
}

/// Value of a code of E4M3 that is not NaN.
fn e4m3_value(code: u8) -> f32 {
    let magnitude = match code & 0x7f {
        low @ 0..8 => f32::from(low) / 512.0,
        other => f32::from_bits((u32::from(other) + (120 << 3)) << 20),
    };
    if code & 0x80 != 0 { -magnitude } else { magnitude }
}
