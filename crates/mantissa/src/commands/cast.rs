//! `mantissa cast`: stores every float tensor of a file under one scheme and reports the error.

use std::io::{self, Write};
use std::path::PathBuf;

use anyhow::Result;
use clap::ValueEnum;
use mantissa_jobs::Job;
use mantissa_jobs::cast::{Cast, CastArguments, CastReport, CastTensor};
use mantissa_num::Scheme;
use mantissa_store::{Kind, Paths, Shown};

use super::execute::Execute;
use crate::context::Context;
use crate::help::Group;
use crate::output::{self, Align, Table, bytes, counted, number};

/// Cast every float tensor of a safetensors file to one scheme
///
/// For an input tensor `n` the output holds `n.codes`, `n.scale`, `n.zero` and `n.global` if the scheme has
/// them (`n.nested_scale` and `n.nested_offset` for double quantization, `n.bias` for the minima of :minmax),
/// `n.dequant` (F32) and, with --packed, `n.packed`; with --packed-only neither codes nor `n.dequant`. GGUF block types are written as `n.packed` and
/// `n.dequant` only. Blocks run along the last axis; other axes are folded into rows.
///
/// The signal-to-quantization-noise ratio (SQNR) is 10 log10(sum x^2 / sum (x - dequant)^2).
#[derive(clap::Args)]
#[command(after_help = "EXAMPLES
  mantissa cast weights.safetensors --scheme int4-g32 --out int4.safetensors
  mantissa cast demo-int4/model.safetensors --scheme mxfp4:rceil --packed \\
      --out mxfp4.safetensors
  mantissa cast weights.safetensors --scheme fp8-e4m3 --round stochastic \\
      --seed 7 --out fp8.safetensors --json")]
pub struct Args {
    /// Safetensors file to read
    #[arg(value_name = "IN.safetensors")]
    input: PathBuf,
    /// Scheme; see `mantissa schemes`
    ///
    /// Such as int8-channel, int4-g128-asym, fp8-e4m3-tensor, mxfp4, nvfp4 or nf4.
    #[arg(long, value_name = "SCHEME")]
    scheme: Scheme,
    /// Safetensors file to write
    #[arg(long, value_name = "OUT.safetensors")]
    out: PathBuf,
    /// Also write the packed bytes, as `n.packed`
    #[arg(long)]
    packed: bool,
    /// Write packed bytes and scales, no codes or F32 copies
    #[arg(long)]
    packed_only: bool,
    /// Rounding between two codes
    ///
    /// Stochastic rounding uses --seed.
    #[arg(long, value_enum, default_value_t = Round::Nearest)]
    round: Round,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Round {
    Nearest,
    Stochastic,
}

impl Execute for Args {
    const GROUP: Group = Group::Quantize;

    fn paths(&self, paths: &mut Paths) -> Result<()> {
        paths.read(&self.input);
        paths.write("--out", &self.out, Kind::File);
        Ok(())
    }

    fn run(&self, context: &Context) -> Result<()> {
        let arguments = CastArguments {
            input: self.input.clone(),
            scheme: self.scheme.clone(),
            out: self.out.clone(),
            packed: self.packed,
            packed_only: self.packed_only,
            stochastic: (self.round == Round::Stochastic).then_some(context.seed),
        };
        let report = Cast::resolve(arguments)?.run(context)?;
        context.report(&report, |out| print(self, &report, out))
    }
}

fn print(args: &Args, report: &CastReport, out: &mut dyn Write) -> io::Result<()> {
    table(&report.tensors).write(out)?;
    let size = std::fs::metadata(&report.output).map(|m| bytes(m.len())).unwrap_or_default();
    let seed = report.seed.map(|seed| format!(", seed {seed}")).unwrap_or_default();
    writeln!(
        out,
        "{} as {} ({}{seed}), {} skipped; wrote {}, {size}",
        counted(report.tensors.len() as u64, "tensor"),
        report.scheme,
        report.rounding,
        report.skipped.len(),
        report.output.display()
    )?;
    // The file holds more than the scheme takes, which its size alone would not tell.
    let packed = bytes(report.tensors.iter().map(|tensor| tensor.packed_bytes).sum());
    match args.packed_only {
        true => writeln!(out, "packed codes and scales: {packed}"),
        false => {
            let copies = |tensor: &CastTensor| 4 * tensor.shape.iter().map(|&n| n as u64).product::<u64>();
            let copies = bytes(report.tensors.iter().map(copies).sum());
            writeln!(
                out,
                "of that {copies} are F32 copies (.dequant), and codes take whole bytes; the scheme itself takes {packed} \
                 (--packed-only)"
            )
        }
    }
}

fn table(tensors: &[CastTensor]) -> Table {
    let mut table = Table::new([
        ("tensor", Align::Left),
        ("shape", Align::Left),
        ("SQNR dB", Align::Right),
        ("max |error|", Align::Right),
        ("bits/weight", Align::Right),
    ]);
    for t in tensors {
        table.row([
            Shown(&t.name).to_string(),
            output::shape(&t.shape),
            t.sqnr_db.map_or("exact".into(), |db| format!("{db:.2}")),
            number(Some(t.max_abs_error), 4),
            format!("{:.4}", t.bits_per_weight),
        ]);
    }
    table
}
