//! Layers that several workers solve. Every worker goes through the same plan in the same order. Layers that do not wait
//! for each other - all of them without a calibration, those that read one input with it - are units: each is solved by
//! one worker, and taken from the folder by the others, as a resumed run takes it from its output.

use std::cell::RefCell;

use mantissa_methods::Solved;
use mantissa_methods::method::Work;
use mantissa_model::LinearInfo;
use mantissa_num::Scheme;
use mantissa_ranks::RankError;

use super::Layers;
use crate::calibrate::{Tick, check_tick};
use crate::error::{QuantError, Result};
use crate::solved_bytes;
use crate::units::{solution, unit_of};

/// A piece of work that one worker does.
struct LayerUnit<'a> {
    name: String,
    /// Layers that it solves: one, or all of a decoder layer that are learned together.
    layers: Vec<(&'a LinearInfo, &'a Scheme)>,
}

impl<'a> Layers<'a> {
    /// Solves a layer, or takes the solution of another worker.
    pub(super) fn solved(
        &mut self,
        info: &LinearInfo,
        scheme: &Scheme,
        tick: &mut Tick<'_>,
    ) -> Result<Solved> {
        let plan = self.plan;
        if !plan.options.team.is_shared() {
            return self.solved_here(info, scheme, tick);
        }
        if !self.completed.contains(&unit_of(plan, info)) {
            let units = self.units_with(info);
            if !units.iter().any(|unit| unit.solves(info)) {
                return self.solved_here(info, scheme, tick);
            }
            self.complete(&units, tick)?;
        }
        let Some(solved) = solution(plan, info)? else {
            // Damaged since, or in a format that is not exchanged.
            for unit in self.units_with(info).iter().filter(|unit| unit.solves(info)) {
                let bytes = self.solve_unit(unit, tick)?;
                plan.options.team.replace(&unit.name, bytes)?;
            }
            return match solution(plan, info)? {
                Some(solved) => Ok(solved),
                None => self.solved_here(info, scheme, tick),
            };
        };
        if let Some(sequential) = &mut self.sequential {
            sequential.given(info, &solved)?;
        }
        Ok(solved)
    }

    /// Solves layers of the plan that no other worker solves, until all are solved.
    ///
    /// # Errors
    /// As [`quantize`](Layers::quantize).
    pub(crate) fn take_part(&mut self, tick: &mut Tick<'_>) -> Result<()> {
        if self.sequential.is_some() && self.plan.options.team.is_partial() {
            return Err(RankError::DependentUnits.into());
        }
        for (info, scheme) in self.plan.quantized() {
            if self.sequential.is_some() {
                self.solved(info, scheme, tick)?;
            } else if !self.completed.contains(&unit_of(self.plan, info)) {
                self.complete(&self.units_with(info), tick)?;
            }
        }
        Ok(())
    }

    /// Works on `units`, which do not wait for each other, until all have a result.
    fn complete(&mut self, units: &[LayerUnit<'_>], tick: &mut Tick<'_>) -> Result<()> {
        let team = &self.plan.options.team;
        let names: Vec<String> = units.iter().map(|unit| unit.name.clone()).collect();
        let finished = names.iter().all(|name| team.has(name));
        if !finished {
            self.prepare(units, tick)?;
        }
        let tick = RefCell::new(tick);
        let mut compute = |unit: usize| self.solve_unit(&units[unit], &mut **tick.borrow_mut());
        let mut told = |_| Ok::<_, QuantError>(check_tick(&mut **tick.borrow_mut())?);
        team.complete(&names, &mut compute, &mut told)?;
        self.completed.extend(names);
        Ok(())
    }

    /// Calibrates what the solutions of `units` need. Every worker does, before one takes a unit: they divide the passes.
    fn prepare(&mut self, units: &[LayerUnit<'_>], tick: &mut Tick<'_>) -> Result<()> {
        if self.sequential.is_none() {
            return Ok(());
        }
        self.quantize_inputs(tick)?;
        let plan = self.plan;
        let work = |info: &LinearInfo| plan.work_on(info).unwrap_or(Work::Nearest);
        let layers = || units.iter().flat_map(|unit| &unit.layers).map(|(info, _)| *info);
        let Some(sequential) = &mut self.sequential else { return Ok(()) };
        match layers().find(|info| !matches!(work(info), Work::Nearest)) {
            Some(info) => sequential.begin(info, matches!(work(info), Work::Layer(_)), tick),
            // A weight that is rounded to nearest is put in place for the layers behind it.
            None => layers().try_for_each(|info| match plan.solves_after(info) {
                true => sequential.begin(info, true, tick),
                false => Ok(()),
            }),
        }
    }

    /// Solves the layers of a unit; without bytes if their format is not exchanged.
    fn solve_unit(&mut self, unit: &LayerUnit<'_>, tick: &mut Tick<'_>) -> Result<Vec<u8>> {
        let mut solved = Vec::with_capacity(unit.layers.len());
        for (info, scheme) in &unit.layers {
            solved.push(self.solved_here(info, scheme, tick)?);
        }
        let solutions = unit.layers.iter().zip(&solved);
        let solutions = solutions.map(|((info, scheme), solved)| (&*info.module, *scheme, solved));
        Ok(solved_bytes::to_bytes(solutions).unwrap_or_default())
    }

    /// Returns the units that can be solved together with the layer `info`, in the order of the plan; none if it is not
    /// among the plan's layers, as an embedding.
    fn units_with(&self, info: &LinearInfo) -> Vec<LayerUnit<'a>> {
        let plan = self.plan;
        let learned = |info: &LinearInfo| matches!(plan.work_on(info), Some(Work::Layer(_)));
        let with: Vec<(&LinearInfo, &Scheme)> = match &self.sequential {
            None => plan.quantized().collect(),
            Some(_) if learned(info) => {
                plan.quantized().filter(|(one, _)| one.layer == info.layer && learned(one)).collect()
            }
            Some(sequential) => {
                let inputs = sequential.together(info.layer, info.kind.input());
                let is = |one: &LinearInfo| {
                    one.layer == info.layer && !learned(one) && inputs.contains(&one.kind.input())
                };
                plan.quantized().filter(|(one, _)| is(one)).collect()
            }
        };
        let mut units: Vec<LayerUnit<'a>> = Vec::new();
        for (info, scheme) in with {
            let name = unit_of(plan, info);
            match units.last_mut().filter(|last| last.name == name) {
                Some(last) => last.layers.push((info, scheme)),
                None => units.push(LayerUnit { name, layers: vec![(info, scheme)] }),
            }
        }
        units
    }
}

impl LayerUnit<'_> {
    fn solves(&self, info: &LinearInfo) -> bool {
        self.layers.iter().any(|(one, _)| one.module == info.module)
    }
}
