//! What a kernel may lack by its age: the only reason for which a test may expect less of it, or be skipped.
//!
//! The product probes and never asks for a version. The tests ask, so that a probe that wrongly says no is noticed: on
//! a kernel that is new enough nothing here can lower what is expected, and nothing can be skipped.

use std::fmt;
use std::io::Write;

/// A kernel's version as far as features depend on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub u32, pub u32);

impl Version {
    /// The running kernel's.
    pub fn running() -> Self {
        let uname = rustix::system::uname();
        let release = uname.release().to_string_lossy();
        Self::parse(&release).unwrap_or_else(|| panic!("a kernel release without a version: {release}"))
    }

    /// The version that a release begins with: `6.12.117+deb13-cloud-amd64` is 6.12, and so is `6.12~rc7`.
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

/// A feature of Linux, with the version that brought it.
#[derive(Clone, Copy, Debug)]
pub struct Feature {
    name: &'static str,
    since: Version,
}

/// Compare-and-swap and fetching adds. Without: all flow records are in the overflow table.
pub const FETCHING_ATOMICS: Feature = Feature { name: "fetching atomics", since: Version(5, 12) };
/// Without: maps and programs count against RLIMIT_MEMLOCK.
pub const MAPS_ARE_NOT_LOCKED_MEMORY: Feature =
    Feature { name: "memory of maps in memory cgroups", since: Version(5, 11) };
/// Without: what a map is said to take is computed from its size, not from what it has.
pub const MAPS_TELL_THEIR_MEMORY: Feature = Feature { name: "map_mem_usage", since: Version(6, 4) };
/// Sockets tell the cookie of their network namespace. Without: flow records are not compared with lists of sockets.
pub const NAMESPACE_COOKIES: Feature = Feature { name: "SO_NETNS_COOKIE", since: Version(5, 14) };
/// Without: a refused connect fails with EPERM, whatever is configured.
pub const SET_RETVAL: Feature = Feature { name: "bpf_set_retval", since: Version(5, 18) };
/// Without: connections of MPTCP sockets stay counted.
pub const SKC_TO_MPTCP_SOCK: Feature = Feature { name: "bpf_skc_to_mptcp_sock", since: Version(6, 0) };

/// The verifier puts a barrier where a path that only a processor's guess would take is not to its liking. Without:
/// programs with such paths are refused to whoever has no CAP_PERFMON.
pub const SPECULATION_BARRIERS: Feature = Feature { name: "speculation barriers", since: Version(6, 17) };

impl Feature {
    /// Whether the running kernel is new enough.
    pub fn is_here(&self) -> bool {
        Version::running() >= self.since
    }

    /// Whether the calling test has nothing to show on this kernel; says so where the test's driver sees it. Better
    /// than that is a test that asserts what socklb promises without the feature.
    #[must_use]
    pub fn skips(&self) -> bool {
        if self.is_here() {
            return false;
        }
        let thread = std::thread::current();
        let test = thread.name().unwrap_or("a test");
        say(&format!("skipped: {test}: needs Linux {} ({})", self.since, self.name));
        true
    }
}

/// What a connect fails with that socklb refuses with `errno`.
pub fn refusal(errno: i32) -> i32 {
    if SET_RETVAL.is_here() { errno } else { libc::EPERM }
}

/// Prints a line past the capture of a test's output: it is for whoever drives the tests, also if the test passes.
pub fn say(line: &str) {
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
    fn nothing_is_skipped_that_the_kernel_has() {
        let here = Feature { name: "what it is", since: Version::running() };
        assert!(here.is_here() && !here.skips());
    }
}
