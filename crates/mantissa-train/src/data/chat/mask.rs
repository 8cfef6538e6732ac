//! Parts of a rendered conversation that the loss counts, found by rendering its beginnings.
//!
//! An answer begins where the conversation before it ends, rendered with the header of an answer
//! (`add_generation_prompt`), and ends where the conversation up to it ends. Both must be beginnings of the whole text. A
//! template that renders earlier turns otherwise once others follow (one that drops their reasoning, say) is refused for
//! such a conversation: no position in the text would be the one that the model sees when it answers.

use std::collections::BTreeMap;
use std::ops::Range;

use mantissa_model::{Bos, Message, chat};
use serde_json::Value;

use super::line::{Fault, Line};

/// A text and the parts of it that the loss counts.
pub(super) struct Marked {
    pub(super) text: String,
    pub(super) bos: Bos,
    pub(super) spans: Vec<Range<usize>>,
}

/// Variables of the renderings of a line: whole, then for each answer that counts what comes before it and, unless it is
/// the last message, up to its end. Empty for a line without messages.
pub(super) fn contexts(line: &Line, special: &BTreeMap<String, String>) -> Vec<Value> {
    let Line::Messages(messages, counted) = line else { return Vec::new() };
    let context = |messages: &[Message], header: bool| {
        let mut context = chat::context(messages, special);
        context["add_generation_prompt"] = Value::Bool(header);
        context
    };
    let mut all = vec![context(messages, false)];
    for i in answers(counted) {
        all.push(context(&messages[..i], true));
        if i + 1 < messages.len() {
            all.push(context(&messages[..=i], false));
        }
    }
    all
}

fn answers(counted: &[bool]) -> impl Iterator<Item = usize> {
    counted.iter().enumerate().filter(|(_, counts)| **counts).map(|(i, _)| i)
}

/// Returns the text of a line and what the loss counts; `texts` are the renderings of its [`contexts`], in order.
///
/// # Errors
/// The value found and what is allowed.
pub(super) fn marked(
    line: Line,
    texts: &mut impl Iterator<Item = Result<String, String>>,
) -> Result<Marked, Fault> {
    let (messages, counted) = match line {
        Line::Text(text) => {
            let spans = std::iter::once(0..text.len()).collect();
            return Ok(Marked { text, bos: Bos::Auto, spans });
        }
        Line::Completion(prompt, completion) => {
            let text = format!("{prompt}{completion}");
            let spans = std::iter::once(prompt.len()..text.len()).collect();
            return Ok(Marked { text, bos: Bos::Auto, spans });
        }
        Line::Unanswered => return Ok(Marked { text: String::new(), bos: Bos::Never, spans: Vec::new() }),
        Line::Messages(messages, counted) => (messages, counted),
    };
    let mut next = || {
        let text = texts.next().unwrap_or_else(|| Err("no text".to_owned()));
        text.map_err(|found| Fault {
            field: "messages".to_owned(),
            found,
            allowed: "a conversation that the chat template renders",
            fix: "change the roles or their order as the message says, or remove the line".into(),
        })
    };
    let text = next()?;
    let mut spans = Vec::new();
    for i in answers(&counted) {
        let before = next()?;
        let end = if i + 1 < messages.len() { next()? } else { text.clone() };
        if !text.starts_with(&before) || !text.starts_with(&end) || end.len() <= before.len() {
            return Err(Fault {
                field: format!("messages[{i}]"),
                found: format!(
                    "one that renders the turns up to message {} otherwise when others follow",
                    i + 1
                ),
                allowed: "a chat template that only appends turns",
                fix: "cut the conversation into lines that end with the answer, other answers with \"weight\": 0".into(),
            });
        }
        spans.push(before.len()..end.len());
    }
    // A template writes the special tokens itself.
    Ok(Marked { text, bos: Bos::Never, spans })
}
