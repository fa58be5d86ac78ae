//! HTTP between processes: [`probe`](probe::probe) asks, and the rest is the one server, of the daemon, of its metrics and of the agent: a connection costs a bounded number of
//! descriptors, bytes and seconds, whatever its other side does.
//!
//! A listener serves a limited number of connections, and each carries one request. At the limit the next one takes the
//! place of the connection that has done nothing for the longest: never of one whose other side asks and reads, however
//! many others are open and silent. The server knows nothing of what is asked.

mod connection;

mod document;

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

pub use connection::answer;
pub use document::{CompressedDocument, ContentCoding, DocumentWriter, accepts_gzip, pending, respond};

use self::connection::ConnectionActivity;
use self::peer::PeerCredentials;

/// Where connections come from.
pub trait StreamListener: Send + Sync {
    /// A connection.
    type Stream: AsyncRead + AsyncWrite + Send + Unpin + 'static;

    /// The next one.
    fn next(&self) -> impl Future<Output = io::Result<Self::Stream>> + Send;

    /// Who is at its other end, if that can be known.
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

/// Serves a listener until the task is aborted, to at most `limit` connections at a time.
pub async fn serve<L: StreamListener>(listener: L, router: Router, limit: usize) {
    /// The pause after an error that concerns no single connection, as when no descriptor is free; doubles each time.
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
    // Until the daemon ends.
    loop {
        tokio::select! {
            Some(ended) = hall.tasks.join_next_with_id() => hall.left(ended.map_or_else(|error| error.id(), |(id, ())| id)),
            // Looks again whether a connection can be cut off.
            () = hall.moved.notified(), if !hall.has_room() => {}
            accepted = listener.next(), if hall.has_room() => match accepted {
                Ok(stream) => {
                    if pause.take().is_some() {
                        info!("connections are accepted again");
                    }
                    let peer = L::peer(&stream);
                    hall.admit(stream, peer);
                }
                Err(error) if is_of_one_connection(&error) => {}
                Err(error) => {
                    if pause.is_none() {
                        warn!(%error, "no connection can be accepted; trying again with a growing pause");
                    }
                    let next = pause.map_or(FIRST_PAUSE, |last: Duration| LONGEST_PAUSE.min(2 * last));
                    pause = Some(next);
                    tokio::time::sleep(next).await;
                }
            },
        }
    }
}

/// Whether the error is that of the connection that was about to be accepted, which accept(2) hands on.
fn is_of_one_connection(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset, Interrupted};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset | Interrupted)
}

/// The connections of one listener.
struct OpenConnections {
    limit: usize,
    router: Router,
    taken: HashMap<Id, (AbortHandle, Arc<ConnectionActivity>)>,
    /// The tasks that serve them, and those that were cut off and have not ended yet.
    tasks: JoinSet<()>,
    /// Notified when a connection may have become one that can be cut off.
    moved: Arc<Notify>,
}

impl OpenConnections {
    /// Whether one more can be accepted, if need be in place of another: for a moment there is one more than the limit.
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

    /// The connection that has done nothing for the longest, of those that do not wait for the daemon: first of those
    /// that have not asked yet.
    fn idlest(&self) -> Option<Id> {
        let idle = self.taken.iter().filter_map(|(id, (_, activity))| Some((activity.idleness()?, *id)));
        idle.min_by_key(|(idleness, _)| *idleness).map(|(_, id)| id)
    }
}
