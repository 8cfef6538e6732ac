//! Sizes of a decoder, from which bytes and operations follow. Needs no weights.
//!
//! A [`ModelShape`] comes from a checked config (`mantissa_advise::shape`), so that one parser knows every
//! architecture, or from [`ModelShape::named`]: the published shape nearest to a number of parameters.

mod families;

use mantissa_arch::kinds::LinearKind;
use serde::Serialize;

pub use families::{Biases, Dims, FAMILIES, Family, Latent, Mixture};

/// Part of a decoder layer that a matrix belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ModelPart {
    /// Projections of the attention.
    Attention,
    /// Dense MLP, or experts that every token passes through.
    Mlp,
    /// Routed experts.
    Experts,
    /// Projections of a recurrent mixer.
    Mixer,
}

/// Projection, as far as file types of llama.cpp distinguish them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Values of the attention.
    Value,
    /// Output of the attention.
    Output,
    /// Second matrix of an MLP or expert.
    Down,
    /// Any other.
    Other,
}

/// Projections that have a role, as linear layers outside of experts.
const ROLES: [(LinearKind, Role); 3] =
    [(LinearKind::V, Role::Value), (LinearKind::O, Role::Output), (LinearKind::Down, Role::Down)];

impl Role {
    /// Role of a linear layer.
    pub fn of(kind: LinearKind) -> Self {
        ROLES.into_iter().find(|(of, _)| *of == kind.dense()).map_or(Role::Other, |(_, role)| role)
    }

    /// Linear layer of a role; `None` for the others, which have the main type of a file type.
    pub fn kind(self) -> Option<LinearKind> {
        ROLES.into_iter().find(|(_, role)| *role == self).map(|(kind, _)| kind)
    }
}

/// Linear layers of one shape.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Matrices {
    /// Part of the layer.
    pub part: ModelPart,
    /// Projection.
    pub role: Role,
    /// Output features.
    pub rows: usize,
    /// Input features.
    pub cols: usize,
    /// Number in the model.
    pub count: u64,
    /// Number that one token passes through; less than `count` for routed experts.
    pub active: u64,
}

impl Matrices {
    /// Weights of all of them.
    pub fn weights(&self) -> u64 {
        self.count * (self.rows * self.cols) as u64
    }

    /// Expected share of them that `tokens` independent tokens read: `1 - (1 - active / count)^tokens`.
    pub fn read_by(&self, tokens: f64) -> f64 {
        1.0 - (1.0 - self.active as f64 / self.count.max(1) as f64).powf(tokens)
    }
}

/// KV cache of layers of one kind.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CacheLayers {
    /// Number of layers that store keys and values.
    pub layers: u64,
    /// Number of layers that read them; more than `layers` where layers share a cache.
    pub readers: u64,
    /// Key/value heads.
    pub heads: usize,
    /// Elements of a token's key that belong to no head, so that every device needs them: a latent, keys of an index.
    pub shared: usize,
    /// Elements of a token's key, all heads.
    pub keys: usize,
    /// Elements of a token's value, all heads; 0 where keys and values are one latent.
    pub values: usize,
    /// Elements of a token's queries, all heads, as they are multiplied with keys.
    pub queries: usize,
    /// Elements of a token's attended values, all heads.
    pub attended: usize,
    /// Largest number of tokens that a query attends to.
    pub window: Option<usize>,
    /// Keys and values that heads of latent attention have in a prompt and in training; `None` where they attend to what is
    /// cached.
    pub expanded: Option<Expanded>,
    /// Index that chooses the tokens that a query attends to.
    pub index: Option<Index>,
}

/// Elements of a token in latent attention whose heads have keys and values of their own, all heads together. A prompt is computed
/// so, which takes fewer operations (DeepSeek-V2, arXiv 2405.04434, section 2.1; vLLM's MLA backends); a step of decoding attends
/// to the latent, which takes fewer reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Expanded {
    /// Queries; keys have as many.
    pub queries: usize,
    /// Values; attended values are as many.
    pub values: usize,
}

