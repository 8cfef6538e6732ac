//! `mantissa fit`: chooses scheme and method of every layer by measured KL, under a budget.

mod budget;
mod families;
mod front;
mod layers;
mod measure;
mod page;
mod windows;

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::Result;
use mantissa_advise::sensitivity::Baseline;
use mantissa_advise::shape;
use mantissa_eval::Sequence;
use mantissa_num::{Scheme, parse_activation};
use mantissa_plan::contract::Target;
use mantissa_plan::precision::KVS;
use mantissa_plan::shape::ModelShape;
use mantissa_quant::allocate::{AllocateError, Allocation};
use mantissa_quant::verify::Verification;
use mantissa_quant::{Check, Options, Outcome, Plan, Quality, Recipe, Start, TaskRuns, dequantized_source};
use mantissa_store::convention::{Container, ModelFiles, native};
use mantissa_store::{FileDigest, Kind, Paths, WorkFolder, write_file_atomic};
use serde::Serialize;

use self::budget::{Budget, Served};
use self::families::{Candidates, candidates, recipe_text};
use self::front::Point;
use self::measure::{Cache, Candidate, Family, Row, Search, Uniform};
use super::calibration::CalibrationArgs;
use super::destination::Destination;
use super::lint;
use super::model::{self, ModelPath};
use super::outcome::{MeasureArgs, carry_out, human_figures, left_by_another, linear_bits, worst};
use super::parse::{container, scheme};
use super::rebuild;
use super::tables::TableArgs;
use super::text::bound;
use crate::context::Context;
use crate::error::{BadInput, Exit, exit_of};
use crate::interrupt;
use crate::output::{Align, Table, bytes, labelled, number, paragraph, written};

/// Choose each layer's scheme and method by KL, under a budget
///
/// Quantizes the model under each candidate scheme by each method, measures the KL of each layer alone on
/// --text, and chooses for each layer, so that the sum of KL is smallest.
///
/// Fused layers (qkv, gate_up) share one scheme and method, and so do all experts of a layer. Embeddings, head, norms
/// and routers keep their dtype; they count in a budget of bytes, not in one of bits per weight. Every other
/// window of the text, up to --windows, is used for the choice; the output is evaluated on the rest before it
/// appears at --out. A method that learns whole decoder layers (autoround) takes all of a layer or none. One with
/// a transform is not mixed with others: all layers use it if its sum is the smallest.
#[derive(clap::Args)]
#[command(after_help = "EXAMPLES
  mantissa fit demo --budget 6bpw --schemes int4-g32,int8-g32 \\
      --text story.txt --context 128 --out demo-fit
  mantissa fit path/to/model --budget 6GB --method gptq,qtip \\
      --calibration text.txt --text sample.txt --out model-fit
  mantissa fit path/to/model --budget 5bpw --schemes int4-g128,int8-g128 \\
      --for vllm:tp=2 --text sample.txt --out model-vllm")]
