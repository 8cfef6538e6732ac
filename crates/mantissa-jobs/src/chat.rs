//! Conversations as text: the chat template of a model, rendered by the host.

use std::path::{Path, PathBuf};

use mantissa_model::{ChatTemplates, LoadError, Message, Tokenizer, chat, read_json};
use mantissa_store::Gguf;
use serde_json::Value;

use crate::error::{BadInput, ChatFailed, Result};
use crate::host::RenderChat;

/// Gives `tokenizer` the chat template that `given` names: one of the model's own list, one that many models have, or a file.
///
/// # Errors
/// [`BadInput`] with the names if there is none; a file that cannot be read.
pub fn with_template(tokenizer: Tokenizer, given: Option<&str>) -> Result<Tokenizer> {
    let Some(given) = given else { return Ok(tokenizer) };
    let own = tokenizer.chat_templates();
    if let Some(templates) = own
        .get(given)
        .map(|template| ChatTemplates::of(template.to_owned()))
        .or_else(|| ChatTemplates::known(given))
    {
        return Ok(tokenizer.with_templates(templates));
    }
    if !Path::new(given).exists() {
        let mut names: Vec<&str> = own.names().filter(|name| *name != ChatTemplates::DEFAULT).collect();
        ChatTemplates::known_names().for_each(|name| names.push(name));
        let allowed = format!("a Jinja file, or one of {}", names.join(", "));
        return Err(BadInput::new("--chat-template", given, allowed).into());
    }
    let templates = ChatTemplates::of_file(Path::new(given)).map_err(LoadError::from)?;
    Ok(tokenizer.with_templates(templates))
}

/// Returns the file that a chat template is read from, if `given` names one.
pub fn template_file(given: Option<&str>) -> Option<PathBuf> {
    given.map(PathBuf::from).filter(|path| path.is_file())
}

/// True if the model at `path`, a folder or a GGUF file, has a template of a plain conversation; false if that cannot be read.
pub fn has_template(path: &Path) -> bool {
    if path.is_file() {
        let metadata =
            |file: &Gguf| file.metadata().text("tokenizer.chat_template").map(|text| text.is_some());
        return Gguf::open(path).is_ok_and(|file| metadata(&file).unwrap_or(false));
    }
    let Ok(config) = read_json(&path.join("tokenizer_config.json")) else { return false };
    let templates = ChatTemplates::load(path, config.as_ref());
    templates.is_ok_and(|templates| templates.get(ChatTemplates::DEFAULT).is_some())
}

/// Returns the default chat template of `model`.
///
/// # Errors
/// [`BadInput`] with `fix` if there is none.
pub fn template<'t>(model: &Path, tokenizer: &'t Tokenizer, fix: &str) -> Result<&'t str> {
    tokenizer.chat_template().ok_or_else(|| {
        let names: Vec<&str> = tokenizer.chat_templates().names().collect();
        let found = match names.as_slice() {
            [] => "no chat template".to_owned(),
            names => format!("chat templates named {}", names.join(", ")),
        };
        let allowed = format!(
            "a chat template named {} in chat_template.jinja, tokenizer_config.json or GGUF metadata",
            ChatTemplates::DEFAULT
        );
        BadInput::new(model.display().to_string(), found, allowed).with_fix(fix).into()
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
    let template = template(model, tokenizer, "leave out --chat, or name one: --chat-template NAME")?;
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
