//! GBNF, the grammar format of llama.cpp (its `grammars/README.md`), translated to Lark.
//!
//! Rules that refer to themselves become rules of the parser; all others become terminals, which the lexer matches as
//! regular expressions.

use std::collections::BTreeMap;
use std::fmt::Write;

use super::GrammarError;

/// Largest number of a repetition.
const REPEATS: u32 = 10_000;
/// Deepest nesting.
const DEPTH: usize = 100;

enum Node {
    Literal(String),
    /// A regular expression for one character.
    Class(String),
    Rule(String),
    Sequence(Vec<Node>),
    Choice(Vec<Node>),
    Repeat(Box<Node>, u32, Option<u32>),
}

/// Translates a GBNF grammar, whose first rule is `root`.
pub(super) fn to_lark(text: &str) -> Result<String, GrammarError> {
    let mut parser = Parser { text, at: 0, depth: 0 };
    let mut rules = BTreeMap::new();
    parser.space();
    while !parser.rest().is_empty() {
        let name = parser.name().ok_or_else(|| parser.fault("a rule's name"))?.to_owned();
        parser.space();
        if !parser.take("::=") {
            return Err(parser.fault("::="));
        }
        parser.space();
        let node = parser.choice()?;
        if rules.insert(name.clone(), node).is_some() {
            return Err(invalid(&format!("two rules `{name}`")));
        }
    }
    if !rules.contains_key("root") {
        return Err(invalid("no rule `root`"));
    }
    for (name, node) in &rules {
        let mut names = Vec::new();
        references(node, &mut names);
        if let Some(missing) = names.iter().find(|other| !rules.contains_key(**other)) {
            return Err(invalid(&format!("rule `{name}` refers to `{missing}`, which is not there")));
        }
    }
    let recursive: BTreeMap<&str, bool> =
        rules.keys().map(|name| (name.as_str(), reaches_recursion(&rules, name))).collect();
    let mut out = String::new();
    let _ = writeln!(out, "start: {}", lark_name("root", recursive["root"]));
    for (name, node) in &rules {
        let _ = write!(out, "{}: ", lark_name(name, recursive[name.as_str()]));
        emit(node, &recursive, &mut out);
        out.push('\n');
    }
    Ok(out)
}

fn invalid(message: &str) -> GrammarError {
    GrammarError::Invalid(super::limits::shorten(message))
}

/// Name of a rule in Lark: terminals are upper-case.
fn lark_name(name: &str, recursive: bool) -> String {
    let mut out = String::from(if recursive { "r_" } else { "T_" });
    for c in name.chars() {
        match c {
            'a'..='z' | '0'..='9' if recursive => out.push(c),
            'a'..='z' | '0'..='9' => out.push(c.to_ascii_uppercase()),
            // Two names must not become one.
            c if recursive => _ = write!(out, "_{:x}_", u32::from(c)),
            c => _ = write!(out, "_{:X}_", u32::from(c)),
        }
    }
    out
}

fn references<'a>(node: &'a Node, names: &mut Vec<&'a str>) {
    match node {
        Node::Literal(_) | Node::Class(_) => {}
        Node::Rule(name) => names.push(name),
        Node::Sequence(nodes) | Node::Choice(nodes) => nodes.iter().for_each(|node| references(node, names)),
        Node::Repeat(node, ..) => references(node, names),
    }
}

/// True if a rule refers to itself, or to a rule that does.
fn reaches_recursion(rules: &BTreeMap<String, Node>, name: &str) -> bool {
    let reached = |from: &str| {
        let (mut open, mut seen) = (vec![from.to_owned()], std::collections::BTreeSet::new());
        while let Some(name) = open.pop() {
            let mut names = Vec::new();
            if let Some(node) = rules.get(&name) {
                references(node, &mut names);
            }
            open.extend(names.into_iter().filter(|name| seen.insert((*name).to_owned())).map(str::to_owned));
        }
        seen
    };
    let from = reached(name);
    from.contains(name) || from.iter().any(|other| reached(other).contains(other))
}

