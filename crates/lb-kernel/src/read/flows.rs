//! Reads the open flows from a client's pinned maps. The reading needs no daemon and changes
//! nothing.
//!
//! Programs begin and end flows during the reading. Each flow of the result existed at some moment
//! of the reading. A flow that is open during the whole reading occurs exactly once.

use lb_common::abi::{Datagrams, Flow, map};

use crate::client::flow_table::FlowTable;
use crate::error::DatapathError;
use crate::host::pins::Pins;
use crate::sys::{self, elements};

/// A flow and the cookie of its socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenFlow {
    pub cookie: u64,
    pub flow: Flow,
    /// Whether the flow began with connect(). If it did not, the process gave the service's address
    /// with each datagram, and the socket may have other flows.
    pub is_connected: bool,
}

/// A client's open flows, in no particular order.
///
/// # Errors
/// If a map cannot be read.
pub fn flows(pins: &Pins) -> Result<Vec<OpenFlow>, DatapathError> {
    let mut found = in_table(pins)?;
    visit(pins, map::FLOW_OVERFLOW, |cookie: &u64, flow: &Flow| {
        // As in the flow table, a record may exist before its flow is written (phase 0).
        if flow.phase != 0 {
            found.push(OpenFlow { cookie: *cookie, flow: *flow, is_connected: true });
        }
    })?;
    // If a socket has dialed again during the reading, flows of the socket may have been found in
    // both tables. Only the latest flow of a socket is retained.
    found.sort_unstable_by_key(|open| (open.cookie, std::cmp::Reverse(open.flow.start_ns)));
    found.dedup_by_key(|open| open.cookie);
    visit(pins, map::DATAGRAMS, |cookie: &u64, datagrams: &Datagrams| {
        let of_entry = |flow: &Flow| OpenFlow { cookie: *cookie, flow: *flow, is_connected: false };
        let flows = datagrams.flows.iter().map(of_entry);
        found.extend(flows.filter(|open| open.flow.phase != 0));
    })?;
    Ok(found)
}

/// The flows of the flow table, in one pass over the mapping.
fn in_table(pins: &Pins) -> Result<Vec<OpenFlow>, DatapathError> {
    /// Maximum number of attempts to read a bucket that other sockets claim during the reading.
    const LOOKS: usize = 3;
    let table = FlowTable::open(pins, false)?;
    let mut found = Vec::new();
    for index in 0..table.length() {
        for _ in 0..LOOKS {
            let Some(cookie) = table.socket(index) else { break };
            let flow = table.flow(index);
            if table.cookie(index) != cookie || table.flow(index) != flow {
                continue;
            }
            // If the bucket was claimed just now, its flow may not be written yet: the bucket then
            // contains an empty flow (phase 0), or still the flow of the previous socket.
            if flow.phase != 0 {
                found.push(OpenFlow { cookie, flow, is_connected: true });
            }
            break;
        }
    }
    Ok(found)
}

fn visit<K: bytemuck::Pod, V: bytemuck::Pod>(
    pins: &Pins,
    name: &str,
    each: impl FnMut(&K, &V),
) -> Result<(), DatapathError> {
    let path = pins.maps().join(name);
    let read = || elements::visit(&sys::open_pin(&path)?, each);
    read().map_err(|source| DatapathError::Map { path: path.clone(), operation: "read", source })
}
