//! Requests of llama.cpp's `/completion`: their prompts, and their options under the names of the other endpoints.

use mantissa_model::SamplingDefaults;
use serde_json::{Map, Value, json};

use super::body::Sampling;
use super::continuation::{Nothing, PromptPart};
use super::convert::FieldError;
use super::notes::note;
use super::{ApiError, unknown};

type Result<T> = std::result::Result<T, ApiError>;

/// Sampling that llama-server's README states for what neither the request nor the model sets.
pub(super) const USUAL: SamplingDefaults = SamplingDefaults {
    temperature: Some(0.8),
    top_k: Some(40),
    top_p: Some(0.95),
    min_p: Some(0.05),
    repetition: None,
};

/// Order in which llama.cpp applies the samplers that this server has.
pub(super) const SAMPLERS: [&str; 4] = ["top_k", "top_p", "min_p", "temperature"];

/// Samplers that do nothing unless another option turns them on, which is refused.
const IDLE_SAMPLERS: &[&str] = &["dry", "infill", "penalties", "top_n_sigma", "typ_p", "typical_p", "xtc"];

/// Fields with another name here.
const NAMES: &[(&str, &str)] = &[
    ("n_predict", "max_tokens"),
    ("n_cmpl", "n"),
    ("repeat_penalty", "repetition_penalty"),
    ("n_probs", "n_probs"),
];

/// Fields with the same name here.
const SAME: &[&str] = &[
    "frequency_penalty",
    "grammar",
    "ignore_eos",
    "json_schema",
    "max_tokens",
    "min_p",
    "min_tokens",
    "n",
    "presence_penalty",
    "repetition_penalty",
    "return_progress",
    "sampler",
    "stop",
    "temperature",
    "top_k",
    "top_p",
];

/// Fields that are read otherwise.
const OTHERS: &[&str] = &[
    "logit_bias",
    "model",
    "prompt",
    "repeat_last_n",
    "response_fields",
    "return_tokens",
    "samplers",
    "seed",
    "stream",
];

/// Checks that all fields are read, or ask for nothing.
pub(super) fn check_fields(body: &Value) -> Result<()> {
    if !body.is_object() {
        return Err(ApiError::bad("expected a JSON object"));
    }
    let renamed = NAMES.iter().map(|(theirs, _)| *theirs);
    let known: Vec<&str> = SAME.iter().chain(OTHERS).copied().chain(renamed).collect();
    unknown::check_fields(body, &known)
}

/// Reads the options of a request of so many `bytes`.
pub(super) fn sampling(body: &Value, bytes: usize) -> Result<Sampling<Nothing>> {
    let mut out = Map::new();
    let renamed = NAMES.iter().copied().chain(SAME.iter().map(|name| (*name, *name)));
    for (theirs, ours) in renamed.filter(|(theirs, _)| !body[*theirs].is_null()) {
        out.insert(ours.into(), body[theirs].clone());
    }
    // Without a number the text goes on until its end.
    out.entry("max_tokens").or_insert(json!(-1));
    // Such a seed is a random one, also as the number that holds it there.
    let seed = &body["seed"];
    if !seed.is_null() && *seed != -1 && *seed != u32::MAX {
        out.insert("seed".into(), seed.clone());
    }
    if !body["logit_bias"].is_null() {
        out.insert("logit_bias".into(), biases(&body["logit_bias"])?);
    }
    samplers(&body["samplers"])?;
    penalty_window("repeat_last_n", &body["repeat_last_n"], &mut out);
    let probabilities = out.remove("n_probs");
    // Cuts and random numbers as llama.cpp has them.
    out.entry("sampler").or_insert(json!("llama.cpp"));
    let names = [("max_tokens", "n_predict"), ("repetition_penalty", "repeat_penalty"), ("n", "n_cmpl")];
    let mut request = Sampling::of(Value::Object(out), bytes, &names)?;
    request.sampled.usual = USUAL;
    if let Some(count) = probabilities.filter(|count| *count != 0) {
        let read = count.as_u64().and_then(|count| u32::try_from(count).ok());
        request.sampled.logprobs =
            Some(read.ok_or_else(|| FieldError::new("n_probs", "a number of tokens", &count))?);
    }
    Ok(request)
}

