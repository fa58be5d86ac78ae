//! Decides which jobs close connections. Operators request jobs, at most one for each service and
//! backend. The daemon starts jobs by itself, at most one for each client.

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use lb_core::rebalance::{ClosingOutcome, MIN_AGE};
use lb_document::in_units;
use lb_http::peer::PeerCredentials;
use lb_kernel::ReclaimTarget;
use lb_view::close_result::{CloseAnswer, CloseRefusal, Closed};
use tracing::{info, warn};

use super::{BackgroundWork, Controller};
use crate::api::Reply;
use crate::close_jobs::{CloseCause, CloseJob, CloseOrder, CloseRequester, MAX_OPERATOR_JOBS, MAX_OWN_JOBS};
use crate::controller::client_task::ClientTask;

/// If a job has left connections open, only its requester may start the next job for the same
/// service and backend within this time. `socklb close` starts its next job at once.
const RESERVED: Duration = Duration::from_secs(2);

#[derive(Default)]
pub struct ClosingJobs {
    /// The jobs of operators, by service and backend.
    of_operators: BTreeMap<(String, SocketAddr), OperatorJob>,
    /// The jobs of the daemon, in the order in which they were requested. Each client has at most
    /// one of these jobs, so its connections are closed at most at the rate of one job.
    own: VecDeque<OwnJob>,
}

struct OperatorJob {
    user: u32,
    process: u32,
    /// The time of the requester's first request, in nanoseconds of `CLOCK_MONOTONIC`. Flows that
    /// begin later are not closed, so that the command ends even if flows begin faster than they
    /// are closed.
    begun_ns: u64,
    /// When the reservation ends; `None` while the job runs.
    reserved_until: Option<Instant>,
}

struct OwnJob {
    /// The only client of this job.
    client: String,
    cause: CloseCause,
    /// The work of the job, until the job starts.
    waiting: Option<CloseJob>,
}

impl ClosingJobs {
    /// Whether one of the daemon's own jobs closes flows of this client, or is waiting to start.
    pub fn closes_by_itself(&self, client: &str) -> bool {
        self.own.iter().any(|job| job.client == client)
    }
}

impl Controller {
    /// Starts a job for an operator, or refuses it.
    pub fn close_for_operator(
        &mut self,
        order: CloseOrder,
        who: PeerCredentials,
        answer: Reply<CloseAnswer>,
        now: Instant,
    ) {
        let jobs = &mut self.closing.of_operators;
        jobs.retain(|_, job| job.reserved_until.is_none_or(|until| until > now));
        let (user, process) = (who.user, who.process);
        let key = (order.service.clone(), order.backend);
        let known = jobs.get(&key);
        let is_continued =
            |job: &OperatorJob| job.reserved_until.is_some() && (job.user, job.process) == (user, process);
        let running = jobs.values().filter(|job| job.reserved_until.is_none()).count();
        let refusal = match known {
            Some(job) if !is_continued(job) => Some(format!(
                "user {} (process {}) is closing the connections of service {} to {}; retry when that \
                 command has ended",
                job.user, job.process, order.service, order.backend
            )),
            _ if running == MAX_OPERATOR_JOBS => {
                Some(format!("{MAX_OPERATOR_JOBS} other jobs are closing connections; retry"))
            }
            _ => None,
        };
        if let Some(text) = refusal {
            info!(service = ?order.service, backend = %order.backend, user, process, text, "refused to close connections");
            return answer.send(CloseAnswer::Refused(CloseRefusal {
                is_permission: false,
                is_busy: true,
                text,
            }));
        }
        let begun_ns = known.map_or_else(
            || {
                if !order.is_dry_run {
                    // If the daemon is killed before the job ends, the log still shows the start.
                    info!(service = ?order.service, backend = %order.backend, user, process, "closing connections of a backend");
                }
                self.environment.kernel.now_ns()
            },
            |job| job.begun_ns,
        );
        jobs.insert(key, OperatorJob { user, process, begun_ns, reserved_until: None });
        let tasks = self.clients.tasks.iter().filter(|client_task| !client_task.is_unpinned());
        let leaving = self.clients.leaving.iter().filter(|leaving| leaving.pins.is_of_this_version());
        let leaving = leaving.map(|leaving| ReclaimTarget { pins: leaving.pins.clone(), cgroup: None });
        let job = CloseJob {
            targets: tasks.map(target).chain(leaving).collect(),
            is_known: self.is_known(&order),
            begun_until_ns: begun_ns,
            order,
        };
        self.effects.push(BackgroundWork::Close(job, CloseRequester::Operator(who, answer)).into());
    }

