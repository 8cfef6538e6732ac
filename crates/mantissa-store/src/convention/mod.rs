//! Conventions: how each tool lays quantized weights out in a checkpoint, one module each.
//!
//! [`ModelFiles`] opens a model in whatever convention it is and hands out tensors; a [`Container`] says what a quantized
//! linear layer becomes in a file that is written.

pub mod awq;
pub mod bitsandbytes;
pub mod cache;
pub mod compressed_tensors;
mod container;
pub mod exl2;
pub mod exl3;
pub mod fp8;
pub mod gguf;
pub mod gpt_oss;
pub mod gptq;
mod headers;
pub mod hqq;
pub mod levels;
pub mod mlx;
pub mod modelopt;
pub mod native;
pub mod onnx;
pub mod quanto;
mod sound;
mod stacked;
mod weight;

use std::path::{Path, PathBuf};

use mantissa_num::{Code, Codes, Quantized, minifloat};
use serde_json::Value;

pub use container::{Container, LinearPlan, NotStorable};
pub use levels::{KeyLevels, KvLevels};
pub use stacked::Stack;
use weight::Parts;
pub use weight::{ActivationQuant, KvQuant, LinearWeight, Weight};

use crate::finite::{FiniteScan, require_finite};
use crate::{Checkpoint, Dtype, Error, Result, TensorMeta};

/// How a checkpoint stores its quantized linear layers.
#[derive(Clone, Debug)]
enum Convention {
    Dense,
    CompressedTensors(Box<compressed_tensors::Config>),
    Native(Box<native::Config>),
    Gguf(Box<gguf::Model>),
    Gptq(Box<gptq::Config>),
    Awq(awq::Config),
    Exl2,
    Exl3,
    Hqq,
    Quanto(quanto::Config),
    Modelopt(Box<modelopt::Config>),
    Bitsandbytes(bitsandbytes::Config),
    Fp8(fp8::Config),
    GptOss,
    Mlx(mlx::Config),
    Onnx(onnx::Config),
}

/// A model on disk: weights in some convention, and its configuration.
#[derive(Debug)]
pub struct ModelFiles {
    checkpoint: Checkpoint,
    convention: Convention,
}

impl ModelFiles {
    /// Opens a Hugging Face directory, one bare `.safetensors` file or one GGUF file.
    ///
    /// # Errors
    /// As [`Checkpoint::open`] and [`crate::Gguf::open`]; [`Error::Field`] where `quantization_config` names a convention that is not supported or
    /// is malformed.
    pub fn open(path: &Path) -> Result<Self> {
        if gguf::is_gguf(path) {
            let (checkpoint, model) = gguf::open(path)?;
            return Ok(ModelFiles { checkpoint, convention: Convention::Gguf(Box::new(model)) });
        }
        let checkpoint = Checkpoint::open(path)?;
        let mut convention = detect(&checkpoint)?;
        if let Convention::Gptq(config) = &mut convention {
            config.check_version(&checkpoint);
        }
        Ok(ModelFiles { checkpoint, convention })
    }

