//! The errors of operations on the kernel: one variant per operation that can fail.

mod refusal;

use std::io;
use std::path::PathBuf;

use aya::programs::ProgramError;
use aya::sys::SyscallError;
use lb_common::abi::ABI_VERSION;
use lb_common::abi::host::HOST_ABI_VERSION;
use lb_host::trust::Untrusted;
use thiserror::Error;

use refusal::Refusal;

/// A failed operation. The message contains a remedy if one is known.
#[derive(Debug, Error)]
pub enum DatapathError {
    #[error(
        "no cgroup2 file system is mounted: mount one with `mount -t cgroup2 none /sys/fs/cgroup/unified`"
    )]
    NoCgroup2,
    #[error("cannot read /proc/self/mountinfo")]
    MountInfo(#[source] io::Error),
    #[error("cannot find this process's cgroup: no cgroup2 mount shows the root of its cgroup namespace")]
    NoOwnCgroup2,
    #[error("cannot read /proc/self/cgroup")]
    OwnCgroup(#[source] io::Error),
    #[error("cannot read the cgroup of process {pid}")]
    CgroupOfProcess {
        pid: u32,
        #[source]
        source: io::Error,
    },
    #[error("cgroup {} does not exist: start the unit that creates it, or create it with `mkdir -p`", .0.display())]
    NoCgroup(PathBuf),
    #[error("{} leads out of the cgroup2 mount", .0.display())]
    OutsideCgroup2(PathBuf),
    #[error("cannot open cgroup {}", path.display())]
    OpenCgroup {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{} is not on a bpf file system: mount one with `mount -t bpf -o mode=0700 bpf /sys/fs/bpf`, or name another directory with --pins", .0.display())]
    NoBpffs(PathBuf),
    #[error(transparent)]
    Untrusted(#[from] Untrusted),
    #[error("cannot create cgroup {}", path.display())]
    MakeCgroup {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot enter cgroup {}", path.display())]
    EnterCgroup {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(
        "cgroup {} cannot contain processes, because it distributes resources to its child cgroups: start the command in \
         one of these",
        .0.display()
    )]
    InnerCgroup(PathBuf),
    #[error("cannot create or open {}", path.display())]
    PinDirectory {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("another socklb process has locked {}: stop that process first", .0.display())]
    Locked(PathBuf),
    #[error("cannot {operation} map {}", path.display())]
    Map {
        path: PathBuf,
        operation: &'static str,
        #[source]
        source: io::Error,
    },
    #[error("{} is not one of socklb's maps or links: remove it, or name another directory with --pins", .0.display())]
    Foreign(PathBuf),
    #[error(
        "{} has {found}, but this socklb (ABI {ABI_VERSION}) needs {wanted}: restore the limits with which the map was \
         created, or remove the client's pins with `{detach}` (its connects are then not balanced until the next start)",
        path.display()
    )]
    Shape { path: PathBuf, detach: String, found: String, wanted: String },
    #[error(
        "{} has {found}, but this socklb (host ABI {HOST_ABI_VERSION}) needs {wanted}: another program created this map; remove \
         all clients with `socklb detach --all`, and then this map",
        path.display()
    )]
    HostShape { path: PathBuf, found: String, wanted: String },
    #[error(
        "the pins of client {client} are incomplete: {} is missing, although programs are attached; remove the pins with \
         `{detach}`",
        path.display()
    )]
    Incomplete { path: PathBuf, client: String, detach: String },
    #[error("the pinned maps of client {client} are inconsistent ({what}); remove them with `{detach}`")]
    Contradiction { client: String, detach: String, what: String },
    #[error(
        "the kernel does not permit socklb to load programs: socklb needs root, or CAP_BPF and CAP_NET_ADMIN, on most \
         kernels also CAP_PERFMON (below Linux 5.11 also an unlimited RLIMIT_MEMLOCK)"
    )]
    Privilege(#[source] io::Error),
    #[error("the kernel lacks a feature that socklb needs")]
    Unsupported(#[source] io::Error),
    #[error("cannot probe the kernel's features")]
    Probe(#[source] io::Error),
    #[error("cannot load socklb's kernel object")]
    Load(#[source] Box<aya::EbpfError>),
    #[error(
        "the kernel does not permit socklb to create maps: below Linux 5.11 maps count as locked memory, so \
         RLIMIT_MEMLOCK must be unlimited (LimitMEMLOCK=infinity in a unit)"
    )]
    LoadDenied(#[source] Box<aya::EbpfError>),
    #[error("cannot load program {program}: out of {lack}")]
    Shortage {
        program: &'static str,
        lack: &'static str,
        #[source]
        source: io::Error,
    },
    #[error(
        "the kernel's verifier rejected program {program}{refusal} (some kernels accept the program only with CAP_PERFMON)"
    )]
    Verifier {
        program: &'static str,
        refusal: Refusal,
        #[source]
        source: io::Error,
    },
    #[error("cannot read the id of a program that was just loaded")]
    Program(#[source] io::Error),
    #[error("cannot attach {hook} to {}", cgroup.display())]
    Attach {
        hook: &'static str,
        cgroup: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot attach the program to the interface")]
    AttachInterface(#[source] io::Error),
    #[error("cannot list the programs that are attached to {}", cgroup.display())]
    Query {
        cgroup: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot read or update link {}", path.display())]
    Link {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot pin {}", path.display())]
    Pin {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot remove {}", path.display())]
    Unpin {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot open the kernel's lists of sockets (sock_diag)")]
    SocketLists(#[source] io::Error),
    #[error("this kernel cannot close connections: it was built without CONFIG_INET_DIAG_DESTROY")]
    NoSocketDestroy,
    #[error("the kernel does not permit socklb to close connections: that needs CAP_NET_ADMIN")]
    MayNotDestroySockets(#[source] io::Error),
    #[error("client {client}: cannot compare its flow records with the kernel's lists of sockets")]
    Reclaim {
        client: String,
        #[source]
        source: io::Error,
    },
    #[error(
        "cannot list the sockets that processes have open (needs Linux 5.8, CAP_PERFMON and the host's PID namespace)"
    )]
    Holders(#[source] io::Error),
    #[error("cannot wait until the running kernel programs have ended")]
    Grace(#[source] io::Error),
}

impl DatapathError {
    /// The error for a program that the kernel did not load. If a resource was exhausted, the error
    /// names this resource and not the verifier.
    pub(crate) fn refused(program: &'static str, error: ProgramError) -> Self {
        let refusal = Refusal::of(&error);
        let source = match error {
            ProgramError::LoadError { io_error, .. } | ProgramError::IOError(io_error) => io_error,
            ProgramError::SyscallError(SyscallError { io_error, .. }) => io_error,
            other => io::Error::other(other),
        };
        let lack = match source.raw_os_error() {
            Some(libc::EMFILE) => {
                "file descriptors of this process (raise LimitNOFILE= of the unit, or `ulimit -n`)"
            }
            Some(libc::ENFILE) => "file descriptors of the host (raise the sysctl fs.file-max)",
            Some(libc::ENOMEM) => "memory",
            _ => return Self::Verifier { program, refusal, source },
        };
        Self::Shortage { program, lack, source }
    }

    /// The error for a failed probe, or for the first call that needed a privilege.
    pub(crate) fn of_probe(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::PermissionDenied => Self::Privilege(error),
            io::ErrorKind::Unsupported => Self::Unsupported(error),
            _ => Self::Probe(error),
        }
    }

    /// Whether a missing privilege caused the error.
    pub fn is_permission(&self) -> bool {
        matches!(self, Self::Privilege(_)) || self.is_caused_by(io::ErrorKind::PermissionDenied)
    }

    /// Converts the error of a failed load into the error for a denied load, which names the
    /// remedy. Returns any other error unchanged.
    pub fn into_denied(self) -> Self {
        match self {
            Self::Load(source) => Self::LoadDenied(source),
            other => other,
        }
    }

    /// Whether the pins have another shape than the configured limits require.
    pub fn is_shape(&self) -> bool {
        matches!(self, Self::Shape { .. })
    }

    /// Whether a file, pin or other object was not found.
    pub fn is_missing(&self) -> bool {
        self.is_caused_by(io::ErrorKind::NotFound)
    }

    /// Whether the cause is an exhausted resource that may be free again later, such as descriptors
    /// or memory.
    pub fn is_shortage(&self) -> bool {
        const SHORTAGES: [i32; 5] = [libc::EMFILE, libc::ENFILE, libc::ENOMEM, libc::EAGAIN, libc::ENOSPC];
        self.has_cause(|error| error.raw_os_error().is_some_and(|errno| SHORTAGES.contains(&errno)))
    }

    pub(crate) fn is_caused_by(&self, kind: io::ErrorKind) -> bool {
        self.has_cause(|error| error.kind() == kind)
    }

    fn has_cause(&self, is_it: impl Fn(&io::Error) -> bool) -> bool {
        let mut source = std::error::Error::source(self);
        // Bound: error chains have only a few links.
        while let Some(error) = source {
            if error.downcast_ref::<io::Error>().is_some_and(&is_it) {
                return true;
            }
            source = error.source();
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shortage_is_named_for_every_failing_call() {
        let full = || io::Error::from_raw_os_error(libc::EMFILE);
        let errors = [
            ProgramError::IOError(full()),
            ProgramError::SyscallError(SyscallError { call: "bpf_prog_load", io_error: full() }),
        ];
        for error in errors {
            let error = DatapathError::refused("socklb_tcp", error);
            assert!(matches!(error, DatapathError::Shortage { .. }), "{error}");
            assert!(error.to_string().contains("ulimit -n"), "{error}");
        }
        let other = DatapathError::refused("socklb_tcp", ProgramError::NotLoaded);
        assert!(matches!(other, DatapathError::Verifier { .. }), "{other}");
    }
}
