//! GeForce cards of NVIDIA.

use super::device::Unit;
use super::device::Unit::{Bf16, F16, F32, Fp4, Fp6, Fp8, Int4, Int8, Tf32};
use super::spec::{NVIDIA, Spec};

/// Source of a card that no whitepaper lists.
const CARD: &str = "NVIDIA's specifications of the card (cores, boost clock, memory); rates per SM and clock of the whitepaper of its generation, which give the AI TOPS that NVIDIA states";

/// Caveat of Ampere.
const SUMS_AMPERE: &str = "no FP8; f16 with sums in f32; twice as fast with sums in f16";

/// Caveat of Ada and Blackwell.
const SUMS_FP8: &str = "FP8 with sums in f32; int8 is twice as fast";

/// Rate of the 128 FMA units of each of `sms` multiprocessors at `ghz`, 10^12 operations per second.
const fn cores(sms: f64, ghz: f64) -> f64 {
    sms * ghz * 0.256
}

/// Dense rates of `sms` multiprocessors of GA10x at `ghz`: 128 FMA units, and of matrix units 256 FMA in bf16 with sums in f32
/// for each clock (GA102 whitepaper v2, table 3).
const fn ampere(sms: f64, ghz: f64) -> [(Unit, f64); 6] {
    let clock = cores(sms, ghz);
    [
        (F32, clock),
        (Tf32, clock),
        (F16, 2.0 * clock),
        (Bf16, 2.0 * clock),
        (Int8, 8.0 * clock),
        (Int4, 16.0 * clock),
    ]
}

/// Dense rates of `sms` multiprocessors of Ada at `ghz`: those of Ampere, and FP8 with sums in f32 at twice the rate of bf16.
const fn ada(sms: f64, ghz: f64) -> [(Unit, f64); 7] {
    let clock = cores(sms, ghz);
    [
        (F32, clock),
        (Tf32, clock),
        (F16, 2.0 * clock),
        (Bf16, 2.0 * clock),
        (Fp8, 4.0 * clock),
        (Int8, 8.0 * clock),
        (Int4, 16.0 * clock),
    ]
}

/// Dense rates of `sms` multiprocessors of RTX Blackwell at `ghz`: those of Ada without 4-bit integers, and FP4.
const fn blackwell(sms: f64, ghz: f64) -> [(Unit, f64); 8] {
    let clock = cores(sms, ghz);
    [
        (F32, clock),
        (Tf32, clock),
        (F16, 2.0 * clock),
        (Bf16, 2.0 * clock),
        (Fp8, 4.0 * clock),
        (Fp6, 4.0 * clock),
        (Fp4, 16.0 * clock),
        (Int8, 8.0 * clock),
    ]
}

