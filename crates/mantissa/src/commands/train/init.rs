//! `mantissa train --init`: prints complete settings with their model.

use std::path::Path;

use anyhow::Result;
use mantissa_train::config::section;
use mantissa_train::data::refuse_table;
use serde::Serialize;

use crate::context::Context;
use crate::error::BadInput;

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
/// Data that cannot be trained on; under `--strict`, files that do not exist; I/O.
pub(super) fn run(size: Size, data: &[String], minutes: Option<f64>, context: &Context) -> Result<()> {
    let files = || data.iter().map(Path::new);
    for file in files() {
        refuse_table(file)?;
        if file.is_dir() {
            return Err(
                BadInput::new(file.display().to_string(), "a folder", "a file of training data").into()
            );
        }
    }
    // The settings may be meant for another folder.
    let missing = files().filter(|file| !file.exists()).map(|file| {
        format!(
            "{}: no such file here; data.files are relative to the folder of the settings",
            file.display()
        )
    });
    context.warn_all(&missing.collect::<Vec<_>>())?;
    let shown = Shown { preset: size.preset().name, toml: settings(&size.preset(), data, minutes) };
    context.report(&shown, |out| write!(out, "{}", shown.toml))
}

/// Makes the settings of a preset: every table with the values of the preset, else the defaults.
fn settings(preset: &Preset, data: &[String], minutes: Option<f64>) -> String {
    let Preset { name, about, .. } = preset;
    let mut text = format!(
        "# Settings of `mantissa train`, preset {name}: {about}.
# Paths are relative to this file. --set section.key=value changes one key.
"
    );
    let chosen = chosen(preset, data, minutes);
    let left_out = ["model.config", if minutes.is_some() { "schedule.steps" } else { "schedule.minutes" }];
    for table in TABLES {
        let section = section(table).map(|section| section.print(&chosen, &left_out)).unwrap_or_default();
        text += &if table.is_empty() { section } else { format!("\n{section}") };
        if table == "model" {
            text += &architecture(preset);
        }
    }
    text
}

/// Tables that are printed; the others are optional and not for a model that is trained from nothing.
const TABLES: [&str; 11] = [
    "",
    "model",
    "data",
    "validation",
    "samples",
    "precision",
    "optimizer",
    "schedule",
    "checkpoint",
    "telemetry",
    "parallel",
];

/// Returns the keys whose values are not the defaults, with their values as TOML.
fn chosen(preset: &Preset, data: &[String], minutes: Option<f64>) -> Vec<(&'static str, String)> {
    // A JSON string is a TOML string.
    let quoted = |text: &str| serde_json::Value::from(text).to_string();
    let files = match data {
        [] => quoted("text.txt"),
        data => data.iter().map(|file| quoted(file)).collect::<Vec<_>>().join(", "),
    };
    let mut chosen = vec![
        ("seed", "1".to_owned()),
        ("out", format!("\"runs/{}\"", preset.name)),
        ("data.files", format!("[{files}]")),
        ("data.length", preset.length.to_string()),
        ("data.batch", preset.batch.to_string()),
        ("validation.share", "0.05".to_owned()),
        ("samples.prompts", "[\"The\"]".to_owned()),
        ("samples.tokens", "24".to_owned()),
        ("precision.policy", quoted("bf16")),
        ("optimizer.lr", preset.lr.to_owned()),
        ("schedule.warmup", preset.warmup.to_string()),
    ];
    match minutes {
        Some(minutes) => {
            chosen.extend([("schedule.minutes", minutes.to_string()), ("schedule.kind", quoted("stable"))]);
        }
        None => chosen.push(("schedule.steps", preset.steps.to_string())),
    }
    chosen
}

/// Makes the table of the model, which stands for a `config.json`.
fn architecture(preset: &Preset) -> String {
    let Preset { hidden, ffn, layers, heads, kv_heads, vocab, context, .. } = preset;
    format!(
        "
[model.architecture]              # the keys of a Hugging Face config.json
architectures = [\"LlamaForCausalLM\"]
model_type = \"llama\"
hidden_act = \"silu\"
hidden_size = {hidden}
intermediate_size = {ffn}
num_hidden_layers = {layers}
num_attention_heads = {heads}
num_key_value_heads = {kv_heads}
vocab_size = {vocab}                 # size of the trained tokenizer; smaller if the text holds fewer tokens
max_position_embeddings = {context}
rms_norm_eps = 1e-5
rope_theta = 10000.0
tie_word_embeddings = true
bos_token_id = 0
eos_token_id = 1
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
        let text = settings(&Size::Small.preset(), &[], None);
        assert!(text.contains("files = [\"text.txt\"]") && text.contains("\n# config = "), "{text}");
    }
}
