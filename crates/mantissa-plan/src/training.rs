//! Bytes of training: weights, gradients, optimizer state, activations; sharded, recomputed, or with adapters.
//!
//! Sources: ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054, section 3), Megatron-LM `docs/source/api-guide/dist_optimizer.md`,
//! activation memory of Korthikanti et al. 2022 (arXiv 2205.05198, table 2), QLoRA (Dettmers et al. 2023, arXiv 2305.14314).

mod exchange;
mod policy;

use mantissa_num::parse_weight;
use serde::Serialize;

use crate::shape::ModelShape;

pub use exchange::{Exchange, exchanges, parse_link};
pub use policy::{PolicyStorage, policy_storage};

/// Bytes per parameter of a training recipe.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct TrainingRecipe {
    /// Name.
    pub name: &'static str,
    /// Description.
    pub about: &'static str,
    /// Policy of `mantissa train` with the same products, if it has one; what it stores is another matter:
    /// [`TrainingRecipe::trainer_bytes`].
    pub policy: Option<&'static str>,
    /// Weights that the forward reads.
    pub weights: f64,
    /// Copies of them in another format or layout.
    pub copies: f64,
    /// Gradients.
    pub gradients: f64,
    /// Second copy of the gradients that the optimizer makes.
    pub optimizer_gradients: f64,
    /// Master weights.
    pub master: f64,
    /// Moments of the optimizer.
    pub moments: f64,
    /// Source.
    pub source: &'static str,
}

const ZERO: &str = "ZeRO, arXiv 1910.02054, section 3.1";
const MEGATRON: &str = "Megatron-LM dist_optimizer.md";
const TORCHAO: &str = "torchao low-bit optimizers; bitsandbytes (arXiv 2110.02861)";

const fn recipe(
    name: &'static str,
    about: &'static str,
    policy: Option<&'static str>,
    [weights, copies, gradients, optimizer_gradients, master, moments]: [f64; 6],
    source: &'static str,
) -> TrainingRecipe {
    TrainingRecipe {
        name,
        about,
        policy,
        weights,
        copies,
        gradients,
        optimizer_gradients,
        master,
        moments,
        source,
    }
}

/// Bytes of two moments of 8 bits in blocks of 256 with f32 scales.
const ADAM8: f64 = 2.0 + 2.0 * 4.0 / 256.0;
/// Bytes of two moments of 4 bits in blocks of 128.
const ADAM4: f64 = 1.0 + 2.0 * 4.0 / 128.0;

