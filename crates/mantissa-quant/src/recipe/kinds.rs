//! Kinds of the values of recipe files.

use mantissa_methods::registry::{self, METHODS, Registered, RegisteredTransform, TRANSFORMS};
use mantissa_model::{KvPolicy, KvScheme};
use mantissa_num::{ParseError, Scheme, nearest_list, parse_activation, parse_weight};
use mantissa_options::{Accepts, Refusal, Value};
use mantissa_store::convention::Container;

use super::file_type::{FILE_TYPES, FileType};
use super::glob::Glob;
use crate::input_scales::Percentile;

/// Maximum length of a scheme in bytes, far above any; errors quote it.
const MAX_SCHEME: usize = 120;

/// Maximum number of rules, far above any real recipe; limits hostile files.
pub(super) const MAX_RULES: usize = 10_000;

/// Names of a list; errors name the nearest ones.
pub(super) struct Listed<T> {
    find: fn(&str) -> Option<T>,
    name: fn(&T) -> &'static str,
    all: fn() -> Vec<&'static str>,
    allowed: &'static str,
}

/// Method of recipes that name none.
pub(super) const FIRST_METHOD: &Registered = &METHODS[0];

/// Methods by name.
pub(super) const METHOD: Listed<&'static Registered> = Listed {
    find: registry::find,
    name: |row| row.name,
    all: || METHODS.iter().map(|row| row.name).collect(),
    allowed: "a method",
};

/// Checkpoint formats by name.
pub(super) const FORMAT: Listed<Container> = Listed {
    find: Container::named,
    name: |container| container.name(),
    all: Container::names,
    allowed: "a checkpoint format",
};

/// llama.cpp's file types by name.
pub(super) const FILE_TYPE: Listed<FileType> = Listed {
    find: FileType::parse,
    name: |ty| ty.name,
    all: || FILE_TYPES.iter().map(|ty| ty.name).collect(),
    allowed: "a file type",
};

impl<T> Accepts<T> for Listed<T> {
    fn read(&self, value: &Value) -> Option<T> {
        (self.find)(value.as_str()?)
    }

    fn print(&self, value: &T) -> Option<Value> {
        Some((self.name)(value).into())
    }

    fn allowed(&self) -> String {
        self.allowed.to_owned()
    }

    fn refusal(&self, value: &Value) -> Refusal {
        match value.as_str() {
            Some(text) => Refusal::new(format!("\"{text}\""), nearest_list(text, (self.all)())),
            None => Refusal::new(value.type_str(), "a string"),
        }
    }
}

/// Transforms by name.
pub(super) struct TransformName;

impl Accepts<RegisteredTransform> for TransformName {
    fn read(&self, value: &Value) -> Option<RegisteredTransform> {
        let name = value.as_str()?;
        TRANSFORMS.into_iter().find(|row| row.name == name)
    }

    fn print(&self, row: &RegisteredTransform) -> Option<Value> {
        Some(row.name.into())
    }

    fn allowed(&self) -> String {
        TRANSFORMS.map(|row| row.name).join(", ")
    }
}

/// Schemes.
pub(super) struct SchemeText {
    parse: fn(&str) -> Result<Scheme, ParseError>,
    allowed: &'static str,
}

/// Schemes of weights.
pub(super) const WEIGHT: SchemeText =
    SchemeText { parse: parse_weight, allowed: "a scheme such as \"int4-g128\"" };

/// Schemes of inputs and of keys and values.
pub(super) const ACTIVATION: SchemeText =
    SchemeText { parse: parse_activation, allowed: "a scheme such as \"int8-token\"" };

impl Accepts<Scheme> for SchemeText {
    fn read(&self, value: &Value) -> Option<Scheme> {
        let text = value.as_str().filter(|text| text.len() <= MAX_SCHEME)?;
        (self.parse)(text).ok()
    }

    fn print(&self, scheme: &Scheme) -> Option<Value> {
        Some(scheme.to_string().into())
    }

    fn allowed(&self) -> String {
        self.allowed.to_owned()
    }