pub struct Args {
    /// Unquantized folder or .gguf file, or demo
    ///
    /// A Hugging Face folder, or a GGUF file of F16, BF16 or F32. demo is the model inside the binary.
    model: ModelPath,
    /// Bits per weight (4.5bpw), total size (6GB) or memory
    ///
    /// Bits per weight count the quantized layers with their scales and zero points; a size counts all tensors.
    /// "24GB with 32k context and 8 sequences on rtx4090" counts tensors, KV caches and activations, at most what the
    /// device leaves to a model, and chooses the KV cache's scheme too: of f16, fp8, int8 and int4 those that the format
    /// stores, each by its measured KL.
    #[arg(long, value_name = "BUDGET", value_parser = budget::parse, help_heading = "Recipe")]
    budget: Budget,
    /// Output folder, or GGUF file if it ends in .gguf
    ///
    /// GGUF output in a folder is named MODEL-fit.gguf.
    #[arg(long, value_name = "PATH", help_heading = "Output")]
    out: PathBuf,
    /// Methods, as in recipe names
    ///
    /// Separated by commas. Each layer takes one of them, except those that cannot be mixed: the report says which and why.
    #[arg(
        long,
        value_name = "METHODS",
        value_delimiter = ',',
        default_value = "rtn",
        help_heading = "Recipe"
    )]
    method: Vec<String>,
    /// Candidate schemes [default: int3, int4, int6, int8]
    ///
    /// Separated by commas. The default schemes have groups of 128, or of 32 if 128 does not divide every row; for qtip
    /// they are trellis2, trellis3, trellis4. With several methods each takes those that it can.
    #[arg(long, value_name = "SCHEMES", value_delimiter = ',', value_parser = scheme, help_heading = "Recipe")]
    schemes: Vec<Scheme>,
    /// Checkpoint format [default: from the schemes]
    ///
    /// The default is the first format that holds the schemes.
    #[arg(long, value_name = "FORMAT", value_parser = container, help_heading = "Output")]
    format: Option<Container>,
    #[command(flatten)]
    tables: TableArgs,
    #[command(flatten)]
    calibration: CalibrationArgs,
    /// Engine that the output must load in
    ///
    /// Refuses (exit code 1) what this engine would not load or would compute wrongly; see `mantissa lint` for
    /// ENGINE[:tp=N,gpu=NAME].
    #[arg(long = "for", value_name = "ENGINE", value_parser = lint::target, help_heading = "Recipe")]
    targets: Vec<Target>,
    /// Maximum number of windows for measuring each layer
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..), help_heading = "Evaluation", hide_short_help = true)]
    windows: u32,
    /// Measure no further scheme after this many minutes
    ///
    /// The choice is then among the schemes that are measured, the smallest first. Measurements are kept until the
    /// output is complete: the same command resumes.
    #[arg(long, value_name = "MINUTES", value_parser = bound, help_heading = "Evaluation", hide_short_help = true)]
    time_limit: Option<f64>,
    /// Keep measurements in FILE and reuse those there
    ///
    /// Measurements do not depend on the budget: with the same file another budget quantizes only its output.
    #[arg(long, value_name = "FILE", help_heading = "Evaluation", hide_short_help = true)]
    measurements: Option<PathBuf>,
    /// Save the recipe found, for `quantize --recipe`
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    save_recipe: Option<PathBuf>,
    /// List every unit, not only the ten with the largest KL
    #[arg(long, help_heading = "Output")]
    layers: bool,
    /// Write an HTML page as well
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    html: Option<PathBuf>,
    #[command(flatten)]
    measure: MeasureArgs,
}

/// Name of the recipe found.
const RECIPE: &str = "fit.toml";

#[derive(Serialize)]
struct Done<'a> {
    output: &'a Path,
    /// Methods of the layers.
    method: String,
    units: &'a [Row],
    /// Predicted KL: the sum over the units' own KL.
    predicted_kl: f64,
    /// Lower bound of that sum over all choices within the budget.
    predicted_kl_bound: f64,
    /// Best choices of every size, by the sum of the units' own KL.
    front: &'a [Point],
    /// Recipes left out, with the reason.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    left_out: &'a Vec<String>,
    /// Reasons why methods are not mixed.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    apart: &'a Vec<String>,
    /// Number of windows used for the choice.
    windows: usize,
    /// True if the units' KL are scaled to sum to that of the whole model under their method and scheme.
    #[serde(skip)]
    scaled: bool,
    #[serde(flatten)]
    quality: &'a Quality,
    verification: Option<&'a Verification>,
    /// Bytes of what serves, if the budget is memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    served: Option<Served>,
    #[serde(skip_serializing_if = "Option::is_none")]
    page: Option<&'a PathBuf>,
}

/// Adds the paths that the command reads and writes.
///
/// # Errors
/// Invalid recipe arguments.
pub fn paths(args: &Args, paths: &mut Paths) -> Result<()> {
    args.model.paths(paths);
    args.calibration.paths(paths);
    args.measure.paths(paths);
    let destination = destination(args)?;
    paths.write("--out", &destination.path, destination.kind());
    args.save_recipe.iter().for_each(|path| paths.write("--save-recipe", path, Kind::File));
    args.measurements.iter().for_each(|path| paths.write_about("--measurements", path, &*args.model));
    args.html.iter().for_each(|path| paths.write("--html", path, Kind::File));
    Ok(())
}

/// Resolves the output by the first candidate.
fn destination(args: &Args) -> Result<Destination> {
    let container = match (args.format, args.schemes.is_empty()) {
        (Some(format), _) => format,
        (None, true) => native::CONTAINER,
        (None, false) => {
            let names = args.method.iter().flat_map(|m| args.schemes.iter().map(move |s| format!("{m}-{s}")));
            let mut recipes = names.map(|name| Recipe::load(&name));
            let first = recipes.next().unwrap_or_else(|| Recipe::load(""));
            // Another method may take the schemes that the first does not.
            first.or_else(|error| recipes.find_map(Result::ok).ok_or(error))?.container()
        }
    };
    Destination::of_format(&args.model, "fit", container, &args.out)
}

