//! Parsing of `quantization_config` and `hf_quant_config.json`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use mantissa_num::{Blocks, Code, Scheme, Source, minifloat};
use serde_json::Value;

use crate::convention::pattern::{Skipped, spellings};
use crate::json::read_strict;
use crate::{Error, Result};

/// `quant_method` of this format.
pub const QUANT_METHOD: &str = "modelopt";

/// File with the same content beside `config.json`; older checkpoints have only this.
pub const FILE_NAME: &str = "hf_quant_config.json";

/// Longest [`FILE_NAME`] read: it may list every layer.
const MAX_BYTES: u64 = 16 << 20;

/// Quantization of a module's tensors (`quant_algo`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Algo {
    /// FP8 with a scale for the weight and one for all inputs.
    Fp8,
    /// FP8 with scales per output channel and per token.
    Fp8PerChannel,
    /// 4-bit integers in groups, weights only.
    Int4Awq,
    /// NVFP4 weights and inputs.
    Nvfp4,
    /// NVFP4 weights.
    Nvfp4WeightOnly,
    /// MXFP8 weights and inputs.
    Mxfp8,
}

impl Algo {
    /// Every algorithm with its names; the first is written.
    pub const NAMES: [(Algo, &'static str); 7] = [
        (Algo::Fp8, "FP8"),
        (Algo::Fp8PerChannel, "FP8_PER_CHANNEL_PER_TOKEN"),
        (Algo::Int4Awq, "W4A16_AWQ"),
        (Algo::Nvfp4, "NVFP4"),
        (Algo::Nvfp4, "NVFP4_AWQ"),
        (Algo::Nvfp4WeightOnly, "W4A16_NVFP4"),
        (Algo::Mxfp8, "MXFP8"),
    ];

    /// The string of `quant_algo`.
    pub fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(algo, _)| *algo == self).map_or("", |(_, name)| name)
    }
}

/// The parsed configuration.
#[derive(Clone, Debug)]
pub struct Config {
    pub(super) path: PathBuf,
    /// Algorithm of every quantized layer; `None` if each has its own.
    default: Option<Algo>,
    /// By name, for mixed precision.
    layers: BTreeMap<String, Algo>,
    /// Columns of a group of integers, if the configuration states it.
    pub(super) group: Option<u32>,
    pub(super) kv: Option<Scheme>,
    /// Modules that the configuration leaves unquantized.
    skipped: Skipped,
    notes: Vec<String>,
}

impl Config {
    /// Parses the `quantization_config` of the config at `path` and [`FILE_NAME`] in its folder, as far as they
    /// exist. `None` if neither does.
    ///
    /// # Errors
    /// [`Error::Field`] names the key, its value and the accepted values; as [`read_strict`].
    pub fn open(path: &Path, value: Option<&Value>) -> Result<Option<Self>> {
        let beside = path.with_file_name(FILE_NAME);
        let file = match beside.is_file() {
            true => Some(read_strict(&beside, MAX_BYTES, "ModelOpt's hf_quant_config.json")?),
            false => None,
        };
        let file = file.as_ref().and_then(|file| file.get("quantization")).filter(|v| v.is_object());
        match (file, value) {
            (None, None) => Ok(None),
            (Some(file), value) => Keys { path: &beside, first: file, second: value }.parse().map(Some),
            (None, Some(value)) => Keys { path, first: value, second: None }.parse().map(Some),
        }
    }

    /// Algorithm of `module`, which has codes. Its name may be spelled otherwise than the tensors', and the only algorithm
    /// of a list is that of layers that it leaves out.
    pub fn algo(&self, module: &str) -> Option<Algo> {
        let listed = self.default.or_else(|| self.layers.get(module).copied());
        let spelled = || spellings(module).iter().find_map(|name| self.layers.get(name).copied());
        let first =
            || self.layers.values().next().filter(|first| self.layers.values().all(|algo| algo == *first));
        listed.or_else(spelled).or_else(|| first().copied())
    }

    /// True if the configuration quantizes `module`.
    pub(super) fn names(&self, module: &str) -> bool {
        (self.default.is_some() || self.layers.contains_key(module)) && !self.skipped.has(module)
    }

    /// Requests of the configuration that this reader ignores.
    pub(super) fn notes(&self) -> &[String] {
        &self.notes
    }
}

