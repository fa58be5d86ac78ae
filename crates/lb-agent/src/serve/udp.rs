//! The sockets that receive requests for reports. They receive packets together with the address of
//! this host at which they arrived, and send packets from a given address of this host.
//!
//! The standard library does not report that address. If an agent listens at all addresses, an
//! answer must come from the address to which the request was sent. Connected client sockets,
//! firewalls and NATs accept no other address.

use std::future::poll_fn;
use std::io;
use std::mem::{self, MaybeUninit};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd};
use std::ptr;
use std::task::{Context as Waker, Poll};

use lb_host::socket::of_family;
use lb_report::agent::{Requester, Via};
use lb_report::wire::Datagram;
use libc::{c_int, c_void, cmsghdr, in_pktinfo, in6_pktinfo, iovec, mmsghdr, msghdr};
use rustix::net::SocketAddrAny;
use rustix::net::addr::{SocketAddrLen, SocketAddrStorage};
use tokio::io::Interest;
use tokio::net::UdpSocket;
use tracing::info;

mod bind;

pub use bind::listen_at;

pub struct BoundSockets {
    sockets: Vec<BoundSocket>,
    batch: PacketBatch,
    /// The number of the socket to check first. The number changes, so that no socket is preferred.
    next: usize,
    /// Packets that the kernel refused to send.
    pub unsent: u64,
}

struct BoundSocket {
    socket: UdpSocket,
    is_v6: bool,
    /// Whether the socket is bound to all addresses of this host.
    is_wildcard: bool,
}

impl BoundSockets {
    /// The addresses at which the sockets listen.
    ///
    /// # Errors
    /// If the kernel does not report the addresses.
    pub fn addresses(&self) -> io::Result<Vec<SocketAddr>> {
        self.sockets.iter().map(|socket| socket.socket.local_addr()).collect()
    }

    /// The socket for an answer to a client that has sent its request to this address of the host:
    /// the socket that is bound to only this address, else the socket that is bound to all
    /// addresses.
    pub fn via(&self, local: IpAddr) -> Option<Via> {
        let address = |socket: &BoundSocket| socket.socket.local_addr().ok().map(|at| at.ip());
        let find = |is_it: &dyn Fn(&BoundSocket) -> bool| self.sockets.iter().position(is_it);
        if let Some(socket) = find(&|socket| address(socket) == Some(local)) {
            return Some(Via { socket, local: None });
        }
        let all_of_family = find(&|socket| socket.is_wildcard && socket.is_v6 == local.is_ipv6());
        let socket = all_of_family.or_else(|| find(&|socket| socket.is_wildcard))?;
        Some(Via { socket, local: Some(local) })
    }

    /// Waits until a socket has packets, and returns its number. The future may be dropped at any
    /// time.
    pub async fn readable(&mut self) -> io::Result<usize> {
        poll_fn(|waker| self.poll_readable(waker)).await
    }

    fn poll_readable(&mut self, waker: &mut Waker<'_>) -> Poll<io::Result<usize>> {
        let count = self.sockets.len();
        for offset in 0..count {
            let number = (self.next + offset) % count;
            match self.sockets[number].socket.poll_recv_ready(waker) {
                Poll::Ready(Ok(())) => {
                    self.next = number + 1;
                    return Poll::Ready(Ok(number));
                }
                Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                Poll::Pending => {}
            }
        }
        Poll::Pending
    }

    /// Receives at most one batch of packets from a socket, and sends the result of `answer` for
    /// each of them.
    pub fn answer(&mut self, number: usize, mut answer: impl FnMut(&[u8], Requester) -> Option<Datagram>) {
        let BoundSocket { socket, is_wildcard, is_v6 } = &self.sockets[number];
        let (batch, fd) = (&mut self.batch, socket.as_fd());
        let received = socket.try_io(Interest::READABLE, || {
            for packet in batch.receive(fd)? {
                let local = packet.to.filter(|_| *is_wildcard);
                let address = match packet.from {
                    // The address includes the link of a link-local address.
                    SocketAddr::V6(from) if from.ip().to_ipv4_mapped().is_none() => packet.from,
                    from => SocketAddr::new(from.ip().to_canonical(), from.port()),
                };
                let requester = Requester { address, via: Via { socket: number, local } };
                let Some(datagram) = answer(packet.bytes, requester) else { continue };
                let to = of_family(address, *is_v6);
                self.unsent += u64::from(send_packet(fd, datagram.bytes(), to, local).is_err());
            }
            Ok(())
        });
        // This call also returns an ICMP error that an answer has caused. The error concerns only
        // the client that should have received the answer.
        if let Err(error) = received
            && error.kind() != io::ErrorKind::WouldBlock
        {
            info!(%error, "cannot receive a packet");
        }
    }

