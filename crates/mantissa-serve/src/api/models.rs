//! `/v1/models`: the models that are served.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use axum::routing::get;
use serde::Serialize;
use serde_json::{Map, Value};
use utoipa::ToSchema;
use utoipa_axum::routes;

use super::{ApiError, App, Artifact, Endpoints};

/// List of models.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Models {
    object: &'static str,
    data: Vec<Model>,
}

/// A model.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Model {
    id: String,
    object: &'static str,
    created: u64,
    owned_by: &'static str,
    meta: Meta,
}

/// Sizes and precision of a model.
#[derive(Debug, Serialize, ToSchema)]
struct Meta {
    /// Longest sequence, prompt and new tokens.
    context: usize,
    /// Longest sequence that the model was made for.
    trained_context: usize,
    vocabulary: usize,
    /// Formats of the linear layers, by the number of layers.
    weights: Vec<String>,
    /// Scheme of the KV cache.
    kv: String,
    /// True if the model has a chat template.
    chat: bool,
    /// Sampling that the model recommends, for what a request does not set.
    #[schema(value_type = Object)]
    sampling: Map<String, Value>,
}

impl Model {
    fn of(artifact: &Artifact, app: &App) -> Self {
        let config = artifact.model.config();
        Model {
            id: artifact.name.clone(),
            object: "model",
            created: app.started,
            owned_by: "mantissa",
            meta: Meta {
                context: artifact.engine.runtime().context,
                trained_context: config.max_position_embeddings,
                vocabulary: config.vocab_size,
                weights: artifact.formats(),
                kv: artifact.kv.clone(),
                chat: artifact.tokenizer.chat_template().is_some(),
                sampling: artifact.sampling_stated(),
            },
        }
    }
}

impl Artifact {
    /// Sampling that the model recommends, by the names of the fields of a request.
    pub(crate) fn sampling_stated(&self) -> Map<String, Value> {
        let given = self.sampling;
        // As a decimal fraction of few digits, not as the f64 that the f32 is.
        let float = |x: f32| x.to_string().parse::<f64>().map_or(Value::Null, Value::from);
        let all = [
            ("temperature", given.temperature.map(float)),
            ("top_k", given.top_k.map(Value::from)),
            ("top_p", given.top_p.map(float)),
            ("min_p", given.min_p.map(float)),
            ("repetition_penalty", given.repetition.map(float)),
        ];
        all.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))).collect()
    }

    /// Formats of the linear layers, the most frequent first.
    pub(crate) fn formats(&self) -> Vec<String> {
        let mut counts: Vec<(usize, String)> = Vec::new();
        for linear in self.model.linears() {
            let format = linear.choice().format;
            match counts.iter_mut().find(|(_, name)| *name == format) {
                Some((count, _)) => *count += 1,
                None => counts.push((1, format)),
            }
        }
        counts.sort_by(|a, b| b.0.cmp(&a.0).then_with(|| a.1.cmp(&b.1)));
        counts.into_iter().map(|(_, name)| name).collect()
    }
}

/// Lists the endpoints of this file.
pub(super) fn endpoints() -> Endpoints {
    Endpoints::new().routes(routes!(list)).routes(routes!(one)).route("/models", get(list))
}

/// Lists the models.
#[utoipa::path(
    get,
    path = "/v1/models",
    responses((status = 200, description = "The models", body = Models), crate::error::Errors)
)]
pub(crate) async fn list(State(app): State<Arc<App>>) -> Json<Models> {
    let data = app.artifacts.iter().map(|artifact| Model::of(artifact, &app)).collect();
    Json(Models { object: "list", data })
}

/// Describes one model.
#[utoipa::path(
    get,
    path = "/v1/models/{name}",
    params(("name" = String, Path, description = "Name of the model")),
    responses((status = 200, description = "The model", body = Model), crate::error::Errors)
)]
pub(crate) async fn one(
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
) -> Result<Json<Model>, ApiError> {
    let artifact = app.named(&name)?;
    Ok(Json(Model::of(&artifact, &app)))
}
