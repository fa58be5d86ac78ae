//! Builds documents that many readers may request at the same time. A thread builds one document at
//! a time. All requests that arrive while a document is built share the next document.
//!
//! The processor time therefore does not depend on the number of readers: one thread builds all
//! documents, with one pass over the maps for each document. A reader receives only data that was
//! read after its request.

use std::sync::Arc;

use tokio::sync::{mpsc, oneshot};

use lb_http::CompressedDocument;

use super::{ControllerQuery, query};
use crate::output::facts::Facts;

/// The maximum number of requests that may queue for the next document. Further requests wait until
/// the queue has a free place.
const WAITING: usize = 64;

/// One kind of document. The task that builds these documents ends when the last copy of this value
/// is dropped.
#[derive(Clone, Debug)]
pub struct Rounds {
    waiting: mpsc::Sender<oneshot::Sender<Arc<CompressedDocument>>>,
}

impl Rounds {
    /// Starts the task. `make` builds a document from the state of the event loop, on a thread that
    /// may block.
    pub fn of(
        queries: mpsc::Sender<ControllerQuery>,
        make: fn(Facts) -> std::io::Result<CompressedDocument>,
    ) -> Self {
        let (waiting, turns) = mpsc::channel(WAITING);
        tokio::spawn(go(turns, queries, make));
        Self { waiting }
    }

    /// Requests the next document that the task has not begun to build. If the task cannot build
    /// the document, it drops the sender.
    pub async fn next(&self) -> oneshot::Receiver<Arc<CompressedDocument>> {
        let (turn, document) = oneshot::channel();
        // The task that receives requests ends only with the runtime.
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
        let Some(facts) = query(&queries, ControllerQuery::Facts).await else { continue };
        match tokio::task::spawn_blocking(move || make(facts)).await {
            Ok(Ok(document)) => {
                let document = Arc::new(document);
                for reader in readers {
                    // The reader may have given up.
                    let _ = reader.send(Arc::clone(&document));
                }
            }
            Ok(Err(error)) => {
                tracing::warn!(%error, "cannot make a document (status or metrics); its readers receive no answer");
            }
            // The daemon is stopping.
            Err(_) => {}
        }
    }
}
