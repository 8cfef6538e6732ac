//! Candidate precisions with their measured quality loss, and schemes of the KV cache.
//!
//! KL figures come from [`figures`].

mod file_type;

use std::sync::LazyLock;

use mantissa_num::format::Format;
use mantissa_num::minifloat::BF16;
use mantissa_num::{Code, Scheme, parse_activation, parse_weight};
use serde::Serialize;

use crate::figures;
use crate::hardware::Maker;
use crate::parallel::Split;
use crate::shape::{Matrices, ModelShape};
use file_type::{Mixture, stored_type};

/// Precision of weights and inputs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Precision {
    /// Name in tables.
    pub name: &'static str,
    /// Recipe of `mantissa quantize`; `None` for the unquantized model.
    pub recipe: Option<&'static str>,
    /// Scheme of the weights.
    pub weights: &'static str,
    /// Scheme of the inputs; `None` leaves them in 16 bits.
    pub inputs: Option<&'static str>,
    /// Stored bits per weight where the format stores more than the scheme.
    pub bits: Option<f64>,
    /// Types that a file type of llama.cpp mixes with that of `weights`.
    #[serde(skip)]
    pub mixture: Mixture,
    /// Schemes of embedding and head; `None` leaves them in bf16.
    pub tables: Option<[&'static str; 2]>,
    /// Checkpoint format.
    pub convention: &'static str,
    /// KL in nats/token on ref-8m and ref-32m, if measured.
    pub kl: [Option<f64>; 2],
}

const CT: &str = "compressed-tensors";

const BASE: Precision = Precision {
    name: "BF16",
    recipe: None,
    weights: "bf16",
    inputs: None,
    bits: None,
    mixture: &[],
    tables: None,
    convention: "dense",
    kl: [Some(0.0), Some(0.0)],
};

const fn row(name: &'static str, recipe: &'static str, weights: &'static str) -> Precision {
    Precision { name, recipe: Some(recipe), weights, convention: CT, kl: [None; 2], ..BASE }
}

