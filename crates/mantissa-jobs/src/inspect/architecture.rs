//! Architecture from `config.json`, and a check that the tensors match it.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::path::Path;

use mantissa_model::{LinearInfo, LoadError, ModelConfig, RopeScaling};
use mantissa_store::Checkpoint;
use mantissa_store::Shown;
use mantissa_store::convention::ModelFiles;
use serde::Serialize;

use super::inventory::{Entry, bits};
use crate::error::Result;

/// Sizes of a decoder.
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
    /// Experts per token, experts in total, and number of layers with experts.
    #[serde(skip_serializing_if = "Option::is_none")]
    experts: Option<(usize, usize, usize)>,
    /// Sliding window, and number of layers that use it.
    window: Option<(usize, usize)>,
}

impl Architecture {
    /// Reads the sizes of a checked configuration.
    pub fn of(config: &ModelConfig) -> Self {
        let windowed = || config.windows.iter().flatten();
        let of_attention = |number| if config.has_heads() { number } else { 0 };
        Architecture {
            model_type: config.architecture.name,
            layers: config.num_hidden_layers,
            hidden: config.hidden_size,
            heads: of_attention(config.num_attention_heads),
            kv_heads: of_attention(config.num_key_value_heads),
            head_dim: of_attention(config.head_dim),
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

/// Formats a shape: `[4096, 4096]`.
fn shown_shape(dimensions: &[usize]) -> String {
    format!("{dimensions:?}")
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

/// Returns the configuration if the architecture is known; adds a warning if not.
///
/// # Errors
/// A field of a known architecture is missing, has a wrong type or is out of range.
pub fn config(
    checkpoint: &Checkpoint,
    model: &Path,
    warnings: &mut Vec<String>,
) -> Result<Option<ModelConfig>> {
    let Some(value) = checkpoint.config() else { return Ok(None) };
    // A GGUF file contains its config.
    let file = if model.is_file() { model.to_owned() } else { model.join("config.json") };
    let file = file.display().to_string();
    if let Some(name) = value["model_type"].as_str()
        && mantissa_model::Architecture::of_config(value).is_none()
    {
        let known = mantissa_model::Architecture::nearest(name);
        let name = Shown(name);
        warnings.push(format!(
            "{file}: model_type: expected {known}, got \"{name}\"; tensors are shown without the architecture"
        ));
        return Ok(None);
    }
    let mut config = ModelConfig::from_json(value, &file).map_err(LoadError::from)?;
    // The config does not record which of its two naming schemes a GPT-2 checkpoint uses.
    config.find_names(|name| checkpoint.get(name).is_some());
    Ok(Some(config))
}

/// Compares the tensors of the architecture with the stored ones: missing and misshapen tensors are warnings,
/// unused ones notes.
pub fn compare(
    config: &ModelConfig,
    files: &ModelFiles,
    entries: &[Entry],
    notes: &mut Vec<String>,
    warnings: &mut Vec<String>,
) {
    let stored: HashMap<&str, &Entry> = entries.iter().map(|entry| (entry.name.as_str(), entry)).collect();
    let mut used = HashSet::new();
    let mut missing = Vec::new();
    let mut misshapen = Vec::new();
    for (name, shape) in expected(config, files) {
        let wanted = shown_shape(&shape);
        let place = Place::of(files, &name);
        let parts: Vec<&Entry> =
            place.tensors.iter().filter_map(|part| stored.get(&**part).copied()).collect();
        used.extend(parts.iter().map(|entry| entry.name.as_str()));
        if parts.len() < place.tensors.len() {
            missing.push(format!("tensor \"{name}\": expected shape {wanted}, got no tensor"));
        } else if !place.holds(&parts, &shape) {
            let found: Vec<_> = parts.iter().map(|entry| shown_shape(&entry.shape)).collect();
            let found = found.join(" and ");
            misshapen.push(format!("tensor \"{name}\": expected shape {wanted}, got {found}"));
        }
    }
    let unused = entries.iter().filter(|entry| entry.parameters > 0 && !used.contains(entry.name.as_str()));
    let unused =
        unused.map(|entry| format!("the architecture does not use tensor \"{}\"", Shown(&entry.name)));
    warnings.extend(first_of(missing));
    warnings.extend(first_of(misshapen));
    notes.extend(first_of(unused.collect()));
}

/// Returns names and shapes of the expected tensors as `files` stores them: a quantized linear layer is a
/// separate `[out, in]` weight, whatever the dense checkpoint has.
fn expected(config: &ModelConfig, files: &ModelFiles) -> Vec<(String, Vec<usize>)> {
    let mut linears: HashMap<String, Vec<LinearInfo>> = HashMap::new();
    for info in config.decoder_linears() {
        linears.entry(info.dense_tensor().0).or_default().push(info);
    }
    let apart = |info: LinearInfo| (format!("{}.weight", info.module), vec![info.rows, info.cols]);
    let as_stored = |(name, shape): (String, Vec<usize>)| match linears.remove(&name) {
        Some(held) if held.iter().all(|info| info.is_by_rows(files)) => held.into_iter().map(apart).collect(),
        _ => vec![(name, shape)],
    };
    config.tensors().into_iter().map(|tensor| (tensor.name, tensor.shape)).flat_map(as_stored).collect()
}

/// Location of a tensor with a Hugging Face name.
struct Place {
    /// Tensor names in the files; several if the tensor is made of parts.
    tensors: Vec<String>,
    /// Index of the expert within a stacked tensor, and the number of matrices that the tensor has of each.
    expert: Option<(usize, usize)>,
}

impl Place {
    fn of(files: &ModelFiles, name: &str) -> Self {
        let Some(gguf) = files.gguf() else { return Place { tensors: vec![name.to_owned()], expert: None } };
        if let Some(joined) = gguf.joined(name) {
            return Place { tensors: joined.names().to_vec(), expert: None };
        }
        let Some(place) = gguf.place(name) else {
            return Place { tensors: vec![name.to_owned()], expert: None };
        };
        let halves = place.halves();
        Place { tensors: vec![place.tensor], expert: place.expert.map(|expert| (expert, halves)) }
    }

    /// True if `parts` hold a tensor of this shape.
    fn holds(&self, parts: &[&Entry], shape: &[usize]) -> bool {
        match (parts, self.expert) {
            ([all], Some((expert, halves))) => match (&all.shape[..], shape) {
                (&[n, rows, cols], &[own, of_own]) => expert < n && rows == own * halves && cols == of_own,
                _ => false,
            },
            // Vectors may have other dimensions in a GGUF file.
            ([whole], None) if shape.len() != 2 && whole.shape != shape => {
                whole.shape.iter().product::<usize>() == shape.iter().product::<usize>()
            }
            ([whole], None) => whole.shape == shape,
            _ => {
                parts.iter().map(|part| part.parameters).sum::<u64>()
                    == shape.iter().product::<usize>() as u64
            }
        }
    }
}

/// Returns the first finding and the number of further ones.
fn first_of(findings: Vec<String>) -> Option<String> {
    let more = findings.len().saturating_sub(1);
    let first = findings.into_iter().next()?;
    Some(if more == 0 { first } else { format!("{first}; and {more} more tensors") })
}

/// Returns the bits per weight of the decoder's linear layers, scales and zero points included; `None` if
/// none is stored.
pub fn linear_bits(config: &ModelConfig, files: &ModelFiles, entries: &[Entry]) -> Option<f64> {
    // A separate tensor or, for an expert of a dense model, a stacked one.
    let of_linear = |l: LinearInfo| [format!("{}.weight", l.module), l.dense_tensor().0];
    let names = config.decoder_linears().flat_map(of_linear);
    let names: HashSet<String> = names.flat_map(|name| Place::of(files, &name).tensors).collect();
    let linears = entries.iter().filter(|entry| names.contains(&entry.name));
    let (bytes, parameters) = linears.fold((0, 0), |(b, p), entry| (b + entry.bytes, p + entry.parameters));
    bits(bytes, parameters)
}
