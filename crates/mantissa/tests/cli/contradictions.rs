//! Models whose configuration and tensors differ: the tensors are believed, and the difference is said.

use std::fs;
use std::path::{Path, PathBuf};

use mantissa_store::{Dtype, Gguf, SafeTensors, SafetensorsWriter, TensorSpec};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::{File, fail, json, le, mantissa, root, stderr, succeed, text, values};

/// Tensor with its dtype, shape and bytes.
type Tensor = (String, Dtype, Vec<usize>, Vec<u8>);

/// A model folder that a test changes.
pub struct Model {
    temp: TempDir,
    pub dir: PathBuf,
}

impl Model {
    /// Copies the tiny model `name`.
    pub fn tiny(name: &str) -> Self {
        Self::copy(&root().join("tests/data/tiny").join(name))
    }

    fn copy(from: &Path) -> Self {
        let temp = TempDir::new().unwrap();
        let dir = temp.path().join("model");
        fs::create_dir(&dir).unwrap();
        for entry in fs::read_dir(from).unwrap() {
            let path = entry.unwrap().path();
            fs::copy(&path, dir.join(path.file_name().unwrap())).unwrap();
        }
        fs::write(temp.path().join("w.json"), "[[1, 5, 9, 33, 7, 21, 40, 3, 11, 60, 2, 17]]").unwrap();
        Model { temp, dir }
    }

    pub fn path(&self) -> &str {
        text(&self.dir)
    }

    /// Returns the path of a file beside the model.
    fn beside(&self, name: &str) -> String {
        text(&self.temp.path().join(name)).to_owned()
    }

    pub fn config(&self, change: impl FnOnce(&mut Value)) -> &Self {
        let path = self.dir.join("config.json");
        let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        change(&mut config);
        fs::write(path, config.to_string()).unwrap();
        self
    }

    fn read_config(path: &str) -> Value {
        serde_json::from_slice(&fs::read(Path::new(path).join("config.json")).unwrap()).unwrap()
    }

    /// Rewrites the weights.
    fn tensors(&self, change: impl FnOnce(&mut Vec<Tensor>)) -> &Self {
        let path = self.dir.join("model.safetensors");
        let file = SafeTensors::open(&path).unwrap();
        let read = |meta: &mantissa_store::TensorMeta| {
            (meta.name.clone(), meta.dtype, meta.shape.clone(), file.read(meta).unwrap())
        };
        let mut all: Vec<Tensor> = file.tensors().iter().map(read).collect();
        change(&mut all);
        let specs = all.iter().map(|(name, dtype, shape, _)| TensorSpec::new(name, *dtype, shape.clone()));
        let again = self.dir.join("again");
        let mut writer = SafetensorsWriter::create(&again, specs.collect(), Default::default()).unwrap();
        all.iter().for_each(|(name, .., bytes)| writer.write(name, bytes).unwrap());
        writer.finish().unwrap();
        fs::rename(again, path).unwrap();
        self
    }

    /// Adds a head of its own, or one that repeats the embedding.
    fn head(&self, name: &str, embedding: &str, own: bool) -> &Self {
        self.tensors(|all| {
            let (_, dtype, shape, bytes) = all.iter().find(|tensor| tensor.0 == embedding).unwrap().clone();
            let bytes = if own { le(&values(shape.iter().product())) } else { bytes };
            all.push((name.to_owned(), dtype, shape, bytes));
        })
    }

    /// Returns the mean NLL under the reference engine.
    fn nll_of(&self, model: &str, engine: &str) -> f64 {
        let run =
            ["eval", model, "--tokens", &self.beside("w.json"), "--engine", engine, "--json", "--quiet"];
        json(&run)["nll"].as_f64().unwrap()
    }

    fn nll(&self) -> f64 {
        self.nll_of(self.path(), "reference")
    }
}

const HEAD: &str = "lm_head.weight";
const EMBEDDING: &str = "model.embed_tokens.weight";

