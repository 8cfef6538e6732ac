use mantissa_num::Scheme;

use super::*;

pub(super) fn stored(scheme: &str) -> Stored {
    let format = scheme.parse::<Scheme>().unwrap().format;
    Stored { format, outer: None, input: None, act_order: false, multiplied: false }
}

/// One layer of a model with 4096 columns and an MLP of 11008, as in Llama 2 7B.
pub(super) fn subject(convention: &str, scheme: &str) -> Subject {
    let linear = |name: &str, rows, cols| Linear {
        module: format!("model.layers.0.{name}"),
        rows,
        cols,
        stored: Some(stored(scheme)),
    };
    Subject {
        planned: false,
        convention: convention.to_owned(),
        dtype: Some("bfloat16".to_owned()),
        shape: Shape { heads: 32, kv_heads: 8 },
        linears: vec![
            linear("self_attn.q_proj", 4096, 4096),
            linear("self_attn.k_proj", 1024, 4096),
            linear("self_attn.v_proj", 1024, 4096),
            linear("self_attn.o_proj", 4096, 4096),
            linear("mlp.gate_proj", 11008, 4096),
            linear("mlp.up_proj", 11008, 4096),
            linear("mlp.down_proj", 4096, 11008),
        ],
        examined: Vec::new(),
        observations: Vec::new(),
    }
}

fn target(text: &str) -> EngineTarget {
    EngineTarget::parse(text).unwrap()
}

/// Rules that a subject breaks, with the tensor of each rule's first finding.
fn broken(subject: &Subject, text: &str) -> Vec<(&'static str, String)> {
    let mut found: Vec<_> =
        lint(subject, &target(text)).findings.into_iter().map(|f| (f.rule, f.tensor)).collect();
    found.dedup_by_key(|(rule, _)| *rule);
    found
}

#[test]
fn targets_are_parsed_and_printed() {
    for text in ["vllm", "vllm:tp=4", "vllm:tp=2,gpu=h100", "llama.cpp", "mlx", "tensorrt-llm:gpu=b200"] {
        assert_eq!(target(text).to_string(), text);
    }
    assert_eq!(target("sglang:gpu=sm90").gpu.map(|gpu| gpu.name), Some("h100"));
    let typed = [
        ("vllm:gpu=4090", "vllm:gpu=rtx4090"),
        ("VLLM:gpu=H100", "vllm:gpu=h100"),
        ("llama-cpp", "llama.cpp"),
        ("exllama", "exllamav2"),
        ("LMStudio", "llama.cpp"),
        ("koboldcpp", "llama.cpp"),
    ];
    for (text, name) in typed {
        assert_eq!(target(text).to_string(), name);
    }
    // mantissa reads whatever it writes.
    assert_eq!(broken(&subject("native", "int3-g32"), "mantissa"), []);
    for (text, part) in [
        (
            "vlm",
            "engine: expected vllm, mlx, sglang, llama.cpp or lmdeploy (mantissa help engines lists all), got \"vlm\"",
        ),
        ("vllm:tp=0", "tp: expected 1 to 1024, got \"0\""),
        ("vllm:gpu=h1000", "gpu: expected h100, "),
        ("vllm:gpu=h1000", "(mantissa help gpus lists all), or a compute capability such as sm90"),
        ("llama.cpp:tp=2", "option: expected gpu=NAME, got \"tp=2\""),
        ("vllm:pp=2", "got \"pp=2\""),
        (
            "vllm,gpu=h100",
            "engine: expected a colon before the options: vllm:gpu=h100, got \"vllm,gpu=h100\"",
        ),
        ("vllm gpu=h100,tp=2", "a colon before the options: vllm:gpu=h100,tp=2, got"),
    ] {
        let message = EngineTarget::parse(text).unwrap_err().to_string();
        assert!(message.contains(part), "{message}");
    }
}

#[test]
fn a_sound_model_breaks_no_rule() {
    assert_eq!(broken(&subject("compressed-tensors", "int4-g128"), "vllm:tp=2,gpu=a100"), []);
    assert_eq!(broken(&subject("compressed-tensors", "int8-channel"), "vllm:tp=4,gpu=h100"), []);
    assert_eq!(broken(&subject("modelopt", "nvfp4:torchao"), "vllm:tp=2,gpu=b200"), []);
    assert_eq!(broken(&subject("gguf", "q4_k"), "llama.cpp"), []);
    assert_eq!(broken(&subject("awq", "int4-g128-asym"), "lmdeploy:tp=2"), []);
    assert_eq!(broken(&subject("mlx", "int4-g64-asym"), "mlx"), []);
}