const fn gguf(
    name: &'static str,
    recipe: &'static str,
    weights: &'static str,
    tables: [&'static str; 2],
) -> Precision {
    Precision { tables: Some(tables), convention: "gguf", ..row(name, recipe, weights) }
}

/// Returns a precision of which some matrices are stored in other types.
const fn mixed(precision: Precision, mixture: Mixture) -> Precision {
    Precision { mixture, ..precision }
}

/// Returns a precision as MLX stores it: an f16 scale and bias for 64 weights (mlx `affine_quantize`).
const fn mlx(name: &'static str, recipe: &'static str, weights: &'static str, bits: f64) -> Precision {
    Precision { bits: Some(bits + 0.5), convention: "mlx", ..row(name, recipe, weights) }
}

/// Every candidate, from many bits to few, with its figures.
pub static PRECISIONS: LazyLock<[Precision; 21]> = LazyLock::new(|| {
    ROWS.map(|row| Precision { kl: row.recipe.map_or(row.kl, |recipe| figures::kl(recipe, None)), ..row })
});

const ROWS: [Precision; 21] = [
    BASE,
    row("W8A16 INT8", "rtn-int8-channel", "int8-channel"),
    Precision { inputs: Some("int8-token"), ..row("W8A8 INT8", "w8a8", "int8-channel") },
    Precision { inputs: Some("fp8-e4m3-token"), ..row("W8A8 FP8", "fp8-dynamic", "fp8-e4m3-channel") },
    mlx("MLX 8-bit", "rtn-int8-g64-asym:minmax", "int8-g64-asym:minmax", 8.0),
    gguf("Q8_0", "q8_0", "q8_0", ["q8_0", "q8_0"]),
    mlx("MLX 6-bit", "rtn-int6-g64-asym:minmax", "int6-g64-asym:minmax", 6.0),
    gguf("Q6_K", "q6_k", "q6_k", ["q6_k", "q6_k"]),
    mlx("MLX 5-bit", "rtn-int5-g64-asym:minmax", "int5-g64-asym:minmax", 5.0),
    mixed(gguf("Q5_K_M", "q5_k_m", "q5_k", ["q5_k", "q6_k"]), file_type::MORE_BITS),
    mixed(gguf("Q4_K_M", "q4_k_m", "q4_k", ["q4_k", "q6_k"]), file_type::MORE_BITS),
    mixed(gguf("IQ4_XS", "iq4_xs", "iq4_xs", ["iq4_xs", "q6_k"]), file_type::IQ4_XS),
    mlx("MLX 4-bit", "hqq-int4-g64", "int4-g64-asym:minmax", 4.0),
    row("W4A16 NVFP4", "scalesweep-gptaq-nvfp4", "nvfp4"),
    Precision { inputs: Some("nvfp4"), ..row("W4A4 NVFP4", "nvfp4-w4a4", "nvfp4") },
    row("W4A16 INT4", "gptaq-int4-g128-asym", "int4-g128-asym"),
    row("W4A16 MXFP4", "mxfp4", "mxfp4"),
    Precision { convention: "bitsandbytes", ..row("W4A16 NF4", "nf4", "nf4") },
    row("W3A16 INT3", "gptaq-int3-g128-asym", "int3-g128-asym"),
    mixed(gguf("Q3_K_M", "q3_k_m", "q3_k", ["q3_k", "q6_k"]), file_type::Q3_K_M),
    mixed(gguf("Q2_K", "q2_k", "q2_k", ["q2_k", "q6_k"]), file_type::Q2_K),
];

/// Text of a scheme of this crate that does not parse: a bug, which a test excludes.
fn plain() -> Format {
    Scheme::plain(Code::Float(BF16)).format
}

impl Precision {
    /// Finds a precision by its name or recipe, in any case.
    pub fn named(name: &str) -> Option<Self> {
        let is = |known: &str| known.eq_ignore_ascii_case(name);
        PRECISIONS.iter().copied().find(|p| is(p.name) || p.recipe.is_some_and(is))
    }

    /// Returns the format of the weights, with scales in 16 bits, as checkpoints of bf16 models store them.
    pub fn weight_format(&self) -> Format {
        format_of(self.weights)
    }

    /// Returns the format of the inputs.
    pub fn input_format(&self) -> Option<Format> {
        parse_activation(self.inputs?).ok().map(|scheme| scheme.format)
    }

    /// Bits of an element's code: 4 for `int4-g128`.
    pub fn code_bits(&self) -> f64 {
        match self.weight_format().code_bits() {
            0 => self.bits.unwrap_or_else(|| self.weight_format().bits_per_weight(256, 4096)).floor(),
            bits => f64::from(bits),
        }
    }

    /// True if inputs are quantized to multiply in fewer bits.
    pub fn quantizes_inputs(&self) -> bool {
        self.inputs.is_some()
    }

    /// True if the weights are the model's, unchanged.
    pub fn is_dense(&self) -> bool {
        self.recipe.is_none()
    }

    /// Largest measured KL, nats/token.
    pub fn measured_kl(&self) -> Option<f64> {
        figures::larger(self.kl)
    }

    /// Mean bytes of one of these matrices of a model, scales included.
    pub fn matrix_bytes(&self, shape: &ModelShape, matrices: &Matrices) -> f64 {
        let (rows, cols) = (matrices.rows, matrices.cols);
        match self.bits {
            _ if self.convention == "gguf" => {
                let of = |name| format_of(stored_type(name, cols)).bits_per_weight(1, cols.max(1));
                let types = file_type::types(self.weights, self.mixture, shape, matrices.role);
                let bits: f64 = types.map(|(name, share)| share * of(name)).sum();
                (rows * cols) as f64 * bits / 8.0
            }
            Some(bits) => (rows * cols) as f64 * bits / 8.0,
            None => self.weight_format().total_bits(rows, cols) as f64 / 8.0,
        }
    }

    /// True if a plan offers it on devices of a maker: MLX is for Apple's.
    pub fn is_offered_on(&self, maker: Maker) -> bool {
        self.convention != "mlx" || maker == Maker::Apple
    }

    /// Bytes of a table of `weights` elements: the embedding (0) or the head (1).
    pub fn table_bytes(&self, which: usize, weights: u64, hidden: u64) -> f64 {
        let cols = hidden.max(1) as usize;
        let format =
            self.tables.map_or_else(plain, |names| format_of(stored_type(names[which.min(1)], cols)));
        weights as f64 * format.bits_per_weight(1, hidden.max(1) as usize) / 8.0
    }
}

/// Parses a scheme of a weight; scales take 16 bits, scales of code books 32.
pub(crate) fn format_of(name: &str) -> Format {
    let half = |scheme: Scheme| match scheme.format {
        Format::Table(_) => scheme,
        _ => scheme.with_half_scales(),
    };
    parse_weight(name).map_or_else(|_| plain(), |scheme| half(scheme).format)
}

/// Storage of the KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Kv {
    /// Name, as `--kv` takes it.
    pub name: &'static str,
    /// Scheme of keys and values.
    pub scheme: &'static str,
    /// The same with scales that are computed for each head and token, which needs no calibration.
    pub by_head: &'static str,
    /// KL in nats/token on babyllama-105 (head width 16), if measured.
    pub kl: Option<f64>,
    /// Engines that store it, by their titles; none for the model's own 16 bits, which all store.
    pub engines: &'static [&'static str],
}

