//! Fault injection: every call of the daemon that needs a resource or a privilege is made to fail,
//! one call in each case, while clients connect without pause. No link may be lost, no connect may
//! fail, and no count may stay wrong. The daemon must recover by itself.
//!
//! A call is identified by the phase of the daemon, the name of the thread, the call, and its
//! number among these calls. A failing case is printed with the argument that reproduces it.

mod filter;

mod supervisor;

mod scene;

mod cases;

use std::collections::VecDeque;
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;

use cases::Case;
use scene::Scene;
use supervisor::{Desk, Phase};

/// Makes the daemon's system calls fail, one call in each case.
#[derive(Debug, Parser)]
struct Options {
    /// Try as many cases as fit into this time, in an order that the seed determines
    #[arg(long, default_value_t = 90)]
    seconds: u64,
    /// Seed of the order; default: random
    #[arg(long)]
    seed: Option<u64>,
    /// Try only this case, as a failing case is printed
    #[arg(long)]
    case: Option<Case>,
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("inject: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let options = Options::parse();
    let seed = options.seed.unwrap_or_else(|| {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("the time is after 1970");
        u64::from(now.subsec_nanos())
    });
    println!("inject: seed {seed}");
    let mut run = Run {
        desk: Desk::default(),
        seed,
        queue: options.case.iter().cloned().collect(),
        deadline: Instant::now() + Duration::from_secs(options.seconds),
        only: options.case.is_some(),
        tried: 0,
        unreached: 0,
        failures: Vec::new(),
    };
    run.in_sessions()?;
    run.report()
}

struct Run {
    desk: Desk,
    seed: u64,
    queue: VecDeque<Case>,
    deadline: Instant,
    /// Whether the queue has only the case of the command line.
    only: bool,
    tried: u32,
    /// Number of cases whose call did not come.
    unreached: u32,
    failures: Vec<(Case, String)>,
}

/// Number of rounds without a fault, which record the calls.
const ROUNDS: u32 = 2;
/// The run ends after this many failures, because further failures add nothing.
const FAILURES: usize = 40;

impl Run {
    /// Runs all cases. After a failed case, a new scene is made, because the failure may affect
    /// later cases.
    fn in_sessions(&mut self) -> Result<()> {
        let mut is_first = true;
        loop {
            // Each scene has a thread of its own, because it changes the namespaces of its thread.
            let outcome = std::thread::scope(|scope| scope.spawn(|| self.session(is_first)).join());
            let Ok(outcome) = outcome else { bail!("the thread of the scene panicked: see above") };
            outcome?;
            is_first = false;
            if self.queue.is_empty() || Instant::now() >= self.deadline || self.failures.len() >= FAILURES {
                return Ok(());
            }
        }
    }

    fn session(&mut self, is_first: bool) -> Result<()> {
        let scene = &mut Scene::new(&self.desk);
        scene.begin().with_context(|| scene.log())?;
        if is_first && !self.only {
            for _ in 0..ROUNDS {
                explore(scene).with_context(|| scene.log())?;
            }
            self.queue = self.desk.look(|record| cases::all(record, ROUNDS, self.seed)).into();
        }
        while Instant::now() < self.deadline
            && let Some(case) = self.queue.pop_front()
        {
            let result = attempt(scene, &self.desk, &case);
            let fired = self.desk.disarm();
            self.tried += 1;
            if let Err(error) = result {
                let text = format!("{error:#}\n--- its log ---\n{}", scene.log());
                println!("FAILED {case}\n{text}");
                self.failures.push((case, text));
                // The failed case may affect later cases, so they run in a new scene.
                return Ok(());
            }
            self.unreached += u32::from(!fired);
            println!("{} {case}", if fired { "ok" } else { "not reached" });
        }
        scene.stop(None)
    }

    fn report(&self) -> Result<()> {
        println!(
            "inject: {} kinds of calls; {} cases tried, {} not reached, {} left, {} failed",
            self.desk.look(|record| record.seen.len()),
            self.tried,
            self.unreached,
            self.queue.len(),
            self.failures.len()
        );
        for (case, _) in &self.failures {
            println!("failed: cargo xtask inject --case '{case}'");
        }
        ensure!(self.failures.is_empty(), "{} cases failed", self.failures.len());
        ensure!(!self.only || self.unreached == 0, "the daemon did not make this call");
        Ok(())
    }
}

/// Runs all phases without a fault, to record the calls.
fn explore(scene: &mut Scene) -> Result<()> {
    scene.round().and_then(|()| scene.await_whole())?;
    scene.stop(None)?;
    ensure!(scene.start(None)?.is_none(), "a start failed without a fault");
    Ok(())
}

/// Makes one call fail, and checks everything afterwards.
fn attempt(scene: &mut Scene, desk: &Desk, case: &Case) -> Result<()> {
    match case.kind.phase {
        Phase::Start => {
            scene.stop(None)?;
            if scene.start(Some(case.clone()))?.is_none() {
                // The daemon may end because of the fault even after it answers.
                let result = scene.await_whole();
                if scene.reap(true)?.is_none() {
                    return result;
                }
            }
            desk.disarm();
            let again = scene.start(None)?;
            ensure!(again.is_none(), "the next start, without a fault, fails: {again:?}");
        }
        Phase::Run => {
            desk.arm(case.clone());
            let result = scene.round();
            if scene.reap(false)?.is_some() {
                let again = scene.start(None)?;
                ensure!(again.is_none(), "the next start, without a fault, fails: {again:?}");
            } else {
                result?;
            }
        }
        Phase::Stop => {
            scene.stop(Some(case.clone()))?;
            let again = scene.start(None)?;
            ensure!(again.is_none(), "the next start, without a fault, fails: {again:?}");
        }
    }
    scene.await_whole()
}
