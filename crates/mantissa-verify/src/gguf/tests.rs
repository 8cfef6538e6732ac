//! Every block type against the reference codec.

use super::{BlockType, Blocks, allowed, bound_group};
use mantissa_num::{CodecId, round::random_u32};

fn codec_of(ty: BlockType) -> CodecId {
    CodecId::ALL
        .into_iter()
        .find(|id| BlockType::from_name(id.name().trim_start_matches("gguf-")) == Some(ty))
        .unwrap()
}

const TYPES: [BlockType; 27] = [
    BlockType::IQ1_S,
    BlockType::IQ1_M,
    BlockType::IQ2_XXS,
    BlockType::IQ2_XS,
    BlockType::IQ2_S,
    BlockType::IQ3_XXS,
    BlockType::IQ3_S,
    BlockType::Q2_K,
    BlockType::Q3_K,
    BlockType::Q4_K,
    BlockType::Q5_K,
    BlockType::Q6_K,
    BlockType::IQ4_NL,
    BlockType::IQ4_XS,
    BlockType::Q1_0,
    BlockType::Q2_0,
    BlockType::Q8_1,
    BlockType::Q8_K,
    BlockType::Q4_0,
    BlockType::Q4_1,
    BlockType::Q5_0,
    BlockType::Q5_1,
    BlockType::Q8_0,
    BlockType::MXFP4,
    BlockType::NVFP4,
    BlockType::TQ1_0,
    BlockType::TQ2_0,
];

#[test]
fn any_bytes_decode_as_the_reference_decodes_them() {
    let blocks = Blocks::new();
    for ty in TYPES {
        let (elements, bytes) = ty.block();
        let codec = codec_of(ty).codec();
        for seed in 0..2000 {
            let block: Vec<u8> = (0..bytes as u64).map(|i| random_u32(seed, i) as u8).collect();
            let (mut ours, mut expected) = (vec![f32::NAN; elements], vec![0.0; elements]);
            blocks.decode(ty, &block, None, &mut ours);
            codec.decode_block(&block, &mut expected);
            for (a, b) in ours.iter().zip(&expected) {
                assert!(a == b || (a.is_nan() && b.is_nan()), "{ty:?}: {a} {b} {block:?}");
            }
        }
    }
}

#[test]
fn rounding_is_within_the_bound_and_a_wrong_scale_is_not() {
    let blocks = Blocks::new();
    // Q1_0 has only signs and an unbounded error; searched types are bounded only by their block.
    let bounded = |ty: &&BlockType| **ty != BlockType::Q1_0 && !codec_of(**ty).codec().is_searched();
    for &ty in TYPES.iter().filter(bounded) {
        let (elements, bytes) = ty.block();
        let (mut worst, mut doubled) = (0f64, 0f64);
        for seed in 0..500 {
            let size = 2f32.powi((random_u32(seed, 1 << 40) % 40) as i32 - 28);
            let x: Vec<f32> = (0..elements as u64)
                .map(|i| (random_u32(seed, i) as f32 / u32::MAX as f32 - 0.4) * size)
                .collect();
            let (mut block, mut out) = (vec![0; bytes], vec![0.0; elements]);
            codec_of(ty).codec().encode_block(&x, &mut block);
            blocks.decode(ty, &block, None, &mut out);
            let group = bound_group(ty);
            for (x, out) in x.chunks(group).zip(out.chunks(group)) {
                let bound = allowed(ty, x, 1.0, false);
                let ratio = |factor: f32| {
                    let error = |(x, v): (&f32, &f32)| f64::from((x - factor * v).abs());
                    x.iter().zip(out).map(error).fold(0.0, f64::max) / bound
                };
                worst = worst.max(ratio(1.0));
                if size > 1.0 {
                    doubled = doubled.max(ratio(2.0));
                }
            }
        }
        assert!(worst <= 1.0 && worst > 0.3, "{ty:?}: {worst}");
        assert!(doubled > 1.0, "{ty:?}: {doubled}");
    }
}
