//! Finds the network namespace of a client: that of the oldest process in its cgroup.
//!
//! Any process of a cgroup can create further namespaces, and begin any number of flows in them.
//! But no process can become older than the process that started the client. So this module selects
//! the namespace by the age of processes, and not by the number of flows.

use std::io;
use std::path::Path;
use std::time::Duration;

use lb_diag::SocketLists;

use super::namespaces::open_within;
use crate::client::flow_table::FlowTable;
use crate::error::DatapathError;
use crate::host::process::{monotonic_of_start, numbers_are_ours, start_of};
use crate::host::{cgroup, pins::Pins};
use crate::sys::clock::monotonic_ns;
use crate::sys::network_namespace::{NamespaceId, open};

/// The maximum number of processes of a cgroup that one search compares. Processes of the cgroup
/// itself come first, then those of its descendants. Reading the age of a process takes about 10
/// µs.
const COMPARED: usize = 4096;

/// The network namespace of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientNamespace {
    pub id: NamespaceId,
    /// The number by which kernel programs identify the namespace. `None` before Linux 5.14, and
    /// for a namespace other than this process's if CAP_SYS_ADMIN is missing.
    pub cookie: Option<u64>,
    /// Whether this process is in the namespace.
    pub is_ours: bool,
    /// The oldest process of the cgroup.
    oldest: Process,
}

/// A process. Processes are ordered by age: an older process is less than a younger one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Process {
    /// The start of the process, in clock ticks since the boot.
    start: u64,
    pid: u32,
}

impl Process {
    /// The process that has this PID now; `None` if it has ended.
    fn of(pid: u32) -> Option<Self> {
        Some(Self { start: start_of(pid)?, pid })
    }
}

impl ClientNamespace {
    /// Finds the network namespace of the oldest process in a cgroup and all cgroups below it;
    /// `None` if there is no process. `known` is the result of the last search: if nothing has
    /// changed, the function does not enter the namespace again. May block while it reads the ages
    /// of up to 4,096 processes.
    ///
    /// # Errors
    /// If this process may not read the namespace of the oldest process: for another user's
    /// process, that requires CAP_SYS_PTRACE.
    pub fn find(cgroup: &Path, known: Option<Self>) -> io::Result<Option<Self>> {
        let processes = cgroup::each_process(cgroup).take(COMPARED);
        let mut processes: Vec<Process> = processes.filter_map(Process::of).collect();
        processes.sort_unstable();
        for process in processes {
            match Self::of(process, known) {
                // The process has ended since its age was read, or only some of its threads are
                // still running. The next oldest process decides.
                Err(error) if is_gone(&error) => {}
                result => return result.map(Some),
            }
        }
        Ok(None)
    }

    fn of(oldest: Process, known: Option<Self>) -> io::Result<Self> {
        let namespace = open(oldest.pid)?;
        // Another process may have this PID now.
        if Process::of(oldest.pid) != Some(oldest) {
            return Err(io::ErrorKind::NotFound.into());
        }
        let id = NamespaceId::of_open(&namespace)?;
        // The kernel reuses the numbers of namespaces that no longer exist, so an equal number
        // alone does not prove that the namespace is the same.
        let is_same = |known: &Self| (known.id, known.oldest) == (id, oldest) && known.cookie.is_some();
        if let Some(known) = known.filter(is_same) {
            return Ok(known);
        }
        let is_ours = NamespaceId::ours()? == id;
        let lists = if is_ours { SocketLists::open() } else { open_within(namespace) };
        let cookie = lists.and_then(|lists| lists.namespace()).ok();
        Ok(Self { id, cookie, is_ours, oldest })
    }

    pub const fn pid(&self) -> u32 {
        self.oldest.pid
    }

    /// Whether both values describe the same namespace, even if the oldest processes differ.
    pub fn is_namespace_of(&self, other: &Self) -> bool {
        (self.id, self.cookie) == (other.id, other.cookie)
    }
}

/// The processes of a client according to its flow records.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RecordedProcesses {
    /// Whether several processes have begun flows recently. Flows that began before the oldest
    /// running process of the records are ignored: after a restart of the client, they belong to
    /// its previous processes.
    pub are_several: bool,
    /// The cookie of the network namespace of the oldest process of the records that is still
    /// running; `None` if none is running. Reading this cookie requires no privilege.
    pub namespace: Option<u64>,
}

impl RecordedProcesses {
    /// Reads the records of a client's flows that began at most `within` ago. May block for a
    /// millisecond or two.
    ///
    /// # Errors
    /// If this process may not read the flow table.
    pub fn read(pins: &Pins, within: Duration) -> Result<Self, DatapathError> {
        let within = u64::try_from(within.as_nanos()).unwrap_or(u64::MAX);
        let processes = FlowTable::open(pins, false)?.processes_since(monotonic_ns().saturating_sub(within));
        // In another PID namespace the same PIDs belong to other processes.
        let running = processes.iter().filter(|_| numbers_are_ours());
        let oldest = running.filter_map(|(pid, last)| Some((Process::of(*pid)?, last.namespace))).min();
        let began_ns = oldest.map_or(0, |(process, _)| monotonic_of_start(process.start));
        let count = processes.values().filter(|last| last.start_ns >= began_ns).count();
        Ok(Self { are_several: count > 1, namespace: oldest.map(|(_, namespace)| namespace) })
    }
}

