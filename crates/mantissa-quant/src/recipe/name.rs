//! Recipe names: `[TRANSFORM-][METHOD-]SCHEME[+ACTIVATION][+kv-SCHEME][+e2e]`, and aliases of common ones.

use std::borrow::Cow;
use std::sync::Arc;

use mantissa_methods::e2e::{self, EndToEnd};
use mantissa_methods::registry::{self, METHODS, TRANSFORMS};
use mantissa_methods::rtn::{self, method::Rtn};
use mantissa_methods::{Method, Transform};
use mantissa_model::KvScheme;
use mantissa_num::{Scheme, nearest_list, parse_activation, parse_weight};
use mantissa_store::FileDigest;
use mantissa_store::convention::gguf;

use super::kinds::levels_of;
use super::{FILE_TYPES, FileType, Recipe, RecipeError, RecipeOptions};

/// Aliases with the full names of their recipes.
pub const ALIASES: [(&str, &str); 43] = [
    ("rtn-int4-g128", "rtn-int4-g128"),
    ("hqq-int4-g64", "hqq-int4-g64"),
    ("gptq-int4-g128", "gptq-int4-g128"),
    ("gptq-nvfp4", "gptq-nvfp4"),
    ("gptaq-int4-g128", "gptaq-int4-g128"),
    ("awq-int4-g128-asym", "awq-int4-g128-asym"),
    ("autoround-int4-g128", "autoround-int4-g128"),
    ("autoround-nvfp4", "autoround-nvfp4"),
    ("gptaq-nvfp4", "gptaq-nvfp4"),
    ("scalesweep-gptaq-nvfp4", "scalesweep-gptaq-nvfp4"),
    ("brecq-int4-g128", "brecq-int4-g128"),
    ("efficientqat-int2-g32", "block-ap-int2-g32+e2e"),
    ("spqr-int3-g16", "spqr-int3-g16"),
    ("qtip-trellis2", "qtip-trellis2"),
    ("qtip-trellis3", "qtip-trellis3"),
    ("qtip-trellis4", "qtip-trellis4"),
    ("w8a16", "rtn-int8-channel"),
    ("w4a16", "rtn-int4-g128"),
    ("w8a8", "rtn-int8-channel+int8-token"),
    ("w8a8-static", "rtn-int8-channel+int8-tensor@static"),
    ("w8a8-static-asym", "rtn-int8-channel+int8-tensor-asym@static"),
    ("w8a8-smooth", "smooth-int8-channel+int8-token"),
    ("rotate-w8a8", "rotate-int8-channel+int8-token"),
    ("w4a8", "rtn-int4-g128+int8-token"),
    ("w4afp8", "rtn-int4-g128+fp8-e4m3-token"),
    ("rotate-w4a4", "rotate-gptq-int4-channel+int4-token"),
    ("spin-w4a4", "spin-gptq-int4-channel+int4-token"),
    ("fp8-weight", "rtn-fp8-e4m3-channel"),
    ("fp8-dynamic", "rtn-fp8-e4m3-channel+fp8-e4m3-token"),
    ("fp8-block", "rtn-fp8-e4m3-t128x128+fp8-e4m3-g128"),
    ("fp8-kv-fp8", "rtn-fp8-e4m3-channel+fp8-e4m3-token+kv-fp8-e4m3-tensor@static"),
    ("w4a16-kv-fp8", "rtn-int4-g128+kv-fp8-e4m3-tensor@static"),
    ("w4a16-kv-int8", "rtn-int4-g128+kv-int8-head"),
    ("nvfp4", "rtn-nvfp4"),
    ("nvfp4-w4a4", "rtn-nvfp4+nvfp4"),
    ("mxfp4", "rtn-mxfp4"),
    ("mxfp4-fp8", "rtn-mxfp4:ct+fp8-e4m3-g128"),
    ("mxfp6", "rtn-mxfp6-e2m3:ct"),
    ("mxfp6-mxfp8", "rtn-mxfp6-e2m3:ct+mxfp8-e4m3:ct"),
    ("mxfp8", "rtn-mxfp8-e4m3"),
    ("mxfp8-w8a8", "rtn-mxfp8-e4m3:ct+mxfp8-e4m3:ct"),
    ("nf4", "rtn-nf4"),
    ("bf16", "rtn-bf16"),
];

