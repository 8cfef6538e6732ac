//! Memory of a model and its session, predicted from headers before anything is loaded.

use std::collections::{BTreeMap, HashMap};
use std::ops::Bound;

use mantissa_kernels::packed::{BLOCK, PanelFormat, ROWS};
use mantissa_model::{Buffers, LinearInfo, LinearKind, ModelConfig, StoredAs, WeightSource};
use mantissa_num::codec::Codec;
use mantissa_store::convention::ModelFiles;
use mantissa_store::gguf::GgufTensor;
use mantissa_store::{Dtype, TensorMeta};

use crate::cache::KvPlan;
use crate::model::loaders;
use crate::prepared::{PreparedLinear, scale_code};
use crate::session::RuntimeOptions;
use crate::speculate;

/// Predicted bytes of a loaded model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Footprint {
    /// Weights as they run: repacked, with padding.
    pub weights: u64,
    /// Memory beyond the weights at the peak of loading: tensors as stored, before they are repacked.
    pub loading: u64,
}

impl Footprint {
    /// Predicts the memory of [`FastModel::load`](crate::FastModel::load). Reads the smallest layer of each quantized
    /// form, unless the model is a GGUF file; a layer that cannot be read counts with its stored size. `threads` is
    /// their number in loading.
    pub fn of(files: &ModelFiles, config: &ModelConfig, threads: usize) -> Self {
        let at_once = loaders(config, threads) as u64;
        let parts = match files.gguf() {
            Some(gguf) => of_gguf(gguf.tensors(), at_once),
            None => of_checkpoint(files, config, at_once),
        };
        let absorbed = Footprint { weights: absorbed(config), loading: 0 };
        parts.into_iter().chain([absorbed]).fold(Footprint::default(), |sum, part| {
            let weights = sum.weights.saturating_add(part.weights);
            // What was loaded before is already there.
            let peak = weights.saturating_add(part.loading).max(sum.weights.saturating_add(sum.loading));
            Footprint { weights, loading: peak - weights }
        })
    }

    /// Counts what loading holds so many times: once for each layer that is loaded at the same time.
    fn times(self, at_once: u64) -> Self {
        Footprint { loading: self.loading.saturating_mul(at_once), ..self }
    }

    /// Bytes at the peak of loading or of a session of `session` bytes.
    pub fn peak(&self, session: u64) -> u64 {
        self.weights.saturating_add(self.loading.max(session))
    }
}

/// Bytes of the f32 projections that latent attention applies to queries and to weighted latents.
fn absorbed(config: &ModelConfig) -> u64 {
    let linears = config.decoder_linears().filter(|info| info.kind == LinearKind::KvB);
    linears.map(|info| 4 * info.rows as u64 * info.cols as u64).sum()
}

/// Predicts the parts of a GGUF file in the order of loading: layers, `at_once` at a time, then tables.
fn of_gguf(tensors: &[GgufTensor], at_once: u64) -> Vec<Footprint> {
    let (layers, tables): (Vec<_>, Vec<_>) =
        tensors.iter().partition(|tensor| tensor.name.starts_with("blk."));
    let part = |tensor: &GgufTensor| {
        let (rows, cols) = matrix(&tensor.shape);
        let part = match tensor.ty.codec() {
            _ if rows == 1 => Footprint { weights: 4 * cols as u64, loading: 0 },
            None => dense(rows, cols, tensor.len),
            Some(codec) => Footprint {
                weights: panel_format(codec).bytes(rows, cols).map_or(u64::MAX, |n| n as u64),
                loading: tensor.len,
            },
        };
        // Experts are read one by one.
        let experts = tensor.shape.iter().rev().skip(2).product::<usize>().max(1);
        Footprint { loading: part.loading / experts as u64, ..part }
    };
    layers.into_iter().map(|tensor| part(tensor).times(at_once)).chain(tables.into_iter().map(part)).collect()
}

/// Rows and columns of a tensor: experts count as rows.
fn matrix(shape: &[usize]) -> (usize, usize) {
    shape.split_last().map_or((1, 1), |(&cols, outer)| (outer.iter().product::<usize>().max(1), cols))
}

