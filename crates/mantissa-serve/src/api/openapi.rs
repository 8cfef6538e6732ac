//! `/openapi.json`: the description of the API.

use axum::Json;
use axum::routing::get;
use utoipa::openapi::OpenApi as Description;
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityScheme};
use utoipa::{Modify, OpenApi};

use super::Endpoints;
use super::anthropic_error::MessagesErrorBody;
use crate::error::ErrorBody;

/// Adds the keys to the description.
struct Key;

impl Modify for Key {
    fn modify(&self, api: &mut Description) {
        let scheme = SecurityScheme::Http(HttpBuilder::new().scheme(HttpAuthScheme::Bearer).build());
        api.components.get_or_insert_default().add_security_scheme("key", scheme);
    }
}

/// Description of the API without its endpoints, which describe themselves.
#[derive(OpenApi)]
#[openapi(
    info(title = "mantissa serve", description = "Models over HTTP, for clients of OpenAI's API."),
    components(schemas(ErrorBody, MessagesErrorBody)),
    modifiers(&Key),
    security((), ("key" = []))
)]
struct Api;

/// Makes a router without endpoints.
pub(super) fn undescribed() -> Endpoints {
    Endpoints::with_openapi(Api::openapi())
}

/// Adds `/openapi.json`, which describes the endpoints so far.
pub(super) fn described(endpoints: Endpoints) -> Endpoints {
    let description = endpoints.get_openapi().clone();
    endpoints.route("/openapi.json", get(|| async { Json(description) }))
}
