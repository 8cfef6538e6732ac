//! Memory limits: work is refused with a message before it starts, and running out of memory is an ordinary
//! error.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use tempfile::TempDir;

use crate::support::{command, fail, json, root, sampled, stderr, succeed, text, whole};

fn synth(dir: &Path, name: &str, sizes: &[&str]) -> PathBuf {
    let out = dir.join(name);
    succeed(&[&["synth", "--out", text(&out), "--preset", "tiny"], sizes].concat());
    out
}

#[test]
fn a_ceiling_below_the_prediction_refuses_the_work() {
    let temp = TempDir::new().unwrap();
    let model = synth(temp.path(), "m", &["--hidden", "512", "--ffn", "2048", "--heads", "8"]);
    let out = temp.path().join("out");
    let quantize = ["quantize", text(&model), "--recipe", "rtn-int4-g128", "--out", text(&out)];
    let plan = json(&[&quantize[..], &["--dry-run", "--json"]].concat());
    let (peak, stage) =
        (plan["predicted_peak_memory"].as_u64().unwrap(), plan["peak_stage"].as_str().unwrap());
    let sum: u64 = plan["peak_buffers"].as_object().unwrap().values().map(|b| b.as_u64().unwrap()).sum();
    assert!(peak == sum && peak > 2_000_000 && !stage.is_empty(), "{plan}");
    let line = fail(3, &[&quantize[..], &["--memory", "2M"]].concat());
    assert!(line.contains("at most 2.00 MB of memory (--memory)"), "{line}");
    assert!(!out.exists());
    let least = plan["least_memory"].as_u64().unwrap();
    fail(3, &[&quantize[..], &["--memory", &(least - 1).to_string()]].concat());
    succeed(&[&quantize[..], &["--memory", &least.to_string()]].concat());
}

/// Below the peak of the default settings, states go to a file and threads are given up; the output stays the same.
#[test]
fn a_ceiling_is_met_by_other_means_before_the_work_is_refused() {
    let temp = TempDir::new().unwrap();
    let sizes = ["--hidden", "256", "--ffn", "512", "--heads", "4", "--layers", "2", "--vocab", "512"];
    let model = synth(temp.path(), "m", &[&sizes[..], &["--context", "512"]].concat());
    let tokens = temp.path().join("tokens.json");
    let window = |w: usize| (0..400).map(|i| (w * 31 + i * i) % 500).collect::<Vec<_>>();
    std::fs::write(&tokens, serde_json::json!((0..24).map(window).collect::<Vec<_>>()).to_string()).unwrap();
    let run = |out: &str, more: &[&str]| {
        let out = temp.path().join(out);
        let arguments = ["quantize", text(&model), "--recipe", "gptq-int4-g128", "--threads", "4"];
        let paths = ["--calibration-tokens", text(&tokens), "--out", text(&out)];
        measured(&[&arguments[..], &paths, more].concat())
    };
    let preview = |more: &[&str]| {
        let out = temp.path().join("preview");
        let arguments =
            ["quantize", text(&model), "--recipe", "gptq-int4-g128", "--threads", "4", "--dry-run"];
        let paths = ["--calibration-tokens", text(&tokens), "--out", text(&out), "--json"];
        json(&[&arguments[..], &paths, more].concat())
    };
    let default = preview(&[]);
    let (peak, least) =
        (default["predicted_peak_memory"].as_u64().unwrap(), default["least_memory"].as_u64().unwrap());
    assert!(least < peak, "{least} {peak}");
    let (output, _) = run("default", &[]);
    assert!(output.status.success() && !stderr(&output).contains("memory:"), "{}", stderr(&output));
    let bytes = |name: &str, file: &str| std::fs::read(temp.path().join(name).join(file)).unwrap();
    // One byte less than the default needs: states go to a file first.
    for (name, memory, words) in [
        ("spilled", peak, "memory: calibration states in a temporary file"),
        ("least", least, "memory: calibration states in a temporary file, 1 of 4 threads"),
    ] {
        let (output, measured) = run(name, &["--memory", &memory.to_string()]);
        let said = stderr(&output);
        assert!(output.status.success() && said.contains(words), "{name}: {said}");
        assert!(measured.is_none_or(|peak| peak <= memory), "{name}: {measured:?} of {memory}");
        for file in ["model.safetensors", "quality.json", "mantissa-manifest.json", "config.json"] {
            assert!(bytes(name, file) == bytes("default", file), "{name}: {file} differs");
        }
    }
    // What even then does not fit is refused, with a value that is accepted.
    let (output, _) = run("refused", &["--memory", &(least - (2 << 20)).to_string()]);
    let said = stderr(&output);
    assert!(output.status.code() == Some(3) && said.contains("is the least that is accepted"), "{said}");
    let given =
        said.split("fix: --memory ").nth(1).and_then(|rest| rest.split(' ').next()).unwrap().to_owned();
    assert!(run("accepted", &["--memory", &given]).0.status.success(), "{given}");
}

