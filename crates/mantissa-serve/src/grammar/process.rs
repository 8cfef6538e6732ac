//! The server's side of the processes that hold grammars.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::io::{self, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use mantissa_model::TokenText;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use super::GrammarError;
use super::holder::{self, ORDER, Order};
use super::memory::Reservation;
use super::wire::{self, Answer, Ask, Outcome};
use crate::child::{read_message, write_message};
use crate::fair::Place;

/// Longest time for the fork server to prepare a vocabulary or to fork.
const PATIENCE: Duration = Duration::from_secs(60);

/// Time for the fork server to end.
const LAST: Duration = Duration::from_secs(1);

/// Memory of a process that is asked for beyond what it uses, so that it seldom has to be asked for.
const HEADROOM: u64 = 4 << 20;

/// Time between two looks at whether an answer is still wanted.
const LOOK: Duration = Duration::from_millis(20);

/// Place where grammars are held.
#[derive(Clone)]
pub struct Confinement(Kind);

#[derive(Clone)]
enum Kind {
    Process(Arc<dyn Fn() -> io::Result<Command> + Send + Sync>),
    Thread,
}

impl fmt::Debug for Confinement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.0 {
            Kind::Process(_) => "Process",
            Kind::Thread => "Thread",
        };
        f.debug_tuple("Confinement").field(&kind).finish()
    }
}

impl Confinement {
    /// Processes with limits of memory and processor time. `command` makes the command of a program that calls
    /// [`fork_server`](super::fork_server).
    pub fn processes(command: impl Fn() -> io::Result<Command> + Send + Sync + 'static) -> Self {
        Confinement(Kind::Process(Arc::new(command)))
    }

    /// Threads of this process, without limits, for grammars that can be trusted.
    pub fn threads() -> Self {
        Confinement(Kind::Thread)
    }

    /// Starts the fork server of a model with these tokens.
    pub(super) fn start(&self, texts: &[TokenText]) -> Result<ForkServer, GrammarError> {
        let fault = |error: &dyn fmt::Display| GrammarError::Process(error.to_string());
        let command = match &self.0 {
            Kind::Thread => {
                let factory = Arc::new(holder::factory(texts)?);
                return Ok(ForkServer { program: Program::Thread(factory), bytes: 0 });
            }
            Kind::Process(command) => command().map_err(|error| fault(&error))?,
        };
        ForkServer::spawn(command, texts).map_err(|error| fault(&error))?
    }
}

/// A prepared vocabulary, from which processes that hold grammars are forked. Dropping it ends all of them.
pub(super) struct ForkServer {
    program: Program,
    /// Memory of the fork server.
    pub(super) bytes: u64,
}

enum Program {
    Process { child: Mutex<Child>, control: Mutex<UnixStream> },
    Thread(Arc<llguidance::ParserFactory>),
}

impl ForkServer {
    fn spawn(mut command: Command, texts: &[TokenText]) -> io::Result<Result<Self, GrammarError>> {
        use std::os::unix::process::CommandExt;
        let (ours, theirs) = UnixStream::pair()?;
        command.env_clear().stdin(Stdio::from(OwnedFd::from(theirs)));
        command.stdout(Stdio::null()).stderr(Stdio::null());
        // Ctrl-C is for the server, which lets its requests finish.
        command.process_group(0);
        let child = command.spawn()?;
        drop(command);
        let mut server = ForkServer {
            program: Program::Process { child: Mutex::new(child), control: Mutex::new(ours) },
            bytes: 0,
        };
        let Program::Process { control, .. } = &server.program else { return Ok(Ok(server)) };
        let answer = {
            let mut control = control.lock().unwrap_or_else(PoisonError::into_inner);
            control.set_read_timeout(Some(PATIENCE))?;
            control.set_write_timeout(Some(PATIENCE))?;
            write_message(&mut *control, &wire::vocabulary(texts))?;
            read_message(&mut *control, wire::LONGEST)?.ok_or(io::ErrorKind::UnexpectedEof)?
        };
        let Answer { bytes, outcome, .. } = Answer::from_bytes(&answer)?;
        Ok(match outcome {
            Outcome::Failed(message) => Err(GrammarError::Refused(message)),
            _ => {
                server.bytes = bytes;
                Ok(server)
            }
        })
    }

