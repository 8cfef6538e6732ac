//! A pass of all windows through a layer, a window for each thread at a time.

use std::ops::Range;

use mantissa_kernels::for_each;
use mantissa_model::{LinearInput, Place};

use super::worker::{Pass, Worker};
use super::{CalibrateError, CalibratedLayer, Calibration, IN_MEMORY, States};

/// The windows inside a layer, where a pass for one of its inputs has left them.
pub(super) struct Kept {
    layer: usize,
    place: Place,
    /// Number of replacements of weights before the place.
    revision: u32,
    /// `[tokens, query width]` of each window at its heads, `[tokens, hidden]` in the middle.
    states: States,
}

/// A pass that has begun.
pub(super) struct Running<'l> {
    layer: &'l CalibratedLayer,
    inputs: &'l [LinearInput],
    /// True if the pass goes to the end of the layer.
    through: bool,
    /// Place where it began.
    from: Place,
    /// States of the windows there, inside the layer.
    inside: Option<States>,
    /// Place where it ends, and the states there if they are wider.
    came: Place,
    room: Option<States>,
}

impl Calibration<'_> {
    /// Windows that go through a layer together.
    pub(super) fn batches(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let (threads, count) = (self.threads, self.states.len());
        (0..count).step_by(threads).map(move |first| first..count.min(first + threads))
    }

    /// Begins a pass through `layer`, as it now is, as far as `inputs` depend on, or with `through` to the next layer.
    pub(super) fn start<'l>(
        &mut self,
        layer: &'l CalibratedLayer,
        inputs: &'l [LinearInput],
        through: bool,
    ) -> Running<'l> {
        let kept = self.kept.take().filter(|kept| kept.serves(layer, inputs));
        let (from, inside) = kept.map_or((Place::Input, None), |kept| (kept.place, Some(kept.states)));
        Running { layer, inputs, through, from, inside, came: from, room: None }
    }

    /// One for each thread.
    pub(super) fn workers(&self) -> Result<Vec<Worker>, CalibrateError> {
        (0..self.threads).map(|_| Ok(Worker::new(self.config, self.longest)?)).collect()
    }

    /// Takes a [batch](Self::batches) of windows on, which leaves in `workers` what it was made for; `take` has the worker of each, in their order, and its tokens.
    pub(super) fn step(
        &mut self,
        running: &mut Running<'_>,
        workers: &mut [Worker],
        windows: Range<usize>,
        take: &mut impl FnMut(&Worker, usize),
    ) -> Result<(), CalibrateError> {
        let config = self.config;
        let Running { layer, inputs, through, from, inside, came, room } = running;
        let (states, inside_now) = (&self.states, inside.as_ref());
        let pass = Pass { layer, config, states, from: *from, inside: inside_now, inputs, through: *through };
        for_each(self.threads, windows.clone().zip(&mut *workers), |(window, worker)| {
            worker.run(pass, window);
        });
        for (window, worker) in windows.zip(workers) {
            worker.take_result(window)?;
            take(worker, worker.states.len() / config.hidden_size);
            if *through {
                self.states.put(window, &worker.states)?;
            } else if self.keeps && worker.came > *from {
                *came = worker.came;
                self.keep(window, worker.inside(), inside, room)?;
            }
        }
        Ok(())
    }

    /// Ends a pass of all windows.
    pub(super) fn finish(&mut self, Running { layer, through, inside, came, room, .. }: Running<'_>) {
        if through {
            self.next = layer.index + 1;
        } else {
            let revision = layer.revision(came);
            let place = came;
            self.kept = room.or(inside).map(|states| Kept { layer: layer.index, place, revision, states });
        }
    }

    /// Keeps a window inside a layer: in the place of what it was further back, if that is as wide, or else in `room`.
    fn keep(
        &self,
        window: usize,
        values: &[f32],
        inside: &mut Option<States>,
        room: &mut Option<States>,
    ) -> Result<(), CalibrateError> {
        if let Some(inside) = inside.as_mut().filter(|inside| inside.elements(window) == values.len()) {
            return Ok(inside.put(window, values)?);
        }
        let hidden = self.config.hidden_size;
        let tokens = |window| self.states.elements(window) / hidden;
        let width = values.len() / tokens(window).max(1);
        let room = match room {
            Some(room) => room,
            None => {
                room.insert(States::of_lens((0..self.states.len()).map(|i| tokens(i) * width), IN_MEMORY)?)
            }
        };
        Ok(room.put(window, values)?)
    }
}

impl Kept {
    /// True if a pass through `layer`, as it now is, may begin here to find `inputs`.
    fn serves(&self, layer: &CalibratedLayer, inputs: &[LinearInput]) -> bool {
        let behind = inputs.iter().all(|input| input.turn() >= self.place.turn());
        self.layer == layer.index && self.revision == layer.revision(self.place) && behind
    }
}
