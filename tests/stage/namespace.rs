//! A network, mount and host name namespace for the calling thread and everything that it starts.

use std::path::{Path, PathBuf};

use rustix::mount::{MountFlags, MountPropagationFlags};
use rustix::thread::UnshareFlags;

/// A stage: own loopback, own bpffs, a fixed host name, a folder that is removed at the end.
///
/// The namespaces belong to the thread that makes the stage, and to threads and processes that it
/// starts. The namespaces and their mounts disappear when the last of these ends, whatever ends it.
pub struct Stage {
    folder: tempfile::TempDir,
}

impl Stage {
    /// Sets the stage up for the calling thread.
    ///
    /// # Panics
    /// Without root.
    #[expect(clippy::new_without_default, reason = "it changes the calling thread")]
    pub fn new() -> Self {
        assert!(rustix::process::geteuid().is_root(), "kernel tests need root");
        // SAFETY: only this thread's namespaces change; it holds no resource that belongs to the
        // old ones.
        unsafe {
            rustix::thread::unshare_unsafe(UnshareFlags::NEWNET | UnshareFlags::NEWNS | UnshareFlags::NEWUTS)
        }
        .expect("unshare namespaces");
        // The daemon derives the start of each cursor from the host's name. A fixed name makes a
        // cursor's choices repeatable: a test that passes on one host passes on every host.
        rustix::system::sethostname(b"stage").expect("name the host");
        loopback_up();
        rustix::mount::mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)
            .expect("make mounts private");
        let folder = tempfile::Builder::new().prefix("socklb-test-").tempdir().expect("make a folder");
        let stage = Self { folder };
        std::fs::create_dir(stage.bpffs()).expect("make the folder for bpffs");
        rustix::mount::mount("bpf", stage.bpffs(), "bpf", MountFlags::empty(), None).expect("mount bpffs");
        stage
    }

    /// A folder for files.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// The stage's own bpf file system.
    pub fn bpffs(&self) -> PathBuf {
        self.folder.path().join("bpf")
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        // Unmounts before the folder is removed with everything in it.
        let _ = rustix::mount::unmount(self.bpffs(), rustix::mount::UnmountFlags::DETACH);
    }
}

/// Makes a command start in a network namespace of its own, in which nothing can be reached.
pub fn in_a_network_of_its_own(command: &mut std::process::Command) {
    // SAFETY: the closure makes one system call and allocates nothing.
    unsafe {
        std::os::unix::process::CommandExt::pre_exec(command, || {
            rustix::thread::unshare_unsafe(UnshareFlags::NEWNET)?;
            Ok(())
        });
    }
}

/// Makes another network namespace with only a loopback device, and runs `within` in it. The
/// namespace exists as long as the returned file, or a path of that file in `/proc`, is open.
///
/// # Panics
/// Without root.
pub fn another_network(within: impl FnOnce() + Send) -> std::fs::File {
    let prepare = || {
        // SAFETY: only this thread's namespace changes; it holds no socket of the old one.
        unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }.expect("unshare the network");
        loopback_up();
        within();
        std::fs::File::open("/proc/thread-self/ns/net").expect("open the namespace")
    };
    std::thread::scope(|scope| scope.spawn(prepare).join().expect("the network is prepared"))
}

/// Makes a command start in a cgroup namespace with the command's cgroup as root, and with cgroup2
/// mounted for that namespace, as in a container.
pub fn in_a_cgroup_namespace(command: &mut std::process::Command) {
    let mount = c_path(&crate::cgroup::mount());
    // SAFETY: the closure makes system calls only and allocates nothing.
    unsafe {
        std::os::unix::process::CommandExt::pre_exec(command, move || {
            rustix::thread::unshare_unsafe(UnshareFlags::NEWCGROUP | UnshareFlags::NEWNS)?;
            rustix::mount::unmount(&mount, rustix::mount::UnmountFlags::DETACH)?;
            rustix::mount::mount(c"cgroup2", &mount, c"cgroup2", MountFlags::empty(), None)?;
            Ok(())
        });
    }
}

/// Makes a command start in a cgroup namespace of its own, with the host's tree still mounted.
pub fn in_a_cgroup_namespace_with_the_hosts_tree(command: &mut std::process::Command) {
    // SAFETY: the closure makes one system call and allocates nothing.
    unsafe {
        std::os::unix::process::CommandExt::pre_exec(command, || {
            rustix::thread::unshare_unsafe(UnshareFlags::NEWCGROUP)?;
            Ok(())
        });
    }
}

fn c_path(path: &Path) -> std::ffi::CString {
    std::ffi::CString::new(path.as_os_str().as_encoded_bytes()).expect("a path")
}

/// Brings the loopback device up; it is down in a new network namespace and in a guest.
///
/// # Panics
/// If the kernel refuses.
pub fn loopback_up() {
    let socket = rustix::net::socket(rustix::net::AddressFamily::INET, rustix::net::SocketType::DGRAM, None)
        .expect("make a socket");
    // SAFETY: a structure of plain numbers.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(*b"lo") {
        *to = libc::c_char::try_from(from).expect("ASCII");
    }
    request.ifr_ifru.ifru_flags = libc::c_short::try_from(libc::IFF_UP).expect("a flag of a 16-bit word");
    let fd = std::os::fd::AsRawFd::as_raw_fd(&socket);
    // SAFETY: the request is the kernel's own structure and lives through the call.
    let result = unsafe { libc::ioctl(fd, libc::SIOCSIFFLAGS, &raw mut request) };
    assert_eq!(result, 0, "bring lo up: {}", std::io::Error::last_os_error());
}
