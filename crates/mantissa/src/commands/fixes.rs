//! Commands that fix what the rules of an engine refuse.

use std::path::{Path, PathBuf};

use mantissa_advise::remedy::{self, Remedy};
use mantissa_jobs::choose;
use mantissa_jobs::lint::{Artifact, Remedies};
use mantissa_plan::contract::{EngineTarget, Report};
use mantissa_quant::Plan;
use mantissa_store::convention::ModelFiles;

use super::next_steps::{quoted, serve};

/// Stands for the unquantized model in a fix.
const SOURCE: &str = "SOURCE";

/// Words fixes as commands: of a plan the command line that was given, with another recipe, of a model others on it.
pub struct GivenLine;

impl Remedies for GivenLine {
    fn of_plan(&self, report: &mut Report, target: &EngineTarget, plan: &Plan, source: &ModelFiles) {
        let found = asked(report).and_then(|strict| remedy::of_plan(plan, source, target, strict));
        let given: Vec<String> = std::env::args().collect();
        let command = found.and_then(|remedy| match remedy {
            Remedy::Parallelism { tp } => {
                let mut line = Line(given.get(1..)?.to_vec());
                line.replace("--for", &target.to_string(), &EngineTarget { tp, ..*target }.to_string())?;
                Some(line.command())
            }
            Remedy::Quantize { recipe, format, default } => {
                Line(given.get(1..)?.to_vec()).with_recipe(&recipe, format, default)
            }
            Remedy::Keep { patterns } => Line(given.get(1..)?.to_vec()).with_kept(&patterns),
            _ => None,
        });
        apply(report, command.as_deref());
    }

    fn of_artifact(&self, report: &mut Report, target: &EngineTarget, artifact: &Artifact<'_>) {
        let &Artifact { place: model, files, subject, source } = artifact;
        let place = quoted(model);
        let found = asked(report).and_then(|strict| {
            remedy::of_artifact(files, subject, target, source.map(|(_, files)| files), strict)
        });
        let command = found.and_then(|remedy| Some(match remedy {
            Remedy::Parallelism { tp } => serve(&EngineTarget { tp, ..*target }, &subject.convention, model),
            Remedy::Keep { .. } => return None,
            Remedy::FromSource => {
                let from = if files.is_quantized() || files.gguf().is_some() { SOURCE } else { &place };
                let bits = match choose::loading_bits(subject, target)? {
                    choose::BITS => String::new(),
                    bits => format!(" --bits {bits}"),
                };
                format!("mantissa quantize {from} --for {target}{bits}")
            }
            Remedy::Convert { format } => {
                format!("mantissa convert {place} --format {format} --out {}", out(model, format, format))
            }
            Remedy::Requantize { scheme, format } => {
                let out = out(model, &scheme, format);
                format!(
                    "mantissa convert {place} --requantize {scheme} --format {format} --out {out} # rounds a second time"
                )
            }
            Remedy::Quantize { recipe, format, default } => {
                let from = source.map_or_else(|| place.clone(), |(path, _)| quoted(path));
                let (named, out) = (named(format, default), out(model, &recipe, format));
                format!("mantissa quantize {from} --recipe {recipe}{named} --for {target} --out {out}")
            }
        }));
        apply(report, command.as_deref());
        // Edits name the file at hand.
        for finding in &mut report.findings {
            finding.fix = finding.fix.replace("MODEL", &place);
        }
        for fix in report.unchecked.iter_mut().filter_map(|one| one.fix.as_mut()) {
            *fix = fix.replace("MODEL", &place);
        }
    }
}

/// Returns true if warnings are to be fixed as well; `None` if nothing is found that a recipe fixes.
fn asked(report: &Report) -> Option<bool> {
    report.findings.iter().any(|finding| finding.by_recipe).then(|| !report.fails())
}

fn apply(report: &mut Report, command: Option<&str>) {
    let Some(command) = command else { return };
    let fails = report.fails();
    for finding in report.findings.iter_mut().filter(|finding| finding.by_recipe) {
        // The fix of a refusal may leave a warning, whose own advice stays then.
        if finding.severity.fails() || !fails {
            finding.fix = command.to_owned();
        }
    }
}

/// Returns the option for a format that the recipe does not have by default.
fn named(format: &str, default: bool) -> String {
    if default { String::new() } else { format!(" --format {format}") }
}

/// Returns a free path beside `model` for its variant `what` in `format`.
fn out(model: &Path, what: &str, format: &str) -> String {
    let slug: String =
        what.chars().map(|c| if c.is_ascii_alphanumeric() || c == '.' { c } else { '-' }).collect();
    let end = if format == "gguf" { ".gguf" } else { "" };
    let stem = model.display().to_string();
    let stem = stem.trim_end_matches('/').trim_end_matches(".gguf");
    let path = |n: usize| match n {
        1 => PathBuf::from(format!("{stem}-{slug}{end}")),
        n => PathBuf::from(format!("{stem}-{slug}-{n}{end}")),
    };
    let free = (1..100).map(path).find(|path| !path.exists());
    quoted(&free.unwrap_or_else(|| path(100)))
}

/// Command line, without the program.
pub(super) struct Line(Vec<String>);

impl Line {
    /// Returns the command line that was given.
    pub(super) fn given() -> Self {
        Line(std::env::args().skip(1).collect())
    }

    /// Replaces the flags that divide the work by the folder that its workers share.
    pub(super) fn for_engine(mut self, job: &Path) -> Self {
        ["--engine", "--workers", "--job"].into_iter().for_each(|name| self.remove(name));
        self.0.retain(|word| word != "--submit");
        self.0.extend(["--job".to_owned(), job.display().to_string()]);
        self
    }

