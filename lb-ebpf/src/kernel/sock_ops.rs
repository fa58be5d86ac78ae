//! The context of a TCP event. As in `context`, each access is volatile, so that the compiler does
//! not combine accesses.

use aya_ebpf::bindings::{
    BPF_SOCK_OPS_STATE_CB, BPF_SOCK_OPS_STATE_CB_FLAG, BPF_SOCK_OPS_TCP_CONNECT_CB, bpf_sock_ops,
};
use aya_ebpf::helpers::generated as helper;
use aya_ebpf::programs::SockOpsContext;
use lb_common::load::in_one_register;
use lb_common::net::{Address, Be16, Be32};

use crate::globals::{
    EVENT, EVENT_SOCKET, RELEASED_CALLBACKS, RELEASED_RETRANSMITS, RELEASED_SRTT, SK_ERR, SK_ERR_SOFT,
    SOCKET_FLAGS, TCP_SOCK, can_cast,
};
use crate::kernel::cast::{cast, field};
use crate::kernel::context::cookie_if_any;
use crate::kernel::socket::{is_ordinary, is_ordinary_at, queued_error, read_at};
use crate::rows;

/// `AF_INET`
const INET: u32 = 2;

/// An event of a socket.
pub enum Event {
    /// The first SYN is about to be sent.
    Connect,
    /// The socket changes from one TCP state to another. The kernel reports this event only if a
    /// program has requested it for the socket.
    State { from: u32, to: u32 },
    /// An event that the programs ignore.
    Other,
}

pub struct Ops {
    ctx: *mut bpf_sock_ops,
    /// The kernel's own structure of the socket, if it was loaded before.
    socket: Option<*const u8>,
}

/// Returns a number that was loaded through the context, see [`Ops::tcp_field`].
#[inline(always)]
fn from_context(number: impl Into<u64>) -> u64 {
    in_one_register(number.into())
}

impl Ops {
    #[inline(always)]
    pub fn new(ctx: &SockOpsContext) -> Self {
        Self { ctx: ctx.ops, socket: None }
    }

    /// Loads the kernel's own structure of the socket, for events that use it several times.
    #[inline(always)]
    pub fn with_socket(&self) -> Self {
        let socket = if can_cast() { self.socket() } else { core::ptr::null() };
        Self { ctx: self.ctx, socket: Some(socket) }
    }

    #[inline(always)]
    pub fn event(&self) -> Event {
        // SAFETY: the context is valid while the program runs.
        let op = unsafe { (&raw const (*self.ctx).op).read_volatile() };
        if op == BPF_SOCK_OPS_TCP_CONNECT_CB {
            Event::Connect
        } else if op == BPF_SOCK_OPS_STATE_CB {
            // SAFETY: the context is valid while the program runs; a state event has two arguments.
            unsafe {
                let args = (&raw const (*self.ctx).__bindgen_anon_1.args).cast::<u32>();
                Event::State { from: args.read_volatile(), to: args.add(1).read_volatile() }
            }
        } else {
            Event::Other
        }
    }

    /// The kernel's own structure of the socket. Requires [`can_cast`].
    #[inline(always)]
    fn socket(&self) -> *const u8 {
        match self.socket {
            Some(socket) => socket,
            // SAFETY: the context and its socket are valid while the program runs.
            None => unsafe { field(cast(self.ctx.cast_const(), EVENT.load()), EVENT_SOCKET.load()) },
        }
    }

    /// A field of the kernel's own structure of a TCP socket; `None` if the programs may not load
    /// it. The verifier replaces an access of the same field through the context with about nine
    /// instructions. (The numbers of bytes are loaded through the context: with two ways to load
    /// them, the variables of this program and of the functions that it calls would exceed the
    /// stack.)
    ///
    /// Callers that load the field through the context instead pass the loaded value to
    /// [`from_context`]: otherwise the compiler would merge the two loads into one load from
    /// either of two pointers, which the verifier rejects.
    #[inline(always)]
    fn tcp_field<T: Copy>(&self, offset: u32) -> Option<T> {
        if !can_cast() || offset == 0 {
            return None;
        }
        // SAFETY: a TCP socket, because the kernel reports events of no other; the offset is that
        // of a field with this size.
        Some(unsafe { field(cast(self.socket(), TCP_SOCK.load()), offset) })
    }

