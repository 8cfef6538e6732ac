//! Continuations of the same prompt by the source and by the quantized model.

use std::ops::ControlFlow;
use std::path::Path;

use anyhow::Result;
use mantissa_jobs::ModelUse;
use mantissa_model::{Bos, GenerateOptions, PREFILL, Tokenizer, generate};

use crate::commands::model;
use crate::commands::model::load_tokenizer;
use crate::context::Context;
use crate::report::{Html, Page};

/// Prompt where none is given.
pub const PROMPT: &str = "Once upon a time";

/// Prompts and the number of tokens that continue each.
#[derive(Clone, Debug)]
pub struct Prompts {
    /// Prompts.
    pub texts: Vec<String>,
    /// Number of new tokens.
    pub tokens: usize,
}

impl Prompts {
    /// Takes the prompts given, or the default one.
    pub fn new(texts: &[String], tokens: usize) -> Self {
        let texts = if texts.is_empty() { vec![PROMPT.to_owned()] } else { texts.to_vec() };
        Prompts { texts, tokens }
    }
}

/// Greedy continuation: token ids, and the text that each adds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Continuation {
    /// Token ids.
    pub tokens: Vec<u32>,
    /// Text of each token; empty while a character is incomplete.
    pub pieces: Vec<String>,
}

/// Continuations of one prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pair {
    /// Prompt.
    pub prompt: String,
    /// Continuation by the source.
    pub source: Continuation,
    /// Continuation by the quantized model.
    pub quantized: Continuation,
}

/// Continues every prompt with both models, one model in memory at a time.
///
/// # Errors
/// Models that cannot be opened or run; not enough memory.
pub fn pairs(source: &Path, quantized: &Path, prompts: &Prompts, context: &Context) -> Result<Vec<Pair>> {
    let before = continuations(source, prompts, context)?;
    let after = continuations(quantized, prompts, context)?;
    let pair =
        |((prompt, source), quantized): ((&String, _), _)| Pair { prompt: prompt.clone(), source, quantized };
    Ok(prompts.texts.iter().zip(before).zip(after).map(pair).collect())
}

fn continuations(path: &Path, prompts: &Prompts, context: &Context) -> Result<Vec<Continuation>> {
    let files = model::open_quietly(path)?;
    let tokenizer = load_tokenizer(&files, context)?;
    let limit = model::context_length(&files)?;
    let encode = |prompt: &String| Ok(tokenizer.encode(prompt, Bos::Auto)?);
    let encoded: Vec<Vec<u32>> = prompts.texts.iter().map(encode).collect::<Result<_>>()?;
    let longest = encoded.iter().map(Vec::len).max().unwrap_or(0);
    let used = ModelUse {
        pass: longest.min(PREFILL),
        longest: longest.saturating_add(prompts.tokens).min(limit),
        threads: 1,
        cached: true,
        logits: 1,
        ..ModelUse::default()
    };
    let (model, _) = used.load(model::open(path, context)?, None, context)?;
    let room = |prompt: &[u32]| prompts.tokens.min(limit.saturating_sub(prompt.len()).max(1));
    encoded.iter().map(|prompt| continued(&model.decoder, &tokenizer, prompt, room(prompt))).collect()
}

/// Continues `prompt` greedily by at most `n` tokens.
///
/// # Errors
/// A prompt that the model cannot run.
pub fn continued(
    decoder: &mantissa_model::Decoder,
    tokenizer: &Tokenizer,
    prompt: &[u32],
    n: usize,
) -> Result<Continuation> {
    let options = GenerateOptions { max_new_tokens: n, ..GenerateOptions::default() };
    let generated = generate(decoder, prompt, &options, |_| ControlFlow::Continue(()))?;
    let mut stream = tokenizer.stream();
    stream.skip(prompt)?;
    let piece = |token: &u32| Ok(stream.push(*token)?);
    let pieces = generated.tokens.iter().map(piece).collect::<Result<Vec<_>>>()?;
    Ok(Continuation { tokens: generated.tokens, pieces })
}

