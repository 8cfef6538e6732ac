//! Division of an evaluation among workers, by groups of windows or items.

use mantissa_ranks::{RankError, Team};

use crate::error::{JobError, Result};
use crate::host::Host;

/// Groups into which workers divide the windows of a text, or the items of a task, at most.
pub(super) const GROUPS: usize = 64;

/// Computes the results of the groups called `names` with the other workers of `team`. `run` computes one, `write` and `read` are
/// its bytes; a result that cannot be read is computed again. A worker that computes a part of them returns that part.
///
/// # Errors
/// As `run`; I/O; a stop.
pub(super) fn shared<T>(
    names: &[String],
    run: &mut dyn FnMut(usize) -> Result<T>,
    write: impl Fn(&T) -> Result<Vec<u8>>,
    read: impl Fn(usize, &[u8]) -> Option<T>,
    (team, host): (&Team, &Host),
) -> Result<Vec<T>> {
    let mut compute = |group: usize| write(&run(group)?);
    let mut tick = |_| if host.stops() { Err(JobError::from(RankError::Interrupted)) } else { Ok(()) };
    team.complete(names, &mut compute, &mut tick)?;
    let mut all = Vec::new();
    for (group, name) in names.iter().enumerate() {
        match team.result(name)?.and_then(|bytes| read(group, &bytes)) {
            Some(found) => all.push(found),
            None if team.is_partial() => {}
            None => all.push(run(group)?),
        }
    }
    Ok(all)
}
