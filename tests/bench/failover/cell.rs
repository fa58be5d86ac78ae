//! The values that define a measurement: which fault in which fleet, under which policy, with and
//! without a daemon and ejection.
//!
//! Must not know how they are set up or measured.

use std::fmt;

use lb_common::abi::Policy;
use serde::Serialize;

/// The fault of a backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Fault {
    /// No process listens.
    Refuse,
    /// The backend's SYNs are dropped; the application gives up.
    Blackhole,
    /// The backend accepts connections and resets them at once.
    Reset,
    /// The backend's queue is full, and it accepts one connection per second.
    SlowAccept,
}

impl Fault {
    pub const ALL: [Self; 4] = [Self::Refuse, Self::Blackhole, Self::Reset, Self::SlowAccept];

    /// The fault's name in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Refuse => "refuse",
            Self::Blackhole => "blackhole",
            Self::Reset => "reset at once",
            Self::SlowAccept => "slow accept",
        }
    }

    /// Returns whether the client waits for its own timeout. Such connects are expensive.
    pub const fn is_silent(self) -> bool {
        matches!(self, Self::Blackhole | Self::SlowAccept)
    }
}

/// How many backends there are, and how many of them are dead. The dead ones are the first of the
/// list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fleet {
    pub dead: usize,
    /// All backends, including the dead ones.
    pub of: usize,
}

impl Fleet {
    const fn new(dead: usize, of: usize) -> Self {
        Self { dead, of }
    }

    pub const ALL: [Self; 7] = [
        Self::new(1, 1),
        Self::new(1, 2),
        Self::new(2, 3),
        Self::ONE_OF_FIVE,
        Self::new(3, 5),
        Self::new(5, 5),
        Self::new(50, 100),
    ];

    /// The fleet to which targets apply.
    pub const ONE_OF_FIVE: Self = Self::new(1, 5);

    /// The fleets that are measured with every fault by default.
    const USUAL: [Self; 4] = [Self::ONE_OF_FIVE, Self::new(2, 3), Self::new(5, 5), Self::new(50, 100)];
}

impl fmt::Display for Fleet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {}", self.dead, self.of)
    }
}

/// How the client connects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Manner {
    /// One connect after the other, 200 per second.
    InTurn,
    /// Fifty connects at a time, each with an answer after a few milliseconds.
    Fifty,
}

impl Manner {
    /// The name of the manner in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::InTurn => "in turn",
            Self::Fifty => "50 at a time",
        }
    }
}

/// One measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cell {
    pub policy: Policy,
    /// The fault of the dead backends.
    pub fault: Fault,
    pub fleet: Fleet,
    /// How the client connects.
    pub manner: Manner,
    /// Whether the daemon runs; otherwise it was stopped after the start.
    pub daemon: bool,
    /// Whether dead backends are ejected.
    pub ejects: bool,
}

/// A cell in the JSON document.
#[derive(Clone, Debug, Serialize)]
pub struct Described {
    policy: &'static str,
    fault: &'static str,
    dead: usize,
    backends: usize,
    manner: &'static str,
    daemon: &'static str,
    ejection: &'static str,
}

impl Cell {
    pub fn describe(self) -> Described {
        Described {
            policy: self.policy.name(),
            fault: self.fault.name(),
            dead: self.fleet.dead,
            backends: self.fleet.of,
            manner: self.manner.name(),
            daemon: daemon_name(self.daemon),
            ejection: if self.ejects { "on" } else { "off" },
        }
    }
}

/// The state of the daemon in tables.
pub const fn daemon_name(daemon: bool) -> &'static str {
    if daemon { "running" } else { "stopped" }
}

/// Returns the cells for these policies: every combination if `all` is set, otherwise the most
/// informative ones.
pub fn matrix(policies: &[Policy], all: bool) -> Vec<Cell> {
    let mut cells = Vec::new();
    for &policy in policies {
        for fault in Fault::ALL {
            for fleet in Fleet::ALL {
                // The usual case is measured with every policy, and the usual fleets with every
                // fault.
                let usual = fault == Fault::Refuse && fleet == Fleet::ONE_OF_FIVE;
                let detailed = policy == Policy::WeightedRoundRobin || policies.len() == 1;
                if !(all || usual || detailed && Fleet::USUAL.contains(&fleet)) {
                    continue;
                }
                for manner in [Manner::InTurn, Manner::Fifty] {
                    if manner == Manner::Fifty && !matches!(fault, Fault::Refuse | Fault::Blackhole) {
                        continue;
                    }
                    for daemon in [true, false] {
                        for ejects in [false, true] {
                            cells.push(Cell { policy, fault, fleet, manner, daemon, ejects });
                        }
                    }
                }
            }
        }
    }
    cells
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_usual_matrix_has_every_policy_and_every_fault() {
        let cells = matrix(&Policy::ALL, false);
        for policy in Policy::ALL {
            assert!(cells.iter().any(|cell| cell.policy == policy && cell.fault == Fault::Refuse));
        }
        for fault in Fault::ALL {
            let fleets = cells.iter().filter(|cell| cell.fault == fault && cell.manner == Manner::InTurn);
            let wrr = fleets.filter(|cell| cell.policy == Policy::WeightedRoundRobin);
            assert_eq!(wrr.count(), 4 * 2 * 2, "{fault:?}");
        }
        // The maximum number of clients of a daemon, twice: for a daemon that runs, and for one
        // that is stopped.
        assert_eq!(cells.len(), 2 * 64);
    }

    #[test]
    fn the_whole_matrix_has_every_combination() {
        let cells = matrix(&Policy::ALL, true);
        assert_eq!(cells.len(), 5 * 7 * (4 + 2) * 2 * 2);
    }
}
