//! A kernel program that runs until a test lets it end. It holds a connect inside of the kernel, as
//! if the programs that choose a backend were still running.
//!
//! Kernel fact: all programs of a hook of a cgroup run in one RCU read-side critical section. So no
//! grace period ends while this program runs. The program occupies a CPU: a second CPU is needed.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::Duration;

use aya_obj::generated::{bpf_attach_type, bpf_cmd, bpf_map_type, bpf_prog_type};

use crate::sys::{attributes, bpf, load_program};
use crate::{Cgroup, look};

/// A program at the hook `connect4` of a cgroup. It is detached on drop.
pub struct HeldProgram {
    _link: OwnedFd,
    _repeats: OwnedFd,
    /// Whether the program has begun, and whether it has ended because it was released.
    begun: OwnedFd,
    ended: OwnedFd,
    release: OwnedFd,
}

/// The number of bytes that the program copies in one iteration of its loop. The verifier follows
/// every iteration, so each iteration must take long. Linux 5.10 allows at most 4 MiB.
const COPIED: u32 = 3 << 20;
/// The number of iterations of one run. The program calls itself 32 times or more.
const ITERATIONS: i32 = 4000;
/// The program ends after this time even if it was not released: after 20 s, the kernel would
/// report that the CPU hangs.
const LONGEST: Duration = Duration::from_secs(15);

impl HeldProgram {
    /// Attaches the program to a cgroup, after the programs that are attached already. Every
    /// connect in the cgroup by IPv4 is held.
    ///
    /// # Panics
    /// If the kernel refuses.
    pub fn attach(cgroup: &Cgroup) -> Self {
        let array = |bytes| create_map(bpf_map_type::BPF_MAP_TYPE_ARRAY, bytes);
        let (begun, ended, release, copied) = (array(8), array(8), array(8), array(COPIED));
        let repeats = create_map(bpf_map_type::BPF_MAP_TYPE_PROG_ARRAY, 4);
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        let now = Duration::try_from(now).expect("the time is positive");
        let until = u64::try_from((now + LONGEST).as_nanos()).expect("the time is below 584 years");
        let [low, high]: [i32; 2] = bytemuck::cast(until);
        let [begun_fd, ended_fd, release_fd, copied_fd, repeats_fd] =
            [&begun, &ended, &release, &copied, &repeats].map(AsRawFd::as_raw_fd);
        let instructions = [
            // r8 = context; r9 = until; the key at r10 - 8 = 0; begun = 1; r6 = 0
            &[op(0xbf, 8, 1, 0, 0)][..],
            &[op(0x18, 9, 0, 0, low), op(0, 0, 0, 0, high)],
            &[op(0x7a, 10, 0, -8, 0)],
            &value(1, begun_fd),
            &[op(0x7a, 1, 0, 0, 1), op(0xb7, 6, 0, 0, 0)],
            // The loop. If `release` is not 0: leave the loop at the end. If the time is after
            // `until`: exit.
            &value(1, release_fd),
            &[op(0x79, 0, 1, 0, 0), op(0x55, 0, 0, 19, 0)],
            &[op(0x85, 0, 0, 0, 5), op(0x2d, 0, 9, 15, 0)],
            // bpf_map_update_elem(copied, 0, its own value)
            &map(1, copied_fd),
            &[op(0xbf, 2, 10, 0, 0), op(0x07, 2, 0, 0, -8)],
            &value(3, copied_fd),
            &[op(0xb7, 4, 0, 0, 0), op(0x85, 0, 0, 0, 2)],
            // r6 += 1; the next iteration
            &[op(0x07, 6, 0, 0, 1), op(0xa5, 6, 0, -16, ITERATIONS)],
            // bpf_tail_call(context, repeats, 0); r0 = 1; exit
            &[op(0xbf, 1, 8, 0, 0)],
            &map(2, repeats_fd),
            &[op(0xb7, 3, 0, 0, 0), op(0x85, 0, 0, 0, 12)],
            &[op(0xb7, 0, 0, 0, 1), op(0x95, 0, 0, 0, 0)],
            // The end of the loop: ended = 1; r0 = 1; exit
            &value(1, ended_fd),
            &[op(0x7a, 1, 0, 0, 1), op(0xb7, 0, 0, 0, 1), op(0x95, 0, 0, 0, 0)],
        ]
        .concat();
        let hook = bpf_attach_type::BPF_CGROUP_INET4_CONNECT;
        let program = load_program(bpf_prog_type::BPF_PROG_TYPE_CGROUP_SOCK_ADDR, hook, &instructions);
        element(bpf_cmd::BPF_MAP_UPDATE_ELEM, &repeats, &mut program.as_raw_fd()).expect("store the program");
        let directory = std::fs::File::open(cgroup.path()).expect("open the cgroup");
        let mut attr = attributes();
        // SAFETY: these members are the ones that the command below reads; nothing else was
        // written.
        let create = unsafe { &mut attr.link_create };
        create.__bindgen_anon_1.prog_fd = program.as_raw_fd().cast_unsigned();
        create.__bindgen_anon_2.target_fd = directory.as_raw_fd().cast_unsigned();
        create.attach_type = hook as u32;
        // SAFETY: there are no pointers in these attributes.
        let link = unsafe { bpf(bpf_cmd::BPF_LINK_CREATE, &mut attr) };
        let link = link.unwrap_or_else(|error| panic!("attach the program: {error}"));
        // SAFETY: the kernel has just made this descriptor, and nothing else owns it.
        let link = unsafe { OwnedFd::from_raw_fd(link) };
        Self { _link: link, _repeats: repeats, begun, ended, release }
    }

