//! The cost of the simulation of a scenario: the numbers of its clients, members and arrivals, and
//! of the notices that its clients receive.
//!
//! The cost follows from the file, so the planner can reject a scenario that is too large before it
//! allocates memory for the simulation. A scenario at the limits takes a few minutes on a laptop.

use std::ops::Range;

use lb_core::service::Size;
use toml::Spanned;

use super::{Fail, NewSize, Scenario, ScenarioRun, SpannedFault};
use crate::metrics::float;
use crate::traffic::document::{FailMode, JobTable, MAX_CLIENTS, ScenarioDocument};

/// The maximum number of tables of one kind in the file.
const MAX_TABLES: u64 = 1_000;
/// The maximum number of rows of all runs together.
const MAX_ROWS: u64 = 100_000;
/// The maximum number of subset members of all clients together.
const MAX_MEMBERS: u64 = 1_000_000;
/// The maximum number of slots in the tables of all clients together. Each client has a slot for
/// every backend that ever exists.
const MAX_SLOTS: u64 = 20_000_000;
/// The maximum number of arrivals of all runs together.
const MAX_ARRIVALS: u64 = 200_000_000;
/// The limit on the mean number of requests and connections that exist at the same time.
const MAX_ALIVE: u64 = 2_000_000;
/// The maximum number of notices of changes that clients receive, in all runs together.
const MAX_NOTICES: u64 = 500_000;
/// The maximum number of subset members that clients receive with notices of changes, in all runs
/// together.
const MAX_SENT_MEMBERS: u64 = 20_000_000;
/// The maximum number of endpoints in all lists that jobs receive in one run. A list remains in
/// memory until the last client of the job has received it.
const MAX_LISTED: u64 = 5_000_000;
/// The maximum number of steps for computing subsets, in all runs together. This number is lists
/// times clients times backends; there is one list at the start, and one for each change.
const MAX_ORDERED: u64 = 2_000_000_000;

/// The maximum number of changes of the neighbours of machines, in all runs together.
const MAX_NEIGHBOURS: u64 = 20_000_000;
/// The maximum number of lame-duck reports that clients receive, in all runs together.
const MAX_REPORTS: u64 = 5_000_000;
/// The maximum number of times that backends measure their load, in all runs together.
const MAX_LOADS: u64 = 50_000_000;
/// The maximum number of load reports that clients evaluate, in all runs together.
const MAX_LOOKS: u64 = 500_000_000;
/// The maximum number of members that are examined to adapt the sizes of subsets to load, in all
/// runs together. Each member is examined once a second.
const MAX_RESIZED: u64 = 500_000_000;
/// The maximum number of backend failures, in all runs together.
const MAX_FAILURES: u64 = 1_000_000;

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
        limit(&(0..0), &format!("{name} tables"), count as u64, MAX_TABLES)?;
    }
    Ok(())
}

struct ClientCounts {
    /// The largest number of clients that run at the same time.
    most: u64,
    /// The number of all clients that are ever started.
    started: u64,
}

