//! Chat templates: renders a conversation to the text format that a model was trained on, by the Jinja template in
//! its files.
//!
//! A template is an untrusted program. It sees the conversation, the names of the special tokens and a few pure
//! functions. There is no loader, so `include` and `import` find nothing, and no host object to reach from.
//! [`render`] limits its steps, its output bytes and, by limits on its source, the depth of all recursion.
//!
//! The size of a string that a template builds and does not print is not limited: the engine counts instructions, and
//! thirty of them can double a string to a gigabyte. So render templates of untrusted files in a separate process
//! with a limited address space, as the `mantissa` binary does. The stack may overflow there as well, on a value that
//! is nested with every step.

mod error;
mod filters;
mod functions;
mod named;
mod python;
mod source;
mod time;

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use mantissa_store::gguf::{Metadata, Value as GgufValue};
use mantissa_store::regular;
use mantissa_store::shown::misleads;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{AutoEscape, Environment, ErrorKind};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

pub use self::error::ChatError;
pub use self::source::MAX_TEMPLATE;
use crate::config::ConfigError;

/// Largest number of templates beside the default.
const MAX_TEMPLATES: usize = 64;

/// Largest number of steps of a rendering. A turn of a conversation takes fewer than 200 with the templates in use.
pub const MAX_STEPS: u64 = 200_000;

/// Longest text that a template may print, in bytes.
pub const MAX_OUTPUT: usize = 8 << 20;

/// Stack of the rendering thread. Parsing takes little of it, because the source is limited. But values are printed,
/// compared and dropped by recursion, and a template can spend all its steps on nesting one.
pub const STACK: usize = 64 << 20;

/// One turn of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// `system`, `user`, `assistant`, or another role that the template knows.
    pub role: String,
    /// Text of the turn.
    pub content: String,
}

impl Message {
    /// Creates a message.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Message { role: role.into(), content: content.into() }
    }
}

/// Builds the variables of a template, named as in transformers: `messages`, `add_generation_prompt`, and the special
/// tokens (`bos_token` and so on).
pub fn context(messages: &[Message], special_tokens: &BTreeMap<String, String>) -> Value {
    let tokens = special_tokens.iter().map(|(name, token)| (name.clone(), json!(token)));
    let mut context: Map<String, Value> = tokens.collect();
    context.insert("messages".into(), json!(messages));
    context.insert("add_generation_prompt".into(), json!(true));
    // Templates test whether these are defined.
    context.insert("tools".into(), Value::Null);
    context.insert("documents".into(), Value::Null);
    Value::Object(context)
}

/// Formats seconds since 1970 as a date in UTC, in the `format` of `strftime`.
///
/// # Errors
/// Names the directive that is not known.
pub fn date(format: &str, seconds: u64) -> Result<String, String> {
    time::strftime(format, seconds)
}

/// Renders `template` with the variables of `context`, in a separate thread.
///
/// # Errors
/// [`ChatError`]; no output is returned then.
pub fn render(template: &str, context: &Value) -> Result<String, ChatError> {
    let template = source::prepare(template)?;
    std::thread::scope(|scope| {
        let work = || render_here(&template, context);
        let thread = std::thread::Builder::new().stack_size(STACK).spawn_scoped(scope, work);
        let thread = thread.map_err(|error| ChatError::Thread(error.to_string()))?;
        thread.join().unwrap_or_else(|_| Err(failure("the engine panicked")))
    })
}

fn failure(message: &str) -> ChatError {
    ChatError::Template { line: 1, message: message.into() }
}

fn render_here(template: &str, context: &Value) -> Result<String, ChatError> {
    let mut engine = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    engine.set_syntax(syntax.map_err(|error| failure(&error.to_string()))?);
    engine.set_auto_escape_callback(|_| AutoEscape::None);
    engine.set_fuel(Some(MAX_STEPS));
    functions::add(&mut engine);
    filters::add(&mut engine);
    let mut out = Capped { bytes: Vec::new() };
    let compiled = engine.template_from_named_str("chat_template", template).map_err(|e| error_of(&e))?;
    let context = minijinja::Value::from(Serde(context));
    compiled.render_captured_to(context, &mut out).map_err(|e| error_of(&e))?;
    String::from_utf8(out.bytes).map_err(|_| failure("output that is not UTF-8"))
}

