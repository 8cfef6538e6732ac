//! `adapter_config.json`: peft's `LoraConfig` as JSON.

use std::path::Path;

use regex::Regex;
use serde_json::{Map, Value, json};

use super::{Adapter, AdapterSettings};
use crate::error::{Error, Result};

/// Largest rank that is read.
const MAX_RANK: u64 = 1 << 16;

/// Most names of a list.
const MAX_NAMES: usize = 1 << 16;

/// Most patterns, and the compiled size of one in bytes.
const MAX_PATTERNS: usize = 1 << 12;
const MAX_PATTERN: usize = 1 << 16;

/// Fields that do not change the result of an adapter whose tensors are stored.
const HARMLESS: &[&str] = &[
    "auto_mapping",
    "base_model_name_or_path",
    "bias",
    "corda_config",
    "eva_config",
    "exclude_modules",
    // The orientation of the base's weight; A and B have the same shapes either way.
    "fan_in_fan_out",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "megatron_core",
    "modules_to_save",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
];

/// Fields that [`Config::parse`] reads.
const READ: &[&str] = &[
    "peft_type",
    "r",
    "lora_alpha",
    "use_rslora",
    "use_dora",
    "rank_pattern",
    "alpha_pattern",
    "init_lora_weights",
];

/// Initial values of A and B that leave the base's weights unchanged. Others subtract a part from them, so that the stored
/// adapter fits only the changed base.
const INITS: &[&str] = &["gaussian", "eva", "orthogonal"];

/// Settings of an adapter that is read.
#[derive(Debug)]
pub(super) struct Config {
    pub(super) settings: AdapterSettings,
    pub(super) rank_stabilized: bool,
    pub(super) dora: bool,
    rank: usize,
    alpha: f64,
    ranks: Vec<(Regex, usize)>,
    alphas: Vec<(Regex, f64)>,
}

impl Config {
    /// Reads the settings; `path` names the file in errors.
    ///
    /// # Errors
    /// [`Error::Field`] for a value that is not allowed, and for a feature that would change the result.
    pub(super) fn parse(path: &Path, value: &Value) -> Result<Self> {
        let fields = Fields { path, object: object(path, "root", value)? };
        let kind = fields.object.get("peft_type").and_then(Value::as_str).unwrap_or("nothing");
        if kind != "LORA" {
            return Err(fields.bad(
                "peft_type",
                shown(fields.get("peft_type")),
                "\"LORA\" (LoRA and DoRA)",
                MERGE,
            ));
        }
        fields.require_known()?;
        fields.require_init()?;
        let settings = AdapterSettings {
            base_model: fields.get("base_model_name_or_path").as_str().map(str::to_owned),
            target_modules: match fields.get("target_modules") {
                // A pattern or "all-linear" selects modules in training; the tensors name them.
                Value::String(_) => Vec::new(),
                _ => fields.names("target_modules")?,
            },
            modules_to_save: fields.names("modules_to_save")?,
            dropout: fields.number("lora_dropout", 0.0)?,
        };
        Ok(Config {
            settings,
            rank_stabilized: fields.flag("use_rslora")?,
            dora: fields.flag("use_dora")?,
            rank: fields.rank("r", fields.get("r"), Some(8))?,
            alpha: fields.number("lora_alpha", 8.0)?,
            ranks: fields.pattern("rank_pattern", |field, value| fields.rank(field, value, None))?,
            alphas: fields.pattern("alpha_pattern", |field, value| fields.finite(field, value))?,
        })
    }

    /// Returns rank and alpha of a module: from the first pattern that matches its name or the end of it after a dot, else
    /// the values for all modules.
    pub(super) fn of_module(&self, module: &str) -> (usize, f64) {
        let rank = self.ranks.iter().find(|(pattern, _)| pattern.is_match(module));
        let alpha = self.alphas.iter().find(|(pattern, _)| pattern.is_match(module));
        (rank.map_or(self.rank, |(_, rank)| *rank), alpha.map_or(self.alpha, |(_, alpha)| *alpha))
    }

    /// True if `target_modules` selects the module, as far as it is a list.
    pub(super) fn selects(&self, module: &str) -> bool {
        let ends = |target: &String| {
            module.strip_suffix(target).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
        };
        let targets = &self.settings.target_modules;
        targets.is_empty() || targets.iter().any(ends)
    }
}

