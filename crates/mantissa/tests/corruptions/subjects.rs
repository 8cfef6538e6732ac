//! Models of one layer, with one linear layer stored in some format.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use mantissa_model::ModelConfig;
use mantissa_num::round::random_u32;
use mantissa_num::{Given, Scheme, quantize};
use mantissa_store::convention::{LinearPlan, SideTensors, gpt_oss, native};
use mantissa_store::{Dtype, SafeTensors};
use serde_json::{Value, json};

/// Name of [`Subject::victim`] in models made of the modules in `tests/data`.
const MODULE: &str = "model.layers.0.mlp.up_proj";

#[derive(Clone)]
pub struct Tensor {
    pub name: String,
    /// Name in files.
    pub dtype: String,
    pub shape: Vec<u64>,
    pub bytes: Vec<u8>,
}

impl Tensor {
    fn new(name: impl Into<String>, dtype: Dtype, shape: &[usize], bytes: Vec<u8>) -> Self {
        let shape = shape.iter().map(|&n| n as u64).collect();
        Tensor { name: name.into(), dtype: dtype.to_string(), shape, bytes }
    }

    /// Returns small seeded numbers.
    fn dense(name: &str, shape: &[usize], seed: u64) -> Self {
        let n: usize = shape.iter().product();
        let value = |i: usize| (random_u32(seed, i as u64) % 2001) as f32 / 10_000.0 - 0.1;
        let bytes = (0..n).flat_map(|i| half::bf16::from_f32(value(i)).to_le_bytes()).collect();
        Tensor::new(name, Dtype::BF16, shape, bytes)
    }
}

/// Model in memory, possibly inconsistent.
#[derive(Clone)]
pub struct Subject {
    pub name: &'static str,
    pub config: Value,
    pub tensors: Vec<Tensor>,
    pub metadata: BTreeMap<String, String>,
    /// Name prefix of the tensors to damage.
    pub victim: String,
    /// Length at which the file is truncated.
    pub cut: Option<usize>,
    /// Tensors of the victim that a reader may ignore.
    pub unread: &'static [&'static str],
}

impl Subject {
    /// Writes `config.json` and `model.safetensors` without checks.
    pub fn write(&self, dir: &Path) {
        std::fs::write(dir.join("config.json"), self.config.to_string()).unwrap();
        let mut header = serde_json::Map::new();
        if !self.metadata.is_empty() {
            header.insert("__metadata__".to_owned(), json!(self.metadata));
        }
        let mut data: Vec<u8> = Vec::new();
        for tensor in &self.tensors {
            let offsets = [data.len(), data.len() + tensor.bytes.len()];
            let entry = json!({"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": offsets});
            header.insert(tensor.name.clone(), entry);
            data.extend(&tensor.bytes);
        }
        let header = Value::Object(header).to_string();
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend(header.as_bytes());
        file.extend(data);
        file.truncate(self.cut.unwrap_or(usize::MAX));
        std::fs::write(dir.join("model.safetensors"), file).unwrap();
    }

    pub fn victims(&self) -> Vec<usize> {
        (0..self.tensors.len()).filter(|&i| self.tensors[i].name.starts_with(&self.victim)).collect()
    }

    /// Makes a Llama whose `up_proj` `[rows, cols]` is given by `tensors`; everything else is dense.
    fn around(
        name: &'static str,
        quantization: &Value,
        mut tensors: Vec<Tensor>,
        rows: usize,
        cols: usize,
    ) -> Self {
        let mut config = json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": cols, "intermediate_size": rows,
            "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 16,
            "max_position_embeddings": 32, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0, "tie_word_embeddings": false,
        });
        for (key, value) in quantization.as_object().unwrap() {
            config[key.as_str()] = value.clone();
        }
        let own = format!("{MODULE}.");
        for (seed, info) in
            ModelConfig::from_json(&config, "config.json").unwrap().tensors().iter().enumerate()
        {
            if !info.name.starts_with(&own) {
                tensors.push(Tensor::dense(&info.name, &info.shape, seed as u64));
            }
        }
        Subject { name, config, tensors, metadata: BTreeMap::new(), victim: own, cut: None, unread: &[] }
    }

    /// Makes a module of `tests/data` in its layout.
    fn of_module(name: &'static str, folder: &str) -> Self {
        let dir = root().join("tests/data").join(folder);
        let text = std::fs::read_to_string(dir.join("config.json")).unwrap();
        let mut config: Value = serde_json::from_str(&text).unwrap();
        // Limits a compressed-tensors group to its layers; the others are dense.
        let groups = config.pointer_mut("/quantization_config/config_groups").and_then(Value::as_object_mut);
        for group in groups.into_iter().flat_map(serde_json::Map::values_mut) {
            group["targets"] = json!(["re:.*up_proj$"]);
        }
        let file = SafeTensors::open(&dir.join("model.safetensors")).unwrap();
        let stated: Option<[usize; 2]> =
            file.metadata().get("shape").map(|s| serde_json::from_str(s).unwrap());
        let [rows, cols] = stated.unwrap_or([32, 96]);
        let of_module = file.tensors().iter().filter(|meta| meta.name.starts_with(MODULE));
        let tensor = |meta: &mantissa_store::TensorMeta| {
            Tensor::new(&meta.name, meta.dtype, &meta.shape, file.read(meta).unwrap())
        };
        Subject::around(name, &config, of_module.map(tensor).collect(), rows, cols)
    }

    fn unread(self, unread: &'static [&'static str]) -> Self {
        Subject { unread, ..self }
    }
}

/// Returns the root of the repository; the fuzz targets use this too.
fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.ancestors().find(|dir| dir.join("tests/data").is_dir()).unwrap_or(here).to_owned()
}

