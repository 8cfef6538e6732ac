//! Shards of the parameters: the part of every arena that a rank reduces and updates (ZeRO, Rajbhandari et al. 2020,
//! "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", arXiv 1910.02054, section 5).

use std::ops::Range;

use crate::param_table::{ParamInfo, ParamTable};

/// Elements of a parameter that a thread updates at a time, whole blocks in every format of moments; sums are taken over pieces of
/// this size, in order.
pub(crate) const PIECE: usize = 1 << 16;

/// Cuts the arenas of `table` into `ranks` consecutive ranges of about the same length, which cover them without gaps.
///
/// A parameter is cut only if its elements are updated one by one (`is_elementwise`), and only where its first element and whole pieces of
/// [`PIECE`] elements end: blocks of codes, and sums over pieces, are then those of the whole parameter.
pub(crate) fn cut(
    table: &ParamTable,
    is_elementwise: impl Fn(&ParamInfo) -> bool,
    ranks: usize,
) -> Vec<Range<usize>> {
    let (len, ranks) = (table.len(), ranks.max(1));
    let ends = (1..ranks).map(|rank| {
        let wanted = (len as u128 * rank as u128 / ranks as u128) as usize;
        let within = table.iter().find(|param| param.range.contains(&wanted));
        within.map_or(wanted, |param| place_in(&param.range, is_elementwise(param), wanted))
    });
    let mut at = 0;
    let mut shards: Vec<_> = ends
        .map(|end| {
            let shard = at..end.max(at);
            at = shard.end;
            shard
        })
        .collect();
    shards.push(at..len);
    shards
}

/// Returns the place nearest to `wanted` at which the parameter at `range` can be cut.
fn place_in(range: &Range<usize>, is_elementwise: bool, wanted: usize) -> usize {
    let Range { start, end } = *range;
    let nearer = |low: usize, high: usize| if wanted - low <= high - wanted { low } else { high };
    // A last piece that is no whole one stays with the one before it: its blocks may be stored otherwise.
    let whole = (end - start) / PIECE * PIECE;
    if !is_elementwise || whole < 2 * PIECE || !(end - start).is_multiple_of(256) {
        return nearer(start, end);
    }
    let low = start + (wanted - start) / PIECE * PIECE;
    let last = start + whole - if whole == end - start { 0 } else { PIECE };
    if low >= last { nearer(last, end) } else { nearer(low, (low + PIECE).min(last)) }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use mantissa_model::ModelConfig;
    use serde_json::json;

    fn table(width: usize) -> ParamTable {
        let config = json!({
            "model_type": "llama", "hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": 2,
            "num_attention_heads": 1, "vocab_size": 1000, "max_position_embeddings": 32, "rms_norm_eps": 1e-5
        });
        ParamTable::new(&ModelConfig::from_json(&config, "config.json").unwrap())
    }

    fn rule(text: &str) -> crate::OptimizerSpec {
        let text = format!(
            "out = \"a\"\n[model]\nconfig = \"c\"\n[data]\nfiles = [\"a\"]\nlength = 8\nbatch = 1\n[schedule]\nsteps = 1\n\
             [optimizer]\nlr = 1.0\n{text}"
        );
        crate::config::RunConfig::parse("run.toml", &text, &[]).unwrap().optimizer.recipe()
    }

    #[test]
    fn shards_cover_the_arena_and_cut_only_whole_pieces() {
        for width in [64, 256, 512] {
            let table = table(width);
            for (text, cuts) in [("kind = \"adamw\"", true), ("kind = \"muon\"", false)] {
                let rule = rule(text);
                for ranks in [1, 2, 3, 4, 8] {
                    let shards = cut(&table, |param| rule.method.is_elementwise(param), ranks);
                    assert_eq!(shards.len(), ranks);
                    assert!(shards[0].start == 0 && shards[ranks - 1].end == table.len());
                    assert!(shards.windows(2).all(|pair| pair[0].end == pair[1].start));
                    let longest = table.iter().map(|param| param.range.len()).max().unwrap();
                    let slack = if cuts { 2 * PIECE } else { longest };
                    let most = shards.iter().map(Range::len).max().unwrap();
                    assert!(most <= table.len() / ranks + slack + 1, "{width} {ranks} {most}");
                    for end in shards[..ranks - 1].iter().map(|shard| shard.end) {
                        let Some(param) = table.iter().find(|p| p.range.contains(&end)) else { continue };
                        let offset = end - param.range.start;
                        assert!(offset == 0 || cuts && offset.is_multiple_of(PIECE), "{offset}");
                        assert!(offset == 0 || param.range.end - end >= PIECE);
                    }
                }
            }
        }
    }
}
