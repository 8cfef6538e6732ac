//! A dense model in other coordinates: weights and norms changed so that together they compute what they did.
//!
//! A vector `x` inside a model (what a norm gives, the joined heads, the residual stream) becomes `M x`, with `M` a diagonal
//! or orthogonal: what gives the vector is multiplied by `M` from the left, what reads it by `M⁻¹` from the right. Nothing
//! else changes, and rounding is left as the only difference of the two models. SmoothQuant and AWQ choose diagonals, QuaRot
//! Hadamard matrices. Which tensors give and read a vector follows from the architecture ([`sites`]), for every model alike.
//!
//! [`Folded`] is the source as the pipeline then reads it; `Record` says all that is needed to come to the same tensors again,
//! and lies beside the output, so that it is verified against its source.

pub(crate) mod record;
pub(crate) mod sites;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use mantissa_kernels::{MatMut, MatRef, kernels};
use mantissa_model::{LinearInfo, LoadError, SourceView, StoredAs, WeightSource};
use mantissa_num::Hadamard;
use mantissa_num::pack::transpose;
use mantissa_num::stored::{Map, Transforms};
use mantissa_store::convention::{KvLevels, KvQuant, LinearWeight, ModelFiles, Weight};
use mantissa_store::{Dtype, TensorMeta};
use serde_json::Value;

use crate::awq;
use crate::orthogonal::Orthogonal;

/// `M`, by which a vector's coordinates change.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Coordinates {
    /// `x[i] / s[i]`. Where `s[i]` is 0, which nothing that reads the vector then sees, the new coordinate is 1.
    Divided(Vec<f32>),
    /// [`Hadamard::forward`] of each run of its length.
    Rotated(Hadamard),
    /// [`Orthogonal::forward`] of each run of its length.
    Turned(Arc<Orthogonal>),
    /// Mirrored along this vector of length 1: `x - 2 (v·x) v` of each run of its length (Householder).
    Mirrored(Vec<f32>),
}

impl Coordinates {
    /// `M x` of each row of `x` (`[_, width]`).
    pub(crate) fn of_vectors(&self, x: &mut [f32]) {
        match self {
            Coordinates::Divided(s) => {
                for row in x.chunks_exact_mut(s.len().max(1)) {
                    row.iter_mut().zip(s).for_each(|(x, s)| *x = if *s == 0.0 { 1.0 } else { *x / s });
                }
            }
            Coordinates::Rotated(rotation) => rotation.forward(x),
            Coordinates::Turned(matrix) => matrix.forward(x),
            Coordinates::Mirrored(v) => x.chunks_exact_mut(v.len().max(1)).for_each(|x| mirror(x, v)),
        }
    }

    /// `w M⁻¹` of each row of `w` (`[_, width]`).
    fn of_readers(&self, w: &mut [f32]) {
        match self {
            Coordinates::Divided(s) => awq::multiply_columns(w, s),
            // M⁻¹ = Mᵀ, and (w Mᵀ)ᵀ = M wᵀ.
            Coordinates::Rotated(_) | Coordinates::Turned(_) | Coordinates::Mirrored(_) => self.of_vectors(w),
        }
    }
}

/// `x - 2 (v·x) v`.
fn mirror(x: &mut [f32], v: &[f32]) {
    let dot: f64 = x.iter().zip(v).map(|(x, v)| f64::from(*x) * f64::from(*v)).sum();
    x.iter_mut().zip(v).for_each(|(x, v)| *x = (f64::from(*x) - 2.0 * dot * f64::from(*v)) as f32);
}

/// Changes of a tensor.
#[derive(Clone, Debug, PartialEq)]
enum Step {
    /// Its rows read a vector in new coordinates.
    Reads(Coordinates),
    /// Its columns are such vectors.
    Gives(Coordinates),
    /// Its rows are.
    Holds(Coordinates),
}

