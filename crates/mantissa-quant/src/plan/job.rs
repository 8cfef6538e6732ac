//! Work that produces the stored weights.

use mantissa_methods::e2e::EndToEnd;
use mantissa_methods::method::{Needs, SolveLayer, Work};
use mantissa_num::Scheme;
use mantissa_store::FileDigest;

use crate::recipe::{Recipe, Transform};

/// Work that produces the stored weights.
#[derive(Clone, Debug)]
pub enum WeightJob {
    /// Quantizes a dense model with the transform and the method of a recipe.
    Quantize(Box<Recipe>),
    /// Stores codes and scales in another format without loss.
    Convert {
        /// True if inputs are no longer quantized at run time.
        drops_inputs: bool,
        /// Scheme of embedding and head, for formats that store them under one.
        table: Scheme,
    },
    /// Decodes a quantized model and quantizes it by RTN to another scheme.
    Requantize {
        /// Scheme that the user gave.
        scheme: Scheme,
        /// Scheme of embedding and head, for formats that store them under one.
        table: Scheme,
    },
}

/// Name in reports for K-types of llama.cpp, whose scales are searched for the least error.
const K_QUANT: &str = "k-quant";

/// Name in reports for IQ-types of llama.cpp.
const I_QUANT: &str = "i-quant";

/// Returns the name for RTN to searched block types, as llama.cpp's users know it; `None` for other methods and
/// schemes.
fn block_method(recipe: &Recipe) -> Option<&'static str> {
    let rounded = recipe.method_name() == crate::rtn::NAME;
    block_name(&recipe.weights).filter(|_| rounded)
}

/// Returns the name for RTN to the searched block type of `scheme`, if it is one.
fn block_name(scheme: &Scheme) -> Option<&'static str> {
    match scheme.format.codec()?.name {
        name if name.starts_with("iq") => Some(I_QUANT),
        name if name.ends_with("_k") => Some(K_QUANT),
        _ => None,
    }
}

/// True if a report's method rounds each weight by itself, so that the scheme bounds its error.
pub(crate) fn rounds_each(method: &str) -> bool {
    [crate::rtn::NAME, K_QUANT, I_QUANT].contains(&method)
}

impl WeightJob {
    /// Returns the command that plans the job: `quantize` or `convert`.
    pub fn command(&self) -> &'static str {
        if self.recipe().is_some() { "quantize" } else { "convert" }
    }

    /// Returns the recipe, if there is one.
    pub fn recipe(&self) -> Option<&Recipe> {
        match self {
            WeightJob::Quantize(recipe) => Some(recipe),
            _ => None,
        }
    }

    /// Returns the name that the user gave: a recipe or the path of its file.
    pub fn name(&self) -> String {
        self.recipe().map_or_else(|| self.label(), |recipe| recipe.name.clone())
    }

    /// Returns the name in reports: the recipe or its file, `convert`, or `convert-SCHEME`.
    pub fn label(&self) -> String {
        match self {
            WeightJob::Quantize(recipe) => recipe.label().to_owned(),
            WeightJob::Convert { .. } => "convert".to_owned(),
            WeightJob::Requantize { scheme, .. } => format!("convert-{scheme}"),
        }
    }

    /// Returns the SHA-256, in hexadecimal, of the recipe's file or of the [`label`](Self::label).
    pub fn sha256(&self) -> String {
        match self {
            WeightJob::Quantize(recipe) => recipe.sha256.clone(),
            _ => FileDigest::of(self.label().as_bytes()).hex(),
        }
    }

    /// Returns the name of the method in reports of layers, such as `gptq`; `repacked` if codes are kept.
    pub fn method(&self) -> &'static str {
        match self {
            WeightJob::Quantize(recipe) => block_method(recipe).unwrap_or(recipe.method.recipe_name()),
            WeightJob::Convert { .. } => "repacked",
            WeightJob::Requantize { .. } => crate::rtn::NAME,
        }
    }

    /// Returns the name of the method of `module`, of `scheme`, in reports: that in recipes, which tells variants apart.
    pub(crate) fn method_of(&self, module: &str, scheme: &Scheme) -> &'static str {
        let Some(recipe) = self.recipe().filter(|recipe| recipe.mixes_methods()) else {
            return self.method();
        };
        let method = recipe.method_of(module);
        let blocks = block_name(scheme).filter(|_| matches!(method.work(), Work::Nearest));
        blocks.unwrap_or(method.recipe_name())
    }

    /// Returns the names of transform and method in reports: `awq-rtn`.
    pub fn method_name(&self) -> String {
        match self.recipe() {
            Some(recipe) if block_method(recipe).is_none() => recipe.method_name(),
            _ => self.method().to_owned(),
        }
    }

    /// True if weights are only quantized by RTN.
    pub fn rounds_to_nearest(&self) -> bool {
        match self {
            WeightJob::Quantize(recipe) => recipe.rounds_to_nearest(),
            WeightJob::Convert { .. } => false,
            WeightJob::Requantize { .. } => true,
        }
    }

    /// Returns the scheme of embedding and head for formats that store them under one; recipes have rules instead.
    pub(crate) fn table(&self) -> Option<&Scheme> {
        match self {
            WeightJob::Quantize(_) => None,
            WeightJob::Convert { table, .. } | WeightJob::Requantize { table, .. } => Some(table),
        }
    }

    /// Returns the recipe's transform.
    pub(crate) fn transform(&self) -> Option<&dyn Transform> {
        self.recipe().and_then(|recipe| recipe.transform.as_deref())
    }

    /// Returns the training of scales and norms after the recipe's method.
    pub(crate) fn tuning(&self) -> Option<EndToEnd> {
        self.recipe().and_then(|recipe| recipe.tuning)
    }

    /// True if some method of the recipe has this need.
    pub(crate) fn needs(&self, need: impl Fn(Needs) -> bool) -> bool {
        self.recipe().is_some_and(|recipe| recipe.needs(need))
    }

    /// Returns the method that learns decoder layers, and its needs. A recipe has at most one.
    pub(crate) fn learner(&self) -> Option<(&dyn SolveLayer, Needs)> {
        self.recipe()?.methods().find_map(|method| match method.work() {
            Work::Layer(solves) => Some((solves, method.needs())),
            _ => None,
        })
    }

    /// Returns the number of outliers of the weight `[rows, cols]` of `module`.
    pub(crate) fn outliers(&self, module: &str, rows: usize, cols: usize) -> usize {
        self.recipe().map_or(0, |recipe| recipe.outliers(module, rows, cols))
    }
}
