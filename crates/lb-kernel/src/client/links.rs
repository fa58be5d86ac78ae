//! The links of a client task, which attach its programs to cgroups and are pinned below `links/`.
//!
//! While programs are attached, a link is removed in three cases only: its successor is attached,
//! its hook is no longer needed, or the kernel reports that the link leads to another cgroup or to
//! none. After any other error (no descriptor, no memory, no privilege) the state of the link is
//! unknown: this module changes nothing, and the caller must retry.

use std::collections::BTreeSet;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use super::hooks::{FOLLOWS, HOOKS, Hook, Programs};
use crate::error::DatapathError;
use crate::host::pins::{self, Pins};
use crate::host::{cgroup::Cgroup, loader::LoadedProgram};
use crate::sys::{self, LinkInfo};

/// The suffix of the name of a pin whose link is about to replace another link. (The kernel
/// reserves names with dots.)
const SUCCESSOR: &str = "+new";

/// The name under which a hook's link to a cgroup is pinned. The name contains the cgroup's id
/// because a client may change its cgroup: the links to the old cgroup must remain, so that the
/// programs process the ends of the sockets that were created there.
fn link_name(hook: &Hook, cgroup: u64) -> String {
    format!("{}@{cgroup}", hook.name)
}

/// Parses a link's name into its hook and its cgroup.
fn of_link(name: &str) -> Option<(&'static Hook, u64)> {
    let (hook, cgroup) = name.split_once('@')?;
    Some((HOOKS.iter().find(|known| known.name == hook)?, cgroup.parse().ok()?))
}

/// Whether the name of a pin is that of a link, including temporary names that remain after a
/// daemon was killed.
pub fn is_link(name: &str) -> bool {
    of_link(name.strip_suffix(SUCCESSOR).unwrap_or(name)).is_some()
}

/// Whether flows begin at the link with this name. Such links are detached before the links at
/// which programs process the ends of flows. The function works for links of any ABI version.
pub fn detaches_first(name: &str) -> bool {
    name.starts_with("connect") || name.starts_with("sendmsg")
}

struct Pinned {
    link: OwnedFd,
    info: LinkInfo,
}

/// Opens and reads a pinned link; `None` if nothing is pinned at `path`.
fn look(path: &Path) -> Result<Option<Pinned>, DatapathError> {
    let found = pins::look_at_link(path, sys::link_info)?;
    Ok(found.map(|(link, info)| Pinned { link, info }))
}

