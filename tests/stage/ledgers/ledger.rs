//! The expected counts of a worker's flows, from the worker's own observations: per service, and in
//! the terms of the kernel's counters of the network namespace. The kernel counts independently of
//! socklb, so its counters verify the worker's observations.
//!
//! This file does not depend on how socklb counts.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::ending::{Ending, Seen};

/// The kernel's counters per network namespace, from `/proc/net/snmp` and `/proc/net/netstat`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counters {
    /// `ActiveOpens`: SYNs of new connections.
    pub opened: u64,
    /// `AttemptFails`.
    pub attempts_failed: u64,
    /// `EstabResets`.
    pub resets: u64,
    /// `TCPAbortOnData`: closed with `SO_LINGER` 0.
    pub aborted_on_data: u64,
    /// `TCPAbortOnClose`: closed with unread data.
    pub aborted_on_close: u64,
    /// `TCPAbortOnTimeout`.
    pub aborted_on_timeout: u64,
    /// Connections that the client reset at once. On another CPU, the kernel may process the reset
    /// before the server's last step of the handshake. The kernel then counts a failed attempt
    /// instead of a reset. No kernel counter corresponds to this field.
    pub hasty: u64,
}

impl Counters {
    /// The kernel's counts for one flow with this ending. Both ends of a connection are in the
    /// namespace, so a connection that does not end in an orderly way is reset twice.
    pub fn of(seen: Seen) -> Self {
        let mut counters = Self::default();
        match seen {
            Seen::Closed | Seen::NotSent | Seen::GaveUp => {}
            Seen::Refused | Seen::Unreachable | Seen::Other | Seen::DestroyedEarly => {
                counters.attempts_failed = 1;
            }
            Seen::TimedOut => (counters.attempts_failed, counters.aborted_on_timeout) = (1, 1),
            // The server resets with `SO_LINGER` 0.
            Seen::Reset | Seen::Lingered => (counters.resets, counters.aborted_on_data) = (2, 1),
            Seen::DataTimeout => (counters.resets, counters.aborted_on_timeout) = (2, 1),
            Seen::Unread => (counters.resets, counters.aborted_on_close) = (2, 1),
            Seen::Disconnected | Seen::Destroyed => counters.resets = 2,
        }
        counters
    }

    /// Reads the counters of the calling process's network namespace.
    ///
    /// # Panics
    /// If a counter is missing.
    pub fn read() -> Self {
        let files = ["snmp", "netstat"].map(|name| {
            std::fs::read_to_string(format!("/proc/net/{name}")).expect("read the kernel's network counters")
        });
        let find = |name: &str| {
            files
                .iter()
                .find_map(|text| counter(text, name))
                .unwrap_or_else(|| panic!("/proc/net has no counter {name}"))
        };
        Self {
            opened: find("ActiveOpens"),
            attempts_failed: find("AttemptFails"),
            resets: find("EstabResets"),
            aborted_on_data: find("TCPAbortOnData"),
            aborted_on_close: find("TCPAbortOnClose"),
            aborted_on_timeout: find("TCPAbortOnTimeout"),
            hasty: 0,
        }
    }

    /// The difference between two readings.
    #[must_use]
    pub fn until(self, now: Self) -> Self {
        Self {
            opened: now.opened - self.opened,
            attempts_failed: now.attempts_failed - self.attempts_failed,
            resets: now.resets - self.resets,
            aborted_on_data: now.aborted_on_data - self.aborted_on_data,
            aborted_on_close: now.aborted_on_close - self.aborted_on_close,
            aborted_on_timeout: now.aborted_on_timeout - self.aborted_on_timeout,
            hasty: 0,
        }
    }

    /// Whether the kernel's counts are consistent with `self`, the counts of the worker's
    /// observations.
    pub fn allow(self, counted: Self) -> bool {
        let early = self.resets.saturating_sub(counted.resets);
        let allowed = Self {
            attempts_failed: self.attempts_failed + early,
            resets: self.resets - early,
            hasty: 0,
            ..self
        };
        early <= self.hasty && counted == allowed
    }

    fn add(&mut self, other: Self) {
        self.opened += other.opened;
        self.attempts_failed += other.attempts_failed;
        self.resets += other.resets;
        self.aborted_on_data += other.aborted_on_data;
        self.aborted_on_close += other.aborted_on_close;
        self.aborted_on_timeout += other.aborted_on_timeout;
        self.hasty += other.hasty;
    }
}

