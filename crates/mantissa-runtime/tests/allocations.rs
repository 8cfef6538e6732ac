//! Steps allocate nothing once their shapes have been seen.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use common::{greedy, model, prompt, sampled};
use mantissa_runtime::{FastModel, Runtime, RuntimeOptions, Speculation};

/// The system's allocator, which counts its calls.
struct Counting;

static CALLS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every method passes its arguments on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        CALLS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the contract of this method.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the contract of this method; the memory came from the system's allocator.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        CALLS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: as in `dealloc`.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Runs three sequences and returns the allocations of all steps.
fn work(model: &FastModel, runtime: &mut Runtime<'_>, context: usize) -> usize {
    let of = |tokens: usize| tokens * context / 256;
    runtime.add(greedy(prompt(model, 1, of(72)), of(40))).unwrap();
    runtime.add(sampled(prompt(model, 2, of(20)), of(100), 3)).unwrap();
    runtime.add(greedy(prompt(model, 3, of(8)).repeat(4), of(60))).unwrap();
    let before = CALLS.load(Ordering::Relaxed);
    while !runtime.is_idle() {
        runtime.step().unwrap();
    }
    CALLS.load(Ordering::Relaxed) - before
}

#[test]
fn steps_allocate_nothing_after_the_first_of_their_shape() {
    let dense = ["llama2-gqa-tied", "qwen3-qknorm", "phi3", "gemma2"];
    let experts = ["qwen3-moe", "qwen2-moe", "deepseek-v3", "gpt-oss"];
    let learned_positions = ["gpt2"];
    let recurrent = ["qwen3-next", "lfm2", "nemotron-h", "kimi-linear", "deepseek-v4"];
    for name in dense.into_iter().chain(experts).chain(learned_positions).chain(recurrent) {
        let model = model(name);
        let context = model.config().max_position_embeddings.min(256);
        let options =
            RuntimeOptions { kept: 0, speculation: Speculation::Lookup, ..RuntimeOptions::batch(3, context) };
        let mut runtime = Runtime::new(&model, options).unwrap();
        let first = work(&model, &mut runtime, context);
        // The number of proposals depends on measured times, so shapes may be new for some runs more on a busy
        // machine; what every step allocates shows in all of them.
        let mut rest = Vec::new();
        while rest.last() != Some(&0) && rest.len() < 200 {
            rest.push(work(&model, &mut runtime, context));
        }
        assert!(first > 0 && rest.last() == Some(&0), "{name}: {first} {rest:?}");
    }
}
