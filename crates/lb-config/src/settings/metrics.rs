//! The `[metrics]` table: a TCP address at which the daemon serves metrics, besides its own socket.
//!
//! The mode of a Unix socket's file decides which users may open it. A TCP port has no mode, so it
//! must be on loopback, where only users of this host can reach it.

use std::net::SocketAddr;

use crate::keys::metrics::{HOSTS, LISTEN, SECTION};
use lb_document::kind::Refusal;
use lb_document::{Table, address};

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Metrics {
    /// A TCP address on loopback; `None` if only the daemon's own socket serves metrics.
    pub listen: Option<SocketAddr>,
    /// The names, in lower case, that a request to the port of `listen` may have as its host.
    /// `localhost` and the port's address are always allowed.
    pub hosts: Vec<String>,
}

/// Reads the table, which may be absent.
pub fn read(root: &Table<'_>) -> Metrics {
    let table = root.table(&SECTION);
    let listen = LISTEN.take_written(&table).flatten();
    let hosts = HOSTS.take_written(&table).flatten().unwrap_or_default();
    if let Some(item) = table.get(HOSTS.name)
        && !LISTEN.is_written(&table)
    {
        let message = "`hosts` has no effect: there is no port for metrics";
        item.fault(message.to_owned(), "write `listen`, or leave `hosts` out".to_owned());
    }
    Metrics { listen, hosts }
}

/// Reads an address, and refuses it if it is not on loopback.
pub fn loopback(text: &str) -> Result<SocketAddr, Refusal> {
    let address = address(text)?;
    let (why, help) = if !address.ip().is_loopback() {
        let port = address.port().max(1);
        let help = format!(
            "write \"127.0.0.1:{port}\" or \"[::1]:{port}\", and serve the metrics through a proxy with \
             access control"
        );
        ("is not on loopback, so every user that reaches the address could read the metrics", help)
    } else if address.port() == 0 {
        ("has port 0", "write 1 to 65535".to_owned())
    } else {
        return Ok(address);
    };
    Err((format!("\"{address}\" {why}"), Some(help)))
}

#[cfg(test)]
mod tests {
    use crate::tests::{LEAST, faults, good};

    #[test]
    fn a_loopback_address_for_metrics_is_accepted() {
        let of = |lines: &str| good(&format!("{LEAST}{lines}")).metrics.listen;
        assert_eq!((of(""), of("[metrics]")), (None, None));
        for address in ["127.0.0.1:9464", "127.9.9.9:1", "[::1]:65535"] {
            let listen = of(&format!("[metrics]\nlisten = '{address}'"));
            assert_eq!(listen.map(|listen| listen.to_string()).as_deref(), Some(address));
        }
    }

    #[test]
    fn names_of_the_port_are_in_lower_case() {
        let hosts = ["hosts = ['Metrics.Example', '10.0.0.1']", ""].map(|hosts| {
            good(&format!("{LEAST}[metrics]\nlisten = '127.0.0.1:9464'\n{hosts}")).metrics.hosts
        });
        assert_eq!(hosts, [vec!["metrics.example".to_owned(), "10.0.0.1".to_owned()], Vec::new()]);
    }

    #[test]
    fn a_wrong_value_is_reported_with_the_valid_ones() {
        let reached = "is not on loopback, so every user that reaches the address could read the metrics";
        let proxy = ", and serve the metrics through a proxy with access control";
        let cases = [
            (
                "listen = '0.0.0.0:9464'",
                format!(
                    "9:10: listen \"0.0.0.0:9464\" {reached} (write \"127.0.0.1:9464\" or \"[::1]:9464\"{proxy})"
                ),
            ),
            (
                "listen = '[2001:db8::1]:9'",
                format!("9:10: listen \"[2001:db8::1]:9\" {reached} (write \"127.0.0.1:9\" or \"[::1]:9\"{proxy})"),
            ),
            (
                "listen = '[::ffff:127.0.0.1]:9'",
                format!("9:10: listen \"[::ffff:127.0.0.1]:9\" {reached} (write \"127.0.0.1:9\" or \"[::1]:9\"{proxy})"),
            ),
            ("listen = '127.0.0.1:0'", "9:10: listen \"127.0.0.1:0\" has port 0 (write 1 to 65535)".to_owned()),
            (
                "listen = '127.0.0.1'",
                "9:10: listen \"127.0.0.1\" has no port (write \"127.0.0.1:8080\", with the right port)".to_owned(),
            ),
            (
                "listen = 'localhost:9464'",
                "9:10: listen \"localhost:9464\" is a host name, not an address (write an IP address and a \
                 port, as in \"10.0.0.1:8080\" or \"[2001:db8::1]:8080\")"
                    .to_owned(),
            ),
            ("listen = 9464", "9:10: listen must be a string, not a whole number (write it as in \"127.0.0.1:9464\")".to_owned()),
            (
                "hosts = ['metrics.example']",
                "9:9: `hosts` has no effect: there is no port for metrics (write `listen`, or leave `hosts` \
                 out)".to_owned(),
            ),
            (
                "listen = '127.0.0.1:1'\nhosts = ['metrics.example:9464']",
                "10:10: \"metrics.example:9464\" is not the name of a host (write the name of a host without a port, as in \
                 \"metrics.example\", or an IP address)"
                    .to_owned(),
            ),
        ];
        for (line, expected) in cases {
            assert_eq!(faults(&format!("{LEAST}[metrics]\n{line}")), [expected], "{line}");
        }
        assert_eq!(faults(&format!("{LEAST}[[metrics]]")), ["8:1: metrics must be a table, not a list"]);
    }
}
