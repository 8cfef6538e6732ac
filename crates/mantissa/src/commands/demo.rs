//! `mantissa demo`: quantizes the embedded model by many recipes and measures each.

mod page;

use std::io::{self, Write};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::Result;
use mantissa_eval::{Evaluation, Sequence, TextOptions, sequences_from_text};
use mantissa_jobs::{CompareBench, choose, quantize_verified};
use mantissa_model::{Bos, Decoder, Tokenizer};
use mantissa_quant::calibrate::CalibrationSet;
use mantissa_quant::{Options, Plan, Recipe};
use mantissa_store::convention::ModelFiles;
use mantissa_store::{Paths, Scratch};
use serde::Serialize;

use super::execute::Execute;
use super::report::texts::{self, Continuation};
use crate::context::Context;
use crate::help::Group;
use crate::output::{Align, Table, bytes, paragraph};
use crate::progress::Unit;
use mantissa_jobs::embedded::{self, CALIBRATION, DOMAINS, SEPARATOR};

/// Recipes shown: every method and format, and the most common schemes.
const RECIPES: [&str; 17] = [
    "w8a16",
    "w8a8",
    "fp8-dynamic",
    "mxfp8",
    "rtn-int4-g128",
    "gptq-int4-g128",
    "rtn-int4-g32",
    "gptq-int4-g32-asym",
    "rtn-int3-g32-asym",
    "gptq-int3-g32-asym",
    "nf4",
    "nvfp4",
    "gptq-nvfp4",
    "mxfp4",
    "gptq-mxfp4",
    "rtn-q8_0",
    "rtn-q4_0",
];

/// Tokens per window, BOS included.
const WINDOW: usize = 256;

/// Tokens of the text that the page shows of a model.
const SAMPLE: usize = 56;

/// Quantize the embedded model by many recipes, offline
///
/// The model is a Llama of 1.3 million parameters, trained by this program. Every output is verified by an
/// independent decoder and compared with the model on text that neither training nor calibration has seen:
/// stories, encyclopedic prose, code. The table shows bits per weight of the quantized layers, perplexity,
/// and KL divergence (nats/token) with standard errors; demo-report.html adds a plot of bits against KL.
#[derive(clap::Args)]
#[command(after_help = "EXAMPLES
  mantissa demo
  mantissa demo --recipe rtn-q4_0 --recipe nvfp4 --report two.html
  mantissa run demo -p 'Once upon a time' -n 200
  mantissa quantize demo --recipe mxfp4 --out demo-mxfp4")]
pub struct Args {
    /// HTML report to write
    #[arg(long, value_name = "FILE.html", value_parser = super::parse::page_path(), default_value = "demo-report.html")]
    report: PathBuf,
    /// Recipe to run (repeatable) [default: a selection]
    #[arg(long = "recipe", value_name = "RECIPE")]
    recipes: Vec<String>,
}

/// Result of the command.
#[derive(Serialize)]
struct Report<'a> {
    model: &'static str,
    parameters: u64,
    bytes: u64,
    /// Perplexities of the unquantized model.
    dense: Vec<Figures>,
    /// Continuation of the prompt by the unquantized model; for the page.
    #[serde(skip)]
    sample: Continuation,
    recipes: Vec<Row>,
    report: &'a Path,
    threads: usize,
    seconds: f64,
}

/// Result of one recipe.
#[derive(Serialize)]
struct Row {
    recipe: String,
    method: &'static str,
    activations: Option<String>,
    format: &'static str,
    /// Bits per weight of the quantized layers by scheme, scales and zero points included.
    linear_bits_per_weight: f64,
    /// Bits per weight of the same layers as stored.
    linear_stored_bits_per_weight: f64,
    bytes: u64,
    domains: Vec<Figures>,
    /// Continuation of the prompt; for the page.
    #[serde(skip)]
    sample: Continuation,
    fallbacks: usize,
    seconds: f64,
}

/// Measurement on one domain; for the unquantized model KL is 0 and top-1 is 1.
#[derive(Serialize)]
struct Figures {
    domain: &'static str,
    tokens: u64,
    nll: f64,
    nll_se: f64,
    ppl: f64,
    kl: f64,
    kl_se: f64,
    top1: f64,
}

/// Embedded model with its texts.
struct Bench {
    files: ModelFiles,
    decoder: Decoder,
    texts: Vec<(String, Vec<Sequence>)>,
    calibration: CalibrationSet,
    tokenizer: Tokenizer,
}

