//! Exchange between ranks below the model: sums of gradients, gathered weights, and the units of a pass that they are divided into.

mod coded;
mod message;
mod reduction;
mod remote;
mod sums;
mod tree;
mod units;

pub use message::MessageFormat;

pub(crate) use coded::{encode, pieces, sum_coded};
pub(crate) use reduction::Reduction;
pub(crate) use remote::{Remote, read_piece, read_stored};
pub(crate) use sums::{BUCKET, Bucket, buckets, gather, gather_sums, length, reduce, to_all};
pub(crate) use tree::{Tree, most_waiting};
pub(crate) use units::{Unit, Units};
