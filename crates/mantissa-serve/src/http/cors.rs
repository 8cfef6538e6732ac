//! Cross-origin requests: which web pages may use the server.
//!
//! A browser lets a page of another origin read a response only if the response names that origin, and asks first
//! (a preflight) before it sends JSON or a key (WHATWG Fetch, "CORS protocol"). Without [`Cors`] no response names one.

use std::net::IpAddr;

use axum::extract::Request;
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};

/// Origins of the web pages that may use the server.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cors {
    allowed: Vec<Allowed>,
}

/// Origin that is allowed.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Allowed {
    /// Any page.
    Any,
    /// Pages of servers on this machine, of any port.
    Loopback,
    /// This origin, in lower case.
    Origin(String),
}

/// Seconds for which a browser may keep the answer to a preflight.
const KEPT: &str = "600";

impl Cors {
    /// Reads origins: `*`, `localhost`, or `SCHEME://HOST[:PORT]`. Without any, no page is allowed.
    ///
    /// # Errors
    /// The text that is no origin.
    pub fn parse<'a>(origins: impl IntoIterator<Item = &'a str>) -> Result<Self, String> {
        let origin = |text: &'a str| match text {
            "*" => Ok(Allowed::Any),
            "localhost" => Ok(Allowed::Loopback),
            _ => {
                let parts = text.split_once("://");
                let is_origin = parts.is_some_and(|(scheme, host)| {
                    ["http", "https"].contains(&scheme) && split_host(host).is_some()
                });
                is_origin.then(|| Allowed::Origin(text.to_ascii_lowercase())).ok_or_else(|| text.to_owned())
            }
        };
        Ok(Cors { allowed: origins.into_iter().map(origin).collect::<Result<_, _>>()? })
    }

    /// True if some page is allowed.
    pub fn is_on(&self) -> bool {
        !self.allowed.is_empty()
    }

    /// Origin of a request, if its page is allowed.
    fn origin(&self, headers: &HeaderMap) -> Option<HeaderValue> {
        let value = headers.get(header::ORIGIN)?;
        let origin = value.to_str().ok()?.to_ascii_lowercase();
        let allows = |allowed: &Allowed| match allowed {
            Allowed::Any => true,
            Allowed::Loopback => is_loopback(&origin),
            Allowed::Origin(other) => *other == origin,
        };
        self.allowed.iter().any(allows).then(|| value.clone())
    }

    /// Answers a preflight; `None` for another request, or if no page is allowed.
    pub(super) fn preflight(&self, request: &Request) -> Option<Response> {
        let headers = request.headers();
        let asks = request.method() == Method::OPTIONS
            && headers.contains_key(header::ORIGIN)
            && headers.contains_key(header::ACCESS_CONTROL_REQUEST_METHOD);
        if !self.is_on() || !asks {
            return None;
        }
        let mut response = StatusCode::OK.into_response();
        if self.origin(headers).is_some() {
            let answer = response.headers_mut();
            // Other methods get an error that the page can read.
            let methods = HeaderValue::from_static("GET, POST, DELETE, OPTIONS");
            answer.insert(header::ACCESS_CONTROL_ALLOW_METHODS, methods);
            // A `*` would not allow Authorization.
            let asked = headers.get(header::ACCESS_CONTROL_REQUEST_HEADERS).cloned();
            answer.extend(asked.map(|asked| (header::ACCESS_CONTROL_ALLOW_HEADERS, asked)));
            answer.insert(header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static(KEPT));
        }
        Some(response)
    }

    /// Headers that let the page of a request read the response; none if no page is allowed.
    pub(super) fn headers(&self, request: &HeaderMap) -> Vec<(header::HeaderName, HeaderValue)> {
        if !self.is_on() {
            return Vec::new();
        }
        // The response depends on the origin, allowed or not.
        let mut headers = vec![(header::VARY, HeaderValue::from_static("Origin"))];
        if let Some(origin) = self.origin(request) {
            headers.push((header::ACCESS_CONTROL_ALLOW_ORIGIN, origin));
            // The server has no cookies; a page may send its own all the same.
            headers.push((header::ACCESS_CONTROL_ALLOW_CREDENTIALS, HeaderValue::from_static("true")));
            let resources = header::HeaderName::from_static("cross-origin-resource-policy");
            headers.push((resources, HeaderValue::from_static("cross-origin")));
        }
        headers
    }
}

/// True for pages of servers on this machine.
fn is_loopback(origin: &str) -> bool {
    let Some(("http" | "https", host)) = origin.split_once("://") else { return false };
    is_loopback_host(host)
}

