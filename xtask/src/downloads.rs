//! Programs and kernels that tests need and that are downloaded, each with a recorded version.

mod apt;
pub mod consul;
pub mod envoy;
pub mod kernels;
mod optional;
pub mod prometheus;
