//! The flows that are active, one by one.

use std::borrow::Cow;
use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use crate::status::LeavingClient;

/// Version of the JSON form.
pub const SCHEMA: u32 = 3;

/// One active flow.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ActiveFlow<'a> {
    /// The client task.
    pub client: Cow<'a, str>,
    /// The service; `None` if its index is empty.
    pub service: Option<Cow<'a, str>>,
    /// The address that was dialled.
    pub address: Option<SocketAddr>,
    /// Where it goes; `None` if its slot has another backend by now, which must not happen.
    pub backend: Option<SocketAddr>,
    /// The backend's slot.
    pub slot: u32,
    /// The slot's generation when the backend was chosen.
    pub generation: u32,
    /// The state of the backend now.
    pub state: Cow<'a, str>,
    /// How far the flow has come.
    pub phase: Cow<'a, str>,
    /// The process that dialled.
    pub process: u32,
    /// The name of that process; `None` if it has ended.
    pub process_name: Option<Cow<'a, str>>,
    /// Seconds since the backend was chosen.
    pub age_s: f64,
    /// The policy that chose it.
    pub policy: Cow<'a, str>,
    /// Why this backend, by [`Reason::name`](lb_common::abi::Reason::name).
    pub reason: Cow<'a, str>,
    /// How often the service's table had been published then, modulo 65,536.
    pub table_generation: u16,
    /// Entries of that table that named the backend; 65,535 stands for more.
    pub table_entries: u16,
    /// The share of those entries in the table; `None` if a newer table is in force: its length is not kept.
    pub table_share: Option<f64>,
    /// The random number, or the number of the pick, by which the policy chose.
    pub sample: u32,
    /// The socket's cookie, as `ss -e` shows it (`sk:`, in hexadecimal).
    pub cookie: u64,
    /// The cookie of the socket's network namespace.
    pub namespace: u64,
}

/// The document that `flows --json` prints, as it is read back. (It is written flow by flow, for there may be a hundred
/// thousand.)
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct FlowsDocument {
    /// [`SCHEMA`].
    pub schema: u32,
    /// The flows, the oldest first.
    pub flows: Vec<ActiveFlow<'static>>,
    /// Clients that are on their way out and of another version: their flows are only counted.
    pub leaving: Vec<LeavingClient>,
    /// Clients whose maps could not be read, and why.
    pub unreadable: Vec<String>,
}
