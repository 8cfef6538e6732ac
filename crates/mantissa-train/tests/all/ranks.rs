//! Runs over ranks: the same bits for every number of ranks, with and without sharded states, in every format of gradients.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::thread::{self, JoinHandle};

use mantissa_model::ModelConfig;
use mantissa_ranks::{Link, MemoryLink, RankError, Traffic};
use mantissa_train::data::{Batches, Cursor, TokenFile, TokenWriter};
use mantissa_train::scaling::ScalingOptions;
use mantissa_train::schedule::{Decay, Schedule};
use mantissa_train::{
    Group, MessageFormat, Optimizer, Options, ParallelOptions, Parameters, Policy, TrainError, TrainModel,
    Trainer, TrainerOptions, follow,
};
use tempfile::TempDir;

use crate::common::{sampled, shared_out};

const LEN: usize = 16;
const LEAVES: usize = 8;

/// A model with matrices of several pieces, which shards cut.
fn config() -> ModelConfig {
    config_of(768)
}

fn config_of(inner: usize) -> ModelConfig {
    let config = serde_json::json!({
        "model_type": "llama", "hidden_size": 256, "intermediate_size": inner, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 600, "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": true
    });
    ModelConfig::from_json(&config, "config").unwrap()
}

fn tokens(dir: &Path) -> PathBuf {
    let path = dir.join("tokens.safetensors");
    let mut writer = TokenWriter::new(600);
    let mut token = 1u32;
    for i in 0..20_000u32 {
        token = if i % 7 == 0 { (i * i + 3) % 600 } else { (token * 5 + 1) % 600 };
        writer.push(&[token]).unwrap();
    }
    writer.finish(&mantissa_store::Output::owned(&path), BTreeMap::new()).unwrap();
    path
}

/// What a run is made of.
#[derive(Clone)]
struct Run {
    policy: &'static str,
    optimizer: &'static str,
    parallel: ParallelOptions,
    seed: u64,
    inner: usize,
}

fn parallel(zero: u8, gradients: &str) -> ParallelOptions {
    ParallelOptions {
        leaves: LEAVES,
        zero,
        gradients: MessageFormat::parse(gradients).unwrap(),
        gather: None,
    }
}

impl Run {
    fn new(policy: &'static str, optimizer: &'static str, zero: u8, gradients: &str) -> Self {
        Run { policy, optimizer, parallel: parallel(zero, gradients), seed: 3, inner: 768 }
    }

    /// The model with weights of `seed`, and the optimizer of a rank.
    fn parts(&self, seed: u64, of: (usize, usize)) -> (TrainModel, Optimizer) {
        let mut policy = Policy::by_name(self.policy.trim_end_matches("-growing"), 21).unwrap();
        if self.policy.ends_with("-growing") {
            policy.scaling =
                policy.scaling.map(|scaling| ScalingOptions { initial: 256.0, interval: 2, ..scaling });
        }
        let settings: mantissa_train::config::Optimizer =
            mantissa_options::from_toml(&format!("lr = 3e-3\nmax_norm = 1.0\n{}", self.optimizer)).unwrap();
        let params = Parameters::random(&config_of(self.inner), 0.05, seed).unwrap();
        let optimizer = match self.parallel.zero > 0 && of.1 > 1 {
            true => Optimizer::for_rank(&params, &policy, &settings.recipe(), of).unwrap(),
            false => Optimizer::new(&params, &policy, &settings.recipe()).unwrap(),
        };
        let options = Options { max_tokens: 2 * LEN, max_len: LEN, threads: 1, policy };
        (TrainModel::new(config_of(self.inner), params, options).unwrap(), optimizer)
    }

    /// Rank 0 of `ranks`, and the threads of the others.
    fn start(&self, tokens: &Path, ranks: usize) -> (Trainer, Vec<JoinHandle<Result<Traffic, TrainError>>>) {
        let mut ends = MemoryLink::ranks(ranks).into_iter();
        let first = ends.next().unwrap();
        let others = ends.map(|end| {
            let run = self.clone();
            thread::spawn(move || {
                let (model, optimizer) = run.parts(run.seed, (end.rank(), ranks));
                let group = Group::new(Box::new(end), &run.parallel, &model, &optimizer)?;
                follow(model, optimizer, group)
            })
        });
        let others = others.collect();
        let (model, optimizer) = self.parts(self.seed, (0, ranks));
        let group = match ranks {
            1 => Group::alone(&self.parallel, &model, &optimizer).unwrap(),
            _ => Some(Group::new(Box::new(first), &self.parallel, &model, &optimizer).unwrap()),
        };
        let batches = Batches::new(TokenFile::open(tokens).unwrap(), LEN, 11, Cursor::default()).unwrap();
        let schedule = Schedule {
            peak: 3e-3,
            warmup_steps: 1,
            total_steps: 40,
            decay: Decay::Cosine { min_ratio: 0.1 },
        };
        let options = TrainerOptions { batch: 2, accumulate: LEAVES, schedule };
        let mut trainer = Trainer::new(model, optimizer, batches, options).unwrap();
        if let Some(group) = group {
            trainer.set_group(group).unwrap();
        }
        (trainer, others)
    }
}

