//! Last lines of `quantize`: the engines that load the result, and the next commands.

use std::ffi::OsStr;
use std::io::{self, Write};
use std::path::Path;

use mantissa_advise::subject;
use mantissa_jobs::chat;
pub use mantissa_jobs::escape::quoted;
use mantissa_jobs::memory;
use mantissa_plan::contract::{Engine, EngineTarget, installs, loads_in};
use mantissa_quant::Plan;
use mantissa_store::convention::{ModelFiles, gguf};
use mantissa_store::disk;
use serde::Serialize;

use super::model::ModelPath;
use crate::output::labelled;

/// Engines that load an output, and what to type next.
#[derive(Debug, Serialize)]
pub struct NextSteps {
    /// Engines by the rules of the serving contract.
    pub loads_in: Vec<&'static str>,
    /// Commands, the engine's first.
    pub next: Vec<String>,
}

impl NextSteps {
    /// Describes the output of `plan` at `out`, made from `model`, whose files are `source`, for `targets`.
    pub fn new(
        plan: &Plan,
        model: &ModelPath,
        source: &ModelFiles,
        out: &Path,
        targets: &[EngineTarget],
    ) -> Self {
        let subject = subject::of_plan(plan, source);
        let loads = loads_in(&subject);
        let command = |target: &EngineTarget| serve(target, &subject.convention, out);
        let mut next: Vec<String> = targets.iter().map(command).collect();
        if next.is_empty() {
            let usual = if plan.container.is_one_file() { Engine::LLAMA_CPP } else { Engine::MANTISSA };
            next.push(command(&EngineTarget { engine: usual, tp: 1, gpu: None }));
        }
        if plan.container.is_one_file() && loads.contains(&Engine::LLAMA_CPP.title) {
            next.extend(ollama(out));
        }
        let own = command(&EngineTarget { engine: Engine::MANTISSA, tp: 1, gpu: None });
        if !next.contains(&own) {
            next.push(own);
        }
        next.push(format!("mantissa report {}{}", quoted(out), reference(model, source)));
        NextSteps { loads_in: loads, next }
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

/// Returns the option of `report` that names the source, for the same prompt by both models; empty if `report` finds the
/// source itself, or if memory hardly holds it.
fn reference(model: &ModelPath, source: &ModelFiles) -> String {
    let fits = memory::available().is_none_or(|bytes| source.checkpoint().total_bytes() < bytes / 2);
    if model.is_embedded() || !fits {
        return String::new();
    }
    format!(" --reference {}", quoted(model.named()))
}

/// Returns the command that runs the model at `out`, in the format `convention`, in an engine. A command that installs
/// what the engine needs for the format comes before it.
pub fn serve(target: &EngineTarget, convention: &str, out: &Path) -> String {
    let command = target.engine.command(&quoted(out), target.tp, chat::has_template(out));
    let command = command.unwrap_or_else(|| transformers(convention, out));
    installs(target.engine, convention).map(|install| format!("{install} && ")).collect::<String>() + &command
}

/// Returns the commands that give Ollama the GGUF file at `out`, under its name in small letters.
fn ollama(out: &Path) -> [String; 2] {
    let stem = out.file_stem().unwrap_or_default().to_string_lossy().to_lowercase();
    let kept = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    let name: String = stem.chars().map(|c| if kept(c) { c } else { '-' }).collect();
    let from = if out.is_absolute() { out.to_owned() } else { Path::new(".").join(out) };
    let line = quoted(Path::new(&format!("FROM {}", from.display())));
    [format!("echo {line} > Modelfile"), format!("ollama create {name} -f Modelfile")]
}

/// Returns the command that loads a model in transformers and leaves it in an interactive Python: a folder, or a GGUF
/// file, which is named apart from its folder.
fn transformers(convention: &str, out: &Path) -> String {
    let arguments = match out.file_name() {
        Some(file) if convention == gguf::CONTAINER.name() => {
            let folder = disk::folder_of(out);
            format!("{}, gguf_file={}", python(folder.as_os_str()), python(file))
        }
        _ => python(out.as_os_str()),
    };
    let code = "from transformers import AutoModelForCausalLM; model = AutoModelForCausalLM.from_pretrained";
    format!("python -i -c {}", quoted(Path::new(&format!("{code}({arguments})"))))
}

/// Returns a string literal of Python.
fn python(text: &OsStr) -> String {
    let escaped = text.to_string_lossy().replace('\\', "\\\\").replace('"', "\\\"");
    format!("\"{escaped}\"")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_name_the_engine_and_split_as_asked() {
        let serve = |text: &str, format: &str, path: &str| {
            EngineTarget::parse(text).ok().map(|target| serve(&target, format, Path::new(path)))
        };
        let command = |text: &str| serve(text, "compressed-tensors", "out");
        assert_eq!(command("mantissa").as_deref(), Some("mantissa run out -p \"Once upon a time\""));
        assert_eq!(command("vllm:tp=2").as_deref(), Some("vllm serve out --tensor-parallel-size 2"));
        assert_eq!(command("llama.cpp").as_deref(), Some("llama-cli -m out -p \"Once upon a time\""));
        assert_eq!(
            serve("vllm", "gguf", "m.gguf").as_deref(),
            Some("pip install 'vllm[extra-quant]' && vllm serve m.gguf")
        );
        let python = |format: &str, path: &str| {
            let command = serve("transformers", format, path).unwrap_or_default();
            command.split_once("from_pretrained").map(|(_, call)| call.to_owned())
        };
        assert_eq!(python("compressed-tensors", "a/out").as_deref(), Some("(\"a/out\")'"));
        assert_eq!(python("gguf", "a/m.gguf").as_deref(), Some("(\"a\", gguf_file=\"m.gguf\")'"));
        assert_eq!(
            python("gguf", "it's \"m\".gguf").as_deref(),
            Some(r#"(".", gguf_file="it'\''s \"m\".gguf")'"#)
        );
        assert_eq!(quoted(Path::new("a b")), "'a b'");
        assert_eq!(quoted(Path::new("dir/m-int4")), "dir/m-int4");
    }

    #[test]
    fn ollama_gets_the_file_by_a_modelfile() {
        let made = ["echo 'FROM ./a/My-Q4_K_M.gguf' > Modelfile", "ollama create my-q4_k_m -f Modelfile"];
        assert_eq!(ollama(Path::new("a/My-Q4_K_M.gguf")), made);
        assert_eq!(ollama(Path::new("/m/x y.gguf"))[0], "echo 'FROM /m/x y.gguf' > Modelfile");
    }

    #[test]
    fn words_are_quoted_for_a_shell() {
        assert_eq!(quoted(Path::new("a/b-c.gguf")), "a/b-c.gguf");
        assert_eq!(quoted(Path::new("my model")), "'my model'");
        assert_eq!(quoted(Path::new("it's")), "'it'\\''s'");
    }
}
