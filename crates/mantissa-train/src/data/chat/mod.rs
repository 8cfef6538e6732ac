//! Conversations as training data: JSON Lines, rendered with the model's chat template, with the loss on answers only.
//!
//! A line is one of
//! - `{"messages": [{"role", "content"}, …]}`: the loss counts the messages of the assistant, from after their header to
//!   the end-of-turn token. A message with `"weight": 0` does not count;
//! - `{"prompt": …, "completion": …}`: both texts, joined as they are, or both lists of messages; the loss counts the
//!   completion;
//! - `{"instruction": …, "input": …, "output": …}` (Alpaca; also `system`): a message of the user and one of the assistant;
//! - `{"conversations": [{"from", "value"}, …]}` (ShareGPT; also `system`): messages of `human`, `gpt`, `system` and `tool`;
//! - `{"text": …}`: a document; the loss counts all of it.
//!
//! Lines may also be the items of a JSON list, in a file that ends in `.json`.
//!
//! The end-of-text token follows a completion or document, and an answer at the end whose template writes none. A line
//! of more than `length + 1` tokens keeps the first ones; without a token that counts it is left out, as is a line without an
//! answer. [`Counts`] has what was cut and left out. Lines share a
//! window of `length` inputs ([`ChatBatches`]), each as a sequence of its own: attention does not cross lines.

mod counts;
mod file;
mod line;
mod mask;
mod pack;
mod template;
#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests;

use std::collections::BTreeSet;
use std::ops::Range;
use std::path::Path;

use mantissa_model::Tokenizer;
use serde_json::Value;

pub use self::counts::{Counts, Places};
pub use self::pack::ChatBatches;
pub use self::template::DefaultTemplate;

use self::line::{Fault, Line};
use self::mask::Marked;
use super::records::{Records, record_word};
use super::text::named;
use super::{DataError, HoldOut};
use crate::loss::IGNORE_TARGET;

/// Longest line in bytes.
const MAX_LINE: u64 = 64 << 20;

/// Bytes of memory per byte of a line while its JSON is parsed: lists of numbers have the shortest values.
const JSON_BYTES: u64 = 40;

/// Bytes of the conversations that are rendered in one call.
const RENDERED: usize = 1 << 20;

/// Renders conversations with a chat template: one text, or the template's complaint, for each set of variables
/// ([`mantissa_model::chat::context`]).
pub type Render<'r> = dyn FnMut(&[Value]) -> Result<Vec<Result<String, String>>, DataError> + 'r;

/// Tokenized lines.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Conversations {
    /// Inputs of all lines.
    tokens: Vec<u32>,
    /// Target of each input, [`IGNORE_TARGET`] where the loss does not count it.
    targets: Vec<u32>,
    /// End of each line in `tokens`.
    ends: Vec<usize>,
    /// For each line, true if the loss counts a token that ends a turn; all false in lines that were opened.
    ended: Vec<bool>,
    /// Counts of lines and tokens.
    pub counts: Counts,
    /// First lines that were cut or left out.
    pub places: Places,
}

impl Conversations {
    /// Reads `path` for windows of `length` inputs, with at most `memory` bytes. `render` runs the model's chat template;
    /// `None` if it has none.
    ///
    /// # Errors
    /// [`DataError::Field`] names file and line: not JSON, another form, a template that refuses the conversation or
    /// renders its beginning otherwise than alone. [`DataError::Memory`], [`DataError::Tokenizer`].
    pub fn read(
        path: &Path,
        tokenizer: &Tokenizer,
        length: usize,
        memory: u64,
        mut render: Option<&mut Render<'_>>,
    ) -> Result<Self, DataError> {
        let mut records = Records::open(path, memory)?;
        let (mut all, mut pending, mut held) = (Conversations::default(), Vec::new(), 0);
        let name = path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
        let (added, word) = (tokenizer.added(), record_word(path));
        let reader = Reader { file: named(path), name, word, tokenizer, added, length };
        let text = records.held();
        while let Some((number, line)) = records.next(path, MAX_LINE.min(memory), memory)? {
            let needs = (line.len() as u64).saturating_mul(JSON_BYTES).saturating_add(all.bytes());
            let needs = needs.saturating_add(text);
            if needs > memory {
                return Err(DataError::Memory { file: named(path), needs, allowed: memory });
            }
            pending.push((number, Line::parse(line).map_err(|found| reader.fault(number, found))?));
            held += line.len();
            if held >= RENDERED {
                reader.add(std::mem::take(&mut pending), &mut render, &mut all)?;
                held = 0;
            }
        }
        reader.add(pending, &mut render, &mut all)?;
        Ok(all)
    }