/// Other commands give up threads too; their results stay the same.
#[test]
fn imatrix_and_eval_give_up_threads_before_they_refuse() {
    let temp = TempDir::new().unwrap();
    let sizes = ["--hidden", "256", "--ffn", "512", "--heads", "4", "--layers", "2", "--vocab", "4096"];
    let model = synth(temp.path(), "m", &[&sizes[..], &["--context", "512"]].concat());
    let tokens = temp.path().join("tokens.json");
    let window = |w: usize| (0..400).map(|i| (w * 31 + i * i) % 500).collect::<Vec<_>>();
    std::fs::write(&tokens, serde_json::json!((0..8).map(window).collect::<Vec<_>>()).to_string()).unwrap();
    let run = |arguments: &[&str], memory: &str| {
        let (output, measured) = measured(&[arguments, &["--threads", "8", "--memory", memory]].concat());
        (output.status.code(), stderr(&output), measured)
    };
    // The least that is accepted works on one thread.
    let (out, full) = (temp.path().join("least.gguf"), temp.path().join("full.gguf"));
    let calibrated = ["imatrix", text(&model), "--calibration-tokens", text(&tokens), "--out"];
    let (code, said, ..) = run(&[&calibrated[..], &[text(&out)]].concat(), "6M");
    assert_eq!(code, Some(3), "{said}");
    let least =
        said.split("fix: --memory ").nth(1).and_then(|rest| rest.split(' ').next()).unwrap().to_owned();
    let (code, said, measured) = run(&[&calibrated[..], &[text(&out)]].concat(), &least);
    assert!(code == Some(0) && said.contains("1 of 8 threads"), "{said}");
    let kilobytes: u64 = least.trim_end_matches('k').parse().unwrap();
    assert!(measured.is_none_or(|peak| peak <= 1000 * kilobytes), "{measured:?} of {least}");
    succeed(&[&calibrated[..], &[text(&full)]].concat());
    assert!(std::fs::read(&out).unwrap() == std::fs::read(&full).unwrap());
    // Two percent below the need of all threads.
    let report = format!("--json={}", text(&temp.path().join("eval.json")));
    let evaluated = ["eval", text(&model), "--tokens", text(&tokens), "--overwrite", &report];
    let nll = || {
        let found = std::fs::read(temp.path().join("eval.json")).unwrap();
        serde_json::from_slice::<serde_json::Value>(&found).unwrap()["nll"].clone()
    };
    let (code, said, ..) = run(&evaluated, "6M");
    let need = said.split("need of ").nth(1).and_then(|rest| rest.split(' ').next()).unwrap();
    let need: f64 = need.parse().unwrap();
    assert!(code == Some(3) && said.contains(" MB"), "{said}");
    let (code, said, _) = run(&evaluated, &format!("{}k", (980.0 * need) as u64));
    assert!(code == Some(0) && said.contains("4 of 8 threads"), "{said}");
    let of_four = nll();
    run(&evaluated, "1G");
    assert_eq!(of_four, nll());
}

