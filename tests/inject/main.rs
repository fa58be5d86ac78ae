//! Fault injection: every call of the daemon that needs a resource or a privilege is made to fail,
//! one call in each case, while clients connect without pause. No link may be lost, no connect may
//! fail, and no count may stay wrong. The daemon must recover by itself.
//!
//! The functions that lead to a call identify its site. A failing case is printed with the
//! arguments that reproduce it.

mod filter;

mod symbols;

mod stack;

mod site;

mod supervisor;

mod scene;

mod cases;

use std::collections::VecDeque;
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;

use cases::{Case, ERRORS};
use scene::Scene;
use site::Id;
use supervisor::{Desk, Phase};

/// Makes the daemon's system calls fail, one call in each case.
#[derive(Debug, Parser)]
struct Options {
    /// Try every site with every error, however long it takes
    #[arg(long)]
    all: bool,
    /// Try as many cases as fit into this time, sampled by the seed
    #[arg(long, default_value_t = 90)]
    seconds: u64,
    /// Seed of the sample; default: random
    #[arg(long)]
    seed: Option<u64>,
    /// Try only this site, by the id in the output of a failing case
    #[arg(long)]
    site: Option<Id>,
    /// Try only this error
    #[arg(long, value_parser = errno)]
    errno: Option<i32>,
    /// Try only this phase
    #[arg(long, value_parser = phase)]
    phase: Option<Phase>,
    /// Fail only after this many calls from the site
    #[arg(long)]
    skip: Option<u32>,
    /// Only list the sites that are found
    #[arg(long)]
    list: bool,
}

fn errno(name: &str) -> Result<i32, String> {
    let found = ERRORS.iter().find(|(_, known)| *known == name);
    found.map(|(number, _)| *number).ok_or_else(|| "write EMFILE, ENOMEM or EPERM".to_owned())
}

fn phase(name: &str) -> Result<Phase, String> {
    match name {
        "start" => Ok(Phase::Start),
        "run" => Ok(Phase::Run),
        "stop" => Ok(Phase::Stop),
        _ => Err("write start, run or stop".to_owned()),
    }
}

impl Options {
    fn wants(&self, case: &Case) -> bool {
        self.site.is_none_or(|site| site == case.site)
            && self.errno.is_none_or(|errno| errno == case.errno)
            && self.phase.is_none_or(|phase| phase == case.phase)
            && self.skip.is_none_or(|skip| skip == case.skip)
    }
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
        queue: VecDeque::new(),
        deadline: (!options.all && options.site.is_none())
            .then(|| Instant::now() + Duration::from_secs(options.seconds)),
        options,
        tried: 0,
        unreached: Vec::new(),
        failures: Vec::new(),
    };
    run.in_sessions()?;
    run.report()
}

struct Run {
    options: Options,
    desk: Desk,
    seed: u64,
    queue: VecDeque<Case>,
    deadline: Option<Instant>,
    tried: u32,
    unreached: Vec<Case>,
    failures: Vec<(Case, String)>,
}

/// The maximum number of rounds without a fault.
const ROUNDS: u32 = 12;
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
            let is_late = self.deadline.is_some_and(|deadline| Instant::now() >= deadline);
            if self.queue.is_empty() || is_late || self.failures.len() >= FAILURES {
                return Ok(());
            }
        }
    }

    fn session(&mut self, is_first: bool) -> Result<()> {
        let scene = &mut Scene::new(&self.desk);
        scene.begin().with_context(|| scene.log())?;
        if is_first {
            self.explore(scene).with_context(|| scene.log())?;
            self.fill_queue();
        }
        if self.options.list {
            self.list();
            self.queue.clear();
        }
        while let Some(case) = self.queue.pop_front() {
            if self.deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                self.queue.push_front(case);
                break;
            }
            let result = attempt(scene, &self.desk, &case);
            let fired = self.desk.disarm();
            self.tried += 1;
            if let Err(error) = result {
                let text = format!("{error:#}\n--- its log ---\n{}", scene.log());
                println!("FAILED {case}\n    {}\n{text}", self.site(case.site));
                self.failures.push((case, text));
                // The failed case may affect later cases, so they run in a new scene.
                return Ok(());
            }
            if !fired {
                self.unreached.push(case);
            }
            println!("{} {case}: {}", if fired { "ok" } else { "not reached" }, self.summary(case.site));
        }
        scene.stop(None)
    }

    /// Runs all phases without a fault, to find the call sites: twice, or with `--all` until two
    /// consecutive rounds find no new site. Some sites are reached only rarely. Sites that are
    /// reached only after another fault are not found.
    fn explore(&self, scene: &mut Scene) -> Result<()> {
        let (mut known, mut same) = (0, 0);
        for _ in 0..if self.options.all { ROUNDS } else { 2 } {
            scene.round().and_then(|()| scene.is_whole())?;
            scene.stop(None)?;
            ensure!(scene.start(None)?.is_none(), "a start failed without a fault");
            let seen = self.desk.look(|record| record.seen.len());
            same = if seen == known { same + 1 } else { 0 };
            known = seen;
            if same == 2 {
                break;
            }
        }
        Ok(())
    }

    /// Queues the cases of all sites that were seen.
    fn fill_queue(&mut self) {
        let mut cases = cases::all(&self.desk, self.seed);
        cases.retain(|case| self.options.wants(case));
        self.queue = cases.into();
    }

    fn site(&self, id: Id) -> String {
        self.desk.look(|record| record.sites[&id].to_string())
    }

    fn summary(&self, id: Id) -> String {
        self.desk.look(|record| record.sites[&id].summary())
    }

    fn list(&self) {
        self.desk.look(|record| {
            for ((phase, id), count) in &record.seen {
                println!("{phase:?} x{count}: {}", record.sites[id]);
            }
        });
    }

    fn report(&self) -> Result<()> {
        let (sites, seen) = self.desk.look(|record| (record.sites.len(), record.seen.len()));
        println!(
            "inject: {sites} call sites, {seen} by phase; {} cases tried, {} not reached, {} left, {} failed",
            self.tried,
            self.unreached.len(),
            self.queue.len(),
            self.failures.len()
        );
        for (case, _) in &self.failures {
            println!("failed: cargo xtask inject {case}: {}", self.summary(case.site));
        }
        ensure!(self.failures.is_empty(), "{} cases failed", self.failures.len());
        Ok(())
    }
}

/// Makes one call fail, and checks everything afterwards.
fn attempt(scene: &mut Scene, desk: &Desk, case: &Case) -> Result<()> {
    match case.phase {
        Phase::Start => {
            scene.stop(None)?;
            if scene.start(Some(case.fault()))?.is_none() {
                // The daemon may end because of the fault even after it answers.
                let result = scene.is_whole();
                if scene.reap()?.is_none() {
                    return result;
                }
            }
            desk.disarm();
            let again = scene.start(None)?;
            ensure!(again.is_none(), "the next start, without a fault, fails: {again:?}");
        }
        Phase::Run => {
            desk.arm(case.fault());
            let result = scene.round();
            if scene.reap()?.is_some() {
                let again = scene.start(None)?;
                ensure!(again.is_none(), "the next start, without a fault, fails: {again:?}");
            } else {
                result?;
            }
        }
        Phase::Stop => {
            scene.stop(Some(case.fault()))?;
            let again = scene.start(None)?;
            ensure!(again.is_none(), "the next start, without a fault, fails: {again:?}");
        }
    }
    scene.is_whole()
}
