//! `/completion` and `/infill` of llama.cpp's server.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Extension, Json};
use mantissa_model::Sampling as Options;
use serde::{Deserialize, Serialize, Serializer};
use serde_json::{Map, Value, json};
use utoipa::ToSchema;
use utoipa_axum::routes;

use super::body::{Body, Sampling};
use super::continuation::{self, Nothing, PromptPart};
use super::generate::{Plan, submit};
use super::llama_convert::{SAMPLERS, check_fields, chosen, names, prompts, sampling};
use super::ollama_convert::{flag, model};
use super::preparation::{Preparation, aside, prepare};
use super::sse::{self, Cut, Events, Gone};
use super::{ApiError, App, Artifact, Endpoints};
use crate::engine::{Caller, Job, Stream};
use crate::text::{Delta, Finish, Generation, Piece, TokenInfo};

/// Request of a completion.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(transparent)]
pub(crate) struct LlamaRequest {
    #[schema(value_type = Object)]
    body: Value,
}

/// Lists the endpoints of this file.
pub(super) fn endpoints() -> Endpoints {
    Endpoints::new()
        .routes(routes!(completion))
        .route("/completions", post(completion))
        .route("/infill", post(infill))
}

/// Completion that was checked.
struct Checked {
    plan: Plan,
    /// Text of each prompt.
    texts: Vec<String>,
    /// True to return tokens.
    tokens: bool,
    streams: bool,
    /// Names of the fields to return.
    fields: Value,
}

/// A choice while it is collected.
#[derive(Clone, Debug, Default)]
struct Collected {
    text: String,
    tokens: Vec<u32>,
    count: usize,
    infos: Vec<TokenInfo>,
    finish: Option<Finish>,
}

impl Collected {
    fn add(&mut self, delta: Delta) {
        self.count += delta.tokens.len();
        self.text += &delta.text;
        self.tokens.extend(delta.tokens);
        self.infos.extend(delta.infos);
        self.finish = delta.finish;
    }
}

/// Continues texts as llama.cpp's server does.
#[utoipa::path(
    post,
    path = "/completion",
    request_body = LlamaRequest,
    responses((status = 200, description = "The text, or events with pieces of it", content((Value = "application/json"), (super::sse::Event = "text/event-stream"))), crate::error::Errors)
)]
pub(crate) async fn completion(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Body(LlamaRequest { body }, bytes): Body<LlamaRequest>,
) -> Result<Response, ApiError> {
    check_fields(&body)?;
    let artifact = app.artifact(model(&body)?)?;
    let (prompts, single) = prompts(&body["prompt"])?;
    let streams = flag(&body, "stream", false)?;
    let tokens = flag(&body, "return_tokens", false)?;
    let fields = body["response_fields"].clone();
    chosen(json!({}), &fields)?;
    let request = sampling(&body, bytes)?;
    let work = move |app: &Preparation| {
        let (plan, texts, jobs) = check(app, artifact, &prompts, request)?;
        Ok((Checked { plan, texts, tokens, streams, fields }, jobs))
    };
    let (checked, jobs) = prepare(&app, caller, bytes, work).await?;
    let stream = submit(&app, &checked.plan.artifact, jobs, caller)?;
    if streams {
        return Ok(sse::respond(app.limits.write_time, |events| checked.stream(stream, events)));
    }
    let (answers, size) = checked.collect(stream).await?;
    // Many probabilities take a while to be written.
    aside(size, move || match (single, <[Whole; 1]>::try_from(answers)) {
        (true, Ok([one])) => Json(one).into_response(),
        (_, Ok(one)) => Json(one.as_slice()).into_response(),
        (_, Err(several)) => Json(several).into_response(),
    })
    .await
}

