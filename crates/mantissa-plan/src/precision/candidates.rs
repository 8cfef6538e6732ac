//! Candidate precisions, one row each: the list that `plan` shows and that both `plan` and `quantize --for` choose from.
//!
//! Methods that need a backward pass (AutoRound, BRECQ) are left out: they lose less at 4 bits, but take 4 to 40 times as
//! long.

use std::sync::LazyLock;

use mantissa_arch::gguf::FileType;
use mantissa_num::CodecId;

use super::{Apart, Elsewhere, Offered, Precision};
use crate::figures;
use crate::shape::ModelPart;

/// Every candidate, from many bits to few, with its figures. Of equally good ones the first is chosen.
pub static CANDIDATES: LazyLock<Vec<Precision>> = LazyLock::new(|| {
    let measured = |row: Precision| {
        let of = |recipe: Option<&str>| {
            recipe.map_or([None; 2], |recipe| figures::kl(recipe, Some(row.convention)))
        };
        // Losses of two models are not compared: where one has no figure, that of the bound stands for it.
        let ([small, large], [most_small, most_large]) = (of(row.recipe), of(row.offered.bound));
        let measured = [small.or(most_small), large.or(most_large)];
        Precision { kl: if row.recipe.is_some() { measured } else { row.kl }, ..row }
    };
    ROWS.iter().map(|row| measured(with_types(row))).collect()
});

/// Completes a row of GGUF by the types of its file type.
fn with_types(row: &Precision) -> Precision {
    let file_type = row.recipe.filter(|_| row.convention == GGUF).and_then(FileType::parse);
    let Some(ty) = file_type else { return *row };
    let tables = ty.tables().map(CodecId::name);
    Precision { file_type, weights: ty.base.name(), tables: Some(tables), ..*row }
}

/// The first variant of each name.
pub static PRECISIONS: LazyLock<Vec<Precision>> = LazyLock::new(|| {
    let mut first: Vec<Precision> = Vec::new();
    for row in CANDIDATES.iter() {
        if first.iter().all(|known| known.name != row.name) {
            first.push(*row);
        }
    }
    first
});

const CT: &str = "compressed-tensors";
const GGUF: &str = "gguf";

/// Compute capability times ten of the first GPUs that multiply FP4.
const BLACKWELL: u32 = 100;

/// Conditions that all devices meet.
const ANYWHERE: Offered = Offered {
    spare: false,
    storage: false,
    least_sm: None,
    native: false,
    hidden: false,
    bound: None,
    elsewhere: None,
};

/// Left out of a plan where nothing runs it.
const HIDDEN: Offered = Offered { hidden: true, ..ANYWHERE };

/// Offered only to engines whose kernels multiply in its types.
const NATIVE: Offered = Offered { native: true, ..HIDDEN };

const BASE: Precision = Precision {
    name: "BF16",
    recipe: None,
    nominal: 16,
    weights: "bf16",
    inputs: None,
    bits: None,
    file_type: None,
    tables: None,
    apart: None,
    convention: "dense",
    kl: [Some(0.0), Some(0.0)],
    offered: ANYWHERE,
};

const fn row(name: &'static str, nominal: u32, recipe: &'static str, weights: &'static str) -> Precision {
    Precision { name, nominal, recipe: Some(recipe), weights, convention: CT, kl: [None; 2], ..BASE }
}

impl Precision {
    /// Returns a precision of a recipe that no figure ranks.
    pub const fn unmeasured(recipe: &'static str, convention: &'static str, nominal: u32) -> Self {
        Precision { convention, kl: [None; 2], ..row("", nominal, recipe, "bf16") }
    }
}

/// Returns a precision whose inputs are quantized too.
const fn with_inputs(precision: Precision, inputs: &'static str) -> Precision {
    Precision { inputs: Some(inputs), ..precision }
}

/// Returns a precision in another checkpoint format.
const fn within(convention: &'static str, precision: Precision) -> Precision {
    Precision { convention, ..precision }
}

/// Returns a precision under conditions.
const fn where_(offered: Offered, precision: Precision) -> Precision {
    Precision { offered, ..precision }
}

/// Returns a precision of a file type of llama.cpp, which [`with_types`] completes.
const fn gguf(name: &'static str, nominal: u32, recipe: &'static str) -> Precision {
    Precision { convention: GGUF, ..row(name, nominal, recipe, "bf16") }
}

