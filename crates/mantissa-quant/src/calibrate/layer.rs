//! Decoder layer in a calibration: its weights are replaced, and the states inside it are kept between passes.

use std::collections::{BTreeMap, BTreeSet};

use mantissa_model::{InputQuantizer, Layer, Linear, LinearInput, LinearKind, LoadError, Place};
use mantissa_num::stored::Map;
use mantissa_store::convention::{LinearWeight, Weight};

use super::states::States;

/// A decoder layer whose weights are being replaced.
#[derive(Debug)]
pub struct CalibratedLayer {
    pub(super) index: usize,
    pub(super) layer: Layer,
    /// Quantizers of the inputs of linear layers whose weights are replaced.
    pub(super) quantizers: BTreeMap<LinearInput, InputQuantizer>,
    /// Number of weights replaced: before the attention heads, and the output projection.
    replaced: [u32; 2],
    /// Kinds of the weights replaced.
    kinds: BTreeSet<String>,
}

impl CalibratedLayer {
    /// Takes a layer with its own weights.
    pub(super) fn new(index: usize, layer: Layer) -> Self {
        CalibratedLayer {
            index,
            layer,
            quantizers: BTreeMap::new(),
            replaced: [0; 2],
            kinds: BTreeSet::new(),
        }
    }

    /// Returns the layer's index.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Returns the number of weights replaced before `place`.
    pub(super) fn revision(&self, place: Place) -> u32 {
        let [before_heads, output] = self.replaced;
        if place == Place::Heads { before_heads } else { before_heads + output }
    }

    /// Returns the kinds of the weights that were replaced.
    pub(super) fn replaced_kinds(&self) -> &BTreeSet<String> {
        &self.kinds
    }

    /// Returns a linear layer; `None` if the layer has none of this kind.
    pub fn linear(&self, kind: LinearKind) -> Option<&Linear> {
        self.layer.linear(kind)
    }

    /// Sets the quantizers of inputs at run time. They apply to linear layers whose weights are
    /// [replaced](Self::replace) from now on, and to all inputs in statistics.
    pub fn quantize_inputs(&mut self, quantizers: BTreeMap<LinearInput, InputQuantizer>) {
        self.quantizers = quantizers;
    }

    /// Replaces the weight of the linear layer `kind` (`[rows, cols]`). Its bias stays, and its input gets the
    /// quantizer from [`quantize_inputs`](Self::quantize_inputs). Does nothing if the layer has none of this kind.
    ///
    /// # Errors
    /// [`LoadError::Weight`] if the shape differs.
    pub fn replace(&mut self, kind: LinearKind, weight: Weight) -> Result<(), LoadError> {
        let Some(old) = self.layer.linear_mut(kind) else { return Ok(()) };
        let quantizer = self.quantizers.get(&kind.input()).or(old.input());
        let input = quantizer.map(|input| input.quant().clone());
        let bias = old.bias().map(<[f32]>::to_vec);
        // Only the rotation of the input stays; other transforms and side tensors belong to the old weight.
        let mut transforms = old.transforms().clone();
        transforms.before.retain(|map| matches!(map, Map::Hadamard(_)));
        transforms.after.clear();
        transforms.extras.clear();
        let weight = LinearWeight { rows: old.rows(), cols: old.cols(), weight, bias, input, transforms };
        let products = old.products();
        *old = Linear::new(old.module(), weight)?;
        old.set_products(products);
        let turn = kind.input().turn();
        self.kinds.insert(format!("{kind:?}"));
        self.replaced[0] += u32::from(turn < LinearInput::O.turn());
        self.replaced[1] += u32::from(turn == LinearInput::O.turn());
        Ok(())
    }
}

/// States inside a layer, kept where the previous pass stopped.
pub(super) struct Kept {
    pub(super) layer: usize,
    pub(super) place: Place,
    /// Number of replacements of weights before the place.
    pub(super) revision: u32,
    /// `[tokens, query width]` of each window at the attention heads, `[tokens, hidden]` after attention.
    pub(super) states: States,
}

impl Kept {
    /// True if a pass through `layer` for `inputs` can start here: same layer, same weights before this place, and no
    /// input before it.
    pub(super) fn usable_for(&self, layer: &CalibratedLayer, inputs: &[LinearInput]) -> bool {
        let later = inputs.iter().all(|input| input.turn() >= self.place.turn());
        self.layer == layer.index && self.revision == layer.revision(self.place) && later
    }
}
