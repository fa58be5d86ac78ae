//! What happens in virtual time: backends come, go and restart, clients hear of it later, and connect all the while.
//!
//! In reading order: the whole state, here; what becomes of the `backends`; what operators do with `daemons`; the `jobs` and what their
//! `clients` hear and keep, and the `requests` that they send; the machines that do the work, `serving`; what clients make of failures,
//! `judging`; what backends report of their load, `loads`; and the rows and totals of it, `measures`, beside what chance alone would
//! give, `floor`. Must not choose a backend: the [`SimulatedClient`] does.

mod backends;

mod clients;

mod daemons;

mod jobs;

mod requests;

mod serving;

mod judging;

mod floor;

mod loads;

mod measures;

use std::collections::BTreeSet;
use std::ops::Range;
use std::rc::Rc;

use hdrhistogram::Histogram;
use lb_core::control::Switch;
use lb_core::endpoint::EndpointState;
use lb_core::subset::random::{SplitMix64, mix64};

use super::assignments::JobAssignments;
use super::client::SimulatedClient;
use super::document::{FailMode, ReportsTable};
use super::ejections::{EjectionRow, EjectionTotal};
use super::machine::Machine;
use super::queue::Queue;
use super::scenario::{NewSize, Scenario, ScenarioRun};
use super::tally::{JobCounts, LoadTotal, StepRow, Total, TrafficCounts};
use floor::Floor;
use jobs::SimulatedJob;
use judging::Judged;
use loads::LoadReports;
use requests::{RequestRef, Requests};
use serving::SimulatedServer;

use crate::metrics::float;

/// What was counted of one run.
#[derive(Debug)]
pub struct Played {
    /// A row for every step.
    pub rows: Vec<StepRow>,
    /// The whole.
    pub total: Total,
    /// What was measured of machines and requests.
    pub load: LoadTotal,
    /// What was counted of ejections, likewise.
    pub ejections: (Vec<EjectionRow>, EjectionTotal),
}

/// Plays one run of a scenario.
pub fn play(scenario: &Scenario, run: &ScenarioRun, seed: u64, subset_seed: Option<u64>) -> Played {
    let mut world = World::new(scenario, run, seed, subset_seed);
    let end = scenario.duration.us;
    let (mut rows, mut ejections) = (Vec::new(), Vec::new());
    let mut row_end = scenario.step.us;
    // Bound: arrivals, notices and restarts were counted when the scenario was read.
    while let Some((at_us, event)) = world.queue.pop_before(end) {
        while row_end <= at_us {
            rows.push(world.row(row_end));
            ejections.push(world.ejection_row(row_end));
            row_end += scenario.step.us;
        }
        world.now = at_us;
        world.handle(event);
    }
    while row_end < end {
        rows.push(world.row(row_end));
        ejections.push(world.ejection_row(row_end));
        row_end += scenario.step.us;
    }
    rows.push(world.row(end));
    ejections.push(world.ejection_row(end));
    let total = world.total(&rows);
    let load = world.load_total();
    Played { rows, total, load, ejections: (ejections, world.ejection_total()) }
}

/// Something that happens at a time. Small, because a heap moves events all the time: what is large and rare is boxed.
#[derive(Debug)]
enum SimulationEvent {
    /// The resize at this position.
    Resize(usize),
    /// A batch of the restart at this position enters a stage.
    Restart(Box<BatchRestart>),
    /// Backends begin to fail, as the table at this position says, for so many times more.
    Fail { fail: usize, times: u32 },
    /// The backends that fail are well again.
    Recover,
    /// The weights at this position are in the list from now on.
    Reweight(usize),
    /// An operator says what the table at this position says.
    Switch(usize),
    /// All daemons keep what they have learnt.
    KeepLearnt,
    /// All daemons are replaced, and have kept something or not.
    Upgrade { is_kept: bool },
    /// Backends of these indexes that are no longer reported stop.
    Stop(Range<u32>),
    /// A client hears of a list.
    Learn(Box<ListNotice>),
    /// A connection is up.
    Ready { client: u32, slot: u32, serial: u32 },
    /// A client hears a backend's own report.
    Hear { client: u32, backend: u32, report: u32, is_lame: bool },
    /// A connect or request begins.
    Arrive(u32),
    /// A user's request has ended.
    Think(u32),
    /// A request is sent once more.
    TryAgain(RequestRef),
    /// The next request on a connection that is kept.
    Next(RequestRef),
    /// A connect or request ends.
    Finish(RequestRef),
    /// A client gives up a connect that nobody answers.
    GiveUp(RequestRef),
    /// A client gives up a request.
    TimeOut(RequestRef),
    /// Something is done on a machine.
    Wake(u32),
    /// Neighbours take another part of a machine.
    Antagonize(u32),
    /// A backend has started long enough ago.
    WarmedUp(u32),
    /// A backend reports its load.
    ReportLoad(u32),
    /// A client's weights follow load.
    TickControl(u32),
    /// A client's size follows load.
    LookAtFlows(u32),
    /// Measuring begins.
    Measure,
}

