//! Features that older kernels lack. A missing feature is the only reason for a test to be skipped,
//! or to expect another result.
//!
//! The product probes features and never reads the kernel's version. The tests read the version, so
//! they notice if a probe wrongly reports a feature as absent. On a kernel with all features, no
//! test is skipped or has other expectations.

use std::fmt;
use std::io::Write;

/// A kernel's version: major and minor number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub u32, pub u32);

impl Version {
    /// The version of the running kernel.
    pub fn running() -> Self {
        let uname = rustix::system::uname();
        let release = uname.release().to_string_lossy();
        Self::parse(&release).unwrap_or_else(|| panic!("a kernel release without a version: {release}"))
    }

    /// Parses the version at the start of a release: `6.12.117+deb13-cloud-amd64` and `6.12~rc7`
    /// are 6.12.
    pub fn parse(release: &str) -> Option<Self> {
        let (major, rest) = release.split_once('.')?;
        let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
        Some(Self(major.parse().ok()?, rest[..end].parse().ok()?))
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.0, self.1)
    }
}

/// A feature of Linux, with the first version that has it.
#[derive(Clone, Copy, Debug)]
pub struct Feature {
    name: &'static str,
    since: Version,
}

/// Compare-and-swap, and atomic adds that return the old value. Without this feature, all flow
/// records are in the overflow table.
pub const FETCHING_ATOMICS: Feature = Feature { name: "fetching atomics", since: Version(5, 12) };
/// Without this feature, maps and programs count against RLIMIT_MEMLOCK.
pub const MAPS_ARE_NOT_LOCKED_MEMORY: Feature =
    Feature { name: "memory of maps in memory cgroups", since: Version(5, 11) };
/// Without this feature, socklb computes a map's memory from the map's size, instead of reading it
/// from the kernel.
pub const MAPS_REPORT_THEIR_MEMORY: Feature = Feature { name: "map_mem_usage", since: Version(6, 4) };
/// Sockets report the cookie of their network namespace. Without this feature, flow records are not
/// compared with lists of sockets.
pub const NAMESPACE_COOKIES: Feature = Feature { name: "SO_NETNS_COOKIE", since: Version(5, 14) };
/// Without this feature, a refused connect fails with EPERM, regardless of the configured errno.
pub const SET_RETVAL: Feature = Feature { name: "bpf_set_retval", since: Version(5, 18) };
/// Without this feature, connections of MPTCP sockets are counted as active after their end.
pub const SKC_TO_MPTCP_SOCK: Feature = Feature { name: "bpf_skc_to_mptcp_sock", since: Version(6, 0) };

/// The verifier inserts barriers into paths that are unsafe only under speculative execution.
/// Without this feature, a process without CAP_PERFMON cannot load programs with such paths.
pub const SPECULATION_BARRIERS: Feature = Feature { name: "speculation barriers", since: Version(6, 17) };

impl Feature {
    /// Whether the running kernel has the feature.
    pub fn is_here(&self) -> bool {
        Version::running() >= self.since
    }

    /// Whether the calling test must be skipped because this kernel lacks the feature. If so,
    /// prints a line for the tests' driver. Prefer a test that asserts the promised behaviour
    /// without the feature.
    #[must_use]
    pub fn skips(&self) -> bool {
        if self.is_here() {
            return false;
        }
        let thread = std::thread::current();
        let test = thread.name().unwrap_or("a test");
        print_line(&format!("skipped: {test}: needs Linux {} ({})", self.since, self.name));
        true
    }
}

/// The errno of a connect that socklb refuses with `errno`.
pub fn refusal(errno: i32) -> i32 {
    if SET_RETVAL.is_here() { errno } else { libc::EPERM }
}

/// Prints a line that libtest does not capture, so that the tests' driver receives the line even if
/// the test passes.
pub fn print_line(line: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}").and_then(|()| out.flush()).expect("print a line");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_release_begins_with_its_version() {
        for (release, version) in [
            ("5.10.0-46-cloud-amd64", Version(5, 10)),
            ("6.12.117+deb13-cloud-amd64", Version(6, 12)),
            ("7.3~rc7-cloud-amd64", Version(7, 3)),
            ("6.18", Version(6, 18)),
        ] {
            assert_eq!(Version::parse(release), Some(version), "{release}");
        }
        assert_eq!(Version::parse("unknown"), None);
    }

    #[test]
    fn versions_order_by_number() {
        assert!(Version(5, 10) < Version(5, 9 + 3) && Version(5, 18) < Version(6, 0));
        assert!(Version(6, 2) < Version(6, 12));
    }

    #[test]
    fn features_of_the_running_kernel_are_not_skipped() {
        let here = Feature { name: "what it is", since: Version::running() };
        assert!(here.is_here() && !here.skips());
    }
}
