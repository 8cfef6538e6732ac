#!/usr/bin/env python3
"""Makes the tiny random models under tests/data/tiny, with the logits that transformers computes for each.

    python make_tiny_models.py OUT [VARIANT…]

One directory per architecture feature (rotary scaling, window, bias, norm, storage dtype, sharding). Each holds the
files of `save_pretrained` and `expected.safetensors`: `input_ids` I64[2,T] and `logits` F32[2,T,V], computed on CPU in
float32 (weights stored in a 16-bit dtype are read back and widened first), eager attention, whole sequence, no cache.

For each feature the script recomputes the logits with only that feature removed, and refuses a model whose logits change
by less than 100 times the tests' tolerance (1e-4). So a reader that ignores the feature cannot pass.

Needs torch 2.15, transformers 5.23, safetensors 0.8, tokenizers 0.23 (other versions may draw other random numbers).
"""

import copy
import json
import re
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers import BitNetConfig, BitNetForCausalLM, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM
from transformers import Gemma2Config, Gemma2ForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig, GemmaConfig, GemmaForCausalLM
from transformers import GPT2Config, GPT2LMHeadModel, GPTNeoXConfig, GPTNeoXForCausalLM, GptOssConfig, GptOssForCausalLM
from transformers import MixtralConfig, MixtralForCausalLM, OlmoConfig, OlmoForCausalLM, Olmo2Config, Olmo2ForCausalLM
from transformers import Phi3Config, Phi3ForCausalLM, PhiConfig, PhiForCausalLM
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers import ApertusConfig, ApertusForCausalLM, BambaConfig, BambaForCausalLM
from transformers import HunYuanDenseV1Config, HunYuanDenseV1ForCausalLM, Mamba2Config, Mamba2ForCausalLM
from transformers import ArceeConfig, ArceeForCausalLM, Exaone4Config, Exaone4ForCausalLM, SeedOssConfig, SeedOssForCausalLM
from transformers import Cohere2Config, Cohere2ForCausalLM, Ernie4_5Config, Ernie4_5ForCausalLM, Glm4Config, Glm4ForCausalLM
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, GraniteConfig, GraniteForCausalLM
from transformers import Llama4ForCausalLM, Llama4TextConfig
from transformers import Gemma3nForCausalLM, Gemma3nTextConfig
from transformers import Gemma4ForCausalLM, Gemma4TextConfig
from transformers import Ernie4_5_MoeConfig, Ernie4_5_MoeForCausalLM, ExaoneMoeConfig, ExaoneMoeForCausalLM
from transformers import Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM, MiniMaxM2Config, MiniMaxM2ForCausalLM
from transformers import DeepseekV32Config, DeepseekV32ForCausalLM, GlmMoeDsaConfig, GlmMoeDsaForCausalLM
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM
from transformers import Ministral3Config, Ministral3ForCausalLM
from transformers import MinistralConfig, MinistralForCausalLM, Olmo3Config, Olmo3ForCausalLM
from transformers import AutoModelForImageTextToText
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, LlavaConfig, LlavaForConditionalGeneration
from transformers import Mistral3Config, Mistral3ForConditionalGeneration
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers import Gemma4Config, Gemma4ForConditionalGeneration, Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration
from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration
from transformers import Lfm2Config, Lfm2ForCausalLM, Lfm2MoeConfig, Lfm2MoeForCausalLM, Qwen3NextConfig, Qwen3NextForCausalLM
from transformers import Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig, Qwen3_5TextConfig
from transformers import FalconH1Config, FalconH1ForCausalLM
from transformers import JambaConfig, JambaForCausalLM
from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM, NemotronHConfig, NemotronHForCausalLM
from transformers import Cohere2MoeConfig, Cohere2MoeForCausalLM, KimiLinearConfig, KimiLinearForCausalLM
from transformers import SmolLM3Config, SmolLM3ForCausalLM, Starcoder2Config, Starcoder2ForCausalLM

TOLERANCE = 1e-4
# Value of a common field that a config does not have.
ABSENT = object()
BATCH, TOKENS = 2, 24


@dataclass(frozen=True)
class Variant:
    name: str
    config_class: type
    model_class: type
    config: dict
    # Features to remove, one at a time: a label and the config fields (or the "weights:..." edit) that remove it.
    without: dict = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    tokens: int = TOKENS
    shard: str | None = None
    old_style_config: bool = False
    # Keeps the experts of a layer fused, as transformers 5 holds them in memory.
    fused: bool = False
    # Transposes fused experts, as published checkpoints have them.
    columns: bool = False
    # Class and fields of the config of a multimodal model; `config` is that of its text model then.
    outer: tuple | None = None
    tokenizer: bool = False
    # Another `model_type` that config.json states after the logits are recorded: one that transformers does not have.
    model_type: str | None = None
    # Names in the checkpoint that transformers writes otherwise than its publisher: a pattern and its replacement.
    renames: tuple = ()
    # Class and `model_type` of a multimodal model whose towers transformers cannot build here (they need timm): the text
    # model's config and tensors are moved into it, beside random tensors for the towers.
    inside: tuple | None = None
    # Seed of the random weights and tokens; by default, of the place in this list.
    seed: int | None = None


def llama(name, without, **rest):
    keys = {k: rest.pop(k) for k in ("dtype", "tokens", "shard", "old_style_config", "tokenizer") if k in rest}
    return Variant(name, LlamaConfig, LlamaForCausalLM, rest, without, **keys)


def rope(theta, rope_type="default", **rest):
    return {"rope_type": rope_type, "rope_theta": theta, **rest}


# With head_dim 8, theta 100 and 32 positions in training the four wavelengths (6.3, 19.9, 62.8, 198.7) fall into all
# three bands of the llama3 rule: kept, blended, divided.
LLAMA3 = rope(100.0, "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
# With head_dim 16, theta 10 and 16 positions the YaRN ramp runs over dimensions 0..4, not from one to the next.
YARN = rope(10.0, "yarn", factor=4.0, original_max_position_embeddings=16)
# Multi-head latent attention with experts behind a dense first layer; the widths all differ.
MLA = dict(kv_lora_rank=12, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=8, num_key_value_heads=4, moe_intermediate_size=12,
           n_routed_experts=6, num_experts_per_tok=2, n_shared_experts=2, first_k_dense_replace=1)
# So many heads that scores are rarely all 0, which would leave the choice to the order of equal ones.
INDEXER = dict(index_topk=8, index_head_dim=8, index_n_heads=8)
INDEXER_MATTERS = {"choice": {"index_topk": 2048}, "index keys": "weights:indexer.wk.weight=0.1",
                   "index queries": "weights:indexer.wq_b.weight=0.1", "index weights": "weights:indexer.weights_proj.weight=0.1",
                   "bias of the index keys": "weights:indexer.k_norm.bias=0"}
# Beyond 16 positions the long factors hold.
LONGROPE = rope(100.0, "longrope", short_factor=[1.0, 1.1, 1.2, 1.3], long_factor=[1.5, 2.0, 4.0, 8.0])
GEMMA4_ROPE = {"sliding_attention": rope(10.0), "full_attention": rope(100.0, "proportional", partial_rotary_factor=0.5)}
GEMMA4 = dict(head_dim=8, global_head_dim=12, tie_word_embeddings=True, sliding_window=8, final_logit_softcapping=4.0,
              rope_parameters=GEMMA4_ROPE)
# As Gemma 3n E2B: three streams, the last two layers read the keys and values of the first two.
GEMMA3N = dict(head_dim=8, tie_word_embeddings=True, sliding_window=8, final_logit_softcapping=4.0, num_hidden_layers=4, num_kv_shared_layers=2,
               hidden_size_per_layer_input=6, vocab_size_per_layer_input=64, intermediate_size=16, altup_num_inputs=3, laurel_rank=5,
               layer_types=["sliding_attention", "full_attention"] * 2, activation_sparsity_pattern=[0.6, 0.0, 0.4, 0.0],
               rope_parameters={"sliding_attention": rope(10.0), "full_attention": rope(100.0)})
# Gated DeltaNet with two value heads to a key head, whose widths all differ.
DELTA = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=6, linear_value_head_dim=5, linear_conv_kernel_dim=4,
             num_hidden_layers=3, layer_types=["linear_attention", "full_attention", "linear_attention"], head_dim=8)
# Edits of its parts; without the decay a state forgets nothing.
DELTA_WITHOUT = {"decay": "weights:A_log=-100", "step bias": "weights:dt_bias=0", "norm of the result": "weights:linear_attn.norm.weight=1",
                 "convolution": "weights:conv1d.weight=1", "q norm": "weights:q_norm.weight=0",
                 "rope theta": {"rope_parameters": rope(10000.0, partial_rotary_factor=0.5)},
                 "partial rotation": {"rope_parameters": rope(100.0, partial_rotary_factor=1.0)}}
