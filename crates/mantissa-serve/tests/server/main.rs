//! A server in this process, driven over TCP: requests, hostile ones, and many at once.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod chat;
mod compare;
mod completions;
mod forms;
mod hostile;
mod llama;
mod ollama;
mod reasoning;
mod scheduling;
mod support;
