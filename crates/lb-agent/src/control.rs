//! The control socket, both of its ends: HTTP with JSON, for the agent's commands, for
//! applications, and for programs that run backends.
//!
//! Every user that may open the socket may read the status. Requests that change something are only
//! for root, the agent's own user, and the members of two groups: the agent's own group, and the
//! configured group. Parameters are in the query of the URL; requests have no body.
//!
//! In reading order: the client ([`Client`]); the routes ([`router`]), which check the parameters
//! of a request and its permission; and the queries that they send to the event loop.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use axum::extract::State;
use axum::http::{Method, StatusCode};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{MethodRouter, get, post};
use axum::{Extension, Json, Router};
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::body::Bytes;
use hyper_util::rt::TokioIo;
use lb_host::trust::{self, Untrusted, own_user};
use lb_http::parameters::{NoParameters, Parameters, number, read, whole};
use lb_http::peer::PeerCredentials;
use lb_report::agent::load::thousandths;
use lb_report::agent::name::Name;
use lb_report::agent::readiness_of;
use lb_report::keys::Keys;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer};
use thiserror::Error;
use tokio::net::UnixStream;
use tokio::sync::{mpsc, oneshot};
use tracing::warn;

use crate::config::{AgentConfig, DEFAULT_PATH};
use crate::serve::query::{AcceptedReport, ApplicationLoad, Query, QueryRefusal, Verb};
use crate::serve::registrations::{Claim, Registrant};
use crate::status::AgentStatus;
use crate::utilization;

/// The socket's name in its directory.
pub const SOCKET: &str = "agent.sock";

/// The path of the socket.
pub fn socket(run: &Path) -> PathBuf {
    run.join(SOCKET)
}

/// Time limit for an answer. The agent's event loop answers within milliseconds.
const PATIENCE: Duration = Duration::from_secs(2);

/// Maximum size of an answer, in bytes. A status with the maximum number of backends has a
/// hundredth of this size.
const MAX_BYTES: usize = 4 << 20;

/// The reason why the agent did not answer, or refused the request.
#[derive(Debug, Error)]
pub enum ClientError {
    /// No agent listens at the socket.
    #[error("no agent answers at {}: start one (`socklb agent serve`), or name the directory of its socket with --run", .0.display())]
    NotRunning(PathBuf),
    /// The socket cannot be opened.
    #[error("connect to {}", socket.display())]
    Connect { socket: PathBuf, source: io::Error },
    /// The agent runs as a user that this program does not trust.
    #[error(transparent)]
    Untrusted(#[from] Untrusted),
    /// The agent did not answer in time.
    #[error("the agent at {} does not answer", .0.display())]
    TimedOut(PathBuf),
    /// The connection broke off, or the answer does not parse.
    #[error("the agent's answer cannot be read: {0}")]
    Unreadable(String),
    /// This user has no permission.
    #[error(transparent)]
    Forbidden(io::Error),
    /// The agent does not have this backend or registration.
    #[error("{0}")]
    Absent(String),
    /// The agent is about to end.
    #[error("{0}")]
    Stopping(String),
    /// Another program runs this backend.
    #[error("{0}")]
    Taken(String),
    /// The agent refused the request for another reason.
    #[error("{0}")]
    Refused(String),
    /// No random number for the registration is available.
    #[error("cannot get a random number for the registration: {0:#}")]
    Number(anyhow::Error),
}

/// A client of the host's agent.
#[derive(Clone, Debug)]
pub struct Client {
    socket: PathBuf,
    run: PathBuf,
}

/// Names and values of a request's parameters.
pub type QueryParameters<'s> = [(&'s str, String)];

impl Client {
    /// `run` is the directory of the agent's control socket.
    pub fn new(run: &Path) -> Self {
        Self { socket: socket(run), run: run.to_owned() }
    }

    /// Whether this host is expected to run an agent: either the directory of the control socket
    /// exists, or this directory is the default and the default configuration file exists. Both
    /// conditions are also true while the agent restarts.
    pub fn is_expected(&self) -> bool {
        self.run.exists() || self.run == AgentConfig::default().run && Path::new(DEFAULT_PATH).exists()
    }

    /// Sends a GET request.
    ///
    /// # Errors
    /// If the agent does not answer, or refuses the request.
    pub async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        self.within(Method::GET, path.to_owned()).await
    }

    /// Sends a POST request with parameters.
    ///
    /// # Errors
    /// If the agent does not answer, or refuses the request.
    pub async fn post<T: DeserializeOwned>(
        &self,
        path: &str,
        parameters: &QueryParameters<'_>,
    ) -> Result<T, ClientError> {
        let parameters: Vec<String> = parameters
            .iter()
            .map(|(name, value)| format!("{name}={}", utf8_percent_encode(value, NON_ALPHANUMERIC)))
            .collect();
        self.within(Method::POST, format!("{path}?{}", parameters.join("&"))).await
    }

    async fn within<T: DeserializeOwned>(&self, method: Method, uri: String) -> Result<T, ClientError> {
        let answer = tokio::time::timeout(PATIENCE, self.request(method, uri));
        answer.await.unwrap_or_else(|_| Err(ClientError::TimedOut(self.socket.clone())))
    }

    async fn request<T: DeserializeOwned>(&self, method: Method, uri: String) -> Result<T, ClientError> {
        use io::ErrorKind::{ConnectionRefused, NotFound, WouldBlock};
        let stream = match UnixStream::connect(&self.socket).await {
            Ok(stream) => stream,
            Err(error) if matches!(error.kind(), NotFound | ConnectionRefused) => {
                return Err(ClientError::NotRunning(self.socket.clone()));
            }
            Err(error) if error.kind() == WouldBlock => {
                return Err(ClientError::TimedOut(self.socket.clone()));
            }
            Err(source) => return Err(ClientError::Connect { socket: self.socket.clone(), source }),
        };
        let cannot = |source| ClientError::Connect { socket: self.socket.clone(), source };
        trust::check_daemon(stream.peer_cred().map_err(cannot)?.uid(), &self.socket, &self.run)?;
        let (code, body) = exchange(stream, method, uri)
            .await
            .map_err(|error| ClientError::Unreadable(format!("{error:#}")))?;
        let text = || String::from_utf8_lossy(&body).into_owned();
        match code {
            StatusCode::OK => {
                serde_json::from_slice(&body).map_err(|error| ClientError::Unreadable(error.to_string()))
            }
            StatusCode::FORBIDDEN => {
                Err(ClientError::Forbidden(io::Error::new(io::ErrorKind::PermissionDenied, text())))
            }
            StatusCode::NOT_FOUND => Err(ClientError::Absent(text())),
            StatusCode::CONFLICT => Err(ClientError::Taken(text())),
            StatusCode::SERVICE_UNAVAILABLE => Err(ClientError::Stopping(text())),
            _ => Err(ClientError::Refused(text())),
        }
    }
}

async fn exchange(stream: UnixStream, method: Method, uri: String) -> anyhow::Result<(StatusCode, Bytes)> {
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    // This task ends when the connection ends, after the answer.
    tokio::spawn(connection);
    let request = hyper::Request::builder().method(method).uri(uri).header("host", "localhost");
    let response = sender.send_request(request.body(Empty::<Bytes>::new())?).await?;
    let code = response.status();
    let body = Limited::new(response.into_body(), MAX_BYTES).collect().await;
    let body = body.map_err(|error| anyhow::anyhow!(error))?;
    Ok((code, body.to_bytes()))
}

/// The maximum time for which an application's report is valid, and the maximum time over which its
/// load was measured.
const LONGEST_BELIEF: Duration = Duration::from_hours(1);

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
