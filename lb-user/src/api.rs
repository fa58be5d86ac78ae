//! The daemon's Unix socket: HTTP/1.1 with JSON, so that `curl --unix-socket` reads what the commands read.
//!
//! Handlers know nothing: they pass a question to the event loop and its answer back.

use std::io;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use axum::extract::{Path as UrlPath, Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use http_body_util::{BodyExt, Empty, Limited};
use hyper::body::Bytes;
use hyper_util::rt::TokioIo;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{mpsc, oneshot};

use crate::explain::Explanation;
use crate::metrics::Facts;
use crate::status::Status;

/// A question to the event loop.
#[derive(Debug)]
pub enum Question {
    /// What is the balancer doing?
    Status(oneshot::Sender<Status>),
    /// What do you know that the maps do not hold?
    Facts(oneshot::Sender<Facts>),
    /// Why these backends? Of a service, of one client or of all.
    Explain { service: String, client: Option<String>, answer: oneshot::Sender<Vec<Explanation>> },
    /// Tell me when a client's programs are attached to one of these cgroups.
    Cover { client: String, cgroups: Vec<u64>, answer: oneshot::Sender<Coverage> },
}

/// Whether a client's programs are attached to a cgroup that somebody is in.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "coverage")]
pub enum Coverage {
    /// They are.
    Covered,
    /// They will not be: the client's cgroup is another one, and exists.
    Elsewhere {
        /// The client's cgroup.
        configured: PathBuf,
    },
    /// There is no such client.
    UnknownClient {
        /// Those that there are.
        clients: Vec<String>,
    },
}

/// Where the socket is.
pub fn socket(run: &Path) -> PathBuf {
    run.join("socklb.sock")
}

/// A socket that is bound, but not at its place yet.
pub struct Bound {
    listener: Option<UnixListener>,
    hidden: PathBuf,
    path: PathBuf,
}

/// Binds the socket under another name: what can go wrong shows before the kernel is touched, and nobody can connect
/// before there is something to tell. A socket that nobody answers is a dead daemon's and is replaced.
///
/// # Errors
/// If the directory cannot be made, or something else than a socket lies there.
pub fn bind(run: &Path) -> io::Result<Bound> {
    std::fs::create_dir_all(run)?;
    let path = socket(run);
    let hidden = run.join("socklb.sock.new");
    for path in [&path, &hidden] {
        match std::fs::symlink_metadata(path) {
            Ok(metadata) if metadata.file_type().is_socket() => {
                if std::os::unix::net::UnixStream::connect(path).is_ok() {
                    let text = "another socklb answers there: stop it, or name another directory with --run";
                    return Err(io::Error::new(io::ErrorKind::AddrInUse, text));
                }
                std::fs::remove_file(path)?;
            }
            Ok(_) => {
                return Err(io::Error::new(io::ErrorKind::AlreadyExists, "what lies there is not a socket"));
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    let listener = UnixListener::bind(&hidden)?;
    std::fs::set_permissions(&hidden, std::fs::Permissions::from_mode(0o660))?;
    Ok(Bound { listener: Some(listener), hidden, path })
}

impl Bound {
    /// Puts the socket at its place.
    ///
    /// # Errors
    /// If it cannot be renamed.
    pub fn show(mut self) -> io::Result<UnixListener> {
        std::fs::rename(&self.hidden, &self.path)?;
        Ok(self.listener.take().expect("shown once"))
    }
}

impl Drop for Bound {
    fn drop(&mut self) {
        // A start that failed leaves no socket behind.
        if self.listener.is_some() {
            let _ = std::fs::remove_file(&self.hidden);
        }
    }
}

/// Serves questions until the daemon ends, and what `metrics` answers.
///
/// # Errors
/// If the socket breaks.
pub async fn serve(
    listener: UnixListener,
    questions: mpsc::Sender<Question>,
    metrics: Router,
) -> io::Result<()> {
    let router = Router::new()
        .route("/v1/status", get(status))
        .route("/v1/explain/{service}", get(explain))
        .route("/v1/cover/{client}", get(cover))
        .with_state(questions)
        .merge(metrics);
    axum::serve(listener, router).await
}

async fn status(State(questions): State<mpsc::Sender<Question>>) -> Response {
    let (answer, reply) = oneshot::channel();
    ask(&questions, Question::Status(answer), reply).await
}

#[derive(Deserialize)]
struct Which {
    client: Option<String>,
}

async fn explain(
    State(questions): State<mpsc::Sender<Question>>,
    UrlPath(service): UrlPath<String>,
    Query(which): Query<Which>,
) -> Response {
    let (answer, reply) = oneshot::channel();
    ask(&questions, Question::Explain { service, client: which.client, answer }, reply).await
}

#[derive(Deserialize)]
struct Cgroups {
    /// Ids with commas between.
    cgroups: String,
}

/// Answers when it is so, or never: who asks gives up in its own time.
async fn cover(
    State(questions): State<mpsc::Sender<Question>>,
    UrlPath(client): UrlPath<String>,
    Query(Cgroups { cgroups }): Query<Cgroups>,
) -> Response {
    let Ok(cgroups) = cgroups.split(',').map(str::parse).collect::<Result<Vec<u64>, _>>() else {
        return (StatusCode::BAD_REQUEST, "cgroups: ids with commas between are wanted").into_response();
    };
    let (answer, reply) = oneshot::channel();
    ask(&questions, Question::Cover { client, cgroups, answer }, reply).await
}

async fn ask<T: Serialize>(
    questions: &mpsc::Sender<Question>,
    question: Question,
    reply: oneshot::Receiver<T>,
) -> Response {
    if questions.send(question).await.is_ok()
        && let Ok(answer) = reply.await
    {
        return Json(answer).into_response();
    }
    (StatusCode::SERVICE_UNAVAILABLE, "the daemon is stopping").into_response()
}

/// What came of a question to the daemon.
#[derive(Debug)]
pub enum Answer<T> {
    /// What it said.
    Given(T),
    /// None runs with this directory.
    NotRunning,
    /// One runs, and said nothing in time: it is stopped, or hangs.
    Silent,
}

/// Asks the daemon that runs with this directory, and does not wait long: whoever asks can do without it.
///
/// # Errors
/// If one runs and answers otherwise than it should.
pub fn ask_daemon<T: DeserializeOwned>(run: &Path, path: &str) -> Result<Answer<T>> {
    /// The daemon answers between two events of its loop, which take milliseconds.
    const PATIENCE: Duration = Duration::from_secs(2);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    match runtime.block_on(async { tokio::time::timeout(PATIENCE, fetch(run, path)).await }) {
        Ok(Ok(Some(answer))) => Ok(Answer::Given(answer)),
        Ok(Ok(None)) => Ok(Answer::NotRunning),
        Ok(Err(error)) if is_full(&error) => Ok(Answer::Silent),
        Ok(Err(error)) => Err(error),
        Err(_) => Ok(Answer::Silent),
    }
}

/// What to say of a daemon that is silent.
pub fn silent(run: &Path) -> String {
    format!("the daemon at {} does not answer", socket(run).display())
}

/// Whether the socket takes nobody any more: so many wait for a daemon that hangs.
fn is_full(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::WouldBlock)
}

/// As [`ask_daemon`], without a limit of time of its own; `None` if no daemon runs.
///
/// # Errors
/// If one runs and does not answer as it should.
pub async fn fetch<T: DeserializeOwned>(run: &Path, path: &str) -> Result<Option<T>> {
    /// A status of 64 clients with 16,384 backends each, of which each takes about a kilobyte, is far below this.
    const MAX_BYTES: usize = 1 << 32;
    let socket = socket(run);
    let stream = match UnixStream::connect(&socket).await {
        Ok(stream) => stream,
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => {
            return Ok(None);
        }
        Err(error) => return Err(error).with_context(|| format!("connect to {}", socket.display())),
    };
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    tokio::spawn(connection);
    let request = hyper::Request::get(path).header("host", "localhost").body(Empty::<Bytes>::new())?;
    let response = sender.send_request(request).await.with_context(|| format!("ask {}", socket.display()))?;
    let status = response.status();
    let body = Limited::new(response.into_body(), MAX_BYTES).collect().await;
    let body = body.map_err(|error| anyhow::anyhow!(error))?.to_bytes();
    if status != StatusCode::OK {
        bail!("the daemon answers {status} to {path}: {}", String::from_utf8_lossy(&body));
    }
    Ok(Some(serde_json::from_slice(&body).context("the daemon's answer is of another version")?))
}
