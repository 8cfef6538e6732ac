//! `quality.json`: what an artifact is and what it lost, beside the weights.
//!
//! Everything in it is reproducible: hashes of what went in and came out, the error of every tensor, and, where a text was
//! given, perplexity, KL and top-1 against the source with standard errors. The KL of the source's own weights rounded to
//! bf16 stands beside as the noise floor: a difference below it is not the quantization's.

use std::collections::BTreeMap;
use std::path::Path;

use mantissa_eval::{Sequence, compare};
use mantissa_kernels::kernels;
use mantissa_model::{Decoder, LoadError, WeightSource};
use mantissa_store::convention::{LinearWeight, ModelFiles, Weight};
use mantissa_store::{FileDigest, hash_file};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::Result;
use crate::report::Report;

/// Name of the file in the artifact.
pub const QUALITY_NAME: &str = "quality.json";

/// Figures agree when they differ by no more than this share: they are recomputed in the same order by the same loops.
const TOLERANCE: f64 = 1e-6;

/// The contents of `quality.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Quality {
    /// Recipe, container, schemes and errors.
    #[serde(flatten)]
    pub report: Report,
    /// SHA-256 of each weight file of the source.
    pub source_sha256: BTreeMap<String, String>,
    /// SHA-256 of each weight file written.
    pub weights_sha256: BTreeMap<String, String>,
    /// SHA-256 of the recipe: of its name, or of its file.
    pub recipe_sha256: String,
    /// What the method calibrated on.
    pub calibration: Option<TokenSet>,
    /// What the artifact lost on a text.
    pub evaluation: Option<Figures>,
}

/// Token windows, identified by their ids.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenSet {
    /// What the user called it: a file name, and a key.
    pub name: String,
    /// SHA-256 over all windows: number of ids, then the ids, as little-endian u32.
    pub sha256: String,
    /// Number of windows.
    pub windows: usize,
    /// Number of tokens.
    pub tokens: u64,
}

impl TokenSet {
    /// Of `sequences`.
    pub fn new(name: &str, sequences: &[Sequence]) -> Self {
        let words = |s: &Sequence| std::iter::once(s.tokens.len() as u32).chain(s.tokens.iter().copied()).collect::<Vec<_>>();
        let bytes: Vec<u8> = sequences.iter().flat_map(words).flat_map(u32::to_le_bytes).collect();
        TokenSet {
            name: name.to_owned(),
            sha256: FileDigest::of(&bytes).hex(),
            windows: sequences.len(),
            tokens: sequences.iter().map(|s| s.tokens.len() as u64).sum(),
        }
    }
}

/// What an artifact lost on a text.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Figures {
    /// The text.
    pub text: TokenSet,
    /// Mean loss, nats.
    pub nll: f64,
    /// Its standard error.
    pub nll_se: f64,
    /// `exp(nll)`.
    pub ppl: f64,
    /// Mean KL(source ‖ artifact), nats.
    pub kl: f64,
    /// Its standard error.
    pub kl_se: f64,
    /// 99th percentile over positions.
    pub kl_p99: f32,
    /// Share of positions with the same most probable token.
    pub top1: f64,
    /// Its standard error.
    pub top1_se: f64,
    /// Loss minus the source's.
    pub delta_nll: f64,
    /// Its paired standard error.
    pub delta_nll_se: f64,
    /// KL of the source with its weights rounded to bf16: the noise floor. 0 for a bf16 source.
    pub noise_floor_kl: f64,
    /// Its standard error.
    pub noise_floor_kl_se: f64,
}

impl Figures {
    /// Measures the model in `artifact` against `source` on `sequences`.
    ///
    /// # Errors
    /// Whatever loading or running either model raises.
    pub fn measure(
        artifact: &ModelFiles,
        source: &ModelFiles,
        name: &str,
        sequences: &[Sequence],
        threads: usize,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Result<Self> {
        let reference = Decoder::load(source)?;
        let against = |model: &dyn WeightSource| -> Result<_> {
            Ok(compare(&Decoder::load(model)?, &reference, sequences, threads, progress)?)
        };
        let (e, c) = against(artifact)?;
        let (_, floor) = against(&InBf16(source))?;
        Ok(Figures {
            text: TokenSet::new(name, sequences),
            nll: e.nll,
            nll_se: e.nll_se,
            ppl: e.ppl,
            kl: c.kl,
            kl_se: c.kl_se,
            kl_p99: c.kl_p99,
            top1: c.top1,
            top1_se: c.top1_se,
            delta_nll: c.delta_nll,
            delta_nll_se: c.delta_nll_se,
            noise_floor_kl: floor.kl.max(0.0),
            noise_floor_kl_se: floor.kl_se,
        })
    }

    /// The first figure in which `self` and `again` differ by more than rounding, as text.
    pub fn difference(&self, again: &Figures) -> Option<String> {
        if self.text.sha256 != again.text.sha256 {
            return Some(format!("text: found SHA-256 {}, allowed {}", again.text.sha256, self.text.sha256));
        }
        let pairs = [
            ("nll", self.nll, again.nll),
            ("kl", self.kl, again.kl),
            ("top1", self.top1, again.top1),
            ("delta_nll", self.delta_nll, again.delta_nll),
            ("noise_floor_kl", self.noise_floor_kl, again.noise_floor_kl),
        ];
        let differs = |a: f64, b: f64| (a - b).abs() > TOLERANCE * a.abs().max(1e-3) || a.is_nan() != b.is_nan();
        let (name, recorded, found) = pairs.into_iter().find(|&(_, a, b)| differs(a, b))?;
        Some(format!("{name}: found {found}, allowed {recorded} as recorded"))
    }
}

/// SHA-256 of the weight files of a model, by file name.
///
/// # Errors
/// A file that cannot be read.
pub fn weight_hashes(files: &ModelFiles) -> Result<BTreeMap<String, String>> {
    files
        .checkpoint()
        .files()
        .map(|path| {
            let name = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
            Ok((name, hash_file(path)?.hex()))
        })
        .collect()
}

/// A model whose weights are rounded to bf16.
struct InBf16<'a>(&'a ModelFiles);

fn round(values: &mut [f32]) {
    let mut bits = vec![0u16; values.len()];
    kernels().f32_to_bf16(values, &mut bits);
    kernels().bf16_to_f32(&bits, values);
}

impl WeightSource for InBf16<'_> {
    fn config(&self) -> Option<&Value> {
        self.0.config()
    }

    fn dir(&self) -> Option<&Path> {
        Some(self.0.dir())
    }

    fn location(&self) -> String {
        self.0.dir().display().to_string()
    }

    fn has(&self, tensor: &str) -> bool {
        self.0.has(tensor)
    }

    fn tensor_f32(&self, tensor: &str, shape: &[usize]) -> std::result::Result<Vec<f32>, LoadError> {
        let mut values = self.0.tensor_f32(tensor, shape)?;
        round(&mut values);
        Ok(values)
    }

    fn linear(&self, module: &str, rows: usize, cols: usize, bias: bool) -> std::result::Result<LinearWeight, LoadError> {
        let mut linear = self.0.linear(module, rows, cols, bias)?;
        if let Weight::F32(values) = &mut linear.weight {
            round(values);
        }
        if let Weight::F16(bits) = &linear.weight {
            let mut values = vec![0.0; bits.len()];
            kernels().f16_to_f32(bits, &mut values);
            round(&mut values);
            linear.weight = Weight::F32(values);
        }
        if let Some(bias) = &mut linear.bias {
            round(bias);
        }
        Ok(linear)
    }
}
