//! The work that makes the stored weights.

use mantissa_methods::method::{Buffer, Extent, Needs, Phase, Work};
use mantissa_num::Scheme;
use mantissa_store::FileDigest;

use crate::recipe::{Recipe, Transform};

/// The work that makes the stored weights.
#[derive(Clone, Debug)]
pub enum Job {
    /// Quantizes a dense model with the transform and the method of a recipe.
    Quantize(Box<Recipe>),
    /// Stores codes and scales in another format without loss.
    Convert {
        /// True if inputs are no longer quantized at run time.
        drops_inputs: bool,
        /// Scheme of embedding and head in formats that store them under one.
        table: Scheme,
    },
    /// Decodes a quantized model and rounds it to nearest under another scheme.
    Requantize {
        /// The scheme, as the user gave it.
        scheme: Scheme,
        /// Scheme of embedding and head in formats that store them under one.
        table: Scheme,
    },
}

impl Job {
    /// Command that plans the job: `quantize` or `convert`.
    pub fn command(&self) -> &'static str {
        if self.recipe().is_some() { "quantize" } else { "convert" }
    }

    /// The recipe, if there is one.
    pub fn recipe(&self) -> Option<&Recipe> {
        match self {
            Job::Quantize(recipe) => Some(recipe),
            _ => None,
        }
    }

    /// Name as the user gave it: that of a recipe, or the path of its file.
    pub fn name(&self) -> String {
        self.recipe().map_or_else(|| self.label(), |recipe| recipe.name.clone())
    }

    /// Name in reports: that of the recipe or of its file, `convert`, or `convert-SCHEME`.
    pub fn label(&self) -> String {
        match self {
            Job::Quantize(recipe) => recipe.label().to_owned(),
            Job::Convert { .. } => "convert".to_owned(),
            Job::Requantize { scheme, .. } => format!("convert-{scheme}"),
        }
    }

    /// SHA-256, in hexadecimal, of the recipe's file, or of the [`label`](Self::label).
    pub fn sha256(&self) -> String {
        match self {
            Job::Quantize(recipe) => recipe.sha256.clone(),
            _ => FileDigest::of(self.label().as_bytes()).hex(),
        }
    }

    /// Name of the method in the reports of layers: `gptq`; `repacked` if codes are kept.
    pub fn method(&self) -> &'static str {
        match self {
            Job::Quantize(recipe) => recipe.method.name(),
            Job::Convert { .. } => "repacked",
            Job::Requantize { .. } => crate::rtn::NAME,
        }
    }

    /// Transform and method, as reports name them: `awq-rtn`.
    pub fn method_name(&self) -> String {
        self.recipe().map_or_else(|| self.method().to_owned(), Recipe::method_name)
    }

    /// True if weights are rounded to nearest and nothing else is done to them.
    pub fn rounds_to_nearest(&self) -> bool {
        match self {
            Job::Quantize(recipe) => recipe.rounds_to_nearest(),
            Job::Convert { .. } => false,
            Job::Requantize { .. } => true,
        }
    }

    /// Scheme of embedding and head in formats that store them under one; a recipe says it by rules.
    pub(crate) fn table(&self) -> Option<&Scheme> {
        match self {
            Job::Quantize(_) => None,
            Job::Convert { table, .. } | Job::Requantize { table, .. } => Some(table),
        }
    }

    /// The recipe's transform.
    pub(crate) fn transform(&self) -> Option<&dyn Transform> {
        self.recipe().and_then(|recipe| recipe.transform.as_deref())
    }

    /// Statistics and passes that the recipe's method needs; none without a recipe.
    pub(crate) fn needs(&self) -> Needs {
        self.recipe().map_or_else(Needs::default, |recipe| recipe.method.needs())
    }

    /// Unit of work of the recipe's method.
    pub(crate) fn work(&self) -> Option<Work<'_>> {
        self.recipe().map(|recipe| recipe.method.work())
    }

    /// Memory of `phase` of the recipe's method for one weight.
    pub(crate) fn buffers(&self, phase: Phase, extent: &Extent<'_>) -> Vec<Buffer> {
        self.recipe().map_or_else(Vec::new, |recipe| recipe.method.buffers(phase, extent))
    }

    /// Number of single weights beside the codes of a weight `[rows, cols]`.
    pub(crate) fn outliers(&self, rows: usize, cols: usize) -> usize {
        self.recipe().map_or(0, |recipe| recipe.outliers(rows, cols))
    }
}
