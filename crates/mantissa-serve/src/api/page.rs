//! `/`: the page, one file without any other origin; for other clients than browsers a line of text.

use std::sync::LazyLock;

use axum::http::{HeaderMap, HeaderValue, header};
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

/// Text by which clients of Ollama's API know that a server is there.
const RUNNING: &str = "Ollama is running";

/// Returns the page to a browser, and to other clients a text that those of Ollama's API look for.
pub(crate) async fn page(headers: HeaderMap) -> Response {
    let accepts = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
    if !accepts.into_iter().any(|types| types.contains("text/html")) {
        return RUNNING.into_response();
    }
    let mut response = Html(PAGE).into_response();
    if let Ok(policy) = HeaderValue::from_str(&POLICY) {
        response.headers_mut().insert(header::CONTENT_SECURITY_POLICY, policy);
    }
    response
}
