//! Recipes whose rules give layers their own method: one run, with the weights of the runs of each method where inputs are
//! the same.
use std::ops::ControlFlow;
use std::path::Path;

use crate::common::{calibration, files, model};
use mantissa_quant::memory::peak_stage;
use mantissa_quant::{Options, Outcome, Plan, QuantError, Recipe, Start, dequantized_source, run};
use mantissa_store::Dtype;
use mantissa_store::convention::{ModelFiles, native};
use tempfile::TempDir;

fn plan(source: &ModelFiles, recipe: &str) -> Plan {
    let recipe = match recipe.contains('\n') {
        true => Recipe::from_toml("mixed.toml", recipe).unwrap(),
        false => Recipe::load(recipe).unwrap(),
    };
    let options = Options {
        threads: 1,
        container: Some(native::CONTAINER),
        calibration: Some(calibration()),
        max_shard_bytes: 30_000,
        ..Options::default()
    };
    Plan::new(source, recipe, options).unwrap()
}

/// Runs `plan` for `steps` steps, or to the end.
fn attempt(plan: &Plan, source: &ModelFiles, out: &Path, steps: usize) -> Result<Outcome, QuantError> {
    let mut left = steps;
    let out = mantissa_store::Output::of_job(out, mantissa_store::JobKey::of("test"), true);
    run(plan, source, &out, Start::Resume, &mut |_| {
        left = left.saturating_sub(1);
        if left == 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    })
}

fn quantized(source: &ModelFiles, recipe: &str, out: &Path) -> Outcome {
    attempt(&plan(source, recipe), source, out, usize::MAX).unwrap()
}

/// Returns names and bytes of the tensors of the modules whose name contains `part`.
fn tensors(dir: &Path, part: &str) -> Vec<(String, Vec<u8>)> {
    let files = ModelFiles::open(dir).unwrap();
    let of_part = files.checkpoint().tensors().filter(|meta| meta.name.contains(part));
    let mut all: Vec<_> = of_part
        .map(|meta| {
            let mut bytes = vec![0; usize::try_from(meta.len).unwrap()];
            files.checkpoint().read_range(&meta.name, 0, &mut bytes).unwrap();
            (meta.name.clone(), bytes)
        })
        .collect();
    all.sort();
    assert!(!all.is_empty(), "{part}");
    all
}

const MIXED: &str = r#"
method = "gptaq"
weights = "int4-g32"
[[layers]]
modules = ["*.0.self_attn.v_proj", "*.0.mlp.up_proj", "*.1.self_attn.o_proj"]
method = "rtn"
weights = "int8-g32"
[[layers]]
modules = ["*.0.self_attn.k_proj", "*.0.mlp.down_proj"]
method = "hqq"
weights = "int4-g32"
[[layers]]
modules = ["*.1.mlp.down_proj"]
method = "qtip"
weights = "trellis3"
"#;

#[test]
fn modules_with_the_same_input_are_those_of_the_uniform_runs() {
    let temp = TempDir::new().unwrap();
    let source = ModelFiles::open(&model(temp.path(), Dtype::BF16, 6)).unwrap();
    let at = |name: &str| temp.path().join(name);
    let mixed = quantized(&source, MIXED, &at("mixed"));
    quantized(&source, "gptaq-int4-g32", &at("gptaq"));
    quantized(&source, "rtn-int8-g32", &at("rtn"));
    quantized(&source, "hqq-int4-g32", &at("hqq"));
    let same = |part: &str, uniform: &str| {
        assert_eq!(tensors(&at("mixed"), part), tensors(&at(uniform), part), "{part}");
    };
    // Rounding depends on the weight alone; the first input is that of the unquantized model, in one pass for three methods.
    for rounded in ["0.self_attn.v_proj", "0.mlp.up_proj", "1.self_attn.o_proj"] {
        same(rounded, "rtn");
    }
    same("0.self_attn.q_proj", "gptaq");
    same("0.self_attn.k_proj", "hqq");
    // Behind other weights the input differs.
    assert_ne!(tensors(&at("mixed"), "0.self_attn.o_proj"), tensors(&at("gptaq"), "0.self_attn.o_proj"));
    let quality = mixed.quality;
    assert_eq!(quality.method, "gptaq, rtn, hqq, qtip");
    let of = |module: &str| {
        let layer = quality.layers.iter().find(|layer| layer.module.ends_with(module)).unwrap();
        (layer.method.clone(), layer.fallback.is_some())
    };
    assert_eq!(of("0.self_attn.v_proj"), ("rtn".to_owned(), false));
    assert_eq!(of("1.mlp.down_proj"), ("qtip".to_owned(), false));
    assert!(["hqq", "rtn"].contains(&of("0.self_attn.k_proj").0.as_str()));
    assert!(["gptaq", "rtn"].contains(&of("1.self_attn.q_proj").0.as_str()));
}

