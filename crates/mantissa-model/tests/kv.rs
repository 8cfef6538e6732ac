//! Quantized keys and values in whole models: the committed tiny ones, one per variant of the architecture.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{expected, load, logits, max_difference, tiny};
use mantissa_model::{Buffers, Decoder, ForwardError, KvCache, KvPolicy};

const POLICIES: [&str; 6] = [
    "int8-head",
    "fp8-e4m3-head",
    "int8-head-asym:minmax,rotate,sinks=2",
    "int8-g4-asym,channel-keys,pre-rope,scales=f16",
    "keys=f32,values=int8-token,window=3",
    "int8-head,pre-rope",
];

/// Logits of every token of one sequence, token by token through the cache.
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

/// Eight bits cost little (more where a router with random weights changes its mind), whether a window is run at once or token by token, and they cost something.
#[test]
fn quantized_caches_stay_near_and_are_quantized() {
    for dir in tiny() {
        let (sequences, _) = expected(&dir);
        let exact = load(&dir);
        let reference = logits(&exact, &sequences[..1]);
        let largest = reference.iter().fold(0f32, |most, x| most.max(x.abs()));
        let mut ran = 0;
        for text in POLICIES {
            let mut decoder = load(&dir);
            // Latents take a scheme alone.
            let Ok(()) = decoder.set_kv(&text.parse().unwrap()) else { continue };
            ran += 1;
            let whole = logits(&decoder, &sequences[..1]);
            let whole = max_difference(&whole, &reference);
            let stepped = max_difference(&cached(&decoder, &sequences[0]), &reference);
            let name = format!("{} {text}: {whole} {stepped} of {largest}", dir.display());
            let bound = if text.starts_with("fp8") { 0.5 } else { 0.2 } * largest;
            assert!(whole < bound && stepped < bound, "{name}");
            assert!(whole > 0.0 && stepped > 0.0, "{name}");
            assert!(decoder.kv_bytes_per_token() <= exact.kv_bytes_per_token(), "{name}");
        }
        assert!(ran >= 2, "{}", dir.display());
    }
}

/// A window as long as the text, and f32, give the bits of a cache that is not quantized.
#[test]
fn what_stays_in_the_window_has_its_bits() {
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
