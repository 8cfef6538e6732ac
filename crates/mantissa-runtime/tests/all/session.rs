//! Sequences over time: the same tokens alone and in a batch, memory that runs out, shared prompts.
use crate::common::{alone, finish, greedy, model, prompt, quantized, sampled, speculating};
use mantissa_model::{GenerateError, LoadError, StopReason};
use mantissa_runtime::{EventKind, Request, Runtime, RuntimeOptions, Speculation};

#[test]
fn sequences_have_the_same_tokens_alone_and_in_a_batch() {
    for (model, name) in quantized() {
        let requests: Vec<Request> = (0..6)
            .map(|i| match i % 2 {
                0 => greedy(prompt(&model, i, 3 + 9 * i), 10),
                _ => sampled(prompt(&model, i, 1 + 7 * i), 12, i as u64),
            })
            .collect();
        let mut runtime = Runtime::new(&model, RuntimeOptions::batch(4, 64)).unwrap();
        let ids: Vec<_> = requests.iter().map(|request| runtime.add(request.clone()).unwrap()).collect();
        let together = finish(&mut runtime, &ids);
        for (i, (request, tokens)) in requests.iter().zip(together).enumerate() {
            assert_eq!(tokens.len(), request.max_new_tokens);
            assert_eq!(tokens, alone(&model, request), "{name}: {i}");
        }
    }
}

/// With keys and values in fewer bits, packed by their codec or kept in a window.
#[test]
fn schemes_of_the_cache_change_nothing_between_sequences() {
    for (name, kv) in [
        ("llama2-gqa-tied", "f32"),
        ("qwen3-qknorm", "int8-head"),
        ("llama3-rope", "int4-head-asym"),
        ("gemma2", "fp8-e4m3-head"),
        ("mistral-window", "int4-g8-asym"),
        ("llama1-mha", "keys=int8-g4-asym,values=int8-head,window=8,sinks=2,channel-keys"),
    ] {
        let mut model = model(name);
        model.set_kv(&kv.parse().unwrap()).unwrap();
        let requests: Vec<_> = (0..3).map(|i| greedy(prompt(&model, i, 20 + 30 * i), 20)).collect();
        let options = RuntimeOptions { speculation: Speculation::Lookup, ..RuntimeOptions::batch(3, 128) };
        let mut runtime = Runtime::new(&model, options).unwrap();
        let ids: Vec<_> = requests.iter().map(|request| runtime.add(request.clone()).unwrap()).collect();
        for (request, tokens) in requests.iter().zip(finish(&mut runtime, &ids)) {
            assert_eq!(tokens, alone(&model, request), "{name} {kv}");
        }
    }
}

/// Long prompts in chunks between the tokens of others.
#[test]
fn chunks_of_a_prompt_change_no_token() {
    let model = model("llama2-gqa-tied");
    let context = model.config().max_position_embeddings.min(600);
    let requests = [
        greedy(prompt(&model, 1, 5), 40),
        greedy(prompt(&model, 2, context - 20), 20),
        greedy(prompt(&model, 3, context / 2), 30),
    ];
    let options = RuntimeOptions { step_tokens: 128, ..RuntimeOptions::batch(3, context) };
    let mut runtime = Runtime::new(&model, options).unwrap();
    let ids: Vec<_> = requests.iter().map(|request| runtime.add(request.clone()).unwrap()).collect();
    let together = finish(&mut runtime, &ids);
    for (request, tokens) in requests.iter().zip(together) {
        assert_eq!(tokens, alone(&model, request));
    }
}

/// With memory for less than all, sequences are preempted and computed again; all of them finish.
#[test]
fn sequences_finish_when_memory_runs_out() {
    let model = model("llama2-gqa-tied");
    let requests: Vec<_> = (0..5).map(|i| greedy(prompt(&model, i, 50 + i), 60)).collect();
    let options = RuntimeOptions { cached_tokens: 256, ..RuntimeOptions::batch(5, 128) };
    let mut runtime = Runtime::new(&model, options).unwrap();
    let ids: Vec<_> = requests.iter().map(|request| runtime.add(request.clone()).unwrap()).collect();
    for (request, tokens) in requests.iter().zip(finish(&mut runtime, &ids)) {
        assert_eq!(tokens, alone(&model, request));
    }
}

#[test]
fn a_prompt_that_begins_alike_shares_blocks() {
    let model = model("llama2-gqa-tied");
    let base = prompt(&model, 1, 150);
    let other = [&base[..], &prompt(&model, 2, 20)].concat();
    let mut runtime = Runtime::new(&model, RuntimeOptions::batch(2, 256)).unwrap();
    let first = runtime.add(greedy(base.clone(), 20)).unwrap();
    let begun = finish(&mut runtime, &[first]).remove(0);
    assert_eq!(runtime.shared_tokens(), 0);
    // After the first has ended, and then while another runs.
    let ids =
        [runtime.add(greedy(other.clone(), 10)).unwrap(), runtime.add(greedy(base.clone(), 10)).unwrap()];
    let found = finish(&mut runtime, &ids);
    assert_eq!(runtime.shared_tokens(), 256);
    assert_eq!(found[0], alone(&model, &greedy(other, 10)));
    assert_eq!(found[1], begun[..10]);
}

