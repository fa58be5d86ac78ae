//! The daemon's Unix socket. It serves HTTP/1.1 with JSON, so that `curl --unix-socket` can read
//! everything that the commands read.
//!
//! Handlers query the event loop. For the status, another thread reads the maps. This file contains
//! the server; `client` contains the queries of the commands.

mod client;

mod rounds;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use axum::Extension;
use axum::extract::{FromRequestParts, Path as UrlPath, Query, State};
use axum::http::header::CONTENT_TYPE;
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use lb_core::control::Switch;
use lb_core::endpoint::EndpointList;
use lb_http::peer::PeerCredentials;
use lb_kernel::Linux;
use lb_kernel::trust::own_user;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::sync::{Semaphore, mpsc, oneshot};
use tracing::warn;

pub use client::{
    Answer, DaemonEnded, MAX_PATH, fetch, not_responding, post_and_store, post_cancellable, post_to_daemon,
    query_daemon, quoted,
};
pub use lb_host::socket::Bound;
pub use rounds::Rounds;

use crate::closing::{CloseOrder, DEFAULT_RATE, IDLE_TIMES, RATES};
use crate::facts::Facts;
use crate::status;
use lb_document::in_units;
use lb_http::{CompressedDocument, DocumentWriter, accepts_gzip, pending, respond};
use lb_view::closing::{CloseAnswer, CloseRefusal};
use lb_view::configured::Configured;
use lb_view::coverage::Coverage;
use lb_view::explanation::Explanation;
use lb_view::load::Switched;
use lb_view::overrides::{Overridden, OverridesDocument};
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

/// The kinds of an operator's requests about overrides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OverrideAction {
    Drain,
    Undrain,
    Weight,
}

impl OverrideAction {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Drain => "drain",
            Self::Undrain => "undrain",
            Self::Weight => "weight",
        }
    }
}

/// The parameters of a request that overrides backends.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OverrideRequest {
    pub action: OverrideAction,
    /// Addresses or indexes, separated by commas.
    pub backends: String,
    pub client: Option<String>,
    /// The number of seconds after which the override ends by itself.
    #[serde(rename = "for")]
    pub for_s: Option<u64>,
    pub reason: Option<String>,
    /// The percentage by which the weight of each backend is multiplied.
    pub percent: Option<u16>,
    /// Whether a drain may leave a client without an available backend.
    #[serde(default)]
    pub force: bool,
    /// Whether the daemon only reports what would change.
    #[serde(default)]
    pub dry_run: bool,
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

/// The parameters of a request. A request with an unknown parameter is refused: a misspelt `for`
/// would otherwise drain a backend without an end.
struct Parameters<T>(T);

impl<T: DeserializeOwned, S: Sync> FromRequestParts<S> for Parameters<T> {
    type Rejection = (StatusCode, String);

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Self::Rejection> {
        Query::try_from_uri(&parts.uri).map(|Query(parameters)| Self(parameters)).map_err(|rejection| {
            let text = rejection.body_text().replace("Failed to deserialize query string: ", "");
            // The text begins with the name, which it repeats. The fields of the structure are the
            // parameters.
            let text = text.find("unknown field `").map_or(text.as_str(), |at| &text[at..]);
            let text = text.replace("there are no fields", "this request has none");
            (StatusCode::BAD_REQUEST, text.replacen(" field `", " parameter `", 1))
        })
    }
}

/// The request has no parameters.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NoParameters {}

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
) -> Response {
    match query(&desk.queries, ControllerQuery::Clients).await {
        Some(_) => pending(desk.status.next().await, accepts_gzip(&headers), JSON),
        None => stopping(),
    }
}

async fn configuration(
    State(desk): State<Queries>,
    Parameters(NoParameters {}): Parameters<NoParameters>,
) -> Response {
    match query(&desk.queries, ControllerQuery::Configured).await {
        Some(configured) => Json(configured).into_response(),
        None => stopping(),
    }
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
) -> Response {
    let _turn = desk.explaining.acquire().await;
    let Some(explanations) = explanations(&desk.queries, &service, which.client).await else {
        return stopping();
    };
    match tokio::task::spawn_blocking(move || json(&explanations)).await {
        Ok(Ok(document)) => respond(Arc::new(document), accepts_gzip(&headers), JSON),
        Ok(Err(_)) | Err(_) => stopping(),
    }
}

