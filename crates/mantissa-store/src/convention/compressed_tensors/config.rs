//! Parsing of `quantization_config`.

use std::fmt;
use std::path::{Path, PathBuf};

use mantissa_num::scheme::Rule;
use mantissa_num::{Blocks, Code, RowKind, Scheme, Sense, Source, minifloat};
use serde::Deserialize;
use serde_json::Value;

use super::target::{Target, fault, field, parse_targets};
use super::transform::{self, Rotation};
use crate::{Error, Result};

/// Packing of a module's tensors (`CompressionFormat`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PackFormat {
    /// Integer codes as a bit stream in int32 words.
    PackQuantized,
    /// One int8 per code.
    IntQuantized,
    /// One FP8 per code.
    FloatQuantized,
    /// FP4 pairs with FP8 block scales and a global scale.
    Nvfp4Pack,
    /// FP4 pairs with E8M0 scales.
    Mxfp4Pack,
    /// Four FP6 (E2M3) codes in three bytes, with E8M0 scales.
    Mxfp6Pack,
    /// FP8 codes with E8M0 scales.
    Mxfp8,
}

impl PackFormat {
    /// Every format with its exact string. `naive-quantized` has the tensors of `int-quantized` or `float-quantized`.
    pub const NAMES: [(PackFormat, &'static str); 7] = [
        (PackFormat::PackQuantized, "pack-quantized"),
        (PackFormat::IntQuantized, "int-quantized"),
        (PackFormat::FloatQuantized, "float-quantized"),
        (PackFormat::Nvfp4Pack, "nvfp4-pack-quantized"),
        (PackFormat::Mxfp4Pack, "mxfp4-pack-quantized"),
        (PackFormat::Mxfp6Pack, "mxfp6-pack-quantized"),
        (PackFormat::Mxfp8, "mxfp8-quantized"),
    ];

    /// The string of the `format` key.
    pub fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(format, _)| *format == self).map_or("", |(_, name)| name)
    }
}

/// `QuantizationArgs`. Unknown keys are refused, as the package itself does.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Args {
    #[serde(default = "eight")]
    num_bits: u32,
    #[serde(default, rename = "type")]
    kind: Kind,
    #[serde(default = "yes")]
    symmetric: bool,
    #[serde(default)]
    group_size: Option<i64>,
    #[serde(default)]
    strategy: Option<Strategy>,
    #[serde(default)]
    block_structure: Option<Value>,
    #[serde(default)]
    dynamic: Value,
    #[serde(default)]
    actorder: Value,
    #[serde(default)]
    scale_dtype: Option<String>,
    #[serde(default, rename = "zp_dtype")]
    _zp_dtype: Value,
    #[serde(default, rename = "observer")]
    _observer: Value,
    #[serde(default, rename = "observer_kwargs")]
    _observer_kwargs: Value,
}

#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
enum Kind {
    #[default]
    Int,
    Float,
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
enum Strategy {
    Tensor,
    Channel,
    Group,
    Block,
    Token,
    TensorGroup,
    AttnHead,
}

impl fmt::Display for Kind {
    /// Name in a config.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kind::Int => "int",
            Kind::Float => "float",
        })
    }
}

impl fmt::Display for Strategy {
    /// Name in a config.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Strategy::Tensor => "tensor",
            Strategy::Channel => "channel",
            Strategy::Group => "group",
            Strategy::Block => "block",
            Strategy::Token => "token",
            Strategy::TensorGroup => "tensor_group",
            Strategy::AttnHead => "attn_head",
        })
    }
}

fn eight() -> u32 {
    8
}

fn yes() -> bool {
    true
}

/// One entry of `config_groups`.
#[derive(Clone, Debug)]
pub struct Group {
    targets: Vec<Target>,
    /// Quantization of weights; `None` leaves them dense.
    pub weights: Option<Args>,
    /// Quantization of inputs.
    pub input: Option<Args>,
}

/// Parsed `quantization_config`.
#[derive(Clone, Debug)]
pub struct Config {
    pub(super) path: PathBuf,
    groups: Vec<Group>,
    ignore: Vec<Target>,
    kv: Option<Args>,
    pub(super) rotations: Vec<Rotation>,
    notes: Vec<String>,
}

