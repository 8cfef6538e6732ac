//! What a training run is told, as TOML with exactly these keys; paths are relative to the file.
//!
//! ```toml
//! seed = 1
//! out = "runs/first"                # folder of the run
//!
//! [model]
//! config = "config.json"            # architecture, as Hugging Face writes it
//! tokenizer = "tokenizer"           # folder with tokenizer.json
//! init = "model"                    # optional: folder of a dense model whose weights it begins with
//! std = 0.02                        # of fresh weights
//!
//! [data]
//! files = ["a.txt", "b.jsonl"]
//! split = "<|endoftext|>"           # optional: between the documents of a text
//! field = "text"                    # of each line of a .jsonl file
//! length = 256                      # tokens of a window
//! batch = 16                        # windows
//! accumulate = 1                    # batches of a step
//!
//! [precision]
//! policy = "bf16"                   # fp32 fp16 bf16 bf16-remainder bf16-pure bf16-pure-sr
//! scaling = "pytorch"               # optional, of fp16: pytorch megatron
//!
//! [optimizer]
//! kind = "adamw"                    # adamw sgd
//! lr = 1e-3
//! moments = "f32"                   # f32 bf16 8bit 8bit:cpu, or the scheme of a map: lin8 dyn8-tensor …
//! beta1 = 0.9
//! beta2 = 0.95
//! eps = 1e-8
//! momentum = 0.9                    # of sgd
//! nesterov = false                  # of sgd
//! weight_decay = 0.1
//! decay = ["linears", "embeddings", "head"] # also norms, biases, and names such as "*.down_proj.weight"
//! no_decay = []                     # what of it does not decay
//! max_norm = 1.0                    # 0: no clipping
//!
//! [schedule]
//! steps = 1000
//! kind = "cosine"                   # constant linear cosine stable
//! warmup = 50
//! min_ratio = 0.1
//! decay_steps = 100                 # of stable
//!
//! [checkpoint]
//! every = 100                       # steps; the first is written after step 1
//! keep = 2
//!
//! [telemetry]
//! every = 100                       # steps between two looks at every tensor; 0: none
//! ```

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::blockwise::{BLOCKWISE_RULES, BlockwiseRule};
use crate::data::TextFormat;
use crate::error::TrainError;
use crate::optim::{AdamWOptions, DecayGroups, MomentFormat, SgdOptions, StateMap};
use crate::policy::Policy;
use crate::scaling::SCALING_OPTIONS;
use crate::schedule::{Decay, Schedule};

/// What `optimizer.moments` may be.
const MOMENTS: &str =
    "f32, bf16, 8bit, 8bit:cpu, or the scheme of a signed map of 8 bits such as lin8, dyn8-tensor, lin8-g128";

/// A run's settings.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "the module's text describes every key")]
pub struct RunConfig {
    #[serde(default)]
    pub seed: u64,
    pub out: String,
    pub model: Model,
    pub data: Data,
    #[serde(default)]
    pub precision: Precision,
    pub optimizer: Optimizer,
    pub schedule: ScheduleConfig,
    #[serde(default)]
    pub checkpoint: CheckpointConfig,
    #[serde(default)]
    pub telemetry: Telemetry,
}

/// `[model]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "the module's text describes every key")]
pub struct Model {
    pub config: String,
    pub tokenizer: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub init: Option<String>,
    #[serde(default = "std")]
    pub std: f64,
}

/// `[data]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "the module's text describes every key")]
pub struct Data {
    pub files: Vec<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub split: Option<String>,
    #[serde(default = "field")]
    pub field: String,
    pub length: usize,
    pub batch: usize,
    #[serde(default = "one")]
    pub accumulate: usize,
}

/// `[precision]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[expect(missing_docs, reason = "the module's text describes every key")]
pub struct Precision {
    pub policy: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scaling: Option<String>,
}

/// `[optimizer]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "the module's text describes every key")]
pub struct Optimizer {
    #[serde(default = "adamw")]
    pub kind: String,
    pub lr: f64,
    #[serde(default = "f32_moments")]
    pub moments: String,
    #[serde(default = "beta1")]
    pub beta1: f64,
    #[serde(default = "beta2")]
    pub beta2: f64,
    #[serde(default = "eps")]
    pub eps: f64,
    #[serde(default = "weight_decay")]
    pub weight_decay: f64,
    #[serde(default = "momentum")]
    pub momentum: f64,
    #[serde(default)]
    pub nesterov: bool,
    #[serde(default = "decay")]
    pub decay: Vec<String>,
    #[serde(default)]
    pub no_decay: Vec<String>,
    #[serde(default = "max_norm")]
    pub max_norm: f64,
}

