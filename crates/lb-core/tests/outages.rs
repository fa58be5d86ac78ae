//! Outages in virtual time: a client task with a balancer in place of the daemon, an ejector in
//! place of the programs, and backends that die and return. The tests count failed connects, and
//! measure in seconds of the task's clock when failures end.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;

use lb_common::ejection::{Evidence, FailureSource, NO_JITTER};
use lb_common::ending::{End, Ending};
use lb_common::ticks::tick;
use lb_core::balancer::{self, Adopted, Fact, KernelVerdict};
use lb_core::ejection::Ejector;
use lb_core::endpoint::{Endpoint, EndpointList, EndpointState};
use lb_core::health::tiers::Tier;
use lb_core::health::{BackendEvidence, Health, Who, Why};
use lb_core::ids::{BackendRef, Slot};
use lb_core::limits::Limits;
use lb_core::membership::Assignment;
use lb_core::plan::{BackendPlan, Plan};
use lb_core::rules;
use lb_core::service::{Ejection, Service, Size, Subset, Task};
use lb_core::slots::Identity;
use lb_core::subset::Algorithm;
use proptest::prelude::*;
use proptest::test_runner::RngSeed;

type Balancer = balancer::Balancer<Duration>;

const SECOND: Duration = Duration::from_secs(1);
const LIMITS: Limits = Limits { schedule_entries: 65_536, flow_records: 64, slots: 1_024 };
const TASK: Task = Task { index: 3, count: 10 };
/// Connects per second.
const RATE: u32 = 30;

fn address(index: usize) -> SocketAddr {
    let [high, low] = u16::try_from(index).expect("the number is small").to_be_bytes();
    SocketAddr::from(([10, 0, high, low], 80))
}

fn index(address: SocketAddr) -> usize {
    let SocketAddr::V4(address) = address else { unreachable!("all addresses are IPv4") };
    let [.., high, low] = address.ip().octets();
    usize::from(u16::from_be_bytes([high, low]))
}

struct Host {
    now: Duration,
    service: Service,
    balancer: Balancer,
    ejector: Ejector,
    plan: Plan,
    /// Whether each endpoint is alive.
    is_alive: Vec<bool>,
    /// Endpoints that are lame ducks in the list.
    lame_ducks: BTreeSet<usize>,
    /// Whether all other endpoints are down in the list.
    is_listed_down: bool,
    /// Whether the daemon probes by opening connections, once per second.
    probes: bool,
    /// The reason that failed probes report.
    why: Why,
    /// Whether probes succeed even if connects do not reach the backend.
    probes_find_all_well: bool,
    /// When a connection to a backend was last established.
    established: BTreeMap<Slot, Duration>,
    /// The position of the programs in the table.
    cursor: usize,
    /// Connects to each endpoint since the last reset.
    sent: Vec<u32>,
}

impl Host {
    fn new(endpoints: usize, size: Option<u32>, probes: bool) -> Self {
        let subset = size.map_or(Subset::All, |size| Subset::Sized {
            algorithm: Algorithm::Rocksteadier,
            size: Size::Fixed(size),
        });
        let mut service =
            Service::new("users", "10.96.0.10:80".parse().expect("the address is valid"), subset, 7);
        service.ejection = Some(Ejection::default());
        service.health.first_look = probes.then_some(SECOND);
        let adopted = Adopted::default();
        let now = 100 * SECOND;
        let balancer = Balancer::new(vec![service.clone()], LIMITS, adopted, now).expect("the plan fits");
        let ejector = Ejector::new(rules::of_ejection(&service));
        let mut host = Self {
            now,
            service,
            balancer,
            ejector,
            plan: Plan::default(),
            is_alive: vec![true; endpoints],
            lame_ducks: BTreeSet::new(),
            is_listed_down: false,
            probes,
            why: Why::Probe,
            probes_find_all_well: false,
            established: BTreeMap::new(),
            cursor: 0,
            sent: vec![0; endpoints],
        };
        host.deliver(endpoints);
        host.run(5);
        host
    }

