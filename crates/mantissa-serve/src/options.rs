//! Settings and limits of a server.

use std::time::{Duration, Instant};

use crate::grammar::Confinement;

/// Limits of connections and requests, checked before a request is queued.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Largest request body in bytes.
    pub body: usize,
    /// Bytes of all bodies beyond 64 KiB that are read and parsed at once; others wait.
    pub bodies: usize,
    /// Largest sum of the names and values of a request's headers in bytes.
    pub headers: usize,
    /// Longest path and query in bytes.
    pub target: usize,
    /// Deepest nesting of a JSON body.
    pub depth: usize,
    /// Time for the headers of a request to arrive; an idle connection is closed after it.
    pub header_time: Duration,
    /// Time for the body of a request to arrive.
    pub body_time: Duration,
    /// Time for which a client may read nothing of its response.
    pub write_time: Duration,
    /// Most connections at once.
    pub connections: usize,
    /// Most requests that are tokenized, rendered or compiled at once, of which a client has at most a quarter.
    pub preparations: usize,
    /// Most requests of over 64 KiB that are parsed, tokenized or rendered at once, one of each client: they take memory.
    pub large: usize,
    /// Time for a request to be prepared, from the start of the work.
    pub preparation_time: Duration,
    /// Most requests of one client that wait to be prepared or scored.
    pub waiting: usize,
    /// Most comparisons that are scored at once, one of each client.
    pub scorings: usize,
    /// Most choices of a request, over all of its prompts.
    pub choices: usize,
    /// Most new tokens of a choice; requests for more get so many.
    pub new_tokens: usize,
    /// Most time from arrival to the last token of a request.
    pub time: Duration,
    /// Most stop strings, and the bytes of each.
    pub stops: (usize, usize),
    /// Most tokens with a bias.
    pub biases: usize,
    /// Most alternatives reported with a token.
    pub logprobs: usize,
}

impl Limits {
    /// Time at which a request that arrives now ends. A limit beyond what the clock holds is a year.
    pub(crate) fn deadline(&self) -> Instant {
        const YEAR: Duration = Duration::from_secs(365 * 24 * 60 * 60);
        let now = Instant::now();
        now.checked_add(self.time).unwrap_or(now + YEAR)
    }
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            body: 2 << 20,
            bodies: 64 << 20,
            headers: 32 << 10,
            target: 4 << 10,
            depth: 100,
            header_time: Duration::from_secs(10),
            body_time: Duration::from_secs(30),
            write_time: Duration::from_secs(30),
            connections: 512,
            preparations: 8,
            large: 2,
            preparation_time: Duration::from_secs(30),
            waiting: 128,
            scorings: 2,
            choices: 64,
            new_tokens: usize::MAX,
            time: Duration::from_secs(600),
            stops: (16, 256),
            biases: 1024,
            logprobs: 20,
        }
    }
}

/// Treatment of the thoughts of models that think.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reasoning {
    /// True to separate thoughts from answers, unless a request says otherwise.
    pub separate: bool,
    /// Most tokens of a thought, unless a request says otherwise; `None` for any number.
    pub budget: Option<usize>,
}

impl Default for Reasoning {
    fn default() -> Self {
        Reasoning { separate: true, budget: None }
    }
}

/// Settings of a server.
#[derive(Clone, Debug)]
pub struct Options {
    /// Limits of connections and requests.
    pub limits: Limits,
    /// Most sequences of each model that wait.
    pub queue: usize,
    /// Time for requests at work to finish after a stop was asked for; then they are cancelled.
    pub drain: Duration,
    /// Treatment of thoughts.
    pub reasoning: Reasoning,
    /// Place where grammars are held; without one no reply is constrained.
    pub grammars: Option<Confinement>,
    /// Most memory of the processes that hold grammars, over all models, in bytes.
    pub grammar_memory: u64,
    /// True if clients share the beginnings of their prompts, and so see from `cached_tokens` what others have sent.
    pub share_prefixes: bool,
    /// True if a request for a model that is not served is refused also where a single model could answer it.
    pub strict_model: bool,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            limits: Limits::default(),
            queue: 128,
            drain: Duration::from_secs(20),
            reasoning: Reasoning::default(),
            grammars: None,
            grammar_memory: 256 << 20,
            share_prefixes: false,
            strict_model: false,
        }
    }
}
