//! What happens in virtual time: backends come, go and restart, clients hear of it later, and connect all the while.
//!
//! In reading order: the whole state, here; what becomes of the `backends`; what clients do, `sending`, and
//! what they make of failures, `judging`; and the rows and totals of it, `measures`. Must not choose a backend: the [`Client`] does.

mod backends;

mod sending;

mod judging;

mod measures;

use std::collections::BTreeSet;
use std::ops::Range;
use std::rc::Rc;

use lb_core::endpoint::EndpointState;
use lb_core::service::{Service, Subset};

use super::assignments::{Assignments, Shares};
use super::client::{Client, SERVICE};
use super::document::{FailMode, JobTable, Traffic};
use super::ejections::{EjectionRow, EjectionTotal};
use super::queue::Queue;
use super::scenario::{NewSize, Run, Scenario};
use super::tally::{Counts, Row, Total};
use judging::Judged;

/// What was counted of one run.
#[derive(Debug)]
pub struct Played {
    /// A row for every step.
    pub rows: Vec<Row>,
    /// The whole.
    pub total: Total,
    /// What was counted of ejections, likewise.
    pub ejections: (Vec<EjectionRow>, EjectionTotal),
}

/// Plays one run of a scenario.
pub fn play(scenario: &Scenario, run: &Run, seed: u64) -> Played {
    let mut world = World::new(scenario, run, seed);
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
    Played { rows, total, ejections: (ejections, world.ejection_total()) }
}

/// Something that happens at a time.
#[derive(Debug)]
enum Event {
    /// The resize at this position.
    Resize(usize),
    /// A batch of the restart at this position enters a stage.
    Restart { restart: usize, batch: Range<u32>, last: u32, stage: RestartStage },
    /// Backends begin to fail, as the table at this position says, for so many times more.
    Fail { fail: usize, times: u32 },
    /// The backends that fail are well again.
    Recover,
    /// Backends of these indexes that are no longer reported stop.
    Stop(Range<u32>),
    /// A client hears of a list.
    Learn { client: u32, assignments: Rc<Assignments>, version: u64 },
    /// A connection is up.
    Ready { client: u32, slot: u32, serial: u32 },
    /// A connect or request begins.
    Arrive(u32),
    /// A connect or request ends.
    Finish { client: u32, slot: u32, serial: u32 },
    /// A client gives up a connect that nobody answers.
    GiveUp { client: u32, slot: u32, is_trial: bool },
}

/// What a batch of a restart does next.
#[derive(Clone, Copy, Debug)]
enum RestartStage {
    LameDuck,
    Down,
    Up,
}

#[derive(Debug)]
struct Backend {
    weight: u16,
    /// Whether the service has it, running or not.
    exists: bool,
    /// The state that the source reports, if it reports the backend at all.
    reported: Option<EndpointState>,
    running: bool,
    /// How it fails, if it does although it runs.
    failing: Option<FailMode>,
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
    /// Arrivals in all.
    load: u64,
}

/// A job during a run.
#[derive(Debug)]
struct Job {
    table: JobTable,
    shares: Shares,
    service: Service,
    /// The client of each task.
    clients: Vec<u32>,
}

struct World<'a> {
    scenario: &'a Scenario,
    run: &'a Run,
    seed: u64,
    now: u64,
    queue: Queue<Event>,
    backends: Vec<Backend>,
    count: u32,
    jobs: Vec<Job>,
    /// Every client there ever was; those that are gone are empty.
    clients: Vec<Option<Box<Client>>>,
    version: u64,
    /// The backends that fail now.
    failing: Vec<u32>,
    /// After how long a connect to them is given up, if they are silent.
    timeout_us: u64,
    judged: Judged,
    counts: Counts,
    at_last_row: (u64, Counts),
    connections_at_start: u64,
}

