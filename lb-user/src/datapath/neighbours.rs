//! Connect programs of others that run for a client's sockets as well: on its cgroup, and on every cgroup above.
//!
//! Kernel fact: the programs of one cgroup run in the order in which they were attached, and those of a cgroup before
//! those of the cgroups above. Each sees the destination as the one before has left it.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::cgroup::cgroup2_mount;
use super::error::DatapathError;
use super::object;
use super::pins::Pins;
use super::sys::{self, AttachType};

/// A connect program of somebody else.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Neighbour {
    /// Where it is attached.
    pub cgroup: PathBuf,
    /// The hook.
    pub hook: String,
    /// The kernel's id of the program.
    pub program: u32,
    /// Its name, as far as privileges tell (CAP_SYS_ADMIN).
    pub name: Option<String>,
    /// Whether it sees the backend that ours has written, and may write another destination.
    pub runs_after_ours: bool,
}

/// The connect programs of others on a cgroup and above it, in the order in which they run.
///
/// # Errors
/// If the kernel does not tell: that takes CAP_NET_ADMIN.
pub fn neighbours(pins: &Pins, cgroup: &Path) -> Result<Vec<Neighbour>, DatapathError> {
    let mount = cgroup2_mount()?;
    let ours = object::programs_of(pins);
    let mut neighbours = Vec::new();
    for directory in cgroup.ancestors().take_while(|ancestor| ancestor.starts_with(&mount)) {
        for (hook, attach_type) in [("connect4", AttachType::Connect4), ("connect6", AttachType::Connect6)] {
            let fail = |source| DatapathError::Query { cgroup: directory.to_owned(), source };
            let ids = query(directory, attach_type).map_err(fail)?;
            let our_place = ids.iter().position(|id| ours.contains(id));
            for (place, &program) in ids.iter().enumerate().filter(|(_, id)| !ours.contains(id)) {
                neighbours.push(Neighbour {
                    cgroup: directory.to_owned(),
                    hook: hook.to_owned(),
                    program,
                    name: sys::program_name(program).ok().filter(|name| !name.is_empty()),
                    runs_after_ours: directory != cgroup || our_place.is_some_and(|ours| ours < place),
                });
            }
        }
    }
    Ok(neighbours)
}

fn query(directory: &Path, attach_type: AttachType) -> io::Result<Vec<u32>> {
    sys::programs_of(File::open(directory)?.as_fd(), attach_type)
}
