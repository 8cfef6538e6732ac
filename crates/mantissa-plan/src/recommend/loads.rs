//! Engines that load a precision of a model on a device, by their rules.

use serde::Serialize;

use crate::contract::{ENGINES, Engine, EngineTarget, Input, Linear, Shape, Stored, Subject, lint};
use crate::hardware::{Device, Maker};
use crate::parallel::{Parallel, Split};
use crate::precision::{Elsewhere, Kv, Precision, Suits};
use crate::shape::{ModelPart, ModelShape};

/// Kind of a reason for which a precision is not run as named.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Refusal {
    /// No kernel of the device multiplies it.
    Kernel,
    /// Its file would hold other types in some layers.
    FallsBack,
    /// Its groups or parts are not those of the model.
    Unsuited,
    /// Users of the engine keep models in other formats, or it widens this one.
    Format,
    /// The engine has a rule against it.
    Engine,
}

impl Refusal {
    /// Returns the words of a table.
    pub fn words(self) -> &'static str {
        match self {
            Refusal::Kernel => "no kernel",
            Refusal::FallsBack => "falls back",
            Refusal::Unsuited => "unsuited",
            Refusal::Format => "other format",
            Refusal::Engine => "no engine",
        }
    }
}

/// Result of asking every engine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Loads {
    /// Engines that load it.
    pub engines: Vec<&'static str>,
    /// Reason of the first engine that does not.
    pub refused: Option<String>,
    /// Kind of that reason.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refusal: Option<Refusal>,
    /// Warning of an engine that loads it, such as a slow path.
    pub warning: Option<String>,
    /// Engine that reads it, but as dense weights.
    pub widened: Option<String>,
    /// Engine that runs it only from a checkpoint that mantissa does not write.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub elsewhere: Option<Elsewhere>,
}

impl Loads {
    /// Returns the answer that no engine is asked, for this reason.
    fn none(kind: Refusal, why: String) -> Self {
        Loads { refused: Some(why), refusal: Some(kind), ..Loads::default() }
    }

    /// Keeps the first reason. One of an engine that reads the format counts more than that others do not read it.
    fn refuse(&mut self, kind: Refusal, why: String) {
        let of_format = self.refusal == Some(Refusal::Format) && kind != Refusal::Format;
        if self.refused.is_none() || of_format {
            (self.refused, self.refusal) = (Some(why), Some(kind));
        }
    }

    /// True if an engine that loads the weights stores keys and values in `kv`.
    pub(super) fn stores(&self, kv: &Kv) -> bool {
        self.engines.iter().any(|engine| kv.is_stored_by(engine))
    }

    /// Keeps the engines that store keys and values in `kv`; without one, says so.
    pub(super) fn with_kv(mut self, kv: &Kv) -> Self {
        let all = self.engines.join(", ");
        self.engines.retain(|engine| kv.is_stored_by(engine));
        if self.engines.is_empty() && !all.is_empty() {
            self.refusal = Some(Refusal::Engine);
            self.refused = Some(format!(
                "KV cache in {}: expected an engine that loads the weights and stores it ({}), got {all}",
                kv.name,
                kv.engines.join(", ")
            ));
        }
        self
    }
}