/// Applies the window of the repetition penalty, which `field` states: 0 turns the penalty off; other windows are shorter than
/// that of the penalty here, which a note says.
pub(super) fn penalty_window(field: &str, window: &Value, out: &mut Map<String, Value>) {
    match window.as_i64() {
        Some(0) => _ = out.insert("repetition_penalty".into(), json!(1.0)),
        Some(tokens)
            if tokens > 0 && out.get("repetition_penalty").is_some_and(|penalty| *penalty != 1.0) =>
        {
            note(format!("{field}: not {tokens} tokens but all so far count for repeat_penalty"));
        }
        _ => {}
    }
}

/// Reads biases: an object, or pairs of a token and its bias, where false bans the token.
fn biases(given: &Value) -> Result<Value> {
    let Value::Array(pairs) = given else { return Ok(given.clone()) };
    let pair = |(i, pair): (usize, &Value)| {
        let fault = |expected: &str| FieldError::new(format!("logit_bias[{i}]"), expected, pair);
        let token = pair[0].as_u64().ok_or_else(|| fault("a pair of a token (its number) and a bias"))?;
        let bias = match &pair[1] {
            Value::Bool(false) => json!(-100),
            bias if bias.is_number() => bias.clone(),
            _ => return Err(fault("a pair of a token and a number, or false")),
        };
        Ok((token.to_string(), bias))
    };
    let pairs: std::result::Result<Map<String, Value>, FieldError> =
        pairs.iter().enumerate().map(pair).collect();
    Ok(Value::Object(pairs?))
}

/// Checks an order of samplers: that of llama.cpp.
fn samplers(given: &Value) -> Result<()> {
    let Value::Array(names) = given else {
        return if given.is_null() {
            Ok(())
        } else {
            Err(FieldError::new("samplers", "an array of names", given).into())
        };
    };
    let named: Vec<&str> = names.iter().map(|name| name.as_str().unwrap_or("?")).collect();
    let active: Vec<&str> = named.into_iter().filter(|name| !IDLE_SAMPLERS.contains(name)).collect();
    if active.is_empty() || active == SAMPLERS {
        return Ok(());
    }
    Err(ApiError::field("samplers", active.join(", "), &format!("{} in this order", SAMPLERS.join(", "))))
}

/// Reads the prompts of a request, and whether there is one only.
pub(super) fn prompts(prompt: &Value) -> Result<(Vec<Vec<PromptPart>>, bool)> {
    let fault = |found: &Value| {
        let expected =
            "a string, a list of tokens and strings, an object with prompt_string, or a list of those";
        ApiError::from(FieldError::new("prompt", expected, found))
    };
    let part = |value: &Value| match value {
        Value::String(text) => Ok(PromptPart::Text(text.clone())),
        value => {
            let token = value.as_u64().and_then(|token| u32::try_from(token).ok());
            Ok(PromptPart::Tokens(vec![token.ok_or_else(|| fault(value))?]))
        }
    };
    let one = |value: &Value| match value {
        Value::String(_) => Ok(vec![part(value)?]),
        Value::Object(fields) => {
            let media = fields.get("multimodal_data").and_then(Value::as_array);
            if media.is_some_and(|media| !media.is_empty()) {
                let expected = "none (image input is not supported)";
                return Err(
                    FieldError::new("prompt.multimodal_data", expected, &value["multimodal_data"]).into()
                );
            }
            Ok(vec![part(&value["prompt_string"])?])
        }
        Value::Array(items) if !items.is_empty() => items.iter().map(part).collect::<Result<Vec<_>>>(),
        other => Err(fault(other)),
    };
    match prompt {
        Value::Array(items) if items.iter().any(Value::is_number) => Ok((vec![one(prompt)?], true)),
        Value::Array(items) if !items.is_empty() => {
            Ok((items.iter().map(one).collect::<Result<Vec<_>>>()?, false))
        }
        other => Ok((vec![one(other)?], true)),
    }
}

/// True if a request names the field `name` among those to return, or none.
pub(super) fn names(fields: &Value, name: &str) -> bool {
    fields.as_array().is_none_or(|names| names.is_empty() || names.iter().any(|other| other == name))
}

