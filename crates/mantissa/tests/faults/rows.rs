//! Table of every command that writes.

use std::fs;

use crate::harness::{ALL, Case, Out, Pace, Room, prove};
use crate::support::root;

/// Names the rows; each is a test.
macro_rules! rows {
    ($($name:ident: $case:expr;)*) => {
        /// All rows.
        pub const ROWS: &[Case] = &[$($case),*];
        $(
            #[test]
            fn $name() {
                const CASE: Case = $case;
                static KEPT: Case = CASE;
                prove(&KEPT);
            }
        )*
    };
}

/// A sample of creations and fsyncs, for commands with many.
const SOME: Pace = Pace { others: 4, writes: 3, ..ALL };

/// A minimal sample without reruns, for commands that take seconds.
const FEW: Pace = Pace { others: 40, writes: 0, again: 8, full: 2, together: 1, stops: 1, over_old: false };

rows! {
    quantize_folder: Case {
        name: "quantize",
        prepare: model,
        command: "quantize in/model --recipe rtn-int4-g8 --max-shard-size 8k --out out/q --json=out/q.json",
        old: "quantize in/model --recipe rtn-int8-g8 --out out/q --json=out/q.json",
        outputs: &[Out::Folder("q"), Out::Report("q.json")],
        pace: ALL,
    };
    quantize_calibrated: Case {
        name: "quantize gptq",
        prepare: model,
        command: "quantize in/model --recipe gptq-int4-g8 --calibration-tokens in/windows.json:w --out out/q",
        old: "quantize in/model --recipe rtn-int8-g8 --out out/q",
        outputs: &[Out::Folder("q")],
        pace: SOME,
    };
    quantize_measured: Case {
        name: "quantize --text",
        prepare: with_tokenizer,
        command: "quantize in/words --recipe rtn-int8-g8 --text in/text.txt --context 32 --out out/q --json=out/q.json",
        old: "quantize in/words --recipe rtn-int4-g8 --out out/q --json=out/q.json",
        outputs: &[Out::Folder("q"), Out::Report("q.json")],
        pace: SOME,
    };
    quantize_several: Case {
        name: "quantize, two formats",
        prepare: model,
        command: "quantize in/model --recipe rtn-int8-channel --format native --format compressed-tensors --out out",
        old: "quantize in/model --recipe rtn-int4-channel --format native --format compressed-tensors --out out",
        outputs: &[Out::Folder("native"), Out::Folder("compressed-tensors")],
        pace: SOME,
    };
    quantize_gguf: Case {
        name: "quantize gguf",
        prepare: model,
        command: "quantize in/model --recipe rtn-q4_0 --format gguf --out out/m.gguf",
        old: "quantize in/model --recipe rtn-q8_0 --format gguf --out out/m.gguf",
        outputs: &[Out::Gguf("m.gguf", &["m.gguf"])],
        pace: ALL,
    };
    quantize_gguf_split: Case {
        name: "quantize gguf, split",
        prepare: model,
        command: "quantize in/model --recipe rtn-q8_0 --format gguf --max-shard-size 12k --out out/s.gguf",
        old: "quantize in/model --recipe rtn-q5_0 --format gguf --max-shard-size 9k --out out/s.gguf",
        outputs: &[Out::Gguf("s.gguf", &["s-00001-of-00002.gguf", "s-00002-of-00002.gguf"])],
        pace: ALL,
    };
    quantize_gguf_split_over_one_file: Case {
        name: "quantize gguf, split of one",
        prepare: model,
        command: "quantize in/model --recipe rtn-q8_0 --format gguf --max-shard-size 12k --out out/s.gguf",
        old: "quantize in/model --recipe rtn-q4_0 --format gguf --out out/s.gguf",
        outputs: &[Out::Gguf("s.gguf", &["s-00001-of-00002.gguf", "s-00002-of-00002.gguf", "s.gguf"])],
        pace: SOME,
    };
    convert_folder: Case {
        name: "convert",
        prepare: quantized,
        command: "convert in/q --format gptq --out out/c --json=out/c.json",
        old: "convert in/q8 --format gptq --out out/c --json=out/c.json",
        outputs: &[Out::Folder("c"), Out::Report("c.json")],
        pace: SOME,
    };
    convert_gguf: Case {
        name: "convert gguf",
        prepare: quantized,
        command: "convert in/q --format gguf --requantize q4_0 --out out/c.gguf",
        old: "convert in/model --format gguf --out out/c.gguf",
        outputs: &[Out::Gguf("c.gguf", &["c.gguf"])],
        pace: SOME,
    };
    rebuild: Case {
        name: "rebuild",
        prepare: quantized,
        command: "rebuild in/q --source in/model --file windows.json=in/windows.json --out out/r --json=out/r.json",
        old: "rebuild in/q8 --source in/model --file windows.json=in/windows.json --out out/r --json=out/r.json",
        outputs: &[Out::Folder("r"), Out::Report("r.json")],
        pace: SOME,
    };
    plan: Case {
        name: "plan",
        prepare: nothing,
        command: "plan --params 8B --hardware h100 --html out/p.html --json=out/p.json",
        old: "plan --params 1B --hardware h100 --html out/p.html --json=out/p.json",
        outputs: &[Out::File("p.html"), Out::Report("p.json")],
        pace: SOME,
    };
    explain: Case {
        name: "explain",
        prepare: nothing,
        command: "explain 0.1 --as bf16 --json=out/e.json",
        old: "explain 0.2 --as bf16 --json=out/e.json",
        outputs: &[Out::Report("e.json")],
        pace: SOME,
    };
    recalibrate: Case {
        name: "recalibrate",
        prepare: quantized,
        command: "recalibrate in/kv --tokens in/windows.json:w --out out/r",
        old: "recalibrate in/kv --tokens in/windows.json:v --out out/r",
        outputs: &[Out::Folder("r")],
        pace: SOME,
    };
    fit: Case {
        name: "fit",
        prepare: model,
        command: "fit in/model --schemes int4-g8,int8-g8 --tokens in/windows.json:w --budget 11bpw --out out/f --save-recipe out/f.toml --html out/f.html",
        old: "fit in/model --schemes int4-g8,int8-g8 --tokens in/windows.json:w --budget 9bpw --out out/f --save-recipe out/f.toml --html out/f.html",
        outputs: &[Out::Folder("f"), Out::File("f.toml"), Out::File("f.html")],
        pace: SOME,
    };
    imatrix: Case {
        name: "imatrix",
        prepare: model,
        command: "imatrix in/model --calibration-tokens in/windows.json:w --out out/i.gguf",
        old: "imatrix in/model --calibration-tokens in/windows.json:v --out out/i.gguf",
        outputs: &[Out::File("i.gguf")],
        pace: ALL,
    };
    eval: Case {
        name: "eval",
        prepare: model,
        command: "eval in/model --tokens in/windows.json:w --logits out/l.safetensors --per-window out/w.csv --json=out/e.json",
        old: "eval in/model --tokens in/windows.json:v --logits out/l.safetensors --per-window out/w.csv --json=out/e.json",
        outputs: &[Out::File("l.safetensors"), Out::File("w.csv"), Out::Report("e.json")],
        pace: ALL,
    };
    cast: Case {
        name: "cast",
        prepare: model,
        command: "cast in/model/model.safetensors --scheme int4-g8 --packed --out out/c.safetensors --json=out/c.json",
        old: "cast in/model/model.safetensors --scheme int8-g8 --out out/c.safetensors --json=out/c.json",
        outputs: &[Out::File("c.safetensors"), Out::Report("c.json")],
        pace: SOME,
    };
    tokenizer: Case {
        name: "tokenizer",
        prepare: with_tokenizer,
        command: "tokenizer in/text.txt --vocab 270 --out out/t --json=out/t.json",
        old: "tokenizer in/text.txt --vocab 265 --out out/t --json=out/t.json",
        outputs: &[Out::Folder("t"), Out::Report("t.json")],
        pace: ALL,
    };
    synth: Case {
        name: "synth",
        prepare: nothing,
        command: "synth --preset tiny --hidden 32 --layers 1 --ffn 64 --heads 2 --kv-heads 1 --vocab 64 --seed 1 --out out/m",
        old: "synth --preset tiny --hidden 32 --layers 1 --ffn 64 --heads 2 --kv-heads 1 --vocab 64 --seed 2 --out out/m",
        outputs: &[Out::Folder("m")],
        pace: ALL,
    };
    report: Case {
        name: "report",
        prepare: quantized,
        command: "report in/q --out out/p.html",
        old: "report in/q8 --out out/p.html",
        outputs: &[Out::File("p.html")],
        pace: ALL,
    };
    inspect: Case {
        name: "inspect",
        prepare: quantized,
        command: "inspect in/q --json=out/i.json",
        old: "inspect in/model --json=out/i.json",
        outputs: &[Out::Report("i.json")],
        pace: SOME,
    };
    verify: Case {
        name: "verify",
        prepare: quantized,
        command: "verify in/q --reference in/model --json=out/v.json",
        old: "verify in/q8 --json=out/v.json",
        outputs: &[Out::Report("v.json")],
        pace: SOME,
    };
    lint: Case {
        name: "lint",
        prepare: quantized,
        command: "lint in/model --for vllm --json=out/l.json",
        old: "inspect in/model --json=out/l.json",
        outputs: &[Out::Report("l.json")],
        pace: SOME,
    };
    doctor: Case {
        name: "doctor",
        prepare: quantized,
        command: "doctor in/q --reference in/model --json=out/d.json",
        old: "doctor in/q8 --reference in/model --json=out/d.json",
        outputs: &[Out::Report("d.json")],
        pace: SOME,
    };
    diagnose: Case {
        name: "diagnose",
        prepare: model,
        command: "diagnose in/model --tokens in/windows.json:w --html out/d.html --json=out/d.json",
        old: "diagnose in/model --tokens in/windows.json:v --html out/d.html --json=out/d.json",
        outputs: &[Out::File("d.html"), Out::Report("d.json")],
        pace: SOME,
    };
    run: Case {
        name: "run",
        prepare: with_tokenizer,
        command: "run in/words -p a -n 2 --json=out/r.json",
        old: "run in/words -p b -n 3 --json=out/r.json",
        outputs: &[Out::Report("r.json")],
        pace: SOME,
    };
    bench: Case {
        name: "bench",
        prepare: with_tokenizer,
        command: "bench in/words --prompt 4 --gen 2 --reps 1 --json=out/b.json",
        old: "bench in/words --prompt 3 --gen 1 --reps 1 --json=out/b.json",
        outputs: &[Out::Report("b.json")],
        pace: SOME,
    };
    compare: Case {
        name: "compare",
        prepare: quantized,
        command: "compare in/model in/q8 --recipe rtn-int4-g8 --tokens in/windows.json:w --keep-outputs out --html out/c.html --markdown=out/c.md",
        old: "compare in/model in/q --recipe rtn-int4-g8 --tokens in/windows.json:v --keep-outputs out --html out/c.html --markdown=out/c.md",
        outputs: &[Out::Folder("rtn-int4-g8"), Out::Page("c.html"), Out::File("c.md")],
        pace: SOME,
    };
    diff: Case {
        name: "diff",
        prepare: with_tokenizer,
        command: "diff in/words in/words -p a -n 2 --json=out/d.json",
        old: "diff in/words in/words -p b -n 3 --json=out/d.json",
        outputs: &[Out::Report("d.json")],
        pace: SOME,
    };
    recipes: Case {
        name: "recipes",
        prepare: nothing,
        command: "recipes --json=out/r.json",
        old: "schemes --json=out/r.json",
        outputs: &[Out::Report("r.json")],
        pace: SOME,
    };
    completions: Case {
        name: "completions",
        prepare: nothing,
        command: "completions bash --json=out/c.json",
        old: "completions zsh --json=out/c.json",
        outputs: &[Out::Report("c.json")],
        pace: SOME,
    };
    man: Case {
        name: "man",
        prepare: nothing,
        command: "man quantize --json=out/m.json",
        old: "man --json=out/m.json",
        outputs: &[Out::Report("m.json")],
        pace: SOME,
    };
    schemes: Case {
        name: "schemes",
        prepare: nothing,
        command: "schemes --json=out/s.json",
        old: "recipes --json=out/s.json",
        outputs: &[Out::Report("s.json")],
        pace: SOME,
    };
    demo: Case {
        name: "demo",
        prepare: nothing,
        command: "demo --recipe bf16 --report out/d.html",
        old: "recipes --json=out/d.html",
        outputs: &[Out::Page("d.html")],
        pace: FEW,
    };
}

