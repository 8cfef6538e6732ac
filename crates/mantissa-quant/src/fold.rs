//! Changes of a dense model's coordinates that preserve its function (SmoothQuant, AWQ, QuaRot, SpinQuant).
//!
//! A vector `x` inside the model (output of a norm, attention heads, residual stream) becomes `M x`, with `M` diagonal
//! or orthogonal. Tensors that produce the vector are multiplied by `M` from the left, tensors that read it by `M⁻¹`
//! from the right. The model computes the same function; only rounding then makes a difference. SmoothQuant and AWQ
//! choose diagonals, QuaRot Hadamard matrices. [`sites`] finds producers and readers from the architecture's features,
//! for every model alike.
//!
//! [`Folded`] is the changed model that the pipeline reads. The record of a transform is stored beside the output. It
//! reproduces the changes, so that the output can be verified against its source.

pub(crate) mod sites;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use mantissa_kernels::{MatMut, MatRef, kernels};
use mantissa_model::{LinearInfo, LoadError, SourceView, StoredAs, WeightSource, untie};
use mantissa_num::Hadamard;
use mantissa_num::pack::transpose;
use mantissa_num::stored::{Map, Transforms};
use mantissa_store::convention::{KvLevels, KvQuant, LinearWeight, ModelFiles, Weight};
use mantissa_store::{Dtype, TensorMeta};
use serde_json::Value;

use crate::awq;
use crate::orthogonal::Orthogonal;

/// Change of coordinates `M` of a vector.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Coordinates {
    /// `x[i] / s[i]`. Where `s[i]` is 0, no reader sees the channel, and the new coordinate is 1.
    Divided(Vec<f32>),
    /// Hadamard rotation: [`Hadamard::forward`] of each block.
    Rotated(Hadamard),
    /// Learned rotation: [`Orthogonal::forward`] of each block.
    Turned(Arc<Orthogonal>),
    /// Householder reflection along this unit vector: `x - 2 (v·x) v` of each block.
    Reflected(Vec<f32>),
}

impl Coordinates {
    /// Replaces each row `x` (`[_, width]`) by `M x`.
    pub(crate) fn apply(&self, x: &mut [f32]) {
        match self {
            Coordinates::Divided(s) => {
                for row in x.chunks_exact_mut(s.len().max(1)) {
                    row.iter_mut().zip(s).for_each(|(x, s)| *x = if *s == 0.0 { 1.0 } else { *x / s });
                }
            }
            Coordinates::Rotated(rotation) => rotation.forward(x),
            Coordinates::Turned(matrix) => matrix.forward(x),
            Coordinates::Reflected(v) => x.chunks_exact_mut(v.len().max(1)).for_each(|x| reflect(x, v)),
        }
    }

    /// Replaces each row `w` (`[_, width]`) by `w M⁻¹`.
    fn apply_inverse(&self, w: &mut [f32]) {
        match self {
            Coordinates::Divided(s) => awq::multiply_columns(w, s),
            // M⁻¹ = Mᵀ, and (w Mᵀ)ᵀ = M wᵀ.
            Coordinates::Rotated(_) | Coordinates::Turned(_) | Coordinates::Reflected(_) => self.apply(w),
        }
    }
}

/// Replaces `x` by `x - 2 (v·x) v`.
fn reflect(x: &mut [f32], v: &[f32]) {
    let dot: f64 = x.iter().zip(v).map(|(x, v)| f64::from(*x) * f64::from(*v)).sum();
    x.iter_mut().zip(v).for_each(|(x, v)| *x = (f64::from(*x) - 2.0 * dot * f64::from(*v)) as f32);
}

/// Change of one tensor.
#[derive(Clone, Debug, PartialEq)]
enum Step {
    /// The rows read the vector: multiplied by `M⁻¹` from the right.
    Input(Coordinates),
    /// The columns produce the vector: multiplied by `M` from the left.
    Output(Coordinates),
    /// The rows are the vectors (embedding, bias).
    Rows(Coordinates),
}

