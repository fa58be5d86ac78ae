//! Examines whether this host meets the requirements of socklb: features of the kernel, cgroup2,
//! bpffs, privileges.

use lb_kernel::{FEATURES, Features, Host};
use lb_view::diagnosis::{Diagnosis, Severity};

use crate::config::Paths;

/// The help for missing privileges. Only root can grant them.
const GIVE_ALL: &str = "run the daemon as root, or (as root) give USER all three capabilities: `setpriv \
                        --reuid USER --regid GROUP --init-groups --inh-caps +bpf,+net_admin,+perfmon \
                        --ambient-caps +bpf,+net_admin,+perfmon socklb run` (in a unit \
                        AmbientCapabilities=CAP_BPF CAP_NET_ADMIN CAP_PERFMON)";

/// Examines the host. Returns the kernel's features, if they could be probed.
pub fn examine(diagnosis: &mut Diagnosis, paths: &Paths) -> Option<Features> {
    let host = lb_kernel::host(&paths.pins);
    let features = kernel(diagnosis, &host);
    cgroup2(diagnosis);
    bpffs(diagnosis, &host, paths);
    privileges(diagnosis, &host, features);
    if let Some(features) = features {
        optional(diagnosis, features);
    }
    features
}

fn kernel(diagnosis: &mut Diagnosis, host: &Host) -> Option<Features> {
    if host.btf {
        diagnosis.ok("kernel", format!("Linux {}, with type information (BTF)", host.release));
    } else {
        let text = format!("Linux {} has no type information (no /sys/kernel/btf/vmlinux)", host.release);
        let help = "boot a kernel with CONFIG_DEBUG_INFO_BTF=y: socklb declares its maps with types";
        diagnosis.add("kernel", Severity::Problem, text, Some(help));
    }
    lb_kernel::probe().ok()
}

fn cgroup2(diagnosis: &mut Diagnosis) {
    match lb_kernel::cgroup2_mount() {
        Ok(mount) => {
            diagnosis.ok("cgroup2", format!("mounted at {}", mount.display()));
            if let Some(warning) = lb_kernel::namespace_warning() {
                diagnosis.add("cgroup2", Severity::Note, warning, None);
            }
            if lb_kernel::sockets_have_their_cgroup() == Some(false) {
                let text = "the kernel has no cgroup for new sockets, so nothing is balanced: before Linux 5.15, sockets lose their cgroup once the \
                            controller net_cls or net_prio of cgroup version 1 is used";
                let help = "boot with cgroup_no_v1=net_cls,net_prio, or a newer kernel";
                diagnosis.add("cgroup2", Severity::Problem, text, Some(help));
            }
        }
        Err(error) => diagnosis.add("cgroup2", Severity::Problem, error.to_string(), None),
    }
}

fn bpffs(diagnosis: &mut Diagnosis, host: &Host, paths: &Paths) {
    let pins = paths.pins.display();
    if host.bpffs {
        diagnosis.ok("bpffs", format!("{pins} is on a bpf file system"));
    } else {
        let text = format!("{pins} is not on a bpf file system");
        diagnosis.add("bpffs", Severity::Problem, text, Some("mount -t bpf -o mode=0700 bpf /sys/fs/bpf"));
    }
}

fn privileges(diagnosis: &mut Diagnosis, host: &Host, features: Option<Features>) {
    let missing = || host.capabilities.iter().filter(|capability| !capability.held);
    for capability in &host.capabilities {
        let text = format!("{}: {}", capability.name, capability.why);
        // All missing capabilities have the same help, because a user without one of them cannot
        // grant any. The help therefore appears only once, at the last missing capability.
        let is_last = missing().next_back().is_some_and(|last| last == capability);
        let help = is_last.then_some(GIVE_ALL);
        if capability.held {
            diagnosis.ok("privileges", text);
        } else {
            let state = if capability.needed { Severity::Problem } else { Severity::Note };
            diagnosis.add("privileges", state, format!("{text}; missing"), help);
        }
    }
    match features.map(lb_kernel::try_programs) {
        Some(Ok(())) => diagnosis.ok("programs", "the kernel's verifier accepts every program"),
        Some(Err(error)) => diagnosis.add(
            "programs",
            Severity::Problem,
            crate::error::chain(&error),
            Some(
                "give the daemon CAP_PERFMON: the verifier then follows fewer paths of speculative execution",
            ),
        ),
        None => diagnosis.add(
            "programs",
            Severity::Problem,
            match lb_kernel::probe() {
                Ok(_) => "the programs could not be loaded for a test".to_owned(),
                Err(error) => crate::error::chain(&error),
            },
            Some("run socklb doctor as root, or with the capabilities above"),
        ),
    }
    match host.memlock {
        None => diagnosis.ok("locked memory", "unlimited"),
        Some(bytes) => diagnosis.add(
            "locked memory",
            Severity::Note,
            format!(
                "limited to {bytes} bytes; the limit matters only before Linux 5.11, where a daemon that \
                 runs as root raises it itself"
            ),
            Some("ulimit -l unlimited (in a unit: LimitMEMLOCK=infinity)"),
        ),
    }
}

fn optional(diagnosis: &mut Diagnosis, features: Features) {
    let mut feature = |name: &str, on: bool, off: &str| {
        let (state, text) = if on {
            (Severity::Ok, format!("{name}: on"))
        } else {
            (Severity::Note, format!("{name}: off; {off}"))
        };
        diagnosis.add("features", state, text, None);
    };
    for of_kernel in &FEATURES {
        let off = format!("this needs {}. {}", of_kernel.takes, of_kernel.without);
        feature(of_kernel.title, of_kernel.is_in(features), &off);
    }
    feature(
        "reclaiming flow records",
        lb_kernel::can_reclaim(),
        "this needs lists of TCP and UDP sockets (sock_diag) and the cookies of network namespaces (Linux \
         5.14). If no program saw the end of a flow, the flow counts as active until no process has held its \
         socket for ten minutes",
    );
    let holders = lb_kernel::try_holders();
    feature(
        "finding which sockets processes hold",
        holders.is_ok(),
        &format!(
            "{}. The flow of an open socket that is not connected is no longer counted when two lists of \
             sockets in a row did not contain the socket. A flow in a network namespace that cannot be inspected counts \
             as active for ever if no program saw its end",
            holders.as_ref().err().map_or_else(String::new, |error| crate::error::chain(error))
        ),
    );
}