/// `[schedule]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "the module's text describes every key")]
pub struct ScheduleConfig {
    pub steps: u64,
    #[serde(default = "cosine")]
    pub kind: String,
    #[serde(default)]
    pub warmup: u64,
    #[serde(default = "min_ratio")]
    pub min_ratio: f64,
    #[serde(default)]
    pub decay_steps: u64,
}

/// `[checkpoint]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[expect(missing_docs, reason = "the module's text describes every key")]
pub struct CheckpointConfig {
    pub every: u64,
    pub keep: usize,
}

/// `[telemetry]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[expect(missing_docs, reason = "the module's text describes every key")]
pub struct Telemetry {
    pub every: u64,
}

fn std() -> f64 {
    0.02
}

fn field() -> String {
    "text".to_owned()
}

fn one() -> usize {
    1
}

fn f32_moments() -> String {
    "f32".to_owned()
}

fn beta1() -> f64 {
    0.9
}

fn beta2() -> f64 {
    0.95
}

fn eps() -> f64 {
    1e-8
}

fn adamw() -> String {
    "adamw".to_owned()
}

fn momentum() -> f64 {
    0.9
}

fn decay() -> Vec<String> {
    DecayGroups::default().decay
}

fn weight_decay() -> f64 {
    0.1
}

fn max_norm() -> f64 {
    1.0
}

fn cosine() -> String {
    "cosine".to_owned()
}

fn min_ratio() -> f64 {
    0.1
}

impl Default for Precision {
    fn default() -> Self {
        Precision { policy: "fp32".to_owned(), scaling: None }
    }
}

impl Default for CheckpointConfig {
    fn default() -> Self {
        CheckpointConfig { every: 100, keep: 2 }
    }
}

impl Default for Telemetry {
    fn default() -> Self {
        Telemetry { every: 100 }
    }
}

/// The settings of the optimizer that a run names.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum OptimizerOptions {
    /// Of AdamW.
    AdamW(AdamWOptions),
    /// Of SGD.
    Sgd(SgdOptions),
}

impl RunConfig {
    /// Parses `text`, the content of `file`, after each of `changes`, `a.b=value` with a TOML value, has been put in place.
    ///
    /// # Errors
    /// [`TrainError::Config`] names the key and what it may be.
    pub fn parse(file: &str, text: &str, changes: &[String]) -> Result<Self, TrainError> {
        let fault = |key: &str, found: String| TrainError::Config {
            file: file.to_owned(),
            key: key.to_owned(),
            found,
            allowed: "what docs/guide/train.md lists".to_owned(),
        };
        let one_line = |error: toml::de::Error| error.message().replace('\n', " ");
        let mut table: toml::Table =
            text.parse().map_err(|error: toml::de::Error| fault("TOML", one_line(error)))?;
        for change in changes {
            set(&mut table, change).map_err(|found| fault(change, found))?;
        }
        // Written down again, an error has a place in the text.
        let text = toml::to_string(&table).map_err(|error| fault("TOML", error.to_string()))?;
        let config: RunConfig =
            toml::from_str(&text).map_err(|error| fault(&place(&text, error.span()), one_line(error)))?;
        config.check(file)?;
        Ok(config)
    }

    /// The settings with every default in place.
    pub fn resolved(&self) -> String {
        toml::to_string(self).unwrap_or_default()
    }

