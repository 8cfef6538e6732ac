//! Devices given by their figures (`bandwidth=1008GB/s,memory=24GB,bf16=165TFLOPS`), and the host beside a GPU.

use std::borrow::Cow;

use mantissa_num::nearest_list;
use serde::Serialize;

use super::device::{Device, MAKERS, Maker, Unit};
use super::spec::Habits;

/// A figure that cannot be used, or is missing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{flag}: {key}: expected {expected}, got {found}")]
pub struct FiguresError {
    flag: &'static str,
    key: String,
    found: String,
    expected: String,
}

/// Prefixes of units, with the powers of ten that they stand for.
const PREFIXES: [(char, f64); 4] = [('m', 1e6), ('g', 1e9), ('t', 1e12), ('p', 1e15)];

/// Units whose rates can be given.
const UNITS: [Unit; 9] =
    [Unit::F32, Unit::Tf32, Unit::F16, Unit::Bf16, Unit::Fp8, Unit::Fp6, Unit::Fp4, Unit::Int8, Unit::Int4];

/// Keys besides those of [`UNITS`].
const KEYS: [&str; 6] = ["bandwidth", "memory", "name", "link", "maker", "sm"];

const BANDWIDTH: &str = "a bandwidth with its unit, such as 1008GB/s or 3.35TB/s";
const MEMORY: &str = "a size such as 24GB, as vendors name it (GB and GiB are 2^30 bytes)";
const RATE: &str = "a dense rate with its unit, such as 165TFLOPS, 660TOPS or 1.3PFLOPS";

/// Splits a quantity into its number, which must be positive, and its unit in lower case.
fn quantity(text: &str) -> Option<(f64, String)> {
    let text: String = text.chars().filter(|c| !c.is_whitespace()).collect();
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (digits, unit) = text.split_at(end);
    let number: f64 = digits.parse().ok()?;
    (number > 0.0 && number < 1e9).then(|| (number, unit.to_lowercase()))
}

/// Returns the factor of a prefix and what follows it.
fn prefixed(unit: &str) -> Option<(f64, &str)> {
    let first = unit.chars().next()?;
    let (_, factor) = PREFIXES.into_iter().find(|(prefix, _)| *prefix == first)?;
    Some((factor, &unit[first.len_utf8()..]))
}

/// Parses a bandwidth, bytes/s.
fn bandwidth(text: &str) -> Option<f64> {
    let (number, unit) = quantity(text)?;
    let (factor, rest) = prefixed(&unit)?;
    ["b/s", "bps", "byte/s", "bytes/s"].contains(&rest).then_some(number * factor)
}

/// Parses a size of a memory, bytes.
pub(super) fn memory(text: &str) -> Option<f64> {
    let (number, unit) = quantity(text)?;
    let (factor, rest) = prefixed(&unit)?;
    let binary = match factor {
        f if f < 1e9 => 2f64.powi(20),
        f if f < 1e12 => 2f64.powi(30),
        _ => 2f64.powi(40),
    };
    ["", "b", "i", "ib"].contains(&rest).then_some(number * binary)
}

/// Parses a rate, operations/s.
fn rate(text: &str) -> Option<f64> {
    let (number, unit) = quantity(text)?;
    let (factor, rest) = prefixed(&unit)?;
    ["", "flops", "flop/s", "ops", "op/s"].contains(&rest).then_some(number * factor)
}

/// Unit of a key, as formats and data sheets name it.
fn unit(key: &str) -> Option<Unit> {
    let key = match key {
        "fp32" => "f32",
        "fp16" => "f16",
        "nvfp4" | "mxfp4" => "fp4",
        other => other,
    };
    UNITS.into_iter().find(|unit| unit.name() == key)
}

