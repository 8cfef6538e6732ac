use mantissa_num::{Given, quantize};

use super::*;
use mantissa_store::convention::{compressed_tensors, gguf};

const SHAPE: (usize, usize) = (4, 128);

fn values() -> Vec<f32> {
    (0..SHAPE.0 * SHAPE.1).map(|i| ((i as f32 * 0.37).sin() + 0.2) * 0.5f32.powi((i % 5) as i32)).collect()
}

fn quantized(scheme: &str, scale: Option<MiniFloat>) -> Quantized {
    let mut scheme: Scheme = scheme.parse().unwrap();
    if let Some(float) = scale {
        scheme.format = scheme.format.with_scale_code(Code::Float(float));
    }
    quantize(&scheme, &values(), SHAPE.0, SHAPE.1, Given::default()).unwrap()
}

fn format(scheme: &str) -> Format {
    scheme.parse::<Scheme>().unwrap().format
}

/// Recoding there and back gives the same codes and scales.
#[test]
fn recoding_is_reversible() {
    for (from, scale, to) in [
        ("int4-g32", Some(F16), Format::Codec(CodecId::Q4_0)),
        ("int4-g128", Some(F16), Format::Codec(CodecId::Q4_0)),
        ("int8-g32", Some(BF16), format("int8-g32")),
        ("int8-channel", Some(F16), Format::Codec(CodecId::Q8_0)),
        ("int4-g32", Some(BF16), format("int4-g32-asym")),
        ("nvfp4:ct", None, format("nvfp4:torchao")),
        ("nvfp4:torchao", None, format("nvfp4:ct")),
    ] {
        let q = quantized(from, scale);
        let there = recode(
            &q,
            &to.clone().with_scale_code(scale.map_or_else(|| to.scale().unwrap().code, Code::Float)),
        );
        let there = exact(&q, there.unwrap_or_else(|why| panic!("{from}: {why}"))).unwrap();
        let values = there.dequantize().unwrap();
        if from.starts_with("nvfp4") {
            let back = recode(&there, &q.format).unwrap();
            assert_eq!((&back.codes, &back.scales.codes), (&q.codes, &q.scales.codes), "{from}");
            assert!(back.outer().unwrap().to_bits().abs_diff(q.outer().unwrap().to_bits()) <= 1, "{from}");
        } else {
            assert_eq!(values, q.dequantize().unwrap(), "{from}");
            if there.format.codec().is_none() {
                assert_eq!(recode(&there, &q.format).unwrap(), q, "{from}");
            }
        }
    }
}

#[test]
fn blocks_unpack_to_codes_and_scales() {
    for name in ["q4_0", "q8_0", "mxfp4-blocks", "nvfp4-blocks"] {
        let id = match name {
            "q4_0" => CodecId::Q4_0,
            "q8_0" => CodecId::Q8_0,
            "mxfp4-blocks" => CodecId::Mxfp4,
            _ => CodecId::Nvfp4,
        };
        let q = quantize(&Scheme::codec(id), &values(), SHAPE.0, SHAPE.1, Given::default()).unwrap();
        let open = unpack_blocks(&q).unwrap();
        assert_eq!(open.dequantize().unwrap(), q.dequantize().unwrap(), "{name}");
        if let CodecId::Q4_0 | CodecId::Q8_0 = id {
            assert_eq!(pack_blocks(&open, id).unwrap(), q, "{name}");
        }
    }
    let k = quantize(&Scheme::codec(CodecId::Q4_1), &values(), SHAPE.0, SHAPE.1, Given::default()).unwrap();
    assert!(unpack_blocks(&k).is_none() && recode(&k, &format("int4-g32")).is_err());
}

#[test]
fn values_that_do_not_fit_are_refused_with_their_place() {
    let q = quantized("int4-g32", None);
    let why = recode(&q, &q.format.clone().with_scale_code(Code::Float(F16))).unwrap_err();
    assert!(why.contains("not representable in f16") && why.contains("group 0"), "{why}");
    let asym = quantized("int4-g32-asym", Some(F16));
    let why = recode(&asym, &format("int4-g32").with_scale_code(Code::Float(F16))).unwrap_err();
    assert!(why.starts_with("zero point"), "{why}");
    let why = recode(&quantized("int4-g16", Some(F16)), &Format::Codec(CodecId::Q4_0)).unwrap_err();
    assert!(why.contains("whole blocks of 32"), "{why}");
    let nvfp4 = quantized("nvfp4:ct", None);
    let why = recode(&nvfp4, &format("nvfp4:torchao-1level")).unwrap_err();
    assert!(why.contains("global scale"), "{why}");
}

#[test]
fn the_container_decides_the_format() {
    let held = |q: &Quantized, container| target(q, container, "model.layers.0.mlp.up_proj", None, None);
    let (scheme, _) = held(&quantized("int4-g32", Some(F16)), gguf::CONTAINER).unwrap();
    assert_eq!(scheme.to_string(), "q4_0");
    let (scheme, q) = held(&quantized("nvfp4:torchao", None), compressed_tensors::CONTAINER).unwrap();
    assert_eq!(scheme.format, format("nvfp4:ct"));
    assert_eq!(q.codes, quantized("nvfp4:torchao", None).codes);
    let mx = quantize(&Scheme::codec(CodecId::Mxfp4), &values(), SHAPE.0, SHAPE.1, Given::default()).unwrap();
    let (scheme, _) = held(&mx, compressed_tensors::CONTAINER).unwrap();
    assert_eq!(scheme.format, format("mxfp4"));
    let q4_k = Quantized {
        codes: Codes::Packed(vec![0; 144 * 2]),
        ..Quantized::empty(Format::Codec(CodecId::Q4K), 4, 128)
    };
    let why = held(&q4_k, compressed_tensors::CONTAINER).unwrap_err();
    assert!(why.contains("compressed-tensors holds"), "{why}");
    // Loaders of this container only read bf16 scales of bf16 models.
    let bf16 = Some(Code::Float(BF16));
    let why = target(&quantized("int4-g32", Some(F16)), compressed_tensors::CONTAINER, "m", None, bf16)
        .unwrap_err();
    assert!(why.contains("not representable in bf16"), "{why}");
}

/// A scheme's name in the output is parsed to the format of the weights.
#[test]
fn names_of_formats_parse_to_them() {
    for name in [
        "int4-g32",
        "int4-g32-asym",
        "int4-g32-asym:minmax",
        "int8-channel-asym:minmax",
        "fp8-e4m3-t128x128",
        "fp8-e4m3-t128x128:ue8m0",
        "mxfp4",
        "nvfp4:ct",
        "nvfp4:torchao",
        "nf4",
        "ternary-tensor",
    ] {
        let format = format(name);
        let named = Scheme::writing(format.clone()).to_string();
        assert_eq!(self::format(&named), format, "{name}: {named}");
    }
}