    /// Delivers a list with this number of endpoints.
    fn deliver(&mut self, endpoints: usize) {
        self.is_alive.resize(endpoints, true);
        self.sent.resize(endpoints, 0);
        let endpoints = (0..endpoints).map(|at| Endpoint {
            address: address(at),
            index: u32::try_from(at).expect("the number is small"),
            weight: 1,
            state: match (self.lame_ducks.contains(&at), self.is_listed_down) {
                (true, _) => EndpointState::LameDuck,
                (false, true) => EndpointState::Down,
                (false, false) => EndpointState::Healthy,
            },
            zone: None,
            agent: None,
        });
        let list = EndpointList::new(endpoints.collect(), self.service.address, &[]).expect("the list fits");
        self.apply(Fact::Endpoints(0, Assignment::of(&self.service, TASK, list)));
        self.publish();
    }

    fn apply(&mut self, fact: Fact) {
        self.balancer.handle(self.now, fact).expect("the plan fits");
    }

    /// Updates the programs' tables to the plan, like the daemon.
    fn publish(&mut self) {
        self.plan = self.balancer.plan();
        let service = self.plan.services.values().next().expect("there is one service");
        self.ejector.publish(service.schedule.clone(), &service.replaced, service.fallback);
        for (slot, backend) in &self.plan.backends {
            self.ejector.set_state(slot.number(), backend.daemon_state());
        }
    }

    /// The daemon's work once per second.
    fn tick(&mut self) {
        let mut verdicts = BTreeMap::new();
        for slot in self.plan.backends.keys() {
            let (is_ejected, run) =
                (self.ejector.state(slot.number()).ejected != 0, self.ejector.standing(slot.number()).run);
            if is_ejected || run > 0 {
                verdicts.insert(*slot, KernelVerdict { is_ejected, failures: run });
            }
        }
        let base = Ejection::default().base;
        let is_ejected = |slot| verdicts.get(slot).is_some_and(|verdict: &KernelVerdict| verdict.is_ejected);
        let serves = self.established.iter().any(|(slot, at)| !is_ejected(slot) && self.now - *at <= base);
        let services = self.balancer.services().map(|(_, index, _)| index);
        let serving: BTreeSet<_> = services.filter(|_| serves).collect();
        self.apply(Fact::Serving(serving));
        self.apply(Fact::Kernel(verdicts));
        if self.probes {
            let (_, _, in_use) = self.balancer.services().next().expect("there is one service");
            let membership = in_use.expect("a list is in use").1;
            let row = &self.balancer.row(0).expect("a list is in use").usable;
            let next = membership.next.iter().map(|member| member.endpoint.address);
            let unused: Vec<SocketAddr> = next.filter(|address| !row.contains_key(address)).take(4).collect();
            let lame_ducks = membership.lame_ducks.iter().map(|member| member.endpoint.address);
            let probed = row.keys().copied().chain(unused).chain(lame_ducks.take(4));
            let found = |address| match self.is_alive[index(address)] || self.probes_find_all_well {
                true => (address, (Health::Healthy, Why::Probe)),
                false => (address, (Health::Refusing, self.why)),
            };
            let results = probed.map(found).collect();
            self.apply(Fact::Verdicts(0, Who::Probe, results));
        }
        self.apply(Fact::Time);
        let idle: BTreeSet<Slot> = self.balancer.unneeded();
        idle.iter().for_each(|slot| self.ejector.clear(slot.number()));
        self.apply(Fact::Idle(idle));
        self.publish();
        let now = self.ticks();
        for slot in self.balancer.take_returned() {
            self.ejector.end_ejection(slot.number(), now);
        }
        for slot in self.balancer.replaced_without_ejection() {
            self.ejector.eject(slot.number(), now);
        }
        self.ejector.renew_trial(now);
    }

    fn ticks(&self) -> u32 {
        tick(u64::try_from(self.now.as_nanos()).expect("the time fits into 64 bits"))
    }

