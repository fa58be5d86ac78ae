//! The cgroup of this process. A program that runs a backend registers with this cgroup, because
//! the backend's command is in the same cgroup.

use std::fs;
use std::path::{Path, PathBuf};

use super::{Mounts, below_the_mount};

/// The cgroup of this process, relative to the mount. The path is empty in a container in which the
/// container's own cgroup is the root. `None` if the process is in the host's root cgroup, which
/// would show the use of the whole host.
pub fn own_cgroup() -> Option<PathBuf> {
    let text = fs::read_to_string("/proc/self/cgroup").ok()?;
    let mounts = Mounts::read().ok()?;
    // Kernel fact: every cgroup of version 2 has the file `cgroup.type`, except for the host's root
    // cgroup.
    let is_below = |mount: &Path| mount.join("cgroup.type").exists();
    own(&text, mounts.unified.as_deref().is_some_and(is_below))
}

/// Identifies the tree of cgroups that this process sees, by its cgroup namespace. For all
/// processes with the same tree, a path names the same cgroup.
pub fn own_tree() -> Option<String> {
    fs::read_link("/proc/self/ns/cgroup").ok()?.into_os_string().into_string().ok()
}

/// Parses the text of `/proc/self/cgroup`, see cgroups(7). If the process is below the root of the
/// version 1 controller `cpu`, returns the process's cgroup of this controller. If the process is
/// not below that root, returns its version 2 cgroup. `is_rooted_below`: whether the root that this
/// process sees is below the host's root.
fn own(text: &str, is_rooted_below: bool) -> Option<PathBuf> {
    let lines = || text.lines().filter_map(|line| line.split_once(':')?.1.split_once(':'));
    let of_cpu = lines().find(|(controllers, _)| controllers.split(',').any(|one| one == "cpu"));
    let version_1 = of_cpu.and_then(|(_, path)| below_the_mount(path));
    version_1.or_else(|| {
        let (_, path) = lines().find(|(controllers, _)| controllers.is_empty())?;
        if path == "/" { is_rooted_below.then(PathBuf::new) } else { below_the_mount(path) }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_cgroup_is_relative_to_the_mount() {
        let own = |text, is_rooted_below| {
            own(text, is_rooted_below).map(|path| path.to_string_lossy().into_owned())
        };
        let cases = [
            ("0::/system.slice/users.service\n", false, Some("system.slice/users.service")),
            ("0::/\n", false, None),
            ("0::/\n", true, Some("")),
            // The cgroup is outside of the namespace's root.
            ("0::/../other\n", true, None),
            ("4:cpu,cpuacct:/a/b\n1:name=systemd:/c\n0::/d\n", false, Some("a/b")),
            ("4:cpu,cpuacct:/\n0::/d\n", false, Some("d")),
            ("4:cpuset:/a\n", false, None),
            ("nonsense", true, None),
        ];
        for (text, is_rooted_below, expected) in cases {
            assert_eq!(
                own(text, is_rooted_below).as_deref(),
                expected,
                "{text:?}, is_rooted_below {is_rooted_below}"
            );
        }
    }
}
