//! The probe's unusual ways to dial: through io_uring, with data in the SYN, with a delayed SYN,
//! with a limit of SYN retransmissions, and by the kernel itself. It also reads the kernel's state
//! of such a socket.

use std::ffi::CString;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::mount::MountFlags;
use rustix::net::{RecvFlags, SendFlags, SocketFlags, sockopt};
use stage::protocol::{Family, Oddity, SocketId};

use crate::streams::{self, start};
use crate::{Outcome, Probe, errno};

/// `MSG_FASTOPEN`, which rustix does not name.
const FASTOPEN: SendFlags = SendFlags::from_bits_retain(0x2000_0000);

impl Probe {
    pub fn dial_by_ring(&mut self, address: SocketAddr) -> Outcome<SocketId> {
        let socket = streams::socket(Family::of(address), SocketFlags::CLOEXEC)?;
        connect_by_ring(&socket, address)?;
        Ok(self.register(socket))
    }

    pub fn dial_fast_open(&mut self, address: SocketAddr) -> Outcome<SocketId> {
        let socket = streams::socket(Family::of(address), SocketFlags::CLOEXEC)?;
        rustix::net::sendto(&socket, b"!", FASTOPEN, &address)?;
        Ok(self.register(socket))
    }

    pub fn dial_deferred(&mut self, address: SocketAddr) -> Outcome<SocketId> {
        let socket = streams::socket(Family::of(address), SocketFlags::CLOEXEC)?;
        set(&socket, libc::TCP_FASTOPEN_CONNECT, 1)?;
        rustix::net::connect(&socket, &address)?;
        Ok(self.register(socket))
    }

    pub fn start_connect_with_retries(&mut self, address: SocketAddr, retries: u32) -> Outcome<SocketId> {
        let socket = streams::socket(Family::of(address), SocketFlags::NONBLOCK)?;
        set(&socket, libc::TCP_SYNCNT, i32::try_from(retries).map_err(|_| Errno::INVAL)?)?;
        start(&socket, address)?;
        Ok(self.register(socket))
    }

    pub fn connect_oddly(&mut self, address: SocketAddr, oddity: Oddity) -> Outcome<SocketId> {
        let socket = streams::socket(Family::of(address), SocketFlags::CLOEXEC)?;
        match oddity {
            Oddity::Device => {
                set_at(&socket, libc::SOL_SOCKET, libc::SO_BINDTODEVICE, c"lo".to_bytes_with_nul())?;
            }
            Oddity::Mark => set_at(&socket, libc::SOL_SOCKET, libc::SO_MARK, &7i32.to_ne_bytes())?,
            Oddity::Source => {
                let source: SocketAddr = (std::net::Ipv4Addr::new(127, 0, 0, 9), 0).into();
                rustix::net::bind(&socket, &source)?;
            }
            Oddity::DontRoute => set_at(&socket, libc::SOL_SOCKET, libc::SO_DONTROUTE, &1i32.to_ne_bytes())?,
            Oddity::Ttl => set_at(&socket, libc::IPPROTO_IP, libc::IP_TTL, &64i32.to_ne_bytes())?,
        }
        rustix::net::connect(&socket, &address)?;
        Ok(self.register(socket))
    }

    pub fn connect_from(&mut self, source: SocketAddr, address: SocketAddr) -> Outcome<SocketId> {
        let socket = streams::socket(Family::of(address), SocketFlags::CLOEXEC)?;
        rustix::net::bind(&socket, &source)?;
        rustix::net::connect(&socket, &address)?;
        Ok(self.register(socket))
    }

    pub fn write(&self, socket: SocketId) -> Outcome<()> {
        /// The time limit for a connect. An emulated guest needs time to answer its own SYN.
        const PATIENCE: Timespec = Timespec { tv_sec: 10, tv_nsec: 0 };
        let socket = self.socket(socket)?;
        poll(&mut [PollFd::new(&socket, PollFlags::OUT)], Some(&PATIENCE))?;
        rustix::io::write(socket, b"!").map(drop)
    }

    pub fn syn_retries(&self, socket: SocketId) -> Outcome<u32> {
        Ok(get(self.socket(socket)?, libc::TCP_SYNCNT)?.cast_unsigned())
    }