    /// Returns the words.
    pub(super) fn words(self) -> Vec<String> {
        self.0
    }

    /// Replaces the value `old` of an option, written as `--name old` or `--name=old`; a value of any text if `old` is
    /// not there.
    fn replace(&mut self, name: &str, old: &str, new: &str) -> Option<()> {
        let places: Vec<usize> = (0..self.0.len()).filter(|i| self.value(name, *i).is_some()).collect();
        let exact = places.iter().find(|i| self.value(name, **i) == Some(old));
        let at = *exact.or(places.first())?;
        match self.0[at].split_once('=') {
            Some(_) => self.0[at] = format!("{name}={new}"),
            None => *self.0.get_mut(at + 1)? = new.to_owned(),
        }
        Some(())
    }

    /// Returns the value of the option `name` if it stands at `i`.
    fn value(&self, name: &str, i: usize) -> Option<&str> {
        let word = self.0.get(i)?;
        if word == name {
            return self.0.get(i + 1).map(String::as_str);
        }
        word.strip_prefix(name)?.strip_prefix('=')
    }

    fn find(&self, name: &str) -> Option<String> {
        (0..self.0.len()).find_map(|i| self.value(name, i).map(str::to_owned))
    }

    /// Removes every occurrence of the option `name`.
    fn remove(&mut self, name: &str) {
        while let Some(i) = (0..self.0.len()).find(|i| self.value(name, *i).is_some()) {
            let words = if self.0[i] == name { 2 } else { 1 };
            self.0.drain(i..i + words);
        }
    }

    /// Returns the command with another recipe and format. A command without `--recipe` becomes `quantize`.
    fn with_recipe(mut self, recipe: &str, format: &str, default: bool) -> Option<String> {
        let out = self.find("--out");
        if self.find("--recipe").is_none() {
            let (model, target, out) = (self.0.get(1)?.clone(), self.find("--for")?, out.clone()?);
            let words = ["quantize", &model, "--recipe", "", "--for", &target, "--out", &out];
            self = Line(words.map(str::to_owned).to_vec());
        }
        self.replace("--recipe", "", recipe)?;
        self.remove("--format");
        if !default {
            let at =
                self.0.iter().position(|word| word == recipe || word.ends_with(&format!("={recipe}")))?;
            self.0.splice(at + 1..at + 1, ["--format".to_owned(), format.to_owned()]);
        }
        if let Some(out) = out {
            let bare = out.trim_end_matches(".gguf");
            let new = if format == "gguf" { format!("{bare}.gguf") } else { bare.to_owned() };
            self.replace("--out", &out, &new)?;
        }
        Some(self.command())
    }

    /// Returns the command with further layers left unquantized; `None` if it takes no such patterns.
    fn with_kept(mut self, patterns: &[String]) -> Option<String> {
        self.0.iter().find(|word| *word == "quantize")?;
        // Behind the patterns that were given, or the recipe that has them.
        let at = (0..self.0.len()).rev().find(|i| self.value("--keep", *i).is_some());
        let at = at.or_else(|| (0..self.0.len()).find(|i| self.value("--recipe", *i).is_some()))?;
        let next = at + if self.0[at].contains('=') { 1 } else { 2 };
        let words = patterns.iter().flat_map(|pattern| ["--keep".to_owned(), pattern.clone()]);
        self.0.splice(next..next, words);
        Some(self.command())
    }

    fn command(&self) -> String {
        let words: Vec<_> = self.0.iter().map(|word| quoted(Path::new(word))).collect();
        format!("mantissa {}", words.join(" "))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn line(words: &str) -> Line {
        Line(words.split(' ').map(str::to_owned).collect())
    }

    #[test]
    fn a_recipe_is_replaced_in_the_line_that_was_given() {
        let given = "quantize m --recipe=gptq-int3-g128 --calibration t.txt --format gptq --out o --for vllm";
        let expected = "mantissa quantize m --recipe=gptq-int4-g128 --calibration t.txt --out o --for vllm";
        assert_eq!(line(given).with_recipe("gptq-int4-g128", "compressed-tensors", true).unwrap(), expected);
        let given = "quantize demo --recipe rtn-int4-g32 --for llama.cpp --out o";
        let expected = "mantissa quantize demo --recipe rtn-q4_0 --format gguf --for llama.cpp --out o.gguf";
        assert_eq!(line(given).with_recipe("rtn-q4_0", "gguf", false).unwrap(), expected);
        let given = "fit demo --budget 4bpw --out o --for=mlx";
        let expected =
            "mantissa quantize demo --recipe rtn-int4-g64-asym:minmax --format mlx --for mlx --out o";
        assert_eq!(line(given).with_recipe("rtn-int4-g64-asym:minmax", "mlx", false).unwrap(), expected);
    }

    #[test]
    fn patterns_follow_those_that_were_given() {
        let more = ["*mlp.up_proj".to_owned()];
        let given = "quantize m --recipe nvfp4 --keep=*gate* --out o";
        let expected = "mantissa quantize m --recipe nvfp4 '--keep=*gate*' --keep '*mlp.up_proj' --out o";
        assert_eq!(line(given).with_kept(&more).unwrap(), expected);
        let given = "quantize m --recipe r.toml --out o";
        let expected = "mantissa quantize m --recipe r.toml --keep '*mlp.up_proj' --out o";
        assert_eq!(line(given).with_kept(&more).unwrap(), expected);
        assert_eq!(line("fit m --budget 4bpw --out o").with_kept(&more), None);
    }
}