    /// Sends a datagram to a subscriber, from the socket and the address at which its request
    /// arrived.
    pub fn send(&mut self, to: Requester, datagram: &Datagram) {
        let Some(socket) = self.sockets.get(to.via.socket) else { return };
        let address = of_family(to.address, socket.is_v6);
        let sent = send_packet(socket.socket.as_fd(), datagram.bytes(), address, to.via.local);
        self.unsent += u64::from(sent.is_err());
    }
}

/// Maximum number of packets per call, which limits the work of one iteration of the loop.
const BATCH: usize = 32;

/// Number of bytes that are read from a packet. All valid datagrams are shorter, so a datagram that
/// is too long is detected.
const BYTES: usize = 128;

/// Size of the buffer for an address, in bytes.
#[expect(clippy::cast_possible_truncation, reason = "the size is 128")]
const NAME_LENGTH: SocketAddrLen = size_of::<SocketAddrStorage>() as SocketAddrLen;

/// Size of the buffer for ancillary data, in words. The data is one message of at most 40 bytes.
const CONTROL_WORDS: usize = 16;

/// The buffers for received packets.
struct PacketBatch {
    places: Vec<PacketSlot>,
}

#[derive(Clone)]
struct PacketSlot {
    bytes: [u8; BYTES],
    length: usize,
    from: Option<SocketAddr>,
    to: Option<IpAddr>,
}

struct ReceivedPacket<'b> {
    /// The content. If the packet is longer than [`BYTES`], only its first [`BYTES`] bytes.
    bytes: &'b [u8],
    from: SocketAddr,
    /// The address of this host at which the packet arrived, if the socket reports it.
    to: Option<IpAddr>,
}

impl PacketBatch {
    fn new() -> Self {
        Self { places: vec![PacketSlot { bytes: [0; BYTES], length: 0, from: None, to: None }; BATCH] }
    }

