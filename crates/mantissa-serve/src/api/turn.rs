//! The text that a model reads before its turn: the conversation, rendered, and `/apply-template`, which returns it.

use std::sync::Arc;

use axum::extract::State;
use axum::{Extension, Json};
use mantissa_runtime::Constraint;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;
use utoipa_axum::routes;

use super::body::Body;
use super::conversation::{ChatMessage, values};
use super::format::Form;
use super::offered::{Offered, ToolChoice, ToolItem};
use super::preparation::{Preparation, prepare};
use super::render::{Variables, render};
use super::{ApiError, App, Artifact, Endpoints, unknown};
use crate::engine::Caller;
use crate::reasoning::Marks;

/// Compiles the grammar of a reply: the grammar of its calls, or of its text.
pub(super) fn constraint(
    app: &Preparation,
    artifact: &Arc<Artifact>,
    offered: Option<&Offered>,
    form: Form,
) -> Result<Option<Box<dyn Constraint>>, ApiError> {
    let form = form.grammar()?;
    let calls = offered.and_then(|offered| offered.grammar(artifact));
    let (grammar, field) = match (calls, form, offered) {
        (Some(calls), _, _) => (calls, "tools"),
        (None, Some((_, field)), Some(_)) => {
            let allowed = "none together with tools, unless tool_choice is none or required";
            return Err(ApiError::field(field, "a form", allowed));
        }
        (None, Some(form), None) => form,
        (None, None, _) => return Ok(None),
    };
    app.compile(artifact, &grammar, field).map(Some)
}

/// Text that a model reads before its turn.
pub(super) struct Rendered {
    pub(super) text: String,
    /// Marks of thoughts that the template knows.
    pub(super) marks: Option<&'static Marks>,
    /// True if the text ends with the beginning of a thought, or in one.
    pub(super) opened: bool,
}

/// Conversation up to the turn of the model.
pub(super) struct Turn {
    pub(super) messages: Vec<Value>,
    pub(super) kwargs: Map<String, Value>,
    pub(super) add_generation_prompt: Option<bool>,
    pub(super) continue_final_message: bool,
}

impl Turn {
    /// Renders the conversation. A thought that the template begins although it was not asked for is ended.
    pub(super) fn render(
        mut self,
        app: &App,
        artifact: &Artifact,
        offered: Option<&Offered>,
    ) -> Result<Rendered, ApiError> {
        let thinks = self.kwargs.get("enable_thinking") != Some(&Value::Bool(false));
        let last = if self.continue_final_message { Some(self.last()?) } else { None };
        if let Some(offered) = offered {
            offered.present(&mut self.messages);
        }
        let variables = Variables {
            tools: offered.filter(|offered| !offered.needs_message).map(Offered::for_template),
            add_generation_prompt: self.add_generation_prompt.unwrap_or(true) || last.is_some(),
            other: self.kwargs,
        };
        let template = artifact.tokenizer.chat_template_for(variables.tools.is_some());
        let mut text = render(app, artifact, &self.messages, variables)?;
        let marks = Marks::of(template);
        let mut opened = marks.is_some_and(|marks| marks.is_open(&text));
        if let Some(marks) = marks.filter(|_| opened && !thinks) {
            text = format!("{}\n\n{}\n\n", text.trim_end(), marks.close);
            opened = false;
        }
        let last = last.unwrap_or_default();
        opened &= !marks.is_some_and(|marks| last.contains(marks.close));
        Ok(Rendered { text: text + &last, marks, opened })
    }

    /// Takes the last message, with which the answer begins.
    fn last(&mut self) -> Result<String, ApiError> {
        if self.add_generation_prompt == Some(true) {
            let allowed = "false together with continue_final_message";
            return Err(ApiError::field("add_generation_prompt", "true", allowed));
        }
        match self.messages.pop().filter(|last| last["role"] == "assistant") {
            Some(last) => Ok(last["content"].as_str().unwrap_or_default().to_owned()),
            None => Err(ApiError::field("messages", "a last message of another role", "one of assistant")),
        }
    }
}

/// Conversation to be rendered: of a chat request, whose other fields leave the text as it is.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub(crate) struct TemplateRequest {
    model: Option<String>,
    messages: Vec<ChatMessage>,
    tools: Option<Vec<ToolItem>>,
    tool_choice: Option<ToolChoice>,
    #[schema(value_type = Option<Object>)]
    chat_template_kwargs: Option<Map<String, Value>>,
    add_generation_prompt: Option<bool>,
    continue_final_message: Option<bool>,
    /// Refused: the template is the model's.
    #[schema(value_type = Option<Object>)]
    chat_template: Option<Value>,
    /// Refused unless empty.
    #[schema(value_type = Option<Object>)]
    documents: Option<Value>,
}

/// Text of a conversation.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct TemplateResponse {
    prompt: String,
}

/// Lists the endpoints of this file.
pub(super) fn endpoints() -> Endpoints {
    Endpoints::new().routes(routes!(apply_template))
}

/// Renders a conversation with the chat template of the model.
#[utoipa::path(
    post,
    path = "/apply-template",
    request_body = TemplateRequest,
    responses((status = 200, description = "The text", body = TemplateResponse), crate::error::Errors)
)]
pub(crate) async fn apply_template(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Body(request, bytes): Body<TemplateRequest, false>,
) -> Result<Json<TemplateResponse>, ApiError> {
    for (name, value) in [("chat_template", &request.chat_template), ("documents", &request.documents)] {
        value.iter().try_for_each(|value| unknown::check(name, value))?;
    }
    let artifact = app.artifact(request.model.as_deref())?;
    let work = move |app: &Preparation| {
        let offered = Offered::new(request.tools, request.tool_choice, None, &artifact)?;
        let turn = Turn {
            messages: values(request.messages)?,
            kwargs: request.chat_template_kwargs.unwrap_or_default(),
            add_generation_prompt: request.add_generation_prompt,
            continue_final_message: request.continue_final_message.unwrap_or(false),
        };
        let prompt = turn.render(app, &artifact, offered.as_ref())?.text;
        Ok(Json(TemplateResponse { prompt }))
    };
    prepare(&app, caller, bytes, work).await
}
