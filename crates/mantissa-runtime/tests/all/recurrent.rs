//! Models with recurrent layers: states alone and in a batch, in pieces, shared, forked and computed again.
use std::path::PathBuf;

use crate::common::{alone, finish, greedy, model, prompt, sampled, tiny};
use mantissa_model::mixer::StateShape;
use mantissa_model::{LoadError, ModelConfig, read_json};
use mantissa_runtime::footprint::SessionFootprint;
use mantissa_runtime::{FastModel, Runtime, RuntimeOptions};

/// Every tiny model with recurrent layers, but for those that only have other sizes or an image encoder.
fn models() -> impl Iterator<Item = (FastModel, String)> {
    let recurs = |dir: &PathBuf| {
        let config = read_json(&dir.join("config.json")).unwrap().unwrap();
        ModelConfig::from_json(&config, "config.json").unwrap().recurrent.is_some()
    };
    let names =
        tiny().into_iter().filter(recurs).map(|dir| dir.file_name().unwrap().to_str().unwrap().to_owned());
    let others = ["-square", "-wide", "-vision"];
    let names = names.filter(move |name| !others.iter().any(|end| name.ends_with(end)));
    names.map(|name| (model(&name), name))
}

#[test]
fn chunks_of_a_prompt_and_preempted_sequences_change_no_token() {
    for (model, name) in models() {
        assert!(model.kv().is_recurrent(), "{name}");
        let requests: Vec<_> = (0..4).map(|i| greedy(prompt(&model, i, 40 + 70 * i), 40)).collect();
        let options =
            RuntimeOptions { step_tokens: 128, cached_tokens: 512, ..RuntimeOptions::batch(4, 320) };
        let mut runtime = Runtime::new(&model, options).unwrap();
        let ids: Vec<_> = requests.iter().map(|request| runtime.add(request.clone()).unwrap()).collect();
        for (request, tokens) in requests.iter().zip(finish(&mut runtime, &ids)) {
            assert_eq!(tokens, alone(&model, request), "{name}");
        }
    }
}

/// A state is shared where the other sequence stands, not in the middle of its tokens.
#[test]
fn a_conversation_is_continued_from_its_state() {
    for (model, name) in models() {
        let base = prompt(&model, 1, 130);
        let mut runtime = Runtime::new(&model, RuntimeOptions::batch(2, 320)).unwrap();
        let first = runtime.add(greedy(base.clone(), 20)).unwrap();
        let answer = finish(&mut runtime, &[first]).remove(0);
        let next = [&base[..], &answer, &prompt(&model, 2, 30)].concat();
        let second = runtime.add(greedy(next.clone(), 10)).unwrap();
        let found = finish(&mut runtime, &[second]).remove(0);
        // The last token of the answer was not computed.
        assert_eq!(runtime.shared_tokens(), 149, "{name}");
        assert_eq!(found, alone(&model, &greedy(next, 10)), "{name}");
        let other = [&base[..100], &prompt(&model, 3, 30)].concat();
        let third = runtime.add(greedy(other.clone(), 10)).unwrap();
        let found = finish(&mut runtime, &[third]).remove(0);
        assert_eq!(runtime.shared_tokens(), 149, "{name}");
        assert_eq!(found, alone(&model, &greedy(other, 10)), "{name}");
    }
}

#[test]
fn a_fork_has_a_state_of_its_own() {
    for (model, name) in models() {
        let request = greedy(prompt(&model, 4, 70), 30);
        let mut runtime = Runtime::new(&model, RuntimeOptions::batch(3, 128)).unwrap();
        let first = runtime.add(request.clone()).unwrap();
        (0..10).for_each(|_| _ = runtime.step().unwrap());
        let so_far = runtime.tokens(first).unwrap().len() - 70;
        let second = runtime.fork(first, sampled(Vec::new(), 0, 7).sampling).unwrap();
        let third = runtime.fork(first, request.sampling).unwrap();
        let tokens = finish(&mut runtime, &[first, second, third]);
        assert_eq!(tokens[0], tokens[2], "{name}");
        assert_eq!(tokens[0], alone(&model, &request)[so_far..], "{name}");
    }
}

#[test]
fn draft_models_are_refused() {
    let (recurrent, plain) = (model("qwen3-5"), model("llama3-rope"));
    for (target, draft) in [(&recurrent, &plain), (&plain, &recurrent)] {
        let runtime = Runtime::new(target, RuntimeOptions::single(64)).unwrap();
        let error = runtime.with_draft(draft).map(|_| ()).unwrap_err();
        assert!(matches!(&error, LoadError::Speculation { mixer: "gated DeltaNet" }), "{error}");
    }
}

#[test]
fn states_are_predicted_by_sequence() {
    for (model, name) in models() {
        let bytes =
            |options: &RuntimeOptions| SessionFootprint::of(options, model.config(), model.kv()).cache;
        let (few, many) =
            (RuntimeOptions::single(64), RuntimeOptions { kept: 5, ..RuntimeOptions::single(64) });
        assert_eq!(bytes(&many) - bytes(&few), 4 * model.kv().state_bytes(few.context), "{name}");
        let values = model.kv().states(few.context).iter().map(StateShape::values).sum::<usize>();
        assert_eq!(model.kv().state_bytes(few.context), 4 * values as u64);
        assert!(values > 0, "{name}");
    }
}
