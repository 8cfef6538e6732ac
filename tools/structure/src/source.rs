//! Modules of a crate: parsed files reached from its root, without test code.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use syn::{Attribute, Item};

/// Path of a module inside its crate; empty for the root.
pub type Module = Vec<String>;

/// One parsed source file.
pub struct SourceFile {
    pub path: PathBuf,
    pub text: String,
    pub items: Vec<Item>,
}

/// Source files of one crate by module.
pub struct CrateSources {
    pub name: String,
    pub directory: PathBuf,
    pub files: BTreeMap<Module, SourceFile>,
}

impl CrateSources {
    /// Reads the crate in `directory` by following `mod` declarations from `src/lib.rs` and `src/main.rs`.
    pub fn read(directory: &Path) -> Result<Self> {
        let name = directory.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let mut sources = Self { name, directory: directory.to_owned(), files: BTreeMap::new() };
        for root in ["src/lib.rs", "src/main.rs"].map(|root| directory.join(root)) {
            if root.is_file() {
                sources.add(&Vec::new(), &root, &directory.join("src"))?;
            }
        }
        Ok(sources)
    }

    /// Path of a module's file relative to the crate, without `src/`, for messages.
    pub fn show(&self, module: &Module) -> String {
        let path = &self.files[module].path;
        let inside = path.strip_prefix(self.directory.join("src")).unwrap_or(path);
        inside.display().to_string()
    }

    fn add(&mut self, module: &Module, path: &Path, children: &Path) -> Result<()> {
        let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        let file = syn::parse_file(&text).with_context(|| format!("cannot parse {}", path.display()))?;
        let items: Vec<Item> = file.items.into_iter().filter(|item| !is_test(attributes(item))).collect();
        let declared: Vec<(String, Option<String>)> = items
            .iter()
            .filter_map(|item| match item {
                Item::Mod(declared) if declared.content.is_none() => {
                    Some((declared.ident.to_string(), path_attribute(&declared.attrs)))
                }
                _ => None,
            })
            .collect();
        self.files.insert(module.clone(), SourceFile { path: path.to_owned(), text, items });
        for (child, named) in declared {
            let beside = path.parent().unwrap_or(children);
            let candidates = match named {
                Some(name) => vec![beside.join(name)],
                None => vec![children.join(format!("{child}.rs")), children.join(&child).join("mod.rs")],
            };
            let Some(found) = candidates.iter().find(|candidate| candidate.is_file()) else { continue };
            let inside: Module = module.iter().chain([&child]).cloned().collect();
            self.add(&inside, found, &children.join(&child))?;
        }
        Ok(())
    }
}

/// True for `#[test]` and for `#[cfg(…)]` that names `test` without `not`.
pub fn is_test(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        if attribute.path().is_ident("test") {
            return true;
        }
        let syn::Meta::List(list) = &attribute.meta else { return false };
        let words = list.tokens.to_string();
        let has =
            |word: &str| words.split(|c: char| !c.is_alphanumeric() && c != '_').any(|found| found == word);
        attribute.path().is_ident("cfg") && has("test") && !has("not") && !has("any")
    })
}

/// Attributes of an item.
pub fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::ExternCrate(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::ForeignMod(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::TraitAlias(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Union(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

fn path_attribute(attributes: &[Attribute]) -> Option<String> {
    attributes.iter().find_map(|attribute| match &attribute.meta {
        syn::Meta::NameValue(pair) if pair.path.is_ident("path") => match &pair.value {
            syn::Expr::Lit(syn::ExprLit { lit: syn::Lit::Str(text), .. }) => Some(text.value()),
            _ => None,
        },
        _ => None,
    })
}
