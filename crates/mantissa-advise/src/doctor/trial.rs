//! Tries alternatives on a model and judges them by the loss on a text.

mod weights;

use mantissa_eval::Sequence;
use mantissa_model::{
    Layer, Linear, LinearKind, LoadError, ModelConfig, Role, SourceView, WeightSource, linear_weight,
    load_config,
};
use mantissa_store::convention::ModelFiles;
use serde::Serialize;

use super::alternative::Unit;
use super::change::LayerWeights;
use super::means::Mean;
use super::score::{Gain, LEAST_UNITS, PART_ERRORS, Score, WHOLE_ERRORS, entropy, with_and_without};
use super::settings;
use super::signs::Lean;
use super::{ALTERNATIVES, Alternative, Baseline, Diagnosis, Entry, Fault, wrong_label};
use crate::error::Result;
use crate::run::{Ends, State, States, silenced, through};

/// Alternative with its loss.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Trial {
    /// Name of the alternative.
    pub alternative: &'static str,
    /// Part of the model it was applied to.
    pub scope: String,
    /// Number of changed tensors.
    pub tensors: usize,
    /// Mean NLL, nats/token; absent if not finite.
    pub nll: Option<f64>,
    /// Perplexity, `exp(nll)`.
    pub ppl: Option<f64>,
    /// Perplexity of the unchanged model on the same tokens, where these are not the tokens of the baseline.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unchanged_ppl: Option<f64>,
    /// Gain over the unchanged model.
    pub gain: Option<Gain>,
    /// True if the gain is beyond doubt: lower loss and higher top-1 accuracy, in every part of the text.
    pub decisive: bool,
}

/// Returns the number of steps of [`examine`]: one per layer for the whole model and one per layer for its
/// parts.
pub fn steps(config: &ModelConfig) -> usize {
    2 * config.num_hidden_layers
}

/// Tries the alternatives on `windows`. `progress` receives the number of finished [`steps`].
///
/// # Errors
/// The unchanged model cannot be loaded or run.
pub fn examine(
    files: &ModelFiles,
    windows: &[Sequence],
    threads: usize,
    progress: &dyn Fn(usize),
) -> Result<Diagnosis> {
    let mut tried = Trying::new(files, windows, threads, progress)?;
    tried.everywhere()?;
    tried.settings()?;
    tried.finished()
}

/// As [`examine`], without the fields of the config.
///
/// # Errors
/// As there.
pub(crate) fn examine_tensors(
    files: &ModelFiles,
    windows: &[Sequence],
    threads: usize,
    progress: &dyn Fn(usize),
) -> Result<Diagnosis> {
    let mut tried = Trying::new(files, windows, threads, progress)?;
    tried.everywhere()?;
    tried.finished()
}

struct Trying<'a> {
    files: &'a ModelFiles,
    config: ModelConfig,
    windows: &'a [Sequence],
    threads: usize,
    progress: &'a dyn Fn(usize),
    /// NLL of a unigram model, nats/token.
    entropy: f64,
    ends: Ends,
    /// Unchanged layers.
    layers: Vec<Layer>,
    /// Score of the unchanged model.
    base: Option<Score>,
    /// Alternatives that change something.
    applicable: Vec<Alternative>,
    trials: Vec<Trial>,
    signs: Vec<Lean>,
    means: Vec<Mean>,
}

/// Alternative applied to the whole model, one layer at a time.
struct Whole {
    entry: &'static Entry,
    tensors: usize,
    /// Hidden states from the first changed layer on.
    states: Option<States>,
}

impl<'a> Trying<'a> {
    fn new(
        files: &'a ModelFiles,
        windows: &'a [Sequence],
        threads: usize,
        progress: &'a dyn Fn(usize),
    ) -> Result<Self> {
        let config = load_config(files)?;
        mantissa_eval::check_sequences(&config, windows)?;
        Ok(Trying {
            files,
            windows,
            threads,
            progress,
            entropy: entropy(windows),
            ends: Ends::load(files, &config)?,
            layers: Vec::with_capacity(config.num_hidden_layers),
            base: None,
            applicable: Vec::new(),
            trials: Vec::new(),
            signs: Vec::new(),
            means: Vec::new(),
            config,
        })
    }

    /// Concludes from the trials on the whole model; without a decisive one, tries its parts.
    fn finished(mut self) -> Result<Diagnosis> {
        let best = self.best();
        let fault = match best.and_then(Alternative::named) {
            Some(Alternative::OtherBos) => {
                Some(Fault::of(Alternative::OtherBos, "the first token".to_owned(), Vec::new()))
            }
            Some(alternative) => Some(self.locate(alternative)?),
            None => match best.and_then(settings::named) {
                Some(setting) => Some(setting.fault()),
                None => self.in_parts()?,
            },
        };
        let files = self.files;
        Ok(self.diagnosis(fault.or_else(|| wrong_label(files))))
    }