/// Page with the figures of [`Kv::kl`].
pub const KV_SOURCE: &str = "docs/results/kv-cache.md";

/// KV schemes, from many bits to few.
pub const KVS: [Kv; 4] = [
    Kv { name: "f16", scheme: "f16", by_head: "f16", kl: Some(0.0), engines: &[] },
    Kv {
        name: "fp8",
        scheme: "fp8-e4m3-tensor",
        by_head: "fp8-e4m3-head",
        kl: Some(0.0048),
        // vLLM --kv-cache-dtype fp8; SGLang --kv-cache-dtype fp8_e4m3; TensorRT-LLM kv_cache_quant_algo FP8.
        engines: &["vLLM", "SGLang", "TensorRT-LLM", "mantissa"],
    },
    Kv {
        name: "int8",
        scheme: "int8-head",
        by_head: "int8-head",
        kl: Some(0.00017),
        // LMDeploy --quant-policy 8; llama.cpp -ctk q8_0; mlx-lm --kv-bits 8; ExLlamaV2 ExLlamaV2Cache_Q8.
        engines: &["mantissa", "LMDeploy", "llama.cpp", "mlx-lm", "ExLlamaV2"],
    },
    Kv {
        name: "int4",
        scheme: "int4-head-asym",
        by_head: "int4-head-asym",
        kl: Some(0.0275),
        // LMDeploy --quant-policy 4; llama.cpp -ctk q4_0; mlx-lm --kv-bits 4; ExLlamaV2 ExLlamaV2Cache_Q4.
        engines: &["mantissa", "LMDeploy", "llama.cpp", "mlx-lm", "ExLlamaV2"],
    },
];

/// A KV scheme that no row has.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("--kv: expected f16, fp8, int8 or int4, got \"{found}\"")]
pub struct KvError {
    found: String,
}

impl Kv {
    /// Finds a scheme by name.
    ///
    /// # Errors
    /// [`KvError`].
    pub fn named(name: &str) -> Result<Self, KvError> {
        let alias = match name.to_lowercase().as_str() {
            "bf16" | "fp16" => "f16".to_owned(),
            "q8_0" | "int8-head" => "int8".to_owned(),
            "fp8-e4m3" | "fp8-e4m3-head" => "fp8".to_owned(),
            "q4_0" | "int4-head-asym" => "int4".to_owned(),
            other => other.to_owned(),
        };
        let found = KVS.into_iter().find(|kv| kv.name == alias);
        found.ok_or_else(|| KvError { found: name.to_owned() })
    }

    /// True if an engine stores keys and values so; 16 bits all do.
    pub fn is_stored_by(&self, engine: &str) -> bool {
        self.engines.is_empty() || self.engines.contains(&engine)
    }

