//! The network interfaces of this process's network namespace, and their addresses, from
//! rtnetlink(7).

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use netlink_packet_core::{NLM_F_DUMP, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage, NetlinkPayload};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::address::{AddressAttribute, AddressMessage};
use netlink_packet_route::link::{LinkAttribute, LinkFlags, LinkInfo, LinkLayerType, LinkMessage, LinkXdp};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interface {
    /// The interface's number, which does not change while the interface exists.
    pub index: u32,
    /// The interface's current name.
    pub name: String,
    pub is_up: bool,
    /// The size of the longest packet in bytes.
    pub mtu: u32,
    /// The kind of a virtual interface, such as `veth`, `bond` or `loopback`; `None` for a physical
    /// device.
    pub kind: Option<String>,
    /// The index of the bond or bridge to which the interface belongs.
    pub master: Option<u32>,
    /// The ids of the interface's XDP programs.
    pub programs: Vec<u32>,
    /// The hardware address, if the interface has one with six bytes.
    pub hardware_address: Option<[u8; 6]>,
    pub addresses: Vec<IpAddr>,
}

/// All interfaces.
///
/// # Errors
/// If the kernel does not list the interfaces.
pub fn interfaces() -> io::Result<Vec<Interface>> {
    // Bound: if the list changes while the function reads it, the function reads it again, at most
    // eight times.
    for _ in 0..8 {
        match list() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            listed => return listed,
        }
    }
    list()
}

fn list() -> io::Result<Vec<Interface>> {
    let socket = socket(0)?;
    let mut all = Vec::new();
    dump(&socket, RouteNetlinkMessage::GetLink(LinkMessage::default()), |message| {
        if let RouteNetlinkMessage::NewLink(link) = message {
            all.extend(interface(link));
        }
    })?;
    dump(&socket, RouteNetlinkMessage::GetAddress(AddressMessage::default()), |message| {
        let RouteNetlinkMessage::NewAddress(found) = message else { return };
        let of = all.iter_mut().find(|known| known.index == found.header.index);
        if let Some((of, address)) = of.zip(address(&found)) {
            of.addresses.push(address);
        }
    })?;
    Ok(all)
}

/// The driver of a network interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Driver {
    pub name: String,
    /// Whether the device joins incoming packets (LRO). With LRO, few drivers run XDP programs.
    pub joins_packets: bool,
}

/// The driver of an interface, from the ioctl that ethtool(8) also uses; `None` if the interface
/// has no driver.
pub fn driver_of(interface: &str) -> Option<Driver> {
    const GET_DRIVER: u32 = 0x3;
    const GET_FLAGS: u32 = 0x25;
    const LRO: u32 = 1 << 15;
    let socket = rustix::net::socket(AddressFamily::INET, SocketType::DGRAM, None).ok()?;
    // `struct ethtool_drvinfo`: the command, and then the driver's name of up to 32 bytes.
    let mut info = [0_u32; 49];
    info[0] = GET_DRIVER;
    query_driver(&socket, interface, &mut info).ok()?;
    let name: Vec<u8> =
        info[1..9].iter().flat_map(|word| word.to_ne_bytes()).take_while(|byte| *byte != 0).collect();
    let mut flags = [GET_FLAGS, 0];
    let joins_packets = query_driver(&socket, interface, &mut flags).is_ok() && flags[1] & LRO != 0;
    Some(Driver { name: String::from_utf8_lossy(&name).into_owned(), joins_packets })
}

/// Calls the driver of an interface with a structure that begins with a command; the driver writes
/// the rest of the structure.
fn query_driver(socket: &OwnedFd, interface: &str, structure: &mut [u32]) -> io::Result<()> {
    // SAFETY: a structure of plain numbers and a pointer, for which zero is a valid value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    if interface.len() >= request.ifr_name.len() {
        return Err(io::Error::from_raw_os_error(libc::ENODEV));
    }
    for (to, from) in request.ifr_name.iter_mut().zip(interface.bytes()) {
        *to = libc::c_char::from_ne_bytes([from]);
    }
    request.ifr_ifru.ifru_data = structure.as_mut_ptr().cast();
    // SAFETY: the request and the structure, which is as large as its command requires, live
    // through the call.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCETHTOOL, &raw mut request) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// A socket that becomes readable when interfaces or addresses change.
pub struct Changes {
    socket: OwnedFd,
}

impl Changes {
    /// Begins to listen for changes.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn listen() -> io::Result<Self> {
        /// `RTMGRP_LINK | RTMGRP_IPV4_IFADDR | RTMGRP_IPV6_IFADDR`
        const GROUPS: u32 = 0x1 | 0x10 | 0x100;
        Ok(Self { socket: socket(GROUPS)? })
    }

    /// Discards all pending notifications of changes, and the error with which the kernel reports
    /// that notifications were lost because the socket's buffer was full.
    pub fn forget(&self) {
        let mut buffer = [0; 1];
        // Bound: more messages than the buffer of a socket usually contains.
        for _ in 0..4_096 {
            match rustix::net::recv(&self.socket, &mut buffer, RecvFlags::DONTWAIT | RecvFlags::TRUNC) {
                Ok(_) | Err(rustix::io::Errno::NOBUFS | rustix::io::Errno::INTR) => {}
                Err(_) => return,
            }
        }
    }
}