/// Faults of one flag.
#[derive(Clone, Copy)]
struct Flag(&'static str);

impl Flag {
    fn fault(self, key: &str, expected: impl Into<String>, found: &str) -> FiguresError {
        // Values of a command line are shown whole, unless they are no names at all.
        let shown: String = found.chars().take(60).filter(|c| !c.is_control()).collect();
        let found = if shown.is_empty() { "nothing".to_owned() } else { format!("\"{shown}\"") };
        let key = key.chars().take(40).filter(|c| !c.is_control()).collect();
        FiguresError { flag: self.0, key, found, expected: expected.into() }
    }

    /// Makes the error of keys that are not there, all at once: names, what each expects, and whether it is given.
    fn missing(self, needed: &[(&str, &str, bool)]) -> FiguresError {
        let absent: Vec<_> = needed.iter().filter(|(.., given)| !given).collect();
        let keys: Vec<&str> = absent.iter().map(|(key, ..)| *key).collect();
        match absent.as_slice() {
            [(key, expected, _)] => self.fault(key, *expected, ""),
            _ => {
                let each: Vec<String> =
                    absent.iter().map(|(key, expected, _)| format!("{key}: {expected}")).collect();
                FiguresError {
                    flag: self.0,
                    key: keys.join("; "),
                    expected: format!("all of these ({})", each.join("; ")),
                    found: "none of them".to_owned(),
                }
            }
        }
    }

    /// Splits `key=value,…`; a key is given once.
    fn pairs(self, text: &str) -> Result<Vec<(String, &str)>, FiguresError> {
        let mut pairs: Vec<(String, &str)> = Vec::new();
        for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            let Some((key, value)) = part.split_once('=') else {
                return Err(self.fault(part, "KEY=VALUE, such as memory=24GB", part));
            };
            let key = key.trim().to_lowercase();
            if pairs.iter().any(|(known, _)| *known == key) {
                return Err(self.fault(&key, "one value", "two"));
            }
            pairs.push((key, value.trim()));
        }
        Ok(pairs)
    }

    fn number(
        self,
        key: &str,
        value: &str,
        parse: fn(&str) -> Option<f64>,
        expected: &str,
    ) -> Result<f64, FiguresError> {
        parse(value).ok_or_else(|| self.fault(key, expected, value))
    }
}

/// Parses a compute capability times ten: `89`, `sm89` or `8.9`.
fn capability(text: &str) -> Option<u32> {
    let digits = text.to_lowercase().replace(['.', '_'], "");
    let sm = digits.strip_prefix("sm").unwrap_or(&digits).parse().ok()?;
    (50..200).contains(&sm).then_some(sm)
}

impl Device {
    /// True if a text gives figures rather than a name.
    pub fn is_figures(text: &str) -> bool {
        text.contains('=')
    }