/// Finds a counter by its name. In the text, a line with values follows each line with names.
fn counter(text: &str, name: &str) -> Option<u64> {
    let lines: Vec<&str> = text.lines().collect();
    lines.chunks(2).find_map(|pair| {
        let [names, values] = pair else { return None };
        let at = names.split_whitespace().position(|word| word == name)?;
        values.split_whitespace().nth(at)?.parse().ok()
    })
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Flows {
    /// Number of connect(2) calls that must have chosen a backend.
    pub chosen: u64,
    /// Number of calls that sent a SYN.
    pub connecting: u64,
    /// Number of calls that established a connection.
    pub established: u64,
    /// Number of calls on sockets that are still open.
    pub held: u64,
    /// Number of ended flows for each [`Ending`].
    pub endings: BTreeMap<Ending, u64>,
}

impl Flows {
    pub fn ended(&self, ending: Ending) -> u64 {
        self.endings.get(&ending).copied().unwrap_or_default()
    }
}

/// All flows of a worker.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ledger {
    /// The flows of each service, keyed by the service's name.
    pub services: BTreeMap<String, Flows>,
    /// The sum over all services.
    pub counters: Counters,
}

impl Ledger {
    fn service(&mut self, name: &str) -> &mut Flows {
        if !self.services.contains_key(name) {
            self.services.insert(name.to_owned(), Flows::default());
        }
        self.services.get_mut(name).expect("the ledger has the service")
    }

    /// Counts a new connection that remains open.
    pub fn hold(&mut self, service: &str) {
        let flows = self.service(service);
        flows.chosen += 1;
        flows.connecting += 1;
        flows.established += 1;
        flows.held += 1;
        self.counters.opened += 1;
    }

    /// Counts the end of a held connection.
    pub fn end_one(&mut self, service: &str, seen: Seen) {
        let flows = self.service(service);
        flows.held -= 1;
        *flows.endings.entry(seen.ending()).or_default() += 1;
        self.counters.add(Counters::of(seen));
    }

    /// Counts a flow that began and ended.
    pub fn ended(&mut self, service: &str, seen: Seen) {
        let flows = self.service(service);
        flows.chosen += 1;
        flows.connecting += u64::from(seen.was_sent());
        flows.established += u64::from(seen.was_established());
        *flows.endings.entry(seen.ending()).or_default() += 1;
        self.elsewhere(seen);
    }

    /// Counts a connected datagram socket: it is a flow until it is connected again or closed.
    pub fn datagram(&mut self, service: &str) {
        let flows = self.service(service);
        flows.chosen += 1;
        *flows.endings.entry(Ending::Closed).or_default() += 1;
    }

    /// Counts a connection to an address that is no service, which began and ended.
    pub fn elsewhere(&mut self, seen: Seen) {
        self.counters.opened += u64::from(seen.was_sent());
        self.counters.add(Counters::of(seen));
    }

    /// Counts the connection that ends now in [`Counters::hasty`]: the server may not have accepted
    /// it yet.
    pub fn hastily(&mut self) {
        self.counters.hasty += 1;
    }

    /// Adds the flows of another ledger.
    pub fn merge(&mut self, other: Self) {
        for (name, flows) in other.services {
            let mine = self.service(&name);
            mine.chosen += flows.chosen;
            mine.connecting += flows.connecting;
            mine.established += flows.established;
            mine.held += flows.held;
            for (ending, count) in flows.endings {
                *mine.endings.entry(ending).or_default() += count;
            }
        }
        self.counters.add(other.counters);
    }

    /// Number of calls of all services that must have chosen a backend.
    pub fn chosen(&self) -> u64 {
        self.services.values().map(|flows| flows.chosen).sum()
    }

    /// Number of open sockets of all services.
    pub fn held(&self) -> u64 {
        self.services.values().map(|flows| flows.held).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ledger_survives_serialization() {
        let mut ledger = Ledger::default();
        ledger.hold("a");
        ledger.ended("a", Seen::Lingered);
        ledger.ended("b", Seen::NotSent);
        let mut other = Ledger::default();
        other.hold("a");
        other.end_one("a", Seen::Closed);
        ledger.merge(other);
        let text = serde_json::to_string(&ledger).unwrap();
        assert_eq!(serde_json::from_str::<Ledger>(&text).unwrap(), ledger);
        assert_eq!((ledger.chosen(), ledger.held(), ledger.counters.opened), (4, 1, 3));
        assert_eq!(ledger.services["a"].ended(Ending::Aborted), 1);
    }

    #[test]
    fn only_hasty_resets_may_be_failed_attempts() {
        let seen = Counters { resets: 4, attempts_failed: 1, hasty: 1, ..Counters::default() };
        let counted = |resets, attempts_failed| Counters { resets, attempts_failed, ..Counters::default() };
        assert!(seen.allow(counted(4, 1)) && seen.allow(counted(3, 2)));
        for (resets, attempts_failed) in [(2, 3), (3, 1), (4, 2), (5, 0)] {
            assert!(
                !seen.allow(counted(resets, attempts_failed)),
                "{resets} resets and {attempts_failed} failed attempts are refused"
            );
        }
    }

    #[test]
    fn counters_are_found_by_name() {
        let text = "Ip: A B\nIp: 1 2\nTcp: ActiveOpens X\nTcp: 7 8\n";
        assert_eq!(counter(text, "ActiveOpens"), Some(7));
        assert_eq!(counter(text, "B"), Some(2));
        assert_eq!(counter(text, "C"), None);
    }
}
