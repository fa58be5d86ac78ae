//! What is kept in the state directory of backends that take no more: a restart of the agent must not return one that an operator
//! has taken out, nor one that is draining, or is not prewarmed yet, by a health check that passes.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

use lb_host::trust;
use tracing::warn;

use crate::name::Name;

/// The files in the state directory: a name in each line.
const LAME_DUCKS: &str = "lame-ducks";
const LEAVING: &str = "leaving";

/// Backends that take no more.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Kept {
    /// Those that the operator calls lame ducks, also if they are not here now.
    pub lame_ducks: BTreeSet<Name>,
    /// Those that are lame ducks by the program that runs them.
    pub leaving: BTreeSet<Name>,
}

impl Kept {
    /// What was kept. What is no name is left out.
    pub fn read(state: &Path) -> Self {
        Self { lame_ducks: names(&state.join(LAME_DUCKS)), leaving: names(&state.join(LEAVING)) }
    }
}

fn names(path: &Path) -> BTreeSet<Name> {
    match fs::read_to_string(path) {
        Ok(text) => text.lines().filter_map(|line| line.trim().parse().ok()).collect(),
        Err(error) => {
            if error.kind() != io::ErrorKind::NotFound {
                warn!(path = %path.display(), %error, "cannot read which backends take no more");
            }
            BTreeSet::new()
        }
    }
}

/// For how long the end of the agent waits for the disk.
const END_WITHIN: Duration = Duration::from_secs(5);

/// Keeps it, by a thread of its own: a disk may be slow. Its drop waits for what is still to be kept, within bounds.
pub struct Keeper(Option<Thread>);

struct Thread {
    /// What is kept, or is being.
    last: Kept,
    inbox: Option<mpsc::Sender<Kept>>,
    /// Closed when the thread ends.
    end: mpsc::Receiver<()>,
}

impl Keeper {
    /// Keeps nothing.
    pub const fn none() -> Self {
        Self(None)
    }

    /// Keeps it in the state directory, which has this.
    pub fn new(state: &Path, last: Kept) -> Self {
        let (sender, inbox) = mpsc::channel();
        let (running, end) = mpsc::channel::<()>();
        let mut written = last.clone();
        let state = state.to_owned();
        let write = move || {
            let _running = running;
            for mut kept in &inbox {
                // Only the last counts.
                kept = inbox.try_iter().last().unwrap_or(kept);
                match write(&state, &kept, &written) {
                    Ok(()) => written = kept,
                    Err(error) => {
                        warn!(%error, "cannot keep which backends take no more: a restart of the agent forgets them");
                    }
                }
            }
        };
        let thread = std::thread::Builder::new().name("state".to_owned()).spawn(write);
        Self(thread.ok().map(|_| Thread { last, inbox: Some(sender), end }))
    }

    /// Keeps this from now on.
    pub fn keep(&mut self, kept: Kept) {
        if let Some(Thread { last, inbox: Some(inbox), .. }) = &mut self.0
            && *last != kept
        {
            last.clone_from(&kept);
            let _ = inbox.send(kept);
        }
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        if let Some(thread) = &mut self.0 {
            thread.inbox = None;
            if thread.end.recv_timeout(END_WITHIN) == Err(mpsc::RecvTimeoutError::Timeout) {
                warn!("the disk is slow: what the operator said last may be forgotten");
            }
        }
    }
}

/// Writes what is not written yet.
fn write(state: &Path, kept: &Kept, written: &Kept) -> io::Result<()> {
    trust::make_directory(state)?;
    trust::check_directory(state, "--state").map_err(io::Error::other)?;
    let files =
        [(LAME_DUCKS, &kept.lame_ducks, &written.lame_ducks), (LEAVING, &kept.leaving, &written.leaving)];
    for (file, names, _) in files.into_iter().filter(|(_, names, written)| names != written) {
        replace(&state.join(file), &state.join(format!("{file}.new")), names)?;
    }
    fs::File::open(state)?.sync_all()
}

fn replace(path: &Path, new: &Path, names: &BTreeSet<Name>) -> io::Result<()> {
    let text: String = names.iter().map(|name| format!("{name}\n")).collect();
    let mut file = fs::File::create(new)?;
    io::Write::write_all(&mut file, text.as_bytes())?;
    file.sync_all()?;
    fs::rename(new, path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(name: &str) -> BTreeSet<Name> {
        [name.parse().unwrap()].into()
    }

    #[test]
    fn what_was_said_last_is_kept_when_the_agent_ends() {
        let folder = tempfile::tempdir().unwrap();
        let state = folder.path().join("state");
        assert_eq!(Kept::read(&state), Kept::default());
        let first = Kept { lame_ducks: of("10.0.0.1:80"), leaving: of("10.0.0.1:53/udp") };
        let last = Kept { lame_ducks: of("10.0.0.2:80"), ..first.clone() };
        let mut keeper = Keeper::new(&state, Kept::default());
        for kept in [first, Kept::default(), last.clone()] {
            keeper.keep(kept);
        }
        drop(keeper);
        assert_eq!(Kept::read(&state), last);
        // The next agent knows what there is, and forgets it.
        let mut keeper = Keeper::new(&state, Kept::read(&state));
        keeper.keep(Kept::default());
        drop(keeper);
        assert_eq!(Kept::read(&state), Kept::default());
    }

    #[test]
    fn what_is_no_name_is_left_out() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join(LEAVING), "10.0.0.1:80\nnonsense\n").unwrap();
        assert_eq!(Kept::read(folder.path()), Kept { leaving: of("10.0.0.1:80"), ..Kept::default() });
    }
}
