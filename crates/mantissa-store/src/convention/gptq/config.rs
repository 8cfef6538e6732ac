//! Parsing of `quantization_config`, and of AutoRound's, whose tensors are the same.

use std::path::Path;

use mantissa_num::Blocks;
use serde_json::Value;

use crate::convention::pattern::{Pattern, Skipped};
use crate::{Error, Result};

/// `quant_method` of GPTQModel, AutoGPTQ and optimum.
pub const QUANT_METHOD: &str = "gptq";

/// `quant_method` of AutoRound, by age.
pub const AUTO_ROUND: [&str; 3] = ["auto-round", "auto_round", "intel/auto-round"];

/// File in which AutoRound repeats its `quantization_config`.
pub const AUTO_ROUND_FILE: &str = "quantization_config.json";

/// Layout of the codes in a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Dense bit stream along the packed axis.
    Stream,
    /// `gptq_p`: bit planes, see [`mantissa_num::pack::planar_block`].
    Planar,
}

/// Version of stored zero points.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ZeroVersion {
    /// Minus one (`gptq`).
    V1,
    /// Unchanged (`gptq_v2`, `gptq_p`).
    V2,
}

impl ZeroVersion {
    /// The `checkpoint_format`.
    pub fn name(self) -> &'static str {
        match self {
            ZeroVersion::V1 => "gptq",
            ZeroVersion::V2 => "gptq_v2",
        }
    }
}

/// Bits and group of a layer's codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layer {
    /// Bits of a code.
    pub bits: u32,
    /// Columns of a group; `None` for the whole row.
    pub group: Option<u32>,
}

impl Layer {
    /// Blocks of a weight with `cols` columns whose elements share a scale.
    pub fn blocks(self, cols: usize) -> Blocks {
        match self.group {
            Some(group) if (group as usize) < cols => Blocks::Group(group),
            _ => Blocks::Row,
        }
    }
}

/// Override of settings for modules that match a pattern.
#[derive(Clone, Debug)]
struct Override {
    pattern: Pattern,
    /// `None`: left dense.
    layer: Option<Layer>,
}

/// Parsed `quantization_config`.
#[derive(Clone, Debug)]
pub struct Config {
    pub(super) layout: Layout,
    pub(super) version: ZeroVersion,
    auto_round: bool,
    default: Layer,
    overrides: Vec<Override>,
    /// Names of layers within a block that are quantized; empty for all.
    blocks: Skipped,
    pub(super) notes: Vec<String>,
    pub(super) contradicts_label: bool,
}

impl Config {
    /// Parses the value of `quantization_config` in the config at `path`.
    ///
    /// # Errors
    /// [`Error::Field`] names the key, its value and the accepted values.
    pub fn parse(path: &Path, value: &Value) -> Result<Self> {
        let keys = Keys { path, value };
        let (layout, version) = keys.checkpoint_format()?;
        let allowed = if layout == Layout::Planar { &PLANAR_BITS[..] } else { &STREAM_BITS };
        let default = keys.layer(value, "", None, allowed)?;
        let overrides = keys.overrides("dynamic", default, allowed)?;
        if let Some(packed) = value.get("pack_dtype").and_then(Value::as_str).filter(|t| *t != "int32") {
            return Err(keys.fault("pack_dtype", packed, "\"int32\""));
        }
        Ok(Config {
            layout,
            version,
            auto_round: false,
            default,
            overrides,
            blocks: blocks_of(value),
            notes: Vec::new(),
            contradicts_label: false,
        })
    }

    /// Parses AutoRound's `quantization_config` for tensors packed like GPTQ's. Its own packing stores zero points
    /// unchanged, `auto_gptq` minus one.
    ///
    /// # Errors
    /// As [`parse`](Self::parse).
    pub fn parse_auto_round(path: &Path, value: &Value) -> Result<Self> {
        let keys = Keys { path, value };
        if let Some(kind) = value.get("data_type").and_then(Value::as_str).filter(|t| !t.starts_with("int")) {
            return Err(keys.fault("data_type", kind, "\"int\""));
        }
        let packing = packing_format(value);
        let version = if packing.contains("gptq") && !packing.contains("v2") {
            ZeroVersion::V1
        } else {
            ZeroVersion::V2
        };
        let default = keys.layer(value, "", None, &STREAM_BITS)?;
        let overrides = keys.overrides("extra_config", default, &STREAM_BITS)?;
        let layout = Layout::Stream;
        Ok(Config {
            layout,
            version,
            auto_round: true,
            default,
            overrides,
            blocks: blocks_of(value),
            notes: Vec::new(),
            contradicts_label: false,
        })
    }

    /// Version of the zero points, from the data if it is unambiguous.
    pub fn version(&self) -> ZeroVersion {
        self.version
    }

    /// True if the zero points contradict the version that the config states.
    pub fn contradicts_label(&self) -> bool {
        self.contradicts_label
    }

    /// Layout of codes in words.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// Bits and group that the configuration gives `module`; `None` if it leaves it dense.
    pub fn layer(&self, module: &str) -> Option<Layer> {
        let found = self.overrides.iter().find(|rule| rule.pattern.is_match(module));
        found.map_or(Some(self.default), |rule| rule.layer)
    }

    /// Bits and group of `module`, which has codes: the tensors decide that it is quantized.
    pub fn layer_of_codes(&self, module: &str) -> Layer {
        self.layer(module).unwrap_or(self.default)
    }

    /// True if the configuration quantizes `module`.
    pub(super) fn names(&self, module: &str) -> bool {
        self.layer(module).is_some() && (self.blocks.is_empty() || self.blocks.has(module))
    }

