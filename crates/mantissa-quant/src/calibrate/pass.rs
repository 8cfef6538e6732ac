//! A pass of all windows through a layer, in batches of one window per thread.

use std::ops::Range;

use mantissa_kernels::for_each;
use mantissa_model::{LinearInput, Place};

use super::layer::{CalibratedLayer, Kept};
use super::worker::{Pass, Worker};
use super::{Calibration, States};
use crate::error::CalibrateError;

/// A pass in progress.
pub(super) struct Running<'l> {
    layer: &'l CalibratedLayer,
    inputs: &'l [LinearInput],
    /// True if the pass goes to the end of the layer.
    through: bool,
    /// Start of the pass.
    from: Place,
    /// States at the start, if it is inside the layer.
    inside: Option<States>,
    /// End of the pass.
    end: Place,
    /// States at the end, if their width differs from those at the start.
    resized: Option<States>,
}

impl Running<'_> {
    /// True if the pass goes to the end of the layer.
    pub(super) fn through(&self) -> bool {
        self.through
    }
}

impl Calibration<'_> {
    /// Returns the ranges of windows that go through a layer together.
    pub(super) fn batches(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let (threads, count) = (self.threads, self.states.len());
        (0..count).step_by(threads).map(move |first| first..count.min(first + threads))
    }

    /// Starts a pass through `layer` with its present weights, up to the last of `inputs` or, with `through`, to the
    /// next layer.
    pub(super) fn start<'l>(
        &mut self,
        layer: &'l CalibratedLayer,
        inputs: &'l [LinearInput],
        through: bool,
    ) -> Running<'l> {
        let kept = self.kept.take().filter(|kept| kept.usable_for(layer, inputs));
        let (from, inside) = kept.map_or((Place::Input, None), |kept| (kept.place, Some(kept.states)));
        Running { layer, inputs, through, from, inside, end: from, resized: None }
    }

    /// Returns one worker per thread.
    pub(super) fn workers(&self) -> Result<Vec<Worker>, CalibrateError> {
        (0..self.threads).map(|_| Ok(Worker::new(self.config, self.longest)?)).collect()
    }

    /// Runs one [batch](Self::batches) of windows. `take` gets the worker and the number of tokens of each, in order.
    pub(super) fn step(
        &mut self,
        running: &mut Running<'_>,
        workers: &mut [Worker],
        windows: Range<usize>,
        take: &mut impl FnMut(&Worker, usize),
    ) -> Result<(), CalibrateError> {
        let (config, pass) = (self.config, self.pass_of(running));
        let (layer, through) = (running.layer, running.through);
        // Keys and values are complete where the heads are joined.
        let attends = running.from == Place::Input
            && (through || running.inputs.iter().any(|input| input.turn() >= LinearInput::O.turn()));
        for_each(self.threads, windows.clone().zip(&mut *workers), |(window, worker)| {
            worker.run(pass, window);
        });
        for (window, worker) in windows.zip(workers) {
            worker.take_result(window)?;
            let tokens = worker.states.len() / config.hidden_size;
            if attends {
                self.carried[window].leave(config, layer.index, tokens, &worker.buffers);
            }
            take(worker, tokens);
            if through {
                self.carried[window].advance(config, tokens, &worker.buffers);
            }
            let states = if through { &worker.states[..] } else { worker.inside() };
            self.settle(running, window, (worker.end, states))?;
        }
        Ok(())
    }

    /// Returns what a worker needs to run windows of a pass.
    pub(super) fn pass_of<'r>(&'r self, running: &'r Running<'_>) -> Pass<'r> {
        let Running { layer, inputs, through, from, inside, .. } = running;
        Pass {
            layer,
            config: self.config,
            states: &self.states,
            carried: &self.carried,
            from: *from,
            inside: inside.as_ref(),
            inputs,
            through: *through,
        }
    }

    /// Takes the states of a window at the `end` of a pass.
    pub(super) fn settle(
        &mut self,
        running: &mut Running<'_>,
        window: usize,
        (end, states): (Place, &[f32]),
    ) -> Result<(), CalibrateError> {
        if running.through {
            self.states.put(window, states)?;
        } else if self.keeps && end > running.from {
            running.end = end;
            self.keep(window, states, &mut running.inside, &mut running.resized)?;
        }
        Ok(())
    }

    /// Ends a pass of all windows.
    pub(super) fn finish(&mut self, Running { layer, through, inside, end, resized, .. }: Running<'_>) {
        if through {
            self.next = layer.index + 1;
        } else {
            let revision = layer.revision(end);
            let place = end;
            self.kept = resized.or(inside).map(|states| Kept { layer: layer.index, place, revision, states });
        }
    }

    /// Keeps the states of a window inside a layer: over the old ones if the width is equal, else in `resized`.
    fn keep(
        &self,
        window: usize,
        values: &[f32],
        inside: &mut Option<States>,
        resized: &mut Option<States>,
    ) -> Result<(), CalibrateError> {
        if let Some(inside) = inside.as_mut().filter(|inside| inside.elements(window) == values.len()) {
            return Ok(inside.put(window, values)?);
        }
        let hidden = self.config.hidden_size;
        let tokens = |window| self.states.elements(window) / hidden;
        let width = values.len() / tokens(window).max(1);
        let resized = match resized {
            Some(resized) => resized,
            None => resized
                .insert(States::of_lens((0..self.states.len()).map(|i| tokens(i) * width), self.in_memory)?),
        };
        Ok(resized.put(window, values)?)
    }
}
