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

/// Expression. It is no higher than [`DEPTH`], so that walks over it may recurse.
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
        let (node, _) = parser.choice()?;
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
    let recursive = recursive(&rules);
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

/// Tells of each rule whether it refers to itself, or to a rule that does. A rule does not if all rules that it refers to
/// do not: those are found from the rules without references on, in time linear in the size of the grammar.
fn recursive(rules: &BTreeMap<String, Node>) -> BTreeMap<&str, bool> {
    let mut users: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    let mut open = BTreeMap::new();
    let mut ready = Vec::new();
    for (name, node) in rules {
        let mut names = Vec::new();
        references(node, &mut names);
        if names.is_empty() {
            ready.push(name.as_str());
        }
        open.insert(name.as_str(), names.len());
        names.into_iter().for_each(|other| users.entry(other).or_default().push(name));
    }
    let mut recursive: BTreeMap<&str, bool> = rules.keys().map(|name| (name.as_str(), true)).collect();
    while let Some(name) = ready.pop() {
        recursive.insert(name, false);
        for user in users.remove(name).unwrap_or_default() {
            if let Some(left) = open.get_mut(user) {
                *left -= 1;
                if *left == 0 {
                    ready.push(user);
                }
            }
        }
    }
    recursive
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

/// Expression with its height.
type Tall = (Node, usize);

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

    /// Checks the height of an expression.
    fn checked(&self, node: Node, height: usize) -> Result<Tall, GrammarError> {
        if height > DEPTH { Err(self.too_deep()) } else { Ok((node, height)) }
    }

    fn too_deep(&self) -> GrammarError {
        self.fault(&format!("at most {DEPTH} levels of groups and repetitions"))
    }

    fn choice(&mut self) -> Result<Tall, GrammarError> {
        self.depth += 1;
        if self.depth > DEPTH {
            return Err(self.too_deep());
        }
        let (first, mut height) = self.sequence()?;
        let mut all = vec![first];
        while self.take("|") {
            self.space();
            let (next, other) = self.sequence()?;
            height = height.max(other);
            all.push(next);
        }
        self.depth -= 1;
        self.checked(Node::Choice(all), height + 1)
    }

    fn sequence(&mut self) -> Result<Tall, GrammarError> {
        let (mut nodes, mut height) = (Vec::new(), 0);
        loop {
            let rest = self.rest();
            if rest.is_empty() || rest.starts_with(['|', ')']) || self.at_rule() {
                return Ok((Node::Sequence(nodes), height));
            }
            let item = self.item()?;
            self.space();
            let (node, other) = self.repeated(item)?;
            height = height.max(other);
            nodes.push(node);
        }
    }

    fn item(&mut self) -> Result<Tall, GrammarError> {
        if let Some(name) = self.name() {
            return Ok((Node::Rule(name.to_owned()), 0));
        }
        match self.next() {
            Some('"') => {
                let mut text = String::new();
                while !self.take("\"") {
                    text.push(self.character()?);
                }
                Ok((Node::Literal(text), 0))
            }
            Some('[') => Ok((self.class()?, 0)),
            Some('.') => Ok((Node::Class("(?s:.)".into()), 0)),
            Some('(') => {
                self.space();
                let group = self.choice()?;
                if !self.take(")") {
                    return Err(self.fault(")"));
                }
                Ok(group)
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
    fn repeated(&mut self, (mut node, mut height): Tall) -> Result<Tall, GrammarError> {
        loop {
            let (min, max) = match self.rest().chars().next() {
                Some('*') => (0, None),
                Some('+') => (1, None),
                Some('?') => (0, Some(1)),
                Some('{') => self.range()?,
                _ => return Ok((node, height)),
            };
            self.at += 1;
            self.space();
            (node, height) = self.checked(Node::Repeat(Box::new(node), min, max), height + 1)?;
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
    }

    /// Groups and repetitions count together, and nothing recurses beyond their limit.
    #[test]
    fn deep_grammars_are_refused() {
        let deep = [
            ("(".repeat(200), ")".repeat(200)),
            ("(".repeat(100_000), String::new()),
            (String::new(), "*".repeat(20_000)),
            (String::new(), "?".repeat(250_000)),
            (String::new(), "{1}".repeat(60_000)),
            (String::new(), "+ ".repeat(101)),
            ("(".repeat(60), ")?".repeat(60)),
        ];
        for (before, after) in deep {
            let error = to_lark(&format!("root ::= {before}\"a\"{after}")).err();
            let error = error.unwrap_or_else(|| panic!("{} {}", before.len(), after.len()));
            assert!(error.to_string().contains("at most 100 levels"), "{error}");
        }
        assert!(to_lark(&format!("root ::= \"a\"{}", "*".repeat(90))).is_ok());
        assert!(to_lark(&format!("root ::= {}\"a\"{}", "(".repeat(40), ")?".repeat(40))).is_ok());
    }

    /// Translation takes time linear in the size of the grammar.
    #[test]
    fn chains_of_rules_are_translated_at_once() {
        let chain = |rules: usize, last: &str| {
            let mut text = String::from("root ::= a0\n");
            for i in 0..rules {
                let _ = writeln!(text, "a{i} ::= \"x\" a{}", i + 1);
            }
            let _ = writeln!(text, "a{rules} ::= {last}");
            text
        };
        let begin = std::time::Instant::now();
        let flat = to_lark(&chain(20_000, "\"y\"")).unwrap();
        assert!(flat.starts_with("start: T_ROOT\n"));
        // All reach the rule that refers to itself.
        let recursive = to_lark(&chain(20_000, "\"y\" a20000?")).unwrap();
        assert!(recursive.starts_with("start: r_root\n") && !recursive.contains("T_"));
        assert!(begin.elapsed().as_secs() < 5, "{:?}", begin.elapsed());
    }
}
