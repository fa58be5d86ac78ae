//! The operator's configuration of client tasks and services, as checked values.

use std::net::SocketAddr;
use std::time::Duration;

use lb_common::abi::{MAX_BACKENDS, MAX_SUBSET};
pub use lb_common::abi::{Overflow, Policy};
use lb_common::net::{IPPROTO_TCP, IPPROTO_UDP};

use crate::control;
use crate::health::loss::OnBackendLoss;
use crate::members::load_band::LoadBand;
use crate::members::subset::Algorithm;
use crate::rebalance::RebalanceRules;

/// Why weights have no effect with a policy; `None` if they have an effect.
pub const fn ignores_weights(policy: Policy) -> Option<&'static str> {
    match policy {
        Policy::RoundRobin => Some("ignores weights"),
        Policy::LeastLoaded => Some("compares only open flows"),
        Policy::WeightedRoundRobin | Policy::P2c | Policy::Random => None,
    }
}

named! {
    /// The transport protocol of a service.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
    pub enum Protocol {
        /// TCP.
        Tcp = "tcp",
        /// UDP: connected sockets, and unconnected sockets that pass the service's address with
        /// each datagram.
        Udp = "udp",
    }
}

impl Protocol {
    /// The IP protocol number.
    pub const fn number(self) -> u8 {
        match self {
            Self::Tcp => IPPROTO_TCP,
            Self::Udp => IPPROTO_UDP,
        }
    }

    /// The protocol with this number; `None` if services cannot have it.
    pub fn of_number(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|protocol| protocol.number() == number)
    }
}

/// Which of a service's endpoints a client task may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Subset {
    /// All endpoints.
    All,
    /// The first `size` endpoints of the order that `algorithm` computes for this client task.
    Sized {
        /// The algorithm.
        algorithm: Algorithm,
        /// The number of endpoints.
        size: Size,
    },
}

impl Subset {
    /// The algorithm, if it needs a list with indexes ([`Algorithm::needs_indexes`]).
    pub fn needs_indexes(self) -> Option<Algorithm> {
        match self {
            Self::Sized { algorithm, .. } => algorithm.needs_indexes().then_some(algorithm),
            Self::All => None,
        }
    }

    /// The largest number of members that a client task can have, with any list and any job.
    pub const fn most_members(self) -> u32 {
        match self {
            Self::Sized { algorithm, size: Size::Fixed(size) } if !algorithm.is_aperture() => size,
            // The arc of an aperture may overlap more backends than the size. `auto` chooses all
            // backends if no smaller size is enough. A subset with a load band grows to all
            // backends under high load.
            Self::All | Self::Sized { .. } => MAX_BACKENDS,
        }
    }
}

/// The number of backends in a subset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    /// 1 to [`lb_common::abi::MAX_SUBSET`].
    Fixed(u32),
    /// The smallest size, at least `min`, at which structural weights can make loads even
    /// ([`crate::members::weights::auto_size`]).
    Auto {
        /// 1 to [`lb_common::abi::MAX_SUBSET`].
        min: u32,
    },
    /// The size follows the task's own load ([`crate::load_band`]). Only [`Algorithm::Random`]
    /// allows this: the sizes change and differ between tasks, so the subsets of a job cannot be
    /// fitted to each other.
    Band(LoadBand),
}

/// The number of a client task within its job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Task {
    /// This task's number, below `count`.
    pub index: u32,
    /// The number of tasks in the job, 1 to 65,536.
    pub count: u32,
}

/// The configuration of a service for one client task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Service {
    /// The service's name, at most 63 bytes.
    pub name: String,
    /// The address that processes dial.
    pub address: SocketAddr,
    /// The protocol with which processes dial the address.
    pub protocol: Protocol,
    /// The policy by which the kernel picks a backend.
    pub policy: Policy,
    /// A backend with this many open flows is skipped; `None` for no limit.
    pub active_limit: Option<u32>,
    /// The behaviour of a connect when all backends have reached `active_limit`.
    pub overflow: Overflow,
    /// The time in which the recent errors of a backend halve; `None` if errors do not affect
    /// choices. Only policies that count errors use this time.
    pub error_decay: Option<Duration>,
    /// The time after which a TCP connect fails; `None` for the kernel's default.
    pub connect_timeout: Option<Duration>,
    /// If the application gives up a connect after at least this time, the SYN is counted as
    /// unanswered.
    pub unanswered_after: Duration,
    /// When a backend is ejected; `None` if backends are never ejected.
    pub ejection: Option<Ejection>,
    /// The consequences of unavailable backends.
    pub health: HealthRules,
    /// The rules by which load and slow start change weights.
    pub control: control::ControlRules,
    /// When idle connections are closed, so that pools spread over all backends again; `None` for
    /// never.
    pub rebalance: Option<RebalanceRules>,
    /// The time after which an unconnected UDP flow chooses a backend again; `None` for never.
    pub rebind: Option<Duration>,
    /// Which endpoints the task may use.
    pub subset: Subset,
    /// The seed of the subset algorithm, which is the same for every task of the job.
    pub seed: u64,
    /// The errno of a connect that finds no usable backend.
    pub errno: u16,
}

