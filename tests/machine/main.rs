//! Becomes process 1 of a disposable machine, in separate namespaces. The disposable machine has
//! the host's files under a copy-on-write layer, no network except loopback, and systemd or an idle
//! process as init. Tests start this program.
//!
//! The machine's writes stay in memory and disappear with its last process. The machine cannot
//! change the host's kernel settings, devices and services: these are read-only, absent, or not
//! started.

use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use rustix::mount::{MountFlags, MountPropagationFlags, UnmountFlags};
use rustix::thread::UnshareFlags;

const USAGE: &str = "usage: machine systemd|nobody FOLDER CGROUP";

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        ["init", init, folder] => begin(init, Path::new(folder)),
        [init, folder, cgroup] => start(init, folder, cgroup),
        _ => panic!("{USAGE}"),
    }
}

/// Makes the namespaces, starts process 1 in them, and waits for its end.
fn start(init: &str, folder: &str, cgroup: &str) {
    // Enters the cgroup before the cgroup namespace is made: the root of a new namespace is the
    // cgroup of the process that makes it.
    fs::write(format!("{cgroup}/cgroup.procs"), std::process::id().to_string()).expect("enter the cgroup");
    let namespaces = UnshareFlags::NEWPID
        | UnshareFlags::NEWNS
        | UnshareFlags::NEWCGROUP
        | UnshareFlags::NEWNET
        | UnshareFlags::NEWIPC
        | UnshareFlags::NEWUTS;
    // SAFETY: this process has one thread and holds no resource that belongs to the old namespaces.
    unsafe { rustix::thread::unshare_unsafe(namespaces) }.expect("unshare namespaces");
    let mut process_1 = Command::new(std::env::current_exe().expect("the path of the running program"));
    process_1.args(["init", init, folder]);
    stage::probe::die_with_us(&mut process_1);
    let mut process_1 = process_1.spawn().expect("start process 1");
    // Prints the process id on the host, by which other processes enter the machine.
    println!("{}", process_1.id());
    process_1.wait().expect("reap process 1");
}

/// Sets the machine up and becomes its init.
fn begin(init: &str, folder: &Path) {
    files(folder);
    furnish(folder);
    std::env::set_current_dir(folder.join("root")).expect("enter the root");
    // Mounts the new root over the old one, then unmounts the old one.
    rustix::process::pivot_root(".", ".").expect("change the root");
    rustix::mount::unmount(".", UnmountFlags::DETACH).expect("leave the old root");
    let mut command = if init == "systemd" {
        let mut systemd = Command::new("/usr/lib/systemd/systemd");
        // Informs systemd that it runs in a container, so that it does not manage hardware and the
        // clock.
        systemd.env_clear().env("container", "socklb-test").env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
        systemd.args(["--system", "--unit=basic.target", "--log-target=journal", "--show-status=no"]);
        systemd
    } else {
        let mut nobody = Command::new("/usr/bin/sleep");
        nobody.arg("infinity");
        nobody
    };
    let nowhere = std::process::Stdio::null;
    let error = command.stdin(nowhere()).stdout(nowhere()).stderr(nowhere()).exec();
    panic!("become init: {error}");
}

/// Mounts the host's files under a layer that receives all changes.
fn files(folder: &Path) {
    rustix::mount::mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)
        .expect("make mounts private");
    let shared = folder.join("shared");
    let (layer, root) = (folder.join("layer"), folder.join("root"));
    mount("tmpfs", &layer, MountFlags::empty(), "");
    for name in ["changes", "work"] {
        fs::create_dir(layer.join(name)).expect("make a folder of the layer");
    }
    let layer = layer.display();
    let layers = format!("lowerdir=/,upperdir={layer}/changes,workdir={layer}/work");
    mount("overlay", &root, MountFlags::empty(), &layers);
    for (kind, target, flags) in [
        ("proc", "proc", MountFlags::empty()),
        ("sysfs", "sys", MountFlags::RDONLY),
        ("cgroup2", "sys/fs/cgroup", MountFlags::empty()),
        ("tmpfs", "dev", MountFlags::empty()),
        ("tmpfs", "run", MountFlags::empty()),
        ("tmpfs", "tmp", MountFlags::empty()),
    ] {
        mount(kind, &root.join(target), flags, "");
    }
    // systemd mounts bpffs with the same mode.
    mount("bpf", &root.join("sys/fs/bpf"), MountFlags::empty(), "mode=0700");
    // Makes the kernel's settings read-only, because they belong to the host.
    let settings = root.join("proc/sys");
    rustix::mount::mount_bind(&settings, &settings).expect("bind the kernel's settings");
    rustix::mount::mount_remount(&settings, MountFlags::BIND | MountFlags::RDONLY, "")
        .expect("make them read-only");
    for device in ["null", "zero", "full", "random", "urandom", "tty"] {
        let device = Path::new("dev").join(device);
        let target = root.join(&device);
        fs::write(&target, "").expect("make a file to bind a device over");
        rustix::mount::mount_bind(Path::new("/").join(device), &target).expect("bind a device");
    }
    for (link, name) in [("/proc/self/fd", "fd"), ("pts/ptmx", "ptmx")] {
        symlink(link, root.join("dev").join(name)).expect("link a device");
    }
    let target = root.join("shared");
    fs::create_dir(&target).expect("make a folder to bind the shared one over");
    rustix::mount::mount_bind(&shared, &target).expect("share the folder");
}

/// Disables all services except the journal, so that no service of the host is started a second
/// time.
fn furnish(folder: &Path) {
    let root = folder.join("root");
    for (directory, kept) in [
        ("etc/systemd/system", &[][..]),
        ("usr/lib/systemd/system-generators", &[]),
        ("usr/lib/systemd/system/timers.target.wants", &[]),
        ("usr/lib/systemd/system/sysinit.target.wants", &["systemd-journald.service"]),
        (
            "usr/lib/systemd/system/sockets.target.wants",
            &["systemd-journald.socket", "systemd-journald-dev-log.socket"],
        ),
    ] {
        let Ok(entries) = fs::read_dir(root.join(directory)) else { continue };
        for entry in entries.flatten() {
            if kept.iter().any(|name| *name == entry.file_name()) {
                continue;
            }
            let path = entry.path();
            let real = entry.file_type().is_ok_and(|kind| kind.is_dir());
            let removed = if real { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
            removed.unwrap_or_else(|error| panic!("remove {}: {error}", path.display()));
        }
    }
    // This file may forbid packages to start services. Tests check these starts.
    let _ = fs::remove_file(root.join("usr/sbin/policy-rc.d"));
    // Without this file, installations do not rebuild the index of the manual, which takes seconds.
    let _ = fs::remove_file(root.join("var/lib/man-db/auto-update"));
}

fn mount(kind: &str, target: &Path, flags: MountFlags, options: &str) {
    fs::create_dir_all(target).unwrap_or_else(|error| panic!("make {}: {error}", target.display()));
    let options = std::ffi::CString::new(options).expect("the options have no NUL");
    rustix::mount::mount(kind, target, kind, flags, options.as_c_str())
        .unwrap_or_else(|error| panic!("mount {kind} on {}: {error}", target.display()));
}
