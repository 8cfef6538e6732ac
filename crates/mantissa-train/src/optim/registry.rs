//! Registry of optimizers.

use mantissa_options::Key;

use super::keys::OptimizerKind;
use super::{adafactor, adamw, lion, muon, sgd, soap};

/// Every optimizer. Steps to add one: ARCHITECTURE.md, "To add something".
const KINDS: [&OptimizerKind; 6] =
    [&adamw::KIND, &sgd::KIND, &adafactor::KIND, &lion::KIND, &muon::KIND, &soap::KIND];

/// Default of `optimizer.kind`.
pub(crate) const FIRST: OptimizerKind = adamw::KIND;

/// Finds an optimizer.
pub(crate) fn kind(name: &str) -> Option<&'static OptimizerKind> {
    KINDS.into_iter().find(|kind| kind.name == name)
}

/// True if the optimizer `kind` uses the setting `key`.
pub fn uses(kind: &str, key: &str) -> bool {
    let uses = |own: &Key| own.name == key && !own.note.retired;
    self::kind(kind).is_some_and(|kind| (kind.keys)().keys().iter().any(uses))
}

/// Iterates over the optimizers.
pub(crate) fn kinds() -> impl Iterator<Item = &'static OptimizerKind> {
    KINDS.into_iter()
}

/// Returns name and description of every optimizer.
pub fn optimizers() -> impl Iterator<Item = (&'static str, &'static str)> {
    KINDS.into_iter().map(|kind| (kind.name, kind.about))
}
