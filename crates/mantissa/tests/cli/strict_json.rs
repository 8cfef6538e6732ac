//! JSON without repeated keys: of these, parsers keep one, and the other is lost.

use std::fmt;

use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

/// Parses one JSON value; refuses an object with a repeated key.
pub fn parse(text: impl AsRef<[u8]>) -> serde_json::Result<Value> {
    serde_json::from_slice(text.as_ref()).map(|Strict(value)| value)
}

struct Strict(Value);

impl<'de> Deserialize<'de> for Strict {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Any).map(Strict)
    }
}

struct Any;

impl<'de> Visitor<'de> for Any {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut all: A) -> Result<Value, A::Error> {
        let mut values = Vec::new();
        while let Some(Strict(value)) = all.next_element()? {
            values.push(value);
        }
        Ok(values.into())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut all: A) -> Result<Value, A::Error> {
        let mut fields = Map::new();
        while let Some((key, Strict(value))) = all.next_entry::<String, Strict>()? {
            if fields.insert(key.clone(), value).is_some() {
                return Err(A::Error::custom(format!("key {key:?} is repeated")));
            }
        }
        Ok(fields.into())
    }
}

#[test]
fn a_repeated_key_is_refused() {
    let same = r#"{"a":{"b":[1,-2,0.5,null,true,"c"]},"b":{}}"#;
    assert_eq!(parse(same).unwrap().to_string(), same);
    assert!(parse(r#"{"a":[{"b":1,"c":2,"b":3}]}"#).unwrap_err().to_string().starts_with("key \"b\" is"));
}
