//! Candidate recipes of a fit, in families whose methods one output can mix.

use mantissa_num::{ParseError, Scheme};
use mantissa_quant::allocate::Allocation;
use mantissa_quant::{Plan, QuantError, Recipe};
use mantissa_store::convention::{Container, ModelFiles};

use super::family::{Family, Uniform};
use super::scheme::{CandidateScheme, GROUPS};
use super::{Fit, PLAIN_CACHE, RECIPE};
use crate::error::{BadInput, Class, JobError, Result};
use crate::names::AsText;

/// Plans a recipe of the command's options.
pub(super) type Planned<'a> = dyn Fn(Recipe) -> Result<Plan> + 'a;

/// Candidates of a fit.
pub(super) struct Candidates {
    /// Families; each output takes its layers from one.
    pub(super) families: Vec<Family>,
    /// Warnings on recipes that the method or format refuses.
    pub(super) left_out: Vec<String>,
    /// Reasons why methods are not mixed.
    pub(super) apart: Vec<String>,
}

/// Plans every candidate, and joins the methods that one output can mix.
///
/// # Errors
/// No candidate that can be planned; with one method, any that cannot.
pub(super) fn candidates(job: &Fit, source: &ModelFiles, plan: &Planned<'_>) -> Result<Candidates> {
    let (families, left_out) = by_method(job, source, plan)?;
    let mut apart = Vec::new();
    if families.len() < 2 {
        return Ok(Candidates { families, left_out, apart });
    }
    let (mut free, mut alone): (Vec<Family>, Vec<Family>) = (Vec::new(), Vec::new());
    for family in families {
        let learner = free.iter().find(|other| other.learns_layers()).filter(|_| family.learns_layers());
        let second = learner.map(|first| format!("it learns decoder layers, as {} does", first.label()));
        match family.plans[0].recipe().and_then(Recipe::stands_apart).or(second) {
            Some(why) => {
                apart.push(format!("{} is not mixed with other methods: {why}", family.label()));
                alone.push(family);
            }
            None => free.push(family),
        }
    }
    let mixed = if free.len() > 1 { mix(job, &free, plan)? } else { Ok(free.pop().into_iter().collect()) };
    let mut families = mixed.unwrap_or_else(|why| {
        let names: Vec<String> = free.iter().map(Family::label).collect();
        apart.push(format!("{} are not mixed: {why}", names.join(", ")));
        free
    });
    families.extend(alone);
    Ok(Candidates { families, left_out, apart })
}

/// Joins families to one whose units choose among all their recipes, in a format that holds any choice. Returns the
/// reason in place of it if the format holds none.
///
/// # Errors
/// I/O.
fn mix(
    job: &Fit,
    families: &[Family],
    plan: &Planned<'_>,
) -> Result<std::result::Result<Vec<Family>, String>> {
    let modules = |family: &Family| -> Vec<String> {
        family.units.iter().flat_map(|unit| &unit.linears).map(|linear| linear.module.clone()).collect()
    };
    if let Some(other) = families.iter().find(|other| modules(other) != modules(&families[0])) {
        let (first, other) = (families[0].label(), other.label());
        return Ok(Err(format!("{first} and {other} quantize different layers in this format")));
    }
    let methods = families.iter().flat_map(|family| family.methods.clone()).collect();
    let mut plans: Vec<Uniform> = families.iter().flat_map(|family| family.plans.clone()).collect();
    let units = &families[0].units;
    let taken = |from: usize| units.iter().map(|unit| (from + unit.layer) % plans.len()).collect::<Vec<_>>();
    // Every recipe is tried beside others, each for whole decoder layers.
    let layers = units.last().map_or(1, |unit| unit.layer + 1);
    let starts = (0..plans.len()).step_by(layers);
    let texts: Vec<Vec<usize>> = starts.map(taken).collect();
    let refused = |error: JobError| match error.class() {
        Class::Input => Ok(Err(error.to_string())),
        _ => Err(error),
    };
    let format = match job.format_asked() {
        Some(format) => format,
        None => {
            let all = Recipe::from_toml(RECIPE, &all_text(&plans))?;
            all.container()
        }
    };
    for uniform in plans.iter_mut().filter(|uniform| uniform.plan.container != format) {
        let recipe = uniform.recipe().cloned();
        let Some(recipe) = recipe else { continue };
        match plan(Recipe { container: Some(format), ..recipe }) {
            Ok(made) => uniform.plan = made,
            Err(error) => return refused(error),
        }
    }
    let mut family = Family::new(methods, plans);
    for choices in texts {
        let found = Allocation { choices, cost: 0.0, size: 0, bound: 0.0 };
        let text = recipe_text(&family, job.format_asked(), &found);
        match Recipe::from_toml(RECIPE, &text).map_err(JobError::from).and_then(plan) {
            Ok(made) => family.probes.push(made),
            Err(error) => return refused(error),
        }
    }
    Ok(Ok(vec![family]))
}