/// Writer that accepts up to [`MAX_OUTPUT`] bytes.
struct Capped {
    bytes: Vec<u8>,
}

impl Write for Capped {
    fn write(&mut self, part: &[u8]) -> io::Result<usize> {
        if part.len() > MAX_OUTPUT - self.bytes.len() {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.bytes.extend_from_slice(part);
        Ok(part.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn error_of(error: &minijinja::Error) -> ChatError {
    let limit = |found: &str, allowed: String| ChatError::Limit { found: found.into(), allowed };
    let detail = error.detail().unwrap_or_default();
    match error.kind() {
        ErrorKind::OutOfFuel => limit("a template that does not end", format!("up to {MAX_STEPS} steps")),
        ErrorKind::WriteFailure => limit("more text", format!("up to {MAX_OUTPUT} bytes")),
        _ => match detail.strip_prefix(functions::RAISED) {
            Some(message) => ChatError::Refused(shorten(message)),
            None => {
                let message = if detail.is_empty() { error.kind().to_string() } else { detail.to_owned() };
                ChatError::Template { line: error.line().unwrap_or(1), message: shorten(&message) }
            }
        },
    }
}

/// Shortens a text to one line of a few hundred characters: it may quote the template.
fn shorten(text: &str) -> String {
    text.chars().map(|c| if misleads(c) { ' ' } else { c }).take(300).collect()
}

/// Templates of a model by name; the one for plain conversations is `default`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ChatTemplates {
    by_name: BTreeMap<String, String>,
}

impl ChatTemplates {
    /// Name of the template for plain conversations.
    pub const DEFAULT: &str = "default";

    /// Name of the template for conversations with tools, if it is another.
    pub const TOOLS: &str = "tool_use";

    /// Key of a GGUF file for the template of plain conversations; that of another name has the name behind a dot.
    pub const KEY: &str = "tokenizer.chat_template";

    /// Folder with a file for every template that is not the default.
    pub const FOLDER: &str = "additional_chat_templates";

    /// Reads the templates of a GGUF file.
    ///
    /// # Errors
    /// [`mantissa_store::Error::Field`] for a key of another type.
    pub fn of_metadata(metadata: &Metadata) -> mantissa_store::Result<Self> {
        let mut by_name = BTreeMap::new();
        let default = metadata.text(Self::KEY)?.map(|text| (Self::DEFAULT, text));
        let named = metadata.iter().filter_map(|(key, _)| key.strip_prefix(Self::KEY)?.strip_prefix('.'));
        for name in named {
            let text = metadata.text(&format!("{}.{name}", Self::KEY))?;
            by_name.extend(text.map(|text| (name.to_owned(), text.to_owned())));
        }
        by_name.extend(default.map(|(name, text)| (name.to_owned(), text.to_owned())));
        Ok(ChatTemplates { by_name })
    }

    /// Makes the keys of a GGUF file.
    pub fn to_metadata(&self) -> Vec<(String, GgufValue)> {
        let key = |name: &str| match name {
            Self::DEFAULT => Self::KEY.to_owned(),
            name => format!("{}.{name}", Self::KEY),
        };
        let text = |(name, text): (&String, &String)| (key(name), GgufValue::String(text.clone()));
        let mut all: Vec<_> = self.by_name.iter().map(text).collect();
        let named: Vec<String> =
            self.names().filter(|name| *name != Self::DEFAULT).map(str::to_owned).collect();
        if !named.is_empty() {
            // The list of names, as `gguf` of llama.cpp writes it.
            all.push((format!("{}s", Self::KEY), GgufValue::strings(named)));
        }
        all
    }

    /// Creates a set of one template.
    pub fn of(template: String) -> Self {
        ChatTemplates { by_name: [(Self::DEFAULT.to_owned(), template)].into() }
    }

    /// Reads the templates of a model folder: `chat_template.jinja` and the files of its folder
    /// [`additional_chat_templates`](Self::FOLDER), or else the field `chat_template` of its `tokenizer_config.json`, which is one
    /// template or a list of named ones.
    ///
    /// # Errors
    /// [`ConfigError`] if a template is too long or not text, or the field is of another type.
    pub fn load(dir: &Path, tokenizer_config: Option<&Value>) -> Result<Self, ConfigError> {
        let config = dir.join("tokenizer_config.json");
        let field = tokenizer_config.and_then(|config| config.get("chat_template"));
        let mut all = match field {
            None | Some(Value::Null) => Self::default(),
            Some(Value::String(template)) => Self::of(template.clone()),
            Some(Value::Array(list)) => {
                let text = |entry: &Value, key: &str| entry.get(key)?.as_str().map(str::to_owned);
                let named = |entry: &Value| Some((text(entry, "name")?, text(entry, "template")?));
                let by_name: Option<_> = list.iter().map(named).collect();
                let by_name =
                    by_name.ok_or_else(|| fault(config, "a list", "objects of name and template"))?;
                ChatTemplates { by_name }
            }
            Some(_) => return Err(fault(config, "something else", "a template or a list of named ones")),
        };
        let own = dir.join("chat_template.jinja");
        if let Some(template) = read_template(own)? {
            all.by_name.insert(Self::DEFAULT.into(), template);
        }
        for (name, path) in Self::additional(dir) {
            if let Some(template) = read_template(path)? {
                all.by_name.insert(name, template);
            }
        }
        Ok(all)
    }

    /// Lists name and file of the templates beside the default, by name.
    pub fn additional(dir: &Path) -> Vec<(String, PathBuf)> {
        let entries = std::fs::read_dir(dir.join(Self::FOLDER)).into_iter().flatten().flatten();
        let named = |path: PathBuf| {
            let name = path.file_name()?.to_str()?.strip_suffix(".jinja")?.to_owned();
            Some((name, path))
        };
        let mut all: Vec<_> = entries.filter_map(|entry| named(entry.path())).take(MAX_TEMPLATES).collect();
        all.sort();
        all
    }

    /// Reads the template in the file `path`.
    ///
    /// # Errors
    /// [`ConfigError`] if it cannot be read, is too long or not text.
    pub fn of_file(path: &Path) -> Result<Self, ConfigError> {
        let missing = || fault(path.to_owned(), "no file", "a chat template");
        read_template(path.to_owned())?.map(Self::of).ok_or_else(missing)
    }

    /// Returns the template that is known by this name for many models, such as `chatml`.
    pub fn known(name: &str) -> Option<Self> {
        let found = named::NAMED.iter().find(|(known, _)| *known == name);
        found.map(|(_, template)| Self::of((*template).to_owned()))
    }

    /// Lists the names of templates that are known for many models.
    pub fn known_names() -> impl Iterator<Item = &'static str> {
        named::NAMED.iter().map(|(name, _)| *name)
    }

    /// Returns the template of this name.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.by_name.get(name).map(String::as_str)
    }

    /// All names, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.by_name.keys().map(String::as_str)
    }
}

fn read_template(path: PathBuf) -> Result<Option<String>, ConfigError> {
    let read = regular::read_optional(&path, MAX_TEMPLATE as u64, "a chat template");
    let Some(bytes) = read.map_err(|error| ConfigError::unreadable(&path, &error))? else { return Ok(None) };
    match String::from_utf8(bytes) {
        Ok(template) => Ok(Some(template)),
        Err(error) => {
            let found = format!("invalid UTF-8 at byte {}", error.utf8_error().valid_up_to());
            Err(fault(path, found, "a template in UTF-8"))
        }
    }
}

fn fault(path: PathBuf, found: impl Into<String>, allowed: impl Into<String>) -> ConfigError {
    ConfigError {
        file: path.display().to_string(),
        field: "chat_template".into(),
        found: found.into(),
        allowed: allowed.into(),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests;
