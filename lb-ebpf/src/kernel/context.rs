//! The contexts of programs for calls and for released sockets. Only this module and `sock_ops`
//! read and write the kernel's context structures.
//!
//! The verifier rewrites each access of a context field by its exact offset and width. So accesses
//! are volatile, which prevents the compiler from combining adjacent ones.

use aya_ebpf::bindings::{BPF_SOCK_OPS_STATE_CB_FLAG, bpf_sock, bpf_sock_addr};
use aya_ebpf::helpers::generated as helper;
use aya_ebpf::programs::{SockAddrContext, SockContext};
use lb_common::ending::{SocketSnapshot, TCP_CLOSE, TCP_CLOSE_WAIT, TCP_ESTABLISHED, implies_established};
use lb_common::net::{Address, Be16, Be32, IPPROTO_TCP, IPPROTO_UDP};

use crate::globals::{
    FULL_ACCOUNTING, KERNEL_SOCKET, KERNEL_SOCKET_MASK, KNOWS_MPTCP, NAMESPACE_COOKIE,
    RELEASED_BYTES_RECEIVED, RELEASED_BYTES_SENT, RELEASED_CALLBACKS, RELEASED_RETRANSMITS, RELEASED_SK_ERR,
    RELEASED_SK_ERR_SOFT, RELEASED_SRTT, SOCKET_COOKIE, SOCKET_NAMESPACE, SYN_RETRIES, TCP_SOCK, can_cast,
};
use crate::kernel::cast::{cast, field};
use crate::kernel::socket::{is_ordinary, queued_error, read_at};

/// `IPPROTO_MPTCP`. An MPTCP socket dials TCP services, over TCP sockets that the kernel opens for
/// its paths; see [`Dial::opener`].
const MPTCP: u32 = 262;

/// The cookie of a context's socket; 0 if no cookie has been requested yet. Without [`can_cast`]
/// this call assigns a cookie.
///
/// # Safety
/// The helper for cookies must accept the context. `socket` must return the kernel's own structure
/// of the context's socket; it is called only with [`can_cast`].
#[inline(always)]
pub unsafe fn cookie_if_any<T>(context: *mut T, socket: impl FnOnce() -> *const u8) -> u64 {
    if can_cast() {
        // SAFETY: a socket's cookie is one word.
        unsafe { field(socket(), SOCKET_COOKIE.load()) }
    } else {
        // SAFETY: guaranteed by the caller.
        unsafe { helper::bpf_get_socket_cookie(context.cast()) }
    }
}

/// The context of a call with an address: the call's destination, or the peer that getpeername or
/// recvmsg is about to report.
pub struct Dial {
    ctx: *mut bpf_sock_addr,
    /// The kernel's own structure of the socket, if it was loaded at the beginning.
    socket: Option<*const u8>,
}

impl Dial {
    #[inline(always)]
    pub fn new(ctx: &SockAddrContext) -> Self {
        Self { ctx: ctx.sock_addr, socket: None }
    }

    /// Like [`Dial::new`], for programs that use the socket several times.
    #[inline(always)]
    pub fn with_socket(ctx: &SockAddrContext) -> Self {
        let dial = Self::new(ctx);
        let socket = if can_cast() { dial.socket() } else { core::ptr::null() };
        Self { socket: Some(socket), ..dial }
    }

    /// The kernel's own structure of the socket, as that of a TCP socket, which begins with the
    /// fields of every socket. Requires [`can_cast`].
    #[inline(always)]
    fn socket(&self) -> *const u8 {
        match self.socket {
            Some(socket) => socket,
            // SAFETY: the context and its socket are valid while the program runs.
            None => unsafe {
                cast((&raw const (*self.ctx).__bindgen_anon_1.sk).read_volatile(), TCP_SOCK.load())
            },
        }
    }