#[test]
fn a_context_that_no_memory_holds_is_refused_before_it_is_planned() {
    let temp = TempDir::new().unwrap();
    let Some(tokenizer) = tokenizer() else { return };
    let model = synth(temp.path(), "m", &["--vocab", "512", "--context", "1000000000"]);
    std::fs::copy(tokenizer.join("tokenizer.json"), model.join("tokenizer.json")).unwrap();
    let line = fail(3, &["run", text(&model), "-p", "Once", "-n", "999999000"]);
    assert!(line.contains("got a need of") && line.contains("available"), "{line}");
    // 10^9 tokens of 2 layers with keys and values of 2 heads of 16 in f32: 512 GB.
    assert!(line.contains("TB") || line.contains(" GB"), "{line}");
    let line = fail(3, &["run", text(&model), "-p", "Once", "-n", "1000", "--memory", "100k"]);
    assert!(line.contains("at most 100 kB of memory (--memory)"), "{line}");
}

/// The prediction counts repacked weights, the cache and the draft model; a ceiling at it is kept.
#[test]
fn run_predicts_its_peak_and_keeps_a_ceiling() {
    let temp = TempDir::new().unwrap();
    let sizes = ["--hidden", "2048", "--ffn", "4096", "--heads", "16", "--layers", "2", "--vocab", "2048"];
    let model = synth(temp.path(), "m", &[&sizes[..], &["--context", "4096"]].concat());
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(root().join("crates/mantissa-jobs/demo/model").join(name), model.join(name)).unwrap();
    }
    let run = |model: &Path, more: &[&str]| {
        let common = ["run", text(model), "-p", "Once upon a time", "-n", "8", "--json", "--quiet"];
        let report = json(&[&common[..], &["--threads", "2"], more].concat());
        let bytes = |field: &str| report[field].as_u64().unwrap();
        (bytes("predicted_peak_memory"), bytes("measured_peak_memory"))
    };
    let mut all = Vec::new();
    for recipe in sampled(["nvfp4", "bf16", "fp8-dynamic", "rtn-q2_k"], 2) {
        let out = temp.path().join(format!("{recipe}.gguf"));
        let out = if recipe == "rtn-q2_k" { out } else { temp.path().join(recipe) };
        let form: &[&str] = if recipe == "rtn-q2_k" { &["--format", "gguf"] } else { &[] };
        succeed(
            &[&["quantize", text(&model), "--recipe", recipe, "--out", text(&out), "--quiet"], form].concat(),
        );
        let (predicted, measured) = run(&out, &[]);
        let ratio = predicted as f64 / measured as f64;
        assert!((0.9..1.25).contains(&ratio), "{recipe}: {predicted} of {measured}");
        all.push((out, predicted, measured));
    }
    let (small, alone, _) = &all[0];
    let (drafted, measured) = run(small, &["--draft", text(&model)]);
    assert!(drafted > alone + 80_000_000 && (drafted as f64) > 0.9 * measured as f64, "{drafted} {measured}");
    // The prediction starts from what the process holds, which differs a little from run to run.
    let (_, measured) = run(small, &["--memory", &(alone + (2 << 20)).to_string()]);
    assert!(measured <= alone + (2 << 20), "{measured} of {alone}");
    let long = ["run", text(small), "-p", "Once", "-n", "4000", "--memory", "70M", "--kv", "f32"];
    let line = fail(3, &long);
    assert!(line.contains("tokens of") && line.contains("keys and values"), "{line}");
}

fn tokenizer() -> Option<PathBuf> {
    let folder = root().join("../shared/models/stories260K");
    if !folder.is_dir() {
        println!("skipped: {} is not there", folder.display());
        return None;
    }
    Some(folder)
}

