//! The optional features of this kernel, found by probes and never by the version number. One table
//! lists these features. Each feature has a probe program (`lb-ebpf/src/bin/probes.rs`), which the
//! kernel accepts if the kernel has the feature.
//!
//! The daemon's log, `doctor`, the documentation and the constants of the programs all use this
//! table.

use std::io;
use std::path::Path;

use aya::Ebpf;
use aya::programs::ProgramError;

use super::btf::{self, Casts, Offsets};
use super::loader::{self, Image, load_program};
use crate::error::DatapathError;
use crate::host::loader::objects;
use crate::sys;

/// Which of [`FEATURES`] the kernel has. socklb also works without these features, with the losses
/// in `Feature::without`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features {
    pub fetching_atomics: bool,
    pub set_retval: bool,
    pub knows_mptcp: bool,
    pub socket_errors: bool,
    pub outcomes_at_release: bool,
    pub connect_timeouts: bool,
    pub knows_kernel_sockets: bool,
    pub kernel_casts: bool,
    /// The positions of the fields that some programs read, if the kernel describes its types.
    pub offsets: Option<Offsets>,
}

/// An optional feature of the kernel.
pub struct Feature {
    /// The name of the feature's probe, which is also the feature's name in the log and in JSON.
    pub name: &'static str,
    /// The name of the feature in words.
    pub title: &'static str,
    /// The kernel version, kernel options and capabilities that the feature needs.
    pub takes: &'static str,
    /// The loss without the feature, in sentences.
    pub without: &'static str,
    /// The constants by which the programs detect the feature; they are 0 if the kernel lacks the
    /// feature.
    globals: &'static [(&'static str, Value)],
    field: fn(&mut Features) -> &mut bool,
}

/// The value of a constant if the kernel has the feature.
enum Value {
    One,
    /// The position of a field.
    Offset(fn(Offsets) -> u32),
    /// The position of a field that is read through pointers to the kernel's own structures, or
    /// another number from [`Casts`].
    Cast(fn(Casts) -> u32),
}

const BTF_AND_PERFMON: &str = "the kernel's types (CONFIG_DEBUG_INFO_BTF) and CAP_PERFMON";