    /// True if the file is AutoRound's.
    pub(super) fn is_auto_round(&self) -> bool {
        self.auto_round
    }

    /// Notes for the user.
    pub fn notes(&self) -> Vec<String> {
        let patterns = self.overrides.iter().filter_map(|rule| rule.pattern.note());
        self.notes.iter().cloned().chain(patterns).collect()
    }
}

/// Reads the names of quantized layers within a block, a list of lists (`modules_in_block_to_quantize`).
fn blocks_of(value: &Value) -> Skipped {
    let lists = value.get("modules_in_block_to_quantize").and_then(Value::as_array).into_iter().flatten();
    let names: Vec<_> =
        lists.flat_map(|list| list.as_array().cloned().unwrap_or(vec![list.clone()])).collect();
    Skipped::parse(&serde_json::json!({ "names": names }), &["names"])
}

/// AutoRound's name for the layout of its tensors: `auto_round:auto_gptq`.
pub fn packing_format(value: &Value) -> &str {
    let key = |key: &str| value.get(key).and_then(Value::as_str);
    key("packing_format").or_else(|| key("backend")).unwrap_or("auto_round")
}

const STREAM_BITS: [u32; 4] = [2, 3, 4, 8];
const PLANAR_BITS: [u32; 7] = [2, 3, 4, 5, 6, 7, 8];

/// Keys of a `quantization_config`, with access functions.
struct Keys<'a> {
    path: &'a Path,
    value: &'a Value,
}

impl Keys<'_> {
    fn fault(&self, key: &str, found: impl Into<String>, allowed: impl Into<String>) -> Error {
        Error::field(self.path, format!("quantization_config.{key}"), found, allowed, "")
    }

    fn checkpoint_format(&self) -> Result<(Layout, ZeroVersion)> {
        let text = |key: &str| self.value.get(key).and_then(Value::as_str);
        if self.value.get("is_marlin_format").and_then(Value::as_bool) == Some(true) {
            return Err(self.kernel_layout("is_marlin_format", "true", "false"));
        }
        match text("checkpoint_format").or_else(|| text("format")).unwrap_or("gptq") {
            "gptq" => Ok((Layout::Stream, ZeroVersion::V1)),
            "gptq_v2" => Ok((Layout::Stream, ZeroVersion::V2)),
            "gptq_p" => Ok((Layout::Planar, ZeroVersion::V2)),
            other => {
                let found = format!("\"{other}\"");
                Err(self.kernel_layout("checkpoint_format", &found, "\"gptq\", \"gptq_v2\" or \"gptq_p\""))
            }
        }
    }

    fn kernel_layout(&self, key: &str, found: &str, allowed: &str) -> Error {
        let hint = "layouts of single kernels are not read; save it again with GPTQModel as \"gptq\"";
        Error::field(self.path, format!("quantization_config.{key}"), found, allowed, hint)
    }

    /// `bits` and `group_size` of `object`, which is at `at`; missing keys take the values of `default`.
    fn layer(&self, object: &Value, at: &str, default: Option<Layer>, allowed: &[u32]) -> Result<Layer> {
        let key = |key: &str| if at.is_empty() { key.to_owned() } else { format!("{at}.{key}") };
        let show = |value: Option<&Value>| value.map_or("nothing".to_owned(), Value::to_string);
        let bits = match (object.get("bits"), default) {
            (None, Some(default)) => default.bits,
            (value, _) => {
                let bits = value.and_then(Value::as_u64).and_then(|bits| u32::try_from(bits).ok());
                let list = allowed.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
                bits.filter(|bits| allowed.contains(bits))
                    .ok_or_else(|| self.fault(&key("bits"), show(value), list))?
            }
        };
        let group = match (object.get("group_size"), default) {
            (None, Some(default)) => default.group,
            (value, _) => {
                let fault = || self.fault(&key("group_size"), show(value), "-1 or a positive number");
                match value.and_then(Value::as_i64).ok_or_else(fault)? {
                    -1 => None,
                    size => Some(u32::try_from(size).ok().filter(|&size| size > 0).ok_or_else(fault)?),
                }
            }
        };
        Ok(Layer { bits, group })
    }

    /// Patterns of `key`: `-:PATTERN` (or 16 bits, AutoRound) leaves modules dense, others override settings.
    fn overrides(&self, key: &str, default: Layer, allowed: &[u32]) -> Result<Vec<Override>> {
        let object = match self.value.get(key) {
            None | Some(Value::Null) => return Ok(Vec::new()),
            Some(value) => {
                value.as_object().ok_or_else(|| self.fault(key, value.to_string(), "an object"))?
            }
        };
        let parse = |(text, object): (&String, &Value)| {
            let at = format!("{key}.{text}");
            let dense = text.starts_with("-:") || object.get("bits").and_then(Value::as_u64) >= Some(16);
            let layer = if dense { None } else { Some(self.layer(object, &at, Some(default), allowed)?) };
            let pattern = text.strip_prefix("-:").or_else(|| text.strip_prefix("+:")).unwrap_or(text);
            let plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
            // AutoRound's keys are names or patterns; GPTQModel's are always patterns for the start of a name.
            let regex = match key == "extra_config" && pattern.chars().all(plain) {
                true => Pattern::new(&format!("^{}$", regex::escape(pattern))),
                false => Pattern::of_start(pattern),
            };
            let pattern = regex.map_err(|e| self.fault(&at, e, "a regular expression"))?;
            Ok(Override { pattern, layer })
        };
        object.iter().map(parse).collect()
    }
}
