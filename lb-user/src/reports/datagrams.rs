//! A UDP socket that receives and sends many datagrams per system call. At thousands of datagrams
//! per second, one call per datagram would use a whole core.

use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use lb_report::wire::BYTES;
use rustix::net::sockopt::{self, Ipv4PathMtuDiscovery};
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use crate::controller::exchange::BATCH;

/// The size of the buffer for one received datagram: one byte more than a valid datagram, so that a
/// datagram that is too long is detected.
const ROOM: usize = BYTES + 1;

/// The size of the socket's receive buffer in bytes: room for about 10,000 datagrams, including the
/// kernel's overhead for each.
const BUFFER: usize = 8 << 20;

#[derive(Debug)]
pub struct ReportSocket {
    socket: UdpSocket,
    /// Whether IPv4 addresses are written in v4-mapped form.
    is_v6: bool,
}

/// The datagrams that one system call received.
pub struct ReceivedBatch {
    bytes: Box<[[u8; ROOM]; BATCH]>,
    lengths: [usize; BATCH],
}

impl Default for ReceivedBatch {
    fn default() -> Self {
        Self { bytes: Box::new([[0; ROOM]; BATCH]), lengths: [0; BATCH] }
    }
}

impl ReportSocket {
    /// Binds a socket. A socket at `[::]` receives IPv4 and IPv6; if the host has no IPv6, the
    /// socket is bound to `0.0.0.0` instead.
    ///
    /// # Errors
    /// If the address is in use, or is not an address of this host.
    pub fn bind(address: SocketAddr) -> io::Result<Self> {
        let any = IpAddr::V6(Ipv6Addr::UNSPECIFIED);
        let socket = match bound(address) {
            Err(error) if address.ip() == any && error.raw_os_error() == Some(libc::EAFNOSUPPORT) => {
                bound(SocketAddr::new(IpAddr::V4(std::net::Ipv4Addr::UNSPECIFIED), address.port()))?
            }
            socket => socket?,
        };
        let is_v6 = socket.local_addr()?.is_ipv6();
        Ok(Self { socket, is_v6 })
    }

    /// # Errors
    /// There is no known cause of an error.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }

    /// Receives at most `BATCH` datagrams that have arrived, without waiting. Returns their
    /// number.
    ///
    /// # Errors
    /// If the system call fails. If no datagram has arrived, the result is `Ok(0)`.
    pub fn receive(&self, received: &mut ReceivedBatch) -> io::Result<usize> {
        let mut parts = received
            .bytes
            .each_mut()
            .map(|bytes| libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: ROOM });
        let mut headers = parts.each_mut().map(|part| header(part, &mut SocketName::None));
        // SAFETY: the headers point to parts, and the parts to buffers, all of which outlive the
        // call. No address is requested.
        let count = unsafe {
            libc::recvmmsg(
                self.socket.as_raw_fd(),
                headers.as_mut_ptr(),
                BATCH_C,
                libc::MSG_DONTWAIT,
                std::ptr::null_mut(),
            )
        };
        let Ok(count) = usize::try_from(count) else {
            let error = io::Error::last_os_error();
            // The kernel may report here that a datagram which this socket sent earlier has failed.
            // Such an error does not concern the datagrams to receive.
            let is_nothing = matches!(
                error.raw_os_error(),
                Some(
                    libc::EAGAIN | libc::EINTR | libc::ECONNREFUSED | libc::EHOSTUNREACH | libc::ENETUNREACH
                )
            );
            return if is_nothing { Ok(0) } else { Err(error) };
        };
        for (length, header) in received.lengths.iter_mut().zip(&headers[..count]) {
            *length = header.msg_len as usize;
        }
        Ok(count)
    }

    /// Sends datagrams without waiting. Returns the number of sent datagrams. A datagram that could
    /// not be sent needs no retry, because the next poll of the agent replaces it.
    pub fn send(&self, datagrams: &[(SocketAddr, [u8; BYTES])]) -> usize {
        datagrams.chunks(BATCH).map(|batch| self.send_batch(batch)).sum()
    }

    fn send_batch(&self, batch: &[(SocketAddr, [u8; BYTES])]) -> usize {
        let mut sent = 0;
        // Bound: each turn skips or sends at least one datagram.
        let mut at = 0;
        while at < batch.len() {
            let rest = &batch[at..];
            let mut names: Vec<SocketName> =
                rest.iter().map(|(to, _)| SocketName::of(*to, self.is_v6)).collect();
            let mut parts: Vec<libc::iovec> = rest
                .iter()
                .map(|(_, bytes)| libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: BYTES })
                .collect();
            let mut headers: Vec<libc::mmsghdr> =
                parts.iter_mut().zip(&mut names).map(|(part, name)| header(part, name)).collect();
            let length = libc::c_uint::try_from(headers.len()).expect("a batch has at most 64 parts");
            // SAFETY: the headers point to addresses, parts and bytes that outlive the call, which
            // only reads them.
            let count = unsafe {
                libc::sendmmsg(self.socket.as_raw_fd(), headers.as_mut_ptr(), length, libc::MSG_DONTWAIT)
            };
            match usize::try_from(count) {
                Ok(count) if count > 0 => {
                    sent += count;
                    at += count;
                }
                // The first datagram cannot be sent: there is no route to its destination, or no
                // room in the socket's send buffer.
                _ => at += 1,
            }
        }
        sent
    }
}

