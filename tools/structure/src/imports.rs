//! Imports between the files of a crate.
//!
//! An import is a private `use` or a path in code that leads to another file. Re-exports (`pub use`) and `mod`
//! declarations are none: they are followed to the file that defines the name.

use std::collections::{BTreeMap, BTreeSet};

use proc_macro2::{TokenStream, TokenTree};
use syn::visit::{self, Visit};
use syn::{Item, UseTree, Visibility};

use crate::source::{CrateSources, Module, SourceFile, is_test};

/// Names that each file takes from each other file.
pub type Imports = BTreeMap<Module, BTreeMap<Module, BTreeSet<String>>>;

/// Finds the imports of every file of a crate.
pub fn imports(sources: &CrateSources) -> Imports {
    let names: BTreeMap<&Module, Names> =
        sources.files.iter().map(|(module, file)| (module, Names::of(file))).collect();
    let resolver = Resolver { names: &names };
    let mut found = Imports::new();
    for (module, own) in &names {
        let targets = found.entry((*module).clone()).or_default();
        // A file may name what it re-exports: only private uses and modules count.
        let counts = |used: &&Used| !used.public || used.alias.starts_with(char::is_lowercase);
        let aliases: BTreeMap<&str, Vec<String>> = own
            .uses
            .iter()
            .filter(counts)
            .filter_map(|used| Some((used.alias.as_str(), resolver.absolute(module, &used.path)?)))
            .collect();
        let used = own.uses.iter().filter(|used| !used.public).filter_map(|used| {
            let path = if used.alias == "*" { &used.path[..used.path.len() - 1] } else { &used.path[..] };
            resolver.absolute(module, path)
        });
        let written = own.paths.iter().filter_map(|path| match aliases.get(path[0].as_str()) {
            Some(start) if path.len() > 1 => Some(start.iter().chain(&path[1..]).cloned().collect()),
            _ => resolver.absolute(module, path),
        });
        for path in used.chain(written) {
            if let Some(target) = resolver.file(&path, 0).filter(|target| target != *module) {
                targets.entry(target).or_default().insert(path.last().cloned().unwrap_or_default());
            }
        }
    }
    found
}

struct Used {
    path: Vec<String>,
    /// Name in the importing file; `*` for a glob.
    alias: String,
    public: bool,
}

/// Names that a file declares and uses.
#[derive(Default)]
struct Names {
    uses: Vec<Used>,
    children: BTreeSet<String>,
    defined: BTreeSet<String>,
    /// Paths of two or more segments in code, `self` and `super` of inline modules resolved.
    paths: BTreeSet<Vec<String>>,
}

impl Names {
    fn of(file: &SourceFile) -> Self {
        let mut names = Self::default();
        for item in &file.items {
            match item {
                Item::Use(item) => {
                    let public = !matches!(item.vis, Visibility::Inherited);
                    names.read_tree(&item.tree, &mut Vec::new(), public);
                }
                Item::Mod(item) => {
                    names.children.insert(item.ident.to_string());
                }
                _ => {}
            }
            names.defined.extend(defined(item));
        }
        let mut paths = Paths { inside: 0, found: &mut names.paths };
        file.items.iter().for_each(|item| paths.visit_item(item));
        names
    }

    fn read_tree(&mut self, tree: &UseTree, path: &mut Vec<String>, public: bool) {
        let mut add = |mut path: Vec<String>, name: String, alias: String| {
            if name == "self" {
                let alias = if alias == "self" { path.last().cloned().unwrap_or_default() } else { alias };
                self.uses.push(Used { path, alias, public });
            } else {
                path.push(name);
                self.uses.push(Used { path, alias, public });
            }
        };
        match tree {
            UseTree::Path(next) => {
                path.push(next.ident.to_string());
                self.read_tree(&next.tree, path, public);
                path.pop();
            }
            UseTree::Name(name) => add(path.clone(), name.ident.to_string(), name.ident.to_string()),
            UseTree::Rename(name) => add(path.clone(), name.ident.to_string(), name.rename.to_string()),
            UseTree::Glob(_) => add(path.clone(), "*".to_owned(), "*".to_owned()),
            UseTree::Group(group) => group.items.iter().for_each(|tree| self.read_tree(tree, path, public)),
        }
    }
}

/// Names of the items that an item defines at the top of its file.
fn defined(item: &Item) -> Vec<String> {
    let one = match item {
        Item::Const(item) => &item.ident,
        Item::Enum(item) => &item.ident,
        Item::Fn(item) => &item.sig.ident,
        Item::Static(item) => &item.ident,
        Item::Struct(item) => &item.ident,
        Item::Trait(item) => &item.ident,
        Item::Type(item) => &item.ident,
        Item::Union(item) => &item.ident,
        Item::Macro(item) => return item.ident.iter().map(ToString::to_string).collect(),
        _ => return Vec::new(),
    };
    vec![one.to_string()]
}

/// Collects paths of two or more segments from code.
struct Paths<'a> {
    found: &'a mut BTreeSet<Vec<String>>,
    /// Number of inline modules around the code.
    inside: usize,
}

