//! Search for the recipe or format with which an engine loads a model.
//!
//! Every candidate is planned and linted, so what is returned passes. Candidates are rounded to nearest or use the
//! method of the refused plan. The nearest in bits per weight comes first, then the kind of codes and the format that the
//! model has, then the order of `FORMATS`.

use mantissa_num::{Affine, Code, Format, Scheme, Source, parse_activation, parse_weight};
use mantissa_plan::contract::{EngineTarget, Input, Linear, Stored, Subject, lint};
use mantissa_quant::recipe::Glob;
use mantissa_quant::{Changes, Options, Plan, Recipe};
use mantissa_store::Dtype;
use mantissa_store::convention::{Container, ModelFiles, native};

use crate::subject;

/// Change that makes an engine load a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Remedy {
    /// Same codes in another format.
    Convert {
        /// Name of the format.
        format: &'static str,
    },
    /// Source quantized again, by the recipe that is chosen for the engine.
    FromSource,
    /// Weights of the quantized model rounded a second time, to another scheme.
    Requantize {
        /// Name of the scheme.
        scheme: String,
        /// Name of the format.
        format: &'static str,
    },
    /// Source quantized by another recipe.
    Quantize {
        /// Name of the recipe.
        recipe: String,
        /// Name of the format.
        format: &'static str,
        /// True if this is the format that the recipe has by default.
        default: bool,
    },
    /// More layers left unquantized: those that run fused with unquantized ones.
    Keep {
        /// Patterns of their modules.
        patterns: Vec<String>,
    },
    /// Fewer GPUs.
    Parallelism {
        /// Number of GPUs.
        tp: usize,
    },
}

/// Formats to try, the most widely read first.
const FORMATS: [&str; 8] =
    ["compressed-tensors", "gptq", "awq", "modelopt", "bitsandbytes", "deepseek-fp8", "gguf", "mlx"];

/// Schemes to try: weights and inputs.
const SCHEMES: [(&str, &str); 27] = [
    ("int4-g128", ""),
    ("int4-g64", ""),
    ("int4-g32", ""),
    ("int4-channel", ""),
    ("int4-g128-asym", ""),
    ("int4-g64-asym", ""),
    ("int4-g32-asym", ""),
    ("int4-g64-asym:minmax", ""),
    ("int4-g32-asym:minmax", ""),
    ("int3-g64-asym:minmax", ""),
    ("int2-g64-asym:minmax", ""),
    ("nvfp4", ""),
    ("nvfp4", "nvfp4"),
    ("mxfp4", ""),
    ("nf4", ""),
    ("q4_0", ""),
    ("q8_0", ""),
    ("q4_k", ""),
    ("int8-channel", ""),
    ("int8-g32", ""),
    ("int8-channel", "int8-token"),
    ("int8-g64-asym:minmax", ""),
    ("int8-g32-asym:minmax", ""),
    ("fp8-e4m3-channel", ""),
    ("fp8-e4m3-channel", "fp8-e4m3-token"),
    ("fp8-e4m3-t128x128", "fp8-e4m3-g128"),
    ("mxfp8-e4m3", "mxfp8-e4m3:rceil"),
];

/// Rows and columns of the weight in which bits are compared.
const SIDE: usize = 4096;

/// Candidate with its distance from the refused model.
struct RecipeCandidate {
    weights: Scheme,
    inputs: Option<Scheme>,
    /// Recipe without its method.
    name: String,
    format: &'static str,
    container: Container,
    /// Bits per weight too many or too few, in thousandths.
    distance: u64,
}

/// Model to repair, and what counts as repaired.
struct Search<'a> {
    described: &'a Subject,
    target: EngineTarget,
    /// True if warnings are to be fixed as well.
    strict: bool,
}

