//! Statistics collected layer by layer equal those of the quantized model.
use std::collections::HashMap;
use std::ops::ControlFlow;
use std::path::PathBuf;

use mantissa_model::{
    Buffers, Decoder, InputQuantizer, LinearInput, LinearKind, MapSource, ModelConfig, load_embedding,
};
use mantissa_num::parse_activation;
use mantissa_quant::calibrate::{CalibrateError, Calibration};
use mantissa_quant::gptq::{GptqOptions, Hessian, InverseFactor};
use mantissa_store::convention::{ActivationQuant, LinearWeight, ModelFiles, Weight};

fn go_on() -> ControlFlow<()> {
    ControlFlow::Continue(())
}

fn files() -> ModelFiles {
    let data = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/tiny");
    ModelFiles::open(&data.join("qwen2-bias")).unwrap()
}

/// Returns windows of several lengths; tokens repeat, as in a text.
fn windows(vocab_size: usize) -> Vec<Vec<u32>> {
    let token = |i: usize| ((i * i + 3 * i) % vocab_size) as u32;
    [20, 1, 24, 7, 24]
        .iter()
        .enumerate()
        .map(|(w, &len)| (0..len).map(|i| token(31 * w + i)).collect())
        .collect()
}

/// Returns the Hessians of the inputs of `layer` in `decoder`, window by window.
fn direct(decoder: &Decoder, files: &ModelFiles, windows: &[Vec<u32>], layer: usize) -> Vec<Hessian> {
    direct_quantized(decoder, files, windows, layer, None)
}

/// Returns the same with each token quantized.
fn direct_quantized(
    decoder: &Decoder,
    files: &ModelFiles,
    windows: &[Vec<u32>],
    layer: usize,
    quantizer: Option<&InputQuantizer>,
) -> Vec<Hessian> {
    let config = decoder.config();
    let embedding = load_embedding(files, config).unwrap();
    let mut buffers = Buffers::plan(config, 24, 24).unwrap();
    let mut hessians = LinearInput::PLAIN.map(|input| Hessian::new(config.input_width(input)).unwrap());
    for tokens in windows {
        let mut states = vec![0.0; tokens.len() * config.hidden_size];
        embedding.embed(tokens, &[tokens.len()], 0, &mut states).unwrap();
        for earlier in &decoder.layers()[..layer] {
            earlier.run(config, &[tokens.len()], &mut states, None, &mut buffers).unwrap();
        }
        let mut observe = |input: LinearInput, x: &[f32]| {
            let mut x = x.to_vec();
            quantizer.map_or(Ok(()), |quantizer| quantizer.apply(&mut x, config.input_width(input))).unwrap();
            hessians[input.index()].add(&x, 1);
        };
        let lens = [tokens.len()];
        decoder.layers()[layer].run(config, &lens, &mut states, Some(&mut observe), &mut buffers).unwrap();
    }
    hessians.into()
}

#[test]
fn statistics_equal_the_decoders_for_any_number_of_threads() {
    let files = files();
    let decoder = Decoder::load(&files).unwrap();
    let (config, windows) = (decoder.config(), windows(decoder.config().vocab_size));
    for threads in [0, 1, 2, 3, 9] {
        let mut calibration = Calibration::begin(&files, config, &windows, threads).unwrap();
        assert_eq!(calibration.states().total(), 76 * config.hidden_size);
        let mut layers = 0;
        while let Some(layer) = calibration.next_layer().unwrap() {
            let expected = direct(&decoder, &files, &windows, layer.index());
            let found = calibration.statistics(&layer, &LinearInput::PLAIN, &mut go_on).unwrap();
            assert!(found == expected, "layer {}, {threads} threads", layer.index());
            assert_eq!(found[0].tokens(), 76);
            let some = [LinearInput::Down, LinearInput::Qkv];
            let found = calibration.statistics(&layer, &some, &mut go_on).unwrap();
            assert!(found[0] == expected[3] && found[1] == expected[0], "layer {}", layer.index());
            calibration.advance(&layer, &mut go_on).unwrap();
            layers += 1;
        }
        assert_eq!(layers, config.num_hidden_layers);
    }
}

/// Runs sequential GPTQ on a small model: each step's inputs equal those of the finished model.
#[test]
fn later_statistics_see_replaced_weights() {
    for keeps in [false, true] {
        replaced_weights_are_seen(keeps);
    }
}

