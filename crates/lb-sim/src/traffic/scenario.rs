//! A scenario that can be simulated: its values are consistent, it fits into memory, and a
//! simulation takes at most a minute or two.
//!
//! `cost` computes the cost of a simulation, before memory is allocated for it; `fails` reads the
//! failures of backends. An error names the file, the line, the value and the correction.

mod cost;
mod fails;
mod jobs;
mod machines;
mod operator;

use std::collections::BTreeMap;
use std::ops::Range;

use thiserror::Error;
use toml::Spanned;

use super::document::operator::{ReweightTable, SwitchTable, UpgradeTable};
use super::document::{
    Backends, JobTable, PropagationDelay, ReportsTable, ResizeTable, RestartTable, RunTable,
    ScenarioDocument, Traffic, WeightTable,
};
use super::values::Span;
pub use fails::{Fail, FailPart};
pub use machines::Machines;

#[derive(Debug)]
pub struct Scenario {
    /// The name of a shipped scenario, or the file name without its extension.
    pub name: String,
    /// A description in one line.
    pub title: String,
    /// The seed of all random times.
    pub seed: u64,
    /// How many seeds are simulated.
    pub seeds: u32,
    /// The length of the scenario in virtual time.
    pub duration: Span,
    /// The length of time that one row of the results covers.
    pub step: Span,
    /// The time at which the measurement of load and latency begins.
    pub measure_from: Span,
    /// The delay until clients receive a change of the fleet.
    pub notice: PropagationDelay,
    /// How clients receive the reports of backends; `None` if backends send no reports.
    pub reports: Option<ReportsTable>,
    pub service: String,
    /// The number of backends at the start.
    pub backends: u32,
    /// The weight of every backend that ever exists, in the order of indexes.
    pub weights: Vec<u16>,
    /// The machines of the backends.
    pub machines: Machines,
    /// The jobs. Each copy is a separate job.
    pub jobs: Vec<JobTable>,
    /// The names of jobs as in the file.
    pub names: Vec<String>,
    /// For each of `jobs`, the position of the job's name in `names`.
    pub named: Vec<usize>,
    /// Resizes, in order of time.
    pub resizes: Vec<Resize>,
    /// Rolling restarts, in order of time.
    pub restarts: Vec<RestartTable>,
    /// Failures of backends, in order of time.
    pub fails: Vec<Fail>,
    /// Weight changes in the list, in order of time.
    pub reweights: Vec<ReweightTable>,
    /// Operator commands that switch load control, in order of time.
    pub switches: Vec<SwitchTable>,
    /// Replacements of daemons, in order of time.
    pub upgrades: Vec<UpgradeTable>,
    /// The variants; there is at least one.
    pub runs: Vec<ScenarioRun>,
    /// Whether rows record the values of each backend. A file cannot enable this, because many rows
    /// with many backends would take too much memory.
    pub retains_traces: bool,
}

/// A change of the size of the service or of jobs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resize {
    pub at: Span,
    pub to: NewSize,
}

/// The object of a resize, and its new size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NewSize {
    /// The service: the number of backends, and how long backends still serve after they have left
    /// the list.
    Backends(u32, Span),
    /// Jobs, identified by their positions, and the number of tasks of each job.
    Tasks(Range<usize>, u32),
}

/// One variant of a scenario.
#[derive(Clone, Debug, Default)]
pub struct ScenarioRun {
    pub name: String,
    /// The values that replace those of the scenario.
    pub differs: RunTable,
}

impl ScenarioRun {
    /// Returns whether the weights of any of these jobs follow load in this run.
    pub fn follows_load(&self, jobs: &[JobTable]) -> bool {
        jobs.iter().any(|job| self.differs.load.unwrap_or(job.load).0.is_some())
    }

    /// How clients receive the reports of backends in this run; `None` if backends send no reports.
    pub fn reports(&self, scenario: &Scenario) -> Option<ReportsTable> {
        self.differs.reports.or(scenario.reports)
    }
}

/// The reason why a file is not a valid scenario.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{file}:{line}:{column}: {message} (in: {text})")]
pub struct ScenarioError {
    /// The file, or the name of a shipped scenario.
    pub file: String,
    /// The line; the first is 1.
    pub line: usize,
    /// The column; the first is 1.
    pub column: usize,
    /// The error and the correction.
    pub message: String,
    pub text: String,
}

/// The span of an error in the text, and its message. [`fault`] computes the line and the column
/// from the span.
type SpannedFault = (Range<usize>, String);

