//! Scripts of a client task on the kernel in memory: lists, cgroups, connects and time, without privileges.
//!
//! Each runs twice: plain, and with a tenth of all operations of the kernel failing, from a fixed seed. Then safety holds at each step
//! (connects go to backends of a list, and counts are exact), and the end is the same once the faults have stopped.

mod ejection;

mod policies;

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use lb_common::abi::BackendState;
use lb_common::ending::Ending;
use lb_core::limits::Limits;
use lb_fake::{Connect, FakeKernel, Flow, Place};
use lb_kernel::{Features, Kernel as _, Pins, SlotView};

use super::{ClientTask, ClientTaskError, Followed};
use crate::assignments::{AssignmentsByService, statics};
use crate::config::Client;
use crate::config::tests::good;
use crate::controller::{Clock, Environment};

const SERVICE: &str = "10.96.0.10:80";
const BACKENDS: [&str; 3] = ["10.0.0.1:80", "10.0.0.2:80", "10.0.0.3:80"];
const CGROUP: &str = "/sys/fs/cgroup/web";
const FAULTS_PER_MILLE: u64 = 100;
const SEED: u64 = 20_261_127;
/// Ticks after which a task has done all that it can: the longest pause after failures is half a minute.
const SETTLED: u32 = 64;

/// Small, so that looking at all of it is cheap.
const LIMITS: Limits = Limits { schedule_entries: 1 << 15, flow_records: 64, slots: 512 };

/// A client task on a kernel.
struct Stage {
    kernel: FakeKernel,
    place: Place,
    task: Option<ClientTask>,
    lines: String,
    now: Instant,
    clock: Clock,
    /// Backends that any list has had.
    listed: BTreeSet<SocketAddr>,
    /// Backends that refuse connects.
    dead: BTreeSet<SocketAddr>,
    /// Connects that were sent to each backend.
    sent: BTreeMap<SocketAddr, u64>,
    open: Vec<Flow>,
}

/// A client task of a kernel in memory, and the time at which it was opened.
pub fn open_in_memory(kernel: &FakeKernel, client: Client, pins: &Path) -> (ClientTask, Instant) {
    let (pins, now) = (Pins::of(pins, &client.name), Instant::now());
    let environment = environment(kernel, Clock::new(now, Duration::from_secs(1)));
    let opened = kernel.client(pins.clone()).expect("no fault");
    let task = ClientTask::open(client, pins, opened, LIMITS, &environment, now);
    (task.unwrap_or_else(|error| panic!("{error}")), now)
}

/// A host with this kernel.
pub fn environment(kernel: &FakeKernel, clock: Clock) -> Environment {
    Environment {
        kernel: Arc::new(kernel.clone()),
        features: Features { socket_errors: true, outcomes_at_release: true, ..Features::default() },
        clock,
        host: "host".to_owned(),
        pid: 1,
        descriptors: u64::MAX,
        namespace_warning: None,
        jitter: 0,
        threads: 1,
        stopping: Arc::default(),
    }
}

fn address(text: &str) -> SocketAddr {
    text.parse().expect("an address")
}

/// Runs a script plain, and with faults.
#[expect(clippy::print_stdout, reason = "it is shown if the script fails")]
fn script(lines: &str, act: impl Fn(&mut Stage)) {
    for per_mille in [0, FAULTS_PER_MILLE] {
        let mut stage = Stage::new(lines);
        if per_mille != 0 {
            stage.kernel.faults().fail_some(per_mille, SEED);
        }
        stage.start(&BACKENDS);
        println!("{per_mille} of 1,000 operations fail, seed {SEED}");
        act(&mut stage);
        stage.check();
        if per_mille != 0 {
            assert!(stage.kernel.faults().failed() > 0, "the script met faults");
        }
    }
}

impl Stage {
    fn new(lines: &str) -> Self {
        let kernel = FakeKernel::new().expect("memory");
        let now = Instant::now();
        Self {
            place: kernel.make_cgroup(&PathBuf::from(CGROUP)),
            task: None,
            lines: lines.to_owned(),
            now,
            clock: Clock::new(now, Duration::from_secs(1)),
            listed: BTreeSet::new(),
            dead: BTreeSet::new(),
            sent: BTreeMap::new(),
            open: Vec::new(),
            kernel,
        }
    }

