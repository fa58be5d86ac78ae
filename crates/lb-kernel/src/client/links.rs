//! The links of a client task: which program is attached to which cgroup, as the pins below `links/` hold it.
//!
//! While programs are attached, a link is removed only when its successor is attached, when its hook is not needed any
//! more, or when the kernel has said that it leads to another cgroup or to none. Every other error (no descriptor, no
//! memory, no privilege) means that nothing is known: nothing is changed then, and the caller tries again.

use std::collections::BTreeSet;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use super::hooks::{FOLLOWS, HOOKS, Hook, Programs};
use crate::error::DatapathError;
use crate::host::pins::{self, Pins};
use crate::host::{cgroup::Cgroup, loader::LoadedProgram};
use crate::sys::{self, LinkInfo};

/// What follows the name of a link that is about to take the place of another. (The kernel reserves names with dots.)
const SUCCESSOR: &str = "+new";

/// The name under which a hook's link to a cgroup is pinned. The id is in it because a client may change its cgroup,
/// and sockets that were made in the old one must still be seen to end.
fn link_name(hook: &Hook, cgroup: u64) -> String {
    format!("{}@{cgroup}", hook.name)
}

/// The hook and the cgroup of a link's name.
fn of_link(name: &str) -> Option<(&'static Hook, u64)> {
    let (hook, cgroup) = name.split_once('@')?;
    Some((HOOKS.iter().find(|known| known.name == hook)?, cgroup.parse().ok()?))
}

/// Whether a pin may be a link of ours by its name, also under the temporary name that a killed daemon has left.
pub fn is_link(name: &str) -> bool {
    of_link(name.strip_suffix(SUCCESSOR).unwrap_or(name)).is_some()
}

/// Whether a link begins flows: it is detached before those that see them end. Holds for links of any version.
pub fn detaches_first(name: &str) -> bool {
    name.starts_with("connect") || name.starts_with("sendmsg")
}

/// A pinned link, if something is pinned there.
struct Pinned {
    link: OwnedFd,
    info: LinkInfo,
}

/// Looks at a pinned link.
fn look(path: &Path) -> Result<Option<Pinned>, DatapathError> {
    let found = pins::look_at_link(path, sys::link_info)?;
    Ok(found.map(|(link, info)| Pinned { link, info }))
}

/// Attaches every program to the cgroup, each in place of its predecessor if there is one. What is attached to other
/// cgroups gets the new programs and stays, until [`leave`].
///
/// # Errors
/// If the kernel refuses; what was attached before stays.
pub fn attach(programs: &Programs, pins: &Pins, cgroup: &Cgroup) -> Result<(), DatapathError> {
    for (hook, program) in programs.hooks() {
        attach_one(hook, program, pins, cgroup)?;
    }
    for name in pins.link_names()? {
        let path = pins.links().join(&name);
        let Some((hook, of)) = of_link(&name) else {
            // A daemon was killed before it had renamed this link; the link of the final name was attached above.
            if is_link(&name) {
                pins::detach(&path)?;
            }
            continue;
        };
        let Some(program) = programs.of(hook) else {
            // The accounting has changed and needs this hook no more; the programs attached above do not rely on it.
            pins::detach(&path)?;
            continue;
        };
        if of == cgroup.id {
            continue;
        }
        let Some(Pinned { link, .. }) = look(&path)? else { continue };
        match sys::link_update(link.as_fd(), program.fd.as_fd()) {
            Ok(()) => {}
            // A link is severed once its cgroup is removed and its last socket closed: nothing is left to end.
            Err(error) if error.raw_os_error() == Some(libc::ENOLINK) => pins::detach(&path)?,
            Err(source) => return Err(DatapathError::Link { path, source }),
        }
    }
    Ok(())
}

fn attach_one(
    hook: &'static Hook,
    program: &LoadedProgram,
    pins: &Pins,
    cgroup: &Cgroup,
) -> Result<(), DatapathError> {
    let path = pins.links().join(link_name(hook, cgroup.id));
    let successor = successor_of(&path);
    let fail = |source| DatapathError::Attach { hook: hook.name, cgroup: cgroup.path.clone(), source };
    let leads_here =
        |pinned: &Option<Pinned>| pinned.as_ref().is_some_and(|pinned| pinned.info.cgroup_id == cgroup.id);
    let mut pinned = look(&path)?;
    if !leads_here(&pinned) {
        // A daemon may have been killed after it had attached the successor and before that had its name.
        let waiting = look(&successor)?;
        if leads_here(&waiting) {
            rename(&successor, &path)?;
            pinned = waiting;
        }
    }
    match pinned {
        Some(Pinned { link, info }) if info.cgroup_id == cgroup.id => {
            if info.program_id != program.id {
                sys::link_update(link.as_fd(), program.fd.as_fd()).map_err(fail)?;
            }
            Ok(())
        }
        pinned => {
            let directory = cgroup.open()?;
            let link =
                sys::link_create(program.fd.as_fd(), directory.as_fd(), hook.attach_type).map_err(fail)?;
            let pin = |path: &Path| {
                sys::pin(link.as_fd(), path)
                    .map_err(|source| DatapathError::Pin { path: path.to_owned(), source })
            };
            let Some(Pinned { link: other, .. }) = pinned else { return pin(&path) };
            // What is pinned there leads to another cgroup, or to none: it was detached or moved.
            pins::unlink(&successor)?;
            pin(&successor)?;
            rename(&successor, &path)?;
            // The old link has no pin any more: if this fails, the kernel detaches it in a moment.
            let _ = sys::link_detach(other.as_fd());
            Ok(())
        }
    }
}

