//! Every named value that a text may state, by subject.

mod experts;
mod model;
mod numbers;
mod records;
mod speed;
mod training;

use super::value::Compute;

/// Values by subject.
const ALL: [&[(&str, Compute)]; 6] =
    [model::VALUES, experts::VALUES, speed::VALUES, numbers::VALUES, records::VALUES, training::VALUES];

/// Finds what computes a value.
pub(super) fn find(name: &str) -> Option<Compute> {
    all().find(|(known, _)| *known == name).map(|(_, compute)| *compute)
}

/// Returns every value with its name.
pub(super) fn all() -> impl Iterator<Item = &'static (&'static str, Compute)> {
    ALL.into_iter().flatten()
}
