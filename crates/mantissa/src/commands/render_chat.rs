//! `mantissa render-chat` (hidden): renders one chat template in a separate process with resource limits.
//!
//! The template engine limits steps but not the bytes of the strings it builds: thirty steps can double a
//! string to a gigabyte. A limit of the address space stops that. So `run --chat` starts this command with an
//! empty environment; [`render`] is the caller's side.

use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError, mpsc};
use std::time::Duration;

use anyhow::Result;
use mantissa_model::{ChatTemplates, Message, Tokenizer, chat};
use rustix::process::{Resource, Rlimit, setrlimit};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::model::ModelPath;
use crate::context::Context;
use crate::error::{BadInput, ChatFailed};
use crate::output::{self, bytes};

/// Address space of the process: the engine's stack, the binary, and the strings of a template.
const ADDRESS_SPACE: u64 = chat::STACK as u64 + (960 << 20);

/// CPU time limit of the process. A template cannot wait for anything, so this is a deadline that does not
/// depend on load.
const SECONDS: u64 = 2;

/// Wall-clock limit of the answer, for a very busy machine.
const PATIENCE: Duration = Duration::from_secs(30);

/// Maximum request size in bytes: a template, and a conversation as long as contexts are.
const MAX_REQUEST: u64 = 64 << 20;

/// Conversations per process: their processor time adds up.
const TOGETHER: usize = 16;

/// Render the chat template of a JSON object {template, contexts} on standard input, under limits of memory
/// and time
#[derive(clap::Args)]
#[command(after_help = "EXAMPLES
  mantissa render-chat < request.json")]
pub struct Args {}

#[derive(Serialize, Deserialize)]
struct Request<'a> {
    template: std::borrow::Cow<'a, str>,
    contexts: std::borrow::Cow<'a, [Value]>,
}

#[derive(Serialize, Deserialize)]
enum Reply {
    Text(String),
    Error(String),
}

/// Runs the command.
///
/// # Errors
/// A malformed request, limits that cannot be set, standard output.
pub fn run(_: &Args, _: &Context) -> Result<()> {
    limit(Resource::As, ADDRESS_SPACE)?;
    limit(Resource::Cpu, SECONDS)?;
    limit(Resource::Core, 0)?;
    let mut request = Vec::new();
    io::stdin().lock().take(MAX_REQUEST).read_to_end(&mut request)?;
    let request: Request<'_> = serde_json::from_slice(&request)
        .map_err(|error| BadInput::new("standard input", error.to_string(), "{template, contexts}"))?;
    let reply = |context| match chat::render(&request.template, context) {
        Ok(text) => Reply::Text(text),
        Err(error) => Reply::Error(error.to_string()),
    };
    let replies: Vec<Reply> = request.contexts.iter().map(reply).collect();
    let replies = serde_json::to_vec(&replies)?;
    output::to_stdout(|out| out.write_all(&replies))
}

/// Sets a resource limit of this process, unless it is already lower.
fn limit(resource: Resource, most: u64) -> io::Result<()> {
    let lower = rustix::process::getrlimit(resource).maximum.map_or(most, |given| given.min(most));
    Ok(setrlimit(resource, Rlimit { current: Some(lower), maximum: Some(lower) })?)
}

/// Returns the default chat template of `model`.
///
/// # Errors
/// [`BadInput`] with `hint` if there is none.
pub fn template<'t>(model: &Path, tokenizer: &'t Tokenizer, hint: &str) -> Result<&'t str> {
    tokenizer.chat_template().ok_or_else(|| {
        let names: Vec<&str> = tokenizer.chat_templates().names().collect();
        let found = match names.as_slice() {
            [] => "no chat template".to_owned(),
            names => format!("chat templates named {}", names.join(", ")),
        };
        let allowed = format!(
            "a chat template named {} in chat_template.jinja, tokenizer_config.json or GGUF metadata; {hint}",
            ChatTemplates::DEFAULT
        );
        BadInput::new(model.display().to_string(), found, allowed).into()
    })
}

/// Renders `prompt` as a user message, after the system message if there is one, with the chat template of `model`.
///
/// # Errors
/// As [`template`] and [`render`].
pub fn conversation(
    model: &ModelPath,
    tokenizer: &Tokenizer,
    system: Option<&str>,
    prompt: &str,
) -> Result<String> {
    let template = template(model.named(), tokenizer, "fix: leave out --chat")?;
    let system = system.map(|text| Message::new("system", text));
    let messages: Vec<Message> = system.into_iter().chain([Message::new("user", prompt)]).collect();
    render(model, template, &chat::context(&messages, tokenizer.special_tokens()))
}

/// Renders the template of `model` in a separate process.
///
/// # Errors
/// [`ChatFailed`] if the template exceeds the limits or refuses the conversation; an I/O error if no process
/// can be started.
pub fn render(model: &Path, template: &str, context: &Value) -> Result<String> {
    let rendered = render_each(model, template, std::slice::from_ref(context))?;
    let text = rendered.into_iter().next().unwrap_or_else(|| Err("expected a text, got none".to_owned()));
    text.map_err(|what| ChatFailed { model: model.display().to_string(), what }.into())
}

