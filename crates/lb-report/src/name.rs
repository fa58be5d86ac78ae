//! Names of backends in datagrams.

use lb_core::reports::Name;

use crate::wire::{Datagram, Kind};

/// Whether a datagram can contain this name: its address must belong to one host and mean the same
/// on every host.
pub fn can_report(name: Name) -> bool {
    Datagram::about(Kind::Request, name.protocol.number(), name.address).check().is_ok()
}
