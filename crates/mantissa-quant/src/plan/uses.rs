//! Uses of the calibration text.

use mantissa_methods::method::Work;
use mantissa_num::codec::Codec;
use mantissa_store::convention::Container;

use super::linear::PlannedLinear;
use super::options::Options;
use crate::calibrate::CalibrationSet;
use crate::recipe::Recipe;

/// A use of the calibration text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Use {
    /// The method needs calibration.
    Solve,
    /// Solutions of a method without calibration are compared with RTN.
    ErrorGate,
    /// Searched blocks are weighted by the importance of their columns.
    Importance,
    /// The transform needs calibration.
    Transform,
    /// Scales and norms are trained end to end.
    Tune,
    /// Input scales are stored.
    Inputs,
    /// Scales or levels of keys and values are stored.
    Cache,
}

impl Use {
    /// Returns the uses that `recipe` has for a text, whether or not one is given.
    pub(crate) fn all(
        recipe: &Recipe,
        container: Container,
        linears: &[PlannedLinear],
        options: &Options,
    ) -> Vec<Use> {
        let uses = [
            (Use::Solve, recipe.needs(|needs| needs.text)),
            (Use::ErrorGate, is_judged(recipe, container)),
            (Use::Importance, options.importance.is_none() && uses_importance(recipe, container, linears)),
            (Use::Transform, recipe.transform.as_ref().is_some_and(|transform| transform.needs_text())),
            (Use::Tune, recipe.tuning.is_some()),
            (Use::Inputs, recipe.stores_input_scales(container)),
            (Use::Cache, recipe.stores_cache_scales()),
        ];
        uses.into_iter().filter(|(_, used)| *used).map(|(of, _)| of).collect()
    }
}

impl Options {
    /// Returns the held-out windows under the name of the calibration text.
    pub(crate) fn held_out_set(&self) -> Option<CalibrationSet> {
        let (windows, set) = (&self.held_out, self.calibration.as_ref()?);
        let name = format!("{} (held out)", set.name);
        (!windows.is_empty()).then(|| CalibrationSet::new(name, windows.clone()))
    }
}

/// True if blocks of some layer depend on the importance of columns, if it is given.
pub(crate) fn uses_importance(recipe: &Recipe, container: Container, linears: &[PlannedLinear]) -> bool {
    let rounded = |module: &str| matches!(recipe.method_of(module).work(), Work::Nearest);
    let searched = |linear: &PlannedLinear| {
        let codec = linear.scheme.as_ref().and_then(|s| s.format.codec());
        codec.is_some_and(Codec::takes_importance) && rounded(&linear.info.module)
    };
    container.facts().importance && linears.iter().any(searched)
}

/// True if some method needs no calibration and its solutions can be compared with RTN on a text.
pub(crate) fn is_judged(recipe: &Recipe, container: Container) -> bool {
    recipe.needs(|needs| needs.judged && !needs.text) && !container.facts().square_scales
}
