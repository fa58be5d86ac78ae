//! Names of backends in datagrams.

use lb_core::reports::Name;
use lb_core::service::Protocol;

use crate::wire::{Datagram, Kind};

/// Whom a datagram that was parsed is about; `None` if its protocol is no service's.
pub fn name_in(datagram: &Datagram) -> Option<Name> {
    Some(Name { protocol: Protocol::of_number(datagram.protocol)?, address: datagram.backend() })
}

/// Whether a name can stand in a datagram: it is one host's, and means the same to everybody.
pub fn can_report(name: Name) -> bool {
    Datagram::about(Kind::Request, name.protocol.number(), name.address).check().is_ok()
}
