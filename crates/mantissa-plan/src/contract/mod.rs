//! Serving contract: what each engine requires of a quantized model, and which requirements a model breaks.
//!
//! A [`Rule`] is data: the engines it applies to, the requirement, its source and the fix. [`lint`] evaluates
//! all rules of a [`Target`] on a [`Subject`], which describes a written or a planned model. Rules that
//! cannot be decided from the given information are listed in [`Report::unchecked`].

mod check;
mod loads;
mod rules;
mod schemes;
mod subject;

use std::fmt;

use mantissa_num::{CodecId, nearest_list};
use serde::Serialize;

pub use loads::{Cell, Evidence, LOADS, Load, READERS, Reader, cells, installs, loads_in};
pub use rules::rules;
pub use schemes::{Accepted, Inputs, Scales};
pub use subject::{Input, Kind, Linear, Observation, Observed, Shape, Split, Stored, Subject, split_of};

use crate::hardware::{GPUS, Gpu};

/// Serving engine.
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
    /// mlx-lm.
    Mlx,
    /// ExLlamaV2.
    Exllamav2,
    /// mantissa itself, which reads every format that it writes.
    Mantissa,
}

impl Server {
    /// Every engine with its command-line name.
    pub const NAMES: [(Server, &'static str); 9] = [
        (Server::Vllm, "vllm"),
        (Server::LlamaCpp, "llama.cpp"),
        (Server::Sglang, "sglang"),
        (Server::Lmdeploy, "lmdeploy"),
        (Server::Transformers, "transformers"),
        (Server::TensorrtLlm, "tensorrt-llm"),
        (Server::Mlx, "mlx"),
        (Server::Exllamav2, "exllamav2"),
        (Server::Mantissa, "mantissa"),
    ];

    /// Other names that people type.
    const TYPED: [(&'static str, Server); 10] = [
        ("llamacpp", Server::LlamaCpp),
        ("llama-cpp", Server::LlamaCpp),
        ("ollama", Server::LlamaCpp),
        ("hf", Server::Transformers),
        ("huggingface", Server::Transformers),
        ("trtllm", Server::TensorrtLlm),
        ("trt-llm", Server::TensorrtLlm),
        ("mlx-lm", Server::Mlx),
        ("exllama", Server::Exllamav2),
        ("turbomind", Server::Lmdeploy),
    ];

    /// Returns the engine of this name, in any case.
    pub fn named(name: &str) -> Option<Self> {
        let name = name.to_lowercase();
        let own = Self::NAMES.iter().find(|(_, own)| *own == name).map(|(server, _)| *server);
        own.or_else(|| Self::TYPED.iter().find(|(typed, _)| *typed == name).map(|(_, server)| *server))
    }

    /// Returns the command-line name.
    pub fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(server, _)| *server == self).map_or("", |(_, name)| name)
    }

    /// True if the engine splits layers over GPUs (tensor parallelism, `tp=N`).
    pub fn splits_tensors(self) -> bool {
        matches!(self, Server::Vllm | Server::Sglang | Server::Lmdeploy | Server::TensorrtLlm)
    }
}

/// Engine with its run options.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Target {
    /// Serving engine.
    pub server: Server,
    /// Tensor parallelism: number of GPUs that share each layer; 1 if not split.
    pub tp: usize,
    /// GPU, if given.
    pub gpu: Option<Gpu>,
}

/// Error of parsing a [`Target`].
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

/// Lists the names nearest to `got`, with the number of all: `vllm, mlx or sglang (of 9)`.
fn list<'a>(got: &str, names: impl Iterator<Item = &'a str> + Clone) -> String {
    format!("{} (of {})", nearest_list(got, names.clone()), names.count())
}

