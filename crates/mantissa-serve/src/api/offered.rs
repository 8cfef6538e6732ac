//! Tools that a request offers.

use serde::Deserialize;
use serde_json::Value;
use utoipa::ToSchema;

use mantissa_model::chat::ChatTemplates;

use super::{ApiError, Artifact};
use crate::grammar::Grammar;
use crate::tools::{self, Choice, Syntax, Tool};

/// Tool of a request.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub(crate) struct ToolItem {
    /// `function`.
    #[serde(rename = "type")]
    kind: String,
    function: FunctionItem,
}

/// Function of a tool.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub(crate) struct FunctionItem {
    /// Up to 64 letters, digits, `_`, `-` and `.`.
    name: String,
    description: Option<String>,
    /// JSON schema of the arguments.
    #[schema(value_type = Option<Object>)]
    parameters: Option<Value>,
    /// True if the arguments of every call follow the schema.
    strict: Option<bool>,
}

/// `none`, `auto`, `required`, or a function.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(untagged, expecting = "none, auto, required or a function")]
pub(crate) enum ToolChoice {
    /// A word.
    Word(String),
    /// A function by name.
    Function {
        /// Function.
        function: FunctionName,
    },
}

/// Name of a function.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub(crate) struct FunctionName {
    name: String,
}

/// Tools that a reply may call.
#[derive(Clone, Debug)]
pub(crate) struct Offered {
    pub(crate) syntax: &'static Syntax,
    /// True if a message has to present the tools, because no template of the model does.
    pub(crate) needs_message: bool,
    pub(crate) tools: Vec<Tool>,
    choice: Choice,
    parallel: bool,
}

impl Offered {
    /// Reads the tools of a request; `None` if the reply may call none.
    ///
    /// # Errors
    /// Status 400 for a tool or a choice that cannot be used.
    pub(crate) fn new(
        items: Option<Vec<ToolItem>>,
        choice: Option<ToolChoice>,
        parallel: Option<bool>,
        artifact: &Artifact,
    ) -> Result<Option<Self>, ApiError> {
        let choice = match choice {
            None => Choice::Auto,
            Some(ToolChoice::Function { function }) => Choice::Named(function.name),
            Some(ToolChoice::Word(word)) => match word.as_str() {
                "none" => Choice::None,
                "auto" => Choice::Auto,
                "required" => Choice::Required,
                _ => {
                    let allowed = "none, auto, required or a function";
                    return Err(ApiError::field("tool_choice", word, allowed));
                }
            },
        };
        let items = items.unwrap_or_default();
        if items.len() > Tool::MOST {
            let allowed = format!("at most {} tools", Tool::MOST);
            return Err(ApiError::field("tools", format!("{} tools", items.len()), &allowed));
        }
        let tools =
            items.into_iter().enumerate().map(|(at, item)| tool(item, at)).collect::<Result<Vec<_>, _>>()?;
        let named = |name: &str| tools.iter().any(|tool| tool.name == name);
        match &choice {
            Choice::Named(name) if !named(name) => {
                Err(ApiError::field("tool_choice.function.name", name, "the name of one of the tools"))
            }
            Choice::Required if tools.is_empty() => {
                Err(ApiError::field("tools", "none", "at least one tool"))
            }
            Choice::None => Ok(None),
            _ if tools.is_empty() => Ok(None),
            _ => {
                let syntax = Syntax::of(artifact.tokenizer.chat_template_for(true));
                let has_own = artifact.tokenizer.chat_templates().get(ChatTemplates::TOOLS).is_some();
                let needs_message = syntax.needs_message() && !has_own;
                Ok(Some(Offered { syntax, needs_message, tools, choice, parallel: parallel.unwrap_or(true) }))
            }
        }
    }

    /// Grammar of the reply, if its calls have to be valid.
    pub(crate) fn grammar(&self, artifact: &Artifact) -> Option<Grammar> {
        let special = |name: &str| artifact.tokenizer.special_id(name);
        tools::grammar(self.syntax, &self.tools, &self.choice, self.parallel, &special).ok().flatten()
    }

    /// The tools as the chat template reads them.
    pub(crate) fn for_template(&self) -> Value {
        self.tools.iter().map(Tool::to_template).collect()
    }

    /// Names of the tools.
    pub(crate) fn names(&self) -> Vec<String> {
        self.tools.iter().map(|tool| tool.name.clone()).collect()
    }

    /// Presents the tools in the system message, if the chat template does not.
    pub(crate) fn present(&self, messages: &mut Vec<Value>) {
        if !self.needs_message {
            return;
        }
        let text = tools::message(&self.tools);
        match messages.first_mut().filter(|first| first["role"] == "system") {
            Some(first) => {
                let before = first["content"].as_str().unwrap_or_default();
                first["content"] = format!("{before}\n\n{text}").into();
            }
            None => messages.insert(0, serde_json::json!({ "role": "system", "content": text })),
        }
    }
}

fn tool(item: ToolItem, at: usize) -> Result<Tool, ApiError> {
    if item.kind != "function" {
        return Err(ApiError::field(format!("tools[{at}].type"), item.kind, "function"));
    }
    let FunctionItem { name, description, parameters, strict } = item.function;
    let tool = Tool {
        name,
        description,
        parameters: parameters.unwrap_or_default(),
        strict: strict.unwrap_or(false),
    };
    if !tool.has_valid_name() {
        let allowed = "1 to 64 letters, digits, _, - and .";
        return Err(ApiError::field(format!("tools[{at}].function.name"), tool.name, allowed));
    }
    if !(tool.parameters.is_object() || tool.parameters.is_null()) {
        let path = format!("tools[{at}].function.parameters");
        return Err(ApiError::field(path, &tool.parameters, "a JSON schema"));
    }
    Ok(tool)
}

/// Checks the calls of a message, and makes their arguments objects, as templates read them.
pub(crate) fn calls_of_message(calls: Vec<Value>, at: usize) -> Result<Value, ApiError> {
    let call = |(i, mut call): (usize, Value)| {
        if !call.is_object() {
            return Err(ApiError::field(format!("messages[{at}].tool_calls[{i}]"), &call, "an object"));
        }
        let path = format!("messages[{at}].tool_calls[{i}].function");
        if !call["function"].is_object() {
            return Err(ApiError::field(path, &call["function"], "an object"));
        }
        let function = &mut call["function"];
        if !function["name"].is_string() {
            return Err(ApiError::field(format!("{path}.name"), &function["name"], "a string"));
        }
        if let Some(text) = function["arguments"].as_str() {
            // Arguments that are no JSON stay text.
            let arguments = if text.trim().is_empty() {
                Some(serde_json::json!({}))
            } else {
                serde_json::from_str(text).ok()
            };
            if let Some(arguments) = arguments {
                function["arguments"] = arguments;
            }
        }
        Ok(call)
    };
    calls.into_iter().enumerate().map(call).collect()
}
