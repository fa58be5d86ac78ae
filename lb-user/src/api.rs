//! The daemon's Unix socket. It serves HTTP/1.1 with JSON, so that `curl --unix-socket` can read
//! everything that the commands read.
//!
//! Handlers query the event loop. For the status, another thread reads the maps. This file contains
//! the server; `client` contains the queries of the commands.

mod client;
mod rounds;

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use axum::Extension;
use axum::extract::{Path as UrlPath, State};
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use lb_core::control::Switch;
use lb_core::endpoint::EndpointList;
use lb_http::parameters::{NoParameters, Parameters, checked, flag, read};
use lb_http::peer::PeerCredentials;
use lb_kernel::Linux;
use lb_kernel::trust::own_user;
use serde::{Deserialize, Deserializer, Serialize};
use tokio::sync::{Semaphore, mpsc, oneshot};
use tracing::warn;

pub use client::{
    Answer, DaemonEnded, MAX_PATH, fetch, not_responding, post_and_store, post_cancellable, post_to_daemon,
    query_daemon, quoted,
};
pub use lb_host::socket::Bound;
pub use rounds::Rounds;

use crate::close_jobs::{CloseOrder, DEFAULT_RATE, IDLE_TIMES, RATES};
use crate::output::facts::Facts;
use crate::output::status;
use lb_http::{CompressedDocument, DocumentWriter, accepts_gzip, pending, respond};
use lb_view::close_result::{CloseAnswer, CloseRefusal};
use lb_view::configured::Configured;
use lb_view::coverage::Coverage;
use lb_view::explanation::Explanation;
use lb_view::load::Switched;
use lb_view::overrides::{
    MAX_DURATION, MAX_PERCENT, Overridden, OverridesDocument, check_duration, check_percent, check_reason,
};
use lb_view::readmission::Readmission;
use lb_view::source::Refreshed;

/// The channel by which the event loop answers a query.
#[derive(Debug)]
pub struct Reply<T>(oneshot::Sender<T>);

impl<T> Reply<T> {
    /// Returns the sending and the receiving end.
    pub fn new() -> (Self, oneshot::Receiver<T>) {
        let (answer, arrives) = oneshot::channel();
        (Self(answer), arrives)
    }

    /// Sends the answer. If the requester has given up, discards the answer.
    pub fn send(self, answer: T) {
        let _ = self.0.send(answer);
    }

    /// Whether the requester has given up.
    pub fn is_closed(&self) -> bool {
        self.0.is_closed()
    }

    /// Waits until the requester has given up.
    pub async fn closed(&mut self) {
        self.0.closed().await;
    }
}

#[derive(Debug)]
pub enum ControllerQuery {
    /// The event loop's state that the maps do not contain.
    Facts(Reply<Facts>),
    /// The names of the client tasks that run.
    Clients(Reply<Vec<String>>),
    /// The keys of the configuration in force.
    Configured(Reply<Configured>),
    /// Why a client uses its backends. Each query covers one service of one client, because
    /// computing an explanation may take long.
    Explain { service: String, client: String, answer: Reply<Vec<Explanation>> },
    /// Readmits a backend, for one client task or for all client tasks that have the backend. The
    /// handler has checked the peer's permission.
    Readmit {
        service: String,
        backend: SocketAddr,
        client: Option<String>,
        who: PeerCredentials,
        answer: Reply<Readmission>,
    },
    /// Sets whether the weights of a service follow load, for one client task or for all client
    /// tasks that have the service. The handler has checked the peer's permission.
    SwitchLoad {
        service: String,
        switch: Switch,
        client: Option<String>,
        who: PeerCredentials,
        answer: Reply<Switched>,
    },
    /// Drains backends, overrides their weights, or removes overrides. The handler has checked the
    /// peer's permission.
    Override { service: String, request: OverrideRequest, who: PeerCredentials, answer: Reply<Overridden> },
    /// All overrides of operators.
    Overrides(Reply<OverridesDocument>),
    /// The list of a service, or why there is none. With `newest`, the list in the last answer of
    /// the server, even if this list is not in force.
    Source { service: String, newest: bool, answer: Reply<Result<SourceText, String>> },
    /// Reads the file of a service's list, or queries the list's server, at once. The handler has
    /// checked the peer's permission.
    Refresh { service: String, who: PeerCredentials, answer: Reply<Refreshed> },
    /// Waits until a client's programs are attached to one of these cgroups, and then sends the
    /// answer.
    Cover { client: String, cgroups: Vec<u64>, answer: Reply<Coverage> },
    /// The address of a backend with this address, index or IP address, or why no backend of the
    /// service has it. An address with a port need not be that of a backend.
    FindBackend { service: String, backend: String, answer: Reply<Result<SocketAddr, String>> },
    /// Closes the connections of flows to a backend. The handler has checked the peer's permission.
    Close { order: CloseOrder, who: PeerCredentials, answer: Reply<CloseAnswer> },
}

