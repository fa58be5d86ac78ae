//! The kernel's lists of sockets (sock_diag(7)), with the sockets' cookies. The lists contain TCP
//! sockets that are listening, connecting or connected, and UDP sockets that have a port. No list
//! contains other sockets, even while they are open.
//!
//! This is a separate crate because two crates use it: `lb-kernel` finds open sockets, and
//! `lb-agent` finds a backend's connections without kernel programs.
//!
//! A request of the same form can also destroy a socket ([`SocketLists::destroy`]).

mod connection;

use std::cell::Cell;
use std::io;
use std::mem::offset_of;
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::Duration;

use netlink_packet_core::{
    NLM_F_ACK, NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST, NLMSG_DONE, NLMSG_ERROR, NetlinkBuffer,
    NetlinkHeader, NetlinkMessage, NetlinkPayload, NetlinkSerializable, NlaBuffer, NlasIterator, Parseable,
    parse_u64,
};
use netlink_packet_sock_diag::inet::{
    ExtensionFlags, InetRequest, InetResponseBuffer, InetResponseHeader, SocketId, StateFlags,
};
use netlink_packet_sock_diag::{
    AF_INET, AF_INET6, INET_DIAG_INFO, IPPROTO_TCP, IPPROTO_UDP, SockDiagDestroy, SockDiagMessage, TCP_LISTEN,
};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink};

pub use connection::Connection;

/// A socket in one of the kernel's lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketEntry {
    /// The socket's cookie, which is unique while the host is up.
    pub cookie: u64,
    /// The socket's inode, as `/proc/<pid>/fd` shows it.
    pub inode: u32,
    /// Whether the socket listens. A listening socket has no connection.
    pub listens: bool,
    /// The socket's local address and port. The address is unspecified if the socket listens on all
    /// addresses.
    pub local: SocketAddr,
    /// Whether the process has closed the socket. The kernel then ends the connection by itself.
    pub is_closed: bool,
    /// The number of bytes that the process has not read, plus the number of bytes that the peer
    /// has not acknowledged.
    pub queued: u64,
    /// For a TCP connection, the time since data was last received or last sent, whichever was
    /// later; `None` if the kernel does not report it.
    pub idle: Option<Duration>,
    /// The cgroup in which the socket was created, if the kernel reports it (Linux 5.8).
    pub cgroup: Option<u64>,
    pub peer: SocketAddr,
    /// Whether the socket is a subflow of an MPTCP socket. The kernel reports this only to
    /// CAP_NET_ADMIN.
    pub is_mptcp: bool,
    /// The data by which a request identifies the socket; `None` if the socket has no peer.
    pub connection: Option<Connection>,
}

// The netlink library does not define these attributes, and does not parse them.
const INET_DIAG_CGROUP_ID: u16 = 21;
/// The attribute with the upper-layer protocol of a connection. Its value is a list of attributes.
const INET_DIAG_ULP_INFO: u16 = 19;
const INET_ULP_INFO_NAME: u16 = 1;
/// A connection with an incomplete handshake, which has no socket yet.
const TCP_NEW_SYN_RECV: u8 = 12;
/// The states listening, established, SYN sent and SYN received, and every state of a connection
/// that is closing. The states of incomplete sockets, time wait (6) and requests (12), are
/// excluded.
const STATES: u32 = 1 << 1 | 1 << 2 | 1 << 3 | 1 << 4 | 1 << 5 | 1 << 8 | 1 << 9 | 1 << TCP_LISTEN | 1 << 11;
/// The states of a connection that this host has ended: both FIN wait states, time wait, last ACK,
/// and closing. A connection that has no inode and is in another state waits to be accepted.
const CLOSING: u32 = 1 << 4 | 1 << 5 | 1 << 6 | 1 << 9 | 1 << 11;
/// The positions in `struct tcp_info` of the time since data was last sent, and of the time since
/// data was last received, both in milliseconds.
const LAST_DATA_SENT: usize = offset_of!(libc::tcp_info, tcpi_last_data_sent);
const LAST_DATA_RECEIVED: usize = offset_of!(libc::tcp_info, tcpi_last_data_recv);

/// Queries the kernel's lists of sockets in one network namespace.
pub struct SocketLists {
    socket: OwnedFd,
    /// The number of the last request. A message that answers this request contains this number;
    /// unread messages that answer an earlier request may still arrive.
    requests: Cell<u32>,
}

