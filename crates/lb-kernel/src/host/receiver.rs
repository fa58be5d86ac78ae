//! The XDP program that receives reports. It is attached to the network interfaces that the
//! daemon's configuration names.
//!
//! The program's links are pinned beside the maps of the host and outlive the daemon. Each start of
//! the daemon loads the program again and replaces the attached program in a single step, so that
//! no report is lost. An interface accepts only one XDP program; the daemon never replaces another
//! owner's program.

use std::collections::BTreeSet;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use aya::Ebpf;
use lb_common::abi::host::map;

use super::features::Features;
use super::interfaces::Interface;
use super::loader::{self, Globals, Image, LoadedProgram};
use super::maps::{self, HostMaps};
use super::pins;
use super::xdp::{Attachment, link_to, of_pin, pin_name};
use crate::error::DatapathError;
use crate::host::loader::objects;
use crate::sys::{self, XdpLinkInfo, XdpMode};

/// The name of the program, and of its version for kernels without fetching atomics.
const PROGRAM: &str = "socklb_receive";
const WITHOUT_FETCHING_ATOMICS: &str = "socklb_receive_5_10";

/// The loaded program, and the directory of its links.
pub struct Receiver {
    program: LoadedProgram,
    directory: PathBuf,
}

/// The attachments of the program according to the pins. Usually, an earlier daemon has made them.
///
/// # Errors
/// If the pins cannot be read.
pub fn attached(pins: &Path) -> Result<Vec<Attachment>, DatapathError> {
    let directory = maps::directory(pins);
    let mut all = Vec::new();
    for attachment in pins::names(&directory)?.iter().filter_map(|name| of_pin(name)) {
        if look(&directory.join(pin_name(attachment)))?.is_some_and(|(_, info)| info.interface != 0) {
            all.push(attachment);
        }
    }
    Ok(all)
}

/// Detaches the program from all network interfaces except those with these indexes, and removes
/// the pins of interfaces that no longer exist. Returns the removed attachments.
///
/// # Errors
/// If the pins cannot be read, or a pin cannot be removed.
pub fn detach_others(pins: &Path, interfaces: &BTreeSet<u32>) -> Result<Vec<Attachment>, DatapathError> {
    let directory = maps::directory(pins);
    let mut left = Vec::new();
    for name in pins::names(&directory)? {
        let Some(attachment) = of_pin(&name) else { continue };
        let path = directory.join(name);
        let is_alive = look(&path)?.is_some_and(|(_, info)| info.interface != 0);
        if is_alive && interfaces.contains(&attachment.interface) {
            continue;
        }
        pins::detach(&path)?;
        left.extend(is_alive.then_some(attachment));
    }
    Ok(left)
}

/// Opens and reads a pinned link; `None` if nothing is pinned at `path`.
fn look(path: &Path) -> Result<Option<(OwnedFd, XdpLinkInfo)>, DatapathError> {
    pins::look_at_link(path, sys::xdp_link_info)
}

impl Receiver {
    /// Loads the program for reports to a UDP port, with these maps.
    ///
    /// # Errors
    /// If the kernel refuses, as it does without CAP_PERFMON.
    pub fn load(maps: &HostMaps, features: Features, port: u16) -> Result<Self, DatapathError> {
        let directory = maps.path().to_owned();
        let port = u32::from(port);
        let globals = Globals::from([("PORT", (bytemuck::bytes_of(&port), true))]);
        let object = loader::load_pinned(
            &Image::new(objects::HOST, globals, &[], None)?,
            &[],
            maps::map_pins(&directory),
        )?;
        Ok(Self { program: load(object, features)?, directory })
    }

    /// Loads the program with new small maps, to determine whether this process may load it. The
    /// program and the maps are closed again.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn try_load(features: Features) -> Result<(), DatapathError> {
        let image = Image::new(objects::HOST, Globals::new(), &[], None)?;
        let object = loader::load_unpinned(&image, &map::ALL.map(|name| (name, 1)))?;
        load(object, features).map(drop)
    }

    /// Attaches the program to a network interface, in the first of these modes that the interface
    /// supports. If a receiver is already attached there in one of these modes, this program
    /// replaces that receiver. Returns the mode.
    ///
    /// # Errors
    /// If the interface supports none of these modes, has another program, or no longer exists.
    pub fn attach(&self, to: &Interface, modes: &[XdpMode]) -> Result<XdpMode, DatapathError> {
        let interface = to.index;
        for mode in XdpMode::ALL {
            let path = self.directory.join(pin_name(Attachment { interface, mode }));
            let Some((link, info)) = look(&path)? else { continue };
            // The link may belong to another interface with the same number, in the network
            // namespace of an earlier daemon.
            let leads_here = info.interface == interface && to.programs.contains(&info.program_id);
            if !leads_here || !modes.contains(&mode) {
                pins::detach(&path)?;
                continue;
            }
            if info.program_id != self.program.id {
                let update = sys::link_update(link.as_fd(), self.program.fd.as_fd());
                update.map_err(|source| DatapathError::Link { path, source })?;
            }
            return Ok(mode);
        }
        let (mode, link) = link_to(self.program.fd.as_fd(), interface, modes)?;
        let path = self.directory.join(pin_name(Attachment { interface, mode }));
        sys::pin(link.as_fd(), &path).map_err(|source| DatapathError::Pin { path, source })?;
        Ok(mode)
    }

    /// The kernel's id of the program.
    pub const fn id(&self) -> u32 {
        self.program.id
    }
}

fn load(mut object: Ebpf, features: Features) -> Result<LoadedProgram, DatapathError> {
    #[cfg(feature = "log-programs")]
    loader::program_logs::follow(&mut object);
    let name = if features.fetching_atomics { PROGRAM } else { WITHOUT_FETCHING_ATOMICS };
    LoadedProgram::load(&mut object, name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_object_contains_both_versions_of_the_receiver() {
        let object = aya_obj::Object::parse(objects::HOST).unwrap();
        let mut names: Vec<&str> = object.programs.keys().map(String::as_str).collect();
        names.sort_unstable();
        assert_eq!(names, [PROGRAM, WITHOUT_FETCHING_ATOMICS]);
        assert_eq!(object.license.to_bytes(), b"Dual MIT/GPL");
    }
}
