//! The program that answers requests in an agent's place on network interfaces (XDP), and the maps by which the agent tells it what.
//!
//! Nothing is pinned: an agent that ends, however it ends, takes its program, its links and its maps with it, and nobody answers for it.

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

/// The program.
const PROGRAM: &str = "socklb_respond";

/// The secret of an agent's cookies.
#[derive(Clone, Copy)]
pub struct Secret {
    /// Its bytes.
    pub bytes: [u8; 16],
    /// When it was drawn, as nanoseconds of `CLOCK_MONOTONIC`.
    pub drawn_ns: u64,
}

/// The program, loaded, and where it is attached.
pub struct Responder {
    program: LoadedProgram,
    addresses: OwnedFd,
    stations: OwnedFd,
    links: BTreeMap<u32, (XdpMode, OwnedFd)>,
}

/// What the program answers, and what it has written down.
pub struct Answers {
    answers: OwnedFd,
    subscribers: OwnedFd,
    counts: PerCpuArray<Counts>,
}

/// Loads the program for requests that come to a port, with maps of its own, in which there is nothing yet.
///
/// # Errors
/// If the kernel refuses it: without CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON it does.
pub fn load(port: u16, secret: Secret) -> Result<(Responder, Answers), DatapathError> {
    // Says which privilege is lacking, where making maps would say that something is not permitted.
    privileges::probe()?;
    let port = u32::from(port);
    // The programs run on little-endian processors alone, and read the secret's halves as little-endian words.
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
        unreachable!("the object's maps are checked by a test")
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

    /// Attaches it to a network interface in the first of these modes that the interface has, unless it is there.
    ///
    /// # Errors
    /// If the interface has no such mode, has another program, or is gone.
    pub fn attach(&mut self, to: &Interface, modes: &[XdpMode]) -> Result<XdpMode, DatapathError> {
        if let Some((mode, link)) = self.links.get(&to.index)
            && modes.contains(mode)
            && sys::xdp_link_info(link.as_fd()).is_ok_and(|info| info.interface == to.index)
        {
            return Ok(*mode);
        }
        // A link that is closed is detached.
        self.links.remove(&to.index);
        let (mode, link) = link_to(self.fd(), to.index, modes)?;
        self.links.insert(to.index, (mode, link));
        Ok(mode)
    }

    /// Detaches it from all network interfaces but these. Returns from which.
    pub fn detach_others(&mut self, interfaces: &BTreeSet<u32>) -> Vec<u32> {
        let others: Vec<u32> =
            self.links.keys().copied().filter(|index| !interfaces.contains(index)).collect();
        for other in &others {
            self.links.remove(other);
        }
        others
    }

    /// Has it answer what is asked at these addresses, and nothing else. Returns how many, of the last, there is no room for.
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

    /// Has it answer only frames that are addressed to these interfaces, of which the first [`MAX_STATIONS`] count.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn set_stations(&self, interfaces: &[&Interface]) -> Result<(), DatapathError> {
        let all = interfaces.iter().filter_map(|interface| interface.hardware_address.map(Station::from));
        // Parts of a bond share one.
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
    /// Has the program answer this to requests for a backend.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn set(&self, name: &SenderName, answer: PreparedAnswer) -> Result<(), DatapathError> {
        let set = self.answers.set(bytemuck::bytes_of(name), bytemuck::bytes_of(&answer.checked()));
        set.map_err(|error| fail(map::ANSWERS, "write", error))
    }

    /// Has it answer nothing to requests for a backend: they are those for an unknown name.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn remove(&self, name: &SenderName) -> Result<(), DatapathError> {
        let removed = self.answers.remove(bytemuck::bytes_of(name));
        removed.map(drop).map_err(|error| fail(map::ANSWERS, "write", error))
    }

    /// Takes out who has subscribed since the last time, some thousand at most. Returns whether these were all.
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

    /// How many requests it has answered, and how many it has not, by [`Refused::number`](lb_report::answer::Refused::number).
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
    fn the_object_has_the_program_and_its_maps() {
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
