//! Lengths of files and functions.

use proc_macro2::Span;
use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use syn::{Block, Item, Signature};

use crate::source::{SourceFile, is_test};

/// Most lines of a file that is no table.
pub const FILE: usize = 600;
/// Most lines of a function.
pub const FUNCTION: usize = 100;
/// Share of a table's lines that are constants, in percent.
const TABLE: usize = 75;

/// Problems of a file: its own length, and functions that are too long.
pub fn too_long(file: &SourceFile) -> Vec<String> {
    let lines = file.text.lines().count();
    let constants: usize = file
        .items
        .iter()
        .filter(|item| matches!(item, Item::Const(_) | Item::Static(_)))
        .map(|item| length(item.span()))
        .sum();
    let mut problems = Vec::new();
    if lines > FILE && constants * 100 < lines * TABLE {
        problems.push(format!("expected at most {FILE} lines, got {lines}"));
    }
    let mut functions = Functions { problems: &mut problems };
    file.items.iter().for_each(|item| functions.visit_item(item));
    problems
}

fn length(span: Span) -> usize {
    span.end().line - span.start().line + 1
}

struct Functions<'a> {
    problems: &'a mut Vec<String>,
}

impl Functions<'_> {
    fn check(&mut self, signature: &Signature, block: &Block) {
        let lines = block.span().end().line - signature.fn_token.span.start().line + 1;
        if lines > FUNCTION {
            let name = &signature.ident;
            self.problems.push(format!("fn {name}: expected at most {FUNCTION} lines, got {lines}"));
        }
    }
}

impl<'ast> Visit<'ast> for Functions<'_> {
    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        if !is_test(&item.attrs) {
            visit::visit_item_mod(self, item);
        }
    }

    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        self.check(&item.sig, &item.block);
        visit::visit_item_fn(self, item);
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        self.check(&item.sig, &item.block);
        visit::visit_impl_item_fn(self, item);
    }

    fn visit_trait_item_fn(&mut self, item: &'ast syn::TraitItemFn) {
        if let Some(block) = &item.default {
            self.check(&item.sig, block);
        }
        visit::visit_trait_item_fn(self, item);
    }
}