/// Finds what makes `target` accept the plan of `source`, with its method where that can be kept. With `strict`,
/// warnings count as well.
pub fn of_plan(plan: &Plan, source: &ModelFiles, target: &EngineTarget, strict: bool) -> Option<Remedy> {
    let described = subject::of_plan(plan, source);
    let search = Search { described: &described, target: *target, strict };
    let method = plan.job.recipe().map_or_else(|| "rtn".to_owned(), Recipe::method_name);
    let kv = plan.kv.as_ref().map_or_else(String::new, |kv| format!("+kv-{kv}"));
    let tried = |candidate: &RecipeCandidate| {
        [method.as_str(), "rtn"].into_iter().find_map(|method| {
            let recipe = Recipe::load(&format!("{method}-{}{kv}", candidate.name)).ok()?;
            let (label, default) = (recipe.name.clone(), recipe.container() == candidate.container);
            let planned = plan.with_recipe(source, recipe, candidate.container).ok()?;
            let taken = search.passes(&subject::of_plan(&planned, source));
            taken.then_some(Remedy::Quantize { recipe: label, format: candidate.format, default })
        })
    };
    let kept = || search.kept_together(&described);
    kept().or_else(|| search.fewer_gpus()).or_else(|| search.candidates().iter().find_map(tried))
}

/// Finds what makes `target` accept a quantization of `source` like that by `recipe`, which its format cannot hold.
pub fn of_recipe(
    source: &ModelFiles,
    recipe: Recipe,
    options: Options,
    target: &EngineTarget,
) -> Option<Remedy> {
    // mantissa's own format holds what others do not.
    let options = Options { container: Some(native::CONTAINER), ..options };
    of_plan(&Plan::new(source, recipe, options).ok()?, source, target, false)
}

/// Finds what makes `target` accept the artifact in `files`, described by `described`: another format of the same
/// codes, or another recipe of its `source`. If the source is not known: weights of 8 bits are rounded again; narrower
/// ones would lose too much, so that the source is to be quantized again. With `strict`, warnings count as well, and
/// nothing is rounded twice for one.
pub fn of_artifact(
    files: &ModelFiles,
    described: &Subject,
    target: &EngineTarget,
    source: Option<&ModelFiles>,
    strict: bool,
) -> Option<Remedy> {
    let search = Search { described, target: *target, strict };
    let converted = |format: &&'static str| {
        let container = Container::named(format).filter(|_| **format != *described.convention)?;
        let same = Subject { convention: (*format).to_owned(), ..described.clone() };
        let worth_planning = search.passes(&same);
        let plan = worth_planning
            .then(|| Plan::conversion(files, container, Changes::default(), Options::default()));
        let plan = plan?.ok()?;
        search.passes(&subject::of_plan(&plan, files)).then_some(Remedy::Convert { format })
    };
    let lossless = || search.fewer_gpus().or_else(|| FORMATS.iter().find_map(converted));
    let lossy = || {
        let candidates = search.candidates();
        match source {
            Some(source) => candidates.iter().find_map(|one| search.quantized(one, source)),
            None if strict => None,
            None if is_wide(described) => candidates.iter().find_map(|one| search.requantized(one, files)),
            None => (!candidates.is_empty()).then_some(Remedy::FromSource),
        }
    };
    lossless().or_else(lossy)
}

/// True if `target` accepts the layers of `described` under `recipe`, in the format `container`. Whether the format can
/// hold them is decided by a plan.
pub fn accepts(described: &Subject, recipe: &Recipe, container: Container, target: &EngineTarget) -> bool {
    let candidate = RecipeCandidate {
        weights: recipe.weights.clone(),
        inputs: recipe.activations.clone(),
        name: recipe.name.clone(),
        format: container.name(),
        container,
        distance: 0,
    };
    Search { described, target: *target, strict: false }.passes(&candidate.applied(described))
}

/// Patterns that are still worth typing.
const PATTERNS: usize = 6;

