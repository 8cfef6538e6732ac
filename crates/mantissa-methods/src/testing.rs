//! Values and a decoder layer for tests.

use std::borrow::Cow;
use std::ops::ControlFlow;

use mantissa_num::Scheme;

use crate::error::MethodError;
use crate::method::{Block, Learned, Run, SolveLayer, WeightTask, Windows};
use crate::solved::Solved;

/// Pseudo-random values from -1 to 1.
pub fn values(seed: u64, n: usize) -> Vec<f32> {
    let word = |i: usize| mantissa_num::round::random_u32(seed, i as u64);
    (0..n).map(|i| word(i) as f32 / u32::MAX as f32 * 2.0 - 1.0).collect()
}

/// Windows in memory, each of as many values as the first.
pub struct InMemory(pub Vec<Vec<f32>>);

impl Windows for InMemory {
    fn count(&self) -> usize {
        self.0.len()
    }

    fn elements(&self, index: usize) -> usize {
        self.0[index].len()
    }

    fn append_to(&self, index: usize, out: &mut Vec<f32>) -> Result<(), MethodError> {
        out.extend_from_slice(&self.0[index]);
        Ok(())
    }
}

/// A layer of two weights, `x + B·relu(A·x)`.
pub struct Mlp {
    hidden: usize,
    inner: usize,
    /// A `[inner, hidden]` and B `[hidden, inner]`.
    weights: [Vec<f32>; 2],
    gradients: [Vec<f32>; 2],
    /// Input and inner activations of the last forward.
    saved: [Vec<f32>; 2],
}

impl Mlp {
    pub const HIDDEN: usize = 32;
    pub const INNER: usize = 64;

    /// Shapes `(rows, cols)` of its weights.
    pub const SHAPES: [(usize, usize); 2] = [(Mlp::INNER, Mlp::HIDDEN), (Mlp::HIDDEN, Mlp::INNER)];

    /// A layer with weights from `seed`.
    pub fn new(seed: u64) -> Self {
        let (hidden, inner) = (Mlp::HIDDEN, Mlp::INNER);
        let weights = [values(seed, hidden * inner), values(seed + 1, hidden * inner)];
        Mlp { hidden, inner, weights, gradients: Default::default(), saved: Default::default() }
    }

    /// Values of weight `index`.
    pub fn weight(&self, index: usize) -> &[f32] {
        &self.weights[index]
    }

    /// Some windows of channels that depend on each other, and the layer's outputs on them.
    pub fn windows(&mut self, count: usize, tokens: usize) -> [InMemory; 2] {
        let window = |i: usize| {
            let noise = values(100 + i as u64, tokens * self.hidden);
            noise.iter().enumerate().map(|(i, v)| v * 0.3 + noise[i - i % 4]).collect()
        };
        let inputs: Vec<Vec<f32>> = (0..count).map(window).collect();
        let mut targets = inputs.clone();
        targets.iter_mut().for_each(|states| self.run(states));
        [InMemory(inputs), InMemory(targets)]
    }

    fn run(&mut self, states: &mut [f32]) {
        let mut inner = Vec::new();
        for x in states.chunks(self.hidden) {
            inner.extend(self.weights[0].chunks(self.hidden).map(|row| dot(row, x).max(0.0)));
        }
        self.saved = [states.to_vec(), inner];
        for (y, inner) in states.chunks_mut(self.hidden).zip(self.saved[1].chunks(self.inner)) {
            for (y, row) in y.iter_mut().zip(self.weights[1].chunks(self.inner)) {
                *y += dot(row, inner);
            }
        }
    }
}

impl Block for Mlp {
    fn forward(&mut self, states: &mut [f32], _: &[usize]) -> Result<(), MethodError> {
        self.run(states);
        Ok(())
    }

    fn backward(&mut self, gradient: &[f32], _: &[usize]) {
        let [a, b] = &mut self.gradients;
        *a = vec![0.0; self.weights[0].len()];
        *b = vec![0.0; self.weights[1].len()];
        let tokens = gradient.chunks(self.hidden).zip(self.saved[0].chunks(self.hidden));
        for ((gradient, x), inner) in tokens.zip(self.saved[1].chunks(self.inner)) {
            for (row, g) in b.chunks_mut(self.inner).zip(gradient) {
                row.iter_mut().zip(inner).for_each(|(b, inner)| *b += g * inner);
            }
            for (j, row) in a.chunks_mut(self.hidden).enumerate().filter(|(j, _)| inner[*j] > 0.0) {
                let column = self.weights[1].iter().skip(j).step_by(self.inner);
                let g: f32 = column.zip(gradient).map(|(w, g)| w * g).sum();
                row.iter_mut().zip(x).for_each(|(a, x)| *a += g * x);
            }
        }
    }

    fn gradient(&self, index: usize) -> Cow<'_, [f32]> {
        Cow::Borrowed(&self.gradients[index])
    }

    fn set_weight(&mut self, index: usize, write: &mut dyn FnMut(&mut [f32])) {
        write(&mut self.weights[index]);
    }
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Calls `work` with the windows of `inputs` and `targets` of an [`Mlp`], under squared errors.
pub fn run_on<T>(
    [inputs, targets]: &[InMemory; 2],
    threads: usize,
    work: impl FnOnce(&mut Run<'_>) -> T,
) -> T {
    let tick = &mut || ControlFlow::Continue(());
    work(&mut Run { inputs, targets, hidden: Mlp::HIDDEN, metric: None, threads, tick })
}

/// Learns the weights of an [`Mlp`] in the scheme `name`; gives the errors before and after, and the weights. Checks that
/// the reported error and the dequantized values belong to the stored weights.
#[allow(clippy::unwrap_used)]
pub fn learn_mlp(
    method: &dyn SolveLayer,
    name: &str,
    signed: bool,
    threads: usize,
) -> (Learned, Vec<Solved>) {
    let scheme: Scheme = name.parse().unwrap();
    let mut block = Mlp::new(7);
    let windows = block.windows(8, 24);
    let mut solver = method.begin();
    for (place, (rows, cols)) in Mlp::SHAPES.into_iter().enumerate() {
        let w = block.weight(place);
        let outer = scheme.outer_scale(w.iter().fold(0f32, |amax, v| amax.max(v.abs())));
        let (outputs, scales, place, scheme) = (None, None, (0, place), &scheme);
        let task = WeightTask { scheme, rows, cols, w, target: w, outer, outputs, scales, place, threads };
        solver.add(&task, &vec![1.0; cols], signed).unwrap();
    }
    let learned = run_on(&windows, threads, |run| solver.learn(&mut block, run)).unwrap();
    for index in 0..Mlp::SHAPES.len() {
        block.set_weight(index, &mut |out| solver.dequantize(index, out, threads));
    }
    let found = run_on(&windows, threads, |run| solver.error(&mut block, run)).unwrap();
    assert_eq!(found, learned.after, "{name}");
    let solved = solver.finish();
    for (index, solved) in solved.iter().enumerate() {
        assert_eq!(solved.values().unwrap(), block.weight(index), "{name}");
    }
    (learned, solved)
}