/// Predicts a dense matrix of `stored` bytes: padded, and a scale for each row.
fn dense(rows: usize, cols: usize, stored: u64) -> Footprint {
    let padded = padded(rows, cols);
    let each = stored / (rows * cols).max(1) as u64;
    // As it was read, and as the one before it was: glibc keeps freed blocks for the next (its threshold for mappings follows
    // what was freed). Without, the prediction was .83 to .9 of the peak. It unmaps larger ones as soon as they are freed: with
    // them counted twice, it was 1.18 of the peak.
    let kept = if stored > LARGEST_KEPT { 0 } else { stored };
    Footprint { weights: padded * each + 4 * rows as u64, loading: stored + kept }
}

/// Bytes of the largest freed block that glibc keeps (malloc.c, `DEFAULT_MMAP_THRESHOLD_MAX` on 64-bit machines).
const LARGEST_KEPT: u64 = 32 << 20;

/// Elements of a matrix in whole panels.
fn padded(rows: usize, cols: usize) -> u64 {
    (rows.next_multiple_of(ROWS) as u64).saturating_mul(cols.next_multiple_of(BLOCK) as u64)
}

/// Format of the panels of a codec.
fn panel_format(codec: &Codec) -> PanelFormat {
    let form = codec.id.integers();
    let (scales, mins) = (scale_code(form.scales), scale_code(form.mins));
    let (bits, group) = (form.bits, form.group);
    PanelFormat { bits, levels: None, zero: 0, group, unit: group, scales, mins, factor: 1.0 }
}

/// Tensors of a linear layer.
#[derive(Debug, Default)]
struct Stored<'a> {
    tensors: Vec<(&'a str, &'a TensorMeta)>,
}

impl Stored<'_> {
    fn bytes(&self) -> u64 {
        self.tensors.iter().map(|(_, meta)| meta.len).sum()
    }

    fn is_dense(&self) -> bool {
        let float = |dtype| matches!(dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16);
        self.tensors.iter().all(|(name, meta)| matches!(*name, "weight" | "bias") && float(meta.dtype))
    }

    /// Names and dtypes, the same for layers of one form.
    fn form(&self) -> Kind {
        self.tensors.iter().map(|(name, meta)| ((*name).to_owned(), meta.dtype)).collect()
    }
}

/// Predicts the parts of a folder in the order of loading, `at_once` layers at a time.
fn of_checkpoint(files: &ModelFiles, config: &ModelConfig, at_once: u64) -> Vec<Footprint> {
    let all: BTreeMap<&str, &TensorMeta> =
        files.checkpoint().tensors().map(|meta| (meta.name.as_str(), meta)).collect();
    let stored = |info: &LinearInfo| {
        let (prefix, len) = (format!("{}.", info.module), info.module.len() + 1);
        let named = all
            .range::<str, _>((Bound::Included(prefix.as_str()), Bound::Unbounded))
            .take_while(|(name, _)| name.starts_with(&prefix));
        Stored { tensors: named.map(|(&name, &meta)| (&name[len..], meta)).collect() }
    };
    // An expert's part of a fused tensor.
    let fused = |info: &LinearInfo| match &info.stored {
        StoredAs::Stacked(stack) => all.get(stack.tensor.as_str()).map(|meta| {
            let each = meta.len / meta.numel().max(1);
            each * (info.rows * info.cols) as u64
        }),
        _ => None,
    };
    let linears: Vec<_> =
        config.decoder_linears().chain(config.tables()).map(|info| (stored(&info), info)).collect();
    let per_weight = sampled(files, &linears);
    let mut rest = files.checkpoint().total_bytes();
    // Small projections run in f32.
    let sides = (0..config.num_hidden_layers).flat_map(|layer| {
        config.sides(layer).into_iter().map(move |side| (config.side_module(layer, side.kind), side))
    });
    let of_sides: u64 = sides
        .filter_map(|(module, side)| {
            let stored = all.get(format!("{module}.weight").as_str())?.len;
            rest = rest.saturating_sub(stored);
            Some(4 * side.rows as u64 * side.cols as u64)
        })
        .sum();
    let tables = config.tables().len();
    let layers = linears.len().saturating_sub(tables);
    let mut parts: Vec<_> = linears
        .iter()
        .enumerate()
        .map(|(i, (stored, info))| {
            let fused = fused(info).filter(|_| stored.tensors.is_empty());
            rest = rest.saturating_sub(fused.unwrap_or_else(|| stored.bytes()));
            let part = match per_weight.get(&stored.form()) {
                _ if stored.is_dense() => {
                    dense(info.rows, info.cols, fused.unwrap_or_else(|| stored.bytes()))
                }
                Some(&(each, codes)) => Footprint {
                    weights: (padded(info.rows, info.cols) as f64 * each) as u64,
                    loading: stored.bytes() + codes * (info.rows * info.cols) as u64,
                },
                None => Footprint { weights: stored.bytes(), loading: stored.bytes() },
            };
            if i < layers { part.times(at_once) } else { part }
        })
        .collect();
    // Norms, and what is stored otherwise, such as stacked experts.
    parts.insert(0, Footprint { weights: rest.saturating_add(of_sides), loading: 0 });
    parts
}

