//! Experts that are stored stacked, as gpt-oss publishes them: one tensor for all experts of a layer, of which each writes its part.
//!
//! The unit of the journal is the tensor: a part of it cannot be recovered by a checksum.

use std::collections::BTreeSet;
use std::ops::ControlFlow;

use mantissa_model::{LinearInfo, ModelConfig, StoredAs};
use mantissa_num::Scheme;
use mantissa_store::convention::{Container, Stack, gpt_oss};
use mantissa_store::{Checksum, TensorSpec};

use super::{Run, work_of};
use crate::error::{QuantError, Result};
use crate::plan::{PlannedLinear, model_not_storable};
use crate::report::LayerReport;

/// The layers of one stacked tensor, in the order of its parts.
struct Stacked<'a> {
    stack: &'a Stack,
    members: Vec<(&'a LinearInfo, &'a Scheme)>,
}

/// The place of a layer among others.
pub(crate) fn stack_of(info: &LinearInfo) -> Option<&Stack> {
    match &info.stored {
        StoredAs::Stacked(stack) => Some(stack),
        _ => None,
    }
}

/// Requires a model that has experts stacked.
pub(crate) fn require(config: &ModelConfig) -> Result<()> {
    if config.decoder_linears().any(|info| stack_of(&info).is_some()) {
        return Ok(());
    }
    let why = "it holds experts stacked as in gpt-oss, and the model has none: --format compressed-tensors";
    Err(model_not_storable(Container::Mxfp4, why))
}

/// Leaves all but stacked experts as they are, of which a tensor has all or none.
pub(crate) fn keep_others(linears: &mut [PlannedLinear]) -> Result<()> {
    for linear in linears.iter_mut().filter(|linear| stack_of(&linear.info).is_none()) {
        linear.scheme = None;
    }
    require_whole(linears)
}

/// Requires of every stacked tensor that all of its experts are quantized, or none.
pub(crate) fn require_whole(linears: &[PlannedLinear]) -> Result<()> {
    let tensors = |quantized: bool| -> BTreeSet<&str> {
        let some = linears.iter().filter(move |linear| linear.scheme.is_some() == quantized);
        some.filter_map(|linear| Some(stack_of(&linear.info)?.tensor.as_str())).collect()
    };
    match tensors(true).intersection(&tensors(false)).next() {
        Some(tensor) => {
            let why = format!("{tensor}: some of its experts are quantized and others not");
            Err(model_not_storable(Container::Mxfp4, why))
        }
        None => Ok(()),
    }
}

/// The tensors of stacked layers: codes and scales of all experts.
pub(crate) fn specs(linears: &[PlannedLinear]) -> Vec<TensorSpec> {
    let first = |linear: &&PlannedLinear| {
        let of_first = stack_of(&linear.info).is_some_and(|stack| (stack.expert, stack.turn) == (0, 0));
        of_first && linear.scheme.is_some()
    };
    let tensors = linears.iter().filter(first).filter_map(|PlannedLinear { info, .. }| {
        let stack = stack_of(info)?;
        Some(gpt_oss::stacked_specs(&stack.tensor, stack.experts, stack.turns * info.rows, info.cols))
    });
    tensors.flatten().collect()
}

impl Run<'_, '_> {
    /// Quantizes every layer into its part of a stacked tensor.
    pub(super) fn quantize_stacks(&mut self) -> Result<Vec<LayerReport>> {
        let mut all: Vec<Stacked<'_>> = Vec::new();
        let plan = self.plan;
        for (info, scheme) in plan.quantized() {
            let Some(stack) = stack_of(info) else { continue };
            match all.iter_mut().rfind(|known| known.stack.tensor == stack.tensor) {
                Some(known) => known.members.push((info, scheme)),
                None => all.push(Stacked { stack, members: vec![(info, scheme)] }),
            }
        }
        let mut reports = Vec::new();
        for stacked in &all {
            match self.recovered(stacked)? {
                Some(recovered) => reports.extend(recovered),
                None => reports.extend(self.quantize_stack(stacked)?),
            }
        }
        Ok(reports)
    }

    /// The reports of a tensor that another run has written, with all of its layers'.
    fn recovered(&mut self, stacked: &Stacked<'_>) -> Result<Option<Vec<LayerReport>>> {
        if self.journal.recover(&stacked.stack.tensor, self.writer)?.is_none() {
            return Ok(None);
        }
        let mut reports = Vec::new();
        for (info, _) in &stacked.members {
            reports.extend(self.journal.recover(&info.module, self.writer)?.and_then(|unit| unit.report));
        }
        if reports.len() != stacked.members.len() {
            return Ok(None);
        }
        for (info, _) in &stacked.members {
            self.layers.recovered(info)?;
            self.advance(work_of(info), &info.module)?;
        }
        Ok(Some(reports))
    }

    fn quantize_stack(&mut self, stacked: &Stacked<'_>) -> Result<Vec<LayerReport>> {
        let Stacked { stack, members } = stacked;
        let names = gpt_oss::names(&stack.tensor);
        let (mut sums, mut total, mut reports) = ([Checksum::default(), Checksum::default()], 0, Vec::new());
        for (expert, turns) in members.chunks(stack.turns.max(1)).enumerate() {
            // Of each projection that takes turns its codes and its scales, row by row.
            let mut parts: [Vec<Vec<u8>>; 2] = [Vec::new(), Vec::new()];
            for (info, scheme) in turns {
                let (tensors, report) = self.quantized(info, scheme)?;
                for (part, (_, bytes)) in parts.iter_mut().zip(tensors) {
                    part.push(bytes);
                }
                reports.push(report);
            }
            let rows = turns.first().map_or(1, |(info, _)| info.rows);
            for ((name, sum), part) in names.iter().zip(&mut sums).zip(&parts) {
                let bytes = in_turns(part, rows);
                self.writer.write_range(name, (expert * bytes.len()) as u64, &bytes)?;
                sum.update(&bytes);
                total += bytes.len() as u64;
            }
        }
        let written = names.into_iter().zip(sums.map(|sum| sum.finish())).collect();
        self.journal.record(&stack.tensor, written, total, None, self.writer)?;
        for ((info, _), report) in members.iter().zip(&reports) {
            self.journal.record(&info.module, Vec::new(), 0, Some(report), self.writer)?;
            self.advance(work_of(info), &info.module)?;
        }
        Ok(reports)
    }

    /// A layer's codes and scales. Where `progress` ends the run, what is done is made durable first.
    fn quantized(&mut self, info: &LinearInfo, scheme: &Scheme) -> Result<crate::layers::QuantizedLayer> {
        let (done, progress) = (self.done, &mut *self.progress);
        let mut tick = || progress(super::Progress { done, tensor: &info.module, tokens: None });
        if tick() == ControlFlow::Break(()) {
            self.journal.sync(self.writer)?;
            return Err(QuantError::Interrupted);
        }
        match self.layers.quantize(info, scheme, &mut tick) {
            Err(QuantError::Interrupted) => {
                self.journal.sync(self.writer)?;
                Err(QuantError::Interrupted)
            }
            quantized => quantized,
        }
    }
}

/// The rows of several parts, taking turns.
fn in_turns(parts: &[Vec<u8>], rows: usize) -> Vec<u8> {
    let row = parts.first().map_or(0, |part| part.len() / rows.max(1));
    let mut out = Vec::with_capacity(parts.iter().map(Vec::len).sum());
    for i in 0..rows {
        parts.iter().for_each(|part| out.extend_from_slice(&part[i * row..][..row]));
    }
    out
}