# Edits of the parts of Mamba-2.
MAMBA_WITHOUT = {"decay": "weights:A_log=-100", "step bias": "weights:dt_bias=0", "skip": r"weights:\.D$=0",
                 "norm of the result": "weights:(mamba|mixer).norm.weight=1", "convolution": "weights:conv1d.weight=1",
                 "bias of the convolution": "weights:conv1d.bias=0"}
FALCON = dict(embedding_multiplier=1.5, lm_head_multiplier=0.7, key_multiplier=0.6, attention_out_multiplier=1.4, attention_in_multiplier=0.8,
              ssm_in_multiplier=1.3, ssm_out_multiplier=0.6, mlp_multipliers=[0.7, 1.6], ssm_multipliers=[0.5, 1.2, 0.8, 1.4, 0.6])
NEMOTRON = dict(layers_block_type=["linear_attention", "moe", "full_attention", "moe"], head_dim=12, mamba_num_heads=6, mamba_head_dim=5,
                n_groups=3, ssm_state_size=4, layer_norm_epsilon=0.05, routed_scaling_factor=1.5)
COHERE_MOE = dict(num_hidden_layers=3, layer_types=["full_attention", "full_attention", "sliding_attention"], head_dim=8, sliding_window=8,
                  mlp_layer_types=["dense", "sparse", "sparse"], intermediate_size=10, prefix_dense_intermediate_size=14, num_experts=4,
                  num_experts_per_tok=2, num_shared_experts=2, logit_scale=0.25, tie_word_embeddings=True, rope_parameters=rope(100.0),
                  rms_norm_eps=None)
# Fields of COMMON that a model of mixers alone does not have.
NO_ATTENTION = dict.fromkeys(["num_attention_heads", "num_key_value_heads", "intermediate_size", "max_position_embeddings",
                              "rms_norm_eps", "rope_parameters"], ABSENT)
YARN_MSCALE = {**YARN, "beta_fast": 4.0, "beta_slow": 0.5, "mscale": 1.5, "mscale_all_dim": 0.5, "truncate": False}

# Towers as small as they can be, and tokens that no text here has.
SIGLIP = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4)
QWEN_VISION = dict(depth=1, hidden_size=8, intermediate_size=8, num_heads=2, out_hidden_size=32, patch_size=4, spatial_merge_size=2,
                   temporal_patch_size=1)
QWEN3_VISION = dict(num_position_embeddings=16, deepstack_visual_indexes=[0])
QWEN_TOKENS = dict(image_token_id=0, video_token_id=1, vision_start_token_id=1, vision_end_token_id=2)
MROPE = rope(100.0, mrope_section=[2, 1, 1])

