//! `mantissa quantize`: makes a verified quantized model from a dense one.

mod preview;
mod request;
mod several;

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use anyhow::Result;
use mantissa_model::Products;
use mantissa_num::{Rounding, Scheme, nearest_list};
use mantissa_plan::contract::Target;
use mantissa_quant::calibrate::CalibrationSet;
use mantissa_quant::verify::Verification;
use mantissa_quant::{
    Check, Importance, LayerReport, Options, Outcome, Plan, Quality, Recipe, Start, TableSize, dense_source,
};
use mantissa_store::convention::{Container, ModelFiles};
use mantissa_store::{DEFAULT_SHARD_BYTES, FileDigest, Kind, Paths};
use serde::Serialize;

use self::preview::DryRun;
use self::request::{Request, measure_on_default};
use super::adapt;
use super::calibration::CalibrationArgs;
use super::choose::{Choice, predict};
use super::coverage;
use super::ending::Ending;
use super::lint;
use super::model::{self, ModelPath};
use super::outcome::{MeasureArgs, carry_out, human_figures, layer_table, linear_bits};
use super::tables::{self, TableArgs};
use crate::context::Context;
use crate::error::BadInput;
use crate::notes;
use crate::output::{bytes, labelled};

/// Quantize a model by a recipe, verify and measure the output
///
/// A recipe is a name such as rtn-int4-g128 ([TRANSFORM-]METHOD-SCHEME[+ACTIVATION]), a short name that
/// `mantissa recipes` lists, or a TOML file. Linear layers are quantized; embeddings, head and norms keep
/// their dtype. The output appears only when it is complete, and is the same at any number of threads. A run
/// that was killed, stopped or out of disk space resumes bit-exactly with the same command; GGUF output starts over.
///
/// With --text or --tokens the finished output is compared with the source before it appears at --out, and
/// quality.json next to the weights records the quality loss. With --max-kl the output appears only if the
/// loss is within the limit.
///
/// With --for and without --recipe the recipe with the least measured KL that loads there is chosen, for
/// --bits bits per weight. It is calibrated and measured on a built-in text unless one is given.
#[derive(clap::Args)]
#[command(group = clap::ArgGroup::new("choice").args(["targets", "recipe"]).required(true).multiple(true))]
#[command(after_help = "EXAMPLES
  mantissa quantize demo --for vllm
  mantissa quantize path/to/model --for llama.cpp --bits 5
  mantissa quantize demo --recipe rtn-int4-g128 --out demo-int4
  mantissa quantize demo --recipe gptq-int4-g128 --calibration story.txt \\
      --samples 16 --length 256 --out demo-gptq
  mantissa quantize demo --recipe nvfp4 --out demo-nvfp4 --text story.txt \\
      --context 256 --max-kl 1
  mantissa quantize demo --recipe rtn-q4_0 --out demo-q4_0.gguf
  mantissa quantize demo --recipe rtn-int4-g128 --head int8 --untie \\
      --out demo-int4-head
  mantissa quantize demo --recipe rtn-int4-g32 --format compressed-tensors \\
      --format gptq --out demo-both
  mantissa quantize path/to/model --recipe q4_k_m --imatrix imatrix.gguf \\
      --out model-q4_k_m.gguf
  mantissa quantize path/to/model --recipe rtn-int4-g128 \\
      --for vllm:tp=4,gpu=h100 --out model-int4
  mantissa quantize path/to/model --recipe recipe.toml --out out --dry-run")]