    fn check(&self, file: &str) -> Result<(), TrainError> {
        let fault = |key: &str, found: String, allowed: &str| {
            let (file, key, allowed) = (file.to_owned(), key.to_owned(), allowed.to_owned());
            Err(TrainError::Config { file, key, found, allowed })
        };
        let positive = [
            ("data.length", self.data.length),
            ("data.batch", self.data.batch),
            ("data.accumulate", self.data.accumulate),
            ("checkpoint.keep", self.checkpoint.keep),
        ];
        if let Some((key, _)) = positive.into_iter().find(|(_, n)| *n == 0) {
            return fault(key, "0".to_owned(), "1 or more");
        }
        if self.data.files.is_empty() {
            return fault("data.files", "none".to_owned(), "at least one file");
        }
        if self.data.split.as_deref() == Some("") {
            return fault("data.split", "nothing".to_owned(), "one character or more, such as <|endoftext|>");
        }
        if self.schedule.steps == 0 {
            return fault("schedule.steps", "0".to_owned(), "1 or more");
        }
        if self.checkpoint.every == 0 {
            return fault("checkpoint.every", "0".to_owned(), "1 or more steps");
        }
        let Optimizer { lr, beta1, beta2, eps, momentum, weight_decay, max_norm, .. } = self.optimizer;
        let numbers = [
            ("optimizer.lr", lr, 0.0..=1e6),
            ("optimizer.beta1", beta1, 0.0..=0.999_999),
            ("optimizer.beta2", beta2, 0.0..=0.999_999_9),
            ("optimizer.eps", eps, 1e-30..=1.0),
            ("optimizer.momentum", momentum, 0.0..=0.999_999),
            ("optimizer.weight_decay", weight_decay, 0.0..=1e3),
            ("optimizer.max_norm", max_norm, 0.0..=1e30),
            ("schedule.min_ratio", self.schedule.min_ratio, 0.0..=1.0),
            ("model.std", self.model.std, 0.0..=1e3),
        ];
        for (key, found, allowed) in numbers {
            if !allowed.contains(&found) {
                return fault(key, found.to_string(), &format!("{} to {}", allowed.start(), allowed.end()));
            }
        }
        if self.policy().is_none() {
            return fault("precision.policy", self.precision.policy.clone(), &Policy::NAMES.join(", "));
        }
        self.check_optimizer(&fault)?;
        if let Some(scaling) = &self.precision.scaling {
            if self.policy().is_none_or(|policy| policy.scaling.is_none()) {
                return fault("precision.scaling", scaling.clone(), "no such key: the policy scales no loss");
            }
            if !SCALING_OPTIONS.iter().any(|(name, _)| name == scaling) {
                return fault("precision.scaling", scaling.clone(), "pytorch, megatron");
            }
        }
        if self.moments().is_none() {
            return fault("optimizer.moments", self.optimizer.moments.clone(), MOMENTS);
        }
        if self.decay().is_none() {
            return fault("schedule.kind", self.schedule.kind.clone(), "constant, linear, cosine, stable");
        }
        Ok(())
    }

    /// What one optimizer has and the other has not.
    fn check_optimizer(
        &self,
        fault: &impl Fn(&str, String, &str) -> Result<(), TrainError>,
    ) -> Result<(), TrainError> {
        let Optimizer { kind, moments, momentum, nesterov, .. } = &self.optimizer;
        match kind.as_str() {
            "adamw" if *nesterov => {
                fault("optimizer.nesterov", "true".to_owned(), "false with kind = \"adamw\"")
            }
            "sgd" if moments != "f32" => {
                fault("optimizer.moments", moments.clone(), "f32 with kind = \"sgd\"")
            }
            "sgd" if *nesterov && *momentum == 0.0 => {
                fault("optimizer.momentum", "0".to_owned(), "above 0 with nesterov = true")
            }
            "adamw" | "sgd" => Ok(()),
            other => fault("optimizer.kind", other.to_owned(), "adamw, sgd"),
        }
    }

    /// The precision policy.
    pub fn policy(&self) -> Option<Policy> {
        let mut policy = Policy::by_name(&self.precision.policy, self.seed)?;
        if let (Some(scaling), Some(name)) = (&mut policy.scaling, &self.precision.scaling) {
            *scaling = SCALING_OPTIONS.iter().find(|(known, _)| known == name)?.1;
        }
        Some(policy)
    }

    /// How moments are stored.
    pub fn moments(&self) -> Option<MomentFormat> {
        match self.optimizer.moments.as_str() {
            "f32" => Some(MomentFormat::F32),
            "bf16" => Some(MomentFormat::Bf16),
            "8bit" => Some(MomentFormat::Blockwise8(BlockwiseRule::default())),
            other => {
                let Some(rule) = other.strip_prefix("8bit:") else {
                    return StateMap::new(&other.parse().ok()?).map(MomentFormat::Map);
                };
                let found = BLOCKWISE_RULES.iter().find(|(name, _)| *name == rule)?;
                Some(MomentFormat::Blockwise8(found.1))
            }
        }
    }

