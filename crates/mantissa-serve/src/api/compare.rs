//! `/v1/compare`: two models answer the same prompt, and the difference of their distributions over the first answer.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::Extension;
use axum::extract::State;
use axum::response::Response;
use mantissa_model::Bos;
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc::{Sender, channel};
use utoipa::{OpenApi, ToSchema};
use utoipa_axum::routes;

use super::body::Sampling;
use super::conversation::{ChatMessage, values};
use super::format::Form;
use super::generate::{Plan, submit};
use super::params::Sampled;
use super::preparation::{Leaves, Preparation, enter_gate, prepare};
use super::render::{Variables, render};
use super::sse::{self, Cut, Events, Gone};
use super::{ApiError, App, Artifact, Endpoints};
use crate::engine::{Caller, Failure, Job, Stream};
use crate::score::{self, Logits, Score, same_vocabulary};
use crate::text::{Delta, Generation, Pieces, TokenInfo};

/// Scores that wait for a slow client.
const WAITING: usize = 64;

/// Request of a comparison: a conversation or a text.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub(crate) struct CompareRequest {
    /// Model that answers first; its answer is scored.
    model: Option<String>,
    /// Model to compare with, of the same vocabulary.
    other: String,
    messages: Option<Vec<ChatMessage>>,
    /// Text to continue, instead of `messages`.
    prompt: Option<String>,
}

/// Event of a comparison.
#[derive(Debug, Serialize, ToSchema)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub(crate) enum CompareEvent {
    /// A token of an answer.
    Token {
        /// 0 for the first model, 1 for the other.
        side: usize,
        token: u32,
        /// Its text. A character in several tokens comes with the last of them.
        text: String,
    },
    /// Difference at a token of the first answer.
    Score {
        /// Index of the token.
        index: usize,
        /// KL(first ‖ other) in nats.
        kl: f64,
        /// Text of the other's most probable token.
        likely: String,
        /// True if both have the same most probable token.
        same: bool,
    },
    /// The end.
    Done {
        /// Tokens of the first answer.
        tokens: usize,
        /// Mean KL in nats/token; 0 without tokens.
        kl: f64,
        /// Share of tokens at which both have the same most probable token; 1 without tokens.
        agreement: f64,
    },
}

/// Comparison that was checked.
struct Checked {
    app: Arc<App>,
    caller: Caller,
    plans: [Plan; 2],
}

impl CompareRequest {
    /// Checks the request and tokenizes the prompt.
    fn check(
        self,
        sampled: Sampled,
        form: Form,
        app: &Preparation,
        artifacts: [Arc<Artifact>; 2],
    ) -> Result<([Plan; 2], [Vec<Job>; 2]), ApiError> {
        // One answer of each model, as a whole.
        let given = [
            ("n", sampled.n.is_some_and(|n| n != 1)),
            ("stop", sampled.stop.is_some()),
            ("return_progress", sampled.return_progress == Some(true)),
        ];
        if let Some((name, _)) = given.iter().find(|(_, given)| *given) {
            return Err(ApiError::field(*name, "one", "none in a comparison"));
        }
        if let Some((_, name)) = form.grammar()? {
            return Err(ApiError::field(name, "one", "none in a comparison"));
        }
        let [first, other] = artifacts;
        if same_vocabulary(&first.model, &other.model).is_err() {
            let allowed =
                format!("a model with the {} tokens of `{}`", first.model.config().vocab_size, first.name);
            return Err(ApiError::field("other", &other.name, &allowed));
        }
        [&first, &other].into_iter().try_for_each(|artifact| app.check_room(artifact, 1))?;
        let tokens = match (self.messages, self.prompt) {
            (Some(messages), None) => {
                let variables = Variables { add_generation_prompt: true, ..Variables::default() };
                let text = render(app, &first, &values(messages)?, variables)?;
                app.encode(&first, &text, Bos::Never)?
            }
            (None, Some(prompt)) => app.encode(&first, &prompt, Bos::Auto)?,
            (Some(_), Some(_)) => return Err(ApiError::field("prompt", "a text", "none beside messages")),
            (None, None) => return Err(ApiError::field("messages", "none", "messages or a prompt")),
        };
        let seed = Some(sampled.seed.unwrap_or_else(|| app.random().cast_signed()));
        let sampled = Sampled { seed, logprobs: Some(0), ..sampled };
        let plan = |artifact: Arc<Artifact>| {
            let params = sampled.clone().check(&app.limits, &artifact, 0)?;
            let plan = Plan { artifact, params, prompts: vec![tokens.clone()], default_tokens: None };
            let jobs = plan.jobs(app, None)?;
            Ok::<_, ApiError>((plan, jobs))
        };
        let ((first, ours), (other, theirs)) = (plan(first)?, plan(other)?);
        Ok(([first, other], [ours, theirs]))
    }
}

