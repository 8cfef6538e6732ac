//! Passes of the windows that several workers divide. The unit of a pass is a group of windows; its result is the states
//! at the end of the pass and the inputs that were asked for. Every worker takes the results of all groups in order, so
//! each goes on from the same states. Sums of inputs are divided by rows of `XᵀX`, not by windows: no sum crosses
//! workers, and every bit is that of one process.
//!
//! Results are kept for the present decoder layer and the one before it, from which a worker that comes late begins.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::ops::Range;

use mantissa_kernels::device::Factors;
use mantissa_kernels::for_each;
use mantissa_model::{Carried, LinearInput, Place, Products};
use mantissa_ranks::{RankError, Team, Unit, ranges};

use super::layer::CalibratedLayer;
use super::pass::Running;
use super::worker::Worker;
use super::{Calibration, Tick, check_tick};
use crate::error::CalibrateError;
use crate::gptq::Hessian;
use mantissa_ranks::{Reader, Writer};

/// Groups into which the windows are divided at most.
const GROUPS: usize = 32;

/// Bands of rows into which `XᵀX` is divided.
const BANDS: usize = 8;

/// Least width of an input whose `XᵀX` is divided.
const WIDE: usize = 256;

/// Decoder layers whose results are kept beside the present one.
const KEPT_LAYERS: usize = 1;

/// Workers that divide the passes of some windows.
#[derive(Clone, Debug)]
pub(super) struct Sharing {
    team: Team,
    /// Windows among those of the job.
    role: String,
    /// Units of each decoder layer whose results may still be needed, the oldest first.
    kept: VecDeque<(usize, Vec<Unit>)>,
}

/// Result of a pass for one window.
struct Ran {
    end: Place,
    /// States at the end: the joined heads there, elsewhere the states.
    states: Vec<f32>,
    seen: Vec<Vec<f32>>,
}

/// Places by the byte that stands for them.
const PLACES: [Place; 4] = [Place::Input, Place::Heads, Place::Middle, Place::End];

