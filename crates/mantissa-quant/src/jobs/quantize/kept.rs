//! Checks that what a user asks to keep unquantized is there.

use std::collections::BTreeSet;

use mantissa_model::{ModelConfig, load_config};
use mantissa_num::nearest_list;
use mantissa_store::convention::ModelFiles;

use super::module_of;
use crate::error::{QuantError, Result};
use crate::recipe::{Glob, Recipe};

/// Maximum number of names that a misspelt one is compared with: a mixture of experts has tens of thousands.
const MOST_COMPARED: usize = 2000;

/// Refuses patterns that match no module of `source`.
///
/// # Errors
/// [`QuantError::NoSuchLayer`] with the nearest names; a configuration that cannot be read.
pub fn require_modules(source: &ModelFiles, patterns: &[Glob]) -> Result<()> {
    match patterns {
        [] => Ok(()),
        patterns => check(source, &load_config(source)?, patterns.iter()),
    }
}

/// Refuses full names under `keep` in a recipe that name no module of `source`. Patterns may match none, since a recipe file is
/// for many models.
pub(super) fn check_names(source: &ModelFiles, config: &ModelConfig, recipe: &Recipe) -> Result<()> {
    let kept = recipe.layers.iter().filter(|rule| rule.weights.is_none());
    check(source, config, kept.flat_map(|rule| &rule.modules).filter(|glob| glob.is_name()))
}

fn check<'a>(
    source: &ModelFiles,
    config: &ModelConfig,
    mut patterns: impl Iterator<Item = &'a Glob>,
) -> Result<()> {
    let layers = || config.decoder_linears().chain(config.tables()).map(|info| info.module);
    let matches = |glob: &&Glob| {
        layers().any(|module| glob.matches(&module))
            || glob.matches(config.head_module())
            || source.checkpoint().tensors().any(|meta| glob.matches(module_of(&meta.name)))
    };
    let Some(missing) = patterns.find(|glob| !matches(glob)) else { return Ok(()) };
    let pattern = missing.to_string();
    let nearest = nearest_to(&pattern, layers());
    Err(QuantError::NoSuchLayer { pattern, nearest })
}

/// Returns the fix for `pattern`, which matches nothing: one pattern for each name of a list with commas, the pattern of what
/// is a part of names of `modules`, or the nearest names or patterns.
fn nearest_to(pattern: &str, modules: impl Iterator<Item = String>) -> String {
    let modules: Vec<String> = modules.collect();
    let parts: Vec<&str> = pattern.split(',').map(str::trim).filter(|part| !part.is_empty()).collect();
    let one = |part: &str| {
        let is_known = modules.iter().any(|module| module == part) || part.contains('*');
        if is_known { Some(part.to_owned()) } else { around(part, &modules) }
    };
    let typed = |pattern: String| format!("--keep '{pattern}'");
    if pattern.contains(',') && !parts.is_empty() {
        let each = parts.iter().map(|part| typed(one(part).unwrap_or_else(|| (*part).to_owned())));
        return format!("{} (commas are no list)", each.collect::<Vec<_>>().join(" "));
    }
    around(pattern, &modules).map_or_else(|| similar(pattern, modules.into_iter()), typed)
}

/// Returns the pattern of all `modules` that have `part` between their dots: `*.down_proj`, `model.layers.0.*`; `None` if none
/// has it.
fn around(part: &str, modules: &[String]) -> Option<String> {
    let part = part.trim_matches('.');
    let inside = format!(".{part}.");
    if part.is_empty() || part.contains('*') {
        return None;
    }
    let ends = |module: &String| module.ends_with(&inside[..inside.len() - 1]);
    if modules.iter().any(ends) {
        return Some(format!("*.{part}"));
    }
    // The same beginning in all that have it, so that no other layer of that number is meant.
    let mut starts = modules.iter().filter_map(|module| {
        let dotted = format!(".{module}");
        dotted.find(&inside).map(|at| module[..at].to_owned())
    });
    let start = starts.next()?;
    let is_one = starts.all(|other| other == start);
    Some(if is_one { format!("{start}{part}.*") } else { format!("*.{part}.*") })
}

/// Lists the names or patterns of `modules` most similar to `pattern`: in the form that it has, in the layers that it names.
fn similar(pattern: &str, modules: impl Iterator<Item = String>) -> String {
    let numbers = |text: &str| -> Vec<String> {
        let digits = text.split(|c: char| !c.is_ascii_digit());
        digits.filter(|digits| !digits.is_empty()).map(str::to_owned).collect()
    };
    let own = numbers(pattern);
    let (mut named, mut others) = (BTreeSet::new(), BTreeSet::new());
    for module in modules {
        // Names of other layers differ only in the number, which would fill the list.
        let same = numbers(&module).iter().take(own.len()).eq(own.iter());
        let found = if same { &mut named } else { &mut others };
        if found.len() < MOST_COMPARED {
            let last = module.rsplit_once('.').map_or(module.as_str(), |(_, last)| last);
            match pattern.contains('*') {
                true => found.insert(if module.contains('.') { format!("*.{last}") } else { module }),
                false => found.insert(module),
            };
        }
    }
    let compared = if named.is_empty() { &others } else { &named };
    nearest_list(pattern, compared.iter().map(String::as_str))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_have_the_form_and_the_layer_of_what_was_typed() {
        let names = ["q_proj", "k_proj"].map(|name| format!("self_attn.{name}"));
        let names: Vec<_> = names.into_iter().chain(["mlp.down_proj".to_owned()]).collect();
        let modules = || {
            let layer = |layer: usize| {
                names.clone().into_iter().map(move |name| format!("model.layers.{layer}.{name}"))
            };
            (0..12).flat_map(layer).chain(["lm_head".to_owned()])
        };
        let first = |pattern: &str| {
            let list = nearest_to(pattern, modules());
            list.split([',', ' ']).next().unwrap_or_default().to_owned()
        };
        assert_eq!(first("model.layer.7.mlp.down_proj"), "model.layers.7.mlp.down_proj");
        assert_eq!(first("model.layers.11.self_attn.k_prj"), "model.layers.11.self_attn.k_proj");
        assert_eq!(first("model.layers.99.mlp.down_proj"), "model.layers.9.mlp.down_proj");
        assert_eq!((first("*.down_prj").as_str(), first("lm_haed").as_str()), ("*.down_proj", "lm_head"));
        for (part, pattern) in [
            ("down_proj", "*.down_proj"),
            ("mlp.down_proj", "*.mlp.down_proj"),
            ("layers.0", "model.layers.0.*"),
            ("0", "model.layers.0.*"),
            ("model.layers.11", "model.layers.11.*"),
            ("layers.0.mlp", "model.layers.0.mlp.*"),
            ("self_attn", "*.self_attn.*"),
        ] {
            assert_eq!(nearest_to(part, modules()), format!("--keep '{pattern}'"));
        }
        let several = nearest_to("layers.0, lm_head,*.q_proj", modules());
        let each = "--keep 'model.layers.0.*' --keep 'lm_head' --keep '*.q_proj' (commas are no list)";
        assert_eq!(several, each);
    }
}
