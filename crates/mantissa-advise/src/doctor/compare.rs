//! A model against the one that it was made from, layer by layer on the same states.

use mantissa_eval::Sequence;
use mantissa_model::{Buffers, Layer, Linear, LinearInfo, ModelConfig, Role, load_embedding};
use mantissa_num::Scheme;
use mantissa_quant::{model_config, rtn, rule_of};
use mantissa_store::convention::{LinearWeight, ModelFiles, Weight};
use serde::Serialize;

use super::alternative::{ALTERNATIVES, Alternative};
use super::{Diagnosis, Fault};
use crate::error::AdviseError;
use crate::values::{relative_error, values};

type Result<T> = std::result::Result<T, AdviseError>;

/// A deviation is a fault beyond this many times what rounding to nearest under the same scheme explains, and this much.
const TIMES: f64 = 3.0;
const SLACK: f64 = 0.02;

/// Tokens that layers are compared on.
const TOKENS: usize = 64;

/// A layer of both models on the same states.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LayerRow {
    /// Its number.
    pub layer: usize,
    /// `||y - y_ref|| / ||y_ref - x||`: the deviation of what it adds to its states.
    pub deviation: f64,
    /// The same of the reference rounded to nearest under the schemes of the model.
    pub expected: f64,
    /// Whether it deviates by more than its schemes explain.
    pub faulty: bool,
}

/// A tensor of both models.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TensorRow {
    /// Its name.
    pub tensor: String,
    /// `||w - w_ref|| / ||w_ref||`.
    pub error: f64,
    /// The same of the reference rounded to nearest under its scheme.
    pub expected: f64,
    /// Whether it deviates by more than its scheme explains.
    pub faulty: bool,
    /// The alternative under which it deviates least, and by how much, where it is faulty.
    pub best: Option<(&'static str, f64)>,
}

fn beyond(error: f64, expected: f64) -> bool {
    error.is_nan() || error > TIMES * expected + SLACK
}

/// Compares `files` with `reference` on the first of `sequences`, or on tokens of no meaning where there are none.
///
/// # Errors
/// What cannot be read; models of different shapes.
pub fn against(
    files: &ModelFiles,
    reference: &ModelFiles,
    sequences: &[Sequence],
    threads: usize,
    progress: &dyn Fn(usize),
) -> Result<Diagnosis> {
    let (config, theirs) = (model_config(files)?, model_config(reference)?);
    if (config.num_hidden_layers, config.hidden_size, config.vocab_size)
        != (theirs.num_hidden_layers, theirs.hidden_size, theirs.vocab_size)
    {
        let place = |files: &ModelFiles| files.dir().display().to_string();
        let found = format!("{} layers of width {}", theirs.num_hidden_layers, theirs.hidden_size);
        return Err(AdviseError::Reference { reference: place(reference), model: place(files), found });
    }
    let comparing = Comparing { files, reference, config: &config, theirs: &theirs, threads };
    let mut found = Diagnosis::default();
    comparing.tables(&mut found)?;
    comparing.layers(sequences, progress, &mut found)?;
    if let Some(first) = found.layers.iter().find(|row| row.faulty).map(|row| row.layer) {
        let all: Vec<usize> = found.layers.iter().filter(|row| row.faulty).map(|row| row.layer).collect();
        comparing.tensors(first, &mut found)?;
        if found.fault.is_none() {
            found.fault = Some(comparing.fault(first, all, &found.tensors));
        }
    }
    Ok(found)
}

struct Comparing<'a> {
    files: &'a ModelFiles,
    reference: &'a ModelFiles,
    config: &'a ModelConfig,
    theirs: &'a ModelConfig,
    threads: usize,
}

