//! The event loop: its threads, the signals, the wait for the next event, and the execution of
//! effects. Work that takes long runs outside of the loop, and its result becomes an event. Only
//! this file reads the clock for the times of events (`Instant::now`).

use std::hash::{BuildHasher as _, RandomState};
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, anyhow};
use tokio::runtime::{Handle, Runtime};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{Notify, mpsc};
use tokio::time::timeout;
use tracing::{info, warn};

use super::file_io::{FileIo, Files, HostFiles, PATIENCE, beside};
use super::lists::ListReader;
use super::loader::Loader;
use super::network::HostNetwork;
use super::remotes::Remotes;
use super::start::{self, Listeners};
use super::watches::Watches;
use super::{Reread, files, opener};
use crate::close_jobs;
use crate::config::Config;
use crate::controller::{
    BackgroundWork, Clock, Controller, Effect, Environment, Event, NamespaceFound, Notice, Search, TICK,
    WorkResult,
};
use crate::descriptors;
use crate::source::{MAX_THREADS, NoAnswer, Stamp, complete_assignments, directory_of};
use lb_host::notify::Notifier;
use lb_host::watch::Watch;
use lb_kernel::{ClientNamespace, Features, Kernel, Linux, RecordedProcesses};

/// The maximum number of threads for blocking work outside of the loop. It is the sum of the limits
/// of all kinds of work, so that work of one kind never waits for threads of another kind:
/// [`MAX_THREADS`] threads for calls on files that may not answer, one thread for each of 256
/// services to compute assignments, and 64 threads for a wait for readers, a pass over flow
/// records, a search for network namespaces, closing connections, opening clients, and writing
/// pages and answers.
const BLOCKING_THREADS: usize = MAX_THREADS + 256 + 64;

/// Runs the daemon until SIGTERM or SIGINT. `stamp` is the stamp of the configuration file at the
/// time when the file was read. After this function has returned, maps, programs and links remain
/// in the kernel.
///
/// # Errors
/// If the daemon cannot start. Once the daemon is ready, this function does not fail.
pub fn run(config: Config, stamp: Option<Stamp>, reread: Reread) -> Result<()> {
    super::memory::give_back_what_is_freed();
    let runtime = runtime()?;
    // A panic of any thread ends the process, and the service manager starts the daemon again.
    // Without this hook, the loop would wait forever for the result of a thread that has panicked.
    // Connects are not affected.
    let panic_hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        panic_hook(panic);
        std::process::abort();
    }));
    let result = runtime.block_on(turn(config, stamp, reread));
    // A file system that does not answer must not prevent the daemon from ending.
    runtime.shutdown_timeout(TICK);
    result
}

/// The runtime. The event loop runs on the calling thread. One other thread serves the socket and
/// the metrics port, and blocking work runs on further threads.
///
/// # Errors
/// If the kernel refuses a descriptor or a thread. A panic of tokio becomes an error.
fn runtime() -> Result<Runtime> {
    let build = || {
        tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .max_blocking_threads(BLOCKING_THREADS)
            .enable_all()
            .build()
    };
    let panic_hook = std::panic::take_hook();
    // The hook that is set here prints nothing, because the message of the panic becomes an error.
    std::panic::set_hook(Box::new(|_| {}));
    let built = std::panic::catch_unwind(build);
    std::panic::set_hook(panic_hook);
    let built = built.map_err(|panic| {
        let message = panic.downcast_ref::<String>().map_or("unknown reason", String::as_str);
        anyhow!("{message}")
    });
    built.and_then(|built| Ok(built?)).context("start the event loop")
}

