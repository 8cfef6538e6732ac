//! Known names nearest to a misspelt one, for error messages.

use strsim::damerau_levenshtein;

/// Maximum number of names in a message.
const MOST: usize = 5;

/// Returns up to five of `names`, the nearest to `got` by edit distance (Damerau-Levenshtein, regardless of case) first.
///
/// A name is also compared with the leading parts of `got`, so that `int9-g32` is near `int8`.
pub fn nearest<'a>(got: &str, names: impl IntoIterator<Item = &'a str>) -> Vec<&'a str> {
    // Longer texts are no misspelt names; the distance takes time in proportion to the product of the lengths.
    let got: String = got.to_lowercase().chars().take(80).collect();
    let distance = |name: &str| {
        let hyphens = name.matches('-').count();
        let whole = damerau_levenshtein(&got, name);
        let leading = got.match_indices('-').nth(hyphens).map(|(end, _)| &got[..end]);
        // A text with more parts than the name is a little further away than one without.
        leading.map_or(whole, |part| whole.min(damerau_levenshtein(part, name) + 1))
    };
    let mut found: Vec<(usize, &str)> = Vec::new();
    for name in names {
        if found.iter().all(|(_, known)| *known != name) {
            found.push((distance(name), name));
        }
    }
    // The sort is stable: equally near names keep their order.
    found.sort_by_key(|(distance, _)| *distance);
    found.into_iter().take(MOST).map(|(_, name)| name).collect()
}

/// Returns the [`nearest`] names as a list for a message: `int8, int4 or int2`.
pub fn nearest_list<'a>(got: &str, names: impl IntoIterator<Item = &'a str>) -> String {
    let found = nearest(got, names);
    match found.as_slice() {
        [others @ .., last] if !others.is_empty() => format!("{} or {last}", others.join(", ")),
        single => single.concat(),
    }
}

/// Returns the [`nearest`] names as a list for a message, with the command that lists all where there are more.
pub fn listed<'a>(got: &str, names: impl IntoIterator<Item = &'a str>, command: &str) -> String {
    let names: Vec<&str> = names.into_iter().collect();
    let (more, near) = (names.len() > MOST, nearest_list(got, names));
    if more { format!("{near} ({command} lists all)") } else { near }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAMES: [&str; 7] = ["gptq", "gptaq", "rtn", "awq", "fp8-e4m3", "fp8-e5m2", "int8"];

    #[test]
    fn the_nearest_come_first_and_five_at_most() {
        assert_eq!(nearest("gpqt", NAMES)[0], "gptq");
        assert_eq!(nearest("GPTQ", NAMES)[0], "gptq");
        assert_eq!(nearest("fp8-e4m2", NAMES)[..2], ["fp8-e4m3", "fp8-e5m2"]);
        assert_eq!(nearest("nothing like any of them", NAMES).len(), MOST);
        assert_eq!(nearest("rtn", ["rtn", "rtn"]), ["rtn"]);
    }

    #[test]
    fn leading_parts_are_compared_with_shorter_names() {
        assert_eq!(nearest("int9-g32", NAMES)[0], "int8");
        assert_eq!(nearest("fp8-e4m9-channel", NAMES)[0], "fp8-e4m3");
    }

    #[test]
    fn a_command_lists_what_a_message_does_not() {
        assert_eq!(listed("awk", ["awq", "rtn"], "mantissa recipes"), "awq or rtn");
        let found = listed("awk", NAMES, "mantissa recipes");
        assert_eq!(found, "awq, rtn, gptq, int8 or gptaq (mantissa recipes lists all)");
    }

    #[test]
    fn lists_read_as_a_sentence() {
        assert_eq!(nearest_list("awk", ["awq", "rtn"]), "awq or rtn");
        assert_eq!(nearest_list("awk", ["awq"]), "awq");
        assert_eq!(nearest_list("ärger-µ-ß", []), "");
    }
}
