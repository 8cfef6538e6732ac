//! Conversations as text: the chat template of a model, rendered by the host.

use std::path::Path;

use mantissa_model::{ChatTemplates, Message, Tokenizer, chat};
use serde_json::Value;

use crate::error::{BadInput, ChatFailed, Result};
use crate::host::RenderChat;

/// Returns the default chat template of `model`.
///
/// # Errors
/// [`BadInput`] with `hint` if there is none.
pub fn template<'t>(model: &Path, tokenizer: &'t Tokenizer, hint: &str) -> Result<&'t str> {
    tokenizer.chat_template().ok_or_else(|| {
        let names: Vec<&str> = tokenizer.chat_templates().names().collect();
        let found = match names.as_slice() {
            [] => "no chat template".to_owned(),
            names => format!("chat templates named {}", names.join(", ")),
        };
        let allowed = format!(
            "a chat template named {} in chat_template.jinja, tokenizer_config.json or GGUF metadata; {hint}",
            ChatTemplates::DEFAULT
        );
        BadInput::new(model.display().to_string(), found, allowed).into()
    })
}

/// Renders `prompt` as a user message, after the system message if there is one, with the chat template of `model`.
///
/// # Errors
/// As [`template`] and [`render`].
pub fn conversation(
    model: &Path,
    tokenizer: &Tokenizer,
    system: Option<&str>,
    prompt: &str,
    renderer: &dyn RenderChat,
) -> Result<String> {
    let template = template(model, tokenizer, "fix: leave out --chat")?;
    let system = system.map(|text| Message::new("system", text));
    let messages: Vec<Message> = system.into_iter().chain([Message::new("user", prompt)]).collect();
    render(model, template, &chat::context(&messages, tokenizer.special_tokens()), renderer)
}

/// Renders the template of `model` with one conversation.
///
/// # Errors
/// [`ChatFailed`] if the template exceeds the limits or refuses the conversation; an I/O error if it cannot be run.
pub fn render(model: &Path, template: &str, context: &Value, renderer: &dyn RenderChat) -> Result<String> {
    let rendered = renderer.render_each(model, template, std::slice::from_ref(context))?;
    let text = rendered.into_iter().next().unwrap_or_else(|| Err("expected a text, got none".to_owned()));
    text.map_err(|what| ChatFailed { model: model.display().to_string(), what }.into())
}