VARIANTS = [
    llama("llama1-mha", {"rope theta": {"rope_parameters": rope(1e6)}, "rms_norm_eps": {"rms_norm_eps": 1e-6}},
          num_key_value_heads=4, rope_parameters=rope(10000.0), rms_norm_eps=0.05),
    llama("llama2-gqa-tied", {"rope theta": {"rope_parameters": rope(1e6)}}, tie_word_embeddings=True,
          vocab_size=288, tokens=12, tokenizer=True),
    llama("llama3-rope", {"rope scaling": {"rope_parameters": rope(100.0)}}, rope_parameters=LLAMA3),
    llama("llama-rope-linear", {"rope scaling": {"rope_parameters": rope(10000.0)}},
          rope_parameters=rope(10000.0, "linear", factor=4.0), old_style_config=True),
    llama("llama-yarn", {
        "rope scaling": {"rope_parameters": rope(10.0)},
        "attention factor": {"rope_parameters": {**YARN, "attention_factor": 1.0}},
        "frequency ramp": {"rope_parameters": {**YARN, "beta_fast": 1e-3, "beta_slow": 5e-4}},
    }, num_attention_heads=2, num_key_value_heads=2, rope_parameters=YARN),
    llama("llama-yarn-mscale", {
        "rope scaling": {"rope_parameters": rope(10.0)},
        "mscale": {"rope_parameters": {k: v for k, v in YARN_MSCALE.items() if k != "mscale"}},
        "betas": {"rope_parameters": {k: v for k, v in YARN_MSCALE.items() if not k.startswith("beta")}},
        "truncate": {"rope_parameters": {k: v for k, v in YARN_MSCALE.items() if k != "truncate"}},
    }, num_attention_heads=2, num_key_value_heads=2, rope_parameters=YARN_MSCALE),
    llama("llama-yarn-attention-factor", {
        "rope scaling": {"rope_parameters": rope(10.0)},
        "attention_factor": {"rope_parameters": YARN},
    }, num_attention_heads=2, num_key_value_heads=2, rope_parameters={**YARN, "attention_factor": 0.8}, old_style_config=True),
    llama("llama-bias", {
        "qkv bias": "weights:[qkv]_proj.bias=0",
        "o bias": "weights:o_proj.bias=0",
        "mlp bias": "weights:mlp.*bias=0",
    }, attention_bias=True, mlp_bias=True),
    llama("llama-headdim", {"rope theta": {"rope_parameters": rope(1e6)}}, head_dim=12, shard="20KB"),
    llama("mqa", {}, num_key_value_heads=1, dtype=torch.float16),
    Variant("mistral-window", MistralConfig, MistralForCausalLM, {"sliding_window": 8, "head_dim": None},
            {"window": {"sliding_window": None}, "window length": {"sliding_window": 9}}, dtype=torch.bfloat16),
    Variant("qwen2-bias", Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True},
            {"qkv bias": "weights:_proj.bias=0"}),
    Variant("qwen2-window", Qwen2Config, Qwen2ForCausalLM,
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            {"window": {"use_sliding_window": False}, "unwindowed first layer": {"max_window_layers": 0}}),
    Variant("qwen3-qknorm", Qwen3Config, Qwen3ForCausalLM, {"head_dim": 12},
            {"q norm weight": "weights:q_norm.weight=1", "k norm weight": "weights:k_norm.weight=1"}),
    Variant("bitnet-silu", BitNetConfig, BitNetForCausalLM, {"hidden_act": "silu", "tie_word_embeddings": True},
            {"attn_sub_norm": "weights:attn_sub_norm.weight=1", "ffn_sub_norm": "weights:ffn_sub_norm.weight=1",
             "activation": {"hidden_act": "relu2"}}),
    Variant("bitnet-relu2", BitNetConfig, BitNetForCausalLM, {"hidden_act": "relu2"},
            {"attn_sub_norm": "weights:attn_sub_norm.weight=1", "activation": {"hidden_act": "silu"}}),
    Variant("gemma", GemmaConfig, GemmaForCausalLM, {"head_dim": 12, "tie_word_embeddings": True, "hidden_act": "gelu"},
            {"norm weight": "weights:input_layernorm.weight=0"}),
    Variant("gemma2", Gemma2Config, Gemma2ForCausalLM,
            {"head_dim": 12, "tie_word_embeddings": True, "sliding_window": 8, "query_pre_attn_scalar": 5,
             "attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0},
            {"attention soft cap": {"attn_logit_softcapping": None}, "logit soft cap": {"final_logit_softcapping": None},
             "query scale": {"query_pre_attn_scalar": 12}, "window": {"sliding_window": 64},
             "norm after the attention": "weights:post_attention_layernorm.weight=0",
             "norm after the MLP": "weights:post_feedforward_layernorm.weight=0"}),
    Variant("gemma3", Gemma3TextConfig, Gemma3ForCausalLM,
            {"head_dim": 12, "tie_word_embeddings": True, "sliding_window": 8, "query_pre_attn_scalar": 5,
             "layer_types": ["sliding_attention", "full_attention"], "rope_parameters": {
                 "sliding_attention": rope(10.0), "full_attention": rope(1000.0, "linear", factor=8.0)}},
            {"local theta": {"rope_parameters": {
                "sliding_attention": rope(1000.0), "full_attention": rope(1000.0, "linear", factor=8.0)}},
             "global scaling": {"rope_parameters": {"sliding_attention": rope(10.0), "full_attention": rope(1000.0)}},
             "q norm": "weights:q_norm.weight=0", "k norm": "weights:k_norm.weight=0"}),
    Variant("phi3", Phi3Config, Phi3ForCausalLM, {"pad_token_id": 0, "sliding_window": 8,
            "rope_parameters": rope(10000.0, partial_rotary_factor=0.5)},
            {"partial rotation": {"rope_parameters": rope(10000.0, partial_rotary_factor=1.0)}, "window": {"sliding_window": None}}),
    Variant("phi3-longrope", Phi3Config, Phi3ForCausalLM, {"pad_token_id": 0, "original_max_position_embeddings": 16,
            "rope_parameters": LONGROPE},
            {"long factors": {"rope_parameters": {**LONGROPE, "long_factor": LONGROPE["short_factor"]}},
             "attention factor": {"rope_parameters": {**LONGROPE, "attention_factor": 1.0}}}),
    Variant("phi", PhiConfig, PhiForCausalLM, {"layer_norm_eps": 0.05, "rope_parameters": rope(100.0, partial_rotary_factor=0.5)},
            {"head bias": "weights:lm_head.bias=0", "norm bias": "weights:layernorm.bias=0", "eps": {"layer_norm_eps": 1e-5},
             "partial rotation": {"rope_parameters": rope(100.0, partial_rotary_factor=1.0)}}),
    Variant("olmo", OlmoConfig, OlmoForCausalLM, {"clip_qkv": 0.9}, {"clip": {"clip_qkv": None}}),
    Variant("olmo2", Olmo2Config, Olmo2ForCausalLM, {},
            {"q norm": "weights:q_norm.weight=1", "norm after the MLP": "weights:post_feedforward_layernorm.weight=1"}),
    Variant("gpt2", GPT2Config, GPT2LMHeadModel, {"tie_word_embeddings": True, "layer_norm_epsilon": 0.05, "n_inner": 40},
            {"positions": "weights:wpe.weight=0", "norm bias": "weights:ln_1.bias=0", "eps": {"layer_norm_epsilon": 1e-5}}),
    Variant("gpt-neox", GPTNeoXConfig, GPTNeoXForCausalLM, {"rope_parameters": rope(100.0, partial_rotary_factor=0.25)},
            {"partial rotation": {"rope_parameters": rope(100.0, partial_rotary_factor=1.0)},
             "parallel residual": {"use_parallel_residual": False}, "GELU": {"hidden_act": "quick_gelu"}}),
    Variant("gpt-neox-serial", GPTNeoXConfig, GPTNeoXForCausalLM,
            {"rope_parameters": rope(100.0, partial_rotary_factor=0.5), "use_parallel_residual": False, "hidden_act": "gelu_new"},
            {"serial residual": {"use_parallel_residual": True}}),
    Variant("mixtral", MixtralConfig, MixtralForCausalLM, {"num_local_experts": 4, "num_experts_per_tok": 2},
            {"second expert": {"num_experts_per_tok": 1}}),
    Variant("qwen2-moe", Qwen2MoeConfig, Qwen2MoeForCausalLM,
            {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 20,
             "mlp_only_layers": [0]},
            {"shared expert": "weights:shared_expert.down_proj.weight=0", "its gate": "weights:shared_expert_gate.weight=0",
             "unnormed weights": {"norm_topk_prob": True}}),
    Variant("qwen3-moe", Qwen3MoeConfig, Qwen3MoeForCausalLM,
            {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 12, "head_dim": 12, "norm_topk_prob": True},
            {"normed weights": {"norm_topk_prob": False}, "q norm weight": "weights:q_norm.weight=1"}),
    Variant("deepseek-v2", DeepseekV2Config, DeepseekV2ForCausalLM,
            {**MLA, "q_lora_rank": None, "n_group": 2, "topk_group": 1, "topk_method": "group_limited_greedy",
             "routed_scaling_factor": 2.0},
            {"groups": {"topk_method": "greedy"}, "scaling": {"routed_scaling_factor": 1.0}}),
    Variant("deepseek-v3", DeepseekV3Config, DeepseekV3ForCausalLM,
            {**MLA, "q_lora_rank": 10, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.5, "norm_topk_prob": True,
             "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
            {"groups": {"topk_group": 2}, "correction": "weights:e_score_correction_bias=0", "scaling": {"routed_scaling_factor": 1.0},
             "norm": {"norm_topk_prob": False}, "mscale": {"rope_parameters": {**YARN, "mscale": 1.0}},
             "interleaving": {"rope_interleave": False}}),
    Variant("gpt-oss", GptOssConfig, GptOssForCausalLM,
            {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8, "head_dim": 8, "intermediate_size": 16,
             "swiglu_limit": 0.5, "rope_parameters": {**YARN, "truncate": False}},
            {"sinks": "weights:sinks=-100", "limit": {"swiglu_limit": 7.0}, "window": {"sliding_window": 64},
             "router bias": "weights:router.bias=0", "expert bias": "weights:down_proj_bias=0"}),
    Variant("smollm3", SmolLM3Config, SmolLM3ForCausalLM,
            {"no_rope_layers": [0, 1], "tie_word_embeddings": True, "rope_parameters": rope(100.0), "pad_token_id": 0},
            {"layer without positions": {"no_rope_layers": [1, 1]}, "its place": {"no_rope_layers": [1, 0]}}),
    Variant("seed-oss", SeedOssConfig, SeedOssForCausalLM, {"head_dim": 12, "attention_bias": True, "attention_out_bias": False},
            {"qkv bias": "weights:[qkv]_proj.bias=0"}),
    Variant("seed-oss-biases", SeedOssConfig, SeedOssForCausalLM,
            {"head_dim": None, "attention_bias": False, "attention_out_bias": True, "mlp_bias": True},
            {"o bias": "weights:o_proj.bias=0", "mlp bias": "weights:mlp.*bias=0"}),
    Variant("arcee", ArceeConfig, ArceeForCausalLM, {"head_dim": 12}, {"activation": {"hidden_act": "silu"}}),
    Variant("exaone4", Exaone4Config, Exaone4ForCausalLM,
            {"num_hidden_layers": 3, "sliding_window": 8, "rope_parameters": rope(100.0),
             "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
            {"window": {"sliding_window": 64}, "windows and layers without positions": {
                "sliding_window": None, "layer_types": ["full_attention"] * 3},
             "q norm": "weights:q_norm.weight=1", "norm after the MLP": "weights:post_feedforward_layernorm.weight=1"}),
    Variant("starcoder2", Starcoder2Config, Starcoder2ForCausalLM,
            {"norm_epsilon": 0.05, "sliding_window": 8, "tie_word_embeddings": True},
            {"window": {"sliding_window": None}, "eps": {"norm_epsilon": 1e-5}, "norm bias": "weights:layernorm.bias=0",
             "bias": "weights:c_fc.bias=0"}),
    Variant("granite", GraniteConfig, GraniteForCausalLM,
            {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 2.5,
             "rms_norm_eps": 0.05},
            {"embedding multiplier": {"embedding_multiplier": 1.0}, "residual multiplier": {"residual_multiplier": 1.0},
             "attention multiplier": {"attention_multiplier": 8 ** -0.5}, "logits scaling": {"logits_scaling": 1.0},
             "eps": {"rms_norm_eps": 1e-5}}),
    Variant("ernie4-5", Ernie4_5Config, Ernie4_5ForCausalLM,
            {"head_dim": 12, "use_bias": True, "rope_parameters": rope(100.0)},
            {"bias": "weights:_proj.bias=0", "rope theta": {"rope_parameters": rope(10000.0)}}),
    Variant("glm4", Glm4Config, Glm4ForCausalLM,
            {"head_dim": 8, "attention_bias": True, "pad_token_id": 0, "rope_parameters": rope(100.0, partial_rotary_factor=0.5)},
            {"qkv bias": "weights:_proj.bias=0", "norm after the attention": "weights:post_self_attn_layernorm.weight=1",
             "norm after the MLP": "weights:post_mlp_layernorm.weight=1",
             "partial rotation": {"rope_parameters": rope(100.0, partial_rotary_factor=1.0)}}),
    Variant("cohere2", Cohere2Config, Cohere2ForCausalLM,
            {"num_hidden_layers": 3, "sliding_window": 8, "logit_scale": 0.25, "layer_norm_eps": 0.05, "tie_word_embeddings": True,
             "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "rope_parameters": rope(100.0)},
            {"window": {"sliding_window": 64}, "logit scale": {"logit_scale": 1.0}, "eps": {"layer_norm_eps": 1e-5},
             "norm weight": "weights:input_layernorm.weight=1", "rope theta": {"rope_parameters": rope(10000.0)},
             "layers without positions": {"layer_types": ["sliding_attention"] * 3, "sliding_window": 64}}),
    Variant("ministral", MinistralConfig, MinistralForCausalLM,
            {"num_hidden_layers": 3, "head_dim": 12, "sliding_window": 8,
             "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
            {"window": {"sliding_window": 64}, "layer without a window": {"layer_types": ["sliding_attention"] * 3}}),
    Variant("olmo3", Olmo3Config, Olmo3ForCausalLM,
            {"num_hidden_layers": 3, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
             "rope_parameters": {"sliding_attention": rope(100.0), "full_attention": YARN | {"rope_theta": 100.0}}},
            {"window": {"sliding_window": 64}, "q norm": "weights:q_norm.weight=1",
             "scaling of layers without a window": {"rope_parameters": {"sliding_attention": rope(100.0), "full_attention": rope(100.0)}}}),
    Variant("glm4-moe", Glm4MoeConfig, Glm4MoeForCausalLM,
            {"head_dim": 8, "attention_bias": True, "use_qk_norm": True, "moe_intermediate_size": 12, "n_routed_experts": 6,
             "num_experts_per_tok": 4, "n_shared_experts": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5,
             "rope_parameters": rope(100.0, partial_rotary_factor=0.5)},
            {"correction": "weights:e_score_correction_bias=0", "scaling": {"routed_scaling_factor": 1.0},
             "norm": {"norm_topk_prob": False}, "q norm": "weights:q_norm.weight=1", "qkv bias": "weights:[qkv]_proj.bias=0",
             "partial rotation": {"rope_parameters": rope(100.0, partial_rotary_factor=1.0)}}),
    Variant("ernie4-5-moe", Ernie4_5_MoeConfig, Ernie4_5_MoeForCausalLM,
            {"num_hidden_layers": 3, "moe_num_experts": 5, "moe_k": 2, "moe_num_shared_experts": 2, "moe_intermediate_size": 8,
             "moe_layer_start_index": 1, "moe_layer_end_index": 1, "rope_parameters": rope(100.0)},
            {"correction": "weights:e_score_correction_bias=0", "shared experts": "weights:shared_experts.down_proj.weight=0",
             "rope theta": {"rope_parameters": rope(10000.0)}}),
    Variant("minimax-m2", MiniMaxM2Config, MiniMaxM2ForCausalLM,
            {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 12, "head_dim": 12, "rotary_dim": 4,
             "rope_parameters": rope(100.0, partial_rotary_factor=4 / 12)},
            {"correction": "weights:e_score_correction_bias=0", "q norm": "weights:q_norm.weight=1",
             "partial rotation": {"rotary_dim": None, "rope_parameters": rope(100.0, partial_rotary_factor=1.0)}}),
    Variant("kimi-k2", DeepseekV3Config, DeepseekV3ForCausalLM,
            {**MLA, "q_lora_rank": 10, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "routed_scaling_factor": 1.5,
             "norm_topk_prob": True, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
            {"correction": "weights:e_score_correction_bias=0", "scaling": {"routed_scaling_factor": 1.0}},
            model_type="kimi_k2"),
    Variant("exaone-moe", ExaoneMoeConfig, ExaoneMoeForCausalLM,
            {"num_hidden_layers": 3, "sliding_window": 8, "rope_parameters": rope(100.0), "head_dim": 8,
             "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "num_experts": 4, "num_experts_per_tok": 3, "routed_scaling_factor": 0.8,
             "moe_intermediate_size": 8, "num_shared_experts": 2, "mlp_layer_types": ["sparse", "dense", "sparse"]},
            {"window": {"sliding_window": 64}, "q norm": "weights:q_norm.weight=1", "scaling": {"routed_scaling_factor": 1.0},
             "correction": "weights:e_score_correction_bias=0", "shared experts": "weights:shared_experts.down_proj.weight=0",
             "layer without positions": {"sliding_window": 64, "layer_types": ["sliding_attention"] * 3}}),
    Variant("glm4-moe-lite", Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM,
            {**{k: v for k, v in MLA.items() if k != "first_k_dense_replace"}, "q_lora_rank": 10, "num_hidden_layers": 3,
             "mlp_layer_types": ["sparse", "dense", "sparse"], "n_routed_experts": 4, "n_shared_experts": 1},
            {"correction": "weights:e_score_correction_bias=0", "scaling": {"routed_scaling_factor": 1.0},
             "interleaving": {"rope_interleave": False}}),
    Variant("ministral3", Ministral3Config, Ministral3ForCausalLM,
            {"head_dim": 8, "rope_parameters": {**YARN, "original_max_position_embeddings": 8, "mscale": 1.0, "mscale_all_dim": 1.0,
                                                 "llama_4_scaling_beta": 0.3}},
            {"growth of the queries": {"rope_parameters": {
                **YARN, "original_max_position_embeddings": 8, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.0}}}),
    Variant("qwen3-moe-fused", Qwen3MoeConfig, Qwen3MoeForCausalLM,
            {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 12, "norm_topk_prob": True},
            {"normed weights": {"norm_topk_prob": False}}, dtype=torch.bfloat16, fused=True, seed=1046),
    Variant("gemma3-vision", None, Gemma3ForConditionalGeneration,
            {"model_type": "gemma3_text", "head_dim": 12, "sliding_window": 8, "query_pre_attn_scalar": 5,
             "layer_types": ["sliding_attention", "full_attention"], "rope_parameters": {
                 "sliding_attention": rope(10.0), "full_attention": rope(1000.0, "linear", factor=8.0)}},
            {"window": {"sliding_window": 64}, "q norm": "weights:language_model.*q_norm.weight=0"}, dtype=torch.bfloat16,
            outer=(Gemma3Config, {"vision_config": {**SIGLIP, "vision_use_head": False}, "mm_tokens_per_image": 4, "image_token_index": 0,
                                  "boi_token_index": 1, "eoi_token_index": 2}), seed=1047),
    Variant("mistral3", None, Mistral3ForConditionalGeneration, {"model_type": "mistral", "head_dim": 12, "sliding_window": None},
            {"rope theta": {"rope_parameters": rope(10.0)}}, dtype=torch.bfloat16,
            outer=(Mistral3Config, {"vision_config": {**SIGLIP, "model_type": "pixtral", "head_dim": 4}, "image_token_index": 0,
                                    "tie_word_embeddings": False}), seed=1048),
    Variant("llava", None, LlavaForConditionalGeneration, {"model_type": "llama", "rope_parameters": rope(100.0)},
            {"rope theta": {"rope_parameters": rope(10.0)}},
            dtype=torch.bfloat16,
            outer=(LlavaConfig, {"vision_config": {**SIGLIP, "model_type": "clip_vision_model", "projection_dim": 8}, "image_token_index": 0}), seed=1049),
    Variant("qwen2.5-vl", None, Qwen2_5_VLForConditionalGeneration, {"rope_parameters": {**MROPE, "rope_theta": 1000.0}, "rms_norm_eps": 0.05},
            {"qkv bias": "weights:self_attn.*bias=0"}, dtype=torch.bfloat16,
            outer=(Qwen2_5_VLConfig, {"vision_config": {**QWEN_VISION, "window_size": 8, "fullatt_block_indexes": [0]}, **QWEN_TOKENS}), seed=1050),
    Variant("qwen3-vl", None, Qwen3VLForConditionalGeneration, {"head_dim": 8, "rope_parameters": {**MROPE, "mrope_interleaved": True}},
            {"q norm": "weights:language_model.*q_norm.weight=1"}, dtype=torch.bfloat16,
            outer=(Qwen3VLConfig, {"vision_config": {**QWEN_VISION, **QWEN3_VISION}, **QWEN_TOKENS}), seed=1051),
    Variant("qwen3-vl-moe", None, Qwen3VLMoeForConditionalGeneration,
            {"head_dim": 8, "rope_parameters": {**MROPE, "mrope_interleaved": True}, "num_experts": 4, "num_experts_per_tok": 2,
             "moe_intermediate_size": 12},
            {"experts of a token": {"num_experts_per_tok": 1}}, dtype=torch.bfloat16, columns=True,
            outer=(Qwen3VLMoeConfig, {"vision_config": {**QWEN_VISION, **QWEN3_VISION}, **QWEN_TOKENS}), seed=1052),
    Variant("qwen3-next", Qwen3NextConfig, Qwen3NextForCausalLM,
            {**DELTA, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 20,
             "mlp_only_layers": [0], "rms_norm_eps": 0.3, "rope_parameters": rope(100.0, partial_rotary_factor=0.5)},
            {**DELTA_WITHOUT, "rates": "weights:in_proj_ba=0", "shared expert": "weights:shared_expert.down_proj.weight=0",
             "normed weights": {"norm_topk_prob": False}}, seed=1046),
    Variant("qwen3-5", Qwen3_5TextConfig, Qwen3_5ForCausalLM,
            {**DELTA, "linear_value_head_dim": 7, "attention_bias": True, "rms_norm_eps": 0.3,
             "rope_parameters": rope(100.0, partial_rotary_factor=0.5, mrope_section=[1, 1, 0], mrope_interleaved=True)},
            {**DELTA_WITHOUT, "eps": {"rms_norm_eps": 1e-5}, "write rate": "weights:in_proj_b=0", "decay rate": "weights:in_proj_a=0", "gate": "weights:in_proj_z=1",
             "bias": "weights:_proj.bias=0"}, seed=1047),
    Variant("lfm2", Lfm2Config, Lfm2ForCausalLM,
            {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "norm_eps": 0.05, "conv_bias": True,
             "conv_L_cache": 3, "block_multiple_of": 10, "intermediate_size": 24, "tie_word_embeddings": True,
             "rope_parameters": rope(100.0), "pad_token_id": 0},
            {"convolution": "weights:conv.conv.weight=1", "bias of the convolution": "weights:conv.conv.bias=0", "eps": {"norm_eps": 1e-5},
             "q norm": "weights:q_layernorm.weight=1", "bias of the projections": "weights:conv.(in|out)_proj.bias=0"}, seed=1048),
    Variant("granite-hybrid", GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM,
            {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
             "num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 24, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2,
             "mamba_d_state": 6, "mamba_proj_bias": True, "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2,
             "logits_scaling": 2.5, "rms_norm_eps": 0.05, "time_step_limit": [0.02, 2.0]},
            {**MAMBA_WITHOUT, "step limits": {"time_step_limit": [0.0, 100.0]},
             "residual multiplier": {"residual_multiplier": 1.0}, "eps": {"rms_norm_eps": 1e-5},
             "bias of the projections": "weights:mamba.(in|out)_proj.bias=0"}, seed=1049),
    Variant("nemotron-h", NemotronHConfig, NemotronHForCausalLM,
            {"layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"], "head_dim": 12, "mamba_num_heads": 6,
             "mamba_head_dim": 5, "n_groups": 3, "ssm_state_size": 4, "layer_norm_epsilon": 0.05, "time_step_min": 0.3},
            {**MAMBA_WITHOUT, "least step": {"time_step_min": 0.001}, "activation": {"mlp_hidden_act": "silu"},
             "eps": {"layer_norm_epsilon": 1e-5}}, seed=1050),
    Variant("lfm2-moe", Lfm2MoeConfig, Lfm2MoeForCausalLM,
            {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "norm_eps": 0.05, "num_dense_layers": 1,
             "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "routed_scaling_factor": 1.5,
             "rope_parameters": rope(100.0), "pad_token_id": 0},
            {"convolution": "weights:conv.conv.weight=1", "eps": {"norm_eps": 1e-5}, "correction": "weights:expert_bias=0",
             "scaling": {"routed_scaling_factor": 1.0}, "norm": {"norm_topk_prob": False}}, seed=1074),
    Variant("falcon-h1", FalconH1Config, FalconH1ForCausalLM,
            {"head_dim": 8, "mamba_d_ssm": 40, "mamba_n_heads": 5, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 6,
             "time_step_limit": [0.02, 2.0], **FALCON, "rms_norm_eps": 0.05, "rope_parameters": rope(100.0)},
            {**{label: edit for label, edit in MAMBA_WITHOUT.items() if label != "norm of the result"},
             **{field: {field: 1.0} for field in FALCON if not field.endswith("multipliers")},
             "mlp_multipliers": {"mlp_multipliers": [1.0, 1.0]}, "ssm_multipliers": {"ssm_multipliers": [1.0] * 5},
             "step limits": {"time_step_limit": [0.0, 100.0]}, "rope theta": {"rope_parameters": rope(10000.0)}}, seed=1052),
    Variant("falcon-h1-norm", FalconH1Config, FalconH1ForCausalLM,
            {"head_dim": 12, "mamba_d_ssm": None, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 4,
             "mamba_rms_norm": True, "mamba_norm_before_gate": True, "rms_norm_eps": 0.3},
            {"norm of the result": "weights:mamba.norm.weight=1", "norm before the gate": {"mamba_norm_before_gate": False}}, seed=1053),
    Variant("qwen3-5-moe", Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM,
            {**DELTA, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "num_experts": 4, "num_experts_per_tok": 2,
             "moe_intermediate_size": 12, "shared_expert_intermediate_size": 20, "rms_norm_eps": 0.3,
             "rope_parameters": rope(100.0, partial_rotary_factor=0.5)},
            {**DELTA_WITHOUT, "shared expert": "weights:shared_expert.down_proj.weight=0", "its gate": "weights:shared_expert_gate.weight=0",
             "second expert": {"num_experts_per_tok": 1}}, seed=1054),
    Variant("jamba", JambaConfig, JambaForCausalLM,
            {"num_hidden_layers": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
             "num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 16, "mamba_d_state": 6, "mamba_dt_rank": 5, "mamba_expand": 1,
             "rms_norm_eps": 0.5},
            {"decay": "weights:A_log=-100", "step bias": "weights:dt_proj.bias=0", "skip": r"weights:\.D$=0",
             "convolution": "weights:conv1d.weight=1", "bias of the convolution": "weights:conv1d.bias=0", "eps": {"rms_norm_eps": 1e-5},
             "norm of steps": "weights:dt_layernorm.weight=1", "norm of B": "weights:b_layernorm.weight=1",
             "norm of C": "weights:c_layernorm.weight=1", "second expert": {"num_experts_per_tok": 1}}, seed=1055),
]

VARIANTS += [
    # As Gemma 4 E2B: per-layer inputs, keys and values shared by later layers, which have wide MLPs.
    Variant("gemma4", Gemma4TextConfig, Gemma4ForCausalLM,
            {**GEMMA4, "num_hidden_layers": 4, "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
             "hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 64, "intermediate_size": 16,
             "layer_types": ["sliding_attention", "full_attention"] * 2},
            {"window": {"sliding_window": 64}, "local theta": {"rope_parameters": GEMMA4_ROPE | {"sliding_attention": rope(1000.0)}},
             "partial rotation": {"rope_parameters": GEMMA4_ROPE | {"full_attention": rope(100.0, "proportional")}},
             "layer scalar": "weights:layer_scalar=1", "per-layer inputs": "weights:per_layer_projection.weight=0",
             "their embeddings": "weights:embed_tokens_per_layer.weight=0", "their projection": "weights:per_layer_model_projection.weight=0",
             "q norm": "weights:q_norm.weight=1", "logit soft cap": {"final_logit_softcapping": None}}, seed=1052),
    # As Gemma 4 31B: in layers without a window the keys are the values too.
    Variant("gemma4-keys-are-values", Gemma4TextConfig, Gemma4ForCausalLM,
            {**GEMMA4, "num_hidden_layers": 2, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
             "layer_types": ["sliding_attention", "full_attention"]},
            {"window": {"sliding_window": 64}, "layer scalar": "weights:layer_scalar=1", "k norm": "weights:k_norm.weight=1"}, seed=1053),
    Variant("llama4", Llama4TextConfig, Llama4ForCausalLM,
            {"num_hidden_layers": 3, "head_dim": 8, "intermediate_size": 8, "intermediate_size_mlp": 24, "num_local_experts": 4,
             "num_experts_per_tok": 1, "moe_layers": [0, 2], "no_rope_layers": [1, 1, 0], "attention_chunk_size": 10,
             "attn_temperature_tuning": True, "floor_scale": 6, "attn_scale": 0.5, "use_qk_norm": True, "rope_parameters": rope(100.0)},
            {"chunks": {"attention_chunk_size": 64}, "length of chunks": {"attention_chunk_size": 11},
             "growth of the queries": {"attn_temperature_tuning": False}, "QK norm": {"use_qk_norm": False},
             "shared expert": "weights:shared_expert.down_proj.weight=0", "experts": "weights:experts.down_proj=0",
             "second expert": {"num_experts_per_tok": 2}, "layer without positions": {"no_rope_layers": [1, 1, 1]}}, seed=1055),
    # As Gemma 4 26B: experts beside the MLP of every layer.
    Variant("gemma4-moe", Gemma4TextConfig, Gemma4ForCausalLM,
            {**GEMMA4, "num_hidden_layers": 2, "hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 4,
             "top_k_experts": 3, "moe_intermediate_size": 8, "layer_types": ["sliding_attention", "full_attention"]},
            {"experts": "weights:experts.down_proj=0", "their factors": "weights:per_expert_scale=1", "router's norm": "weights:router.scale=1",
             "norm after experts": "weights:post_feedforward_layernorm_2=1", "norm before experts": "weights:pre_feedforward_layernorm_2=1",
             "norm after the MLP": "weights:post_feedforward_layernorm_1=1"}, seed=1056),
    Variant("qwen3-5-moe-vision", None, Qwen3_5MoeForConditionalGeneration,
            {**DELTA, "model_type": "qwen3_5_moe_text", "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"],
             "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 20,
             "rms_norm_eps": 0.3, "rope_parameters": rope(100.0, partial_rotary_factor=0.5, mrope_section=[1, 1, 0], mrope_interleaved=True)},
            {"shared expert": "weights:shared_expert.down_proj.weight=0", "second expert": {"num_experts_per_tok": 1}},
            dtype=torch.bfloat16, fused=True, seed=1070,
            outer=(Qwen3_5MoeConfig, {"vision_config": {**QWEN_VISION, "num_position_embeddings": 16}, **QWEN_TOKENS})),
    Variant("gemma4-vision", None, Gemma4ForConditionalGeneration,
            {**GEMMA4, "model_type": "gemma4_text", "layer_types": ["sliding_attention", "full_attention"], "hidden_size_per_layer_input": 0,
             "num_kv_shared_layers": 0},
            {"window": {"sliding_window": 64}}, dtype=torch.bfloat16, seed=1071,
            outer=(Gemma4Config, {"vision_config": {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
                                                    "num_key_value_heads": 2, "head_dim": 4, "patch_size": 4, "position_embedding_size": 16},
                                  "audio_config": None, "tie_word_embeddings": True, "boi_token_id": 0, "eoi_token_id": 1, "image_token_id": 2,
                                  "boa_token_id": 0, "audio_token_id": 1})),
    # The indexer chooses all tokens: their number is below index_topk. In the variants named `sparse` it chooses 8.
    Variant("deepseek-v32", DeepseekV32Config, DeepseekV32ForCausalLM,
            {**MLA, "q_lora_rank": 10, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.5, "index_topk": 2048,
             "index_head_dim": 8, "index_n_heads": 2, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
            {"groups": {"topk_group": 2}, "correction": "weights:e_score_correction_bias=0",
             "mscale": {"rope_parameters": {**YARN, "mscale": 1.0}}}, seed=1080),
    Variant("glm-moe-dsa", GlmMoeDsaConfig, GlmMoeDsaForCausalLM,
            {**MLA, "q_lora_rank": 10, "num_hidden_layers": 3, "n_shared_experts": 1, "n_routed_experts": 4, "index_topk": 2048,
             "index_head_dim": 8, "index_n_heads": 2, "indexer_types": ["full", "shared", "full"]},
            {"correction": "weights:e_score_correction_bias=0", "scaling": {"routed_scaling_factor": 1.0}}, seed=1083),
    Variant("deepseek-v32-sparse", DeepseekV32Config, DeepseekV32ForCausalLM,
            {**MLA, "q_lora_rank": 10, "n_group": 2, "topk_group": 1, **INDEXER, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
            INDEXER_MATTERS, seed=1093, tokens=40),
    Variant("glm-moe-dsa-sparse", GlmMoeDsaConfig, GlmMoeDsaForCausalLM,
            {**MLA, "q_lora_rank": 10, "num_hidden_layers": 3, "n_shared_experts": 1, "n_routed_experts": 4, **INDEXER,
             "indexer_types": ["full", "shared", "full"]},
            INDEXER_MATTERS, seed=1098, tokens=40),
]
VARIANTS += [
    # As Granite 4 H Tiny and Small: routed experts beside a shared MLP.
    Variant("granite-hybrid-moe", GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM,
            {"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 5, "num_experts_per_tok": 2,
             "intermediate_size": 10, "shared_intermediate_size": 14, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 6,
             "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 2.5},
            {"experts": "weights:experts.down_proj=0", "second expert": {"num_experts_per_tok": 1},
             "shared MLP": "weights:shared_mlp.output_linear.weight=0", "residual multiplier": {"residual_multiplier": 1.0}}, seed=1080),
    Variant("gemma3n", Gemma3nTextConfig, Gemma3nForCausalLM, GEMMA3N,
            {"window": {"sliding_window": 64}, "logit soft cap": {"final_logit_softcapping": 400.0}, "cut-off gates": {"activation_sparsity_pattern": [0.0] * 4},
             "factors of corrected states": {"altup_correct_scale": False}, "prediction": "weights:prediction_coefs=0", "correction": "weights:correction_coefs=0",
             "norm of the router": "weights:altup.router_norm=1", "low-rank path": "weights:laurel.linear_right=0", "its norm": "weights:post_laurel_norm=1",
             "streams": "weights:altup_projections=0", "joined streams": "weights:altup_unembed_projections=0",
             "per-layer inputs": "weights:per_layer_projection.weight=0", "q norm": "weights:q_norm.weight=1"}, seed=1095),
    Variant("gemma3n-vision", Gemma3nTextConfig, Gemma3nForCausalLM, {**GEMMA3N, "num_hidden_layers": 2, "num_kv_shared_layers": 0,
            "layer_types": ["sliding_attention", "full_attention"], "activation_sparsity_pattern": [0.6, 0.0]},
            {"window": {"sliding_window": 64}}, dtype=torch.bfloat16, inside=("Gemma3nForConditionalGeneration", "gemma3n"), seed=1096),
    # As Nemotron 3 Nano: layers of experts without a gate.
    Variant("nemotron-h-moe", NemotronHConfig, NemotronHForCausalLM,
            {**NEMOTRON, "n_routed_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 10, "moe_shared_expert_intermediate_size": 14},
            {"correction": "weights:e_score_correction_bias=0", "scaling": {"routed_scaling_factor": 1.0}, "normed weights": {"norm_topk_prob": False},
             "shared expert": "weights:shared_experts.down_proj.weight=0", "activation": {"mlp_hidden_act": "silu"}}, seed=1081),
    # As Nemotron 3 Super: the experts read and write a latent; they are chosen from groups.
    Variant("nemotron-h-latent", NemotronHConfig, NemotronHForCausalLM,
            {**NEMOTRON, "n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 10, "moe_shared_expert_intermediate_size": 14,
             "moe_latent_size": 12, "n_group": 3, "topk_group": 2},
            {"groups": {"topk_group": 3}, "latent": "weights:fc1_latent_proj.weight=0.02",
             "shared expert": "weights:shared_experts.down_proj.weight=0"}, seed=1082),
    # As Command A+: dense layers that are rotated, then experts; the mean of routed and shared experts.
    Variant("cohere2-moe", Cohere2MoeConfig, Cohere2MoeForCausalLM,
            {**COHERE_MOE, "expert_selection_fn": "sigmoid", "layer_norm_eps": 0.05},
            {"window": {"sliding_window": 64}, "logit scale": {"logit_scale": 1.0}, "eps": {"layer_norm_eps": 1e-5},
             "scores": {"expert_selection_fn": "softmax"}, "normed weights": {"norm_topk_prob": False},
             "mean": {"shared_expert_combination_strategy": "sum"}, "rotation of the dense layer": {"prefix_dense_sliding_window_pattern": 2},
             "layer without positions": {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"], "sliding_window": 64}}, seed=1083),
    Variant("cohere2-moe-softmax", Cohere2MoeConfig, Cohere2MoeForCausalLM,
            {**COHERE_MOE, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "mlp_layer_types": ["sparse"] * 2,
             "expert_selection_fn": "softmax", "shared_expert_combination_strategy": "sum", "rms_norm_eps": 0.05},
            {"scores": {"expert_selection_fn": "sigmoid"}, "sum": {"shared_expert_combination_strategy": "average"},
             "norm": {"rms_norm_eps": None}, "eps": {"rms_norm_eps": 1e-5}}, seed=1084),
    # Kimi delta attention in two of three layers, latent attention without positions, experts behind a dense layer. transformers
    # renames all of `mlp`, published checkpoints have that name in the dense layer.
    Variant("kimi-linear", KimiLinearConfig, KimiLinearForCausalLM,
            {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_hidden_layers": 3,
             "mlp_layer_types": ["dense", "sparse", "sparse"], "linear_head_dim": 6, "linear_num_heads": 3, "linear_conv_kernel_dim": 4,
             "kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8, "num_key_value_heads": 4, "q_lora_rank": None,
             "num_local_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 8, "intermediate_size": 16, "n_group": 1, "topk_group": 1,
             "routed_scaling_factor": 1.5, "rms_norm_eps": 0.05, "pad_token_id": 0, "rope_parameters": ABSENT},
            {"decay": "weights:A_log=-100", "step bias": "weights:dt_bias=0", "norm of the result": "weights:o_norm.weight=1",
             "convolution": "weights:conv1d.weight=1", "forget gate": "weights:f_b_proj=0", "write rate": r"weights:self_attn\.b_proj=0",
             "gate": "weights:g_b_proj=0", "eps": {"rms_norm_eps": 1e-5}, "correction": "weights:e_score_correction_bias=0",
             "scaling": {"routed_scaling_factor": 1.0}, "shared expert": "weights:shared_experts.down_proj.weight=0"},
            renames=(r"block_sparse_moe\.(gate|up|down)_proj", r"mlp.\1_proj"), seed=1091),
]

# Gated DeltaNet with heads of keys and values of one width, and Mamba twice as wide as the model: what GGUF has.
SQUARE = {**DELTA, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_hidden_layers": 2,
          "layer_types": ["linear_attention", "full_attention"], "rms_norm_eps": 1e-6, "rope_parameters": rope(100.0, partial_rotary_factor=0.5)}
SQUARE_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12, shared_expert_intermediate_size=20)
VARIANTS += [
    Variant("qwen3-next-square", Qwen3NextConfig, Qwen3NextForCausalLM, {**SQUARE, **SQUARE_EXPERTS},
            {"decay": "weights:A_log=-100", "rates": "weights:in_proj_ba=0"}, seed=1080),
    Variant("qwen3-5-square", Qwen3_5TextConfig, Qwen3_5ForCausalLM, {**SQUARE},
            {"decay": "weights:A_log=-100", "step bias": "weights:dt_bias=0"}, seed=1091),
    Variant("qwen3-5-moe-square", Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM, {**SQUARE, **SQUARE_EXPERTS},
            {"decay": "weights:A_log=-100", "second expert": {"num_experts_per_tok": 1}}, seed=1082),
    Variant("jamba-wide", JambaConfig, JambaForCausalLM,
            {"num_hidden_layers": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
             "num_experts": 3, "num_experts_per_tok": 2, "intermediate_size": 16, "mamba_d_state": 6, "mamba_dt_rank": 5, "mamba_expand": 2},
            {"decay": "weights:A_log=-100", "skip": r"weights:\.D$=0"}, seed=1083),
]

# DeepSeek-V4: a window alone, then beside it entries of five tokens, then chosen entries of two; experts by token in the first
# layer. The context is longer than the window and than the chosen entries.
V4_ROPE = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)
VARIANTS += [
    Variant("deepseek-v4", DeepseekV4Config, DeepseekV4ForCausalLM,
            {"layer_types": ["sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention"], "num_hidden_layers": 3,
             "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 5}, "sliding_window": 6, "num_key_value_heads": 1,
             "head_dim": 8, "partial_rotary_factor": 0.5, "q_lora_rank": 10, "o_groups": 2, "o_lora_rank": 6, "moe_intermediate_size": 8,
             "mlp_layer_types": ["hash_moe", "moe", "moe"], "n_routed_experts": 4, "num_experts_per_tok": 2, "swiglu_limit": 0.5,
             "index_topk": 4, "index_head_dim": 6, "index_n_heads": 8, "hc_mult": 3, "hc_sinkhorn_iters": 3, "hc_eps": 0.01,
             "rope_theta": 10.0, "compress_rope_theta": 20.0, "rope_parameters": V4_ROPE, "intermediate_size": ABSENT},
            {"window": {"sliding_window": 64}, "choice": {"index_topk": 64}, "iterations": {"hc_sinkhorn_iters": 1}, "eps of mixing": {"hc_eps": 1e-6},
             "mixing": "weights:_hc.fn=0", "scale of mixing": "weights:_hc.scale=1", "base of mixing": "weights:_hc.base=0",
             "joined streams": "weights:hc_head.hc_fn=0", "correction": "weights:e_score_correction_bias=0",
             "scaling": {"routed_scaling_factor": 1.0}, "limit": {"swiglu_limit": 100.0}, "experts by token": "weights:tid2eid=0",
             "shared expert": "weights:shared_experts.down_proj.weight=0", "sinks": "weights:sinks=0",
             "places in a block": "weights:compressor.position_bias=0", "places in a block of the indexer": "weights:indexer.position_bias=0",
             "index queries": "weights:indexer.q_b_proj.weight=0.1", "index keys": "weights:indexer.kv_proj.weight=0.1",
             "index weights": "weights:scorer.weights_proj.weight=0.1", "norm of the latent": "weights:q_a_norm.weight=1",
             "norm of the keys": "weights:self_attn.kv_norm.weight=1", "norm of the entries": "weights:compressor.kv_norm.weight=1",
             "theta": {"rope_theta": 1000.0}, "theta of entries": {"compress_rope_theta": 1000.0},
             "YaRN": {"rope_parameters": {"rope_type": "default"}}},
            tokens=32, seed=1100),
]

NTK_ALPHA = rope(10.0, "dynamic", alpha=50.0, factor=1.0)
VARIANTS += [
    Variant("hunyuan", HunYuanDenseV1Config, HunYuanDenseV1ForCausalLM, {"head_dim": 12, "rope_parameters": NTK_ALPHA},
            {"alpha": {"rope_parameters": {**NTK_ALPHA, "alpha": 1.0}}, "q norm": "weights:query_layernorm.weight=1",
             "k norm": "weights:key_layernorm.weight=1"}, seed=1101),
    # As Bamba 9B: attention in the listed layers, which rotates half of a head.
    Variant("bamba", BambaConfig, BambaForCausalLM,
            {"num_hidden_layers": 3, "attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2,
             "mamba_d_state": 6, "time_step_limit": [0.02, 2.0], "rms_norm_eps": 0.05, "rope_parameters": rope(100.0)},
            {**MAMBA_WITHOUT, "step limits": {"time_step_limit": [0.0, 100.0]}, "eps": {"rms_norm_eps": 1e-5},
             "rope theta": {"rope_parameters": rope(10000.0)}}, seed=1106),
    Variant("mamba2", Mamba2Config, Mamba2ForCausalLM,
            {"num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 6, "layer_norm_epsilon": 0.05, **NO_ATTENTION},
            {**MAMBA_WITHOUT, "eps": {"layer_norm_epsilon": 1e-5}}, seed=1103),
    Variant("apertus", ApertusConfig, ApertusForCausalLM, {"rope_parameters": LLAMA3},
            {"factor above 0": "weights:alpha_p=-20", "factor below 0": "weights:alpha_n=-20", "slope": r"weights:act_fn\.beta=0",
             "limit of the exponential": r"weights:act_fn\.eps=0", "q norm": "weights:q_norm.weight=1",
             "k norm": "weights:k_norm.weight=1", "rope scaling": {"rope_parameters": rope(100.0)}}, seed=1104),
]

COMMON = dict(
    vocab_size=64, hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=64, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, rms_norm_eps=1e-5,
    rope_parameters=rope(10000.0),
)


def main(out, names):
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    for number, variant in enumerate(VARIANTS):
        if names and variant.name not in names:
            continue
        path = out / variant.name
        shutil.rmtree(path, ignore_errors=True)
        torch.manual_seed(variant.seed or 1000 + number)
        make(variant, path)
        size = sum(file.stat().st_size for file in path.iterdir())
        print(f"{variant.name:28} {size:7} bytes, {len(list(path.iterdir()))} files")


def make(variant, path):
    config = configure(variant, {})
    text = config.text_config if variant.outer else config
    model = build(variant, config)
    randomize(model)
    options = {"max_shard_size": variant.shard} if variant.shard else {}
    model.to(variant.dtype).save_pretrained(path, save_original_format=not variant.fused, **options)
    if variant.columns:
        file = path / "model.safetensors"
        turned = {name: x.transpose(1, 2).contiguous() if ".experts." in name else x for name, x in load_file(file).items()}
        save_file(turned, file, metadata={"format": "pt"})
    if variant.renames:
        file = path / "model.safetensors"
        save_file({re.sub(*variant.renames, name): x for name, x in load_file(file).items()}, file, metadata={"format": "pt"})
    (path / "generation_config.json").unlink(missing_ok=True)
    if variant.old_style_config:
        write_old_style(path / "config.json")
    if variant.tokenizer:
        write_tokenizer(path, config.vocab_size)

    input_ids = torch.randint(3, text.vocab_size, (BATCH, variant.tokens))
    loader = AutoModelForImageTextToText if variant.outer else AutoModelForCausalLM
    model = loader.from_pretrained(path, dtype=torch.float32, attn_implementation="eager",
                                                 experts_implementation="eager")
    logits = forward(model, input_ids)
    assert logits.dtype == torch.float32 and logits.isfinite().all()
    assert torch.equal(logits, forward(reference(model, variant, config), input_ids)), "config.json does not describe the model made"
    check_structure(model, variant, config)
    check_conditioning(model, input_ids, logits)
    check_choices(model, input_ids)
    for label, change in variant.without.items():
        check_matters(variant, config, model, input_ids, logits, label, change)
    if variant.model_type:
        config = json.loads((path / "config.json").read_text()) | {"model_type": variant.model_type}
        (path / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    if variant.inside:
        put_inside(path, *variant.inside)
    save_file({"input_ids": input_ids, "logits": logits}, path / "expected.safetensors")


def put_inside(path, architecture, model_type):
    """Moves a text model into a multimodal one."""
    text = json.loads((path / "config.json").read_text())
    outer = {name: text.pop(name) for name in ("transformers_version", "dtype", "tie_word_embeddings")}
    text.pop("architectures")
    config = {"architectures": [architecture], "model_type": model_type, "text_config": text, **outer}
    (path / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    file = path / "model.safetensors"
    tensors = {re.sub("^model\\.", "model.language_model.", name): x for name, x in load_file(file).items()}
    blocks = [f"vision_tower.timm_model.blocks.{i}.{part}" for i in range(5) for part in ("conv", "pw_exp")]
    for tower in (*blocks, "audio_tower.conformer.0.linear", "embed_vision.embedding", "embed_vision.embedding_projection", "embed_audio.embedding"):
        shape = (8, 1, 3, 3) if tower.endswith("conv") else (8, 8)
        tensors[f"model.{tower}.weight"] = torch.randn(shape).to(torch.bfloat16)
    save_file(tensors, file, metadata={"format": "pt"})


def configure(variant, change):
    """Returns the config of a variant with some fields of the text model changed."""
    fields = {name: copy.deepcopy(x) for name, x in (COMMON | variant.config | change).items() if x is not ABSENT}
    if variant.outer is None:
        return variant.config_class(**fields)
    outer, rest = variant.outer
    return outer(text_config=fields, **copy.deepcopy({"tie_word_embeddings": False, **rest}))


def build(variant, config):
    config._attn_implementation = config._experts_implementation = "eager"
    # Saving a model makes it a string, which xIELU does not take.
    config.dtype = getattr(torch, config.dtype) if isinstance(config.dtype, str) else config.dtype
    return variant.model_class(config).eval()


def reference(model, variant, config):
    twin = build(variant, copy.deepcopy(config))
    twin.load_state_dict(model.state_dict())
    return twin.float()


def randomize(model):
    """Draws weights large enough that every feature affects the logits, norm weights around 1, non-zero biases."""
    # The norms of Gemma 1 to 3 and Qwen3-Next add 1 to their weights, except that of a mixer's result.
    center = 0.0 if re.match("Gemma[23]?For|Qwen3Next|Qwen3_5", type(model).__name__) else 1.0
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *corrections(model)]:
            if re.match("Gemma3n|Gemma4", type(model).__name__) and name.endswith("q_norm.weight"):
                # Scores are not scaled.
                parameter.uniform_(0.1, 0.5)
            elif re.search(r"(linear_attn|mamba|mixer)\.norm\.weight$", name):
                parameter.uniform_(0.7, 1.3)
            elif name.endswith("tid2eid"):
                # Different experts for each token.
                experts = model.config.n_routed_experts
                parameter.copy_(torch.rand(len(parameter), experts).argsort(dim=-1)[:, :parameter.shape[1]])
            elif re.search("hc(_head.hc)?.(fn|_scale|scale)$", name):
                parameter.normal_(0.0, 0.5)
            elif name.endswith("A_log"):
                parameter.uniform_(-2.0, 0.5)
            elif name.endswith("act_fn.eps"):
                # Far enough below 0 to matter.
                parameter.uniform_(-0.5, -0.2)
            elif name.endswith("act_fn.beta"):
                parameter.uniform_(0.3, 0.7)
            elif name.endswith("conv1d.weight") or name.endswith("conv.conv.weight"):
                parameter.normal_(0.0, 0.5)
            elif name.endswith("norm.weight"):
                parameter.uniform_(center - 0.3, center + 0.3)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.3)
            elif name.endswith("correct_output_scale"):
                parameter.uniform_(0.5, 1.5)
            elif "modality_router" in name:
                # Divided by the width.
                parameter.normal_(0.0, 6.0)
            elif name.endswith("router.scale"):
                parameter.uniform_(1.0, 3.0)
            elif "Llama4" in type(model).__name__ and ".experts." in name:
                # A token has one expert: another choice must not change everything.
                parameter.normal_(0.0, 0.12)
            elif re.search("layer_scalar|per_expert_scale", name):
                parameter.uniform_(0.6, 1.4)
            elif "layernorm" in name or re.search(r"ln_(1|2|f)", name) or "layer_norm" in name:
                parameter.uniform_(center - 0.3, center + 0.3)
            elif re.search("embed_tokens|wte|wpe|embed_in|sinks", name):
                parameter.normal_(0.0, 0.5)
            else:
                parameter.normal_(0.0, 0.25)


def corrections(model):
    """Score corrections of routers, factors of layers and constants of activations are buffers, not parameters."""
    buffers = "e_score_correction_bias|expert_bias|layer_scalar|tid2eid|act_fn"
    return [(name, buffer) for name, buffer in model.named_buffers() if re.search(buffers, name)]


def forward(model, input_ids):
    with torch.no_grad():
        return model.eval()(input_ids, use_cache=False).logits.contiguous()


def check_structure(model, variant, config):
    tied = model.get_output_embeddings().weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    assert tied == config.tie_word_embeddings, variant.name
    assert variant.config_class is not LlamaConfig or not variant.config.get("attention_bias") or model.model.layers[0].self_attn.o_proj.bias is not None
    if variant.shard:
        assert (Path(model.name_or_path) / "model.safetensors.index.json").exists()


def check_conditioning(model, input_ids, logits):
    """Checks that float64 matrix products give the same logits, so a correct reader with another summation order is within tolerance."""
    wide = forward(copy.deepcopy(model).double(), input_ids)
    error = (wide - logits).abs().max().item()
    assert error < TOLERANCE / 3, f"float32 rounding alone moves the logits by {error}"
    print(f"  float32 rounding moves the logits by {error:.2g}")


def check_choices(model, input_ids):
    """Checks that rounding does not change which tokens an indexer chooses."""
    count, gaps, topk = getattr(model.config, "index_topk", None), [], torch.Tensor.topk
    if count is None or count >= input_ids.shape[1]:
        return

    def recorded(scores, k, **options):
        if k == count:
            best = topk(scores, k + 1, dim=-1).values
            gap = best[..., -2] - best[..., -1]
            gaps.append(gap[gap.isfinite()].min().item())  # the queries before see no more
        return topk(scores, k, **options)

    torch.Tensor.topk = recorded
    try:
        forward(model, input_ids)
    finally:
        torch.Tensor.topk = topk
    print(f"  scores of chosen tokens and others: at least {min(gaps):.2g} apart")
    assert gaps and min(gaps) > 10 * TOLERANCE


def check_matters(variant, config, model, input_ids, logits, label, change):
    if isinstance(change, str):
        other = reference(model, variant, config)
        edit_weights(other, change.removeprefix("weights:"))
    else:
        other = build(variant, configure(variant, change)).float()
        other.load_state_dict(model.state_dict())
    difference = (forward(other, input_ids) - logits).abs().max().item()
    print(f"  {variant.name}: without {label}: logits move by {difference:.3g} (largest {logits.abs().max():.3g})")
    assert difference > 100 * TOLERANCE, f"{variant.name}: {label} barely matters: {difference}"


def edit_weights(model, edit):
    pattern, value = edit.split("=")
    changed = 0
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *corrections(model)]:
            if re.search(pattern, name):
                parameter.fill_(float(value))
                changed += 1
    assert changed, f"{pattern} matches no parameter"


def write_old_style(path):
    """Writes config.json in the style of transformers 4: rope_theta and rope_scaling with `type` instead of rope_parameters."""
    config = json.loads(path.read_text())
    parameters = config.pop("rope_parameters")
    config["rope_theta"] = parameters.pop("rope_theta")
    config["rope_scaling"] = {"type": parameters.pop("rope_type"), **parameters}
    config["torch_dtype"] = config.pop("dtype")
    config["transformers_version"] = "4.38.0"
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


# --- a byte-level BPE tokenizer, trained here ---

SENTENCES = """The quick brown fox jumps over the lazy dog while the other dogs watch the fox.
There is no other way than the one that they know, and they know that the way is long.
In the morning the sun rises over the hills, and in the evening it sets behind the hills.
She said that the numbers were rounded to the nearest even value, and then stored in the table.
Once upon a time there was a little girl; the little girl had a little dog.
"""

SAMPLE_TEXTS = [
    "",
    "Once upon a time",
    " leading space",
    "trailing space ",
    "two  spaces   three",
    "line one\nline two\n\nline four",
    "tab\tand\r\nreturn",
    "It's the fox's, isn't it? They'll know.",
    "12345 + 67 = 12412",
    "Привет, мир",
    "emoji 🦀🔥 and e\u0301",
    "中文，ok",
    "literal <s> and </s> in text",
    "\u00a0no-break\u200bzero",
]


def write_tokenizer(path, vocab_size):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(SENTENCES.splitlines(), trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())))
    assert tokenizer.get_vocab_size() == vocab_size, tokenizer.get_vocab_size()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({
        "add_bos_token": True, "bos_token": "<s>", "clean_up_tokenization_spaces": False, "eos_token": "</s>",
        "tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}, indent=2) + "\n")
    samples = ",\n".join(json.dumps(sample(path, text), ensure_ascii=True) for text in SAMPLE_TEXTS)
    (path / "tokenizer_expected.json").write_text(f"[\n{samples}\n]\n")


def sample(path, text):
    tokenizer = AutoTokenizer.from_pretrained(path)
    with_special = tokenizer(text)["input_ids"]
    without = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert with_special == [1, *without], text
    assert Tokenizer.from_file(str(path / "tokenizer.json")).encode(text, add_special_tokens=False).ids == without
    decoded = tokenizer.decode(without, skip_special_tokens=False)
    assert decoded == text, (decoded, text)
    return {"text": text, "ids_with_special": with_special, "ids_without_special": without, "decoded": decoded}


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), sys.argv[2:])
