//! Last lines of `quantize`: the engines that load the result, and the next commands.

use std::io::{self, Write};
use std::path::Path;

use mantissa_advise::subject;
use mantissa_plan::contract::{Server, Target, loads_in};
use mantissa_quant::Plan;
use mantissa_store::convention::ModelFiles;
use serde::Serialize;

use crate::output::labelled;

/// Engines that load an output, and what to type next.
#[derive(Debug, Serialize)]
pub struct Ending {
    /// Engines by the rules of the serving contract.
    pub loads_in: Vec<&'static str>,
    /// Commands, the engine's first.
    pub next: Vec<String>,
}

impl Ending {
    /// Describes the output of `plan` at `out`, made for `targets`.
    pub fn new(plan: &Plan, source: &ModelFiles, out: &Path, targets: &[Target]) -> Self {
        let subject = subject::of_plan(plan, source);
        let path = quoted(out);
        let mut next: Vec<String> = targets.iter().map(|target| serve(target, &path)).collect();
        if next.is_empty() {
            let usual = if plan.container.facts().one_file { Server::LlamaCpp } else { Server::Mantissa };
            next.push(serve(&Target { server: usual, tp: 1, gpu: None }, &path));
        }
        next.push(format!("mantissa report {path}"));
        Ending { loads_in: loads_in(&subject), next }
    }

    /// Prints both.
    ///
    /// # Errors
    /// As `out`.
    pub fn human(&self, out: &mut dyn Write) -> io::Result<()> {
        labelled(out, "loads in", &self.loads_in.join(", "))?;
        self.next.iter().try_for_each(|command| writeln!(out, "next        {command}"))
    }
}

/// Returns the command that runs the model at `path`, quoted, in an engine.
pub fn serve(target: &Target, path: &str) -> String {
    let tp = |flag: &str| if target.tp > 1 { format!(" {flag} {}", target.tp) } else { String::new() };
    let prompt = "-p \"Once upon a time\"";
    match target.server {
        Server::Vllm => format!("vllm serve {path}{}", tp("--tensor-parallel-size")),
        Server::Sglang => format!("python -m sglang.launch_server --model-path {path}{}", tp("--tp")),
        Server::Lmdeploy => format!("lmdeploy serve api_server {path}{}", tp("--tp")),
        Server::TensorrtLlm => format!("trtllm-serve {path}{}", tp("--tp_size")),
        Server::Transformers => format!("transformers chat {path}"),
        Server::LlamaCpp => format!("llama-cli -m {path} {prompt}"),
        Server::Mlx => format!("mlx_lm.generate --model {path} --prompt \"Once upon a time\""),
        Server::Exllamav2 => format!("python test_inference.py -m {path} {prompt}"),
        Server::Mantissa => format!("mantissa run {path} {prompt}"),
    }
}

/// Returns a path, or another word of a command, quoted for a POSIX shell if it needs that.
pub fn quoted(path: &Path) -> String {
    let text = path.display().to_string();
    let plain = |c: char| c.is_alphanumeric() || "/._-+=@%:,".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        text
    } else {
        format!("'{}'", text.replace('\'', "'\\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_name_the_engine_and_split_as_asked() {
        let command = |text: &str| Target::parse(text).ok().map(|target| serve(&target, "out"));
        assert_eq!(command("vllm:tp=2").as_deref(), Some("vllm serve out --tensor-parallel-size 2"));
        assert_eq!(command("llama.cpp").as_deref(), Some("llama-cli -m out -p \"Once upon a time\""));
        assert_eq!(quoted(Path::new("a b")), "'a b'");
        assert_eq!(quoted(Path::new("dir/m-int4")), "dir/m-int4");
    }

    #[test]
    fn words_are_quoted_for_a_shell() {
        assert_eq!(quoted(Path::new("a/b-c.gguf")), "a/b-c.gguf");
        assert_eq!(quoted(Path::new("my model")), "'my model'");
        assert_eq!(quoted(Path::new("it's")), "'it'\\''s'");
    }
}
