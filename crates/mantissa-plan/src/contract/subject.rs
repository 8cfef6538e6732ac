//! What the rules are about: a model as it is, or will be, stored.

use mantissa_num::format::{Affine, Format, Table};
use mantissa_num::{Blocks, Code, ScaleTree, minifloat};

/// A model as engines see it.
#[derive(Clone, Debug, PartialEq)]
pub struct Subject {
    /// Whether it is only planned: nothing that takes weights is known of it.
    pub planned: bool,
    /// Name of its convention: `compressed-tensors`, `gptq`, `gguf`, `dense` …
    pub convention: String,
    /// Dtype of its dense tensors as its config says: `bfloat16`, `float16`, `float32`.
    pub dtype: Option<String>,
    /// Sizes that are dealt out to GPUs.
    pub shape: Shape,
    /// Linear layers of the decoder, fused partners after each other.
    pub linears: Vec<Linear>,
    /// What was looked for in the artifact.
    pub examined: Vec<Observed>,
    /// What was seen of it.
    pub observations: Vec<Observation>,
}

/// Sizes of a decoder.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shape {
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
}

/// A linear layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Linear {
    /// Module name in the checkpoint.
    pub module: String,
    /// Output features.
    pub rows: usize,
    /// Input features.
    pub cols: usize,
    /// How it is stored; `None` where it is dense.
    pub stored: Option<Stored>,
}

/// A quantized weight.
#[derive(Clone, Debug, PartialEq)]
pub struct Stored {
    /// Codes and scales.
    pub format: Format,
    /// Scale of the whole tensor, where it is known.
    pub outer: Option<f32>,
    /// Quantization of the input at run time.
    pub input: Option<Input>,
    /// Whether columns stand in another order than their groups (`g_idx`).
    pub act_order: bool,
}

/// Quantization of a layer's input.
#[derive(Clone, Debug, PartialEq)]
pub struct Input {
    /// Its format.
    pub format: Format,
    /// The stored scale, where there is one.
    pub scale: Option<f32>,
}

/// Families of formats that engines treat alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Integers, inputs as they come.
    IntWeights,
    /// Integers of 8 bits with integer inputs.
    Int8,
    /// FP8 with a scale per tensor or row.
    Fp8,
    /// FP8 with a scale per tile.
    Fp8Tiles,
    /// NVFP4.
    Nvfp4,
    /// MXFP4.
    Mxfp4,
    /// MXFP8.
    Mxfp8,
    /// Code books (NF4, FP4 of bitsandbytes).
    Book,
    /// Block types of GGUF and other closed formats.
    Blocks,
    /// Anything else.
    Other,
}

impl Kind {
    /// For people.
    pub fn name(self) -> &'static str {
        match self {
            Kind::IntWeights => "integer weights",
            Kind::Int8 => "int8 weights and inputs",
            Kind::Fp8 => "FP8",
            Kind::Fp8Tiles => "FP8 in tiles",
            Kind::Nvfp4 => "NVFP4",
            Kind::Mxfp4 => "MXFP4",
            Kind::Mxfp8 => "MXFP8",
            Kind::Book => "a code book",
            Kind::Blocks => "a block type",
            Kind::Other => "another format",
        }
    }
}

impl Stored {
    /// Its family.
    pub fn kind(&self) -> Kind {
        let Format::Affine(Affine { code, blocks, scale: Some(ScaleTree { code: scale, .. }), .. }) =
            &self.format
        else {
            return match &self.format {
                Format::Table(Table { .. }) => Kind::Book,
                Format::Codec(_) => Kind::Blocks,
                _ => Kind::Other,
            };
        };
        match (code, scale) {
            (Code::Int(8), _) if self.input.is_some() => Kind::Int8,
            (Code::Int(_), _) => Kind::IntWeights,
            (Code::Float(minifloat::E4M3), Code::E8m0) if *blocks == Blocks::Group(32) => Kind::Mxfp8,
            (Code::Float(minifloat::E4M3), _) if matches!(blocks, Blocks::Tile { .. }) => Kind::Fp8Tiles,
            (Code::Float(minifloat::E4M3), _) => Kind::Fp8,
            (Code::Float(minifloat::E2M1), Code::E8m0) => Kind::Mxfp4,
            (Code::Float(minifloat::E2M1), Code::Float(minifloat::E4M3)) => Kind::Nvfp4,
            _ => Kind::Other,
        }
    }

