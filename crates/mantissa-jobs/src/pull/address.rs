//! Addresses of servers and files, and which of them are one server.

use std::fmt;
use std::net::IpAddr;

/// Address of a file by HTTP.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Address {
    /// True for HTTPS.
    secure: bool,
    /// Host in lower case, with a port that is not the usual one.
    authority: String,
    /// Path with its query, empty or from `/` on.
    path: String,
}

/// Longest address in bytes; those of signed links have about 2000.
const LONGEST: usize = 16 << 10;

impl Address {
    /// Parses an address without user and password; `None` for other text.
    pub fn parse(text: &str) -> Option<Self> {
        let printable = text.bytes().all(|byte| byte.is_ascii_graphic());
        let (scheme, rest) = text.split_once("://").filter(|_| printable && text.len() <= LONGEST)?;
        let secure = match scheme.to_ascii_lowercase().as_str() {
            "https" => true,
            "http" => false,
            _ => return None,
        };
        let rest = rest.split('#').next().unwrap_or_default();
        let end = rest.find(['/', '?']).unwrap_or(rest.len());
        let (authority, path) = rest.split_at(end);
        let authority = authority.to_ascii_lowercase();
        let authority = authority.strip_suffix(if secure { ":443" } else { ":80" }).unwrap_or(&authority);
        let allowed = |c: char| c.is_ascii_alphanumeric() || "-._:[]".contains(c);
        let path = if path.starts_with('?') { format!("/{path}") } else { path.to_owned() };
        (!authority.is_empty() && authority.chars().all(allowed)).then(|| Address {
            secure,
            authority: authority.to_owned(),
            path,
        })
    }

    /// Returns the address that a redirect from here names; `None` for one that is relative to a folder.
    pub fn redirected(&self, location: &str) -> Option<Self> {
        if location.contains("://") {
            return Address::parse(location);
        }
        let scheme = if self.secure { "https" } else { "http" };
        match location.strip_prefix("//") {
            Some(other) => Address::parse(&format!("{scheme}://{other}")),
            None if location.starts_with('/') => {
                Address::parse(&format!("{scheme}://{}{location}", self.authority))
            }
            None => None,
        }
    }

    /// Returns the address of the percent-encoded `path`, which starts with `/`, below this one.
    pub fn below(&self, path: &str) -> Self {
        Address { path: format!("{}{path}", self.path.trim_end_matches('/')), ..self.clone() }
    }

    /// True if both addresses are of one server: the same scheme, host and port.
    pub fn is_server_of(&self, other: &Self) -> bool {
        (self.secure, &self.authority) == (other.secure, &other.authority)
    }

    /// True for HTTPS.
    pub fn is_secure(&self) -> bool {
        self.secure
    }

    /// True for this machine.
    pub fn is_local(&self) -> bool {
        let bare = |host: &str| host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
        let host = self.authority.rsplit_once(':').map_or(self.authority.as_str(), |(host, _)| host);
        let is_loopback = |host: &str| bare(host).is_ok_and(|address| address.is_loopback());
        host == "localhost" || is_loopback(host) || is_loopback(&self.authority)
    }

    /// Returns the whole address, which may hold a secret in its query.
    pub fn text(&self) -> String {
        format!("{}://{}{}", if self.secure { "https" } else { "http" }, self.authority, self.path)
    }
}

/// Writes the address without its query, which signs links.
impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text().split('?').next().unwrap_or_default())
    }
}

impl fmt::Debug for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Encodes the parts of a path between `/`.
pub(super) fn encoded(path: &str) -> String {
    path.split('/').map(encoded_part).collect::<Vec<_>>().join("/")
}

/// Encodes one part of a path; `/` in it too.
pub(super) fn encoded_part(part: &str) -> String {
    let mut text = String::with_capacity(part.len());
    for byte in part.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => text.push(byte as char),
            _ => text += &format!("%{byte:02X}"),
        }
    }
    text
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_server_is_its_scheme_host_and_port() {
        let hub = Address::parse("https://HF.co:443/base/").unwrap();
        assert_eq!(hub.below("/a/b?c=1").text(), "https://hf.co/base/a/b?c=1");
        for same in ["https://hf.co/x", "https://hf.co:443", "https://HF.CO?x"] {
            assert!(hub.is_server_of(&Address::parse(same).unwrap()), "{same}");
        }
        for other in ["http://hf.co", "https://hf.co:8443", "https://cdn.hf.co", "https://hf.co.example"] {
            assert!(!hub.is_server_of(&Address::parse(other).unwrap()), "{other}");
        }
        for wrong in ["ftp://a", "https://", "https://user:pass@hf.co", "hf.co", "https://a b", "https://ä"]
        {
            assert!(Address::parse(wrong).is_none(), "{wrong}");
        }
    }

    #[test]
    fn redirects_are_followed_from_where_they_come() {
        let from = Address::parse("https://hf.co/a/resolve/main/b").unwrap();
        let to = |location: &str| from.redirected(location).map(|address| address.text());
        assert_eq!(to("/api/c?d").as_deref(), Some("https://hf.co/api/c?d"));
        assert_eq!(to("//cdn.hf.co/c").as_deref(), Some("https://cdn.hf.co/c"));
        assert_eq!(to("http://cdn.hf.co:81/c#x").as_deref(), Some("http://cdn.hf.co:81/c"));
        assert_eq!((to("c"), to("file:///etc/passwd"), to("/a\r\nb")), (None, None, None));
    }

    #[test]
    fn what_is_shown_holds_no_signature() {
        let signed = Address::parse("https://cdn/x?Signature=secret").unwrap();
        assert_eq!(
            (signed.to_string(), format!("{signed:?}")),
            ("https://cdn/x".into(), "https://cdn/x".into())
        );
        assert_eq!(encoded("a b/c#ä?.json"), "a%20b/c%23%C3%A4%3F.json");
        assert_eq!(encoded_part("refs/pr/1"), "refs%2Fpr%2F1");
    }

    #[test]
    fn this_machine_is_known() {
        for (text, local) in [
            ("http://localhost:80/x", true),
            ("http://127.0.0.1:8080", true),
            ("http://[::1]:8080", true),
            ("http://hf.co", false),
            ("http://127.0.0.1.example.org", false),
        ] {
            assert_eq!(Address::parse(text).unwrap().is_local(), local, "{text}");
        }
    }
}
