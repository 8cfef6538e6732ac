//! Settings of a run, each declared once: key, default, accepted values, example and meaning. Checks of ranges, defaults of
//! keys that are left out, `mantissa train --init` and the reference page follow from this list.

use serde::de::DeserializeOwned;
use toml::Value;

/// Column of the comments behind keys and values.
const COMMENT: usize = 34;

/// Table of the settings file.
#[derive(Clone, Copy, Debug)]
pub struct Section {
    /// Name of the table; empty for the keys before all tables.
    pub name: &'static str,
    /// Remark behind its header.
    pub about: &'static str,
    /// Keys in the order in which they are printed.
    pub settings: &'static [Setting],
}

/// Key of the settings file.
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    /// Name of the table, a point, and the name; the name alone before all tables.
    pub key: &'static str,
    /// Value of a key that is left out.
    pub default: Fallback,
    /// Accepted values.
    pub allowed: Allowed,
    /// Value as TOML, for pages and messages.
    pub example: &'static str,
    /// Meaning.
    pub help: &'static str,
}

/// Value of a key that is left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fallback {
    /// There is none: the key is needed, or one of several keys is.
    Needed,
    /// The key has no value, or one that depends on other keys.
    Unset,
    /// This value, as TOML; the key's example is the same.
    Example,
}

/// Accepted values besides those that the type of the key excludes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Allowed {
    /// All, or those that the code behind the key names.
    Any,
    /// Whole numbers from 1.
    Positive,
    /// Numbers from the first to the second.
    Range(f64, f64),
}

impl Setting {
    const fn new(
        key: &'static str,
        (default, example): (Fallback, &'static str),
        allowed: Allowed,
        help: &'static str,
    ) -> Self {
        Setting { key, default, allowed, example, help }
    }

    /// Returns the name without the table.
    pub fn name(&self) -> &'static str {
        self.key.rsplit_once('.').map_or(self.key, |(_, name)| name)
    }

    /// Returns the example as a value.
    pub(crate) fn value(&self) -> Option<Value> {
        format!("x = {}", self.example).parse::<toml::Table>().ok()?.remove("x")
    }

    /// Returns the accepted values for a message, if `found` is none of them.
    pub(crate) fn refusal(&self, found: &Value) -> Option<String> {
        match self.allowed {
            Allowed::Any => None,
            Allowed::Positive => (number(found)? < 1.0).then(|| "1 or more".to_owned()),
            Allowed::Range(least, most) => {
                (!(least..=most).contains(&number(found)?)).then(|| format!("{least} to {most}"))
            }
        }
    }

    /// Prints the key with a value, or with its example: commented out where it has no default or is left out.
    fn line(&self, value: Option<&str>, left_out: bool) -> String {
        let mark = if value.is_none() && (left_out || self.default == Fallback::Unset) { "# " } else { "" };
        let shown = format!("{mark}{} = {}", self.name(), value.unwrap_or(self.example));
        match shown.len() < COMMENT {
            true => format!("{shown:COMMENT$}# {}\n", self.help),
            false => format!("{shown} # {}\n", self.help),
        }
    }
}

fn number(value: &Value) -> Option<f64> {
    value.as_float().or_else(|| value.as_integer().map(|n| n as f64))
}

impl Section {
    /// Prints the table as TOML with comments. Keys have the values of `chosen`, else their defaults; keys without either
    /// and keys of `left_out` are commented out with an example.
    pub fn print(&self, chosen: &[(&str, String)], left_out: &[&str]) -> String {
        let mut text = match (self.name, self.about) {
            ("", _) => String::new(),
            (name, "") => format!("[{name}]\n"),
            (name, about) => format!("{:COMMENT$}# {about}\n", format!("[{name}]")),
        };
        for setting in self.settings {
            let value = chosen.iter().find(|(key, _)| *key == setting.key).map(|(_, value)| &**value);
            text += &setting.line(value, left_out.contains(&setting.key));
        }
        text
    }
}

/// Finds the table of this name.
pub fn section(name: &str) -> Option<&'static Section> {
    SECTIONS.iter().find(|section| section.name == name)
}

/// Finds the setting with this key.
pub(crate) fn setting(key: &str) -> Option<&'static Setting> {
    SECTIONS.iter().flat_map(|section| section.settings).find(|setting| setting.key == key)
}

/// Returns the default of a key; the type's default for a key without one.
pub(crate) fn default<T: DeserializeOwned + Default>(key: &str) -> T {
    let value = setting(key).filter(|setting| setting.default == Fallback::Example).and_then(Setting::value);
    value.and_then(|value| value.try_into().ok()).unwrap_or_default()
}