/// Runs the command.
///
/// # Errors
/// A budget that no choice meets; input that cannot be quantized; I/O;
/// [`GateFailed`](crate::error::GateFailed) if an engine would refuse the result or it does not verify.
pub fn run(args: &Args, context: &Context) -> Result<()> {
    let out = destination(args)?.path;
    let source = dequantized_source(model::open(&args.model, context)?)?;
    let tasks = args.measure.tasks(&args.model, &source, context)?;
    let (measured_on, rest) = windows::windows(args, context)?;
    let options = Options {
        threads: context.threads,
        container: args.format,
        calibration: args.calibration.load(&source, None, context)?,
        ..Options::default()
    };
    let calibrated = options.calibration.is_some();
    let plan = |mut recipe: Recipe| -> Result<Plan> {
        let container = args.format.unwrap_or_else(|| recipe.container());
        args.tables.apply(&mut recipe, &source, container)?;
        Ok(Plan::new(&source, recipe, options.clone())?)
    };
    let Candidates { mut families, mut left_out, apart } = candidates(args, &source, &plan)?;
    let plans: Vec<&Plan> = families.iter().flat_map(Family::all_plans).collect();
    context.require_memory("fit", needed(args, context, &source, &plans, &measured_on, (&rest, &tasks))?)?;
    let shape = shape::of_config(&args.model.named().display().to_string(), &plans[0].config);
    let limit = args.budget.limit(plans[0], &shape)?;
    let kv = caches((args, calibrated), &shape, &families, &mut left_out)?;
    // A budget that no choice meets is refused before anything is measured.
    for family in &mut families {
        family.kv = kv.iter().map(|cache| cache.candidate(0.0, 0.0)).collect();
    }
    best(&families, |family| choose(family, &family.sizes(), limit, &args.budget))?;
    let known = args.measurements.as_deref().map_or(Ok(Vec::new()), measure::read)?;
    apart.iter().for_each(|why| context.note(why));
    let work = WorkFolder::begin(&out, "fit", &key(&families, &source, &measured_on)?)?;
    context.warn_all(&left_out)?;
    work.others().iter().for_each(|path| context.warn(&left_by_another(path)));
    let left =
        format!("measurements are kept in {}; rerun the same command to resume", work.path().display());
    let leaving = interrupt::leaving(left.clone());
    let container = families[0].plans[0].plan.container;
    let search = Search {
        work: &work,
        context,
        source: &source,
        windows: &measured_on,
        known,
        kv,
        limit: args.time_limit,
        several: args.method.len() > 1,
    };
    let searched = search.measure(families).and_then(|(families, all)| {
        if let Some(path) = &args.measurements {
            write_file_atomic(&context.output(path)?, measure::text(&all)?.as_bytes())?;
        }
        let front = front::front(&families);
        let (at, found) = best(&families, |family| choose(family, &family.costs, limit, &args.budget))?;
        let family = &families[at];
        let (rows, outcome) = write(args, context, &source, family, &found, (plan, rest, tasks))?;
        let kv = family.kv_chosen(&found).cloned();
        Ok((family.methods_of(&found), rows, (found, kv), front, outcome))
    });
    drop(leaving);
    let (method, rows, (found, kv), front, outcome) = match searched {
        Ok(done) => done,
        // The same command would fail again, so nothing is kept.
        Err(error) if exit_of(&error) == Exit::Input => {
            work.remove()?;
            return Err(error);
        }
        Err(error) => return Err(error.context(left)),
    };
    // Removed only now, so that a rerun after a kill need not measure again.
    work.remove()?;
    let done = Done {
        output: written(&out, container, &outcome),
        method,
        units: &rows,
        predicted_kl: found.cost,
        predicted_kl_bound: found.bound,
        front: &front,
        left_out: &left_out,
        apart: &apart,
        windows: measured_on.len(),
        scaled: args.method.len() > 1,
        quality: &outcome.quality,
        verification: outcome.verification.as_ref().map(|(verification, _)| verification),
        served: args.budget.served(kv, &shape, outcome.quality.bytes),
        page: args.html.as_ref(),
    };
    if let Some(file) = &args.html {
        page::page(args.model.named(), &done).write(&context.output(file)?)?;
    }
    context.report(&done, |out| human(out, &done, args.layers))
}

/// Returns the family with the smallest cost, and its allocation; the error of the first if no family has one.
fn best(families: &[Family], choose: impl Fn(&Family) -> Result<Allocation>) -> Result<(usize, Allocation)> {
    let mut found: Option<(usize, Allocation)> = None;
    let mut error = None;
    for (at, family) in families.iter().enumerate() {
        match choose(family) {
            Ok(new) if found.as_ref().is_none_or(|(_, old)| new.cost < old.cost) => found = Some((at, new)),
            Ok(_) => {}
            Err(refused) => error = error.or(Some(refused)),
        }
    }
    found.ok_or_else(|| {
        error.unwrap_or_else(|| BadInput::new("--method", "none", "at least one method").into())
    })
}

