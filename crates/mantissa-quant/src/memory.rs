//! The memory of a run, as a sum of named buffers: what is predicted before it begins and held under `--memory`.
//!
//! A run holds one layer at a time, so its peak is that of the layer with the largest buffers, in the stage that needs more:
//! quantizing it, or reading it back to verify it. Models that are small enough have their logits compared at the end, which
//! takes the whole model in f32. Sizes follow from shapes and formats; what the allocator adds was measured (`bench/memory.py`
//! compares the sum with the kernel's account).

use mantissa_model::LinearInfo;
use mantissa_num::{Scheme, code_unit};
use mantissa_store::TensorMeta;

use crate::plan::Plan;
use crate::rtn;
use crate::source::PANEL;
use crate::verify::MAX_LOGIT_PARAMETERS;

/// Code, tables, arguments and the larger of the pieces in which files are copied, hashed and compared; measured.
const BASE: u64 = 1_500_000;

/// Names, shapes and journal lines of a tensor of source or output.
const PER_TENSOR: u64 = 1 << 10;

/// Blocks larger than this, glibc's largest threshold, are given back to the system when they are freed. Smaller ones come
/// from its heap once one of their size has been freed, and leave holes there.
const HEAP_BLOCK: u64 = 32 << 20;

/// Share of the heap's blocks that holes add where layers of several sizes take turns; measured, 10 to 25 %.
const HOLES: f64 = 0.18;

/// Share that holes add to a model that is loaded once; measured.
const HOLES_OF_MODEL: f64 = 0.05;

/// A part of a run and the buffers that it holds at its peak.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stage {
    /// For example `quantize model.layers.0.mlp.up_proj`.
    pub name: String,
    /// What is held, with bytes.
    pub buffers: Vec<(&'static str, u64)>,
}

impl Stage {
    /// Bytes of all its buffers.
    pub fn bytes(&self) -> u64 {
        self.buffers.iter().fold(0, |sum, (_, bytes)| sum.saturating_add(*bytes))
    }
}

/// The stage of the run with the highest peak of anonymous memory; `verified` says that the output is read back.
pub fn peak_stage(plan: &Plan, verified: bool) -> Stage {
    let mut stages = Vec::new();
    for (info, scheme) in plan.quantized() {
        stages.push(quantizing(plan, info, scheme));
        if verified {
            stages.push(verifying(plan, info, scheme));
        }
    }
    if verified && plan.config.parameters() <= MAX_LOGIT_PARAMETERS {
        stages.push(comparing_logits(plan));
    }
    let mut peak = stages
        .into_iter()
        .max_by_key(Stage::bytes)
        .unwrap_or(Stage { name: String::new(), buffers: Vec::new() });
    let tensors = (plan.specs.len() + plan.linears.len() + plan.copied.len()) as u64;
    peak.buffers.push(("base", BASE + tensors * PER_TENSOR));
    peak
}

/// Sizes of a layer and of what it becomes, in bytes.
struct Sizes {
    /// One unit per code.
    codes: u64,
    /// Stored block scales, and zero points as i32.
    scales: u64,
    /// The tensors of the output.
    stored: u64,
    blocks: u64,
    zeros: u64,
    /// What each thread holds of the source: bytes, f32, codes and what they decode to.
    panels: u64,
}

impl Sizes {
    fn of(plan: &Plan, info: &LinearInfo, scheme: &Scheme) -> Self {
        let (format, weights) = (&scheme.format, (info.rows * info.cols) as u64);
        let blocks = format.blocks().count(info.rows, info.cols) as u64;
        let zeros = if format.has_zero() { blocks } else { 0 };
        let scale = format.scale().map_or(0, |scale| scale.code.unit_bytes() as u64);
        let unit = code_unit(format) as u64;
        let panel = PANEL.max(info.cols) as u64;
        let threads = (plan.options.threads as u64).min(weights.div_ceil(panel)).max(1);
        Sizes {
            codes: weights * unit,
            scales: blocks * scale + zeros * 4,
            stored: format.total_bits(info.rows, info.cols).div_ceil(8),
            blocks,
            zeros,
            panels: threads * panel.min(weights) * (4 + 2 + unit + 1),
        }
    }
}

fn quantizing(plan: &Plan, info: &LinearInfo, scheme: &Scheme) -> Stage {
    let sizes = Sizes::of(plan, info, scheme);
    let mut buffers =
        vec![("codes", sizes.codes), ("scales", sizes.scales), ("packed tensors", sizes.stored)];
    if !rtn::in_panels(scheme) {
        // The source in f32, and its decoded rows.
        buffers.push(("values", 4 * (info.rows * info.cols + info.cols) as u64));
    }
    with_holes(plan, format!("quantize {}", info.module), buffers, sizes.panels)
}

fn verifying(plan: &Plan, info: &LinearInfo, scheme: &Scheme) -> Stage {
    let sizes = Sizes::of(plan, info, scheme);
    let buffers = vec![
        ("codes of the ordinary reader", sizes.codes),
        ("scales of the ordinary reader", sizes.scales),
        ("packed tensors of the independent reader", sizes.stored),
        ("scales of the independent reader", 4 * (sizes.blocks + sizes.zeros)),
    ];
    with_holes(plan, format!("verify {}", info.module), buffers, sizes.panels)
}

fn with_holes(plan: &Plan, name: String, mut buffers: Vec<(&'static str, u64)>, panels: u64) -> Stage {
    // Buffers of a size that no layer had before are mapped by themselves, which leaves no holes.
    let sizes: std::collections::BTreeSet<_> =
        plan.quantized().map(|(info, _)| info.rows * info.cols).collect();
    let repeated = plan.quantized().count() > 2 * sizes.len();
    let from_heap: u64 = buffers.iter().map(|(_, bytes)| *bytes).filter(|&bytes| bytes <= HEAP_BLOCK).sum();
    if repeated {
        buffers.push(("holes of the heap", (from_heap as f64 * HOLES) as u64));
    }
    buffers.push(("panels of all threads", panels));
    Stage { name, buffers }
}

/// The second of two models, decoded to f32; the first is smaller and gone by then. A table that is not quantized passes
/// through its stored bytes, its bytes as f32 and its values before it is kept.
fn comparing_logits(plan: &Plan) -> Stage {
    let linears: u64 = plan.config.linears().iter().map(|info| (info.rows * info.cols) as u64 * 4).sum();
    let table = plan.config.vocab_size as u64 * plan.config.hidden_size as u64;
    let stored = |meta: &&TensorMeta| meta.numel() == table;
    let stored = plan.copied.iter().filter(stored).map(|meta| meta.len).max().unwrap_or(0);
    let passing = stored + 8 * table;
    let kept = if plan.config.tie_word_embeddings { linears } else { linears + 4 * table };
    let buffers = if plan.config.tie_word_embeddings && passing > 4 * table + linears {
        vec![("embedding as it is read", passing)]
    } else if plan.config.tie_word_embeddings {
        vec![("embedding", 4 * table), ("linear layers", linears)]
    } else {
        vec![("linear layers and embedding", kept), ("head as it is read", passing)]
    };
    let model: u64 = buffers.iter().map(|(_, bytes)| bytes).sum();
    let holes = ("holes of the heap", (model as f64 * HOLES_OF_MODEL) as u64);
    Stage { name: "compare logits".to_owned(), buffers: buffers.into_iter().chain([holes]).collect() }
}