    fn refusal(&self, value: &Value) -> Refusal {
        match value.as_str() {
            None => Refusal::new(value.type_str(), "a string"),
            Some(text) if text.len() > MAX_SCHEME => {
                Refusal::new(format!("{} bytes, \"{text}\"", text.len()), self.allowed)
            }
            Some(text) => match (self.parse)(text) {
                Ok(_) => Refusal::new(format!("\"{text}\""), self.allowed),
                Err(error) => Refusal::Cause(Box::new(error)),
            },
        }
    }
}

/// Schemes, or a word that stands for none.
pub(super) struct SchemeOr(pub(super) &'static str, pub(super) SchemeText);

impl Accepts<Option<Scheme>> for SchemeOr {
    fn read(&self, value: &Value) -> Option<Option<Scheme>> {
        if value.as_str() == Some(self.0) { Some(None) } else { self.1.read(value).map(Some) }
    }

    fn print(&self, scheme: &Option<Scheme>) -> Option<Value> {
        scheme.as_ref().map_or(Some(self.0.into()), |scheme| self.1.print(scheme))
    }

    fn allowed(&self) -> String {
        format!("{}, or \"{}\"", self.1.allowed, self.0)
    }

    fn refusal(&self, value: &Value) -> Refusal {
        self.1.refusal(value)
    }
}

/// Storage of keys and values.
#[derive(Clone, Debug)]
pub(super) enum Kv {
    /// A scheme.
    Scheme(Scheme),
    /// A policy whose levels are calibrated.
    Levels(Box<KvPolicy>),
}

/// Schemes of keys and values, and policies with calibrated levels.
pub(super) struct KvText;

impl Accepts<Kv> for KvText {
    fn read(&self, value: &Value) -> Option<Kv> {
        let levels = value.as_str().and_then(levels_of).map(|policy| Kv::Levels(Box::new(policy)));
        let full = || value.as_str().map(|text| Value::from(KvScheme::spelled_out(text)));
        levels.or_else(|| ACTIVATION.read(&full()?).map(Kv::Scheme))
    }

    fn print(&self, kv: &Kv) -> Option<Value> {
        Some(match kv {
            Kv::Scheme(scheme) => scheme.to_string().into(),
            Kv::Levels(policy) => policy.to_string().into(),
        })
    }

    fn allowed(&self) -> String {
        "a scheme such as \"int8-head\"".to_owned()
    }

    fn refusal(&self, value: &Value) -> Refusal {
        ACTIVATION.refusal(value)
    }
}

/// Parses a KV cache policy with calibrated levels; `None` for other text.
pub(super) fn levels_of(text: &str) -> Option<KvPolicy> {
    text.parse().ok().filter(KvPolicy::is_calibrated)
}

/// Lists of module names and globs.
pub(super) struct Globs;

impl Accepts<Vec<Glob>> for Globs {
    fn read(&self, value: &Value) -> Option<Vec<Glob>> {
        let list = value.as_array().filter(|list| list.len() <= MAX_RULES)?;
        list.iter().map(|item| item.as_str().map(|text| Glob(text.to_owned()))).collect()
    }

    fn print(&self, globs: &Vec<Glob>) -> Option<Value> {
        Some(Value::Array(globs.iter().map(|glob| glob.to_string().into()).collect()))
    }

    fn allowed(&self) -> String {
        "a list of names or globs".to_owned()
    }

    fn refusal(&self, value: &Value) -> Refusal {
        let list = value.as_array().filter(|list| list.len() <= MAX_RULES);
        match list.and_then(|list| list.iter().find(|item| !item.is_str())) {
            Some(item) => Refusal::new(item.type_str(), "names or globs"),
            None => Refusal::new(value.type_str(), self.allowed()),
        }
    }
}

/// Percentiles from 50 to 100.
pub(super) struct Percent;

impl Accepts<Percentile> for Percent {
    fn read(&self, value: &Value) -> Option<Percentile> {
        let percent = value.as_float().or_else(|| value.as_integer().map(|i| i as f64));
        percent.and_then(Percentile::of_percent)
    }

    fn print(&self, share: &Percentile) -> Option<Value> {
        Some(share.percent().into())
    }

    fn allowed(&self) -> String {
        "a number from 50 to 100".to_owned()
    }
}
