//! What is fixed when the daemon starts: the directories that it works in, the sizes of the maps, and where it listens.
//!
//! Maps are made once and outlive the daemon: a start over maps of other sizes is refused rather than losing what is in
//! them. What has to be done for a change is told before an operator restarts in vain.

use std::path::Path;

use lb_core::limits::Limits;
use lb_kernel::pins_option;

use crate::config::{Config, Paths};

/// Settings that `wanted` changes and that cannot change while the daemon runs with `clients`, and how to change them.
pub fn unchangeable(running: &Config, wanted: &Config, clients: &[&str]) -> Vec<String> {
    let Paths { pins, run, state } = &wanted.paths;
    let Limits { schedule_entries, flow_records, slots } = wanted.limits;
    let remade = [
        ("paths.pins", *pins != running.paths.pins),
        ("limits.schedule_entries", schedule_entries != running.limits.schedule_entries),
        ("limits.flow_records", flow_records != running.limits.flow_records),
        ("limits.slots", slots != running.limits.slots),
    ];
    let restarted = [
        ("paths.run", *run != running.paths.run),
        ("paths.state", *state != running.paths.state),
        ("metrics.listen", wanted.metrics.listen != running.metrics.listen),
    ];
    let changed = |names: &[(&'static str, bool)]| -> Vec<&'static str> {
        names.iter().filter(|(_, changed)| *changed).map(|(name, _)| *name).collect()
    };
    let remade = changed(&remade).into_iter().map(|name| {
        let remove = remove_all(clients, &running.paths.pins);
        format!(
            "{name} cannot change while running, nor by a restart alone, for the clients' maps outlive it: stop socklb, run \
             {remove} (connects then go unbalanced), and start it again"
        )
    });
    let restarted = changed(&restarted)
        .into_iter()
        .map(|name| format!("{name} cannot change while running; restart socklb to apply it"));
    remade.chain(restarted).collect()
}

/// The command that removes these clients' pins. For more than one, a loop of the shell; their names need no quoting.
pub fn remove_all(clients: &[&str], pins: &Path) -> String {
    let pins = pins_option(pins);
    match clients {
        [client] => format!("`socklb detach {client}{pins}`"),
        _ => format!("`for client in {}; do socklb detach $client{pins}; done`", clients.join(" ")),
    }
}

/// Puts the fixed settings of the running daemon in place of those of another configuration.
pub fn keep(running: &Config, wanted: &mut Config) {
    wanted.paths = running.paths.clone();
    wanted.limits = running.limits;
    wanted.metrics = running.metrics;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::tests::{LEAST, good};

    #[test]
    fn what_a_restart_alone_changes_is_named_and_what_is_in_force_stays() {
        let with = |lines: &str| good(&format!("{LEAST}{lines}"));
        let metrics = "[metrics]\nlisten = '127.0.0.1:9464'\n";
        let other = "[metrics]\nlisten = '[::1]:9464'\n[paths]\nrun = 'r'\nstate = 's'\n";
        let named = |key: &str| format!("{key} cannot change while running; restart socklb to apply it");
        let (run, state, listen) = (named("paths.run"), named("paths.state"), named("metrics.listen"));
        let cases: [(&str, &str, &[String]); 5] = [
            ("", "", &[]),
            (metrics, metrics, &[]),
            ("", metrics, std::slice::from_ref(&listen)),
            (metrics, "", std::slice::from_ref(&listen)),
            (metrics, other, &[run, state, listen.clone()]),
        ];
        for (running, wanted, expected) in cases {
            let (running, mut wanted) = (with(running), with(wanted));
            assert_eq!(unchangeable(&running, &wanted, &["j"]), expected);
            keep(&running, &mut wanted);
            assert_eq!(unchangeable(&running, &wanted, &["j"]), [""; 0], "what is kept is as it was");
        }
    }

    #[test]
    fn the_command_names_every_client_and_where_it_is_pinned() {
        let usual = &Paths::default().pins;
        assert_eq!(remove_all(&["web"], usual), "`socklb detach web`");
        assert_eq!(remove_all(&["web"], Path::new("/bpf/x")), "`socklb detach web --pins '/bpf/x'`");
        assert_eq!(
            remove_all(&["web", "batch"], Path::new("/bpf/it's")),
            r"`for client in web batch; do socklb detach $client --pins '/bpf/it'\''s'; done`"
        );
    }
}
