//! A model with an adapter that is not merged: `y = W x + s·B(A x)`, and for DoRA `y = f ⊙ (W x + s·B(A x))` with
//! `f = magnitude / ‖W + s·B·A‖` by rows (Liu et al. 2024, arXiv 2402.09353, equation 5), whatever format `W` is stored in.
//!
//! The adapter becomes a low-rank side tensor of each linear layer, which reads the unquantized input, and `f` a diagonal
//! after the product. So every engine that runs side tensors runs adapters. `f` is computed once, when the weight is read.

use std::collections::BTreeMap;

use mantissa_num::stored::{Extra, Map};
use mantissa_store::convention::{LinearWeight, Weight};
use mantissa_store::{Adapter, AdapterFiles, AdapterModule};
use serde_json::Value;

use crate::config::ModelConfig;
use crate::error::LoadError;
use crate::graph::{LinearInfo, LinearKind};
use crate::linear::Linear;
use crate::memory::zeros;
use crate::model_config::{load_config, untie};
use crate::source::{SourceView, WeightSource};

/// Shape and values of a tensor that replaces one of the base.
type Replaced = (Vec<usize>, Vec<f32>);

/// A model and its adapter, as one source of weights.
#[derive(Clone)]
pub struct Adapted<'a> {
    base: &'a (dyn WeightSource + Sync),
    /// Configuration, if the adapter gives a model with tied embeddings a head of its own.
    untied: Option<Untied>,
    /// Adapters by the base's module names.
    modules: BTreeMap<String, AdapterModule>,
    /// Replaced tensors by the base's names.
    replaced: BTreeMap<String, Replaced>,
}

impl std::fmt::Debug for Adapted<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Adapted").field("modules", &self.modules.len()).finish_non_exhaustive()
    }
}

/// A head that begins as the embedding.
#[derive(Clone, Debug)]
struct Untied {
    config: Value,
    head: String,
    embedding: String,
}

impl<'a> Adapted<'a> {
    /// Puts `adapter` on the model `base`. `name` is the adapter's name in errors.
    ///
    /// # Errors
    /// [`LoadError::Adapter`] if a module or tensor is not in the model or has another shape; errors of the base's
    /// configuration.
    pub fn new(base: &'a (dyn WeightSource + Sync), adapter: Adapter, name: &str) -> Result<Self, LoadError> {
        let config = load_config(base)?;
        let fit = Fit::new(&config, name);
        let modules = fit.modules(adapter.modules)?;
        let replaced =
            adapter.replaced.into_iter().map(|(tensor, held)| fit.replaced(tensor, held.shape, held.values));
        let replaced: BTreeMap<_, _> = replaced.collect::<Result<_, _>>()?;
        let (head, embedding) = (config.head_module(), config.embedding_module());
        let weight = |module: &str| replaced.contains_key(&format!("{module}.weight"));
        let own_head = modules.contains_key(head) || weight(head) || weight(&embedding);
        let untied = match base.config() {
            Some(value) if config.tie_word_embeddings && own_head => {
                let mut value = value.clone();
                untie(&mut value);
                Some(Untied { config: value, head: head.to_owned(), embedding })
            }
            _ => None,
        };
        Ok(Adapted { base, untied, modules, replaced })
    }

    /// Number of adapted linear layers.
    pub fn len(&self) -> usize {
        self.modules.len()
    }

    /// True if no linear layer is adapted.
    pub fn is_empty(&self) -> bool {
        self.modules.is_empty()
    }