pub struct Args {
    /// Unquantized folder or .gguf file, or demo
    ///
    /// A Hugging Face folder, or a GGUF file of F16, BF16 or F32. demo is the model inside the binary.
    model: ModelPath,
    /// Recipe name or TOML file [default with --for: chosen]
    ///
    /// `mantissa recipes` lists the names.
    #[arg(long, value_name = "RECIPE", help_heading = "Recipe")]
    recipe: Option<String>,
    /// Bits per weight to choose for [default: 4]
    ///
    /// 2 to 8.
    #[arg(long, value_name = "BITS", conflicts_with = "recipe", value_parser = bits, help_heading = "Recipe")]
    bits: Option<u32>,
    /// Output folder or .gguf file [default: MODEL-RECIPE]
    ///
    /// The default is in the working folder. GGUF output in a folder is named MODEL-RECIPE.gguf.
    #[arg(long, value_name = "PATH", help_heading = "Output")]
    out: Option<PathBuf>,
    /// Checkpoint format (repeatable) [default: the recipe's]
    ///
    /// The default is the recipe's own format, or the first that holds its schemes. With several formats --out is a
    /// folder that gets one output for each: a folder with the format's name, or model.gguf. Formats that store the
    /// layers alike share one solution. All outputs appear when all are complete.
    #[arg(long = "format", value_name = "FORMAT", value_parser = container, help_heading = "Recipe")]
    formats: Vec<Container>,
    #[command(flatten)]
    tables: TableArgs,
    #[command(flatten)]
    calibration: CalibrationArgs,
    /// Importance matrix for K- and IQ-types
    ///
    /// From llama.cpp or `mantissa imatrix`. Replaces --calibration for types whose rounding is weighted by
    /// column importance.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["calibration", "calibration_tokens"], help_heading = "Calibration")]
    imatrix: Option<PathBuf>,
    /// Number of held-out calibration samples
    ///
    /// The fallback test compares each method with RTN on these samples instead of on the calibration. They
    /// are taken evenly, in addition to --samples.
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "Calibration", hide_short_help = true)]
    hold_out: u32,
    /// Matmul operand dtype during calibration
    ///
    /// For activations and Hessians. bf16 is several times faster on a CPU with AMX tiles, and gives the same
    /// result without them.
    #[arg(long, value_enum, value_name = "DTYPE", default_value_t = Factors::F32, help_heading = "Calibration", hide_short_help = true)]
    calibration_dtype: Factors,
    /// In-domain text sample to compare the calibration with
    ///
    /// Reports how far the calibration is from it before work begins.
    #[arg(long, value_name = "TEXT", help_heading = "Calibration", hide_short_help = true)]
    traffic: Option<PathBuf>,
    /// Engine to quantize for; chooses a missing recipe
    ///
    /// With a recipe, refuses at once (exit code 1) what the engine would not load or would compute wrongly; see
    /// `mantissa lint` for ENGINE[:tp=N,gpu=NAME].
    #[arg(long = "for", value_name = "ENGINE", value_parser = lint::target, help_heading = "Recipe")]
    targets: Vec<Target>,
    /// Preview size, bits per weight and memory; write nothing
    #[arg(long, help_heading = "Output")]
    dry_run: bool,
    /// List every layer, not only the ten worst
    #[arg(long, help_heading = "Output")]
    layers: bool,
    /// Verify the output before it appears at --out
    ///
    /// With --verify=false the output is only opened.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_value_t = true, default_missing_value = "true", action = clap::ArgAction::Set, help_heading = "Output", hide_short_help = true)]
    verify: bool,
    /// Resume an unfinished run of the same command (the default)
    #[arg(long, conflicts_with = "restart", help_heading = "Output", hide_short_help = true)]
    resume: bool,
    /// Start over instead of resuming
    ///
    /// Removes what an unfinished run of the same command left.
    #[arg(long, help_heading = "Output", hide_short_help = true)]
    restart: bool,
    /// Rounding between two codes
    ///
    /// Stochastic rounding uses --seed.
    #[arg(long, value_enum, default_value_t = Round::Nearest, help_heading = "Recipe", hide_short_help = true)]
    round: Round,
    /// Maximum size of a weight file [default: 5G; GGUF: none]
    ///
    /// A split NAME.gguf becomes NAME-00001-of-0000N.gguf and so on.
    #[arg(long, value_name = "SIZE", value_parser = crate::output::parse_bytes, help_heading = "Output", hide_short_help = true)]
    max_shard_size: Option<u64>,
    #[command(flatten)]
    measure: MeasureArgs,
    /// Recipe and output, once they are found: a choice plans every candidate.
    #[arg(skip)]
    request: OnceLock<Request>,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Round {
    Nearest,
    Stochastic,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Factors {
    F32,
    Bf16,
}

/// Parses the bits per weight to choose for.
///
/// # Errors
/// A message with the accepted values.
fn bits(text: &str) -> Result<u32, String> {
    let whole = text.parse().ok().filter(|bits| (2..=8).contains(bits));
    whole.ok_or_else(|| "expected a whole number from 2 to 8".to_owned())
}

/// Parses a checkpoint format.
///
/// # Errors
/// A message with the accepted names.
pub fn container(text: &str) -> Result<Container, String> {
    let found = Container::named(&text.to_lowercase());
    found.ok_or_else(|| format!("expected {}, got \"{text}\"", nearest_list(text, Container::names())))
}

/// Returns whether a format is a file or a folder.
pub fn kind_of(container: Container) -> Kind {
    if container.facts().one_file { Kind::Gguf } else { Kind::Folder }
}

/// Parses a scheme.
///
/// # Errors
/// A message about what is wrong with it.
pub fn scheme(text: &str) -> Result<Scheme, String> {
    text.parse().map_err(|error: mantissa_num::ParseError| error.to_string())
}

#[derive(Serialize)]
struct Done<'a> {
    output: &'a Path,
    /// Full name of a recipe that was given by a short one.
    #[serde(skip_serializing_if = "Option::is_none")]
    stands_for: Option<&'a str>,
    /// Choice of a recipe that was not given.
    #[serde(skip_serializing_if = "Option::is_none")]
    chosen: Option<&'a Choice>,
    /// SHA-256 of an output that is a single file.
    #[serde(skip_serializing_if = "Option::is_none")]
    sha256: Option<String>,
    source_bytes: u64,
    /// Copied tensors and layers reused from an unfinished run.
    resumed: usize,
    /// Time from the first read until the output is in place, hashing included, without `sync_seconds` and
    /// `verify_seconds`.
    seconds: f64,
    /// Time to make a single output file durable; for a folder it is part of `seconds`.
    sync_seconds: Option<f64>,
    /// Weights quantized per second, reading and writing included.
    weights_per_second: f64,
    #[serde(flatten)]
    quality: &'a Quality,
    verification: Option<&'a Verification>,
    verify_seconds: Option<f64>,
    #[serde(flatten)]
    ending: Ending,
    /// Sizes of quantized embedding and head; `quality` lists them too.
    #[serde(skip)]
    tables: Vec<TableSize>,
}

