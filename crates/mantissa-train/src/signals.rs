//! What does not learn in a step: parameters without a gradient, operands without a signal, experts without tokens.
//!
//! A gradient that is 0 throughout is looked for in every step; the first value that is not 0 ends the search in a tensor, so
//! it costs nothing where a model learns. Not dead are
//! - the rows of an embedding or of learned positions that a step does not see: one row with a gradient is enough;
//! - one matrix of an adapter while the other is 0, as B is at the start: the gradient of A is a product with B;
//! - the weights of an expert that no token chose in the step;
//! - frozen parameters, which have no gradient;
//! - anything in a step whose loss is 0, as of a student that still is its teacher: nothing is to be learned.

use mantissa_model::{LinearKind, Role};

use crate::health::{LostOperand, WeightCounts};
use crate::lora::{A, B};
use crate::model::TrainModel;
use crate::param_table::ParamInfo;

/// What did not learn in a step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepSignals {
    /// Number of parameters that train.
    pub parameters: usize,
    /// Parameters whose gradient is 0 throughout, in the order of the backward.
    pub dead: Vec<String>,
    /// Operands that lost their signal when they were rounded, in the order of the step: quantized ones that became 0, and in
    /// a step with telemetry all others.
    pub lost: Vec<LostOperand>,
    /// True in a step with telemetry.
    pub measured: bool,
    /// Matrices whose updates changed next to no weight; `None` in a step that did not look for them.
    pub lost_updates: Option<LostUpdates>,
    /// Layers with experts, each with those that no token chose.
    pub idle: Vec<(usize, Vec<usize>)>,
}

/// Matrices whose updates changed next to no weight, by cause.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LostUpdates {
    /// Those whose updates are lost when the weights are rounded without a master copy.
    pub rounded: Vec<String>,
    /// Those with a gradient whose updates are all 0 before the weights are rounded.
    pub zero: Vec<String>,
}

impl TrainModel {
    /// Looks at the gradients, operands and routing of a step with this `loss` before its update.
    pub(crate) fn signals(&self, loss: f64) -> StepSignals {
        let trained = || self.params.table().iter().filter(|param| self.grads.holds(&param.range));
        let dead = trained().filter(|param| loss != 0.0 && self.is_dead(param));
        let mut dead: Vec<String> = dead.map(|param| param.tensor.name.clone()).collect();
        dead.reverse();
        let idle = self.routed.iter().enumerate().filter(|(_, tokens)| !tokens.is_empty());
        let idle = idle.map(|(layer, tokens)| {
            (layer, (0..tokens.len()).filter(|&expert| tokens[expert] == 0).collect())
        });
        StepSignals {
            parameters: trained().count(),
            dead,
            lost: self.lost_operands(),
            measured: false,
            lost_updates: None,
            idle: idle.collect(),
        }
    }

    /// Lists the matrices next to none of whose updates, counted in `counts`, changed a weight: they are lost when the weights are
    /// `rounded` without a master copy, or 0 in spite of a gradient. `rates` are the factors of the learning rate. Vectors are left
    /// out: norm weights near 1 in bf16 take no step below 0.002.
    pub(crate) fn lost_updates(&self, counts: &[WeightCounts], rates: &[f64], rounded: bool) -> LostUpdates {
        let mut lost = LostUpdates::default();
        for ((param, counts), rate) in self.params.table().iter().zip(counts).zip(rates) {
            if param.tensor.shape.len() < 2 || *rate <= 0.0 {
                continue;
            }
            let has_gradient = || self.grads.holds(&param.range) && !self.has_zero_gradient(param);
            if rounded && counts.loses_updates() {
                lost.rounded.push(param.tensor.name.clone());
            } else if counts.is_still() && has_gradient() {
                lost.zero.push(param.tensor.name.clone());
            }
        }
        lost
    }

    /// Notes an operand that lost its signal on another rank.
    pub(crate) fn note_lost(&self, place: &[u64; 4]) {
        let of_layers = self.layers.iter().flat_map(|layer| layer.linears().map(|(kind, _)| kind));
        self.lost.note_place(*place, of_layers.chain(LinearKind::PLAIN));
    }

    /// Lists the operands that lost their signal so far in the step.
    pub(crate) fn lost_operands(&self) -> Vec<LostOperand> {
        self.lost.operands(&self.options.policy, &self.config)
    }

    /// True if the gradient of a parameter that trains is 0 throughout, and should not be.
    fn is_dead(&self, param: &ParamInfo) -> bool {
        self.has_zero_gradient(param)
            && !self.is_of_idle_expert(param)
            && !self.waits_for_partner(&param.tensor.name)
    }

    /// True if the gradient of a parameter that trains is 0 throughout, also where other ranks hold its sum.
    fn has_zero_gradient(&self, param: &ParamInfo) -> bool {
        match &self.with_gradient {
            Some(places) => !places.contains(&param.range.start),
            None => self.grads.get(param.range.clone()).is_zero(),
        }
    }

    /// True if the parameter belongs to an expert that no token chose.
    fn is_of_idle_expert(&self, param: &ParamInfo) -> bool {
        let (Role::Linear { layer, kind } | Role::Bias { layer, kind }) = param.tensor.role else {
            return false;
        };
        let tokens = kind.expert().and_then(|expert| self.routed.get(layer)?.get(usize::from(expert)));
        tokens == Some(&0)
    }

    /// True if the parameter is a matrix of an adapter whose other matrix is 0.
    fn waits_for_partner(&self, name: &str) -> bool {
        let partner = [(A, B), (B, A)].into_iter().find_map(|(own, other)| {
            let place = name.strip_suffix(own)?;
            self.params.place(&format!("{place}{other}"))
        });
        partner.is_some_and(|partner| self.params.get(partner).is_zero())
    }
}
