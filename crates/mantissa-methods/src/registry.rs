//! The methods and transforms of recipes, one row each.

use mantissa_num::{Blocks, Scheme};

use crate::adaround::AdaRound;
use crate::autoround::AutoRound;
use crate::awq::Awq;
use crate::clip::RtnMse;
use crate::foem::Foem;
use crate::gptq::Gptq;
use crate::hqq::Hqq;
use crate::method::Method;
use crate::options::TableSpec;
use crate::qtip::method::Qtip;
use crate::rotate::Rotate;
use crate::rtn::method::Rtn;
use crate::scalesweep::{ScaleSweep, ScaleSweepGptq};
use crate::smooth::Smooth;
use crate::soar::{Soar, SoarGptq};
use crate::spin::Spin;
use crate::spqr::Spqr;
use crate::transform::Transform;

/// A method by its name in recipes.
#[derive(Clone, Copy, Debug)]
pub struct Registered {
    /// Name.
    pub name: &'static str,
    /// The method whose options these are other defaults of; `None` for a method of its own.
    pub variant_of: Option<&'static str>,
    /// One sentence on what it does.
    pub summary: &'static str,
    /// The method with its defaults for weights of a scheme.
    pub new: fn(&Scheme) -> Box<dyn Method>,
}

/// All methods.
pub const METHODS: [Registered; 16] = [
    row("rtn", "rounds to nearest, each weight by itself", |_| Box::new(Rtn)),
    row("rtn-mse", "rounds to nearest under the range of each block that loses least", |_| Box::new(RtnMse)),
    row("hqq", "finds zero points under which few weights are far off", |_| Box::<Hqq>::default()),
    row("gptq", "quantizes column by column, later columns make up for earlier errors", |_| {
        Box::<Gptq>::default()
    }),
    row("spqr", "runs GPTQ with a few weights beside the codes, in f16", |_| Box::<Spqr>::default()),
    row("autoround", "learns rounding and ranges by block reconstruction", |weights| {
        Box::new(AutoRound::of(weights))
    }),
    row("adaround", "learns for each weight whether it is rounded up or down", |_| {
        Box::<AdaRound>::default()
    }),
    row("qtip", "codes the rotated weight by paths through a trellis", |_| Box::<Qtip>::default()),
    Registered {
        variant_of: Some("gptq"),
        ..row("gptaq", "runs GPTQ with weights that make up for the drift of their inputs", |_| {
            Box::new(Gptq::gptaq())
        })
    },
    row("foem", "runs GPTQ with the first-order term of what weights have made up for", |_| {
        Box::<Foem>::default()
    }),
    row("scalesweep", "rounds to nearest under the best of all FP4 block scales", |_| Box::new(ScaleSweep)),
    row("scalesweep-gptq", "runs GPTQ and sweeps the scale of each FP4 block inside", |_| {
        Box::<ScaleSweepGptq>::default()
    }),
    Registered {
        variant_of: Some("scalesweep-gptq"),
        ..row("scalesweep-gptaq", "runs GPTAQ and sweeps the scale of each FP4 block inside", |_| {
            Box::new(ScaleSweepGptq::gptaq())
        })
    },
    row("soar", "finds global and block scales of FP4 together, in closed form", |_| Box::new(Soar)),
    row("soar-gptq", "runs GPTQ under FP4 scales in closed form", |_| Box::<SoarGptq>::default()),
    Registered {
        variant_of: Some("soar-gptq"),
        ..row("soar-gptaq", "runs GPTAQ under FP4 scales in closed form", |_| Box::new(SoarGptq::gptaq()))
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
#[derive(Clone, Copy, Debug)]
pub struct RegisteredTransform {
    /// Name.
    pub name: &'static str,
    /// One sentence on what it does.
    pub summary: &'static str,
    /// The transform with its defaults.
    pub new: fn() -> Box<dyn Transform>,
}

/// All transforms.
pub const TRANSFORMS: [RegisteredTransform; 4] = [
    RegisteredTransform {
        name: "smooth",
        summary: "moves the range of activations into the weights",
        new: || Box::<Smooth>::default(),
    },
    RegisteredTransform {
        name: "awq",
        summary: "scales up the columns of weights that read large channels, and clips groups",
        new: || Box::new(Awq),
    },
    RegisteredTransform {
        name: "rotate",
        summary: "spreads outliers by Hadamard rotations",
        new: || Box::<Rotate>::default(),
    },
    RegisteredTransform {
        name: "spin",
        summary: "spreads outliers by learned rotations",
        new: || Box::<Spin>::default(),
    },
];

/// Tables of recipe files that hold options of transforms, in the order of the rows.
pub fn transform_tables() -> Vec<TableSpec> {
    TRANSFORMS.iter().flat_map(|row| (row.new)().tables()).copied().collect()
}

/// Tables of recipe files that hold options of methods, each once, in the order of the rows.
pub fn tables() -> Vec<TableSpec> {
    let scheme = Scheme::int_symmetric(4, Blocks::Row);
    let mut tables: Vec<TableSpec> = Vec::new();
    for table in METHODS.iter().flat_map(|row| (row.new)(&scheme).tables()) {
        if tables.iter().all(|known| known.name != table.name) {
            tables.push(*table);
        }
    }
    tables
}
