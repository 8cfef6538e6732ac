//! Version of the stored zero points. `gptq` (v1) files hold the zero point minus one, `gptq_v2` files the zero
//! point. The label is sometimes wrong: converted files kept an old config, and tools wrote v2 under the old name.

use mantissa_num::pack::{PLANAR_BLOCK, Packing, planar_block};

use super::config::{Config, Layer, Layout, ZeroVersion};
use crate::{Checkpoint, Dtype};

impl Config {
    /// Corrects the version label if the zero points in `checkpoint` clearly contradict it.
    pub(super) fn check_version(&mut self, checkpoint: &Checkpoint) {
        let Some(found) = of_data(self, checkpoint) else { return };
        if found != self.version {
            let (labelled, found_name) = (self.version.name(), found.name());
            self.notes.push(format!(
                "the zero points are those of \"{found_name}\" although the config says \"{labelled}\": read as they are; \
                 other readers compute with zero points off by one, write \"checkpoint_format\": \"{found_name}\""
            ));
            self.version = found;
            self.contradicts_label = true;
        }
    }
}

/// Number of modules inspected, and the maximum bytes of a tensor read for it.
const MODULES: usize = 8;
const MOST_BYTES: u64 = 64 << 20;

/// Version shown by the zero points of some modules; `None` if ambiguous.
///
/// A symmetric file has one zero point everywhere, `2^(b-1)`: v2 stores that number, v1 the one below. Otherwise the
/// zero point is the code of weight 0, and trained weights average to about 0. So the mean of code minus stored zero
/// point is near 0 in v2 and near 1 in v1.
fn of_data(config: &Config, checkpoint: &Checkpoint) -> Option<ZeroVersion> {
    let mut zeros: Vec<_> = checkpoint.tensors().filter(|meta| meta.name.ends_with(".qzeros")).collect();
    zeros.sort_by_key(|meta| (meta.len, meta.name.clone()));
    let samples: Vec<Sample> = zeros
        .iter()
        .take(MODULES)
        .filter_map(|meta| Sample::read(config, checkpoint, meta.name.strip_suffix(".qzeros")?))
        .collect();
    let vote = |stored: &dyn Fn(&Sample) -> i32| {
        !samples.is_empty() && samples.iter().all(|s| s.zeros.iter().all(|&z| i32::from(z) == stored(s)))
    };
    let middle = |sample: &Sample| 1i32 << (sample.layer.bits - 1);
    if vote(&middle) {
        return Some(ZeroVersion::V2);
    }
    if vote(&|sample| middle(sample) - 1) {
        return Some(ZeroVersion::V1);
    }
    let means: Vec<f64> = samples.iter().filter_map(|sample| sample.shift(config, checkpoint)).collect();
    let mean = means.iter().sum::<f64>() / means.len().max(1) as f64;
    match mean {
        _ if means.is_empty() => None,
        m if m.abs() < 0.25 => Some(ZeroVersion::V2),
        m if (m - 1.0).abs() < 0.25 => Some(ZeroVersion::V1),
        _ => None,
    }
}

struct Sample<'a> {
    module: &'a str,
    layer: Layer,
    /// As stored, unsigned.
    zeros: Vec<u8>,
}

impl<'a> Sample<'a> {
    /// Leaves invalid tensors to the reader of the weight.
    fn read(config: &Config, checkpoint: &Checkpoint, module: &'a str) -> Option<Self> {
        let layer = config.layer(module)?;
        let zeros = fields(config, checkpoint, &format!("{module}.qzeros"), layer.bits)?;
        (!zeros.is_empty()).then_some(Sample { module, layer, zeros })
    }

    /// Mean of code minus stored zero point.
    fn shift(&self, config: &Config, checkpoint: &Checkpoint) -> Option<f64> {
        let name = format!("{}.qweight", self.module);
        // Words run down the columns. The mean does not depend on the order, but bit streams that straddle words need
        // whole blocks.
        let codes = match self.layer.bits {
            3 | 5 | 6 | 7 => column_fields(config, checkpoint, &name, self.layer.bits)?,
            bits => fields(config, checkpoint, &name, bits)?,
        };
        let mean = |fields: &[u8]| {
            fields.iter().map(|&f| u64::from(f)).sum::<u64>() as f64 / fields.len().max(1) as f64
        };
        (!codes.is_empty()).then(|| mean(&codes) - mean(&self.zeros))
    }
}

fn words(checkpoint: &Checkpoint, name: &str) -> Option<(Vec<u8>, usize)> {
    let meta = checkpoint
        .get(name)
        .filter(|meta| meta.dtype == Dtype::I32 && (1..=MOST_BYTES).contains(&meta.len))?;
    let &[_, across] = meta.shape.as_slice() else { return None };
    Some((checkpoint.read(name).ok()?, across))
}

/// All fields of a tensor whose lines are its rows.
fn fields(config: &Config, checkpoint: &Checkpoint, name: &str, bits: u32) -> Option<Vec<u8>> {
    let (bytes, across) = words(checkpoint, name)?;
    lines(config.layout, &bytes, bits, across)
}

/// All fields of a tensor whose lines are its columns.
fn column_fields(config: &Config, checkpoint: &Checkpoint, name: &str, bits: u32) -> Option<Vec<u8>> {
    let (bytes, across) = words(checkpoint, name)?;
    let down = bytes.len() / 4 / across.max(1);
    lines(config.layout, &transpose_words(&bytes, down, across), bits, down)
}

/// Unsigned fields of lines of `words` words.
pub(super) fn lines(layout: Layout, bytes: &[u8], bits: u32, words: usize) -> Option<Vec<u8>> {
    match layout {
        Layout::Stream => {
            let packing = Packing { offset_binary: false, ..Packing::gptq(bits) };
            let per_line = words * 32 / bits as usize;
            let lines = bytes.len() / (4 * words).max(1);
            // The remaining bits of the last word hold no code.
            if packing.line_bytes(per_line) != 4 * words {
                return None;
            }
            packing.unpack(bytes, lines, per_line, false)
        }
        Layout::Planar => {
            let blocks = bytes.chunks_exact(4 * bits as usize);
            if !words.is_multiple_of(bits as usize) || !blocks.remainder().is_empty() {
                return None;
            }
            let mut fields = Vec::with_capacity(bytes.len() / (4 * bits as usize) * PLANAR_BLOCK);
            for block in blocks {
                fields.extend(planar_block(block, bits)?);
            }
            Some(fields)
        }
    }
}

/// Transposes `[rows, cols]` words of four bytes.
pub(super) fn transpose_words(bytes: &[u8], rows: usize, cols: usize) -> Vec<u8> {
    let words = bytes.as_chunks::<4>().0;
    // A tensor without rows may state any number of columns.
    if words.is_empty() {
        return Vec::new();
    }
    mantissa_num::pack::transpose(words, rows, cols).into_flattened()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn empty_tensors_of_any_shape_take_no_time() {
        assert!(transpose_words(&[], 0, usize::MAX / 4).is_empty());
        assert_eq!(transpose_words(&[1, 2, 3, 4, 5, 6, 7, 8], 1, 2), [1, 2, 3, 4, 5, 6, 7, 8]);
    }
}
