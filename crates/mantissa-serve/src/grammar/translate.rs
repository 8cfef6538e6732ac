//! Translation of a grammar for the parser.

use llguidance::api::TopLevelGrammar;
use serde_json::json;

use super::{Grammar, GrammarError, gbnf, limits};

/// Checks the size of a grammar and translates it for the parser, without compiling it: time is linear in its size, and
/// nothing recurses deeper than its limits of depth.
///
/// # Errors
/// [`GrammarError::Limit`] or [`GrammarError::Invalid`].
pub fn translate(grammar: &Grammar) -> Result<(), GrammarError> {
    limits::check(grammar)?;
    prepare(grammar).map(|_| ())
}

/// Makes the form for the parser of a grammar that was [checked](limits::check).
pub(super) fn prepare(grammar: &Grammar) -> Result<TopLevelGrammar, GrammarError> {
    Ok(match grammar {
        Grammar::JsonObject => {
            TopLevelGrammar::from_json_schema(limits::options(json!({ "type": "object" })))
        }
        Grammar::JsonSchema(schema) => TopLevelGrammar::from_json_schema(limits::options(schema.clone())),
        Grammar::Regex(regex) => TopLevelGrammar::from_regex(regex),
        Grammar::Lark(text) => TopLevelGrammar::from_lark(text.clone()),
        Grammar::Gbnf(text) => TopLevelGrammar::from_lark(gbnf::to_lark(text)?),
    })
}
