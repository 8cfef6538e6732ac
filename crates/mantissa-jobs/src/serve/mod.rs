//! Serving of models over HTTP as a job: the value names models, limits and the place of keys; its run is the server.

mod job;
mod load;

pub use job::{PreparedServe, Serve, ServeReport, ServeServices, ServedModel, Shadow};