#[test]
fn groups_must_divide_what_a_gpu_has() {
    // 11008 / 4 = 2752 is 21.5 groups of 128; / 2 it is 43.
    let model = subject("compressed-tensors", "int4-g128");
    let report = lint(&model, &target("vllm:tp=4"));
    let [finding] = report.findings.as_slice() else { panic!("{report:?}") };
    assert_eq!((finding.rule, finding.severity), ("tp-group", Severity::Refused));
    assert_eq!(finding.tensor, "model.layers.0.mlp.down_proj");
    assert_eq!(finding.found, "2752 columns of 11008 on 4 GPUs, groups of 128");
    assert!(report.fails() && finding.source.contains("vllm 0.33.0"));
    assert_eq!(broken(&subject("compressed-tensors", "int4-g64"), "vllm:tp=4"), []);
    // The same for a planned model.
    let planned = Subject { planned: true, ..model };
    assert!(lint(&planned, &target("sglang:tp=4")).fails());
}

#[test]
fn tiles_must_divide_rows_and_columns() {
    let mut model = subject("deepseek-fp8", "fp8-e4m3-t128x128");
    let input = Input { format: stored("fp8-e4m3-g128").format, is_static: false, scale: None };
    model.linears.iter_mut().for_each(|l| l.stored.as_mut().unwrap().input = Some(input.clone()));
    assert_eq!(broken(&model, "vllm:tp=2"), []);
    // 11008 / 4 = 2752 is not a multiple of 128, neither for rows nor for columns.
    let found = lint(&model, &target("vllm:tp=4")).findings;
    let modules: Vec<_> = found.iter().map(|f| f.tensor.rsplit('.').next().unwrap()).collect();
    assert_eq!(modules, ["gate_proj", "up_proj", "down_proj"]);
    // On one GPU, all layers of a fused matrix except the last must be whole tiles.
    model.linears.iter_mut().filter(|l| l.module.contains("self_attn")).for_each(|l| l.rows = 100);
    let found = lint(&model, &target("vllm")).findings;
    let modules: Vec<_> = found.iter().map(|f| f.tensor.rsplit('.').next().unwrap()).collect();
    assert_eq!(modules, ["q_proj", "k_proj"]);
}

#[test]
fn heads_and_widths_are_dealt_out() {
    let mut model = subject("dense", "int4-g128");
    model.linears.iter_mut().for_each(|linear| linear.stored = None);
    assert_eq!(broken(&model, "vllm:tp=16"), []);
    assert_eq!(broken(&model, "vllm:tp=3")[0].0, "tp-heads");
    model.shape.kv_heads = 6;
    assert_eq!(broken(&model, "sglang:tp=4"), [("tp-heads", "num_key_value_heads".to_owned())]);
}

#[test]
fn widths_of_integers_have_kernels() {
    assert_eq!(broken(&subject("compressed-tensors", "int3-g128"), "sglang")[0].0, "sglang-bits");
    assert_eq!(broken(&subject("compressed-tensors", "int8-g128-asym"), "sglang")[0].0, "sglang-bits");
    assert_eq!(broken(&subject("gptq", "int4-g128-asym"), "vllm")[0].0, "vllm-gptq-bits");
    assert_eq!(broken(&subject("gptq", "int3-g128"), "exllamav2")[0].0, "exllamav2-bits");
    assert_eq!(broken(&subject("awq", "int4-g64-asym"), "lmdeploy")[0].0, "lmdeploy-groups");
    assert_eq!(broken(&subject("compressed-tensors", "int4-g64"), "mlx")[0].0, "mlx-convention");
    let mut model = subject("compressed-tensors", "int4-g8");
    assert_eq!(broken(&model, "vllm")[0].0, "vllm-ct-groups");
    model.dtype = Some("float16".to_owned());
    assert_eq!(broken(&model, "vllm"), []);
}

