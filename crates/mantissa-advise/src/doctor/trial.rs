//! Alternatives judged by the loss on a text.

use mantissa_eval::stats::estimate;
use mantissa_eval::{Evaluation, Sequence, evaluate};
use mantissa_model::{Decoder, Linear, LinearInfo, LinearKind, ModelConfig};
use mantissa_store::convention::ModelFiles;
use serde::Serialize;

use super::altered::{Altered, Scope};
use super::{ALTERNATIVES, Alternative, Baseline, Diagnosis, Fault};
use crate::error::AdviseError;

/// Least improvement of the mean loss that counts, nats.
const LEAST: f64 = 0.02;

/// Standard errors that an improvement must exceed.
const ERRORS: f64 = 3.0;

/// An alternative and its loss.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Trial {
    /// Its name.
    pub alternative: &'static str,
    /// Where it was applied.
    pub scope: String,
    /// Tensors that it changed.
    pub tensors: usize,
    /// Mean loss, nats; absent where the model gives no numbers.
    pub nll: Option<f64>,
    /// `exp(nll)`.
    pub ppl: Option<f64>,
    /// Loss less that of the model as it is, nats.
    pub delta_nll: Option<f64>,
    /// Its paired standard error.
    pub delta_nll_se: Option<f64>,
}

impl Trial {
    fn improves(&self) -> bool {
        let noise = self.delta_nll_se.filter(|se| se.is_finite()).unwrap_or(0.0);
        self.delta_nll.is_some_and(|delta| delta < -LEAST && delta < -ERRORS * noise)
    }

    fn delta(&self) -> f64 {
        self.delta_nll.unwrap_or(f64::INFINITY)
    }
}

/// Steps of [`examine`], each an alternative on the whole model, a layer or a tensor; a fault that the whole model shows takes fewer.
pub fn steps(config: &ModelConfig) -> usize {
    ALTERNATIVES.len() * (1 + config.num_hidden_layers + config.linears().len())
}

/// Tries the alternatives on `sequences`. `progress` is told the number of [`steps`] done.
///
/// # Errors
/// The model cannot be loaded or run as it is.
pub fn examine(
    files: &ModelFiles,
    sequences: &[Sequence],
    threads: usize,
    progress: &dyn Fn(usize),
) -> Result<Diagnosis, AdviseError> {
    let decoder = Decoder::load(files)?;
    let base = evaluate(&decoder, None, sequences, threads, &|_| {})?;
    let baseline = Baseline { nll: base.nll, ppl: base.ppl, tokens: base.tokens };
    let config = decoder.config().clone();
    let mut tried = Trying {
        files,
        config,
        sequences,
        threads,
        decoder,
        progress,
        done: 0,
        found: Diagnosis { baseline: Some(baseline), ..Diagnosis::default() },
    };
    let applicable = tried.everywhere()?;
    tried.found.fault = match tried.best() {
        Some(Alternative::OtherBos) => {
            Some(Fault::of(Alternative::OtherBos, "the first token".to_owned(), Vec::new()))
        }
        Some(alternative) => Some(tried.locate(alternative)?),
        None => tried.in_parts(&applicable)?,
    };
    Ok(tried.found)
}

struct Trying<'a> {
    files: &'a ModelFiles,
    config: ModelConfig,
    sequences: &'a [Sequence],
    threads: usize,
    /// The model as it is, between trials.
    decoder: Decoder,
    progress: &'a dyn Fn(usize),
    done: usize,
    found: Diagnosis,
}

