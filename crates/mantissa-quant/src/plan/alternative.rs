//! Fixes of plans that a format cannot hold: options under which the same model was planned too, so that the command
//! works with them.

use mantissa_model::ModelConfig;
use mantissa_num::{Blocks, Scheme, parse_weight};
use mantissa_store::Dtype;
use mantissa_store::convention::{Container, LinearPlan, ModelFiles, gguf, native};

use super::Options;
use crate::calibrate::CalibrationSet;
use crate::recipe::Recipe;

/// Group sizes to try, largest first.
const GROUPS: [u32; 4] = [128, 64, 32, 16];

/// llama.cpp's file types to try for codes of up to so many bits.
const FILE_TYPES: [(u32, &str); 6] =
    [(2, "q2_k"), (3, "q3_k_m"), (4, "q4_k_m"), (5, "q5_k_m"), (6, "q6_k"), (32, "q8_0")];

/// Schemes to requantize to, for codes of at most four bits and of more.
const NARROW: [&str; 7] = ["q4_0", "int4-g128", "int4-g64", "int4-g32", "nvfp4", "mxfp4", "nf4"];
const WIDE: [&str; 5] = ["q8_0", "int8-channel", "int8-g32", "fp8-e4m3-channel", "fp8-e4m3-t128x128"];

/// Changed options of a command, with the arguments of its plan.
struct Change {
    text: String,
    recipe: Recipe,
    container: Option<Container>,
}

/// Returns options that make a plan of `source`, as `works` says: a smaller group size, a block type of llama.cpp for GGUF, or
/// another format, in this order; with a calibration text if the recipe needs one and none is given. `None` if there
/// are none.
pub(crate) fn options(
    source: &ModelFiles,
    recipe: &Recipe,
    options: &Options,
    works: impl Fn(Recipe, Options) -> bool,
) -> Option<String> {
    let container = options.container.unwrap_or_else(|| recipe.container());
    let groups = GROUPS.into_iter().filter_map(|group| {
        let (text, recipe) = with_group(recipe, group)?;
        Some(Change { text, recipe, container: options.container })
    });
    let types = file_type(recipe).filter(|_| container == gguf::CONTAINER).map(|(text, recipe)| Change {
        text,
        recipe,
        container: Some(container),
    });
    let others = formats(recipe).into_iter().filter(|other| *other != container);
    let others = others.map(|other| Change {
        text: format!("--format {}", other.name()),
        recipe: recipe.clone(),
        container: Some(other),
    });
    let uncalibrated = |Change { recipe, container, .. }: &Change| {
        let container = container.unwrap_or_else(|| recipe.container());
        recipe.needs_calibration_in(container) && options.calibration.is_none()
    };
    let makes = |change: &Change| {
        let mut options = Options { container: change.container, ..options.clone() };
        if uncalibrated(change) {
            // Stands for the text, which is not tokenized for a question of shapes.
            options.calibration = Some(CalibrationSet::new("", vec![vec![0, 0]]));
        }
        works(change.recipe.clone(), options)
    };
    let found = groups.chain(types).chain(others).find(makes)?;
    let text = if uncalibrated(&found) { calibration(source) } else { "" };
    Some(found.text + text)
}

/// Returns the option for a calibration text that `source` can read.
fn calibration(source: &ModelFiles) -> &'static str {
    match source.gguf().is_some() || source.dir().join("tokenizer.json").is_file() {
        true => " --calibration default",
        false => " --calibration-tokens FILE.json",
    }
}

/// Returns a recipe with a smaller group size, and the option that selects it.
fn with_group(recipe: &Recipe, group: u32) -> Option<(String, Recipe)> {
    let Blocks::Group(old) = recipe.weights.format.blocks() else { return None };
    let (old_suffix, new_suffix) = (format!("-g{old}"), format!("-g{group}"));
    let scheme = recipe.weights.to_string();
    if old <= group || !scheme.contains(&old_suffix) {
        return None;
    }
    let scheme = scheme.replace(&old_suffix, &new_suffix);
    if Recipe::is_file(&recipe.name) {
        let weights = parse_weight(&scheme).ok()?;
        return Some((
            format!("weights = \"{scheme}\" in {}", recipe.name),
            Recipe { weights, ..recipe.clone() },
        ));
    }
    // An alias without the group size in its name is spelled out.
    let name = match recipe.name.contains(&old_suffix) {
        true => recipe.name.replace(&old_suffix, &new_suffix),
        false => full_name(recipe, recipe.method.recipe_name(), &scheme),
    };
    let changed = Recipe::load(&name).ok()?;
    Some((format!("--recipe {name}"), changed))
}

/// Spells out the name of a recipe with another method and the scheme `weights`.
pub(crate) fn full_name(recipe: &Recipe, method: &str, weights: &str) -> String {
    let transform = recipe.transform.as_ref().map_or_else(String::new, |own| format!("{}-", own.name()));
    let input = recipe.activations.as_ref().map_or_else(String::new, |input| format!("+{input}"));
    let kv = recipe.kv.as_ref().map_or_else(String::new, |kv| format!("+kv-{kv}"));
    format!("{transform}{method}-{weights}{input}{kv}")
}

/// Returns llama.cpp's file type of as many bits, and the option that selects it.
fn file_type(recipe: &Recipe) -> Option<(String, Recipe)> {
    let bits = recipe.weights.format.code_bits();
    let (_, name) = FILE_TYPES.into_iter().find(|(most, _)| bits <= *most)?;
    Some((format!("--recipe {name}"), Recipe::load(name).ok()?))
}

/// Returns every writable format: the recipe's default first, mantissa's own last.
fn formats(recipe: &Recipe) -> Vec<Container> {
    let mut all = vec![recipe.container()];
    all.extend(Container::all());
    all.sort_by_key(|container| *container == native::CONTAINER);
    all
}

/// Returns a scheme that `container` holds for every layer of the model, about as wide as the source's codes.
pub(crate) fn scheme(
    source: &ModelFiles,
    config: &ModelConfig,
    container: Container,
    dtype: Dtype,
) -> Option<String> {
    let linears: Vec<_> = config.decoder_linears().collect();
    let weights: u64 = linears.iter().map(|info| (info.rows * info.cols) as u64).sum();
    // Other tensors count too, so this is an upper bound; a dense source asks for four bits.
    let bits = source.checkpoint().total_bytes().saturating_mul(8) / weights.max(1);
    let narrow = !(7..12).contains(&bits);
    let own = container == native::CONTAINER;
    let holds = |name: &&&str| {
        // mantissa's own format holds block types too, which no other engine reads there.
        if own && name.starts_with('q') {
            return false;
        }
        let Ok(scheme) = name.parse::<Scheme>() else { return false };
        let scheme = container.as_stored(scheme, dtype);
        linears.iter().all(|info| {
            let plan = LinearPlan::new(&info.module, &scheme, None, (info.rows, info.cols));
            container.specs(&plan).is_ok()
        })
    };
    let (first, then) = if narrow { (&NARROW[..], &WIDE[..]) } else { (&WIDE[..], &NARROW[..]) };
    first.iter().chain(then).find(holds).map(|name| (*name).to_owned())
}
