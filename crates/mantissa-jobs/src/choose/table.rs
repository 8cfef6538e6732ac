//! Recipes with a measured KL, from which `quantize --for ENGINE` chooses.
//!
//! All figures are KL(source ‖ quantized) in nats/token on ref-8m's `eval_mix`, calibrated on its 128 windows
//! (docs/results/weights.md, "Recipes by engine"). Methods that need a backward pass (AutoRound, BRECQ) are left out: they lose
//! less at 4 bits, but take 4 to 40 times as long.

use mantissa_plan::contract::Server;

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
    /// True if the recipe is offered only where no other of its bits fits: smaller groups or blocks of 32, most of which take
    /// half a bit or a bit more, divide rows that groups of 128 or blocks of 256 do not.
    pub spare: bool,
    /// Least compute capability times ten of a GPU on which the recipe is offered; `None` offers it everywhere.
    pub least_sm: Option<u32>,
}

impl Candidate {
    /// Describes a recipe without a figure.
    pub const fn unmeasured(recipe: &'static str, format: &'static str, bits: u32) -> Self {
        row(recipe, format, bits, f64::NAN)
    }

    /// True if users of `server` keep models in the format.
    pub fn is_usual_in(&self, server: Server) -> bool {
        server.is_usual_reader(self.format)
    }
}

const fn row(recipe: &'static str, format: &'static str, bits: u32, kl: f64) -> Candidate {
    Candidate { recipe, format, bits, kl, spare: false, least_sm: None }
}

/// Offers a recipe only where no other fits.
const fn spare(recipe: &'static str, format: &'static str, bits: u32, kl: f64) -> Candidate {
    Candidate { spare: true, ..row(recipe, format, bits, kl) }
}

/// Offers a recipe only where the GPU multiplies its format natively.
const fn native(recipe: &'static str, format: &'static str, bits: u32, kl: f64, sm: u32) -> Candidate {
    Candidate { least_sm: Some(sm), ..row(recipe, format, bits, kl) }
}

/// Compute capability times ten of the first GPUs that multiply FP4.
const BLACKWELL: u32 = 100;

const CT: &str = "compressed-tensors";

/// Every candidate; of equally good ones the first is chosen.
pub const CANDIDATES: [Candidate; 33] = [
    row("rtn-int8-g64-asym:minmax", "mlx", 8, 0.00003),
    row("rtn-int8-channel", CT, 8, 0.00005),
    row("rtn-int8-g128", "exl2", 8, 0.00005),
    row("q8_0", "gguf", 8, 0.00007),
    row("mxfp8", CT, 8, 0.00082),
    row("fp8-dynamic", CT, 8, 0.00184),
    row("rtn-int6-g64-asym:minmax", "mlx", 6, 0.00044),
    row("q6_k", "gguf", 6, 0.00061),
    row("rtn-int6-g128", "exl2", 6, 0.00078),
    row("q5_k_m", "gguf", 5, 0.00130),
    row("rtn-int5-g64-asym:minmax", "mlx", 5, 0.00178),
    row("rtn-int5-g128", "exl2", 5, 0.00324),
    native("scalesweep-gptaq-nvfp4", CT, 4, 0.00272, BLACKWELL),
    native("gptaq-nvfp4", CT, 4, 0.00305, BLACKWELL),
    row("gptaq-int4-g128-asym", CT, 4, 0.00399),
    row("q4_k_m", "gguf", 4, 0.00439),
    row("gptaq-int4-g128", CT, 4, 0.00448),
    row("gptaq-int4-g128", "modelopt", 4, 0.00448),
    row("gptq-int4-g128", "exl2", 4, 0.00502),
    row("hqq-int4-g64", "mlx", 4, 0.00637),
    spare("gptaq-int4-g32-asym", CT, 4, 0.00262),
    spare("gptaq-int4-g32", CT, 4, 0.00330),
    spare("gptaq-int4-g32", "modelopt", 4, 0.00330),
    spare("gptq-int4-g32", "exl2", 4, 0.00393),
    spare("hqq-int4-g32", "mlx", 4, 0.00454),
    spare("iq4_nl", "gguf", 4, 0.00597),
    spare("q5_0", "gguf", 5, 0.00232),
    spare("rtn-int8-g32-asym:minmax", "mlx", 8, 0.00002),
    spare("rtn-int8-g32", "exl2", 8, 0.00003),
    row("qtip-trellis3", "native", 3, 0.00714),
    row("q3_k_m", "gguf", 3, 0.01632),
    row("qtip-trellis2", "native", 2, 0.03503),
    row("q2_k", "gguf", 2, 0.06380),
];

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use mantissa_quant::Recipe;
    use mantissa_store::convention::Container;

    /// The page writes `.00448 ± .00009` where the table has 0.00448.
    #[test]
    fn every_candidate_exists_and_its_figure_is_on_the_page() {
        let page = include_str!("../../../../docs/results/weights.md");
        let section = page.split("## Recipes by engine").nth(1).unwrap().split("\n## ").next().unwrap();
        for candidate in CANDIDATES {
            let Candidate { recipe, format, bits, kl, .. } = candidate;
            assert!(Recipe::load(recipe).is_ok() && Container::named(format).is_some(), "{recipe}");
            let figure = format!("{kl:.5}");
            let stated = section.lines().any(|line| {
                line.starts_with(&format!("| {bits} | `{recipe}`"))
                    && line.contains(format)
                    && line.contains(figure.trim_start_matches('0'))
            });
            assert!(stated, "{recipe} in {format}: {figure}");
        }
    }
}
