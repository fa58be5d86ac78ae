//! How a program that runs a backend has it said how the backend is: by the host's agent, or by an agent of its own.

use lb_report::wire::Readiness;

mod local;

mod remote;

pub use local::LocalVoice;
pub use remote::{CLAIM, RemoteVoice};

/// Who speaks for one backend.
pub trait Voice: Send {
    /// Says from now on that the backend is like this. Returns once the agent has taken it in; clients hear of it from then on.
    ///
    /// # Errors
    /// If the agent cannot be told, which is tried again by whoever asks.
    fn say(&mut self, readiness: Readiness) -> impl Future<Output = anyhow::Result<()>> + Send;

    /// How many clients that have asked lately have not acknowledged what was said last; at least one while an agent has spoken for
    /// the backend for so short a time that not all may have asked.
    ///
    /// # Errors
    /// If the agent cannot be asked.
    fn unheard(&mut self) -> impl Future<Output = anyhow::Result<usize>> + Send;
}
