//! Options of requests: penalties, biases, constraints, probabilities of prompts, embeddings, priorities, states.
use std::ops::ControlFlow;
use std::time::Duration;

use crate::common::{
    alone, finish, greedy, longer, model, prompt, quantized, reference, sampled, speculating, tiny,
};
use mantissa_model::{Batch, GenerateOptions, Sampling, StopReason, generate};
use mantissa_runtime::{
    Constraint, ConstraintError, Detached, EventKind, FastModel, Offer, Phase, Pooling, Request, Runtime,
    RuntimeOptions, SequenceId, Speculation, TokenMask, Verdict,
};

/// Allows tokens that are congruent to their place modulo 3, and an end after `least` tokens; complete after `most`.
#[derive(Clone, Debug)]
struct Remainders {
    place: u32,
    least: u32,
    most: u32,
    vocabulary: u32,
}

impl Remainders {
    fn boxed(model: &FastModel, least: u32, most: u32) -> Option<Box<dyn Constraint>> {
        let vocabulary = model.config().vocab_size as u32;
        Some(Box::new(Remainders { place: 0, least, most, vocabulary }))
    }
}

impl Constraint for Remainders {
    fn offer(&mut self, offer: Offer, mask: &mut TokenMask) -> Result<Verdict, ConstraintError> {
        match offer {
            Offer::End if self.place >= self.least => return Ok(Verdict::Taken { complete: true }),
            Offer::Token(token) if token % 3 == self.place % 3 => {
                self.place += 1;
                return Ok(Verdict::Taken { complete: self.place >= self.most });
            }
            _ => {}
        }
        (0..self.vocabulary)
            .filter(|token| token % 3 == self.place % 3)
            .for_each(|token| mask.set(token, true));
        Ok(Verdict::Refused { may_end: self.place >= self.least })
    }

    fn boxed_clone(&self) -> Box<dyn Constraint> {
        Box::new(self.clone())
    }
}

/// Answers as another constraint does, `late` offers later.
#[derive(Clone, Debug)]
struct Late {
    inner: Box<dyn Constraint>,
    late: usize,
    left: usize,
}

impl Late {
    fn boxed(inner: Option<Box<dyn Constraint>>, late: usize) -> Option<Box<dyn Constraint>> {
        Some(Box::new(Late { inner: inner?, late, left: late }))
    }
}

impl Constraint for Late {
    fn offer(&mut self, offer: Offer, mask: &mut TokenMask) -> Result<Verdict, ConstraintError> {
        if self.left > 0 {
            self.left -= 1;
            return Ok(Verdict::Pending);
        }
        self.left = self.late;
        self.inner.offer(offer, mask)
    }

    fn wait(&mut self, _: Duration) -> bool {
        false
    }

    fn boxed_clone(&self) -> Box<dyn Constraint> {
        Box::new(Late { left: self.late, ..self.clone() })
    }
}

/// Events of all requests, run together.
fn events(model: &FastModel, options: RuntimeOptions, requests: &[Request]) -> Vec<Vec<EventKind>> {
    let mut runtime = Runtime::new(model, options).unwrap();
    let ids: Vec<_> = requests.iter().map(|request| runtime.add(request.clone()).unwrap()).collect();
    let mut all = vec![Vec::new(); ids.len()];
    while !runtime.is_idle() {
        for event in runtime.step().unwrap() {
            let at = ids.iter().position(|id| *id == event.sequence).unwrap();
            // Depends on the neighbours.
            if !matches!(event.kind, EventKind::Started { .. }) {
                all[at].push(event.kind.clone());
            }
        }
    }
    all
}

fn one(model: &FastModel, request: &Request) -> Vec<EventKind> {
    let context = model.config().max_position_embeddings.min(1024);
    events(model, RuntimeOptions::single(context), std::slice::from_ref(request)).remove(0)
}