    /// Whether the list contains the backend, or an override exists for it. The backend need not be
    /// in the subset of any client.
    fn is_known(&self, CloseOrder { service, backend, .. }: &CloseOrder) -> bool {
        let is_listed = self.list_of(service).is_some_and(|list| list.get(*backend).is_some());
        is_listed || self.overrides.has(service, *backend)
    }

    /// Closes flows of one client without a request, as soon as fewer than [`MAX_OWN_JOBS`] jobs of
    /// the daemon run. `order` must name the client. Flows that are younger than `age` are not
    /// closed. Does nothing while an earlier job of the client runs or waits.
    pub fn close_by_itself(&mut self, order: CloseOrder, cause: CloseCause, age: Duration) {
        let client_task = order.client.as_deref().and_then(|client| self.clients.task(client));
        let Some(client_task) = client_task else { return };
        let client = client_task.client.name.clone();
        if client_task.is_unpinned() || self.closing.closes_by_itself(&client) {
            return;
        }
        let age = u64::try_from(age.as_nanos()).unwrap_or(u64::MAX);
        let begun_until_ns = self.environment.kernel.now_ns().saturating_sub(age);
        let job = CloseJob { order, targets: vec![target(client_task)], is_known: false, begun_until_ns };
        self.closing.own.push_back(OwnJob { client, cause, waiting: Some(job) });
        self.start_own_jobs();
    }

    /// Closes connections of lost backends, as the configuration requires.
    pub fn close_lost(&mut self, now: Instant) {
        let Self { clients, closing, .. } = self;
        let follow = |client_task: &mut ClientTask| {
            let is_closing = closing.closes_by_itself(&client_task.client.name);
            client_task.follow_losses(is_closing, now)
        };
        let orders: Vec<CloseOrder> = clients.tasks.iter_mut().filter_map(follow).collect();
        for order in orders {
            self.close_by_itself(order, CloseCause::BackendLoss, Duration::ZERO);
        }
    }

    /// Closes idle connections, so that pools spread over all backends, as the configuration
    /// requires.
    pub fn rebalance(&mut self, now: Instant) {
        let Self { clients, closing, ticks, .. } = self;
        let look = |client_task: &mut ClientTask| {
            let is_closing = closing.closes_by_itself(&client_task.client.name);
            client_task.rebalance(is_closing, *ticks, now)
        };
        let orders: Vec<CloseOrder> = clients.tasks.iter_mut().filter_map(look).collect();
        for order in orders {
            self.close_by_itself(order, CloseCause::Rebalance, MIN_AGE);
        }
    }

    fn start_own_jobs(&mut self) {
        let running = self.closing.own.iter().filter(|job| job.waiting.is_none()).count();
        let waiting = self.closing.own.iter_mut().filter(|job| job.waiting.is_some());
        for OwnJob { cause, waiting, .. } in waiting.take(MAX_OWN_JOBS - running) {
            let job =
                waiting.take().map(|job| BackgroundWork::Close(job, CloseRequester::Daemon(*cause)).into());
            self.effects.extend(job);
        }
    }