    /// Describes a device by `bandwidth=…,memory=…` and the dense rates of its units, of which one must be of 16 or 32 bits.
    /// Units without a rate count as missing. Also `name`, `link`, `maker` (nvidia if not given) and `sm`.
    ///
    /// # Errors
    /// [`FiguresError`] names the key.
    pub fn from_figures(text: &str) -> Result<Self, FiguresError> {
        let flag = Flag("--hardware");
        let (mut title, mut maker, mut sm) = ("given".to_owned(), Maker::Nvidia, None);
        let (mut speed, mut size, mut link) = (None, None, 0.0);
        let mut rates = Vec::new();
        for (key, value) in flag.pairs(text)? {
            match &*key {
                "bandwidth" => speed = Some(flag.number(&key, value, bandwidth, BANDWIDTH)?),
                "memory" => size = Some(flag.number(&key, value, memory, MEMORY)?),
                "link" => link = flag.number(&key, value, bandwidth, BANDWIDTH)?,
                "name" if !value.is_empty() && value.len() <= 64 && !value.chars().any(char::is_control) => {
                    value.clone_into(&mut title);
                }
                "name" => return Err(flag.fault(&key, "a name of at most 64 letters", value)),
                "maker" => {
                    let known = || MAKERS.map(|(name, _)| name).join(", ");
                    maker = Maker::named(value).ok_or_else(|| flag.fault(&key, known(), value))?;
                }
                "sm" => {
                    let expected = "a compute capability such as 8.9 or sm120";
                    sm = Some(capability(value).ok_or_else(|| flag.fault(&key, expected, value))?);
                }
                key => {
                    let names = KEYS.into_iter().chain(UNITS.map(Unit::name));
                    let unit = unit(key).ok_or_else(|| flag.fault(key, nearest_list(key, names), key))?;
                    rates.push((unit, flag.number(key, value, rate, RATE)?));
                }
            }
        }
        let wide = [Unit::Bf16, Unit::F16, Unit::F32];
        let fast = rates.iter().any(|(unit, _)| wide.contains(unit)).then_some(());
        let (Some(bandwidth), Some(memory), Some(())) = (speed, size, fast) else {
            let needed = [
                ("bandwidth", BANDWIDTH, speed.is_some()),
                ("memory", MEMORY, size.is_some()),
                ("bf16, f16 or f32", RATE, fast.is_some()),
            ];
            return Err(flag.missing(&needed));
        };
        let Habits { usable, reserved, shares, kernels } = Habits::of(maker, memory);
        let fp4 = rates.iter().any(|(unit, _)| *unit == Unit::Fp4);
        let nvidia = maker == Maker::Nvidia;
        Ok(Device {
            name: Cow::Owned(title.clone()),
            title: Cow::Owned(title),
            maker,
            sm: sm.filter(|_| nvidia),
            memory,
            usable,
            reserved,
            bandwidth,
            link,
            peers: 0,
            rates,
            block_scales: fp4,
            nvfp4: fp4 && nvidia,
            fnuz: false,
            shares,
            kernels,
            note: "units without a rate count as missing",
            source: Cow::Borrowed("given on the command line"),
        })
    }
}

/// Processor and memory beside a GPU, where llama.cpp keeps the layers that do not fit.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Host {
    /// Read bandwidth, bytes/s.
    pub bandwidth: f64,
    /// Memory, bytes, if it is known.
    pub memory: Option<f64>,
    /// True if these figures are assumed.
    pub assumed: bool,
}

impl Default for Host {
    /// Two channels of DDR5-5600: 2 × 8 bytes × 5.6 GT/s.
    fn default() -> Self {
        Host { bandwidth: 89.6e9, memory: None, assumed: true }
    }
}

impl Host {
    /// Parses `90GB/s`, or `bandwidth=90GB/s[,memory=64GB]`.
    ///
    /// # Errors
    /// [`FiguresError`] names the key.
    pub fn parse(text: &str) -> Result<Self, FiguresError> {
        let flag = Flag("--host");
        let mut host = Host { assumed: false, ..Host::default() };
        if !Device::is_figures(text) && memory(text).is_some() && bandwidth(text).is_none() {
            let allowed = format!("the speed too, as in bandwidth=90GB/s,memory={text}");
            return Err(flag.fault("memory", allowed, text));
        }
        if !Device::is_figures(text) {
            host.bandwidth = flag.number("bandwidth", text, bandwidth, BANDWIDTH)?;
            return Ok(host);
        }
        let mut given = false;
        for (key, value) in flag.pairs(text)? {
            match &*key {
                "bandwidth" => {
                    host.bandwidth = flag.number(&key, value, bandwidth, BANDWIDTH)?;
                    given = true;
                }
                "memory" => host.memory = Some(flag.number(&key, value, memory, MEMORY)?),
                key => return Err(flag.fault(key, "bandwidth or memory", key)),
            }
        }
        if given { Ok(host) } else { Err(flag.fault("bandwidth", BANDWIDTH, "")) }
    }