    /// Checks that there is a line to train on; `files` names the files of the lines, which were read for windows of `length`
    /// inputs.
    ///
    /// # Errors
    /// [`DataError::Field`] with the number of lines left out.
    pub fn require_lines(&self, files: &str, length: usize) -> Result<(), DataError> {
        if !self.is_empty() {
            return Ok(());
        }
        let Counts { lines, too_long, longest, .. } = self.counts;
        let (allowed, fix) = match too_long {
            0 => ("a line with an answer".to_owned(), "add lines with answers".to_owned()),
            _ => (
                format!("a line with an answer within {length} tokens"),
                format!("raise data.length (--length), {longest} holds every line"),
            ),
        };
        let found = format!("{} of {lines} lines without any; fix: {fix}", self.counts.left_out());
        Err(DataError::Field { file: files.to_owned(), field: "lines".to_owned(), found, allowed })
    }

    /// Number of lines.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// True if there is no line.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Adds the lines of `other`.
    pub fn append(&mut self, other: Conversations) {
        let first = self.tokens.len();
        self.tokens.extend(other.tokens);
        self.targets.extend(other.targets);
        self.ends.extend(other.ends.into_iter().map(|end| first + end));
        self.ended.extend(other.ended);
        self.counts.add(other.counts);
        self.places.add(other.places);
    }

    /// Moves the lines that `choice` takes, by their number of tokens, to the second result. The counts of what was read
    /// stay with the first; the second counts its own lines and targets.
    pub fn split(self, choice: &mut HoldOut) -> (Self, Self) {
        let (mut kept, mut held) = (Conversations::default(), Conversations::default());
        for index in 0..self.len() {
            let (tokens, targets) = self.line(index);
            let answer_tokens = targets.iter().filter(|target| **target != IGNORE_TARGET).count() as u64;
            let part = if choice.takes(tokens.len()) { &mut held } else { &mut kept };
            part.tokens.extend(tokens);
            part.targets.extend(targets);
            part.ends.push(part.tokens.len());
            part.ended.push(self.ended[index]);
            part.counts.lines += 1;
            part.counts.answer_tokens += answer_tokens;
            part.counts.ended += usize::from(self.ended[index]);
        }
        let Counts { answer_tokens, ended, .. } = kept.counts;
        kept.counts = Counts { answer_tokens, ended, ..self.counts };
        kept.places = self.places;
        (kept, held)
    }

    /// Bytes of memory held.
    pub fn bytes(&self) -> u64 {
        4 * (self.tokens.capacity() + self.targets.capacity()) as u64 + 8 * self.ends.capacity() as u64
    }

    /// Inputs and targets of line `index`.
    ///
    /// # Panics
    /// If there is no such line.
    pub fn line(&self, index: usize) -> (&[u32], &[u32]) {
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        let span = start..self.ends[index];
        (&self.tokens[span.clone()], &self.targets[span])
    }

    /// Adds a line, cut to `length` inputs, that `place` names.
    fn push(&mut self, line: &Encoded, length: usize, place: impl Fn() -> String) {
        let Encoded { tokens, counted, ends } = line;
        self.counts.lines += 1;
        let held = tokens.len().min(length + 1);
        // Nothing after the last target changes the loss.
        let Some(needed) = (1..tokens.len()).rev().find(|&i| counted[i]) else {
            self.counts.without_targets += 1;
            self.places.without_targets.get_or_insert_with(place);
            return;
        };
        self.counts.longest = self.counts.longest.max(needed);
        if needed >= held {
            self.counts.lost_tokens += (needed + 1 - held) as u64;
            self.counts.lost_answer_tokens += (held..=needed).filter(|&i| counted[i]).count() as u64;
        }
        let Some(last) = (1..held).rev().find(|&i| counted[i]) else {
            self.counts.too_long += 1;
            self.places.too_long.get_or_insert_with(place);
            return;
        };
        if needed >= held {
            self.counts.cut += 1;
            self.places.cut.get_or_insert_with(place);
        }
        let ended = ends.iter().any(|end| (1..=last).contains(end));
        self.counts.ended += usize::from(ended);
        self.ended.push(ended);
        self.tokens.extend(&tokens[..last]);
        let target = |i: usize| if counted[i] { tokens[i] } else { IGNORE_TARGET };
        self.targets.extend((1..=last).map(target));
        self.counts.answer_tokens += (1..=last).filter(|&i| counted[i]).count() as u64;
        self.ends.push(self.tokens.len());
    }
}

