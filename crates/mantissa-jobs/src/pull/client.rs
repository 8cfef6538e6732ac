//! Requests to the hub: redirects, which carry the token to no other server, and repetition.

use std::thread::sleep;
use std::time::{Duration, Instant, SystemTime};

use ureq::http::header::HeaderMap;
use ureq::{Agent, Body};

use super::address::Address;
use super::settings::{Token, Variables};
use super::trust::encryption;
use crate::escape;
use crate::host::Host;
use crate::pull_fault::PullFault;

/// Time to connect; to the first byte of an answer, and between two pieces of a file.
const CONNECT: Duration = Duration::from_secs(20);
const SILENCE: Duration = Duration::from_secs(60);

/// Most redirects of a request.
const MOST_HOPS: usize = 8;

/// Attempts without any progress.
const ATTEMPTS: u32 = 6;

/// Wait before the second attempt, doubled before each further one.
const FIRST_WAIT: Duration = Duration::from_millis(500);

/// Longest wait that a server may ask for; the hub counts requests over five minutes.
const LONGEST_WAIT: Duration = Duration::from_secs(330);

/// Largest answer of the API; that of a model with 10 000 files has about 3 MB.
const LARGEST: u64 = 32 << 20;

/// Longest message of a server that is shown, in characters.
const MESSAGE: usize = 300;

/// Connection to a hub.
pub(super) struct Client {
    agent: Agent,
    /// Address of the hub.
    pub endpoint: Address,
    token: Option<Token>,
}

/// Answer of a server after redirects.
pub(super) struct Answer {
    /// Status.
    pub status: u16,
    /// Address that answered.
    pub at: Address,
    /// Headers of the hub's own answers, the first answer's first: they name the file that a redirect leads to.
    hub: Vec<HeaderMap>,
    headers: HeaderMap,
    body: Body,
}

/// Failed attempt that may be repeated.
#[derive(Debug)]
pub(super) struct Again {
    /// Fault.
    pub fault: PullFault,
    /// Wait that the server asks for.
    pub after: Option<Duration>,
}

/// Kinds of failures of one attempt.
pub(super) enum RequestFault {
    /// Worth another attempt.
    Again(Again),
    /// Not to be repeated.
    Final(PullFault),
}

impl Client {
    /// Makes a client of the hub at `endpoint`.
    ///
    /// # Errors
    /// No encryption, if the address asks for it.
    pub fn new(endpoint: Address, token: Option<Token>, variable: Variables<'_>) -> Result<Self, PullFault> {
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .user_agent(concat!("mantissa/", env!("CARGO_PKG_VERSION")))
            .timeout_connect(Some(CONNECT))
            .timeout_recv_response(Some(SILENCE))
            .timeout_per_read(Some(SILENCE));
        // A hub without encryption may redirect to a server with it.
        let agent = match encryption(variable) {
            Ok(found) => config.tls_config(found).build().into(),
            Err(fault) if endpoint.is_secure() => return Err(fault),
            Err(_) => config.build().into(),
        };
        Ok(Client { agent, endpoint, token })
    }

    /// True if a token is sent to the hub.
    pub fn has_token(&self) -> bool {
        self.token.is_some()
    }

    /// Requests `address` once, from byte `from` on; the answer may have any status that is not to be repeated.
    pub fn attempt(&self, address: &Address, from: u64, head: bool) -> Result<Answer, RequestFault> {
        let mut at = address.clone();
        let mut hub = Vec::new();
        for _ in 0..=MOST_HOPS {
            let response = self.send(&at, from, head).map_err(|error| network(&at, &error))?;
            let status = response.status().as_u16();
            let (parts, body) = response.into_parts();
            if at.is_server_of(&self.endpoint) {
                hub.push(parts.headers.clone());
            }
            let location = parts.headers.get("location").filter(|_| (300..400).contains(&status));
            let Some(location) = location else {
                let is_link = !at.is_server_of(&self.endpoint);
                return Answer { status, at, hub, headers: parts.headers, body }.unless_repeated(is_link);
            };
            let next = location.to_str().ok().and_then(|text| at.redirected(text));
            // The hub has said of the file all that is asked.
            if head && next.as_ref().is_some_and(|next| !next.is_server_of(&self.endpoint)) {
                return Ok(Answer { status: 200, at, hub, headers: parts.headers, body });
            }
            // What was asked for by an encrypted connection is not fetched by an open one.
            at = match next.filter(|next| next.is_secure() || !at.is_secure()) {
                Some(next) => next,
                None => return Err(RequestFault::Final(bad_redirect(&at))),
            };
        }
        Err(RequestFault::Final(bad_redirect(&at)))
    }

    fn send(&self, at: &Address, from: u64, head: bool) -> Result<ureq::http::Response<Body>, ureq::Error> {
        let text = at.text();
        let mut request = if head { self.agent.head(&text) } else { self.agent.get(&text) };
        request = request.header("Accept-Encoding", "identity");
        if from > 0 {
            request = request.header("Range", format!("bytes={from}-"));
        }
        if let Some(token) = self.token.as_ref().filter(|_| at.is_server_of(&self.endpoint)) {
            request = request.header("Authorization", token.header());
        }
        request.call()
    }

    /// Requests `address`, repeatedly if need be.
    ///
    /// # Errors
    /// The last failure; a stop.
    pub fn request(&self, address: &Address, head: bool, host: &Host) -> Result<Answer, PullFault> {
        let mut patience = Patience::default();
        loop {
            match self.attempt(address, 0, head) {
                Ok(answer) => return Ok(answer),
                Err(RequestFault::Final(fault)) => return Err(fault),
                Err(RequestFault::Again(again)) => patience.wait(again, host)?,
            }
        }
    }