    /// The IPv4 address. Use it only in an IPv4 hook.
    #[inline(always)]
    pub fn ip4(&self) -> Be32 {
        // SAFETY: the context is valid while the program runs.
        Be32::from_network(unsafe { (&raw const (*self.ctx).user_ip4).read_volatile() })
    }

    /// The IPv6 address. Use it only in an IPv6 hook.
    #[inline(always)]
    pub fn ip6(&self) -> Address {
        // SAFETY: the context is valid while the program runs.
        let word = |i: usize| unsafe {
            Be32::from_network((&raw const (*self.ctx).user_ip6).cast::<u32>().add(i).read_volatile())
        };
        Address { words: [word(0), word(1), word(2), word(3)] }
    }

    #[inline(always)]
    pub fn port(&self) -> Be16 {
        // SAFETY: the context is valid while the program runs. The field has 32 bits and contains
        // 16.
        Be16::from_network(unsafe { (&raw const (*self.ctx).user_port).read_volatile() } as u16)
    }

    /// The IP protocol number of the services that the socket can dial; `None` if no service can
    /// have the socket's protocol.
    #[inline(always)]
    pub fn protocol(&self) -> Option<u8> {
        // SAFETY: the context is valid while the program runs.
        match unsafe { (&raw const (*self.ctx).protocol).read_volatile() } {
            MPTCP => Some(IPPROTO_TCP),
            protocol if protocol <= 0xff => Some(protocol as u8),
            _ => None,
        }
    }

    /// The socket's cookie: unique while the host is up, constant for the socket's whole life,
    /// never 0.
    #[inline(always)]
    pub fn cookie(&self) -> u64 {
        // SAFETY: the helper takes this context.
        unsafe { helper::bpf_get_socket_cookie(self.ctx.cast()) }
    }

    /// The same as [`Dial::cookie`], for sockets that usually have a cookie: loading it takes less
    /// time than the call.
    #[inline(always)]
    pub fn known_cookie(&self) -> u64 {
        if can_cast() {
            let cookie = self.cookie_if_any();
            if cookie != 0 {
                return cookie;
            }
        }
        self.cookie()
    }

    /// The socket's cookie; 0 if no cookie has been requested yet, in which case the socket has no
    /// record. (Without [`can_cast`] this call assigns a cookie.)
    #[inline(always)]
    pub fn cookie_if_any(&self) -> u64 {
        // SAFETY: the helper takes this context, and this is its socket.
        unsafe { cookie_if_any(self.ctx, || self.socket()) }
    }

    /// Cookie of the socket's network namespace.
    #[inline(always)]
    pub fn namespace(&self) -> u64 {
        if can_cast() {
            // SAFETY: a socket points to its namespace, whose cookie is one word.
            unsafe {
                let namespace: *const u8 = field(self.socket(), SOCKET_NAMESPACE.load());
                field(namespace, NAMESPACE_COOKIE.load())
            }
        } else {
            // SAFETY: the helper takes this context.
            unsafe { helper::bpf_get_netns_cookie(self.ctx.cast()) }
        }
    }

    /// Whether the socket is already connected.
    #[inline(always)]
    pub fn is_connected(&self) -> bool {
        // SAFETY: the context and its socket are valid while the program runs. Kernel fact: a
        // connected datagram socket has the state that TCP calls established.
        unsafe {
            let socket = (&raw const (*self.ctx).__bindgen_anon_1.sk).read_volatile();
            (&raw const (*socket).state).read_volatile() == TCP_ESTABLISHED
        }
    }

    /// The ID of the calling process. If the kernel makes the call later on behalf of a process,
    /// the result is the ID of that process.
    #[inline(always)]
    pub fn process(&self) -> u32 {
        // SAFETY: the helper has no arguments.
        (unsafe { helper::bpf_get_current_pid_tgid() } >> 32) as u32
    }