    /// Starts a process that keeps to the memory of `reservation`.
    pub(super) fn fork(self: &Arc<Self>, reservation: Reservation) -> io::Result<Process> {
        let (ours, theirs) = UnixStream::pair()?;
        let pid = match &self.program {
            Program::Thread(factory) => {
                let factory = Arc::clone(factory);
                let hold = move || _ = holder::hold(theirs, &factory, None);
                std::thread::Builder::new().name("grammars".into()).spawn(hold)?;
                None
            }
            Program::Process { control, .. } => {
                let mut control = control.lock().unwrap_or_else(PoisonError::into_inner);
                let order = Order::Fork(reservation.bytes()).to_bytes();
                let sockets = [theirs.as_fd()];
                let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
                let mut ancillary = SendAncillaryBuffer::new(&mut space);
                ancillary.push(SendAncillaryMessage::ScmRights(&sockets));
                let sent = sendmsg(&*control, &[IoSlice::new(&order)], &mut ancillary, SendFlags::NOSIGNAL)?;
                if sent != ORDER {
                    return Err(io::ErrorKind::WriteZero.into());
                }
                let mut pid = [0; 4];
                control.read_exact(&mut pid)?;
                match u32::from_le_bytes(pid) {
                    0 => return Err(io::Error::other("the system allows no further process")),
                    pid => Some(pid),
                }
            }
        };
        Ok(Process {
            server: Arc::clone(self),
            pid,
            channel: Mutex::new(Channel::new(ours)),
            sequences: AtomicU32::new(0),
            reservation: Mutex::new(reservation),
        })
    }

    /// Ends a process, without waiting for the fork server.
    fn kill(self: &Arc<Self>, pid: u32) {
        let Program::Process { control, .. } = &self.program else { return };
        // A fork server that has ended has ended its processes.
        let order = move |control: &mut UnixStream| _ = control.write_all(&Order::Kill(pid).to_bytes());
        if let Ok(mut control) = control.try_lock() {
            return order(&mut control);
        }
        let server = Arc::clone(self);
        let later = move || {
            if let Program::Process { control, .. } = &server.program {
                order(&mut control.lock().unwrap_or_else(PoisonError::into_inner));
            }
        };
        let _ = std::thread::Builder::new().name("grammars".into()).spawn(later);
    }
}

impl Drop for ForkServer {
    fn drop(&mut self) {
        let Program::Process { child, control } = &self.program else { return };
        let control = control.lock().unwrap_or_else(PoisonError::into_inner);
        let mut child = child.lock().unwrap_or_else(PoisonError::into_inner);
        // It ends its processes, then itself.
        let _ = control.shutdown(Shutdown::Both);
        let begin = Instant::now();
        while matches!(child.try_wait(), Ok(None)) && begin.elapsed() < LAST {
            std::thread::sleep(Duration::from_millis(1));
        }
        let _ = child.kill();
        let _ = child.wait();
    }
}

/// A process that holds one grammar. Dropping it ends it.
pub(super) struct Process {
    server: Arc<ForkServer>,
    pid: Option<u32>,
    channel: Mutex<Channel>,
    sequences: AtomicU32,
    reservation: Mutex<Reservation>,
}

impl fmt::Debug for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Process").field("pid", &self.pid).finish_non_exhaustive()
    }
}

/// The socket, what has come through it, and what was asked.
struct Channel {
    stream: UnixStream,
    input: Vec<u8>,
    /// Sequences that wait for an answer, in the order of asking, which is the order of the answers. The entry of a
    /// forgotten one is dropped, and so is its place.
    asked: VecDeque<(u32, Option<Dropped>)>,
    /// Sequences that the process knows and that are not forgotten.
    known: usize,
    /// Answers that have come.
    answers: HashMap<u32, Answer>,
    /// Sequences to be forgotten.
    forgotten: Vec<u32>,
    /// True if the process has ended.
    ended: bool,
}

impl Channel {
    fn new(stream: UnixStream) -> Self {
        Channel {
            stream,
            input: Vec::new(),
            asked: VecDeque::new(),
            known: 0,
            answers: HashMap::new(),
            forgotten: Vec::new(),
            ended: false,
        }
    }

    /// Sends a message.
    fn send(&mut self, ask: &Ask) {
        let sent = ask.to_bytes().and_then(|bytes| write_message(&mut self.stream, &bytes));
        self.ended |= sent.is_err();
    }

    /// Takes what has come without waiting.
    fn receive(&mut self) -> io::Result<()> {
        let mut bytes = [0; 16 << 10];
        while !self.asked.is_empty() && is_readable(&self.stream, Duration::ZERO) {
            match self.stream.read(&mut bytes)? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                n => self.input.extend_from_slice(&bytes[..n]),
            }
            while let Some(message) = wire::take(&mut self.input)? {
                let answer = Answer::from_bytes(&message)?;
                match self.asked.pop_front() {
                    Some((sequence, None)) => _ = self.answers.insert(sequence, answer),
                    Some((_, Some(Dropped(place)))) => {
                        let time = Duration::from_micros(answer.micros);
                        place.into_iter().for_each(|mut place| place.charge(time));
                    }
                    None => {}
                }
            }
        }
        Ok(())
    }
}

/// An offer whose sequence was forgotten, with its place.
#[derive(Debug)]
struct Dropped(Option<Place>);

/// Waits until bytes or an end can be read.
fn is_readable(stream: &UnixStream, patience: Duration) -> bool {
    let patience = Timespec::try_from(patience).ok();
    let mut polled = [PollFd::new(stream, PollFlags::IN)];
    poll(&mut polled, patience.as_ref()).is_ok_and(|ready| ready > 0)
}

