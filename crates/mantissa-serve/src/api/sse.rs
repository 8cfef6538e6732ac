//! Streams: a response that is written while it is made, as server-sent events or as lines of JSON.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, header};
use axum::response::Response;
use http_body::Frame;
use serde::Serialize;
use serde_json::Value;
use tokio::sync::mpsc;
use utoipa::ToSchema;

use super::ApiError;

/// Events that wait for a slow client.
const WAITING: usize = 32;

/// Time without an event after which a comment is sent, so that proxies keep the connection.
const QUIET: Duration = Duration::from_secs(15);

/// The client has gone, or reads nothing.
#[derive(Debug)]
pub(crate) struct Gone;

/// Reason for a response that ends early.
#[derive(Debug)]
pub(crate) enum Cut {
    /// The client has gone.
    Gone,
    /// The request failed.
    Failed(ApiError),
}

impl From<Gone> for Cut {
    fn from(_: Gone) -> Self {
        Cut::Gone
    }
}

impl From<ApiError> for Cut {
    fn from(error: ApiError) -> Self {
        Cut::Failed(error)
    }
}

/// Event of a stream, as clients parse it.
#[derive(Debug, ToSchema)]
#[allow(dead_code)]
pub(crate) struct Event {
    /// Name; OpenAI's chat API and completions have none.
    event: Option<String>,
    /// JSON value, or `[DONE]`.
    data: String,
}

/// Form of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Framing {
    /// Server-sent events.
    Events,
    /// A JSON value on each line.
    Lines,
}

/// Sender of the events of a response.
#[derive(Debug)]
pub(crate) struct Events {
    sender: mpsc::Sender<Bytes>,
    write_time: Duration,
    framing: Framing,
}

impl Events {
    /// Sends an event with a JSON value.
    pub(crate) async fn send(&self, value: &impl Serialize) -> Result<(), Gone> {
        let json = serde_json::to_string(value).map_err(|_| Gone)?;
        self.write(match self.framing {
            Framing::Events => format!("data: {json}\n\n"),
            Framing::Lines => json + "\n",
        })
        .await
    }

    /// Sends an event with its name and a JSON value. Lines, and events whose name is empty, have no name.
    pub(crate) async fn named(&self, name: &str, value: &impl Serialize) -> Result<(), Gone> {
        if name.is_empty() || self.framing == Framing::Lines {
            return self.send(value).await;
        }
        let json = serde_json::to_string(value).map_err(|_| Gone)?;
        self.write(format!("event: {name}\ndata: {json}\n\n")).await
    }

    /// Sends events with their names and JSON values.
    pub(crate) async fn all(&self, events: Vec<(&'static str, Value)>) -> Result<(), Gone> {
        for (name, value) in events {
            self.named(name, &value).await?;
        }
        Ok(())
    }

    /// Ends a response of OpenAI's API: with its last event, or with the error.
    pub(crate) async fn end(&self, sent: Result<(), Cut>) -> Result<(), Gone> {
        match sent {
            Ok(()) => self.write("data: [DONE]\n\n".to_owned()).await,
            Err(Cut::Failed(error)) => self.send(&error.body()).await,
            Err(Cut::Gone) => Err(Gone),
        }
    }

    /// Sends text, lines and all.
    pub(crate) async fn write(&self, text: String) -> Result<(), Gone> {
        let sent = tokio::time::timeout(self.write_time, self.sender.send(Bytes::from(text))).await;
        if matches!(sent, Ok(Ok(()))) { Ok(()) } else { Err(Gone) }
    }
}

/// Responds with the events that `work` sends. It is dropped as soon as the client has gone.
pub(crate) fn respond<W, F>(write_time: Duration, work: W) -> Response
where
    W: FnOnce(Events) -> F,
    F: Future<Output = Result<(), Gone>> + Send + 'static,
{
    respond_as(Framing::Events, write_time, work)
}

/// Responds with the values that `work` sends, in the form `framing`. It is dropped as soon as the client has gone.
pub(crate) fn respond_as<W, F>(framing: Framing, write_time: Duration, work: W) -> Response
where
    W: FnOnce(Events) -> F,
    F: Future<Output = Result<(), Gone>> + Send + 'static,
{
    let (sender, receiver) = mpsc::channel(WAITING);
    let work = work(Events { sender: sender.clone(), write_time, framing });
    tokio::spawn(async move {
        let watch = async {
            while tokio::time::timeout(QUIET, sender.closed()).await.is_err() {
                // A full channel has events to send; lines have no comments.
                if framing == Framing::Events {
                    let _ = sender.try_send(Bytes::from_static(b": waiting\n\n"));
                }
            }
        };
        tokio::select! {
            _ = work => {}
            () = watch => {}
        }
    });
    let mut response = Response::new(Body::new(Channel(receiver)));
    let headers = response.headers_mut();
    let kind = match framing {
        Framing::Events => "text/event-stream",
        Framing::Lines => "application/x-ndjson",
    };
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    response
}

/// Body of the events.
struct Channel(mpsc::Receiver<Bytes>);

impl http_body::Body for Channel {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        self.0.poll_recv(context).map(|bytes| bytes.map(|bytes| Ok(Frame::data(bytes))))
    }
}
