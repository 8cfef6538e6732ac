//! `mantissa render-chat` (hidden): renders one chat template in a separate process with resource limits.
//!
//! The template engine limits steps but not the bytes of the strings it builds: thirty steps can double a
//! string to a gigabyte. A limit of the address space stops that. So `run --chat` starts this command with an
//! empty environment; [`render`] is the caller's side. With `--many` the process answers one request after another, each
//! with its own limit of time, until its input ends: the server's [`Renderer`] keeps such processes.

use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::Result;
pub use mantissa_jobs::chat::template;
use mantissa_jobs::{JobError, RenderChat, chat as chat_text};
use mantissa_model::{Tokenizer, chat};
use mantissa_serve::child::{limit, limit_now, read_message, write_message};
use rustix::process::Resource;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::execute::Execute;
use super::model::ModelPath;
use crate::context::Context;
use crate::error::{BadInput, ChatFailed};
use crate::help::Group;
use crate::output::{self, bytes};
use crate::program;

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
pub struct Args {
    /// Answer requests until the input ends, each after its length in 4 bytes
    #[arg(long, hide = true)]
    many: bool,
}

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

impl Execute for Args {
    const GROUP: Group = Group::Shell;
    const CEILING: bool = false;

    /// # Errors
    /// A malformed request, limits that cannot be set, standard output.
    fn run(&self, _: &Context) -> Result<()> {
        limit(Resource::As, ADDRESS_SPACE)?;
        limit(Resource::Core, 0)?;
        if self.many {
            while let Some(request) = read_message(&mut io::stdin().lock(), MAX_REQUEST)? {
                // From now on.
                let used = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime).tv_sec;
                limit_now(Resource::Cpu, u64::try_from(used).unwrap_or(0) + 1 + SECONDS)?;
                let replies = answer(&request)?;
                output::to_stdout_unchanged(|out| write_message(out, &replies))?;
            }
            return Ok(());
        }
        limit(Resource::Cpu, SECONDS)?;
        let mut request = Vec::new();
        io::stdin().lock().take(MAX_REQUEST).read_to_end(&mut request)?;
        let replies = answer(&request)?;
        output::to_stdout_unchanged(|out| out.write_all(&replies))
    }
}

/// Renders the conversations of a request.
fn answer(request: &[u8]) -> Result<Vec<u8>> {
    let request: Request<'_> = serde_json::from_slice(request)
        .map_err(|error| BadInput::new("standard input", error.to_string(), "{template, contexts}"))?;
    let reply = |context| match chat::render(&request.template, context) {
        Ok(text) => Reply::Text(text),
        Err(error) => Reply::Error(error.to_string()),
    };
    let replies: Vec<Reply> = request.contexts.iter().map(reply).collect();
    Ok(serde_json::to_vec(&replies)?)
}

/// Renders chat templates in processes of this program, under limits.
pub struct Processes;

impl RenderChat for Processes {
    fn render_each(
        &self,
        model: &Path,
        template: &str,
        contexts: &[Value],
    ) -> Result<Vec<Result<String, String>>, JobError> {
        render_each(model, template, contexts)
    }
}

/// Renders `prompt` as a user message, after the system message if there is one, with the chat template of `model`.
///
/// # Errors
/// As [`chat_text::conversation`].
pub fn conversation(
    model: &ModelPath,
    tokenizer: &Tokenizer,
    system: Option<&str>,
    prompt: &str,
) -> Result<String> {
    Ok(chat_text::conversation(model.named(), tokenizer, system, prompt, &Processes)?)
}

/// Renders the template of `model` in a separate process.
///
/// # Errors
/// As [`chat_text::render`].
pub fn render(model: &Path, template: &str, context: &Value) -> Result<String> {
    Ok(chat_text::render(model, template, context, &Processes)?)
}

/// Renders the template of `model` with each of `contexts`, some in a process; a template that refuses one of them gives
/// its message.
///
/// # Errors
/// [`ChatFailed`] if the template exceeds the limits; an I/O error if no process can be started.
pub fn render_each(
    model: &Path,
    template: &str,
    contexts: &[Value],
) -> Result<Vec<Result<String, String>>, JobError> {
    let mut all = Vec::with_capacity(contexts.len());
    for contexts in contexts.chunks(TOGETHER) {
        all.extend(render_some(model, template, contexts)?);
    }
    Ok(all)
}