/// Index of sparse attention (DeepSeek-V3.2, arXiv 2512.02556, section 2.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Index {
    /// Tokens that a query attends to.
    pub chosen: usize,
    /// Elements of a token's key in the index, part of [`CacheLayers::keys`]; 0 where the choice is an earlier layer's.
    pub width: usize,
    /// Elements of a token's queries of the index, all heads.
    pub queries: usize,
}

/// Mean number of tokens that one of `tokens` causal tokens sees, at most `limit`.
fn mean_seen(tokens: f64, limit: Option<usize>) -> f64 {
    let most = limit.map_or(tokens, |limit| tokens.min(limit as f64));
    most - most * most / (2.0 * tokens.max(1.0))
}

impl CacheLayers {
    /// Largest number of tokens that a query attends to: of the window, or as many as the index chooses.
    fn limit(&self) -> Option<usize> {
        self.index.map(|index| index.chosen).into_iter().chain(self.window).min()
    }

    /// Operations of a query that scores and sums so many tokens of `queries` and `attended` elements, and of the index over
    /// `indexed` tokens, in the layers that read the cache.
    fn operations(&self, [queries, attended]: [usize; 2], seen: f64, indexed: f64) -> f64 {
        let index = self.index.map_or(0.0, |index| 2.0 * index.queries as f64 * indexed);
        self.readers as f64 * (2.0 * (queries + attended) as f64 * seen + index)
    }

    /// Tokens of a context of `tokens` that the cache holds.
    pub fn held(&self, tokens: u64) -> u64 {
        self.window.map_or(tokens, |window| tokens.min(window as u64))
    }
}

/// Sizes of a decoder.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ModelShape {
    /// Name for reports.
    pub name: String,
    /// Number of layers.
    pub layers: u64,
    /// Width of the residual stream.
    pub hidden: u64,
    /// Rows of the embedding.
    pub vocab: u64,
    /// Longest context.
    pub context: u64,
    /// Query heads, which tensor parallelism splits.
    pub heads: usize,
    /// Key/value heads, which tensor parallelism splits.
    pub kv_heads: usize,
    /// Inner width of what follows the attention, for one token: of the MLP, or of its experts together.
    pub inner: u64,
    /// Elements that the token mixing of all layers makes for one token when it is trained: queries, keys, values, attended
    /// values, and latents; those of recurrent mixers.
    pub mixed: u64,
    /// True if the head is the embedding.
    pub tied: bool,
    /// Linear layers of the decoder.
    pub matrices: Vec<Matrices>,
    /// Weights of the embedding, and of learned positions.
    pub embedding: u64,
    /// Weights that no recipe quantizes: norms, biases, routers, indexers, embeddings of layers.
    pub others: u64,
    /// Those of them that a token meets: all but embeddings of layers, of which it reads a row, and biases of experts.
    pub others_met: u64,
    /// Those of them that are biases of routed experts, which lie where the experts do.
    pub expert_biases: u64,
    /// KV caches.
    pub caches: Vec<CacheLayers>,
    /// Bytes of the recurrent state of a sequence.
    pub state_bytes: u64,
    /// Parts into which devices divide that state: heads; 1 where each needs all of it.
    pub state_parts: usize,
    /// Routed experts of a layer; 0 without.
    pub experts: u64,
    /// Assumption behind the sizes, if they come from no config.
    pub assumed: Option<String>,
}

/// A model size that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "--params: expected a number of parameters such as 32B, 500M or 30B-A3B, or one of {known}; got \"{found}\""
)]
pub struct ParamsError {
    found: String,
    known: String,
}

/// Deviation from a published number of parameters within which its shape is taken as it is.
const SAME: f64 = 0.1;

impl ModelShape {
    /// Weights of the decoder's linear layers.
    pub fn linear_weights(&self) -> u64 {
        self.matrices.iter().map(Matrices::weights).sum()
    }