const _: () = assert!(size_of::<SimulationEvent>() <= 16);

/// A list on its way to a client.
#[derive(Debug)]
struct ListNotice {
    client: u32,
    assignments: Rc<JobAssignments>,
    version: u64,
}

/// A batch of a restart, and the stage that it enters. Batches that begin at `last` or after it do not exist.
#[derive(Debug)]
struct BatchRestart {
    restart: usize,
    batch: Range<u32>,
    last: u32,
    stage: RestartStage,
}

/// What a batch of a restart does next.
#[derive(Clone, Copy, Debug)]
enum RestartStage {
    LameDuck,
    Down,
    Up,
}

#[derive(Debug)]
struct SimulatedBackend {
    weight: u16,
    /// Whether the service has it, running or not.
    exists: bool,
    /// The state that the source reports, if it reports the backend at all.
    reported: Option<EndpointState>,
    running: bool,
    /// How it fails, if it does although it runs.
    failing: Option<FailMode>,
    /// Whether it says of itself that it is a lame duck.
    is_lame: bool,
    /// How often it has said something else than before.
    reports: u32,
    /// When it stops, if it is no longer reported.
    stops_at: Option<u64>,
    /// Since when the service has it.
    exists_since: u64,
    /// Since when it runs and the source asks for traffic to it.
    wanted_since: Option<u64>,
    connections: u64,
    /// The links to it: client, and slot there.
    holders: BTreeSet<(u32, u32)>,
    /// Arrivals since the last row.
    step_load: u64,
    /// Arrivals in all, those of them that it answered with an error or rejected, and those at a time when it hung.
    load: u64,
    errors: u64,
    hung: u64,
}

struct World<'a> {
    scenario: &'a Scenario,
    run: &'a ScenarioRun,
    seed: u64,
    /// How clients hear what backends say of themselves, if these do.
    reports: Option<ReportsTable>,
    now: u64,
    queue: Queue<SimulationEvent>,
    backends: Vec<SimulatedBackend>,
    /// What each of them runs on.
    machines: Vec<SimulatedServer>,
    /// What each backend has measured and sent of its load.
    reporting: Vec<LoadReports>,
    count: u32,
    jobs: Vec<SimulatedJob>,
    /// Every client there ever was; those that are gone are empty.
    clients: Vec<Option<Box<SimulatedClient>>>,
    requests: Requests,
    version: u64,
    /// The backends that fail now.
    failing: Vec<u32>,
    /// After how long a connect to them is given up, if they are silent.
    timeout_us: u64,
    /// The utilization that they report if they lie, in thousandths.
    lie: u32,
    /// What an operator has said of the laws.
    switch: Switch,
    judged: Judged,
    /// Times of the requests that were served since measuring began, in microseconds.
    latency: Histogram<u64>,
    floor: Floor,
    counts: TrafficCounts,
    /// What was counted before measuring began.
    counts_before: TrafficCounts,
    at_last_row: (u64, TrafficCounts),
    /// What has happened to each job of the file, and had happened at the last row.
    by_job: Vec<JobCounts>,
    by_job_at_last_row: Vec<JobCounts>,
    connections_at_start: u64,
    /// Tables that clients have made because factors had moved, since the last row.
    tables: u64,
}

