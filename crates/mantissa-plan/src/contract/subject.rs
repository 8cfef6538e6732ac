//! Description of a model as the serving rules see it: written, or planned.

use mantissa_num::format::{Affine, Format, Table};
use mantissa_num::{Blocks, Code, ScaleTree, minifloat};

use super::schemes::Inputs;

/// Model under examination.
#[derive(Clone, Debug, PartialEq)]
pub struct Subject {
    /// True if the model is only planned: rules that need tensor values cannot be decided.
    pub planned: bool,
    /// Checkpoint format: `compressed-tensors`, `gptq`, `gguf`, `dense` …
    pub convention: String,
    /// Dtype of unquantized tensors in the config: `bfloat16`, `float16`, `float32`.
    pub dtype: Option<String>,
    /// Head counts, which tensor parallelism splits.
    pub shape: Shape,
    /// Linear layers of the decoder; fused layers are adjacent.
    pub linears: Vec<Linear>,
    /// Properties that were examined in the checkpoint.
    pub examined: Vec<Observed>,
    /// Problems observed in the checkpoint.
    pub observations: Vec<Observation>,
}

/// Head counts of a decoder.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shape {
    /// Number of query heads.
    pub heads: usize,
    /// Number of key/value heads.
    pub kv_heads: usize,
}

/// Linear layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Linear {
    /// Module name in the checkpoint.
    pub module: String,
    /// Output features.
    pub rows: usize,
    /// Input features.
    pub cols: usize,
    /// Quantization; `None` if the layer is dense.
    pub stored: Option<Stored>,
}

/// Quantized weight.
#[derive(Clone, Debug, PartialEq)]
pub struct Stored {
    /// Format of codes and scales.
    pub format: Format,
    /// Per-tensor (global) scale, if known.
    pub outer: Option<f32>,
    /// Run-time quantization of the layer's input.
    pub input: Option<Input>,
    /// True if columns are not in group order (`g_idx`).
    pub act_order: bool,
    /// True if the input is multiplied per column at run time (`pre_quant_scale`).
    pub multiplied: bool,
}

/// Quantization of a layer's input.
#[derive(Clone, Debug, PartialEq)]
pub struct Input {
    /// Format of the activations.
    pub format: Format,
    /// True if the scale is stored instead of computed at run time.
    pub is_static: bool,
    /// Stored scale, if known.
    pub scale: Option<f32>,
}

/// Weight formats that engines treat alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FormatClass {
    /// Integer weights with unquantized activations.
    IntWeights,
    /// Integer weights with FP8 activations (W4A8).
    IntFp8,
    /// 8-bit integer weights and activations.
    Int8,
    /// FP8 with per-tensor or per-row scales.
    Fp8,
    /// FP8 with per-tile scales.
    Fp8Tiles,
    /// NVFP4.
    Nvfp4,
    /// MXFP4.
    Mxfp4,
    /// MXFP8.
    Mxfp8,
    /// Codebook formats (NF4 and FP4 of bitsandbytes).
    Book,
    /// GGUF block types and other fixed block codecs.
    Blocks,
    /// Anything else.
    Other,
}

impl FormatClass {
    /// Returns the name for reports.
    pub fn name(self) -> &'static str {
        match self {
            FormatClass::IntWeights => "integer weights",
            FormatClass::IntFp8 => "integer weights with FP8 inputs",
            FormatClass::Int8 => "int8 weights and inputs",
            FormatClass::Fp8 => "FP8",
            FormatClass::Fp8Tiles => "FP8 tiles",
            FormatClass::Nvfp4 => "NVFP4",
            FormatClass::Mxfp4 => "MXFP4",
            FormatClass::Mxfp8 => "MXFP8",
            FormatClass::Book => "a codebook format",
            FormatClass::Blocks => "a block type",
            FormatClass::Other => "another format",
        }
    }
}