/// Under every address space limit a command works, or reports in one line that it cannot.
#[test]
fn every_limit_of_the_address_space_ends_in_success_or_an_error() {
    let temp = TempDir::new().unwrap();
    let sizes = [
        "--hidden", "512", "--ffn", "2048", "--heads", "8", "--layers", "4", "--vocab", "8000", "--dtype",
        "f32",
    ];
    let model = synth(temp.path(), "m", &sizes);
    let tokens = temp.path().join("tokens.json");
    std::fs::write(&tokens, serde_json::json!([(0..64).collect::<Vec<_>>()]).to_string()).unwrap();
    let out = temp.path().join("out");
    let commands: [&[&str]; 3] = [
        &["inspect", text(&model), "--stats", "--threads", "2"],
        &["quantize", text(&model), "--recipe", "nf4", "--out", text(&out), "--threads", "2", "--quiet"],
        &["eval", text(&model), "--tokens", text(&tokens), "--threads", "2"],
    ];
    for arguments in commands {
        let starts = |mib: u32| limited(mib, &["schemes"]).status.success();
        let floor = (8..512).step_by(4).find(|&mib| starts(mib)).unwrap();
        let (mut refused, mut worked) = (0, 0);
        let mut mib = floor;
        while worked < 3 {
            assert!(mib < 4096, "never works: {arguments:?}");
            let output = limited(mib, arguments);
            match output.status.code() {
                Some(0) => worked += 1,
                Some(3) => refused += 1,
                code => panic!("{arguments:?} in {mib} MiB: {code:?} {}", stderr(&output)),
            }
            let said = stderr(&output);
            assert!(
                !said.contains("internal") && !said.contains("memory allocation of"),
                "{mib} MiB: {said}"
            );
            mib += if whole() { 6 } else { 24 };
        }
        println!("{}: refused {refused} times from {floor} MiB on, then worked", arguments[0]);
    }
}

/// Runs the binary in an address space of this many MiB.
fn limited(mib: u32, arguments: &[&str]) -> Output {
    let mut command = Command::new("sh");
    let script = format!("ulimit -v {}; exec \"$0\" \"$@\"", mib * 1024);
    command.args(["-c", &script, env!("CARGO_BIN_EXE_mantissa")]).args(arguments);
    command.output().unwrap()
}

/// Runs the binary and samples its memory every millisecond; returns its status and the largest anonymous
/// memory seen, `None` if unknown.
fn measured(arguments: &[&str]) -> (Output, Option<u64>) {
    let mut command = command();
    let mut child = command.args(arguments).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let status = format!("/proc/{}/status", child.id());
    let mut peak = None;
    while child.try_wait().unwrap().is_none() {
        let found = std::fs::read_to_string(&status).unwrap_or_default();
        let field = |name: &str| {
            let line = found.lines().find_map(|line| line.strip_prefix(name))?;
            Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? << 10)
        };
        // Peak resident memory without file pages.
        let now = field("VmHWM:").zip(field("RssFile:")).map(|(all, files)| all.saturating_sub(files));
        peak = peak.max(now.max(field("RssAnon:")));
        std::thread::sleep(Duration::from_millis(1));
    }
    (child.wait_with_output().unwrap(), peak)
}

/// Writes a tokenizer of 18 278 tokens to `model`: every word of up to three letters.
fn large_tokenizer(model: &Path) {
    // Entries as long as in published vocabularies, about 22 bytes: letters of four bytes.
    let letters: Vec<String> = ('\u{1f600}'..='\u{1f60a}').map(String::from).collect();
    let longer = |words: &[String]| -> Vec<String> {
        words.iter().flat_map(|word| letters.iter().map(move |letter| format!("{word}{letter}"))).collect()
    };
    let (pairs, triples) = (longer(&letters), longer(&longer(&letters)));
    let all = [&letters[..], &pairs, &triples, &longer(&triples)].concat();
    let vocabulary: serde_json::Map<_, _> =
        all.iter().enumerate().map(|(id, word)| (word.clone(), id.into())).collect();
    let merge = |word: &String| format!("{} {}", &word[..word.len() - 4], &word[word.len() - 4..]);
    let merges: Vec<_> = all[letters.len()..].iter().map(merge).collect();
    let tokenizer = serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true },
        "post_processor": null, "decoder": { "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true },
        "model": { "type": "BPE", "vocab": vocabulary, "merges": merges },
    });
    std::fs::write(model.join("tokenizer.json"), format!("{tokenizer:#}")).unwrap();
}

