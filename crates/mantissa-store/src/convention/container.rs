//! The conventions that can be written, behind one face.

use mantissa_num::stored::{Extra, Map};
use mantissa_num::{Blocks, Code, Format, Quantized, Rule, Scheme, Source, minifloat};

use super::{
    LinearWeight, Weight, awq, bitsandbytes, compressed_tensors, exl2, exl3, fp8, gguf, gpt_oss, gptq, mlx,
    modelopt, native, onnx,
};
use crate::{Dtype, TensorSpec};

/// A convention for a quantized model that is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Container {
    /// compressed-tensors, read by vLLM, SGLang and transformers.
    CompressedTensors,
    /// One GGUF file, read by llama.cpp.
    Gguf,
    /// mantissa's own.
    Native,
    /// GPTQ, read by GPTQModel, vLLM, SGLang and transformers.
    Gptq,
    /// AWQ GEMM, read by vLLM, SGLang and transformers.
    Awq,
    /// ModelOpt, read by TensorRT-LLM, vLLM and SGLang.
    Modelopt,
    /// bitsandbytes, read by transformers and vLLM.
    Bitsandbytes,
    /// FP8 in blocks as DeepSeek-V3 has it, read by vLLM, SGLang and transformers.
    DeepseekFp8,
    /// MLX, read by mlx-lm.
    Mlx,
    /// EXL2, read by exllamav2.
    Exl2,
    /// EXL3, read by exllamav3.
    Exl3,
    /// Initializers with DequantizeLinear nodes, read by whatever reads ONNX.
    Onnx,
    /// Experts stacked in MXFP4 as gpt-oss publishes them, read by transformers and vLLM.
    Mxfp4,
}

/// What is to be stored for a linear layer.
#[derive(Clone, Copy, Debug)]
pub struct LinearPlan<'a> {
    /// Name of the layer, without `.weight`.
    pub module: &'a str,
    /// Scheme of the weight, with the scale code that the container will hold.
    pub scheme: &'a Scheme,
    /// Scheme of the input, if it is to be quantized at run time.
    pub input: Option<&'a Scheme>,
    /// Output features.
    pub rows: usize,
    /// Input features.
    pub cols: usize,
    /// Whether the group of each column is stored, because in some layer groups are not of neighbours (act-order).
    pub by_group: bool,
    /// The scale that is stored for the input, where its scheme has one ([`Self::stores_input_scale`]) and calibration has given it: what
    /// [`ActivationQuant::outer`](super::ActivationQuant::outer) is.
    pub input_scale: Option<f32>,
    /// Weights that stand beside the codes, in f16: outliers, each with its column, as an [`Extra::Sparse`].
    pub outliers: usize,
}

impl<'a> LinearPlan<'a> {
    /// A layer `[rows, cols]` whose groups are of neighbours, without a stored scale of its input.
    pub fn new(
        module: &'a str,
        scheme: &'a Scheme,
        input: Option<&'a Scheme>,
        (rows, cols): (usize, usize),
    ) -> Self {
        LinearPlan { module, scheme, input, rows, cols, by_group: false, input_scale: None, outliers: 0 }
    }

    /// Whether a scale of the input is stored beside the weight: a static one, or NVFP4's for the whole tensor.
    pub fn stores_input_scale(&self) -> bool {
        self.input.is_some_and(|input| input.source == Source::Static || input.has_outer_scale())
    }

    /// The bytes of the scale of the input; with `reciprocal` those of its reciprocal.
    ///
    /// # Errors
    /// [`NotStorable`] where there is none: nothing was calibrated.
    pub(super) fn input_scale_bytes(
        &self,
        container: &str,
        reciprocal: bool,
    ) -> Result<Vec<u8>, NotStorable> {
        let Some(scale) = self.input_scale else {
            let input = self.input.map_or(String::new(), ToString::to_string);
            let why = format!("{container} stores a scale of the inputs ({input}), which calibration finds");
            return Err(NotStorable { scheme: self.scheme.to_string(), why });
        };
        Ok(if reciprocal { 1.0 / scale } else { scale }.to_le_bytes().to_vec())
    }
}

/// Why a container cannot hold a scheme.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("scheme {scheme}: {why}")]
pub struct NotStorable {
    /// The scheme.
    pub scheme: String,
    /// Why.
    pub why: String,
}

