//! Speed of a model beside the limits of the machine.

use std::path::PathBuf;
use std::time::Instant;

use mantissa_kernels::packed::PackedLevel;
use mantissa_model::KvPolicy;
use mantissa_runtime::measure::{self, Limits, Probe, Times, Workload};
use mantissa_runtime::prepared::KernelChoice;
use mantissa_runtime::{FastModel, RuntimeOptions};
use mantissa_store::AdapterFiles;
use serde::{Deserialize, Serialize};

use crate::adapter;
use crate::error::{BadInput, Result};
use crate::host::Host;
use crate::job::{Job, JobOutput};
use crate::loaded::ModelUse;
use crate::model::{ModelPath, context_length, open, open_quietly};
use crate::names::AsText;
use crate::progress::Unit;

/// Tokens of the prompt if none are asked for.
pub const PROMPT: usize = 512;
/// Tokens to generate if none are asked for.
pub const GENERATED: usize = 128;

/// Tokens of a measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Tokens {
    prompt: usize,
    generated: usize,
}

/// Measures prefill and decode speed in turns with the limits of the machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bench {
    /// Model to measure.
    pub model: ModelPath,
    /// Folder of an adapter that is not merged.
    pub adapter: Option<PathBuf>,
    /// Tokens of the prompt; 0 skips the prefill. `None` for `PROMPT`, or as many as the context holds.
    pub prompt: Option<usize>,
    /// Tokens to generate; 0 skips decoding. `None` for `GENERATED`, or as many as the context holds.
    pub generated: Option<usize>,
    /// Repetitions, of which the median counts.
    pub reps: usize,
    /// Tokens cached before decoding, each measured.
    pub depth: Vec<usize>,
    /// Sequences that decode at once, each measured.
    pub batch: Vec<usize>,
    /// Policies of the KV cache, each measured; empty for the model's own.
    pub kv: Vec<AsText<KvPolicy>>,
    /// True to list the kernel of every linear layer.
    pub explain: bool,
    /// Seed of all random numbers.
    pub seed: u64,
}

/// Result of a measurement.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct BenchReport {
    /// Model as named.
    pub model: PathBuf,
    /// Folder of the adapter.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub adapter: Option<PathBuf>,
    /// Number of threads.
    pub threads: usize,
    /// Instruction-set level of the matmuls.
    pub level: &'static str,
    /// Seconds to load the model.
    pub load_s: f64,
    /// Seconds from the start of loading to the first token of a short prompt.
    pub load_to_first_token_s: f64,
    /// Tokens of the prompt.
    pub prompt: usize,
    /// Generated tokens.
    pub generated: usize,
    /// First depth and batch.
    #[serde(flatten)]
    pub first: BenchRun,
    /// Read bandwidth of the machine.
    pub machine_read_gb_per_s: f64,
    /// Peak of int8 products.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub machine_int8_gops: Option<f64>,
    /// Peak of bf16 products.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub machine_bf16_gflops: Option<f64>,
    /// Peak of f32 products.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub machine_f32_gflops: Option<f64>,
    /// All depths and batches.
    pub runs: Vec<BenchRun>,
    /// Kernels of the linear layers, if asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kernels: Option<Vec<KernelRow>>,
}

/// Medians of one depth and batch.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct BenchRun {
    /// Tokens cached before decoding.
    pub depth: usize,
    /// Sequences that decode at once.
    pub batch: usize,
    /// Policy of the KV cache, if it was given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv: Option<String>,
    /// Prompt tokens per second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pp_tokens_per_s: Option<f64>,
    /// Share of the peak of the product instruction.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pp_share_of_peak: Option<f64>,
    /// Generated tokens per second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tg_tokens_per_s: Option<f64>,
    /// Bytes of weights, keys and values that the steps read, per second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub read_gb_per_s: Option<f64>,
    /// Share of the read bandwidth.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tg_share_of_bandwidth: Option<f64>,
    /// Lowest and highest prompt rate of the repetitions.
    pub pp_range: Option<[f64; 2]>,
    /// Lowest and highest generation rate of the repetitions.
    pub tg_range: Option<[f64; 2]>,
}

/// Kernels of a linear layer.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct KernelRow {
    /// Module.
    pub module: String,
    /// Scheme of the weight.
    pub format: String,
    /// Kernel of decode steps.
    pub kernel: String,
    /// Kernel of prefill.
    pub prefill: String,
    /// Bytes of the prepared weight.
    pub bytes: u64,
    /// Reason why the layer has no kernel of its own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fallback: Option<String>,
}

impl From<KernelChoice> for KernelRow {
    fn from(choice: KernelChoice) -> Self {
        let KernelChoice { module, format, kernel, prefill, bytes, reason } = choice;
        KernelRow { module, format, kernel, prefill, bytes, fallback: reason }
    }
}

impl Bench {
    /// Depth of the longest sequence.
    fn deepest(&self) -> usize {
        self.depth.iter().max().copied().unwrap_or(0)
    }

