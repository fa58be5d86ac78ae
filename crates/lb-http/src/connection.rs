//! The limits on memory and time of a single connection, which carries one request.
//!
//! A request has a head of at most 8 KiB and no body. The request must arrive within 5 s. The
//! server has at most a minute to produce the answer, and the peer must read the answer within 10
//! s.

use std::convert::Infallible;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use crate::peer::PeerCredentials;
use axum::Router;
use axum::body::Body;
use axum::http::header::ALLOW;
use axum::http::{Request, StatusCode};
use axum::response::{IntoResponse, Response};
use hyper::body::{Body as _, Bytes, Frame, Incoming, SizeHint};
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _, ReadBuf};
use tokio::sync::{Notify, watch};

/// Maximum size of a request head, in bytes. This is the smallest buffer that hyper accepts.
/// Requests of socklb's commands and of Prometheus are about a tenth of this size.
pub const HEAD_BYTES: usize = 8 << 10;
/// Time limit for the request to arrive.
const REQUEST_WITHIN: Duration = Duration::from_secs(5);
/// Time limit for the server to produce the answer. A request that waits until programs are
/// attached to a cgroup is answered after at most half of this time. All other requests are
/// answered within seconds.
const ANSWERING: Duration = Duration::from_secs(60);
/// Time limit for the peer to read the answer. This limit equals the default scrape timeout of
/// Prometheus.
const READING: Duration = Duration::from_secs(10);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum ConnectionPhase {
    /// The peer has to send the request.
    AwaitingRequest,
    /// The server has to produce the answer.
    Answering,
    /// The peer has to read the answer.
    Reading,
}

impl ConnectionPhase {
    const fn limit(self) -> Duration {
        match self {
            Self::AwaitingRequest => REQUEST_WITHIN,
            Self::Answering => ANSWERING,
            Self::Reading => READING,
        }
    }
}

/// The progress of a connection. A full listener uses it to choose the connection to replace.
pub struct ConnectionActivity {
    phase: watch::Sender<ConnectionPhase>,
    /// Value of [`now`] at the last read or write.
    progress: AtomicU64,
    moved: Arc<Notify>,
}

/// A logical clock, which counts the reads and writes of all connections together.
fn now() -> u64 {
    static MOMENTS: AtomicU64 = AtomicU64::new(0);
    MOMENTS.fetch_add(1, Ordering::Relaxed)
}

impl ConnectionActivity {
    pub fn new(moved: Arc<Notify>) -> Self {
        Self {
            phase: watch::Sender::new(ConnectionPhase::AwaitingRequest),
            progress: AtomicU64::new(now()),
            moved,
        }
    }

    /// Sort key for the choice of the connection to replace. Connections that have not sent a
    /// request come first; among equals, the connection that has been idle longest comes first.
    /// `None` while the connection waits for the server.
    pub fn idleness(&self) -> Option<impl Copy + Ord + use<>> {
        let phase = *self.phase.borrow();
        (phase != ConnectionPhase::Answering).then(|| (phase, self.progress.load(Ordering::Relaxed)))
    }

    fn enter(&self, phase: ConnectionPhase) {
        let changes = |now: &mut ConnectionPhase| std::mem::replace(now, phase) != phase;
        if self.phase.send_if_modified(changes) {
            self.moved.notify_one();
        }
    }

    fn awaits_request(&self) -> bool {
        *self.phase.borrow() == ConnectionPhase::AwaitingRequest
    }

    fn note_progress(&self) {
        self.progress.store(now(), Ordering::Relaxed);
    }

    /// Returns when the peer or the server has exceeded the time limit of the present phase.
    async fn overdue(&self) {
        let mut phases = self.phase.subscribe();
        // Bound: a connection has three phases.
        loop {
            let limit = phases.borrow_and_update().limit();
            if tokio::time::timeout(limit, phases.changed()).await.is_err() {
                return;
            }
        }
    }
}

/// Serves a single connection, without a listener.
pub async fn answer(stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static, router: Router) {
    serve(stream, router, Arc::new(ConnectionActivity::new(Arc::default())), None).await;
}

/// Serves one connection to its end. Errors are ignored, because the peer causes them. If the
/// peer's credentials are known, the request's extensions contain them for the handlers.
pub async fn serve(
    stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    router: Router,
    activity: Arc<ConnectionActivity>,
    peer: Option<PeerCredentials>,
) {
    let mut stream = TimedStream { stream, activity: Arc::clone(&activity) };
    let service = service_fn(|mut request: Request<Incoming>| {
        if let Some(peer) = &peer {
            request.extensions_mut().insert(peer.clone());
        }
        respond(request, router.clone(), Arc::clone(&activity))
    });
    let mut http = http1::Builder::new();
    // Each connection has only one request. So a client cannot send further requests while it does
    // not read the answer.
    http.max_buf_size(HEAD_BYTES).keep_alive(false);
    let served = async {
        let served = http.serve_connection(TokioIo::new(&mut stream), service).await;
        if let Some(refusal) = served.err().as_ref().and_then(refusal)
            && activity.awaits_request()
        {
            activity.enter(ConnectionPhase::Reading);
            let _ = stream.write_all(refusal.as_bytes()).await;
            let _ = stream.shutdown().await;
        }
    };
    tokio::select! {
        () = served => {}
        () = activity.overdue() => {}
    }
}