/// All optional features, in the order of the documentation.
pub static FEATURES: [Feature; 8] = [
    Feature {
        name: "fetching_atomics",
        title: "compare-and-swap in programs",
        takes: "Linux 5.12",
        without: "Flow records are stored in a hash, which is slower",
        globals: &[],
        field: |features| &mut features.fetching_atomics,
    },
    Feature {
        name: "set_retval",
        title: "errno of a refused connect",
        takes: "Linux 5.18",
        without: "A refused connect fails with EPERM instead of the service's errno",
        globals: &[("HAS_SET_RETVAL", Value::One)],
        field: |features| &mut features.set_retval,
    },
    Feature {
        name: "socket_errors",
        title: "causes of failure",
        takes: BTF_AND_PERFMON,
        without: "With accounting = \"full\", failed flows end as \"unknown\". Ejection is off because causes are unknown",
        globals: &[
            ("SK_ERR", Value::Offset(|offsets| offsets.sk_err)),
            ("SK_ERR_SOFT", Value::Offset(|offsets| offsets.sk_err_soft)),
            ("ERROR_QUEUE", Value::Offset(|offsets| offsets.error_queue)),
            ("ERROR_QUEUE_LENGTH", Value::Offset(|offsets| offsets.error_queue_length)),
            ("QUEUED_ERROR", Value::Offset(|offsets| offsets.queued_error)),
            ("BOUND_DEVICE", Value::Offset(|offsets| offsets.bound_device)),
            ("SOCKET_MARK", Value::Offset(|offsets| offsets.socket_mark)),
            ("USER_LOCKS", Value::Offset(|offsets| offsets.user_locks)),
            ("USER_LOCKS_MASK", Value::Offset(|offsets| offsets.user_locks_mask)),
            ("SOCKET_FILTER", Value::Offset(|offsets| offsets.socket_filter)),
            ("SOCKET_FLAGS", Value::Offset(|offsets| offsets.socket_flags)),
            ("UNICAST_TTL", Value::Offset(|offsets| offsets.unicast_ttl)),
        ],
        field: |features| &mut features.socket_errors,
    },
    Feature {
        name: "outcomes_at_release",
        title: "outcomes at release",
        takes: BTF_AND_PERFMON,
        without: "With accounting = \"active\", it is unknown whether a flow was established. Ejection is off because causes are unknown",
        globals: &[
            ("RELEASED_SK_ERR", Value::Offset(|offsets| offsets.sk_err)),
            ("RELEASED_SK_ERR_SOFT", Value::Offset(|offsets| offsets.sk_err_soft)),
            ("RELEASED_CALLBACKS", Value::Offset(|offsets| offsets.bpf_sock_ops_cb_flags)),
            ("RELEASED_SRTT", Value::Offset(|offsets| offsets.srtt_us)),
            ("RELEASED_RETRANSMITS", Value::Offset(|offsets| offsets.total_retrans)),
            ("RELEASED_BYTES_RECEIVED", Value::Offset(|offsets| offsets.bytes_received)),
            ("RELEASED_BYTES_SENT", Value::Offset(|offsets| offsets.bytes_acked)),
        ],
        field: |features| &mut features.outcomes_at_release,
    },
    Feature {
        name: "connect_timeouts",
        title: "timeouts of connects",
        takes: BTF_AND_PERFMON,
        without: "connect_timeout has no effect",
        globals: &[("SYN_RETRIES", Value::Offset(|offsets| offsets.icsk_syn_retries))],
        field: |features| &mut features.connect_timeouts,
    },
    Feature {
        name: "knows_kernel_sockets",
        title: "recognizing the kernel's own sockets",
        takes: "Linux 6.0, the kernel's types (CONFIG_DEBUG_INFO_BTF) and CAP_PERFMON",
        without: "Connects that the kernel makes for a client's process, for example for a mounted file system, are balanced \
                  like the process's own connects",
        globals: &[
            ("KERNEL_SOCKET", Value::Offset(|offsets| offsets.sk_kern_sock)),
            ("KERNEL_SOCKET_MASK", Value::Offset(|offsets| offsets.sk_kern_sock_mask)),
        ],
        field: |features| &mut features.knows_kernel_sockets,
    },
    Feature {
        name: "knows_mptcp",
        title: "recognizing sockets of MPTCP",
        takes: "Linux 6.0 and CAP_PERFMON",
        without: "A connection of an MPTCP socket remains in its backend's active count until the reclaim pass removes its record",
        globals: &[("KNOWS_MPTCP", Value::One)],
        field: |features| &mut features.knows_mptcp,
    },
    Feature {
        name: "kernel_casts",
        title: "loads from the kernel's structures",
        takes: "Linux 6.2, the kernel's types (CONFIG_DEBUG_INFO_BTF) and CAP_PERFMON",
        without: "Each connect and each close calls more helpers, and is slower",
        globals: &[
            ("TCP_SOCK", Value::Cast(|casts| casts.tcp_sock)),
            ("EVENT", Value::Cast(|casts| casts.bpf_sock_ops_kern)),
            ("EVENT_SOCKET", Value::Cast(|casts| casts.sock_ops_sk)),
            ("SOCKET_COOKIE", Value::Cast(|casts| casts.skc_cookie)),
            ("SOCKET_NAMESPACE", Value::Cast(|casts| casts.skc_net)),
            ("NAMESPACE_COOKIE", Value::Cast(|casts| casts.net_cookie)),
        ],
        field: |features| &mut features.kernel_casts,
    },
];

impl Feature {
    /// Whether `features` contains this feature.
    pub fn is_in(&self, mut features: Features) -> bool {
        *(self.field)(&mut features)
    }