impl Execute for Args {
    const GROUP: Group = Group::Start;

    fn paths(&self, paths: &mut Paths) -> Result<()> {
        paths.write_about("--report", &self.report, "mantissa demo");
        self.recipes.iter().filter(|recipe| Recipe::is_file(recipe)).for_each(|recipe| paths.read(recipe));
        Ok(())
    }

    /// # Errors
    /// I/O; [`GateFailed`](crate::error::GateFailed) if an output does not verify.
    fn run(&self, context: &Context) -> Result<()> {
        let start = Instant::now();
        let names: Vec<&str> = match self.recipes.as_slice() {
            [] => RECIPES.to_vec(),
            chosen => chosen.iter().map(String::as_str).collect(),
        };
        self.recipes.iter().for_each(|recipe| choose::note_name(recipe, context));
        let recipes: Vec<_> = names.into_iter().map(Recipe::load).collect::<Result<_, _>>()?;
        // Measured: 61 MB with two threads, and each thread has buffers of its own.
        context.require_memory("demo", (64 << 20) + (8 << 20) * context.threads as u64)?;
        let bench = Bench::load()?;
        let progress = context.progress(1 + recipes.len() as u64, Unit::Items("models"));
        progress.message("unquantized model");
        let compared = bench.compared(context.threads);
        let dense = figures(&compared.reference(&|_| ControlFlow::Continue(()))?);
        let scratch = Scratch::new()?;
        let mut rows = Vec::with_capacity(recipes.len());
        for (i, recipe) in recipes.into_iter().enumerate() {
            progress.add(1);
            progress.message(&recipe.name);
            rows.push(bench.row(recipe, &scratch.path().join(i.to_string()), context)?);
        }
        progress.finish();
        let report = Report {
            model: embedded::NAME,
            parameters: bench.decoder.config().parameters(),
            bytes: bench.files.checkpoint().total_bytes(),
            dense,
            sample: bench.sample(&bench.decoder)?,
            recipes: rows,
            report: &self.report,
            threads: context.threads,
            seconds: start.elapsed().as_secs_f64(),
        };
        page::page(&report).write(&context.output(&self.report)?)?;
        context.report(&report, |out| human(out, &report))
    }
}

impl Bench {
    fn load() -> Result<Self> {
        let files = ModelFiles::open(&embedded::folder()?)?;
        let decoder = Decoder::load(&files)?;
        let tokenizer = Tokenizer::load(files.dir())?;
        let mut texts = Vec::new();
        for domain in DOMAINS {
            texts.push((domain.name.to_owned(), windows(domain.name, domain.held_out, &tokenizer)?));
        }
        let calibration = windows("calibration", CALIBRATION, &tokenizer)?;
        let windows = calibration.into_iter().map(|sequence| sequence.tokens).collect();
        let calibration = CalibrationSet::new("demo calibration", windows);
        Ok(Bench { files, decoder, texts, calibration, tokenizer })
    }

    /// Quantizes with `recipe` into `out`, verifies and measures the result.
    fn row(&self, recipe: Recipe, out: &Path, context: &Context) -> Result<Row> {
        let start = Instant::now();
        let name = recipe.name.clone();
        let calibration = recipe.needs_calibration().then(|| self.calibration.clone());
        let options = Options { threads: context.threads, calibration, ..Options::default() };
        let plan = Plan::new(&self.files, recipe, options)?;
        let out = if plan.container.is_one_file() { out.with_extension("gguf") } else { out.to_owned() };
        let (plan, outcome) = quantize_verified(plan, &self.files, self.files.dir(), &out, None)?;
        let quality = outcome.quality;
        let quantized = Decoder::load(&ModelFiles::open(&out)?)?;
        Ok(Row {
            recipe: name,
            method: plan.job.method(),
            activations: plan.activation_names(),
            format: plan.container.name(),
            linear_bits_per_weight: quality.linear_bits_per_weight,
            linear_stored_bits_per_weight: plan.linear_stored_bits_per_weight(),
            bytes: quality.bytes,
            domains: figures(
                &self.compared(context.threads).compared(&quantized, &|_| ControlFlow::Continue(()))?,
            ),
            sample: self.sample(&quantized)?,
            fallbacks: quality.fallbacks.len(),
            seconds: start.elapsed().as_secs_f64(),
        })
    }

    /// Continues the prompt of the page.
    fn sample(&self, model: &Decoder) -> Result<Continuation> {
        let prompt = self.tokenizer.encode(texts::PROMPT, Bos::Auto)?;
        texts::continued(model, &self.tokenizer, &prompt, SAMPLE)
    }

