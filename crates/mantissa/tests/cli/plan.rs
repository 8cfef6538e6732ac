//! `mantissa plan`: from sizes to a choice, without weights.

use std::fs;
use std::time::Instant;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::{fail, json, mantissa, root, stderr, succeed, text};

/// Finds a candidate of a report.
fn row<'a>(report: &'a Value, name: &str) -> &'a Value {
    let rows = report["rows"].as_array().unwrap();
    rows.iter().find(|row| row["precision"]["name"] == name).unwrap()
}

#[test]
fn a_new_user_asks_one_question() {
    let question = ["plan", "--params", "32B", "--hardware", "4090", "--context", "32k"];
    let start = Instant::now();
    let answer = succeed(&question);
    let seconds = start.elapsed().as_secs_f64();
    assert!(seconds < 1.0, "{seconds} s");
    for part in [
        "32B: 32.8 B parameters; shape of Qwen2.5-32B",
        "RTX 4090",
        "predicted",
        "BF16 needs 74.6 GB and does not fit",
        "choose      Q4_K_M, KV cache in int8",
        "loads in ",
        "because     ",
        "changes     batch: ",
        "make        mantissa quantize MODEL --recipe q4_k_m",
        "measure     mantissa bench MODEL",
    ] {
        assert!(answer.contains(part), "{part}: {answer}");
    }
    let widest = answer.lines().map(|line| line.chars().count()).max().unwrap();
    assert!(widest <= 120, "{widest}: {answer}");
}

#[test]
fn the_report_has_what_the_text_says() {
    let report = json(&[
        "plan",
        "--params",
        "8B",
        "--hardware",
        "h100",
        "--batch",
        "256",
        "--context",
        "1024",
        "--json",
    ]);
    assert_eq!(report["recommendation"]["precision"], "W8A8 FP8", "{}", report["recommendation"]);
    assert_eq!((&report["predicted"], &report["load"]["batch"]), (&json!(true), &json!(256)));
    let speeds = row(&report, "BF16")["decode"]["tokens_per_s"].as_array().unwrap();
    let speeds: Vec<f64> = speeds.iter().map(|speed| speed.as_f64().unwrap()).collect();
    assert!(speeds[0] < speeds[1] && speeds[1] < speeds[2], "{speeds:?}");
    let fallback = row(&report, "W4A4 NVFP4")["execution"]["fallback"].as_str().unwrap();
    assert!(fallback.starts_with("runs as W4A16"), "{fallback}");
    assert!(report["hardware"]["source"].as_str().unwrap().contains("datasheet"));
    // Its JSON file is written beside the text.
    let temp = TempDir::new().unwrap();
    let file = temp.path().join("plan.json");
    let shown =
        succeed(&["plan", "--params", "8B", "--hardware", "h100", &format!("--json={}", text(&file))]);
    assert!(shown.contains("choose "));
    assert!(serde_json::from_slice::<Value>(&fs::read(file).unwrap()).unwrap()["rows"].is_array());
}

#[test]
fn hardware_is_listed_and_given_by_its_figures() {
    let list = succeed(&["plan", "--hardware", "list"]);
    for part in ["rtx4090", "m5-max", "rx7900xtx", "data sheet", "GB/s"] {
        assert!(list.contains(part), "{part}: {list}");
    }
    let devices = json(&["plan", "--hardware", "list", "--json"]);
    assert!(devices["devices"].as_array().unwrap().iter().all(|device| device["source"].is_string()));
    let figures = "bandwidth=1008GB/s,memory=24GB,bf16=165.2TFLOPS,fp8=330.3TFLOPS,int8=660.6TOPS,sm=89";
    let given = json(&["plan", "--params", "8B", "--hardware", figures, "--json"]);
    let named = json(&["plan", "--params", "8B", "--hardware", "rtx4090", "--json"]);
    assert_eq!(given["recommendation"]["precision"], named["recommendation"]["precision"]);
    assert_eq!(row(&given, "Q4_K_M")["decode"], row(&named, "Q4_K_M")["decode"]);
    let wrong = fail(2, &["plan", "--params", "8B", "--hardware", "bandwith=1TB/s,memory=24GB,bf16=1T"]);
    assert!(wrong.contains("--hardware: bandwith: expected bandwidth"), "{wrong}");
    let wrong = fail(2, &["plan", "--params", "8B", "--hardware", "bandwidth=1008,memory=24GB,bf16=1T"]);
    assert!(wrong.contains("with its unit, such as 1008GB/s"), "{wrong}");
    let wrong = fail(2, &["plan", "--params", "8B", "--hardware", "memory=8GB"]);
    assert!(wrong.contains("bandwidth; bf16, f16 or f32: expected all of these"), "{wrong}");
    let wrong = fail(2, &["plan", "--params", "8B", "--hardware", "8GB"]);
    assert!(wrong.contains("rtx3070") && wrong.contains("memory=8GB,bandwidth=…,bf16=…"), "{wrong}");
}

