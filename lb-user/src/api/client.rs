//! The commands' queries to a running daemon. They have time limits, so that a hung daemon does not
//! block a command.

use std::io;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use axum::http::{Method, StatusCode};
use http_body_util::{BodyExt, Empty, Limited};
use hyper::Response;
use hyper::body::{Bytes, Incoming};
use hyper_util::rt::TokioIo;
use lb_kernel::trust;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, PercentEncode};
use serde::de::DeserializeOwned;
use tokio::net::UnixStream;
use tokio::task::JoinSet;

use super::socket;
use crate::config::Paths;

/// Encodes a name as a segment of a path or a value in a query. Names may contain any character
/// except `/`.
pub fn quoted(name: &str) -> PercentEncode<'_> {
    /// The characters to encode. Characters that RFC 3986 allows unencoded are removed from the
    /// set: an encoded dot, colon or comma of an address needs three bytes, and the size of a
    /// request's head is limited.
    const QUOTED: &AsciiSet =
        &NON_ALPHANUMERIC.remove(b'.').remove(b':').remove(b',').remove(b'-').remove(b'_').remove(b'~');
    percent_encoding::utf8_percent_encode(name, QUOTED)
}

/// The maximum length of a path with its query, in bytes. The server limits the whole head of a
/// request. The rest of the head needs less than 256 bytes.
pub const MAX_PATH: usize = lb_http::HEAD_BYTES - 256;

/// The daemon ended before it completed the answer to a request that changes state. The change may
/// have been made.
#[derive(Debug, thiserror::Error)]
#[error("the daemon ended before it answered: the change, or a part of it, may have been made")]
pub struct DaemonEnded;

/// The result of a query to the daemon.
#[derive(Debug)]
pub enum Answer<T> {
    Given(T),
    /// No daemon listens in this directory.
    NotRunning,
    /// A daemon runs, but has not answered in time: it is stopped, or hangs.
    NotResponding,
}

/// Queries the daemon with the socket in `paths.run`. Waits at most two seconds for the beginning
/// of the answer, because the callers also work without a daemon.
///
/// # Errors
/// If the daemon is not trusted, or its answer cannot be parsed.
pub fn query_daemon<T: DeserializeOwned>(paths: &Paths, path: &str) -> Result<Answer<T>> {
    request(paths, Method::GET, path, TO_BEGIN)
}

/// Like [`query_daemon`], for requests that change state.
///
/// # Errors
/// If the daemon is not trusted, or refuses the request. The kind is `PermissionDenied` if this
/// user has no permission. The error is [`DaemonEnded`] if the daemon ended before the answer was
/// complete.
pub fn post_to_daemon<T: DeserializeOwned>(paths: &Paths, path: &str) -> Result<Answer<T>> {
    request(paths, Method::POST, path, TO_BEGIN)
}

/// Like [`post_to_daemon`], on the caller's runtime, for work that takes the daemon at most ten
/// seconds. If the future is dropped, the connection ends.
///
/// # Errors
/// The errors of [`post_to_daemon`].
pub async fn post_cancellable<T: DeserializeOwned>(paths: &Paths, path: &str) -> Result<Answer<T>> {
    const TO_WORK: Duration = Duration::from_secs(15);
    send(paths, Method::POST, path, TO_BEGIN, TO_WORK).await
}

/// Like [`post_to_daemon`], for changes that the daemon stores before it answers.
///
/// # Errors
/// The errors of [`post_to_daemon`].
pub fn post_and_store<T: DeserializeOwned>(paths: &Paths, path: &str) -> Result<Answer<T>> {
    /// The daemon answers after 5 s at the latest, even if its file system does not respond.
    const TO_STORE: Duration = Duration::from_secs(10);
    request(paths, Method::POST, path, TO_STORE)
}

/// The usual limit for the beginning of an answer. The daemon starts to send a status between two
/// events of its loop, each of which takes milliseconds. It starts to send an explanation when the
/// explanation is complete.
const TO_BEGIN: Duration = Duration::from_secs(2);
/// The usual limit for a complete answer. With the maximum number of clients and services, an
/// answer takes one or two seconds.
const TO_END: Duration = Duration::from_secs(30);

