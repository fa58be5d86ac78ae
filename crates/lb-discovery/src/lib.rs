//! Remote sources of endpoint lists. For each source a *provider* queries a server, and publishes
//! the result: always the complete list, as text in the format `file_sd`, never a difference.
//!
//! The reader of endpoint files ([`lb_config::endpoints`]) parses and checks the text. This crate
//! decides when a server is queried, and how an answer becomes a list. It does not decide which
//! list is in force: an empty or failed answer is published as such, and the daemon retains the
//! earlier list.
//!
//! A provider publishes into a watch channel, in which each finding replaces the previous one.
//! Therefore a server that often changes its answer causes neither a backlog nor growing memory.
#![forbid(unsafe_code)]

mod consul;
pub mod dns;
mod files;
mod hosts;
mod http;
mod kubernetes;
mod lines;
mod list;
mod retry;
mod runner;
mod tls;

pub use self::hosts::{
    HostName, HostState, HostTable, Hosts, MAX_ADDRESSES, MAX_REFUSED, MissingAddresses, StoredAddresses,
};
pub use self::kubernetes::{cluster_ip, objects};
pub use self::list::{DiscoveredList, Listed, render, render_list};
pub use self::retry::Retry;
pub use self::runner::{Again, DiscoveryRequest, Latest, ProviderContext, Queried, Running, spawn};
pub use self::tls::date_of;

use thiserror::Error;

/// The result of one query.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finding {
    /// The complete list. It has at least one endpoint.
    List(DiscoveredList),
    /// The server answered that there are no endpoints. `why` is the reason, such as NXDOMAIN.
    Empty { why: String },
    /// There is no usable answer.
    Failed(Failure),
}

/// Why a query has no usable answer. The text names the server.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Failure {
    /// No server answered in time, or the server reported a temporary error.
    #[error("{0}")]
    Unreachable(String),
    /// The server refused to answer, for example because of missing rights.
    #[error("{0}")]
    Refused(String),
    /// The answer is truncated, or contradicts the protocol.
    #[error("{0}")]
    Malformed(String),
    /// The answer exceeds a limit.
    #[error("{0}")]
    TooLarge(String),
}

impl Failure {
    /// Puts `place`, such as the server and the query, before the text.
    fn at(self, place: &str) -> Self {
        self.map(|why| format!("{place}: {why}"))
    }

    /// Replaces the text of the failure.
    fn map(self, text: impl FnOnce(String) -> String) -> Self {
        match self {
            Self::Unreachable(before) => Self::Unreachable(text(before)),
            Self::Refused(before) => Self::Refused(text(before)),
            Self::Malformed(before) => Self::Malformed(text(before)),
            Self::TooLarge(before) => Self::TooLarge(text(before)),
        }
    }
}