/// Reading the tokenizer takes more than a layer of a small model: it is predicted, and not held beside other buffers.
#[test]
fn a_ceiling_counts_the_tokenizers_that_are_read() {
    let temp = TempDir::new().unwrap();
    let sizes = ["--hidden", "64", "--ffn", "128", "--heads", "4", "--layers", "2", "--vocab", "16104"];
    let model = synth(temp.path(), "m", &sizes);
    large_tokenizer(&model);
    for (recipe, out) in [("q8_0", "out.gguf"), ("fp8-dynamic", "out")] {
        let out = temp.path().join(out);
        let quantize = ["quantize", text(&model), "--recipe", recipe, "--threads", "2", "--out", text(&out)];
        let plan = json(&[&quantize[..], &["--dry-run", "--json"]].concat());
        let least = plan["least_memory"].as_u64().unwrap();
        assert!(plan["predicted_peak_memory"].as_u64().unwrap() > 10_000_000, "{plan}");
        let line = fail(3, &[&quantize[..], &["--memory", "8M"]].concat());
        assert!(line.contains("got a need of") && line.contains("tokenizer"), "{line}");
        let (output, peak) = measured(&[&quantize[..], &["--memory", &least.to_string()]].concat());
        assert!(output.status.success(), "{recipe}: {}", stderr(&output));
        assert!(peak.is_none_or(|peak| peak <= least), "{recipe}: {peak:?} of {least}");
    }
}

/// Inputs of the commands in the table.
struct Inputs {
    dir: TempDir,
}

impl Inputs {
    /// Makes a model of 5 million parameters with a tokenizer, its quantized forms, texts and token windows.
    fn new() -> Self {
        let inputs = Inputs { dir: TempDir::new().unwrap() };
        let at = |name: &str| inputs.at(name);
        let word = |i: usize| format!("{:x}", (i * 2_654_435_761) % 99_991);
        let line = |i: usize| (0..20).map(|j| word(i * 20 + j)).collect::<Vec<_>>().join(" ");
        let documents: Vec<String> = (0..1500).map(line).collect();
        std::fs::write(at("text.txt"), documents[..60].join("\n")).unwrap();
        std::fs::write(at("long.txt"), documents.join("\n<|end|>\n")).unwrap();
        let json = |text: &String| serde_json::json!({ "text": text }).to_string();
        std::fs::write(at("lines.jsonl"), documents.iter().map(json).collect::<Vec<_>>().join("\n")).unwrap();
        let window = |w: usize| (0..64).map(|i| (w * 31 + i * i) % 300).collect::<Vec<_>>();
        let windows: Vec<_> = (0..8).map(window).collect();
        std::fs::write(at("tokens.json"), serde_json::json!(windows).to_string()).unwrap();
        let sizes = ["--hidden", "384", "--ffn", "1536", "--heads", "6", "--layers", "2", "--vocab", "512"];
        synth(inputs.dir.path(), "model", &[&sizes[..], &["--context", "256", "--quiet"]].concat());
        let learn = ["tokenizer", &at("text.txt"), "--vocab", "300", "--out", &at("tokenizer"), "--quiet"];
        succeed(&learn);
        for name in ["tokenizer.json", "tokenizer_config.json"] {
            let dir = inputs.dir.path();
            std::fs::copy(dir.join("tokenizer").join(name), dir.join("model").join(name)).unwrap();
        }
        let quantize = |recipe: &str, out: &str, more: &[&str]| {
            let arguments = ["quantize", &at("model"), "--recipe", recipe, "--out", &at(out), "--quiet"];
            succeed(&[&arguments[..], more].concat());
        };
        let tokens = at("tokens.json");
        quantize("rtn-int4-g128", "int4", &[]);
        quantize("rtn-q4_0", "q4_0.gguf", &[]);
        quantize(
            "rtn-int8-channel+kv-fp8-e4m3-tensor@static",
            "static",
            &["--calibration-tokens", &tokens, "--tokens", &tokens],
        );
        inputs
    }

