//! Settings of a training run, as TOML with exactly these keys. Paths are relative to the file.
//!
//! [`RunConfig`] and its tables declare each key with its default, accepted values and meaning.

mod adapter;
mod differences;
mod faults;
mod foreign;
mod keys;
mod optimizer;
mod switch;

use std::path::{Path, PathBuf};

use mantissa_options::{Faults, read, to_toml};

use crate::data::{TextFormat, is_records};
use crate::error::TrainError;
use crate::exchange::MessageFormat;
use crate::learned::LearnedScales;
use crate::lora::Tuning;
use crate::parallel::ParallelOptions;
use crate::policy::{Master, Policy, TableFault};
use crate::schedule::{Decay, Schedule};

pub use crate::error::KeyFaults;
pub use adapter::AdapterConfig;
pub use differences::{differences, flat_settings};
pub use keys::{
    CheckpointConfig, Data, Distill, Model, Parallel, RunConfig, Samples, ScheduleConfig, Telemetry,
    Validation, section,
};
pub use optimizer::{CommonKeys, Optimizer, optimizer_keys};

impl RunConfig {
    /// Parses `text`, the content of `file`, after applying each of `changes` (`a.b=value` with a TOML
    /// value).
    ///
    /// # Errors
    /// [`TrainError::Toml`] for invalid TOML; [`TrainError::Keys`] lists all missing and unknown keys;
    /// [`TrainError::Config`] names the key and the accepted values.
    pub fn parse(file: &str, text: &str, changes: &[String]) -> Result<Self, TrainError> {
        Self::parse_with_notes(file, text, changes).map(|(config, _)| config)
    }

    /// Parses settings like [`parse`](Self::parse); also returns a note for each kind that a change replaced, with the keys of
    /// the old kind that went with it because they held its defaults.
    ///
    /// # Errors
    /// As [`parse`](Self::parse); keys of the old kind with other values are refused by name.
    pub fn parse_with_notes(
        file: &str,
        text: &str,
        changes: &[String],
    ) -> Result<(Self, Vec<String>), TrainError> {
        let mut table: toml::Table = text.parse().map_err(|error: toml::de::Error| TrainError::Toml {
            file: file.to_owned(),
            place: "TOML".to_owned(),
            error: error.message().replace('\n', " "),
        })?;
        let (before, mut paths) = (table.clone(), Vec::new());
        for change in changes {
            paths.extend(change.split_once('=').map(|(path, _)| path.replace(' ', "")));
            set(&mut table, change).map_err(|(found, allowed)| TrainError::Config {
                file: file.to_owned(),
                key: change.clone(),
                found,
                allowed,
            })?;
        }
        let switched = switch::adapt(&before, &mut table, &paths);
        if let Some((_, kind)) = switched.foreign.first() {
            let keys: Vec<_> = switched.foreign.iter().map(|(key, _)| key.as_str()).collect();
            return Err(TrainError::Config {
                file: file.to_owned(),
                key: keys.join(", "),
                found: format!("--set for \"{kind}\""),
                allowed: format!(
                    "keys that \"{kind}\" has; fix: remove these from the file, or set them for it"
                ),
            });
        }
        let mut faults = Faults::default();
        let config: RunConfig = read(&table, "", &mut faults);
        faults::refuse(file, faults)?;
        config.check(file)?;
        let notes = switched.notes.into_iter().chain(config.note_on_warmup()).collect();
        Ok((config, notes))
    }

    /// Returns the settings as TOML, with every default filled in, but for `parallel.zero`: it changes where a state lies, and no
    /// result.
    pub fn resolved(&self) -> String {
        match self.parallel.zero {
            0 => to_toml(self),
            _ => to_toml(&RunConfig {
                parallel: Parallel { zero: 0, ..self.parallel.clone() },
                ..self.clone()
            }),
        }
    }

    /// Returns leaves, stage of ZeRO and format of exchanged gradients; `None` if the format cannot be met.
    pub fn parallel(&self) -> Option<ParallelOptions> {
        let Parallel { leaves, zero, gradients, gather } = &self.parallel;
        let gradients = MessageFormat::parse(gradients)?;
        let gather = match gather {
            Some(text) => Some(MessageFormat::parse(text)?),
            None => None,
        };
        let zero = u8::try_from(*zero).unwrap_or(u8::MAX);
        Some(ParallelOptions { leaves: *leaves, zero, gradients, gather })
    }