    /// Whether the programs read fields of the kernel's structures for this feature.
    fn reads(&self) -> bool {
        self.globals.iter().any(|(_, value)| !matches!(value, Value::One))
    }

    /// The values of the feature's constants if the kernel has the feature.
    fn globals(&self, offsets: Option<Offsets>) -> impl Iterator<Item = (&'static str, u32)> {
        self.globals.iter().map(move |(name, value)| match value {
            Value::One => (*name, 1),
            Value::Offset(field) => (*name, offsets.map_or(0, field)),
            Value::Cast(field) => (*name, offsets.and_then(|offsets| offsets.casts).map_or(0, field)),
        })
    }
}

impl Features {
    /// The name of each feature, and whether the kernel has it.
    pub fn named(self) -> impl Iterator<Item = (&'static str, bool)> {
        FEATURES.iter().map(move |feature| (feature.name, feature.is_in(self)))
    }

    /// Probes the kernel.
    ///
    /// # Errors
    /// If this process may load no program at all (usually because of a missing privilege), or if
    /// memory or descriptors for the probes are exhausted.
    pub fn probe() -> Result<Self, DatapathError> {
        // If the kernel refuses even a program that does nothing, the results of the probes would
        // be meaningless. This check does not use aya: without privilege, aya reports a kernel
        // without any feature instead of EPERM.
        if !sys::accepts_nothing().map_err(DatapathError::of_probe)? {
            return Err(DatapathError::Unsupported(io::Error::new(
                io::ErrorKind::Unsupported,
                "the kernel refuses an empty cgroup/connect4 program (needs Linux 5.10 with CONFIG_CGROUP_BPF)",
            )));
        }
        check_loader(false).map_err(DatapathError::of_probe)?;
        // If the kernel does not describe its types, or if the expected fields are missing, the
        // programs read no fields.
        let offsets = btf::offsets(Path::new(btf::VMLINUX)).ok();
        let mut probes = load_probes(offsets)?;
        let mut found = Self { offsets, ..Self::default() };
        for feature in FEATURES.iter().filter(|feature| offsets.is_some() || !feature.reads()) {
            *(feature.field)(&mut found) =
                is_accepted(&mut probes, feature.name).map_err(DatapathError::of_probe)?;
        }
        // Programs must balance the sockets that the kernel opens for paths of MPTCP, and only
        // `knows_mptcp` distinguishes these from the kernel's own sockets.
        found.knows_kernel_sockets &= found.knows_mptcp;
        check_loader(found.outcomes_at_release).map_err(DatapathError::of_probe)?;
        Ok(found)
    }

    /// The values of all constants that depend on the kernel's features.
    pub fn globals(self) -> impl Iterator<Item = (&'static str, u32)> {
        let value = move |feature: &'static Feature| {
            let is_on = feature.is_in(self);
            feature.globals(self.offsets).map(move |(name, value)| (name, if is_on { value } else { 0 }))
        };
        FEATURES.iter().flat_map(value)
    }

    /// The kernel function that the programs may call, and the fields that the programs read with
    /// this function; `None` if the kernel lacks the feature.
    pub fn casts(self) -> Option<Casts> {
        self.offsets.and_then(|offsets| offsets.casts).filter(|_| self.kernel_casts)
    }

    /// The names of the features that the kernel has (`there` is true) or lacks, separated by
    /// blanks.
    pub fn names(self, there: bool) -> String {
        let names: Vec<_> = self.named().filter(|(_, has)| *has == there).map(|(name, _)| name).collect();
        names.join(" ")
    }
}

fn load_probes(offsets: Option<Offsets>) -> Result<Ebpf, DatapathError> {
    let globals: Vec<_> = FEATURES.iter().flat_map(|feature| feature.globals(offsets)).collect();
    // The probes contain only some of these constants, because a probe reads only one of the fields
    // that the programs of clients read. So an object that lacks some of the constants must not be
    // rejected.
    let globals = globals.iter().map(|(name, value)| (*name, (bytemuck::bytes_of(value), false)));
    // The probes have no maps to pin.
    let casts = offsets.and_then(|offsets| offsets.casts);
    loader::load_pinned(&Image::new(objects::PROBES, globals.collect(), &[], casts)?, &[], [])
}

