//! Method of each layer of a plan.

use mantissa_methods::Method;
use mantissa_methods::method::{Buffer, Extent, Fisher, Needs, Phase, Work};
use mantissa_model::{LinearInfo, LinearInput};
use serde::Serialize;

use super::Plan;
use super::mixed::MethodId;

/// Layers of a plan under one of several methods.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MethodShare {
    /// Method, as recipes name it.
    pub method: &'static str,
    /// Number of layers.
    pub layers: usize,
    /// Number of their weights.
    pub parameters: u64,
}

impl Plan {
    /// Returns the share of each method, the recipe's first; empty if there is one method.
    pub fn method_shares(&self) -> Vec<MethodShare> {
        let ids = if self.methods.of.is_empty() { 0..0 } else { 0..self.methods.others.len() + 1 };
        let share = |id: MethodId| {
            let method = self.method_numbered(id)?.recipe_name();
            let own = || self.quantized().map(|(info, _)| info).filter(|info| self.method_id(info) == id);
            let parameters = own().map(|info| (info.rows * info.cols) as u64).sum();
            Some(MethodShare { method, layers: own().count(), parameters })
        };
        ids.filter_map(share).filter(|share| share.layers > 0).collect()
    }

    /// Returns the number of the method of a layer.
    pub(crate) fn method_id(&self, info: &LinearInfo) -> MethodId {
        self.methods.of.get(&info.module).map_or(0, |at| at + 1)
    }

    /// Returns the method of a layer; `None` without a recipe.
    pub fn method_of(&self, info: &LinearInfo) -> Option<&dyn Method> {
        self.method_numbered(self.method_id(info))
    }

    /// Returns the method of this number; `None` without a recipe.
    pub(crate) fn method_numbered(&self, id: MethodId) -> Option<&dyn Method> {
        match id.checked_sub(1) {
            Some(at) => self.methods.others.get(at).map(|method| &**method),
            None => self.job.recipe().map(|recipe| &*recipe.method),
        }
    }

    /// Returns the unit of work of the method of a layer.
    pub(crate) fn work_on(&self, info: &LinearInfo) -> Option<Work<'_>> {
        self.method_of(info).map(Method::work)
    }

    /// Returns the statistics and passes that the method of a layer needs; none without a recipe.
    pub fn needs_of(&self, info: &LinearInfo) -> Needs {
        self.method_of(info).map_or_else(Needs::default, Method::needs)
    }

    /// True if the method of a layer asks for the Fisher information of its outputs, and the model has it.
    pub(crate) fn weighs_outputs_of(&self, info: &LinearInfo) -> bool {
        self.needs_of(info).fisher == Some(Fisher::Outputs) && self.weighs_outputs()
    }

    /// Returns the buffers of `phase` of the method of a layer.
    pub(crate) fn buffers(&self, info: &LinearInfo, phase: Phase, extent: &Extent<'_>) -> Vec<Buffer> {
        self.method_of(info).map_or_else(Vec::new, |method| method.buffers(phase, extent))
    }

    /// Iterates over the layers that read `input` of decoder layer `layer` and are not only rounded to nearest.
    pub(crate) fn solved_on(&self, layer: usize, input: LinearInput) -> impl Iterator<Item = &LinearInfo> {
        let reads_input = move |info: &&LinearInfo| info.layer == layer && info.kind.input() == input;
        self.quantized().map(|(info, _)| info).filter(reads_input).filter(|info| self.solves(info))
    }

    /// True if a layer after `info`, in the order of the plan, is not only rounded to nearest.
    pub(crate) fn solves_after(&self, info: &LinearInfo) -> bool {
        let later = self.quantized().map(|(other, _)| other).skip_while(|other| other.module != info.module);
        later.skip(1).any(|other| self.solves(other))
    }

    /// True if a layer is not only rounded to nearest.
    pub(crate) fn solves(&self, info: &LinearInfo) -> bool {
        !matches!(self.work_on(info), Some(Work::Nearest))
    }
}
