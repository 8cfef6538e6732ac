//! Memory of a layer that is solved on a calibration set: statistics of its input, their factor, and the solution.

use mantissa_methods::method::{Buffer, Extent, Phase};
use mantissa_model::{LinearInfo, LinearInput, ModelConfig};
use mantissa_num::Scheme;

use super::stage::{Sizes, Stage, factors, kept, states, transposed, with_holes_of_calibration};
use crate::calibrate::{Calibration, CalibrationSet};
use crate::gptq::Hessian;
use crate::plan::Plan;
use crate::sequential::{EXPERTS_AT_ONCE, outputs_bytes, uses_drift};

/// Sizes shared by the stages of one layer, in bytes.
pub(super) struct Solving<'a> {
    plan: &'a Plan,
    set: &'a CalibrationSet,
    info: &'a LinearInfo,
    sizes: Sizes,
    /// Buffers held in all stages.
    base: [(&'static str, u64); 6],
    /// Memory of the unquantized model, for methods that need the drift.
    original: Original,
    /// Size of the problem; `inputs` is the number of inputs whose statistics are collected in one pass (several for
    /// experts).
    extent: Extent<'a>,
    /// Hessians of held-out windows.
    unseen: u64,
}

impl<'a> Solving<'a> {
    pub(super) fn of(
        plan: &'a Plan,
        set: &'a CalibrationSet,
        info: &'a LinearInfo,
        scheme: &'a Scheme,
    ) -> Self {
        let layer_linears = plan.config.layer_linears(info.layer).into_iter();
        let layer: u64 = layer_linears.map(|l| (l.rows * l.cols) as u64 * 4).sum();
        let original = Original::of(plan, set, info);
        let base = [
            ("states of the calibration", states(plan, set)),
            ("states inside the layer", kept(plan, set)),
            ("layer in f32", layer),
            ("states of the original model", original.states),
            ("layer of the original model in f32", original.layer),
            ("output factors of the Fisher information", outputs_bytes(plan)),
        ];
        let sizes = Sizes::of(plan, info, scheme);
        let inputs = inputs_at_once(&plan.config, info);
        let extent = Extent { inputs, ..sizes.extent(plan, info, scheme) };
        let unseen = if extent.held_out { extent.inputs * Hessian::bytes_needed(info.cols) } else { 0 };
        Solving { plan, set, info, sizes, base, original, extent, unseen }
    }

    /// Returns the stages in order.
    pub(super) fn stages(&self) -> [Stage; 4] {
        [self.statistics(), self.factor(), self.correction(), self.solution()]
    }

    /// Memory of the pass that collects statistics.
    pub(super) fn statistics(&self) -> Stage {
        let (config, threads, input) = (&self.plan.config, self.plan.options.threads, self.info.kind.input());
        let statistics = self.extent.inputs * Calibration::statistics_bytes(config, self.set, input, threads);
        self.stage(
            "statistics for",
            &[
                ("buffers of the calibration", Calibration::pass_bytes(config, self.set, threads)),
                ("Hessian and inputs of a window per thread", statistics),
                ("bf16 operands", factors(self.plan, self.set)),
                ("Hessian of held-out windows", self.unseen),
                ("drift from the original model", self.original.statistics),
            ],
        )
    }

    /// Memory of creating the input's solver.
    fn factor(&self) -> Stage {
        self.stage("factor for", &self.of_method(Phase::Prepare))
    }

    /// Memory of correcting a weight for the drift of its input.
    fn correction(&self) -> Stage {
        self.stage("correct", &self.of_method(Phase::Correct))
    }

    /// Memory of solving a weight.
    fn solution(&self) -> Stage {
        let Solving { plan, sizes, .. } = self;
        let mut buffers = self.of_method(Phase::Solve);
        buffers.extend([
            ("weight as stored and in f32", 2 * 4 * self.extent.weights()),
            ("scales", sizes.scales),
            ("packed tensors", sizes.stored),
            ("transposed words", transposed(plan, sizes)),
        ]);
        self.stage("solve", &buffers)
    }

    fn of_method(&self, phase: Phase) -> Vec<Buffer> {
        self.plan.buffers(self.info, phase, &self.extent)
    }

    fn stage(&self, what: &str, more: &[(&'static str, u64)]) -> Stage {
        let buffers = self.base.iter().chain(more).copied().collect();
        with_holes_of_calibration(format!("{what} {}", self.info.module), buffers)
    }
}

/// Memory of the unquantized model; zero if the drift is not needed.
#[derive(Default)]
struct Original {
    states: u64,
    layer: u64,
    /// Additional statistics of a pass.
    statistics: u64,
}

impl Original {
    fn of(plan: &Plan, set: &CalibrationSet, info: &LinearInfo) -> Self {
        let (config, threads, input) = (&plan.config, plan.options.threads, info.kind.input());
        let states = plan.limits().states;
        if !uses_drift(plan, info) {
            return Original::default();
        }
        Original {
            states: Calibration::state_bytes(config, set, states)
                + Calibration::kept_bytes(config, set, states),
            layer: config.layer_linears(info.layer).iter().map(|l| 4 * (l.rows * l.cols) as u64).sum(),
            statistics: Calibration::drift_bytes(config, set, input, threads),
        }
    }
}

/// Number of inputs whose statistics are held at once: more than one for experts.
fn inputs_at_once(config: &ModelConfig, info: &LinearInfo) -> u64 {
    match (info.kind.input(), &config.experts) {
        (LinearInput::Expert(_) | LinearInput::ExpertDown(_), Some(experts)) => {
            EXPERTS_AT_ONCE.min(experts.count.into()) as u64
        }
        _ => 1,
    }
}
