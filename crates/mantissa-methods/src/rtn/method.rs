//! Rounding to nearest as a method of recipes.

use super::NAME;
use crate::method::{Feature, Method, Work, refused_by_most};

/// Rounding to nearest: each weight by itself.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Rtn;

impl Method for Rtn {
    fn name(&self) -> &'static str {
        NAME
    }

    fn work(&self) -> Work<'_> {
        Work::Nearest
    }

    fn refuses(&self, feature: Feature) -> Option<&'static str> {
        if feature == Feature::GivenScales { None } else { refused_by_most(feature) }
    }
}
