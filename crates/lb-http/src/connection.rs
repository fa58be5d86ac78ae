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
use axum::http::{Request, StatusCode};
use axum::response::{IntoResponse, Response};
use hyper::body::{Body as _, Bytes, Frame, Incoming, SizeHint};
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
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

    fn has_moved(&self) {
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
    let stream = TimedStream { stream, activity: Arc::clone(&activity) };
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
    tokio::select! {
        _ = http.serve_connection(TokioIo::new(stream), service) => {}
        () = activity.overdue() => {}
    }
}

async fn respond(
    request: Request<Incoming>,
    router: Router,
    activity: Arc<ConnectionActivity>,
) -> Result<Response<Observed>, Infallible> {
    activity.enter(ConnectionPhase::Answering);
    let response = if request.body().is_end_stream() {
        TowerToHyperService::new(router).call(request).await?
    } else {
        (StatusCode::PAYLOAD_TOO_LARGE, "a request must not have a body").into_response()
    };
    if response.body().is_end_stream() {
        activity.enter(ConnectionPhase::Reading);
    }
    Ok(response.map(|body| Observed { body, activity }))
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

/// A stream that records each successful read and write.
struct TimedStream<S> {
    stream: S,
    activity: Arc<ConnectionActivity>,
}

impl<S> TimedStream<S> {
    fn seen<T>(&self, result: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if matches!(result, Poll::Ready(Ok(_))) {
            self.activity.has_moved();
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
        let result = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.seen(result)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
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
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