/// Recipes that are files: their names and contents.
pub const BUILT_IN: [(&str, &str); 2] = [
    ("nvfp4-fp8-attention", include_str!("nvfp4_fp8_attention.toml")),
    ("int4-experts", include_str!("int4_experts.toml")),
];

/// Returns name and content of the built-in recipe file that `text` names.
pub(super) fn built_in(text: &str) -> Option<(&'static str, &'static str)> {
    let name = canonical(text);
    BUILT_IN.into_iter().find(|(own, _)| *own == name)
}

/// Other names that people type, from the tools where they are usual, with the recipes or [`ALIASES`] they stand for.
pub const TYPED: [(&str, &str); 81] = [
    ("int8", "rtn-int8-channel"),
    ("int4", "rtn-int4-g128"),
    ("rtn", "rtn-int4-g128"),
    ("hqq", "hqq-int4-g64"),
    ("gptq", "gptq-int4-g128"),
    ("gptaq", "gptaq-int4-g128"),
    ("awq", "awq-int4-g128-asym"),
    ("autoround", "autoround-int4-g128"),
    ("auto-round", "autoround-int4-g128"),
    ("brecq", "brecq-int4-g128"),
    ("efficientqat", "efficientqat-int2-g32"),
    ("spqr", "spqr-int3-g16"),
    ("qtip", "qtip-trellis2"),
    ("smoothquant", "w8a8-smooth"),
    ("quarot", "rotate-w4a4"),
    ("spinquant", "spin-w4a4"),
    ("fp8", "fp8-dynamic"),
    ("fp8-e4m3", "fp8-dynamic"),
    ("w8a8-fp8", "fp8-dynamic"),
    ("w8a8-int8", "w8a8"),
    ("w4a16-asym", "rtn-int4-g128-asym"),
    ("w4a16-int4", "w4a16"),
    ("w4a8-int8", "w4a8"),
    ("w4a8-fp8", "w4afp8"),
    ("w4a4", "rotate-w4a4"),
    ("nvfp4a16", "nvfp4"),
    ("w4a16-nvfp4", "nvfp4"),
    ("w4a4-nvfp4", "nvfp4-w4a4"),
    ("mxfp4a16", "mxfp4"),
    ("mxfp4xfp8", "mxfp4-fp8"),
    ("mxfp6a16", "mxfp6"),
    ("mxfp6a8", "mxfp6-mxfp8"),
    ("mxfp8a16", "mxfp8"),
    ("mxfp8-e4m3", "mxfp8"),
    ("bnb", "nf4"),
    ("bnb-4bit", "nf4"),
    ("bitsandbytes", "nf4"),
    ("qlora", "nf4"),
    ("bfloat16", "bf16"),
    // torchao's configurations and their short names.
    ("int4wo", "rtn-int4-g128"),
    ("int8wo", "rtn-int8-channel"),
    ("int8dq", "w8a8"),
    ("float8wo", "fp8-weight"),
    ("float8dq", "fp8-dynamic"),
    ("int4-weight-only", "rtn-int4-g128"),
    ("int8-weight-only", "rtn-int8-channel"),
    ("float8-weight-only", "fp8-weight"),
    ("int8-dynamic-activation-int8-weight", "w8a8"),
    ("int8-dynamic-activation-int4-weight", "w4a8"),
    ("float8-dynamic-activation-float8-weight", "fp8-dynamic"),
    // llm-compressor and AutoRound.
    ("fp8-static", "rtn-fp8-e4m3-tensor+fp8-e4m3-tensor@static"),
    ("fpw8a16", "fp8-weight"),
    ("w2a16", "rtn-int2-g128"),
    ("w2a16-g64", "rtn-int2-g64"),
    ("w2a16-g32", "rtn-int2-g32"),
    ("w3a16", "rtn-int3-g128"),
    ("w4a16-g128", "rtn-int4-g128"),
    ("w4a16-g64", "rtn-int4-g64"),
    ("w4a16-g32", "rtn-int4-g32"),
    ("w8a16-g128", "rtn-int8-g128"),
    // AutoGPTQ, AutoAWQ, ModelOpt, and names of models on hubs.
    ("gptq-4bit", "gptq-int4-g128"),
    ("gptq-int4", "gptq-int4-g128"),
    ("gptq-4bit-128g", "gptq-int4-g128"),
    ("gptq-4bit-32g", "gptq-int4-g32"),
    ("gptq-3bit", "gptq-int3-g128"),
    ("gptq-8bit", "gptq-int8-g128"),
    ("gptq-int8", "gptq-int8-g128"),
    ("awq-4bit", "awq-int4-g128-asym"),
    ("awq-int4", "awq-int4-g128-asym"),
    ("int4-awq", "awq-int4-g128-asym"),
    ("int8-sq", "w8a8-smooth"),
    ("4bit", "rtn-int4-g128"),
    ("4-bit", "rtn-int4-g128"),
    ("8bit", "rtn-int8-channel"),
    ("8-bit", "rtn-int8-channel"),
    ("load-in-4bit", "nf4"),
    ("load-in-8bit", "w8a8"),
    // As `llama-quantize` resolves them.
    ("q3_k", "q3_k_m"),
    ("q4_k", "q4_k_m"),
    ("q5_k", "q5_k_m"),
    ("q4km", "q4_k_m"),
];

