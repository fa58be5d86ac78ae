//! Flows end in every possible way, at random. The counts match the observations of the sockets'
//! owner.

use stage::accounts::differences;
use stage::stress::{all, config};
use stage::workers::{Play, Worker, server};
use stage::{Cgroup, Daemon, Setup, Stage, eventually};

/// `proof::accounting` is a longer form of this test. This form runs on every kernel.
#[test]
fn every_ending_is_counted_as_the_client_saw_it() {
    const ROUNDS: u64 = 3;
    let flows = if stage::in_a_guest() { 1000 } else { 5000 };
    let stage = Stage::new();
    let cgroup = Cgroup::new();
    let setup = Setup::new(&stage, "a");
    let _server = server();
    let _daemon = Daemon::start(&setup, &config(&cgroup, all(), ""));
    let play = Play { seed: 5, threads: 4, batch: 8, held: 20 };
    let mut worker = Worker::start(&cgroup, play);
    for _ in 0..ROUNDS {
        let ledger = worker.play(flows);
        eventually(
            "the counts match the client's observations",
            || differences(&setup, &ledger),
            Vec::is_empty,
        );
    }
    let ledger = worker.rest();
    eventually("the counts match the client's observations", || differences(&setup, &ledger), Vec::is_empty);
    assert_eq!(ledger.held(), 0);
    setup.active_becomes(0);
    assert!(ledger.chosen() >= ROUNDS * flows, "{}", ledger.chosen());
}
