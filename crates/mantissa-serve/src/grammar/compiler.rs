//! Compiles grammars for the vocabulary of one model, each in a process of its own.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use mantissa_model::Tokenizer;
use mantissa_runtime::Constraint;

use super::constraint::{GrammarConstraint, Meter};
use super::memory::{Memory, Reservation};
use super::process::{Confinement, ForkServer, Process};
use super::wire::Ask;
use super::{Grammar, GrammarError, limits};
use crate::fair::{Caller, Client, Gate};

/// Processes of grammars that are kept for requests of the same client with the same one.
const KEPT: usize = 32;
/// Time for which an unused process is kept.
const KEPT_TIME: Duration = Duration::from_secs(20);
/// Compilations at once, and the most of them of one client.
const AT_ONCE: usize = 2;
const OF_CLIENT: usize = 1;
/// Offers at work at once, and the most of them of one client: a few, so that a process does not wait for the next one.
const OFFERS: [usize; 2] = [6, 4];
/// Most memory of a compilation in bytes, and the least that is worth trying.
const COMPILATION: [u64; 2] = [64 << 20, 8 << 20];
/// Longest wait for memory.
const MEMORY_TIME: Duration = Duration::from_secs(2);
/// Time between two looks at whether a grammar is still wanted.
const LOOK: Duration = Duration::from_millis(20);

/// Compiles grammars for the vocabulary of one model.
#[derive(Debug)]
pub struct Grammars {
    vocabulary: usize,
    confinement: Confinement,
    memory: Arc<Memory>,
    /// Fork server, and its part of the memory.
    server: Mutex<Option<(Arc<ForkServer>, Reservation)>>,
    compilations: Arc<Gate>,
    offers: Arc<Gate>,
    /// Processes by client and text of the grammar, the last used at the end.
    kept: Mutex<VecDeque<Kept>>,
}

#[derive(Debug)]
struct Kept {
    used: Instant,
    client: Client,
    name: String,
    process: Arc<Process>,
}

impl std::fmt::Debug for ForkServer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ForkServer").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

/// Request that wants a grammar.
#[derive(Clone, Copy)]
pub(crate) struct Wanted<'a> {
    pub(crate) caller: Caller,
    /// True as long as somebody waits for the grammar.
    pub(crate) wanted: &'a dyn Fn() -> bool,
}

impl Grammars {
    /// Creates a compiler for a model with `vocabulary` logits, whose processes take `memory` bytes in all. The vocabulary is
    /// prepared by [`prepare`](Self::prepare), or for the first grammar.
    pub fn new(vocabulary: usize, confinement: Confinement, memory: u64) -> Self {
        Grammars {
            vocabulary,
            confinement,
            memory: Memory::new(memory),
            server: Mutex::default(),
            compilations: Gate::new(AT_ONCE, OF_CLIENT, usize::MAX),
            offers: Gate::new(OFFERS[0], OFFERS[1], usize::MAX),
            kept: Mutex::default(),
        }
    }

    /// Prepares the vocabulary of the model's `tokenizer`, which takes .4 s for 150 000 tokens. A grammar that is compiled
    /// meanwhile waits for it; a fault is reported to each grammar.
    pub fn prepare(&self, tokenizer: &Tokenizer) {
        let _ = self.server(tokenizer);
    }

    /// Returns the process with the prepared vocabulary.
    fn server(&self, tokenizer: &Tokenizer) -> Result<Arc<ForkServer>, GrammarError> {
        let mut server = self.server.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((server, _)) = &*server {
            return Ok(Arc::clone(server));
        }
        let texts = tokenizer.token_texts(self.vocabulary);
        let texts = texts.map_err(|error| GrammarError::Tokenizer(limits::shorten(&error.to_string())))?;
        let started = Arc::new(self.confinement.start(&texts)?);
        let lack = |_| self.too_little(started.bytes);
        let reservation = self.memory.reserve(Client::Own, started.bytes).map_err(lack)?;
        Ok(Arc::clone(&server.insert((started, reservation)).0))
    }

    /// Compiles `grammar` for the tokens of `tokenizer`, without a client.
    ///
    /// # Errors
    /// [`GrammarError`] if the grammar cannot be used.
    pub fn compile(
        &self,
        tokenizer: &Tokenizer,
        grammar: &Grammar,
    ) -> Result<Box<dyn Constraint>, GrammarError> {
        let caller = Caller { client: Client::Own, priority: 0 };
        self.compile_for(tokenizer, grammar, Wanted { caller, wanted: &|| true }, Arc::default())
    }