impl Service {
    /// A TCP service with the defaults of the configuration: weighted round robin, no limit, and
    /// EHOSTUNREACH (113) if no backend is usable.
    pub fn new(name: &str, address: SocketAddr, subset: Subset, seed: u64) -> Self {
        Self {
            name: name.to_owned(),
            address,
            protocol: Protocol::Tcp,
            policy: Policy::WeightedRoundRobin,
            active_limit: None,
            overflow: Overflow::LeastLoaded,
            error_decay: None,
            connect_timeout: None,
            unanswered_after: UNANSWERED_AFTER,
            ejection: None,
            health: HealthRules::default(),
            control: control::ControlRules::default(),
            rebalance: None,
            rebind: None,
            subset,
            seed,
            errno: 113,
        }
    }
}

/// The consequences of unavailable backends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HealthRules {
    /// The threshold of panic: a percentage of the backends that are in the table or replaced. If
    /// fewer than this are available, and no recently established connection shows that a backend
    /// serves, connects may also choose ejected backends, and refusing backends that accept
    /// connections. With 0, the service is never in panic.
    pub panic_threshold: u8,
    /// The time after which an unavailable member is replaced.
    pub replace_after: Duration,
    /// The longest duration of a probe that opens a connection. If no probe of a member has ended
    /// when a list arrives, the service treats all members alike for this time. `None` if there are
    /// no such probes; then backends are never unproven.
    pub first_look: Option<Duration>,
    /// Whether reports of backends are used as evidence of their health.
    pub heeds_reports: bool,
    /// Whether connects may choose backends that an operator has drained, if there are no other
    /// backends.
    pub drain_fallback: bool,
    /// The treatment of the open connections of a lost backend.
    pub on_backend_loss: OnBackendLoss,
}

impl Default for HealthRules {
    fn default() -> Self {
        Self {
            panic_threshold: 50,
            replace_after: Duration::from_secs(10),
            first_look: None,
            heeds_reports: false,
            drain_fallback: false,
            on_backend_loss: OnBackendLoss::Keep,
        }
    }
}

/// When a backend is ejected for failures in a row, and for how long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ejection {
    /// The number of failures in a row, 1 to 255.
    pub failures: u8,
    /// The duration of the first ejection.
    pub base: Duration,
    /// The longest duration of an ejection.
    pub max: Duration,
    /// Whether an established connection on which the backend does not answer is a failure.
    pub hangs: bool,
}

impl Default for Ejection {
    fn default() -> Self {
        Self { failures: 5, base: Duration::from_secs(5), max: Duration::from_mins(5), hangs: true }
    }
}

/// The default for [`Service::unanswered_after`]: longer than handshakes within a region, and
/// shorter than the connect timeouts of clients.
pub const UNANSWERED_AFTER: Duration = Duration::from_millis(200);

/// Why a connect may examine every member of a subset to choose a backend. Such a subset has at
/// most [`MAX_SCAN`] members.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScanCause {
    /// The policy always examines every member.
    Policy,
    /// The overflow rule examines every member when all members are at their limit.
    Overflow,
}

impl ScanCause {
    /// The cause for a service with these settings; `None` if a connect never examines every
    /// member.
    pub const fn of(policy: Policy, active_limit: Option<u32>, overflow: Overflow) -> Option<Self> {
        match (policy, active_limit, overflow) {
            (Policy::LeastLoaded, _, _) => Some(Self::Policy),
            (_, Some(_), Overflow::LeastLoaded) => Some(Self::Overflow),
            (_, _, Overflow::LeastLoaded | Overflow::Refuse) => None,
        }
    }
}

/// The largest number of members that a connect can examine to choose a backend.
pub const MAX_SCAN: u32 = MAX_SUBSET;

/// The default seed of the subsets of a job's tasks: XXH64 of `<job>/<service>`.
pub fn seed(job: &str, service: &str) -> u64 {
    let mut text = String::with_capacity(job.len() + 1 + service.len());
    text.push_str(job);
    text.push('/');
    text.push_str(service);
    xxhash_rust::xxh64::xxh64(text.as_bytes(), 0)
}

/// Which information the programs record about a client's flows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accounting {
    /// Only which flows are open, with the cheapest hooks. The reasons for failures are unknown.
    Active,
    /// Which flows are open, the phases of each flow, and how it ended.
    Full,
}

impl Accounting {
    /// Both kinds, in the order of the documentation.
    pub const ALL: [Self; 2] = [Self::Full, Self::Active];

    /// The name in configurations and tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Active => "active",
            Self::Full => "full",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_protocol_is_found_by_its_number() {
        for protocol in Protocol::ALL {
            assert_eq!(Protocol::of_number(protocol.number()), Some(protocol));
        }
        assert_eq!([0, 1, 7, 255].map(Protocol::of_number), [None; 4]);
    }

    #[test]
    fn only_least_loaded_choices_examine_every_member() {
        for policy in Policy::ALL {
            let always = (policy == Policy::LeastLoaded).then_some(ScanCause::Policy);
            for overflow in Overflow::ALL {
                assert_eq!(ScanCause::of(policy, None, overflow), always, "{policy:?}");
            }
            assert_eq!(ScanCause::of(policy, Some(1), Overflow::Refuse), always, "{policy:?}");
            let at_the_limit = always.unwrap_or(ScanCause::Overflow);
            assert_eq!(
                ScanCause::of(policy, Some(1), Overflow::LeastLoaded),
                Some(at_the_limit),
                "{policy:?}"
            );
        }
    }
}
