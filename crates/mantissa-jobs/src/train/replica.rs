//! Model and optimizer of a run, which every rank makes alike from the same settings and files.

use std::path::Path;

use mantissa_model::{ModelConfig, load_config};
use mantissa_store::Manifest;
use mantissa_store::convention::ModelFiles;
use mantissa_train::config::RunConfig;
use mantissa_train::{
    DecayGroups, Formats, Group, Optimizer, Options, ParallelOptions, ParamTable, Parameters, Policy,
    TrainModel, Tuning,
};

use crate::error::{BadInput, Result};
use crate::escape::quoted;

/// Parts of which the model and the optimizer of a run are made.
pub(crate) struct Replica {
    pub(crate) config: ModelConfig,
    /// Model whose weights it starts from.
    pub(crate) init: Option<ModelFiles>,
    pub(crate) options: Options,
    /// Settings of adapters, and the formats of the frozen weights.
    pub(crate) tuning: Option<(Tuning, Formats)>,
    pub(crate) policy: Policy,
    pub(crate) parallel: ParallelOptions,
}

impl Replica {
    /// Resolves the parts of the settings that belong to the model, whose steps use `threads` threads.
    ///
    /// # Errors
    /// Adapters that do not fit the model.
    pub(crate) fn new(
        settings: &RunConfig,
        config: ModelConfig,
        init: Option<ModelFiles>,
        threads: usize,
    ) -> Result<Self> {
        // Settings were validated, so neither default is used.
        let policy = settings.policy().unwrap_or_default();
        let parallel = settings.parallel().unwrap_or_default();
        let options = Options {
            max_tokens: settings.data.batch.saturating_mul(settings.data.length),
            max_len: settings.data.length,
            threads,
            policy: policy.clone(),
        };
        let tuning = match (settings.tuning(), &init) {
            (Some(tuning), Some(files)) => {
                tuning.check(&config)?;
                let formats = tuning.formats(files, &config)?;
                Some((tuning, formats))
            }
            _ => None,
        };
        Ok(Replica { config, init, options, tuning, policy, parallel })
    }

    /// Loads or initializes the model, and makes the optimizer of rank `rank` of `ranks`. Writes nothing, so that weights that
    /// do not fit are found before an old run is removed.
    ///
    /// # Errors
    /// Not enough memory, or weights that cannot be read.
    pub(crate) fn model(
        &self,
        settings: &RunConfig,
        (rank, ranks): (usize, usize),
    ) -> Result<(TrainModel, Optimizer)> {
        let (chosen, recipe) = (&settings.optimizer, settings.optimizer.recipe());
        // Of weights that are divided among ranks the others take no memory here.
        let shard = (self.parallel.zero >= 3 && ranks > 1).then(|| {
            let table = ParamTable::with_scales(&self.config, &self.policy);
            recipe.shards(&table, &self.policy, ranks).swap_remove(rank)
        });
        let params = match (&self.init, &self.tuning) {
            (Some(files), Some((tuning, _))) => {
                Parameters::tuned(files, &self.config, tuning, &self.policy, self.options.threads)?
            }
            (Some(files), None) => {
                Parameters::load_part(files, &self.config, self.policy.initial_weights(), shard)?
            }
            (None, _) => {
                let (std, precision) = (settings.model.std as f32, self.policy.initial_weights());
                Parameters::random_part(&self.config, std, settings.seed, precision, shard)?
            }
        };
        let params = params.with_scales(&self.config, &self.policy)?;
        let optimizer = match self.parallel.zero > 0 && ranks > 1 {
            true => Optimizer::for_rank(&params, &self.policy, &recipe, (rank, ranks))?,
            false => Optimizer::new(&params, &self.policy, &recipe)?,
        };
        let optimizer = optimizer
            .with_decay(&chosen.decay_groups(), params.table())
            .and_then(|optimizer| optimizer.with_rates(&chosen.rate_scales(), params.table()))
            .map_err(|error| BadInput::new(error.key, error.to_string(), DecayGroups::ALLOWED))?;
        let mut model = TrainModel::new(self.config.clone(), params, self.options.clone())?;
        if let Some(factor) = settings.model.balance {
            model.set_balance_factor(factor as f32);
        }
        Ok((model, optimizer))
    }

    /// Makes the only rank of a run; `None` if its steps are those of a single worker.
    ///
    /// # Errors
    /// Not enough memory.
    pub(crate) fn alone(&self, model: &TrainModel, optimizer: &Optimizer) -> Result<Option<Group>> {
        Ok(Group::alone(&self.parallel, model, optimizer)?)
    }
}

/// Opens the initial model in `dir`, whose layers may be quantized if only adapters train.
pub(crate) fn initial(dir: &Path, adapts: bool) -> Result<ModelFiles> {
    let files = ModelFiles::open(dir)?;
    let refused = |found: String, allowed: &str, fix: String| {
        Err(BadInput::new(format!("{}: model.init", dir.display()), found, allowed).with_fix(fix).into())
    };
    let decode = format!("mantissa convert {} --format native --requantize bf16 --out FOLDER", quoted(dir));
    if files.gguf().is_some() {
        let fix = format!("{decode}, and train an adapter on FOLDER; it fits this file too");
        return refused("a GGUF file".to_owned(), "a model folder", fix);
    }
    if files.is_quantized() && !adapts {
        let found = format!("weights in format {}", files.convention_name());
        let fix =
            "set model.init to the folder that it was quantized from, or train an adapter (--adapter lora)";
        return refused(found, "a dense model folder", fix.to_owned());
    }
    if let Some(table) = quantized_table(&files)? {
        let fix = format!("{decode}, which decodes it, and train on FOLDER");
        return refused(format!("a quantized {table}"), "an unquantized embedding and head", fix);
    }
    // The history goes into the trained model's manifest, which is written last; a bad one must fail now.
    Manifest::history(files.dir())?;
    Ok(files)
}

/// Returns the embedding or head of a quantized folder if it is quantized too: training reads both in floats.
fn quantized_table(files: &ModelFiles) -> Result<Option<String>> {
    if !files.is_quantized() {
        return Ok(None);
    }
    let tables = load_config(files)?.tables().into_iter().map(|table| table.module);
    Ok(tables.into_iter().find(|module| !files.is_dense(&format!("{module}.weight"))))
}
