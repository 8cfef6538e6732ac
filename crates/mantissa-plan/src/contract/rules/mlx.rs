//! Rules of mlx-lm.

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
        requires: "mlx tensors, or awq, gptq, compressed-tensors or mxfp4, which mlx-lm converts at load",
        check: Check::Convention(&["dense", "mlx", "awq", "gptq", "compressed-tensors", "mxfp4"]),
        source: MLX_LM,
        fix: "run mlx_lm.convert on the dense model",
    },
    Rule {
        id: "mlx-bits",
        servers: &[Mlx],
        conventions: &["gptq", "awq"],
        severity: Refused,
        requires: "4-bit integers",
        check: Check::Bits { symmetric: &[4], asymmetric: &[4] },
        source: MLX_LM,
        fix: "run mlx_lm.convert on the dense model",
    },
    Rule {
        id: "mlx-affine-bits",
        servers: &[Mlx],
        conventions: &["mlx"],
        severity: Refused,
        requires: "2, 3, 4, 5, 6 or 8-bit integers",
        check: Check::Bits { symmetric: &[2, 3, 4, 5, 6, 8], asymmetric: &[2, 3, 4, 5, 6, 8] },
        source: MLX_OPS,
        fix: "use another bit width",
    },
    Rule {
        id: "mlx-groups",
        servers: &[Mlx],
        conventions: &["mlx", "gptq", "awq"],
        severity: Refused,
        requires: "groups of 32, 64 or 128",
        check: Check::Groups { sizes: &[32, 64, 128], channel: false, other_in_f16: false },
        source: MLX_OPS,
        fix: "use groups of 32, 64 or 128",
    },
    Rule {
        id: "mlx-act-order",
        servers: &[Mlx],
        conventions: &["gptq"],
        severity: Refused,
        requires: "no g_idx",
        check: Check::NoActOrder,
        source: MLX_LM,
        fix: "quantize with act-order and static groups",
    },
    Rule {
        id: "mlx-ct-bits",
        servers: &[Mlx],
        conventions: &["compressed-tensors"],
        severity: Wrong,
        requires: "NVFP4, or int4 with groups of 32: other formats are read as one of these",
        check: Check::Kinds(&[Nvfp4, IntWeights]),
        source: MLX_LM,
        fix: "run mlx_lm.convert on the dense model",
    },
    Rule {
        id: "mlx-ct-width",
        servers: &[Mlx],
        conventions: &["compressed-tensors"],
        severity: Wrong,
        requires: "4-bit integers: other widths are read as 4-bit",
        check: Check::Bits { symmetric: &[4], asymmetric: &[] },
        source: MLX_LM,
        fix: "run mlx_lm.convert on the dense model",
    },
    Rule {
        id: "mlx-ct-groups",
        servers: &[Mlx],
        conventions: &["compressed-tensors"],
        severity: Wrong,
        requires: "groups of 32: other sizes are read as 32",
        check: Check::Groups { sizes: &[32], channel: false, other_in_f16: false },
        source: MLX_LM,
        fix: "run mlx_lm.convert on the dense model",
    },
];
