//! The events of virtual time: backends are added, removed and restarted, and clients receive these
//! changes with a delay, while they continue to connect.
//!
//! The parts in reading order: the whole state, in this file; changes of the `backends`; operator
//! actions on `daemons`; the `jobs`; the lists, reports and connections of their `clients`; the
//! `requests` that the clients send; the work of the machines (`machine_work`); how clients react
//! to failures (`connect_results`); the backends' reports of their load (`loads`); rows and totals
//! (`measures`); and the effect of chance alone (`floor`). This module must not choose a backend:
//! the [`SimulatedClient`] chooses it.

mod backends;
mod clients;
mod connect_results;
mod daemons;
mod floor;
mod jobs;
mod loads;
mod machine_work;
mod measures;
mod requests;

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
use connect_results::Judged;
use floor::Floor;
use jobs::SimulatedJob;
use loads::LoadReports;
use machine_work::SimulatedServer;
use requests::{RequestRef, Requests};

use crate::metrics::float;

/// The counts of one run.
#[derive(Debug)]
pub struct Played {
    /// A row for every step.
    pub rows: Vec<StepRow>,
    pub total: Total,
    /// The measurements of machines and requests.
    pub load: LoadTotal,
    /// The rows and the total of ejections.
    pub ejections: (Vec<EjectionRow>, EjectionTotal),
}