    /// Weights of the head; 0 if it is the embedding.
    pub fn head(&self) -> u64 {
        if self.tied { 0 } else { self.vocab * self.hidden }
    }

    /// Number of parameters.
    pub fn parameters(&self) -> u64 {
        self.linear_weights() + self.embedding + self.head() + self.others
    }

    /// Number of parameters that one token passes through, embedding and head included.
    pub fn active_parameters(&self) -> u64 {
        let idle: u64 = self.matrices.iter().map(|m| (m.count - m.active) * (m.rows * m.cols) as u64).sum();
        let routed = self.matrices.iter().find(|m| m.part == ModelPart::Experts);
        let biases = routed.map_or(0, |m| self.expert_biases * (m.count - m.active) / m.count.max(1));
        self.parameters() - idle - biases
    }

    /// Operations of the products of one token with the linear layers: two for each weight that it meets.
    pub fn operations_per_token(&self) -> f64 {
        let active = |m: &Matrices| m.active as f64 * (m.rows * m.cols) as f64;
        2.0 * self.matrices.iter().map(active).sum::<f64>()
    }

    /// Operations of one token with what no recipe quantizes.
    pub fn other_operations(&self) -> f64 {
        2.0 * self.others_met as f64
    }

    /// Operations of the head for one token.
    pub fn head_operations(&self) -> f64 {
        2.0 * (self.vocab * self.hidden) as f64
    }

    /// Operations of the attention of one token with `depth` tokens before it: two for each element of a score and of a
    /// weighted value.
    pub fn attention_operations(&self, depth: f64) -> f64 {
        let of = |c: &CacheLayers| {
            let seen = c.limit().map_or(depth, |limit| depth.min(limit as f64));
            c.operations([c.queries, c.attended], seen, depth)
        };
        self.caches.iter().map(of).sum()
    }

    /// Operations of the attention for one of `tokens` tokens of a prompt, the mean of all; with `expands`, latents are expanded to
    /// keys and values of each head.
    pub fn prompt_attention_operations(&self, tokens: f64, expands: bool) -> f64 {
        let of = |c: &CacheLayers| {
            let expanded = c.expanded.filter(|_| expands);
            let widths = expanded.map_or([c.queries, c.attended], |wide| [wide.queries, wide.values]);
            c.operations(widths, mean_seen(tokens, c.limit()), mean_seen(tokens, None))
        };
        self.caches.iter().map(of).sum()
    }

    /// Number of layers with routed experts.
    pub fn expert_layers(&self) -> u64 {
        let down = self.matrices.iter().find(|m| m.part == ModelPart::Experts && m.role == Role::Down);
        down.map_or(0, |m| m.count / self.experts.max(1))
    }

    /// True if a token passes through a part of the weights only.
    pub fn is_mixture(&self) -> bool {
        self.matrices.iter().any(|m| m.active < m.count)
    }

