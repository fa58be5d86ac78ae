//! The kernel's lists of sockets (sock_diag(7)), with their cookies: TCP sockets that are listening, connecting or
//! connected, and UDP sockets that have a port. A socket that is none of these is in no list, though it may be open.
//!
//! A crate of its own because the kernel side asks whose sockets are open, and the agent which connections a backend still
//! has, without kernel programs.

use std::cell::Cell;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::Duration;

use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink};

/// A socket of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketEntry {
    /// Unique while the host is up.
    pub cookie: u64,
    /// Its inode, as `/proc/<pid>/fd` names it.
    pub inode: u32,
    /// Whether it listens: such a socket does not connect.
    pub listens: bool,
    /// Its own address, unspecified if it listens on all, and its own port.
    pub local: SocketAddr,
    /// Whether its process has closed it: the kernel ends the connection by itself.
    pub is_closed: bool,
    /// Bytes that its process has not read, and that its peer has not acknowledged.
    pub queued: u64,
    /// How long ago data last came or went, of a TCP connection, if that was asked for.
    pub idle: Option<Duration>,
    /// The cgroup that it was made in, where the kernel tells (Linux 5.8).
    pub cgroup: Option<u64>,
    /// Its peer.
    pub peer: SocketAddr,
    /// Whether it is a path of an MPTCP socket. The kernel tells that to CAP_NET_ADMIN.
    pub is_mptcp: bool,
}

const SOCK_DIAG_BY_FAMILY: u16 = 20;
/// `NLM_F_REQUEST | NLM_F_DUMP`.
const DUMP: u16 = 0x301;
/// `NLM_F_DUMP_INTR`: the list changed in a way that made the kernel lose its position.
const INTERRUPTED: u16 = 0x10;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
/// `struct tcp_info`.
const INET_DIAG_INFO: u16 = 2;
const INET_DIAG_CGROUP_ID: u16 = 21;
/// The upper-layer protocol of a connection; itself a list of attributes.
const INET_DIAG_ULP_INFO: u16 = 19;
const INET_ULP_INFO_NAME: u16 = 1;
const TCP_LISTEN: u8 = 10;
/// A connection whose handshake is not complete: no socket yet.
const TCP_NEW_SYN_RECV: u8 = 12;
/// Listening, established, both handshakes' first states, and every state of a connection that is closing. Not the
/// states of what is no full socket: time wait (6) and requests (12).
const STATES: u32 = 1 << 1 | 1 << 2 | 1 << 3 | 1 << 4 | 1 << 5 | 1 << 8 | 1 << 9 | 1 << TCP_LISTEN | 1 << 11;
/// States that a connection comes to by its own side's end: both of FIN wait, last ACK, and closing. Without an inode in
/// another state it waits for being accepted.
const CLOSING: u32 = 1 << 4 | 1 << 5 | 1 << 9 | 1 << 11;
/// Where `struct tcp_info` has the ms since data was last sent, and since some was last received.
const LAST_DATA_SENT: usize = 44;
const LAST_DATA_RECEIVED: usize = 52;

/// `struct inet_diag_sockid`, whose ports and addresses are in network order.
#[repr(C)]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
struct SocketId {
    source_port: [u8; 2],
    peer_port: [u8; 2],
    source: [u8; 16],
    peer: [u8; 16],
    interface: u32,
    cookie: [u32; 2],
}

/// `struct nlmsghdr` and `struct inet_diag_req_v2`.
#[repr(C)]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
struct Request {
    header: Header,
    family: u8,
    protocol: u8,
    extensions: u8,
    _pad: u8,
    states: u32,
    id: SocketId,
}

#[repr(C)]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
struct Header {
    length: u32,
    kind: u16,
    flags: u16,
    sequence: u32,
    port: u32,
}

/// `struct inet_diag_msg`.
#[repr(C)]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
struct Message {
    family: u8,
    state: u8,
    timer: u8,
    retransmits: u8,
    id: SocketId,
    expires: u32,
    receive_queue: u32,
    send_queue: u32,
    uid: u32,
    inode: u32,
}

/// What is asked for in a list.
#[derive(Clone, Copy)]
struct Query {
    family: libc::c_int,
    protocol: libc::c_int,
    states: u32,
    /// The sockets' own port; 0 for any.
    port: u16,
    /// Attributes, one bit each, that are not sent unless asked for.
    extensions: u8,
}