#[test]
fn a_fork_continues_on_its_own() {
    let model = model("qwen3-qknorm");
    let request = greedy(prompt(&model, 4, 70), 30);
    let mut runtime = Runtime::new(&model, RuntimeOptions::batch(3, 128)).unwrap();
    let first = runtime.add(request.clone()).unwrap();
    (0..10).for_each(|_| _ = runtime.step().unwrap());
    let so_far = runtime.tokens(first).unwrap().len() - 70;
    let second = runtime.fork(first, request.sampling).unwrap();
    let third = runtime.fork(first, sampled(Vec::new(), 0, 7).sampling).unwrap();
    let tokens = finish(&mut runtime, &[first, second, third]);
    assert_eq!(tokens[0], tokens[1]);
    assert_eq!(tokens[0], alone(&model, &request)[so_far..]);
    assert_eq!(tokens[2].len(), 30 - so_far);
    assert_eq!(runtime.fork(first, request.sampling), None);
}

#[test]
fn cancelled_sequences_are_silent() {
    let model = model("llama2-gqa-tied");
    let mut runtime = Runtime::new(&model, RuntimeOptions::batch(1, 64)).unwrap();
    let ids: Vec<_> = (0..3).map(|i| runtime.add(greedy(prompt(&model, i, 10), 20)).unwrap()).collect();
    runtime.step().unwrap();
    assert!(runtime.cancel(ids[0]) && runtime.cancel(ids[1]) && !runtime.cancel(ids[1]));
    let tokens = finish(&mut runtime, &ids);
    assert_eq!(tokens.iter().map(Vec::len).collect::<Vec<_>>(), [0, 0, 20]);
}

#[test]
fn events_tell_probabilities_and_the_end() {
    let model = model("llama2-gqa-tied");
    let request = Request { logprobs: Some(3), ..greedy(prompt(&model, 1, 10), 8) };
    let tokens = alone(&model, &request);
    let stop = Request { stop: vec![tokens[5]], ..request.clone() };
    let mut runtime = Runtime::new(&model, RuntimeOptions::single(32)).unwrap();
    let id = runtime.add(stop).unwrap();
    let mut last = None;
    while !runtime.is_idle() {
        for event in runtime.step().unwrap() {
            assert_eq!(event.sequence, id);
            if let EventKind::Token { token, logprob, top } = &event.kind {
                assert_eq!((top.len(), top[0].0, Some(top[0].1)), (3, *token, *logprob));
                assert!(top[0].1 <= 0.0 && top[0].1 >= top[1].1 && top[1].1 >= top[2].1);
            }
            last = Some(event.kind.clone());
        }
    }
    assert_eq!(last, Some(EventKind::Finished(StopReason::Token(tokens[5]))));
}

#[test]
fn requests_that_cannot_run_are_refused() {
    let model = model("llama2-gqa-tied");
    let mut runtime = Runtime::new(&model, RuntimeOptions::single(32)).unwrap();
    assert!(matches!(runtime.add(greedy(vec![], 3)), Err(GenerateError::EmptyPrompt)));
    assert!(matches!(runtime.add(greedy(vec![1_000_000], 3)), Err(GenerateError::Forward(_))));
    let error = runtime.add(greedy(vec![1; 30], 3)).unwrap_err();
    assert!(matches!(error, GenerateError::Plan(LoadError::Context { needed: 33, allowed: 32 })));
    assert!(runtime.is_idle() && runtime.step().unwrap().is_empty());
}

/// Given tokens take the place of sampled ones, with and without proposals, and sampling goes on after them.
#[test]
fn given_tokens_are_taken_and_continued() {
    for (model, _) in quantized() {
        let request = greedy(prompt(&model, 1, 12), 20);
        let free = alone(&model, &request);
        // The continuation of the model itself changes nothing.
        let own = Request { forced: free[..9].to_vec(), ..request.clone() };
        assert_eq!(alone(&model, &own), free);
        let forced = prompt(&model, 3, 3).repeat(4);
        let given = Request { forced: forced.clone(), ..request };
        let mut runtime = speculating(&model, None);
        let id = runtime.add(given.clone()).unwrap();
        let found = finish(&mut runtime, &[id]).remove(0);
        assert_eq!((&found[..12], found.len()), (&forced[..], 20));
        assert_eq!(found, alone(&model, &given));
        let vocabulary = model.config().vocab_size as u32;
        assert!(runtime.add(Request { forced: vec![vocabulary], ..given }).is_err());
    }
}
