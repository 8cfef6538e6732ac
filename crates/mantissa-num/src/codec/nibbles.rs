//! Positions of paired 4-bit fields in blocks.

use std::ops::Range;

use super::CodecId;

/// Bytes of a block that hold two 4-bit fields each. They come in runs: the low fields of a run's bytes belong to its
/// first elements, the high fields to the following ones (ggml's `ggml-quants.c`, the `dequantize_row_*` functions).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nibbles {
    /// The bytes.
    pub bytes: Range<usize>,
    /// Bytes of a run; it has twice as many elements.
    pub run: usize,
}

impl CodecId {
    /// 4-bit fields of a codec; `None` if codes have another width or no fields of their own. For 5- and 6-bit types
    /// these are the low parts of the codes.
    pub fn nibbles(self) -> Option<Nibbles> {
        let (start, run) = match self {
            CodecId::Mxfp4 => (1, 16),
            CodecId::Q4_0 | CodecId::Iq4Nl => (2, 16),
            CodecId::Q4_1 => (4, 16),
            CodecId::Nvfp4 => (4, 8),
            CodecId::Q5_0 => (6, 16),
            CodecId::Q5_1 => (8, 16),
            CodecId::Iq4Xs => (8, 16),
            CodecId::Q4K => (16, 32),
            CodecId::Q5K => (48, 32),
            CodecId::Q6K => (0, 64),
            _ => return None,
        };
        Some(Nibbles { bytes: start..start + self.codec().elements / 2, run })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// Changing a field changes only its own element.
    #[test]
    fn fields_belong_to_the_elements_that_runs_say() {
        let mut known = 0;
        for id in CodecId::ALL {
            let Some(Nibbles { bytes, run }) = id.nibbles() else { continue };
            known += 1;
            let codec = id.codec();
            let x: Vec<f32> = (0..codec.elements).map(|i| (i as f32 * 0.7).sin() + 1.5).collect();
            let mut block = vec![0; codec.bytes];
            codec.encode_block(&x, &mut block);
            let decode = |block: &[u8]| {
                let mut out = vec![0.0; codec.elements];
                codec.decode_block(block, &mut out);
                out
            };
            let before = decode(&block);
            for at in bytes.clone() {
                for (bit, high) in [(1, 0), (0x10, run)] {
                    let mut changed = block.clone();
                    changed[at] ^= bit;
                    let after = decode(&changed);
                    let differ: Vec<usize> = (0..x.len()).filter(|&i| before[i] != after[i]).collect();
                    let field = at - bytes.start;
                    assert_eq!(differ, [field / run * 2 * run + field % run + high], "{id:?} byte {at}");
                }
            }
        }
        assert_eq!(known, 11);
    }
}
