//! A quantized model in end-to-end training.

use std::ops::Range;

use mantissa_kernels::Adam;
use mantissa_num::Quantized;

use super::continuous::Continuous;
use super::{Coded, continuous};
use crate::arena::Parameters;
use crate::model::TrainModel;
use crate::store::{Precision, round};

/// Unquantized parameter, such as a norm, that is trained with the scales.
#[derive(Clone, Debug)]
pub struct Dense {
    /// Name of the parameter.
    pub name: String,
    /// Dtype in which it is stored.
    pub stored: Precision,
    /// Factor of the rate.
    pub rate: f32,
}

/// Trained values of one parameter: their range among all, and the parameter's range in the arenas.
#[derive(Debug)]
struct Place {
    name: String,
    values: Range<usize>,
    arena: Range<usize>,
}

/// Unquantized parameter with its values at the start.
#[derive(Debug)]
struct Plain {
    place: Place,
    start: Vec<f32>,
    /// Change of the parameter when its trained value grows by 1.
    unit: f32,
    stored: Precision,
    rate: f32,
}

/// Model in training whose weights follow from codes and continuous parameters.
#[derive(Debug)]
pub struct Tuner {
    model: TrainModel,
    weights: Vec<(Place, Box<dyn Continuous>)>,
    plain: Vec<Plain>,
    /// Trained values, 0 at the start.
    x: Vec<f32>,
    /// Gradients of a step, then its directions.
    gradient: Vec<f32>,
    adam: Adam,
    /// Decoded weight.
    scratch: Vec<f32>,
}

impl Tuner {
    /// Prepares `model` for the training of `weights`, by the name of their dense parameter, and of `plain`
    /// parameters. Weights whose format has no scales that can be trained keep the values that `model` has, as
    /// does every other parameter. Returns the names of those weights too.
    ///
    /// # Panics
    /// If a name or shape is not the model's.
    pub fn new(
        model: TrainModel,
        weights: impl IntoIterator<Item = Coded>,
        plain: impl IntoIterator<Item = Dense>,
    ) -> (Self, Vec<String>) {
        let (mut end, mut fixed, mut trained) = (0, Vec::new(), Vec::new());
        let table = model.parameters().table().clone();
        let mut place = |name: String, count: Option<usize>| {
            let arena = table.by_name(&name).map(|param| param.range.clone());
            assert!(arena.is_some(), "Tuner: no parameter {name}");
            let arena = arena.unwrap_or_default();
            let values = end..end + count.unwrap_or(arena.len());
            end = values.end;
            Place { name, values, arena }
        };
        for Coded { name, quantized, inner } in weights {
            match continuous(quantized, inner) {
                Some(weight) => trained.push((place(name, Some(weight.len())), weight)),
                None => fixed.push(name),
            }
        }
        let plain: Vec<Plain> = plain
            .into_iter()
            .map(|Dense { name, stored, rate }| {
                let place = place(name, None);
                let start = model.parameters().get(place.arena.clone()).widened().into_owned();
                let squares: f64 = start.iter().map(|v| f64::from(*v).powi(2)).sum();
                // Relative to the root mean square, so that values near zero move too.
                let unit = (squares / start.len().max(1) as f64).sqrt() as f32;
                Plain { place, start, unit, stored, rate }
            })
            .collect();
        let largest = trained.iter().map(|(place, _)| place.arena.len()).max().unwrap_or(0);
        let tuner = Tuner {
            model,
            weights: trained,
            plain,
            x: vec![0.0; end],
            gradient: vec![0.0; end],
            adam: Adam::new(end),
            scratch: vec![0.0; largest],
        };
        (tuner.decoded(), fixed)
    }

    fn decoded(mut self) -> Self {
        self.decode();
        self
    }

    /// Number of trained values.
    pub fn len(&self) -> usize {
        self.x.len()
    }

    /// True if nothing is trained.
    pub fn is_empty(&self) -> bool {
        self.x.is_empty()
    }

    /// Returns the model, with the present values.
    pub fn model_mut(&mut self) -> &mut TrainModel {
        &mut self.model
    }

    /// Returns all parameters, with the present values.
    pub fn parameters(&self) -> &Parameters {
        self.model.parameters()
    }

    /// Returns the trained values, relative to the start.
    pub fn values(&self) -> &[f32] {
        &self.x
    }

    /// Sets the trained values.
    ///
    /// # Panics
    /// If their number differs.
    pub fn set_values(&mut self, values: &[f32]) {
        self.x.copy_from_slice(values);
        self.decode();
    }

    /// Moves the values by a step of Adam of length `rate` against the model's gradients.
    pub fn step(&mut self, rate: f32) {
        let gradients = self.model.gradients();
        for (place, weight) in &self.weights {
            let dw = gradients.get(place.arena.clone()).widened();
            weight.pull_back(&dw, &mut self.gradient[place.values.clone()]);
        }
        for plain in &self.plain {
            let dw = gradients.get(plain.place.arena.clone()).widened();
            let out = &mut self.gradient[plain.place.values.clone()];
            out.iter_mut().zip(&*dw).for_each(|(out, g)| *out = g * plain.unit);
        }
        let before: Vec<f32> =
            self.plain.iter().flat_map(|p| self.x[p.place.values.clone()].iter().copied()).collect();
        self.adam.directions(&mut self.gradient, 1);
        self.x.iter_mut().zip(&self.gradient).for_each(|(x, direction)| *x -= rate * direction);
        // Steps of Adam are proportional to the rate, so a factor can be applied afterwards.
        let mut before = before.into_iter();
        for plain in &self.plain {
            let moved = self.x[plain.place.values.clone()].iter_mut().zip(before.by_ref());
            moved.for_each(|(x, before)| *x = before + plain.rate * (*x - before));
        }
        self.decode();
    }

    /// Writes the parameters with the present values to the model.
    fn decode(&mut self) {
        for (place, weight) in &mut self.weights {
            let out = &mut self.scratch[..place.arena.len()];
            weight.decode(&self.x[place.values.clone()], out);
            self.model.parameters_mut().set(place.arena.start, out);
        }
        for plain in &self.plain {
            let mut values: Vec<f32> = plain
                .start
                .iter()
                .zip(&self.x[plain.place.values.clone()])
                .map(|(v, x)| v + plain.unit * x)
                .collect();
            round(plain.stored, &mut values);
            self.model.parameters_mut().set(plain.place.arena.start, &values);
        }
    }

    /// Returns the trained weights as they are stored.
    pub fn weights(&self) -> impl Iterator<Item = (&str, &Quantized)> {
        self.weights.iter().map(|(place, weight)| (place.name.as_str(), weight.quantized()))
    }

    /// Returns the trained unquantized parameters.
    pub fn plain(&self) -> impl Iterator<Item = (&str, Vec<f32>)> {
        let values =
            |plain: &Plain| self.model.parameters().get(plain.place.arena.clone()).widened().into_owned();
        self.plain.iter().map(move |plain| (plain.place.name.as_str(), values(plain)))
    }

    /// Bytes of the trained values and what belongs to them, beside the model.
    pub fn bytes(&self) -> u64 {
        let weights: u64 = self.weights.iter().map(|(_, weight)| weight.bytes()).sum();
        let plain: usize = self.plain.iter().map(|plain| plain.start.len()).sum();
        weights + 4 * (plain + self.scratch.len()) as u64 + (8 + Adam::BYTES) * self.x.len() as u64
    }
}
