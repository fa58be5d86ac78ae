//! What the operator asked for: client tasks and services, as values that cannot be wrong.

use std::net::SocketAddr;
use std::time::Duration;

use lb_common::abi::{MAX_BACKENDS, MAX_SUBSET};
pub use lb_common::abi::{Overflow, Policy};
use lb_common::net::{IPPROTO_TCP, IPPROTO_UDP};

use crate::control;
use crate::load_band::LoadBand;
use crate::subset::Algorithm;

/// A transport protocol that a service is dialled with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Protocol {
    /// TCP.
    Tcp,
    /// UDP: sockets that are connected, and those that name the service with each datagram.
    Udp,
}

impl Protocol {
    /// All of them, in the order in which the documentation has them.
    pub const ALL: [Self; 2] = [Self::Tcp, Self::Udp];

    /// The IP protocol number.
    pub const fn number(self) -> u8 {
        match self {
            Self::Tcp => IPPROTO_TCP,
            Self::Udp => IPPROTO_UDP,
        }
    }

    /// The protocol with this number, if services can have it.
    pub fn of_number(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|protocol| protocol.number() == number)
    }

    /// The word for it in configurations and tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
        }
    }
}

/// Which of a service's endpoints a client task may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Subset {
    /// All of them.
    All,
    /// The first `size` of the order that `algorithm` gives this client task.
    Sized {
        /// The algorithm.
        algorithm: Algorithm,
        /// How many.
        size: Size,
    },
}

impl Subset {
    /// The algorithm, if a list must have indexes for it: see [`Algorithm::needs_indexes`].
    pub fn needs_indexes(self) -> Option<Algorithm> {
        match self {
            Self::Sized { algorithm, .. } => algorithm.needs_indexes().then_some(algorithm),
            Self::All => None,
        }
    }

    /// The most members that a list can give it, whatever job the client task is of.
    pub const fn most_members(self) -> u32 {
        match self {
            Self::Sized { algorithm, size: Size::Fixed(size) } if !algorithm.is_aperture() => size,
            // An arc overlaps more backends than were asked for, `auto` takes all where nothing less will do, and so does much load.
            Self::All | Self::Sized { .. } => MAX_BACKENDS,
        }
    }
}

/// How many backends a subset has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    /// 1 to [`lb_common::abi::MAX_SUBSET`].
    Fixed(u32),
    /// The smallest that is at least `min` and lets structural weights make loads even, see
    /// [`crate::weights::auto_size`].
    Auto {
        /// 1 to [`lb_common::abi::MAX_SUBSET`].
        min: u32,
    },
    /// As many as the task's own load asks for, see [`crate::load_band`]. Only for [`Algorithm::Random`]: sizes differ from task to task
    /// and change, so that subsets cannot be fitted to each other.
    Band(LoadBand),
}

/// Which task of its job a client is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Task {
    /// This task's number, below `count`.
    pub index: u32,
    /// How many tasks the job has, 1 to 65,536.
    pub count: u32,
}

/// A service as one client task sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Service {
    /// Its name, at most 63 bytes.
    pub name: String,
    /// The address that processes dial.
    pub address: SocketAddr,
    /// The protocol that they dial it with.
    pub protocol: Protocol,
    /// How the kernel picks.
    pub policy: Policy,
    /// Open flows of a backend at which it is skipped; `None` for no limit.
    pub active_limit: Option<u32>,
    /// What happens when all are at it.
    pub overflow: Overflow,
    /// After how long an error counts half; `None` if errors do not count. Only for policies that count them.
    pub error_decay: Option<Duration>,
    /// After how long a TCP connect gives up; `None` for the kernel's time.
    pub connect_timeout: Option<Duration>,
    /// After how long a SYN counts as unanswered if the application gives up.
    pub unanswered_after: Duration,
    /// When a backend is ejected; `None` if none ever is.
    pub ejection: Option<Ejection>,
    /// What follows when backends are unavailable.
    pub health: HealthRules,
    /// What changes weights: load, and slow start.
    pub control: control::ControlRules,
    /// After how long an unconnected UDP flow chooses anew; `None` for never.
    pub rebind: Option<Duration>,
    /// Which endpoints may be used.
    pub subset: Subset,
    /// Decides the subset together with the task's index; the same for every task of the job.
    pub seed: u64,
    /// The errno of a connect that finds no usable backend.
    pub errno: u16,
}