/// Plans the candidates of each method; returns a warning for each that the method or format refuses, if others are left.
fn by_method(job: &Fit, source: &ModelFiles, plan: &Planned<'_>) -> Result<(Vec<Family>, Vec<String>)> {
    let (mut families, mut left_out, mut first) = (Vec::new(), Vec::new(), None);
    for method in &job.methods {
        let schemes = schemes(job, method, source)?;
        let mut plans = Vec::with_capacity(schemes.len());
        for scheme in &schemes {
            let name = format!("{method}-{scheme}");
            let made = Recipe::load(&name).map_err(JobError::from).and_then(plan);
            match made {
                Ok(plan) => plans.push(Uniform { method: method.clone(), plan }),
                Err(error) if error.class() != Class::Input => return Err(error),
                Err(error) => {
                    let error = match error {
                        JobError::Quant(error) => with_schemes(*error, method, &schemes).into(),
                        error => error,
                    };
                    left_out.push(format!("{name}: left out: {error}"));
                    first = first.or(Some(error));
                }
            }
        }
        if !plans.is_empty() {
            families.push(Family::new(vec![method.clone()], plans));
        }
    }
    match first {
        // With one method every scheme is meant.
        Some(error) if job.methods.len() == 1 || families.is_empty() => Err(error),
        _ => Ok((families, left_out)),
    }
}

/// Turns a recipe that an error proposes into the candidate schemes with its group size.
fn with_schemes(error: QuantError, method: &str, schemes: &[Scheme]) -> QuantError {
    let is_group = |part: &str| part.strip_prefix('g').is_some_and(|n| n.parse::<u32>().is_ok());
    match error {
        QuantError::NotStorable { what, container, list, fix: Some(fix) } => {
            let named = fix.strip_prefix(&format!("--recipe {}-", method)).map(str::to_owned);
            let group =
                named.and_then(|scheme| scheme.split('-').find(|part| is_group(part)).map(str::to_owned));
            let fix = group.map_or(fix, |group| {
                let regrouped = |scheme: &Scheme| {
                    let scheme = scheme.to_string();
                    let parts =
                        scheme.split('-').map(|part| if is_group(part) { group.as_str() } else { part });
                    parts.collect::<Vec<_>>().join("-")
                };
                format!("--schemes {}", schemes.iter().map(regrouped).collect::<Vec<_>>().join(","))
            });
            QuantError::NotStorable { what, container, list, fix: Some(fix) }
        }
        error => error,
    }
}

/// Default schemes of a method that writes trellises only.
const TRELLIS: [&str; 3] = ["trellis2", "trellis3", "trellis4"];

/// Returns the requested schemes, or integers with a group size that divides every row.
fn schemes(job: &Fit, method: &str, source: &ModelFiles) -> Result<Vec<Scheme>> {
    if !job.schemes.is_empty() {
        let group = default_group(source)?;
        let whole =
            |scheme: &AsText<CandidateScheme>| scheme.with_group(group).map_err(|error| misnamed(&error));
        return job.schemes.iter().map(whole).collect();
    }
    let probe = |scheme: &str| Recipe::load(&format!("{method}-{scheme}")).is_ok();
    if !probe("int4-g128") && probe(TRELLIS[0]) {
        return TRELLIS.iter().map(|scheme| parsed(scheme)).collect();
    }
    let group = default_group(source)?;
    [3, 4, 6, 8].into_iter().map(|bits| parsed(&format!("int{bits}-g{group}"))).collect()
}

