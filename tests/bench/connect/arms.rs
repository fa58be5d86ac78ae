//! The values that define a comparison: groups with their clients of socklb, and arms with their
//! targets.
//!
//! This module must not depend on the setup or the measurement.

pub mod groups;

use std::net::{IpAddr, SocketAddr};

use super::serve::Manner;
use super::work::Work;

/// Consecutive addresses, each of which is dialled equally often: the addresses of backends, or the
/// single address of a service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Addresses {
    pub first: SocketAddr,
    pub ports: u16,
    pub hosts: u32,
}

impl Addresses {
    pub fn one(first: SocketAddr) -> Self {
        Self { first, ports: 1, hosts: 1 }
    }

    pub fn list(self) -> Vec<SocketAddr> {
        let host = |number: u32| match self.first.ip() {
            IpAddr::V4(ip) => IpAddr::V4((ip.to_bits() + number).into()),
            IpAddr::V6(ip) => IpAddr::V6((ip.to_bits() + u128::from(number)).into()),
        };
        let at = |number| (0..self.ports).map(move |port| (host(number), self.first.port() + port).into());
        (0..self.hosts).flat_map(at).collect()
    }
}

/// A build of socklb.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Build {
    /// The build of this tree.
    This,
    /// The program that the command line states.
    Other,
    /// The build of this tree, with backends that report each second to a program on a network
    /// interface.
    Reported,
}

/// A client of socklb and the one service that it dials.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Client {
    pub build: Build,
    /// The accounting: `active` or `full`.
    pub accounting: &'static str,
    pub policy: &'static str,
    /// The protocol: `tcp` or `udp`.
    pub protocol: &'static str,
}

impl Client {
    /// The name of the client's job and service in configurations.
    pub fn name(self) -> String {
        format!("{}-{}-{}", self.accounting, self.protocol, self.policy)
    }

    /// The client's name in tables.
    pub fn title(self) -> String {
        format!("socklb {}, {}", self.accounting, self.policy)
    }

    /// The name of the client's build in tables.
    pub fn build_name(self) -> &'static str {
        match self.build {
            Build::This => "this build",
            Build::Other => "other build",
            Build::Reported => "with reports",
        }
    }
}

/// The layer between an arm's processes and the backends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Between {
    Nothing,
    /// A program that returns at once.
    Empty,
    /// The floor program, which looks up one service and one backend.
    Floor,
    /// socklb; the arm dials the service of this client.
    Socklb(Client),
    /// socklb, but the arm dials the addresses of the backends, which are not addresses of a
    /// service.
    Unserved(Client),
    /// nftables: DNAT in its own network namespace.
    Nft,
    /// HAProxy, in TCP mode.
    Haproxy,
}

impl Between {
    /// The client of socklb that the layer needs.
    pub fn client(self) -> Option<Client> {
        match self {
            Self::Socklb(client) | Self::Unserved(client) => Some(client),
            Self::Nothing | Self::Empty | Self::Floor | Self::Nft | Self::Haproxy => None,
        }
    }
}

/// A measure by which arms are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Measure {
    /// Median time of one operation.
    P50,
    /// The 99th percentile of the time of one operation.
    P99,
    /// Operations per second, including setup and cleanup.
    Rate,
    /// CPU time of one operation, including setup and cleanup.
    Cpu,
}

impl Measure {
    /// All measures, in the order of the tables.
    pub const ALL: [Self; 4] = [Self::P50, Self::P99, Self::Rate, Self::Cpu];

    /// The name in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::P50 => "p50",
            Self::P99 => "p99",
            Self::Rate => "rate",
            Self::Cpu => "CPU",
        }
    }
}

/// The bound on a ratio to the baseline.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Bound {
    /// The ratio must be at most this number.
    AtMost(f64),
    /// The ratio must be at least this number.
    AtLeast(f64),
    /// The ratio may differ from 1 by at most this number.
    Within(f64),
    /// The confidence interval of the ratio must cover 1.
    CoversOne,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Target {
    pub measure: Measure,
    pub bound: Bound,
    /// If set, the target is evaluated only if there is little noise. The second arm is a copy of
    /// the first; its ratio must lie between 1 divided by this number and this number.
    pub if_noise_within: Option<f64>,
}

impl Target {
    /// A target without a condition.
    pub fn new(measure: Measure, bound: Bound) -> Self {
        Self { measure, bound, if_noise_within: None }
    }
}

#[derive(Clone, Debug)]
pub struct Arm {
    /// The arm's name in tables.
    pub name: String,
    /// The layer between the arm and the backends.
    pub between: Between,
    /// Whether the arm dials only the first backend, if it dials backends.
    pub one_backend: bool,
    /// The position of the arm by which this arm's times are divided.
    pub baseline: usize,
    pub targets: Vec<Target>,
}

/// Arms that are measured together, in turns.
#[derive(Clone, Debug)]
pub struct Group {
    /// The group's title in tables.
    pub title: &'static str,
    /// A remark that is printed above the table.
    pub remark: &'static str,
    pub work: Work,
    /// How the backends treat a connection.
    pub manner: Manner,
    /// Whether the backends poll instead of blocking, so that the time to wake them is not
    /// measured. Not set for groups with proxies, because proxies need the backends' CPU.
    pub polls: bool,
    pub backends: Addresses,
    /// The arms. The first is the baseline, and the second is its copy.
    pub arms: Vec<Arm>,
}

impl Group {
    /// The clients of socklb in the group, each once.
    pub fn clients(&self) -> Vec<Client> {
        let mut clients = Vec::new();
        for client in self.arms.iter().filter_map(|arm| arm.between.client()) {
            if !clients.contains(&client) {
                clients.push(client);
            }
        }
        clients
    }

    /// Returns the group that compares two builds. The group has the arms without socklb that dial
    /// backends. It has each arm with socklb three times: with this build, with this build again
    /// (which shows the noise), and with the other build.
    pub fn of_two_builds(mut self, other: Build) -> Self {
        let arms = std::mem::take(&mut self.arms);
        for arm in arms {
            let of = |between: fn(Client) -> Between, client| {
                (between(Client { build: other, ..client }), Client { build: other, ..client })
            };
            let (between, other) = match arm.between {
                Between::Nothing | Between::Empty | Between::Floor => {
                    self.arms.push(arm);
                    continue;
                }
                Between::Nft | Between::Haproxy => continue,
                Between::Socklb(client) => of(Between::Socklb, client),
                Between::Unserved(client) => of(Between::Unserved, client),
            };
            let baseline = self.arms.len();
            let this = Arm { targets: Vec::new(), baseline: 0, ..arm };
            self.arms.extend([
                this.clone(),
                Arm { name: format!("{} again (A/A)", this.name), baseline, ..this.clone() },
                Arm { name: format!("{}, {}", this.name, other.build_name()), between, baseline, ..this },
            ]);
        }
        self
    }

    /// Returns whether an arm of the group needs the layer `between`.
    pub fn has(&self, between: Between) -> bool {
        self.arms.iter().any(|arm| arm.between == between)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_consecutive() {
        let list = |first: &str, ports, hosts| -> Vec<String> {
            let addresses = Addresses { first: first.parse().unwrap(), ports, hosts };
            addresses.list().iter().map(ToString::to_string).collect()
        };
        assert_eq!(list("127.0.0.1:19000", 2, 1), ["127.0.0.1:19000", "127.0.0.1:19001"]);
        assert_eq!(list("127.64.0.255:9", 1, 2), ["127.64.0.255:9", "127.64.1.0:9"]);
        assert_eq!(list("[::1]:9", 2, 1), ["[::1]:9", "[::1]:10"]);
    }
}