fn request<T: DeserializeOwned>(
    paths: &Paths,
    method: Method,
    path: &str,
    to_begin: Duration,
) -> Result<Answer<T>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(send(paths, method, path, to_begin, TO_END))
}

async fn send<T: DeserializeOwned>(
    paths: &Paths,
    method: Method,
    path: &str,
    to_begin: Duration,
    to_end: Duration,
) -> Result<Answer<T>> {
    // If the connection breaks during a request that changes state, it is unknown whether the
    // change was made. The result is then an error, not `NotRunning`.
    let changes_nothing = method == Method::GET;
    let ended = || if changes_nothing { Ok(Answer::NotRunning) } else { Err(DaemonEnded.into()) };
    let response = match tokio::time::timeout(to_begin, begin(paths, method, path)).await {
        Ok(Ok(Some(response))) => response,
        Ok(Ok(None)) => return Ok(Answer::NotRunning),
        Ok(Err(error)) if is_full(&error) => return Ok(Answer::NotResponding),
        Ok(Err(error)) if has_ended(&error) => return ended(),
        Ok(Err(error)) => return Err(error),
        Err(_) => return Ok(Answer::NotResponding),
    };
    match tokio::time::timeout(to_end, end(response, path)).await {
        Ok(Err(error)) if has_ended(&error) => ended(),
        Ok(answer) => answer.map(Answer::Given),
        Err(_) => Ok(Answer::NotResponding),
    }
}

/// The message for a daemon that does not answer.
pub fn not_responding(run: &Path) -> String {
    format!("the daemon at {} does not answer", socket(run).display())
}

/// Whether the socket's queue is full because the daemon hangs.
fn is_full(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::WouldBlock)
}

/// Whether the daemon ended before its answer was complete.
fn has_ended(error: &anyhow::Error) -> bool {
    let has_ended = |kind| {
        matches!(
            kind,
            io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe | io::ErrorKind::UnexpectedEof
        )
    };
    error.chain().any(|cause| {
        let http = cause.downcast_ref::<hyper::Error>();
        http.is_some_and(|error| error.is_incomplete_message() || error.is_closed() || error.is_canceled())
            || cause.downcast_ref::<io::Error>().is_some_and(|error| has_ended(error.kind()))
    })
}

/// Like [`query_daemon`], without a time limit; `None` if no daemon runs.
///
/// # Errors
/// If the daemon is not trusted, or its answer cannot be parsed.
pub async fn fetch<T: DeserializeOwned>(paths: &Paths, path: &str) -> Result<Option<T>> {
    match begin(paths, Method::GET, path).await? {
        Some(response) => end(response, path).await.map(Some),
        None => Ok(None),
    }
}

/// The head of an answer, and the task that reads and writes the connection. The task ends when
/// this value is dropped.
type Begun = (Response<Incoming>, JoinSet<hyper::Result<()>>);

async fn begin(paths: &Paths, method: Method, path: &str) -> Result<Option<Begun>> {
    let socket = socket(&paths.run);
    let stream = match UnixStream::connect(&socket).await {
        Ok(stream) => stream,
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => {
            return Ok(None);
        }
        Err(error) => return Err(error).with_context(|| format!("connect to {}", socket.display())),
    };
    trust::check_daemon(stream.peer_cred()?.uid(), &socket, &paths.pins)?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    let mut task = JoinSet::new();
    task.spawn(connection);
    let request = hyper::Request::builder().method(method).uri(path);
    let request = request.header("host", "localhost").body(Empty::<Bytes>::new())?;
    let response = sender.send_request(request).await;
    response.map(|response| Some((response, task))).with_context(|| format!("query {}", socket.display()))
}

