//! `mantissa compare`: candidates for one model in one table.

mod markdown;
mod page;

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::Result;
use mantissa_jobs::measured_text::MeasuredText;
use mantissa_jobs::{Compare, CompareArguments, CompareReport, CompareRow, Job, choose};
use mantissa_quant::Recipe;
use mantissa_store::{Kind, Paths, write_file_atomic};

use super::calibration::CalibrationArgs;
use super::execute::Execute;
use super::model::ModelPath;
use super::text::separator;
use crate::context::Context;
use crate::error::BadInput;
use crate::help::Group;
use crate::output::{Align, Table, bytes, counted, number, paragraph};

/// Compare recipes and finished outputs of a model in one table
///
/// Quantizes MODEL by each --recipe, verifies the result, and measures it and each OUTPUT on the same windows: KL
/// divergence from MODEL with its standard error, top-1 agreement, bits per weight, size, time, engines. Differences
/// between candidates are paired by window; one is called better only where the difference is no chance (5 % over all
/// pairs). A candidate that fails is a row with the reason.
#[derive(clap::Args)]
#[command(after_help = "EXAMPLES
  mantissa compare demo --recipe rtn-int4-g128 --recipe nvfp4
  mantissa compare demo --recipe q4_k_m --recipe q5_k_m --html sizes.html
  mantissa compare path/to/model model-int4 model-q4_k_m.gguf \\
      --text mine.txt --text code.txt --markdown=card.md")]
pub struct Args {
    /// Unquantized model
    ///
    /// Hugging Face folder, .gguf file, name in the Hugging Face cache, or demo (the model inside the binary).
    model: ModelPath,
    /// Finished outputs of the model: folders or .gguf files
    #[arg(value_name = "OUTPUT")]
    outputs: Vec<ModelPath>,
    /// Recipe to quantize by (repeatable)
    #[arg(long = "recipe", value_name = "RECIPE", help_heading = "Candidates")]
    recipes: Vec<String>,
    /// Another finished output (repeatable)
    ///
    /// The same as OUTPUT.
    #[arg(long = "candidate", value_name = "PATH", help_heading = "Candidates", hide_short_help = true)]
    candidates: Vec<ModelPath>,
    /// Keep the outputs of the recipes in this folder, by name
    ///
    /// Without it they are temporary, one at a time.
    #[arg(long, value_name = "DIR", help_heading = "Output")]
    keep_outputs: Option<PathBuf>,
    /// HTML page to write
    ///
    /// A page of other options, or any other file, is replaced only with --overwrite.
    #[arg(long, alias = "report", value_name = "FILE.html", value_parser = super::parse::page_path(), help_heading = "Output")]
    html: Option<PathBuf>,
    /// Print a section for a model card, or write it to FILE
    ///
    /// A file of other options is replaced only with --overwrite.
    #[arg(long, value_name = "FILE", num_args = 0..=1, require_equals = true, default_missing_value = "-", help_heading = "Output")]
    markdown: Option<PathBuf>,
    /// Text to measure on, a column each (repeatable)
    ///
    /// UTF-8. default is the built-in text, which is also used where none is given: prose, code and other languages.
    #[arg(long, value_name = "TEXT", help_heading = "Evaluation")]
    text: Vec<PathBuf>,
    /// Token windows instead of text (repeatable)
    ///
    /// FILE.json is a list of lists of token ids, or with FILE.json:KEY an object of such lists. The windows are
    /// used as they are.
    #[arg(long, value_name = "FILE", help_heading = "Evaluation", hide_short_help = true)]
    tokens: Vec<String>,
    /// Window length in tokens [default: model's context]
    #[arg(long, value_name = "N", help_heading = "Evaluation")]
    context: Option<usize>,
    /// Split each text into documents at this separator
    ///
    /// Each is stripped and becomes one window.
    #[arg(long, value_name = "SEP", value_parser = separator, requires = "text", help_heading = "Evaluation", hide_short_help = true)]
    split: Option<String>,
    /// Stop after this many predicted tokens of each text
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..), help_heading = "Evaluation")]
    limit: Option<u32>,
    #[command(flatten)]
    calibration: CalibrationArgs,
}

impl Args {
    /// Returns the job.
    fn job(&self, seed: u64) -> Result<Compare> {
        self.refuse_lists()?;
        let outputs = self.outputs.iter().chain(&self.candidates).map(|model| model.job_path().clone());
        let options = MeasuredText { context: self.context, limit: self.limit, ..MeasuredText::default() };
        let text = |path: &PathBuf| MeasuredText {
            text: Some(path.clone()),
            split: self.split.clone(),
            ..options.clone()
        };
        let tokens =
            |file: &String| MeasuredText { tokens: Some(file.clone()), context: None, ..options.clone() };
        let mut texts: Vec<MeasuredText> = self.text.iter().map(text).collect();
        texts.extend(self.tokens.iter().map(tokens));
        if texts.is_empty() {
            texts.push(text(&mantissa_jobs::default_text::NAME.into()));
        }
        let arguments = CompareArguments {
            model: self.model.job_path().clone(),
            recipes: self.recipes.clone(),
            outputs: outputs.collect(),
            texts,
            calibration: self.calibration.value(),
            seed,
            keep_outputs: self.keep_outputs.clone(),
        };
        Ok(arguments.resolve()?)
    }