/// Ends a run; returns the bytes that all ranks sent.
fn end(mut trainer: Trainer, others: Vec<JoinHandle<Result<Traffic, TrainError>>>) -> u64 {
    let own = trainer.end_group().unwrap().first().map_or(0, |traffic| traffic.sent);
    own + others.into_iter().map(|other| other.join().unwrap().unwrap().sent).sum::<u64>()
}

/// Losses, norms and weights by their bits.
#[derive(Clone, Debug, PartialEq)]
struct Bits(Vec<(u64, Option<u64>)>, Vec<u32>);

fn steps(trainer: &mut Trainer, count: usize) -> Vec<(u64, Option<u64>)> {
    let step = |trainer: &mut Trainer| {
        let report = trainer.step().unwrap();
        (report.loss.to_bits(), report.norm.map(f64::to_bits))
    };
    (0..count).map(|_| step(trainer)).collect()
}

fn weights(trainer: &Trainer) -> Vec<u32> {
    trainer.model().parameters().values().iter().map(|v| v.to_bits()).collect()
}

fn run(run: &Run, tokens: &Path, ranks: usize, count: usize) -> Bits {
    let (mut trainer, others) = run.start(tokens, ranks);
    let reports = steps(&mut trainer, count);
    let weights = weights(&trainer);
    end(trainer, others);
    Bits(reports, weights)
}

#[test]
fn bits_do_not_depend_on_ranks_or_shards() {
    let temp = TempDir::new().unwrap();
    let tokens = tokens(temp.path());
    let rows = [
        ("fp32", "kind = \"adamw\""),
        ("bf16-remainder", "kind = \"adamw\"\nmoments = \"8bit\""),
        ("bf16-pure-sr", "kind = \"lion\"\nmoments = \"4bit\""),
        ("bf16", "kind = \"adamw\"\nmoments = \"lin8\""),
        ("fp16", "kind = \"sgd\""),
        ("fp8-delayed", "kind = \"muon\""),
        ("int8-sr", "kind = \"adamw\""),
        ("fp32", "kind = \"soap\"\nfrequency = 2\nblock = 64"),
        ("fp32", "kind = \"adafactor\""),
    ];
    for (i, (policy, optimizer)) in rows.into_iter().enumerate() {
        let alone = run(&Run::new(policy, optimizer, 0, "f32"), &tokens, 1, 3);
        assert!(alone.0.windows(2).any(|pair| pair[0] != pair[1]));
        // Methods of whole matrices take seconds a step.
        let is_matrix = ["muon", "soap"].iter().any(|name| optimizer.contains(name));
        let ways = if is_matrix { &[(4, 1)][..] } else { &[(2, 0), (2, 1), (4, 1), (8, 1)] };
        for &(ranks, zero) in shared_out(ways, ways.len(), i) {
            let found = run(&Run::new(policy, optimizer, zero, "f32"), &tokens, ranks, 3);
            assert_eq!(found.0, alone.0, "{policy} {optimizer}: {ranks} ranks, ZeRO {zero}");
            assert!(found == alone, "{policy} {optimizer}: {ranks} ranks, ZeRO {zero}");
        }
    }
}

/// A matrix that fills several messages.
#[test]
fn large_matrices_of_codes_and_scales_are_gathered_whole() {
    let temp = TempDir::new().unwrap();
    let tokens = tokens(temp.path());
    let of = |zero| Run { inner: 4352, ..Run::new("int8-sr", "", zero, "f32") };
    let alone = run(&of(0), &tokens, 1, 2);
    assert!(run(&of(1), &tokens, 2, 2) == alone);
}

