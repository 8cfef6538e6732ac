//! `mantissa render-chat`: one chat template, rendered in a process that the template can only hurt itself in.
//!
//! The engine counts a template's steps, not the bytes of the strings it builds: thirty steps double a string to a gigabyte,
//! and no hook of the engine sees it happen. A limit of the address space does. So `run --chat` starts this command, which
//! no user needs, with an empty environment; [`render`] is its other end.

use std::io::{self, Read, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use anyhow::Result;
use mantissa_model::{ChatTemplates, Tokenizer, chat};
use rustix::process::{Resource, Rlimit, setrlimit};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::app::Context;
use crate::error::{BadInput, ChatFailed};
use crate::output::{self, bytes};

/// Address space of the process: the stack of the engine's thread, the binary, and what a template may build.
const ADDRESS_SPACE: u64 = chat::STACK as u64 + (960 << 20);

/// Processor time of the process. A template cannot wait for anything, so that this is its deadline on any machine,
/// however busy.
const SECONDS: u64 = 2;

/// How long the answer may take in all, on a machine that is very busy.
const PATIENCE: Duration = Duration::from_secs(30);

/// Largest request that is read: a template, and a conversation as long as contexts are.
const MAX_REQUEST: u64 = 64 << 20;

/// Render the chat template of a JSON object {template, context} on standard input, under limits of memory and time
#[derive(clap::Args)]
#[command(after_help = "EXAMPLES
  mantissa render-chat < request.json")]
pub struct Args {}

#[derive(Serialize, Deserialize)]
struct Request<'a> {
    template: std::borrow::Cow<'a, str>,
    context: std::borrow::Cow<'a, Value>,
}

#[derive(Serialize, Deserialize)]
enum Reply {
    Text(String),
    Error(String),
}

/// Runs the command.
///
/// # Errors
/// A request that is none, limits that cannot be set, standard output.
pub fn run(_: &Args, _: &Context) -> Result<()> {
    limit(Resource::As, ADDRESS_SPACE)?;
    limit(Resource::Cpu, SECONDS)?;
    limit(Resource::Core, 0)?;
    let mut request = Vec::new();
    io::stdin().lock().take(MAX_REQUEST).read_to_end(&mut request)?;
    let request: Request<'_> = serde_json::from_slice(&request)
        .map_err(|error| BadInput::new("standard input", error.to_string(), "{template, context}"))?;
    let reply = match chat::render(&request.template, &request.context) {
        Ok(text) => Reply::Text(text),
        Err(error) => Reply::Error(error.to_string()),
    };
    let reply = serde_json::to_vec(&reply)?;
    output::to_stdout(|out| out.write_all(&reply))
}

/// Sets a limit of this process, or keeps a lower one.
fn limit(resource: Resource, most: u64) -> io::Result<()> {
    let lower = rustix::process::getrlimit(resource).maximum.map_or(most, |given| given.min(most));
    Ok(setrlimit(resource, Rlimit { current: Some(lower), maximum: Some(lower) })?)
}

/// The template of `model` for conversations.
///
/// # Errors
/// [`BadInput`] where there is none, with `hint`.
pub fn template<'t>(model: &Path, tokenizer: &'t Tokenizer, hint: &str) -> Result<&'t str> {
    tokenizer.chat_template().ok_or_else(|| {
        let names: Vec<&str> = tokenizer.chat_templates().names().collect();
        let found = match names.as_slice() {
            [] => "no chat template".to_owned(),
            names => format!("chat templates for {} alone", names.join(", ")),
        };
        let allowed = format!(
            "one named {} in chat_template.jinja, tokenizer_config.json or a GGUF file's metadata; {hint}",
            ChatTemplates::DEFAULT
        );
        BadInput::new(model.display().to_string(), found, allowed).into()
    })
}

/// Renders the template of `model` in a process of its own.
///
/// # Errors
/// [`ChatFailed`] where the template does not render within the limits or refuses the conversation; an I/O error where
/// no process can be started.
pub fn render(model: &Path, template: &str, context: &Value) -> Result<String> {
    let failed = |what: String| ChatFailed { model: model.display().to_string(), what };
    let request = Request { template: template.into(), context: std::borrow::Cow::Borrowed(context) };
    let request = serde_json::to_vec(&request)?;
    if request.len() as u64 > MAX_REQUEST {
        let found = bytes(request.len() as u64);
        return Err(failed(format!("found a request of {found}, allowed {}", bytes(MAX_REQUEST))).into());
    }
    let mut child = Command::new(std::env::current_exe()?)
        .arg("render-chat")
        .env_clear()
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()?;
    let reply = converse(&mut child, &request);
    // It has answered, or is to be ended; either way it is reaped.
    let _ = child.kill();
    let status = child.wait()?;
    match serde_json::from_slice(&reply) {
        Ok(Reply::Text(text)) => Ok(text),
        Ok(Reply::Error(what)) => Err(failed(what).into()),
        Err(_) => Err(failed(format!(
            "found a template that takes more ({status}), allowed {SECONDS} s of processor time and {} of memory",
            bytes(ADDRESS_SPACE)
        ))
        .into()),
    }
}

/// Sends the request and takes what comes back in time; nothing, or a part, where the process ends early.
fn converse(child: &mut Child, request: &[u8]) -> Vec<u8> {
    let (Some(mut input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
        return Vec::new();
    };
    // The process reads all before it writes anything; one that has ended says so by its silence.
    let _ = input.write_all(request);
    drop(input);
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        let mut reply = Vec::new();
        // Every byte of text takes six at most in JSON.
        let most = 6 * chat::MAX_OUTPUT as u64 + 1024;
        let _ = output.take(most).read_to_end(&mut reply);
        let _ = sender.send(reply);
    });
    receiver.recv_timeout(PATIENCE).unwrap_or_default()
}
