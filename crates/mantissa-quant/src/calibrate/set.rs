//! Token windows to calibrate on, and the limits of a calibration.

use std::ops::ControlFlow;

use mantissa_eval::Sequence;

use super::states::IN_MEMORY;
use crate::error::CalibrateError;
use crate::quality::TokenSet;

/// Token windows to calibrate on, each a sequence by itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CalibrationSet {
    /// Name that the user gave: a file and a key.
    pub name: String,
    /// Token ids.
    pub windows: Vec<Vec<u32>>,
    /// SHA-256 of the text that the windows were cut from, in hexadecimal, if it is part of the program.
    pub text_sha256: Option<String>,
}

impl CalibrationSet {
    /// Makes a set of `windows` from a text or token file called `name`.
    pub fn new(name: impl Into<String>, windows: Vec<Vec<u32>>) -> Self {
        CalibrationSet { name: name.into(), windows, text_sha256: None }
    }

    /// Returns the number of tokens of all windows.
    pub fn tokens(&self) -> usize {
        self.windows.iter().map(Vec::len).sum()
    }

    /// Returns name, hash and size.
    pub(crate) fn identity(&self) -> TokenSet {
        let sequence = |tokens: &Vec<u32>| Sequence { tokens: tokens.clone(), from: 1 };
        let set = TokenSet::new(&self.name, &self.windows.iter().map(sequence).collect::<Vec<_>>());
        TokenSet { text_sha256: self.text_sha256.clone(), ..set }
    }

    /// Returns the number of tokens of the longest window.
    pub fn longest(&self) -> usize {
        self.windows.iter().map(Vec::len).max().unwrap_or(0)
    }
}

/// Threads of a calibration and the memory for its states, which change no result, and the tokens that experts see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Number of threads.
    pub threads: usize,
    /// Bytes of states that are kept in memory; more states go to a temporary file.
    pub states: u64,
    /// True if experts see every token, not only those routed to them.
    pub all_experts: bool,
}

impl Limits {
    /// Lists smaller limits, in the order in which they are tried: states in a file, then half of the threads down to one.
    pub fn smaller(self) -> impl Iterator<Item = Limits> {
        let halves = std::iter::successors(Some(self.threads), |n| Some(n / 2)).take_while(|n| *n > 0);
        halves.map(move |threads| Limits { threads, states: 0, ..self })
    }

    /// Describes, for the user, what these limits give up of `full`.
    pub fn given_up(self, full: Limits) -> Vec<String> {
        let on_disk =
            (self.states < full.states).then(|| "calibration states in a temporary file".to_owned());
        let fewer =
            (self.threads < full.threads).then(|| format!("{} of {} threads", self.threads, full.threads));
        on_disk.into_iter().chain(fewer).collect()
    }
}

impl From<usize> for Limits {
    /// Keeps states in memory up to the default size.
    fn from(threads: usize) -> Self {
        Limits { threads, states: IN_MEMORY, all_experts: false }
    }
}

/// Called between steps of long work; `Break` interrupts the run.
pub type Tick<'a> = dyn FnMut() -> ControlFlow<()> + 'a;

/// Calls `tick`; returns [`CalibrateError::Interrupted`] on `Break`.
pub(crate) fn check_tick(tick: &mut Tick<'_>) -> Result<(), CalibrateError> {
    if tick().is_continue() { Ok(()) } else { Err(CalibrateError::Interrupted) }
}