    /// Builds the shape of a decoder with RMSNorm, SwiGLU and grouped-query or latent attention.
    pub fn of_dims(name: &str, dims: &Dims) -> Self {
        let Dims { hidden, layers, heads, kv_heads, head_dim, ffn, vocab, context, tied, .. } = *dims;
        let every = layers as u64;
        let mut matrices = Vec::new();
        let mut push = |(part, role), rows, cols, count: u64, active: u64| {
            matrices.push(Matrices { part, role, rows, cols, count, active });
        };
        let (projection, attended) =
            ((ModelPart::Attention, Role::Other), (ModelPart::Attention, Role::Output));
        match dims.latent {
            None => {
                push(projection, heads * head_dim, hidden, every, every);
                push(projection, kv_heads * head_dim, hidden, every, every);
                push((ModelPart::Attention, Role::Value), kv_heads * head_dim, hidden, every, every);
                push(attended, hidden, heads * head_dim, every, every);
            }
            Some(Latent { queries, keys, rotated, unrotated, value }) => {
                push(projection, queries, hidden, every, every);
                push(projection, heads * (rotated + unrotated), queries, every, every);
                push(projection, keys + rotated, hidden, every, every);
                push(projection, heads * (unrotated + value), keys, every, every);
                push(attended, hidden, heads * value, every, every);
            }
        }
        let mixed = dims.mixture.map_or(0, |mixture| every - mixture.dense_layers);
        let dense = every - mixed;
        let (up, down) = ((ModelPart::Mlp, Role::Other), (ModelPart::Mlp, Role::Down));
        push(up, ffn, hidden, 2 * dense, 2 * dense);
        push(down, hidden, ffn, dense, dense);
        if let Some(Mixture { experts, per_token, width, shared, .. }) = dims.mixture {
            let (up_of_expert, down_of_expert) =
                ((ModelPart::Experts, Role::Other), (ModelPart::Experts, Role::Down));
            push(up_of_expert, width, hidden, 2 * mixed * experts, 2 * mixed * per_token);
            push(down_of_expert, hidden, width, mixed * experts, mixed * per_token);
            push(up, shared, hidden, 2 * mixed, 2 * mixed);
            push(down, hidden, shared, mixed, mixed);
        }
        matrices.retain(|m| m.count > 0 && m.rows * m.cols > 0);
        let (others, expert_biases) = dims.unquantized();
        let inner = dims.mixture.map_or(ffn as u64, |m| m.per_token * m.width as u64 + m.shared as u64);
        ModelShape {
            name: name.to_owned(),
            layers: every,
            hidden: hidden as u64,
            vocab: vocab as u64,
            context: context as u64,
            heads,
            kv_heads,
            inner,
            mixed: every * dims.mixed_elements() as u64,
            tied,
            matrices,
            embedding: (vocab * hidden) as u64,
            others,
            others_met: others - expert_biases,
            expert_biases,
            caches: caches(dims),
            state_bytes: 0,
            state_parts: 1,
            experts: dims.mixture.map_or(0, |mixture| mixture.experts),
            assumed: None,
        }
    }

    /// Returns the shape that a text names: a published model (`qwen2.5-32b`), a number of parameters (`32B`, `500M`),
    /// or of all and of active ones (`30B-A3B`). A number takes the nearest published shape, with fewer or more layers
    /// where that differs by more than 10 %.
    ///
    /// # Errors
    /// [`ParamsError`].
    pub fn named(text: &str) -> Result<Self, ParamsError> {
        if let Some(family) = FAMILIES.iter().find(|family| family.name.eq_ignore_ascii_case(text)) {
            let shape = Self::of_dims(family.name, &family.dims);
            return Ok(ModelShape { assumed: Some(format!("shape of {}", family.name)), ..shape });
        }
        let (total, active) = match text.to_ascii_uppercase().split_once("-A") {
            Some((total, active)) => (count(total), count(active).map(Some)),
            None => (count(text), Some(None)),
        };
        let error = || ParamsError { found: text.to_owned(), known: families::names() };
        let (total, active) = total.zip(active).ok_or_else(error)?;
        Ok(Self::nearest(text, total, active))
    }

    fn nearest(text: &str, total: f64, active: Option<f64>) -> Self {
        let far = |a: f64, b: f64| (a / b).ln().abs();
        let distance = |family: &&Family| {
            let shape = Self::of_dims(family.name, &family.dims);
            let active_distance = active.map_or(0.0, |active| far(active, shape.active_parameters() as f64));
            far(total, shape.parameters() as f64) + active_distance
        };
        let fitting = FAMILIES.iter().filter(|family| family.dims.mixture.is_some() == active.is_some());
        let nearest = fitting.min_by(|a, b| distance(a).total_cmp(&distance(b)));
        let family = nearest.unwrap_or(&FAMILIES[0]);
        let shape = Self::of_dims(family.name, &family.dims);
        if (total / shape.parameters() as f64 - 1.0).abs() <= SAME {
            let assumed = format!("shape of {}", family.name);
            return ModelShape { name: text.to_owned(), assumed: Some(assumed), ..shape };
        }
        let per_layer = (shape.linear_weights() as f64) / shape.layers as f64;
        let tables = (shape.embedding + shape.head()) as f64;
        let layers = ((total - tables) / per_layer).round().max(1.0) as usize;
        let dense = family
            .dims
            .mixture
            .map(|mixture| Mixture { dense_layers: mixture.dense_layers.min(layers as u64), ..mixture });
        let shape = Self::of_dims(text, &Dims { layers, mixture: dense, ..family.dims });
        let assumed = format!(
            "shape of {} with {layers} layers ({} parameters)",
            family.name,
            billions(shape.parameters())
        );
        ModelShape { assumed: Some(assumed), ..shape }
    }
}

