//! A worker's netlink requests to the kernel: to destroy a socket, and to make a network
//! unreachable.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::AsFd;

use anyhow::{Context, Result, bail};
use rustix::io::Errno;
use rustix::net::netlink::SOCK_DIAG;
use rustix::net::{AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType};

const HEADER: usize = 16;

/// Sends one message and waits for the kernel's answer. Without a protocol, the message is sent
/// with the routing protocol.
fn request(protocol: Option<Protocol>, kind: u16, flags: i32, body: &[u8]) -> Result<()> {
    let socket =
        rustix::net::socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, protocol)?;
    let length = u32::try_from(HEADER + body.len())?;
    let flags = u16::try_from(libc::NLM_F_REQUEST | libc::NLM_F_ACK | flags)?;
    let mut message = Vec::with_capacity(HEADER + body.len());
    message.extend(length.to_ne_bytes());
    message.extend(kind.to_ne_bytes());
    message.extend(flags.to_ne_bytes());
    // The sequence number and the port id are zero, because the socket sends only this message.
    message.extend([0; 8]);
    message.extend(body);
    rustix::net::send(&socket, &message, SendFlags::empty())?;
    let mut answer = [0; 512];
    let (length, _) = rustix::net::recv(&socket, &mut answer, RecvFlags::empty())?;
    let word = |at: usize| answer.get(at..at + 4).and_then(|bytes| bytes.try_into().ok());
    let kind = u16::from_ne_bytes([answer[4], answer[5]]);
    if length < HEADER + 4 || i32::from(kind) != libc::NLMSG_ERROR {
        bail!("netlink answers with a message of kind {kind}");
    }
    match i32::from_ne_bytes(word(HEADER).context("the netlink answer is too short")?) {
        0 => Ok(()),
        error => Err(Errno::from_raw_os_error(-error).into()),
    }
}

/// Destroys a TCP socket as an administrator does.
pub fn destroy(socket: impl AsFd, backend: SocketAddr) -> Result<()> {
    const SOCK_DESTROY: u16 = 21;
    let own = SocketAddr::try_from(rustix::net::getsockname(&socket)?)?;
    let cookie = rustix::net::sockopt::socket_cookie(&socket)?;
    let (IpAddr::V4(from), IpAddr::V4(to)) = (own.ip(), backend.ip()) else {
        bail!("the socket is not an IPv4 socket")
    };
    let wide = |address: Ipv4Addr| {
        let mut bytes = [0; 16];
        bytes[..4].copy_from_slice(&address.octets());
        bytes
    };
    // struct inet_diag_req_v2: family, protocol, two unused bytes, all states, and the socket's id.
    let mut body = vec![u8::try_from(libc::AF_INET)?, u8::try_from(libc::IPPROTO_TCP)?, 0, 0];
    body.extend(u32::MAX.to_ne_bytes());
    body.extend(own.port().to_be_bytes());
    body.extend(backend.port().to_be_bytes());
    body.extend(wide(from));
    body.extend(wide(to));
    body.extend(0u32.to_ne_bytes());
    // The low half comes first; each half is in the host's byte order.
    body.extend(u32::try_from(cookie & u64::from(u32::MAX))?.to_ne_bytes());
    body.extend(u32::try_from(cookie >> 32)?.to_ne_bytes());
    request(Some(SOCK_DIAG), SOCK_DESTROY, 0, &body).context("destroy a socket")
}

/// Makes a network with a prefix of 24 bits unreachable: `kind` is `RTN_UNREACHABLE` or another
/// type that refuses.
pub fn refuse_network(network: Ipv4Addr, kind: u8) -> Result<()> {
    const RTA_DST: u16 = 1;
    // struct rtmsg: family, length of the destination, of the source, type of service, table,
    // origin, scope, kind.
    let mut body =
        vec![u8::try_from(libc::AF_INET)?, 24, 0, 0, libc::RT_TABLE_MAIN, libc::RTPROT_STATIC, 0, kind];
    body.extend(0u32.to_ne_bytes());
    body.extend(8u16.to_ne_bytes());
    body.extend(RTA_DST.to_ne_bytes());
    body.extend(network.octets());
    request(None, libc::RTM_NEWROUTE, libc::NLM_F_CREATE | libc::NLM_F_EXCL, &body)
        .with_context(|| format!("refuse {network}"))
}