    /// A model that is being written into `dir`: those of the weight files `names` that are begun, and its config. Only what
    /// is known to be written may be read from it.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn unfinished<'n>(
        dir: &Path,
        names: impl IntoIterator<Item = &'n str>,
        config: Value,
    ) -> Result<Self> {
        let checkpoint = Checkpoint::of_begun(dir, names, config)?;
        let convention = detect(&checkpoint)?;
        Ok(ModelFiles { checkpoint, convention })
    }

    /// The files below.
    pub fn checkpoint(&self) -> &Checkpoint {
        &self.checkpoint
    }

    /// `config.json`, where there is one.
    pub fn config(&self) -> Option<&Value> {
        self.checkpoint.config()
    }

    /// The folder.
    pub fn dir(&self) -> &Path {
        self.checkpoint.dir()
    }

    /// What the config was read from, for messages: `config.json`, or the GGUF file itself.
    pub fn config_path(&self) -> PathBuf {
        if self.gguf().is_some() { self.dir().to_owned() } else { self.dir().join("config.json") }
    }

    /// The metadata and names of a GGUF model.
    pub fn gguf(&self) -> Option<&gguf::Model> {
        match &self.convention {
            Convention::Gguf(model) => Some(model),
            _ => None,
        }
    }

    /// How a model with GPTQ's tensors stores them.
    pub fn gptq(&self) -> Option<&gptq::Config> {
        match &self.convention {
            Convention::Gptq(config) => Some(config),
            _ => None,
        }
    }

    /// How a model with AWQ's tensors stores them.
    pub fn awq(&self) -> Option<&awq::Config> {
        match &self.convention {
            Convention::Awq(config) => Some(config),
            _ => None,
        }
    }

    /// Name of the convention, for people: `dense`, `compressed-tensors`, `native`, `gguf`, `gptq`, `awq`, `auto-round`,
    /// `exl2`, `exl3`, `hqq`, `quanto`, `modelopt`, `bitsandbytes`, `fp8`, `mxfp4`, `mlx` or `onnx`.
    pub fn convention_name(&self) -> &'static str {
        match &self.convention {
            Convention::Dense => "dense",
            Convention::CompressedTensors(_) => "compressed-tensors",
            Convention::Native(_) => "native",
            Convention::Gguf(_) => "gguf",
            Convention::Gptq(config) => config.name(),
            Convention::Awq(config) => config.name(),
            Convention::Exl2 => exl2::QUANT_METHOD,
            Convention::Exl3 => exl3::QUANT_METHOD,
            Convention::Hqq => hqq::QUANT_METHOD,
            Convention::Quanto(_) => quanto::NAME,
            Convention::Modelopt(_) => modelopt::QUANT_METHOD,
            Convention::Bitsandbytes(_) => bitsandbytes::QUANT_METHOD,
            Convention::Fp8(_) => fp8::QUANT_METHOD,
            Convention::GptOss => gpt_oss::QUANT_METHOD,
            Convention::Mlx(_) => mlx::NAME,
            Convention::Onnx(_) => onnx::QUANT_METHOD,
        }
    }

    /// Whether some linear layer may be quantized.
    pub fn is_quantized(&self) -> bool {
        match &self.convention {
            Convention::Dense => false,
            Convention::Gguf(model) => model.has_blocks(),
            _ => true,
        }
    }

    /// What the checkpoint asks for and this reader leaves out, for the user to know.
    pub fn notes(&self) -> Vec<String> {
        match &self.convention {
            Convention::CompressedTensors(config) => config.notes(),
            Convention::Gguf(model) => model.notes().to_vec(),
            Convention::Gptq(config) => config.notes().to_vec(),
            Convention::Modelopt(config) => config.notes().to_vec(),
            Convention::Quanto(config) => config.notes().to_vec(),
            _ => Vec::new(),
        }
    }

    /// Whether a tensor of this name is stored; in GGUF, under its name there.
    pub fn has(&self, name: &str) -> bool {
        if let Some(model) = self.gguf() {
            return model.has(name);
        }
        self.checkpoint.get(name).is_some()
    }

    /// A dense tensor widened to f32.
    ///
    /// # Errors
    /// [`Error::NoTensor`], [`Error::NotFloat`], [`Error::NonFinite`], or [`Error::Field`] when the shape is not `shape`.
    pub fn tensor_f32(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        let values = match self.gguf() {
            Some(model) => model.tensor_f32(self, name, shape)?,
            None => {
                let meta = self.meta(name)?;
                self.expect_shape(meta, shape)?;
                self.checkpoint.read_f32(name)?
            }
        };
        require_finite(&values, self.path_of(name), name)?;
        Ok(values)
    }

    /// The weight of linear layer `module` (`model.layers.0.self_attn.q_proj`), `[rows, cols]` = `[out, in]`.
    ///
    /// # Errors
    /// A tensor that is missing, has another dtype or shape than the convention and the layer require, or holds values that
    /// are no numbers ([`Error::NonFinite`]; of GGUF's block types this shows when the model runs).
    pub fn linear(&self, module: &str, rows: usize, cols: usize, bias: bool) -> Result<LinearWeight> {
        let parts: Parts = match &self.convention {
            Convention::Dense | Convention::GptOss => self.dense(module, rows, cols)?.into(),
            Convention::CompressedTensors(config) => config.linear(self, module, rows, cols)?,
            Convention::Native(config) => config.linear(self, module, rows, cols)?,
            Convention::Gguf(model) => model.weight(self, module, rows, cols)?.into(),
            Convention::Gptq(config) => config.linear(self, module, rows, cols)?.into(),
            Convention::Awq(config) => config.linear(self, module, rows, cols)?.into(),
            Convention::Exl2 => exl2::linear(self, module, rows, cols)?.into(),
            Convention::Exl3 => exl3::linear(self, module, rows, cols)?,
            Convention::Hqq => hqq::linear(self, module, rows, cols)?.into(),
            Convention::Quanto(config) => config.linear(self, module, rows, cols)?.into(),
            Convention::Modelopt(config) => config.linear(self, module, rows, cols)?,
            Convention::Bitsandbytes(config) => config.linear(self, module, rows, cols)?,
            Convention::Fp8(config) => config.linear(self, module, rows, cols)?,
            Convention::Mlx(config) => config.linear(self, module, rows, cols)?.into(),
            Convention::Onnx(config) => config.linear(self, module, rows, cols)?.into(),
        };
        let Parts { weight, input, transforms } = parts;
        let bias = if bias { Some(self.tensor_f32(&format!("{module}.bias"), &[rows])?) } else { None };
        Ok(LinearWeight { rows, cols, weight, bias, input, transforms })
    }

    /// How keys and values of the attention `module` (`model.layers.0.self_attn`) are to be quantized in the cache, where the
    /// checkpoint asks for it. A scale that it lacks is 1, as servers have it.
    ///
    /// # Errors
    /// A scale is there and is neither one nor one per head of `kv_heads`, or no number greater than 0.
    pub fn kv_quant(&self, module: &str, kv_heads: usize) -> Result<Option<KvQuant>> {
        match &self.convention {
            Convention::CompressedTensors(config) => config.kv_quant(self, module, kv_heads),
            Convention::Modelopt(config) => config.kv_quant(self, module, kv_heads),
            Convention::Native(config) => config.kv_quant(self, module, kv_heads),
            _ => Ok(None),
        }
    }

    /// Rows and columns of the quantized weight of `module`, as its tensors say: of ModelOpt, bitsandbytes and FP8 models, whose
    /// codes are a tensor `weight`. `None` where it is dense, or where nothing bounds what is said.
    pub fn coded_shape(&self, module: &str) -> Option<(usize, usize)> {
        let codes = self.checkpoint.get(&format!("{module}.weight"))?;
        if !matches!(codes.dtype, Dtype::U8 | Dtype::I8 | Dtype::F8E4M3) || codes.len == 0 {
            return None;
        }
        let &[rows, cols] = codes.shape.as_slice() else { return None };
        match (&self.convention, codes.dtype) {
            (Convention::Bitsandbytes(_), Dtype::U8) => bitsandbytes::shape(self, module),
            (Convention::Modelopt(_), Dtype::U8) if self.has(&format!("{module}.weight_scale_2")) => {
                Some((rows, cols.checked_mul(2)?))
            }
            (Convention::Modelopt(_), Dtype::U8) => Some((rows.checked_mul(2)?, cols)),
            (Convention::Modelopt(_) | Convention::Bitsandbytes(_) | Convention::Fp8(_), _) => {
                Some((rows, cols))
            }
            _ => None,
        }
    }

    /// A weight that is stored as it is.
    pub(crate) fn dense(&self, module: &str, rows: usize, cols: usize) -> Result<Weight> {
        let name = format!("{module}.weight");
        let meta = self.meta(&name)?;
        self.expect_shape(meta, &[rows, cols])?;
        let words = || -> Result<Vec<u16>> {
            let bytes = self.checkpoint.read(&name)?;
            self.expect_finite(&name, meta.dtype, &bytes)?;
            Ok(bytes.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]])).collect())
        };
        match meta.dtype {
            Dtype::BF16 => words().map(Weight::Bf16),
            Dtype::F16 => words().map(Weight::F16),
            _ => self.tensor_f32(&name, &[rows, cols]).map(Weight::F32),
        }
    }

    /// A weight that is stored as it is, in a convention where quantized layers have the tensor `scale` beside theirs.
    pub(crate) fn dense_without(
        &self,
        module: &str,
        scale: &str,
        rows: usize,
        cols: usize,
    ) -> Result<Weight> {
        let (name, scale) = (format!("{module}.weight"), format!("{module}.{scale}"));
        if !self.has(&scale) {
            return self.dense(module, rows, cols);
        }
        let found = format!("dtype {} beside the scales {scale}", self.meta(&name)?.dtype);
        Err(self.fault(
            &name,
            found,
            "codes with scales, or a weight without",
            "the tensors contradict each other",
        ))
    }

    /// The weight of a trellis whose codes are the tensor `name`: its values between the rotations.
    fn unfolded(&self, name: &str, q: &Quantized) -> Result<Parts> {
        let Some(unfolded) = q.unfold() else { return Ok(Weight::Quantized(q.clone()).into()) };
        let (values, transforms) =
            unfolded.map_err(|error| self.fault(name, error.to_string(), "the tiles of the weight", ""))?;
        Ok((Weight::F16(values), transforms).into())
    }

    pub(crate) fn meta(&self, name: &str) -> Result<&TensorMeta> {
        self.checkpoint
            .get(name)
            .ok_or_else(|| Error::NoTensor { path: self.dir().to_owned(), tensor: name.to_owned() })
    }

    /// Reads a tensor that must have one of `dtypes` and exactly `shape`.
    pub(crate) fn read_exact(&self, name: &str, dtypes: &[Dtype], shape: &[usize]) -> Result<Vec<u8>> {
        let meta = self.meta(name)?;
        self.expect_dtype(meta, dtypes)?;
        self.expect_shape(meta, shape)?;
        self.checkpoint.read(name)
    }

    /// Reads a scale tensor in the shape of its blocks, and says in which code it is stored.
    pub(crate) fn read_scales(&self, name: &str, grid: &[usize]) -> Result<(Code, Codes)> {
        let meta = self.meta(name)?;
        let code = scale_code(meta.dtype).ok_or_else(|| {
            self.fault(name, format!("dtype {}", meta.dtype), "F32, BF16, F16, F8_E4M3, F8_E8M0 or U8", "")
        })?;
        self.expect_grid(meta, grid)?;
        Ok((code, Codes::from_le_bytes(code.unit_bytes(), &self.checkpoint.read(name)?)))
    }

    /// Reads a single value of a float's dtype, of shape `[1]` or `[]`.
    pub(crate) fn read_scalar(&self, name: &str) -> Result<f32> {
        let meta = self.meta(name)?;
        if meta.shape.iter().product::<usize>() != 1 {
            return Err(self.fault(name, format!("shape {:?}", meta.shape), "one value", ""));
        }
        self.expect_dtype(meta, &[Dtype::F32, Dtype::BF16, Dtype::F16])?;
        let values = self.checkpoint.read_f32(name)?;
        require_finite(&values, self.path_of(name), name)?;
        values.first().copied().ok_or_else(|| self.fault(name, "nothing", "one value", ""))
    }

    /// Reads the scale of a cache: one, or one per head (`[heads]` or `[heads, 1, 1]`).
    pub(crate) fn read_cache_scale(&self, name: &str, heads: usize) -> Result<Vec<f32>> {
        let Some(meta) = self.checkpoint.get(name) else { return Ok(vec![1.0]) };
        let count: usize = meta.shape.iter().product();
        if count != 1 && (count != heads || meta.shape.first() != Some(&heads)) {
            let allowed = format!("one value or [{heads}, 1, 1]");
            return Err(self.fault(name, format!("shape {:?}", meta.shape), allowed, ""));
        }
        let values = self.checkpoint.read_f32(name)?;
        require_finite(&values, self.path_of(name), name)?;
        match values.iter().position(|&scale| scale <= 0.0) {
            None => Ok(values),
            Some(at) => {
                let found = format!("{} at element {at}", values[at]);
                Err(self.fault(name, found, "scales greater than 0", ""))
            }
        }
    }

    /// Refuses a list of one value per block that has another shape than the blocks: as many values in another order would
    /// be read as another weight. A single value may have any number of axes.
    pub(crate) fn expect_grid(&self, meta: &TensorMeta, grid: &[usize]) -> Result<()> {
        let single = |shape: &[usize]| shape.iter().all(|&n| n == 1);
        if meta.shape == grid || (single(&meta.shape) && single(grid)) {
            return Ok(());
        }
        let hint = "rows stand first; a transposed list would be read as other scales";
        Err(self.fault(&meta.name, format!("shape {:?}", meta.shape), format!("{grid:?}"), hint))
    }

    /// Refuses bytes of a tensor that hold values which are no numbers.
    pub(crate) fn expect_finite(&self, name: &str, dtype: Dtype, bytes: &[u8]) -> Result<()> {
        let mut scan = FiniteScan::new(dtype);
        scan.update(bytes);
        scan.finish(self.path_of(name), name)
    }

    /// The file that holds a tensor, for messages; the folder where none does.
    pub(crate) fn path_of(&self, name: &str) -> &Path {
        self.checkpoint.locate(name).map_or(self.dir(), |(file, _)| file.path())
    }

    pub(crate) fn expect_shape(&self, meta: &TensorMeta, shape: &[usize]) -> Result<()> {
        if meta.shape == shape {
            return Ok(());
        }
        let hint = "config.json and the weights must belong together";
        Err(self.fault(&meta.name, format!("shape {:?}", meta.shape), format!("{shape:?}"), hint))
    }

    pub(crate) fn expect_dtype(&self, meta: &TensorMeta, dtypes: &[Dtype]) -> Result<()> {
        if dtypes.contains(&meta.dtype) {
            return Ok(());
        }
        let allowed: Vec<_> = dtypes.iter().map(ToString::to_string).collect();
        Err(self.fault(&meta.name, format!("dtype {}", meta.dtype), allowed.join(" or "), ""))
    }

    /// A fault in one of the checkpoint's tensors or fields.
    pub(crate) fn fault(
        &self,
        field: &str,
        found: impl Into<String>,
        allowed: impl Into<String>,
        hint: impl Into<String>,
    ) -> Error {
        Error::field(self.dir(), field, found, allowed, hint)
    }
}

