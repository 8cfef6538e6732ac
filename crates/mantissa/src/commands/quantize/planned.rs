//! Plan of `quantize` from its arguments.

use anyhow::Result;
use mantissa_model::Products;
use mantissa_num::Rounding;
use mantissa_quant::{Importance, Options, Plan, Recipe};
use mantissa_store::DEFAULT_SHARD_BYTES;
use mantissa_store::convention::ModelFiles;

use super::args::{Args, Factors, Round};
use super::request::Request;
use crate::commands::lint;
use crate::context::Context;
use crate::error::BadInput;

/// Makes the plan, and refuses one whose output an engine of the arguments would not run.
pub(super) fn plan(
    args: &Args,
    source: &ModelFiles,
    mut recipe: Recipe,
    options: Options,
    context: &Context,
) -> Result<Plan> {
    let container = options.container.unwrap_or_else(|| recipe.container());
    args.tables.apply(&mut recipe, source, container)?;
    let plan = Plan::new(source, recipe, options)?;
    lint::check_plan(&plan, source, &args.targets, context)?;
    Ok(plan)
}

/// Makes the options of the plan.
pub(super) fn options(
    args: &Args,
    request: &Request,
    source: &ModelFiles,
    context: &Context,
) -> Result<Options> {
    let rounding = match args.round {
        Round::Nearest => Rounding::NearestEven,
        Round::Stochastic => Rounding::Stochastic { seed: context.seed },
    };
    let calibration = request.calibration(args);
    let loaded = calibration.load_apart(source, args.measure.split(), args.hold_out, context)?;
    if loaded.is_none() && (args.hold_out > 0 || args.traffic.is_some()) {
        let option = if args.hold_out > 0 { "--hold-out" } else { "--traffic" };
        let allowed = "--calibration or --calibration-tokens with it";
        return Err(BadInput::new(option, "neither", allowed).into());
    }
    let (calibration, held_out) = loaded.unzip();
    Ok(Options {
        threads: context.threads,
        container: request.format,
        max_shard_bytes: args.max_shard_size.unwrap_or(DEFAULT_SHARD_BYTES),
        max_gguf_bytes: args.max_shard_size,
        rounding,
        calibration,
        held_out: held_out.unwrap_or_default(),
        products: match args.calibration_dtype {
            Factors::F32 => Products::F32,
            Factors::Bf16 => Products::Bf16,
        },
        route_all_experts: args.route_all_experts,
        importance: args.imatrix.as_deref().map(Importance::read).transpose()?,
        rebuild: Some(request.rebuild(args, context)?),
        ..Options::default()
    })
}
