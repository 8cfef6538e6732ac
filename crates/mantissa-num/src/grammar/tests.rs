//! Texts of schemes: parsed, printed and refused.

use super::*;
use proptest::prelude::*;

fn canonical(text: &str) -> String {
    text.parse::<Scheme>().unwrap().to_string()
}

#[test]
fn canonical_texts_round_trip() {
    for text in [
        "f32",
        "bf16",
        "fp8-e4m3",
        "fp8-e4m3fnuz",
        "fp8-e4m3-tensor",
        "fp8-e5m2-token@static",
        "fp8-e4m3-t128x128",
        "int8-channel",
        "int8-token:restricted",
        "int4-token:clip85",
        "int8-token:clip99",
        "int4-g128-asym",
        "int3-g32:torchao",
        "int2-tensor-asym:torchao",
        "int8-head",
        "nf4",
        "nf4-g128",
        "fp4-bnb",
        "mxfp4",
        "mxfp4:ct",
        "mxint8:torchao-rceil",
        "mxfp6-e3m2:even",
        "nvfp4",
        "nvfp4:te",
        "fp6-e2m3",
        "int5-t1x128",
        "f64",
        "tf32",
        "ternary-tensor",
        "ternary-g64:amax",
        "dyn8",
        "dyn8-g4096:cpu",
        "dyn8-unsigned",
        "dyn4-g128",
        "lin8",
        "lin8-unsigned-g4096",
        "dyn8-tensor",
        "nf4-tensor",
        "nf4-dq",
        "nf4-g128-dq",
        "fp4-bnb-dq",
        "nvfp4:torchao",
        "nvfp4:torchao-1level",
        "nvfp4:te-2d",
        "nvfp4:4over6",
        "fp8-e4m3-t1x128:floor1e-4",
        "fp8-e4m3-t128x128:floor1e-12",
        "fp8-e4m3-t128x128:ue8m0",
        "fp8-e4m3-t1x128:deepseek-v3",
        "fp4-e2m1-g32:deepgemm",
        "mxfp4:deepgemm",
        "int4-head-asym:minmax",
        "int2-g32-asym:minmax",
        "fp8-e4m3-tensor@delayed1024",
        "q4_0",
        "q6_k",
        "iq2_xxs",
        "gguf-mxfp4",
        "trellis2",
        "trellis8-channel",
        "trellis2.5-channel-mul1",
        "trellis1-3inst",
    ] {
        assert_eq!(canonical(text), text);
    }
}

#[test]
fn spelt_out_defaults_print_short() {
    let cases = [
        ("int8-channel-sym:full", "int8-channel"),
        ("int4-g128-asym:ct", "int4-g128-asym"),
        ("mxfp4:floor", "mxfp4"),
        ("nvfp4:ct", "nvfp4"),
        ("nf4-g64", "nf4"),
        ("nf4-g64-dq", "nf4-dq"),
        ("dyn8-g256:nearest", "dyn8"),
        ("ternary-channel:absmean", "ternary-channel"),
        ("int8-token@dynamic", "int8-token"),
        ("trellis3-channel-mcg", "trellis3-channel"),
    ];
    for (long, short) in cases {
        assert_eq!(canonical(long), short);
    }
}