impl Target {
    /// Parses `SERVER[:tp=N][,gpu=NAME]`.
    ///
    /// # Errors
    /// [`TargetError`] names the part at fault and the accepted values.
    pub fn parse(text: &str) -> Result<Self, TargetError> {
        let fault =
            |field, found: &str, allowed: String| TargetError { field, found: found.to_owned(), allowed };
        let (name, options) = text.split_once(':').unwrap_or((text, ""));
        let names = || list(name, Server::NAMES.iter().map(|(_, known)| *known));
        let server = Server::named(name).ok_or_else(|| fault("engine", name, names()))?;
        let mut target = Target { server, tp: 1, gpu: None };
        for option in options.split(',').filter(|option| !option.is_empty()) {
            match option.split_once('=') {
                Some(("tp", n)) if server.splits_tensors() => {
                    let parsed = n.parse().ok().filter(|tp| (1..=MAX_TP).contains(tp));
                    target.tp = parsed.ok_or_else(|| fault("tp", n, format!("1 to {MAX_TP}")))?;
                }
                Some(("gpu", name)) => {
                    let names = || {
                        let known = list(name, GPUS.iter().map(|gpu| gpu.name));
                        format!("{known}, or a compute capability such as sm90")
                    };
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

/// Consequence of a broken rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Severity {
    /// Works, but on a slower path or with slightly different results.
    Warning,
    /// Loads, but computes wrong results.
    Wrong,
    /// Does not load.
    Refused,
}

impl Severity {
    /// True if the model must not be served this way.
    pub fn fails(self) -> bool {
        self > Severity::Warning
    }

    /// Returns the text for reports.
    pub fn text(self) -> &'static str {
        match self {
            Severity::Warning => "warning",
            Severity::Wrong => "wrong results",
            Severity::Refused => "does not load",
        }
    }
}

/// Property that a rule checks. Numbers are the engine's limits.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Check {
    /// The checkpoint format is one of these.
    Convention(&'static [&'static str]),
    /// All quantized weights are of these kinds.
    Kinds(&'static [Kind]),
    /// Activations of layers with weights of these kinds are quantized, or are not.
    Activations {
        /// Kinds of weights.
        kinds: &'static [Kind],
        /// True if activations must be quantized, false if they must not.
        quantized: bool,
    },
    /// Weights, scales and inputs of every layer are one of these combinations.
    Schemes(&'static [Accepted]),
    /// No weight is in one of these block types.
    NoCodecs(&'static [CodecId]),
    /// Weights of these kinds have no zero points.
    NoZeroPoints(&'static [Kind]),
    /// Integer weights have one of these bit widths.
    Bits {
        /// Widths allowed without zero points.
        symmetric: &'static [u32],
        /// Widths allowed with zero points.
        asymmetric: &'static [u32],
    },
    /// Integer weights have one of these group sizes.
    Groups {
        /// Group sizes.
        sizes: &'static [u32],
        /// True if one scale per output row is accepted.
        channel: bool,
        /// True if another kernel runs other sizes in f16.
        other_in_f16: bool,
    },
    /// `tp` divides the query heads, and divides or is a multiple of the key/value heads.
    Heads,
    /// `tp` divides the split dimension: rows of row-split layers, columns of column-split layers.
    Widths,
    /// Columns per GPU are whole groups.
    WholeGroups,
    /// Rows and columns per GPU are whole tiles; in fused unsplit layers the last layer may end within a
    /// tile.
    WholeTiles,
    /// With act-order, rows and columns per GPU are multiples of these.
    ActOrderTiles {
        /// Rows.
        rows: usize,
        /// Columns.
        cols: usize,
    },
    /// No layer uses act-order.
    NoActOrder,
    /// Weights of these kinds are in experts only.
    ExpertsOnly(&'static [Kind]),
    /// Layers that are not fused with another multiply their input per column (`pre_quant_scale`) if their weights
    /// are of these kinds.
    Multiplied(&'static [Kind]),
    /// Fused layers share one format.
    FusedAlike,
    /// Fused layers of this kind share one per-tensor scale.
    FusedScale(Kind),
    /// Fused layers share one stored input scale.
    FusedInputScale,
    /// The GPU has the compute capability that weights of these kinds need.
    Capability {
        /// Kinds of weights.
        kinds: &'static [Kind],
        /// Minimum compute capability times ten.
        least: u32,
        /// Compute capability times ten from which support ends.
        end: Option<u32>,
    },
    /// This package is installed. Always reported, because the files do not show it.
    Package(&'static str),
    /// The checkpoint was examined and this problem was not observed.
    Seen(Observed),
}

impl Check {
    /// True if the schemes, formats and shapes of the layers decide it, and not how one file was written.
    fn is_of_schemes(&self) -> bool {
        match self {
            Check::Seen(what) => *what == Observed::ZeroPointVersion,
            Check::Package(_) => false,
            _ => true,
        }
    }
}

/// Requirement of one or more engines.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rule {
    /// Identifier.
    pub id: &'static str,
    /// Engines it applies to.
    pub servers: &'static [Server],
    /// Checkpoint formats it applies to; all if empty.
    pub conventions: &'static [&'static str],
    /// Consequence of breaking it.
    pub severity: Severity,
    /// Requirement, as printed.
    pub requires: &'static str,
    /// Check that decides it.
    pub check: Check,
    /// Source of the requirement: project, file and commit, or a documentation page.
    pub source: &'static str,
    /// Fix, as printed.
    pub fix: &'static str,
}

/// Broken rule with its location.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Finding {
    /// Identifier of the rule.
    pub rule: &'static str,
    /// Consequence.
    pub severity: Severity,
    /// Tensor, layer or config field.
    pub tensor: String,
    /// Value found.
    pub found: String,
    /// Requirement of the engine.
    pub requires: &'static str,
    /// Fix: a command, or an edit.
    #[serde(rename = "cure")]
    pub fix: String,
    /// Source of the requirement.
    pub source: &'static str,
    /// True if another recipe, format or number of GPUs mends it.
    #[serde(skip)]
    pub by_recipe: bool,
}

/// Result of [`lint`].
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// Target, as `SERVER[:tp=N][,gpu=NAME]`.
    pub target: String,
    /// Number of rules evaluated.
    pub rules: usize,
    /// Broken rules, most severe first.
    pub findings: Vec<Finding>,
    /// Rules that could not be decided.
    pub unchecked: Vec<Unchecked>,
}

/// Rule that could not be decided; as JSON one text, `RULE: REASON; fix: FIX`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unchecked {
    /// Identifier of the rule.
    pub rule: &'static str,
    /// Reason.
    pub why: String,
    /// Command that decides it.
    pub fix: Option<String>,
}

impl fmt::Display for Unchecked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.rule, self.why)?;
        self.fix.iter().try_for_each(|fix| write!(f, "; fix: {fix}"))
    }
}

