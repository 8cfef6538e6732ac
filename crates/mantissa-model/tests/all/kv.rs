//! Quantized keys and values in whole models: the committed tiny ones, one per variant of the architecture.
use crate::common::{expected, load, logits, max_difference, sampled, tiny};
use mantissa_model::{
    AttentionOperands, Buffers, Decoder, ForwardError, KvCache, KvPolicy, LoadError, SourceView, WeightSource,
};
use mantissa_num::parse_activation;
use mantissa_store::convention::{ActivationQuant, LinearWeight, ModelFiles};

const POLICIES: [&str; 7] = [
    "turbo8",
    "int8-head",
    "fp8-e4m3-head",
    "int8-head-asym:minmax,rotate,sinks=2",
    "int8-g4-asym,channel-keys,pre-rope,scales=f16",
    "keys=f32,values=int8-token,window=3",
    "int8-head,pre-rope",
];

/// Computes the logits of every token of one sequence, token by token through the cache.
fn cached(decoder: &Decoder, tokens: &[u32]) -> Vec<f32> {
    let config = decoder.config();
    let mut cache = KvCache::for_decoder(decoder, tokens.len()).unwrap();
    let mut buffers = Buffers::plan(config, 1, tokens.len()).unwrap();
    let mut out = vec![f32::NAN; tokens.len() * config.vocab_size];
    for (token, out) in tokens.iter().zip(out.chunks_exact_mut(config.vocab_size)) {
        let mut hidden = decoder.forward_cached(&[*token], &mut cache, &mut buffers).unwrap();
        hidden.logits(0..1, out).unwrap();
    }
    out
}

/// Eight bits cost little (more if a router with random weights changes its choice), both for a window at once and
/// for one token at a time; and they cost something.
#[test]
fn quantized_caches_stay_near_and_are_quantized() {
    for dir in sampled(tiny(), 4) {
        let (sequences, _) = expected(&dir);
        let exact = load(&dir);
        let reference = logits(&exact, &sequences[..1]);
        let largest = reference.iter().fold(0f32, |most, x| most.max(x.abs()));
        let mut ran = 0;
        for text in POLICIES {
            let mut decoder = load(&dir);
            // Latents take only a scheme.
            let Ok(()) = decoder.set_kv(&text.parse().unwrap()) else { continue };
            ran += 1;
            let whole = logits(&decoder, &sequences[..1]);
            let whole = max_difference(&whole, &reference);
            let stepped = max_difference(&cached(&decoder, &sequences[0]), &reference);
            let name = format!("{} {text}: {whole} {stepped} of {largest}", dir.display());
            // An indexer with rounded keys may choose other tokens: then only the size of the logits is a bound.
            let share = match exact.config().indexer {
                Some(_) => 1.0,
                None if text.starts_with("fp8") => 0.5,
                None => 0.2,
            };
            let bound = share * largest;
            assert!(whole < bound && stepped < bound, "{name}");
            assert!(whole > 0.0 && stepped > 0.0, "{name}");
            assert!(decoder.kv_bytes_per_token() <= exact.kv_bytes_per_token(), "{name}");
        }
        let attends = exact.config().attention_layers().next().is_some();
        assert!(if attends { ran >= 2 } else { ran == 0 }, "{}", dir.display());
    }
}

/// A window as long as the text, and f32, give the bits of an unquantized cache.
#[test]
fn tokens_in_the_window_keep_their_bits() {
    for dir in tiny() {
        let (sequences, _) = expected(&dir);
        let reference = cached(&load(&dir), &sequences[0]);
        for text in ["int2-head,window=1000", "int2-head,pre-rope,sinks=1000", "f32"] {
            let mut decoder = load(&dir);
            if decoder.set_kv(&text.parse().unwrap()).is_ok() {
                assert_eq!(cached(&decoder, &sequences[0]), reference, "{} {text}", dir.display());
            }
        }
    }
}

#[test]
fn a_token_that_cannot_be_stored_leaves_the_tokens_before_it() {
    let dir = tiny().into_iter().find(|dir| dir.ends_with("llama2-gqa-tied")).unwrap();
    let mut decoder = load(&dir);
    decoder.set_kv(&"int8-head".parse::<KvPolicy>().unwrap()).unwrap();
    let mut cache = KvCache::for_decoder(&decoder, 8).unwrap();
    let mut buffers = Buffers::plan(decoder.config(), 4, 8).unwrap();
    decoder.forward_cached(&[1, 2, 3], &mut cache, &mut buffers).unwrap();
    let before = cached_logits(&decoder, &mut cache, &mut buffers, 4);
    cache.truncate(3);
    assert!(matches!(
        decoder.forward_cached(&[u32::MAX], &mut cache, &mut buffers),
        Err(ForwardError::Vocabulary { .. })
    ));
    assert_eq!(cache.len(), 3);
    assert_eq!(cached_logits(&decoder, &mut cache, &mut buffers, 4), before);
}

fn cached_logits(decoder: &Decoder, cache: &mut KvCache, buffers: &mut Buffers, token: u32) -> Vec<f32> {
    let mut out = vec![0.0; decoder.config().vocab_size];
    decoder.forward_cached(&[token], cache, buffers).unwrap().logits(0..1, &mut out).unwrap();
    out
}

