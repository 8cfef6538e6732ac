//! What a job is given when it runs: threads, memory, outputs, and someone who watches.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use mantissa_eval::TokenError;
use mantissa_store::{Output, Permits};
use serde_json::Value;

use crate::error::{BadInput, GateFailed, JobError, OverMemory};
use crate::memory::{self, Limit, anonymous};
use crate::notes::merged;
use crate::progress::{Meter, Polling, Progress, Unit};

/// Bytes by which the memory that tokenized texts leave allocated differs between runs: measured: 12 kB over
/// twelve runs on two cores, and more threads hold more.
const TEXTS_VARY: u64 = 1 << 20;

/// Resources that a host grants, and how strict it is.
#[derive(Clone, Copy, Debug)]
pub struct Allowed {
    /// Number of threads, at least 1. Results do not depend on it.
    pub threads: usize,
    /// Memory ceiling in bytes; `None` is the available memory.
    pub memory: Option<u64>,
    /// True if warnings are errors.
    pub strict: bool,
}

impl Default for Allowed {
    fn default() -> Self {
        Allowed { threads: mantissa_kernels::available_threads(), memory: None, strict: false }
    }
}

/// Renders chat templates, which are programs of a model's author: under limits of memory and time.
pub trait RenderChat: Send + Sync {
    /// Renders `template`, of `model`, with each of `contexts`; a template that refuses one of them gives its message.
    ///
    /// # Errors
    /// [`ChatFailed`](crate::ChatFailed) if the template exceeds the limits; an I/O error if it cannot be run.
    fn render_each(
        &self,
        model: &Path,
        template: &str,
        contexts: &[Value],
    ) -> Result<Vec<Result<String, String>>, JobError>;
}

/// Runs jobs: grants threads, memory and outputs, shows their progress, and may ask them to stop.
pub struct Host {
    /// Number of threads, at least 1.
    pub threads: usize,
    /// Memory ceiling in bytes; `None` is the available memory.
    pub memory: Option<u64>,
    strict: bool,
    permits: Permits,
    progress: Arc<dyn Progress>,
    chat: Option<Arc<dyn RenderChat>>,
    /// Bytes that tokenizing texts left allocated in the process.
    texts: AtomicU64,
}

impl Host {
    /// Makes a host that may write the outputs of `permits` and shows everything by `progress`.
    pub fn new(allowed: Allowed, permits: Permits, progress: Box<dyn Progress>) -> Self {
        let Allowed { threads, memory, strict } = allowed;
        Host {
            threads: threads.max(1),
            memory,
            strict,
            permits,
            progress: Arc::from(progress),
            chat: None,
            texts: AtomicU64::new(0),
        }
    }

    /// Adds what renders chat templates; without it, jobs refuse conversations.
    #[must_use]
    pub fn with_chat(self, chat: Box<dyn RenderChat>) -> Self {
        Host { chat: Some(Arc::from(chat)), ..self }
    }

    /// Returns what renders the chat template of `model`.
    ///
    /// # Errors
    /// The host has none.
    pub fn chat(&self, model: &Path) -> Result<&dyn RenderChat, JobError> {
        self.chat.as_deref().ok_or_else(|| {
            let what = format!("{}: chat_template", model.display());
            BadInput::new(what, "a host without a renderer", "a host that renders chat templates").into()
        })
    }

    /// Returns what renders chat templates, for work on other threads.
    pub(crate) fn shared_chat(&self) -> Option<Arc<dyn RenderChat>> {
        self.chat.clone()
    }

    /// Returns the output at `path`, one of the paths that the job declared.
    ///
    /// # Errors
    /// [`JobError::Undeclared`]: a bug.
    pub fn output(&self, path: &Path) -> Result<Output, JobError> {
        self.permits.output(path).ok_or_else(|| JobError::Undeclared(path.to_owned()))
    }

    /// True if the outputs of other jobs may be replaced.
    pub fn replaces(&self) -> bool {
        self.permits.replaces()
    }

    /// True if `path` holds a finished output that the job may not replace, and has to refuse.
    pub fn is_refused(&self, path: &Path) -> bool {
        self.permits.is_refused(path)
    }

    /// True if the output at `path` carries the mark of this very job: the same command, and inputs of the same identity.
    ///
    /// # Errors
    /// A path that cannot be resolved.
    pub fn wrote(&self, path: &Path) -> Result<bool, JobError> {
        Ok(self.permits.wrote(path)?)
    }

    /// Starts showing a stretch of work of `total` units, 0 if unknown.
    pub fn progress(&self, total: u64, unit: Unit) -> Meter {
        Meter::new(self.progress.start(total, unit, false))
    }