    /// Requests the text at `address`, repeatedly if need be: an answer that ends early too. Returns the status and, if
    /// that is 200, the text.
    ///
    /// # Errors
    /// As [`request`](Self::request); a text that is too long.
    pub fn text(&self, address: &Address, host: &Host) -> Result<(Answer, String), PullFault> {
        let mut patience = Patience::default();
        loop {
            let mut answer = self.request(address, false, host)?;
            if answer.status != 200 {
                return Ok((answer, String::new()));
            }
            match answer.body.with_config().limit(LARGEST).read_to_string() {
                Ok(text) => return Ok((answer, text)),
                Err(ureq::Error::BodyExceedsLimit(most)) => {
                    return Err(PullFault::Answer {
                        address: address.to_string(),
                        field: "length",
                        expected: "at most 32 MiB",
                        found: format!("more than {most} bytes"),
                    });
                }
                Err(error) => {
                    let fault = PullFault::Network { address: address.to_string(), found: shown(&error) };
                    patience.wait(Again { fault, after: None }, host)?;
                }
            }
        }
    }
}

impl Answer {
    /// Returns the answer, unless its status says that the request may succeed later; `is_link` is true for an answer to
    /// a link of the hub to another server.
    fn unless_repeated(mut self, is_link: bool) -> Result<Self, RequestFault> {
        let after = self.after();
        match self.status {
            408 | 429 | 500 | 502..=504 => {}
            // The link has expired: the hub gives another.
            401 | 403 if is_link => {}
            _ => return Ok(self),
        }
        let fault = PullFault::Status { address: self.at.to_string(), found: self.described(), after: None };
        Err(RequestFault::Again(Again { fault, after }))
    }

    /// Returns a header of the hub's own answers, the first one's first.
    pub fn hub_header(&self, name: &str) -> Option<&str> {
        self.hub.iter().find_map(|headers| headers.get(name)?.to_str().ok())
    }

    /// Returns a header of the last answer.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }

    /// Returns the status with the server's message.
    pub fn described(&mut self) -> String {
        let given = self.header("x-error-message").map(str::to_owned);
        // An error's text is short, and a page is none.
        let is_plain = self.header("content-type").is_some_and(|kind| !kind.contains("html"));
        let mut text = || self.body.with_config().limit(4096).read_to_string().ok();
        let message = given.or_else(|| text().filter(|_| is_plain)).unwrap_or_default();
        let message: String = escape::line(&message).chars().take(MESSAGE).collect();
        let status = self.status;
        if message.is_empty() { status.to_string() } else { format!("{status} ({message})") }
    }

    /// Returns the bytes of the answer.
    pub fn into_reader(self) -> impl std::io::Read {
        self.body.into_reader()
    }

    /// Returns the wait that the server asks for: `Retry-After` in seconds or as a date, or the time `t` of the hub's
    /// `RateLimit`.
    fn after(&self) -> Option<Duration> {
        if let Some(text) = self.header("retry-after") {
            let date = || httpdate::parse_http_date(text).ok()?.duration_since(SystemTime::now()).ok();
            return text.trim().parse().ok().map(Duration::from_secs).or_else(date);
        }
        let parts = self.header("ratelimit").filter(|_| self.status == 429)?.split([';', ',']);
        let time = parts.filter_map(|part| part.trim().strip_prefix("t=")?.parse().ok()).next()?;
        Some(Duration::from_secs(time))
    }
}

/// Number of attempts that are left, and the wait before the next.
pub(super) struct Patience {
    left: u32,
    next: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Patience { left: ATTEMPTS - 1, next: FIRST_WAIT }
    }
}

impl Patience {
    /// Waits before another attempt.
    ///
    /// # Errors
    /// The failure, if there were attempts enough or the server asks for too long a wait; a stop.
    pub fn wait(&mut self, again: Again, host: &Host) -> Result<(), PullFault> {
        let wait = again.after.map_or(self.next, |asked| asked.max(Duration::from_millis(1)));
        if self.left == 0 || wait > LONGEST_WAIT {
            return Err(again.fault.after(again.after));
        }
        self.left -= 1;
        self.next *= 2;
        if wait >= Duration::from_secs(2) {
            host.note(&format!("{}; next attempt in {} s", again.fault.brief(), wait.as_secs()));
        }
        let end = Instant::now() + wait;
        loop {
            if host.stops() {
                return Err(PullFault::Stopped("pull".into()));
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            sleep(left.min(Duration::from_millis(50)));
        }
    }
}

/// Makes the failure of a connection; a certificate that is not trusted stays so.
fn network(at: &Address, error: &ureq::Error) -> RequestFault {
    let fault = PullFault::Network { address: at.to_string(), found: shown(error) };
    match error {
        ureq::Error::Rustls(_) | ureq::Error::Tls(_) | ureq::Error::TlsRequired => RequestFault::Final(fault),
        ureq::Error::BadUri(_) | ureq::Error::InvalidProxyUrl => RequestFault::Final(fault),
        ureq::Error::Io(error) if error.to_string().contains("certificate") => RequestFault::Final(fault),
        _ => RequestFault::Again(Again { fault, after: None }),
    }
}

/// Returns the text of an error on one line.
pub(super) fn shown(error: &impl std::fmt::Display) -> String {
    escape::line(&error.to_string())
}

fn bad_redirect(at: &Address) -> PullFault {
    PullFault::Answer {
        address: at.to_string(),
        field: "Location",
        expected: "the address of the file, with HTTPS after HTTPS",
        found: "another address, or too many redirects".into(),
    }
}
