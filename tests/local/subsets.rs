//! Subsets of the tasks of one job on the real kernel: what each gets by its table, and what all of them get together.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::net::SocketAddr;

use lb_view::explanation::{Explanation, Inputs, OrderedEndpoint, ShareSource, SubsetMember};
use stage::fixture::{Fixture, SERVICE, config, endpoints};
use stage::{Backend, Cgroup, Daemon, Probe, Setup, Stage, address, eventually};

/// Smaller than the default, so that several clients take little memory.
const LIMITS: &str = "[limits]\nschedule_entries = 32768\nslots = 1024\nflow_records = 1024\n";

/// Tasks of one job on one host, each in a cgroup of its own, that dial one service.
struct Job {
    // Dropped in this order: whoever uses something goes first.
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

    /// Of each backend: entries in the tables of all tasks, and how many tasks use it.
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

/// The first explanation.
#[track_caller]
fn explain(setup: &Setup, arguments: &[&str]) -> Explanation {
    let explanations: Vec<Explanation> = setup.document(&[&["explain"], arguments].concat());
    explanations.into_iter().next().expect("an explanation")
}

/// 15 connections cannot be spread over 7 backends: one has three, or as many as two have, and with whole connections
/// would get half as much again as another.
#[test]
fn five_tasks_together_load_seven_backends_evenly() {
    const VIP_TABLE: u32 = 128;
    let job = Job::new(5, 7, "{ size = 3 }");
    let entries = job.entries();
    assert_eq!(entries.len(), 7, "every backend has a task");
    let tasks: Vec<u32> = entries.values().map(|(_, tasks)| *tasks).collect();
    assert_eq!((tasks.iter().sum::<u32>(), tasks.iter().any(|one| *one != tasks[0])), (15, true));
    for (name, &(entries, tasks)) in &entries {
        // Each table rounds by less than an entry, and loads are within 5e-4 of their target before.
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
        // What status calls wanted is the table's.
        for backend in job.setup.backends(&format!("task-{task}"), "users") {
            let mut members = members.values();
            let member = members.find(|member| member.address == backend.address).expect("a member");
            let wanted = f64::from(member.entries) / 1024.0;
            assert_eq!(backend.share_wanted, wanted, "{backend:?}");
        }
        let skew =
            job.setup.status().clients[task].services[0].skew.expect("more than ten connects per backend");
        // Two entries more than its part, of at least a sixth of what was dialled.
        assert!((1.0..1.0 + 2.0 / (f64::from(VIP_TABLE) / 6.0)).contains(&skew), "{skew}");
    }
    for (name, (_, tasks)) in entries {
        // A run of entries holds of every member its part of it, give or take two entries.
        let (had, even) = (f64::from(had[&name]), f64::from(5 * VIP_TABLE) / 7.0);
        assert!(
            (had - even).abs() < f64::from(2 * tasks),
            "{name} had {had} connects of {tasks} tasks, even is {even}"
        );
    }
}

/// Of 7 backends each of 5 tasks takes an arc of three fifths: 4 1/5 backends.
#[test]
fn the_edges_of_an_arc_show_in_the_shares() {
    let job = Job::new(5, 7, "{ algorithm = \"aperture\", size = 3 }");
    let shares: BTreeMap<String, u32> =
        job.members(0).into_iter().map(|(name, member)| (name, member.entries)).collect();
    // 5, 5, 5, 5 and 1 of 21 in 1,024 whole entries.
    let expected = [("b0", 244), ("b1", 244), ("b2", 244), ("b3", 244), ("b4", 48)];
    let expected: BTreeMap<String, u32> = expected.map(|(name, count)| (name.to_owned(), count)).into();
    assert_eq!(shares, expected);
    assert_eq!(job.probe(0).dial_many(SERVICE, 1024), expected);
    for (name, (entries, tasks)) in job.entries() {
        // Arcs are exactly even; tables round by less than an entry each.
        let even = 5.0 * 1024.0 / 7.0;
        assert!((f64::from(entries) - even).abs() < f64::from(tasks), "{name}: {entries} entries");
    }
}

const ALGORITHMS: [&str; 14] = [
    "random",
    "rendezvous",
    "round-robin",
    "deterministic-book",
    "deterministic",
    "consistent",
    "ring",
    "ringsteady",
    "ringsteady-scaled",
    "ringsteady-both-scaled",
    "rocksteadier",
    "rocksteadier-scaled",
    "aperture",
    "aperture-shuffled",
];

#[test]
fn every_algorithm_sends_to_the_members_that_explain_shows() {
    let stage = Stage::new();
    let setup = Setup::new(&stage, "a");
    let cgroup = Cgroup::new();
    let backends: Vec<Backend> =
        (0..8).map(|n| Backend::start(&format!("b{n}"), &format!("127.0.0.1:80{n:02}"))).collect();
    setup.write("all.toml", &listed(&backends));
    let mut text = format!(
        "[[client]]\njob = \"web\"\nindex = 1\ncount = 4\ncgroup = \"{}\"\n\n",
        cgroup.relative().display()
    );
    for (number, algorithm) in ALGORITHMS.iter().enumerate() {
        let subset = format!("{{ algorithm = \"{algorithm}\", size = 3 }}");
        text.push_str(&service(
            algorithm,
            &format!("10.96.1.{number}:80"),
            &subset,
            "{ file = \"all.toml\" }",
        ));
    }
    let _daemon = Daemon::start(&setup, &(text + LIMITS));
    let mut probe = Probe::start(&cgroup);
    for (number, algorithm) in ALGORITHMS.iter().enumerate() {
        let explanation = explain(&setup, &[algorithm]);
        assert_eq!(explanation.inputs.algorithm, *algorithm);
        let members = explanation.members;
        let of = |wanted: &dyn Fn(&SubsetMember) -> bool| -> BTreeSet<String> {
            let members = members.iter().filter(|member| wanted(member));
            members.map(|member| format!("b{}", member.index)).collect()
        };
        let least = if algorithm.starts_with("aperture") { members.len().max(3) } else { 3 };
        assert_eq!(members.len(), least, "{algorithm}");
        let had: BTreeSet<String> =
            probe.dial_many(&format!("10.96.1.{number}:80"), 64).into_keys().collect();
        assert!(had.is_subset(&of(&|_| true)), "{algorithm}: {had:?}");
        // A backend with one entry of twenty comes at least twice in 64.
        let large = of(&|member| member.share >= 0.05);
        assert!(large.is_subset(&had), "{algorithm}: {had:?}, not all of {large:?}");
    }
}

#[test]
fn a_lost_backend_is_replaced_by_the_next_of_the_order_and_open_flows_stay() {
    let job = Job::new(5, 7, "{ size = 3 }");
    let task = 2;
    let order = {
        // The whole order, from a configuration that no daemon runs: the same subset, but longer.
        let other = Setup { folder: job.setup.folder.join("other"), ..job.setup.clone() };
        std::fs::create_dir(&other.folder).expect("a folder");
        let text = std::fs::read_to_string(job.setup.folder.join("socklb.toml")).expect("read");
        let path = other.write("socklb.toml", &text.replace("size = 3", "size = 7"));
        other.write("users.toml", &listed(&job.backends));
        let client = format!("task-{task}");
        let path = path.to_str().expect("UTF-8");
        let explanation = explain(&other, &["--config", path, "--client", &client, "users"]);
        explanation.members.iter().map(|member| format!("b{}", member.index)).collect::<Vec<_>>()
    };
    let before: BTreeSet<String> = job.members(task).into_keys().collect();
    assert_eq!(before, order[..3].iter().cloned().collect());
    let mut probe = job.probe(task);
    let open: Vec<_> = (0..12).map(|_| probe.dial(SERVICE)).collect();
    let lost = &order[1];
    assert!(open.iter().any(|dialled| dialled.name == *lost));
    let left = job.backends.iter().filter(|backend| backend.name() != lost);
    stage::replace(&job.setup.folder.join("users.toml"), &listed(left));
    let wanted: BTreeSet<String> = [&order[0], &order[2], &order[3]].map(Clone::clone).into();
    let members = || job.members(task).into_keys().collect::<BTreeSet<_>>();
    eventually("one member is replaced", members, |members| *members == wanted);
    let explanation = explain(&job.setup, &["--client", &format!("task-{task}"), "users"]);
    let looked = |looked: &OrderedEndpoint| (format!("b{}", looked.index), looked.verdict == "member");
    let looked_at: Vec<_> = explanation.order.iter().map(looked).collect();
    let expected: Vec<_> = [0, 2, 3].map(|at| (order[at].clone(), true)).into();
    assert_eq!(looked_at, expected, "who has left is passed over");
    let had: BTreeSet<String> = probe.dial_many(SERVICE, 64).into_keys().collect();
    assert_eq!(had, wanted);
    for dialled in &open {
        assert_eq!(probe.peer(dialled.socket), address(SERVICE));
    }
    // Open flows are counted where they are.
    job.setup.active_becomes(12);
}

/// With nothing said of a subset it is `rocksteadier` with size `auto`, and more than the largest fixed size.
#[test]
fn a_task_that_is_alone_uses_three_hundred_backends() {
    let mut fixture = Fixture::without_daemon();
    fixture.backends.clear();
    // Every address of loopback reaches this one.
    let _everywhere = Backend::start("everywhere", "0.0.0.0:8001");
    let addresses: Vec<String> =
        (0..300).map(|n| format!("127.0.{}.{}:8001", n / 200 + 1, n % 200 + 1)).collect();
    let list: Vec<(&str, &str)> = addresses.iter().map(|address| (address.as_str(), "")).collect();
    fixture.setup.write("users.toml", &endpoints(&list));
    fixture.start();
    let inputs = explain(&fixture.setup, &["users"]).inputs;
    let auto = inputs.auto.expect("the size is auto");
    let found = (inputs.algorithm.as_str(), inputs.size, auto.min, inputs.shares);
    assert_eq!(found, ("rocksteadier", Some(300), 12, ShareSource::Weights));
    assert!(auto.why.contains("alone"), "{auto:?}");
    // A table of 16,384 entries: the first 300 from where a cursor starts name each backend once.
    assert_eq!(fixture.probe().dial_many(SERVICE, 300), [("everywhere".to_owned(), 300)].into());
    let backends = fixture.setup.backends("web", "users");
    let once = backends.iter().filter(|backend| backend.started == 1).count();
    assert_eq!((backends.len(), once), (300, 300));
}

#[test]
fn a_list_that_needs_too_many_entries_is_refused_with_both_numbers() {
    let mut fixture = Fixture::without_daemon();
    let text = std::fs::read_to_string(fixture.setup.folder.join("socklb.toml")).expect("read");
    fixture.setup.write("socklb.toml", &(text + "[limits]\nschedule_entries = 1024\n"));
    fixture.start();
    let good = std::fs::read_to_string(&fixture.file).expect("read");
    let addresses: Vec<String> = (1..=33).map(|n| format!("127.0.1.{n}:8001")).collect();
    let long: Vec<(&str, &str)> = addresses.iter().map(|address| (address.as_str(), "")).collect();
    fixture.write_endpoints(&long);
    let both = "would have 2048 entries, limits.schedule_entries allows 1024";
    let error = || fixture.setup.source().error;
    eventually("it is refused", error, |error| error.as_ref().is_some_and(|error| error.contains(both)));
    let names = |counts: BTreeMap<String, u32>| counts.into_keys().collect::<Vec<_>>();
    assert_eq!(names(fixture.probe().dial_many(SERVICE, 30)), ["b1", "b2", "b3"], "the old one is in force");
    let path = fixture.setup.folder.join("socklb.toml");
    let (code, said) = stage::daemon::failure(&fixture.setup.run(&["check", path.to_str().expect("UTF-8")]));
    assert!(code == Some(1) && said.contains(both), "{said}");
    // Back to what is in force: nothing is wrong any more.
    stage::replace(&fixture.file, &good);
    eventually("it is good again", error, Option::is_none);
}

#[test]
fn a_size_that_only_a_computation_tells_is_refused_with_both_numbers() {
    let fixture = Fixture::without_daemon();
    let setup = &fixture.setup;
    let static_list = |count: u32| {
        let list: Vec<String> = (1..=count).map(|n| format!("\"127.0.0.1:{}\"", 8000 + n)).collect();
        format!("{{ static = [{}] }}", list.join(", "))
    };
    let text = |count: u32| {
        let client = format!(
            "[[client]]\njob = \"web\"\nindex = 0\ncount = 2\ncgroup = \"{}\"\n\n",
            fixture.cgroup.relative().display()
        );
        let subset = "{ algorithm = \"random\" }";
        client
            + &service("users", SERVICE, subset, &static_list(count))
            + "[limits]\nschedule_entries = 1024\n"
    };
    let daemon = Daemon::start(setup, &text(3));
    // Two tasks that choose at random leave out some of 60 backends unless both take all.
    stage::replace(&setup.folder.join("socklb.toml"), &text(60));
    let both = "would have 2048 entries, limits.schedule_entries allows 1024";
    let error = || setup.source().error;
    eventually("it is refused", error, |error| error.as_ref().is_some_and(|error| error.contains(both)));
    assert_eq!(fixture.probe().dial_many(SERVICE, 30).len(), 3, "what is in the kernel stays");
    assert_eq!(daemon.stop(), Some(0));
    let path = setup.folder.join("socklb.toml");
    let (code, said) = stage::daemon::failure(&setup.run(&["check", path.to_str().expect("UTF-8")]));
    assert!(code == Some(1) && said.contains(both), "{said}");
}

/// Lists are computed beside the loop: a reload that comes between must not get what was computed for another task.
#[test]
fn a_reload_while_a_list_is_computed_ends_with_both_new() {
    const TASKS: u32 = 400;
    let mut fixture = Fixture::without_daemon();
    let text = |index: u32| {
        let client = format!(
            "[[client]]\njob = \"web\"\nindex = {index}\ncount = {TASKS}\ncgroup = \"{}\"\n\n",
            fixture.cgroup.relative().display()
        );
        let subset = "{ algorithm = \"random\", size = 8 }";
        client + &service("users", SERVICE, subset, "{ file = \"users.toml\" }") + LIMITS
    };
    let endpoints = |count: u32| {
        let addresses: Vec<String> =
            (0..count).map(|n| format!("127.0.{}.{}:8001", n / 200, n % 200 + 1)).collect();
        endpoints(&addresses.iter().map(|address| (address.as_str(), "")).collect::<Vec<_>>())
    };
    let path = fixture.setup.write("socklb.toml", &text(0));
    fixture.setup.write("users.toml", &endpoints(300));
    let nobody = Setup { folder: fixture.setup.folder.join("nobody"), ..fixture.setup.clone() };
    let rounds: Vec<(u32, String)> = (1..=4).map(|round| (round, text(7 * round))).collect();
    fixture.start();
    for (round, text) in rounds {
        let count = 300 + round;
        stage::replace(&fixture.file, &endpoints(count));
        // The file is read at a time of its own; the configuration at once.
        fixture.setup.write("socklb.toml", &text);
        fixture.daemon().signal(rustix::process::Signal::HUP);
        let look = || explain(&fixture.setup, &["users"]).inputs;
        let both = |inputs: &Inputs| inputs.index == 7 * round && inputs.endpoints == count as usize;
        eventually("task and list are the new ones", look, both);
        let members = |explanation: Explanation| -> Vec<(SocketAddr, f64, u32)> {
            let member = |member: SubsetMember| (member.address, member.share, member.connections);
            explanation.members.into_iter().map(member).collect()
        };
        let path = path.to_str().expect("UTF-8");
        let anew = explain(&nobody, &["--config", path, "users"]);
        assert_eq!(members(explain(&fixture.setup, &["users"])), members(anew));
    }
}

#[test]
fn a_subset_grows_and_shrinks_with_its_task_s_open_flows_and_a_new_daemon_goes_on_from_there() {
    let mut fixture = Fixture::without_daemon();
    let lines = "subset = { algorithm = \"random\", size = { low = 0.875, high = 1.125, min = 1 } }";
    fixture.setup.write("socklb.toml", &config(&fixture.cgroup, "{ file = \"users.toml\" }", lines));
    fixture.start();
    let members = |fixture: &Fixture| {
        fixture.setup.service().backends.iter().filter(|backend| backend.share_wanted > 0.0).count()
    };
    assert_eq!(members(&fixture), 1, "the least, of a task without load");
    let mut probe = fixture.probe();
    for _ in 0..8 {
        probe.dial(SERVICE);
    }
    eventually("all are used", || members(&fixture), |members| *members == 3);
    // A killed daemon's successor begins with the size that the tables have.
    fixture.daemon.take().expect("it runs").kill();
    fixture.start();
    assert_eq!(members(&fixture), 3);
    drop(probe);
    let shrinks =
        stage::within(std::time::Duration::from_secs(120), || members(&fixture), |members| *members == 2);
    assert_eq!(shrinks, Ok(2));
    let explained = fixture.setup.run(&["explain", "users"]);
    let explained = String::from_utf8_lossy(&explained.stdout).into_owned();
    assert!(explained.contains("that random gives task 0 of 1"), "{explained}");
}
