//! A file system that does not answer: FUSE with a server that never reads a request, like a
//! network file system with a dead server. A process that accesses a file in it waits until the
//! file system is unmounted.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

/// The file system, mounted over a directory. Unmounted on drop.
pub struct Hung {
    at: PathBuf,
    _server: File,
}

impl Hung {
    /// Whether the kernel has FUSE. Every host must have FUSE; the kernel of a guest may be built
    /// without it.
    pub fn is_possible() -> bool {
        let possible = Path::new("/dev/fuse").exists();
        if !possible {
            eprintln!("there is no /dev/fuse here");
            assert!(crate::in_a_guest(), "a host without /dev/fuse: load the kernel's module fuse");
        }
        possible
    }

    /// Mounts the file system over an existing directory.
    ///
    /// # Panics
    /// If it cannot be mounted.
    pub fn over(directory: &Path) -> Self {
        let server = File::options().read(true).write(true).open("/dev/fuse").expect("open /dev/fuse");
        let options = format!("fd={},rootmode=40000,user_id=0,group_id=0,allow_other", server.as_raw_fd());
        let options = std::ffi::CString::new(options).expect("the options have no NUL");
        mount("hung", directory, "fuse", MountFlags::NOSUID | MountFlags::NODEV, Some(options.as_c_str()))
            .unwrap_or_else(|error| panic!("mount over {}: {error}", directory.display()));
        Self { at: directory.to_owned(), _server: server }
    }
}

impl Drop for Hung {
    fn drop(&mut self) {
        // Waiting processes get an error.
        let _ = unmount(&self.at, UnmountFlags::FORCE | UnmountFlags::DETACH);
    }
}
