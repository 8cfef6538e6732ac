//! Native matmul support of hardware per format, without decoding to a wider format in registers first.
//!
//! Each entry names its source. "SM" is NVIDIA's compute capability: 7.5 Turing, 8.0 Ampere, 8.9 Ada, 9.0
//! Hopper, 10.x data-center Blackwell, 12.x consumer Blackwell.

use mantissa_num::Code;
use mantissa_num::format::{Affine, Format, ScaleTree};
use mantissa_num::minifloat::{BF16, E4M3_FNUZ, E5M2_FNUZ, F16};

// Vector units everywhere; of matrix units, AMD CDNA has f32 MFMA (CDNA 3 ISA, V_MFMA_F32_*_F32), while NVIDIA's mma takes
// f32 registers only as TF32, 10 bits of mantissa (PTX ISA, mma .tf32, sm_80).
const F32_UNITS: &str = "every CPU and GPU; matrix units: AMD CDNA, NVIDIA SM 8.0+ only as TF32";

// PTX ISA mma .tf32 (sm_80), tcgen05.mma kind::tf32 (sm_100); CDNA 3 ISA, V_MFMA_F32_*_XF32, which CDNA 4 dropped.
const TF32_UNITS: &str = "NVIDIA SM 8.0+, AMD MI300 (CDNA 3, as xf32); not AMD MI350";

// PTX ISA mma .f64 (sm_80): full rate on A100, H100 and B200, 1.3 TFLOP/s on B300 (HGX table), a 64th of f32 on consumer GPUs;
// CDNA 2 ISA, V_MFMA_F64_*.
const F64_UNITS: &str = "every CPU; matrix units: NVIDIA A100, H100, B200 (B300 and consumer GPUs: about 1/30 and 1/64), AMD CDNA 2+";

// PTX ISA mma .f16 (sm_70); CDNA ISA MFMA F16; Intel AVX-512 FP16 (Sapphire Rapids) and AMX-FP16 (Granite Rapids); Armv8.2-FP16.
const F16_UNITS: &str = "NVIDIA SM 7.0+, AMD CDNA and RDNA 3+, x86 AVX-512 FP16 and AMX-FP16, Arm FP16";

// PTX ISA mma .bf16 (sm_80); CDNA ISA MFMA BF16; Intel AVX-512 BF16 (Cooper Lake, Zen 4) and AMX-BF16 (Sapphire Rapids); Armv8.6-BF16.
const BF16_UNITS: &str = "NVIDIA SM 8.0+, AMD CDNA and RDNA 3+, x86 AVX-512 BF16 and AMX-BF16, Arm BF16";

// PTX ISA mma .e4m3/.e5m2 (sm_89: Ada too, not Hopper alone); OCP encodings on AMD from CDNA 4 (MI350) and RDNA 4 (CDNA 4 and
// RDNA 4 ISA guides); MI300 reads the same bits as fnuz, at half the value.
const FP8_UNITS: &str =
    "NVIDIA SM 8.9+ (Ada, Hopper, Blackwell), AMD MI350 and RDNA 4; not AMD MI300, whose FP8 is fnuz";

// CDNA 3 ISA, V_MFMA_*_FP8/BF8: bias 8 and 16, NaN is the code of -0.
const FNUZ_UNITS: &str = "AMD MI300 (CDNA 3)";

// PTX ISA tcgen05.mma kind::f8f6f4 (sm_100) and mma kind::f8f6f4 (sm_120): operands of 8, 6 and 4 bits at the FP8 rate; CDNA 4 ISA
// V_MFMA_F32_*_F8F6F4.
const FP6_FP4_UNITS: &str = "NVIDIA SM 10.x and 12.x (at the FP8 rate), AMD MI350";

// PTX ISA tcgen05.mma kind::mxf8f6f4 and kind::mxf4 with scale_vec::1X/2X (sm_100), mma .block_scale (sm_120); CDNA 4 ISA
// V_MFMA_SCALE_F32_*_F8F6F4.
const MX_UNITS: &str = "NVIDIA SM 10.x and 12.x (block-scaled MMA), AMD MI350 (scaled MFMA)";

// PTX ISA kind::mxf4nvf4 with ue4m3 scales, scale_vec::4X (sm_100, sm_120). CDNA 4's scaled MFMA takes E8M0 scales only.
const NVFP4_UNITS: &str = "NVIDIA SM 10.x and 12.x (block-scaled MMA)";

// PTX ISA mma .s8 (sm_75 for the shapes in use) up to tcgen05 kind::i8 (sm_100); B300 (SM 10.3) keeps about a thirtieth of B200's
// rate (HGX B300 table: 2 POPS sparse for eight). CDNA ISA MFMA I8; Intel AVX-512 VNNI, AVX-VNNI, AMX-INT8; Armv8.2 DotProd, Armv8.6 I8MM.
const INT8_UNITS: &str = "NVIDIA SM 7.5+ (B300: about 1/30 of B200's rate), AMD CDNA and RDNA 3+, x86 VNNI and AMX-INT8, Arm DotProd and I8MM";

// PTX ISA mma .s4 (sm_75, sm_80, sm_89; A100 1248 TOPS dense). Hopper's wgmma and Blackwell's tcgen05 have no 4-bit integers.
const INT4_UNITS: &str =
    "NVIDIA SM 7.5 to 8.9 (Turing, Ampere, Ada); not Hopper or Blackwell, where it is decoded in registers";

// No matrix unit takes these codes; kernels decode them to bf16, f16 or int8 first.
const NONE: &str = "software (decoded in registers)";

/// Returns the hardware with native support of `format`.
pub fn native(format: &Format) -> &'static str {
    let Format::Affine(Affine { code, scale, .. }) = format else { return NONE };
    match (code, scale) {
        (Code::Float(_), Some(ScaleTree { code: Code::E8m0, .. })) => MX_UNITS,
        (Code::Float(_), Some(ScaleTree { outer: Some(_), .. })) => NVFP4_UNITS,
        (Code::F32, _) => F32_UNITS,
        (Code::Tf32, _) => TF32_UNITS,
        (Code::F64, _) => F64_UNITS,
        (Code::Float(f), _) if *f == F16 => F16_UNITS,
        (Code::Float(f), _) if *f == BF16 => BF16_UNITS,
        (Code::Float(f), _) if [E4M3_FNUZ, E5M2_FNUZ].contains(f) => FNUZ_UNITS,
        (Code::Float(f), _) if f.bits() == 8 => FP8_UNITS,
        (Code::Float(_), _) => FP6_FP4_UNITS,
        (Code::Int(8), _) => INT8_UNITS,
        (Code::Int(4), _) => INT4_UNITS,
        _ => NONE,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use mantissa_num::Scheme;

    #[test]
    fn formats_find_their_units() {
        let cases = [
            ("int4-g128", INT4_UNITS),
            ("int3-g32", NONE),
            ("mxint8", NONE),
            ("nf4", NONE),
            ("mxfp6-e3m2", MX_UNITS),
            ("nvfp4:te", NVFP4_UNITS),
            ("fp8-e4m3-t128x128", FP8_UNITS),
            ("fp8-e5m2fnuz", FNUZ_UNITS),
            ("fp4-e2m1", FP6_FP4_UNITS),
            ("tf32", TF32_UNITS),
            ("f64", F64_UNITS),
            ("f32", F32_UNITS),
        ];
        for (name, units) in cases {
            assert_eq!(native(&name.parse::<Scheme>().unwrap().format), units, "{name}");
        }
    }
}
