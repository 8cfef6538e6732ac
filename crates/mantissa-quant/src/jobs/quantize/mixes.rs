//! Checks that one run can do what the rules of a recipe ask: methods per layer.

use mantissa_methods::Method;
use mantissa_methods::method::{Scope, Work};
use mantissa_model::{LinearInfo, ModelConfig};

use crate::error::{MixError, QuantError, Result};
use crate::plan::PlannedLinear;
use crate::recipe::Recipe;
use crate::recipe::methods::same;

/// Checks the methods of a recipe with several, for the layers of a model.
///
/// # Errors
/// [`QuantError::Mixed`] if a method that learns decoder layers has a part of one, if there are several such methods, or if the
/// rule of an embedding or head has a method.
pub(super) fn check(recipe: &Recipe, config: &ModelConfig, linears: &[PlannedLinear]) -> Result<()> {
    let error = |what: String, expected: String, got: String, fix: String| {
        let recipe = recipe.name.clone();
        Err(QuantError::Mixed(Box::new(MixError { recipe, what, expected, got, fix })))
    };
    for table in config.tables() {
        let named = recipe.layers.iter().find(|rule| rule.modules.iter().any(|glob| glob.is(&table.module)));
        let own = named.and_then(|rule| rule.own_method.as_deref());
        if let Some(own) = own.filter(|own| !matches!(own.work(), Work::Nearest)) {
            let expected = "none, because embedding and head are rounded to nearest".to_owned();
            let got = format!("\"{}\"", own.recipe_name());
            return error(table.module, expected, got, "leave out the rule's method".to_owned());
        }
    }
    if !recipe.mixes_methods() {
        return Ok(());
    }
    let learns = |method: &dyn Method| method.scope() == Scope::Layer;
    let mut learners = recipe.methods().filter(|method| learns(*method));
    if let Some(first) = learners.next()
        && let Some(other) = learners.find(|other| !same(*other, first))
    {
        let got = format!("\"{}\" and \"{}\"", first.recipe_name(), other.recipe_name());
        let expected = "at most one method that learns decoder layers".to_owned();
        return error("layers.method".to_owned(), expected, got, "leave out one of them".to_owned());
    }
    let quantized = || linears.iter().filter(|linear| linear.scheme.is_some()).map(|linear| &linear.info);
    let method = |info: &LinearInfo| recipe.method_of(&info.module);
    for info in quantized().filter(|info| learns(method(info))) {
        let own = method(info);
        let apart = |other: &&LinearInfo| other.layer == info.layer && !same(method(other), own);
        let Some(other) = quantized().find(apart) else { continue };
        return error(
            format!("decoder layer {}", info.layer),
            format!("\"{}\" for all of its weights, which it learns together", own.recipe_name()),
            format!("\"{}\" for {}", method(other).recipe_name(), other.module),
            format!("method = \"{}\" there, or keep = [\"{}\"]", own.recipe_name(), other.module),
        );
    }
    Ok(())
}