impl<'a> World<'a> {
    fn new(scenario: &'a Scenario, run: &'a Run, seed: u64) -> Self {
        let backend = |weight: &u16| Backend {
            weight: *weight,
            exists: false,
            reported: None,
            running: false,
            failing: None,
            stops_at: None,
            exists_since: 0,
            wanted_since: None,
            connections: 0,
            holders: BTreeSet::new(),
            step_load: 0,
            load: 0,
        };
        let jobs = scenario.jobs.iter().map(|table| {
            let algorithm = run.algorithm.unwrap_or(table.algorithm.0);
            let seed = table.seed.map(|seed| seed.0);
            let size = run.size.unwrap_or(table.size.0);
            let seed = seed.unwrap_or_else(|| lb_core::service::seed(&table.name.0, &scenario.service));
            let service = Service::new(&scenario.service, SERVICE, Subset::Sized { algorithm, size }, seed);
            let ejection = run.ejection.or(table.ejection).and_then(|choice| choice.0);
            // Connections that are kept are made whoever fails: nothing is chosen that could be judged.
            let ejection = ejection.filter(|_| table.traffic == Traffic::Connections);
            let service = Service { ejection, ..service };
            let shares = run.shares.unwrap_or(table.shares);
            Job { table: table.clone(), shares, service, clients: Vec::new() }
        });
        let mut world = Self {
            scenario,
            run,
            seed,
            now: 0,
            queue: Queue::default(),
            backends: scenario.weights.iter().map(backend).collect(),
            count: 0,
            jobs: jobs.collect(),
            clients: Vec::new(),
            version: 0,
            failing: Vec::new(),
            timeout_us: 0,
            judged: Judged::default(),
            counts: Counts::default(),
            at_last_row: (0, Counts::default()),
            connections_at_start: 0,
        };
        world.set_backends(scenario.backends, 0);
        for job in 0..world.jobs.len() {
            world.set_tasks(job, world.jobs[job].table.tasks.0);
        }
        world.connections_at_start = world.open();
        // What is open at the start counts as opened before it.
        world.counts = Counts::default();
        for (position, resize) in scenario.resizes.iter().enumerate() {
            world.queue.push(resize.at.us, Event::Resize(position));
        }
        for (position, restart) in scenario.restarts.iter().enumerate() {
            let event = Event::Restart {
                restart: position,
                batch: 0..restart.batch.0,
                last: u32::MAX,
                stage: RestartStage::LameDuck,
            };
            world.queue.push(restart.at.us, event);
        }
        for (position, fail) in scenario.fails.iter().enumerate() {
            world.queue.push(fail.at.us, Event::Fail { fail: position, times: fail.times });
        }
        world
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Resize(position) => match self.scenario.resizes[position].to.clone() {
                NewSize::Backends(count, lame_duck) => {
                    self.set_backends(count, self.run.lame_duck.unwrap_or(lame_duck).us);
                    self.publish();
                }
                NewSize::Tasks(jobs, tasks) => jobs.for_each(|job| self.set_tasks(job, tasks)),
            },
            Event::Restart { restart, batch, last, stage } => self.restart(restart, batch, last, stage),
            Event::Fail { fail, times } => self.fail(fail, times),
            Event::Recover => self.recover(),
            Event::Stop(indexes) => {
                for index in indexes {
                    if self.backends[index as usize].stops_at == Some(self.now) {
                        self.stop(index);
                    }
                }
            }
            Event::Learn { client, assignments, version } => self.learn(client, &assignments, version),
            Event::Ready { client, slot, serial } => self.ready(client, slot, serial),
            Event::Arrive(client) => self.arrive(client),
            Event::Finish { client, slot, serial } => self.finish(client, slot, serial),
            Event::GiveUp { client, slot, is_trial } => self.give_up(client, slot, is_trial),
        }
    }
}

impl Backend {
    /// Whether the source asks for traffic to it.
    fn is_wanted(&self) -> bool {
        self.weight > 0 && self.reported == Some(EndpointState::Healthy)
    }

    /// Whether it serves.
    const fn is_up(&self) -> bool {
        self.running && self.failing.is_none()
    }

    fn per_weight(&self, load: u64) -> f64 {
        float(load) / f64::from(self.weight)
    }
}

impl Job {
    const fn holds_links(&self) -> bool {
        matches!(self.table.traffic, Traffic::Requests)
    }
}

#[expect(clippy::cast_precision_loss, reason = "counts far below 2^53")]
const fn float(count: u64) -> f64 {
    count as f64
}