/// Writes the recipe that `found` chose and the output, which is evaluated on `rest` and `tasks`.
fn write(
    args: &Args,
    context: &Context,
    source: &ModelFiles,
    family: &Family,
    found: &Allocation,
    (plan, rest, tasks): (impl Fn(Recipe) -> Result<Plan>, Vec<Sequence>, Option<TaskRuns>),
) -> Result<(Vec<Row>, Outcome)> {
    let rows = family.rows(found);
    let text = recipe_text(family, args.format, found);
    if let Some(path) = &args.save_recipe {
        write_file_atomic(&context.output(path)?, text.as_bytes())?;
    }
    let mut plan = plan(Recipe::from_toml(RECIPE, &text)?)?;
    plan.record(rebuild::of_recipe(context, (RECIPE, text), plan.container));
    lint::check_plan(&plan, source, &args.targets, context)?;
    plan.evaluation = Some(args.measure.evaluation_on(source, " (held-out windows)", rest)?);
    plan.tasks = tasks;
    context.warn_all(&plan.notes)?;
    plan.check = Check::Verify(Some(args.model.to_path_buf()));
    let outcome =
        carry_out(&plan, source, &context.output(&destination(args)?.path)?, Start::Resume, context)?;
    Ok((rows, outcome))
}

/// Predicts the peak memory. The source stays in memory while candidates are made and measured; the output is
/// also evaluated and verified.
fn needed(
    args: &Args,
    context: &Context,
    source: &ModelFiles,
    plans: &[&Plan],
    measured_on: &[Sequence],
    (rest, tasks): (&[Sequence], &Option<TaskRuns>),
) -> Result<u64> {
    let making = plans.iter().map(|plan| plan.peak_bytes(false)).max().unwrap_or(0);
    let baseline = Baseline::bytes(source, measured_on, context.threads)?;
    let mut last = 0;
    for plan in plans {
        let mut plan = (*plan).clone();
        plan.evaluation = Some(args.measure.evaluation_on(source, "", rest.to_vec())?);
        plan.tasks.clone_from(tasks);
        last = plan.peak_bytes(true).max(last);
    }
    // With several methods each candidate also runs whole, beside the source.
    let whole = match args.method.len() > 1 {
        true => {
            let candidate = plans.iter().map(|plan| plan.output_bytes()).max().unwrap_or(0);
            source.checkpoint().total_bytes().saturating_add(candidate)
        }
        false => 0,
    };
    let needs = last.max(baseline.saturating_add(making.max(whole)));
    Ok(model::BASE.saturating_add(needs).saturating_add(needs / 10))
}

/// Returns the key of all measurements: a hash of everything that decides them.
fn key(families: &[Family], source: &ModelFiles, windows: &[Sequence]) -> Result<String> {
    let of = |family: &Family| -> Result<Vec<String>> {
        let key = |uniform: &Uniform| measure::key(&uniform.plan, &family.units, source, windows);
        family.plans.iter().map(key).collect()
    };
    let keys = families.iter().map(of).collect::<Result<Vec<_>>>()?;
    Ok(format!("mantissa fit 3 {}", FileDigest::of(format!("{keys:?}").as_bytes()).hex()))
}

/// Chooses among the candidates `units` of a family.
fn choose(family: &Family, units: &[Vec<Candidate>], limit: u64, budget: &Budget) -> Result<Allocation> {
    family.allocate(&family.choices(units), limit).map_err(|error| match error {
        AllocateError::Budget { budget: limit, least } => {
            budget.exceeded(&family.plans[0].plan, limit, least).into()
        }
        error => BadInput::new("--schemes", error.to_string(), "schemes under which the KL is finite").into(),
    })
}