/// Queries the event loop once per client, so that the loop handles other events between the
/// queries.
async fn explanations(
    queries: &mpsc::Sender<ControllerQuery>,
    service: &str,
    client: Option<String>,
) -> Option<Vec<Explanation>> {
    let clients = match client {
        Some(client) => vec![client],
        None => query(queries, ControllerQuery::Clients).await?,
    };
    let mut explanations = Vec::new();
    // Bound: the clients of a host.
    for client in clients {
        let service = service.to_owned();
        explanations
            .extend(query(queries, |answer| ControllerQuery::Explain { service, client, answer }).await?);
    }
    Some(explanations)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Ejected {
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
) -> Response {
    let what = format!("end the ejection of {backend}");
    let who = match who_may_write(peer, &desk, &service, &what) {
        Ok(who) => who,
        Err(refused) => return refused.into_response(),
    };
    match query(&desk.queries, |answer| ControllerQuery::Readmit { service, backend, client, who, answer })
        .await
    {
        Some(readmission) => Json(readmission).into_response(),
        None => stopping(),
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Which {
    #[serde(default)]
    newest: bool,
}

/// The list of a service in the format `file_sd`, which is also a format of endpoint files.
async fn source(
    State(desk): State<Queries>,
    UrlPath(service): UrlPath<String>,
    Parameters(Which { newest }): Parameters<Which>,
) -> Response {
    let text = match query(&desk.queries, |answer| ControllerQuery::Source { service, newest, answer }).await
    {
        Some(Ok(SourceText::Text(text))) => text,
        Some(Ok(SourceText::List(list))) => {
            match tokio::task::spawn_blocking(move || lb_discovery::render_list(&list)).await {
                Ok(text) => text,
                Err(_) => return stopping(),
            }
        }
        Some(Err(why)) => return (StatusCode::NOT_FOUND, why).into_response(),
        None => return stopping(),
    };
    ([(CONTENT_TYPE, JSON)], text.to_vec()).into_response()
}

/// Reads the file of a service's list, or queries the list's server, at once.
async fn refresh(
    State(desk): State<Queries>,
    peer: Option<Extension<PeerCredentials>>,
    UrlPath(service): UrlPath<String>,
    Parameters(NoParameters {}): Parameters<NoParameters>,
) -> Response {
    let who = match who_may_write(peer, &desk, &service, "refresh a list") {
        Ok(who) => who,
        Err(refused) => return refused.into_response(),
    };
    match query(&desk.queries, |answer| ControllerQuery::Refresh { service, who, answer }).await {
        Some(refreshed) => Json(refreshed).into_response(),
        None => stopping(),
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct To {
    switch: String,
    client: Option<String>,
}

/// Sets whether the weights of a service follow load.
async fn switch_load(
    State(desk): State<Queries>,
    peer: Option<Extension<PeerCredentials>>,
    UrlPath(service): UrlPath<String>,
    Parameters(To { switch, client }): Parameters<To>,
) -> Response {
    let who = match who_may_write(peer, &desk, &service, "freeze weights, or switch load control off or on") {
        Ok(who) => who,
        Err(refused) => return refused.into_response(),
    };
    let Some(switch) = Switch::ALL.into_iter().find(|known| known.name() == switch) else {
        let names = Switch::ALL.map(Switch::name).join(", ");
        return (StatusCode::BAD_REQUEST, format!("switch: must be one of {names}")).into_response();
    };
    match query(&desk.queries, |answer| ControllerQuery::SwitchLoad { service, switch, client, who, answer })
        .await
    {
        Some(switched) => Json(switched).into_response(),
        None => stopping(),
    }
}

async fn overrides(
    State(desk): State<Queries>,
    Parameters(NoParameters {}): Parameters<NoParameters>,
) -> Response {
    match query(&desk.queries, ControllerQuery::Overrides).await {
        Some(overrides) => Json(overrides).into_response(),
        None => stopping(),
    }
}

/// Drains backends, overrides their weights, or removes overrides.
async fn override_backends(
    State(desk): State<Queries>,
    peer: Option<Extension<PeerCredentials>>,
    UrlPath(service): UrlPath<String>,
    Parameters(request): Parameters<OverrideRequest>,
) -> Response {
    let what = format!("{} {}", request.action.name(), request.backends);
    let who = match who_may_write(peer, &desk, &service, &what) {
        Ok(who) => who,
        Err(refused) => return refused.into_response(),
    };
    match query(&desk.queries, |answer| ControllerQuery::Override { service, request, who, answer }).await {
        Some(overridden) => Json(overridden).into_response(),
        None => stopping(),
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ToClose {
    /// Its address or index.
    backend: String,
    client: Option<String>,
    idle_ms: Option<u64>,
    rate: Option<u32>,
    #[serde(default)]
    dry_run: bool,
}

/// Closes the connections of flows to a backend, for at most ten seconds. The answer begins at
/// once. When the requester disconnects, the remaining connections stay open.
async fn close(
    State(desk): State<Queries>,
    peer: Option<Extension<PeerCredentials>>,
    UrlPath(service): UrlPath<String>,
    Parameters(ToClose { backend, client, idle_ms, rate, dry_run }): Parameters<ToClose>,
    headers: HeaderMap,
) -> Response {
    let who = match who_may_write(peer, &desk, &service, &format!("close the connections to {backend}")) {
        Ok(who) => who,
        Err(refused) => return refused.into_response(),
    };
    let (idle, rate) = (idle_ms.map(Duration::from_millis), rate.unwrap_or(DEFAULT_RATE));
    if !RATES.contains(&rate) {
        let text = format!("rate: must be from {} to {} per second, not {rate}", RATES.start(), RATES.end());
        return (StatusCode::BAD_REQUEST, text).into_response();
    }
    if let Some(idle) = idle.filter(|idle| !IDLE_TIMES.contains(idle)) {
        let [least, most, idle] = [*IDLE_TIMES.start(), *IDLE_TIMES.end(), idle].map(in_units);
        let text = format!("idle_ms: must be from {least} to {most}, not {idle}");
        return (StatusCode::BAD_REQUEST, text).into_response();
    }
    let find = |answer| ControllerQuery::FindBackend { service: service.clone(), backend, answer };
    // If the event loop hangs, this query does not return, and the answer does not begin.
    let backend = match query(&desk.queries, find).await {
        Some(Ok(backend)) => backend,
        Some(Err(text)) => {
            let refusal = CloseRefusal { is_permission: false, is_busy: false, text };
            return Json(CloseAnswer::Refused(refusal)).into_response();
        }
        None => return stopping(),
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
    pending(awaited, accepts_gzip(&headers), JSON)
}

/// Returns the peer's credentials if the peer may send requests that change state. If the peer may
/// not, logs `what`, the refused action.
fn who_may_write(
    peer: Option<Extension<PeerCredentials>>,
    desk: &Queries,
    service: &str,
    what: &str,
) -> Result<PeerCredentials, (StatusCode, String)> {
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
    /// Ids of cgroups, separated by commas.
    cgroups: String,
}

/// Answers when the client's programs cover one of the cgroups. If the programs cover none of them
/// within [`LONGEST_WAIT`], answers with the status 503.
async fn cover(
    State(desk): State<Queries>,
    UrlPath(client): UrlPath<String>,
    Parameters(Cgroups { cgroups }): Parameters<Cgroups>,
) -> Response {
    let Ok(cgroups) = cgroups.split(',').map(str::parse).collect::<Result<Vec<u64>, _>>() else {
        return (StatusCode::BAD_REQUEST, "cgroups: must be ids, separated by commas").into_response();
    };
    if cgroups.len() > CGROUPS {
        let text = format!("cgroups: at most {CGROUPS} ids, not {}", cgroups.len());
        return (StatusCode::BAD_REQUEST, text).into_response();
    }
    let Ok(_waiting) = desk.waiting.try_acquire() else {
        let text = format!("{WAITERS} other requests are waiting for cgroups to be covered; retry");
        return (StatusCode::SERVICE_UNAVAILABLE, text).into_response();
    };
    let reply = query(&desk.queries, |answer| ControllerQuery::Cover { client, cgroups, answer });
    match tokio::time::timeout(LONGEST_WAIT, reply).await {
        Ok(Some(coverage)) => Json(coverage).into_response(),
        Ok(None) => stopping(),
        Err(_) => (StatusCode::SERVICE_UNAVAILABLE, "not covered yet; retry").into_response(),
    }
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

fn stopping() -> Response {
    (StatusCode::SERVICE_UNAVAILABLE, "the daemon is stopping").into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_coverage_request_for_more_than_64_cgroups_is_refused() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        // Returns the status code and the text of the answer, and the number of cgroups that reach
        // the event loop.
        let asked_for = |count: usize| {
            runtime.block_on(async {
                let (queries, mut asked) = mpsc::channel(1);
                let desk = Queries {
                    status: Rounds::of(queries.clone(), |facts| json(&status::of(&Linux, facts))),
                    queries,
                    explaining: Arc::new(Semaphore::new(1)),
                    waiting: Arc::new(Semaphore::new(WAITERS)),
                    admins: None,
                };
                let answering = tokio::spawn(async move {
                    let Some(ControllerQuery::Cover { cgroups, answer, .. }) = asked.recv().await else {
                        return 0;
                    };
                    answer.send(Coverage::Covered);
                    cgroups.len()
                });
                let cgroups = Cgroups { cgroups: vec!["1"; count].join(",") };
                let response = cover(State(desk), UrlPath("other".to_owned()), Parameters(cgroups)).await;
                let code = response.status().as_u16();
                let body = axum::body::to_bytes(response.into_body(), 1_024).await.expect("a text");
                (code, String::from_utf8_lossy(&body).into_owned(), answering.await.expect("the answer ends"))
            })
        };
        assert_eq!(asked_for(64), (200, r#"{"coverage":"covered"}"#.to_owned(), 64));
        assert_eq!(asked_for(65), (400, "cgroups: at most 64 ids, not 65".to_owned(), 0));
    }

    #[test]
    fn an_unknown_parameter_is_refused_with_the_known_ones() {
        fn refused<T: DeserializeOwned>(query: &str) -> String {
            let request = axum::http::Request::get(format!("/v1/x?{query}")).body(()).expect("a request");
            let (mut parts, ()) = request.into_parts();
            let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
            let read = Parameters::<T>::from_request_parts(&mut parts, &());
            let (code, text) = runtime.block_on(read).map(drop).expect_err(query);
            assert_eq!(code, StatusCode::BAD_REQUEST);
            text
        }
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
}
