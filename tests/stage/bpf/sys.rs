//! The system call bpf(2), and helpers that use it for operations that aya does not offer.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use aya_obj::generated::{bpf_attach_type, bpf_attr, bpf_cmd, bpf_link_info, bpf_prog_type};

/// Attributes with all fields zero.
pub fn attributes() -> bpf_attr {
    // SAFETY: a union of plain numbers, for all of which zero is a value.
    unsafe { std::mem::zeroed() }
}

/// Makes one call. The meaning of the returned number depends on the command.
///
/// # Safety
/// The memory to which the attributes point must be as large as they state, and the kernel must be
/// allowed to write to it as the command does.
///
/// # Errors
/// Returns the kernel's error.
pub unsafe fn bpf(command: bpf_cmd, attributes: &mut bpf_attr) -> io::Result<i32> {
    // SAFETY: the caller guarantees the validity of the pointers; the attributes have the length
    // that is passed.
    let result = unsafe {
        libc::syscall(libc::SYS_bpf, command as u32, std::ptr::from_mut(attributes), size_of::<bpf_attr>())
    };
    i32::try_from(result).ok().filter(|result| *result >= 0).ok_or_else(io::Error::last_os_error)
}

/// The program `r0 = 1; exit` permits every call.
const NOTHING: [u64; 2] = [0x0000_0001_0000_00b7, 0x0000_0000_0000_0095];

/// Loads a program of these instructions. An instruction has an opcode in the lowest byte, then
/// registers, an offset of 16 bits and a constant of 32 bits.
///
/// # Panics
/// If the kernel refuses.
pub fn load_program(kind: bpf_prog_type, attach_type: bpf_attach_type, instructions: &[u64]) -> OwnedFd {
    // Below Linux 5.11 programs count as locked memory, which is limited per process.
    let unlimited = rustix::process::Rlimit { current: None, maximum: None };
    let _ = rustix::process::setrlimit(rustix::process::Resource::Memlock, unlimited);
    let mut attr = attributes();
    // SAFETY: this member is the one that the command below reads; nothing else was written.
    let load = unsafe { &mut attr.__bindgen_anon_3 };
    load.prog_type = kind as u32;
    load.expected_attach_type = attach_type as u32;
    load.insns = instructions.as_ptr() as u64;
    load.insn_cnt = u32::try_from(instructions.len()).expect("the program is short");
    load.license = c"GPL".as_ptr() as u64;
    // SAFETY: instructions and license outlive the call, and nothing is written.
    let program = unsafe { bpf(bpf_cmd::BPF_PROG_LOAD, &mut attr) };
    let program = program.unwrap_or_else(|error| panic!("load a program: {error}"));
    // SAFETY: the kernel has just made this descriptor, and nothing else owns it.
    unsafe { OwnedFd::from_raw_fd(program) }
}

/// Attaches a program that does nothing to a cgroup. It is detached when the cgroup is removed.
///
/// # Panics
/// If the kernel refuses, or there is no such cgroup.
pub fn attach_idle(cgroup: &Path, kind: bpf_prog_type, attach_type: bpf_attach_type) {
    let program = load_program(kind, attach_type, &NOTHING);
    let cgroup = std::fs::File::open(cgroup).expect("open the cgroup");
    attach_to_cgroup(bpf_cmd::BPF_PROG_ATTACH, &program, &cgroup, attach_type).expect("attach a program");
}

/// Attaches a program to a cgroup, or detaches it.
fn attach_to_cgroup(
    command: bpf_cmd,
    program: &OwnedFd,
    cgroup: &std::fs::File,
    attach_type: bpf_attach_type,
) -> io::Result<i32> {
    let mut attr = attributes();
    // SAFETY: this member is the one that both commands read; nothing else was written.
    let attach = unsafe { &mut attr.__bindgen_anon_5 };
    attach.__bindgen_anon_1.target_fd = cgroup.as_raw_fd().cast_unsigned();
    attach.attach_bpf_fd = program.as_raw_fd().cast_unsigned();
    attach.attach_type = attach_type as u32;
    // SAFETY: there are no pointers in these attributes.
    unsafe { bpf(command, &mut attr) }
}