    fn config(&self, backends: &[&str]) -> crate::config::Config {
        let list: Vec<String> = backends.iter().map(|backend| format!("\"{backend}\"")).collect();
        good(&format!(
            "[[client]]\njob = \"web\"\ncgroup = \"web\"\n[[service]]\nname = \"users\"\naddress = \"{SERVICE}\"\n\
             backends = {{ static = [{}] }}\n{}\n",
            list.join(", "),
            self.lines
        ))
    }

    /// A daemon starts, after any before has died.
    fn start(&mut self, backends: &[&str]) {
        let mut config = self.config(backends);
        self.task = None;
        let pins = Pins::of(&PathBuf::from("/sys/fs/bpf"), "web");
        let environment = environment(&self.kernel, self.clock);
        // Bound: the chance that so many attempts fail is nil.
        for _ in 0..100 {
            let client = config.clients.remove(0);
            let opened = self.kernel.client(pins.clone()).map_err(ClientTaskError::from).and_then(|kernel| {
                ClientTask::open(client, pins.clone(), kernel, LIMITS, &environment, self.now)
            });
            if let Ok(task) = opened {
                self.task = Some(task);
                break;
            }
            config = self.config(backends);
        }
        self.list(backends);
        self.settle();
    }

    /// The service has other lines, and the daemon follows.
    fn configure(&mut self, lines: &str, backends: &[&str]) {
        lines.clone_into(&mut self.lines);
        // Bound: as in `start`.
        for _ in 0..100 {
            let client = self.config(backends).clients.remove(0);
            let now = self.now;
            if self.task().reconfigure(client, now).is_ok() {
                break;
            }
        }
        self.list(backends);
        self.settle();
    }

    fn task(&mut self) -> &mut ClientTask {
        self.task.as_mut().expect("a daemon runs")
    }

    /// The list is another one.
    fn list(&mut self, backends: &[&str]) {
        let config = self.config(backends);
        self.listed.extend(backends.iter().map(|backend| address(backend)));
        let lists = statics(&config.clients, &AssignmentsByService::new());
        let now = self.now;
        self.task().deliver_static(&lists, now).expect("it fits");
    }

    /// A second passes, and the daemon does with the client what it does every second.
    fn tick(&mut self) {
        self.pass(Duration::from_secs(1));
        let now = self.now;
        let Some(task) = &mut self.task else { return };
        // What fails is tried again.
        let _ = task.sample(now);
        let _ = task.settle(now);
        if task.cgroup().is_some() || !task.has_failed() {
            let _ = task.follow_cgroup(now);
        }
        let _ = task.leave_other_cgroups(now);
        if task.wants_wait() {
            task.before_wait();
            task.after_wait();
        }
        if task.free_idle(now) {
            let _ = task.settle(now);
        }
        task.try_returned(now);
        task.weigh_errors(now);
        self.check();
    }

    /// Time passes without a daemon.
    fn pass(&mut self, time: Duration) {
        self.kernel.pass(time);
        self.now += time;
    }

    /// The faults stop, and the daemon does what is left to do.
    fn settle(&mut self) {
        for _ in 0..SETTLED {
            self.tick();
            if self.task.as_ref().is_none_or(|task| task.is_settled() && task.cgroup().is_some()) {
                return;
            }
        }
        panic!("it does not settle: {:?}", self.task().trouble());
    }

    /// No operation fails any more.
    fn stop_faults(&mut self) {
        self.kernel.faults().stop();
        for _ in 0..SETTLED {
            self.tick();
        }
    }

    /// Begins a connection: its SYN leaves.
    fn begin(&mut self) -> Result<Flow, u16> {
        match self.kernel.connect(self.place, 1, address(SERVICE)) {
            Connect::Unchanged => Err(0),
            Connect::Refused(errno) => Err(errno),
            Connect::Sent(flow) => {
                assert!(self.listed.contains(&flow.backend), "{} is in no list", flow.backend);
                *self.sent.entry(flow.backend).or_default() += 1;
                self.kernel.send_syn(&flow);
                Ok(flow)
            }
        }
    }

    /// Opens a connection; what is dead refuses it.
    fn connect(&mut self) -> Result<SocketAddr, u16> {
        let mut flow = self.begin()?;
        if self.dead.contains(&flow.backend) {
            self.kernel.end(flow, Ending::Refused, 0, 0);
            return Err(111);
        }
        self.kernel.establish(&mut flow);
        self.open.push(flow);
        Ok(flow.backend)
    }