    fn check(&self, file: &str) -> Result<(), TrainError> {
        let fault = |key: &str, found: String, allowed: &str| {
            let (file, key, allowed) = (file.to_owned(), key.to_owned(), allowed.to_owned());
            Err(TrainError::Config { file, key, found, allowed })
        };
        if let Some((key, found, allowed)) = self.optimizer.fault() {
            return fault(&format!("optimizer.{key}"), found, allowed);
        }
        self.check_data(&fault)?;
        self.check_course(&fault)?;
        self.check_parallel(&fault)?;
        if let Some(adapter) = &self.adapter {
            if let Err(TableFault { key, found, allowed }) = adapter.tuning(self.seed) {
                return fault(&format!("adapter.{key}"), found, &allowed);
            }
            if self.model.init.is_none() {
                return fault("model.init", "none".to_owned(), "the model to adapt, with [adapter]");
            }
        }
        if let Err(TableFault { key, found, allowed }) = self.precision.policy(self.seed) {
            return fault(&format!("precision.{key}"), found, &allowed);
        }
        let learns = self.policy().is_some_and(|policy| policy.linear.fprop.right.learns_scales());
        if learns && self.adapter.is_some() {
            let allowed = "rule with [adapter]: frozen weights have no learned scales";
            return fault("precision.fprop.w.scales", "learned".to_owned(), allowed);
        }
        if self.decay().is_none() {
            return fault("schedule.kind", self.schedule.kind.clone(), "constant, linear, cosine, wsd");
        }
        Ok(())
    }

    /// Checks that there is data to read.
    fn check_data(
        &self,
        fault: &impl Fn(&str, String, &str) -> Result<(), TrainError>,
    ) -> Result<(), TrainError> {
        let generated = self.distill.as_ref().map_or(0, |distill| distill.generated);
        if self.distill.as_ref().is_some_and(|distill| distill.teacher.is_none()) && self.model.init.is_none()
        {
            return fault("model.init", "none".to_owned(), "the teacher, with [distill]");
        }
        if generated > 0 && self.data.chat {
            return fault("distill.generated", generated.to_string(), "0 with data.chat");
        }
        if generated > 0 && self.validation.share > 0.0 {
            let allowed = "0 with distill.generated; fix: name validation.files";
            return fault("validation.share", self.validation.share.to_string(), allowed);
        }
        if self.data.files.is_empty() && generated == 0 {
            return fault("data.files", "none".to_owned(), "at least one file, or distill.generated");
        }
        if self.data.split.as_deref() == Some("") {
            return fault(
                "data.split",
                "nothing".to_owned(),
                "at least one character, such as <|endoftext|>",
            );
        }
        Ok(())
    }

    /// Checks keys that exclude or need each other.
    fn check_course(
        &self,
        fault: &impl Fn(&str, String, &str) -> Result<(), TrainError>,
    ) -> Result<(), TrainError> {
        let ScheduleConfig { steps, minutes, kind, .. } = &self.schedule;
        let Validation { files, share, patience, .. } = &self.validation;
        let timed = *minutes > 0.0;
        if timed && *steps > 0 {
            return fault("schedule.steps", steps.to_string(), "none with schedule.minutes");
        }
        if timed && !matches!(kind.as_str(), "wsd" | "stable") {
            return fault("schedule.kind", kind.clone(), "wsd with schedule.minutes");
        }
        if !timed && *steps == 0 {
            return fault("schedule.steps", "0".to_owned(), "1 or more, or schedule.minutes");
        }
        if *share > 0.0 && !files.is_empty() {
            return fault("validation.share", share.to_string(), "0 with validation.files");
        }
        if *patience > 0 && !self.validation.is_active() {
            return fault(
                "validation.patience",
                patience.to_string(),
                "0 without validation.share and .files",
            );
        }
        if self.model.config.is_some() && self.model.architecture.is_some() {
            return fault("model.config", "this and [model.architecture]".to_owned(), "one of both");
        }
        Ok(())
    }

    /// Checks that the weights can be divided among ranks.
    fn check_divided_weights(
        &self,
        fault: &impl Fn(&str, String, &str) -> Result<(), TrainError>,
    ) -> Result<(), TrainError> {
        let refused = |what: &str| {
            let allowed = format!("0, 1 or 2 with {what}");
            fault("parallel.zero", "3".to_owned(), &allowed)
        };
        if self.adapter.is_some() {
            return refused("[adapter]: every rank has the frozen weights");
        }
        let Some(policy) = self.policy() else { return Ok(()) };
        if matches!(policy.master, Master::Int8 { .. }) {
            return refused("INT8 weights: rows are stored as a whole");
        }
        if LearnedScales::of(&policy.linear.fprop.right).is_some() {
            return refused("learned scales");
        }
        Ok(())
    }