impl Service {
    /// A service over TCP as a configuration has it that says no more than this: weighted round robin, no limit, and
    /// EHOSTUNREACH (113) where no backend is usable.
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
            rebind: None,
            subset,
            seed,
            errno: 113,
        }
    }
}

/// What follows when backends are unavailable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HealthRules {
    /// Percent of the backends that a task has tried: if fewer are available, and none of them serves, ejected ones are chosen as
    /// well, and refusing ones that accept connections; 0 for never.
    pub panic_threshold: u8,
    /// After how long a member that is unavailable is replaced.
    pub replace_after: Duration,
    /// How long a probe by connection takes at most: for so long a service of which nothing is known yet uses all its backends
    /// alike. `None` if there are no such probes, and no backend is unproven.
    pub first_look: Option<Duration>,
    /// Whether the reports of backends count.
    pub heeds_reports: bool,
}

impl Default for HealthRules {
    fn default() -> Self {
        Self {
            panic_threshold: 50,
            replace_after: Duration::from_secs(10),
            first_look: None,
            heeds_reports: false,
        }
    }
}

/// When a backend is ejected for failures in a row, and for how long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ejection {
    /// How many failures, 1 to 255.
    pub failures: u8,
    /// How long the first time.
    pub base: Duration,
    /// How long at most.
    pub max: Duration,
    /// Whether an established connection that the backend does not answer is a failure.
    pub hangs: bool,
}

impl Default for Ejection {
    fn default() -> Self {
        Self { failures: 5, base: Duration::from_secs(5), max: Duration::from_mins(5), hangs: true }
    }
}

/// After how long a SYN counts as unanswered where nothing is said: longer than handshakes within a region take, shorter than
/// the connect timeouts that clients have.
pub const UNANSWERED_AFTER: Duration = Duration::from_millis(200);

/// Why one choice may look at every member of a subset, which then has at most [`MAX_SCAN`] of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScanCause {
    /// The policy always does.
    Policy,
    /// It does when all members are at their limit.
    Overflow,
}

impl ScanCause {
    /// Of a service with these.
    pub const fn of(policy: Policy, active_limit: Option<u32>, overflow: Overflow) -> Option<Self> {
        match (policy, active_limit, overflow) {
            (Policy::LeastLoaded, _, _) => Some(Self::Policy),
            (_, Some(_), Overflow::LeastLoaded) => Some(Self::Overflow),
            (_, _, Overflow::LeastLoaded | Overflow::Refuse) => None,
        }
    }
}

/// The most members that one choice can look at.
pub const MAX_SCAN: u32 = MAX_SUBSET;

/// The default seed of the subsets that a job's tasks take of a service: XXH64 of `<job>/<service>`.
pub fn seed(job: &str, service: &str) -> u64 {
    let mut text = String::with_capacity(job.len() + 1 + service.len());
    text.push_str(job);
    text.push('/');
    text.push_str(service);
    xxhash_rust::xxh64::xxh64(text.as_bytes(), 0)
}

/// What is known of a client's flows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accounting {
    /// Those that are open, by the cheapest hooks. Why one failed is not known.
    Active,
    /// Also how they went and why they ended.
    Full,
}

impl Accounting {
    /// Both of them, in the order in which the documentation has them.
    pub const ALL: [Self; 2] = [Self::Full, Self::Active];

    /// The word for it in configurations and tables.
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
    fn what_may_look_at_every_member_is_known() {
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
