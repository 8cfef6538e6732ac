//! Ranks of a training run: threads of this process, or processes that a launcher of MPI has started.
//!
//! Rank 0 has the data, the run's folder and the train loop. The others make the same model and optimizer, and do what rank 0
//! tells them.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use mantissa_model::ModelConfig;
use mantissa_ranks::{Link, MemoryLink, RankError, Reader, Writer};
use mantissa_train::config::RunConfig;
use mantissa_train::{Group, Optimizer, TrainError, TrainModel, follow};
use serde_json::Value;

use super::replica::{Replica, initial};
use crate::error::{BadInput, JobError, Result};

/// Ranks of a run.
#[derive(Clone)]
pub struct Ranks {
    count: usize,
    /// End of the links to other processes; `None` for threads, and once it is taken.
    link: Arc<Mutex<Option<Box<dyn Link>>>>,
    /// True for processes.
    joined: bool,
}

impl Default for Ranks {
    fn default() -> Self {
        Ranks::threads(1)
    }
}

/// Where ranks run is no part of what a run is.
impl PartialEq for Ranks {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl fmt::Debug for Ranks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ranks")
            .field("count", &self.count)
            .field("joined", &self.joined)
            .finish_non_exhaustive()
    }
}

impl Ranks {
    /// Makes `count` ranks of this process, each a thread with its share of the threads of the host.
    pub fn threads(count: usize) -> Self {
        Ranks { count, link: Arc::default(), joined: false }
    }

    /// Makes ranks for a preview: `count` processes, of which this is one.
    pub fn planned(count: usize) -> Self {
        Ranks { count, link: Arc::default(), joined: true }
    }

    /// Makes this process rank 0 of those at the other ends of `link`.
    pub fn processes(link: Box<dyn Link>) -> Self {
        Ranks { count: link.size(), link: Arc::new(Mutex::new(Some(link))), joined: true }
    }

    /// Number of ranks.
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// Number of ranks in this process.
    pub(crate) fn in_process(&self) -> usize {
        if self.joined { 1 } else { self.count }
    }

    /// Refuses a number of ranks that does not divide the leaves of `settings`, and what is done by one rank alone.
    ///
    /// # Errors
    /// [`BadInput`] with settings that work.
    pub(crate) fn check(&self, settings: &RunConfig) -> Result<()> {
        let (ranks, leaves) = (self.count, settings.parallel.leaves);
        if ranks <= 1 {
            return Ok(());
        }
        if ![2, 4, 8].contains(&ranks) {
            return Err(BadInput::new("--ranks", ranks.to_string(), "1, 2, 4 or 8").into());
        }
        if !leaves.is_multiple_of(ranks) {
            let windows = settings.data.batch.saturating_mul(settings.data.accumulate);
            let expected = format!("a divisor of parallel.leaves = {leaves}");
            let error = BadInput::new("--ranks", ranks.to_string(), expected);
            let set = |leaves: usize| {
                let batches = format!("--set data.accumulate={leaves} --set data.batch={}", windows / leaves);
                format!(
                    "--set parallel.leaves={leaves} {batches} (the same windows a step, in other batches)"
                )
            };
            let works = [8, 4, 2].into_iter().find(|of| of % ranks == 0 && windows.is_multiple_of(*of));
            return Err(match works {
                Some(of) => error.with_fix(set(of)).into(),
                None => {
                    error.with_fix(format!("make data.batch x data.accumulate a multiple of {ranks}")).into()
                }
            });
        }
        if settings.distill.is_some() {
            return Err(BadInput::new(
                "--ranks",
                ranks.to_string(),
                "1 with [distill]: one rank has the teacher",
            )
            .into());
        }
        Ok(())
    }

    /// Tells other processes that there is nothing to do, unless the run began.
    ///
    /// # Errors
    /// [`RankError`].
    pub(crate) fn dismiss(&self) -> Result<()> {
        let Some(mut link) = self.take() else { return Ok(()) };
        for rank in 1..link.size() {
            link.send(rank, Vec::new()).map_err(TrainError::from)?;
        }
        Ok(link.leave().map_err(TrainError::from)?)
    }