/// Returns the schemes of the KV cache that every candidate's format stores, with their bits; none if its bytes do not
/// count. Those left out are added to `left_out`. A static scheme needs a calibration; it is measured with a scale of each
/// head and token.
fn caches(
    (args, calibrated): (&Args, bool),
    shape: &ModelShape,
    families: &[Family],
    left_out: &mut Vec<String>,
) -> Result<Vec<Cache>> {
    let Budget::Serving(serving) = &args.budget else { return Ok(Vec::new()) };
    let plans = || families.iter().flat_map(|family| &family.plans).map(|uniform| &uniform.plan);
    let mut found = Vec::new();
    for kv in KVS {
        let stored = |scheme: &str| -> Result<(), String> {
            let parsed = parse_activation(scheme).map_err(|error| error.to_string())?;
            plans().try_for_each(|plan| plan.container.check_kv(&parsed)).map_err(|error| error.to_string())
        };
        let fixed = format!("{}@static", kv.scheme);
        let scheme = if kv.by_head == PLAIN_CACHE {
            Ok(PLAIN_CACHE.to_owned())
        } else if stored(kv.by_head).is_ok() {
            Ok(kv.by_head.to_owned())
        } else {
            match stored(&fixed) {
                Ok(()) if calibrated => Ok(fixed),
                Ok(()) => Err("its scales need --calibration".to_owned()),
                Err(error) => Err(error),
            }
        };
        match scheme {
            Ok(scheme) => {
                let bits = 8 * serving.kv_bytes(&kv, shape);
                found.push(Cache { policy: kv.by_head.parse()?, scheme, bits });
            }
            Err(error) => left_out.push(format!("KV cache {}: left out: {error}", kv.name)),
        }
    }
    Ok(found)
}

/// Scheme of a KV cache that checkpoints do not name.
const PLAIN_CACHE: &str = "f16";

fn human(out: &mut dyn Write, done: &Done<'_>, layers: bool) -> io::Result<()> {
    let quality = done.quality;
    let (output, format) = (done.output.display(), &quality.container);
    labelled(out, "output", &format!("{output}: {} layers in format {format}", quality.layers.len()))?;
    labelled(out, "size", &bytes(quality.bytes))?;
    let linear = linear_bits(quality.linear_bits_per_weight, quality.linear_stored_bits_per_weight);
    labelled(out, "bits", &format!("{linear} in linear layers by {}", done.method))?;
    if done.front.len() > 1 {
        let point = |p: &Point| {
            format!("{:.2} bits {} ({})", p.bits_per_weight, number(Some(p.predicted_kl), 3), p.method)
        };
        let points: Vec<_> = done.front.iter().map(point).collect();
        labelled(out, "front", &format!("predicted KL by size: {}", points.join(", ")))?;
    }
    done.apart.iter().try_for_each(|why| labelled(out, "apart", why))?;
    done.served.iter().try_for_each(|served| labelled(out, "memory", &served.to_string()))?;
    let (sum, bound) = (done.predicted_kl, done.predicted_kl_bound);
    labelled(
        out,
        "predicted",
        &format!("KL {sum:.6} nats/token, the sum over units (lower bound {bound:.6})"),
    )?;
    quality.evaluation.iter().try_for_each(|figures| human_figures(out, figures))?;
    super::tasks::human(out, &quality.tasks)?;
    done.verification.map_or(Ok(()), |verification| super::verify::human(out, verification))?;
    unit_table(out, done, layers)?;
    // Not wrapped, to be copied.
    done.page.map_or(Ok(()), |page| writeln!(out, "page        {}", page.display()))
}

/// Prints the ten units with the largest KL, or all.
fn unit_table(out: &mut dyn Write, done: &Done<'_>, all: bool) -> io::Result<()> {
    let (rows, heading) = worst(done.units, (all, "units", "KL"), |row| row.candidates[row.chosen].kl);
    writeln!(out, "\n{heading}")?;
    unit_columns(rows).write(out)?;
    let windows = done.windows;
    let scaled = if done.scaled { ", scaled per method and scheme to the KL of the whole model" } else { "" };
    paragraph(out, 0, &format!("KL of each unit alone quantized (nats/token), on {windows} windows{scaled}"))
}

/// Lists units with their chosen scheme and method, its KL, and the KL of the others.
fn unit_columns<'a>(rows: impl IntoIterator<Item = &'a Row>) -> Table {
    let columns = [
        ("unit", Align::Left),
        ("chosen", Align::Left),
        ("method", Align::Left),
        ("bits", Align::Right),
        ("KL", Align::Right),
        ("±", Align::Right),
        ("KL of other candidates", Align::Left),
    ];
    let mut table = Table::new(columns).optional(["±", "bits"]);
    for row in rows {
        let chosen = &row.candidates[row.chosen];
        let others = row.candidates.iter().enumerate().filter(|(at, _)| *at != row.chosen);
        let others = others.map(|(_, other)| format!("{} {}", row.named(other), number(Some(other.kl), 3)));
        table.row([
            row.unit.clone(),
            row.scheme.clone(),
            row.method.clone(),
            format!("{:.3}", row.bits_per_weight),
            number(Some(chosen.kl), 3),
            number(Some(chosen.kl_se), 2),
            others.collect::<Vec<_>>().join(", "),
        ]);
    }
    table
}
