//! Plans of an output: one linear layer, and the whole model for its configuration.

use std::collections::BTreeMap;

use mantissa_num::{Scheme, Source, StaticScale};

use crate::TensorSpec;

/// Linear layer to be stored.
#[derive(Clone, Copy, Debug)]
pub struct LinearPlan<'a> {
    /// Name of the layer, without `.weight`.
    pub module: &'a str,
    /// Scheme of the weight, with the scale code that the format stores.
    pub scheme: &'a Scheme,
    /// Scheme of the input; `None` leaves activations unquantized.
    pub input: Option<&'a Scheme>,
    /// Output features.
    pub rows: usize,
    /// Input features.
    pub cols: usize,
    /// True if the group of each column is stored (`g_idx`), because some layer has act-order.
    pub by_group: bool,
    /// Stored scale of the input ([`ActivationQuant::outer`](super::ActivationQuant::outer)), from calibration; `None` if
    /// the scheme has none ([`Self::stores_input_scale`]).
    pub input_scale: Option<StaticScale>,
    /// Number of outliers stored in f16, each with its column
    /// ([`Extra::Sparse`](mantissa_num::stored::Extra::Sparse)).
    pub outliers: usize,
}

impl<'a> LinearPlan<'a> {
    /// Creates the plan of a layer `[rows, cols]` without act-order, outliers or a stored input scale.
    pub fn new(
        module: &'a str,
        scheme: &'a Scheme,
        input: Option<&'a Scheme>,
        (rows, cols): (usize, usize),
    ) -> Self {
        LinearPlan { module, scheme, input, rows, cols, by_group: false, input_scale: None, outliers: 0 }
    }

    /// True if a scale of the input is stored beside the weight: a static scale, or the global scale of NVFP4.
    pub fn stores_input_scale(&self) -> bool {
        self.input.is_some_and(|input| input.source == Source::Static || input.has_outer_scale())
    }

    /// Returns the bytes of the stored input scale, or of its reciprocal.
    ///
    /// # Errors
    /// [`NotStorable`] if calibration has not set it.
    pub(super) fn input_scale_bytes(&self, container: &str, reciprocal: bool) -> Storable<Vec<u8>> {
        let Some(scale) = self.input_scale else {
            let input = self.input.map_or(String::new(), ToString::to_string);
            let why = format!("{container} stores a scale of the inputs ({input}), which needs calibration");
            return Err(NotStorable { scheme: self.scheme.to_string(), why });
        };
        let scale = scale.scale;
        Ok(if reciprocal { 1.0 / scale } else { scale }.to_le_bytes().to_vec())
    }

    /// True if a zero point of the input is stored beside its scale.
    pub(super) fn stores_input_zero(&self) -> bool {
        self.stores_input_scale() && self.input.is_some_and(|input| input.format.has_zero())
    }

    /// Returns the byte of the stored zero point of the input, int8.
    pub(super) fn input_zero_byte(&self) -> u8 {
        self.input_scale.map_or(0, |stored| stored.zero as i8 as u8)
    }
}

/// Reason why a format cannot store a scheme.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("scheme {scheme}: {why}")]
pub struct NotStorable {
    /// The scheme.
    pub scheme: String,
    /// The reason.
    pub why: String,
}

/// Result of work that fails if a format cannot store something.
pub type Storable<T> = Result<T, NotStorable>;

impl NotStorable {
    /// Creates the error for `scheme`.
    pub fn new(scheme: &Scheme, why: impl Into<String>) -> Self {
        NotStorable { scheme: scheme.to_string(), why: why.into() }
    }
}

/// Scheme of some linear layers, scheme of their inputs, and the names of their modules.
pub type ModuleGroup = (Scheme, Option<Scheme>, Vec<String>);

/// Quantized linear layer of a [`ModelPlan`].
#[derive(Clone, Copy, Debug)]
pub struct PlannedLayer<'a> {
    /// Name of the layer, without `.weight`.
    pub module: &'a str,
    /// Scheme of the weight, as stored.
    pub scheme: &'a Scheme,
    /// Output features.
    pub rows: usize,
    /// Input features.
    pub cols: usize,
}

impl<'a> PlannedLayer<'a> {
    /// Plan of the layer's tensors, without inputs, act-order or outliers.
    pub fn plan(&self) -> LinearPlan<'a> {
        LinearPlan::new(self.module, self.scheme, None, (self.rows, self.cols))
    }
}