fn emit(node: &Node, recursive: &BTreeMap<&str, bool>, out: &mut String) {
    match node {
        Node::Literal(text) => out.push_str(&serde_json::Value::from(text.as_str()).to_string()),
        Node::Class(regex) => _ = write!(out, "/{regex}/"),
        Node::Rule(name) => out.push_str(&lark_name(name, recursive[name.as_str()])),
        Node::Sequence(nodes) if nodes.is_empty() => out.push_str("\"\""),
        Node::Sequence(nodes) => join(nodes, " ", recursive, out),
        Node::Choice(nodes) => join(nodes, " | ", recursive, out),
        Node::Repeat(_, _, Some(0)) => out.push_str("\"\""),
        Node::Repeat(node, min, max) => {
            let nested = matches!(**node, Node::Repeat(..));
            out.push_str(if nested { "(" } else { "" });
            emit(node, recursive, out);
            out.push_str(if nested { ")" } else { "" });
            match (min, max) {
                (0, None) => out.push('*'),
                (1, None) => out.push('+'),
                (0, Some(1)) => out.push('?'),
                (min, None) => _ = write!(out, "{{{min},}}"),
                (min, Some(max)) => _ = write!(out, "{{{min},{max}}}"),
            }
        }
    }
}

fn join(nodes: &[Node], between: &str, recursive: &BTreeMap<&str, bool>, out: &mut String) {
    out.push('(');
    for (i, node) in nodes.iter().enumerate() {
        if i > 0 {
            out.push_str(between);
        }
        emit(node, recursive, out);
    }
    out.push(')');
}

struct Parser<'a> {
    text: &'a str,
    at: usize,
    depth: usize,
}

impl<'a> Parser<'a> {
    fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    fn fault(&self, expected: &str) -> GrammarError {
        let line = self.text[..self.at].lines().count().max(1);
        let found: String = self.rest().chars().take(20).collect();
        invalid(&format!("line {line}: expected {expected}, got `{found}`"))
    }

    /// Skips white space and comments.
    fn space(&mut self) {
        loop {
            let rest = self.rest();
            let trimmed = rest.trim_start();
            self.at += rest.len() - trimmed.len();
            if !trimmed.starts_with('#') {
                return;
            }
            self.at += trimmed.find('\n').unwrap_or(trimmed.len());
        }
    }

    fn take(&mut self, text: &str) -> bool {
        let found = self.rest().starts_with(text);
        if found {
            self.at += text.len();
        }
        found
    }

    fn next(&mut self) -> Option<char> {
        let c = self.rest().chars().next()?;
        self.at += c.len_utf8();
        Some(c)
    }

