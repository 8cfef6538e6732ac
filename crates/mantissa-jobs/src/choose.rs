//! Chooses a measured recipe for an engine: `quantize MODEL --for ENGINE` without `--recipe`.

pub mod predict;

use mantissa_advise::{remedy, subject};
use mantissa_plan::contract::{EngineTarget, Subject, lint};
use mantissa_plan::figures::PAGE;
use mantissa_plan::offers::{OFFERS, Offer, offer};
use mantissa_quant::calibrate::CalibrationSet;
use mantissa_quant::recipe::spelled_out;
use mantissa_quant::{Options, Plan, QuantError, Recipe};
use mantissa_store::convention::{Container, ModelFiles};
use serde::Serialize;

use crate::error::{BadInput, JobError, Result};
use crate::host::Host;

/// Nominal bits per weight without `--bits`.
pub const BITS: u32 = 4;

/// Largest surplus of stored bits per weight over the nominal bits of a GGUF type. Mixtures of K-types have up to .93
/// (`q2_k`); layers that fall back to wider types have more.
const SURPLUS: f64 = 1.0;

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

/// Chooses the recipe with the least measured KL among those of `bits` that fit `source` and load in every target. With
/// `format`, only recipes in that format. Spare offers count only if no other fits.
///
/// # Errors
/// No offer fits; the first reasons, and the bits at which one does.
pub fn choose(
    source: &ModelFiles,
    targets: &[EngineTarget],
    bits: u32,
    format: Option<Container>,
) -> Result<RecipeChoice> {
    // A source that no recipe can quantize is refused as `--recipe` would refuse it.
    let plain = Plan::new(source, Recipe::load("w8a16")?, Options { threads: 1, ..Options::default() });
    if let Err(error @ QuantError::AlreadyQuantized { .. }) = plain {
        return Err(error.into());
    }
    let (found, skipped) = search(source, targets, bits, format);
    let engines = targets.iter().map(ToString::to_string).collect::<Vec<_>>().join(" and ");
    let Some((offered, container, fitting)) = found else {
        return Err(none(source, targets, bits, format, &engines, &skipped));
    };
    let smaller = if offered.spare { ", in groups of 32, which divide this model's rows" } else { "" };
    let of = match fitting {
        1 => format!("of the measured {bits}-bit recipes only this fits the model and {engines}"),
        n => format!("least KL of the {n} measured {bits}-bit recipes that fit the model and {engines}"),
    };
    let (kl, model) = offered.figure().map_or((f64::NAN, ""), |figure| (figure.kl, figure.model));
    let why = format!("{of}{smaller}: {kl:.5} nats/token on our test model {model} ({PAGE})");
    Ok(RecipeChoice {
        recipe: offered.recipe,
        format: container,
        bits,
        measured_kl: kl,
        model,
        source: PAGE,
        why,
        skipped,
    })
}

/// Returns the bits nearest to [`BITS`] at which an offer loads in `target`, for a model with the layers of `described`
/// whose source is not at hand.
pub fn loading_bits(described: &Subject, target: &EngineTarget) -> Option<u32> {
    let loads = |offered: &&Offer| {
        let container = Container::named(offered.format);
        let recipe = Recipe::load(offered.recipe).ok();
        let pair = recipe.zip(container).filter(|_| target.engine.is_usual_reader(offered.format));
        pair.is_some_and(|(recipe, container)| remedy::accepts(described, &recipe, container, target))
    };
    let bits = OFFERS.iter().filter(loads).map(|offered| offered.bits);
    bits.min_by_key(|bits| (bits.abs_diff(BITS), *bits))
}

