//! Commands of rank 0 to the others.

use mantissa_ranks::{RankError, Reader, Writer};

use crate::data::Sample;

/// Work of a rank.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Command {
    /// Take part in a step.
    Step(StepWork),
    /// Take over the state that follows.
    Load,
    /// Send the state.
    Save,
    /// Send the own part of the weights of a unit.
    Lend(u64),
    /// The run is over.
    End,
}

/// Part of a step.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct StepWork {
    /// Numbers of the step.
    pub(crate) order: StepOrder,
    /// Batches of the leaves of the rank, in order.
    pub(crate) batches: Vec<Sample>,
}

/// Numbers of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct StepOrder {
    /// Number of the step, from 1.
    pub(crate) step: u64,
    /// Factor of the gradient of the summed loss.
    pub(crate) scale: f32,
    /// Scale of the loss.
    pub(crate) loss_scale: f32,
    /// Learning rate.
    pub(crate) lr: f64,
    /// True if updates are counted.
    pub(crate) counts: bool,
}

const STEP: u8 = 0;
const LOAD: u8 = 1;
const SAVE: u8 = 2;
const END: u8 = 3;
const LEND: u8 = 4;

impl Command {
    /// Returns the message.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let mut out = Writer::default();
        match self {
            Command::Step(StepWork { order, batches }) => {
                let StepOrder { step, scale, loss_scale, lr, counts } = order;
                out.byte(STEP);
                out.u64(*step);
                out.floats(&[*scale, *loss_scale]);
                out.f64(*lr);
                out.byte(u8::from(*counts));
                out.len(batches.len());
                for Sample { tokens, targets, lens } in batches {
                    out.indices(tokens);
                    out.indices(targets);
                    out.len(lens.len());
                    lens.iter().for_each(|len| out.len(*len));
                }
            }
            Command::Load => out.byte(LOAD),
            Command::Save => out.byte(SAVE),
            Command::End => out.byte(END),
            Command::Lend(unit) => {
                out.byte(LEND);
                out.u64(*unit);
            }
        }
        out.0
    }

    /// Reads a message.
    ///
    /// # Errors
    /// [`RankError::Message`].
    pub(crate) fn from_bytes(bytes: &[u8]) -> Result<Self, RankError> {
        let mut from = Reader(bytes);
        let found = Self::read(&mut from).filter(|_| from.0.is_empty());
        found.ok_or_else(|| RankError::Message {
            rank: 0,
            expected: "a command",
            got: format!("{} bytes", bytes.len()),
        })
    }

    fn read(from: &mut Reader<'_>) -> Option<Self> {
        Some(match from.byte()? {
            STEP => {
                let step = from.u64()?;
                let [scale, loss_scale] = from.floats()?.try_into().ok()?;
                let (lr, counts) = (from.f64()?, from.byte()? != 0);
                let batches = (0..from.len(1)?).map(|_| sample(from)).collect::<Option<_>>()?;
                let order = StepOrder { step, scale, loss_scale, lr, counts };
                Command::Step(StepWork { order, batches })
            }
            LOAD => Command::Load,
            SAVE => Command::Save,
            END => Command::End,
            LEND => Command::Lend(from.u64()?),
            _ => return None,
        })
    }
}

fn sample(from: &mut Reader<'_>) -> Option<Sample> {
    let (tokens, targets) = (from.indices()?, from.indices()?);
    let lens = (0..from.len(8)?).map(|_| usize::try_from(from.u64()?).ok()).collect::<Option<_>>()?;
    Some(Sample { tokens, targets, lens })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_read_back_and_damage_is_refused() {
        let sample = Sample { tokens: vec![1, 2, 3], targets: vec![2, 3, u32::MAX], lens: vec![2, 1] };
        let order = StepOrder { step: 7, scale: 0.125, loss_scale: 2.0, lr: 1e-3, counts: true };
        let work = StepWork { order, batches: vec![sample; 2] };
        for command in [Command::Step(work), Command::Load, Command::Save, Command::Lend(7), Command::End] {
            let bytes = command.to_bytes();
            assert_eq!(Command::from_bytes(&bytes).unwrap(), command);
            for cut in 0..bytes.len() {
                assert!(Command::from_bytes(&bytes[..cut]).is_err(), "{cut}");
            }
            assert!(Command::from_bytes(&[&bytes[..], &[0]].concat()).is_err());
        }
    }
}
