//! One window at a time, on a thread of its own.

use mantissa_model::{Buffers, ForwardError, LinearInput, LoadError, ModelConfig, Observer, Passage, Place};

use super::{CalibrateError, CalibratedLayer, States};

/// Buffers for one window at a time.
pub(super) struct Worker {
    pub(super) buffers: Buffers,
    /// States of the window, `[tokens, hidden]`, at the place that [`came`](Self::came) says.
    pub(super) states: Vec<f32>,
    /// The joined heads, `[tokens, query width]`, where it ended there.
    pub(super) heads: Vec<f32>,
    pub(super) came: Place,
    /// Inputs of the linear layers, in the order asked for.
    pub(super) seen: Vec<Vec<f32>>,
    result: Result<(), Failed>,
}

/// Error on a window.
enum Failed {
    Read(mantissa_store::Error),
    Forward(ForwardError),
}

/// A pass through a layer: from where, and what for.
#[derive(Clone, Copy)]
pub(super) struct Pass<'a> {
    pub(super) layer: &'a CalibratedLayer,
    pub(super) config: &'a ModelConfig,
    pub(super) states: &'a States,
    /// Place where it begins.
    pub(super) from: Place,
    /// Inside the layer, what the windows are there.
    pub(super) inside: Option<&'a States>,
    pub(super) inputs: &'a [LinearInput],
    /// True if the pass goes to the end of the layer.
    pub(super) through: bool,
}

impl Worker {
    pub(super) fn new(config: &ModelConfig, longest: usize) -> Result<Self, LoadError> {
        let buffers = Buffers::plan(config, longest, longest)?;
        let (states, heads, seen) = (Vec::new(), Vec::new(), Vec::new());
        Ok(Worker { buffers, states, heads, came: Place::Input, seen, result: Ok(()) })
    }

    /// Takes a window through the layer, and keeps what its linear layers read.
    pub(super) fn run(&mut self, pass: Pass<'_>, window: usize) {
        let inputs = pass.inputs;
        let mut seen = std::mem::take(&mut self.seen);
        seen.resize(inputs.len(), Vec::new());
        seen.iter_mut().for_each(Vec::clear);
        let mut observer = |input: LinearInput, x: &[f32]| {
            let wanted = inputs.iter().zip(&mut seen).filter(|(wanted, _)| **wanted == input);
            wanted.for_each(|(_, seen)| seen.extend_from_slice(x));
        };
        let observer: &mut Observer<'_> = &mut observer;
        self.result = self.forward(pass, window, (!inputs.is_empty()).then_some(observer));
        self.seen = seen;
        if self.result.is_ok() {
            self.result = self.as_read(pass).map_err(Failed::Forward);
        }
    }

    fn forward(
        &mut self,
        pass: Pass<'_>,
        window: usize,
        observer: Option<&mut Observer<'_>>,
    ) -> Result<(), Failed> {
        self.states.clear();
        self.heads.clear();
        let inside = |place| pass.inside.filter(|_| pass.from == place);
        let states = inside(Place::Middle).unwrap_or(pass.states);
        states.append_to(window, &mut self.states).map_err(Failed::Read)?;
        let heads = inside(Place::Heads).map(|heads| heads.append_to(window, &mut self.heads));
        heads.transpose().map_err(Failed::Read)?;
        let lens = [self.states.len() / pass.config.hidden_size];
        let last = pass.inputs.iter().copied().max_by_key(|input| input.turn());
        let to = last.filter(|_| !pass.through);
        let passage = Passage { from: pass.from, to, heads: &mut self.heads };
        let (states, buffers) = (&mut self.states, &mut self.buffers);
        self.came = pass
            .layer
            .layer
            .pass(pass.config, &lens, passage, states, observer, buffers)
            .map_err(Failed::Forward)?;
        Ok(())
    }

    /// States of the window inside the layer, where it ended there.
    pub(super) fn inside(&self) -> &[f32] {
        if self.came == Place::Heads { &self.heads } else { &self.states }
    }

    /// Inputs as the weights read them: transforms around the codes come first, then rounding.
    fn as_read(&mut self, pass: Pass<'_>) -> Result<(), ForwardError> {
        for (input, x) in pass.inputs.iter().zip(&mut self.seen) {
            let reader = input.readers().find_map(|kind| pass.layer.linear(kind));
            let Some(reader) = reader else { continue };
            reader.transforms().before.iter().for_each(|map| map.apply(x, reader.cols()));
            if let Some(quantizer) = pass.layer.quantizers.get(input) {
                let fault = |error| ForwardError::Input { module: reader.module().to_owned(), error };
                quantizer.apply(x, reader.cols()).map_err(fault)?;
            }
        }
        Ok(())
    }

    pub(super) fn take_result(&mut self, window: usize) -> Result<(), CalibrateError> {
        let result = std::mem::replace(&mut self.result, Ok(()));
        result.map_err(|failed| match failed {
            Failed::Read(error) => CalibrateError::States(error),
            Failed::Forward(error) => CalibrateError::Forward { window, error },
        })
    }
}
