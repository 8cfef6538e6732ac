//! Answers of the APIs whose events have names: as one value, or as the events of a stream.

use std::sync::Arc;

use axum::Json;
use axum::response::{IntoResponse, Response};
use serde_json::Value;

use super::answer::{Answer, Part};
use super::body::Sampling;
use super::chat::ChatRequest;
use super::generate::submit;
use super::preparation::prepare;
use super::reply::{End, Usage};
use super::sse::{self, Cut, Events, Framing, Gone};
use super::{ApiError, App};
use crate::engine::{Caller, Job, Progress, Stream};
use crate::tools::Piece;

/// Events with their names.
pub(super) type Named = Vec<(&'static str, Value)>;

/// A reply of one API while it is generated.
pub(super) trait Reply: Send + 'static {
    /// True if its beginning does not tell how much of the prompt was cached, so that it need not wait for the first part.
    const EARLY: bool;

    /// Form of its stream.
    const FRAMING: Framing = Framing::Events;

    /// Returns the events of the beginning.
    fn start(&mut self, usage: Usage) -> Named;

    /// Returns the events that tell how much of the prompt has been computed.
    fn progress(&mut self, progress: Progress) -> Named;

    /// Adds a part of the reply.
    fn push(&mut self, piece: Piece) -> Named;

    /// Returns the events of the end.
    fn finish(&mut self, end: &End, usage: Usage) -> Named;

    /// Returns the event of a failure.
    fn fail(&mut self, error: ApiError) -> Named;

    /// The whole reply, after its end.
    fn whole(&self, end: &End, usage: Usage) -> Value;
}

/// Checks a request of the chat API that was made of one of another API.
///
/// # Errors
/// Status 400 or 404 that names the field.
pub(super) async fn check(
    app: &Arc<App>,
    caller: Caller,
    chat: Sampling<ChatRequest>,
) -> Result<(Answer, Vec<Job>), ApiError> {
    let Sampling { request, sampled, form, bytes } = chat;
    let artifact = app.artifact(request.model())?;
    prepare(app, caller, bytes, move |app| request.check(sampled, form, app, artifact)).await
}

/// Answers a request; `reply` makes the form of the reply.
///
/// # Errors
/// A request that cannot be answered, or that is not queued.
pub(super) async fn answer<R: Reply>(
    app: &Arc<App>,
    caller: Caller,
    chat: Sampling<ChatRequest>,
    streams: bool,
    reply: impl FnOnce(&Answer) -> R,
) -> Result<Response, ApiError> {
    let checked = check(app, caller, chat).await?;
    answer_checked(app, caller, checked, streams, reply).await
}

/// Answers a request that was checked; `reply` makes the form of the reply.
///
/// # Errors
/// A request that is not queued, or whose job fails before anything is sent.
pub(super) async fn answer_checked<R: Reply>(
    app: &Arc<App>,
    caller: Caller,
    (answer, jobs): (Answer, Vec<Job>),
    streams: bool,
    reply: impl FnOnce(&Answer) -> R,
) -> Result<Response, ApiError> {
    let reply = reply(&answer);
    let stream = submit(app, &answer.plan.artifact, jobs, caller)?;
    if streams {
        let work = |events| send(answer, reply, stream, events);
        return Ok(sse::respond_as(R::FRAMING, app.limits.write_time, work));
    }
    Ok(Json(collect(&answer, reply, stream).await?).into_response())
}

/// Waits for the whole reply.
async fn collect(answer: &Answer, mut reply: impl Reply, stream: Stream) -> Result<Value, ApiError> {
    let mut parts = answer.parts(stream)?;
    let mut end = End::Stop;
    while let Some(part) = parts.next().await? {
        part.pieces.into_iter().for_each(|piece| _ = reply.push(piece));
        end = part.end.unwrap_or(end);
    }
    reply.finish(&end, parts.usage());
    Ok(reply.whole(&end, parts.usage()))
}

/// Sends the events of a reply as they come.
async fn send<R: Reply>(answer: Answer, mut reply: R, stream: Stream, events: Events) -> Result<(), Gone> {
    match pieces(&answer, &mut reply, stream, &events).await {
        Ok(()) => Ok(()),
        Err(Cut::Gone) => Err(Gone),
        Err(Cut::Failed(error)) => events.all(reply.fail(error)).await,
    }
}

async fn pieces<R: Reply>(
    answer: &Answer,
    reply: &mut R,
    stream: Stream,
    events: &Events,
) -> Result<(), Cut> {
    let mut parts = answer.parts(stream)?;
    let mut begun = R::EARLY;
    if begun {
        events.all(reply.start(parts.usage())).await?;
    }
    while let Some(Part { pieces, end, progress, .. }) = parts.next().await? {
        let mut all = Named::new();
        if !std::mem::replace(&mut begun, true) {
            all.extend(reply.start(Usage { new: 0, ..parts.usage() }));
        }
        all.extend(progress.into_iter().flat_map(|progress| reply.progress(progress)));
        all.extend(pieces.into_iter().flat_map(|piece| reply.push(piece)));
        if let Some(end) = end {
            all.extend(reply.finish(&end, parts.usage()));
        }
        events.all(all).await?;
    }
    Ok(())
}