const MERGE: &str = "fix: merge the adapter with peft (merge_and_unload) and run the merged model";

struct Fields<'a> {
    path: &'a Path,
    object: &'a Map<String, Value>,
}

impl Fields<'_> {
    fn get(&self, field: &str) -> &Value {
        self.object.get(field).unwrap_or(&Value::Null)
    }

    fn bad(&self, field: &str, found: String, allowed: &str, hint: &str) -> Error {
        Error::field(self.path, field, found, allowed, hint)
    }

    /// Refuses fields that are set and not known to leave the result unchanged.
    fn require_known(&self) -> Result<()> {
        let unset = |value: &Value| match value {
            Value::Null | Value::Bool(false) => true,
            Value::Number(number) => number.as_f64() == Some(0.0),
            Value::String(text) => text.is_empty(),
            Value::Array(items) => items.is_empty(),
            Value::Object(fields) => fields.is_empty(),
            Value::Bool(true) => false,
        };
        let known = |field: &str| HARMLESS.contains(&field) || READ.contains(&field);
        match self.object.iter().find(|(field, value)| !known(field) && !unset(value)) {
            Some((field, value)) => {
                Err(self.bad(field, shown(value), "null or false: plain LoRA or DoRA", MERGE))
            }
            None => Ok(()),
        }
    }

    /// Refuses adapters of a base that their initialization changed.
    fn require_init(&self) -> Result<()> {
        match self.get("init_lora_weights") {
            Value::Null | Value::Bool(_) => Ok(()),
            Value::String(name) if INITS.contains(&&*name.to_lowercase()) => Ok(()),
            other => {
                let hint = "fix: save it with save_pretrained(DIR, path_initial_model_for_weight_conversion=INITIAL)";
                let allowed = "true, false, \"gaussian\", \"eva\" or \"orthogonal\", which leave the base's weights unchanged";
                Err(self.bad("init_lora_weights", shown(other), allowed, hint))
            }
        }
    }

    fn flag(&self, field: &str) -> Result<bool> {
        match self.get(field) {
            Value::Null => Ok(false),
            Value::Bool(flag) => Ok(*flag),
            other => Err(self.bad(field, shown(other), "true or false", "")),
        }
    }

    fn finite(&self, field: &str, value: &Value) -> Result<f64> {
        let number = value.as_f64().filter(|number| (*number as f32).is_finite());
        number.ok_or_else(|| self.bad(field, shown(value), "a finite number", ""))
    }

    fn number(&self, field: &str, default: f64) -> Result<f64> {
        match self.get(field) {
            Value::Null => Ok(default),
            value => self.finite(field, value),
        }
    }

    fn rank(&self, field: &str, value: &Value, default: Option<usize>) -> Result<usize> {
        match (value, default) {
            (Value::Null, Some(default)) => Ok(default),
            (value, _) => match value.as_u64().filter(|rank| (1..=MAX_RANK).contains(rank)) {
                Some(rank) => Ok(rank as usize),
                None => Err(self.bad(field, shown(value), &format!("a rank from 1 to {MAX_RANK}"), "")),
            },
        }
    }

    /// Reads a list of names, or one name.
    fn names(&self, field: &str) -> Result<Vec<String>> {
        let fault = |value: &Value| self.bad(field, shown(value), "a list of module names", "");
        match self.get(field) {
            Value::Null => Ok(Vec::new()),
            Value::String(name) => Ok(vec![name.clone()]),
            Value::Array(items) if items.len() <= MAX_NAMES => {
                items.iter().map(|item| item.as_str().map(str::to_owned).ok_or_else(|| fault(item))).collect()
            }
            other => Err(fault(other)),
        }
    }

    /// Reads an object whose keys are regular expressions over module names, in its order.
    fn pattern<T>(&self, field: &str, read: impl Fn(&str, &Value) -> Result<T>) -> Result<Vec<(Regex, T)>> {
        let value = self.get(field);
        if value.is_null() {
            return Ok(Vec::new());
        }
        let entries = object(self.path, field, value)?;
        if entries.len() > MAX_PATTERNS {
            let found = format!("{} entries", entries.len());
            return Err(self.bad(field, found, &format!("at most {MAX_PATTERNS} entries"), ""));
        }
        let compiled = |(key, value): (&String, &Value)| {
            let named = format!("{field}[\"{key}\"]");
            let pattern =
                regex::RegexBuilder::new(&format!(r"^(?:.*\.)?(?:{key})$")).size_limit(MAX_PATTERN).build();
            let allowed = "a module name, or a regular expression without look-around";
            let pattern = pattern.map_err(|_| self.bad(field, format!("{key:?}"), allowed, ""))?;
            Ok((pattern, read(&named, value)?))
        };
        entries.iter().map(compiled).collect()
    }
}