/// Best offer with its format and the number of those that fit.
type Found = (&'static Offer, Container, usize);

/// Returns the best offer, and the better ones that do not fit.
fn search(
    source: &ModelFiles,
    targets: &[EngineTarget],
    bits: u32,
    format: Option<Container>,
) -> (Option<Found>, Vec<Skipped>) {
    let mut offers: Vec<_> = OFFERS.iter().filter(|offered| offered.bits == bits).collect();
    offers.sort_by(|a, b| a.spare.cmp(&b.spare).then(a.kl().total_cmp(&b.kl())));
    let (mut best, mut fitting, mut skipped) = (None, 0, Vec::new());
    for offered in offers {
        let Some(container) = Container::named(offered.format) else { continue };
        let usual = || targets.iter().all(|target| target.engine.is_usual_reader(offered.format));
        if !format.map_or_else(usual, |wanted| wanted == container) {
            continue;
        }
        match fits(offered, container, source, targets) {
            Ok(()) if best.is_some_and(|(best, _): (&Offer, _)| offered.spare && !best.spare) => {}
            Ok(()) => {
                fitting += 1;
                best = best.or(Some((offered, container)));
            }
            Err(why) if best.is_none() => {
                // The first layer stands for all.
                let why = why.split("; ").next().unwrap_or_default().to_owned();
                skipped.push(Skipped { recipe: offered.recipe, format: offered.format, why });
            }
            Err(_) => {}
        }
    }
    (best.map(|(offered, container)| (offered, container, fitting)), skipped)
}

/// Checks that the recipe can be stored for this model and loads in every target.
///
/// # Errors
/// The first reason why not.
fn fits(
    offered: &Offer,
    container: Container,
    source: &ModelFiles,
    targets: &[EngineTarget],
) -> Result<(), String> {
    if let Some(least) = offered.least_sm
        && !targets.iter().all(|target| target.gpu.is_some_and(|gpu| gpu.sm >= least))
    {
        return Err(format!(
            "needs a GPU with native FP4, such as gpu=b200 (SM {}.{})",
            least / 10,
            least % 10
        ));
    }
    let recipe = Recipe::load(offered.recipe).map_err(|error| error.to_string())?;
    // Stands for the calibration text, which is not tokenized for a question of shapes.
    let calibration = Some(CalibrationSet::new("", vec![vec![0, 0]]));
    let options = Options { container: Some(container), calibration, threads: 1, ..Options::default() };
    let plan = Plan::new(source, recipe, options).map_err(|error| error.to_string())?;
    let stored = plan.linear_stored_bits_per_weight();
    if container.is_one_file() && stored > f64::from(offered.bits) + SURPLUS {
        return Err(format!("{stored:.2} bits per weight here, because its blocks do not divide the rows"));
    }
    let subject = subject::of_plan(&plan, source);
    for target in targets {
        if let Some(finding) = lint(&subject, target).findings.iter().find(|f| f.severity.fails()) {
            return Err(format!("{target}: {} [{}]", finding.requires, finding.rule));
        }
    }
    Ok(())
}

/// Makes the error if no offer fits.
fn none(
    source: &ModelFiles,
    targets: &[EngineTarget],
    bits: u32,
    format: Option<Container>,
    engines: &str,
    skipped: &[Skipped],
) -> JobError {
    let held = format.map_or_else(String::new, |format| format!(" in format {}", format.name()));
    let reason = |skipped: &Skipped| format!("{} in {}: {}", skipped.recipe, skipped.format, skipped.why);
    // That a GPU is not named says little about the model.
    let (named, unnamed): (Vec<_>, Vec<_>) =
        skipped.iter().partition(|skipped| !skipped.why.contains("gpu="));
    let reasons: Vec<_> = named.into_iter().chain(unnamed).take(2).map(reason).collect();
    let why = if reasons.is_empty() { "none is measured".to_owned() } else { reasons.join("; ") };
    let others: Vec<_> = (2..=8)
        .filter(|&other| other != bits && search(source, targets, other, format).0.is_some())
        .map(|other| other.to_string())
        .collect();
    let fix = match (others.is_empty(), unmeasured(source, targets, format)) {
        (false, _) => format!("--bits {}", others.join(" or ")),
        (true, Some((recipe, container))) => format!("--recipe {recipe} --format {}", container.name()),
        (true, None) => "another engine with --for, or a smaller group size with --recipe".to_owned(),
    };
    let found = format!("none{held} ({why}); fix: {fix}");
    BadInput::new("--for", found, format!("a measured {bits}-bit recipe that loads in {engines}")).into()
}

/// Returns the first recipe of [`UNMEASURED`] with a format that holds it for this model and loads in every target.
fn unmeasured(
    source: &ModelFiles,
    targets: &[EngineTarget],
    format: Option<Container>,
) -> Option<(&'static str, Container)> {
    let formats = || Container::all().filter(move |found| format.is_none_or(|wanted| wanted == *found));
    let pairs = UNMEASURED.iter().flat_map(|recipe| formats().map(move |container| (*recipe, container)));
    let mut pairs = pairs.filter(|((recipe, bits), container)| {
        let offered = offer(recipe, container.name(), *bits);
        let usual = targets.iter().all(|target| target.engine.is_usual_reader(offered.format));
        usual && fits(&offered, *container, source, targets).is_ok()
    });
    pairs.next().map(|((recipe, _), container)| (recipe, container))
}

/// Prints what a recipe's short name stands for.
pub fn note_name(recipe: &str, host: &Host) {
    if let Some(full) = spelled_out(recipe) {
        host.note(&format!("recipe {recipe} is {full}"));
    }
}