/// Names and dtypes of a layer's tensors, without the name of the layer.
type Kind = Vec<(String, Dtype)>;

/// Prepared bytes per weight of each quantized form, from its smallest layer, and copies of the codes, a byte each,
/// that loading takes.
fn sampled(files: &ModelFiles, linears: &[(Stored<'_>, LinearInfo)]) -> HashMap<Kind, (f64, u64)> {
    let mut smallest: HashMap<_, &LinearInfo> = HashMap::new();
    for (stored, info) in
        linears.iter().filter(|(stored, _)| !stored.tensors.is_empty() && !stored.is_dense())
    {
        let held = smallest.entry(stored.form()).or_insert(info);
        if info.rows * info.cols < held.rows * held.cols {
            *held = info;
        }
    }
    let each = |(form, info): (Kind, &LinearInfo)| {
        let weight = WeightSource::linear(files, &info.module, info.rows, info.cols, false).ok()?;
        let prepared = PreparedLinear::new(&info.module, weight, 1).ok()?;
        let copies = if prepared.is_integer() { 1 } else { 2 };
        Some((form, (prepared.bytes() as f64 / padded(info.rows, info.cols).max(1) as f64, copies)))
    };
    smallest.into_iter().filter_map(each).collect()
}

/// Predicted bytes of a session, by what they hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SessionFootprint {
    /// Keys, values, and states of recurrent mixers.
    pub cache: u64,
    /// Activations, logits and scratch.
    pub buffers: u64,
}

impl SessionFootprint {
    /// Predicts the memory of a [`Runtime`](crate::Runtime) of these sizes.
    pub fn of(options: &RuntimeOptions, config: &ModelConfig, kv: &KvPlan) -> Self {
        let options = options.settled();
        let rows = speculate::SEQUENCES * speculate::MOST + options.step_tokens + options.sequences;
        let tokens = options.cached_tokens.max(options.context);
        SessionFootprint {
            cache: kv.bytes_needed(tokens.saturating_add(kv.block_tokens())).saturating_add(
                kv.state_bytes(options.context).saturating_mul((options.sequences + options.kept) as u64),
            ),
            buffers: buffers(config, rows, options.step_tokens, options.context, options.sequences),
        }
    }

    /// Predicts the memory of a draft model beside a [`Runtime`](crate::Runtime) of these sizes.
    pub fn of_draft(options: &RuntimeOptions, config: &ModelConfig, kv: &KvPlan) -> Self {
        let options = options.settled();
        let context = options.context.min(config.max_position_embeddings);
        let slots = options.sequences + options.kept;
        let rows = speculate::CHUNK.min(context);
        SessionFootprint {
            cache: kv.bytes_needed(context.next_multiple_of(kv.block_tokens())).saturating_mul(slots as u64),
            buffers: buffers(config, rows, rows, context, 1),
        }
    }

    /// Bytes in all.
    pub fn bytes(&self) -> u64 {
        self.cache.saturating_add(self.buffers)
    }
}

/// Bytes of buffers planned for `rows` rows of which a pass uses `used`, with `logits` rows of logits.
fn buffers(config: &ModelConfig, rows: usize, used: usize, context: usize, logits: usize) -> u64 {
    let ends = [0, config.num_hidden_layers.saturating_sub(1)];
    let linears = ends.into_iter().flat_map(|layer| config.layer_linears(layer));
    let widest = linears.map(|info| info.cols).max().unwrap_or(0);
    // The input of a product as 8-bit codes with their scales, or as two bytes per value.
    let scratch = (used as u64).saturating_mul(2 * widest as u64);
    let logits = (logits as u64).saturating_mul(4 * config.vocab_size as u64);
    Buffers::bytes_needed(config, rows, context).saturating_add(logits).saturating_add(scratch)
}
