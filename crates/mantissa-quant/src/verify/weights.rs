//! Quantized weights of a folder: decoded by both readers and compared with their source.

use std::ops::Range;

use mantissa_kernels::map_reduce_fixed;
use mantissa_model::{LinearInfo, linear_weight};
use mantissa_num::stored::Extra;
use mantissa_num::{Format, Quantized};
use mantissa_store::convention::{ModelFiles, Weight};
use mantissa_store::gguf::GgmlType;
use mantissa_verify::gguf::BlockType;

use super::independent::{CheckpointTensors, column_order, expert};
use super::recorded;
use super::reference::source_weight;
use super::worst::{Rows, worst_error, worst_of_row};
use crate::dequantize::Dequantizer;
use crate::error::{QuantError, Result};
use crate::fold::Folded;
use crate::plan::rounds_each;
use crate::quality::Verification;
use crate::report::LayerReport;
use crate::source::{DenseError, DenseTensor, PANEL, Scratch, WeightReader};
use crate::stacks::stack_of;

/// A quantized weight to be checked.
pub(super) struct WeightCheck<'a> {
    pub(super) files: &'a ModelFiles,
    pub(super) source: Option<&'a Folded<'a>>,
    pub(super) info: &'a LinearInfo,
    /// The layer as the source stores it.
    pub(super) original: &'a LinearInfo,
    /// Report of the layer in `quality.json`.
    pub(super) recorded: Option<&'a LayerReport>,
    /// True if the recorded error is checked.
    pub(super) errors: bool,
}

/// A weight from the ordinary reader.
struct Coded<'a> {
    q: &'a Quantized,
    /// Column of the weight at each column of its codes, if they differ.
    order: Option<&'a [u32]>,
    /// Side tensors added to the values of the codes.
    extras: &'a [Extra],
}