    /// Like [`Dial::cookie_if_any`](crate::kernel::context::Dial::cookie_if_any).
    #[inline(always)]
    pub fn cookie_if_any(&self) -> u64 {
        // SAFETY: the helper takes this context, and this is its socket.
        unsafe { cookie_if_any(self.ctx, || self.socket()) }
    }

    /// Requests events of the socket's state changes, without removing the requests of other
    /// programs.
    #[inline(always)]
    pub fn request_states(&self) {
        self.set_requests(self.requests() | BPF_SOCK_OPS_STATE_CB_FLAG);
    }

    /// Withdraws the request for events of the socket's state changes. The request belongs to the
    /// socket and not to its flow. Without this withdrawal, the request would outlive the flow of a
    /// socket that dials another address, and the sockets that a listening socket accepts would
    /// inherit it.
    #[inline(always)]
    pub fn decline_states(&self) {
        self.set_requests(self.requests() & !BPF_SOCK_OPS_STATE_CB_FLAG);
    }

    /// The set of events that programs have requested for the socket.
    #[inline(always)]
    fn requests(&self) -> u32 {
        match self.tcp_field::<u8>(RELEASED_CALLBACKS.load()) {
            Some(requests) => u32::from(requests),
            None => {
                // SAFETY: the context is valid while the program runs.
                let requests = unsafe { (&raw const (*self.ctx).bpf_sock_ops_cb_flags).read_volatile() };
                from_context(requests) as u32
            }
        }
    }

    #[inline(always)]
    fn set_requests(&self, requests: u32) {
        // SAFETY: the helper takes this context.
        unsafe { helper::bpf_sock_ops_cb_flags_set(self.ctx, requests as i32) };
    }

    #[inline(always)]
    pub fn smoothed_rtt_us(&self) -> u32 {
        let eighths = match self.tcp_field::<u32>(RELEASED_SRTT.load()) {
            Some(eighths) => eighths,
            // SAFETY: the context is valid while the program runs.
            None => from_context(unsafe { (&raw const (*self.ctx).srtt_us).read_volatile() }) as u32,
        };
        eighths >> 3
    }

    /// Number of retransmitted segments, including SYNs.
    #[inline(always)]
    pub fn retransmits(&self) -> u32 {
        match self.tcp_field(RELEASED_RETRANSMITS.load()) {
            Some(segments) => segments,
            // SAFETY: the context is valid while the program runs.
            None => from_context(unsafe { (&raw const (*self.ctx).total_retrans).read_volatile() }) as u32,
        }
    }

    /// Bytes received in sequence, counting a FIN as one.
    #[inline(always)]
    pub fn bytes_received(&self) -> u64 {
        // SAFETY: the context is valid while the program runs.
        unsafe { (&raw const (*self.ctx).bytes_received).read_volatile() }
    }

    /// Bytes that the peer has acknowledged, counting the SYN and a FIN as one each.
    #[inline(always)]
    pub fn bytes_acknowledged(&self) -> u64 {
        // SAFETY: the context is valid while the program runs.
        unsafe { (&raw const (*self.ctx).bytes_acked).read_volatile() }
    }

    /// The socket's error (`sk_err`), if the programs may read it.
    #[inline(always)]
    pub fn error(&self) -> Option<u32> {
        self.read(SK_ERR.load())
    }

    /// The error that the network reported for a connect and the kernel did not act on; 0 if there
    /// is none or the programs may not read it.
    #[inline(always)]
    pub fn reported_error(&self) -> u32 {
        match self.read(SK_ERR_SOFT.load()) {
            None => 0,
            Some(0) => {
                let structure = self.structure();
                if structure.is_null() { 0 } else { queued_error(structure) }
            }
            Some(error) => error,
        }
    }

    /// Whether the application has closed the socket, and not only shut it down. The result is
    /// `false` if the programs may not read this.
    #[inline(always)]
    pub fn is_orphan(&self) -> bool {
        /// `SOCK_DEAD`
        const DEAD: u32 = 1;
        self.read(SOCKET_FLAGS.load()).unwrap_or_default() & DEAD != 0
    }

    /// Like [`socket::is_ordinary`](is_ordinary). The result is 1 if the programs may not read the
    /// socket.
    #[inline(always)]
    pub fn is_ordinary(&self) -> u32 {
        if SK_ERR.load() == 0 {
            return 1;
        }
        if can_cast() {
            return is_ordinary_at(self.address());
        }
        let structure = self.structure();
        if structure.is_null() { 1 } else { is_ordinary(structure) }
    }

