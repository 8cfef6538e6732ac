//! Numbers of JSON schemas. The parser reads them as f64, and bounds of integers as i64, so an integer beyond 2^53 may
//! become another one, and a reply would violate its schema in silence: such a schema is refused.

use serde_json::{Number, Value};

use super::GrammarError;

/// 2^63: bounds of integers from here on admit every i64.
const I64_END: f64 = 9_223_372_036_854_775_808.0;

/// Kind of a value of a schema.
#[derive(Clone, Copy)]
enum Place {
    Schema,
    /// Schemas by name.
    Names,
    /// Value that a reply has to equal.
    Exact,
}

/// Checks that the parser keeps every number of `schema` that limits a reply.
///
/// # Errors
/// [`GrammarError::Limit`].
pub(super) fn check(schema: &Value) -> Result<(), GrammarError> {
    let mut open = vec![(schema, Place::Schema)];
    while let Some((value, place)) = open.pop() {
        match (value, place) {
            (Value::Array(items), _) => open.extend(items.iter().map(|item| (item, place))),
            (Value::Object(map), Place::Names) => open.extend(map.values().map(|item| (item, Place::Schema))),
            (Value::Object(map), Place::Exact) => open.extend(map.values().map(|item| (item, Place::Exact))),
            (Value::Object(map), Place::Schema) => {
                for (key, value) in map {
                    match (key.as_str(), value) {
                        ("const" | "enum", value) => open.push((value, Place::Exact)),
                        ("default" | "examples", _) => {}
                        (
                            "properties" | "patternProperties" | "$defs" | "definitions" | "dependentSchemas",
                            value,
                        ) => {
                            open.push((value, Place::Names));
                        }
                        (bound, Value::Number(number)) if !keeps_bound(bound, number) => {
                            return Err(limit(bound, number));
                        }
                        _ => open.push((value, Place::Schema)),
                    }
                }
            }
            (Value::Number(number), Place::Exact) if !is_kept(number) || is_large(number) => {
                return Err(limit("const and enum", number));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Checks the schemas within a grammar in Lark.
///
/// # Errors
/// As [`check`].
pub(super) fn check_lark(lark: &str) -> Result<(), GrammarError> {
    for rest in lark.split("%json").skip(1) {
        let mut values = serde_json::Deserializer::from_str(rest).into_iter::<Value>();
        // Other text is left to the parser.
        if let Some(Ok(schema)) = values.next() {
            check(&schema)?;
        }
    }
    Ok(())
}

/// True if the f64 nearest to `number` equals it. A number with a fraction or an exponent is an f64 to every reader.
fn is_kept(number: &Number) -> bool {
    let nearest = number.as_f64().unwrap_or(f64::NAN);
    match (number.as_i64(), number.as_u64()) {
        (Some(exact), _) => nearest as i128 == i128::from(exact),
        (_, Some(exact)) => nearest as i128 == i128::from(exact),
        _ => true,
    }
}

/// True if `number` is no i64, and a reply that equals it cannot be told from its neighbours.
fn is_large(number: &Number) -> bool {
    let value = number.as_f64().unwrap_or(f64::NAN);
    !(-I64_END..I64_END).contains(&value)
}

/// True if no value on the wrong side of the `number` of keyword `bound` is allowed.
fn keeps_bound(bound: &str, number: &Number) -> bool {
    let value = number.as_f64().unwrap_or(f64::NAN);
    // The parser adds or subtracts 1 from exclusive bounds of integers as f64.
    let is_odd_safe = value.abs() < 9_007_199_254_740_992.0;
    match bound {
        "minimum" => value < I64_END && (is_kept(number) || value <= -I64_END),
        "maximum" => value >= I64_END || (value >= -I64_END && is_kept(number)),
        "exclusiveMinimum" => is_odd_safe || value < -I64_END,
        "exclusiveMaximum" => is_odd_safe || (value >= I64_END && number.as_i64().is_none()),
        "multipleOf" => is_kept(number),
        _ => true,
    }
}

fn limit(keyword: &str, number: &Number) -> GrammarError {
    GrammarError::Limit {
        found: number.to_string(),
        allowed: format!(
            "numbers in `{keyword}` that a 64-bit float holds exactly (integers up to 2^53); fix: use a string"
        ),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn checked(text: &str) -> bool {
        check(&serde_json::from_str(text).unwrap()).is_ok()
    }

    #[test]
    fn numbers_that_the_parser_changes_are_refused() {
        for schema in [
            r#"{"const": 9007199254740993}"#,
            r#"{"enum": ["a", [{"b": -9007199254740993}]]}"#,
            r#"{"enum": [18446744073709551617]}"#,
            r#"{"const": 9223372036854775807}"#,
            r#"{"const": 9223372036854775808}"#,
            r#"{"type": "integer", "minimum": 9007199254740993}"#,
            r#"{"type": "integer", "minimum": 9223372036854775807}"#,
            r#"{"type": "integer", "maximum": -9007199254740993}"#,
            r#"{"type": "integer", "exclusiveMinimum": 9007199254740992}"#,
            r#"{"type": "integer", "exclusiveMaximum": 9223372036854775807}"#,
            r#"{"properties": {"minimum": {"items": {"anyOf": [{"const": 9007199254740993}]}}}}"#,
            r##"{"$defs": {"id": {"enum": [1, 36028797018963969]}}, "$ref": "#/$defs/id"}"##,
        ] {
            assert!(!checked(schema), "{schema}");
        }
    }

    #[test]
    fn other_numbers_are_kept() {
        for schema in [
            r#"{"const": 9007199254740992}"#,
            r#"{"const": 36028797018963968}"#,
            r#"{"const": 0.1}"#,
            r#"{"type": "integer", "minimum": -9223372036854775808, "maximum": 9223372036854775807}"#,
            r#"{"type": "integer", "minimum": 0, "maximum": 18446744073709551615}"#,
            r#"{"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308}"#,
            r#"{"type": "integer", "exclusiveMinimum": -9007199254740991}"#,
            r#"{"properties": {"const": {"default": 9007199254740993, "type": "integer"}}}"#,
        ] {
            assert!(checked(schema), "{schema}");
        }
    }

    #[test]
    fn schemas_within_a_grammar_are_checked() {
        assert!(check_lark("start: a b\na: %json {\"const\": 9007199254740993}\nb: \"x\"").is_err());
        assert!(check_lark("start: a\na: %json {\"const\": 1}\n").is_ok());
        assert!(check_lark("start: \"%json\"").is_ok());
    }
}
