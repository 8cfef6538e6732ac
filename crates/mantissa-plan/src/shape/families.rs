//! Published shapes, for sizes given by a number of parameters.

/// Dimensions of a decoder.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dims {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Number of layers.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Inner width of the dense MLP.
    pub ffn: usize,
    /// Rows of the embedding.
    pub vocab: usize,
    /// Longest context.
    pub context: usize,
    /// True if the head is the embedding.
    pub tied: bool,
    /// Linear layers with biases.
    pub biases: Biases,
    /// True if every query head has an attention sink.
    pub sinks: bool,
    /// Sliding window of every second layer.
    pub window: Option<usize>,
    /// Mixture of experts.
    pub mixture: Option<Mixture>,
    /// Latent attention.
    pub latent: Option<Latent>,
}

impl Dims {
    /// Weights that no recipe quantizes (norms, routers, sinks, biases), and those of them that are biases of routed experts.
    pub(super) fn unquantized(&self) -> (u64, u64) {
        let Dims { hidden, layers, heads, kv_heads, head_dim, ffn, .. } = *self;
        let Mixture { experts, width, shared, dense_layers, .. } = self.mixture.unwrap_or(Mixture {
            experts: 0,
            per_token: 0,
            width: 0,
            shared: 0,
            dense_layers: layers as u64,
        });
        let mixed = layers - dense_layers as usize;
        let routed = mixed * experts as usize;
        let norms = (2 * layers + 1) * hidden;
        let sinks = if self.sinks { layers * heads } else { 0 };
        let qkv = layers * (heads + 2 * kv_heads) * head_dim;
        // Gate, up and down.
        let mlp = |inner: usize| if inner > 0 { 2 * inner + hidden } else { 0 };
        let (biases, of_experts) = match self.biases {
            Biases::None => (0, 0),
            Biases::Qkv => (qkv, 0),
            Biases::All => {
                let dense = (layers - mixed) * mlp(ffn) + mixed * mlp(shared);
                (qkv + layers * hidden + routed + dense, routed * mlp(width))
            }
        };
        let others = norms + routed * hidden + sinks + biases + of_experts;
        (others as u64, of_experts as u64)
    }

    /// Elements of queries, keys, values, attended values and latents of a token in one layer, as the backward needs them: keys
    /// of latent attention with the rotated part in each head.
    pub(super) fn mixed_elements(&self) -> usize {
        let Dims { heads, kv_heads, head_dim, .. } = *self;
        match self.latent {
            None => 2 * (heads + kv_heads) * head_dim,
            Some(latent) => {
                let (width, value) = (latent.rotated + latent.unrotated, latent.value);
                2 * heads * (width + value) + latent.queries + latent.keys + latent.rotated
            }
        }
    }
}

/// Linear layers with biases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Biases {
    /// None.
    None,
    /// Queries, keys and values.
    Qkv,
    /// All, routers included.
    All,
}

/// Mixture of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mixture {
    /// Routed experts of a layer.
    pub experts: u64,
    /// Routed experts of a token.
    pub per_token: u64,
    /// Inner width of an expert.
    pub width: usize,
    /// Inner width of the shared experts; 0 without.
    pub shared: usize,
    /// Layers with a dense MLP instead.
    pub dense_layers: u64,
}

/// Latent attention (DeepSeek-V2, section 2.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Latent {
    /// Width of the latent of the queries.
    pub queries: usize,
    /// Width of the latent of keys and values.
    pub keys: usize,
    /// Width of the rotated part of a head.
    pub rotated: usize,
    /// Width of the other part.
    pub unrotated: usize,
    /// Width of a head of the values.
    pub value: usize,
}

/// Published model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Family {
    /// Name.
    pub name: &'static str,
    /// Dimensions, from the `config.json` of its repository on Hugging Face.
    pub dims: Dims,
}

/// Returns the dimensions of a dense model with full attention and a head of its own.
const fn dense(
    [hidden, layers, heads, kv_heads]: [usize; 4],
    ffn: usize,
    vocab: usize,
    context: usize,
) -> Dims {
    Dims {
        hidden,
        layers,
        heads,
        kv_heads,
        head_dim: hidden / heads,
        ffn,
        vocab,
        context,
        tied: false,
        biases: Biases::None,
        sinks: false,
        window: None,
        mixture: None,
        latent: None,
    }
}

const fn tied(dims: Dims) -> Dims {
    Dims { tied: true, ..dims }
}

const fn biased(dims: Dims) -> Dims {
    Dims { biases: Biases::Qkv, ..dims }
}

const fn mixed(dims: Dims, head_dim: usize, experts: u64, per_token: u64, width: usize) -> Dims {
    let mixture = Mixture { experts, per_token, width, shared: 0, dense_layers: 0 };
    Dims { head_dim, mixture: Some(mixture), ..dims }
}

/// Returns the dimensions of gpt-oss with so many layers and experts.
const fn oss(layers: usize, experts: u64) -> Dims {
    Dims {
        biases: Biases::All,
        sinks: true,
        window: Some(128),
        ..mixed(dense([2880, layers, 64, 8], 2880, 201_088, 131_072), 64, experts, 4, 2880)
    }
}

const fn family(name: &'static str, dims: Dims) -> Family {
    Family { name, dims }
}

const DEEPSEEK: Dims = Dims {
    mixture: Some(Mixture { experts: 256, per_token: 8, width: 2048, shared: 2048, dense_layers: 3 }),
    latent: Some(Latent { queries: 1536, keys: 512, rotated: 64, unrotated: 128, value: 128 }),
    ..dense([7168, 61, 128, 128], 18432, 129_280, 163_840)
};

/// Published shapes, dense ones first, from small to large.
pub const FAMILIES: [Family; 15] = [
    family("SmolLM2-135M", tied(dense([576, 30, 9, 3], 1536, 49_152, 8192))),
    family("Qwen2.5-0.5B", biased(tied(dense([896, 24, 14, 2], 4864, 151_936, 32_768)))),
    family("Llama-3.2-1B", tied(dense([2048, 16, 32, 8], 8192, 128_256, 131_072))),
    family("Llama-3.2-3B", tied(dense([3072, 28, 24, 8], 8192, 128_256, 131_072))),
    family("Llama-2-7B", dense([4096, 32, 32, 32], 11_008, 32_000, 4096)),
    family("Llama-3.1-8B", dense([4096, 32, 32, 8], 14_336, 128_256, 131_072)),
    family("Qwen2.5-14B", biased(dense([5120, 48, 40, 8], 13_824, 152_064, 131_072))),
    family("Qwen2.5-32B", biased(dense([5120, 64, 40, 8], 27_648, 152_064, 131_072))),
    family("Llama-3.1-70B", dense([8192, 80, 64, 8], 28_672, 128_256, 131_072)),
    family("Llama-3.1-405B", dense([16_384, 126, 128, 8], 53_248, 128_256, 131_072)),
    family("Qwen3-30B-A3B", mixed(dense([2048, 48, 32, 4], 6144, 151_936, 40_960), 128, 128, 8, 768)),
    family("gpt-oss-20b", oss(24, 32)),
    family("gpt-oss-120b", oss(36, 128)),
    family("Qwen3-235B-A22B", mixed(dense([4096, 94, 64, 4], 12_288, 151_936, 40_960), 128, 128, 8, 1536)),
    family("DeepSeek-V3", DEEPSEEK),
];

/// Lists the names.
pub(super) fn names() -> String {
    FAMILIES.map(|family| family.name).join(", ")
}