fn nothing(_: &Room) {}

/// Model of one layer, and two sets of token windows.
fn model(room: &Room) {
    room.succeed(
        "synth --preset tiny --hidden 32 --layers 1 --ffn 64 --heads 2 --kv-heads 1 --vocab 64 --context 64 --out in/model",
    );
    let window = |seed: u64| (0..16).map(|i| (i * 7 + seed * 3) % 64).collect::<Vec<_>>();
    let windows = |first| (first..first + 4).map(window).collect::<Vec<_>>();
    let sets = serde_json::json!({ "w": windows(1), "v": windows(9) });
    fs::write(room.path("in/windows.json"), sets.to_string()).unwrap();
}

/// As [`model`], quantized.
fn quantized(room: &Room) {
    model(room);
    for (recipe, name) in
        [("rtn-int4-g32", "q"), ("rtn-int8-g32", "q8"), ("rtn-int8-channel+kv-fp8-e4m3-tensor@static", "kv")]
    {
        room.succeed(&format!(
            "quantize in/model --recipe {recipe} --calibration-tokens in/windows.json:w --out in/{name} --quiet"
        ));
    }
}

/// Model with a tokenizer, and a text.
pub fn with_tokenizer(room: &Room) {
    let from = root().join("tests/data/tiny/llama2-gqa-tied");
    fs::create_dir(room.path("in/words")).unwrap();
    for file in fs::read_dir(from).unwrap() {
        let file = file.unwrap();
        fs::copy(file.path(), room.path("in/words").join(file.file_name())).unwrap();
    }
    let line = |i: usize| format!("Line {i} says that {} is before {}.\n", i % 10, (i + 1) % 10);
    fs::write(room.path("in/text.txt"), (0..40).map(line).collect::<String>()).unwrap();
}
