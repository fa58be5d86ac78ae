//! Installs a seccomp filter in a process, between fork and exec. The filter stops some system
//! calls and notifies a supervisor. The kernel lets all other calls pass at full speed.
//!
//! For the supervisor's decisions see `supervisor`.

use std::io;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};

/// Every call that needs a resource or a privilege: its number on `x86_64` and its name. Calls of
/// epoll, futexes and clocks are left out.
pub const CALLS: [(i64, &str); 29] = [
    (libc::SYS_bpf, "bpf"),
    (libc::SYS_open, "open"),
    (libc::SYS_openat, "openat"),
    (libc::SYS_openat2, "openat2"),
    (libc::SYS_creat, "creat"),
    (libc::SYS_socket, "socket"),
    (libc::SYS_socketpair, "socketpair"),
    (libc::SYS_accept, "accept"),
    (libc::SYS_accept4, "accept4"),
    (libc::SYS_bind, "bind"),
    (libc::SYS_mmap, "mmap"),
    (libc::SYS_clone, "clone"),
    (libc::SYS_clone3, "clone3"),
    (libc::SYS_fork, "fork"),
    (libc::SYS_vfork, "vfork"),
    (libc::SYS_inotify_init, "inotify_init"),
    (libc::SYS_inotify_init1, "inotify_init1"),
    (libc::SYS_inotify_add_watch, "inotify_add_watch"),
    (libc::SYS_setns, "setns"),
    (libc::SYS_mkdir, "mkdir"),
    (libc::SYS_mkdirat, "mkdirat"),
    (libc::SYS_rename, "rename"),
    (libc::SYS_renameat, "renameat"),
    (libc::SYS_renameat2, "renameat2"),
    (libc::SYS_unlink, "unlink"),
    (libc::SYS_unlinkat, "unlinkat"),
    (libc::SYS_rmdir, "rmdir"),
    (libc::SYS_dup, "dup"),
    // The filter stops `fcntl` only if the command creates a descriptor: see `program`.
    (libc::SYS_fcntl, "fcntl"),
];

/// The name of a call that the filter stops; for bpf(2), with the command (`enum bpf_cmd`), which
/// is the first argument.
pub fn call(number: i32, first: u64) -> String {
    let name =
        CALLS.iter().find(|(known, _)| *known == i64::from(number)).map_or("another call", |(_, name)| name);
    if *name == *"bpf" { format!("bpf {first}") } else { name.to_owned() }
}

/// The classic BPF program of the filter.
fn program() -> Vec<libc::sock_filter> {
    /// `AUDIT_ARCH_X86_64`, `linux/audit.h`.
    const X86_64: u32 = 0xc000_003e;
    /// Offsets in `struct seccomp_data`: number, architecture, low half of the second argument.
    const NUMBER: u32 = 0;
    const ARCHITECTURE: u32 = 4;
    const SECOND: u32 = 24;
    let load = |offset| step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, offset);
    let equal = |value, yes, no| step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, yes, no, value);
    let answer = |value| step(libc::BPF_RET | libc::BPF_K, 0, 0, value);
    let mut program =
        vec![load(ARCHITECTURE), equal(X86_64, 1, 0), answer(libc::SECCOMP_RET_ALLOW), load(NUMBER)];
    for (number, _) in CALLS {
        let number = u32::try_from(number).expect("the number is small");
        if number == u32::try_from(libc::SYS_fcntl).expect("the number is small") {
            program.push(equal(number, 0, 4));
            program.push(load(SECOND));
            program.push(equal(libc::F_DUPFD_CLOEXEC.cast_unsigned(), 0, 1));
            program.push(answer(libc::SECCOMP_RET_USER_NOTIF));
            program.push(answer(libc::SECCOMP_RET_ALLOW));
        } else {
            program.push(equal(number, 0, 1));
            program.push(answer(libc::SECCOMP_RET_USER_NOTIF));
        }
    }
    program.push(answer(libc::SECCOMP_RET_ALLOW));
    program
}

fn step(code: u32, jt: u8, jf: u8, k: u32) -> libc::sock_filter {
    libc::sock_filter { code: u16::try_from(code).expect("codes have 16 bits"), jt, jf, k }
}

/// Puts a command under the filter, from its exec on. This must be the last preparation of the
/// command, because the filter would also stop the calls of later preparations. The child sends the
/// descriptor of the kernel's notifications over the returned stream, see [`listener`].
pub fn put_under(command: &mut Command) -> UnixStream {
    let (ours, theirs) = UnixStream::pair().expect("create a pair of sockets");
    let mut steps = program();
    // SAFETY: the closure makes two system calls and allocates nothing.
    unsafe {
        command.pre_exec(move || {
            let listener = install(&mut steps)?;
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut message = SendAncillaryBuffer::new(&mut space);
            let descriptors = [BorrowedFd::borrow_raw(listener)];
            message.push(SendAncillaryMessage::ScmRights(&descriptors));
            rustix::net::sendmsg(&theirs, &[IoSlice::new(b"l")], &mut message, SendFlags::empty())?;
            Ok(())
        });
    }
    ours
}

fn install(steps: &mut [libc::sock_filter]) -> io::Result<i32> {
    /// Since Linux 5.19: signals do not restart a call that waits for the supervisor.
    const WAIT_KILLABLE: libc::c_ulong = 1 << 5;
    let program = libc::sock_fprog {
        len: u16::try_from(steps.len()).map_err(io::Error::other)?,
        filter: steps.as_mut_ptr(),
    };
    // SAFETY: the program lives through the call, and has the length that it states.
    let listener = unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            libc::SECCOMP_FILTER_FLAG_NEW_LISTENER | WAIT_KILLABLE,
            &raw const program,
        )
    };
    if listener < 0 {
        return Err(io::Error::last_os_error());
    }
    i32::try_from(listener).map_err(io::Error::other)
}

/// Receives the descriptor for the kernel's notifications. The command must have been started.
pub fn listener(ours: &UnixStream) -> OwnedFd {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut message = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let mut parts = [IoSliceMut::new(&mut byte)];
    rustix::net::recvmsg(ours.as_fd(), &mut parts, &mut message, RecvFlags::CMSG_CLOEXEC)
        .expect("the child sends its listener");
    let received = message.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    });
    received.expect("the message contains a descriptor")
}