impl SocketLists {
    /// Opens the lists of the calling thread's network namespace.
    ///
    /// # Errors
    /// If the kernel has no sock_diag.
    pub fn open() -> io::Result<Self> {
        let socket = rustix::net::socket_with(
            AddressFamily::NETLINK,
            SocketType::RAW,
            SocketFlags::CLOEXEC,
            Some(netlink::SOCK_DIAG),
        )?;
        Ok(Self { socket, requests: Cell::new(0) })
    }

    /// Cookie of the network namespace, which the kernel programs write into flow records.
    ///
    /// # Errors
    /// Before Linux 5.14 the kernel does not report the cookie.
    pub fn namespace(&self) -> io::Result<u64> {
        const SO_NETNS_COOKIE: libc::c_int = 71;
        let mut cookie = 0u64;
        let mut length = libc::socklen_t::try_from(size_of::<u64>()).map_err(io::Error::other)?;
        // SAFETY: the value of the option has 64 bits, like the variable.
        let result = unsafe {
            libc::getsockopt(
                self.socket.as_fd().as_raw_fd(),
                libc::SOL_SOCKET,
                SO_NETNS_COOKIE,
                (&raw mut cookie).cast(),
                &raw mut length,
            )
        };
        if result == 0 { Ok(cookie) } else { Err(io::Error::last_os_error()) }
    }

    /// All TCP sockets of the namespace.
    ///
    /// # Errors
    /// If the kernel refuses the request, or could not list all sockets.
    pub fn tcp(&self) -> io::Result<Vec<SocketEntry>> {
        let mut sockets = Vec::new();
        self.each_tcp(|socket| sockets.push(socket))?;
        Ok(sockets)
    }

    /// Calls `each` with the TCP sockets of the namespace, one after the other. The sockets are not
    /// collected in a list, because there may be a million.
    ///
    /// # Errors
    /// If the kernel refuses the request, or could not list all sockets.
    pub fn each_tcp(&self, mut each: impl FnMut(SocketEntry)) -> io::Result<()> {
        self.dump(&tcp_request(STATES), &mut each)
    }

    /// Calls `each` with the TCP sockets of the namespace that have `port` as their local port,
    /// including connections with an incomplete handshake. The kernel selects these sockets, but
    /// for the selection it reads its whole table of connections.
    ///
    /// # Errors
    /// If the kernel refuses the request, or could not list all sockets.
    pub fn each_tcp_at(&self, port: u16, mut each: impl FnMut(SocketEntry)) -> io::Result<()> {
        let mut request = tcp_request(STATES | 1 << TCP_NEW_SYN_RECV);
        request.socket_id.source_port = port;
        self.dump(&request, &mut each)
    }

    /// Calls `each` with the UDP sockets of the namespace, one after the other.
    ///
    /// # Errors
    /// If the kernel refuses the request, has no list of UDP sockets (`CONFIG_INET_UDP_DIAG`), or
    /// could not list all sockets.
    pub fn each_udp(&self, mut each: impl FnMut(SocketEntry)) -> io::Result<()> {
        /// All states: connected or not.
        const ANY: u32 = u32::MAX;
        self.dump(&request(IPPROTO_UDP, ANY), &mut each)
    }

    /// Reads a TCP connection again; `None` if it no longer exists. This takes a few microseconds,
    /// independently of the number of sockets.
    ///
    /// # Errors
    /// If the kernel refuses the request.
    pub fn read_tcp(&self, connection: &Connection) -> io::Result<Option<SocketEntry>> {
        let mut found = None;
        let request = SockDiagMessage::InetRequest(connection.request(ExtensionFlags::INFO));
        let result = self.exchange(request, NLM_F_ACK, IPPROTO_TCP, &mut |socket| found = Some(socket));
        match result {
            Err(error) if is_gone(&error) => Ok(None),
            result => result.map(|()| found),
        }
    }

    /// Closes a connection as the kernel does after a fatal error: a process that waits for the
    /// socket receives ECONNABORTED, and the peer of a TCP connection receives a reset. A UDP
    /// socket loses its peer and its port, and can connect again. Returns `false` if the connection
    /// no longer exists.
    ///
    /// # Errors
    /// EPERM without CAP_NET_ADMIN in the user namespace that owns the network namespace,
    /// EOPNOTSUPP if the kernel was built without `CONFIG_INET_DIAG_DESTROY`.
    pub fn destroy(&self, connection: &Connection) -> io::Result<bool> {
        let request = SockDiagMessage::InetRequest(connection.request(ExtensionFlags::empty()));
        match self.exchange(SockDiagDestroy::new(request), NLM_F_ACK, connection.protocol(), &mut |_| {}) {
            Err(error) if is_gone(&error) => Ok(false),
            result => result.map(|()| true),
        }
    }

