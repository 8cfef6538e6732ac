//! Groups of tensors: which of them decay, and factors of their learning rates, by group and by name.

use std::collections::BTreeMap;
use std::fmt;

use mantissa_model::Role;

use crate::param_table::{ParamInfo, ParamTable};
use crate::pattern::matches;

/// Name of a group with its membership test.
type Group = (&'static str, fn(&ParamInfo) -> bool);

/// Groups of parameters; every parameter belongs to one.
const GROUPS: [Group; 6] = [
    ("linears", |param| matches!(param.tensor.role, Role::Linear { .. })),
    ("embeddings", |param| matches!(param.tensor.role, Role::Embedding)),
    ("head", |param| matches!(param.tensor.role, Role::Head)),
    ("norms", |param| matches!(param.tensor.role, Role::Norm { .. })),
    ("biases", |param| matches!(param.tensor.role, Role::Bias { .. }) && !param.is_scales()),
    ("scales", ParamInfo::is_scales),
];

/// Tensors with weight decay: those matched by `decay`, except those matched by `no_decay`. Entries are group
/// names (`linears`, `embeddings`, `head`, `norms`, `biases`, `scales`) or tensor names, where `*` matches any
/// characters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DecayGroups {
    /// Groups and names that decay.
    pub decay: Vec<String>,
    /// Exceptions that do not decay.
    pub no_decay: Vec<String>,
}

impl Default for DecayGroups {
    /// Decays all matrices, embeddings included; norms and biases do not decay.
    fn default() -> Self {
        let decay = ["linears", "embeddings", "head"].map(str::to_owned).to_vec();
        DecayGroups { decay, no_decay: Vec::new() }
    }
}

/// Factors of the learning rate by group or name of a tensor, as in [`DecayGroups`]. A tensor that several entries
/// match takes the product of their factors.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RateScales(pub BTreeMap<String, f64>);

impl RateScales {
    /// Returns the factor of each parameter of `table`, in table order.
    ///
    /// # Errors
    /// [`NoSuchTensor`] for an entry that is neither a group nor matches a tensor.
    pub fn select(&self, table: &ParamTable) -> Result<Vec<f64>, NoSuchTensor> {
        if let Some(name) = self.0.keys().find(|name| !is_known(name, table)) {
            return Err(NoSuchTensor { key: "lr_scale", name: name.clone() });
        }
        let factor = |param: &ParamInfo| {
            self.0.iter().filter(|(name, _)| named(name, param)).map(|(_, factor)| factor).product()
        };
        Ok(table.iter().map(factor).collect())
    }
}

/// Entry that matches no tensor, with its key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NoSuchTensor {
    /// Key of the entry: `decay`, `no_decay` or `lr_scale`.
    pub key: &'static str,
    /// Entry at fault.
    pub name: String,
}

impl fmt::Display for NoSuchTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}, which matches no tensor of the model", self.name)
    }
}

impl DecayGroups {
    /// Accepted entries, for messages.
    pub const ALLOWED: &'static str = "linears, embeddings, head, norms, biases, scales, or names of tensors such as \"*.down_proj.weight\"";

    /// Returns for each parameter of `table` whether it decays, in table order.
    ///
    /// # Errors
    /// [`NoSuchTensor`] for an entry that is neither a group nor matches a tensor.
    pub fn select(&self, table: &ParamTable) -> Result<Vec<bool>, NoSuchTensor> {
        for (key, names) in [("decay", &self.decay), ("no_decay", &self.no_decay)] {
            if let Some(name) = names.iter().find(|name| !is_known(name, table)) {
                return Err(NoSuchTensor { key, name: name.clone() });
            }
        }
        let any = |names: &[String], param: &ParamInfo| names.iter().any(|name| named(name, param));
        Ok(table.iter().map(|param| any(&self.decay, param) && !any(&self.no_decay, param)).collect())
    }
}

/// True if `name` is a group or matches a tensor.
fn is_known(name: &str, table: &ParamTable) -> bool {
    GROUPS.iter().any(|(group, _)| *group == name) || table.iter().any(|param| named(name, param))
}

