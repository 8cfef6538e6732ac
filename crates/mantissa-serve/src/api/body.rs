//! JSON bodies, within limits of bytes, time and depth.

use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::{FromRequest, Request};
use axum::http::{StatusCode, header};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use serde_path_to_error::Track;
use utoipa::ToSchema;

use super::app::BODY_UNIT;
use super::format::Form;
use super::params::Sampled;
use super::preparation::{aside, enter};
use super::{ApiError, App, unknown};
use crate::engine::Caller;
use crate::options::Limits;

/// Body of a request, parsed, and its bytes. `CHECKED`: fields that `T` does not read are refused.
pub(crate) struct Body<T, const CHECKED: bool = true>(pub(crate) T, pub(crate) usize);

impl<T: DeserializeOwned + Send + 'static, const CHECKED: bool> FromRequest<Arc<App>> for Body<T, CHECKED> {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &Arc<App>) -> Result<Self, ApiError> {
        let depth = app.limits.depth;
        let read = move |bytes: &[u8]| {
            let (value, ignored) = parse(bytes, depth)?;
            if CHECKED {
                unknown::check_ignored(bytes, &ignored)?;
            }
            Ok(Body(value, bytes.len()))
        };
        parsed(request, app, read).await
    }
}

/// Body of a request that generates: its own fields beside the fields of sampling and of the reply's form.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub(crate) struct Sampling<T> {
    #[serde(flatten)]
    pub(crate) request: T,
    #[serde(flatten)]
    pub(crate) sampled: Sampled,
    #[serde(flatten)]
    pub(crate) form: Form,
    /// Bytes of the body.
    #[serde(skip)]
    pub(crate) bytes: usize,
}

impl<T: DeserializeOwned + Send + 'static> FromRequest<Arc<App>> for Sampling<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &Arc<App>) -> Result<Self, ApiError> {
        // Parsed in parts, because flattened fields lose their names in errors.
        let depth = app.limits.depth;
        let both = move |bytes: &[u8]| {
            let (request, mut ignored) = parse(bytes, depth)?;
            let (sampled, unsampled) = parse(bytes, depth)?;
            let (form, mut others) = parse(bytes, depth)?;
            ignored.retain(|path| unsampled.contains(path) && others.contains(path));
            others.retain(|path| path.contains('.'));
            unknown::check_ignored(bytes, &[ignored, others].concat())?;
            Ok(Sampling { request, sampled, form, bytes: bytes.len() })
        };
        parsed(request, app, both).await
    }
}

impl<T: DeserializeOwned> Sampling<T> {
    /// Reads a request that was made of one of another API with so many `bytes`; `names` are the fields that have
    /// another name there, with that name.
    ///
    /// # Errors
    /// Status 400 that names the field as the other API does.
    pub(crate) fn of(value: Value, bytes: usize, names: &[(&str, &str)]) -> Result<Self, ApiError> {
        let fault = |error: serde_path_to_error::Error<serde_json::Error>| {
            let mut path = error.path().to_string();
            if let Some((ours, theirs)) = names.iter().find(|(ours, _)| path.starts_with(ours)) {
                path.replace_range(..ours.len(), theirs);
            }
            ApiError::bad(format!("{path}: {}", error.into_inner())).param(path)
        };
        let sampled = serde_path_to_error::deserialize(&value).map_err(fault)?;
        let form = serde_path_to_error::deserialize(&value).map_err(fault)?;
        let request = serde_path_to_error::deserialize(value).map_err(fault)?;
        Ok(Sampling { request, sampled, form, bytes })
    }
}

