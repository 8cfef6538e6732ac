//! Changes that are tried on the whole model and judged by the loss on the text, as in [`crate::doctor`].

use mantissa_eval::Sequence;
use mantissa_eval::stats::with_error;
use mantissa_model::{Half, Layer, LinearKind, ModelConfig};
use mantissa_store::convention::ModelFiles;

use crate::doctor::score::{Gain, PART_ERRORS, Score, WHOLE_ERRORS, entropy};
use crate::error::Result;
use crate::run::{Ends, States, silenced, through};

/// Most tokens of the trials, which run the model once for each change.
const TOKENS: usize = 1024;

/// True for the linear layers that write the result of a part.
type Writes = fn(LinearKind) -> bool;

/// Parts of a layer whose results are added to the residual stream.
const PARTS: [(&str, Writes); 2] = [
    ("attention", |kind| kind.writes() == Some(Half::Mixing)),
    ("mlp", |kind| kind.writes() == Some(Half::Mlp)),
];

/// The model on the first tokens of the text.
pub struct Trials {
    pub(super) windows: Vec<Sequence>,
    /// Loss; `None` if it is not finite.
    pub(super) base: Option<Score>,
    /// NLL of the token frequencies, nats/token.
    pub(super) entropy: f64,
    threads: usize,
}

/// Change that improves the loss beyond doubt.
#[derive(Clone, Copy)]
pub(super) struct Better {
    /// Gain over the unchanged model; `None` if its loss is not finite.
    pub(super) gain: Option<Gain>,
    /// Loss with the change, nats/token.
    pub(super) nll: f64,
}

impl Trials {
    /// Formats a mean change of the loss over the windows with its standard error, if it has one.
    pub(super) fn shown(&self, delta: f64, se: f64) -> String {
        with_error(&format!("{delta:.3}"), &format!("{se:.3}"), "nats/token", self.windows.len())
    }

    /// Runs the unchanged model on the first tokens of `windows`.
    ///
    /// # Errors
    /// A model that cannot be loaded or run.
    pub(super) fn begin(
        files: &ModelFiles,
        config: &ModelConfig,
        windows: &[Sequence],
        threads: usize,
    ) -> Result<Self> {
        let mut left = TOKENS;
        let few = windows.iter().map_while(|Sequence { tokens, from }| {
            let take = tokens.len().min(left);
            left -= take;
            (take > *from).then(|| Sequence { tokens: tokens[..take].to_vec(), from: *from })
        });
        let windows: Vec<Sequence> = few.collect();
        let mut trials = Trials { entropy: entropy(&windows), windows, base: None, threads };
        trials.base = trials.under(files, config)?;
        Ok(trials)
    }

    /// Returns the loss of the model under another config.
    pub(super) fn under(&self, files: &ModelFiles, config: &ModelConfig) -> Result<Option<Score>> {
        let ends = Ends::load(files, config)?;
        let mut states = ends.embed(config, &self.windows)?;
        for number in 0..config.num_hidden_layers {
            states = through(&Layer::load(files, config, number)?, config, &states, self.threads)?;
        }
        Score::of(&ends, &self.windows, &states, self.threads)
    }

    /// True if the model predicts the text better than the token frequencies do.
    pub(super) fn knows(&self) -> bool {
        self.base.as_ref().is_some_and(|score| score.calibrated() < self.entropy)
    }

    /// Returns the gain of `score` if it is beyond doubt; `errors` is the number of standard errors.
    fn better(&self, score: Option<&Score>, errors: f64) -> Option<Better> {
        let score = score.filter(|score| score.calibrated() < self.entropy)?;
        let gain = self.base.as_ref().map(|base| base.gain(score));
        gain.is_none_or(|gain| gain.is_decisive(errors)).then(|| Better { gain, nll: score.nll() })
    }

    /// As [`better`](Self::better), for one of a few changes of the whole model.
    pub(super) fn whole(&self, score: Option<&Score>) -> Option<Better> {
        self.better(score, WHOLE_ERRORS)
    }

    /// Silences each part of each layer; returns those without which the model is better, with layer and part.
    ///
    /// # Errors
    /// A model that cannot be loaded or run.
    pub(super) fn silences(
        &self,
        files: &ModelFiles,
        config: &ModelConfig,
    ) -> Result<Vec<(usize, &'static str, Better)>> {
        let ends = Ends::load(files, config)?;
        let layers: Vec<Layer> = (0..config.num_hidden_layers)
            .map(|number| Ok(Layer::load(files, config, number)?))
            .collect::<Result<_>>()?;
        let mut states = ends.embed(config, &self.windows)?;
        let mut found = Vec::new();
        for (number, layer) in layers.iter().enumerate() {
            for (part, of_part) in PARTS {
                let kinds: Vec<LinearKind> =
                    layer.linears().map(|(kind, _)| kind).filter(|k| of_part(*k)).collect();
                if kinds.is_empty() {
                    continue;
                }
                let mut after = through(&silenced(layer, &kinds)?, config, &states, self.threads)?;
                for layer in &layers[number + 1..] {
                    after = through(layer, config, &after, self.threads)?;
                }
                let score = self.score(&ends, &after)?;
                found.extend(self.better(score.as_ref(), PART_ERRORS).map(|better| (number, part, better)));
            }
            states = through(layer, config, &states, self.threads)?;
        }
        Ok(found)
    }

    fn score(&self, ends: &Ends, states: &States) -> Result<Option<Score>> {
        Score::of(ends, &self.windows, states, self.threads)
    }
}