impl Serialize for Unchecked {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl Report {
    /// True if the engine would not load the model or would compute wrong results.
    pub fn fails(&self) -> bool {
        self.findings.iter().any(|finding| finding.severity.fails())
    }
}

/// Evaluates every rule that applies to `target` on `subject`.
pub fn lint(subject: &Subject, target: &Target) -> Report {
    let mut report =
        Report { target: target.to_string(), rules: 0, findings: Vec::new(), unchecked: Vec::new() };
    let bound = |rule: &&Rule| {
        rule.servers.contains(&target.server)
            && (rule.conventions.is_empty() || rule.conventions.contains(&subject.convention.as_str()))
    };
    for rule in rules().filter(bound) {
        if let Some((why, fix)) = check::undecidable(rule, subject, target) {
            report.unchecked.push(Unchecked { rule: rule.id, why, fix });
            continue;
        }
        report.rules += 1;
        let finding = |(tensor, found)| Finding {
            rule: rule.id,
            severity: rule.severity,
            tensor,
            found,
            requires: rule.requires,
            fix: rule.fix.to_owned(),
            source: rule.source,
            by_recipe: rule.check.is_of_schemes(),
        };
        report.findings.extend(check::violations(rule.check, subject, target).into_iter().map(finding));
    }
    report.unchecked.dedup();
    // Stable sort: findings of one rule keep layer order.
    report.findings.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
    report
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests;