/// Returns a precision as MLX stores it: an f16 scale and bias for each group of `group` weights (mlx `affine_quantize`).
const fn mlx(
    name: &'static str,
    nominal: u32,
    group: u32,
    recipe: &'static str,
    weights: &'static str,
) -> Precision {
    let bits = nominal as f64 + 32.0 / group as f64;
    Precision { bits: Some(bits), convention: "mlx", offered: HIDDEN, ..row(name, nominal, recipe, weights) }
}

/// Returns a precision as ExLlamaV2 stores it.
const fn exl2(name: &'static str, nominal: u32, recipe: &'static str, weights: &'static str) -> Precision {
    where_(HIDDEN, within("exl2", row(name, nominal, recipe, weights)))
}

/// Returns a precision that is offered only where no other of its bits fits.
const fn spare(precision: Precision) -> Precision {
    let offered = Offered { spare: true, ..precision.offered };
    Precision { offered, ..precision }
}

/// Returns a precision whose loss is at most that of a recipe with larger groups or fewer levels.
const fn at_most(bound: &'static str, precision: Precision) -> Precision {
    let offered = Offered { bound: Some(bound), ..precision.offered };
    Precision { offered, ..precision }
}

/// Returns a precision that is as good as its loss only where the GPU multiplies FP4.
const fn blackwell(precision: Precision) -> Precision {
    let offered = Offered { least_sm: Some(BLACKWELL), ..precision.offered };
    Precision { offered, ..precision }
}

/// All parts of the layers but the routed experts.
const REST: &[ModelPart] = &[ModelPart::Attention, ModelPart::Mlp, ModelPart::Mixer];

