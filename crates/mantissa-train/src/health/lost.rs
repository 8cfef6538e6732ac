//! Operands that lose their signal when they are rounded.
//!
//! Two observers find them. In every step, each quantized operand is compared with 0 ([`LostSignals`]): the first value that
//! is not 0 ends the comparison, so it costs nothing where an operand is sound. A step with telemetry has the
//! signal-to-quantization-noise ratio of every rounding.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::Mutex;

use mantissa_model::{LinearKind, ModelConfig};
use serde::{Deserialize, Serialize};

use super::{OperandKind, OperandPlace, Operator, lock, operator};
use crate::policy::{Gemm, Policy, Side};

/// Signal-to-quantization-noise ratio in dB up to which an operand has lost its signal. At 0 dB the error is as large as
/// the operand: zeros in its place would be no worse. At 2 dB it is 80 % of it. In runs of a small model the coarsest formats
/// keep 6.2 dB (2 bits in groups of 32) and 5.6 dB (ternary), and scales that are a step late 4.8 dB.
pub const LOST_DB: f64 = 2.0;

/// Share of the non-zero values of an operand in a plain dtype from which on, if they become 0, its signal is lost. Values
/// that stay are 20 dB above the others at least, where 1 in 100 is left.
pub const LOST_SHARE: f64 = 0.99;

/// Operand that lost its signal when it was rounded.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LostOperand {
    /// Module name of the linear layer; of an input that several read, the first.
    pub linear: String,
    /// Product and operand, such as `dgrad dy`.
    pub operand: String,
    /// Its format.
    pub format: String,
    /// Signal-to-quantization-noise ratio in dB; absent if it was not measured, because every value became 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sqnr_db: Option<f64>,
}

/// Operands of a step that lost their signal, with the ratio where it was measured.
#[derive(Debug, Default)]
pub(crate) struct LostSignals(Mutex<BTreeMap<OperandPlace, Option<f64>>>);

impl LostSignals {
    /// Forgets all.
    pub(crate) fn clear(&self) {
        lock(&self.0).clear();
    }

    /// Notes that the quantized operand at `place` is 0 throughout, though what it was made from is not.
    pub(crate) fn note(&self, place: OperandPlace) {
        lock(&self.0).entry(place).or_default();
    }

    /// Returns the places as numbers: layer, linear layer, matmul, side.
    pub(crate) fn places(&self) -> Vec<[u64; 4]> {
        let number = |(layer, kind, gemm, side): &OperandPlace| {
            [*layer as u64, kind.index() as u64, *gemm as u64, *side as u64]
        };
        lock(&self.0).keys().map(number).collect()
    }

    /// Notes the operand at a place that another rank returned; `kinds` are those of the model's linear layers.
    pub(crate) fn note_place(
        &self,
        [layer, kind, gemm, side]: [u64; 4],
        kinds: impl IntoIterator<Item = LinearKind>,
    ) {
        let kind = kinds.into_iter().find(|known| known.index() as u64 == kind);
        let gemm = [Gemm::Fprop, Gemm::Dgrad, Gemm::Wgrad].into_iter().find(|known| *known as u64 == gemm);
        let side = [Side::Left, Side::Right].into_iter().find(|known| *known as u64 == side);
        if let (Some(kind), Some(gemm), Some(side)) = (kind, gemm, side) {
            self.note((usize::try_from(layer).unwrap_or(usize::MAX), kind, gemm, side));
        }
    }

    /// Notes a measured loss.
    pub(super) fn note_measured(&self, place: OperandPlace, sqnr_db: Option<f64>) {
        lock(&self.0).insert(place, sqnr_db);
    }