#[test]
fn gradients_in_few_bits_keep_the_bits_too() {
    let temp = TempDir::new().unwrap();
    let tokens = tokens(temp.path());
    let plain = run(&Run::new("fp32", "", 0, "f32"), &tokens, 1, 3);
    for (i, gradients) in ["int8-g256", "fp8-e4m3-g256", "int4-g64+hadamard", "sign"].into_iter().enumerate()
    {
        for policy in shared_out(["fp32", "fp16"], 2, i) {
            let alone = run(&Run::new(policy, "", 0, gradients), &tokens, 1, 3);
            assert!(alone.1 != plain.1, "{gradients}");
            for (ranks, zero) in shared_out([(2, 1), (4, 0), (8, 1)], 3, i) {
                let found = run(&Run::new(policy, "", zero, gradients), &tokens, ranks, 3);
                assert_eq!(found.0, alone.0, "{policy} {gradients}: {ranks} ranks, ZeRO {zero}");
                assert!(found == alone, "{policy} {gradients}: {ranks} ranks, ZeRO {zero}");
            }
        }
    }
}

/// Weights in few bits are the same on the rank that updates them and on those that receive them, and keep their updates in the
/// master copy.
#[test]
fn gathered_weights_in_few_bits_keep_the_bits_too() {
    let temp = TempDir::new().unwrap();
    let tokens = tokens(temp.path());
    let plain = run(&Run::new("bf16", "", 0, "f32"), &tokens, 1, 3);
    for (i, format) in ["fp8-e4m3-g256", "int8-g256"].into_iter().enumerate() {
        let of = |zero| {
            let mut run = Run::new("bf16", "", zero, "f32");
            run.parallel.gather = MessageFormat::parse(format);
            run
        };
        let alone = run(&of(0), &tokens, 1, 3);
        assert!(alone.1 != plain.1, "{format}");
        for (ranks, zero) in shared_out([(2, 0), (4, 1)], 2, i) {
            assert!(run(&of(zero), &tokens, ranks, 3) == alone, "{format}: {ranks} ranks, ZeRO {zero}");
        }
    }
}

/// Telemetry of weights is that of the whole, wherever the parts of gradients and updates are.
#[test]
fn telemetry_of_weights_is_that_of_the_whole() {
    let temp = TempDir::new().unwrap();
    let tokens = tokens(temp.path());
    let health = |ranks: usize, zero: u8| {
        let (mut trainer, others) = Run::new("bf16", "", zero, "f32").start(&tokens, ranks);
        let (report, health) = trainer.measured_step().unwrap();
        let size = trainer.weighed_step().unwrap().1;
        let signals = trainer.signals().cloned();
        end(trainer, others);
        (report, health.weights, size, signals.map(|signals| (signals.dead, signals.lost_updates)))
    };
    let alone = health(1, 0);
    assert!(alone.1.iter().any(|weight| weight.grad_norm.is_some_and(|norm| norm > 0.0)));
    for (ranks, zero) in [(2, 0), (4, 1)] {
        assert_eq!(health(ranks, zero), alone, "{ranks} ranks, ZeRO {zero}");
    }
}

/// A checkpoint is that of the whole: any number of ranks goes on from it, and writes the same bytes.
#[test]
fn checkpoints_are_those_of_any_number_of_ranks() {
    let temp = TempDir::new().unwrap();
    let tokens = tokens(temp.path());
    let rows = [
        ("fp32", "moments = \"8bit\"", "f32"),
        ("bf16-remainder", "kind = \"muon\"", "f32"),
        ("fp8-delayed", "", "int8-g256"),
        ("fp16", "kind = \"lion\"", "sign"),
        // The scale of the loss grows after every second step.
        ("fp16-growing", "", "int8-g256"),
    ];
    for (policy, optimizer, gradients) in sampled(rows, 2) {
        let of = |zero| Run::new(policy, optimizer, zero, gradients);
        let whole = run(&of(0), &tokens, 1, 5);
        let mut files = Vec::new();
        for (i, (first, second)) in
            [((4, 1), (2, 1)), ((1, 0), (8, 1)), ((8, 0), (1, 0))].into_iter().enumerate()
        {
            let path = temp.path().join(format!("{i}.safetensors"));
            let output = mantissa_store::Output::owned(&path);
            let (mut trainer, others) = of(first.1).start(&tokens, first.0);
            let mut found = steps(&mut trainer, 2);
            trainer.save(&output, "settings").unwrap();
            end(trainer, others);
            files.push(std::fs::read(&path).unwrap());
            let (mut trainer, others) = of(second.1).start(&tokens, second.0);
            trainer.load(&path, "settings").unwrap();
            found.extend(steps(&mut trainer, 3));
            let name = format!("{policy} {gradients}: {first:?} then {second:?}");
            assert_eq!(found, whole.0, "{name}");
            assert!(weights(&trainer) == whole.1, "{name}");
            end(trainer, others);
        }
        assert!(files.windows(2).all(|pair| pair[0] == pair[1]), "{policy} {gradients}");
    }
}

