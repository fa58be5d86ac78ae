//! Decides which jobs close connections: at most one for each service and backend.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use lb_kernel::ReclaimTarget;
use lb_view::closing::{CloseAnswer, CloseRefusal};
use tracing::{info, warn};

use super::{BackgroundWork, Controller};
use crate::api::Reply;
use crate::closing::{CloseJob, CloseOrder, MAX_JOBS};
use crate::controller::client_task::ClientTask;

/// How long the requester of a job that has left connections open may continue it before another
/// requester may begin. The command continues at once.
const RESERVED: Duration = Duration::from_secs(2);

/// The jobs by service and backend.
#[derive(Default)]
pub struct ClosingJobs(BTreeMap<(String, SocketAddr), ClosingJob>);

struct ClosingJob {
    user: u32,
    process: u32,
    /// The time of the requester's first request, in nanoseconds of `CLOCK_MONOTONIC`. Later flows
    /// stay, so that the command comes to an end even if new flows begin faster than it closes
    /// them.
    begun_ns: u64,
    /// When the reservation ends; `None` while the job runs.
    reserved_until: Option<Instant>,
}

impl Controller {
    /// Starts a job, or refuses it.
    pub fn close_flows(&mut self, order: CloseOrder, answer: Reply<CloseAnswer>, now: Instant) {
        let jobs = &mut self.closing.0;
        jobs.retain(|_, job| job.reserved_until.is_none_or(|until| until > now));
        let (user, process) = (order.who.user, order.who.process);
        let key = (order.service.clone(), order.backend);
        let known = jobs.get(&key);
        let is_continued =
            |job: &ClosingJob| job.reserved_until.is_some() && (job.user, job.process) == (user, process);
        let running = jobs.values().filter(|job| job.reserved_until.is_none()).count();
        let refusal = match known {
            Some(job) if !is_continued(job) => Some(format!(
                "user {} (process {}) is closing the connections of service {} to {}; retry when that has ended",
                job.user, job.process, order.service, order.backend
            )),
            _ if running == MAX_JOBS => Some(format!("{MAX_JOBS} other jobs are closing connections; retry")),
            _ => None,
        };
        if let Some(text) = refusal {
            info!(service = ?order.service, backend = %order.backend, user, process, text, "refused to close connections");
            return answer.send(CloseAnswer::Refused(CloseRefusal { is_permission: false, text }));
        }
        let begun_ns = known.map_or_else(
            || {
                // Also if the daemon is killed before the job ends, the log has its beginning.
                info!(service = ?order.service, backend = %order.backend, user, process, "closing connections of a backend");
                self.environment.kernel.now_ns()
            },
            |job| job.begun_ns,
        );
        jobs.insert(key, ClosingJob { user, process, begun_ns, reserved_until: None });
        let running = |client_task: &ClientTask| ReclaimTarget {
            pins: client_task.pins.clone(),
            cgroup: Some(client_task.path().to_owned()),
        };
        let tasks = self.clients.tasks.iter().filter(|client_task| !client_task.is_unpinned());
        let leaving = self.clients.leaving.iter().filter(|leaving| leaving.pins.is_of_this_version());
        let leaving = leaving.map(|leaving| ReclaimTarget { pins: leaving.pins.clone(), cgroup: None });
        let job = CloseJob {
            order,
            targets: tasks.map(running).chain(leaving).collect(),
            begun_until_ns: begun_ns,
        };
        self.effects.push(BackgroundWork::Close(job, answer).into());
    }

    /// Logs and answers a job that has ended.
    pub fn flows_closed(
        &mut self,
        order: CloseOrder,
        result: CloseAnswer,
        answer: Reply<CloseAnswer>,
        now: Instant,
    ) {
        let CloseOrder { service, backend, client, idle, rate, is_dry_run, who } = order;
        let (user, process) = (who.user, who.process);
        let mut is_over = true;
        match &result {
            CloseAnswer::Counted(counts) => {
                let left = counts.sum(|counts| counts.left);
                is_over = left == 0 || answer.is_closed();
                info!(
                    service,
                    %backend,
                    client,
                    ?idle,
                    rate,
                    is_dry_run,
                    user,
                    process,
                    closed = counts.sum(|counts| counts.closed),
                    gone = counts.sum(|counts| counts.gone),
                    not_idle = counts.sum(|counts| counts.not_idle),
                    unconnected = counts.sum(|counts| counts.unconnected),
                    other_namespaces = counts.sum(|counts| counts.other_namespaces),
                    unlisted = counts.sum(|counts| counts.unlisted),
                    failed = counts.sum(|counts| counts.failed.values().sum()),
                    left,
                    is_canceled = answer.is_closed(),
                    "an operator closed the connections of a backend"
                );
            }
            CloseAnswer::Refused(refusal) => {
                warn!(?service, %backend, user, process, text = refusal.text, "cannot close connections");
            }
        }
        let key = (service, backend);
        if is_over {
            self.closing.0.remove(&key);
        } else if let Some(job) = self.closing.0.get_mut(&key) {
            job.reserved_until = Some(now + RESERVED);
        }
        answer.send(result);
    }
}