    /// Lists the operands under `policy` in the order of a step.
    pub(crate) fn operands(&self, policy: &Policy, config: &ModelConfig) -> Vec<LostOperand> {
        let mut places: Vec<_> = lock(&self.0).iter().map(|(place, sqnr)| (*place, *sqnr)).collect();
        places.sort_by_key(|((layer, kind, gemm, side), _)| match gemm {
            // The forward goes from the first layer on, the backward from the last linear layer of the last one on.
            Gemm::Fprop => (false, *layer, Some(*kind), None, *gemm, *side),
            Gemm::Dgrad | Gemm::Wgrad => (true, usize::MAX - layer, None, Some(Reverse(*kind)), *gemm, *side),
        });
        let lost = |&((layer, kind, gemm, side), sqnr_db): &(OperandPlace, Option<f64>)| {
            let at = operator((layer, kind));
            let linear = match at {
                Operator::Linear(layer, _) => policy.linear_of(layer, config.num_hidden_layers),
                _ => std::borrow::Cow::Borrowed(&policy.head),
            };
            let (operand, product) = of_side(gemm, side);
            let (name, rounded) = operand.products(&linear)[product];
            let format = rounded.scheme.to_string();
            LostOperand { linear: at.module(config), operand: name.to_owned(), format, sqnr_db }
        };
        places.iter().map(lost).collect()
    }
}

/// Returns the operand at a side of a matmul, and its index in [`OperandKind::products`].
pub(super) fn of_side(gemm: Gemm, side: Side) -> (OperandKind, usize) {
    match (gemm, side) {
        (Gemm::Fprop, Side::Left) => (OperandKind::X, 0),
        (Gemm::Wgrad, Side::Right) => (OperandKind::X, 1),
        (Gemm::Fprop, Side::Right) => (OperandKind::W, 0),
        (Gemm::Dgrad, Side::Right) => (OperandKind::W, 1),
        (Gemm::Dgrad, Side::Left) => (OperandKind::Dy, 0),
        (Gemm::Wgrad, Side::Left) => (OperandKind::Dy, 1),
    }
}

/// Returns the matmul and the side of an operand with this index in [`OperandKind::products`].
pub(super) fn side_of(operand: OperandKind, product: usize) -> (Gemm, Side) {
    match (operand, product) {
        (OperandKind::X, 0) => (Gemm::Fprop, Side::Left),
        (OperandKind::X, _) => (Gemm::Wgrad, Side::Right),
        (OperandKind::W, 0) => (Gemm::Fprop, Side::Right),
        (OperandKind::W, _) => (Gemm::Dgrad, Side::Right),
        (OperandKind::Dy, 0) => (Gemm::Dgrad, Side::Left),
        (OperandKind::Dy, _) => (Gemm::Wgrad, Side::Left),
    }
}

#[cfg(test)]
mod tests {
    use mantissa_model::LinearKind;

    use super::*;
    use crate::health::tests::config;

    #[test]
    fn operands_are_listed_in_the_order_of_a_step() {
        let (lost, policy) = (LostSignals::default(), Policy::fp32());
        for (layer, gemm, side) in [
            (0, Gemm::Dgrad, Side::Left),
            (3, Gemm::Wgrad, Side::Left),
            (2, Gemm::Fprop, Side::Right),
            (1, Gemm::Fprop, Side::Left),
        ] {
            lost.note((layer, LinearKind::Down, gemm, side));
            lost.note((layer, LinearKind::Down, gemm, side));
        }
        let found = lost.operands(&policy, &config());
        let named: Vec<_> = found.iter().map(|lost| (lost.linear.as_str(), lost.operand.as_str())).collect();
        assert_eq!(
            named,
            [
                ("model.layers.1.mlp.down_proj", "fprop x"),
                ("model.layers.2.mlp.down_proj", "fprop w"),
                ("model.layers.3.mlp.down_proj", "wgrad dy"),
                ("model.layers.0.mlp.down_proj", "dgrad dy"),
            ]
        );
        // Within a layer the backward goes from its end.
        lost.note((3, LinearKind::Q, Gemm::Dgrad, Side::Left));
        lost.note_measured((3, LinearKind::Down, Gemm::Wgrad, Side::Left), Some(0.25));
        let found = lost.operands(&policy, &config());
        assert_eq!((&found[2].linear[..], found[2].sqnr_db), ("model.layers.3.mlp.down_proj", Some(0.25)));
        assert_eq!((&found[3].linear[..], found[3].sqnr_db), ("model.layers.3.self_attn.q_proj", None));
        for gemm in Gemm::ALL {
            for side in Side::ALL {
                let (operand, product) = of_side(gemm, side);
                assert_eq!(side_of(operand, product), (gemm, side));
            }
        }
        lost.clear();
        assert!(lost.operands(&policy, &config()).is_empty());
    }
}
