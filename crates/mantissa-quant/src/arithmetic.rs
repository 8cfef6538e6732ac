//! Arithmetic of a plan on its weights, to predict the time of a run.

use mantissa_methods::method::Arithmetic;
use mantissa_model::LinearInfo;
use mantissa_num::Scheme;

use crate::calibrate::CalibrationSet;
use crate::plan::Plan;
use crate::{memory, transform};

impl Plan {
    /// Returns the arithmetic on a layer of `scheme`: that of the transform, and that of the method.
    pub fn arithmetic(&self, info: &LinearInfo, scheme: &Scheme) -> [Arithmetic; 2] {
        let extent = memory::extent(self, info, scheme);
        let transform = self.job.recipe().and_then(|recipe| recipe.transform.as_ref());
        let tokens = self.calibration().map_or(0, CalibrationSet::tokens).min(transform::TOKENS);
        [
            transform.map_or_else(Arithmetic::default, |transform| transform.arithmetic(&extent, tokens)),
            self.method_of(info).map_or_else(Arithmetic::default, |method| method.arithmetic(&extent)),
        ]
    }
}
