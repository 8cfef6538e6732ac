//! Form and size of the data: text or conversations, tokens of a window, number of steps, and the part held out.

use std::io::Read;
use std::path::Path;

use mantissa_model::{Bos, Tokenizer};
use mantissa_store::convention::ModelFiles;
use mantissa_store::{Error, regular};
use mantissa_train::data::chat::{ChatBatches, DefaultTemplate};
use mantissa_train::data::{Cursor, HoldOut, TextFormat, documents_within, first_record, is_records};

use super::arguments::{DEFAULT_BATCH, HeldOutData, TuningArguments};
use crate::error::{BadInput, Result};
use crate::host::Host;
use crate::model::{context_length, load_tokenizer, open_quietly};
use crate::text::counted;
use crate::train::conversations;

/// Bytes read of a file to see the kind of its first line.
const FIRST_LINE: u64 = 1 << 16;

/// Share that is held out by default, and the least number of conversations or windows that it must hold.
const DEFAULT: (f64, u64) = (0.05, 8);

/// Form and size of the data.
pub(crate) struct Extent {
    /// True for conversations and prompts.
    pub(crate) is_chat: bool,
    /// Tokens of a window.
    pub(crate) length: usize,
    /// Windows of a batch.
    pub(crate) batch: usize,
    /// Number of steps.
    pub(crate) steps: u64,
    /// Held-out data; `None` if nothing is.
    pub(crate) validation: Option<HeldOutData>,
}

impl Extent {
    /// Finds form and size of the data. They are read only if an option is to be chosen by them.
    ///
    /// # Errors
    /// Data or a model that cannot be read; options out of range.
    pub(crate) fn new(model: &Path, args: &TuningArguments, seed: u64, host: &Host) -> Result<Self> {
        if !(args.epochs.is_finite() && args.epochs > 0.0) {
            return Err(BadInput::new("--epochs", args.epochs.to_string(), "a number above 0").into());
        }
        let is_set = |key: &str| args.set.iter().any(|set| set.starts_with(key));
        let set = is_set("validation.share") || is_set("validation.files");
        let given = args.held_out()?.or(set.then_some(HeldOutData::Share(0.0)));
        let is_chat = is_chat(args)?;
        let stated = (args.length, args.given_batch(), args.steps, &given);
        if let (Some(length), Some(batch), Some(steps), Some(_)) = stated {
            return Ok(Extent { is_chat, length, batch, steps, validation: given });
        }
        let files = open_quietly(model)?;
        let (length, windows, validation) = if is_chat {
            Self::of_chat(args, &files, given, seed, host)?
        } else {
            Self::of_text(args, &files, given, host)?
        };
        let batch = batch(args, windows, host);
        let steps = args.steps.unwrap_or_else(|| passes(args, windows, batch));
        Ok(Extent { is_chat, length, batch, steps, validation })
    }

    /// Returns the tokens of a window, the number of windows, and what is held out, of conversations.
    fn of_chat(
        args: &TuningArguments,
        files: &ModelFiles,
        given: Option<HeldOutData>,
        seed: u64,
        host: &Host,
    ) -> Result<(usize, u64, Option<HeldOutData>)> {
        let length = args.length.unwrap_or(context_length(files)?.min(512));
        let tokenizer = load_tokenizer(files, host)?;
        let template = DefaultTemplate::dialogue(&tokenizer)?;
        let lines = conversations(&args.data, files.dir(), (&tokenizer, Some(&template)), length, host)?;
        let (share, least) = DEFAULT;
        let is_enough = (lines.len() as f64 * share) as u64 >= least;
        let validation = given.or(is_enough.then_some(HeldOutData::Share(share)));
        let (trained, _) = lines.split(&mut HoldOut::new(share_of(validation.as_ref())));
        let windows = match trained.is_empty() {
            // The run refuses it with a reason.
            true => 1,
            false => ChatBatches::new(trained, usize::MAX, length, seed, Cursor::default())?.windows(),
        };
        Ok((length, windows, validation))
    }

    /// Returns the tokens of a window, the number of windows, and what is held out, of a text.
    fn of_text(
        args: &TuningArguments,
        files: &ModelFiles,
        given: Option<HeldOutData>,
        host: &Host,
    ) -> Result<(usize, u64, Option<HeldOutData>)> {
        let (share, least) = DEFAULT;
        let tried = share_of(given.as_ref().or(Some(&HeldOutData::Share(share))));
        let Tokens { all, held } = tokens(args, &load_tokenizer(files, host)?, tried, host)?;
        // Little data still make one window.
        let most = usize::try_from(all).unwrap_or(usize::MAX).saturating_sub(1).max(1);
        let length = args.length.unwrap_or(context_length(files)?.min(512).min(most));
        let is_enough = held / length.max(1) as u64 >= least;
        let validation = given.or(is_enough.then_some(HeldOutData::Share(share)));
        let trained = if share_of(validation.as_ref()) > 0.0 { all - held } else { all };
        let windows = trained.saturating_sub(1) / length.max(1) as u64;
        Ok((length, windows, validation))
    }
}