    fn at(&self, name: &str) -> String {
        text(&self.dir.path().join(name)).to_owned()
    }

    /// Runs a command under a ceiling; words that begin with `@` are files.
    fn run(&self, line: &str, memory: u64) -> (Output, Option<u64>) {
        let words: Vec<String> = line
            .split(' ')
            .map(|word| match word.split_once('@') {
                Some((before, name)) => format!("{before}{}", self.at(name)),
                None => word.to_owned(),
            })
            .collect();
        let memory = memory.to_string();
        let mut arguments: Vec<&str> = words.iter().map(String::as_str).collect();
        arguments.extend(["--memory", &memory, "--threads", "2", "--quiet"]);
        measured(&arguments)
    }

    /// Removes the outputs of a command.
    fn clean(&self) {
        for entry in std::fs::read_dir(self.dir.path()).unwrap() {
            let path = entry.unwrap().path();
            if !path.file_name().unwrap().to_string_lossy().starts_with("out") {
                continue;
            }
            if path.is_dir() {
                std::fs::remove_dir_all(path).unwrap();
            } else {
                std::fs::remove_file(path).unwrap();
            }
        }
    }
}

/// Every command with a ceiling, in the forms that hold different things.
const COMMANDS: [&str; 35] = [
    "inspect @model",
    "demo --recipe rtn-q4_0 --report @out.html",
    "inspect @int4",
    "inspect @int4 --stats",
    "quantize @model --recipe rtn-int4-g128 --out @out",
    "quantize @model --recipe gptq-int4-g128 --calibration-tokens @tokens.json --out @out",
    "quantize @model --recipe gptq-int4-g128 --calibration @text.txt --length 64 --out @out",
    "quantize @model --recipe rtn-q4_0 --text @text.txt --context 64 --limit 256 --out @out.gguf",
    "fit @model --budget 6bpw --schemes int4-g128,int8-g128 --tokens @tokens.json --out @out",
    "eval @model --tokens @tokens.json",
    "eval @int4 --reference @model --tokens @tokens.json",
    "eval @model --text @text.txt --context 64 --limit 64",
    "eval @model --text @long.txt --split <|end|> --context 64 --limit 64",
    "eval @model --text @long.txt --split <|end|> --docs 1400..1402 --context 64",
    "imatrix @model --calibration-tokens @tokens.json --out @out.gguf",
    "imatrix @model --calibration @text.txt --length 64 --samples 8 --out @out.gguf",
    "imatrix @model --calibration @long.txt --split <|end|> --length 64 --samples 8 --out @out.gguf",
    "imatrix @model --calibration @lines.jsonl --length 64 --samples 8 --out @out.gguf",
    "run @model -p one -n 4",
    "verify @int4",
    "verify @int4 --reference @model",
    "verify @static --reference @model --tokens @tokens.json",
    "verify @q4_0.gguf --reference @model",
    "convert @int4 --format gguf --out @out.gguf",
    "recalibrate @static --tokens @tokens.json --out @out",
    "lint @int4 --for vllm",
    "lint @q4_0.gguf --for llama.cpp --reference @model",
    "doctor @int4 --tokens @tokens.json",
    "doctor @int4 --reference @model",
    "report @int4 --out @out.html",
    "tokenizer @long.txt --vocab 400 --out @out",
    "tokenizer @long.txt --vocab 400 --split <|end|> --out @out",
    "tokenizer @lines.jsonl --vocab 400 --out @out",
    "cast @model/model.safetensors --scheme int4-g32 --out @out.safetensors",
    "synth --preset tiny --hidden 256 --ffn 1024 --heads 4 --out @out",
];

