//! Faults that the weights themselves show, where they cost too little for the loss to decide alone.

use mantissa_store::convention::Weight;

use super::super::Alternative;
use super::super::Fault;
use super::super::change::LayerWeights;
use super::super::means::{Mean, are_even};
use super::super::score::{PART_ERRORS, Score};
use super::super::signs::Lean;
use super::{Result, Trial, Trying};
use crate::run::States;

/// Standard errors by which the loss must fall where the weights themselves show a fault.
const HALF_ERRORS: f64 = PART_ERRORS / 2.0;

impl Trying<'_> {
    /// Joins the fault `found` by the loss with the layers whose gate and up are `swapped` by their signs, and the tensors
    /// whose zero points are `shifted`. Another fault found by the loss costs more, and stands.
    pub(super) fn joined(
        &mut self,
        found: Option<Fault>,
        mut swapped: Vec<usize>,
        mut shifted: Vec<(Trial, Fault)>,
    ) -> Result<Option<Fault>> {
        let swaps = Alternative::GateUpSwapped;
        match &found {
            Some(fault) if fault.alternative != Some(swaps.entry().name) => return Ok(found),
            Some(fault) => swapped.extend(&fault.layers),
            None => {}
        }
        swapped.sort_unstable();
        swapped.dedup();
        if let Some(&first) = swapped.first() {
            return Ok(Some(Fault::of(swaps, self.first_changed(swaps, first)?, swapped)));
        }
        let Some((trial, mut fault)) = shifted.pop().filter(|_| are_even(&self.means)) else {
            return Ok(None);
        };
        for (_, other) in
            shifted.into_iter().rev().filter(|(_, other)| other.alternative == fault.alternative)
        {
            fault.layers.extend(other.layers);
            fault.tensor = other.tensor;
        }
        fault.layers.sort_unstable();
        fault.layers.dedup();
        self.trials.push(trial);
        Ok(Some(fault))
    }

    /// True if gate and up of layer `number` are swapped by their signs; keeps their leans.
    pub(super) fn by_signs(
        &mut self,
        number: usize,
        stored: &LayerWeights,
        states: &States,
        base: &Score,
    ) -> Result<bool> {
        let lean = Lean::of(&self.layers[number], &self.config, states)?;
        self.signs.extend(lean);
        let Some(lean) = lean.filter(Lean::is_suspect) else { return Ok(false) };
        let part: Vec<usize> = (0..stored.len()).collect();
        let altered = self.altered_part(Alternative::GateUpSwapped, &self.layers[number], stored, &part)?;
        let Some((altered, _)) = altered else { return Ok(false) };
        let gain = self.scored(number, &altered, states)?.map(|score| base.gain(&score));
        Ok(lean.is_swapped() || gain.is_some_and(|gain| gain.is_less(HALF_ERRORS)))
    }

    /// Returns tensors of layer `number` whose zero points are off by the mean of their weights, and whose repair does not
    /// raise the loss; keeps the means.
    pub(super) fn by_means(
        &mut self,
        number: usize,
        stored: &LayerWeights,
        states: &States,
        base: &Score,
    ) -> Result<Vec<(Trial, Fault)>> {
        let mut found = Vec::new();
        for (at, (info, weight)) in stored.iter().enumerate() {
            let Weight::Quantized(q) = &weight.weight else { continue };
            let tensor = format!("{}.weight", info.module);
            let Some(mean) = Mean::of(tensor.clone(), q) else { continue };
            let repair = mean.repair();
            self.means.push(mean);
            let Some(alternative) = repair else { continue };
            let altered = self.altered_part(alternative, &self.layers[number], stored, &[at])?;
            let Some((altered, tensors)) = altered else { continue };
            let score = self.scored(number, &altered, states)?;
            if score.as_ref().is_some_and(|score| base.gain(score).is_less(0.0)) {
                let trial = self.trial(alternative, info.module.clone(), tensors, score);
                found.push((trial, Fault::of(alternative, tensor, vec![number])));
            }
        }
        Ok(found)
    }
}