impl Config {
    /// Parses the value of `quantization_config` in the config at `path`.
    ///
    /// # Errors
    /// [`Error::Field`] names the key, its value and the accepted values.
    pub fn parse(path: &Path, value: &Value) -> Result<Self> {
        let groups = value.get("config_groups").and_then(Value::as_object);
        let groups = groups.ok_or_else(|| fault(path, "config_groups", "nothing", "an object of groups"))?;
        let groups: Vec<_> =
            groups.iter().map(|(name, group)| parse_group(path, name, group)).collect::<Result<_>>()?;
        check_format(path, "format", value.get("format"))?;
        let ignore = parse_targets(path, "ignore", value.get("ignore"))?;
        let sparse = value.get("sparsity_config").and_then(Value::as_object).is_some_and(|o| {
            o.iter().any(|(k, v)| k != "format" || v.as_str().is_some_and(|f| f != "dense"))
        });
        if sparse {
            let hint = "sparse weights are not read yet";
            return Err(Error::field(path, field("sparsity_config"), "an object", "none or {}", hint));
        }
        let mut notes = Vec::new();
        let mut kv = parse_args(path, "kv_cache_scheme", value.get("kv_cache_scheme"))?;
        if let Some(why) = kv.as_ref().and_then(Args::not_of_a_cache) {
            notes.push(format!("kv_cache_scheme is not applied, the KV cache stays f32: {why}"));
            kv = None;
        }
        if groups.iter().any(|g| g.output) {
            notes.push("output_activations are not applied".to_owned());
        }
        let groups = groups.into_iter().map(|g| g.group).collect();
        let rotations = transform::parse(path, value.get("transform_config"), kv.is_some())?;
        Ok(Config { path: path.to_owned(), groups, ignore, kv, rotations, notes })
    }

    /// The group that the configuration gives `module`, if any.
    pub fn group(&self, module: &str) -> Option<&Group> {
        if self.ignore.iter().any(|target| target.matches(module)) {
            return None;
        }
        self.groups.iter().find(|group| group.targets.iter().any(|target| target.matches(module)))
    }

    /// The group of `module`, which has codes: the tensors decide that it is quantized, the configuration how. Names may
    /// be spelled otherwise than the tensors', as serving engines spell them.
    pub fn group_of_codes(&self, module: &str) -> Option<&Group> {
        let coded = || self.groups.iter().filter(|group| group.weights.is_some());
        let by = |names: &dyn Fn(&Target) -> bool| coded().find(|group| group.targets.iter().any(names));
        let listed = self.group(module).filter(|group| group.weights.is_some());
        let targeted = listed.or_else(|| by(&|target| target.matches(module)));
        let spelled = targeted.or_else(|| by(&|target| target.matches_spelled(module)));
        spelled.or_else(|| coded().next().filter(|_| coded().count() == 1))
    }

    /// Scheme of the KV cache, if one applies.
    pub(super) fn kv_scheme(&self) -> Option<Scheme> {
        self.kv.as_ref().map(Args::cache_scheme)
    }

    /// Requests of the checkpoint that this reader ignores.
    pub fn notes(&self) -> Vec<String> {
        let targets = self.groups.iter().flat_map(|group| &group.targets).chain(&self.ignore);
        self.notes.iter().cloned().chain(targets.filter_map(Target::note)).collect()
    }
}

impl Args {
    /// Scheme of a weight whose scales are stored in `scale`.
    pub(super) fn weight_scheme(&self, path: &Path, scale: Code) -> Result<Scheme> {
        let mut scheme = self.scheme(path)?;
        if !scheme.has_outer_scale() {
            scheme.format = scheme.format.with_scale_code(scale);
        }
        Ok(scheme)
    }

    /// Scheme of an input. Static inputs need a stored scale.
    pub(super) fn input_scheme(&self, path: &Path) -> Result<Scheme> {
        let mut scheme = self.scheme(path)?;
        if scheme.format.blocks() == Blocks::Row {
            scheme = scheme.with_rows(RowKind::Token);
        }
        if self.dynamic == Value::Bool(false) || self.dynamic.is_null() {
            scheme.source = Source::Static;
        }
        let per_tensor = scheme.format.blocks() == Blocks::Tensor;
        if per_tensor && scheme.source == Source::Dynamic {
            let hint = "a scale over all tokens of a batch would make results depend on the batch";
            return Err(Error::field(
                path,
                field("input_activations.strategy"),
                "dynamic \"tensor\"",
                "\"token\"",
                hint,
            ));
        }
        if scheme.source == Source::Static && !per_tensor && !scheme.has_outer_scale() {
            return Err(fault(
                path,
                "input_activations.strategy",
                "a static scale per token",
                "static \"tensor\"",
            ));
        }
        Ok(scheme)
    }