/// Describes the KV caches of `dims`.
fn caches(dims: &Dims) -> Vec<CacheLayers> {
    let Dims { layers, heads, kv_heads, head_dim, .. } = *dims;
    let one = |layers: u64, window| match dims.latent {
        None => CacheLayers {
            layers,
            readers: layers,
            heads: kv_heads,
            shared: 0,
            keys: kv_heads * head_dim,
            values: kv_heads * head_dim,
            queries: heads * head_dim,
            attended: heads * head_dim,
            window,
            expanded: None,
            index: None,
        },
        Some(latent) => CacheLayers {
            layers,
            readers: layers,
            heads: 1,
            shared: latent.keys + latent.rotated,
            keys: latent.keys + latent.rotated,
            values: 0,
            queries: heads * (latent.keys + latent.rotated),
            attended: heads * latent.keys,
            window,
            expanded: Some(Expanded {
                queries: heads * (latent.rotated + latent.unrotated),
                values: heads * latent.value,
            }),
            index: None,
        },
    };
    match dims.window {
        None => vec![one(layers as u64, None)],
        Some(window) => {
            let windowed = layers as u64 / 2;
            vec![one(layers as u64 - windowed, None), one(windowed, Some(window))]
        }
    }
}

/// Parses a count such as `32B`, `1.5b` or `500M`.
fn count(text: &str) -> Option<f64> {
    let text = text.trim().to_ascii_uppercase();
    let factor = match text.chars().last()? {
        'K' => 1e3,
        'M' => 1e6,
        'B' => 1e9,
        'T' => 1e12,
        c if c.is_ascii_digit() => 1.0,
        _ => return None,
    };
    let digits = text.trim_end_matches(['K', 'M', 'B', 'T']);
    if !digits.chars().all(|c| c.is_ascii_digit() || c == '.') {
        return None;
    }
    let count = digits.parse::<f64>().ok()? * factor;
    (1e5..1e14).contains(&count).then_some(count)
}