/// Asserts that two values are equal to a part in 10⁵.
fn near(a: f64, b: f64) {
    assert!((a - b).abs() < 1e-5 * a.abs().max(1.0), "{a} {b}");
}

fn tied(flag: impl Into<Value>) -> impl FnOnce(&mut Value) {
    let flag = flag.into();
    |config| config["tie_word_embeddings"] = flag
}

#[test]
fn a_head_that_differs_is_used_whatever_the_config_says() {
    let model = Model::tiny("llama2-gqa-tied");
    let tied_nll = model.nll();
    model.head(HEAD, EMBEDDING, true).config(tied(false));
    let own = model.nll();
    assert!((own - tied_nll).abs() > 0.1, "{own} {tied_nll}");
    model.config(tied(true));
    near(model.nll(), own);
    let fast = model.nll_of(model.path(), "fast");
    assert!((fast - own).abs() < 0.02 * own, "{fast} {own}");
    let said = stderr(&mantissa(&["eval", model.path(), "--tokens", &model.beside("w.json")]));
    assert!(said.contains("tie_word_embeddings: expected false, got true"), "{said}");
    let shown = succeed(&["inspect", model.path()]);
    let shown = shown.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(
        shown.contains("own head") && shown.contains("lm_head differs from model.embed_tokens"),
        "{shown}"
    );
}

#[test]
fn outputs_state_the_head_that_they_have() {
    let model = Model::tiny("llama2-gqa-tied");
    model.head(HEAD, EMBEDDING, true);
    let own = model.nll();
    let gguf = model.beside("m.gguf");
    succeed(&["convert", model.path(), "--format", "gguf", "--out", &gguf, "--quiet"]);
    assert!(Gguf::open(Path::new(&gguf)).unwrap().get("output.weight").is_some());
    near(model.nll_of(&gguf, "reference"), own);
    for (recipe, format) in
        [("rtn-int8-channel", "compressed-tensors"), ("rtn-int8-g8", "gptq"), ("nf4", "bitsandbytes")]
    {
        let out = model.beside(format);
        succeed(&[
            "quantize",
            model.path(),
            "--recipe",
            recipe,
            "--format",
            format,
            "--out",
            &out,
            "--quiet",
        ]);
        assert_eq!(Model::read_config(&out)["tie_word_embeddings"], json!(false), "{format}");
        assert!(File::open(&Path::new(&out).join("model.safetensors")).has(HEAD));
        succeed(&["verify", &out, "--reference", model.path(), "--quiet"]);
        let shown = succeed(&["inspect", &out]);
        assert!(shown.contains("own head") && !shown.contains("expected false, got true"), "{shown}");
    }
    // A head that is quantized is as much of its own.
    let coded = model.beside("coded");
    let run =
        ["quantize", model.path(), "--recipe", "rtn-int8-channel", "--head", "int8-channel", "--out", &coded];
    succeed(&[&run[..], &["--quiet"]].concat());
    let quantized = model.nll_of(&coded, "reference");
    let path = Path::new(&coded).join("config.json");
    let config = fs::read_to_string(&path).unwrap();
    fs::write(&path, config.replace("\"tie_word_embeddings\": false", "\"tie_word_embeddings\": true"))
        .unwrap();
    near(model.nll_of(&coded, "reference"), quantized);
    assert!((quantized - own).abs() < 0.05, "{quantized} {own}");
}

