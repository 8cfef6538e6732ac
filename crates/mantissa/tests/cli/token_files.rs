//! Token windows of every length and every kind of damage, through every command that takes them: accepted,
//! or refused in one line.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::json;
use tempfile::TempDir;

use crate::support::{command, root, sampled, shared_out, stderr, succeed, text};

/// Windows with at least one token each, of unequal lengths.
const UNEQUAL: [&str; 3] = [
    "[[1, 2, 3], [4]]",
    "[[1], [1, 2], [1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 7, 8, 9]]",
    "LONGEST",
];

/// Windows that are too short for some commands.
const EITHER: [&str; 6] =
    ["[[1]]", "[[1], [2, 3]]", "[[1], [1], [1]]", "[[1, 2], [3, 256]]", "LONGER", "VERY_LONG"];

/// Windows that every command refuses, and a part of the message.
const REFUSED: [(&str, &str); 17] = [
    ("[]", ": w: expected at least one window, a list of token ids, got an empty list"),
    ("[[]]", ": w[0]: expected at least one token id, got an empty list; fix: "),
    ("[[], [1, 2, 3]]", ": w[0]: expected at least one token id"),
    ("[[1, 2, 3], []]", ": w[1]: expected at least one token id"),
    ("[[1, 2, 3], [], [4, 5]]", ": w[1]: expected at least one token id"),
    ("[[1, 2], [-1, 2]]", ": w[1]: "),
    ("[[1, 2.5]]", ": w[0]: "),
    ("[[1, 1e999]]", ": JSON: "),
    ("[[1, 4294967296], [2, 3]]", ": w[0]: "),
    ("[[1, 2], [[3, 4]]]", ": w[1]: "),
    ("[[1, 2], null]", ": w[1]: expected a list of token ids, got null"),
    ("[1, 2, 3]", ": w[0]: expected a list of token ids, got a number"),
    ("null", ", got null"),
    ("\"1 2 3\"", ", got a string"),
    ("{\"a\": [[1, 2]]}", ", got an object"),
    ("DEEP", ": JSON: "),
    ("[[1, 2], [3,", ": JSON: "),
];

/// Commands: `W` stands for the windows, `OUT` for the output, `MODEL`, `NATIVE` and `STATIC` for models,
/// `TEXT` for valid windows. Marked commands accept [`UNEQUAL`] windows.
const COMMANDS: [(bool, &str); 30] = [
    (true, "eval MODEL --tokens W"),
    (true, "eval MODEL --tokens W --reference MODEL"),
    (true, "eval MODEL --tokens W --prefill 2"),
    (false, "eval MODEL --tokens W --prefill 200"),
    (false, "eval MODEL --tokens W --logits OUT"),
    (true, "eval MODEL --tokens W --per-window OUT"),
    (true, "eval MODEL --tokens W --limit 2"),
    (true, "eval MODEL --tokens TEXT --kv nuq4-1% --calibration-tokens W"),
    (true, "imatrix MODEL --calibration-tokens W --out OUT"),
    (true, "doctor MODEL --tokens W"),
    (true, "verify NATIVE --tokens W"),
    (true, "recalibrate NATIVE --kv nuq4-1% --tokens W --out OUT"),
    (true, "recalibrate STATIC --tokens W --out OUT"),
    (true, "convert STATIC --format gguf --requantize q8_0 --tokens W --out OUT"),
    (
        true,
        "fit MODEL --budget 6bpw --schemes int4-g32,int8-g32 --tokens TEXT --method gptq --calibration-tokens W --out OUT",
    ),
    (false, "fit MODEL --budget 6bpw --schemes int4-g32,int8-g32 --tokens W --out OUT"),
    (true, "quantize MODEL --recipe rtn-int4-g32 --tokens W --out OUT"),
    (true, "quantize MODEL --recipe gptq-int4-g32 --calibration-tokens W --out OUT"),
    (true, "quantize MODEL --recipe gptq-int4-g32 --calibration-tokens W --hold-out 1 --out OUT"),
    (true, "quantize MODEL --recipe gptaq-int4-g32 --calibration-tokens W --out OUT"),
    (true, "quantize MODEL --recipe awq-int4-g32 --calibration-tokens W --out OUT"),
    (true, "quantize MODEL --recipe RECIPES/autoround.toml --calibration-tokens W --out OUT"),
    (true, "quantize MODEL --recipe w8a8-smooth --calibration-tokens W --out OUT"),
    (true, "quantize MODEL --recipe rotate-gptq-int4-g32 --calibration-tokens W --out OUT"),
    (true, "quantize MODEL --recipe RECIPES/spin.toml --calibration-tokens W --out OUT"),
    (true, "quantize MODEL --recipe spqr-int4-g32 --calibration-tokens W --out OUT"),
    (true, "quantize MODEL --recipe hqq-int4-g32 --calibration-tokens W --out OUT"),
    (true, "quantize MODEL --recipe qtip-trellis2 --calibration-tokens W --out OUT"),
    (true, "quantize MODEL --recipe q4_0 --calibration-tokens W --out OUT"),
    (true, "quantize MODEL --recipe rtn-int8-channel+int8-tensor@static --calibration-tokens W --out OUT"),
];

