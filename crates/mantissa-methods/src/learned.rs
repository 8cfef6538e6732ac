//! Frame of the methods that learn a decoder layer by [block reconstruction](crate::reconstruction): AutoRound, BRECQ,
//! Block-AP and OmniQuant. Options, refusals, the gaps of a calibration and the solver of a layer are the same; a method
//! adds its parameters and their steps.

use std::fmt::Debug;

use mantissa_num::Scheme;
use mantissa_options::{Declared, Named, NamedMut};

use crate::autoround::{LearnedWeight, check_scheme};
use crate::error::MethodError;
use crate::method::{
    Arithmetic, Block, Buffer, CalibrationGap, Extent, Feature, Fisher, LayerSolver, Learned, Method, Needs,
    Phase, Run, SolveLayer, WeightTask, Work, refused_by_most,
};
use crate::metric::ErrorMetric;
use crate::reconstruction::{Parameters, Steps, error, learn};
use crate::solved::Solved;

/// Reason why learned rounding refuses [`Feature::StochasticRounding`].
pub(crate) const NOT_STOCHASTIC: &str = "it does not support stochastic rounding";

/// Behaviour of learned rounding for a gap in the calibration.
pub(crate) fn on_gap(gap: CalibrationGap) -> &'static str {
    match gap {
        CalibrationGap::Tokens | CalibrationGap::AllChannels => "its layers are rounded to nearest",
        CalibrationGap::Few => "learned rounding may overfit",
        CalibrationGap::Channels => "their weights are rounded to nearest",
    }
}

/// Method that learns all weights of a decoder layer together. It is a [`Method`] by that.
pub trait LearnsLayers: Declared + Debug + Send + Sync + 'static {
    /// Parameters of a layer.
    type Layer: LearnedLayer + 'static;

    /// Name of the method, and of the table of its options.
    const NAME: &'static str;

    /// Reason why rotated inputs are refused.
    const NOT_ROTATED: &'static str;

    /// Name in recipes, if the options have another than [`NAME`](Self::NAME).
    fn alias(&self) -> &'static str {
        Self::NAME
    }

    /// [Steps](Arithmetic::steps) on a weight for each step of learning: its value, its gradient and its parameters.
    const STEPS: f64;

    /// Steps of a layer.
    fn steps(&self) -> Steps;

    /// Metric of the errors that are minimized.
    fn metric(&self) -> ErrorMetric;

    /// Starts a layer without weights.
    fn layer(&self) -> Self::Layer;

    /// Behaviour for a gap in the calibration.
    fn gap(gap: CalibrationGap) -> &'static str {
        on_gap(gap)
    }

    /// Memory of one weight while it is learned.
    fn memory(&self, extent: &Extent<'_>) -> Vec<Buffer>;
}

/// Parameters of a layer, weight by weight.
pub trait LearnedLayer: Parameters {
    /// Adds a weight of `scheme`, at the start of its learning.
    fn push(&mut self, weight: LearnedWeight, scheme: &Scheme, threads: usize);

    /// Returns the quantized weights.
    fn solved(&self) -> Vec<Solved>;
}

impl<M: LearnsLayers> Method for M {
    fn name(&self) -> &'static str {
        M::NAME
    }

    fn work(&self) -> Work<'_> {
        Work::Layer(self)
    }

    fn recipe_name(&self) -> &'static str {
        self.alias()
    }

    fn tables(&self) -> Vec<Named<'_>> {
        vec![(M::NAME, self)]
    }

    fn tables_mut(&mut self) -> Vec<NamedMut<'_>> {
        vec![(M::NAME, self)]
    }

    fn needs(&self) -> Needs {
        Needs { fisher: Fisher::of_layers(self.metric(), self.steps().seed), ..self.work().needs() }
    }

    fn takes(&self, scheme: &Scheme, (rows, cols): (usize, usize), _: bool) -> Result<(), MethodError> {
        Ok(check_scheme(scheme, rows, cols)?)
    }

    fn refuses(&self, feature: Feature) -> Option<&'static str> {
        match feature {
            Feature::StochasticRounding => Some(NOT_STOCHASTIC),
            Feature::RotatedInputs => Some(M::NOT_ROTATED),
            _ => refused_by_most(feature),
        }
    }

    fn on_gap(&self, gap: CalibrationGap) -> Option<&'static str> {
        Some(M::gap(gap))
    }

    fn buffers(&self, phase: Phase, extent: &Extent<'_>) -> Vec<Buffer> {
        match phase {
            Phase::Learn => self.memory(extent),
            _ => Vec::new(),
        }
    }

    fn arithmetic(&self, extent: &Extent<'_>) -> Arithmetic {
        let Steps { count, batch_tokens, .. } = self.steps();
        Arithmetic {
            steps: count as f64 * M::STEPS * extent.weights() as f64,
            learning: (count, batch_tokens),
            ..Arithmetic::default()
        }
    }
}

impl<M: LearnsLayers> SolveLayer for M {
    fn begin(&self) -> Box<dyn LayerSolver> {
        Box::new(Learner { layer: self.layer(), steps: self.steps() })
    }

    fn batch_tokens(&self) -> usize {
        self.steps().batch_tokens
    }
}

/// Layer with the steps that learn it.
struct Learner<L> {
    layer: L,
    steps: Steps,
}

impl<L: LearnedLayer> LayerSolver for Learner<L> {
    fn add(&mut self, task: &WeightTask<'_>, h: &[f32], signed: bool) -> Result<(), MethodError> {
        let WeightTask { scheme, w, cols, outer, threads, .. } = *task;
        let weight = LearnedWeight::new(scheme, w, cols, h, outer, signed, threads)?;
        self.layer.push(weight, scheme, threads);
        Ok(())
    }

    fn learn(&mut self, block: &mut dyn Block, run: &mut Run<'_>) -> Result<Learned, MethodError> {
        learn(&mut self.layer, block, run, &self.steps)
    }

    fn error(&mut self, block: &mut dyn Block, run: &mut Run<'_>) -> Result<f64, MethodError> {
        error(block, run, self.steps.batch_tokens)
    }

    fn dequantize(&self, index: usize, out: &mut [f32], threads: usize) {
        if index < self.layer.weights() {
            self.layer.values(index, out, threads);
        }
    }

    fn finish(self: Box<Self>) -> Vec<Solved> {
        self.layer.solved()
    }
}