#[test]
fn a_head_that_repeats_the_embedding_stays_tied() {
    let model = Model::tiny("llama2-gqa-tied");
    let nll = model.nll();
    model.head(HEAD, EMBEDDING, false);
    near(model.nll(), nll);
    let shown = succeed(&["inspect", model.path()]);
    assert!(shown.contains("tied head") && !shown.contains("differs from"), "{shown}");
    let gguf = model.beside("m.gguf");
    succeed(&["convert", model.path(), "--format", "gguf", "--out", &gguf, "--quiet"]);
    assert!(Gguf::open(Path::new(&gguf)).unwrap().get("output.weight").is_none());
    // A copy beside a quantized embedding would be another head.
    let out = model.beside("out");
    let run = ["quantize", model.path(), "--recipe", "rtn-int8-channel", "--embeddings", "int8-channel"];
    succeed(&[&run[..], &["--format", "native", "--out", &out, "--quiet"]].concat());
    assert!(!File::open(&Path::new(&out).join("model.safetensors")).has(HEAD));
    assert!(succeed(&["inspect", &out]).contains("tied head"));
    // The same values in another dtype are the same head.
    model.tensors(|all| {
        let head = all.iter_mut().find(|tensor| tensor.0 == HEAD).unwrap();
        let doubles = head.3.as_chunks::<4>().0.iter().map(|bytes| f64::from(f32::from_le_bytes(*bytes)));
        (head.1, head.3) = (Dtype::F64, doubles.flat_map(f64::to_le_bytes).collect());
    });
    assert!(succeed(&["inspect", model.path()]).contains("tied head"));
}

#[test]
fn an_untied_output_of_a_repeated_head_is_whole() {
    let model = Model::tiny("llama2-gqa-tied");
    model.head(HEAD, EMBEDDING, false);
    let out = model.beside("out");
    let run = ["quantize", model.path(), "--recipe", "rtn-int8-channel", "--untie", "--out", &out, "--quiet"];
    succeed(&run);
    assert!(File::open(&Path::new(&out).join("model.safetensors")).has(HEAD));
    assert_eq!(Model::read_config(&out)["tie_word_embeddings"], json!(false));
    succeed(&["verify", &out, "--reference", model.path(), "--quiet"]);
}

#[test]
fn a_tied_head_stands_for_an_embedding_that_is_not_stored() {
    let model = Model::tiny("llama2-gqa-tied");
    let nll = model.nll();
    model.tensors(|all| {
        all.iter_mut().filter(|tensor| tensor.0 == EMBEDDING).for_each(|tensor| tensor.0 = HEAD.to_owned());
    });
    near(model.nll(), nll);
    let inspected = mantissa(&["inspect", model.path()]);
    assert!(String::from_utf8_lossy(&inspected.stdout).contains("tied head"));
    assert!(stderr(&inspected).contains("the tied lm_head is read in its place"), "{}", stderr(&inspected));
    let gguf = model.beside("m.gguf");
    succeed(&["convert", model.path(), "--format", "gguf", "--out", &gguf, "--quiet"]);
    near(model.nll_of(&gguf, "reference"), nll);
    let out = model.beside("out");
    succeed(&["quantize", model.path(), "--recipe", "rtn-int8-channel", "--out", &out, "--quiet"]);
    let written = File::open(&Path::new(&out).join("model.safetensors"));
    assert!(written.has(EMBEDDING) && !written.has(HEAD));
    model.config(tied(false));
    assert!(fail(2, &["eval", model.path(), "--tokens", &model.beside("w.json")]).contains(EMBEDDING));
}

#[test]
fn heads_of_multimodal_models_are_compared_at_their_place() {
    let model = Model::tiny("gemma3-vision");
    let head = "language_model.lm_head.weight";
    let embedding = "language_model.model.embed_tokens.weight";
    model.tensors(|all| all.retain(|tensor| tensor.0 != head)).config(tied(true));
    let nll = model.nll();
    model.head(head, embedding, false);
    near(model.nll(), nll);
    assert!(succeed(&["inspect", model.path()]).contains("tied head"));
    // The rows of other tokens.
    model.tensors(|all| {
        let tensor = all.iter_mut().find(|tensor| tensor.0 == head).unwrap();
        let row = tensor.3.len() / tensor.2[0];
        tensor.3.rotate_left(7 * row);
    });
    assert!((model.nll() - nll).abs() > 1e-3);
    let out = model.beside("out");
    succeed(&["quantize", model.path(), "--recipe", "rtn-int8-channel", "--out", &out, "--quiet"]);
    assert_eq!(Model::read_config(&out)["tie_word_embeddings"], json!(false));
    assert!(succeed(&["inspect", &out]).contains("own head"));
}