impl<'a> World<'a> {
    fn new(scenario: &'a Scenario, run: &'a ScenarioRun, seed: u64, subset_seed: Option<u64>) -> Self {
        let backend = |weight: &u16| SimulatedBackend {
            weight: *weight,
            exists: false,
            reported: None,
            running: false,
            failing: None,
            is_lame: false,
            reports: 0,
            stops_at: None,
            exists_since: 0,
            wanted_since: None,
            connections: 0,
            holders: BTreeSet::new(),
            step_load: 0,
            load: 0,
            errors: 0,
            hung: 0,
        };
        let jobs = scenario.jobs.iter().enumerate();
        let jobs = jobs
            .map(|(position, table)| SimulatedJob::new(scenario, run, position, table, seed, subset_seed));
        let most = u32::try_from(scenario.weights.len()).expect("backends are counted in 32 bits");
        let speeds = scenario.machines.speeds(most, &mut SplitMix64::new(mix64(&[seed, 4])));
        let table = &scenario.machines;
        let machine = |(index, speed): (usize, &f64)| Machine::new(table.cores, *speed, table.quota(index));
        let machines: Vec<Machine> = speeds.iter().enumerate().map(machine).collect();
        let at_start = scenario.backends as usize;
        let weights: Vec<f64> = scenario.weights[..at_start].iter().copied().map(f64::from).collect();
        // What asks for no traffic has no share of it.
        let asks = |(machine, weight): (&Machine, &f64)| if *weight > 0.0 { machine.capacity() } else { 0.0 };
        let capacities: Vec<f64> = machines[..at_start].iter().zip(&weights).map(asks).collect();
        let floor = Floor::new(&weights, &capacities, seed);
        let server = |(index, machine)| SimulatedServer::new(machine, scenario.machines.queue, seed, index);
        let by_job: Vec<JobCounts> =
            scenario.names.iter().map(|job| JobCounts { job: job.clone(), ..JobCounts::default() }).collect();
        let mut world = Self {
            scenario,
            run,
            seed,
            reports: run.reports(scenario),
            now: 0,
            queue: Queue::default(),
            backends: scenario.weights.iter().map(backend).collect(),
            machines: (0..).zip(machines).map(server).collect(),
            reporting: scenario.weights.iter().map(|_| LoadReports::default()).collect(),
            count: 0,
            jobs: jobs.collect(),
            clients: Vec::new(),
            requests: Requests::default(),
            version: 0,
            failing: Vec::new(),
            timeout_us: 0,
            lie: 0,
            switch: Switch::On,
            judged: Judged::default(),
            // Three digits, and whatever is longer counts as the longest.
            latency: Histogram::new_with_max(MAX_LATENCY_US, 3).expect("the bounds are fine"),
            floor,
            counts: TrafficCounts::default(),
            counts_before: TrafficCounts::default(),
            at_last_row: (0, TrafficCounts::default()),
            by_job_at_last_row: by_job.clone(),
            by_job,
            connections_at_start: 0,
            tables: 0,
        };
        world.set_backends(scenario.backends, 0);
        for job in 0..world.jobs.len() {
            world.set_tasks(job, world.jobs[job].table.tasks.0);
        }
        world.connections_at_start = world.open();
        // What is open at the start counts as opened before it.
        world.counts = TrafficCounts::default();
        world.by_job.clone_from(&world.by_job_at_last_row);
        for client in 0..world.clients.len() {
            world.open_kept(clients::number(client));
        }
        for (position, resize) in scenario.resizes.iter().enumerate() {
            world.queue.push(resize.at.us, SimulationEvent::Resize(position));
        }
        for (position, restart) in scenario.restarts.iter().enumerate() {
            let (batch, last, stage) = (0..restart.batch.0, u32::MAX, RestartStage::LameDuck);
            let first = BatchRestart { restart: position, batch, last, stage };
            world.queue.push(restart.at.us, SimulationEvent::Restart(Box::new(first)));
        }
        for (position, fail) in scenario.fails.iter().enumerate() {
            world.queue.push(fail.at.us, SimulationEvent::Fail { fail: position, times: fail.times });
        }
        for (position, reweight) in scenario.reweights.iter().enumerate() {
            world.queue.push(reweight.at.us, SimulationEvent::Reweight(position));
        }
        for (position, switch) in scenario.switches.iter().enumerate() {
            world.queue.push(switch.at.us, SimulationEvent::Switch(position));
        }
        for upgrade in &scenario.upgrades {
            let is_kept = upgrade.kept.0.is_some();
            upgrade
                .kept
                .0
                .iter()
                .for_each(|age| world.queue.push(upgrade.at.us - age.us, SimulationEvent::KeepLearnt));
            world.queue.push(upgrade.at.us, SimulationEvent::Upgrade { is_kept });
        }
        if run.follows_load(&scenario.jobs) {
            world.begin_to_report();
        }
        world.queue.push(scenario.measure_from.us, SimulationEvent::Measure);
        if scenario.machines.antagonist.is_some() && scenario.has_costs() {
            (0..most).for_each(|backend| world.antagonize(backend));
        }
        world
    }

