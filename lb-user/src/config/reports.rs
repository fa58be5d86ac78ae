//! The `[reports]` table: how the daemon asks backends' agents, and the keys by which it believes them.

use std::net::{Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};

use lb_core::report_keys::{Keys, ServiceKey};
use lb_document::diagnostic::Report;
use lb_document::kind::Kind as _;
use lb_document::{Item, Table};

use super::Environment;
use super::keys::reports::{KEY, LISTEN, SECTION};

/// The port that agents are asked from: not the agents' own, so that a host can be both.
pub const PORT: u16 = 9467;

/// How agents are asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reports {
    /// The UDP address.
    pub listen: Option<SocketAddr>,
    /// The keys of services that name none of their own.
    pub keys: Option<Keys<ServiceKey>>,
}

impl Reports {
    /// Both families, at the default port.
    pub const ANY: SocketAddr = SocketAddr::new(std::net::IpAddr::V6(Ipv6Addr::UNSPECIFIED), PORT);
}

/// Reads the table, if there is one; relative paths are relative to `directory`.
pub fn read(root: &Table<'_>, directory: &Path, env: &dyn Environment, report: &mut Report<'_>) -> Reports {
    let table = root.table(&SECTION, report);
    let listen = LISTEN.take_written(&table, report).flatten();
    let keys = KEY.item(&table, report).and_then(|item| read_keys(&item, directory, env, report));
    Reports { listen, keys }
}

/// Reads the file of keys that a key of the configuration names.
pub fn read_keys(
    item: &Item<'_>,
    directory: &Path,
    env: &dyn Environment,
    report: &mut Report<'_>,
) -> Option<Keys<ServiceKey>> {
    let path: PathBuf = directory.join(&*KEY.kind.read(item, report)?);
    match env.service_keys(&path) {
        Ok(keys) => Some(keys),
        Err(why) => {
            let help = "`socklb agent key` makes a key; mode 0640 at most".to_owned();
            report.add(item.span(), why, help);
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{LEAST, check, good, key};
    use super::*;

    #[test]
    fn what_is_not_written_is_the_default() {
        let of = |lines: &str| good(&format!("{LEAST}{lines}")).reports;
        let nothing = Reports { listen: None, keys: None };
        assert_eq!([of(""), of("[reports]")], [nothing.clone(), nothing]);
        assert_eq!(Reports::ANY.to_string(), "[::]:9467");
        let listen = "127.0.0.1:0".parse().ok();
        assert_eq!(
            of("[reports]\nlisten = '127.0.0.1:0'\nkey = 'key-7'"),
            Reports { listen, keys: Some(key(7)) }
        );
    }

    #[test]
    fn a_wrong_value_names_itself_and_what_is_right() {
        for (line, expected) in [
            (
                "key = 'a'",
                "9:7: /etc/socklb/a: there is no such file (`socklb agent key` makes a key; mode 0640 at most)",
            ),
            ("key = ''", "9:7: key is empty"),
            (
                "listen = ':9467'",
                "9:10: listen \":9467\" is not an address (write an IP address and a port, as in \"10.0.0.1:8080\" or \
                 \"[2001:db8::1]:8080\")",
            ),
            ("port = 1", "9:1: unknown key \"port\" in [reports] (known keys: listen, key)"),
        ] {
            check(&format!("{LEAST}[reports]\n{line}"), &[expected]);
        }
    }
}