async fn turn(config: Config, stamp: Option<Stamp>, reread: Reread) -> Result<()> {
    // Signals are caught before any change, so that a signal cannot interrupt a start half-way.
    let mut stop =
        Stop { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? };
    let mut hangup = signal(SignalKind::hangup())?;
    let (queries, mut query_receiver) = mpsc::channel(8);
    let (events, mut inbox) = mpsc::channel(64);
    let features = start::check_host(&config)?;
    let mut listeners = Listeners::bind(&config, queries)?;
    let watch = Watch::new().unwrap_or_else(|error| {
        warn!(%error, "cannot watch directories (inotify); checking them once a second instead");
        Watch::none()
    });
    let watches = Watches::of(&watch);
    let environment = environment(features);
    let (state, file, kernel) =
        (config.paths.state.clone(), config.path.clone(), Arc::clone(&environment.kernel));
    let remotes = Remotes::default();
    let lists = ListReader::new(FileIo::new(Arc::new(HostFiles)), Arc::new(remotes.clone()));
    let worker = Worker::new(lists, file, reread, state, watches.clone(), kernel, features.knows_mptcp);
    let (stopping, news) = (Arc::clone(&environment.stopping), Arc::new(Notify::new()));
    let network = HostNetwork::new(Arc::clone(&news), config.paths.pins.clone(), features);
    let mut controller =
        Controller::new(&config, Stamp::version(stamp), environment, Box::new(network), SystemTime::now());
    let mut shell =
        Shell { watch, watches, notifier: Notifier::new(), worker, remotes, events, is_watched: false };
    shell.carry_out(controller.begin(config, Instant::now()));
    let mut watchdog = shell.notifier.watchdog().map(tokio::time::interval);
    let (mut health_changed_at, mut answered_at) = (None, None);
    let result = loop {
        let wakeup = controller.next_wakeup(Instant::now());
        let event = tokio::select! {
            () = stop.requested() => break Ok(()),
            () = next(&mut watchdog) => {
                shell.notifier.watchdog_fed();
                continue;
            }
            () = ready_if(shell.is_watched) => Event::Watched,
            _ = hangup.recv() => Event::Hangup,
            Some(event) = inbox.recv() => event,
            Some(query) = query_receiver.recv() => Event::Query(query),
            () = notified(&shell.remotes.news, answered_at, ANSWER_INTERVAL) => shell.remotes.answers(),
            changes = shell.watch.changed() => Event::Changed(changes),
            () = notified(&news, health_changed_at, HEALTH_INTERVAL) => Event::HealthChanged,
            () = until(wakeup) => Event::Wakeup,
        };
        let now = Instant::now();
        match &event {
            Event::HealthChanged => health_changed_at = Some(now),
            Event::Answered(..) => answered_at = Some(now),
            Event::Watched => shell.is_watched = false,
            _ => {}
        }
        let boot = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
        let boot = Duration::try_from(boot).unwrap_or_default();
        match controller.handle(event, now, SystemTime::now(), boot) {
            Ok(effects) => shell.carry_out(effects),
            Err(error) => break Err(error),
        }
        match if controller.is_open() { listeners.open() } else { Ok(false) } {
            Ok(true) => shell.notifier.ready(controller.summary()),
            Ok(false) => {}
            Err(error) => break Err(error),
        }
    };
    let Shell { notifier, events, .. } = shell;
    start::stop(controller, &stopping, notifier, listeners, events, inbox).await;
    if result.is_ok() {
        info!("stopped; connects continue with the present tables");
    }
    result
}

/// The fixed values of the controller on this host.
fn environment(features: Features) -> Environment {
    let [jitter, ..] = RandomState::new().hash_one(()).to_le_bytes();
    Environment {
        kernel: Arc::new(Linux),
        features,
        clock: Clock::new(Instant::now(), Duration::from_nanos(Linux.now_ns())),
        host: rustix::system::uname().nodename().to_string_lossy().into_owned(),
        pid: std::process::id(),
        descriptors: descriptors::limit(),
        namespace_warning: lb_kernel::namespace_warning(),
        jitter,
        threads: std::thread::available_parallelism().map_or(1, NonZero::get),
        stopping: Arc::default(),
    }
}

/// Everything that is needed to execute effects.
struct Shell {
    watch: Watch,
    watches: Watches,
    /// Whether directories were watched and `Event::Watched` has not been passed to the controller
    /// yet.
    is_watched: bool,
    notifier: Notifier,
    worker: Worker,
    remotes: Remotes,
    events: mpsc::Sender<Event>,
}

