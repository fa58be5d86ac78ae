//! Who gets a page: whoever asks for `/metrics` on the daemon's socket, or on a loopback port if one is configured.
//!
//! Pages are long and readers may be slow or stop: a page is written by a thread beside the loop in parts, a few at a time,
//! each when the one before is taken.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::http::header::{ACCEPT, CONTENT_TYPE};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use hyper::body::{Bytes, Frame};
use tokio::net::TcpListener;
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, mpsc, oneshot};

use super::page::{self, Form};
use crate::api::Question;

/// Pages that are written at the same time: each holds a thread, and a copy of all counts.
const PAGES: usize = 4;
/// How long the reader of a page may take. Prometheus' own limit is 10 s unless it is told otherwise.
const PATIENCE: Duration = Duration::from_secs(60);
/// Bytes of a part.
const PART: usize = 64 << 10;
/// Parts that wait for a reader.
const WAITING: usize = 4;

/// What pages are made with.
#[derive(Clone)]
struct Desk {
    questions: mpsc::Sender<Question>,
    pages: Arc<Semaphore>,
}

/// Binds the port: what can go wrong shows before the kernel is touched.
///
/// # Errors
/// If it cannot be listened on.
pub fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let listener = std::net::TcpListener::bind(address)?;
    listener.set_nonblocking(true)?;
    TcpListener::from_std(listener)
}

/// Answers requests for `/metrics`.
pub fn router(questions: mpsc::Sender<Question>) -> Router {
    let desk = Desk { questions, pages: Arc::new(Semaphore::new(PAGES)) };
    Router::new().route("/metrics", get(metrics)).with_state(desk)
}

/// Serves the port until the daemon ends.
///
/// # Errors
/// If the listener breaks.
pub async fn serve(listener: TcpListener, router: Router) -> io::Result<()> {
    axum::serve(listener, router).await
}

async fn metrics(State(desk): State<Desk>, headers: HeaderMap) -> Response {
    let Ok(permit) = desk.pages.try_acquire_owned() else {
        let text = format!("{PAGES} others are reading metrics now");
        return (StatusCode::SERVICE_UNAVAILABLE, text).into_response();
    };
    let (answer, reply) = oneshot::channel();
    let asked = desk.questions.send(Question::Facts(answer)).await;
    let (Ok(()), Ok(facts)) = (asked, reply.await) else {
        return (StatusCode::SERVICE_UNAVAILABLE, "the daemon is stopping").into_response();
    };
    let form = Form::accepted(headers.get(ACCEPT).and_then(|value| value.to_str().ok()));
    let (parts, taken) = mpsc::channel(WAITING);
    tokio::task::spawn_blocking(move || {
        let mut writer = Writer::new(parts);
        if page::write(facts, form, &mut writer).is_ok() {
            writer.finish();
        }
        drop(permit);
    });
    ([(CONTENT_TYPE, form.content_type())], Body::new(Parts { taken, complete: false })).into_response()
}

/// Sends what is written, in parts. For a thread that may block.
struct Writer {
    parts: mpsc::Sender<Option<Bytes>>,
    part: Vec<u8>,
    deadline: Pin<Box<tokio::time::Sleep>>,
}

impl Writer {
    fn new(parts: mpsc::Sender<Option<Bytes>>) -> Self {
        let runtime = Handle::current();
        let _context = runtime.enter();
        Self { parts, part: Vec::with_capacity(PART), deadline: Box::pin(tokio::time::sleep(PATIENCE)) }
    }

    fn send(&mut self, part: Option<Bytes>) -> fmt::Result {
        let Self { parts, deadline, .. } = self;
        Handle::current().block_on(async {
            tokio::select! {
                sent = parts.send(part) => sent.map_err(|_| fmt::Error),
                () = deadline => Err(fmt::Error),
            }
        })
    }

    fn flush(&mut self) -> fmt::Result {
        let part = std::mem::replace(&mut self.part, Vec::with_capacity(PART));
        self.send(Some(part.into()))
    }

    /// Says that the page is whole. A reader that is gone does not care.
    fn finish(mut self) {
        let _ = self.flush().and_then(|()| self.send(None));
    }
}

impl fmt::Write for Writer {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        if self.part.len() + text.len() > PART {
            self.flush()?;
        }
        self.part.extend_from_slice(text.as_bytes());
        Ok(())
    }
}

/// The parts of a page, for who reads it.
struct Parts {
    taken: mpsc::Receiver<Option<Bytes>>,
    complete: bool,
}

impl hyper::body::Body for Parts {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        if self.complete {
            return Poll::Ready(None);
        }
        self.taken.poll_recv(context).map(|part| match part {
            Some(Some(part)) => Some(Ok(Frame::data(part))),
            Some(None) => {
                self.complete = true;
                None
            }
            // Not an end: a page that is cut off must not be taken for a whole one.
            None => Some(Err(io::Error::other("the page took too long"))),
        })
    }
}