/// A program for the hook `connect4` that does nothing.
fn idle_connect4() -> OwnedFd {
    load_program(
        bpf_prog_type::BPF_PROG_TYPE_CGROUP_SOCK_ADDR,
        bpf_attach_type::BPF_CGROUP_INET4_CONNECT,
        &NOTHING,
    )
}

fn open_link(pin: &Path) -> OwnedFd {
    let path = CString::new(pin.as_os_str().as_bytes()).expect("the path has no NUL");
    let mut attr = attributes();
    attr.__bindgen_anon_4.pathname = path.as_ptr() as u64;
    // SAFETY: the path outlives the call, and nothing is written.
    let link = unsafe { bpf(bpf_cmd::BPF_OBJ_GET, &mut attr) }
        .unwrap_or_else(|error| panic!("open {}: {error}", pin.display()));
    // SAFETY: the kernel has just made this descriptor, and nothing else owns it.
    unsafe { OwnedFd::from_raw_fd(link) }
}

/// Detaches the program of a pinned link immediately. The pin remains.
pub fn detach_link(pin: &Path) {
    let link = open_link(pin);
    let mut attr = attributes();
    attr.link_detach.link_fd = link.as_raw_fd().cast_unsigned();
    // SAFETY: there are no pointers in these attributes.
    unsafe { bpf(bpf_cmd::BPF_LINK_DETACH, &mut attr) }
        .unwrap_or_else(|error| panic!("detach {}: {error}", pin.display()));
}

/// Detaches the program of a pinned link at once, and removes the pin. Without the explicit detach,
/// the kernel detaches the program some milliseconds after the removal.
pub fn remove_link(pin: &Path) {
    detach_link(pin);
    std::fs::remove_file(pin).unwrap_or_else(|error| panic!("remove {}: {error}", pin.display()));
}

/// Replaces the program of a pinned `connect4` link with a program that does nothing.
pub fn disable_connect4(pin: &Path) {
    update_link(pin, &idle_connect4());
}

/// Replaces the program of a pinned link.
///
/// # Panics
/// If the kernel refuses.
pub fn update_link(pin: &Path, program: &OwnedFd) {
    let link = open_link(pin);
    let mut attr = attributes();
    attr.link_update.link_fd = link.as_raw_fd().cast_unsigned();
    attr.link_update.__bindgen_anon_1.new_prog_fd = program.as_raw_fd().cast_unsigned();
    // SAFETY: there are no pointers in these attributes.
    unsafe { bpf(bpf_cmd::BPF_LINK_UPDATE, &mut attr) }
        .unwrap_or_else(|error| panic!("update {}: {error}", pin.display()));
}

/// The kernel's id of each pinned link of a client, keyed by the link's name. A recreated link has
/// another id.
pub fn link_ids(pins: &Path) -> BTreeMap<String, u32> {
    let links = std::fs::read_dir(pins.join("links")).into_iter().flatten();
    links
        .map(|link| {
            let link = link.expect("read a directory entry");
            (link.file_name().to_string_lossy().into_owned(), link_id(&link.path()))
        })
        .collect()
}

fn link_id(pin: &Path) -> u32 {
    link_info(pin).id
}

/// The kernel's ids of a link and of its program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Link {
    /// The link's id.
    pub id: u32,
    /// The program's id.
    pub program: u32,
}

/// Reads the ids of a pinned link.
pub fn link(pin: &Path) -> Link {
    let info = link_info(pin);
    Link { id: info.id, program: info.prog_id }
}

fn link_info(pin: &Path) -> bpf_link_info {
    let link = open_link(pin);
    // SAFETY: a structure of plain numbers, for all of which zero is a value.
    let mut info: bpf_link_info = unsafe { std::mem::zeroed() };
    let mut attr = attributes();
    attr.info.bpf_fd = link.as_raw_fd().cast_unsigned();
    attr.info.info_len = u32::try_from(size_of::<bpf_link_info>()).expect("the structure is small");
    attr.info.info = (&raw mut info) as u64;
    // SAFETY: the structure has the length that is passed, and outlives the call.
    unsafe { bpf(bpf_cmd::BPF_OBJ_GET_INFO_BY_FD, &mut attr) }
        .unwrap_or_else(|error| panic!("query {}: {error}", pin.display()));
    info
}