    /// Logs, counts and answers a job that has ended.
    pub fn flows_closed(
        &mut self,
        order: CloseOrder,
        result: CloseAnswer,
        requester: CloseRequester,
        now: Instant,
    ) {
        let (cause, user, process, is_canceled) = match &requester {
            CloseRequester::Operator(who, answer) => {
                (CloseCause::Operator, Some(who.user), Some(who.process), answer.is_closed())
            }
            CloseRequester::Daemon(cause) => (*cause, None, None, false),
        };
        let CloseOrder { service, backend, client, idle, rate, is_dry_run, most: _ } = order;
        let mut left = 0;
        match &result {
            CloseAnswer::Counted(counts) => {
                left = counts.sum(|counts| counts.left);
                if !is_dry_run {
                    self.count_closed(&service, cause, counts);
                }
                let closed = counts.sum(|counts| counts.closed);
                // The daemon repeats its own jobs, so it does not log its jobs that closed nothing.
                if !is_dry_run && (closed > 0 || cause == CloseCause::Operator) {
                    info!(
                        service,
                        %backend,
                        client,
                        idle = idle.map(|idle| tracing::field::display(in_units(idle))),
                        rate,
                        cause = cause.name(),
                        user,
                        process,
                        closed,
                        gone = counts.sum(|counts| counts.gone),
                        not_idle = counts.sum(|counts| counts.not_idle),
                        unconnected = counts.sum(|counts| counts.unconnected),
                        other_namespaces = counts.sum(|counts| counts.other_namespaces),
                        unlisted = counts.sum(|counts| counts.unlisted),
                        failed = counts.sum(|counts| counts.failed.values().sum()),
                        left,
                        is_canceled,
                        "closed connections of a backend"
                    );
                }
            }
            CloseAnswer::Refused(refusal) => {
                warn!(?service, %backend, cause = cause.name(), user, process, text = refusal.text, "cannot close connections");
            }
        }
        match requester {
            CloseRequester::Operator(_, answer) => {
                let key = (service, backend);
                if left == 0 || is_canceled {
                    self.closing.of_operators.remove(&key);
                } else if let Some(job) = self.closing.of_operators.get_mut(&key) {
                    job.reserved_until = Some(now + RESERVED);
                }
                answer.send(result);
            }
            CloseRequester::Daemon(cause) => {
                let client_task = client.as_deref().and_then(|client| self.clients.task_mut(client));
                match (cause, client_task) {
                    (CloseCause::BackendLoss, Some(client_task)) if left > 0 => {
                        client_task.continue_loss(&service, backend, now);
                    }
                    (CloseCause::Rebalance, Some(client_task)) => {
                        client_task.rebalanced(&service, outcome(&result), now);
                    }
                    _ => {}
                }
                self.closing.own.retain(|job| job.waiting.is_some() || client.as_ref() != Some(&job.client));
                self.start_own_jobs();
            }
        }
    }

    fn count_closed(&mut self, service: &str, cause: CloseCause, closed: &Closed) {
        for of_client in &closed.clients {
            if let Some(client_task) = self.clients.task_mut(&of_client.client) {
                let count = client_task.closed.entry((service.to_owned(), cause)).or_default();
                *count += of_client.tcp.closed + of_client.udp.closed;
            }
        }
    }
}

/// The outcome of a job of [`Controller::rebalance`].
fn outcome(result: &CloseAnswer) -> ClosingOutcome {
    let CloseAnswer::Counted(counts) = result else { return ClosingOutcome::Failed };
    let has_failed = counts.clients.iter().any(|client| client.error.is_some())
        || counts.sum(|counts| counts.failed.values().sum()) > 0;
    match counts.sum(|counts| counts.closed) {
        0 if has_failed => ClosingOutcome::Failed,
        closed => ClosingOutcome::Closed(u32::try_from(closed).unwrap_or(u32::MAX)),
    }
}

fn target(client_task: &ClientTask) -> ReclaimTarget {
    ReclaimTarget { pins: client_task.pins.clone(), cgroup: Some(client_task.path().to_owned()) }
}
