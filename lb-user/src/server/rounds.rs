//! Documents that many may want at once: one is made at a time, and who asks meanwhile shares the next.
//!
//! So the number of readers does not matter to what making costs: one thread, and one look at the maps. What a reader gets
//! was read after it asked.

use std::sync::Arc;

use tokio::sync::{mpsc, oneshot};

use super::Document;
use crate::api::{Query, ask};
use crate::facts::Facts;

/// Requests that may wait for the next round: more than there are connections would not come.
const WAITING: usize = 64;

/// A kind of document. When the last copy is gone, so is the task that makes it.
#[derive(Clone, Debug)]
pub struct Rounds {
    waiting: mpsc::Sender<oneshot::Sender<Arc<Document>>>,
}

impl Rounds {
    /// Documents that `make` makes of what the event loop knows, on a thread that may block.
    pub fn of(queries: mpsc::Sender<Query>, make: fn(Facts) -> std::io::Result<Document>) -> Self {
        let (waiting, turns) = mpsc::channel(WAITING);
        tokio::spawn(go(turns, queries, make));
        Self { waiting }
    }

    /// The next that is begun. Its sender is dropped if none can be made.
    pub async fn next(&self) -> oneshot::Receiver<Arc<Document>> {
        let (turn, document) = oneshot::channel();
        // Gone only with the runtime.
        let _ = self.waiting.send(turn).await;
        document
    }
}

async fn go(
    mut turns: mpsc::Receiver<oneshot::Sender<Arc<Document>>>,
    queries: mpsc::Sender<Query>,
    make: fn(Facts) -> std::io::Result<Document>,
) {
    while let Some(first) = turns.recv().await {
        let mut readers = vec![first];
        // Bound: the room of the queue.
        while let Ok(reader) = turns.try_recv() {
            readers.push(reader);
        }
        readers.retain(|reader| !reader.is_closed());
        if readers.is_empty() {
            continue;
        }
        let Some(facts) = ask(&queries, Query::Facts).await else { continue };
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