    /// Checks leaves and the format of exchanged gradients.
    fn check_parallel(
        &self,
        fault: &impl Fn(&str, String, &str) -> Result<(), TrainError>,
    ) -> Result<(), TrainError> {
        let Parallel { leaves, zero, gradients, gather } = &self.parallel;
        if ![1, 2, 4, 8].contains(leaves) {
            return fault("parallel.leaves", leaves.to_string(), "1, 2, 4 or 8");
        }
        let Data { batch, accumulate, .. } = &self.data;
        if !accumulate.is_multiple_of(*leaves) {
            let windows = batch.saturating_mul(*accumulate);
            let fix = match windows.is_multiple_of(*leaves) {
                true => {
                    format!("; fix: --set data.accumulate={leaves} --set data.batch={}", windows / leaves)
                }
                false => String::new(),
            };
            let allowed = format!("a multiple of parallel.leaves = {leaves}{fix}");
            return fault("data.accumulate", accumulate.to_string(), &allowed);
        }
        if *zero > 3 {
            return fault("parallel.zero", zero.to_string(), "0, 1, 2 or 3");
        }
        if *zero == 3 {
            self.check_divided_weights(fault)?;
        }
        for (key, text) in [("gradients", Some(gradients)), ("gather", gather.as_ref())] {
            if let Some(text) = text.filter(|text| MessageFormat::parse(text).is_none()) {
                return fault(&format!("parallel.{key}"), format!("\"{text}\""), MessageFormat::ALLOWED);
            }
        }
        let has_master = self.policy().is_some_and(|policy| policy.master == Master::F32);
        if let Some(text) = gather.as_ref().filter(|_| !has_master) {
            let allowed =
                "nothing without an f32 master copy: updates would be lost; fix: --set precision.policy=bf16";
            return fault("parallel.gather", format!("\"{text}\""), allowed);
        }
        Ok(())
    }

    /// Says that the warm-up is longer than the run, which then ends below its rate.
    fn note_on_warmup(&self) -> Option<String> {
        let ScheduleConfig { steps, warmup, minutes, .. } = self.schedule;
        (minutes == 0.0 && warmup > 0 && warmup >= steps).then(|| {
            format!(
                "schedule.warmup: {warmup} steps of a run of {steps}: the learning rate never reaches optimizer.lr; fix: --set schedule.warmup={}",
                steps / 10
            )
        })
    }

    /// Returns the settings of adapters, if the run has any.
    pub fn tuning(&self) -> Option<Tuning> {
        self.adapter.as_ref()?.tuning(self.seed).ok()
    }

    /// Returns the precision policy; `None` if a key of it cannot be met.
    pub fn policy(&self) -> Option<Policy> {
        self.precision.policy(self.seed).ok()
    }

    fn decay(&self) -> Option<Decay> {
        let ScheduleConfig { min_ratio, decay_steps, .. } = self.schedule;
        match self.schedule.kind.as_str() {
            "constant" => Some(Decay::Constant),
            "linear" => Some(Decay::Linear { min_ratio }),
            "cosine" => Some(Decay::Cosine { min_ratio }),
            "wsd" | "stable" => Some(Decay::Stable { decay_steps, min_ratio }),
            _ => None,
        }
    }

    /// Returns the learning rate schedule. With `schedule.minutes` it has no end yet: the run sets one when the
    /// decay begins.
    pub fn schedule(&self) -> Schedule {
        let ScheduleConfig { steps, warmup, .. } = self.schedule;
        let (decay, total_steps) = match self.schedule.minutes > 0.0 {
            true => (Decay::Constant, u64::MAX),
            false => (self.decay().unwrap_or(Decay::Constant), steps),
        };
        Schedule { peak: self.optimizer.common.lr, warmup_steps: warmup, total_steps, decay }
    }

    /// Returns the path of the model's config.json, without `[model.architecture]`; `base` is the folder of the settings.
    pub fn model_config(&self, base: &Path) -> PathBuf {
        match (&self.model.config, &self.model.init) {
            (Some(config), _) => base.join(config),
            (None, init) => base.join(init.as_deref().unwrap_or_default()).join("config.json"),
        }
    }