/// The whole answer to bytes that are not a request; `None` if the connection broke.
fn refusal(error: &hyper::Error) -> Option<String> {
    let (code, text) = if error.is_parse_too_large() {
        let text = format!("the head of a request may have at most {HEAD_BYTES} bytes and 100 headers");
        (StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE, text)
    } else if error.is_parse() {
        (StatusCode::BAD_REQUEST, "this is not a request by HTTP/1.1".to_owned())
    } else {
        return None;
    };
    let length = text.len();
    Some(format!(
        "HTTP/1.1 {code}\r\ncontent-type: text/plain; charset=utf-8\r\nconnection: close\r\n\
         content-length: {length}\r\n\r\n{text}"
    ))
}

async fn respond(
    request: Request<Incoming>,
    router: Router,
    activity: Arc<ConnectionActivity>,
) -> Result<Response<Observed>, Infallible> {
    activity.enter(ConnectionPhase::Answering);
    let path = request.uri().path().to_owned();
    let response = if request.body().is_end_stream() {
        TowerToHyperService::new(router).call(request).await?
    } else {
        (StatusCode::PAYLOAD_TOO_LARGE, "a request must not have a body").into_response()
    };
    let response = explained(response, &path);
    if response.body().is_end_stream() {
        activity.enter(ConnectionPhase::Reading);
    }
    Ok(response.map(|body| Observed { body, activity }))
}

/// Adds a text to the router's own refusals, which have no body.
fn explained(response: Response, path: &str) -> Response {
    if !response.body().is_end_stream() {
        return response;
    }
    let code = response.status();
    let allow = response.headers().get(ALLOW).cloned();
    match (code, allow) {
        (StatusCode::NOT_FOUND, _) => (code, format!("there is no path {path}")).into_response(),
        (StatusCode::METHOD_NOT_ALLOWED, Some(allow)) => {
            let methods = String::from_utf8_lossy(allow.as_bytes()).replace(',', " or ");
            (code, [(ALLOW, allow)], format!("the method of this path is {methods}")).into_response()
        }
        _ => response,
    }
}

/// The body of an answer. When its first part is requested, the reading phase begins.
struct Observed {
    body: Body,
    activity: Arc<ConnectionActivity>,
}

impl hyper::body::Body for Observed {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(context));
        self.activity.enter(ConnectionPhase::Reading);
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// A stream that records each successful read and write. Before there is a request, writes are
/// discarded: hyper then writes only its own refusals, which have no body. [`serve`] writes them
/// with a text.
struct TimedStream<S> {
    stream: S,
    activity: Arc<ConnectionActivity>,
}

impl<S> TimedStream<S> {
    fn seen<T>(&self, result: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if matches!(result, Poll::Ready(Ok(_))) {
            self.activity.note_progress();
        }
        result
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for TimedStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let result = Pin::new(&mut self.stream).poll_read(context, buffer);
        self.seen(result)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for TimedStream<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        if self.activity.awaits_request() {
            return Poll::Ready(Ok(bytes.len()));
        }
        let result = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.seen(result)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if self.activity.awaits_request() {
            return Poll::Ready(Ok(parts.iter().map(|part| part.len()).sum()));
        }
        let result = Pin::new(&mut self.stream).poll_write_vectored(context, parts);
        self.seen(result)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.activity.awaits_request() {
            return Poll::Ready(Ok(()));
        }
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use axum::routing::{get, post};
    use tokio::io::AsyncReadExt as _;

    use super::*;

    /// The answer to these bytes, without its date and `connection`.
    fn answer_to(request: &str) -> String {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            let (mut peer, stream) = tokio::io::duplex(64 << 10);
            let router = Router::new()
                .route("/a", get(|| async { "well" }))
                .route("/b", post(|| async { StatusCode::NOT_FOUND }))
                .route("/c", get(|| async { (StatusCode::NOT_FOUND, "no such thing") }));
            peer.write_all(request.as_bytes()).await.expect("send the request");
            let mut text = String::new();
            let (read, ()) = tokio::join!(peer.read_to_string(&mut text), answer(stream, router));
            read.expect("read the answer");
            assert!(text.contains("\r\nconnection: close\r\n"), "{text}");
            let others = |line: &&str| !line.starts_with("date: ") && !line.starts_with("connection: ");
            text.split("\r\n").filter(others).collect::<Vec<_>>().join("\n")
        })
    }

    #[test]
    fn every_refusal_has_a_text() {
        let refusal = |first: &str, allow: &str, text: &str| {
            let length = text.len();
            format!(
                "HTTP/1.1 {first}\ncontent-type: text/plain; charset=utf-8\n{allow}\
                 content-length: {length}\n\n{text}"
            )
        };
        let head = |line: &str| format!("{line} HTTP/1.1\r\nhost: localhost\r\n\r\n");
        assert!(answer_to(&head("GET /a")).ends_with("\n\nwell"));
        for (request, expected) in [
            (
                head("POST /a"),
                refusal(
                    "405 Method Not Allowed",
                    "allow: GET,HEAD\n",
                    "the method of this path is GET or HEAD",
                ),
            ),
            (
                head("GET /b"),
                refusal("405 Method Not Allowed", "allow: POST\n", "the method of this path is POST"),
            ),
            (head("POST /b"), refusal("404 Not Found", "", "there is no path /b")),
            (head("GET /c"), refusal("404 Not Found", "", "no such thing")),
            (head("GET /d"), refusal("404 Not Found", "", "there is no path /d")),
            (
                head(&format!("GET /{}", "x".repeat(HEAD_BYTES))),
                refusal(
                    "431 Request Header Fields Too Large",
                    "",
                    "the head of a request may have at most 8192 bytes and 100 headers",
                ),
            ),
            (
                "SSH-2.0\r\n\r\n".to_owned(),
                refusal("400 Bad Request", "", "this is not a request by HTTP/1.1"),
            ),
        ] {
            assert_eq!(answer_to(&request), expected);
        }
    }
}
