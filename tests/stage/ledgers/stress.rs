//! The services of the stress test. Their backends end connections in every possible way.
//!
//! There is one service per scenario, so that opposite miscounts of two scenarios do not cancel
//! out. Everything is within one network namespace and needs no firewall: a socket that must not
//! answer has a packet filter.

use std::fmt::Write;
use std::net::SocketAddr;

use crate::Cgroup;

/// The port at which the server answers, over TCP and UDP. All ports are below the range from which
/// clients get their ports.
pub const ANSWERS: u16 = 1100;
/// A port without a listener.
pub const CLOSED: u16 = 1101;
/// The port of a listener that drops all packets.
pub const DROPS: u16 = 1102;
/// As [`DROPS`], and ICMP reports that the host cannot be reached.
pub const NO_HOST: u16 = 1104;
/// As [`NO_HOST`], but ICMP reports that the port cannot be reached.
pub const NO_PORT: u16 = 1105;
/// As [`NO_HOST`], but ICMP reports that the protocol is not supported.
pub const NO_PROTOCOL: u16 = 1106;
/// As [`NO_HOST`], but ICMP reports that the network cannot be reached.
pub const NO_NETWORK: u16 = 1107;

/// Networks that cannot be reached, each for another reason: no route, and three kinds of routes
/// that refuse.
pub const UNROUTED: [&str; 4] = ["198.18.0.1:80", "198.18.1.1:80", "198.18.2.1:80", "198.18.3.1:80"];

/// The kind and the number of a service's backends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Behind {
    /// This many addresses of the loopback network, at a port.
    Loopback(u8, u16),
    /// The loopback address of IPv6, at a port.
    Loopback6(u16),
    /// Addresses that cannot be reached.
    Unrouted,
    /// As `Loopback`, over UDP.
    Datagrams(u8, u16),
}

#[derive(Clone, Copy, Debug)]
pub struct Service {
    pub name: &'static str,
    number: u8,
    behind: Behind,
}

/// All services. Services with the same prefix belong to one scenario.
const SERVICES: [(&str, Behind); 33] = [
    ("closed", Behind::Loopback(4, ANSWERS)),
    ("closed-6", Behind::Loopback6(ANSWERS)),
    ("closed-by-server", Behind::Loopback(4, ANSWERS)),
    ("reset", Behind::Loopback(2, ANSWERS)),
    ("lingered", Behind::Loopback(2, ANSWERS)),
    ("unread", Behind::Loopback(2, ANSWERS)),
    ("shut", Behind::Loopback(2, ANSWERS)),
    ("disconnected", Behind::Loopback(2, ANSWERS)),
    ("data-timeout", Behind::Loopback(1, ANSWERS)),
    ("destroyed", Behind::Loopback(1, ANSWERS)),
    ("destroyed-early", Behind::Loopback(1, DROPS)),
    ("copied", Behind::Loopback(2, ANSWERS)),
    ("killed", Behind::Loopback(2, ANSWERS)),
    ("killed-early", Behind::Loopback(1, DROPS)),
    ("held", Behind::Loopback(4, ANSWERS)),
    ("refused", Behind::Loopback(2, CLOSED)),
    ("refused-6", Behind::Loopback6(CLOSED)),
    ("timed-out", Behind::Loopback(2, DROPS)),
    ("no-route", Behind::Unrouted),
    ("no-port", Behind::Loopback(1, ANSWERS)),
    ("no-port-refused", Behind::Loopback(1, CLOSED)),
    ("cancelled", Behind::Loopback(1, DROPS)),
    ("doubled", Behind::Loopback(1, DROPS)),
    ("doubled-late", Behind::Loopback(1, ANSWERS)),
    ("icmp-host", Behind::Loopback(1, NO_HOST)),
    ("icmp-port", Behind::Loopback(1, NO_PORT)),
    ("icmp-protocol", Behind::Loopback(1, NO_PROTOCOL)),
    ("icmp-network", Behind::Loopback(1, NO_NETWORK)),
    ("retried", Behind::Loopback(2, ANSWERS)),
    ("retried-refused", Behind::Loopback(2, CLOSED)),
    ("retried-unrouted", Behind::Unrouted),
    ("datagram", Behind::Datagrams(3, ANSWERS)),
    // This number of backends provides enough ports for more than 100,000 sockets.
    ("crowd", Behind::Loopback(16, ANSWERS)),
];

impl Service {
    /// The service of this name.
    ///
    /// # Panics
    /// If there is none.
    pub fn of(name: &str) -> Self {
        all().find(|service| service.name == name).unwrap_or_else(|| panic!("no service {name}"))
    }

    /// Whether the service is UDP.
    pub fn is_datagram(&self) -> bool {
        matches!(self.behind, Behind::Datagrams(..))
    }

    /// The service's address, which no interface has.
    pub fn address(&self) -> SocketAddr {
        let Self { number, behind, .. } = self;
        let text = match behind {
            Behind::Loopback6(_) => format!("[fd00::{number:x}]:80"),
            Behind::Loopback(..) | Behind::Unrouted | Behind::Datagrams(..) => format!("10.96.1.{number}:80"),
        };
        text.parse().expect("the text is an address")
    }

    pub fn backends(&self) -> Vec<SocketAddr> {
        let number = self.number;
        let texts: Vec<String> = match self.behind {
            Behind::Loopback(count, port) | Behind::Datagrams(count, port) => {
                (1..=count).map(|backend| format!("127.{number}.0.{backend}:{port}")).collect()
            }
            Behind::Loopback6(port) => vec![format!("[::1]:{port}")],
            Behind::Unrouted => UNROUTED.iter().map(ToString::to_string).collect(),
        };
        texts.iter().map(|text| text.parse().expect("the text is an address")).collect()
    }
}

pub fn all() -> impl Iterator<Item = Service> {
    SERVICES.iter().zip(1..).map(|((name, behind), number)| Service { name, number, behind: *behind })
}

/// A configuration with one client and some of the services. `end` is appended.
pub fn config(cgroup: &Cgroup, services: impl Iterator<Item = Service>, end: &str) -> String {
    let path = cgroup.relative();
    let mut text = format!("[[client]]\njob = \"web\"\ncgroup = \"{}\"\n", path.display());
    for service in services {
        let protocol = if service.is_datagram() { "udp" } else { "tcp" };
        let backends: Vec<String> =
            service.backends().iter().map(|backend| format!("\"{backend}\"")).collect();
        write!(
            text,
            "\n[[service]]\nname = \"{}\"\naddress = \"{}\"\nprotocol = \"{protocol}\"\nbackends = {{ static = [{}] }}\n\
             subset = \"all\"\n",
            service.name,
            service.address(),
            backends.join(", ")
        )
        .expect("writing to a string succeeds");
    }
    text + end
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn services_have_distinct_addresses() {
        let services: Vec<Service> = all().collect();
        let mut addresses: Vec<SocketAddr> = services.iter().map(Service::address).collect();
        addresses.sort();
        addresses.dedup();
        assert_eq!(addresses.len(), services.len());
        assert_eq!(Service::of("closed-6").backends(), ["[::1]:1100".parse().unwrap()]);
        assert!(Service::of("closed").backends().iter().all(|backend| backend.ip().is_loopback()));
    }
}
