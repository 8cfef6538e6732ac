//! Tables of the settings. Each key is declared once: name, type, default, accepted values and meaning.

use mantissa_options::{
    AnyTable, AtLeast, Declared, Flag, Note, Section, Subtable, Text, Texts, Unset, Within, options, sections,
};
use toml::Table;

use super::Optimizer;
use super::adapter::AdapterConfig;
use crate::policy::PolicyTable;
use crate::teacher::SoftTargets;

options! {
    /// Settings of a training run.
    #[derive(Clone, Debug, PartialEq)]
    pub struct RunConfig {
        /// seed of all random numbers
        seed: u64 = 0, AtLeast(0);
        /// folder of the run
        out: String, Text, Note::needed("\"runs/first\"");
        /// Model.
        model: Model, Subtable("");
        /// Training data.
        data: Data, Subtable("");
        /// Measurements of the loss on held-out text.
        validation: Validation, Subtable("optional"), Note::LATER;
        /// Texts that the model continues.
        samples: Samples, Subtable("optional"), Note::LATER;
        /// Adapters.
        adapter: Option<AdapterConfig>, Unset(Subtable("optional: adapters over the frozen model.init"));
        /// Distillation.
        distill: Option<Distill>,
            Unset(Subtable("optional: the loss is the divergence from the predictions of a teacher"));
        /// Precision policy.
        precision: PolicyTable, Subtable("any other key changes a part of the policy");
        /// Optimizer.
        optimizer: Optimizer, Subtable("");
        /// Learning rate by step.
        schedule: ScheduleConfig, Subtable("");
        /// Checkpoints.
        checkpoint: CheckpointConfig, Subtable("");
        /// Observation of tensors.
        telemetry: Telemetry, Subtable("");
        /// Leaves and ranks.
        parallel: Parallel, Subtable("optional: mantissa train --ranks N"), Note::LATER;
    }
}

options! {
    /// `[model]`.
    #[derive(Clone, Debug, PartialEq)]
    pub struct Model {
        /// architecture, as Hugging Face writes it, or the table [model.architecture] with its keys
        config: Option<String>, Unset(Text), Note::needed("\"config.json\"").or(&["architecture", "init"]);
        /// folder with tokenizer.json; without it and init, one is trained on the data
        tokenizer: Option<String>, Unset(Text), Note::example("\"tokenizer\"");
        /// an unquantized model whose weights it starts from; stands for config and tokenizer too
        init: Option<String>, Unset(Text), Note::example("\"model\"");
        /// standard deviation of initial weights
        std: f64 = 0.02, Within(0.0, 1e3);
        /// the keys of a Hugging Face config.json
        architecture: Option<Table>, Unset(AnyTable), Note::HIDDEN;
        /// factor of the load-balancing loss of experts; 0: none
        balance: Option<f64>, Unset(Within(0.0, 1e3)), Note::example("0.001");
    }
}

options! {
    /// `[distill]`.
    #[derive(Clone, Debug, PartialEq)]
    pub struct Distill {
        /// folder or .gguf file of the teacher; without it model.init, unquantized
        teacher: Option<String>, Unset(Text), Note::example("\"large\"");
        /// weight of the divergence; the loss on the text has 1 - weight
        weight: Option<f64>, Unset(Within(0.0, 1.0)), Note::example("1.0");
        /// divides both models' logits; the divergence is multiplied by its square
        temperature: Option<f64>, Unset(Within(0.05, 100.0)), Note::example("1.0");
        /// windows of text that the teacher generates, besides data.files
        generated: usize = 0, AtLeast(0);
    }
}

impl Distill {
    /// Returns weight and temperature of the teacher's predictions.
    pub fn soft_targets(&self) -> SoftTargets {
        let SoftTargets { weight, temperature } = SoftTargets::default();
        SoftTargets {
            weight: self.weight.unwrap_or(weight),
            temperature: self.temperature.unwrap_or(temperature),
        }
    }
}

options! {
    /// `[data]`.
    #[derive(Clone, Debug, PartialEq)]
    pub struct Data {
        /// texts, .jsonl or .json files, or token files (.safetensors)
        files: Vec<String>, Texts, Note::needed("[\"text.txt\"]");
        /// separator of the documents of a text; without it a text is one document
        split: Option<String>, Unset(Text), Note::example("\"<|endoftext|>\"");
        /// field of a record with the document
        field: String = "text".to_owned(), Text;
        /// true: files of conversations or prompts, loss on answers only, packed
        chat: bool = false, Flag, Note::LATER;
        /// tokens of a window
        length: usize, AtLeast(1), Note::needed("256");
        /// windows of a batch
        batch: usize, AtLeast(1), Note::needed("16");
        /// batches of a step (gradient accumulation)
        accumulate: usize = 1, AtLeast(1);
    }
}