    /// Returns the document format of a data file, by its extension.
    pub fn format_of(&self, file: &Path) -> TextFormat {
        match is_records(file) {
            true => TextFormat::JsonLines { field: self.data.field.clone() },
            false => TextFormat::Text { split: self.data.split.clone() },
        }
    }
}

/// Applies `a.b=value` to the table.
///
/// # Errors
/// What was found, and what is accepted.
fn set(table: &mut toml::Table, change: &str) -> Result<(), (String, String)> {
    let fault = |found: String| (found, "section.key=value".to_owned());
    let (path, value) = change.split_once('=').ok_or_else(|| fault("no = sign".to_owned()))?;
    // A value that is not valid TOML is taken as a string.
    let parsed = format!("x = {value}").parse::<toml::Table>().ok().and_then(|mut t| t.remove("x"));
    let value = parsed.unwrap_or_else(|| toml::Value::String(value.to_owned()));
    if let (Some(key), false) = (foreign::key_of_table(path.trim()), value.is_table()) {
        let given = value.as_str().map_or_else(|| value.to_string(), |text| text.trim().to_owned());
        let given = foreign::known(&key, given);
        return Err(("one value for the whole table".to_owned(), format!("{key}={given}")));
    }
    let mut keys: Vec<&str> = path.split('.').map(str::trim).collect();
    let last = keys.pop().filter(|key| !key.is_empty()).ok_or_else(|| fault("no key".to_owned()))?;
    let mut at = table;
    for key in keys {
        let inner = at.entry(key).or_insert_with(|| toml::Value::Table(toml::Table::new()));
        at = inner.as_table_mut().ok_or_else(|| fault(format!("{key}, which is not a table")))?;
    }
    at.insert(last.to_owned(), value);
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::blockwise::BlockwiseRule;
    use crate::optim::{MomentFormat, StateMap, optimizers};

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

    /// A message quotes at most eighty characters of the file.
    #[test]
    fn quotations_in_messages_are_cut_and_escaped() {
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
        // The list of accepted keys is not cut.
        let error = RunConfig::parse("run.toml", "seeed = 1", &[]).unwrap_err().to_string();
        assert!(
            error.contains("`seeed`, expected one of `seed`") && error.contains("`telemetry`"),
            "{error}"
        );
    }

    #[test]
    fn defaults_are_resolved_and_read_back() {
        let config = changed(&[]).unwrap();
        assert_eq!((config.policy().unwrap().name.as_ref(), config.checkpoint.keep), ("fp32", 2));
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
        assert_eq!(config.optimizer.moments(), MomentFormat::Blockwise8(BlockwiseRule::Cpu));
        assert_eq!(config.policy(), Some(Policy::bf16_pure_stochastic(7)));
        assert_eq!((config.schedule.steps, config.data.files.len()), (20, 2));
        let config = changed(&["optimizer.moments=lin8-tensor", "precision.policy=fp16"]).unwrap();
        let map = StateMap::new(&"lin8-tensor".parse().unwrap()).unwrap();
        assert_eq!(config.optimizer.moments(), MomentFormat::Map(map));
        let config = changed(&["precision.policy=fp16", "precision.scaling=megatron"]).unwrap();
        assert_eq!(config.policy().unwrap().scaling, Some(crate::scaling::ScalingOptions::MEGATRON));
        assert_eq!(RunConfig::parse("x", &config.resolved(), &[]).unwrap(), config);
        let jsonl = TextFormat::JsonLines { field: "text".into() };
        assert_eq!(config.format_of(Path::new("c.jsonl")), jsonl);
    }

    /// Settings of every optimizer are read back as they were written; the older keys keep the order of
    /// earlier versions, whose checkpoints hold it.
    #[test]
    fn settings_of_every_optimizer_are_resolved_and_read_back() {
        for (name, about) in optimizers() {
            let kind = format!("optimizer.kind={name}");
            let config =
                changed(&[&kind, "optimizer.moments=4bit", "optimizer.lr_scale={head=0.5}"]).unwrap();
            assert_eq!(config.optimizer.moments(), MomentFormat::Torchao4, "{about}");
            assert_eq!(RunConfig::parse("x", &config.resolved(), &[]).unwrap(), config);
            assert_eq!(config.optimizer.rate_scales().0["head"], 0.5);
        }
        let keys = |text: String| {
            let lines = text.lines().skip_while(|line| *line != "[optimizer]").skip(1);
            let lines = lines.take_while(|line| !line.is_empty());
            lines.map(|line| line.split(" =").next().unwrap().to_owned()).collect::<Vec<_>>().join(" ")
        };
        let expected =
            "kind lr moments beta1 beta2 eps weight_decay momentum nesterov decay no_decay max_norm";
        assert_eq!(keys(changed(&[]).unwrap().resolved()), expected);
        assert_eq!(keys(changed(&["optimizer.kind=sgd"]).unwrap().resolved()), expected);
        let config = changed(&["optimizer.no_decay=[\"*norm*\"]", "optimizer.paged=true"]).unwrap();
        assert_eq!(config.optimizer.decay_groups().no_decay, ["*norm*"]);
        assert!(keys(config.resolved()).ends_with("max_norm paged"));
    }

    /// The settings that are printed have every key of their kinds.
    #[test]
    fn a_change_of_a_kind_takes_its_defaults_along() {
        let printed = LEAST.replace(
            "lr = 1e-3",
            "kind = \"adamw\"\nlr = 1e-3\nmoments = \"f32\"\nbeta1 = 0.9\nbeta2 = 0.95\neps = 1e-8",
        );
        let parse = |text: &str, changes: &[&str]| {
            let changes: Vec<_> = changes.iter().map(|c| (*c).to_owned()).collect();
            RunConfig::parse_with_notes("run.toml", text, &changes).map_err(|error| error.to_string())
        };
        for (kind, _) in optimizers() {
            let (config, _) = parse(&printed, &[&format!("optimizer.kind={kind}")]).unwrap();
            let bare = changed(&[&format!("optimizer.kind={kind}")]).unwrap();
            assert_eq!(config, bare, "{kind}: what is printed is the default");
        }
        let (_, notes) = parse(&printed, &["optimizer.kind=lion"]).unwrap();
        assert_eq!(
            notes,
            [
                "optimizer.kind = \"lion\": left out eps = 1e-8, adamw's default; lion's default beta2 = 0.99 (was 0.95)"
            ]
        );
        // What is set for the new kind stays, in any order.
        let (config, _) = parse(&printed, &["optimizer.beta2=0.95", "optimizer.kind=lion"]).unwrap();
        assert_eq!(config, changed(&["optimizer.kind=lion", "optimizer.beta2=0.95"]).unwrap());
        // What the user wrote otherwise is refused by name.
        let own = printed.replace("eps = 1e-8", "eps = 1e-6");
        let error = parse(&own, &["optimizer.kind=lion"]).unwrap_err();
        assert!(error.contains("optimizer.eps = 1e-6") && error.contains("\"lion\""), "{error}");
        assert!(parse(&own, &["optimizer.kind=adamw"]).is_ok() && parse(&own, &[]).is_ok());
        // The same for other kinds.
        let wsd =
            printed.replace("steps = 10", "steps = 10\nkind = \"wsd\"\nmin_ratio = 0.1\ndecay_steps = 5");
        let error = parse(&wsd, &["schedule.kind=cosine"]).unwrap_err();
        assert!(error.contains("schedule.decay_steps = 5"), "{error}");
        let (_, notes) = parse(&wsd.replace("= 5", "= 0"), &["schedule.kind=constant"]).unwrap();
        assert!(notes[0].contains("left out min_ratio = 0.1, decay_steps = 0"), "{notes:?}");
        let (_, notes) = parse(&printed, &["schedule.steps=40", "schedule.warmup=50"]).unwrap();
        assert!(notes[0].starts_with("schedule.warmup: 50 steps of a run of 40: "), "{notes:?}");
        assert!(parse(&printed, &["schedule.steps=40", "schedule.warmup=39"]).unwrap().1.is_empty());
        let scaled = format!("{printed}[precision]\npolicy = \"fp16\"\nscaling = \"pytorch\"");
        let (_, notes) = parse(&scaled, &["precision.policy=bf16"]).unwrap();
        assert!(notes[0].contains("scaling = \"pytorch\""), "{notes:?}");
        let error = parse(&scaled.replace("pytorch", "megatron"), &["precision.policy=bf16"]).unwrap_err();
        assert!(error.contains("precision.scaling = \"megatron\""), "{error}");
    }

    #[test]
    fn faults_name_the_key() {
        for (change, part) in [
            ("optimizer.lrr=1", "lrr"),
            ("data.split=\"\"", "data.split: expected at least one character"),
            ("optimizer.lr=-1", "optimizer.lr: expected 0 to"),
            ("precision.policy=fp9", "fp32, fp16, bf16"),
            ("precision.policy=fp8", "expected fp8-current, fp8-delayed, fp8-rowwise"),
            ("precision.policy=fp8", "(all: mantissa train --show-policy list), got fp8"),
            ("precision=fp8", "expected precision.policy=fp8-current"),
            ("optimizer.moments=3bit", "8bit:cpu"),
            ("optimizer.kind=nosuch", "adamw, sgd"),
            ("optimizer.momentum=0.5", "optimizer.momentum: expected no such key with kind = \"adamw"),
            ("optimizer.nesterov=true", "`beta1`, `beta2`"),
            ("optimizer.warmup_init=true", "[optimizer] `warmup_init`, expected one of `kind`"),
            ("optimizer={kind=\"sgd\", lr=1, momentum=1}", "optimizer.momentum: expected 0 to"),
            ("optimizer={kind=\"sgd\", lr=1, nesterov=true, momentum=0}", "above 0 with nesterov"),
            ("optimizer={kind=\"muon\", lr=1, scale=\"rsm\"}", "rms, jordan, spectral, none"),
            (
                "optimizer={kind=\"muon\", lr=1, iterations=5.7}",
                "optimizer.iterations: expected a whole number from 1 to 20, got 5.7",
            ),
            ("optimizer={kind=\"soap\", lr=1, block=4}", "expected a whole number from 8 to 1024, got 4"),
            ("optimizer={kind=\"adafactor\", lr=1, warmup_init=true}", "without relative_step"),
            ("optimizer={kind=\"lion\", lr=1, paged=true, moments=\"lin8\"}", "other than a map"),
            ("optimizer={kind=\"lion\"}", "lr"),
            ("optimizer.lr_scale={head=-1}", "optimizer.lr_scale: expected 0 to"),
            ("telemetry.each=3", "each"),
            ("optimizer.moments=dyn8-unsigned", "lin8"),
            ("precision.scaling=megatron", "no loss scaling"),
            ("schedule.kind=step", "cosine"),
            ("data.batch=0", "data.batch"),
            ("parallel.leaves=3", "parallel.leaves: expected 1, 2, 4 or 8, got 3"),
            ("parallel={leaves=2}", "fix: --set data.accumulate=2 --set data.batch=1"),
            ("parallel.zero=4", "parallel.zero: expected 0, 1, 2 or 3"),
            ("parallel.gather=int8-g256", "parallel.gather: expected nothing without an f32 master copy"),
            ("parallel.gather=q4_0", "parallel.gather: expected f32, sign, or a scheme"),
            ("parallel.gradients=nvfp4", "parallel.gradients: expected f32, sign, or a scheme"),
            ("data.files=[]", "data.files"),
            ("seed", "no = sign"),
            ("out.x=1", "out, which is not a table"),
            ("optimizer=muon", "optimizer=muon: expected optimizer.kind=muon, got one value"),
            ("precision=\"nvfp4\"", "expected precision.policy=nvfp4"),
            ("schedule = constant", "expected schedule.kind=constant"),
            ("adapter=lora", "expected adapter.kind=lora"),
            ("optimizer.kind=adamw8bit", "; fix: --set optimizer.kind=adamw --set optimizer.moments=8bit"),
            ("optimizer.kind=rmsprop", "expected adamw, sgd, adafactor, lion, muon, soap, got \"rmsprop\""),
            (
                "schedule.steps=\"many\"",
                "schedule.steps: expected a whole number of at least 0, got \"many\"",
            ),
            ("data.batch=1.5", "data.batch: expected a whole number of at least 1, got 1.5"),
            ("optimizer.moment=\"f32\"", "did you mean \"moments\"?"),
        ] {
            let message = changed(&[change]).unwrap_err();
            assert!(message.contains(part) && message.contains("run.toml"), "{change}: {message}");
        }
        let whole_rows = changed(&["parallel.zero=3", "precision.policy=int8-sr"]).unwrap_err();
        assert!(whole_rows.contains("parallel.zero: expected 0, 1 or 2 with INT8 weights"), "{whole_rows}");
        assert!(changed(&["parallel.zero=3"]).is_ok());
    }
}
