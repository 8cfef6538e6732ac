//! List of devices, and the search by name.

use std::borrow::Cow;

use mantissa_num::nearest_list;

use super::device::{Device, Maker, Measured, Unit};
use super::figures::memory;
use super::spec::{Habits, Spec};
use super::{apple, geforce, nvidia, others, plain};

/// Returns every device as published: NVIDIA, AMD, Intel, Apple.
pub(super) fn specs() -> impl Iterator<Item = &'static Spec> {
    nvidia::ROWS.iter().chain(geforce::ROWS).chain(others::ROWS).chain(apple::ROWS)
}

/// Returns every device with figures, as `--hardware list` shows them.
pub fn devices() -> impl Iterator<Item = Device> {
    specs().map(Spec::device)
}

/// A name that no device has.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "--hardware: expected {known}, this, figures (bandwidth=…,memory=…,bf16=…), or a JSON report of mantissa bench; got \"{found}\"; fix: {fix}"
)]
pub struct HardwareError {
    found: String,
    known: String,
    fix: String,
}

impl Device {
    /// Finds a device by name, in any case, with or without hyphens and `rtx`.
    ///
    /// # Errors
    /// [`HardwareError`] with the nearest names; of a size, with the devices of that memory.
    pub fn named(name: &str) -> Result<Self, HardwareError> {
        spec_of(name).map(Spec::device).ok_or_else(|| unknown(name))
    }

    /// Describes a processor whose limits were measured.
    pub fn measured(name: &str, memory: u64, limits: &Measured, source: String) -> Self {
        let rate = |unit, giga: Option<f64>| giga.map(|giga| (unit, giga * 1e9));
        let rates = [
            rate(Unit::F32, limits.machine_f32_gflops),
            rate(Unit::Bf16, limits.machine_bf16_gflops),
            rate(Unit::Int8, limits.machine_int8_gops),
        ];
        let Habits { usable, reserved, shares, kernels } = Habits::of(Maker::Cpu, memory as f64);
        Device {
            name: Cow::Borrowed("this"),
            title: Cow::Owned(format!("{name}, {} threads, {}", limits.threads, limits.level)),
            maker: Maker::Cpu,
            sm: None,
            memory: memory as f64,
            usable,
            reserved,
            bandwidth: limits.machine_read_gb_per_s * 1e9,
            link: 0.0,
            peers: 0,
            rates: rates.into_iter().flatten().collect(),
            block_scales: false,
            nvfp4: false,
            fnuz: false,
            shares,
            kernels,
            note: "",
            source: Cow::Owned(source),
        }
    }
}

/// Largest number of devices that a size names.
const OF_SIZE: usize = 8;

/// Finds the row of a name.
fn spec_of(name: &str) -> Option<&'static Spec> {
    let wanted = plain(name);
    specs().find(|spec| plain(spec.name) == wanted || spec.aliases.iter().any(|alias| plain(alias) == wanted))
}

/// Splits the memory off a name that ends in it: `M2 16GB` is the row of m2 and `16GiB`, as `--memory` takes it.
fn with_memory(name: &str) -> Option<(&'static Spec, String)> {
    const BETWEEN: [char; 4] = [' ', '-', '_', ','];
    let lower = name.to_lowercase();
    let unit = ["gib", "gb"].into_iter().find_map(|unit| lower.strip_suffix(unit))?;
    let rest = unit.trim_end_matches(BETWEEN);
    let device = rest.trim_end_matches(|c: char| c.is_ascii_digit());
    let size = &rest[device.len()..];
    // Digits right after letters are the device's own.
    let is_apart = !size.is_empty() && device.ends_with(BETWEEN);
    let found = spec_of(device.trim_end_matches(BETWEEN)).filter(|_| is_apart)?;
    Some((found, format!("{size}GiB")))
}

