//! Measured recipes that `quantize --for ENGINE` chooses from. Methods that need a backward pass (AutoRound, BRECQ) are left
//! out: they lose less at 4 bits, but take 4 to 40 times as long.

use crate::figures::{Figure, MODELS, figure};

/// Recipe in a checkpoint format, offered at a number of bits.
#[derive(Clone, Copy, Debug)]
pub struct Offer {
    /// Recipe.
    pub recipe: &'static str,
    /// Checkpoint format.
    pub format: &'static str,
    /// Nominal bits per weight, as `--bits` names them.
    pub bits: u32,
    /// True if the recipe is offered only where no other of its bits fits: smaller groups or blocks of 32, most of which take
    /// half a bit or a bit more, divide rows that groups of 128 or blocks of 256 do not.
    pub spare: bool,
    /// Least compute capability times ten of a GPU on which the recipe is offered; `None` offers it everywhere.
    pub least_sm: Option<u32>,
}

impl Offer {
    /// Returns the measured figure with the larger KL, by which [`recommend`](crate::recommend) ranks too.
    pub fn figure(&self) -> Option<&'static Figure> {
        let figures = MODELS.into_iter().filter_map(|model| figure(model, self.recipe, Some(self.format)));
        figures.max_by(|a, b| a.kl.total_cmp(&b.kl))
    }

    /// Returns the KL of [`figure`](Self::figure) in nats/token; infinite if not measured.
    pub fn kl(&self) -> f64 {
        self.figure().map_or(f64::INFINITY, |figure| figure.kl)
    }
}

/// Offers `recipe` in `format` at `bits` bits per weight.
pub const fn offer(recipe: &'static str, format: &'static str, bits: u32) -> Offer {
    Offer { recipe, format, bits, spare: false, least_sm: None }
}

/// Offers a recipe only where no other fits.
const fn spare(recipe: &'static str, format: &'static str, bits: u32) -> Offer {
    Offer { spare: true, ..offer(recipe, format, bits) }
}

/// Offers a recipe only where the GPU multiplies its format natively.
const fn native(recipe: &'static str, format: &'static str, bits: u32, sm: u32) -> Offer {
    Offer { least_sm: Some(sm), ..offer(recipe, format, bits) }
}

/// Compute capability times ten of the first GPUs that multiply FP4.
const BLACKWELL: u32 = 100;

const CT: &str = "compressed-tensors";

/// Every offer; of equally good ones the first is chosen.
pub const OFFERS: [Offer; 33] = [
    offer("rtn-int8-g64-asym:minmax", "mlx", 8),
    offer("rtn-int8-channel", CT, 8),
    offer("rtn-int8-g128", "exl2", 8),
    offer("q8_0", "gguf", 8),
    offer("mxfp8", CT, 8),
    offer("fp8-dynamic", CT, 8),
    offer("rtn-int6-g64-asym:minmax", "mlx", 6),
    offer("q6_k", "gguf", 6),
    offer("rtn-int6-g128", "exl2", 6),
    offer("q5_k_m", "gguf", 5),
    offer("rtn-int5-g64-asym:minmax", "mlx", 5),
    offer("rtn-int5-g128", "exl2", 5),
    native("scalesweep-gptaq-nvfp4", CT, 4, BLACKWELL),
    native("gptaq-nvfp4", CT, 4, BLACKWELL),
    offer("gptaq-int4-g128-asym", CT, 4),
    offer("q4_k_m", "gguf", 4),
    offer("gptaq-int4-g128", CT, 4),
    offer("gptaq-int4-g128", "modelopt", 4),
    offer("gptq-int4-g128", "exl2", 4),
    offer("hqq-int4-g64", "mlx", 4),
    spare("gptaq-int4-g32-asym", CT, 4),
    spare("gptaq-int4-g32", CT, 4),
    spare("gptaq-int4-g32", "modelopt", 4),
    spare("gptq-int4-g32", "exl2", 4),
    spare("hqq-int4-g32", "mlx", 4),
    spare("iq4_nl", "gguf", 4),
    spare("q5_0", "gguf", 5),
    spare("rtn-int8-g32-asym:minmax", "mlx", 8),
    spare("rtn-int8-g32", "exl2", 8),
    offer("qtip-trellis3", "native", 3),
    offer("q3_k_m", "gguf", 3),
    offer("qtip-trellis2", "native", 2),
    offer("q2_k", "gguf", 2),
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::precision::PRECISIONS;

    #[test]
    fn every_offer_is_measured() {
        for offer in OFFERS {
            assert!(offer.kl().is_finite(), "{offer:?}");
        }
    }

    /// `plan` and `quantize --for` name one recipe for one format at 4 bits and more.
    #[test]
    fn plan_recommends_what_is_offered() {
        for precision in PRECISIONS.iter().filter(|p| p.convention == "gguf" && p.name != "IQ4_XS") {
            let recipe = precision.recipe.unwrap_or_default();
            assert!(OFFERS.iter().any(|offer| offer.recipe == recipe), "{recipe}");
        }
        for (name, recipe) in
            [("W4A16 NVFP4", "scalesweep-gptaq-nvfp4"), ("W4A16 INT4", "gptaq-int4-g128-asym")]
        {
            let planned = PRECISIONS.iter().find(|p| p.name == name).and_then(|p| p.recipe);
            assert_eq!(planned, Some(recipe));
            assert!(OFFERS.iter().any(|offer| offer.recipe == recipe));
        }
    }
}