    /// Makes one connect. Returns whether it fails.
    fn connect(&mut self) -> bool {
        let now = self.ticks();
        let tried = self.ejector.due_trial(now, |_| false);
        let service = self.plan.services.values().next().expect("there is one service");
        let table = &service.schedule;
        let slot = tried.or_else(|| {
            (0..table.len()).find_map(|_| {
                self.cursor = (self.cursor + 1) % table.len();
                let slot = table[self.cursor].number();
                self.ejector.state(slot).is_usable().then_some(slot)
            })
        });
        let slot = slot.or(service.fallback.map(Slot::number)).expect("a backend can be chosen");
        let slot = Slot::new(slot).expect("the slot is valid");
        let endpoint = index(self.plan.backends[&slot].address);
        self.sent[endpoint] += 1;
        let is_alive = self.is_alive[endpoint];
        let is_trial = tried.is_some();
        let evidence = if is_alive {
            self.established.insert(slot, self.now);
            Evidence::established(is_trial)
        } else {
            Evidence::of_end(End::of(Ending::Refused, false), is_trial, FailureSource::default(), 0)
        };
        self.ejector.report(slot.number(), evidence, now, NO_JITTER);
        !is_alive
    }

    /// Makes several connects at once. Returns how many fail.
    fn connects(&mut self, count: u32) -> u32 {
        (0..count).map(|_| u32::from(self.connect())).sum()
    }

    /// Lets several seconds pass. Returns how many connects failed.
    fn run(&mut self, seconds: u32) -> u32 {
        let mut failed = 0;
        for _ in 0..seconds {
            failed += self.run_without_daemon(1);
            self.tick();
        }
        failed
    }

    /// Lets several seconds pass without a running daemon. Returns how many connects failed.
    fn run_without_daemon(&mut self, seconds: u32) -> u32 {
        let mut failed = 0;
        for _ in 0..seconds * RATE {
            failed += u32::from(self.connect());
            self.now += SECOND / RATE;
        }
        failed
    }

    /// Whether the programs have ejected an endpoint.
    fn is_ejected(&self, endpoint: usize) -> bool {
        let is_it = |(slot, backend): (&Slot, &BackendPlan)| {
            backend.address == address(endpoint) && self.ejector.state(slot.number()).ejected != 0
        };
        self.plan.backends.iter().any(is_it)
    }

    /// Endpoints in the table.
    fn used(&self) -> Vec<usize> {
        let row = self.balancer.row(0).expect("a list is in use");
        row.members.iter().map(|(address, _)| index(*address)).collect()
    }

    /// The daemon dies, and another daemon adopts the programs' maps.
    fn restart(&mut self) {
        let next_generations: Vec<BackendRef> = Vec::new();
        let adopted = Adopted { plan: self.plan.clone(), next_generations };
        self.balancer =
            Balancer::new(vec![self.service.clone()], LIMITS, adopted, self.now).expect("the plan fits");
        let endpoints = self.is_alive.len();
        self.deliver(endpoints);
    }
}

/// The number of seconds until a backend's recovery is detected. Probes detect it at once; without
/// probes, a trial detects it when the ejection is over.
fn until_seen(probes: bool) -> u32 {
    if probes { 3 } else { 330 }
}

/// Most of a small subset dies, while most of the fleet is healthy. The test counts the failures
/// between 30 and 32 seconds later.
#[test]
fn the_rest_of_the_fleet_replaces_a_mostly_dead_subset() {
    for (size, dead) in [(12, 7), (4, 4), (8, 8), (1, 1), (20, 9)] {
        for probes in [false, true] {
            let mut host = Host::new(40, Some(size), probes);
            for endpoint in host.used().into_iter().take(dead) {
                host.is_alive[endpoint] = false;
            }
            host.run(30);
            let failed = host.run(2);
            assert!(failed <= 3, "{dead} of {size} dead, probes {probes}: {failed} of 60 connects failed");
            // The backends have returned. Half a minute after their recovery is detected, the
            // members are the same as before.
            let members = Host::new(40, Some(size), probes).used();
            host.is_alive.fill(true);
            assert_eq!(host.run(until_seen(probes) + 35), 0, "{dead} of {size} dead, probes {probes}");
            assert_eq!(host.used(), members, "{dead} of {size} dead, probes {probes}");
        }
    }
}

/// If probes contradict connects, ejection takes twice as many failures. The last member is not
/// ejected, but replaced.
#[test]
fn the_last_member_is_replaced_if_connects_fail_and_probes_pass() {
    for size in [1, 3] {
        let mut host = Host::new(40, Some(size), true);
        host.probes_find_all_well = true;
        for endpoint in host.used() {
            host.is_alive[endpoint] = false;
        }
        host.run(45);
        assert!(host.run(2) <= 3, "size {size}");
    }
}

