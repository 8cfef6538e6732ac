//! The order of modules that a crate's root declares.
//!
//! `mod` lines of `lib.rs` or `main.rs` stand in groups under a comment `// Layer: …`, lowest first; a module uses
//! modules of its own layer and of layers before it.

use std::collections::BTreeMap;

use crate::imports::Imports;
use crate::source::{CrateSources, Module};

/// Start of the comment above a layer.
const MARK: &str = "// Layer: ";

/// Layer of each module of the root, by position, and the layers' names.
pub struct Layers {
    names: Vec<String>,
    of: BTreeMap<String, usize>,
}

impl Layers {
    /// Reads the layers of a crate; none if its root declares no order.
    pub fn read(sources: &CrateSources) -> Option<Self> {
        let text = &sources.files.get(&Module::new())?.text;
        let mut layers = Self { names: Vec::new(), of: BTreeMap::new() };
        for line in text.lines() {
            if let Some(name) = line.strip_prefix(MARK) {
                layers.names.push(name.trim_end_matches('.').to_owned());
            }
            let Some(layer) = layers.names.len().checked_sub(1) else { continue };
            let declared = line.rsplit_once("mod ").and_then(|(_, rest)| rest.strip_suffix(';'));
            if let Some(module) = declared.filter(|_| line.starts_with("mod ") || line.starts_with("pub")) {
                layers.of.insert(module.to_owned(), layer);
            }
        }
        (!layers.names.is_empty()).then_some(layers)
    }

    /// Imports of a module from a layer above its own, as messages.
    pub fn upward(&self, sources: &CrateSources, imports: &Imports) -> Vec<String> {
        let layer = |module: &Module| module.first().and_then(|top| self.of.get(top)).copied();
        let mut found = Vec::new();
        for (from, targets) in imports {
            for (to, names) in targets {
                if let (Some(low), Some(high)) = (layer(from), layer(to))
                    && low < high
                {
                    let names: Vec<&str> = names.iter().map(String::as_str).collect();
                    found.push(format!(
                        "{}: layer \"{}\" imports {} of {} from layer \"{}\" above it",
                        sources.show(from),
                        self.names[low],
                        names.join(", "),
                        sources.show(to),
                        self.names[high],
                    ));
                }
            }
        }
        found
    }

    /// Modules of the root that stand in no layer.
    pub fn unplaced(&self, sources: &CrateSources) -> Vec<String> {
        let tops = sources.files.keys().filter(|module| module.len() == 1).map(|module| &module[0]);
        tops.filter(|top| !self.of.contains_key(*top))
            .map(|top| format!("{top}: the root places it in no layer"))
            .collect()
    }
}