    /// Receives packets that have already arrived, at most [`BATCH`], and does not wait.
    ///
    /// # Errors
    /// An error of the kind `WouldBlock` if no packet has arrived.
    fn receive(&mut self, socket: BorrowedFd<'_>) -> io::Result<impl Iterator<Item = ReceivedPacket<'_>>> {
        let mut names = [const { MaybeUninit::<SocketAddrStorage>::zeroed() }; BATCH];
        let mut controls = [[0u64; CONTROL_WORDS]; BATCH];
        let mut parts: Vec<iovec> = self
            .places
            .iter_mut()
            .map(|place| iovec { iov_base: place.bytes.as_mut_ptr().cast(), iov_len: BYTES })
            .collect();
        let mut headers: Vec<mmsghdr> = Vec::with_capacity(BATCH);
        for ((name, control), part) in names.iter_mut().zip(&mut controls).zip(&mut parts) {
            let mut header = empty_header();
            header.msg_name = name.as_mut_ptr().cast();
            header.msg_namelen = NAME_LENGTH;
            header.msg_iov = part;
            header.msg_iovlen = 1;
            header.msg_control = control.as_mut_ptr().cast();
            header.msg_controllen = size_of_val(control);
            headers.push(mmsghdr { msg_hdr: header, msg_len: 0 });
        }
        // SAFETY: each header points to a name, a part and ancillary data, which outlive the call
        // and have the lengths in the header.
        let count = unsafe {
            libc::recvmmsg(
                socket.as_raw_fd(),
                headers.as_mut_ptr(),
                libc::c_uint::try_from(BATCH).unwrap_or(1),
                libc::MSG_DONTWAIT,
                ptr::null_mut(),
            )
        };
        let count = usize::try_from(count).map_err(|_| io::Error::last_os_error())?;
        for ((header, name), place) in headers.iter().zip(&names).zip(&mut self.places).take(count) {
            place.length = usize::try_from(header.msg_len).unwrap_or(BYTES).min(BYTES);
            // SAFETY: the storage was all zeros until the kernel wrote an address to it.
            let name = unsafe { SocketAddrAny::new(*name, NAME_LENGTH) };
            place.from = SocketAddr::try_from(name).ok();
            place.to = destination(&header.msg_hdr);
        }
        let received = self.places.iter().take(count);
        Ok(received.filter_map(|place| {
            Some(ReceivedPacket { bytes: &place.bytes[..place.length], from: place.from?, to: place.to })
        }))
    }
}

/// Sends a packet, from the given address of this host if there is one, and does not wait.
///
/// # Errors
/// If the kernel refuses the packet.
fn send_packet(socket: BorrowedFd<'_>, bytes: &[u8], to: SocketAddr, from: Option<IpAddr>) -> io::Result<()> {
    let mut control = [0u64; CONTROL_WORDS];
    let mut part = iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let mut header = empty_header();
    header.msg_iov = &raw mut part;
    header.msg_iovlen = 1;
    let name = SocketAddrAny::from(to);
    header.msg_name = name.as_ptr().cast_mut().cast();
    header.msg_namelen = name.addr_len();
    match (to, from.map(|from| from.to_canonical())) {
        (_, None) => {}
        (SocketAddr::V4(_), Some(IpAddr::V4(from))) => {
            let s_addr = u32::from_ne_bytes(from.octets());
            let any = libc::in_addr { s_addr: 0 };
            let info = in_pktinfo { ipi_ifindex: 0, ipi_spec_dst: libc::in_addr { s_addr }, ipi_addr: any };
            attach(&mut header, &mut control, libc::IPPROTO_IP, libc::IP_PKTINFO, info);
        }
        // An IPv6 socket requires IPv4 addresses in mapped form, also in this message.
        (_, Some(from)) => {
            let octets = match from {
                IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
                IpAddr::V6(v6) => v6.octets(),
            };
            let info = in6_pktinfo { ipi6_addr: libc::in6_addr { s6_addr: octets }, ipi6_ifindex: 0 };
            attach(&mut header, &mut control, libc::IPPROTO_IPV6, libc::IPV6_PKTINFO, info);
        }
    }
    // SAFETY: the header points to an address, a part and ancillary data, which outlive the call
    // and have the lengths in the header.
    let sent = unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const header, libc::MSG_DONTWAIT) };
    if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Makes the socket report the address at which each packet arrived.