#[test]
fn two_dead_backends_of_three_fail_few_connects() {
    let mut host = Host::new(3, None, false);
    host.is_alive = vec![true, false, false];
    assert!(host.run(10) <= 14);
    let mut host = Host::new(3, None, true);
    host.is_alive = vec![true, false, false];
    host.tick();
    assert_eq!(host.run(10), 0);
}

/// This host reaches no backend. Connects try all backends, and use all backends equally after they
/// answer again.
#[test]
fn if_no_backend_answers_all_are_tried_and_return_soon() {
    for probes in [false, true] {
        let mut host = Host::new(10, None, probes);
        host.is_alive.fill(false);
        host.run(60);
        host.sent.fill(0);
        host.run(10);
        assert!(host.sent.iter().all(|sent| *sent > 0), "probes {probes}: connects {:?}", host.sent);
        host.is_alive.fill(true);
        host.run(until_seen(probes));
        host.sent.fill(0);
        assert_eq!(host.run(10), 0);
        assert!(
            host.sent.iter().all(|sent| sent.abs_diff(RATE) <= 2),
            "probes {probes}: connects {:?}",
            host.sent
        );
    }
}

/// In the longest list, every endpoint is dead, or down in the list. Connects always find an
/// endpoint to try, and use all endpoints again after they have recovered.
#[test]
fn a_full_list_of_dead_backends_is_tried_and_readmitted() {
    const ALL: usize = 16_384;
    for probes in [false, true] {
        let mut host = Host::new(ALL, Some(20), probes);
        host.is_listed_down = true;
        host.deliver(ALL);
        assert_eq!(host.balancer.row(0).map(|row| row.tier), Some(Tier::Refusing));
        assert_eq!(host.run(10), 0, "connects must reach endpoints that the list reports as down");
        host.is_alive.fill(false);
        assert_eq!(host.run(60), 60 * RATE);
        host.is_listed_down = false;
        host.deliver(ALL);
        assert_eq!(host.run(60), 60 * RATE);
        host.is_alive.fill(true);
        host.run(until_seen(probes));
        assert_eq!(host.run(10), 0, "probes {probes}");
        assert_eq!(host.used().len(), 20, "probes {probes}");
    }
}

/// A machine was stopped for hours, or for so long that the programs' 32-bit clock shows the same
/// time again. No stored time has an effect for longer than it should.
#[test]
fn after_a_jump_of_the_clock_a_dead_backend_gets_at_most_two_trials() {
    let round = Duration::from_nanos(1 << 52);
    for jump in [600 * SECOND, 36_000 * SECOND, round / 2, round - SECOND, round, round + SECOND] {
        for probes in [false, true] {
            let mut host = Host::new(5, None, probes);
            host.is_alive[4] = false;
            host.run(20);
            host.now += jump;
            assert!(host.run(10) <= 2, "jump of {jump:?}, probes {probes}");
            host.is_alive[4] = true;
            host.now += jump;
            host.run(until_seen(probes));
            host.sent.fill(0);
            assert_eq!(host.run(10), 0, "jump of {jump:?}, probes {probes}");
            assert!(host.sent[4] > 0, "jump of {jump:?}, probes {probes}");
        }
    }
}

/// Two of three backends answer their probes with errors: connects choose them only if no backend
/// serves.
#[test]
fn backends_with_failing_answers_are_chosen_if_none_serves() {
    let mut host = Host::new(3, None, true);
    host.why = Why::Answer;
    host.is_alive = vec![true, false, false];
    host.tick();
    host.sent.fill(0);
    host.run(10);
    assert_eq!(host.sent, [10 * RATE, 0, 0], "connects must go to the only serving backend");
    // No client connects for a while, so no recently established connection shows that a backend
    // serves.
    host.now += 10 * SECOND;
    host.tick();
    assert_eq!(host.balancer.row(0).map(|row| row.is_panic), Some(true));
    host.sent.fill(0);
    host.connects(9);
    assert_eq!(host.sent, [3, 3, 3]);
}

