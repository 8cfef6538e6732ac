//! XXH64, a fast checksum for the journal of unfinished work.
//!
//! It detects torn and lost writes, not deliberate changes. Algorithm: Yann Collet, xxHash fast digest algorithm,
//! <https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md>, XXH64 with seed 0.

const P1: u64 = 0x9E37_79B1_85EB_CA87;
const P2: u64 = 0xC2B2_AE3D_27D4_EB4F;
const P3: u64 = 0x1656_67B1_9E37_79F9;
const P4: u64 = 0x85EB_CA77_C2B2_AE63;
const P5: u64 = 0x27D4_EB2F_1656_67C5;

/// Bytes taken at a time, eight for each lane.
const STRIPE: usize = 32;

/// XXH64 of bytes that arrive in pieces; the result does not depend on the split.
#[derive(Clone, Debug)]
pub struct Checksum {
    lanes: [u64; 4],
    pending: [u8; STRIPE],
    held: usize,
    total: u64,
}

impl Default for Checksum {
    fn default() -> Self {
        let lanes = [P1.wrapping_add(P2), P2, 0, 0u64.wrapping_sub(P1)];
        Self { lanes, pending: [0; STRIPE], held: 0, total: 0 }
    }
}

impl Checksum {
    /// Checksum of `bytes`.
    pub fn of(bytes: &[u8]) -> u64 {
        let mut sum = Self::default();
        sum.update(bytes);
        sum.finish()
    }

    /// Takes the next bytes.
    pub fn update(&mut self, mut bytes: &[u8]) {
        self.total = self.total.wrapping_add(bytes.len() as u64);
        if self.held > 0 {
            let n = bytes.len().min(STRIPE - self.held);
            self.pending[self.held..self.held + n].copy_from_slice(&bytes[..n]);
            self.held += n;
            bytes = &bytes[n..];
            if self.held < STRIPE {
                return;
            }
            let stripe = self.pending;
            self.stripe(&stripe);
            self.held = 0;
        }
        let (stripes, rest) = bytes.as_chunks::<STRIPE>();
        stripes.iter().for_each(|stripe| self.stripe(stripe));
        self.pending[..rest.len()].copy_from_slice(rest);
        self.held = rest.len();
    }

    /// Checksum of all bytes so far.
    pub fn finish(&self) -> u64 {
        let mut hash = if self.total < STRIPE as u64 {
            P5
        } else {
            let turns = [1, 7, 12, 18];
            let sum = self.lanes.iter().zip(turns).fold(0u64, |h, (l, r)| h.wrapping_add(l.rotate_left(r)));
            self.lanes.iter().fold(sum, |h, &l| (h ^ round(0, l)).wrapping_mul(P1).wrapping_add(P4))
        };
        hash = hash.wrapping_add(self.total);
        let (words, rest) = self.pending[..self.held].as_chunks::<8>();
        for word in words {
            hash = (hash ^ round(0, u64::from_le_bytes(*word)))
                .rotate_left(27)
                .wrapping_mul(P1)
                .wrapping_add(P4);
        }
        let (half, rest) = rest.as_chunks::<4>();
        for word in half {
            let word = u64::from(u32::from_le_bytes(*word)).wrapping_mul(P1);
            hash = (hash ^ word).rotate_left(23).wrapping_mul(P2).wrapping_add(P3);
        }
        for &byte in rest {
            hash = (hash ^ u64::from(byte).wrapping_mul(P5)).rotate_left(11).wrapping_mul(P1);
        }
        hash = (hash ^ (hash >> 33)).wrapping_mul(P2);
        hash = (hash ^ (hash >> 29)).wrapping_mul(P3);
        hash ^ (hash >> 32)
    }

    fn stripe(&mut self, stripe: &[u8; STRIPE]) {
        for (lane, word) in self.lanes.iter_mut().zip(stripe.as_chunks::<8>().0) {
            *lane = round(*lane, u64::from_le_bytes(*word));
        }
    }
}

fn round(lane: u64, word: u64) -> u64 {
    lane.wrapping_add(word.wrapping_mul(P2)).rotate_left(31).wrapping_mul(P1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_values() {
        for (text, expected) in [
            ("", 0xEF46_DB37_51D8_E999),
            ("a", 0xD24E_C4F1_A98C_6E5B),
            ("abc", 0x44BC_2CF5_AD77_0999),
            ("Nobody inspects the spammish repetition", 0xFBCE_A83C_8A37_8BF1),
        ] {
            assert_eq!(Checksum::of(text.as_bytes()), expected, "{text}");
        }
    }

    #[test]
    fn pieces_do_not_matter() {
        let bytes: Vec<u8> = (0..1000u32).map(|i| (i * i % 251) as u8).collect();
        for len in [0, 1, 31, 32, 33, 63, 64, 65, 1000] {
            let whole = Checksum::of(&bytes[..len]);
            for piece in [1, 3, 8, 31, 32, 33, 500] {
                let mut sum = Checksum::default();
                bytes[..len].chunks(piece).for_each(|piece| sum.update(piece));
                assert_eq!(sum.finish(), whole, "{len} bytes in pieces of {piece}");
            }
        }
    }
}