/// True if `name` is the parameter's group or matches its name.
fn named(name: &str, param: &ParamInfo) -> bool {
    match GROUPS.iter().find(|(group, _)| *group == name) {
        Some((_, contains)) => contains(param),
        None => matches(name, &param.tensor.name),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn table() -> ParamTable {
        let config = serde_json::json!({
            "model_type": "qwen2", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 1,
            "vocab_size": 13, "max_position_embeddings": 32, "rms_norm_eps": 1e-5, "tie_word_embeddings": false
        });
        ParamTable::new(&mantissa_model::ModelConfig::from_json(&config, "config").unwrap())
    }

    fn selected(decay: &[&str], no_decay: &[&str]) -> Vec<String> {
        let owned = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        let (table, groups) = (table(), DecayGroups { decay: owned(decay), no_decay: owned(no_decay) });
        let flags = groups.select(&table).unwrap();
        let names = table.iter().zip(flags).filter(|(_, decays)| *decays);
        names.map(|(param, _)| param.tensor.name.clone()).collect()
    }

    #[test]
    fn groups_and_names_select_tensors() {
        let table = table();
        let all = ["linears", "embeddings", "head", "norms", "biases"];
        assert_eq!(selected(&all, &[]).len(), table.iter().count(), "every tensor is in a group");
        let groups: usize = all.iter().map(|group| selected(&[group], &[]).len()).sum();
        assert_eq!(groups, table.iter().count(), "and in one");
        assert_eq!(selected(&["linears"], &[]).len(), 2 * 7);
        let matrices = DecayGroups::default().select(&table).unwrap();
        let is_matrix: Vec<_> = table.iter().map(|param| param.tensor.shape.len() == 2).collect();
        assert_eq!(matrices, is_matrix);
        let down = ["model.layers.0.mlp.down_proj.weight", "model.layers.1.mlp.down_proj.weight"];
        assert_eq!(selected(&["*.down_proj.weight"], &[]), down);
        assert_eq!(
            selected(&["linears", "lm_head.weight"], &["model.layers.*_proj.weight"]),
            ["lm_head.weight"]
        );
        assert_eq!(selected(&["embeddings"], &["embeddings"]), [""; 0]);
    }

    #[test]
    fn factors_of_all_matching_entries_are_multiplied() {
        let scales = |entries: &[(&str, f64)]| {
            RateScales(entries.iter().map(|(name, factor)| ((*name).to_owned(), *factor)).collect())
        };
        let table = table();
        let found = scales(&[("linears", 2.0), ("*.down_proj.weight", 0.25)]).select(&table).unwrap();
        for (param, factor) in table.iter().zip(found) {
            let name = &param.tensor.name;
            let linear = if matches!(param.tensor.role, Role::Linear { .. }) { 2.0 } else { 1.0 };
            let down = if name.contains("down_proj.weight") { 0.25 } else { 1.0 };
            assert_eq!(factor, linear * down, "{name}");
        }
        let error = scales(&[("heads", 0.1)]).select(&table).unwrap_err();
        assert_eq!((error.key, error.name.as_str()), ("lr_scale", "heads"));
    }

    #[test]
    fn names_without_a_tensor_are_reported() {
        let groups = DecayGroups { no_decay: vec!["norm".into()], ..DecayGroups::default() };
        let error = groups.select(&table()).unwrap_err();
        assert_eq!((error.key, error.name.as_str()), ("no_decay", "norm"));
    }

    #[test]
    fn stars_match_any_characters() {
        for (pattern, text, expected) in [
            ("*", "", true),
            ("a*b", "ab", true),
            ("a*b", "aXbXb", true),
            ("a*bc*c", "abcc", true),
            ("a*bc*c", "abc", false),
            ("a*a", "a", false),
            ("**x", "x", true),
            ("a", "ab", false),
        ] {
            assert_eq!(matches(pattern, text), expected, "{pattern} {text}");
        }
    }
}
