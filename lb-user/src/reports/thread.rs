//! The thread of the exchange, with its UDP socket and its clock. The socket receives and sends
//! many datagrams per system call: at thousands of datagrams per second, one call per datagram
//! would use a whole core.

use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use lb_host::socket::of_family;
use lb_host::wake::Wake;
use lb_report::wire::BYTES;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt::{self, Ipv4PathMtuDiscovery};
use rustix::net::{AddressFamily, SocketAddrAny, SocketFlags, SocketType};
use tokio::sync::Notify;
use tracing::warn;

use super::pace::{APART, TokenBucket};
use super::{SharedExchange, lock};
use crate::controller::exchange::{BATCH, Turn};

pub struct ReportThread {
    pub socket: ReportSocket,
    pub shared: Arc<Mutex<SharedExchange>>,
    pub wake: Wake,
    pub news: Arc<Notify>,
}

impl ReportThread {
    pub fn run(mut self) {
        let mut received = ReceivedBatch::default();
        let mut has_failed = false;
        let mut pace = TokenBucket::new(now());
        // Bound: the loop ends when the daemon stops.
        loop {
            let has_rested = self.rest(pace.turn(now()));
            let Some(next) = self.poll_agents() else { return };
            // If the thread has paused in `rest` and the next request is due soon, the rate of
            // datagrams is so high that some have arrived during the pause. The thread reads them
            // without a wait.
            let is_busy = has_rested && next < APART && !has_failed;
            let result = if is_busy { Ok(()) } else { self.wait(next, has_failed) };
            let result = result.and_then(|()| self.take(&mut received));
            if let Err(error) = &result
                && !has_failed
            {
                warn!(%error, "cannot receive reports; retrying ten times a second");
            }
            has_failed = result.is_err();
        }
    }

    /// Polls the agents that are due. Returns the time until the next agent is due; `None` if the
    /// daemon is stopping.
    fn poll_agents(&mut self) -> Option<Duration> {
        let Turn { requests, next, is_news } = {
            let mut shared = lock(&self.shared);
            if shared.is_stopping {
                return None;
            }
            shared.exchange.turn(now())
        };
        if is_news {
            self.news.notify_one();
        }
        if !requests.is_empty() {
            let sent = self.socket.send(&requests);
            let counts = &mut lock(&self.shared).exchange.counts;
            counts.requests += sent as u64;
            counts.unsent += (requests.len() - sent) as u64;
        }
        Some(next)
    }

    /// Waits for `time`, while datagrams accumulate. The wait ends early if the event loop wakes
    /// the thread. Returns `false` if `time` is zero.
    fn rest(&self, time: Duration) -> bool {
        if time.is_zero() {
            return false;
        }
        let time = Timespec::try_from(time).ok();
        // An error is ignored, because the next call of `wait` reports it.
        if let Ok(1..) = poll(&mut [PollFd::new(&self.wake, PollFlags::IN)], time.as_ref()) {
            self.wake.woken();
        }
        true
    }

    /// Waits until a datagram arrives, the loop wakes the thread, or `next` has passed.
    fn wait(&self, next: Duration, has_failed: bool) -> io::Result<()> {
        // After a read of the socket has failed, the socket is not polled, because poll(2) reports
        // it as ready all the time.
        let limit = if has_failed { next.min(Duration::from_millis(100)) } else { next };
        let limit = Timespec::try_from(limit).map_err(io::Error::other)?;
        let socket = if has_failed { PollFlags::empty() } else { PollFlags::IN };
        let mut waiting = [PollFd::new(&self.wake, PollFlags::IN), PollFd::new(&self.socket, socket)];
        match poll(&mut waiting, Some(&limit)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        self.wake.woken();
        Ok(())
    }

    /// Handles the datagrams that have arrived.
    fn take(&mut self, received: &mut ReceivedBatch) -> io::Result<()> {
        // Bound: after this number of batches, the thread polls the agents that are due, even if
        // more datagrams arrive.
        for _ in 0..16 {
            let count = self.socket.receive(received)?;
            if count == 0 {
                break;
            }
            let mut shared = lock(&self.shared);
            let (exchange, now) = (&mut shared.exchange, now());
            let mut is_news = false;
            for at in 0..count {
                is_news |= exchange.take(received.get(at), now);
            }
            drop(shared);
            if is_news {
                self.news.notify_one();
            }
            if count < BATCH {
                break;
            }
        }
        Ok(())
    }
}

/// The CLOCK_MONOTONIC time. The kernel programs use this clock, too.
pub fn now() -> Duration {
    Duration::from_nanos(lb_kernel::monotonic_ns())
}

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
struct ReceivedBatch {
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
    fn receive(&self, received: &mut ReceivedBatch) -> io::Result<usize> {
        let mut parts = received
            .bytes
            .each_mut()
            .map(|bytes| libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: ROOM });
        let mut headers = parts.each_mut().map(|part| header(part, None));
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
    fn send(&self, datagrams: &[(SocketAddr, [u8; BYTES])]) -> usize {
        datagrams.chunks(BATCH).map(|batch| self.send_batch(batch)).sum()
    }

    fn send_batch(&self, batch: &[(SocketAddr, [u8; BYTES])]) -> usize {
        let mut sent = 0;
        // Bound: each turn skips or sends at least one datagram.
        let mut at = 0;
        while at < batch.len() {
            let rest = &batch[at..];
            let names: Vec<SocketAddrAny> =
                rest.iter().map(|(to, _)| of_family(*to, self.is_v6).into()).collect();
            let mut parts: Vec<libc::iovec> = rest
                .iter()
                .map(|(_, bytes)| libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: BYTES })
                .collect();
            let mut headers: Vec<libc::mmsghdr> =
                parts.iter_mut().zip(&names).map(|(part, name)| header(part, Some(name))).collect();
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
    fn get(&self, at: usize) -> &[u8] {
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

/// The header of a datagram; with a name only if the datagram is sent.
fn header(part: &mut libc::iovec, name: Option<&SocketAddrAny>) -> libc::mmsghdr {
    // SAFETY: all zero is a header without addresses, parts and control data.
    let mut header: libc::mmsghdr = unsafe { std::mem::zeroed() };
    (header.msg_hdr.msg_iov, header.msg_hdr.msg_iovlen) = (part, 1);
    if let Some(name) = name {
        header.msg_hdr.msg_name = name.as_ptr().cast_mut().cast();
        header.msg_hdr.msg_namelen = name.addr_len();
    }
    header
}

#[cfg(test)]
mod tests {
    use rustix::event::{PollFd, PollFlags, poll};

    use super::*;

    fn wait(socket: &ReportSocket) {
        let mut waiting = [PollFd::new(socket, PollFlags::IN)];
        let limit = Timespec { tv_sec: 10, tv_nsec: 0 };
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
