//! Tensors in closed blocks: whole, or panel by panel to where they are stored.

use std::ops::Range;

use mantissa_kernels::{for_each_with, kernels};
use mantissa_num::codec::Codec;
use mantissa_num::{Codes, Format, Given, Quantized, Scheme, TensorError, minifloat};

use super::pieces_of;
use crate::error_stats::ErrorStats;
use crate::source::{PANEL, Scratch, WeightReader};

/// Takes the blocks of a panel, and the offset of their first byte in the tensor. Threads call it in any order.
pub type Sink<'a, E> = dyn Fn(u64, &[u8]) -> Result<(), E> + Sync + 'a;

/// Like [`quantize_source`](super::quantize_source), into the closed blocks of `codec`. If the codec is
/// [searched](Codec::is_searched), the search minimizes the error weighted by `importance`, one weight per column.
///
/// # Errors
/// Errors of `source`; [`TensorError::Ragged`], [`TensorError::Length`] of `importance`, [`TensorError::NonFinite`],
/// [`TensorError::ScaleOverflow`].
pub fn quantize_blocks<S: WeightReader + ?Sized>(
    codec: &'static Codec,
    source: &S,
    rows: usize,
    cols: usize,
    importance: Option<&[f32]>,
    threads: usize,
) -> Result<(Quantized, ErrorStats), S::Error> {
    let cut = Cut::new(codec, source, (rows, cols), importance)?;
    let mut blocks = vec![0; cut.bytes];
    let mut results = cut.results();
    let panels = cut.panels();
    let parts = pieces_of(&mut blocks, cut.panel_bytes(), panels).into_iter().zip(&mut results);
    for_each_with(threads, Scratch::default, parts.enumerate(), |scratch, (i, (blocks, result))| {
        *result = cut.encode(i, scratch, blocks);
    });
    let stats = cut.sum(results)?;
    let (format, codes) = (Format::Codec(codec.id), Codes::Packed(blocks));
    Ok((Quantized { codes, ..Quantized::empty(format, rows, cols) }, stats))
}

/// Like [`quantize_blocks`], but passes each panel to `sink` from the thread that made it, while it is in that core's
/// cache. The blocks are never in memory together.
///
/// # Errors
/// As [`quantize_blocks`], and errors of `sink`.
pub fn stream_blocks<S: WeightReader + ?Sized>(
    codec: &'static Codec,
    source: &S,
    (rows, cols): (usize, usize),
    importance: Option<&[f32]>,
    threads: usize,
    sink: &Sink<'_, S::Error>,
) -> Result<ErrorStats, S::Error> {
    let cut = Cut::new(codec, source, (rows, cols), importance)?;
    let mut results = cut.results();
    let buffers = || (Scratch::default(), Vec::new());
    for_each_with(threads, buffers, results.iter_mut().enumerate(), |(scratch, blocks), (i, result)| {
        let first = i * cut.panel_bytes();
        blocks.resize(cut.panel_bytes().min(cut.bytes - first), 0);
        let encoded = cut.encode(i, scratch, blocks);
        *result = encoded.and_then(|stats| sink(first as u64, blocks).map(|()| stats));
    });
    cut.sum(results)
}

/// A tensor cut into panels of whole rows.
struct Cut<'a, S: ?Sized> {
    codec: &'static Codec,
    source: &'a S,
    rows: usize,
    cols: usize,
    importance: Option<&'a [f32]>,
    /// Bytes of all blocks.
    bytes: usize,
    /// Rows of a panel.
    grain: usize,
}

impl<'a, S: WeightReader + ?Sized> Cut<'a, S> {
    fn new(
        codec: &'static Codec,
        source: &'a S,
        (rows, cols): (usize, usize),
        importance: Option<&'a [f32]>,
    ) -> Result<Self, TensorError> {
        let ragged = TensorError::Ragged { cols, block: codec.elements, codec: codec.name };
        let bytes = codec.total_bytes(rows, cols).ok_or(ragged)?;
        if let Some(found) = importance.map(<[f32]>::len).filter(|len| *len != cols) {
            return Err(TensorError::Length { what: "importance", found, expected: cols, rows, cols });
        }
        Ok(Cut { codec, source, rows, cols, importance, bytes, grain: (PANEL / cols.max(1)).max(1) })
    }