    /// Columns that share a scale; `None` where a row or the tensor does.
    pub fn group(&self) -> Option<usize> {
        match self.format.blocks() {
            Blocks::Group(g) | Blocks::Tile { cols: g, .. } => Some(g as usize),
            _ => None,
        }
    }

    /// Width and zero point of integers.
    pub fn integers(&self) -> Option<(u32, bool)> {
        match &self.format {
            Format::Affine(Affine { code: Code::Int(bits), scale: Some(_), .. }) => {
                Some((*bits, self.format.has_zero()))
            }
            _ => None,
        }
    }
}

/// How a layer is split between GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Split {
    /// Each GPU has some of its rows: its outputs are dealt out.
    Rows,
    /// Each GPU has some of its columns: its inputs are dealt out.
    Columns,
}

/// Last parts of names of layers that are split by columns: the output of the attention and of the MLP, as the models of
/// transformers name them. All others are split by rows.
const BY_COLUMNS: [&str; 9] =
    ["o_proj", "down_proj", "out_proj", "dense", "dense_4h_to_h", "c_proj", "w2", "wo", "fc2"];

/// Layers that engines join into one, by the last parts of their names.
const FUSED: [&[&str]; 4] = [
    &["q_proj", "k_proj", "v_proj"],
    &["gate_proj", "up_proj"],
    &["w1", "w3"],
    &["q_a_proj", "kv_a_proj_with_mqa"],
];

/// How the layer of this name is split.
pub fn split_of(module: &str) -> Split {
    if BY_COLUMNS.contains(&last(module)) { Split::Columns } else { Split::Rows }
}

fn last(module: &str) -> &str {
    module.rsplit('.').next().unwrap_or(module)
}

impl Subject {
    /// Layers that are joined, each list with its name. A layer that is joined with no other is not among them.
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

    /// The quantized layers.
    pub(super) fn stored(&self) -> impl Iterator<Item = (&Linear, &Stored)> {
        self.linears.iter().filter_map(|linear| Some((linear, linear.stored.as_ref()?)))
    }
}

/// What may be seen in an artifact.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Observed {
    /// Zero points that contradict `checkpoint_format`.
    ZeroPointVersion,
    /// A router of experts that is quantized.
    Router,
    /// A name in the list of layers left alone that no tensor has.
    IgnoredName,
    /// No head, and none that is tied.
    Head,
    /// A head beside a tied embedding, with other values.
    TiedHead,
    /// A norm or a bias in another type than f32, in GGUF.
    Norm,
    /// No tokenizer in the metadata of GGUF.
    Tokenizer,
    /// No tokenizer, which the metadata of GGUF say: the file runs on token ids only.
    NoVocabulary,
    /// A byte-level tokenizer that does not say how text is cut, in GGUF.
    PreTokenizer,
    /// As many tokens as the embedding has rows is not what the metadata of GGUF list.
    Vocabulary,
    /// Rows of q and k that are not in the order of the architecture, in GGUF.
    RowOrder,
    /// Scales of the KV cache that are not one per tensor.
    CacheScale,
    /// A quantized KV cache whose scales are not in the checkpoint.
    NoCacheScale,
    /// Whether a beginning-of-sequence token stands first is not said, or said in two ways.
    BosRule,
}

/// Something that was seen, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Observation {
    /// What.
    pub what: Observed,
    /// The tensor or field.
    pub tensor: String,
    /// What it holds.
    pub found: String,
}
