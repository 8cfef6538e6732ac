//! Budget of a fit: bits per weight, bytes of the tensors, or the memory of a device that serves some sequences.

use std::fmt;

use mantissa_plan::hardware::Device;
use mantissa_plan::memory;
use mantissa_plan::parallel::Split;
use mantissa_plan::precision::Kv;
use mantissa_plan::shape::ModelShape;
use mantissa_quant::Plan;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::family::Candidate;
use crate::error::{BadInput, Result};
use crate::text::{bytes, parse_bytes, parse_count};

/// Upper bound of the size.
#[derive(Clone, Debug, PartialEq)]
pub enum Budget {
    /// Bits per weight of the quantized layers.
    BitsPerWeight(f64),
    /// Bytes of all tensors.
    Bytes(u64),
    /// Bytes of tensors, KV cache and activations.
    Serving(Box<Serving>),
}

/// Memory in which a model serves some sequences.
#[derive(Clone, Debug, PartialEq)]
pub struct Serving {
    /// Bytes asked for.
    memory: u64,
    /// Tokens of each sequence.
    context: u64,
    /// Number of sequences.
    sequences: u64,
    /// Device whose usable memory also bounds the size.
    device: Option<Device>,
}

impl fmt::Display for Serving {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} with {} context", bytes(self.memory), self.context)?;
        if self.sequences != 1 {
            write!(f, " and {} sequences", self.sequences)?;
        }
        self.device.iter().try_for_each(|device| write!(f, " on {}", device.name))
    }
}

/// Budget as a user writes it, with its meaning. Serialized as its text.
#[derive(Clone, Debug, PartialEq)]
pub struct BudgetText {
    text: String,
    budget: Budget,
}

impl BudgetText {
    /// Parses a budget.
    ///
    /// # Errors
    /// A message with the accepted forms.
    pub fn parse(text: &str) -> Result<Self, String> {
        Ok(BudgetText { text: text.to_owned(), budget: parse(text)? })
    }
}

impl std::ops::Deref for BudgetText {
    type Target = Budget;

    fn deref(&self) -> &Budget {
        &self.budget
    }
}

impl Serialize for BudgetText {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.text)
    }
}

impl<'de> Deserialize<'de> for BudgetText {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        BudgetText::parse(&String::deserialize(deserializer)?).map_err(serde::de::Error::custom)
    }
}

/// Parses `4.5bpw`, `6GB`, or `24GB with 32k context and 8 sequences on rtx4090`.
fn parse(text: &str) -> Result<Budget, String> {
    let wrong = || {
        format!(
            "expected bits per weight such as 4.5bpw, a size such as 6GB, or \"24GB with 32k context and 8 sequences on rtx4090\", got \"{text}\""
        )
    };
    if let Some(bits) = text.strip_suffix("bpw") {
        let bits = bits.trim().parse().ok().filter(|bits: &f64| bits.is_finite() && *bits > 0.0);
        return bits.map(Budget::BitsPerWeight).ok_or_else(wrong);
    }
    let (rest, device) = match text.split_once(" on ") {
        Some((rest, name)) => (rest, Some(Device::named(name.trim()).map_err(|error| error.to_string())?)),
        None => (text, None),
    };
    let (size, load) = rest.split_once(" with ").map_or((rest, None), |(size, load)| (size, Some(load)));
    let memory = parse_bytes(size.trim()).map_err(|_| wrong())?;
    let Some(load) = load else {
        return if device.is_none() { Ok(Budget::Bytes(memory)) } else { Err(wrong()) };
    };
    let (mut context, mut sequences) = (None, None);
    for part in load.split(" and ") {
        let (count, what) = part.trim().split_once(' ').ok_or_else(wrong)?;
        let field = match what.trim() {
            "context" => &mut context,
            "sequence" | "sequences" => &mut sequences,
            _ => return Err(wrong()),
        };
        if field.replace(parse_count(count).map_err(|_| wrong())?).is_some() {
            return Err(wrong());
        }
    }
    let serving =
        Serving { memory, context: context.ok_or_else(wrong)?, sequences: sequences.unwrap_or(1), device };
    Ok(Budget::Serving(Box::new(serving)))
}

/// Bytes of a model that serves.
#[derive(Clone, Debug, Serialize)]
pub struct Served {
    /// Bytes that may be used.
    memory: u64,
    /// Tensors of the model.
    weights: u64,
    /// Scheme of the KV caches.
    kv: Candidate,
    /// KV caches of all sequences.
    kv_bytes: u64,
    /// Activations and logits.
    activations: u64,
    /// Tokens of each sequence.
    context: u64,
    /// Number of sequences.
    sequences: u64,
}

impl fmt::Display for Served {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Served { memory, weights, kv, kv_bytes, activations, context, sequences } = self;
        let sum = weights + kv_bytes + activations;
        write!(f, "{} of {}: weights {}, ", bytes(sum), bytes(*memory), bytes(*weights))?;
        write!(f, "KV cache {} in {} ({sequences} × {context} tokens), ", bytes(*kv_bytes), kv.scheme)?;
        write!(f, "activations {}", bytes(*activations))
    }
}

impl Serving {
    /// Returns the bytes that may be used: those asked for, at most what the device leaves to a model.
    pub fn memory(&self) -> u64 {
        self.device.as_ref().map_or(self.memory, |device| self.memory.min(device.available().max(0.0) as u64))
    }

