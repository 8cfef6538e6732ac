//! Compares a model with its source: per tensor, per layer on equal inputs, and end to end.

use mantissa_eval::Sequence;
use mantissa_kernels::kernels;
use mantissa_model::{Buffers, Half, Layer, LinearInput, LinearKind, ModelConfig, load_config};
use mantissa_store::convention::ModelFiles;
use serde::Serialize;

use super::config::differing_field;
use super::pair::{Comparing, DIAGONAL, Layers, beyond};
use super::tensors::{TensorRow, dense_rows, in_order, linear_rows, rounded_layer};
use super::tokenizer::tokenizer_fault;
use super::{Alternative, Diagnosis, Fault, wrong_label};
use crate::error::{AdviseError, Result};
use crate::run::{Ends, States, each, silenced, through};
use crate::values::relative_error;

/// Windows for the layer comparison, and tokens of each.
const WINDOWS: usize = 4;
const TOKENS: usize = 32;

/// One layer, or its attention or MLP alone, run in both models on the same input.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LayerRow {
    /// Layer index.
    pub layer: usize,
    /// `attention`, `mlp`, or `layer` if the two cannot be separated.
    pub part: &'static str,
    /// `||y - y_ref|| / ||y_ref - x||`: relative deviation of what the layer adds to the residual stream.
    pub deviation: f64,
    /// The same deviation for the source rounded to nearest under the model's schemes.
    pub expected: f64,
    /// True if the deviation exceeds what the schemes explain.
    pub faulty: bool,
}

/// End-to-end comparison.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Whole {
    /// Mean KL(reference ‖ model), nats.
    pub kl: f64,
    /// The same KL for the source rounded to nearest under the model's schemes.
    pub expected: f64,
    /// True if the KL exceeds what the schemes explain.
    pub faulty: bool,
}

/// Compares `files` with `reference` on the first of `windows`, or on random tokens if there are none.
///
/// # Errors
/// Unreadable files, or models of different shapes.
pub fn against(
    files: &ModelFiles,
    reference: &ModelFiles,
    windows: &[Sequence],
    threads: usize,
    progress: &dyn Fn(usize),
) -> Result<Diagnosis> {
    let (config, theirs) = (load_config(files)?, load_config(reference)?);
    check_same_shape(files, reference, &config, &theirs)?;
    let windows = short(windows, &config);
    let comparing =
        Comparing { files, reference, config: &config, theirs: &theirs, threads, windows: &windows };
    let found = comparing.run(progress)?;
    let fault = found.fault.or_else(|| wrong_label(files));
    Ok(Diagnosis { fault, ..found })
}

/// Checks that two models have the same layers, width and vocabulary.
///
/// # Errors
/// [`AdviseError::Reference`].
pub(crate) fn check_same_shape(
    files: &ModelFiles,
    reference: &ModelFiles,
    config: &ModelConfig,
    theirs: &ModelConfig,
) -> Result<()> {
    let shape = |c: &ModelConfig| [c.num_hidden_layers, c.hidden_size, c.vocab_size];
    if shape(config) == shape(theirs) {
        return Ok(());
    }
    let place = |files: &ModelFiles| files.dir().display().to_string();
    let [layers, width, vocabulary] = shape(theirs);
    let found = format!("{layers} layers of width {width} and {vocabulary} tokens");
    Err(AdviseError::Reference { reference: place(reference), model: place(files), found })
}

/// Predicts the peak memory of [`against`] in bytes, beyond the process: embedding and head of both models,
/// one layer of each, and one weight as stored, as in the source, and as rounded.
///
/// # Errors
/// The configuration of `files` is invalid.
pub fn bytes_against(files: &ModelFiles, reference: &ModelFiles, threads: usize) -> Result<u64> {
    let config = load_config(files)?;
    let table = (config.vocab_size * config.hidden_size) as u64;
    let stored = |files: &ModelFiles| {
        let tables = files.checkpoint().tensors().filter(|meta| meta.numel() == table).map(|meta| meta.len);
        2 * tables.max().unwrap_or(4 * table)
    };
    let linears = config.layer_linears(0);
    let layer: u64 = linears.iter().map(|l| (l.rows * l.cols) as u64).sum();
    let widest = linears.iter().map(|l| (l.rows * l.cols) as u64).max().unwrap_or(0);
    let tokens = TOKENS.min(config.max_position_embeddings);
    let states = (2 * 3 * WINDOWS * tokens * config.hidden_size * 4) as u64;
    let logits = (4 * crate::run::ROWS * config.vocab_size * 4) as u64;
    let pass = Buffers::bytes_needed(&config, tokens, tokens).saturating_add(logits);
    let held = stored(files) + stored(reference) + 8 * layer + (16 * widest).max(8 * table) + states;
    Ok(held.saturating_add(pass.saturating_mul(threads.clamp(1, WINDOWS) as u64)))
}

