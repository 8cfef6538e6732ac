//! `mantissa pull`: fetches a model from the Hugging Face hub.

use std::io::{self, Write};
use std::path::PathBuf;

use anyhow::Result;
use mantissa_jobs::{Job, PullArguments, PullReport};

use super::execute::Execute;
use super::next_steps::quoted;
use crate::context::Context;
use crate::help::Group;
use crate::output::{bytes, counted, labelled};

/// Fetch a model from the Hugging Face hub
///
/// Puts it into the cache that huggingface_hub uses (HF_HUB_CACHE, HF_HOME), so that this name works in every
/// command, in transformers and in vLLM. Without --include it takes what mantissa reads: configuration, tokenizer,
/// chat template, and the weights as safetensors or, in a repository of GGUF files, the file of the tag.
///
/// Rerun the same command to resume. Each file is compared with the hub's SHA-256 (or git's id, of small files)
/// and appears only when it is complete. Private and gated models need a token in HF_TOKEN or by `hf auth login`;
/// it is sent to the hub alone. HF_ENDPOINT names another hub or a mirror, HTTPS_PROXY a proxy.
#[derive(clap::Args)]
#[command(after_help = "EXAMPLES
  mantissa pull Qwen/Qwen3-0.6B
  mantissa pull Qwen/Qwen3-0.6B-GGUF:Q8_0
  mantissa pull Qwen/Qwen3-0.6B --include '*.json' --include tokenizer.model
  mantissa pull Qwen/Qwen3-0.6B --out qwen3

`demo` is inside the program and needs no pull: mantissa run demo -p Once")]
pub struct Args {
    /// Name on the hub: org/name, or org/name:TAG (GGUF)
    ///
    /// A tag is a word in the name of the GGUF file, such as Q4_K_M. Copied addresses work too: hf.co/org/name.
    #[arg(value_name = "MODEL")]
    name: String,
    /// Branch, tag or commit [default: main]
    #[arg(long, value_name = "REVISION")]
    revision: Option<String>,
    /// Files to fetch, such as '*.json' (repeatable)
    ///
    /// Replaces the selection of what mantissa reads. * stands for any characters, / among them.
    #[arg(long, value_name = "GLOB")]
    include: Vec<String>,
    /// Put the files into this folder instead of the cache
    ///
    /// Files that are there are kept if they are the model's, and refused otherwise.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

impl Execute for Args {
    const GROUP: Group = Group::Start;

    /// # Errors
    /// A model that is not there or not open to the user; a failure of the network or disk.
    fn run(&self, context: &Context) -> Result<()> {
        let (name, revision) = (self.name.clone(), self.revision.clone());
        let arguments =
            PullArguments { name, revision, include: self.include.clone(), out: self.out.clone() };
        let report = arguments.resolve()?.run(context)?;
        context.report(&report, |out| human(out, &report))
    }
}

/// Number of files left out that are named.
const NAMED: usize = 4;

fn human(out: &mut dyn Write, report: &PullReport) -> io::Result<()> {
    let PullReport { model, path, files, fetched_bytes, seconds, .. } = report;
    let commit = report.commit.get(..12).unwrap_or_default();
    let size = format!("{}, {}", counted(files.len() as u64, "file"), bytes(report.bytes));
    let fetched = match fetched_bytes {
        0 => "nothing to fetch: all are there, in their sizes".to_owned(),
        fetched => format!("{} fetched in {seconds:.1} s, hashes checked", bytes(*fetched)),
    };
    labelled(out, "model", &format!("{model} at {commit}"))?;
    labelled(out, "files", &format!("{size}; {fetched}"))?;
    labelled(out, "path", &path.display().to_string())?;
    if !report.left_out.is_empty() {
        let mut names: Vec<&str> = report.left_out.iter().take(NAMED).map(String::as_str).collect();
        if report.left_out.len() > NAMED {
            names.push("…");
        }
        let count = report.left_out.len();
        let size = bytes(report.left_out_bytes);
        let others = format!("{count} other files ({size}: {}); --include takes them", names.join(", "));
        labelled(out, "left out", &others)?;
    }
    writeln!(out, "next        mantissa inspect {}", quoted(model.as_ref()))
}
