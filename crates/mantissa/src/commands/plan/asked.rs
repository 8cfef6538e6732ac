//! Question that `plan` answers, and the report of the answer.

use std::path::PathBuf;

use mantissa_plan::hardware::{Device, Maker};
use mantissa_plan::recommend::{Answer, Load, TrainAnswer};
use mantissa_plan::shape::ModelShape;
use serde::Serialize;

use super::args::Args;
use super::at_hand::AtHand;
use crate::commands::model::ModelPath;
use crate::commands::next_steps::quoted;
use crate::output::bytes;

/// Result of a plan.
#[derive(Serialize)]
pub(super) struct Report<'a> {
    pub(super) model: &'a ModelShape,
    pub(super) parameters: u64,
    pub(super) active_parameters: u64,
    pub(super) hardware: &'a Device,
    /// All figures of bytes and speed are predicted.
    pub(super) predicted: bool,
    /// Quantized model that is planned for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) at_hand: Option<&'a AtHand>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) load: Option<Load>,
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub(super) inference: Option<&'a Answer>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) training: Option<&'a TrainAnswer>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) page: Option<&'a PathBuf>,
}

/// Question with its model and device.
pub(super) struct Asked<'a> {
    pub(super) args: &'a Args,
    pub(super) shape: &'a ModelShape,
    pub(super) device: &'a Device,
    /// Bytes of `--memory`.
    pub(super) given: Option<f64>,
}

impl Asked<'_> {
    /// Returns the bytes that a model may use of `--memory`.
    pub(super) fn memory(&self) -> Option<f64> {
        self.given.map(|memory| self.device.usable_of(memory))
    }

    /// Describes the memory: what is used of it, and why not all.
    fn memory_words(&self) -> String {
        let usable = self.memory().unwrap_or_else(|| self.device.available());
        let usable = bytes(usable as u64);
        let metal = self.device.maker == Maker::Apple;
        match self.given.map(|memory| bytes(memory as u64)) {
            Some(memory) if metal => {
                format!("--memory {memory}, of which Metal lets the GPU use {usable}{}", self.sold())
            }
            Some(memory) => format!("--memory {memory}"),
            None if metal => {
                let all = bytes(self.device.memory as u64);
                format!("{usable} usable: Metal's recommended working set of {all}")
            }
            None => format!("{usable} usable"),
        }
    }

    /// Says what a Mac is sold with where `--memory` has its number of GB in powers of ten: Apple's are GiB.
    fn sold(&self) -> String {
        let number = self.given.map_or(0.0, |memory| memory / 1e9);
        if number < 1.0 || number.fract() != 0.0 {
            return String::new();
        }
        let whole = bytes((number * f64::from(1 << 30)) as u64);
        format!("; a Mac sold with {number} GB has {whole}: --memory {number}GiB")
    }

    /// Describes what is planned, for the first line.
    pub(super) fn title(&self) -> String {
        let ModelShape { name, assumed, .. } = self.shape;
        let parameters = mantissa_plan::shape::billions(self.shape.parameters());
        let active = match self.shape.is_mixture() {
            true => format!(", {} active", mantissa_plan::shape::billions(self.shape.active_parameters())),
            false => String::new(),
        };
        let assumed = assumed.as_ref().map_or_else(String::new, |assumed| format!("; {assumed}"));
        let memory = self.memory_words();
        let devices =
            if self.args.devices > 1 { format!("{} × ", self.args.devices) } else { String::new() };
        format!(
            "{name}: {parameters} parameters{active}{assumed}. {devices}{} ({memory}, {:.0} GB/s).",
            self.device.title,
            self.device.bandwidth / 1e9
        )
    }
}

/// Returns the command that measures what a plan predicts.
pub(super) fn measures(model: Option<&ModelPath>) -> String {
    let model = model.map_or_else(|| "MODEL".to_owned(), |model| quoted(model.typed()));
    format!("mantissa bench {model}")
}
