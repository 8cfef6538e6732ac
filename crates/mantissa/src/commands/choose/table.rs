//! Recipes with a measured KL, from which `quantize --for ENGINE` chooses.
//!
//! All figures are KL(source ‖ quantized) in nats/token on ref-8m's `eval_mix`, calibrated on its 128 windows
//! (docs/results/weights.md, "Recipes by engine"). Methods that need a backward pass (AutoRound, BRECQ) are left out: they lose
//! less at 4 bits, but take 4 to 40 times as long.

/// Page with the figures.
pub const SOURCE: &str = "docs/results/weights.md";

/// Model of the figures.
pub const MODEL: &str = "ref-8m";

/// Measured recipe.
#[derive(Clone, Copy, Debug)]
pub struct Candidate {
    /// Recipe.
    pub recipe: &'static str,
    /// Checkpoint format.
    pub format: &'static str,
    /// Nominal bits per weight, as `--bits` names them.
    pub bits: u32,
    /// Measured KL in nats/token.
    pub kl: f64,
    /// Least compute capability times ten of a GPU on which the recipe is offered; `None` offers it everywhere.
    pub least_sm: Option<u32>,
}

const fn row(recipe: &'static str, format: &'static str, bits: u32, kl: f64) -> Candidate {
    Candidate { recipe, format, bits, kl, least_sm: None }
}

/// Offers a recipe only where the GPU multiplies its format natively.
const fn native(recipe: &'static str, format: &'static str, bits: u32, kl: f64, sm: u32) -> Candidate {
    Candidate { recipe, format, bits, kl, least_sm: Some(sm) }
}

/// Compute capability times ten of the first GPUs that multiply FP4.
const BLACKWELL: u32 = 100;

const CT: &str = "compressed-tensors";

/// Every candidate; of equally good ones the first is chosen.
pub const CANDIDATES: [Candidate; 8] = [
    row("rtn-int8-channel", CT, 8, 0.00005),
    row("mxfp8", CT, 8, 0.00082),
    row("fp8-dynamic", CT, 8, 0.00184),
    native("gptaq-nvfp4", CT, 4, 0.00305, BLACKWELL),
    row("gptaq-int4-g128-asym", CT, 4, 0.00399),
    row("gptaq-int4-g128", CT, 4, 0.00448),
    row("qtip-trellis3", "native", 3, 0.00714),
    row("qtip-trellis2", "native", 2, 0.03503),
];
