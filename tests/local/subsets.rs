//! Subsets of the tasks of one job on the real kernel: each task's share by its table, and the sum
//! over all tasks.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use lb_view::explanation::{Explanation, SubsetMember};
use stage::fixture::SERVICE;
use stage::{Backend, Cgroup, Daemon, Probe, Setup, Stage};

/// Smaller limits than the defaults, so that several clients take little memory.
const LIMITS: &str = "[limits]\nschedule_entries = 32768\nslots = 1024\nflow_records = 1024\n";

/// Tasks of one job on one host, each in a cgroup of its own, that dial one service.
struct Job {
    // Fields are dropped in this order: users before the things that they use.
    _daemon: Daemon,
    backends: Vec<Backend>,
    setup: Setup,
    cgroups: Vec<Cgroup>,
    _stage: Stage,
}

impl Job {
    /// `tasks` tasks and `backends` backends, `b0` upwards by index.
    fn new(tasks: usize, backends: usize, subset: &str) -> Self {
        let stage = Stage::new();
        let setup = Setup::new(&stage, "a");
        let cgroups: Vec<Cgroup> = (0..tasks).map(|_| Cgroup::new()).collect();
        let backends: Vec<Backend> =
            (0..backends).map(|n| Backend::start(&format!("b{n}"), &format!("127.0.0.1:80{n:02}"))).collect();
        let mut text = String::new();
        for (index, cgroup) in cgroups.iter().enumerate() {
            let _ = write!(
                text,
                "[[client]]\njob = \"web\"\nname = \"task-{index}\"\nindex = {index}\ncount = {tasks}\ncgroup = \
                 \"{}\"\n\n",
                cgroup.relative().display()
            );
        }
        text.push_str(&service("users", SERVICE, subset, "{ file = \"users.toml\" }"));
        text.push_str(LIMITS);
        setup.write("users.toml", &listed(&backends));
        let daemon = Daemon::start(&setup, &text);
        Self { _daemon: daemon, backends, setup, cgroups, _stage: stage }
    }

    fn probe(&self, task: usize) -> Probe {
        let mut probe = Probe::start(&self.cgroups[task]);
        probe.pin(0);
        probe
    }

    /// The members of a task by the names of their backends, as `explain` shows them.
    fn members(&self, task: usize) -> BTreeMap<String, SubsetMember> {
        let client = format!("task-{task}");
        let explanation = explain(&self.setup, &["--client", &client, "users"]);
        let name = |member: &SubsetMember| {
            let backend = self.backends.iter().find(|backend| member.address == backend.address());
            backend.expect("a backend of the test").name().to_owned()
        };
        explanation.members.into_iter().map(|member| (name(&member), member)).collect()
    }

    /// For each backend: entries in the tables of all tasks, and how many tasks use it.
    fn entries(&self) -> BTreeMap<String, (u32, u32)> {
        let mut sum: BTreeMap<String, (u32, u32)> = BTreeMap::new();
        for task in 0..self.cgroups.len() {
            for (name, member) in self.members(task) {
                let (entries, tasks) = sum.entry(name).or_default();
                *entries += member.entries;
                *tasks += 1;
            }
        }
        sum
    }
}

/// An endpoint file of backends, with indexes in their order.
fn listed<'b>(backends: impl IntoIterator<Item = &'b Backend>) -> String {
    let entry = |backend: &Backend| {
        let index = &backend.name()[1..];
        format!("[[endpoint]]\naddress = \"{}\"\nindex = {index}\n", backend.address())
    };
    backends.into_iter().map(entry).collect()
}

fn service(name: &str, address: &str, subset: &str, backends: &str) -> String {
    format!(
        "[[service]]\nname = \"{name}\"\naddress = \"{address}\"\nsubset = {subset}\nbackends = {backends}\n\n"
    )
}

/// The first explanation that `explain` prints.
#[track_caller]
fn explain(setup: &Setup, arguments: &[&str]) -> Explanation {
    let explanations: Vec<Explanation> = setup.document(&[&["explain"], arguments].concat());
    explanations.into_iter().next().expect("an explanation")
}

/// 15 connections cannot be spread evenly over 7 backends: one backend has three. If only whole
/// connections counted, that backend would get half as much again as a backend with two.
#[test]
fn five_tasks_together_load_seven_backends_evenly() {
    const VIP_TABLE: u32 = 128;
    let job = Job::new(5, 7, "{ size = 3 }");
    let entries = job.entries();
    assert_eq!(entries.len(), 7, "every backend has a task");
    let tasks: Vec<u32> = entries.values().map(|(_, tasks)| *tasks).collect();
    assert_eq!((tasks.iter().sum::<u32>(), tasks.iter().any(|one| *one != tasks[0])), (15, true));
    for (name, &(entries, tasks)) in &entries {
        // Before rounding, loads are within 5e-4 of their target. Each table rounds by less than an
        // entry.
        let even = 5.0 * 1024.0 / 7.0;
        let off = (f64::from(entries) - even).abs();
        assert!(
            off < f64::from(tasks) + even * 5e-4,
            "{name}: {entries} entries of {tasks} tasks, even is {even}"
        );
    }
    let mut had: BTreeMap<String, u32> = BTreeMap::new();
    for task in 0..5 {
        let members = job.members(task);
        assert_eq!(members.len(), 3);
        for member in members.values() {
            assert!((member.load - 1.0).abs() < 5e-4, "{member:?}");
        }
        for (name, count) in job.probe(task).dial_many(SERVICE, VIP_TABLE) {
            assert!(members.contains_key(&name), "{name} is no member of task {task}");
            *had.entry(name).or_default() += count;
        }
        // The wanted share in status is the table's.
        for backend in job.setup.backends(&format!("task-{task}"), "users") {
            let mut members = members.values();
            let member = members.find(|member| member.address == backend.address).expect("a member");
            let wanted = f64::from(member.entries) / 1024.0;
            assert_eq!(backend.share_wanted, wanted, "{backend:?}");
        }
        let skew =
            job.setup.status().clients[task].services[0].skew.expect("more than ten connects per backend");
        // At most two connects more than the share, and a share is at least a sixth of all dialled
        // connects.
        assert!((1.0..1.0 + 2.0 / (f64::from(VIP_TABLE) / 6.0)).contains(&skew), "{skew}");
    }
    for (name, (_, tasks)) in entries {
        // A run of entries contains each member's share of the run, give or take two entries.
        let (had, even) = (f64::from(had[&name]), f64::from(5 * VIP_TABLE) / 7.0);
        assert!(
            (had - even).abs() < f64::from(2 * tasks),
            "{name} had {had} connects of {tasks} tasks, even is {even}"
        );
    }
}
