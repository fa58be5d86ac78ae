//! Settings that are fixed when the daemon starts, such as its directories, the sizes of the maps,
//! and the addresses at which it listens.
//!
//! Maps are created once and outlive the daemon. If existing maps have other sizes, the daemon
//! refuses to start, because new maps would be empty. For each changed setting this module lists
//! the steps that apply the change, so that an operator does not restart the daemon without effect.

use std::path::Path;

use lb_kernel::pins_option;
use lb_view::comparison;
use lb_view::configured::Keys;

use crate::config::Config;

/// Configuration keys that need new maps if they change.
const REMADE: [&str; 4] = ["paths.pins", "limits.schedule_entries", "limits.flow_records", "limits.slots"];
/// Configuration keys that a daemon reads only when it starts.
const RESTARTED: [&str; 7] = [
    "paths.run",
    "paths.state",
    "metrics.listen",
    "metrics.hosts",
    "admin.group",
    "reports.listen",
    "daemon.log_format",
];

/// A text for each host-wide key that has another value in `wanted` but cannot change while the
/// daemon runs. The text contains the steps that apply the change. `clients` are the clients of the
/// running daemon, and `pins` is the directory of their pins.
pub fn unchangeable(running: &Keys, wanted: &Keys, pins: &Path, clients: &[&str]) -> Vec<String> {
    let changed = comparison::keys(running, wanted);
    let is_changed = |name: &&str| changed.iter().any(|change| change.key == *name);
    let remade = REMADE.into_iter().filter(is_changed).map(|name| {
        let remove = remove_all(clients, pins);
        format!(
            "{name} cannot change while the daemon runs; a restart is not enough, because the clients' maps \
             outlive the daemon: stop socklb, run {remove} (connects are then not balanced), and start \
             socklb again"
        )
    });
    let restarted = RESTARTED.into_iter().filter(is_changed).map(|name| {
        format!("{name} cannot change while the daemon runs; restart socklb to apply the new value")
    });
    remade.chain(restarted).collect()
}

/// The command that removes the pins of these clients. For several clients it is a shell loop.
/// Names of clients need no quoting.
pub fn remove_all(clients: &[&str], pins: &Path) -> String {
    let pins = pins_option(pins);
    match clients {
        [client] => format!("`socklb detach {client}{pins}`"),
        _ => format!("`for client in {}; do socklb detach $client{pins}; done`", clients.join(" ")),
    }
}

/// Replaces the fixed settings of another configuration with the settings of the running daemon.
pub fn carry_over(running: &Config, wanted: &mut Config) {
    wanted.paths = running.paths.clone();
    wanted.limits = running.limits;
    wanted.metrics.clone_from(&running.metrics);
    wanted.admins.clone_from(&running.admins);
    wanted.reports.listen = running.reports.listen;
    wanted.daemon.log_format = running.daemon.log_format;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Paths;
    use crate::config::tests::{LEAST, good};
    use crate::output::configured::configured;

    fn changes(running: &Config, wanted: &Config) -> Vec<String> {
        let (running_keys, wanted) = (configured(running).host, configured(wanted).host);
        unchangeable(&running_keys, &wanted, &running.paths.pins, &["j"])
    }

    #[test]
    fn settings_that_need_a_restart_are_named_and_stay_in_force() {
        let with = |lines: &str| good(&format!("{LEAST}{lines}"));
        let metrics = "[metrics]\nlisten = '127.0.0.1:9464'\n";
        let other = "[metrics]\nlisten = '[::1]:9464'\n[paths]\nrun = 'r'\nstate = 's'\n";
        let named = |key: &str| {
            format!("{key} cannot change while the daemon runs; restart socklb to apply the new value")
        };
        let (run, state, listen) = (named("paths.run"), named("paths.state"), named("metrics.listen"));
        let group = "[admin]\ngroup = 'ops'\n";
        let hosts = format!("{metrics}hosts = ['metrics.example']");
        let json = "[daemon]\nlog_format = 'json'\nwatch = false\n";
        let cases: [(&str, &str, &[String]); 8] = [
            ("", "", &[]),
            (metrics, metrics, &[]),
            ("", metrics, std::slice::from_ref(&listen)),
            (metrics, "", std::slice::from_ref(&listen)),
            (metrics, other, &[run, state, listen.clone()]),
            ("", group, &[named("admin.group")]),
            (metrics, &hosts, &[named("metrics.hosts")]),
            ("", json, &[named("daemon.log_format")]),
        ];
        for (running, wanted, expected) in cases {
            let (running, mut wanted) = (with(running), with(wanted));
            assert_eq!(changes(&running, &wanted), expected);
            carry_over(&running, &mut wanted);
            assert_eq!(changes(&running, &wanted), [""; 0], "the fixed settings are unchanged");
        }
    }

    #[test]
    fn the_command_names_every_client_and_the_pins() {
        let usual = &Paths::default().pins;
        assert_eq!(remove_all(&["web"], usual), "`socklb detach web`");
        assert_eq!(remove_all(&["web"], Path::new("/bpf/x")), "`socklb detach web --pins '/bpf/x'`");
        assert_eq!(
            remove_all(&["web", "batch"], Path::new("/bpf/it's")),
            r"`for client in web batch; do socklb detach $client --pins '/bpf/it'\''s'; done`"
        );
    }
}
