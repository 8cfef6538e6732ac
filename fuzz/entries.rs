//! One function per parser of untrusted input: it takes any bytes and must return. Used by the fuzz targets and, on
//! mutations of valid files, by the tests of the main workspace.
#![allow(dead_code)] // each target uses one

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use mantissa_model::{
    Bos, Buffers, KvCache, Message, ModelConfig, Tokenizer, WeightSource, chat, load_config,
};
use mantissa_num::{Scheme, parse_activation};
use mantissa_quant::{Importance, Recipe};
use mantissa_store::convention::{ModelFiles, Weight, awq, compressed_tensors, exl2, exl3, gptq, hqq};
use mantissa_store::gguf::GgufHeader;
use mantissa_store::{Header, JOURNAL_NAME, Journal, MANIFEST_NAME, Manifest, SafeTensors, json};
use mantissa_train::config::RunConfig;

#[path = "structured.rs"]
mod structured;

pub use structured::{conventions, split, windows};

/// Maximum elements of a tensor that is read after its header has passed.
const SMALL: usize = 1 << 16;

/// Bytes as a temporary file, for parsers that need one.
struct OnDisk(PathBuf);

impl OnDisk {
    fn new(extension: &str, data: &[u8]) -> Self {
        let path = std::env::temp_dir().join(format!("mantissa-fuzz-{}.{extension}", std::process::id()));
        fs::write(&path, data).expect("a temporary file");
        OnDisk(path)
    }
}

impl Drop for OnDisk {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// Safetensors file: its header and, if that passes, its tensors and the model they form.
pub fn safetensors(data: &[u8]) {
    let Some((len, rest)) = data.split_first_chunk::<8>() else { return };
    let len = u64::from_le_bytes(*len);
    let Some(json) = usize::try_from(len).ok().and_then(|len| rest.get(..len)) else { return };
    let Ok(header) = Header::parse(Path::new("f"), json, data.len() as u64) else { return };
    for tensor in header.tensors() {
        assert!(tensor.offset + tensor.len <= data.len() as u64, "{tensor:?} is inside the file");
    }
    let on_disk = OnDisk::new("safetensors", data);
    let file = SafeTensors::open(&on_disk.0).expect("the header alone passed");
    for tensor in file.tensors().iter().filter(|t| t.len <= SMALL as u64) {
        let bytes = file.read(tensor).expect("bytes inside the file");
        assert_eq!(bytes.len() as u64, tensor.len);
        let _ = file.read_f32(tensor);
    }
}

/// GGUF file: its header and, if that passes, its configuration, tokenizer and weights.
pub fn gguf(data: &[u8]) {
    let Ok(header) = GgufHeader::parse(Path::new("f"), data) else { return };
    for tensor in &header.tensors {
        assert!(tensor.offset + tensor.len <= data.len() as u64, "{} is inside the file", tensor.name);
    }
    let on_disk = OnDisk::new("gguf", data);
    let Ok(files) = ModelFiles::open(&on_disk.0) else { return };
    let _ = Tokenizer::load(&on_disk.0).map(|tokenizer| exercise(&tokenizer));
    if let Ok(config) = load_config(&files) {
        sizes(&config);
        weights(&files, &config);
    }
    let shapes: Vec<_> = header.tensors.iter().map(|t| (t.name.clone(), t.shape.clone())).collect();
    for (name, shape) in shapes.iter().filter(|(_, shape)| shape.iter().product::<usize>() <= SMALL) {
        let _ = files.tensor_f32(name, shape);
    }
}

/// `config.json`: the architecture with its sizes, and the quantization.
pub fn config(data: &[u8]) {
    let path = Path::new("config.json");
    let Ok(value) = json::parse_strict(data, path, 1 << 20) else { return };
    if let Ok(config) = ModelConfig::from_json(&value, "config.json") {
        sizes(&config);
    }
    let quantization = value.get("quantization_config").unwrap_or(&value);
    if let Ok(config) = compressed_tensors::Config::parse(path, quantization) {
        let _ = (config.group("model.layers.0.mlp.up_proj"), config.notes());
    }
    for parse in [gptq::Config::parse, gptq::Config::parse_auto_round] {
        let _ = parse(path, quantization).map(|config| config.layer("model.layers.0.mlp.up_proj"));
    }
    for parse in [awq::Config::parse, awq::Config::parse_auto_round] {
        let _ = parse(path, quantization).map(|config| config.layer());
    }
}

/// Weight file of a module of GPTQ, AWQ, EXL2, EXL3 or HQQ, whose metadata may state its shape.
pub fn integers(data: &[u8]) {
    let has = |part: &str| data.windows(part.len()).any(|window| window == part.as_bytes());
    let method = match (has(".trellis"), has(".q_weight"), data.len() % 3) {
        (true, ..) => exl3::QUANT_METHOD,
        (_, true, _) => exl2::QUANT_METHOD,
        _ if has(".W_q") => hqq::QUANT_METHOD,
        (_, _, 0) => awq::QUANT_METHOD,
        _ => gptq::QUANT_METHOD,
    };
    let config =
        format!(r#"{{"quantization_config": {{"quant_method": "{method}", "bits": 4, "group_size": 32}}}}"#);
    let folder = Folder::new(data, &config);
    let Ok(files) = ModelFiles::open(&folder.0) else { return };
    let _ = files.notes();
    let names: Vec<_> = files.checkpoint().tensors().map(|meta| meta.name.clone()).collect();
    let modules = names.iter().filter_map(|name| name.rsplit_once('.')).map(|(module, _)| module);
    for module in modules {
        for (rows, cols) in [(32, 96), (62, 240), (128, 256)] {
            let Ok(linear) = files.linear(module, rows, cols, false) else { continue };
            linear.transforms.check(rows, cols).expect("maps that fit");
            if let Weight::Quantized(q) = linear.weight {
                q.dequantize().expect("what was read decodes");
            }
        }
    }
}

/// Configurations under which the tensors of one module of 32 × 96 weights are read.
const FLOAT_CONFIGS: [&str; 11] = [
    r#"{"quant_method": "modelopt", "quant_algo": "FP8"}"#,
    r#"{"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}"#,
    r#"{"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}"#,
    r#"{"quant_method": "modelopt", "quant_algo": "NVFP4"}"#,
    r#"{"quant_method": "modelopt", "quant_algo": "MXFP8"}"#,
    r#"{"quant_method": "bitsandbytes", "load_in_4bit": true}"#,
    r#"{"quant_method": "bitsandbytes", "load_in_8bit": true}"#,
    r#"{"quant_method": "fp8", "weight_block_size": [24, 40]}"#,
    r#"{"bits": 4, "group_size": 32}"#,
    r#"{"bits": 8, "group_size": 32, "mode": "mxfp8"}"#,
    r#"{"quant_method": "compressed-tensors", "config_groups": {"g": {"targets": ["Linear"], "weights":
        {"num_bits": 4, "strategy": "group", "group_size": 32, "actorder": "group"}}}}"#,
];