#[test]
fn penalties_and_biases_change_tokens_as_defined() {
    let dir = tiny().into_iter().find(|dir| dir.ends_with("llama2-gqa-tied")).unwrap();
    let (decoder, fast) = (reference(&dir), FastModel::load(&longer(&dir, None), 2).unwrap());
    let base = greedy(prompt(&fast, 2, 17), 40);
    for sampling in [
        Sampling { repetition: 1.3, ..Sampling::default() },
        Sampling { presence: 0.5, frequency: 0.2, ..Sampling::default() },
        Sampling { temperature: 0.8, min_p: 0.2, repetition: 1.1, seed: 3, ..Sampling::default() },
    ] {
        let request = Request { sampling, ..base.clone() };
        let options =
            GenerateOptions { max_new_tokens: 40, sampling, ignore_eos: true, ..GenerateOptions::default() };
        let expected = generate(&decoder, &request.prompt, &options, |_| ControlFlow::Continue(())).unwrap();
        assert_eq!(alone(&fast, &request), expected.tokens, "{sampling:?}");
    }
    let free = alone(&fast, &base);
    let banned = Request { logit_bias: vec![(free[0], f32::NEG_INFINITY)], ..base.clone() };
    assert!(!alone(&fast, &banned).contains(&free[0]));
    let wanted = Request { logit_bias: vec![(7, 1e6)], ..base.clone() };
    assert_eq!(alone(&fast, &wanted), [7; 40]);
    let mut runtime = Runtime::new(&fast, RuntimeOptions::single(64)).unwrap();
    for bias in [(7, f32::NAN), (7, f32::INFINITY), (1 << 30, 0.0)] {
        assert!(runtime.add(Request { logit_bias: vec![bias], ..base.clone() }).is_err());
    }
}

#[test]
fn constraints_hold_alone_in_a_batch_and_with_speculation() {
    for (model, name) in quantized() {
        let requests: Vec<Request> = (0..4)
            .map(|i| {
                let base = match i % 2 {
                    0 => greedy(prompt(&model, i, 3 + 9 * i), 12),
                    _ => sampled(prompt(&model, i, 1 + 7 * i), 12, i as u64),
                };
                Request { constraint: Remainders::boxed(&model, 99, 99), ..base }
            })
            .collect();
        let mut runtime = Runtime::new(&model, RuntimeOptions::batch(4, 64)).unwrap();
        let ids: Vec<_> = requests.iter().map(|request| runtime.add(request.clone()).unwrap()).collect();
        for (request, tokens) in requests.iter().zip(finish(&mut runtime, &ids)) {
            assert_eq!(tokens.len(), 12, "{name}");
            assert!((0u32..).zip(&tokens).all(|(place, token)| token % 3 == place % 3), "{name}: {tokens:?}");
            assert_eq!(tokens, alone(&model, request), "{name}");
            let mut speculating = speculating(&model, None);
            let id = speculating.add(request.clone()).unwrap();
            assert_eq!(finish(&mut speculating, &[id]).remove(0), tokens, "{name}");
        }
    }
}

/// Others go on meanwhile, and a sequence that lost its place meanwhile has the same tokens.
#[test]
fn a_constraint_that_answers_late_changes_no_token() {
    let model = model("llama2-gqa-tied");
    let base =
        |i: usize| Request { forced: Vec::new(), ..sampled(prompt(&model, i, 3 + 9 * i), 12, i as u64) };
    let constrained = |i, late| {
        let inner = Remainders::boxed(&model, 99, 99);
        let constraint = if late == 0 { inner } else { Late::boxed(inner, late) };
        Request { constraint, ..base(i) }
    };
    let expected: Vec<_> = (0..3).map(|i| alone(&model, &constrained(i, 0))).collect();
    for late in [1, 2, 7] {
        let mut runtime = Runtime::new(&model, RuntimeOptions::batch(3, 64)).unwrap();
        let ids: Vec<_> = (0..3).map(|i| runtime.add(constrained(i, late)).unwrap()).collect();
        assert_eq!(finish(&mut runtime, &ids), expected, "{late}");
        let mut speculating = speculating(&model, None);
        let id = speculating.add(constrained(1, late)).unwrap();
        assert_eq!(finish(&mut speculating, &[id]).remove(0), expected[1], "{late}");
    }
    // Two places for three sequences: whichever waits for its constraint, and now and then another, gives up its place.
    let mut runtime = Runtime::new(&model, RuntimeOptions::batch(2, 64)).unwrap();
    let ids: Vec<_> = (0..3).map(|i| runtime.add(constrained(i, 5)).unwrap()).collect();
    let (mut tokens, mut out, mut taken) = (vec![Vec::new(); 3], Vec::new(), 0);
    while !runtime.is_idle() || !out.is_empty() {
        out.drain(..).for_each(|detached: Detached| runtime.attach(detached));
        for event in runtime.step().unwrap().to_vec() {
            if let EventKind::Token { token, .. } = event.kind {
                tokens[ids.iter().position(|id| *id == event.sequence).unwrap()].push(token);
            }
        }
        let mut gives = |id: &SequenceId| runtime.is_undecided(*id) || tokens[0].len() % 5 == 4;
        let waits: Vec<_> = ids.iter().copied().filter(|id| gives(id)).collect();
        out.extend(waits.into_iter().filter_map(|id| runtime.detach(id)));
        taken += out.len();
        assert!(taken < 3000, "{tokens:?}");
    }
    assert_eq!(tokens, expected);
    assert!(taken > 3, "{taken}");
    assert!(runtime.detach(ids[0]).is_none());
    // A free sequence is as fast as alone beside one that waits for long.
    let mut runtime = Runtime::new(&model, RuntimeOptions::batch(2, 64)).unwrap();
    let (slow, free) = (runtime.add(constrained(1, 1000)).unwrap(), runtime.add(base(2)).unwrap());
    let mut steps = 0;
    while runtime.sequences().any(|state| state.id == free) {
        runtime.step().unwrap();
        steps += 1;
    }
    assert!(steps <= 13 && runtime.is_undecided(slow), "{steps}");
}

