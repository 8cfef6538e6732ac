//! Engines that load a precision of a model on a device, by their rules.

use serde::Serialize;

use crate::contract::{ENGINES, EngineTarget, Input, Linear, Shape, Stored, Subject, lint};
use crate::hardware::Device;
use crate::precision::Precision;
use crate::shape::{ModelPart, ModelShape};

/// Result of asking every engine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Loads {
    /// Engines that load it.
    pub engines: Vec<&'static str>,
    /// Reason of the first engine that does not.
    pub refused: Option<String>,
    /// Warning of an engine that loads it, such as a slow path.
    pub warning: Option<String>,
}

/// Asks the engines that run on the device.
pub fn loads(shape: &ModelShape, precision: &Precision, device: &Device, devices: u64) -> Loads {
    let subject = subject(shape, precision);
    let mut loads = Loads::default();
    for engine in ENGINES.into_iter().filter(|engine| engine.makers.contains(&device.maker)) {
        let tp = if engine.splits_tensors() { devices.clamp(1, 1024) as usize } else { 1 };
        let target = EngineTarget { engine, tp, gpu: device.gpu() };
        let report = lint(&subject, &target);
        match report.findings.first() {
            Some(finding) if finding.severity.fails() => {
                let why = format!("{}: expected {}, got {}", engine.title, finding.requires, finding.found);
                loads.refused.get_or_insert(why);
            }
            first => {
                loads.engines.push(engine.title);
                if let Some(finding) = first {
                    let why = format!("{}: {}; {}", engine.title, finding.requires, finding.fix);
                    loads.warning.get_or_insert(why);
                }
            }
        }
    }
    loads
}

/// Describes the model for the rules.
fn subject(shape: &ModelShape, precision: &Precision) -> Subject {
    let input = precision.input_format().map(|format| Input { format, is_static: false, scale: None });
    let stored = (!precision.is_dense()).then(|| Stored {
        format: precision.weight_format(),
        outer: None,
        input,
        act_order: false,
        multiplied: false,
    });
    let linear = |(i, matrices): (usize, &crate::shape::Matrices)| {
        let module = match matrices.part {
            ModelPart::Experts => format!("model.layers.0.mlp.experts.0.linear_{i}"),
            _ => format!("model.layers.0.linear_{i}"),
        };
        Linear { module, rows: matrices.rows, cols: matrices.cols, stored: stored.clone() }
    };
    Subject {
        planned: true,
        convention: precision.convention.to_owned(),
        dtype: Some("bfloat16".to_owned()),
        shape: Shape { heads: shape.heads, kv_heads: shape.kv_heads },
        linears: shape.matrices.iter().enumerate().map(linear).collect(),
        examined: Vec::new(),
        observations: Vec::new(),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn engines(model: &str, precision: &str, device: &str) -> Loads {
        let (shape, device) = (ModelShape::named(model).unwrap(), Device::named(device).unwrap());
        loads(&shape, &Precision::named(precision).unwrap(), &device, 1)
    }

    #[test]
    fn engines_follow_their_rules() {
        assert!(engines("8B", "W4A16 INT4", "h100").engines.contains(&"vLLM"));
        assert_eq!(engines("8B", "Q4_K_M", "h100").engines.first(), Some(&"vLLM"));
        assert!(engines("8B", "Q4_K_M", "m4-max").engines.contains(&"llama.cpp"));
        let old = engines("8B", "W8A8 FP8", "a100");
        assert!(!old.engines.contains(&"TensorRT-LLM"), "{old:?}");
        let none = engines("8B", "W4A16 INT4", "gaudi3");
        assert!(none.engines.iter().all(|engine| *engine == "transformers"), "{none:?}");
    }
}
