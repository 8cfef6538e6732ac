//! Flags and commands of other programs, with what stands for them here: a usage error names it.

/// Commands that write a model or a file at `--out`.
const WRITERS: &[&str] = &["quantize", "convert", "fit", "finetune", "distill", "cast", "imatrix", "pull"];

/// Commands that train on `--data`.
const TUNERS: &[&str] = &["finetune", "distill"];

/// Commands that calibrate.
const CALIBRATORS: &[&str] = &["quantize", "fit", "compare", "imatrix"];

/// Commands that generate text.
const GENERATORS: &[&str] = &["run", "serve"];

/// Flag of other programs: the commands where people type it (all if there are none), its names without hyphens, in
/// lowercase and with `-` for `_`, and what stands for it.
type Flag = (&'static [&'static str], &'static [&'static str], &'static str);

/// Every flag; the first row that fits a command counts. Flags that an advice names are those of all its commands.
const FLAGS: &[Flag] = &[
    // llm-compressor, AutoGPTQ, GPTQModel, ModelOpt, torchao, llama.cpp.
    (
        &["quantize"],
        &[
            "scheme",
            "method",
            "quant",
            "quantization",
            "quant-type",
            "quant-method",
            "qformat",
            "qtype",
            "ftype",
        ],
        "--recipe NAME, such as W4A16, fp8-dynamic or q4_k_m (mantissa recipes)",
    ),
    (&["quantize"], &["load-in-4bit"], "--recipe nf4"),
    (&["quantize"], &["load-in-8bit"], "--recipe w8a8"),
    (
        &["quantize"],
        &["q-bits", "wbits", "w-bit", "w-bits"],
        "--bits N with --for, or --recipe gptq-int4-g128",
    ),
    (
        &["quantize"],
        &["group-size", "groupsize", "q-group-size", "sym", "desc-act"],
        "a part of the recipe's name, as in --recipe gptq-int4-g128",
    ),
    (
        &["quantize"],
        &[
            "ignore",
            "exclude",
            "skip",
            "ignore-layers",
            "exclude-layers",
            "modules-to-not-convert",
            "tensor-type",
        ],
        "--keep PATTERN, which leaves those layers as they are",
    ),
    (
        CALIBRATORS,
        &[
            "dataset",
            "calib-dataset",
            "calibration-data",
            "calibration-dataset",
            "data",
            "calib",
            "calib-data",
        ],
        "--calibration TEXT",
    ),
    (
        CALIBRATORS,
        &["num-calibration-samples", "calib-size", "num-samples", "nsamples", "n-samples", "calib-samples"],
        "--samples N",
    ),
    (&["imatrix"], &["text", "f", "file", "text-file"], "--calibration TEXT"),
    (CALIBRATORS, &["max-seq-length", "max-seq-len", "seqlen", "seq-len", "max-length"], "--length N"),
    (&["quantize", "fit"], &["imatrix-file"], "--calibration TEXT, or the file of mantissa imatrix"),
    (&["fit"], &["bpw", "target-bpw", "target-bits", "size", "effective-bits"], "--budget 4.5bpw or 6GB"),
    (&["fit"], &["recipe", "recipes"], "--schemes and --method (mantissa fit --help)"),
    (&["fit"], &["dry-run"], "nothing: mantissa quantize MODEL --recipe NAME --dry-run previews one recipe"),
    (&["convert"], &["outtype", "to", "type", "output-format"], "--format NAME"),
    (
        &["convert"],
        &["recipe", "scheme", "quantize", "q", "qtype", "quantization"],
        "--requantize SCHEME, or mantissa quantize --recipe NAME",
    ),
    (
        WRITERS,
        &[
            "output",
            "output-dir",
            "outfile",
            "output-path",
            "save-dir",
            "save-path",
            "export-path",
            "export-dir",
            "out-dir",
            "save",
            "o",
            "local-dir",
            "mlx-path",
            "output-file",
        ],
        "--out PATH",
    ),
    // llama.cpp, Ollama, vLLM, transformers.
    (
        &["run", "serve"],
        &["ctx", "n-ctx", "num-ctx", "context-length", "context-size", "max-model-len", "max-seq-len"],
        "--context TOKENS",
    ),
    (
        &["eval", "compare", "plan", "quantize", "fit"],
        &[
            "ctx-size",
            "ctx",
            "n-ctx",
            "num-ctx",
            "context-length",
            "context-size",
            "max-model-len",
            "max-seq-len",
        ],
        "--context TOKENS",
    ),
    (GENERATORS, &["max-new-tokens", "max-length", "num-predict", "predict", "gen-length"], "--max-tokens N"),
    (
        &["plan"],
        &["gpu", "device", "gpu-name", "gpu-type", "accelerator"],
        "--hardware NAME (mantissa plan --hardware list)",
    ),
    (
        &[],
        &[
            "ngl",
            "n-gpu-layers",
            "gpu-layers",
            "device",
            "gpu",
            "cuda",
            "main-gpu",
            "mg",
            "tensor-split",
            "ts",
            "dev",
        ],
        "the processor: mantissa uses no GPU here (mantissa plan --hardware NAME predicts one)",
    ),
    (&["run"], &["cnv", "conversation", "chat-mode", "interactive-first", "instruct"], "--interactive"),
    (&["run"], &["system-prompt", "sys"], "--system TEXT"),
    (&["run"], &["f", "file", "prompt-file"], "-p - < FILE (or --prompt -)"),
    (&["run"], &["repeat-penalty"], "--repetition-penalty X"),
    (
        GENERATORS,
        &["model-draft", "md", "draft-model", "speculative-model", "assistant-model"],
        "--draft MODEL",
    ),
    (&["run", "eval", "bench", "serve"], &["lora", "lora-modules", "lora-adapter", "peft"], "--adapter DIR"),
    (
        &["run", "eval", "bench", "serve", "plan"],
        &["cache-type-k", "cache-type-v", "ctk", "ctv", "kv-cache-dtype", "kv-dtype"],
        "--kv SCHEME, such as int8-head or keys=int8-head,values=int4-head",
    ),
    (
        &["serve"],
        &[
            "temp",
            "temperature",
            "top-k",
            "top-p",
            "min-p",
            "repeat-penalty",
            "repetition-penalty",
            "presence-penalty",
            "frequency-penalty",
            "system",
            "system-prompt",
            "sys",
            "stop",
            "grammar",
        ],
        "a field of each request, such as \"temperature\" or a message of the role \"system\" (mantissa help reference/server)",
    ),
    (
        &["run", "serve", "bench", "eval"],
        &["fa", "flash-attn", "flash-attention"],
        "nothing: attention never stores its scores",
    ),
    (
        &["run", "serve", "bench", "eval"],
        &[
            "mlock",
            "no-mmap",
            "mmap",
            "numa",
            "b",
            "ub",
            "batch-size",
            "ubatch-size",
            "no-warmup",
            "tb",
            "threads-batch",
            "cb",
            "cont-batching",
        ],
        "nothing: mantissa decides it",
    ),
    (&["run"], &["jinja"], "--chat, which renders the model's template"),
    (&["serve"], &["n-predict"], "--max-tokens N"),
    (&["serve"], &["np", "n-parallel", "max-num-seqs"], "--parallel N"),
    (&["serve"], &["api-key"], "--api-key-file FILE"),
    (&["serve"], &["served-model-name"], "--alias NAME"),
    (&["serve"], &["gpu-memory-utilization"], "--memory SIZE"),
    (
        &["run", "serve", "eval"],
        &["quantization", "quant", "load-in-4bit", "load-in-8bit", "dtype", "torch-dtype"],
        "what the model's files say (mantissa quantize makes others)",
    ),
    // lm-eval, llama-perplexity, llama-bench.
    (&["eval"], &["tasks"], "--task NAME or FILE.jsonl, repeated"),
    (&["eval", "compare"], &["dataset", "data", "f", "file", "text-file"], "--text FILE"),
    (&["eval"], &["base", "baseline", "base-model", "kl-divergence-base", "teacher"], "--reference MODEL"),
    (&["compare"], &["task", "tasks"], "mantissa eval OUTPUT --reference MODEL --task NAME, for each output"),
    (&["compare"], &["recipes", "scheme", "schemes"], "--recipe NAME, repeated"),
    (&["compare"], &["kv"], "mantissa eval MODEL --kv SCHEME --reference MODEL --text TEXT, for each scheme"),
    (&["compare"], &["reference", "base"], "the first MODEL: compare MODEL OUTPUT OUTPUT"),
    (&["bench"], &["n-prompt", "pp", "p", "prompt-length"], "--prompt N"),
    (&["bench"], &["n-gen", "tg", "n", "output-len", "gen-length"], "--gen N"),
    (&["bench"], &["repetitions", "r", "num-iters"], "--reps N"),
    (
        &["plan"],
        &["vram", "gpu-memory"],
        "--hardware memory=24GB,bandwidth=1TB/s,bf16=150T for a device of your own",
    ),
    (&["plan"], &["num-gpus", "gpus", "tensor-parallel-size", "tp"], "--devices N"),
    (&["plan"], &["batch-size", "bs"], "--batch N"),
    (&["lint", "plan", "recipes"], &["engine", "backend", "target"], "--for ENGINE"),
    (&["fit"], &["backend", "target"], "--for ENGINE"),
    (&["quantize"], &["backend", "target"], "--for ENGINE"),
    (&["inspect", "verify", "doctor", "report"], &["for", "engine"], "mantissa lint MODEL --for ENGINE"),
    (
        &["inspect", "eval"],
        &["layers", "per-layer"],
        "mantissa quantize --layers, or mantissa report OUTPUT: the error of every layer of an output",
    ),
    (&["report"], &["html"], "--out FILE: the page is HTML"),
    (&["report"], &["card", "model-card", "markdown", "md"], "mantissa compare MODEL OUTPUT --markdown=FILE"),
    (&["pull"], &["token"], "the variable HF_TOKEN"),
    (&["pull"], &["quant"], "the name: mantissa pull org/name:Q4_K_M"),
    // torchtune, axolotl, peft, transformers.
    (&["train"], &["policy", "precision", "dtype"], "--set precision.policy=NAME"),
    (
        &["train", "finetune"],
        &["wandb", "report-to", "logger", "use-wandb", "logging-dir"],
        "--tensorboard DIR",
    ),
    (&["train"], &["config", "c", "config-file"], "the first argument: mantissa train run.toml"),
    (
        &["train"],
        &["out", "output", "output-dir", "o"],
        "a redirection: mantissa train --init SIZE --data FILE > run.toml; the folder of a run is --set run.out=DIR",
    ),
    (&["train"], &["lr", "learning-rate"], "--set optimizer.lr=X"),
    (&["finetune"], &["qlora", "use-qlora"], "--adapter qlora, the default"),
    (&["finetune"], &["lora", "dora", "full"], "--adapter lora, dora or none"),
    (
        &["distill"],
        &["recipe", "quantization", "quant"],
        "--scheme SCHEME, such as nvfp4 or int4-g32, after TEACHER and STUDENT",
    ),
    (TUNERS, &["load-in-4bit", "base-quant"], "--base-scheme nf4, the default"),
    (TUNERS, &["dataset", "train-file", "train-data", "dataset-name"], "--data FILE"),
    (TUNERS, &["lora-r", "r", "lora-rank"], "--rank N"),
    (TUNERS, &["lora-alpha"], "--alpha X"),
    (TUNERS, &["lora-dropout"], "--dropout X"),
    (TUNERS, &["learning-rate"], "--lr X"),
    (TUNERS, &["num-train-epochs", "num-epochs"], "--epochs N"),
    (TUNERS, &["max-steps", "iters"], "--steps N"),
    (TUNERS, &["batch-size", "per-device-train-batch-size", "micro-batch-size"], "--batch N"),
    (TUNERS, &["max-seq-length", "max-seq-len", "seq-len", "sequence-len", "max-length"], "--length N"),
    // Everywhere.
    (&[], &["num-threads", "nproc"], "--threads N"),
    (&[], &["f", "force", "y", "yes"], "--overwrite"),
    (&[], &["s"], "--seed N"),
    (
        &[],
        &["v", "verbose", "log-verbose", "debug"],
        "nothing: warnings and progress are shown (--quiet hides them)",
    ),
    (&[], &["silent", "no-progress", "log-disable"], "--quiet"),
    (&[], &["trust-remote-code"], "nothing: mantissa runs no code of a model"),
];

