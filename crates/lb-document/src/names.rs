//! Lists of names: the names of network interfaces, and of hosts.

use crate::control::is_obeyed;
use crate::diagnostic::quote;
use crate::{Item, Unique};

/// The maximum number of names in a list.
const MAX_NAMES: usize = 64;

/// The rule for the names of one list.
struct NameRule {
    /// The kind of name, such as "interface".
    what: &'static str,
    /// The correction for a wrong name.
    help: &'static str,
    is_name: fn(&str) -> bool,
}

/// Reads a list of network interfaces.
pub fn interfaces(item: &Item<'_>) -> Option<Vec<String>> {
    let help = "write the name of a network interface, as `ip link` shows it: 1 to 15 characters";
    read(item, &NameRule { what: "interface", help, is_name: is_interface })
}

/// Reads a list of host names, and converts them to lower case.
pub fn hosts(item: &Item<'_>) -> Option<Vec<String>> {
    let help = "write the name of a host without a port, as in \"metrics.example\", or an IP address";
    let names = read(item, &NameRule { what: "host", help, is_name: is_host })?;
    Some(names.into_iter().map(|name| name.to_ascii_lowercase()).collect())
}

fn read(item: &Item<'_>, named: &NameRule) -> Option<Vec<String>> {
    let items = item.list()?;
    if items.len() > MAX_NAMES {
        let message = format!("{} has {} {}s", item.name(), items.len(), named.what);
        item.fault(message, format!("write at most {MAX_NAMES}"));
        return None;
    }
    let mut unique = Unique::default();
    let mut names = Vec::with_capacity(items.len());
    for item in items {
        let Some(name) = item.text() else { continue };
        if !(named.is_name)(name) {
            let message = format!("{} is not the name of {}", quote(name), article(named.what));
            item.fault(message, named.help.to_owned());
        } else if unique.claim(name, item.span(), &format!("{} {name}", named.what), item.report()) {
            names.push(name.to_owned());
        }
    }
    Some(names)
}

fn article(what: &str) -> String {
    let article = if what.starts_with(['a', 'e', 'i', 'o', 'u']) { "an" } else { "a" };
    format!("{article} {what}")
}

/// Returns whether the text is an IP address or a host name (RFC 1123 section 2.1; as in resolvers,
/// an underscore is also allowed).
fn is_host(name: &str) -> bool {
    let is_label = |label: &str| {
        (1..=63).contains(&label.len())
            && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_'))
    };
    name.len() <= 253 && name.split('.').all(is_label) || name.parse::<std::net::IpAddr>().is_ok()
}

/// Returns whether the kernel accepts this text as the name of an interface, and a terminal shows
/// every character of it.
fn is_interface(name: &str) -> bool {
    let is_odd = |c: char| c == '/' || c == ':' || c.is_whitespace() || is_obeyed(c);
    (1..=15).contains(&name.len()) && name != "." && name != ".." && !name.contains(is_odd)
}