/// All changes of one tensor.
#[derive(Clone, Debug, PartialEq)]
struct Change {
    /// Rows of the `[out, in]` view.
    rows: usize,
    cols: usize,
    /// True if the tensor is stored transposed.
    transposed: bool,
    /// True if the tensor stores the difference from 1 (Gemma's norms).
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
                Step::Input(coordinates) => coordinates.apply_inverse(&mut values),
                Step::Rows(coordinates) => coordinates.apply(&mut values),
                Step::Output(coordinates) => {
                    let mut columns = transpose(&values, rows, cols);
                    coordinates.apply(&mut columns);
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

/// Changes of a model's tensors.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Folds {
    changes: BTreeMap<String, Change>,
    /// Rotations of inputs at run time (online), by module.
    rotations: BTreeMap<String, Hadamard>,
    /// Head and embedding tensors of a model whose head is no longer tied.
    untied: Option<(String, String)>,
    /// Changed configuration, if the head is no longer tied.
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

    /// Changes the coordinates of the input of `info`.
    pub(crate) fn change_input(&mut self, info: &LinearInfo, coordinates: &Coordinates) {
        self.linear(info).steps.push(Step::Input(coordinates.clone()));
    }

    /// Changes the coordinates of the output of `info`, with its bias.
    pub(crate) fn change_output(&mut self, info: &LinearInfo, coordinates: &Coordinates) {
        self.linear(info).steps.push(Step::Output(coordinates.clone()));
        if info.bias {
            self.change_rows(format!("{}.bias", info.module), (1, info.rows), coordinates);
        }
    }

    /// Changes the coordinates of the rows of the tensor `name`.
    pub(crate) fn change_rows(&mut self, name: String, shape: (usize, usize), coordinates: &Coordinates) {
        self.change(name, shape).steps.push(Step::Rows(coordinates.clone()));
    }

    /// Changes the coordinates of the input of the tensor `name`, which is no decoder linear layer (router, head).
    pub(crate) fn change_tensor_input(
        &mut self,
        name: String,
        shape: (usize, usize),
        coordinates: &Coordinates,
    ) {
        self.change(name, shape).steps.push(Step::Input(coordinates.clone()));
    }

    /// Changes the coordinates of the output of the norm `module`.
    pub(crate) fn norm(&mut self, module: &str, width: usize, form: NormParts, coordinates: &Coordinates) {
        let change = self.change(format!("{module}.weight"), (1, width));
        change.plus_one = form.plus_one;
        change.steps.push(Step::Rows(coordinates.clone()));
        if form.bias {
            self.change_rows(format!("{module}.bias"), (1, width), coordinates);
        }
    }

    /// Rotates the input of `info` at run time, and its weight to match.
    pub(crate) fn rotate_input(&mut self, info: &LinearInfo, rotation: &Hadamard) {
        self.change_input(info, &Coordinates::Rotated(rotation.clone()));
        self.rotations.insert(info.module.clone(), rotation.clone());
    }

    /// Unties the head: it becomes a tensor of its own that starts as a copy of the embedding.
    pub(crate) fn untie(&mut self, head: String, embedding: String, config: Option<&Value>) {
        self.untied = Some((head, embedding));
        self.config = config.cloned().map(|mut config| {
            untie(&mut config);
            config
        });
    }

    /// Returns the gradient of a loss with respect to a small rotation of `of`. If `M` becomes `(1 + A) M` with a small
    /// skew-symmetric `A`, the loss changes by `Σ S[i, j] A[i, j]` to first order; `S`, `[n, n]`, is returned. `tensor`
    /// gives the values of a changed tensor and the loss's gradient with respect to them.
    ///
    /// A vector `x` becomes `x + A x`, so `S` is the sum of `g xᵀ` over all vectors. Rows that read a vector turn
    /// likewise.
    pub(crate) fn rotation_gradient<'t>(
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
                    Step::Input(coordinates) | Step::Rows(coordinates) => (coordinates, change.transposed),
                    Step::Output(coordinates) => (coordinates, !change.transposed),
                };
                let turned = matches!(coordinates, Coordinates::Turned(matrix) if Arc::ptr_eq(matrix, of));
                let Some((values, gradient)) = tensor(name).filter(|_| turned) else { continue };
                if columns {
                    // `gemm_tn` sums over rows, so vectors that lie in columns are transposed first.
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

    /// Returns the untied head's tensor and the embedding that it starts as.
    pub(crate) fn untied(&self) -> Option<(&str, &str)> {
        self.untied.as_ref().map(|(head, embedding)| (head.as_str(), embedding.as_str()))
    }
}

/// Form of a norm.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NormParts {
    /// True if it stores the difference of its weights from 1.
    pub(crate) plus_one: bool,
    /// True if it adds a bias.
    pub(crate) bias: bool,
}

