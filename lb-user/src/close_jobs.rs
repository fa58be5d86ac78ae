//! Closes the connections of a backend's flows, in jobs of limited duration and at a limited rate.

use std::net::SocketAddr;
use std::time::Duration;

use lb_core::service::Protocol;
use lb_http::peer::PeerCredentials;
use lb_kernel::{CloseRequest, DatapathError, Fate, Fates, FlowSnapshot, ReclaimTarget, try_close};
use lb_view::close_result::{ClientClosed, CloseAnswer, CloseCounts, CloseRefusal, Closed, SCHEMA};
use lb_view::filter::Filter;

use crate::api::Reply;
use crate::error::chain;
use crate::output::flows;
use crate::output::names;

/// Connections are closed in batches, one batch per tick.
const TICK: Duration = Duration::from_millis(100);
/// The number of ticks after which a job ends: ten seconds, so that the job's answer arrives within
/// the time limit of a request to the daemon's socket.
const TICKS: u64 = 100;

/// The maximum number of jobs of operators at the same time: each job needs a thread and some
/// descriptors.
pub const MAX_OPERATOR_JOBS: usize = 4;
/// The maximum number of the daemon's own jobs at the same time.
pub const MAX_OWN_JOBS: usize = 2;

/// The limits of the rate, in connections per second.
pub const RATES: std::ops::RangeInclusive<u32> = 1..=10_000;
pub const DEFAULT_RATE: u32 = 100;
/// The time without data after which `close-idle` and `socklb drain --close idle` close a
/// connection.
pub const IDLE: Duration = Duration::from_secs(30);
/// The limits of the idle time. For shorter times, the resolution of the kernel's clock (4 ms) is
/// too coarse.
pub const IDLE_TIMES: std::ops::RangeInclusive<Duration> =
    Duration::from_millis(100)..=Duration::from_hours(24);

lb_core::named! {
    /// Why connections are closed. The metric and the log have a name for each cause.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
    pub enum CloseCause {
        /// An operator has requested the closing (`socklb close`, `socklb drain --close`).
        Operator = "operator",
        /// The backend is lost (`on_backend_loss`).
        BackendLoss = "backend-loss",
        /// Other backends have too few open flows (`rebalance`).
        Rebalance = "rebalance",
    }
}

/// The receiver of a job's result.
#[derive(Debug)]
pub enum CloseRequester {
    /// An operator's command, which waits for the answer.
    Operator(PeerCredentials, Reply<CloseAnswer>),
    /// The daemon itself.
    Daemon(CloseCause),
}

impl CloseRequester {
    /// Waits until the requester has given up. The daemon never gives up.
    pub async fn gone(&mut self) {
        match self {
            Self::Operator(_, answer) => answer.closed().await,
            Self::Daemon(_) => std::future::pending().await,
        }
    }
}

/// The connections that a job closes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CloseOrder {
    pub service: String,
    pub backend: SocketAddr,
    /// Only this client.
    pub client: Option<String>,
    /// The idle time, see [`CloseRequest`].
    pub idle: Option<Duration>,
    /// The maximum number of connections closed per second, summed over all clients of the host.
    pub rate: u32,
    pub is_dry_run: bool,
    /// The maximum number of connections to close; `None` if there is no limit.
    pub most: Option<u64>,
}

/// One job: an order, and the clients and flows to which it applies.
#[derive(Clone, Debug)]
pub struct CloseJob {
    pub order: CloseOrder,
    /// All clients of the host.
    pub targets: Vec<ReclaimTarget>,
    /// Whether the backend is known to exist, even if no client uses it. If this is `false` and no
    /// client uses the backend, the job reports an unknown backend.
    pub is_known: bool,
    /// The job does not close flows that began after this time, in nanoseconds of
    /// `CLOCK_MONOTONIC`.
    pub begun_until_ns: u64,
}

