//! The memory of a layer that is solved on a calibration: statistics of its input, their factor, and the solution.

use mantissa_model::{LinearInfo, LinearInput};
use mantissa_num::Scheme;

use super::{Sizes, Stage, judging_bytes, kept, states, turned, with_holes_of_calibration};
use crate::calibrate::{Calibration, CalibrationSet};
use crate::gptq::{self, Drift, Hessian};
use crate::plan::Plan;
use crate::qtip;
use crate::recipe::Method;
use crate::sequential::{EXPERTS_AT_ONCE, makes_up, outputs_bytes, reads_last};

/// What the stages of one layer have in common. Sizes in bytes where nothing else is said.
pub(super) struct Solving<'a> {
    plan: &'a Plan,
    set: &'a CalibrationSet,
    info: &'a LinearInfo,
    scheme: &'a Scheme,
    sizes: Sizes,
    /// Held in all of them.
    base: [(&'static str, u64); 6],
    /// Of the original model.
    original: Beside,
    /// Inputs whose statistics are collected in one pass: of experts several.
    at_once: u64,
    /// Of all of these inputs.
    hessian: u64,
    /// The same of the windows that are held out, of which there are moments as well.
    unseen: u64,
    /// What QTIP turns its statistics in.
    rotated: u64,
    /// Moments by which a solution is judged, and what that takes.
    judging: [u64; 2],
}

impl<'a> Solving<'a> {
    pub(super) fn of(
        plan: &'a Plan,
        set: &'a CalibrationSet,
        info: &'a LinearInfo,
        scheme: &'a Scheme,
    ) -> Self {
        let of_layer = plan.config.layer_linears(info.layer).into_iter();
        let layer: u64 = of_layer.map(|l| (l.rows * l.cols) as u64 * 4).sum();
        let original = Beside::of(plan, set, info);
        let base = [
            ("states of the calibration", states(plan, set)),
            ("states inside the layer", kept(plan, set)),
            ("layer in f32", layer),
            ("states in the original model, and inside its layer", original.states),
            ("layer of the original model in f32", original.layer),
            ("second moments of gradients", outputs_bytes(plan)),
        ];
        let at_once = match (info.kind.input(), &plan.config.experts) {
            (LinearInput::Expert(_) | LinearInput::ExpertDown(_), Some(experts)) => {
                EXPERTS_AT_ONCE.min(experts.count.into()) as u64
            }
            _ => 1,
        };
        let hessian = at_once * Hessian::bytes_needed(info.cols);
        let sizes = Sizes::of(plan, info, scheme);
        let qtip = plan.recipe.method == Method::Qtip;
        // There is no rounding to nearest of a trellis.
        let judging = if qtip { [0, 0] } else { [hessian, judging_bytes(info, &sizes)] };
        let unseen = if plan.options.held_out.is_empty() { 0 } else { hessian };
        let rotated = if qtip { 2 * hessian } else { 0 };
        Solving { plan, set, info, scheme, sizes, base, original, at_once, hessian, unseen, rotated, judging }
    }

    /// The stages in their order.
    pub(super) fn stages(&self) -> [Stage; 4] {
        [self.statistics(), self.factor(), self.correction(), self.solution()]
    }

    /// The pass that collects the statistics.
    pub(super) fn statistics(&self) -> Stage {
        let (config, threads, input) = (&self.plan.config, self.plan.options.threads, self.info.kind.input());
        let statistics = self.at_once * Calibration::statistics_bytes(config, self.set, input, threads);
        self.stage(
            "statistics for",
            &[
                ("buffers of the calibration", Calibration::pass_bytes(config, self.set, threads)),
                ("Hessian and inputs of a window per thread", statistics),
                ("factors as bf16", super::factors(self.plan, self.set)),
                ("Hessian of held-out windows", self.unseen),
                ("drift from the original model", self.original.statistics),
            ],
        )
    }

    /// Their factor.
    fn factor(&self) -> Stage {
        let others = self.factor_bytes() - self.square();
        self.stage(
            "factor for",
            &[
                ("Hessian", self.hessian + self.unseen + self.rotated),
                ("drift", self.original.drift),
                ("factor and its scratch", gptq::factor_bytes(self.info.cols) + others),
            ],
        )
    }

    /// The weight that makes up for what its input has become.
    fn correction(&self) -> Stage {
        let weight = 2 * 4 * self.weights();
        self.stage(
            "correct",
            &[
                ("factor and moments", self.factor_bytes() + self.judging[0]),
                ("drift", self.original.drift),
                ("weight as it is read, in f32 and corrected", weight + self.original.correction),
            ],
        )
    }

    /// The codes.
    fn solution(&self) -> Stage {
        let Solving { plan, info, sizes, original, .. } = self;
        let threads = plan.options.threads;
        let solve = match self.scheme.format.trellis().and_then(|trellis| trellis.whole_bits()) {
            Some(bits) => {
                ("values and paths at work", qtip::solve_bytes(bits, info.rows, info.cols, threads))
            }
            None => ("codes and rows at work", gptq::solve_bytes(info.rows, info.cols, threads)),
        };
        self.stage(
            "solve",
            &[
                ("factor", self.factor_bytes() + self.rotated / 2),
                ("drift", if reads_last(plan, info) { 0 } else { original.drift }),
                ("corrected weight", original.corrected),
                ("moments by which it is judged", self.judging[0]),
                ("rounded to nearest, and errors", self.judging[1]),
                ("weight as it is read and in f32", 2 * 4 * self.weights()),
                solve,
                ("gains and marks of outliers", outliers(plan, info)),
                ("scales", sizes.scales),
                ("packed tensors", sizes.stored),
                ("words as they are turned", turned(plan, sizes)),
            ],
        )
    }

    fn weights(&self) -> u64 {
        (self.info.rows * self.info.cols) as u64
    }

    /// A matrix of f64 over the columns.
    fn square(&self) -> u64 {
        let cols = self.info.cols as u64;
        8 * cols * cols
    }

    fn factor_bytes(&self) -> u64 {
        self.at_once * self.square()
    }

    fn stage(&self, what: &str, more: &[(&'static str, u64)]) -> Stage {
        let buffers = self.base.iter().chain(more).copied().collect();
        with_holes_of_calibration(format!("{what} {}", self.info.module), buffers)
    }
}

/// What is known of each weight as outliers are chosen: gains, the largest of them, marks, and residuals; these of the rounded weight too.
fn outliers(plan: &Plan, info: &LinearInfo) -> u64 {
    let weights = (info.rows * info.cols) as u64;
    let count = plan.recipe.outliers(info.rows, info.cols) as u64;
    if count > 0 { (4 + 4 + 4 + 1 + 1) * weights + 3 * 10 * count } else { 0 }
}

/// What GPTAQ holds of the original model beside the one that is made; nothing where weights do not make up for anything.
#[derive(Default)]
struct Beside {
    states: u64,
    layer: u64,
    /// Of a pass, beside that of the model that is made.
    statistics: u64,
    drift: u64,
    /// While a weight is corrected.
    correction: u64,
    corrected: u64,
}

impl Beside {
    fn of(plan: &Plan, set: &CalibrationSet, info: &LinearInfo) -> Self {
        let (config, threads, input) = (&plan.config, plan.options.threads, info.kind.input());
        if !makes_up(plan, input) {
            return Beside::default();
        }
        Beside {
            states: Calibration::state_bytes(config, set) + Calibration::kept_bytes(config, set),
            layer: config.layer_linears(info.layer).iter().map(|l| 4 * (l.rows * l.cols) as u64).sum(),
            statistics: Calibration::beside_bytes(config, set, input, threads),
            drift: Drift::bytes_needed(info.cols),
            correction: gptq::correction_bytes(info.rows, info.cols, threads),
            corrected: 4 * (info.rows * info.cols) as u64,
        }
    }
}