impl Scenario {
    /// Reads a scenario.
    ///
    /// # Errors
    /// The first error in the file.
    pub fn read(name: &str, file: &str, text: &str) -> Result<Self, ScenarioError> {
        let document: Result<ScenarioDocument, _> = toml::from_str(text);
        let read = match document {
            Ok(document) => Self::of(name, document),
            Err(error) => Err((error.span().unwrap_or(0..0), error.message().to_owned())),
        };
        read.map_err(|(span, message)| fault(file, text, span.start, &message))
    }

    fn of(name: &str, document: ScenarioDocument) -> Result<Self, SpannedFault> {
        let end = (document.duration.span(), *document.duration.get_ref());
        let step = (document.step.span(), *document.step.get_ref());
        if end.1.us == 0 {
            return Err((
                end.0,
                "a scenario with a duration of 0 has no results: write at least \"1us\"".into(),
            ));
        }
        if step.1.us == 0 || step.1 > end.1 {
            return Err((
                step.0,
                format!(
                    "a step of {} is not within the duration: write more than 0 and at most {}",
                    step.1, end.1
                ),
            ));
        }
        let measure_from = (document.measure_from.span(), *document.measure_from.get_ref());
        if measure_from.1 >= end.1 {
            let message = format!(
                "measure_from is {}, which is not before the end: write less than {}",
                measure_from.1, end.1
            );
            return Err((measure_from.0, message));
        }
        cost::check_tables(&document)?;
        let runs = runs(&document.run)?;
        let copies = copies(&document.job)?;
        let scenario = Self {
            name: name.to_owned(),
            title: document.title.clone(),
            seed: document.seed.0,
            seeds: document.seeds.0,
            duration: end.1,
            step: step.1,
            measure_from: measure_from.1,
            notice: document.notice,
            reports: reports(&document)?,
            service: document.service.0.clone(),
            backends: document.backends.count.0,
            weights: Vec::new(),
            machines: Machines::of(&document.backends, most_backends(&document))?,
            jobs: Vec::new(),
            names: Vec::new(),
            named: Vec::new(),
            resizes: resizes(&document.resize, &copies, end.1)?,
            restarts: sorted(&document.restart, end.1, |restart| restart.at)?,
            fails: fails::fails(&document.fail, end.1)?,
            reweights: operator::reweights(&document, end.1)?,
            switches: operator::switches(&document, end.1)?,
            upgrades: operator::upgrades(&document, end.1)?,
            runs,
            retains_traces: false,
        };
        scenario.check_restarts(&document.restart)?;
        check_ejection(&document)?;
        fails::check_reports(&scenario, &document.fail)?;
        jobs::check(&scenario, &document.job)?;
        cost::check(&scenario, &document)?;
        let weights = scenario.weights_of(&document.backends.weights)?;
        let tables: Vec<JobTable> = document.job.into_iter().map(Spanned::into_inner).collect();
        let names = tables.iter().map(|job| job.name.0.clone()).collect();
        let copies = |job: &JobTable| job.copies.map_or(1, |copies| copies.0 as usize);
        let named =
            tables.iter().enumerate().flat_map(|(position, job)| std::iter::repeat_n(position, copies(job)));
        let named = named.collect();
        let jobs = tables.into_iter().flat_map(written_out).collect();
        Ok(Self { weights, jobs, names, named, ..scenario })
    }

    /// Returns whether requests take CPU time.
    pub fn has_costs(&self) -> bool {
        self.jobs.iter().any(|job| job.cost.is_some())
    }

    /// Returns whether a job ejects backends in any run.
    pub fn ejects(&self) -> bool {
        let choices =
            self.jobs.iter().map(|job| job.ejection).chain(self.runs.iter().map(|run| run.differs.ejection));
        choices.flatten().any(|choice| choice.0.is_some())
    }

    /// The largest number of backends at any time.
    pub fn most_backends(&self) -> u32 {
        let resized = self.resizes.iter().filter_map(|resize| match resize.to {
            NewSize::Backends(count, _) => Some(count),
            NewSize::Tasks(..) => None,
        });
        resized.fold(self.backends, u32::max)
    }

    /// The number of backends at a time.
    fn backends_at(&self, at: Span) -> u32 {
        let mut count = self.backends;
        for resize in self.resizes.iter().filter(|resize| resize.at <= at) {
            if let NewSize::Backends(backends, _) = resize.to {
                count = backends;
            }
        }
        count
    }

    pub fn batches(&self, restart: &RestartTable) -> u64 {
        self.backends_at(restart.at).div_ceil(restart.batch.0).into()
    }

