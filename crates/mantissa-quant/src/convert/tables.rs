//! Embedding and head of a quantized source: their codes are kept where the container holds them.

use mantissa_model::{LinearInfo, LinearKind, ModelConfig};
use mantissa_num::Scheme;
use mantissa_store::convention::{Container, ModelFiles};
use mantissa_store::{Dtype, TensorSpec};

use super::{decide, is_quantized};
use crate::error::{Refused, Result};
use crate::plan::{PlannedLinear, table_plan};
use crate::values::weight_of;

/// Plans the quantized embedding and head of `source`. Those that the container cannot hold are decoded from a GGUF file,
/// and `refused` in a folder; `other` is a scheme to round the layers to instead. A job that rounds again decodes both: it reads a
/// folder as [`decoded_tables_source`](crate::decoded_tables_source) presents it.
pub(super) fn planned(
    source: &ModelFiles,
    config: &ModelConfig,
    container: Container,
    requantize: Option<&Scheme>,
    dtype: Dtype,
    refused: &mut Refused,
    other: Option<&str>,
) -> Result<Vec<PlannedLinear>> {
    let mut all = Vec::new();
    for info in config.tables() {
        if source.gguf().is_none() && source.is_dense(&format!("{}.weight", info.module)) {
            continue;
        }
        let weight = weight_of(source, &info)?;
        if !is_quantized(&weight) {
            continue;
        }
        let flag = if info.kind == LinearKind::Head { "--head" } else { "--embeddings" };
        let original = format!("quantize the original model with {flag}");
        let decoded = other
            .map(|scheme| format!("--requantize {scheme}, which decodes it and rounds the layers again"));
        let again = decoded.clone().unwrap_or(original);
        let decided = match (requantize, holds(container, &info)) {
            (Some(_), _) => Err(("it is not rounded again".to_owned(), again)),
            (None, false) => {
                let without = || format!("quantize the original model without {flag}");
                let fix = format!("--format native, or {}", decoded.unwrap_or_else(without));
                Err((format!("readers of {} load it unquantized", container.name()), fix))
            }
            (None, true) => decide(&info, &weight, container, None, dtype).map_err(|why| (why, again)),
        };
        match decided {
            Ok(scheme) => all.push(PlannedLinear { info, scheme }),
            Err(_) if source.gguf().is_some() => {}
            Err((why, fix)) => refused.whole.push(format!(
                "{}: expected an unquantized embedding and head, got a quantized one ({why}); fix: {fix}",
                info.module
            )),
        }
    }
    Ok(all)
}

/// True if a model of the container may have this table quantized.
fn holds(container: Container, info: &LinearInfo) -> bool {
    let facts = container.facts();
    let own = if info.kind == LinearKind::Head { facts.quantized_head } else { facts.quantized_embedding };
    container.is_one_file() || own
}

/// Lists the tensors of tables in a folder.
pub(super) fn specs(container: Container, tables: &[PlannedLinear]) -> Vec<TensorSpec> {
    let coded = tables.iter().filter_map(|table| Some((&table.info, table.scheme.as_ref()?)));
    coded.flat_map(|(info, scheme)| container.specs(&table_plan(info, scheme)).unwrap_or_default()).collect()
}