/// Under any ceiling a command keeps to it, or refuses with both sizes before writing anything.
#[test]
fn a_ceiling_is_kept_or_refused_by_every_command() {
    let inputs = Inputs::new();
    for line in sampled(COMMANDS, 5) {
        let mut report = Vec::new();
        for memory in [1_000_000, 12_000_000, 40_000_000, 400_000_000] {
            let (output, peak) = inputs.run(line, memory);
            let said = stderr(&output);
            match output.status.code() {
                // 1: a gate of `lint` or `doctor`, which did their work.
                Some(0 | 1) => {
                    assert!(peak.is_none_or(|peak| peak <= memory), "{line}: {peak:?} under {memory}");
                    report.push(format!("{} MB: {}", memory / 1_000_000, peak.unwrap_or(0) / 1_000_000));
                }
                Some(3) => {
                    assert!(said.contains("got a need of") && said.contains("(--memory)"), "{line}: {said}");
                    let mut entries = std::fs::read_dir(inputs.dir.path()).unwrap();
                    let out = entries
                        .find(|e| e.as_ref().unwrap().file_name().to_string_lossy().starts_with("out"));
                    assert!(out.is_none(), "{line}: {out:?} is written before it is refused");
                }
                code => panic!("{line} under {memory}: {code:?} {said}"),
            }
            let expected = match memory {
                1_000_000 => output.status.code() == Some(3),
                400_000_000 => output.status.code() != Some(3),
                _ => true,
            };
            assert!(expected, "{line} under {memory}: {said}");
            inputs.clean();
        }
        println!("{line}: peak {}", report.join(", "));
    }
}

/// Ceiling of training: the tokens of its texts, and the run.
#[test]
fn training_keeps_its_ceiling() {
    let temp = TempDir::new().unwrap();
    let at = |name: &str| temp.path().join(name);
    let tokenizer = root().join("tests/data/tiny/llama2-gqa-tied");
    let model = std::fs::read(tokenizer.join("config.json")).unwrap();
    let model: serde_json::Value = serde_json::from_slice(&model).unwrap();
    let config = serde_json::json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "silu",
        "vocab_size": model["vocab_size"],
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": true,
    });
    std::fs::write(at("config.json"), config.to_string()).unwrap();
    std::fs::write(at("text.txt"), "one two three\n==\n".repeat(4000)).unwrap();
    std::fs::write(at("endless.txt"), "x".repeat(2_000_000)).unwrap();
    let settings = |name: &str| {
        let toml = format!(
            "out = \"run\"\n[model]\nconfig = \"config.json\"\ntokenizer = \"{}\"\n[data]\nfiles = [\"{name}\"]\n\
             split = \"==\"\nlength = 32\nbatch = 2\n[optimizer]\nlr = 1e-3\n[schedule]\nsteps = 2\n",
            text(&tokenizer)
        );
        std::fs::write(at("run.toml"), toml).unwrap();
    };
    settings("text.txt");
    let path = at("run.toml");
    for memory in ["1M", "100M"] {
        let (output, peak) =
            measured(&["train", text(&path), "--memory", memory, "--threads", "2", "--quiet"]);
        let expected = if memory == "1M" { Some(3) } else { Some(0) };
        assert_eq!(output.status.code(), expected, "{memory}: {}", stderr(&output));
        assert!(memory == "1M" || peak.is_none_or(|peak| peak <= 100_000_000), "{peak:?}");
    }
    std::fs::remove_dir_all(at("run")).unwrap();
    settings("endless.txt");
    let line = fail(3, &["train", text(&path), "--memory", "100M", "--quiet"]);
    assert!(line.contains("endless.txt") && line.contains("got a need of"), "{line}");
}

