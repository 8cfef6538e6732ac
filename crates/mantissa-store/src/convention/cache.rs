//! Schemes of the KV cache that formats can store.

use mantissa_num::{Affine, Blocks, Code, Format, Offset, RowKind, Rule, Scheme, Source, minifloat};

use super::plan::{NotStorable, Storable};

/// Key of the KV-cache scheme in the `quantization_config` of the native format.
pub(super) const NATIVE_KEY: &str = "kv_cache";

/// Number of scales that a scheme of keys or values stores in a layer of `heads` key-value heads: one per head, or
/// one.
pub fn stored_scales(scheme: &Scheme, heads: usize) -> usize {
    match scheme.source {
        Source::Static if scheme.row == RowKind::Head => heads,
        Source::Static => 1,
        _ => 0,
    }
}

/// Returns the scheme with one block, as [`KvQuant`](super::KvQuant) has it, whether the scale is per head or per tensor.
pub fn of_one_block(scheme: &Scheme) -> Scheme {
    let mut scheme = scheme.clone();
    if let (Format::Affine(affine), Source::Static) = (&mut scheme.format, scheme.source) {
        affine.blocks = Blocks::Tensor;
    }
    scheme
}

/// Returns the scheme with a block for each head.
pub fn by_head(scheme: &Scheme) -> Scheme {
    let mut scheme = scheme.clone().with_rows(RowKind::Head);
    if let Format::Affine(affine) = &mut scheme.format {
        affine.blocks = Blocks::Row;
    }
    scheme
}

/// Reason why a format cannot hold a KV cache of `scheme`.
pub(super) fn not_storable(scheme: &Scheme, why: impl Into<String>) -> NotStorable {
    NotStorable { scheme: format!("kv-{scheme}"), why: why.into() }
}

/// Refuses a cache with scales computed at run time, which the format `name` cannot record.
pub(super) fn require_static(name: &str, scheme: &Scheme) -> Storable<()> {
    if scheme.source == Source::Static {
        return Ok(());
    }
    let why = "cannot record a KV cache with scales computed at run time, only @static ones";
    Err(not_storable(scheme, format!("{name} {why}")))
}

/// `type` of an 8-bit cache in compressed-tensors and ModelOpt.
pub(super) fn element_type(scheme: &Scheme) -> &'static str {
    if is_float(scheme) { "float" } else { "int" }
}

/// ModelOpt's name of an 8-bit cache (`kv_cache_quant_algo`).
pub fn modelopt_algo(scheme: &Scheme) -> &'static str {
    if is_float(scheme) { "FP8" } else { "INT8" }
}

fn is_float(scheme: &Scheme) -> bool {
    matches!(&scheme.format, Format::Affine(Affine { code: Code::Float(_), .. }))
}

/// True for symmetric elements of 8 bits with one scale per tensor or per head.
pub(super) fn is_fixed(scheme: &Scheme) -> bool {
    let whole = match scheme.format.blocks() {
        Blocks::Tensor => true,
        Blocks::Row => scheme.row == RowKind::Head,
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

/// True if serving engines support the element and its rule.
pub(super) fn known(scheme: &Scheme) -> bool {
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

    use crate::convention::{Container, compressed_tensors, gguf, modelopt, native};

    #[test]
    fn formats_hold_the_caches_their_readers_support() {
        let check = |container: Container, text: &str| container.check_kv(&parse_activation(text).unwrap());
        for text in ["fp8-e4m3-tensor@static", "int8-tensor@static"] {
            for container in [compressed_tensors::CONTAINER, modelopt::CONTAINER, native::CONTAINER] {
                check(container, text).unwrap();
            }
            assert!(check(gguf::CONTAINER, text).unwrap_err().to_string().contains("gguf cannot record"));
        }
        check(compressed_tensors::CONTAINER, "fp8-e4m3-head@static").unwrap();
        assert!(check(modelopt::CONTAINER, "fp8-e4m3-head@static").is_err());
        assert!(
            check(compressed_tensors::CONTAINER, "int8-head")
                .unwrap_err()
                .to_string()
                .contains("only @static ones")
        );
        check(native::CONTAINER, "int4-g32-asym").unwrap();
        for text in ["int4-tensor@static", "int8-token@static", "nvfp4@static", "int8-tensor-asym@static"] {
            assert!(check(native::CONTAINER, text).is_err(), "{text}");
        }
    }
}