    /// Starts showing a stretch of work whose steps have figures of their own.
    pub fn progress_with_status(&self, total: u64, unit: Unit) -> Meter {
        Meter::new(self.progress.start(total, unit, true))
    }

    /// Shows a warning on one line.
    pub fn warn(&self, message: &str) {
        self.progress.warn(message);
    }

    /// Shows a note on one line.
    pub fn note(&self, message: &str) {
        self.progress.note(message);
    }

    /// True if the job should save its work and end.
    pub fn stops(&self) -> bool {
        self.progress.stops()
    }

    /// Returns the question of [`stops`](Self::stops), for work that keeps it.
    pub fn stop_question(&self) -> impl Fn() -> bool + Send + Sync + use<> {
        let progress = Arc::clone(&self.progress);
        move || progress.stops()
    }

    /// Runs `work`, which asks [`stops`](Self::stops) between steps and, once it is true, returns within seconds an error
    /// for which `stopped` is true.
    ///
    /// # Errors
    /// As `work`.
    pub fn orderly<T, E>(
        &self,
        work: impl FnOnce() -> Result<T, E>,
        stopped: impl FnOnce(&E) -> bool,
    ) -> Result<T, E> {
        self.polled(Polling::Soon, work, stopped)
    }

    /// Runs `work` as [`orderly`](Self::orderly) does, without the limit of seconds: what it saves when it stops may take
    /// longer to write, and would be lost.
    ///
    /// # Errors
    /// As `work`.
    pub fn saving<T, E>(
        &self,
        work: impl FnOnce() -> Result<T, E>,
        stopped: impl FnOnce(&E) -> bool,
    ) -> Result<T, E> {
        self.polled(Polling::Saving, work, stopped)
    }

    /// Runs `work` until the question that it is given says that it should stop: a stop is the orderly end of this work,
    /// which bounds the time to it itself.
    pub fn until_stopped<T>(&self, work: impl FnOnce(&dyn Fn() -> bool) -> T) -> T {
        self.progress.polling(Polling::Saving);
        work(&|| self.progress.stops())
    }

    fn polled<T, E>(
        &self,
        polling: Polling,
        work: impl FnOnce() -> Result<T, E>,
        stopped: impl FnOnce(&E) -> bool,
    ) -> Result<T, E> {
        self.progress.polling(polling);
        let result = work();
        // Work that stopped stays orderly until its error has ended the process.
        if !result.as_ref().is_err_and(stopped) {
            self.progress.polling(Polling::Never);
        }
        result
    }