/// Appends the section, or the command that makes its texts.
pub fn section(page: &mut Page, texts: &Result<Vec<Pair>, String>) {
    page.push(Html::heading("Same prompt, before and after"));
    match texts {
        Ok(pairs) => {
            for pair in pairs {
                let after = [("quantized".to_owned(), &pair.quantized)];
                page.push(shown(&pair.prompt, ("source", &pair.source), &after));
            }
        }
        Err(command) => {
            page.push(Html::paragraph("Generate it with the source model:"));
            page.push(Html::preformatted(command));
        }
    }
}

/// Renders the source's continuation of a prompt beside those of other models; what differs is marked.
pub fn shown(prompt: &str, source: (&str, &Continuation), others: &[(String, &Continuation)]) -> Html {
    let tokens = source.1.tokens.len();
    let first = column(source.0, &format!("{tokens} tokens, greedy"), quote(prompt, source.1, None));
    let others = others.iter().map(|(name, other)| {
        let differs = differs_at(source.1, other);
        let said = match differs {
            None => format!("the same {tokens} tokens"),
            Some(at) => format!("parts at token {}, then continues its own text", at + 1),
        };
        column(name, &said, quote(prompt, other, differs))
    });
    Html::columns([first].into_iter().chain(others))
}

fn column(name: &str, said: &str, quote: Html) -> Html {
    let said = Html::element("p", &[("class", "note")], [Html::text(said)]);
    Html::element("div", &[], [Html::subheading(name), said, quote])
}

/// Returns the index of the first token that differs.
fn differs_at(a: &Continuation, b: &Continuation) -> Option<usize> {
    let same = a.tokens.iter().zip(&b.tokens).take_while(|(a, b)| a == b).count();
    (same < a.tokens.len().max(b.tokens.len())).then_some(same)
}

/// Renders a prompt and its continuation, marked from token `differs` on.
fn quote(prompt: &str, continuation: &Continuation, differs: Option<usize>) -> Html {
    let at = differs.unwrap_or(continuation.pieces.len()).min(continuation.pieces.len());
    let (same, other) = continuation.pieces.split_at(at);
    let mut content =
        vec![Html::element("span", &[("class", "prompt")], [Html::text(prompt)]), Html::text(&same.concat())];
    if !other.is_empty() {
        content.push(Html::element("mark", &[], [Html::text(&other.concat())]));
    }
    Html::element("blockquote", &[], content)
}

/// Returns the last part of a path.
pub(super) fn name(path: &Path) -> String {
    let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    path.file_name().map_or_else(|| path.display().to_string(), |name| name.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn continuation(words: &[&str]) -> Continuation {
        let id = |word: &&str| word.bytes().map(u32::from).sum();
        let pieces = words.iter().map(|word| format!(" {word}")).collect();
        Continuation { tokens: words.iter().map(id).collect(), pieces }
    }

    fn drawn(source: &[&str], quantized: &[&str]) -> String {
        let (source, quantized) = (continuation(source), continuation(quantized));
        shown("<once>", ("source", &source), &[("int4".to_owned(), &quantized)]).as_str().to_owned()
    }

    #[test]
    fn what_differs_is_marked() {
        let html = drawn(&["there", "was", "a", "girl"], &["there", "was", "one", "<dog>"]);
        assert!(html.contains("parts at token 3,"), "{html}");
        for part in
            ["there was a girl</blockquote>", "there was<mark> one &lt;dog&gt;</mark>", "&lt;once&gt;"]
        {
            assert!(html.contains(part), "{part}: {html}");
        }
    }

    #[test]
    fn equal_texts_have_no_mark() {
        let html = drawn(&["there", "was"], &["there", "was"]);
        assert!(html.contains("the same 2 tokens") && !html.contains("<mark>"), "{html}");
        let shorter = drawn(&["there", "was"], &["there"]);
        assert!(shorter.contains("parts at token 2,") && !shorter.contains("<mark>"), "{shorter}");
    }
}
