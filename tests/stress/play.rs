//! In a round, threads play scenarios until enough flows have a backend. Then all threads stop, and
//! the worker reports its observations.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;

use anyhow::{Context, Result};
use fastrand::Rng;
use stage::ending::Seen;
use stage::ledger::{Counters, Ledger};
use stage::rpc;
use stage::stress::Service;
use stage::workers::Task;

use crate::{failed, odd, reached, socket};

/// `stress play`
#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    /// Determines the scenarios
    #[arg(long)]
    seed: u64,
    /// Number of threads
    #[arg(long)]
    threads: u32,
    /// Number of sockets that a thread opens together in scenarios with several sockets
    #[arg(long)]
    batch: u32,
    /// Connections that stay open between rounds
    #[arg(long)]
    held: u32,
    /// Play only scenarios with a name that contains this text
    #[arg(long, default_value = "")]
    only: String,
}

/// The state of one thread in a round.
pub struct Player {
    /// Determines the scenarios that the thread plays.
    pub random: Rng,
    /// The flows that the thread has observed.
    pub ledger: Ledger,
    /// The number of sockets that the thread opens together in scenarios with several sockets.
    pub batch: u32,
}

pub struct Scenario {
    /// The name in messages.
    pub name: &'static str,
    /// The frequency of the scenario, relative to other scenarios.
    pub weight: u32,
    pub play: fn(&mut Player) -> Result<()>,
}

/// `stress play`.
pub fn run(options: &Options) -> Result<()> {
    let mut worker = Worker {
        options: options.clone(),
        ledger: Ledger::default(),
        held: VecDeque::new(),
        before: Counters::read(),
        round: 0,
    };
    rpc::serve(|task| match *task {
        Task::Play { flows } => worker.round(flows),
        Task::Rest => Ok(worker.rest()),
    })
}

/// The requested scenarios.
fn scenarios(options: &Options) -> Vec<&'static Scenario> {
    let all = reached::SCENARIOS.iter().chain(&failed::SCENARIOS).chain(&odd::SCENARIOS);
    all.filter(|scenario| scenario.name.contains(&options.only)).collect()
}

struct Worker {
    options: Options,
    ledger: Ledger,
    /// The held connections, the oldest first.
    held: VecDeque<OwnedFd>,
    before: Counters,
    round: u64,
}

impl Worker {
    /// Plays one round; returns the observations of all rounds.
    fn round(&mut self, flows: u64) -> Result<Ledger> {
        self.round += 1;
        self.hold()?;
        let threads = u64::from(self.options.threads);
        let scenarios = scenarios(&self.options);
        let ledgers: Vec<Result<Ledger>> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..threads)
                .map(|thread| {
                    let player = Player {
                        random: Rng::with_seed(self.options.seed.wrapping_add(self.round * threads + thread)),
                        ledger: Ledger::default(),
                        batch: self.options.batch,
                    };
                    let scenarios = &scenarios;
                    // Every scenario is played at least once per round.
                    let first = scenarios.iter().skip(usize::try_from(thread).expect("the number is small"));
                    let first: Vec<&Scenario> =
                        first.step_by(self.options.threads as usize).copied().collect();
                    scope.spawn(move || player.play(&first, scenarios, flows / threads))
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().expect("the thread does not panic")).collect()
        });
        for ledger in ledgers {
            self.ledger.merge(ledger?);
        }
        Ok(self.proven_ledger())
    }

    /// Closes all held connections.
    fn rest(&mut self) -> Ledger {
        while self.held.pop_front().is_some() {
            self.ledger.end_one("held", Seen::Closed);
        }
        self.proven_ledger()
    }

    /// Closes the older half of the held connections and opens new ones up to the configured
    /// number.
    fn hold(&mut self) -> Result<()> {
        for _ in 0..self.held.len() / 2 {
            self.held.pop_front();
            self.ledger.end_one("held", Seen::Closed);
        }
        while self.held.len() < self.options.held as usize {
            self.held.push_back(socket::dial(Service::of("held"))?);
            self.ledger.hold("held");
        }
        Ok(())
    }

    /// Waits until the kernel's counters are consistent with the ledger, and returns the ledger.
    fn proven_ledger(&self) -> Ledger {
        let seen = self.ledger.counters;
        // A server receives the end of a connection some time after the client.
        stage::eventually(
            "the kernel's counts match the worker's observations",
            || (seen, self.before.until(Counters::read())),
            |(seen, counted)| seen.allow(*counted),
        );
        self.ledger.clone()
    }
}

impl Player {
    fn play(mut self, first: &[&Scenario], all: &[&Scenario], flows: u64) -> Result<Ledger> {
        for scenario in first {
            self.one(scenario)?;
        }
        let weights: u32 = all.iter().map(|scenario| scenario.weight).sum();
        while self.ledger.chosen() < flows {
            let mut at = self.random.u32(..weights);
            let sampled = all.iter().find(|scenario| {
                let is_it = at < scenario.weight;
                at = at.saturating_sub(scenario.weight);
                is_it
            });
            self.one(sampled.expect("below the sum of all weights"))?;
        }
        Ok(self.ledger)
    }

    fn one(&mut self, scenario: &Scenario) -> Result<()> {
        (scenario.play)(self).with_context(|| format!("scenario {}", scenario.name))
    }
}