/// Every recipe.
pub const RECIPES: [TrainingRecipe; 20] = [
    recipe("fp32", "f32 weights and Adam", Some("fp32"), [4.0, 0.0, 4.0, 0.0, 0.0, 8.0], ZERO),
    recipe(
        "bf16",
        "bf16 weights and gradients, f32 master and moments",
        Some("bf16"),
        [2.0, 0.0, 2.0, 0.0, 4.0, 8.0],
        ZERO,
    ),
    recipe("bf16-fp32-grads", "the same with f32 gradients", None, [2.0, 0.0, 4.0, 0.0, 4.0, 8.0], MEGATRON),
    recipe(
        "fp16",
        "f16 weights and gradients, f32 gradients for the optimizer, f32 master and moments",
        Some("fp16"),
        [2.0, 0.0, 2.0, 4.0, 4.0, 8.0],
        MEGATRON,
    ),
    recipe(
        "bf16-remainder",
        "bf16 weights whose 16 remaining bits are kept apart, f32 gradients and moments",
        Some("bf16-remainder"),
        [2.0, 0.0, 4.0, 0.0, 2.0, 8.0],
        MEGATRON,
    ),
    recipe(
        "bf16-no-master",
        "bf16 weights and gradients, f32 moments",
        None,
        [2.0, 0.0, 2.0, 0.0, 0.0, 8.0],
        "QLoRA, arXiv 2305.14314 (780 GB for 65 B)",
    ),
    recipe("bf16-pure", "bf16 throughout", Some("bf16-pure-sr"), [2.0, 0.0, 2.0, 0.0, 0.0, 4.0], TORCHAO),
    recipe(
        "bf16-adam8",
        "bf16 weights and gradients, 8-bit moments",
        None,
        [2.0, 0.0, 2.0, 0.0, 0.0, ADAM8],
        TORCHAO,
    ),
    recipe(
        "bf16-adam8-master",
        "the same with an f32 master",
        None,
        [2.0, 0.0, 2.0, 0.0, 4.0, ADAM8],
        TORCHAO,
    ),
    recipe(
        "bf16-adam4",
        "bf16 weights and gradients, 4-bit moments",
        None,
        [2.0, 0.0, 2.0, 0.0, 0.0, ADAM4],
        TORCHAO,
    ),
    recipe(
        "bf16-lion",
        "one f32 moment (Lion, Muon)",
        None,
        [2.0, 0.0, 2.0, 0.0, 4.0, 4.0],
        "Lion, arXiv 2302.06675",
    ),
    recipe(
        "bf16-lion8",
        "one 8-bit moment",
        None,
        [2.0, 0.0, 2.0, 0.0, 4.0, 1.0 + 4.0 / 256.0],
        "bitsandbytes Lion8bit",
    ),
    recipe(
        "bf16-adafactor",
        "factored second moment, no first",
        None,
        [2.0, 0.0, 2.0, 0.0, 4.0, 0.0],
        "Adafactor, arXiv 1804.04235, section 3",
    ),
    recipe(
        "fp8-te",
        "Transformer Engine: bf16 weights with FP8 copies by row and column",
        Some("fp8-delayed"),
        [2.0, 2.0, 4.0, 0.0, 4.0, 8.0],
        "Transformer Engine documentation, FP8 primer",
    ),
    recipe(
        "fp8-primary",
        "FP8 weights by row and column",
        None,
        [1.0, 1.0, 4.0, 0.0, 4.0, 8.0],
        "Transformer Engine documentation, fp8_model_init",
    ),
    recipe(
        "deepseek-v3",
        "FP8 copy, f32 master and gradients, bf16 moments",
        Some("fp8-blockwise"),
        [1.0, 0.0, 4.0, 0.0, 4.0, 4.0],
        "DeepSeek-V3, arXiv 2412.19437, section 3.3.2",
    ),
    recipe(
        "ms-amp-o3",
        "FP8 weights and gradients, f16 master, FP8 and f16 moments",
        None,
        [1.0, 0.0, 1.0, 0.0, 2.0, 3.0],
        "FP8-LM, arXiv 2310.18313, section 2.2",
    ),
    recipe(
        "int8-sr",
        "int8 weights with stochastic rounding, 8-bit moments",
        Some("int8-sr"),
        [1.0, 0.0, 2.0, 0.0, 0.0, ADAM8],
        "torchao quantized training",
    ),
    recipe(
        "nvfp4",
        "f32 master, bf16 gradients, f32 moments, FP4 copies by row and column",
        Some("nvfp4"),
        [0.0, 1.125, 2.0, 0.0, 4.0, 8.0],
        "arXiv 2509.25149, section 4",
    ),
    recipe(
        "quartet",
        "f32 master, bf16 gradients and moments, MXFP4 copies by row and column",
        Some("quartet"),
        [0.0, 1.0625, 2.0, 0.0, 4.0, 4.0],
        "Quartet, arXiv 2505.14669",
    ),
];

/// Stage of ZeRO: which part of the state each of `d` devices holds alone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub enum Zero {
    /// Every device holds all.
    #[default]
    None,
    /// Master weights and moments are divided (P_os; Megatron's distributed optimizer).
    One,
    /// Gradients too.
    Two,
    /// Weights too.
    Three,
}

impl Zero {
    /// Returns the stage of this number.
    pub fn stage(number: u32) -> Option<Self> {
        [Zero::None, Zero::One, Zero::Two, Zero::Three].get(number as usize).copied()
    }
}