/// Returns the shortest patterns that match `modules` and no other quantized layer of `described`; `None` if these are too
/// many.
fn patterns(modules: &[String], described: &Subject) -> Option<Vec<String>> {
    let quantized = || described.linears.iter().filter(|linear| linear.stored.is_some());
    let only = |pattern: &String| {
        let pattern = Glob::parse(pattern);
        pattern.is_ok_and(|glob| {
            quantized().all(|linear| !glob.matches(&linear.module) || modules.contains(&linear.module))
        })
    };
    let mut found: Vec<String> = Vec::new();
    for module in modules {
        let covered = found.iter().filter_map(|known| Glob::parse(known).ok());
        if covered.into_iter().any(|glob| glob.matches(module)) {
            continue;
        }
        let (parent, name) = module.rsplit_once('.').unwrap_or(("", module));
        let numbered = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
        // The number of an expert is no name of a block.
        let block = parent.rsplit('.').find(|part| !numbered(part)).unwrap_or_default();
        let between = if parent.ends_with(block) { "." } else { ".*." };
        let starred: Vec<&str> =
            module.split('.').map(|part| if numbered(part) { "*" } else { part }).collect();
        let candidates = [format!("*{block}{between}{name}"), starred.join("."), module.clone()];
        found.extend(candidates.into_iter().find(only));
    }
    (found.len() <= PATTERNS).then_some(found)
}

/// True if codes are floats, such as FP8.
fn has_floats(format: &Format) -> bool {
    matches!(format, Format::Affine(Affine { code: Code::Float(_), .. }))
}

/// True if the weights are quantized, to 8 bits or more.
fn is_wide(described: &Subject) -> bool {
    let mut stored = described.linears.iter().filter_map(|linear| linear.stored.as_ref()).peekable();
    stored.peek().is_some() && stored.all(|stored| stored.format.code_bits() >= 8)
}

impl Search<'_> {
    /// True if a model would load and compute correctly.
    fn passes(&self, described: &Subject) -> bool {
        self.passes_on(described, &self.target)
    }

    fn passes_on(&self, described: &Subject, target: &EngineTarget) -> bool {
        let bare =
            Subject { planned: true, examined: Vec::new(), observations: Vec::new(), ..described.clone() };
        let report = lint(&bare, target);
        !report.fails() && (!self.strict || report.findings.is_empty())
    }

    /// Leaves layers of `described` unquantized that run fused with unquantized ones, if that is all that is wrong.
    fn kept_together(&self, described: &Subject) -> Option<Remedy> {
        let partners: Vec<String> =
            described.fused_with_unquantized().into_iter().map(str::to_owned).collect();
        if partners.is_empty() {
            return None;
        }
        let mut kept = described.clone();
        for linear in kept.linears.iter_mut().filter(|linear| partners.contains(&linear.module)) {
            linear.stored = None;
        }
        let some_left = kept.linears.iter().any(|linear| linear.stored.is_some());
        let passes = some_left && self.passes(&kept);
        passes.then(|| patterns(&partners, described)).flatten().map(|patterns| Remedy::Keep { patterns })
    }

    /// Returns the largest smaller number of GPUs that is accepted, if that is all that is wrong.
    fn fewer_gpus(&self) -> Option<Remedy> {
        let tps = (1..self.target.tp).rev();
        let accepted = |tp: &usize| self.passes_on(self.described, &EngineTarget { tp: *tp, ..self.target });
        tps.into_iter().find(accepted).map(|tp| Remedy::Parallelism { tp })
    }

    /// Plans the quantization of `source` as `candidate`.
    fn quantized(&self, candidate: &RecipeCandidate, source: &ModelFiles) -> Option<Remedy> {
        let recipe = Recipe::load(&format!("rtn-{}", candidate.name)).ok()?;
        let (label, default) = (recipe.name.clone(), recipe.container() == candidate.container);
        let options = Options { container: Some(candidate.container), ..Options::default() };
        let plan = Plan::new(source, recipe, options).ok()?;
        let taken = self.passes(&subject::of_plan(&plan, source));
        taken.then_some(Remedy::Quantize { recipe: label, format: candidate.format, default })
    }

    /// Plans the requantization of the artifact as `candidate`.
    fn requantized(&self, candidate: &RecipeCandidate, files: &ModelFiles) -> Option<Remedy> {
        let changes = Changes { requantize: Some(&candidate.weights), drop_inputs: false };
        let worth_planning = candidate.inputs.is_none();
        let plan =
            worth_planning.then(|| Plan::conversion(files, candidate.container, changes, Options::default()));
        let plan = plan?.ok()?;
        let taken = self.passes(&subject::of_plan(&plan, files));
        let scheme = candidate.weights.to_string();
        taken.then_some(Remedy::Requantize { scheme, format: candidate.format })
    }

    /// Returns the candidates that keep the rules on the layers of the model, the nearest first.
    fn candidates(&self) -> Vec<RecipeCandidate> {
        let thousandths = |format: &Format| (format.bits_per_weight(SIDE, SIDE) * 1000.0) as u64;
        let stored = self.described.linears.iter().find_map(|linear| linear.stored.as_ref());
        let asked = stored.map_or(4000, |stored| thousandths(&stored.format));
        let inputs = stored.is_some_and(|stored| stored.input.is_some());
        let floats = stored.is_some_and(|stored| has_floats(&stored.format));
        let mut all = Vec::new();
        for (weights, input) in SCHEMES {
            for format in FORMATS {
                let candidate = RecipeCandidate::new(weights, input, format);
                all.extend(candidate.filter(|candidate| self.passes(&candidate.applied(self.described))));
            }
        }
        all.iter_mut().for_each(|c| c.distance = thousandths(&c.weights.format).abs_diff(asked));
        // Stable: equal candidates keep the order of SCHEMES and FORMATS.
        all.sort_by_key(|c| {
            let moved = c.format != self.described.convention;
            let other_codes = has_floats(&c.weights.format) != floats;
            (c.distance / 250, other_codes, c.inputs.is_some() != inputs, moved, c.distance)
        });
        all
    }
}

