//! The paged cache against attention in f32 over rows that went through the codec of their policy.
#![allow(clippy::unwrap_used, clippy::panic)]

use mantissa_kernels::{CausalAttention, ScoreRules, kernels};
use mantissa_model::kv::{KvQuantizer, KvStorage, Side};
use mantissa_model::{KvPolicy, ModelConfig};
use mantissa_store::convention::KvQuant;
use serde_json::json;

use super::*;

const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const D: usize = 16;
const WIDTH: usize = KV_HEADS * D;
const Q_WIDTH: usize = HEADS * D;
const CONTEXT: usize = 2048;
const HALF: usize = D / 2;

fn config() -> ModelConfig {
    let value = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HEADS * D,
        "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": HEADS, "head_dim": D,
        "num_key_value_heads": KV_HEADS, "vocab_size": 64, "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": true, "hidden_act": "silu"
    });
    ModelConfig::from_json(&value, "config.json").unwrap()
}

fn noise(n: usize, seed: usize) -> Vec<f32> {
    let mut state = (seed as u32).wrapping_mul(2_654_435_761) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state as f32 / u32::MAX as f32 - 0.5
    };
    (0..n).map(|_| (next() + next() + next()) * 2.0).collect()
}

/// Cosines and sines of all positions.
fn tables() -> (Vec<f32>, Vec<f32>) {
    let angle = |i: usize| (i / HALF) as f32 * 10f32.powf(-((i % HALF) as f32));
    (0..CONTEXT * HALF).map(|i| (angle(i).cos(), angle(i).sin())).unzip()
}

/// Rows of a sequence that follow the rules of the reference cache: a token is stored once, when it leaves the window.
struct Reference {
    side: Option<Side>,
    rows: Vec<f32>,
    settled: usize,
    window: usize,
    sinks: usize,
}

impl Reference {
    fn push(&mut self, new: &[f32]) {
        self.rows.extend_from_slice(new);
    }

    fn settle(&mut self) {
        let Some(side) = &self.side else { return };
        let (tokens, span) = (self.rows.len() / WIDTH, side.span());
        self.settled = self.settled.max(self.sinks);
        while tokens >= self.settled + self.window + span {
            let chunk = &mut self.rows[self.settled * WIDTH..][..span * WIDTH];
            let mut bytes = Vec::new();
            side.encode(chunk, &mut bytes).unwrap();
            side.decode(&bytes, chunk);
            self.settled += span;
        }
    }
}

struct Model {
    pool: KvPool,
    shape: CausalAttention,
    rules: ScoreRules<'static>,
    cos: Vec<f32>,
    sin: Vec<f32>,
    threads: usize,
}

impl Model {
    fn new(plan: KvPlan, tokens: usize) -> Self {
        let shape = CausalAttention {
            heads: HEADS,
            kv_heads: KV_HEADS,
            head_dim: D,
            scale: 1.0 / (D as f32).sqrt(),
            window: None,
            chunk: None,
        };
        let (cos, sin) = tables();
        let pool = KvPool::plan(plan, tokens).unwrap();
        Model { pool, shape, rules: ScoreRules::default(), cos, sin, threads: 2 }
    }

    /// Appends `tokens` tokens of stream `seed` to a sequence, one pass.
    fn pass(&mut self, cache: &mut SequenceCache, seed: usize, tokens: usize) -> Vec<f32> {
        let start = cache.len();
        assert!(cache.reserve(&mut self.pool, start + tokens));
        let [mut q, mut k, v] = inputs(seed, start, tokens);
        let mut out = vec![0.0; q.len()];
        let span = RowSpan { sequence: 0, rows: 0..tokens, start };
        let inputs = AttendInputs {
            append: true,
            layer: 0,
            shape: &self.shape,
            rules: self.rules,
            half: HALF,
            cos: &self.cos,
            sin: &self.sin,
            q: &mut q,
            k: &mut k,
            v: &v,
            out: &mut out,
            threads: self.threads,
        };
        self.pool.attend(inputs, &[span], std::slice::from_mut(cache)).unwrap();
        cache.commit(tokens);
        out
    }
}