/// Commands of other programs, with what stands for them.
const COMMANDS: &[(&[&str], &str)] = &[
    (&["chat"], "mantissa run MODEL --interactive"),
    (&["generate", "complete", "completion"], "mantissa run MODEL -p TEXT"),
    (&["ps"], "GET /api/ps of mantissa serve (its models stay loaded; no other command keeps one in memory)"),
    (
        &["list", "ls", "models"],
        "no command: models lie in the Hugging Face cache (~/.cache/huggingface/hub, or HF_HUB_CACHE), where mantissa pull puts them",
    ),
    (&["rm", "remove", "delete"], "no command: delete the model's folder or file"),
    (&["download", "get", "fetch"], "mantissa pull org/name"),
    (&["show", "info"], "mantissa inspect MODEL"),
    (&["server", "api", "start"], "mantissa serve MODEL"),
    (&["perplexity", "ppl", "evaluate", "lm-eval", "lm_eval"], "mantissa eval MODEL"),
    (&["benchmark", "perf"], "mantissa bench MODEL"),
    (&["compress", "oneshot", "quant"], "mantissa quantize MODEL --recipe NAME --out PATH"),
    (&["export"], "mantissa convert MODEL --format FORMAT --out PATH"),
    (&["tune", "sft", "lora", "qlora"], "mantissa finetune MODEL --data FILE --out DIR"),
    (&["pretrain"], "mantissa train CONFIG.toml"),
    (&["create"], "mantissa quantize or mantissa convert"),
    (&["tasks"], "mantissa help reference/tasks"),
    (
        &["sensitivity", "sensitivities", "layer-sensitivity"],
        "mantissa fit MODEL --budget 4.5bpw --text TEXT --out DIR --layers: the KL of each unit alone",
    ),
    (&["card", "model-card", "modelcard"], "mantissa compare MODEL OUTPUT --markdown=README.md"),
];