    /// Returns the measurement without the depths that a context does not hold, and a note on those, if it holds others.
    fn within(&self, context: usize) -> (Self, Option<String>) {
        let room = usize::from(self.generated != Some(0));
        let (held, deeper): (Vec<usize>, Vec<usize>) =
            self.depth.iter().partition(|depth| depth.saturating_add(2 * room) <= context);
        if held.is_empty() || deeper.is_empty() {
            return (self.clone(), None);
        }
        let left_out: Vec<_> = deeper.iter().map(usize::to_string).collect();
        let note = format!(
            "--depth {} is left out: the model has a context of {context} tokens",
            left_out.join(", ")
        );
        (Bench { depth: held, ..self.clone() }, Some(note))
    }

    /// Returns the tokens to measure in a context of `context` tokens: as asked for, else shortened to it.
    ///
    /// # Errors
    /// The context does not hold what is asked for.
    fn tokens(&self, context: usize) -> Result<Tokens> {
        // One more token follows the prompt, and two the cached ones.
        let most = Tokens {
            prompt: context.saturating_sub(1),
            generated: context.saturating_sub(self.deepest().saturating_add(2)),
        };
        let fit = |flag: &str, asked: Option<usize>, usual: usize, most: usize| match asked {
            Some(asked) if asked > most => {
                let allowed = format!("at most {most} in the model's context of {context}");
                Err(BadInput::new(flag, asked.to_string(), allowed).with_fix(format!("{flag} {most}")))
            }
            Some(asked) => Ok(asked),
            None => Ok(usual.min(most)),
        };
        if self.deepest().saturating_add(2) > context && self.generated != Some(0) {
            let most = context.saturating_sub(GENERATED + 2);
            let allowed =
                format!("at most {} in the model's context of {context}", context.saturating_sub(2));
            let error = BadInput::new("--depth", self.deepest().to_string(), allowed);
            return Err(error.with_fix(format!("--depth {most}")).into());
        }
        Ok(Tokens {
            prompt: fit("--prompt", self.prompt, PROMPT, most.prompt)?,
            generated: fit("--gen", self.generated, GENERATED, most.generated)?,
        })
    }

    /// Returns a note on each default that the context shortens.
    fn shortened(&self, tokens: Tokens, context: usize) -> Vec<String> {
        let defaults = [
            ("--prompt", self.prompt, tokens.prompt, PROMPT),
            ("--gen", self.generated, tokens.generated, GENERATED),
        ];
        let shortened =
            defaults.into_iter().filter(|(_, asked, used, usual)| asked.is_none() && used < usual);
        let note = |(flag, _, used, usual): (&str, Option<usize>, usize, usize)| {
            format!("{flag} {used}, not {usual}: the model has a context of {context} tokens")
        };
        shortened.map(note).collect()
    }

    fn usage<'a>(&self, tokens: Tokens, adapter: Option<&'a AdapterFiles>) -> ModelUse<'a> {
        let longest = (tokens.prompt + 1).max(self.deepest() + tokens.generated + 2);
        ModelUse {
            pass: RuntimeOptions::single(longest).step_tokens,
            longest,
            threads: self.batch.iter().max().copied().unwrap_or(1),
            cached: true,
            logits: 1,
            adapter,
            ..ModelUse::default()
        }
    }

    /// Measures every policy, depth and batch; returns the runs and the limits of the machine.
    fn measure(&self, tokens: Tokens, model: &mut FastModel, host: &Host) -> Result<(Vec<BenchRun>, Limits)> {
        let probe = Probe::new(host.threads)?;
        let mut limits = vec![probe.run()];
        let mut runs: Vec<BenchRun> = Vec::new();
        let policies: Vec<_> =
            if self.kv.is_empty() { vec![None] } else { self.kv.iter().map(Some).collect() };
        let reps = self.reps.max(1);
        let all = policies.len() * self.depth.len() * self.batch.len() * reps;
        let progress = host.progress(all as u64, Unit::Items("repetitions"));
        for policy in policies {
            if let Some(policy) = policy {
                model.set_kv(policy)?;
            }
            for (&depth, &batch) in
                self.depth.iter().flat_map(|depth| self.batch.iter().map(move |batch| (depth, batch)))
            {
                // A prompt takes as long at every depth and batch of decoding.
                let prompt = if runs.is_empty() { tokens.prompt } else { 0 };
                let work = Workload { prompt, generated: tokens.generated, depth, batch };
                let mut times = Vec::new();
                progress.message(format!("depth {depth}, batch {batch}"));
                for rep in 0..reps {
                    times.push(measure::run(model, work, self.seed + rep as u64)?);
                    limits.push(probe.run());
                    progress.add(1);
                }
                let kv = policy.map(|policy| policy.to_string());
                runs.push(BenchRun { kv, ..measured(model, work, &times, &best(&limits)) });
            }
        }
        progress.finish();
        Ok((runs, best(&limits)))
    }
}