    fn take(&self) -> Option<Box<dyn Link>> {
        self.link.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Starts the other ranks of a run whose folder is `dir`; `config` is that of the model.
    ///
    /// # Errors
    /// The system allows no thread; [`RankError`].
    pub(crate) fn start(
        &self,
        replica: &Arc<Replica>,
        (settings, config): (&RunConfig, &Value),
        dir: &Path,
    ) -> Result<Started> {
        if let Some(mut link) = self.take() {
            let hello = hello(settings, config, dir);
            (1..link.size()).try_for_each(|rank| link.send(rank, hello.clone())).map_err(TrainError::from)?;
            return Ok(Started { link: Some(link), threads: Vec::new() });
        }
        if self.count <= 1 {
            return Ok(Started::default());
        }
        let mut ends = MemoryLink::ranks(self.count).into_iter();
        let first = ends.next().map(|link| Box::new(link) as Box<dyn Link>);
        let mut threads = Vec::new();
        for link in ends {
            let (replica, settings, dir) = (Arc::clone(replica), settings.clone(), dir.to_owned());
            let rank = link.rank();
            let work = move || take_part(&replica, &settings, &dir, Box::new(link));
            let thread = thread::Builder::new().name(format!("rank {rank}")).spawn(work);
            let io =
                |error| mantissa_store::Error::Io { path: PathBuf::new(), operation: "start a rank", error };
            threads.push(thread.map_err(io)?);
        }
        Ok(Started { link: first, threads })
    }
}

/// Other ranks of a run that began.
#[derive(Default)]
pub(crate) struct Started {
    link: Option<Box<dyn Link>>,
    threads: Vec<JoinHandle<Result<()>>>,
}

impl Started {
    /// Waits for the threads after the end of the run.
    pub(crate) fn wait(self) {
        self.first_error();
    }

    /// Makes rank 0; `None` for a single rank whose steps are those of a single worker.
    ///
    /// # Errors
    /// Not enough memory; [`RankError`].
    pub(crate) fn group(
        &mut self,
        replica: &Replica,
        model: &TrainModel,
        optimizer: &Optimizer,
    ) -> Result<Option<Group>> {
        match self.link.take() {
            Some(link) => Ok(Some(Group::new(link, &replica.parallel, model, optimizer)?)),
            None => replica.alone(model, optimizer),
        }
    }

    /// Waits for the threads, whose links have ended. Returns the error of one that ended by itself if rank 0 met no more than
    /// its end, and `error` otherwise.
    pub(crate) fn cause(self, error: JobError) -> JobError {
        let found = self.first_error();
        match &error {
            JobError::Train(TrainError::Rank(RankError::Lost { .. })) => found.unwrap_or(error),
            _ => error,
        }
    }

    /// Waits for the threads; returns the error of one that ended by itself.
    fn first_error(self) -> Option<JobError> {
        let is_cause =
            |error: &JobError| !matches!(error, JobError::Train(TrainError::Rank(RankError::Lost { .. })));
        let ended: Vec<_> = self.threads.into_iter().filter_map(|thread| thread.join().ok()?.err()).collect();
        ended.into_iter().find(is_cause)
    }
}

/// Does the part of another rank than 0 in a run whose folder is `dir`.
fn take_part(replica: &Replica, settings: &RunConfig, dir: &Path, link: Box<dyn Link>) -> Result<()> {
    let rank = link.rank();
    let (model, optimizer) = replica.model(settings, (rank, link.size()))?;
    optimizer.open_pages(dir, rank)?;
    let group = Group::new(link, &replica.parallel, &model, &optimizer)?;
    follow(model, optimizer, group)?;
    Ok(())
}

/// Takes part in the run of another process, rank 0 at the other end of `link`, with `threads` threads. Paths of its settings
/// are relative to `base`.
///
/// # Errors
/// Files that cannot be read here; [`RankError`].
pub(crate) fn take_part_of_process(mut link: Box<dyn Link>, base: &Path, threads: usize) -> Result<()> {
    let message = link.receive(0).map_err(TrainError::from)?;
    if message.is_empty() {
        return Ok(link.leave().map_err(TrainError::from)?);
    }
    let Hello { settings, config, dir } = Hello::read(&message).ok_or_else(|| {
        TrainError::from(RankError::Message {
            rank: 0,
            expected: "the settings of a run",
            got: format!("{} bytes", message.len()),
        })
    })?;
    let adapts = settings.adapter.is_some();
    let init = settings.model.init.as_ref().map(|dir| initial(&base.join(dir), adapts)).transpose()?;
    let config =
        ModelConfig::from_json(&config, "config of rank 0").map_err(mantissa_model::LoadError::from)?;
    let replica = Replica::new(&settings, config, init, threads)?;
    take_part(&replica, &settings, &dir, link)
}

/// First message of rank 0.
struct Hello {
    settings: RunConfig,
    config: Value,
    dir: PathBuf,
}

fn hello(settings: &RunConfig, config: &Value, dir: &Path) -> Vec<u8> {
    let mut out = Writer::default();
    out.text(&settings.resolved());
    out.u64(settings.parallel.zero);
    out.text(&config.to_string());
    out.text(&dir.to_string_lossy());
    out.0
}

impl Hello {
    fn read(message: &[u8]) -> Option<Self> {
        let mut from = Reader(message);
        let mut settings = RunConfig::parse("settings of rank 0", &from.text()?, &[]).ok()?;
        settings.parallel.zero = from.u64()?;
        let config = serde_json::from_str(&from.text()?).ok()?;
        let dir = from.text()?.into();
        from.0.is_empty().then_some(Hello { settings, config, dir })
    }
}
