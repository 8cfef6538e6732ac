//! Connections: limits, timeouts, keys, headers, and the end of the server.

mod cors;
mod ended;
mod io;
mod keys;
mod middleware;
mod server;

pub use self::cors::Cors;
pub use self::keys::{KeyError, Keys};
pub use self::server::{Loaded, Server};
