//! Caches of models with recurrent layers.
use crate::common::{expected, load, tiny};
use mantissa_model::{Buffers, Decoder, KvCache};

fn models() -> impl Iterator<Item = (Decoder, Vec<u32>)> {
    let with_states = |(decoder, _): &(Decoder, Vec<u32>)| decoder.config().recurrent.is_some();
    tiny().into_iter().map(|dir| (load(&dir), expected(&dir).0.remove(0))).filter(with_states)
}

/// States cannot be cut back: only the last pass is undone.
#[test]
fn only_the_last_pass_is_removed_from_a_state() {
    assert!(models().count() >= 5);
    for (decoder, tokens) in models() {
        let config = decoder.config();
        let mut cache = KvCache::plan(config, 24).unwrap();
        let mut buffers = Buffers::plan(config, 24, 24).unwrap();
        let mut run = |tokens: &[u32], cache: &mut KvCache| {
            decoder.forward_cached(tokens, cache, &mut buffers).map(|states| states.states().to_vec())
        };
        run(&tokens[..9], &mut cache).unwrap();
        let first = run(&tokens[9..13], &mut cache).unwrap();
        cache.truncate(9);
        assert_eq!(cache.len(), 9);
        assert_eq!(run(&tokens[9..13], &mut cache).unwrap(), first);
        cache.truncate(11);
        assert_eq!(cache.len(), 0);
        // A pass that fails leaves the cache as it was.
        run(&tokens[..9], &mut cache).unwrap();
        assert!(run(&[tokens[9], config.vocab_size as u32], &mut cache).is_err());
        assert_eq!((cache.len(), run(&tokens[9..13], &mut cache).unwrap()), (9, first));
    }
}

#[test]
fn caches_hold_keys_and_values_of_attention_only() {
    for (decoder, _) in models() {
        let config = decoder.config();
        let attend = config.attention_layers().count() as u64;
        // Keys and values, or the latent that they are projected from.
        let token = match config.latent {
            Some(latent) => latent.kv_rank + latent.rotated,
            None => 2 * config.key_value_width(),
        };
        let heads = attend * 10 * 4 * token as u64;
        let states = (0..config.num_hidden_layers).filter_map(|layer| config.recurrent_in(layer));
        let states = states.map(|of| of.state(10).bytes() + 4 * of.state(10).changed() as u64).sum::<u64>();
        // Latents are decoded into scratch.
        let needed = KvCache::bytes_needed(config, 10);
        assert!(needed == heads + states || (config.latent.is_some() && needed > heads + states));
        assert_eq!(decoder.kv_bytes_per_token(), (heads / 10) as f64);
    }
}