/// Dense model as the pipeline reads it, with or without changed coordinates.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Folded<'a> {
    files: &'a ModelFiles,
    folds: Option<&'a Folds>,
}

impl<'a> Folded<'a> {
    /// Reads `files` unchanged.
    pub(crate) fn plain(files: &'a ModelFiles) -> Self {
        Folded { files, folds: None }
    }

    pub(crate) fn new(files: &'a ModelFiles, folds: &'a Folds) -> Self {
        Folded { files, folds: Some(folds) }
    }

    /// Returns the unchanged files.
    pub(crate) fn files(&self) -> &'a ModelFiles {
        self.files
    }

    /// Returns the model's folder.
    pub(crate) fn path(&self) -> &'a Path {
        self.files.dir()
    }

    /// Returns the name of the stored tensor that `name` is made from: the embedding for an untied head.
    pub(crate) fn stored_name<'n>(&self, name: &'n str) -> &'n str
    where
        'a: 'n,
    {
        let untied = self.folds.and_then(Folds::untied).filter(|(head, _)| *head == name);
        untied.map_or(name, |(_, embedding)| embedding)
    }

    /// Returns the stored tensor that `name` is made from.
    pub(crate) fn stored(&self, name: &str) -> Option<&'a TensorMeta> {
        self.files.checkpoint().get(self.stored_name(name))
    }

    /// True if the tensor `name` differs from the files.
    pub(crate) fn changes(&self, name: &str) -> bool {
        self.folds.is_some_and(|folds| folds.has(name))
    }

    /// Returns the tensor `name` as f32, with its changes.
    ///
    /// # Errors
    /// Errors of [`ModelFiles::tensor_f32`].
    pub(crate) fn tensor(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, mantissa_store::Error> {
        let Some(folds) = self.folds else { return self.files.tensor_f32(name, shape) };
        let values = self.files.tensor_f32(self.stored_name(name), shape)?;
        Ok(match folds.changes.get(name) {
            Some(change) if change.rows * change.cols == values.len() => change.apply(values),
            _ => values,
        })
    }

    /// Returns the tensor `name`, with its changes, as bytes of `dtype`, rounded to nearest even.
    ///
    /// # Errors
    /// Errors of [`tensor`](Self::tensor).
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

/// Returns the little-endian bytes of `v` in a float dtype.
pub(crate) fn round_to(v: f32, dtype: Dtype) -> Vec<u8> {
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

/// Rounds `v` to `dtype` and back.
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

    fn has_linear(&self, module: &str) -> bool {
        let head = self.folds.and_then(Folds::untied).and_then(|(head, _)| head.strip_suffix(".weight"));
        self.files.has_linear(module) || head == Some(module)
    }

    fn tensor_f32(&self, tensor: &str, shape: &[usize]) -> Result<Vec<f32>, LoadError> {
        Ok(self.tensor(tensor, shape)?)
    }

    fn linear(&self, module: &str, rows: usize, cols: usize, bias: bool) -> Result<LinearWeight, LoadError> {
        let (weight, bias_name) = (format!("{module}.weight"), format!("{module}.bias"));
        let own = self.stored_name(&weight) == weight;
        if own && !self.changes(&weight) && !self.changes(&bias_name) {
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
