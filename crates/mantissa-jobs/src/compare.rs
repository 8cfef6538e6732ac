//! Comparison of candidates for one model: recipes, and finished outputs, on the same windows.

mod bench;
mod report;

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::Instant;

use mantissa_advise::subject;
use mantissa_eval::{Sequence, stats};
use mantissa_plan::contract::loads_in;
use mantissa_quant::{Outcome, Quality};
use mantissa_store::convention::ModelFiles;
use mantissa_store::{Paths, Scratch, disk};
use serde::{Deserialize, Serialize};

use self::bench::tokens;
pub use self::bench::{Bench, quantize_verified};
use self::report::pairs;
pub use self::report::{ComparePair, CompareReport, CompareRow, ComparedText, TextFigures};
use crate::adapt;
use crate::calibration::Calibration;
use crate::default_text;
use crate::error::{BadInput, Class, InPlace, JobError, Result};
use crate::finished;
use crate::host::Host;
use crate::inspect::Inspect;
use crate::job::{Job, JobOutput};
use crate::lint::AsStated;
use crate::loaded::ModelUse;
use crate::measured_text::MeasuredText;
use crate::model::{ModelPath, open, open_quietly};
use crate::progress::Unit;
use crate::quantize::{PreparedQuantize, Quantize, RecipeText, WeightOptions};

/// Compares candidates for one model by the loss that they measure on the same windows.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Compare {
    /// Model that the candidates are compared with, and that recipes quantize.
    pub model: ModelPath,
    /// Candidates.
    pub candidates: Vec<CompareCandidate>,
    /// Texts to measure on; none for the held-out part of the built-in text.
    #[serde(default)]
    pub texts: Vec<MeasuredText>,
    /// Calibration of the recipes that need one; the built-in text if it names none.
    #[serde(default)]
    pub calibration: Calibration,
    /// Seed of all random numbers.
    #[serde(default)]
    pub seed: u64,
    /// Folder that keeps the outputs of recipes, by their names; without it they are temporary.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep_outputs: Option<PathBuf>,
}

/// Candidate of a comparison.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CompareCandidate {
    /// Quantization of the model.
    Recipe(RecipeText),
    /// Finished output: a folder, a GGUF file, or a name in the Hugging Face cache.
    Model(ModelPath),
}

/// Arguments of a comparison.
#[derive(Clone, Debug, Default)]
pub struct CompareArguments {
    /// Model that the candidates are compared with.
    pub model: ModelPath,
    /// Recipes.
    pub recipes: Vec<String>,
    /// Finished outputs.
    pub outputs: Vec<ModelPath>,
    /// Texts to measure on.
    pub texts: Vec<MeasuredText>,
    /// Calibration of recipes.
    pub calibration: Calibration,
    /// Seed of all random numbers.
    pub seed: u64,
    /// Folder that keeps the outputs of recipes.
    pub keep_outputs: Option<PathBuf>,
}

impl CompareArguments {
    /// Reads the recipes; recipes come before finished outputs.
    ///
    /// # Errors
    /// No candidate, or one twice; a wrong recipe.
    pub fn resolve(self) -> Result<Compare> {
        let mut candidates = Vec::new();
        for name in &self.recipes {
            let recipe = RecipeText::read(name).and_then(|recipe| recipe.load().map(|_| recipe));
            let recipe = recipe.map_err(|error| match is_output(name) {
                true => BadInput::new("--recipe", format!("{name}, a model"), "a recipe's name or file")
                    .with_fix(format!("{name} without --recipe"))
                    .into(),
                false => error,
            })?;
            candidates.push(CompareCandidate::Recipe(recipe));
        }
        candidates.extend(self.outputs.into_iter().map(CompareCandidate::Model));
        let names: Vec<String> = candidates.iter().map(CompareCandidate::name).collect();
        if names.is_empty() {
            let fix = "mantissa compare MODEL --recipe rtn-int4-g128 --recipe nvfp4";
            return Err(BadInput::new("compare", "no candidate", "recipes or finished outputs")
                .with_fix(fix)
                .into());
        }
        if let Some(i) = (1..names.len()).find(|&i| names[..i].contains(&names[i])) {
            return Err(BadInput::new("compare", format!("{} twice", names[i]), "each candidate once").into());
        }
        Ok(Compare {
            model: self.model,
            candidates,
            texts: self.texts,
            calibration: self.calibration,
            seed: self.seed,
            keep_outputs: self.keep_outputs,
        })
    }
}

