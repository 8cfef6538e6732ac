//! Training runs: their folder, data and checkpoints, the train loop, and what is written at the end.
//!
//! A run is a folder that it owns (`run_folder`). It is set up from settings (`setup`), makes its tokens once
//! (`source`), and trains with a log and checkpoints (`train_loop`), so that a run that was stopped or killed resumes to
//! the same bits.

mod autopsy;
mod chat;
mod checkpoints;
mod complete;
mod events;
mod job;
mod log;
mod previous_run;
mod ranks;
mod ready_run;
mod replica;
mod report;
mod results;
mod run_folder;
mod setup;
mod source;
mod start;
mod teacher;
mod tokens;
mod train_loop;
mod vocabulary;

pub use autopsy::{AutopsyReport, TrainAutopsy};
pub use chat::conversations;
pub use events::folder as events_folder;
pub use job::{Train, TrainArguments, TrainPreview, TrainedTensor, trainable_words};
pub use ranks::Ranks;
pub use report::{RankReport, TrainReport};
pub use results::Results;
pub use start::StartMode;