    fn weights_of(&self, tables: &[Spanned<WeightTable>]) -> Result<Vec<u16>, SpannedFault> {
        let most = self.most_backends();
        let mut weights = vec![1; most as usize];
        for spanned in tables {
            let table = spanned.get_ref();
            let (from, to) = (table.from.0, table.to.0);
            if from > to || to >= most {
                let message =
                    format!("from {from} to {to} is not a range of backends: write from <= to < {most}");
                return Err((spanned.span(), message));
            }
            let weight = u16::try_from(table.weight.0).expect("a weight fits into u16");
            weights[from as usize..=to as usize].fill(weight);
        }
        Ok(weights)
    }

    /// Rejects a restart that begins before the previous restart has ended, because one restart
    /// would start backends that the other restart has stopped.
    fn check_restarts(&self, tables: &[Spanned<RestartTable>]) -> Result<(), SpannedFault> {
        for run in &self.runs {
            let mut free = 0;
            for restart in &self.restarts {
                let lame_duck = run.differs.lame_duck.unwrap_or(restart.lame_duck);
                let batch = lame_duck.us + restart.down.us + restart.pause.us;
                if restart.at.us < free {
                    let spanned = tables.iter().find(|table| table.get_ref().at == restart.at);
                    let span = spanned.map_or(0..0, Spanned::span);
                    let message = format!(
                        "the restart at {} begins before the previous restart has ended: write at = {:?} or later",
                        restart.at,
                        Span { us: free }.to_string()
                    );
                    return Err((span, message));
                }
                free = restart.at.us + self.batches(restart) * batch;
            }
        }
        Ok(())
    }
}

/// The largest number of backends at any time.
fn most_backends(document: &ScenarioDocument) -> u32 {
    let resized = document.resize.iter().filter_map(|resize| resize.get_ref().backends);
    resized.fold(document.backends.count.0, |most, backends| most.max(backends.0))
}

/// Returns how clients receive the reports of backends.
fn reports(document: &ScenarioDocument) -> Result<Option<ReportsTable>, SpannedFault> {
    let Some(spanned) = &document.reports else { return Ok(None) };
    check_reports(*spanned.get_ref()).map_err(|message| (spanned.span(), message))?;
    Ok(Some(*spanned.get_ref()))
}

fn check_reports(table: ReportsTable) -> Result<(), String> {
    for (name, value) in [("interval", table.interval), ("window", table.window)] {
        if value.us < 100_000 {
            return Err(format!("{name} is \"{value}\": write at least \"100ms\""));
        }
    }
    if table.window < table.interval {
        return Err(format!(
            "window is \"{}\", but reports come every \"{}\": write a window of at least this interval",
            table.window, table.interval
        ));
    }
    Ok(())
}

/// Rejects ejection for jobs that make no connects, because only failed connects lead to ejection.
fn check_ejection(document: &ScenarioDocument) -> Result<(), SpannedFault> {
    let of_requests = |job: &&Spanned<JobTable>| job.get_ref().traffic == Traffic::Requests;
    let has_ejection = |job: &&Spanned<JobTable>| job.get_ref().ejection.is_some();
    if let Some(job) = document.job.iter().filter(of_requests).find(has_ejection) {
        let message = "ejection needs connects, and tasks that send requests make none: leave ejection out, or write traffic = \"connections\"";
        return Err((job.span(), message.into()));
    }
    let run = document.run.iter().find(|run| run.get_ref().ejection.is_some());
    match run.filter(|_| document.job.iter().all(|job| of_requests(&job))) {
        Some(run) => {
            let message = "ejection needs connects, and no job makes any: leave ejection out, or write traffic = \"connections\"";
            Err((run.span(), message.into()))
        }
        None => Ok(()),
    }
}

/// The positions of each job's copies, keyed by the name of the job in the file.
fn copies(tables: &[Spanned<JobTable>]) -> Result<BTreeMap<String, Range<usize>>, SpannedFault> {
    let mut copies = BTreeMap::new();
    let mut first = 0;
    for spanned in tables {
        let job = spanned.get_ref();
        let count = job.copies.map_or(1, |copies| copies.0);
        if count > 1 && job.seed.is_some() {
            let message =
                "one seed for all copies would give them the same subsets: leave seed out, or copies";
            return Err((spanned.span(), message.into()));
        }
        let here = first..first + count as usize;
        first = here.end;
        if copies.insert(job.name.0.clone(), here).is_some() {
            return Err((
                spanned.span(),
                format!("there is already a job {:?}: write another name", job.name.0),
            ));
        }
    }
    if copies.is_empty() {
        return Err((0..0, "there is no job: write at least one [[job]]".into()));
    }
    Ok(copies)
}