    /// What is counted of the job at this position in the file.
    fn counts_of_job(&mut self, job: usize) -> &mut JobCounts {
        &mut self.by_job[self.scenario.named[job]]
    }

    /// A client of a job has opened a connection.
    fn note_opened(&mut self, job: usize) {
        self.counts.opened += 1;
        self.counts_of_job(job).opened += 1;
    }

    fn handle(&mut self, event: SimulationEvent) {
        match event {
            SimulationEvent::Resize(position) => match self.scenario.resizes[position].to.clone() {
                NewSize::Backends(count, lame_duck) => {
                    self.set_backends(count, self.run.differs.lame_duck.unwrap_or(lame_duck).us);
                    self.publish();
                }
                NewSize::Tasks(jobs, tasks) => jobs.for_each(|job| self.set_tasks(job, tasks)),
            },
            SimulationEvent::Restart(batch) => self.restart(*batch),
            SimulationEvent::Fail { fail, times } => self.fail(fail, times),
            SimulationEvent::Recover => self.recover(),
            SimulationEvent::Reweight(position) => self.reweight(self.scenario.reweights[position]),
            SimulationEvent::Switch(position) => self.switch_laws(self.scenario.switches[position].load.0),
            SimulationEvent::KeepLearnt => self.keep_learnt(),
            SimulationEvent::Upgrade { is_kept } => self.replace_daemons(is_kept),
            SimulationEvent::Stop(indexes) => {
                for index in indexes {
                    if self.backends[index as usize].stops_at == Some(self.now) {
                        self.stop(index);
                    }
                }
            }
            SimulationEvent::Learn(notice) => self.learn(notice.client, &notice.assignments, notice.version),
            SimulationEvent::Ready { client, slot, serial } => self.ready(client, slot, serial),
            SimulationEvent::Arrive(client) => self.arrive(client),
            SimulationEvent::Hear { client, backend, report, is_lame } => {
                self.hear(client, backend, report, is_lame);
            }
            SimulationEvent::Think(client) => self.think(client),
            SimulationEvent::TryAgain(request) => self.try_again(request),
            SimulationEvent::Next(request) => self.next_request(request),
            SimulationEvent::Finish(request) => self.finish(request),
            SimulationEvent::GiveUp(request) => self.give_up(request),
            SimulationEvent::TimeOut(request) => self.time_out(request),
            SimulationEvent::Wake(backend) => self.wake(backend),
            SimulationEvent::Antagonize(backend) => self.antagonize(backend),
            SimulationEvent::WarmedUp(backend) => self.change_speed(backend),
            SimulationEvent::ReportLoad(backend) => self.report_load(backend),
            SimulationEvent::TickControl(client) => self.tick_control(client),
            SimulationEvent::LookAtFlows(client) => self.look_at_flows(client),
            SimulationEvent::Measure => self.measure(),
        }
    }
}

/// The longest latency that is told from longer ones: a day.
const MAX_LATENCY_US: u64 = 24 * 3600 * 1_000_000;

impl SimulatedBackend {
    /// Whether the source asks for traffic to it.
    fn is_wanted(&self) -> bool {
        self.weight > 0 && self.reported == Some(EndpointState::Healthy) && !self.is_lame
    }

    /// Whether it serves.
    const fn is_up(&self) -> bool {
        self.running && (self.failing.is_none() || matches!(self.failing, Some(how) if how.is_up()))
    }

    /// Whether the service has had it from the start on, and asks for traffic to it.
    const fn is_lasting(&self) -> bool {
        self.exists && self.exists_since == 0 && self.weight > 0
    }

    fn per_weight(&self, load: u64) -> f64 {
        float(load) / f64::from(self.weight)
    }
}
