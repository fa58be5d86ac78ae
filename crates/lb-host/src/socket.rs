//! Binds a program's Unix socket to a path. Does not wait for a process that already listens at
//! that path. For UDP sockets, converts addresses to the family of the socket.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use tokio::net::UnixListener;

use crate::trust;

/// The form of an address that a socket of this family accepts.
pub fn of_family(address: SocketAddr, is_v6: bool) -> SocketAddr {
    match address.ip() {
        IpAddr::V4(v4) if is_v6 => SocketAddr::new(v4.to_ipv6_mapped().into(), address.port()),
        IpAddr::V4(_) | IpAddr::V6(_) => address,
    }
}

/// A socket that is bound, but does not have its final path yet.
pub struct Bound {
    listener: Option<UnixListener>,
    hidden: PathBuf,
    path: PathBuf,
}

/// Binds the socket under a temporary name. So errors occur before the program changes the kernel's
/// state, and no client can connect before the program can answer. If no process listens on an
/// existing socket at the final path, an ended process has left this socket, and the new socket
/// replaces it. The socket's owner and the members of the group `admins` may open the socket.
///
/// # Errors
/// If the directory cannot be created or is not trusted, if another process answers on the socket,
/// or if an existing object at the path is not a socket.
pub fn bind(run: &Path, name: &str, admins: Option<u32>) -> io::Result<Bound> {
    trust::make_directory(run)?;
    trust::check_directory(run, "--run").map_err(io::Error::other)?;
    let path = run.join(name);
    let hidden = run.join(format!("{name}.new"));
    for path in [&path, &hidden] {
        match std::fs::symlink_metadata(path) {
            Ok(metadata) if metadata.file_type().is_socket() => {
                if is_answered(path)? {
                    let text = "another socklb process answers on this socket: stop that process, or name \
                                another directory with --run";
                    return Err(io::Error::new(io::ErrorKind::AddrInUse, text));
                }
                std::fs::remove_file(path)?;
            }
            Ok(_) => {
                return Err(io::Error::new(
                    io::ErrorKind::AlreadyExists,
                    "there is a file at this path that is not a socket",
                ));
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    let listener = UnixListener::bind(&hidden)?;
    // Only root may change a file's group to any group; other users may choose only their own
    // groups. If the program runs as another user, the service manager controls the access.
    if admins.is_some() && rustix::process::geteuid().is_root() {
        std::os::unix::fs::chown(&hidden, None, admins)?;
    }
    std::fs::set_permissions(&hidden, std::fs::Permissions::from_mode(0o660))?;
    Ok(Bound { listener: Some(listener), hidden, path })
}

/// Whether a process listens on a socket. The function does not wait. If the queue of the socket is
/// full, for example because the daemon is stopped, connect(2) returns EAGAIN, which also means
/// that a process listens.
fn is_answered(path: &Path) -> io::Result<bool> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    match rustix::net::connect(&socket, &SocketAddrUnix::new(path)?) {
        Ok(()) | Err(Errno::AGAIN) => Ok(true),
        Err(Errno::CONNREFUSED) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

impl Bound {
    /// Renames the socket to its final path, so that clients can connect.
    ///
    /// # Errors
    /// If the rename fails.
    pub fn show(mut self) -> io::Result<UnixListener> {
        std::fs::rename(&self.hidden, &self.path)?;
        Ok(self.listener.take().expect("the listener is taken only here"))
    }
}

impl Drop for Bound {
    fn drop(&mut self) {
        // Removes the socket if the start fails.
        if self.listener.is_some() {
            let _ = std::fs::remove_file(&self.hidden);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_socket_of_another_process_is_refused_and_an_abandoned_one_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let run = folder.path().join("run");
        let bound = || bind(&run, "x.sock", None).map(drop).map_err(|error| error.to_string());
        assert_eq!(bound(), Ok(()));
        let path = run.join("x.sock");
        let other = UnixListener::bind(&path).unwrap();
        let refused = "another socklb process answers on this socket: stop that process, or name another \
                       directory with --run";
        assert_eq!(bound(), Err(refused.to_owned()));
        drop(other);
        assert_eq!((bound(), path.exists()), (Ok(()), false));
        std::fs::create_dir(&path).unwrap();
        assert_eq!(bound(), Err("there is a file at this path that is not a socket".to_owned()));
    }
}
