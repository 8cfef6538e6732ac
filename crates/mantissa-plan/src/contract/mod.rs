//! The serving contract: what each engine requires of a quantized model, and whether a model keeps to it.
//!
//! A [`Rule`] is data: whom it binds, what it asks, where that was read, what helps. [`lint`] evaluates all rules of a
//! [`Target`] on a [`Subject`], which describes an artifact, or one that is only planned. What cannot be decided from what is
//! given is said in [`Report::unchecked`], not passed over.

mod check;
mod rules;
mod subject;

use std::fmt;

use serde::Serialize;

pub use rules::rules;
pub use subject::{Input, Kind, Linear, Observation, Observed, Shape, Split, Stored, Subject, split_of};

use crate::hardware::{GPUS, Gpu};

/// An engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Server {
    /// vLLM on NVIDIA GPUs.
    Vllm,
    /// llama.cpp.
    #[serde(rename = "llama.cpp")]
    LlamaCpp,
    /// SGLang on NVIDIA GPUs.
    Sglang,
    /// LMDeploy's TurboMind engine.
    Lmdeploy,
    /// Hugging Face transformers.
    Transformers,
    /// TensorRT-LLM's PyTorch backend.
    TensorrtLlm,
    /// MLX's language models.
    Mlx,
    /// ExLlamaV2.
    Exllamav2,
}

impl Server {
    /// Every engine with its name on the command line.
    pub const NAMES: [(Server, &'static str); 8] = [
        (Server::Vllm, "vllm"),
        (Server::LlamaCpp, "llama.cpp"),
        (Server::Sglang, "sglang"),
        (Server::Lmdeploy, "lmdeploy"),
        (Server::Transformers, "transformers"),
        (Server::TensorrtLlm, "tensorrt-llm"),
        (Server::Mlx, "mlx"),
        (Server::Exllamav2, "exllamav2"),
    ];

    /// Name on the command line.
    pub fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(server, _)| *server == self).map_or("", |(_, name)| name)
    }

    /// Whether it splits layers between GPUs by rows and columns, as `tp=` says.
    pub fn splits_tensors(self) -> bool {
        matches!(self, Server::Vllm | Server::Sglang | Server::Lmdeploy | Server::TensorrtLlm)
    }
}

/// An engine and how it is to run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Target {
    /// The engine.
    pub server: Server,
    /// Tensor parallelism: GPUs that share each layer; 1 without.
    pub tp: usize,
    /// The GPU, where it is given.
    pub gpu: Option<Gpu>,
}

/// A target that cannot be parsed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: found \"{found}\", allowed {allowed}")]
pub struct TargetError {
    /// The part at fault.
    pub field: &'static str,
    /// What it is.
    pub found: String,
    /// What it may be.
    pub allowed: String,
}

/// Largest tensor parallelism taken.
const MAX_TP: usize = 1024;

impl Target {
    /// Parses `SERVER[:tp=N][,gpu=NAME]`.
    ///
    /// # Errors
    /// [`TargetError`] names the part at fault and what may stand there.
    pub fn parse(text: &str) -> Result<Self, TargetError> {
        let fault =
            |field, found: &str, allowed: String| TargetError { field, found: found.to_owned(), allowed };
        let (name, options) = text.split_once(':').unwrap_or((text, ""));
        let server = Server::NAMES.iter().find(|(_, known)| *known == name).map(|(server, _)| *server);
        let server = server.ok_or_else(|| fault("server", name, Server::NAMES.map(|(_, n)| n).join(", ")))?;
        let mut target = Target { server, tp: 1, gpu: None };
        for option in options.split(',').filter(|option| !option.is_empty()) {
            match option.split_once('=') {
                Some(("tp", n)) if server.splits_tensors() => {
                    let parsed = n.parse().ok().filter(|tp| (1..=MAX_TP).contains(tp));
                    target.tp = parsed.ok_or_else(|| fault("tp", n, format!("1 to {MAX_TP}")))?;
                }
                Some(("gpu", name)) => {
                    let names =
                        || format!("{} or a capability such as sm90", GPUS.map(|g| g.name).join(", "));
                    target.gpu = Some(Gpu::parse(name).ok_or_else(|| fault("gpu", name, names()))?);
                }
                _ => {
                    let allowed = if server.splits_tensors() { "tp=N, gpu=NAME" } else { "gpu=NAME" };
                    return Err(fault("option", option, allowed.to_owned()));
                }
            }
        }
        Ok(target)
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.server.name())?;
        let tp = (self.tp > 1).then(|| format!("tp={}", self.tp));
        let gpu = self.gpu.map(|gpu| format!("gpu={}", gpu.name));
        let options: Vec<_> = [tp, gpu].into_iter().flatten().collect();
        if options.is_empty() { Ok(()) } else { write!(f, ":{}", options.join(",")) }
    }
}

