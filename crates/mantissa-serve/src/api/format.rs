//! Form of a reply: the fields of a request that ask for a grammar.

use serde::Deserialize;
use serde_json::Value;
use utoipa::ToSchema;

use super::ApiError;
use crate::grammar::Grammar;

/// Form of the text of a reply.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub(crate) struct ResponseFormat {
    /// `text`, `json_object` or `json_schema`.
    #[serde(rename = "type")]
    kind: String,
    json_schema: Option<NamedSchema>,
    /// Schema for `json_object`.
    #[schema(value_type = Option<Object>)]
    schema: Option<Value>,
}

/// Schema with its name.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub(crate) struct NamedSchema {
    #[allow(dead_code)]
    name: Option<String>,
    #[allow(dead_code)]
    description: Option<String>,
    /// True if the reply follows the schema, which it does in any case.
    #[allow(dead_code)]
    strict: Option<bool>,
    #[schema(value_type = Option<Object>)]
    schema: Option<Value>,
}

/// Other forms of a reply; at most one.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
pub(crate) struct StructuredOutputs {
    /// JSON schema.
    #[schema(value_type = Option<Object>)]
    json: Option<Value>,
    /// Regular expression.
    regex: Option<String>,
    /// Texts, one of which is the reply.
    choice: Option<Vec<String>>,
    /// Grammar in llguidance's Lark.
    grammar: Option<String>,
}

/// Fields of a request that ask for a grammar.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
pub(crate) struct Form {
    response_format: Option<ResponseFormat>,
    /// JSON schema of the text.
    #[schema(value_type = Option<Object>)]
    json_schema: Option<Value>,
    /// Grammar of the text in GBNF.
    grammar: Option<String>,
    structured_outputs: Option<StructuredOutputs>,
    /// JSON schema, or one as text, by the name that vLLM had before `structured_outputs`; so the next three.
    #[schema(value_type = Option<Object>)]
    guided_json: Option<Value>,
    /// Regular expression.
    guided_regex: Option<String>,
    /// Texts, one of which is the reply.
    guided_choice: Option<Vec<String>>,
    /// Grammar in llguidance's Lark.
    guided_grammar: Option<String>,
}

/// Reads a schema that may be given as text.
fn schema(value: Value, field: &str) -> Result<Grammar, ApiError> {
    Ok(Grammar::JsonSchema(match value {
        Value::String(text) => serde_json::from_str(&text)
            .map_err(|error| ApiError::field(field, format!("text with: {error}"), "a JSON schema"))?,
        schema => schema,
    }))
}

impl Form {
    /// Grammar of the reply, and the field that asks for it.
    ///
    /// # Errors
    /// Status 400 for an unknown form, or several.
    pub(crate) fn grammar(self) -> Result<Option<(Grammar, &'static str)>, ApiError> {
        let mut all = Vec::new();
        if let Some(format) = self.response_format {
            all.extend(format.grammar()?.map(|grammar| (grammar, "response_format")));
        }
        all.extend(self.json_schema.map(|schema| (Grammar::JsonSchema(schema), "json_schema")));
        all.extend(self.grammar.filter(|text| !text.is_empty()).map(|text| (Grammar::Gbnf(text), "grammar")));
        if let Some(StructuredOutputs { json, regex, choice, grammar }) = self.structured_outputs {
            let given = [
                json.map(|value| schema(value, "structured_outputs.json")).transpose()?,
                regex.map(Grammar::Regex),
                choice.map(|texts| Grammar::choice(&texts)),
                grammar.map(Grammar::Lark),
            ];
            all.extend(given.into_iter().flatten().map(|grammar| (grammar, "structured_outputs")));
        }
        let json = self.guided_json.map(|value| schema(value, "guided_json")).transpose()?;
        let guided = [
            json.map(|grammar| (grammar, "guided_json")),
            self.guided_regex.map(|regex| (Grammar::Regex(regex), "guided_regex")),
            self.guided_choice.map(|texts| (Grammar::choice(&texts), "guided_choice")),
            self.guided_grammar.map(|lark| (Grammar::Lark(lark), "guided_grammar")),
        ];
        all.extend(guided.into_iter().flatten());
        if all.len() > 1 {
            let fields: Vec<_> = all.iter().map(|(_, field)| *field).collect();
            return Err(ApiError::field(fields[1], fields.join(" and "), "one of them"));
        }
        Ok(all.pop())
    }
}

impl ResponseFormat {
    fn grammar(self) -> Result<Option<Grammar>, ApiError> {
        match (self.kind.as_str(), self.schema, self.json_schema) {
            ("text", ..) => Ok(None),
            ("json_object", None, _) => Ok(Some(Grammar::JsonObject)),
            ("json_object", Some(schema), _) => Ok(Some(Grammar::JsonSchema(schema))),
            ("json_schema", _, Some(NamedSchema { schema: Some(schema), .. })) => {
                Ok(Some(Grammar::JsonSchema(schema)))
            }
            ("json_schema", ..) => {
                Err(ApiError::field("response_format.json_schema.schema", "nothing", "a JSON schema"))
            }
            (other, ..) => {
                Err(ApiError::field("response_format.type", other, "text, json_object or json_schema"))
            }
        }
    }
}
