//! `/tokenize` and `/detokenize`.

use std::sync::Arc;

use axum::extract::State;
use axum::{Extension, Json};
use mantissa_model::Bos;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa_axum::routes;

use super::body::Body;
use super::generate::check_tokens;
use super::preparation::{Preparation, prepare};
use super::{ApiError, App, Endpoints};
use crate::engine::Caller;
use crate::text::Pieces;

/// Text to tokenize.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct TokenizeRequest {
    model: Option<String>,
    /// Text.
    content: Option<String>,
    /// Text, under its other name.
    prompt: Option<String>,
    /// True to add the tokens that begin a text.
    add_special: Option<bool>,
    /// True to read the names of special tokens as those tokens, which is what happens.
    parse_special: Option<bool>,
    /// True to return the text of each token too.
    with_pieces: Option<bool>,
}

/// Tokens of a text.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct TokenizeResponse {
    tokens: Vec<TokenItem>,
    count: usize,
    max_model_len: usize,
}

/// A token, with its text if asked for.
#[derive(Debug, Serialize, ToSchema)]
#[serde(untagged)]
enum TokenItem {
    Id(u32),
    Piece { id: u32, piece: PieceItem },
}

/// Text of a token, or its bytes if they are a part of a character.
#[derive(Debug, Serialize, ToSchema)]
#[serde(untagged)]
enum PieceItem {
    Text(String),
    Bytes(Vec<u8>),
}

/// Lists the endpoints of this file.
pub(super) fn endpoints() -> Endpoints {
    Endpoints::new().routes(routes!(tokenize)).routes(routes!(detokenize))
}

/// Tokenizes a text.
#[utoipa::path(
    post,
    path = "/tokenize",
    request_body = TokenizeRequest,
    responses((status = 200, description = "The tokens", body = TokenizeResponse), crate::error::Errors)
)]
pub(crate) async fn tokenize(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Body(request, bytes): Body<TokenizeRequest>,
) -> Result<Json<TokenizeResponse>, ApiError> {
    let artifact = app.artifact(request.model.as_deref())?;
    if request.parse_special == Some(false) {
        return Err(ApiError::field(
            "parse_special",
            false,
            "true: names of special tokens are those tokens",
        ));
    }
    let work = move |app: &Preparation| {
        let Some(text) = request.content.or(request.prompt) else {
            return Err(ApiError::field("content", "nothing", "a string"));
        };
        let bos = if request.add_special.unwrap_or(false) { Bos::Auto } else { Bos::Never };
        let ids = app.encode(&artifact, &text, bos)?;
        let pieces = request.with_pieces.unwrap_or(false).then(|| Pieces::new(&artifact.tokenizer));
        let item = |&id: &u32| {
            let Some(pieces) = &pieces else { return Ok(TokenItem::Id(id)) };
            let piece = pieces.piece(id)?;
            let piece = match piece.text() {
                Some(text) => PieceItem::Text(text.to_owned()),
                None => PieceItem::Bytes(piece.bytes),
            };
            Ok(TokenItem::Piece { id, piece })
        };
        let tokens: Vec<_> = ids.iter().map(item).collect::<Result<_, ApiError>>()?;
        let max_model_len = artifact.engine.runtime().context;
        Ok(Json(TokenizeResponse { count: tokens.len(), tokens, max_model_len }))
    };
    prepare(&app, caller, bytes, work).await
}

/// Tokens to turn into text.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct DetokenizeRequest {
    model: Option<String>,
    tokens: Vec<u32>,
}

/// Text of tokens, under both of its names.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct DetokenizeResponse {
    content: String,
    prompt: String,
}

/// Returns the text of tokens, with the names of special ones.
#[utoipa::path(
    post,
    path = "/detokenize",
    request_body = DetokenizeRequest,
    responses((status = 200, description = "The text", body = DetokenizeResponse), crate::error::Errors)
)]
pub(crate) async fn detokenize(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Body(request, bytes): Body<DetokenizeRequest>,
) -> Result<Json<DetokenizeResponse>, ApiError> {
    let artifact = app.artifact(request.model.as_deref())?;
    let work = move |_: &Preparation| {
        check_tokens(&artifact, "tokens", &request.tokens)?;
        let content = artifact.tokenizer.decode_with_special(&request.tokens)?;
        Ok(Json(DetokenizeResponse { prompt: content.clone(), content }))
    };
    prepare(&app, caller, bytes, work).await
}
