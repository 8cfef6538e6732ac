//! Rules of recipe files: exceptions for some layers.

use std::sync::Arc;

use mantissa_methods::{Method, Transform, rtn};

use super::methods::same;
use super::reader::Reader;
use super::{FileType, LayerRule, RecipeError};

/// Makes the methods of `rules`, in a recipe of `method`.
pub(super) fn resolve(
    reader: &Reader<'_>,
    rules: Vec<LayerRule>,
    method: &dyn Method,
) -> Result<Vec<LayerRule>, RecipeError> {
    let rule = |(i, rule): (usize, LayerRule)| {
        let own_method: Option<Arc<dyn Method>> = match (rule.method, &rule.weights) {
            (None, _) => None,
            (Some(row), Some(scheme)) => Some((row.new)(scheme).into()),
            (Some(row), None) => {
                let key = format!("layers[{i}].method");
                return Err(reader.fault(&key, format!("\"{}\"", row.name), "none with weights = \"keep\""));
            }
        };
        let weights = rule.weights.map(|scheme| own_method.as_deref().unwrap_or(method).scheme(scheme));
        Ok(LayerRule { weights, own_method, ..rule })
    };
    rules.into_iter().enumerate().map(rule).collect()
}

/// Checks that transform and file type leave the choice of methods to the rules.
pub(super) fn check(
    reader: &Reader<'_>,
    layers: &[LayerRule],
    method: &dyn Method,
    (transform, file_type): (Option<&dyn Transform>, Option<FileType>),
) -> Result<(), RecipeError> {
    let other = layers.iter().filter_map(|rule| rule.own_method.as_deref()).find(|own| !same(*own, method));
    let Some(other) = other else { return Ok(()) };
    let got = format!("\"{}\"", other.recipe_name());
    let expected = match (transform, file_type) {
        (Some(transform), _) => format!(
            "none but \"{}\" with transform \"{}\", which changes the whole model",
            method.recipe_name(),
            transform.name()
        ),
        (None, Some(_)) => format!("none but \"{}\" with file_type", rtn::NAME),
        (None, None) => return Ok(()),
    };
    Err(reader.fault("layers.method", got, expected))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use crate::recipe::Recipe;

    fn parse(text: &str) -> Result<Recipe, String> {
        Recipe::from_toml("r.toml", text).map_err(|error| error.to_string())
    }

    const MIXED: &str = r#"
        method = "qtip"
        weights = "trellis3"
        keep = ["*.0.mlp.down_proj"]
        [[layers]]
        modules = ["*.down_proj"]
        weights = "int4-g32"
        method = "gptaq"
        [[layers]]
        modules = ["*.1.*", "*.o_proj"]
        weights = "int8-g32"
        method = "hqq"
        [[layers]]
        modules = ["*.q_proj"]
        weights = "trellis4"
    "#;

    #[test]
    fn rules_may_have_their_own_method() {
        let recipe = parse(MIXED).unwrap();
        let of = |module: &str| {
            let module = format!("model.layers.{module}");
            (recipe.method_of(&module).recipe_name(), recipe.weights_of(&module).map(ToString::to_string))
        };
        let of = |module: &str| {
            let (method, scheme) = of(module);
            format!("{method} {}", scheme.unwrap_or_default())
        };
        // The first rule that matches counts, `keep` before all others.
        assert_eq!(of("0.mlp.down_proj"), "qtip ");
        assert_eq!(of("1.mlp.down_proj"), "gptaq int4-g32");
        assert!(
            of("0.self_attn.o_proj").starts_with("hqq int8-g32") && of("1.mlp.up_proj").starts_with("hqq")
        );
        assert_eq!(of("0.self_attn.q_proj"), "qtip trellis4");
        assert_eq!(of("0.mlp.up_proj"), "qtip trellis3");
        assert_eq!(recipe.method_name(), "qtip, gptaq, hqq");
        assert!(recipe.mixes_methods() && recipe.needs_calibration() && !recipe.rounds_to_nearest());
        assert_eq!(recipe.container().name(), "native");
    }

    #[test]
    fn options_of_a_table_are_those_of_each_method_that_has_it() {
        let text = MIXED.replace("\"hqq\"", "\"gptq\"") + "[gptq]\ndamp = 0.125";
        let recipe = parse(&text).unwrap();
        let damp = |module: &str| {
            let settings = recipe.method_of(module).settings();
            settings.iter().find(|setting| setting.key == "damp").map(ToString::to_string)
        };
        assert_eq!(damp("a.down_proj").as_deref(), Some("gptq.damp = 0.125"));
        assert_eq!(damp("a.o_proj").as_deref(), Some("gptq.damp = 0.125"));
        assert_eq!(damp("a.up_proj").as_deref(), Some("qtip.damp = 0.01"));
    }

    #[test]
    fn a_rule_that_repeats_the_method_mixes_nothing() {
        let text = "method = \"gptq\"\nweights = \"int4-g32\"\ntransform = \"smooth\"\n[[layers]]\nmodules = [\"a\"]\nmethod = \"gptq\"\n\
                    weights = \"int8-g32\"";
        let recipe = parse(text).unwrap();
        assert!(!recipe.mixes_methods());
        assert_eq!(recipe.method_name(), "smooth-gptq");
    }

    #[test]
    fn faults_name_the_rule_and_the_fix() {
        let rule = |method: &str, more: &str| {
            let weights = if more.contains("weights") { "" } else { "weights = \"int4-g32\"\n" };
            format!(
                "{more}\n{weights}[[layers]]\nmodules = [\"a\"]\nmethod = \"{method}\"\nweights = \"int4-g32\""
            )
        };
        for (text, parts) in [
            (rule("gtpq", ""), ["layers[0].method", "expected gptq, ", "got \"gtpq\""]),
            (
                rule("gptq", "").replace(
                    "method = \"gptq\"\nweights = \"int4-g32\"",
                    "method = \"gptq\"\nweights = \"keep\"",
                ),
                ["layers[0].method", "none with weights = \"keep\"", "got \"gptq\""],
            ),
            (
                rule("gptq", "transform = \"smooth\""),
                ["layers.method", "none but \"rtn\" with transform \"smooth\"", "got \"gptq\""],
            ),
            (
                rule("gptq", "file_type = \"q4_0\"\n# weights"),
                ["layers.method", "none but \"rtn\" with file_type", "got \"gptq\""],
            ),
            (
                rule("hqq", "") + "\n[gptq]\ndamp = 0.1",
                ["gptq", "none with method \"rtn\" and \"hqq\"", "got a table"],
            ),
        ] {
            let message = parse(&text).unwrap_err();
            assert!(
                parts.iter().all(|part| message.contains(part)) && message.contains("r.toml"),
                "{text}: {message}"
            );
        }
    }
}