    /// Tries [`SocketLists::destroy`] with a UDP socket of this process. A request with a wrong
    /// cookie would not test the privilege, because the kernel compares the cookie first.
    ///
    /// # Errors
    /// The errors of [`SocketLists::destroy`]; also if the socket cannot be made.
    pub fn try_destroy(&self) -> io::Result<()> {
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
        let local = socket.local_addr()?;
        // The socket is connected to itself: this connect sends nothing, and requires no other
        // socket.
        socket.connect(local)?;
        let id = SocketId {
            source_port: local.port(),
            destination_port: local.port(),
            source_address: local.ip(),
            destination_address: local.ip(),
            interface_id: 0,
            cookie: rustix::net::sockopt::socket_cookie(&socket)?.to_ne_bytes(),
        };
        match Connection::of(AF_INET, IPPROTO_UDP, &id) {
            Some(connection) => self.destroy(&connection).map(|_| ()),
            None => Err(io::ErrorKind::AddrNotAvailable.into()),
        }
    }

    /// Makes the kernel list the sockets of both families.
    fn dump(&self, request: &InetRequest, each: &mut impl FnMut(SocketEntry)) -> io::Result<()> {
        for family in [AF_INET, AF_INET6] {
            let of_family = SockDiagMessage::InetRequest(InetRequest { family, ..request.clone() });
            self.exchange(of_family, NLM_F_DUMP, request.protocol, each)?;
        }
        Ok(())
    }

    /// Sends a request, and reads the messages of the answer, up to the message that ends it: the
    /// end of a list (`NLM_F_DUMP`), an acknowledgement (`NLM_F_ACK`), or an error.
    fn exchange<M: NetlinkSerializable + Into<NetlinkPayload<M>>>(
        &self,
        request: M,
        flags: u16,
        protocol: u8,
        each: &mut impl FnMut(SocketEntry),
    ) -> io::Result<()> {
        /// At least the maximum number of bytes that the kernel sends at once: NLMSG_GOODSIZE,
        /// which is 8 KiB, or more for readers with larger buffers.
        const BUFFER: usize = 32 << 10;
        let sequence = self.requests.get().wrapping_add(1);
        self.requests.set(sequence);
        let mut header = NetlinkHeader::default();
        header.flags = NLM_F_REQUEST | flags;
        header.sequence_number = sequence;
        let mut message = NetlinkMessage::new(header, request.into());
        message.finalize();
        let mut bytes = vec![0; message.buffer_len()];
        message.serialize(&mut bytes);
        rustix::net::send(&self.socket, &bytes, SendFlags::empty())?;
        let mut buffer = vec![0; BUFFER];
        // Bound: the kernel ends its answer with a message that marks the end, or with an error.
        loop {
            let (length, _) = rustix::net::recv(&self.socket, buffer.as_mut_slice(), RecvFlags::empty())?;
            if read_datagram(&buffer[..length], sequence, protocol, each)? {
                return Ok(());
            }
        }
    }
}

/// Whether the error means that the kernel has found no such socket.
fn is_gone(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::ENOENT)
}

/// A request for those sockets of a protocol that are in one of these states.
fn request(protocol: u8, states: u32) -> InetRequest {
    InetRequest {
        family: AF_INET,
        protocol,
        extensions: ExtensionFlags::empty(),
        states: StateFlags::from_bits_retain(states),
        socket_id: SocketId::new_v4(),
    }
}

/// Like [`request`], for TCP. The kernel reports an upper-layer protocol such as MPTCP only if the
/// request includes details of the connection.
fn tcp_request(states: u32) -> InetRequest {
    InetRequest { extensions: ExtensionFlags::INFO, ..request(IPPROTO_TCP, states) }
}

