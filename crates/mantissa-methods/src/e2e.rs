//! End-to-end training of a quantized model's scales, offsets and norms (E2E-QP of EfficientQAT: Chen et al. 2024,
//! arXiv:2407.11062, section 3.3) as the last step of recipes, after the method. The pipeline trains them.

use mantissa_options::{Count, Number, OneOf, Seed, options};

/// Name in recipes: `METHOD-SCHEME+e2e`.
pub const NAME: &str = "e2e";

/// Unquantized parameters that are trained with the scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum With {
    /// None.
    Nothing,
    /// Norm weights.
    Norms,
    /// Norm weights, and embedding and head where they are unquantized (QuIP#: Tseng et al. 2024, arXiv:2402.04396,
    /// section 5, trains the head).
    Tables,
}

/// Choices of `with` by name.
const WITH: [(&str, With); 3] =
    [("nothing", With::Nothing), ("norms", With::Norms), ("tables", With::Tables)];

options! {
    /// Options of the training.
    #[derive(Clone, Copy, Debug, PartialEq)]
    pub struct EndToEnd {
        /// Passes over the calibration windows.
        epochs: usize = 8, Count(10_000);
        /// First step of a scale, relative to the scale; decays to 0 along half a cosine.
        rate: f32 = 0.01, Number(1.0);
        /// Tokens of a step: whole windows, at least one.
        batch_tokens: usize = 1024, Count(1 << 24);
        /// Seed of the order of windows.
        seed: u64 = 0, Seed;
        /// Unquantized parameters that are trained with the scales; tables: norms, embedding and head.
        with: With = With::Norms, OneOf(&WITH);
    }
}
