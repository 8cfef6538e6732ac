//! Models in Ollama's API: the list, their descriptions, and refusals of what would change them.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, post};
use mantissa_runtime::prepared::PreparedLinear;
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};
use utoipa_axum::routes;

use super::body::Body;
use super::ollama::OllamaRequest;
use super::ollama_convert::model;
use super::ollama_error::Errors;
use super::ollama_reply::date;
use super::status::PROGRAM;
use super::{ApiError, App, Artifact, Endpoints};
use crate::reasoning::Marks;

/// Version of Ollama's API that is spoken: clients use what the version has.
const VERSION: &str = "0.12.0";

/// Time at which a model is unloaded, which is never.
const NEVER: &str = "9999-12-31T23:59:59Z";

/// Lists the endpoints of this file.
pub(super) fn endpoints() -> Endpoints {
    Endpoints::new()
        .routes(routes!(version))
        .routes(routes!(tags))
        .routes(routes!(running))
        .routes(routes!(show))
        .route("/api/pull", post(pull))
        .route("/api/push", post(unmanaged))
        .route("/api/create", post(unmanaged))
        .route("/api/copy", post(unmanaged))
        .route("/api/delete", delete(unmanaged))
        .route("/api/blobs/{digest}", post(unmanaged).head(unmanaged))
}

/// Tells the version of the API.
#[utoipa::path(
    get,
    path = "/api/version",
    responses((status = 200, description = "The version", body = Value), Errors)
)]
pub(crate) async fn version() -> Json<Value> {
    Json(json!({ "version": VERSION, "server": PROGRAM }))
}

/// Lists the models.
#[utoipa::path(
    get,
    path = "/api/tags",
    responses((status = 200, description = "The models", body = Value), Errors)
)]
pub(crate) async fn tags(State(app): State<Arc<App>>) -> Json<Value> {
    let one = |artifact: &Arc<Artifact>| {
        let mut all = listed(artifact);
        all.insert("modified_at".into(), json!(date(app.started)));
        Value::Object(all)
    };
    Json(json!({ "models": app.artifacts.iter().map(one).collect::<Vec<_>>() }))
}

/// Lists the models in memory, which are all.
#[utoipa::path(
    get,
    path = "/api/ps",
    responses((status = 200, description = "The models", body = Value), Errors)
)]
pub(crate) async fn running(State(app): State<Arc<App>>) -> Json<Value> {
    let one = |artifact: &Arc<Artifact>| {
        let mut all = listed(artifact);
        let context = artifact.engine.runtime().context;
        all.extend([
            ("expires_at".to_owned(), json!(NEVER)),
            ("size_vram".to_owned(), json!(0)),
            ("context_length".to_owned(), json!(context)),
        ]);
        Value::Object(all)
    };
    Json(json!({ "models": app.artifacts.iter().map(one).collect::<Vec<_>>() }))
}

/// Describes a model.
#[utoipa::path(
    post,
    path = "/api/show",
    request_body = OllamaRequest,
    responses((status = 200, description = "The model", body = Value), Errors)
)]
pub(crate) async fn show(
    State(app): State<Arc<App>>,
    Body(OllamaRequest { body }, _): Body<OllamaRequest>,
) -> Result<Json<Value>, ApiError> {
    let artifact = app.artifact(Some(named(&body)?))?;
    let template = artifact.tokenizer.chat_template();
    let mut capabilities = vec!["completion", "embedding"];
    capabilities.extend(template.map(|_| "tools"));
    capabilities.extend(Marks::of(template).map(|_| "thinking"));
    Ok(Json(json!({
        "license": "",
        "modelfile": format!("FROM {}\n", artifact.name),
        "parameters": parameters(&artifact),
        "template": template.unwrap_or_default(),
        "details": details(&artifact),
        "model_info": information(&artifact),
        "capabilities": capabilities,
        "modified_at": date(app.started),
    })))
}

/// Name of the model that a request is about.
fn named(body: &Value) -> Result<&str, ApiError> {
    model(body)?.ok_or_else(|| ApiError::field("model", "nothing", "the name of a model"))
}