    fn decay(&self) -> Option<Decay> {
        let ScheduleConfig { min_ratio, decay_steps, .. } = self.schedule;
        match self.schedule.kind.as_str() {
            "constant" => Some(Decay::Constant),
            "linear" => Some(Decay::Linear { min_ratio }),
            "cosine" => Some(Decay::Cosine { min_ratio }),
            "stable" => Some(Decay::Stable { decay_steps, min_ratio }),
            _ => None,
        }
    }

    /// Learning rates.
    pub fn schedule(&self) -> Schedule {
        let ScheduleConfig { steps, warmup, .. } = self.schedule;
        let decay = self.decay().unwrap_or(Decay::Constant);
        Schedule { peak: self.optimizer.lr, warmup_steps: warmup, total_steps: steps, decay }
    }

    /// Options of the optimizer. What decays is [`decay_groups`](Self::decay_groups).
    pub fn optimizer_options(&self) -> OptimizerOptions {
        let Optimizer { beta1, beta2, eps, momentum, nesterov, weight_decay, max_norm, .. } = self.optimizer;
        let max_norm = Some(max_norm).filter(|norm| *norm > 0.0);
        if self.optimizer.kind == "sgd" {
            return OptimizerOptions::Sgd(SgdOptions { momentum, nesterov, weight_decay, max_norm });
        }
        let (moments, decay_vectors) = (self.moments().unwrap_or_default(), false);
        OptimizerOptions::AdamW(AdamWOptions {
            beta1,
            beta2,
            eps,
            weight_decay,
            decay_vectors,
            max_norm,
            moments,
        })
    }

    /// What decays.
    pub fn decay_groups(&self) -> DecayGroups {
        let Optimizer { decay, no_decay, .. } = &self.optimizer;
        DecayGroups { decay: decay.clone(), no_decay: no_decay.clone() }
    }

    /// How documents lie in a data file.
    pub fn format_of(&self, file: &Path) -> TextFormat {
        match file.extension().is_some_and(|extension| extension == "jsonl") {
            true => TextFormat::JsonLines { field: self.data.field.clone() },
            false => TextFormat::Text { split: self.data.split.clone() },
        }
    }
}

/// The table and the line that `span` begins in.
fn place(text: &str, span: Option<std::ops::Range<usize>>) -> String {
    let start = span.map_or(0, |span| span.start.min(text.len()));
    let before = text.get(..start).unwrap_or_default();
    let line = text.lines().nth(before.matches('\n').count()).unwrap_or_default();
    let table = before.lines().rfind(|line| line.starts_with('[')).filter(|table| *table != line);
    table.map_or_else(|| line.to_owned(), |table| format!("{table} {line}"))
}