    /// Tries fields of the config with the values of published models: on a quarter of the windows first, then on all if
    /// promising.
    fn settings(&mut self) -> Result<()> {
        for setting in settings::of(&self.config) {
            let config = setting.applied(&self.config);
            let ends = Ends::load(self.files, &config)?;
            let run = |windows: &[Sequence]| {
                let mut states = ends.embed(&config, windows)?;
                for number in 0..config.num_hidden_layers {
                    let layer = Layer::load(self.files, &config, number)?;
                    states = through(&layer, &config, &states, self.threads)?;
                }
                Score::of(&ends, windows, &states, self.threads)
            };
            let few = run(&self.windows[..self.windows.len().div_ceil(4)])?;
            let promising = |few: &Score| {
                self.base.as_ref().is_none_or(|base| base.first(few.units()).gain(few).is_promising())
            };
            if few.as_ref().is_none_or(|few| !promising(few)) {
                continue;
            }
            let score = run(self.windows)?;
            let trial = self.trial_named(setting.name, "the config".to_owned(), 0, score);
            self.trials.push(trial);
        }
        Ok(())
    }

    /// Tries every alternative on the whole model.
    fn everywhere(&mut self) -> Result<()> {
        for whole in self.whole_models()? {
            let Some(states) = whole.states else { continue };
            let alternative = whole.entry.alternative;
            let score = match alternative.of_norms() {
                Some(by) => self.score(&Ends::load(&self.shifted(by), &self.config)?, &states)?,
                None => self.score(&self.ends, &states)?,
            };
            self.applicable.push(alternative);
            let trial = self.trial(alternative, "the whole model".to_owned(), whole.tensors, score);
            self.trials.push(trial);
        }
        self.other_bos()
    }

    /// Runs the unchanged model and every alternative, all in one pass over the layers.
    fn whole_models(&mut self) -> Result<Vec<Whole>> {
        let mut states = self.ends.embed(&self.config, self.windows)?;
        let entries = ALTERNATIVES.iter().filter(|entry| entry.alternative != Alternative::OtherBos);
        let mut all: Vec<Whole> = entries.map(|entry| Whole { entry, tensors: 0, states: None }).collect();
        for number in 0..self.config.num_hidden_layers {
            let layer = Layer::load(self.files, &self.config, number)?;
            let stored = self.stored(number)?;
            for whole in &mut all {
                let altered = self.altered(whole.entry.alternative, number, &layer, &stored)?;
                if altered.is_none() && whole.states.is_none() {
                    continue;
                }
                let before = whole.states.as_ref().unwrap_or(&states);
                let runs = altered.as_ref().map_or(&layer, |(layer, _)| layer);
                whole.states = Some(through(runs, &self.config, before, self.threads)?);
                whole.tensors += altered.map_or(0, |(_, tensors)| tensors);
            }
            states = through(&layer, &self.config, &states, self.threads)?;
            self.layers.push(layer);
            (self.progress)(number + 1);
        }
        self.base = self.score(&self.ends, &states)?;
        Ok(all)
    }

    fn score(&self, ends: &Ends, states: &States) -> Result<Option<Score>> {
        Score::of(ends, self.windows, states, self.threads)
    }