#[test]
fn errors_name_the_wrong_part() {
    for (text, part) in [
        ("int4-g0", "g0"),
        ("int4-g+8", "g+8"),
        ("int4-g99999999999", "g99999999999"),
        ("int4", "int4 alone"),
        ("int4-g32:floor", "floor"),
        ("mxfp4:full", "full"),
        ("mxfp4-g16", "g16"),
        ("nf4-channel", "channel"),
        ("dyn8-dq", "dq"),
        ("q4_0-g32", "g32"),
        ("nvfp4:nearest", "nearest"),
        ("mxfp8-e4m3:deepgemm", "deepgemm"),
        ("bf16-tensor", "tensor"),
        ("int8-token@later", "later"),
        ("int8-token@delayed", "delayed"),
        ("int8-token@delayed0", "delayed0"),
        ("int4-channel:clip85", "clip85"),
        ("int4-token:clip", "clip"),
        ("int4-token:clip0", "clip0"),
        ("int4-token:clip100", "clip100"),
        ("int4-token:clip300", "clip300"),
        ("int4-token-asym:clip85", "clip85"),
        ("fp8-e4m3-token:clip85", "clip85"),
        ("fp8-e4m3-tensor:ct", "ct"),
        ("trellis", ""),
        ("trellis9", "9"),
        ("trellis8.5", "8.5"),
        ("trellis2-mcg-channel", "2-mcg-channel"),
        ("trellis2-g32", "2-g32"),
    ] {
        let error = text.parse::<Scheme>().unwrap_err();
        assert!(
            matches!(&error, ParseError::Part { part: p, .. } if p == part)
                || matches!(&error, ParseError::Element { .. }),
            "{text}: {error}"
        );
    }
    assert!(matches!("int9-g32".parse::<Scheme>(), Err(ParseError::Element { .. })));
    let expected =
        "expected :full, :restricted, :torchao, :no-clipping-err, :clip1 to :clip99, got \"clip0\"";
    assert!("int4-token:clip0".parse::<Scheme>().unwrap_err().to_string().ends_with(expected));
}

#[test]
fn a_part_of_names_leads_to_the_names_that_have_it() {
    for (typed, names) in [
        ("fp8", &["fp8-e4m3", "fp8-e5m2"][..]),
        ("e4m3", &["fp8-e4m3", "mxfp8-e4m3"]),
        ("MXFP6", &["mxfp6-e2m3", "mxfp6-e3m2"]),
        ("q4", &["q4_0", "q4_1", "q4_k"]),
    ] {
        let error = typed.parse::<Scheme>().unwrap_err().to_string();
        assert!(names.iter().all(|name| error.contains(name)) && !error.contains("f64"), "{error}");
    }
    assert!("int9".parse::<Scheme>().unwrap_err().to_string().contains("expected int8, "));
}

#[test]
fn only_the_producer_of_the_global_scale_makes_nvfp4_formats_differ() {
    let format = |text: &str| text.parse::<Scheme>().unwrap().format;
    assert_ne!(format("nvfp4:ct"), format("nvfp4:te"));
    assert_eq!(format("mxfp4:ct"), format("mxfp4:rceil"));
    assert_eq!(format("int8-channel"), format("int8-token:restricted"));
    assert_eq!(format("fp8-e4m3-head"), format("fp8-e4m3-channel"));
    assert_eq!(format("fp8-e4m3-t1x128:deepseek-v3"), format("fp8-e4m3-g128"));
    assert_ne!(format("fp8-e4m3-t1x128:ue8m0"), format("fp8-e4m3-g128"));
}

proptest! {
    #[test]
    fn any_scheme_prints_and_parses_back(
        which in 0usize..100, variant in 0usize..8, group in 1u32..5000, shape in 0usize..5, source in 0u32..4
    ) {
        let all = catalogue();
        let mut scheme = all[which % all.len()].clone();
        if let Format::Affine(Affine { blocks, scale: Some(ScaleTree { code: Code::F32, .. }), .. }) = &mut scheme.format {
            *blocks = [Blocks::Tensor, Blocks::Row, Blocks::Group(group), Blocks::Tile { rows: 3, cols: group },
                Blocks::Group(1)][shape];
        }
        let variants = scheme.variants();
        let mut scheme = scheme.with_variant(variants[variant % variants.len()].name).unwrap();
        scheme.source = match source {
            0 => Source::Dynamic,
            1 => Source::Static,
            _ => Source::Delayed { len: group },
        };
        prop_assert_eq!(scheme.to_string().parse::<Scheme>().unwrap(), scheme);
    }

    #[test]
    fn no_text_panics(text in "[a-z0-9@:x-]{0,24}") {
        let _ = text.parse::<Scheme>();
    }
}