/// Models and files of a run, in their own folder.
struct Bench(TempDir);

impl Bench {
    fn new() -> Self {
        let bench = Bench(TempDir::new().unwrap());
        let path = |name| bench.path(name);
        let (model, native, fixed) = (path("MODEL"), path("NATIVE"), path("STATIC"));
        succeed(&["synth", "--preset", "tiny", "--out", text(&model), "--quiet"]);
        let windows: Vec<Vec<u32>> =
            (0..4).map(|i| (0..20).map(|j| (31 * i + 7 * j) % 256).collect()).collect();
        fs::write(path("TEXT"), json!(windows).to_string()).unwrap();
        let quantize = |recipe: &str, more: [&str; 2], out: &Path| {
            let arguments = ["quantize", text(&model), "--recipe", recipe, "--out", text(out), "--quiet"];
            succeed(&[&arguments[..], &more].concat());
        };
        quantize("rtn-int4-g32", ["--format", "native"], &native);
        let windows = path("TEXT");
        let calibration = ["--calibration-tokens", text(&windows)];
        quantize("rtn-int8-channel+int8-tensor@static", calibration, &fixed);
        fs::create_dir(path("RECIPES")).unwrap();
        let recipe = |name: &str, content: &str| fs::write(path("RECIPES").join(name), content).unwrap();
        // A few steps are enough here.
        recipe(
            "autoround.toml",
            "method = \"autoround\"\nweights = \"int4-g32\"\n[autoround]\niterations = 3\n",
        );
        let spin =
            "transform = \"spin\"\nmethod = \"gptq\"\nweights = \"int4-g32\"\n[spin]\niterations = 2\n";
        recipe("spin.toml", spin);
        bench
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Runs a line of [`COMMANDS`] on windows. It must exit with 0, or with 2, one line on standard error and
    /// no output.
    fn run(&self, line: &str, windows: &str) -> (i32, String) {
        let out = self.path(if line.contains("q4_0") || line.contains("gguf") { "OUT.gguf" } else { "OUT" });
        let argument = |part: &str| match part {
            "W" => windows.to_owned(),
            "OUT" => text(&out).to_owned(),
            "MODEL" | "NATIVE" | "STATIC" | "TEXT" => text(&self.path(part)).to_owned(),
            part => part
                .strip_prefix("RECIPES/")
                .map_or(part.to_owned(), |name| text(&self.path("RECIPES").join(name)).to_owned()),
        };
        let output = command().args(line.split(' ').map(argument)).arg("--quiet").output().unwrap();
        let said = stderr(&output);
        let code = output.status.code().unwrap_or(-1);
        assert!(!said.contains("internal") && !said.contains("panicked"), "{line}: {windows}: {said}");
        assert!([0, 2].contains(&code), "{line}: {windows}: exit {code}: {said}");
        if code == 2 {
            assert!(said.starts_with("error: ") && said.trim_end().lines().count() == 1, "{line}: {said}");
            assert!(said.len() < 2000, "{line}: {said}");
        }
        let written: Vec<_> =
            fs::read_dir(self.0.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
        for path in written {
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            if name.contains("OUT") {
                assert_eq!(code, 0, "{line}: {windows}: left {name}");
                if path.is_dir() { fs::remove_dir_all(path).unwrap() } else { fs::remove_file(path).unwrap() }
            }
        }
        (code, said)
    }

    /// Runs every list of windows through the commands whose index is `rest` modulo 3.
    fn table(&self, rest: usize) {
        let ids = |n: usize| (0..n).map(|i| i % 256).collect::<Vec<_>>();
        let file = self.path("t.json");
        let put = |windows: &str| {
            let windows = match windows {
                // The model's context is 128 tokens.
                "LONGEST" => json!([ids(128), [7, 8]]).to_string(),
                "LONGER" => json!([ids(129), [7, 8]]).to_string(),
                "VERY_LONG" => json!([[7, 8], ids(100_000)]).to_string(),
                "DEEP" => ["[".repeat(5000), "]".repeat(5000)].concat(),
                windows => windows.to_owned(),
            };
            fs::write(&file, format!("{{\"other\": [[1, 2]], \"w\": {windows}}}")).unwrap();
        };
        let windows = format!("{}:w", text(&file));
        let third = COMMANDS.iter().enumerate().filter(|(i, _)| i % 3 == rest);
        for (i, (_, (takes_unequal, line))) in sampled(third, 3).enumerate() {
            for unequal in shared_out(UNEQUAL, 2, i) {
                put(unequal);
                let (code, said) = self.run(line, &windows);
                assert!(code == 0 || !takes_unequal, "{line}: {unequal}: {said}");
            }
            for either in shared_out(EITHER, 2, i) {
                put(either);
                self.run(line, &windows);
            }
            for (refused, because) in shared_out(REFUSED, 2, i) {
                put(refused);
                let (code, said) = self.run(line, &windows);
                assert!(
                    code == 2 && said.contains("t.json") && said.contains(because),
                    "{line}: {refused}: {said}"
                );
            }
            put("[[1, 2], [3, 4, 5]]");
            for argument in
                [text(&file).to_owned(), format!("{}:none", text(&file)), format!("{}:", text(&file))]
            {
                let (code, said) = self.run(line, &argument);
                assert!(code == 2 && said.contains("t.json"), "{line}: {argument}: {said}");
            }
        }
    }
}

#[test]
fn windows_of_any_length_are_used_or_refused_by_a_third_of_the_commands() {
    Bench::new().table(0);
}

#[test]
fn windows_of_any_length_are_used_or_refused_by_another_third() {
    Bench::new().table(1);
}

#[test]
fn windows_of_any_length_are_used_or_refused_by_the_others() {
    Bench::new().table(2);
}

/// Lines without a token are refused like windows without one.
#[test]
fn lines_of_a_calibration_without_a_token_name_file_and_line() {
    let temp = TempDir::new().unwrap();
    let (model, lines, out) = (temp.path().join("m"), temp.path().join("c.jsonl"), temp.path().join("out"));
    fs::create_dir(&model).unwrap();
    let from = root().join("tests/data/tiny/llama2-gqa-tied");
    for name in ["config.json", "model.safetensors", "tokenizer.json"] {
        fs::copy(from.join(name), model.join(name)).unwrap();
    }
    // Without the tokenizer's BOS, an empty text has no token.
    let path = model.join("tokenizer.json");
    let mut tokenizer: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    tokenizer["post_processor"] = serde_json::Value::Null;
    fs::write(&path, tokenizer.to_string()).unwrap();
    fs::write(&lines, "{\"text\": \"the cat sat\"}\n\n{\"text\": \"\"}\n{\"text\": \"a\"}\n").unwrap();
    let arguments =
        ["quantize", text(&model), "--recipe", "gptq-int8-channel", "--calibration", text(&lines)];
    let arguments = [&arguments[..], &["--out", text(&out), "--quiet"]].concat();
    let line = crate::support::fail(2, &arguments);
    assert!(line.contains("c.jsonl: line 3: expected a text of at least one token"), "{line}");
    assert!(!out.exists());
}
