//! Loaded models: continuation of token ids, log-probabilities, embeddings, and the tokenizer.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use mantissa_jobs::model::{load_tokenizer, open};
use mantissa_jobs::names::stop_name;
use mantissa_jobs::sessions::{SessionNeeds, policy_to_set, same_vocabulary};
use mantissa_jobs::{Allowed, Host, JobError, ModelPath, Silent, adapter, chat, parse_bytes};
use mantissa_kernels::available_threads;
use mantissa_model::{
    Bos, DecodeStream, ForwardError, GenerateError, KvPolicy, Message, Sampling, Tokenizer, load_config,
};
use mantissa_runtime::{EventKind, FastModel, Pooling, Request, Runtime, RuntimeOptions, SequenceId};
use mantissa_store::Paths;
use pyo3::prelude::*;

use crate::error::{Raise, input};
use crate::host::interruptible;

/// Most prompts that are continued at once, which bounds the memory of their keys and values; others wait.
const AT_ONCE: usize = 32;

/// Model on the fast engine.
#[pyclass(frozen, module = "mantissa._core")]
pub struct CoreModel {
    loaded: Arc<Loaded>,
}

/// A model with its tokenizer, which the threads of calls share.
struct Loaded {
    model: FastModel,
    /// A smaller model that proposes tokens.
    draft: Option<FastModel>,
    tokenizer: Option<Tokenizer>,
    context: usize,
    vocabulary: usize,
    place: String,
}

/// A continuation: its text, token ids, log-probabilities if asked for, and the reason of its end.
type Continuation = (String, Vec<u32>, Vec<f32>, &'static str);

/// Text of a continuation as its tokens come; empty without a tokenizer, and from where it decodes no more.
struct Text<'t> {
    stream: Option<DecodeStream<'t>>,
    whole: String,
}

impl<'t> Text<'t> {
    fn after(prompt: &[u32], tokenizer: Option<&'t Tokenizer>) -> Self {
        let mut stream = tokenizer.map(Tokenizer::stream);
        if stream.as_mut().is_some_and(|stream| stream.skip(prompt).is_err()) {
            stream = None;
        }
        Text { stream, whole: String::new() }
    }

    /// Adds a token and returns the text that it completes.
    fn push(&mut self, token: u32) -> String {
        let Some(piece) = self.stream.as_mut().map(|stream| stream.push(token)) else { return String::new() };
        match piece {
            Ok(piece) => {
                self.whole.push_str(&piece);
                piece
            }
            Err(_) => {
                self.stream = None;
                String::new()
            }
        }
    }

    /// Returns the text held back for a character's other tokens.
    fn finish(&mut self) -> String {
        let rest = self.stream.take().and_then(|stream| stream.finish().ok()).unwrap_or_default();
        self.whole.push_str(&rest);
        rest
    }
}

/// Settings of a continuation.
#[derive(Clone, Copy)]
struct Settings {
    new_tokens: usize,
    sampling: Sampling,
    ignore_eos: bool,
    logprobs: bool,
}

/// Companions of a model that is loaded.
struct With {
    kv: Option<KvPolicy>,
    adapter: Option<PathBuf>,
    draft: Option<ModelPath>,
}

impl Loaded {
    fn new(path: PathBuf, with: With, allowed: Allowed) -> Result<Self, JobError> {
        let permits = Paths::default().check("load", false)?;
        let host = Host::new(allowed, permits, Box::new(Silent));
        let files = open(&path, &host)?;
        let draft = with.draft.map(|draft| open(&draft, &host)).transpose()?;
        let adapter = adapter::open(with.adapter.as_deref())?;
        let policy = policy_to_set(with.kv.as_ref(), &files);
        let (mut needs, sizes) = (SessionNeeds::default(), RuntimeOptions::single(1));
        needs.add_model(&files, (policy, adapter.as_ref()), &sizes, host.threads)?;
        draft.iter().try_for_each(|draft| needs.add_draft(draft, &sizes, host.threads))?;
        host.require_more_memory("load: weights", needs.peak())?;
        let tokenizer = load_tokenizer(&files, &host).ok();
        let config = load_config(&files)?;
        let draft = draft.map(|files| {
            // Without a tokenizer only the sizes of the vocabularies can be compared, as a session does.
            if let Some(tokenizer) = &tokenizer {
                same_vocabulary(&files, tokenizer, config.vocab_size, &host)?;
            }
            Ok::<_, JobError>(FastModel::load(&files, host.threads)?)
        });
        let draft = draft.transpose()?;
        let mut model = adapter::fast(&files, adapter.as_ref(), host.threads)?;
        if let Some(policy) = policy {
            model.set_kv(policy)?;
        }
        let (context, vocabulary) = (config.max_position_embeddings, config.vocab_size);
        Ok(Loaded { model, draft, tokenizer, context, vocabulary, place: path.display().to_string() })
    }