impl Checked {
    fn generation(&self, side: usize, stream: Stream) -> Result<Generation<'_>, ApiError> {
        let plan = &self.plans[side];
        Generation::new(&plan.artifact.tokenizer, stream, plan.choices(), &[], 0)
    }

    /// Sends both answers as they come, then the scores.
    async fn stream(self, streams: [Stream; 2], events: Events) -> Result<(), Gone> {
        let sent = self.events(streams, &events).await;
        events.end(sent).await
    }

    async fn events(&self, streams: [Stream; 2], events: &Events) -> Result<(), Cut> {
        let answer = self.answers(streams, events).await?;
        let (sender, mut scores) = channel(WAITING);
        let place = enter_gate(&self.app.scorings, self.caller).await?;
        // Dropped with this request, which ends the scoring.
        let (left, _leaves) = Leaves::new();
        let work = self.scoring(&answer, sender, left);
        let scoring = tokio::task::spawn_blocking(move || {
            let scored = work();
            drop(place);
            scored
        });
        let pieces = Pieces::new(&self.plans[1].artifact.tokenizer);
        let (mut index, mut sum, mut agreed) = (0, 0.0, 0);
        // The sender is dropped when the scoring ends; a receiver that is dropped with this request ends it.
        while let Some(Score { kl, likely: [ours, theirs] }) = scores.recv().await {
            let (same, likely) = (ours == theirs, pieces.piece(theirs).map_err(ApiError::from)?.shown());
            sum += kl;
            agreed += usize::from(same);
            events.send(&CompareEvent::Score { index, kl, likely, same }).await?;
            index += 1;
        }
        scoring.await.map_err(|_| ApiError::failed(&Failure::Panicked))??;
        let share = |sum: f64, none: f64| if index == 0 { none } else { sum / index as f64 };
        let done =
            CompareEvent::Done { tokens: index, kl: share(sum, 0.0), agreement: share(agreed as f64, 1.0) };
        Ok(events.send(&done).await?)
    }

    /// Sends the tokens of both answers, and returns the tokens of the first.
    async fn answers(&self, streams: [Stream; 2], events: &Events) -> Result<Vec<u32>, Cut> {
        let [ours, theirs] = streams;
        let (mut first, mut other) = (self.generation(0, ours)?, self.generation(1, theirs)?);
        let [mut left, mut right] = [0, 1].map(|side| self.plans[side].artifact.tokenizer.stream());
        for (side, text) in [&mut left, &mut right].into_iter().enumerate() {
            text.skip(&self.plans[side].prompts[0]).map_err(ApiError::from)?;
        }
        let (mut open, mut answer) = ([true, true], Vec::new());
        while open[0] || open[1] {
            let (side, delta) = tokio::select! {
                delta = first.next(), if open[0] => (0, delta?),
                delta = other.next(), if open[1] => (1, delta?),
            };
            let Some(Delta { infos, .. }) = delta else {
                open[side] = false;
                continue;
            };
            let stream = if side == 0 { &mut left } else { &mut right };
            for TokenInfo { token, .. } in infos {
                if side == 0 {
                    answer.push(token);
                }
                // Parts of a character come with its last token.
                let text = stream.push(token).map_err(ApiError::from)?;
                events.send(&CompareEvent::Token { side, token, text }).await?;
            }
        }
        Ok(answer)
    }

    /// Makes the work that scores an answer.
    fn scoring(
        &self,
        answer: &[u32],
        scores: Sender<Score>,
        left: Arc<AtomicBool>,
    ) -> impl FnOnce() -> Result<(), ApiError> + Send + use<> {
        let prompt = self.plans[0].prompts[0].clone();
        let tokens = [prompt.as_slice(), answer].concat();
        let models = [0, 1].map(|side| Arc::clone(&self.plans[side].artifact.model));
        let (turns, caller) = (Arc::clone(&self.app.turns), self.caller);
        let is_empty = answer.is_empty();
        move || {
            if is_empty {
                return Ok(());
            }
            let sequence = |model| {
                score::sequence(model, tokens.len()).map_err(|error| ApiError::internal(error.to_string()))
            };
            let (mut first, mut other) = (sequence(&models[0])?, sequence(&models[1])?);
            let mut logits = Logits::new(models[0].config().vocab_size);
            let each = |score| match scores.blocking_send(score) {
                Ok(()) if !left.load(Ordering::Relaxed) => ControlFlow::Continue(()),
                _ => ControlFlow::Break(()),
            };
            let turns = || turns.take_for(vec![caller]);
            score::score([&mut first, &mut other], &tokens, prompt.len(), &turns, &mut logits, each)
                .map_err(|error| ApiError::internal(error.to_string()))
        }
    }
}

/// Types that only events hold.
#[derive(OpenApi)]
#[openapi(components(schemas(CompareEvent)))]
struct Streamed;

/// Lists the endpoints of this file.
pub(super) fn endpoints() -> Endpoints {
    Endpoints::with_openapi(Streamed::openapi()).routes(routes!(compare))
}

/// Compares two models on one prompt.
#[utoipa::path(
    post,
    path = "/v1/compare",
    request_body = Sampling<CompareRequest>,
    responses(
        (
            status = 200,
            description = "Events: the tokens of both answers, scores, the end; each is a CompareEvent",
            content((super::sse::Event = "text/event-stream"))
        ),
        crate::error::Errors,
    )
)]
pub(crate) async fn compare(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Sampling { request, sampled, form, bytes }: Sampling<CompareRequest>,
) -> Result<Response, ApiError> {
    let first = app.artifact(request.model.as_deref())?;
    let other = app.named(&request.other).map_err(|error| error.param("other"))?;
    let (plans, [ours, theirs]) =
        prepare(&app, caller, bytes, move |app| request.check(sampled, form, app, [first, other])).await?;
    let first = submit(&app, &plans[0].artifact, ours, caller)?;
    let other = submit(&app, &plans[1].artifact, theirs, caller)?;
    let checked = Checked { app: Arc::clone(&app), caller, plans };
    Ok(sse::respond(app.limits.write_time, |events| checked.stream([first, other], events)))
}
