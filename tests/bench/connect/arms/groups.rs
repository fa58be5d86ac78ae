//! The table of groups: the arms that are compared, and their targets. This module contains only
//! values.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};

use super::{Addresses, Arm, Between, Bound, Build, Client, Group, Measure, Target};
use crate::connect::serve::Manner;
use crate::connect::work::Work;

/// The first port of the backends of small groups.
const PORT: u16 = 19000;
/// The number of backends of small groups.
pub const BACKENDS: u16 = 8;
/// The first host of large groups. The backends of a large group have consecutive addresses of the
/// loopback range, and share one listener.
const HOSTS: Ipv4Addr = Ipv4Addr::new(127, 64, 0, 1);

const ACCOUNTINGS: [&str; 2] = ["active", "full"];
const WEIGHTED: &str = "weighted-round-robin";

/// The names of the groups, for the option `--group`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub enum Name {
    /// TCP connect() over IPv4
    Connect,
    /// TCP connect() over IPv6
    Connect6,
    /// UDP: socket, connect, close
    UdpCycle,
    /// UDP: connect() of one socket, repeatedly
    UdpConnect,
    /// TCP connect(), a subset of 1,000
    Thousand,
    /// TCP connect(), a subset of 10,000
    TenThousand,
    /// TCP connect(), least-loaded over 100
    LeastLoaded,
    /// Requests and responses over reused connections
    Echo,
    /// Bulk transfer over reused connections
    Bulk,
    /// Time to the first byte from a backend, with proxies among the arms
    FirstByte,
}

pub fn group(name: Name) -> Group {
    match name {
        Name::Connect => connect(Ipv4Addr::LOCALHOST.into()),
        Name::Connect6 => connect(Ipv6Addr::LOCALHOST.into()),
        Name::UdpCycle => udp_cycle(),
        Name::UdpConnect => udp_connect(),
        Name::Thousand => large("TCP connect(), subset of 1,000", 1_000, [1.02, 1.04]),
        Name::TenThousand => large("TCP connect(), subset of 10,000", 10_000, [1.035, 1.055]),
        Name::LeastLoaded => least_loaded(),
        Name::Echo => established(
            "Requests and responses of 64 bytes",
            "Eight reused connections; the client polls for the answer.",
            (Work::Echo, Manner::Echo),
            Target::new(Measure::P50, Bound::Within(0.005)),
        ),
        Name::Bulk => established(
            "Bulk",
            "4 MiB and an acknowledgement, on one reused connection.",
            (Work::Bulk, Manner::Sink),
            Target::new(Measure::Rate, Bound::CoversOne),
        ),
        Name::FirstByte => first_byte(),
    }
}

fn arm(name: impl Into<String>, between: Between) -> Arm {
    Arm { name: name.into(), between, one_backend: false, baseline: 0, targets: Vec::new() }
}

/// The arms with which every group begins.
fn direct() -> Vec<Arm> {
    vec![arm("direct", Between::Nothing), arm("direct again (A/A)", Between::Nothing)]
}

fn tcp(accounting: &'static str, policy: &'static str) -> Client {
    Client { build: Build::This, accounting, policy, protocol: "tcp" }
}

fn udp(accounting: &'static str, policy: &'static str) -> Client {
    Client { build: Build::This, accounting, policy, protocol: "udp" }
}

/// Returns an arm that dials the service of a client.
fn served(client: Client, targets: Vec<Target>) -> Arm {
    Arm { targets, ..arm(client.title(), Between::Socklb(client)) }
}

/// The target for the p50 ratio. The array contains the maximum with active accounting, and the
/// maximum with full accounting.
fn p50(accounting: &str, [active, full]: [f64; 2]) -> Vec<Target> {
    let most = if accounting == "full" { full } else { active };
    vec![Target::new(Measure::P50, Bound::AtMost(most))]
}

fn eight_at(host: SocketAddr) -> Addresses {
    Addresses { first: host, ports: BACKENDS, hosts: 1 }
}