    /// Compiles `grammar` for the tokens of `tokenizer`. `meter` counts what it costs.
    ///
    /// # Errors
    /// [`GrammarError`] if the grammar cannot be used.
    pub(crate) fn compile_for(
        &self,
        tokenizer: &Tokenizer,
        grammar: &Grammar,
        request: Wanted<'_>,
        meter: Arc<Meter>,
    ) -> Result<Box<dyn Constraint>, GrammarError> {
        let name = limits::check(grammar)?;
        let caller = request.caller;
        let process = match self.kept(caller.client, &name) {
            Some(process) => process,
            None => {
                let process = Arc::new(self.start(tokenizer, grammar, request)?);
                let (used, client) = (Instant::now(), caller.client);
                self.keep(Kept { used, client, name, process: Arc::clone(&process) });
                process
            }
        };
        Ok(Box::new(GrammarConstraint::new(process, Arc::clone(&self.offers), caller, meter)))
    }

    /// Starts a process and lets it compile a grammar.
    fn start(
        &self,
        tokenizer: &Tokenizer,
        grammar: &Grammar,
        Wanted { caller, wanted }: Wanted<'_>,
    ) -> Result<Process, GrammarError> {
        let server = self.server(tokenizer)?;
        let place = self.compilations.enter(caller).ok_or(GrammarError::Busy)?;
        if !place.wait_while(wanted) {
            return Err(GrammarError::Unwanted);
        }
        let reservation = self.reserve(caller.client, server.bytes, wanted)?;
        let process = match server.fork(reservation) {
            Ok(process) => process,
            Err(error) => {
                // The next grammar gets another fork server.
                *self.server.lock().unwrap_or_else(PoisonError::into_inner) = None;
                return Err(GrammarError::Process(error.to_string()));
            }
        };
        process.compile(&Ask::Compile(grammar.clone()), wanted)?;
        Ok(process)
    }

    /// Reserves memory for a compilation beside a fork server of so many bytes; processes that are only kept give theirs
    /// up.
    fn reserve(
        &self,
        client: Client,
        server: u64,
        wanted: &dyn Fn() -> bool,
    ) -> Result<Reservation, GrammarError> {
        let most = (self.memory.total().saturating_sub(server) / 2).min(COMPILATION[0]);
        if most < COMPILATION[1] {
            return Err(self.too_little(server));
        }
        let begin = Instant::now();
        loop {
            match self.memory.reserve(client, most) {
                Ok(reservation) => return Ok(reservation),
                Err(_) if self.drop_kept() => {}
                // Others wait for this place.
                Err(_) if !wanted() || begin.elapsed() > MEMORY_TIME => return Err(GrammarError::Busy),
                Err(_) => self.memory.wait(LOOK),
            }
        }
    }

    /// Makes the error of memory that is too little for any grammar beside a fork server of so many bytes.
    fn too_little(&self, server: u64) -> GrammarError {
        GrammarError::Memory { bytes: self.memory.total(), needed: server + 2 * COMPILATION[1] }
    }

    /// Ends the process that nobody has used for longest. Returns false if there is none.
    fn drop_kept(&self) -> bool {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let at = kept.iter().position(|kept| Arc::strong_count(&kept.process) == 1);
        at.and_then(|at| kept.remove(at)).is_some()
    }

    fn kept(&self, client: Client, name: &str) -> Option<Arc<Process>> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.retain(|kept| kept.process.is_alive());
        let at = kept.iter().position(|kept| kept.client == client && kept.name == name)?;
        let found = kept.remove(at)?;
        let process = Arc::clone(&found.process);
        kept.push_back(Kept { used: Instant::now(), ..found });
        Some(process)
    }

    /// Ends the processes that were kept long enough.
    pub(crate) fn expire(&self) {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.retain(|kept| {
            let used = Arc::strong_count(&kept.process) > 1 || kept.used.elapsed() < KEPT_TIME;
            used && kept.process.is_alive()
        });
    }

    /// Number of processes that are kept.
    #[cfg(test)]
    pub(super) fn kept_count(&self) -> usize {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    fn keep(&self, new: Kept) {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() >= KEPT {
            kept.pop_front();
        }
        kept.push_back(new);
    }
}
