//! Millions of connects, as fast as this machine makes them. Then all sockets are closed, so each
//! remaining record belongs to a flow whose end was missed. The soak test counts these records, and
//! checks whether they are reclaimed.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use stage::accounts::{differences, totals};
use stage::ledger::Ledger;
use stage::stress::config;
use stage::workers::{Hammer, another_server, server};
use stage::{Cgroup, Daemon, Setup, Stage, within};

/// `stress soak`
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct Options {
    /// Number of connects
    #[arg(long, default_value_t = 10_000_000)]
    connects: u64,
    /// Maximum duration in minutes
    #[arg(long)]
    minutes: Option<u64>,
}

/// Number of processes that connect.
const HAMMERS: u64 = 2;
/// Number of connects of each process between two reports.
const ROUND: u64 = 50_000;
/// The time within which the ends of the last sockets reach the kernel programs.
const SETTLING: Duration = Duration::from_secs(5);
/// The daemon checks the records once a minute, and may check young records only in the next pass.
const RECLAIMING: Duration = Duration::from_secs(150);

/// `stress soak`.
pub fn run(options: &Options) -> Result<()> {
    let stage = Stage::new();
    let cgroup = Cgroup::new();
    let setup = Setup::new(&stage, "soak");
    let _servers = [server(), another_server()];
    let daemon = Daemon::start(&setup, &config(&cgroup, Hammer::services(), ""));
    let ledger = hammer(options, &cgroup);
    println!("soak: {} connects made, all sockets closed", ledger.chosen());
    let balance = || differences(&setup, &ledger);
    for difference in within(SETTLING, balance, Vec::is_empty).unwrap_or_else(|differences| differences) {
        println!("soak: before a pass over the records: {difference}");
    }
    report(&setup, "before");
    // The next daemon makes a pass over the records after its start.
    daemon.stop();
    let _daemon = Daemon::start_again(&setup);
    let left = within(RECLAIMING, || totals(&setup).active, |left| *left == 0).unwrap_or_else(|left| left);
    report(&setup, "after");
    ensure!(left == 0, "{left} records were not reclaimed");
    let chosen = totals(&setup).chosen;
    ensure!(chosen == ledger.chosen(), "a backend was chosen for {chosen} of {} connects", ledger.chosen());
    Ok(())
}

/// Makes the connects until their number or the time limit is reached.
fn hammer(options: &Options, cgroup: &Cgroup) -> Ledger {
    let begin = Instant::now();
    let end = options.minutes.map(|minutes| begin + Duration::from_secs(60 * minutes));
    let mut hammers: Vec<Hammer> = (0..HAMMERS).map(|seed| Hammer::start(cgroup, seed)).collect();
    let mut ledger = Ledger::default();
    let mut printed = 0;
    while ledger.chosen() < options.connects && end.is_none_or(|end| Instant::now() < end) {
        let round = ROUND.min((options.connects - ledger.chosen()).div_ceil(HAMMERS));
        for hammer in &mut hammers {
            hammer.start_connects(round);
        }
        for hammer in &mut hammers {
            ledger.merge(hammer.done());
        }
        let million = ledger.chosen() / 1_000_000;
        if million > printed {
            printed = million;
            println!("soak: {} connects in {} s", ledger.chosen(), begin.elapsed().as_secs());
        }
    }
    ledger
}

/// Prints the number of remaining and reclaimed records, and the anomalies that the kernel programs
/// have counted.
fn report(setup: &Setup, when: &str) {
    let sums = totals(setup);
    println!(
        "soak: {when} the pass: {} stuck, {} reclaimed, {} untracked",
        sums.active, sums.reclaimed, sums.untracked
    );
    println!("soak: {when} the pass: {:?}", setup.client().anomalies);
}
