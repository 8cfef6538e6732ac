//! Evaluation of serving rules.

use mantissa_num::Blocks;
use mantissa_num::format::{Affine, Format};

use super::rule::{Check, Rule};
use super::subject::FormatClass;
use super::subject::{Linear, Observed, Split, Stored, Subject, split_of};
use super::target::EngineTarget;
use crate::hardware::Gpu;

/// Tensor, layer or field at fault, and the value found there.
type Violation = (String, String);

/// Returns the reason why a rule cannot be evaluated with the given information, and what would change that. `MODEL`
/// stands for the path of the model.
pub(super) fn undecidable(
    rule: &Rule,
    subject: &Subject,
    target: &EngineTarget,
) -> Option<(String, Option<String>)> {
    let has = |kinds: &[FormatClass]| subject.stored().any(|(_, stored)| kinds.contains(&stored.kind()));
    let values = || {
        let fix = format!("mantissa lint MODEL --for {target} after writing it");
        Some(("needs the tensor values".to_owned(), Some(fix)))
    };
    match rule.check {
        Check::Seen(what) if what.is_known() => None,
        Check::Capability { kinds, .. } if target.gpu.is_none() && has(kinds) => {
            let named = EngineTarget { gpu: Gpu::parse("h100"), ..*target };
            let fix = format!("mantissa lint MODEL --for {named}");
            Some(("needs the name of the GPU".to_owned(), Some(fix)))
        }
        Check::FusedScale(kind) if subject.planned && has(&[kind]) => values(),
        Check::FusedInputScale if subject.planned && subject.stored().any(|(_, s)| s.input.is_some()) => {
            values()
        }
        Check::Seen(_) if subject.planned => values(),
        Check::Seen(what) if !subject.examined.contains(&what) => Some(unseen(what)),
        _ => None,
    }
}

/// Returns the reason why a property was not examined, and what shows it.
fn unseen(what: Observed) -> (String, Option<String>) {
    let (why, fix) = match what {
        Observed::RowOrder => (
            "the weights alone do not show the order of their rows",
            Some("lint with --reference SOURCE, or mantissa doctor MODEL, which tries both orders"),
        ),
        Observed::BosRule => ("no tokenizer, or none that states add_bos_token", None),
        _ => ("the files do not show it", None),
    };
    (why.to_owned(), fix.map(str::to_owned))
}

/// Returns every violation of `check`.
pub(super) fn violations(check: Check, subject: &Subject, target: &EngineTarget) -> Vec<Violation> {
    match check {
        Check::Convention(allowed) => convention(allowed, subject),
        Check::Kinds(allowed) => each(subject, |_, stored| {
            let kind = stored.kind();
            (!allowed.contains(&kind)).then(|| kind.name().to_owned())
        }),
        Check::Activations { kinds, quantized } => each(subject, |_, stored| {
            let wrong = kinds.contains(&stored.kind()) && stored.input.is_some() != quantized;
            let inputs = if quantized { "unquantized" } else { "quantized" };
            wrong.then(|| format!("{} with {inputs} activations", stored.kind().name()))
        }),
        Check::Schemes(accepted) => each(subject, |_, stored| {
            let taken = accepted.iter().any(|combination| combination.takes(stored));
            (!taken).then(|| stored.words())
        }),
        Check::NoCodecs(refused) => each(subject, |_, stored| match stored.format {
            Format::Codec(id) if refused.contains(&id) => Some(id.codec().name.to_owned()),
            _ => None,
        }),
        Check::NoZeroPoints(kinds) => each(subject, |_, stored| {
            let wrong = kinds.contains(&stored.kind()) && stored.format.has_zero();
            wrong.then(|| format!("{} with zero points", stored.kind().name()))
        }),
        Check::Bits { symmetric, asymmetric } => each(subject, |_, stored| {
            let (bits, zeros) = stored.integers()?;
            let (allowed, what) = if zeros { (asymmetric, "with") } else { (symmetric, "without") };
            (!allowed.contains(&bits)).then(|| format!("{bits} bits {what} zero points"))
        }),
        Check::Groups { sizes, channel, other_in_f16 } => {
            let f16 = other_in_f16 && subject.dtype.as_deref() == Some("float16");
            each(subject, |linear, stored| groups(linear, stored, sizes, channel, f16))
        }
        Check::Heads => heads(subject, target.tp),
        Check::Widths => subject.linears.iter().filter_map(|linear| width(linear, target.tp)).collect(),
        Check::WholeGroups => each(subject, |linear, stored| whole_groups(linear, stored, target.tp)),
        Check::WholeTiles => whole_tiles(subject, target.tp),
        Check::ActOrderTiles { rows, cols } => each(subject, |linear, stored| {
            let (n, k) = partition(linear, target.tp);
            let whole = n.is_multiple_of(rows) && k.is_multiple_of(cols);
            (stored.act_order && !whole).then(|| format!("act-order on a partition of [{n}, {k}]"))
        }),
        Check::NoActOrder => {
            each(subject, |_, stored| stored.act_order.then(|| "act-order (g_idx)".to_owned()))
        }
        Check::ExpertsOnly(kinds) => each(subject, |linear, stored| {
            let dense = kinds.contains(&stored.kind()) && !linear.module.contains(".experts.");
            dense.then(|| format!("{} outside the experts", stored.kind().name()))
        }),
        Check::Multiplied(kinds) => {
            let fused: Vec<_> = subject.fused().into_iter().flatten().map(|linear| &linear.module).collect();
            each(subject, |linear, stored| {
                let needed = kinds.contains(&stored.kind()) && !fused.contains(&&linear.module);
                (needed && !stored.multiplied).then(|| "no pre_quant_scale".to_owned())
            })
        }
        Check::FusedAlike => fused_alike(subject),
        Check::FusedScale(kind) => {
            fused_scales(subject, |stored| (stored.kind() == kind).then_some(stored.outer))
        }
        Check::FusedInputScale => {
            fused_scales(subject, |stored| stored.input.as_ref().map(|input| input.scale))
        }
        Check::Capability { kinds, least, end } => capability(subject, target, kinds, least, end),
        Check::Package(name) => vec![("package".to_owned(), format!("a format that {name} reads"))],
        Check::Seen(what) => {
            let seen = subject.observations.iter().filter(|seen| seen.what == what);
            seen.map(|seen| (seen.tensor.clone(), seen.found.clone())).collect()
        }
    }
}

