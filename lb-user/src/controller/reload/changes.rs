//! Describes for the log how a configuration or endpoint list differs from the previous one:
//! clients, services, keys and endpoints by name.

use lb_core::endpoint::{Difference, Endpoint, EndpointList};
use lb_view::comparison;
use lb_view::configured::Configured;
use lb_view::text::{changes_in_a_line, names};

use crate::output::configured::endpoint_keys;

/// The maximum number of names of each kind in one log line. `socklb check --against-running` lists
/// all names.
const MOST: usize = 8;

pub fn changes(before: &Configured, after: &Configured) -> String {
    let clients = comparison::changes(&before.clients, &after.clients);
    let services = comparison::changes(&before.services, &after.services);
    changes_in_a_line(&clients, &services, &comparison::keys(&before.host, &after.host), MOST)
}

/// How `after` differs from `before`, with endpoints named by address.
pub fn list_changes(before: &EndpointList, after: &EndpointList) -> String {
    let Difference { added, removed, changed } = before.difference(after);
    let address = |endpoint: &&Endpoint| endpoint.address.to_string();
    let changed = changed.iter().filter_map(|(before, after_it)| {
        let mut keys = comparison::keys(&endpoint_keys(before), &endpoint_keys(after_it));
        // Indexes that are computed from the addresses change whenever any endpoint is added or
        // removed.
        keys.retain(|change| change.key != "index" || !after.has_address_indexes());
        let keys: Vec<String> = keys
            .iter()
            .map(|change| format!("{} {} -> {}", change.key, change.before, change.after))
            .collect();
        (!keys.is_empty()).then(|| format!("{} ({})", after_it.address, keys.join(", ")))
    });
    let changed: Vec<String> = changed.collect();
    let parts = [
        ("added", names(added.iter().map(address), MOST)),
        ("removed", names(removed.iter().map(address), MOST)),
        ("changed", names(changed.into_iter(), MOST)),
    ];
    let parts: Vec<String> = parts
        .into_iter()
        .filter(|(_, names)| !names.is_empty())
        .map(|(kind, names)| format!("{kind}: {names}"))
        .collect();
    if parts.is_empty() { "none".to_owned() } else { parts.join("; ") }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use lb_core::endpoint::EndpointState;

    use super::*;
    use crate::config::Config;
    use crate::config::tests::good;
    use crate::output::configured::configured;

    fn config(clients: &[&str], services: &[(&str, &str)], more: &str) -> Config {
        let client = |name: &&str| format!("[[client]]\njob = '{name}'\ncgroup = '{name}'\n");
        let service = |(number, (name, more)): (usize, &(&str, &str))| {
            format!(
                "[[service]]\nname = '{name}'\naddress = '10.96.0.1:{}'\nbackends = {{ static = [] }}\n{more}\n",
                number + 1
            )
        };
        let clients: String = clients.iter().map(client).collect();
        let services: String = services.iter().enumerate().map(service).collect();
        good(&format!("{clients}{services}{more}"))
    }

    fn list(endpoints: &[(u16, u16, EndpointState)]) -> EndpointList {
        let endpoint = |&(port, weight, state): &(u16, u16, EndpointState)| Endpoint {
            address: SocketAddr::from(([10, 0, 0, 1], port)),
            index: port.into(),
            weight,
            state,
            zone: None,
            agent: None,
        };
        let service = "10.96.0.10:80".parse().unwrap();
        EndpointList::new(endpoints.iter().map(endpoint).collect(), service, &[service]).unwrap()
    }

    #[test]
    fn changes_of_a_list_are_named_by_endpoint() {
        let [healthy, lame] = [EndpointState::Healthy, EndpointState::LameDuck];
        let before = list(&[(1, 1, healthy), (2, 1, healthy), (3, 1, healthy)]);
        assert_eq!(list_changes(&before, &before), "none");
        let after = list(&[(1, 1, healthy), (2, 5, lame), (4, 1, healthy)]);
        assert_eq!(
            list_changes(&before, &after),
            "added: 10.0.0.1:4; removed: 10.0.0.1:3; changed: 10.0.0.1:2 (state healthy -> lame-duck, weight 1 -> 5)"
        );
        let many: Vec<_> = (10..21).map(|port| (port, 1, healthy)).collect();
        let named: Vec<String> = (10..18).map(|port| format!("10.0.0.1:{port}")).collect();
        let removed = "removed: 10.0.0.1:1, 10.0.0.1:2, 10.0.0.1:3";
        assert_eq!(
            list_changes(&before, &list(&many)),
            format!("added: {} and 3 more; {removed}", named.join(", "))
        );
    }

    #[test]
    fn changes_of_a_configuration_are_named() {
        let before = config(&["a"], &[("users", "")], "");
        let check = |after: &Config, expected: &str| {
            assert_eq!(changes(&configured(&before), &configured(after)), expected);
        };
        check(&before, "nothing");
        check(&config(&["a", "b"], &[("users", "")], ""), "clients added: b");
        check(&config(&["b"], &[("users", "")], ""), "clients added: b; clients removed: a");
        check(&config(&["a"], &[("users", "policy = 'p2c'")], ""), "services changed: users (policy)");
        check(
            &config(&["a"], &[("users", ""), ("mail", "")], ""),
            "clients changed: a (services); services added: mail",
        );
        check(&config(&["a"], &[("users", "")], "[limits]\nslots = 64\n"), "changed: limits.slots");
    }
}
