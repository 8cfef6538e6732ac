//! Arguments of runs that start from a model.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::error::{BadInput, Result};
use crate::train::StartMode;

/// Weights that train.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TrainedWeights {
    /// LoRA over the model as it is stored.
    Lora,
    /// DoRA: LoRA with trained norms of the weights' rows.
    Dora,
    /// LoRA over the model in 4 bits.
    Qlora,
    /// All weights.
    All,
}

impl TrainedWeights {
    /// Returns the value of `adapter.kind`; `None` if all weights train.
    pub fn adapter(self) -> Option<&'static str> {
        match self {
            TrainedWeights::Lora => Some("lora"),
            TrainedWeights::Dora => Some("dora"),
            TrainedWeights::Qlora => Some("qlora"),
            TrainedWeights::All => None,
        }
    }
}

/// Held-out data.
#[derive(Clone, Debug, PartialEq)]
pub enum HeldOutData {
    /// Share of the documents or conversations.
    Share(f64),
    /// A file.
    File(PathBuf),
}

/// Arguments of a run that starts from a model, which fine-tuning and distillation share.
#[derive(Clone, Debug, PartialEq)]
pub struct TuningArguments {
    /// JSONL or text files to train on.
    pub data: Vec<PathBuf>,
    /// Folder of the run.
    pub out: PathBuf,
    /// Scheme of the frozen linear weights; `None` for nf4-dq with QLoRA, else as the model stores them.
    pub base_scheme: Option<String>,
    /// Rank of the update.
    pub rank: usize,
    /// Scale of the update times the rank.
    pub alpha: f64,
    /// Share of adapter inputs set to 0.
    pub dropout: f64,
    /// Layers with an adapter, by the end of a name or a pattern; empty for all.
    pub target: Vec<String>,
    /// Other modules that train.
    pub train: Vec<String>,
    /// True for the scale alpha / sqrt(rank).
    pub rslora: bool,
    /// LoftQ steps of the initialization.
    pub loftq: usize,
    /// Learning rate.
    pub lr: f64,
    /// Passes over the data.
    pub epochs: f64,
    /// Steps, instead of passes.
    pub steps: Option<u64>,
    /// Windows of a batch; `None` for 8, or those of the data if they are fewer.
    pub batch: Option<usize>,
    /// Tokens per window; `None` for at most 512.
    pub length: Option<usize>,
    /// Held-out share or file; `None` by the size of the data.
    pub validation: Option<String>,
    /// Validations without gain after which the run ends; 0 for never.
    pub patience: u64,
    /// Kind of the optimizer.
    pub optimizer: String,
    /// Dtype of the moments.
    pub moments: String,
    /// Precision policy.
    pub policy: String,
    /// Other settings, `section.key=value`.
    pub set: Vec<String>,
    /// True if the merged model is written too.
    pub merge: bool,
    /// Scheme in which the merged model is written too.
    pub requantize: Option<String>,
    /// Folder for event files of TensorBoard.
    pub tensorboard: Option<PathBuf>,
    /// Mode of starting.
    pub start: StartMode,
}

/// Windows of a batch by default, if the data have as many.
pub const DEFAULT_BATCH: usize = 8;

impl TuningArguments {
    /// Returns the windows of a batch that the options state.
    pub(crate) fn given_batch(&self) -> Option<usize> {
        self.set_text("data.batch").and_then(|text| text.parse().ok()).or(self.batch)
    }

    /// Returns the text that `--set` gives to `key`, if it does.
    pub(crate) fn set_text(&self, key: &str) -> Option<&str> {
        let changes = self.set.iter().rev().filter_map(|change| change.split_once('='));
        let mut values = changes.filter(|(changed, _)| changed.trim() == key).map(|(_, value)| value.trim());
        values.next().map(|value| value.trim_matches(['"', '\'']))
    }

    /// Reads the held-out share or file.
    ///
    /// # Errors
    /// A share that is not within 0 to 0.5.
    pub fn held_out(&self) -> Result<Option<HeldOutData>> {
        let Some(text) = &self.validation else { return Ok(None) };
        match text.parse::<f64>() {
            Ok(share) if (0.0..=0.5).contains(&share) => Ok(Some(HeldOutData::Share(share))),
            Ok(_) => {
                Err(BadInput::new("--validation", text.clone(), "a share from 0 to 0.5, or a file").into())
            }
            Err(_) => Ok(Some(HeldOutData::File(PathBuf::from(text)))),
        }
    }
}