#[test]
fn a_missing_head_names_a_fix_that_works() {
    let model = Model::tiny("llama2-gqa-tied");
    let nll = model.nll();
    for flag in [json!(false), Value::Null] {
        model.config(tied(flag.clone()));
        let windows = model.beside("w.json");
        for run in [
            vec!["eval", model.path(), "--tokens", &windows],
            vec!["eval", model.path(), "--tokens", &windows, "--engine", "fast"],
            vec!["run", model.path(), "-p", "a", "-n", "1"],
            vec!["quantize", model.path(), "--recipe", "rtn-int8-channel", "--out", &model.beside("o")],
            vec!["convert", model.path(), "--format", "gguf", "--out", &model.beside("o.gguf")],
        ] {
            let line = fail(2, &run);
            let expected =
                "config.json: tie_word_embeddings: expected true, or a tensor \"lm_head.weight\", got";
            assert!(
                line.contains(expected) && line.contains("fix: set tie_word_embeddings to true"),
                "{line}"
            );
        }
    }
    let (code, report) = lint(&model, "transformers");
    assert_eq!((code, findings(&report, "head").len()), (1, 1), "{report}");
    model.config(tied(true));
    near(model.nll(), nll);
}

/// Lints a model for one engine; returns the exit code and the report.
pub fn lint(model: &Model, engine: &str) -> (i32, Value) {
    let output = mantissa(&["lint", model.path(), "--for", engine, "--json", "--quiet"]);
    let report: Value =
        serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{}", stderr(&output)));
    (output.status.code().unwrap(), report["reports"][0].clone())
}

/// Returns the findings of a rule.
pub fn findings<'a>(report: &'a Value, rule: &str) -> Vec<&'a Value> {
    report["findings"].as_array().unwrap().iter().filter(|finding| finding["rule"] == rule).collect()
}

#[test]
fn lint_says_what_each_engine_does_with_the_head() {
    let model = Model::tiny("llama2-gqa-tied");
    model.head(HEAD, EMBEDDING, true);
    let (_, report) = lint(&model, "transformers");
    let found = findings(&report, "transformers-tied-head");
    assert!(found[0].to_string().contains("transformers 5 warns and uses the lm_head"), "{report}");
    assert!(findings(&report, "tied-head").is_empty());
    let (code, report) = lint(&model, "vllm");
    assert_eq!((code, findings(&report, "tied-head").len()), (1, 1), "{report}");
}

#[test]
fn adapters_fit_a_model_with_a_head_of_its_own() {
    let model = Model::copy(&root().join("tests/data/tiny/llama2-gqa-tied"));
    model.head(HEAD, EMBEDDING, true);
    let own = model.nll();
    let out = model.beside("tuned");
    let data = model.temp.path().join("d.txt");
    fs::write(&data, "a b c d e f g h i j k l m n o p q r s t u v w x y z ".repeat(40)).unwrap();
    let run =
        ["finetune", model.path(), "--data", text(&data), "--out", &out, "--adapter", "lora", "--merge"];
    let rest = ["--steps", "1", "--length", "8", "--batch", "1", "--lr", "1e-9", "--quiet"];
    let output = mantissa(&[&run[..], &rest].concat());
    assert!(output.status.success(), "{}", stderr(&output));
    let merged = format!("{out}/model");
    assert_eq!(Model::read_config(&merged)["tie_word_embeddings"], json!(false));
    assert!((model.nll_of(&merged, "reference") - own).abs() < 0.05);
    let adapter = format!("{out}/adapter");
    let run = [
        "eval",
        model.path(),
        "--adapter",
        &adapter,
        "--tokens",
        &model.beside("w.json"),
        "--json",
        "--quiet",
    ];
    assert!((json(&run)["nll"].as_f64().unwrap() - own).abs() < 0.05);
}

