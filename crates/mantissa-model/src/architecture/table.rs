//! Table of architectures, one row each. A row states its differences from the base row at its end ([`super::bases`]).

use mantissa_store::convention::StackForm;

use super::Architecture;
use super::bases::{
    ATTENTION_BIAS, COHERE2, DEEPSEEK, DEEPSEEK_EXPERTS, DEEPSEEK_INDEXER, DEEPSEEK_V3, DEEPSEEK_V3_EXPERTS,
    DEEPSEEK_V4, DEEPSEEK_V32, EXPERTS, GEMMA, GEMMA2, GRANITE_SCALES, LFM2, LLAMA, QWEN_EXPERTS, QWEN_MOE,
    QWEN2, QWEN3_5, ROPE,
};
use super::features::{Activation, DenseMlp, HeadNorms, MlpForm, NormForm, NormPlaces, QkvForm, Scores};
use super::names::{ExpertNames, Names};
use super::rules::{
    BiasRules, ByLayer, Eps, ExpertLayers, ExpertRules, FeedForward, Flag, GroupRules, GrowthRule, HeadDim,
    IndexerRules, LatentRules, LogitScale, NoRope, QueryScale, RecurrentRules, RopeRules, ScaleRules,
    SharedRules, Softcaps, Windows,
};
use crate::graph::kinds::LinearKind;

