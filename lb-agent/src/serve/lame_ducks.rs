//! Which backends the operator has called lame ducks, kept in the state directory: a restart of the agent must not return a
//! backend that an operator has taken out.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;

use lb_host::trust;
use tracing::warn;

use crate::name::Name;

/// The file in the state directory: a name in each line.
const FILE: &str = "lame-ducks";

/// The names that were kept. What is no name is left out.
pub fn kept(state: &Path) -> BTreeSet<Name> {
    let path = state.join(FILE);
    match fs::read_to_string(&path) {
        Ok(text) => text.lines().filter_map(|line| line.trim().parse().ok()).collect(),
        Err(error) => {
            if error.kind() != io::ErrorKind::NotFound {
                warn!(path = %path.display(), %error, "the operator's lame ducks cannot be read");
            }
            BTreeSet::new()
        }
    }
}

/// For how long the end of the agent waits for the disk.
const END_WITHIN: Duration = Duration::from_secs(5);

/// Keeps names, by a thread of its own: a disk may be slow. Its drop waits for what is still to be kept, within bounds.
pub struct Keeper(Option<Thread>);

struct Thread {
    names: Option<mpsc::Sender<BTreeSet<Name>>>,
    /// Closed when the thread ends.
    end: mpsc::Receiver<()>,
}

impl Keeper {
    /// Keeps nothing.
    pub const fn none() -> Self {
        Self(None)
    }

    /// Keeps them in the state directory.
    pub fn new(state: &Path) -> Self {
        let (sender, inbox) = mpsc::channel::<BTreeSet<Name>>();
        let (running, end) = mpsc::channel::<()>();
        let state = state.to_owned();
        let write = move || {
            let _running = running;
            for mut names in &inbox {
                // Only the last counts.
                names = inbox.try_iter().last().unwrap_or(names);
                if let Err(error) = keep(&state, &names) {
                    warn!(%error, "the operator's lame ducks cannot be kept: a restart of the agent forgets them");
                }
            }
        };
        let thread = std::thread::Builder::new().name("state".to_owned()).spawn(write);
        Self(thread.ok().map(|_| Thread { names: Some(sender), end }))
    }

    /// Keeps these from now on.
    pub fn keep(&self, names: &BTreeSet<Name>) {
        if let Some(names_of) = self.0.as_ref().and_then(|thread| thread.names.as_ref()) {
            let _ = names_of.send(names.clone());
        }
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        if let Some(thread) = &mut self.0 {
            thread.names = None;
            if thread.end.recv_timeout(END_WITHIN) == Err(mpsc::RecvTimeoutError::Timeout) {
                warn!("the disk is slow: what the operator said last may be forgotten");
            }
        }
    }
}

fn keep(state: &Path, names: &BTreeSet<Name>) -> io::Result<()> {
    trust::make_directory(state)?;
    trust::check_directory(state, "--state").map_err(io::Error::other)?;
    let (path, new): (PathBuf, PathBuf) = (state.join(FILE), state.join(format!("{FILE}.new")));
    let text: String = names.iter().map(|name| format!("{name}\n")).collect();
    let mut file = fs::File::create(&new)?;
    io::Write::write_all(&mut file, text.as_bytes())?;
    file.sync_all()?;
    fs::rename(new, path)?;
    fs::File::open(state)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_said_last_is_kept_when_the_agent_ends() {
        let folder = tempfile::tempdir().unwrap();
        let state = folder.path().join("state");
        let keeper = Keeper::new(&state);
        let names: BTreeSet<Name> = ["10.0.0.1:80".parse().unwrap()].into();
        keeper.keep(&BTreeSet::new());
        keeper.keep(&names);
        drop(keeper);
        assert_eq!(kept(&state), names);
    }

    #[test]
    fn names_are_kept() {
        let folder = tempfile::tempdir().unwrap();
        let state = folder.path().join("state");
        assert_eq!(kept(&state), BTreeSet::new());
        let names: BTreeSet<Name> =
            ["10.0.0.1:80", "10.0.0.1:53/udp"].map(|name| name.parse().unwrap()).into();
        keep(&state, &names).unwrap();
        assert_eq!(kept(&state), names);
        fs::write(state.join(FILE), "10.0.0.1:80\nnonsense\n").unwrap();
        assert_eq!(kept(&state).len(), 1);
    }
}