/// Reads one datagram of messages. Returns whether the list ends with this datagram.
///
/// Parses the datagram in place. The library's own message type copies each attribute, and fails
/// for an attribute that no caller needs.
fn read_datagram(
    datagram: &[u8],
    sequence: u32,
    protocol: u8,
    each: &mut impl FnMut(SocketEntry),
) -> io::Result<bool> {
    let cut = || io::Error::new(io::ErrorKind::InvalidData, "the kernel's list of sockets is cut off");
    let mut rest = datagram;
    // Bound: each message is at least as long as its header.
    while !rest.is_empty() {
        let message = NetlinkBuffer::new_checked(rest).map_err(|_| cut())?;
        let body = message.payload();
        // Each message begins at a multiple of four bytes.
        rest = rest.get((message.length() as usize).next_multiple_of(4)..).unwrap_or_default();
        // This message answers an earlier request, and was not read at that time.
        if message.sequence_number() != sequence {
            continue;
        }
        if message.flags() & NLM_F_DUMP_INTR != 0 {
            return Err(io::Error::new(
                io::ErrorKind::Interrupted,
                "the list of sockets changed while it was read",
            ));
        }
        match message.message_type() {
            NLMSG_DONE | NLMSG_ERROR => {
                // Both kinds contain a negated errno. Zero means no error.
                let error = body.first_chunk().map_or(0, |code| i32::from_ne_bytes(*code));
                return if error == 0 { Ok(true) } else { Err(io::Error::from_raw_os_error(-error)) };
            }
            _ => each(read_socket(body, protocol).ok_or_else(cut)?),
        }
    }
    Ok(false)
}

fn read_socket(body: &[u8], protocol: u8) -> Option<SocketEntry> {
    let header = InetResponseHeader::parse(body).ok()?;
    let id = &header.socket_id;
    let mut socket = SocketEntry {
        // The kernel sends the low word first. On little-endian machines, this is the native order.
        cookie: u64::from_ne_bytes(id.cookie),
        inode: header.inode,
        listens: header.state == TCP_LISTEN,
        local: SocketAddr::new(id.source_address.to_canonical(), id.source_port),
        is_closed: header.inode == 0 && CLOSING >> header.state & 1 == 1,
        queued: u64::from(header.recv_queue) + u64::from(header.send_queue),
        idle: None,
        cgroup: None,
        peer: SocketAddr::new(id.destination_address.to_canonical(), id.destination_port),
        is_mptcp: false,
        connection: Connection::of(header.family, protocol, id),
    };
    for attribute in attributes(body.get(size_of::<InetResponseBuffer>()..)?) {
        match attribute.kind() {
            INET_DIAG_INFO => socket.idle = idle(attribute.value()),
            INET_DIAG_CGROUP_ID => socket.cgroup = parse_u64(attribute.value()).ok(),
            INET_DIAG_ULP_INFO => {
                socket.is_mptcp = attributes(attribute.value())
                    .any(|of| of.kind() == INET_ULP_INFO_NAME && of.value().starts_with(b"mptcp\0"));
            }
            _ => {}
        }
    }
    Some(socket)
}

/// The time since data was last received or last sent, whichever was later.
fn idle(tcp_info: &[u8]) -> Option<Duration> {
    let ms = |at: usize| tcp_info.get(at..)?.first_chunk().map(|ms| u32::from_ne_bytes(*ms));
    Some(Duration::from_millis(ms(LAST_DATA_SENT)?.min(ms(LAST_DATA_RECEIVED)?).into()))
}

