//! Matmul operands that an autopsy switches between f32 and the run's format.

use std::collections::BTreeSet;

use mantissa_model::{LinearKind, ModelConfig};

use crate::health::Operator;
use crate::model::TrainModel;
use crate::policy::{Gemm, Side};
use crate::policy::{GemmPolicy, LinearPolicy, OperandPolicy};
use crate::store::Precision;

/// Operand of one matmul. An input that several linear layers read is one operand, named after the first of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Site {
    pub(crate) gemm: Gemm,
    pub(crate) side: Side,
    /// Decoder layer; `None` for the head.
    pub(crate) layer: Option<usize>,
    pub(crate) kind: LinearKind,
}

impl Gemm {
    /// All matmuls of a linear layer, in the order of a step.
    pub(crate) const ALL: [Gemm; 3] = [Gemm::Fprop, Gemm::Dgrad, Gemm::Wgrad];

    /// Name in settings.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Gemm::Fprop => "fprop",
            Gemm::Dgrad => "dgrad",
            Gemm::Wgrad => "wgrad",
        }
    }

    /// Returns the operands of this matmul in a policy.
    pub(crate) fn of(self, policy: &LinearPolicy) -> &GemmPolicy {
        match self {
            Gemm::Fprop => &policy.fprop,
            Gemm::Dgrad => &policy.dgrad,
            Gemm::Wgrad => &policy.wgrad,
        }
    }

    /// Returns the operands of this matmul in a policy, for writing.
    pub(crate) fn of_mut(self, policy: &mut LinearPolicy) -> &mut GemmPolicy {
        match self {
            Gemm::Fprop => &mut policy.fprop,
            Gemm::Dgrad => &mut policy.dgrad,
            Gemm::Wgrad => &mut policy.wgrad,
        }
    }
}

impl Side {
    /// Both operands.
    pub(crate) const ALL: [Side; 2] = [Side::Left, Side::Right];

    /// Returns the operand of a matmul.
    pub(crate) fn of(self, gemm: &GemmPolicy) -> &OperandPolicy {
        match self {
            Side::Left => &gemm.left,
            Side::Right => &gemm.right,
        }
    }

    /// Returns the operand of a matmul, for writing.
    pub(crate) fn of_mut(self, gemm: &mut GemmPolicy) -> &mut OperandPolicy {
        match self {
            Side::Left => &mut gemm.left,
            Side::Right => &mut gemm.right,
        }
    }
}

/// Name of an operand in settings: `x`, `w` or `dy`.
pub(crate) fn operand(gemm: Gemm, side: Side) -> &'static str {
    match (gemm, side) {
        (Gemm::Fprop, Side::Left) | (Gemm::Wgrad, Side::Right) => "x",
        (Gemm::Fprop | Gemm::Dgrad, Side::Right) => "w",
        (Gemm::Dgrad | Gemm::Wgrad, Side::Left) => "dy",
    }
}

impl Site {
    /// Lists the operands of a model that its policy rounds, class by class, the head last.
    pub(crate) fn all(model: &TrainModel) -> Vec<Site> {
        let mut all = Vec::new();
        let classes = Gemm::ALL.into_iter().flat_map(|gemm| Side::ALL.map(|side| (gemm, side)));
        for (gemm, side) in classes.clone() {
            for layer in &model.layers {
                if is_exact(side.of(gemm.of(&layer.policy))) {
                    continue;
                }
                let mut inputs = BTreeSet::new();
                for (kind, _) in layer.linears() {
                    // Readers of an input share its rounded form.
                    if operand(gemm, side) != "x" || inputs.insert(kind.input()) {
                        all.push(Site { gemm, side, layer: Some(layer.index), kind });
                    }
                }
            }
        }
        let head = &model.options.policy.head;
        let head_sites = classes.filter(|(gemm, side)| !is_exact(side.of(gemm.of(head))));
        all.extend(head_sites.map(|(gemm, side)| Site { gemm, side, layer: None, kind: LinearKind::Head }));
        all
    }

    /// Name of the operand in settings, such as `fprop.x`.
    pub(crate) fn class(self) -> String {
        format!("{}.{}", self.gemm.name(), operand(self.gemm, self.side))
    }

    /// Module name of the linear layer in the model's checkpoint.
    pub(crate) fn linear(self, config: &ModelConfig) -> String {
        self.layer.map_or(Operator::Head, |layer| Operator::Linear(layer, self.kind)).module(config)
    }

    /// True if the matmul of linear layer `kind` of the same decoder layer reads this operand.
    pub(crate) fn is_read_by(self, kind: LinearKind) -> bool {
        match operand(self.gemm, self.side) {
            "x" if self.layer.is_some() => kind.input() == self.kind.input(),
            _ => kind == self.kind,
        }
    }

    /// Name of the tensor that is rounded.
    pub(crate) fn tensor(self, config: &ModelConfig) -> String {
        let linear = self.linear(config);
        match operand(self.gemm, self.side) {
            "w" => format!("{linear}.weight"),
            "x" => format!("input of {linear}"),
            _ => format!("gradient of the output of {linear}"),
        }
    }

    /// Position in the order of a step: the forward from the first layer on, then the backward from the last one on.
    pub(crate) fn order(self, layers: usize) -> (bool, usize, LinearKind) {
        let layer = self.layer.unwrap_or(layers);
        match self.gemm {
            Gemm::Fprop => (false, layer, self.kind),
            _ => (true, layers - layer, self.kind),
        }
    }

    /// Returns the operand's policy in a model.
    pub(crate) fn policy(self, model: &TrainModel) -> &OperandPolicy {
        let linear = match self.layer {
            Some(layer) => &*model.layers[layer].policy,
            None => &model.options.policy.head,
        };
        self.side.of(self.gemm.of(linear))
    }
}

/// True for an operand that stays as it is.
fn is_exact(operand: &OperandPolicy) -> bool {
    Precision::of(&operand.scheme.format) == Some(Precision::F32)
}
