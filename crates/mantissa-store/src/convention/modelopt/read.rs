//! Tensors of a module → codes and scales.

use mantissa_num::format::{Affine, Format, Offset, Sense};
use mantissa_num::pack::Packing;
use mantissa_num::stored::{Map, Transforms};
use mantissa_num::{Blocks, Code, Codes, Quantized, Rule, ScaleLevel, ScaleTree, Scheme, Source, minifloat};

use super::config::{Algo, Config};
use crate::convention::scale_dtype::scale_code;
use crate::convention::sound::{self, Names};
use crate::convention::weight::StoredLinear;
use crate::convention::{ActivationQuant, KvQuant, ModelFiles, Weight};
use crate::{Dtype, Result};

/// Elements of a block of NVFP4.
const NVFP4_BLOCK: u32 = 16;

impl Config {
    /// Weight of `module`, the multiplier of its input (`pre_quant_scale`), and the quantization of the result. A
    /// float weight of 16 bits or more is unquantized.
    ///
    /// # Errors
    /// A tensor of the module is missing, or its dtype or shape differs from its algorithm.
    pub(super) fn layer(
        &self,
        files: &ModelFiles,
        module: &str,
        rows: usize,
        cols: usize,
    ) -> Result<StoredLinear> {
        let name = format!("{module}.weight");
        if !matches!(files.meta(&name)?.dtype, Dtype::U8 | Dtype::I8 | Dtype::F8E4M3) {
            return Ok(files.dense_without(module, "weight_scale", rows, cols)?.into());
        }
        let algo = self.algo(module).ok_or_else(|| {
            let hint = "the layer holds codes and the list does not name it";
            let allowed = format!("an entry in quantized_layers of {}", self.path.display());
            files.fault(
                &name,
                format!("dtype {}", files.meta(&name).map_or("", |m| m.dtype.name())),
                allowed,
                hint,
            )
        })?;
        let layer = Reader { config: self, files, module, rows, cols };
        let (q, input) = match algo {
            Algo::Fp8 => (layer.fp8(Blocks::Tensor)?, layer.static_fp8()?),
            Algo::Fp8PerChannel => (layer.fp8(Blocks::Row)?, Some(ActivationQuant::new(per_token(), None))),
            Algo::Int4Awq => (layer.int4()?, None),
            Algo::Nvfp4 => (layer.nvfp4()?, layer.nvfp4_input()?),
            Algo::Nvfp4WeightOnly => (layer.nvfp4()?, None),
            Algo::Mxfp8 => (layer.mxfp8()?, Some(ActivationQuant::new(mxfp8_input(), None))),
        };
        let transforms = layer.pre_quant_scale()?;
        Ok(StoredLinear { weight: Weight::Quantized(q), input, transforms })
    }

    /// Scales of the KV cache of the attention `module`.
    ///
    /// # Errors
    /// A scale is present with another shape or not finite, or the cache is affine.
    pub(super) fn cache(&self, files: &ModelFiles, module: &str, kv_heads: usize) -> Result<Option<KvQuant>> {
        let Some(scheme) = self.kv.clone() else { return Ok(None) };
        for bias in ["k_proj.k_bias", "v_proj.v_bias"].map(|name| format!("{module}.{name}")) {
            if files.has(&bias) {
                return Err(files.fault(&bias, "a tensor", "none", "affine caches are not read"));
            }
        }
        let scale = |name: &str| files.read_cache_scale(&format!("{module}.{name}"), kv_heads);
        Ok(Some(KvQuant { scheme, k_scale: scale("k_proj.k_scale")?, v_scale: scale("v_proj.v_scale")? }))
    }
}

/// FP8 with a scale per token.
pub(super) fn per_token() -> Scheme {
    let scheme = Scheme::scaled_float(Code::Float(minifloat::E4M3), Blocks::Row);
    scheme.with_rows(mantissa_num::RowKind::Token)
}

/// FP8 with a stored scale.
pub(super) fn fixed() -> Scheme {
    let scheme = Scheme::scaled_float(Code::Float(minifloat::E4M3), Blocks::Tensor);
    Scheme { source: Source::Static, ..scheme }
}

/// MXFP8 as converted by GPUs: the exponent is rounded up.
pub(super) fn mxfp8_input() -> Scheme {
    let mut scheme = Scheme::mx(Code::Float(minifloat::E4M3));
    scheme.encoder.rule = Rule::Rceil;
    scheme
}

struct Reader<'a> {
    config: &'a Config,
    files: &'a ModelFiles,
    module: &'a str,
    rows: usize,
    cols: usize,
}

