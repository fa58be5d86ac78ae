//! Finds the mount points of cgroups by the type of the file system.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};

/// The mount points of cgroups.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mounts {
    /// The mount of version 2.
    pub unified: Option<PathBuf>,
    /// The mount of the controller `cpu` of version 1.
    pub cpu: Option<PathBuf>,
    /// The mount of the controller `cpuacct` of version 1, which is usually the mount of `cpu`.
    pub cpuacct: Option<PathBuf>,
}

impl Mounts {
    /// Reads the mounts of this process's mount namespace.
    ///
    /// # Errors
    /// If the mounts cannot be read.
    pub fn read() -> io::Result<Self> {
        Ok(Self::parse(&fs::read("/proc/self/mountinfo")?))
    }

    /// Parses the text of `mountinfo` (proc_pid_mountinfo(5)). The first mount of each kind is
    /// used.
    fn parse(text: &[u8]) -> Self {
        let mut mounts = Self::default();
        for line in text.split(|byte| *byte == b'\n') {
            let mut fields = line.split(|byte| *byte == b' ');
            let Some(at) = fields.nth(4) else { continue };
            let mut kind = fields.skip_while(|field| *field != b"-").skip(1);
            let (kind, options) = (kind.next().unwrap_or_default(), kind.nth(1).unwrap_or_default());
            let has = |name: &[u8]| options.split(|byte| *byte == b',').any(|option| option == name);
            let path = || Some(unescaped(at));
            if kind == b"cgroup2" && mounts.unified.is_none() {
                mounts.unified = path();
            }
            if kind == b"cgroup" && has(b"cpu") && mounts.cpu.is_none() {
                mounts.cpu = path();
            }
            if kind == b"cgroup" && has(b"cpuacct") && mounts.cpuacct.is_none() {
                mounts.cpuacct = path();
            }
        }
        mounts
    }
}

/// Decodes a path with blanks and line ends in octal.
fn unescaped(field: &[u8]) -> PathBuf {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    // Bound: each iteration consumes at least one byte.
    while let Some((first, tail)) = rest.split_first() {
        let octal = tail.get(..3).filter(|_| *first == b'\\');
        let octal = octal.and_then(|digits| u8::from_str_radix(str::from_utf8(digits).ok()?, 8).ok());
        bytes.push(octal.unwrap_or(*first));
        rest = if octal.is_some() { &tail[3..] } else { tail };
    }
    Path::new(&OsString::from_vec(bytes)).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cgroup_mounts_are_found_by_file_system_type() {
        let text = b"24 1 0:22 / /proc rw,nosuid - proc proc rw\n\
            30 24 0:26 / /sys/fs/cgroup ro,nosuid shared:9 - tmpfs tmpfs ro,mode=755\n\
            31 30 0:27 / /sys/fs/cgroup/unified rw,nosuid shared:10 - cgroup2 cgroup2 rw,nsdelegate\n\
            32 30 0:28 / /a\\040b\\134 rw shared:11 master:1 - cgroup cgroup rw,cpu,cpuacct\n\
            33 30 0:29 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n";
        let expected = Mounts {
            unified: Some("/sys/fs/cgroup/unified".into()),
            cpu: Some("/a b\\".into()),
            cpuacct: Some("/a b\\".into()),
        };
        assert_eq!(Mounts::parse(text), expected);
        assert_eq!(Mounts::parse(b"nonsense\n\n - \n"), Mounts::default());
    }
}
