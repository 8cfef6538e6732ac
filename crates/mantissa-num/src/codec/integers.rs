//! Blocks as integers: `scale · (level(code) - zero) + min`, for integer products of whole blocks.

use super::k_quants::{pairs, scale_min};
use super::{CodecId, Nibbles, f16_at, fp4, iq, iq4, u16_at, u32_at};

/// Storage of the scales, or minima, of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScaleStorage {
    /// None: a minimum of 0.
    Absent,
    /// An f16 for each group.
    Half,
    /// An f32 for each group.
    Single,
    /// A power of two for each group.
    Power,
    /// Half a magnitude of E4M3 for each group.
    HalfE4m3,
    /// An 8-bit integer for each group, times an f16 for the block.
    Integer,
}

/// Integers of a codec.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Integers {
    /// Bits of a code, which is unsigned.
    pub bits: u32,
    /// Levels of 3-bit or 4-bit codes; `None` if a code is its own level.
    pub levels: Option<[i8; 16]>,
    /// Level that stands for 0.
    pub zero: u8,
    /// Factor of all scales.
    pub factor: f32,
    /// Elements of a group.
    pub group: usize,
    /// Scales.
    pub scales: ScaleStorage,
    /// Minima.
    pub mins: ScaleStorage,
}

/// Integers of one block.
#[derive(Clone, Debug, PartialEq)]
pub struct BlockIntegers {
    /// Codes, `[elements]`.
    pub codes: [u8; 256],
    /// Scale of each group; an integer for [`ScaleStorage::Integer`].
    pub scales: [f32; 16],
    /// Minimum of each group; an integer for [`ScaleStorage::Integer`].
    pub mins: [f32; 16],
    /// Factor of integer scales, else 1.
    pub scale: f32,
    /// Factor of integer minima, else 1.
    pub min: f32,
}

impl Default for BlockIntegers {
    fn default() -> Self {
        BlockIntegers { codes: [0; 256], scales: [0.0; 16], mins: [0.0; 16], scale: 1.0, min: 1.0 }
    }
}

impl CodecId {
    /// Integers of the codec.
    pub fn integers(self) -> Integers {
        let plain = |bits, zero, group| Integers {
            bits,
            levels: None,
            zero,
            factor: 1.0,
            group,
            scales: ScaleStorage::Half,
            mins: ScaleStorage::Absent,
        };
        let integer =
            |bits, zero, group| Integers { scales: ScaleStorage::Integer, ..plain(bits, zero, group) };
        let with_mins = |it: Integers| Integers { mins: it.scales, ..it };
        let table =
            |levels: [f32; 16], it: Integers| Integers { levels: Some(levels.map(|x| x as i8)), ..it };
        match self {
            CodecId::Q1_0 => plain(2, 1, 128),
            CodecId::Q2_0 => plain(2, 1, 64),
            CodecId::Tq1_0 | CodecId::Tq2_0 => plain(2, 1, 256),
            CodecId::Q4_0 => plain(4, 8, 32),
            CodecId::Q4_1 => with_mins(plain(4, 0, 32)),
            CodecId::Q5_0 => plain(5, 16, 32),
            CodecId::Q5_1 => with_mins(plain(5, 0, 32)),
            CodecId::Q8_0 | CodecId::Q8_1 => plain(8, 128, 32),
            CodecId::Q2K => with_mins(integer(2, 0, 16)),
            CodecId::Q3K => integer(3, 4, 16),
            CodecId::Q4K => with_mins(integer(4, 0, 32)),
            CodecId::Q5K => with_mins(integer(5, 0, 32)),
            CodecId::Q6K => integer(6, 32, 16),
            CodecId::Q8K => Integers { scales: ScaleStorage::Single, ..plain(8, 128, 256) },
            CodecId::Iq4Nl => table(iq4::LEVELS, plain(4, 0, 32)),
            CodecId::Iq4Xs => table(iq4::LEVELS, integer(4, 0, 32)),
            CodecId::Mxfp4 => {
                table(fp4::DOUBLED, Integers { scales: ScaleStorage::Power, ..plain(4, 0, 32) })
            }
            CodecId::Nvfp4 => {
                table(fp4::DOUBLED, Integers { scales: ScaleStorage::HalfE4m3, ..plain(4, 0, 16) })
            }
            CodecId::Iq2Xxs | CodecId::Iq1S => self.lattice(integer(3, 0, 32)),
            CodecId::Iq2Xs | CodecId::Iq2S | CodecId::Iq1M => self.lattice(integer(3, 0, 16)),
            CodecId::Iq3Xxs | CodecId::Iq3S => self.lattice(integer(4, 0, 32)),
        }
    }