/// Keeps the fields that a request names; one of an object in the answer is named with a slash, and stands by itself then.
pub(super) fn chosen(answer: Value, fields: &Value) -> Result<Value> {
    let Some(names) = fields.as_array().filter(|names| !names.is_empty()) else {
        return match fields {
            Value::Null | Value::Array(_) => Ok(answer),
            other => Err(FieldError::new("response_fields", "an array of names", other).into()),
        };
    };
    let mut out = Map::new();
    for name in names {
        let path =
            name.as_str().ok_or_else(|| FieldError::new("response_fields", "an array of names", name))?;
        let found = path.split('/').try_fold(&answer, |value, name| value.get(name));
        if let (Some(found), Some(last)) = (found, path.rsplit('/').next()) {
            out.insert(last.to_owned(), found.clone());
        }
    }
    Ok(Value::Object(out))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn prompts_have_all_their_shapes() {
        let text = |text: &str| PromptPart::Text(text.into());
        let token = |token| PromptPart::Tokens(vec![token]);
        for (prompt, expected, single) in [
            (json!("a"), vec![vec![text("a")]], true),
            (json!([1, 2]), vec![vec![token(1), token(2)]], true),
            (json!([1, "b", 2]), vec![vec![token(1), text("b"), token(2)]], true),
            (json!({ "prompt_string": "a" }), vec![vec![text("a")]], true),
            (json!(["a", "b"]), vec![vec![text("a")], vec![text("b")]], false),
            (
                json!([[1, "a"], "b", { "prompt_string": "c" }]),
                vec![vec![token(1), text("a")], vec![text("b")], vec![text("c")]],
                false,
            ),
        ] {
            assert_eq!(prompts(&prompt).unwrap(), (expected, single), "{prompt}");
        }
        let image = json!({ "prompt_string": "a", "multimodal_data": ["x"] });
        for prompt in [json!(null), json!(3), json!([]), json!([[]]), json!([[-1]]), json!({}), image] {
            assert!(prompts(&prompt).is_err(), "{prompt}");
        }
    }

    #[test]
    fn options_take_their_names_here() {
        let body = json!({
            "prompt": "a", "n_predict": 5, "seed": 4_294_967_295u32, "n_probs": 3, "repeat_penalty": 1.5, "repeat_last_n": 0,
            "logit_bias": [[7, 1.5], [8, false]], "samplers": ["penalties", "dry", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"],
            "cache_prompt": true, "id_slot": -1, "mirostat": 0, "t_max_predict_ms": 0, "stop": []
        });
        check_fields(&body).unwrap();
        let sampled = sampling(&body, 0).unwrap().sampled;
        assert_eq!((sampled.max_tokens, sampled.seed, sampled.logprobs), (Some(5), None, Some(3)));
        assert_eq!(sampled.repetition_penalty, Some(1.0));
        let bias = sampled.logit_bias.unwrap();
        assert_eq!((bias["7"], bias["8"]), (1.5, -100.0));
        assert_eq!(sampling(&json!({}), 0).unwrap().sampled.max_tokens, Some(-1));
    }

    #[test]
    fn options_that_ask_for_something_else_are_refused() {
        for (body, param) in [
            (json!({ "mirostat": 2 }), "mirostat"),
            (json!({ "lora": [{ "id": 0, "scale": 1 }] }), "lora"),
            (json!({ "post_sampling_probs": true }), "post_sampling_probs"),
            (json!({ "t_max_predict_ms": 5 }), "t_max_predict_ms"),
        ] {
            assert_eq!(check_fields(&body).unwrap_err().param.as_deref(), Some(param));
        }
        for (body, param) in [
            (json!({ "samplers": ["temperature", "top_k"] }), "samplers"),
            (json!({ "logit_bias": [["Hello", 1]] }), "logit_bias[0]"),
            (json!({ "n_predict": "x" }), "n_predict"),
            (json!({ "n_probs": -2 }), "n_probs"),
        ] {
            assert_eq!(sampling(&body, 0).unwrap_err().param.as_deref(), Some(param), "{body}");
        }
    }

    #[test]
    fn fields_of_an_answer_are_chosen() {
        let answer = json!({ "content": "a", "stop": true, "generation_settings": { "n_predict": 5 } });
        let some = json!(["content", "generation_settings/n_predict", "none"]);
        assert_eq!(chosen(answer.clone(), &some).unwrap(), json!({ "content": "a", "n_predict": 5 }));
        assert_eq!(chosen(answer.clone(), &json!([])).unwrap(), answer);
        assert!(chosen(answer, &json!("content")).is_err());
    }
}