    /// Waits until a connect is held.
    ///
    /// # Panics
    /// If no connect is held in time.
    pub fn wait_until_begun(&self) {
        look(|| read(&self.begun)).becomes(1_u64);
    }

    /// Lets the program end.
    pub fn release(&self) {
        let mut yes = 1_u64;
        element(bpf_cmd::BPF_MAP_UPDATE_ELEM, &self.release, &mut yes).expect("write a map");
    }

    /// Whether the program has ended because it was released, and not after its longest time.
    pub fn has_ended(&self) -> bool {
        read(&self.ended) == 1
    }
}

impl Drop for HeldProgram {
    fn drop(&mut self) {
        // Without this, the process in the connect could not end before the longest time.
        self.release();
    }
}

/// An instruction.
fn op(code: u64, destination: u64, source: u64, offset: i16, constant: i32) -> u64 {
    code | destination << 8
        | source << 12
        | u64::from(offset.cast_unsigned()) << 16
        | u64::from(constant.cast_unsigned()) << 32
}

/// Loads a reference to a map into a register.
fn map(register: u64, map: i32) -> [u64; 2] {
    [op(0x18, register, 1, 0, map), 0]
}

/// Loads the address of the value of a map with one element into a register.
fn value(register: u64, map: i32) -> [u64; 2] {
    [op(0x18, register, 2, 0, map), 0]
}

/// Creates a map with one element.
fn create_map(kind: bpf_map_type, value_bytes: u32) -> OwnedFd {
    let mut attr = attributes();
    // SAFETY: this member is the one that the command below reads; nothing else was written.
    let create = unsafe { &mut attr.__bindgen_anon_1 };
    (create.map_type, create.key_size, create.value_size, create.max_entries) =
        (kind as u32, 4, value_bytes, 1);
    // SAFETY: there are no pointers in these attributes.
    let map = unsafe { bpf(bpf_cmd::BPF_MAP_CREATE, &mut attr) };
    let map = map.unwrap_or_else(|error| panic!("create a map: {error}"));
    // SAFETY: the kernel has just made this descriptor, and nothing else owns it.
    unsafe { OwnedFd::from_raw_fd(map) }
}

/// Reads or writes the element of a map, whose value is a `T`.
fn element<T: bytemuck::Pod>(command: bpf_cmd, map: &OwnedFd, value: &mut T) -> io::Result<i32> {
    let key = 0_u32;
    let mut attr = attributes();
    // SAFETY: this member is the one that these commands read; nothing else was written.
    let element = unsafe { &mut attr.__bindgen_anon_2 };
    element.map_fd = map.as_raw_fd().cast_unsigned();
    element.key = (&raw const key) as u64;
    element.__bindgen_anon_1.value = std::ptr::from_mut(value) as u64;
    // SAFETY: key and value have the sizes of the map's, and outlive the call.
    unsafe { bpf(command, &mut attr) }
}

fn read(map: &OwnedFd) -> u64 {
    let mut value = 0_u64;
    element(bpf_cmd::BPF_MAP_LOOKUP_ELEM, map, &mut value).expect("read a map");
    value
}