/// The code in which scales of a dtype are stored; U8 scales are E8M0 by convention.
fn scale_code(dtype: Dtype) -> Option<Code> {
    match dtype {
        Dtype::F32 => Some(Code::F32),
        Dtype::BF16 => Some(Code::Float(minifloat::BF16)),
        Dtype::F16 => Some(Code::Float(minifloat::F16)),
        Dtype::F8E4M3 => Some(Code::Float(minifloat::E4M3)),
        Dtype::U8 | Dtype::F8E8M0 => Some(Code::E8m0),
        _ => None,
    }
}

/// The dtype in which scales of a code are stored.
fn scale_dtype(code: Code) -> Option<Dtype> {
    match code {
        Code::F32 => Some(Dtype::F32),
        Code::Float(f) if f == minifloat::BF16 => Some(Dtype::BF16),
        Code::Float(f) if f == minifloat::F16 => Some(Dtype::F16),
        Code::Float(f) if f == minifloat::E4M3 => Some(Dtype::F8E4M3),
        Code::E8m0 => Some(Dtype::U8),
        _ => None,
    }
}

fn detect(checkpoint: &Checkpoint) -> Result<Convention> {
    let path = checkpoint.dir().join("config.json");
    if let Some(quantization) = checkpoint.config().and_then(mlx::found) {
        return Ok(Convention::Mlx(mlx::Config::parse(&path, quantization)?));
    }
    let Some(quantization) =
        checkpoint.config().and_then(|c| c.get("quantization_config")).filter(|v| !v.is_null())
    else {
        if let Some(config) = quanto::Config::open(checkpoint.dir())? {
            return Ok(Convention::Quanto(config));
        }
        let older = modelopt::Config::open(&path, None)?;
        return Ok(older.map_or(Convention::Dense, |config| Convention::Modelopt(Box::new(config))));
    };
    let method = quantization.get("quant_method").and_then(Value::as_str).unwrap_or_default();
    match method {
        "compressed-tensors" => {
            let config = compressed_tensors::Config::parse(&path, quantization)?;
            Ok(Convention::CompressedTensors(Box::new(config)))
        }
        gptq::QUANT_METHOD => Ok(Convention::Gptq(Box::new(gptq::Config::parse(&path, quantization)?))),
        awq::QUANT_METHOD => Ok(Convention::Awq(awq::Config::parse(&path, quantization)?)),
        method if gptq::AUTO_ROUND.contains(&method) => match awq::auto_round_has(quantization) {
            true => Ok(Convention::Awq(awq::Config::parse_auto_round(&path, quantization)?)),
            false => {
                let config = gptq::Config::parse_auto_round(&path, quantization)?;
                Ok(Convention::Gptq(Box::new(config)))
            }
        },
        exl2::QUANT_METHOD => Ok(Convention::Exl2),
        exl3::QUANT_METHOD => Ok(Convention::Exl3),
        hqq::QUANT_METHOD => Ok(Convention::Hqq),
        fp8::QUANT_METHOD => Ok(Convention::Fp8(fp8::Config::parse(&path, quantization)?)),
        bitsandbytes::QUANT_METHOD => {
            Ok(Convention::Bitsandbytes(bitsandbytes::Config::parse(&path, quantization)?))
        }
        modelopt::QUANT_METHOD => {
            let config = modelopt::Config::open(&path, Some(quantization))?;
            Ok(config.map_or(Convention::Dense, |config| Convention::Modelopt(Box::new(config))))
        }
        gpt_oss::QUANT_METHOD => Ok(Convention::GptOss),
        onnx::QUANT_METHOD => Ok(Convention::Onnx(onnx::Config::parse(&path, quantization)?)),
        native::QUANT_METHOD => Ok(Convention::Native(Box::new(native::Config::parse(checkpoint)?))),
        other => Err(Error::field(
            &path,
            "quantization_config.quant_method",
            format!("\"{other}\""),
            "\"compressed-tensors\", \"gptq\", \"awq\", \"auto-round\", \"exl2\", \"exl3\", \"hqq\", \"modelopt\", \
             \"bitsandbytes\", \"fp8\", \"mxfp4\", \"onnx\", \"mantissa\" or no quantization_config",
            "this convention is not read yet; convert the model with the tool that wrote it",
        )),
    }
}