#[test]
fn act_order_needs_whole_tiles_of_marlin() {
    let mut model = subject("gptq", "int4-g128");
    model.linears.iter_mut().for_each(|linear| linear.stored.as_mut().unwrap().act_order = true);
    assert_eq!(broken(&model, "sglang:tp=2"), []);
    assert_eq!(broken(&model, "lmdeploy")[0].0, "lmdeploy-act-order");
    model.linears[6].cols = 11072;
    assert!(broken(&model, "sglang").iter().any(|(rule, _)| *rule == "act-order-tp"));
}

#[test]
fn joined_layers_are_stored_alike_and_share_scales() {
    let mut model = subject("compressed-tensors", "nvfp4:ct");
    model.linears.iter_mut().for_each(|linear| linear.stored.as_mut().unwrap().outer = Some(100.0));
    assert_eq!(broken(&model, "vllm"), []);
    model.linears[5].stored.as_mut().unwrap().outer = Some(101.0);
    let report = lint(&model, &target("vllm"));
    let [finding] = report.findings.as_slice() else { panic!("{report:?}") };
    assert_eq!((finding.rule, finding.severity), ("nvfp4-global", Severity::Wrong));
    assert_eq!(finding.tensor, "model.layers.0.mlp.up_proj");
    assert!(finding.found.contains("1e2 in model.layers.0.mlp.gate_proj"), "{}", finding.found);
    model.linears[1].stored = None;
    let found = broken(&model, "vllm");
    assert_eq!(found[0], ("fused-alike", "model.layers.0.self_attn.k_proj".to_owned()));
    // Another group size is another scheme.
    let mut model = subject("compressed-tensors", "int4-g128");
    model.linears[2].stored = Some(stored("int4-g32"));
    assert_eq!(broken(&model, "sglang"), [("fused-alike", "model.layers.0.self_attn.v_proj".to_owned())]);
    // So are block types, except in GGUF, whose readers decode each part in its own type.
    let mut model = subject("gguf", "q4_k");
    model.linears[2].stored = Some(stored("q6_k"));
    let fused = |model: &Subject| {
        let findings = lint(model, &target("vllm")).findings;
        findings.into_iter().find(|finding| finding.rule == "fused-alike").map(|finding| finding.found)
    };
    assert_eq!(fused(&model), None);
    model.convention = "native".to_owned();
    let found = "a block type (q6_k), but model.layers.0.self_attn.q_proj has a block type (q4_k)";
    assert_eq!(fused(&model).as_deref(), Some(found));
}

#[test]
fn the_gpu_decides_where_it_is_given() {
    let model = subject("compressed-tensors", "fp8-e4m3-channel");
    let open = lint(&model, &target("vllm"));
    assert!(
        open.findings.is_empty() && open.unchecked.iter().any(|one| one.to_string().contains("gpu=h100")),
        "{open:?}"
    );
    // Rules about kinds of weights that the model does not have hold without a GPU.
    let rules: Vec<_> = open.unchecked.iter().filter(|one| one.why.contains("GPU")).map(|o| o.rule).collect();
    assert_eq!(rules, ["fp8-gpu"]);
    let found = lint(&model, &target("vllm:gpu=a100"));
    assert_eq!(found.findings[0].rule, "fp8-gpu");
    assert!(!found.fails() && found.findings[0].found.contains("6 more layers on a100 (SM 8.0)"));
    assert!(lint(&model, &target("tensorrt-llm:gpu=a100")).fails());
    let mut int8 = subject("compressed-tensors", "int8-channel");
    let input =
        Input { format: "int8-token".parse::<Scheme>().unwrap().format, is_static: false, scale: None };
    int8.linears.iter_mut().for_each(|l| l.stored.as_mut().unwrap().input = Some(input.clone()));
    assert_eq!(broken(&int8, "vllm:gpu=b200")[0].0, "int8-gpu");
    assert_eq!(broken(&int8, "vllm:gpu=h100"), []);
}

#[test]
fn what_was_seen_is_told_and_what_was_not_looked_for_is_said() {
    let mut model = subject("gguf", "q8_0");
    let report = lint(&model, &target("llama.cpp"));
    assert!(report.findings.is_empty());
    assert!(report.unchecked.iter().any(|one| {
        one.rule == "gguf-row-order" && one.fix.as_ref().is_some_and(|fix| fix.contains("--reference"))
    }));
    model.examined = vec![Observed::RowOrder];
    model.observations.push(Observation {
        what: Observed::RowOrder,
        tensor: "blk.0.attn_q.weight".into(),
        found: "the order of the source".into(),
    });
    assert_eq!(broken(&model, "llama.cpp"), [("gguf-row-order", "blk.0.attn_q.weight".to_owned())]);
    assert_eq!(broken(&subject("exl2", "int4-g128"), "vllm")[0].0, "vllm-convention");
}

