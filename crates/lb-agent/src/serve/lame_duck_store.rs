//! The list of lame ducks in the state directory. A backend is a lame duck by an operator's
//! command, because it is draining, or because it is not prewarmed yet. After a restart of the
//! agent, a passing health check must not make these backends ready.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::Duration;

use lb_document::diagnostic::chain;
use lb_host::store::{StateDirectory, StoreError};
use lb_report::agent::name::Name;
use tokio::sync::watch;
use tracing::warn;

use crate::name;

/// The files in the state directory: one name per line.
const LAME_DUCKS: &str = "lame-ducks";
const BY_RUN: &str = "lame-ducks-by-run";

/// Maximum size of a file, in bytes. A file of this size has room for the names of more backends
/// than any host has, with 60 bytes for each name.
const MAX_BYTES: u64 = 1 << 20;

/// Backends that are lame ducks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LameDuckLists {
    /// Lame ducks by an operator's command, including backends that this host no longer has.
    pub lame_ducks: BTreeSet<Name>,
    /// Lame ducks by a report of the program that runs the backend.
    pub by_run: BTreeSet<Name>,
}

impl LameDuckLists {
    /// Reads the stored state. Skips lines that are not names.
    ///
    /// # Errors
    /// If an existing file cannot be read. Such a file must not be overwritten, because its content
    /// is unknown.
    pub fn read(store: &StateDirectory) -> Result<Self, StoreError> {
        let names = |file| names(store, file);
        Ok(Self { lame_ducks: names(LAME_DUCKS)?, by_run: names(BY_RUN)? })
    }
}

fn names(store: &StateDirectory, file: &str) -> Result<BTreeSet<Name>, StoreError> {
    let text = store.read(file, MAX_BYTES)?.unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    Ok(text.lines().filter_map(|line| name::parse(line.trim()).ok()).collect())
}

/// How long a shutdown of the agent waits for the disk.
const END_WITHIN: Duration = Duration::from_secs(5);

/// Pause after a failed write, before the next attempt.
const AGAIN: Duration = Duration::from_secs(5);

/// How long the answer to a command waits for the disk.
const ANSWERED_WITHIN: Duration = Duration::from_secs(1);

/// Stores the state on a separate thread, because a disk may be slow. Dropping this value waits for
/// pending writes, up to a time limit.
pub struct LameDuckStore {
    thread: Option<WriterThread>,
    fault: Arc<Mutex<Option<String>>>,
}

struct WriterThread {
    /// The state that is stored, or is being stored.
    last: LameDuckLists,
    /// The number of the last change to `last`.
    number: u64,
    inbox: Option<mpsc::Sender<(u64, LameDuckLists)>>,
    /// The number of the last change that the thread has attempted to write.
    tried: watch::Receiver<u64>,
    /// This channel is closed when the thread ends.
    end: mpsc::Receiver<()>,
}

/// Shows whether a change is on the disk yet.
#[derive(Debug)]
pub struct Receipt {
    number: u64,
    tried: watch::Receiver<u64>,
}

impl Receipt {
    /// Waits until the change is written or the write has failed, but at most a second.
    /// [`LameDuckStore::fault`] returns the reason of a failure.
    pub async fn settled(mut self) {
        let settled = self.tried.wait_for(|tried| *tried >= self.number);
        if tokio::time::timeout(ANSWERED_WITHIN, settled).await.is_err() {
            warn!("the disk is slow; answered a command before the lame-duck list was saved");
        }
    }
}

impl LameDuckStore {
    /// Never stores anything. `fault` is the reason, if there is one.
    pub fn none(fault: Option<String>) -> Self {
        Self { thread: None, fault: Arc::new(Mutex::new(fault)) }
    }

    /// Stores changes in the state directory. `last` is the directory's present content.
    pub fn new(store: &StateDirectory, last: LameDuckLists) -> Self {
        let (sender, inbox) = mpsc::channel();
        let (running, end) = mpsc::channel::<()>();
        let (trying, tried) = watch::channel(0);
        let fault = Arc::default();
        let mut writer =
            Writer { store: store.clone(), written: last.clone(), fault: Arc::clone(&fault), trying };
        let write = move || {
            let _running = running;
            writer.run(&inbox);
        };
        match std::thread::Builder::new().name("state".to_owned()).spawn(write) {
            Ok(_) => Self {
                thread: Some(WriterThread { last, number: 0, inbox: Some(sender), tried, end }),
                fault,
            },
            Err(error) => Self::none(Some(error.to_string())),
        }
    }

    /// Stores this state. The receipt shows when it is on the disk; `None` if nothing is stored.
    pub fn save(&mut self, lists: LameDuckLists) -> Option<Receipt> {
        let Some(WriterThread { last, number, inbox: Some(inbox), tried, .. }) = &mut self.thread else {
            return None;
        };
        if *last != lists {
            last.clone_from(&lists);
            *number += 1;
            let _ = inbox.send((*number, lists));
        }
        Some(Receipt { number: *number, tried: tried.clone() })
    }

