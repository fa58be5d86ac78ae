//! Lists of names of network interfaces.

use crate::diagnostic::{Report, quote};
use crate::{Item, Unique};

/// Interfaces that may be named.
const MAX_INTERFACES: usize = 64;

/// The names of network interfaces in a list.
pub fn read(item: &Item<'_>, report: &mut Report<'_>) -> Vec<String> {
    let Some(items) = item.list(report) else { return Vec::new() };
    if items.len() > MAX_INTERFACES {
        let message = format!("{} names {} interfaces", item.name(), items.len());
        report.add(item.span(), message, format!("name {MAX_INTERFACES} at most"));
        return Vec::new();
    }
    let mut named = Unique::default();
    let mut names = Vec::with_capacity(items.len());
    for item in items {
        let Some(name) = item.text(report) else { continue };
        if !is_name(name) {
            let help =
                "write the name of a network interface, as `ip link` has it: 1 to 15 characters".to_owned();
            report.add(item.span(), format!("{} is not the name of an interface", quote(name)), help);
        } else if named.claim(name, item.span(), &format!("interface {name}"), report) {
            names.push(name.to_owned());
        }
    }
    names
}

/// Whether the kernel would give an interface this name.
fn is_name(name: &str) -> bool {
    let is_odd = |c: char| c == '/' || c == ':' || c.is_whitespace() || c.is_control();
    (1..=15).contains(&name.len()) && name != "." && name != ".." && !name.contains(is_odd)
}
