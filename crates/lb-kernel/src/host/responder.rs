//! The XDP program that answers requests in an agent's place, and the maps with the answers that
//! the agent has prepared.
//!
//! Nothing is pinned: when an agent ends for any reason, the kernel also removes its program, links
//! and maps, so that no program answers in the agent's place any longer.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::Path;

use aya::Ebpf;
use aya::maps::{Map, MapData};
use lb_common::abi::host::SenderName;
use lb_common::abi::responder::REFUSALS;
use lb_common::abi::responder::{
    Counts, MAX_ADDRESSES, MAX_STATIONS, PreparedAnswer, Station, Subscriber, SubscriberName, map,
};
use lb_common::net::Address;

use super::interfaces::Interface;
use super::loader::{self, Globals, Image, LoadedProgram};
use super::privileges;
use super::xdp::link_to;
use crate::error::DatapathError;
use crate::host::loader::objects;
use crate::sys::elements::{self, Elements as _};
use crate::sys::{self, XdpMode};
use crate::sys::{cpus::possible_cpus, per_cpu::PerCpuArray};

const PROGRAM: &str = "socklb_respond";

/// The secret of an agent's cookies.
#[derive(Clone, Copy)]
pub struct Secret {
    pub bytes: [u8; 16],
    /// When the secret was drawn, in nanoseconds of `CLOCK_MONOTONIC`.
    pub drawn_ns: u64,
}

/// The loaded program, its attachments, and the maps that determine which requests it answers.
pub struct Responder {
    program: LoadedProgram,
    addresses: OwnedFd,
    stations: OwnedFd,
    links: BTreeMap<u32, (XdpMode, OwnedFd)>,
}

/// The maps with the prepared answers, the recorded subscribers and the counts of requests.
pub struct Answers {
    answers: OwnedFd,
    subscribers: OwnedFd,
    counts: PerCpuArray<Counts>,
}

/// Loads the program for requests to a UDP port, with new and empty maps.
///
/// # Errors
/// If the kernel refuses, as it does without CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON.
pub fn load(port: u16, secret: Secret) -> Result<(Responder, Answers), DatapathError> {
    // If a privilege is missing, the error of this probe names the privilege; the error from the
    // creation of maps does not.
    privileges::probe()?;
    let port = u32::from(port);
    // The programs run on little-endian processors only, and read the secret's halves as
    // little-endian words.
    let globals = Globals::from([
        ("PORT", (bytemuck::bytes_of(&port), true)),
        ("SECRET_LOW", (&secret.bytes[..8], true)),
        ("SECRET_HIGH", (&secret.bytes[8..], true)),
        ("SECRET_DRAWN_NS", (bytemuck::bytes_of(&secret.drawn_ns), true)),
    ]);
    let mut object = loader::load_unpinned(&Image::new(objects::RESPONDER, globals, &[], None)?, &[])?;
    #[cfg(feature = "log-programs")]
    loader::program_logs::follow(&mut object);
    let responder = Responder {
        program: LoadedProgram::load(&mut object, PROGRAM)?,
        addresses: fd_of(&mut object, map::ADDRESSES)?,
        stations: fd_of(&mut object, map::STATIONS)?,
        links: BTreeMap::new(),
    };
    let cpus = possible_cpus().map_err(|error| fail(map::COUNTS, "open", error))?;
    let answers = Answers {
        answers: fd_of(&mut object, map::ANSWERS)?,
        subscribers: fd_of(&mut object, map::SUBSCRIBERS)?,
        counts: PerCpuArray::over(Box::new(fd_of(&mut object, map::COUNTS)?), cpus as usize),
    };
    Ok((responder, answers))
}

fn fd_of(object: &mut Ebpf, name: &str) -> Result<OwnedFd, DatapathError> {
    let Some(Map::HashMap(data) | Map::LruHashMap(data) | Map::PerCpuArray(data)) = object.take_map(name)
    else {
        unreachable!("a test checks the object's maps")
    };
    let fd: &MapData = &data;
    fd.fd().as_fd().try_clone_to_owned().map_err(|error| fail(name, "open", error))
}

fn fail(map: &str, operation: &'static str, source: io::Error) -> DatapathError {
    DatapathError::Map { path: Path::new(map).to_owned(), operation, source }
}

impl Responder {
    /// The kernel's id of the program.
    pub const fn id(&self) -> u32 {
        self.program.id
    }

    /// Attaches the program to a network interface, in the first of these modes that the interface
    /// supports. Does nothing if the program is already attached there in one of these modes.
    /// Returns the mode.
    ///
    /// # Errors
    /// If the interface supports none of these modes, has another program, or no longer exists.
    pub fn attach(&mut self, to: &Interface, modes: &[XdpMode]) -> Result<XdpMode, DatapathError> {
        if let Some((mode, link)) = self.links.get(&to.index)
            && modes.contains(mode)
            && sys::xdp_link_info(link.as_fd()).is_ok_and(|info| info.interface == to.index)
        {
            return Ok(*mode);
        }
        // Closing a link detaches it.
        self.links.remove(&to.index);
        let (mode, link) = link_to(self.fd(), to.index, modes)?;
        self.links.insert(to.index, (mode, link));
        Ok(mode)
    }

