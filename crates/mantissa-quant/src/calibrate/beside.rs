//! Statistics of what the inputs of linear layers have become: the windows go through a layer of the model that is made and of the
//! original side by side.

use mantissa_model::{LinearInput, ModelConfig};

use super::{CalibrateError, CalibratedLayer, Calibration, CalibrationSet, Tick, go_on};
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
        let threads = self.threads;
        let (mut now, mut before) =
            (self.start(layer, inputs, false)?, reference.start(original, inputs, false)?);
        for windows in self.batches() {
            self.step(&mut now, windows.clone(), &mut |_, _| {})?;
            reference.step(&mut before, windows.clone(), &mut |_, _| {})?;
            for (now, before) in now.workers.iter().zip(&before.workers).take(windows.len()) {
                for (((hessian, drift), now), before) in all.iter_mut().zip(&now.seen).zip(&before.seen) {
                    hessian.add(now, threads);
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
    /// aside: the drift, and a second window for each thread.
    pub(crate) fn beside_bytes(
        config: &ModelConfig,
        set: &CalibrationSet,
        input: LinearInput,
        threads: usize,
    ) -> u64 {
        let window = Self::statistics_bytes(config, set, input, threads);
        let change = 4 * (set.longest() * config.input_width(input)) as u64;
        window.saturating_add(Self::pass_bytes(config, set, threads)).saturating_add(change)
    }
}