/// Returns the group of schemes that name none: one that divides every row.
fn default_group(source: &ModelFiles) -> Result<usize> {
    let config = mantissa_model::load_config(source)?;
    let [first, other] = GROUPS;
    Ok(if config.decoder_linears().all(|info| info.cols.is_multiple_of(first)) { first } else { other })
}

/// Says which groups the schemes have that are named without one.
///
/// # Errors
/// A configuration that cannot be read.
pub(super) fn groups_taken(job: &Fit, source: &ModelFiles) -> Result<Option<String>> {
    let taken: Vec<String> =
        job.schemes.iter().filter(|scheme| scheme.takes_group()).map(|scheme| scheme.0.to_string()).collect();
    if taken.is_empty() {
        return Ok(None);
    }
    let group = default_group(source)?;
    Ok(Some(format!("--schemes {}: with the default groups of this model, g{group}", taken.join(","))))
}

/// Parses one of the default schemes.
fn parsed(scheme: &str) -> Result<Scheme> {
    scheme.parse().map_err(|error| misnamed(&error))
}

fn misnamed(error: &ParseError) -> JobError {
    BadInput::new("--schemes", error.to_string(), "a scheme").into()
}

/// Returns a recipe with every candidate, for no module: its format holds all of them.
fn all_text(plans: &[Uniform]) -> String {
    let rule = |uniform: &Uniform| format!("\n[[layers]]\nmodules = []\n{}", method_and_scheme(uniform));
    method_and_scheme(&plans[0]) + &plans[1..].iter().map(rule).collect::<String>()
}

/// Returns the keys of a candidate.
fn method_and_scheme(uniform: &Uniform) -> String {
    format!("method = \"{}\"\nweights = \"{}\"\n", uniform.recipe_method(), uniform.plan.weights)
}

/// Returns the TOML recipe of what `found` chose: the most frequent candidate as default, the others as exceptions.
pub(super) fn recipe_text(family: &Family, format: Option<Container>, found: &Allocation) -> String {
    let (plans, units) = (&family.plans, &family.units);
    let taken = |at: usize| units.iter().zip(&found.choices).filter(move |(_, choice)| **choice == at);
    let count = |at: usize| taken(at).map(|(unit, _)| unit.linears.len()).sum::<usize>();
    let most = (0..plans.len()).max_by_key(|&at| count(at)).unwrap_or(0);
    let default = plans[most].recipe_method();
    let kv = family.kv_chosen(found).map(|kv| kv.scheme.as_str()).filter(|kv| *kv != PLAIN_CACHE);
    let mut head = method_and_scheme(&plans[most]);
    if let Some(transform) = plans[most].recipe().and_then(|recipe| recipe.transform.as_ref()) {
        head += &format!("transform = \"{}\"\n", transform.name());
    }
    let kv = kv.map_or_else(String::new, |kv| format!("kv = \"{kv}\"\n"));
    let mut rules = String::new();
    for at in (0..plans.len()).filter(|&at| at != most && count(at) > 0) {
        let modules: Vec<String> = taken(at)
            .flat_map(|(unit, _)| &unit.linears)
            .map(|l| format!("    \"{}\",\n", l.module))
            .collect();
        let method = plans[at].recipe_method();
        let method = if method == default { String::new() } else { format!("method = \"{method}\"\n") };
        let weights = &plans[at].plan.weights;
        rules +=
            &format!("\n[[layers]]\nmodules = [\n{}]\n{method}weights = \"{weights}\"\n", modules.concat());
    }
    // A choice of few candidates may be of another default format than the bits that were counted.
    let counted = plans[most].plan.container;
    let own = || Recipe::from_toml(RECIPE, &format!("{head}{kv}{rules}")).map(|recipe| recipe.container());
    let differs = family.methods.len() > 1 && own().is_ok_and(|own| own != counted);
    let format = format.or(Some(counted).filter(|_| differs));
    let format = format.map_or_else(String::new, |format| format!("format = \"{}\"\n", format.name()));
    head + &format + &kv + &rules
}
