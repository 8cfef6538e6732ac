//! Methods of a recipe: one by default, and the methods of its rules.

use mantissa_methods::e2e;
use mantissa_methods::method::{Needs, Scope, Work};
use mantissa_model::KvPolicy;
use mantissa_num::{Scheme, Source};
use mantissa_store::Dtype;
use mantissa_store::convention::{Container, LinearPlan};

use super::{Method, Recipe};

/// True if both are the same method with the same options.
pub(crate) fn same(a: &dyn Method, b: &dyn Method) -> bool {
    a.recipe_name() == b.recipe_name() && a.settings() == b.settings()
}

/// True if an output stores scales or levels of keys and values under this scheme or policy.
pub(crate) fn stores_cache_scales(scheme: Option<&Scheme>, levels: Option<&KvPolicy>) -> bool {
    scheme.is_some_and(|scheme| scheme.source == Source::Static) || levels.is_some()
}

impl Recipe {
    /// Returns the method of `module`: from the first rule that names it, or the recipe's.
    pub fn method_of(&self, module: &str) -> &dyn Method {
        self.rule_of(module).and_then(|rule| rule.own_method.as_deref()).unwrap_or(&*self.method)
    }

    /// Iterates over the recipe's method and the methods of its rules.
    pub fn methods(&self) -> impl Iterator<Item = &dyn Method> {
        std::iter::once(&*self.method).chain(self.layers.iter().filter_map(|rule| rule.own_method.as_deref()))
    }

    /// True if some rule has another method than the recipe.
    pub fn mixes_methods(&self) -> bool {
        self.methods().any(|method| !same(method, &*self.method))
    }

    /// True if some method has this need.
    pub fn needs(&self, need: impl Fn(Needs) -> bool) -> bool {
        self.methods().any(|method| need(method.needs()))
    }

    /// True if the recipe needs a calibration text in the format that it has by default.
    pub fn needs_calibration(&self) -> bool {
        self.needs_calibration_in(self.container())
    }

    /// True if the recipe needs a calibration text in the format `container`: for its transform, its methods or its training,
    /// or for scales of inputs, keys and values that the output stores.
    pub fn needs_calibration_in(&self, container: Container) -> bool {
        self.tuning.is_some()
            || self.needs(|needs| needs.text)
            || self.transform.as_ref().is_some_and(|transform| transform.needs_text())
            || self.stores_input_scales(container)
            || self.stores_cache_scales()
    }

    /// True if the output stores calibrated input scales.
    pub(crate) fn stores_input_scales(&self, container: Container) -> bool {
        let stores = |(weights, input)| LinearPlan::new("", weights, input, (1, 1)).stores_input_scale();
        container.facts().input_scales && self.pairs().into_iter().any(stores)
    }

    /// True if the output stores scales or levels of keys and values.
    pub(crate) fn stores_cache_scales(&self) -> bool {
        stores_cache_scales(self.kv.as_ref(), self.kv_levels.as_ref())
    }

    /// True if some method learns all weights of a decoder layer together, so that it takes all of a layer or none.
    pub fn learns_layers(&self) -> bool {
        self.methods().any(|method| method.scope() == Scope::Layer)
    }

    /// True if RTN is the only method.
    pub fn rounds_to_nearest(&self) -> bool {
        self.methods().all(|method| matches!(method.work(), Work::Nearest))
    }

    /// True if groups of some layer may be of columns that are not adjacent.
    pub fn follows_order(&self) -> bool {
        self.methods().any(Method::follows_order)
    }

    /// Returns the names of transform, methods and tuning for reports: `awq-rtn`, `gptq+e2e`, `gptq, rtn`.
    pub fn method_name(&self) -> String {
        let transform =
            self.transform.as_ref().map_or(String::new(), |transform| format!("{}-", transform.name()));
        let tuning = self.tuning.map_or(String::new(), |_| format!("+{}", e2e::NAME));
        if !self.mixes_methods() {
            return transform + self.method.recipe_name() + &tuning;
        }
        let mut names: Vec<&str> = Vec::new();
        for name in self.methods().map(Method::recipe_name) {
            if !names.contains(&name) {
                names.push(name);
            }
        }
        names.join(", ") + &tuning
    }

    /// Returns the number of outliers of the weight `[rows, cols]` of `module`.
    pub fn outliers(&self, module: &str, rows: usize, cols: usize) -> usize {
        self.method_of(module).outliers(rows, cols)
    }

    /// Returns the scheme in which `container` stores a weight of `scheme`, quantized by the recipe's method, in a model
    /// of `dtype`.
    pub fn stored_scheme(&self, container: Container, scheme: Scheme, dtype: Dtype) -> Scheme {
        stored_scheme(&*self.method, container, scheme, dtype)
    }

    /// Returns the scheme in which `container` stores the weight of `module`, of `scheme`, in a model of `dtype`.
    pub fn stored_scheme_of(
        &self,
        module: &str,
        container: Container,
        scheme: Scheme,
        dtype: Dtype,
    ) -> Scheme {
        stored_scheme(self.method_of(module), container, scheme, dtype)
    }

    /// Returns the reason why an output cannot have layers of this recipe beside layers of another method; `None` if it
    /// can.
    pub fn stands_apart(&self) -> Option<String> {
        if let Some(transform) = &self.transform {
            return Some(format!("{} changes the whole model", transform.name()));
        }
        if self.tuning.is_some() {
            return Some(format!("{} trains the whole model", e2e::NAME));
        }
        None
    }
}

fn stored_scheme(method: &dyn Method, container: Container, scheme: Scheme, dtype: Dtype) -> Scheme {
    let scheme = container.as_stored(scheme, dtype);
    if container.facts().half_scales { method.stored_scheme(scheme) } else { scheme }
}