/// Formats a number of parameters: `32.8 B`, `494 M`, `1.33 M`.
pub fn billions(parameters: u64) -> String {
    match parameters as f64 {
        n if n < 9.995e5 => format!("{:.0} K", n / 1e3),
        n if n < 9.995e6 => format!("{:.2} M", n / 1e6),
        n if n < 9.995e8 => format!("{:.0} M", n / 1e6),
        n if n < 9.995e9 => format!("{:.2} B", n / 1e9),
        n if n < 9.995e10 => format!("{:.1} B", n / 1e9),
        n if n < 9.995e11 => format!("{:.0} B", n / 1e9),
        n => format!("{:.2} T", n / 1e12),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn family(name: &str) -> ModelShape {
        ModelShape::named(name).unwrap()
    }

    #[test]
    fn published_shapes_have_their_published_parameters() {
        // Counts of the safetensors indices and model cards.
        assert_eq!(family("Qwen2.5-0.5B").parameters(), 494_032_768);
        assert_eq!(family("Llama-2-7B").parameters(), 6_738_415_616);
        assert_eq!(family("Llama-3.1-8B").parameters(), 8_030_261_248);
        assert_eq!(family("Llama-3.1-70B").parameters(), 70_553_706_496);
        assert_eq!(family("Qwen2.5-32B").parameters(), 32_763_876_352);
        let near = |name: &str, all: f64, active: f64| {
            let shape = family(name);
            assert!((shape.parameters() as f64 / all - 1.0).abs() < 0.01, "{name}: {}", shape.parameters());
            let found = shape.active_parameters() as f64;
            assert!((found / active - 1.0).abs() < 0.03, "{name}: active {found}");
        };
        near("DeepSeek-V3", 671e9, 37.5e9);
        near("Qwen3-30B-A3B", 30.5e9, 3.35e9);
        // Table 1 of the model card (arXiv 2508.10925): 116.83 and 20.91 B parameters; 5.13 and 3.61 B of a token, without the
        // embedding of 201,088 × 2880.
        let oss = [family("gpt-oss-120b"), family("gpt-oss-20b")];
        assert_eq!(oss.each_ref().map(ModelShape::parameters), [116_829_156_672, 20_914_757_184]);
        let met = oss.each_ref().map(|shape| shape.active_parameters() - shape.embedding);
        assert_eq!(met, [5_132_849_472, 3_608_307_264]);
    }

    #[test]
    fn numbers_name_the_nearest_shape() {
        let shape = family("32B");
        assert_eq!((shape.hidden, shape.layers), (5120, 64));
        assert!(shape.assumed.unwrap().contains("Qwen2.5-32B"));
        assert_eq!(family("70b").layers, 80);
        let odd = family("20B");
        assert!((odd.parameters() as f64 / 20e9 - 1.0).abs() < 0.05, "{}", odd.parameters());
        assert!(odd.assumed.unwrap().contains("layers"));
        let mixed = family("30B-A3B");
        assert!(mixed.is_mixture() && mixed.active_parameters() < 4_000_000_000);
        for wrong in ["", "B", "32X", "-3B", "1e9", "many", "0", "B-A3B"] {
            assert!(ModelShape::named(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn experts_are_read_by_more_tokens() {
        let experts =
            Matrices { part: ModelPart::Experts, role: Role::Down, rows: 8, cols: 8, count: 128, active: 8 };
        assert!((experts.read_by(1.0) - 0.0625).abs() < 1e-12);
        assert!((experts.read_by(64.0) - 0.9839).abs() < 1e-3);
        let dense = Matrices { active: 128, ..experts };
        assert_eq!(dense.read_by(1.0), 1.0);
    }

    #[test]
    fn windows_bound_the_cache() {
        let shape = family("gpt-oss-120b");
        assert_eq!(shape.caches[1].held(4096), 128);
        assert_eq!(shape.caches[0].held(4096), 4096);
        // 18 full layers and 18 of 128 tokens.
        let queries = 2.0 * 2.0 * 64.0 * 64.0;
        assert_eq!(shape.attention_operations(1000.0), 18.0 * queries * 1128.0);
        // Of 1000 causal tokens the last 872 see 128, the first 128 half as many on average: 128 - 128² / 2000 = 119.808.
        assert_eq!(shape.prompt_attention_operations(1000.0, true), 18.0 * queries * (500.0 + 119.808));
    }

    /// DeepSeek-V3, 128 heads: in decoding a query of 576 elements scores a latent and sums 512 of it; in a prompt keys have 192
    /// and values 128 elements a head.
    #[test]
    fn a_prompt_expands_latents() {
        let shape = family("DeepSeek-V3");
        assert_eq!(shape.attention_operations(100.0), 61.0 * 2.0 * 128.0 * (576.0 + 512.0) * 100.0);
        let prompt = |expands| shape.prompt_attention_operations(200.0, expands);
        assert_eq!(prompt(true), 61.0 * 2.0 * 128.0 * (192.0 + 128.0) * 100.0);
        assert_eq!(prompt(false), shape.attention_operations(100.0));
        assert_eq!((shape.expert_layers(), family("8B").expert_layers()), (58, 0));
    }
}
