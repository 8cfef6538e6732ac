//! Parsing of `quantization_config`.

use std::path::Path;

use serde_json::Value;

use crate::convention::pattern::Skipped;
use crate::{Error, Result};

/// `quant_method` of this format.
pub const QUANT_METHOD: &str = "bitsandbytes";

/// `llm_int8_threshold` if the config does not state it.
const DEFAULT_THRESHOLD: f32 = 6.0;

/// One of the two kinds of weight quantization.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BitWidth {
    /// `load_in_4bit`: a code book, named in each layer's tensors.
    FourBit,
    /// `load_in_8bit`: LLM.int8().
    EightBit,
}

/// Parsed `quantization_config`.
#[derive(Clone, Debug)]
pub struct Config {
    pub(super) kind: BitWidth,
    /// Threshold: input values of at least this magnitude are not quantized; `None` if all are.
    pub(super) threshold: Option<f32>,
    /// Modules that the configuration leaves unquantized.
    pub(super) skipped: Skipped,
}

impl Config {
    /// Parses the value of `quantization_config` in the config at `path`.
    ///
    /// # Errors
    /// [`Error::Field`] names the key, its value and the accepted values.
    pub fn parse(path: &Path, value: &Value) -> Result<Self> {
        let key = |name: &str| format!("quantization_config.{name}");
        let flag = |name: &str| match value.get(name).or_else(|| value.get(format!("_{name}"))) {
            None | Some(Value::Null) => Ok(false),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(other) => Err(Error::field(path, key(name), other.to_string(), "true or false", "")),
        };
        let kind = match (flag("load_in_4bit")?, flag("load_in_8bit")?) {
            (true, false) => BitWidth::FourBit,
            (false, true) => BitWidth::EightBit,
            (four, eight) => {
                let found = format!("load_in_4bit {four}, load_in_8bit {eight}");
                return Err(Error::field(path, key("load_in_4bit"), found, "one of the two", ""));
            }
        };
        let threshold = match value.get("llm_int8_threshold") {
            None | Some(Value::Null) => DEFAULT_THRESHOLD,
            Some(number) => {
                let found = number.as_f64().map(|x| x as f32).filter(|x| x.is_finite() && *x >= 0.0);
                let allowed = "a number of at least 0";
                let fault = || Error::field(path, key("llm_int8_threshold"), number.to_string(), allowed, "");
                found.ok_or_else(fault)?
            }
        };
        if value.get("bnb_4bit_quant_storage").and_then(Value::as_str).is_some_and(|t| t != "uint8") {
            let found = value["bnb_4bit_quant_storage"].to_string();
            let hint = "no other tool reads bytes viewed as floats; save it with uint8";
            return Err(Error::field(path, key("bnb_4bit_quant_storage"), found, "\"uint8\"", hint));
        }
        let skipped = Skipped::parse(value, &["llm_int8_skip_modules", "modules_to_not_convert"]);
        Ok(Config { kind, threshold: (threshold > 0.0).then_some(threshold), skipped })
    }
}
