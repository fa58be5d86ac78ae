//! The client of the agent's control socket, for commands and for programs that run backends.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use axum::http::{Method, StatusCode};
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::body::Bytes;
use hyper_util::rt::TokioIo;
use lb_host::trust::{self, Untrusted};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde::de::DeserializeOwned;
use thiserror::Error;
use tokio::net::UnixStream;

use crate::config::{AgentConfig, DEFAULT_PATH};
use crate::serve::control;

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
        Self { socket: control::socket(run), run: run.to_owned() }
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