/// Checks a request: its plan, the texts of its prompts, and its jobs.
fn check(
    app: &Preparation,
    artifact: Arc<Artifact>,
    prompts: &[Vec<PromptPart>],
    request: Sampling<Nothing>,
) -> Result<(Plan, Vec<String>, Vec<Job>), ApiError> {
    let most = app.limits.choices;
    if prompts.len() > most {
        return Err(ApiError::field("prompt", format!("{} prompts", prompts.len()), &format!("1 to {most}")));
    }
    let Sampling { sampled, form, .. } = request;
    let params = sampled.check(&app.limits, &artifact, app.random())?;
    app.check_room(&artifact, prompts.len() * params.n)?;
    let tokens = |prompt: &Vec<PromptPart>| continuation::tokens(app, &artifact, prompt);
    let prompts = prompts.iter().map(tokens).collect::<Result<Vec<_>, _>>()?;
    let text = |prompt: &Vec<u32>| Ok(artifact.tokenizer.decode_with_special(prompt)?);
    let texts = prompts.iter().map(text).collect::<Result<Vec<_>, ApiError>>()?;
    let grammar = form.grammar()?;
    let constraint = grammar.map(|(grammar, field)| app.compile(&artifact, &grammar, field)).transpose()?;
    let plan = Plan { artifact, params, prompts, default_tokens: None };
    let jobs = plan.jobs(app, constraint)?;
    Ok((plan, texts, jobs))
}

/// Refuses to fill in the middle.
async fn infill() -> ApiError {
    let message = "expected a text to continue, got one to fill in: this server writes no text between two others; \
                   fix: use /completion, with the model's own marks for prefix and suffix in the prompt if it has some";
    ApiError::new(StatusCode::NOT_IMPLEMENTED, "invalid_request_error", message).code("infill_unsupported")
}

impl Checked {
    fn generation(&self, stream: Stream) -> Result<Generation<'_>, ApiError> {
        let Plan { artifact, params, .. } = &self.plan;
        let prompts = self.plan.choices();
        Generation::new(&artifact.tokenizer, stream, prompts, &params.stops, params.min_tokens)
    }

    /// Waits for the whole text of all choices; returns the answers, and about their size in bytes.
    async fn collect(&self, stream: Stream) -> Result<(Vec<Whole>, usize), ApiError> {
        /// Bytes of a token with its probability.
        const EACH: usize = 80;
        let mut generation = self.generation(stream)?;
        let mut all = vec![Collected::default(); self.plan.choices().count()];
        while let Some(delta) = generation.next().await? {
            all[delta.index].add(delta);
        }
        let size = all.iter().flat_map(|one| &one.infos).map(|info| EACH * (1 + info.top.len())).sum();
        let wants = self.reports() && names(&self.fields, "completion_probabilities");
        let answers = all.into_iter().enumerate().map(|(index, mut one)| {
            let infos = Probabilities(std::mem::take(&mut one.infos));
            let text = Value::from(one.text.as_str());
            let rest = chosen(self.last(index, text, &one.tokens, &one, &generation), &self.fields)?;
            Ok(Whole { rest, completion_probabilities: wants.then_some(infos) })
        });
        Ok((answers.collect::<Result<_, ApiError>>()?, size))
    }

    /// Sends the pieces of all choices as they come.
    async fn stream(self, stream: Stream, events: Events) -> Result<(), Gone> {
        match self.pieces(stream, &events).await {
            Ok(()) => Ok(()),
            Err(Cut::Failed(error)) => events.send(&error.body()).await,
            Err(Cut::Gone) => Err(Gone),
        }
    }

    async fn pieces(&self, stream: Stream, events: &Events) -> Result<(), Cut> {
        let mut generation = self.generation(stream)?;
        let mut all = vec![Collected::default(); self.plan.choices().count()];
        while let Some(delta) = generation.next().await? {
            let index = delta.index;
            if let Some(progress) = delta.progress {
                let event = json!({ "index": index, "content": "", "tokens": [], "stop": false, "prompt_progress": progress });
                events.send(&event).await?;
                continue;
            }
            let one = &mut all[index];
            one.count += delta.tokens.len();
            let mut piece = json!({
                "index": index,
                "content": delta.text,
                "tokens": delta.tokens,
                "stop": false,
                "tokens_predicted": one.count,
                "tokens_evaluated": self.evaluated(index),
            });
            if self.reports() {
                piece["completion_probabilities"] = json!(Probabilities(delta.infos));
            }
            events.send(&piece).await?;
            if delta.finish.is_some() {
                one.finish = delta.finish;
                let last = self.last(index, json!(""), &[], one, &generation);
                events.send(&chosen(last, &self.fields)?).await?;
            }
        }
        Ok(())
    }

    fn reports(&self) -> bool {
        self.plan.params.logprobs.is_some()
    }

    /// Tokens of the prompt of a choice.
    fn evaluated(&self, index: usize) -> usize {
        self.plan.prompts.get(index / self.plan.params.n).map_or(0, Vec::len)
    }

    /// Makes the answer of a choice, with its text and tokens.
    fn last(
        &self,
        index: usize,
        content: Value,
        tokens: &[u32],
        one: &Collected,
        generation: &Generation<'_>,
    ) -> Value {
        let Plan { artifact, params, .. } = &self.plan;
        let (evaluated, context) = (self.evaluated(index), artifact.engine.runtime().context);
        let (kind, word) = match &one.finish {
            None => ("none", ""),
            Some(Finish::Stop(None)) => ("eos", ""),
            Some(Finish::Stop(Some(word))) => ("word", word.as_str()),
            Some(Finish::Length) => ("limit", ""),
        };
        let mut settings = settings(&params.sampling, context);
        settings["model"] = json!(artifact.name);
        settings["stop"] = json!(params.stops);
        settings["n_predict"] = json!(params.new_tokens());
        settings["max_tokens"] = json!(params.new_tokens());
        settings["n_probs"] = json!(params.logprobs.unwrap_or(0));
        settings["stream"] = json!(self.streams);
        json!({
            "index": index,
            "content": content,
            "tokens": if self.tokens { tokens } else { &[] },
            "stop": true,
            "model": artifact.name,
            "tokens_predicted": one.count,
            "tokens_evaluated": evaluated,
            "generation_settings": settings,
            "prompt": self.texts.get(index / params.n),
            "truncated": kind == "limit" && evaluated + one.count >= context,
            "stop_type": kind,
            "stopping_word": word,
            "tokens_cached": evaluated + one.count,
            "timings": timings(generation, evaluated, one.count),
        })
    }
}

