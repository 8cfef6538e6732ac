"""Shapes of models for `plan_check.py`: their matrices and caches, from the dimensions in their config.json."""

from dataclasses import dataclass


@dataclass
class Matrix:
    """Equal matrices, one or more in each of `layers` layers."""

    part: str  # attention, mlp, experts, mixer
    role: str  # q, k, v, o, gate, up, down, other: as llama.cpp's file types distinguish them
    rows: int
    cols: int
    layers: int
    each: int = 1  # in a layer
    active: float = 1.0  # share of them that one token passes through

    @property
    def count(self):
        return self.layers * self.each

    @property
    def weights(self):
        return self.rows * self.cols


@dataclass
class Cache:
    """Layers with attention of one kind, of which `layers` keep keys and values."""

    layers: int
    heads: int  # key/value heads
    key: int  # width of a key, and of a value, in each of them
    value: int
    queries: int  # query heads
    window: int | None = None
    # Latent attention caches one vector of `key` elements for all heads. In a step of decoding a query has that width
    # and attends to the `latent` first ones; in a prompt heads have keys and values of their own widths.
    latent: int = 0
    head_key: int = 0
    head_value: int = 0
    # An index of `index` elements a token chooses the tokens that are attended to; prompts attend to latents then.
    chosen: int | None = None
    index: int = 0
    index_queries: int = 0

    def held(self, tokens):
        return min(tokens, self.window or tokens)

    def attended(self, tokens):
        return min(self.held(tokens), self.chosen or tokens)

    def operations(self, tokens, prompt, expands=True):
        """Operations of the scores, the weighted values and the index of one query in one layer after `tokens` tokens, or the
        mean of a prompt of so many."""
        mean = lambda limit: limit - limit * limit / (2 * tokens) if prompt else limit
        key, value = self.key, self.value
        if self.latent:
            expands = expands and prompt and not self.chosen
            key, value = (self.head_key, self.head_value) if expands else (self.key - self.index, self.latent)
        scores = 2 * self.queries * (key + value) * mean(self.attended(tokens))
        return self.layers * (scores + 2 * self.index_queries * self.index * mean(tokens))


@dataclass
class Model:
    name: str
    hidden: int
    layers: int
    vocab: int
    tied: bool
    matrices: list
    caches: list
    others: int  # norms, biases, routers, indexers
    inner: int  # width of what follows the attention, for one token
    mixed: int  # elements of queries, keys, values, attended values and latents of all layers
    grouped: bool  # at least four query heads share a key head
    expert_layers: int = 0
    experts: int = 0
    expert_biases: int = 0
    state: int = 0  # bytes of the recurrent states of a sequence
    state_heads: int = 1
    config: dict | None = None  # written as config.json; None: known by name

    @property
    def table(self):
        return self.vocab * self.hidden

    @property
    def linear(self):
        return sum(m.count * m.weights for m in self.matrices)

    @property
    def parameters(self):
        return self.linear + self.table * (1 if self.tied else 2) + self.others + self.expert_biases


def decoder(name, hidden, layers, heads, kv_heads, ffn, vocab, *, head=None, tied=False, bias=False, window=None,
            windowed=0, moe=None, mla=None, norms=2, head_norms=0, extra=0, expert_biases=0, attending=None, config=None):
    """Describes a decoder with a gated MLP. `moe` is (experts, per token, width, width of the shared one, dense layers),
    `mla` (latent of queries or 0, latent of keys, rotated, unrotated, value)."""
    head = head or hidden // heads
    attending = layers if attending is None else attending
    q, kv = heads * head, kv_heads * head
    matrices, latent = [], 0
    if mla:
        q_rank, rank, rotated, unrotated, value = mla
        width = rotated + unrotated
        if q_rank:
            matrices.append(Matrix("attention", "other", q_rank, hidden, attending))
        matrices += [
            Matrix("attention", "q", heads * width, q_rank or hidden, attending),
            Matrix("attention", "other", rank + rotated, hidden, attending),
            Matrix("attention", "other", heads * (unrotated + value), rank, attending),
            Matrix("attention", "o", hidden, heads * value, attending),
        ]
        mixed = 2 * heads * (width + value) + q_rank + rank + rotated
        latent = q_rank + rank
        caches = [Cache(attending, 1, rank + rotated, 0, heads, None, rank, width, value)]
    else:
        matrices += [
            Matrix("attention", "q", q, hidden, attending),
            Matrix("attention", "k", kv, hidden, attending),
            Matrix("attention", "v", kv, hidden, attending),
            Matrix("attention", "o", hidden, q, attending),
        ]
        mixed = 2 * q + 2 * kv
        full = Cache(attending - windowed, kv_heads, head, head, heads)
        near = Cache(windowed, kv_heads, head, head, heads, window)
        caches = [c for c in (full, near) if c.layers]
    dense, routers, inner = layers, 0, ffn
    if moe:
        experts, per_token, width, shared, dense = moe
        sparse = layers - dense
        for role, rows, cols in (("gate", width, hidden), ("up", width, hidden), ("down", hidden, width)):
            matrices.append(Matrix("experts", role, rows, cols, sparse, experts, per_token / experts))
        if shared:
            for role, rows, cols in (("gate", shared, hidden), ("up", shared, hidden), ("down", hidden, shared)):
                matrices.append(Matrix("mlp", role, rows, cols, sparse))
        routers, inner = sparse * experts * hidden, per_token * width + shared
    for role, rows, cols in (("gate", ffn, hidden), ("up", ffn, hidden), ("down", hidden, ffn)) if dense else ():
        matrices.append(Matrix("mlp", role, rows, cols, dense))
    others = (norms * layers + 1) * hidden + attending * (head_norms * head + latent + bias * (q + 2 * kv)) + routers + extra
    return Model(name, hidden, layers, vocab, tied, matrices, caches, others, inner, attending * mixed,
                 heads >= 4 * kv_heads, layers - dense if moe else 0, moe[0] if moe else 0, expert_biases, config=config)


