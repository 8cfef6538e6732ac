//! Results of a run: the trained model, or the adapter, the merged model, and its quantized form.

use std::fmt::Display;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use mantissa_eval::divergence;
use mantissa_model::{Batch, Buffers, Decoder};
use mantissa_quant::{Options, Plan, Recipe, Start, run as run_plan};
use mantissa_store::Output;
use mantissa_store::convention::{ModelFiles, native};
use mantissa_train::config::RunConfig;
use mantissa_train::data::TokenFile;
use mantissa_train::data::chat::{Conversations, DefaultTemplate};
use mantissa_train::{TokenizerFiles, TrainError, Trainer};
use serde::Serialize;

use super::run_folder::RunFolder;
use super::setup::{Setup, merged_precision};
use crate::error::Result;
use crate::host::Host;
use crate::run_files::{ADAPTER, BASE, MODEL, QUANTIZED, RunFile, TOKENS};

/// Windows of the training data on which models are compared.
const WINDOWS: u64 = 16;

/// Written results.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Results {
    /// Folder of the trained or merged model.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<PathBuf>,
    /// Folder of the adapter.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub adapter: Option<PathBuf>,
    /// Folder of the base that LoftQ changed with the adapter.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub base: Option<PathBuf>,
    /// Mean KL of the merged model from the adapter form, nats/token.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub merged_kl: Option<f64>,
    /// Folder of the quantized model: merged, or with learned scales.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub quantized: Option<PathBuf>,
    /// Its mean KL from the adapter form or the model in training, nats/token.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub quantized_kl: Option<f64>,
    /// Description of the default chat template that is written for a model without one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub default_template: Option<&'static str>,
    /// Folder of the model that the adapter fits.
    #[serde(skip)]
    pub adapter_base: Option<PathBuf>,
}

impl Results {
    /// Returns the results `names` of the complete run at `run`, with the figures that `about` keeps.
    ///
    /// # Errors
    /// Conversations of the run that cannot be read.
    pub(crate) fn of_complete(
        run: &Path,
        names: &[&str],
        setup: &Setup,
        settings: &RunConfig,
        about: &RunFile,
    ) -> Result<Self> {
        let folder = |name: &str| names.contains(&name).then(|| run.join(name));
        let template = default_template(&run.join(TOKENS), setup, settings)?;
        let (adapter, base) = (folder(ADAPTER), folder(BASE));
        let fits = base.clone().or_else(|| Some(setup.replica.init.as_ref()?.dir().to_owned()));
        Ok(Results {
            model: folder(MODEL),
            adapter_base: fits.filter(|_| adapter.is_some()),
            adapter,
            base,
            merged_kl: about.merged_kl,
            quantized: folder(QUANTIZED),
            quantized_kl: about.quantized_kl,
            default_template: template.map(|template| template.about),
        })
    }

    /// Takes the folder of the quantized model, and measures its KL on `windows` from the trained one.
    fn kl_of_quantized(&mut self, trainer: &mut Trainer, dir: PathBuf, windows: &[Vec<u32>]) -> Result<()> {
        self.quantized_kl = Some(kl(trainer, &dir, windows)?);
        self.quantized = Some(dir);
        Ok(())
    }
}

/// Writes the results of a run that has ended.
///
/// # Errors
/// I/O; a merged model that cannot be quantized or read again.
pub(crate) fn write(
    trainer: &mut Trainer,
    setup: &Setup,
    settings: &RunConfig,
    folder: &RunFolder,
    host: &Host,
) -> Result<Results> {
    let template = default_template(&folder.dir().join(TOKENS), setup, settings)?;
    let text = template.as_ref().map(|template| &*template.text);
    let tokenizer = TokenizerFiles { dir: &setup.vocabulary.dir, template: text };
    let init = setup.replica.init.as_ref().map(ModelFiles::dir);
    let default_template = template.as_ref().map(|template| template.about);
    let mut results = Results { default_template, ..Results::default() };
    let model = folder.result(MODEL);
    let Some(adapter) = &settings.adapter else {
        trainer.export(&model, &setup.config_json, tokenizer, init)?;
        results.model = Some(model.path().to_owned());
        let scales = trainer.model().learned_scales();
        if !scales.is_empty() {
            let scheme = &setup.replica.policy.linear.fprop.right.scheme;
            let options = Options {
                container: Some(native::CONTAINER),
                scales: Some(Arc::new(scales)),
                ..quantizing(host)
            };
            let output = quantize(&model, folder, scheme, options)?;
            results.kl_of_quantized(trainer, output, &windows(&folder.dir().join(TOKENS), settings)?)?;
        }
        return Ok(results);
    };
    let output = folder.result(ADAPTER);
    let named = settings.model.init.as_deref().unwrap_or_default();
    let mut base = init.unwrap_or(Path::new(named)).to_owned();
    let mut named = named.to_owned();
    if adapter.loftq > 0 {
        // The adapter fits only the weights that LoftQ changed.
        let own = folder.result(BASE);
        trainer.export_model(
            &own,
            false,
            &setup.config_json,
            tokenizer,
            init,
            merged_precision(&setup.config_json),
        )?;
        base = own.path().to_owned();
        named = base.display().to_string();
        results.base = Some(base.clone());
    }
    trainer.export_adapter(&output, &named, tokenizer, results.base.as_deref())?;
    results.adapter_base = Some(base);
    results.adapter = Some(output.path().to_owned());
    if !adapter.merge && adapter.requantize.is_none() {
        return Ok(results);
    }
    trainer.export_model(
        &model,
        true,
        &setup.config_json,
        tokenizer,
        init,
        merged_precision(&setup.config_json),
    )?;
    results.model = Some(model.path().to_owned());
    let windows = windows(&folder.dir().join(TOKENS), settings)?;
    results.merged_kl = Some(kl(trainer, model.path(), &windows)?);
    if let Some(scheme) = &adapter.requantize {
        let output = quantize(&model, folder, scheme, quantizing(host))?;
        results.kl_of_quantized(trainer, output, &windows)?;
    }
    Ok(results)
}

