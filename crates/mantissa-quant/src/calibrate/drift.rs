//! Statistics with drift: the windows go through a layer of the quantized model and of the original model side by side.

use std::mem::swap;

use mantissa_model::{LinearInput, ModelConfig};

use super::{CalibrateError, CalibratedLayer, Calibration, CalibrationSet, Tick, add, check_tick};
use crate::gptq::{Drift, Hessian};

/// Hessian of an input, and its drift from the original model.
pub(crate) type WithDrift = (Hessian, Drift);

impl Calibration<'_> {
    /// [`statistics`](Self::statistics) with the drift of each of `inputs`. `reference` holds the same windows in the
    /// original model; they go through its layer `original`.
    ///
    /// # Errors
    /// [`CalibrateError`].
    pub(crate) fn statistics_with_drift(
        &mut self,
        layer: &CalibratedLayer,
        (reference, original): (&mut Calibration<'_>, &CalibratedLayer),
        inputs: &[LinearInput],
        tick: &mut Tick<'_>,
    ) -> Result<Vec<WithDrift>, CalibrateError> {
        let new = |&input: &LinearInput| {
            let width = self.config.layer_input_width(layer.index, input);
            Ok((Hessian::new(width)?, Drift::new(width)?))
        };
        let mut all: Vec<WithDrift> = inputs.iter().map(new).collect::<Result<_, CalibrateError>>()?;
        let (threads, products) = (self.threads, self.products);
        let (mut now, mut before) =
            (self.start(layer, inputs, false), reference.start(original, inputs, false));
        // Both passes share the workers; only the inputs of the first are kept meanwhile.
        let mut workers = self.workers()?;
        let mut seen = vec![Vec::new(); workers.len()];
        for windows in self.batches() {
            self.step(&mut now, &mut workers, windows.clone(), &mut |_, _| {})?;
            seen.iter_mut().zip(&mut workers).for_each(|(seen, worker)| swap(seen, &mut worker.seen));
            reference.step(&mut before, &mut workers, windows.clone(), &mut |_, _| {})?;
            for (now, worker) in seen.iter().zip(&mut workers).take(windows.len()) {
                for (((hessian, drift), now), before) in all.iter_mut().zip(now).zip(&mut worker.seen) {
                    add(hessian, products, now, threads);
                    drift.add(before, now, threads);
                }
            }
            check_tick(tick)?;
        }
        self.finish(now);
        reference.finish(before);
        Ok(all)
    }

    /// Returns the bytes that [`statistics_with_drift`](Self::statistics_with_drift) needs in addition to
    /// [`statistics`](Self::statistics), without the layers: the drift, and one more input of a window per thread.
    pub(crate) fn drift_bytes(
        config: &ModelConfig,
        set: &CalibrationSet,
        input: LinearInput,
        threads: usize,
    ) -> u64 {
        let (width, threads) = (config.input_width(input), threads.clamp(1, set.windows.len().max(1)) as u64);
        Drift::bytes_needed(width).saturating_add(4 * threads * (set.longest() * width) as u64)
    }
}
