//! Training of a byte-level BPE tokenizer (Sennrich, Haddow & Birch 2016, arXiv 1508.07909; byte level as in
//! GPT-2, Radford et al. 2019, section 2.2), written as a standard `tokenizer.json`.

use serde_json::{Value, json};
use tokenizers::models::bpe::{BPE, BpeTrainerBuilder};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, Tokenizer};

use super::DataError;
use super::words::{WordCounts, pre_tokenizer};

/// Minimum vocabulary size: 256 bytes and the special tokens.
pub const LEAST_VOCAB: usize = 256 + SPECIAL.len();

/// Beginning and end of a document, ids 0 and 1.
pub const SPECIAL: [&str; 2] = ["<|begin|>", "<|end|>"];

/// Id of the beginning-of-document token.
pub const BEGIN: u32 = 0;

/// Id of the end-of-document token.
pub const END: u32 = 1;

/// Chat template that joins the messages to one text, for models trained on plain text.
const CHAT_TEMPLATE: &str = "{{ bos_token }}{% for m in messages %}{{ ' ' if not loop.first and \
    loop.previtem.content[-1:] not in ' \\n' and m.content[:1] not in ' \\n.,!?' }}{{ m.content }}{% endfor %}";

/// Files of a tokenizer.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainedTokenizer {
    /// Content of `tokenizer.json`.
    pub tokenizer: String,
    /// Content of `tokenizer_config.json`.
    pub config: String,
}

/// Trains a tokenizer from `documents`, as [`learn_bpe`].
///
/// # Errors
/// As [`learn_bpe`].
pub fn train_bpe(documents: &[String], vocab_size: usize) -> Result<TrainedTokenizer, DataError> {
    let mut words = WordCounts::new(1, u64::MAX);
    documents.iter().try_for_each(|document| words.add(document))?;
    learn_bpe(words, vocab_size)
}

/// Learns `vocab_size` tokens, including [`SPECIAL`] and all bytes, from word counts. The result is
/// deterministic.
///
/// # Errors
/// [`DataError::Field`] for a vocabulary below [`LEAST_VOCAB`] or more merges than the text holds;
/// [`DataError::Memory`].
pub fn learn_bpe(words: WordCounts, vocab_size: usize) -> Result<TrainedTokenizer, DataError> {
    let (trained, found) = learn(words, vocab_size)?;
    match found == vocab_size {
        true => Ok(trained),
        false => Err(fault(
            "vocab_size",
            format!("at most {found} tokens in the text"),
            format!("a text with at least {vocab_size} tokens"),
        )),
    }
}

/// Learns at most `vocab_size` tokens as [`learn_bpe`], fewer if the text holds no more merges; returns the tokenizer
/// with its number of tokens.
///
/// # Errors
/// As [`learn_bpe`], but for too few merges.
pub fn learn_bpe_at_most(
    mut words: WordCounts,
    vocab_size: usize,
) -> Result<(TrainedTokenizer, usize), DataError> {
    let most = words.most_tokens(LEAST_VOCAB)?;
    learn(words, vocab_size.min(usize::try_from(most).unwrap_or(usize::MAX)))
}

fn fault(field: &str, found: String, allowed: String) -> DataError {
    DataError::Field { file: "tokenizer".to_owned(), field: field.to_owned(), found, allowed }
}

