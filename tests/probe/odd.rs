//! The probe's odd ways to dial.
//!
//! Requests: `uring ADDRESS` (a connect through io_uring), `fastopen ADDRESS` (a connect that is a write, with data in the SYN
//! once the peer has given a cookie), `deferred ADDRESS` (a connect that is put off until the first write, once there is a
//! cookie), `write SOCKET`, `name SOCKET` (reads the backend's name), `syncnt SOCKET` (how often its SYN is sent again),
//! `retransmits SOCKET` (how often its SYN was), `error SOCKET` (takes its error off),
//! `relisten SOCKET ADDRESS` (lets a socket that was connected listen),
//! `patient SYNCNT ADDRESS` (as `start`, with that number set before), `mount ADDRESS FOLDER` (has the kernel dial a file
//! server there).

use std::net::SocketAddr;
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{SendFlags, SocketFlags};

use crate::{Probe, number, outcome, parse, read_name, stream};

/// Answers a request about odd ways; `None` if it is about something else.
pub fn answer(probe: &mut Probe, words: &[&str]) -> Option<String> {
    Some(match words {
        ["uring", address] => {
            let address = parse(address);
            let socket = stream(address, SocketFlags::CLOEXEC);
            let result = through_a_ring(&socket, address);
            told(probe, socket, result)
        }
        ["fastopen", address] => {
            let address = parse(address);
            let socket = stream(address, SocketFlags::CLOEXEC);
            let result = rustix::net::sendto(&socket, b"!", SendFlags::from_bits_retain(FASTOPEN), &address);
            told(probe, socket, result.map(drop))
        }
        ["deferred", address] => {
            let address = parse(address);
            let socket = stream(address, SocketFlags::CLOEXEC);
            let result = set(&socket, libc::TCP_FASTOPEN_CONNECT, 1)
                .and_then(|()| rustix::net::connect(&socket, &address));
            told(probe, socket, result)
        }
        ["write", socket] => outcome(rustix::io::write(&probe.sockets[&number(socket)], b"!").map(drop)),
        ["name", socket] => match read_name(&probe.sockets[&number(socket)]) {
            Ok(name) => format!("ok {name}"),
            Err(errno) => format!("err {}", errno.raw_os_error()),
        },
        ["syncnt", socket] => match get(&probe.sockets[&number(socket)], libc::TCP_SYNCNT) {
            Ok(count) => format!("ok {count}"),
            Err(errno) => format!("err {}", errno.raw_os_error()),
        },
        // The first word of `struct tcp_info`: state, state of congestion control, retransmissions, probes.
        ["retransmits", socket] => match get(&probe.sockets[&number(socket)], libc::TCP_INFO) {
            Ok(word) => format!("ok {}", word.to_ne_bytes()[2]),
            Err(errno) => format!("err {}", errno.raw_os_error()),
        },
        ["relisten", socket, address] => {
            let socket = &probe.sockets[&number(socket)];
            let bound = rustix::net::bind(socket, &parse(address));
            outcome(bound.and_then(|()| rustix::net::listen(socket, 16)))
        }
        ["error", socket] => match rustix::net::sockopt::socket_error(&probe.sockets[&number(socket)]) {
            Ok(error) => format!("ok {}", error.err().map_or(0, Errno::raw_os_error)),
            Err(errno) => format!("err {}", errno.raw_os_error()),
        },
        ["patient", count, address] => {
            let address = parse(address);
            let socket = stream(address, SocketFlags::NONBLOCK);
            set(&socket, libc::TCP_SYNCNT, number(count)).expect("a number of SYNs");
            let result = match rustix::net::connect(&socket, &address) {
                Err(Errno::INPROGRESS) => Ok(()),
                other => other,
            };
            told(probe, socket, result)
        }
        ["mount", address, folder] => {
            let address = parse(address);
            let (ip, port) = (address.ip(), address.port());
            let options = format!("ip={ip},port={port},vers=3.0,sec=none,unc=\\\\{ip}\\share");
            let options = std::ffi::CString::new(options).expect("no zero in it");
            let flags = rustix::mount::MountFlags::empty();
            let source = format!("//{ip}/share");
            outcome(rustix::mount::mount(source, *folder, "cifs", flags, options.as_c_str()))
        }
        _ => return None,
    })
}

/// `MSG_FASTOPEN`, which rustix does not name.
const FASTOPEN: u32 = 0x2000_0000;

fn told(probe: &mut Probe, socket: OwnedFd, result: Result<(), Errno>) -> String {
    let socket = probe.keep(socket);
    match result {
        Ok(()) => format!("ok {socket}"),
        Err(errno) => format!("err {socket} {}", errno.raw_os_error()),
    }
}

fn set(socket: &OwnedFd, option: libc::c_int, value: libc::c_int) -> Result<(), Errno> {
    // SAFETY: the value outlives the call and is as long as is said.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            option,
            (&raw const value).cast(),
            size_of_u32(),
        )
    };
    if result == 0 { Ok(()) } else { Err(last()) }
}

fn get(socket: &OwnedFd, option: libc::c_int) -> Result<libc::c_int, Errno> {
    let (mut value, mut length) = (0, size_of_u32());
    // SAFETY: both outlive the call; the kernel writes at most as many bytes as the length says.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            option,
            (&raw mut value).cast(),
            &raw mut length,
        )
    };
    if result == 0 { Ok(value) } else { Err(last()) }
}

fn size_of_u32() -> libc::socklen_t {
    4
}

fn last() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).expect("an errno")
}

/// Connects by a request in a ring, and waits for its completion.
fn through_a_ring(socket: &OwnedFd, address: SocketAddr) -> Result<(), Errno> {
    let SocketAddr::V4(address) = address else { panic!("only IPv4 is dialled through a ring") };
    let sockaddr = libc::sockaddr_in {
        sin_family: libc::sa_family_t::try_from(libc::AF_INET).expect("16 bits"),
        sin_port: address.port().to_be(),
        sin_addr: libc::in_addr { s_addr: address.ip().to_bits().to_be() },
        sin_zero: [0; 8],
    };
    let mut ring = io_uring::IoUring::new(2).expect("a ring");
    let length = libc::socklen_t::try_from(size_of::<libc::sockaddr_in>()).expect("a small structure");
    let fd = io_uring::types::Fd(socket.as_raw_fd());
    let connect = io_uring::opcode::Connect::new(fd, (&raw const sockaddr).cast(), length).build();
    // SAFETY: the socket and the address outlive the request, whose completion is waited for.
    unsafe { ring.submission().push(&connect) }.expect("room for one request");
    ring.submit_and_wait(1).expect("submit it");
    let completion = ring.completion().next().expect("it completed");
    match completion.result() {
        0 => Ok(()),
        error => Err(Errno::from_raw_os_error(-error)),
    }
}
