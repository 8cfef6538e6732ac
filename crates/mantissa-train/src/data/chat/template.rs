//! Chat templates for models that have none.

use mantissa_model::{Bos, Tokenizer, TokenizerError};

/// Messages joined to one text, with a space between two that have neither white space nor punctuation there.
const JOINED: &str = "{% for m in messages %}{{ ' ' if not loop.first and loop.previtem.content[-1:] not in ' \\n' \
    and m.content[:1] not in ' \\n.,!?' }}{{ m.content }}{% endfor %}";

/// Chat template of a model that has none: in training, and beside the results.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DefaultTemplate {
    /// Description for messages.
    pub about: &'static str,
    /// Jinja template.
    pub text: String,
}

impl DefaultTemplate {
    /// Returns the template for conversations: a system text and a blank line, then lines `User: …` and `Assistant: …`,
    /// each answer ended by the tokenizer's end-of-text token. It begins with the token that the tokenizer begins texts
    /// with.
    ///
    /// # Errors
    /// [`TokenizerError`].
    pub fn dialogue(tokenizer: &Tokenizer) -> Result<Self, TokenizerError> {
        let begin = begin(tokenizer)?;
        let end = match tokenizer.eos() {
            Some(eos) => quoted(&tokenizer.decode_with_special(&[eos])?),
            None => "''".to_owned(),
        };
        let text = format!(
            "{begin}{{% for m in messages %}}{{% if m.role == 'system' %}}{{{{ m.content + '\\n\\n' }}}}\
             {{% elif m.role == 'assistant' %}}{{{{ 'Assistant: ' + m.content + {end} + '\\n' }}}}\
             {{% else %}}{{{{ 'User: ' + m.content + '\\n' }}}}{{% endif %}}{{% endfor %}}\
             {{% if add_generation_prompt %}}{{{{ 'Assistant:' }}}}{{% endif %}}"
        );
        Ok(DefaultTemplate { about: "User: … / Assistant: …", text })
    }

    /// Returns the template for models trained on texts or prompts: the messages as they are, joined.
    ///
    /// # Errors
    /// [`TokenizerError`].
    pub fn joined(tokenizer: &Tokenizer) -> Result<Self, TokenizerError> {
        let text = format!("{}{JOINED}", begin(tokenizer)?);
        Ok(DefaultTemplate { about: "the messages as they are", text })
    }
}

/// Returns the expression of the token that the tokenizer begins texts with; empty if there is none.
fn begin(tokenizer: &Tokenizer) -> Result<String, TokenizerError> {
    let first = tokenizer.encode("a", Bos::Auto)?.first().copied();
    let inserted = first != tokenizer.encode("a", Bos::Never)?.first().copied();
    Ok(match first.filter(|_| inserted) {
        Some(first) => format!("{{{{ {} }}}}", quoted(&tokenizer.decode_with_special(&[first])?)),
        None => String::new(),
    })
}

/// Writes a text as a Jinja literal.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\\', "\\\\").replace('\'', "\\'"))
}