impl AsFd for ReportSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl ReceivedBatch {
    /// The bytes of the datagram at this index. If the datagram was too long, the result has only
    /// its first [`BYTES`] + 1 bytes.
    pub fn get(&self, at: usize) -> &[u8] {
        &self.bytes[at][..self.lengths[at].min(ROOM)]
    }
}

#[expect(clippy::cast_possible_truncation, reason = "`BATCH` is 64")]
const BATCH_C: libc::c_uint = BATCH as libc::c_uint;

fn bound(address: SocketAddr) -> io::Result<UdpSocket> {
    let family = if address.is_ipv6() { AddressFamily::INET6 } else { AddressFamily::INET };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(family, SocketType::DGRAM, flags, None)?;
    if let SocketAddr::V6(v6) = address {
        sockopt::set_ipv6_v6only(&socket, !v6.ip().is_unspecified())?;
    }
    // If the host's limit is lower, the kernel sets the largest size that the limit allows.
    let _ = sockopt::set_socket_recv_buffer_size(&socket, BUFFER);
    let _ = sockopt::set_socket_recv_buffer_size_force(&socket, BUFFER);
    // These datagrams are so small that no path has to fragment them. An IPv4 packet that may be
    // fragmented needs an id from a counter that all processors share; the counter takes about 5 %
    // of the time of a send. If the kernel rejects the option, each send also takes this time.
    let _ = sockopt::set_ip_mtu_discover(&socket, Ipv4PathMtuDiscovery::DO);
    rustix::net::bind(&socket, &address)?;
    Ok(UdpSocket::from(socket))
}

/// An address in the form of the socket's family.
enum SocketName {
    /// No address is requested.
    None,
    V4(libc::sockaddr_in),
    V6(libc::sockaddr_in6),
}

impl SocketName {
    fn of(address: SocketAddr, is_v6: bool) -> Self {
        match address {
            SocketAddr::V4(v4) if is_v6 => {
                Self::v6(SocketAddrV6::new(v4.ip().to_ipv6_mapped(), v4.port(), 0, 0))
            }
            SocketAddr::V4(v4) => Self::v4(v4),
            SocketAddr::V6(v6) => Self::v6(v6),
        }
    }

    fn v4(address: SocketAddrV4) -> Self {
        Self::V4(libc::sockaddr_in {
            sin_family: FAMILY_V4,
            sin_port: address.port().to_be(),
            sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(address.ip().octets()) },
            sin_zero: [0; 8],
        })
    }

    fn v6(address: SocketAddrV6) -> Self {
        Self::V6(libc::sockaddr_in6 {
            sin6_family: FAMILY_V6,
            sin6_port: address.port().to_be(),
            sin6_flowinfo: 0,
            sin6_addr: libc::in6_addr { s6_addr: address.ip().octets() },
            sin6_scope_id: address.scope_id(),
        })
    }
}