/// A beginning is shared by sequences of one owner only.
#[test]
fn owners_do_not_share_prompts() {
    let model = model("llama2-gqa-tied");
    let request = |owner| Request { owner, prefixes: owner, ..greedy(prompt(&model, 1, 200), 4) };
    let mut runtime = Runtime::new(&model, RuntimeOptions::batch(4, 256)).unwrap();
    let mut cached = |owners: &[u64]| {
        let ids: Vec<_> = owners.iter().map(|owner| runtime.add(request(*owner)).unwrap()).collect();
        let mut cached = vec![0; ids.len()];
        while !runtime.is_idle() {
            for event in runtime.step().unwrap() {
                if let EventKind::Started { cached: shared } = event.kind {
                    cached[ids.iter().position(|id| *id == event.sequence).unwrap()] = shared;
                }
            }
        }
        cached
    };
    // At once, and one after another: finished sequences are kept.
    assert_eq!(cached(&[1, 2, 2]), [0, 0, 128]);
    assert_eq!(cached(&[3]), [0]);
    assert_eq!(cached(&[1]), [128]);
}

/// Two owners at once: one generates, another one brings prompt after prompt. All have the tokens that they have alone.
#[test]
fn owners_share_passes_and_change_no_token() {
    let model = model("llama2-gqa-tied");
    let request = |i: usize| {
        let tokens = if i.is_multiple_of(2) { 3 + i } else { 150 + 7 * i };
        let base = sampled(prompt(&model, i, tokens), 20, i as u64);
        Request { owner: (i % 2) as u64, forced: Vec::new(), ..base }
    };
    let expected: Vec<_> = (0..8).map(|i| alone(&model, &request(i))).collect();
    let mut runtime = Runtime::new(&model, RuntimeOptions::batch(5, 256)).unwrap();
    let ids: Vec<_> = (0..8).map(|i| runtime.add(request(i)).unwrap()).collect();
    assert_eq!(finish(&mut runtime, &ids), expected);
}

#[test]
fn constraints_end_sequences() {
    let model = model("llama2-gqa-tied");
    let eos = model.config().eos_token_ids.first().copied();
    let base = greedy(prompt(&model, 1, 12), 20);
    let constrained =
        |least, most| Request { constraint: Remainders::boxed(&model, least, most), ..base.clone() };
    // Complete after five tokens.
    let found = one(&model, &constrained(99, 5));
    assert_eq!(found.len(), 6);
    assert_eq!(found.last(), Some(&EventKind::Finished(StopReason::Constraint)));
    // An end token is taken where the constraint allows an end, and not before, even if `ignore_eos` is set.
    if let Some(eos) = eos {
        let wanted = Request { logit_bias: vec![(eos, 1e6)], ..constrained(3, 99) };
        let found = one(&model, &wanted);
        assert_eq!(found.len(), 4);
        assert_eq!(found.last(), Some(&EventKind::Finished(StopReason::Token(eos))));
    }
    // A given token that is not allowed ends the sequence with an error.
    let given = Request { forced: vec![0, 1, 3], ..constrained(99, 99) };
    assert!(matches!(one(&model, &given)[..], [_, _, EventKind::Unconstrained(_)]));
    // So does a constraint that allows only banned tokens.
    let banned = (0..model.config().vocab_size as u32).map(|token| (token, f32::NEG_INFINITY)).collect();
    let found = one(&model, &Request { logit_bias: banned, ..constrained(99, 99) });
    assert!(matches!(found[..], [EventKind::Unconstrained(_)]), "{found:?}");
}