    /// Opens so many, ends each at once, and says how many failed.
    fn dial(&mut self, count: u32) -> u32 {
        let mut failed = 0;
        for _ in 0..count {
            match self.connect() {
                Ok(_) => self.close_all(),
                Err(_) => failed += 1,
            }
        }
        failed
    }

    fn close_all(&mut self) {
        for flow in std::mem::take(&mut self.open) {
            self.kernel.end(flow, Ending::Closed, 100, 100);
        }
    }

    /// The maps hold no backend that the daemon does not know. Counts are exact: as many flows were sent to each backend as the test
    /// has counted, and as many are open.
    fn check(&mut self) {
        let Some(task) = &self.task else { return };
        let tables = task.datapath().tables();
        for slot in tables.slots() {
            let known = task.datapath().applied().backends.get(&slot.at.slot).map(|backend| backend.address);
            assert_eq!(known, Some(slot.address), "{:?}", slot.at);
            let open = self.open.iter().filter(|flow| flow.backend == slot.address).count() as u64;
            assert_eq!(tables.active(slot.at.slot), open, "{}", slot.address);
            // A look-up may fail now.
            if let Ok(counts) = tables.counts(slot.at.slot) {
                assert_eq!(
                    counts.sums.chosen,
                    self.sent.get(&slot.address).copied().unwrap_or(0),
                    "{}",
                    slot.address
                );
            }
        }
    }

    /// The slot of a backend.
    fn slot(&self, backend: SocketAddr) -> SlotView {
        let tables = self.task.as_ref().expect("a daemon runs").datapath().tables();
        tables.slots().into_iter().find(|slot| slot.address == backend).expect("it has a slot")
    }

    /// The state of each backend that has a slot.
    fn states(&self) -> BTreeMap<SocketAddr, (BackendState, bool)> {
        let tables = self.task.as_ref().expect("a daemon runs").datapath().tables();
        tables.slots().into_iter().map(|slot| (slot.address, (slot.state, slot.is_ejected))).collect()
    }
}

const FOR_LONG: &str = "ejection = { base = \"1h\", max = \"1h\" }";
const BRIEFLY: &str = "ejection = { base = \"1s\", max = \"2s\" }\nslow_start = \"off\"";

#[test]
fn connects_are_spread_over_the_backends_of_the_list() {
    script("", |stage| {
        assert_eq!(stage.dial(300), 0);
        // 64 entries cannot be even.
        assert!(
            stage.sent.len() == 3 && stage.sent.values().all(|sent| (98..=102).contains(sent)),
            "{:?}",
            stage.sent
        );
    });
}

#[test]
fn a_dead_backend_costs_five_connects_with_and_without_a_daemon() {
    for has_daemon in [true, false] {
        script(FOR_LONG, |stage| {
            if !has_daemon {
                stage.task = None;
            }
            stage.dead.insert(address(BACKENDS[0]));
            assert_eq!(stage.dial(300), 5);
            stage.tick();
            assert_eq!(stage.dial(300), 0);
        });
    }
}

#[test]
fn an_ejected_backend_comes_back_by_a_trial() {
    script(BRIEFLY, |stage| {
        stage.dead.insert(address(BACKENDS[0]));
        assert_eq!(stage.dial(60), 5);
        assert_eq!(stage.states()[&address(BACKENDS[0])], (BackendState::Member, true));
        // Each trial fails until it is well.
        stage.pass(Duration::from_secs(3));
        assert_eq!(stage.dial(60), 1);
        stage.dead.clear();
        stage.pass(Duration::from_secs(3));
        assert_eq!(stage.dial(60), 0);
        assert_eq!(stage.states()[&address(BACKENDS[0])], (BackendState::Member, false));
    });
}

#[test]
fn ejections_survive_a_daemon_that_starts() {
    script(FOR_LONG, |stage| {
        stage.dead.insert(address(BACKENDS[0]));
        assert_eq!(stage.dial(60), 5);
        for _ in 0..3 {
            stage.start(&BACKENDS);
            assert_eq!(stage.dial(60), 0);
            assert!(stage.states()[&address(BACKENDS[0])].1);
        }
    });
}