impl Shell {
    fn carry_out(&mut self, effects: Vec<Effect>) {
        for effect in effects {
            match effect {
                Effect::Watch { cgroups, directories } => {
                    if let Some(watch) = self.watches.open_again() {
                        self.watch = watch;
                    }
                    self.watches.watch(&cgroups, directories);
                    self.is_watched = true;
                }
                Effect::Query(wanted) => self.remotes.query_only(wanted),
                Effect::QueryAgain(wanted) => self.remotes.query_again(&wanted),
                Effect::Resolve(hosts, settings) => self.remotes.hosts.resolve_only(hosts, &settings),
                Effect::ResolveAgain(hosts) => self.remotes.hosts.resolve_again(&hosts),
                Effect::Notify(Notice::Ready(status)) => self.notifier.ready(status),
                Effect::Notify(Notice::Status(status)) => self.notifier.status(status),
                Effect::Notify(Notice::Reloading) => self.notifier.reloading(),
                Effect::Work(number, work) => {
                    let (worker, events) = (self.worker.clone(), self.events.clone());
                    tokio::spawn(async move {
                        let event = Event::Done(number, worker.carry_out(*work).await);
                        // This fails only if the daemon is stopping and the receiver is gone.
                        let _ = events.send(event).await;
                    });
                }
            }
        }
    }
}

/// A search for a client's processes reads the records of flows that began within this time before
/// the search.
const RECENT: Duration = Duration::from_mins(1);

/// Does the work outside of the loop. Cheap to clone.
#[derive(Clone)]
pub struct Worker {
    lists: ListReader,
    watches: Watches,
    /// The configuration file.
    file: PathBuf,
    reread: Reread,
    /// The directory in which files for the next start of the daemon are stored.
    state: PathBuf,
    kernel: Arc<dyn Kernel>,
    knows_mptcp: bool,
}

impl Worker {
    /// `state` is the directory with the files for the next start of the daemon. `knows_mptcp`:
    /// whether programs recognize the paths of MPTCP sockets, so that these paths have no flow
    /// records.
    pub fn new(
        lists: ListReader,
        file: PathBuf,
        reread: Reread,
        state: PathBuf,
        watches: Watches,
        kernel: Arc<dyn Kernel>,
        knows_mptcp: bool,
    ) -> Self {
        Self { lists, watches, file, reread, state, kernel, knows_mptcp }
    }

    /// Does the work. Calls that may block run on separate threads. If a file does not answer
    /// within a time limit, the part of the work that needs the file ends with an error.
    pub async fn carry_out(self, work: BackgroundWork) -> WorkResult {
        match work {
            BackgroundWork::Look { service, source, path } => {
                let result = self.look(&path).await;
                WorkResult::Looked { service, source, result }
            }
            BackgroundWork::LookAtConfig { is_due } => {
                WorkResult::LookedAtConfig { is_due, result: self.look(&self.file).await }
            }
            BackgroundWork::Read { service, source, begun, known, purpose } => {
                self.lists.read(service, source, begun, known, purpose).await
            }
            BackgroundWork::ReadStored(kinds, dns) => {
                let stored = files::read_stored(&self.lists, &self.state, kinds, &dns).await;
                WorkResult::StoredRead(Box::new(stored))
            }
            BackgroundWork::Store(files) => {
                WorkResult::Stored(files::store(&self.lists.io, &self.state, files).await)
            }
            BackgroundWork::WriteEnvoyFiles(changes) => {
                WorkResult::EnvoyFilesWritten(files::write_envoy_files(&self.lists.io, changes).await)
            }
            BackgroundWork::Compute { service, mut contents, consumers } => {
                let compute = move || {
                    complete_assignments(&mut contents.assignments, &consumers);
                    WorkResult::Computed { service, contents }
                };
                beside(compute).await
            }
            BackgroundWork::Load(request) => {
                let loader = Loader { file: self.file, reread: self.reread, lists: self.lists };
                WorkResult::Loaded(Box::new(loader.load(*request).await))
            }
            BackgroundWork::Open(request) => {
                beside(move || WorkResult::Opened(Box::new(opener::open(*request)))).await
            }
            BackgroundWork::WaitForReaders => {
                beside(move || WorkResult::ReadersGone(self.kernel.wait_for_readers())).await
            }
            BackgroundWork::Reclaim { targets, mut suspects, now, interval } => {
                let reclaim = move || {
                    let pass = lb_kernel::reclaim(
                        &*self.kernel,
                        &targets,
                        &mut suspects,
                        self.knows_mptcp,
                        now,
                        interval,
                    );
                    WorkResult::Reclaimed(pass, suspects)
                };
                beside(reclaim).await
            }
            BackgroundWork::SearchNamespaces(wanted) => {
                let find = |(client, Search { path, known, records }): (String, Search)| {
                    let result = ClientNamespace::find(&path, known);
                    let recorded = records.and_then(|pins| RecordedProcesses::read(&pins, RECENT).ok());
                    NamespaceFound { client, path, result, recorded }
                };
                beside(move || WorkResult::NamespacesFound(wanted.into_iter().map(find).collect())).await
            }
            BackgroundWork::Close(job, mut requester) => {
                let runtime = Handle::current();
                let close = move || {
                    let mut wait =
                        |time| runtime.block_on(async { timeout(time, requester.gone()).await.is_err() });
                    let result = close_jobs::run(&job, &mut wait);
                    WorkResult::FlowsClosed(job.order, result, requester)
                };
                beside(close).await
            }
        }
    }

