//! The methods and transforms of recipes, one row each.

use std::fmt;

use mantissa_num::{Blocks, Scheme};
use mantissa_options::{TableSpec, spec};

use crate::adaround::AdaRound;
use crate::autoround::AutoRound;
use crate::awq::Awq;
use crate::block_ap::BlockAp;
use crate::brecq::Brecq;
use crate::clip::RtnMse;
use crate::foem::Foem;
use crate::gptq::Gptq;
use crate::hqq::Hqq;
use crate::method::Method;
use crate::omniquant::OmniQuant;
use crate::qtip::method::Qtip;
use crate::rotate::Rotate;
use crate::rtn::method::Rtn;
use crate::scalesweep::{ScaleSweep, SweptGptq};
use crate::smooth::Smooth;
use crate::soar::{self, Soar};
use crate::spin::Spin;
use crate::spqr::Spqr;
use crate::transform::Transform;

/// A method by its name in recipes.
#[derive(Clone, Copy)]
pub struct Registered {
    /// Name.
    pub name: &'static str,
    /// Base method, if this row only changes its defaults; `None` for a method of its own.
    pub variant_of: Option<&'static str>,
    /// One sentence on the method.
    pub summary: &'static str,
    /// The method with its defaults for weights of a scheme.
    pub new: fn(&Scheme) -> Box<dyn Method>,
}

/// Shows the name, which says all. The key by which a killed job is resumed hashes this text, and the address of a
/// function differs in every process.
impl fmt::Debug for Registered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registered").field("name", &self.name).finish_non_exhaustive()
    }
}

/// All methods.
pub const METHODS: [Registered; 20] = [
    row("rtn", "rounds each weight to nearest", |_| Box::new(Rtn)),
    row("rtn-mse", "rounds to nearest, with a searched range for each block", |_| Box::new(RtnMse)),
    row("hqq", "searches zero points under a norm that tolerates outliers", |_| Box::<Hqq>::default()),
    row("gptq", "quantizes column by column and compensates errors in later columns", |_| {
        Box::<Gptq>::default()
    }),
    row("spqr", "runs GPTQ and stores a few outlier weights in f16", |_| Box::<Spqr>::default()),
    row("autoround", "learns rounding and ranges by block reconstruction", |weights| {
        Box::new(AutoRound::of(weights))
    }),
    row("omniquant", "learns the clipping of each group by block reconstruction", |_| {
        Box::<OmniQuant>::default()
    }),
    Registered {
        variant_of: Some("autoround"),
        ..row("autoround-adam", "runs AutoRound with the steps of Adam", |weights| {
            Box::new(AutoRound::adam(weights))
        })
    },
    row("adaround", "learns to round each weight up or down", |_| Box::<AdaRound>::default()),
    row("brecq", "learns to round up or down by block reconstruction", |_| Box::<Brecq>::default()),
    row("block-ap", "trains weights and ranges by block reconstruction (EfficientQAT)", |_| {
        Box::<BlockAp>::default()
    }),
    row("qtip", "codes the rotated weight with a trellis", |_| Box::<Qtip>::default()),
    Registered {
        variant_of: Some("gptq"),
        ..row("gptaq", "runs GPTQ on weights corrected for the drift of their inputs", |_| {
            Box::new(Gptq::gptaq())
        })
    },
    row("foem", "runs GPTQ with the first-order term of the loss", |_| Box::<Foem>::default()),
    row("scalesweep", "searches the FP4 scale of each block, then rounds to nearest", |_| {
        Box::new(ScaleSweep)
    }),
    row("scalesweep-gptq", "runs GPTQ with a search of each FP4 block scale", |_| {
        Box::new(SweptGptq::scalesweep())
    }),
    Registered {
        variant_of: Some("scalesweep-gptq"),
        ..row("scalesweep-gptaq", "runs GPTAQ with a search of each FP4 block scale", |_| {
            Box::new(SweptGptq::scalesweep().gptaq())
        })
    },
    row("soar", "optimizes global and block scales of FP4 jointly, in closed form", |_| Box::new(Soar)),
    row("soar-gptq", "runs GPTQ under FP4 scales in closed form", |_| Box::new(soar::gptq())),
    Registered {
        variant_of: Some("soar-gptq"),
        ..row("soar-gptaq", "runs GPTAQ under FP4 scales in closed form", |_| Box::new(soar::gptq().gptaq()))
    },
];

const fn row(name: &'static str, summary: &'static str, new: fn(&Scheme) -> Box<dyn Method>) -> Registered {
    Registered { name, variant_of: None, summary, new }
}

/// Names of the methods, without variants of another.
pub fn names() -> impl Iterator<Item = &'static str> {
    METHODS.iter().filter(|row| row.variant_of.is_none()).map(|row| row.name)
}

/// The row of `name`.
pub fn find(name: &str) -> Option<&'static Registered> {
    METHODS.iter().find(|row| row.name == name)
}

/// A transform by its name in recipes.
#[derive(Clone, Copy)]
pub struct RegisteredTransform {
    /// Name.
    pub name: &'static str,
    /// One sentence on what it does.
    pub summary: &'static str,
    /// The transform with its defaults.
    pub new: fn() -> Box<dyn Transform>,
}

/// As that of [`Registered`].
impl fmt::Debug for RegisteredTransform {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RegisteredTransform").field("name", &self.name).finish_non_exhaustive()
    }
}

/// All transforms.
pub const TRANSFORMS: [RegisteredTransform; 4] = [
    RegisteredTransform {
        name: "smooth",
        summary: "migrates outliers from activations to weights",
        new: || Box::<Smooth>::default(),
    },
    RegisteredTransform {
        name: "awq",
        summary: "scales weight columns by activation magnitude, and clips groups",
        new: || Box::new(Awq),
    },
    RegisteredTransform {
        name: "rotate",
        summary: "spreads outliers with Hadamard rotations",
        new: || Box::<Rotate>::default(),
    },
    RegisteredTransform {
        name: "spin",
        summary: "spreads outliers with learned rotations",
        new: || Box::<Spin>::default(),
    },
];

/// Tables of recipe files that hold options of transforms, in the order of the rows.
pub fn transform_tables() -> Vec<TableSpec> {
    let specs = |row: &RegisteredTransform| (row.new)().tables().into_iter().map(spec).collect::<Vec<_>>();
    TRANSFORMS.iter().flat_map(specs).collect()
}

/// Tables of recipe files that hold options of methods, each once, in the order of the rows.
pub fn tables() -> Vec<TableSpec> {
    let scheme = Scheme::int_symmetric(4, Blocks::Row);
    let mut tables: Vec<TableSpec> = Vec::new();
    for row in &METHODS {
        for (name, options) in (row.new)(&scheme).tables() {
            if tables.iter().all(|known| known.name != name) {
                tables.push(spec((name, options)));
            }
        }
    }
    tables
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// The text is part of the key of a job, which another process must find again.
    #[test]
    fn no_text_of_a_row_holds_an_address() {
        let scheme: Scheme = "nvfp4".parse().unwrap();
        let mut texts = TRANSFORMS.map(|row| format!("{row:?} {:?}", (row.new)())).to_vec();
        for row in METHODS {
            texts.push(format!("{row:?} {:?}", (row.new)(&scheme)));
        }
        for text in texts {
            assert!(!text.contains("0x"), "{text}");
        }
    }
}
