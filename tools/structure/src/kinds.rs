//! Branches on the members of a kind outside its home: `match`, `if let` and `matches!` with a variant or a name.

use proc_macro2::{TokenStream, TokenTree};
use syn::Pat;
use syn::visit::{self, Visit};

use crate::architecture::Kind;
use crate::source::{SourceFile, is_test};

/// A branch on a kind: line, and the member that was found.
pub struct Branch {
    pub line: usize,
    pub member: String,
}

/// Branches of a file on the members of a kind.
pub fn branches(file: &SourceFile, kind: &Kind) -> Vec<Branch> {
    let mut finder = Finder { kind, found: Vec::new() };
    file.items.iter().for_each(|item| finder.visit_item(item));
    finder.found
}

struct Finder<'a> {
    kind: &'a Kind,
    found: Vec<Branch>,
}

impl Finder<'_> {
    fn patterns<'p>(&mut self, line: usize, patterns: impl Iterator<Item = &'p Pat>) {
        let mut members = Members { kind: self.kind, found: None };
        patterns.for_each(|pattern| members.visit_pat(pattern));
        self.found.extend(members.found.map(|member| Branch { line, member }));
    }
}

impl<'ast> Visit<'ast> for Finder<'_> {
    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        if !is_test(&item.attrs) {
            visit::visit_item_mod(self, item);
        }
    }

    fn visit_expr_match(&mut self, item: &'ast syn::ExprMatch) {
        let line = item.match_token.span.start().line;
        self.patterns(line, item.arms.iter().map(|arm| &arm.pat));
        visit::visit_expr_match(self, item);
    }

    fn visit_expr_let(&mut self, item: &'ast syn::ExprLet) {
        self.patterns(item.let_token.span.start().line, std::iter::once(&*item.pat));
        visit::visit_expr_let(self, item);
    }

    fn visit_macro(&mut self, call: &'ast syn::Macro) {
        if call.path.is_ident("matches") {
            let line = call.path.segments[0].ident.span().start().line;
            let member = variant_in(call.tokens.clone(), &self.kind.enum_name);
            self.found.extend(member.map(|member| Branch { line, member }));
        }
        visit::visit_macro(self, call);
    }
}

/// Finds the first member of the kind in a pattern.
struct Members<'a> {
    kind: &'a Kind,
    found: Option<String>,
}

impl<'ast> Visit<'ast> for Members<'_> {
    fn visit_path(&mut self, path: &'ast syn::Path) {
        let mut names = path.segments.iter().rev().map(|segment| segment.ident.to_string());
        let (variant, parent) = (names.next(), names.next());
        if let (Some(variant), Some(parent)) = (variant, parent)
            && parent == self.kind.enum_name
        {
            self.found.get_or_insert(format!("{parent}::{variant}"));
        }
    }

    fn visit_lit_str(&mut self, text: &'ast syn::LitStr) {
        if self.kind.names.contains(&text.value()) {
            self.found.get_or_insert(format!("\"{}\"", text.value()));
        }
    }
}

/// Finds `Enum::Variant` in tokens.
fn variant_in(tokens: TokenStream, enum_name: &str) -> Option<String> {
    let tokens: Vec<TokenTree> = tokens.into_iter().collect();
    tokens.iter().enumerate().find_map(|(at, token)| match token {
        TokenTree::Ident(name) if *name == enum_name => match tokens.get(at + 3) {
            Some(TokenTree::Ident(variant)) => Some(format!("{enum_name}::{variant}")),
            _ => None,
        },
        TokenTree::Group(group) => variant_in(group.stream(), enum_name),
        _ => None,
    })
}