fn each(subject: &Subject, check: impl Fn(&Linear, &Stored) -> Option<String>) -> Vec<Violation> {
    let found = |(linear, stored): (&Linear, &Stored)| Some((linear.module.clone(), check(linear, stored)?));
    subject.stored().filter_map(found).collect()
}

fn convention(allowed: &[&str], subject: &Subject) -> Vec<Violation> {
    if allowed.contains(&subject.convention.as_str()) {
        return Vec::new();
    }
    let field = if subject.convention == "gguf" { "the file" } else { "quantization_config" };
    vec![(field.to_owned(), format!("format {}", subject.convention))]
}

fn groups(linear: &Linear, stored: &Stored, sizes: &[u32], channel: bool, f16: bool) -> Option<String> {
    // Other kernels multiply integers by integers; their layouts are a matter of `Check::Schemes`.
    if ![FormatClass::IntWeights, FormatClass::IntFp8].contains(&stored.kind()) {
        return None;
    }
    match stored.format.blocks() {
        Blocks::Group(g) if sizes.contains(&g) || f16 => None,
        Blocks::Row if channel => None,
        // A group as long as the row is read as a scale per row.
        Blocks::Row if sizes.iter().any(|&size| size as usize == linear.cols) => None,
        Blocks::Group(g) => Some(format!("groups of {g}")),
        Blocks::Row => Some("a scale per output row".to_owned()),
        _ => Some("another scale layout".to_owned()),
    }
}

/// Returns the rows and columns of a layer on one GPU, rounded down.
fn partition(linear: &Linear, tp: usize) -> (usize, usize) {
    match split_of(&linear.module) {
        Split::Rows => (linear.rows / tp, linear.cols),
        Split::Columns => (linear.rows, linear.cols / tp),
    }
}

fn heads(subject: &Subject, tp: usize) -> Vec<Violation> {
    let shape = subject.shape;
    let mut found = Vec::new();
    if shape.heads > 0 && !shape.heads.is_multiple_of(tp) {
        found.push(("num_attention_heads".to_owned(), format!("{} heads for {tp} GPUs", shape.heads)));
    }
    let kv = shape.kv_heads;
    if kv > 0 && !kv.is_multiple_of(tp) && !tp.is_multiple_of(kv) {
        found.push(("num_key_value_heads".to_owned(), format!("{kv} heads for {tp} GPUs")));
    }
    found
}

/// Checks that `tp` divides the split dimension. Skips K and V, which [`heads`] covers: they are replicated
/// if there are fewer heads than GPUs.
fn width(linear: &Linear, tp: usize) -> Option<Violation> {
    let (what, n) = match split_of(&linear.module) {
        Split::Rows if ["k_proj", "v_proj"].iter().any(|name| linear.module.ends_with(name)) => return None,
        Split::Rows => ("rows", linear.rows),
        Split::Columns => ("columns", linear.cols),
    };
    (!n.is_multiple_of(tp)).then(|| (linear.module.clone(), format!("{n} {what} for {tp} GPUs")))
}