/// Every card with figures, by generation.
pub(super) const ROWS: &[Spec] = &[
    Spec {
        name: "rtx3060",
        aliases: &["rtx3060-12gb"],
        title: "RTX 3060 12 GB",
        sm: Some(86),
        memory: 12.0,
        bandwidth: 0.360,
        link: 32.0,
        rates: &ampere(28.0, 1.777),
        note: SUMS_AMPERE,
        source: CARD,
        ..NVIDIA
    },
    Spec {
        name: "rtx3060ti",
        title: "RTX 3060 Ti",
        sm: Some(86),
        memory: 8.0,
        bandwidth: 0.448,
        link: 32.0,
        rates: &ampere(38.0, 1.665),
        note: SUMS_AMPERE,
        source: CARD,
        ..NVIDIA
    },
    Spec {
        name: "rtx3070",
        title: "RTX 3070",
        sm: Some(86),
        memory: 8.0,
        bandwidth: 0.448,
        link: 32.0,
        rates: &ampere(46.0, 1.725),
        note: SUMS_AMPERE,
        source: "NVIDIA GA102 whitepaper v2, appendix A",
        ..NVIDIA
    },
    Spec {
        name: "rtx3080",
        aliases: &["rtx3080-10gb"],
        title: "RTX 3080 10 GB",
        sm: Some(86),
        memory: 10.0,
        bandwidth: 0.760,
        link: 32.0,
        rates: &ampere(68.0, 1.710),
        note: SUMS_AMPERE,
        source: "NVIDIA GA102 whitepaper v2, table 2",
        ..NVIDIA
    },
    Spec {
        name: "rtx3090",
        title: "RTX 3090",
        sm: Some(86),
        memory: 24.0,
        bandwidth: 0.936,
        link: 56.25,
        rates: &[(F32, 35.6), (Tf32, 35.6), (F16, 71.0), (Bf16, 71.0), (Int8, 284.0), (Int4, 568.0)],
        note: "f16 with sums in f32; twice as fast with sums in f16; the link is an NVLink bridge of two, without it PCIe 4 (32 GB/s)",
        source: "NVIDIA GA102 whitepaper v2, table 9; third-generation NVLink, 4 links: 112.5 GB/s in both directions",
        ..NVIDIA
    },
    Spec {
        name: "rtx4060",
        title: "RTX 4060",
        sm: Some(89),
        memory: 8.0,
        bandwidth: 0.272,
        link: 16.0,
        rates: &ada(24.0, 2.460),
        note: SUMS_FP8,
        source: CARD,
        ..NVIDIA
    },
    Spec {
        name: "rtx4060ti",
        aliases: &["rtx4060ti-8gb"],
        title: "RTX 4060 Ti 8 GB",
        sm: Some(89),
        memory: 8.0,
        bandwidth: 0.288,
        link: 16.0,
        rates: &ada(34.0, 2.535),
        note: SUMS_FP8,
        source: CARD,
        ..NVIDIA
    },
    Spec {
        name: "rtx4060ti-16gb",
        title: "RTX 4060 Ti 16 GB",
        sm: Some(89),
        memory: 16.0,
        bandwidth: 0.288,
        link: 16.0,
        rates: &ada(34.0, 2.535),
        note: SUMS_FP8,
        source: CARD,
        ..NVIDIA
    },
    Spec {
        name: "rtx4070",
        title: "RTX 4070",
        sm: Some(89),
        memory: 12.0,
        bandwidth: 0.504,
        link: 32.0,
        rates: &ada(46.0, 2.475),
        note: SUMS_FP8,
        source: CARD,
        ..NVIDIA
    },
    Spec {
        name: "rtx4070super",
        title: "RTX 4070 SUPER",
        sm: Some(89),
        memory: 12.0,
        bandwidth: 0.504,
        link: 32.0,
        rates: &ada(56.0, 2.475),
        note: SUMS_FP8,
        source: CARD,
        ..NVIDIA
    },
    Spec {
        name: "rtx4070ti",
        title: "RTX 4070 Ti",
        sm: Some(89),
        memory: 12.0,
        bandwidth: 0.504,
        link: 32.0,
        rates: &ada(60.0, 2.610),
        note: SUMS_FP8,
        source: CARD,
        ..NVIDIA
    },
    Spec {
        name: "rtx4070tisuper",
        title: "RTX 4070 Ti SUPER",
        sm: Some(89),
        memory: 16.0,
        bandwidth: 0.672,
        link: 32.0,
        rates: &ada(66.0, 2.610),
        note: SUMS_FP8,
        source: CARD,
        ..NVIDIA
    },
    Spec {
        name: "rtx4080",
        title: "RTX 4080",
        sm: Some(89),
        memory: 16.0,
        bandwidth: 0.7168,
        link: 32.0,
        rates: &[
            (F32, 48.7),
            (Tf32, 48.7),
            (F16, 97.5),
            (Bf16, 97.5),
            (Fp8, 194.9),
            (Int8, 389.9),
            (Int4, 779.8),
        ],
        note: SUMS_FP8,
        source: "NVIDIA Ada GPU architecture whitepaper v2, appendix A; llmq src/utilities/sol.cpp",
        ..NVIDIA
    },
    Spec {
        name: "rtx4090",
        title: "RTX 4090",
        sm: Some(89),
        memory: 24.0,
        bandwidth: 1.008,
        link: 32.0,
        rates: &[
            (F32, 82.6),
            (Tf32, 82.6),
            (F16, 165.2),
            (Bf16, 165.2),
            (Fp8, 330.3),
            (Int8, 660.6),
            (Int4, 1321.2),
        ],
        note: SUMS_FP8,
        source: "NVIDIA Ada GPU architecture whitepaper v2, appendix A; llmq src/utilities/sol.cpp",
        ..NVIDIA
    },
    Spec {
        name: "rtx5060",
        title: "RTX 5060",
        sm: Some(120),
        memory: 8.0,
        bandwidth: 0.448,
        link: 32.0,
        rates: &blackwell(30.0, 2.497),
        note: SUMS_FP8,
        source: CARD,
        ..NVIDIA
    },
    Spec {
        name: "rtx5060ti",
        aliases: &["rtx5060ti-16gb"],
        title: "RTX 5060 Ti 16 GB",
        sm: Some(120),
        memory: 16.0,
        bandwidth: 0.448,
        link: 32.0,
        rates: &blackwell(36.0, 2.572),
        note: SUMS_FP8,
        source: CARD,
        ..NVIDIA
    },
    Spec {
        name: "rtx5060ti-8gb",
        title: "RTX 5060 Ti 8 GB",
        sm: Some(120),
        memory: 8.0,
        bandwidth: 0.448,
        link: 32.0,
        rates: &blackwell(36.0, 2.572),
        note: SUMS_FP8,
        source: CARD,
        ..NVIDIA
    },
    Spec {
        name: "rtx5070",
        title: "RTX 5070",
        sm: Some(120),
        memory: 12.0,
        bandwidth: 0.672,
        link: 64.0,
        rates: &blackwell(48.0, 2.512),
        note: SUMS_FP8,
        source: CARD,
        ..NVIDIA
    },
    Spec {
        name: "rtx5070ti",
        title: "RTX 5070 Ti",
        sm: Some(120),
        memory: 16.0,
        bandwidth: 0.896,
        link: 64.0,
        rates: &[
            (F32, 43.9),
            (Tf32, 43.9),
            (F16, 87.9),
            (Bf16, 87.9),
            (Fp8, 175.8),
            (Fp6, 175.8),
            (Fp4, 703.0),
            (Int8, 351.5),
        ],
        note: SUMS_FP8,
        source: "NVIDIA RTX Blackwell GPU architecture whitepaper v1.1; llmq src/utilities/sol.cpp",
        ..NVIDIA
    },
    Spec {
        name: "rtx5080",
        title: "RTX 5080",
        sm: Some(120),
        memory: 16.0,
        bandwidth: 0.960,
        link: 64.0,
        rates: &[
            (F32, 56.3),
            (Tf32, 56.3),
            (F16, 112.6),
            (Bf16, 112.6),
            (Fp8, 225.1),
            (Fp6, 225.1),
            (Fp4, 900.4),
            (Int8, 450.2),
        ],
        note: SUMS_FP8,
        source: "NVIDIA RTX Blackwell GPU architecture whitepaper v1.1; llmq src/utilities/sol.cpp",
        ..NVIDIA
    },
    Spec {
        name: "rtx5090",
        title: "RTX 5090",
        sm: Some(120),
        memory: 32.0,
        bandwidth: 1.792,
        link: 64.0,
        rates: &[
            (F32, 104.8),
            (Tf32, 104.8),
            (F16, 209.5),
            (Bf16, 209.5),
            (Fp8, 419.0),
            (Fp6, 419.0),
            (Fp4, 1676.0),
            (Int8, 838.0),
        ],
        note: SUMS_FP8,
        source: "NVIDIA RTX Blackwell GPU architecture whitepaper v1.1, appendix A; llmq src/utilities/sol.cpp",
        ..NVIDIA
    },
];

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::device::Device;
    use super::*;

    /// AI TOPS that NVIDIA states: dense int8 of Ampere, sparse (twice dense) int8 of Ada and FP4 of Blackwell.
    #[test]
    fn rates_give_the_stated_ai_tops() {
        for (name, unit, sparse, tops) in [
            ("rtx3060", Int8, 1.0, 102.0),
            ("rtx3060ti", Int8, 1.0, 130.0),
            ("rtx3070", Int8, 1.0, 163.0),
            ("rtx3080", Int8, 1.0, 238.0),
            ("rtx4060", Int8, 2.0, 242.0),
            ("rtx4060ti", Int8, 2.0, 353.0),
            ("rtx4070", Int8, 2.0, 466.0),
            ("rtx4070super", Int8, 2.0, 568.0),
            ("rtx4070ti", Int8, 2.0, 641.0),
            ("rtx4070tisuper", Int8, 2.0, 706.0),
            ("rtx4080", Int8, 2.0, 780.0),
            ("rtx4090", Int8, 2.0, 1321.0),
            ("rtx5060", Fp4, 2.0, 614.0),
            ("rtx5060ti", Fp4, 2.0, 759.0),
            ("rtx5070", Fp4, 2.0, 988.0),
            ("rtx5070ti", Fp4, 2.0, 1406.0),
            ("rtx5080", Fp4, 2.0, 1801.0),
        ] {
            let rate = Device::named(name).unwrap().rate(unit).unwrap() * sparse / 1e12;
            assert!((rate - tops).abs() <= 0.6, "{name}: {rate} for {tops}");
        }
    }

    /// Listed by hand in whitepapers and derived: the same.
    #[test]
    fn rates_per_multiprocessor_are_those_of_the_whitepapers() {
        let close = |name: &str, derived: &[(Unit, f64)]| {
            let device = Device::named(name).unwrap();
            for (unit, rate) in derived {
                let listed = device.rate(*unit).unwrap() / 1e12;
                assert!((rate / listed - 1.0).abs() < 4e-3, "{name} {unit}: {rate} for {listed}");
            }
        };
        close("rtx3090", &ampere(82.0, 1.695));
        close("rtx4080", &ada(76.0, 2.505));
        close("rtx4090", &ada(128.0, 2.520));
        close("rtx5070ti", &blackwell(70.0, 2.452));
        close("rtx5080", &blackwell(84.0, 2.617));
        close("rtx5090", &blackwell(170.0, 2.407));
        // GA102 whitepaper: 40.6 and 162.6 of a 3070, 59.5 and 238 of a 3080.
        let of = |name: &str, unit| Device::named(name).unwrap().rate(unit).unwrap() / 1e12;
        for (found, listed) in [
            (of("rtx3070", Bf16), 40.6),
            (of("rtx3070", Int8), 162.6),
            (of("rtx3080", Bf16), 59.5),
            (of("rtx3080", Int8), 238.0),
        ] {
            assert!((found - listed).abs() < 0.2, "{found} for {listed}");
        }
    }
}
