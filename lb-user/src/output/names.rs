//! Checks that the names given to a command exist, so that a misspelt name results in an error and
//! not in an empty output.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use lb_view::filter::Filter;

use lb_document::did_you_mean;

/// The backends of each service, merged over several clients.
pub type BackendsByService<'a> = BTreeMap<&'a str, BTreeSet<SocketAddr>>;

/// If the filter has a client, checks that it is one of `clients`.
///
/// # Errors
/// If the client does not exist. The message lists the clients that exist.
pub fn check_client<'a>(
    filter: &Filter,
    clients: impl IntoIterator<Item = &'a str>,
    place: &str,
) -> Result<(), String> {
    let clients: BTreeSet<&str> = clients.into_iter().collect();
    match &filter.client {
        Some(client) if !clients.contains(client.as_str()) => {
            Err(unknown(&format!("there is no client {client:?} {place}"), Some(client), "clients", clients))
        }
        _ => Ok(()),
    }
}

/// If the filter has a service or a backend, checks that they exist. `services` are the services of
/// the clients that the filter selects.
///
/// # Errors
/// If the service or the backend does not exist. The message lists the services or backends that
/// exist.
pub fn check<'a>(filter: &Filter, services: impl FnOnce() -> BackendsByService<'a>) -> Result<(), String> {
    if filter.service.is_none() && filter.backend.is_none() {
        return Ok(());
    }
    let services = services();
    if let Some(service) = filter.service.as_ref().filter(|service| !services.contains_key(service.as_str()))
    {
        let what = match &filter.client {
            Some(client) => format!("client {client:?} does not dial service {service:?}"),
            None => format!("no client here dials a service {service:?}"),
        };
        return Err(unknown(&what, Some(service), "services", services.into_keys()));
    }
    let of_services = services.into_iter().filter(|(name, _)| filter.has_service(name));
    let backends: BTreeSet<SocketAddr> = of_services.flat_map(|(_, backends)| backends).collect();
    match filter.backend {
        Some(backend) if !backends.contains(&backend) => {
            let of = filter
                .service
                .as_ref()
                .map_or_else(String::new, |service| format!(" of service {service:?}"));
            let names: Vec<String> = backends.iter().map(ToString::to_string).collect();
            let what = format!("there is no backend {backend}{of}");
            Err(unknown(&what, None, "backends", names.iter().map(String::as_str)))
        }
        _ => Ok(()),
    }
}

/// The error for a name that does not exist. It lists existing names.
fn unknown<'a>(
    what: &str,
    given: Option<&str>,
    kind: &str,
    known: impl IntoIterator<Item = &'a str>,
) -> String {
    /// The maximum number of names that are listed: a service may have thousands of backends.
    const NAMED: usize = 20;
    let known: Vec<&str> = known.into_iter().collect();
    // Addresses get no suggestion, because all addresses look alike.
    let near = given.map_or_else(String::new, |given| did_you_mean(given, &known));
    let names = if known.is_empty() { "none".to_owned() } else { known[..known.len().min(NAMED)].join(", ") };
    let more = known.len().saturating_sub(NAMED);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!("{what}; {near}{kind} here are: {names}{more}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_list_of_names_is_cut() {
        let names: Vec<String> = (1..=25).map(|n| format!("b{n:02}")).collect();
        let text = unknown("there is no backend x", None, "backends", names.iter().map(String::as_str));
        let expected = "there is no backend x; backends here are: b01, b02, ";
        assert!(text.starts_with(expected) && text.ends_with(", b20 and 5 more"), "{text}");
        let none = unknown("there is no client \"x\"", Some("x"), "clients", []);
        assert_eq!(none, "there is no client \"x\"; clients here are: none");
    }

    #[test]
    fn an_unknown_name_is_reported_with_the_known_names() {
        let known: BackendsByService<'_> =
            [("users", [([10, 0, 0, 1], 80).into(), ([10, 0, 0, 2], 80).into()].into()), ("mail", [].into())]
                .into();
        #[track_caller]
        fn message(
            known: &BackendsByService<'_>,
            client: Option<&str>,
            service: Option<&str>,
            backend: Option<&str>,
        ) -> String {
            let filter = Filter {
                client: client.map(str::to_owned),
                service: service.map(str::to_owned),
                backend: backend.map(|backend| backend.parse().unwrap()),
            };
            check(&filter, || known.clone()).err().unwrap_or_default()
        }
        assert_eq!(message(&known, None, Some("users"), Some("10.0.0.2:80")), "");
        assert_eq!(
            message(&known, None, Some("user"), None),
            "no client here dials a service \"user\"; did you mean users? services here are: mail, users"
        );
        let expected = "client \"web\" does not dial service \"queue\"; services here are: mail, users";
        assert_eq!(message(&known, Some("web"), Some("queue"), None), expected);
        let expected = "there is no backend 10.0.0.9:80 of service \"mail\"; backends here are: none";
        assert_eq!(message(&known, None, Some("mail"), Some("10.0.0.9:80")), expected);
    }
}
