//! Interface of a post-training quantization method.
//!
//! A method is one value that holds its own options. It states its [needs](Needs), the schemes it takes and the
//! memory it uses, and solves one [unit of work](Work). The pipeline runs the model, collects statistics and stores
//! the result.

use std::borrow::Cow;
use std::fmt::Debug;
use std::ops::ControlFlow;

use mantissa_num::{Codes, Scheme};
use mantissa_options::{Named, NamedMut, OptionValue};

use crate::error::MethodError;
use crate::gptq::{Drift, Hessian};
use crate::metric::{ErrorMetric, Metric};
use crate::solved::Solved;

/// A post-training quantization method with its options.
pub trait Method: Debug + Send + Sync {
    /// Name in reports, for example `gptq`.
    fn name(&self) -> &'static str;

    /// Unit of work, with the functions that solve it.
    fn work(&self) -> Work<'_>;

    /// Weights that the method solves together, and which therefore cannot be divided among several methods.
    fn scope(&self) -> Scope {
        self.work().scope()
    }

    /// Name in recipes: the name of the registry row with these options, if any, else [`name`](Self::name).
    fn recipe_name(&self) -> &'static str {
        self.name()
    }

    /// Options that recipe files set, by table.
    fn tables(&self) -> Vec<Named<'_>> {
        Vec::new()
    }

    /// Same options, to be set.
    fn tables_mut(&mut self) -> Vec<NamedMut<'_>> {
        Vec::new()
    }

    /// Returns all options as they are set.
    fn settings(&self) -> Vec<OptionValue> {
        mantissa_options::settings(&self.tables())
    }

    /// Statistics and passes that the method needs.
    fn needs(&self) -> Needs {
        self.work().needs()
    }

    /// Scheme that a recipe means by `scheme`; HQQ adds a floating-point zero point.
    fn scheme(&self, scheme: Scheme) -> Scheme {
        scheme
    }

    /// Scheme in which a weight of `scheme` is stored, in containers that leave the dtype of scales to the method; SpQR and HQQ have
    /// f16 scales.
    fn stored_scheme(&self, scheme: Scheme) -> Scheme {
        scheme
    }

    /// Checks that a weight `[rows, cols]` can be quantized under `scheme`. `group_order` is true if the format can store the
    /// group of each column.
    ///
    /// # Errors
    /// [`MethodError::Scheme`] says which schemes the method takes.
    fn takes(&self, scheme: &Scheme, shape: (usize, usize), group_order: bool) -> Result<(), MethodError> {
        let _ = (scheme, shape, group_order);
        Ok(())
    }

    /// Reason why the method cannot be combined with `feature`; `None` if it can.
    fn refuses(&self, feature: Feature) -> Option<&'static str> {
        refused_by_most(feature)
    }

    /// True if groups may be of columns that are not adjacent, so that the group of each column is stored (`g_idx`).
    fn follows_order(&self) -> bool {
        false
    }

    /// Number of outliers stored outside the codes of a weight `[rows, cols]`.
    fn outliers(&self, rows: usize, cols: usize) -> usize {
        let _ = (rows, cols);
        0
    }

    /// Damping of the Hessian, for formats that record it.
    fn damping(&self) -> Option<f64> {
        None
    }

    /// Behaviour for a gap in the calibration, for the coverage report; `None` if the method does not say.
    fn on_gap(&self, gap: CalibrationGap) -> Option<&'static str> {
        // A method without calibration reads the text to be compared with RTN, for nothing else.
        let unread = matches!(self.work(), Work::Weight(_)) && gap == CalibrationGap::Tokens;
        unread.then_some("its layers are not compared with RTN")
    }

    /// Memory of `phase` for one weight, beside the weight and the result.
    fn buffers(&self, phase: Phase, extent: &Extent<'_>) -> Vec<Buffer> {
        let _ = (phase, extent);
        Vec::new()
    }

    /// Arithmetic on one weight beside the passes of the model, to predict the time of a run.
    fn arithmetic(&self, extent: &Extent<'_>) -> Arithmetic {
        self.work().arithmetic(extent)
    }
}

/// Reason why most methods cannot be combined with `feature`, if so.
pub fn refused_by_most(feature: Feature) -> Option<&'static str> {
    match feature {
        Feature::GivenScales => Some("it chooses its own scales"),
        Feature::Trellis => Some("schemes other than a trellis, which qtip writes"),
        _ => None,
    }
}

