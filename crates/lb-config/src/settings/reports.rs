//! The `[reports]` table: how the daemon requests reports from the backends' agents, and the keys
//! that authenticate them.

use lb_document::kind::ValueKind as _;
use lb_document::{Item, Table};
use lb_report::keys::{Keys, ServiceKey};
use std::net::{Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};

use crate::ProcessEnvironment;
use crate::keys::reports::{KEY, LISTEN, SECTION, XDP, XDP_GENERIC};

/// The default source port of requests to agents. This port differs from the agents' own port, so
/// that one host can run a daemon and an agent.
pub const PORT: u16 = 9467;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReportsConfig {
    /// The UDP address from which the daemon sends requests.
    pub listen: Option<SocketAddr>,
    /// The keys of all services that do not name a key file of their own.
    pub keys: Option<Keys<ServiceKey>>,
    /// The network interfaces on which the receiver (XDP) processes reports in the kernel.
    pub xdp: Vec<String>,
    /// Whether the receiver may run in the network stack on an interface whose driver does not
    /// support XDP.
    pub xdp_generic: bool,
}

impl ReportsConfig {
    /// The default address: all addresses of both families, at the default port.
    pub const ANY: SocketAddr = SocketAddr::new(std::net::IpAddr::V6(Ipv6Addr::UNSPECIFIED), PORT);
}

/// Reads the table, which may be absent; relative paths are relative to `directory`.
pub fn read(root: &Table<'_>, directory: &Path, env: &dyn ProcessEnvironment) -> ReportsConfig {
    let table = root.table(&SECTION);
    let listen = LISTEN.take_written(&table).flatten();
    let keys = KEY.item(&table).and_then(|item| read_keys(&item, directory, env));
    let xdp = XDP.take_written(&table).flatten().unwrap_or_default();
    if !xdp.is_empty()
        && listen.is_some_and(|address| address.port() == 0)
        && let Some(item) = LISTEN.item(&table)
    {
        // Agents continue to send reports to the port after the daemon has restarted. While the
        // daemon is down, the receiver drops every datagram to this port that is not a report. So
        // the port must be fixed.
        let help = format!("name a port that only the daemon uses, such as {PORT}");
        item.fault("with `xdp`, the port must stay the same across restarts", help);
    }
    ReportsConfig { listen, keys, xdp, xdp_generic: XDP_GENERIC.take_or_default(&table) }
}

/// Reads the key file that a key of the configuration names, and reports its faults.
pub fn read_keys(
    item: &Item<'_>,
    directory: &Path,
    env: &dyn ProcessEnvironment,
) -> Option<Keys<ServiceKey>> {
    let path: PathBuf = directory.join(&*KEY.kind.read(item)?);
    match env.service_keys(&path) {
        Ok(keys) => Some(keys),
        Err(why) => {
            let help = "`socklb agent key` creates a key; mode 0640 at most".to_owned();
            item.fault(why, help);
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{LEAST, check, good, key};

    #[test]
    fn missing_keys_have_their_defaults() {
        let of = |lines: &str| good(&format!("{LEAST}{lines}")).reports;
        let nothing = ReportsConfig { listen: None, keys: None, xdp: Vec::new(), xdp_generic: false };
        assert_eq!([of(""), of("[reports]")], [nothing.clone(), nothing.clone()]);
        assert_eq!(ReportsConfig::ANY.to_string(), "[::]:9467");
        let listen = "127.0.0.1:0".parse().ok();
        assert_eq!(
            of("[reports]\nlisten = '127.0.0.1:0'\nkey = 'key-7'"),
            ReportsConfig { listen, keys: Some(key(7)), ..nothing.clone() }
        );
        let xdp = vec!["eth0".to_owned(), "eth1".to_owned()];
        assert_eq!(
            of("[reports]\nxdp = ['eth0', 'eth1']\nxdp_generic = true"),
            ReportsConfig { xdp, xdp_generic: true, ..nothing.clone() }
        );
    }

    #[test]
    fn a_wrong_value_is_reported_with_the_valid_ones() {
        for (line, expected) in [
            (
                "key = 'a'",
                "9:7: /etc/socklb/a: there is no such file (`socklb agent key` creates a key; mode 0640 at most)",
            ),
            ("key = ''", "9:7: key is empty"),
            (
                "listen = ':9467'",
                "9:10: listen \":9467\" is not an address (write an IP address and a port, as in \"10.0.0.1:8080\" or \
                 \"[2001:db8::1]:8080\")",
            ),
            (
                "port = 1",
                "9:1: unknown key \"port\" in [reports] (known keys: listen, key, xdp, xdp_generic)",
            ),
            ("xdp = 'eth0'", "9:7: xdp must be a list, not a string (write [\"eth0\"])"),
            (
                "xdp = ['a/b']",
                "9:8: \"a/b\" is not the name of an interface (write the name of a network interface, as `ip link` shows it: 1 to 15 \
                 characters)",
            ),
            (
                "listen = '127.0.0.1:0'\nxdp = ['eth0']",
                "9:10: with `xdp`, the port must stay the same across restarts (name a port that only the daemon uses, such as 9467)",
            ),
            ("xdp_generic = 1", "9:15: xdp_generic must be true or false, not a whole number"),
        ] {
            check(&format!("{LEAST}[reports]\n{line}"), &[expected]);
        }
    }
}
