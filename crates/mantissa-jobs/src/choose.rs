//! Chooses a measured recipe for an engine: `quantize MODEL --for ENGINE` without `--recipe`.

pub mod predict;

use mantissa_advise::{remedy, shape, subject};
use mantissa_model::load_config;
use mantissa_num::page_command;
use mantissa_plan::contract::{EngineTarget, Subject, lint};
use mantissa_plan::figures::PAGE;
use mantissa_plan::hardware::{Device, Maker};
use mantissa_plan::parallel::Parallel;
use mantissa_plan::precision::{CANDIDATES, Precision, SURPLUS, Suits, too_wide};
use mantissa_plan::recommend::{Entry, Load, Row, Wish, best, evaluate};
use mantissa_quant::calibrate::CalibrationSet;
use mantissa_quant::recipe::{spelled_out, unlike_preset};
use mantissa_quant::{Options, Plan, QuantError, Recipe};
use mantissa_store::convention::{Container, ModelFiles};
use serde::Serialize;

use crate::calibration::Calibration;
use crate::error::{BadInput, JobError, Result};
use crate::host::Host;

/// Nominal bits per weight without `--bits`, where the GPU is not known.
pub const BITS: u32 = 4;

/// Recipes that no measurement ranks, with their nominal bits; offered by name where no measured one fits.
const UNMEASURED: [(&str, u32); 6] = [
    ("rtn-int4-g32", 4),
    ("rtn-int4-g32-asym", 4),
    ("rtn-int4-g32-asym:minmax", 4),
    ("rtn-q4_0", 4),
    ("rtn-int8-channel", 8),
    ("rtn-q8_0", 8),
];

/// Chosen recipe, with the reason.
#[derive(Clone, Debug, Serialize)]
pub struct RecipeChoice {
    /// Recipe.
    pub recipe: &'static str,
    /// Checkpoint format.
    #[serde(serialize_with = "by_name")]
    pub format: Container,
    /// Nominal bits per weight.
    pub bits: u32,
    /// KL in nats/token that was measured with this recipe on `model`: the larger of our two models.
    pub measured_kl: f64,
    /// Model of the figure.
    pub model: &'static str,
    /// Page with the figure.
    pub source: &'static str,
    /// One line for the user.
    pub why: String,
    /// Recipes with a smaller KL that do not fit this model or engine, with the reasons.
    pub skipped: Vec<Skipped>,
}

/// Offer that does not fit.
#[derive(Clone, Debug, Serialize)]
pub struct Skipped {
    /// Recipe.
    pub recipe: &'static str,
    /// Checkpoint format.
    pub format: &'static str,
    /// Reason.
    pub why: String,
}

fn by_name<S: serde::Serializer>(format: &Container, serializer: S) -> std::result::Result<S::Ok, S::Error> {
    serializer.serialize_str(format.name())
}