#[test]
fn every_rule_is_told_apart_sourced_and_reachable() {
    let mut ids: Vec<_> = every_rule().map(|rule| rule.id).collect();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), every_rule().count());
    for rule in every_rule() {
        assert!(rule.source.len() > 8 && !rule.fix.is_empty(), "{}", rule.id);
        assert!(!rule.requires.ends_with('.') && !rule.fix.ends_with('.'), "{}", rule.id);
    }
}

#[test]
fn loads_in_follows_from_the_rules() {
    let names = |convention: &str, scheme: &str, input: Option<&str>| {
        let mut subject = subject(convention, scheme);
        for linear in &mut subject.linears {
            let input =
                input.map(|text| Input { format: stored(text).format, is_static: false, scale: None });
            linear.stored = linear.stored.take().map(|stored| Stored { input, ..stored });
        }
        loads_in(&subject)
    };
    let w4a16 = names("compressed-tensors", "int4-g128", None);
    assert_eq!(w4a16, ["vLLM", "SGLang", "LMDeploy", "transformers", "mantissa"]);
    // from_pretrained fails at the size of weight_zero_point.
    assert!(!names("compressed-tensors", "int4-g128-asym", None).contains(&"transformers"));
    // TensorRT-LLM takes NVFP4 weights only with NVFP4 inputs; mlx-lm has no name for the packed tensors.
    let weight_only = names("compressed-tensors", "nvfp4", None);
    assert_eq!(weight_only, ["vLLM", "SGLang", "transformers", "mantissa"]);
    let both = names("compressed-tensors", "nvfp4", Some("nvfp4"));
    assert!(both.contains(&"SGLang") && both.contains(&"TensorRT-LLM"), "{both:?}");
    assert!(!names("compressed-tensors", "mxfp4", None).contains(&"SGLang"));
    assert!(!names("compressed-tensors", "int4-g32", Some("int8-channel")).contains(&"LMDeploy"));
    assert!(names("gptq", "int4-g128", None).contains(&"GPTQModel"));
    assert_eq!(names("native", "int4-g128", None), ["mantissa"]);
}

/// A cell is marked only where a test loaded weights of its kind.
#[test]
fn cells_say_who_loaded_them() {
    let of = |convention: &str, scheme: &str, name: &str| {
        cells(&subject(convention, scheme))
            .into_iter()
            .find(|cell| cell.name == name)
            .map(|cell| cell.evidence)
    };
    let loaded = of("gguf", "q4_k", "llama.cpp").unwrap();
    assert!(
        matches!(loaded, Evidence::Loaded(load) if load.script == "tests/interop/loads.py"),
        "{loaded:?}"
    );
    let loaded = of("compressed-tensors", "int4-g128", "vLLM").unwrap();
    assert!(matches!(loaded, Evidence::Loaded(load) if load.version.contains("CPU")), "{loaded:?}");
    let source = of("compressed-tensors", "int8-channel", "vLLM").unwrap();
    assert!(matches!(source, Evidence::Source { source } if source.contains("vllm 0.33.0")), "{source:?}");
    assert_eq!(of("compressed-tensors", "int4-g128", "mantissa"), Some(Evidence::Own));
    // Zero points are another kind of weight than the one that was loaded.
    assert_eq!(of("compressed-tensors", "int4-g128-asym", "transformers"), None);
}

#[test]
fn load_tests_are_of_programs_and_schemes_that_exist() {
    let known: Vec<_> = ENGINES.iter().map(|engine| engine.title).collect();
    for load in LOADS {
        let listed = known.contains(&load.reader) || READERS.iter().any(|reader| reader.name == load.reader);
        assert!(listed && load.version.contains('.') && load.date.len() == 10, "{load:?}");
        for scheme in load.schemes {
            let (weights, inputs) = scheme.split_once('+').unwrap_or((scheme, ""));
            assert!(mantissa_num::parse_weight(weights).is_ok(), "{scheme}");
            assert!(inputs.is_empty() || mantissa_num::parse_activation(inputs).is_ok(), "{scheme}");
        }
    }
}