/// Finds the first setting of `settings`, TOML with all defaults, whose value is not accepted; returns its key, the value
/// and the accepted ones.
pub(crate) fn first_fault(settings: &toml::Table) -> Option<(&'static str, String, String)> {
    SECTIONS.iter().flat_map(|section| section.settings).find_map(|setting| {
        let found = match setting.key.split_once('.') {
            Some((table, name)) => settings.get(table)?.get(name)?,
            None => settings.get(setting.key)?,
        };
        // The optimizer checks its own keys, which its kind may lack.
        let allowed = setting.refusal(found).filter(|_| !setting.key.starts_with("optimizer."))?;
        let shown = number(found).map_or_else(|| found.to_string(), |number| number.to_string());
        Some((setting.key, shown, allowed))
    })
}

use Allowed::{Any, Positive, Range};
use Fallback::{Example, Needed, Unset};

/// All settings.
pub const SECTIONS: &[Section] = &[
    Section {
        name: "",
        about: "",
        settings: &[
            Setting::new("seed", (Example, "0"), Any, "of all random numbers"),
            Setting::new("out", (Needed, "\"runs/first\""), Any, "folder of the run"),
        ],
    },
    Section {
        name: "model",
        about: "",
        settings: &[
            Setting::new(
                "model.config",
                (Needed, "\"config.json\""),
                Any,
                "architecture, as Hugging Face writes it, or the table [model.architecture] with its keys",
            ),
            Setting::new(
                "model.tokenizer",
                (Unset, "\"tokenizer\""),
                Any,
                "folder with tokenizer.json; without it and init, one is trained on the data",
            ),
            Setting::new(
                "model.init",
                (Unset, "\"model\""),
                Any,
                "an unquantized model whose weights it starts from; stands for config and tokenizer too",
            ),
            Setting::new(
                "model.std",
                (Example, "0.02"),
                Range(0.0, 1e3),
                "standard deviation of initial weights",
            ),
            Setting::new(
                "model.balance",
                (Unset, "0.001"),
                Range(0.0, 1e3),
                "factor of the load-balancing loss of experts; 0: none",
            ),
        ],
    },
    Section {
        name: "data",
        about: "",
        settings: &[
            Setting::new(
                "data.files",
                (Needed, "[\"text.txt\"]"),
                Any,
                "texts, .jsonl files, or token files (.safetensors)",
            ),
            Setting::new(
                "data.split",
                (Unset, "\"<|endoftext|>\""),
                Any,
                "between the documents of a text; without it a text is one document",
            ),
            Setting::new("data.field", (Example, "\"text\""), Any, "of a .jsonl line with the document"),
            Setting::new(
                "data.chat",
                (Example, "false"),
                Any,
                "true: .jsonl files of conversations or prompts, loss on answers only, packed",
            ),
            Setting::new("data.length", (Needed, "256"), Positive, "tokens of a window"),
            Setting::new("data.batch", (Needed, "16"), Positive, "windows of a batch"),
            Setting::new(
                "data.accumulate",
                (Example, "1"),
                Positive,
                "batches of a step (gradient accumulation)",
            ),
        ],
    },
    Section {
        name: "validation",
        about: "optional",
        settings: &[
            Setting::new(
                "validation.share",
                (Example, "0.0"),
                Range(0.0, 0.5),
                "share of the documents that is held out, or files",
            ),
            Setting::new("validation.files", (Example, "[]"), Any, "held-out texts or conversations"),
            Setting::new(
                "validation.every",
                (Example, "100"),
                Positive,
                "steps between two measurements; the last step has one too",
            ),
            Setting::new(
                "validation.batches",
                (Example, "8"),
                Positive,
                "measured at most, evenly spaced over the held-out text",
            ),
            Setting::new(
                "validation.patience",
                (Example, "0"),
                Any,
                "the run ends after this number of measurements without a better loss; 0: never",
            ),
        ],
    },
    Section {
        name: "samples",
        about: "optional",
        settings: &[
            Setting::new("samples.prompts", (Example, "[]"), Any, "continued during training, to read along"),
            Setting::new("samples.every", (Example, "100"), Positive, "steps; the last step has samples too"),
            Setting::new("samples.tokens", (Example, "32"), Positive, "new tokens of each"),
            Setting::new("samples.temperature", (Example, "0.0"), Range(0.0, 100.0), "0: greedy"),
        ],
    },
    Section {
        name: "adapter",
        about: "optional: adapters over the frozen model.init",
        settings: &[
            Setting::new("adapter.kind", (Needed, "\"lora\""), Any, "lora dora qlora"),
            Setting::new("adapter.rank", (Example, "16"), Any, "of the update"),
            Setting::new(
                "adapter.alpha",
                (Example, "32.0"),
                Any,
                "scale: alpha / rank, or alpha / sqrt(rank) with rslora",
            ),
            Setting::new("adapter.rslora", (Example, "false"), Any, "true: the scale alpha / sqrt(rank)"),
            Setting::new("adapter.dropout", (Example, "0.0"), Any, "share of the adapters' inputs set to 0"),
            Setting::new(
                "adapter.targets",
                (Example, "[\"*\"]"),
                Any,
                "linear layers, by module name or the last parts of it",
            ),
            Setting::new(
                "adapter.train",
                (Example, "[]"),
                Any,
                "other tensors that train whole, such as \"*norm\" or \"lm_head\"",
            ),
            Setting::new(
                "adapter.base",
                (Unset, "\"nf4-dq\""),
                Any,
                "scheme of the frozen linear weights; qlora: nf4-dq, else as stored",
            ),
            Setting::new(
                "adapter.loftq",
                (Example, "0"),
                Any,
                "alternating steps of LoftQ's initialization; 0: B starts at zero",
            ),
            Setting::new("adapter.merge", (Example, "false"), Any, "true: also write the merged model"),
            Setting::new(
                "adapter.requantize",
                (Unset, "\"int4-g32\""),
                Any,
                "also write the merged model in this scheme",
            ),
        ],
    },
    Section {
        name: "distill",
        about: "optional: the loss is the divergence from the predictions of a teacher",
        settings: &[
            Setting::new(
                "distill.teacher",
                (Unset, "\"large\""),
                Any,
                "its folder or .gguf file; without it model.init, unquantized",
            ),
            Setting::new(
                "distill.weight",
                (Unset, "1.0"),
                Range(0.0, 1.0),
                "weight of the divergence; the loss on the text has 1 - weight",
            ),
            Setting::new(
                "distill.temperature",
                (Unset, "1.0"),
                Range(0.05, 100.0),
                "divides both models' logits; the divergence is multiplied by its square",
            ),
            Setting::new(
                "distill.generated",
                (Example, "0"),
                Any,
                "windows of text that the teacher generates, besides data.files",
            ),
        ],
    },
    Section {
        name: "precision",
        about: "any other key changes a part of the policy",
        settings: &[
            Setting::new(
                "precision.policy",
                (Example, "\"fp32\""),
                Any,
                "fp32 fp16 bf16 … nvfp4; `mantissa train --show-policy nvfp4` prints one",
            ),
            Setting::new(
                "precision.scaling",
                (Unset, "\"megatron\""),
                Any,
                "rule of fp16's loss scale: pytorch (the default) or megatron",
            ),
        ],
    },
    Section {
        name: "optimizer",
        about: "",
        settings: &[
            Setting::new(
                "optimizer.kind",
                (Example, "\"adamw\""),
                Any,
                "adamw sgd adafactor lion muon soap, each with keys of its own",
            ),
            Setting::new("optimizer.lr", (Needed, "1e-3"), Range(0.0, 1e6), "peak learning rate"),
            Setting::new(
                "optimizer.moments",
                (Example, "\"f32\""),
                Any,
                "f32 bf16 fp8 8bit 8bit:cpu 8bit:torchao 4bit, or a map as a scheme: lin8 dyn8-tensor …",
            ),
            Setting::new("optimizer.beta1", (Example, "0.9"), Any, "of adamw: decay of the first moment"),
            Setting::new("optimizer.beta2", (Example, "0.95"), Any, "of adamw: decay of the second moment"),
            Setting::new("optimizer.eps", (Example, "1e-8"), Any, "of adamw: term added to the root"),
            Setting::new(
                "optimizer.weight_decay",
                (Example, "0.1"),
                Range(0.0, 1e3),
                "decoupled, times the learning rate",
            ),
            Setting::new(
                "optimizer.decay",
                (Example, "[\"linears\", \"embeddings\", \"head\"]"),
                Any,
                "also norms, biases, and names such as \"*.down_proj.weight\"",
            ),
            Setting::new("optimizer.no_decay", (Example, "[]"), Any, "exceptions from decay"),
            Setting::new(
                "optimizer.max_norm",
                (Example, "1.0"),
                Range(0.0, 1e30),
                "gradient clipping; 0: none",
            ),
            Setting::new(
                "optimizer.paged",
                (Example, "false"),
                Any,
                "true: moments in a file of the run's folder instead of memory",
            ),
            Setting::new(
                "optimizer.lr_scale",
                (Unset, "{ embeddings = 0.1 }"),
                Range(0.0, 1e6),
                "factors of the learning rate, by group or name",
            ),
        ],
    },
    Section {
        name: "schedule",
        about: "",
        settings: &[
            Setting::new("schedule.steps", (Needed, "1000"), Any, "or minutes"),
            Setting::new(
                "schedule.kind",
                (Example, "\"cosine\""),
                Any,
                "constant linear cosine wsd (stable is another name)",
            ),
            Setting::new("schedule.warmup", (Example, "0"), Any, "steps with a rising learning rate"),
            Setting::new(
                "schedule.min_ratio",
                (Example, "0.1"),
                Range(0.0, 1.0),
                "last learning rate as a share of lr",
            ),
            Setting::new("schedule.decay_steps", (Example, "0"), Any, "of wsd: steps of the decay"),
            Setting::new(
                "schedule.minutes",
                (Unset, "30.0"),
                Range(0.0, 1e6),
                "wall time over all processes of the run, instead of steps; with wsd",
            ),
            Setting::new(
                "schedule.decay_share",
                (Example, "0.2"),
                Range(0.0, 0.9),
                "share of the minutes in which the learning rate decays",
            ),
        ],
    },
    Section {
        name: "checkpoint",
        about: "",
        settings: &[
            Setting::new(
                "checkpoint.every",
                (Example, "100"),
                Positive,
                "steps; the first is written after step 1",
            ),
            Setting::new("checkpoint.keep", (Example, "2"), Positive, "at least 2, to survive a damaged one"),
            Setting::new(
                "checkpoint.best",
                (Example, "true"),
                Any,
                "the one with the least validation loss is kept too, and exported",
            ),
        ],
    },
    Section {
        name: "telemetry",
        about: "",
        settings: &[Setting::new(
            "telemetry.every",
            (Example, "100"),
            Any,
            "steps between two looks at every tensor, the first at step 1; 0: none",
        )],
    },
];

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::config::RunConfig;

    /// Settings of a run, by key; those that are left out of the resolved ones have their examples as defaults elsewhere.
    fn resolved(least: &str) -> toml::Table {
        RunConfig::parse("run.toml", least, &[]).unwrap().resolved().parse().unwrap()
    }

    #[test]
    fn every_default_is_that_of_a_run() {
        let mut least = String::new();
        for section in SECTIONS {
            let name = section.name;
            least += &if name.is_empty() { String::new() } else { format!("[{name}]\n") };
            // An adapter needs a model to start from.
            least += if name == "model" { "init = \"model\"\n" } else { "" };
            for setting in section.settings {
                assert!(setting.value().is_some(), "{}", setting.key);
                assert!(section.name.is_empty() || setting.key.starts_with(&format!("{name}.")), "{name}");
                if setting.default == Fallback::Needed {
                    least += &format!("{} = {}\n", setting.name(), setting.example);
                }
            }
        }
        let run = resolved(&least);
        for setting in SECTIONS.iter().flat_map(|section| section.settings) {
            let (table, name) = setting.key.split_once('.').unwrap_or(("", setting.key));
            let found =
                if table.is_empty() { run.get(name) } else { run.get(table).and_then(|t| t.get(name)) };
            match (setting.default, found) {
                (Fallback::Example, Some(found)) => {
                    let same =
                        number(found).is_some() && number(found) == setting.value().as_ref().and_then(number);
                    assert!(same || Some(found) == setting.value().as_ref(), "{}: {found}", setting.key);
                }
                // The initial model of this run stands for it.
                (Fallback::Unset, Some(found)) => assert_eq!(setting.key, "model.init", "{found}"),
                _ => {}
            }
        }
    }

    #[test]
    fn printed_settings_are_settings_and_values_fill_keys() {
        let print = |name| section(name).unwrap().print(&[("data.length", "64".to_owned())], &["data.field"]);
        let names = ["", "model", "data", "validation", "precision", "optimizer", "schedule", "checkpoint"];
        let text = names.map(print).join("\n");
        let run = RunConfig::parse("run.toml", &text, &[]).unwrap();
        assert_eq!((run.data.length, run.seed, run.data.split), (64, 0, None));
        assert!(text.contains("\n# split = ") && text.contains("\n# field = "), "{text}");
    }

    #[test]
    fn values_out_of_range_are_refused_by_name() {
        let table = "[data]\nbatch = 0\n[schedule]\nmin_ratio = 1.5".parse().unwrap();
        assert_eq!(first_fault(&table), Some(("data.batch", "0".to_owned(), "1 or more".to_owned())));
        let table = "[schedule]\nmin_ratio = nan".parse().unwrap();
        assert_eq!(first_fault(&table).unwrap().2, "0 to 1");
        let table = "[optimizer]\nlr = -1".parse().unwrap();
        assert_eq!(first_fault(&table), None);
    }
}