/// Whole answer of a choice.
#[derive(Serialize)]
struct Whole {
    #[serde(flatten)]
    rest: Value,
    #[serde(skip_serializing_if = "Option::is_none")]
    completion_probabilities: Option<Probabilities>,
}

/// Probabilities of tokens, each with the most probable ones. They are many: each is described while it is written.
struct Probabilities(Vec<TokenInfo>);

/// Probability of a token.
#[derive(Serialize)]
struct Probability<'a> {
    id: u32,
    token: String,
    bytes: &'a [u8],
    /// As other answers write it: the digits of the double.
    logprob: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    top_logprobs: Option<Vec<Probability<'a>>>,
}

impl<'a> Probability<'a> {
    fn new(id: u32, piece: &'a Piece, logprob: Option<f32>) -> Self {
        let logprob = logprob.map(f64::from);
        Probability { id, token: piece.shown(), bytes: &piece.bytes, logprob, top_logprobs: None }
    }
}

impl Serialize for Probabilities {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.iter().map(|info| {
            let top =
                info.top.iter().map(|(id, piece, logprob)| Probability::new(*id, piece, Some(*logprob)));
            let top_logprobs = Some(top.collect());
            Probability { top_logprobs, ..Probability::new(info.token, &info.piece, info.logprob) }
        }))
    }
}

/// Settings of a generation under llama.cpp's names.
pub(super) fn settings(options: &Options, context: usize) -> Value {
    json!({
        "n_ctx": context,
        "n_predict": -1,
        "seed": options.seed,
        "temperature": options.temperature,
        "top_k": options.top_k,
        "top_p": options.top_p,
        "min_p": options.min_p,
        "repeat_last_n": -1,
        "repeat_penalty": options.repetition,
        "presence_penalty": options.presence,
        "frequency_penalty": options.frequency,
        "mirostat": 0,
        "samplers": SAMPLERS,
    })
}

/// Times of a request under llama.cpp's names.
fn timings(generation: &Generation<'_>, prompt: usize, new: usize) -> Map<String, Value> {
    let (times, cached) = (generation.times(), generation.cached());
    let mut all = Map::new();
    all.insert("cache_n".into(), json!(cached));
    for (name, count, time) in
        [("prompt", prompt.saturating_sub(cached), times.prompt), ("predicted", new, times.new)]
    {
        let milliseconds = time.as_secs_f64() * 1e3;
        let per_token = milliseconds / count.max(1) as f64;
        let per_second = if milliseconds > 0.0 { count as f64 / milliseconds * 1e3 } else { 0.0 };
        all.insert(format!("{name}_n"), json!(count));
        all.insert(format!("{name}_ms"), json!(milliseconds));
        all.insert(format!("{name}_per_token_ms"), json!(per_token));
        all.insert(format!("{name}_per_second"), json!(per_second));
    }
    all
}