/// Reads and parses the body of a request within the limits.
async fn parsed<R: Send + 'static>(
    request: Request,
    app: &App,
    parse: impl FnOnce(&[u8]) -> Result<R, ApiError> + Send + 'static,
) -> Result<R, ApiError> {
    check_type(&request)?;
    let stated = stated(&request, &app.limits)?;
    // A body of unknown length may be as large as the limit.
    let size = stated.unwrap_or(app.limits.body);
    let units = u32::try_from((size / BODY_UNIT).min(app.limits.bodies / BODY_UNIT)).unwrap_or(u32::MAX);
    let all = async {
        let permit = Arc::clone(&app.bodies).acquire_many_owned(units).await;
        let caller = request.extensions().get::<Caller>().copied();
        let bytes = read(request, &app.limits).await?;
        let parsed = match caller.filter(|_| bytes.len() >= BODY_UNIT) {
            None => parse(&bytes)?,
            // Not on the threads that serve connections.
            Some(caller) => {
                let place = enter(app, caller, bytes.len()).await?;
                // Both are held as long as the work goes on, wanted or not.
                return aside(bytes.len(), move || {
                    let parsed = parse(&bytes);
                    drop((bytes, place, permit));
                    parsed
                })
                .await?;
            }
        };
        drop(permit);
        Ok(parsed)
    };
    let late = || {
        let message = format!("expected the body within {} s", app.limits.body_time.as_secs());
        ApiError::new(StatusCode::REQUEST_TIMEOUT, "invalid_request_error", message)
    };
    tokio::time::timeout(app.limits.body_time, all).await.unwrap_or_else(|_| Err(late()))
}

/// Checks that the body is said to be JSON. A web page of another origin cannot say so without asking first. Users of
/// Ollama's API say nothing with `curl -d`, which states the type of a form; a page that sends one has an origin.
fn check_type(request: &Request) -> Result<(), ApiError> {
    let headers = request.headers();
    let found = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or("none");
    let essence = found.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    if essence == "application/json" || (essence.starts_with("application/") && essence.ends_with("+json")) {
        return Ok(());
    }
    let from_page =
        [header::ORIGIN.as_str(), "sec-fetch-site"].iter().any(|name| headers.contains_key(*name));
    if is_ollama(request.uri().path()) && essence == "application/x-www-form-urlencoded" && !from_page {
        return Ok(());
    }
    let allowed = "application/json, which a web page of another origin cannot send unasked (with curl: -H 'Content-Type: application/json')";
    let error = ApiError::field("Content-Type", found, allowed);
    Err(ApiError { status: StatusCode::UNSUPPORTED_MEDIA_TYPE, ..error })
}

/// Makes the error of a body that is too large.
fn too_large(limits: &Limits) -> ApiError {
    let message = format!("expected a body of at most {} bytes, got more", limits.body);
    ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "invalid_request_error", message)
}

/// True if a path is one of Ollama's API.
pub(crate) fn is_ollama(path: &str) -> bool {
    path.starts_with("/api/")
}

/// Returns the length that the headers state, if it is within the limit.
fn stated(request: &Request, limits: &Limits) -> Result<Option<usize>, ApiError> {
    let header = request.headers().get(header::CONTENT_LENGTH);
    let stated: Option<u64> = header.and_then(|value| value.to_str().ok()?.parse().ok());
    match stated.map(usize::try_from) {
        None => Ok(None),
        Some(Ok(stated)) if stated <= limits.body => Ok(Some(stated)),
        Some(_) => Err(too_large(limits)),
    }
}

/// Reads the body within the limit.
async fn read(request: Request, limits: &Limits) -> Result<Bytes, ApiError> {
    match Limited::new(request.into_body(), limits.body).collect().await {
        Ok(collected) => Ok(collected.to_bytes()),
        Err(error) if error.is::<LengthLimitError>() => Err(too_large(limits)),
        Err(_) => Err(ApiError::bad("expected a whole body, got one that ends early")),
    }
}

