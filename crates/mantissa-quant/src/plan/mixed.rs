//! Methods of a plan that differ from its recipe's.

use std::collections::BTreeMap;
use std::sync::Arc;

use mantissa_methods::Method;

use super::linear::PlannedLinear;
use crate::recipe::Recipe;
use crate::recipe::methods::same;

/// Methods that differ from the recipe's, by module. Equal methods are one value.
#[derive(Clone, Debug, Default)]
pub(crate) struct Methods {
    pub(super) others: Vec<Arc<dyn Method>>,
    /// Index in `others`.
    pub(super) of: BTreeMap<String, usize>,
}

impl Methods {
    /// Finds the methods of the quantized layers that differ from the recipe's.
    pub(crate) fn of(recipe: &Recipe, linears: &[PlannedLinear]) -> Self {
        let mut found = Methods::default();
        if !recipe.mixes_methods() {
            return found;
        }
        for PlannedLinear { info, .. } in linears.iter().filter(|linear| linear.scheme.is_some()) {
            let own = recipe.rule_of(&info.module).and_then(|rule| rule.own_method.as_ref());
            let Some(own) = own.filter(|own| !same(&***own, &*recipe.method)) else { continue };
            let known = found.others.iter().position(|other| same(&**other, &**own));
            let at = known.unwrap_or_else(|| {
                found.others.push(Arc::clone(own));
                found.others.len() - 1
            });
            found.of.insert(info.module.clone(), at);
        }
        found
    }
}

/// Number of a method in a plan: 0 for the recipe's.
pub(crate) type MethodId = usize;