/// AutoRound's naming of GPTQ's tensors, which have no `g_idx`.
fn auto_round() -> Subject {
    let mut subject = Subject::of_module("auto-round", "conventions/gptq-v1-int4");
    subject.tensors.retain(|tensor| !tensor.name.ends_with(".g_idx"));
    subject.config["quantization_config"] = json!({
        "quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "group_size": 32, "sym": true,
        "data_type": "int",
    });
    subject
}

/// The native format.
fn native(name: &'static str, scheme: &str) -> Subject {
    let (rows, cols) = (32, 96);
    let scheme: Scheme = scheme.parse().unwrap();
    let w: Vec<f32> = (0..rows * cols).map(|i| ((i * i % 997) as f32 * 0.37).sin() * 0.1).collect();
    let q = quantize(&scheme, &w, rows, cols, Given::default()).unwrap();
    let plan = LinearPlan::new(MODULE, &scheme, None, (rows, cols));
    let bytes = native::CONTAINER.tensors(&plan, &q, SideTensors::Nothing).unwrap();
    let tensors = native::CONTAINER.specs(&plan).unwrap().into_iter().zip(bytes);
    let tensors =
        tensors.map(|(spec, (name, bytes))| Tensor::new(name, spec.dtype, &spec.shape, bytes)).collect();
    let config = json!({"quantization_config": native::quantization_config(&BTreeMap::new())});
    let subject = Subject::around(name, &config, tensors, rows, cols);
    Subject { metadata: [native::metadata(&plan)].into(), ..subject }
}

/// gpt-oss with stacked experts in MXFP4.
fn stacked() -> Subject {
    let config = json!({
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 16,
        "max_position_embeddings": 32, "rms_norm_eps": 1e-5, "num_local_experts": 3, "num_experts_per_tok": 3,
        "sliding_window": 8, "layer_types": ["sliding_attention"], "tie_word_embeddings": false, "attention_bias": true,
        "rope_parameters": {"rope_theta": 10_000.0, "rope_type": "default"}, "hidden_act": "silu",
        "swiglu_alpha": 1.702, "swiglu_limit": 7.0, "quantization_config": {"quant_method": "mxfp4"},
    });
    let scheme: Scheme = "mxfp4".parse().unwrap();
    let victim = "model.layers.0.mlp.experts.";
    let mut tensors = Vec::new();
    for (seed, info) in ModelConfig::from_json(&config, "config.json").unwrap().tensors().iter().enumerate() {
        let &[experts, cols, rows] = info.shape.as_slice() else {
            tensors.push(Tensor::dense(&info.name, &info.shape, seed as u64));
            continue;
        };
        let expert = |e: usize| {
            let w: Vec<f32> =
                (0..rows * cols).map(|i| ((i * 7 + e * 31) as f32 * 0.37).sin() * 0.1).collect();
            quantize(&scheme, &w, rows, cols, Given::default()).unwrap()
        };
        let both = gpt_oss::tensors(&info.name, &(0..experts).map(expert).collect::<Vec<_>>()).unwrap();
        tensors.extend(both.map(|(spec, bytes)| Tensor::new(spec.name, spec.dtype, &spec.shape, bytes)));
    }
    Subject {
        name: "gpt-oss mxfp4",
        config,
        tensors,
        metadata: BTreeMap::new(),
        victim: victim.to_owned(),
        cut: None,
        // Dense, in any float dtype.
        unread: &["_bias"],
    }
}

/// Every format except GGUF, some in several layouts.
pub fn all() -> Vec<Subject> {
    let of = Subject::of_module;
    vec![
        of("compressed-tensors packed", "float_conventions/ct-padded"),
        of("compressed-tensors order", "float_conventions/ct-actorder"),
        of("compressed-tensors fp8", "float_conventions/ct-fp8-block"),
        of("compressed-tensors turned", "float_conventions/ct-hadamard"),
        of("gptq v1", "conventions/gptq-v1-int4"),
        of("gptq v1 act-order", "conventions/gptq-v1-int4-act-order"),
        of("gptq v1 3 bits", "conventions/gptq-v1-int3"),
        of("gptq v2", "conventions/gptq-v2-int4-asym"),
        of("gptq planar", "conventions/gptq-planar-int5"),
        of("awq", "conventions/awq"),
        auto_round(),
        of("exl2", "conventions/exl2"),
        of("exl3", "conventions/exl3-mcg"),
        of("bitsandbytes nf4", "float_conventions/bnb-nf4"),
        of("bitsandbytes nf4 nested", "float_conventions/bnb-nf4-dq"),
        of("bitsandbytes fp4", "float_conventions/bnb-fp4"),
        of("bitsandbytes int8", "float_conventions/bnb-int8").unread(&["weight_format"]),
        of("modelopt fp8", "float_conventions/modelopt-fp8"),
        of("modelopt int4", "float_conventions/modelopt-int4-awq"),
        of("modelopt nvfp4", "float_conventions/modelopt-nvfp4"),
        of("modelopt mxfp8", "float_conventions/modelopt-mxfp8"),
        of("deepseek fp8", "float_conventions/fp8-blocks"),
        of("deepseek fp8 ue8m0", "float_conventions/fp8-powers"),
        of("mlx affine", "float_conventions/mlx-affine4"),
        of("mlx mxfp4", "float_conventions/mlx-mxfp4"),
        of("mlx nvfp4", "float_conventions/mlx-nvfp4"),
        stacked(),
        native("native int", "int3-g32-asym"),
        native("native nested", "nf4-dq"),
    ]
}