/// Commands that take one model, with the option that a second word after it stands for.
const SECOND_WORDS: &[(&str, &str)] =
    &[("verify", "--reference"), ("lint", "--reference"), ("finetune", "--data"), ("eval", "--text")];

/// Returns the option that a second word after the model of `command` stands for.
pub fn option_of_word(command: &str) -> Option<&'static str> {
    SECOND_WORDS.iter().find(|(name, _)| *name == command).map(|(_, option)| *option)
}

/// Returns what stands for the flag `typed`, with its hyphens and perhaps a value, in `command`.
pub fn flag(command: &str, typed: &str) -> Option<&'static str> {
    let name = typed.split('=').next().unwrap_or(typed).trim_start_matches('-');
    let name = name.to_lowercase().replace('_', "-");
    let fits = |commands: &[&str]| commands.is_empty() || commands.contains(&command);
    let row = FLAGS.iter().find(|(commands, names, _)| fits(commands) && names.contains(&&*name));
    row.map(|(.., here)| *here)
}

/// Returns what stands for the command `typed`.
pub fn command(typed: &str) -> Option<&'static str> {
    let typed = typed.to_lowercase();
    COMMANDS.iter().find(|(names, _)| names.contains(&&*typed)).map(|(_, here)| *here)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests {
    use super::*;
    use crate::app;

    /// Words of a text that are flags.
    fn flags(text: &str) -> impl Iterator<Item = &str> {
        let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '-');
        words.filter_map(|word| word.strip_prefix("--")).filter(|word| !word.is_empty())
    }

    #[test]
    fn what_stands_for_a_flag_is_there_and_the_flag_is_not() {
        let mut program = app::command();
        program.build();
        let has = |command: &clap::Command, name: &str| {
            command.get_arguments().any(|arg| {
                arg.get_long() == Some(name)
                    || arg.get_all_aliases().unwrap_or_default().contains(&name)
                    || arg.get_short().is_some_and(|short| name == short.to_string())
            })
        };
        for (commands, names, here) in FLAGS {
            let all = program.get_subcommands().filter(|sub| commands.contains(&sub.get_name()));
            let found: Vec<_> = all.collect();
            assert_eq!(found.len(), commands.len(), "{commands:?}");
            // After the name of another command, flags are its own.
            let own = here.split("mantissa ").next().unwrap();
            for command in found {
                for flag in flags(own) {
                    assert!(has(command, flag), "{}: no --{flag}: {here}", command.get_name());
                }
                for name in *names {
                    let is_first = flag(command.get_name(), name) == Some(*here);
                    assert!(!is_first || !has(command, name), "{}: has {name}", command.get_name());
                }
            }
        }
    }

    #[test]
    fn what_stands_for_a_command_is_there_and_the_command_is_not() {
        let program = app::command();
        for (names, here) in COMMANDS {
            for name in *names {
                assert!(program.find_subcommand(name).is_none(), "{name}");
            }
            for named in here.split("mantissa ").skip(1) {
                let name = named.split(' ').next().unwrap();
                assert!(name == "help" || program.find_subcommand(name).is_some(), "{here}");
            }
        }
    }
}
