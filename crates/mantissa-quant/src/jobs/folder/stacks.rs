//! Stacked experts as gpt-oss stores them: one tensor for all experts of a layer.
//!
//! The unit of the journal is the whole tensor, because a checksum covers no part of it.

use std::ops::ControlFlow;

use mantissa_model::LinearInfo;
use mantissa_num::Scheme;
use mantissa_store::Checksum;
use mantissa_store::convention::{Stack, gpt_oss};

use super::Run;
use crate::error::{QuantError, Result};
use crate::layers::QuantizedLayer;
use crate::plan::work_of;
use crate::progress::{Progress, RESUMED};
use crate::report::LayerReport;
use crate::stacks::stack_of;

/// Layers of one stacked tensor, in the order of its parts.
struct Stacked<'a> {
    stack: &'a Stack,
    members: Vec<(&'a LinearInfo, &'a Scheme)>,
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

    /// Returns the reports of a tensor that an earlier run wrote, if it wrote the reports of all its layers.
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
            self.advance(work_of(info), RESUMED)?;
        }
        Ok(Some(reports))
    }

    fn quantize_stack(&mut self, stacked: &Stacked<'_>) -> Result<Vec<LayerReport>> {
        let Stacked { stack, members } = stacked;
        let names = gpt_oss::names(&stack.tensor);
        let (mut sums, mut total, mut reports) = ([Checksum::default(), Checksum::default()], 0, Vec::new());
        for (expert, turns) in members.chunks(stack.turns.max(1)).enumerate() {
            // Codes and scales of each interleaved projection, row by row.
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
                let bytes = interleaved(part, rows);
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

    /// Quantizes a layer into its codes and scales.
    fn quantized(&mut self, info: &LinearInfo, scheme: &Scheme) -> Result<QuantizedLayer> {
        let (done, progress) = (self.done, &mut *self.progress);
        let mut tick = || progress(Progress { done, tensor: &info.module, tokens: None, items: None });
        let quantized = match tick() {
            ControlFlow::Break(()) => Err(QuantError::Interrupted),
            ControlFlow::Continue(()) => self.layers.quantize(info, scheme, &mut tick),
        };
        self.sync_if_interrupted(quantized)
    }
}

/// Interleaves the rows of several parts.
fn interleaved(parts: &[Vec<u8>], rows: usize) -> Vec<u8> {
    let row = parts.first().map_or(0, |part| part.len() / rows.max(1));
    let mut out = Vec::with_capacity(parts.iter().map(Vec::len).sum());
    for i in 0..rows {
        parts.iter().for_each(|part| out.extend_from_slice(&part[i * row..][..row]));
    }
    out
}
