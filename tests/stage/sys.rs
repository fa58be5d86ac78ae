//! The system call bpf(2) for what aya does not offer: one function, and what several tests need of it.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use aya_obj::generated::{bpf_attr, bpf_cmd};

/// No attribute set.
pub fn attributes() -> bpf_attr {
    // SAFETY: a union of plain numbers, for all of which zero is a value.
    unsafe { std::mem::zeroed() }
}

/// One call. What it returns is the command's.
///
/// # Safety
/// Whatever the attributes point to is as large as they say, and the kernel may write to it as the command does.
///
/// # Errors
/// What the kernel says.
pub unsafe fn bpf(command: bpf_cmd, attributes: &mut bpf_attr) -> io::Result<i32> {
    // SAFETY: the caller's promise; the attributes themselves are as large as is said.
    let result = unsafe {
        libc::syscall(libc::SYS_bpf, command as u32, std::ptr::from_mut(attributes), size_of::<bpf_attr>())
    };
    i32::try_from(result).ok().filter(|result| *result >= 0).ok_or_else(io::Error::last_os_error)
}

/// Detaches the program of a pinned link, at once, and removes the pin. Without the first, the kernel would do it some
/// milliseconds after the pin is gone.
pub fn remove_link(pin: &Path) {
    let path = CString::new(pin.as_os_str().as_bytes()).expect("a path without NUL");
    let mut attr = attributes();
    attr.__bindgen_anon_4.pathname = path.as_ptr() as u64;
    // SAFETY: the path outlives the call, and nothing is written.
    let link = unsafe { bpf(bpf_cmd::BPF_OBJ_GET, &mut attr) }
        .unwrap_or_else(|error| panic!("open {}: {error}", pin.display()));
    // SAFETY: the kernel has just made this descriptor for us.
    let link = unsafe { OwnedFd::from_raw_fd(link) };
    let mut attr = attributes();
    attr.link_detach.link_fd = link.as_raw_fd().cast_unsigned();
    // SAFETY: there are no pointers in these attributes.
    unsafe { bpf(bpf_cmd::BPF_LINK_DETACH, &mut attr) }
        .unwrap_or_else(|error| panic!("detach {}: {error}", pin.display()));
    std::fs::remove_file(pin).unwrap_or_else(|error| panic!("remove {}: {error}", pin.display()));
}

/// Lets the kernel count how often programs run and how long, on the whole host, until the descriptor is closed.
///
/// # Panics
/// If the kernel refuses.
pub fn count_runs() -> OwnedFd {
    // The kind of statistics: run time, which is 0.
    // SAFETY: there are no pointers in these attributes.
    let fd = unsafe { bpf(bpf_cmd::BPF_ENABLE_STATS, &mut attributes()) };
    let fd = fd.unwrap_or_else(|error| panic!("turn statistics on: {error}"));
    // SAFETY: the kernel has just made this descriptor for us.
    unsafe { OwnedFd::from_raw_fd(fd) }
}