/// Returns the share of the data that is held out.
fn share_of(validation: Option<&HeldOutData>) -> f64 {
    match validation {
        Some(HeldOutData::Share(share)) => *share,
        _ => 0.0,
    }
}

/// Returns the windows of a batch: no more than there are by default, because a batch takes further ones from the next pass over
/// the data. Where the options state more, it says so.
fn batch(args: &TuningArguments, windows: u64, host: &Host) -> usize {
    let all = usize::try_from(windows).unwrap_or(usize::MAX).max(1);
    let Some(batch) = args.given_batch() else { return DEFAULT_BATCH.min(all) };
    if batch > all {
        let held = counted(all as u64, "window");
        host.note(&format!(
            "a batch of {batch} windows passes over the data's {held} {:.1} times in every step (--batch {all}: once)",
            batch as f64 / all as f64
        ));
    }
    batch
}

/// Returns the number of steps of [`TuningArguments::epochs`] over `windows` windows, with `batch` windows in each batch.
fn passes(args: &TuningArguments, windows: u64, batch: usize) -> u64 {
    let accumulated = args.set_text("data.accumulate").and_then(|text| text.parse::<u64>().ok());
    let of_step = (batch.max(1) as u64).saturating_mul(accumulated.unwrap_or(1).max(1));
    let steps = (windows as f64 * args.epochs / of_step as f64).ceil();
    (steps as u64).max(1)
}

/// True if the first line of the first file is a conversation or a prompt with its answer.
///
/// # Errors
/// JSON in a file that is named otherwise, which would be trained on as text.
fn is_chat(args: &TuningArguments) -> Result<bool> {
    for file in args.data.iter().filter(|file| !is_records(file)) {
        let line = first_line(file)?;
        let is_list = line.trim_start().starts_with("[{");
        if is_list || has_key(&line, &[&ANSWERED[..], &["text"]].concat()) {
            let allowed = "a text, or a name that ends in .jsonl or .json";
            let (form, name) =
                if is_list { ("a JSON list", "NAME.json") } else { ("JSON Lines", "NAME.jsonl") };
            let error = BadInput::new(file.display().to_string(), "JSON", allowed);
            return Err(error.with_fix(format!("rename the file to {name} if it is {form}")).into());
        }
    }
    match args.data.first().filter(|file| is_records(file)) {
        Some(file) => Ok(has_key(&first_line(file)?, &ANSWERED)),
        None => Ok(false),
    }
}

/// Keys of conversations and prompts.
const ANSWERED: [&str; 5] = ["messages", "prompt", "completion", "conversations", "instruction"];

/// Returns the first line of a file that is not blank, or the first item of a JSON list, as far as [`FIRST_LINE`] holds it.
fn first_line(file: &Path) -> Result<String> {
    let expected = "a file of training data";
    let mut start = Vec::new();
    let read = regular::open(file, expected)?.take(FIRST_LINE).read_to_end(&mut start);
    read.map_err(|error| Error::opening(file, expected, "read", error))?;
    Ok(first_record(file, &String::from_utf8_lossy(&start)).to_owned())
}

/// True if a line is a JSON object with one of these keys.
fn has_key(line: &str, keys: &[&str]) -> bool {
    match serde_json::from_str::<serde_json::Value>(line) {
        Ok(value) => keys.iter().any(|key| value.get(key).is_some()),
        // Longer than what was read: the key is among the first of the line, or it is a text.
        Err(_) => {
            keys.iter().any(|key| line.trim_start().starts_with('{') && line.contains(&format!("\"{key}\"")))
        }
    }
}

/// Tokens of the data, with one between two documents, and those of them that are held out.
struct Tokens {
    all: u64,
    held: u64,
}

/// Counts the tokens, and those of documents that a run holds out with this share. Of a text without separator parts are
/// held out, about the share of it.
fn tokens(args: &TuningArguments, tokenizer: &Tokenizer, share: f64, host: &Host) -> Result<Tokens> {
    let (mut found, mut choice) = (Tokens { all: 0, held: 0 }, HoldOut::new(share));
    for file in &args.data {
        let by_line = is_records(file);
        let format = match by_line {
            true => TextFormat::JsonLines { field: args.set_text("data.field").unwrap_or("text").to_owned() },
            false => TextFormat::Text { split: None },
        };
        documents_within(file, &format, host.memory_left(), |document| {
            let tokens = 1 + tokenizer.encode(document, Bos::Auto)?.len() as u64;
            found.all += tokens;
            found.held += match by_line {
                true if choice.takes(document.len()) => tokens,
                true => 0,
                false => (tokens as f64 * share) as u64,
            };
            Ok(())
        })?;
    }
    Ok(found)
}