/// Limits a job to `rate` turns per second, in batches. A turn permits the job to close one
/// connection.
struct BatchLimiter {
    rate: u32,
    tick: u64,
    /// The number of turns used in this tick.
    used: u64,
    /// The number of turns that are left for the whole job.
    left: u64,
}

impl BatchLimiter {
    fn new(rate: u32, most: Option<u64>) -> Self {
        Self { rate, tick: 0, used: 0, left: most.unwrap_or(u64::MAX) }
    }

    /// The number of turns in the present tick. It is rounded up or down so that the turns of ten
    /// ticks add up to the rate.
    fn quota(&self) -> u64 {
        let until = |tick: u64| (tick * u64::from(self.rate)).div_ceil(10);
        until(self.tick + 1) - until(self.tick)
    }

    /// Waits for the next turn by calling `wait` for each tick. Returns `false` if the job is over:
    /// its time or its turns are used up, or `wait` has returned `false`.
    fn turn(&mut self, wait: &mut impl FnMut(Duration) -> bool) -> bool {
        if self.left == 0 {
            return false;
        }
        // Bound: the ticks of a job.
        while self.used == self.quota() {
            if self.tick == TICKS || !wait(TICK) {
                return false;
            }
            (self.tick, self.used) = (self.tick + 1, 0);
        }
        (self.used, self.left) = (self.used + 1, self.left - 1);
        self.tick < TICKS
    }
}

/// Runs a job. `wait` waits for a time, and returns `false` if the requester has given up.
///
/// May block for the length of a job: do not call this in the event loop.
pub fn run(job: &CloseJob, wait: &mut (impl FnMut(Duration) -> bool + Send)) -> CloseAnswer {
    match counted(job, wait) {
        Ok(closed) => CloseAnswer::Counted(closed),
        Err(refusal) => CloseAnswer::Refused(refusal),
    }
}

fn counted(
    CloseJob { order, targets, is_known, begun_until_ns }: &CloseJob,
    wait: &mut (impl FnMut(Duration) -> bool + Send),
) -> Result<Closed, CloseRefusal> {
    let CloseOrder { service, backend, client, idle, rate, is_dry_run, most } = order.clone();
    let filter = Filter { client, service: Some(service.clone()), backend: (!is_known).then_some(backend) };
    let unknown = |text| CloseRefusal { is_permission: false, is_busy: false, text };
    names::check_client(&filter, targets.iter().map(|target| target.pins.client.as_str()), "here")
        .map_err(unknown)?;
    try_close().map_err(|error| refused(&error))?;
    let (mut read, mut unread) = (Vec::new(), Vec::new());
    for target in targets.iter().filter(|target| filter.has_client(&target.pins.client)) {
        match FlowSnapshot::read(&target.pins) {
            Ok(snapshot) => read.push((target, snapshot)),
            Err(error) => unread.push(failed(&target.pins.client, &error)),
        }
    }
    names::check(&filter, || flows::backends_by_service(read.iter().map(|(_, snapshot)| snapshot)))
        .map_err(unknown)?;
    let request =
        CloseRequest { service: service.clone(), backend, begun_until_ns: *begun_until_ns, idle, is_dry_run };
    let mut pace = BatchLimiter::new(rate, most);
    let mut clients = unread;
    for (target, snapshot) in &read {
        let name = &target.pins.client;
        if !snapshot.slots.values().any(|slot| slot.address == backend) {
            continue;
        }
        clients.push(match lb_kernel::close(target, snapshot, &request, || pace.turn(wait)) {
            Ok(fates) => of_client(name, &fates),
            Err(error) => failed(name, &error),
        });
    }
    Ok(Closed { schema: SCHEMA, service, backend, dry_run: is_dry_run, clients })
}

fn refused(error: &DatapathError) -> CloseRefusal {
    CloseRefusal { is_permission: error.is_permission(), is_busy: false, text: chain(error) }
}

fn failed(client: &str, error: &DatapathError) -> ClientClosed {
    ClientClosed { client: client.to_owned(), error: Some(chain(error)), ..ClientClosed::default() }
}

