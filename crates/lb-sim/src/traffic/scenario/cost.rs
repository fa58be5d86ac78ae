//! What it costs to play a scenario: clients, members, arrivals, and how often clients are told of a change.
//!
//! All of it follows from the file, so that one that is too large is refused before anything is allocated for it. The
//! limits are what a laptop does in a few minutes.

use std::ops::Range;

use lb_core::service::Size;
use toml::Spanned;

use super::{Fail, NewSize, Scenario, ScenarioRun, SpannedFault};
use crate::metrics::float;
use crate::traffic::document::{FailMode, JobTable, MAX_CLIENTS, ScenarioDocument};

/// Most tables of one kind.
const MAX_TABLES: u64 = 1_000;
/// Most rows of all runs together.
const MAX_ROWS: u64 = 100_000;
/// Most members of the subsets of all clients together.
const MAX_MEMBERS: u64 = 1_000_000;
/// Most slots in the tables of all clients together: each client has one for every backend there ever is.
const MAX_SLOTS: u64 = 20_000_000;
/// Most arrivals of all runs together.
const MAX_ARRIVALS: u64 = 200_000_000;
/// Most requests and connections that are alive at a time, on average.
const MAX_ALIVE: u64 = 2_000_000;
/// Most times that clients are told of a change, in all runs together.
const MAX_NOTICES: u64 = 500_000;
/// Most members of all the subsets that clients are told of, in all runs together.
const MAX_TOLD: u64 = 20_000_000;
/// Most endpoints in all the lists that jobs are told, in one run: a list is kept until its last client knows it.
const MAX_LISTED: u64 = 5_000_000;
/// Most steps of computing subsets: changes times clients times backends, in all runs together.
const MAX_ORDERED: u64 = 2_000_000_000;

/// Most times that neighbours of machines come or go, in all runs together.
const MAX_NEIGHBOURS: u64 = 20_000_000;
/// Most times that clients hear a backend's own report, in all runs together.
const MAX_REPORTS: u64 = 5_000_000;
/// Most times that backends measure their load, in all runs together.
const MAX_LOADS: u64 = 50_000_000;
/// Most reports of load that clients look at, in all runs together.
const MAX_LOOKS: u64 = 500_000_000;
/// Most members that sizes which follow load look at, a second each, in all runs together.
const MAX_RESIZED: u64 = 500_000_000;
/// Most times that a backend fails, in all runs together.
const MAX_FAILURES: u64 = 1_000_000;

/// Checks that there are not too many tables.
pub(super) fn check_tables(document: &ScenarioDocument) -> Result<(), SpannedFault> {
    let ScenarioDocument { run, resize, restart, fail, reweight, switch, upgrade, job, .. } = document;
    let tables = [
        ("[[run]]", run.len()),
        ("[[resize]]", resize.len()),
        ("[[restart]]", restart.len()),
        ("[[fail]]", fail.len()),
        ("[[reweight]]", reweight.len()),
        ("[[switch]]", switch.len()),
        ("[[upgrade]]", upgrade.len()),
        ("[[job]]", job.len()),
    ];
    for (name, count) in tables {
        limit(&(0..0), &format!("tables {name}"), count as u64, MAX_TABLES)?;
    }
    Ok(())
}

/// How many clients a job and its copies have.
struct ClientCounts {
    /// The most that run at a time.
    most: u64,
    /// All that are ever started.
    started: u64,
}