/// Opens the program with this kernel id.
///
/// # Panics
/// If no program has this id.
pub fn program(id: u32) -> OwnedFd {
    let mut attr = attributes();
    attr.__bindgen_anon_6.__bindgen_anon_1.prog_id = id;
    // SAFETY: there are no pointers in these attributes.
    let program = unsafe { bpf(bpf_cmd::BPF_PROG_GET_FD_BY_ID, &mut attr) };
    let program = program.unwrap_or_else(|error| panic!("open program {id}: {error}"));
    // SAFETY: the kernel has just made this descriptor, and nothing else owns it.
    unsafe { OwnedFd::from_raw_fd(program) }
}

/// Runs an XDP program on a frame. Returns the program's action, and the frame after the run.
///
/// # Panics
/// If the kernel refuses to run it.
pub fn run_xdp(program: &OwnedFd, frame: &[u8]) -> (u32, Vec<u8>) {
    // No program of the tests lengthens a frame by more than 64 bytes.
    let mut after = vec![0; frame.len() + 64];
    let mut attr = attributes();
    // SAFETY: this member is the one that the command below reads; nothing else was written.
    let test = unsafe { &mut attr.test };
    test.prog_fd = program.as_raw_fd().cast_unsigned();
    (test.data_in, test.data_size_in) =
        (frame.as_ptr() as u64, u32::try_from(frame.len()).expect("the frame is short"));
    (test.data_out, test.data_size_out) =
        (after.as_mut_ptr() as u64, u32::try_from(after.len()).expect("the frame is short"));
    test.repeat = 1;
    // SAFETY: both buffers have the lengths that are passed, and outlive the call.
    unsafe { bpf(bpf_cmd::BPF_PROG_TEST_RUN, &mut attr) }
        .unwrap_or_else(|error| panic!("run the program: {error}"));
    // SAFETY: the call has stored both values.
    let (action, length) = unsafe { (attr.test.retval, attr.test.data_size_out) };
    after.truncate(length as usize);
    (action, after)
}

/// The action that an XDP program returns for a packet.
#[derive(Clone, Copy, Debug)]
#[repr(u32)]
pub enum Action {
    /// Drop the packet.
    Drop = 1,
    /// Pass the packet to the network stack.
    Pass = 2,
    /// Send the packet back out of the interface that received it.
    Transmit = 3,
}

/// A program that returns the same action for every packet.
///
/// # Panics
/// If the kernel refuses.
pub fn xdp_program(action: Action) -> OwnedFd {
    // `r0 = action; exit`
    let instructions = [u64::from(action as u32) << 32 | 0xb7, 0x95];
    load_program(bpf_prog_type::BPF_PROG_TYPE_XDP, bpf_attach_type::BPF_XDP, &instructions)
}

/// The number of a network interface of this network namespace.
///
/// # Panics
/// If there is no such interface.
pub fn interface_index(interface: &str) -> u32 {
    let name = CString::new(interface).expect("the name has no NUL");
    // SAFETY: a string that outlives the call.
    let index = unsafe { libc::if_nametoindex(name.as_ptr()) };
    assert_ne!(index, 0, "there is no interface {interface}");
    index
}

/// Sends a frame `times` times out of a network interface, as fast as one processor can: the kernel
/// makes packets of the frame, and runs the program `transmit` on each packet (Linux 5.18).
///
/// # Panics
/// If the kernel refuses.
pub fn send_frames(transmit: &OwnedFd, interface: u32, frame: &[u8], times: u32) {
    /// `BPF_F_TEST_XDP_LIVE_FRAMES`
    const LIVE_FRAMES: u32 = 2;
    // `struct xdp_md`: data, data_end, data_meta, ingress_ifindex, rx_queue_index, egress_ifindex.
    let context = [0, u32::try_from(frame.len()).expect("the frame is short"), 0, interface, 0, 0];
    let mut attr = attributes();
    // SAFETY: this member is the one that the command below reads; nothing else was written.
    let test = unsafe { &mut attr.test };
    test.prog_fd = transmit.as_raw_fd().cast_unsigned();
    (test.data_in, test.data_size_in) = (frame.as_ptr() as u64, context[1]);
    (test.ctx_in, test.ctx_size_in) = (context.as_ptr() as u64, 24);
    (test.repeat, test.flags, test.batch_size) = (times, LIVE_FRAMES, 64);
    // SAFETY: frame and context have the lengths that are passed, and outlive the call.
    unsafe { bpf(bpf_cmd::BPF_PROG_TEST_RUN, &mut attr) }
        .unwrap_or_else(|error| panic!("send the frames: {error}"));
}

