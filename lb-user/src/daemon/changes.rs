//! What another configuration changes, in words for the log: clients, services and keys by name. How their endpoint files
//! change is told when these are read.

use lb_view::comparison;
use lb_view::configured::Configured;
use lb_view::text::changes_in_a_line;

/// Names of each kind that a line has: a log is read by people, and `socklb check --against-running` tells them all.
const MOST: usize = 8;

/// What `after` changes of `before`.
pub fn changes(before: &Configured, after: &Configured) -> String {
    let clients = comparison::changes(&before.clients, &after.clients);
    let services = comparison::changes(&before.services, &after.services);
    changes_in_a_line(&clients, &services, &comparison::keys(&before.host, &after.host), MOST)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::config::tests::good;
    use crate::configured::configured;

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