impl Reader<'_> {
    fn name(&self, suffix: &str) -> String {
        format!("{}.{suffix}", self.module)
    }

    /// Combines codes and scales; refuses invalid values.
    fn weight(
        &self,
        (code, blocks, scale): (Code, Blocks, ScaleTree),
        codes: Vec<u8>,
        scales: Codes,
        outer: Option<f32>,
    ) -> Result<Quantized> {
        let format = Format::Affine(Affine { code, blocks, scale: Some(scale), offset: Offset::None });
        let empty = Quantized::empty(format, self.rows, self.cols);
        let q = Quantized {
            codes: Codes::U8(codes),
            scales: ScaleLevel::from(scales).with_outer(outer),
            ..empty
        };
        let (codes, scales) = (self.name("weight"), self.name("weight_scale"));
        sound::check(self.files, Names { codes: &codes, scales: &scales, zeros: &scales }, &q)?;
        Ok(q)
    }

    fn fp8(&self, blocks: Blocks) -> Result<Quantized> {
        let (name, scale) = (self.name("weight"), self.name("weight_scale"));
        let codes = self.files.read_exact(&name, &[Dtype::F8E4M3], &[self.rows, self.cols])?;
        let meta = self.files.meta(&scale)?;
        self.files.expect_dtype(meta, &[Dtype::F32, Dtype::BF16, Dtype::F16])?;
        // One per channel may lack the second axis.
        if meta.shape != [self.rows] || blocks != Blocks::Row {
            self.files.expect_grid(meta, &blocks.grid(self.rows, self.cols))?;
        }
        let code = scale_code(meta.dtype).unwrap_or(Code::F32);
        let scales = Codes::from_le_bytes(code.unit_bytes(), &self.files.checkpoint().read(&scale)?);
        self.weight((Code::Float(minifloat::E4M3), blocks, ScaleTree::leaf(code)), codes, scales, None)
    }

    fn static_fp8(&self) -> Result<Option<ActivationQuant>> {
        let name = self.name("input_scale");
        if !self.files.has(&name) {
            return Ok(None);
        }
        Ok(Some(ActivationQuant::new(fixed(), Some(self.positive(&name)?))))
    }

    /// A stored scale, which is greater than 0.
    fn positive(&self, name: &str) -> Result<f32> {
        let scale = self.files.read_scalar(name)?;
        if scale > 0.0 {
            return Ok(scale);
        }
        Err(self.files.fault(name, scale.to_string(), "a scale greater than 0", ""))
    }

    fn nvfp4(&self) -> Result<Quantized> {
        let (name, scale) = (self.name("weight"), self.name("weight_scale"));
        let outer = self.positive(&self.name("weight_scale_2"))?;
        let bytes = self.files.read_exact(&name, &[Dtype::U8], &[self.rows, self.cols.div_ceil(2)])?;
        let codes = self.unpacked(&name, Packing::rows(4).unpack(&bytes, self.rows, self.cols, false))?;
        let blocks = Blocks::Group(NVFP4_BLOCK);
        let scales = self.files.read_exact(&scale, &[Dtype::F8E4M3], &blocks.grid(self.rows, self.cols))?;
        // The global scale is a factor, as in torchao.
        let format = Scheme::nvfp4(Some(Sense::Multiplier)).format;
        let tree = format.scale().cloned().unwrap_or(ScaleTree::leaf(Code::F32));
        let element = Code::Float(minifloat::E2M1);
        self.weight((element, blocks, tree), codes, Codes::U8(scales), Some(outer))
    }

    /// Servers use the reciprocal of `input_scale` as compressed-tensors' global scale.
    fn nvfp4_input(&self) -> Result<Option<ActivationQuant>> {
        let name = self.name("input_scale");
        if !self.files.has(&name) {
            return Ok(None);
        }
        let global = 1.0 / self.positive(&name)?;
        if !global.is_finite() {
            let found = format!("a scale of {:e}", 1.0 / global);
            return Err(self.files.fault(&name, found, "a scale with a finite reciprocal", ""));
        }
        Ok(Some(ActivationQuant::new(Scheme::nvfp4(Some(Sense::Divisor)), Some(global))))
    }

    fn mxfp8(&self) -> Result<Quantized> {
        let name = self.name("weight");
        let codes = self.files.read_exact(&name, &[Dtype::F8E4M3], &[self.rows, self.cols])?;
        let blocks = Blocks::Group(32);
        let allowed = [Dtype::U8, Dtype::F8E8M0];
        let scales = self.files.read_exact(
            &self.name("weight_scale"),
            &allowed,
            &blocks.grid(self.rows, self.cols),
        )?;
        let tree = ScaleTree::leaf(Code::E8m0);
        self.weight((Code::Float(minifloat::E4M3), blocks, tree), codes, Codes::U8(scales), None)
    }

    fn int4(&self) -> Result<Quantized> {
        let (name, scale) = (self.name("weight"), self.name("weight_scale"));
        let bytes = self.files.read_exact(&name, &[Dtype::U8], &[self.rows.div_ceil(2), self.cols])?;
        let packing = Packing::rows(4);
        let codes = self.unpacked(&name, packing.unpack_dim0(&bytes, self.rows, self.cols, true))?;
        let meta = self.files.meta(&scale)?;
        self.files.expect_dtype(meta, &[Dtype::F32, Dtype::BF16, Dtype::F16])?;
        let blocks = match self.config.group {
            Some(group) => Blocks::Group(group),
            // Older configurations omit the group size, so take it from the shape.
            None => match meta.shape.as_slice() {
                &[_, groups] if groups > 0 && self.cols.is_multiple_of(groups) => {
                    Blocks::Group(u32::try_from(self.cols / groups).unwrap_or(u32::MAX))
                }
                _ => Blocks::Row,
            },
        };
        let (code, scales) = self.files.read_scales(&scale, &blocks.grid(self.rows, self.cols))?;
        self.weight((Code::Int(4), blocks, ScaleTree::leaf(code)), codes, scales, None)
    }

    fn unpacked(&self, name: &str, codes: Option<Vec<u8>>) -> Result<Vec<u8>> {
        codes.ok_or_else(|| self.files.fault(name, "a wrong length", "two codes to a byte", ""))
    }

    fn pre_quant_scale(&self) -> Result<Transforms> {
        let name = self.name("pre_quant_scale");
        let mut transforms = Transforms::default();
        if let Some(meta) = self.files.checkpoint().get(&name) {
            self.files.expect_dtype(meta, &[Dtype::F32, Dtype::BF16, Dtype::F16])?;
            transforms.before.push(Map::Diag(self.files.tensor_f32(&name, &[self.cols])?));
        }
        Ok(transforms)
    }
}
