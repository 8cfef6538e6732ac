//! `mantissa eval`: perplexity and quality loss with standard errors.

mod args;
mod tasks;

use std::io::{self, Write};
use std::path::Path;

use anyhow::Result;
use mantissa_eval::Comparison;
use mantissa_eval::stats::with_error;
use mantissa_jobs::{EvaluateReport, Job, TextEvaluation};
use mantissa_store::Paths;

pub use self::args::Args;

use super::execute::Execute;
use super::load_preview::LoadPreview;
use crate::context::Context;
use crate::help::Group;
use crate::output::{counted, labelled};

impl Execute for Args {
    const GROUP: Group = Group::Measure;

    fn paths(&self, paths: &mut Paths) -> Result<()> {
        *paths = self.job(0).paths();
        Ok(())
    }

    /// # Errors
    /// Input that cannot be read or evaluated; [`GateFailed`](crate::error::GateFailed) if a bound is exceeded.
    fn run(&self, context: &Context) -> Result<()> {
        let job = self.job(context.seed);
        if self.dry_run {
            let needs = job.preview(context)?;
            return LoadPreview::new(self.models(), job.engine, needs, context)?.report(context);
        }
        let report = match self.workers.engage(&job, Path::new("eval"), context)? {
            None => job.run(context)?,
            Some(crew) => {
                let report = job.run_with(&crew.team, context)?;
                crew.finish(context);
                report
            }
        };
        context.report(&report, |out| match &report {
            EvaluateReport::Text(found) => human(out, found),
            EvaluateReport::Tasks(found) => tasks::human(out, found),
        })?;
        Ok(job.require(&report)?)
    }
}

fn human(out: &mut dyn Write, r: &TextEvaluation) -> io::Result<()> {
    let nll = with_error(&format!("{:.6}", r.nll), &format!("{:.6}", r.nll_se), "nats", r.windows);
    let [tokens, windows] = [(r.tokens, "token"), (r.windows as u64, "window")].map(|(n, of)| counted(n, of));
    let text = format!("{:.4}  (NLL {nll}, {tokens}, {windows})", r.ppl);
    labelled(out, "perplexity", &text)?;
    if let Some(adapter) = &r.adapter {
        labelled(out, "adapter", &adapter.display().to_string())?;
    }
    if let Some(kv) = &r.kv {
        let f16 = r.kv_f16_bytes_per_token.filter(|f16| *f16 != r.kv_bytes_per_token);
        let of = f16.map_or_else(String::new, |f16| format!(", {f16} in f16"));
        // Perplexity alone says little of a cache.
        let loss = if r.comparison.is_none() { "; its loss: --reference MODEL" } else { "" };
        labelled(out, "KV cache", &format!("{kv}: {} bytes per token{of}{loss}", r.kv_bytes_per_token))?;
    }
    if let Some(operands) = &r.attention_operands {
        labelled(out, "attention", operands)?;
    }
    if let Some(accumulator) = &r.accumulator {
        labelled(out, "accumulator", accumulator)?;
    }
    r.comparison.iter().try_for_each(|c| human_comparison(out, c, r.windows))?;
    writeln!(out, "{:.0} tok/s", r.tokens as f64 / r.seconds)
}

fn human_comparison(out: &mut dyn Write, c: &Comparison, windows: usize) -> io::Result<()> {
    let nats = |mean: String, error: f64| with_error(&mean, &format!("{error:.6}"), "nats/token", windows);
    let spread = format!("median {:.6}, p99 {:.4}, max {:.3}", c.kl_median, c.kl_p99, c.kl_max);
    labelled(out, "KL", &format!("{}  ({spread})", nats(format!("{:.6}", c.kl), c.kl_se)))?;
    let percent = |share: f64| format!("{:.2}", 100.0 * share);
    labelled(out, "top-1", &with_error(&percent(c.top1), &percent(c.top1_se), "%", windows))?;
    let loss = nats(format!("{:+.6}", c.delta_nll), c.delta_nll_se);
    labelled(out, "Δ loss", &format!("{loss}  (reference {:.6})", c.reference_nll))
}
