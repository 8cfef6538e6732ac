//! `mantissa bench`: speed of a model beside the limits of the machine.

use std::io::{self, Write};

use anyhow::Result;
use mantissa_jobs::names::AsText;
use mantissa_jobs::{Bench, BenchReport, Job};
use mantissa_model::KvPolicy;
use mantissa_store::Paths;

use super::adapter::AdapterArgs;
use super::execute::Execute;
use super::model::ModelPath;
use crate::context::Context;
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
    ///
    /// Default: 512, or as many as the model's context holds.
    #[arg(long, value_name = "N")]
    prompt: Option<usize>,
    /// Tokens to generate; 0 skips decoding
    ///
    /// Default: 128, or as many as the model's context holds.
    #[arg(long, alias = "max-tokens", value_name = "N")]
    r#gen: Option<usize>,
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

impl Args {
    /// Returns the job.
    fn job(&self, seed: u64) -> Bench {
        Bench {
            model: self.model.job_path().clone(),
            adapter: self.adapter.named().map(Into::into),
            prompt: self.prompt,
            generated: self.r#gen,
            reps: self.reps,
            depth: self.depth.clone(),
            batch: self.batch.clone(),
            kv: self.kv.iter().cloned().map(AsText).collect(),
            explain: self.explain,
            seed,
        }
    }
}

impl Execute for Args {
    const GROUP: Group = Group::Measure;

    fn paths(&self, paths: &mut Paths) -> Result<()> {
        *paths = self.job(0).paths();
        Ok(())
    }

    /// # Errors
    /// A model that cannot be run; not enough memory.
    fn run(&self, context: &Context) -> Result<()> {
        let report = self.job(context.seed).run(context)?;
        context.report(&report, |out| print(&report, out))
    }
}

fn print(report: &BenchReport, out: &mut dyn Write) -> io::Result<()> {
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
