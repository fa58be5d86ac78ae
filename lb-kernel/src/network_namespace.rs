//! A network namespace: which one processes are in, and sockets that are made in another one than ours.
//!
//! A thread that has entered a namespace stays there, and so none but a thread of its own ever does.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::mpsc::{Sender, channel};

use rustix::thread::LinkNameSpaceType;

use super::cgroup;

/// Processes of a cgroup that are asked for their namespace, at most.
const ASKED: usize = 64;

/// A network namespace: the number of its inode, which no other one has while it lasts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NamespaceId(u64);

impl NamespaceId {
    /// That of the calling thread.
    ///
    /// # Errors
    /// If `/proc` is not mounted.
    pub fn ours() -> io::Result<Self> {
        Self::read("thread-self")
    }

    /// That of a process.
    ///
    /// # Errors
    /// If the process is gone, or may not be looked at: that of another user's process takes CAP_SYS_PTRACE.
    pub fn of(pid: u32) -> io::Result<Self> {
        Self::read(&pid.to_string())
    }

    fn read(process: &str) -> io::Result<Self> {
        fs::metadata(format!("/proc/{process}/ns/net")).map(|metadata| Self(metadata.ino()))
    }
}

/// The network namespace of a cgroup's processes, and one of these; `None` if there are none. Where they are in several, it is
/// `known` if one of them is there.
///
/// # Errors
/// If there are processes and none of them may be looked at.
pub fn of_cgroup(cgroup: &Path, known: Option<NamespaceId>) -> io::Result<Option<(NamespaceId, u32)>> {
    let mut first = None;
    let mut refused = None;
    for pid in cgroup::each_process(cgroup).take(ASKED) {
        match NamespaceId::of(pid) {
            Ok(id) if known.is_none_or(|known| known == id) => return Ok(Some((id, pid))),
            Ok(id) => drop(first.get_or_insert((id, pid))),
            // It has ended.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => drop(refused.get_or_insert(error)),
        }
    }
    match (first, refused) {
        (None, Some(error)) => Err(error),
        (first, _) => Ok(first),
    }
}

/// Moves the calling thread into a process's network namespace.
///
/// # Errors
/// If the process is gone, or its namespace may not be entered, which takes CAP_SYS_ADMIN.
pub fn enter(pid: u32) -> io::Result<()> {
    let namespace = File::open(format!("/proc/{pid}/ns/net"))?;
    Ok(rustix::thread::move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?)
}

/// What a thread in a namespace is to do.
type Work = Box<dyn FnOnce() + Send>;

/// A thread in a network namespace. It ends when this is dropped, and until then the namespace lasts.
#[derive(Debug)]
pub struct NetworkNamespace {
    work: Sender<Work>,
}

impl NetworkNamespace {
    /// Enters that of a process, if it is the one that it was.
    ///
    /// # Errors
    /// If the process is gone or in another namespace by now, its namespace may not be entered, which takes CAP_SYS_ADMIN, or no
    /// thread can be made.
    pub fn of(pid: u32, id: NamespaceId) -> io::Result<Self> {
        let (work, to_do) = channel::<Work>();
        let (entered, result) = channel();
        let thread = move || {
            let result = enter(pid).and_then(|()| NamespaceId::ours()).and_then(|now| match now == id {
                true => Ok(()),
                false => Err(io::Error::other("its process has gone to another one")),
            });
            let is_there = result.is_ok();
            if entered.send(result).is_ok() && is_there {
                // Until it is dropped.
                to_do.iter().for_each(|work| work());
            }
        };
        std::thread::Builder::new().name("namespace".to_owned()).spawn(thread)?;
        result.recv().map_err(io::Error::other)??;
        Ok(Self { work })
    }

    /// Has `work` done there, after all that it was given before. It must not block.
    pub fn carry_out(&self, work: impl FnOnce() + Send + 'static) {
        // The thread takes work for as long as there is a sender.
        let _ = self.work.send(Box::new(work));
    }

    /// What `make` makes there, which must not block. Waits for it.
    ///
    /// # Errors
    /// Those of `make`.
    pub fn make<T: Send + 'static>(
        &self,
        make: impl FnOnce() -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        let (made, result) = channel();
        self.carry_out(move || drop(made.send(make())));
        result.recv().map_err(io::Error::other)?
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};

    use rustix::thread::UnshareFlags;

    use super::*;

    /// A process in a network namespace of its own.
    struct Elsewhere(Child);

    impl Elsewhere {
        fn start() -> Self {
            let mut command = Command::new("cat");
            command.stdin(std::process::Stdio::piped());
            // SAFETY: the closure makes one system call and allocates nothing.
            unsafe {
                std::os::unix::process::CommandExt::pre_exec(&mut command, || {
                    rustix::thread::unshare_unsafe(UnshareFlags::NEWNET)?;
                    Ok(())
                });
            }
            Self(command.spawn().expect("root starts a process in a namespace"))
        }
    }

    impl Drop for Elsewhere {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    #[test]
    fn what_is_made_in_a_namespace_is_there_and_the_caller_is_not() {
        let elsewhere = Elsewhere::start();
        let ours = NamespaceId::ours().unwrap();
        let theirs = NamespaceId::of(elsewhere.0.id()).unwrap();
        assert_ne!(ours, theirs);
        let namespace = NetworkNamespace::of(elsewhere.0.id(), theirs).unwrap();
        assert_eq!(namespace.make(NamespaceId::ours).unwrap(), theirs);
        assert_eq!(namespace.make(|| Err::<(), _>(io::Error::other("no"))).unwrap_err().to_string(), "no");
        assert_eq!(NamespaceId::ours().unwrap(), ours);
        let error = NetworkNamespace::of(elsewhere.0.id(), ours).unwrap_err();
        assert_eq!(error.to_string(), "its process has gone to another one");
    }

    #[test]
    fn a_process_that_is_gone_has_none() {
        let elsewhere = Elsewhere::start();
        let (pid, id) = (elsewhere.0.id(), NamespaceId::of(elsewhere.0.id()).unwrap());
        drop(elsewhere);
        assert!(NamespaceId::of(pid).is_err() && NetworkNamespace::of(pid, id).is_err());
    }
}