/// Puts `a.b=value` in its place.
fn set(table: &mut toml::Table, change: &str) -> Result<(), String> {
    let (path, value) = change.split_once('=').ok_or("no =, as in a.b=value")?;
    // What is no TOML value is a string.
    let parsed = format!("x = {value}").parse::<toml::Table>().ok().and_then(|mut t| t.remove("x"));
    let value = parsed.unwrap_or_else(|| toml::Value::String(value.to_owned()));
    let mut keys: Vec<&str> = path.split('.').map(str::trim).collect();
    let last = keys.pop().filter(|key| !key.is_empty()).ok_or("no key")?;
    let mut at = table;
    for key in keys {
        let inner = at.entry(key).or_insert_with(|| toml::Value::Table(toml::Table::new()));
        at = inner.as_table_mut().ok_or_else(|| format!("{key} is no table"))?;
    }
    at.insert(last.to_owned(), value);
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const LEAST: &str = r#"
        out = "runs/a"
        [model]
        config = "config.json"
        tokenizer = "tok"
        [data]
        files = ["a.txt"]
        length = 8
        batch = 2
        [optimizer]
        lr = 1e-3
        [schedule]
        steps = 10
    "#;

    fn changed(changes: &[&str]) -> Result<RunConfig, String> {
        let changes: Vec<_> = changes.iter().map(|c| (*c).to_owned()).collect();
        RunConfig::parse("run.toml", LEAST, &changes).map_err(|e| e.to_string())
    }

    /// Six thousand characters of a file say no more than eighty.
    #[test]
    fn what_a_message_quotes_is_cut_and_escaped() {
        let long = "x".repeat(6000);
        for text in [
            format!("{long} = 1"),
            format!("[{long}]\na = 1"),
            format!("out = \"{long}\"\n{LEAST}"),
            format!("method = \"{long}\""),
            format!("out = 1\n\"\\u001b[31m{long}\" = 2"),
            format!("{LEAST}\n[precision]\npolicy = \"{long}\""),
        ] {
            let error = RunConfig::parse("run.toml", &text, &[]).unwrap_err().to_string();
            assert!(error.len() < 1200 && !error.contains('\n') && !error.contains('\u{1b}'), "{error}");
        }
        // A list of what may stand there is not cut.
        let error = RunConfig::parse("run.toml", "seeed = 1", &[]).unwrap_err().to_string();
        assert!(
            error.contains("`seeed`, expected one of `seed`") && error.contains("`telemetry`"),
            "{error}"
        );
    }

    #[test]
    fn defaults_are_resolved_and_read_back() {
        let config = changed(&[]).unwrap();
        assert_eq!((config.policy().unwrap().name, config.checkpoint.keep), ("fp32", 2));
        assert_eq!(RunConfig::parse("x", &config.resolved(), &[]).unwrap(), config);
    }

    #[test]
    fn any_key_can_be_set() {
        let config = changed(&[
            "optimizer.moments=8bit:cpu",
            "precision.policy=\"bf16-pure-sr\"",
            "schedule.steps=20",
            "seed=7",
            "data.files=[\"b.txt\", \"c.jsonl\"]",
        ])
        .unwrap();
        assert_eq!(config.moments(), Some(MomentFormat::Blockwise8(BlockwiseRule::Cpu)));
        assert_eq!(config.policy(), Some(Policy::bf16_pure_stochastic(7)));
        assert_eq!((config.schedule.steps, config.data.files.len()), (20, 2));
        let config = changed(&["optimizer.moments=lin8-tensor", "precision.policy=fp16"]).unwrap();
        let map = StateMap::new(&"lin8-tensor".parse().unwrap()).unwrap();
        assert_eq!(config.moments(), Some(MomentFormat::Map(map)));
        let config = changed(&["precision.policy=fp16", "precision.scaling=megatron"]).unwrap();
        assert_eq!(config.policy().unwrap().scaling, Some(crate::scaling::ScalingOptions::MEGATRON));
        assert_eq!(RunConfig::parse("x", &config.resolved(), &[]).unwrap(), config);
        let jsonl = TextFormat::JsonLines { field: "text".into() };
        assert_eq!(config.format_of(Path::new("c.jsonl")), jsonl);
    }

    #[test]
    fn an_optimizer_is_a_value() {
        let config =
            changed(&["optimizer.kind=sgd", "optimizer.nesterov=true", "optimizer.max_norm=0"]).unwrap();
        let options = SgdOptions { momentum: 0.9, nesterov: true, weight_decay: 0.1, max_norm: None };
        assert_eq!(config.optimizer_options(), OptimizerOptions::Sgd(options));
        let config = changed(&["optimizer.no_decay=[\"*norm*\"]"]).unwrap();
        assert!(matches!(config.optimizer_options(), OptimizerOptions::AdamW(_)));
        assert_eq!(config.decay_groups().no_decay, ["*norm*"]);
        let error = changed(&["optimizer.kind=sgd", "optimizer.moments=8bit"]).unwrap_err();
        assert!(error.contains("optimizer.moments: found 8bit, allowed f32"), "{error}");
    }

    #[test]
    fn faults_name_the_key() {
        for (change, part) in [
            ("optimizer.lrr=1", "lrr"),
            ("data.split=\"\"", "data.split: found nothing, allowed one character or more"),
            ("optimizer.lr=-1", "optimizer.lr: found -1, allowed 0 to"),
            ("precision.policy=fp8", "fp32, fp16, bf16"),
            ("optimizer.moments=4bit", "8bit:cpu"),
            ("optimizer.kind=lion", "adamw, sgd"),
            ("optimizer.momentum=1", "optimizer.momentum: found 1, allowed 0 to"),
            ("optimizer.nesterov=true", "false with kind"),
            ("telemetry.each=3", "each"),
            ("optimizer.moments=dyn8-unsigned", "lin8"),
            ("precision.scaling=megatron", "scales no loss"),
            ("schedule.kind=step", "cosine"),
            ("data.batch=0", "data.batch"),
            ("data.files=[]", "data.files"),
            ("seed", "no ="),
            ("out.x=1", "out is no table"),
            ("schedule.steps=\"many\"", "[schedule] steps = \"many\": found invalid type"),
        ] {
            let message = changed(&[change]).unwrap_err();
            assert!(message.contains(part) && message.contains("run.toml"), "{change}: {message}");
        }
    }
}