    /// Continues `prompts`, [`AT_ONCE`] at a time, until `stop` is set; `told` gets each piece of new text, which may be empty, with
    /// its prompt's index.
    fn continued(
        &self,
        prompts: &[Vec<u32>],
        settings: Settings,
        stop: &AtomicBool,
        told: &dyn Fn(usize, String),
    ) -> Result<Vec<Continuation>, JobError> {
        let longest = prompts.iter().map(Vec::len).max().unwrap_or(0) + settings.new_tokens;
        let at_once = prompts.len().clamp(1, AT_ONCE);
        let mut runtime = Runtime::new(&self.model, RuntimeOptions::batch(at_once, longest))?;
        if let Some(draft) = &self.draft {
            runtime = runtime.with_draft(draft)?;
        }
        let mut found: Vec<Continuation> =
            vec![(String::new(), Vec::new(), Vec::new(), "caller"); prompts.len()];
        let mut texts: Vec<Text> =
            prompts.iter().map(|prompt| Text::after(prompt, self.tokenizer.as_ref())).collect();
        let mut ids: Vec<SequenceId> = Vec::with_capacity(prompts.len());
        for prompt in prompts {
            ids.push(runtime.add(Request {
                prompt: prompt.clone(),
                max_new_tokens: settings.new_tokens,
                sampling: settings.sampling,
                ignore_eos: settings.ignore_eos,
                logprobs: settings.logprobs.then_some(0),
                ..Request::default()
            })?);
        }
        while !runtime.is_idle() && !stop.load(Ordering::Relaxed) {
            for event in runtime.step().map_err(GenerateError::from)? {
                let Some(at) = ids.iter().position(|id| *id == event.sequence) else { continue };
                match &event.kind {
                    EventKind::Token { token, logprob, .. } => {
                        found[at].1.push(*token);
                        found[at].2.extend(*logprob);
                        told(at, texts[at].push(*token));
                    }
                    EventKind::Finished(reason) => found[at].3 = stop_name(*reason),
                    EventKind::Broken => {
                        let position = prompts[at].len() + found[at].1.len();
                        return Err(GenerateError::from(ForwardError::NoLogits { position }).into());
                    }
                    _ => {}
                }
            }
        }
        for (at, text) in texts.iter_mut().enumerate() {
            let rest = text.finish();
            if !rest.is_empty() {
                told(at, rest);
            }
            found[at].0 = std::mem::take(&mut text.whole);
        }
        Ok(found)
    }

    /// Returns the log-probability of each token but the first, given those before it, and whether none is more probable.
    fn scored(&self, tokens: &[u32], stop: &AtomicBool) -> Result<(Vec<f32>, Vec<bool>), JobError> {
        let mut runtime = Runtime::new(&self.model, RuntimeOptions::single(tokens.len()))?;
        let request = Request {
            prompt: tokens.to_vec(),
            max_new_tokens: 0,
            prompt_logprobs: Some(1),
            ..Request::default()
        };
        runtime.add(request)?;
        let (mut found, mut greedy) = (Vec::with_capacity(tokens.len()), Vec::with_capacity(tokens.len()));
        while !runtime.is_idle() && !stop.load(Ordering::Relaxed) {
            for event in runtime.step().map_err(GenerateError::from)? {
                if let EventKind::PromptToken { token, logprob: Some(logprob), top } = &event.kind {
                    found.push(*logprob);
                    greedy.push(top.first().is_some_and(|(first, _)| first == token));
                }
            }
        }
        Ok((found, greedy))
    }