/// The unit of work of a method.
#[derive(Clone, Copy)]
pub enum Work<'a> {
    /// RTN, which the pipeline runs panel by panel while it reads weights.
    Nearest,
    /// One weight, without calibration.
    Weight(&'a dyn SolveWeight),
    /// The weights that share an input, from the second moments of that input.
    Input(&'a dyn SolveInput),
    /// All weights of a decoder layer, learned together by running the layer.
    Layer(&'a dyn SolveLayer),
}

/// Weights that a method solves together. Weights of one scope need the same method; one run can mix methods otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Scope {
    /// One weight, from the second moments of its input at most.
    Weight,
    /// All weights of a decoder layer.
    Layer,
}

impl Work<'_> {
    /// Weights that are solved together. Weights that share an input are solved one after another from the same
    /// statistics, so each may have its own method.
    pub fn scope(&self) -> Scope {
        match self {
            Work::Nearest | Work::Weight(_) | Work::Input(_) => Scope::Weight,
            Work::Layer(_) => Scope::Layer,
        }
    }

    /// Needs of most methods with this unit of work.
    pub fn needs(&self) -> Needs {
        let none = Needs::default();
        match self {
            Work::Nearest => none,
            Work::Weight(_) => Needs { judged: true, ..none },
            Work::Input(_) => Needs { text: true, judged: true, ..none },
            Work::Layer(_) => Needs { text: true, judged: true, gradients: true, ..none },
        }
    }

    /// Arithmetic of most methods with this unit of work: columns that depend on one another, for those that solve from
    /// the second moments of an input.
    pub fn arithmetic(&self, extent: &Extent<'_>) -> Arithmetic {
        match self {
            Work::Nearest | Work::Layer(_) => Arithmetic::default(),
            Work::Weight(_) => Arithmetic { steps: extent.weights() as f64, ..Arithmetic::default() },
            Work::Input(_) => Arithmetic { columns: extent.columns(), ..Arithmetic::default() },
        }
    }
}

/// Statistics and passes that a method needs.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Needs {
    /// Calibration text.
    pub text: bool,
    /// Comparison of each solution with RTN on the layer's input; RTN replaces a solution that is worse.
    pub judged: bool,
    /// The unquantized model beside the quantized one, to measure the drift of layer inputs.
    pub drift: bool,
    /// Gradients inside a decoder layer: the architecture must have a backward.
    pub gradients: bool,
    /// Fisher information.
    pub fisher: Option<Fisher>,
}

/// Fisher information that a method asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fisher {
    /// Fisher information of the outputs of decoder layers ([`Metric`]); targets are drawn with `seed`.
    Layers {
        /// Seed.
        seed: u64,
    },
    /// Fisher information of the outputs of linear layers ([`WeightTask::outputs`]), if the architecture has a backward.
    Outputs,
}

impl Fisher {
    /// Fisher information that a method needs to measure the errors of layers by `metric`.
    pub fn of_layers(metric: ErrorMetric, seed: u64) -> Option<Self> {
        (metric == ErrorMetric::Fisher).then_some(Fisher::Layers { seed })
    }
}

/// Feature of a run that some methods cannot be combined with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Feature {
    /// Inputs quantized at run time.
    QuantizedInputs,
    /// Transform of the model before the method.
    Transform,
    /// Inputs rotated at run time.
    RotatedInputs,
    /// Scales that the format chooses ([`WeightTask::scales`]).
    GivenScales,
    /// Stochastic rounding.
    StochasticRounding,
    /// Trellis-coded weights; the reason names the schemes that the method takes instead.
    Trellis,
}

/// Gap in the calibration of one input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CalibrationGap {
    /// No token reached it.
    Tokens,
    /// All of its channels are zero in every token.
    AllChannels,
    /// Fewer tokens reached it than it has channels.
    Few,
    /// Some of its channels are zero in every token.
    Channels,
}

/// A weight to quantize.
#[derive(Clone, Copy)]
pub struct WeightTask<'a> {
    /// Scheme.
    pub scheme: &'a Scheme,
    /// Number of rows (outputs).
    pub rows: usize,
    /// Number of columns (inputs).
    pub cols: usize,
    /// The weight `[rows, cols]`.
    pub w: &'a [f32],
    /// Weight that the result should approximate: corrected for the drift of its input, else `w`.
    pub target: &'a [f32],
    /// Global scale that fused layers share.
    pub outer: Option<f32>,
    /// Second moments `[rows, rows]` of the gradients of the layer's outputs, for methods that ask for [`Fisher::Outputs`].
    pub outputs: Option<&'a Hessian>,
    /// Scales that the format chooses; `None` if any scale can be stored.
    pub scales: Option<&'a GivenScales<'a>>,
    /// Index of the decoder layer, and of the weight among its linear layers.
    pub place: (usize, usize),
    /// Threads.
    pub threads: usize,
}