/// A model quantized to `format`, whose attention of layer 0 stays unquantized. `weights` are the lines of the recipe.
fn partly(format: &str, weights: &str) -> Model {
    let source = Model::tiny("llama3-rope");
    let (out, recipe) = (source.beside("q"), source.beside("r.toml"));
    fs::write(&recipe, format!("{weights}\nkeep = [\"model.layers.0.self_attn.*\"]\n")).unwrap();
    succeed(&["quantize", source.path(), "--recipe", &recipe, "--format", format, "--out", &out, "--quiet"]);
    Model::copy(Path::new(&out))
}

/// Recipes of DeepSeek's FP8 and of ModelOpt.
const TILES: &str = "weights = \"fp8-e4m3-t8x8\"\nactivations = \"fp8-e4m3-g8\"";
const FP8: &str = "weights = \"fp8-e4m3-channel\"\nactivations = \"fp8-e4m3-token\"";
/// Recipe of compressed-tensors.
const INT8: &str = "weights = \"int8-channel\"";

#[test]
fn layers_are_quantized_or_not_as_their_tensors_say() {
    let model = partly("compressed-tensors", INT8);
    let nll = model.nll();
    let attention =
        ["q_proj", "k_proj", "v_proj", "o_proj"].map(|name| format!("model.layers.0.self_attn.{name}"));
    let spelled =
        |change: &dyn Fn(&String) -> String| -> Vec<String> { attention.iter().map(change).collect() };
    let with_head = |mut names: Vec<String>| {
        names.push("lm_head".to_owned());
        json!(names)
    };
    // What the list says in the tensors' names is no difference; anything else is one.
    for (ignore, differs) in [
        (with_head(spelled(&Clone::clone)), false),
        (json!(["lm_head", "model.layers.0.self_attn.qkv_proj", "model.layers.0.self_attn.o_proj"]), true),
        (with_head(spelled(&|name| format!("{name}.linear"))), true),
        (with_head(spelled(&|name| format!("language_model.{name}"))), true),
        (with_head(spelled(&|name| name.replace("model.", "model.language_model."))), true),
        (json!(["lm_head", "re:^(?!.*(mlp|layers\\.1)).*$"]), false),
        (json!(["lm_head", "re:.*layers\\.0\\.(?=self_attn).*"]), false),
        (json!(["lm_head", "re:.*self_attn.*"]), true),
        (json!([]), true),
    ] {
        model.config(|config| config["quantization_config"]["ignore"] = ignore.clone());
        near(model.nll(), nll);
        let shown = succeed(&["inspect", model.path()]);
        assert_eq!(shown.contains("the tensors are followed"), differs, "{ignore}: {shown}");
        let (_, report) = lint(&model, "vllm");
        assert_eq!(findings(&report, "unlisted-layers").is_empty(), !differs, "{ignore}: {report}");
    }
    // Targets by other names, and with look-ahead.
    for targets in [
        json!(["re:.*(?<!lm_head)$"]),
        json!(["re:language_model\\.model\\.layers.*"]),
        json!(["model.layers.1.self_attn.qkv_proj"]),
    ] {
        model.config(|config| {
            config["quantization_config"]["config_groups"]["group_0"]["targets"] = targets.clone();
        });
        near(model.nll(), nll);
    }
    let out = model.beside("again");
    succeed(&["convert", model.path(), "--format", "native", "--out", &out, "--quiet"]);
    near(model.nll_of(&out, "reference"), nll);
}

#[test]
fn every_format_follows_the_tensors_and_notes_what_its_list_says() {
    let keys = [
        ("gptq", "weights = \"int4-g8\"", "dynamic", json!({"-:.*mlp.*": {}})),
        ("awq", "weights = \"int4-g8-asym\"", "modules_to_not_convert", json!(["mlp"])),
        ("bitsandbytes", "weights = \"nf4\"", "llm_int8_skip_modules", json!(["model.layers.1.mlp"])),
        ("deepseek-fp8", TILES, "modules_to_not_convert", json!(["mlp.up_proj"])),
        ("modelopt", FP8, "ignore", json!(["model.layers.1*"])),
    ];
    for (format, recipe, key, list) in keys {
        let model = partly(format, recipe);
        let nll = model.nll();
        let said = |model: &Model| succeed(&["inspect", model.path()]).contains("the tensors are followed");
        assert!(!said(&model), "{format}");
        let _ = fs::remove_file(model.dir.join("hf_quant_config.json"));
        let _ = fs::remove_file(model.dir.join("quantize_config.json"));
        model.config(|config| config["quantization_config"][key] = list.clone());
        near(model.nll(), nll);
        assert!(said(&model), "{format}");
        model.config(|config| drop(config["quantization_config"].as_object_mut().unwrap().remove(key)));
        near(model.nll(), nll);
        assert!(said(&model), "{format}");
    }
}

