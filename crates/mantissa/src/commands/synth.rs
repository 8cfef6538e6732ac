//! `mantissa synth` (hidden): writes a Llama checkpoint of any size with Gaussian weights, for tests of scale
//! and speed.

mod gauss;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use anyhow::Result;
use clap::ValueEnum;
use mantissa_kernels::{for_each_range, kernels};
use mantissa_model::{ModelConfig, Role, TensorInfo};
use mantissa_store::shard_plan::DEFAULT_SHARD_BYTES;
use mantissa_store::{Dtype, Kind, Paths, ShardPlan, ShardedWriter, Staging, TensorSpec};
use serde_json::{Map, Value, json};

use super::execute::Execute;
use crate::context::Context;
use crate::help::Group;
use crate::output::{bytes, count};
use crate::progress::{Progress, Unit};

/// Standard deviation of the weights; norms are 1.
const STD: f32 = 0.02;

/// Elements generated at a time per thread.
const PANEL: usize = 1 << 19;

/// Write a synthetic Llama checkpoint: Gaussian weights of standard deviation 0.02, norms 1, no tokenizer
///
/// A weight depends only on --seed, its tensor's index in the model and its own index.
#[derive(clap::Args)]
#[command(after_help = "EXAMPLES
  mantissa synth --out path/to/model --preset tiny
  mantissa synth --out path/to/model --preset tiny --layers 4 --dtype f32 --seed 7")]
pub struct Args {
    /// Model folder to write
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Sizes to start from; 1b is the shape of Llama 3.2 1B
    #[arg(long, value_enum, default_value_t = Preset::OneB)]
    preset: Preset,
    /// Hidden size
    #[arg(long, value_name = "N")]
    hidden: Option<u32>,
    /// Number of decoder layers
    #[arg(long, value_name = "N")]
    layers: Option<u32>,
    /// Number of query heads
    #[arg(long, value_name = "N")]
    heads: Option<u32>,
    /// Number of key/value heads
    #[arg(long, value_name = "N")]
    kv_heads: Option<u32>,
    /// Intermediate size of the MLP
    #[arg(long, value_name = "N")]
    ffn: Option<u32>,
    /// Vocabulary size
    #[arg(long, value_name = "N")]
    vocab: Option<u32>,
    /// Maximum context length
    #[arg(long, value_name = "N")]
    context: Option<u32>,
    /// Dtype of the weights
    #[arg(long, value_enum, default_value_t = FloatType::Bf16)]
    dtype: FloatType,
    /// Tie the head to the embedding
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    tied: Option<bool>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Preset {
    #[value(name = "1b")]
    OneB,
    Tiny,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum FloatType {
    Bf16,
    F32,
    F16,
}

impl FloatType {
    fn dtype(self) -> Dtype {
        match self {
            FloatType::Bf16 => Dtype::BF16,
            FloatType::F32 => Dtype::F32,
            FloatType::F16 => Dtype::F16,
        }
    }

    /// Returns the name in `config.json`.
    fn name(self) -> &'static str {
        match self {
            FloatType::Bf16 => "bfloat16",
            FloatType::F32 => "float32",
            FloatType::F16 => "float16",
        }
    }

    fn encode(self, x: &[f32]) -> Vec<u8> {
        let mut bytes = vec![0; x.len() * self.dtype().bits() as usize / 8];
        match self {
            FloatType::Bf16 => kernels().f32_to_bf16_le(x, &mut bytes),
            FloatType::F16 => kernels().f32_to_f16_le(x, &mut bytes),
            FloatType::F32 => {
                bytes.as_chunks_mut::<4>().0.iter_mut().zip(x).for_each(|(b, v)| *b = v.to_le_bytes());
            }
        }
        bytes
    }
}

impl Execute for Args {
    const GROUP: Group = Group::Shell;

    fn paths(&self, paths: &mut Paths) -> Result<()> {
        paths.write("--out", &self.out, Kind::Folder);
        Ok(())
    }