/// Takes the beginning of the text, or random tokens.
fn short(windows: &[Sequence], config: &ModelConfig) -> Vec<Sequence> {
    let most = TOKENS.min(config.max_position_embeddings);
    let cut = |tokens: Vec<u32>| Sequence { tokens, from: 1 };
    let usable = windows.iter().filter(|window| !window.tokens.is_empty());
    let given: Vec<_> =
        usable.take(WINDOWS).map(|window| cut(window.tokens.iter().copied().take(most).collect())).collect();
    if !given.is_empty() {
        return given;
    }
    let vocabulary = config.vocab_size as u64;
    let token = |window: usize, i: usize| {
        (u64::from(mantissa_num::round::random_u32(1 + window as u64, i as u64)) % vocabulary) as u32
    };
    (0..WINDOWS).map(|window| cut((0..most).map(|i| token(window, i)).collect())).collect()
}

/// Hidden states of three models after the layers so far: the source, the model, and the source rounded under
/// the model's schemes.
struct Chains {
    reference: States,
    ours: States,
    rounded: States,
}

impl Chains {
    /// Runs the next layer of each model.
    fn after(&self, of: &Comparing<'_>, layers: &Layers) -> Result<Self> {
        Ok(Chains {
            reference: through(&layers.reference, of.theirs, &self.reference, of.threads)?,
            ours: through(&layers.ours, of.config, &self.ours, of.threads)?,
            rounded: through(&layers.rounded, of.theirs, &self.rounded, of.threads)?,
        })
    }
}

impl Comparing<'_> {
    fn run(&self, progress: &dyn Fn(usize)) -> Result<Diagnosis> {
        let mut found = Diagnosis::default();
        let (ends, own_ends) =
            (Ends::load(self.reference, self.theirs)?, Ends::load(self.files, self.config)?);
        let states = ends.embed(self.theirs, self.windows)?;
        let ours = own_ends.embed(self.config, self.windows)?;
        let mut chains = Chains { rounded: states.clone(), reference: states, ours };
        let mut by_config = None;
        found.tensors = dense_rows(self, None)?;
        for number in 0..self.config.num_hidden_layers {
            let (rows, rounded) = linear_rows(self, number)?;
            found.tensors.extend(rows);
            found.tensors.extend(dense_rows(self, Some(number))?);
            let layers = Layers {
                reference: Layer::load(self.reference, self.theirs, number)?,
                ours: Layer::load(self.files, self.config, number)?,
                rounded: rounded_layer(self, number, rounded)?,
            };
            let rows = self.layer(number, &layers, &chains.reference)?;
            // Only the first deviating layer is searched for a config field, and only if its tensors do not
            // explain it.
            if by_config.is_none() && rows.iter().any(|row| row.faulty) {
                let sound = found.tensors.iter().all(|row| row.layer != Some(number) || !row.faulty);
                by_config = Some(if sound {
                    differing_field(self, number, &layers, &chains.reference)?
                } else {
                    None
                });
            }
            found.layers.extend(rows);
            chains = chains.after(self, &layers)?;
            progress(number + 1);
        }
        in_order(self, &mut found.tensors);
        let whole = self.whole(&ends, &own_ends, &chains)?;
        found.whole = Some(whole);
        found.fault = verdict(self, &found, whole, by_config.flatten())
            .or_else(|| tokenizer_fault(self.files, self.reference));
        if found.fault.is_none() && whole.faulty {
            found.undecided = Some(
                "the models' predictions differ by more than the schemes explain, but no single tensor or layer does",
            );
        }
        Ok(found)
    }

    /// Compares what each part of a layer adds to the same input.
    fn layer(&self, number: usize, layers: &Layers, states: &States) -> Result<Vec<LayerRow>> {
        let ends = |half: Half| -> Vec<LinearKind> {
            let kinds = layers.ours.linears().map(|(kind, _)| kind);
            // The result of a mixer beside attention stays in both runs.
            kinds.filter(|kind| kind.writes() == Some(half) && kind.input() != LinearInput::Mixed).collect()
        };
        let (attention, mlp) = (ends(Half::Mixing), ends(Half::Mlp));
        let parts = match attention.is_empty() || mlp.is_empty() {
            true => vec![("layer", Vec::new())],
            // The other part is zeroed, so that it adds nothing.
            false => vec![("attention", mlp), ("mlp", attention)],
        };
        let row = |(part, silent): (&'static str, Vec<LinearKind>)| {
            let run = |layer: &Layer, config: &ModelConfig| -> Result<Vec<f32>> {
                let out = through(&silenced(layer, &silent)?, config, states, self.threads)?;
                let pairs = out.iter().flatten().zip(states.iter().flatten());
                Ok(pairs.map(|(y, x)| y - x).collect())
            };
            let right = run(&layers.reference, self.theirs)?;
            let deviation = relative_error(&run(&layers.ours, self.config)?, &right);
            let expected = relative_error(&run(&layers.rounded, self.theirs)?, &right);
            Ok(LayerRow { layer: number, part, deviation, expected, faulty: beyond(deviation, expected) })
        };
        parts.into_iter().map(row).collect()
    }

    fn whole(&self, ends: &Ends, own: &Ends, chains: &Chains) -> Result<Whole> {
        let kl = each(self.windows.len(), self.threads, |i| {
            let mut right: Vec<Vec<f32>> = Vec::new();
            ends.logits(&chains.reference[i], |_, logits| right.push(logits.to_vec()))?;
            let (mut ours, mut rounded) = (0.0, 0.0);
            own.logits(&chains.ours[i], |row, logits| ours += divergence(&right[row], logits))?;
            ends.logits(&chains.rounded[i], |row, logits| rounded += divergence(&right[row], logits))?;
            Ok((ours, rounded, right.len()))
        })?;
        let positions: usize = kl.iter().map(|(.., n)| n).sum();
        let mean =
            |of: fn(&(f64, f64, usize)) -> f64| kl.iter().map(of).sum::<f64>() / positions.max(1) as f64;
        let (kl, expected) = (mean(|kl| kl.0), mean(|kl| kl.1));
        Ok(Whole { kl, expected, faulty: beyond(kl, expected) })
    }
}