impl AsFd for Changes {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn socket(groups: u32) -> io::Result<OwnedFd> {
    // `None` is protocol number 0, which is NETLINK_ROUTE.
    let socket =
        rustix::net::socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, None)?;
    rustix::net::bind(&socket, &netlink::SocketAddrNetlink::new(0, groups))?;
    Ok(socket)
}

/// A flag that the netlink library lacks. The flag means that the list changed while the kernel
/// sent it, so that the result may be incomplete.
const NLM_F_DUMP_INTR: u16 = 0x10;

/// Sends a request for a list of objects, and calls `each` with every object.
fn dump(
    socket: &OwnedFd,
    request: RouteNetlinkMessage,
    mut each: impl FnMut(RouteNetlinkMessage),
) -> io::Result<()> {
    /// The size of the buffer for a message: the kernel sends one or two pages at a time, and more
    /// if objects have many attributes.
    const BUFFER: usize = 64 << 10;
    let mut header = NetlinkHeader::default();
    header.flags = NLM_F_REQUEST | NLM_F_DUMP;
    let mut message = NetlinkMessage::new(header, NetlinkPayload::from(request));
    message.finalize();
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    rustix::net::send(socket, &bytes, SendFlags::empty())?;
    let mut buffer = vec![0; BUFFER];
    // Bound: the kernel marks the end of the list.
    loop {
        let (_, length) = rustix::net::recv(socket, &mut *buffer, RecvFlags::empty())?;
        let mut rest = buffer.get(..length).unwrap_or_default();
        while let Some(length) = rest.first_chunk().map(|bytes| u32::from_ne_bytes(*bytes) as usize) {
            let Some(one) = rest.get(..length).filter(|_| length > 0) else { break };
            // A message that cannot be parsed is an error: if the function omitted its object, the
            // caller would treat the object as removed.
            let message =
                NetlinkMessage::<RouteNetlinkMessage>::deserialize(one).map_err(io::Error::other)?;
            if message.header.flags & NLM_F_DUMP_INTR != 0 {
                return Err(io::Error::from(io::ErrorKind::Interrupted));
            }
            match message.payload {
                NetlinkPayload::InnerMessage(inner) => each(inner),
                NetlinkPayload::Done(_) => return Ok(()),
                NetlinkPayload::Error(error) if error.code.is_some() => return Err(error.to_io()),
                _ => {}
            }
            rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
        }
    }
}

fn interface(link: LinkMessage) -> Option<Interface> {
    let is_loopback = link.header.link_layer_type == LinkLayerType::Loopback;
    let mut interface = Interface {
        index: link.header.index,
        name: String::new(),
        is_up: link.header.flags.contains(LinkFlags::Up),
        mtu: 0,
        kind: is_loopback.then(|| "loopback".to_owned()),
        master: None,
        programs: Vec::new(),
        hardware_address: None,
        addresses: Vec::new(),
    };
    for attribute in link.attributes {
        match attribute {
            LinkAttribute::IfName(name) => interface.name = name,
            LinkAttribute::Address(bytes) => interface.hardware_address = bytes.try_into().ok(),
            LinkAttribute::Mtu(mtu) => interface.mtu = mtu,
            LinkAttribute::Controller(index) => interface.master = Some(index),
            LinkAttribute::LinkInfo(infos) => {
                let kind = infos.into_iter().find_map(|info| match info {
                    LinkInfo::Kind(kind) => Some(kind.to_string()),
                    _ => None,
                });
                interface.kind = kind.or(interface.kind);
            }
            LinkAttribute::Xdp(xdp) => interface.programs = programs(&xdp),
            _ => {}
        }
    }
    (!interface.name.is_empty()).then_some(interface)
}

/// The ids of an interface's programs. If there are several programs, the kernel reports one of the
/// ids twice.
fn programs(xdp: &[LinkXdp]) -> Vec<u32> {
    let mut ids: Vec<u32> = Vec::new();
    for attribute in xdp {
        if let LinkXdp::ProgId(id) | LinkXdp::DrvProgId(id) | LinkXdp::SkbProgId(id) | LinkXdp::HwProgId(id) =
            attribute
            && *id != 0
            && !ids.contains(id)
        {
            ids.push(*id);
        }
    }
    ids
}

/// The interface's own address. For a point-to-point interface the kernel also reports the address
/// of the other end.
fn address(found: &AddressMessage) -> Option<IpAddr> {
    let local = found.attributes.iter().find_map(|attribute| match attribute {
        AddressAttribute::Local(address) => Some(*address),
        _ => None,
    });
    local.or_else(|| {
        found.attributes.iter().find_map(|attribute| match attribute {
            AddressAttribute::Address(address) => Some(*address),
            _ => None,
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loopback_interface_is_listed_with_its_addresses() {
        let all = interfaces().unwrap();
        let loopback = all
            .iter()
            .find(|interface| interface.name == "lo")
            .expect("a namespace has a loopback interface");
        assert_eq!(loopback.kind.as_deref(), Some("loopback"));
        assert!(loopback.index > 0 && loopback.mtu > 0);
        if loopback.is_up {
            assert!(loopback.addresses.contains(&"127.0.0.1".parse().unwrap()), "{loopback:?}");
        }
    }

    #[test]
    fn an_unknown_interface_has_no_driver() {
        assert_eq!(driver_of("no-such-name"), None);
        assert_eq!(driver_of("a name that is far too long"), None);
    }
}