/// No daemon runs, all members die, and the list has a lame duck. The lame duck serves, and trials
/// of the members are as rare as if one of them were healthy.
#[test]
fn without_a_daemon_a_listed_lame_duck_serves_if_all_members_fail() {
    for members in [1, 2, 5] {
        let mut host = Host::new(members + 2, None, false);
        host.lame_ducks = BTreeSet::from([0, 1]);
        host.deliver(members + 2);
        host.run(5);
        let plan = host.plan.clone();
        let service = plan.services.values().next().expect("there is one service");
        let backup = service.fallback.expect("a lame duck is the fallback");
        assert!(!service.schedule.contains(&backup) && index(plan.backends[&backup].address) < 2);
        host.sent.fill(0);
        assert_eq!(host.run_without_daemon(10), 0);
        assert_eq!(host.sent[..2], [0, 0], "no connect goes to a lame duck while members serve");
        host.is_alive[2..].fill(false);
        let count = u32::try_from(members).expect("the number is small");
        let failed = host.run_without_daemon(10);
        assert!((5 * count..=7 * count).contains(&failed), "{members} members: {failed} connects failed");
        host.sent.fill(0);
        let failed = host.run_without_daemon(60);
        assert!((count..=15 * count).contains(&failed), "{members} members: {failed} connects failed");
        assert!(host.sent[..2].contains(&(60 * RATE - failed)), "{:?}", host.sent);
        // Even if a client seldom connects, not every connect becomes a trial.
        let seldom = (0..20).map(|_| {
            host.now += 20 * SECOND;
            u32::from(host.connect())
        });
        assert!(seldom.sum::<u32>() <= 10, "{members} members");
        // A trial finds a member that has returned, and only this member then serves.
        host.is_alive[2] = true;
        host.run_without_daemon(330);
        host.sent.fill(0);
        host.run_without_daemon(10);
        assert_eq!(host.sent[..2], [0, 0], "{members} members: connects {:?}", host.sent);
    }
}

/// The lame duck fails, too. Connects try the ejected members and the lame duck one after another,
/// until one of them serves.
#[test]
fn without_a_daemon_or_a_serving_backend_members_are_tried() {
    let mut host = Host::new(4, None, false);
    host.lame_ducks = BTreeSet::from([0]);
    host.deliver(4);
    host.run(5);
    host.is_alive.fill(false);
    host.run_without_daemon(60);
    host.sent.fill(0);
    host.run_without_daemon(60);
    assert!(host.sent.iter().all(|sent| *sent >= 3), "{:?}", host.sent);
    host.is_alive[1..].fill(true);
    host.run_without_daemon(60);
    assert_eq!(host.run_without_daemon(10), 0);
}

/// The number of backends in the histories; the last is a lame duck in the list.
const BACKENDS: usize = 6;

/// One phase of a history: which backends are alive, whether the daemon restarts at the beginning,
/// and the duration in seconds.
fn histories() -> impl Strategy<Value = Vec<(Vec<bool>, bool, u32)>> {
    let alive = prop::collection::vec(any::<bool>(), BACKENDS);
    prop::collection::vec((alive, any::<bool>(), 0..40_u32), 1..12)
}

fn host_with_a_lame_duck(probes: bool) -> Host {
    let mut host = Host::new(BACKENDS, None, probes);
    host.lame_ducks = BTreeSet::from([BACKENDS - 1]);
    host.deliver(BACKENDS);
    host.run(5);
    host
}

/// Makes all backends alive. Checks that, within a bounded time, all members are in the first tier,
/// and the lame duck gets no connects.
fn all_return(host: &mut Host, run: impl Fn(&mut Host, u32) -> u32) {
    host.is_alive.fill(true);
    // After this time, each ejection with its jitter is over, and each backend has had a trial.
    run(host, 330 * u32::try_from(BACKENDS).expect("the number is small"));
    host.sent.fill(0);
    assert_eq!(run(host, 10), 0);
    let (members, lame_duck) = host.sent.split_at(BACKENDS - 1);
    assert!(members.iter().all(|sent| *sent > 0) && *lame_duck == [0], "{:?}", host.sent);
}