/// The solution of a layer behind rounded ones equals that of a model that holds their values.
#[test]
fn calibration_runs_through_weights_that_are_rounded() {
    let temp = TempDir::new().unwrap();
    let source = ModelFiles::open(&model(temp.path(), Dtype::F32, 7)).unwrap();
    let at = |name: &str| temp.path().join(name);
    let rule = "[[layers]]\nmodules = [\"*.layers.0.*\"]\nweights = \"int4-g32\"\nmethod = \"rtn\"\n";
    let rounded = at("rounded");
    quantized(&source, "weights = \"int4-g32\"\nkeep = [\"*.layers.1.*\"]\n", &rounded);
    let between = dequantized_source(ModelFiles::open(&rounded).unwrap()).unwrap();
    for method in ["gptq", "adaround"] {
        let head = format!("method = \"{method}\"\nweights = \"int4-g32\"\n");
        quantized(&source, &format!("{head}{rule}"), &at(method));
        let rest = format!("{method}-rest");
        quantized(&between, &format!("{head}keep = [\"*.layers.0.*\"]\n"), &at(&rest));
        assert_eq!(tensors(&at(method), "layers.1."), tensors(&at(&rest), "layers.1."), "{method}");
    }
}

#[test]
fn an_interrupted_run_resumes_to_the_same_bytes() {
    let temp = TempDir::new().unwrap();
    let source = ModelFiles::open(&model(temp.path(), Dtype::BF16, 8)).unwrap();
    let learned = "method = \"gptq\"\nweights = \"int4-g32\"\n[[layers]]\nmodules = [\"*.layers.1.*\"]\nmethod = \"autoround\"\nweights = \
                   \"int3-g32\"\n[autoround]\niterations = 4\n";
    for (name, text) in [("mixed", MIXED), ("learned", learned)] {
        let plan = plan(&source, text);
        let (expected, out) = (temp.path().join(format!("{name}-expected")), temp.path().join(name));
        attempt(&plan, &source, &expected, usize::MAX).unwrap();
        let mut interruptions = 0;
        for steps in (3..).step_by(4) {
            match attempt(&plan, &source, &out, steps) {
                Ok(_) => break,
                Err(error) => assert!(error.is_interruption(), "{error}"),
            }
            interruptions += 1;
        }
        assert!(interruptions > 8, "{interruptions}");
        assert_eq!(files(&out), files(&expected), "{name}");
    }
}

fn refused(source: &ModelFiles, text: &str) -> String {
    let recipe = Recipe::from_toml("mixed.toml", text).unwrap();
    let options = Options { calibration: Some(calibration()), ..Options::default() };
    Plan::new(source, recipe, options).unwrap_err().to_string()
}

#[test]
fn a_plan_has_a_method_for_each_layer() {
    let temp = TempDir::new().unwrap();
    let source = ModelFiles::open(&model(temp.path(), Dtype::BF16, 9)).unwrap();
    let rule = |modules: &str, method: &str| {
        format!("[[layers]]\nmodules = [\"{modules}\"]\nmethod = \"{method}\"\nweights = \"int8-g32\"\n")
    };
    let recipe = |rules: &[String]| format!("method = \"gptq\"\nweights = \"int4-g32\"\n{}", rules.concat());
    let learned = rule("*.layers.1.*", "autoround");
    let mixed = plan(&source, &recipe(&[learned.clone(), rule("*.q_proj", "hqq")]));
    for (info, _) in mixed.quantized() {
        let expected = match (info.layer, info.module.ends_with("q_proj")) {
            (1, _) => "autoround",
            (_, true) => "hqq",
            _ => "gptq",
        };
        assert_eq!(mixed.method_of(info).unwrap().recipe_name(), expected, "{}", info.module);
    }
    assert!(peak_stage(&mixed, true).bytes() > 0);
    // What learns a whole decoder layer takes all of it.
    let part = refused(&source, &recipe(&[rule("*.q_proj", "hqq"), learned.clone()]));
    let parts = [
        "mixed.toml: decoder layer 1",
        "expected \"autoround\" for all",
        "got \"hqq\" for model.layers.1.",
        "fix: ",
    ];
    assert!(parts.iter().all(|part_of| part.contains(part_of)), "{part}");
    let two = refused(&source, &recipe(&[learned, rule("*.layers.0.*", "brecq")]));
    assert!(two.contains("at most one method") && two.contains("\"autoround\" and \"brecq\""), "{two}");
    let head = refused(&source, &recipe(&[rule("lm_head", "hqq")]));
    assert!(head.contains("lm_head: expected none") && head.contains("rounded to nearest"), "{head}");
}
