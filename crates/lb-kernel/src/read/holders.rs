//! Finds the sockets that processes have open, with the kernel's iterator over open files
//! (`iter/task_file`).
//!
//! Kernel facts: the iterator exists since Linux 5.8 and requires CAP_BPF and CAP_PERFMON. The
//! iterator shows only the processes of the PID namespace in which it is opened, so this module
//! returns an error if this process is in another namespace than the host's. Sockets that are in
//! transit in a message (SCM_RIGHTS), or are only registered with io_uring, are not in any
//! process's list of open files.

use std::collections::BTreeSet;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use aya::Btf;
use aya::programs::Iter;

use crate::client::object;
use crate::error::DatapathError;
use crate::host::loader::{self, Globals, Image};
use crate::host::{btf, loader::objects};
use crate::sys;

const PROGRAM: &str = "socklb_holders";
/// The name of the iterator.
const ITERATOR: &str = "task_file";

/// Checks whether this process can list the sockets that processes have open.
///
/// # Errors
/// The reason why this process cannot list them.
pub fn can_look() -> Result<(), DatapathError> {
    in_use(&BTreeSet::new()).map(drop)
}

/// The cookies in `wanted` that belong to sockets that a process has open.
///
/// # Errors
/// If the kernel does not list open files, or not those of all processes of the host.
pub fn in_use(wanted: &BTreeSet<u64>) -> Result<BTreeSet<u64>, DatapathError> {
    sees_all_processes().map_err(DatapathError::Holders)?;
    let mut found = BTreeSet::new();
    let see = |cookie: u64| {
        if wanted.contains(&cookie) {
            found.insert(cookie);
        }
    };
    read(open()?, see).map_err(DatapathError::Holders)?;
    Ok(found)
}

/// Checks that this process is in the host's PID namespace. Kernel fact: the inode of the initial
/// PID namespace is always the same.
fn sees_all_processes() -> io::Result<()> {
    /// `PROC_PID_INIT_INO`
    const FIRST: u64 = 0xefff_fffc;
    if std::fs::metadata("/proc/self/ns/pid")?.ino() == FIRST {
        return Ok(());
    }
    Err(io::Error::new(
        io::ErrorKind::Unsupported,
        "this process is not in the host's PID namespace, so it does not see all processes",
    ))
}

/// Loads the program and begins an iteration.
fn open() -> Result<std::fs::File, DatapathError> {
    let unsupported = |error: Box<dyn std::error::Error + Send + Sync>| {
        DatapathError::Holders(io::Error::new(io::ErrorKind::Unsupported, error))
    };
    let btf::FileOffsets { inode, private_data, mode, sock, cookie } =
        btf::file_offsets(Path::new(btf::VMLINUX)).map_err(DatapathError::Holders)?;
    #[expect(
        clippy::disallowed_methods,
        reason = "aya needs it for an iterator; no start of the daemon looks for holders"
    )]
    let types = Btf::from_sys_fs().map_err(|error| unsupported(error.into()))?;
    let offsets = [
        ("FILE_INODE", inode),
        ("FILE_PRIVATE_DATA", private_data),
        ("INODE_MODE", mode),
        ("SOCKET_SOCK", sock),
        ("SOCK_COOKIE", cookie),
    ];
    let globals: Globals<'_> =
        offsets.iter().map(|(name, value)| (*name, (bytemuck::bytes_of(value), true))).collect();
    // The load also creates the object's maps, which are closed at the end of this function.
    let mut object =
        loader::load_unpinned(&Image::new(objects::CLIENT, globals, &[], None)?, &object::smallest())?;
    let refused = |error| DatapathError::refused(PROGRAM, error);
    let program: &mut Iter = object
        .program_mut(PROGRAM)
        .expect("a test checks the object's programs")
        .try_into()
        .map_err(refused)?;
    sys::without_signals(|| program.load(ITERATOR, &types)).map_err(refused)?;
    let link = program.attach().and_then(|link| program.take_link(link)).map_err(refused)?;
    link.into_file().map_err(|error| unsupported(error.into()))
}

fn read(mut iteration: impl Read, mut each: impl FnMut(u64)) -> io::Result<()> {
    const COOKIE: usize = size_of::<u64>();
    let mut buffer = vec![0u8; 32 << 10];
    let mut filled = 0;
    // Bound: the host has a limited number of open files.
    loop {
        let length = match iteration.read(&mut buffer[filled..]) {
            Ok(0) if filled == 0 => return Ok(()),
            Ok(0) => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "output ends inside a cookie")),
            Ok(length) => filled + length,
            // Kernel fact: after a million files without a socket among them, a read returns this
            // error; the next read continues at the same position.
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
                continue;
            }
            Err(error) => return Err(error),
        };
        let whole = length - length % COOKIE;
        for cookie in buffer[..whole].chunks_exact(COOKIE) {
            each(u64::from_ne_bytes(cookie.try_into().expect("each chunk has eight bytes")));
        }
        buffer.copy_within(whole..length, 0);
        filled = length - whole;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_object_contains_the_iterator() {
        assert!(aya_obj::Object::parse(objects::CLIENT).unwrap().programs.contains_key(PROGRAM));
    }

    #[test]
    fn cookies_are_read_from_pieces_of_any_length() {
        struct Pieces(Vec<Vec<u8>>);
        impl Read for Pieces {
            fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
                let Some(piece) = self.0.pop() else { return Ok(0) };
                if piece.is_empty() {
                    return Err(io::Error::from(io::ErrorKind::WouldBlock));
                }
                buffer[..piece.len()].copy_from_slice(&piece);
                Ok(piece.len())
            }
        }
        let bytes: Vec<u8> = [1u64, 2, 3].iter().flat_map(|cookie| cookie.to_ne_bytes()).collect();
        for cut in 1..bytes.len() {
            let (first, rest) = bytes.split_at(cut);
            let mut found = Vec::new();
            let pieces = Pieces(vec![rest.to_vec(), Vec::new(), first.to_vec()]);
            read(pieces, |cookie| found.push(cookie)).unwrap();
            assert_eq!(found, [1, 2, 3]);
        }
        assert!(read(&bytes[..12], |_| {}).is_err());
    }
}
