//! Programs that load a model: the one source of every "loads in" cell.
//!
//! An engine loads a model unless it breaks a rule of that engine. Packages without rules are listed with the load test
//! that shows it.

use super::{Server, Subject, Target, lint};

/// Package without rules that loads a checkpoint format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reader {
    /// Checkpoint format.
    pub convention: &'static str,
    /// Name of the package.
    pub name: &'static str,
    /// Evidence: script and version.
    pub source: &'static str,
}

/// Packages without rules that load a format, with the test that shows it.
pub const READERS: [Reader; 4] = [
    Reader {
        convention: "gptq",
        name: "GPTQModel",
        source: "tests/interop/integer_logits.py, gptqmodel 7.7.0",
    },
    Reader {
        convention: "awq",
        name: "GPTQModel",
        source: "tests/interop/integer_logits.py, gptqmodel 7.7.0",
    },
    Reader {
        convention: "exl3",
        name: "ExLlamaV3",
        source: "tests/interop/exl3_weights.py: a second implementation of exllamav3's kernels",
    },
    Reader {
        convention: "onnx",
        name: "ONNX Runtime (weights only)",
        source: "tests/interop/onnx_weights.py",
    },
];

impl Server {
    /// Name in tables.
    pub fn title(self) -> &'static str {
        match self {
            Server::Vllm => "vLLM",
            Server::LlamaCpp => "llama.cpp",
            Server::Sglang => "SGLang",
            Server::Lmdeploy => "LMDeploy",
            Server::Transformers => "transformers",
            Server::TensorrtLlm => "TensorRT-LLM",
            Server::Mlx => "mlx-lm",
            Server::Exllamav2 => "ExLlamaV2",
            Server::Mantissa => "mantissa",
        }
    }
}

/// Names the programs that load `subject` on one GPU that has what its formats need: engines whose rules it keeps, packages of
/// [`READERS`], and mantissa.
pub fn loads_in(subject: &Subject) -> Vec<&'static str> {
    let keeps = |server: Server| !lint(subject, &Target { server, tp: 1, gpu: None }).fails();
    let engines = Server::NAMES.into_iter().map(|(server, _)| server);
    let others = engines.filter(|server| *server != Server::Mantissa && keeps(*server));
    let readers = READERS.iter().filter(|reader| reader.convention == subject.convention);
    let own = Server::Mantissa.title();
    others.map(Server::title).chain(readers.map(|reader| reader.name)).chain([own]).collect()
}