/// Chooses a recipe as `mantissa plan` does ([`best`]): of the candidates of `bits` that fit `source` and load in every target,
/// the fastest on the GPU of the first one, those within 8 % counting as equal, with the least measured KL. Without a GPU,
/// only the KL counts. Without `bits`, every width within the limits of `plan` for the GPU, else [`BITS`]. With `format`, only
/// recipes in that format.
///
/// # Errors
/// No candidate fits; the first reasons, and the bits at which one does.
pub fn choose(
    source: &ModelFiles,
    targets: &[EngineTarget],
    bits: Option<u32>,
    format: Option<Container>,
) -> Result<RecipeChoice> {
    // A source that no recipe can quantize is refused as `--recipe` would refuse it.
    let plain = Plan::new(source, Recipe::load("w8a16")?, Options { threads: 1, ..Options::default() });
    if let Err(error @ QuantError::AlreadyQuantized { .. }) = plain {
        return Err(error.into());
    }
    let search = Search { source, targets, format, device: device(targets) };
    let mut found = None;
    if bits.is_none() && search.device.is_some() {
        found = search.run(None)?.0;
    }
    let mut skipped = Vec::new();
    if found.is_none() {
        (found, skipped) = search.run(Some(bits.unwrap_or(BITS)))?;
    }
    let engines = targets.iter().map(ToString::to_string).collect::<Vec<_>>().join(" and ");
    let Some(found) = found else {
        return Err(none(&search, bits.unwrap_or(BITS), &engines, &skipped));
    };
    let chosen = found.precision;
    let smaller = if chosen.offered.spare { ", in groups of 32, which divide this model's rows" } else { "" };
    let measured = match bits.or_else(|| search.device.is_none().then_some(BITS)) {
        Some(bits) => format!("measured {bits}-bit recipes"),
        None => "measured recipes".to_owned(),
    };
    let first = match &search.device {
        Some(device) => format!("least KL among the fastest on {}", device.title),
        None => "least KL".to_owned(),
    };
    let of = match found.fitting {
        1 => format!("of the {measured} only this fits the model and {engines}"),
        n => format!("{first} of the {n} {measured} that fit the model and {engines}"),
    };
    let (kl, model) = chosen.figure().map_or((f64::NAN, ""), |figure| (figure.kl, figure.model));
    let at_most = if chosen.is_bounded(None) { "at most " } else { "" };
    let why = format!(
        "{of}{smaller}: {at_most}{kl:.5} nats/token on our test model {model} ({})",
        page_command(PAGE)
    );
    Ok(RecipeChoice {
        recipe: chosen.recipe.unwrap_or_default(),
        format: found.container,
        bits: chosen.nominal,
        measured_kl: kl,
        model,
        source: PAGE,
        why,
        skipped,
    })
}

/// Returns the bits nearest to [`BITS`] at which a measured candidate loads in `target`, for a model with the layers of
/// `described` whose source is not at hand.
pub fn loading_bits(described: &Subject, target: &EngineTarget) -> Option<u32> {
    let loads = |candidate: &&Precision| {
        let container = Container::named(candidate.convention);
        let recipe = candidate.recipe.and_then(|recipe| Recipe::load(recipe).ok());
        let usual = target.engine.passes_over(candidate.convention, candidate.offered.native).is_none();
        let runs = usual && candidate.measured_kl().is_some() && suits_gpu(candidate, target).is_ok();
        let pair = recipe.zip(container).filter(|_| runs);
        pair.is_some_and(|(recipe, container)| remedy::accepts(described, &recipe, container, target))
    };
    let bits = CANDIDATES.iter().filter(loads).map(|candidate| candidate.nominal);
    bits.min_by_key(|bits| (bits.abs_diff(BITS), *bits))
}

/// Returns the device of the first target that names a GPU whose figures are known.
fn device(targets: &[EngineTarget]) -> Option<Device> {
    targets.iter().find_map(|target| Device::named(target.gpu?.name).ok())
}

/// Best candidate with its format.
struct Found {
    precision: &'static Precision,
    container: Container,
    /// Number of candidates that fit.
    fitting: usize,
}

/// Question for a recipe.
struct Search<'a> {
    source: &'a ModelFiles,
    targets: &'a [EngineTarget],
    format: Option<Container>,
    /// Device whose speed counts.
    device: Option<Device>,
}