fn eight() -> Addresses {
    eight_at((Ipv4Addr::LOCALHOST, PORT).into())
}

/// The targets of connect() over eight backends.
fn of_connect(accounting: &str) -> Vec<Target> {
    let [p50, p99, rate, cpu] =
        if accounting == "full" { [1.035, 1.20, 0.965, 1.025] } else { [1.015, 1.10, 0.985, 1.01] };
    let new = Target::new;
    vec![
        new(Measure::P50, Bound::AtMost(p50)),
        Target { if_noise_within: Some(1.05), ..new(Measure::P99, Bound::AtMost(p99)) },
        new(Measure::Rate, Bound::AtLeast(rate)),
        new(Measure::Cpu, Bound::AtMost(cpu)),
    ]
}

fn connect(host: std::net::IpAddr) -> Group {
    let mut arms = direct();
    if host.is_ipv4() {
        arms.push(arm("empty program", Between::Empty));
        // The floor program supports only one backend, so it is compared with an arm that dials
        // only one backend.
        let baseline = arms.len();
        arms.push(Arm { one_backend: true, ..arm("direct, one backend", Between::Nothing) });
        arms.push(Arm { one_backend: true, baseline, ..arm("floor program", Between::Floor) });
    }
    for accounting in ACCOUNTINGS {
        arms.push(served(tcp(accounting, "p2c"), of_connect(accounting)));
        arms.push(served(tcp(accounting, WEIGHTED), Vec::new()));
        let unserved = Between::Unserved(tcp(accounting, WEIGHTED));
        arms.push(arm(format!("socklb {accounting}, not a service"), unserved));
    }
    if host.is_ipv4() {
        let others = ["round-robin", "random", "least-loaded"];
        arms.extend(others.map(|policy| served(tcp("full", policy), Vec::new())));
        arms.push(arm("nftables DNAT", Between::Nft));
    }
    Group {
        title: if host.is_ipv4() { "TCP connect()" } else { "TCP connect() over IPv6" },
        remark: "Eight backends.",
        work: Work::Connect,
        manner: Manner::Drop,
        polls: true,
        backends: eight_at((host, PORT).into()),
        arms,
    }
}

fn udp_cycle() -> Group {
    let mut arms = direct();
    arms.push(arm("empty program", Between::Empty));
    let of = |accounting| served(udp(accounting, "p2c"), p50(accounting, [1.045; 2]));
    arms.extend(ACCOUNTINGS.map(of));
    Group {
        title: "UDP socket cycle",
        remark: "Socket, connect() and close, timed as one.",
        work: Work::UdpCycle,
        ..connect_group(arms)
    }
}

fn udp_connect() -> Group {
    let mut arms = direct();
    arms.push(arm("empty program", Between::Empty));
    let baseline = arms.len();
    arms.push(Arm { one_backend: true, ..arm("direct, one backend", Between::Nothing) });
    arms.push(Arm { one_backend: true, baseline, ..arm("floor program", Between::Floor) });
    for accounting in ACCOUNTINGS {
        let client = udp(accounting, "p2c");
        arms.push(served(client, p50(accounting, [1.12; 2])));
        let targets = p50(accounting, [1.06; 2]);
        let name = format!("socklb {accounting}, not a service");
        arms.push(Arm { targets: targets.clone(), ..arm(name, Between::Unserved(client)) });
        let name = format!("socklb {accounting}, not a service, no UDP service");
        arms.push(Arm { targets, ..arm(name, Between::Unserved(tcp(accounting, WEIGHTED))) });
    }
    Group {
        title: "UDP connect() of one socket again and again",
        remark: "There is no handshake, so the programs are a much larger part of the time than in a TCP \
                 connect. Timed in groups of eight, because clocks step by 10 ns on some machines.",
        work: Work::UdpConnect,
        ..connect_group(arms)
    }
}

