//! What is compared, as values: groups, the clients of socklb in them, arms, and what they are to reach.
//!
//! Must not know how any of it is set up or measured.

use std::net::{IpAddr, SocketAddr};

use super::serve::Manner;
use super::work::Work;

/// Several addresses that follow each other, each dialled as often: backends, or the one address of a service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Addresses {
    /// The first of them.
    pub first: SocketAddr,
    /// How many ports.
    pub ports: u16,
    /// How many hosts.
    pub hosts: u32,
}

impl Addresses {
    /// One address.
    pub fn one(first: SocketAddr) -> Self {
        Self { first, ports: 1, hosts: 1 }
    }

    /// All of them.
    pub fn list(self) -> Vec<SocketAddr> {
        let host = |number: u32| match self.first.ip() {
            IpAddr::V4(ip) => IpAddr::V4((ip.to_bits() + number).into()),
            IpAddr::V6(ip) => IpAddr::V6((ip.to_bits() + u128::from(number)).into()),
        };
        let at = |number| (0..self.ports).map(move |port| (host(number), self.first.port() + port).into());
        (0..self.hosts).flat_map(at).collect()
    }
}

/// Which socklb it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Build {
    /// Of this tree.
    This,
    /// The program that the command line names.
    Other,
    /// Of this tree, and all its backends report each second, to a program on a network interface.
    Reported,
}

/// A client of socklb and the one service that it dials.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Client {
    /// Whose client.
    pub build: Build,
    /// `active` or `full`.
    pub accounting: &'static str,
    /// The service's policy.
    pub policy: &'static str,
    /// `tcp` or `udp`.
    pub protocol: &'static str,
}

impl Client {
    /// As a configuration names its job and its service.
    pub fn name(self) -> String {
        format!("{}-{}-{}", self.accounting, self.protocol, self.policy)
    }

    /// As a reader knows it.
    pub fn title(self) -> String {
        format!("socklb {}, {}", self.accounting, self.policy)
    }

    /// What a reader calls its build.
    pub fn build_name(self) -> &'static str {
        match self.build {
            Build::This => "this build",
            Build::Other => "other build",
            Build::Reported => "with reports",
        }
    }
}

/// What stands between an arm's processes and the backends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Between {
    /// Nothing.
    Nothing,
    /// A program that returns at once.
    Empty,
    /// A program that looks one service and one backend up.
    Floor,
    /// socklb; the service of this client is dialled.
    Socklb(Client),
    /// socklb, and the backends are dialled themselves: addresses that are no service's.
    Unserved(Client),
    /// nftables: DNAT in a network namespace of its own.
    Nft,
    /// HAProxy, in TCP mode.
    Haproxy,
}

impl Between {
    /// The client of socklb that it needs.
    pub fn client(self) -> Option<Client> {
        match self {
            Self::Socklb(client) | Self::Unserved(client) => Some(client),
            Self::Nothing | Self::Empty | Self::Floor | Self::Nft | Self::Haproxy => None,
        }
    }
}

/// What is compared of an arm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Measure {
    /// Median time of one operation.
    P50,
    /// The time that one in a hundred exceeds.
    P99,
    /// Operations in a second, with all that belongs to them.
    Rate,
    /// CPU time of one operation, with all that belongs to it.
    Cpu,
}

impl Measure {
    /// All of them, in the order of the tables.
    pub const ALL: [Self; 4] = [Self::P50, Self::P99, Self::Rate, Self::Cpu];

    /// As tables name it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::P50 => "p50",
            Self::P99 => "p99",
            Self::Rate => "rate",
            Self::Cpu => "CPU",
        }
    }
}

/// What a ratio to the baseline is to be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Bound {
    /// No more than this.
    AtMost(f64),
    /// No less than this.
    AtLeast(f64),
    /// No further from 1 than this.
    Within(f64),
    /// Its confidence interval covers 1.
    CoversOne,
}

/// One target.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Target {
    /// Of what.
    pub measure: Measure,
    /// To be what.
    pub bound: Bound,
    /// It is only judged if the second arm, a copy of the first, is within this factor of it.
    pub if_noise_within: Option<f64>,
}

impl Target {
    /// Without a condition.
    pub fn new(measure: Measure, bound: Bound) -> Self {
        Self { measure, bound, if_noise_within: None }
    }
}

/// One arm.
#[derive(Clone, Debug)]
pub struct Arm {
    /// What a reader calls it.
    pub name: String,
    /// What is between it and the backends.
    pub between: Between,
    /// It dials the first backend only, as far as it dials backends.
    pub one_backend: bool,
    /// Which arm it is compared with.
    pub baseline: usize,
    /// What it is to reach.
    pub targets: Vec<Target>,
}

/// Arms that are measured together, in turns.
#[derive(Clone, Debug)]
pub struct Group {
    /// What a reader calls it.
    pub title: &'static str,
    /// What is peculiar about it.
    pub remark: &'static str,
    /// What every arm does.
    pub work: Work,
    /// What the backends do with a connection.
    pub manner: Manner,
    /// The backends poll instead of sleeping, so that no wake-up is measured; proxies need their CPU, and then they do not.
    pub polls: bool,
    /// The backends.
    pub backends: Addresses,
    /// The first is the baseline, the second its copy.
    pub arms: Vec<Arm>,
}

impl Group {
    /// The clients of socklb in it, each once.
    pub fn clients(&self) -> Vec<Client> {
        let mut clients = Vec::new();
        for client in self.arms.iter().filter_map(|arm| arm.between.client()) {
            if !clients.contains(&client) {
                clients.push(client);
            }
        }
        clients
    }

    /// The group that compares two builds: of its arms those without socklb that dial backends, and those with it three times each,
    /// with this build, with this build again (the noise), and with the other.
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

    /// Whether an arm needs this.
    pub fn has(&self, between: Between) -> bool {
        self.arms.iter().any(|arm| arm.between == between)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_follow_each_other() {
        let list = |first: &str, ports, hosts| -> Vec<String> {
            let addresses = Addresses { first: first.parse().unwrap(), ports, hosts };
            addresses.list().iter().map(ToString::to_string).collect()
        };
        assert_eq!(list("127.0.0.1:19000", 2, 1), ["127.0.0.1:19000", "127.0.0.1:19001"]);
        assert_eq!(list("127.64.0.255:9", 1, 2), ["127.64.0.255:9", "127.64.1.0:9"]);
        assert_eq!(list("[::1]:9", 2, 1), ["[::1]:9", "[::1]:10"]);
    }
}