/// Makes the error of a name that no device has. A size, such as `8GB`, is the memory of a device.
fn unknown(name: &str) -> HardwareError {
    if let Some((spec, size)) = with_memory(name) {
        return HardwareError {
            found: name.to_owned(),
            known: format!("the device alone, {}", spec.name),
            fix: format!("--hardware {} --memory {size}", spec.name),
        };
    }
    let Some(size) = memory(name) else {
        return HardwareError {
            found: name.to_owned(),
            known: nearest_list(name, specs().map(|spec| spec.name)),
            fix: "mantissa plan --hardware list shows all".to_owned(),
        };
    };
    let same = |spec: &&Spec| spec.memory * f64::from(1 << 30) == size;
    let known: Vec<&str> = specs().filter(same).map(|spec| spec.name).take(OF_SIZE).collect();
    let known = if known.is_empty() { "a device".to_owned() } else { known.join(", ") };
    let fix = format!(
        "name the device (mantissa plan --hardware list), or its figures: --hardware memory={name},bandwidth=…,bf16=…"
    );
    HardwareError { found: name.to_owned(), known, fix }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::device::Unit::{Bf16, Fp4, Fp8, Int8};
    use super::*;

    #[test]
    fn every_row_has_a_source_and_plausible_figures() {
        for spec in specs() {
            assert!(spec.source.len() > 10 && !spec.title.is_empty(), "{}", spec.name);
            assert!((8.0..600.0).contains(&spec.memory) && (0.06..10.0).contains(&spec.bandwidth));
            assert!(spec.rates.iter().all(|(_, rate)| (2.5..2e4).contains(rate)), "{}", spec.name);
            assert_eq!((spec.maker == Maker::Nvidia), spec.sm.is_some(), "{}", spec.name);
            let device = Device::named(spec.name).unwrap();
            assert_eq!(device.title, spec.title);
            assert_eq!(device.gpu().is_some(), spec.sm.is_some(), "{}", spec.name);
        }
    }

    /// Each from its source: 275,040 MiB × 2^20; NVLink bridge of a 3090: 112.5 / 2; MI300X 896 / 2, MI355X 1075.2 / 2: seven
    /// links, one to each other GPU of eight.
    #[test]
    fn figures_that_were_wrong() {
        let of = |name: &str| Device::named(name).unwrap();
        assert_eq!(of("B300").memory, 275_040.0 * 1_048_576.0);
        for (name, link) in
            [("rtx3090", 56.25e9), ("mi300x", 448e9), ("mi355x", 537.6e9), ("h100", 450e9), ("b200", 900e9)]
        {
            assert_eq!(of(name).link, link, "{name}");
        }
        // Two MI300X have one link between them, eight all seven; NVIDIA's switch gives two H100 all of it.
        let among = |name: &str, n| of(name).link_among(n);
        assert_eq!([among("mi300x", 2.0), among("mi300x", 8.0), among("mi300x", 16.0)], [64e9, 448e9, 448e9]);
        assert_eq!(among("h100", 2.0), 450e9);
        let (b300, gb300) = (of("b300"), of("gb300"));
        assert_ne!(b300.name, gb300.name);
        for unit in [Bf16, Fp8, Fp4, Int8] {
            let ratio = gb300.rate(unit).unwrap() / b300.rate(unit).unwrap();
            assert!((ratio - 10.0 / 9.0).abs() < 0.02, "{unit}: {ratio}");
        }
        // int8 is slower than bf16 on both, so a plan says so.
        assert!([b300, gb300].iter().all(|device| device.rate(Int8) < device.rate(Bf16)));
    }

    #[test]
    fn devices_are_found_as_people_type_them() {
        for (typed, name) in [
            ("H100", "h100"),
            ("4090", "rtx4090"),
            ("RTX 5090", "rtx5090"),
            ("M4 Max", "m4-max"),
            ("GB300", "gb300"),
            ("A6000", "rtx-a6000"),
            ("NVIDIA GeForce RTX 5070 Ti", "rtx5070ti"),
            ("H100 PCIe", "h100-pcie"),
            ("RX 7900 XTX", "rx7900xtx"),
            ("RTX 3070", "rtx3070"),
            ("3060", "rtx3060"),
            ("NVIDIA GeForce RTX 4060 Ti", "rtx4060ti"),
            ("RTX 4060 Ti 16GB", "rtx4060ti-16gb"),
            ("rtx-4070-ti-super", "rtx4070tisuper"),
            ("5060 Ti 8 GB", "rtx5060ti-8gb"),
            ("5060 Ti", "rtx5060ti"),
            ("Apple M3 Max", "m3-max"),
            ("M2", "m2"),
            ("Mac M1", "m1"),
            ("MacBook Pro M2 Pro", "m2-pro"),
            ("Mac Studio M1 Ultra", "m1-ultra"),
        ] {
            assert_eq!(Device::named(typed).unwrap().name, name);
        }
        let error = Device::named("8GB").err().unwrap().to_string();
        let of_size = ["rtx3060ti", "rtx3070", "rtx4060", "rtx5060", "memory=8GB,bandwidth=…,bf16=…"];
        assert!(of_size.iter().all(|name| error.contains(name)) && !error.contains("t4"), "{error}");
        assert!(Device::named("7 GiB").err().unwrap().to_string().contains("memory=7 GiB,"));
        for (typed, fix) in [
            ("Mac M2 16GB", "fix: --hardware m2 --memory 16GiB"),
            ("m4-max-36gb", "fix: --hardware m4-max --memory 36GiB"),
            ("RTX 4090 24 GiB", "fix: --hardware rtx4090 --memory 24GiB"),
        ] {
            let error = Device::named(typed).err().unwrap().to_string();
            assert!(error.ends_with(fix), "{error}");
        }
        let error = Device::named("h10").err().unwrap().to_string();
        assert!(error.contains("h100") && error.contains("\"h10\""), "{error}");
    }
}