lb_core::named! {
    /// The kinds of an operator's requests about overrides.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
    #[serde(rename_all = "kebab-case")]
    pub enum OverrideAction {
        Drain = "drain",
        Undrain = "undrain",
        Weight = "weight",
    }
}

/// The changes that may have an end and a reason.
const ENDS_NOTHING: &str = "a change that ends no override";

/// The parameters of a request that overrides backends.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OverrideRequest {
    pub action: OverrideAction,
    /// Addresses or indexes, separated by commas.
    #[serde(deserialize_with = "backends")]
    pub backends: String,
    pub client: Option<String>,
    /// The number of seconds after which the override ends by itself.
    #[serde(rename = "for", default, deserialize_with = "seconds")]
    pub for_s: Option<u64>,
    #[serde(default, deserialize_with = "reason")]
    pub reason: Option<String>,
    /// The percentage by which the weight of each backend is multiplied.
    #[serde(default, deserialize_with = "percent")]
    pub percent: Option<u16>,
    /// Whether a drain may leave a client without an available backend.
    #[serde(default, deserialize_with = "flag")]
    pub force: bool,
    /// Whether the daemon only reports what would change.
    #[serde(default, deserialize_with = "flag")]
    pub dry_run: bool,
}

impl OverrideRequest {
    /// Checks that the request has the parameters that its action needs, and no others.
    fn check(&self) -> Result<(), String> {
        const WHOLE: Option<u16> = Some(100);
        let ends = self.action == OverrideAction::Undrain || self.percent == WHOLE;
        let refused = [
            ("percent", "action=weight", self.percent.is_some() && self.action != OverrideAction::Weight),
            ("force", "action=drain", self.force && self.action != OverrideAction::Drain),
            ("for", ENDS_NOTHING, self.for_s.is_some() && ends),
            ("reason", ENDS_NOTHING, self.reason.is_some() && ends),
        ];
        match refused.iter().find(|(.., is_set)| *is_set) {
            Some((name, with, _)) => Err(format!("{name} is permitted only with {with}")),
            None if self.action == OverrideAction::Weight && self.percent.is_none() => {
                Err(format!("missing parameter `percent`: the action weight needs {}", percents()))
            }
            None => Ok(()),
        }
    }
}

/// Whether an operator can name a backend by this word: an address, an index, or an address without
/// a port, which is sufficient if exactly one backend has it.
pub fn is_backend(word: &str) -> bool {
    word.parse::<SocketAddr>().is_ok() || word.parse::<IpAddr>().is_ok() || word.parse::<u32>().is_ok()
}

fn backends<'de, D: Deserializer<'de>>(value: D) -> Result<String, D::Error> {
    let right = "addresses (10.0.0.1:80) or indexes (3), separated by commas";
    read(value, right, |text| text.split(',').all(is_backend).then(|| text.to_owned()))
}

fn backend<'de, D: Deserializer<'de>>(value: D) -> Result<String, D::Error> {
    read(value, "an address (10.0.0.1:80) or an index (3)", |text| is_backend(text).then(|| text.to_owned()))
}

fn address<'de, D: Deserializer<'de>>(value: D) -> Result<SocketAddr, D::Error> {
    read(value, "an address (10.0.0.1:80)", |text| text.parse().ok())
}

fn seconds<'de, D: Deserializer<'de>>(value: D) -> Result<Option<u64>, D::Error> {
    let right = format_args!("a number of seconds from 1 to {} (one year)", MAX_DURATION.as_secs());
    let is_right = |time: &u64| check_duration(Duration::from_secs(*time)).is_ok();
    read(value, right, |text| text.parse().ok().filter(is_right).map(Some))
}

fn reason<'de, D: Deserializer<'de>>(value: D) -> Result<Option<String>, D::Error> {
    checked(value, check_reason).map(Some)
}

fn percents() -> String {
    format!("a whole number from 1 to {MAX_PERCENT} (a weight of 0 % is a drain)")
}

fn percent<'de, D: Deserializer<'de>>(value: D) -> Result<Option<u16>, D::Error> {
    let is_right = |percent: &u16| check_percent(*percent).is_ok();
    read(value, percents(), |text| text.parse().ok().filter(is_right).map(Some))
}

fn rate<'de, D: Deserializer<'de>>(value: D) -> Result<Option<u32>, D::Error> {
    let right = format_args!("a number of connections per second from {} to {}", RATES.start(), RATES.end());
    read(value, right, |text| text.parse().ok().filter(|rate| RATES.contains(rate)).map(Some))
}

