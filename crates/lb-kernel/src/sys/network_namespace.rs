//! A network namespace: its number, and how a thread enters it.
//!
//! A thread that has entered a namespace remains there, so only threads that are created for this
//! purpose enter namespaces.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::fs::MetadataExt as _;

use rustix::thread::LinkNameSpaceType;

/// Identifies a network namespace by the number of its inode, which is unique while the namespace
/// exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NamespaceId(u64);

impl NamespaceId {
    /// The number of an open namespace.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn of_open(namespace: &File) -> io::Result<Self> {
        namespace.metadata().map(|metadata| Self(metadata.ino()))
    }

    /// The network namespace of the calling thread.
    ///
    /// # Errors
    /// If `/proc` is not mounted.
    pub fn ours() -> io::Result<Self> {
        Self::read("thread-self")
    }

    /// The network namespace of a process.
    ///
    /// # Errors
    /// If the process has ended, or this process may not read the namespace: for another user's
    /// process, that requires CAP_SYS_PTRACE.
    pub fn of(pid: u32) -> io::Result<Self> {
        Self::read(&pid.to_string())
    }

    fn read(process: &str) -> io::Result<Self> {
        fs::metadata(format!("/proc/{process}/ns/net")).map(|metadata| Self(metadata.ino()))
    }
}

/// Opens a process's network namespace, which exists at least until the file is closed.
///
/// # Errors
/// The errors of [`NamespaceId::of`].
pub fn open(pid: u32) -> io::Result<File> {
    File::open(format!("/proc/{pid}/ns/net"))
}

/// Moves the calling thread into a network namespace.
///
/// # Errors
/// If this process lacks CAP_SYS_ADMIN.
pub fn enter(namespace: &File) -> io::Result<()> {
    Ok(rustix::thread::move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?)
}