    fn run(&self, context: &Context) -> Result<()> {
        let json = config(self);
        let config = ModelConfig::from_json(&json, "synth")?;
        // Each thread holds a panel as f32 and as bytes.
        context.require_memory("synth", (8 << 20) + (context.threads * PANEL * 8) as u64)?;
        let tensors = config.tensors();
        let dtype = self.dtype.dtype();
        let specs = tensors.iter().map(|t| TensorSpec::new(t.name.clone(), dtype, t.shape.clone())).collect();
        let plan = ShardPlan::new(specs, DEFAULT_SHARD_BYTES)?;
        let total = plan.total_bytes();

        let mut staging = Staging::begin(&context.output(&self.out)?)?;
        staging.write("config.json", format!("{json:#}\n").as_bytes())?;
        let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
        let writer = ShardedWriter::new(staging.path(), plan, metadata);
        for (file, digest) in write_all(writer, &tensors, self.dtype, total, context)? {
            staging.record(file, digest);
        }
        let run = Map::from_iter([("synth".to_owned(), json!({"seed": context.seed, "std": STD}))]);
        staging.commit(run)?;

        let report = json!({"output": self.out, "parameters": config.parameters(), "bytes": total, "seed": context.seed});
        context.report(&report, |out| {
            let parameters = count(config.parameters());
            writeln!(out, "wrote {}: {parameters} parameters, {}", self.out.display(), bytes(total))
        })
    }
}

/// Makes the `config.json` of the requested model.
fn config(args: &Args) -> Value {
    // Llama 3.2 1B's published config, and a small model for tests.
    let (hidden, layers, heads, kv_heads, ffn, vocab, context) = match args.preset {
        Preset::OneB => (2048, 16, 32, 8, 8192, 128_256, 131_072),
        Preset::Tiny => (64, 2, 4, 2, 128, 256, 128),
    };
    let mut config = json!({
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": args.hidden.unwrap_or(hidden),
        "intermediate_size": args.ffn.unwrap_or(ffn),
        "num_hidden_layers": args.layers.unwrap_or(layers),
        "num_attention_heads": args.heads.unwrap_or(heads),
        "num_key_value_heads": args.kv_heads.unwrap_or(kv_heads),
        "vocab_size": args.vocab.unwrap_or(vocab),
        "max_position_embeddings": args.context.unwrap_or(context),
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": args.tied.unwrap_or(true),
        "attention_bias": false,
        "mlp_bias": false,
        "initializer_range": STD,
        "rope_theta": 10000.0,
        "rope_scaling": null,
        "torch_dtype": args.dtype.name(),
    });
    if args.preset == Preset::OneB {
        config["rope_theta"] = json!(500_000.0);
        config["rope_scaling"] = json!({
            "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        });
    }
    config
}

/// Generates and writes every tensor; returns the files with their digests.
fn write_all(
    writer: ShardedWriter,
    tensors: &[TensorInfo],
    dtype: FloatType,
    total: u64,
    context: &Context,
) -> Result<Vec<(String, mantissa_store::FileDigest)>> {
    let progress = context.progress(total, Unit::Bytes);
    let writer = Mutex::new(writer);
    for (index, tensor) in (0u32..).zip(tensors) {
        progress.message(tensor.name.clone());
        write_tensor(&writer, tensor, index, dtype, context, &progress)?;
    }
    progress.finish();
    Ok(writer.into_inner().unwrap_or_else(PoisonError::into_inner).finish()?)
}

fn write_tensor(
    writer: &Mutex<ShardedWriter>,
    tensor: &TensorInfo,
    index: u32,
    dtype: FloatType,
    context: &Context,
    progress: &Progress,
) -> Result<()> {
    let failed = Mutex::new(None);
    let n = tensor.shape.iter().product();
    for_each_range(context.threads, n, PANEL, |range: Range<usize>| {
        let mut values = vec![1.0; range.len()];
        if !matches!(tensor.role, Role::Norm { .. }) {
            gauss::fill(context.seed, index, range.start as u64, STD, &mut values);
        }
        let bytes = dtype.encode(&values);
        let unit = (bytes.len() / values.len()) as u64;
        let mut writer = writer.lock().unwrap_or_else(PoisonError::into_inner);
        match writer.write_range(&tensor.name, range.start as u64 * unit, &bytes) {
            Ok(()) => progress.add(bytes.len() as u64),
            Err(error) => *failed.lock().unwrap_or_else(PoisonError::into_inner) = Some(error),
        }
    });
    match failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
        None => Ok(()),
        Some(error) => Err(error.into()),
    }
}