impl Search<'_> {
    /// Returns the best candidate, and those with a smaller loss that do not fit.
    ///
    /// # Errors
    /// The config of the source.
    fn run(&self, bits: Option<u32>) -> Result<(Option<Found>, Vec<Skipped>)> {
        let config = load_config(self.source)?;
        let shape = shape::of_config("", &config);
        let devices = self.targets.iter().map(|target| target.tp as u64).max().unwrap_or(1);
        let load = Load::usual(&shape, devices, Parallel::Tensor);
        let engine = self.targets.first().map(|target| target.engine);
        let wish = Wish { engine, bits };
        let rows = self.device.as_ref().map(|device| evaluate(&shape, device, &load, &wish));
        let (mut entries, mut containers, mut skipped) = (Vec::new(), Vec::new(), Vec::new());
        for precision in CANDIDATES.iter().filter(|row| row.measured_kl().is_some() && !row.is_dense()) {
            let Some(container) = Container::named(precision.convention) else { continue };
            let asked = bits.is_none_or(|bits| bits == precision.nominal);
            if !asked || !self.asks_for(precision, container) {
                continue;
            }
            let row = rows.iter().flatten().find(|row| row.precision == *precision && self.format.is_none());
            let refused = row.and_then(Row::refusal);
            let fits = fits(precision, container, self.source, self.targets);
            let fits = fits.and_then(|()| refused.map_or(Ok(()), Err));
            let entry = match row {
                Some(row) => {
                    let runs = fits.is_ok() && (row.fits || bits.is_some());
                    Entry { precision, runs, ..row.entry(row.seconds) }
                }
                None => {
                    let doubtful = self.is_doubtful(precision);
                    Entry { precision, runs: fits.is_ok(), seconds: None, doubtful }
                }
            };
            if let Err(why) = fits {
                // The first layer stands for all.
                let why = why.split("; ").next().unwrap_or_default().to_owned();
                let skip =
                    Skipped { recipe: precision.recipe.unwrap_or_default(), format: container.name(), why };
                skipped.push((precision, skip));
            }
            entries.push(entry);
            containers.push(container);
        }
        let chosen = best(&entries, wish.limit(&shape, mantissa_plan::recommend::MAX_KL));
        let fitting = entries.iter().filter(|entry| entry.runs).count();
        let found = chosen.and_then(|i| {
            let precision = CANDIDATES.iter().find(|row| *row == entries[i].precision)?;
            Some(Found { precision, container: *containers.get(i)?, fitting })
        });
        // Those that stand before the choice: a spare one after all others.
        let rank = |row: &Precision| (row.offered.spare, row.measured_kl().unwrap_or(f64::INFINITY));
        let chosen = found.as_ref().map(|found| rank(found.precision));
        let better = |row: &Precision| chosen.is_none_or(|chosen| rank(row) < chosen);
        skipped.sort_by(|(a, _), (b, _)| {
            let (a, b) = (rank(a), rank(b));
            a.0.cmp(&b.0).then(a.1.total_cmp(&b.1))
        });
        Ok((found, skipped.into_iter().filter(|(row, _)| better(row)).map(|(_, skip)| skip).collect()))
    }

    /// True if a recipe of these bits fits. Without a device, whose speed would decide, the first that fits ends the search:
    /// each takes a plan of the whole model.
    fn has(&self, bits: u32) -> bool {
        if self.device.is_some() {
            return self.run(Some(bits)).is_ok_and(|(found, _)| found.is_some());
        }
        let measured =
            |row: &&Precision| row.measured_kl().is_some() && !row.is_dense() && row.nominal == bits;
        CANDIDATES.iter().filter(measured).any(|precision| {
            Container::named(precision.convention).is_some_and(|container| {
                let asked = self.asks_for(precision, container);
                asked && fits(precision, container, self.source, self.targets).is_ok()
            })
        })
    }

    /// True if the format is the one asked for, or the usual one of every engine.
    fn asks_for(&self, precision: &Precision, container: Container) -> bool {
        let native = precision.offered.native;
        let passed = |target: &EngineTarget| match self.format {
            None => target.engine.passes_over(precision.convention, native).is_some(),
            Some(_) => native && target.engine.emulates(),
        };
        self.format.is_none_or(|wanted| wanted == container) && !self.targets.iter().any(passed)
    }

    /// True if a GPU that is not known may decode the weights where others multiply their types.
    fn is_doubtful(&self, precision: &Precision) -> bool {
        let decoded = |target: &EngineTarget| {
            target.engine.makers.contains(&Maker::Nvidia)
                && precision.suits(target.gpu.map(|gpu| gpu.sm)) == Suits::Decoded
        };
        self.targets.iter().any(decoded)
    }
}

/// Checks that the GPU of a target runs the candidate.
///
/// # Errors
/// The reason why it does not.
fn suits_gpu(candidate: &Precision, target: &EngineTarget) -> Result<(), String> {
    let suits = candidate.suits(target.gpu.map(|gpu| gpu.sm));
    match suits {
        Suits::No(why) if target.engine.makers.contains(&Maker::Nvidia) => Err(why),
        _ => Ok(()),
    }
}