/// Chooses the scales of a weight for a format that cannot store every scale, from the weight and the diagonal of its
/// Hessian. Returns the scheme and codes of the scales; `None` for a weight without such scales.
pub type GivenScales<'a> = dyn Fn(&[f32], &[f64]) -> Option<(Scheme, Codes)> + 'a;

/// Quantizes one weight without calibration.
pub trait SolveWeight {
    /// Quantizes the weight of `task`.
    ///
    /// # Errors
    /// [`MethodError`].
    fn solve(&self, task: &WeightTask<'_>) -> Result<Solved, MethodError>;
}

/// Statistics of an input shared by one or more weights.
#[derive(Debug)]
pub struct InputTask {
    /// Second moments.
    pub hessian: Hessian,
    /// Drift from the unquantized model, for methods that [ask for it](Needs::drift); absent for experts.
    pub drift: Option<Drift>,
    /// Index of the decoder layer, and of the first linear layer that reads the input.
    pub place: (usize, usize),
    /// Threads.
    pub threads: usize,
}

/// Quantizes weights that share an input.
pub trait SolveInput {
    /// Prepares the solver of the weights that share an input.
    ///
    /// # Errors
    /// [`MethodError`].
    fn prepare(&self, task: InputTask) -> Result<Prepared, MethodError>;
}

/// Solver, and the second moments for comparing its solutions with RTN; `None` if RTN does not apply.
#[derive(Debug)]
pub struct Prepared {
    /// Solver.
    pub solver: Solver,
    /// Second moments of the input.
    pub moments: Option<Hessian>,
}

/// Solver of weights that share an input.
#[derive(Debug)]
pub enum Solver {
    /// A solver of the method.
    Ready(Box<dyn InputSolver>),
    /// RTN, with the reason.
    RoundToNearest(String),
}

/// Quantizes weights one after another, using shared statistics of their input.
pub trait InputSolver: Debug {
    /// Quantizes the weight of `task`.
    ///
    /// # Errors
    /// [`MethodError`].
    fn solve(&self, task: &WeightTask<'_>) -> Result<Solved, MethodError>;

    /// True if [`corrected`](Self::corrected) changes weights.
    fn corrects(&self) -> bool {
        false
    }

    /// Returns `w` corrected for the drift of its input. `last` is true for the last weight that reads the input.
    ///
    /// # Errors
    /// [`MethodError`].
    fn corrected(&mut self, w: &[f32], last: bool, threads: usize) -> Result<Option<Vec<f32>>, MethodError> {
        let _ = (w, last, threads);
        Ok(None)
    }
}

/// Quantizes all weights of a decoder layer together.
pub trait SolveLayer {
    /// Starts a decoder layer without weights.
    fn begin(&self) -> Box<dyn LayerSolver>;

    /// Tokens of a step: as many windows as hold them, at least one.
    fn batch_tokens(&self) -> usize;
}

/// Weights of a decoder layer while they are learned.
pub trait LayerSolver {
    /// Adds a weight. `h` is the mean square of each column's input, `[cols]`; `signed` is true if the format stores negative scales.
    ///
    /// # Errors
    /// [`MethodError`].
    fn add(&mut self, task: &WeightTask<'_>, h: &[f32], signed: bool) -> Result<(), MethodError>;

    /// Learns the weights of `block`, which are in the order of [`add`](Self::add).
    ///
    /// # Errors
    /// [`MethodError`].
    fn learn(&mut self, block: &mut dyn Block, run: &mut Run<'_>) -> Result<Learned, MethodError>;

    /// Mean error of the layer's output over the windows of `run`, with the weights that `block` has.
    ///
    /// # Errors
    /// [`MethodError`].
    fn error(&mut self, block: &mut dyn Block, run: &mut Run<'_>) -> Result<f64, MethodError>;

    /// Writes the dequantized values of weight `index` to `out`.
    fn dequantize(&self, index: usize, out: &mut [f32], threads: usize);

    /// Quantized weights, in the order of [`add`](Self::add).
    fn finish(self: Box<Self>) -> Vec<Solved>;
}

/// Errors of a layer's output before and after learning.
#[derive(Clone, Debug)]
pub struct Learned {
    /// Error of the starting point.
    pub before: f64,
    /// Error of the result.
    pub after: f64,
    /// Sentence for the layer's report.
    pub note: String,
}

impl Learned {
    /// Errors on the windows of `run`.
    pub fn new(run: &Run<'_>, before: f64, after: f64) -> Self {
        let what =
            if run.metric.is_some() { "mean error under the Fisher metric" } else { "mean squared error" };
        Learned { before, after, note: format!("{what} of the layer's output {before:.4e} → {after:.4e}") }
    }
}

/// Windows to learn on.
pub struct Run<'a> {
    /// Inputs of the layer in the quantized model, `[tokens, hidden]` of each window.
    pub inputs: &'a dyn Windows,
    /// Outputs of the layer in the unquantized model, of the same shapes.
    pub targets: &'a dyn Windows,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Fisher information of the output; `None` measures squared errors.
    pub metric: Option<&'a Metric>,
    /// Threads.
    pub threads: usize,
    /// Called after every step; decides if learning continues.
    pub tick: &'a mut dyn FnMut() -> ControlFlow<()>,
}

impl Run<'_> {
    /// Checks for a stop request.
    ///
    /// # Errors
    /// [`MethodError::Stopped`].
    pub fn go_on(&mut self) -> Result<(), MethodError> {
        match (self.tick)() {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(MethodError::Stopped),
        }
    }
}

/// Hidden states of some windows.
pub trait Windows {
    /// Number of windows.
    fn count(&self) -> usize;

