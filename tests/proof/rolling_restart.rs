//! A rolling restart of real backends: each is drained, killed, started again, and undrained, while
//! two clients in separate network namespaces connect to the backends.

use std::collections::BTreeSet;

use lb_view::backend::BackendStatus;
use stage::daemon::read;
use stage::fixture::{SERVICE, config, endpoints};
use stage::namespace::{Network, run};
use stage::{Cgroup, Daemon, Probe, Setup, Stage, eventually, look};

use crate::restarts::open_flows_become;

const BACKENDS: usize = 20;
/// The address of all backends, which both clients can reach.
const HOST: &str = "10.78.0.1";
/// The minimum number of connects in the test.
const CONNECTS: u64 = 50_000;
/// Number of long connections that each client has open at the same time.
const LONG: u32 = 10;
const CLIENTS: [&str; 2] = ["web", "mail"];

fn address(backend: usize) -> String {
    format!("{HOST}:{}", 8001 + backend)
}

/// A backend's name, with the number of its restarts.
fn name(backend: usize, restarts: u32) -> String {
    format!("b{backend}.{restarts}")
}

/// A process that is a backend. When it is dropped, it is killed, and the kernel ends all its
/// connections.
fn start(cgroup: &Cgroup, backend: usize, restarts: u32) -> Probe {
    let mut process = Probe::start(cgroup);
    process.start_backend(&name(backend, restarts), &address(backend));
    process
}

/// The processes of one client, in the client's cgroup and network namespace.
struct Client {
    /// Dials without pause.
    short: Probe,
    /// Opens connections that last for about 0.3 s. The client closes them.
    long: Probe,
}

impl Client {
    fn start(cgroup: &Cgroup, network: &Network) -> Self {
        let mut processes =
            [(); 2].map(|()| Probe::start_with(cgroup, |command| network.place(command))).into_iter();
        let mut process = || processes.next().expect("two processes");
        let mut client = Self { short: process(), long: process() };
        client.short.start_dialling(SERVICE);
        client.long.start_exchanges(SERVICE, LONG);
        client
    }

    /// Stops the client. Returns the number of short and long connections, and the backends' names.
    /// Panics if a connect failed or a connection was cut.
    fn stop(&mut self) -> ([u64; 2], BTreeSet<String>) {
        let (short, long) = (self.short.stop_dialling(), self.long.stop_requests());
        assert_eq!(long.failed, [].into(), "no connection is cut");
        let count = [short.values().map(|count| u64::from(*count)).sum(), long.answered.values().sum()];
        let names: BTreeSet<String> = short.into_keys().chain(long.answered.into_keys()).collect();
        assert!(names.iter().all(|name| name.starts_with('b')), "no connect fails: {names:?}");
        (count, names)
    }
}

/// Runs a command that must succeed.
#[track_caller]
fn good(setup: &Setup, arguments: &[&str]) {
    let output = setup.run(arguments);
    assert_eq!(output.status.code(), Some(0), "{arguments:?}: {output:?}");
}

/// All backends, as both clients see them.
fn backends(setup: &Setup) -> Vec<BackendStatus> {
    CLIENTS.iter().flat_map(|client| setup.backends(client, "users")).collect()
}

fn connects(setup: &Setup) -> u64 {
    backends(setup).iter().map(|backend| backend.started).sum()
}

#[test]
fn a_rolling_restart_of_twenty_backends_fails_no_connect_and_cuts_no_flow() {
    let stage = Stage::new();
    let setup = Setup::new(&stage, "a");
    run(&format!("ip address add {HOST}/32 dev lo"));
    let networks = [("near1", "10.79.1"), ("near2", "10.79.2")].map(|(near, net)| {
        let network = Network::beside(near, net);
        network.run(&format!("ip route add {HOST}/32 via {net}.1"));
        network
    });
    let cgroups = CLIENTS.map(|_| Cgroup::new());
    let elsewhere = Cgroup::new();
    let mut restarts = 0;
    let mut processes: Vec<Probe> =
        (0..BACKENDS).map(|backend| start(&elsewhere, backend, restarts)).collect();
    let addresses: Vec<String> = (0..BACKENDS).map(address).collect();
    let list: Vec<(&str, &str)> = addresses.iter().map(|address| (&**address, "")).collect();
    setup.write("users.toml", &endpoints(&list));
    let mail =
        format!("[[client]]\njob = \"{}\"\ncgroup = \"{}\"\n", CLIENTS[1], cgroups[1].relative().display());
    let text = mail + &config(&cgroups[0], r#"{ file = "users.toml" }"#, "");
    let daemon = Daemon::start(&setup, &text);
    let mut clients = [0, 1].map(|number| Client::start(&cgroups[number], &networks[number]));

    while connects(&setup) < CONNECTS {
        restarts += 1;
        for (backend, process) in processes.iter_mut().enumerate() {
            let address = &addresses[backend];
            good(&setup, &["drain", "users", address, "--wait", "--timeout", "60s"]);
            let replaced = std::mem::replace(process, Probe::start(&elsewhere));
            replaced.kill();
            process.start_backend(&name(backend, restarts), address);
            good(&setup, &["undrain", "users", address]);
            let started = || -> u64 {
                let all = backends(&setup);
                all.iter().filter(|one| one.address == stage::address(address)).map(|one| one.started).sum()
            };
            let before = started();
            eventually("the backend serves again", started, |started| *started > before);
        }
    }

    let stopped = clients.each_mut().map(Client::stop);
    let made: u64 = stopped.iter().flat_map(|(counts, _)| *counts).sum();
    assert!(made >= CONNECTS, "{made}");
    let names: BTreeSet<String> = stopped.iter().flat_map(|(_, names)| names.clone()).collect();
    let expected =
        (0..=restarts).flat_map(|restarts| (0..BACKENDS).map(move |backend| name(backend, restarts)));
    assert_eq!(names, expected.collect(), "every backend has served before and after each restart");
    open_flows_become(&setup, 0);
    // socklb has counted exactly these connects, and neither a refusal nor a reset by a backend.
    assert_eq!(connects(&setup), made);
    let endings: BTreeSet<String> = backends(&setup)
        .into_iter()
        .flat_map(|backend| backend.endings)
        .filter_map(|(ending, count)| (count > 0).then_some(ending))
        .collect();
    assert_eq!(endings, ["aborted", "closed"].map(str::to_owned).into());
    let leaked = || setup.status().clients.iter().map(|client| client.not_a_service).sum::<u64>();
    look(leaked).becomes(0);
    let drains = read(&setup.folder.join("log")).matches("an operator overrides a backend").count();
    assert_eq!(drains, 2 * BACKENDS * restarts as usize, "{}", daemon.log());
    let counts = stopped.map(|(counts, _)| counts);
    println!("{restarts} restarts of {BACKENDS} backends; connections, short and long: {counts:?}");
}