/// Renders the template of `model` with `contexts`, in one process.
fn render_some(
    model: &Path,
    template: &str,
    contexts: &[Value],
) -> Result<Vec<Result<String, String>>, JobError> {
    let failed = |what: String| ChatFailed { model: model.display().to_string(), what };
    let request = Request { template: template.into(), contexts: contexts.into() };
    let request = serde_json::to_vec(&request).map_err(io::Error::from)?;
    if request.len() as u64 > MAX_REQUEST {
        let found = bytes(request.len() as u64);
        return Err(
            failed(format!("expected a request of at most {}, got {found}", bytes(MAX_REQUEST))).into()
        );
    }
    let mut child = spawn(&[])?;
    let reply = converse(&mut child, &request);
    let status = end(&mut child)?;
    replies(&reply, contexts.len()).ok_or_else(|| failed(exceeded(&status)).into())
}

/// Starts a process that waits for a request.
fn spawn(flags: &[&str]) -> io::Result<Child> {
    let mut command = program::command()?;
    command.arg("render-chat").args(flags).env_clear();
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

/// Renders conversations in processes that are kept: starting one takes longer than most conversations do.
#[derive(Debug)]
pub struct Renderer {
    model: PathBuf,
    ready: Mutex<Vec<Kept>>,
}

/// A process that answers one request after another.
#[derive(Debug)]
struct Kept {
    child: Child,
    requests: Sender<Vec<u8>>,
    replies: Receiver<Vec<u8>>,
}

impl Kept {
    /// Starts a process, and a thread that speaks with it.
    fn start() -> io::Result<Self> {
        let mut child = spawn(&["--many"])?;
        let (Some(mut input), Some(mut output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(io::ErrorKind::BrokenPipe.into());
        };
        let (requests, asked) = mpsc::channel::<Vec<u8>>();
        let (answered, replies) = mpsc::channel();
        // JSON escapes a byte of text into at most six.
        let most = 6 * chat::MAX_OUTPUT as u64 + 1024;
        let speak = move || {
            for request in asked {
                let reply =
                    write_message(&mut input, &request).and_then(|()| read_message(&mut output, most));
                let Ok(Some(reply)) = reply else { return };
                if answered.send(reply).is_err() {
                    return;
                }
            }
        };
        std::thread::Builder::new().name("render".into()).spawn(speak)?;
        Ok(Kept { child, requests, replies })
    }

    /// Answers a request; `None` if the process has ended, or takes too long.
    fn answer(&self, request: Vec<u8>) -> Option<Vec<u8>> {
        self.requests.send(request).ok()?;
        self.replies.recv_timeout(PATIENCE).ok()
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        let _ = end(&mut self.child);
    }
}

impl Renderer {
    /// Creates a renderer for the templates of `model`, a name for messages.
    pub fn new(model: &Path) -> Self {
        Renderer { model: model.to_owned(), ready: Mutex::new(Kept::start().into_iter().collect()) }
    }

    /// Renders `template` with the variables of `context`; a template that refuses them gives its message.
    ///
    /// # Errors
    /// As [`render_each`].
    pub fn render(&self, template: &str, context: &Value) -> Result<Result<String, String>> {
        let request = Request { template: template.into(), contexts: std::slice::from_ref(context).into() };
        let request = serde_json::to_vec(&request)?;
        let ready = self.lock().pop();
        let kept = ready.map_or_else(Kept::start, Ok);
        if let Some(kept) = kept.ok().filter(|_| request.len() as u64 <= MAX_REQUEST)
            && let Some(reply) = kept.answer(request)
            && let Some(reply) = replies(&reply, 1).and_then(|replies| replies.into_iter().next())
        {
            self.lock().push(kept);
            return Ok(reply);
        }
        // A process of its own tells whether the template is at fault.
        let rendered = render_each(&self.model, template, std::slice::from_ref(context))?;
        Ok(rendered.into_iter().next().unwrap_or_else(|| Err("expected a text, got none".to_owned())))
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Kept>> {
        self.ready.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Sends the request and reads the answer within the time limit; an early end gives an empty or partial answer.
fn converse(child: &mut Child, request: &[u8]) -> Vec<u8> {
    let (Some(mut input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
        return Vec::new();
    };
    // The process reads all input before it writes; a closed pipe shows as an empty answer.
    let _ = input.write_all(request);
    drop(input);
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
