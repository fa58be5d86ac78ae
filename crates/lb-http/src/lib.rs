//! HTTP between processes: the client for health checks ([`probe`](probe::probe)), and the server
//! for the daemon, its metrics and the agent.
//!
//! A connection takes a limited number of descriptors, bytes and seconds, regardless of its peer's
//! behaviour. A listener serves a limited number of connections, and each connection carries one
//! request. When the limit is reached, a new connection replaces the connection that has been idle
//! longest, so even many silent peers cannot displace an active peer. The server does not interpret
//! the content of requests.

mod connection;
mod document;
mod limited;
pub mod parameters;
pub mod peer;
pub mod probe;

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::sync::Notify;
use tokio::task::{AbortHandle, Id, JoinSet};
use tracing::{info, warn};

pub use connection::{HEAD_BYTES, answer};
pub use document::{CompressedDocument, ContentCoding, DocumentWriter, accepts_gzip, pending, respond};

pub use self::limited::{LimitedStream, limited};

use self::connection::ConnectionActivity;
use self::peer::PeerCredentials;

pub trait StreamListener: Send + Sync {
    type Stream: AsyncRead + AsyncWrite + Send + Unpin + 'static;

    /// Accepts the next connection.
    fn next(&self) -> impl Future<Output = io::Result<Self::Stream>> + Send;

    /// The process at the other end of `stream`, if the kernel reports this process.
    fn peer(stream: &Self::Stream) -> Option<PeerCredentials> {
        let _ = stream;
        None
    }
}

impl StreamListener for UnixListener {
    type Stream = UnixStream;

    async fn next(&self) -> io::Result<UnixStream> {
        Ok(self.accept().await?.0)
    }

    fn peer(stream: &UnixStream) -> Option<PeerCredentials> {
        PeerCredentials::of(stream).ok()
    }
}

impl StreamListener for TcpListener {
    type Stream = TcpStream;

    async fn next(&self) -> io::Result<TcpStream> {
        Ok(self.accept().await?.0)
    }
}

/// Serves a listener, with at most `limit` simultaneous connections, until the task is aborted.
pub async fn serve<L: StreamListener>(listener: L, router: Router, limit: usize) {
    /// The first pause after an error that does not concern a single connection, such as a lack of
    /// descriptors. Each further consecutive error doubles the pause.
    const FIRST_PAUSE: Duration = Duration::from_millis(10);
    const LONGEST_PAUSE: Duration = Duration::from_secs(1);
    let mut hall = OpenConnections {
        limit,
        router,
        taken: HashMap::new(),
        tasks: JoinSet::new(),
        moved: Arc::default(),
    };
    let mut pause = None;
    // Runs until the task is aborted.
    loop {
        tokio::select! {
            Some(ended) = hall.tasks.join_next_with_id() => hall.left(ended.map_or_else(|error| error.id(), |(id, ())| id)),
            // A connection has changed its phase, so the loop checks again whether a connection can
            // be replaced.
            () = hall.moved.notified(), if !hall.has_room() => {}
            accepted = listener.next(), if hall.has_room() => match accepted {
                Ok(stream) => {
                    if pause.take().is_some() {
                        info!("accepting connections again");
                    }
                    let peer = L::peer(&stream);
                    hall.admit(stream, peer);
                }
                Err(error) if is_of_one_connection(&error) => {}
                Err(error) => {
                    if pause.is_none() {
                        warn!(%error, "cannot accept connections; retrying with a growing pause");
                    }
                    let next = pause.map_or(FIRST_PAUSE, |last: Duration| LONGEST_PAUSE.min(2 * last));
                    pause = Some(next);
                    tokio::time::sleep(next).await;
                }
            },
        }
    }
}

/// Whether the error concerns only the connection that was being accepted. accept(2) reports such
/// errors.
fn is_of_one_connection(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset, Interrupted};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset | Interrupted)
}

struct OpenConnections {
    limit: usize,
    router: Router,
    taken: HashMap<Id, (AbortHandle, Arc<ConnectionActivity>)>,
    /// The tasks of the open connections, and aborted tasks that have not ended yet.
    tasks: JoinSet<()>,
    /// Notified when a connection may have become replaceable.
    moved: Arc<Notify>,
}

impl OpenConnections {
    /// Whether one more connection can be accepted. At the limit, the new connection replaces an
    /// idle one, and the limit is exceeded by one connection until the aborted task has ended.
    fn has_room(&self) -> bool {
        self.tasks.len() < self.limit || (self.tasks.len() == self.limit && self.idlest().is_some())
    }

    fn admit(
        &mut self,
        stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
        peer: Option<PeerCredentials>,
    ) {
        if self.tasks.len() >= self.limit
            && let Some(id) = self.idlest()
            && let Some((task, _)) = self.taken.remove(&id)
        {
            task.abort();
        }
        let activity = Arc::new(ConnectionActivity::new(Arc::clone(&self.moved)));
        let serving = connection::serve(stream, self.router.clone(), Arc::clone(&activity), peer);
        let task = self.tasks.spawn(serving);
        self.taken.insert(task.id(), (task, activity));
    }

    fn left(&mut self, id: Id) {
        self.taken.remove(&id);
    }

    /// The connection to replace: the one that has been idle longest. Connections without a request
    /// come first. Connections that wait for the server are excluded.
    fn idlest(&self) -> Option<Id> {
        let idle = self.taken.iter().filter_map(|(id, (_, activity))| Some((activity.idleness()?, *id)));
        idle.min_by_key(|(idleness, _)| *idleness).map(|(_, id)| id)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::sync::Mutex;

    use rustix::io::Errno;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
    use tokio::time::Instant;

    use super::*;

    /// Returns the results one after the other, then waits forever.
    struct Scripted {
        results: Mutex<VecDeque<io::Result<DuplexStream>>>,
        /// When a connection was requested, in milliseconds.
        requests: Arc<Mutex<Vec<u128>>>,
        start: Instant,
    }

    impl StreamListener for Scripted {
        type Stream = DuplexStream;

        async fn next(&self) -> io::Result<DuplexStream> {
            self.requests.lock().unwrap().push(self.start.elapsed().as_millis());
            let next = self.results.lock().unwrap().pop_front();
            match next {
                Some(result) => result,
                None => std::future::pending().await,
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_failed_accept_is_retried_after_a_growing_pause() {
        let (mut client, server) = duplex(1024);
        let errors = [Errno::MFILE, Errno::CONNABORTED, Errno::MFILE, Errno::NOMEM];
        let errors = errors.map(|errno| Err(errno.into()));
        let requests = Arc::default();
        let listener = Scripted {
            results: Mutex::new(errors.into_iter().chain([Ok(server)]).collect()),
            requests: Arc::clone(&requests),
            start: Instant::now(),
        };
        let server = tokio::spawn(serve(listener, Router::new(), 1));
        client.write_all(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
        let mut answer = String::new();
        client.read_to_string(&mut answer).await.unwrap();
        assert!(answer.starts_with("HTTP/1.1 404"), "{answer}");
        server.abort();
        // After 10 ms, at once (the error concerned one connection), after 20 ms and after 40 ms.
        assert_eq!(requests.lock().unwrap()[..5], [0, 10, 10, 30, 70]);
    }
}