    /// Returns the mean of the hidden states of each text, of unit length.
    fn embedded(&self, texts: &[Vec<u32>], stop: &AtomicBool) -> Result<Vec<Vec<f32>>, JobError> {
        let mut all = Vec::with_capacity(texts.len());
        for tokens in texts {
            let mut runtime = Runtime::new(&self.model, RuntimeOptions::single(tokens.len()))?;
            runtime.add(Request {
                prompt: tokens.clone(),
                embed: Some(Pooling::Mean),
                ..Request::default()
            })?;
            while !runtime.is_idle() && !stop.load(Ordering::Relaxed) {
                for event in runtime.step().map_err(GenerateError::from)? {
                    if let EventKind::Embedding(vector) = &event.kind {
                        let norm = vector.iter().map(|x| x * x).sum::<f32>().sqrt().max(f32::MIN_POSITIVE);
                        all.push(vector.iter().map(|x| x / norm).collect());
                    }
                }
            }
        }
        Ok(all)
    }
}

impl CoreModel {
    fn tokenizer(&self) -> PyResult<&Tokenizer> {
        let none = || {
            input(&format!("{}: tokenizer.json", self.loaded.place), "none that can be read", "a tokenizer")
        };
        self.loaded.tokenizer.as_ref().ok_or_else(none)
    }

    /// Refuses token ids that the model does not have, none at all, and more than its context.
    fn check(&self, tokens: &[u32], new: usize) -> PyResult<()> {
        let Loaded { context, vocabulary, .. } = *self.loaded;
        if tokens.is_empty() {
            return Err(input("tokens", "none", "at least one token"));
        }
        if let Some(id) = tokens.iter().find(|id| **id as usize >= vocabulary) {
            return Err(input("tokens", &id.to_string(), &format!("ids below {vocabulary}")));
        }
        let all = tokens.len().saturating_add(new);
        if all > context {
            return Err(input(
                "tokens and new tokens",
                &all.to_string(),
                &format!("at most {context}, the context"),
            ));
        }
        Ok(())
    }
}

#[pymethods]
impl CoreModel {
    /// Loads a model.
    #[new]
    #[pyo3(signature = (path, *, kv, adapter, draft, threads, memory, strict))]
    #[allow(clippy::too_many_arguments)]
    fn new(
        py: Python<'_>,
        path: PathBuf,
        kv: Option<&str>,
        adapter: Option<PathBuf>,
        draft: Option<PathBuf>,
        threads: Option<usize>,
        memory: Option<&str>,
        strict: bool,
    ) -> PyResult<Self> {
        let memory = memory.map(parse_bytes).transpose();
        let memory = memory.map_err(|error| input("memory", &error, "bytes, such as \"8G\""))?;
        let allowed = Allowed { threads: threads.unwrap_or_else(available_threads), memory, strict };
        let kv = kv.map(str::parse::<KvPolicy>).transpose();
        let kv = kv.map_err(|error| input("kv", &error.to_string(), "a policy such as \"int8-head\""))?;
        let found = |path| ModelPath::find(path).map_err(|error| JobError::from(error).raise());
        let path = found(path)?.to_path_buf();
        let with = With { kv, adapter, draft: draft.map(found).transpose()? };
        let stop = AtomicBool::new(false);
        let loaded = interruptible(py, &stop, move || Loaded::new(path, with, allowed))?;
        Ok(CoreModel { loaded: Arc::new(loaded) })
    }

    /// Largest number of tokens of a sequence.
    #[getter]
    fn context(&self) -> usize {
        self.loaded.context
    }

    /// Number of token ids.
    #[getter]
    fn vocabulary(&self) -> usize {
        self.loaded.vocabulary
    }

    /// Bytes of a token in the cache.
    #[getter]
    fn kv_bytes_per_token(&self) -> f64 {
        self.loaded.model.kv_bytes_per_token()
    }