    /// Number of values of window `index`.
    fn elements(&self, index: usize) -> usize;

    /// Appends the values of window `index` to `out`.
    ///
    /// # Errors
    /// Fails if the states cannot be read.
    fn append_to(&self, index: usize, out: &mut Vec<f32>) -> Result<(), MethodError>;
}

/// Decoder layer that can be run and differentiated. Weights are identified by their index among the quantized ones.
pub trait Block {
    /// Replaces `states` `[tokens, hidden]`, sequences of `lens` tokens, by the layer's output.
    ///
    /// # Errors
    /// Fails if the layer cannot be run.
    fn forward(&mut self, states: &mut [f32], lens: &[usize]) -> Result<(), MethodError>;

    /// Computes the gradients of all weights from the gradient of the last output.
    fn backward(&mut self, gradient: &[f32], lens: &[usize]);

    /// Gradient of weight `index`, after [`backward`](Self::backward).
    fn gradient(&self, index: usize) -> Cow<'_, [f32]>;

    /// Lets `write` overwrite the values of weight `index`.
    fn set_weight(&mut self, index: usize, write: &mut dyn FnMut(&mut [f32]));
}

/// A phase of the work on one weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Preparing the solver of an input.
    Prepare,
    /// Correcting a weight for the drift of its input.
    Correct,
    /// Solving a weight.
    Solve,
    /// Learning a layer; one weight's share.
    Learn,
}

/// A named amount of memory in bytes.
pub type Buffer = (&'static str, u64);

/// Size of a weight's problem, for memory estimates.
#[derive(Clone, Copy, Debug)]
pub struct Extent<'a> {
    /// Scheme.
    pub scheme: &'a Scheme,
    /// Rows of the weight.
    pub rows: usize,
    /// Columns of the weight.
    pub cols: usize,
    /// Columns that share a scale.
    pub group: usize,
    /// Bytes of its codes, one unit each.
    pub codes: u64,
    /// Bytes of its scales and zero points.
    pub scales: u64,
    /// Inputs whose statistics are held at once; more than one for experts.
    pub inputs: u64,
    /// True if there are statistics of held-out windows as well.
    pub held_out: bool,
    /// True if the drift of the input is measured.
    pub drift: bool,
    /// True if no later weight reads the input.
    pub last: bool,
    /// Threads.
    pub threads: usize,
}

impl Extent<'_> {
    /// Number of weights.
    pub fn weights(&self) -> u64 {
        (self.rows * self.cols) as u64
    }

    /// Multiply-adds that factor the second moments of an input and solve a weight from the factor, column by column.
    pub fn columns(&self) -> f64 {
        (self.rows + self.cols) as f64 * (self.cols * self.cols) as f64
    }
}

/// Arithmetic of a method on one weight, to predict its time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Arithmetic {
    /// Multiply-adds in matrix products.
    pub products: f64,
    /// Multiply-adds of columns that depend on one another.
    pub columns: f64,
    /// Steps on one value, each of which costs about as much as to round it and to compare.
    pub steps: f64,
    /// Transitions of a trellis.
    pub transitions: f64,
    /// Steps in which the decoder layer of the weight runs forward and backward, and tokens of each, for methods that
    /// learn layers; every weight of the layer states the same.
    pub learning: (usize, usize),
    /// Steps in which the whole model runs forward and backward, and tokens of each, for transforms that learn on its
    /// loss; every weight states the same.
    pub training: (usize, usize),
}
