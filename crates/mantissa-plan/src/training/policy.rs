//! Bytes that the policies of `mantissa train` store for each parameter. A test of the trainer holds it to what the trainer allocates.

use serde::Serialize;

use crate::shape::ModelShape;

/// Bytes that a policy stores for each parameter, beside the moments of the optimizer.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct PolicyStorage {
    /// Weights of the decoder's linear layers that the forward reads.
    pub linear: f64,
    /// Scales of a row of those.
    pub row: f64,
    /// Other weights.
    pub others: f64,
    /// Master copy.
    pub master: f64,
    /// Gradients.
    pub gradients: f64,
}

/// Stores weights, a master copy and gradients of so many bytes.
const fn plain(weights: f64, master: f64, gradients: f64) -> PolicyStorage {
    PolicyStorage { linear: weights, row: 0.0, others: weights, master, gradients }
}

/// f32 weights, which are their own master and are rounded anew for every product, and f32 gradients.
const ROUNDED_ANEW: PolicyStorage = plain(4.0, 0.0, 4.0);

/// Storage of the policies that do not keep [`ROUNDED_ANEW`].
const STORAGE: [(&str, PolicyStorage); 6] = [
    ("fp16", plain(2.0, 4.0, 4.0)),
    ("bf16", plain(2.0, 4.0, 4.0)),
    ("bf16-remainder", plain(2.0, 2.0, 4.0)),
    ("bf16-pure", plain(2.0, 0.0, 2.0)),
    ("bf16-pure-sr", plain(2.0, 0.0, 2.0)),
    // Codes and an f32 scale a row.
    ("int8-sr", PolicyStorage { linear: 1.0, row: 4.0, ..ROUNDED_ANEW }),
];

/// Returns what the policy of a name stores.
pub fn policy_storage(name: &str) -> PolicyStorage {
    STORAGE.iter().find(|(known, _)| *known == name).map_or(ROUNDED_ANEW, |(_, storage)| *storage)
}

impl PolicyStorage {
    /// Bytes of `linear` weights of linear layers in `rows` rows and of `others`, with moments of so many bytes each.
    pub fn bytes(&self, linear: u64, rows: u64, others: u64, moments: f64) -> f64 {
        let all = (linear + others) as f64;
        self.linear * linear as f64
            + self.row * rows as f64
            + self.others * others as f64
            + (self.master + self.gradients + moments) * all
    }

    /// Bytes for each parameter of a model, the mean of all.
    pub fn bytes_per_parameter(&self, shape: &ModelShape, moments: f64) -> f64 {
        let linear = shape.linear_weights();
        let rows = shape.matrices.iter().map(|m| m.count * m.rows as u64).sum();
        let others = shape.parameters() - linear;
        self.bytes(linear, rows, others, moments) / (shape.parameters().max(1)) as f64
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// With f32 moments (8 bytes): f32 4 + 4 + 8; 16-bit weights 2, f32 master 4, f32 gradients 4: 18; a remainder of 2 in
    /// place of the master: 16; pure bf16 with bf16 moments 2 + 2 + 4 = 8. INT8 weights 1 and 4 bytes a row, f32 gradients:
    /// Llama-2-7B has 32 layers of 4 × 4096 + 2 × 11,008 + 4096 rows, and two tables of 32,000 × 4096 and 65 norms of 4096 in
    /// f32.
    #[test]
    fn bytes_are_those_of_what_is_stored() {
        let shape = ModelShape::named("Llama-2-7B").unwrap();
        let of = |name: &str, moments| policy_storage(name).bytes_per_parameter(&shape, moments);
        for (name, moments, bytes) in [
            ("fp32", 8.0, 16.0),
            ("bf16", 8.0, 18.0),
            ("fp16", 8.0, 18.0),
            ("bf16-remainder", 8.0, 16.0),
            ("bf16-pure-sr", 4.0, 8.0),
            ("fp8-blockwise", 8.0, 16.0),
            ("quartet", 8.0, 16.0),
            ("nvfp4", 8.0, 16.0),
        ] {
            assert_eq!(of(name, moments), bytes, "{name}");
        }
        let rows = 32.0 * (4.0 * 4096.0 + 2.0 * 11_008.0 + 4096.0);
        let others = 2.0 * 32_000.0 * 4096.0 + 65.0 * 4096.0;
        let linear = 6_738_415_616.0 - others;
        let right = (linear + 4.0 * rows + 4.0 * others) / (linear + others) + 4.0 + 8.0;
        assert!((of("int8-sr", 8.0) - right).abs() < 1e-9, "{} {right}", of("int8-sr", 8.0));
    }
}