    /// Returns the token ids of a text.
    fn encode(&self, text: &str, bos: Option<bool>) -> PyResult<Vec<u32>> {
        let bos = match bos {
            None => Bos::Auto,
            Some(true) => Bos::Always,
            Some(false) => Bos::Never,
        };
        self.tokenizer()?.encode(text, bos).map_err(|error| JobError::from(error).raise())
    }

    /// Returns the text of token ids, without special tokens.
    fn decode(&self, tokens: Vec<u32>) -> PyResult<String> {
        self.tokenizer()?.decode(&tokens).map_err(|error| JobError::from(error).raise())
    }

    /// Renders a conversation, a JSON list of messages, with the model's chat template.
    fn render(&self, py: Python<'_>, messages: &str) -> PyResult<String> {
        let (tokenizer, place) = (self.tokenizer()?, PathBuf::from(&self.loaded.place));
        let wrong =
            |error: serde_json::Error| input("messages", &error.to_string(), "role and content of each");
        let messages: Vec<Message> = serde_json::from_str(messages).map_err(wrong)?;
        let hint = "generate(prompt) continues a text";
        let template = chat::template(&place, tokenizer, hint).map_err(Raise::raise)?;
        let context = mantissa_model::chat::context(&messages, tokenizer.special_tokens());
        let rendered = py.detach(|| chat::render(&place, template, &context, &*mantissa::chat_renderer()));
        rendered.map_err(Raise::raise)
    }

    /// Continues prompts of token ids, many at once. `on_text` is called with the index of the prompt and each piece of
    /// its text, which is empty for a token whose text waits for the next one's.
    #[pyo3(signature = (prompts, on_text=None, *, max_new_tokens=128, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, seed=0, ignore_eos=false, logprobs=false))]
    #[allow(clippy::too_many_arguments)]
    fn generate(
        &self,
        py: Python<'_>,
        prompts: Vec<Vec<u32>>,
        on_text: Option<Py<PyAny>>,
        max_new_tokens: usize,
        temperature: f32,
        top_k: usize,
        top_p: f32,
        min_p: f32,
        repetition_penalty: f32,
        seed: u64,
        ignore_eos: bool,
        logprobs: bool,
    ) -> PyResult<Vec<Continuation>> {
        prompts.iter().try_for_each(|prompt| self.check(prompt, max_new_tokens))?;
        let sampling = Sampling {
            temperature,
            top_k,
            top_p,
            min_p,
            repetition: repetition_penalty,
            seed,
            ..Sampling::default()
        };
        let settings = Settings { new_tokens: max_new_tokens, sampling, ignore_eos, logprobs };
        let (stop, loaded) = (Arc::new(AtomicBool::new(false)), Arc::clone(&self.loaded));
        let asked = Arc::clone(&stop);
        interruptible(py, &stop, move || {
            let told = |at: usize, piece: String| {
                let Some(function) = &on_text else { return };
                // An exception, or a true value, ends the call.
                let called = Python::attach(|py| function.call1(py, (at, piece))?.is_truthy(py));
                if called.unwrap_or(true) {
                    asked.store(true, Ordering::Relaxed);
                }
            };
            loaded.continued(&prompts, settings, &asked, &told)
        })
    }

    /// Returns the log-probability (nats) of each token but the first, given those before it, and whether none is more
    /// probable.
    fn logprobs(&self, py: Python<'_>, tokens: Vec<u32>) -> PyResult<(Vec<f32>, Vec<bool>)> {
        self.check(&tokens, 0)?;
        let (stop, loaded) = (Arc::new(AtomicBool::new(false)), Arc::clone(&self.loaded));
        let asked = Arc::clone(&stop);
        interruptible(py, &stop, move || loaded.scored(&tokens, &asked))
    }

    /// Returns the mean hidden state of each text of token ids, of unit length.
    fn embed(&self, py: Python<'_>, texts: Vec<Vec<u32>>) -> PyResult<Vec<Vec<f32>>> {
        texts.iter().try_for_each(|tokens| self.check(tokens, 0))?;
        let (stop, loaded) = (Arc::new(AtomicBool::new(false)), Arc::clone(&self.loaded));
        let asked = Arc::clone(&stop);
        interruptible(py, &stop, move || loaded.embedded(&texts, &asked))
    }
}