impl Paths<'_> {
    fn add(&mut self, mut path: Vec<String>) {
        if path.len() < 2 {
            return;
        }
        // A `super` that leaves only an inline module stays in the file.
        for _ in 0..self.inside {
            if path.first().is_some_and(|first| first == "super") {
                path.remove(0);
                if path.first().is_some_and(|first| first != "super") {
                    path.insert(0, "self".to_owned());
                }
            }
        }
        if path.len() > 1 {
            self.found.insert(path);
        }
    }

    /// Paths of a `use` inside code.
    fn uses(&mut self, tree: &UseTree) {
        let mut names = Names::default();
        names.read_tree(tree, &mut Vec::new(), false);
        names.uses.into_iter().for_each(|used| self.add(used.path));
    }

    /// Paths inside a macro call, whose arguments are tokens.
    fn tokens(&mut self, tokens: TokenStream) {
        let mut path: Vec<String> = Vec::new();
        let mut colons = 0;
        for token in tokens {
            match token {
                TokenTree::Ident(ident) => {
                    if colons != 2 {
                        self.add(std::mem::take(&mut path));
                    }
                    path.push(ident.to_string());
                    colons = 0;
                }
                TokenTree::Punct(mark) if mark.as_char() == ':' && !path.is_empty() => colons += 1,
                other => {
                    self.add(std::mem::take(&mut path));
                    colons = 0;
                    if let TokenTree::Group(group) = other {
                        self.tokens(group.stream());
                    }
                }
            }
        }
        self.add(path);
    }
}

impl<'ast> Visit<'ast> for Paths<'_> {
    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        if !is_test(&item.attrs) {
            self.inside += usize::from(item.content.is_some());
            visit::visit_item_mod(self, item);
            self.inside -= usize::from(item.content.is_some());
        }
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        // The top of the file is read apart; a `use` inside a function or an inline module is a path in code.
        if self.inside > 0 {
            self.uses(&item.tree);
        }
    }

    fn visit_stmt(&mut self, statement: &'ast syn::Stmt) {
        if let syn::Stmt::Item(Item::Use(item)) = statement {
            self.uses(&item.tree);
        }
        visit::visit_stmt(self, statement);
    }

    fn visit_impl_item(&mut self, item: &'ast syn::ImplItem) {
        let test = matches!(item, syn::ImplItem::Fn(function) if is_test(&function.attrs));
        if !test {
            visit::visit_impl_item(self, item);
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        self.add(path.segments.iter().map(|segment| segment.ident.to_string()).collect());
        visit::visit_path(self, path);
    }

    fn visit_visibility(&mut self, _: &'ast Visibility) {}

    fn visit_macro(&mut self, call: &'ast syn::Macro) {
        self.tokens(call.tokens.clone());
        visit::visit_macro(self, call);
    }

    fn visit_attribute(&mut self, attribute: &'ast syn::Attribute) {
        if let syn::Meta::List(list) = &attribute.meta {
            self.tokens(list.tokens.clone());
        }
    }
}

struct Resolver<'a> {
    names: &'a BTreeMap<&'a Module, Names>,
}

impl Resolver<'_> {
    /// Path from the crate's root, if the path does not lead to another crate.
    fn absolute(&self, module: &Module, path: &[String]) -> Option<Vec<String>> {
        let first = path.first()?;
        match first.as_str() {
            "crate" => Some(path[1..].to_vec()),
            "self" => Some(module.iter().chain(&path[1..]).cloned().collect()),
            "super" => {
                let ups = path.iter().take_while(|name| *name == "super").count();
                let base = &module[..module.len().checked_sub(ups)?];
                Some(base.iter().chain(&path[ups..]).cloned().collect())
            }
            _ if self.names[module].children.contains(first) => {
                Some(module.iter().chain(path).cloned().collect())
            }
            _ => None,
        }
    }

    /// Module of the file that defines a path from the root.
    fn file(&self, path: &[String], depth: usize) -> Option<Module> {
        // Re-exports of re-exports are few; the limit ends a circle of globs.
        if depth > 8 {
            return None;
        }
        let (module, names) =
            (0..=path.len()).rev().find_map(|end| self.names.get_key_value(&path[..end].to_vec()))?;
        let rest = &path[module.len()..];
        let Some(name) = rest.first().filter(|name| !names.defined.contains(*name)) else {
            return Some((*module).clone());
        };
        let public = || names.uses.iter().filter(|used| used.public);
        if let Some(used) = public().find(|used| used.alias == *name) {
            let target = self.absolute(module, &used.path)?;
            return self.file(&target.iter().chain(&rest[1..]).cloned().collect::<Vec<_>>(), depth + 1);
        }
        let globs = public().filter(|used| used.alias == "*");
        globs
            .filter_map(|used| self.absolute(module, &used.path[..used.path.len() - 1]))
            .find_map(|target| {
                let through: Vec<String> = target.iter().chain(rest).cloned().collect();
                self.defines(&target, name).then(|| self.file(&through, depth + 1)).flatten()
            })
            .or_else(|| Some((*module).clone()))
    }

    /// True if a module defines or re-exports a name.
    fn defines(&self, module: &[String], name: &str) -> bool {
        self.names.get(&module.to_vec()).is_some_and(|names| {
            names.defined.contains(name)
                || names.children.contains(name)
                || names.uses.iter().any(|used| used.public && (used.alias == name || used.alias == "*"))
        })
    }
}