pub(super) fn check(scenario: &Scenario, document: &ScenarioDocument) -> Result<(), SpannedFault> {
    let rows = scenario.duration.us.div_ceil(scenario.step.us);
    limit(
        &document.step.span(),
        "rows of all runs",
        rows.saturating_mul(scenario.runs.len() as u64),
        MAX_ROWS,
    )?;
    // One more seed takes as much time as one more run.
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
            let message =
                "interval = \"0s\" sends without end: write at least \"1us\", or leave interval out";
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
        limit(&span, "requests and connections that exist at the same time", all_alive, MAX_ALIVE)?;
        let tasks = clients.most / u64::from(copies);
        let each = scenario.runs.iter().map(|run| most_members(scenario, job, run, tasks)).max().unwrap_or(0);
        members = members.saturating_add(clients.most * each);
        limit(&span, "members of all subsets", members, MAX_MEMBERS)?;
        let follow_load = scenario.runs.iter().filter(|run| follows_load(job, run)).count() as u64;
        let seconds = scenario.duration.us.div_ceil(1_000_000).saturating_mul(scenario.seeds.into());
        resized =
            resized.saturating_add((clients.most * each).saturating_mul(seconds).saturating_mul(follow_load));
        limit(&span, "members examined for sizes that follow load, in all runs", resized, MAX_RESIZED)?;
    }
    let backends = u64::from(scenario.most_backends());
    limit(&(0..0), "clients times backends", started.saturating_mul(backends), MAX_SLOTS)?;
    let failures = scenario
        .fails
        .iter()
        .map(|fail| u64::from(fail.times) * u64::from(fail.part.of(scenario.most_backends())));
    let span = document.fail.first().map_or(0..0, Spanned::span);
    let failures = failures.sum::<u64>().saturating_mul(runs);
    limit(&span, "failures of backends, in all runs", failures, MAX_FAILURES)?;
    if let Some(table) = scenario.machines.antagonist {
        let changes = scenario.duration.us.div_ceil(table.every.us.max(1));
        let span = document.backends.antagonist.as_ref().map_or(0..0, Spanned::span);
        let changes = changes.saturating_mul(backends).saturating_mul(runs);
        limit(&span, "arrivals and departures of neighbours, in all runs", changes, MAX_NEIGHBOURS)?;
    }
    let jobs: Vec<JobTable> = document.job.iter().map(|job| job.get_ref().clone()).collect();
    let (mut looks, mut measured) = (0u64, 0u64);
    for run in scenario.runs.iter().filter(|run| run.follows_load(&jobs)) {
        let Some(table) = run.reports(scenario) else { continue };
        let span = document.reports.as_ref().map_or(0..0, Spanned::span);
        // Each tick also examines the reports that have not arrived yet.
        let on_their_way = 1 + (table.delay.us + table.spread.us) / table.interval.us;
        let times = scenario.duration.us.div_ceil(1_000_000).saturating_mul(scenario.seeds.into());
        looks = looks.saturating_add(times.saturating_mul(members).saturating_mul(on_their_way));
        limit(&span, "load reports that clients examine, in all runs", looks, MAX_LOOKS)?;
        let times = scenario.duration.us.div_ceil(table.interval.us).saturating_mul(scenario.seeds.into());
        measured = measured.saturating_add(times.saturating_mul(backends));
        limit(&span, "load reports of backends, in all runs", measured, MAX_LOADS)?;
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
        // A restart makes each backend report twice: when it becomes a lame duck, and when it
        // serves again.
        let restarts = scenario.restarts.len() as u64 + 1;
        let reports = 2u64.saturating_mul(restarts).saturating_mul(backends).saturating_mul(started);
        limit(
            &span,
            "lame-duck reports that clients receive, in all runs",
            reports.saturating_mul(runs),
            MAX_REPORTS,
        )?;
    }
    let notices = changes.saturating_mul(most).saturating_mul(runs);
    limit(&span, "notices of changes to clients", notices, MAX_NOTICES)?;
    let listed = (changes + 1).saturating_mul(first as u64).saturating_mul(backends);
    limit(&span, "endpoints in the lists that jobs receive", listed, MAX_LISTED)?;
    // Clients receive a list for every change, and one at the start.
    let lists = (changes + 1).saturating_mul(runs);
    limit(
        &span,
        "members of all subsets that clients receive",
        lists.saturating_mul(members),
        MAX_SENT_MEMBERS,
    )?;
    let ordered = lists.saturating_mul(most).saturating_mul(backends);
    limit(&span, "changes times clients times backends of all runs", ordered, MAX_ORDERED)
}

/// The demand of one task of a job.
struct Demand {
    /// The number of arrivals in the whole run, including retries.
    each: u64,
    /// The mean number of requests and connections that exist at the same time.
    alive: u64,
}

/// The demand of one task of a job in a run. If the demand exceeds the capacity of the machines,
/// their `queue` limits the number of requests that they process at the same time.
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
    // The shortest time of a request, which is the time on the fastest machine of the scenario.
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
    // With `connection_life`, a connection carries many requests. At the start, as many connections
    // are open as arrive in one lifetime.
    let life_us = job.connection_life.map_or(0.0, |life| float(life.us));
    let on_each = 1.0 + life_us / (least_us + float(job.pause.us)).max(1.0);
    let each = (float(scenario.duration.us) + life_us) / 1e6 * per_second * bursts * tries * on_each;
    // If requests have a timeout, the queue has an event for the timeout of each request. The event
    // remains queued until that time, even if the request is served earlier.
    let open_us = held_us.max(life_us).max(job.timeout.map_or(0.0, |timeout| float(timeout.us)));
    let alive = job.closed.map_or(per_second * peak * open_us / 1e6, |closed| f64::from(closed.clients.0));
    Demand { each: whole(each), alive: whole(alive) }
}

/// A positive number, rounded up.
fn whole(number: f64) -> u64 {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "larger values exceed every limit"
    )]
    let whole = number.ceil() as u64;
    whole
}

/// Counts the clients of a job and its copies at these positions.
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

/// The maximum number of members of a task's subset if the job has `tasks` tasks. With fewer tasks,
/// each task may have more members, but all tasks together do not have more.
fn most_members(
    scenario: &Scenario,
    job: &JobTable,
    ScenarioRun { differs: run, .. }: &ScenarioRun,
    tasks: u64,
) -> u64 {
    let backends = u64::from(scenario.most_backends());
    match run.size.unwrap_or(job.size).0 {
        // An arc is longer than the size by at most one task's part of the ring and two edges.
        Size::Fixed(size) if run.algorithm.unwrap_or(job.algorithm).0.is_aperture() => {
            (u64::from(size) + backends.div_ceil(tasks) + 2).min(backends)
        }
        Size::Fixed(size) => u64::from(size).min(backends),
        Size::Auto { .. } | Size::Band(_) => backends,
    }
}

/// Returns whether the sizes of a job's subsets follow load in a run.
fn follows_load(job: &JobTable, ScenarioRun { differs: run, .. }: &ScenarioRun) -> bool {
    matches!(run.size.unwrap_or(job.size).0, Size::Band(_))
}

/// Rejects the number `wanted` if it is above the limit `allowed`.
fn limit(span: &Range<usize>, what: &str, wanted: u64, allowed: u64) -> Result<(), SpannedFault> {
    if wanted <= allowed {
        return Ok(());
    }
    Err((span.clone(), format!("there would be {wanted} {what}: at most {allowed} are possible")))
}
