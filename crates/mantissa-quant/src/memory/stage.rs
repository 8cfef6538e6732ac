//! Stage of a run, and the sizes that the buffers of its stages follow from.

use mantissa_methods::method::Extent;
use mantissa_model::{LinearInfo, LinearInput};
use mantissa_num::{Blocks, Scheme, code_unit};

use crate::calibrate::{Calibration, CalibrationSet};
use crate::plan::Plan;
use crate::sequential::{reads_last, uses_drift};
use crate::source::PANEL;

/// Largest block of glibc's heap. Larger blocks are returned to the system when freed. Smaller ones leave holes once
/// blocks of other sizes were freed.
const HEAP_BLOCK: u64 = 32 << 20;

/// Share of the heap's blocks that holes add when layers of several sizes alternate; measured, mostly nothing,
/// sometimes a fifth, depending on the order in which threads free.
const HOLES: f64 = 0.06;

/// Share that holes add when statistics, factors and weights of several sizes alternate with states that stay;
/// measured.
const HOLES_OF_CALIBRATION: f64 = 0.18;

/// A stage of a run and its buffers at the peak.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stage {
    /// Name, for example `quantize model.layers.0.mlp.up_proj`.
    pub name: String,
    /// Buffers with their bytes.
    pub buffers: Vec<(&'static str, u64)>,
}

impl Stage {
    /// Returns the bytes of all buffers.
    pub fn bytes(&self) -> u64 {
        self.buffers.iter().fold(0, |sum, (_, bytes)| sum.saturating_add(*bytes))
    }
}

pub(super) fn with_holes(plan: &Plan, name: String, buffers: Vec<(&'static str, u64)>, panels: u64) -> Stage {
    // The first buffers of each size are mapped separately, which leaves no holes; repeated sizes come from the heap.
    let sizes: std::collections::BTreeSet<_> =
        plan.quantized().map(|(info, _)| info.rows * info.cols).collect();
    let repeated = plan.quantized().count() > 2 * sizes.len();
    let mut stage = Stage { name, buffers };
    if repeated {
        let holes = (from_heap(&stage) as f64 * HOLES) as u64;
        stage.buffers.push(("holes of the heap", holes));
    }
    stage.buffers.push(("panels of all threads", panels));
    stage
}

pub(super) fn with_holes_of_calibration(name: String, buffers: Vec<(&'static str, u64)>) -> Stage {
    let mut stage = Stage { name, buffers };
    let holes = (from_heap(&stage) as f64 * HOLES_OF_CALIBRATION) as u64;
    stage.buffers.push(("holes of the heap", holes));
    stage
}

/// Returns the bytes of a stage's buffers that come from the heap.
pub(super) fn from_heap(stage: &Stage) -> u64 {
    stage.buffers.iter().map(|(_, bytes)| *bytes).filter(|&bytes| bytes <= HEAP_BLOCK).sum()
}

/// Sizes of a layer and of its quantized tensors, in bytes.
pub(super) struct Sizes {
    /// One unit per code.
    pub(super) codes: u64,
    /// Stored block scales, and zero points as i32.
    pub(super) scales: u64,
    /// Output tensors.
    pub(super) stored: u64,
    pub(super) blocks: u64,
    pub(super) zeros: u64,
    /// Panels of all threads: bytes, f32, codes and dequantized values.
    pub(super) panels: u64,
}

impl Sizes {
    pub(super) fn of(plan: &Plan, info: &LinearInfo, scheme: &Scheme) -> Self {
        let (format, weights) = (&scheme.format, (info.rows * info.cols) as u64);
        let blocks = format.blocks().count(info.rows, info.cols) as u64;
        let zeros = if format.has_zero() { blocks } else { 0 };
        let scale = format.scale().map_or(0, |scale| scale.code.unit_bytes() as u64);
        let unit = code_unit(format) as u64;
        let panel = PANEL.max(info.cols) as u64;
        let threads = (plan.options.threads as u64).min(weights.div_ceil(panel)).max(1);
        let stored = plan.bits(info, scheme).div_ceil(8);
        Sizes {
            codes: if format.codec().is_some() || format.trellis().is_some() {
                stored
            } else {
                weights * unit
            },
            scales: blocks * scale + zeros * 4,
            stored,
            blocks,
            zeros,
            panels: threads * panel.min(weights) * (4 + 2 + unit + 1),
        }
    }

    /// Returns the size of the layer's problem, for the method.
    pub(super) fn extent<'a>(&self, plan: &Plan, info: &LinearInfo, scheme: &'a Scheme) -> Extent<'a> {
        let (rows, cols) = (info.rows, info.cols);
        Extent {
            scheme,
            rows,
            cols,
            group: match scheme.format.blocks() {
                Blocks::Group(group) | Blocks::Flat(group) => group as usize,
                _ => cols,
            },
            codes: self.codes,
            scales: self.scales,
            inputs: 1,
            held_out: !plan.options.held_out.is_empty(),
            drift: uses_drift(plan, info),
            last: reads_last(plan, info),
            threads: plan.options.threads,
        }
    }
}

/// Memory of formats that store a weight transposed: codes and words in both orders.
pub(super) fn transposed(plan: &Plan, sizes: &Sizes) -> u64 {
    if plan.container.facts().transposed { 2 * sizes.codes + sizes.stored } else { 0 }
}

/// Bytes of the calibration states, including held-out windows.
pub(super) fn states(plan: &Plan, set: &CalibrationSet) -> u64 {
    let of = |set: &CalibrationSet| Calibration::state_bytes(&plan.config, set, plan.limits().states);
    of(set).saturating_add(plan.held_out().as_ref().map_or(0, of))
}

/// Bytes of the states kept inside a layer, including held-out windows.
pub(super) fn kept(plan: &Plan, set: &CalibrationSet) -> u64 {
    let of = |set: &CalibrationSet| Calibration::kept_bytes(&plan.config, set, plan.limits().states);
    of(set).saturating_add(plan.held_out().as_ref().map_or(0, of))
}

/// Bytes of the rounded matmul operands of all threads; an upper bound for Hessians.
pub(super) fn factors(plan: &Plan, set: &CalibrationSet) -> u64 {
    let inputs = LinearInput::PLAIN.iter().chain(&[LinearInput::Mixed]);
    let widths = inputs.map(|&input| plan.config.input_width(input));
    let thread_bytes = plan.options.products.bytes_needed(set.longest(), widths.max().unwrap_or(0));
    thread_bytes * plan.options.threads.clamp(1, set.windows.len().max(1)) as u64
}