#[test]
fn a_removed_backend_keeps_its_slot_until_its_last_flow_ends_and_goes_on_counting_when_it_returns() {
    script("", |stage| {
        for _ in 0..3 {
            stage.connect().expect("all are well");
        }
        stage.list(&BACKENDS[1..]);
        stage.stop_faults();
        assert_eq!(stage.states()[&address(BACKENDS[0])].0, BackendState::Leaving);
        assert_eq!(stage.dial(60), 0);
        assert_eq!(stage.sent[&address(BACKENDS[0])], 1, "no new one goes there");
        stage.close_all();
        stage.stop_faults();
        assert_eq!(stage.states().len(), 2);
        stage.kernel.faults().fail_some(FAULTS_PER_MILLE, SEED);
        stage.list(&BACKENDS);
        stage.settle();
        assert_eq!(stage.dial(30), 0);
        stage.stop_faults();
        // `check` compares its count with all that was ever sent there.
        assert_eq!(stage.states()[&address(BACKENDS[0])].0, BackendState::Member);
        assert_eq!(stage.sent[&address(BACKENDS[0])], 11);
    });
}

#[test]
fn lists_that_change_without_pause_lose_no_count_and_no_slot() {
    const SEVEN: [&str; 7] = [
        "10.0.0.1:80",
        "10.0.0.2:80",
        "10.0.0.3:80",
        "10.0.0.4:80",
        "10.0.0.5:80",
        "10.0.0.6:80",
        "10.0.0.7:80",
    ];
    script("", |stage| {
        for turn in 0..60 {
            let (from, to) = (turn % 4, 4 + turn % 3);
            stage.list(&SEVEN[from..=to]);
            stage.tick();
            stage.dial(7);
        }
        stage.list(&SEVEN);
        stage.stop_faults();
        assert_eq!(stage.states().len(), 7);
        let before = stage.sent.clone();
        assert_eq!(stage.dial(70), 0);
        let new = stage.sent.iter().map(|(backend, sent)| sent - before.get(backend).copied().unwrap_or(0));
        assert!(new.eq([10; 7]), "{:?}", stage.sent);
    });
}

#[test]
fn a_cgroup_that_is_made_anew_is_followed_and_the_old_one_until_its_flows_end() {
    script("", |stage| {
        stage.connect().expect("all are well");
        let old = stage.place;
        stage.kernel.remove_cgroup(&PathBuf::from(CGROUP));
        stage.place = stage.kernel.make_cgroup(&PathBuf::from(CGROUP));
        assert_eq!(stage.connect(), Err(0), "no program is there yet");
        stage.task().cgroup_changed();
        stage.settle();
        stage.stop_faults();
        assert_eq!(stage.dial(3), 0);
        let new = stage.place;
        assert!(stage.task().cgroup().is_some_and(|cgroup| Place(cgroup.id) == new));
        let kernel = |stage: &Stage| {
            let kernel = stage.task.as_ref().expect("a daemon runs").datapath().kernel();
            (kernel.begins_at().expect("no fault"), kernel.has_old_links(new.0).expect("no fault"))
        };
        assert_eq!(kernel(stage), (vec![new.0], true), "in the old one no flow begins, and one still ends");
        stage.close_all();
        stage.stop_faults();
        assert_eq!(kernel(stage), (vec![new.0], false));
        assert_eq!(stage.kernel.connect(old, 1, address(SERVICE)), Connect::Unchanged);
    });
}

#[test]
fn a_client_that_an_operator_has_removed_stays_gone() {
    script("", |stage| {
        let pins = stage.task().pins.clone();
        stage.kernel.faults().stop();
        stage.kernel.detach(&pins).expect("no fault");
        assert_eq!(stage.connect(), Err(0));
        stage.kernel.faults().stop();
        stage.task().cgroup_changed();
        stage.pass(Duration::from_secs(60));
        let now = stage.now;
        assert!(matches!(stage.task().follow_cgroup(now), Ok(Followed::Unpinned)));
        for _ in 0..3 {
            stage.pass(Duration::from_secs(11));
            let now = stage.now;
            assert!(matches!(stage.task().follow_cgroup(now), Ok(Followed::Unchanged)));
        }
        assert_eq!(stage.connect(), Err(0));
        stage.task = None;
        // The next daemon that starts makes it again.
        stage.sent.clear();
        stage.open.clear();
        stage.start(&BACKENDS);
        assert_eq!(stage.dial(3), 0);
        stage.kernel.faults().fail_after(0);
        assert!(stage.task().is_effective().is_err());
    });
}