/// Checks that the scenario can be played within the limits.
pub(super) fn check(scenario: &Scenario, document: &ScenarioDocument) -> Result<(), SpannedFault> {
    let rows = scenario.duration.us.div_ceil(scenario.step.us);
    limit(
        &document.step.span(),
        "rows of all runs",
        rows.saturating_mul(scenario.runs.len() as u64),
        MAX_ROWS,
    )?;
    // Each seed is played as if it were a run.
    let runs = scenario.runs.len() as u64 * u64::from(scenario.seeds);
    let (mut most, mut started, mut arrivals, mut all_alive, mut members) = (0u64, 0u64, 0u64, 0u64, 0u64);
    let mut resized = 0u64;
    let unanswered_us = |fail: &Fail| match fail.how {
        FailMode::Blackhole => fail.timeout.us,
        FailMode::Hang => fail.lasts.us.min(scenario.duration.us - fail.at.us),
        _ => 0,
    };
    let unanswered_us = scenario.fails.iter().map(unanswered_us).max().unwrap_or(0);
    let mut first = 0;
    for spanned in &document.job {
        let (span, job) = (spanned.span(), spanned.get_ref());
        let mut alive = 0u64;
        let copies = job.copies.map_or(1, |copies| copies.0);
        let clients = clients(scenario, job, first..first + copies as usize);
        first += copies as usize;
        most += clients.most;
        started += clients.started;
        limit(&span, "clients that are ever started", started, MAX_CLIENTS.into())?;
        if job.interval.is_some_and(|interval| interval.us == 0) {
            let message = "interval = \"0s\" never ends: write at least \"1us\", or leave it out";
            return Err((span, message.into()));
        }
        for run in &scenario.runs {
            let Demand { each, alive: at_a_time } = demand(scenario, job, run, unanswered_us);
            let plays = u64::from(scenario.seeds);
            arrivals = arrivals.saturating_add(clients.most.saturating_mul(each).saturating_mul(plays));
            limit(&span, "arrivals of all runs", arrivals, MAX_ARRIVALS)?;
            alive = alive.max(clients.most.saturating_mul(at_a_time));
        }
        all_alive = all_alive.saturating_add(alive);
        limit(&span, "requests and connections alive at a time", all_alive, MAX_ALIVE)?;
        let tasks = clients.most / u64::from(copies);
        let each = scenario.runs.iter().map(|run| most_members(scenario, job, run, tasks)).max().unwrap_or(0);
        members = members.saturating_add(clients.most * each);
        limit(&span, "members of all subsets", members, MAX_MEMBERS)?;
        let follow_load = scenario.runs.iter().filter(|run| follows_load(job, run)).count() as u64;
        let seconds = scenario.duration.us.div_ceil(1_000_000).saturating_mul(scenario.seeds.into());
        resized =
            resized.saturating_add((clients.most * each).saturating_mul(seconds).saturating_mul(follow_load));
        limit(&span, "members that sizes which follow load look at, in all runs", resized, MAX_RESIZED)?;
    }
    let backends = u64::from(scenario.most_backends());
    limit(&(0..0), "clients times backends", started.saturating_mul(backends), MAX_SLOTS)?;
    let failures = scenario
        .fails
        .iter()
        .map(|fail| u64::from(fail.times) * u64::from(fail.part.of(scenario.most_backends())));
    let span = document.fail.first().map_or(0..0, Spanned::span);
    let failures = failures.sum::<u64>().saturating_mul(runs);
    limit(&span, "times that a backend fails, in all runs", failures, MAX_FAILURES)?;
    if let Some(table) = scenario.machines.antagonist {
        let changes = scenario.duration.us.div_ceil(table.every.us.max(1));
        let span = document.backends.antagonist.as_ref().map_or(0..0, Spanned::span);
        let changes = changes.saturating_mul(backends).saturating_mul(runs);
        limit(&span, "times that neighbours come or go, in all runs", changes, MAX_NEIGHBOURS)?;
    }
    let jobs: Vec<JobTable> = document.job.iter().map(|job| job.get_ref().clone()).collect();
    let (mut looks, mut measured) = (0u64, 0u64);
    for run in scenario.runs.iter().filter(|run| run.follows_load(&jobs)) {
        let Some(table) = run.reports(scenario) else { continue };
        let span = document.reports.as_ref().map_or(0..0, Spanned::span);
        // Each look goes past the reports that are still on their way.
        let on_their_way = 1 + (table.delay.us + table.spread.us) / table.interval.us;
        let times = scenario.duration.us.div_ceil(1_000_000).saturating_mul(scenario.seeds.into());
        looks = looks.saturating_add(times.saturating_mul(members).saturating_mul(on_their_way));
        limit(&span, "looks at reports of load, in all runs", looks, MAX_LOOKS)?;
        let times = scenario.duration.us.div_ceil(table.interval.us).saturating_mul(scenario.seeds.into());
        measured = measured.saturating_add(times.saturating_mul(backends));
        limit(&span, "reports of load, in all runs", measured, MAX_LOADS)?;
    }
    let restarts: u64 = scenario.restarts.iter().map(|restart| 3 * scenario.batches(restart)).sum();
    let changes = restarts + (scenario.resizes.len() + scenario.reweights.len()) as u64;
    let spans = [
        document.restart.first().map(Spanned::span),
        document.resize.first().map(Spanned::span),
        document.reweight.first().map(Spanned::span),
    ];
    let span = spans.into_iter().flatten().next().unwrap_or(0..0);
    if scenario.runs.iter().any(|run| run.reports(scenario).is_some()) {
        // Each backend says that it leaves, and that it is back.
        let restarts = scenario.restarts.len() as u64 + 1;
        let reports = 2u64.saturating_mul(restarts).saturating_mul(backends).saturating_mul(started);
        limit(&span, "reports that clients hear, in all runs", reports.saturating_mul(runs), MAX_REPORTS)?;
    }
    let notices = changes.saturating_mul(most).saturating_mul(runs);
    limit(&span, "times that clients are told of a change", notices, MAX_NOTICES)?;
    let listed = (changes + 1).saturating_mul(first as u64).saturating_mul(backends);
    limit(&span, "endpoints in the lists that jobs are told of", listed, MAX_LISTED)?;
    // Clients are told of every change, and once at the start.
    let lists = (changes + 1).saturating_mul(runs);
    limit(&span, "members of all subsets that clients are told of", lists.saturating_mul(members), MAX_TOLD)?;
    let ordered = lists.saturating_mul(most).saturating_mul(backends);
    limit(&span, "changes times clients times backends of all runs", ordered, MAX_ORDERED)
}

