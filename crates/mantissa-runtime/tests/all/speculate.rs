//! Speculation changes no token, greedy or sampled.
use crate::common::{alone, finish, greedy, model, prompt, quantized, sampled, speculating};
use mantissa_model::{LoadError, Sampling};
use mantissa_runtime::{FastModel, Request, Runtime, RuntimeOptions};

/// Requests with text that repeats and text that does not.
fn requests(model: &FastModel, new: usize) -> Vec<Request> {
    let repeats = prompt(model, 1, 6).repeat(4);
    let narrow = |request: Request| {
        let sampling = Sampling { temperature: 0.3, top_k: 3, ..request.sampling };
        Request { sampling, ..request }
    };
    vec![
        greedy(repeats.clone(), new),
        sampled(repeats.clone(), new, 5),
        narrow(sampled(repeats, new, 6)),
        greedy(prompt(model, 2, 17), new),
        narrow(sampled(prompt(model, 3, 9), new, 7)),
    ]
}

#[test]
fn prompt_lookup_changes_no_token() {
    for (model, name) in quantized() {
        for request in requests(&model, 40) {
            let mut runtime = speculating(&model, None);
            let id = runtime.add(request.clone()).unwrap();
            assert_eq!(finish(&mut runtime, &[id])[0], alone(&model, &request), "{name}");
        }
    }
}

#[test]
fn lookup_proposes_and_accepts_what_repeats() {
    let model = model("llama2-gqa-tied");
    // Greedy text of so small a model soon repeats.
    let request = greedy(prompt(&model, 2, 17), 900);
    let mut runtime = speculating(&model, None);
    let id = runtime.add(request.clone()).unwrap();
    assert_eq!(finish(&mut runtime, &[id])[0], alone(&model, &request));
    let counts = runtime.proposals();
    assert!(counts.accepted > 0 && counts.proposed >= counts.accepted, "{counts:?}");
}

#[test]
fn a_draft_model_changes_no_token() {
    let (target, other) = (model("llama3-rope"), model("llama1-mha"));
    assert_eq!(target.config().vocab_size, other.config().vocab_size);
    for draft in [&target, &other] {
        let mut runtime = speculating(&target, Some(draft));
        for request in requests(&target, 150) {
            let id = runtime.add(request.clone()).unwrap();
            assert_eq!(finish(&mut runtime, &[id])[0], alone(&target, &request));
        }
        let counts = runtime.proposals();
        assert!(counts.proposed > 0, "{counts:?}");
        if std::ptr::eq(draft, &raw const target) {
            // It draws with the same random numbers. Catching up with the text may change last bits.
            assert!(counts.accepted * 20 > counts.proposed * 19, "{counts:?}");
        }
    }
}

#[test]
fn several_sequences_speculate_together() {
    let model = model("qwen3-qknorm");
    let requests = requests(&model, 60);
    let speculation = mantissa_runtime::Speculation::Lookup;
    let options = RuntimeOptions { speculation, ..RuntimeOptions::batch(3, 128) };
    let mut runtime = Runtime::new(&model, options).unwrap();
    let ids: Vec<_> = requests.iter().map(|request| runtime.add(request.clone()).unwrap()).collect();
    for (request, tokens) in requests.iter().zip(finish(&mut runtime, &ids)) {
        assert_eq!(tokens, alone(&model, request));
    }
}

#[test]
fn stop_tokens_end_a_sequence_among_proposals() {
    let model = model("llama2-gqa-tied");
    let request = greedy(prompt(&model, 2, 17), 300);
    let stop = alone(&model, &request)[250];
    let request = Request { stop: vec![stop], ..request };
    let mut runtime = speculating(&model, None);
    let ids = [runtime.add(request.clone()).unwrap(), runtime.add(request.clone()).unwrap()];
    let expected = alone(&model, &request);
    assert_eq!(finish(&mut runtime, &ids), [expected.clone(), expected]);
}

#[test]
fn a_draft_model_of_another_vocabulary_is_refused() {
    let (model, other) = (model("llama2-gqa-tied"), model("gpt2"));
    let error = Runtime::new(&model, RuntimeOptions::single(32)).unwrap().with_draft(&other).map(|_| ());
    assert!(matches!(error, Err(LoadError::Shape { .. })));
}
