//! `mantissa bench`: speed of a model beside the limits of the machine.

use std::io::{self, Write};
use std::path::Path;
use std::time::Instant;

use anyhow::Result;
use mantissa_kernels::packed::PackedLevel;
use mantissa_model::KvPolicy;
use mantissa_runtime::measure::{self, Limits, Probe, Times, Workload};
use mantissa_runtime::prepared::KernelChoice;
use mantissa_runtime::{FastModel, RuntimeOptions};
use mantissa_store::Paths;
use serde::Serialize;

use super::adapter::{self, AdapterArgs};
use super::execute::Execute;
use super::loaded_models::{self, Use};
use super::model::{self, ModelPath};
use crate::context::Context;
use crate::error::BadInput;
use crate::help::Group;
use crate::output::{Align, Table, paragraph};

/// Measure prefill and decode speed beside this machine's limits
///
/// Limits are measured in turns with the model: the read bandwidth (a decode step reads every weight once) and
/// the peak of the product instruction that the prefill uses. Values are medians of --reps repetitions.
#[derive(clap::Args)]
#[command(after_help = "EXAMPLES
  mantissa bench demo --prompt 64 --gen 32
  mantissa bench path/to/model.gguf --threads 2
  mantissa bench path/to/model.gguf --depth 0,4096,8192 --gen 32
  mantissa bench path/to/model.gguf --batch 1,4,16
  mantissa bench path/to/model.gguf --depth 4096 --kv f16 --kv int8 --kv int4
  mantissa bench path/to/model.gguf --explain")]
pub struct Args {
    /// Model folder, .gguf file, or demo
    model: ModelPath,
    /// Tokens of the prompt; 0 skips the prefill
    #[arg(long, value_name = "N", default_value_t = 512)]
    prompt: usize,
    /// Tokens to generate; 0 skips decoding
    #[arg(long, value_name = "N", default_value_t = 128)]
    r#gen: usize,
    /// Repetitions
    #[arg(long, value_name = "N", default_value_t = 3)]
    reps: usize,
    /// Tokens cached before decoding, such as 0,4096
    ///
    /// Several are measured one after another.
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_value = "0")]
    depth: Vec<usize>,
    /// Sequences that decode at once, such as 1,4
    ///
    /// Several are measured one after another.
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_value = "1")]
    batch: Vec<usize>,
    /// Storage of the KV cache, such as int8; repeatable
    ///
    /// As --kv of run; default: the checkpoint's, else f16. Several are measured one after another.
    #[arg(long, value_name = "SCHEME")]
    kv: Vec<KvPolicy>,
    #[command(flatten)]
    adapter: AdapterArgs,
    /// List the kernel of every linear layer
    ///
    /// With the reason where a layer has no kernel of its own.
    #[arg(long)]
    explain: bool,
}

#[derive(Serialize)]
struct Report<'a> {
    model: &'a Path,
    #[serde(skip_serializing_if = "Option::is_none")]
    adapter: Option<&'a Path>,
    threads: usize,
    /// Instruction-set level of the products.
    level: &'static str,
    load_s: f64,
    /// From the start of loading to the first token of a short prompt.
    load_to_first_token_s: f64,
    prompt: usize,
    generated: usize,
    #[serde(flatten)]
    first: Measured,
    machine_read_gb_per_s: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    machine_int8_gops: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    machine_bf16_gflops: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    machine_f32_gflops: Option<f64>,
    /// All depths and batches.
    runs: Vec<Measured>,
    #[serde(skip_serializing_if = "Option::is_none")]
    kernels: Option<Vec<KernelRow>>,
}

/// Medians of one depth and batch.
#[derive(Clone, Serialize)]
struct Measured {
    depth: usize,
    batch: usize,
    /// Policy of the KV cache, if it was given.
    #[serde(skip_serializing_if = "Option::is_none")]
    kv: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pp_tokens_per_s: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pp_share_of_peak: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tg_tokens_per_s: Option<f64>,
    /// Bytes of weights, keys and values that the steps read, per second.
    #[serde(skip_serializing_if = "Option::is_none")]
    read_gb_per_s: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tg_share_of_bandwidth: Option<f64>,
    /// Lowest and highest rate of the repetitions.
    pp_range: Option<[f64; 2]>,
    tg_range: Option<[f64; 2]>,
}

#[derive(Serialize)]
struct KernelRow {
    module: String,
    format: String,
    kernel: String,
    prefill: String,
    bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    fallback: Option<String>,
}

impl From<KernelChoice> for KernelRow {
    fn from(choice: KernelChoice) -> Self {
        let KernelChoice { module, format, kernel, prefill, bytes, reason } = choice;
        KernelRow { module, format, kernel, prefill, bytes, fallback: reason }
    }
}

impl Execute for Args {
    const GROUP: Group = Group::Measure;

    fn paths(&self, paths: &mut Paths) -> Result<()> {
        self.model.paths(paths);
        self.adapter.paths(paths);
        Ok(())
    }