/// Describes a model as all lists do. The digest is of its name and formats: the files are not hashed at the start.
fn listed(artifact: &Artifact) -> Map<String, Value> {
    let size: u64 = artifact.model.linears().map(PreparedLinear::bytes).sum();
    let formats = artifact.formats().join(" ");
    let parameters = artifact.model.config().parameters();
    let digest = Sha256::digest(format!("{}\n{formats}\n{parameters}\n{size}", artifact.name).as_bytes());
    let digest: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    let all = [
        ("name", json!(artifact.name)),
        ("model", json!(artifact.name)),
        ("size", json!(size)),
        ("digest", json!(digest)),
        ("details", details(artifact)),
    ];
    all.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

fn details(artifact: &Artifact) -> Value {
    let config = artifact.model.config();
    let family = config.architecture.name;
    // The name that people know the file by; most of its tensors may have another type.
    let formats = artifact.formats();
    let quantization = artifact.file_type.clone().or_else(|| formats.first().cloned()).unwrap_or_default();
    json!({
        "parent_model": "",
        "format": artifact.format,
        "family": family,
        "families": [family],
        "parameter_size": rounded(config.parameters()),
        "quantization_level": quantization,
        "tensor_types": formats,
    })
}

/// A number of parameters in thousands, millions or billions.
fn rounded(parameters: u64) -> String {
    let units = [(1_000_000_000, "B"), (1_000_000, "M"), (1_000, "K")];
    match units.into_iter().find(|(size, _)| parameters >= *size) {
        Some((size, unit)) => format!("{:.2}{unit}", parameters as f64 / size as f64),
        None => parameters.to_string(),
    }
}

/// Sampling that the model recommends, as lines of a Modelfile.
fn parameters(artifact: &Artifact) -> String {
    let theirs = |name: String| if name == "repetition_penalty" { "repeat_penalty".to_owned() } else { name };
    let lines =
        artifact.sampling_stated().into_iter().map(|(name, value)| format!("{} {value}", theirs(name)));
    lines.collect::<Vec<_>>().join("\n")
}

/// Sizes of the model under the keys that GGUF files have.
fn information(artifact: &Artifact) -> Value {
    let config = artifact.model.config();
    let family = config.architecture.name;
    let sizes = [
        ("context_length", config.max_position_embeddings),
        ("embedding_length", config.hidden_size),
        ("block_count", config.num_hidden_layers),
        ("feed_forward_length", config.intermediate_size),
        ("attention.head_count", config.num_attention_heads),
        ("attention.head_count_kv", config.num_key_value_heads),
        ("vocab_size", config.vocab_size),
    ];
    let mut all: Map<String, Value> =
        sizes.into_iter().map(|(key, size)| (format!("{family}.{key}"), json!(size))).collect();
    all.insert("general.architecture".into(), json!(family));
    all.insert("general.parameter_count".into(), json!(config.parameters()));
    all.insert("general.basename".into(), json!(artifact.name));
    Value::Object(all)
}

/// Answers a request to fetch a model: one that is served is there.
async fn pull(
    State(app): State<Arc<App>>,
    Body(OllamaRequest { body }, _): Body<OllamaRequest>,
) -> Result<Response, ApiError> {
    let name = named(&body)?;
    match app.named(name) {
        Ok(_) => Ok(Json(json!({ "status": "success" })).into_response()),
        Err(_) => Err(unmanaged().await),
    }
}

/// Refuses what would change the models.
async fn unmanaged() -> ApiError {
    let message = "expected a request for a model that is served, got one to fetch or change models, which this server does not do; \
                   fix: fetch or quantize the model on its machine, then start mantissa serve MODEL or add --also NAME=MODEL";
    ApiError::new(StatusCode::NOT_IMPLEMENTED, "invalid_request_error", message).code("models_unmanaged")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_rounded() {
        assert_eq!(rounded(134_515_008), "134.52M");
        assert_eq!(rounded(8_030_261_248), "8.03B");
        assert_eq!(rounded(260_000), "260.00K");
        assert_eq!(rounded(12), "12");
    }
}
