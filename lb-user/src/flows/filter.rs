//! Which flows are asked for, and whether there is anything of these names: a misspelt name is an error, not an empty
//! list.

use std::collections::BTreeSet;
use std::net::SocketAddr;

use lb_kernel::FlowSnapshot;
use lb_view::flows::FlowFilter;

use super::{FlowsError, is_of};
use crate::document::did_you_mean;

fn backends<'c>(client: &'c FlowSnapshot, service: Option<&'c str>) -> impl Iterator<Item = SocketAddr> + 'c {
    let slots = client.slots.values().filter(move |slot| is_of(client, slot.service, service));
    slots.map(|slot| slot.address)
}

/// Whether there is anything of the names that are asked for.
pub(super) fn check(clients: &[FlowSnapshot], filter: &FlowFilter) -> Result<(), FlowsError> {
    let FlowFilter { client, service, backend } = filter;
    let services: BTreeSet<&str> = clients
        .iter()
        .flat_map(|client| client.services.values().map(|service| service.name.as_str()))
        .collect();
    if let Some(service) = service.as_ref().filter(|service| !services.contains(service.as_str())) {
        let what = match client {
            Some(client) => format!("client {client} does not dial service {service}"),
            None => format!("no client here dials a service {service}"),
        };
        return Err(unknown(&what, Some(service), "services", services));
    }
    let backends: BTreeSet<SocketAddr> =
        clients.iter().flat_map(|client| backends(client, service.as_deref())).collect();
    match backend {
        Some(backend) if !backends.contains(backend) => {
            let of = service.as_ref().map(|service| format!(" of service {service}")).unwrap_or_default();
            let what = format!("there is no backend {backend}{of}");
            let known: Vec<String> = backends.iter().map(ToString::to_string).collect();
            Err(unknown(&what, None, "backends", known.iter().map(String::as_str)))
        }
        _ => Ok(()),
    }
}

/// The error for a name that does not exist, with the names that do.
pub(super) fn unknown<'a>(
    what: &str,
    asked: Option<&str>,
    kind: &str,
    known: impl IntoIterator<Item = &'a str>,
) -> FlowsError {
    /// A service may have thousands of backends.
    const NAMED: usize = 20;
    let known: Vec<&str> = known.into_iter().collect();
    // Not for addresses, which are all near each other.
    let near = asked.map_or_else(String::new, |asked| did_you_mean(asked, &known));
    let names = if known.is_empty() { "none".to_owned() } else { known[..known.len().min(NAMED)].join(", ") };
    let more = known.len().saturating_sub(NAMED);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    FlowsError::Unknown(format!("{what}; {near}{kind} here are: {names}{more}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn not_all_of_thousands_of_names_are_told() {
        let names: Vec<String> = (1..=25).map(|n| format!("b{n:02}")).collect();
        let error = unknown("there is no backend x", None, "backends", names.iter().map(String::as_str));
        let text = error.to_string();
        let expected = "there is no backend x; backends here are: b01, b02, ";
        assert!(text.starts_with(expected) && text.ends_with(", b20 and 5 more"), "{text}");
        let none = unknown("there is no client x", Some("x"), "clients", []);
        assert_eq!(none.to_string(), "there is no client x; clients here are: none");
    }
}
