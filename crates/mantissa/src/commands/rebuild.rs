//! `mantissa rebuild`: makes the weights of an artifact again from its source and its `quality.json`.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use anyhow::Result;
use clap::{Parser, Subcommand};
use mantissa_quant::{Quality, Rebuild, Recipe};
use mantissa_store::convention::Container;
use mantissa_store::{Paths, Shown};
use serde::Serialize;

use super::convert;
use super::default_text;
use super::execute::Execute;
use super::model::{self, ModelPath};
use super::quantize;
use super::record::{COMMANDS, DECIDING, FILES, SPLIT, option_name};
use crate::context::Context;
use crate::error::{BadInput, GateFailed};
use crate::help::Group;
use crate::output::labelled;

/// Make the weights of an artifact again from its source
///
/// Runs the command that quality.json records, on --source, and compares the weight files with the recorded SHA-256.
/// Files that the command read, such as a calibration text, are taken from --file, the folder of quality.json or the
/// working folder, by their names; built-in texts and recipes are in the program, and recipe files in quality.json.
/// Exit code 1 if a file differs; the output is kept.
#[derive(clap::Args)]
#[command(after_help = "EXAMPLES
  mantissa rebuild demo-int4/quality.json --source demo --out demo-again
  mantissa rebuild model-gptq --source path/to/model --out model-again \\
      --file calibration.txt=texts/calibration.txt")]
pub struct Args {
    /// quality.json, or the artifact that has it
    quality: PathBuf,
    /// Model that was quantized
    ///
    /// Its files must have the recorded SHA-256.
    #[arg(long, value_name = "MODEL", help_heading = "Input")]
    source: ModelPath,
    /// Output folder or .gguf file
    #[arg(long, value_name = "PATH", help_heading = "Output")]
    out: PathBuf,
    /// Where a recorded file is, such as c.txt=path/c.txt
    #[arg(long, value_name = "NAME=PATH", value_parser = named_file, help_heading = "Input")]
    file: Vec<(String, PathBuf)>,
    /// What quality.json records, and the command that it stands for.
    #[arg(skip)]
    recorded: OnceLock<Recorded>,
}

/// Parses `NAME=PATH`.
fn named_file(text: &str) -> Result<(String, PathBuf), String> {
    let parts = text.split_once('=').filter(|(name, path)| !name.is_empty() && !path.is_empty());
    let (name, path) = parts.ok_or_else(|| format!("expected NAME=PATH, got \"{text}\""))?;
    Ok((name.to_owned(), PathBuf::from(path)))
}

/// Contents of quality.json, and the command to run.
struct Recorded {
    quality: Quality,
    rebuild: Rebuild,
    command: Recordable,
}

/// Command that can be recorded.
#[derive(Subcommand)]
enum Recordable {
    Quantize(Box<quantize::Args>),
    Convert(Box<convert::Args>),
}

impl Recordable {
    fn paths(&self, paths: &mut Paths) -> Result<()> {
        match self {
            Recordable::Quantize(args) => args.paths(paths),
            Recordable::Convert(args) => args.paths(paths),
        }
    }

    fn run(&self, context: &Context) -> Result<()> {
        match self {
            Recordable::Quantize(args) => args.run(context),
            Recordable::Convert(args) => args.run(context),
        }
    }
}

/// Command line of the recorded command.
#[derive(Parser)]
struct Line {
    #[command(subcommand)]
    command: Recordable,
}

impl Args {
    /// Reads quality.json and parses the command that it records.
    fn recorded_command(&self) -> Result<&Recorded> {
        match self.recorded.get() {
            Some(found) => Ok(found),
            None => {
                let made = self.read()?;
                Ok(self.recorded.get_or_init(|| made))
            }
        }
    }

