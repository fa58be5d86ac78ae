//! Which backends the operator has called lame ducks, kept in the state directory: a restart of the agent must not return a
//! backend that an operator has taken out.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc;

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

/// Keeps names, by a thread of its own: a disk may be slow.
pub struct Keeper(Option<mpsc::Sender<BTreeSet<Name>>>);

impl Keeper {
    /// Keeps nothing.
    pub const fn none() -> Self {
        Self(None)
    }

    /// Keeps them in the state directory.
    pub fn new(state: &Path) -> Self {
        let (sender, inbox) = mpsc::channel::<BTreeSet<Name>>();
        let state = state.to_owned();
        let write = move || {
            for mut names in &inbox {
                // Only the last counts.
                names = inbox.try_iter().last().unwrap_or(names);
                if let Err(error) = keep(&state, &names) {
                    warn!(%error, "the operator's lame ducks cannot be kept: a restart of the agent forgets them");
                }
            }
        };
        let thread = std::thread::Builder::new().name("state".to_owned()).spawn(write);
        Self(thread.ok().map(|_| sender))
    }

    /// Keeps these from now on.
    pub fn keep(&self, names: &BTreeSet<Name>) {
        if let Some(sender) = &self.0 {
            let _ = sender.send(names.clone());
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
    fs::rename(new, path)
}

#[cfg(test)]
mod tests {
    use super::*;

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