    /// Makes `message` the message of a stop that the work does not ask for, for the lifetime of the result.
    pub fn leaving(&self, message: String) -> Leaving<'_> {
        let leaving = Leaving(self.progress.as_ref());
        leaving.change(message);
        leaving
    }

    /// True if warnings are errors.
    pub fn is_strict(&self) -> bool {
        self.strict
    }

    /// Shows every warning, those of many layers merged; fails if the host is strict and there is one.
    ///
    /// # Errors
    /// As [`refuse_warnings`](Self::refuse_warnings).
    pub fn warn_all(&self, warnings: &[String]) -> Result<(), GateFailed> {
        merged(warnings).iter().for_each(|warning| self.warn(warning));
        self.refuse_warnings(warnings)
    }

    /// Fails if the host is strict and there is a warning; shows none.
    ///
    /// # Errors
    /// [`GateFailed`] with the first warning and the number of warnings.
    pub fn refuse_warnings(&self, warnings: &[String]) -> Result<(), GateFailed> {
        match warnings {
            [first, ..] if self.strict => {
                let count = warnings.len();
                Err(GateFailed::new(format!("--strict: expected no warnings, got {count}; first: {first}")))
            }
            _ => Ok(()),
        }
    }

    /// Returns a ceiling that accepts work of `needs` bytes, the smallest one unless texts were read: they count
    /// with `TEXTS_VARY` more than this process holds, because a second process may hold more.
    pub fn least_memory(&self, needs: u64) -> u64 {
        match self.texts.load(Ordering::Relaxed) {
            0 => needs,
            texts => needs.saturating_add(texts).saturating_add(TEXTS_VARY),
        }
    }

    /// Refuses work whose predicted peak memory exceeds the ceiling or, without one, the available memory.
    /// `needs` excludes the bytes that tokenizing texts left allocated; they are added.
    ///
    /// # Errors
    /// [`OverMemory`] with both sizes.
    pub fn require_memory(&self, what: &str, needs: u64) -> Result<(), OverMemory> {
        let (allowed, limit) = self.ceiling();
        let needs = match limit {
            Limit::Option => needs.saturating_add(self.texts.load(Ordering::Relaxed)),
            // The process already holds this memory, so it is not part of the available memory.
            Limit::Available => needs,
        };
        if needs > allowed {
            return Err(OverMemory { what: what.into(), needs, allowed, limit, fix: None });
        }
        Ok(())
    }

    /// True if [`require_memory`](Self::require_memory) accepts work of `needs` bytes.
    pub fn has_memory(&self, needs: u64) -> bool {
        self.require_memory("", needs).is_ok()
    }

    /// Refuses work that was made as small as possible, like [`require_memory`](Self::require_memory); the error names
    /// the least that is accepted.
    ///
    /// # Errors
    /// [`OverMemory`] with both sizes.
    pub fn require_least_memory(&self, what: &str, needs: u64) -> Result<(), OverMemory> {
        let (allowed, limit) = self.ceiling();
        if self.has_memory(needs) {
            return Ok(());
        }
        // Rounded up, so that the printed value is accepted.
        let least = self.least_memory(needs);
        let fix = format!("--memory {}k is the least that is accepted", least.div_ceil(1000));
        Err(OverMemory { what: what.into(), needs: least, allowed, limit, fix: Some(fix) })
    }

    /// Refuses work that needs `more` memory than the process holds now. Returns the predicted peak.
    ///
    /// # Errors
    /// [`OverMemory`] with both sizes.
    pub fn require_more_memory(&self, what: &str, more: u64) -> Result<u64, OverMemory> {
        let (allowed, limit) = self.ceiling();
        let needs = held(limit).saturating_add(more);
        if needs > allowed {
            return Err(OverMemory { what: what.into(), needs, allowed, limit, fix: None });
        }
        Ok(held(Limit::Option).saturating_add(more))
    }

    /// Returns the bytes that the process may still allocate.
    pub fn memory_left(&self) -> u64 {
        let (allowed, limit) = self.ceiling();
        allowed.saturating_sub(held(limit))
    }

    /// Makes the error of work that needs `more` than the `left` bytes of [`memory_left`](Self::memory_left).
    pub fn over_memory(&self, what: &str, more: u64, left: u64) -> OverMemory {
        let (allowed, limit) = self.ceiling();
        let held = if limit == Limit::Option { allowed.saturating_sub(left) } else { 0 };
        OverMemory { what: what.into(), needs: more.saturating_add(held), allowed, limit, fix: None }
    }

    /// Runs `read`, which tokenizes texts; memory that stays allocated is added to later requirements. The kernel
    /// counts pages late, so a `read` without a text would add a random number of them: callers leave it out.
    ///
    /// # Errors
    /// Those of `read`; [`OverMemory`] if it runs out of memory.
    pub fn reading_texts<T>(&self, read: impl FnOnce() -> Result<T, JobError>) -> Result<T, JobError> {
        self.counting_texts(read).map_err(|error| match error {
            JobError::Tokens(error) => self.of_tokens(*error),
            error => error,
        })
    }

    /// Turns an error of tokenizing that ran out of memory into one of the ceiling.
    pub fn of_tokens(&self, error: TokenError) -> JobError {
        match error {
            TokenError::Memory { what, needs, allowed } => self.over_memory(&what, needs, allowed).into(),
            error => error.into(),
        }
    }

    /// Runs `read` as [`reading_texts`](Self::reading_texts) does, without a change of its errors.
    pub fn counting_texts<T>(&self, read: impl FnOnce() -> T) -> T {
        let before = anonymous().unwrap_or(0);
        let result = read();
        let left = anonymous().unwrap_or(0).saturating_sub(before);
        self.texts.fetch_add(left, Ordering::Relaxed);
        result
    }

    fn ceiling(&self) -> (u64, Limit) {
        match self.memory {
            Some(allowed) => (allowed, Limit::Option),
            None => (memory::available().unwrap_or(u64::MAX), Limit::Available),
        }
    }
}

/// Returns the bytes of a limit that the process already holds.
fn held(limit: Limit) -> u64 {
    match limit {
        Limit::Option => anonymous().unwrap_or(0).max(memory::PROCESS),
        Limit::Available => 0,
    }
}

/// Guard that keeps the message of [`Host::leaving`].
#[must_use]
pub struct Leaving<'a>(&'a dyn Progress);

impl Leaving<'_> {
    /// Replaces the message.
    pub fn change(&self, message: String) {
        self.0.keep_message(Some(message));
    }
}

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        self.0.keep_message(None);
    }
}