/// Starts a calibration that keeps windows inside a layer or not.
fn begin<'a>(
    files: &'a ModelFiles,
    config: &'a ModelConfig,
    windows: &[Vec<u32>],
    keeps: bool,
) -> Calibration<'a> {
    let begun = Calibration::begin(files, config, windows, 2).unwrap();
    if keeps { begun.keeping() } else { begun }
}

fn replaced_weights_are_seen(keeps: bool) {
    let files = files();
    let dense = Decoder::load(&files).unwrap();
    let (config, windows) = (dense.config(), windows(dense.config().vocab_size));
    let read = |name: &str, shape: &[usize]| files.tensor_f32(name, shape).unwrap();
    let tensors = config.tensors().into_iter();
    let mut tensors: HashMap<_, _> =
        tensors.map(|t| (t.name.clone(), (t.shape.clone(), read(&t.name, &t.shape)))).collect();
    let mut seen = Vec::new();
    let mut calibration = begin(&files, config, &windows, keeps);
    while let Some(mut layer) = calibration.next_layer().unwrap() {
        for input in LinearInput::PLAIN {
            let hessian = calibration.statistics(&layer, &[input], &mut go_on).unwrap().remove(0);
            let factor = InverseFactor::new(&hessian, GptqOptions::default(), 2).unwrap();
            for kind in input.readers() {
                let Some(linear) = layer.linear(kind) else { continue };
                let (shape, w) = tensors.get_mut(&format!("{}.weight", linear.module())).unwrap();
                assert_eq!(shape[..], [linear.rows(), linear.cols()]);
                let result = factor.quantize(&"int3-g16".parse().unwrap(), w, None, 2).unwrap();
                *w = result.dequantize().unwrap();
                layer.replace(kind, Weight::Quantized(result.quantized)).unwrap();
            }
            seen.push((layer.index(), input, hessian));
        }
        calibration.advance(&layer, &mut go_on).unwrap();
    }
    let source = MapSource { config: files.config().unwrap().clone(), tensors, linears: HashMap::new() };
    let quantized = Decoder::load(&source).unwrap();
    for (layer, input, hessian) in seen {
        let expected = &direct(&quantized, &files, &windows, layer)[input.index()];
        assert!(hessian == *expected, "layer {layer} {input:?}");
        let before = &direct(&dense, &files, &windows, layer)[input.index()];
        assert_eq!(hessian == *before, (layer, input) == (0, LinearInput::Qkv), "layer {layer} {input:?}");
    }
}

/// Requests the inputs of every architecture in any order, with weights replaced in between. Passes that start where
/// another stopped give the same bits as passes from the start.
#[test]
fn kept_windows_give_the_same_bits() {
    let data = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/tiny");
    let mut models: Vec<_> = std::fs::read_dir(data).unwrap().map(|entry| entry.unwrap().path()).collect();
    models.sort();
    let mut tried = 0;
    for model in models.iter().filter(|model| model.join("model.safetensors").is_file()) {
        let files = ModelFiles::open(model).unwrap();
        let config = mantissa_model::load_config(&files).unwrap();
        let windows = windows(config.vocab_size);
        let (mut plain, mut keeping) = (
            begin(&files, &config, &windows, false).to_the_end(),
            begin(&files, &config, &windows, true).to_the_end(),
        );
        while let (Some(mut a), Some(mut b)) = (plain.next_layer().unwrap(), keeping.next_layer().unwrap()) {
            let infos = config.layer_linears(a.index());
            let mut inputs: Vec<_> = infos.iter().map(|info| info.kind.input()).collect();
            inputs.sort_unstable_by_key(|input| (input.turn(), *input));
            inputs.dedup();
            // First in GPTQ's order, then inputs before the kept windows.
            let again = [inputs[inputs.len() - 1], inputs[0], inputs[inputs.len() / 2]];
            for input in inputs.iter().chain(&again) {
                let found = plain.statistics(&a, &[*input], &mut go_on).unwrap();
                let kept = keeping.statistics(&b, &[*input], &mut go_on).unwrap();
                assert!(found == kept, "{} layer {} {input:?}", model.display(), a.index());
                for info in infos.iter().filter(|info| info.kind.input() == *input) {
                    let linear = a.linear(info.kind).unwrap();
                    let mut w = vec![0.0; info.rows * info.cols];
                    w.chunks_exact_mut(info.cols).enumerate().for_each(|(row, w)| linear.row(row, w));
                    w.iter_mut().for_each(|w| *w *= 0.75);
                    a.replace(info.kind, Weight::F32(w.clone())).unwrap();
                    b.replace(info.kind, Weight::F32(w)).unwrap();
                }
            }
            plain.advance(&a, &mut go_on).unwrap();
            keeping.advance(&b, &mut go_on).unwrap();
            for window in 0..windows.len() {
                let (a, b) =
                    (plain.states().window(window).unwrap(), keeping.states().window(window).unwrap());
                assert!(a == b, "{} window {window}", model.display());
            }
        }
        tried += 1;
    }
    assert!(tried > 20, "{tried} models");
}