    /// Bytes that the adapter `files` takes beside a model of this configuration: its values twice while it loads, a head
    /// of its own, and for DoRA the weight whose norms are computed.
    pub fn bytes_needed(config: &ModelConfig, files: &AdapterFiles) -> u64 {
        let head = config.head_module();
        let table = 4 * (config.vocab_size as u64).saturating_mul(config.hidden_size as u64);
        let has_head = files.modules().any(|module| module.ends_with(head));
        let untied = config.tie_word_embeddings && (has_head || files.replaced().next().is_some());
        let widest =
            config.decoder_linears().map(|info| 4 * info.rows as u64 * info.cols as u64).max().unwrap_or(0);
        let norms = match files.is_dora() {
            true if has_head => table.max(widest),
            true => widest,
            false => 0,
        };
        files.bytes().saturating_mul(2).saturating_add(if untied { table } else { 0 }).saturating_add(norms)
    }
}

/// Places of an adapter's modules and tensors in a model.
struct Fit<'c> {
    adapter: &'c str,
    /// Linear layers, the head among them, by module.
    linears: BTreeMap<String, LinearInfo>,
    /// Shapes of all tensors by name.
    tensors: BTreeMap<String, Vec<usize>>,
}

impl<'c> Fit<'c> {
    fn new(config: &ModelConfig, adapter: &'c str) -> Self {
        let head = config.table(LinearKind::Head);
        let weight = (format!("{}.weight", head.module), vec![head.rows, head.cols]);
        let tensors = config.tensors().into_iter().map(|info| (info.name, info.shape)).chain([weight]);
        let linears = config.decoder_linears().chain([head]).map(|info| (info.module.clone(), info));
        Fit { adapter, linears: linears.collect(), tensors: tensors.collect() }
    }

    fn fault(&self, what: &str, allowed: String, found: String) -> LoadError {
        let fix =
            "give the model that the adapter was trained on (base_model_name_or_path in adapter_config.json)";
        LoadError::Adapter { adapter: self.adapter.to_owned(), what: what.to_owned(), allowed, found, fix }
    }

    /// Returns the name in `of` that `name` stands for: itself, or the only one that it ends with or that ends with it
    /// after a dot, because some checkpoints leave out the name of the inner model.
    fn place<'m, T>(of: &'m BTreeMap<String, T>, name: &str) -> Option<(&'m String, &'m T)> {
        let ends = |long: &str, short: &str| long.strip_suffix(short).is_some_and(|rest| rest.ends_with('.'));
        of.get_key_value(name).or_else(|| {
            let mut fitting = of.iter().filter(|(held, _)| ends(held, name) || ends(name, held));
            fitting.next().filter(|_| fitting.next().is_none())
        })
    }

    fn modules(
        &self,
        modules: BTreeMap<String, AdapterModule>,
    ) -> Result<BTreeMap<String, AdapterModule>, LoadError> {
        let mut placed = BTreeMap::new();
        for (name, module) in modules {
            let Some((held, info)) = Self::place(&self.linears, &name) else {
                let layers = self.linears.values().filter(|info| info.kind != LinearKind::Head);
                let example = layers.map(|info| info.module.as_str()).next().unwrap_or_default();
                return Err(self.fault(
                    &name,
                    format!("a linear layer of the model, such as {example}"),
                    "none of this name".into(),
                ));
            };
            if (module.rows, module.cols) != (info.rows, info.cols) {
                let allowed = format!("an adapter from {} inputs to {} outputs", info.cols, info.rows);
                return Err(self.fault(
                    &name,
                    allowed,
                    format!("one from {} to {}", module.cols, module.rows),
                ));
            }
            placed.insert(held.clone(), module);
        }
        Ok(placed)
    }

    fn replaced(
        &self,
        name: String,
        shape: Vec<usize>,
        values: Vec<f32>,
    ) -> Result<(String, Replaced), LoadError> {
        let Some((held, expected)) = Self::place(&self.tensors, &name) else {
            return Err(self.fault(&name, "a tensor of the model".into(), "none of this name".into()));
        };
        if *expected != shape {
            return Err(self.fault(&name, format!("shape {expected:?}"), format!("{shape:?}")));
        }
        Ok((held.clone(), (shape, values)))
    }
}