/// Renders the template of `model` with each of `contexts`, some in a process; a template that refuses one of them gives
/// its message.
///
/// # Errors
/// [`ChatFailed`] if the template exceeds the limits; an I/O error if no process can be started.
pub fn render_each(model: &Path, template: &str, contexts: &[Value]) -> Result<Vec<Result<String, String>>> {
    let mut all = Vec::with_capacity(contexts.len());
    for contexts in contexts.chunks(TOGETHER) {
        all.extend(render_some(model, template, contexts)?);
    }
    Ok(all)
}

/// Renders the template of `model` with `contexts`, in one process.
fn render_some(model: &Path, template: &str, contexts: &[Value]) -> Result<Vec<Result<String, String>>> {
    let failed = |what: String| ChatFailed { model: model.display().to_string(), what };
    let request = Request { template: template.into(), contexts: contexts.into() };
    let request = serde_json::to_vec(&request)?;
    if request.len() as u64 > MAX_REQUEST {
        let found = bytes(request.len() as u64);
        return Err(
            failed(format!("expected a request of at most {}, got {found}", bytes(MAX_REQUEST))).into()
        );
    }
    let mut child = spawn()?;
    let reply = converse(&mut child, &request, || {});
    let status = end(&mut child)?;
    replies(&reply, contexts.len()).ok_or_else(|| failed(exceeded(&status)).into())
}

/// Starts a process that waits for a request.
fn spawn() -> io::Result<Child> {
    let mut command = Command::new(std::env::current_exe()?);
    command.arg("render-chat").env_clear();
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    command.spawn()
}

/// Ends a process, which has answered or must end; both ways it is reaped.
fn end(child: &mut Child) -> io::Result<ExitStatus> {
    let _ = child.kill();
    child.wait()
}

/// Takes the answer for `count` conversations apart; `None` if it is not whole.
fn replies(reply: &[u8], count: usize) -> Option<Vec<Result<String, String>>> {
    let text = |reply| match reply {
        Reply::Text(text) => Ok(text),
        Reply::Error(what) => Err(what),
    };
    let replies =
        serde_json::from_slice::<Vec<Reply>>(reply).ok().filter(|replies| replies.len() == count)?;
    Some(replies.into_iter().map(text).collect())
}

/// Describes a template that ended its process.
fn exceeded(status: &ExitStatus) -> String {
    format!(
        "expected a template within {SECONDS} s of processor time and {} of memory, got one that exceeds them ({status})",
        bytes(ADDRESS_SPACE)
    )
}

/// Renders conversations one by one, each in a process that was started beforehand.
#[derive(Debug)]
pub struct Renderer {
    model: PathBuf,
    ready: Mutex<Option<Child>>,
}

impl Renderer {
    /// Creates a renderer for the templates of `model`, a name for messages.
    pub fn new(model: &Path) -> Self {
        Renderer { model: model.to_owned(), ready: Mutex::new(spawn().ok()) }
    }

    /// Renders `template` with the variables of `context`; a template that refuses them gives its message.
    ///
    /// # Errors
    /// As [`render_each`].
    pub fn render(&self, template: &str, context: &Value) -> Result<Result<String, String>> {
        let ready = self.lock().take();
        if let Some(mut child) = ready {
            let request =
                Request { template: template.into(), contexts: std::slice::from_ref(context).into() };
            let request = serde_json::to_vec(&request)?;
            // The next process starts while this one renders.
            let reply = converse(&mut child, &request, || *self.lock() = spawn().ok());
            end(&mut child)?;
            if let Some(reply) = replies(&reply, 1).and_then(|replies| replies.into_iter().next()) {
                return Ok(reply);
            }
        }
        // The process may have ended while it waited: one of its own decides.
        let rendered = render_each(&self.model, template, std::slice::from_ref(context))?;
        Ok(rendered.into_iter().next().unwrap_or_else(|| Err("expected a text, got none".to_owned())))
    }

    fn lock(&self) -> MutexGuard<'_, Option<Child>> {
        self.ready.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Renderer {
    fn drop(&mut self) {
        if let Some(mut child) = self.lock().take() {
            let _ = end(&mut child);
        }
    }
}

/// Sends the request, calls `meanwhile`, and reads the answer within the time limit; an early end gives an empty or
/// partial answer.
fn converse(child: &mut Child, request: &[u8], meanwhile: impl FnOnce()) -> Vec<u8> {
    let (Some(mut input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
        return Vec::new();
    };
    // The process reads all input before it writes; a closed pipe shows as an empty answer.
    let _ = input.write_all(request);
    drop(input);
    meanwhile();
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        let mut reply = Vec::new();
        // JSON escapes a byte of text into at most six.
        let most = 6 * chat::MAX_OUTPUT as u64 + 1024;
        let _ = output.take(most).read_to_end(&mut reply);
        let _ = sender.send(reply);
    });
    receiver.recv_timeout(PATIENCE).unwrap_or_default()
}
