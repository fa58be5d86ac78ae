//! The cgroups of a test. They are below the cgroup2 mount. At the end, their processes are killed
//! and the cgroups removed.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// A cgroup of a test. Removed on drop.
#[derive(Debug)]
pub struct Cgroup {
    path: PathBuf,
    mount: PathBuf,
}

static COUNT: AtomicU32 = AtomicU32::new(0);

impl Cgroup {
    /// A cgroup with a unique name.
    #[expect(clippy::new_without_default, reason = "it makes a directory")]
    pub fn new() -> Self {
        let mount = mount();
        remove_leftovers(&mount);
        Self::make(mount, &name())
    }

    /// A cgroup inside this one.
    pub fn child(&self, name: &str) -> Self {
        let relative = self.relative().join(name);
        Self::make(self.mount.clone(), &relative.to_string_lossy())
    }

    /// The path of a cgroup that does not exist yet. If it is created, it is removed on drop.
    pub fn absent() -> Self {
        let cgroup = Self::new();
        cgroup.remove();
        cgroup
    }

    /// Creates the cgroup again, as a service manager does when a service starts.
    pub fn create(&self) {
        fs::create_dir(&self.path).unwrap_or_else(|error| panic!("create {}: {error}", self.path.display()));
    }

    /// Kills the cgroup's processes and removes the cgroup, as a service manager does when a
    /// service stops.
    pub fn remove(&self) {
        remove(&self.path);
        assert!(!self.path.exists(), "{} is removed", self.path.display());
    }

    /// The kernel's id of the cgroup.
    pub fn id(&self) -> u64 {
        std::os::unix::fs::MetadataExt::ino(&fs::metadata(&self.path).expect("the cgroup exists"))
    }

    /// Makes a command start inside the cgroup.
    pub fn enter(&self, command: &mut std::process::Command) {
        enter(&self.path, command);
    }

    fn make(mount: PathBuf, relative: &str) -> Self {
        let path = mount.join(relative);
        fs::create_dir(&path).unwrap_or_else(|error| panic!("create {}: {error}", path.display()));
        Self { path, mount }
    }

    /// The full path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The path below the cgroup2 mount, as in configurations.
    pub fn relative(&self) -> PathBuf {
        self.path.strip_prefix(&self.mount).expect("the cgroup is below the mount").to_owned()
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        remove(&self.path);
    }
}

const PREFIX: &str = "socklb-test-";

/// A name that no other test's cgroup has.
pub(crate) fn name() -> String {
    format!("{PREFIX}{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed))
}

/// Makes a command start inside the cgroup at this directory.
pub(crate) fn enter(directory: &Path, command: &mut std::process::Command) {
    let procs = std::ffi::CString::new(directory.join("cgroup.procs").into_os_string().into_encoded_bytes());
    let procs = procs.expect("a path has no NUL");
    // SAFETY: the closure makes three system calls and allocates nothing.
    unsafe {
        std::os::unix::process::CommandExt::pre_exec(command, move || {
            let file = rustix::fs::open(&procs, rustix::fs::OFlags::WRONLY, rustix::fs::Mode::empty())?;
            rustix::io::write(&file, b"0")?;
            Ok(())
        });
    }
}

/// Removes cgroups below a mount that remain from killed test runs.
pub(crate) fn remove_leftovers(mount: &Path) {
    let Ok(entries) = fs::read_dir(mount) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let Some(pid) = name.strip_prefix(PREFIX).and_then(|rest| rest.split('-').next()) else { continue };
        if !Path::new("/proc").join(pid).exists() {
            remove(&entry.path());
        }
    }
}

/// Kills the remaining processes of a test's cgroup, and removes the cgroup with its children.
pub(crate) fn remove(path: &Path) {
    let Ok(entries) = fs::read_dir(path) else { return };
    for entry in entries.flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove(&entry.path());
        }
    }
    // A killed process stays in its cgroup until its parent reaps it.
    for _ in 0..1000 {
        let pids = fs::read_to_string(path.join("cgroup.procs")).unwrap_or_default();
        for pid in pids.lines().filter_map(|pid| pid.parse().ok()).filter_map(rustix::process::Pid::from_raw)
        {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
        if fs::remove_dir(path).is_ok() || !path.exists() {
            return;
        }
        std::thread::park_timeout(std::time::Duration::from_millis(5));
    }
    eprintln!("cannot remove {}", path.display());
}

/// The mount point of the file system of type cgroup2.
pub fn mount() -> PathBuf {
    let table = fs::read_to_string("/proc/self/mountinfo").expect("read the mount table");
    let line = table.lines().find(|line| line.contains(" - cgroup2 ")).expect("cgroup2 is mounted");
    PathBuf::from(line.split(' ').nth(4).expect("the line has a mount point"))
}