fn whole_groups(linear: &Linear, stored: &Stored, tp: usize) -> Option<String> {
    if matches!(stored.format.blocks(), Blocks::Tile { .. }) {
        return None;
    }
    let group = stored.group()?;
    let (_, cols) = partition(linear, tp);
    if cols.is_multiple_of(group) {
        return None;
    }
    let split = if cols == linear.cols { String::new() } else { format!(" of {} on {tp} GPUs", linear.cols) };
    Some(format!("{cols} columns{split}, groups of {group}"))
}

fn whole_tiles(subject: &Subject, tp: usize) -> Vec<Violation> {
    // In fused layers that are not split, the last layer may end within a tile.
    let fused = subject.fused();
    let joined = |module: &str| {
        fused.iter().find_map(|members| {
            let at = members.iter().position(|member| member.module == module)?;
            Some(at + 1 < members.len())
        })
    };
    each(subject, |linear, stored| {
        let Format::Affine(Affine { blocks: Blocks::Tile { rows, cols }, .. }) = stored.format else {
            return None;
        };
        let (n, k) = partition(linear, tp);
        let split = split_of(&linear.module);
        if tp > 1 && split == Split::Columns && !k.is_multiple_of(cols as usize) {
            return Some(format!("{k} columns of {} on {tp} GPUs, tiles of {cols}", linear.cols));
        }
        let bound = (tp > 1 && split == Split::Rows) || joined(&linear.module) == Some(true);
        (bound && !n.is_multiple_of(rows as usize)).then(|| format!("{n} rows on each GPU, tiles of {rows}"))
    })
}

fn fused_alike(subject: &Subject) -> Vec<Violation> {
    let mut found = Vec::new();
    // vLLM (`GGUFLinearMethod`) and SGLang multiply each part of a fused layer in its own type, as
    // llama.cpp's mixed types need.
    if subject.convention == "gguf" {
        return found;
    }
    for members in subject.fused() {
        let what = |linear: &Linear| match &linear.stored {
            None => ("dense", None, None),
            Some(stored) => (
                stored.kind().name(),
                Some(stored.format.clone()),
                stored.input.as_ref().map(|i| i.format.clone()),
            ),
        };
        let first = what(members[0]);
        for other in &members[1..] {
            let this = what(other);
            if this != first {
                let text = format!("{}, but {} has {}", describe(&this), members[0].module, describe(&first));
                found.push((other.module.clone(), text));
            }
        }
    }
    found
}

fn describe((name, format, _): &(&'static str, Option<Format>, Option<Format>)) -> String {
    let Some(format) = format else { return (*name).to_owned() };
    if let Some(codec) = format.codec() {
        return format!("{name} ({})", codec.name);
    }
    let blocks = match format.blocks() {
        Blocks::Group(g) => format!(" in groups of {g}"),
        Blocks::Row => " with one scale per row".to_owned(),
        Blocks::Tensor => " with one scale".to_owned(),
        _ => String::new(),
    };
    format!("{name} of {} bits{blocks}", format.code_bits())
}

/// Returns layers whose scale differs from the first one they are fused with. `scale` returns `None` for
/// layers to skip.
fn fused_scales(subject: &Subject, scale: impl Fn(&Stored) -> Option<Option<f32>>) -> Vec<Violation> {
    let mut found = Vec::new();
    for members in subject.fused() {
        let asked = members.iter().filter_map(|member| Some((member, scale(member.stored.as_ref()?)??)));
        let mut first = None;
        for (member, scale) in asked {
            let (name, expected) = *first.get_or_insert((&member.module, scale));
            if scale.to_bits() != expected.to_bits() {
                found.push((member.module.clone(), format!("scale {scale:e}, but {expected:e} in {name}")));
            }
        }
    }
    found
}

fn capability(
    subject: &Subject,
    target: &EngineTarget,
    kinds: &[FormatClass],
    least: u32,
    end: Option<u32>,
) -> Vec<Violation> {
    let Some(gpu) = target.gpu else { return Vec::new() };
    if gpu.sm >= least && end.is_none_or(|end| gpu.sm < end) {
        return Vec::new();
    }
    // One finding covers all layers: the GPU is the cause for each.
    let mut same_class = subject.stored().filter(|(_, stored)| kinds.contains(&stored.kind()));
    let Some((first, stored)) = same_class.next() else { return Vec::new() };
    let others = same_class.count();
    let more = if others == 0 { String::new() } else { format!(" and {others} more layers") };
    vec![(first.module.clone(), format!("{}{more} on {gpu}", stored.kind().name()))]
}
