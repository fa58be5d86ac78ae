//! Messages of a Kubernetes API server about the EndpointSlices of a service, and about the
//! Service. Each line is a page of a list, or an event of a watch.

use std::net::SocketAddr;
use std::path::Path;

use lb_config::discovery::{ClusterIpOrigin, IpFamily, KubernetesSettings, found_address};

use lb_config::endpoints::{self, ListContext};
use lb_core::service::Protocol;
use lb_discovery::objects::{MAX_BYTES, ObjectKind, Objects};
use lb_discovery::{Failure, Finding, cluster_ip};

use crate::cannot_be_obeyed;

/// Applies the lines, and checks the bounds of the objects that are retained.
fn applied(kind: ObjectKind, text: &[u8]) -> Objects {
    let mut objects = Objects::new(kind, "shop", "users");
    for line in text.split(|byte| *byte == b'\n') {
        let is_page = line.windows(7).any(|part| part == b"\"items\"");
        let before = (objects.bytes(), objects.version().to_owned());
        let result = if is_page { objects.add_page(line).map(drop) } else { objects.apply(line).map(drop) };
        assert!(objects.bytes() <= MAX_BYTES, "the objects are bounded");
        assert!(objects.version().len() <= 256, "the version fits into a request");
        if let Err(failure) = result {
            can_be_shown(&failure);
            if !is_page {
                assert_eq!(
                    (objects.bytes(), objects.version().to_owned()),
                    before,
                    "a refused event has no effect"
                );
            }
        }
    }
    objects
}

/// Applies the lines to the slices, and checks the list that they contain.
pub fn watch(text: &[u8]) {
    let slices = applied(ObjectKind::Slices, text);
    for is_ipv6 in [false, true] {
        let finding = slices.finding(Some("http"), is_ipv6);
        match &finding {
            Ok(Finding::List(snapshot)) => {
                assert!(snapshot.endpoints > 0, "a list has an endpoint");
                snapshot.notes.iter().for_each(|note| cannot_be_obeyed(note));
                let path = Path::new("users.json");
                let context = ListContext::of(path);
                // The reader may refuse an endpoint, for example because its address is a multicast
                // address.
                match endpoints::parse(&snapshot.text, &context) {
                    Ok(parsed) => assert!(
                        parsed.list.as_slice().len() == snapshot.endpoints || !parsed.hosts.is_empty(),
                        "host names have no addresses"
                    ),
                    Err(faults) => crate::can_be_shown(&faults),
                }
            }
            Ok(Finding::Empty { why }) => cannot_be_obeyed(why),
            Ok(Finding::Failed(failure)) | Err(failure) => can_be_shown(failure),
        }
        assert_eq!(slices.finding(Some("http"), is_ipv6), finding);
    }
}

/// Applies the lines to the Service, and checks its address for each
/// protocol, port and family.
pub fn service(text: &[u8]) {
    let objects = applied(ObjectKind::Service, text);
    let Some(text) = objects.service() else { return };
    let settings = KubernetesSettings { server: "10.0.0.9:6443".to_owned(), token: None, tls: None };
    for protocol in [Protocol::Tcp, Protocol::Udp] {
        for port in [None, Some("http"), Some("80")] {
            for family in [None, Some(IpFamily::Ipv4), Some(IpFamily::Ipv6)] {
                let wanted = ClusterIpOrigin {
                    namespace: "shop".to_owned(),
                    service: "users".to_owned(),
                    protocol,
                    port: port.map(str::to_owned),
                    family,
                    settings: settings.clone(),
                };
                let found = cluster_ip::finding(text, objects.version(), &wanted);
                match &found {
                    Ok(Finding::List(snapshot)) => {
                        let text = str::from_utf8(&snapshot.text).expect("an address is text");
                        let address: SocketAddr = text.parse().expect("the text is an address");
                        assert_eq!(found_address(text), Ok(address), "a service may have this address");
                        assert!(family.is_none_or(|family| family == IpFamily::of(address.ip())));
                        assert_eq!((snapshot.endpoints, &*snapshot.version), (1, objects.version()));
                    }
                    Ok(other) => panic!("the result is neither an address nor a failure: {other:?}"),
                    Err(failure) => can_be_shown(failure),
                }
                assert_eq!(cluster_ip::finding(text, objects.version(), &wanted), found);
            }
        }
    }
}

fn can_be_shown(failure: &Failure) {
    let text = failure.to_string();
    assert!(!text.is_empty() && !text.contains('\n'), "{text:?}");
    cannot_be_obeyed(&text);
}