/// True if `path` is a finished output: a folder with a config, or a GGUF file.
fn is_output(path: &str) -> bool {
    let path = Path::new(path);
    path.join("config.json").is_file()
        || (path.is_file() && path.extension().is_some_and(|end| end == "gguf"))
}

impl CompareCandidate {
    /// Returns the name of the row.
    pub fn name(&self) -> String {
        match self {
            CompareCandidate::Recipe(recipe) => recipe.without_place().name,
            CompareCandidate::Model(model) => model.named().display().to_string(),
        }
    }
}

/// Texts of a comparison by name, tokenized.
type Texts = Vec<(String, Vec<Sequence>)>;

/// Output of a candidate, ready to be measured.
struct Made {
    model: ModelPath,
    quantize_seconds: Option<f64>,
    fallbacks: Option<usize>,
}

impl Compare {
    /// Reads and tokenizes the texts.
    fn read(&self, host: &Host) -> Result<Texts> {
        let default = [MeasuredText { text: Some(default_text::NAME.into()), ..MeasuredText::default() }];
        let texts = if self.texts.is_empty() { &default[..] } else { &self.texts };
        let mut read = Texts::new();
        for text in texts {
            let none = || BadInput::new("compare", "no text", "--text or --tokens");
            let sequences = text.sequences(&self.model, false, host)?.ok_or_else(none)?;
            let name = default_text::shown(&text.name()).to_owned();
            if read.iter().any(|(other, _)| *other == name) {
                let found = format!("two texts of the name {name}");
                return Err(BadInput::new("--text", found, "texts with names of their own").into());
            }
            read.push((name, sequences));
        }
        Ok(read)
    }

    /// Returns the quantization of a candidate to `out`.
    fn quantization(&self, recipe: &RecipeText, out: &Path) -> Result<Quantize> {
        let needs = recipe.load()?.needs_calibration();
        let calibration = if needs { self.calibration.or_default() } else { Calibration::default() };
        let weights = WeightOptions {
            recipe: recipe.clone(),
            calibration,
            seed: self.seed,
            ..WeightOptions::default()
        };
        Ok(Quantize { source: self.model.clone(), out: out.to_owned(), weights, ..Quantize::default() })
    }

    /// Returns the place of a recipe's output in `folder`.
    fn place(recipe: &RecipeText, folder: &Path) -> Result<PathBuf> {
        let (name, container) = (recipe.without_place().name, recipe.load()?.container());
        let stem = name.strip_suffix(".toml").unwrap_or(&name);
        Ok(folder.join(if container.is_one_file() { container.output_name(stem) } else { stem.to_owned() }))
    }

    /// Describes the use of two models side by side on these texts.
    fn usage(texts: &Texts, host: &Host) -> ModelUse<'static> {
        let longest = texts.iter().map(|(_, sequences)| ModelUse::evaluation(sequences, host.threads));
        let most =
            |of: fn(&ModelUse<'static>) -> usize| longest.clone().map(|used| of(&used)).max().unwrap_or(0);
        let (pass, threads) = (most(|used| used.pass), most(|used| used.threads));
        ModelUse { pass, longest: pass, threads, logits: mantissa_eval::ROWS, ..ModelUse::default() }
    }