    /// Bytes of `elements` values of one token in `heads` heads, scales included.
    pub fn bytes(&self, heads: usize, elements: usize) -> f64 {
        if elements == 0 {
            return 0.0;
        }
        let Ok(scheme) = parse_activation(self.scheme) else { return 2.0 * elements as f64 };
        let scheme = scheme.with_half_scales();
        // A scale per tensor is none per token.
        let code = f64::from(scheme.format.code_bits());
        match scheme.format.blocks() {
            mantissa_num::Blocks::Tensor => elements as f64 * code / 8.0,
            _ => scheme.format.total_bits(heads, elements / heads.max(1)) as f64 / 8.0,
        }
    }

    /// Bytes of one token in all layers of a model, without regard to windows.
    pub fn bytes_per_token(&self, shape: &ModelShape) -> f64 {
        let of = |c: &crate::shape::CacheLayers| c.layers as f64 * self.bytes_of_token(c);
        shape.caches.iter().map(of).sum()
    }

    /// Bytes of a sequence of `tokens` tokens: layers with a window hold no more than it.
    pub fn bytes_of_sequence(&self, shape: &ModelShape, tokens: u64) -> f64 {
        self.bytes_on_device(shape, tokens, Split::ONE)
    }

    /// Bytes of a sequence of `tokens` tokens on a device of those that hold it.
    pub fn bytes_on_device(&self, shape: &ModelShape, tokens: u64, split: Split) -> f64 {
        let of = |c: &crate::shape::CacheLayers| {
            (c.layers * c.held(tokens)) as f64 * self.bytes_of_token(&split.cache(c))
        };
        split.layers(shape) * shape.caches.iter().map(of).sum::<f64>()
            + split.state(shape) * shape.state_bytes as f64
    }

