//! Text about the host names in a list.

use std::collections::BTreeSet;
use std::time::{Duration, Instant, SystemTime};

use lb_discovery::{HostName, HostTable};

use super::ListSource;

/// The maximum number of host names that a text lists.
const SHOWN: usize = 4;

/// The maximum number of characters of a reason. A reason names every server that was queried.
const REASON: usize = 200;

/// Lists which of these names do not resolve, for how long, and why; `None` if all names resolve.
/// `wall` is the wall-clock time at `now`.
pub fn unresolved(
    source: &ListSource,
    hosts: &BTreeSet<HostName>,
    table: &HostTable,
    now: Instant,
    wall: SystemTime,
) -> Option<String> {
    let missing = |host: &HostName| {
        let state = table.0.get(host)?;
        let missing = state.missing_for(|ip| source.allows(ip))?;
        let age = short(now.saturating_duration_since(missing.since));
        let why: String = missing.why.chars().take(REASON).collect();
        let left = match state.stored {
            _ if state.addresses_for(|ip| source.allows(ip)).is_empty() => "no address so far".to_owned(),
            None => "its addresses remain in use".to_owned(),
            // The age of a time in the future is zero.
            Some(at) => {
                let age = short(wall.duration_since(at).unwrap_or_default());
                format!("an earlier run stored its addresses {age} ago; they remain in use")
            }
        };
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

/// How long a condition has lasted, as text: " for 24 s"; empty if it began less than a second ago,
/// or if it does not exist.
pub fn lasting(since: Option<Instant>, now: Instant) -> String {
    let age = since.map_or(Duration::ZERO, |since| now.saturating_duration_since(since));
    if age < Duration::from_secs(1) { String::new() } else { format!(" for {}", short(age)) }
}

/// The text of [`lasting`] for the end of a sentence: " (for 24 s)".
pub fn lasting_in_brackets(since: Option<Instant>, now: Instant) -> String {
    let since = lasting(since, now);
    if since.is_empty() { since } else { format!(" ({})", since.trim_start()) }
}

/// An age as text, in one unit.
fn short(age: Duration) -> String {
    match age.as_secs() {
        seconds @ 0..60 => format!("{seconds} s"),
        seconds @ 60..7_200 => format!("{} min", seconds / 60),
        seconds @ 7_200..172_800 => format!("{} h", seconds / 3_600),
        seconds => format!("{} d", seconds / 86_400),
    }
}

/// Lists the addresses of at most `SHOWN` of these names; `None` if none of the names resolves.
pub fn resolved(source: &ListSource, hosts: &BTreeSet<HostName>, table: &HostTable) -> Option<String> {
    let addresses = |host: &HostName| {
        let addresses = table.0.get(host)?.addresses_for(|ip| source.allows(ip));
        let addresses = Some(addresses).filter(|addresses| !addresses.is_empty())?;
        let shown = addresses.iter().take(SHOWN).map(ToString::to_string);
        let more = addresses.len().saturating_sub(SHOWN);
        let more = (more > 0).then(|| format!("and {more} more"));
        Some(format!("{}: {}", host.name, shown.chain(more).collect::<Vec<_>>().join(" ")))
    };
    let all: Vec<String> = hosts.iter().filter_map(addresses).collect();
    let more = all.len().saturating_sub(SHOWN);
    let more = (more > 0).then(|| format!("{more} more"));
    let shown = all.iter().take(SHOWN).cloned().chain(more).collect::<Vec<_>>().join("; ");
    (!all.is_empty()).then(|| format!("{} of {} host names resolve: {shown}", all.len(), hosts.len()))
}