impl Stage {
    /// Two backends hold so many connections each, and a third is new and refuses. Lets `each_second` act, and dials so often a second.
    /// Returns how many connects failed.
    fn fail_beside(
        &mut self,
        held: usize,
        seconds: u32,
        rate: u32,
        each_second: impl Fn(&mut Self, u32),
    ) -> u32 {
        self.list(&BACKENDS[1..]);
        self.settle();
        while self.open.len() < 2 * held {
            self.connect().expect("both are well");
        }
        self.tick();
        self.dead.insert(address(BACKENDS[0]));
        self.list(&BACKENDS);
        self.settle();
        self.dial_each_second(seconds, rate, each_second)
    }

    /// Dials so often a second, while what is open stays so.
    fn dial_each_second(&mut self, seconds: u32, rate: u32, each_second: impl Fn(&mut Self, u32)) -> u32 {
        let mut failed = 0;
        for second in 0..seconds {
            self.tick();
            each_second(self, second);
            let held = std::mem::take(&mut self.open);
            failed += self.dial(rate);
            self.open = held;
        }
        failed
    }
}

#[test]
fn a_backend_that_fails_gets_at_most_its_share_whatever_others_hold() {
    for policy in ["p2c", "least-loaded"] {
        for (held, rate) in [(0, 5), (20, 1), (100, 5), (100, 40)] {
            let lines = format!("policy = \"{policy}\"\nejection = \"off\"\nerror_decay = \"5s\"");
            script(&lines, |stage| {
                let failed = stage.fail_beside(held, 40, rate, |_, _| {});
                let share = 40 * rate / 3;
                assert!(
                    (1..=share).contains(&failed),
                    "{policy}, {held} held, {rate}/s: {failed}, share {share}"
                );
            });
        }
    }
}

/// Each of the others loses a connection now and then, as every backend does.
#[test]
fn single_errors_of_others_give_it_no_more() {
    for policy in ["p2c", "least-loaded"] {
        for every in [2, 4, 20] {
            let lines = format!("policy = \"{policy}\"\nejection = \"off\"\nerror_decay = \"5s\"");
            script(&lines, |stage| {
                let failed = stage.fail_beside(100, 40, 5, |stage, second| {
                    if second % every == 0 {
                        for backend in &BACKENDS[1..] {
                            let at = stage.open.iter().position(|flow| flow.backend == address(backend));
                            let flow = stage.open.swap_remove(at.expect("it holds some"));
                            stage.kernel.end(flow, Ending::Reset, 100, 100);
                        }
                    }
                });
                assert!((1..=66).contains(&failed), "{policy}, each {every} s: {failed} of 200");
            });
        }
    }
}

#[test]
fn a_backend_that_is_well_again_has_connects_soon_also_if_others_hold_none_any_more() {
    for policy in ["p2c", "least-loaded"] {
        for (rate, seconds) in [(20, 15), (1, 40)] {
            let lines = format!("policy = \"{policy}\"\nejection = \"off\"\nerror_decay = \"5s\"");
            script(&lines, |stage| {
                stage.fail_beside(100, 20, 20, |_, _| {});
                stage.dead.clear();
                stage.close_all();
                let before = stage.sent[&address(BACKENDS[0])];
                stage.dial_each_second(seconds, rate, |_, _| {});
                let got = stage.sent[&address(BACKENDS[0])] - before;
                assert!(got > 0, "{policy}, {rate}/s: nothing in {seconds} s");
            });
        }
    }
}

/// Each operation in turn fails once: in the end all is as without that, and the next daemon finds maps that it can adopt.
#[test]
fn one_operation_that_fails_anywhere_changes_nothing_in_the_end() {
    let run = |fails: Option<u64>| {
        let mut stage = Stage::new("");
        if let Some(others) = fails {
            stage.kernel.faults().fail_after(others);
        }
        stage.start(&BACKENDS);
        stage.dial(9);
        stage.connect().expect("all are well");
        for list in [&BACKENDS[1..], &BACKENDS[..1], &BACKENDS[..2]] {
            stage.list(list);
            stage.tick();
            stage.dial(4);
        }
        stage.close_all();
        stage.list(&BACKENDS);
        let steps = stage.kernel.faults().steps();
        stage.stop_faults();
        assert_eq!(stage.dial(9), 0);
        stage.start(&BACKENDS);
        assert_eq!(stage.dial(9), 0);
        (steps, stage.states())
    };
    let (steps, expected) = run(None);
    assert!(steps > 40, "{steps}");
    for step in 0..steps {
        assert_eq!(run(Some(step)).1, expected, "operation {step} of {steps} failed");
    }
}
