//! Runs the scenarios of `lb_contract` on the simulated kernel. A real kernel must show the same
//! results.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use lb_common::ending::Ending;
use lb_contract::{DatagramSocket, Flow, Reached, SERVICE, World};
use lb_fake::{Connect, FakeCgroup, FakeFlow, FakeSocket};
use lb_view::status::StatusDocument;

use super::stage::{LIST, Stage, address, cgroup_path, pins_of};
use crate::controller::{BackgroundWork, Event};

/// A simulated host.
struct Memory {
    stage: Stage,
    began: Instant,
    cgroups: BTreeMap<String, FakeCgroup>,
    flows: Vec<Option<FakeFlow>>,
    sockets: Vec<FakeSocket>,
    /// The connect whose programs are held.
    held: Option<Connect>,
}

impl Memory {
    fn new() -> Self {
        let mut stage = Stage::new("");
        stage.is_counted = false;
        let cgroups = [("web".to_owned(), stage.place)].into();
        Self { began: stage.now, stage, cgroups, flows: Vec::new(), sockets: Vec::new(), held: None }
    }

    /// The result of a connect to the service.
    fn reached(&mut self, connect: Connect) -> Reached {
        match connect {
            Connect::Unchanged => Reached::Nothing,
            Connect::Refused(errno) => panic!("a service has no backend: errno {errno}"),
            Connect::Sent(mut flow) => {
                self.stage.kernel.send_syn(&flow);
                if self.stage.dead.contains(&flow.backend) {
                    self.stage.kernel.end(flow, Ending::Refused, 0, 0);
                    return Reached::Refused;
                }
                self.stage.kernel.establish(&mut flow);
                self.flows.push(Some(flow));
                Reached::Backend(flow.backend, Flow(self.flows.len() - 1))
            }
        }
    }
}

impl World for Memory {
    fn configure(&mut self, clients: &[&str]) {
        for client in clients {
            let make = || self.stage.kernel.make_cgroup(&cgroup_path(client));
            self.cgroups.entry((*client).to_owned()).or_insert_with(make);
        }
        let clients: Vec<_> = clients.iter().map(|client| (*client, *client)).collect();
        self.stage.write_clients(&clients);
        let text = self.stage.config_text()
            + &format!(
                "[[service]]\nname = \"queries\"\naddress = \"{SERVICE}\"\nprotocol = \"udp\"\n\
                 backends = {{ file = \"{LIST}\" }}\nsubset = {{ size = 256 }}\n\
                 [accounting]\nreclaim_interval = \"1s\"\n"
            );
        self.stage.write_text(&text);
        self.stage.dispatch(Event::Hangup);
    }

    fn list(&mut self, backends: &[&str]) {
        self.stage.list(backends);
    }

    fn start(&mut self) {
        self.stage.try_to_start(1);
    }

    fn kill(&mut self) {
        self.stage.kill();
    }

    fn dial(&mut self, client: &str, cpu: usize) -> Reached {
        self.stage.kernel.move_to_cpu(cpu);
        let connect = self.stage.kernel.connect(self.cgroups[client], 1, address(SERVICE));
        self.reached(connect)
    }

    fn hold(&mut self, client: &str) {
        self.held = Some(self.stage.kernel.connect(self.cgroups[client], 1, address(SERVICE)));
        self.stage.kernel.hold(true);
    }

    fn release(&mut self) -> Reached {
        let connect = self.held.take().expect("programs are held");
        self.stage.kernel.hold(false);
        self.stage.finish_hung();
        self.reached(connect)
    }

    fn waits_for_readers(&mut self) -> bool {
        self.stage.hung.iter().any(|(_, work)| matches!(work, BackgroundWork::WaitForReaders))
    }

    fn dial_directly(&mut self, client: &str, backend: &str) {
        let reached = self.stage.kernel.connect(self.cgroups[client], 1, address(backend));
        assert_eq!(reached, Connect::Unchanged);
    }

    fn close(&mut self, Flow(flow): Flow) {
        let flow = self.flows[flow].take().expect("the flow is open");
        self.stage.kernel.end(flow, Ending::Closed, 100, 100);
    }

    fn open_datagram(&mut self, client: &str) -> DatagramSocket {
        self.sockets.push(self.stage.kernel.open_datagram(self.cgroups[client], 1));
        DatagramSocket(self.sockets.len() - 1)
    }

    fn send(&mut self, DatagramSocket(socket): DatagramSocket) -> SocketAddr {
        let backend = self.stage.kernel.send_datagram(&self.sockets[socket], address(SERVICE));
        backend.expect("the service has a backend").expect("the address is a service")
    }

    fn close_datagram(&mut self, DatagramSocket(socket): DatagramSocket) {
        self.stage.kernel.close_datagram(self.sockets[socket]);
    }

    fn set_refusing(&mut self, backend: &str, is_refusing: bool) {
        if is_refusing {
            self.stage.dead.insert(address(backend));
        } else {
            self.stage.dead.remove(&address(backend));
        }
    }

    fn unlink(&mut self, client: &str) {
        self.stage.kernel.unlink(&pins_of(client));
    }

    fn status(&mut self) -> StatusDocument {
        self.stage.status()
    }

    fn now(&self) -> Duration {
        self.stage.now - self.began
    }

    fn patience(&self) -> Duration {
        Duration::from_secs(60)
    }

    fn pass(&mut self) {
        self.stage.tick();
    }
}

#[test]
fn a_flow_whose_end_no_program_saw_is_reclaimed() {
    lb_contract::a_flow_whose_end_no_program_saw_is_reclaimed(&mut Memory::new());
}

#[test]
fn datagrams_of_a_socket_are_one_flow_until_it_closes() {
    lb_contract::datagrams_of_a_socket_are_one_flow_until_it_closes(&mut Memory::new());
}

#[test]
fn connections_are_counted_on_every_cpu() {
    lb_contract::connections_are_counted_on_every_cpu(&mut Memory::new());
}

#[test]
fn a_connection_holds_its_slot_until_it_ends() {
    lb_contract::a_connection_holds_its_slot_until_it_ends(&mut Memory::new());
}

#[test]
fn a_program_holds_the_slots_of_the_table_that_it_reads() {
    lb_contract::a_program_holds_the_slots_of_the_table_that_it_reads(&mut Memory::new());
}

#[test]
fn programs_balance_and_count_while_no_daemon_runs() {
    lb_contract::programs_balance_and_count_while_no_daemon_runs(&mut Memory::new());
}

#[test]
fn links_removed_by_an_operator_are_created_again() {
    lb_contract::links_removed_by_an_operator_are_created_again(&mut Memory::new());
}

#[test]
fn a_removed_client_stays_until_its_last_flow_has_ended() {
    lb_contract::a_removed_client_stays_until_its_last_flow_has_ended(&mut Memory::new());
}

#[test]
fn failures_in_a_row_eject_a_backend_and_a_trial_readmits_it() {
    lb_contract::failures_in_a_row_eject_a_backend_and_a_trial_readmits_it(&mut Memory::new());
}
