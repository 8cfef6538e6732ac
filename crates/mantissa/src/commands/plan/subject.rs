//! Model and hardware that a question is about: flags of `plan` and `explain`.

use std::path::Path;

use anyhow::Result;
use mantissa_advise::shape;
use mantissa_model::{ModelConfig, find_head, load_config, read_json};
use mantissa_plan::shape::ModelShape;
use mantissa_store::Paths;

use super::super::model::{self, ModelPath};
use crate::context::Context;
use crate::error::BadInput;

/// Model and hardware.
#[derive(clap::Args)]
pub struct Subject {
    /// Model folder, .gguf file, config.json, or demo
    model: Option<ModelPath>,
    /// Size in place of a model: 32B, 30B-A3B, or a name
    ///
    /// Takes the published shape nearest to the number of parameters, such as that of Qwen2.5-32B, and says which.
    #[arg(long, value_name = "N", conflicts_with = "model")]
    params: Option<String>,
    /// Hardware, such as h100 or rtx4090 [default: this CPU]
    ///
    /// A name (mantissa plan --hardware list shows all); this (the limits of this CPU are measured, in about a
    /// second); a JSON report of mantissa bench; or figures: bandwidth=1008GB/s,memory=24GB,bf16=165TFLOPS with the
    /// dense rates of the other units (f32, f16, fp8, fp4, int8, int4) where there are any, name=, link=, maker= and sm=.
    #[arg(long, value_name = "NAME", default_value = super::device::THIS, hide_default_value = true)]
    hardware: String,
}

impl Subject {
    /// Adds the paths that it reads.
    pub fn paths(&self, paths: &mut Paths) {
        self.model.iter().for_each(|model| model.paths(paths));
    }

    /// Name of the hardware.
    pub fn hardware(&self) -> &str {
        &self.hardware
    }

    /// Model, if one is given.
    pub fn model(&self) -> Option<&ModelPath> {
        self.model.as_ref()
    }

    /// Reads the sizes of the model.
    ///
    /// # Errors
    /// Neither a model nor a size; a config that is not known; a size that is none.
    pub fn shape(&self, context: &Context) -> Result<ModelShape> {
        match (&self.params, &self.model) {
            (Some(params), _) => Ok(ModelShape::named(params)?),
            (None, Some(model)) => of_model(model, context),
            (None, None) => Err(BadInput::new("MODEL", "none", "a model, a config.json, or --params N")
                .with_fix("mantissa plan --params 8B")
                .into()),
        }
    }

    /// Reads the sizes of the model, or those of an 8 B model if none is given.
    ///
    /// # Errors
    /// As [`shape`](Self::shape).
    pub fn shape_or_usual(&self, context: &Context) -> Result<ModelShape> {
        match (&self.params, &self.model) {
            (None, None) => Ok(ModelShape::named("8B")?),
            _ => self.shape(context),
        }
    }
}

/// Reads the sizes of a model: from its config alone where it has one.
fn of_model(path: &ModelPath, context: &Context) -> Result<ModelShape> {
    let name = path.named().display().to_string();
    let config = match config_at(path)? {
        Some(config) => config,
        None => load_config(&model::open(path, context)?)?,
    };
    Ok(shape::of_config(&name, &config))
}

/// Reads a config.json, or that of a folder; `None` if there is none.
fn config_at(path: &ModelPath) -> Result<Option<ModelConfig>> {
    let is_json = path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("json"));
    let file = if is_json { path.to_path_buf() } else { Path::join(path, "config.json") };
    let Some(value) = read_json(&file)? else {
        let missing = is_json || !path.exists();
        let error =
            || BadInput::new(file.display().to_string(), "no such file", "a config.json or a model folder");
        return if missing {
            Err(error().with_fix("--params N plans without a model").into())
        } else {
            Ok(None)
        };
    };
    let mut config = ModelConfig::from_json(&value, &file.display().to_string())?;
    // Weights beside it may have a head of their own in spite of it.
    if config.states_tied
        && let Ok(files) = model::open_quietly(path)
    {
        config.find_names(|name| files.has(name));
        find_head(&mut config, &files)?;
    }
    Ok(Some(config))
}

/// Returns the context: as asked, which the model must have, or `usual`.
///
/// # Errors
/// The model's context is shorter.
pub fn context_of(asked: Option<u64>, usual: u64, shape: &ModelShape) -> Result<u64> {
    match asked {
        Some(context) if context > shape.context && shape.assumed.is_none() => {
            let found = format!("{context}");
            Err(BadInput::new(
                "--context",
                found,
                format!("at most the model's context of {}", shape.context),
            )
            .with_fix(format!("--context {}", shape.context))
            .into())
        }
        Some(context) => Ok(context),
        None => Ok(usual.min(shape.context)),
    }
}