/// Attaches every program to the cgroup, each in place of its predecessor if there is one. Links to
/// other cgroups also get the new programs. [`leave`] later removes those links at which flows
/// begin, and the caller removes the other links.
///
/// # Errors
/// If the kernel refuses; older programs remain attached.
pub fn attach(programs: &Programs, pins: &Pins, cgroup: &Cgroup) -> Result<(), DatapathError> {
    for (hook, program) in programs.hooks() {
        attach_one(hook, program, pins, cgroup)?;
    }
    for name in pins.link_names()? {
        let path = pins.links().join(&name);
        let Some((hook, of)) = of_link(&name) else {
            // A daemon was killed before it renamed this pin. The loop above has attached the link
            // with the final name, so this link is not needed.
            if is_link(&name) {
                pins::detach(&path)?;
            }
            continue;
        };
        let Some(program) = programs.of(hook) else {
            // The kind of accounting has changed and no longer needs this hook. The programs that
            // the loop above has attached do not rely on it.
            pins::detach(&path)?;
            continue;
        };
        if of == cgroup.id {
            continue;
        }
        let Some(Pinned { link, .. }) = look(&path)? else { continue };
        match sys::link_update(link.as_fd(), program.fd.as_fd()) {
            Ok(()) => {}
            // The kernel severs a link when its cgroup is removed and the last socket of the cgroup
            // is closed. So there is no open flow.
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
        // A daemon may have been killed after it had attached the successor and before it renamed
        // the pin.
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
            // The pinned link leads to another cgroup or to none, because it was detached or its
            // pin was renamed.
            pins::unlink(&successor)?;
            pin(&successor)?;
            rename(&successor, &path)?;
            // The old link no longer has a pin. If this call fails, the kernel detaches the link
            // when its descriptor is closed.
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

/// Whether every program is attached to a cgroup and every link is needed, so that [`attach`] has
/// nothing to do. The result is `false` if an error has interrupted an attachment.
///
/// # Errors
/// If a link cannot be read.
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

/// The names of the links to cgroups other than this one.
///
/// # Errors
/// If the pins cannot be read.
pub fn old_links(pins: &Pins, cgroup: u64) -> Result<Vec<String>, DatapathError> {
    let mut links = pins.link_names()?;
    links.retain(|name| of_link(name).is_some_and(|(_, other)| other != cgroup));
    Ok(links)
}

/// Removes the links at which flows begin, except the links of this cgroup. The programs at the
/// remaining links track open flows until they end.
///
/// # Errors
/// If a link cannot be removed.
pub fn leave(pins: &Pins, cgroup: u64) -> Result<(), DatapathError> {
    for name in old_links(pins, cgroup)?.iter().filter(|name| detaches_first(name)) {
        pins::detach(&pins.links().join(name))?;
    }
    Ok(())
}

/// The id of the program that all links of a hook have; `None` if there is no link, if the links
/// have different programs, or if a link cannot be read.
pub fn only_program_of(pins: &Pins, hook: &Hook) -> Option<u32> {
    let mut programs = BTreeSet::new();
    for name in pins.link_names().ok()? {
        if of_link(&name).is_some_and(|(of, _)| of.name == hook.name) {
            programs.insert(look(&pins.links().join(name)).ok()??.info.program_id);
        }
    }
    programs.pop_first().filter(|_| programs.is_empty())
}

/// The ids of the programs of a client's pinned links.
///
/// # Errors
/// If a link cannot be read. (If the error were ignored, the caller would treat a program of the
/// client as a foreign program.)
pub fn programs_of(pins: &Pins) -> Result<Vec<u32>, DatapathError> {
    let mut programs = Vec::new();
    for name in pins.link_names()? {
        programs.extend(look(&pins.links().join(name))?.map(|pinned| pinned.info.program_id));
    }
    Ok(programs)
}

/// The id of the cgroup in which a client's programs balance connects; `None` if there is no such
/// cgroup. See [`is_balanced`].
///
/// # Errors
/// If a link cannot be read.
pub fn balanced_cgroup(pins: &Pins) -> Result<Option<u64>, DatapathError> {
    // A cgroup can have all hooks only if flows begin in it.
    for cgroup in begins_at(pins)?.into_iter().collect::<BTreeSet<u64>>() {
        if is_balanced(pins, cgroup)? {
            return Ok(Some(cgroup));
        }
    }
    Ok(None)
}

/// Whether a client's programs balance the connects of a cgroup: every hook is attached there. Only
/// the hook that tracks connections may be missing, because only some kinds of accounting need it.
/// Any build may have loaded the programs; `are_fully_attached` also checks the build.
///
/// # Errors
/// If a link cannot be read.
pub fn is_balanced(pins: &Pins, cgroup: u64) -> Result<bool, DatapathError> {
    for hook in HOOKS.iter().filter(|hook| hook.name != FOLLOWS) {
        let pinned = look(&pins.links().join(link_name(hook, cgroup)))?;
        if pinned.is_none_or(|pinned| pinned.info.cgroup_id != cgroup) {
            return Ok(false);
        }
    }
    Ok(cgroup != 0)
}

/// The ids of the cgroups in which a client's flows begin, according to the names of its links. The
/// links may be of any ABI version.
///
/// # Errors
/// If the pins cannot be read.
pub fn begins_at(pins: &Pins) -> Result<Vec<u64>, DatapathError> {
    let links = pins.link_names()?;
    let cgroup = |name: &String| name.split_once('@').and_then(|(_, cgroup)| cgroup.parse().ok());
    Ok(links.iter().filter(|name| detaches_first(name)).filter_map(cgroup).collect())
}

/// The ids of all cgroups to which a client has links, according to the names of the links.
/// Includes earlier cgroups of the client, in which flows may still end.
///
/// # Errors
/// If the pins cannot be read.
pub fn linked_to(pins: &Pins) -> Result<BTreeSet<u64>, DatapathError> {
    let (_, links) = pins.contents()?;
    Ok(links.iter().filter_map(|name| name.split_once('@')?.1.parse().ok()).collect())
}