    fn read(&self) -> Result<Recorded> {
        let shown = self.quality.display().to_string();
        let quality = Quality::read_at(&self.quality)?;
        let Some(rebuild) = quality.rebuild.clone() else {
            let allowed = "a record of the command (rebuild)";
            let fix = "quantize the source again: this file was written by an earlier version, or by train";
            return Err(BadInput::new(shown, "none", allowed).with_fix(fix).into());
        };
        let one_file = Container::named(&quality.container).is_some_and(|c| c.facts().one_file);
        if one_file && self.out.extension().is_none_or(|extension| extension != "gguf") {
            let out = self.out.display().to_string();
            return Err(BadInput::new(
                "--out",
                out,
                "a path that ends in .gguf, as the artifact is a GGUF file",
            )
            .into());
        }
        let foreign = rebuild.arguments.iter().find(|argument| {
            option_name(argument).is_none_or(|name| name != SPLIT && !DECIDING.contains(&name))
        });
        let foreign =
            foreign.or(Some(&rebuild.command).filter(|command| !COMMANDS.contains(&command.as_str())));
        if let Some(foreign) = foreign {
            let allowed = format!("{} with the options that decide its output", COMMANDS.join(" or "));
            return Err(
                BadInput::new(format!("{shown}: rebuild"), Shown(foreign).to_string(), allowed).into()
            );
        }
        let mut line = vec![
            "mantissa".into(),
            rebuild.command.clone().into(),
            self.source.named().as_os_str().to_owned(),
        ];
        for argument in &rebuild.arguments {
            self.require_plain(argument, &rebuild)?;
            line.push(self.located(argument)?.into());
        }
        line.extend(["--out".into(), self.out.as_os_str().to_owned()]);
        let parsed = Line::try_parse_from(line).map_err(|error| {
            let found = error.to_string().lines().next().unwrap_or_default().to_owned();
            let allowed = "a command of this version";
            BadInput::new(format!("{shown}: rebuild"), Shown(&found).to_string(), allowed)
        });
        let mut command = parsed?.command;
        if let (Recordable::Quantize(args), Some(text)) = (&mut command, &rebuild.recipe) {
            args.recipe_text = Some(text.clone());
        }
        Ok(Recorded { quality, rebuild, command })
    }

    /// Refuses an argument that could lead to a file that the user did not name: a value that is no plain name, and the
    /// name of a recipe file whose text is not in the record. A text between documents is no name.
    fn require_plain(&self, argument: &str, rebuild: &Rebuild) -> Result<()> {
        let Some((option, value)) = argument.split_once('=') else { return Ok(()) };
        let name = option_name(argument);
        let fault = |allowed: &str| {
            let what = format!("{}: rebuild: {}", self.quality.display(), Shown(option));
            Err(BadInput::new(what, Shown(value).to_string(), allowed).into())
        };
        let is_plain = Path::new(value).file_name().is_some_and(|name| name == value);
        if name != Some(SPLIT) && (!is_plain || value.contains(char::is_control)) {
            return fault("a plain name, without a folder or control characters");
        }
        if name == Some("recipe") && rebuild.recipe.is_none() && Recipe::is_file(value) {
            return fault("the name of a built-in recipe, or the text of the file in rebuild.recipe");
        }
        Ok(())
    }

    /// Returns an argument with the place of its file, if it names one.
    fn located(&self, argument: &str) -> Result<String> {
        let file = option_name(argument).is_some_and(|name| FILES.contains(&name));
        let Some((option, value)) = argument.split_once('=').filter(|_| file) else {
            return Ok(argument.to_owned());
        };
        if default_text::is(Path::new(value.split(':').next().unwrap_or(value))) {
            return Ok(argument.to_owned());
        }
        let folder = self.quality.parent().unwrap_or(Path::new(""));
        // A name may end in a weight or a key.
        let names = [Some((value, "")), value.rsplit_once(':')];
        for (name, rest) in names.into_iter().flatten() {
            let given = self.file.iter().find(|(known, _)| known == name).map(|(_, path)| path.clone());
            let found =
                given.or_else(|| [folder.join(name), PathBuf::from(name)].into_iter().find(|p| p.is_file()));
            if let Some(path) = found {
                let colon = if rest.is_empty() { "" } else { ":" };
                return Ok(format!("{option}={}{colon}{rest}", path.display()));
            }
        }
        let name = names[1].filter(|(name, _)| name.contains('.')).map_or(value, |(name, _)| name);
        let error =
            BadInput::new(option, format!("no file {}", Shown(name)), "the file that the command read");
        Err(error.with_fix(format!("--file {}=PATH", Shown(name))).into())
    }
}

impl Execute for Args {
    const GROUP: Group = Group::Quantize;

    /// # Errors
    /// No record; a file of the command that is not found.
    fn paths(&self, paths: &mut Paths) -> Result<()> {
        paths.read(&self.quality);
        self.source.paths(paths);
        self.recorded_command()?.command.paths(paths)?;
        Ok(())
    }

    fn recorded(&self) -> Result<Option<Rebuild>> {
        Ok(Some(self.recorded_command()?.rebuild.clone()))
    }

