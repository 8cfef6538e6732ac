//! Pages in headless Chromium: 390 and 1440 pixels wide, light and dark, without overflow, overlap or weak contrast.
//!
//! Without a Chromium (`$CHROMIUM`, or one on the PATH) the test prints "skipped". With `$PAGES` set to a folder it leaves
//! the pages and their screenshots there.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use tempfile::TempDir;

/// Widths of the window in pixels: a phone and a laptop.
const WIDTHS: [u32; 2] = [390, 1440];
/// Names of Chromium on the PATH.
const BROWSERS: [&str; 6] =
    ["chromium-headless-shell", "headless_shell", "chromium", "chromium-browser", "google-chrome", "chrome"];

/// Returns a Chromium that starts.
fn browser() -> Option<PathBuf> {
    let named = std::env::var_os("CHROMIUM").map(PathBuf::from);
    named.into_iter().chain(BROWSERS.map(PathBuf::from)).find(|path| {
        let version = Command::new(path).arg("--version").stderr(Stdio::null()).output();
        version.is_ok_and(|output| output.status.success())
    })
}

/// Runs the binary in `dir`; it must succeed.
fn mantissa(dir: &Path, arguments: &[&str]) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_mantissa"));
    let output = command.current_dir(dir).args(arguments).stdin(Stdio::null()).output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Recipe of several widths, for the map of bits.
const MIXED: &str = "method = \"rtn\"\nweights = \"int4-g32\"\n[[layers]]\nmodules = [\"*.down_proj\"]\nweights = \"int8-channel\"\n";

/// Writes a page of each kind into `dir`.
fn make_pages(dir: &Path) -> [PathBuf; 7] {
    let recipes = [
        "w8a16",
        "w8a8",
        "rtn-q8_0",
        "mxfp8",
        "rtn-int4-g128",
        "nf4",
        "nvfp4",
        "rtn-q4_0",
        "gptq-int4-g32-asym",
        "gptq-int3-g32-asym",
    ];
    let flags = recipes.iter().flat_map(|recipe| ["--recipe", recipe]);
    mantissa(dir, &["demo", "--report", "demo.html"].into_iter().chain(flags).collect::<Vec<_>>());
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    fs::copy(root.join("../mantissa-jobs/demo/text/stories.txt"), dir.join("stories.txt")).unwrap();
    let text = ["--text", "stories.txt", "--split", "<|endoftext|>", "--docs", "1..8"];
    let quantize = ["quantize", "demo", "--recipe", "rtn-int4-g128", "--out", "int4"];
    mantissa(dir, &quantize.into_iter().chain(text).collect::<Vec<_>>());
    mantissa(dir, &["report", "int4", "--out", "int4.html"]);
    fs::write(dir.join("mixed.toml"), MIXED).unwrap();
    mantissa(dir, &["quantize", "demo", "--recipe", "mixed.toml", "--out", "mixed"]);
    mantissa(
        dir,
        &["report", "mixed", "--out", "mixed.html", "--prompt", "def main():", "--new-tokens", "24"],
    );
    let compare =
        ["compare", "demo", "int4", "--recipe", "rtn-q8_0", "--recipe", "nf4", "--html", "compare.html"];
    mantissa(dir, &compare.into_iter().chain(["--limit", "3000", "--context", "128"]).collect::<Vec<_>>());
    train(dir);
    // More than the card holds: a table of splits with the host.
    mantissa(dir, &["plan", "--params", "70B", "--hardware", "rtx4090", "--html", "plan.html"]);
    ["demo.html", "compare.html", "int4.html", "mixed.html", "run.html", "runs.html", "plan.html"]
        .map(|name| dir.join(name))
}

/// Trains a model for a few steps in fp8, and writes its page.
fn train(dir: &Path) {
    let tokenizer = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/tiny/llama2-gqa-tied");
    let model = fs::read_to_string(tokenizer.join("config.json")).unwrap();
    let model: serde_json::Value = serde_json::from_str(&model).unwrap();
    let config = serde_json::json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "silu",
        "vocab_size": model["vocab_size"], "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "tie_word_embeddings": true, "eos_token_id": 2,
    });
    fs::write(dir.join("config.json"), config.to_string()).unwrap();
    let settings = format!(
        "out = \"run\"\n[model]\nconfig = \"config.json\"\ntokenizer = \"{}\"\n[data]\nfiles = [\"stories.txt\"]\n\
         split = \"<|endoftext|>\"\nlength = 32\nbatch = 4\n[precision]\npolicy = \"fp16\"\n[optimizer]\nlr = 5e-3\n\
         [schedule]\nsteps = 60\nwarmup = 4\n[telemetry]\nevery = 5\n",
        tokenizer.display()
    );
    fs::write(dir.join("run.toml"), settings).unwrap();
    mantissa(dir, &["train", "run.toml"]);
    mantissa(dir, &["report", "run", "--out", "run.html"]);
    let other = [
        "--set",
        "out=a-run-with-a-longer-name",
        "--set",
        "precision.policy=bf16",
        "--set",
        "optimizer.lr=2e-3",
    ];
    mantissa(dir, &[&["train", "run.toml"][..], &other].concat());
    mantissa(dir, &["report", "run", "a-run-with-a-longer-name", "--out", "runs.html"]);
}