impl TrainingRecipe {
    /// Finds a recipe by name or policy, in any case.
    pub fn named(name: &str) -> Option<Self> {
        let is = |known: &str| known.eq_ignore_ascii_case(name);
        RECIPES.into_iter().find(|r| is(r.name) || r.policy.is_some_and(is))
    }

    /// Bytes per parameter on each of `devices` devices.
    pub fn bytes_per_parameter(&self, zero: Zero, devices: u64) -> f64 {
        let d = devices.max(1) as f64;
        let stage = zero as u32;
        let divided = |from: u32, bytes: f64| if stage >= from { bytes / d } else { bytes };
        divided(1, self.master + self.moments + self.optimizer_gradients)
            + divided(2, self.gradients)
            + divided(3, self.weights + self.copies)
    }

    /// Bytes per parameter that `mantissa train` takes under the recipe's policy, with moments of the recipe's size: its
    /// weights, master copy and gradients are those of the policy. `None` without a policy.
    pub fn trainer_bytes(&self, shape: &ModelShape) -> Option<f64> {
        Some(policy_storage(self.policy?).bytes_per_parameter(shape, self.moments))
    }

    /// Bytes per parameter of one device that holds all.
    pub fn total(&self) -> f64 {
        self.bytes_per_parameter(Zero::None, 1)
    }
}

/// Activations that the backward recomputes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Recompute {
    /// None; attention scores are stored.
    Nothing,
    /// Attention scores only (flash attention, or selective recomputation).
    #[default]
    Scores,
    /// Whole layers: only their inputs are stored.
    Layers,
}

/// Bytes of a layer's activations in 16 bits (Korthikanti et al. 2022, equations 1 and 2, table 2): `sequence` and `batch` tokens,
/// a GPT block of width `hidden` with `heads` heads.
pub fn gpt_layer_activations(
    sequence: u64,
    batch: u64,
    hidden: u64,
    heads: u64,
    recompute: Recompute,
) -> f64 {
    let sbh = (sequence * batch * hidden) as f64;
    match recompute {
        Recompute::Nothing => sbh * (34.0 + 5.0 * heads as f64 * sequence as f64 / hidden as f64),
        Recompute::Scores => 34.0 * sbh,
        Recompute::Layers => 2.0 * sbh,
    }
}

/// Bytes of a token's activations in one layer of a decoder with RMSNorm and SwiGLU, in 16 bits with flash attention, the mean of
/// all layers (our count: inputs of both norms and their outputs, 4 h; queries, keys, values and attended values in their
/// own width, and latents, whose norms are computed again; gate, up and product, 3 f).
pub fn layer_activations(shape: &ModelShape) -> f64 {
    let mixed = shape.mixed as f64 / shape.layers.max(1) as f64;
    2.0 * (4.0 * shape.hidden as f64 + mixed + 3.0 * shape.inner as f64)
}

/// Bytes of a token's logits: bf16, and their f32 gradient.
pub fn logit_bytes(shape: &ModelShape) -> f64 {
    6.0 * shape.vocab as f64
}

/// Bytes of all activations of `sequence` × `batch` tokens, without logits.
pub fn activations(shape: &ModelShape, sequence: u64, batch: u64, recompute: Recompute) -> f64 {
    let tokens = (sequence * batch) as f64;
    let layers = shape.layers as f64;
    let scores = 5.0 * (shape.heads as u64 * sequence) as f64;
    match recompute {
        Recompute::Nothing => layers * tokens * (layer_activations(shape) + scores),
        Recompute::Scores => layers * tokens * layer_activations(shape),
        // Inputs of all layers, and the activations of the one that is recomputed.
        Recompute::Layers => layers * tokens * 2.0 * shape.hidden as f64 + tokens * layer_activations(shape),
    }
}

/// Trained part of a model.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Trained {
    /// Every weight.
    All,
    /// Low-rank adapters of every linear layer on frozen weights of a scheme.
    Adapters {
        /// Rank.
        rank: u64,
        /// Scheme of the frozen linear layers: `bf16`, `nf4-dq`.
        base: &'static str,
    },
}