/// Every architecture.
pub(super) static TABLE: &[Architecture] = &[
    LLAMA,
    // Llama 4 (text): adjacent pairs rotated, chunks and QK norms without weights in rotated layers, growing queries in
    // the others; experts whose input is weighted, with a shared one.
    Architecture {
        name: "llama4_text",
        class: "Llama4ForCausalLM",
        names: Names {
            linears: &[
                (LinearKind::Gate, "feed_forward.gate_proj"),
                (LinearKind::Up, "feed_forward.up_proj"),
                (LinearKind::Down, "feed_forward.down_proj"),
            ],
            experts: ExpertNames::LLAMA4,
            ..Names::LLAMA
        },
        eps: Eps::Default(1e-5),
        head_norms: HeadNorms::Plain,
        norms_heads: Flag::Field("use_qk_norm", true),
        by_layer: ByLayer { chunks: true, ..ByLayer::NONE },
        head_dim: HeadDim::IfAbsent(128),
        ffn: "intermediate_size_mlp",
        biases: BiasRules::ATTENTION,
        rope: RopeRules { theta: 500_000.0, no_rope: NoRope::Listed, interleaved: true, ..ROPE },
        query_growth: GrowthRule::Unrotated,
        experts: Some(ExpertRules {
            layers: ExpertLayers::Interleaved,
            shared: SharedRules::One,
            scores: Scores::Sigmoid,
            normalize: Flag::Fixed(false),
            scales_input: true,
            fused: StackForm::Columns,
            published_fused: true,
            ..EXPERTS
        }),
        ..LLAMA
    },
    // A window on every layer, unless it is null.
    Architecture {
        name: "mistral",
        class: "MistralForCausalLM",
        biases: BiasRules::NONE,
        windows: Windows::Every,
        default_window: Some(4096),
        ..LLAMA
    },
    // Ministral: a window on the layers of `layer_types`.
    Architecture {
        name: "ministral",
        class: "MinistralForCausalLM",
        biases: BiasRules::NONE,
        windows: Windows::Listed,
        default_window: Some(4096),
        ..LLAMA
    },
    // Ministral 3: YaRN, and queries that grow with the position.
    Architecture {
        name: "ministral3",
        class: "Ministral3ForCausalLM",
        biases: BiasRules::NONE,
        windows: Windows::Every,
        rope: RopeRules { theta: 1_000_000.0, required: true, ..ROPE },
        query_growth: GrowthRule::Rotary,
        ..LLAMA
    },
    // Granite 3: constant factors of embedding, residual stream, scores and logits.
    Architecture {
        name: "granite",
        class: "GraniteForCausalLM",
        eps: Eps::Default(1e-6),
        scales: Some(GRANITE_SCALES),
        ..LLAMA
    },
    // ERNIE 4.5: rotated pairs are adjacent.
    Architecture {
        name: "ernie4_5",
        class: "Ernie4_5ForCausalLM",
        tied: true,
        eps: Eps::Default(1e-5),
        head_dim: HeadDim::IfAbsent(128),
        biases: BiasRules::all(Flag::Field("use_bias", false)),
        rope: RopeRules { theta: 500_000.0, interleaved: true, ..ROPE },
        ..LLAMA
    },
    // ERNIE 4.5 with experts: corrections of softmax scores, shared experts.
    Architecture {
        name: "ernie4_5_moe",
        class: "Ernie4_5_MoeForCausalLM",
        aliases: &[("num_experts_per_tok", "moe_k")],
        fixed_flags: &[("use_bias", false)],
        names: Names { experts: ExpertNames::ERNIE, ..Names::LLAMA },
        tied: true,
        eps: Eps::Default(1e-5),
        biases: BiasRules::NONE,
        rope: RopeRules { theta: 500_000.0, interleaved: true, ..ROPE },
        experts: Some(ExpertRules {
            count: "moe_num_experts",
            width: "moe_intermediate_size",
            layers: ExpertLayers::Range,
            shared: SharedRules::Counted("moe_num_shared_experts"),
            correction: true,
            correction_row: true,
            ..EXPERTS
        }),
        ..LLAMA
    },
    // GLM-4: norms before and after, joined gate and up, half of a head rotated in adjacent pairs.
    Architecture {
        name: "glm4",
        class: "Glm4ForCausalLM",
        names: Names::GLM4,
        eps: Eps::Default(1.5625e-7),
        norm_places: NormPlaces::Both,
        head_dim: HeadDim::IfAbsent(128),
        mlp: MlpForm::GatedJoined,
        biases: BiasRules { qkv: Flag::Field("attention_bias", true), ..BiasRules::NONE },
        rope: RopeRules { partial: Some(0.5), interleaved: true, ..ROPE },
        ..LLAMA
    },
    COHERE2,
    // Command A+: Cohere 2 with experts behind some dense layers, RMSNorm where its epsilon is stated.
    Architecture {
        name: "cohere2_moe",
        class: "Cohere2MoeForCausalLM",
        aliases: &[],
        only: &[("shared_expert_combination_strategy", &["average", "sum"])],
        names: Names { experts: ExpertNames::DEEPSEEK, ..Names::LLAMA },
        eps: Eps::OrLayer(1e-5),
        head_dim: HeadDim::Default(128),
        ffn: "prefix_dense_intermediate_size",
        feed_forward: FeedForward::Or("intermediate_size"),
        windows: Windows::BehindDense(4),
        rope: RopeRules { no_rope: NoRope::FullAttentionButDense, ..COHERE2.rope },
        experts: Some(ExpertRules {
            count: "num_experts",
            layers: ExpertLayers::Listed(0),
            shared: SharedRules::Counted("num_shared_experts"),
            scores_by: Some((
                "expert_selection_fn",
                &[("softmax", Scores::SoftmaxOfChosen), ("sigmoid", Scores::Sigmoid)],
            )),
            scores: Scores::SoftmaxOfChosen,
            normalize: Flag::Field("norm_topk_prob", true),
            mean: Some(("shared_expert_combination_strategy", "average")),
            ..EXPERTS
        }),
        ..COHERE2
    },
    QWEN2,
    // QK norms.
    Architecture {
        name: "qwen3",
        class: "Qwen3ForCausalLM",
        biases: BiasRules::ATTENTION,
        head_norms: HeadNorms::Each,
        head_dim: HeadDim::IfAbsent(128),
        ..QWEN2
    },
    // SmolLM3: some layers have no position embedding.
    Architecture {
        name: "smollm3",
        class: "SmolLM3ForCausalLM",
        fixed_flags: &[("use_sliding_window", false)],
        tied: true,
        rope: RopeRules { theta: 2_000_000.0, no_rope: NoRope::Listed, ..ROPE },
        ..LLAMA
    },
    // Seed-OSS: separate flags for the biases of q, k, v and of the output.
    Architecture {
        name: "seed_oss",
        class: "SeedOssForCausalLM",
        head_dim: HeadDim::IfAbsent(128),
        biases: BiasRules {
            qkv: Flag::Field("attention_bias", true),
            output: Flag::Field("attention_out_bias", false),
            ..LLAMA.biases
        },
        ..LLAMA
    },
    // Arcee (AFM): squared ReLU, no gate.
    Architecture {
        name: "arcee",
        class: "ArceeForCausalLM",
        activation: Activation::Relu2,
        mlp: MlpForm::Plain,
        ..LLAMA
    },
    // EXAONE 4.0: norms after attention and MLP, QK norms, windows; layers without a window have no position embedding.
    Architecture {
        name: "exaone4",
        class: "Exaone4ForCausalLM",
        norm_places: NormPlaces::After,
        head_norms: HeadNorms::Each,
        biases: BiasRules::NONE,
        windows: Windows::ButLast { fields: &["sliding_window_pattern"], default: 4 },
        default_window: Some(4096),
        rope: RopeRules { no_rope: NoRope::FullAttention, ..ROPE },
        ..LLAMA
    },
    // K-EXAONE: as EXAONE 4.0 with norms before attention and MLP, and the routing of DeepSeek-V3.
    Architecture {
        name: "exaone_moe",
        class: "ExaoneMoeForCausalLM",
        names: Names { experts: ExpertNames::EXAONE, ..Names::LLAMA },
        head_norms: HeadNorms::Each,
        biases: BiasRules::NONE,
        windows: Windows::ButLast { fields: &["sliding_window_pattern"], default: 4 },
        default_window: Some(4096),
        rope: RopeRules { no_rope: NoRope::FullAttention, ..ROPE },
        experts: Some(ExpertRules {
            count: "num_experts",
            count_alias: Some("n_routed_experts"),
            layers: ExpertLayers::Listed(1),
            shared: SharedRules::Counted("num_shared_experts"),
            ..DEEPSEEK_V3_EXPERTS
        }),
        ..LLAMA
    },
    // StarCoder2: LayerNorm, no gate, biases everywhere.
    Architecture {
        name: "starcoder2",
        class: "Starcoder2ForCausalLM",
        aliases: &[("rms_norm_eps", "norm_epsilon")],
        names: Names {
            linears: &[(LinearKind::Up, "mlp.c_fc"), (LinearKind::Down, "mlp.c_proj")],
            ..Names::LLAMA
        },
        tied: true,
        norm: NormForm::Layer,
        eps: Eps::Default(1e-5),
        activation: Activation::GeluTanh,
        mlp: MlpForm::Plain,
        biases: BiasRules::all(Flag::Field("use_bias", true)),
        windows: Windows::Every,
        ..LLAMA
    },
    // BitNet b1.58: norms before the output and the down projection, ternary weights.
    Architecture {
        name: "bitnet",
        class: "BitNetForCausalLM",
        biases: BiasRules::ATTENTION,
        activation: Activation::Relu2,
        sub_norms: true,
        ternary: true,
        rope: RopeRules { theta: 500_000.0, ..ROPE },
        ..LLAMA
    },
    GEMMA,
    GEMMA2,
    // Gemma 3 (text): as Gemma 2 without default caps; QK norms, rotary parameters of its own for layers with a window.
    Architecture {
        name: "gemma3_text",
        class: "Gemma3ForCausalLM",
        head_norms: HeadNorms::Each,
        softcaps: Some(Softcaps { attention: None, logits: None }),
        windows: Windows::ButLast {
            fields: &["sliding_window_pattern", "_sliding_window_pattern"],
            default: 6,
        },
        rope: RopeRules { theta: 1_000_000.0, local_theta: Some(10_000.0), ..ROPE },
        ..GEMMA2
    },
    // Gemma 3n (text): parallel streams of states with a low-rank path beside attention, QK and value norms, unscaled
    // scores, keys and values shared by later layers, embeddings for each layer, cut-off gates. What makes the streams
    // and the low-rank path stay unquantized, as in llm-compressor's recipe
    // (examples/multimodal_vision/gemma3n_example.py).
    Architecture {
        name: "gemma3n_text",
        class: "Gemma3nForCausalLM",
        norm: NormForm::Rms,
        head_norms: HeadNorms::Each,
        value_norm: true,
        by_layer: ByLayer {
            shared_kv: Some(15),
            inputs: true,
            streams: true,
            sparsity: true,
            ..ByLayer::NONE
        },
        softcaps: Some(Softcaps { attention: None, logits: Some(30.0) }),
        windows: Windows::ButLast { fields: &[], default: 5 },
        default_window: Some(512),
        feed_forward: FeedForward::Listed,
        query_scale: QueryScale::One,
        rope: RopeRules { theta: 1_000_000.0, local_theta: Some(10_000.0), ..ROPE },
        ..GEMMA2
    },
    // Gemma 4 (text): QK and value norms, unscaled scores, wider heads in layers without a window, keys and values shared
    // by later layers, embeddings for each layer, experts beside the MLP.
    Architecture {
        name: "gemma4_text",
        class: "Gemma4ForCausalLM",
        aliases: &[("hidden_act", "hidden_activation"), ("num_experts_per_tok", "top_k_experts")],
        fixed_flags: &[],
        names: Names { experts: ExpertNames::GEMMA4, ..Names::GEMMA2 },
        // Text is causal with "vision" too.
        only: &[("use_bidirectional_attention", &["vision"])],
        norm: NormForm::Rms,
        head_norms: HeadNorms::Each,
        value_norm: true,
        by_layer: ByLayer {
            global_heads: Some(512),
            shared_kv: Some(0),
            inputs: true,
            scales: true,
            ..ByLayer::NONE
        },
        softcaps: Some(Softcaps { attention: None, logits: None }),
        windows: Windows::ButEnd(6),
        default_window: Some(512),
        query_scale: QueryScale::One,
        rope: RopeRules { theta: 1_000_000.0, local_theta: Some(10_000.0), required: true, ..ROPE },
        experts: Some(ExpertRules {
            count: "num_experts",
            width: "moe_intermediate_size",
            enabled: Some("enable_moe_block"),
            dense: DenseMlp::Normed,
            published_fused: true,
            ..EXPERTS
        }),
        ..GEMMA2
    },
    // Phi-1, 1.5 and 2: attention and MLP in parallel on one norm, partial rotation, no gate, a bias of the head.
    Architecture {
        name: "phi",
        class: "PhiForCausalLM",
        aliases: &[("rms_norm_eps", "layer_norm_eps")],
        fixed_flags: &[("qk_layernorm", false)],
        names: Names::PHI,
        norm: NormForm::Layer,
        eps: Eps::Default(1e-5),
        norm_places: NormPlaces::ParallelShared,
        activation: Activation::GeluTanh,
        mlp: MlpForm::Plain,
        biases: BiasRules::all(Flag::Fixed(true)),
        head_bias: true,
        rope: RopeRules { partial: Some(0.5), ..ROPE },
        ..LLAMA
    },
    // Phi-3 and Phi-4: joined projections, partial rotation, LongRoPE.
    Architecture {
        name: "phi3",
        class: "Phi3ForCausalLM",
        biases: BiasRules::NONE,
        qkv: QkvForm::Joined,
        mlp: MlpForm::GatedJoined,
        windows: Windows::Every,
        rope: RopeRules { partial: Some(1.0), ..ROPE },
        ..LLAMA
    },
    // OLMo: norms without parameters, clipped q, k and v.
    Architecture {
        name: "olmo",
        class: "OlmoForCausalLM",
        biases: BiasRules::ATTENTION,
        norm: NormForm::LayerPlain,
        eps: Eps::Fixed(1e-5),
        clips_qkv: true,
        ..LLAMA
    },
    // OLMo 2: norms after attention and MLP, one QK norm for all heads.
    Architecture {
        name: "olmo2",
        class: "Olmo2ForCausalLM",
        biases: BiasRules::ATTENTION,
        norm_places: NormPlaces::After,
        head_norms: HeadNorms::Whole,
        ..LLAMA
    },
    // OLMo 3: as OLMo 2, with windows; only layers without one scale their rotation.
    Architecture {
        name: "olmo3",
        class: "Olmo3ForCausalLM",
        biases: BiasRules::ATTENTION,
        norm_places: NormPlaces::After,
        head_norms: HeadNorms::Whole,
        windows: Windows::ButLast { fields: &[], default: 4 },
        default_window: Some(4096),
        rope: RopeRules { theta: 500_000.0, local_theta: Some(500_000.0), ..ROPE },
        ..LLAMA
    },
    // GPT-2: learned positions, joined projections stored `[in, out]`.
    Architecture {
        name: "gpt2",
        class: "GPT2LMHeadModel",
        aliases: &[
            ("hidden_size", "n_embd"),
            ("num_hidden_layers", "n_layer"),
            ("num_attention_heads", "n_head"),
            ("intermediate_size", "n_inner"),
            ("max_position_embeddings", "n_positions"),
            ("rms_norm_eps", "layer_norm_epsilon"),
            ("hidden_act", "activation_function"),
        ],
        fixed_flags: &[
            ("scale_attn_weights", true),
            ("scale_attn_by_inverse_layer_idx", false),
            ("add_cross_attention", false),
        ],
        names: Names::GPT2,
        tied: true,
        norm: NormForm::Layer,
        eps: Eps::Default(1e-5),
        activation: Activation::GeluTanh,
        head_dim: HeadDim::Divided,
        feed_forward: FeedForward::Multiple(4),
        qkv: QkvForm::Joined,
        mlp: MlpForm::Plain,
        biases: BiasRules::all(Flag::Fixed(true)),
        learned_positions: true,
        conv1d: true,
        ..LLAMA
    },
    // GPT-NeoX and Pythia: attention and MLP in parallel, projections joined head by head.
    Architecture {
        name: "gpt_neox",
        class: "GPTNeoXForCausalLM",
        aliases: &[
            ("rms_norm_eps", "layer_norm_eps"),
            ("rope_theta", "rotary_emb_base"),
            ("partial_rotary_factor", "rotary_pct"),
        ],
        names: Names::GPT_NEOX,
        norm: NormForm::Layer,
        eps: Eps::Default(1e-5),
        parallel: Flag::Field("use_parallel_residual", true),
        activation: Activation::Gelu,
        head_dim: HeadDim::Divided,
        qkv: QkvForm::ByHead,
        mlp: MlpForm::Plain,
        biases: BiasRules { mlp: Flag::Fixed(true), ..ATTENTION_BIAS },
        rope: RopeRules { partial: Some(0.25), ..ROPE },
        ..LLAMA
    },
    Architecture {
        name: "mixtral",
        class: "MixtralForCausalLM",
        names: Names { experts: ExpertNames::MIXTRAL, ..Names::LLAMA },
        biases: BiasRules::NONE,
        windows: Windows::Every,
        rope: RopeRules { theta: 1_000_000.0, ..ROPE },
        experts: Some(EXPERTS),
        ..LLAMA
    },
    // MiniMax-M2: sigmoid scores with corrections, one QK norm for all heads, partial rotation.
    Architecture {
        name: "minimax_m2",
        class: "MiniMaxM2ForCausalLM",
        fixed_flags: &[("use_qk_norm", true), ("use_routing_bias", true)],
        names: Names { experts: ExpertNames::MIXTRAL, ..Names::LLAMA },
        head_norms: HeadNorms::Whole,
        biases: BiasRules::NONE,
        head_dim: HeadDim::IfAbsent(128),
        rope: RopeRules { theta: 5_000_000.0, partial: Some(1.0), ..ROPE },
        experts: Some(ExpertRules {
            scores: Scores::Sigmoid,
            correction: true,
            only: &[("scoring_func", &["sigmoid"]), ("qk_norm_type", &["per_layer"])],
            ..EXPERTS
        }),
        ..LLAMA
    },
    // Qwen1.5-MoE and Qwen2-MoE: a shared expert with a gate.
    Architecture {
        name: "qwen2_moe",
        class: "Qwen2MoeForCausalLM",
        biases: BiasRules { qkv: Flag::Field("qkv_bias", true), ..BiasRules::NONE },
        experts: Some(ExpertRules { shared: SharedRules::Gated, ..QWEN_EXPERTS }),
        ..QWEN_MOE
    },
    Architecture { name: "qwen3_moe", class: "Qwen3MoeForCausalLM", head_norms: HeadNorms::Each, ..QWEN_MOE },
    // Qwen3-Next: gated DeltaNet in three of four layers, gated attention, a quarter of a head rotated. The rates of the
    // mixer, its convolution and its vectors stay unquantized; llm-compressor's recipes leave out all of `linear_attn`
    // (examples/quantization_w8a8_fp8/qwen3_5_moe.py), Qwen's own FP8 checkpoints only these.
    Architecture {
        name: "qwen3_next",
        class: "Qwen3NextForCausalLM",
        names: Names::QWEN3_NEXT,
        recurrent: Some(RecurrentRules::GatedDelta { joined: true }),
        experts: Some(ExpertRules {
            shared: SharedRules::Gated,
            normalize: Flag::Field("norm_topk_prob", true),
            ..QWEN_EXPERTS
        }),
        ..QWEN3_5
    },
    QWEN3_5,
    // Qwen3.5-MoE (text): experts in every layer, a shared one with a gate.
    Architecture {
        name: "qwen3_5_moe_text",
        class: "Qwen3_5MoeForCausalLM",
        aliases: &[("intermediate_size", "moe_intermediate_size")],
        experts: Some(ExpertRules {
            layers: ExpertLayers::All,
            shared: SharedRules::Gated,
            normalize: Flag::Fixed(true),
            ..QWEN_EXPERTS
        }),
        ..QWEN3_5
    },
    // Granite 4: Mamba-2 in most layers, the factors of Granite 3, no position embedding; in some models routed experts
    // beside the MLP, on the same states.
    Architecture {
        name: "granitemoehybrid",
        class: "GraniteMoeHybridForCausalLM",
        ffn: "shared_intermediate_size",
        names: Names::GRANITE4,
        eps: Eps::Default(1e-6),
        mlp: MlpForm::GatedJoined,
        biases: BiasRules::ATTENTION,
        rope: RopeRules { no_rope: NoRope::UnlessRope, ..ROPE },
        scales: Some(GRANITE_SCALES),
        recurrent: Some(RecurrentRules::StateSpace { blocks: false }),
        experts: Some(ExpertRules {
            scores: Scores::SoftmaxOfChosen,
            normalize: Flag::Fixed(false),
            optional: true,
            dense: DenseMlp::Same,
            published_fused: true,
            ..EXPERTS
        }),
        ..LLAMA
    },
    // Falcon-H1: Mamba-2 and attention on the same input in every layer, constant factors.
    Architecture {
        name: "falcon_h1",
        class: "FalconH1ForCausalLM",
        fixed_flags: &[
            ("attention_bias", false),
            ("mlp_bias", false),
            ("mamba_proj_bias", false),
            ("projectors_bias", false),
        ],
        names: Names::FALCON_H1,
        eps: Eps::Default(1e-5),
        biases: BiasRules::NONE,
        scales: Some(ScaleRules {
            embedding: Some("embedding_multiplier"),
            residual: None,
            attention: None,
            logits: Some(LogitScale { field: "lm_head_multiplier", default: 1.0, divides: false }),
        }),
        multipliers: true,
        recurrent: Some(RecurrentRules::Parallel),
        ..LLAMA
    },
    // Jamba: Mamba in most layers, experts in every other one, no position embedding.
    Architecture {
        name: "jamba",
        class: "JambaForCausalLM",
        names: Names::JAMBA,
        eps: Eps::Default(1e-6),
        biases: BiasRules::NONE,
        rope: RopeRules { no_rope: NoRope::All, ..ROPE },
        recurrent: Some(RecurrentRules::SelectiveScan),
        experts: Some(ExpertRules {
            count: "num_experts",
            layers: ExpertLayers::Period,
            normalize: Flag::Fixed(false),
            ..EXPERTS
        }),
        ..LLAMA
    },
    // Nemotron-H: every layer is a Mamba-2 mixer, attention, an MLP or experts without a gate; no position embedding. The
    // projections to and from the latent of experts stay unquantized: NVIDIA's recipes leave them in bf16
    // (modelopt_recipes/models/Nemotron-3-Super-120B-A12B/super-nvfp4-max-calib.yaml, but for three layers).
    Architecture {
        name: "nemotron_h",
        class: "NemotronHForCausalLM",
        aliases: &[
            ("rms_norm_eps", "layer_norm_epsilon"),
            ("hidden_act", "mlp_hidden_act"),
            ("mamba_n_heads", "mamba_num_heads"),
            ("mamba_d_head", "mamba_head_dim"),
            ("mamba_n_groups", "n_groups"),
            ("mamba_d_state", "ssm_state_size"),
            ("mamba_d_conv", "conv_kernel"),
            ("mamba_conv_bias", "use_conv_bias"),
            ("mamba_proj_bias", "use_bias"),
        ],
        names: Names::NEMOTRON_H,
        eps: Eps::Default(1e-5),
        activation: Activation::Relu2,
        head_dim: HeadDim::Default(128),
        mlp: MlpForm::Plain,
        biases: BiasRules { mlp: Flag::Field("mlp_bias", false), ..BiasRules::NONE },
        rope: RopeRules { no_rope: NoRope::All, ..ROPE },
        recurrent: Some(RecurrentRules::StateSpace { blocks: true }),
        experts: Some(ExpertRules {
            layers: ExpertLayers::Blocks,
            shared: SharedRules::Stated {
                width: "moe_shared_expert_intermediate_size",
                count: "n_shared_experts",
            },
            scale: Some(1.0),
            gated: false,
            latent: Some("moe_latent_size"),
            only: &[],
            ..DEEPSEEK_V3_EXPERTS
        }),
        ..LLAMA
    },
    LFM2,
    // LFM2-MoE: the same with experts after some dense layers, routed by sigmoid scores with corrections.
    Architecture {
        name: "lfm2_moe",
        class: "Lfm2MoeForCausalLM",
        aliases: &[("rms_norm_eps", "norm_eps"), ("first_k_dense_replace", "num_dense_layers")],
        fixed_flags: &[("tie_embedding", true), ("use_expert_bias", true)],
        names: Names { experts: ExpertNames::LFM2, ..Names::LFM2 },
        feed_forward: FeedForward::Stated,
        experts: Some(ExpertRules {
            count_alias: None,
            layers: ExpertLayers::From(2),
            scores: Scores::Sigmoid,
            normalize: Flag::Field("norm_topk_prob", true),
            scale: Some(1.0),
            correction: true,
            ..QWEN_EXPERTS
        }),
        ..LFM2
    },
    // DeepSeek-V2: multi-head latent attention, shared experts, routing limited to groups.
    Architecture {
        name: "deepseek_v2",
        class: "DeepseekV2ForCausalLM",
        fixed_flags: &[("norm_topk_prob", false)],
        // The reference multiplies complex numbers, which are adjacent pairs.
        latent: Some(LatentRules { interleaved: Flag::Fixed(true), indexer: None }),
        experts: Some(ExpertRules {
            layers: ExpertLayers::From(0),
            normalize: Flag::Fixed(false),
            scale: Some(1.0),
            groups: Some(GroupRules { best_two: false, when: Some(("topk_method", "group_limited_greedy")) }),
            only: &[("scoring_func", &["softmax"]), ("topk_method", &["greedy", "group_limited_greedy"])],
            ..DEEPSEEK_EXPERTS
        }),
        ..DEEPSEEK
    },
    DEEPSEEK_V3,
    // Kimi K2: DeepSeek-V3 under its own name; only the defaults of its config class differ, and published configs
    // state those fields.
    Architecture { name: "kimi_k2", ..DEEPSEEK_V3 },
    // Kimi Linear: Kimi delta attention in three of four layers, latent attention without positions in the others, the
    // routing of DeepSeek-V3. The low-rank forget and output gates, the write rates and the convolutions stay unquantized,
    // as those of gated DeltaNet.
    Architecture {
        name: "kimi_linear",
        class: "KimiLinearForCausalLM",
        aliases: &[
            ("max_position_embeddings", "model_max_length"),
            ("norm_topk_prob", "moe_renormalize"),
            ("n_group", "num_expert_group"),
            ("num_experts_per_tok", "num_experts_per_token"),
        ],
        fixed_flags: &[("mla_use_nope", true), ("use_grouped_topk", true)],
        names: Names::KIMI_LINEAR,
        eps: Eps::Default(1e-5),
        rope: RopeRules { no_rope: NoRope::All, ..ROPE },
        latent: Some(LatentRules { interleaved: Flag::Fixed(false), indexer: None }),
        recurrent: Some(RecurrentRules::ChannelDelta),
        experts: Some(ExpertRules {
            count: "num_experts",
            layers: ExpertLayers::Listed(1),
            shared: SharedRules::Counted("num_shared_experts"),
            scale: Some(2.446),
            only: &[("moe_router_activation_func", &["sigmoid"])],
            ..DEEPSEEK_V3_EXPERTS
        }),
        ..DEEPSEEK_V3
    },
    // GLM-4.7-Flash: DeepSeek-V3 with other defaults.
    Architecture {
        name: "glm4_moe_lite",
        class: "Glm4MoeLiteForCausalLM",
        eps: Eps::Default(1e-5),
        experts: Some(ExpertRules {
            layers: ExpertLayers::Listed(1),
            scale: Some(1.8),
            ..DEEPSEEK_V3_EXPERTS
        }),
        ..DEEPSEEK_V3
    },
    // DeepSeek-V3.2: DeepSeek-V3 whose queries attend to the tokens that an indexer chooses.
    DEEPSEEK_V32,
    DEEPSEEK_V4,
    // GLM-5: the same with another rotation in the indexer, whose choice later layers may share.
    Architecture {
        name: "glm_moe_dsa",
        class: "GlmMoeDsaForCausalLM",
        eps: Eps::Default(1e-5),
        latent: Some(LatentRules {
            interleaved: Flag::Fixed(true),
            indexer: Some(IndexerRules { heads: 32, interleaved: true, shared: true, ..DEEPSEEK_INDEXER }),
        }),
        ..DEEPSEEK_V32
    },
    // GLM-4.5 and 4.6: routing of DeepSeek-V3, half of a head rotated, QK norms in the large one.
    Architecture {
        name: "glm4_moe",
        class: "Glm4MoeForCausalLM",
        eps: Eps::Default(1e-5),
        head_norms: HeadNorms::Each,
        norms_heads: Flag::Field("use_qk_norm", false),
        biases: BiasRules { qkv: Flag::Field("attention_bias", false), ..BiasRules::NONE },
        rope: RopeRules { partial: Some(0.5), ..ROPE },
        experts: Some(ExpertRules {
            layers: ExpertLayers::From(1),
            scale: Some(1.0),
            only: &[],
            ..DEEPSEEK_V3_EXPERTS
        }),
        ..DEEPSEEK
    },
    // gpt-oss: attention sinks, stacked experts with biases and a clamped SwiGLU.
    Architecture {
        name: "gpt_oss",
        class: "GptOssForCausalLM",
        names: Names { experts: ExpertNames::GPT_OSS, ..Names::LLAMA },
        head_dim: HeadDim::Default(64),
        biases: BiasRules { experts: true, ..ATTENTION_BIAS },
        windows: Windows::Even,
        default_window: Some(128),
        sinks: true,
        rope: RopeRules { theta: 150_000.0, required: true, ..ROPE },
        experts: Some(ExpertRules {
            scores: Scores::SoftmaxOfChosen,
            normalize: Flag::Fixed(false),
            bias: true,
            swiglu: Some([1.702, 7.0, 1.0]),
            fused: StackForm::Interleaved,
            published_fused: true,
            ..EXPERTS
        }),
        ..LLAMA
    },
];