/// Returns a copy of `page` that may run the probe.
fn probed(page: &Path) -> PathBuf {
    let html = fs::read_to_string(page).unwrap();
    let (before, rest) = html.split_once("<meta http-equiv=\"Content-Security-Policy\"").unwrap();
    let (_, after) = rest.split_once('>').unwrap();
    let script = format!("<script>{}</script></body>", include_str!("pages/probe.js"));
    let path = page.with_extension("probe.html");
    fs::write(&path, format!("{before}{}", after.replace("</body>", &script))).unwrap();
    path
}

/// Smallest width of Chromium's windows, in pixels.
const NARROWEST: u32 = 500;

/// Returns a page that shows `page` in a frame of `width` pixels and takes over what the probe found in it.
fn framed(page: &Path, width: u32) -> PathBuf {
    let source = page.file_name().unwrap().to_string_lossy();
    let script = "document.body.append(frame.contentDocument.getElementById('probe').cloneNode(true))";
    let style = format!("width: {width}px; height: {HEIGHT}px; border: 0");
    let frame =
        format!("<iframe id=\"frame\" src=\"{source}\" style=\"{style}\" onload=\"{script}\"></iframe>");
    let path = page.with_extension(format!("{width}.html"));
    let head = "<!doctype html><meta charset=\"utf-8\"><style>:root { color-scheme: light dark; }</style>";
    fs::write(&path, format!("{head}<body style=\"margin: 0\">{frame}</body>")).unwrap();
    path
}

/// Opens `page` in a window of `width` pixels, in the dark theme if `dark`; returns its document.
fn open(browser: &Path, page: &Path, width: u32, dark: bool, more: &[String]) -> String {
    let profile = TempDir::new().unwrap();
    let mut command = Command::new(browser);
    command.args([
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--virtual-time-budget=2000",
    ]);
    command.arg(format!("--user-data-dir={}", profile.path().display()));
    command.arg(format!("--window-size={width},{HEIGHT}"));
    command.arg(format!("--blink-settings=preferredColorScheme={}", u32::from(!dark)));
    command.args(more).arg(format!("file://{}", page.display()));
    let output = command.stdin(Stdio::null()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Height of the window in pixels, for screenshots.
const HEIGHT: u32 = 4000;

/// Returns the faults that the probe found.
fn faults(browser: &Path, page: &Path, width: u32, dark: bool) -> Vec<String> {
    let more = ["--dump-dom", "--allow-file-access-from-files"].map(str::to_owned);
    let framed = (width < NARROWEST).then(|| framed(page, width));
    let document = open(browser, framed.as_deref().unwrap_or(page), width, dark, &more);
    let report =
        document.split_once("<pre id=\"probe\">PROBE ").and_then(|(_, rest)| rest.split_once("\nEND"));
    let report = report.unwrap_or_else(|| panic!("the probe did not run: {document:.400}")).0;
    let mut lines = report.lines();
    let theme = if dark { "dark" } else { "light" };
    assert_eq!(lines.next(), Some(&format!("{theme} {width}")[..]), "theme and width of the window");
    lines.filter(|line| !line.is_empty()).map(str::to_owned).collect()
}

#[test]
fn pages_fit_their_window_in_both_themes() {
    let Some(browser) = browser() else {
        println!("skipped: no Chromium: expected $CHROMIUM or one of {} on the PATH", BROWSERS.join(", "));
        return;
    };
    let temporary = TempDir::new().unwrap();
    let kept = std::env::var_os("PAGES").map(PathBuf::from);
    let dir = kept.as_deref().unwrap_or(temporary.path()).canonicalize().unwrap();
    let mut all = Vec::new();
    for page in make_pages(&dir) {
        let copy = probed(&page);
        for (width, dark) in WIDTHS.into_iter().flat_map(|width| [(width, false), (width, true)]) {
            let name = page.file_stem().unwrap().to_string_lossy().into_owned();
            let theme = if dark { "dark" } else { "light" };
            let found = faults(&browser, &copy, width, dark);
            all.extend(found.into_iter().map(|fault| format!("{name}, {width} px, {theme}: {fault}")));
            if kept.is_some() {
                let picture = dir.join(format!("{name}-{width}-{theme}.png"));
                open(&browser, &page, width, dark, &[format!("--screenshot={}", picture.display())]);
            }
        }
    }
    assert!(all.is_empty(), "{} faults:\n{}", all.len(), all.join("\n"));
}