/// Parses a body; names the field at fault. Returns the paths of the fields that `T` does not read too.
pub(crate) fn parse<T: DeserializeOwned>(bytes: &[u8], depth: usize) -> Result<(T, Vec<String>), ApiError> {
    if nesting(bytes) > depth {
        return Err(ApiError::bad(format!("expected JSON nested at most {depth} deep, got more")));
    }
    let mut json = serde_json::Deserializer::from_slice(bytes);
    let (mut track, mut ignored) = (Track::new(), Vec::new());
    let tracked = serde_path_to_error::Deserializer::new(&mut json, &mut track);
    let value =
        serde_ignored::deserialize(tracked, |path| ignored.push(path.to_string())).map_err(|error| {
            let path = track.path().to_string();
            let what = error.to_string();
            // Before a key is read, there is no path of a field: the text is no JSON.
            let is_number = what.starts_with("number out of range");
            let is_text = error.is_syntax() && !is_number || error.is_eof();
            if is_text || path.split('.').any(|part| part == "?") {
                return ApiError::bad(format!("invalid JSON body: {what}"));
            }
            let missing = what.strip_prefix("missing field `").and_then(|rest| rest.split_once('`'));
            if let (".", Some((name, _))) = (path.as_str(), missing) {
                return ApiError::field(name, "nothing", "a value");
            }
            if path == "." {
                return ApiError::bad(format!("invalid JSON body: {what}"));
            }
            ApiError::bad(format!("{path}: {what}")).param(path)
        })?;
    json.end().map_err(|error| ApiError::bad(format!("invalid JSON body: {error}")))?;
    Ok((value, ignored))
}

/// Deepest nesting of objects and lists in a JSON text.
fn nesting(bytes: &[u8]) -> usize {
    let (mut depth, mut most, mut quoted, mut escaped) = (0usize, 0, false, false);
    for &byte in bytes {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if quoted => escaped = true,
            b'"' => quoted = !quoted,
            b'{' | b'[' if !quoted => {
                depth += 1;
                most = most.max(depth);
            }
            b'}' | b']' if !quoted => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    most
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[derive(Debug, Deserialize)]
    struct Example {
        #[allow(dead_code)]
        n: Option<u32>,
        #[allow(dead_code)]
        list: Option<Vec<Item>>,
    }

    #[derive(Debug, Deserialize)]
    struct Item {
        #[allow(dead_code)]
        name: String,
    }

    fn fault(text: &str) -> ApiError {
        parse::<Example>(text.as_bytes(), 20).unwrap_err()
    }

    #[test]
    fn a_wrong_type_names_its_field() {
        assert_eq!(fault(r#"{"n": "x"}"#).param.as_deref(), Some("n"));
        assert_eq!(fault(r#"{"list": [{}]}"#).param.as_deref(), Some("list[0]"));
        assert_eq!(fault(r#"{"n": -1}"#).param.as_deref(), Some("n"));
        assert_eq!(fault(r#"{"list": [{"name": "a"}, {"name": 3}]}"#).param.as_deref(), Some("list[1].name"));
    }

    #[test]
    fn what_is_no_json_is_refused() {
        for text in ["", "{", "[]", "{\"n\": NaN}", "{} x", "{\"n\":1,\"n\":2}", "\u{0}"] {
            assert_eq!(fault(text).status, StatusCode::BAD_REQUEST, "{text}");
        }
        assert_eq!(parse::<Example>(b"{\"n\": \"\xff\"}", 20).unwrap_err().status, StatusCode::BAD_REQUEST);
        assert!(parse::<Example>(br#"{"other": [[1]], "n": null}"#, 20).is_ok());
    }

    #[test]
    fn text_that_is_no_json_names_no_field() {
        for text in
            ["{n: 1}", "{'n': 1}", "{\"n\": 1,}", "{\"n\": tru}", "{\"list\": [{name: 1}]}", "{\"n\":"]
        {
            let ApiError { message, param, .. } = fault(text);
            assert!(message.starts_with("invalid JSON body: ") && param.is_none(), "{text}: {message}");
        }
    }

    #[test]
    fn nesting_is_counted_outside_of_strings() {
        assert_eq!(nesting(br#"{"a": "[[[\"[", "b": [[]]}"#), 3);
        let deep = format!("{{\"x\":{}{}}}", "[".repeat(100_000), "]".repeat(100_000));
        assert!(fault(&deep).message.contains("at most 20 deep"));
    }
}