impl WeightCheck<'_> {
    /// True if an error beyond the scheme's bound is a fault, because the weight is RTN.
    pub(super) fn bounded(&self) -> bool {
        self.recorded.is_some_and(|layer| rounds_each(&layer.method))
    }

    /// Checks the weight.
    pub(super) fn run(&self, threads: usize, found: &mut Verification) -> Result<()> {
        let LinearInfo { module, rows, cols, .. } = self.info;
        let linear = linear_weight(self.files, &LinearInfo { bias: false, ..self.info.clone() })?;
        // The ordinary reader returns trellis weights as values with transforms; dense weights have none.
        let Weight::Quantized(q) = &linear.weight else {
            return if linear.transforms.is_empty() { Ok(()) } else { self.trellis(&linear, found) };
        };
        let order = match column_order(&linear.transforms) {
            Ok(order) => order,
            Err(what) => {
                found.notes.push(format!(
                    "{module}: not decoded twice: the independent reader does not support its {what}"
                ));
                return Ok(());
            }
        };
        found.weights += 1;
        let stored = CheckpointTensors(self.files);
        let ours = match stack_of(self.info).filter(|_| !self.info.is_by_rows(self.files)) {
            Some(stack) => mantissa_verify::open_stacked(&stored, &expert(stack), *rows, *cols)?,
            None => mantissa_verify::open(&stored, module, *rows, *cols)?,
        };
        let weight = |source| source_weight(self.files.dir(), source, self.original, &linear.transforms);
        let source = self.source.map(weight).transpose()?;
        // Threads check whole rows; parts are merged in order, so faults do not depend on their number.
        let grain = (PANEL / (*cols).max(1)).max(1);
        let coded = Coded { q, order, extras: &linear.transforms.extras };
        let check = |range: Range<usize>| self.rows(range, &coded, &ours, source.as_ref());
        let all = map_reduce_fixed(threads, *rows, grain, check, Ok(Rows::default()), |all, part| {
            Ok::<_, QuantError>(Rows::merge(all?, part?))
        })?;
        found.faults.extend(all.difference);
        if source.is_some() {
            found.compared += 1;
            found.max_error_in_bounds = Some(found.max_error_in_bounds.unwrap_or(0.0).max(all.worst.ratio));
            if let Some(recorded) = self.recorded.filter(|_| self.errors) {
                found.faults.extend(recorded::error_fault(
                    module,
                    &recorded.error,
                    &all.signal.error.report(),
                ));
            }
            if self.bounded() && all.worst.ratio > 1.0 {
                found.faults.push(all.worst.text(module));
            }
            all.signal.judge(module, q.format.bits_per_weight(*rows, *cols), found);
        }
        Ok(())
    }

    /// Compares a range of rows between the readers, and with the source.
    fn rows(
        &self,
        rows: Range<usize>,
        &Coded { q, order, extras }: &Coded<'_>,
        stored: &mantissa_verify::Weight,
        source: Option<&DenseTensor<'_>>,
    ) -> Result<Rows> {
        let cols = self.info.cols;
        let mut scratch = Scratch::default();
        let w = match source {
            Some(source) => {
                let range = rows.start * cols..rows.end * cols;
                Some(source.elements(range, &mut scratch).map_err(|error| self.error(error))?)
            }
            None => None,
        };
        let bound = q.format.error_bound();
        let mut found = Rows::default();
        let mut dequantizer = Dequantizer::new(q);
        let (mut ours, mut theirs, mut sorted) = (vec![0.0; cols], vec![0.0; cols], Vec::new());
        for (i, row) in rows.enumerate() {
            stored.row(row, &mut ours);
            in_order(&mut ours, order, &mut sorted);
            dequantizer.row(row, &mut theirs);
            extras.iter().for_each(|extra| add_row(extra, row, &mut theirs));
            if found.difference.is_none() {
                found.difference = self.difference(row, &ours, &theirs);
            }
            if let Some(w) = w {
                let mut permuted;
                // Blocks are bounded in the order of the codes, so the source's row is permuted like them.
                let mut w = &w[i * cols..][..cols];
                if order.is_some() {
                    permuted = w.to_vec();
                    in_order(&mut permuted, order, &mut sorted);
                    w = &permuted;
                }
                match block_type(&q.format) {
                    Some(ty) => worst_of_row((ty, 1.0, false), row, w, &ours, &mut found.worst),
                    None => worst_error(q, bound, row, w, &ours, &mut found.worst),
                }
                found.signal.add(w, &ours);
            }
        }
        Ok(found)
    }

    fn difference(&self, row: usize, ours: &[f32], theirs: &[f32]) -> Option<String> {
        // NaN is rare, so whole rows are compared before elements.
        if ours.iter().zip(theirs).fold(true, |same, (a, b)| same & (a == b)) {
            return None;
        }
        let col = ours.iter().zip(theirs).position(|(a, b)| a != b && !(a.is_nan() && b.is_nan()))?;
        let (module, a, b) = (&self.info.module, ours[col], theirs[col]);
        Some(format!("{module}: element [{row}, {col}]: independent reader {a:e}, ordinary reader {b:e}"))
    }

    pub(super) fn error(&self, error: DenseError) -> QuantError {
        match error {
            DenseError::Store(error) => error.into(),
            DenseError::Tensor(error) => {
                let (path, tensor) = (self.files.dir().to_owned(), self.info.module.clone());
                QuantError::Tensor { path, tensor, error }
            }
        }
    }
}

/// Adds the outliers of a row to the values of its codes.
fn add_row(extra: &Extra, row: usize, out: &mut [f32]) {
    let Extra::Sparse { starts, index, values } = extra else { return };
    let span = starts[row] as usize..starts[row + 1] as usize;
    index[span.clone()].iter().zip(&values[span]).for_each(|(&i, v)| out[i as usize] += v);
}

/// Permutes a row of the weight into the order of its codes.
fn in_order(row: &mut [f32], order: Option<&[u32]>, sorted: &mut Vec<f32>) {
    let Some(order) = order else { return };
    sorted.clear();
    sorted.extend(order.iter().map(|&from| row[from as usize]));
    row.copy_from_slice(sorted);
}

/// Returns the block type of a codec.
fn block_type(format: &Format) -> Option<BlockType> {
    match format {
        Format::Codec(id) => GgmlType::of_codec(*id).and_then(|ty| BlockType::from_name(ty.name)),
        _ => None,
    }
}
