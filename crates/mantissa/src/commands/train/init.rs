//! `mantissa train --init`: prints complete settings with their model.

use anyhow::Result;
use serde::Serialize;

use crate::context::Context;

/// Size of a model and its run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Size {
    /// 0.9 M parameters, minutes on a laptop
    Small,
    /// 8 M parameters, hours on a laptop
    #[value(name = "8m")]
    M8,
    /// 60 M parameters, hours on a machine with many cores
    #[value(name = "60m")]
    M60,
}

/// Figures in which the settings differ.
struct Preset {
    name: &'static str,
    about: &'static str,
    hidden: usize,
    ffn: usize,
    layers: usize,
    heads: usize,
    kv_heads: usize,
    vocab: usize,
    context: usize,
    length: usize,
    batch: usize,
    lr: &'static str,
    steps: usize,
    warmup: usize,
}

impl Size {
    fn preset(self) -> Preset {
        match self {
            Size::Small => Preset {
                name: "small",
                about: "0.9 M parameters: minutes on a laptop, texts of 100 kB and more",
                hidden: 128,
                ffn: 384,
                layers: 4,
                heads: 4,
                kv_heads: 2,
                vocab: 1024,
                context: 256,
                length: 128,
                batch: 8,
                lr: "3e-3",
                steps: 1000,
                warmup: 50,
            },
            Size::M8 => Preset {
                name: "8m",
                about: "8.2 M parameters: hours on a laptop, texts of 5 MB and more",
                hidden: 288,
                ffn: 768,
                layers: 7,
                heads: 6,
                kv_heads: 6,
                vocab: 4096,
                context: 512,
                length: 256,
                batch: 16,
                lr: "2e-3",
                steps: 3000,
                warmup: 100,
            },
            Size::M60 => Preset {
                name: "60m",
                about: "60 M parameters: hours on a machine with many cores, texts of 50 MB and more",
                hidden: 640,
                ffn: 1728,
                layers: 12,
                heads: 10,
                kv_heads: 5,
                vocab: 8192,
                context: 1024,
                length: 512,
                batch: 32,
                lr: "1e-3",
                steps: 5000,
                warmup: 200,
            },
        }
    }
}

#[derive(Serialize)]
struct Shown {
    preset: &'static str,
    /// TOML of the settings.
    toml: String,
}

/// Prints settings for a model of `size` trained on the files `data`, for a number of steps or of minutes.
///
/// # Errors
/// I/O.
pub(super) fn run(size: Size, data: &[String], minutes: Option<f64>, context: &Context) -> Result<()> {
    let shown = Shown { preset: size.preset().name, toml: settings(&size.preset(), data, minutes) };
    context.report(&shown, |out| write!(out, "{}", shown.toml))
}