impl Calibration<'_> {
    /// Divides the passes among the workers of `team`; `role` names these windows among all of the job. A model whose layers
    /// read more than the states runs in each worker.
    pub(crate) fn shared_by(self, team: &Team, role: String) -> Self {
        let divides = team.is_shared()
            && !team.is_partial()
            && self.states.len() > 1
            && Carried::bytes_per_token(self.config, self.longest) == 0;
        let sharing = divides.then(|| Sharing { team: team.clone(), role, kept: VecDeque::new() });
        Calibration { sharing, ..self }
    }

    /// Returns the last layer up to `target` whose input states have been computed by others, if this one is behind.
    pub(crate) fn found(&self, target: usize) -> usize {
        let Some(sharing) = &self.sharing else { return self.next };
        let groups = groups(self.states.len());
        let there = |layer: &usize| {
            let name = sharing.through(layer - 1);
            groups.iter().all(|group| sharing.team.has(&unit(&name, group)))
        };
        (self.next + 1..=target).rev().find(there).unwrap_or(self.next)
    }

    /// Takes the states before `layer`, which [`found`](Self::found) named; false if they are gone since.
    ///
    /// # Errors
    /// I/O.
    pub(crate) fn go_to(&mut self, layer: usize) -> Result<bool, CalibrateError> {
        let Some(sharing) = self.sharing.as_ref().filter(|_| layer > self.next) else {
            return Ok(layer == self.next);
        };
        let name = sharing.through(layer - 1);
        let mut all = Vec::new();
        for group in groups(self.states.len()) {
            let bytes = sharing.team.result(&unit(&name, &group))?;
            let Some(ran) = bytes.and_then(|bytes| read(&bytes, group.len(), 0)) else { return Ok(false) };
            all.extend(ran);
        }
        for (window, ran) in all.iter().enumerate() {
            self.states.put(window, &ran.states)?;
        }
        (self.next, self.kept) = (layer, None);
        Ok(true)
    }

    /// Runs a pass of which each worker computes some groups of windows; `take` gets the result of each window in order.
    pub(super) fn shared_pass(
        &mut self,
        layer: &CalibratedLayer,
        inputs: &[LinearInput],
        through: bool,
        tick: &mut Tick<'_>,
        take: &mut dyn FnMut(&Worker, usize),
    ) -> Result<(), CalibrateError> {
        let Some(sharing) = self.sharing.clone() else { return Ok(()) };
        let name = sharing.pass(layer, inputs, through);
        let groups = groups(self.states.len());
        let names: Vec<Unit> = groups.iter().map(|group| unit(&name, group)).collect();
        let mut running = self.start(layer, inputs, through);
        let mut workers = self.workers()?;
        {
            let (this, running, tick) = (&*self, &running, RefCell::new(&mut *tick));
            let mut compute = |group: usize| this.run_group(running, &mut workers, groups[group].clone());
            let mut told = |_| check_tick(&mut **tick.borrow_mut());
            sharing.team.complete(&names, &mut compute, &mut told)?;
        }
        let mut shown = Worker::new(self.config, 1)?;
        for (group, name) in groups.iter().zip(&names) {
            let found = sharing.team.result(name)?;
            let all = match found.and_then(|bytes| read(&bytes, group.len(), inputs.len())) {
                Some(all) => all,
                // Damaged, or removed because this worker is far behind.
                None => {
                    let bytes = self.run_group(&running, &mut workers, group.clone())?;
                    sharing.team.replace(name, bytes.clone())?;
                    read(&bytes, group.len(), inputs.len()).unwrap_or_default()
                }
            };
            for (window, ran) in group.clone().zip(all) {
                let tokens = self.states.elements(window) / self.config.hidden_size.max(1);
                (shown.end, shown.seen) = (ran.end, ran.seen);
                take(&shown, tokens);
                self.settle(&mut running, window, (ran.end, &ran.states))?;
            }
            check_tick(tick)?;
        }
        self.finish(running);
        self.keep_results(layer.index(), names);
        Ok(())
    }

    /// Runs the windows of a group, and returns their results.
    fn run_group(
        &self,
        running: &Running<'_>,
        workers: &mut [Worker],
        group: Range<usize>,
    ) -> Result<Vec<u8>, CalibrateError> {
        let pass = self.pass_of(running);
        let mut out = Writer::default();
        for first in group.clone().step_by(workers.len().max(1)) {
            let batch = first..group.end.min(first + workers.len());
            for_each(self.threads, batch.clone().zip(&mut *workers), |(window, worker)| {
                worker.run(pass, window);
            });
            for (window, worker) in batch.zip(&mut *workers) {
                worker.take_result(window)?;
                write(worker, running.through(), &mut out);
            }
        }
        Ok(out.0)
    }

    /// Computes the Hessians of `inputs` from the results of the [pass](Self::shared_pass) that has just ended.
    pub(super) fn shared_hessians(
        &mut self,
        layer: &CalibratedLayer,
        inputs: &[LinearInput],
        tick: &mut Tick<'_>,
    ) -> Result<Vec<Hessian>, CalibrateError> {
        let Some(sharing) = self.sharing.clone() else { return Ok(Vec::new()) };
        let (name, groups) = (sharing.pass(layer, inputs, false), groups(self.states.len()));
        let (threads, factors) = (self.threads, factors(self.products));
        let width = |input: usize| self.config.layer_input_width(layer.index(), inputs[input]);
        let bands: Vec<(usize, Range<usize>)> = (0..inputs.len())
            .flat_map(|input| {
                let count = if width(input) < WIDE { 1 } else { BANDS };
                Hessian::bands(width(input), count, factors).into_iter().map(move |rows| (input, rows))
            })
            .collect();
        let names: Vec<Unit> = bands
            .iter()
            .map(|(input, rows)| format!("{name}: XtX of {:?}, rows {rows:?}", inputs[*input]))
            .collect();
        let sum = |band: usize| -> Result<Hessian, CalibrateError> {
            let (input, rows) = &bands[band];
            let mut hessian = Hessian::new(width(*input))?;
            for group in &groups {
                let unit = unit(&name, group);
                let bytes = sharing.team.result(&unit)?;
                let all = bytes.and_then(|bytes| read(&bytes, group.len(), inputs.len()));
                for ran in all.ok_or(RankError::Gone(unit))? {
                    hessian.add_rows(&ran.seen[*input], rows.clone(), factors, threads);
                }
            }
            Ok(hessian)
        };
        {
            let tick = RefCell::new(&mut *tick);
            let mut compute = |band: usize| Ok(sum(band)?.rows_to_bytes(bands[band].1.clone()));
            let mut told = |_| check_tick(&mut **tick.borrow_mut());
            sharing.team.complete::<CalibrateError>(&names, &mut compute, &mut told)?;
        }
        let new = (0..inputs.len()).map(|input| Hessian::new(width(input)));
        let mut hessians: Vec<Hessian> = new.collect::<Result<_, _>>()?;
        for (band, unit) in names.iter().enumerate() {
            let (input, rows) = &bands[band];
            let found = sharing.team.result(unit)?;
            if !found.is_some_and(|bytes| hessians[*input].put_rows(rows.clone(), &bytes)) {
                let bytes = sum(band)?.rows_to_bytes(rows.clone());
                hessians[*input].put_rows(rows.clone(), &bytes);
            }
        }
        self.keep_results(layer.index(), names);
        Ok(hessians)
    }

    /// Notes the units of a layer, and removes the results of layers long past.
    fn keep_results(&mut self, layer: usize, names: Vec<Unit>) {
        let Some(sharing) = &mut self.sharing else { return };
        match sharing.kept.back_mut().filter(|(last, _)| *last == layer) {
            Some((_, units)) => units.extend(names),
            None => sharing.kept.push_back((layer, names)),
        }
        while sharing.kept.len() > KEPT_LAYERS + 1 {
            if let Some((_, units)) = sharing.kept.pop_front() {
                sharing.team.remove(&units);
            }
        }
    }
}

