//! A backend's name as text: `ADDRESS:PORT`, followed by `/udp` if the protocol is UDP.

use lb_core::service::Protocol;
use lb_document::parse_address;
use lb_report::agent::name::Name;

/// Parses a name.
///
/// # Errors
/// The fault of the text, and a valid form.
pub fn parse(text: &str) -> Result<Name, String> {
    let (address, protocol) = text.split_once('/').unwrap_or((text, Protocol::Tcp.name()));
    let known = Protocol::ALL.into_iter().find(|known| known.name() == protocol);
    let Some(protocol) = known else {
        return Err(format!("unknown protocol {protocol:?} (write /tcp or /udp; tcp is the default)"));
    };
    let address = parse_address(address).map_err(|no| format!("{address:?} {} ({})", no.why, no.help))?;
    Name::new(protocol, address).map_err(|why| format!("{address} {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_and_print_alike() {
        for text in ["10.0.0.1:80", "10.0.0.1:53/udp", "[2001:db8::1]:80"] {
            assert_eq!(parse(text).map(|name| name.to_string()).as_deref(), Ok(text));
        }
        assert_eq!(parse("[::ffff:10.0.0.1]:80/tcp").unwrap().to_string(), "10.0.0.1:80");
    }

    #[test]
    fn invalid_names_are_refused_with_the_reason() {
        for (text, expected) in [
            ("10.0.0.1", "has no port"),
            ("10.0.0.1:80/sctp", "unknown protocol \"sctp\""),
            ("[fe80::1]:80", "is no backend's name"),
            ("0.0.0.0:80", "is no backend's name"),
            ("10.0.0.1:0", "is no backend's name"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }
}
