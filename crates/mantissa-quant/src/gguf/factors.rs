//! Constant factors of Falcon-H1 multiplied into the weights, as llama.cpp's converter does (`conversion/falcon_h1.py`): its
//! architecture has none.

use std::sync::Arc;

use mantissa_model::config::Recurrent;
use mantissa_model::{LinearKind, ModelConfig, Role, TensorInfo, load_config, untie};
use mantissa_store::convention::{ComputedTensor, ModelFiles};
use serde_json::Value;

use super::streams::with_all_inputs;
use crate::error::Result;

/// Fields of the factors.
const FIELDS: [&str; 9] = [
    "embedding_multiplier",
    "lm_head_multiplier",
    "key_multiplier",
    "attention_in_multiplier",
    "attention_out_multiplier",
    "ssm_in_multiplier",
    "ssm_out_multiplier",
    "mlp_multipliers",
    "ssm_multipliers",
];

/// Presents a model as a GGUF file holds it: one whose attention, mixer and MLP have constant factors as one without, whose
/// weights are multiplied by them; one with fewer embeddings of layers than tokens as one with as many. Other models are
/// returned unchanged.
///
/// # Errors
/// The config does not describe a model.
pub fn as_in_gguf(files: ModelFiles) -> Result<ModelFiles> {
    with_all_inputs(without_factors(files)?)
}

/// Presents a model with constant factors as one without. Other models are returned unchanged.
fn without_factors(files: ModelFiles) -> Result<ModelFiles> {
    let config = load_config(&files)?;
    if config.multipliers.is_none() || files.gguf().is_some() {
        return Ok(files);
    }
    let mut fields = files.config().cloned().unwrap_or_default();
    let factors = Factors::of(&config, &fields);
    if let Value::Object(fields) = &mut fields {
        FIELDS.iter().for_each(|field| drop(fields.remove(*field)));
    }
    untie(&mut fields);
    let again = ModelFiles::open(files.dir())?;
    let files = Arc::new(files);
    let mut computed = Vec::new();
    let mut put = |info: &TensorInfo, name: String, rows: Vec<f32>| {
        let (files, stored, shape) = (Arc::clone(&files), info.name.clone(), info.shape.clone());
        let values = move || {
            let mut values = files.tensor_f32(&stored, &shape)?;
            let cols = shape.iter().skip(1).product::<usize>().max(1);
            for (row, factor) in values.chunks_exact_mut(cols).zip(rows.iter().cycle()) {
                row.iter_mut().for_each(|x| *x *= factor);
            }
            Ok(values)
        };
        computed.push(ComputedTensor { name, shape: info.shape.clone(), values: Box::new(values) });
    };
    for info in config.tensors() {
        match info.role {
            Role::Embedding => {
                put(&info, info.name.clone(), vec![factors.embedding]);
                if config.tie_word_embeddings {
                    put(&info, format!("{}.weight", config.head_module()), vec![factors.head]);
                }
            }
            Role::Head => put(&info, info.name.clone(), vec![factors.head]),
            Role::Linear { kind, .. } => {
                if let Some(rows) = factors.of_linear(kind) {
                    put(&info, info.name.clone(), rows);
                }
            }
            _ => {}
        }
    }
    let names: Vec<String> = computed.iter().map(|tensor| tensor.name.clone()).collect();
    Ok(again.with_computed(|name| !names.iter().any(|known| known == name), computed, fields, files.notes()))
}

/// Factors of a model.
struct Factors {
    embedding: f32,
    head: f32,
    key: f32,
    attention: [f32; 2],
    mixer: f32,
    mlp: [f32; 2],
    /// Factors of the rows of a mixer's input projection.
    rows: Vec<f32>,
}

impl Factors {
    /// Reads the factors of a config that was parsed before.
    fn of(config: &ModelConfig, fields: &Value) -> Self {
        let number = |value: &Value| value.as_f64().map(|x| x as f32);
        let factor = |field: &str| number(&fields[field]).unwrap_or(1.0);
        let listed = |field: &str, i: usize| number(&fields[field][i]).unwrap_or(1.0);
        let input = factor("ssm_in_multiplier");
        let parts = config.recurrent.as_ref().map_or_else(Vec::new, Recurrent::input_parts);
        let rows = match parts.is_empty() {
            true => vec![input],
            false => {
                let of_part = |(i, n)| vec![listed("ssm_multipliers", i) * input; n];
                parts.into_iter().enumerate().flat_map(of_part).collect()
            }
        };
        Factors {
            embedding: factor("embedding_multiplier"),
            head: factor("lm_head_multiplier"),
            key: factor("key_multiplier"),
            attention: [factor("attention_in_multiplier"), factor("attention_out_multiplier")],
            mixer: factor("ssm_out_multiplier"),
            mlp: [listed("mlp_multipliers", 0), listed("mlp_multipliers", 1)],
            rows,
        }
    }

    /// Factors of the rows of a linear layer, which repeat; `None` for layers without.
    fn of_linear(&self, kind: LinearKind) -> Option<Vec<f32>> {
        let [enter, leave] = self.attention;
        let one = [
            (LinearKind::Q, enter),
            (LinearKind::K, enter * self.key),
            (LinearKind::V, enter),
            (LinearKind::O, leave),
            (LinearKind::Gate, self.mlp[0]),
            (LinearKind::Down, self.mlp[1]),
            (LinearKind::MixOut, self.mixer),
        ];
        let own = one.into_iter().find(|(own, _)| *own == kind).map(|(_, factor)| vec![factor]);
        own.or_else(|| (kind == LinearKind::MixIn).then(|| self.rows.clone()))
    }
}