    /// Bytes of one token in one layer.
    pub fn bytes_of_token(&self, cache: &crate::shape::CacheLayers) -> f64 {
        self.bytes(cache.heads, cache.keys) + self.bytes(cache.heads, cache.values)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::shape::{ModelPart, Role};

    #[test]
    fn every_scheme_parses() {
        for p in PRECISIONS.iter() {
            assert!(parse_weight(p.weights).is_ok(), "{}", p.name);
            assert!(p.inputs.is_none_or(|inputs| parse_activation(inputs).is_ok()), "{}", p.name);
            let tables = p.tables.into_iter().flatten();
            tables.for_each(|table| assert!(parse_weight(table).is_ok(), "{table}"));
        }
        KVS.iter().for_each(|kv| assert!(parse_activation(kv.scheme).is_ok(), "{}", kv.name));
        assert_eq!(Precision::named("W4A16 int4").unwrap().recipe, Some("gptaq-int4-g128-asym"));
    }

    #[test]
    fn figures_are_those_of_the_page() {
        let page = include_str!("../../../docs/results/weights.md");
        for p in PRECISIONS.iter().filter(|p| !p.is_dense()) {
            let recipe = format!("`{}`", p.recipe.unwrap());
            for kl in p.kl.iter().flatten() {
                let figure = format!("{kl:.5}");
                let figure = figure.trim_start_matches('0');
                let stated = page.lines().any(|line| line.contains(&recipe) && line.contains(figure));
                assert!(stated, "{recipe}: {figure} is not on the page");
            }
        }
        let page = include_str!("../../../docs/results/kv-cache.md");
        for kv in KVS.iter().filter(|kv| kv.kl.is_some_and(|kl| kl > 0.0)) {
            let figure = format!("{}", kv.kl.unwrap());
            assert!(page.contains(figure.trim_start_matches('0')), "{}: {figure}", kv.name);
        }
    }

    fn bits_of(name: &str, rows: usize, cols: usize, role: Role) -> f64 {
        let matrix = Matrices { part: ModelPart::Mlp, role, rows, cols, count: 1, active: 1 };
        let shape = ModelShape::named("Llama-3.1-8B").unwrap();
        8.0 * Precision::named(name).unwrap().matrix_bytes(&shape, &matrix) / (rows * cols) as f64
    }

    /// Llama-3.1-8B has 32 layers and four query heads to a key head. Q4_K_M and Q5_K_M store `down` in Q6_K in layers 0 to 3,
    /// 28 to 31, and every third of the others: 16 of 32. IQ4_XS stores it in Q5_K in the first 4, Q3_K_M in Q5_K in the first 2
    /// and in Q4_K in the rest, Q2_K in Q3_K (llama.cpp, `llama_tensor_get_type`). Rows of 896 (Qwen2.5-0.5B): 256 does not
    /// divide them; Q4_K is stored as Q5_0 (5.5 bits), Q6_K as Q8_0 (8.5), Q5_K as Q5_1 (6), the rest as IQ4_NL (4.5):
    /// `tensor_type_fallback`. Rows of 80 take f16.
    #[test]
    fn file_types_mix_types_and_store_ragged_rows_wider() {
        for (name, plain, down, ragged, ragged_down) in [
            ("Q8_0", 8.5, 8.5, 8.5, 8.5),
            ("Q6_K", 6.5625, 6.5625, 8.5, 8.5),
            ("Q5_K_M", 5.5, (5.5 + 6.5625) / 2.0, 6.0, (6.0 + 8.5) / 2.0),
            ("Q4_K_M", 4.5, (4.5 + 6.5625) / 2.0, 5.5, (5.5 + 8.5) / 2.0),
            ("IQ4_XS", 4.25, (28.0 * 4.25 + 4.0 * 5.5) / 32.0, 4.5, (28.0 * 4.5 + 4.0 * 6.0) / 32.0),
            ("Q3_K_M", 3.4375, (2.0 * 5.5 + 30.0 * 4.5) / 32.0, 4.5, (2.0 * 6.0 + 30.0 * 5.5) / 32.0),
            ("Q2_K", 2.625, 3.4375, 4.5, 4.5),
        ] {
            let found = [(4096, Role::Other), (4096, Role::Down), (896, Role::Other), (896, Role::Down)]
                .map(|(cols, role)| bits_of(name, 64, cols, role));
            for (found, right) in found.into_iter().zip([plain, down, ragged, ragged_down]) {
                assert!((found - right).abs() < 1e-9, "{name}: {found} {right}");
            }
            assert_eq!(bits_of(name, 64, 80, Role::Down), 16.0, "{name}");
        }
        // Values: four query heads share a key head.
        for (name, bits) in [("IQ4_XS", 5.5), ("Q2_K", 4.5), ("Q6_K", 6.5625)] {
            assert_eq!(bits_of(name, 64, 4096, Role::Value), bits, "{name}");
        }
        // The head of 896 columns: Q8_0 in place of Q6_K.
        let head = Precision::named("Q4_K_M").unwrap().table_bytes(1, 896 * 1000, 896);
        assert!((head - 896_000.0 * 8.5 / 8.0).abs() < 1e-6, "{head}");
    }

    #[test]
    fn bytes_count_scales() {
        let bits = |name: &str| bits_of(name, 4096, 4096, Role::Other);
        assert_eq!(bits("BF16"), 16.0);
        assert!((bits("W4A16 INT4") - 4.15625).abs() < 1e-9);
        assert!((bits("W4A16 MXFP4") - 4.25).abs() < 1e-9);
        assert!((bits("W4A16 NF4") - 4.5).abs() < 1e-9);
        assert!((bits("W4A16 NVFP4") - 4.5).abs() < 1e-4);
        assert!((bits("W8A8 FP8") - (8.0 + 16.0 / 4096.0)).abs() < 1e-9);
        let kv = |name: &str| Kv::named(name).unwrap().bytes(8, 1024);
        assert_eq!((kv("f16"), kv("fp8"), kv("int8"), kv("int4")), (2048.0, 1024.0, 1040.0, 532.0));
        // A latent of 576 elements is one vector, with one scale and zero point: 288 + 2 + 0.5. It has no values.
        let latent = &ModelShape::named("DeepSeek-V3").unwrap().caches[0];
        assert_eq!(Kv::named("int4").unwrap().bytes_of_token(latent), 290.5);
        assert_eq!(Kv::named("int8").unwrap().bytes_of_token(latent), 578.0);
    }
}
