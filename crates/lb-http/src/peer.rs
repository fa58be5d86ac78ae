//! The process at the other end of a Unix socket, as the kernel reports it. Also finds the number
//! of a group by its name.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// Credentials of a connected process, at the time of its connect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerCredentials {
    /// Effective user.
    pub user: u32,
    /// Groups, the effective one first.
    pub groups: Vec<u32>,
    /// Process ID; 0 if the process is in a PID namespace that is not visible from this process.
    pub process: u32,
}

impl PeerCredentials {
    /// Reads the credentials of a connected socket's peer (`SO_PEERCRED`, `SO_PEERGROUPS`).
    ///
    /// # Errors
    /// If the kernel does not report them.
    pub fn of(socket: impl AsFd) -> io::Result<Self> {
        let libc::ucred { pid, uid, gid } = credentials(&socket)?;
        let mut groups = vec![gid];
        groups.extend(further_groups(&socket)?);
        Ok(Self { user: uid, groups, process: u32::try_from(pid).unwrap_or(0) })
    }
}

/// Reads `SO_PEERCRED`. Does not use rustix, in which process IDs are never 0: the kernel reports 0
/// for a process in another PID namespace.
fn credentials(socket: &impl AsFd) -> io::Result<libc::ucred> {
    let mut credentials = libc::ucred { pid: 0, uid: libc::uid_t::MAX, gid: libc::gid_t::MAX };
    let mut bytes =
        libc::socklen_t::try_from(size_of::<libc::ucred>()).expect("the structure has only a few bytes");
    // SAFETY: the kernel writes at most `bytes` bytes to the structure, which has that length.
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut credentials).cast(),
            &raw mut bytes,
        )
    };
    if result == 0 { Ok(credentials) } else { Err(io::Error::last_os_error()) }
}

/// Reads `SO_PEERGROUPS`, which exists since Linux 4.13.
fn further_groups(socket: &impl AsFd) -> io::Result<Vec<u32>> {
    const SO_PEERGROUPS: libc::c_int = 59;
    // The maximum number of groups of a process.
    const MOST: usize = 65_536;
    let mut groups: Vec<libc::gid_t> = vec![0; 64];
    // Bound: a second attempt with the size that the kernel returns is enough.
    for _ in 0..2 {
        let mut bytes = libc::socklen_t::try_from(size_of_val(&groups[..])).unwrap_or(libc::socklen_t::MAX);
        // SAFETY: the kernel writes at most `bytes` bytes to the buffer, which has that length, and
        // stores the written length in `bytes`.
        let result = unsafe {
            libc::getsockopt(
                socket.as_fd().as_raw_fd(),
                libc::SOL_SOCKET,
                SO_PEERGROUPS,
                groups.as_mut_ptr().cast(),
                &raw mut bytes,
            )
        };
        let count = bytes as usize / size_of::<libc::gid_t>();
        if result == 0 {
            groups.truncate(count);
            return Ok(groups);
        }
        let error = io::Error::last_os_error();
        if error.raw_os_error() != Some(libc::ERANGE) || count > MOST {
            return Err(error);
        }
        groups.resize(count, 0);
    }
    Err(io::Error::from_raw_os_error(libc::ERANGE))
}

/// Returns the number of a group; `None` if the group does not exist. `name` is the group's name,
/// or its number in digits. Queries the configured name services of the host. The query blocks
/// while a name service blocks, for example a directory service.
///
/// # Errors
/// If the name services fail.
pub fn group_number(name: &str) -> io::Result<Option<u32>> {
    if let Ok(number) = name.parse() {
        return Ok(Some(number));
    }
    let Ok(name) = CString::new(name) else { return Ok(None) };
    // The buffer must also be large enough for all members of the group.
    const LONGEST: usize = 16 << 20;
    let mut buffer: Vec<libc::c_char> = vec![0; 16 << 10];
    loop {
        let mut found = std::ptr::null_mut();
        // SAFETY: all zeros are a valid value of this structure, which has only numbers and
        // pointers.
        let mut group: libc::group = unsafe { std::mem::zeroed() };
        // SAFETY: the name ends with a zero, the buffer has the given length, and the function
        // writes only to these arguments.
        let error = unsafe {
            libc::getgrnam_r(name.as_ptr(), &raw mut group, buffer.as_mut_ptr(), buffer.len(), &raw mut found)
        };
        match error {
            0 if found.is_null() => return Ok(None),
            0 => return Ok(Some(group.gr_gid)),
            // Systems report a missing group by different errors.
            libc::ENOENT | libc::ESRCH | libc::EBADF | libc::EPERM => return Ok(None),
            libc::ERANGE if buffer.len() < LONGEST => buffer.resize(4 * buffer.len(), 0),
            error => return Err(io::Error::from_raw_os_error(error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn the_other_end_is_this_process() {
        let (here, _there) = UnixStream::pair().unwrap();
        let peer = PeerCredentials::of(&here).unwrap();
        assert_eq!(peer.user, rustix::process::geteuid().as_raw());
        assert_eq!(peer.groups[0], rustix::process::getegid().as_raw());
        assert_eq!(peer.process, std::process::id());
        let ours = rustix::process::getgroups().unwrap();
        assert!(ours.iter().all(|group| peer.groups.contains(&group.as_raw())), "{peer:?}");
    }

    /// Restricts the look-up of groups to files. The test suite is linked statically, and in a
    /// static program the C library cannot load the host's name services.
    fn look_only_into_files() {
        #[cfg(target_feature = "crt-static")]
        {
            unsafe extern "C" {
                fn __nss_configure_lookup(
                    database: *const libc::c_char,
                    services: *const libc::c_char,
                ) -> libc::c_int;
            }
            // SAFETY: both strings end with a zero and outlive the call, which copies them.
            let error = unsafe { __nss_configure_lookup(c"group".as_ptr(), c"files".as_ptr()) };
            assert_eq!(error, 0);
        }
    }

    #[test]
    fn groups_have_names_and_numbers() {
        look_only_into_files();
        assert_eq!(group_number("root").unwrap(), Some(0));
        assert_eq!(group_number("4711").unwrap(), Some(4711));
        assert_eq!(group_number("no-such-group-here").unwrap(), None);
        assert_eq!(group_number("a\0b").unwrap(), None);
    }
}