    /// Limits the retransmissions of the SYN to this number, unless the application has set a
    /// limit. Does nothing if the programs may not read the application's limit.
    #[inline(always)]
    pub fn set_syn_retries(&self, retries: u8) {
        /// `SOL_TCP`
        const LEVEL: i32 = 6;
        /// `TCP_SYNCNT`
        const OPTION: i32 = 7;
        let offset = SYN_RETRIES.load();
        if offset == 0 || retries == 0 {
            return;
        }
        if self.tcp_byte(offset) != Some(0) {
            return;
        }
        let mut value = i32::from(retries);
        // SAFETY: the helper takes this context and reads the four bytes of the value.
        unsafe { helper::bpf_setsockopt(self.ctx.cast(), LEVEL, OPTION, (&raw mut value).cast(), 4) };
    }

    /// A byte of the kernel's own structure of a TCP socket; `None` for any other socket.
    #[inline(always)]
    fn tcp_byte(&self, offset: u32) -> Option<u8> {
        if can_cast() {
            // SAFETY: a TCP socket, because callers pass no other.
            return Some(unsafe { field(self.socket(), offset) });
        }
        // SAFETY: the context and its socket are valid while the program runs. The helper returns a
        // pointer to the kernel's own structure or null, and the verifier checks the read against
        // the BTF of its type, from which the offset comes.
        unsafe {
            let socket = (&raw const (*self.ctx).__bindgen_anon_1.sk).read_volatile();
            let tcp = helper::bpf_skc_to_tcp_sock(socket.cast());
            if tcp.is_null() { None } else { Some(tcp.cast::<u8>().add(offset as usize).read_volatile()) }
        }
    }

    /// The owner of a TCP socket. If the programs cannot determine the owner, the result is
    /// [`Opener::Process`].
    #[inline(always)]
    pub fn opener(&self) -> Opener {
        let offset = KERNEL_SOCKET.load();
        if offset != 0 {
            let is_kernels = |byte| u32::from(byte) & KERNEL_SOCKET_MASK.load() != 0;
            if !self.tcp_byte(offset).is_some_and(is_kernels) {
                return Opener::Process;
            }
        }
        // SAFETY: the context and its socket are valid while the program runs. The helper returns a
        // pointer to the kernel's own structure or null.
        unsafe {
            let socket = (&raw const (*self.ctx).__bindgen_anon_1.sk).read_volatile();
            if KNOWS_MPTCP.load() != 0 && !helper::bpf_skc_to_mptcp_sock(socket.cast()).is_null() {
                return Opener::Mptcp;
            }
        }
        if offset != 0 { Opener::Kernel } else { Opener::Process }
    }

    /// Rewrites the IPv4 address and the port. Use it only in an IPv4 hook.
    #[inline(always)]
    pub fn redirect4(&self, ip: Be32, port: Be16) {
        // SAFETY: the context is valid while the program runs.
        unsafe { (&raw mut (*self.ctx).user_ip4).write_volatile(ip.to_network()) };
        self.set_port(port);
    }

    /// Rewrites the IPv6 address and the port. Use it only in an IPv6 hook.
    #[inline(always)]
    pub fn redirect6(&self, address: Address, port: Be16) {
        let [a, b, c, d] = address.words;
        // SAFETY: the context is valid while the program runs.
        unsafe {
            let words = (&raw mut (*self.ctx).user_ip6).cast::<u32>();
            words.write_volatile(a.to_network());
            words.add(1).write_volatile(b.to_network());
            words.add(2).write_volatile(c.to_network());
            words.add(3).write_volatile(d.to_network());
        }
        self.set_port(port);
    }

    #[inline(always)]
    fn set_port(&self, port: Be16) {
        // SAFETY: the context is valid while the program runs.
        unsafe { (&raw mut (*self.ctx).user_port).write_volatile(u32::from(port.to_network())) };
    }