    /// Reads the stamp of a file, and watches the file's directory.
    async fn look(&self, path: &Path) -> Result<Option<Stamp>, NoAnswer> {
        let (file, watches) = (path.to_owned(), self.watches.clone());
        let look = move |files: &dyn Files| {
            // The watch is added first, so that it reports any change that happens after the stamp
            // was read.
            watches.add(&directory_of(&file));
            files.stamp(&file)
        };
        self.lists.io.run(path, PATIENCE, look).await
    }
}

/// The shortest time between two turns in which the loop applies results of probes and reports.
/// Without this pause, a process with a backend's key could use all of the loop's time by changing
/// the backend's reports continuously. Connects avoid a lame duck even before the loop has applied
/// the backend's report.
const HEALTH_INTERVAL: Duration = Duration::from_millis(5);

/// The shortest time between two turns in which the loop handles answers of servers.
const ANSWER_INTERVAL: Duration = Duration::from_millis(20);

/// Waits until `interval` has passed since `last` and `news` is notified.
async fn notified(news: &Notify, last: Option<Instant>, interval: Duration) {
    if let Some(last) = last {
        tokio::time::sleep_until((last + interval).into()).await;
    }
    news.notified().await;
}

/// Returns at once if `is_ready`, otherwise never.
async fn ready_if(is_ready: bool) {
    if !is_ready {
        std::future::pending::<()>().await;
    }
}

/// Waits until `due`, or for ever if it is `None`.
async fn until(due: Option<Instant>) {
    match due {
        Some(due) => tokio::time::sleep_until(due.into()).await,
        None => std::future::pending().await,
    }
}

/// Waits for the next tick of an interval, or for ever if it is `None`.
async fn next(interval: &mut Option<tokio::time::Interval>) {
    match interval {
        Some(interval) => drop(interval.tick().await),
        None => std::future::pending().await,
    }
}

struct Stop {
    terminate: Signal,
    interrupt: Signal,
}

impl Stop {
    async fn requested(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::pin;
    use std::task::{Context as Waker, Poll};

    use super::*;

    fn is_notified(news: &Notify, last: Option<Instant>) -> bool {
        let poll = pin!(notified(news, last, HEALTH_INTERVAL))
            .poll(&mut Waker::from_waker(std::task::Waker::noop()));
        poll == Poll::Ready(())
    }

    #[tokio::test]
    async fn an_early_notification_is_delayed_and_not_lost() {
        let (news, now) = (Notify::new(), Instant::now());
        assert!(!is_notified(&news, None));
        news.notify_one();
        news.notify_one();
        assert!(!is_notified(&news, Some(now + Duration::from_hours(1))));
        notified(&news, Some(now), HEALTH_INTERVAL).await;
        assert!(!is_notified(&news, None), "one turn handles both notifications");
    }
}
