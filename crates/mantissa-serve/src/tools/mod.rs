//! Tools that a reply may call: formats of calls, their grammar, and calls in the text of a reply.
//!
//! A chat template presents the tools to the model and shows how calls are written; its text tells the
//! [`Syntax`]. [`Parser`] takes the text of a reply as it is generated, and separates calls from text. [`fn@grammar`] makes
//! the grammar of a reply whose calls have to be valid.

mod grammar;
mod json;
mod parser;
mod syntax;

use serde_json::{Value, json};

pub use self::grammar::grammar;
pub use self::parser::{Parser, Piece};
pub use self::syntax::Syntax;

/// Tool that a reply may call.
#[derive(Clone, Debug, PartialEq)]
pub struct Tool {
    /// Its name: up to 64 letters, digits, `_`, `-` and `.`.
    pub name: String,
    /// Its purpose.
    pub description: Option<String>,
    /// Schema of its arguments, an object.
    pub parameters: Value,
    /// True if its arguments follow the schema in every call.
    pub strict: bool,
}

/// Choice of calls.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Choice {
    /// The reply is text.
    None,
    /// The model decides.
    #[default]
    Auto,
    /// The reply calls a tool.
    Required,
    /// The reply calls this tool.
    Named(String),
}

impl Tool {
    /// Most tools of a request.
    pub const MOST: usize = 128;

    /// True if the name can be used in all formats.
    pub fn has_valid_name(&self) -> bool {
        let valid = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
        (1..=64).contains(&self.name.len()) && self.name.chars().all(valid)
    }

    /// The tool as chat templates expect it: the form of OpenAI's API.
    pub fn to_template(&self) -> Value {
        let mut function = json!({ "name": self.name });
        if let Some(description) = &self.description {
            function["description"] = json!(description);
        }
        function["parameters"] = self.parameters.clone();
        json!({ "type": "function", "function": function })
    }
}

/// Text of a system message that presents tools, for chat templates that do not.
pub fn message(tools: &[Tool]) -> String {
    let mut text = String::from(
        "You may call one of these tools. To call it, reply with nothing but a JSON object \
         {\"name\": …, \"arguments\": {…}}.\n",
    );
    for tool in tools {
        text.push_str(&tool.to_template()["function"].to_string());
        text.push('\n');
    }
    text
}

/// Id of call `index` of the reply `reply`: nine letters and digits, which is what Mistral's templates require.
pub fn call_id(reply: u64, index: usize) -> String {
    const DIGITS: &[u8; 62] = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
    // SplitMix64, so that calls of replies that follow one another differ in all digits.
    let mut x = reply.wrapping_mul(256).wrapping_add(index as u64).wrapping_add(0x9E37_79B9_7F4A_7C15);
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^= x >> 31;
    (0..9)
        .map(|_| {
            let digit = DIGITS[(x % 62) as usize];
            x /= 62;
            char::from(digit)
        })
        .collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests;
