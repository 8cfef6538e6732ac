//! Input and output of embeddings.

use serde_json::{Value, json};

use super::convert::FieldError;

/// Most texts of a request.
const MOST: usize = 2048;

/// One text, or its tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Input {
    /// A text.
    Text(String),
    /// Tokens.
    Tokens(Vec<u32>),
}

/// Reads the field `input`: a text, tokens, or a list of either.
///
/// # Errors
/// [`FieldError`].
pub(crate) fn inputs(input: &Value) -> Result<Vec<Input>, FieldError> {
    let all = match input {
        Value::String(text) => vec![Input::Text(text.clone())],
        Value::Array(items) if items.first().is_some_and(Value::is_number) => vec![tokens(items, "input")?],
        Value::Array(items) => {
            let each = items.iter().enumerate().map(|(i, item)| match item {
                Value::String(text) => Ok(Input::Text(text.clone())),
                Value::Array(items) => tokens(items, &format!("input[{i}]")),
                other => Err(FieldError::new(format!("input[{i}]"), "a string or an array of tokens", other)),
            });
            each.collect::<Result<_, _>>()?
        }
        other => return Err(FieldError::new("input", "a string, tokens, or an array of either", other)),
    };
    if all.is_empty() || all.len() > MOST {
        return Err(FieldError::new("input", format!("1 to {MOST} texts"), input));
    }
    Ok(all)
}

fn tokens(items: &[Value], path: &str) -> Result<Input, FieldError> {
    let token = |(i, item): (usize, &Value)| {
        let token = item.as_u64().and_then(|id| u32::try_from(id).ok());
        token.ok_or_else(|| FieldError::new(format!("{path}[{i}]"), "a token", item))
    };
    Ok(Input::Tokens(items.iter().enumerate().map(token).collect::<Result<_, _>>()?))
}

/// Scales a vector to length 1.
pub(crate) fn normalize(vector: &mut [f32]) {
    let norm = vector.iter().map(|x| f64::from(*x) * f64::from(*x)).sum::<f64>().sqrt();
    if norm > 0.0 {
        vector.iter_mut().for_each(|x| *x = (f64::from(*x) / norm) as f32);
    }
}

/// The vector as an array, or as the base64 of its little-endian f32 values.
pub(crate) fn encoded(vector: &[f32], base64: bool) -> Value {
    if base64 {
        let bytes: Vec<u8> = vector.iter().flat_map(|x| x.to_le_bytes()).collect();
        return json!(to_base64(&bytes));
    }
    json!(vector)
}

/// Base64 with padding (RFC 4648, section 4).
fn to_base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let word =
            chunk.iter().fold(0u32, |word, byte| word << 8 | u32::from(*byte)) << (8 * (3 - chunk.len()));
        for i in 0..4 {
            let digit = DIGITS[(word >> (18 - 6 * i) & 63) as usize];
            out.push(if i <= chunk.len() { char::from(digit) } else { '=' });
        }
    }
    out
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests {
    use super::*;

    #[test]
    fn inputs_are_texts_tokens_or_lists() {
        let text = |text: &str| Input::Text(text.into());
        assert_eq!(inputs(&json!("a")).unwrap(), [text("a")]);
        assert_eq!(inputs(&json!([1, 2])).unwrap(), [Input::Tokens(vec![1, 2])]);
        assert_eq!(inputs(&json!(["a", [1, 2]])).unwrap(), [text("a"), Input::Tokens(vec![1, 2])]);
        for (input, field) in [
            (json!([]), "input"),
            (json!(3), "input"),
            (json!([1, "a"]), "input[1]"),
            (json!(["a", {}]), "input[1]"),
            (json!([[1], [-1]]), "input[1][0]"),
            (json!([[5_000_000_000u64]]), "input[0][0]"),
        ] {
            assert_eq!(inputs(&input).unwrap_err().field, field, "{input}");
        }
    }

    #[test]
    fn vectors_are_encoded() {
        for (bytes, text) in
            [(&b""[..], ""), (b"f", "Zg=="), (b"fo", "Zm8="), (b"foo", "Zm9v"), (b"foobar", "Zm9vYmFy")]
        {
            assert_eq!(to_base64(bytes), text);
        }
        let mut vector = [3.0, 4.0];
        normalize(&mut vector);
        assert_eq!(vector, [0.6, 0.8]);
        assert_eq!(encoded(&[1.0], true), json!("AACAPw=="));
        let mut zero = [0.0];
        normalize(&mut zero);
        assert_eq!(zero, [0.0]);
    }
}