    fn panels(&self) -> usize {
        if self.bytes == 0 { 0 } else { self.rows.div_ceil(self.grain) }
    }

    fn panel_bytes(&self) -> usize {
        self.grain * (self.cols / self.codec.elements * self.codec.bytes)
    }

    /// One for each panel.
    fn results(&self) -> Vec<Result<ErrorStats, S::Error>> {
        (0..self.panels()).map(|_| Ok(ErrorStats::default())).collect()
    }

    /// Fills the blocks of panel `i`.
    fn encode(&self, i: usize, scratch: &mut Scratch, blocks: &mut [u8]) -> Result<ErrorStats, S::Error> {
        let Range { start, end } = i * self.grain..self.rows.min((i + 1) * self.grain);
        let first = start * self.cols;
        let x = self.source.elements(first..end * self.cols, scratch)?;
        self.encode_panel(x, blocks).map_err(|error| error.shifted(first).into())
    }

    fn encode_panel(&self, x: &[f32], blocks: &mut [u8]) -> Result<ErrorStats, TensorError> {
        let amax = kernels().amax(x);
        if !amax.is_finite() {
            let index = x.iter().position(|v| !v.is_finite()).unwrap_or(0);
            return Err(TensorError::NonFinite { count: 1, index, value: x[index] });
        }
        kernels().encode_blocks(self.codec.id, x, self.importance, blocks);
        if amax > minifloat::F16.max() {
            self.codec.check_scales(x, blocks)?;
        }
        let sums = kernels().block_error_sums(self.codec.id, blocks, x);
        Ok(ErrorStats::of_sums(x.len(), sums))
    }

    /// Results of all panels, in their order.
    fn sum(&self, results: Vec<Result<ErrorStats, S::Error>>) -> Result<ErrorStats, S::Error> {
        let mut stats = ErrorStats::default();
        for result in results {
            match result {
                Ok(part) => stats.merge(&part),
                // A panel knows of its own elements; the message is about the whole tensor.
                Err(error) => {
                    let (rows, cols, mut scratch) = (self.rows, self.cols, Scratch::default());
                    let whole = self.source.elements(0..rows * cols, &mut scratch)?;
                    let scheme = Scheme::codec(self.codec.id);
                    mantissa_num::quantize(&scheme, whole, rows, cols, Given::default())?;
                    return Err(error);
                }
            }
        }
        Ok(stats)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::Mutex;

    use mantissa_num::CodecId;

    use super::*;

    #[test]
    fn streamed_panels_form_the_tensor() {
        // Two panels, the last one short, so that a thread uses its buffers again.
        let (rows, cols) = (136, 256);
        let w: Vec<f32> = (0..rows * cols).map(|i| ((i * i) as f32 * 0.013).sin() * 0.03).collect();
        for id in CodecId::ALL {
            let codec = id.codec();
            let (whole, stats) = quantize_blocks(codec, &w[..], rows, cols, None, 2).unwrap();
            // A search takes its time.
            for threads in 1..=if codec.is_searched() { 1 } else { 2 } {
                let found = Mutex::new(vec![0; codec.total_bytes(rows, cols).unwrap()]);
                let sink = |at: u64, bytes: &[u8]| {
                    found.lock().unwrap()[at as usize..][..bytes.len()].copy_from_slice(bytes);
                    Ok(())
                };
                let streamed = stream_blocks(codec, &w[..], (rows, cols), None, threads, &sink).unwrap();
                assert_eq!(streamed, stats, "{}", codec.name);
                assert!(Codes::Packed(found.into_inner().unwrap()) == whole.codes, "{}", codec.name);
            }
        }
    }

    #[test]
    fn errors_of_the_sink_are_returned() {
        let w = vec![1.0; 4 * PANEL];
        let refuse = |_: u64, _: &[u8]| {
            Err(TensorError::Length { what: "room", found: 0, expected: 1, rows: 1, cols: 1 })
        };
        let found = stream_blocks(CodecId::Q8_0.codec(), &w[..], (4, PANEL), None, 2, &refuse);
        assert!(matches!(found, Err(TensorError::Length { what: "room", .. })), "{found:?}");
    }
}