    /// Quantizes the model, if the candidate is a recipe.
    fn made(&self, candidate: &CompareCandidate, scratch: &Path, host: &Host) -> Result<Made> {
        let recipe = match candidate {
            CompareCandidate::Recipe(recipe) => recipe,
            CompareCandidate::Model(model) => {
                return Ok(Made { model: model.clone(), quantize_seconds: None, fallbacks: None });
            }
        };
        let start = Instant::now();
        let out = Compare::place(recipe, self.keep_outputs.as_deref().unwrap_or(scratch))?;
        let job = self.quantization(recipe, &out)?;
        let mut prepared = job.prepare(&AsStated, host)?;
        prepared.warn(host)?;
        let outcome = if let Some(outcome) = self.finished(&prepared, &out, host)? {
            host.note(&format!("{}: already complete", out.display()));
            Some(outcome)
        } else if self.keep_outputs.is_some() {
            let outcomes = prepared.run(prepared.coverage(host)?, host)?.outcomes;
            outcomes.into_iter().next()
        } else {
            let coverage = prepared.coverage(host)?;
            let plan = prepared.plans.pop().map(|plan| plan.with_coverage(coverage));
            let made =
                plan.map(|plan| quantize_verified(plan, &prepared.source, &self.model, &out, Some(host)));
            made.transpose()?.map(|(_, outcome)| outcome)
        };
        let fallbacks = outcome.map(|outcome| outcome.quality.fallbacks.len());
        let quantize_seconds = Some(start.elapsed().as_secs_f64());
        Ok(Made { model: ModelPath::new(out), quantize_seconds, fallbacks })
    }

    /// Finds the kept output of a candidate, if an earlier comparison or quantization has made it.
    fn finished(&self, prepared: &PreparedQuantize<'_>, out: &Path, host: &Host) -> Result<Option<Outcome>> {
        match prepared.plans.first().filter(|_| self.keep_outputs.is_some()) {
            Some(plan) => finished::output_of_plan(plan, &prepared.source, out, false, host),
            None => Ok(None),
        }
    }

    /// Refuses a place with the finished output of another job, before work on the other candidates.
    fn check_kept(&self, host: &Host) -> Result<()> {
        let Some(folder) = &self.keep_outputs else { return Ok(()) };
        for candidate in &self.candidates {
            let CompareCandidate::Recipe(recipe) = candidate else { continue };
            let out = Compare::place(recipe, folder)?;
            if host.is_refused(&out) {
                let job = self.quantization(recipe, &out)?;
                self.finished(&job.prepare(&AsStated, host)?, &out, host)?;
            }
        }
        Ok(())
    }

    /// Makes and measures one candidate.
    fn row(
        &self,
        candidate: &CompareCandidate,
        texts: &Texts,
        scratch: &Path,
        host: &Host,
    ) -> Result<CompareRow> {
        let start = Instant::now();
        let name = candidate.name();
        let Made { model, quantize_seconds, fallbacks } = self.made(candidate, scratch, host)?;
        let inspected = Inspect { model: model.clone(), stats: false }.run(host)?;
        let files = open(&model, host)?;
        let described = subject::of_artifact(&files, None);
        let loads_in = described.map(|subject| loads_in(&subject)).unwrap_or_default();
        let found = Compare::measured(&name, files, open_quietly(&self.model)?, texts, host)?;
        // A model of another tool has no report.
        let calibration = Quality::read_at(model.location()).ok().and_then(|quality| quality.calibration);
        let is_kept = self.keep_outputs.is_some() || quantize_seconds.is_none();
        let empty = CompareRow::failed(name, String::new(), start.elapsed().as_secs_f64());
        let row = CompareRow {
            path: is_kept.then(|| model.shown().to_owned()),
            format: Some(inspected.convention),
            bits: inspected.linear_bits_per_weight.or(inspected.bits_per_weight),
            bytes: Some(inspected.bytes),
            quantize_seconds,
            loads_in,
            fallbacks,
            calibration,
            ..empty
        };
        Ok(row.measured(texts.iter().map(|(name, _)| name), found))
    }

    /// Compares the model of `files` with that of `reference`, within the memory of `host`.
    fn measured(
        name: &str,
        files: ModelFiles,
        reference: ModelFiles,
        texts: &Texts,
        host: &Host,
    ) -> Result<Vec<mantissa_eval::Evaluation>> {
        let used = Compare::usage(texts, host);
        let both = [&files, &reference];
        let needs = |threads| Ok::<_, JobError>(ModelUse { threads, ..used }.needed(&both)?.1);
        let threads = adapt::fit_threads(used.threads, host, needs)?;
        let (model, reference) = ModelUse { threads, ..used }.load(files, Some(reference), host)?;
        let Some(reference) = reference else { return Ok(Vec::new()) };
        let bench = Bench { reference: &reference.decoder, texts, threads };
        let total = texts.iter().map(|(_, sequences)| tokens(sequences)).sum();
        watched(host, total, name, |told| bench.compared(&model.decoder, told))
    }

