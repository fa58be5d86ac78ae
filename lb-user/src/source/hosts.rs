//! Text about the host names in a list.

use std::collections::BTreeSet;
use std::time::Instant;

use lb_discovery::{Host, HostTable};

/// The number of host names that a text names.
const SHOWN: usize = 4;

/// The largest number of characters of a reason. A reason names every server that was queried.
const REASON: usize = 200;

/// Which of these names do not resolve, since when and why; `None` if all do.
pub fn unresolved(hosts: &BTreeSet<Host>, table: &HostTable, now: Instant) -> Option<String> {
    let missing = |host: &Host| {
        let state = table.0.get(host)?;
        let missing = state.missing.as_ref()?;
        let seconds = now.saturating_duration_since(missing.since).as_secs();
        let age = if seconds < 60 { format!("{seconds} s") } else { format!("{} min", seconds / 60) };
        let why: String = missing.why.chars().take(REASON).collect();
        let left = if state.addresses.is_empty() { "no address so far" } else { "its addresses stay" };
        Some(format!("{} for {age} ({why}; {left})", host.name))
    };
    let texts: Vec<String> = hosts.iter().filter_map(missing).collect();
    let shown = texts.iter().take(SHOWN).map(String::as_str).collect::<Vec<_>>().join(", ");
    let more = match texts.len().saturating_sub(SHOWN) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let count = format!("{} of {} host names do not resolve", texts.len(), hosts.len());
    (!texts.is_empty()).then(|| format!("{count}: {shown}{more}"))
}

/// The addresses of some of these names, as text; `None` if none resolves.
pub fn resolved(hosts: &BTreeSet<Host>, table: &HostTable) -> Option<String> {
    let addresses = |host: &Host| {
        let state = table.0.get(host).filter(|state| !state.addresses.is_empty())?;
        let shown = state.addresses.iter().take(SHOWN).map(ToString::to_string);
        let more = state.addresses.len().saturating_sub(SHOWN);
        let more = (more > 0).then(|| format!("and {more} more"));
        Some(format!("{}: {}", host.name, shown.chain(more).collect::<Vec<_>>().join(" ")))
    };
    let all: Vec<String> = hosts.iter().filter_map(addresses).collect();
    let more = all.len().saturating_sub(SHOWN);
    let more = (more > 0).then(|| format!("{more} more"));
    let shown = all.iter().take(SHOWN).cloned().chain(more).collect::<Vec<_>>().join("; ");
    (!all.is_empty()).then(|| format!("{} of {} host names resolve: {shown}", all.len(), hosts.len()))
}
