//! Rules that several engines share, and rules on embedding and head.

mod heads;
mod shared;

pub(super) use heads::RULES as HEADS;
pub(super) use shared::RULES as SHARED;
