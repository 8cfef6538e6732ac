//! Stop strings, which may lie across several tokens.

/// Looks for stop strings in a growing text; holds back an end that may be the beginning of one.
#[derive(Clone, Debug)]
pub(crate) struct Stops {
    stops: Vec<String>,
    held: String,
    found: Option<usize>,
}

impl Stops {
    /// Creates a search for `stops`, none of them empty.
    pub(crate) fn new(stops: Vec<String>) -> Self {
        Stops { stops, held: String::new(), found: None }
    }

    /// Adds `text`. Returns the text that no stop string can cut any more, and true if one was found after it; nothing may
    /// be added then.
    pub(crate) fn push(&mut self, text: &str) -> (String, bool) {
        if self.stops.is_empty() {
            return (text.to_owned(), false);
        }
        self.held.push_str(text);
        let places = self.stops.iter().enumerate().filter_map(|(i, stop)| Some((self.held.find(stop)?, i)));
        if let Some((at, stop)) = places.min() {
            self.found = Some(stop);
            self.held.truncate(at);
            return (std::mem::take(&mut self.held), true);
        }
        let held = self.stops.iter().map(|stop| overlap(&self.held, stop)).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - held);
        (std::mem::replace(&mut self.held, rest), false)
    }

    /// Stop string that was found.
    pub(crate) fn found(&self) -> Option<String> {
        self.found.and_then(|found| self.stops.get(found).cloned())
    }

    /// True if text is held back.
    pub(crate) fn holds(&self) -> bool {
        !self.held.is_empty()
    }

    /// Returns the text held back.
    pub(crate) fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// Length of the longest end of `text` that begins `stop` and is shorter than it.
fn overlap(text: &str, stop: &str) -> usize {
    let most = text.len().min(stop.len().saturating_sub(1));
    (1..=most).rev().find(|&n| stop.is_char_boundary(n) && text.ends_with(&stop[..n])).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pushes pieces until a stop; returns the pieces of text and the reason.
    fn run(stops: &[&str], pieces: &[&str]) -> (Vec<String>, bool) {
        let mut search = Stops::new(stops.iter().map(|&stop| stop.to_owned()).collect());
        let mut out = Vec::new();
        for piece in pieces {
            let (text, stopped) = search.push(piece);
            out.push(text);
            if stopped {
                return (out, true);
            }
        }
        out.push(search.finish());
        (out, false)
    }

    #[test]
    fn a_stop_string_cuts_across_pieces() {
        assert_eq!(
            run(&["END"], &["a", "bE", "N", "Dx"]),
            (["a", "b", "", ""].map(String::from).into(), true)
        );
        assert_eq!(
            run(&["END"], &["aE", "NA", "b"]),
            (["a", "ENA", "b", ""].map(String::from).into(), false)
        );
        assert_eq!(run(&["aab"], &["aa", "ab"]), (["", "a"].map(String::from).into(), true));
    }

    #[test]
    fn the_first_of_several_cuts() {
        assert_eq!(run(&["zz", "b"], &["abzz"]), (vec!["a".to_owned()], true));
        assert_eq!(run(&["é!", "x"], &["é", "!"]), (vec![String::new(), String::new()], true));
    }

    #[test]
    fn what_is_held_at_the_end_is_returned() {
        assert_eq!(run(&["END"], &["a EN"]), (["a ", "EN"].map(String::from).into(), false));
        assert_eq!(run(&[], &["a"]), (["a", ""].map(String::from).into(), false));
    }
}
