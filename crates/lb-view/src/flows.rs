//! Active flows, one by one.

use std::borrow::Cow;
use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use crate::status::LeavingClient;

pub const SCHEMA: u32 = 3;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ActiveFlow<'a> {
    pub client: Cow<'a, str>,
    /// The service; `None` if no service has the service index of the flow.
    pub service: Option<Cow<'a, str>>,
    /// The address that the process dialled.
    pub address: Option<SocketAddr>,
    /// The backend to which the flow is connected; `None` if the slot now has another backend,
    /// which must not happen.
    pub backend: Option<SocketAddr>,
    pub slot: u32,
    /// The slot's generation when the backend was chosen.
    pub generation: u32,
    /// The current state of the backend.
    pub state: Cow<'a, str>,
    pub phase: Cow<'a, str>,
    /// The id of the process that dialled.
    pub process: u32,
    /// The name of the process; `None` if it has ended.
    pub process_name: Option<Cow<'a, str>>,
    /// Seconds since the backend was chosen.
    pub age_s: f64,
    /// The policy that chose the backend.
    pub policy: Cow<'a, str>,
    /// Why the policy chose this backend: a name from
    /// [`Reason::name`](lb_common::abi::Reason::name).
    pub reason: Cow<'a, str>,
    /// The number of times that the service's table had been published when the backend was chosen,
    /// modulo 65,536.
    pub table_generation: u16,
    /// The number of entries that the backend had in that table; 65,535 means 65,535 or more.
    pub table_entries: u16,
    /// `table_entries` as a part of the whole table; `None` if a newer table is in force, because
    /// the lengths of earlier tables are not stored.
    pub table_share: Option<f64>,
    /// The position of the cursor, or the random number, with which the policy began its choice.
    pub sample: u32,
    /// The socket's cookie, as `ss -e` shows it (`sk:`, in hexadecimal).
    pub cookie: u64,
    /// The cookie of the socket's network namespace.
    pub namespace: u64,
}

/// The document that `flows --json` prints, for programs that parse it. The command does not build
/// this value, but writes one flow after another, because there may be 100,000 flows.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct FlowsDocument {
    pub schema: u32,
    /// The flows, oldest first.
    pub flows: Vec<ActiveFlow<'static>>,
    /// Leaving clients of another version. Only the number of their flows is known.
    pub leaving: Vec<LeavingClient>,
    /// Clients with maps that could not be read, each with the reason.
    pub unreadable: Vec<String>,
}
