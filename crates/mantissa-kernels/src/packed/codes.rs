//! Order of codes in a block of 16 rows × 32 columns, as bit planes.
//!
//! Eight quads of four columns each; a quad is 64 bytes, row by row. A code of `b` bits is split into planes of whole
//! quads: 4 bits (four registers: the low halves of register `i` belong to quad `i`, the high halves to quad `i + 4`),
//! 2 bits (two registers: bits `2s, 2s + 1` of register `j` belong to quad `2s + j`), 1 bit (one register: bit `q`
//! belongs to quad `q`). 8-bit codes are the quads themselves. So a block takes `64 b` bytes, without padding, and
//! unpacking a quad takes one shift and one mask per plane.

use super::dot::{Dot, Quad};
use super::{BLOCK, QUADS, ROWS};

/// Widths of codes that have planes.
pub(crate) const WIDTHS: [u32; 6] = [2, 3, 4, 5, 6, 8];

/// Packs a block. `codes[row][column]` are unsigned and below `2^bits`.
#[inline(always)]
pub(crate) fn pack_block(codes: &[[u8; BLOCK]; ROWS], bits: u32, out: &mut [Quad]) {
    let mut quads = [[0u8; 4 * ROWS]; QUADS];
    for (row, codes) in codes.iter().enumerate() {
        for (quad, four) in quads.iter_mut().zip(codes.as_chunks::<4>().0) {
            quad[4 * row..][..4].copy_from_slice(four);
        }
    }
    if bits == 8 {
        return out.copy_from_slice(&quads);
    }
    out.iter_mut().for_each(|quad| quad.fill(0));
    for (q, quad) in quads.iter().enumerate() {
        // All ones show where each part of a code goes, and how many bits it has.
        let mut first = 0;
        pack_planes(((1u32 << bits) - 1) as u8, bits, q, |register, mask| {
            let (width, shift) = (mask.count_ones(), mask.trailing_zeros());
            // The part's field in every byte of a word; nothing crosses from byte to byte.
            let field = u64::from_ne_bytes([(1u8 << width) - 1; 8]);
            let words = out[register].as_chunks_mut::<8>().0.iter_mut().zip(quad.as_chunks::<8>().0);
            for (out, codes) in words {
                let part = (u64::from_ne_bytes(*codes) >> first & field) << shift;
                *out = (u64::from_ne_bytes(*out) | part).to_ne_bytes();
            }
            first += width;
        });
    }
}

/// Hands the parts of a code of quad `q` to `put`, with the number of their register in the block.
#[inline(always)]
fn pack_planes(code: u8, bits: u32, q: usize, mut put: impl FnMut(usize, u8)) {
    let (mut rest, mut first) = (code, 0);
    if bits >= 4 {
        put(q % 4, (rest & 15) << (q / 4 * 4));
        (rest, first) = (rest >> 4, 4);
    }
    if matches!(bits, 2 | 3 | 6) {
        put(first + q % 2, (rest & 3) << (q / 2 * 2));
        (rest, first) = (rest >> 2, first + 2);
    }
    if matches!(bits, 3 | 5) {
        put(first, (rest & 1) << q);
    }
}

/// Returns the code of row `row` and column `col` of a block.
pub(crate) fn code_at(block: &[Quad], bits: u32, row: usize, col: usize) -> u8 {
    let (q, at) = (col / 4, 4 * row + col % 4);
    if bits == 8 {
        return block[q][at];
    }
    // Every part of an all-ones code, in order, says where its bits lie.
    let (mut code, mut first) = (0, 0);
    pack_planes(((1u32 << bits) - 1) as u8, bits, q, |register, mask| {
        code |= (block[register][at] & mask) >> mask.trailing_zeros() << first;
        first += mask.count_ones();
    });
    code
}

/// Unpacks quad `q` of a block of `BITS`-bit codes. `q` is a constant after unrolling.
#[inline(always)]
pub(crate) fn quad<D: Dot, const BITS: usize>(d: D, block: &[Quad; BITS], q: usize) -> D::B {
    let register = |i: usize| d.load(&block[i]);
    let (pair, pair_shift) = (q % 2, (q / 2 * 2) as i32);
    match BITS {
        2 => d.and(d.shift(register(pair), pair_shift), 3),
        3 => {
            let low = d.and(d.shift(register(pair), pair_shift), 3);
            d.or(low, d.and(d.shift(register(2), q as i32 - 2), 4))
        }
        8 => register(q),
        _ => {
            let low = d.and(d.shift(register(q % 4), (q / 4 * 4) as i32), 15);
            match BITS {
                5 => d.or(low, d.and(d.shift(register(4), q as i32 - 4), 16)),
                6 => d.or(low, d.and(d.shift(register(4 + pair), pair_shift - 4), 0x30)),
                _ => low,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::dot::Plain;
    use super::*;

    fn check<const BITS: usize>() {
        let mask = (1u32 << BITS) - 1;
        let code = |row: usize, col: usize| (((row * 37 + col * 101 + row * col * 7) as u32) & mask) as u8;
        let codes: [[u8; BLOCK]; ROWS] = std::array::from_fn(|row| std::array::from_fn(|col| code(row, col)));
        let mut block = [[0; 4 * ROWS]; BITS];
        pack_block(&codes, BITS as u32, &mut block);
        for q in 0..QUADS {
            let got = quad::<_, BITS>(Plain, &block, q);
            let expected: Quad = std::array::from_fn(|at| code(at / 4, 4 * q + at % 4));
            assert_eq!(got, expected, "{BITS} bits, quad {q}");
        }
    }

    #[test]
    fn unpacking_inverts_packing() {
        check::<2>();
        check::<3>();
        check::<4>();
        check::<5>();
        check::<6>();
        check::<8>();
    }
}