fn of_client(client: &str, fates: &Fates) -> ClientClosed {
    let mut closed = ClientClosed { client: client.to_owned(), ..ClientClosed::default() };
    for ((protocol, fate), count) in fates {
        let CloseCounts { closed, gone, not_idle, unconnected, other_namespaces, unlisted, left, failed } =
            match protocol {
                Protocol::Tcp => &mut closed.tcp,
                Protocol::Udp => &mut closed.udp,
            };
        *match fate {
            Fate::Closed => closed,
            Fate::Gone => gone,
            Fate::NotIdle => not_idle,
            Fate::Unconnected => unconnected,
            Fate::Elsewhere => other_namespaces,
            Fate::Unlisted => unlisted,
            Fate::Left => left,
            Fate::Failed(errno) => {
                failed.entry(std::io::Error::from_raw_os_error(*errno).to_string()).or_default()
            }
        } += count;
    }
    closed
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The number of turns in each tick of a job that uses all its turns.
    fn batches(rate: u32) -> Vec<u64> {
        let (mut pace, mut batches) = (BatchLimiter::new(rate, None), vec![0]);
        let mut turns = 0;
        let mut wait = |time| {
            assert_eq!(time, TICK);
            batches.push(0);
            true
        };
        let mut of_tick = Vec::new();
        while pace.turn(&mut wait) {
            turns += 1;
            of_tick.push(pace.tick);
        }
        assert_eq!(turns, u64::from(rate) * TICKS / 10, "{rate} turns per second");
        // A wait follows the last batch, so that the next job begins with the next tick.
        assert_eq!(batches.pop(), Some(0));
        assert_eq!(batches.len() as u64, TICKS);
        for tick in of_tick {
            batches[usize::try_from(tick).unwrap()] += 1;
        }
        batches
    }

    #[test]
    fn no_second_of_a_job_has_more_turns_than_the_rate() {
        for rate in [1, 7, 10, 99, 100, 101, 10_000] {
            let batches = batches(rate);
            assert!(batches[0] > 0, "the first connection is closed at once");
            for second in batches.windows(10) {
                let turns: u64 = second.iter().sum();
                assert!(turns.abs_diff(rate.into()) <= 1, "rate {rate}, turns {second:?}");
            }
        }
    }

    #[test]
    fn a_job_ends_when_its_requester_gives_up() {
        let mut pace = BatchLimiter::new(100, None);
        let mut waits = 0;
        let mut wait = |_| {
            waits += 1;
            waits < 3
        };
        let turns = (0..).take_while(|_| pace.turn(&mut wait)).count();
        assert_eq!((turns, waits), (30, 3));
    }

    #[test]
    fn a_job_has_at_most_its_number_of_turns() {
        let mut pace = BatchLimiter::new(10, Some(25));
        assert_eq!((0..).take_while(|_| pace.turn(&mut |_| true)).count(), 25);
        assert_eq!(pace.tick, 24, "one turn per tick");
    }

    #[test]
    fn every_fate_has_its_count() {
        let fates = [
            (Fate::Closed, 1),
            (Fate::Gone, 2),
            (Fate::NotIdle, 3),
            (Fate::Unconnected, 4),
            (Fate::Elsewhere, 5),
            (Fate::Unlisted, 6),
            (Fate::Left, 7),
            (Fate::Failed(libc::EPERM), 8),
        ];
        let fates = fates.into_iter().map(|(fate, count)| ((Protocol::Udp, fate), count));
        let udp = CloseCounts {
            closed: 1,
            gone: 2,
            not_idle: 3,
            unconnected: 4,
            other_namespaces: 5,
            unlisted: 6,
            left: 7,
            failed: [("Operation not permitted (os error 1)".to_owned(), 8)].into(),
        };
        let expected = ClientClosed { client: "web".to_owned(), udp, ..ClientClosed::default() };
        assert_eq!(of_client("web", &fates.collect()), expected);
    }
}
