//! Precisions with their measured quality loss, and schemes of the KV cache. [`CANDIDATES`] is the list that `plan` and
//! `quantize --for` choose from.
//!
//! KL figures come from [`figures`].

mod candidates;

use mantissa_arch::gguf::{DecoderSizes, FileType, stored_type};
use mantissa_num::format::Format;
use mantissa_num::minifloat::BF16;
use mantissa_num::{Blocks, Code, CodecId, Scheme, Source, parse_activation, parse_weight};
use serde::Serialize;

use crate::figures::{self, Figure, MODELS, figure};
use crate::parallel::Split;
use crate::shape::{Matrices, ModelPart, ModelShape};

pub use candidates::{CANDIDATES, PRECISIONS};

/// Precision of weights and inputs: one row of [`CANDIDATES`].
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Precision {
    /// Name in tables. Rows of one name are variants, of which a plan shows the one that fits.
    pub name: &'static str,
    /// Recipe of `mantissa quantize`; `None` for the unquantized model.
    pub recipe: Option<&'static str>,
    /// Nominal bits per weight, as `--bits` names them.
    pub nominal: u32,
    /// Scheme of the weights.
    pub weights: &'static str,
    /// Scheme of the inputs; `None` leaves them in 16 bits.
    pub inputs: Option<&'static str>,
    /// Stored bits per weight where the format stores more than the scheme.
    pub bits: Option<f64>,
    /// File type of llama.cpp, which gives each matrix a type; `weights` is that of most.
    #[serde(skip)]
    pub file_type: Option<FileType>,
    /// Schemes of embedding and head; `None` leaves them in bf16.
    pub tables: Option<[&'static str; 2]>,
    /// Parts of the layers that are stored otherwise.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub apart: Option<Apart>,
    /// Checkpoint format.
    pub convention: &'static str,
    /// KL in nats/token on ref-8m and ref-32m, if measured.
    pub kl: [Option<f64>; 2],
    /// Where it is offered.
    #[serde(skip)]
    pub offered: Offered,
}

/// How a GPU suits a precision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Suits {
    /// Its instructions multiply the types.
    Yes,
    /// Weights are decoded to wider types first.
    Decoded,
    /// It does not run it as named; the reason.
    No(String),
}

/// Parts of the layers that a precision stores otherwise than the rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Apart {
    /// Parts.
    pub parts: &'static [ModelPart],
    /// Scheme of their weights.
    pub weights: &'static str,
    /// Scheme of their inputs; `None` leaves them in 16 bits.
    pub inputs: Option<&'static str>,
}

/// Conditions under which a precision is offered, beyond the rules of engines.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Offered {
    /// True if it is offered only where no other of its bits fits: smaller groups or blocks of 32, most of which take
    /// half a bit or a bit more, divide rows that groups of 128 or blocks of 256 do not.
    pub spare: bool,
    /// True if others come first because its kernels save memory and not time (bitsandbytes).
    pub storage: bool,
    /// Least compute capability times ten of an NVIDIA GPU whose instructions multiply its types. Below it, weights alone are
    /// decoded, so that others come first; with quantized inputs it is not offered.
    pub least_sm: Option<u32>,
    /// True if only engines whose kernels multiply in its types count, not those that emulate them.
    pub native: bool,
    /// True if a plan leaves it out where nothing runs it, instead of giving the reason.
    pub hidden: bool,
    /// Recipe whose measured loss stands for its own on models where that is not measured, and is no smaller: it quantizes all
    /// of these layers alike and more, or in larger groups.
    pub bound: Option<&'static str>,
    /// Engine that runs it from a checkpoint that mantissa does not write.
    pub elsewhere: Option<Elsewhere>,
}

/// Engine that runs a precision from a checkpoint of another tool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Elsewhere {
    /// Name for `--hardware` of the device.
    pub device: &'static str,
    /// Engine, by its title.
    pub engine: &'static str,
    /// Tool that writes the checkpoint.
    pub tool: &'static str,
    /// Source.
    pub source: &'static str,
}

/// Largest surplus of stored bits per weight over the nominal bits of a GGUF type. Mixtures of K-types have up to .93
/// (`q2_k`); layers that fall back to wider types have more.
pub const SURPLUS: f64 = 1.0;

/// Text of a scheme of this crate that does not parse: a bug, which a test excludes.
fn plain() -> Format {
    Scheme::plain(Code::Float(BF16)).format
}

impl Precision {
    /// Finds a precision by its name or recipe, in any case.
    pub fn named(name: &str) -> Option<Self> {
        let is = |known: &str| known.eq_ignore_ascii_case(name);
        CANDIDATES.iter().copied().find(|p| is(p.name) || p.recipe.is_some_and(is))
    }