/// What one task of a job asks for.
struct Demand {
    /// Arrivals in the whole run, retries among them.
    each: u64,
    /// Requests and connections that are alive at a time, on average.
    alive: u64,
}

/// What one task of a job asks for in a run. Where more is asked for than machines can do, what they work on at a time is bounded by
/// their queues.
fn demand(
    scenario: &Scenario,
    job: &JobTable,
    ScenarioRun { differs: run, .. }: &ScenarioRun,
    unanswered_us: u64,
) -> Demand {
    let bursts = job.burst.map_or(1.0, |burst| burst.0.mean_factor().max(1.0));
    let peak = job.burst.map_or(1.0, |burst| burst.0.factor.max(1.0));
    let rate = job.rate.map(|rate| run.rate.unwrap_or(rate).0);
    let interval = job.interval.map(|interval| 1e6 / float(interval.us));
    let cost_us = job.cost.map_or(0.0, |cost| cost.0.mean() * 1e6);
    // On the fastest machine that there is.
    let least_us =
        cost_us / scenario.machines.fastest() + float(run.wait.or(job.wait).unwrap_or(job.lasts).us);
    let unanswered_us = job.timeout.map_or(unanswered_us, |timeout| timeout.us.min(unanswered_us));
    let held_us = cost_us + float(run.wait.or(job.wait).unwrap_or(job.lasts).us.max(unanswered_us));
    let users = job.closed.map(|closed| {
        let round_us = (float(closed.think.us) + least_us).max(1.0);
        f64::from(closed.clients.0) * 1e6 / round_us
    });
    let Some(per_second) = interval.or(rate).or(users) else { return Demand { each: 0, alive: 0 } };
    let tries = f64::from(1 + run.retries.unwrap_or(job.retries).0);
    // A connection that is kept has many, and those that are open at the start are a life's worth.
    let life_us = job.connection_life.map_or(0.0, |life| float(life.us));
    let on_each = 1.0 + life_us / (least_us + float(job.pause.us)).max(1.0);
    let each = (float(scenario.duration.us) + life_us) / 1e6 * per_second * bursts * tries * on_each;
    // Who gives up in time looks at each request until then, served or not.
    let kept_us = held_us.max(life_us).max(job.timeout.map_or(0.0, |timeout| float(timeout.us)));
    let alive = job.closed.map_or(per_second * peak * kept_us / 1e6, |closed| f64::from(closed.clients.0));
    Demand { each: whole(each), alive: whole(alive) }
}

/// A positive number, rounded up.
fn whole(number: f64) -> u64 {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "what is larger is too large in any case"
    )]
    let whole = number.ceil() as u64;
    whole
}

/// Counts the clients of a job and its copies, which are at these positions.
fn clients(scenario: &Scenario, job: &JobTable, positions: Range<usize>) -> ClientCounts {
    let copies = positions.len() as u64;
    let (mut now, mut most, mut started) = (job.tasks.0, job.tasks.0, u64::from(job.tasks.0));
    for resize in &scenario.resizes {
        match &resize.to {
            NewSize::Tasks(jobs, tasks) if *jobs == positions => {
                started += u64::from(tasks.saturating_sub(now));
                (now, most) = (*tasks, most.max(*tasks));
            }
            NewSize::Tasks(..) | NewSize::Backends(..) => {}
        }
    }
    ClientCounts { most: copies * u64::from(most), started: copies * started }
}

/// The most members that a task's subset may have when the job has so many tasks. With fewer tasks each may have more
/// members, but all of them together have not.
fn most_members(
    scenario: &Scenario,
    job: &JobTable,
    ScenarioRun { differs: run, .. }: &ScenarioRun,
    tasks: u64,
) -> u64 {
    let backends = u64::from(scenario.most_backends());
    match run.size.unwrap_or(job.size).0 {
        // An arc is at most a task's part of the ring longer than the size, and has two edges more.
        Size::Fixed(size) if run.algorithm.unwrap_or(job.algorithm).0.is_aperture() => {
            (u64::from(size) + backends.div_ceil(tasks) + 2).min(backends)
        }
        Size::Fixed(size) => u64::from(size).min(backends),
        Size::Auto { .. } | Size::Band(_) => backends,
    }
}

/// Whether the sizes of a job's subsets follow load in a run.
fn follows_load(job: &JobTable, ScenarioRun { differs: run, .. }: &ScenarioRun) -> bool {
    matches!(run.size.unwrap_or(job.size).0, Size::Band(_))
}

/// Refuses too many of something.
fn limit(span: &Range<usize>, what: &str, wanted: u64, allowed: u64) -> Result<(), SpannedFault> {
    if wanted <= allowed {
        return Ok(());
    }
    Err((span.clone(), format!("there would be {wanted} {what}: at most {allowed} are possible")))
}