fn successor_of(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(SUCCESSOR);
    name.into()
}

fn rename(from: &Path, to: &Path) -> Result<(), DatapathError> {
    std::fs::rename(from, to).map_err(|source| DatapathError::Pin { path: to.to_owned(), source })
}

/// Whether every program is attached to a cgroup, and nothing is left of another kind of accounting: whether there is
/// nothing for [`attach`] to do there. So an attachment that an error cut off is found.
///
/// # Errors
/// If that cannot be seen.
pub fn are_fully_attached(programs: &Programs, pins: &Pins, cgroup: u64) -> Result<bool, DatapathError> {
    for (hook, program) in programs.hooks() {
        let pinned = look(&pins.links().join(link_name(hook, cgroup)))?;
        let is_ours =
            |pinned: Pinned| (pinned.info.cgroup_id, pinned.info.program_id) == (cgroup, program.id);
        if !pinned.is_some_and(is_ours) {
            return Ok(false);
        }
    }
    let needed = |name: &String| of_link(name).is_none_or(|(hook, _)| programs.of(hook).is_some());
    Ok(pins.link_names()?.iter().all(needed))
}

/// The links to cgroups other than this one.
///
/// # Errors
/// If the pins cannot be read.
pub fn old_links(pins: &Pins, cgroup: u64) -> Result<Vec<String>, DatapathError> {
    let mut links = pins.link_names()?;
    links.retain(|name| of_link(name).is_some_and(|(_, other)| other != cgroup));
    Ok(links)
}

/// In cgroups that the client has left, no flow begins any more; those that are open still end.
///
/// # Errors
/// If a link cannot be removed.
pub fn leave(pins: &Pins, cgroup: u64) -> Result<(), DatapathError> {
    for name in old_links(pins, cgroup)?.iter().filter(|name| detaches_first(name)) {
        pins::detach(&pins.links().join(name))?;
    }
    Ok(())
}

/// The id of the program that all links of a hook lead to; `None` if there is none, there are several, or it cannot be seen.
pub fn only_program_of(pins: &Pins, hook: &Hook) -> Option<u32> {
    let mut programs = BTreeSet::new();
    for name in pins.link_names().ok()? {
        if of_link(&name).is_some_and(|(of, _)| of.name == hook.name) {
            programs.insert(look(&pins.links().join(name)).ok()??.info.program_id);
        }
    }
    programs.pop_first().filter(|_| programs.is_empty())
}

/// Ids of the programs of a client's pinned links.
///
/// # Errors
/// If that cannot be seen: a program of ours would be taken for another's.
pub fn programs_of(pins: &Pins) -> Result<Vec<u32>, DatapathError> {
    let mut programs = Vec::new();
    for name in pins.link_names()? {
        programs.extend(look(&pins.links().join(name))?.map(|pinned| pinned.info.program_id));
    }
    Ok(programs)
}

/// The one cgroup whose connects a client's programs balance, if there is one. See [`is_balanced`].
///
/// # Errors
/// If that cannot be seen.
pub fn balanced_cgroup(pins: &Pins) -> Result<Option<u64>, DatapathError> {
    // Only where flows begin are all hooks attached.
    for cgroup in begins_at(pins)?.into_iter().collect::<BTreeSet<u64>>() {
        if is_balanced(pins, cgroup)? {
            return Ok(Some(cgroup));
        }
    }
    Ok(None)
}

/// Whether the connects of a cgroup are balanced by a client's programs: every hook is attached there but for the one
/// that follows connections, which only some kinds of accounting have. Whether the programs are exactly ours is told by
/// `are_fully_attached`.
///
/// # Errors
/// If that cannot be seen.
pub fn is_balanced(pins: &Pins, cgroup: u64) -> Result<bool, DatapathError> {
    for hook in HOOKS.iter().filter(|hook| hook.name != FOLLOWS) {
        let pinned = look(&pins.links().join(link_name(hook, cgroup)))?;
        if pinned.is_none_or(|pinned| pinned.info.cgroup_id != cgroup) {
            return Ok(false);
        }
    }
    Ok(cgroup != 0)
}

/// The cgroups at which a client's flows begin, by the names of its links, which may be of any version.
///
/// # Errors
/// If the pins cannot be read.
pub fn begins_at(pins: &Pins) -> Result<Vec<u64>, DatapathError> {
    let links = pins.link_names()?;
    let cgroup = |name: &String| name.split_once('@').and_then(|(_, cgroup)| cgroup.parse().ok());
    Ok(links.iter().filter(|name| detaches_first(name)).filter_map(cgroup).collect())
}

/// The cgroups that a client's links of any kind are named after: also those that it has left, whose flows still end.
///
/// # Errors
/// If the pins cannot be read.
pub fn linked_to(pins: &Pins) -> Result<BTreeSet<u64>, DatapathError> {
    let (_, links) = pins.contents()?;
    Ok(links.iter().filter_map(|name| name.split_once('@')?.1.parse().ok()).collect())
}