fn settings(preset: &Preset, data: &[String], minutes: Option<f64>) -> String {
    let Preset { name, about, hidden, ffn, layers, heads, kv_heads, vocab, .. } = preset;
    let Preset { context, length, batch, steps, .. } = preset;
    // A JSON string is a TOML string.
    let quoted = |text: &String| serde_json::Value::from(text.as_str()).to_string();
    let schedule = match minutes {
        Some(minutes) => format!(
            "minutes = {minutes}                    # wall time, over all processes of the run
kind = \"stable\"                   # decays in the last decay_share of the time
decay_share = 0.2"
        ),
        None => format!(
            "steps = {steps}                      # or minutes = 30 with kind = \"stable\"
kind = \"cosine\"                   # constant linear cosine stable"
        ),
    };
    let files = match data {
        [] => "\"text.txt\"".to_owned(),
        data => data.iter().map(quoted).collect::<Vec<_>>().join(", "),
    };
    let text = format!(
        "# Settings of `mantissa train`, preset {name}: {about}.
# Every key: docs/reference/training.md. Paths are relative to this file. --set section.key=value changes one key.
seed = 1
out = \"runs/{name}\"                 # folder of the run; the trained model is in its folder `model`

[model]
# tokenizer = \"folder\"            # folder with tokenizer.json; without it, one is trained on the data
# init = \"folder\"                 # an unquantized model to start from, instead of [model.architecture]
std = 0.02                        # standard deviation of initial weights

[model.architecture]              # the keys of a Hugging Face config.json
architectures = [\"LlamaForCausalLM\"]
model_type = \"llama\"
hidden_act = \"silu\"
hidden_size = {hidden}
intermediate_size = {ffn}
num_hidden_layers = {layers}
num_attention_heads = {heads}
num_key_value_heads = {kv_heads}
vocab_size = {vocab}                 # of the trained tokenizer; smaller if the text holds fewer tokens
max_position_embeddings = {context}
rms_norm_eps = 1e-5
rope_theta = 10000.0
tie_word_embeddings = true
bos_token_id = 0
eos_token_id = 1

[data]
files = [{files}]            # texts, .jsonl files, or token files (.safetensors)
# split = \"<|endoftext|>\"         # between the documents of a text
field = \"text\"                    # of the lines of a .jsonl file
length = {length}                      # tokens per window
batch = {batch}                        # windows per batch
accumulate = 1                    # batches per step (gradient accumulation)

[validation]
share = 0.05                      # of the documents, held out; or files = [\"other.txt\"]
every = 100                       # steps between two measurements
batches = 8                       # measured at most
patience = 0                      # end after this number of measurements without a better loss; 0: never
"
    );
    text + &training_sections(preset, &schedule)
}

/// Writes the sections on samples, precision, optimizer, schedule, checkpoints and telemetry.
fn training_sections(preset: &Preset, schedule: &str) -> String {
    let Preset { lr, warmup, .. } = preset;
    format!(
        "
[samples]
prompts = [\"The\"]                 # continued during training, to read along
every = 100                       # steps
tokens = 24                       # new tokens of each
temperature = 0.0                 # 0: greedy

[precision]
policy = \"bf16\"                   # fp32 fp16 bf16 … nvfp4: `mantissa train --show-policy nvfp4`

[optimizer]
kind = \"adamw\"
lr = {lr}
moments = \"f32\"                   # f32 bf16 8bit …
beta1 = 0.9
beta2 = 0.95
eps = 1e-8
weight_decay = 0.1
max_norm = 1.0                    # gradient clipping; 0: none

[schedule]
{schedule}
warmup = {warmup}
min_ratio = 0.1                   # last learning rate as a share of lr

[checkpoint]
every = 100                       # steps
keep = 2
best = true                       # also keep the one with the least validation loss, and export that

[telemetry]
every = 100                       # steps between two reports on the numerics of every tensor; 0: none
"
    )
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use mantissa_model::ModelConfig;
    use mantissa_train::config::RunConfig;

    use super::*;

    #[test]
    fn every_preset_is_a_run_of_the_stated_size() {
        for (size, parameters) in [(Size::Small, 0.92e6), (Size::M8, 8.15e6), (Size::M60, 60e6)] {
            let data = ["it's \"my\".txt".to_owned(), "b.jsonl".to_owned()];
            let run = RunConfig::parse("run.toml", &settings(&size.preset(), &data, None), &[]).unwrap();
            let timed = settings(&size.preset(), &data, Some(0.5));
            assert_eq!(RunConfig::parse("run.toml", &timed, &[]).unwrap().schedule.minutes, 0.5);
            assert_eq!(run.data.files, data);
            let architecture = serde_json::to_value(run.model.architecture.unwrap()).unwrap();
            let found = ModelConfig::from_json(&architecture, "run.toml").unwrap().parameters() as f64;
            assert!((found / parameters - 1.0).abs() < 0.03, "{size:?}: {found}");
        }
        assert!(settings(&Size::Small.preset(), &[], None).contains("files = [\"text.txt\"]"));
    }
}