def config_of(model_type, hidden, layers, heads, kv_heads, ffn, vocab, context, **others):
    return dict(model_type=model_type, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
                num_key_value_heads=kv_heads, intermediate_size=ffn, vocab_size=vocab, max_position_embeddings=context,
                rms_norm_eps=1e-6, **others)


def qwen3_next():
    """Qwen3-Next-80B-A3B: 36 layers of gated DeltaNet (16 heads of keys, 32 of values, width 128), 12 of attention whose
    queries have a gate; 512 experts."""
    dims = (2048, 48, 16, 2, 5120, 151_936)
    model = decoder("qwen3-next", *dims, head=256, moe=(512, 10, 512, 512, 0), head_norms=2, attending=12)
    keys, values, hidden = 16 * 128, 32 * 128, 2048
    for m in model.matrices:
        if m.role == "q":
            m.rows *= 2  # the gate
    model.mixed = 12 * 2 * (16 + 2) * 256
    made = 2 * keys + 2 * values + 2 * 32
    model.matrices += [
        Matrix("mixer", "other", 2 * keys + 2 * values, hidden, 36),
        Matrix("mixer", "other", hidden, values, 36),
    ]
    model.mixed += 36 * (made + values)
    # The projection to rates of decay and write strengths stays in 16 bits.
    model.others += 36 * ((2 * keys + values) * 4 + 2 * 32 + 128 + 2 * 32 * hidden) + 48 * hidden
    # A state of 128 × 128 for each head of values, and three tokens of the convolution, in f32.
    model.state = 36 * 4 * (32 * 128 * 128 + 3 * (2 * keys + values))
    model.state_heads = 16
    kinds = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(48)]
    model.config = config_of(
        "qwen3_next", *dims, 262_144, head_dim=256, layer_types=kinds, linear_conv_kernel_dim=4, linear_key_head_dim=128,
        linear_num_key_heads=16, linear_num_value_heads=32, linear_value_head_dim=128, num_experts=512,
        num_experts_per_tok=10, moe_intermediate_size=512, shared_expert_intermediate_size=512, decoder_sparse_step=1,
        norm_topk_prob=True, tie_word_embeddings=False)
    return model


def deepseek_v32():
    """DeepSeek-V3.2: DeepSeek-V3 with an indexer of 64 heads of 128, which chooses 2048 tokens; it stays in 16 bits."""
    dims, rank = (7168, 61, 128, 128, 18_432, 129_280), 1536
    indexer = 64 * 128 * rank + 128 * 7168 + 64 * 7168 + 2 * 128
    model = decoder("deepseek-v3.2", *dims, moe=(256, 8, 2048, 2048, 3), mla=(rank, 512, 64, 128, 128), extra=61 * indexer)
    cache = model.caches[0]
    cache.key, cache.chosen, cache.index, cache.index_queries = cache.key + 128, 2048, 128, 64
    model.config = config_of(
        "deepseek_v32", *dims, 163_840, n_routed_experts=256, num_experts_per_tok=8, n_group=8, topk_group=4,
        topk_method="noaux_tc", moe_intermediate_size=2048, n_shared_experts=1, first_k_dense_replace=3, moe_layer_freq=1,
        norm_topk_prob=True, scoring_func="sigmoid", routed_scaling_factor=2.5, q_lora_rank=rank, kv_lora_rank=512,
        qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, index_n_heads=64, index_head_dim=128, index_topk=2048,
        tie_word_embeddings=False)
    return model