options! {
    /// `[validation]`.
    #[derive(Clone, Debug, PartialEq)]
    pub struct Validation {
        /// share of the documents that is held out, or files
        share: f64 = 0.0, Within(0.0, 0.5);
        /// held-out texts or conversations
        files: Vec<String>, Texts, Note::NONE.before("share");
        /// steps between two measurements; the last step has one too
        every: u64 = 100, AtLeast(1);
        /// batches measured at most, evenly spaced over the held-out text
        batches: usize = 8, AtLeast(1);
        /// the run ends after this number of measurements without a better loss; 0: never
        patience: u64 = 0, AtLeast(0);
    }
}

impl Validation {
    /// True if documents are held out and their loss is measured.
    pub fn is_active(&self) -> bool {
        self.share > 0.0 || !self.files.is_empty()
    }

    /// True if the loss is measured after `step` of `last`.
    pub fn is_due(&self, step: u64, last: bool) -> bool {
        self.is_active() && (last || step.is_multiple_of(self.every.max(1)))
    }
}

options! {
    /// `[samples]`.
    #[derive(Clone, Debug, PartialEq)]
    pub struct Samples {
        /// texts continued during training, to read along
        prompts: Vec<String>, Texts;
        /// steps between two continuations; the last step has samples too
        every: u64 = 100, AtLeast(1);
        /// new tokens of each
        tokens: usize = 32, AtLeast(1);
        /// temperature of the samples; 0: greedy
        temperature: f64 = 0.0, Within(0.0, 100.0);
    }
}

impl Samples {
    /// True if prompts are continued after `step`.
    pub fn is_due(&self, step: u64, last: bool) -> bool {
        !self.prompts.is_empty() && (last || step.is_multiple_of(self.every.max(1)))
    }
}

options! {
    /// `[schedule]`.
    #[derive(Clone, Debug, PartialEq)]
    pub struct ScheduleConfig {
        /// number of steps, or set minutes
        steps: u64 = 0, AtLeast(0), Note::needed("1000").or(&["minutes"]).later();
        /// constant linear cosine wsd (stable is another name)
        kind: String = "cosine".to_owned(), Text;
        /// steps with a rising learning rate
        warmup: u64 = 0, AtLeast(0);
        /// last learning rate as a share of lr
        min_ratio: f64 = 0.1, Within(0.0, 1.0);
        /// steps of the decay of wsd
        decay_steps: u64 = 0, AtLeast(0);
        /// wall time over all processes of the run, instead of steps; with wsd
        minutes: f64 = 0.0, Within(0.0, 1e6), Note::example("30.0").later().before("kind");
        /// share of the minutes in which the learning rate decays
        decay_share: f64 = 0.2, Within(0.0, 0.9), Note::LATER;
    }
}

options! {
    /// `[checkpoint]`.
    #[derive(Clone, Debug, PartialEq)]
    pub struct CheckpointConfig {
        /// steps between two checkpoints; the first is written after step 1
        every: u64 = 100, AtLeast(1);
        /// number of checkpoints; at least 2, to survive a damaged one
        keep: usize = 2, AtLeast(1);
        /// the one with the least validation loss is kept too, and exported
        best: bool = true, Flag, Note::LATER;
    }
}

options! {
    /// `[telemetry]`.
    #[derive(Clone, Debug, PartialEq)]
    pub struct Telemetry {
        /// steps between two looks at every tensor, the first at step 1; 0: none
        every: u64 = 100, AtLeast(0);
    }
}

options! {
    /// `[parallel]`.
    #[derive(Clone, Debug, PartialEq)]
    pub struct Parallel {
        /// parts of a step, 1, 2, 4 or 8, which ranks divide: data.accumulate is a multiple
        leaves: usize = 1, AtLeast(1);
        /// stage of ZeRO: what each rank has a part of; 0: nothing, 1: the optimizer's state, 2: gradients too, 3: weights too; changes no
        /// result
        zero: u64 = 0, AtLeast(0);
        /// format of exchanged gradients, of which each leaf makes up for what it lost: f32, sign, or a scheme such as int8-g256
        gradients: String = "f32".to_owned(), Text;
        /// format of gathered matrices, rounded from the master copy; steps compute with the rounded values
        gather: Option<String>, Unset(Text), Note::example("\"fp8-e4m3-g256\"");
    }
}

/// Finds the table of this name, for pages; the keys before all tables have the empty name.
pub fn section(name: &str) -> Option<Section> {
    sections(RunConfig::default().keys()).into_iter().find(|section| section.name == name)
}