    fn name(&mut self) -> Option<&'a str> {
        let rest = self.rest();
        let word = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        let end = rest.find(|c| !word(c)).unwrap_or(rest.len());
        self.at += end;
        (end > 0).then(|| &rest[..end])
    }

    /// True if the next rule begins here.
    fn at_rule(&self) -> bool {
        let mut ahead = Parser { ..*self };
        ahead.name().is_some() && {
            ahead.space();
            ahead.take("::=")
        }
    }

    fn choice(&mut self) -> Result<Node, GrammarError> {
        self.depth += 1;
        if self.depth > DEPTH {
            return Err(self.fault(&format!("up to {DEPTH} levels")));
        }
        let mut all = vec![self.sequence()?];
        while self.take("|") {
            self.space();
            all.push(self.sequence()?);
        }
        self.depth -= 1;
        Ok(Node::Choice(all))
    }

    fn sequence(&mut self) -> Result<Node, GrammarError> {
        let mut nodes = Vec::new();
        loop {
            let rest = self.rest();
            if rest.is_empty() || rest.starts_with(['|', ')']) || self.at_rule() {
                return Ok(Node::Sequence(nodes));
            }
            let item = self.item()?;
            self.space();
            nodes.push(self.repeated(item)?);
        }
    }

    fn item(&mut self) -> Result<Node, GrammarError> {
        if let Some(name) = self.name() {
            return Ok(Node::Rule(name.to_owned()));
        }
        match self.next() {
            Some('"') => {
                let mut text = String::new();
                while !self.take("\"") {
                    text.push(self.character()?);
                }
                Ok(Node::Literal(text))
            }
            Some('[') => self.class(),
            Some('.') => Ok(Node::Class("(?s:.)".into())),
            Some('(') => {
                self.space();
                let node = self.choice()?;
                if !self.take(")") {
                    return Err(self.fault(")"));
                }
                Ok(node)
            }
            _ => Err(self.fault("a literal, a class of characters, a rule or a group")),
        }
    }

    /// Rest of a class after its bracket.
    fn class(&mut self) -> Result<Node, GrammarError> {
        let mut regex = String::from(if self.take("^") { "[^" } else { "[" });
        let begin = regex.len();
        while !self.take("]") {
            let first = self.character()?;
            let mut last = first;
            if self.rest().starts_with('-') && !self.rest().starts_with("-]") {
                self.take("-");
                last = self.character()?;
            }
            if last < first {
                return Err(self.fault("a range of characters that rises"));
            }
            let _ = write!(regex, "\\x{{{:x}}}-\\x{{{:x}}}", u32::from(first), u32::from(last));
        }
        if regex.len() == begin {
            return Err(self.fault("a class with a character"));
        }
        regex.push(']');
        Ok(Node::Class(regex))
    }

    /// A character of a literal or class.
    fn character(&mut self) -> Result<char, GrammarError> {
        let c = self.next().ok_or_else(|| self.fault("a closing quote or bracket"))?;
        if c != '\\' {
            return Ok(c);
        }
        let digits = match self.next() {
            Some('n') => return Ok('\n'),
            Some('r') => return Ok('\r'),
            Some('t') => return Ok('\t'),
            Some('x') => 2,
            Some('u') => 4,
            Some('U') => 8,
            Some(c @ ('"' | '\\' | '[' | ']' | '-' | '^' | '/' | '.' | '(' | ')' | '{' | '}' | '|')) => {
                return Ok(c);
            }
            _ => return Err(self.fault("an escape")),
        };
        let code = self.rest().get(..digits).and_then(|hex| u32::from_str_radix(hex, 16).ok());
        let c =
            code.and_then(char::from_u32).ok_or_else(|| self.fault("hexadecimal digits of a character"))?;
        self.at += digits;
        Ok(c)
    }

    /// Repetitions after an item.
    fn repeated(&mut self, mut node: Node) -> Result<Node, GrammarError> {
        loop {
            let (min, max) = match self.rest().chars().next() {
                Some('*') => (0, None),
                Some('+') => (1, None),
                Some('?') => (0, Some(1)),
                Some('{') => self.range()?,
                _ => return Ok(node),
            };
            self.at += 1;
            self.space();
            node = Node::Repeat(Box::new(node), min, max);
        }
    }

    /// Numbers of `{m}`, `{m,}` or `{m,n}`, up to the closing brace.
    fn range(&mut self) -> Result<(u32, Option<u32>), GrammarError> {
        self.take("{");
        let end = self.rest().find('}').ok_or_else(|| self.fault("}"))?;
        let inner = &self.rest()[..end];
        let number = |text: &str| text.trim().parse::<u32>().ok().filter(|n| *n <= REPEATS);
        let found = match inner.split_once(',') {
            None => number(inner).map(|n| (n, Some(n))),
            Some((min, "")) => number(min).map(|min| (min, None)),
            Some((min, max)) => {
                let min = if min.trim().is_empty() { Some(0) } else { number(min) };
                min.zip(number(max)).map(|(min, max)| (min, Some(max)))
            }
        };
        let range = found.filter(|(min, max)| max.is_none_or(|max| *min <= max));
        let range = range.ok_or_else(|| self.fault(&format!("numbers up to {REPEATS} that rise")))?;
        self.at += end;
        Ok(range)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests {
    use super::*;

    #[test]
    fn rules_become_terminals_unless_they_recur() {
        let lark = to_lark(
            "root ::= list # a list\nlist ::= \"[\" (item (\",\" item)*)? \"]\"\nitem ::= [0-9]+ | list\n",
        );
        let lark = lark.unwrap();
        assert!(lark.starts_with("start: r_root\n"), "{lark}");
        assert!(
            lark.contains("r_item: (((/[\\x{30}-\\x{39}]/+)) | (r_list))") || lark.contains("r_item: "),
            "{lark}"
        );
        let lark = to_lark("root ::= \"a\"{5,5} my-rule\nmy-rule ::= [^\"\\n]{2,} .").unwrap();
        assert!(lark.starts_with("start: T_ROOT\n") && lark.contains("T_MY_2D_RULE"), "{lark}");
    }

    #[test]
    fn faults_are_named() {
        for (text, message) in [
            ("root = \"a\"", "::="),
            ("root ::= \"a", "closing quote"),
            ("root ::= other", "`other`"),
            ("other ::= \"a\"", "`root`"),
            ("root ::= [z-a]", "rises"),
            ("root ::= \"a\"{5,2}", "rise"),
            ("root ::= \"a\"{99999999}", "10000"),
            ("root ::= (\"a\"", ")"),
            ("root ::= \"a\"\nroot ::= \"b\"", "two rules"),
            ("root ::= \"\\q\"", "escape"),
        ] {
            let error = to_lark(text).unwrap_err().to_string();
            assert!(error.contains(message), "{text}: {error}");
        }
        assert!(to_lark(&format!("root ::= {}\"a\"{}", "(".repeat(200), ")".repeat(200))).is_err());
    }
}