fn idle_ms<'de, D: Deserializer<'de>>(value: D) -> Result<Option<Duration>, D::Error> {
    let [least, most] = [IDLE_TIMES.start(), IDLE_TIMES.end()].map(Duration::as_millis);
    let right = format_args!("a number of milliseconds from {least} to {most} (one day)");
    let time = |text: &str| text.parse().ok().map(Duration::from_millis);
    read(value, right, |text| time(text).filter(|time| IDLE_TIMES.contains(time)).map(Some))
}

/// The list of a service.
#[derive(Debug)]
pub enum SourceText {
    List(Arc<EndpointList>),
    /// The text that a server has sent.
    Text(Arc<[u8]>),
}

/// The maximum number of cgroups that one query may name: the cgroup of the process and the cgroups
/// above it. For each cgroup, the event loop makes a system call at every check. No host nests
/// cgroups this deep.
const CGROUPS: usize = 64;

/// The name of the socket in its directory.
const SOCKET: &str = "socklb.sock";

/// The path of the socket.
pub fn socket(run: &Path) -> PathBuf {
    run.join(SOCKET)
}

/// Binds the socket under a temporary name; the socket gets its real name when it is ready. See
/// [`lb_host::socket::bind`].
///
/// # Errors
/// If the path cannot be used.
pub fn bind(run: &Path, admins: Option<u32>) -> std::io::Result<Bound> {
    lb_host::socket::bind(run, SOCKET, admins)
}

/// The maximum number of requests that may wait for a cgroup to be covered: half of the socket's
/// connections, so that other requests find a free connection.
const WAITERS: usize = 32;

/// The longest time that one request waits for a cgroup to be covered. socklb's own commands send a
/// new request every second.
const LONGEST_WAIT: Duration = Duration::from_secs(30);

/// The state of the handlers.
#[derive(Clone)]
struct Queries {
    queries: mpsc::Sender<ControllerQuery>,
    status: Rounds,
    /// Only one explanation is built at a time, because the explanation of a large service may need
    /// a few hundred megabytes.
    explaining: Arc<Semaphore>,
    waiting: Arc<Semaphore>,
    /// The group with permission to send requests that change state. Root and the daemon's user
    /// always have this permission.
    admins: Option<u32>,
}

impl Queries {
    /// Queries the event loop.
    async fn query<T>(&self, ask: impl FnOnce(Reply<T>) -> ControllerQuery) -> Result<T, Refused> {
        query(&self.queries, ask).await.ok_or_else(stopping)
    }
}

/// The routes of the socket.
pub fn router(queries: &mpsc::Sender<ControllerQuery>, admins: Option<u32>) -> Router {
    let desk = Queries {
        queries: queries.clone(),
        status: Rounds::of(queries.clone(), |facts| json(&status::of(&Linux, facts))),
        explaining: Arc::new(Semaphore::new(1)),
        waiting: Arc::new(Semaphore::new(WAITERS)),
        admins,
    };
    Router::new()
        .route("/v1/status", get(status))
        .route("/v1/configuration", get(configuration))
        .route("/v1/explain/{service}", get(explain))
        .route("/v1/cover/{client}", get(cover))
        .route("/v1/source/{service}", get(source))
        .route("/v1/refresh/{service}", post(refresh))
        .route("/v1/readmit/{service}", post(readmit))
        .route("/v1/load/{service}", post(switch_load))
        .route("/v1/overrides", get(overrides))
        .route("/v1/overrides/{service}", post(override_backends))
        .route("/v1/close/{service}", post(close))
        .with_state(desk)
}

const JSON: &str = "application/json";

fn json(value: &impl Serialize) -> std::io::Result<CompressedDocument> {
    let mut writer = DocumentWriter::new();
    serde_json::to_writer(&mut writer, value)?;
    writer.finish()
}

/// Starts the answer as soon as the event loop has responded to one query. With many clients the
/// status takes a second; if the answer started only after the status is complete, a command would
/// report that the daemon does not answer.
async fn status(
    State(desk): State<Queries>,
    Parameters(NoParameters {}): Parameters<NoParameters>,
    headers: HeaderMap,
) -> Result<Response, Refused> {
    desk.query(ControllerQuery::Clients).await?;
    Ok(pending(desk.status.next().await, accepts_gzip(&headers), JSON))
}