impl Stored {
    /// Returns the kind of this weight.
    pub fn kind(&self) -> FormatClass {
        let Format::Affine(Affine { code, blocks, scale: Some(ScaleTree { code: scale, .. }), .. }) =
            &self.format
        else {
            return match &self.format {
                Format::Table(Table { .. }) => FormatClass::Book,
                Format::Codec(_) => FormatClass::Blocks,
                _ => FormatClass::Other,
            };
        };
        let fp8 =
            |input: &Input| matches!(input.kind(), Inputs::Fp8Token | Inputs::Fp8Dynamic | Inputs::Fp8Static);
        match (code, scale) {
            (Code::Int(_), _) if self.input.as_ref().is_some_and(fp8) => FormatClass::IntFp8,
            (Code::Int(8), _) if self.input.is_some() => FormatClass::Int8,
            (Code::Int(_), _) => FormatClass::IntWeights,
            (Code::Float(minifloat::E4M3), Code::E8m0) if *blocks == Blocks::Group(32) => FormatClass::Mxfp8,
            (Code::Float(minifloat::E4M3), _) if matches!(blocks, Blocks::Tile { .. }) => {
                FormatClass::Fp8Tiles
            }
            (Code::Float(minifloat::E4M3), _) => FormatClass::Fp8,
            (Code::Float(minifloat::E2M1), Code::E8m0) => FormatClass::Mxfp4,
            (Code::Float(minifloat::E2M1), Code::Float(minifloat::E4M3)) => FormatClass::Nvfp4,
            _ => FormatClass::Other,
        }
    }

    /// Returns the number of columns that share a scale; `None` for per-row and per-tensor scales.
    pub fn group(&self) -> Option<usize> {
        match self.format.blocks() {
            Blocks::Group(g) | Blocks::Tile { cols: g, .. } => Some(g as usize),
            _ => None,
        }
    }

    /// Returns the bit width of integer weights, and whether they have zero points.
    pub fn integers(&self) -> Option<(u32, bool)> {
        match &self.format {
            Format::Affine(Affine { code: Code::Int(bits), scale: Some(_), .. }) => {
                Some((*bits, self.format.has_zero()))
            }
            _ => None,
        }
    }
}

/// Dimension along which tensor parallelism splits a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Split {
    /// Output features: each GPU holds some rows.
    Rows,
    /// Input features: each GPU holds some columns.
    Columns,
}

/// Name suffixes of layers split by columns: outputs of attention and MLP, as transformers names them. All
/// other layers are split by rows.
const BY_COLUMNS: [&str; 9] =
    ["o_proj", "down_proj", "out_proj", "dense", "dense_4h_to_h", "c_proj", "w2", "wo", "fc2"];

/// Layers that engines fuse into one matrix, by name suffix.
const FUSED: [&[&str]; 4] = [
    &["q_proj", "k_proj", "v_proj"],
    &["gate_proj", "up_proj"],
    &["w1", "w3"],
    &["q_a_proj", "kv_a_proj_with_mqa"],
];

/// Returns how the layer of this name is split.
pub fn split_of(module: &str) -> Split {
    if BY_COLUMNS.contains(&last(module)) { Split::Columns } else { Split::Rows }
}

fn last(module: &str) -> &str {
    module.rsplit('.').next().unwrap_or(module)
}

impl Subject {
    /// Returns the groups of fused layers. A layer without a fused partner is in no group.
    pub(super) fn fused(&self) -> Vec<Vec<&Linear>> {
        let mut groups: Vec<((&str, usize), Vec<&Linear>)> = Vec::new();
        for linear in &self.linears {
            let name = last(&linear.module);
            let Some(family) = FUSED.iter().position(|family| family.contains(&name)) else { continue };
            let key = (&linear.module[..linear.module.len() - name.len()], family);
            match groups.iter_mut().rev().find(|(known, _)| *known == key) {
                Some((_, members)) => members.push(linear),
                None => groups.push((key, vec![linear])),
            }
        }
        groups.into_iter().map(|(_, members)| members).filter(|members| members.len() > 1).collect()
    }

    /// Returns the quantized layers that an engine fuses with unquantized ones, which no engine does.
    pub fn fused_with_unquantized(&self) -> Vec<&str> {
        let mixed = |members: &Vec<&Linear>| members.iter().any(|member| member.stored.is_none());
        let members = self.fused().into_iter().filter(mixed).flatten();
        members.filter(|member| member.stored.is_some()).map(|member| member.module.as_str()).collect()
    }