fn object<'v>(path: &Path, field: &str, value: &'v Value) -> Result<&'v Map<String, Value>> {
    value.as_object().ok_or_else(|| Error::field(path, field, shown(value), "an object", ""))
}

/// Shows a value in a message; a missing one as `nothing`.
fn shown(value: &Value) -> String {
    match value {
        Value::Null => "nothing".to_owned(),
        Value::Array(items) if items.len() > 4 => format!("a list of {} values", items.len()),
        Value::Object(fields) => format!("an object of {} fields", fields.len()),
        other => other.to_string(),
    }
}

/// Writes the settings of `adapter`, whose modules all have the same kind of scale: the fields of peft 0.17, in its
/// (alphabetical) order.
pub(super) fn written(adapter: &Adapter) -> Value {
    let AdapterSettings { base_model, target_modules, modules_to_save, dropout } = &adapter.settings;
    let modules = &adapter.modules;
    let (rank, ranks) = common(modules.iter().map(|(name, module)| (name, module.rank)));
    let (alpha, alphas) = common(modules.iter().map(|(name, module)| (name, module.alpha)));
    let targets = match target_modules.as_slice() {
        [] => modules.keys().cloned().collect(),
        targets => targets.to_vec(),
    };
    json!({
        "alpha_pattern": alphas.into_iter().map(|(name, alpha)| (name, number(alpha))).collect::<Map<_, _>>(),
        "auto_mapping": null,
        "base_model_name_or_path": base_model,
        "bias": if adapter.replaced.keys().any(|name| name.ends_with(".bias")) { "all" } else { "none" },
        "corda_config": null,
        "eva_config": null,
        "exclude_modules": null,
        "fan_in_fan_out": false,
        "inference_mode": true,
        "init_lora_weights": true,
        "layer_replication": null,
        "layers_pattern": null,
        "layers_to_transform": null,
        "loftq_config": {},
        "lora_alpha": number(alpha.unwrap_or(8.0)),
        "lora_bias": false,
        "lora_dropout": dropout,
        "megatron_config": null,
        "megatron_core": "megatron.core",
        "modules_to_save": if modules_to_save.is_empty() { Value::Null } else { json!(modules_to_save) },
        "peft_type": "LORA",
        "qalora_group_size": 16,
        "r": rank.unwrap_or(8),
        "rank_pattern": ranks.into_iter().map(|(name, rank)| (name, json!(rank))).collect::<Map<_, _>>(),
        "revision": null,
        "target_modules": targets,
        "target_parameters": null,
        "task_type": "CAUSAL_LM",
        "trainable_token_indices": null,
        "use_dora": modules.values().any(|module| module.magnitude.is_some()),
        "use_qalora": false,
        "use_rslora": modules.values().any(|module| module.rank_stabilized),
    })
}

/// Value of most modules, the first of equally many, and the modules with others.
fn common<'m, T: PartialEq + Copy>(
    values: impl Iterator<Item = (&'m String, T)> + Clone,
) -> (Option<T>, Vec<(String, T)>) {
    let mut counts: Vec<(T, usize)> = Vec::new();
    for (_, value) in values.clone() {
        match counts.iter_mut().find(|(held, _)| *held == value) {
            Some((_, count)) => *count += 1,
            None => counts.push((value, 1)),
        }
    }
    let most = counts.iter().map(|(_, count)| *count).max();
    let common = counts.iter().find(|(_, count)| Some(*count) == most).map(|(value, _)| *value);
    let others = values.filter(|(_, value)| Some(*value) != common);
    (common, others.map(|(name, value)| (name.clone(), value)).collect())
}

/// A whole number as an integer, as peft writes alpha.
fn number(value: f64) -> Value {
    if value.fract() == 0.0 && value.abs() < 1e15 { json!(value as i64) } else { json!(value) }
}