impl SourceView for Adapted<'_> {
    fn base(&self) -> &dyn WeightSource {
        self.base
    }

    fn config(&self) -> Option<&Value> {
        self.untied.as_ref().map_or_else(|| self.base.config(), |untied| Some(&untied.config))
    }

    fn has_linear(&self, module: &str) -> bool {
        let own = || self.untied.as_ref().is_some_and(|untied| untied.head == module);
        self.base.has_linear(module) || self.replaced.contains_key(&format!("{module}.weight")) || own()
    }

    fn tensor_f32(&self, tensor: &str, shape: &[usize]) -> Result<Vec<f32>, LoadError> {
        match self.replaced.get(tensor) {
            Some((held, values)) if held == shape => Ok(values.clone()),
            _ => self.base.tensor_f32(tensor, shape),
        }
    }

    fn linear(&self, module: &str, rows: usize, cols: usize, bias: bool) -> Result<LinearWeight, LoadError> {
        let held =
            |part: &str| self.replaced.get(&format!("{module}.{part}")).map(|(_, values)| values.clone());
        let copied =
            self.untied.as_ref().filter(|untied| untied.head == module && !self.base.has_linear(module));
        let mut weight = match (held("weight"), copied) {
            (Some(values), _) => LinearWeight {
                rows,
                cols,
                weight: Weight::F32(values),
                bias: match bias && held("bias").is_none() {
                    true => Some(self.base.tensor_f32(&format!("{module}.bias"), &[rows])?),
                    false => None,
                },
                input: None,
                transforms: Default::default(),
            },
            (None, Some(untied)) => self.base.linear(&untied.embedding, rows, cols, false)?,
            (None, None) => self.base.linear(module, rows, cols, bias)?,
        };
        if bias {
            weight.bias = held("bias").or(weight.bias);
        }
        Ok(weight)
    }

    fn adapt(&self, module: &str, weight: LinearWeight) -> Result<LinearWeight, LoadError> {
        let weight = self.base.adapt(module, weight)?;
        match self.modules.get(module) {
            Some(adapter) => attach(adapter, module, weight),
            None => Ok(weight),
        }
    }
}

/// Adds `adapter` to the weight of layer `module` as a side tensor.
fn attach(
    adapter: &AdapterModule,
    module: &str,
    mut weight: LinearWeight,
) -> Result<LinearWeight, LoadError> {
    let factors = match &adapter.magnitude {
        Some(_) => Some(row_factors(adapter, module, &weight)?),
        None => None,
    };
    let scale = adapter.scale();
    let up = adapter.b.iter().map(|b| scale * b).collect();
    weight.transforms.extras.push(Extra::LowRank { rank: adapter.rank, down: adapter.a.clone(), up });
    if let Some(factors) = factors {
        weight.transforms.extras.iter_mut().for_each(|extra| extra.scale_rows(&factors));
        weight.transforms.after.push(Map::Diag(factors));
    }
    Ok(weight)
}

/// Computes the factor of each row (DoRA) from the weight as it is stored.
fn row_factors(adapter: &AdapterModule, module: &str, weight: &LinearWeight) -> Result<Vec<f32>, LoadError> {
    let (rows, cols) = (adapter.rows, adapter.cols);
    let linear = Linear::new(module, LinearWeight { bias: None, input: None, ..weight.clone() })?;
    if linear.transforms().is_empty() {
        let mut values = vec![0.0; cols];
        let factor = |row| {
            linear.row(row, &mut values);
            adapter.merge_row(row, &mut values)
        };
        return Ok((0..rows).map(factor).collect());
    }
    let bytes = 4 * (rows as u64).saturating_mul(cols as u64);
    let mut values: Vec<f32> = zeros(rows.saturating_mul(cols))
        .ok_or(LoadError::Memory { what: "norms of an adapted weight", bytes })?;
    linear.apart_weight(&mut values);
    Ok(values
        .chunks_exact_mut(cols)
        .enumerate()
        .map(|(row, values)| adapter.merge_row(row, values))
        .collect())
}