/// Endless or far too long input is refused within the ceiling, or with the reader's own limit.
#[test]
fn texts_without_end_are_refused_with_the_limit() {
    let temp = TempDir::new().unwrap();
    let at = |name: &str| text(&temp.path().join(name)).to_owned();
    std::fs::write(at("line.jsonl"), format!("{{\"text\": \"{}\"}}", "a".repeat(20_000_000))).unwrap();
    std::fs::write(at("long.txt"), "many words ".repeat(4_000_000)).unwrap();
    let (line, long, out) = (at("line.jsonl"), at("long.txt"), at("out"));
    let ceiling = 40_000_000;
    let cases: [(&[&str], i32, &str); 13] = [
        (&["eval", "demo", "--text", "/dev/zero"], 2, "a character device"),
        (&["eval", "demo", "--tokens", "/dev/zero"], 2, "a character device"),
        (&["verify", "demo", "--text", "/dev/zero"], 2, "a character device"),
        (&["imatrix", "demo", "--calibration", "/dev/zero", "--out", &out], 2, "a character device"),
        (&["tokenizer", "/dev/zero", "--vocab", "300", "--out", &out], 2, "a character device"),
        (&["train", "/dev/zero"], 2, "a character device"),
        (&["eval", "demo", "--text", &long], 2, "in one piece"),
        (&["eval", "demo", "--text", &long, "--split", "<|end|>"], 3, "got a need of"),
        (&["imatrix", "demo", "--calibration", &long, "--out", &out], 2, "in one piece"),
        (&["imatrix", "demo", "--calibration", &line, "--out", &out], 3, "got a need of"),
        (
            &["quantize", "demo", "--recipe", "gptq-int4-g32", "--calibration", &line, "--out", &out],
            3,
            "got a need of",
        ),
        (&["tokenizer", &line, "--vocab", "300", "--out", &out], 3, "got a need of"),
        (&["eval", "demo", "--tokens", &long], 3, "got a need of"),
    ];
    for (arguments, code, words) in sampled(cases, 2) {
        let memory = ceiling.to_string();
        let (output, peak) = measured(&[arguments, &["--memory", &memory, "--quiet"]].concat());
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {said}");
        assert!(said.contains(words), "{arguments:?}: {said}");
        assert!(peak.is_none_or(|peak| peak <= ceiling), "{arguments:?}: {peak:?}");
    }
    assert!(!temp.path().join("out").exists());
    // A long text with few distinct words is processed piece by piece.
    let learn = ["tokenizer", &long, "--vocab", "262", "--out", &out, "--memory", "40M", "--threads", "2"];
    let (output, peak) = measured(&learn);
    assert!(
        output.status.success() && peak.is_none_or(|peak| peak <= ceiling),
        "{peak:?} {}",
        stderr(&output)
    );
}

/// A pipe is read no further than memory allows.
#[test]
fn a_pipe_that_never_ends_is_read_to_the_limit() {
    for (rest, code, words) in [
        ("--memory 60M", 3, "at most 60.0 MB of memory (--memory)"),
        ("--split == --memory 60M", 3, "at most 60.0 MB of memory (--memory)"),
        ("--split ==", 2, "in one piece"),
    ] {
        let script = format!("yes words | \"$0\" eval demo --text /dev/stdin {rest} --quiet");
        let output =
            Command::new("sh").args(["-c", &script, env!("CARGO_BIN_EXE_mantissa")]).output().unwrap();
        let said = stderr(&output);
        assert!(output.status.code() == Some(code) && said.contains(words), "{rest}: {said}");
    }
}

#[test]
fn an_empty_separator_is_refused_by_its_option() {
    for arguments in [
        &["eval", "demo", "--text", "x.txt", "--split", ""][..],
        &["verify", "demo", "--text", "x.txt", "--split", ""],
        &["quantize", "demo", "--recipe", "nf4", "--out", "o", "--text", "x.txt", "--split", ""],
        &["imatrix", "demo", "--calibration", "x.txt", "--out", "o", "--split", ""],
        &["tokenizer", "x.txt", "--vocab", "300", "--out", "o", "--split", ""],
    ] {
        let line = fail(2, arguments);
        assert!(line.contains("--split") && line.contains("at least one character"), "{arguments:?}: {line}");
    }
}