async fn configuration(
    State(desk): State<Queries>,
    Parameters(NoParameters {}): Parameters<NoParameters>,
) -> Result<impl IntoResponse, Refused> {
    desk.query(ControllerQuery::Configured).await.map(Json)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ClientFilter {
    client: Option<String>,
}

async fn explain(
    State(desk): State<Queries>,
    UrlPath(service): UrlPath<String>,
    Parameters(which): Parameters<ClientFilter>,
    headers: HeaderMap,
) -> Result<Response, Refused> {
    let _turn = desk.explaining.acquire().await;
    let explanations = explanations(&desk, &service, which.client).await?;
    match tokio::task::spawn_blocking(move || json(&explanations)).await {
        Ok(Ok(document)) => Ok(respond(Arc::new(document), accepts_gzip(&headers), JSON)),
        Ok(Err(_)) | Err(_) => Err(stopping()),
    }
}

/// Queries the event loop once per client, so that the loop handles other events between the
/// queries.
async fn explanations(
    desk: &Queries,
    service: &str,
    client: Option<String>,
) -> Result<Vec<Explanation>, Refused> {
    let clients = match client {
        Some(client) => vec![client],
        None => desk.query(ControllerQuery::Clients).await?,
    };
    let mut explanations = Vec::new();
    // Bound: the clients of a host.
    for client in clients {
        let service = service.to_owned();
        explanations.extend(desk.query(|answer| ControllerQuery::Explain { service, client, answer }).await?);
    }
    Ok(explanations)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Ejected {
    #[serde(deserialize_with = "address")]
    backend: SocketAddr,
    client: Option<String>,
}

/// Readmits a backend. Only root, the daemon's user and the members of the group in `[admin]` have
/// this permission; other users that may open the socket can only read.
async fn readmit(
    State(desk): State<Queries>,
    peer: Option<Extension<PeerCredentials>>,
    UrlPath(service): UrlPath<String>,
    Parameters(Ejected { backend, client }): Parameters<Ejected>,
) -> Result<impl IntoResponse, Refused> {
    let what = format!("end the ejection of {backend}");
    let who = who_may_write(peer, &desk, &service, &what)?;
    desk.query(|answer| ControllerQuery::Readmit { service, backend, client, who, answer }).await.map(Json)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Which {
    #[serde(default, deserialize_with = "flag")]
    newest: bool,
}

/// The list of a service in the format `file_sd`, which is also a format of endpoint files.
async fn source(
    State(desk): State<Queries>,
    UrlPath(service): UrlPath<String>,
    Parameters(Which { newest }): Parameters<Which>,
) -> Result<impl IntoResponse, Refused> {
    let text = match desk.query(|answer| ControllerQuery::Source { service, newest, answer }).await? {
        Ok(SourceText::Text(text)) => text,
        Ok(SourceText::List(list)) => {
            let text = tokio::task::spawn_blocking(move || lb_discovery::render_list(&list)).await;
            text.map_err(|_| stopping())?
        }
        Err(why) => return Err((StatusCode::NOT_FOUND, why)),
    };
    Ok(([(CONTENT_TYPE, JSON)], text.to_vec()))
}

/// Reads the file of a service's list, or queries the list's server, at once.
async fn refresh(
    State(desk): State<Queries>,
    peer: Option<Extension<PeerCredentials>>,
    UrlPath(service): UrlPath<String>,
    Parameters(NoParameters {}): Parameters<NoParameters>,
) -> Result<impl IntoResponse, Refused> {
    let who = who_may_write(peer, &desk, &service, "refresh a list")?;
    desk.query(|answer| ControllerQuery::Refresh { service, who, answer }).await.map(Json)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct To {
    #[serde(deserialize_with = "load_switch")]
    switch: Switch,
    client: Option<String>,
}

fn load_switch<'de, D: Deserializer<'de>>(value: D) -> Result<Switch, D::Error> {
    let right = format!("one of {}", Switch::ALL.map(Switch::name).join(", "));
    read(value, right, |text| Switch::ALL.into_iter().find(|known| known.name() == text))
}

/// Sets whether the weights of a service follow load.
async fn switch_load(
    State(desk): State<Queries>,
    peer: Option<Extension<PeerCredentials>>,
    UrlPath(service): UrlPath<String>,
    Parameters(To { switch, client }): Parameters<To>,
) -> Result<impl IntoResponse, Refused> {
    let who = who_may_write(peer, &desk, &service, "freeze weights, or switch load control off or on")?;
    desk.query(|answer| ControllerQuery::SwitchLoad { service, switch, client, who, answer }).await.map(Json)
}

async fn overrides(
    State(desk): State<Queries>,
    Parameters(NoParameters {}): Parameters<NoParameters>,
) -> Result<impl IntoResponse, Refused> {
    desk.query(ControllerQuery::Overrides).await.map(Json)
}

/// Drains backends, overrides their weights, or removes overrides.
async fn override_backends(
    State(desk): State<Queries>,
    peer: Option<Extension<PeerCredentials>>,
    UrlPath(service): UrlPath<String>,
    Parameters(request): Parameters<OverrideRequest>,
) -> Result<impl IntoResponse, Refused> {
    let what = format!("{} {}", request.action.name(), request.backends);
    let who = who_may_write(peer, &desk, &service, &what)?;
    request.check().map_err(|text| (StatusCode::BAD_REQUEST, text))?;
    desk.query(|answer| ControllerQuery::Override { service, request, who, answer }).await.map(Json)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ToClose {
    /// Its address or index.
    #[serde(deserialize_with = "backend")]
    backend: String,
    client: Option<String>,
    #[serde(rename = "idle_ms", default, deserialize_with = "idle_ms")]
    idle: Option<Duration>,
    #[serde(default, deserialize_with = "rate")]
    rate: Option<u32>,
    #[serde(default, deserialize_with = "flag")]
    dry_run: bool,
}

/// Closes the connections of flows to a backend, for at most ten seconds. The answer begins at
/// once. When the requester disconnects, the remaining connections stay open.
async fn close(
    State(desk): State<Queries>,
    peer: Option<Extension<PeerCredentials>>,
    UrlPath(service): UrlPath<String>,
    Parameters(ToClose { backend, client, idle, rate, dry_run }): Parameters<ToClose>,
    headers: HeaderMap,
) -> Result<Response, Refused> {
    let who = who_may_write(peer, &desk, &service, &format!("close the connections to {backend}"))?;
    let rate = rate.unwrap_or(DEFAULT_RATE);
    let find = |answer| ControllerQuery::FindBackend { service: service.clone(), backend, answer };
    // If the event loop hangs, this query does not return, and the answer does not begin.
    let backend = match desk.query(find).await? {
        Ok(backend) => backend,
        Err(text) => {
            let refusal = CloseRefusal { is_permission: false, is_busy: false, text };
            return Ok(Json(CloseAnswer::Refused(refusal)).into_response());
        }
    };
    let order = CloseOrder { service, backend, client, idle, rate, is_dry_run: dry_run, most: None };
    let (mut document, awaited) = oneshot::channel();
    tokio::spawn(async move {
        let answer = tokio::select! {
            // The requester has disconnected. The return drops the query, and this cancels the
            // close job.
            () = document.closed() => return,
            answer = query(&desk.queries, |answer| ControllerQuery::Close { order, who, answer }) => answer,
        };
        // If the daemon is stopping, `document` is dropped, and the answer ends incomplete.
        if let Some(Ok(answer)) = answer.map(|answer| json(&answer)) {
            let _ = document.send(Arc::new(answer));
        }
    });
    Ok(pending(awaited, accepts_gzip(&headers), JSON))
}

/// Returns the peer's credentials if the peer may send requests that change state. If the peer may
/// not, logs `what`, the refused action.
fn who_may_write(
    peer: Option<Extension<PeerCredentials>>,
    desk: &Queries,
    service: &str,
    what: &str,
) -> Result<PeerCredentials, Refused> {
    let Some(Extension(who)) = peer else {
        return Err((StatusCode::FORBIDDEN, "the user of the request is unknown".to_owned()));
    };
    if may_write(&who, desk.admins) {
        return Ok(who);
    }
    warn!(
        user = who.user,
        process = who.process,
        ?service,
        what,
        "refused a change: the user has no permission"
    );
    let group = match desk.admins {
        Some(group) => format!("the members of group {group} ([admin] group)"),
        None => "the members of the group in [admin] group".to_owned(),
    };
    let (user, own) = (who.user, own_user());
    Err((
        StatusCode::FORBIDDEN,
        format!(
            "user {user} has no permission: only root, user {own} (the daemon's), and {group} have this permission"
        ),
    ))
}

fn may_write(who: &PeerCredentials, admins: Option<u32>) -> bool {
    who.user == 0 || who.user == own_user() || admins.is_some_and(|group| who.groups.contains(&group))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Cgroups {
    #[serde(deserialize_with = "ids")]
    cgroups: Vec<u64>,
}

fn ids<'de, D: Deserializer<'de>>(value: D) -> Result<Vec<u64>, D::Error> {
    read(value, "ids, separated by commas", |text| text.split(',').map(|id| id.parse().ok()).collect())
}

/// Answers when the client's programs cover one of the cgroups. If the programs cover none of them
/// within [`LONGEST_WAIT`], answers with the status 503.
async fn cover(
    State(desk): State<Queries>,
    UrlPath(client): UrlPath<String>,
    Parameters(Cgroups { cgroups }): Parameters<Cgroups>,
) -> Result<impl IntoResponse, Refused> {
    if cgroups.len() > CGROUPS {
        let text = format!("cgroups: at most {CGROUPS} ids, not {}", cgroups.len());
        return Err((StatusCode::BAD_REQUEST, text));
    }
    let later = |text: String| (StatusCode::SERVICE_UNAVAILABLE, text);
    let _waiting = desk.waiting.try_acquire().map_err(|_| {
        later(format!("{WAITERS} other requests are waiting for cgroups to be covered; retry"))
    })?;
    let reply = desk.query(|answer| ControllerQuery::Cover { client, cgroups, answer });
    let reply = tokio::time::timeout(LONGEST_WAIT, reply).await;
    reply.map_err(|_| later("not covered yet; retry".to_owned()))?.map(Json)
}

/// Queries the event loop; `None` if the daemon is stopping.
pub async fn query<T>(
    queries: &mpsc::Sender<ControllerQuery>,
    query: impl FnOnce(Reply<T>) -> ControllerQuery,
) -> Option<T> {
    let (answer, reply) = Reply::new();
    queries.send(query(answer)).await.ok()?;
    reply.await.ok()
}

/// The answer to a request that cannot be served.
type Refused = (StatusCode, String);

fn stopping() -> Refused {
    (StatusCode::SERVICE_UNAVAILABLE, "the daemon is stopping".to_owned())
}

#[cfg(test)]
mod tests {
    use axum::extract::FromRequestParts as _;
    use serde::de::DeserializeOwned;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::{UnixListener, UnixStream};

    use super::*;
    use crate::descriptors::CONNECTIONS;

    fn desk(queries: mpsc::Sender<ControllerQuery>, admins: Option<u32>) -> Queries {
        Queries {
            status: Rounds::of(queries.clone(), |facts| json(&status::of(&Linux, facts))),
            queries,
            explaining: Arc::new(Semaphore::new(1)),
            waiting: Arc::new(Semaphore::new(WAITERS)),
            admins,
        }
    }

    #[test]
    fn a_user_without_permission_is_refused_with_those_who_have_it() {
        let who = |user, group| PeerCredentials { user, groups: vec![group], process: 1 };
        let (stranger, own) = (own_user() + 1, own_user());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let refused = |who: PeerCredentials, admins: Option<u32>| {
            runtime.block_on(async {
                let desk = desk(mpsc::channel(1).0, admins);
                who_may_write(Some(Extension(who)), &desk, "users", "drain").err()
            })
        };
        let because = |admins: &str| {
            let text = format!(
                "user {stranger} has no permission: only root, user {own} (the daemon's), and {admins} have this permission"
            );
            Some((StatusCode::FORBIDDEN, text))
        };
        assert_eq!(refused(who(stranger, 7), None), because("the members of the group in [admin] group"));
        assert_eq!(refused(who(stranger, 7), Some(8)), because("the members of group 8 ([admin] group)"));
        for permitted in [who(stranger, 8), who(own, 7), who(0, 7)] {
            assert_eq!(refused(permitted, Some(8)), None);
        }
    }

    #[test]
    fn a_coverage_request_for_more_than_64_cgroups_is_refused() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        // Returns the status code and the text of the answer, and the number of cgroups that reach
        // the event loop.
        let asked_for = |count: usize| {
            runtime.block_on(async {
                let (queries, mut asked) = mpsc::channel(1);
                let desk = desk(queries, None);
                let answering = tokio::spawn(async move {
                    let Some(ControllerQuery::Cover { cgroups, answer, .. }) = asked.recv().await else {
                        return 0;
                    };
                    answer.send(Coverage::Covered);
                    cgroups.len()
                });
                let cgroups = Cgroups { cgroups: vec![1; count] };
                let answer = cover(State(desk), UrlPath("other".to_owned()), Parameters(cgroups)).await;
                let response = answer.into_response();
                let code = response.status().as_u16();
                let body = axum::body::to_bytes(response.into_body(), 1_024).await.expect("a text");
                (code, String::from_utf8_lossy(&body).into_owned(), answering.await.expect("the answer ends"))
            })
        };
        assert_eq!(asked_for(64), (200, r#"{"coverage":"covered"}"#.to_owned(), 64));
        assert_eq!(asked_for(65), (400, "cgroups: at most 64 ids, not 65".to_owned(), 0));
    }

    /// Sends a request over a new connection.
    async fn request(socket: &Path, path: &str) -> UnixStream {
        let mut stream = UnixStream::connect(socket).await.expect("connect to the socket");
        let text = format!("GET {path} HTTP/1.0\r\nhost: localhost\r\n\r\n");
        stream.write_all(text.as_bytes()).await.expect("send the request");
        stream
    }

    /// The status code of the answer.
    async fn answered(mut stream: UnixStream) -> String {
        let mut text = String::new();
        stream.read_to_string(&mut text).await.expect("read the answer");
        text["HTTP/1.0 ".len()..].split(' ').next().expect("the answer has a status code").to_owned()
    }

    /// Requests that wait for a cgroup use at most half of the connections, and release them when
    /// they end.
    #[tokio::test]
    async fn at_most_half_of_the_connections_may_wait() {
        const COVER: &str = "/v1/cover/web?cgroups=1";
        assert_eq!((WAITERS, CONNECTIONS), (32, 64));
        let (queries, mut asked) = mpsc::channel(1);
        let directory = tempfile::tempdir().expect("make a directory");
        let path = socket(directory.path());
        let listener = UnixListener::bind(&path).expect("listen");
        let server = tokio::spawn(lb_http::serve(listener, router(&queries, None), 64));
        // The event loop answers none of these requests.
        let (mut streams, mut unanswered) = (Vec::new(), Vec::new());
        for _ in 0..WAITERS {
            streams.push(request(&path, COVER).await);
            unanswered.push(asked.recv().await.expect("the request reaches the event loop"));
        }
        assert_eq!(answered(request(&path, COVER).await).await, "503");
        let other = request(&path, "/v1/source/users").await;
        let Some(ControllerQuery::Source { answer, .. }) = asked.recv().await else {
            panic!("the other request reaches the event loop");
        };
        answer.send(Ok(SourceText::Text(Arc::from(*b"[]"))));
        assert_eq!(answered(other).await, "200", "other requests are answered");
        // A closed connection makes room for another.
        drop(streams);
        tokio::spawn(async move {
            while let Some(ControllerQuery::Cover { answer, .. }) = asked.recv().await {
                answer.send(Coverage::Covered);
            }
        });
        let mut code = String::new();
        // The server may need a moment to notice the closed connections.
        for _ in 0..10_000 {
            code = answered(request(&path, COVER).await).await;
            if code != "503" {
                break;
            }
        }
        assert_eq!(code, "200");
        server.abort();
    }

    fn read<T: DeserializeOwned>(query: &str) -> Result<T, String> {
        let request = axum::http::Request::get(format!("/v1/x?{query}")).body(()).expect("a request");
        let (mut parts, ()) = request.into_parts();
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        let read = runtime.block_on(Parameters::<T>::from_request_parts(&mut parts, &()));
        read.map(|Parameters(read)| read).map_err(|(code, text)| {
            assert_eq!(code, StatusCode::BAD_REQUEST);
            text
        })
    }

    fn refused<T: DeserializeOwned>(query: &str) -> String {
        read::<T>(query).map(drop).expect_err(query)
    }

    #[test]
    fn an_unknown_parameter_is_refused_with_the_known_ones() {
        let known = "`action`, `backends`, `client`, `for`, `reason`, `percent`, `force`, `dry_run`";
        assert_eq!(
            refused::<OverrideRequest>("action=drain&backends=0&forr=60"),
            format!("unknown parameter `forr`, expected one of {known}")
        );
        assert_eq!(
            refused::<ToClose>("backend=0&dryrun=true"),
            "unknown parameter `dryrun`, expected one of `backend`, `client`, `idle_ms`, `rate`, `dry_run`"
        );
        assert_eq!(refused::<ToClose>(""), "missing parameter `backend`");
        assert_eq!(refused::<ClientFilter>("clent=web"), "unknown parameter `clent`, expected `client`");
        assert_eq!(
            refused::<NoParameters>("client=web"),
            "unknown parameter `client`, this request has none"
        );
    }

    #[test]
    fn a_value_that_is_wrong_is_refused_with_what_would_be_right() {
        let ends = "a number of seconds from 1 to 31536000 (one year)";
        let weights = "a whole number from 1 to 1000 (a weight of 0 % is a drain)";
        let long = format!("reason={}", "x".repeat(7_000));
        for (parameters, expected) in [
            ("for=0", format!("for: must be {ends}, not \"0\"")),
            ("for=1w", format!("for: must be {ends}, not \"1w\"")),
            ("for=", format!("for: must be {ends}, not \"\"")),
            ("for=31536001", format!("for: must be {ends}, not \"31536001\"")),
            ("percent=0", format!("percent: must be {weights}, not \"0\"")),
            ("percent=1001", format!("percent: must be {weights}, not \"1001\"")),
            ("percent=50%25", format!("percent: must be {weights}, not \"50%\"")),
            ("force=yes", "force: must be true or false, not \"yes\"".to_owned()),
            ("reason=", "reason: the reason is empty: leave it out if there is none".to_owned()),
            (&long, "reason: the reason has 7000 characters; at most 200 are allowed".to_owned()),
            ("reason=a%1b[2J", "reason: the reason contains the control character U+001B".to_owned()),
            ("reason=a%c2%9b2J", "reason: the reason contains the control character U+009B".to_owned()),
            ("reason=a%e2%80%ae", "reason: the reason contains the control character U+202E".to_owned()),
            ("client=a&client=b", "duplicate parameter `client`".to_owned()),
        ] {
            let query = format!("action=weight&backends=0&{parameters}");
            assert_eq!(refused::<OverrideRequest>(&query), expected, "{parameters}");
        }
        assert_eq!(
            refused::<OverrideRequest>("action=stop&backends=0"),
            "action: unknown variant `stop`, expected one of `drain`, `undrain`, `weight`"
        );
        // Names and values come from the request: they are escaped, and are not part of the text.
        assert_eq!(
            refused::<OverrideRequest>("action=%1b[2J%e2%80%ae%20field%20`a`&backends=0"),
            "action: unknown variant `\\u{1b}[2J\\u{202e} field `a``, expected one of `drain`, `undrain`, `weight`"
        );
        assert_eq!(
            refused::<ClientFilter>("a%0a:%20unknown%20field%20`b`=1"),
            "unknown parameter `a\\n: unknown field `b``, expected `client`"
        );
        for backends in ["first", "", "0,", "10.0.0.1:65536"] {
            assert_eq!(
                refused::<OverrideRequest>(&format!("action=drain&backends={backends}")),
                format!(
                    "backends: must be addresses (10.0.0.1:80) or indexes (3), separated by commas, not {backends:?}"
                )
            );
        }
        let rates = "a number of connections per second from 1 to 10000";
        let times = "a number of milliseconds from 100 to 86400000 (one day)";
        for (parameters, expected) in [
            ("rate=0", format!("rate: must be {rates}, not \"0\"")),
            ("rate=10001", format!("rate: must be {rates}, not \"10001\"")),
            ("rate=100/s", format!("rate: must be {rates}, not \"100/s\"")),
            ("idle_ms=99", format!("idle_ms: must be {times}, not \"99\"")),
            ("idle_ms=30s", format!("idle_ms: must be {times}, not \"30s\"")),
            ("dry_run=1", "dry_run: must be true or false, not \"1\"".to_owned()),
        ] {
            assert_eq!(refused::<ToClose>(&format!("backend=0&{parameters}")), expected);
        }
        let long = "x".repeat(100);
        assert_eq!(
            refused::<ToClose>(&format!("backend={long}")),
            format!("backend: must be an address (10.0.0.1:80) or an index (3), not {:?}…", &long[..80])
        );
        assert_eq!(refused::<Ejected>("backend=3"), "backend: must be an address (10.0.0.1:80), not \"3\"");
        assert_eq!(refused::<To>("switch=stop"), "switch: must be one of on, freeze, off, not \"stop\"");
        assert_eq!(
            refused::<Cgroups>("cgroups=1,x"),
            "cgroups: must be ids, separated by commas, not \"1,x\""
        );
    }

    #[test]
    fn the_limits_of_values_are_permitted() {
        for (time, percent) in [(1, 1), (31_536_000, 1_000)] {
            let query = format!("action=weight&backends=0,10.0.0.1,[::1]:80&for={time}&percent={percent}");
            let request = read::<OverrideRequest>(&query).expect("a request");
            assert_eq!((request.for_s, request.percent), (Some(time), Some(percent)));
            assert_eq!((request.force, request.dry_run, request.check()), (false, false, Ok(())));
        }
        for (rate, idle) in [(1, 100), (10_000, 86_400_000)] {
            let close = read::<ToClose>(&format!("backend=0&rate={rate}&idle_ms={idle}")).expect("a request");
            assert_eq!((close.rate, close.idle), (Some(rate), Some(Duration::from_millis(idle))));
        }
    }

    #[test]
    fn a_request_has_the_parameters_of_its_action_and_no_others() {
        let check = |query: &str| read::<OverrideRequest>(query).expect("a request").check();
        assert_eq!(
            check("action=weight&backends=0"),
            Err("missing parameter `percent`: the action weight needs a whole number from 1 to 1000 (a weight of 0 % \
                 is a drain)"
                .to_owned())
        );
        assert_eq!(
            check("action=undrain&backends=0&percent=50"),
            Err("percent is permitted only with action=weight".to_owned())
        );
        for (query, expected) in [
            ("action=drain&for=60&reason=r&force=true", Ok(())),
            ("action=weight&percent=50&for=60&reason=r", Ok(())),
            ("action=weight&percent=100&force=false", Ok(())),
            ("action=undrain", Ok(())),
            ("action=undrain&for=60", Err("for is permitted only with a change that ends no override")),
            (
                "action=weight&percent=100&reason=r",
                Err("reason is permitted only with a change that ends no override"),
            ),
            ("action=weight&percent=50&force=true", Err("force is permitted only with action=drain")),
        ] {
            assert_eq!(check(&format!("backends=0&{query}")), expected.map_err(str::to_owned), "{query}");
        }
    }
}
