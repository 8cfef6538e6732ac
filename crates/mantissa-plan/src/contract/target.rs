//! An engine with the options that it runs with.

use std::fmt;

use mantissa_num::listed;

use super::engine::Engine;
use super::engines::ENGINES;
use crate::hardware::{GPUS, Gpu};

/// Engine with its run options.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EngineTarget {
    /// Serving engine.
    pub engine: &'static Engine,
    /// Tensor parallelism: number of GPUs that share each layer; 1 if not split.
    pub tp: usize,
    /// GPU, if given.
    pub gpu: Option<Gpu>,
}

/// Error of parsing a [`EngineTarget`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: expected {allowed}, got \"{found}\"")]
pub struct TargetError {
    /// Part of the target.
    pub field: &'static str,
    /// Value given.
    pub found: String,
    /// Accepted values.
    pub allowed: String,
}

/// Maximum tensor parallelism.
const MAX_TP: usize = 1024;

impl EngineTarget {
    /// Parses `SERVER[:tp=N][,gpu=NAME]`.
    ///
    /// # Errors
    /// [`TargetError`] names the part at fault and the accepted values.
    pub fn parse(text: &str) -> Result<Self, TargetError> {
        let fault =
            |field, found: &str, allowed: String| TargetError { field, found: found.to_owned(), allowed };
        let (name, options) = text.split_once(':').unwrap_or((text, ""));
        if let Some((engine, options)) = without_colon(name) {
            let allowed = format!("a colon before the options: {engine}:{options}");
            return Err(fault("engine", text, allowed));
        }
        let names = || listed(name, ENGINES.iter().map(|engine| engine.name), "mantissa help engines");
        let engine = Engine::named(name).ok_or_else(|| fault("engine", name, names()))?;
        let mut target = EngineTarget { engine, tp: 1, gpu: None };
        for option in options.split(',').filter(|option| !option.is_empty()) {
            match option.split_once('=') {
                Some(("tp", n)) if engine.splits_tensors() => {
                    let parsed = n.parse().ok().filter(|tp| (1..=MAX_TP).contains(tp));
                    target.tp = parsed.ok_or_else(|| fault("tp", n, format!("1 to {MAX_TP}")))?;
                }
                Some(("gpu", name)) => {
                    let names = || {
                        let known = listed(name, GPUS.iter().map(|gpu| gpu.name), "mantissa help gpus");
                        format!("{known}, or a compute capability such as sm90")
                    };
                    target.gpu = Some(Gpu::parse(name).ok_or_else(|| fault("gpu", name, names()))?);
                }
                _ => {
                    let allowed = if engine.splits_tensors() { "tp=N, gpu=NAME" } else { "gpu=NAME" };
                    return Err(fault("option", option, allowed.to_owned()));
                }
            }
        }
        Ok(target)
    }
}

/// Splits an engine's name from options that follow it after something else than a colon.
fn without_colon(text: &str) -> Option<(&'static str, &str)> {
    let at = text.find([',', ' ', '=', ';', '@'])?;
    let options = text[at..].trim_start_matches([',', ' ', '=', ';', '@']);
    Engine::named(&text[..at]).filter(|_| options.contains('=')).map(|engine| (engine.name, options))
}

impl fmt::Display for EngineTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.engine.name)?;
        let tp = (self.tp > 1).then(|| format!("tp={}", self.tp));
        let gpu = self.gpu.map(|gpu| format!("gpu={}", gpu.name));
        let options: Vec<_> = [tp, gpu].into_iter().flatten().collect();
        if options.is_empty() { Ok(()) } else { write!(f, ":{}", options.join(",")) }
    }
}