/// What breaking a rule leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Severity {
    /// It works, by a slower way or with other figures than expected.
    Warning,
    /// It loads and computes something else.
    Wrong,
    /// It does not load.
    Refused,
}

impl Severity {
    /// Whether the model must not be served so.
    pub fn fails(self) -> bool {
        self > Severity::Warning
    }

    /// For people.
    pub fn text(self) -> &'static str {
        match self {
            Severity::Warning => "warning",
            Severity::Wrong => "wrong results",
            Severity::Refused => "does not load",
        }
    }
}

/// What a rule looks at. Numbers are the engine's.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Check {
    /// The convention of the artifact is one of these.
    Convention(&'static [&'static str]),
    /// Quantized weights are of these kinds.
    Kinds(&'static [Kind]),
    /// Integers have one of these widths: without and with zero points.
    Bits {
        /// Of symmetric integers.
        symmetric: &'static [u32],
        /// Of integers with zero points.
        asymmetric: &'static [u32],
    },
    /// Groups of integers have one of these sizes.
    Groups {
        /// Sizes.
        sizes: &'static [u32],
        /// Whether one scale per output row is allowed.
        channel: bool,
        /// Whether another size is run in f16 by another kernel.
        other_in_f16: bool,
    },
    /// Attention heads can be dealt out to the GPUs.
    Heads,
    /// Rows (of layers split by rows) and columns (of layers split by columns) can be dealt out.
    Widths,
    /// The columns of a partition are whole groups.
    WholeGroups,
    /// Rows and columns of a partition are whole tiles; of fused layers that are not split, those of all but the last.
    WholeTiles,
    /// With act-order, the rows and columns of a partition are multiples of these.
    ActOrderTiles {
        /// Rows.
        rows: usize,
        /// Columns.
        cols: usize,
    },
    /// No act-order.
    NoActOrder,
    /// Fused layers are stored alike.
    FusedAlike,
    /// Fused layers of this kind have one scale for the whole tensor.
    FusedScale(Kind),
    /// The same for the stored scale of their inputs.
    FusedInputScale,
    /// Weights of these kinds need this compute capability.
    Capability {
        /// Kinds.
        kinds: &'static [Kind],
        /// Least capability, times ten.
        least: u32,
        /// Capability at which support ends, times ten.
        end: Option<u32>,
    },
    /// Something that was seen in the artifact.
    Seen(Observed),
}

/// A requirement of engines.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rule {
    /// Its name.
    pub id: &'static str,
    /// Whom it binds.
    pub servers: &'static [Server],
    /// The conventions it is about; all where empty.
    pub conventions: &'static [&'static str],
    /// What breaking it leads to.
    pub severity: Severity,
    /// What it asks.
    pub requires: &'static str,
    /// How that is checked.
    pub check: Check,
    /// Where it was read: project, file, commit; or documentation.
    pub source: &'static str,
    /// What helps.
    pub cure: &'static str,
}

/// A rule that is broken, and where.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Finding {
    /// The rule.
    pub rule: &'static str,
    /// What it leads to.
    pub severity: Severity,
    /// The tensor, the layer, or the field.
    pub tensor: String,
    /// What was found.
    pub found: String,
    /// What the engine requires.
    pub requires: &'static str,
    /// What helps.
    pub cure: &'static str,
    /// Where the requirement was read.
    pub source: &'static str,
}

/// What a subject's examination showed.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// The engine and how it runs.
    pub target: String,
    /// Rules that were evaluated.
    pub rules: usize,
    /// Those that are broken, the gravest first.
    pub findings: Vec<Finding>,
    /// What could not be decided, and why.
    pub unchecked: Vec<String>,
}

impl Report {
    /// Whether the engine would refuse the model or compute something else with it.
    pub fn fails(&self) -> bool {
        self.findings.iter().any(|finding| finding.severity.fails())
    }
}

/// Evaluates every rule that binds `target` on `subject`.
pub fn lint(subject: &Subject, target: &Target) -> Report {
    let mut report =
        Report { target: target.to_string(), rules: 0, findings: Vec::new(), unchecked: Vec::new() };
    let bound = |rule: &&Rule| {
        rule.servers.contains(&target.server)
            && (rule.conventions.is_empty() || rule.conventions.contains(&subject.convention.as_str()))
    };
    for rule in rules().filter(bound) {
        if let Some(why) = check::undecidable(rule, subject, target) {
            report.unchecked.push(format!("{}: {why}", rule.id));
            continue;
        }
        report.rules += 1;
        let finding = |(tensor, found)| Finding {
            rule: rule.id,
            severity: rule.severity,
            tensor,
            found,
            requires: rule.requires,
            cure: rule.cure,
            source: rule.source,
        };
        report.findings.extend(check::violations(rule.check, subject, target).into_iter().map(finding));
    }
    report.unchecked.dedup();
    // Stable: findings of a rule keep the order of the layers.
    report.findings.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
    report
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests;