    /// Measures the model itself.
    fn described(&self, texts: &Texts, host: &Host) -> Result<(Option<f64>, u64, Vec<ComparedText>)> {
        let inspected = Inspect { model: self.model.clone(), stats: false }.run(host)?;
        let used = Compare::usage(texts, host);
        let files = open(&self.model, host)?;
        if files.is_quantized() {
            let format = files.convention_name();
            host.note(&format!(
                "the model is itself quantized ({format}): the comparison leaves out what that lost"
            ));
        }
        let needs = |threads| Ok::<_, JobError>(ModelUse { threads, ..used }.needed(&[&files])?.1);
        let threads = adapt::fit_threads(used.threads, host, needs)?;
        let (model, _) = ModelUse { threads, ..used }.load(files, None, host)?;
        let bench = Bench { reference: &model.decoder, texts, threads };
        let found = watched(host, 0, "", |told| bench.reference(told))?;
        let described = texts.iter().zip(found).map(|((name, _), found)| ComparedText {
            text: name.clone(),
            windows: found.windows.len(),
            tokens: found.tokens,
            nll: found.nll,
            nll_se: found.nll_se,
            ppl: found.ppl,
        });
        let bits = inspected.linear_bits_per_weight.or(inspected.bits_per_weight);
        Ok((bits, inspected.bytes, described.collect()))
    }
}