/// An 8 B model in bf16 does not fit 8 GB, and one in 4 bits does.
#[test]
fn cards_of_8_gb_are_hardware() {
    for card in ["rtx3070", "rtx4060", "RTX 4060 Ti", "5060"] {
        let report = json(&["plan", "--params", "8B", "--hardware", card, "--context", "4096", "--json"]);
        assert_eq!(report["hardware"]["memory"], 8.0 * 1_073_741_824.0, "{card}");
        assert_eq!(
            (&row(&report, "BF16")["fits"], &row(&report, "Q4_K_M")["fits"]),
            (&json!(false), &json!(true))
        );
    }
}

#[test]
fn a_memory_alone_is_that_of_this_processor_and_says_so() {
    let told = |more: &[&str]| {
        stderr(&mantissa(&[&["plan", "--params", "0.5B", "--memory", "8GB"][..], more].concat()))
    };
    assert!(
        told(&[]).contains("planned for this CPU") && told(&[]).contains("--hardware NAME"),
        "{}",
        told(&[])
    );
    assert!(!told(&["--hardware", "rtx4060"]).contains("planned for this CPU"));
}

/// Rows of 48 are no whole blocks of K-quants; llama.cpp reads GGUF alone.
#[test]
fn what_is_not_run_as_named_says_which_way() {
    let tiny = root().join("tests/data/tiny/llama2-gqa-tied");
    let shown = succeed(&["plan", text(&tiny), "--hardware", "h100"]);
    let fits = |shown: &str, name: &str| {
        let line = shown.lines().find(|line| line.starts_with(&format!("{name} "))).map(str::to_owned);
        line.unwrap_or_else(|| panic!("{name}: {shown}"))
    };
    assert!(fits(&shown, "Q4_K_M").contains(" falls back "), "{shown}");
    assert!(shown.contains("(falls back): ") && !fits(&shown, "Q4_K_M").contains("no kernel"), "{shown}");
    let shown = succeed(&["plan", "--params", "8B", "--hardware", "h100", "--for", "llama.cpp"]);
    assert!(fits(&shown, "BF16").contains(" other format "), "{shown}");
    assert!(shown.contains("not offered BF16 (other format): llama.cpp: expected one GGUF file"), "{shown}");
    let shown = succeed(&["plan", "--params", "8B", "--hardware", "a100"]);
    assert!(fits(&shown, "W8A8 FP8").contains(" no kernel "), "{shown}");
    let report = json(&["plan", text(&tiny), "--hardware", "h100", "--json"]);
    assert_eq!(row(&report, "Q4_K_M")["loads"]["refusal"], "falls-back");
}