/// Queries, keys and values of tokens `start..` of stream `seed`.
fn inputs(seed: usize, start: usize, tokens: usize) -> [Vec<f32>; 3] {
    let rows = |width: usize, kind: usize| {
        (start..start + tokens).flat_map(|i| noise(width, seed * 100_003 + i * 17 + kind)).collect::<Vec<_>>()
    };
    [rows(Q_WIDTH, 1), rows(WIDTH, 2), rows(WIDTH, 3)]
}

/// The result of a pass by the reference's rules; `own_in_f32` as in [`KvPlan::own_in_f32`].
fn expected(
    model: &Model,
    sides: &mut [Reference; 2],
    before_rope: bool,
    own_in_f32: bool,
    seed: usize,
    tokens: usize,
) -> Vec<f32> {
    let start = sides[0].rows.len() / WIDTH;
    let [mut q, mut k, v] = inputs(seed, start, tokens);
    let rotate = |x: &mut [f32], heads: usize, start: usize| {
        let angles = start * HALF..(start + x.len() / (heads * D)) * HALF;
        kernels().rope_rotate(x, heads, D, &model.cos[angles.clone()], &model.sin[angles]);
    };
    rotate(&mut q, HEADS, start);
    if !before_rope {
        rotate(&mut k, KV_HEADS, start);
    }
    for (side, new) in sides.iter_mut().zip([&k, &v]) {
        side.push(new);
        let direct = side.window == 0 && side.side.as_ref().is_none_or(|side| side.span() == 1);
        if direct && !own_in_f32 {
            side.settle();
        }
    }
    let (mut keys, values) = (sides[0].rows.clone(), sides[1].rows.clone());
    if before_rope {
        rotate(&mut keys, KV_HEADS, 0);
    }
    let mut out = vec![0.0; q.len()];
    let mut scratch = vec![0.0; model.shape.scratch_len(tokens, start + tokens)];
    kernels().attention_causal_with(&model.shape, model.rules, &q, &keys, &values, &mut out, &mut scratch);
    sides.iter_mut().for_each(Reference::settle);
    out
}

/// Largest difference relative to the largest value.
fn distance(a: &[f32], b: &[f32]) -> f32 {
    let largest = b.iter().fold(0.0f32, |m, x| m.max(x.abs()));
    assert!(a.iter().all(|x| x.is_finite()));
    a.iter().zip(b).fold(0.0f32, |m, (a, b)| m.max((a - b).abs())) / largest
}

const POLICIES: [&str; 26] = [
    "f32",
    "f16",
    "bf16",
    "int8",
    "int4",
    "fp8",
    "int8-head:restricted",
    "int4-head",
    "int8-head,scales=f16",
    "int8-head-asym:minmax",
    "keys=int8,values=int4",
    "keys=f32,values=int8",
    "int8,window=70,sinks=3",
    "int4,window=5,sinks=70",
    "f16,sinks=2",
    "int4-g8-asym:minmax,channel-keys",
    "int4-g24-asym:minmax,channel-keys,window=30,sinks=2",
    "int4-head-asym,rotate",
    "int8,pre-rope",
    "turbo4",
    "turbo3,window=9",
    "int6-token",
    "fp8-e5m2-token",
    "mxfp4",
    "nf4-g16",
    "q8_0",
];

