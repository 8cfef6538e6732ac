//! `mantissa diff`: the first token at which the greedy continuations of two models differ.

use std::io::{self, Write};
use std::path::PathBuf;

use anyhow::Result;
use mantissa_eval::TokenCandidate;
use mantissa_jobs::{ComparedPrompt, ContinuedText, Diff, DiffPrompts, DiffReport, Job, NextToken, Parting};
use mantissa_store::Paths;

use super::execute::Execute;
use super::model::ModelPath;
use super::text::BosArg;
use crate::columns::side_by_side;
use crate::context::Context;
use crate::help::Group;
use crate::output::{Align, Table, counted, number};

/// Show the first token at which two models part
///
/// Both models continue the prompt greedily. The report has the number of equal tokens, the KL divergence
/// KL(A || B) at the first difference, the most probable tokens of each model there, and both texts. A and B
/// need the same tokenizer.
#[derive(clap::Args)]
#[command(after_help = "EXAMPLES
  mantissa diff demo demo-int4 -p 'Once upon a time'
  mantissa diff demo demo-int4 -p 'Once upon a time' -n 64 --json
  mantissa diff path/to/model path/to/model-q4_k_m.gguf --chat \\
      -p 'Why is the sky blue?'
  mantissa diff path/to/model path/to/quantized --prompts prompts.txt")]
pub struct Args {
    /// Model, such as the unquantized one
    ///
    /// Hugging Face folder, .gguf file, or demo (the model inside the binary).
    a: ModelPath,
    /// Second model
    b: ModelPath,
    /// Prompt
    #[arg(short, long, value_name = "TEXT", required_unless_present = "prompts", help_heading = "Prompt")]
    prompt: Option<String>,
    /// Text file with one prompt per line
    ///
    /// Empty lines are skipped.
    #[arg(long, value_name = "FILE", conflicts_with = "prompt", help_heading = "Prompt")]
    prompts: Option<PathBuf>,
    /// Maximum number of new tokens
    #[arg(short = 'n', long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..))]
    tokens: u32,
    /// Number of most probable tokens to show
    #[arg(long, value_name = "K", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    top: u32,
    /// Use the prompt as a chat message of the user
    ///
    /// A's chat template renders it.
    #[arg(long, conflicts_with = "bos", help_heading = "Prompt")]
    chat: bool,
    /// System message before the prompt
    #[arg(long, value_name = "TEXT", requires = "chat", help_heading = "Prompt")]
    system: Option<String>,
    /// BOS before the prompt; auto follows the tokenizer
    #[arg(long, value_enum, default_value_t = BosArg::Auto, help_heading = "Prompt", hide_short_help = true)]
    bos: BosArg,
}

impl Args {
    /// Returns the job.
    fn job(&self) -> Diff {
        let prompts = match (&self.prompts, &self.prompt) {
            (Some(file), _) => DiffPrompts::File(file.clone()),
            (None, prompt) => DiffPrompts::Text(prompt.clone().unwrap_or_default()),
        };
        Diff {
            a: self.a.job_path().clone(),
            b: self.b.job_path().clone(),
            prompts,
            tokens: self.tokens,
            top: self.top,
            chat: self.chat,
            system: self.system.clone(),
            bos: self.bos.into(),
        }
    }
}

impl Execute for Args {
    const GROUP: Group = Group::Measure;

    fn paths(&self, paths: &mut Paths) -> Result<()> {
        *paths = self.job().paths();
        Ok(())
    }

    /// # Errors
    /// Models that cannot be run or have different tokenizers; prompts that cannot be read.
    fn run(&self, context: &Context) -> Result<()> {
        let report = self.job().run(context)?;
        context.report(&report, |out| human(out, &report))
    }
}

/// Returns the text after the equal tokens, or why there is none.
fn own(side: &ContinuedText) -> &str {
    let own = side.own_text.trim_start();
    if own.is_empty() { "(end of the text)" } else { own }
}

/// Width of the two texts side by side.
const WIDTH: usize = 80;

fn human(out: &mut dyn Write, report: &DiffReport) -> io::Result<()> {
    for (i, prompt) in report.prompts.iter().enumerate() {
        if i > 0 {
            writeln!(out)?;
        }
        human_prompt(out, report, prompt)?;
    }
    if report.prompts.len() > 1 {
        writeln!(out)?;
        summary(out, &report.prompts)?;
    }
    Ok(())
}

fn human_prompt(out: &mut dyn Write, report: &DiffReport, c: &ComparedPrompt) -> io::Result<()> {
    writeln!(out, "prompt  {}", quoted(&c.prompt))?;
    writeln!(out, "equal   {}: {}", counted(c.equal_tokens as u64, "token"), quoted(&c.equal_text))?;
    let Some(parting) = &c.difference else {
        return writeln!(
            out,
            "No difference; KL(A || B) mean {} nats/token; both stopped: {}",
            number(Some(c.kl_mean), 3),
            c.a.stopped
        );
    };
    writeln!(
        out,
        "token {} differs; KL(A || B) {} nats there, mean up to it {}\n",
        parting.position + 1,
        number(Some(parting.kl), 3),
        number(Some(c.kl_mean), 3)
    )?;
    candidates(out, parting)?;
    writeln!(out)?;
    let heads = [format!("A: {}", report.a.display()), format!("B: {}", report.b.display())];
    side_by_side(out, WIDTH, [&heads[0], &heads[1]])?;
    side_by_side(out, WIDTH, [own(&c.a), own(&c.b)])
}

/// Prints the most probable tokens of both models beside each other.
fn candidates(out: &mut dyn Write, parting: &Parting) -> io::Result<()> {
    let mut table = Table::new([
        ("A's tokens", Align::Left),
        ("p(A)", Align::Right),
        ("p(B)", Align::Right),
        ("B's tokens", Align::Left),
        ("p(B)", Align::Right),
        ("p(A)", Align::Right),
    ]);
    let cells = |choice: &NextToken| {
        let TokenCandidate { p, p_other, .. } = choice.candidate;
        [clipped(&quoted(&choice.text), 22), format!("{p:.4}"), format!("{p_other:.4}")]
    };
    for (a, b) in parting.a.iter().zip(&parting.b) {
        table.row(cells(a).into_iter().chain(cells(b)));
    }
    table.write(out)
}

/// Prints a line for each prompt.
fn summary(out: &mut dyn Write, prompts: &[ComparedPrompt]) -> io::Result<()> {
    let mut table = Table::new([
        ("prompt", Align::Left),
        ("equal tokens", Align::Right),
        ("KL there", Align::Right),
        ("KL mean", Align::Right),
    ]);
    for c in prompts {
        let there = c.difference.as_ref().map_or("-".to_owned(), |at| number(Some(at.kl), 3));
        table.row([clipped(&c.prompt, 40), c.equal_tokens.to_string(), there, number(Some(c.kl_mean), 3)]);
    }
    table.write(out)?;
    let differing = prompts.iter().filter(|c| c.difference.is_some()).count();
    writeln!(out, "{differing} of {} prompts differ", prompts.len())
}

/// Returns `text` in quotes, with control characters escaped.
fn quoted(text: &str) -> String {
    format!("{text:?}")
}

/// Cuts `text` to `most` characters.
fn clipped(text: &str, most: usize) -> String {
    if text.chars().count() <= most {
        return text.to_owned();
    }
    text.chars().take(most.saturating_sub(1)).chain(['…']).collect()
}
