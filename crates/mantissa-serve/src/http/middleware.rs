//! Checks and headers around every request.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::cors::{Cors, is_loopback_host};
use super::ended::Ended;
use super::keys::Keys;
use crate::api::{ApiError, App, PUBLIC, notes};
use crate::engine::{Caller, Client};

/// Time before a client is told that too many of its requests wait.
const REFUSAL: Duration = Duration::from_millis(100);

/// Header of the requests that the page makes without being asked to.
const PAGE_POLLS: &str = "x-mantissa-page";

/// Address of the client of a connection.
#[derive(Clone, Copy, Debug)]
pub(super) struct Peer(pub(super) IpAddr);

/// Who may send requests.
pub(super) struct Access {
    pub(super) app: Arc<App>,
    pub(super) keys: Option<Keys>,
    /// Web pages that may use the server.
    pub(super) cors: Cors,
    /// True if the server listens on a loopback address only.
    pub(super) loopback: bool,
    /// Writes a line for each request.
    pub(super) log: Arc<dyn Fn(&str) + Send + Sync>,
}

/// Address that stands for a client: of IPv6 the network of 64 bits, whose addresses are one client's to choose.
fn network(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V6(six) if six.to_ipv4_mapped().is_none() => {
            IpAddr::V6(std::net::Ipv6Addr::from_bits(six.to_bits() >> 64 << 64))
        }
        other => other,
    }
}

/// Counts every response, and logs it when its last byte is written, without what the request says. The page's own looks at
/// the load are counted only.
pub(super) async fn observe(State(access): State<Arc<Access>>, request: Request, next: Next) -> Response {
    let begin = Instant::now();
    let method = request.method().clone();
    let path = request.extensions().get::<MatchedPath>().map_or("other", MatchedPath::as_str).to_owned();
    // The page asks for the load each second.
    let polls = method == Method::GET && request.headers().contains_key(PAGE_POLLS);
    let shared = access.cors.headers(request.headers());
    let (mut response, notes) = match access.cors.preflight(&request) {
        Some(response) => (response, Vec::new()),
        None => notes::with_notes(next.run(request)).await,
    };
    for note in notes.iter().filter(|note| access.app.logged.is_new(note)) {
        (access.log)(note);
    }
    if let Some(value) = notes::header(&notes) {
        response.headers_mut().insert(notes::HEADER, value);
    }
    if response.status() == StatusCode::TOO_MANY_REQUESTS {
        // A client that does not wait as it is told would take the machine with refusals.
        tokio::time::sleep(REFUSAL).await;
    }
    let status = response.status().as_u16();
    access.app.metrics.request(&path, status);
    if !(polls && response.status().is_success()) {
        let log = Arc::clone(&access.log);
        let tell = move |whole: bool| {
            let milliseconds = begin.elapsed().as_secs_f64() * 1e3;
            let left = if whole || method == Method::HEAD { "" } else { ", client left" };
            log(&format!("{method} {path} {status} {milliseconds:.1} ms{left}"));
        };
        response = response.map(|body| Ended::body(body, tell));
    }
    secure(response.headers_mut());
    for (name, value) in shared {
        response.headers_mut().insert(name, value);
    }
    response
}

/// Adds headers that keep a browser from more than the page needs.
fn secure(headers: &mut HeaderMap) {
    let fixed = [
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::X_FRAME_OPTIONS, "DENY"),
        (header::REFERRER_POLICY, "no-referrer"),
    ];
    for (name, value) in fixed {
        headers.insert(name, HeaderValue::from_static(value));
    }
    headers.insert("cross-origin-resource-policy", HeaderValue::from_static("same-origin"));
    let none = HeaderValue::from_static("default-src 'none'; frame-ancestors 'none'");
    headers.entry(header::CONTENT_SECURITY_POLICY).or_insert(none);
    headers.entry(header::CACHE_CONTROL).or_insert(HeaderValue::from_static("no-store"));
}

/// Checks sizes, the host and the key of a request, before its body is read.
pub(super) async fn admit(State(access): State<Arc<Access>>, mut request: Request, next: Next) -> Response {
    match access.check(&request) {
        Ok(caller) => {
            request.extensions_mut().insert(caller);
            next.run(request).await
        }
        Err(error) => error.into_response(),
    }
}

impl Access {
    fn check(&self, request: &Request) -> Result<Caller, ApiError> {
        let limits = &self.app.limits;
        let kind = "invalid_request_error";
        let target = request.uri().path_and_query().map_or(0, |target| target.as_str().len());
        if target > limits.target {
            let message =
                format!("expected a path and query of at most {} bytes, got {target}", limits.target);
            return Err(ApiError::new(StatusCode::URI_TOO_LONG, kind, message));
        }
        let sizes = request.headers().iter().map(|(name, value)| name.as_str().len() + value.len());
        let size: usize = sizes.sum();
        if size > limits.headers {
            let message = format!("expected headers of at most {} bytes, got {size}", limits.headers);
            return Err(ApiError::new(StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE, kind, message));
        }
        let peer = request.extensions().get::<Peer>();
        let anonymous = peer.map_or(Client::Own, |peer| Client::Address(network(peer.0)));
        let anonymous = Caller { client: anonymous, priority: 0 };
        let Some(keys) = &self.keys else {
            self.check_host(request)?;
            return Ok(anonymous);
        };
        match keys.caller(request.headers()) {
            Some(caller) => Ok(caller),
            None if PUBLIC.contains(&request.uri().path()) => Ok(anonymous),
            None => {
                let message =
                    "expected an API key in Authorization: Bearer KEY or x-api-key, got none that is known";
                let error = ApiError::new(StatusCode::UNAUTHORIZED, "authentication_error", message);
                Err(error.code("invalid_api_key"))
            }
        }
    }

    /// Refuses names of other hosts on a loopback server without keys: a web page whose name is made to resolve to this
    /// machine could use it otherwise (DNS rebinding).
    fn check_host(&self, request: &Request) -> Result<(), ApiError> {
        if !self.loopback {
            return Ok(());
        }
        let headers = request.headers().get_all(header::HOST).iter().map(HeaderValue::as_bytes);
        let target = request.uri().authority().map(|authority| authority.as_str().as_bytes());
        // A name that is not ASCII is no name of this machine.
        let other = headers.chain(target).map(String::from_utf8_lossy).find(|host| !is_loopback_host(host));
        match other {
            Some(host) => {
                let allowed = "localhost, 127.0.0.1 or [::1]; fix: use --api-key-file or --host";
                Err(ApiError { status: StatusCode::FORBIDDEN, ..ApiError::field("Host", host, allowed) })
            }
            None => Ok(()),
        }
    }
}