/// Number of the sequence that stands for the process itself.
const ITSELF: u32 = 0;

impl Process {
    fn channel(&self) -> MutexGuard<'_, Channel> {
        self.channel.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// True if the process can be asked.
    pub(super) fn is_alive(&self) -> bool {
        !self.channel().ended
    }

    /// Makes the number of a new sequence.
    pub(super) fn sequence(&self) -> u32 {
        self.sequences.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Asks for something for a sequence, which may be `new`. The process works on one after another; each client has
    /// few offers at work, so that the socket holds all messages.
    pub(super) fn ask(&self, sequence: u32, ask: &Ask, new: bool) {
        let mut channel = self.channel();
        if !channel.forgotten.is_empty() {
            let forgotten = std::mem::take(&mut channel.forgotten);
            channel.send(&Ask::Forget(forgotten));
        }
        channel.known += usize::from(new);
        channel.asked.push_back((sequence, None));
        channel.send(ask);
    }

    /// Takes the answer to what was asked for `sequence`, if it is there.
    ///
    /// # Errors
    /// [`Ended`] if the process has ended: it exceeded its limits.
    pub(super) fn answer(&self, sequence: u32) -> Result<Option<Answer>, Ended> {
        let mut channel = self.channel();
        if channel.receive().is_err() {
            channel.ended = true;
        }
        if let Some(answer) = channel.answers.remove(&sequence) {
            drop(channel);
            self.make_room(answer.bytes);
            return Ok(Some(answer));
        }
        if channel.ended { Err(Ended) } else { Ok(None) }
    }

    /// Waits for the answer to what was asked for `sequence`, or for the end of the process.
    pub(super) fn wait(&self, sequence: u32, patience: Duration) -> bool {
        let mut channel = self.channel();
        let begin = Instant::now();
        loop {
            if channel.answers.contains_key(&sequence) || channel.ended {
                return true;
            }
            let left = patience.saturating_sub(begin.elapsed());
            let asked = channel.asked.iter().any(|(other, _)| *other == sequence);
            if !asked || left.is_zero() || !is_readable(&channel.stream, left) {
                return false;
            }
            channel.ended |= channel.receive().is_err();
        }
    }

    /// Forgets a sequence that the process knows. If it waits for an answer and nobody else uses the process, the
    /// process ends; else the answer is awaited in `place`.
    pub(super) fn forget(&self, sequence: u32, place: Option<Place>) {
        let mut channel = self.channel();
        channel.forgotten.push(sequence);
        channel.answers.remove(&sequence);
        channel.known = channel.known.saturating_sub(1);
        let others = channel.known > 0;
        let Some(own) = channel.asked.iter_mut().find(|(other, _)| *other == sequence) else { return };
        own.1 = Some(Dropped(place));
        if !others {
            channel.ended = true;
            channel.asked.clear();
            drop(channel);
            self.kill();
        }
    }

    fn kill(&self) {
        self.pid.into_iter().for_each(|pid| self.server.kill(pid));
    }

    /// Lets the process have more memory, as long as there is some.
    fn make_room(&self, used: u64) {
        let mut reservation = self.reservation.lock().unwrap_or_else(PoisonError::into_inner);
        if used + HEADROOM / 2 > reservation.bytes() && reservation.resize(used + HEADROOM) {
            self.channel().send(&Ask::Limit(reservation.bytes()));
        }
    }

    /// Compiles a grammar, as long as `wanted`.
    ///
    /// # Errors
    /// [`GrammarError`] of the grammar, or [`GrammarError::Excess`] if it exceeds the limits.
    pub(super) fn compile(&self, ask: &Ask, wanted: &dyn Fn() -> bool) -> Result<(), GrammarError> {
        let excess = || GrammarError::Excess {
            seconds: holder::COMPILATION,
            bytes: self.reservation.lock().unwrap_or_else(PoisonError::into_inner).bytes(),
        };
        self.ask(ITSELF, ask, false);
        let begin = Instant::now();
        let answer = loop {
            match self.answer(ITSELF) {
                Ok(Some(answer)) => break answer,
                Err(Ended) => return Err(excess()),
                // Processor time limits the process; on a machine that gives it none, nobody waits for ever.
                Ok(None) if begin.elapsed() > PATIENCE => return Err(excess()),
                Ok(None) if !wanted() => return Err(GrammarError::Unwanted),
                Ok(None) => _ = self.wait(ITSELF, LOOK),
            }
        };
        if let Outcome::Failed(message) = answer.outcome {
            return Err(GrammarError::Refused(message));
        }
        // The rest of what compilation may take is for other grammars.
        let mut reservation = self.reservation.lock().unwrap_or_else(PoisonError::into_inner);
        if answer.bytes + HEADROOM < reservation.bytes() && reservation.resize(answer.bytes + HEADROOM) {
            self.channel().send(&Ask::Limit(reservation.bytes()));
        }
        Ok(())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The process has ended.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ended;
