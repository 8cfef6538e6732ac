//! Data of a run in numbers: what was read, what of it trains, and what is cut or left out, with the warnings that follow.

use mantissa_train::data::Found;
use mantissa_train::data::chat::{Conversations, Counts};
use serde::{Deserialize, Serialize};

/// Data of a run in numbers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum DataReport {
    /// Conversations, prompts with completions, and documents that are packed with them.
    Chat(ChatReport),
    /// A text in windows.
    Text(TextReport),
}

/// Conversations of a run in numbers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChatReport {
    /// Conversations read.
    pub conversations: u64,
    /// Conversations left out, by reason.
    pub left_out: LeftOut,
    /// Conversations that lost the end of their answers.
    pub cut: u64,
    /// Tokens beyond the length that were lost, up to the last that the loss would count.
    pub lost_tokens: u64,
    /// Those of them that the loss would count.
    pub lost_answer_tokens: u64,
    /// Tokens that the loss counts in an epoch.
    pub trained_tokens: u64,
    /// Conversations trained on in which the loss counts a token that ends an answer.
    pub trained_ends: u64,
    /// Conversations trained on.
    pub trained: u64,
    /// Conversations held out for validation.
    pub held_out: u64,
    /// Most inputs of a conversation, data.length.
    pub length: u64,
    /// Length that would lose nothing.
    pub longest: u64,
}

/// Conversations left out, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeftOut {
    /// No token that the loss counts lies within the length.
    pub too_long: u64,
    /// There is no answer: the loss counts no token at all.
    pub without_targets: u64,
}

/// Text of a run in numbers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TextReport {
    /// Documents read.
    pub documents: u64,
    /// Records left out, because their text is empty.
    pub empty: u64,
    /// Tokens to train on, with one after each document.
    pub tokens: u64,
    /// Windows of an epoch.
    pub windows: u64,
    /// Tokens of a window, data.length.
    pub length: u64,
    /// Tokens at the end that make no window.
    pub left_over: u64,
    /// Tokens that the loss counts in an epoch.
    pub trained_tokens: u64,
    /// Tokens held out for validation.
    pub held_out_tokens: u64,
}

impl DataReport {
    /// True for conversations.
    pub fn is_chat(&self) -> bool {
        matches!(self, DataReport::Chat(_))
    }

    /// Returns a warning for each kind of loss of a run that ended before, whose data are not read again; `run` names it.
    pub(crate) fn past_warnings(&self, run: &str) -> Vec<String> {
        let rest =
            "fix: see the warnings of its start, change the data or data.length, and rerun with --restart";
        let told = |count: u64, all: u64, what: &str| {
            (count > 0).then(|| format!("{run}: {count} of {all} {what}; {rest}"))
        };
        let losses = match self {
            DataReport::Chat(ChatReport { conversations: all, left_out, cut, length, .. }) => [
                told(left_out.too_long + left_out.without_targets, *all, "conversations were left out"),
                told(*cut, *all, &format!("conversations were cut to {length} tokens")),
            ],
            DataReport::Text(TextReport { documents, empty, .. }) => {
                [told(*empty, documents + empty, "records were left out: their text is empty"), None]
            }
        };
        losses.into_iter().flatten().collect()
    }
}

impl ChatReport {
    /// Makes the report of the conversations to train on; their counts are those of all that were read.
    pub(crate) fn new(lines: &Conversations, held_out: usize, length: usize) -> Self {
        let Counts { cut, too_long, without_targets, .. } = lines.counts;
        ChatReport {
            conversations: lines.counts.lines as u64,
            left_out: LeftOut { too_long: too_long as u64, without_targets: without_targets as u64 },
            cut: cut as u64,
            lost_tokens: lines.counts.lost_tokens,
            lost_answer_tokens: lines.counts.lost_answer_tokens,
            trained_tokens: lines.counts.answer_tokens,
            trained_ends: lines.counts.ended as u64,
            trained: lines.len() as u64,
            held_out: held_out as u64,
            length: length as u64,
            longest: lines.counts.longest as u64,
        }
    }
}

