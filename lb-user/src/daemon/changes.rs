//! What another configuration changes, in words for the log: clients and services by name. How their endpoint files change
//! is told when these are read.

use std::collections::BTreeMap;

use lb_core::service::Service;

use crate::config::{Client, ClientService, Config, Source};

/// What `after` changes of `before`.
pub fn changes(before: &Config, after: &Config) -> String {
    let mut told = Vec::new();
    tell("clients", &clients(before), &clients(after), &mut told);
    tell("services", &services(before), &services(after), &mut told);
    if before.limits != after.limits || before.paths != after.paths || before.metrics != after.metrics {
        told.push("what takes a restart".to_owned());
    }
    if told.is_empty() { "nothing".to_owned() } else { told.join("; ") }
}

/// The clients, with the names of their services in place of these.
fn clients(config: &Config) -> BTreeMap<&str, (Client, Vec<&str>)> {
    let bare = |client: &Client| Client { services: Vec::new(), ..client.clone() };
    config
        .clients
        .iter()
        .map(|client| {
            let dialled = client.services.iter().map(|service| service.service.name.as_str()).collect();
            (client.name.as_str(), (bare(client), dialled))
        })
        .collect()
}

/// The services as the first client that dials them sees them, without the seed, which is that of a job.
fn services(config: &Config) -> BTreeMap<&str, (Service, &Source)> {
    let mut services = BTreeMap::new();
    for ClientService { service, source } in config.clients.iter().flat_map(|client| &client.services) {
        let name = service.name.as_str();
        services.entry(name).or_insert_with(|| (Service { seed: 0, ..service.clone() }, source));
    }
    services
}

fn tell<T: PartialEq>(
    what: &str,
    before: &BTreeMap<&str, T>,
    after: &BTreeMap<&str, T>,
    told: &mut Vec<String>,
) {
    let only = |of: &BTreeMap<&str, T>, not: &BTreeMap<&str, T>| -> Vec<String> {
        of.keys().filter(|name| !not.contains_key(*name)).map(ToString::to_string).collect()
    };
    let changed = after.iter().filter(|(name, value)| before.get(*name).is_some_and(|old| old != *value));
    let kinds = [
        ("added", only(after, before)),
        ("removed", only(before, after)),
        ("changed", changed.map(|(name, _)| (*name).to_owned()).collect()),
    ];
    for (kind, names) in kinds.into_iter().filter(|(_, names)| !names.is_empty()) {
        told.push(format!("{what} {kind}: {}", names.join(", ")));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::tests::good;

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

    #[test]
    fn what_changed_is_named() {
        let before = config(&["a"], &[("users", "")], "");
        let check = |after: &Config, expected: &str| assert_eq!(changes(&before, after), expected);
        check(&before, "nothing");
        check(&config(&["a", "b"], &[("users", "")], ""), "clients added: b");
        check(&config(&["b"], &[("users", "")], ""), "clients added: b; clients removed: a");
        check(&config(&["a"], &[("users", "policy = 'p2c'")], ""), "services changed: users");
        check(
            &config(&["a"], &[("users", ""), ("mail", "")], ""),
            "clients changed: a; services added: mail",
        );
        check(&config(&["a"], &[("users", "")], "[limits]\nslots = 64\n"), "what takes a restart");
    }
}
