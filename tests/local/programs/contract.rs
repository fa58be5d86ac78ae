//! Runs the scenarios of `lb_contract` on this kernel. Their expected results are the same on the
//! simulated kernel and on a real one.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use lb_contract::{BACKENDS, DatagramSocket, Flow, Reached, SERVICE, World};
use lb_view::status::StatusDocument;
use rustix::process::Signal;
use stage::fixture::{endpoints, with_passes};
use stage::held::HeldProgram;
use stage::protocol::Answer;
use stage::sys::{link_ids, remove_link};
use stage::{
    Backend, Cgroup, Daemon, DatagramBackend, Dialled, Family, Probe, Setup, SocketId, Stage, kernel,
    patience, replace,
};

struct Host {
    // Fields are dropped in this order, so each field is dropped before the fields that it uses.
    daemon: Option<Daemon>,
    /// The client whose programs are held, and the program that holds them.
    held: Option<(String, HeldProgram)>,
    probes: BTreeMap<String, Probe>,
    flows: Vec<(String, SocketId)>,
    sockets: Vec<(String, SocketId)>,
    backends: BTreeMap<String, Backend>,
    _datagram_backends: [DatagramBackend; 3],
    setup: Setup,
    cgroups: BTreeMap<String, Cgroup>,
    _stage: Stage,
    began: Instant,
}

impl Host {
    fn new() -> Self {
        let stage = Stage::new();
        let setup = Setup::new(&stage, "a");
        let backend = |address: &str| (address.to_owned(), Backend::start(address, address));
        Self {
            daemon: None,
            held: None,
            probes: BTreeMap::new(),
            flows: Vec::new(),
            sockets: Vec::new(),
            backends: BACKENDS.map(backend).into(),
            _datagram_backends: BACKENDS.map(|address| DatagramBackend::start(address, address)),
            setup,
            cgroups: BTreeMap::new(),
            _stage: stage,
            began: Instant::now(),
        }
    }

    /// The process in a client's cgroup.
    fn probe(&mut self, client: &str) -> &mut Probe {
        let start = || Probe::start(&self.cgroups[client]);
        self.probes.entry(client.to_owned()).or_insert_with(start)
    }

    /// The result of a dial in a client's cgroup.
    fn reached(&mut self, client: &str, dialled: Answer<Dialled>) -> Reached {
        match dialled {
            Ok(dialled) => {
                self.flows.push((client.to_owned(), dialled.socket));
                Reached::Backend(
                    dialled.name.parse().expect("a backend's name is its address"),
                    Flow(self.flows.len() - 1),
                )
            }
            Err(libc::ECONNREFUSED) => Reached::Refused,
            Err(libc::ENETUNREACH) => Reached::Nothing,
            Err(errno) => panic!("connect failed with errno {errno}"),
        }
    }
}

impl World for Host {
    fn configure(&mut self, clients: &[&str]) {
        let mut text = String::new();
        for client in clients {
            let cgroup = self.cgroups.entry((*client).to_owned()).or_insert_with(Cgroup::new);
            text +=
                &format!("[[client]]\njob = \"{client}\"\ncgroup = \"{}\"\n", cgroup.relative().display());
        }
        for (service, protocol) in [("users", "tcp"), ("queries", "udp")] {
            text += &format!(
                "[[service]]\nname = \"{service}\"\naddress = \"{SERVICE}\"\nprotocol = \"{protocol}\"\n\
                 backends = {{ file = \"users.toml\" }}\n"
            );
        }
        replace(&self.setup.folder.join("socklb.toml"), &with_passes(&text));
        if let Some(daemon) = &self.daemon {
            daemon.signal(Signal::HUP);
        }
    }

    fn list(&mut self, backends: &[&str]) {
        let list: Vec<_> = backends.iter().map(|backend| (*backend, "")).collect();
        replace(&self.setup.folder.join("users.toml"), &endpoints(&list));
    }

    fn start(&mut self) {
        self.daemon = Some(Daemon::start_again(&self.setup));
    }

    fn kill(&mut self) {
        self.daemon.take().expect("a daemon runs").kill();
    }

    fn dial(&mut self, client: &str, cpu: usize) -> Reached {
        let probe = self.probe(client);
        probe.pin(cpu);
        let dialled = probe.try_dial(SERVICE);
        self.reached(client, dialled)
    }