fn learn(words: WordCounts, vocab_size: usize) -> Result<(TrainedTokenizer, usize), DataError> {
    if vocab_size < LEAST_VOCAB {
        let allowed = format!("at least {LEAST_VOCAB}: every byte and {} special tokens", SPECIAL.len());
        return Err(fault("vocab_size", vocab_size.to_string(), allowed));
    }
    let failed =
        |error: tokenizers::Error| fault("training", error.to_string(), "a text to learn from".into());
    let special = |text: &&str| AddedToken::from((*text).to_owned(), true);
    let trainer = BpeTrainerBuilder::new()
        .vocab_size(vocab_size)
        .show_progress(false)
        .special_tokens(SPECIAL.iter().map(special).collect())
        .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
        .build();
    let mut model = BPE::default();
    let words = words.finish(vocab_size, LEAST_VOCAB)?;
    let special = trainer.do_train(&words, &mut model).map_err(failed)?;
    drop(words);
    // The word counts are the largest allocation; they are not needed any more.
    let mut tokenizer = Tokenizer::new(model);
    tokenizer.with_pre_tokenizer(Some(pre_tokenizer()));
    tokenizer.with_decoder(Some(ByteLevel::default()));
    tokenizer.add_special_tokens(special).map_err(failed)?;
    let found = tokenizer.get_vocab_size(true);
    let mut value: Value =
        tokenizer.to_string(false).and_then(|text| Ok(serde_json::from_str(&text)?)).map_err(failed)?;
    value["post_processor"] = begin_each_document();
    let config = json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[BEGIN as usize],
        "eos_token": SPECIAL[END as usize],
        "add_bos_token": true,
        "clean_up_tokenization_spaces": false,
        "chat_template": CHAT_TEMPLATE,
    });
    Ok((TrainedTokenizer { tokenizer: format!("{value}\n"), config: format!("{config:#}\n") }, found))
}

/// Returns the `tokenizers` post-processor template that puts [`BEGIN`] before a text.
fn begin_each_document() -> Value {
    let token = SPECIAL[BEGIN as usize];
    let special = json!({ "SpecialToken": { "id": token, "type_id": 0 } });
    let sequence = |id: &str, kind: u32| json!({ "Sequence": { "id": id, "type_id": kind } });
    json!({
        "type": "TemplateProcessing",
        "single": [special, sequence("A", 0)],
        "pair": [special, sequence("A", 0), sequence("B", 1)],
        "special_tokens": { token: { "id": token, "ids": [BEGIN], "tokens": [token] } },
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use mantissa_model::{Bos, Tokenizer};

    fn documents() -> Vec<String> {
        let words = ["the", "little", "fox", "jumped", "over", "a", "quiet", "river", "and", "sang"];
        let word = |i: usize, j: usize| words[(i * i + 3 * j + j * j * i) % words.len()];
        (0..40).map(|i| (0..30).map(|j| word(i, j)).collect::<Vec<_>>().join(" ") + ".\n").collect()
    }

    #[test]
    fn training_is_deterministic_and_encodes_any_text() {
        let trained = train_bpe(&documents(), 285).unwrap();
        assert_eq!(train_bpe(&documents(), 285).unwrap(), trained);
        let dir = tempfile::TempDir::new().unwrap();
        std::fs::write(dir.path().join("tokenizer.json"), &trained.tokenizer).unwrap();
        std::fs::write(dir.path().join("tokenizer_config.json"), &trained.config).unwrap();
        let tokenizer = Tokenizer::load(dir.path()).unwrap();
        for text in ["the little fox", "Überraschung: 日本語 🦊\n\n  x", ""] {
            let ids = tokenizer.encode(text, Bos::Auto).unwrap();
            assert_eq!(ids[0], BEGIN, "{text}");
            assert!(ids.iter().all(|id| *id < 285));
            assert_eq!(tokenizer.decode(&ids).unwrap(), text);
        }
        // Words of this text are short.
        assert!(tokenizer.encode("the little fox jumped", Bos::Never).unwrap().len() <= 10);
    }

    #[test]
    fn a_poor_text_has_a_smaller_vocabulary() {
        let words = |text: &str| {
            let mut words = WordCounts::new(1, u64::MAX);
            words.add(text).unwrap();
            words
        };
        let (trained, found) = learn_bpe_at_most(words("aa ab aa ab"), 1000).unwrap();
        assert!((LEAST_VOCAB..LEAST_VOCAB + 8).contains(&found), "{found}");
        assert_eq!(trained, learn_bpe(words("aa ab aa ab"), found).unwrap());
        assert_eq!(learn_bpe_at_most(words(&documents().concat()), 285).unwrap().1, 285);
    }

    #[test]
    fn a_vocabulary_that_cannot_be_is_refused() {
        assert!(train_bpe(&documents(), 200).unwrap_err().to_string().contains("at least 258"));
        let poor = train_bpe(&["aa".to_owned()], 1000).unwrap_err().to_string();
        assert!(poor.contains("expected a text with at least 1000 tokens"), "{poor}");
    }
}
