//! Worker of a thread: runs one window at a time through a layer.

use mantissa_model::{
    Buffers, Carried, ForwardError, LinearInput, LoadError, ModelConfig, Observer, Passage, Place,
};

use super::layer::CalibratedLayer;
use super::states::States;
use crate::error::CalibrateError;

/// Buffers for one window.
pub(super) struct Worker {
    pub(super) buffers: Buffers,
    /// States of the window, `[tokens, hidden]`, at [`end`](Self::end).
    pub(super) states: Vec<f32>,
    /// Attention heads, `[tokens, query width]`, if the pass ended there.
    pub(super) heads: Vec<f32>,
    /// End of the pass.
    pub(super) end: Place,
    /// Inputs of the linear layers, in the order requested.
    pub(super) seen: Vec<Vec<f32>>,
    result: Result<(), Failed>,
}

/// Error on a window.
enum Failed {
    Read(mantissa_store::Error),
    Forward(ForwardError),
}

/// A pass through a layer: its start, end and inputs.
#[derive(Clone, Copy)]
pub(super) struct Pass<'a> {
    pub(super) layer: &'a CalibratedLayer,
    pub(super) config: &'a ModelConfig,
    pub(super) states: &'a States,
    /// What the layer reads besides the states, by window.
    pub(super) carried: &'a [Carried],
    /// Start of the pass.
    pub(super) from: Place,
    /// States at the start, if it is inside the layer.
    pub(super) inside: Option<&'a States>,
    pub(super) inputs: &'a [LinearInput],
    /// True if the pass goes to the end of the layer.
    pub(super) through: bool,
}

impl Worker {
    pub(super) fn new(config: &ModelConfig, longest: usize) -> Result<Self, LoadError> {
        let buffers = Buffers::plan(config, longest, longest)?;
        let (states, heads, seen) = (Vec::new(), Vec::new(), Vec::new());
        Ok(Worker { buffers, states, heads, end: Place::Input, seen, result: Ok(()) })
    }

    /// Runs a window through the layer and keeps the requested inputs.
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
            self.result = self.transform_inputs(pass).map_err(Failed::Forward);
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
        pass.carried[window].enter(pass.config, pass.layer.index, buffers);
        self.end = pass
            .layer
            .layer
            .pass(pass.config, &lens, passage, states, observer, buffers)
            .map_err(Failed::Forward)?;
        Ok(())
    }

    /// Returns the states of the window inside the layer.
    pub(super) fn inside(&self) -> &[f32] {
        if self.end == Place::Heads { &self.heads } else { &self.states }
    }

    /// Transforms the inputs as the linear layers do: the weight's transforms first, then quantization.
    fn transform_inputs(&mut self, pass: Pass<'_>) -> Result<(), ForwardError> {
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