/// True for the names of this machine, with or without a port.
pub(super) fn is_loopback_host(host: &str) -> bool {
    match split_host(host) {
        Some(Host::Address(address)) => address.is_loopback(),
        Some(Host::Name(name)) => name == "localhost" || name.ends_with(".localhost"),
        None => false,
    }
}

/// Host of an authority.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Host {
    Address(IpAddr),
    /// A name, in lower case.
    Name(String),
}

/// Takes `HOST[:PORT]` apart (RFC 3986, section 3.2, without user information): a name of letters, digits, `-`, `_` and
/// dots, an IPv4 address, or an IPv6 address in brackets. `None` for anything else, and for ports that are none.
fn split_host(authority: &str) -> Option<Host> {
    let (host, port) = match authority.strip_prefix('[') {
        Some(rest) => {
            let (address, rest) = rest.split_once(']')?;
            (Host::Address(IpAddr::V6(address.parse().ok()?)), rest)
        }
        None => {
            let end = authority.find(':').unwrap_or(authority.len());
            let (name, rest) = authority.split_at(end);
            let is_label = |label: &str| {
                !label.is_empty()
                    && label.bytes().all(|c| c.is_ascii_alphanumeric() || matches!(c, b'-' | b'_'))
            };
            if !name.split('.').all(is_label) {
                return None;
            }
            let address = name.parse().map(|address| Host::Address(IpAddr::V4(address)));
            (address.unwrap_or_else(|_| Host::Name(name.to_ascii_lowercase())), rest)
        }
    };
    let port = match port.strip_prefix(':') {
        Some(port) if port.bytes().all(|c| c.is_ascii_digit()) => port.parse::<u16>().is_ok(),
        Some(_) => false,
        None => port.is_empty(),
    };
    port.then_some(host)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn origins_are_compared_as_a_whole() {
        let allows = |cors: &Cors, origin: &str| {
            let headers = HeaderMap::from_iter([(header::ORIGIN, origin.parse().unwrap())]);
            cors.origin(&headers).is_some()
        };
        let local = Cors::parse(["localhost"]).unwrap();
        for origin in
            ["http://localhost", "http://localhost:3000", "https://127.0.0.1:1", "http://[::1]:3000"]
        {
            assert!(allows(&local, origin), "{origin}");
        }
        for origin in [
            "http://notlocalhost",
            "http://localhost.evil.com",
            "http://localhost:80@evil.com",
            "http://[127.0.0.1].evil.com",
            "localhost",
            "null",
            "file://",
        ] {
            assert!(!allows(&local, origin), "{origin}");
        }
        let one = Cors::parse(["https://Chat.example"]).unwrap();
        assert!(allows(&one, "https://chat.example"));
        for origin in ["http://chat.example", "https://chat.example:8443", "https://chat.example.evil"] {
            assert!(!allows(&one, origin), "{origin}");
        }
        assert!(allows(&Cors::parse(["*"]).unwrap(), "null"));
        assert!(!allows(&Cors::default(), "http://localhost"));
        for wrong in [
            "",
            "chat.example",
            "https://",
            "https://a/b",
            "https://*.example",
            "ftp://a",
            "https://a b",
            "https://a:80@b",
            "https://a:b",
            "https://[::1].evil",
            "https://ex\u{e4}mple",
        ] {
            assert_eq!(Cors::parse([wrong]), Err(wrong.to_owned()));
        }
    }

    #[test]
    fn names_of_this_machine_are_told_from_others() {
        for host in ["localhost", "localhost:8080", "127.0.0.1:1", "[::1]:80", "127.9.9.9", "LOCALHOST:1"] {
            assert!(is_loopback_host(host), "{host}");
        }
        for host in
            ["example.org", "localhost.example.org", "127.0.0.1.example.org:80", "192.168.1.1", "", "[::2]"]
        {
            assert!(!is_loopback_host(host), "{host}");
        }
        // What looks like a name of this machine, and is none.
        for host in [
            "[127.0.0.1].evil.com",
            "[::1].evil.com",
            "[::1]evil.com:80",
            "[::1",
            "::1",
            "localhost:80@evil.com",
            "user@localhost",
            "localhost:80:80",
            "localhost:",
            "localhost:+80",
            "localhost:99999",
            "localhost:evil",
            "localhost/",
            "localhost#@evil.com",
            "localhost ",
            "loc\u{430}lhost",
            "\u{ff4c}ocalhost",
            "127.0.0.1\u{2024}evil",
            "evil.com\\.localhost",
            ".localhost",
            "127.1",
            "0x7f000001",
        ] {
            assert!(!is_loopback_host(host), "{host}");
        }
    }
}
