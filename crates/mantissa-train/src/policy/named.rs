//! Published recipes below 16 bits, as the tables that `mantissa train --show-policy` prints and a run may change.
//!
//! Shared by all: f32 weights, which are the master copy and are rounded anew for every matmul, f32 gradients and
//! sums, and embeddings, head, norms and attention outside the recipe (bf16 head, the rest f32).

/// A recipe with its table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NamedPolicy {
    /// Name, such as `nvfp4`.
    pub name: &'static str,
    /// Description with its source.
    pub about: &'static str,
    /// TOML of [`PolicyTable`](super::PolicyTable).
    pub table: &'static str,
}

/// Returns all recipes.
pub fn recipes() -> &'static [NamedPolicy] {
    &RECIPES
}

const RECIPES: [NamedPolicy; 16] = [
    NamedPolicy {
        name: "fp8-delayed",
        about: "FP8 with delayed scaling (Transformer Engine's DelayedScaling): E4M3 in fprop, E5M2 for output \
                gradients, a scale per tensor from the largest amax of 1024 steps",
        table: r#"
            head = "bf16"
            fprop = { x = "fp8-e4m3-tensor@delayed1024", w = "fp8-e4m3-tensor@delayed1024" }
            dgrad = { dy = "fp8-e5m2-tensor@delayed1024", w = "fp8-e4m3-tensor@delayed1024" }
            wgrad = { dy = "fp8-e5m2-tensor@delayed1024", x = "fp8-e4m3-tensor@delayed1024" }
        "#,
    },
    NamedPolicy {
        name: "fp8-current",
        about: "FP8 with current scaling (torchao's tensorwise float8, Transformer Engine's Float8CurrentScaling): \
                E4M3 in fprop, E5M2 for output gradients, a scale per tensor from its own amax",
        table: r#"
            head = "bf16"
            fprop = { x = "fp8-e4m3-tensor", w = "fp8-e4m3-tensor" }
            dgrad = { dy = "fp8-e5m2-tensor", w = "fp8-e4m3-tensor" }
            wgrad = { dy = "fp8-e5m2-tensor", x = "fp8-e4m3-tensor" }
        "#,
    },
    NamedPolicy {
        name: "fp8-rowwise",
        about: "FP8 rowwise (torchao): E4M3 for all operands, a power-of-two scale for each line along the \
                contraction axis",
        table: r#"
            head = "bf16"
            fprop = { x = { scheme = "fp8-e4m3-token", scales = "power-of-two" }, w = { scheme = "fp8-e4m3-channel", scales = "power-of-two" } }
            dgrad = { dy = { scheme = "fp8-e4m3-token", scales = "power-of-two" }, w = { scheme = "fp8-e4m3-channel", scales = "power-of-two" } }
            wgrad = { dy = { scheme = "fp8-e4m3-token", scales = "power-of-two" }, x = { scheme = "fp8-e4m3-token", scales = "power-of-two" } }
        "#,
    },
    NamedPolicy {
        name: "fp8-blockwise",
        about: "FP8 blockwise (DeepSeek-V3, arXiv 2412.19437, section 3.3): E4M3, a scale for 1 x 128 values of X \
                and dY and for 128 x 128 of W, partial sums in f32",
        table: r#"
            head = "bf16"
            fprop = { x = "fp8-e4m3-t1x128:floor1e-12", w = "fp8-e4m3-t128x128:floor1e-12" }
            dgrad = { dy = "fp8-e4m3-t1x128:floor1e-12", w = "fp8-e4m3-t128x128:floor1e-12" }
            wgrad = { dy = "fp8-e4m3-t1x128:floor1e-12", x = "fp8-e4m3-t1x128:floor1e-12" }
        "#,
    },
    NamedPolicy {
        name: "mxfp8",
        about: "MXFP8 (NVIDIA, arXiv 2506.08027): E4M3 for all operands, a power-of-two scale for 32 values, \
                rounded up",
        table: r#"
            head = "bf16"
            fprop = { x = "mxfp8-e4m3:rceil", w = "mxfp8-e4m3:rceil" }
            dgrad = { dy = "mxfp8-e4m3:rceil", w = "mxfp8-e4m3:rceil" }
            wgrad = { dy = "mxfp8-e4m3:rceil", x = "mxfp8-e4m3:rceil" }
        "#,
    },
    NamedPolicy {
        name: "nvfp4",
        about: "NVFP4 pretraining (NVIDIA, arXiv 2509.25149): 16 x 16 blocks of W, 1 x 16 of X and dY, stochastic \
                rounding of dY, random Hadamard transform in wgrad, about 16 % of the layers in bf16",
        table: r#"
            head = "bf16"
            fprop = { x = "nvfp4:te", w = "nvfp4:te-2d" }
            dgrad = { dy = { scheme = "nvfp4:te", round = "stochastic" }, w = "nvfp4:te-2d" }
            wgrad = { dy = { scheme = "nvfp4:te", round = "stochastic" }, x = "nvfp4:te", hadamard = { order = 16, signs = "te" } }
            keep = { first = 0.03, last = 0.13, dtype = "bf16" }
        "#,
    },
    NamedPolicy {
        name: "nvfp4-4over6",
        about: "NVFP4 with four-over-six scales in the forward (Cook et al. 2026, arXiv 2512.02010); 1 x 16 blocks \
                also of W, which four-over-six needs, otherwise as nvfp4",
        table: r#"
            head = "bf16"
            fprop = { x = "nvfp4:4over6", w = "nvfp4:4over6" }
            dgrad = { dy = { scheme = "nvfp4:te", round = "stochastic" }, w = "nvfp4:4over6" }
            wgrad = { dy = { scheme = "nvfp4:te", round = "stochastic" }, x = "nvfp4:te", hadamard = { order = 16, signs = "te" } }
            keep = { first = 0.03, last = 0.13, dtype = "bf16" }
        "#,
    },
    NamedPolicy {
        name: "tetrajet2",
        about: "TetraJet-v2's matmuls as Quartet II evaluates them: NVFP4 1 x 16 to nearest in the forward; in the \
                backward all operands rotated by 32 with new signs in each step and rounded stochastically under \
                scales 17/16 larger, from the forward's values. Without OsciReset and OutControl",
        table: r#"
            head = "bf16"
            fprop = { x = "nvfp4:te", w = "nvfp4:te" }
            dgrad.dy = { scheme = "nvfp4:te", round = "stochastic", headroom = 1.0625 }
            dgrad.w = { scheme = "nvfp4:te", round = "stochastic", headroom = 1.0625, source = "forward" }
            dgrad.hadamard = { order = 32, signs = "step" }
            wgrad.dy = { scheme = "nvfp4:te", round = "stochastic", headroom = 1.0625 }
            wgrad.x = { scheme = "nvfp4:te", round = "stochastic", headroom = 1.0625, source = "forward" }
            wgrad.hadamard = { order = 32, signs = "step" }
        "#,
    },
    NamedPolicy {
        name: "fp4-all-the-way",
        about: "FP4 All the Way (Chmiel et al. 2025, arXiv 2505.19115): NVFP4 for all operands, to nearest in the \
                forward, stochastic in backward and update",
        table: r#"
            head = "bf16"
            fprop = { x = "nvfp4:te", w = "nvfp4:te" }
            dgrad = { dy = { scheme = "nvfp4:te", round = "stochastic" }, w = { scheme = "nvfp4:te", round = "stochastic" } }
            wgrad = { dy = { scheme = "nvfp4:te", round = "stochastic" }, x = { scheme = "nvfp4:te", round = "stochastic" } }
        "#,
    },
    NamedPolicy {
        name: "quartet",
        about: "Quartet (Castro et al. 2025, arXiv 2505.14669): MXFP4 for all operands; in the forward rotated by 32, to \
                nearest under scales from the standard deviation, without gradients for clipped values; in the backward \
                from the forward's values, rotated with new signs in each step, rounded stochastically at 3/4 of their \
                size, so that nothing is clipped",
        table: r#"
            head = "bf16"
            fprop.x = { scheme = "mxfp4", scales = "deviation", mask = true }
            fprop.w = { scheme = "mxfp4", scales = "deviation", mask = true }
            fprop.hadamard = { order = 32 }
            dgrad.dy = { scheme = "mxfp4", round = "stochastic", headroom = 1.3333334 }
            dgrad.w = { scheme = "mxfp4", round = "stochastic", headroom = 1.3333334, source = "forward" }
            dgrad.hadamard = { order = 32, signs = "step" }
            wgrad.dy = { scheme = "mxfp4", round = "stochastic", headroom = 1.3333334 }
            wgrad.x = { scheme = "mxfp4", round = "stochastic", headroom = 1.3333334, source = "forward" }
            wgrad.hadamard = { order = 32, signs = "step" }
        "#,
    },
    NamedPolicy {
        name: "quartet2",
        about: "Quartet II (Panferov et al. 2026, arXiv 2601.22813): NVFP4 with four-over-six scales in fprop; dgrad and \
                wgrad by MS-EDEN of values rotated with new signs in each step, from the forward's operands",
        table: r#"
            head = "bf16"
            fprop = { x = "nvfp4:4over6", w = "nvfp4:4over6" }
            dgrad.dy = { scheme = "nvfp4:4over6", scales = "eden", headroom = 0.988125 }
            dgrad.w = { scheme = "nvfp4:4over6", scales = "eden", headroom = 0.988125, source = "forward" }
            dgrad.hadamard = { order = 128, signs = "step" }
            wgrad.dy = { scheme = "nvfp4:4over6", scales = "eden", headroom = 0.988125 }
            wgrad.x = { scheme = "nvfp4:4over6", scales = "eden", headroom = 0.988125, source = "forward" }
            wgrad.hadamard = { order = 128, signs = "step" }
        "#,
    },
    NamedPolicy {
        name: "int8-rowwise",
        about: "INT8 mixed precision (torchao): all operands with a scale for each line along the contraction axis, \
                to nearest",
        table: r#"
            head = "bf16"
            fprop = { x = "int8-token:restricted", w = "int8-channel:restricted" }
            dgrad = { dy = "int8-token:restricted", w = "int8-channel:restricted" }
            wgrad = { dy = "int8-token:restricted", x = "int8-token:restricted" }
        "#,
    },
    NamedPolicy {
        name: "int8-switchback",
        about: "SwitchBack (Wortsman et al. 2023, arXiv 2304.13013): INT8 with a scale per token of X and dY and one \
                for W in fprop and dgrad, bf16 in wgrad",
        table: r#"
            head = "bf16"
            fprop = { x = "int8-token:restricted", w = "int8-tensor:restricted" }
            dgrad = { dy = "int8-token:restricted", w = "int8-tensor:restricted" }
            wgrad = { dy = "bf16", x = "bf16" }
        "#,
    },
    NamedPolicy {
        name: "int8-jetfire",
        about: "Jetfire's matmuls (Xi et al. 2024, arXiv 2403.12422): INT8 in blocks of 32 x 32, stochastic rounding \
                of dY. Values between operators stay f32",
        table: r#"
            head = "bf16"
            fprop = { x = "int8-t32x32:restricted", w = "int8-t32x32:restricted" }
            dgrad = { dy = { scheme = "int8-t32x32:restricted", round = "stochastic" }, w = "int8-t32x32:restricted" }
            wgrad = { dy = { scheme = "int8-t32x32:restricted", round = "stochastic" }, x = "int8-t32x32:restricted" }
        "#,
    },
    NamedPolicy {
        name: "int8-sr",
        about: "INT8 quantized training (torchao): weights of linear layers are INT8 with a scale per row, without a master \
                copy, every update rounded stochastically; bf16 operands",
        table: r#"
            head = "bf16"
            master = "int8"
            fprop = { x = "bf16", w = "bf16" }
            dgrad = { dy = "bf16", w = "bf16" }
            wgrad = { dy = "bf16", x = "bf16" }
        "#,
    },
    NamedPolicy {
        name: "ternary",
        about: "BitNet b1.58 (Ma et al. 2024, arXiv 2402.17764): weights -1, 0 and 1 under the mean magnitude of the \
                tensor, INT8 inputs per token, straight-through gradients in bf16",
        table: r#"
            head = "bf16"
            fprop = { x = "int8-token:restricted", w = "ternary-tensor" }
            dgrad = { dy = "bf16", w = { scheme = "bf16", source = "forward" } }
            wgrad = { dy = "bf16", x = { scheme = "bf16", source = "forward" } }
        "#,
    },
];