impl Trying<'_> {
    /// Every alternative on the whole model; gives those that change something.
    fn everywhere(&mut self) -> Result<Vec<Alternative>, AdviseError> {
        let mut applicable = Vec::new();
        for entry in &ALTERNATIVES {
            self.step();
            let alternative = entry.alternative;
            if alternative == Alternative::OtherBos {
                match self.other_bos()? {
                    Some(trial) => self.found.trials.push(trial),
                    None => self.found.not_applicable.push(entry.name),
                }
                continue;
            }
            let source = Altered::new(self.files, &self.config, alternative, Scope::All);
            let altered = Decoder::load(&source)?;
            let changed = source.changed();
            if changed == 0 {
                self.found.not_applicable.push(entry.name);
                continue;
            }
            applicable.push(alternative);
            let trial = self.trial(alternative, "the whole model".to_owned(), changed, &altered);
            self.found.trials.push(trial);
        }
        Ok(applicable)
    }

    /// The alternative on the whole model that improves the loss most.
    fn best(&self) -> Option<Alternative> {
        let improving = self.found.trials.iter().filter(|trial| trial.improves());
        let best = improving.min_by(|a, b| a.delta().total_cmp(&b.delta()))?;
        let entry = ALTERNATIVES.iter().find(|entry| entry.name == best.alternative)?;
        Some(entry.alternative)
    }

    fn trial(&mut self, alternative: Alternative, scope: String, tensors: usize, altered: &Decoder) -> Trial {
        let measured = evaluate(altered, Some(&self.decoder), self.sequences, self.threads, &|_| {});
        of_evaluation(alternative, scope, tensors, measured.ok().as_ref())
    }

    fn step(&mut self) {
        self.done += 1;
        (self.progress)(self.done);
    }

    /// The layers that an alternative for the whole model concerns: those without which it repairs less.
    fn locate(&mut self, alternative: Alternative) -> Result<Fault, AdviseError> {
        let repaired = Decoder::load(&Altered::new(self.files, &self.config, alternative, Scope::All))?;
        let mut layers = Vec::new();
        for layer in 0..self.config.num_hidden_layers {
            let source = Altered::new(self.files, &self.config, alternative, Scope::Without(layer));
            let without = Decoder::load(&source)?;
            self.step();
            let compared = evaluate(&without, Some(&repaired), self.sequences, self.threads, &|_| {})?;
            let worse = compared.comparison.is_some_and(|c| c.delta_nll > 0.0 || c.delta_nll.is_nan());
            if worse {
                layers.push(layer);
            }
        }
        let first = layers.first().copied().unwrap_or(0);
        let tensor = match alternative.of_norms() {
            Some(_) => format!("model.layers.{first}.input_layernorm.weight"),
            None => self.first_changed(alternative, first)?,
        };
        Ok(Fault::of(alternative, tensor, layers))
    }

    /// The first linear layer of layer `layer` that an alternative says something about.
    fn first_changed(&self, alternative: Alternative, layer: usize) -> Result<String, AdviseError> {
        for info in self.config.linears().into_iter().filter(|info| info.layer == layer) {
            if alternative.linear(self.files, &self.config, &info)?.is_some() {
                return Ok(format!("{}.weight", info.module));
            }
        }
        Ok(format!("model.layers.{layer}"))
    }

    /// Alternatives on each layer, and then on each tensor, by itself: for a fault that not all of them share.
    fn in_parts(&mut self, applicable: &[Alternative]) -> Result<Option<Fault>, AdviseError> {
        let linears = self.config.linears();
        let layers: Vec<Vec<&LinearInfo>> = (0..self.config.num_hidden_layers)
            .map(|layer| linears.iter().filter(|info| info.layer == layer).collect())
            .collect();
        let parts: Vec<Vec<&LinearInfo>> =
            layers.into_iter().chain(linears.iter().map(|info| vec![info])).collect();
        let mut best: Option<(Trial, Alternative, String, usize)> = None;
        for part in &parts {
            let scope = match part.as_slice() {
                [one] => one.module.clone(),
                [first, ..] => format!("layer {}", first.layer),
                [] => continue,
            };
            for &alternative in applicable.iter().filter(|a| a.of_norms().is_none()) {
                self.step();
                let Some((trial, tensor)) = self.in_part(alternative, part, &scope)? else { continue };
                let better = best.as_ref().is_none_or(|(known, ..)| trial.delta() < known.delta());
                if trial.improves() && better {
                    best = Some((trial, alternative, tensor, part[0].layer));
                }
            }
        }
        Ok(best.map(|(trial, alternative, tensor, layer)| {
            self.found.trials.push(trial);
            Fault::of(alternative, tensor, vec![layer])
        }))
    }

    /// One alternative on some linear layers; the first tensor that it changes.
    fn in_part(
        &mut self,
        alternative: Alternative,
        part: &[&LinearInfo],
        scope: &str,
    ) -> Result<Option<(Trial, String)>, AdviseError> {
        let mut changed: Vec<(usize, LinearKind, Linear)> = Vec::new();
        let mut tensor = None;
        for info in part {
            if let Some(weight) = alternative.linear(self.files, &self.config, info)? {
                changed.push((info.layer, info.kind, Linear::new(&info.module, weight)?));
                tensor.get_or_insert_with(|| format!("{}.weight", info.module));
            }
        }
        let Some(tensor) = tensor else { return Ok(None) };
        let mut altered = self.decoder.clone();
        let tensors = changed.len();
        for (layer, kind, linear) in changed {
            if let Some(place) = altered.layers_mut()[layer].linear_mut(kind) {
                *place = linear;
            }
        }
        Ok(Some((self.trial(alternative, scope.to_owned(), tensors, &altered), tensor)))
    }

    /// The text with the other beginning: the same tokens are predicted, so that losses compare.
    fn other_bos(&mut self) -> Result<Option<Trial>, AdviseError> {
        let Some(bos) = self.config.bos_token_id else { return Ok(None) };
        let has = self.sequences.iter().all(|s| s.tokens.first() == Some(&bos));
        let longest = self.config.max_position_embeddings;
        let (mut with, mut without) = (Vec::new(), Vec::new());
        for sequence in self.sequences {
            let text = if has { &sequence.tokens[1..] } else { &sequence.tokens[..] };
            let text = &text[..text.len().min(longest - 1)];
            if text.len() < 2 {
                continue;
            }
            with.push(Sequence { tokens: [&[bos][..], text].concat(), from: 2 });
            without.push(Sequence { tokens: text.to_vec(), from: 1 });
        }
        if with.is_empty() {
            return Ok(None);
        }
        let run = |s: &[Sequence]| evaluate(&self.decoder, None, s, self.threads, &|_| {});
        let (is, other) = if has { (run(&with)?, run(&without)?) } else { (run(&without)?, run(&with)?) };
        let pairs = is.windows.iter().zip(&other.windows);
        let deltas = pairs.map(|(is, other)| {
            let mut delta = other.nll;
            delta.sum -= is.nll.sum;
            delta
        });
        let deltas: Vec<_> = deltas.collect();
        let delta = estimate(&deltas);
        let mut trial = of_evaluation(Alternative::OtherBos, "the text".to_owned(), 0, Some(&other));
        // Of one window nothing is known about the spread of differences.
        (trial.delta_nll, trial.delta_nll_se) = (Some(delta.mean), (deltas.len() > 1).then_some(delta.se));
        Ok(Some(trial))
    }
}

fn of_evaluation(
    alternative: Alternative,
    scope: String,
    tensors: usize,
    measured: Option<&Evaluation>,
) -> Trial {
    let finite = measured.filter(|e| e.nll.is_finite());
    let compared = finite.and_then(|e| e.comparison.as_ref());
    Trial {
        alternative: alternative.entry().name,
        scope,
        tensors,
        nll: finite.map(|e| e.nll),
        ppl: finite.map(|e| e.ppl),
        delta_nll: compared.map(|c| c.delta_nll),
        delta_nll_se: compared.map(|c| c.delta_nll_se).filter(|se| se.is_finite()),
    }
}