    /// # Errors
    /// A model that cannot be run; not enough memory.
    fn run(&self, context: &Context) -> Result<()> {
        let start = Instant::now();
        let files = model::open(&self.model, context)?;
        let adapter = self.adapter.open()?;
        let deepest = self.depth.iter().max().copied().unwrap_or(0);
        let longest = (self.prompt + 1).max(deepest + self.r#gen + 2);
        let used = Use {
            pass: RuntimeOptions::single(longest).step_tokens,
            longest,
            threads: self.batch.iter().max().copied().unwrap_or(1),
            cached: true,
            logits: 1,
            kv: None,
            calibration: None,
            adapter: adapter.as_ref(),
        };
        loaded_models::require(std::slice::from_ref(&files), used, context)?;
        let mut model = adapter::fast(&files, adapter.as_ref(), context.threads)?;
        drop(adapter);
        let load_s = start.elapsed().as_secs_f64();
        let short = Workload { prompt: 16, generated: 0, depth: 0, batch: 1 };
        measure::run(&model, short, context.seed)?;
        let load_to_first_token_s = start.elapsed().as_secs_f64();
        let probe = Probe::new(context.threads)?;
        let mut limits = vec![probe.run()];
        let mut runs: Vec<Measured> = Vec::new();
        let policies: Vec<_> =
            if self.kv.is_empty() { vec![None] } else { self.kv.iter().map(Some).collect() };
        for policy in policies {
            if let Some(policy) = policy {
                model.set_kv(policy)?;
            }
            for (&depth, &batch) in
                self.depth.iter().flat_map(|depth| self.batch.iter().map(move |batch| (depth, batch)))
            {
                // A prompt takes as long at every depth and batch of decoding.
                let prompt = if runs.is_empty() { self.prompt } else { 0 };
                let work = Workload { prompt, generated: self.r#gen, depth, batch };
                let mut times = Vec::new();
                for rep in 0..self.reps.max(1) {
                    times.push(measure::run(&model, work, context.seed + rep as u64)?);
                    limits.push(probe.run());
                }
                let kv = policy.map(KvPolicy::to_string);
                runs.push(Measured { kv, ..measured(&model, work, &times, &best(&limits)) });
            }
        }
        let limits = best(&limits);
        let giga = |rate: f64| rate / 1e9;
        let Some(first) = runs.first().cloned() else {
            return Err(BadInput::new("--depth, --batch", "none", "at least one number").into());
        };
        let report = Report {
            model: self.model.named(),
            adapter: self.adapter.named(),
            threads: context.threads,
            level: PackedLevel::best().name(),
            load_s,
            load_to_first_token_s,
            prompt: self.prompt,
            generated: self.r#gen,
            first,
            machine_read_gb_per_s: giga(limits.read),
            machine_int8_gops: limits.int8.map(giga),
            machine_bf16_gflops: limits.bf16.map(giga),
            machine_f32_gflops: limits.f32.map(giga),
            runs,
            kernels: self.explain.then(|| model.linears().map(|linear| linear.choice().into()).collect()),
        };
        context.report(&report, |out| print(&report, out))
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

fn measured(model: &FastModel, work: Workload, times: &[Times], limits: &Limits) -> Measured {
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
    Measured {
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

fn print(report: &Report<'_>, out: &mut dyn Write) -> io::Result<()> {
    let right = Align::Right;
    let mut table = Table::new([
        ("KV cache", Align::Left),
        ("depth", right),
        ("batch", right),
        ("prefill tok/s", right),
        ("of peak", right),
        ("decode tok/s", right),
        ("read GB/s", right),
        ("of bandwidth", right),
    ]);
    let rate = |value: Option<f64>| value.map_or_else(|| "-".into(), |value| format!("{value:.1}"));
    let share =
        |value: Option<f64>| value.map_or_else(|| "-".into(), |value| format!("{:.0} %", 100.0 * value));
    for run in &report.runs {
        table.row([
            run.kv.clone().unwrap_or_else(|| "default".into()),
            run.depth.to_string(),
            run.batch.to_string(),
            rate(run.pp_tokens_per_s),
            share(run.pp_share_of_peak),
            rate(run.tg_tokens_per_s),
            rate(run.read_gb_per_s),
            share(run.tg_share_of_bandwidth),
        ]);
    }
    table.write(out)?;
    let gops = |name: &str, value: Option<f64>| value.map(|value| format!("{name} {value:.0} Gop/s"));
    let peaks = [
        gops("int8", report.machine_int8_gops),
        gops("bf16", report.machine_bf16_gflops),
        gops("f32", report.machine_f32_gflops),
    ];
    let peaks = peaks.into_iter().flatten().collect::<Vec<_>>().join(", ");
    let threads = if report.threads == 1 { "thread" } else { "threads" };
    let text = format!(
        "This machine, {} {threads}, measured in the same run: reads {:.1} GB/s; peaks {peaks}. Kernels: {}. Loaded in {:.2} s, \
         first token after {:.2} s.",
        report.threads,
        report.machine_read_gb_per_s,
        report.level,
        report.load_s,
        report.load_to_first_token_s
    );
    paragraph(out, 0, &text)?;
    if let Some(kernels) = &report.kernels {
        let mut table = Table::new([
            ("module", Align::Left),
            ("format", Align::Left),
            ("decode", Align::Left),
            ("prefill", Align::Left),
            ("fallback", Align::Left),
        ]);
        for row in kernels {
            let fallback = row.fallback.clone().unwrap_or_default();
            table.row([
                row.module.clone(),
                row.format.clone(),
                row.kernel.clone(),
                row.prefill.clone(),
                fallback,
            ]);
        }
        writeln!(out)?;
        table.write(out)?;
    }
    Ok(())
}