    /// Returns the measured figure with the larger KL, by which candidates are ranked.
    pub fn figure(&self) -> Option<&'static Figure> {
        let figures = MODELS.into_iter().filter_map(|model| self.figure_on(model));
        figures.max_by(|a, b| a.kl.total_cmp(&b.kl))
    }

    /// Returns its figure on a model, or that of its bound.
    fn figure_on(&self, model: &str) -> Option<&'static Figure> {
        let recipes = [self.recipe, self.offered.bound].into_iter().flatten();
        recipes.filter_map(|recipe| figure(model, recipe, Some(self.convention))).next()
    }

    /// True if the loss on a model, or the larger loss of all if `model` is `None`, is that of its bound.
    pub fn is_bounded(&self, model: Option<&str>) -> bool {
        let figure = model.map_or_else(|| self.figure(), |model| self.figure_on(model));
        figure.is_some_and(|figure| Some(figure.recipe) != self.recipe)
    }

    /// Returns the precision of a part of the layers.
    pub fn of_part(&self, part: ModelPart) -> Self {
        match self.apart.filter(|apart| apart.parts.contains(&part)) {
            Some(Apart { weights, inputs, .. }) => {
                Precision { weights, inputs, bits: None, file_type: None, apart: None, ..*self }
            }
            None => Precision { apart: None, ..*self },
        }
    }

    /// Says how an NVIDIA GPU of a compute capability times ten (`None`: not known) suits it. Other devices always suit.
    pub fn suits(&self, sm: Option<u32>) -> Suits {
        let Some(least) = self.offered.least_sm.filter(|least| sm.is_none_or(|sm| sm < *least)) else {
            return Suits::Yes;
        };
        match self.inputs {
            None => Suits::Decoded,
            Some(_) => Suits::No(format!(
                "needs a GPU with native FP4, such as gpu=b200 (SM {}.{})",
                least / 10,
                least % 10
            )),
        }
    }

    /// True if a part of the layers is quantized.
    pub fn quantizes(&self, part: ModelPart) -> bool {
        !self.is_dense() && self.of_part(part).weights != "bf16"
    }

    /// Mean bytes of one of these matrices of a model, scales included.
    pub fn matrix_bytes(&self, shape: &ModelShape, matrices: &Matrices) -> f64 {
        let (precision, rows, cols) = (self.of_part(matrices.part), matrices.rows, matrices.cols);
        let bits = precision.file_type.map(|ty| mean_bits(ty, shape, matrices)).or(precision.bits);
        match bits {
            Some(bits) => (rows * cols) as f64 * bits / 8.0,
            None => precision.weight_format().total_bits(rows, cols) as f64 / 8.0,
        }
    }

    /// Checks that the checkpoint format holds the layers of a model: whole groups in each row, and in GGUF blocks that do not
    /// fall back to much wider ones.
    ///
    /// # Errors
    /// The first reason why not.
    pub fn holds(&self, shape: &ModelShape) -> Result<(), String> {
        if self.apart.is_some() && !shape.is_mixture() {
            return Err("the model has no routed experts".to_owned());
        }
        let quantized = || shape.matrices.iter().filter(|m| self.quantizes(m.part));
        if self.convention == "gguf" {
            let bytes: f64 = quantized().map(|m| m.count as f64 * self.matrix_bytes(shape, m)).sum();
            let weights: u64 = quantized().map(Matrices::weights).sum();
            let stored = 8.0 * bytes / weights.max(1) as f64;
            let fits = self.is_dense() || stored <= f64::from(self.nominal) + SURPLUS;
            return if fits { Ok(()) } else { Err(too_wide(stored)) };
        }
        let ragged = |m: &&Matrices| match self.of_part(m.part).weight_format().blocks() {
            Blocks::Group(group) => !m.cols.is_multiple_of(group as usize),
            _ => false,
        };
        match quantized().find(ragged) {
            Some(m) => Err(format!("groups of {} do not divide rows of {}", self.weights, m.cols)),
            None => Ok(()),
        }
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

    /// Bytes of a table of `weights` elements: the embedding (0) or the head (1).
    pub fn table_bytes(&self, which: usize, weights: u64, hidden: u64) -> f64 {
        let cols = hidden.max(1) as usize;
        let bits = match self.file_type {
            Some(ty) => stored_bits(ty.tables()[which.min(1)], cols),
            None => plain().bits_per_weight(1, cols),
        };
        weights as f64 * bits / 8.0
    }
}

/// Returns the bits per weight with which a type is stored in rows of `cols`: other blocks, or f16, where its own do not divide
/// them.
fn stored_bits(wanted: CodecId, cols: usize) -> f64 {
    let name = stored_type(wanted, cols).map_or("f16", CodecId::name);
    format_of(name).bits_per_weight(1, cols.max(1))
}

/// Returns the mean bits per weight that a file type gives these matrices in the layers of a model, without an importance
/// matrix.
fn mean_bits(ty: FileType, shape: &ModelShape, matrices: &Matrices) -> f64 {
    let Some(kind) = matrices.role.kind() else { return stored_bits(ty.base, matrices.cols) };
    let sizes = DecoderSizes { layers: shape.layers as usize, heads: shape.heads, kv_heads: shape.kv_heads };
    let of = |(codec, count): (CodecId, usize)| count as f64 * stored_bits(codec, matrices.cols);
    ty.over_layers(sizes, kind).into_iter().map(of).sum::<f64>() / sizes.layers.max(1) as f64
}