/// Asks the engines that run on the devices and keep models in the format, or one of them.
pub fn loads(
    shape: &ModelShape,
    precision: &Precision,
    device: &Device,
    split: Split,
    asked: Option<&'static Engine>,
) -> Loads {
    let mut loads = Loads::default();
    if let Err(why) = precision.holds(shape) {
        let falls_back = precision.convention == "gguf";
        return Loads::none(if falls_back { Refusal::FallsBack } else { Refusal::Unsuited }, why);
    }
    if let (Maker::Nvidia, Suits::No(why)) = (device.maker, precision.suits(device.sm)) {
        return Loads::none(Refusal::Kernel, why);
    }
    let subject = subject(shape, precision);
    let candidates = ENGINES.into_iter().filter(|engine| asked.is_none_or(|asked| asked == *engine));
    for engine in candidates.filter(|engine| engine.makers.contains(&device.maker)) {
        if engine.widens(precision.convention) {
            let why = format!(
                "{}: decodes {} to dense weights as it loads them, which then take what BF16 takes",
                engine.title, precision.convention
            );
            loads.widened.get_or_insert(why);
            continue;
        }
        if let Some(why) = engine.passes_over(precision.convention, precision.offered.native) {
            loads.refuse(Refusal::Format, why);
            continue;
        }
        let divided = engine.splits_tensors() && split.by == Parallel::Tensor;
        let tp = if divided { split.devices.clamp(1, 1024) as usize } else { 1 };
        let target = EngineTarget { engine, tp, gpu: device.gpu() };
        let report = lint(&subject, &target);
        match report.findings.first() {
            Some(finding) if finding.severity.fails() => {
                let why = format!("{}: expected {}, got {}", engine.title, finding.requires, finding.found);
                let of_format = finding.rule.ends_with("-convention");
                loads.refuse(if of_format { Refusal::Format } else { Refusal::Engine }, why);
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
    let other = precision
        .offered
        .elsewhere
        .filter(|other| other.device == device.name && asked.is_none_or(|asked| asked.title == other.engine));
    if let Some(other) = other.filter(|_| loads.engines.is_empty()) {
        loads.engines.push(other.engine);
        loads.elsewhere = Some(other);
    }
    loads
}

/// Describes the model for the rules.
fn subject(shape: &ModelShape, precision: &Precision) -> Subject {
    let stored = |part: ModelPart| {
        let own = precision.of_part(part);
        let input = own.inputs.and_then(|inputs| mantissa_num::parse_activation(inputs).ok());
        let input = input.map(|scheme| Input {
            is_static: scheme.source == mantissa_num::Source::Static,
            format: scheme.format,
            scale: None,
        });
        precision.quantizes(part).then(|| Stored {
            format: own.weight_format(),
            outer: None,
            input,
            act_order: false,
            multiplied: false,
        })
    };
    let linear = |(i, matrices): (usize, &crate::shape::Matrices)| {
        let module = match matrices.part {
            ModelPart::Experts => format!("model.layers.0.mlp.experts.0.linear_{i}"),
            _ => format!("model.layers.0.linear_{i}"),
        };
        Linear { module, rows: matrices.rows, cols: matrices.cols, stored: stored(matrices.part) }
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
        loads(&shape, &Precision::named(precision).unwrap(), &device, Split::ONE, None)
    }

    /// vLLM and SGLang have FP8 caches and none of integers; LMDeploy has int8 and int4; llama.cpp q8_0 and q4_0.
    #[test]
    fn engines_store_the_cache_too() {
        let with =
            |precision: &str, kv: &str| engines("8B", precision, "h100").with_kv(&Kv::named(kv).unwrap());
        for kv in ["int8", "int4"] {
            let found = with("W4A16 INT4", kv);
            assert!(
                !found.engines.contains(&"vLLM") && !found.engines.contains(&"SGLang"),
                "{kv}: {found:?}"
            );
            assert_eq!(with("Q4_K_M", kv).engines, ["llama.cpp"]);
        }
        assert!(with("W4A16 INT4", "fp8").engines.contains(&"vLLM"));
        assert_eq!(with("W4A16 INT4", "f16"), engines("8B", "W4A16 INT4", "h100"));
        let found = with("W8A8 FP8", "int4");
        assert!(
            found.engines.is_empty() == found.refused.is_some_and(|why| why.contains("KV cache in int4"))
        );
    }

    #[test]
    fn engines_follow_their_rules() {
        assert!(engines("8B", "W4A16 INT4", "h100").engines.contains(&"vLLM"));
        // vLLM reads GGUF by a plugin; its users keep models in compressed-tensors, which `quantize --for vllm` writes.
        assert_eq!(engines("8B", "Q4_K_M", "h100").engines, ["llama.cpp"]);
        assert!(engines("8B", "Q4_K_M", "m4-max").engines.contains(&"llama.cpp"));
        let old = engines("8B", "W8A8 FP8", "a100");
        assert!(!old.engines.contains(&"TensorRT-LLM"), "{old:?}");
        // transformers reads GGUF as dense weights: no engine on Gaudi keeps it.
        let dense = engines("8B", "Q4_K_M", "gaudi3");
        assert!(dense.engines.is_empty() && dense.widened.is_some(), "{dense:?}");
        assert!(!engines("8B", "Q4_K_M", "h100").engines.contains(&"transformers"));
        // mlx-lm loads what is stored for it; compressed-tensors it does not.
        assert_eq!(engines("8B", "MLX 4-bit", "m4-max").engines, ["mlx-lm"]);
        assert!(engines("8B", "W4A16 INT4", "m4-max").engines.is_empty());
        let none = engines("8B", "W4A16 INT4", "gaudi3");
        assert!(none.engines.iter().all(|engine| *engine == "transformers"), "{none:?}");
    }
}
