//! mlx-lm.

use super::super::subject::Kind;
use super::super::{Check, Rule, Server, Severity};
use super::sources::MLX_OPS;

use Kind::{IntWeights, Nvfp4};
use Server::Mlx;
use Severity::{Refused, Wrong};

const MLX_LM: &str = "ml-explore/mlx-lm mlx_lm/utils.py (load_model, _transform_awq_weights) @d78bf58e";

pub(super) const RULES: &[Rule] = &[
    Rule {
        id: "mlx-convention",
        servers: &[Mlx],
        conventions: &[],
        severity: Refused,
        requires: "mlx's own tensors, or awq, gptq, compressed-tensors or mxfp4, which mlx-lm converts as it loads",
        check: Check::Convention(&["dense", "mlx", "awq", "gptq", "compressed-tensors", "mxfp4"]),
        source: MLX_LM,
        cure: "mlx_lm.convert from the dense model",
    },
    Rule {
        id: "mlx-bits",
        servers: &[Mlx],
        conventions: &["gptq", "awq"],
        severity: Refused,
        requires: "integers of 4 bits",
        check: Check::Bits { symmetric: &[4], asymmetric: &[4] },
        source: MLX_LM,
        cure: "mlx_lm.convert from the dense model",
    },
    Rule {
        id: "mlx-affine-bits",
        servers: &[Mlx],
        conventions: &["mlx"],
        severity: Refused,
        requires: "integers of 2, 3, 4, 5, 6 or 8 bits",
        check: Check::Bits { symmetric: &[2, 3, 4, 5, 6, 8], asymmetric: &[2, 3, 4, 5, 6, 8] },
        source: MLX_OPS,
        cure: "another width",
    },
    Rule {
        id: "mlx-groups",
        servers: &[Mlx],
        conventions: &["mlx", "gptq", "awq"],
        severity: Refused,
        requires: "groups of 32, 64 or 128",
        check: Check::Groups { sizes: &[32, 64, 128], channel: false, other_in_f16: false },
        source: MLX_OPS,
        cure: "groups of 32, 64 or 128",
    },
    Rule {
        id: "mlx-act-order",
        servers: &[Mlx],
        conventions: &["gptq"],
        severity: Refused,
        requires: "no g_idx",
        check: Check::NoActOrder,
        source: MLX_LM,
        cure: "quantize with act-order and static groups",
    },
    Rule {
        id: "mlx-ct-bits",
        servers: &[Mlx],
        conventions: &["compressed-tensors"],
        severity: Wrong,
        requires: "NVFP4, or int4 in groups of 32, which every other format is taken for",
        check: Check::Kinds(&[Nvfp4, IntWeights]),
        source: MLX_LM,
        cure: "mlx_lm.convert from the dense model",
    },
    Rule {
        id: "mlx-ct-width",
        servers: &[Mlx],
        conventions: &["compressed-tensors"],
        severity: Wrong,
        requires: "integers of 4 bits, which every width is taken for",
        check: Check::Bits { symmetric: &[4], asymmetric: &[] },
        source: MLX_LM,
        cure: "mlx_lm.convert from the dense model",
    },
    Rule {
        id: "mlx-ct-groups",
        servers: &[Mlx],
        conventions: &["compressed-tensors"],
        severity: Wrong,
        requires: "groups of 32, which every size is taken for",
        check: Check::Groups { sizes: &[32], channel: false, other_in_f16: false },
        source: MLX_LM,
        cure: "mlx_lm.convert from the dense model",
    },
];
