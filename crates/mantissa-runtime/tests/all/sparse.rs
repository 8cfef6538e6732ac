//! Models whose queries attend to the tokens that an indexer chooses: in a batch, in pieces, shared, with proposed tokens.
use crate::common::{alone, finish, greedy, model, prompt};
use mantissa_runtime::footprint::SessionFootprint;
use mantissa_runtime::{FastModel, Runtime, RuntimeOptions, Speculation};

/// Tiny models whose queries attend to 8 tokens; in the second a layer uses the choice of the one before it.
fn models() -> impl Iterator<Item = (FastModel, &'static str)> {
    ["deepseek-v32-sparse", "glm-moe-dsa-sparse"].into_iter().map(|name| (model(name), name))
}

#[test]
fn chunks_of_a_prompt_and_preempted_sequences_change_no_token() {
    for (model, name) in models() {
        let requests: Vec<_> = (0..4).map(|i| greedy(prompt(&model, i, 3 + 90 * i), 40)).collect();
        let options =
            RuntimeOptions { step_tokens: 128, cached_tokens: 512, ..RuntimeOptions::batch(4, 320) };
        for speculation in [Speculation::Off, Speculation::Lookup] {
            let mut runtime = Runtime::new(&model, RuntimeOptions { speculation, ..options }).unwrap();
            let ids: Vec<_> = requests.iter().map(|request| runtime.add(request.clone()).unwrap()).collect();
            for (request, tokens) in requests.iter().zip(finish(&mut runtime, &ids)) {
                assert_eq!(tokens, alone(&model, request), "{name}");
            }
        }
    }
}

/// Keys of the indexer are in the blocks that sequences share.
#[test]
fn a_shared_prompt_chooses_the_same_tokens() {
    for (model, name) in models() {
        let base = prompt(&model, 1, 130);
        let other = [&base[..], &prompt(&model, 2, 20)].concat();
        let mut runtime = Runtime::new(&model, RuntimeOptions::batch(2, 256)).unwrap();
        let first = runtime.add(greedy(base, 20)).unwrap();
        finish(&mut runtime, &[first]);
        let second = runtime.add(greedy(other.clone(), 10)).unwrap();
        let found = finish(&mut runtime, &[second]).remove(0);
        assert!(runtime.shared_tokens() >= 128, "{name}");
        assert_eq!(found, alone(&model, &greedy(other, 10)), "{name}");
    }
}

/// A token takes its latent, the rotated part of its keys and, in layers that choose, an index key, in f16.
#[test]
fn index_keys_count_in_the_cache_and_in_predicted_memory() {
    for (model, name) in models() {
        let (config, latent) = (model.config(), model.config().latent.unwrap());
        let index = |layer| config.index_width(layer);
        assert_eq!((0..config.num_hidden_layers).map(index).sum::<usize>(), 16, "{name}");
        // Tiles hold multiples of 16 values.
        let of_layer = |layer| {
            let widths = [latent.kv_rank, latent.rotated + index(layer)];
            widths.map(|width| width.next_multiple_of(16)).iter().sum::<usize>()
        };
        let values: usize = (0..config.num_hidden_layers).map(of_layer).sum();
        assert_eq!(model.kv_bytes_per_token(), 2.0 * values as f64, "{name}");
        let options = RuntimeOptions::batch(2, 256);
        let predicted = SessionFootprint::of(&options, config, model.kv());
        assert!(predicted.cache >= 2 * 256 * 2 * values as u64, "{name}");
    }
}