#[test]
fn a_hostile_pattern_ends_in_time() {
    let model = partly("compressed-tensors", INT8);
    let nll = model.nll();
    let pattern = "re:(?=(([a-z_.0-9]+)+)+$)(.|..)+\\1x";
    model.config(|config| config["quantization_config"]["ignore"] = json!(["lm_head", pattern]));
    let began = std::time::Instant::now();
    near(model.nll(), nll);
    assert!(began.elapsed().as_secs() < 60);
    let shown = succeed(&["inspect", model.path()]);
    assert!(shown.contains("takes too many steps: it is not followed"), "{shown}");
    model.config(|config| config["quantization_config"]["ignore"] = json!(["re:("]));
    let line = fail(2, &["inspect", model.path()]);
    assert!(line.contains("expected a regular expression"), "{line}");
}

#[test]
fn quantization_is_found_where_the_config_has_it() {
    let model = partly("compressed-tensors", INT8);
    let nll = model.nll();
    let mut own = json!({});
    model.config(|config| {
        let fields = config.as_object_mut().unwrap();
        own = fields.remove("quantization_config").unwrap();
        fields.insert("compression_config".to_owned(), own.clone());
    });
    let check = |model: &Model| {
        near(model.nll(), nll);
        let shown = succeed(&["inspect", model.path()]);
        assert!(shown.contains("compressed-tensors"), "{shown}");
        let (_, report) = lint(model, "transformers");
        assert_eq!(report["convention"].as_str().unwrap_or("compressed-tensors"), "compressed-tensors");
    };
    check(&model);
    for place in ["text_config", "llm_config", "language_config", "thinker_config"] {
        model.config(|config| {
            let fields = config.as_object_mut().unwrap();
            ["compression_config", "text_config", "llm_config", "language_config"].iter().for_each(|key| {
                fields.remove(*key);
            });
            fields.insert(place.to_owned(), json!({"quantization_config": own.clone()}));
        });
        check(&model);
    }
    let out = model.beside("again");
    succeed(&["convert", model.path(), "--format", "native", "--out", &out, "--quiet"]);
    near(model.nll_of(&out, "reference"), nll);
    let written = Model::read_config(&out);
    assert_eq!(written["quantization_config"]["quant_method"], "mantissa");
    assert_eq!(written["thinker_config"], json!({}));
    // Two that differ.
    model.config(|config| {
        let mut other = own.clone();
        other["format"] = json!("int-quantized");
        config["quantization_config"] = own.clone();
        config["text_config"] = json!({ "quantization_config": other });
    });
    near(model.nll(), nll);
    let said = stderr(&mantissa(&["inspect", model.path()]));
    assert!(said.contains("quantization_config and text_config.quantization_config differ"), "{said}");
}

#[test]
fn two_descriptions_of_modelopt_that_differ_are_named() {
    let model = partly("modelopt", FP8);
    let nll = model.nll();
    model.config(|config| drop(config.as_object_mut().unwrap().remove("quantization_config")));
    near(model.nll(), nll);
    model.config(|config| {
        config["text_config"] =
            json!({"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}});
    });
    near(model.nll(), nll);
    let shown = succeed(&["inspect", model.path()]);
    assert!(
        shown.contains(
            "hf_quant_config.json and config.json differ: quant_algo FP8_PER_CHANNEL_PER_TOKEN and NVFP4"
        ),
        "{shown}"
    );
}
