//! The time for the simulation of fleets with load on one processor. The limit is 10 s for 50
//! clients with 50 backends and 250 seconds of virtual time. It is 60 s for 1,000 clients with
//! 1,000 backends and 60 seconds. Each fleet is simulated once, because results over minutes of CPU
//! time need no statistics.

use std::time::Instant;

use lb_sim::traffic::scenario::Scenario;
use lb_sim::traffic::{shipped, world};

/// The shipped scenario of the SRE book's fleet, with other numbers.
fn fleet(count: u32, size: u32, seconds: u32, policy: &str) -> Scenario {
    let text = shipped::text("book-load").expect("book-load is shipped");
    let (fleet, _) = text.split_once("[[run]]").expect("book-load has runs");
    let text = fleet
        .replace("count = 50", &format!("count = {count}"))
        .replace("tasks = 50", &format!("tasks = {count}"))
        .replace("size = 10", &format!("size = {size}"))
        .replace("duration = \"160s\"", &format!("duration = \"{seconds}s\""))
        .replace("measure_from = \"60s\"", "measure_from = \"10s\"")
        .replace("seeds = 3", "seeds = 1");
    let text = format!("{text}[[run]]\npolicy = \"{policy}\"\n");
    Scenario::read("bench", "bench", &text).unwrap_or_else(|fault| panic!("{fault}"))
}

fn main() {
    println!(
        "{:>8} {:>8} {:>10} {:>16} {:>12} {:>8}",
        "clients", "backends", "virtual s", "policy", "arrivals", "real s"
    );
    for (count, size, seconds) in [(50, 10, 250), (1_000, 20, 60)] {
        for policy in ["round-robin", "least-loaded", "p2c"] {
            let scenario = fleet(count, size, seconds, policy);
            let begin = Instant::now();
            let played = world::play(&scenario, &scenario.runs[0], 0, None);
            let took = begin.elapsed().as_secs_f64();
            let arrivals = played.total.counts.arrivals;
            println!("{count:>8} {count:>8} {seconds:>10} {policy:>16} {arrivals:>12} {took:>8.1}");
        }
    }
}