    /// Refuses an output that is not there, before hours of work on the others.
    fn refuse_missing(&self) -> Result<()> {
        let missing = |path: &&ModelPath| !path.job_path().location().exists();
        match self.outputs.iter().chain(&self.candidates).find(missing) {
            Some(path) => super::model::open_quietly(path.job_path()).map(drop).map_err(Into::into),
            None => Ok(()),
        }
    }

    /// Returns the file of the Markdown section, if it is not printed.
    fn markdown_file(&self) -> Option<&Path> {
        self.markdown.as_deref().filter(|path| path.as_os_str() != "-")
    }

    /// Refuses several recipes in one value.
    fn refuse_lists(&self) -> Result<()> {
        let is_list = |name: &&String| name.contains(',') && !Recipe::is_file(name);
        let Some(list) = self.recipes.iter().find(is_list) else { return Ok(()) };
        let each = list.split(',').map(str::trim).filter(|name| !name.is_empty());
        let fix = each.map(|name| format!("--recipe {name}")).collect::<Vec<_>>().join(" ");
        Err(BadInput::new("--recipe", format!("\"{list}\""), "one recipe").with_fix(fix).into())
    }

    fn prints_markdown(&self) -> bool {
        self.markdown.is_some() && self.markdown_file().is_none()
    }
}

impl Execute for Args {
    const GROUP: Group = Group::Measure;

    fn paths(&self, paths: &mut Paths) -> Result<()> {
        *paths = self.job(0)?.paths();
        if let Some(page) = &self.html {
            paths.write("--html", page, Kind::File);
        }
        if let Some(file) = self.markdown_file() {
            paths.write("--markdown", file, Kind::File);
        }
        Ok(())
    }

    /// # Errors
    /// A model, an output or a text that cannot be read; every candidate fails.
    fn run(&self, context: &Context) -> Result<()> {
        if self.prints_markdown() && !context.prints_text() {
            let found = "--json, which also prints to standard output";
            return Err(BadInput::new("--markdown", found, "--markdown=FILE with --json").into());
        }
        self.refuse_missing()?;
        let recipes = self.recipes.iter().filter(|name| !Recipe::is_file(name));
        recipes.for_each(|name| choose::note_name(name, context));
        let report = self.job(context.seed)?.run(context)?;
        if let Some(path) = &self.html {
            page::page(&report).write(&context.output(path)?)?;
        }
        if let Some(path) = self.markdown_file() {
            write_file_atomic(&context.output(path)?, markdown::section(&report).as_bytes())?;
        }
        if self.prints_markdown() {
            return context.report(&report, |out| out.write_all(markdown::section(&report).as_bytes()));
        }
        let files: Vec<&Path> = self.html.as_deref().into_iter().chain(self.markdown_file()).collect();
        context.report(&report, |out| human(out, &report, &files))
    }
}

/// Returns a KL with its standard error.
fn kl_text(kl: Option<f64>, error: Option<f64>) -> String {
    match (kl, error.filter(|error| error.is_finite())) {
        (None, _) => "-".to_owned(),
        (kl, None) => number(kl, 3),
        (kl, error) => format!("{} ± {}", number(kl, 3), number(error, 1)),
    }
}

/// Describes the difference of a row from the best one: the best itself, a real difference, or one that may be chance.
fn against_best(report: &CompareReport, row: &CompareRow) -> String {
    let Some(best) = report.best() else { return String::new() };
    if row.name == best.name {
        return "best".to_owned();
    }
    match report.difference(&row.name, &best.name) {
        None => String::new(),
        Some((difference, error, is_real)) => {
            let mark = if is_real { "" } else { " (chance?)" };
            format!("+{}{mark}", kl_text(Some(difference.max(0.0)), Some(error)))
        }
    }
}

/// Returns the name of a row, marked if layers fell back.
fn named(row: &CompareRow) -> String {
    if row.fallbacks.is_some_and(|count| count > 0) { format!("{} *", row.name) } else { row.name.clone() }
}

/// Says of which weights the bits are.
const BITS: &str = "bits: per weight of the linear layers as stored, unquantized ones among them included";

/// Returns bits per weight and size, or `-`.
fn sizes(row: &CompareRow) -> [String; 2] {
    [
        row.bits.map_or_else(|| "-".to_owned(), |bits| format!("{bits:.2}")),
        row.bytes.map_or_else(|| "-".to_owned(), bytes),
    ]
}

fn share(value: Option<f64>) -> String {
    value.map_or_else(|| "-".to_owned(), |share| format!("{:.1} %", 100.0 * share))
}