    /// # Errors
    /// A source with other files than the recorded ones; errors of the recorded command; [`GateFailed`] if a weight file
    /// differs.
    fn run(&self, context: &Context) -> Result<()> {
        let Recorded { quality, rebuild, command } = self.recorded_command()?;
        let source = model::open(&self.source, context)?;
        if let Some(fault) = quality.faults_of_source(&source)?.into_iter().next() {
            let allowed = "the model that was quantized";
            return Err(BadInput::new(self.source.named().display().to_string(), fault, allowed).into());
        }
        drop(source);
        context.note(&format!("mantissa {} {}", rebuild.command, rebuild.arguments.join(" ")));
        context.without_report(|| command.run(context))?;
        let made = Quality::read(&self.out)?.ok_or_else(|| {
            BadInput::new(
                self.out.display().to_string(),
                "no quality.json",
                "the one that the command writes",
            )
        })?;
        let files = compared(quality, &made);
        let identical = files.iter().all(|file| file.expected == file.got);
        let report = Report {
            quality: &self.quality,
            source: self.source.named(),
            output: &self.out,
            identical,
            files,
        };
        context.report(&report, |out| human(out, &report))?;
        if identical {
            return Ok(());
        }
        let differs = report.files.iter().filter(|file| file.expected != file.got).map(|file| &*file.file);
        let mut why =
            format!("expected the recorded bytes, got others in {}", differs.collect::<Vec<_>>().join(", "));
        if quality.calibration != made.calibration {
            why += "; the calibration windows differ";
        }
        if quality.tool != made.tool {
            why += &format!("; the artifact was made by {}, this is {}", quality.tool, made.tool);
        }
        Err(GateFailed::new(why).into())
    }
}

#[derive(Serialize)]
struct Report<'a> {
    quality: &'a Path,
    source: &'a Path,
    output: &'a Path,
    /// True if all weight files are the recorded ones.
    identical: bool,
    files: Vec<File>,
}

/// A weight file with both SHA-256.
#[derive(Serialize)]
struct File {
    file: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    expected: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    got: Option<String>,
}

/// Pairs the recorded weight files with those made. A single file may have another name.
fn compared(recorded: &Quality, made: &Quality) -> Vec<File> {
    let (old, new) = (&recorded.hashes.weights, &made.hashes.weights);
    let text = |digest: &mantissa_store::FileDigest| digest.hex();
    if let ([(name, a)], [(_, b)]) =
        (&old.iter().collect::<Vec<_>>()[..], &new.iter().collect::<Vec<_>>()[..])
    {
        return vec![File { file: (*name).clone(), expected: Some(text(a)), got: Some(text(b)) }];
    }
    let names: std::collections::BTreeSet<&String> = old.keys().chain(new.keys()).collect();
    let of = |name: &String| File {
        file: name.clone(),
        expected: old.get(name).map(text),
        got: new.get(name).map(text),
    };
    names.into_iter().map(of).collect()
}

fn human(out: &mut dyn Write, report: &Report<'_>) -> io::Result<()> {
    for file in &report.files {
        let same = if file.expected == file.got { "identical" } else { "differs" };
        let digest = file.got.as_deref().unwrap_or("missing");
        labelled(out, same, &format!("{}  {digest}", file.file))?;
    }
    labelled(out, "output", &report.output.display().to_string())?;
    let verdict = if report.identical { "The bytes are the recorded ones." } else { "The bytes differ." };
    writeln!(out, "{verdict}")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::commands::record::{record, with};

    /// Options of the recorded commands that change no byte of the weights.
    const INDIFFERENT: [&str; 28] = [
        "bits",
        "out",
        "traffic",
        "for",
        "dry-run",
        "layers",
        "verify",
        "resume",
        "restart",
        "text",
        "tokens",
        "context",
        "stride",
        "bos",
        "docs",
        "limit",
        "max-kl",
        "task",
        "chat",
        "max-accuracy-drop",
        "json",
        "quiet",
        "threads",
        "memory",
        "strict",
        "overwrite",
        "seed",
        "help",
    ];

    #[test]
    fn every_option_is_known_to_decide_or_not() {
        let program = Line::command();
        for command in COMMANDS {
            for argument in program.find_subcommand(command).unwrap().get_arguments() {
                let Some(long) = argument.get_long() else { continue };
                let decides = DECIDING.contains(&long) || long == SPLIT;
                assert!(decides != INDIFFERENT.contains(&long), "{command} --{long}");
            }
        }
    }

    #[test]
    fn the_record_has_the_deciding_options_and_no_folder() {
        let line = "mantissa quantize demo --for vllm --recipe a/b.toml --calibration x/c.txt:0.5 --calibration d.txt --samples 4 --untie --out y --text z --split S";
        let matches = Line::command().try_get_matches_from(line.split(' ')).unwrap();
        let found = record(&Line::command(), &matches, 7);
        assert_eq!(found.command, "quantize");
        let expected = [
            "--recipe=b.toml",
            "--untie",
            "--calibration=c.txt:0.5",
            "--calibration=d.txt",
            "--samples=4",
            "--split=S",
        ];
        assert_eq!(found.arguments, expected);
        let changed = with(found, "--recipe=other");
        assert_eq!(changed.arguments.iter().filter(|a| a.starts_with("--recipe")).count(), 1);
        assert_eq!(changed.arguments.last().map(String::as_str), Some("--recipe=other"));
    }
}