    /// True if the columns of the weight may be reordered relative to their groups (`weight_g_idx`).
    pub(super) fn ordered_by_group(&self) -> bool {
        matches!(&self.actorder, Value::String(order) if matches!(order.as_str(), "group" | "dynamic"))
    }

    /// Reason why a KV cache cannot be quantized so; `None` if it can.
    fn not_of_a_cache(&self) -> Option<&'static str> {
        let fixed = self.dynamic == Value::Bool(false) || self.dynamic.is_null();
        match self.strategy {
            _ if !fixed => Some("its scales are dynamic"),
            _ if !self.symmetric => Some("it is not symmetric"),
            _ if self.num_bits != 8 => Some("it does not have 8 bits"),
            None | Some(Strategy::Tensor | Strategy::AttnHead) => None,
            _ => Some("its strategy is neither \"tensor\" nor \"attn_head\""),
        }
    }

    fn cache_scheme(&self) -> Scheme {
        let scheme = match self.kind {
            Kind::Float => Scheme::scaled_float(Code::Float(minifloat::E4M3), Blocks::Tensor),
            Kind::Int => Scheme::int_symmetric(8, Blocks::Tensor),
        };
        Scheme { source: Source::Static, ..scheme }
    }

    fn scheme(&self, path: &Path) -> Result<Scheme> {
        let float = match (self.kind, self.num_bits) {
            (Kind::Int, 2..=8) => None,
            (Kind::Float, 8) => Some(minifloat::E4M3),
            (Kind::Float, 6) => Some(minifloat::E2M3),
            (Kind::Float, 4) => Some(minifloat::E2M1),
            (kind, bits) => {
                let found = format!("{kind} of {bits} bits");
                return Err(fault(path, "num_bits", found, "int of 2 to 8 bits, float of 4, 6 or 8"));
            }
        };
        let strategy = self.strategy.unwrap_or(match self.group_size {
            None => Strategy::Tensor,
            Some(n) if n > 0 => Strategy::Group,
            Some(_) => Strategy::Channel,
        });
        if let (Some(float), Strategy::TensorGroup) = (float, strategy) {
            return if float == minifloat::E2M1 && self.group_size == Some(16) {
                Ok(Scheme::nvfp4(Some(Sense::Divisor)))
            } else {
                Err(fault(path, "strategy", "\"tensor_group\"", "4-bit floats in groups of 16"))
            };
        }
        let blocks = self.blocks(path, strategy)?;
        let mx = self.scale_dtype.as_deref().is_some_and(|d| d.ends_with("uint8") || d.ends_with("e8m0fnu"));
        Ok(match float {
            Some(float) if mx => {
                if blocks != Blocks::Group(32) {
                    return Err(fault(path, "group_size", self.shown_group(), "32 with E8M0 scales"));
                }
                let mut scheme = Scheme::mx(Code::Float(float));
                scheme.encoder.rule = Rule::Ct;
                scheme
            }
            Some(minifloat::E2M3) => {
                let found = self.scale_dtype.as_deref().unwrap_or("null");
                return Err(fault(path, "scale_dtype", found, "torch.uint8 for floats of 6 bits"));
            }
            Some(float) => Scheme::scaled_float(Code::Float(float), blocks),
            None if self.symmetric => Scheme::int_symmetric(self.num_bits, blocks),
            None => Scheme::int_asymmetric(self.num_bits, blocks),
        })
    }

    fn shown_group(&self) -> String {
        self.group_size.map_or_else(|| "null".to_owned(), |size| size.to_string())
    }

    fn blocks(&self, path: &Path, strategy: Strategy) -> Result<Blocks> {
        match strategy {
            Strategy::Tensor => Ok(Blocks::Tensor),
            Strategy::Channel | Strategy::Token => Ok(Blocks::Row),
            Strategy::Group => {
                let size = self.group_size.and_then(|n| u32::try_from(n).ok()).filter(|&n| n > 0);
                let fault = || fault(path, "group_size", self.shown_group(), "a positive number");
                Ok(Blocks::Group(size.ok_or_else(fault)?))
            }
            Strategy::Block => {
                let sides = self.block_structure.as_ref().and_then(block_sides);
                let found = || self.block_structure.clone().unwrap_or_default().to_string();
                let (rows, cols) =
                    sides.ok_or_else(|| fault(path, "block_structure", found(), "[rows, cols]"))?;
                Ok(Blocks::Tile { rows, cols })
            }
            Strategy::TensorGroup | Strategy::AttnHead => {
                let found = format!("\"{strategy}\" with {} of {} bits", self.kind, self.num_bits);
                Err(fault(path, "strategy", found, "tensor, channel, group, block or token"))
            }
        }
    }
}