/// Names under which llm-compressor makes other schemes than here, with the difference and the recipe of its scheme.
const PRESETS: [(&str, &str, &str); 4] = [
    ("nvfp4", "weights only; W4A4, as llm-compressor's NVFP4, is", "nvfp4-w4a4"),
    ("mxfp4", "weights only; W4A4, as llm-compressor's MXFP4, is", "rtn-mxfp4:ct+mxfp4:ct"),
    ("mxfp8", "weights only; W8A8, as llm-compressor's MXFP8, is", "mxfp8-w8a8"),
    (
        "fp8",
        "inputs scaled per token; static scales per tensor, as llm-compressor's FP8 has, are",
        "fp8-static",
    ),
];

/// Returns how a name differs from llm-compressor's preset of that name, with the recipe of the preset.
pub fn unlike_preset(text: &str) -> Option<String> {
    let text = text.to_lowercase();
    let row = PRESETS.iter().find(|(name, ..)| *name == text);
    row.map(|(_, difference, recipe)| format!("{difference} {recipe}"))
}

/// Returns what a name stands for, if it is not spelled out already: the full name of an alias, a file type's own name.
pub fn spelled_out(text: &str) -> Option<String> {
    if Recipe::is_file(text) {
        return None;
    }
    let name = canonical(text);
    let full = full_name(&name);
    let shown = match FileType::parse(&full) {
        Some(ty) => format!("{full} (llama.cpp file type {})", ty.number),
        None => full.clone().into_owned(),
    };
    (full != text).then_some(shown)
}

/// Returns the name under which a recipe is recorded: lower case, with names of [`TYPED`] replaced by theirs.
fn canonical(text: &str) -> String {
    let lower = text.to_lowercase();
    // AutoRound writes `GGUF:Q4_K_M`.
    let lower = lower.strip_prefix("gguf:").unwrap_or(&lower).to_owned();
    let listed = |name: &str| {
        let alias = ALIASES.iter().chain(&BUILT_IN).map(|(alias, _)| *alias);
        let own = alias.chain(FILE_TYPES.iter().map(|ty| ty.name)).find(|own| *own == name);
        own.or_else(|| TYPED.iter().find(|(typed, _)| *typed == name).map(|(_, of)| *of)).map(str::to_owned)
    };
    // Tools differ in what joins the parts of a name: `FP8_DYNAMIC`, `q4-k-m`.
    let spellings = [lower.clone(), lower.replace('_', "-"), lower.replace('-', "_")];
    let found = spellings.iter().find_map(|spelling| listed(spelling));
    let behind_a_method = || spellings.iter().find(|spelling| composed(spelling).is_some()).cloned();
    found.or_else(behind_a_method).unwrap_or(lower)
}