/// Weights of ModelOpt, bitsandbytes, FP8, MLX and compressed-tensors.
pub fn floats(data: &[u8]) {
    for config in FLOAT_CONFIGS {
        let folder = Folder::new(data, &format!(r#"{{"quantization_config": {config}}}"#));
        let Ok(files) = ModelFiles::open(&folder.0) else { return };
        let names: Vec<_> = files.checkpoint().tensors().map(|meta| meta.name.clone()).collect();
        for module in names.iter().filter_map(|name| name.strip_suffix(".weight")) {
            let _ = (files.coded_shape(module), files.kv_quant(module, 4));
            let Ok(linear) = files.linear(module, 32, 96, false) else { continue };
            linear.transforms.check(32, 96).expect("maps that fit");
            if let Weight::Quantized(q) = linear.weight {
                q.dequantize().expect("what was read decodes");
            }
        }
    }
}

/// Temporary model folder with this weight file.
struct Folder(PathBuf);

impl Folder {
    fn new(data: &[u8], config: &str) -> Self {
        let folder = Self::empty();
        fs::write(folder.0.join("config.json"), config).expect("a temporary file");
        fs::write(folder.0.join("model.safetensors"), data).expect("a temporary file");
        folder
    }

    fn empty() -> Self {
        // Tests of one process run concurrently.
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let (process, count) = (std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(format!("mantissa-fuzz-{process}-{count}"));
        fs::create_dir_all(&path).expect("a temporary folder");
        Folder(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// An importance matrix, in llama.cpp's older encoding or in GGUF.
pub fn imatrix(data: &[u8]) {
    let on_disk = OnDisk::new("imatrix", data);
    if let Ok(importance) = Importance::read(&on_disk.0) {
        for entry in importance.entries.values() {
            (0..entry.counts.len().min(8)).for_each(|i| drop(entry.means(i)));
        }
    }
}

/// The settings of a training run.
pub fn train(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let Ok(config) = RunConfig::parse("train.toml", text, &[]) else { return };
    let resolved = config.resolved();
    let again = RunConfig::parse("train.toml", &resolved, &[]).map(|config| config.resolved());
    assert_eq!(again.ok().as_ref(), Some(&resolved), "{text:?}");
    let _ = (config.policy(), config.optimizer.recipe(), config.schedule());
}

/// Files beside weights: the journal of an unfinished run, a manifest, token windows.
pub fn beside(data: &[u8]) {
    let folder = Folder::empty();
    let write = |name: &str| fs::write(folder.0.join(name), data).expect("a temporary file");
    write(JOURNAL_NAME);
    let _ = Journal::read(&folder.0);
    write(MANIFEST_NAME);
    let path = folder.0.join(MANIFEST_NAME);
    let _ = Manifest::read_file(&path).map(|manifest| manifest.to_json());
    let path = path.display().to_string();
    let windows = |argument: &str| mantissa_eval::token_windows(argument, 1 << 30).is_ok();
    let _ = (windows(&path), windows(&format!("{path}:w")));
}

/// A recipe: a TOML file, and the same text as a name, a scheme and an activation.
pub fn recipe(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let mut recipes = vec![Recipe::from_toml("recipe.toml", text)];
    if !text.contains('/') && !text.ends_with(".toml") {
        recipes.push(Recipe::load(text));
    }
    for recipe in recipes.into_iter().flatten() {
        let _ =
            (recipe.container(), recipe.weights_of("model.layers.0.mlp.up_proj").map(ToString::to_string));
    }
    if let Ok(scheme) = text.parse::<Scheme>() {
        let printed = scheme.to_string();
        assert_eq!(printed.parse::<Scheme>().as_ref(), Ok(&scheme), "{text:?} prints as {printed:?}");
        let x: Vec<f32> = (0..96).map(|i| (i as f32 * 0.7).sin()).collect();
        if let Ok(q) = mantissa_num::quantize(&scheme, &x, 3, 32, Default::default()) {
            q.dequantize().expect("what was encoded decodes");
        }
    }
    let _ = parse_activation(text);
}

/// A `tokenizer.json`.
pub fn tokenizer(data: &[u8]) {
    if let Ok(tokenizer) = Tokenizer::from_json(Path::new("tokenizer.json"), data) {
        exercise(&tokenizer);
    }
}

/// A chat template.
pub fn template(data: &[u8]) {
    let Ok(template) = std::str::from_utf8(data) else { return };
    let tokens = [("bos_token", "<s>"), ("eos_token", "</s>")].map(|(k, v)| (k.to_owned(), v.to_owned()));
    let messages = [Message::new("system", "Be kind."), Message::new("user", "Hello, wörld\n")];
    let context = chat::context(&messages, &tokens.into());
    if let Ok(text) = chat::render(template, &context) {
        assert!(text.len() <= chat::MAX_OUTPUT);
    }
}

/// Encodes and decodes: any file that passed the checks gives known ids, or an error.
fn exercise(tokenizer: &Tokenizer) {
    for text in ["", "Once upon a time", " a\n\tb  ü 你好 🦀<s></s>\u{0}", &"ab".repeat(300)] {
        for bos in [Bos::Auto, Bos::Never] {
            if let Ok(ids) = tokenizer.encode(text, bos) {
                let _ = (tokenizer.decode(&ids), tokenizer.decode_with_special(&ids));
                let mut stream = tokenizer.stream();
                ids.iter().take(8).for_each(|id| drop(stream.push(*id)));
                let _ = stream.finish();
            }
        }
    }
    let _ = tokenizer.decode(&[0, 1, 2, 3, u32::MAX]);
}

/// Arithmetic on all sizes in a config.
fn sizes(config: &ModelConfig) {
    for context in [1, 4096, usize::MAX] {
        let _ = (Buffers::bytes_needed(config, context, context), KvCache::bytes_needed(config, context));
    }
    if config.num_hidden_layers <= 64 {
        let _ = (config.parameters(), config.linears().len());
    }
}

fn weights(files: &ModelFiles, config: &ModelConfig) {
    if config.num_hidden_layers > 4 {
        return;
    }
    for linear in config.linears().iter().filter(|l| l.rows.saturating_mul(l.cols) <= SMALL) {
        let _ = WeightSource::linear(files, &linear.module, linear.rows, linear.cols, linear.bias)
            .and_then(|weight| mantissa_model::Linear::new(&linear.module, weight));
    }
}
