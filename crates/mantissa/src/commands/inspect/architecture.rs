//! The architecture that `config.json` describes, and whether the tensors are those it asks for.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::path::Path;

use anyhow::Result;
use mantissa_model::{LinearInfo, ModelConfig, ModelType, RopeScaling};
use mantissa_store::Checkpoint;
use mantissa_store::error::Shown;
use serde::Serialize;

use super::inventory::Entry;
use crate::output;

/// The sizes of a decoder.
#[derive(Serialize)]
pub struct Architecture {
    model_type: &'static str,
    layers: usize,
    hidden: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    ffn: usize,
    vocab: usize,
    context: usize,
    tied_head: bool,
    rope: &'static str,
    rope_theta: f64,
    /// Experts that a token goes through, of how many, and on how many layers.
    #[serde(skip_serializing_if = "Option::is_none")]
    experts: Option<(usize, usize, usize)>,
    /// Sliding window, and on how many layers.
    window: Option<(usize, usize)>,
}

impl Architecture {
    /// Of a checked configuration.
    pub fn of(config: &ModelConfig) -> Self {
        let windowed = || config.windows.iter().flatten();
        Architecture {
            model_type: config.model_type.name(),
            layers: config.num_hidden_layers,
            hidden: config.hidden_size,
            heads: config.num_attention_heads,
            kv_heads: config.num_key_value_heads,
            head_dim: config.head_dim,
            ffn: config.intermediate_size,
            vocab: config.vocab_size,
            context: config.max_position_embeddings,
            tied_head: config.tie_word_embeddings,
            rope: rope_name(&config.rope.scaling),
            rope_theta: config.rope.theta,
            experts: config.experts.as_ref().map(|experts| {
                let layers = experts.layers.iter().filter(|&&has| has).count();
                (experts.per_token, usize::from(experts.count), layers)
            }),
            window: windowed().min().map(|&window| (window, windowed().count())),
        }
    }
}

impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Architecture {
            model_type, layers, hidden, heads, kv_heads, head_dim, ffn, vocab, context, ..
        } = self;
        write!(
            f,
            "{model_type}: {layers} layers, hidden {hidden}, {heads} heads ({kv_heads} kv) of {head_dim}, "
        )?;
        write!(f, "ffn {ffn}, vocab {vocab}, context {context}, ")?;
        write!(
            f,
            "{} head, rope {} theta {}",
            if self.tied_head { "tied" } else { "own" },
            self.rope,
            self.rope_theta
        )?;
        if let Some((used, all, layers)) = self.experts {
            write!(f, ", {used} of {all} experts on {layers} layers")?;
        }
        match self.window {
            Some((window, layers)) => write!(f, ", window {window} on {layers} layers"),
            None => Ok(()),
        }
    }
}

fn rope_name(scaling: &RopeScaling) -> &'static str {
    match scaling {
        RopeScaling::Default => "default",
        RopeScaling::Linear { .. } => "linear",
        RopeScaling::Llama3 { .. } => "llama3",
        RopeScaling::Yarn(_) => "yarn",
        RopeScaling::Long(_) => "longrope",
        _ => "other",
    }
}

/// The configuration, where there is one of a known architecture; another architecture is a warning.
///
/// # Errors
/// A field of a known architecture is missing, of the wrong type or out of range.
pub fn config(
    checkpoint: &Checkpoint,
    model: &Path,
    warnings: &mut Vec<String>,
) -> Result<Option<ModelConfig>> {
    let Some(value) = checkpoint.config() else { return Ok(None) };
    // A GGUF file is its own config.
    let file = if model.is_file() { model.to_owned() } else { model.join("config.json") };
    let file = file.display().to_string();
    if let Some(name) = value["model_type"].as_str()
        && ModelType::NAMES.iter().all(|(_, known)| *known != name)
    {
        let known = ModelType::NAMES.map(|(_, name)| name).join(", ");
        let name = Shown(name);
        warnings.push(format!(
            "{file}: model_type: found \"{name}\", known are {known}; tensors are shown without it"
        ));
        return Ok(None);
    }
    Ok(Some(ModelConfig::from_json(value, &file)?))
}

/// Compares the tensors that the architecture asks for with those stored: what is missing or has another shape is a warning,
/// what is not used a note.
pub fn compare(config: &ModelConfig, entries: &[Entry], notes: &mut Vec<String>, warnings: &mut Vec<String>) {
    let stored: HashMap<&str, &Entry> = entries.iter().map(|entry| (entry.hf_name(), entry)).collect();
    let expected = config.tensors();
    let mut missing = Vec::new();
    let mut misshapen = Vec::new();
    for tensor in &expected {
        let (name, wanted) = (&tensor.name, output::shape(&tensor.shape));
        match stored.get(name.as_str()) {
            None => missing.push(format!("tensor \"{name}\": found nothing, allowed shape {wanted}")),
            Some(entry) if entry.shape != tensor.shape => {
                let found = output::shape(&entry.shape);
                misshapen.push(format!("tensor \"{name}\": found shape {found}, allowed {wanted}"));
            }
            Some(_) => {}
        }
    }
    let used: HashSet<&str> = expected.iter().map(|tensor| tensor.name.as_str()).collect();
    let unused = entries.iter().filter(|entry| entry.parameters > 0 && !used.contains(entry.hf_name()));
    let unused =
        unused.map(|entry| format!("the architecture does not use tensor \"{}\"", Shown(&entry.name)));
    warnings.extend(first_of(missing));
    warnings.extend(first_of(misshapen));
    notes.extend(first_of(unused.collect()));
}

/// The first of many findings of a kind, and how many more there are.
fn first_of(findings: Vec<String>) -> Option<String> {
    let more = findings.len().saturating_sub(1);
    let first = findings.into_iter().next()?;
    Some(if more == 0 { first } else { format!("{first}; and {more} more such tensors") })
}

/// Bits per weight of the decoder's linear layers, scales and zero points counted; `None` where none is stored.
pub fn linear_bits(config: &ModelConfig, entries: &[Entry]) -> Option<f64> {
    // By itself or, of an expert in a dense model, among the others.
    let of_linear = |l: LinearInfo| [format!("{}.weight", l.module), l.dense_tensor().0];
    let names: HashSet<String> = config.decoder_linears().flat_map(of_linear).collect();
    let linears = entries.iter().filter(|entry| names.contains(entry.hf_name()));
    let (bytes, parameters) = linears.fold((0, 0), |(b, p), entry| (b + entry.bytes, p + entry.parameters));
    super::bits(bytes, parameters)
}
