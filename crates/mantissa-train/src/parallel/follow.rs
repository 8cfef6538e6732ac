//! Ranks other than 0: they do what rank 0 tells them until the run is over.

use mantissa_ranks::{Link, Traffic};

use super::command::{Command, StepWork};
use super::group::Group;
use crate::error::TrainError;
use crate::health::WeightCounts;
use crate::model::TrainModel;
use crate::optim::Optimizer;

/// Takes part in a run as another rank than 0, until rank 0 ends it; returns what was sent. The model and the optimizer must be
/// those of rank 0 before its first step.
///
/// # Errors
/// [`TrainError::Rank`] if a rank is lost or the weights differ; errors of the model and the optimizer.
pub fn follow(
    mut model: TrainModel,
    mut optimizer: Optimizer,
    mut group: Group,
) -> Result<Traffic, TrainError> {
    group.compare_weights(&model)?;
    group.divide_weights(&mut model);
    loop {
        let message = group.link.receive(0)?;
        match Command::from_bytes(&message)? {
            Command::Step(work) => step(&mut model, &mut optimizer, &mut group, &work)?,
            Command::Load => {
                group.share_weights(&mut model, |_, _| Ok(()))?;
                group.receive_state(&mut optimizer)?;
            }
            Command::Save => group.send_state(&optimizer)?,
            Command::Lend(unit) => {
                if let Some(remote) = &mut model.remote {
                    remote.lend(unit, &model.params)?;
                }
            }
            Command::End => {
                // Its end of the links goes with it.
                model.remote = None;
                return Ok(group.leave()?);
            }
        }
    }
}

/// Takes part in a step.
fn step(
    model: &mut TrainModel,
    optimizer: &mut Optimizer,
    group: &mut Group,
    work: &StepWork,
) -> Result<(), TrainError> {
    model.lost.clear();
    model.histories.forget();
    if !group.follow_gradients(model, work)? {
        return Ok(());
    }
    let counts: Option<Vec<_>> =
        work.order.counts.then(|| model.params.table().iter().map(|_| WeightCounts::default()).collect());
    match group.update(model, optimizer, (work.order.lr, work.order.loss_scale), counts.as_deref()) {
        Ok(_) => {}
        // Rank 0 skips the step, or ends the run.
        Err(TrainError::NonFinite { .. }) => {
            model.histories.forget();
            group.forget_errors();
        }
        Err(error) => return Err(error),
    }
    model.histories.commit(work.order.step);
    Ok(())
}