/// Says that a GGUF file would take more bits than its name states.
pub fn too_wide(stored: f64) -> String {
    format!("{stored:.2} bits per weight here, because its blocks do not divide the rows")
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

/// KV schemes that are planned only where they are asked for: their scales need a calibration, or they lose much.
pub const KVS_ASKED: [Kv; 2] = [
    Kv {
        name: "fp8-head",
        // One stored scale for each head: none per token.
        scheme: "fp8-e4m3-head@static",
        by_head: "fp8-e4m3-head",
        kl: Some(0.0048),
        // vLLM docs/features/quantization/quantized_kvcache.md, "Per-attention-head quantization" (Flash Attention, scales
        // of a calibration); mantissa --kv fp8-e4m3-head finds them as it runs.
        engines: &["vLLM", "mantissa"],
    },
    Kv {
        name: "nvfp4",
        scheme: "nvfp4",
        by_head: "nvfp4",
        kl: Some(0.110),
        // TensorRT-LLM docs/source/features/quantization.md, "NVFP4 KV Cache" (checkpoints of Model Optimizer; Blackwell).
        engines: &["TensorRT-LLM", "mantissa"],
    },
];

/// A KV scheme that no row has.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("--kv: expected f16, fp8, fp8-head, int8, nvfp4 or int4, got \"{found}\"")]
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
            "fp8-e4m3" => "fp8".to_owned(),
            "fp8-e4m3-head" => "fp8-head".to_owned(),
            "q4_0" | "int4-head-asym" => "int4".to_owned(),
            other => other.to_owned(),
        };
        let found = KVS.into_iter().chain(KVS_ASKED).find(|kv| kv.name == alias);
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
            // A global scale beside those of the blocks is stored once too.
            Blocks::Group(group) if scheme.format.scale().is_some_and(|scale| scale.outer.is_some()) => {
                let scale = scheme.format.scale().map_or(0.0, |scale| f64::from(scale.code.bits()));
                elements as f64 * (code + scale / f64::from(group)) / 8.0
            }
            Blocks::Tensor => elements as f64 * code / 8.0,
            _ if scheme.source == Source::Static => elements as f64 * code / 8.0,
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
    use mantissa_arch::kinds::LinearKind;

    use super::*;
    use crate::shape::Role;

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
            for (model, kl) in MODELS.iter().zip(p.kl).filter_map(|(model, kl)| Some((model, kl?))) {
                let recipe = format!("`{}`", p.figure_on(model).unwrap().recipe);
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

    /// Recipes are ranked by the larger of two models' losses: with that of the smaller model alone, one would win by it.
    #[test]
    fn what_one_model_has_no_figure_of_does_not_win_by_that() {
        let named = |recipe: &str| *CANDIDATES.iter().find(|p| p.recipe == Some(recipe)).unwrap();
        let (fine, coarse) = (named("gptaq-int4-g32-asym"), named("gptaq-int4-g128-asym"));
        assert!(fine.kl[0] < coarse.kl[0] && fine.kl[1] == coarse.kl[1], "{:?}", fine.kl);
        assert!(fine.measured_kl() > named("fp8-dynamic").measured_kl());
        assert!(fine.is_bounded(None) && !fine.is_bounded(Some(MODELS[0])) && !coarse.is_bounded(None));
        let four = |p: &&Precision| p.nominal == 4 && p.measured_kl().is_some();
        assert!(CANDIDATES.iter().filter(four).all(|p| p.kl[1].is_some()));
    }

    /// Checks that only projections with a role have types of their own in candidates: the others have the main one.
    #[test]
    fn roles_tell_apart_what_file_types_do() {
        let gguf = || CANDIDATES.iter().filter(|p| p.convention == "gguf");
        assert_eq!(gguf().count(), 9);
        let sizes = DecoderSizes { layers: 16, heads: 32, kv_heads: 8 };
        for p in gguf() {
            let ty = p.file_type.unwrap();
            assert_eq!((p.weights, p.recipe), (ty.base.name(), Some(ty.name)));
            for kind in LinearKind::PLAIN.into_iter().filter(|kind| Role::of(*kind) == Role::Other) {
                assert_eq!(ty.over_layers(sizes, kind), [(ty.base, 16)], "{} {kind:?}", p.name);
            }
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
        for (name, bits) in [("IQ4_XS", 5.5), ("IQ4_NL", 5.5), ("Q2_K", 4.5), ("Q6_K", 6.5625)] {
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
        // Stored scales of heads are none per token; NVFP4 has an 8-bit scale for 16 values.
        assert_eq!((kv("fp8-head"), kv("nvfp4")), (1024.0, 576.0));
        // A latent of 576 elements is one vector, with one scale and zero point: 288 + 2 + 0.5. It has no values.
        let latent = &ModelShape::named("DeepSeek-V3").unwrap().caches[0];
        assert_eq!(Kv::named("int4").unwrap().bytes_of_token(latent), 290.5);
        assert_eq!(Kv::named("int8").unwrap().bytes_of_token(latent), 578.0);
    }
}