/// A tensor that changes.
#[derive(Clone, Debug, PartialEq)]
struct Change {
    /// As which it is seen.
    rows: usize,
    cols: usize,
    /// True if it is stored as the transpose of that.
    transposed: bool,
    /// True if it holds the distance from 1 (Gemma's norms).
    plus_one: bool,
    steps: Vec<Step>,
}

impl Change {
    fn apply(&self, mut values: Vec<f32>) -> Vec<f32> {
        let (rows, cols) = (self.rows, self.cols);
        if self.transposed {
            values = transpose(&values, cols, rows);
        }
        if self.plus_one {
            values.iter_mut().for_each(|v| *v += 1.0);
        }
        for step in &self.steps {
            match step {
                Step::Reads(coordinates) => coordinates.of_readers(&mut values),
                Step::Holds(coordinates) => coordinates.of_vectors(&mut values),
                Step::Gives(coordinates) => {
                    let mut columns = transpose(&values, rows, cols);
                    coordinates.of_vectors(&mut columns);
                    values = transpose(&columns, cols, rows);
                }
            }
        }
        if self.plus_one {
            values.iter_mut().for_each(|v| *v -= 1.0);
        }
        if self.transposed { transpose(&values, rows, cols) } else { values }
    }
}

/// The changes of a model's tensors.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Folds {
    changes: BTreeMap<String, Change>,
    /// Rotations of inputs at run time, by module.
    rotations: BTreeMap<String, Hadamard>,
    /// For a model whose head is no longer tied: the head's tensor, and that of the embedding.
    untied: Option<(String, String)>,
    /// The configuration that says so.
    config: Option<Value>,
}

impl Folds {
    fn change(&mut self, name: String, (rows, cols): (usize, usize)) -> &mut Change {
        let new = Change { rows, cols, transposed: false, plus_one: false, steps: Vec::new() };
        self.changes.entry(name).or_insert(new)
    }

    fn linear(&mut self, info: &LinearInfo) -> &mut Change {
        let change = self.change(info.dense_tensor().0, (info.rows, info.cols));
        change.transposed = info.stored == StoredAs::Columns;
        change
    }

    /// The input of `info` has new coordinates.
    pub(crate) fn reads(&mut self, info: &LinearInfo, coordinates: &Coordinates) {
        self.linear(info).steps.push(Step::Reads(coordinates.clone()));
    }

    /// The output of `info` has.
    pub(crate) fn gives(&mut self, info: &LinearInfo, coordinates: &Coordinates) {
        self.linear(info).steps.push(Step::Gives(coordinates.clone()));
        if info.bias {
            self.holds(format!("{}.bias", info.module), (1, info.rows), coordinates);
        }
    }

    /// The rows of the tensor `name` are vectors that have.
    pub(crate) fn holds(&mut self, name: String, shape: (usize, usize), coordinates: &Coordinates) {
        self.change(name, shape).steps.push(Step::Holds(coordinates.clone()));
    }

    /// The rows of the tensor `name` read a vector that has: what is no layer of its own.
    pub(crate) fn reads_rows(&mut self, name: String, shape: (usize, usize), coordinates: &Coordinates) {
        self.change(name, shape).steps.push(Step::Reads(coordinates.clone()));
    }

    /// Gives the output of the norm `module` new coordinates. `plus_one` says that it holds the distance from 1, `bias` that it adds.
    pub(crate) fn norm(&mut self, module: &str, width: usize, form: NormParts, coordinates: &Coordinates) {
        let change = self.change(format!("{module}.weight"), (1, width));
        change.plus_one = form.plus_one;
        change.steps.push(Step::Holds(coordinates.clone()));
        if form.bias {
            self.holds(format!("{module}.bias"), (1, width), coordinates);
        }
    }

    /// The input of `info` is rotated as it comes, and its weight reads it so.
    pub(crate) fn rotate_input(&mut self, info: &LinearInfo, rotation: &Hadamard) {
        self.reads(info, &Coordinates::Rotated(rotation.clone()));
        self.rotations.insert(info.module.clone(), rotation.clone());
    }