const ROWS: &[Precision] = &[
    BASE,
    row("W8A16 INT8", 8, "rtn-int8-channel", "int8-channel"),
    with_inputs(row("W8A8 INT8", 8, "w8a8", "int8-channel"), "int8-token"),
    with_inputs(row("W8A8 FP8", 8, "fp8-dynamic", "fp8-e4m3-channel"), "fp8-e4m3-token"),
    blackwell(where_(HIDDEN, row("W8A16 MXFP8", 8, "mxfp8", "mxfp8-e4m3"))),
    // vLLM compressed_tensors.py, `_get_scheme_from_parts`: MXFP8 weights make `CompressedTensorsW8A8Mxfp8`, which
    // multiplies natively from Blackwell on.
    where_(
        Offered { least_sm: Some(BLACKWELL), ..NATIVE },
        with_inputs(row("W8A8 MXFP8", 8, "mxfp8-w8a8", "mxfp8-e4m3"), "mxfp8-e4m3"),
    ),
    at_most("rtn-int8-channel", mlx("MLX 8-bit", 8, 64, "rtn-int8-g64-asym:minmax", "int8-g64-asym:minmax")),
    at_most(
        "rtn-int8-channel",
        spare(mlx("MLX 8-bit", 8, 32, "rtn-int8-g32-asym:minmax", "int8-g32-asym:minmax")),
    ),
    at_most("rtn-int8-channel", exl2("EXL2 8-bit", 8, "rtn-int8-g128", "int8-g128")),
    at_most("rtn-int8-channel", spare(exl2("EXL2 8-bit", 8, "rtn-int8-g32", "int8-g32"))),
    gguf("Q8_0", 8, "q8_0"),
    mlx("MLX 6-bit", 6, 64, "rtn-int6-g64-asym:minmax", "int6-g64-asym:minmax"),
    exl2("EXL2 6-bit", 6, "rtn-int6-g128", "int6-g128"),
    gguf("Q6_K", 6, "q6_k"),
    // transformers with compressed-tensors, and mantissa (contract/engines); vLLM takes MXFP6 only from AMD Quark, and
    // multiplies it emulated (docs/features/quantization/quark.md, "MXFP6").
    where_(HIDDEN, row("W6A16 MXFP6", 6, "mxfp6", "mxfp6-e2m3")),
    mlx("MLX 5-bit", 5, 64, "rtn-int5-g64-asym:minmax", "int5-g64-asym:minmax"),
    exl2("EXL2 5-bit", 5, "rtn-int5-g128", "int5-g128"),
    gguf("Q5_K_M", 5, "q5_k_m"),
    // Of blocks of 32 like Q4_0's, with a bit more, or with levels in place of its even steps.
    at_most("q4_0", spare(gguf("Q5_0", 5, "q5_0"))),
    gguf("Q4_K_M", 4, "q4_k_m"),
    gguf("IQ4_XS", 4, "iq4_xs"),
    at_most("q4_0", spare(gguf("IQ4_NL", 4, "iq4_nl"))),
    mlx("MLX 4-bit", 4, 64, "hqq-int4-g64", "int4-g64-asym:minmax"),
    at_most("hqq-int4-g64", spare(mlx("MLX 4-bit", 4, 32, "hqq-int4-g32", "int4-g32-asym:minmax"))),
    exl2("EXL2 4-bit", 4, "gptq-int4-g128", "int4-g128"),
    at_most("gptq-int4-g128", spare(exl2("EXL2 4-bit", 4, "gptq-int4-g32", "int4-g32"))),
    blackwell(row("W4A16 NVFP4", 4, "scalesweep-gptaq-nvfp4", "nvfp4")),
    blackwell(row("W4A16 NVFP4", 4, "gptaq-nvfp4", "nvfp4")),
    blackwell(with_inputs(row("W4A4 NVFP4", 4, "nvfp4-w4a4", "nvfp4"), "nvfp4")),
    // The recipe of Model Optimizer for mixtures of experts; vLLM, SGLang and TensorRT-LLM dispatch by layer
    // (contract/engines). Not measured.
    Precision {
        apart: Some(Apart {
            parts: &[ModelPart::Attention, ModelPart::Mixer],
            weights: "fp8-e4m3-tensor",
            inputs: Some("fp8-e4m3-tensor@static"),
        }),
        offered: Offered { least_sm: Some(BLACKWELL), ..NATIVE },
        ..with_inputs(row("W4A4 NVFP4, FP8 attention", 4, "nvfp4-fp8-attention", "nvfp4"), "nvfp4")
    },
    row("W4A16 INT4", 4, "gptaq-int4-g128-asym", "int4-g128-asym"),
    row("W4A16 INT4", 4, "gptaq-int4-g128", "int4-g128"),
    within("modelopt", row("W4A16 INT4", 4, "gptaq-int4-g128", "int4-g128")),
    at_most("gptaq-int4-g128-asym", spare(row("W4A16 INT4", 4, "gptaq-int4-g32-asym", "int4-g32-asym"))),
    at_most("gptaq-int4-g128", spare(row("W4A16 INT4", 4, "gptaq-int4-g32", "int4-g32"))),
    at_most("gptaq-int4-g128", spare(within("modelopt", row("W4A16 INT4", 4, "gptaq-int4-g32", "int4-g32")))),
    // Routed experts hold most weights of a mixture and each token reads few of them; attention and shared layers, which
    // every token reads, stay in 16 bits. vLLM and SGLang run the layers of `ignore` dense (contract/engines).
    Precision {
        apart: Some(Apart { parts: REST, weights: "bf16", inputs: None }),
        offered: Offered { bound: Some("gptaq-int4-g128-asym"), ..HIDDEN },
        ..row("W4A16 INT4 experts", 4, "int4-experts", "int4-g128-asym")
    },
    // vLLM compressed_tensors.py, `_is_fp8_w4a8_sm90`: symmetric groups with FP8 inputs per token, on Hopper alone.
    where_(NATIVE, with_inputs(row("W4A8 INT4-FP8", 4, "w4afp8", "int4-g128"), "fp8-e4m3-token")),
    blackwell(row("W4A16 MXFP4", 4, "mxfp4", "mxfp4")),
    // vLLM: from Blackwell on (compressed_tensors_w4a4_mxfp4.py); on MI355X from checkpoints of AMD Quark.
    where_(
        Offered {
            least_sm: Some(BLACKWELL),
            elsewhere: Some(Elsewhere {
                device: "mi355x",
                engine: "vLLM",
                tool: "AMD Quark",
                source: "vLLM docs/features/quantization/quark.md; huggingface.co/amd/Llama-3.3-70B-Instruct-MXFP4-Preview",
            }),
            ..NATIVE
        },
        with_inputs(row("W4A4 MXFP4", 4, "rtn-mxfp4:ct+mxfp4:ct", "mxfp4"), "mxfp4"),
    ),
    where_(Offered { storage: true, ..ANYWHERE }, within("bitsandbytes", row("W4A16 NF4", 4, "nf4", "nf4"))),
    where_(HIDDEN, within("native", row("QTIP 3-bit", 3, "qtip-trellis3", "trellis3"))),
    row("W3A16 INT3", 3, "gptaq-int3-g128-asym", "int3-g128-asym"),
    gguf("Q3_K_M", 3, "q3_k_m"),
    gguf("Q2_K", 2, "q2_k"),
    where_(HIDDEN, within("native", row("QTIP 2-bit", 2, "qtip-trellis2", "trellis2"))),
];
