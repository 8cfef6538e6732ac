//! The process that holds a grammar: it compiles it, and answers which tokens may follow.
//!
//! The server starts one process per model, the *fork server*, and tells it the vocabulary, which it prepares once. For
//! each grammar the fork server forks: the copy shares the prepared vocabulary, sets limits of memory and processor
//! time for itself, and works on what the server sends it through a socket of its own. A grammar that exceeds the
//! limits ends its process and nothing else. All processes run at the lowest priority.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use fork::Fork;
use llguidance::toktrie::InferenceCapabilities;
use llguidance::{Matcher, ParserFactory};
use mantissa_model::TokenText;
use mantissa_runtime::Offer;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use rustix::process::{Pid, Resource, Signal, WaitOptions};

use super::translate::prepare;
use super::wire::{self, Answer, Ask, Outcome};
use super::{GrammarError, limits, vocabulary};
use crate::child::{limit, limit_now, read_message, write_message};

/// Stack of the work, which recurses into the grammar.
const STACK: usize = 16 << 20;

/// Most processor time of a compilation in seconds; ordinary schemas take milliseconds.
pub(super) const COMPILATION: u64 = 4;

/// Most processor time of an offer in seconds, a backstop: the parser's own limits end it long before.
const OFFER: u64 = 1;

/// Offers between two looks at the memory in use.
const LOOK: u32 = 16;

/// Memory that the allocator takes at once, which a limit leaves room for.
const SLACK: u64 = 1 << 20;

/// Bytes of an order.
pub(super) const ORDER: usize = 9;

/// Message of the server to the fork server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// Fork; the copy works on the socket that comes with the order, and keeps to so many bytes of memory. The answer
    /// is the number of the process.
    Fork(u64),
    /// End a process that was forked.
    Kill(u32),
}

impl Order {
    pub(super) fn to_bytes(self) -> [u8; ORDER] {
        let (kind, value) = match self {
            Order::Fork(bytes) => (0, bytes),
            Order::Kill(pid) => (1, u64::from(pid)),
        };
        let mut out = [kind; ORDER];
        out[1..].copy_from_slice(&u64::to_le_bytes(value));
        out
    }

    fn from_bytes(bytes: [u8; ORDER]) -> Option<Self> {
        let [kind, value @ ..] = bytes;
        let value = u64::from_le_bytes(value);
        match kind {
            0 => Some(Order::Fork(value)),
            1 => Some(Order::Kill(u32::try_from(value).ok()?)),
            _ => None,
        }
    }
}

/// Program of the fork server, whose standard input is a socket to the server. Returns when the server closes it.
///
/// The process must have a single thread.
///
/// # Errors
/// An input that is no socket or speaks another language, or limits that cannot be set.
pub fn fork_server() -> io::Result<()> {
    use std::os::fd::AsFd;
    if threads().is_some_and(|threads| threads != 1) {
        return Err(io::Error::other("expected a process with a single thread, got more"));
    }
    let control = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    // Copies must not hold the socket as their standard input.
    let null: OwnedFd = rustix::fs::open("/dev/null", rustix::fs::OFlags::RDWR, rustix::fs::Mode::empty())?;
    rustix::stdio::dup2_stdin(&null)?;
    drop(null);
    limit(Resource::Core, 0)?;
    rustix::process::nice(19)?;
    let Some(message) = read_message(&mut &control, wire::LONGEST)? else { return Ok(()) };
    let prepared = factory(&wire::read_vocabulary(&message)?);
    let outcome = match &prepared {
        Ok(_) => Outcome::Done,
        Err(error) => Outcome::Failed(error.to_string()),
    };
    drop(message);
    write_message(&mut &control, &Answer { micros: 0, bytes: resident_bytes(), outcome }.to_bytes())?;
    match prepared {
        Ok(factory) => obey(control, &Arc::new(factory)),
        Err(_) => Ok(()),
    }
}

/// Follows the orders of the server.
fn obey(control: UnixStream, factory: &Arc<ParserFactory>) -> io::Result<()> {
    let mut children: BTreeSet<u32> = BTreeSet::new();
    loop {
        // Those that have ended meanwhile are waited for within a second.
        let looks = Timespec { tv_sec: 1, tv_nsec: 0 };
        let mut polled = [PollFd::new(&control, PollFlags::IN)];
        let comes = poll(&mut polled, (!children.is_empty()).then_some(&looks));
        reap(&mut children);
        if comes == Ok(0) || comes == Err(rustix::io::Errno::INTR) {
            continue;
        }
        let Some((order, socket)) = receive(&control)? else { break };
        match (order, socket) {
            (Order::Fork(bytes), Some(socket)) => match fork::fork() {
                Ok(Fork::Child) => {
                    drop(control);
                    let held = hold(UnixStream::from(socket), factory, Some(bytes));
                    std::process::exit(i32::from(held.is_err()));
                }
                // No further process is allowed.
                Err(_) => (&control).write_all(&0u32.to_le_bytes())?,
                Ok(Fork::Parent(pid)) => {
                    let pid = pid.cast_unsigned();
                    children.insert(pid);
                    (&control).write_all(&pid.to_le_bytes())?;
                }
            },
            (Order::Kill(pid), None) if children.contains(&pid) => kill(pid),
            _ => {}
        }
    }
    // The server has gone.
    children.iter().for_each(|pid| kill(*pid));
    while rustix::process::wait(WaitOptions::empty()).is_ok() {}
    Ok(())
}