/// Makes the table of all candidates.
fn table(report: &CompareReport) -> Table {
    let mut table = Table::new([
        ("candidate", Align::Left),
        ("bits", Align::Right),
        ("size", Align::Right),
        ("KL", Align::Right),
        ("to best", Align::Right),
        ("top-1", Align::Right),
        ("time", Align::Right),
        ("loads in", Align::Left),
    ])
    .optional(["time", "loads in", "top-1"]);
    let dense = [report.model.display().to_string(), number(report.bits, 3), bytes(report.bytes)];
    table.row(dense.into_iter().chain(["0", "", "", "", ""].map(str::to_owned)));
    for row in &report.rows {
        let [bits, size] = sizes(row);
        table.row([
            named(row),
            bits,
            size,
            kl_text(row.kl, row.kl_se),
            if row.error.is_some() { "failed".to_owned() } else { against_best(report, row) },
            share(row.top1),
            format!("{:.1} s", row.seconds),
            row.loads_in.join(", "),
        ]);
    }
    table
}

/// Makes the table with a column for each text; KL with its standard error.
fn by_text(report: &CompareReport) -> Table {
    let mut table = Table::new([
        ("candidate", Align::Left),
        ("text", Align::Left),
        ("KL", Align::Right),
        ("top-1", Align::Right),
    ]);
    for row in &report.rows {
        for text in &row.texts {
            table.row([
                row.name.clone(),
                text.text.clone(),
                kl_text(Some(text.kl), Some(text.kl_se)),
                share(Some(text.top1)),
            ]);
        }
    }
    table
}

/// Says which candidate loses least, and which may be as good.
fn conclusion(report: &CompareReport) -> String {
    let Some(best) = report.best() else { return String::new() };
    let others = report.rows.iter().filter(|row| row.name != best.name && row.error.is_none());
    let may_be_as_good =
        |row: &&CompareRow| report.difference(&row.name, &best.name).is_none_or(|(_, _, is_real)| !is_real);
    let equal: Vec<&str> = others.clone().filter(may_be_as_good).map(|row| row.name.as_str()).collect();
    let least = format!("smallest KL: {} ({})", best.name, kl_text(best.kl, best.kl_se));
    match (others.count(), equal.as_slice()) {
        (0, _) => least,
        (_, []) => format!("{least}; every other loses more on these windows"),
        (_, equal) => format!("{least}; the difference may be chance for {}", equal.join(", ")),
    }
}

/// Says what was measured.
fn measured_on(report: &CompareReport) -> String {
    let of = |text: &mantissa_jobs::ComparedText| {
        let [tokens, windows] =
            [(text.tokens, "token"), (text.windows as u64, "window")].map(|(n, of)| counted(n, of));
        format!("{tokens} in {windows} of {}", text.text)
    };
    let texts: Vec<String> = report.texts.iter().map(of).collect();
    let mean = if texts.len() > 1 { ", mean of the texts" } else { "" };
    format!("KL: nats/token from {}, ± standard error{mean}; {}", report.model.display(), texts.join(", "))
}

/// Fewest windows of which the differences of candidates are tested well: with fewer, only huge ones are real.
const FEW: usize = 6;

/// Says that the windows are too few for the test of differences, and how to get more.
fn too_few(report: &CompareReport) -> Option<String> {
    let windows = report.texts.iter().map(|text| text.windows).min().unwrap_or(0);
    (windows < FEW).then(|| {
        format!(
            "; {} are too few to tell: give more --text, or a smaller --context",
            counted(windows as u64, "window")
        )
    })
}

fn human(out: &mut dyn Write, report: &CompareReport, files: &[&Path]) -> io::Result<()> {
    table(report).write(out)?;
    writeln!(out)?;
    if report.texts.len() > 1 {
        by_text(report).write(out)?;
        writeln!(out)?;
    }
    for row in report.rows.iter().filter(|row| row.error.is_some()) {
        paragraph(out, 2, &format!("{} failed: {}", row.name, row.error.as_deref().unwrap_or_default()))?;
    }
    paragraph(out, 2, &conclusion(report))?;
    paragraph(out, 2, BITS)?;
    paragraph(out, 2, &measured_on(report))?;
    if let Some(critical) = report.critical {
        let pairs = counted(report.pairs.len() as u64, "pair");
        let rule = format!(
            "to best: paired by window; real beyond {critical:.2} standard errors (5 % over {pairs}){}",
            too_few(report).unwrap_or_default()
        );
        paragraph(out, 2, &rule)?;
    }
    if let Some(note) = &report.note {
        paragraph(out, 2, note)?;
    }
    if report.rows.iter().any(|row| row.fallbacks.is_some_and(|count| count > 0)) {
        paragraph(out, 2, "*: some layers fell back to another scheme or method")?;
    }
    if !files.is_empty() {
        let files = files.iter().map(|file| file.display().to_string()).collect::<Vec<_>>().join(" and ");
        writeln!(out, "{files} in {:.1} s", report.seconds)?;
    }
    Ok(())
}
