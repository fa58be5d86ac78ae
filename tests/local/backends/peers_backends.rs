//! Tests for bugs of other balancers with backends that fail, return or leave. Each test has the
//! name of the effect, and the number of the bug in docs/design/bugs-of-others.md.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use lb_common::abi::map;
use lb_view::backend::BackendStatus;
use lb_view::flows::{ActiveFlow, FlowsDocument};
use stage::{Backend, Cgroup, Probe, SocketId, address, eventually, look, replace};

use stage::fixture::{Fixture, SERVICE, config};

use crate::backends::ejection::write;

/// The client tasks, each in a separate cgroup.
const CLIENTS: [&str; 3] = ["web", "api", "batch"];

/// Three client tasks of one daemon, each with flows that stay open.
struct Crowd {
    fixture: Fixture,
    cgroups: Vec<Cgroup>,
}

impl Crowd {
    fn new(endpoints: &[&str]) -> Self {
        let fixture = Fixture::without_daemon();
        write(&fixture, endpoints);
        let cgroups = CLIENTS[1..].iter().map(|_| Cgroup::new()).collect();
        let mut crowd = Self { fixture, cgroups };
        crowd.configure("1h");
        crowd.fixture.start();
        crowd
    }

    /// Writes the configuration, with this time between two passes over the flow records.
    fn configure(&self, reclaim_interval: &str) {
        let mut text = String::new();
        for (name, cgroup) in CLIENTS[1..].iter().zip(&self.cgroups) {
            let cgroup = cgroup.relative().display().to_string();
            text += &format!("[[client]]\njob = \"{name}\"\ncgroup = \"{cgroup}\"\n\n");
        }
        let lines = "policy = \"round-robin\"\nejection = { base = \"1h\", max = \"1h\" }";
        text += &config(&self.fixture.cgroup, r#"{ file = "users.toml" }"#, lines);
        text += &format!("[accounting]\nreclaim_interval = \"{reclaim_interval}\"\n");
        replace(&self.fixture.setup.folder.join("socklb.toml"), &text);
    }

    /// Opens this many flows in each client task, by two probes, because a process may have few
    /// descriptors.
    fn open(&self, flows: usize) -> Vec<(Probe, Vec<SocketId>)> {
        let cgroups = [&self.fixture.cgroup].into_iter().chain(&self.cgroups);
        let open = |cgroup: &Cgroup| {
            let mut probe = Probe::start(cgroup);
            let sockets = (0..flows / 2).map(|_| probe.start_connect(SERVICE)).collect();
            (probe, sockets)
        };
        cgroups.flat_map(|cgroup| [cgroup; 2]).map(open).collect()
    }

    /// Each open flow: its socket, its destination, and its phase.
    fn flows(&self) -> BTreeSet<(String, u64, Option<SocketAddr>, u32, String)> {
        let FlowsDocument { flows, .. } = self.fixture.setup.document(&["flows"]);
        let of = |flow: ActiveFlow<'_>| {
            (flow.client.into_owned(), flow.cookie, flow.backend, flow.generation, flow.phase.into_owned())
        };
        flows.into_iter().map(of).collect()
    }

    /// The status of a backend in each client task that has a slot for it.
    fn at(&self, address: &str) -> Vec<BackendStatus> {
        let status = self.fixture.setup.status();
        let services = status.clients.iter().filter_map(|client| client.service("users"));
        let backends = services.flat_map(|service| &service.backends);
        backends.filter(|backend| backend.address == stage::address(address)).cloned().collect()
    }

    /// Number of open flows, keyed by client task and backend.
    fn active(&self) -> BTreeMap<(String, SocketAddr), u64> {
        let mut active = BTreeMap::new();
        for client in self.fixture.setup.status().clients {
            for backend in client.service("users").into_iter().flat_map(|service| &service.backends) {
                active.insert((client.name.clone(), backend.address), backend.active);
            }
        }
        active
    }

    /// Renames the pins of the maps with flow records, so that no process can read a record. With
    /// `hide` false, restores the names.
    fn hide_records(&self, hide: bool) {
        for client in CLIENTS {
            for name in [map::FLOWS, map::FLOW_OVERFLOW, map::DATAGRAMS] {
                let shown = self.fixture.setup.map(client, name);
                let hidden = shown.with_file_name(format!("hidden-{name}"));
                let (from, to) = if hide { (shown, hidden) } else { (hidden, shown) };
                std::fs::rename(from, to).expect("rename the pin");
            }
        }
    }
}

