//! `mantissa tokenizer`: trains a byte-level BPE tokenizer.

use std::path::PathBuf;

use anyhow::Result;
use mantissa_store::{Kind, Paths, Staging};
use mantissa_train::data::{DataError, TextFormat, WordCounts, is_records, learn_bpe};
use serde::Serialize;
use serde_json::json;

use super::execute::Execute;
use super::text::separator;
use crate::context::Context;
use crate::help::Group;
use crate::output::{bytes, counted};

/// Train a byte-level BPE tokenizer on texts
///
/// Writes a folder with tokenizer.json and tokenizer_config.json, which `mantissa train` and other tools
/// read. The result is deterministic. Ids 0 and 1 mark the beginning and end of a document; every byte has a
/// token, so any text can be encoded. Texts are read in pieces; memory holds the distinct words, about 60
/// times their bytes.
#[derive(clap::Args)]
#[command(after_help = "EXAMPLES
  mantissa tokenizer story.txt --vocab 300 --out tokenizer
  mantissa tokenizer stories.txt code.txt --vocab 4096 \\
      --split '<|endoftext|>' --out tokenizer")]
pub struct Args {
    /// Texts, or .jsonl files with a document per line
    #[arg(required = true)]
    files: Vec<PathBuf>,
    /// Vocabulary size
    ///
    /// Includes the 256 bytes and 2 special tokens.
    #[arg(long, value_name = "N")]
    vocab: usize,
    /// Separator between documents of a text
    #[arg(long, value_name = "SEP", value_parser = separator)]
    split: Option<String>,
    /// Field of a .jsonl line with the text
    #[arg(long, value_name = "FIELD", default_value = "text")]
    field: String,
    /// Output folder
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
}

#[derive(Serialize)]
struct Report<'a> {
    out: &'a PathBuf,
    vocab: usize,
    documents: usize,
    bytes: u64,
}

impl Execute for Args {
    const GROUP: Group = Group::Train;

    fn paths(&self, paths: &mut Paths) -> Result<()> {
        self.files.iter().for_each(|path| paths.read(path));
        paths.write("--out", &self.out, Kind::Folder);
        Ok(())
    }

    /// # Errors
    /// Texts that cannot be read or are too short for the vocabulary; I/O.
    fn run(&self, context: &Context) -> Result<()> {
        let (words, documents) = count(self, context)?;
        let total = self.files.iter().map(|path| std::fs::metadata(path).map_or(0, |file| file.len())).sum();
        let trained = learn_bpe(words, self.vocab).map_err(|error| over_memory(error, context))?;
        let mut staging = Staging::begin(&context.output(&self.out)?)?;
        staging.write("tokenizer.json", trained.tokenizer.as_bytes())?;
        staging.write("tokenizer_config.json", trained.config.as_bytes())?;
        let fields = json!({ "command": "tokenizer", "vocab": self.vocab });
        staging.commit(fields.as_object().cloned().unwrap_or_default())?;
        let report = Report { out: &self.out, vocab: self.vocab, documents, bytes: total };
        context.report(&report, |out| {
            writeln!(
                out,
                "{}: {} from {}, {}",
                self.out.display(),
                counted(report.vocab as u64, "token"),
                counted(report.documents as u64, "document"),
                bytes(report.bytes)
            )
        })
    }
}

/// Counts the words of all texts; returns them with the number of documents.
fn count(args: &Args, context: &Context) -> Result<(WordCounts, usize)> {
    let mut words = WordCounts::new(context.threads, context.memory_left());
    let mut documents = 0;
    for path in &args.files {
        let format = match is_records(path) {
            true => TextFormat::JsonLines { field: args.field.clone() },
            false => TextFormat::Text { split: args.split.clone() },
        };
        documents += words.add_file(path, &format).map_err(|error| over_memory(error, context))?;
    }
    Ok((words, documents))
}

/// Turns a memory error of the data into one of the memory ceiling.
fn over_memory(error: DataError, context: &Context) -> anyhow::Error {
    match error {
        DataError::Memory { file, needs, allowed } => {
            context.over_memory(&format!("tokenizer: {file}"), needs, allowed)
        }
        error => error.into(),
    }
}
