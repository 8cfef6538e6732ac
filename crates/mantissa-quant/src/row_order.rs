//! Order of rows and columns in GGUF.

use mantissa_model::ModelConfig;
use mantissa_model::config::Recurrent;
use mantissa_store::convention::gguf::{Architecture, DeltaHeads, RowOrder};

/// Returns the order of rows and columns in a file of the architecture `row`.
pub(crate) fn order_of(row: &Architecture, config: &ModelConfig) -> RowOrder {
    let heads = config.recurrent.as_ref().and_then(Recurrent::delta_heads);
    let tiled = row.recurrence.and_then(|mixers| mixers.tiled);
    let delta = heads.zip(tiled).map(|(heads, tiled)| DeltaHeads { tiled, ..heads });
    RowOrder { delta, ..row.row_order(config.num_attention_heads, config.num_key_value_heads) }
}