    /// Returns the share of the bandwidth that kernels of a processor reach: low, middle, high.
    pub fn share(&self) -> [f64; 3] {
        Habits::of(Maker::Cpu, 0.0).shares.bandwidth
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::spec::Spec;
    use super::*;

    #[test]
    fn figures_of_a_data_sheet_make_a_device() {
        let given = "bandwidth=1008GB/s,memory=24GB,bf16=165.2TFLOPS,fp8=330.3TFLOPS,int8=660.6TOPS,sm=8.9,name=My card";
        let (device, known) = (Device::from_figures(given).unwrap(), Device::named("rtx4090").unwrap());
        assert_eq!((device.memory, device.bandwidth), (known.memory, known.bandwidth));
        for unit in [Unit::Bf16, Unit::Fp8, Unit::Int8] {
            assert_eq!(device.rate(unit), known.rate(unit), "{unit}");
        }
        assert_eq!((device.rate(Unit::Fp4), &*device.title), (None, "My card"));
        assert_eq!(device.gpu().map(|gpu| gpu.sm), Some(89));
        assert_eq!(device.available(), known.available());
        let mac = Device::from_figures("maker=apple,memory=24GiB,bandwidth=0.12 TB/s,fp16=4TFLOP/s").unwrap();
        assert!((mac.usable - 2.0 / 3.0).abs() < 1e-12 && mac.sm.is_none() && mac.bandwidth == 120e9);
    }

    #[test]
    fn faults_name_the_key_and_what_is_expected() {
        let fault = |text: &str| Device::from_figures(text).unwrap_err().to_string();
        for (text, words) in [
            ("memory=24GB,bf16=1T", "bandwidth: expected a bandwidth with its unit"),
            (
                "memory=8GB",
                "bandwidth; bf16, f16 or f32: expected all of these (bandwidth: a bandwidth with its",
            ),
            ("memory=8GB", "bf16, f16 or f32: a dense rate with its unit, such as 165TFLOPS"),
            ("int8=100TOPS", "bandwidth; memory; bf16, f16 or f32: expected all of these"),
            ("bandwidth=1008,memory=24GB,bf16=1T", "got \"1008\""),
            ("bandwidth=1TB/s,bf16=1T", "memory: expected a size"),
            ("bandwidth=1TB/s,memory=24GB", "bf16, f16 or f32: expected a dense rate"),
            ("bandwith=1TB/s,memory=24GB", "bandwith: expected bandwidth"),
            ("bandwidth=1TB/s,memory=24GB,bf16=165", "bf16: expected a dense rate with its unit"),
            ("bandwidth=1TB/s,memory=24GB,bf16=-1T", "got \"-1T\""),
            ("memory=1GB,memory=2GB", "memory: expected one value"),
            ("bandwidth=1TB/s,24GB", "KEY=VALUE"),
            ("maker=intl", "nvidia, amd, intel, apple, cpu"),
            ("sm=8000", "sm: expected a compute capability"),
        ] {
            assert!(fault(text).contains(words), "{text}: {}", fault(text));
        }
    }

    #[test]
    fn a_host_is_a_bandwidth_and_perhaps_a_memory() {
        assert_eq!(Host::parse("90GB/s").unwrap(), Host { bandwidth: 90e9, memory: None, assumed: false });
        let host = Host::parse("memory=64GB,bandwidth=204.8GB/s").unwrap();
        assert_eq!((host.bandwidth, host.memory), (204.8e9, Some(64.0 * 1_073_741_824.0)));
        for wrong in ["90", "memory=64GB", "cores=8", ""] {
            assert!(Host::parse(wrong).is_err(), "{wrong}");
        }
    }

    /// Metal: 16,384 MiB → 10,922.67, 32,768 → 21,845.33, 65,536 → 49,152 (logs of llama.cpp).
    #[test]
    fn macs_leave_memory_to_the_system() {
        let mib = |n: f64| n * 1_048_576.0;
        let mac = Device::named("m4-max").unwrap();
        for (memory, usable) in [(16_384.0, 10_922.67), (32_768.0, 21_845.33), (65_536.0, 49_152.0)] {
            assert!((mac.usable_of(mib(memory)) / mib(usable) - 1.0).abs() < 1e-6, "{memory}");
        }
        assert_eq!(Device::named("rtx4090").unwrap().usable_of(8e9), 8e9);
        assert!(
            super::super::apple::ROWS
                .iter()
                .map(Spec::device)
                .all(|mac| mac.available() == mac.usable_of(mac.memory))
        );
    }
}