impl TextReport {
    /// Makes the report of `tokens` tokens to train on, in windows of `length`, of the documents `found`.
    pub(crate) fn new(found: Found, tokens: u64, held_out_tokens: u64, length: usize) -> Self {
        let length = length as u64;
        // Every token but the first is predicted.
        let predicted = tokens.saturating_sub(1);
        let windows = predicted / length.max(1);
        TextReport {
            documents: found.documents as u64,
            empty: found.empty as u64,
            tokens,
            windows,
            length,
            left_over: predicted - windows * length,
            trained_tokens: windows * length,
            held_out_tokens,
        }
    }
}

/// Returns a warning for each kind of loss of the conversations in the setting `files`, which were read for inputs of up to
/// `length` tokens of a model with `context` tokens.
pub(crate) fn chat_warnings(
    files: &str,
    lines: &Conversations,
    (length, context): (usize, usize),
) -> Vec<String> {
    let Conversations { counts, places, .. } = lines;
    let Counts { lines: all, cut, too_long, without_targets, ended, longest, .. } = *counts;
    let first = |place: &Option<String>| {
        place.as_ref().map_or_else(String::new, |place| format!(" (first: {place})"))
    };
    let longer = match longest <= context {
        true => format!("--set data.length={longest}, which holds every one"),
        false => format!("shorten them to the {context} tokens of the model's context, or remove them"),
    };
    let of = |count: usize| format!("{files}: {count} of {all} conversations");
    let mut warnings = Vec::new();
    if too_long > 0 {
        warnings.push(format!(
            "{} left out: no token of an answer is within the first {length} tokens{}; fix: {longer}",
            of(too_long),
            first(&places.too_long)
        ));
    }
    if cut > 0 {
        let lost = counts.lost_tokens;
        warnings.push(format!(
            "{} cut to {length} tokens: {lost} tokens lost, {} of answers{}; fix: {longer}",
            of(cut),
            counts.lost_answer_tokens,
            first(&places.cut)
        ));
    }
    if without_targets > 0 {
        warnings.push(format!(
            "{} left out: they have no answer that the loss counts{}; fix: give them an answer, or remove them",
            of(without_targets),
            first(&places.without_targets)
        ));
    }
    // Where the ends were cut off, the length is what helps. Files of earlier builds have no such counts.
    if ended == 0 && cut == 0 && longest > 0 {
        warnings.push(format!(
            "{files}: expected answers that end with a token that the loss counts, got none in {all} conversations: the model \
             does not learn to stop; fix: name the eos_token in tokenizer_config.json"
        ));
    }
    warnings
}

/// Tokens at the end of a text are told where they are more than one in so many: nearly every text has some.
const TOLD: u64 = 10;

/// Returns a warning for each kind of loss of a text. `generated` are the tokens of it that fill whole windows of any
/// length, because a teacher generates them; `first_empty` is the place of the first empty record.
pub(crate) fn text_warnings(
    report: &TextReport,
    first_empty: Option<&str>,
    generated: u64,
    context: usize,
) -> Vec<String> {
    let TextReport { documents, empty, tokens, length, left_over, .. } = *report;
    let mut warnings = Vec::new();
    if empty > 0 {
        let first = first_empty.map_or_else(String::new, |place| format!(" (first: {place})"));
        warnings.push(format!(
            "data.files: {empty} of {} records left out: their text is empty{first}; fix: remove them",
            documents + empty
        ));
    }
    if left_over * TOLD > tokens {
        let predicted = (tokens - 1).saturating_sub(generated);
        let fix = match even_length(predicted, length, context as u64) {
            Some(length) => format!("--set data.length={length}, which leaves none"),
            None => format!("leave out --strict, as no data.length near {length} leaves none"),
        };
        warnings.push(format!(
            "data.files: the last {left_over} of {tokens} tokens make no window of {length} tokens and are not trained on; \
             fix: {fix}"
        ));
    }
    warnings
}