    fn shifted(&self, by: f32) -> ShiftedNorms<'_> {
        let norms =
            self.config.tensors().into_iter().filter(|tensor| matches!(tensor.role, Role::Norm { .. }));
        ShiftedNorms { files: self.files, by, norms: norms.map(|tensor| tensor.name).collect() }
    }

    fn stored(&self, layer: usize) -> Result<LayerWeights> {
        let infos = self.config.layer_linears(layer).into_iter();
        let apart = infos.filter(|info| info.is_by_rows(self.files));
        apart
            .map(|info| {
                let weight = linear_weight(self.files, &info)?;
                Ok((info, weight))
            })
            .collect()
    }

    /// Applies an alternative to all of a layer; returns the layer and the number of changed tensors.
    fn altered(
        &self,
        alternative: Alternative,
        number: usize,
        layer: &Layer,
        stored: &LayerWeights,
    ) -> Result<Option<(Layer, usize)>> {
        if let Some(by) = alternative.of_norms() {
            let shifted = self.shifted(by);
            let tensors = self.config.tensors().into_iter();
            let count = tensors.filter(|tensor| tensor.role == Role::Norm { layer: Some(number) }).count();
            return Ok(Some((Layer::load(&shifted, &self.config, number)?, count)));
        }
        let part: Vec<usize> = (0..stored.len()).collect();
        self.altered_part(alternative, layer, stored, &part)
    }

    fn altered_part(
        &self,
        alternative: Alternative,
        layer: &Layer,
        stored: &LayerWeights,
        part: &[usize],
    ) -> Result<Option<(Layer, usize)>> {
        let mut altered: Option<Layer> = None;
        let mut count = 0;
        for &at in part {
            let Some(weight) = alternative.linear(&self.config, stored, at)? else { continue };
            let info = &stored[at].0;
            // A weight that cannot be built under the alternative rules it out.
            let Ok(linear) = Linear::new(&info.module, weight) else { return Ok(None) };
            if let Some(place) = altered.get_or_insert_with(|| layer.clone()).linear_mut(info.kind) {
                *place = linear;
                count += 1;
            }
        }
        Ok(altered.map(|layer| (layer, count)))
    }

    fn trial(&self, alternative: Alternative, scope: String, tensors: usize, score: Option<Score>) -> Trial {
        self.trial_named(alternative.entry().name, scope, tensors, score)
    }

    fn trial_named(
        &self,
        alternative: &'static str,
        scope: String,
        tensors: usize,
        score: Option<Score>,
    ) -> Trial {
        let nll = score.as_ref().map(Score::nll);
        let gain = self.base.as_ref().zip(score.as_ref()).map(|(base, score)| base.gain(score));
        let knows = score.as_ref().is_some_and(|score| score.calibrated() < self.entropy);
        // For a model with non-finite logits, any finite loss is a repair.
        let better = match (&self.base, &gain) {
            (Some(_), Some(gain)) => gain.is_decisive(WHOLE_ERRORS),
            (None, _) => score.as_ref().is_some_and(|score| score.units() >= LEAST_UNITS),
            _ => false,
        };
        let (ppl, decisive) = (nll.map(f64::exp), better && knows);
        Trial { alternative, scope, tensors, nll, ppl, unchanged_ppl: None, gain, decisive }
    }

    /// Returns the name of the decisive trial with the largest gain, at the best temperature; with the smallest loss if
    /// the unchanged model has none.
    fn best(&self) -> Option<&'static str> {
        let loss =
            |trial: &&Trial| trial.gain.map_or_else(|| trial.nll.unwrap_or(f64::INFINITY), |gain| gain.delta);
        let decisive = self.trials.iter().filter(|trial| trial.decisive);
        decisive.min_by(|a, b| loss(a).total_cmp(&loss(b))).map(|best| best.alternative)
    }

    /// Finds the layers that a whole-model alternative repairs: those where undoing it raises the loss.
    fn locate(&mut self, alternative: Alternative) -> Result<Fault> {
        let mut repaired = Vec::with_capacity(self.layers.len());
        let mut changed = Vec::new();
        for (number, layer) in self.layers.iter().enumerate() {
            let altered = self.altered(alternative, number, layer, &self.stored(number)?)?;
            // Repair everything first, then undo one layer at a time.
            changed.push(altered.is_some());
            repaired.push(altered.map_or_else(|| layer.clone(), |(layer, _)| layer));
        }
        let ends = match alternative.of_norms() {
            Some(by) => Ends::load(&self.shifted(by), &self.config)?,
            None => Ends::load(self.files, &self.config)?,
        };
        let run = |layers: &[Layer], from: &States| {
            let mut states = from.clone();
            for layer in layers {
                states = through(layer, &self.config, &states, self.threads)?;
            }
            self.score(&ends, &states)
        };
        let mut states = ends.embed(&self.config, self.windows)?;
        let best = run(&repaired, &states)?;
        let mut layers = Vec::new();
        for number in 0..repaired.len() {
            if changed[number] {
                let without = through(&self.layers[number], &self.config, &states, self.threads)?;
                let without = run(&repaired[number + 1..], &without)?;
                let gain =
                    best.as_ref().zip(without.as_ref()).map(|(best, without)| best.gain(without).delta);
                if gain.is_none_or(|delta| delta > 0.0) {
                    layers.push(number);
                }
            }
            states = through(&repaired[number], &self.config, &states, self.threads)?;
            (self.progress)(repaired.len() + number + 1);
        }
        let first = layers.first().copied().unwrap_or(0);
        Ok(Fault::of(alternative, self.first_changed(alternative, first)?, layers))
    }

    /// Returns the first tensor of layer `layer` that an alternative changes.
    fn first_changed(&self, alternative: Alternative, layer: usize) -> Result<String> {
        if alternative.unit() == Unit::Norms {
            let mut tensors = self.config.tensors().into_iter();
            let norm = tensors.find(|tensor| tensor.role == Role::Norm { layer: Some(layer) });
            return Ok(norm.map_or_else(|| format!("layer {layer}"), |tensor| tensor.name));
        }
        let stored = self.stored(layer)?;
        self.first_of(alternative, &stored, &(0..stored.len()).collect::<Vec<_>>(), layer)
    }

    /// Returns the first tensor of a part that an alternative changes.
    fn first_of(
        &self,
        alternative: Alternative,
        stored: &LayerWeights,
        part: &[usize],
        layer: usize,
    ) -> Result<String> {
        for &at in part {
            if alternative.linear(&self.config, stored, at)?.is_some() {
                return Ok(format!("{}.weight", stored[at].0.module));
            }
        }
        Ok(format!("layer {layer}"))
    }

    /// Tries alternatives on each layer and on each unit in it, for faults that only some layers share. The
    /// decisive trial with the largest gain wins: next to a fault, other changes may gain by hiding its
    /// effect.
    fn in_parts(&mut self) -> Result<Option<Fault>> {
        let Some(base) = self.base.clone() else { return Ok(None) };
        let count = self.layers.len();
        let mut states = self.ends.embed(&self.config, self.windows)?;
        let mut best: Option<(Trial, Fault)> = None;
        let (mut swapped, mut shifted) = (Vec::new(), Vec::new());
        for number in 0..count {
            let stored = self.stored(number)?;
            swapped.extend(self.by_signs(number, &stored, &states, &base)?.then_some(number));
            shifted.extend(self.by_means(number, &stored, &states, &base)?);
            for &alternative in &self.applicable {
                for (part, scope) in parts(alternative, number, &stored) {
                    let altered = self.altered_part(alternative, &self.layers[number], &stored, &part)?;
                    let Some((layer, tensors)) = altered else { continue };
                    let kinds: Vec<LinearKind> = part.iter().map(|&at| stored[at].0.kind).collect();
                    let Some(score) = self.in_part(number, &layer, &kinds, &states, &base)? else { continue };
                    let trial = self.trial(alternative, scope, tensors, Some(score));
                    let loss = |trial: &Trial| trial.nll.unwrap_or(f64::INFINITY);
                    if trial.decisive && best.as_ref().is_none_or(|(known, _)| loss(&trial) < loss(known)) {
                        let tensor = self.first_of(alternative, &stored, &part, number)?;
                        best = Some((trial, Fault::of(alternative, tensor, vec![number])));
                    }
                }
            }
            states = through(&self.layers[number], &self.config, &states, self.threads)?;
            (self.progress)(count + number + 1);
        }
        let found = best.map(|(trial, fault)| {
            self.trials.push(trial);
            fault
        });
        self.joined(found, swapped, shifted)
    }

    /// Scores the model with layer `number` changed; `states` enter it.
    fn scored(&self, number: usize, altered: &Layer, states: &[State]) -> Result<Option<Score>> {
        let mut after = through(altered, &self.config, states, self.threads)?;
        for layer in &self.layers[number + 1..] {
            after = through(layer, &self.config, &after, self.threads)?;
        }
        Score::of(&self.ends, &self.windows[..states.len()], &after, self.threads)
    }

    /// Scores the model with layer `number` changed in part: on a quarter of the windows first, then on all
    /// if promising. `None` if not, or if the model does as well with the layers `kinds` zeroed.
    fn in_part(
        &self,
        number: usize,
        altered: &Layer,
        kinds: &[LinearKind],
        states: &States,
        base: &Score,
    ) -> Result<Option<Score>> {
        let run = |layer: &Layer, windows: usize| self.scored(number, layer, &states[..windows]);
        let few = run(altered, states.len().div_ceil(4))?;
        if few.is_none_or(|few| !base.first(few.units()).gain(&few).is_promising()) {
            return Ok(None);
        }
        let Some(score) =
            run(altered, states.len())?.filter(|score| base.gain(score).is_decisive(PART_ERRORS))
        else {
            return Ok(None);
        };
        let silent = run(&silenced(&self.layers[number], kinds)?, states.len())?;
        Ok(Some(score).filter(|score| silent.is_none_or(|silent| silent.gain(score).beats_silence())))
    }

    /// Tries the text with BOS added or removed, predicting the same tokens so that losses compare.
    fn other_bos(&mut self) -> Result<()> {
        let Some(bos) = self.config.bos_token_id.filter(|&bos| (bos as usize) < self.config.vocab_size)
        else {
            return Ok(());
        };
        let (with, without, has) = with_and_without(self.windows, bos, &self.config);
        if with.is_empty() {
            return Ok(());
        }
        let run = |windows: &[Sequence]| {
            let mut states = self.ends.embed(&self.config, windows)?;
            for layer in &self.layers {
                states = through(layer, &self.config, &states, self.threads)?;
            }
            Score::of(&self.ends, windows, &states, self.threads)
        };
        let (with, without) = (run(&with)?, run(&without)?);
        let (is, other) = if has { (with, without) } else { (without, with) };
        let mut trial = self.trial(Alternative::OtherBos, "the text".to_owned(), 0, other.clone());
        trial.gain = is.as_ref().zip(other.as_ref()).map(|(is, other)| is.gain(other));
        trial.unchanged_ppl = is.as_ref().map(|is| is.nll().exp());
        let knows = other.is_some_and(|score| score.calibrated() < self.entropy);
        trial.decisive = knows && trial.gain.is_some_and(|gain| gain.is_decisive(WHOLE_ERRORS));
        self.applicable.push(Alternative::OtherBos);
        self.trials.push(trial);
        Ok(())
    }

    fn diagnosis(self, fault: Option<Fault>) -> Diagnosis {
        let baseline = self.base.as_ref().map(|base| Baseline {
            nll: base.nll(),
            ppl: base.nll().exp(),
            tokens: base.tokens(),
            calibrated_nll: base.calibrated(),
            token_entropy: self.entropy,
            hits: base.hits(),
        });
        let undecided = match &self.base {
            _ if fault.is_some() => None,
            Some(base) if base.units() < LEAST_UNITS => {
                Some("the text is too short for a decision; fix: pass a longer text")
            }
            Some(base) if base.calibrated() < self.entropy => None,
            Some(_) => Some(
                "under no reading does the model beat the token frequencies of this text: it is damaged in an untested way, was \
                 never trained, or the text is out of domain; fix: pass another text, or the source (--reference)",
            ),
            None => Some(
                "the loss is not finite on this text, whatever alternative is tried; fix: pass the source (--reference)",
            ),
        };
        let tried = |entry: &&Entry| !self.applicable.contains(&entry.alternative);
        Diagnosis {
            baseline,
            undecided,
            fault,
            not_applicable: ALTERNATIVES.iter().filter(tried).map(|entry| entry.name).collect(),
            trials: self.trials,
            signs: self.signs,
            means: self.means,
            ..Diagnosis::default()
        }
    }
}