/// Levels found on the same text cost little at 6 bits, less with outliers, and need a text.
#[test]
fn levels_of_a_text_store_its_keys_and_values() {
    for dir in tiny() {
        let (sequences, _) = expected(&dir);
        let exact = load(&dir);
        if exact.config().latent.is_some() {
            continue;
        }
        if exact.config().by_layer.shared_from < exact.config().num_hidden_layers {
            let refused = load(&dir).set_kv_calibrated(&"nuq6".parse().unwrap(), &sequences[..1]);
            assert!(refused.unwrap_err().to_string().contains("layers share keys and values"));
            continue;
        }
        if exact.config().attention_layers().next().is_none() {
            let refused = load(&dir).set_kv_calibrated(&"nuq6".parse().unwrap(), &sequences[..1]);
            assert!(refused.unwrap_err().to_string().contains("no layer caches keys and values"));
            continue;
        }
        let reference = logits(&exact, &sequences[..1]);
        let largest = reference.iter().fold(0f32, |most, x| most.max(x.abs()));
        let difference = |text: &str| {
            let (policy, mut decoder): (KvPolicy, _) = (text.parse().unwrap(), load(&dir));
            assert!(decoder.set_kv(&policy).unwrap_err().to_string().contains("--calibration"));
            decoder.set_kv_calibrated(&policy, &sequences[..1]).unwrap();
            let whole = max_difference(&logits(&decoder, &sequences[..1]), &reference);
            (whole, max_difference(&cached(&decoder, &sequences[0]), &reference))
        };
        for text in ["nuq6-2%,pre-rope", "nuq6"] {
            let (whole, stepped) = difference(text);
            let name = format!("{} {text}: {whole} {stepped} of {largest}", dir.display());
            assert!(
                whole < 0.3 * largest && stepped < 0.3 * largest && whole > 0.0 && stepped > 0.0,
                "{name}"
            );
        }
        let none = load(&dir).set_kv_calibrated(&"nuq4,rotate".parse().unwrap(), &sequences[..1]);
        assert!(none.unwrap_err().to_string().contains("without rotate"));
    }
}

/// A model whose projections of the latents of keys and values quantize their inputs.
struct QuantizedLatents<'a>(&'a ModelFiles);

impl SourceView for QuantizedLatents<'_> {
    fn base(&self) -> &dyn WeightSource {
        self.0
    }

    fn linear(&self, module: &str, rows: usize, cols: usize, bias: bool) -> Result<LinearWeight, LoadError> {
        let weight = self.base().linear(module, rows, cols, bias)?;
        let quant = || ActivationQuant::new(parse_activation("int8-token").unwrap(), None);
        let input = module.ends_with("kv_b_proj").then(quant).or(weight.input.clone());
        Ok(LinearWeight { input, ..weight })
    }
}

/// Latent attention caches a latent and a rotated part, even if the projection of the latent quantizes its input.
#[test]
fn latents_are_cached_unexpanded() {
    let mut models = 0;
    for dir in tiny() {
        let decoder = load(&dir);
        let config = decoder.config().clone();
        let Some(latent) = config.latent else { continue };
        models += 1;
        let layers = (0..config.num_hidden_layers).filter(|layer| config.attends(*layer)).count() as f64;
        // The keys of an indexer stay in f32.
        let index =
            (0..config.num_hidden_layers).map(|layer| 4 * config.index_width(layer)).sum::<usize>() as f64;
        let exact = layers * 4.0 * (latent.kv_rank + latent.rotated) as f64 + index;
        assert_eq!(decoder.kv_bytes_per_token(), exact);
        // Keys of an indexer and their decoded copy come on top of heads too.
        let index_keys =
            512 * (index as usize + 4 * config.indexer.as_ref().map_or(0, |indexer| indexer.dim));
        let heads = (8 * config.key_value_width() * config.num_hidden_layers * 512 + index_keys) as u64;
        assert!(KvCache::bytes_needed(&config, 512) < heads, "{}", dir.display());
        // A layer with a quantized input reads latents quantized, of earlier tokens too.
        let files = ModelFiles::open(&dir).unwrap();
        let mut decoder = Decoder::load(&QuantizedLatents(&files)).unwrap();
        let (sequences, _) = expected(&dir);
        let whole = logits(&decoder, &sequences[..1]);
        let exact = max_difference(&whole, &logits(&load(&dir), &sequences[..1]));
        let stepped = max_difference(&cached(&decoder, &sequences[0]), &whole);
        // A value on the edge of a code may take another: a tenth of all rounding in a small model.
        assert!(exact > 1e-4 && stepped < 0.2 * exact, "{}: {stepped} of {exact}", dir.display());
        decoder.set_kv(&"int8-token".parse().unwrap()).unwrap();
        let bytes = layers * (latent.kv_rank as f64 + 4.0 + 4.0 * latent.rotated as f64) + index;
        assert_eq!(decoder.kv_bytes_per_token(), bytes);
        assert!(decoder.set_attention_operands(&"int8".parse().unwrap()).is_err());
    }
    assert!(models > 0);
}

/// Operands in 8 bits cost little, in 4 bits more, in whole windows and through the cache; cached values stay exact.
#[test]
fn operands_of_attention_are_rounded() {
    for dir in tiny() {
        let (sequences, _) = expected(&dir);
        let exact = load(&dir);
        let reference = logits(&exact, &sequences[..1]);
        let largest = reference.iter().fold(0f32, |most, x| most.max(x.abs()));
        let run = |text: &str| {
            let mut decoder = load(&dir);
            decoder.set_attention_operands(&text.parse::<AttentionOperands>().unwrap()).ok()?;
            let whole = max_difference(&logits(&decoder, &sequences[..1]), &reference);
            Some((whole, max_difference(&cached(&decoder, &sequences[0]), &reference)))
        };
        for text in ["int8,smooth", "fp8,rotate", "p=int8", "q=int8-head"] {
            // Heads without a Hadamard matrix, and latents, are refused.
            let Some((whole, stepped)) = run(text) else { continue };
            let name = format!("{} {text}: {whole} {stepped} of {largest}", dir.display());
            assert!(
                whole > 0.0 && stepped > 0.0 && whole < 0.5 * largest && stepped < 0.5 * largest,
                "{name}"
            );
        }
    }
}