#[expect(clippy::cast_possible_truncation, reason = "address families are small numbers")]
const FAMILY_V4: libc::sa_family_t = libc::AF_INET as libc::sa_family_t;
#[expect(clippy::cast_possible_truncation, reason = "address families are small numbers")]
const FAMILY_V6: libc::sa_family_t = libc::AF_INET6 as libc::sa_family_t;

fn header(part: &mut libc::iovec, name: &mut SocketName) -> libc::mmsghdr {
    // SAFETY: all zero is a header without addresses, parts and control data.
    let mut header: libc::mmsghdr = unsafe { std::mem::zeroed() };
    (header.msg_hdr.msg_iov, header.msg_hdr.msg_iovlen) = (part, 1);
    let (address, length): (*mut libc::c_void, usize) = match name {
        SocketName::None => (std::ptr::null_mut(), 0),
        SocketName::V4(v4) => (std::ptr::from_mut(v4).cast(), size_of::<libc::sockaddr_in>()),
        SocketName::V6(v6) => (std::ptr::from_mut(v6).cast(), size_of::<libc::sockaddr_in6>()),
    };
    header.msg_hdr.msg_name = address;
    header.msg_hdr.msg_namelen = libc::socklen_t::try_from(length).expect("an address has a few bytes");
    header
}

#[cfg(test)]
mod tests {
    use rustix::event::{PollFd, PollFlags, poll};

    use super::*;

    fn wait(socket: &ReportSocket) {
        let mut waiting = [PollFd::new(socket, PollFlags::IN)];
        let limit = rustix::event::Timespec { tv_sec: 10, tv_nsec: 0 };
        assert_eq!(poll(&mut waiting, Some(&limit)).unwrap(), 1, "a datagram arrives");
    }

    #[test]
    fn datagrams_reach_both_families_and_arrive_complete() {
        let here = ReportSocket::bind("[::]:0".parse().unwrap()).unwrap();
        for local in ["127.0.0.1:0", "[::1]:0"] {
            let there = ReportSocket::bind(local.parse().unwrap()).unwrap();
            let to = there.address().unwrap();
            let datagrams: Vec<_> = (0..100_u8).map(|n| (to, [n; BYTES])).collect();
            assert_eq!(here.send(&datagrams), 100);
            let mut received = ReceivedBatch::default();
            let mut seen = Vec::new();
            while seen.len() < 100 {
                wait(&there);
                let count = there.receive(&mut received).unwrap();
                seen.extend((0..count).map(|at| received.get(at).to_vec()));
            }
            assert!(seen.iter().zip(0..).all(|(bytes, n)| *bytes == [n; BYTES]), "{local}");
            assert_eq!(there.receive(&mut received).unwrap(), 0);
        }
    }

    #[test]
    fn the_length_of_a_datagram_is_detected() {
        let there = ReportSocket::bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let sender = UdpSocket::bind("127.0.0.1:0").unwrap();
        for length in [0, 1, BYTES - 1, BYTES, BYTES + 1, 9_000] {
            sender.send_to(&vec![7; length], there.address().unwrap()).unwrap();
            wait(&there);
            let mut received = ReceivedBatch::default();
            assert_eq!(there.receive(&mut received).unwrap(), 1);
            assert_eq!(received.get(0).len(), length.min(BYTES + 1));
        }
    }

    #[test]
    fn a_datagram_that_fails_to_send_delays_no_other() {
        let here = ReportSocket::bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let there = ReportSocket::bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let to = there.address().unwrap();
        let other_family: SocketAddr = "[::1]:9".parse().unwrap();
        assert_eq!(here.send(&[(to, [1; BYTES]), (other_family, [2; BYTES]), (to, [3; BYTES])]), 2);
        // No process listens at `to`: an error that the kernel reports later must not affect the
        // next call.
        drop(there);
        here.send(&[(to, [4; BYTES])]);
        assert_eq!(here.receive(&mut ReceivedBatch::default()).unwrap(), 0);
    }

    #[test]
    fn a_port_in_use_is_an_error() {
        let one = ReportSocket::bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let error = ReportSocket::bind(one.address().unwrap()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
    }
}
