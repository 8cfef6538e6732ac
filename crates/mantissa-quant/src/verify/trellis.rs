//! Weights of trellis codes. The ordinary reader returns their values between two rotations.

use mantissa_num::minifloat::F16;
use mantissa_num::stored::{Map, Transforms};
use mantissa_store::convention::{LinearWeight, Weight};
use mantissa_verify::trellis::{self, Trellis};

use super::independent::CheckpointTensors;
use super::recorded;
use super::reference::source_weight;
use super::signal::Signal;
use super::weights::WeightCheck;
use crate::error::Result;
use crate::quality::Verification;
use crate::source::{Scratch, WeightReader as _};

impl WeightCheck<'_> {
    /// Compares the values between the rotations bit for bit, the signs and scales around them, and the error of the
    /// whole weight with the recorded one. The places of the rotations are checked by the logits.
    pub(super) fn trellis(&self, linear: &LinearWeight, found: &mut Verification) -> Result<()> {
        let (module, rows, cols) = (&self.info.module, linear.rows, linear.cols);
        let Some(ours) = trellis::open(&CheckpointTensors(self.files), module, rows, cols)? else {
            found.notes.push(format!("{module}: not decoded twice: only one reader supports its codes"));
            return Ok(());
        };
        found.weights += 1;
        let Weight::F16(values) = &linear.weight else { return Ok(()) };
        let theirs: Vec<f32> = values.iter().map(|v| F16.decode((*v).into())).collect();
        found.faults.extend(difference(module, &ours, &theirs, &linear.transforms));
        let Some(source) = self.source else { return Ok(()) };
        let (source, mut scratch) = (
            source_weight(self.files.dir(), source, self.original, &Transforms::default())?,
            Scratch::default(),
        );
        let w = source.elements(0..rows * cols, &mut scratch).map_err(|error| self.error(error))?;
        let mut whole = theirs;
        linear.transforms.fold(&mut whole, rows, cols);
        found.compared += 1;
        let mut signal = Signal::default();
        w.chunks_exact(cols.max(1))
            .zip(whole.chunks_exact(cols.max(1)))
            .for_each(|(w, row)| signal.add(w, row));
        // The codes minimize the error of outputs, so that of the weight tells little.
        signal.judge(module, 0.0, found);
        if let Some(recorded) = self.recorded.filter(|_| self.errors) {
            let error = signal.error;
            found.faults.extend(recorded::error_fault(module, &recorded.error, &error.report()));
        }
        Ok(())
    }
}

/// Returns the first difference between the two readers.
fn difference(module: &str, ours: &Trellis, theirs: &[f32], transforms: &Transforms) -> Option<String> {
    let diagonal = |maps: &[Map]| {
        let diagonal = |map: &Map| if let Map::Diag(d) = map { Some(d.clone()) } else { None };
        maps.iter().find_map(diagonal).unwrap_or_default()
    };
    let (inputs, outputs) = (diagonal(&transforms.before), diagonal(&transforms.after));
    let parts = [
        ("value", &ours.values[..], theirs),
        ("sign of input", &ours.inputs[..], &inputs[..]),
        ("scale of output", &ours.outputs[..], &outputs[..]),
    ];
    parts.into_iter().find_map(|(what, a, b)| {
        let at = a.iter().zip(b).position(|(a, b)| a != b);
        let at = at.or((a.len() != b.len()).then_some(a.len().min(b.len())))?;
        let of = |x: &[f32]| x.get(at).map_or("nothing".to_owned(), |v| format!("{v:e}"));
        Some(format!("{module}: {what} {at}: independent reader {}, ordinary reader {}", of(a), of(b)))
    })
}