fn block_sides(value: &Value) -> Option<(u32, u32)> {
    let side = |v: &Value| v.as_u64().and_then(|n| u32::try_from(n).ok()).filter(|&n| n > 0);
    match value.as_array()?.as_slice() {
        [rows, cols] => Some((side(rows)?, side(cols)?)),
        _ => None,
    }
}

fn parse_args(path: &Path, key: &str, value: Option<&Value>) -> Result<Option<Args>> {
    match value {
        None | Some(Value::Null) => Ok(None),
        Some(args) => serde_json::from_value(args.clone())
            .map(Some)
            .map_err(|e| fault(path, key, e.to_string(), "QuantizationArgs")),
    }
}

struct ParsedGroup {
    group: Group,
    output: bool,
}

fn parse_group(path: &Path, name: &str, value: &Value) -> Result<ParsedGroup> {
    let args = |key: &str| parse_args(path, &format!("config_groups.{name}.{key}"), value.get(key));
    check_format(path, &format!("config_groups.{name}.format"), value.get("format"))?;
    let targets = parse_targets(path, &format!("config_groups.{name}.targets"), value.get("targets"))?;
    let group = Group { targets, weights: args("weights")?, input: args("input_activations")? };
    Ok(ParsedGroup { group, output: args("output_activations")?.is_some() })
}

/// The tensors determine the packing; the string is checked so that an unsupported format is named.
fn check_format(path: &Path, key: &str, value: Option<&Value>) -> Result<()> {
    let Some(text) = value.and_then(Value::as_str) else { return Ok(()) };
    let also = ["dense", "naive-quantized", "mixed-precision"];
    if also.contains(&text) || PackFormat::NAMES.iter().any(|(_, name)| *name == text) {
        return Ok(());
    }
    let names: Vec<_> = PackFormat::NAMES.iter().map(|(_, name)| *name).chain(also).collect();
    Err(fault(path, key, format!("\"{text}\""), names.join(", ")))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::json;

    use super::*;

    /// DeepSeek-V4 publishes its embedding as `embed`, its head as `head`.
    #[test]
    fn embeddings_are_no_linear_layers() {
        for module in ["model.embed_tokens", "embed", "transformer.wte", "backbone.embeddings"] {
            assert!(!Target::Linear.matches(module), "{module}");
        }
        for module in ["head", "lm_head", "layers.0.attn.wkv", "model.layers.0.mlp.up_proj"] {
            assert!(Target::Linear.matches(module), "{module}");
        }
    }

    /// Messages quote the config's own words.
    #[test]
    fn arguments_that_are_no_scheme_are_named_as_in_the_config() {
        let message = |value: Value| {
            let args: Args = serde_json::from_value(value).unwrap();
            args.scheme(Path::new("config.json")).unwrap_err().to_string()
        };
        for (value, said) in [
            (json!({"num_bits": 3, "type": "float"}), "got float of 3 bits"),
            (
                json!({"num_bits": 8, "type": "int", "strategy": "attn_head"}),
                "got \"attn_head\" with int of 8 bits",
            ),
            (json!({"num_bits": 4, "strategy": "group"}), "expected a positive number, got null"),
            (json!({"num_bits": 4, "strategy": "group", "group_size": -7}), "got -7"),
            (
                json!({"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128]}),
                "got [128]",
            ),
        ] {
            let text = message(value);
            assert!(text.contains(said), "{text}");
        }
    }
}