/// Sources of keys: the format's own file first, then `config.json`.
struct Keys<'a> {
    path: &'a Path,
    first: &'a Value,
    second: Option<&'a Value>,
}

impl<'a> Keys<'a> {
    fn get(&self, key: &str) -> Option<&'a Value> {
        let found = |value: &'a Value| value.get(key).filter(|v| !v.is_null());
        found(self.first).or_else(|| self.second.and_then(found))
    }

    fn fault(&self, key: &str, found: impl Into<String>, allowed: impl Into<String>) -> Error {
        Error::field(self.path, format!("quantization.{key}"), found, allowed, "")
    }

    fn parse(&self) -> Result<Config> {
        let mut layers = BTreeMap::new();
        let default = match self.get("quant_algo").and_then(Value::as_str) {
            Some("MIXED_PRECISION") => {
                let listed = self.get("quantized_layers").and_then(Value::as_object);
                let listed =
                    listed.ok_or_else(|| self.fault("quantized_layers", "nothing", "an object of layers"))?;
                for (module, value) in listed {
                    let algo = value.get("quant_algo").and_then(Value::as_str).unwrap_or_default();
                    let key = format!("quantized_layers.{module}.quant_algo");
                    layers.insert(module.clone(), self.algo(&key, algo)?);
                }
                None
            }
            name => Some(self.algo("quant_algo", name.unwrap_or_default())?),
        };
        let group = match self.get("group_size").or_else(|| self.of_weights("group_size")) {
            None => None,
            Some(value) => {
                let size = value.as_u64().and_then(|n| u32::try_from(n).ok()).filter(|&n| n > 0);
                Some(size.ok_or_else(|| self.fault("group_size", value.to_string(), "a positive number"))?)
            }
        };
        let mut notes: Vec<_> = self.difference().into_iter().collect();
        let kv = self.cache(&mut notes);
        let lists = ["exclude_modules", "ignore"];
        let skipped = lists.iter().filter_map(|key| Some(((*key).to_owned(), self.get(key)?.clone())));
        let skipped = Skipped::parse(&Value::Object(skipped.collect()), &lists);
        Ok(Config { path: self.path.to_owned(), default, layers, group, kv, skipped, notes })
    }

    /// Returns a note if the two sources state another algorithm.
    fn difference(&self) -> Option<String> {
        let of = |value: &'a Value| value.get("quant_algo").and_then(Value::as_str);
        let (ours, theirs) = (of(self.first)?, of(self.second?)?);
        (ours != theirs).then(|| {
            format!("{FILE_NAME} and config.json differ: quant_algo {ours} and {theirs}; {FILE_NAME} is used")
        })
    }

    /// A key of the arguments of weights in `config_groups`.
    fn of_weights(&self, key: &str) -> Option<&'a Value> {
        let groups = self.get("config_groups")?.as_object()?;
        groups.values().next()?.get("weights")?.get(key).filter(|v| !v.is_null())
    }

    fn algo(&self, key: &str, name: &str) -> Result<Algo> {
        let found = Algo::NAMES.iter().find(|(_, known)| *known == name).map(|(algo, _)| *algo);
        found.ok_or_else(|| {
            let names: Vec<_> = Algo::NAMES.iter().map(|(_, name)| *name).collect();
            self.fault(key, format!("\"{name}\""), format!("{}, MIXED_PRECISION", names.join(", ")))
        })
    }

    /// Scheme of the KV cache, if one applies.
    fn cache(&self, notes: &mut Vec<String>) -> Option<Scheme> {
        let name = self.get("kv_cache_quant_algo").and_then(Value::as_str);
        let scheme = self.get("kv_cache_scheme");
        let scheme_element = scheme.map(|scheme| {
            let bits = scheme.get("num_bits").and_then(Value::as_u64);
            match (bits, scheme.get("type").and_then(Value::as_str)) {
                (Some(8), Some("float")) => "FP8",
                (Some(8), Some("int")) => "INT8",
                _ => "of another kind",
            }
        });
        let element = match name.or(scheme_element)? {
            "FP8" => Scheme::scaled_float(Code::Float(minifloat::E4M3), Blocks::Tensor),
            "INT8" => Scheme::int_symmetric(8, Blocks::Tensor),
            other => {
                notes.push(format!("KV-cache quantization {other} is not applied; the cache stays f32"));
                return None;
            }
        };
        Some(Scheme { source: Source::Static, ..element })
    }
}
