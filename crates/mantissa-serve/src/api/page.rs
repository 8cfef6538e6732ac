//! `/`: the page, one file without any other origin.

use std::sync::LazyLock;

use axum::http::{HeaderValue, header};
use axum::response::{Html, IntoResponse, Response};
use axum::routing::get;
use sha2::{Digest, Sha256};

use super::Endpoints;

/// The page.
const PAGE: &str = include_str!("../page/index.html");

/// Policy of the page: its own script and style, by their hashes, and requests to this server.
static POLICY: LazyLock<String> = LazyLock::new(|| {
    let [script, style] = ["script", "style"].map(hash);
    format!(
        "default-src 'none'; script-src '{script}'; style-src '{style}'; style-src-attr 'none'; img-src data:; connect-src 'self'; \
         base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
});

/// Returns the hash of the content of the only element `name`, as a policy names it.
fn hash(name: &str) -> String {
    let (open, close) = (format!("<{name}>"), format!("</{name}>"));
    let content = PAGE
        .split_once(&open)
        .and_then(|(_, rest)| rest.split_once(&close))
        .map_or("", |(content, _)| content);
    format!("sha256-{}", base64::encode(Sha256::digest(content.as_bytes())))
}

/// Lists the endpoints of this file.
pub(super) fn endpoints() -> Endpoints {
    Endpoints::new().route("/", get(page))
}

/// Returns the page.
pub(crate) async fn page() -> Response {
    let mut response = Html(PAGE).into_response();
    if let Ok(policy) = HeaderValue::from_str(&POLICY) {
        response.headers_mut().insert(header::CONTENT_SECURITY_POLICY, policy);
    }
    response
}