    /// Returns the unquantized layers that an engine fuses with quantized ones.
    pub fn fused_with_quantized(&self) -> Vec<&str> {
        let mixed = |members: &Vec<&Linear>| members.iter().any(|member| member.stored.is_some());
        let members = self.fused().into_iter().filter(mixed).flatten();
        members.filter(|member| member.stored.is_none()).map(|member| member.module.as_str()).collect()
    }

    /// Returns the quantized layers.
    pub(super) fn stored(&self) -> impl Iterator<Item = (&Linear, &Stored)> {
        self.linears.iter().filter_map(|linear| Some((linear, linear.stored.as_ref()?)))
    }
}

/// Problem that can be observed in a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Observed {
    /// Zero points that contradict `checkpoint_format`.
    ZeroPointVersion,
    /// Quantized expert router.
    Router,
    /// Ignore-list entry that matches no tensor.
    IgnoredName,
    /// Layers that are unquantized where the configuration quantizes them, or the reverse.
    UnlistedLayer,
    /// Neither a head nor a tied embedding.
    Head,
    /// Separate head in addition to a tied embedding, with different values.
    TiedHead,
    /// GGUF norm or bias that is not F32.
    Norm,
    /// GGUF metadata without a tokenizer.
    Tokenizer,
    /// GGUF metadata that declare no tokenizer (`no_vocab`): the file runs on token ids only.
    NoVocabulary,
    /// GGUF byte-level tokenizer without `tokenizer.ggml.pre`.
    PreTokenizer,
    /// GGUF tokenizer that encodes other tokens than the one that it was made from.
    OtherTokenizer,
    /// GGUF token count that differs from the number of embedding rows.
    Vocabulary,
    /// GGUF q or k rows in the wrong order for the architecture.
    RowOrder,
    /// KV cache scales that are not per tensor.
    CacheScale,
    /// End token that `generation_config.json` does not state.
    EndBeyondGeneration,
    /// End token that neither `generation_config.json` nor the tokenizer states.
    EndBeyondTokenizer,
    /// End token that no configuration file states: its name shows it.
    EndBeyondFiles,
    /// GGUF token that is named like an end token and of type normal.
    EndOfName,
    /// GGUF file that states no end token, where llama.cpp's default is a plain one.
    EndByDefault,
    /// Tokens that have no row in the embedding.
    TokenWithoutRow,
    /// Quantized KV cache without scales in the checkpoint.
    NoCacheScale,
    /// BOS rule that is missing or contradictory.
    BosRule,
    /// Head quantized to integers, with unquantized inputs.
    IntegerHead,
    /// [`IntegerHead`](Self::IntegerHead) of another width than 4 bits.
    WideHead,
    /// Head quantized otherwise.
    CodedHead,
    /// [`CodedHead`](Self::CodedHead) with scales of tiles.
    TileHead,
    /// Quantized head that no config group of compressed-tensors names.
    UnnamedHead,
    /// Quantized token embedding.
    CodedEmbedding,
}

impl Observed {
    /// True if the property is known of every model, planned ones included.
    pub(super) fn is_known(self) -> bool {
        use Observed::{CodedEmbedding, CodedHead, IntegerHead, TileHead, UnnamedHead, WideHead};
        matches!(self, IntegerHead | WideHead | CodedHead | TileHead | UnnamedHead | CodedEmbedding)
    }

    /// Returns what is observed of a quantized head (`head`) or embedding.
    pub fn of_table(head: bool, stored: &Stored) -> Vec<Self> {
        match (stored.kind(), stored.integers()) {
            _ if !head => vec![Observed::CodedEmbedding],
            (FormatClass::IntWeights, Some((4, _))) => vec![Observed::IntegerHead],
            (FormatClass::IntWeights, _) => vec![Observed::IntegerHead, Observed::WideHead],
            (FormatClass::Fp8Tiles, _) => vec![Observed::CodedHead, Observed::TileHead],
            _ => vec![Observed::CodedHead],
        }
    }
}

/// Observed problem with its location.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Observation {
    /// Kind of problem.
    pub what: Observed,
    /// Tensor or field.
    pub tensor: String,
    /// Value found.
    pub found: String,
}
