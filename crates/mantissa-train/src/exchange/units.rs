//! Units of a pass: the parameters that it needs together, and whose gradients it completes together. The embedding is the first,
//! each decoder layer one, final norm and head the last.

use std::ops::Range;

use mantissa_model::ModelConfig;

use crate::param_table::{ParamInfo, ParamTable};

/// Part of a pass that needs parameters of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unit {
    /// Embedding and learned positions.
    Embedding,
    /// A decoder layer.
    Layer(usize),
    /// Final norm and head.
    Head,
}

/// Parameters of a model by unit.
#[derive(Debug)]
pub(crate) struct Units {
    /// Every parameter once.
    parts: Vec<Vec<ParamInfo>>,
    /// Embedding that the head reads too.
    tied: Option<Range<usize>>,
}

impl Units {
    /// Divides the parameters of `table`.
    pub(crate) fn new(config: &ModelConfig, table: &ParamTable) -> Self {
        let mut parts = vec![Vec::new(); config.num_hidden_layers + 2];
        let last = parts.len() - 1;
        let mut begun = false;
        for param in table.iter() {
            let layer = config.layer_of(&param.tensor.name);
            begun |= layer.is_some();
            let unit = layer.map_or(if begun { last } else { 0 }, |layer| layer + 1);
            parts[unit].push(param.clone());
        }
        let embedding = format!("{}.weight", config.embedding_module());
        let tied = config.tie_word_embeddings.then(|| table.place(&embedding)).flatten();
        Units { parts, tied }
    }

    /// Number of units.
    pub(crate) fn count(&self) -> usize {
        self.parts.len()
    }

    /// Returns the number of a unit.
    pub(crate) fn index(&self, unit: Unit) -> usize {
        match unit {
            Unit::Embedding => 0,
            Unit::Layer(layer) => layer + 1,
            Unit::Head => self.parts.len() - 1,
        }
    }

    /// Returns the parameters whose gradients unit `index` completes; each belongs to one unit.
    pub(crate) fn completes(&self, index: usize) -> &[ParamInfo] {
        &self.parts[index]
    }

    /// Returns the number of the unit that completes the parameter at `range`.
    pub(crate) fn of(&self, range: &Range<usize>) -> usize {
        let holds = |unit: &Vec<ParamInfo>| unit.iter().any(|param| param.range == *range);
        self.parts.iter().position(holds).unwrap_or(0)
    }

    /// Returns the parameters that unit `index` reads.
    pub(crate) fn reads(&self, index: usize) -> impl Iterator<Item = &ParamInfo> + Clone {
        let is_head = index + 1 == self.parts.len();
        let tied = self.tied.as_ref().filter(|_| is_head);
        let tied = self.parts[0].iter().filter(move |param| tied == Some(&param.range));
        tied.chain(&self.parts[index])
    }

    /// Elements of the parameters that the largest unit reads.
    pub(crate) fn most_read(&self) -> usize {
        let of = |unit| self.reads(unit).map(|param| param.range.len()).sum();
        (0..self.count()).map(of).max().unwrap_or(0)
    }

    /// Elements of the parameters whose gradients the largest unit completes.
    pub(crate) fn most_completed(&self) -> usize {
        let of = |unit: &Vec<ParamInfo>| unit.iter().map(|param| param.range.len()).sum();
        self.parts.iter().map(of).max().unwrap_or(0)
    }
}