/// Runs a `pass` over `total` tokens (0 if unknown) of the model `name`: shows its progress, and stops it when the host asks.
fn watched<T>(
    host: &Host,
    total: u64,
    name: &str,
    pass: impl FnOnce(&(dyn Fn(u64) -> ControlFlow<()> + Sync)) -> Result<T>,
) -> Result<T> {
    let progress = host.progress(total, Unit::Items("tokens"));
    if !name.is_empty() {
        progress.message(name);
    }
    let told = |done| {
        progress.set(done);
        if host.stops() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let found = host.orderly(|| pass(&told), JobError::is_stop)?;
    progress.finish();
    Ok(found)
}

/// True for a failure of disk or system; too little memory is a fact about one candidate.
fn is_of_system(error: &JobError) -> bool {
    error.class() == Class::Environment && !matches!(error, JobError::Memory(_))
}

impl Job for Compare {
    const NAME: &'static str = "compare";
    const VERSION: u32 = 1;
    type Report = CompareReport;

    fn inputs(&self) -> Vec<PathBuf> {
        let mut inputs = self.model.inputs();
        for candidate in &self.candidates {
            match candidate {
                CompareCandidate::Recipe(recipe) if recipe.text.is_some() => {
                    inputs.push((&recipe.name).into());
                }
                CompareCandidate::Recipe(_) => {}
                CompareCandidate::Model(model) => inputs.extend(model.inputs()),
            }
        }
        inputs.extend(self.texts.iter().flat_map(MeasuredText::inputs));
        inputs.extend(self.calibration.inputs());
        inputs
    }

    fn outputs(&self) -> Vec<JobOutput> {
        let Some(folder) = &self.keep_outputs else { return Vec::new() };
        let of = |candidate: &CompareCandidate| match candidate {
            CompareCandidate::Recipe(recipe) => {
                let kind = recipe.load().ok()?.container().output_kind();
                Some(JobOutput { option: "--keep-outputs", path: Compare::place(recipe, folder).ok()?, kind })
            }
            CompareCandidate::Model(_) => None,
        };
        self.candidates.iter().filter_map(of).collect()
    }

    fn paths(&self) -> Paths {
        let mut paths = Paths::default();
        self.inputs().into_iter().for_each(|path| paths.read(path));
        self.outputs().into_iter().for_each(|output| paths.write(output.option, output.path, output.kind));
        // Outputs of earlier comparisons are used again.
        paths.answer_finished("--keep-outputs");
        paths
    }

    fn memory(&self, host: &Host) -> Result<u64> {
        let texts = self.read(host)?;
        let files = open_quietly(&self.model)?;
        let mut most = Compare::usage(&texts, host).needed(&[&files, &files])?.1;
        for candidate in &self.candidates {
            if let CompareCandidate::Recipe(recipe) = candidate {
                let job = self.quantization(recipe, Path::new("out"))?;
                most = most.max(job.prepare(&AsStated, host)?.peak_bytes());
            }
        }
        Ok(most)
    }

    /// Makes and measures every candidate. One that fails is a row with the reason.
    ///
    /// # Errors
    /// A model or a text that cannot be read; a failure of disk or system; a stop; the last failure, if every candidate fails.
    fn run(&self, host: &Host) -> Result<CompareReport> {
        let start = Instant::now();
        let texts = self.read(host)?;
        let (bits, bytes, described) = self.described(&texts, host)?;
        let scratch = Scratch::new()?;
        if let Some(folder) = &self.keep_outputs {
            disk::create_folders(folder).at(folder.display().to_string())?;
        }
        self.check_kept(host)?;
        let mut rows = Vec::with_capacity(self.candidates.len());
        let mut failed = None;
        for (i, candidate) in self.candidates.iter().enumerate() {
            let began = Instant::now();
            host.note(&format!("{} of {}: {}", i + 1, self.candidates.len(), candidate.name()));
            let folder = scratch.path().join(i.to_string());
            disk::create_folder(&folder).at(folder.display().to_string())?;
            match self.row(candidate, &texts, &folder, host) {
                Ok(row) => rows.push(row),
                // Disk and system fail for the others as well, and no report could be trusted to be whole.
                Err(error) if error.is_stop() || is_of_system(&error) => return Err(error),
                Err(error) => {
                    let reason = error.to_string();
                    rows.push(CompareRow::failed(candidate.name(), reason, began.elapsed().as_secs_f64()));
                    failed = Some(error);
                }
            }
            // Only one output is on the disk at a time. What stays is removed with the folder around it.
            let _ = disk::remove_all(&folder);
        }
        match failed {
            Some(error) if rows.iter().all(|row| row.error.is_some()) => return Err(error),
            _ => {}
        }
        let failures = rows.iter().filter_map(|row| Some(format!("{}: {}", row.name, row.error.as_ref()?)));
        host.warn_all(&failures.collect::<Vec<_>>())?;
        let (pairs, critical) = pairs(&rows);
        let windows = described.iter().map(|text| text.windows).min().unwrap_or(0);
        Ok(CompareReport {
            model: self.model.named().to_owned(),
            bits,
            bytes,
            texts: described,
            rows,
            pairs,
            critical,
            note: stats::note(windows),
            threads: host.threads,
            seconds: start.elapsed().as_secs_f64(),
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_comparison_is_read_back_and_a_candidate_is_named_once() {
        let arguments = |recipes: &[&str]| CompareArguments {
            model: ModelPath::new("m"),
            recipes: recipes.iter().map(|name| (*name).to_owned()).collect(),
            outputs: vec![ModelPath::new("out")],
            ..CompareArguments::default()
        };
        let job = arguments(&["NVFP4", "rtn-q4_0"]).resolve().unwrap();
        let names: Vec<String> = job.candidates.iter().map(CompareCandidate::name).collect();
        assert_eq!(names, ["nvfp4", "rtn-q4_0", "out"]);
        let read = crate::job::from_json::<Compare>("j", crate::job::to_json(&job).unwrap()).unwrap();
        assert_eq!(read, job);
        let kept = Compare { keep_outputs: Some("kept".into()), ..job };
        let outputs: Vec<PathBuf> = kept.outputs().into_iter().map(|output| output.path).collect();
        assert_eq!(outputs, [PathBuf::from("kept/nvfp4"), PathBuf::from("kept/rtn-q4_0.gguf")]);
        let error = |recipes| arguments(recipes).resolve().unwrap_err().to_string();
        assert!(error(&["nvfp4", "NVFP4"]).contains("nvfp4 twice"));
        assert!(error(&["no-such-recipe"]).contains("no-such-recipe"));
        let none = CompareArguments { model: ModelPath::new("m"), ..CompareArguments::default() };
        assert!(none.resolve().unwrap_err().to_string().contains("fix: mantissa compare MODEL --recipe"));
    }
}
