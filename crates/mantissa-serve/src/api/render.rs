//! Chat templates: variables of a conversation, and the text they give.

use mantissa_model::Tokenizer;
use serde_json::{Map, Value, json};

use super::{ApiError, App, Artifact};

/// Variables of a template besides the messages.
#[derive(Clone, Debug, Default)]
pub(crate) struct Variables {
    pub(crate) tools: Option<Value>,
    pub(crate) add_generation_prompt: bool,
    /// Variables of the request, such as `enable_thinking`.
    pub(crate) other: Map<String, Value>,
}

/// Renders a conversation with the template of a model.
///
/// # Errors
/// Status 400 if the model has no template or the template refuses the conversation.
pub(crate) fn render(
    app: &App,
    artifact: &Artifact,
    messages: &[Value],
    variables: Variables,
) -> Result<String, ApiError> {
    let Some(template) = artifact.tokenizer.chat_template_for(variables.tools.is_some()) else {
        let message =
            format!("{}: expected a model with a chat template; fix: use /v1/completions", artifact.name);
        return Err(ApiError::bad(message).code("no_chat_template"));
    };
    let context = context(&artifact.tokenizer, messages, variables);
    Ok(app.renderer.render(template, &context)?)
}

/// Makes the variables of a template.
fn context(tokenizer: &Tokenizer, messages: &[Value], variables: Variables) -> Value {
    let Variables { tools, add_generation_prompt, other } = variables;
    let mut context = other;
    context.extend(tokenizer.special_tokens().iter().map(|(name, token)| (name.clone(), json!(token))));
    context.insert("messages".into(), json!(messages));
    // Name of the tools in older templates: a JSON text.
    let functions = tools.as_ref().map_or_else(String::new, Value::to_string);
    context.entry("functions").or_insert_with(|| functions.into());
    context.insert("add_generation_prompt".into(), json!(add_generation_prompt));
    // Templates test whether these are defined.
    context.insert("tools".into(), tools.unwrap_or(Value::Null));
    context.insert("documents".into(), Value::Null);
    Value::Object(context)
}