impl Sharing {
    /// Name of the pass through a whole layer, with the weights that it ends up with.
    fn through(&self, layer: usize) -> String {
        format!("{}: states after layer {layer}", self.role)
    }

    /// Name of a pass: what its results depend on. Where it starts from changes no bit.
    fn pass(&self, layer: &CalibratedLayer, inputs: &[LinearInput], through: bool) -> String {
        match through && inputs.is_empty() {
            true => self.through(layer.index()),
            false => {
                let (index, replaced) = (layer.index(), layer.replaced_kinds());
                format!("{}: layer {index} with {replaced:?}, {inputs:?}, {through}", self.role)
            }
        }
    }
}

/// Divides windows into groups of neighbours.
fn groups(windows: usize) -> Vec<Range<usize>> {
    ranges(windows, GROUPS)
}

fn unit(pass: &str, group: &Range<usize>) -> Unit {
    format!("{pass}: windows {group:?}")
}

fn factors(products: Products) -> Factors {
    match products {
        Products::F32 => Factors::F32,
        Products::Bf16 => Factors::Bf16,
    }
}

/// Appends the result of a window: its end, the states, and each input.
fn write(worker: &Worker, through: bool, out: &mut Writer) {
    out.byte(PLACES.iter().position(|place| *place == worker.end).unwrap_or(0) as u8);
    out.floats(if through { &worker.states } else { worker.inside() });
    worker.seen.iter().for_each(|values| out.floats(values));
}

/// Reads the results of `windows` windows with `inputs` inputs each; `None` if the bytes are not that.
fn read(bytes: &[u8], windows: usize, inputs: usize) -> Option<Vec<Ran>> {
    let mut from = Reader(bytes);
    let mut all = Vec::with_capacity(windows);
    for _ in 0..windows {
        let end = *PLACES.get(usize::from(from.byte()?))?;
        let states = from.floats()?;
        let seen = (0..inputs).map(|_| from.floats()).collect::<Option<_>>()?;
        all.push(Ran { end, states, seen });
    }
    from.0.is_empty().then_some(all)
}
