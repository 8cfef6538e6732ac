//! Scales of the KV cache as conventions write them. Reading is each convention's own.

use mantissa_num::{Affine, Blocks, Code, Format, Offset, RowName, Rule, Scheme, Source, minifloat};
use serde_json::{Value, json};

use super::{Container, NotStorable};
use crate::{Dtype, TensorSpec};

/// Key of the native container's `quantization_config`.
pub(super) const NATIVE_KEY: &str = "kv_cache";

/// How many scales a scheme of keys or values stores in a layer of `heads` key-value heads: one per head where it is by head.
pub fn stored_scales(scheme: &Scheme, heads: usize) -> usize {
    match scheme.source {
        Source::Static if scheme.row == RowName::Head => heads,
        Source::Static => 1,
        _ => 0,
    }
}

/// The same scheme with one block, as [`KvQuant`](super::KvQuant) has it, whether a head or all heads share a scale.
pub fn of_one_block(scheme: &Scheme) -> Scheme {
    let mut scheme = scheme.clone();
    if let (Format::Affine(affine), Source::Static) = (&mut scheme.format, scheme.source) {
        affine.blocks = Blocks::Tensor;
    }
    scheme
}

/// The same scheme with a block for each head.
pub fn by_head(scheme: &Scheme) -> Scheme {
    let mut scheme = Scheme { row: RowName::Head, ..scheme.clone() };
    if let Format::Affine(affine) = &mut scheme.format {
        affine.blocks = Blocks::Row;
    }
    scheme
}

impl Container {
    /// Whether the container can say that keys and values are stored under `scheme`.
    ///
    /// # Errors
    /// [`NotStorable`] with the reason.
    pub fn check_kv(self, scheme: &Scheme) -> Result<(), NotStorable> {
        let no = |why: &str| {
            let why = format!("{} {why}", self.name());
            Err(NotStorable { scheme: format!("kv-{scheme}"), why })
        };
        let fixed = scheme.source == Source::Static;
        if fixed && !is_fixed(scheme) {
            return no(
                "stores scales of a KV cache of 8-bit integers or floats, one for all or one per head: int8-tensor@static, fp8-e4m3-head@static …",
            );
        }
        match self {
            Container::Native => Ok(()),
            Container::CompressedTensors | Container::Modelopt if !fixed => no(
                "says nothing of a cache whose scales are taken as it is written: @static, or --format native",
            ),
            Container::CompressedTensors => match known(scheme) {
                true => Ok(()),
                false => no("knows a KV cache of int8 (:full) and fp8-e4m3"),
            },
            Container::Modelopt => match known(scheme) && scheme.row != RowName::Head {
                true => Ok(()),
                false => no("knows a KV cache of int8 (:full) and fp8-e4m3 with one scale for all heads"),
            },
            _ => no("has no place for how keys and values are stored"),
        }
    }

    /// The tensors of the scales of the keys and of the values of the attention `module`, `count` scales each.
    pub fn kv_specs(self, module: &str, count: usize) -> [TensorSpec; 2] {
        let shape = match (self, count) {
            (Container::Modelopt, _) => vec![],
            (_, 1) => vec![1],
            _ => vec![count, 1, 1],
        };
        let (k, v) = match self {
            Container::Modelopt => ("k_proj.k_scale", "v_proj.v_scale"),
            _ => ("k_scale", "v_scale"),
        };
        [k, v].map(|suffix| TensorSpec::new(format!("{module}.{suffix}"), Dtype::F32, shape.clone()))
    }

    /// Says in `quantization`, the container's `quantization_config`, that keys and values are stored under `scheme`.
    pub fn declare_kv(self, scheme: &Scheme, quantization: &mut Value) {
        let (bits, kind) = (8, if is_float(scheme) { "float" } else { "int" });
        match self {
            Container::CompressedTensors => {
                let strategy = if scheme.row == RowName::Head { "attn_head" } else { "tensor" };
                quantization["kv_cache_scheme"] = json!({
                    "actorder": null, "block_structure": null, "dynamic": false, "group_size": null, "num_bits": bits,
                    "observer": "minmax", "observer_kwargs": {}, "scale_dtype": null, "strategy": strategy,
                    "symmetric": true, "type": kind, "zp_dtype": null,
                });
            }
            Container::Modelopt => {
                quantization["kv_cache_scheme"] = json!({"dynamic": false, "num_bits": bits, "type": kind});
            }
            _ => quantization[NATIVE_KEY] = json!(scheme.to_string()),
        }
    }
}

/// ModelOpt's name of a cache that [`Container::check_kv`] lets it hold.
pub fn modelopt_algo(scheme: &Scheme) -> &'static str {
    if is_float(scheme) { "FP8" } else { "INT8" }
}

fn is_float(scheme: &Scheme) -> bool {
    matches!(&scheme.format, Format::Affine(Affine { code: Code::Float(_), .. }))
}

/// Symmetric elements of 8 bits with one scale for all values or for a head's.
fn is_fixed(scheme: &Scheme) -> bool {
    let whole = match scheme.format.blocks() {
        Blocks::Tensor => true,
        Blocks::Row => scheme.row == RowName::Head,
        _ => false,
    };
    let Format::Affine(Affine { code, scale: Some(scale), offset: Offset::None, .. }) = &scheme.format else {
        return false;
    };
    let element = match code {
        Code::Int(8) => matches!(scheme.encoder.rule, Rule::Full | Rule::Restricted),
        Code::Float(float) => float.bits() == 8 && scheme.encoder.rule == Rule::Amax,
        _ => false,
    };
    whole && element && scale.code == Code::F32 && scale.outer.is_none()
}

/// Whether servers have the element and its rule.
fn known(scheme: &Scheme) -> bool {
    match &scheme.format {
        Format::Affine(Affine { code: Code::Int(8), .. }) => scheme.encoder.rule == Rule::Full,
        Format::Affine(Affine { code: Code::Float(float), .. }) => *float == minifloat::E4M3,
        _ => false,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use mantissa_num::parse_activation;

    use super::*;

    #[test]
    fn containers_hold_what_their_readers_know() {
        let check = |container: Container, text: &str| container.check_kv(&parse_activation(text).unwrap());
        for text in ["fp8-e4m3-tensor@static", "int8-tensor@static"] {
            for container in [Container::CompressedTensors, Container::Modelopt, Container::Native] {
                check(container, text).unwrap();
            }
            assert!(check(Container::Gguf, text).unwrap_err().to_string().contains("gguf has no place"));
        }
        check(Container::CompressedTensors, "fp8-e4m3-head@static").unwrap();
        assert!(check(Container::Modelopt, "fp8-e4m3-head@static").is_err());
        assert!(check(Container::CompressedTensors, "int8-head").unwrap_err().to_string().contains("native"));
        check(Container::Native, "int4-g32-asym").unwrap();
        for text in ["int4-tensor@static", "int8-token@static", "nvfp4@static", "int8-tensor-asym@static"] {
            assert!(check(Container::Native, text).is_err(), "{text}");
        }
    }
}