fn large(title: &'static str, hosts: u32, bounds: [f64; 2]) -> Group {
    let mut arms = direct();
    for accounting in ACCOUNTINGS {
        arms.push(served(tcp(accounting, "p2c"), p50(accounting, bounds)));
        arms.push(served(tcp(accounting, WEIGHTED), Vec::new()));
    }
    Group {
        title,
        remark: "`subset = \"all\"`; the direct arms dial the same number of addresses, each equally often, in random order.",
        backends: Addresses { first: (HOSTS, PORT).into(), ports: 1, hosts },
        ..connect_group(arms)
    }
}

fn least_loaded() -> Group {
    let mut arms = direct();
    let of = |accounting| served(tcp(accounting, "least-loaded"), p50(accounting, [1.025, 1.045]));
    arms.extend(ACCOUNTINGS.map(of));
    Group {
        title: "TCP connect(), least-loaded over 100",
        remark: "The direct arms dial the same number of addresses, each equally often, in random order.",
        backends: Addresses { first: (HOSTS, PORT).into(), ports: 1, hosts: 100 },
        ..connect_group(arms)
    }
}

fn established(
    title: &'static str,
    remark: &'static str,
    (work, manner): (Work, Manner),
    target: Target,
) -> Group {
    let mut arms = direct();
    arms.extend(ACCOUNTINGS.map(|accounting| served(tcp(accounting, "p2c"), vec![target])));
    arms.push(served(tcp("active", WEIGHTED), vec![target]));
    arms.push(arm("nftables DNAT", Between::Nft));
    Group { title, remark, work, manner, ..connect_group(arms) }
}

fn first_byte() -> Group {
    let mut arms = direct();
    arms.extend(ACCOUNTINGS.map(|accounting| served(tcp(accounting, "p2c"), Vec::new())));
    arms.push(served(tcp("active", WEIGHTED), Vec::new()));
    arms.push(arm("nftables DNAT", Between::Nft));
    arms.push(arm("HAProxy", Between::Haproxy));
    Group {
        title: "To the first byte of a backend",
        remark: "For the comparison with a proxy. CPU time is the sum for client, backends and proxy.",
        work: Work::FirstByte,
        manner: Manner::Greet,
        polls: false,
        ..connect_group(arms)
    }
}

/// A group with the usual values: connects to eight backends that poll.
fn connect_group(arms: Vec<Arm>) -> Group {
    Group {
        title: "",
        remark: "",
        work: Work::Connect,
        manner: Manner::Drop,
        polls: true,
        backends: eight(),
        arms,
    }
}

#[cfg(test)]
mod tests {
    use clap::ValueEnum as _;

    use super::*;

    #[test]
    fn every_group_begins_with_a_baseline_and_its_copy() {
        let groups = Name::value_variants().iter().map(|name| (name, group(*name)));
        for (name, group) in groups
            .flat_map(|(name, group)| [(name, group.clone()), (name, group.of_two_builds(Build::Other))])
        {
            let [first, second, rest @ ..] = group.arms.as_slice() else { panic!("{name:?}") };
            assert_eq!((first.between, second.between), (Between::Nothing, Between::Nothing), "{name:?}");
            assert!(!group.title.is_empty() && !group.remark.is_empty(), "{name:?}");
            for arm in rest
                .iter()
                .filter(|arm| arm.between.client().is_some_and(|client| client.build == Build::Other))
            {
                let this =
                    group.arms[arm.baseline].between.client().expect("the baseline is an arm of socklb");
                assert_eq!(
                    Client { build: Build::Other, ..this },
                    arm.between.client().expect("the arm has a client"),
                    "{name:?}"
                );
            }
            for (number, arm) in rest.iter().enumerate() {
                assert!(arm.baseline < number + 2, "{name:?}: {} is compared with a later arm", arm.name);
            }
            let mut names: Vec<_> = group.arms.iter().map(|arm| &arm.name).collect();
            names.sort();
            names.dedup();
            assert_eq!(names.len(), group.arms.len(), "{name:?}: two arms have the same name");
        }
    }
}
