//! The daemon's budget of file descriptors. Connections use only descriptors that the daemon's own
//! work does not need. This work therefore never lacks descriptors.
//!
//! Other processes can make the daemon open only a limited number of descriptors: one for each
//! connection to one of two listeners. The daemon's own work needs a constant number, and a number
//! for each client. `docs/reference/limits.md` has the arithmetic for operators.

use crate::close_jobs::{MAX_OPERATOR_JOBS, MAX_OWN_JOBS};
use crate::probes::MAX_UNDER_WAY;
use lb_view::text::counted;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// The descriptors of one client: maps, programs, cgroup. A reload needs twice as many for a short
/// time, because it opens the replacements before it closes the old descriptors.
pub const OF_CLIENT: u64 = 20;
/// The descriptors of the daemon itself:
/// - 64 for sockets, signals and watches;
/// - 64 for three documents that may be built at the same time: each needs the maps of one client;
/// - 320 for endpoint files that do not answer: one for each thread that may wait;
/// - 256 for connect probes that are under way;
/// - 264 for connections to servers of lists: one for each of 256 services, and 8 for DNS servers;
/// - at most 8 for reports: a socket, an event and the host's maps;
/// - for each job that closes connections, the maps of one client and 4 for lists of sockets.
pub const OF_DAEMON: u64 =
    448 + MAX_UNDER_WAY as u64 + 264 + 8 + (MAX_OPERATOR_JOBS + MAX_OWN_JOBS) as u64 * (OF_CLIENT + 4);
/// The maximum number of connections per listener.
pub const CONNECTIONS: u64 = 64;
/// The number of connections per listener that are accepted even if descriptors are scarce.
const FEWEST_CONNECTIONS: u64 = 4;
/// The number of listeners: the socket and the metrics port. Each accepts one connection more than
/// its limit for a short time.
const LISTENERS: u64 = 2;

/// The maximum number of descriptors that the daemon uses with this number of clients, including
/// connections.
pub const fn wanted(clients: u64) -> u64 {
    own(clients) + LISTENERS * (CONNECTIONS + 1)
}

/// The descriptors for the daemon's own work, which connections must not use.
const fn own(clients: u64) -> u64 {
    OF_DAEMON + 2 * OF_CLIENT * clients
}

/// The number of simultaneous connections per listener if `limit` descriptors are allowed.
pub fn connections_limit(limit: u64, clients: u64) -> usize {
    let left = limit.saturating_sub(own(clients)) / LISTENERS;
    let connections_limit = left.saturating_sub(1).clamp(FEWEST_CONNECTIONS, CONNECTIONS);
    usize::try_from(connections_limit).expect("the limit is at most CONNECTIONS")
}

/// A warning if `limit`, the number of allowed descriptors, is less than the daemon may need.
pub fn shortage(limit: u64, clients: u64) -> Option<String> {
    let wanted = wanted(clients);
    (limit < wanted).then(|| {
        format!(
            "the daemon may open {limit} files, but needs up to {wanted} with {}, so it may fail to read \
             files or accept connections: set LimitNOFILE={wanted} in the daemon's unit, or run `ulimit -n \
             {wanted}` before `socklb run`, and restart the daemon",
            counted(clients, "client")
        )
    })
}

/// Raises this process's soft limit to its hard limit. Returns the resulting soft limit.
pub fn raise() -> u64 {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    // Any process may raise its soft limit. If the kernel refuses this, the next line returns the
    // old limit.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
    limit()
}

/// The soft limit of this process.
pub fn limit() -> u64 {
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_get_the_descriptors_that_the_daemon_does_not_need() {
        for (limit, clients, expected) in [
            (wanted(1), 1, 64),
            (wanted(1) - 2, 1, 63),
            (wanted(64), 64, 64),
            (u64::MAX, 64, 64),
            (1200, 1, 19),
            (0, 64, 4),
        ] {
            assert_eq!(connections_limit(limit, clients), expected, "limit {limit}, {clients} clients");
        }
        for (limit, clients) in [(wanted(1), 1), (wanted(1) - 2, 1), (wanted(64), 64), (1200, 1)] {
            let connections = LISTENERS * (connections_limit(limit, clients) as u64 + 1);
            assert!(own(clients) + connections <= limit, "limit {limit}, {clients} clients");
        }
        let limits = include_str!("../../docs/reference/limits.md").replace(',', "");
        for (clients, row) in [(1, "together with one client"), (64, "together with 64 clients")] {
            let number = wanted(clients);
            assert!(limits.contains(&format!("| {row} | {number} |")), "{row}: {number}");
        }
        // The systemd unit allows enough descriptors for the maximum number of clients. The comment
        // in the unit states the same number.
        let unit = include_str!("../../packaging/systemd/socklb.service");
        let most = wanted(lb_common::abi::MAX_CLIENTS as u64);
        assert!(
            unit.contains(&format!("# With 64 clients the daemon uses up to {most} descriptors")),
            "{most}"
        );
        let allowed = unit.lines().find_map(|line| line.strip_prefix("LimitNOFILE=")).unwrap();
        assert!(allowed.parse::<u64>().unwrap() >= most);
        assert_eq!(shortage(wanted(3), 3), None);
        assert!(shortage(wanted(3) - 1, 3).unwrap().contains(&format!("LimitNOFILE={}", wanted(3))));
    }
}
