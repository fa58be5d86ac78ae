//! Documents that many readers may want at once: one is made at a time, and readers that ask meanwhile share the next.
//!
//! So the cost does not depend on the number of readers: one thread, and one look at the maps. What a reader gets was
//! read after it asked.

use std::sync::Arc;

use tokio::sync::{mpsc, oneshot};

use lb_http::CompressedDocument;

use super::{ControllerQuery, ask};
use crate::facts::Facts;

/// Requests that may queue for the next round; further ones wait until there is room in the queue.
const WAITING: usize = 64;

/// A kind of document. The task that makes it ends with the last copy of this.
#[derive(Clone, Debug)]
pub struct Rounds {
    waiting: mpsc::Sender<oneshot::Sender<Arc<CompressedDocument>>>,
}

impl Rounds {
    /// Documents that `make` makes of what the event loop knows, on a thread that may block.
    pub fn of(
        queries: mpsc::Sender<ControllerQuery>,
        make: fn(Facts) -> std::io::Result<CompressedDocument>,
    ) -> Self {
        let (waiting, turns) = mpsc::channel(WAITING);
        tokio::spawn(go(turns, queries, make));
        Self { waiting }
    }

    /// The next document that is begun. Its sender is dropped if the document cannot be made.
    pub async fn next(&self) -> oneshot::Receiver<Arc<CompressedDocument>> {
        let (turn, document) = oneshot::channel();
        // The task that receives ends only with the runtime.
        let _ = self.waiting.send(turn).await;
        document
    }
}

async fn go(
    mut turns: mpsc::Receiver<oneshot::Sender<Arc<CompressedDocument>>>,
    queries: mpsc::Sender<ControllerQuery>,
    make: fn(Facts) -> std::io::Result<CompressedDocument>,
) {
    while let Some(first) = turns.recv().await {
        let mut readers = vec![first];
        // Bound: the connections of the two listeners.
        while let Ok(reader) = turns.try_recv() {
            readers.push(reader);
        }
        readers.retain(|reader| !reader.is_closed());
        if readers.is_empty() {
            continue;
        }
        let Some(facts) = ask(&queries, ControllerQuery::Facts).await else { continue };
        match tokio::task::spawn_blocking(move || make(facts)).await {
            Ok(Ok(document)) => {
                let document = Arc::new(document);
                for reader in readers {
                    // A requester may have gone away.
                    let _ = reader.send(Arc::clone(&document));
                }
            }
            Ok(Err(error)) => tracing::warn!(%error, "an answer could not be made"),
            // The daemon is stopping.
            Err(_) => {}
        }
    }
}