impl Job for Bench {
    const NAME: &'static str = "bench";
    const VERSION: u32 = 1;
    type Report = BenchReport;

    fn inputs(&self) -> Vec<PathBuf> {
        self.model.inputs().into_iter().chain(self.adapter.clone()).collect()
    }

    fn outputs(&self) -> Vec<JobOutput> {
        Vec::new()
    }

    fn memory(&self, _: &Host) -> Result<u64> {
        let (files, adapter) = (open_quietly(&self.model)?, adapter::open(self.adapter.as_deref())?);
        let context = context_length(&files)?;
        let (held, _) = self.within(context);
        Ok(held.usage(held.tokens(context)?, adapter.as_ref()).needed(&[&files])?.1)
    }

    /// # Errors
    /// A model that cannot be run; not enough memory.
    fn run(&self, host: &Host) -> Result<BenchReport> {
        let start = Instant::now();
        let files = open(&self.model, host)?;
        let adapter = adapter::open(self.adapter.as_deref())?;
        let context = context_length(&files)?;
        let (held, left_out) = self.within(context);
        let tokens = held.tokens(context)?;
        let notes = left_out.into_iter().chain(held.shortened(tokens, context));
        notes.for_each(|note| host.note(&note));
        held.usage(tokens, adapter.as_ref()).require(&[&files], host)?;
        let mut model = adapter::fast(&files, adapter.as_ref(), host.threads)?;
        drop(adapter);
        let load_s = start.elapsed().as_secs_f64();
        let short = Workload { prompt: 16.min(context.saturating_sub(1)), generated: 0, depth: 0, batch: 1 };
        measure::run(&model, short, self.seed)?;
        let load_to_first_token_s = start.elapsed().as_secs_f64();
        let (runs, limits) = held.measure(tokens, &mut model, host)?;
        let giga = |rate: f64| rate / 1e9;
        let Some(first) = runs.first().cloned() else {
            return Err(BadInput::new("--depth, --batch", "none", "at least one number").into());
        };
        Ok(BenchReport {
            model: self.model.named().to_owned(),
            adapter: self.adapter.clone(),
            threads: host.threads,
            level: PackedLevel::best().name(),
            load_s,
            load_to_first_token_s,
            prompt: tokens.prompt,
            generated: tokens.generated,
            first,
            machine_read_gb_per_s: giga(limits.read),
            machine_int8_gops: limits.int8.map(giga),
            machine_bf16_gflops: limits.bf16.map(giga),
            machine_f32_gflops: limits.f32.map(giga),
            runs,
            kernels: self.explain.then(|| model.linears().map(|linear| linear.choice().into()).collect()),
        })
    }
}

/// Highest limits of all measurements: what the machine can do.
fn best(limits: &[Limits]) -> Limits {
    let most = |of: fn(&Limits) -> Option<f64>| limits.iter().filter_map(of).reduce(f64::max);
    Limits {
        read: most(|limits| Some(limits.read)).unwrap_or(0.0),
        int8: most(|limits| limits.int8),
        bf16: most(|limits| limits.bf16),
        f32: most(|limits| limits.f32),
    }
}

fn measured(model: &FastModel, work: Workload, times: &[Times], limits: &Limits) -> BenchRun {
    let rates = |rate: &dyn Fn(&Times) -> f64| {
        let mut rates: Vec<f64> = times.iter().map(rate).collect();
        rates.sort_by(f64::total_cmp);
        (rates[rates.len() / 2], [rates[0], rates[rates.len() - 1]])
    };
    let prefill = (work.prompt > 0).then(|| rates(&|times| work.prompt as f64 / times.prefill));
    let decode = (work.generated > 0).then(|| rates(&|times| times.decoded as f64 / times.decode));
    // A step reads the weights once for all sequences, and the cache of each.
    let steps = |rate: f64| rate / work.batch as f64;
    let cached = (work.depth as f64 + work.generated as f64 / 2.0) * model.kv_bytes_per_token();
    let read = |rate: f64| steps(rate) * measure::weight_bytes(model) as f64 + rate * cached;
    let peak =
        match model.linears().filter(|linear| linear.is_integer()).count() * 2 > model.linears().count() {
            true => limits.int8,
            false => limits.bf16.or(limits.f32),
        };
    let operations = measure::operations(model, work.prompt) / work.prompt.max(1) as f64;
    BenchRun {
        depth: work.depth,
        batch: work.batch,
        kv: None,
        pp_tokens_per_s: prefill.map(|(rate, _)| rate),
        pp_share_of_peak: prefill.zip(peak).map(|((rate, _), peak)| rate * operations / peak),
        tg_tokens_per_s: decode.map(|(rate, _)| rate),
        read_gb_per_s: decode.map(|(rate, _)| read(rate) / 1e9),
        tg_share_of_bandwidth: decode.map(|(rate, _)| read(rate) / limits.read),
        pp_range: prefill.map(|(_, range)| range),
        tg_range: decode.map(|(_, range)| range),
    }
}
