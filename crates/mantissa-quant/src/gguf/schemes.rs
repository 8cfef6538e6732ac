//! Schemes of tensors in GGUF: what stands in for blocks that do not divide a row, and the schemes of tensors that are
//! not quantized as layers.

use mantissa_model::ModelConfig;
use mantissa_num::{Code, Format, Rule, Scheme, minifloat};
use mantissa_store::convention::ModelFiles;
use mantissa_store::{Dtype, Error};

use super::ternary;
use crate::error::Result;
use crate::recipe::stored_type;

/// Returns the fallback of a layer's scheme for rows of `cols`: blocks of 32, or f16.
pub(super) fn fitting_in(config: &ModelConfig, wanted: &Scheme, cols: usize) -> Scheme {
    let ternary = wanted.format.codec().and_then(|codec| ternary::smaller(config, codec.id));
    match ternary.filter(|codec| cols.is_multiple_of(codec.codec().elements)) {
        Some(codec) => Scheme::codec(codec),
        None => fitting(wanted, cols),
    }
}

/// Returns the fallback of another tensor's scheme.
pub(super) fn fitting(wanted: &Scheme, cols: usize) -> Scheme {
    let codec = match wanted.format {
        Format::Codec(codec) => stored_type(codec, cols),
        _ => None,
    };
    codec.map_or_else(|| plain(minifloat::F16), Scheme::codec)
}

pub(super) fn source_scheme(source: &ModelFiles, name: &str) -> Result<Scheme> {
    let meta = source.checkpoint().get(name);
    let meta =
        meta.ok_or_else(|| Error::NoTensor { path: source.dir().to_owned(), tensor: name.to_owned() })?;
    Ok(match meta.dtype {
        Dtype::F16 => plain(minifloat::F16),
        Dtype::BF16 => plain(minifloat::BF16),
        _ => Scheme::new(Format::plain(Code::F32), Rule::Amax),
    })
}

pub(super) fn plain(float: minifloat::MiniFloat) -> Scheme {
    Scheme::new(Format::plain(Code::Float(float)), Rule::Amax)
}
