//! Counts errors of backends as load, for the policies that compare load. The errors that backends
//! report are added to the errors that the kernel programs count.
//! [`error_load`](lb_core::control::error_load) decides how much load an error is equivalent to.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use lb_common::load::peak_of;
use lb_core::control::error_load::{MemberLoad, hold, most_errors, peak_flows};
use lb_core::control::reported_errors::ReportedErrors;
use lb_core::control::{ReceivedReport, TICK};
use lb_core::ids::{BackendRef, ServiceIndex, Slot};
use lb_core::rules;
use lb_core::service::{Policy, Service};

use super::ClientTask;
use super::control::flows_begun;

/// The time of the last tick, and for each service with errors the number of its connects up to
/// that time.
#[derive(Debug, Default)]
pub struct ErrorLook {
    at: Option<Instant>,
    connects: BTreeMap<ServiceIndex, u64>,
}

/// The data of a service whose errors count as load.
struct ServiceLoad {
    index: ServiceIndex,
    policy: Policy,
    /// The half-life of errors.
    decay: Duration,
    /// The members of the service's table: slot, load, and whether any errors are left.
    members: Vec<(Slot, MemberLoad, bool)>,
    /// The base-2 logarithm of the table's number of entries.
    length_log2: u8,
    /// The peak: the largest quotient of a member's open flows and its share, in the format of the
    /// kernel programs.
    peak_flows: u64,
}

impl ServiceLoad {
    fn has_errors(&self) -> bool {
        self.members.iter().any(|(.., has_errors)| *has_errors)
    }
}

/// The half-life of a service's errors; `None` if errors do not count as load.
pub fn error_decay(service: &Service) -> Option<Duration> {
    service.error_decay.filter(|_| service.policy.counts_errors())
}

impl ClientTask {
    /// The services whose errors count as load, in the order of their indexes.
    fn service_loads(&self) -> Vec<ServiceLoad> {
        let (tables, now_ns) = (self.datapath.tables(), self.datapath.kernel().now_ns());
        let look = |(position, (service, index, _)): (usize, (&Service, ServiceIndex, _))| {
            let decay = error_decay(service)?;
            let half_life = rules::of(service).error_half_life;
            let addresses = self.balancer.weights(position).iter().map(|(address, _)| *address);
            let slots = addresses.filter_map(|address| Some(self.balancer.slot(position, address)?.slot));
            let member = |slot| {
                tables.member_load(slot, half_life, now_ns).map(|(load, has_errors)| (slot, load, has_errors))
            };
            let members: Vec<_> = slots.filter_map(member).collect();
            let (policy, length) = (service.policy, self.balancer.entries(position));
            let peak_flows = peak_flows(policy, length, members.iter().map(|(_, load, _)| *load));
            let length_log2 = u8::try_from(length.checked_ilog2().unwrap_or(0)).unwrap_or(u8::MAX);
            Some(ServiceLoad { index, policy, decay, members, length_log2, peak_flows })
        };
        let mut loads: Vec<ServiceLoad> = self.balancer.services().enumerate().filter_map(look).collect();
        loads.sort_by_key(|service| service.index);
        loads
    }

    /// Publishes each service's peak (see [`ServiceLoad::peak_flows`]) to the kernel programs. Call
    /// this whenever tables have changed.
    pub(super) fn publish_peak_flows(&mut self) {
        self.set_peak_flows(&self.service_loads());
    }

    fn set_peak_flows(&mut self, loads: &[ServiceLoad]) {
        for ServiceLoad { index, peak_flows, .. } in loads {
            self.datapath.set_peak_flows(*index, *peak_flows);
        }
    }

    /// Publishes the peak of each service (see `peak_flows`) to the kernel programs. Limits each
    /// backend's errors to the equivalent of the peak, and delays the decay of errors while there
    /// are few connects. Call this each tick.
    pub fn weigh_errors(&mut self, now: Instant) {
        let last = self.errors_seen.at.replace(now);
        let elapsed = last.map_or(TICK, |last| now.saturating_duration_since(last));
        let mut loads = self.service_loads();
        self.set_peak_flows(&loads);
        loads.retain(ServiceLoad::has_errors);
        let before = std::mem::take(&mut self.errors_seen.connects);
        let indexes: Vec<ServiceIndex> = loads.iter().map(|service| service.index).collect();
        // If the read fails, the next tick reads again; `sample` logs the error.
        let Ok(outcomes) = self.datapath.tables().outcomes_of(&indexes) else { return };
        let reported: BTreeSet<Slot> = self.reported_errors.keys().map(|at| at.slot).collect();
        for (service, outcomes) in loads.into_iter().zip(outcomes) {
            let ServiceLoad { index, policy, decay, members, length_log2, peak_flows } = service;
            let connects = flows_begun(&outcomes);
            // If a service had no errors at the last tick, its number of connects at that time is
            // unknown.
            let new = before.get(&index).map_or(0, |before| connects.saturating_sub(*before));
            let all = members.iter().map(|(_, load, _)| load.share(policy)).sum();
            for (slot, load, _) in members.iter().filter(|(.., has_errors)| *has_errors) {
                // Reported errors count according to the backend's share of requests, not according
                // to open flows, so they need no limit.
                if !reported.contains(slot) {
                    let most = most_errors(peak_of(policy as u8, peak_flows, load.entries, length_log2));
                    self.datapath.limit_errors(*slot, most);
                }
                let delay = hold(elapsed, new, load.share(policy), all, decay);
                if !delay.is_zero() {
                    self.datapath.hold_errors(*slot, delay);
                }
            }
            self.errors_seen.connects.insert(index, connects);
        }
    }

    /// Adds reported errors to the recent errors of their backends, for services with a policy that
    /// counts errors as load. Call this each tick. For `report_of`, see
    /// [`ClientTask::tick_controls`].
    pub fn count_reported_errors(
        &mut self,
        report_of: impl Fn(usize, usize) -> Option<ReceivedReport>,
        now: Instant,
    ) {
        let now = self.clock.monotonic(now);
        let mut shares: BTreeMap<Slot, (BackendRef, f64)> = BTreeMap::new();
        for (position, configured) in self.client.services.iter().enumerate() {
            if error_decay(&configured.service).is_none() {
                continue;
            }
            for (member, (address, _)) in self.balancer.weights(position).iter().enumerate() {
                let share =
                    report_of(position, member).and_then(|report| ReportedErrors::share(&report, now));
                if let (Some(share), Some(at)) = (share, self.balancer.slot(position, *address)) {
                    shares.insert(at.slot, (at, share));
                }
            }
        }
        let mut before = std::mem::take(&mut self.reported_errors);
        for (at, share) in shares.into_values() {
            let mut errors = before.remove(&at).unwrap_or_default();
            match errors.tick(self.datapath.tables().chosen(at.slot), share) {
                0 => {}
                more => self.datapath.add_errors(at.slot, more),
            }
            self.reported_errors.insert(at, errors);
        }
    }
}