/// Draws with a constraint follow the distribution of the allowed tokens.
#[test]
fn constrained_draws_follow_the_renormalized_distribution() {
    let model = model("llama2-gqa-tied");
    let prompt = prompt(&model, 1, 12);
    let all = Request { logprobs: Some(model.config().vocab_size), ..greedy(prompt.clone(), 1) };
    let EventKind::Token { top, .. } = one(&model, &all).remove(0) else { panic!() };
    let allowed: Vec<_> = top.into_iter().filter(|(token, _)| token % 3 == 0).collect();
    let total: f64 = allowed.iter().map(|(_, x)| f64::from(*x).exp()).sum();
    let (token, logprob) = allowed[0];
    let p = f64::from(logprob).exp() / total;
    let draws = 2000;
    let sampling = |seed| Sampling { temperature: 1.0, seed, ..Sampling::default() };
    let mut runtime = Runtime::new(&model, RuntimeOptions::batch(16, 64)).unwrap();
    let ids: Vec<SequenceId> = (0..draws)
        .map(|seed| {
            let constraint = Remainders::boxed(&model, 99, 99);
            let request = Request { sampling: sampling(seed), constraint, ..greedy(prompt.clone(), 1) };
            runtime.add(request).unwrap()
        })
        .collect();
    let found = finish(&mut runtime, &ids);
    let share = found.iter().filter(|tokens| tokens[0] == token).count() as f64 / draws as f64;
    assert!((share - p).abs() < 4.0 * (p * (1.0 - p) / draws as f64).sqrt(), "{share} for {p}");
}

/// Probabilities of a prompt equal the probabilities of the same tokens as a continuation, in chunks and in a batch
/// too.
#[test]
fn prompts_report_the_probabilities_of_their_tokens() {
    for (model, name) in quantized() {
        let tokens = prompt(&model, 3, 40);
        let scored = Request { prompt_logprobs: Some(2), max_new_tokens: 0, ..greedy(tokens.clone(), 0) };
        let found = one(&model, &scored);
        assert_eq!(found.len(), 41, "{name}");
        assert_eq!(found[0], EventKind::PromptToken { token: tokens[0], logprob: None, top: vec![] });
        assert_eq!(found[40], EventKind::Finished(StopReason::Length));
        // A continuation is computed token by token, which may round otherwise.
        let forced =
            Request { logprobs: Some(2), forced: tokens[1..].to_vec(), ..greedy(vec![tokens[0]], 39) };
        for (i, event) in one(&model, &forced).into_iter().take(39).enumerate() {
            let EventKind::Token { token, logprob: Some(logprob), .. } = event else { panic!("{event:?}") };
            let EventKind::PromptToken { token: other, logprob: Some(own), top } = &found[i + 1] else {
                panic!()
            };
            assert_eq!((token, top.len()), (*other, 2));
            assert!((logprob - own).abs() < 2e-2, "{name} {i}: {logprob} {own}");
        }
    }
    let model = model("llama2-gqa-tied");
    let requests: Vec<_> = (0..4)
        .map(|i| Request { prompt_logprobs: Some(3), ..greedy(prompt(&model, i % 2, 300 + i), 5 * (i % 2)) })
        .collect();
    // Little memory: sequences are preempted.
    let options = RuntimeOptions { step_tokens: 128, cached_tokens: 700, ..RuntimeOptions::batch(4, 400) };
    for (request, found) in requests.iter().zip(events(&model, options, &requests)) {
        assert_eq!(found, one(&model, request));
    }
}

#[test]
fn embeddings_pool_the_hidden_states() {
    for (model, name) in quantized().take(6) {
        let tokens = prompt(&model, 5, 30);
        let mut buffers = model.plan_whole(30, 64).unwrap();
        let states = model.whole(&Batch { tokens: &tokens, lens: &[30] }, &mut buffers).unwrap().to_vec();
        let width = model.config().hidden_size;
        let mean = |at: usize| states.iter().skip(at).step_by(width).sum::<f32>() / 30.0;
        for pooling in [Pooling::Mean, Pooling::Last] {
            let request = Request { embed: Some(pooling), ..greedy(tokens.clone(), 0) };
            let found = one(&model, &request);
            let [EventKind::Embedding(vector), EventKind::Finished(StopReason::Length)] = &found[..] else {
                panic!("{name}: {found:?}")
            };
            assert_eq!(vector.len(), width);
            for (at, x) in vector.iter().enumerate() {
                let expected = if pooling == Pooling::Mean { mean(at) } else { states[29 * width + at] };
                assert!((x - expected).abs() < 0.05 * (1.0 + expected.abs()), "{name} {at}: {x} {expected}");
            }
        }
    }
    let model = model("llama2-gqa-tied");
    let requests: Vec<_> = (0..6)
        .map(|i| {
            let embed = Some(if i % 2 == 0 { Pooling::Mean } else { Pooling::Last });
            Request { embed, ..greedy(prompt(&model, i / 3, 200 + i), 0) }
        })
        .collect();
    let options = RuntimeOptions { step_tokens: 128, cached_tokens: 500, ..RuntimeOptions::batch(4, 400) };
    for (request, found) in requests.iter().zip(events(&model, options, &requests)) {
        assert_eq!(found, one(&model, request));
    }
}