fn is_accepted(probes: &mut Ebpf, name: &str) -> io::Result<bool> {
    match load_program(probes, name) {
        Ok(_) => Ok(true),
        // The verifier returns EINVAL for unknown instructions or helpers, and EACCES for
        // instructions or helpers that it does not allow.
        Err(ProgramError::LoadError { io_error, .. })
            if matches!(io_error.raw_os_error(), Some(libc::EINVAL | libc::EACCES)) =>
        {
            Ok(false)
        }
        Err(ProgramError::LoadError { io_error, .. }) => Err(io_error),
        Err(error) => Err(io::Error::other(error)),
    }
}

/// Checks that aya has detected the kernel's features correctly. aya probes once per process. If a
/// probe fails for a temporary reason, aya treats the feature as missing, and this process may
/// never be able to create maps; only another process can retry. `may_trace`: whether this process
/// may load tracing programs (CAP_PERFMON), with which aya probes some features.
fn check_loader(may_trace: bool) -> io::Result<()> {
    let found = sys::without_signals(aya::features);
    let types = found.btf().is_some_and(|btf| btf.btf_func() && btf.btf_func_global() && btf.btf_datasec());
    let is_sound =
        types && found.bpf_global_data() && (!may_trace || found.bpf_name() && found.bpf_probe_read_kernel());
    if is_sound {
        return Ok(());
    }
    Err(io::Error::other(
        "the kernel refused a probe that every kernel since Linux 5.10 accepts, probably because it is out of memory or file \
         descriptors (below Linux 5.11 perhaps out of locked memory, RLIMIT_MEMLOCK): start socklb again",
    ))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use lb_common::constants::NAMES;

    use super::*;
    use crate::host::loader::shape;

    #[test]
    fn every_feature_has_a_probe_and_constants_of_the_programs() {
        let probes = aya_obj::Object::parse(objects::PROBES).unwrap();
        let names: BTreeSet<_> = FEATURES.iter().map(|feature| feature.name).collect();
        assert!(shape::declared(objects::PROBES).is_empty(), "probes declare no maps");
        assert_eq!(probes.programs.keys().map(String::as_str).collect::<BTreeSet<_>>(), names);
        let symbols = |object: &[u8]| -> BTreeSet<String> {
            let text = String::from_utf8_lossy(object);
            text.split('\0').map(str::to_owned).collect()
        };
        let of_probes = symbols(objects::PROBES);
        for feature in &FEATURES {
            assert!(feature.globals.iter().all(|(name, _)| NAMES.contains(name)), "{}", feature.name);
            let reads = feature.globals.iter().any(|(name, _)| of_probes.contains(*name));
            assert_eq!(reads, feature.reads(), "{}", feature.name);
        }
    }

    #[test]
    fn every_feature_has_its_own_field() {
        for feature in &FEATURES {
            let mut features = Features::default();
            *(feature.field)(&mut features) = true;
            let there: Vec<&str> = features.named().filter(|(_, has)| *has).map(|(name, _)| name).collect();
            assert_eq!(there, [feature.name]);
            assert_eq!(features.names(true), feature.name);
        }
    }

    #[test]
    fn the_documentation_contains_every_feature() {
        let mut table = String::from("| ability | in JSON | needs | without |\n|---|---|---|---|\n");
        for Feature { name, title, takes, without, .. } in &FEATURES {
            table += &format!("| {title} | `{name}` | {takes} | {without} |\n");
        }
        let text = include_str!("../../../../docs/reference/limits.md");
        assert!(text.contains(&table), "docs/reference/limits.md must have this table:\n{table}");
    }
}