impl RecipeCandidate {
    fn new(weights: &str, inputs: &str, format: &'static str) -> Option<Self> {
        let scheme = parse_weight(weights).ok()?;
        let container = Container::named(format)?;
        let (input, name) = match inputs {
            "" => (None, weights.to_owned()),
            _ => (Some(parse_activation(inputs).ok()?), format!("{weights}+{inputs}")),
        };
        Some(RecipeCandidate { weights: scheme, inputs: input, name, format, container, distance: 0 })
    }

    /// Describes the layers of `described` under this candidate. Whether the format can hold them is decided by the
    /// plan.
    fn applied(&self, described: &Subject) -> Subject {
        let input = self.inputs.as_ref().map(|scheme| Input {
            format: scheme.format.clone(),
            is_static: scheme.source == Source::Static,
            scale: None,
        });
        let scheme = self.container.as_stored(self.weights.clone(), Dtype::BF16);
        let stored =
            Stored { format: scheme.format, outer: None, input, act_order: false, multiplied: false };
        let mut applied = Subject { convention: self.format.to_owned(), ..described.clone() };
        // Layers that run fused are quantized together.
        let partners: Vec<String> = described.fused_with_quantized().into_iter().map(str::to_owned).collect();
        let quantized = |linear: &&mut Linear| linear.stored.is_some() || partners.contains(&linear.module);
        for linear in applied.linears.iter_mut().filter(quantized) {
            linear.stored = Some(stored.clone());
        }
        applied
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn every_candidate_is_a_recipe_in_some_format() {
        for (weights, inputs) in SCHEMES {
            assert!(parse_weight(weights).is_ok(), "{weights}");
            assert!(inputs.is_empty() || parse_activation(inputs).is_ok(), "{inputs}");
        }
        assert!(FORMATS.iter().all(|format| Container::named(format).is_some()));
    }
}
