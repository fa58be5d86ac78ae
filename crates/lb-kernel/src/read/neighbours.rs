//! Finds the programs of other systems that also run for a client's sockets: on its cgroup, and on
//! every cgroup above.
//!
//! Kernel fact: the programs of one cgroup run in the order in which they were attached, and the
//! programs of a cgroup run before those of the cgroups above. Each program receives the
//! destination that the previous program has written.

use std::cell::OnceCell;
use std::collections::BTreeSet;
use std::fs::File;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use crate::client::hooks::{FOLLOWS, HOOKS};
use crate::client::links;
use crate::error::DatapathError;
use crate::host::{cgroup::cgroup2_mount, pins::Pins};
use crate::sys::{self, AttachType};

/// The prefix of the names of socklb's programs.
pub const NAME_PREFIX: &str = "socklb_";

/// A program that no client with pins in the same directory has attached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Neighbour {
    /// The cgroup to which the program is attached.
    pub cgroup: PathBuf,
    pub hook: String,
    /// The kernel's id of the program.
    pub program: u32,
    /// The program's name, if it has one and the kernel reports it (only with CAP_SYS_ADMIN).
    pub name: Option<String>,
    /// Whether the program belongs to another socklb, according to its name. If the kernel reports
    /// no names, the value is `true` if every hook that socklb needs has a nameless program.
    pub is_socklb: bool,
    /// Whether the program runs after the client's program. Such a program reads the destination
    /// that the client's program has written, and may write another one.
    pub runs_after_ours: bool,
}

/// The programs of all clients, of any version, with pins in one directory; read once, when they
/// are first needed.
pub struct Pinned<'p> {
    pins: &'p Path,
    programs: OnceCell<BTreeSet<u32>>,
}

impl<'p> Pinned<'p> {
    pub fn below(pins: &'p Path) -> Self {
        Self { pins, programs: OnceCell::new() }
    }

    fn has(&self, program: u32) -> bool {
        let read = || {
            let clients = Pins::all_versions(self.pins).unwrap_or_default();
            // If the links of a client cannot be read, the client's programs are reported as
            // programs of another system.
            clients.iter().filter_map(|pins| links::programs_of(pins).ok()).flatten().collect()
        };
        self.programs.get_or_init(read).contains(&program)
    }
}

/// The programs of other systems on a cgroup and on the cgroups above it, starting with the cgroup
/// itself, and for each hook in the order in which they run. Omits programs of clients with pins in
/// the same directory: if another client, or an earlier version of this client, has left programs
/// on the cgroup, such programs only track flows until the flows end.
///
/// # Errors
/// If the kernel does not list the programs, which requires CAP_NET_ADMIN.
pub fn neighbours(pins: &Pins, pinned: &Pinned<'_>, cgroup: &Path) -> Result<Vec<Neighbour>, DatapathError> {
    let mount = cgroup2_mount()?;
    let ours = links::programs_of(pins)?;
    let mut neighbours = Vec::new();
    for directory in cgroup.ancestors().take_while(|ancestor| ancestor.starts_with(&mount)) {
        let fail = |source| DatapathError::Query { cgroup: directory.to_owned(), source };
        let open = File::open(directory).map_err(fail)?;
        let first = neighbours.len();
        for (hook, attach_type) in hooks() {
            let ids = sys::programs_of(open.as_fd(), attach_type).map_err(fail)?;
            let our_position = ids.iter().position(|id| ours.contains(id));
            let is_other = |(_, id): &(usize, &u32)| !ours.contains(id) && !pinned.has(**id);
            for (position, &program) in ids.iter().enumerate().filter(is_other) {
                let name = name_of(program);
                neighbours.push(Neighbour {
                    cgroup: directory.to_owned(),
                    hook: hook.to_owned(),
                    program,
                    is_socklb: name.as_ref().is_some_and(|name| name.starts_with(NAME_PREFIX)),
                    name,
                    runs_after_ours: directory != cgroup || our_position.is_some_and(|ours| ours < position),
                });
            }
        }
        let hooks: Vec<&str> = hooks().map(|(hook, _)| hook).collect();
        recognise(&mut neighbours[first..], &hooks);
    }
    Ok(neighbours)
}

/// The hooks of socklb's programs, with the names that other tools use.
fn hooks() -> impl Iterator<Item = (&'static str, AttachType)> {
    HOOKS.iter().map(|hook| (if hook.name == FOLLOWS { SOCK_OPS } else { hook.name }, hook.attach_type))
}

/// A program's name, if it has one and the kernel reports it.
fn name_of(program: u32) -> Option<String> {
    sys::program_name(program).ok().filter(|name| !name.is_empty())
}

/// Attributes the nameless programs on one cgroup to another socklb, if there is a nameless program
/// on every hook that socklb needs (the hook `sock_ops` may be missing, because only some kinds of
/// accounting need it). No other product uses all these hooks, and without CAP_SYS_ADMIN the kernel
/// reports nothing else about an attached program.
fn recognise(neighbours: &mut [Neighbour], hooks: &[&str]) {
    let unnamed = |neighbour: &Neighbour| neighbour.name.is_none();
    let has = |hook: &&str| neighbours.iter().any(|other| other.hook == *hook && unnamed(other));
    if hooks.iter().filter(|hook| **hook != SOCK_OPS).all(has) {
        for neighbour in neighbours.iter_mut().filter(|neighbour| unnamed(neighbour)) {
            neighbour.is_socklb = true;
        }
    }
}

/// The name that other tools use for the hook that tracks connections.
pub const SOCK_OPS: &str = "sock_ops";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nameless_programs_on_all_hooks_are_another_socklb() {
        let hooks: Vec<&str> = hooks().map(|(hook, _)| hook).collect();
        let neighbour = |hook: &str, name: Option<&str>| Neighbour {
            cgroup: "/c".into(),
            hook: hook.to_owned(),
            program: 1,
            name: name.map(str::to_owned),
            is_socklb: false,
            runs_after_ours: false,
        };
        let recognised = |names: fn(&str) -> Option<&'static str>, left_out: &str| {
            let taken = hooks.iter().filter(|hook| **hook != left_out);
            let mut all: Vec<Neighbour> = taken.map(|hook| neighbour(hook, names(hook))).collect();
            recognise(&mut all, &hooks);
            all.iter().filter(|neighbour| neighbour.is_socklb).count()
        };
        assert_eq!(recognised(|_| None, ""), hooks.len());
        assert_eq!(recognised(|_| None, SOCK_OPS), hooks.len() - 1, "the hook `sock_ops` may be missing");
        assert_eq!(recognised(|_| None, "recvmsg6"), 0);
        assert_eq!(recognised(|_| Some("cil_sock4_connect"), ""), 0, "the programs have names");
    }
}
