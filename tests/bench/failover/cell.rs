//! The values that define a measurement: the fault, the fleet, the policy, and whether there is a
//! daemon and ejection.
//!
//! This module must not depend on the setup or the measurement.

use std::fmt;

use lb_common::abi::Policy;
use serde::Serialize;

/// The fault of a backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Fault {
    /// No process listens at the backend's address.
    Refuse,
    /// SYNs to the backend are dropped, so the application gives up.
    Blackhole,
    /// The backend accepts connections, and resets each at once.
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

    /// Returns whether a client notices the fault only by its own timeout, which makes the connect
    /// expensive.
    pub const fn is_silent(self) -> bool {
        matches!(self, Self::Blackhole | Self::SlowAccept)
    }
}

/// The number of backends, and how many of them are dead. The dead backends are the first of the
/// list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fleet {
    pub dead: usize,
    /// The number of all backends, including the dead ones.
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

    /// The fleets in which every fault is measured by default.
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
    /// Fifty connects at a time. Each is answered after a few milliseconds.
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
    /// Whether the daemon runs. If not, it was stopped after it had started.
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

/// Returns the cells for these policies: all combinations if `all` is set, and only the most
/// informative ones if `all` is not set.
pub fn matrix(policies: &[Policy], all: bool) -> Vec<Cell> {
    let mut cells = Vec::new();
    for &policy in policies {
        for fault in Fault::ALL {
            for fleet in Fleet::ALL {
                // The usual case is measured with every policy. The usual fleets are measured with
                // every fault.
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
        // The number of cells is twice the maximum number of clients of a daemon: half of the cells
        // have a running daemon, and half have a stopped daemon.
        assert_eq!(cells.len(), 2 * 64);
    }

    #[test]
    fn the_whole_matrix_has_every_combination() {
        let cells = matrix(&Policy::ALL, true);
        assert_eq!(cells.len(), 5 * 7 * (4 + 2) * 2 * 2);
    }
}