impl Container {
    /// Every container with its name on the command line.
    pub const NAMES: [(Container, &'static str); 13] = [
        (Container::CompressedTensors, "compressed-tensors"),
        (Container::Gguf, "gguf"),
        (Container::Native, "native"),
        (Container::Gptq, "gptq"),
        (Container::Awq, "awq"),
        (Container::Modelopt, "modelopt"),
        (Container::Bitsandbytes, "bitsandbytes"),
        (Container::DeepseekFp8, fp8::CONTAINER),
        (Container::Mlx, mlx::NAME),
        (Container::Exl2, exl2::QUANT_METHOD),
        (Container::Exl3, exl3::QUANT_METHOD),
        (Container::Onnx, onnx::QUANT_METHOD),
        (Container::Mxfp4, gpt_oss::QUANT_METHOD),
    ];

    /// Name on the command line.
    pub fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(container, _)| *container == self).map_or("", |(_, name)| name)
    }

    /// The tensors that `plan` becomes. For GGUF under the names there, blocks as rows of bytes; for [`Container::Mxfp4`] an
    /// expert's part of them.
    ///
    /// # Errors
    /// [`NotStorable`] where the container cannot hold the scheme, or not on this shape.
    pub fn specs(self, plan: &LinearPlan<'_>) -> Result<Vec<TensorSpec>, NotStorable> {
        if plan.outliers > 0 && self != Container::Native {
            let why = format!("{} holds no single weights beside its codes; use native", self.name());
            return Err(NotStorable { scheme: plan.scheme.to_string(), why });
        }
        match self {
            Container::CompressedTensors => compressed_tensors::specs(plan),
            Container::Gguf => gguf::specs(plan),
            Container::Native => native::specs(plan),
            Container::Gptq => gptq::specs(plan),
            Container::Awq => awq::specs(plan),
            Container::Modelopt => modelopt::specs(plan),
            Container::Bitsandbytes => bitsandbytes::specs(plan),
            Container::DeepseekFp8 => fp8::specs(plan),
            Container::Mlx => mlx::specs(plan),
            Container::Exl2 => exl2::specs(plan),
            Container::Exl3 => exl3::specs(plan),
            Container::Onnx => onnx::specs(plan),
            Container::Mxfp4 => gpt_oss::specs(plan),
        }
    }

    /// The bytes of those tensors, by name. For GGUF the rows are still in Hugging Face order
    /// ([`gguf::to_gguf_order`]).
    ///
    /// # Errors
    /// As [`specs`](Self::specs).
    pub fn tensors(
        self,
        plan: &LinearPlan<'_>,
        q: &Quantized,
    ) -> Result<Vec<(String, Vec<u8>)>, NotStorable> {
        match self {
            Container::CompressedTensors => compressed_tensors::tensors(plan, q, None),
            Container::Gguf => gguf::tensors(plan, q),
            Container::Native => native::tensors(plan, q),
            Container::Gptq => gptq::tensors(plan, q, None, plan.scheme.format.has_zero()),
            Container::Awq => awq::tensors(plan, q),
            Container::Modelopt => modelopt::tensors(plan, q),
            Container::Bitsandbytes => bitsandbytes::tensors(plan, q),
            Container::DeepseekFp8 => fp8::tensors(plan, q),
            Container::Mlx => mlx::tensors(plan, q),
            Container::Exl2 => exl2::tensors(plan, q),
            Container::Exl3 => exl3::tensors(plan, q),
            Container::Onnx => onnx::tensors(plan, q),
            Container::Mxfp4 => gpt_oss::part(plan, q),
        }
    }

    /// The scheme as this container stores it, in a model of `dtype`: what would be an f32 scale is in the dtype of the model
    /// or always f16, NVFP4's tensor-wide scale a factor or its reciprocal, and EXL3 has a scale for each channel.
    pub fn as_stored(self, mut scheme: Scheme, dtype: Dtype) -> Scheme {
        let scales = match self {
            // Its loaders cast to the dtype of the model.
            Container::CompressedTensors => dtype,
            Container::Modelopt if matches!(scheme.format.blocks(), Blocks::Group(_)) => dtype,
            Container::Gptq | Container::Awq | Container::Exl2 => Dtype::F16,
            _ => Dtype::F32,
        };
        let plain_f32 = scheme.format.scale().is_some_and(|s| s.code == Code::F32 && s.outer.is_none());
        scheme.format = match scales {
            Dtype::BF16 if plain_f32 => scheme.format.with_scale_code(Code::Float(minifloat::BF16)),
            Dtype::F16 if plain_f32 => scheme.format.with_scale_code(Code::Float(minifloat::F16)),
            _ => scheme.format,
        };
        if let (Container::Exl3, Format::Trellis(trellis)) = (self, &mut scheme.format) {
            trellis.channels = true;
        }
        if self == Container::Modelopt { modelopt::as_stored(scheme) } else { scheme }
    }

    /// The tensors of a layer as it was read, with all that is stored around its codes: the scale of its inputs, factors,
    /// orders. Without its bias. A dense layer has none.
    ///
    /// # Errors
    /// [`NotStorable`] where the container cannot hold all of it.
    pub fn store(
        self,
        module: &str,
        layer: &LinearWeight,
    ) -> Result<Vec<(TensorSpec, Vec<u8>)>, NotStorable> {
        match self {
            Container::Modelopt => return modelopt::store(module, layer),
            Container::Bitsandbytes => return bitsandbytes::store(module, layer),
            Container::DeepseekFp8 => return fp8::store(module, layer),
            Container::Exl2 => return exl2::store(module, layer),
            _ => {}
        }
        let Weight::Quantized(q) = &layer.weight else { return Ok(Vec::new()) };
        let scheme = Scheme::new(q.format.clone(), Rule::Amax);
        let no = |why: &str| {
            let why = format!("{module}: {} {why}", self.name());
            Err(NotStorable { scheme: scheme.to_string(), why })
        };
        let stored = layer.input.as_ref().is_some_and(|input| input.outer.is_some());
        if stored && !matches!(self, Container::CompressedTensors | Container::Native) {
            return no("holds no stored scale of the inputs");
        }
        if layer.input.as_ref().is_some_and(|input| input.keep_above.is_some()) {
            return no("keeps no columns of the inputs");
        }
        let input = layer.input.as_ref().map(|input| &input.scheme);
        let around = &layer.transforms;
        let plan = LinearPlan {
            by_group: !around.before.is_empty(),
            input_scale: layer.input.as_ref().and_then(|input| input.outer),
            ..LinearPlan::new(module, &scheme, input, (layer.rows, layer.cols))
        };
        let bytes = match around.before.as_slice() {
            [] if around.is_empty() => self.tensors(&plan, q)?,
            [] if around.after.is_empty() && self == Container::Native => {
                return native::store(&plan, q, &around.extras);
            }
            [Map::Perm(order)] if around.after.is_empty() && around.extras.is_empty() => {
                let (own, g_idx) = gptq::in_own_order(q, order);
                self.tensors_by_group(&plan, &own, &g_idx)?
            }
            _ => return no("holds nothing around the codes but the order of columns"),
        };
        Ok(self.specs(&plan)?.into_iter().zip(bytes.into_iter().map(|(_, bytes)| bytes)).collect())
    }

    /// [`tensors`](Self::tensors) of a weight with `outliers`, an [`Extra::Sparse`] of as many as the plan says.
    ///
    /// # Errors
    /// As [`specs`](Self::specs).
    pub fn tensors_with_outliers(
        self,
        plan: &LinearPlan<'_>,
        q: &Quantized,
        outliers: &Extra,
    ) -> Result<Vec<(String, Vec<u8>)>, NotStorable> {
        self.specs(plan)?;
        native::tensors_with_outliers(plan, q, outliers)
    }

    /// Whether it can say that groups are not of neighbouring columns.
    pub fn holds_group_order(self) -> bool {
        matches!(self, Container::Gptq | Container::CompressedTensors)
    }

    /// Whether it can store a scale of the inputs that calibration finds.
    pub fn holds_input_scales(self) -> bool {
        matches!(self, Container::CompressedTensors | Container::Modelopt | Container::Native)
    }

    /// Whether readers of it multiply integers by scales of either sign. AutoRound's own files have such scales; llama.cpp's Q4_0
    /// has them in its blocks, which are not in question here.
    pub fn holds_signed_scales(self) -> bool {
        matches!(self, Container::CompressedTensors | Container::Gptq | Container::Native)
    }

    /// [`tensors`](Self::tensors) of a weight whose column `k` is of group `g_idx[k]`, codes in the order of the weight.
    ///
    /// # Errors
    /// As [`specs`](Self::specs), and where the container does not [hold](Self::holds_group_order) that.
    pub fn tensors_by_group(
        self,
        plan: &LinearPlan<'_>,
        q: &Quantized,
        g_idx: &[u32],
    ) -> Result<Vec<(String, Vec<u8>)>, NotStorable> {
        match self {
            Container::Gptq => gptq::tensors(plan, q, Some(g_idx), plan.scheme.format.has_zero()),
            Container::CompressedTensors => compressed_tensors::tensors(plan, q, Some(g_idx)),
            _ => {
                let why = format!("{} holds no g_idx, the group of each column; use gptq", self.name());
                Err(NotStorable { scheme: plan.scheme.to_string(), why })
            }
        }
    }
}