///
/// # Errors
/// If the kernel refuses the option.
fn enable_packet_info(socket: BorrowedFd<'_>, is_v6: bool) -> io::Result<()> {
    let (level, option) = if is_v6 {
        (libc::IPPROTO_IPV6, libc::IPV6_RECVPKTINFO)
    } else {
        (libc::IPPROTO_IP, libc::IP_PKTINFO)
    };
    let on: c_int = 1;
    // SAFETY: the value is a number of the given size.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            option,
            (&raw const on).cast::<c_void>(),
            socklen(size_of::<c_int>()),
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn empty_header() -> msghdr {
    // SAFETY: all zeros are a valid value of this structure, which has only numbers and pointers.
    unsafe { mem::zeroed() }
}

fn socklen(bytes: usize) -> libc::socklen_t {
    libc::socklen_t::try_from(bytes).expect("the length is a few bytes")
}

/// Puts one message into the ancillary data of a header.
fn attach<T>(header: &mut msghdr, control: &mut [u64; CONTROL_WORDS], level: c_int, kind: c_int, value: T) {
    let bytes = libc::c_uint::try_from(size_of::<T>()).expect("the value is a few bytes");
    header.msg_control = control.as_mut_ptr().cast();
    // SAFETY: these two functions only add numbers.
    let (space, length) = unsafe { (libc::CMSG_SPACE(bytes), libc::CMSG_LEN(bytes)) };
    header.msg_controllen = space as usize;
    assert!(space as usize <= size_of_val(control), "the buffer has no room for one message");
    // SAFETY: the header's ancillary data has room for one message with such a value, and words
    // have the alignment that the message's header needs.
    unsafe {
        let message: *mut cmsghdr = libc::CMSG_FIRSTHDR(header);
        (*message).cmsg_level = level;
        (*message).cmsg_type = kind;
        (*message).cmsg_len = length as usize;
        ptr::write_unaligned(libc::CMSG_DATA(message).cast::<T>(), value);
    }
}

/// The address of this host at which a packet arrived, from the packet's ancillary data.
fn destination(header: &msghdr) -> Option<IpAddr> {
    // SAFETY: the kernel has written the header's ancillary data and its length, and the macros do
    // not read beyond that length. The value of a message of these kinds has the type that is read
    // here.
    unsafe {
        let mut message = libc::CMSG_FIRSTHDR(header);
        // Bound: the ancillary data has room for few messages.
        while !message.is_null() {
            match ((*message).cmsg_level, (*message).cmsg_type) {
                (libc::IPPROTO_IP, libc::IP_PKTINFO) => {
                    let info: in_pktinfo = ptr::read_unaligned(libc::CMSG_DATA(message).cast());
                    // For a broadcast, this is the address of the interface, not the broadcast
                    // address.
                    return Some(Ipv4Addr::from(info.ipi_spec_dst.s_addr.to_ne_bytes()).into());
                }
                (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO) => {
                    let info: in6_pktinfo = ptr::read_unaligned(libc::CMSG_DATA(message).cast());
                    return Some(IpAddr::from(info.ipi6_addr.s6_addr).to_canonical());
                }
                _ => message = libc::CMSG_NXTHDR(header, message),
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::time::Duration;

    use super::*;

    /// Waits until a packet has arrived.
    fn readable(socket: &UdpSocket) {
        socket.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        socket.peek_from(&mut [0]).unwrap();
    }

    #[test]
    fn an_answer_comes_from_the_requested_address() {
        for (listen, target) in [("0.0.0.0:0", "127.0.0.9"), ("[::]:0", "127.0.0.9"), ("[::]:0", "::1")] {
            let Ok(socket) = UdpSocket::bind(listen) else { continue };
            enable_packet_info(socket.as_fd(), listen.starts_with('[')).unwrap();
            let target = SocketAddr::new(target.parse().unwrap(), socket.local_addr().unwrap().port());
            let client = UdpSocket::bind(if target.is_ipv4() { "127.0.0.1:0" } else { "[::1]:0" }).unwrap();
            // A connected socket accepts only packets from that address.
            client.connect(target).unwrap();
            client.send(b"request").unwrap();
            readable(&socket);
            let mut batch = PacketBatch::new();
            let mut packets = batch.receive(socket.as_fd()).unwrap();
            let packet = packets.next().unwrap();
            assert_eq!((packet.bytes, packet.to), (&b"request"[..], Some(target.ip())), "{listen}");
            send_packet(socket.as_fd(), b"answer", packet.from, packet.to).unwrap();
            client.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
            let mut bytes = [0; 16];
            assert_eq!(client.recv(&mut bytes).unwrap(), 6, "{listen}");
        }
    }

    #[test]
    fn one_call_receives_many_packets_and_a_long_packet_is_detected() {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let client = UdpSocket::bind("127.0.0.1:0").unwrap();
        for length in [0, 80, 81, 1000] {
            client.send_to(&[7; 1000][..length], socket.local_addr().unwrap()).unwrap();
        }
        readable(&socket);
        let mut batch = PacketBatch::new();
        let packets = batch.receive(socket.as_fd()).unwrap();
        let lengths: Vec<_> = packets.map(|packet| (packet.bytes.len(), packet.from)).collect();
        let from = client.local_addr().unwrap();
        assert_eq!(lengths, [0, 80, 81, BYTES].map(|length| (length, from)));
        let error = batch.receive(socket.as_fd()).err().unwrap();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
    }

    #[tokio::test]
    async fn answers_are_sent_from_the_socket_of_the_request() {
        let at = |addresses: &[&str]| {
            let addresses: Vec<SocketAddr> = addresses.iter().map(|text| text.parse().unwrap()).collect();
            listen_at(Some(&addresses)).unwrap().0
        };
        let local: IpAddr = "127.0.0.2".parse().unwrap();
        let via = |socket, local| Some(Via { socket, local });
        let alone = at(&["127.0.0.1:0", "127.0.0.2:0"]);
        assert_eq!((alone.via(local), alone.via("127.0.0.3".parse().unwrap())), (via(1, None), None));
        assert_eq!(at(&["127.0.0.1:0", "0.0.0.0:0"]).via(local), via(1, Some(local)));
        if let Ok((both, _)) = listen_at(Some(&["[::]:0".parse().unwrap()])) {
            assert_eq!(both.via(local), via(0, Some(local)));
        }
    }
}
