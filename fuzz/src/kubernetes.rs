//! What an API server of Kubernetes may send about the slices of a service. Each line is a page of
//! a list, or an event of a watch.

use std::path::Path;

use lb_config::endpoints::{self, ListContext};
use lb_discovery::objects::{Kind, MAX_BYTES, Objects};
use lb_discovery::{Failure, Finding};

use crate::cannot_be_obeyed;

/// Applies the lines, and checks what is retained and the list that it contains.
pub fn watch(text: &[u8]) {
    let mut slices = Objects::new(Kind::Slices, "shop", "users");
    for line in text.split(|byte| *byte == b'\n') {
        let is_page = line.windows(7).any(|part| part == b"\"items\"");
        let before = (slices.bytes(), slices.version().to_owned());
        let result = if is_page { slices.add_page(line).map(drop) } else { slices.apply(line).map(drop) };
        assert!(slices.bytes() <= MAX_BYTES, "the slices are bounded");
        assert!(slices.version().len() <= 256, "the version fits into a request");
        if let Err(failure) = result {
            can_be_shown(&failure);
            if !is_page {
                assert_eq!(
                    (slices.bytes(), slices.version().to_owned()),
                    before,
                    "a refused event has no effect"
                );
            }
        }
    }
    for is_ipv6 in [false, true] {
        let finding = slices.finding(Some("http"), is_ipv6);
        match &finding {
            Ok(Finding::List(snapshot)) => {
                assert!(snapshot.endpoints > 0, "a list has an endpoint");
                snapshot.notes.iter().for_each(|note| cannot_be_obeyed(note));
                let path = Path::new("users.json");
                let context = ListContext {
                    path,
                    port_name: None,
                    service: None,
                    services: &[],
                    hosts: &endpoints::NO_HOSTS,
                };
                // The reader may refuse an endpoint, for example because its address is a multicast
                // address.
                match endpoints::parse(&snapshot.text, &context) {
                    Ok(parsed) => assert!(
                        parsed.list.as_slice().len() == snapshot.endpoints || !parsed.hosts.is_empty(),
                        "host names have no addresses here"
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

fn can_be_shown(failure: &Failure) {
    let text = failure.to_string();
    assert!(!text.is_empty() && !text.contains('\n'), "{text:?}");
    cannot_be_obeyed(&text);
}