fn quantizing(host: &Host) -> Options {
    Options { threads: host.threads, ..Options::default() }
}

/// Quantizes the written model to `scheme`; returns the folder.
fn quantize(model: &Output, folder: &RunFolder, scheme: impl Display, options: Options) -> Result<PathBuf> {
    let output = folder.result(QUANTIZED);
    let files = ModelFiles::open(model.path())?;
    let mut recipe = Recipe::load(&format!("rtn-{scheme}"))?;
    if options.scales.is_some() {
        recipe.name = format!("lsq-{scheme}");
    }
    let plan = Plan::new(&files, recipe, options)?;
    run_plan(&plan, &files, &output, Start::Restart, &mut |_| ControlFlow::Continue(()))?;
    Ok(output.path().to_owned())
}

/// Returns the chat template of the results, if the model that was fine-tuned has none: the one that conversations were
/// rendered with, else one that joins the messages.
fn default_template(tokens: &Path, setup: &Setup, settings: &RunConfig) -> Result<Option<DefaultTemplate>> {
    let Some(dialogue) = &setup.dialogue else { return Ok(None) };
    if settings.data.chat && Conversations::open(tokens)?.0.counts.rendered > 0 {
        return Ok(Some(dialogue.clone()));
    }
    Ok(Some(DefaultTemplate::joined(&setup.tokenizer)?))
}

/// Reads windows of `length` tokens, or conversations, evenly spread over the training data.
fn windows(tokens: &Path, settings: &RunConfig) -> Result<Vec<Vec<u32>>> {
    let length = settings.data.length;
    if settings.data.chat {
        let (lines, ..) = Conversations::open(tokens)?;
        let count = lines.len().min(WINDOWS as usize);
        return Ok((0..count).map(|i| lines.line(i * lines.len() / count).0.to_vec()).collect());
    }
    let file = TokenFile::open(tokens)?;
    let all = (file.len() / length.max(1) as u64).max(1);
    let count = all.min(WINDOWS);
    let mut windows = Vec::new();
    for i in 0..count {
        let mut window = Vec::new();
        file.read(i * all / count * length as u64, length, &mut window)?;
        windows.push(window);
    }
    Ok(windows)
}

/// Returns the mean KL of the model in `dir` from the trained one, nats/token.
fn kl(trainer: &mut Trainer, dir: &Path, windows: &[Vec<u32>]) -> Result<f64> {
    let decoder = Decoder::load(&ModelFiles::open(dir)?)?;
    let vocab = decoder.config().vocab_size;
    let longest = windows.iter().map(Vec::len).max().unwrap_or(0);
    let mut buffers = Buffers::plan(decoder.config(), longest, longest)?;
    let (mut sum, mut count) = (0.0, 0);
    for tokens in windows {
        let batch = Batch { tokens, lens: &[tokens.len()] };
        let mut own = vec![0.0; tokens.len() * vocab];
        trainer.model_mut().logits(&batch, &mut own)?;
        let mut other = vec![0.0; own.len()];
        let mut states = decoder.forward(&batch, &mut buffers).map_err(TrainError::from)?;
        states.logits(0..tokens.len(), &mut other).map_err(TrainError::from)?;
        let rows = own.chunks_exact(vocab).zip(other.chunks_exact(vocab));
        sum += rows.map(|(own, other)| divergence(own, other)).sum::<f64>();
        count += tokens.len();
    }
    Ok(sum / count.max(1) as f64)
}