pub fn play(scenario: &Scenario, run: &ScenarioRun, seed: u64, subset_seed: Option<u64>) -> Played {
    let mut world = Simulation::new(scenario, run, seed, subset_seed);
    let end = scenario.duration.us;
    let (mut rows, mut ejections) = (Vec::new(), Vec::new());
    let mut row_end = scenario.step.us;
    // Bound: the scenario's reader has limited arrivals, notices and restarts.
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

/// An event at a point of virtual time. Large and rare parts are boxed, because the queue moves
/// events often.
#[derive(Debug)]
enum SimulationEvent {
    /// The resize at this position of the scenario's resizes begins.
    Resize(usize),
    /// A batch of a restart begins a stage.
    Restart(Box<BatchRestart>),
    /// The backends of the `fail` table at this position begin to fail. `times` is the number of
    /// failures that are left, including this one.
    Fail { fail: usize, times: u32 },
    /// The failing backends recover.
    Recover,
    /// From now on, the list has the weights of the `reweight` table at this position.
    Reweight(usize),
    /// An operator gives the command of the `switch` table at this position.
    Switch(usize),
    /// All daemons save their learnt state.
    SaveState,
    /// All daemons are replaced. `is_saved` is set if they have saved their state.
    Upgrade { is_saved: bool },
    /// Backends with these indexes stop. They have already left the list.
    Stop(Range<u32>),
    /// A client receives a list.
    ReceiveList(Box<ListNotice>),
    /// A connection is established.
    Ready { client: u32, slot: u32, serial: u32 },
    /// A client receives a backend's own report about its readiness.
    ReceiveReport { client: u32, backend: u32, report: u32, is_lame: bool },
    /// A connect or request begins.
    Arrive(u32),
    /// A user's request has ended, so the user pauses until the next request.
    Think(u32),
    /// A client retries a request.
    TryAgain(RequestRef),
    /// A client sends the next request on a connection that stays open.
    Next(RequestRef),
    /// A connect or request ends.
    Finish(RequestRef),
    /// A client gives up an unanswered connect.
    GiveUp(RequestRef),
    /// A client gives up a request.
    TimeOut(RequestRef),
    /// A machine may have finished a request.
    Wake(u32),
    /// The neighbours of a machine begin to use another part of its CPU time.
    Antagonize(u32),
    /// A started backend has its full speed from now on.
    WarmedUp(u32),
    /// A backend reports its load.
    ReportLoad(u32),
    /// A client adjusts its weights to load.
    TickControl(u32),
    /// A client adjusts its size to load.
    LookAtFlows(u32),
    /// The measurement of load and latency begins.
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

/// A batch of a restart, and the stage that the batch begins. The restart covers only backends with
/// indexes below `last`.
#[derive(Debug)]
struct BatchRestart {
    restart: usize,
    batch: Range<u32>,
    last: u32,
    stage: RestartStage,
}

/// The next stage of a batch.
#[derive(Clone, Copy, Debug)]
enum RestartStage {
    LameDuck,
    Down,
    Up,
}

#[derive(Debug)]
struct SimulatedBackend {
    weight: u16,
    /// Whether the backend belongs to the service, even if it does not run.
    exists: bool,
    /// The state that the source reports; `None` if the source does not list the backend.
    reported: Option<EndpointState>,
    running: bool,
    /// How the backend fails while it runs; `None` if it does not fail.
    failing: Option<FailMode>,
    /// Whether the backend's own report marks it as a lame duck.
    is_lame: bool,
    /// How often the backend's own report has changed. This is the number of its newest report.
    reports: u32,
    /// When the backend stops, if it has left the list.
    stops_at: Option<u64>,
    /// The time since which the backend belongs to the service.
    exists_since: u64,
    /// The time since which the backend has been running and [`Self::is_wanted`] has been true;
    /// `None` if one of these conditions is false.
    wanted_since: Option<u64>,
    connections: u64,
    /// The links to the backend: for each, the client, and the slot in this client.
    holders: BTreeSet<(u32, u32)>,
    /// Arrivals since the last row.
    step_load: u64,
    /// All arrivals.
    load: u64,
    /// Arrivals that the backend answered with an error or rejected.
    errors: u64,
    /// Arrivals at the backend while it hung.
    hung: u64,
}

struct Simulation<'a> {
    scenario: &'a Scenario,
    run: &'a ScenarioRun,
    seed: u64,
    /// How clients receive the reports of backends; `None` if backends send no reports.
    reports: Option<ReportsTable>,
    now: u64,
    queue: Queue<SimulationEvent>,
    backends: Vec<SimulatedBackend>,
    /// The machine of each backend.
    machines: Vec<SimulatedServer>,
    /// The load measurements and load reports of each backend.
    reporting: Vec<LoadReports>,
    count: u32,
    jobs: Vec<SimulatedJob>,
    /// All clients that have ever existed; `None` for a client that was removed.
    clients: Vec<Option<Box<SimulatedClient>>>,
    requests: Requests,
    version: u64,
    /// The backends that currently fail.
    failing: Vec<u32>,
    /// The time after which clients give up unanswered connects to failing backends.
    timeout_us: u64,
    /// The utilization that backends report in mode `lies`, in thousandths.
    lie: u32,
    /// The operator's current setting of load control.
    switch: Switch,
    judged: Judged,
    /// The durations of requests served since measuring began, in microseconds.
    latency: Histogram<u64>,
    floor: Floor,
    counts: TrafficCounts,
    /// The counts when measuring began.
    counts_before: TrafficCounts,
    at_last_row: (u64, TrafficCounts),
    /// The current counts of each job of the file.
    by_job: Vec<JobCounts>,
    /// The counts of each job of the file at the last row.
    by_job_at_last_row: Vec<JobCounts>,
    connections_at_start: u64,
    /// Tables that clients have built since the last row because factors had changed.
    tables: u64,
}

impl<'a> Simulation<'a> {
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
        let most = u32::try_from(scenario.weights.len()).expect("the number of backends fits into 32 bits");
        let speeds = scenario.machines.speeds(most, &mut SplitMix64::new(mix64(&[seed, 4])));
        let table = &scenario.machines;
        let machine = |(index, speed): (usize, &f64)| Machine::new(table.cores, *speed, table.quota(index));
        let machines: Vec<Machine> = speeds.iter().enumerate().map(machine).collect();
        let at_start = scenario.backends as usize;
        let weights: Vec<f64> = scenario.weights[..at_start].iter().copied().map(f64::from).collect();
        // A backend with weight 0 contributes nothing to the capacity.
        let capacity_of =
            |(machine, weight): (&Machine, &f64)| if *weight > 0.0 { machine.capacity() } else { 0.0 };
        let capacities: Vec<f64> = machines[..at_start].iter().zip(&weights).map(capacity_of).collect();
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
            // The histogram has a precision of three digits. Latencies above its maximum are
            // recorded as the maximum.
            latency: Histogram::new_with_max(MAX_LATENCY_US, 3).expect("the bounds are valid"),
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
        // Connections that are open at the start are not included in the counts of opened
        // connections.
        world.counts = TrafficCounts::default();
        world.by_job.clone_from(&world.by_job_at_last_row);
        for client in 0..world.clients.len() {
            world.open_lasting(clients::number(client));
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
            let is_saved = upgrade.kept.0.is_some();
            upgrade
                .kept
                .0
                .iter()
                .for_each(|age| world.queue.push(upgrade.at.us - age.us, SimulationEvent::SaveState));
            world.queue.push(upgrade.at.us, SimulationEvent::Upgrade { is_saved });
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

    /// The counts of the job at this position in `Scenario::jobs`. All copies of a job have the
    /// same counts.
    fn counts_of_job(&mut self, job: usize) -> &mut JobCounts {
        &mut self.by_job[self.scenario.named[job]]
    }

    /// Counts a connection that a client of a job has opened.
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
            SimulationEvent::SaveState => self.save_state(),
            SimulationEvent::Upgrade { is_saved } => self.replace_daemons(is_saved),
            SimulationEvent::Stop(indexes) => {
                for index in indexes {
                    if self.backends[index as usize].stops_at == Some(self.now) {
                        self.stop(index);
                    }
                }
            }
            SimulationEvent::ReceiveList(notice) => {
                self.apply_list(notice.client, &notice.assignments, notice.version);
            }
            SimulationEvent::Ready { client, slot, serial } => self.ready(client, slot, serial),
            SimulationEvent::Arrive(client) => self.arrive(client),
            SimulationEvent::ReceiveReport { client, backend, report, is_lame } => {
                self.on_report(client, backend, report, is_lame);
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

/// The maximum latency in the histogram: a day.
const MAX_LATENCY_US: u64 = 24 * 3600 * 1_000_000;

impl SimulatedBackend {
    /// Whether the backend should get new traffic, according to the source and the backend's own
    /// reports.
    fn is_wanted(&self) -> bool {
        self.weight > 0 && self.reported == Some(EndpointState::Healthy) && !self.is_lame
    }

    /// Returns whether the backend accepts connections.
    const fn is_up(&self) -> bool {
        self.running && (self.failing.is_none() || matches!(self.failing, Some(how) if how.is_up()))
    }

    /// Whether the backend has belonged to the service since the start, and has a weight above 0.
    const fn is_lasting(&self) -> bool {
        self.exists && self.exists_since == 0 && self.weight > 0
    }

    fn per_weight(&self, load: u64) -> f64 {
        float(load) / f64::from(self.weight)
    }
}