/// Ends a process that has not been waited for, so its number is still its own.
fn kill(pid: u32) {
    if let Some(pid) = Pid::from_raw(pid.cast_signed()) {
        let _ = rustix::process::kill_process(pid, Signal::KILL);
    }
}

/// Waits for the processes that have ended.
fn reap(children: &mut BTreeSet<u32>) {
    while let Ok(Some((pid, _))) = rustix::process::wait(WaitOptions::NOHANG) {
        children.remove(&pid.as_raw_nonzero().get().cast_unsigned());
    }
}

/// Receives an order, with the socket that comes with it; `None` at the end.
fn receive(control: &UnixStream) -> io::Result<Option<(Order, Option<OwnedFd>)>> {
    let mut bytes = [0; ORDER];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC;
    let received = loop {
        match recvmsg(control, &mut [IoSliceMut::new(&mut bytes)], &mut ancillary, flags) {
            Err(rustix::io::Errno::INTR) => {}
            received => break received?.bytes,
        }
    };
    if received == 0 {
        return Ok(None);
    }
    let mut socket = None;
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(sockets) = message {
            socket = sockets.into_iter().next();
        }
    }
    let mut control = control;
    control.read_exact(&mut bytes[received..])?;
    let order = Order::from_bytes(bytes).ok_or(io::ErrorKind::InvalidData)?;
    Ok(Some((order, socket)))
}

/// Prepares a vocabulary.
pub(super) fn factory(texts: &[TokenText]) -> Result<ParserFactory, GrammarError> {
    let fault = |message: String| GrammarError::Tokenizer(limits::shorten(&message));
    let env = vocabulary::env(texts);
    let slices = llguidance::earley::SlicedBiasComputer::general_slices();
    let factory = ParserFactory::new(&env, InferenceCapabilities::default(), &slices);
    let mut factory = factory.map_err(|error| fault(error.to_string()))?;
    factory.quiet();
    *factory.limits_mut() = limits::parser();
    Ok(factory)
}

/// Holds one grammar: answers what comes through `socket`, until its end. With a number of `bytes` the process keeps to
/// so much memory.
///
/// # Errors
/// The socket fails, or its messages are malformed.
pub(super) fn hold(socket: UnixStream, factory: &Arc<ParserFactory>, bytes: Option<u64>) -> io::Result<()> {
    let factory = Arc::clone(factory);
    let work = move || {
        let mut holder = Holder::new(factory, bytes);
        while let Some(message) = read_message(&mut &socket, wire::LONGEST)? {
            if let Some(answer) = holder.answer(Ask::from_bytes(&message)?)? {
                write_message(&mut &socket, &answer.to_bytes())?;
            }
        }
        Ok(())
    };
    let thread = std::thread::Builder::new().name("grammar".into()).stack_size(STACK).spawn(work)?;
    thread.join().unwrap_or_else(|_| Err(io::ErrorKind::Other.into()))
}

/// A grammar and the sequences that follow it.
struct Holder {
    factory: Arc<ParserFactory>,
    /// Bytes of data before the grammar, if limits are kept.
    base: Option<u64>,
    matcher: Option<Matcher>,
    sequences: BTreeMap<u32, Matcher>,
    /// Memory at the last look, and the offers since.
    bytes: u64,
    offers: u32,
}

impl Holder {
    fn new(factory: Arc<ParserFactory>, bytes: Option<u64>) -> Self {
        let base = bytes.map(|_| data_bytes());
        let holder = Holder { factory, base, matcher: None, sequences: BTreeMap::new(), bytes: 0, offers: 0 };
        bytes.into_iter().for_each(|bytes| holder.keep_to(bytes));
        holder
    }

    /// Sets the limit of memory.
    fn keep_to(&self, bytes: u64) {
        if let Some(base) = self.base {
            // Where the system knows no such limit, the limit of processor time remains.
            let _ = limit_now(Resource::Data, base + bytes + SLACK);
        }
    }

