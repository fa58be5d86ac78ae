//! The control socket: HTTP with JSON, for the agent's commands, for applications, and for programs
//! that run backends.
//!
//! Every user that may open the socket may read the status. Requests that change something are only
//! for root, the agent's own user, and the members of two groups: the agent's own group, and the
//! configured group. Parameters are in the query of the URL; requests have no body.

use std::path::{Path, PathBuf};
use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Response};
use axum::routing::{MethodRouter, get, post};
use axum::{Extension, Json, Router};
use lb_host::trust::own_user;
use lb_http::parameters::{NoParameters, Parameters, number, read, whole};
use lb_http::peer::PeerCredentials;
use lb_report::agent::load::thousandths;
use lb_report::agent::name::Name;
use lb_report::agent::readiness_of;
use lb_report::keys::Keys;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer};
use tokio::sync::{mpsc, oneshot};
use tracing::warn;

use super::query::{AcceptedReport, ApplicationLoad, Query, QueryRefusal, Verb};
use super::registrations::{Claim, Registrant};
use crate::status::AgentStatus;
use crate::utilization;

/// The socket's name in its directory.
pub const SOCKET: &str = "agent.sock";

/// The maximum time for which an application's report is valid, and the maximum time over which its
/// load was measured.
const LONGEST_BELIEF: Duration = Duration::from_hours(1);

/// The path of the socket.
pub fn socket(run: &Path) -> PathBuf {
    run.join(SOCKET)
}

#[derive(Clone)]
struct Desk {
    queries: mpsc::Sender<Query>,
    /// The groups whose members may change something: the agent's own group, and the configured
    /// group.
    groups: Vec<u32>,
}

/// The routes of the socket. Members of the agent's own group and of `group` may change something.
pub fn router(queries: &mpsc::Sender<Query>, group: Option<u32>) -> Router {
    let groups = [Some(rustix::process::getegid().as_raw()), group].into_iter().flatten().collect();
    Router::new()
        .route("/v1/status", get(show))
        .route("/v1/lame-duck", verb(|which: &BackendQuery| operator(which, true)))
        .route("/v1/ready", verb(|which: &BackendQuery| operator(which, false)))
        .route("/v1/report", verb(load))
        .route("/v1/register", verb(registering))
        .route("/v1/readiness", verb(readiness))
        .route("/v1/unregister", verb(unregister))
        .with_state(Desk { queries: queries.clone(), groups })
}

async fn show(State(desk): State<Desk>, Parameters(NoParameters {}): Parameters<NoParameters>) -> Response {
    match status(&desk.queries).await {
        Some(status) => Json(status).into_response(),
        None => (StatusCode::SERVICE_UNAVAILABLE, "the agent is stopping").into_response(),
    }
}

type PeerOfIt = Option<Extension<PeerCredentials>>;