/// A way to ask for the lists of the network namespace in which it was opened.
pub struct SocketLists {
    socket: OwnedFd,
    /// Number of the last request: what an earlier one left unread must not be taken for an answer.
    requests: Cell<u32>,
}

impl SocketLists {
    /// Opens a way to the lists of the calling thread's network namespace.
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

    /// Cookie of the network namespace: what the kernel programs write into flow records.
    ///
    /// # Errors
    /// Before Linux 5.14, which does not tell.
    pub fn namespace(&self) -> io::Result<u64> {
        const SO_NETNS_COOKIE: libc::c_int = 71;
        let mut cookie = 0u64;
        let mut length = libc::socklen_t::try_from(size_of::<u64>()).map_err(io::Error::other)?;
        // SAFETY: the option's value is 64 bits wide, and that much room is given.
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

    /// The TCP sockets of the namespace, all of them.
    ///
    /// # Errors
    /// If the kernel refuses, or could not list them completely.
    pub fn tcp(&self) -> io::Result<Vec<SocketEntry>> {
        let mut sockets = Vec::new();
        self.each_tcp(|socket| sockets.push(socket))?;
        Ok(sockets)
    }

    /// Shows the TCP sockets of the namespace one by one: they may be a million.
    ///
    /// # Errors
    /// If the kernel refuses, or could not list them completely.
    pub fn each_tcp(&self, mut each: impl FnMut(SocketEntry)) -> io::Result<()> {
        for family in [libc::AF_INET, libc::AF_INET6] {
            let query = Query { family, protocol: libc::IPPROTO_TCP, states: STATES, port: 0, extensions: 0 };
            self.dump(query, &mut each)?;
        }
        Ok(())
    }

    /// Shows the TCP sockets of the namespace whose own port is this, each with how long it has been idle, and connections
    /// whose handshake is not complete. The kernel picks them out, which reads its whole table of connections.
    ///
    /// # Errors
    /// If the kernel refuses, or could not list them completely.
    pub fn each_tcp_at(&self, port: u16, mut each: impl FnMut(SocketEntry)) -> io::Result<()> {
        for family in [libc::AF_INET, libc::AF_INET6] {
            let states = STATES | 1 << TCP_NEW_SYN_RECV;
            let extensions = 1 << (INET_DIAG_INFO - 1);
            self.dump(Query { family, protocol: libc::IPPROTO_TCP, states, port, extensions }, &mut each)?;
        }
        Ok(())
    }

    /// Shows the UDP sockets of the namespace one by one.
    ///
    /// # Errors
    /// If the kernel refuses, has no such list (`CONFIG_INET_UDP_DIAG`), or could not list them completely.
    pub fn each_udp(&self, mut each: impl FnMut(SocketEntry)) -> io::Result<()> {
        /// Connected or not.
        const ANY: u32 = u32::MAX;
        for family in [libc::AF_INET, libc::AF_INET6] {
            let query = Query { family, protocol: libc::IPPROTO_UDP, states: ANY, port: 0, extensions: 0 };
            self.dump(query, &mut each)?;
        }
        Ok(())
    }

    fn dump(&self, query: Query, each: &mut impl FnMut(SocketEntry)) -> io::Result<()> {
        /// The kernel fills at most this much at once (NLMSG_GOODSIZE is 8 KiB; larger for those who read more).
        const BUFFER: usize = 32 << 10;
        let sequence = self.requests.get().wrapping_add(1);
        self.requests.set(sequence);
        let request = Request {
            header: Header {
                length: u32::try_from(size_of::<Request>()).map_err(io::Error::other)?,
                kind: SOCK_DIAG_BY_FAMILY,
                flags: DUMP,
                sequence,
                port: 0,
            },
            family: u8::try_from(query.family).map_err(io::Error::other)?,
            protocol: u8::try_from(query.protocol).map_err(io::Error::other)?,
            extensions: query.extensions,
            _pad: 0,
            states: query.states,
            id: SocketId { source_port: query.port.to_be_bytes(), ..bytemuck::Zeroable::zeroed() },
        };
        rustix::net::send(&self.socket, bytemuck::bytes_of(&request), SendFlags::empty())?;
        let mut buffer = vec![0; BUFFER];
        // Bound: the kernel ends a dump with a message that says so, or with an error.
        loop {
            let (length, _) = rustix::net::recv(&self.socket, buffer.as_mut_slice(), RecvFlags::empty())?;
            if read_datagram(&buffer[..length], sequence, each)? {
                return Ok(());
            }
        }
    }
}

/// Reads one datagram of messages. Returns whether the dump ended with it.
fn read_datagram(datagram: &[u8], sequence: u32, each: &mut impl FnMut(SocketEntry)) -> io::Result<bool> {
    let cut = || io::Error::new(io::ErrorKind::InvalidData, "the kernel's list of sockets is cut off");
    let mut rest = datagram;
    // Bound: each message is at least a header long.
    while !rest.is_empty() {
        let header: Header = prefix(rest).ok_or_else(cut)?;
        let length = header.length as usize;
        let body = rest.get(size_of::<Header>()..length).ok_or_else(cut)?;
        rest = rest.get(aligned(length)..).unwrap_or_default();
        // What an earlier request left unread.
        if header.sequence != sequence {
            continue;
        }
        if header.flags & INTERRUPTED != 0 {
            return Err(io::Error::new(
                io::ErrorKind::Interrupted,
                "the list of sockets changed while it was read",
            ));
        }
        match header.kind {
            NLMSG_DONE | NLMSG_ERROR => {
                // Both carry a negated errno; zero is none.
                let error: i32 = prefix(body).unwrap_or_default();
                return if error == 0 { Ok(true) } else { Err(io::Error::from_raw_os_error(-error)) };
            }
            _ => each(read_socket(body).ok_or_else(cut)?),
        }
    }
    Ok(false)
}

fn read_socket(body: &[u8]) -> Option<SocketEntry> {
    let message: Message = prefix(body)?;
    let [low, high] = message.id.cookie;
    let attributes = body.get(aligned(size_of::<Message>())..).unwrap_or_default();
    let address = |bytes: [u8; 16], port| {
        let address = if i32::from(message.family) == libc::AF_INET {
            let [a, b, c, d, ..] = bytes;
            IpAddr::V4(Ipv4Addr::new(a, b, c, d))
        } else {
            IpAddr::V6(Ipv6Addr::from(bytes)).to_canonical()
        };
        SocketAddr::new(address, u16::from_be_bytes(port))
    };
    Some(SocketEntry {
        cookie: u64::from(high) << 32 | u64::from(low),
        inode: message.inode,
        listens: message.state == TCP_LISTEN,
        local: address(message.id.source, message.id.source_port),
        is_closed: message.inode == 0 && CLOSING >> message.state & 1 == 1,
        queued: u64::from(message.receive_queue) + u64::from(message.send_queue),
        idle: attribute(attributes, INET_DIAG_INFO).and_then(idle),
        cgroup: attribute(attributes, INET_DIAG_CGROUP_ID).and_then(prefix),
        peer: address(message.id.peer, message.id.peer_port),
        is_mptcp: attribute(attributes, INET_DIAG_ULP_INFO)
            .and_then(|protocol| attribute(protocol, INET_ULP_INFO_NAME))
            .is_some_and(|name| name.starts_with(b"mptcp\0")),
    })
}

/// How long ago data came or went, whichever was later.
fn idle(tcp_info: &[u8]) -> Option<Duration> {
    let ms = |at: usize| prefix::<u32>(tcp_info.get(at..)?);
    Some(Duration::from_millis(ms(LAST_DATA_SENT)?.min(ms(LAST_DATA_RECEIVED)?).into()))
}

/// The value of an attribute in a list of them: length and kind of 16 bits each, then the value.
fn attribute(mut attributes: &[u8], wanted: u16) -> Option<&[u8]> {
    // Bound: each attribute is at least its header long.
    loop {
        let [length, kind]: [u16; 2] = prefix(attributes)?;
        let value = attributes.get(4..usize::from(length))?;
        if kind == wanted {
            return Some(value);
        }
        attributes = attributes.get(aligned(usize::from(length))..)?;
    }
}

fn prefix<T: bytemuck::Pod>(bytes: &[u8]) -> Option<T> {
    bytes.get(..size_of::<T>()).map(bytemuck::pod_read_unaligned)
}

/// Messages and attributes begin at multiples of four.
fn aligned(length: usize) -> usize {
    length.next_multiple_of(4)
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::net::{TcpListener, TcpStream};
    use std::os::unix::fs::MetadataExt;

    fn cookie(socket: impl AsFd) -> u64 {
        rustix::net::sockopt::socket_cookie(socket).unwrap()
    }

    #[test]
    fn the_kernel_lists_what_is_connected_and_nothing_else() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let idle =
            rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).expect("a socket in no list");
        let sockets = SocketLists::open().unwrap().tcp().unwrap();
        let find = |cookie: u64| sockets.iter().find(|socket| socket.cookie == cookie);
        let seen = find(cookie(&stream)).expect("connected");
        assert_eq!(seen.peer, listener.local_addr().unwrap());
        assert!(!seen.listens && find(cookie(&listener)).expect("listening").listens);
        assert_eq!(find(cookie(&idle)), None);
        let path = format!("/proc/self/fd/{}", stream.as_fd().as_raw_fd());
        assert_eq!(u64::from(seen.inode), std::fs::metadata(path).unwrap().ino());
    }

    #[test]
    fn what_is_at_a_port_is_shown_with_its_queue_and_how_long_it_is_idle() {
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
        let seen = find(cookie(&stream)).expect("the accepted one");
        assert_eq!((seen.local, seen.queued), (local, 7));
        assert!(seen.idle.expect("told of a connection") < Duration::from_mins(1));
        assert!(!seen.is_closed);
        assert!(find(cookie(&listener)).expect("it listens").listens);
        // Their own port is another one.
        assert_eq!(find(cookie(&client)), None);
        assert_eq!(find(cookie(&other)), None);
    }

    #[test]
    fn the_later_of_both_directions_tells_how_long_a_connection_is_idle() {
        let mut tcp_info = [0; 104];
        tcp_info[LAST_DATA_SENT..][..4].copy_from_slice(&7000u32.to_ne_bytes());
        tcp_info[LAST_DATA_RECEIVED..][..4].copy_from_slice(&3000u32.to_ne_bytes());
        assert_eq!(idle(&tcp_info), Some(Duration::from_secs(3)));
        assert_eq!(idle(&tcp_info[..LAST_DATA_RECEIVED]), None);
    }

    #[test]
    fn the_kernel_lists_datagram_sockets_with_a_port() {
        let open = || std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let (bound, connected, stream) = (open(), open(), TcpListener::bind("127.0.0.1:0").unwrap());
        connected.connect(bound.local_addr().unwrap()).unwrap();
        let idle = rustix::net::socket(AddressFamily::INET, SocketType::DGRAM, None).unwrap();
        let mut sockets = Vec::new();
        SocketLists::open().unwrap().each_udp(|socket| sockets.push(socket)).unwrap();
        let is_seen = |cookie: u64| sockets.iter().any(|socket| socket.cookie == cookie);
        assert!(is_seen(cookie(&bound)) && is_seen(cookie(&connected)));
        assert!(!is_seen(cookie(&idle)) && !is_seen(cookie(&stream)));
    }

    #[test]
    fn an_error_ends_a_dump_and_a_cut_message_is_one() {
        let header = |length: u32, kind| Header { length, kind, flags: 0, sequence: 2, port: 0 };
        let message = |kind, body: &[u8]| {
            let length = u32::try_from(size_of::<Header>() + body.len()).unwrap();
            [bytemuck::bytes_of(&header(length, kind)), body].concat()
        };
        let read =
            |datagram: &[u8]| read_datagram(datagram, 2, &mut |_| {}).map_err(|error| error.raw_os_error());
        assert_eq!(read(&message(NLMSG_DONE, &0i32.to_ne_bytes())), Ok(true));
        assert_eq!(read(&message(NLMSG_ERROR, &(-2i32).to_ne_bytes())), Err(Some(2)));
        assert_eq!(read(&message(SOCK_DIAG_BY_FAMILY, &[0; 8])), Err(None));
        assert_eq!(read(&message(NLMSG_DONE, &[])[..12]), Err(None));
        let interrupted = Header { flags: INTERRUPTED, ..header(20, NLMSG_DONE) };
        assert_eq!(read(&[bytemuck::bytes_of(&interrupted), &[0; 4]].concat()), Err(None));
        let other = Header { sequence: 10, ..header(20, NLMSG_DONE) };
        assert_eq!(read(&[bytemuck::bytes_of(&other), &[0; 4]].concat()), Ok(false));
    }
}
