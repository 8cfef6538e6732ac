//! Complete run: the same command finds it finished, with nothing left to do, and reports what it did.

use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use mantissa_store::{Error, FileDigest, Manifest, Shown, hash_file, verify_manifest};
use mantissa_train::config::RunConfig;

use super::log::log_lines;
use super::report::TrainReport;
use super::results::Results;
use super::run_folder::RunFolder;
use super::setup::Setup;
use super::tokens::made_from;
use super::train_loop::{Past, examinable};
use crate::error::Result;
use crate::run_files::{ADAPTER, BASE, LOG, MODEL, QUANTIZED, RunFile, outcome_of};

/// Finished run with the settings of the command.
pub(crate) struct CompleteRun<'a> {
    pub(crate) run: &'a Path,
    pub(crate) settings: &'a RunConfig,
    pub(crate) setup: &'a Setup,
    pub(crate) about: RunFile,
}

impl CompleteRun<'_> {
    /// Names what differs from a run that the command would do now: its data, its models, or a result that is no longer as it was
    /// written. `models` identifies the models of the command ([`identity`]).
    ///
    /// # Errors
    /// Data or results that cannot be read.
    pub(crate) fn difference(&self, base: &Path, models: &str) -> Result<Option<String>> {
        if RunFolder::tokens_from(self.run)?.as_deref() != Some(&*made_from(self.settings, base, self.setup)?)
        {
            return Ok(Some("with other data or another tokenizer".to_owned()));
        }
        if self.about.models.as_deref() != Some(models) {
            return Ok(Some("with another initial model or teacher".to_owned()));
        }
        for name in self.results() {
            if let Some(mismatch) = verify_manifest(&self.run.join(name))?.first() {
                return Ok(Some(format!("with other files since: {name}: {}", Shown(&mismatch.to_string()))));
            }
        }
        Ok(None)
    }

    /// Returns the names of the results that the settings ask for.
    fn results(&self) -> Vec<&'static str> {
        let Some(adapter) = &self.settings.adapter else {
            // Learned scales have a result of their own.
            let quantized = self.run.join(QUANTIZED).is_dir().then_some(QUANTIZED);
            return [MODEL].into_iter().chain(quantized).collect();
        };
        let quantized = adapter.requantize.is_some();
        let wanted = [
            (ADAPTER, true),
            (BASE, adapter.loftq > 0),
            (MODEL, adapter.merge || quantized),
            (QUANTIZED, quantized),
        ];
        wanted.into_iter().filter_map(|(name, is_wanted)| is_wanted.then_some(name)).collect()
    }

    /// Reports the run from its files; `None` if they do not tell all.
    ///
    /// # Errors
    /// Files that cannot be read.
    pub(crate) fn report(self) -> Result<Option<TrainReport>> {
        let CompleteRun { run, settings, setup, ref about } = self;
        let mut past = Past::default();
        log_lines(&run.join(LOG))?.into_iter().for_each(|line| past.add(line));
        let (Some(last), Some(data)) = (past.last.clone(), about.data.clone()) else { return Ok(None) };
        let results = Results::of_complete(run, &self.results(), setup, settings, about)?;
        let names = self.results();
        let steps = names.iter().find(|name| **name == MODEL || **name == ADAPTER);
        let exported = steps.map(|name| Manifest::read(&run.join(name))).transpose()?;
        let exported = exported.and_then(|manifest| manifest.run.get("steps")?.as_u64());
        Ok(Some(TrainReport {
            run: run.to_owned(),
            already_complete: true,
            outcome: outcome_of(&past.learning),
            examinable: past.learning.is_failing() && examinable(settings),
            learning: past.learning.report(setup.decays.len()),
            results,
            data,
            parameters: setup.replica.config.parameters(),
            trainable_parameters: setup.trainable(),
            steps: last.step,
            resumed_at: None,
            skipped: last.skipped,
            tokens: last.tokens,
            loss: Some(last.loss),
            validation_loss: past.best.map(|(_, loss)| loss),
            exported_step: exported.unwrap_or(last.step),
            seconds: 0.0,
            predicted_peak_memory: about.predicted_peak_memory,
            measured_peak_memory: about.measured_peak_memory,
            worst_gemms: Vec::new(),
            ranks: Vec::new(),
        }))
    }
}

/// Identifies models by the names, sizes and times of their files, without a read of the weights, and a `config` by its content.
///
/// # Errors
/// I/O.
pub(crate) fn identity(models: &[PathBuf], config: Option<&Path>) -> Result<String> {
    let mut text = String::new();
    for model in models {
        let entries = std::fs::read_dir(model).into_iter().flatten().flatten().map(|entry| entry.path());
        let mut files: Vec<_> = entries.chain([model.clone()]).filter(|path| path.is_file()).collect();
        files.sort();
        text += "model\n";
        for file in files {
            let io = |error| Error::Io { path: file.clone(), operation: "look up", error };
            let about = std::fs::metadata(&file).map_err(io)?;
            let written = about.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
            let name = file.file_name().unwrap_or_default().display();
            text += &format!("{name:?} {} {}\n", about.len(), written.unwrap_or_default().as_nanos());
        }
    }
    if let Some(config) = config.filter(|config| config.is_file()) {
        text += &hash_file(config)?.hex();
    }
    Ok(FileDigest::of(text.as_bytes()).hex())
}
