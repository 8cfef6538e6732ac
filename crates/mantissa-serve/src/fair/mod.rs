//! Fair shares of what clients wait for: jobs of an engine, preparation, compilation, scoring, passes of the machine.

mod gate;
mod queue;
mod turns;

pub(crate) use self::gate::{Gate, Place};
pub(crate) use self::queue::FairQueue;
pub use self::queue::{Caller, Client, MOST_PRIORITY};
pub(crate) use self::turns::Booking;
pub use self::turns::{Turn, Turns};