/// Returns the parts of a layer to try an alternative on: indices into `stored`, and a description.
fn parts(alternative: Alternative, layer: usize, stored: &LayerWeights) -> Vec<(Vec<usize>, String)> {
    let of = |kinds: &[LinearKind]| -> Vec<usize> {
        (0..stored.len()).filter(|&at| kinds.contains(&stored[at].0.kind)).collect()
    };
    let name =
        |part: &[usize]| part.iter().map(|&at| stored[at].0.module.clone()).collect::<Vec<_>>().join(" and ");
    let joined = match alternative.unit() {
        Unit::Rotated => of(&[LinearKind::Q, LinearKind::K]),
        Unit::Joined => of(&[LinearKind::Gate, LinearKind::Up]),
        Unit::Linear => {
            let all = (0..stored.len()).collect::<Vec<_>>();
            let single = all.iter().map(|&at| (vec![at], stored[at].0.module.clone()));
            return std::iter::once((all.clone(), format!("layer {layer}"))).chain(single).collect();
        }
        Unit::Norms | Unit::Text => Vec::new(),
    };
    if joined.is_empty() { Vec::new() } else { vec![(joined.clone(), name(&joined))] }
}

/// Model with shifted norm weights.
struct ShiftedNorms<'a> {
    files: &'a ModelFiles,
    by: f32,
    norms: Vec<String>,
}

impl SourceView for ShiftedNorms<'_> {
    fn base(&self) -> &dyn WeightSource {
        self.files
    }

    fn tensor_f32(&self, tensor: &str, shape: &[usize]) -> std::result::Result<Vec<f32>, LoadError> {
        let mut values = self.base().tensor_f32(tensor, shape)?;
        if self.norms.iter().any(|norm| norm == tensor) {
            values.iter_mut().for_each(|v| *v += self.by);
        }
        Ok(values)
    }
}
