//! `transform_config`: rotations at run time, beside the quantized layers.
//!
//! A transform at `weight_input` or `weight_output` is already folded into the weight. `input` and `output` multiply
//! by a Hadamard matrix over √n, in blocks if `head_dim` splits the vector. `hadamard` without `randomize` is
//! Sylvester's matrix, which needs no stored tensor. Rotating queries (`q_attn`) and keys (`k_cache`) by the same
//! matrix leaves every score unchanged.
//!
//! Source: compressed-tensors 0.20, `transform/transform_{config,scheme,args}.py`, `transform/factory/hadamard.py`,
//! `transform/utils/{hadamard,matrix}.py`.

use std::path::Path;

use mantissa_num::Hadamard;
use mantissa_num::stored::{Map, Transforms};
use serde_json::{Value, json};

use super::target::{Target, fault, parse_targets};
use crate::convention::ModelFiles;
use crate::{Error, Result};

/// Rotation to run with some modules.
#[derive(Clone, Debug)]
pub(super) struct Rotation {
    targets: Vec<Target>,
    ignore: Vec<Target>,
    side: Side,
    /// Order of the matrix, if it is not the width of the vector.
    block: Option<usize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Input,
    Output,
}

/// Parses `transform_config`. `cache` is true if keys and values are quantized, which a rotation of keys would
/// change.
///
/// # Errors
/// [`Error::Field`] for unknown transforms that would have to run.
pub(super) fn parse(path: &Path, value: Option<&Value>, cache: bool) -> Result<Vec<Rotation>> {
    let groups = match value.and_then(|v| v.get("config_groups")) {
        None | Some(Value::Null) => return Ok(Vec::new()),
        Some(groups) => groups.as_object().ok_or_else(|| {
            fault(path, "transform_config.config_groups", groups.to_string(), "an object of groups")
        })?,
    };
    let mut all = Vec::new();
    for (name, scheme) in groups {
        let mut scores = [false; 2];
        let key = |key: &str| format!("transform_config.config_groups.{name}.{key}");
        let list = scheme.get("apply").and_then(Value::as_array);
        for args in list.ok_or_else(|| fault(path, &key("apply"), "no list", "a list of places"))? {
            let location = args.get("location").and_then(Value::as_str).unwrap_or_default();
            let side = match location {
                "weight_input" | "weight_output" => continue,
                "q_attn" | "k_cache" if !cache => {
                    scores[usize::from(location == "q_attn")] = true;
                    continue;
                }
                "input" => Side::Input,
                "output" => Side::Output,
                other => {
                    let allowed = "input, output, weight_input, weight_output; q_attn and k_cache without kv_cache_scheme";
                    return Err(fault(path, &key("apply.location"), format!("\"{other}\""), allowed));
                }
            };
            require_sylvester(path, scheme, &key)?;
            let targets = parse_targets(path, &key("apply.targets"), args.get("targets"))?;
            let ignore = parse_targets(path, &key("apply.ignore"), args.get("ignore"))?;
            let block = match scheme.get("head_dim") {
                None | Some(Value::Null) => None,
                Some(size) => Some(size.as_u64().and_then(|n| usize::try_from(n).ok()).ok_or_else(|| {
                    fault(path, &key("head_dim"), size.to_string(), "a positive number or null")
                })?),
            };
            all.push(Rotation { targets, ignore, side, block });
        }
        if scores[0] != scores[1] {
            let found = "one of q_attn and k_cache";
            return Err(fault(path, &key("apply.location"), found, "both, which leave scores as they are"));
        }
    }
    Ok(all)
}

/// Refuses matrices that need a tensor of the checkpoint, or a seed that is not stored.
fn require_sylvester(path: &Path, scheme: &Value, key: &dyn Fn(&str) -> String) -> Result<()> {
    let kind = scheme.get("type").and_then(Value::as_str).unwrap_or_default();
    let hint = "fold the transform into the weights, or use Sylvester's matrix";
    if kind != "hadamard" {
        let field = format!("quantization_config.{}", key("type"));
        return Err(Error::field(path, field, format!("\"{kind}\" at run time"), "\"hadamard\"", hint));
    }
    if scheme.get("randomize").and_then(Value::as_bool) == Some(true) {
        let field = format!("quantization_config.{}", key("randomize"));
        return Err(Error::field(path, field, "true at run time", "false", hint));
    }
    Ok(())
}

/// `transform_config` that rotates the inputs of `modules` by Sylvester's matrix of order `order` over its root,
/// block by block. The weights have been rotated already. One entry per given order.
pub fn rotated_inputs<'a>(groups: impl IntoIterator<Item = (usize, Vec<&'a str>)>) -> Value {
    let apply = |location: &str, inverse: bool, modules: &[&str]| json!({"targets": modules, "location": location, "inverse": inverse, "ignore": []});
    let group = |(order, modules): (usize, Vec<&str>)| {
        let places = [apply("input", false, &modules), apply("weight_input", true, &modules)];
        let scheme = json!({
            "type": "hadamard", "apply": places, "randomize": false, "requires_grad": false,
            "head_dim": order, "precision": "torch.float32",
        });
        (format!("R{order}"), scheme)
    };
    let groups: serde_json::Map<String, Value> = groups.into_iter().map(group).collect();
    json!({ "config_groups": groups })
}

/// Adds the rotations of `module`, `[rows, cols]`, to `transforms`.
///
/// # Errors
/// A matrix does not fit the layer, or the output of a layer with a bias is rotated (which would rotate the bias
/// too).
pub(super) fn apply(
    rotations: &[Rotation],
    files: &ModelFiles,
    module: &str,
    (rows, cols): (usize, usize),
    transforms: &mut Transforms,
) -> Result<()> {
    let mut before = Vec::new();
    for rotation in rotations {
        let named = |list: &[Target]| list.iter().any(|target| target.matches(module));
        if !named(&rotation.targets) || named(&rotation.ignore) {
            continue;
        }
        let width = if rotation.side == Side::Input { cols } else { rows };
        let size = rotation.block.unwrap_or(width);
        let fits = size.is_power_of_two() && width.is_multiple_of(size);
        let map = Hadamard::new(size).filter(|_| fits).map(Map::Hadamard).ok_or_else(|| {
            let allowed = format!("a power of two that divides {width}");
            files.fault(module, format!("a Hadamard matrix of order {size}"), allowed, "")
        })?;
        match rotation.side {
            Side::Input => before.push(map),
            Side::Output if files.has(&format!("{module}.bias")) => {
                let hint = "fold the rotation into the weight and the bias";
                return Err(files.fault(module, "a rotated output with a bias", "one without", hint));
            }
            Side::Output => transforms.after.push(map),
        }
    }
    // The input transform runs before the quantized weight's column order. Each hook is put in front, so the last one
    // runs first.
    before.reverse();
    before.append(&mut transforms.before);
    transforms.before = before;
    Ok(())
}
