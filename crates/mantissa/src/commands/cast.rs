//! `mantissa cast`: stores every float tensor of a file under one scheme and reports the error.
//!
//! Tensors are read, quantized and written in panels, so memory does not grow with the file size.

mod panels;

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::PathBuf;

use anyhow::Result;
use clap::ValueEnum;
use mantissa_num::{Format, Rounding, Scheme, Source};
use mantissa_store::Shown;
use mantissa_store::convention::native;
use mantissa_store::{
    Dtype, Kind, Paths, SafeTensors, SafetensorsWriter, StagedFile, TensorMeta, TensorSpec,
};
use serde::Serialize;

use self::panels::{Caster, Cost};
use super::execute::Execute;
use crate::context::Context;
use crate::error::BadInput;
use crate::help::Group;
use crate::output::{self, Align, Table, bytes, number};
use crate::progress::Unit;
use crate::tensors::FloatTensor;

/// Cast every float tensor of a safetensors file to one scheme
///
/// For an input tensor `n` the output holds `n.codes`, `n.scale`, `n.zero` and `n.global` if the scheme has
/// them (`n.nested_scale` and `n.nested_offset` for double quantization, `n.bias` for the minima of :minmax),
/// `n.dequant` (F32) and, with --packed, `n.packed`. GGUF block types are written as `n.packed` and
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

#[derive(Serialize)]
struct Report {
    input: PathBuf,
    output: PathBuf,
    scheme: String,
    rounding: &'static str,
    seed: Option<u64>,
    tensors: Vec<TensorReport>,
    skipped: Vec<Skipped>,
}

#[derive(Serialize)]
struct TensorReport {
    name: String,
    shape: Vec<usize>,
    /// `None` if error or signal is zero.
    sqnr_db: Option<f64>,
    max_abs_error: f64,
    bits_per_weight: f64,
    /// Elements excluded from the figures because their value or decoded code is not finite.
    non_finite: u64,
}

#[derive(Serialize)]
struct Skipped {
    name: String,
    dtype: &'static str,
}

impl Execute for Args {
    const GROUP: Group = Group::Quantize;

    fn paths(&self, paths: &mut Paths) -> Result<()> {
        paths.read(&self.input);
        paths.write("--out", &self.out, Kind::File);
        Ok(())
    }

    fn run(&self, context: &Context) -> Result<()> {
        let scheme = scheme_of(self, context.seed)?;
        let input = SafeTensors::open(&self.input)?;
        let (tensors, skipped) = split(&input, context)?;
        let casters: Vec<Caster<'_>> = tensors
            .into_iter()
            .map(|tensor| Caster::new(&scheme, tensor, self.packed))
            .collect::<Result<_>>()?;
        let needs = casters.iter().map(|caster| caster.memory(context.threads)).max().unwrap_or(0);
        context.require_memory("cast", needs)?;

        let specs = casters.iter().flat_map(|caster| specs(&scheme, caster)).collect();
        let staged = StagedFile::begin(&context.output(&self.out)?)?;
        let mut writer = SafetensorsWriter::create(staged.path(), specs, metadata(&scheme))?;
        let tensors = cast_all(&casters, &mut writer, context)?;
        writer.finish()?;
        staged.commit()?;

        let report = Report {
            input: self.input.clone(),
            output: self.out.clone(),
            scheme: scheme.to_string(),
            rounding: rounding_name(&scheme),
            seed: seed_of(&scheme),
            tensors,
            skipped,
        };
        context.report(&report, |out| print(&report, out))
    }
}

/// Combines scheme and rounding, if they are compatible.
fn scheme_of(args: &Args, seed: u64) -> Result<Scheme> {
    let mut scheme = args.scheme.clone();
    if scheme.source != Source::Dynamic {
        let found = format!("\"{scheme}\"");
        return Err(BadInput::new("--scheme", found, "@dynamic: scales are computed from the tensors").into());
    }
    if args.round == Round::Stochastic {
        if matches!(scheme.format, Format::Table(_) | Format::Codec(_)) {
            let found = format!("stochastic with {scheme}");
            return Err(BadInput::new("--round", found, "nearest for codebooks and block types").into());
        }
        scheme.encoder.rounding = Rounding::Stochastic { seed };
    }
    Ok(scheme)
}