/// Compares passes of all sizes with attention in f32: one token at a time, several, beyond a block and a piece.
fn check(text: &str, plan: KvPlan, parts: &KvStorage, own_in_f32: bool) {
    let mut model = Model::new(plan, CONTEXT);
    for window in [None, Some(40)] {
        model.shape.window = window;
        model.rules.softcap = window.map(|_| 4.0);
        model.rules.sinks = window.map(|_| &[0.5, -1.0, 2.0, 0.0][..]);
        let side = |side: &Option<Side>| Reference {
            side: side.clone(),
            rows: Vec::new(),
            settled: 0,
            window: if side.is_some() { parts.window } else { 0 },
            sinks: parts.sinks,
        };
        let mut sides = [side(&parts.keys), side(&parts.values)];
        let mut cache = SequenceCache::new(&model.pool);
        for tokens in [1, 3, 70, 1, 16, 17, 300, 1, 300, 5, 1] {
            let out = model.pass(&mut cache, 1, tokens);
            let expected = expected(&model, &mut sides, parts.before_rope, own_in_f32, 1, tokens);
            let bound = if text.contains("int4") { 1e-2 } else { 5e-4 };
            let error = distance(&out, &expected);
            assert!(error <= bound, "{text} own {own_in_f32} window {window:?} {}: {error}", cache.len());
        }
        cache.release(&mut model.pool);
        assert_eq!(model.pool.free_blocks(), model.pool.blocks(), "{text}");
    }
}

#[test]
fn every_policy_attends_like_f32_over_its_stored_values() {
    let config = config();
    for text in POLICIES {
        let policy: KvPolicy = text.parse().unwrap();
        let quantizer = policy.quantizer(&config).unwrap();
        for own_in_f32 in [false, true] {
            let plan = KvPlan::of_policy(&config, &policy).unwrap();
            let plan = if own_in_f32 { plan.own_in_f32() } else { plan };
            check(text, plan, quantizer.parts(), own_in_f32);
        }
    }
}

/// A pass sees its own tokens under the scales of a checkpoint, whatever the plan says.
#[test]
fn scales_of_a_checkpoint_are_applied_as_stored() {
    let config = config();
    for text in ["fp8-e4m3-tensor@static", "int8-tensor@static"] {
        let scheme = mantissa_num::parse_activation(text).unwrap();
        let quant = KvQuant { scheme, k_scale: vec![0.02, 0.03], v_scale: vec![0.025] };
        let quantizer = KvQuantizer::stored("m", &quant, KV_HEADS, D).unwrap();
        let plan = KvPlan::new(&config, [Some(&quantizer)]).unwrap();
        check(text, plan.clone(), quantizer.parts(), false);
        check(text, plan.own_in_f32(), quantizer.parts(), false);
    }
}

fn model_of(text: &str) -> Model {
    Model::new(KvPlan::of_policy(&config(), &text.parse().unwrap()).unwrap(), CONTEXT)
}

#[test]
fn bits_do_not_depend_on_threads_or_on_the_split_of_few_tokens() {
    for text in ["f16", "int8", "int4", "fp8", "turbo4"] {
        let run = |threads: usize, split: &[usize]| {
            let mut model = model_of(text);
            model.threads = threads;
            let mut cache = SequenceCache::new(&model.pool);
            let prompt = model.pass(&mut cache, 5, 700);
            let mut out = Vec::new();
            split.iter().for_each(|&tokens| out.extend(model.pass(&mut cache, 5, tokens)));
            (prompt, out)
        };
        let one = run(1, &[1; 8]);
        for (threads, split) in [(2, &[1; 8][..]), (3, &[8]), (2, &[3, 5]), (7, &[1, 6, 1])] {
            assert!(run(threads, split) == one, "{text} {threads} {split:?}");
        }
    }
}

#[test]
fn forks_share_blocks_and_copy_them_before_they_write() {
    for text in ["int8", "int8,window=10,sinks=2", "int4-g8-asym:minmax,channel-keys"] {
        let mut model = model_of(text);
        let mut cache = SequenceCache::new(&model.pool);
        model.pass(&mut cache, 1, 150);
        let held = cache.blocks();
        let free = model.pool.free_blocks();
        let mut fork = cache.fork(&mut model.pool);
        assert_eq!((model.pool.free_blocks(), fork.blocks()), (free, held), "{text}");
        // Another continuation leaves the original as it is.
        model.pass(&mut fork, 2, 5);
        assert_eq!(model.pool.free_blocks(), free - 1, "{text}: the last block is copied");
        let mut alone = SequenceCache::new(&model.pool);
        model.pass(&mut alone, 1, 150);
        assert_eq!(model.pass(&mut cache, 1, 3), model.pass(&mut alone, 1, 3), "{text}");
        // A prefix goes on like a sequence of its own.
        let mut prefix = cache.fork_prefix(&mut model.pool, 128);
        assert_eq!(prefix.len(), 128);
        model.pass(&mut prefix, 7, 1);
        for cache in [&mut cache, &mut fork, &mut alone, &mut prefix] {
            cache.release(&mut model.pool);
        }
        assert_eq!(model.pool.free_blocks(), model.pool.blocks(), "{text}");
    }
}

