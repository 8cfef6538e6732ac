//! Run that is ready for its next step: data, model and checkpoint are read, and an old run is removed.

use std::path::Path;

use mantissa_store::{Output, regular, write_file_atomic};
use mantissa_train::config::RunConfig;
use mantissa_train::data::Data;
use mantissa_train::{HeldOut, Optimizer, Stop, TrainModel, Trainer};

use super::checkpoints::Checkpoints;
use super::ranks::{Ranks, Started};
use super::run_folder::RunFolder;
use super::setup::Setup;
use super::source::Source;
use super::start::StartMode;
use crate::data_report::DataReport;
use crate::error::Result;
use crate::host::Host;
use crate::run_files::{CONFIG, MAX_FILE};

/// Run that is ready for its next step.
pub(crate) struct ReadyRun {
    pub(crate) trainer: Trainer,
    /// Ranks besides this one.
    pub(crate) others: Started,
    pub(crate) held_out: Option<HeldOut>,
    /// Settings with all defaults, as TOML.
    pub(crate) resolved: String,
    pub(crate) checkpoints: Checkpoints,
    /// The data in numbers.
    pub(crate) data: DataReport,
}

impl ReadyRun {
    /// Reads everything the run needs; only then removes an old run or writes anything.
    ///
    /// # Errors
    /// Data or weights that cannot be read, a run that cannot be resumed; I/O.
    pub(crate) fn new(
        mut folder: RunFolder,
        setup: &Setup,
        settings: &RunConfig,
        (base, ranks): (&Path, &Ranks),
        host: &Host,
    ) -> Result<Self> {
        let source = Source::prepare(&folder, settings, base, setup, host)?;
        let report = source.report(settings);
        let (model, optimizer) = setup.replica.model(settings, (0, ranks.count()))?;
        if let Some(path) = folder.rebuilt() {
            host.warn(&format!("{}: is damaged; made again from the files of the run", path.display()));
        }
        let others = folder.begin(source.made_from())?;
        if folder.how() == StartMode::Restart && !others.is_empty() {
            let run = folder.dir().display();
            host.warn(&format!("{run}: kept what this run did not write: {}", others.join(", ")));
        }
        setup.vocabulary.keep(folder.dir())?;
        let (data, held_out) = source.write(settings, setup.replica.config.vocab_size)?;
        // Before other ranks begin, which use the folder.
        optimizer.open_pages(folder.dir(), 0)?;
        let mut others = ranks.start(&setup.replica, (settings, &setup.config_json), folder.dir())?;
        let checkpoints = Checkpoints { folder, keep: settings.checkpoint.keep, best: None };
        let resolved = settings.resolved();
        let made =
            Self::trainer(setup, (settings, &resolved), (model, optimizer, data), &mut others, &checkpoints);
        let (mut trainer, damaged) = match made {
            Ok(made) => made,
            // The trainer is gone, and with it its links.
            Err(error) => return Err(others.cause(error)),
        };
        damaged.iter().for_each(|warning| host.warn(warning));
        let config = checkpoints.folder.dir().join(CONFIG);
        let before = regular::read(&config, MAX_FILE, "the settings of a run");
        if !before.is_ok_and(|text| text == resolved.as_bytes()) {
            write_file_atomic(&Output::owned(config), resolved.as_bytes())?;
        }
        trainer.set_stop(Stop::new(host.stop_question()));
        Ok(ReadyRun { trainer, others, held_out, resolved, checkpoints, data: report })
    }

    /// Makes the trainer with the other ranks, at the last checkpoint if the run is resumed; returns also a warning for each
    /// damaged one.
    fn trainer(
        setup: &Setup,
        (settings, resolved): (&RunConfig, &str),
        (model, optimizer, data): (TrainModel, Optimizer, Box<dyn Data>),
        others: &mut Started,
        checkpoints: &Checkpoints,
    ) -> Result<(Trainer, Vec<String>)> {
        let group = others.group(&setup.replica, &model, &optimizer)?;
        let mut trainer = Setup::trainer((model, optimizer), settings, data)?;
        if let Some(group) = group {
            trainer.set_group(group)?;
        }
        if let Some(teacher) = setup.teacher()? {
            trainer.set_teacher(teacher)?;
        }
        let damaged = match checkpoints.folder.how().resumes() {
            true => checkpoints.load_last(&mut trainer, resolved)?,
            false => Vec::new(),
        };
        Ok((trainer, damaged))
    }
}
