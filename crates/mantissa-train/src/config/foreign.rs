//! Settings as other tools or short forms write them, with the keys that say the same here.

use crate::Policy;
use crate::optim::{MomentFormat, registry};

/// Tables with the key of each that names its kind, which a short form `table=kind` means.
const KINDS: [(&str, &str); 4] =
    [("optimizer", "kind"), ("precision", "policy"), ("schedule", "kind"), ("adapter", "kind")];

/// Parts of an optimizer's name that choose no other arithmetic here: places, implementations and the state's default.
const IMPLEMENTATIONS: [&str; 10] =
    ["torch", "fused", "hf", "apex", "bnb", "npu", "xla", "32bit", "foreach", "unfused"];

/// Returns the key of a whole table that `--set` gives a single value.
pub(super) fn key_of_table(table: &str) -> Option<String> {
    KINDS.iter().find(|(name, _)| *name == table).map(|(name, key)| format!("{name}.{key}"))
}

/// Returns the value of `key` that `given` may mean, so that the change which is proposed works.
pub(super) fn known(key: &str, given: String) -> String {
    let policy = (key == "precision.policy").then(|| Policy::meant_by(&given));
    let meant = policy.filter(|_| !Policy::names().any(|name| name == given));
    meant.and_then(|meant| meant.first().map(|name| (*name).to_owned())).unwrap_or(given)
}

/// Returns the changes that choose the optimizer which bitsandbytes, torchao, torch or transformers name so, such as
/// `paged_adamw_8bit`; `None` if no optimizer here is that one.
pub(super) fn optimizer(name: &str) -> Option<String> {
    let mut rest = name.to_ascii_lowercase().replace('-', "_");
    // Written without a separator: adamw8bit.
    for bits in ["8bit", "4bit", "32bit"] {
        rest = rest.replace(bits, &format!("_{bits}"));
    }
    let (mut kind, mut moments, mut paged) = (None, None, false);
    for part in rest.split('_').filter(|part| !part.is_empty()) {
        match part {
            "paged" => paged = true,
            "8bit" | "4bit" => moments = Some(part),
            part if IMPLEMENTATIONS.contains(&part) => {}
            "adam" if kind.is_none() => kind = Some("adamw"),
            part if kind.is_none() => kind = Some(part),
            _ => return None,
        }
    }
    let kind = registry::kind(kind?)?.name;
    let known = |name: &&str| registry::uses(kind, "moments") && MomentFormat::parse(name).is_some();
    let moments = match moments {
        None => None,
        Some(name) => Some(Some(name).filter(known)?),
    };
    let set = |key: &str, value: &str| format!("--set optimizer.{key}={value}");
    let all = [
        Some(set("kind", kind)),
        moments.map(|moments| set("moments", moments)),
        paged.then(|| set("paged", "true")),
    ];
    Some(all.into_iter().flatten().collect::<Vec<_>>().join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_other_trainers_mean_keys() {
        let adamw = |more: &str| Some(format!("--set optimizer.kind=adamw{more}"));
        let (eight, paged) = (" --set optimizer.moments=8bit", " --set optimizer.paged=true");
        for (name, expected) in [
            ("adamw8bit", adamw(eight)),
            ("adamw_bnb_8bit", adamw(eight)),
            ("AdamW-8bit", adamw(eight)),
            ("paged_adamw_8bit", adamw(&format!("{eight}{paged}"))),
            ("paged_adamw_32bit", adamw(paged)),
            ("adamw_torch", adamw("")),
            ("adamw_torch_fused", adamw("")),
            ("adamw_torch_4bit", adamw(" --set optimizer.moments=4bit")),
            ("adam", adamw("")),
            ("Lion_8bit", Some(format!("--set optimizer.kind=lion{eight}"))),
            ("galore_adamw", None),
            ("rmsprop", None),
            ("", None),
        ] {
            assert_eq!(optimizer(name), expected, "{name}");
        }
    }
}