def models():
    oss = dict(head=64, window=128)
    kinds = lambda n, full: ["full_attention" if full(i) else "sliding_attention" for i in range(n)]
    gemma = dict(tie_word_embeddings=True)
    mistral, mixtral = (4096, 32, 32, 8, 14_336, 32_000), (4096, 32, 32, 8, 14_336, 32_000)
    gemma2, gemma3 = (3584, 42, 16, 8, 14_336, 256_000), (3840, 48, 16, 8, 15_360, 262_208)
    qwen3, moe2 = (4096, 36, 32, 8, 12_288, 151_936), (3584, 28, 28, 4, 18_944, 151_936)
    lite = (2048, 27, 16, 16, 10_944, 102_400)
    return {m.name: m for m in [
        decoder("SmolLM2-135M", 576, 30, 9, 3, 1536, 49_152, tied=True),
        decoder("Qwen2.5-0.5B", 896, 24, 14, 2, 4864, 151_936, tied=True, bias=True),
        decoder("Llama-3.2-1B", 2048, 16, 32, 8, 8192, 128_256, tied=True),
        decoder("Llama-2-7B", 4096, 32, 32, 32, 11_008, 32_000),
        decoder("Llama-3.1-8B", 4096, 32, 32, 8, 14_336, 128_256),
        decoder("Qwen2.5-32B", 5120, 64, 40, 8, 27_648, 152_064, bias=True),
        decoder("Llama-3.1-70B", 8192, 80, 64, 8, 28_672, 128_256),
        decoder("Llama-3.1-405B", 16_384, 126, 128, 8, 53_248, 128_256),
        decoder("Qwen3-30B-A3B", 2048, 48, 32, 4, 6144, 151_936, head=128, moe=(128, 8, 768, 0, 0), head_norms=2),
        decoder("Qwen3-235B-A22B", 4096, 94, 64, 4, 12_288, 151_936, head=128, moe=(128, 8, 1536, 0, 0), head_norms=2),
        decoder("gpt-oss-20b", 2880, 24, 64, 8, 2880, 201_088, windowed=12, moe=(32, 4, 2880, 0, 0),
                extra=24 * (64 + 2880 + 5120 + 32), expert_biases=24 * 32 * 3 * 2880, **oss),
        decoder("gpt-oss-120b", 2880, 36, 64, 8, 2880, 201_088, windowed=18, moe=(128, 4, 2880, 0, 0),
                extra=36 * (64 + 2880 + 5120 + 128), expert_biases=36 * 128 * 3 * 2880, **oss),
        decoder("DeepSeek-V3", 7168, 61, 128, 128, 18_432, 129_280, moe=(256, 8, 2048, 2048, 3),
                mla=(1536, 512, 64, 128, 128)),
        decoder("mistral", *mistral, window=4096, windowed=32,
                config=config_of("mistral", *mistral, 32_768, sliding_window=4096, tie_word_embeddings=False)),
        decoder("mixtral", *mixtral, moe=(8, 2, 14_336, 0, 0),
                config=config_of("mixtral", *mixtral, 32_768, num_local_experts=8, num_experts_per_tok=2,
                                 tie_word_embeddings=False)),
        decoder("gemma2-9b", *gemma2, head=256, tied=True, norms=4, window=4096, windowed=21,
                config=config_of("gemma2", *gemma2, 8192, head_dim=256, sliding_window=4096, query_pre_attn_scalar=256,
                                 attn_logit_softcapping=50.0, final_logit_softcapping=30.0,
                                 layer_types=kinds(42, lambda i: i % 2), hidden_activation="gelu_pytorch_tanh", **gemma)),
        decoder("gemma3-12b", *gemma3, head=256, tied=True, norms=4, head_norms=2, window=1024, windowed=40,
                config=config_of("gemma3_text", *gemma3, 131_072, head_dim=256, sliding_window=1024,
                                 query_pre_attn_scalar=256, layer_types=kinds(48, lambda i: i % 6 == 5),
                                 hidden_activation="gelu_pytorch_tanh", **gemma)),
        decoder("qwen3-8b", *qwen3, head_norms=2,
                config=config_of("qwen3", *qwen3, 40_960, head_dim=128, tie_word_embeddings=False)),
        decoder("qwen2-57b-a14b", *moe2, bias=True, moe=(64, 8, 2560, 20_480, 0), extra=28 * 3584,
                config=config_of("qwen2_moe", *moe2, 32_768, num_experts=64, num_experts_per_tok=8,
                                 moe_intermediate_size=2560, shared_expert_intermediate_size=20_480,
                                 decoder_sparse_step=1, norm_topk_prob=False, tie_word_embeddings=False)),
        decoder("deepseek-v2-lite", *lite, moe=(64, 6, 1408, 2816, 1), mla=(0, 512, 64, 128, 128),
                config=config_of("deepseek_v2", *lite, 32_768, n_routed_experts=64, num_experts_per_tok=6, n_group=1,
                                 topk_group=1, topk_method="greedy", moe_intermediate_size=1408, n_shared_experts=2,
                                 first_k_dense_replace=1, moe_layer_freq=1, norm_topk_prob=False, scoring_func="softmax",
                                 routed_scaling_factor=1.0, q_lora_rank=None, kv_lora_rank=512, qk_rope_head_dim=64,
                                 qk_nope_head_dim=128, v_head_dim=128, tie_word_embeddings=False)),
        qwen3_next(),
        deepseek_v32(),
    ]}
