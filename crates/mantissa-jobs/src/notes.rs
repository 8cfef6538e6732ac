//! Notes on single layers, merged where many layers have the same one.

use std::fmt;

/// Distinct values of a number that are listed; more are given as a range.
const LISTED: usize = 3;

/// Notes of many layers that differ only in their numbers.
pub struct Kind<'a> {
    first: &'a str,
    /// Changes `q5_0 instead of q4_k` with the number of layers, in the order of their first layers; empty for a note
    /// that names none.
    changes: Vec<(&'a str, usize)>,
    /// Words of the reason, each with its distinct values.
    words: Vec<Vec<&'a str>>,
    count: usize,
}

impl<'a> Kind<'a> {
    fn new(module: &'a str, note: &'a str) -> Self {
        let words = words(note).map(|word| vec![word]).collect();
        Kind { first: module, changes: Vec::new(), words, count: 0 }
    }

    /// True if `note` has the same words except for numbers.
    fn takes(&self, note: &str) -> bool {
        let alike = |of_kind: &Vec<&str>, word: &str| shape(of_kind[0]) == shape(word);
        self.words.len() == words(note).count()
            && self.words.iter().zip(words(note)).all(|(of_kind, word)| alike(of_kind, word))
    }

    fn add(&mut self, note: &'a str) {
        self.count += 1;
        if let Some((change, _)) = split(note) {
            match self.changes.iter_mut().find(|(other, _)| *other == change) {
                Some((_, count)) => *count += 1,
                None => self.changes.push((change, 1)),
            }
        }
        for (values, word) in self.words.iter_mut().zip(words(note)) {
            if !values.contains(&word) {
                values.push(word);
            }
        }
    }
}

impl fmt::Display for Kind<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.changes.as_slice() {
            [] => {}
            [(change, _)] => write!(f, "{change}: ")?,
            several => {
                let each: Vec<_> = several.iter().map(|(change, n)| format!("{n} {change}")).collect();
                write!(f, "{}: ", each.join(", "))?;
            }
        }
        let reason: Vec<_> = self.words.iter().map(|values| values_of(values)).collect();
        write!(f, "{} (first: {})", reason.join(" "), self.first)
    }
}

/// Splits `q5_0 instead of q4_k: rows …` into the change and its reason.
fn split(note: &str) -> Option<(&str, &str)> {
    note.split_once(": ").filter(|(change, _)| change.contains(" instead of "))
}

/// Returns the words of the reason of a note.
fn words(note: &str) -> impl Iterator<Item = &str> {
    split(note).map_or(note, |(_, reason)| reason).split(' ')
}

/// Returns the part of a word that merged notes have in common: all but its number.
fn shape(word: &str) -> &str {
    if word.starts_with(|c: char| c.is_ascii_digit()) {
        word.trim_start_matches(|c: char| c.is_ascii_digit() || c == '.')
    } else {
        word
    }
}

/// Lists the values of a word: `128 and 352`, or `64 to 4096` where there are many.
fn values_of(values: &[&str]) -> String {
    let number = |word: &&&str| word.trim_end_matches(|c: char| !c.is_ascii_digit()).parse().unwrap_or(0.0);
    let by_number = |a: &&&str, b: &&&str| f64::total_cmp(&number(a), &number(b));
    match values {
        [one] => (*one).to_owned(),
        [others @ .., last] if values.len() <= LISTED => format!("{} and {last}", others.join(", ")),
        many => {
            let (least, most) = (many.iter().min_by(by_number), many.iter().max_by(by_number));
            format!("{} to {}", least.unwrap_or(&""), most.unwrap_or(&""))
        }
    }
}

/// Merges the notes of modules into kinds, in the order of their first layers.
pub fn kinds<'a>(notes: impl Iterator<Item = (&'a str, &'a str)>) -> Vec<Kind<'a>> {
    let mut kinds: Vec<Kind<'a>> = Vec::new();
    for (module, note) in notes {
        let at = kinds.iter().position(|kind| kind.takes(note)).unwrap_or_else(|| {
            kinds.push(Kind::new(module, note));
            kinds.len() - 1
        });
        kinds[at].add(note);
    }
    kinds
}

/// Merges notes `MODULE: NOTE` of at least two modules, and keeps the others.
pub fn merged(notes: &[String]) -> Vec<String> {
    let of_module = |note: &'_ String| -> Option<(String, String)> {
        let (module, text) = note.split_once(": ")?;
        let named = module.contains(".layers.") && !module.contains([' ', '/']);
        named.then(|| (module.to_owned(), text.to_owned()))
    };
    let parts: Vec<_> = notes.iter().map(of_module).collect();
    let kinds = kinds(parts.iter().flatten().map(|(module, text)| (module.as_str(), text.as_str())));
    let mut told = vec![false; kinds.len()];
    let mut all = Vec::new();
    for (note, part) in notes.iter().zip(&parts) {
        let kind = part.as_ref().and_then(|(_, text)| kinds.iter().position(|kind| kind.takes(text)));
        match kind.filter(|&kind| kinds[kind].count > 1) {
            None => all.push(note.clone()),
            Some(kind) if !std::mem::replace(&mut told[kind], true) => {
                all.push(format!("{} layers: {}", kinds[kind].count, kinds[kind]));
            }
            Some(_) => {}
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn notes(lines: &[&str]) -> Vec<String> {
        merged(&lines.iter().map(|line| (*line).to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn notes_that_differ_in_numbers_are_merged() {
        let found = notes(&[
            "m.layers.0.q: q5_0 instead of q4_k: rows of 128 are not multiples of 256",
            "note of the model",
            "m.layers.0.v: q8_0 instead of q6_k: rows of 352 are not multiples of 256",
            "m.layers.1.q: q5_0 instead of q4_k: rows of 128 are not multiples of 256",
        ]);
        let layers = "3 layers: 2 q5_0 instead of q4_k, 1 q8_0 instead of q6_k: rows of 128 and 352 are not multiples of 256 (first: m.layers.0.q)";
        assert_eq!(found, [layers, "note of the model"]);
    }

    #[test]
    fn many_values_are_a_range_and_other_reasons_stay_apart() {
        let found = notes(&[
            "m.layers.0.q: rtn instead of gptq: error 1.2 × that of RTN",
            "m.layers.1.q: rtn instead of gptq: error 1.01 × that of RTN",
            "m.layers.2.q: rtn instead of gptq: error 10.5 × that of RTN",
            "m.layers.3.q: rtn instead of gptq: error 3 × that of RTN",
            "m.layers.4.q: rtn instead of gptq: no activation reached it",
            "lm_head: rtn instead of gptq: no activation reached it",
        ]);
        let merged = "4 layers: rtn instead of gptq: error 1.01 to 10.5 × that of RTN (first: m.layers.0.q)";
        assert_eq!(found[0], merged);
        assert_eq!(found.len(), 3);
    }
}