    /// The address of the kernel's own structure of the socket, as a number that can be passed to a
    /// global function. Requires [`can_cast`].
    #[inline(always)]
    fn address(&self) -> u64 {
        // SAFETY: the context is valid while the program runs.
        let context = unsafe { cast(self.ctx.cast_const(), EVENT.load()) };
        read_at(context.wrapping_add(EVENT_SOCKET.load() as usize))
    }

    /// A pointer to the kernel's own structure of the socket; null if there is none.
    #[inline(always)]
    fn structure(&self) -> *const u8 {
        if can_cast() {
            return self.socket();
        }
        // SAFETY: the context is valid while the program runs. The helper returns a pointer to the
        // kernel's own structure or null.
        unsafe {
            let socket = (&raw const (*self.ctx).__bindgen_anon_2.sk).read_volatile();
            if socket.is_null() {
                core::ptr::null()
            } else {
                helper::bpf_skc_to_tcp_sock(socket.cast()).cast()
            }
        }
    }

    /// Reads 32 bits of the kernel's own structure of the socket; `None` if the offset is 0, which
    /// means that the programs may not read them.
    #[inline(always)]
    fn read(&self, offset: u32) -> Option<u32> {
        if offset == 0 {
            return None;
        }
        let structure = self.structure();
        if structure.is_null() {
            return None;
        }
        // SAFETY: a field of four bytes in `struct sock`. The verifier checks the read against the
        // BTF of this type, from which the offset comes.
        Some(unsafe { field(structure, offset) })
    }

    /// The address to which the socket connects; an IPv4 address in v4-mapped form.
    #[inline(always)]
    pub fn peer(&self) -> (Address, Be16) {
        // SAFETY: the context is valid while the program runs. The kernel provides the port in the
        // upper half of the word.
        unsafe {
            let port = (&raw const (*self.ctx).remote_port).read_volatile();
            let port = Be16::from_network((port >> 16) as u16);
            let v4 = Be32::from_network((&raw const (*self.ctx).remote_ip4).read_volatile());
            let words = (&raw const (*self.ctx).remote_ip6).cast::<u32>();
            let word = |i: usize| Be32::from_network(words.add(i).read_volatile());
            let v6 = Address { words: [word(0), word(1), word(2), word(3)] };
            let is_v4 = (&raw const (*self.ctx).family).read_volatile() == INET;
            (if is_v4 { Address::mapped(v4) } else { v6 }, port)
        }
    }

    /// Like [`rows::is_backend`] for the socket's destination. An IPv4 socket has an IPv4 backend,
    /// so the comparison of one word is enough.
    #[inline(always)]
    pub fn goes_to(&self, slot: u32) -> bool {
        // SAFETY: the context is valid while the program runs, and a live map value.
        unsafe {
            if (&raw const (*self.ctx).family).read_volatile() != INET {
                return rows::is_backend(slot, self.peer());
            }
            let Some(backend) = rows::address(slot) else { return true };
            let [_, _, _, v4] = (*backend).address.words;
            let port = (&raw const (*self.ctx).remote_port).read_volatile() >> 16;
            v4 == Be32::from_network((&raw const (*self.ctx).remote_ip4).read_volatile())
                && (*backend).port == Be16::from_network(port as u16)
        }
    }

    /// Whether the socket is connected to itself.
    #[inline(always)]
    pub fn is_connected_to_itself(&self) -> bool {
        // For IPv6, a comparison of the last word of the address is enough: on the same host no
        // other socket of this port can be the peer. The words of the other family have no meaning,
        // and the local port is in host order.
        // SAFETY: the context is valid while the program runs.
        unsafe {
            let port =
                Be16::from_network(((&raw const (*self.ctx).remote_port).read_volatile() >> 16) as u16);
            let local_port = Be16::from_host((&raw const (*self.ctx).local_port).read_volatile() as u16);
            let v4 = (&raw const (*self.ctx).remote_ip4).read_volatile();
            let local_v4 = (&raw const (*self.ctx).local_ip4).read_volatile();
            let v6 = (&raw const (*self.ctx).remote_ip6).cast::<u32>().add(3).read_volatile();
            let local_v6 = (&raw const (*self.ctx).local_ip6).cast::<u32>().add(3).read_volatile();
            let differs = if (&raw const (*self.ctx).family).read_volatile() == INET {
                v4 ^ local_v4
            } else {
                v6 ^ local_v6
            };
            port == local_port && differs == 0
        }
    }
}
