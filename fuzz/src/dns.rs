//! Answers of DNS servers. The first byte of a text determines whether the request was for
//! addresses or for SRV records, and whether the service has an IPv6 address. The rest of the text
//! is the message.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use lb_config::discovery::{DnsOrigin, DnsSettings, DnsTransport};
use lb_config::endpoints::{self, ListContext, MAX_FILE_BYTES};
use lb_discovery::dns::read_list;
use lb_discovery::{DiscoveredList, Finding};

/// Reads an answer as a list, and checks the endpoints of the list, or the message of the failure.
pub fn answers(text: &[u8]) {
    let Some((what, message)) = text.split_first() else { return };
    let (is_ipv6, has_port) = (what & 1 != 0, what & 2 != 0);
    let transport = DnsTransport::Tcp;
    let settings =
        DnsSettings { servers: Vec::new(), transport, min_ttl: Duration::ZERO, max_ttl: Duration::ZERO };
    let (name, port) =
        if has_port { ("users.example.com", Some(80)) } else { ("_users._tcp.example.com", None) };
    let origin = DnsOrigin { name: name.to_owned(), port, settings };
    let finding = read_list(message, &origin, is_ipv6);
    match &finding {
        Finding::List(snapshot) => list(snapshot, is_ipv6),
        Finding::Empty { why } => crate::cannot_be_obeyed(why),
        Finding::Failed(failure) => crate::cannot_be_obeyed(&failure.to_string()),
    }
    assert_eq!(read_list(message, &origin, is_ipv6), finding);
}

fn list(snapshot: &DiscoveredList, is_ipv6: bool) {
    assert!(snapshot.endpoints > 0 && snapshot.text.len() <= MAX_FILE_BYTES);
    snapshot.notes.iter().for_each(|note| crate::cannot_be_obeyed(note));
    let ip = if is_ipv6 { "[2001:db8::1]:80" } else { "10.96.0.10:80" };
    let service: SocketAddr = ip.parse().expect("the text is an address");
    let path = Path::new("users.json");
    let reading = ListContext { service: Some(service), services: &[service], ..ListContext::of(path) };
    match endpoints::parse(&snapshot.text, &reading) {
        Ok(parsed) => assert_eq!(parsed.list.as_slice().len(), snapshot.endpoints),
        // A server may send addresses to which connections are impossible.
        Err(faults) => crate::can_be_shown(&faults),
    }
}