    /// Makes the call fail with `errno` instead of EPERM when the program returns 0. Requires the
    /// helper `bpf_set_retval`.
    #[inline(always)]
    pub fn set_errno(&self, errno: u32) {
        // Linux 7.2 requires that all 64 bits of the argument's register are 0 or a negative errno.
        // The binding's `int` leaves the upper half of the register zero, so the number becomes a
        // large positive one.
        const BPF_FUNC_SET_RETVAL: usize = 187;
        const MAX_ERRNO: u32 = 4095;
        // SAFETY: the number of a helper is its address in a program, and this helper takes and
        // returns a number.
        let set_retval: unsafe extern "C" fn(i64) -> i64 =
            unsafe { core::mem::transmute(BPF_FUNC_SET_RETVAL) };
        // SAFETY: no pointer is passed.
        unsafe { set_retval(-i64::from(errno & MAX_ERRNO)) };
    }
}

/// The owner of a socket.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Opener {
    Process,
    /// The kernel, on behalf of a process's MPTCP socket. No program detects the end of such a
    /// socket: the hook of release runs only for the MPTCP socket, which has another cookie.
    Mptcp,
    /// The kernel itself, for example for a file system that a process mounts. Its connects are not
    /// balanced, because the kernel cannot handle a refused connect as a process can, and because
    /// its connections do not belong to the process.
    Kernel,
}

/// A socket that is being released.
pub struct Socket {
    ctx: *mut bpf_sock,
}

impl Socket {
    #[inline(always)]
    pub fn new(ctx: &SockContext) -> Self {
        Self { ctx: ctx.sock }
    }

    /// Like [`Dial::cookie_if_any`].
    #[inline(always)]
    pub fn cookie_if_any(&self) -> u64 {
        // SAFETY: the helper takes this context. The kernel's own structure is the socket itself:
        // the cookie has the same offset in every type of socket as in a TCP socket.
        unsafe { cookie_if_any(self.ctx, || cast(self.ctx.cast_const(), TCP_SOCK.load())) }
    }

    /// Whether the socket is connected. If false, its peer's address may be missing, or may be the
    /// address of an earlier connection.
    #[inline(always)]
    pub fn is_connected(&self) -> bool {
        let state = self.state();
        state == TCP_ESTABLISHED || state == TCP_CLOSE_WAIT
    }

    /// Whether it is a UDP socket.
    #[inline(always)]
    pub fn is_udp(&self) -> bool {
        self.protocol() == u32::from(IPPROTO_UDP)
    }

    /// Whether it is a TCP socket.
    #[inline(always)]
    pub fn is_tcp(&self) -> bool {
        self.protocol() == u32::from(IPPROTO_TCP)
    }

    #[inline(always)]
    fn protocol(&self) -> u32 {
        // SAFETY: the context is valid while the program runs.
        unsafe { (&raw const (*self.ctx).protocol).read_volatile() }
    }

    /// Whether the socket's connection has ended or has never begun.
    #[inline(always)]
    pub fn is_closed(&self) -> bool {
        self.state() == TCP_CLOSE
    }

    #[inline(always)]
    fn state(&self) -> u32 {
        // SAFETY: the context is valid while the program runs.
        unsafe { (&raw const (*self.ctx).state).read_volatile() }
    }

    /// The final state of a TCP socket. Without [`can_cast`] each read of the kernel's memory is a
    /// call that takes about 30 ns. Therefore only closed sockets are read: a socket in another
    /// state has no error, and its state shows whether it was established. A closed socket was
    /// established if it has a smoothed round-trip time.
    #[inline(always)]
    pub fn snapshot(&self) -> SocketSnapshot {
        let state = self.state();
        let is_readable = RELEASED_SK_ERR.load() != 0;
        let mut snapshot =
            SocketSnapshot { is_readable, state, error: 0, was_established: implies_established(state) };
        if is_readable && state == TCP_CLOSE {
            snapshot.error = self.read::<u32>(RELEASED_SK_ERR.load());
            snapshot.was_established = self.read::<u32>(RELEASED_SRTT.load()) != 0;
        }
        snapshot
    }