/// The attributes in a list, up to the first incomplete one.
fn attributes(list: &[u8]) -> impl Iterator<Item = NlaBuffer<&[u8]>> {
    NlasIterator::new(list).map_while(Result::ok)
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::net::{TcpListener, TcpStream};
    use std::os::unix::fs::MetadataExt;

    use netlink_packet_core::{DefaultNla, Emitable};
    use netlink_packet_sock_diag::inet::{InetResponse, nlas::Nla};
    use netlink_packet_sock_diag::{SOCK_DIAG_BY_FAMILY, TCP_ESTABLISHED};

    fn cookie(socket: impl AsFd) -> u64 {
        rustix::net::sockopt::socket_cookie(socket).unwrap()
    }

    #[test]
    fn the_kernel_lists_listening_and_connected_sockets_only() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let idle =
            rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).expect("a socket is created");
        let mptcp = Some(rustix::net::ipproto::MPTCP);
        let path_of_mptcp = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, mptcp).unwrap();
        rustix::net::connect(&path_of_mptcp, &listener.local_addr().unwrap()).unwrap();
        let local = SocketAddr::try_from(rustix::net::getsockname(&path_of_mptcp).unwrap()).unwrap();
        let sockets = SocketLists::open().unwrap().tcp().unwrap();
        // The subflow is a separate socket, with another cookie.
        let path =
            sockets.iter().find(|socket| socket.local == local).expect("the kernel lists the connection");
        assert!(path.is_mptcp);
        let find = |cookie: u64| sockets.iter().find(|socket| socket.cookie == cookie);
        let seen = find(cookie(&stream)).expect("the kernel lists the connection");
        assert_eq!(seen.peer, listener.local_addr().unwrap());
        assert!(
            !seen.is_mptcp
                && !seen.listens
                && find(cookie(&listener)).expect("the listener is in the list").listens
        );
        assert_eq!(find(cookie(&idle)), None);
        let path = format!("/proc/self/fd/{}", stream.as_fd().as_raw_fd());
        assert_eq!(u64::from(seen.inode), std::fs::metadata(path).unwrap().ino());
    }

    #[test]
    fn sockets_at_a_port_have_their_queue_and_idle_time() {
        use std::io::Write;

        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let other = TcpListener::bind("127.0.0.1:0").unwrap();
        let local = listener.local_addr().unwrap();
        let mut client = TcpStream::connect(local).unwrap();
        let (stream, _) = listener.accept().unwrap();
        client.write_all(b"request").unwrap();
        let mut sockets = Vec::new();
        SocketLists::open().unwrap().each_tcp_at(local.port(), |socket| sockets.push(socket)).unwrap();
        let find = |cookie: u64| sockets.iter().find(|socket| socket.cookie == cookie);
        let seen = find(cookie(&stream)).expect("the accepted connection is in the list");
        assert_eq!((seen.local, seen.queued), (local, 7));
        assert!(
            seen.idle.expect("the kernel reports the idle time of a connection") < Duration::from_mins(1)
        );
        assert!(!seen.is_closed);
        assert!(find(cookie(&listener)).expect("the listener is in the list").listens);
        // These sockets have another local port.
        assert_eq!(find(cookie(&client)), None);
        assert_eq!(find(cookie(&other)), None);
    }

    #[test]
    fn idle_time_counts_from_the_later_of_both_directions() {
        let mut tcp_info = [0; 104];
        tcp_info[LAST_DATA_SENT..][..4].copy_from_slice(&7000u32.to_ne_bytes());
        tcp_info[LAST_DATA_RECEIVED..][..4].copy_from_slice(&3000u32.to_ne_bytes());
        assert_eq!(idle(&tcp_info), Some(Duration::from_secs(3)));
        assert_eq!(idle(&tcp_info[..LAST_DATA_RECEIVED]), None);
    }

    #[test]
    fn the_kernel_lists_datagram_sockets_with_a_port() {
        let open = || UdpSocket::bind("127.0.0.1:0").unwrap();
        let (bound, connected, stream) = (open(), open(), TcpListener::bind("127.0.0.1:0").unwrap());
        connected.connect(bound.local_addr().unwrap()).unwrap();
        let idle = rustix::net::socket(AddressFamily::INET, SocketType::DGRAM, None).unwrap();
        let mut sockets = Vec::new();
        SocketLists::open().unwrap().each_udp(|socket| sockets.push(socket)).unwrap();
        let is_seen = |cookie: u64| sockets.iter().any(|socket| socket.cookie == cookie);
        assert!(is_seen(cookie(&bound)) && is_seen(cookie(&connected)));
        assert!(!is_seen(cookie(&idle)) && !is_seen(cookie(&stream)));
    }

    /// The connection of a socket of this process, as a list shows it.
    fn listed(lists: &SocketLists, socket: impl AsFd, is_udp: bool) -> Connection {
        let (wanted, mut found) = (cookie(socket), None);
        let each = |socket: SocketEntry| {
            if socket.cookie == wanted {
                found = Some(socket);
            }
        };
        if is_udp { lists.each_udp(each) } else { lists.each_tcp(each) }
            .expect("the kernel lists the sockets");
        found.expect("the socket is in the list").connection.expect("the socket has a peer")
    }

    #[test]
    fn the_kernel_destroys_the_named_connection_and_no_other() {
        use std::io::{ErrorKind, Read};

        let lists = SocketLists::open().unwrap();
        lists.try_destroy().expect("tests of this crate need CAP_NET_ADMIN");
        for at in ["127.0.0.1:0", "[::1]:0", "[::ffff:127.0.0.1]:0"] {
            let listener = TcpListener::bind(at).unwrap();
            let to = listener.local_addr().unwrap();
            let (mut stream, mut other) = (TcpStream::connect(to).unwrap(), TcpStream::connect(to).unwrap());
            let connection = listed(&lists, &stream, false);
            let is_read = |connection| lists.read_tcp(connection).unwrap().map(|socket| socket.cookie);
            assert_eq!(is_read(&connection), Some(cookie(&stream)), "{at}");
            // The addresses of one socket with the cookie of another.
            let mixed = listed(&lists, &other, false).with_cookie_of(&connection);
            assert_eq!((lists.destroy(&mixed).unwrap(), lists.destroy(&connection).unwrap()), (false, true));
            assert_eq!(stream.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionAborted, "{at}");
            assert_eq!((is_read(&connection), lists.destroy(&connection).unwrap()), (None, false), "{at}");
            other.set_nonblocking(true).unwrap();
            assert_eq!(other.read(&mut [0]).unwrap_err().kind(), ErrorKind::WouldBlock, "{at}");
        }
    }

    #[test]
    fn a_destroyed_datagram_socket_can_connect_again() {
        use std::io::ErrorKind;

        let lists = SocketLists::open().unwrap();
        for at in ["127.0.0.1:0", "[::1]:0", "[::ffff:127.0.0.1]:0"] {
            let server = UdpSocket::bind(at).unwrap();
            let to = server.local_addr().unwrap();
            let socket = UdpSocket::bind(at).unwrap();
            socket.connect(to).unwrap();
            let connection = listed(&lists, &socket, true);
            assert!(connection.is_udp() && lists.destroy(&connection).unwrap(), "{at}");
            assert_eq!(socket.recv(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionAborted, "{at}");
            assert!(!lists.destroy(&connection).unwrap(), "{at}");
            socket.connect(to).unwrap();
            assert_eq!(socket.send(b"x").unwrap(), 1, "{at}");
        }
    }

    #[test]
    fn attributes_show_the_cgroup_and_paths_of_mptcp() {
        let read = |name: &[u8]| {
            let header = InetResponseHeader {
                family: AF_INET,
                state: TCP_ESTABLISHED,
                timer: None,
                socket_id: SocketId { cookie: (7u64 << 32 | 5).to_ne_bytes(), ..SocketId::new_v4() },
                recv_queue: 0,
                send_queue: 0,
                uid: 0,
                inode: 3,
            };
            let length = u16::try_from(4 + name.len()).unwrap().to_ne_bytes();
            let protocol = [&length, &INET_ULP_INFO_NAME.to_ne_bytes(), name].concat();
            let attributes =
                [(INET_DIAG_CGROUP_ID, 9u64.to_ne_bytes().to_vec()), (INET_DIAG_ULP_INFO, protocol)];
            let nlas = attributes.map(|(kind, value)| Nla::Other(DefaultNla::new(kind, value)));
            let response = InetResponse { header, nlas: nlas.into_iter().collect() };
            let mut body = vec![0; response.buffer_len()];
            response.emit(&mut body);
            let socket = read_socket(&body, IPPROTO_TCP).expect("the message is complete");
            assert_eq!((socket.cookie, socket.inode, socket.cgroup), (7 << 32 | 5, 3, Some(9)));
            socket.is_mptcp
        };
        assert!(read(b"mptcp\0"));
        assert!(!read(b"tls\0") && !read(b"mptcp2\0"));
    }

    #[test]
    fn an_error_ends_a_dump_and_a_truncated_message_is_an_error() {
        let message = |kind, sequence, flags, body: &[u8]| {
            let mut header = NetlinkHeader::default();
            (header.message_type, header.sequence_number, header.flags) = (kind, sequence, flags);
            header.length = u32::try_from(header.buffer_len() + body.len()).unwrap();
            let mut bytes = vec![0; header.buffer_len()];
            header.emit(&mut bytes);
            [bytes.as_slice(), body].concat()
        };
        let read = |datagram: &[u8]| {
            read_datagram(datagram, 2, IPPROTO_TCP, &mut |_| {}).map_err(|error| error.raw_os_error())
        };
        assert_eq!(read(&message(NLMSG_DONE, 2, 0, &0i32.to_ne_bytes())), Ok(true));
        assert_eq!(read(&message(NLMSG_ERROR, 2, 0, &(-2i32).to_ne_bytes())), Err(Some(2)));
        assert_eq!(read(&message(SOCK_DIAG_BY_FAMILY, 2, 0, &[0; 8])), Err(None));
        assert_eq!(read(&message(NLMSG_DONE, 2, 0, &[])[..12]), Err(None));
        assert_eq!(read(&message(NLMSG_DONE, 2, NLM_F_DUMP_INTR, &[0; 4])), Err(None));
        assert_eq!(read(&message(NLMSG_DONE, 10, 0, &[0; 4])), Ok(false));
    }
}