    /// Reads the first word of `struct tcp_info`: the TCP state, the state of congestion control,
    /// the number of retransmissions, and the number of probes.
    pub fn retransmissions(&self, socket: SocketId) -> Outcome<u8> {
        Ok(get(self.socket(socket)?, libc::TCP_INFO)?.to_ne_bytes()[2])
    }

    pub fn take_error(&self, socket: SocketId) -> Outcome<Option<i32>> {
        let error = sockopt::socket_error(self.socket(socket)?)?;
        Ok(error.err().map(Errno::raw_os_error))
    }

    pub fn take_queued_error(&self, socket: SocketId) -> Outcome<bool> {
        match rustix::net::recv(self.socket(socket)?, &mut [0; 64], RecvFlags::ERRQUEUE | RecvFlags::DONTWAIT)
        {
            Ok(_) => Ok(true),
            Err(Errno::AGAIN) => Ok(false),
            Err(error) => Err(error),
        }
    }
}

/// Makes the kernel dial a file server, by mounting its share.
pub fn mount_share(address: SocketAddr, folder: &Path) -> Outcome<()> {
    let (ip, port) = (address.ip(), address.port());
    let options = format!("ip={ip},port={port},vers=3.0,sec=none,unc=\\\\{ip}\\share");
    let options = CString::new(options).map_err(|_| Errno::INVAL)?;
    let source = format!("//{ip}/share");
    rustix::mount::mount(source, folder, "cifs", MountFlags::empty(), options.as_c_str())
}

fn set(socket: &OwnedFd, option: libc::c_int, value: libc::c_int) -> Outcome<()> {
    set_at(socket, libc::IPPROTO_TCP, option, &value.to_ne_bytes())
}

fn set_at(socket: &OwnedFd, level: libc::c_int, option: libc::c_int, value: &[u8]) -> Outcome<()> {
    let length = libc::socklen_t::try_from(value.len()).map_err(|_| Errno::INVAL)?;
    // SAFETY: the value outlives the call and has the length that is passed.
    let result =
        unsafe { libc::setsockopt(socket.as_raw_fd(), level, option, value.as_ptr().cast(), length) };
    if result == 0 { Ok(()) } else { Err(errno(std::io::Error::last_os_error())) }
}

fn get(socket: &OwnedFd, option: libc::c_int) -> Outcome<libc::c_int> {
    let (mut value, mut length) = (0, SIZE_OF_INT);
    // SAFETY: `value` and `length` outlive the call, and the kernel writes at most `length` bytes.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            option,
            (&raw mut value).cast(),
            &raw mut length,
        )
    };
    if result == 0 { Ok(value) } else { Err(errno(std::io::Error::last_os_error())) }
}

/// The size of `c_int`, as a length in socket calls.
const SIZE_OF_INT: libc::socklen_t = 4;

/// Connects through a request in a ring, and waits for its completion. IPv4 only.
fn connect_by_ring(socket: &OwnedFd, address: SocketAddr) -> Outcome<()> {
    let SocketAddr::V4(address) = address else { return Err(Errno::AFNOSUPPORT) };
    let sockaddr = libc::sockaddr_in {
        sin_family: libc::sa_family_t::try_from(libc::AF_INET).expect("the family fits into 16 bits"),
        sin_port: address.port().to_be(),
        sin_addr: libc::in_addr { s_addr: address.ip().to_bits().to_be() },
        sin_zero: [0; 8],
    };
    let mut ring = io_uring::IoUring::new(2).map_err(errno)?;
    let length = libc::socklen_t::try_from(size_of::<libc::sockaddr_in>()).expect("the structure is small");
    let fd = io_uring::types::Fd(socket.as_raw_fd());
    let connect = io_uring::opcode::Connect::new(fd, (&raw const sockaddr).cast(), length).build();
    // SAFETY: the socket and the address outlive the request, because this function waits for its
    // completion.
    unsafe { ring.submission().push(&connect) }.expect("a ring of two has room for one request");
    ring.submit_and_wait(1).map_err(errno)?;
    let completion = ring.completion().next().expect("the request has completed");
    match completion.result() {
        0 => Ok(()),
        error => Err(Errno::from_raw_os_error(-error)),
    }
}