    /// The head of a model of this configuration is a tensor of its own from now on.
    pub(crate) fn untie(&mut self, head: String, embedding: String, config: Option<&Value>) {
        self.untied = Some((head, embedding));
        self.config = config.cloned().map(|mut config| {
            config["tie_word_embeddings"] = Value::Bool(false);
            config
        });
    }

    /// Gradient of a loss as the coordinates `of` turn a little further: with `M` become `(1 + A) M` by `Σ S[i, j] A[i, j]`, to first
    /// order in a small skew-symmetric `A`; `S` is `[n, n]`. `tensor` gives the values of a tensor that this changes, and the loss's
    /// gradient with respect to them.
    ///
    /// A vector x that is held turns to `x + A x`, so that `S` is the sum of `g xᵀ` over all vectors; what reads one turns likewise.
    pub(crate) fn turning<'t>(
        &self,
        of: &Arc<Orthogonal>,
        tensor: impl Fn(&str) -> Option<(&'t [f32], &'t [f32])>,
    ) -> Vec<f32> {
        let n = of.order();
        let mut sum = vec![0.0; n * n];
        let mut add = |values: &[f32], gradient: &[f32]| {
            let rows = values.len() / n;
            let (g, x) = (MatRef::new(gradient, rows, n), MatRef::new(values, rows, n));
            kernels().gemm_tn(g, x, MatMut::new(&mut sum, n, n), true);
        };
        for (name, change) in &self.changes {
            for step in &change.steps {
                let (coordinates, columns) = match step {
                    Step::Reads(coordinates) | Step::Holds(coordinates) => (coordinates, change.transposed),
                    Step::Gives(coordinates) => (coordinates, !change.transposed),
                };
                let turned = matches!(coordinates, Coordinates::Turned(matrix) if Arc::ptr_eq(matrix, of));
                let Some((values, gradient)) = tensor(name).filter(|_| turned) else { continue };
                if columns {
                    let (rows, cols) = if change.transposed {
                        (change.cols, change.rows)
                    } else {
                        (change.rows, change.cols)
                    };
                    add(&transpose(values, rows, cols), &transpose(gradient, rows, cols));
                } else {
                    add(values, gradient);
                }
            }
        }
        sum
    }

    /// True if the tensor `name` changes.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.changes.contains_key(name)
    }

    /// The tensor that a model with its own head has beyond the source, and the one that it begins as.
    pub(crate) fn untied(&self) -> Option<(&str, &str)> {
        self.untied.as_ref().map(|(head, embedding)| (head.as_str(), embedding.as_str()))
    }
}

/// Parts of a norm.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NormParts {
    pub(crate) plus_one: bool,
    pub(crate) bias: bool,
}

/// A dense model as it is quantized: as it is, or in other coordinates.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Folded<'a> {
    files: &'a ModelFiles,
    folds: Option<&'a Folds>,
}

impl<'a> Folded<'a> {
    /// `files` as they are.
    pub(crate) fn plain(files: &'a ModelFiles) -> Self {
        Folded { files, folds: None }
    }

    pub(crate) fn new(files: &'a ModelFiles, folds: &'a Folds) -> Self {
        Folded { files, folds: Some(folds) }
    }

