//! Tensors of the quantized layers of an output.

use std::collections::BTreeMap;

use mantissa_model::LinearInfo;
use mantissa_num::Scheme;
use mantissa_store::convention::{Container, Experts};
use mantissa_store::{SafeTensors, SafetensorsWriter, TensorMeta, TensorSpec};

use crate::error::Result;
use crate::plan::Layout;
use crate::plan::{PlannedLinear, WeightJob, layer_plan, not_storable};
use crate::stacks;

/// Note for formats without stacked experts.
pub(crate) const EXPERTS_APART: &str = "experts that the source stacks in one tensor are stored one by one: mantissa reads them, other engines expect one tensor";

/// Bytes copied at a time.
const COPY: usize = 1 << 20;

/// Writes tensors of a weight file: the bytes in `changed`, or copies of those in `from`, piece by piece.
///
/// # Errors
/// I/O.
pub(crate) fn write_changed<'a>(
    writer: &mut SafetensorsWriter,
    from: &SafeTensors,
    tensors: impl Iterator<Item = &'a TensorMeta>,
    changed: &BTreeMap<String, Vec<u8>>,
) -> Result<()> {
    let mut buffer = vec![0; COPY];
    for meta in tensors {
        if let Some(bytes) = changed.get(&meta.name) {
            writer.write(&meta.name, bytes)?;
            continue;
        }
        if meta.len == 0 {
            writer.write(&meta.name, &[])?;
        }
        let mut at = 0;
        while at < meta.len {
            let n = usize::try_from(meta.len - at).unwrap_or(usize::MAX).min(buffer.len());
            from.read_range(meta, at, &mut buffer[..n])?;
            writer.write_range(&meta.name, at, &buffer[..n])?;
            at += n as u64;
        }
    }
    Ok(())
}

/// Declares the tensors of the output: a GGUF `layout`, or in a folder the `copied` ones and the format's `own`.
pub(crate) fn output_specs(
    layout: Option<&Layout>,
    copied: &[TensorMeta],
    own: impl Iterator<Item = TensorSpec>,
) -> Vec<TensorSpec> {
    let copied = copied.iter().map(|meta| TensorSpec::new(&meta.name, meta.dtype, meta.shape.clone()));
    layout.map_or_else(|| copied.chain(own).collect(), Layout::specs)
}

/// Declares the tensors of the quantized layers. `input` returns the scheme of the input of a layer.
///
/// # Errors
/// [`QuantError::NotStorable`](crate::QuantError::NotStorable) with the layers that the format cannot hold.
pub(crate) fn output_of_linears<'i>(
    job: &WeightJob,
    input: impl Fn(&LinearInfo) -> Option<&'i Scheme>,
    container: Container,
    linears: &[PlannedLinear],
    by_group: bool,
) -> Result<Vec<TensorSpec>> {
    let (mut specs, mut faults) = (Vec::new(), Vec::new());
    for PlannedLinear { info, scheme } in linears {
        let Some(scheme) = scheme else { continue };
        match container.specs(&layer_plan(job, input(info), info, scheme, by_group)) {
            // ONNX graphs name weights as dense checkpoints do, so they cannot name single experts of a stack.
            Ok(_) if container.facts().experts == Experts::AsInSource && stacks::stack_of(info).is_some() => {
                let why = "the source stacks its experts in one tensor, which ONNX cannot hold";
                faults.push((info.module.clone(), why.to_owned()));
            }
            Ok(all) => specs.extend(all),
            Err(fault) => {
                let own = format!("{}: ", info.module);
                faults.push((info.module.clone(), fault.to_string().replace(&own, "")));
            }
        }
    }
    match faults.is_empty() {
        true if container.facts().experts == Experts::Stacked => Ok(stacks::specs(linears)),
        true => Ok(specs),
        false => Err(not_storable(container, linears.len(), faults)),
    }
}