async fn end<T: DeserializeOwned>((response, _task): Begun, path: &str) -> Result<T> {
    /// The maximum size of an answer. A status of 64 clients with 16,384 backends each has about 1
    /// GiB: about 1 KiB per backend.
    const MAX_BYTES: usize = 1 << 32;
    let status = response.status();
    let body = Limited::new(response.into_body(), MAX_BYTES).collect().await;
    let body = body.map_err(anyhow::Error::from_boxed)?.to_bytes();
    if status == StatusCode::FORBIDDEN {
        let text = String::from_utf8_lossy(&body).into_owned();
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, text).into());
    }
    // The text names what does not exist.
    if status == StatusCode::NOT_FOUND && !body.is_empty() {
        bail!("{}", String::from_utf8_lossy(&body));
    }
    if status != StatusCode::OK {
        let path = path.split('?').next().unwrap_or_default();
        bail!("the daemon answers {status} to {path}: {}", String::from_utf8_lossy(&body));
    }
    serde_json::from_slice(&body).context("the daemon's answer has the format of another version")
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::os::unix::net::UnixListener;

    use super::*;

    /// Queries a daemon that reads a request, sends this answer, and ends.
    fn request_answered(answer: &'static [u8], method: Method) -> Result<Answer<u32>> {
        let folder = tempfile::tempdir().unwrap();
        let paths =
            Paths { pins: folder.path().into(), run: folder.path().into(), state: folder.path().into() };
        let listener = UnixListener::bind(socket(&paths.run)).unwrap();
        let daemon = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = [0; 1024];
            assert!(stream.read(&mut request).unwrap() > 0);
            stream.write_all(answer).unwrap();
        });
        let answer = request(&paths, method, "/v1/status", TO_BEGIN);
        daemon.join().unwrap();
        answer
    }

    #[test]
    fn the_server_accepts_the_longest_path() {
        let folder = tempfile::tempdir().unwrap();
        let paths =
            Paths { pins: folder.path().into(), run: folder.path().into(), state: folder.path().into() };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let answer = runtime.block_on(async {
            let listener = tokio::net::UnixListener::bind(socket(&paths.run)).unwrap();
            let router = axum::Router::new().fallback(|| async { axum::Json(17) });
            tokio::spawn(async move {
                let (stream, _) = listener.accept().await.unwrap();
                lb_http::answer(stream, router).await;
            });
            let path = format!("/{}", "x".repeat(MAX_PATH - 1));
            send::<u32>(&paths, Method::POST, &path, TO_BEGIN, TO_END).await
        });
        assert!(matches!(answer, Ok(Answer::Given(17))), "{answer:?}");
    }

    #[test]
    fn only_characters_that_a_query_cannot_contain_are_quoted() {
        let name = "10.0.0.1:80,[2001:db8::1]:80,a-b_c~d &=+#?/%é";
        let expected = "10.0.0.1:80,%5B2001:db8::1%5D:80,a-b_c~d%20%26%3D%2B%23%3F%2F%25%C3%A9";
        assert_eq!(quoted(name).to_string(), expected);
    }

    #[test]
    fn a_daemon_that_ends_before_its_answer_is_complete_is_not_running() {
        let whole = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n17";
        assert!(matches!(request_answered(whole, Method::GET), Ok(Answer::Given(17))));
        let chunked = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\n17\r\n0\r\n\r\n";
        assert!(matches!(request_answered(chunked, Method::POST), Ok(Answer::Given(17))));
        let cuts = [0, 10, 30, whole.len() - 1].map(|cut| &whole[..cut]);
        for cut in cuts.into_iter().chain([1, 5, 7].map(|cut| &chunked[..chunked.len() - cut])) {
            let answer = request_answered(cut, Method::GET);
            assert!(matches!(answer, Ok(Answer::NotRunning)), "{cut:?}: {:?}", answer.err());
            let error =
                request_answered(cut, Method::POST).expect_err("an incomplete answer to a POST is an error");
            assert!(error.is::<DaemonEnded>(), "{cut:?}: {error:#}");
        }
        assert!(
            request_answered(b"SSH-2.0-OpenSSH\r\n\r\n", Method::GET).is_err(),
            "an answer that is not HTTP is an error"
        );
    }
}