/// With quantized inputs, statistics are of the quantized values, and finished layers read theirs quantized.
#[test]
fn statistics_are_of_quantized_inputs() {
    let files = files();
    let dense = Decoder::load(&files).unwrap();
    let (config, windows) = (dense.config(), windows(dense.config().vocab_size));
    let quant = ActivationQuant::new(parse_activation("int4-token").unwrap(), None);
    let quantizer = InputQuantizer::new("m", &quant).unwrap();
    let weight = |module: &str, rows, cols, bias| files.linear(module, rows, cols, bias).unwrap();
    let linears = config.decoder_linears().map(|info| {
        let linear = weight(&info.module, info.rows, info.cols, info.bias);
        (info.module, LinearWeight { input: Some(quant.clone()), ..linear })
    });
    let read = |name: &str, shape: &[usize]| files.tensor_f32(name, shape).unwrap();
    let tensors = config.tensors().into_iter();
    let tensors = tensors.map(|t| (t.name.clone(), (t.shape.clone(), read(&t.name, &t.shape)))).collect();
    let config_json = files.config().unwrap().clone();
    let source = MapSource { config: config_json, tensors, linears: linears.collect() };
    let quantized = Decoder::load(&source).unwrap();
    let mut calibration = begin(&files, config, &windows, true);
    while let Some(mut layer) = calibration.next_layer().unwrap() {
        layer.quantize_inputs(LinearInput::PLAIN.map(|input| (input, quantizer.clone())).into());
        let expected = direct_quantized(&quantized, &files, &windows, layer.index(), Some(&quantizer));
        for input in LinearInput::PLAIN {
            let found = calibration.statistics(&layer, &[input], &mut go_on).unwrap().remove(0);
            assert!(found == expected[input.index()], "layer {} {input:?}", layer.index());
            for kind in input.readers() {
                let Some(linear) = layer.linear(kind) else { continue };
                let own = weight(linear.module(), linear.rows(), linear.cols(), false).weight;
                layer.replace(kind, own).unwrap();
            }
        }
        calibration.advance(&layer, &mut go_on).unwrap();
    }
}

#[test]
fn what_cannot_calibrate_is_refused() {
    let files = files();
    let decoder = Decoder::load(&files).unwrap();
    let config = decoder.config();
    let error =
        |windows: &[Vec<u32>]| Calibration::begin(&files, config, windows, 2).map(|_| ()).unwrap_err();
    assert!(matches!(error(&[]), CalibrateError::Empty));
    assert!(matches!(error(&[vec![], vec![]]), CalibrateError::Empty));
    assert!(matches!(error(&[vec![], vec![1, 2, 3]]), CalibrateError::EmptyWindow { window: 0 }));
    assert!(matches!(error(&[vec![1, 2], vec![]]), CalibrateError::EmptyWindow { window: 1 }));
    let unknown = config.vocab_size as u32;
    assert!(matches!(error(&[vec![1], vec![unknown]]), CalibrateError::Forward { window: 1, .. }));
    let long = vec![0; config.max_position_embeddings + 1];
    assert!(error(&[long]).to_string().contains("max_position_embeddings"));

    let mut calibration = Calibration::begin(&files, config, &[vec![1, 2]], 1).unwrap();
    let mut layer = calibration.next_layer().unwrap().unwrap();
    assert!(layer.replace(LinearKind::Q, Weight::F32(vec![0.0; 3])).is_err());
}
