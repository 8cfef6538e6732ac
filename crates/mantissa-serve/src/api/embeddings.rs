//! `/v1/embeddings`: pooled hidden states of texts, of length 1.

use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use mantissa_model::Bos;
use mantissa_runtime::{EventKind, Pooling, Request};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;
use utoipa_axum::routes;

use super::body::Body;
use super::embedding_input::{Input, encoded, inputs, normalize};
use super::generate::{check_tokens, submit};
use super::preparation::{aside, prepare};
use super::{ApiError, App, Artifact, Endpoints};
use crate::engine::{Caller, Failure, Job, Stream, Update};

/// Request of embeddings.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub(crate) struct EmbeddingsRequest {
    model: Option<String>,
    /// A text, tokens, or a list of either.
    #[schema(value_type = Object)]
    input: Value,
    /// `float` or `base64`.
    encoding_format: Option<String>,
    /// `mean` (if absent) or `last`: the pooling of the hidden states after the last norm.
    pooling: Option<String>,
    /// Length of the vectors; only the model's own.
    dimensions: Option<usize>,
}

/// Embeddings.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct EmbeddingsResponse {
    object: &'static str,
    data: Vec<Embedding>,
    model: String,
    usage: EmbeddingsUsage,
}

/// Embedding of one text.
#[derive(Debug, Serialize, ToSchema)]
struct Embedding {
    object: &'static str,
    index: usize,
    /// Numbers, or the base64 of little-endian f32 values.
    #[schema(value_type = Object)]
    embedding: Value,
}

/// Tokens of the texts.
#[derive(Debug, Serialize, ToSchema)]
struct EmbeddingsUsage {
    prompt_tokens: usize,
    total_tokens: usize,
}

/// Lists the endpoints of this file.
pub(super) fn endpoints() -> Endpoints {
    Endpoints::new().routes(routes!(embeddings))
}

/// Computes embeddings.
#[utoipa::path(
    post,
    path = "/v1/embeddings",
    request_body = EmbeddingsRequest,
    responses((status = 200, description = "The embeddings", body = EmbeddingsResponse), crate::error::Errors)
)]
pub(crate) async fn embeddings(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Body(request, bytes): Body<EmbeddingsRequest>,
) -> Result<Response, ApiError> {
    let artifact = app.artifact(request.model.as_deref())?;
    let base64 = match request.encoding_format.as_deref() {
        None | Some("float") => false,
        Some("base64") => true,
        Some(other) => return Err(ApiError::field("encoding_format", other, "float or base64")),
    };
    let pooling = match request.pooling.as_deref() {
        None | Some("mean") => Pooling::Mean,
        Some("last") => Pooling::Last,
        Some(other) => return Err(ApiError::field("pooling", other, "mean or last")),
    };
    let width = artifact.model.config().hidden_size;
    if let Some(dimensions) = request.dimensions.filter(|n| *n != width) {
        return Err(ApiError::field("dimensions", dimensions, &width.to_string()));
    }
    let asked = Asked { input: request.input, pooling, cuts: false, bytes };
    let Embedded { vectors, tokens, .. } = embed(&app, caller, &artifact, asked).await?;
    let embedding = move |(index, mut vector): (usize, Vec<f32>)| {
        normalize(&mut vector);
        Embedding { object: "embedding", index, embedding: encoded(&vector, base64) }
    };
    // Thousands of vectors take a while to be written.
    aside(bytes, move || {
        Json(EmbeddingsResponse {
            object: "list",
            data: vectors.into_iter().enumerate().map(embedding).collect(),
            model: artifact.name.clone(),
            usage: EmbeddingsUsage { prompt_tokens: tokens, total_tokens: tokens },
        })
        .into_response()
    })
    .await
}

/// Texts to embed.
pub(super) struct Asked {
    /// A text, tokens, or a list of either.
    pub(super) input: Value,
    pub(super) pooling: Pooling,
    /// True to cut texts that are longer than the context.
    pub(super) cuts: bool,
    /// Bytes of the request.
    pub(super) bytes: usize,
}

/// Vectors of texts, as the model computes them.
pub(super) struct Embedded {
    pub(super) vectors: Vec<Vec<f32>>,
    /// Tokens of all texts.
    pub(super) tokens: usize,
    /// Number of texts that were cut.
    pub(super) cut: usize,
}

/// Embeds texts.
///
/// # Errors
/// Status 400 for a text that cannot be embedded; a job that is not queued or fails.
pub(super) async fn embed(
    app: &Arc<App>,
    caller: Caller,
    artifact: &Arc<Artifact>,
    asked: Asked,
) -> Result<Embedded, ApiError> {
    let Asked { input, pooling, cuts, bytes } = asked;
    let own = Arc::clone(artifact);
    let mut prompts = prepare(app, caller, bytes, move |app| {
        let tokens = |(i, input): (usize, Input)| match input {
            Input::Text(text) => app.encode(&own, &text, Bos::Auto),
            Input::Tokens(tokens) => check_tokens(&own, &format!("input[{i}]"), &tokens).map(|()| tokens),
        };
        let texts = inputs(&input)?;
        app.check_room(&own, texts.len())?;
        texts.into_iter().enumerate().map(tokens).collect::<Result<Vec<_>, _>>()
    })
    .await?;
    let (context, deadline) = (artifact.engine.runtime().context, app.limits.deadline());
    let mut cut = 0;
    for prompt in prompts.iter_mut().filter(|prompt| cuts && prompt.len() > context) {
        prompt.truncate(context);
        cut += 1;
    }
    let job = |(i, prompt): (usize, &Vec<u32>)| {
        let field = format!("input[{i}]");
        if prompt.is_empty() {
            return Err(ApiError::field(field, "no tokens", "at least one token"));
        }
        if prompt.len() > context {
            let found = format!("{} tokens, which is too large", prompt.len());
            let error = ApiError::field(field, found, &format!("at most {context} tokens"));
            return Err(error.code("context_length_exceeded"));
        }
        let request = Request { prompt: prompt.clone(), embed: Some(pooling), ..Request::default() };
        Ok(Job::new(request, deadline))
    };
    let jobs = prompts.iter().enumerate().map(job).collect::<Result<Vec<_>, _>>()?;
    let vectors = collect(submit(app, artifact, jobs, caller)?, prompts.len()).await?;
    Ok(Embedded { vectors, tokens: prompts.iter().map(Vec::len).sum(), cut })
}

/// Waits for the vectors of all jobs.
async fn collect(mut stream: Stream, count: usize) -> Result<Vec<Vec<f32>>, ApiError> {
    let (mut vectors, mut open) = (vec![Vec::new(); count], count);
    while open > 0 {
        match stream.next().await {
            Some((index, Update::News(EventKind::Embedding(vector)))) => vectors[index] = vector,
            Some((_, Update::Finished(_))) => open -= 1,
            Some((_, Update::Failed(failure))) => return Err(ApiError::failed(&failure)),
            Some(_) => {}
            None => return Err(ApiError::failed(&Failure::Stopping)),
        }
    }
    if vectors.iter().any(Vec::is_empty) {
        // The time limit passed.
        return Err(ApiError::failed(&Failure::Late));
    }
    Ok(vectors)
}