/// Checks that the recipe can be stored for this model and loads in every target.
///
/// # Errors
/// The first reason why not.
fn fits(
    candidate: &Precision,
    container: Container,
    source: &ModelFiles,
    targets: &[EngineTarget],
) -> Result<(), String> {
    targets.iter().try_for_each(|target| suits_gpu(candidate, target))?;
    let recipe = Recipe::load(candidate.recipe.unwrap_or_default()).map_err(|error| error.to_string())?;
    // Stands for the calibration text, which is not tokenized for a question of shapes.
    let calibration = Some(CalibrationSet::new("", vec![vec![0, 0]]));
    let options = Options { container: Some(container), calibration, threads: 1, ..Options::default() };
    let plan = Plan::new(source, recipe, options).map_err(|error| error.to_string())?;
    let stored = plan.linear_stored_bits_per_weight();
    if container.is_one_file() && stored > f64::from(candidate.nominal) + SURPLUS {
        return Err(too_wide(stored));
    }
    let subject = subject::of_plan(&plan, source);
    for target in targets {
        if let Some(finding) = lint(&subject, target).findings.iter().find(|f| f.severity.fails()) {
            return Err(format!("{target}: {} [{}]", finding.requires, finding.rule));
        }
    }
    Ok(())
}

/// Makes the error if no candidate fits.
fn none(search: &Search<'_>, bits: u32, engines: &str, skipped: &[Skipped]) -> JobError {
    let held = search.format.map_or_else(String::new, |format| format!(" in format {}", format.name()));
    let reason = |skipped: &Skipped| format!("{} in {}: {}", skipped.recipe, skipped.format, skipped.why);
    // That a GPU is not named says little about the model.
    let (named, unnamed): (Vec<_>, Vec<_>) =
        skipped.iter().partition(|skipped| !skipped.why.contains("gpu="));
    let reasons: Vec<_> = named.into_iter().chain(unnamed).take(2).map(reason).collect();
    let why = if reasons.is_empty() { "none is measured".to_owned() } else { reasons.join("; ") };
    let others: Vec<_> =
        (2..=8).filter(|&other| other != bits && search.has(other)).map(|other| other.to_string()).collect();
    let fix = match (others.is_empty(), unmeasured(search)) {
        (false, _) => format!("--bits {}", others.join(" or ")),
        (true, Some((recipe, container))) => format!("--recipe {recipe} --format {}", container.name()),
        (true, None) => "another engine with --for, or a smaller group size with --recipe".to_owned(),
    };
    let found = format!("none{held} ({why}); fix: {fix}");
    BadInput::new("--for", found, format!("a measured {bits}-bit recipe that loads in {engines}")).into()
}

/// Returns the first recipe of [`UNMEASURED`] with a format that holds it for this model and loads in every target.
fn unmeasured(search: &Search<'_>) -> Option<(&'static str, Container)> {
    let formats =
        || Container::all().filter(move |found| search.format.is_none_or(|wanted| wanted == *found));
    let pairs = UNMEASURED.iter().flat_map(|recipe| formats().map(move |container| (*recipe, container)));
    let mut pairs = pairs.filter(|((recipe, bits), container)| {
        let offered = Precision::unmeasured(recipe, container.name(), *bits);
        let usual = search.targets.iter().all(|target| target.engine.is_usual_reader(container.name()));
        usual && fits(&offered, *container, search.source, search.targets).is_ok()
    });
    pairs.next().map(|((recipe, _), container)| (recipe, container))
}

/// Prints what a recipe's short name stands for, and how it differs from a preset of that name elsewhere.
pub fn note_name(recipe: &str, host: &Host) {
    if let Some(full) = spelled_out(recipe) {
        let unlike = unlike_preset(recipe).map_or_else(String::new, |unlike| format!(": {unlike}"));
        host.note(&format!("recipe {recipe} is {full}{unlike}"));
    }
}

/// Prints that the built-in text calibrates, where `given` names no text and `used` has it.
pub fn note_calibration(given: &Calibration, used: &Calibration, host: &Host) {
    if given.is_empty() && used.is_text() {
        host.note("calibration on the built-in text; --calibration TEXT takes one of your domain");
    }
}