fn is_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH)
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command, Stdio};

    use rustix::thread::UnshareFlags;

    use super::*;

    /// A running process, which is killed when this value is dropped.
    struct Started(Child);

    impl Started {
        /// Starts a process, after a call of unshare(2) with these flags.
        fn new(flags: UnshareFlags) -> Self {
            let mut command = Command::new("cat");
            command.stdin(Stdio::piped());
            // SAFETY: the closure makes one system call and allocates nothing.
            unsafe {
                std::os::unix::process::CommandExt::pre_exec(&mut command, move || {
                    rustix::thread::unshare_unsafe(flags)?;
                    Ok(())
                });
            }
            Self(command.spawn().expect("root starts a process in a namespace"))
        }

        /// Like [`Started::new`], but waits until the kernel's clock has ticked, so that a process
        /// that is started later is younger.
        fn and_wait(flags: UnshareFlags) -> Self {
            let started = Self::new(flags);
            let before = start_of(started.0.id()).expect("the process is running");
            let is_younger =
                |_| start_of(Self::new(UnshareFlags::empty()).pid()).is_some_and(|now| now > before);
            // Starting a process takes a fraction of a millisecond, and a tick is 10 ms long at
            // most.
            assert!((0..10_000).any(is_younger), "the kernel's clock did not advance");
            started
        }

        fn pid(&self) -> u32 {
            self.0.id()
        }
    }

    impl Drop for Started {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    /// A directory that lists processes as a cgroup does, with one subdirectory.
    fn listing(here: &[u32], below: &[u32]) -> tempfile::TempDir {
        let cgroup = tempfile::tempdir().expect("a temporary directory can be created");
        std::fs::create_dir(cgroup.path().join("below")).expect("the subdirectory can be created");
        for (path, pids) in [("cgroup.procs", here), ("below/cgroup.procs", below)] {
            let lines: String = pids.iter().map(|pid| format!("{pid}\n")).collect();
            std::fs::write(cgroup.path().join(path), lines).expect("the file can be written");
        }
        cgroup
    }

    fn find(here: &[u32], below: &[u32], known: Option<ClientNamespace>) -> Option<ClientNamespace> {
        ClientNamespace::find(listing(here, below).path(), known).expect("root may read the namespace")
    }

    #[test]
    fn the_oldest_process_decides_in_any_position() {
        let first = Started::and_wait(UnshareFlags::NEWNET);
        let others: Vec<Started> = (0..3).map(|_| Started::new(UnshareFlags::NEWNET)).collect();
        let others: Vec<u32> = others.iter().map(Started::pid).collect();
        let there = NamespaceId::of(first.pid()).unwrap();
        for found in [
            find(&[others.clone(), vec![first.pid()]].concat(), &[], None),
            find(&others, &[first.pid()], None),
        ] {
            let found = found.expect("a process was found");
            assert_eq!((found.id, found.pid(), found.is_ours), (there, first.pid(), false));
        }
        assert_eq!(find(&[0, u32::MAX], &[], None), None, "there is no process");
        let ours = find(&[others[0], std::process::id()], &[], None).expect("a process was found");
        assert_eq!((ours.id, ours.is_ours), (NamespaceId::ours().unwrap(), true));
    }

    #[test]
    fn the_cookie_matches_that_of_sockets_in_the_namespace() {
        let there = Started::new(UnshareFlags::NEWNET);
        let found = find(&[there.pid()], &[], None).expect("a process was found");
        let lists =
            crate::read::namespaces::open_in_namespace_of(there.pid()).expect("root may enter the namespace");
        assert_eq!(found.cookie, lists.namespace().ok());
        let ours = find(&[std::process::id()], &[], None).expect("a process was found");
        assert_eq!(ours.cookie, SocketLists::open().and_then(|lists| lists.namespace()).ok());
        assert!(!ours.is_namespace_of(&found) && NamespaceId::ours().unwrap() == ours.id);
    }

    #[test]
    fn a_known_namespace_is_not_entered_again_until_its_process_ends() {
        let first = Started::and_wait(UnshareFlags::NEWNET);
        let second = Started::new(UnshareFlags::NEWNET);
        let both = [second.pid(), first.pid()];
        // This cookie belongs to no namespace: if the result contains it, the namespace was not
        // entered.
        let known = find(&both, &[], None).map(|found| ClientNamespace { cookie: Some(u64::MAX), ..found });
        assert_eq!(find(&both, &[], known), known);
        drop(first);
        let found = find(&both, &[], known).expect("a process was found");
        assert_eq!(found.id, NamespaceId::of(second.pid()).unwrap());
        assert_ne!(found.cookie, Some(u64::MAX));
        drop(second);
        assert_eq!(find(&both, &[], Some(found)), None);
    }
}
