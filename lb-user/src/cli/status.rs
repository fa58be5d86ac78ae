//! `socklb status`: prints clients, services and backends, once or repeatedly.

pub mod watch;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use anyhow::{Context, anyhow};
use lb_core::endpoint::EndpointList;

use super::overrides::stored::StoredWeights;
use super::{DEGRADED, PathOptions, paths_of, read_config};
use crate::api::{self, Answer};
use crate::error::CommandFailure;
use crate::output::dry_run;
use crate::output::names::{self, BackendsByService};
use crate::output::print;
use crate::output::status;
use lb_view::filter::Filter;
use lb_view::status::{SortBy, StatusDocument};
use lb_view::text::{self, Style};

/// The part of the status to show, and the order of backends.
pub struct Shown {
    pub filter: Filter,
    pub only_failing: bool,
    /// The order of backends; if `None`, text is sorted by address, and JSON is not sorted.
    pub sort: Option<SortBy>,
}

impl Shown {
    /// Checks that the client, service and backend in the filter exist.
    fn check(&self, status: &StatusDocument) -> Result<(), String> {
        let names = status.clients.iter().map(|client| client.name.as_str());
        names::check_client(&self.filter, names, "here")?;
        names::check(&self.filter, || {
            let clients = status.clients.iter().filter(|client| self.filter.has_client(&client.name));
            let mut backends = BackendsByService::new();
            for service in clients.flat_map(|client| &client.services) {
                let addresses = service.backends.iter().map(|backend| backend.address);
                backends.entry(&service.name).or_default().extend(addresses);
            }
            backends
        })
    }
}

/// Prints the status.
///
/// # Errors
/// If the daemon is not trusted, the pins cannot be read, or the filter names something that does
/// not exist.
pub fn run(
    shown: Shown,
    json: bool,
    watch: Option<u32>,
    files: &PathOptions,
) -> Result<ExitCode, CommandFailure> {
    let files = files.clone();
    let look = move || -> Result<StatusDocument, CommandFailure> {
        let mut status = read(&files)?;
        shown.check(&status).map_err(anyhow::Error::msg)?;
        status.retain(&shown.filter, shown.only_failing);
        if let Some(by) = shown.sort.or((!json).then_some(SortBy::Address)) {
            status.sort(by);
        }
        Ok(status)
    };
    if let Some(seconds) = watch {
        return watch::run(Arc::new(look), Duration::from_secs(seconds.max(1).into()));
    }
    let status = look()?;
    if json {
        print::json(&status)?;
    } else {
        print::text(&text::status(&status, Style::for_stdout()))?;
    }
    let degraded = !status.faults.is_empty();
    Ok(if degraded { ExitCode::from(DEGRADED) } else { ExitCode::SUCCESS })
}

/// Reads the status from the daemon. If no daemon answers, or the daemon has another directory of
/// pins than the command line, reads the pinned maps instead.
pub fn read(files: &PathOptions) -> Result<StatusDocument, CommandFailure> {
    let paths = paths_of(files)?;
    let why = match api::query_daemon::<StatusDocument>(&paths, "/v1/status")? {
        Answer::Given(status) => match other_pins(&status, files) {
            None => return Ok(status),
            Some(other) => format!(
                "the daemon at {} has its pins in {}; showing the pins in {}",
                api::socket(&paths.run).display(),
                other.display(),
                paths.pins.display()
            ),
        },
        Answer::NotRunning => "the daemon is not running: the tables do not change".to_owned(),
        Answer::NotResponding => format!("{}: the tables do not change", api::not_responding(&paths.run)),
    };
    let (state, files) = (paths.clone(), files.clone());
    // No list is known if the configuration is missing, faulty or unreadable for this user. Even
    // then, the command shows the content of the pins.
    let lists = move || read_config(&files).map(|config| dry_run::stored_lists(&config)).unwrap_or_default();
    let (weights, lists) = in_time(PATIENCE, move || StoredWeights::read(&state), lists);
    let weights = weights.unwrap_or_else(|| Err(anyhow!("the daemon's files do not answer")));
    let why = match &weights {
        Ok(_) => why,
        Err(error) => format!("{why}; weights that operators have changed are not shown: {error:#}"),
    };
    let mut status = status::from_pins(&paths.pins, why.clone()).context(why)?;
    weights.into_iter().for_each(|weights| weights.add_to(&mut status));
    let lists: BTreeMap<String, Arc<EndpointList>> = lists.unwrap_or_default();
    status::add_not_chosen(&mut status, |service| lists.get(service).cloned());
    Ok(status)
}

/// The time in which the daemon's files must be read.
const PATIENCE: Duration = Duration::from_secs(2);

/// Reads the daemon's files, first one kind and then another; `None` for what their file system has
/// not answered in time. If it never answers, the thread that reads stays blocked. Until this
/// thread ends, no other one begins, so that `--watch` does not collect threads.
fn in_time<A: Send + 'static, B: Send + 'static>(
    patience: Duration,
    first: impl FnOnce() -> A + Send + 'static,
    second: impl FnOnce() -> B + Send + 'static,
) -> (Option<A>, Option<B>) {
    static READING: Mutex<()> = Mutex::new(());
    let (first_sender, first_result) = mpsc::channel();
    let (second_sender, second_result) = mpsc::channel();
    let work = move || {
        let Ok(reading) = READING.try_lock() else { return };
        let _ = first_sender.send(first());
        let second = second();
        // The next read may begin as soon as this result has arrived.
        drop(reading);
        let _ = second_sender.send(second);
    };
    // If no thread can be started, the senders are dropped, which ends the wait.
    let _ = std::thread::Builder::new().name("files".to_owned()).spawn(work);
    let second = second_result.recv_timeout(patience).ok();
    (first_result.try_recv().ok(), second)
}

/// The daemon's directory of pins, if it differs from --pins on the command line.
fn other_pins(status: &StatusDocument, files: &PathOptions) -> Option<PathBuf> {
    let (wanted, daemon) = (files.pins.as_ref()?, status.daemon.as_ref()?.pins.as_ref()?);
    let real = |path: &Path| path.canonicalize().or_else(|_| std::path::absolute(path)).ok();
    (real(wanted) != real(daemon)).then(|| daemon.clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_that_do_not_answer_delay_once_and_block_one_thread() {
        let minute = Duration::from_mins(1);
        assert_eq!(in_time(minute, || 1, || 2), (Some(1), Some(2)));
        let (began, has_begun) = mpsc::channel();
        let (release, released) = mpsc::channel::<()>();
        let hung = move || {
            let _ = began.send(());
            let _ = released.recv();
        };
        // The second read waits behind the first, and not in another thread.
        let (ended, has_ended) = mpsc::channel::<()>();
        let results = in_time(Duration::ZERO, hung, move || ended);
        assert!(results.0.is_none() && results.1.is_none());
        has_begun.recv().expect("the read has begun");
        // While a thread is blocked, no other read begins, and nothing waits.
        assert_eq!(in_time(minute, || 1, || 2), (None, None));
        drop(release);
        // The thread drops the result that nothing awaits.
        has_ended.recv().expect_err("nothing is sent");
        assert_eq!(in_time(minute, || 1, || 2), (Some(1), Some(2)));
    }
}