/// Bytes of training on one device, by purpose.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Training {
    /// Trained parameters.
    pub trained: u64,
    /// Frozen weights.
    pub frozen: f64,
    /// Weights, gradients, master and moments of what is trained.
    pub state: f64,
    /// Activations.
    pub activations: f64,
    /// Logits and their gradient.
    pub logits: f64,
}

impl Training {
    /// Bytes of all.
    pub fn total(&self) -> f64 {
        self.frozen + self.state + self.activations + self.logits
    }
}

/// Sizes of a training run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Run {
    /// Tokens of a sequence.
    pub sequence: u64,
    /// Sequences on one device at a time.
    pub batch: u64,
    /// Devices that share the state.
    pub devices: u64,
    /// Stage of ZeRO.
    pub zero: Zero,
    /// Recomputed activations.
    pub recompute: Recompute,
}

/// Bytes of adapters for each of their parameters: f32 weights, gradients and moments.
const ADAPTER: f64 = 16.0;

/// Parameters of adapters of this rank on every linear layer: `rank (rows + columns)` each.
pub fn adapter_parameters(shape: &ModelShape, rank: u64) -> u64 {
    shape.matrices.iter().map(|m| m.count * rank * (m.rows + m.cols) as u64).sum()
}

/// Bytes of training on one device.
pub fn training(shape: &ModelShape, recipe: &TrainingRecipe, trained: Trained, run: &Run) -> Training {
    let stored = activations(shape, run.sequence, run.batch, run.recompute);
    let logits = logit_bytes(shape) * (run.sequence * run.batch) as f64;
    let (parameters, frozen, state) = match trained {
        Trained::All => {
            let parameters = shape.parameters();
            (parameters, 0.0, parameters as f64 * recipe.bytes_per_parameter(run.zero, run.devices))
        }
        Trained::Adapters { rank, base } => {
            let parameters = adapter_parameters(shape, rank);
            (parameters, frozen_bytes(shape, base), parameters as f64 * ADAPTER)
        }
    };
    Training { trained: parameters, frozen, state, activations: stored, logits }
}

/// Bytes of frozen weights: linear layers under `base`, the rest in bf16.
pub fn frozen_bytes(shape: &ModelShape, base: &str) -> f64 {
    let format = parse_weight(base).ok().map(|scheme| scheme.format);
    let bits =
        |rows, cols| format.as_ref().map_or(16.0 * (rows * cols) as f64, |f| f.total_bits(rows, cols) as f64);
    let linears: f64 = shape.matrices.iter().map(|m| m.count as f64 * bits(m.rows, m.cols) / 8.0).sum();
    linears + 2.0 * (shape.parameters() - shape.linear_weights()) as f64
}

/// Operations of training on one token. For each weight that it meets 2 forward, 2 for the gradient of its input, and 2 for that
/// of the weight, which frozen weights have none of: 6, or 4 with adapters, whose own are few; 2 more with recomputed layers, of
/// which the head is none. Attention has gradients of both operands always; scores that its backward computes again are not
/// counted.
pub fn operations_per_token(
    shape: &ModelShape,
    sequence: u64,
    recompute: Recompute,
    trained: Trained,
) -> f64 {
    let again = if recompute == Recompute::Layers { 1.0 } else { 0.0 };
    let (weights, adapters) = match trained {
        Trained::All => (3.0, 0.0),
        Trained::Adapters { rank, .. } => (2.0, active_adapter_parameters(shape, rank)),
    };
    let attention = shape.prompt_attention_operations(sequence as f64, true);
    (weights + again) * (shape.operations_per_token() + shape.other_operations())
        + weights * shape.head_operations()
        + (3.0 + again) * (attention + 2.0 * adapters)
}

/// Parameters of adapters that a token meets.
fn active_adapter_parameters(shape: &ModelShape, rank: u64) -> f64 {
    shape.matrices.iter().map(|m| (m.active * rank * (m.rows + m.cols) as u64) as f64).sum()
}
