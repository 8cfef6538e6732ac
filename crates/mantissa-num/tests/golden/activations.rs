//! `activation_fake_quant`: run-time quantization of inputs as compressed-tensors computes it, each token by itself.

use mantissa_num::{Given, Scheme, fake_quantize, parse_activation};
use safetensors::SafeTensors;

use crate::support::{Get, assert_same};

const SCHEMES: [(&str, &str); 5] = [
    ("int8-token", "int8_token"),
    ("fp8-e4m3-token", "fp8_token"),
    ("mxfp4:ct", "mxfp4"),
    ("mxfp8-e4m3:ct", "mxfp8"),
    ("nvfp4", "nvfp4"),
];

#[test]
fn inputs_are_quantized_bit_for_bit() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/data/activation_fake_quant.safetensors");
    let bytes = std::fs::read(path).unwrap();
    let t = SafeTensors::deserialize(&bytes).unwrap();
    let x = t.f32("x").unwrap();
    let (rows, cols) = t.shape2("x");
    for (text, golden) in SCHEMES {
        let scheme: Scheme = parse_activation(text).unwrap();
        let outer = scheme.has_outer_scale().then(|| t.f32("input_global_scale").unwrap()[0]);
        let mut y = x.clone();
        for row in y.chunks_exact_mut(cols) {
            fake_quantize(&scheme, row, 1, cols, Given { outer, first_index: 0, ..Given::default() })
                .unwrap();
        }
        assert_eq!(y.len(), rows * cols);
        assert_same(golden, &y, &t.f32(&format!("{golden}.y")).unwrap(), false);
    }
}
