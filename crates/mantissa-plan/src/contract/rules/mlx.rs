//! Rules of mlx-lm.

use super::super::schemes::{Accepted, Inputs, Scales};
use super::super::subject::Kind;
use super::super::{Check, Rule, Server, Severity};
use super::sources::MLX_OPS;

use Inputs::None;
use Kind::{IntWeights, Mxfp4, Mxfp8, Nvfp4};
use Scales::Group;
use Server::Mlx;
use Severity::Refused;

const MLX_LM: &str = "mlx-lm 0.32.2 mlx_lm/utils.py (load_model, _transform_awq_weights)";

pub(super) const RULES: &[Rule] = &[
    Rule {
        id: "mlx-convention",
        servers: &[Mlx],
        conventions: &[],
        severity: Refused,
        requires: "mlx tensors, or awq or mxfp4, which mlx-lm converts at load (compressed-tensors only in DeepSeek-V3's architecture, gptq not: it ends at g_idx)",
        check: Check::Convention(&["dense", "mlx", "awq", "mxfp4"]),
        source: MLX_LM,
        fix: "use mlx",
    },
    Rule {
        id: "mlx-schemes",
        servers: &[Mlx],
        conventions: &["mlx"],
        severity: Refused,
        requires: "integers in groups, MXFP4, MXFP8 or NVFP4 with unquantized inputs",
        check: Check::Schemes(&[
            Accepted::new(IntWeights, &[Group], &[None]),
            Accepted::new(Mxfp4, &[], &[None]),
            Accepted::new(Mxfp8, &[], &[None]),
            Accepted::new(Nvfp4, &[], &[None]),
        ]),
        source: MLX_OPS,
        fix: "use integers in groups of 64",
    },
    Rule {
        id: "mlx-bits",
        servers: &[Mlx],
        conventions: &["awq"],
        severity: Refused,
        requires: "4-bit integers",
        check: Check::Bits { symmetric: &[4], asymmetric: &[4] },
        source: MLX_LM,
        fix: "use int4",
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
        conventions: &["mlx", "awq"],
        severity: Refused,
        requires: "groups of 32, 64 or 128",
        check: Check::Groups { sizes: &[32, 64, 128], channel: false, other_in_f16: false },
        source: MLX_OPS,
        fix: "use groups of 32, 64 or 128",
    },
    Rule {
        id: "mlx-mxfp4",
        servers: &[Mlx],
        conventions: &["mxfp4"],
        severity: Refused,
        requires: "MXFP4",
        check: Check::Kinds(&[Mxfp4]),
        source: MLX_LM,
        fix: "use MXFP4",
    },
];