    /// Detaches the program from all network interfaces except those with these indexes. Returns
    /// the indexes of the interfaces from which the program was detached.
    pub fn detach_others(&mut self, interfaces: &BTreeSet<u32>) -> Vec<u32> {
        let others: Vec<u32> =
            self.links.keys().copied().filter(|index| !interfaces.contains(index)).collect();
        for other in &others {
            self.links.remove(other);
        }
        others
    }

    /// Makes the program answer requests at these addresses only. Returns the number of addresses
    /// at the end of the list that do not fit into the map.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn set_addresses(&self, addresses: &[IpAddr]) -> Result<usize, DatapathError> {
        let wanted: Vec<Address> =
            addresses.iter().take(MAX_ADDRESSES as usize).map(|ip| Address::from(*ip)).collect();
        elements::have_keys(&self.addresses, &wanted, &1_u8)
            .map_err(|error| fail(map::ADDRESSES, "write", error))?;
        Ok(addresses.len() - wanted.len())
    }

    /// Makes the program answer only frames that are addressed to these interfaces. If there are
    /// more than [`MAX_STATIONS`] different hardware addresses, the rest is ignored.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn set_stations(&self, interfaces: &[&Interface]) -> Result<(), DatapathError> {
        let all = interfaces.iter().filter_map(|interface| interface.hardware_address.map(Station::from));
        // Parts of a bond share one hardware address.
        let wanted: Vec<Station> =
            all.collect::<BTreeSet<_>>().into_iter().take(MAX_STATIONS as usize).collect();
        elements::have_keys(&self.stations, &wanted, &1_u8)
            .map_err(|error| fail(map::STATIONS, "write", error))
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.program.fd.as_fd()
    }
}

impl Answers {
    /// Makes the program send this answer to requests for a backend.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn set(&self, name: &SenderName, answer: PreparedAnswer) -> Result<(), DatapathError> {
        let set = self.answers.set(bytemuck::bytes_of(name), bytemuck::bytes_of(&answer.checked()));
        set.map_err(|error| fail(map::ANSWERS, "write", error))
    }

    /// Removes the answer for a backend. The program then refuses requests for this backend and
    /// counts them as requests for an unknown name.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn remove(&self, name: &SenderName) -> Result<(), DatapathError> {
        let removed = self.answers.remove(bytemuck::bytes_of(name));
        removed.map(drop).map_err(|error| fail(map::ANSWERS, "write", error))
    }

    /// Removes at most one batch (4,096) of recorded subscribers from the map, and calls `each` for
    /// each removed subscriber. Returns `true` if the map has no further subscribers. If the result
    /// is `false`, call the function again.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn take_subscribers(
        &self,
        each: impl FnMut(&SubscriberName, &Subscriber),
    ) -> Result<bool, DatapathError> {
        let taken = elements::take_some(self.subscribers.as_fd(), each);
        taken.map_err(|error| fail(map::SUBSCRIBERS, "read", error))
    }

    /// The number of answered requests, and the numbers of refused requests, indexed by
    /// [`Refused::number`](lb_report::answer::Refused::number).
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn counts(&self) -> Result<(u64, [u64; REFUSALS]), DatapathError> {
        let counts = self.counts.get(0).map_err(|error| fail(map::COUNTS, "read", error))?;
        Ok((counts.answered, counts.refused))
    }
}

#[cfg(test)]
mod tests {
    use lb_common::abi::responder::{MAX_ANSWERED, MAX_SUBSCRIBERS};
    use lb_report::respond::Workspace;

    use super::*;
    use crate::host::loader::shape;

    #[test]
    fn the_object_contains_the_responder_and_its_maps() {
        let object = aya_obj::Object::parse(objects::RESPONDER).unwrap();
        assert_eq!(object.programs.keys().collect::<Vec<_>>(), [PROGRAM]);
        assert_eq!(object.license.to_bytes(), b"Dual MIT/GPL");
        let shapes = shape::declared(objects::RESPONDER);
        let found: Vec<_> = shapes.iter().map(|(name, shape)| (name.as_str(), shape.sizes())).collect();
        let expected = [
            (map::ADDRESSES, (size_of::<Address>(), 1, MAX_ADDRESSES)),
            (map::ANSWERS, (size_of::<SenderName>(), size_of::<PreparedAnswer>(), MAX_ANSWERED)),
            (map::COUNTS, (4, size_of::<Counts>(), 1)),
            (map::STATIONS, (size_of::<Station>(), 1, MAX_STATIONS)),
            (map::SUBSCRIBERS, (size_of::<SubscriberName>(), size_of::<Subscriber>(), MAX_SUBSCRIBERS)),
            ("workspaces", (4, size_of::<Workspace>(), 1)),
        ];
        assert_eq!(found, expected);
    }
}