/// Returns `KL(p ‖ q)` of two logit vectors, nats.
pub(crate) fn divergence(p: &[f32], q: &[f32]) -> f64 {
    let [a, b] = [p, q].map(|row| kernels().log_softmax_stats(row));
    let term = |(&p, &q): (&f32, &f32)| {
        let log_p = -a.nll(p);
        log_p.exp() * (log_p + b.nll(q))
    };
    p.iter().zip(q).map(term).sum()
}

/// Derives the fault from the comparison. A tensor that an alternative restores to the source is faulty even
/// if the model's output is right; other tensors count only in a layer whose output deviates.
fn verdict(of: &Comparing<'_>, found: &Diagnosis, whole: Whole, by_config: Option<Fault>) -> Option<Fault> {
    if let Some(row) = found.tensors.iter().find(|row| row.repaired) {
        return restored(found, row);
    }
    let first = found.layers.iter().find(|row| row.faulty);
    let table = found.tensors.iter().find(|row| row.layer.is_none() && row.faulty);
    // A rotated model has different tensors everywhere but the same outputs.
    let Some(row) = first.filter(|_| whole.faulty || table.is_none()) else {
        let table = table.filter(|_| whole.faulty)?;
        let cause =
            "the tensor differs from the source: it belongs to another model or a permuted vocabulary";
        let fix = "copy the tensor from the source";
        return Some(Fault::unknown(table.tensor.clone(), Vec::new(), cause, fix));
    };
    let mut layers: Vec<usize> = found.layers.iter().filter(|row| row.faulty).map(|row| row.layer).collect();
    layers.dedup();
    match by_config {
        Some(fault) => Some(Fault { layers, ..fault }),
        None => Some(blamed(of, found, row.layer, layers)),
    }
}

/// Returns the fault of the tensors that the same alternative restores as `row`.
fn restored(found: &Diagnosis, row: &TensorRow) -> Option<Fault> {
    let name = row.best.map(|(name, _)| name)?;
    let same = found.tensors.iter().filter(|r| r.repaired && r.best.map(|(name, _)| name) == Some(name));
    let mut layers: Vec<usize> = same.filter_map(|row| row.layer).collect();
    layers.dedup();
    Some(Fault::of(Alternative::named(name)?, row.tensor.clone(), layers))
}

/// Returns the fault of the first deviating layer `first`: a damaged tensor, unmatched column scales, or the config.
fn blamed(of: &Comparing<'_>, found: &Diagnosis, first: usize, layers: Vec<usize>) -> Fault {
    let mut other = found.tensors.iter().filter(|tensor| tensor.layer == Some(first) && tensor.faulty);
    // Column-scaled tensors and norms are usually a method's doing, so a damaged tensor is blamed first.
    let damaged = other.clone().find(|tensor| !tensor.diagonal && !tensor.is_norm);
    let scaled = other.clone().find(|tensor| tensor.diagonal);
    match (damaged, scaled, other.next()) {
        (Some(tensor), ..) | (None, None, Some(tensor)) => Fault::unknown(
            tensor.tensor.clone(),
            layers,
            "no known disagreement: the tensor is damaged or belongs to another model",
            "quantize it again from the source",
        ),
        (None, Some(tensor), _) => Fault {
            alternative: Some(DIAGONAL),
            ..Fault::unknown(
                tensor.tensor.clone(),
                layers,
                "its columns are scaled (AWQ, SmoothQuant), but the norm before it does not undo the scaling",
                "fold the scales into the norm, or store them (pre_quant_scale)",
            )
        },
        (None, None, None) => Fault::unknown(
            of.config.attention_module(first).trim_end_matches(".self_attn").to_owned(),
            layers,
            "its tensors match the source within their schemes, but its output does not: the config differs",
            "compare config.json with the source's",
        ),
    }
}