/// The bug: for each backend that left, all sockets of the host were searched, which took seconds
/// of CPU time and delayed connects. In socklb, a change of the list reads and changes no flow,
/// however many flows are open.
#[test]
fn r22_changes_of_the_list_read_and_change_no_open_flow() {
    const FAILS: &str = "127.0.1.9:8101";
    let flows = if stage::in_a_guest() { 90 } else { 900 };
    let mut list: Vec<String> = (1..=8).map(|n| format!("127.0.1.{n}:8100")).collect();
    list.push(FAILS.to_owned());
    let crowd = Crowd::new(&list.iter().map(String::as_str).collect::<Vec<_>>());
    // The listener is at all addresses of loopback. It accepts nothing: connections wait in its
    // queue, which is as long as the kernel allows.
    let listener = std::net::TcpListener::bind("0.0.0.0:8100").expect("listen");
    rustix::net::listen(&listener, 4_096).expect("lengthen the queue");
    let failing = Backend::start("fails", FAILS);
    let mut probes = crowd.open(flows);
    let is_open = |flow: &(String, u64, Option<SocketAddr>, u32, String)| flow.4 == "established";
    let all = CLIENTS.len() * flows;
    let before = eventually(
        "all connections are established",
        || crowd.flows(),
        |flows| flows.len() == all && flows.iter().all(is_open),
    );
    let active = look(|| crowd.active()).has(|active| active.values().sum::<u64>(), all as u64);
    let taken: u64 = crowd.at(FAILS).iter().map(|backend| backend.active).sum();
    eventually(
        "the failing backend's connections are accepted",
        || failing.accepted(),
        |accepted| *accepted == taken,
    );
    crowd.hide_records(true);
    // From here on every read of a flow record fails.
    let mut lines: BTreeMap<String, &str> = list.iter().map(|address| (address.clone(), "")).collect();
    let mut change = |address: &str, line: Option<&'static str>, state: &str| {
        match line {
            Some(line) => lines.insert(address.to_owned(), line),
            None => lines.remove(address),
        };
        let list: Vec<(&str, &str)> = lines.iter().map(|(address, line)| (address.as_str(), *line)).collect();
        crowd.fixture.write_endpoints(&list);
        let word = |backend: BackendStatus| backend.state_in_words().to_owned();
        let states = || crowd.at(address).into_iter().map(word).collect::<Vec<_>>();
        eventually("each client task has the change", states, |states| *states == [state; 3]);
        look(|| crowd.active()).becomes(active.clone());
    };
    for (address, (line, state)) in list.iter().zip([
        (None, "leaving"),
        (Some("state = \"lame-duck\""), "lame-duck"),
        (Some("weight = 0"), "drained"),
        (None, "leaving"),
        (Some("state = \"lame-duck\""), "lame-duck"),
    ]) {
        change(address, line, state);
    }
    // One backend stops listening while its connections are open, and the programs eject it.
    // Connections to the other backends are reset, because the kernel may retain the flow of a
    // closed connection for a minute (see the end of this test).
    drop(failing);
    for (probe, _) in &mut probes {
        for _ in 0..50 {
            if let Ok(socket) = probe.try_start_connect(SERVICE) {
                probe.reset(socket);
            }
        }
    }
    eventually(
        "each client task has ejected the backend, and no connect is pending",
        || (crowd.at(FAILS).into_iter().map(|backend| backend.state).collect::<Vec<_>>(), crowd.active()),
        |(states, now)| *states == ["ejected"; 3] && *now == active,
    );
    // A backend that had left returns.
    change(&list[0], Some(""), "healthy");
    // The fault of an ejection appears after up to a minute, and the connects may take as long.
    let missed: Vec<_> =
        crowd.fixture.setup.faults().into_iter().filter(|fault| !fault.contains(FAILS)).collect();
    assert_eq!(missed, [""; 0], "no read of a flow record has failed");
    // Only passes over the flow records read them. The configuration sets the interval between
    // passes.
    crowd.configure("1s");
    let faults = || crowd.fixture.setup.faults().join("\n");
    eventually("a pass cannot read the flow records", faults, |faults| {
        faults.contains("the flow records could not be checked")
    });
    crowd.hide_records(false);
    assert_eq!(crowd.flows(), before, "no flow has changed");
    let service = address(SERVICE);
    for (probe, sockets) in &mut probes {
        assert!(sockets.iter().all(|socket| probe.peer(*socket) == service));
        sockets.drain(..).for_each(|socket| probe.close(socket));
    }
    // The kernel retains a closed connection for a minute if it has not received the other end's
    // close. When a listener is closed, it resets the connections in its queue.
    drop(listener);
    eventually("all flows end", || crowd.fixture.setup.active(), |active| *active == 0);
    let slots = || crowd.at(&list[3]).len();
    eventually("the slot of a backend that left is free", slots, |slots| *slots == 0);
}