    /// Integers of a lattice type: levels and signs of the coordinates of its points, without the grid.
    fn lattice(self, it: Integers) -> Integers {
        iq::form(self).map_or(it, |form| Integers {
            levels: Some(form.levels.map(|x| x as i8)),
            factor: form.factor,
            ..it
        })
    }

    /// Splits a block into its [integers](Self::integers).
    ///
    /// # Panics
    /// If the block has another length.
    pub fn split(self, block: &[u8], out: &mut BlockIntegers) {
        assert_eq!(block.len(), self.codec().bytes, "{}: bytes of a block", self.codec().name);
        (out.scale, out.min) = (1.0, 1.0);
        match self {
            CodecId::Q2K | CodecId::Q3K | CodecId::Q4K | CodecId::Q5K | CodecId::Q6K => {
                self.split_k(block, out);
            }
            CodecId::Iq1S
            | CodecId::Iq1M
            | CodecId::Iq2Xxs
            | CodecId::Iq2Xs
            | CodecId::Iq2S
            | CodecId::Iq3Xxs
            | CodecId::Iq3S => self.split_points(block, out),
            CodecId::Q1_0 => {
                out.scales[0] = f16_at(block, 0);
                fill(out, 128, |i| 2 * (block[2 + i / 8] >> (i % 8) & 1));
            }
            CodecId::Q2_0 => {
                out.scales[0] = f16_at(block, 0);
                fill(out, 64, |i| block[2 + i / 4] >> (2 * (i % 4)) & 3);
            }
            CodecId::Q8_0 | CodecId::Q8_1 => {
                let start = if self == CodecId::Q8_0 { 2 } else { 4 };
                out.scales[0] = f16_at(block, 0);
                out.codes.iter_mut().zip(&block[start..]).for_each(|(code, byte)| *code = byte ^ 0x80);
            }
            CodecId::Q8K => {
                out.scales[0] = f32::from_bits(u32_at(block, 0));
                out.codes.iter_mut().zip(&block[4..]).for_each(|(code, byte)| *code = byte ^ 0x80);
            }
            CodecId::Tq1_0 | CodecId::Tq2_0 => {
                // A decoded element is -1, 0 or 1 times the scale.
                let mut values = [0.0; 256];
                let codec = self.codec();
                let (at, mut unit) = (codec.bytes - 2, block.to_vec());
                out.scales[0] = f16_at(block, at);
                unit[at..].copy_from_slice(&0x3c00u16.to_le_bytes());
                codec.decode_block(&unit, &mut values);
                fill(out, 256, |i| (values[i] + 1.0) as u8);
            }
            _ => self.split_nibbles(block, out),
        }
    }

    /// Lattice types.
    fn split_points(self, block: &[u8], out: &mut BlockIntegers) {
        let (Some(form), it) = (iq::form(self), self.integers()) else { return };
        out.scale = iq::block_scale(self, block);
        iq::points(self, block, |point| {
            out.scales[point.element / it.group] = f32::from(point.scale);
            for (i, code) in out.codes[point.element..][..form.coordinates].iter_mut().enumerate() {
                *code = form.code(&point, i);
            }
        });
    }

    /// Writes the codes of a type with nibbles, without their high bits.
    fn put_nibbles(self, block: &[u8], out: &mut BlockIntegers) {
        let Some(Nibbles { bytes, run }) = self.nibbles() else { return };
        let runs = block[bytes].chunks_exact(run);
        for (bytes, codes) in runs.zip(out.codes.chunks_exact_mut(2 * run)) {
            let (low, high) = codes.split_at_mut(run);
            for ((low, high), byte) in low.iter_mut().zip(high).zip(bytes) {
                (*low, *high) = (byte & 15, byte >> 4);
            }
        }
    }

    /// Types of up to 5 bits whose nibbles lie as [`CodecId::nibbles`] says.
    fn split_nibbles(self, block: &[u8], out: &mut BlockIntegers) {
        self.put_nibbles(block, out);
        let high = match self {
            CodecId::Q5_0 => u32_at(block, 2),
            CodecId::Q5_1 => u32_at(block, 4),
            _ => 0,
        };
        if high != 0 {
            out.codes[..32]
                .iter_mut()
                .enumerate()
                .for_each(|(i, code)| *code |= ((high >> i & 1) as u8) << 4);
        }
        match self {
            CodecId::Mxfp4 => out.scales[0] = fp4::half_e8m0(block[0]),
            CodecId::Nvfp4 => (0..4).for_each(|i| out.scales[i] = fp4::half_ue4m3(block[i])),
            CodecId::Iq4Xs => {
                out.scale = f16_at(block, 0);
                let high = u16_at(block, 2);
                for sub in 0..8 {
                    let low = block[4 + sub / 2] >> (sub % 2 * 4) & 15;
                    out.scales[sub] = f32::from((low | ((high >> (2 * sub) & 3) as u8) << 4) as i8 - 32);
                }
            }
            _ => out.scales[0] = f16_at(block, 0),
        }
        if matches!(self, CodecId::Q4_1 | CodecId::Q5_1) {
            out.mins[0] = f16_at(block, 2);
        }
    }

