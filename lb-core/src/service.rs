//! What the operator asked for: client tasks and services, as values that cannot be wrong.

use std::net::SocketAddr;

use crate::subset::Algorithm;

/// A transport protocol that a service is dialled with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Protocol {
    /// TCP.
    Tcp,
}

impl Protocol {
    /// The IP protocol number.
    pub const fn number(self) -> u8 {
        match self {
            Self::Tcp => 6,
        }
    }

    /// The word for it in configurations and tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
        }
    }
}

/// How the kernel picks from the schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Policy {
    /// A deterministic walk over an interleaved table (see [`crate::schedule`]).
    WeightedRoundRobin,
}

impl Policy {
    /// The word for it in configurations and tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::WeightedRoundRobin => "weighted-round-robin",
        }
    }
}

/// Which of a service's endpoints a client task may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Subset {
    /// All of them.
    All,
    /// The first `size` of the order that `algorithm` gives this client task.
    Sized {
        /// The algorithm.
        algorithm: Algorithm,
        /// How many.
        size: Size,
    },
}

/// How many backends a subset has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    /// 1 to [`lb_common::abi::MAX_SUBSET`].
    Fixed(u32),
    /// The smallest that is at least `min` and lets structural weights make loads even, see
    /// [`crate::weights::auto_size`].
    Auto {
        /// 1 to [`lb_common::abi::MAX_SUBSET`].
        min: u32,
    },
}

/// Which task of its job a client is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Task {
    /// This task's number, below `count`.
    pub index: u32,
    /// How many tasks the job has, 1 to 65,536.
    pub count: u32,
}

/// A service as one client task sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Service {
    /// Its name, at most 63 bytes.
    pub name: String,
    /// The address that processes dial.
    pub address: SocketAddr,
    /// The protocol that they dial it with.
    pub protocol: Protocol,
    /// How the kernel picks.
    pub policy: Policy,
    /// Which endpoints may be used.
    pub subset: Subset,
    /// Decides the subset together with the task's index; the same for every task of the job.
    pub seed: u64,
    /// The errno of a connect that finds no usable backend.
    pub errno: u16,
}

/// The default seed of the subsets that a job's tasks take of a service: XXH64 of `<job>/<service>`.
pub fn seed(job: &str, service: &str) -> u64 {
    let mut text = String::with_capacity(job.len() + 1 + service.len());
    text.push_str(job);
    text.push('/');
    text.push_str(service);
    xxhash_rust::xxh64::xxh64(text.as_bytes(), 0)
}