proptest! {
    #![proptest_config(ProptestConfig { rng_seed: RngSeed::Fixed(1), ..ProptestConfig::with_cases(64) })]

    /// After the daemon has detected which backends do not accept connections, connects avoid these
    /// while another backend may serve. The property must hold after any history, including
    /// restarts of the daemon.
    #[test]
    fn with_a_daemon_connects_avoid_backends_known_to_refuse(history in histories()) {
        let mut host = host_with_a_lame_duck(true);
        for (is_alive, restarts, seconds) in history {
            let serves = is_alive.contains(&true);
            host.is_alive = is_alive;
            if restarts {
                host.restart();
            }
            host.tick();
            let failed = host.run(seconds);
            prop_assert!(failed == 0 || !serves, "{failed} connects failed in {seconds} s: {:?}", host.is_alive);
        }
        all_return(&mut host, Host::run);
        let row = host.balancer.row(0).expect("a list is in use");
        prop_assert_eq!((row.tier, row.available), (Tier::Healthy, (BACKENDS - 1, BACKENDS - 1)));
    }

    /// Without a daemon and without probes, connects to a dying backend fail only until it is
    /// ejected, and in its trials.
    #[test]
    fn without_a_daemon_failures_are_bounded_and_recovered_backends_return(history in histories()) {
        let mut host = host_with_a_lame_duck(false);
        for (is_alive, _, seconds) in history {
            let dead = is_alive[..BACKENDS - 1].iter().filter(|alive| !**alive).count();
            host.is_alive = is_alive;
            // If the programs have ejected all living backends, trials find them one after another.
            // The test sets no bound for the failures until then.
            let serves = (0..BACKENDS - 1).any(|at| host.is_alive[at] && !host.is_ejected(at));
            let failed = host.run_without_daemon(seconds);
            let dead = u32::try_from(dead).expect("the number is small");
            // Five failures eject the backend, and at most one trial fails in each `base` of five
            // seconds, with its jitter.
            let most = dead * (5 + 1 + seconds / 4);
            prop_assert!(failed <= most || !serves || dead == 0, "{failed} connects failed, limit {most}: {:?}", host.is_alive);
        }
        all_return(&mut host, Host::run_without_daemon);
    }
}

#[test]
fn probe_results_survive_restarts() {
    let mut host = Host::new(3, None, true);
    host.service.ejection = None;
    host.is_alive[2] = false;
    host.tick();
    for _ in 0..10 {
        host.restart();
        let index = host.balancer.services().next().map(|(_, index, _)| index).expect("there is a service");
        let standing = |at| host.balancer.standing(Identity { service: index, address: address(at) });
        let are_well = [0, 1, 2].map(|at| standing(at).is_some_and(BackendEvidence::is_taken_over_well));
        assert_eq!(are_well, [true, true, false]);
        assert_eq!(host.connects(RATE), 0);
    }
    assert_eq!(host.run(5), 0);
}

#[test]
fn a_new_endpoint_waits_for_its_first_probe() {
    let mut host = Host::new(3, None, true);
    host.deliver(4);
    host.is_alive[3] = false;
    host.sent.fill(0);
    host.connects(RATE);
    assert_eq!(host.sent[3], 0, "no probe of the backend has ended");
    host.run(5);
    assert_eq!(host.sent[3], 0, "the backend is refusing");
    host.is_alive[3] = true;
    host.run(2);
    assert!(host.sent[3] > 0, "a probe has found the backend healthy");
}

/// On a fresh host, all backends are used equally until the time for their first probes is over.
/// The first backend with a probe result must not get all connects.
#[test]
fn backends_are_used_equally_until_the_first_probes_end() {
    let mut host = Host::new(4, None, true);
    host.balancer = Balancer::new(vec![host.service.clone()], LIMITS, Adopted::default(), host.now)
        .expect("the plan fits");
    host.deliver(4);
    let first = (address(0), (Health::Healthy, Why::Probe));
    host.apply(Fact::Verdicts(0, Who::Probe, [first].into()));
    host.publish();
    host.sent.fill(0);
    host.connects(40);
    assert_eq!(host.sent, [10; 4]);
    // After the time for the first probes, connects choose only proven backends.
    host.now += SECOND;
    host.apply(Fact::Time);
    host.publish();
    host.sent.fill(0);
    host.connects(40);
    assert_eq!(host.sent, [40, 0, 0, 0]);
}