    /// Returns what measures models on the texts.
    fn compared(&self, threads: usize) -> CompareBench<'_> {
        CompareBench { reference: &self.decoder, texts: &self.texts, threads }
    }
}

/// Describes evaluations on the texts, in their order.
fn figures(found: &[Evaluation]) -> Vec<Figures> {
    DOMAINS.iter().zip(found).map(|(domain, found)| Figures::new(domain.name, found)).collect()
}

impl Figures {
    fn new(domain: &'static str, found: &Evaluation) -> Self {
        let compared = found.comparison.as_ref();
        Figures {
            domain,
            tokens: found.tokens,
            nll: found.nll,
            nll_se: found.nll_se,
            ppl: found.ppl,
            kl: compared.map_or(0.0, |c| c.kl),
            kl_se: compared.map_or(0.0, |c| c.kl_se),
            top1: compared.map_or(1.0, |c| c.top1),
        }
    }
}

/// Splits `text` into documents; each becomes one window with a BOS.
fn windows(name: &str, text: &str, tokenizer: &Tokenizer) -> Result<Vec<Sequence>> {
    let options = TextOptions { split: None, docs: None, context: WINDOW, stride: None, bos: Bos::Auto };
    let documents = text.split(SEPARATOR).map(str::trim).filter(|document| !document.is_empty());
    let cut = |document| sequences_from_text(name, document, tokenizer, &options);
    Ok(documents.map(cut).collect::<Result<Vec<_>, _>>()?.concat())
}

/// Makes the table: one row for the unquantized model, one per recipe.
fn table(report: &Report<'_>) -> Table {
    let mut columns = vec![("recipe", Align::Left), ("bits", Align::Right), ("size", Align::Right)];
    let domain = |heading| [(heading, Align::Right), ("±", Align::Right), ("ppl", Align::Right)];
    columns.extend(DOMAINS.iter().flat_map(|d| domain(d.kl_heading)));
    let mut table = Table::new(columns).optional(["ppl", "±"]);
    let mut dense = vec!["(bf16)".to_owned(), "16".to_owned(), bytes(report.bytes)];
    dense.extend(report.dense.iter().flat_map(|f| [String::new(), String::new(), format!("{:.3}", f.ppl)]));
    table.row(dense);
    for row in &report.recipes {
        let name = if row.fallbacks > 0 { format!("{} *", row.recipe) } else { row.recipe.clone() };
        let mut cells = vec![name, format!("{:.3}", row.linear_stored_bits_per_weight), bytes(row.bytes)];
        let figures =
            |f: &Figures| [format!("{:.5}", f.kl), format!("{:.5}", f.kl_se), format!("{:.3}", f.ppl)];
        cells.extend(row.domains.iter().flat_map(figures));
        table.row(cells);
    }
    table
}

fn human(out: &mut dyn Write, report: &Report<'_>) -> io::Result<()> {
    table(report).write(out)?;
    let tokens: Vec<_> = report.dense.iter().map(|f| format!("{} of {}", f.tokens, f.domain)).collect();
    writeln!(out)?;
    paragraph(out, 2, "bits: per weight of the quantized layers, as stored; size: all tensors")?;
    let kl = "KL: nats/token to the bf16 model, ± standard error; ppl: perplexity";
    paragraph(out, 2, &format!("{kl}; {} tokens", tokens.join(", ")))?;
    if report.recipes.iter().any(|row| row.fallbacks > 0) {
        paragraph(out, 2, "*: some layers fell back to another scheme or method")?;
    }
    writeln!(out, "{} in {:.1} s", report.report.display(), report.seconds)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use mantissa_store::convention::{bitsandbytes, compressed_tensors, gguf};

    /// A sample of the methods, so that the demo stays at about a minute: a new one does not have to be added.
    #[test]
    fn rounding_and_solving_are_shown_in_every_common_format() {
        let shown: Vec<_> = RECIPES.iter().map(|name| Recipe::load(name).unwrap()).collect();
        for name in ["rtn", "gptq"] {
            assert!(shown.iter().any(|recipe| recipe.method.name() == name), "{name}");
        }
        for container in [compressed_tensors::CONTAINER, gguf::CONTAINER, bitsandbytes::CONTAINER] {
            assert!(shown.iter().any(|recipe| recipe.container() == container), "{container:?}");
        }
    }
}