/// Returns the full name of an alias, and of one behind a transform or a method; other names are their own.
fn full_name(name: &str) -> Cow<'_, str> {
    match ALIASES.iter().find(|(alias, _)| *alias == name) {
        Some((_, full)) => Cow::Borrowed(full),
        None => composed(name).map_or(Cow::Borrowed(name), Cow::Owned),
    }
}

/// Returns the full name of an alias under another method or transform, such as `gptq-w4a16`: the alias has to round to nearest,
/// and the method takes the place of that. `None` for what is no such name.
fn composed(name: &str) -> Option<String> {
    let (first, others) = name.find('+').map_or((name, ""), |at| name.split_at(at));
    let (transform, rest) = transform_and_rest(first);
    let after = |name: &str| rest.strip_prefix(name)?.strip_prefix('-');
    let alias = METHODS.iter().filter_map(|row| after(row.name)).min_by_key(|rest| rest.len());
    let alias = alias.or_else(|| transform.is_some().then_some(rest))?;
    if parse_weight(alias).is_ok() || registry::find(alias).is_some() {
        return None;
    }
    let of = canonical(alias);
    let full = ALIASES.iter().find(|(alias, _)| *alias == of).map_or(of.as_str(), |(_, full)| full);
    let schemes = full.strip_prefix(rtn::NAME)?.strip_prefix('-')?;
    Some(format!("{}{schemes}{others}", &first[..first.len() - alias.len()]))
}

/// Parses a name.
pub(super) fn parse(given: &str) -> Result<Recipe, RecipeError> {
    let name = canonical(given);
    let text = name.as_str();
    if let Some(file_type) = FileType::parse(text) {
        return Ok(of_file_type(text, file_type));
    }
    let full = full_name(text);
    let full = full.as_ref();
    let mut parts = full.split('+');
    let first = parts.next().unwrap_or_default();
    let (transform, rest) = transform_and_rest(first);
    let (method, weights) = method_and_scheme(text, rest, transform.is_some())?;
    let transform = transform.map(|transform| Arc::from(super::for_method(transform, &*method)));
    let (mut activations, mut kv, mut kv_levels, mut tuning) = (None, None, None, None);
    for part in parts {
        if part == e2e::NAME {
            tuning = Some(EndToEnd::default());
            continue;
        }
        if let Some(rest) = part.strip_prefix("kv-") {
            if kv.is_some() || kv_levels.is_some() {
                return Err(fault(text, part, "one scheme of keys and values"));
            }
            // A policy with calibrated levels comes first: its names are not schemes.
            kv_levels = levels_of(rest);
            if kv_levels.is_none() {
                kv = Some(scheme(text, "kv", KvScheme::spelled_out(rest), parse_activation)?);
            }
            continue;
        }
        if activations.is_some() {
            return Err(fault(text, part, "one activation scheme"));
        }
        activations = Some(scheme(text, "activations", part, parse_activation)?);
    }
    Ok(Recipe {
        name: text.to_owned(),
        transform,
        method,
        tuning,
        weights,
        activations,
        kv,
        kv_levels,
        file_type: None,
        container: None,
        layers: Vec::new(),
        options: RecipeOptions::default(),
        sha256: FileDigest::of(text.as_bytes()).hex(),
    })
}

fn of_file_type(text: &str, file_type: FileType) -> Recipe {
    Recipe {
        name: text.to_owned(),
        transform: None,
        method: Arc::new(Rtn),
        tuning: None,
        weights: Scheme::codec(file_type.base),
        activations: None,
        kv: None,
        kv_levels: None,
        file_type: Some(file_type),
        container: Some(gguf::CONTAINER),
        layers: Vec::new(),
        options: RecipeOptions::default(),
        sha256: FileDigest::of(text.as_bytes()).hex(),
    }
}