    /// Whether the kernel still reports events of the socket's state changes, which the TCP program
    /// requested when the SYN was sent. Kernel fact: a socket has one set of such requests, and any
    /// program for TCP events that stores its own set removes the requests of the others. If the
    /// set cannot be read, the result is `true`.
    #[inline(always)]
    pub fn announces_states(&self) -> bool {
        let offset = RELEASED_CALLBACKS.load();
        offset == 0 || u32::from(self.read::<u8>(offset)) & BPF_SOCK_OPS_STATE_CB_FLAG != 0
    }

    /// The error that the network reported for a connect and the kernel did not act on; 0 if there
    /// is none or it cannot be read.
    #[inline(always)]
    pub fn reported_error(&self) -> u32 {
        let offset = RELEASED_SK_ERR_SOFT.load();
        if offset == 0 {
            return 0;
        }
        match self.read(offset) {
            // With full accounting, the TCP program reads the queue when the connection is closed.
            0 if FULL_ACCOUNTING.load() == 0 => queued_error(self.ctx.cast_const().cast()),
            error => error,
        }
    }

    /// Like [`socket::is_ordinary`](is_ordinary). The result is 1 if the programs may not read the
    /// socket.
    #[inline(always)]
    pub fn is_ordinary(&self) -> u32 {
        if RELEASED_SK_ERR.load() == 0 { 1 } else { is_ordinary(self.ctx.cast_const().cast()) }
    }

    /// Number of retransmitted segments; 0 if it cannot be read.
    #[inline(always)]
    pub fn retransmits(&self) -> u32 {
        let offset = RELEASED_RETRANSMITS.load();
        if offset == 0 { 0 } else { self.read(offset) }
    }

    /// Bytes received in sequence, counting a FIN as one. Call this and
    /// [`Socket::bytes_acknowledged`] only if [`Socket::snapshot`] is readable.
    #[inline(always)]
    pub fn bytes_received(&self) -> u64 {
        self.read(RELEASED_BYTES_RECEIVED.load())
    }

    /// Bytes that the peer has acknowledged, counting the SYN and a FIN as one each.
    #[inline(always)]
    pub fn bytes_acknowledged(&self) -> u64 {
        self.read(RELEASED_BYTES_SENT.load())
    }

    /// Reads a field of the kernel's own structure of a TCP socket, to which this context points.
    #[inline(always)]
    fn read<T: Copy + Default>(&self, offset: u32) -> T {
        if can_cast() {
            // SAFETY: a TCP socket; the offsets are those of its fields. (A raw socket with the
            // protocol number of TCP has no record. The load may be past its end, and the kernel
            // handles the fault.)
            return unsafe { field(cast(self.ctx.cast_const(), TCP_SOCK.load()), offset) };
        }
        read_at(self.ctx.cast::<u8>().wrapping_add(offset as usize).cast_const())
    }

    /// The address to which the socket is connected; an IPv4 address in v4-mapped form.
    #[inline(always)]
    pub fn peer(&self) -> (Address, Be16) {
        /// `AF_INET`
        const INET: u32 = 2;
        // This loads the words of both families, because if each path loaded only the words of its
        // family, the compiler would merge the loads into one load of a selected field, which the
        // verifier rejects. The words of the other family have no meaning.
        // SAFETY: the context is valid while the program runs. The port has 16 bits.
        unsafe {
            let port = Be16::from_network((&raw const (*self.ctx).dst_port).read_volatile());
            let v4 = Be32::from_network((&raw const (*self.ctx).dst_ip4).read_volatile());
            let words = (&raw const (*self.ctx).dst_ip6).cast::<u32>();
            let word = |i: usize| Be32::from_network(words.add(i).read_volatile());
            let v6 = Address { words: [word(0), word(1), word(2), word(3)] };
            let is_v4 = (&raw const (*self.ctx).family).read_volatile() == INET;
            (if is_v4 { Address::mapped(v4) } else { v6 }, port)
        }
    }
}