    /// Works on one message.
    fn answer(&mut self, ask: Ask) -> io::Result<Option<Answer>> {
        let begin = processor_time();
        if self.base.is_some() {
            let most = if matches!(ask, Ask::Compile(_)) { COMPILATION } else { OFFER };
            // Seconds are counted as wholes.
            limit_now(Resource::Cpu, begin.as_secs() + 1 + most)?;
        }
        let outcome = match ask {
            Ask::Compile(grammar) => {
                self.offers = LOOK;
                match compile(&self.factory, &grammar) {
                    Ok(matcher) => {
                        self.matcher = Some(matcher);
                        Outcome::Done
                    }
                    Err(error) => Outcome::Failed(error.to_string()),
                }
            }
            Ask::Limit(bytes) => {
                self.keep_to(bytes);
                return Ok(None);
            }
            Ask::Forget(sequences) => {
                self.sequences.retain(|sequence, _| !sequences.contains(sequence));
                return Ok(None);
            }
            Ask::Offer { sequence, offer, before } => self
                .offer(sequence, offer, &before)
                .unwrap_or_else(|message| Outcome::Failed(clean(&message))),
        };
        self.offers += 1;
        if self.offers > LOOK
            && let Some(base) = self.base
        {
            (self.bytes, self.offers) = (data_bytes().saturating_sub(base), 0);
        }
        let micros = u64::try_from(processor_time().saturating_sub(begin).as_micros()).unwrap_or(u64::MAX);
        Ok(Some(Answer { micros, bytes: self.bytes, outcome }))
    }

    /// Offers a token to a sequence.
    fn offer(&mut self, sequence: u32, offer: Offer, before: &[u32]) -> Result<Outcome, String> {
        let message = |error: &dyn std::fmt::Display| error.to_string();
        if !self.sequences.contains_key(&sequence) {
            let pristine = self.matcher.as_ref().ok_or("no grammar")?;
            let mut matcher = pristine.deep_clone();
            matcher.consume_tokens(before).map_err(|error| message(&error))?;
            self.sequences.insert(sequence, matcher);
            // A copy takes as much memory as the grammar.
            self.offers = LOOK;
        }
        let matcher = self.sequences.get_mut(&sequence).ok_or("no sequence")?;
        let tokens = self.factory.tok_env().tok_trie().vocab_size();
        let may = match offer {
            Offer::End => matcher.is_accepting().map_err(|error| message(&error))?,
            Offer::Token(token) if token as usize >= tokens => false,
            Offer::Token(token) => matcher.validate_tokens(&[token]).map_err(|error| message(&error))? == 1,
        };
        match offer {
            Offer::End if may => return Ok(Outcome::Taken { complete: true }),
            Offer::Token(token) if may => {
                matcher.consume_token(token).map_err(|error| message(&error))?;
                return match matcher.get_error() {
                    Some(error) => Err(error),
                    None => Ok(Outcome::Taken { complete: matcher.is_stopped() }),
                };
            }
            _ => {}
        }
        let allowed = matcher.compute_mask().map_err(|error| message(&error))?;
        let may_end = matcher.is_accepting().map_err(|error| message(&error))?;
        Ok(Outcome::Refused { may_end, words: wire::words(&allowed) })
    }
}

/// Compiles a grammar, whose size the server has checked.
fn compile(factory: &ParserFactory, grammar: &super::Grammar) -> Result<Matcher, GrammarError> {
    let grammar = prepare(grammar)?;
    let parser = llguidance::panic_utils::catch_unwind(std::panic::AssertUnwindSafe(|| {
        factory.create_parser(grammar)
    }));
    let mut matcher = Matcher::new(parser);
    let invalid = |message: &str| GrammarError::Invalid(clean(message));
    if let Some(error) = matcher.get_error() {
        return Err(invalid(&error));
    }
    // Such as a key of a schema that would be ignored.
    match matcher.grammar_warnings().first() {
        Some(warning) => Err(invalid(warning)),
        None => Ok(matcher),
    }
}

/// Shortens a message of the parser. One that tells a fault of the parser names the cause instead of its code.
fn clean(message: &str) -> String {
    if message.starts_with("panic:") {
        return "a grammar that the compiler cannot handle, such as a bound or a count beyond 2^53".into();
    }
    match message.contains(UNKNOWN_FORMAT) {
        true => {
            let what: String = limits::shorten(message).chars().take(150).collect();
            format!("{what}; formats: {}", FORMATS.join(", "))
        }
        false => limits::shorten(message),
    }
}

/// Words of the parser about a `format` of a schema that it does not know.
const UNKNOWN_FORMAT: &str = "Unknown format";

/// Values of `format` in a schema that the parser knows.
pub(super) const FORMATS: [&str; 10] =
    ["date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"];

/// Processor time of the process.
fn processor_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::try_from(time).unwrap_or_default()
}

/// Field of `/proc/self/statm`, in bytes; 0 where there is none.
fn statm(field: usize) -> u64 {
    let pages = std::fs::read_to_string("/proc/self/statm").ok();
    let pages = pages.and_then(|text| text.split_whitespace().nth(field)?.parse::<u64>().ok());
    pages.unwrap_or(0) * rustix::param::page_size() as u64
}

/// Number of threads of the process, where the system tells.
fn threads() -> Option<usize> {
    Some(std::fs::read_dir("/proc/self/task").ok()?.count())
}

/// Memory of the process that can be written, which its limit counts.
fn data_bytes() -> u64 {
    statm(5)
}

/// Memory of the process that it does not share with files.
fn resident_bytes() -> u64 {
    statm(1).saturating_sub(statm(2))
}