fn transform_and_rest(part: &str) -> (Option<Box<dyn Transform>>, &str) {
    let rest = |name: &str| part.strip_prefix(name)?.strip_prefix('-');
    let found = TRANSFORMS.iter().find_map(|row| Some((row, rest(row.name)?)));
    found.map_or((None, part), |(row, rest)| (Some((row.new)()), rest))
}

/// Parses method and scheme; after a transform the method defaults to RTN.
fn method_and_scheme(text: &str, part: &str, after: bool) -> Result<(Arc<dyn Method>, Scheme), RecipeError> {
    // The longest name matches, so that "rtn-mse-…" is not a scheme of "rtn".
    let rest = |name: &str| part.strip_prefix(name)?.strip_prefix('-');
    let named = METHODS.iter().filter_map(|row| Some((row, rest(row.name)?)));
    let rounded = || registry::find(rtn::NAME).filter(|_| after).map(|row| (row, part));
    let found = named.min_by_key(|(_, rest)| rest.len()).or_else(rounded);
    let (row, rest) = found.ok_or_else(|| fault(text, text, &nearest_names(text, part)))?;
    let weights = scheme(text, "weights", rest, parse_weight)?;
    let method: Arc<dyn Method> = (row.new)(&weights).into();
    let weights = method.scheme(weights);
    Ok((method, weights))
}

/// Lists the recipes nearest to `text`, whose `part` names no method: aliases, file types, and the same scheme under other
/// methods.
fn nearest_names(text: &str, part: &str) -> String {
    if let Some(missing) = missing_parts(part) {
        return missing;
    }
    let scheme = part.split_once('-').map_or(part, |(_, scheme)| scheme);
    let schemes = [part, scheme].into_iter().find(|scheme| parse_weight(scheme).is_ok());
    let composed: Vec<String> = schemes.map_or_else(Vec::new, |scheme| {
        METHODS.iter().map(|row| text.replacen(part, &format!("{}-{scheme}", row.name), 1)).collect()
    });
    let aliases = ALIASES.iter().map(|(alias, _)| *alias);
    let typed = TYPED.iter().map(|(typed, _)| *typed);
    let names = aliases.chain(typed).chain(FILE_TYPES.iter().map(|ty| ty.name));
    // A scheme alone lacks only its method.
    match composed.is_empty() {
        true => nearest_list(text, names),
        false => nearest_list(text, composed.iter().map(String::as_str)),
    }
}

/// Says what is missing in `part`: the blocks of a number format ("int5"), or the order of method and scheme ("mxfp4-gptq");
/// `None` if nothing is known.
fn missing_parts(part: &str) -> Option<String> {
    let reads = |scheme: &str| parse_weight(scheme).is_ok();
    let reversed = METHODS.iter().find_map(|row| {
        let scheme = part.strip_suffix(row.name)?.strip_suffix('-')?;
        let scheme =
            [scheme.to_owned(), format!("{scheme}-g128")].into_iter().find(|scheme| reads(scheme))?;
        Some(format!("the method before the scheme, \"{}-{scheme}\"", row.name))
    });
    if reversed.is_some() || reads(part) {
        return reversed;
    }
    let blocks = ["g128", "g32", "channel"].map(|blocks| format!("{part}-{blocks}"));
    let [group, _, channel] = &blocks;
    blocks.iter().all(|scheme| reads(scheme)).then(|| {
        format!(
            "a method and the weights that share a scale, such as \"{}-{group}\", \"gptq-{group}\" or \"{}-{channel}\"",
            rtn::NAME,
            rtn::NAME
        )
    })
}

fn scheme(
    name: &str,
    field: &str,
    text: &str,
    parse: impl Fn(&str) -> Result<Scheme, mantissa_num::ParseError>,
) -> Result<Scheme, RecipeError> {
    parse(text).map_err(|error| RecipeError::Scheme {
        name: name.to_owned(),
        field: field.to_owned(),
        error: Box::new(error),
    })
}