    /// The reason why the last change is not stored. A restart of the agent would lose this change.
    pub fn fault(&self) -> Option<String> {
        self.fault.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for LameDuckStore {
    fn drop(&mut self) {
        if let Some(thread) = &mut self.thread {
            thread.inbox = None;
            if thread.end.recv_timeout(END_WITHIN) == Err(mpsc::RecvTimeoutError::Timeout) {
                warn!("the disk is slow; the last change of the lame-duck list may be lost");
            }
        }
    }
}

struct Writer {
    store: StateDirectory,
    written: LameDuckLists,
    fault: Arc<Mutex<Option<String>>>,
    /// The number of the last change that the thread has attempted to write.
    trying: watch::Sender<u64>,
}

impl Writer {
    /// Runs until the agent ends. Retries a failed write.
    fn run(&mut self, inbox: &mpsc::Receiver<(u64, LameDuckLists)>) {
        let mut unwritten: Option<(u64, LameDuckLists)> = None;
        loop {
            let next = match unwritten {
                None => inbox.recv().map_err(|_| mpsc::RecvTimeoutError::Disconnected),
                Some(_) => inbox.recv_timeout(AGAIN),
            };
            let change = match (next, unwritten.take()) {
                (Ok(change), _) => change,
                (Err(mpsc::RecvTimeoutError::Timeout), Some(change)) => change,
                (Err(_), _) => return,
            };
            // Only the last change is written.
            let (number, lists) = inbox.try_iter().last().unwrap_or(change);
            let result = self.write(&lists);
            let fault = result.as_ref().err().map(|error| chain(error));
            let mut known = self.fault.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(error) = fault.as_ref().filter(|_| *known != fault) {
                warn!(error, "cannot save the lame-duck list; an agent restart would lose it; retrying");
            }
            *known = fault;
            drop(known);
            unwritten = result.is_err().then_some((number, lists));
            self.trying.send_replace(number);
        }
    }

    /// Writes each file that has changed.
    fn write(&mut self, lists: &LameDuckLists) -> Result<(), StoreError> {
        let Self { store, written, .. } = self;
        let files = [
            (LAME_DUCKS, &lists.lame_ducks, &mut written.lame_ducks),
            (BY_RUN, &lists.by_run, &mut written.by_run),
        ];
        for (file, names, written) in files {
            if names != written {
                let text: String = names.iter().map(|name| format!("{name}\n")).collect();
                store.write(file, &[text.as_bytes()])?;
                // The content is recorded after each file, because the write of the other file may
                // fail.
                written.clone_from(names);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn of(name: &str) -> BTreeSet<Name> {
        [name::parse(name).unwrap()].into()
    }

    #[test]
    fn the_last_change_is_saved_when_the_agent_ends() {
        let folder = tempfile::tempdir().unwrap();
        let state = StateDirectory::at(folder.path().join("state"));
        assert_eq!(LameDuckLists::read(&state).unwrap(), LameDuckLists::default());
        let first = LameDuckLists { lame_ducks: of("10.0.0.1:80"), by_run: of("10.0.0.1:53/udp") };
        let last = LameDuckLists { lame_ducks: of("10.0.0.2:80"), ..first.clone() };
        let mut lame_duck_store = LameDuckStore::new(&state, LameDuckLists::default());
        for lists in [first, LameDuckLists::default(), last.clone()] {
            lame_duck_store.save(lists);
        }
        drop(lame_duck_store);
        assert_eq!(LameDuckLists::read(&state).unwrap(), last);
        // The next agent reads the state and clears it.
        let mut lame_duck_store = LameDuckStore::new(&state, LameDuckLists::read(&state).unwrap());
        lame_duck_store.save(LameDuckLists::default());
        drop(lame_duck_store);
        assert_eq!(LameDuckLists::read(&state).unwrap(), LameDuckLists::default());
    }

    #[tokio::test]
    async fn a_receipt_settles_when_the_change_is_saved_or_has_failed() {
        let folder = tempfile::tempdir().unwrap();
        let mut lame_duck_store =
            LameDuckStore::new(&StateDirectory::at(folder.path()), LameDuckLists::default());
        let lists = LameDuckLists { lame_ducks: of("10.0.0.1:80"), ..LameDuckLists::default() };
        let first = lame_duck_store.save(lists.clone()).unwrap();
        // The second call saves the same state, so it causes no further write.
        let second = lame_duck_store.save(lists.clone()).unwrap();
        second.settled().await;
        assert_eq!(LameDuckLists::read(&StateDirectory::at(folder.path())).unwrap(), lists);
        first.settled().await;
        fs::remove_file(folder.path().join(LAME_DUCKS)).unwrap();
        fs::create_dir(folder.path().join(LAME_DUCKS)).unwrap();
        lame_duck_store.save(LameDuckLists::default()).unwrap().settled().await;
        assert!(
            lame_duck_store.fault().is_some_and(|fault| fault.contains("directory")),
            "{:?}",
            lame_duck_store.fault()
        );
        assert!(LameDuckStore::none(None).save(lists).is_none());
    }

    #[test]
    fn unreadable_state_is_an_error_and_unwritable_state_is_a_fault() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join(BY_RUN)).unwrap();
        let error = chain(&LameDuckLists::read(&StateDirectory::at(folder.path())).unwrap_err());
        assert!(error.contains("/lame-ducks-by-run: "), "{error}");
        let mut lame_duck_store =
            LameDuckStore::new(&StateDirectory::at(folder.path()), LameDuckLists::default());
        assert_eq!(lame_duck_store.fault(), None);
        lame_duck_store.save(LameDuckLists { by_run: of("10.0.0.1:80"), ..LameDuckLists::default() });
        let fault = Arc::clone(&lame_duck_store.fault);
        // The drop waits for the thread, so the thread has attempted the write by now.
        drop(lame_duck_store);
        assert!(fault.lock().unwrap().as_ref().is_some_and(|fault| fault.contains("directory")), "{fault:?}");
    }

    #[test]
    fn lines_that_are_not_names_are_skipped() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join(BY_RUN), "10.0.0.1:80\nnonsense\n").unwrap();
        assert_eq!(
            LameDuckLists::read(&StateDirectory::at(folder.path())).unwrap(),
            LameDuckLists { by_run: of("10.0.0.1:80"), ..LameDuckLists::default() }
        );
    }
}
