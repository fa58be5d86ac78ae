//! Names of backends in datagrams.

use lb_core::reports::Name;
use lb_core::service::Protocol;

use crate::wire::{Datagram, Kind};

/// The backend of a parsed datagram; `None` if services cannot have its protocol.
pub fn name_in(datagram: &Datagram) -> Option<Name> {
    Some(Name { protocol: Protocol::of_number(datagram.protocol)?, address: datagram.backend() })
}

/// Whether a datagram can contain this name: its address must belong to one host and mean the same
/// on every host.
pub fn can_report(name: Name) -> bool {
    Datagram::about(Kind::Request, name.protocol.number(), name.address).check().is_ok()
}