fn fault(name: &str, got: &str, expected: &str) -> RecipeError {
    RecipeError::Name { name: name.to_owned(), got: format!("\"{got}\""), expected: expected.to_owned() }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use mantissa_store::convention::native;

    /// Returns the value of an option `table.key`.
    fn setting(method: &dyn Method, option: &str) -> String {
        let settings = method.settings().into_iter();
        let found = settings.map(|setting| setting.to_string()).find_map(|text| {
            let (name, value) = text.split_once(" = ")?;
            (name == option).then(|| value.to_owned())
        });
        found.unwrap()
    }

    #[test]
    fn errors_say_which_part_is_missing() {
        let said = |text: &str| parse(text).unwrap_err().to_string();
        for bits in [2, 5, 6, 7] {
            let name = format!("int{bits}");
            let error = said(&name);
            assert!(
                error.contains(&format!("\"rtn-{name}-g128\"")) && error.contains("share a scale"),
                "{error}"
            );
            assert!(
                parse(&format!("rtn-{name}-g128")).is_ok() && parse(&format!("rtn-{name}-channel")).is_ok()
            );
        }
        for (typed, meant) in
            [("nvfp4-gptq", "gptq-nvfp4"), ("int5-g64-hqq", "hqq-int5-g64"), ("int3-gptq", "gptq-int3-g128")]
        {
            let error = said(typed);
            assert!(error.contains(&format!("\"{meant}\"")), "{error}");
            assert!(parse(meant).is_ok(), "{meant}");
        }
        // A scheme with its blocks lacks only its method.
        assert!(said("int7-g32").contains("rtn-int7-g32"));
    }

    #[test]
    fn aliases_follow_methods_and_transforms() {
        for (typed, full) in [
            ("gptq-w4a16", "gptq-int4-g128"),
            ("GPTQ_W4A16", "gptq-int4-g128"),
            ("gptq-fp8-block", "gptq-fp8-e4m3-t128x128+fp8-e4m3-g128"),
            ("awq-w4a16-g64", "awq-int4-g64"),
            ("smooth-w8a8", "smooth-int8-channel+int8-token"),
            ("rotate-gptq-w4a16+kv-fp8", "rotate-gptq-int4-g128+kv-fp8"),
        ] {
            let (recipe, spelled) = (parse(typed).unwrap(), parse(full).unwrap());
            assert_eq!((&recipe.weights, &recipe.activations), (&spelled.weights, &spelled.activations));
            assert_eq!((recipe.method_name(), &recipe.kv), (spelled.method_name(), &spelled.kv));
            assert_eq!(spelled_out(typed).as_deref(), Some(full));
        }
        // A scheme keeps its meaning, and an alias with a method of its own has no place behind another.
        assert_eq!(parse("gptq-nvfp4").unwrap().weights.to_string(), "nvfp4");
        for wrong in ["gptq-rtn", "gptq-awq", "smooth-spinquant", "gptq-q4_k_m", "w4a16-gptq"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn the_cache_has_the_short_names_of_run() {
        for (short, full) in [("fp8", "fp8-e4m3-head"), ("int8", "int8-head"), ("int4", "int4-head-asym")] {
            let by_name = parse(&format!("rtn-int4-g128+kv-{short}")).unwrap();
            let by_file = Recipe::from_toml("r.toml", &format!("weights = \"int4-g128\"\nkv = \"{short}\""));
            let full = Some(parse_activation(full).unwrap());
            assert_eq!((&by_name.kv, &by_file.unwrap().kv), (&full, &full));
        }
        assert!(parse("rtn-int4-g128+kv-fp9").is_err());
    }

    #[test]
    fn names_compose() {
        let recipe = parse("rtn-int8-channel+int8-token").unwrap();
        assert_eq!(recipe.weights.to_string(), "int8-channel");
        assert_eq!(recipe.activations.unwrap().to_string(), "int8-token");
        let recipe = parse("rtn-fp8-e4m3-channel+fp8-e4m3-token+kv-fp8-e4m3-tensor@static").unwrap();
        assert_eq!(recipe.kv.unwrap().to_string(), "fp8-e4m3-tensor@static");
        let recipe = parse("rtn-fp8-e4m3-channel+kv-keys=nuq4-1%,values=nuq3,pre-rope").unwrap();
        assert_eq!(recipe.kv_levels.as_ref().unwrap().to_string(), "keys=nuq4-1%,values=nuq3,pre-rope");
        assert_eq!((recipe.kv.is_none(), recipe.container()), (true, native::CONTAINER));
        let recipe = parse("gptq-int3-g32-asym").unwrap();
        assert_eq!((recipe.method.name(), recipe.weights.to_string().as_str()), ("gptq", "int3-g32-asym"));
        let recipe = parse("spqr-int3-g16").unwrap();
        assert_eq!((recipe.method.name(), recipe.weights.to_string().as_str()), ("spqr", "int3-g16"));
        assert_eq!((recipe.outliers("", 100, 64), recipe.container()), (64, native::CONTAINER));
        let recipe = parse("rtn-mse-int4-g32").unwrap();
        assert_eq!(recipe.outliers("", 100, 64), 0);
        assert_eq!((recipe.method.name(), recipe.weights.to_string().as_str()), ("rtn-mse", "int4-g32"));
        let gptaq = parse("rotate-gptaq-int4-g32").unwrap().method;
        assert_eq!((gptaq.name(), gptaq.recipe_name()), ("gptq", "gptaq"));
        assert_eq!(setting(&*gptaq, "gptq.asymmetric"), "0.5");
        let gptq = parse("rotate-gptq-int4-g32").unwrap().method;
        assert_eq!((gptq.recipe_name(), setting(&*gptq, "gptq.asymmetric").as_str()), ("gptq", "0.0"));
        let recipe = parse("hqq-int4-g64").unwrap();
        assert_eq!(
            (recipe.method.name(), recipe.weights.to_string().as_str()),
            ("hqq", "int4-g64-asym:minmax")
        );
        let recipe = parse("rotate-gptq-int4-channel+int4-token").unwrap();
        assert_eq!((recipe.method_name().as_str(), recipe.needs_calibration()), ("rotate-gptq", true));
        let steps = |name: &str| setting(&*parse(name).unwrap().method, "autoround.iterations");
        assert_eq!(
            (steps("autoround-nvfp4"), steps("autoround-mxfp4:ct")),
            ("200".to_owned(), "600".to_owned())
        );
        let recipe = parse("awq-int4-g128-asym").unwrap();
        assert_eq!(recipe.method_name(), "awq-rtn");
        assert!(recipe.needs_calibration() && !parse("rotate-int4-g32").unwrap().needs_calibration());
        assert_eq!(parse("fp8-dynamic").unwrap().weights.to_string(), "fp8-e4m3-channel");
        let tuned = parse("gptq-int3-g32-asym+e2e").unwrap();
        assert_eq!((tuned.method_name().as_str(), tuned.tuning), ("gptq+e2e", Some(EndToEnd::default())));
        assert!(tuned.activations.is_none() && tuned.needs_calibration());
        assert!(parse("rtn-int4-g32+e2e").unwrap().needs_calibration());
        let tuned = parse("efficientqat-int2-g32").unwrap();
        assert_eq!((tuned.method.name(), tuned.tuning), ("block-ap", Some(EndToEnd::default())));
    }

    #[test]
    fn every_alias_parses() {
        for (alias, full) in ALIASES {
            let (short, long) = (parse(alias).unwrap(), parse(full).unwrap());
            assert_eq!((short.weights, short.activations), (long.weights, long.activations), "{alias}");
        }
    }

    #[test]
    fn names_are_recognised_as_people_type_them() {
        let cases = [
            ("W4A16", "w4a16", Some("rtn-int4-g128")),
            ("INT4", "rtn-int4-g128", Some("rtn-int4-g128")),
            ("GPTQ", "gptq-int4-g128", Some("gptq-int4-g128")),
            ("Q4_K_M", "q4_k_m", Some("q4_k_m (llama.cpp file type 15)")),
            ("q4-k-m", "q4_k_m", Some("q4_k_m (llama.cpp file type 15)")),
            ("FP8_DYNAMIC", "fp8-dynamic", Some("rtn-fp8-e4m3-channel+fp8-e4m3-token")),
            ("FP8_BLOCK", "fp8-block", Some("rtn-fp8-e4m3-t128x128+fp8-e4m3-g128")),
            ("W4A16_G128", "rtn-int4-g128", Some("rtn-int4-g128")),
            ("W8A8_INT8", "w8a8", Some("rtn-int8-channel+int8-token")),
            ("int4_weight_only", "rtn-int4-g128", Some("rtn-int4-g128")),
            ("gptq-4bit", "gptq-int4-g128", Some("gptq-int4-g128")),
            ("GGUF:Q4_K_S", "q4_k_s", Some("q4_k_s (llama.cpp file type 14)")),
            ("fp8", "fp8-dynamic", Some("rtn-fp8-e4m3-channel+fp8-e4m3-token")),
            ("nvfp4", "nvfp4", Some("rtn-nvfp4")),
            ("RTN-INT4-G32", "rtn-int4-g32", Some("rtn-int4-g32")),
            ("rtn-int4-g32", "rtn-int4-g32", None),
            ("gptq-int4-g128", "gptq-int4-g128", None),
            ("q4_k_m", "q4_k_m", None),
        ];
        for (typed, name, full) in cases {
            assert_eq!(parse(typed).unwrap().name, name, "{typed}");
            assert_eq!(spelled_out(typed).as_deref(), full, "{typed}");
        }
        assert_eq!(spelled_out("recipes/mine.toml"), None);
    }

    #[test]
    fn every_typed_name_parses_and_hides_no_other() {
        for (typed, of) in TYPED {
            assert!(parse(typed).is_ok(), "{typed}");
            assert!(ALIASES.iter().all(|(alias, _)| *alias != typed), "{typed}");
            assert!(FileType::parse(typed).is_none() && canonical(of) == of, "{typed}");
        }
    }

    /// `PRESET_SCHEMES` of compressed-tensors: NVFP4, MXFP4 and MXFP8 quantize inputs too, FP8 has static scales per tensor.
    #[test]
    fn names_of_presets_that_mean_more_elsewhere_say_so() {
        for (name, difference, preset) in PRESETS {
            let (here, there) = (parse(name).unwrap(), parse(preset).unwrap());
            assert!(there.activations.is_some() && here.activations != there.activations, "{name}");
            assert_eq!(difference.starts_with("weights only"), here.activations.is_none(), "{name}");
            assert!(unlike_preset(&name.to_uppercase()).unwrap().ends_with(preset));
        }
        assert!(["nvfp4a16", "nvfp4-w4a4", "w8a8"].iter().all(|name| unlike_preset(name).is_none()));
    }

    #[test]
    fn a_wrong_name_is_answered_with_at_most_five() {
        for wrong in ["mxpf4", "magic-int4-g128", "int3-g64", "nonsense"] {
            let message = parse(wrong).unwrap_err().to_string();
            let list = message.split("expected ").nth(1).unwrap().split(", got").next().unwrap();
            assert!(list.matches(", ").count() <= 3, "{message}");
        }
    }

    #[test]
    fn faults_name_the_part_and_the_nearest() {
        let message = |name: &str| parse(name).unwrap_err().to_string();
        assert!(message("mxpf4").contains("expected mxfp4, "));
        assert!(message("gtpq-int3-g64").contains("expected gptq-int3-g64, "));
        assert!(message("int3-g64").contains("rtn-int3-g64"));
        assert!(message("rtn-int4-g0").contains("g0"));
        assert!(message("magic-int4-g128").contains("gptq-int4-g128"));
        assert!(message("rtn-int4-g32+int8-token+int8-token").contains("one activation scheme"));
        assert!(message("rtn-int4-g32+kv-int8-head+kv-int8-head").contains("one scheme of keys"));
        assert!(message("rtn-int4-g32+kv-nuq4+kv-int8-head").contains("one scheme of keys"));
        assert!(message("rtn-int4-g32+kv-int9-head").contains("int9-head"));
    }
}