impl Comparing<'_> {
    /// Embedding, head and last norm.
    fn tables(&self, found: &mut Diagnosis) -> Result<()> {
        let d = self.config.hidden_size;
        let (embedding, head) = (self.config.embedding_module(), self.config.head_module());
        let tied = self.config.tie_word_embeddings || self.theirs.tie_word_embeddings;
        for module in [Some(embedding.as_str()), Some(head).filter(|_| !tied)].into_iter().flatten() {
            let read = |files: &ModelFiles| -> Result<Vec<f32>> {
                Ok(values(module, files.linear(module, self.config.vocab_size, d, false)?)?)
            };
            let error = relative_error(&read(self.files)?, &read(self.reference)?);
            // Tables are rounded by a few schemes; what is not alike at all is another table.
            self.table(
                found,
                format!("{module}.weight"),
                error,
                0.1,
                "the table is not the source's: another or a permuted vocabulary",
            );
        }
        let norms = self.config.tensors().into_iter();
        for tensor in norms.filter(|tensor| tensor.role == Role::Norm { layer: None }) {
            let norm = |files: &ModelFiles| files.tensor_f32(&tensor.name, &tensor.shape);
            let error = relative_error(&norm(self.files)?, &norm(self.reference)?);
            self.table(found, tensor.name.clone(), error, SLACK, "the last norm is not the source's");
        }
        Ok(())
    }

    fn table(&self, found: &mut Diagnosis, tensor: String, error: f64, most: f64, cause: &'static str) {
        let faulty = error.is_nan() || error > most;
        if faulty && found.fault.is_none() {
            let cure = "take the tensor over from the source";
            found.fault =
                Some(Fault { tensor: tensor.clone(), layers: Vec::new(), alternative: None, cause, cure });
        }
        found.tensors.push(TensorRow { tensor, error, expected: 0.0, faulty, best: None });
    }

    fn layers(&self, sequences: &[Sequence], progress: &dyn Fn(usize), found: &mut Diagnosis) -> Result<()> {
        let tokens = self.tokens(sequences);
        let (n, d) = (tokens.len(), self.config.hidden_size);
        let mut states = vec![0.0; n * d];
        load_embedding(self.reference, self.theirs)?.embed(&tokens, &[n], 0, &mut states)?;
        let mut buffers = Buffers::plan(self.config, n, n)?;
        for layer in 0..self.config.num_hidden_layers {
            progress(layer);
            let mut run = |layer: &Layer, config: &ModelConfig| -> Result<Vec<f32>> {
                let mut out = states.clone();
                layer.run(config, &[n], &mut out, None, &mut buffers)?;
                Ok(out)
            };
            let reference = Layer::load(self.reference, self.theirs, layer)?;
            let right = run(&reference, self.theirs)?;
            let ours = run(&Layer::load(self.files, self.config, layer)?, self.config)?;
            let rounded = run(&self.rounded(reference, layer)?, self.theirs)?;
            let added: Vec<f32> = right.iter().zip(&states).map(|(y, x)| y - x).collect();
            let deviation = |y: &[f32]| {
                let y: Vec<f32> = y.iter().zip(&states).map(|(y, x)| y - x).collect();
                relative_error(&y, &added)
            };
            let (deviation, expected) = (deviation(&ours), deviation(&rounded));
            let faulty = beyond(deviation, expected);
            found.layers.push(LayerRow { layer, deviation, expected, faulty });
            states = right;
        }
        Ok(())
    }

    fn tokens(&self, sequences: &[Sequence]) -> Vec<u32> {
        let most = TOKENS.min(self.config.max_position_embeddings);
        if let Some(sequence) = sequences.first() {
            return sequence.tokens.iter().copied().take(most).collect();
        }
        let vocabulary = self.config.vocab_size as u64;
        let token = |i: usize| (u64::from(mantissa_num::round::random_u32(1, i as u64)) % vocabulary) as u32;
        (0..most).map(token).collect()
    }

    /// A layer of the reference, rounded to nearest under the schemes of the model.
    fn rounded(&self, mut layer: Layer, number: usize) -> Result<Layer> {
        for info in self.config.linears().into_iter().filter(|info| info.layer == number) {
            let ours = self.files.linear(&info.module, info.rows, info.cols, info.bias)?;
            let (values, input) = (self.reference_values(&info)?, ours.input.clone());
            let weight = self.round(&ours, &info, &values).unwrap_or(Weight::F32(values));
            let bias = if info.bias {
                Some(self.reference.tensor_f32(&format!("{}.bias", info.module), &[info.rows])?)
            } else {
                None
            };
            let (rows, cols, transforms) = (info.rows, info.cols, Default::default());
            let linear = LinearWeight { rows, cols, weight, bias, input, transforms };
            if let Some(place) = layer.linear_mut(info.kind) {
                *place = Linear::new(&info.module, linear)?;
            }
        }
        Ok(layer)
    }

    fn reference_values(&self, info: &LinearInfo) -> Result<Vec<f32>> {
        let weight = self.reference.linear(&info.module, info.rows, info.cols, false)?;
        Ok(values(&info.module, weight)?)
    }

    /// `values` under the format of a layer of the model; `None` where that is dense or cannot be written.
    fn round(&self, ours: &LinearWeight, info: &LinearInfo, values: &[f32]) -> Option<Weight> {
        let Weight::Quantized(q) = &ours.weight else { return None };
        let scheme = Scheme::new(q.format.clone(), rule_of(&q.format));
        let rounded = rtn::quantize(&scheme, values, info.rows, info.cols, None, self.threads);
        rounded.ok().map(|(q, _)| Weight::Quantized(q))
    }

    /// The tensors of layer `layer`, in the order of the forward pass, and the alternatives on those that are faulty.
    fn tensors(&self, layer: usize, found: &mut Diagnosis) -> Result<()> {
        let norms = self.config.tensors().into_iter();
        for tensor in norms.filter(|tensor| tensor.role == Role::Norm { layer: Some(layer) }) {
            let name = tensor.name;
            let ours = self.files.tensor_f32(&name, &tensor.shape)?;
            let theirs = self.reference.tensor_f32(&name, &tensor.shape)?;
            let error = relative_error(&ours, &theirs);
            let shifted = |by: f32| relative_error(&ours.iter().map(|v| v + by).collect::<Vec<_>>(), &theirs);
            let of_norms =
                ALTERNATIVES.iter().filter_map(|e| Some((e.name, shifted(e.alternative.of_norms()?))));
            let faulty = beyond(error, 0.0);
            let best = of_norms.min_by(|a, b| a.1.total_cmp(&b.1)).filter(|_| faulty);
            found.tensors.push(TensorRow { tensor: name, error, expected: 0.0, faulty, best });
        }
        for info in self.config.linears().into_iter().filter(|info| info.layer == layer) {
            found.tensors.push(self.tensor(&info)?);
        }
        Ok(())
    }

    fn tensor(&self, info: &LinearInfo) -> Result<TensorRow> {
        let ours = self.files.linear(&info.module, info.rows, info.cols, false)?;
        let theirs = self.reference_values(info)?;
        let expected = match self.round(&ours, info, &theirs) {
            Some(weight) => {
                let (rows, cols) = (info.rows, info.cols);
                let rounded = LinearWeight {
                    rows,
                    cols,
                    weight,
                    bias: None,
                    input: None,
                    transforms: Default::default(),
                };
                relative_error(&values(&info.module, rounded)?, &theirs)
            }
            None => 0.0,
        };
        let values_of = |weight| values(&info.module, weight);
        let decoded = values_of(ours)?;
        let error = relative_error(&decoded, &theirs);
        let faulty = beyond(error, expected);
        let mut best: Option<(&'static str, f64)> = None;
        let mut take = |name, error: f64| {
            if error < best.map_or(f64::INFINITY, |(_, known)| known) {
                best = Some((name, error));
            }
        };
        if faulty {
            for entry in &ALTERNATIVES {
                if let Some(mut weight) = entry.alternative.linear(self.files, self.config, info)? {
                    weight.bias = None;
                    take(entry.name, relative_error(&values_of(weight)?, &theirs));
                }
            }
            take(DIAGONAL, relative_error(&without_diagonal(&decoded, &theirs, info.cols), &theirs));
        }
        Ok(TensorRow { tensor: format!("{}.weight", info.module), error, expected, faulty, best })
    }

    /// What the rows say about layer `first`.
    fn fault(&self, first: usize, layers: Vec<usize>, rows: &[TensorRow]) -> Fault {
        let of_layer = format!("model.layers.{first}.");
        let faulty = rows.iter().find(|row| row.faulty && row.tensor.starts_with(&of_layer));
        let Some(row) = faulty else {
            let cause = "its tensors are the source's within their schemes, and what it computes is not: the config differs";
            let cure = "compare config.json with the source's";
            return Fault { tensor: format!("model.layers.{first}"), layers, alternative: None, cause, cure };
        };
        let repairs = row.best.filter(|(_, error)| !beyond(*error, row.expected) && *error < row.error / 2.0);
        match repairs.map(|(name, _)| name) {
            Some(DIAGONAL) => Fault {
                tensor: row.tensor.clone(),
                layers,
                alternative: Some(DIAGONAL),
                cause: "its columns are scaled (AWQ, SmoothQuant), and the norm before it does not undo that",
                cure: "fold the scales into the norm, or store them (pre_quant_scale)",
            },
            Some(name) => {
                let entry = ALTERNATIVES.iter().find(|entry| entry.name == name);
                let alternative = entry.map_or(Alternative::OtherBos, |entry| entry.alternative);
                Fault::of(alternative, row.tensor.clone(), layers)
            }
            None => Fault {
                tensor: row.tensor.clone(),
                layers,
                alternative: None,
                cause: "none of the known disagreements: the tensor is damaged or not of this model",
                cure: "quantize it again from the source",
            },
        }
    }
}

/// Name of the alternative that only a comparison can try.
const DIAGONAL: &str = "column scales undone";

/// `w` with each column scaled by what brings it nearest to `reference`.
fn without_diagonal(w: &[f32], reference: &[f32], cols: usize) -> Vec<f32> {
    let (mut dot, mut square) = (vec![0f64; cols], vec![0f64; cols]);
    for (w, r) in w.chunks_exact(cols.max(1)).zip(reference.chunks_exact(cols.max(1))) {
        for c in 0..cols {
            dot[c] += f64::from(w[c]) * f64::from(r[c]);
            square[c] += f64::from(w[c]) * f64::from(w[c]);
        }
    }
    let scale = |c: usize| if square[c] > 0.0 { (dot[c] / square[c]) as f32 } else { 0.0 };
    let scales: Vec<f32> = (0..cols).map(scale).collect();
    w.iter().enumerate().map(|(i, w)| w * scales[i % cols]).collect()
}