/// The ids of the XDP programs of a network interface.
///
/// # Panics
/// Without `ip`.
pub fn xdp_programs(interface: &str) -> Vec<u32> {
    let output = std::process::Command::new("ip").args(["-json", "link", "show", "dev", interface]).output();
    let links: serde_json::Value =
        serde_json::from_slice(&output.expect("run ip").stdout).expect("the text is JSON");
    let id = links[0]["xdp"]["prog"]["id"].as_u64();
    id.into_iter().map(|id| u32::try_from(id).expect("the id fits into 32 bits")).collect()
}

/// The mode in which an XDP program runs.
#[derive(Clone, Copy, Debug)]
#[repr(u32)]
pub enum XdpMode {
    /// The network stack runs the program.
    Generic = 2,
    /// The interface's driver runs the program.
    Native = 4,
}

/// Attaches a program that passes every packet to a network interface. The program is detached when
/// the descriptor is closed.
///
/// # Panics
/// If the kernel refuses, or there is no such interface.
pub fn attach_xdp(interface: &str, mode: XdpMode) -> OwnedFd {
    let program = xdp_program(Action::Pass);
    let index = interface_index(interface);
    let mut attr = attributes();
    // SAFETY: these members are the ones that the command below reads; nothing else was written.
    let create = unsafe { &mut attr.link_create };
    create.__bindgen_anon_1.prog_fd = program.as_raw_fd().cast_unsigned();
    create.__bindgen_anon_2.target_ifindex = index;
    create.attach_type = bpf_attach_type::BPF_XDP as u32;
    create.flags = mode as u32;
    // SAFETY: there are no pointers in these attributes.
    let link = unsafe { bpf(bpf_cmd::BPF_LINK_CREATE, &mut attr) };
    let link = link.unwrap_or_else(|error| panic!("attach to {interface}: {error}"));
    // SAFETY: the kernel has just made this descriptor, and nothing else owns it.
    unsafe { OwnedFd::from_raw_fd(link) }
}

/// Makes the kernel count how often and how long programs run, on the whole host, until the
/// descriptor is closed.
///
/// # Panics
/// If the kernel refuses.
pub fn count_runs() -> OwnedFd {
    // The attributes select the statistics of kind 0, the run time.
    // SAFETY: there are no pointers in these attributes.
    let fd = unsafe { bpf(bpf_cmd::BPF_ENABLE_STATS, &mut attributes()) };
    let fd = fd.unwrap_or_else(|error| panic!("turn statistics on: {error}"));
    // SAFETY: the kernel has just made this descriptor, and nothing else owns it.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

/// A program attached to a cgroup's `connect4` hook in the exclusive mode, which permits no other
/// program at this hook. Detached on drop.
pub struct Exclusive {
    program: OwnedFd,
    cgroup: std::fs::File,
}

impl Exclusive {
    /// Attaches a program that does nothing to the cgroup at a path.
    ///
    /// # Panics
    /// If the kernel refuses.
    pub fn attach(cgroup: &Path) -> Self {
        let program = idle_connect4();
        let cgroup = std::fs::File::open(cgroup).expect("open the cgroup");
        let alone = Self { program, cgroup };
        alone.call(bpf_cmd::BPF_PROG_ATTACH).expect("attach the program");
        alone
    }

    fn call(&self, command: bpf_cmd) -> io::Result<i32> {
        attach_to_cgroup(command, &self.program, &self.cgroup, bpf_attach_type::BPF_CGROUP_INET4_CONNECT)
    }
}

impl Drop for Exclusive {
    fn drop(&mut self) {
        // The call fails if the cgroup was removed, because the removal has detached the program.
        let _ = self.call(bpf_cmd::BPF_PROG_DETACH);
    }
}