#[test]
fn what_does_not_fit_is_split_with_the_host() {
    let question = ["plan", "--params", "70B", "--hardware", "rtx4090"];
    let text = succeed(&question);
    for part in [
        "-ngl",
        "two channels of DDR5-5600",
        "on the host",
        "changes     offload: llama.cpp runs ",
        "choose      nothing fits the GPU alone; split with the host: ",
        "make        mantissa quantize MODEL --recipe ",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let split = |host: &str| {
        let report = json(&["plan", "--params", "70B", "--hardware", "rtx4090", "--host", host, "--json"]);
        row(&report, "Q4_K_M")["offload"].clone()
    };
    let (slow, fast) = (split("45GB/s"), split("bandwidth=90GB/s,memory=16GB"));
    assert_eq!((&slow["gpu_layers"], &slow["fits"]), (&fast["gpu_layers"], &json!(true)));
    assert_eq!(fast["fits"], false, "{fast}");
    let rate = |split: &Value| split["tokens_per_s"][1].as_f64().unwrap();
    assert!(rate(&fast) > 1.7 * rate(&slow), "{fast} {slow}");
}

/// Metal gives the GPU two thirds of a Mac's 32 GB, and three quarters of its 64 GB.
#[test]
fn a_mac_keeps_a_part_of_its_memory() {
    let usable = |memory: &str| {
        let plan = ["plan", "--params", "8B", "--hardware", "m4-max", "--memory", memory];
        (succeed(&plan), json(&[&plan[..], &["--json"]].concat())["load"]["memory"].as_f64().unwrap())
    };
    let (text, small) = usable("32G");
    assert!((small / 1e9 - 64.0 / 3.0).abs() < 1e-6, "{small}");
    assert!(text.replace('\n', " ").contains("of which Metal lets the GPU use 21.3 GB"), "{text}");
    assert_eq!(usable("64G").1, 48e9);
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(words.contains("a Mac sold with 32 GB has 34.4 GB: --memory 32GiB"), "{text}");
    assert!(!usable("32GiB").0.contains("sold with"));
}

/// Llama 2's shape, which a size takes, ends at 4096 tokens; vLLM stores no int8 cache.
#[test]
fn contexts_and_caches_are_those_of_model_and_engine() {
    let plan = |more: &[&str]| {
        let text = succeed(&[&["plan", "--params", "7B"][..], more].concat());
        text.split_whitespace().collect::<Vec<_>>().join(" ")
    };
    let long = plan(&["--hardware", "m3", "--memory", "16G", "--context", "8k"]);
    assert!(long.contains("ends at 4096 tokens; 8192 are planned"), "{long}");
    assert!(!long.contains("or one of 4096"), "{long}");
    let longer = plan(&["--hardware", "m3", "--memory", "16G", "--context", "100k"]);
    assert!(longer.contains("ends at 4096 tokens") && !longer.contains("up to 4096 tokens"), "{longer}");
    assert!(!plan(&["--hardware", "m3", "--context", "4k"]).contains("the model of the assumed"));
    let of = |engine: &str| {
        let load = ["--devices", "4", "--context", "4k", "--batch", "256", "--hardware", "a100"];
        plan(&[&load[..], &["--for", engine]].concat())
    };
    let vllm = of("vllm");
    assert!(vllm.contains("values in f16") && !vllm.contains("in int8:"), "{vllm}");
}

#[test]
fn a_config_is_enough() {
    let temp = TempDir::new().unwrap();
    let config = temp.path().join("config.json");
    let value = json!({
        "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
        "num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 129280, "moe_intermediate_size": 2048,
        "max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "tie_word_embeddings": false,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
        "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "norm_topk_prob": true,
    });
    fs::write(&config, value.to_string()).unwrap();
    for model in [text(&config), text(temp.path())] {
        let report = json(&["plan", model, "--hardware", "h200", "--devices", "8", "--json"]);
        let parameters = report["parameters"].as_f64().unwrap();
        assert!((parameters / 671e9 - 1.0).abs() < 0.01, "{parameters}");
        assert!((report["active_parameters"].as_f64().unwrap() / 37.5e9 - 1.0).abs() < 0.03);
        assert!(report["recommendation"]["precision"].is_string(), "{}", report["recommendation"]);
    }
    // The embedded model, on this CPU.
    let report = json(&["plan", "demo", "--json", "--threads", "1"]);
    assert_eq!(report["hardware"]["name"], "this");
    assert!(report["hardware"]["bandwidth"].as_f64().unwrap() > 1e8);
    assert_eq!(report["load"]["context"], 512);
}

#[test]
fn a_report_of_bench_is_hardware() {
    let temp = TempDir::new().unwrap();
    let file = temp.path().join("bench.json");
    let bench = json!({"threads": 2, "level": "avx512-vnni", "machine_read_gb_per_s": 40.0, "machine_int8_gops": 900.0, "machine_bf16_gflops": 450.0});
    fs::write(&file, bench.to_string()).unwrap();
    let report = json(&["plan", "--params", "1B", "--hardware", text(&file), "--json"]);
    assert_eq!(report["hardware"]["bandwidth"], 40e9);
    let four = row(&report, "Q4_K_M")["decode"]["tokens_per_s"][1].as_f64().unwrap();
    let half = row(&report, "BF16")["decode"]["tokens_per_s"][1].as_f64().unwrap();
    assert!(four > 1.5 * half, "{four} {half}");
    fs::write(&file, "{}").unwrap();
    assert!(
        fail(2, &["plan", "--params", "1B", "--hardware", text(&file)]).contains("report of mantissa bench")
    );
}

/// The size of the host's memory alone says nothing of its speed.
#[test]
fn a_host_is_given_by_its_speed() {
    let line = fail(2, &["plan", "--params", "70B", "--hardware", "rtx4090", "--host", "64G"]);
    assert!(line.contains("the speed too, as in bandwidth=90GB/s,memory=64G"), "{line}");
}

#[test]
fn training_is_planned() {
    let full = json(&["plan", "--params", "Llama-2-7B", "--hardware", "a100", "--train", "--json"]);
    let rows = full["training"]["rows"].as_array().unwrap();
    let bytes = |name: &str| {
        let row = rows.iter().find(|row| row["name"] == name).unwrap();
        row["bytes"]["state"].as_f64().unwrap() / 1e9
    };
    assert!((bytes("fp32") - 107.8).abs() < 0.05 && (bytes("bf16-adam8") - 40.6).abs() < 0.05);
    let tuned = json(&["plan", "--params", "70B", "--hardware", "h100", "--train", "qlora", "--json"]);
    assert_eq!(tuned["training"]["recipe"], "qlora");
    // What is asked for is the answer where it fits, with the command for adapters.
    let asked = ["plan", "--params", "8B", "--hardware", "rtx4090", "--train"];
    for adapter in ["lora", "qlora"] {
        let shown = succeed(&[&asked[..], &[adapter]].concat());
        let measure = format!("mantissa finetune MODEL --adapter {adapter} ");
        assert!(shown.contains(&format!("choose      {adapter}:")) && shown.contains(&measure), "{shown}");
    }
    let shown = succeed(&[
        "plan",
        "--params",
        "70B",
        "--hardware",
        "h100",
        "--train",
        "--devices",
        "16",
        "--zero",
        "3",
    ]);
    assert!(shown.contains("on each of 16 devices, ZeRO-3") && shown.contains("choose      bf16"), "{shown}");
}

/// DeepSeek-V3 on 8 H200: every device holds the latents of all sequences, 70,272 bytes × 64 × 32,768 = 147.4 GB in f16.
#[test]
fn devices_share_a_model_in_several_ways() {
    let asked = [
        "plan",
        "--params",
        "DeepSeek-V3",
        "--hardware",
        "h200",
        "--devices",
        "8",
        "--batch",
        "64",
        "--context",
        "32k",
        "--kv",
        "f16",
    ];
    let gb = |more: &[&str], precision: &str| {
        let report = json(&[&asked[..], more, &["--json"]].concat());
        let row = row(&report, precision).clone();
        let kv = row["bytes"]["kv"].as_f64().unwrap() / 1e9;
        (row["fits"].as_bool().unwrap(), (10.0 * kv).round() / 10.0)
    };
    assert_eq!(gb(&[], "W8A8 FP8"), (false, 147.4));
    assert_eq!(gb(&["--parallel", "data"], "W8A8 FP8"), (true, 18.4));
    assert_eq!(gb(&["--parallel", "EP"], "W8A8 FP8").1, 18.4);
    assert_eq!(gb(&["--parallel", "pipeline"], "W8A8 FP8").1, 19.3);
    let shown = succeed(&asked);
    assert!(shown.contains("--parallel data: ") && shown.contains("18.4 GB KV cache in f16"), "{shown}");
    let error =
        fail(2, &["plan", "--params", "8B", "--hardware", "h100", "--devices", "2", "--parallel", "expert"]);
    assert!(error.contains("no routed experts"), "{error}");
    assert!(
        fail(2, &["plan", "--params", "8B", "--parallel", "sideways"])
            .contains("tensor, data, expert or pipeline")
    );
}

/// vLLM has no integer cache, transformers decodes GGUF: neither is named for what it does not run.
#[test]
fn engines_are_those_that_run_the_whole_choice() {
    let engines = |precision: &str, kv: &str| {
        let report = json(&["plan", "--params", "8B", "--hardware", "h100", "--kv", kv, "--json"]);
        row(&report, precision)["loads"]["engines"].to_string()
    };
    assert!(engines("W4A16 INT4", "fp8").contains("vLLM") && !engines("W4A16 INT4", "int8").contains("vLLM"));
    assert_eq!(engines("Q4_K_M", "int8"), "[\"llama.cpp\"]");
    assert!(!engines("Q4_K_M", "f16").contains("transformers"));
    let apple = succeed(&["plan", "--params", "8B", "--hardware", "m4-max", "--context", "4096"]);
    assert!(
        apple.contains("MLX 4-bit")
            && !succeed(&["plan", "--params", "8B", "--hardware", "h100"]).contains("MLX")
    );
}

#[test]
fn memory_and_kv_are_taken() {
    let load = ["plan", "--params", "8B", "--hardware", "h100", "--memory", "12G", "--kv", "fp8", "--json"];
    let report = json(&load);
    assert_eq!((&report["load"]["memory"], &report["load"]["kv"]["name"]), (&json!(12e9), &json!("fp8")));
    assert_eq!(row(&report, "BF16")["fits"], false);
    let none = succeed(&["plan", "--params", "405B", "--hardware", "t4"]);
    assert!(none.contains("choose      nothing fits") && none.contains("changes     devices: "), "{none}");
}

#[test]
fn what_cannot_be_planned_is_said() {
    for (arguments, part) in [
        (vec!["plan"], "--params"),
        (vec!["plan", "--params", "many"], "32B"),
        (vec!["plan", "--params", "8B", "--hardware", "h101"], "h100"),
        (vec!["plan", "no/such/folder"], "config.json"),
        (vec!["plan", "demo", "--context", "4096", "--hardware", "h100"], "--context 512"),
        (
            vec!["plan", "--params", "8B", "--hardware", "h100", "--kv", "fp3"],
            "f16, fp8, fp8-head, int8, nvfp4 or int4",
        ),
        (vec!["plan", "--params", "8B", "--hardware", "h100", "--prefill", "9000"], "--context"),
        (vec!["plan", "demo", "--params", "8B"], "--params"),
        (vec!["plan", "--params", "8B", "--hardware", "none.json"], "none.json"),
    ] {
        let error = fail(2, &arguments);
        assert!(error.contains(part), "{arguments:?}: {error}");
    }
}

#[test]
fn a_plan_has_a_page() {
    let temp = TempDir::new().unwrap();
    let page = temp.path().join("plan.html");
    let arguments =
        ["plan", "--params", "32B", "--hardware", "rtx4090", "--context", "32k", "--html", text(&page)];
    let shown = succeed(&arguments);
    assert!(shown.lines().last().unwrap().starts_with("page        "), "{shown}");
    let html = fs::read_to_string(&page).unwrap();
    for part in [
        "<h1>Plan: 32B on RTX 4090</h1>",
        "Choose Q4_K_M",
        "predicted",
        "<svg",
        "does not fit",
        "Not run as named",
    ] {
        assert!(html.contains(part), "{part}");
    }
    assert!(!html.contains("://") && !html.contains("<script"));
    // Another plan does not replace it unasked.
    let other = ["plan", "--params", "8B", "--hardware", "rtx4090", "--html", text(&page)];
    let output = mantissa(&other);
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    let training = temp.path().join("train.html");
    succeed(&["plan", "--params", "8B", "--hardware", "h100", "--train", "--html", text(&training)]);
    assert!(fs::read_to_string(&training).unwrap().contains("<h1>Training plan: 8B on H100 SXM</h1>"));
}

/// A quantized model is named, with how it runs as it stands; nothing is rounded a second time.
#[test]
fn a_quantized_model_is_at_hand() {
    let temp = TempDir::new().unwrap();
    let file = temp.path().join("m.gguf");
    succeed(&["quantize", "demo", "--recipe", "q8_0", "--out", text(&file), "--quiet"]);
    let said = |more: &[&str]| {
        let plan = ["plan", text(&file), "--hardware", "rtx4090", "--for", "llama.cpp"];
        let said = succeed(&[&plan[..], more].concat());
        said.split_whitespace().collect::<Vec<_>>().join(" ")
    };
    let four = said(&["--bits", "4"]);
    assert!(four.contains("at hand Q8_0, ") && four.contains(": fits as it stands, decodes "), "{four}");
    let makes =
        "make from the unquantized model, as rounding twice loses more: mantissa quantize SOURCE --recipe ";
    assert!(four.contains(makes), "{four}");
    let eight = said(&["--bits", "8"]);
    assert!(eight.contains("make nothing: it is the model at hand"), "{eight}");
    let tiny = "bandwidth=100GB/s,memory=1MB,bf16=10TFLOPS";
    let small = json(&["plan", text(&file), "--hardware", tiny, "--json"]);
    assert_eq!((&small["at_hand"]["name"], &small["at_hand"]["fits"]), (&json!("Q8_0"), &json!(false)));
    let folder = temp.path().join("folder");
    succeed(&["quantize", "demo", "--recipe", "nf4", "--out", text(&folder), "--quiet"]);
    let report = json(&["plan", text(&folder), "--hardware", "rtx4090", "--json"]);
    assert_eq!(report["at_hand"]["name"], "nf4 in bitsandbytes");
    assert!(json(&["plan", "demo", "--hardware", "rtx4090", "--json"])["at_hand"].is_null());
}
