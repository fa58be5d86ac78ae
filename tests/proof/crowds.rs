//! 160,000 sockets that are open at once, more than the flow table has buckets.

use stage::accounts::{imbalances, totals};
use stage::stress::{Service, config};
use stage::workers::{Change, Crowd, another_server, server};
use stage::{Cgroup, Daemon, Setup, Stage, eventually};

/// Number of sockets of one process. Each server gets about the same number of connections, and no
/// process may need more than 20,000 descriptors.
const EACH: u32 = 16_000;
const CROWDS: u64 = 10;
const ALL: u64 = CROWDS * EACH as u64;

/// Makes all crowds change at the same time. Returns the number of open sockets afterwards.
#[track_caller]
fn all_do(crowds: &mut [Crowd], change: Change) -> u64 {
    for crowd in &mut *crowds {
        crowd.start_change(change);
    }
    crowds.iter_mut().map(Crowd::done).sum()
}

/// Asserts that the active count equals the number of open sockets.
#[track_caller]
fn counts(setup: &Setup, chosen: u64, open: u64) {
    let look = || {
        let seen = totals(setup);
        (seen.chosen, seen.active, seen.untracked, seen.reclaimed)
    };
    eventually("open sockets are active", look, |seen| *seen == (chosen, open, 0, 0));
    assert_eq!(imbalances(setup), Vec::<String>::new());
}

#[test]
fn a_hundred_and_sixty_thousand_open_sockets_are_counted() {
    let stage = Stage::new();
    let cgroup = Cgroup::new();
    let setup = Setup::new(&stage, "a");
    let mut servers = vec![server()];
    servers.extend((1..CROWDS + 2).map(|_| another_server()));
    let text = config(&cgroup, [Service::of("crowd")].into_iter(), "");
    let _daemon = Daemon::start(&setup, &text);
    let mut crowds: Vec<Crowd> = (0..CROWDS).map(|seed| Crowd::start(&cgroup, seed)).collect();
    assert_eq!(all_do(&mut crowds, Change::Open(EACH)), ALL);
    counts(&setup, ALL, ALL);
    // Replaces a random half of the sockets: their buckets in the flow table become free, and other
    // flows claim the buckets.
    assert_eq!(all_do(&mut crowds, Change::Replace(EACH / 2)), ALL);
    let mut chosen = ALL + ALL / 2;
    counts(&setup, chosen, ALL);
    assert_eq!(all_do(&mut crowds, Change::Close(EACH / 2)), ALL / 2);
    counts(&setup, chosen, ALL / 2);
    assert_eq!(all_do(&mut crowds, Change::Open(EACH / 2)), ALL);
    chosen += ALL / 2;
    counts(&setup, chosen, ALL);
    for crowd in crowds.drain(..crowds.len() / 2) {
        crowd.kill();
    }
    counts(&setup, chosen, ALL / 2);
    assert_eq!(all_do(&mut crowds, Change::Close(EACH)), 0);
    counts(&setup, chosen, 0);
    drop(servers);
}
