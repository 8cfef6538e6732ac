//! Verification of tensors that a GGUF file splits into several.

use mantissa_verify::gguf::SplitTensor;

use super::gguf::{TensorCheck, bits_per_weight};
use super::signal::Signal;
use super::worst::{Worst, worst_of_row};
use crate::error::Result;
use crate::gguf::heads;
use crate::quality::Verification;
use crate::source::{Scratch, WeightReader as _};

impl TensorCheck<'_> {
    /// Compares a split tensor as a whole with the ordinary reader's, and each part, row by row as stored, with the
    /// source.
    pub(super) fn run_parts(&self, parts: &SplitTensor, found: &mut Verification) -> Result<()> {
        let name = &self.info.name;
        let [rows, cols] = *self.info.shape.as_slice() else { return Ok(()) };
        let decoded = self.model.decoded(parts.names()).map_err(|e| self.read_error(e))?;
        if decoded.iter().any(|(tensor, _)| !tensor.ty.is_decoded()) {
            return Ok(());
        }
        let total: usize = decoded.iter().map(|(_, values)| values.len()).sum();
        let (heads, unrotated) = heads(self.config);
        let dims = &decoded[0].0.dims;
        let keys = [unrotated, cols, heads].map(|n| n as u64);
        if total != rows * cols || (matches!(parts, SplitTensor::KeysAndValues(_)) && dims[..] != keys) {
            // Keys and values are split per head with keys transposed, so their shape must match too.
            found.faults.push(format!(
                "{name}: expected {} elements in its parts, got {total} (first part {dims:?})",
                rows * cols
            ));
            return Ok(());
        }
        let mut ours = vec![0.0; rows * cols];
        self.model.rows_of_parts(parts, (rows, cols), 0..rows, &mut ours).map_err(|e| self.read_error(e))?;
        let theirs = self.files.tensor_f32(name, &self.info.shape)?;
        if let Some(i) = ours.iter().zip(&theirs).position(|(a, b)| a != b && !(a.is_nan() && b.is_nan())) {
            let (a, b) = (ours[i], theirs[i]);
            let at = format!("[{}, {}]", i / cols, i % cols);
            found
                .faults
                .push(format!("{name}: element {at}: independent reader {a:e}, ordinary reader {b:e}"));
        }
        found.weights += 1;
        let Some(source) = self.source else { return Ok(()) };
        let (dense, mut scratch) = (self.dense(source)?, Scratch::default());
        let w = dense.elements(0..rows * cols, &mut scratch).map_err(|error| self.error(error))?;
        let mut expected: Vec<Vec<f32>> = decoded.iter().map(|(_, values)| vec![0.0; values.len()]).collect();
        // The source's values in the places of the parts, to bound the errors block by block.
        for (i, w) in w.iter().enumerate() {
            let (part, row, col) = parts.at(i / cols, i % cols, rows, &decoded[0].0);
            let width = usize::try_from(decoded[part].0.dims[0]).unwrap_or(0);
            let at = row.checked_mul(width).and_then(|first| first.checked_add(col));
            if let Some(place) = at.and_then(|at| expected[part].get_mut(at)) {
                *place = *w;
            }
        }
        let (mut worst, mut signal, mut bits) = (Worst::default(), Signal::default(), f64::INFINITY);
        for ((tensor, decoded), w) in decoded.iter().zip(&expected) {
            let width = usize::try_from(tensor.dims[0]).unwrap_or(1).max(1);
            for (row, (w, decoded)) in w.chunks(width).zip(decoded.chunks(width)).enumerate() {
                worst_of_row((tensor.ty, 1.0, self.weighed), row, w, decoded, &mut worst);
                signal.add(w, decoded);
            }
            bits = bits.min(bits_per_weight(tensor.ty));
        }
        found.compared += 1;
        found.max_error_in_bounds = Some(found.max_error_in_bounds.unwrap_or(0.0).max(worst.ratio));
        if self.bounded && worst.ratio > 1.0 {
            found.faults.push(worst.text(name));
        }
        signal.judge(name, bits, found);
        Ok(())
    }
}