/// Returns the length of windows nearest to `length` that divides `predicted` tokens: at least a quarter, at most four times
/// as long.
fn even_length(predicted: u64, length: u64, context: u64) -> Option<u64> {
    let least = length.div_ceil(4).max(1);
    let most = (4 * length).min(context).min(predicted);
    let nearest = (least..=most).filter(|other| predicted.is_multiple_of(*other));
    nearest.min_by_key(|other| other.abs_diff(length))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(tokens: u64, length: usize) -> TextReport {
        TextReport::new(Found { documents: 2, ..Found::default() }, tokens, 0, length)
    }

    #[test]
    fn tokens_at_the_end_are_counted_and_the_length_that_is_named_leaves_none() {
        let exact = text(257, 64);
        assert_eq!((exact.windows, exact.left_over, exact.trained_tokens), (4, 0, 256));
        assert!(text_warnings(&exact, None, 0, 64).is_empty());
        let rest = text(301, 64);
        assert_eq!((rest.windows, rest.left_over, rest.trained_tokens), (4, 44, 256));
        let told = text_warnings(&rest, None, 0, 512);
        assert!(
            told[0].contains("the last 44 of 301 tokens") && told[0].contains("data.length=60"),
            "{told:?}"
        );
        assert_eq!(text(301, 60).left_over, 0);
        // The context bounds it, and a prime number of tokens has no such length.
        assert_eq!(even_length(300, 64, 512), Some(60));
        assert_eq!(even_length(300, 70, 72), Some(60));
        assert_eq!(even_length(300, 70, 512), Some(75));
        assert_eq!(even_length(10_007, 64, 512), None);
        let told = text_warnings(&text(102, 40), None, 0, 80);
        assert!(
            told[0].ends_with("fix: leave out --strict, as no data.length near 40 leaves none"),
            "{told:?}"
        );
        // Nearly every text ends within a window.
        assert!(text_warnings(&text(10_008, 64), None, 0, 512).is_empty());
    }

    #[test]
    fn empty_records_are_named() {
        let found = Found { documents: 3, empty: 2, first_empty: Some(4) };
        let told = text_warnings(&TextReport::new(found, 65, 0, 64), Some("a.jsonl: line 4"), 0, 64);
        let expected = "data.files: 2 of 5 records left out: their text is empty (first: a.jsonl: line 4); fix: remove them";
        assert_eq!(told, [expected]);
    }

    #[test]
    fn nothing_is_told_where_nothing_is_lost() {
        let mut lines = Conversations::default();
        lines.counts = Counts { lines: 3, ended: 3, longest: 9, answer_tokens: 12, ..Counts::default() };
        assert!(chat_warnings("data.files", &lines, (16, 64)).is_empty());
        lines.counts.ended = 0;
        let told = chat_warnings("data.files", &lines, (16, 64));
        assert!(told[0].contains("does not learn to stop") && told.len() == 1, "{told:?}");
        lines.counts = Counts { cut: 1, lost_tokens: 7, lost_answer_tokens: 5, longest: 90, ..lines.counts };
        let told = chat_warnings("validation.files", &lines, (16, 64));
        assert_eq!(told.len(), 1, "the length is what helps: {told:?}");
        assert!(told[0].contains("the 64 tokens of the model's context"), "{told:?}");
        lines.counts.longest = 40;
        let told = chat_warnings("validation.files", &lines, (16, 64));
        assert!(told[0].starts_with(
            "validation.files: 1 of 3 conversations cut to 16 tokens: 7 tokens lost, 5 of answers"
        ));
        assert!(told[0].ends_with("fix: --set data.length=40, which holds every one"), "{told:?}");
    }
}
