//! Statistics of what the inputs of linear layers have become: the windows go through a layer of the model that is made and of the
//! original side by side.

use std::mem::swap;

use mantissa_model::{LinearInput, ModelConfig};

use super::{CalibrateError, CalibratedLayer, Calibration, CalibrationSet, Tick, add, go_on};
use crate::gptq::{Drift, Hessian};

/// An input's second moments, and how it has moved.
pub(crate) type Moved = (Hessian, Drift);

impl Calibration<'_> {
    /// [`statistics`](Self::statistics), with the drift of each of `inputs` from what they are when the windows of `reference`, the same,
    /// go through its `original` layer. `tick` is asked as there.
    ///
    /// # Errors
    /// [`CalibrateError`].
    pub(crate) fn statistics_beside(
        &mut self,
        layer: &CalibratedLayer,
        (reference, original): (&mut Calibration<'_>, &CalibratedLayer),
        inputs: &[LinearInput],
        tick: &mut Tick<'_>,
    ) -> Result<Vec<Moved>, CalibrateError> {
        let new = |&input: &LinearInput| {
            let width = self.config.input_width(input);
            Ok((Hessian::new(width)?, Drift::new(width)?))
        };
        let mut all: Vec<Moved> = inputs.iter().map(new).collect::<Result<_, CalibrateError>>()?;
        let (threads, products) = (self.threads, self.products);
        let (mut now, mut before) =
            (self.start(layer, inputs, false), reference.start(original, inputs, false));
        // The same workers for both: only what they saw is kept meanwhile.
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
            go_on(tick)?;
        }
        self.finish(now);
        reference.finish(before);
        Ok(all)
    }

    /// Bytes that [`statistics_beside`](Self::statistics_beside) takes beside what [`statistics`](Self::statistics) does, both layers
    /// aside: the drift, and what was seen of a second window for each thread.
    pub(crate) fn beside_bytes(
        config: &ModelConfig,
        set: &CalibrationSet,
        input: LinearInput,
        threads: usize,
    ) -> u64 {
        let (width, threads) = (config.input_width(input), threads.clamp(1, set.windows.len().max(1)) as u64);
        Drift::bytes_needed(width).saturating_add(4 * threads * (set.longest() * width) as u64)
    }
}