#[test]
fn a_truncated_sequence_goes_on_like_a_shorter_one() {
    for text in ["f16", "int4", "turbo4", "int4-g8-asym:minmax,channel-keys"] {
        for len in [0, 1, 63, 64, 65, 72, 128] {
            let mut model = model_of(text);
            let (mut cache, mut short) = (SequenceCache::new(&model.pool), SequenceCache::new(&model.pool));
            model.pass(&mut cache, 1, 130);
            cache.truncate(&mut model.pool, len);
            model.pass(&mut short, 1, len);
            let (a, b) = (model.pass(&mut cache, 1, 2), model.pass(&mut short, 1, 2));
            // A partly removed group is kept by its stored values.
            let bound = if text.contains("channel") && len % 8 != 0 { 0.3 } else { 0.0 };
            assert!(distance(&a, &b) <= bound, "{text} {len}: {}", distance(&a, &b));
        }
    }
}

#[test]
fn a_full_pool_refuses_and_changes_nothing() {
    let mut model = Model::new(KvPlan::of_policy(&config(), &"int8".parse().unwrap()).unwrap(), 128);
    let (mut a, mut b) = (SequenceCache::new(&model.pool), SequenceCache::new(&model.pool));
    assert!(a.reserve(&mut model.pool, 65) && !b.reserve(&mut model.pool, 1));
    assert_eq!((a.blocks(), b.blocks(), model.pool.free_blocks()), (2, 0, 0));
    a.release(&mut model.pool);
    assert!(b.reserve(&mut model.pool, 128));
}

#[test]
fn sequences_of_a_pass_do_not_affect_each_other() {
    let mut model = model_of("int8");
    let mut caches: Vec<_> = (0..3).map(|_| SequenceCache::new(&model.pool)).collect();
    for (i, cache) in caches.iter_mut().enumerate() {
        model.pass(cache, i, 40 + 50 * i);
    }
    let mut alone = Vec::new();
    for (i, cache) in caches.iter().enumerate() {
        let mut fork = cache.fork(&mut model.pool);
        alone.extend(model.pass(&mut fork, i, [1, 20, 4][i]));
        fork.release(&mut model.pool);
    }
    let parts: Vec<_> = (0..3).map(|i| inputs(i, caches[i].len(), [1, 20, 4][i])).collect();
    let join = |kind: usize| parts.iter().flat_map(|part| part[kind].clone()).collect::<Vec<_>>();
    let (mut q, mut k, v) = (join(0), join(1), join(2));
    let mut spans = Vec::new();
    for (sequence, rows) in [0..1, 1..21, 21..25].into_iter().enumerate() {
        let (start, end) = (caches[sequence].len(), caches[sequence].len() + rows.len());
        assert!(caches[sequence].reserve(&mut model.pool, end));
        spans.push(RowSpan { sequence, rows, start });
    }
    let mut out = vec![0.0; q.len()];
    let inputs = AttendInputs {
        append: true,
        layer: 0,
        shape: &model.shape,
        rules: model.rules,
        half: HALF,
        cos: &model.cos,
        sin: &model.sin,
        q: &mut q,
        k: &mut k,
        v: &v,
        out: &mut out,
        threads: 2,
    };
    model.pool.attend(inputs, &spans, &mut caches).unwrap();
    assert!(out == alone);
}
