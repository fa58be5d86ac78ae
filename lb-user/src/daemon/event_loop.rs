//! The one event loop: its threads, the signals, and the wait for the next event. Only here the clock of the events
//! (`Instant::now`) is read.

use std::ops::ControlFlow;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, anyhow};
use tokio::runtime::Runtime;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{Notify, mpsc};
use tokio::time::MissedTickBehavior;
use tracing::{info, warn};

use super::clock::Clock;
use super::file_io::MAX_THREADS;
use super::reload::Reload;
use super::start::{self, Listeners};
use super::{Daemon, Event, Reread, TICK};
use crate::config::Config;
use crate::source::Stamp;
use lb_host::watch::Watch;

/// Threads for what may block beside the loop. Each use has a limit of its own, and this is the sum of the limits, so
/// that no use waits for another: files that may not answer; what client tasks use of a list, one thread for each of
/// 256 services; and 64 for a wait for readers, a pass over flow records, a search for network namespaces, clients that
/// are opened, and pages and answers that are written.
const BLOCKING_THREADS: usize = MAX_THREADS + 256 + 64;

/// Runs until SIGTERM or SIGINT, with a configuration whose file had `stamp` when it was read. What the daemon has put
/// into the kernel stays there.
///
/// # Errors
/// If the daemon cannot start. Once it is ready, it returns no error.
pub fn run(config: Config, stamp: Option<Stamp>, reread: Reread) -> Result<()> {
    crate::memory::give_back_what_is_freed();
    let runtime = runtime()?;
    // A thread that panics beside the loop would never report back, and the loop would wait for it: better to end and
    // be started anew, which no connect notices.
    let tell_panic = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        tell_panic(panic);
        std::process::abort();
    }));
    let result = runtime.block_on(turn(config, stamp, reread));
    // A file system that does not answer must not keep the daemon from ending.
    runtime.shutdown_timeout(TICK);
    result
}

/// The loop runs in this thread, and one other thread serves the socket and the port for metrics. What may block runs
/// on further threads.
///
/// # Errors
/// If the kernel refuses a descriptor, or a thread. For some of these tokio panics: at what it sets up once in a
/// process.
fn runtime() -> Result<Runtime> {
    let build = || {
        tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .max_blocking_threads(BLOCKING_THREADS)
            .enable_all()
            .build()
    };
    let tell_panic = std::panic::take_hook();
    // The message of the panic becomes an error.
    std::panic::set_hook(Box::new(|_| {}));
    let built = std::panic::catch_unwind(build);
    std::panic::set_hook(tell_panic);
    let built = built.map_err(|panic| {
        let said = panic.downcast_ref::<String>().map_or("no reason is known", String::as_str);
        anyhow!("{said}")
    });
    built.and_then(|built| Ok(built?)).context("start the event loop")
}

async fn turn(config: Config, stamp: Option<Stamp>, reread: Reread) -> Result<()> {
    // Before anything is changed: a signal during the start must not leave it half done.
    let mut stop =
        Stop { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? };
    let mut hangup = signal(SignalKind::hangup())?;
    let (queries, mut asked) = mpsc::channel(8);
    let (events, mut inbox) = mpsc::channel(64);
    let features = start::check_host(&config)?;
    let mut listeners = Listeners::bind(&config, queries)?;
    let watch = Watch::new().unwrap_or_else(|error| {
        warn!(%error, "directories cannot be watched (inotify); looking once a second instead");
        Watch::none()
    });
    let reload = Reload::new(&config.path, stamp, reread, SystemTime::now());
    let clock = Clock::new(Instant::now(), Duration::from_nanos(lb_kernel::monotonic_ns()));
    let mut daemon = Daemon::new(&config, features, watch, reload, clock, events);
    daemon.begin(config, Instant::now());
    let news = daemon.probing.news();
    let mut tick = tokio::time::interval(TICK);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut watchdog = daemon.notifier.watchdog().map(tokio::time::interval);
    let mut heard_at = None;
    let result = loop {
        let due = daemon.next_due();
        let event = tokio::select! {
            () = stop.asked() => Event::Stop,
            _ = hangup.recv() => Event::Hangup,
            Some(event) = inbox.recv() => event,
            Some(query) = asked.recv() => Event::Asked(query),
            changes = daemon.watching.watch.changed() => Event::Changed(changes),
            () = heard(&news, heard_at) => Event::Heard,
            () = until(due) => Event::Due,
            () = ready_if(daemon.clients.is_settling) => Event::Settle,
            _ = tick.tick() => Event::Tick,
            () = next(&mut watchdog) => Event::Watchdog,
        };
        let now = Instant::now();
        if matches!(event, Event::Heard) {
            heard_at = Some(now);
        }
        if let ControlFlow::Break(result) = daemon.handle(event, now) {
            break result;
        }
        // Who waits for this daemon waits for the first look as well.
        let is_open = daemon.is_ready && daemon.next_end_of_first_look().is_none();
        match if is_open { listeners.open() } else { Ok(false) } {
            Ok(true) => daemon.notify_ready(),
            Ok(false) => {}
            Err(error) => break Err(error),
        }
    };
    start::stop(daemon, listeners, inbox).await;
    if result.is_ok() {
        info!("stopped; connects go on with the tables as they are");
    }
    result
}

/// How far apart the loop takes in what probes and reports say. A backend that says something else all the time, as who has its key
/// can make it, takes a part of the loop's time and not all of it. Connects heed a lame duck without the loop.
const HEARD_EVERY: Duration = Duration::from_millis(5);

/// Waits until there is news, and not sooner than some time after the last.
async fn heard(news: &Notify, last: Option<Instant>) {
    if let Some(last) = last {
        tokio::time::sleep_until((last + HEARD_EVERY).into()).await;
    }
    news.notified().await;
}

/// Ends at once, or never.
async fn ready_if(is_ready: bool) {
    if !is_ready {
        std::future::pending::<()>().await;
    }
}

/// Waits until a moment; for ever, if there is none.
async fn until(due: Option<Instant>) {
    match due {
        Some(due) => tokio::time::sleep_until(due.into()).await,
        None => std::future::pending().await,
    }
}

/// Waits for the next tick of an interval; for ever, if there is none.
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
    async fn asked(&mut self) {
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

    fn is_heard(news: &Notify, last: Option<Instant>) -> bool {
        let poll = pin!(heard(news, last)).poll(&mut Waker::from_waker(std::task::Waker::noop()));
        poll == Poll::Ready(())
    }

    #[tokio::test]
    async fn news_that_comes_too_soon_waits_and_is_not_lost() {
        let (news, now) = (Notify::new(), Instant::now());
        assert!(!is_heard(&news, None));
        news.notify_one();
        news.notify_one();
        assert!(!is_heard(&news, Some(now + Duration::from_hours(1))));
        heard(&news, Some(now)).await;
        assert!(!is_heard(&news, None), "both were heard at once");
    }
}
