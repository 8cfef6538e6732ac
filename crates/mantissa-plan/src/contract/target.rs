//! Serving engines, and the options that an engine runs with.

use std::fmt;

use mantissa_num::nearest_list;
use serde::Serialize;

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
