//! How people run each engine: the command, and the checkpoint formats that they keep models in.

use super::Server;

/// Prompt of the commands that take one.
const PROMPT: &str = "\"Once upon a time\"";

impl Server {
    /// Returns the shell command that runs the model at `path`, which is quoted, split over `tp` GPUs; `None` for an
    /// engine that is called from Python.
    pub fn command(self, path: &str, tp: usize) -> Option<String> {
        let split = |flag: &str| if tp > 1 { format!(" {flag} {tp}") } else { String::new() };
        Some(match self {
            Server::Vllm => format!("vllm serve {path}{}", split("--tensor-parallel-size")),
            Server::Sglang => format!("python -m sglang.launch_server --model-path {path}{}", split("--tp")),
            Server::Lmdeploy => format!("lmdeploy serve api_server {path}{}", split("--tp")),
            Server::TensorrtLlm => format!("trtllm-serve {path}{}", split("--tp_size")),
            Server::LlamaCpp => format!("llama-cli -m {path} -p {PROMPT}"),
            Server::Mlx => format!("mlx_lm.generate --model {path} --prompt {PROMPT}"),
            Server::Exllamav2 => format!("python test_inference.py -m {path} -p {PROMPT}"),
            Server::Mantissa => format!("mantissa run {path} -p {PROMPT}"),
            Server::Transformers => return None,
        })
    }

    /// True if users of the engine keep quantized models in `format`. Engines read other formats too, such as vLLM and
    /// transformers GGUF, but slowly or by way of dense weights.
    pub fn is_usual_reader(self, format: &str) -> bool {
        match format {
            "gguf" => matches!(self, Server::LlamaCpp | Server::Mantissa),
            "mlx" => self == Server::Mlx,
            "exl2" => self == Server::Exllamav2,
            "modelopt" => self == Server::TensorrtLlm,
            "native" => self == Server::Mantissa,
            "compressed-tensors" => !matches!(self, Server::LlamaCpp | Server::Mlx | Server::Exllamav2),
            _ => true,
        }
    }
}
