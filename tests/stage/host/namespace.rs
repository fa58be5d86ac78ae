//! A network, mount and host name namespace for the calling thread and everything that it starts.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::mount::{MountFlags, MountPropagationFlags};
use rustix::thread::{LinkNameSpaceType, UnshareFlags};

/// The separate environment of a test: loopback device, bpffs, fixed host name, and a folder that
/// is removed at the end.
///
/// The namespaces belong to the thread that makes the stage, and to threads and processes that it
/// starts. The namespaces and their mounts disappear when the last of these threads and processes
/// ends.
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
        // SAFETY: only this thread's namespaces change, and the thread holds no resource of the old
        // namespaces.
        unsafe {
            rustix::thread::unshare_unsafe(UnshareFlags::NEWNET | UnshareFlags::NEWNS | UnshareFlags::NEWUTS)
        }
        .expect("unshare namespaces");
        // The daemon derives the start of each cursor from the host's name. A fixed name makes a
        // cursor's choices repeatable: a test that passes on one host passes on every host.
        rustix::system::sethostname(b"stage").expect("set the host name");
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

/// Makes a command start in a new network namespace, in which no address can be reached.
pub fn in_a_network_of_its_own(command: &mut Command) {
    // SAFETY: the closure makes one system call and allocates nothing.
    unsafe {
        command.pre_exec(|| {
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
pub fn another_network(within: impl FnOnce() + Send) -> File {
    let prepare = || {
        // SAFETY: only this thread's namespace changes, and the thread holds no socket of the old
        // namespace.
        unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }.expect("unshare the network");
        loopback_up();
        within();
        File::open("/proc/thread-self/ns/net").expect("open the namespace")
    };
    std::thread::scope(|scope| scope.spawn(prepare).join().expect("the network is prepared"))
}

/// A network namespace with a virtual Ethernet link to the namespace of its creator. Removed on
/// drop, with both devices.
pub struct Network {
    namespace: File,
}

impl Network {
    /// Connects the calling thread's network namespace with a new one. The device in the calling
    /// thread's namespace has the name `near` and the address `NET.1`; the device in the new
    /// namespace has the name `far` and the address `NET.2`.
    ///
    /// Each side has a permanent entry for the hardware address of the other side, so the answer to
    /// a packet arrives while the packet is being sent.
    ///
    /// # Panics
    /// Without root, `ip`, or virtual Ethernet devices in the kernel.
    pub fn beside(near: &str, net: &str) -> Self {
        let network = Self { namespace: another_network(|| ()) };
        let far_end = format!("/proc/{}/fd/{}", std::process::id(), network.namespace.as_raw_fd());
        run(&format!("ip link add {near} address 02:00:00:00:00:01 type veth peer name far netns {far_end}"));
        network.run("ip link set far address 02:00:00:00:00:02 up");
        run(&format!("ip link set {near} up"));
        run(&format!("ip address add {net}.1/24 dev {near}"));
        network.run(&format!("ip address add {net}.2/24 dev far"));
        run(&format!("ip neigh add {net}.2 lladdr 02:00:00:00:00:02 dev {near} nud permanent"));
        network.run(&format!("ip neigh add {net}.1 lladdr 02:00:00:00:00:01 dev far nud permanent"));
        network
    }

    /// Makes a command run in the namespace.
    ///
    /// # Panics
    /// If no descriptor is left.
    pub fn place(&self, command: &mut Command) {
        let namespace = self.namespace.try_clone().expect("clone the descriptor");
        // SAFETY: the closure makes one system call and allocates nothing.
        unsafe { command.pre_exec(move || enter(&namespace)) };
    }

    /// Runs a command line in the namespace.
    ///
    /// # Panics
    /// If the command fails.
    #[track_caller]
    pub fn run(&self, line: &str) {
        let mut command = command(line);
        self.place(&mut command);
        succeed(&mut command);
    }

    /// Runs `work` in the namespace, on a separate thread.
    ///
    /// # Panics
    /// If the work panics.
    pub fn within<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        let enter_and_work = || {
            enter(&self.namespace).expect("enter the namespace");
            work()
        };
        std::thread::scope(|scope| scope.spawn(enter_and_work).join().expect("the work ends"))
    }
}

fn enter(namespace: &File) -> std::io::Result<()> {
    Ok(rustix::thread::move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?)
}

/// Runs a command line in the calling thread's namespaces.
///
/// # Panics
/// If the command fails.
#[track_caller]
pub fn run(line: &str) {
    succeed(&mut command(line));
}

/// The command for a line that consists of a program and arguments without blanks.
fn command(line: &str) -> Command {
    let mut words = line.split(' ');
    let mut command = Command::new(words.next().expect("the line has a program"));
    command.args(words);
    command
}

#[track_caller]
fn succeed(command: &mut Command) {
    let status = command.status().unwrap_or_else(|error| panic!("start {command:?}: {error}"));
    assert!(status.success(), "{command:?}: {status}");
}

/// Makes a command start in a cgroup namespace with the command's cgroup as root, and with cgroup2
/// mounted for that namespace, as in a container.
pub fn in_a_cgroup_namespace(command: &mut Command) {
    let mount = c_path(&crate::cgroup::mount());
    // SAFETY: the closure makes system calls only and allocates nothing.
    unsafe {
        command.pre_exec(move || {
            rustix::thread::unshare_unsafe(UnshareFlags::NEWCGROUP | UnshareFlags::NEWNS)?;
            rustix::mount::unmount(&mount, rustix::mount::UnmountFlags::DETACH)?;
            rustix::mount::mount(c"cgroup2", &mount, c"cgroup2", MountFlags::empty(), None)?;
            Ok(())
        });
    }
}

/// Makes a command start in a new cgroup namespace, in which the host's cgroup tree is still
/// mounted.
pub fn in_a_cgroup_namespace_with_the_hosts_tree(command: &mut Command) {
    // SAFETY: the closure makes one system call and allocates nothing.
    unsafe {
        command.pre_exec(|| {
            rustix::thread::unshare_unsafe(UnshareFlags::NEWCGROUP)?;
            Ok(())
        });
    }
}

fn c_path(path: &Path) -> std::ffi::CString {
    std::ffi::CString::new(path.as_os_str().as_encoded_bytes()).expect("the path has no NUL")
}

/// Brings the loopback device up. The device is down in a new network namespace and in a guest.
///
/// # Panics
/// If the kernel refuses.
pub fn loopback_up() {
    let socket = rustix::net::socket(rustix::net::AddressFamily::INET, rustix::net::SocketType::DGRAM, None)
        .expect("make a socket");
    // SAFETY: a structure of plain numbers.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(*b"lo") {
        *to = libc::c_char::try_from(from).expect("the name is ASCII");
    }
    request.ifr_ifru.ifru_flags = libc::c_short::try_from(libc::IFF_UP).expect("the flag fits into 16 bits");
    let fd = socket.as_raw_fd();
    // SAFETY: the request is the kernel's own structure and lives through the call.
    let result = unsafe { libc::ioctl(fd, libc::SIOCSIFFLAGS, &raw mut request) };
    assert_eq!(result, 0, "bring lo up: {}", std::io::Error::last_os_error());
}
