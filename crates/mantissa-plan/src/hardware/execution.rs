//! What a device does with a format: the unit that multiplies it, and the fallback where it has none.

use mantissa_num::format::{Affine, Format};
use mantissa_num::{Code, minifloat};
use serde::Serialize;

use super::device::{Device, Maker, Unit};

/// Way in which a device multiplies weights of one format with inputs of another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Execution {
    /// Unit of the product.
    pub unit: Unit,
    /// Name and reason of the fallback, if the device has no instruction for the operands.
    pub fallback: Option<String>,
    /// Caveat, such as an encoding that is converted.
    pub note: Option<&'static str>,
}

impl Execution {
    fn native(unit: Unit) -> Self {
        Execution { unit, fallback: None, note: None }
    }
}

/// Returns the element's code, if the format has elements.
fn code(format: &Format) -> Option<Code> {
    match format {
        Format::Affine(Affine { code, .. }) => Some(*code),
        _ => None,
    }
}

/// Returns the unit that multiplies inputs of this format.
fn unit_of(format: &Format) -> Option<Unit> {
    match code(format)? {
        Code::Int(bits) if bits <= 4 => Some(Unit::Int4),
        Code::Int(_) | Code::Fixed64 => Some(Unit::Int8),
        Code::Float(float) if float == minifloat::E2M1 => Some(Unit::Fp4),
        Code::Float(float) if float.bits() == 6 => Some(Unit::Fp6),
        Code::Float(float) if float.bits() == 8 => Some(Unit::Fp8),
        _ => None,
    }
}

impl Device {
    /// Says how the device multiplies `weights` with `inputs` (`None`: unquantized).
    ///
    /// Weights with unquantized inputs are decoded in registers and multiplied in 16 bits: they save memory and
    /// bandwidth, never operations.
    pub fn execute(&self, weights: &Format, inputs: Option<&Format>) -> Execution {
        if self.maker == Maker::Cpu {
            return self.on_processor(weights, inputs);
        }
        let Some(inputs) = inputs else {
            let wide = self.half();
            let fallback = (code(weights) == Some(Code::Float(minifloat::BF16)) && wide != Unit::Bf16)
                .then(|| format!("converted to {wide}: {} has no bf16 instructions", self.title));
            return Execution { fallback, ..Execution::native(wide) };
        };
        let Some(unit) = unit_of(inputs) else { return Execution::native(self.half()) };
        let blocks = inputs.scale().is_some_and(|scale| scale.code == Code::E8m0);
        let two_levels = unit == Unit::Fp4 && !blocks;
        let lacking = match () {
            () if self.rate(unit).is_none() => Some(format!("no {unit} instructions")),
            () if blocks && !self.block_scales => Some("no instructions with block scales".to_owned()),
            () if two_levels && !self.nvfp4 => Some("no instructions with NVFP4's scales".to_owned()),
            () => None,
        };
        if let Some(lacking) = lacking {
            let wide = self.half();
            let bits = weights.code_bits();
            let fallback = format!(
                "runs as W{bits}A16: weights decoded in registers, inputs left in {wide} ({} has {lacking})",
                self.title
            );
            return Execution { fallback: Some(fallback), ..Execution::native(wide) };
        }
        let half = self.rate(self.half()).unwrap_or(0.0);
        let note = match unit {
            Unit::Fp8 if self.fnuz => Some("codes are converted to fnuz, which mean half as much"),
            _ if self.rate(unit).is_some_and(|rate| rate < half) => {
                Some("the instructions exist, but are slower than those of 16 bits")
            }
            _ => None,
        };
        Execution { note, ..Execution::native(unit) }
    }

    /// Says how mantissa's kernels multiply (docs/explain/performance.md, "Weights"): integers and tables of 16 levels as
    /// 8-bit integers, 8-bit and wider floats as bf16.
    fn on_processor(&self, weights: &Format, _inputs: Option<&Format>) -> Execution {
        let wide = match code(weights) {
            Some(Code::Float(float)) => float.bits() >= 8,
            Some(Code::F32 | Code::F64 | Code::Tf32) => true,
            _ => false,
        };
        let unit = if wide { Unit::Bf16 } else { Unit::Int8 };
        match self.rate(unit) {
            Some(_) => Execution::native(unit),
            None => {
                let fallback = format!("multiplied in f32: the processor has no {unit} dot products");
                Execution { fallback: Some(fallback), ..Execution::native(Unit::F32) }
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use mantissa_num::{parse_activation, parse_weight};

    fn execution(device: &str, weights: &str, inputs: Option<&str>) -> Execution {
        let inputs = inputs.map(|inputs| parse_activation(inputs).unwrap().format);
        let weights = parse_weight(weights).unwrap().format;
        Device::named(device).unwrap().execute(&weights, inputs.as_ref())
    }

    #[test]
    fn formats_without_instructions_name_their_fallback() {
        let fp8 = |device| execution(device, "fp8-e4m3-channel", Some("fp8-e4m3-token"));
        assert!(fp8("a100").fallback.unwrap().starts_with("runs as W8A16"));
        for device in ["rtx4090", "l40s", "h100", "b200", "mi300x"] {
            assert_eq!((fp8(device).unit, fp8(device).fallback), (Unit::Fp8, None), "{device}");
        }
        assert!(fp8("mi300x").note.unwrap().contains("fnuz"));
        let fp4 = |device| execution(device, "nvfp4", Some("nvfp4"));
        assert!(fp4("h100").fallback.unwrap().starts_with("runs as W4A16"));
        assert!(fp4("mi355x").fallback.unwrap().contains("NVFP4's scales"));
        assert_eq!((fp4("b200").unit, fp4("b200").fallback), (Unit::Fp4, None));
        assert_eq!(execution("mi355x", "mxfp4", Some("mxfp4")).unit, Unit::Fp4);
        let int8 = |device| execution(device, "int8-channel", Some("int8-token"));
        assert!(int8("v100").fallback.is_some() && int8("b300").note.unwrap().contains("slower"));
        assert_eq!(execution("h100", "int4-g128", None), Execution::native(Unit::Bf16));
        assert!(execution("t4", "bf16", None).fallback.unwrap().contains("f16"));
    }
}
