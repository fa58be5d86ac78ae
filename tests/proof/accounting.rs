//! Hundreds of thousands of flows that end in every way: the counts match the counts of the flows'
//! owners, even while the flow tables are too small.

use stage::accounts::{calls_without_a_record, differences, differences_of_full_tables};
use stage::ledger::Ledger;
use stage::rpc::Process;
use stage::stress::{all, config};
use stage::workers::{Play, Worker, server};
use stage::{Cgroup, Daemon, Setup, Stage, amount, eventually};

/// The number of flows in a test.
fn flows() -> u64 {
    amount(50_000, 200_000)
}

/// The number of rounds. The counts are checked after each.
const ROUNDS: u64 = 10;

/// A running daemon, a server and a worker.
struct Scene {
    // Fields are dropped in this order.
    worker: Worker,
    _daemon: Daemon,
    _server: Process,
    setup: Setup,
    _cgroup: Cgroup,
    _stage: Stage,
}

impl Scene {
    fn new(play: Play, limits: &str) -> Self {
        let stage = Stage::new();
        let cgroup = Cgroup::new();
        let setup = Setup::new(&stage, "a");
        let server = server();
        let daemon = Daemon::start(&setup, &config(&cgroup, all(), limits));
        let worker = Worker::start(&cgroup, play);
        Self { worker, _daemon: daemon, _server: server, setup, _cgroup: cgroup, _stage: stage }
    }

    /// Plays all rounds, checks the counts after each round, and closes all sockets at the end.
    fn play(&mut self, flows: u64, differences: impl Fn(&Setup, &Ledger) -> Vec<String>) -> Ledger {
        for _ in 0..ROUNDS {
            let ledger = self.worker.play(flows / ROUNDS);
            eventually(
                "the counts match the clients' observations",
                || differences(&self.setup, &ledger),
                Vec::is_empty,
            );
        }
        let ledger = self.worker.rest();
        eventually(
            "the counts match the clients' observations",
            || differences(&self.setup, &ledger),
            Vec::is_empty,
        );
        assert_eq!(ledger.held(), 0);
        self.setup.active_becomes(0);
        ledger
    }
}

const PLAY: Play = Play { seed: 20, threads: 8, batch: 64, held: 500 };

#[test]
fn flows_are_counted_as_their_owners_saw_them_end() {
    let mut scene = Scene::new(PLAY, "");
    let ledger = scene.play(flows(), differences);
    assert!(ledger.chosen() >= flows(), "{}", ledger.chosen());
    println!("{ledger:?}");
}

/// The flow table has room for only 64 flows.
#[test]
fn the_smallest_flow_table_counts_exactly() {
    let play = Play { threads: 4, batch: 8, held: 24, ..PLAY };
    let mut scene = Scene::new(play, "[limits]\nflow_records = 64\n");
    let ledger = scene.play(flows(), differences);
    assert!(ledger.chosen() >= flows(), "{}", ledger.chosen());
}

/// More flows are open at once than table and overflow table have room for.
#[test]
fn flows_without_a_record_are_counted_as_untracked() {
    let mut scene = Scene::new(PLAY, "[limits]\nflow_records = 64\n");
    let ledger = scene.play(flows() / 4, differences_of_full_tables);
    let client = scene.setup.client();
    let untracked =
        ledger.services.keys().map(|service| calls_without_a_record(&client, service)).sum::<u64>();
    assert!(
        untracked > 0 && untracked < ledger.chosen(),
        "untracked connects: {untracked}, chosen: {}",
        ledger.chosen()
    );
}