    /// K-quants.
    fn split_k(self, block: &[u8], out: &mut BlockIntegers) {
        match self {
            CodecId::Q2K => {
                (out.scale, out.min) = (f16_at(block, 80), -f16_at(block, 82));
                for sub in 0..16 {
                    out.scales[sub] = f32::from(block[sub] & 15);
                    out.mins[sub] = f32::from(block[sub] >> 4);
                }
                for (sub, out) in out.codes.as_chunks_mut::<16>().0.iter_mut().enumerate() {
                    let (codes, shift) = pairs(&block[16..80], sub);
                    out.iter_mut().zip(codes).for_each(|(out, byte)| *out = byte >> shift & 3);
                }
            }
            CodecId::Q3K => {
                out.scale = f16_at(block, 108);
                (0..16).for_each(|sub| out.scales[sub] = super::k_quants::q3_scale(&block[96..108], sub));
                for (sub, out) in out.codes.as_chunks_mut::<16>().0.iter_mut().enumerate() {
                    let (low, shift) = pairs(&block[32..96], sub);
                    let high = &block[sub % 2 * 16..][..16];
                    for ((out, low), high) in out.iter_mut().zip(low).zip(high) {
                        *out = low >> shift & 3 | (high >> (sub / 2) & 1) << 2;
                    }
                }
            }
            CodecId::Q6K => {
                out.scale = f16_at(block, 208);
                (0..16).for_each(|sub| out.scales[sub] = f32::from(block[192 + sub] as i8));
                self.put_nibbles(block, out);
                for (run, out) in out.codes.as_chunks_mut::<32>().0.iter_mut().enumerate() {
                    let high = &block[128 + run / 4 * 32..][..32];
                    out.iter_mut().zip(high).for_each(|(out, high)| *out |= (high >> (run % 4 * 2) & 3) << 4);
                }
            }
            _ => {
                (out.scale, out.min) = (f16_at(block, 0), -f16_at(block, 2));
                (0..8).for_each(|sub| (out.scales[sub], out.mins[sub]) = scale_min(&block[4..16], sub));
                self.put_nibbles(block, out);
                if self == CodecId::Q5K {
                    for (sub, out) in out.codes.as_chunks_mut::<32>().0.iter_mut().enumerate() {
                        out.iter_mut()
                            .zip(&block[16..])
                            .for_each(|(out, high)| *out |= (high >> sub & 1) << 4);
                    }
                }
            }
        }
    }
}

fn fill(out: &mut BlockIntegers, elements: usize, code: impl Fn(usize) -> u8) {
    out.codes[..elements].iter_mut().enumerate().for_each(|(i, out)| *out = code(i));
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Random blocks: every field takes every value, so that no bit is overlooked.
    #[test]
    fn integers_have_the_values_of_the_block() {
        let mut state = 7u32;
        for id in CodecId::ALL {
            let form = id.integers();
            let codec = id.codec();
            for _ in 0..50 {
                let mut block = vec![0u8; codec.bytes];
                for byte in &mut block {
                    state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    // Without the top exponent bit, f16 and f32 scales are finite.
                    *byte = (state >> 24) as u8 & 0xbf;
                }
                let mut expected = vec![0.0; codec.elements];
                codec.decode_block(&block, &mut expected);
                let mut parts = BlockIntegers::default();
                id.split(&block, &mut parts);
                for (i, expected) in expected.iter().enumerate() {
                    let code = parts.codes[i];
                    assert!(u32::from(code) < 1 << form.bits);
                    let level =
                        form.levels.map_or(f32::from(code), |levels| f32::from(levels[usize::from(code)]));
                    let scale = form.factor * parts.scale * parts.scales[i / form.group];
                    let min = parts.min * parts.mins[i / form.group];
                    let got = scale * (level - f32::from(form.zero)) + min;
                    let bound = 1e-6 * (scale * 128.0).abs().max(min.abs());
                    assert!((got - expected).abs() <= bound, "{id:?} element {i}: {got} for {expected}");
                }
            }
        }
    }
}