/// Model to be stored: all data for `quantization_config` and the files beside it.
#[derive(Clone, Debug)]
pub struct ModelPlan<'a> {
    /// Quantized linear layers, in the order of the forward pass.
    pub layers: Vec<PlannedLayer<'a>>,
    /// Quantized embedding and head, whose inputs stay unquantized.
    pub tables: Vec<PlannedLayer<'a>>,
    /// Scheme of most weights: the recipe's.
    pub weights: &'a Scheme,
    /// Scheme of the inputs of quantized layers, if they are quantized at run time.
    pub input: Option<&'a Scheme>,
    /// Schemes of inputs that differ from `input`, by module; `None` leaves that input unquantized.
    pub inputs: Option<&'a BTreeMap<String, Option<Scheme>>>,
    /// Linear modules that stay unquantized: layers without a scheme, and the routers of experts.
    pub kept: Vec<String>,
    /// Module of the output head.
    pub head: String,
    /// Module of the token embedding.
    pub embedding: String,
    /// True if some layer stores the group of each column (act-order).
    pub by_group: bool,
    /// Damping of the Hessian, if the method was GPTQ.
    pub damp: Option<f64>,
    /// Modules whose inputs are rotated at run time, each with the order of the Hadamard matrix.
    pub rotations: Vec<(String, usize)>,
    /// Scheme of keys and values in the KV cache.
    pub kv: Option<&'a Scheme>,
    /// KV-cache policy whose levels are stored with the model.
    pub kv_levels: Option<String>,
    /// Bits per weight of the quantized layers: codes, scales and zero points.
    pub bits_per_weight: f64,
    /// All tensors of the output.
    pub specs: &'a [TensorSpec],
}

impl<'a> ModelPlan<'a> {
    /// Creates the plan of a model in which only `layers` are quantized, most of them by the scheme `weights`.
    pub fn new(layers: Vec<PlannedLayer<'a>>, weights: &'a Scheme) -> Self {
        ModelPlan {
            layers,
            tables: Vec::new(),
            weights,
            input: None,
            inputs: None,
            kept: Vec::new(),
            head: "lm_head".to_owned(),
            embedding: "model.embed_tokens".to_owned(),
            by_group: false,
            damp: None,
            rotations: Vec::new(),
            kv: None,
            kv_levels: None,
            bits_per_weight: 0.0,
            specs: &[],
        }
    }

    /// Returns the scheme of the input of a quantized linear layer.
    pub fn input_of(&self, module: &str) -> Option<&Scheme> {
        let own = self.inputs.and_then(|inputs| inputs.get(module));
        own.map_or(self.input, Option::as_ref)
    }

    /// Groups modules by scheme, in the order of first appearance.
    pub fn groups(&self) -> Vec<ModuleGroup> {
        self.groups_by(|layer| layer.scheme.clone())
    }

    /// Groups modules by the result of `scheme_of`.
    pub fn groups_by(&self, scheme_of: impl Fn(&PlannedLayer<'_>) -> Scheme) -> Vec<ModuleGroup> {
        let mut groups: Vec<ModuleGroup> = Vec::new();
        let layers = self.layers.iter().map(|layer| (layer, self.input_of(layer.module)));
        for (layer, input) in layers.chain(self.tables.iter().map(|table| (table, None))) {
            let scheme = scheme_of(layer);
            let alike = |(known, of, _): &&mut ModuleGroup| *known == scheme && of.as_ref() == input;
            match groups.iter_mut().find(alike) {
                Some((_, _, modules)) => modules.push(layer.module.to_owned()),
                None => groups.push((scheme, input.cloned(), vec![layer.module.to_owned()])),
            }
        }
        groups
    }

    /// True if the head is quantized.
    pub fn quantizes_head(&self) -> bool {
        self.tables.iter().any(|table| table.module == self.head)
    }

    /// Head, if it stays unquantized.
    pub fn dense_head(&self) -> Option<String> {
        (!self.quantizes_head()).then(|| self.head.clone())
    }

    /// Number of weights in the quantized layers.
    pub fn weight_count(&self) -> usize {
        self.layers.iter().map(|layer| layer.rows * layer.cols).sum()
    }

    /// Unquantized modules, including head and embedding.
    pub fn kept_with_tables(&self) -> Vec<String> {
        self.kept.iter().cloned().chain([self.head.clone(), self.embedding.clone()]).collect()
    }
}