/// The bytes that are sent are those of the formula.
#[test]
fn traffic_is_that_of_the_formula() {
    let temp = TempDir::new().unwrap();
    let tokens = tokens(temp.path());
    let n = config().parameters() as f64;
    for (ranks, zero, gradients, bits) in [
        (2, 0, "f32", 32.0),
        (4, 1, "f32", 32.0),
        (8, 1, "int8-g256", 8.125),
        (4, 0, "int4-g64+hadamard", 4.5),
    ] {
        let of = Run::new("fp32", "", zero, gradients);
        let sent = |count: usize| {
            let (mut trainer, others) = of.start(&tokens, ranks);
            steps(&mut trainer, count);
            end(trainer, others) as f64
        };
        let step = (sent(3) - sent(1)) / 2.0 / ranks as f64;
        let share = (ranks - 1) as f64 / ranks as f64;
        let own = if gradients == "f32" { 1.0 } else { (LEAVES / ranks) as f64 };
        let expected = share * n * (own * bits / 8.0 + 4.0);
        // Pieces of the norm in which a shard ends are summed by rank 0.
        let pieces = if zero == 0 { 0.0 } else { share * f64::from(1 << 18) };
        let name = format!("{ranks} {zero} {gradients}: {step} of {expected}");
        assert!(step > 0.99 * expected && step < 1.01 * expected + pieces, "{name}");
    }
}

#[test]
fn a_rank_with_other_weights_is_refused() {
    let temp = TempDir::new().unwrap();
    let tokens = tokens(temp.path());
    let mut ends = MemoryLink::ranks(2);
    let (of, end) = (Run::new("fp32", "", 0, "f32"), ends.remove(1));
    let other = of.clone();
    let follower = thread::spawn(move || {
        let (model, optimizer) = other.parts(other.seed + 1, (1, 2));
        let group = Group::new(Box::new(end), &other.parallel, &model, &optimizer)?;
        follow(model, optimizer, group)
    });
    let (model, optimizer) = of.parts(of.seed, (0, 2));
    let group = Group::new(Box::new(ends.remove(0)), &of.parallel, &model, &optimizer).unwrap();
    let batches = Batches::new(TokenFile::open(&tokens).unwrap(), LEN, 11, Cursor::default()).unwrap();
    let schedule = Schedule { peak: 3e-3, warmup_steps: 1, total_steps: 40, decay: Decay::Constant };
    let options = TrainerOptions { batch: 2, accumulate: LEAVES, schedule };
    let mut trainer = Trainer::new(model, optimizer, batches, options).unwrap();
    trainer.set_group(group).unwrap();
    let said = follower.join().unwrap().unwrap_err().to_string();
    assert!(said.starts_with("rank 1: expected the initial weights of rank 0 (SHA-256 "), "{said}");
    assert!(matches!(trainer.step(), Err(TrainError::Rank(RankError::Lost { rank: 1 }))));
}

/// A rank that dies is named to the others, who end.
#[test]
fn a_lost_rank_ends_the_run_on_the_others() {
    let of = Run::new("fp32", "", 1, "f32");
    let mut ends = MemoryLink::ranks(4);
    drop(ends.remove(2));
    let others: Vec<_> = ends
        .drain(1..)
        .map(|end| {
            let of = of.clone();
            thread::spawn(move || {
                let (model, optimizer) = of.parts(1, (end.rank(), 4));
                let group = Group::new(Box::new(end), &of.parallel, &model, &optimizer)?;
                follow(model, optimizer, group)
            })
        })
        .collect();
    let (model, optimizer) = of.parts(of.seed, (0, 4));
    let first: Box<dyn Link> = Box::new(ends.remove(0));
    let error = Group::new(first, &of.parallel, &model, &optimizer).unwrap_err();
    assert!(matches!(error, TrainError::Rank(RankError::Lost { rank: 2 })), "{error}");
    for other in others {
        let error = other.join().unwrap().unwrap_err();
        assert!(matches!(error, TrainError::Rank(RankError::Lost { rank: 0 })), "{error}");
    }
}