    fn hold(&mut self, client: &str) {
        let held = HeldProgram::attach(&self.cgroups[client]);
        self.probe(client).start_dial(SERVICE);
        held.wait_until_begun();
        self.held = Some((client.to_owned(), held));
    }

    fn release(&mut self) -> Reached {
        let (client, held) = self.held.take().expect("programs are held");
        held.release();
        let dialled = self.probe(&client).finish_dial();
        assert!(held.has_ended(), "the program was not held for long enough");
        self.reached(&client, dialled)
    }

    fn waits_for_readers(&mut self) -> bool {
        self.daemon.as_ref().expect("a daemon runs").is_blocked_in(libc::SYS_membarrier)
    }

    fn dial_directly(&mut self, client: &str, backend: &str) {
        let probe = self.probe(client);
        let dialled = probe.dial(backend);
        assert_eq!(dialled.name, backend);
        probe.close(dialled.socket);
    }

    fn close(&mut self, Flow(flow): Flow) {
        let (client, socket) = self.flows[flow].clone();
        self.probe(&client).close(socket);
    }

    fn open_datagram(&mut self, client: &str) -> DatagramSocket {
        let socket = self.probe(client).open_datagram(Family::V4);
        self.sockets.push((client.to_owned(), socket));
        DatagramSocket(self.sockets.len() - 1)
    }

    fn send(&mut self, DatagramSocket(socket): DatagramSocket) -> SocketAddr {
        let (client, socket) = self.sockets[socket].clone();
        let name = self.probe(&client).query(socket, SERVICE);
        name.parse().expect("a backend's name is its address")
    }

    fn close_datagram(&mut self, DatagramSocket(socket): DatagramSocket) {
        let (client, socket) = self.sockets[socket].clone();
        self.probe(&client).close(socket);
    }

    fn set_refusing(&mut self, backend: &str, is_refusing: bool) {
        if is_refusing {
            self.backends.remove(backend);
        } else {
            self.backends.insert(backend.to_owned(), Backend::start(backend, backend));
        }
    }

    fn unlink(&mut self, client: &str) {
        let pins = self.setup.pins_of(client);
        for link in link_ids(&pins).keys() {
            remove_link(&pins.join("links").join(link));
        }
    }

    fn status(&mut self) -> StatusDocument {
        self.setup.status()
    }

    fn now(&self) -> Duration {
        self.began.elapsed()
    }

    fn patience(&self) -> Duration {
        2 * patience()
    }

    fn pass(&mut self) {
        // Yields the CPU. The wait ends when the status has the expected value.
        std::thread::park_timeout(patience() / 2000);
    }
}

#[test]
fn a_flow_whose_end_no_program_saw_is_reclaimed() {
    if kernel::NAMESPACE_COOKIES.skips() {
        return;
    }
    lb_contract::a_flow_whose_end_no_program_saw_is_reclaimed(&mut Host::new());
}

#[test]
fn datagrams_of_a_socket_are_one_flow_until_it_closes() {
    lb_contract::datagrams_of_a_socket_are_one_flow_until_it_closes(&mut Host::new());
}

#[test]
fn connections_are_counted_on_every_cpu() {
    lb_contract::connections_are_counted_on_every_cpu(&mut Host::new());
}

#[test]
fn a_connection_holds_its_slot_until_it_ends() {
    lb_contract::a_connection_holds_its_slot_until_it_ends(&mut Host::new());
}

#[test]
fn a_program_holds_the_slots_of_the_table_that_it_reads() {
    lb_contract::a_program_holds_the_slots_of_the_table_that_it_reads(&mut Host::new());
}

#[test]
fn programs_balance_and_count_while_no_daemon_runs() {
    lb_contract::programs_balance_and_count_while_no_daemon_runs(&mut Host::new());
}

#[test]
fn links_removed_by_an_operator_are_created_again() {
    lb_contract::links_removed_by_an_operator_are_created_again(&mut Host::new());
}

#[test]
fn a_removed_client_stays_until_its_last_flow_has_ended() {
    lb_contract::a_removed_client_stays_until_its_last_flow_has_ended(&mut Host::new());
}

#[test]
fn failures_in_a_row_eject_a_backend_and_a_trial_readmits_it() {
    lb_contract::failures_in_a_row_eject_a_backend_and_a_trial_readmits_it(&mut Host::new());
}
