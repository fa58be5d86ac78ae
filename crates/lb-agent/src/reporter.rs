//! How a program that runs a backend reports the backend's readiness: through the host's agent, or
//! through its own agent.

use lb_report::wire::Readiness;

mod local;
mod remote;

pub use local::LocalReporter;
pub use remote::{CLAIM, RemoteReporter};

/// Reports the readiness of one backend.
pub trait ReadinessReporter: Send {
    /// Reports this readiness from now on. Returns when the agent has accepted the readiness; the
    /// agent then notifies clients.
    ///
    /// # Errors
    /// If the agent does not accept the readiness. The caller retries.
    fn report(&mut self, readiness: Readiness) -> impl Future<Output = anyhow::Result<()>> + Send;

    /// The number of clients that have sent a request recently and have not acknowledged the last
    /// report. The number is at least 1 while the agent has reported the backend for less time than
    /// all clients need to send a request.
    ///
    /// # Errors
    /// If the agent does not answer.
    fn unacknowledged(&mut self) -> impl Future<Output = anyhow::Result<usize>> + Send;
}