/// Tokens of a line.
#[derive(Default)]
struct Encoded {
    tokens: Vec<u32>,
    /// For each token, true if the loss counts it.
    counted: Vec<bool>,
    /// Places of the tokens that end an answer.
    ends: Vec<usize>,
}

/// Turns lines into tokens.
struct Reader<'t> {
    file: String,
    /// Name of the file without its folder.
    name: String,
    /// Word for a record.
    word: &'static str,
    tokenizer: &'t Tokenizer,
    /// Ids of added tokens, such as those that end a turn.
    added: BTreeSet<u32>,
    length: usize,
}

impl Reader<'_> {
    fn fault(&self, line: usize, fault: Fault) -> DataError {
        let Fault { field, found, allowed, fix } = fault;
        DataError::Field {
            file: self.file.clone(),
            field: match field.is_empty() {
                true => format!("{} {line}", self.word),
                false => format!("{} {line}: {field}", self.word),
            },
            found: format!("{found}; fix: {fix}"),
            allowed: allowed.to_owned(),
        }
    }

    /// Renders and tokenizes `lines` and adds them to `all`.
    fn add(
        &self,
        lines: Vec<(usize, Line)>,
        render: &mut Option<&mut Render<'_>>,
        all: &mut Conversations,
    ) -> Result<(), DataError> {
        let special = self.tokenizer.special_tokens();
        let contexts: Vec<Value> = lines.iter().flat_map(|(_, line)| mask::contexts(line, special)).collect();
        let mut texts = match (contexts.is_empty(), render) {
            (true, _) => Vec::new(),
            (false, Some(render)) => render(&contexts)?,
            (false, None) => {
                let of_messages = lines.iter().find(|(_, line)| !mask::contexts(line, special).is_empty());
                let fault = Fault {
                    field: "messages".to_owned(),
                    found: "messages, for a model without a chat template".to_owned(),
                    allowed: "lines of {\"prompt\": …, \"completion\": …} or {\"text\": …}",
                    fix: "give the model a chat_template.jinja".into(),
                };
                return Err(self.fault(of_messages.map_or(0, |(number, _)| *number), fault));
            }
        }
        .into_iter();
        for (number, line) in lines {
            all.counts.rendered += usize::from(matches!(line, Line::Messages(..)));
            let marked = mask::marked(line, &mut texts).map_err(|fault| self.fault(number, fault))?;
            let encoded = self.encoded(&marked)?;
            all.push(&encoded, self.length, || format!("{}: {} {number}", self.name, self.word));
        }
        Ok(())
    }

    /// Tokenizes a text.
    fn encoded(&self, marked: &Marked) -> Result<Encoded, DataError> {
        let Marked { text, bos, spans } = marked;
        let encoded = self.tokenizer.encode_with_offsets(text, *bos)?;
        let mut tokens: Vec<u32> = encoded.iter().map(|(id, _)| *id).collect();
        let (mut counted, mut ends) = (vec![false; tokens.len()], Vec::new());
        for span in spans {
            // A token belongs to the part that its first byte lies in. The beginning of a text is inserted, without bytes.
            let inside = |(id, at): &(u32, Range<usize>)| {
                let inserted = at.is_empty() && self.added.contains(id);
                span.contains(&at.start) && !inserted
            };
            let mut places: Vec<usize> = (0..encoded.len()).filter(|&i| inside(&encoded[i])).collect();
            // White space after the end of a turn belongs to the template, not to the answer.
            let blank = |i: usize| text.get(encoded[i].1.clone()).is_some_and(|text| text.trim().is_empty());
            let kept = places.iter().rposition(|&i| !blank(i) || self.added.contains(&tokens[i]));
            if let Some(kept) = kept.filter(|&kept| self.added.contains(&tokens[places[kept]])) {
                places.truncate(kept + 1);
                ends.push(places[kept]);
            }
            places.iter().for_each(|&i| counted[i] = true);
        }
        let last = counted.iter().rposition(|counted| *counted);
        let ended = last.is_some_and(|i| self.added.contains(&tokens[i]));
        let ends_with_answer = spans.last().is_some_and(|span| span.end == text.len());
        if let Some(eos) = self.tokenizer.eos().filter(|_| ends_with_answer && !ended) {
            // Some tokenizers end every text.
            if tokens.last() != Some(&eos) {
                tokens.push(eos);
                counted.push(false);
            }
            counted.last_mut().into_iter().for_each(|counted| *counted = true);
            ends.push(tokens.len() - 1);
        }
        Ok(Encoded { tokens, counted, ends })
    }
}