impl<'a> Done<'a> {
    /// Describes the output at `path`, which appeared after `time`.
    fn new(
        (args, request, source): (&Args, &'a Request, &ModelFiles),
        (plan, outcome): (&Plan, &'a Outcome),
        path: &'a Path,
        time: Duration,
    ) -> Self {
        let sync_seconds = outcome.synced.map(|time| time.as_secs_f64());
        let verify_seconds = outcome.verification.as_ref().map(|(_, time)| time.as_secs_f64());
        let beside = sync_seconds.unwrap_or(0.0) + verify_seconds.unwrap_or(0.0);
        let seconds = time.as_secs_f64() - beside;
        let written = crate::output::written(path, plan.container, outcome);
        Done {
            output: written,
            stands_for: request.stands_for.as_deref(),
            chosen: request.chosen.as_ref(),
            sha256: sha256(plan, outcome),
            source_bytes: source.checkpoint().total_bytes(),
            resumed: outcome.resumed,
            seconds,
            sync_seconds,
            weights_per_second: plan.linear_weights() as f64 / seconds,
            quality: &outcome.quality,
            verification: outcome.verification.as_ref().map(|(verification, _)| verification),
            verify_seconds,
            ending: Ending::new(plan, &args.model, source, written, &args.targets),
            tables: plan.table_sizes(source),
        }
    }
}

/// Adds the paths that the command reads and writes.
///
/// # Errors
/// Invalid recipe arguments.
pub fn paths(args: &Args, paths: &mut Paths) -> Result<()> {
    args.model.paths(paths);
    args.calibration.paths(paths);
    args.measure.paths(paths);
    [&args.imatrix, &args.traffic].into_iter().flatten().for_each(|path| paths.read(path));
    args.recipe.iter().filter(|recipe| Recipe::is_file(recipe)).for_each(|recipe| paths.read(recipe));
    if !args.dry_run {
        let source = args.recipe.is_none().then(|| model::open_quietly(&args.model)).transpose()?;
        let request = Request::of(args, source.as_ref())?;
        match args.formats.as_slice() {
            several @ [_, _, ..] => several::paths(&request.out, several, paths)?,
            _ => paths.write("--out", &request.out, kind_of(request.container())),
        }
    }
    Ok(())
}

/// Runs the command.
///
/// # Errors
/// Input that cannot be quantized, before anything is written; I/O;
/// [`QuantError::Gate`](mantissa_quant::QuantError::Gate) if the loss exceeds --max-kl,
/// [`QuantError::NotVerified`](mantissa_quant::QuantError::NotVerified) if the output does not verify. An old
/// output then stays in place.
pub fn run(args: &Args, context: &Context) -> Result<()> {
    let source = dense_source(model::open(&args.model, context)?)?;
    let request = Request::of(args, Some(&source))?;
    if args.formats.len() > 1 {
        return several::run(args, request, &source, context);
    }
    let options = options(args, request, &source, context)?;
    let tokens = options.calibration.as_ref().map_or(0, CalibrationSet::tokens);
    let mut plan = plan(args, &source, request.recipe.clone(), options, context)?;
    let another = args.calibration.is_text();
    plan.evaluation = args.measure.evaluation(&args.model, &source, another, context)?;
    if request.chosen.is_some() && plan.evaluation.is_none() {
        measure_on_default(&mut plan, &source, args.verify, context)?;
    }
    let least = adapt::fit_plan(&mut plan, "quantize", args.verify, context)?;
    let peak = plan.peak_bytes(args.verify);
    // Measures the speed of this machine, so only where it is shown.
    let shown = args.dry_run || request.chosen.is_some();
    let seconds = shown.then(|| predict::seconds(&plan, tokens, context.threads));
    request.announce(args, &plan, (seconds, peak), context);
    if let (true, Some(seconds)) = (args.dry_run, seconds) {
        let report = DryRun::of(&plan, &source, request, (args.verify, least, seconds));
        return context.report(&report, |out| report.human(out));
    }
    context.warn_all(&plan.notes)?;
    if args.verify {
        plan.check = Check::Verify(Some(args.model.to_path_buf()));
    }
    plan.coverage = coverage::find(&plan, &source, args.traffic.as_deref(), context)?;
    let start = Instant::now();
    let begin = if args.restart { Start::Restart } else { Start::Resume };
    let outcome = carry_out(&plan, &source, &context.output(&request.out)?, begin, context)?;
    let done = Done::new((args, request, &source), (&plan, &outcome), &request.out, start.elapsed());
    context.report(&done, |out| human(out, &done, args.layers))?;
    context.warn_all(&layer_notes(&outcome.quality))
}

/// Makes the plan, and refuses one whose output an engine of the arguments would not run.
fn plan(
    args: &Args,
    source: &ModelFiles,
    mut recipe: Recipe,
    options: Options,
    context: &Context,
) -> Result<Plan> {
    let container = options.container.unwrap_or_else(|| recipe.container());
    args.tables.apply(&mut recipe, source, container)?;
    let plan = Plan::new(source, recipe, options)?;
    lint::check_plan(&plan, source, &args.targets, context)?;
    Ok(plan)
}

/// Makes the options of the plan.
fn options(args: &Args, request: &Request, source: &ModelFiles, context: &Context) -> Result<Options> {
    let rounding = match args.round {
        Round::Nearest => Rounding::NearestEven,
        Round::Stochastic => Rounding::Stochastic { seed: context.seed },
    };
    let calibration = request.calibration(args);
    let loaded = calibration.load_apart(source, args.measure.split(), args.hold_out, context)?;
    if loaded.is_none() && (args.hold_out > 0 || args.traffic.is_some()) {
        let option = if args.hold_out > 0 { "--hold-out" } else { "--traffic" };
        let allowed = "--calibration or --calibration-tokens with it";
        return Err(BadInput::new(option, "neither", allowed).into());
    }
    let (calibration, held_out) = loaded.unzip();
    Ok(Options {
        threads: context.threads,
        container: request.format,
        max_shard_bytes: args.max_shard_size.unwrap_or(DEFAULT_SHARD_BYTES),
        max_gguf_bytes: args.max_shard_size,
        rounding,
        calibration,
        held_out: held_out.unwrap_or_default(),
        products: match args.calibration_dtype {
            Factors::F32 => Products::F32,
            Factors::Bf16 => Products::Bf16,
        },
        importance: args.imatrix.as_deref().map(Importance::read).transpose()?,
        ..Options::default()
    })
}

/// Returns what a layer has instead of what the recipe asks, with the reason: `q5_0 instead of q4_k: …`.
fn fallback(layer: &LayerReport, quality: &Quality) -> Option<String> {
    let why = layer.fallback.as_ref()?;
    let told = layer.method == quality.method || is_of_scheme(why);
    Some(if told { why.clone() } else { format!("{} instead of {}: {why}", layer.method, quality.method) })
}

/// True if the reason of a fallback names the scheme, as notes of the plan do.
fn is_of_scheme(why: &str) -> bool {
    why.contains(" instead of ")
}

/// Returns the notes of single layers, fallbacks of the method first.
fn layer_notes(quality: &Quality) -> Vec<String> {
    let layers = &quality.layers;
    let notes = layers.iter().flat_map(|l| l.notes.iter().map(|note| format!("{}: {note}", l.module)));
    let fallen = layers.iter().filter(|layer| layer.method != quality.method);
    let fallen = fallen.filter(|layer| !layer.fallback.as_deref().is_some_and(is_of_scheme));
    let fallen = fallen.filter_map(|l| Some(format!("{}: {}", l.module, fallback(l, quality)?)));
    fallen.chain(notes).collect()
}

/// Returns the SHA-256 of an output that is a single file.
fn sha256(plan: &Plan, outcome: &Outcome) -> Option<String> {
    let files = &outcome.quality.hashes.weights;
    let single = plan.container.facts().one_file && files.len() == 1;
    files.values().next().filter(|_| single).map(FileDigest::hex)
}

/// Describes layers that are not stored or quantized as the recipe asks, with every reason; `None` if there are none.
pub fn fallback_line(quality: &Quality) -> Option<String> {
    let layers = quality.layers.iter();
    let fallen = layers.filter_map(|layer| Some((layer.module.as_str(), fallback(layer, quality)?)));
    let fallen: Vec<_> = fallen.collect();
    let kinds = notes::kinds(fallen.iter().map(|(module, why)| (*module, why.as_str())));
    let (count, all) = (fallen.len(), quality.layers.len());
    let kinds: Vec<_> = kinds.iter().map(ToString::to_string).collect();
    (count > 0).then(|| format!("{count} of {all} layers: {}", kinds.join("; ")))
}

fn human(out: &mut dyn Write, done: &Done<'_>, layers: bool) -> io::Result<()> {
    let r = done.quality;
    let kept = if r.kept.is_empty() { String::new() } else { format!(", {} kept", r.kept.len()) };
    let output = done.output.display();
    labelled(out, "recipe", &r.recipe)?;
    labelled(out, "output", &format!("{output}: {} layers in format {}{kept}", r.layers.len(), r.container))?;
    labelled(out, "size", &format!("{} from {}", bytes(r.bytes), bytes(done.source_bytes)))?;
    let linear = linear_bits(r.linear_bits_per_weight, r.linear_stored_bits_per_weight);
    let all = format!("{:.3} with embeddings and head", r.bits_per_weight);
    labelled(out, "bits", &format!("{linear} in these layers, {all}"))?;
    if let Some(line) = fallback_line(r) {
        labelled(out, "fallbacks", &line)?;
    }
    tables::human(out, &done.tables)?;
    r.evaluation.iter().try_for_each(|figures| human_figures(out, figures))?;
    match done.verification {
        Some(v) => super::verify::human(out, v)?,
        None => writeln!(out, "not verified")?,
    }
    human_time(out, done)?;
    if let Some(hash) = &done.sha256 {
        labelled(out, "sha256", hash)?;
    }
    layer_table(out, r, layers)?;
    done.ending.human(out)
}

/// Prints times, and what an unfinished run contributed.
fn human_time(out: &mut dyn Write, done: &Done<'_>) -> io::Result<()> {
    let beside =
        |what, seconds: Option<f64>| seconds.map(|s| format!(", {what} {s:.2} s")).unwrap_or_default();
    let resumed = match done.resumed {
        0 => String::new(),
        n => format!("; {n} tensors and layers from an unfinished run"),
    };
    let rate = crate::output::count(done.weights_per_second as u64);
    let (synced, verified) = (beside("fsync", done.sync_seconds), beside("verify", done.verify_seconds));
    let text = format!("{:.2} s, {rate} weights/s{synced}{verified}{resumed}", done.seconds);
    labelled(out, "time", &text)
}
