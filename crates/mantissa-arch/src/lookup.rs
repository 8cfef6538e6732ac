//! Look-ups of architectures and multimodal models by their names.

use mantissa_num::{nearest_list, page_command};

use serde_json::Value;

use crate::architecture::Architecture;
use crate::families::FAMILIES;
use crate::gguf;
use crate::wrapper::{TEXT_CONFIG, Wrapper};

impl Architecture {
    /// Finds the architecture with this `model_type`.
    pub fn find(name: &str) -> Option<&'static Self> {
        Self::all().find(|architecture| architecture.name == name)
    }

    /// Every architecture.
    pub fn all() -> impl Iterator<Item = &'static Self> {
        FAMILIES.iter().flat_map(|family| family.models)
    }

    /// Lists the names nearest to `got`, for a message.
    pub fn nearest(got: &str) -> String {
        let names = nearest_list(got, Self::all().map(|architecture| architecture.name));
        format!("{names} ({} lists all)", page_command("docs/reference/architectures.md"))
    }
}

impl Wrapper {
    /// Finds the multimodal model with this `model_type`.
    pub fn find(name: &str) -> Option<&'static Self> {
        Self::all().find(|wrapper| wrapper.name == name)
    }

    /// Every multimodal model.
    pub fn all() -> impl Iterator<Item = &'static Self> {
        FAMILIES.iter().flat_map(|family| family.wrappers)
    }

    /// Finds the architecture of a text model with this `model_type`.
    pub fn text_model(&self, name: Option<&str>) -> Option<&'static Architecture> {
        let (first, _) = self.text_models.first()?;
        let name = name.unwrap_or(first);
        let row = self.text_models.iter().find(|(known, _)| *known == name).map_or(name, |(_, row)| row);
        Architecture::find(row)
    }

    /// Lists the names nearest to `got`, for a message.
    pub fn nearest_text_model(&self, got: &str) -> String {
        let own = self.text_models.iter().map(|(name, _)| *name);
        nearest_list(got, own.chain(Architecture::all().map(|row| row.name)))
    }
}

impl Architecture {
    /// Finds the architecture that a `config.json` describes: that of its text model if it is multimodal.
    pub fn of_config(config: &Value) -> Option<&'static Self> {
        let name = config["model_type"].as_str()?;
        match Wrapper::find(name) {
            None => Self::find(name),
            Some(wrapper) => {
                let text = config.get(TEXT_CONFIG).unwrap_or(config);
                wrapper.text_model(text["model_type"].as_str())
            }
        }
    }
}

impl gguf::Architecture {
    /// Every architecture.
    pub fn all() -> impl Iterator<Item = &'static Self> {
        FAMILIES.iter().flat_map(|family| family.gguf)
    }

    /// Finds the architecture with this name in `general.architecture`, of a file with experts or without: some have a row for
    /// each.
    pub fn parse(name: &str, experts: bool) -> Option<&'static Self> {
        Self::find(|row| row.name == name, experts)
    }

    /// Finds the architecture that checkpoints with this `model_type` are written as, with experts or without.
    pub fn of_model_type(model_type: &str, experts: bool) -> Option<&'static Self> {
        Self::find(|row| row.model_types.contains(&model_type), experts)
    }

    /// Finds the first of these rows that has experts, or none; else the first.
    fn find(is: impl Fn(&Self) -> bool, experts: bool) -> Option<&'static Self> {
        let fits = |row: &&'static Self| (row.experts != gguf::Experts::None) == experts;
        Self::all().filter(|row| is(row)).find(fits).or_else(|| Self::all().find(|row| is(row)))
    }

    /// Lists the written `model_type`s nearest to `got`, for a message.
    pub fn nearest_model_types(got: &str) -> String {
        let names = nearest_list(got, Self::all().flat_map(|row| row.model_types).copied());
        format!("{names} ({} lists all)", page_command("docs/reference/gguf.md"))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn every_text_model_has_a_row() {
        for wrapper in Wrapper::all() {
            assert!(Architecture::find(wrapper.name).is_none(), "{wrapper:?}");
            assert!(!wrapper.places.is_empty() && !wrapper.text_models.is_empty(), "{wrapper:?}");
            for (name, _) in wrapper.text_models {
                assert!(wrapper.text_model(Some(name)).is_some(), "{name}");
            }
            assert!(wrapper.text_model(Some("unheard")).is_none());
        }
    }
}