#[test]
fn higher_priorities_come_first() {
    let model = model("llama2-gqa-tied");
    let mut runtime = Runtime::new(&model, RuntimeOptions::batch(1, 64)).unwrap();
    let ids: Vec<_> = [0, 0, 5, -1, 5]
        .into_iter()
        .map(|priority| runtime.add(Request { priority, ..greedy(prompt(&model, 1, 10), 3) }).unwrap())
        .collect();
    let mut ended = Vec::new();
    while !runtime.is_idle() {
        let done = runtime.step().unwrap().iter().filter(|e| matches!(e.kind, EventKind::Finished(_)));
        ended.extend(done.map(|e| ids.iter().position(|id| *id == e.sequence).unwrap()));
    }
    assert_eq!(ended, [2, 4, 0, 1, 3]);
}

/// Prompts that arrive together and begin alike are computed once.
#[test]
fn a_common_prefix_is_computed_once() {
    let model = model("llama2-gqa-tied");
    let base = prompt(&model, 1, 640);
    let requests: Vec<_> =
        (0..16).map(|i| greedy([&base[..], &prompt(&model, i, 20 + i)].concat(), 8)).collect();
    let options = RuntimeOptions { step_tokens: 128, ..RuntimeOptions::batch(16, 700) };
    let mut runtime = Runtime::new(&model, options).unwrap();
    let ids: Vec<_> = requests.iter().map(|request| runtime.add(request.clone()).unwrap()).collect();
    let mut cached = vec![None; 16];
    let mut states = 0;
    let mut tokens = vec![Vec::new(); 16];
    while !runtime.is_idle() {
        for event in runtime.step().unwrap() {
            let at = ids.iter().position(|id| *id == event.sequence).unwrap();
            match event.kind {
                EventKind::Started { cached: n } => assert!(cached[at].replace(n).is_none()),
                EventKind::Token { token, .. } => tokens[at].push(token),
                _ => {}
            }
        }
        let all: Vec<_> = runtime.sequences().collect();
        assert_eq!(all.len(), runtime.running() + runtime.waiting());
        for state in all {
            let at = ids.iter().position(|id| *id == state.id).unwrap();
            assert_eq!((state.prompt_tokens, state.new_tokens), (660 + at, tokens[at].len()));
            assert_eq!(state.phase == Phase::Waiting, cached[at].is_none());
            assert_eq!(state.phase == Phase::Decode, state.new_tokens > 0);
            states += 1;
        }
    }
    assert!(states > 0);
    assert_eq!(runtime.shared_tokens(), 15 * 640);
    assert_eq!(cached[0], Some(0));
    assert!(cached[1..].iter().all(|n| *n == Some(640)), "{cached:?}");
    for (request, tokens) in requests.iter().zip(tokens) {
        assert_eq!(tokens, alone(&model, request));
    }
    let cache = runtime.cache();
    assert!(cache.free < cache.blocks && cache.kept > 0, "{cache:?}");
}

#[test]
fn a_prompt_alone_is_computed_and_ends() {
    let model = model("qwen3-qknorm");
    let options = RuntimeOptions { speculation: Speculation::Lookup, ..RuntimeOptions::batch(2, 256) };
    let mut runtime = Runtime::new(&model, options).unwrap();
    let base = prompt(&model, 1, 150);
    let id = runtime.add(greedy(base.clone(), 0)).unwrap();
    assert_eq!(finish(&mut runtime, &[id]), [Vec::<u32>::new()]);
    // Its cache serves what follows.
    let id = runtime.add(greedy(base.clone(), 5)).unwrap();
    assert_eq!(finish(&mut runtime, &[id])[0], alone(&model, &greedy(base, 5)));
    assert_eq!(runtime.shared_tokens(), 128);
}