    /// Returns the bytes of the KV caches under `kv`.
    pub fn kv_bytes(&self, kv: &Kv, shape: &ModelShape) -> u64 {
        (self.sequences as f64 * kv.bytes_of_sequence(shape, self.context)) as u64
    }

    /// Returns the bytes of activations and logits, which no scheme of weights or KV cache changes.
    pub fn activations(&self, shape: &ModelShape) -> u64 {
        memory::activation_bytes(shape, self.context, self.sequences, Split::ONE) as u64
    }
}

impl Budget {
    /// Returns the budget in bits of what is chosen: the quantized layers, and the KV cache of [`Serving`].
    ///
    /// # Errors
    /// A size that what is not chosen exceeds.
    pub fn limit(&self, plan: &Plan, shape: &ModelShape) -> Result<u64> {
        let (all, activations) = match self {
            Budget::BitsPerWeight(bits) => return Ok((bits * plan.linear_weights() as f64) as u64),
            Budget::Bytes(all) => (*all, 0),
            Budget::Serving(serving) => (serving.memory(), serving.activations(shape)),
        };
        let kept = plan.output_bytes().saturating_sub(plan.linear_bits() / 8);
        let left = all.checked_sub(kept.saturating_add(activations)).ok_or_else(|| {
            let with = if activations == 0 {
                String::new()
            } else {
                format!(" and {} of activations", bytes(activations))
            };
            let allowed = format!("more than {}, the size of the tensors that are kept{with}", bytes(kept));
            BadInput::new("--budget", bytes(all), allowed)
        })?;
        Ok(left.saturating_mul(8))
    }

    /// Returns the bytes of a model of `weights` bytes whose KV cache is `kv`; `None` unless the budget is memory.
    pub fn served(&self, kv: Option<Candidate>, shape: &ModelShape, weights: u64) -> Option<Served> {
        let (Budget::Serving(serving), Some(kv)) = (self, kv) else { return None };
        Some(Served {
            memory: serving.memory(),
            weights,
            kv_bytes: kv.bits / 8,
            kv,
            activations: serving.activations(shape),
            context: serving.context,
            sequences: serving.sequences,
        })
    }

    /// Returns the error of a `limit` in bits that even the `least` choice exceeds.
    pub fn exceeded(&self, plan: &Plan, limit: u64, least: u64) -> BadInput {
        let weights = plan.linear_weights();
        let bpw = |bits: u64| format!("{:.3} bits per weight", bits as f64 / weights.max(1) as f64);
        match self {
            Budget::Serving(serving) => {
                let missing = bytes(least.saturating_sub(limit).div_ceil(8));
                let allowed = format!(
                    "{missing} more than the {} that may be used, for the smallest schemes of weights and KV cache",
                    bytes(serving.memory())
                );
                BadInput::new("--budget", serving.to_string(), allowed)
                    .with_fix("ask for a shorter context, fewer sequences, or smaller --schemes")
            }
            _ => {
                let allowed = format!("at least {}, the size under the smallest scheme", bpw(least));
                BadInput::new("--budget", bpw(limit), allowed)
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn load(text: &str) -> Serving {
        let found = match parse(text) {
            Ok(Budget::Serving(serving)) => Some(*serving),
            _ => None,
        };
        found.unwrap()
    }

    #[test]
    fn budgets_are_bits_per_weight_sizes_or_loads() {
        assert_eq!(parse("4.5bpw"), Ok(Budget::BitsPerWeight(4.5)));
        assert_eq!(parse("6GB"), Ok(Budget::Bytes(6_000_000_000)));
        assert_eq!(parse("6 GB"), Ok(Budget::Bytes(6_000_000_000)));
        for wrong in
            ["bpw", "-1bpw", "nanbpw", "many", "", "6GB on rtx4090", "6GB with 3 dogs", "6GB with 8k"]
        {
            assert!(parse(wrong).unwrap_err().contains("4.5bpw"), "{wrong}");
        }
        let eight = load("24 GB with 32k context and 8 sequences on rtx4090");
        assert_eq!((eight.memory, eight.context, eight.sequences), (24_000_000_000, 32_768, 8));
        // A device keeps a part of its memory for itself.
        let usable = Device::named("rtx4090").unwrap().available() as u64;
        assert_eq!(eight.memory(), usable.min(24_000_000_000));
        assert_eq!(load("24GB with 8 sequences and 32k context on rtx4090"), eight);
        let one = load("2GB with 8192 context");
        assert_eq!((one.memory(), one.context, one.sequences), (2_000_000_000, 8192, 1));
        assert!(parse("24GB with 32k context on rtx9999").unwrap_err().contains("rtx9999"));
        assert!(parse("24GB with 32k context and 16k context").is_err());
    }

    #[test]
    fn the_kv_cache_of_sequences_counts() {
        let shape = ModelShape::named("Llama-3.1-8B").unwrap();
        let eight = load("24GB with 32k context and 8 sequences");
        // 32 layers × 8 heads × 128 × 2 × 2 bytes × 32,768 tokens × 8 sequences.
        let f16 = Kv::named("f16").unwrap();
        assert_eq!(eight.kv_bytes(&f16, &shape), 131_072 * 32_768 * 8);
        assert!(eight.activations(&shape) > 0);
    }
}