/// The route of a request that changes something. `of` converts the parameters of the request.
fn verb<Q: DeserializeOwned + Send + 'static>(
    of: fn(&Q) -> Result<Verb, QueryRefusal>,
) -> MethodRouter<Desk> {
    post(move |State(desk): State<Desk>, peer: PeerOfIt, Parameters(request): Parameters<Q>| async move {
        desk.take(peer, of(&request)).await
    })
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct BackendQuery {
    backend: Option<String>,
}

fn operator(which: &BackendQuery, lame_duck: bool) -> Result<Verb, QueryRefusal> {
    Ok(Verb::Operator { backend: optional(which.backend.as_deref())?, lame_duck })
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ReportRequest {
    backend: Option<String>,
    #[serde(default, deserialize_with = "number")]
    qps: Option<f64>,
    #[serde(default, deserialize_with = "number")]
    eps: Option<f64>,
    #[serde(default, deserialize_with = "number")]
    utilization: Option<f64>,
    #[serde(rename = "window_ms", default, deserialize_with = "milliseconds")]
    window: Option<Duration>,
    #[serde(rename = "valid_for_ms", default, deserialize_with = "milliseconds")]
    valid_for: Option<Duration>,
}

fn milliseconds<'de, D: Deserializer<'de>>(value: D) -> Result<Option<Duration>, D::Error> {
    let times = Duration::from_millis(1)..=LONGEST_BELIEF;
    let right = format_args!("a number of milliseconds from 1 to {}", LONGEST_BELIEF.as_millis());
    let time = |text: &str| text.parse().ok().map(Duration::from_millis);
    read(value, right, |text| time(text).filter(|time| times.contains(time)).map(Some))
}

fn load(request: &ReportRequest) -> Result<Verb, QueryRefusal> {
    let number = |what: &str, number: Option<f64>| {
        number.map(thousandths).transpose().map_err(|why| QueryRefusal::Wrong(format!("{what}: {why}")))
    };
    let load = ApplicationLoad {
        qps: number("qps", request.qps)?,
        eps: number("eps", request.eps)?,
        utilization: number("utilization", request.utilization)?,
        window: request.window.unwrap_or(Duration::from_secs(1)),
        valid_for: request.valid_for.unwrap_or(Duration::from_secs(10)),
    };
    if load.qps.is_none() && load.eps.is_none() && load.utilization.is_none() {
        return Err(QueryRefusal::Wrong("the report is empty: write utilization, qps or eps".to_owned()));
    }
    Ok(Verb::Load { backend: optional(request.backend.as_deref())?, load })
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Registering {
    backend: String,
    #[serde(deserialize_with = "whole")]
    registration: u64,
    /// The program's cgroup, relative to the mount of the cgroups.
    cgroup: Option<String>,
    /// The program's cgroup namespace, to which `cgroup` belongs.
    cgroup_tree: Option<String>,
    /// Lines of a key file.
    keys: Option<String>,
    readiness: String,
}

fn registering(request: &Registering) -> Result<Verb, QueryRefusal> {
    let keys = request.keys.as_deref().map(Keys::parse).transpose();
    let cgroup = request.cgroup.as_deref().map(|path| {
        let cgroup = utilization::below_the_mount(path);
        cgroup.ok_or_else(|| QueryRefusal::Wrong(format!("cgroup: {path:?} is not the path of a cgroup")))
    });
    let is_ours = request.cgroup_tree.is_some() && request.cgroup_tree == utilization::own_tree();
    Ok(Verb::Register {
        backend: name(&request.backend)?,
        claim: Claim {
            number: request.registration,
            is_leased: true,
            cgroup: cgroup.transpose()?.filter(|_| is_ours),
        },
        keys: keys.map_err(|error| QueryRefusal::Wrong(format!("keys: {error}")))?,
        readiness: readiness_word(&request.readiness)?,
    })
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ReadinessRequest {
    #[serde(deserialize_with = "whole")]
    registration: u64,
    readiness: Option<String>,
}

fn readiness(request: &ReadinessRequest) -> Result<Verb, QueryRefusal> {
    let readiness = request.readiness.as_deref().map(readiness_word).transpose()?;
    Ok(Verb::Readiness { registration: request.registration, readiness })
}

fn unregister(request: &ReadinessRequest) -> Result<Verb, QueryRefusal> {
    Ok(Verb::Unregister { registration: request.registration })
}

fn name(text: &str) -> Result<Name, QueryRefusal> {
    crate::name::parse(text).map_err(|why| QueryRefusal::Wrong(format!("backend: {why}")))
}

fn optional(text: Option<&str>) -> Result<Option<Name>, QueryRefusal> {
    text.map(name).transpose()
}

fn readiness_word(text: &str) -> Result<lb_report::wire::Readiness, QueryRefusal> {
    let refused = || {
        QueryRefusal::Wrong(format!("unknown readiness {text:?}: write ready, lame-duck, down or unknown"))
    };
    readiness_of(text).ok_or_else(refused)
}

impl Desk {
    /// Sends a request to the event loop, if this peer has permission.
    async fn take(&self, peer: PeerOfIt, verb: Result<Verb, QueryRefusal>) -> Response {
        let Some(Extension(peer)) = peer else {
            return (StatusCode::FORBIDDEN, "the kernel did not report the user of this connection")
                .into_response();
        };
        if !self.may(&peer) {
            warn!(user = peer.user, process = peer.process, "refused a request: this user has no permission");
            let (user, own) = (peer.user, own_user());
            let groups: Vec<String> = self.groups.iter().map(ToString::to_string).collect();
            let text = format!(
                "user {user} has no permission: only root, user {own} (the agent's), and members of the \
                 groups {} (the agent's own, and `group` in agent.toml) have permission",
                groups.join(" and ")
            );
            return (StatusCode::FORBIDDEN, text).into_response();
        }
        let who = Registrant { user: peer.user, process: peer.process };
        let verb = match verb {
            Ok(verb) => verb,
            Err(refusal) => return refused(&refusal),
        };
        match submit(&self.queries, verb, who).await {
            Ok(Ok(accepted)) => Json(accepted).into_response(),
            Ok(Err(refusal)) => refused(&refusal),
            Err(error) => (StatusCode::SERVICE_UNAVAILABLE, error.to_string()).into_response(),
        }
    }

    fn may(&self, peer: &PeerCredentials) -> bool {
        peer.user == 0
            || peer.user == own_user()
            || self.groups.iter().any(|group| peer.groups.contains(group))
    }
}

/// Sends a report or command to the event loop. For an operator's command, also waits a limited
/// time for the disk, so that the command survives a restart of the agent.
///
/// # Errors
/// The inner error is the refusal; the outer error means that the agent is stopping.
pub async fn submit(
    queries: &mpsc::Sender<Query>,
    verb: Verb,
    who: Registrant,
) -> anyhow::Result<Result<AcceptedReport, QueryRefusal>> {
    let (answer, outcome) = oneshot::channel();
    let stopping = || anyhow::anyhow!("the agent is stopping");
    queries.send(Query::Verb { verb, who, answer }).await.map_err(|_| stopping())?;
    let (outcome, receipt) = outcome.await.map_err(|_| stopping())?;
    if let Some(receipt) = receipt {
        receipt.settled().await;
    }
    Ok(outcome)
}

/// The status of all backends; `None` if the agent is stopping.
pub async fn status(queries: &mpsc::Sender<Query>) -> Option<AgentStatus> {
    let (answer, status) = oneshot::channel();
    queries.send(Query::Status(answer)).await.ok()?;
    status.await.ok()
}

fn refused(refusal: &QueryRefusal) -> Response {
    let code = match refusal {
        QueryRefusal::Absent(_) => StatusCode::NOT_FOUND,
        QueryRefusal::Taken(_) => StatusCode::CONFLICT,
        QueryRefusal::Wrong(_) => StatusCode::BAD_REQUEST,
    };
    (code, refusal.to_string()).into_response()
}
