//! The kernel that runs a layer, for reports.

use mantissa_kernels::device::PackedWeight;
use mantissa_kernels::packed::{FloatCode, PackedLevel, ScaleCode};

use super::{Prepared, PreparedLinear};

/// Kernel of a layer.
#[derive(Clone, Debug, PartialEq)]
pub struct KernelChoice {
    /// Module name.
    pub module: String,
    /// Format of the stored weight.
    pub format: String,
    /// Kernel for one token.
    pub kernel: String,
    /// Kernel for many tokens.
    pub prefill: String,
    /// Bytes that a pass over one token reads.
    pub bytes: u64,
    /// Reason why the layer runs without a kernel of its own, or what a kernel changes.
    pub reason: Option<String>,
}

impl KernelChoice {
    pub(super) fn of(linear: &PreparedLinear) -> Self {
        let level = PackedLevel::best().name();
        let (kernel, prefill, mut reason) = match &linear.weight {
            Prepared::Packed(PackedWeight::Integers(panels)) => {
                let format = panels.format();
                let codes = match format.levels {
                    Some(_) => format!("{}-bit table", format.bits),
                    None => format!("{}-bit", format.bits),
                };
                let scales = if format.mins == ScaleCode::Absent { "" } else { " with minima" };
                let per = if format.unit >= linear.cols {
                    "token".to_owned()
                } else {
                    format!("{} columns", format.unit)
                };
                let kernel = format!("{codes}{scales} × int8 per {per} ({level})");
                let prefill = match format.bits {
                    8 => kernel.clone(),
                    _ => format!("expanded to 8 bits × int8 per {per} ({level})"),
                };
                (kernel, prefill, None)
            }
            Prepared::Packed(PackedWeight::Floats(rows)) => {
                let code = match rows.code() {
                    FloatCode::F32 => "f32".to_owned(),
                    FloatCode::F16 => "f16".to_owned(),
                    FloatCode::Bf16 => "bf16".to_owned(),
                    FloatCode::Mini { bits, .. } => format!("{bits}-bit float"),
                };
                let input = if rows.in_bf16() { "bf16" } else { "f32" };
                let kernel = format!("{code} × {input} ({level})");
                (kernel.clone(), kernel, None)
            }
            Prepared::Stored(_, reason) => {
                let strips = "strips dequantized to f32".to_owned();
                (strips.clone(), strips, Some((*reason).to_owned()))
            }
        };
        let ranks: Vec<_> = linear.low_rank().map(|(rank, _)| format!(" + rank {rank}")).collect();
        if reason.is_none() && ranks.is_empty() && !linear.transforms.is_empty() {
            reason = Some("transforms of the input or output run outside of the kernel".into());
        }
        let (module, format) = (linear.module.clone(), linear.stored.clone() + &ranks.concat());
        KernelChoice { module, format, kernel, prefill, bytes: linear.bytes(), reason }
    }
}