/// Returns the copies of a job as separate jobs.
fn written_out(job: JobTable) -> impl Iterator<Item = JobTable> {
    let count = job.copies.map_or(1, |copies| copies.0);
    let is_numbered = job.copies.is_some();
    (0..count).map(move |number| {
        let mut copy = job.clone();
        if is_numbered {
            copy.name.0 = format!("{}-{number}", job.name.0);
        }
        copy
    })
}

/// Sorts tables by time. Tables of the same time retain their order in the file.
fn sorted<T: Clone>(
    tables: &[Spanned<T>],
    end: Span,
    at: impl Fn(&T) -> Span,
) -> Result<Vec<T>, SpannedFault> {
    for table in tables {
        let when = at(table.get_ref());
        if when >= end {
            return Err((
                table.span(),
                format!("at = {:?} is not before the end: write less than {end}", when.to_string()),
            ));
        }
    }
    let mut tables: Vec<T> = tables.iter().map(|table| table.get_ref().clone()).collect();
    tables.sort_by_key(at);
    Ok(tables)
}

fn resizes(
    tables: &[Spanned<ResizeTable>],
    copies: &BTreeMap<String, Range<usize>>,
    end: Span,
) -> Result<Vec<Resize>, SpannedFault> {
    for spanned in tables {
        let table = spanned.get_ref();
        let wrong = match (&table.backends, &table.job, &table.tasks) {
            (Some(Backends { .. }), None, None) => continue,
            (None, Some(job), Some(_)) if table.lame_duck == Span::default() => match copies.get(&job.0) {
                Some(_) => continue,
                None => format!(
                    "there is no job {:?}: write one of {}",
                    job.0,
                    copies.keys().cloned().collect::<Vec<_>>().join(", ")
                ),
            },
            (None, Some(_), Some(_)) => "clients cannot be lame ducks: leave `lame_duck` out".into(),
            _ => "a resize changes the backends or a job: write `backends`, or `job` and `tasks`".into(),
        };
        return Err((spanned.span(), wrong));
    }
    let resize = |table: ResizeTable| {
        let to = match (table.backends, table.job, table.tasks) {
            (Some(backends), ..) => NewSize::Backends(backends.0, table.lame_duck),
            (None, Some(job), Some(tasks)) => NewSize::Tasks(copies[&job.0].clone(), tasks.0),
            _ => unreachable!("invalid tables are rejected above"),
        };
        Resize { at: table.at, to }
    };
    Ok(sorted(tables, end, |table| table.at)?.into_iter().map(resize).collect())
}

fn runs(tables: &[Spanned<RunTable>]) -> Result<Vec<ScenarioRun>, SpannedFault> {
    let mut runs: Vec<ScenarioRun> = Vec::with_capacity(tables.len());
    for spanned in tables {
        let table = spanned.get_ref();
        let of_algorithm = table.algorithm.map(|algorithm| algorithm.0.name());
        let named = of_algorithm.or(table.policy.map(|policy| policy.0.name()));
        table.reports.map_or(Ok(()), check_reports).map_err(|message| (spanned.span(), message))?;
        let name = table.name.clone().map(|name| name.0).or(named.map(ToOwned::to_owned));
        let Some(name) = name else {
            return Err((
                spanned.span(),
                "a run has neither `name` nor `algorithm` nor `policy`: write one of them".into(),
            ));
        };
        if runs.iter().any(|run| run.name == name) {
            return Err((spanned.span(), format!("there is already a run {name:?}: write another name")));
        }
        runs.push(ScenarioRun { name, differs: table.clone() });
    }
    if runs.is_empty() {
        runs.push(ScenarioRun { name: "as written".into(), ..ScenarioRun::default() });
    }
    Ok(runs)
}

fn fault(file: &str, text: &str, at: usize, message: &str) -> ScenarioError {
    let at = at.min(text.len());
    let before = text.get(..at).unwrap_or_default();
    let start = before.rfind('\n').map_or(0, |newline| newline + 1);
    ScenarioError {
        file: file.to_owned(),
        line: before.matches('\n').count() + 1,
        column: before[start..].chars().count() + 1,
        message: message.trim_end().replace('\n', ", "),
        text: text[start..].lines().next().unwrap_or_default().trim().to_owned(),
    }
}