/// Returns the float tensors of the file and, with a warning each, the others.
fn split<'a>(input: &'a SafeTensors, context: &Context) -> Result<(Vec<FloatTensor<'a>>, Vec<Skipped>)> {
    let mut tensors = Vec::new();
    let mut skipped = Vec::new();
    for meta in input.tensors() {
        match FloatTensor::new(input, meta) {
            Some(tensor) => tensors.push(tensor),
            None => skipped.push(Skipped { name: meta.name.clone(), dtype: meta.dtype.name() }),
        }
    }
    if tensors.is_empty() {
        let what = format!("{}: tensors", input.path().display());
        return Err(
            BadInput::new(what, "no float tensor", "at least one of F64, F32, F16, BF16 or FP8").into()
        );
    }
    let name = |s: &Skipped| format!("tensor \"{}\" skipped: {}", Shown(&s.name), s.dtype);
    context.warn_all(&skipped.iter().map(name).collect::<Vec<_>>())?;
    Ok((tensors, skipped))
}

/// Returns the tensors that one input tensor becomes.
fn specs(scheme: &Scheme, caster: &Caster<'_>) -> Vec<TensorSpec> {
    let FloatTensor { rows, cols, .. } = caster.tensor;
    let TensorMeta { name: n, shape, .. } = caster.tensor.meta();
    let mut specs = vec![TensorSpec::new(format!("{n}.dequant"), Dtype::F32, shape.clone())];
    if scheme.format.codec().is_none() {
        let dtype = match mantissa_num::code_unit(&scheme.format) {
            1 => Dtype::U8,
            2 => Dtype::U16,
            4 => Dtype::U32,
            _ => Dtype::U64,
        };
        specs.insert(0, TensorSpec::new(format!("{n}.codes"), dtype, shape.clone()));
    }
    specs.extend(native::scale_specs(n, &scheme.format, rows, cols));
    if caster.packed {
        specs.push(TensorSpec::new(format!("{n}.packed"), Dtype::U8, [caster.packed_bytes()]));
    }
    specs
}

fn metadata(scheme: &Scheme) -> BTreeMap<String, String> {
    let mut metadata = BTreeMap::from([
        ("scheme".to_owned(), scheme.to_string()),
        ("rounding".to_owned(), rounding_name(scheme).to_owned()),
    ]);
    if let Some(seed) = seed_of(scheme) {
        metadata.insert("seed".to_owned(), seed.to_string());
    }
    metadata
}

fn rounding_name(scheme: &Scheme) -> &'static str {
    if seed_of(scheme).is_some() { "stochastic" } else { "nearest" }
}

fn seed_of(scheme: &Scheme) -> Option<u64> {
    match scheme.encoder.rounding {
        Rounding::Stochastic { seed } => Some(seed),
        _ => None,
    }
}

fn cast_all(
    casters: &[Caster<'_>],
    writer: &mut SafetensorsWriter,
    context: &Context,
) -> Result<Vec<TensorReport>> {
    let total = casters.iter().map(|caster| caster.tensor.meta().len).sum();
    let progress = context.progress(total, Unit::Bytes);
    let mut reports = Vec::with_capacity(casters.len());
    for caster in casters {
        let meta = caster.tensor.meta();
        progress.message(Shown(&meta.name).to_string());
        let cost = caster.cast(writer, context.threads, &progress)?;
        reports.push(report(caster, &cost));
    }
    progress.finish();
    Ok(reports)
}

fn report(caster: &Caster<'_>, cost: &Cost) -> TensorReport {
    let meta = caster.tensor.meta();
    TensorReport {
        name: meta.name.clone(),
        shape: meta.shape.clone(),
        sqnr_db: cost.sqnr_db(),
        max_abs_error: cost.max_abs,
        bits_per_weight: caster.bits_per_weight(),
        non_finite: cost.non_finite,
    }
}

fn print(report: &Report, out: &mut dyn Write) -> io::Result<()> {
    table(&report.tensors).write(out)?;
    let size = std::fs::metadata(&report.output).map(|m| bytes(m.len())).unwrap_or_default();
    let seed = report.seed.map(|seed| format!(", seed {seed}")).unwrap_or_default();
    writeln!(
        out,
        "{} tensors as {} ({}{seed}), {} skipped; wrote {}, {size}",
        report.tensors.len(),
        report.scheme,
        report.rounding,
        report.skipped.len(),
        report.output.display()
    )
}

fn table(tensors: &[TensorReport]) -> Table {
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
