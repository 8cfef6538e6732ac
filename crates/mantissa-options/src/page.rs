//! Tables of a settings file as TOML with comments, for `--init` and reference pages.

use crate::faults::dotted;
use crate::key::Key;

/// Column of the comments behind keys and values.
const COMMENT: usize = 34;

/// Table of a settings file.
#[derive(Clone, Debug)]
pub struct Section {
    /// Name of the table; empty for the keys before all tables.
    pub name: &'static str,
    /// Remark behind its header.
    pub about: &'static str,
    /// Keys in the order in which they are printed.
    pub keys: Vec<Key>,
}

/// Lists the tables of a settings file with these keys: the keys before all tables first.
pub fn sections(keys: Vec<Key>) -> Vec<Section> {
    let mut all = vec![Section { name: "", about: "", keys: Vec::new() }];
    for key in keys {
        match key.subkeys {
            Some(subkeys) => all.push(Section { name: key.name, about: subkeys.about, keys: subkeys.keys }),
            None => all[0].keys.push(key),
        }
    }
    all
}

impl Section {
    /// Prints the table as TOML with comments. Keys have the values of `chosen`, else their defaults; keys without either
    /// and keys of `left_out` are commented out with an example. Both name keys by path.
    pub fn print(&self, chosen: &[(&str, String)], left_out: &[&str]) -> String {
        let mut text = match (self.name, self.about) {
            ("", _) => String::new(),
            (name, "") => format!("[{name}]\n"),
            (name, about) => format!("{:COMMENT$}# {about}\n", format!("[{name}]")),
        };
        for key in self.keys.iter().filter(|key| !key.note.hidden && !key.note.retired) {
            let path = dotted(self.name, key.name);
            let value = chosen.iter().find(|(chosen, _)| *chosen == path).map(|(_, value)| &**value);
            text += &line(key, value, left_out.contains(&&*path));
        }
        text
    }
}

/// Prints a key with a value, or with the one that pages show: commented out where it has no default or is left out.
fn line(key: &Key, value: Option<&str>, left_out: bool) -> String {
    let mark = if value.is_none() && (left_out || key.is_unset()) { "# " } else { "" };
    let shown = format!("{mark}{} = {}", key.name, value.unwrap_or_else(|| key.shown()));
    match shown.len() < COMMENT {
        true => format!("{shown:COMMENT$}# {}\n", key.help),
        false => format!("{shown} # {}\n", key.help),
    }
}