    /// The files, unchanged.
    pub(crate) fn files(&self) -> &'a ModelFiles {
        self.files
    }

    /// Their folder.
    pub(crate) fn path(&self) -> &'a Path {
        self.files.dir()
    }

    /// The tensor that `name` is made of.
    pub(crate) fn stored(&self, name: &str) -> Option<&'a TensorMeta> {
        let untied = self.folds.and_then(Folds::untied).filter(|(head, _)| *head == name);
        self.files.checkpoint().get(untied.map_or(name, |(_, embedding)| embedding))
    }

    /// True if the tensor `name` differs from the files.
    pub(crate) fn changes(&self, name: &str) -> bool {
        self.folds.is_some_and(|folds| folds.has(name))
    }

    /// The tensor `name` of this shape, widened and changed.
    ///
    /// # Errors
    /// As [`ModelFiles::tensor_f32`].
    pub(crate) fn tensor(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, mantissa_store::Error> {
        let Some(folds) = self.folds else { return self.files.tensor_f32(name, shape) };
        let stored =
            folds.untied().filter(|(head, _)| *head == name).map_or(name, |(_, embedding)| embedding);
        let values = self.files.tensor_f32(stored, shape)?;
        Ok(match folds.changes.get(name) {
            Some(change) if change.rows * change.cols == values.len() => change.apply(values),
            _ => values,
        })
    }

    /// The bytes of the changed tensor `name` in `dtype`, rounded to nearest even.
    ///
    /// # Errors
    /// As [`tensor`](Self::tensor).
    pub(crate) fn bytes(
        &self,
        name: &str,
        shape: &[usize],
        dtype: Dtype,
    ) -> Result<Vec<u8>, mantissa_store::Error> {
        let values = self.tensor(name, shape)?;
        Ok(values.iter().flat_map(|v| round_to(*v, dtype)).collect())
    }
}

/// The little-endian bytes of `v` in a dtype of models.
fn round_to(v: f32, dtype: Dtype) -> Vec<u8> {
    use mantissa_num::minifloat::{BF16, F16, Overflow};
    use mantissa_num::round::Rounding;
    let word = |code: u32| (code as u16).to_le_bytes().to_vec();
    match dtype {
        Dtype::BF16 => word(BF16.encode(v, Overflow::Special, Rounding::NearestEven, 0)),
        Dtype::F16 => word(F16.encode(v, Overflow::Special, Rounding::NearestEven, 0)),
        Dtype::F64 => f64::from(v).to_le_bytes().to_vec(),
        _ => v.to_le_bytes().to_vec(),
    }
}

/// `v` as it is read back from `dtype`.
pub(crate) fn rounded(v: f32, dtype: Dtype) -> f32 {
    let bytes = round_to(v, dtype);
    let word = || u16::from_le_bytes([bytes[0], bytes[1]]).into();
    match dtype {
        Dtype::BF16 => mantissa_num::minifloat::BF16.decode(word()),
        Dtype::F16 => mantissa_num::minifloat::F16.decode(word()),
        _ => v,
    }
}

impl SourceView for Folded<'_> {
    fn base(&self) -> &dyn WeightSource {
        self.files
    }

    fn config(&self) -> Option<&Value> {
        self.folds.and_then(|folds| folds.config.as_ref()).or_else(|| self.files.config())
    }

    fn has(&self, tensor: &str) -> bool {
        self.files.has(tensor) || self.folds.and_then(Folds::untied).is_some_and(|(head, _)| head == tensor)
    }

    fn tensor_f32(&self, tensor: &str, shape: &[usize]) -> Result<Vec<f32>, LoadError> {
        Ok(self.tensor(tensor, shape)?)
    }

    fn linear(&self, module: &str, rows: usize, cols: usize, bias: bool) -> Result<LinearWeight, LoadError> {
        let (weight, bias_name) = (format!("{module}.weight"), format!("{module}.bias"));
        if !self.changes(&weight) && !self.changes(&bias_name) {
            return Ok(self.files.linear(module, rows, cols, bias)?);
        }
        let bias = if bias { Some(self.tensor(&bias_name, &[rows])?) } else { None };
        let weight = Weight::F32(self.tensor(&weight, &[rows, cols])?);
        let rotation = self.folds.and_then(|folds| folds.rotations.get(module)).cloned();
        let before = rotation.map(Map::Hadamard).into_iter().collect();
        let transforms = Transforms { before, ..Transforms::default() };
        Ok(LinearWeight { rows, cols, weight, bias, input: None, transforms })
    }

    fn kv_quant(&self, _: &str, _: usize) -> Result<Option<KvQuant>, LoadError> {
        Ok(None)
    }

    fn kv_levels(&self, _: &str, _: usize) -> Result<Option<KvLevels>, LoadError> {
        Ok(None)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests;
